/* Forward passes alone: hapt generate. The logits behind the newest token of each prompt give the next one. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "data.h"
#include "evaluate.h"
#include "hapt/progress.h"
#include "logits.h"

/* A class and its logit. */
struct choice {
    float logit;
    int32_t class;
};

enum { NONE = -1, NOT_FINITE = -2 }; /* in place of a class */

struct generator {
    struct worker *worker;
    struct hapt_generation *generation;
    struct logits logits;
    struct hapt_data *data;
    int64_t length;                 /* of a row, T */
    int32_t *row;                   /* [rows][T + 1] */
    char *logit;                    /* [classes] as they are computed */
    struct choice *choice;          /* [all] */
    int64_t room;                   /* choices of a prompt that a rank gives: 1, the next token, if it has whole rows */
    struct choice *mine, *received; /* [prompts][room]; [world][prompts][room] */
    int32_t *next, *agreed;         /* [prompts] tokens by rank 0; [world][prompts] */
};

enum hapt_status hapt_train_may_generate(const struct hapt_model *model)
{
    const struct hapt_graph *graph = model->graph;
    const char *why = hapt_model_input(model, HAPT_ROLE_TOKENS) < 0    ? "it has no tokens"
                      : hapt_model_input(model, HAPT_ROLE_TARGETS) < 0 ? "it has no targets"
                                                                       : NULL;
    bool attends = false;
    for (int op = 0; op < graph->forward_count && !why; op++) {
        const struct hapt_op *its = &graph->op[op];
        const struct hapt_tensor *input = &graph->tensor[its->input[0]]; /* every operator has one */
        const char *type = hapt_op_type_at(its->type)->name;
        const size_t length = strlen(type);
        const bool attention = length >= 9 && strcmp(type + length - 9, "attention") == 0;
        attends = attends || attention;
        if (attention && its->integer[1] != 1) why = "its attention also looks ahead";
        if (strcmp(type, "cross_entropy") == 0 && input->dims != 3) why = "its logits are not of tokens in rows";
        if (strcmp(type, "moe_dispatch") == 0 && its->integer[1] < input->shape[1])
            return hapt_fail(
                HAPT_ERR_INPUT, "make the model with --capacity-factor 0, with room for every token",
                "an expert has room for %lld of a row's %lld tokens, but rows of short texts are filled up "
                "with equal tokens",
                (long long)its->integer[1], (long long)input->shape[1]);
    }
    if (!why && !attends) why = "it has no attention";
    if (!why && graph->tensor[hapt_model_input(model, HAPT_ROLE_TOKENS)].dims != 2) why = "its tokens are not in rows";
    if (!why) return HAPT_OK;
    return hapt_fail(HAPT_ERR_INPUT, "give a language model: gpt, llama, or an imported decoder",
                     "a model of the family %s cannot continue a text: %s", model->family, why);
}

/* A number in [0, 1) for a token of a prompt. */
static double uniform(const struct generator *generator, int prompt, int64_t token)
{
    const int64_t key[2] = {prompt, token};
    return (double)(hapt_hash(generator->generation->seed, key, sizeof key) >> 11) * 0x1p-53;
}

static int by_logit(const void *a, const void *b)
{
    const struct choice *first = a, *second = b;
    if (first->logit != second->logit) return first->logit > second->logit ? -1 : 1;
    return (first->class > second->class) - (first->class < second->class);
}

/* The class whose part of the summed probabilities holds `share` of all. Choices are in descending order. */
static int32_t draw(const struct generator *generator, int64_t count, double share)
{
    const struct choice *choice = generator->choice;
    const double temperature = generator->generation->temperature;
    double all = 0, sum = 0;
    for (int64_t i = 0; i < count; i++) all += exp(((double)choice[i].logit - choice[0].logit) / temperature);
    for (int64_t i = 0; i < count; i++) {
        sum += exp(((double)choice[i].logit - choice[0].logit) / temperature);
        if (sum > share * all) return choice[i].class;
    }
    return choice[count - 1].class;
}

