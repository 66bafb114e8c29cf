/* `hapt data FILES`: converts text or token files to a data file. data_images.c converts images. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "data_files.h"
#include "hapt/h5.h"
#include "hapt/progress.h"
#include "json_print.h"
#include "outputs.h"

const char hapt_command_data_help[] =
    "Converts one or more files, in the order given, to one data file. A word that is no file but has one of *?[ is a\n"
    "pattern: the files that match, in the order of their names. Files may be larger than memory.\n"
    "\n"
    "Input types: bytes (any file; a token is a byte, vocabulary 256); uint16 and uint32 (little-endian tokens and\n"
    "nothing else, such as nanoGPT's .bin); llmc (llm.c's .bin: a header of 256 32-bit numbers, magic 20240520,\n"
    "version 1, then tokens of 16 bits; version 7: of 32 bits); megatron (NAME.bin and NAME.idx of Megatron-LM's\n"
    "preprocess_data.py: all sequences, in the order of the index); cifar10 (files of CIFAR-10's binary version,\n"
    "data_batch_1.bin and so on; written as /images [n][3][32][32] and /labels [n], with /mean and /std of the\n"
    "channels). Do not change or truncate a data file while a run uses it: it is mapped, not copied, if its elements\n"
    "stand there as they are needed (not compressed, not in very many chunks).\n"
    "\n"
    "auto recognises plain text (ASCII or UTF-8, taken as bytes), llm.c's header, Megatron's index and CIFAR-10's\n"
    "records. Other inputs need --type: nanoGPT's .bin and other text encodings look like any other binary file.\n"
    "HDF5 files are not converted: a file with /tokens, /batches or /images is a data file already.\n"
    "\n"
    "The data file (HDF5, format \"hapt-data\", version 1) holds /tokens [n], in the narrowest type that fits, and\n"
    "the root attributes vocab, unigram_entropy and bigram_entropy (nats per token: the least loss of a model that\n"
    "knows only the frequencies of tokens, or of pairs of neighbours). /targets [n] beside /tokens excludes positions\n"
    "from the loss: the target of each token, that is the next token, or -100. Training also reads exact batches, in\n"
    "order:\n"
    "/batches [step][row][T+1], or /batches [step][row][T] and /targets of the same shape (-100: no loss at this\n"
    "position). Models of images read /images [n][C][H][W] and /labels [n], sampled by seed, or exact batches\n"
    "/images [step][row][C][H][W] and /labels [step][row]. If the model has a label for each pixel, these have them\n"
    "in further dimensions, [n][H][W] (-100: none). Pixels are bytes or floats. With /mean [C] and /std [C] their\n"
    "value is (stored - mean) / std; without them a byte is divided by 255.\n"
    "\n"
    "A graph of your own may name its inputs. It then reads /batches/NAME [n][...] for the input NAME, sampled by\n"
    "seed, or exact batches /batches/NAME [step][row][...]: integers or floats, the same rows in all of them. Targets\n"
    "of the loss may be -100 (integers) or NaN (floats): no loss there. Datasets have at most 5 dimensions.\n";

#define MOST_PAIRS ((int64_t)1 << 27) /* 512 MB */

struct writer {
    struct hapt_h5 *file;
    enum hapt_h5_type type;
    uint32_t vocab;
    void *block; /* [HAPT_TOKEN_BLOCK] of that type */
};

static enum hapt_status write_block(void *context, int64_t first, const uint32_t *token, int64_t count)
{
    struct writer *writer = context;
    for (int64_t i = 0; i < count; i++)
        if (token[i] >= writer->vocab) return hapt_data_changed();
    const void *values = token; /* tokens are below 2^31, so u32 equals I32 */
    if (writer->type == HAPT_H5_U8) {
        for (int64_t i = 0; i < count; i++) ((uint8_t *)writer->block)[i] = (uint8_t)token[i];
        values = writer->block;
    } else if (writer->type == HAPT_H5_U16) {
        for (int64_t i = 0; i < count; i++) ((uint16_t *)writer->block)[i] = (uint16_t)token[i];
        values = writer->block;
    }
    return hapt_h5_write_rows(writer->file, "/tokens", writer->type, first, count, values);
}

static enum hapt_status write_datasets(struct hapt_h5 *file, const struct hapt_token_source *source, int vocab,
                                       double unigram, double bigram, struct hapt_arena *arena)
{
    uint16_t *block;
    HAPT_NEW(block, arena, HAPT_TOKEN_BLOCK);
    struct writer writer = {file,
                            vocab <= 256     ? HAPT_H5_U8
                            : vocab <= 65536 ? HAPT_H5_U16
                                             : HAPT_H5_I32,
                            (uint32_t)vocab, block};
    HAPT_TRY(hapt_h5_write_attribute_int(file, "/", "vocab", vocab));
    HAPT_TRY(hapt_h5_write_attribute_real(file, "/", "unigram_entropy", unigram, "nat/token"));
    HAPT_TRY(hapt_h5_write_attribute_real(file, "/", "bigram_entropy", bigram, "nat/token"));
    HAPT_TRY(hapt_h5_write_begin(file, "/tokens", writer.type, 1, &source->count, "token"));
    return hapt_data_visit_tokens(source, write_block, &writer);
}

