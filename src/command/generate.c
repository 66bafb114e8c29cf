/* hapt generate: continues texts with a model or a checkpoint. */
#include <errno.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "forward.h"
#include "hapt/text.h"
#include "json_print.h"

const char hapt_command_generate_help[] =
    "Continues --prompt, or each prompt of --prompt-tokens, with the weights of --checkpoint, or else of the\n"
    "model file. The plan is --plan, or that of the checkpoint; it runs as in training, forward passes only. Each\n"
    "new token takes one pass over the last T tokens (T: the model's sequence), with positions that begin at 0;\n"
    "nothing is cached.\n"
    "\n"
    "The most likely token follows, or with --temperature one that is drawn (--draw-from, --seed). A draw depends on\n"
    "the seed, the number of the prompt and of the token, not on the plan, except where rounding decides.\n"
    "--end-token ends a text, of which it is the last token. Experts need room for every token (--capacity-factor 0).\n"
    "\n"
    "Prints the new tokens of each prompt on a line of standard output, \"5,17,3\"; all else goes to standard error.\n"
    "tools/hapt_tokens.py turns text into tokens (--encode) and back (--decode).\n"
    "With --prompt, the tokens are the bytes of the text, as hapt data makes them, and the new text is printed; bytes\n"
    "that are no UTF-8 become '?'.\n"
    "--json prints one object: format \"hapt-generation\", version, sequences (prompt, tokens, ended; with --prompt\n"
    "also text), step (of the checkpoint).\n";

enum { BYTES = 256 }; /* vocabulary of a model whose tokens are bytes */

static enum hapt_status bad_prompt(const char *at)
{
    return hapt_fail(HAPT_ERR_USAGE, "give tokens as 5,17,3; semicolons separate prompts",
                     "--prompt-tokens: no token at \"%.20s\"", at);
}

/* Reads a prompt, which ends at ';' or at the end of the text; *rest: behind it. */
static enum hapt_status read_prompt(const char *text, int64_t vocabulary, int64_t most, struct hapt_arena *arena,
                                    struct hapt_prompt *prompt, const char **rest)
{
    int64_t count = 1;
    for (const char *c = text; *c && *c != ';'; c++) count += *c == ',';
    prompt->token = hapt_arena_alloc(arena, (size_t)(count + most), sizeof *prompt->token);
    if (!prompt->token) return HAPT_ERR_MEMORY;
    for (int64_t i = 0; i < count; i++) {
        char *end;
        errno = 0;
        const long long token = strtoll(text, &end, 10);
        while (end > text && *end == ' ') end++;
        const char wanted = i + 1 < count ? ',' : ';';
        if (end == text || errno != 0 || (*end != wanted && !(i + 1 == count && *end == '\0'))) return bad_prompt(text);
        if (token < 0 || token >= vocabulary)
            return hapt_fail(HAPT_ERR_USAGE, "use the tokenizer of the model",
                             "--prompt-tokens: token %lld is outside the model's vocabulary of %lld", token,
                             (long long)vocabulary);
        prompt->token[i] = (int32_t)token;
        text = *end ? end + 1 : end;
        *rest = *end ? end + 1 : NULL;
    }
    prompt->given = prompt->count = count;
    return HAPT_OK;
}

/* The bytes of --prompt as one prompt. */
static enum hapt_status read_text(const char *text, int64_t vocabulary, struct hapt_arena *arena,
                                  struct hapt_generation *generation)
{
    const size_t count = strlen(text);
    if (vocabulary != BYTES)
        return hapt_fail(HAPT_ERR_USAGE,
                         "give --prompt-tokens \"$(tools/hapt_tokens.py --tokenizer FOLDER --encode TEXT)\"",
                         "--prompt: the model's vocabulary of %lld is not that of bytes", (long long)vocabulary);
    HAPT_NEW(generation->prompt, arena, 1);
    generation->prompts = 1;
    struct hapt_prompt *prompt = generation->prompt;
    prompt->token = hapt_arena_alloc(arena, count + (size_t)generation->most, sizeof *prompt->token);
    if (!prompt->token) return HAPT_ERR_MEMORY;
    for (size_t i = 0; i < count; i++) prompt->token[i] = (unsigned char)text[i];
    prompt->given = prompt->count = (int64_t)count;
    return HAPT_OK;
}

static enum hapt_status check_end(int64_t end, int64_t vocabulary)
{
    if (end < vocabulary) return HAPT_OK;
    return hapt_fail(HAPT_ERR_USAGE, "use the tokenizer of the model",
                     "--end-token %lld is outside the model's vocabulary of %lld", (long long)end,
                     (long long)vocabulary);
}

/* At most `rows` prompts. */
static enum hapt_status read_prompts(const char *text, int64_t rows, int64_t vocabulary, struct hapt_arena *arena,
                                     struct hapt_generation *generation)
{
    int64_t prompts = 1;
    for (const char *c = text; *c; c++) prompts += *c == ';';
    if (prompts > rows)
        return hapt_fail(HAPT_ERR_USAGE, "give fewer prompts, or a --plan of more --microbatches",
                         "%lld prompts are more than the %lld rows of a step", (long long)prompts, (long long)rows);
    generation->prompt = hapt_arena_alloc(arena, (size_t)prompts, sizeof *generation->prompt);
    if (!generation->prompt) return HAPT_ERR_MEMORY;
    generation->prompts = (int)prompts;
    for (int p = 0; p < prompts; p++)
        HAPT_TRY(read_prompt(text, vocabulary, generation->most, arena, &generation->prompt[p], &text));
    return HAPT_OK;
}