/* Sorts the choices, and takes one of them: the first, or one that is drawn. */
static int32_t choose(const struct generator *generator, int64_t count, int prompt, int64_t token)
{
    const struct hapt_generation *generation = generator->generation;
    if (generation->temperature == 0) {
        int64_t best = 0;
        for (int64_t i = 1; i < count; i++)
            if (by_logit(&generator->choice[i], &generator->choice[best]) < 0) best = i;
        return generator->choice[best].class;
    }
    qsort(generator->choice, (size_t)count, sizeof *generator->choice, by_logit);
    if (generation->top_k > 0 && generation->top_k < count) count = generation->top_k;
    return draw(generator, count, uniform(generator, prompt, token));
}

/* The place of a global index among those that a rank holds; -1: it does not. */
static int64_t place_of(const struct hapt_box *box, int dim, int64_t index)
{
    int64_t before = 0;
    for (int r = 0; r < box->runs[dim]; r++) {
        const struct hapt_box_run *run = &box->run[dim][r];
        if (index >= run->start && index < run->start + run->count) return before + index - run->start;
        before += run->count;
    }
    return -1;
}

/* The position of a prompt's newest token in its row. */
static int64_t newest(const struct generator *generator, const struct hapt_prompt *prompt)
{
    return (prompt->count < generator->length ? prompt->count : generator->length) - 1;
}

/* Copies this rank's logits of a token, and makes choices of them; *count 0: some are not finite. */
static enum hapt_status read_choices(struct generator *generator, const char *logits, const struct hapt_box *box,
                                     int64_t row, int64_t token, int64_t *count)
{
    const enum hapt_dtype dtype = generator->logits.dtype;
    const size_t row_bytes = (size_t)box->extent[2] * hapt_dtype_bytes(dtype);
    int64_t place = 0;
    HAPT_TRY(worker_copy(generator->worker, generator->logit,
                         logits + (size_t)(row * box->extent[1] + token) * row_bytes, row_bytes));
    *count = 0;
    for (int r = 0; r < box->runs[2]; r++)
        for (int64_t i = 0; i < box->run[2][r].count; i++, place++) {
            const int64_t class = box->run[2][r].start + i;
            const float value = logits_value(generator->logit, dtype, place);
            if (class >= generator->logits.classes) continue; /* padding of a shard */
            if (!isfinite(value)) {
                *count = 0;
                return HAPT_OK;
            }
            generator->choice[(*count)++] = (struct choice){value, (int32_t) class};
        }
    return HAPT_OK;
}

/* A worker_observer: gives choices for the next token of each prompt of the microbatch whose logits this rank has. */
static enum hapt_status give_choices(void *context, struct stage *stage, int microbatch, int slot)
{
    struct generator *generator = context;
    struct worker *worker = generator->worker;
    const int each = worker->model->microbatch, first = microbatch * each;
    const char *logits = hapt_engine_tensor(stage->engine, generator->logits.tensor, slot);
    struct hapt_box box;
    if (!generator->logits.counts) return HAPT_OK;
    stage_box(worker, stage->chunk, stage->rank, generator->logits.tensor, &box);
    for (int p = first; p < first + each && p < generator->generation->prompts; p++) {
        const struct hapt_prompt *prompt = &generator->generation->prompt[p];
        const int64_t row = place_of(&box, 0, p - first), token = place_of(&box, 1, newest(generator, prompt));
        struct choice *given = generator->mine + p * generator->room;
        int64_t count;
        if (prompt->ended || row < 0 || token < 0) continue;
        HAPT_TRY(read_choices(generator, logits, &box, row, token, &count));
        if (count == 0) {
            given[0].class = NOT_FINITE;
        } else if (generator->logits.whole) {
            given[0].class = choose(generator, count, p, prompt->count - prompt->given);
        } else {
            qsort(generator->choice, (size_t)count, sizeof *generator->choice, by_logit);
            if (count > generator->room) count = generator->room;
            memcpy(given, generator->choice, (size_t)count * sizeof *given);
        }
    }
    return HAPT_OK;
}