static enum hapt_status write_tokens(const char *path, const struct hapt_token_source *source, int vocab,
                                     double unigram, double bigram, struct hapt_arena *arena)
{
    struct hapt_h5 *file;
    HAPT_TRY(hapt_h5_create(path, "hapt-data", 1, &file));
    return hapt_h5_finish(file, write_datasets(file, source, vocab, unigram, bigram, arena));
}

static enum hapt_status print_json(const char *path, int64_t count, int vocab, double unigram, double bigram)
{
    json_t *root =
        json_pack("{s:s, s:i, s:s, s:I, s:i, s:f, s:f}", "format", "hapt-data", "version", 1, "output", path, "tokens",
                  (json_int_t)count, "vocab", vocab, "unigram_entropy", unigram, "bigram_entropy", bigram);
    return hapt_json_print(root, "the data's", 0);
}

static enum hapt_status make_tokens(const struct hapt_env *env, const struct hapt_data_inputs *inputs, const char *type,
                                    const char *path, struct hapt_arena *arena)
{
    struct hapt_token_source source;
    struct hapt_token_counts counts;
    double unigram = 0, bigram = 0;
    HAPT_TRY(hapt_data_find_tokens(inputs, type, arena, &source));
    hapt_progress_expect(2 * hapt_data_visit_parts(&source));
    enum hapt_status status = hapt_data_count_tokens(&source, &counts);
    const int vocab = !strcmp(type, "bytes") ? 256 : (int)counts.vocab;
    if (status == HAPT_OK) status = hapt_data_entropies(&source, &counts, MOST_PAIRS, &unigram, &bigram);
    free(counts.count);
    if (status == HAPT_OK) status = write_tokens(path, &source, vocab, unigram, bigram, arena);
    HAPT_TRY(status);
    if (env->quiet) return print_json(path, source.count, vocab, unigram, bigram);
    hapt_print(env, "%s: %" PRId64 " tokens, vocabulary %d\n", path, source.count, vocab);
    hapt_print(env, "entropy: unigram %.4f, bigram %.4f nats per token\n", unigram, bigram);
    return HAPT_OK;
}

/* All inputs are of one type. */
static enum hapt_status find_type(const struct hapt_config *config, const struct hapt_data_inputs *inputs,
                                  const char **type)
{
    const char *other;
    *type = hapt_config_text(config, "type");
    if (strcmp(*type, "auto") != 0) return HAPT_OK;
    HAPT_TRY(hapt_data_recognise(inputs->path[0], type));
    for (int i = 1; i < inputs->count; i++) {
        HAPT_TRY(hapt_data_recognise(inputs->path[i], &other));
        if (strcmp(*type, other) != 0)
            return hapt_fail(HAPT_ERR_INPUT, "give files of one type, or --type", "%s is of type %s, %s of type %s",
                             inputs->path[0], *type, inputs->path[i], other);
    }
    return HAPT_OK;
}

static enum hapt_status make_data(const struct hapt_env *env, const struct hapt_config *config,
                                  struct hapt_arena *arena)
{
    const char *path = hapt_config_text(config, "output"), *type;
    struct hapt_data_inputs inputs;
    if (hapt_config_word_count(config) < 1)
        return hapt_fail(HAPT_ERR_USAGE, "hapt data text.txt --output tokens.h5", "hapt data needs a file to read");
    if (!path) return hapt_fail(HAPT_ERR_USAGE, "add --output tokens.h5", "hapt data has no file to write");
    HAPT_TRY(hapt_data_find_inputs(config, arena, &inputs));
    HAPT_TRY(find_type(config, &inputs, &type));
    return !strcmp(type, "cifar10") ? hapt_data_make_images(env, &inputs, path, arena)
                                    : make_tokens(env, &inputs, type, path, arena);
}

enum hapt_status hapt_command_data(struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena)
{
    enum hapt_status status = HAPT_OK;
    HAPT_TRY(hapt_outputs_check(env, config, 1, &(struct hapt_output){.option = "output", .format = "hapt-data"}));
    struct hapt_progress progress;
    hapt_progress_init(&progress, env, "converting data", 0);
    if (env->world_rank == 0) status = make_data(env, config, arena); /* one rank writes the file */
    hapt_progress_release(&progress);
    return hapt_env_agree(env->world, status);
}