static enum hapt_status check_options(const struct hapt_config *config)
{
    HAPT_TRY(forward_check_options(config, "tokens"));
    const bool text = hapt_config_text(config, "prompt") != NULL,
               tokens = hapt_config_text(config, "prompt-tokens") != NULL;
    if (!text && !tokens)
        return hapt_fail(
            HAPT_ERR_USAGE,
            "give --prompt-tokens 5,17,3 (tools/hapt_tokens.py --encode makes them), or --prompt to a model "
            "of bytes",
            "no prompt given");
    if (text && tokens)
        return hapt_fail(HAPT_ERR_USAGE, "leave out one of them", "--prompt and --prompt-tokens exclude each other");
    if (hapt_config_real(config, "temperature") > 0) return HAPT_OK;
    return hapt_phase_refuse_unused(config, "--temperature 0 takes the most likely token", "draw-from seed");
}

/* [5, 17, 3] */
static json_t *list_of(const int32_t *token, int64_t count)
{
    json_t *list = json_array();
    for (int64_t i = 0; i < count; i++) json_array_append_new(list, json_integer(token[i]));
    return list;
}

/* The new bytes of a prompt as text. What is not UTF-8, and control characters but tabs and newlines, become '?'. NULL:
 * no memory. */
static const char *text_of(const struct hapt_prompt *prompt, struct hapt_arena *arena)
{
    const int64_t count = prompt->count - prompt->given;
    char *text = hapt_arena_alloc(arena, (size_t)count + 1, 1);
    for (int64_t i = 0; text && i < count; i++) {
        const int32_t byte = prompt->token[prompt->given + i];
        text[i] = (char)(byte == 0 ? '?' : byte);
    }
    if (text) hapt_text_make_printable(text, true);
    return text;
}

static enum hapt_status print_json(const struct hapt_config *config, const struct forward *forward,
                                   const struct hapt_generation *generation, struct hapt_arena *arena)
{
    const bool text = hapt_config_text(config, "prompt") != NULL;
    json_t *sequences = json_array();
    for (int p = 0; p < generation->prompts; p++) {
        const struct hapt_prompt *prompt = &generation->prompt[p];
        json_t *sequence =
            json_pack("{s:o, s:o, s:b}", "prompt", list_of(prompt->token, prompt->given), "tokens",
                      list_of(prompt->token + prompt->given, prompt->count - prompt->given), "ended", prompt->ended);
        const char *new_text = text ? text_of(prompt, arena) : NULL;
        if (text && !new_text) {
            json_decref(sequence);
            json_decref(sequences);
            return HAPT_ERR_MEMORY;
        }
        if (text) json_object_set_new(sequence, "text", json_string(new_text));
        json_array_append_new(sequences, sequence);
    }
    json_t *json = json_pack("{s:s, s:i, s:o}", "format", "hapt-generation", "version", 1, "sequences", sequences);
    if (json && forward->checkpoint) json_object_set_new(json, "step", json_integer(forward->checkpoint->step));
    return hapt_json_print(json, "generation", 1);
}

static enum hapt_status print(const struct hapt_config *config, const struct forward *forward,
                              const struct hapt_generation *generation, struct hapt_arena *arena)
{
    if (hapt_config_bool(config, "json")) return print_json(config, forward, generation, arena);
    const bool text = hapt_config_text(config, "prompt") != NULL;
    if (text) {
        const char *new_text = text_of(generation->prompt, arena);
        if (!new_text) return HAPT_ERR_MEMORY;
        printf("%s\n", new_text);
    }
    for (int p = 0; p < generation->prompts && !text; p++) {
        const struct hapt_prompt *prompt = &generation->prompt[p];
        for (int64_t i = prompt->given; i < prompt->count; i++)
            printf("%s%d", i > prompt->given ? "," : "", prompt->token[i]);
        printf("\n");
    }
    if (fflush(stdout) == 0 && !ferror(stdout)) return HAPT_OK;
    return hapt_fail(HAPT_ERR_IO, "look at where standard output goes", "the tokens cannot be written: %s",
                     strerror(errno));
}

enum hapt_status hapt_command_generate(struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena)
{
    struct hapt_generation generation = {.most = hapt_config_int(config, "max-tokens"),
                                         .temperature = hapt_config_real(config, "temperature"),
                                         .top_k = hapt_config_int(config, "draw-from"),
                                         .seed = (uint64_t)hapt_config_int(config, "seed"),
                                         .end = hapt_config_int(config, "end-token")};
    struct forward forward;
    env->quiet = true;
    HAPT_TRY(hapt_env_agree(env->world, check_options(config)));
    HAPT_TRY(forward_prepare(env, config, hapt_train_may_generate, arena, &forward));
    HAPT_TRY(hapt_env_agree(env->world, check_end(generation.end, forward.model->vocab)));
    const int64_t rows = (int64_t)forward.plan->microbatches * forward.model->microbatch;
    const char *text = hapt_config_text(config, "prompt");
    HAPT_TRY(hapt_env_agree(env->world, text ? read_text(text, forward.model->vocab, arena, &generation)
                                             : read_prompts(hapt_config_text(config, "prompt-tokens"), rows,
                                                            forward.model->vocab, arena, &generation)));
    HAPT_TRY(hapt_train_generate(env, forward.cluster, forward.model, forward.plan, forward.checkpoint, config, arena,
                                 &generation));
    return hapt_env_agree(env->world, env->world_rank == 0 ? print(config, &forward, &generation, arena) : HAPT_OK);
}