/* Every row holds the last T tokens of a prompt, then zeros. */
static void fill_rows(struct generator *generator)
{
    for (int p = 0; p < generator->generation->prompts; p++) {
        const struct hapt_prompt *prompt = &generator->generation->prompt[p];
        const int64_t count = newest(generator, prompt) + 1;
        memcpy(generator->row + p * (generator->length + 1), prompt->token + prompt->count - count,
               (size_t)count * sizeof *prompt->token);
    }
    for (int64_t i = 0; i < generator->generation->prompts * generator->room; i++) generator->mine[i].class = NONE;
}

/* Rank 0 takes the next token of each prompt from the choices of all ranks. */
static void take_next(struct generator *generator)
{
    const struct hapt_generation *generation = generator->generation;
    const int64_t room = generator->room;
    for (int p = 0; p < generation->prompts; p++) {
        const struct hapt_prompt *prompt = &generation->prompt[p];
        int64_t count = 0;
        bool finite = true;
        generator->next[p] = NONE;
        for (int64_t r = 0; r < generator->worker->env->world_size; r++) {
            const struct choice *its = generator->received + (r * generation->prompts + p) * room;
            for (int64_t i = 0; i < room && its[i].class != NONE; i++) {
                finite = finite && its[i].class != NOT_FINITE;
                if (finite) generator->choice[count++] = its[i];
            }
        }
        if (prompt->ended) continue;
        HAPT_ASSERT(count > 0 || !finite);
        generator->next[p] = !finite                   ? NOT_FINITE
                             : generator->logits.whole ? generator->choice[0].class
                                                       : choose(generator, count, p, prompt->count - prompt->given);
    }
}

/* Appends the tokens of rank 0. */
static enum hapt_status append(struct generator *generator)
{
    struct hapt_generation *generation = generator->generation;
    for (int p = 0; p < generation->prompts; p++) {
        struct hapt_prompt *prompt = &generation->prompt[p];
        const int32_t next = generator->agreed[p];
        if (prompt->ended) continue;
        if (next == NOT_FINITE)
            return hapt_fail(HAPT_ERR_INPUT, "look for weights that are too large; --precision fp32 has more range",
                             "prompt %d: logits behind token %lld are not finite", p, (long long)prompt->count - 1);
        prompt->token[prompt->count++] = next;
        prompt->ended = next == generation->end;
    }
    return HAPT_OK;
}

/* Microbatches up to the last prompt that has not ended. */
static int needed(const struct generator *generator)
{
    const int each = generator->worker->model->microbatch;
    int prompts = generator->generation->prompts;
    while (prompts > 0 && generator->generation->prompt[prompts - 1].ended) prompts--;
    return (prompts + each - 1) / each;
}

/* The next token of each prompt. */
static enum hapt_status run_round(struct generator *generator)
{
    struct worker *worker = generator->worker;
    const MPI_Comm world = worker->env->world;
    const double timeout_s = worker_agreement_timeout_s(worker);
    const size_t prompts = (size_t)generator->generation->prompts;
    fill_rows(generator);
    HAPT_TRY(worker_run_forward(worker, generator->data, 0, needed(generator)));
    HAPT_TRY(hapt_link_all_gather(world, "choices of tokens", timeout_s, generator->mine,
                                  prompts * (size_t)generator->room * sizeof *generator->mine, generator->received));
    if (worker->env->world_rank == 0) take_next(generator);
    return hapt_link_all_gather(world, "tokens", timeout_s, generator->next, prompts * sizeof *generator->next,
                                generator->agreed); /* rank 0's are the first */
}

/* A rank that fails in a pass ends the job: others wait for its messages. */
static enum hapt_status generate_all(struct generator *generator)
{
    struct worker *worker = generator->worker;
    struct hapt_generation *generation = generator->generation;
    enum hapt_status status = HAPT_OK;
    struct hapt_progress progress;
    hapt_progress_init(&progress, worker->env, "generating", (long)generation->most);
    worker->observer = (struct worker_observer){give_choices, generator};
    for (int64_t k = 0; k < generation->most && status == HAPT_OK && needed(generator) > 0; k++) {
        status = run_round(generator);
        if (status != HAPT_OK) hapt_die(status);
        status = append(generator); /* the same on all ranks */
        hapt_progress_update(&progress, (long)(k + 1), NULL);
    }
    worker->observer = (struct worker_observer){0};
    hapt_progress_release(&progress);
    return status;
}

static enum hapt_status reserve(struct generator *generator)
{
    struct worker *worker = generator->worker;
    const struct hapt_model *model = worker->model;
    const int64_t rows = (int64_t)worker->plan->microbatches * model->microbatch,
                  prompts = generator->generation->prompts;
    const struct hapt_generation *generation = generator->generation;
    bool known;
    logits_find(worker, &generator->logits, &known);
    if (!known) return hapt_fail(HAPT_ERR_INPUT, NULL, "the loss of the model is no cross entropy of logits");
    const int64_t classes = generator->logits.classes;
    generator->room = generator->logits.whole || generation->temperature == 0 ? 1
                      : generation->top_k > 0 && generation->top_k < classes  ? generation->top_k
                                                                              : classes;
    const int64_t all =
        worker->env->world_size * generator->room > classes ? worker->env->world_size * generator->room : classes;
    generator->length = model->graph->tensor[hapt_model_input(model, HAPT_ROLE_TOKENS)].shape[1];
    HAPT_TRY(
        data_of_rows((int)rows, generator->length, hapt_model_document_end(model), &generator->data, &generator->row));
    HAPT_NEW(generator->logit, worker->arena, classes * (int64_t)sizeof(float));
    HAPT_NEW(generator->choice, worker->arena, all);
    HAPT_NEW(generator->mine, worker->arena, prompts * generator->room);
    HAPT_NEW(generator->received, worker->arena, worker->env->world_size * prompts * generator->room);
    HAPT_NEW(generator->next, worker->arena, prompts);
    HAPT_NEW(generator->agreed, worker->arena, worker->env->world_size * prompts);
    return HAPT_OK;
}

static enum hapt_status generate(struct generator *generator, const struct hapt_checkpoint *checkpoint,
                                 const struct hapt_config *config, bool *together)
{
    struct worker *worker = generator->worker;
    HAPT_TRY(evaluate_build(worker, config));
    HAPT_TRY(hapt_env_agree(worker->env->world, reserve(generator)));
    HAPT_TRY(evaluate_join(worker, config, checkpoint, together));
    const enum hapt_status status = generate_all(generator), drained = worker_drain(worker);
    if (drained != HAPT_OK) hapt_die(drained);
    return hapt_env_agree(worker->env->world, status);
}

enum hapt_status hapt_train_generate(const struct hapt_env *env, const struct hapt_cluster *cluster,
                                     const struct hapt_model *model, const struct hapt_plan *plan,
                                     const struct hapt_checkpoint *checkpoint, const struct hapt_config *config,
                                     struct hapt_arena *arena, struct hapt_generation *generation)
{
    struct worker worker = worker_of(env, cluster, model, plan, arena);
    struct generator generator = {.worker = &worker, .generation = generation};
    bool together = false;
    const enum hapt_status status = generate(&generator, checkpoint, config, &together);
    if (status == HAPT_ERR_COMM && !together) hapt_die(status); /* as in hapt_train_run */
    worker_release(&worker);
    hapt_data_close(generator.data);
    return status;
}
