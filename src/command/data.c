/* `hapt data FILE`: converts text or token files to a data file. data_images.c converts images. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "data_files.h"
#include "hapt/h5.h"
#include "hapt/progress.h"
#include "json_print.h"
#include "outputs.h"

const char hapt_command_data_help[] =
    "Input types: bytes (any file; a token is a byte, vocabulary 256); uint16 and uint32 (little-endian tokens and\n"
    "nothing else, such as nanoGPT's .bin); llmc (llm.c's .bin: a header of 256 32-bit numbers, magic 20240520,\n"
    "version 1, then tokens of 16 bits; version 7: of 32 bits); cifar10 (one or more files of CIFAR-10's binary\n"
    "version, data_batch_1.bin and so on; written as /images [n][3][32][32] and /labels [n], with /mean and /std of\n"
    "the channels).\n"
    "\n"
    "auto recognises plain text (ASCII or UTF-8, taken as bytes), llm.c's header and CIFAR-10's records. Other\n"
    "inputs need --type: nanoGPT's .bin and other text encodings look like any other binary file. HDF5 files\n"
    "are not converted: a file with /tokens, /batches or /images is a data file already.\n"
    "\n"
    "The data file (HDF5, format \"hapt-data\", version 1) holds /tokens [n], in the narrowest type that fits, and\n"
    "the root attributes vocab, unigram_entropy and bigram_entropy (nats per token: the least loss of a model that\n"
    "knows only the frequencies of tokens, or of pairs of neighbours). Training also reads exact batches, in order:\n"
    "/batches [step][row][T+1], or /batches [step][row][T] and /targets of the same shape (-100: no loss at this\n"
    "position). Models of images read /images [n][C][H][W] and /labels [n], sampled by seed, or exact batches\n"
    "/images [step][row][C][H][W] and /labels [step][row]. Pixels are bytes or floats. With /mean [C] and /std [C]\n"
    "their value is (stored - mean) / std; without them a byte is divided by 255.\n";

/* PIECE: tokens counted per unit of progress. COUNTS: passes over all tokens, and the time of writing, in passes. */
enum { PIECE = 1 << 22, COUNTS = 6 };

struct tokens {
    int64_t count;
    int vocab;       /* 256 for bytes, else the largest token + 1 */
    uint32_t *token; /* [count] */
};

static enum hapt_status read_bytes(const unsigned char *bytes, size_t size, struct hapt_arena *arena,
                                   struct tokens *tokens)
{
    HAPT_NEW(tokens->token, arena, size);
    for (size_t i = 0; i < size; i++) tokens->token[i] = bytes[i];
    tokens->count = (int64_t)size;
    tokens->vocab = 256;
    return HAPT_OK;
}

/* Little-endian tokens of `width` bytes. */
static enum hapt_status read_words(const unsigned char *bytes, size_t size, size_t width, const char *path,
                                   struct hapt_arena *arena, struct tokens *tokens)
{
    if (size % width != 0) {
        return hapt_fail(HAPT_ERR_INPUT, "choose another --type", "the size of %s is not a multiple of %zu-bit tokens",
                         path, 8 * width);
    }
    HAPT_NEW(tokens->token, arena, size / width);
    tokens->count = (int64_t)(size / width);
    for (int64_t i = 0; i < tokens->count; i++) {
        const unsigned char *at = bytes + (size_t)i * width;
        const uint32_t token =
            at[0] | (uint32_t)at[1] << 8 | (width == 4 ? (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24 : 0);
        if (token >= MOST_VOCAB) {
            return hapt_fail(HAPT_ERR_INPUT, "choose another --type",
                             "%s: token %u at %" PRId64 " exceeds the largest vocabulary (%d)", path, (unsigned)token,
                             i, MOST_VOCAB);
        }
        if (token >= (uint32_t)tokens->vocab) tokens->vocab = (int)token + 1;
        tokens->token[i] = token;
    }
    return HAPT_OK;
}

static enum hapt_status read_llmc(const unsigned char *bytes, size_t size, const char *path, struct hapt_arena *arena,
                                  struct tokens *tokens)
{
    int version;
    int64_t count;
    if (!hapt_data_is_llmc(bytes, size, &version, &count)) {
        return hapt_fail(HAPT_ERR_INPUT, "llm.c writes magic 20240520, version 1; choose another --type",
                         "%s has no llm.c header", path);
    }
    if (version != LLMC_NARROW && version != LLMC_WIDE) {
        return hapt_fail(HAPT_ERR_INPUT, "write tokens of 16 bits (version 1) or of 32 bits (version 7)",
                         "%s has llm.c's version %d, which hapt does not know", path, version);
    }
    const size_t width = version == LLMC_WIDE ? 4 : 2, header = LLMC_HEADER_BYTES;
    if (count < 0 || (size - header) / width != (size_t)count || (size - header) % width != 0) {
        return hapt_fail(HAPT_ERR_INPUT, "the file is truncated or has extra bytes: create it again",
                         "the header of %s says %" PRId64 " tokens, the file holds %zu", path, count,
                         (size - header) / width);
    }
    return read_words(bytes + header, size - header, width, path, arena, tokens);
}

static enum hapt_status read_tokens(const char *path, const char *type, struct hapt_arena *arena, struct tokens *tokens)
{
    unsigned char *bytes = NULL;
    size_t size = 0;
    HAPT_TRY(hapt_data_read_file(path, arena, &bytes, &size));
    if (strcmp(type, "llmc") == 0) {
        HAPT_TRY(read_llmc(bytes, size, path, arena, tokens));
    } else if (strcmp(type, "uint16") == 0 || strcmp(type, "uint32") == 0) {
        HAPT_TRY(read_words(bytes, size, strcmp(type, "uint16") == 0 ? 2 : 4, path, arena, tokens));
    } else {
        HAPT_TRY(read_bytes(bytes, size, arena, tokens));
    }
    if (tokens->count < 2) return hapt_fail(HAPT_ERR_INPUT, "give more text", "%s holds fewer than two tokens", path);
    return HAPT_OK;
}

/* total x (-sum p ln p), p = count / total. */
static double entropy_sum(const int64_t *count, int64_t length, double total)
{
    double sum = 0;
    for (int64_t i = 0; i < length; i++) {
        if (count[i] > 0) sum -= (double)count[i] * log((double)count[i] / total);
    }
    return sum;
}

static void count_piece(int64_t i)
{
    if (i % PIECE == 0) hapt_progress_advance(1);
}

/* Entropy of a token, and of a token given the previous one, from the frequencies of this text; nats. */
static enum hapt_status entropies(const struct tokens *tokens, struct hapt_arena *arena, double *unigram,
                                  double *bigram)
{
    const int64_t pairs = tokens->count - 1, vocab = tokens->vocab;
    int64_t *start, *after, *fill;
    uint32_t *follower; /* [pairs] next tokens, grouped by the previous token */
    HAPT_NEW(start, arena, vocab + 1);
    HAPT_NEW(after, arena, vocab);
    HAPT_NEW(fill, arena, vocab);
    HAPT_NEW(follower, arena, pairs);
    hapt_progress_expect(COUNTS * (long)((tokens->count + PIECE - 1) / PIECE));
    for (int64_t i = 0; i < tokens->count; i++, count_piece(i)) after[tokens->token[i]]++;
    *unigram = entropy_sum(after, vocab, (double)tokens->count) / (double)tokens->count;
    for (int64_t i = 0; i < pairs; i++, count_piece(i)) start[tokens->token[i] + 1]++;
    for (int64_t v = 0; v < vocab; v++) start[v + 1] += start[v];
    memcpy(fill, start, (size_t)vocab * sizeof *fill);
    for (int64_t i = 0; i < pairs; i++, count_piece(i)) follower[fill[tokens->token[i]]++] = tokens->token[i + 1];
    memset(after, 0, (size_t)vocab * sizeof *after);
    double sum = 0;
    for (int64_t v = 0; v < vocab; v++) {
        const double total = (double)(start[v + 1] - start[v]);
        for (int64_t i = start[v]; i < start[v + 1]; i++, count_piece(i)) after[follower[i]]++;
        /* Use each count at its token's first occurrence and clear it, so that rare previous tokens cost little. */
        for (int64_t i = start[v]; i < start[v + 1]; i++) {
            sum += entropy_sum(&after[follower[i]], 1, total);
            after[follower[i]] = 0;
        }
    }
    *bigram = sum / (double)pairs;
    return HAPT_OK;
}

static enum hapt_status write_tokens(const char *path, const struct tokens *tokens, double unigram, double bigram,
                                     struct hapt_arena *arena)
{
    struct hapt_h5 *file;
    const enum hapt_h5_type type = tokens->vocab <= 256     ? HAPT_H5_U8
                                   : tokens->vocab <= 65536 ? HAPT_H5_U16
                                                            : HAPT_H5_I32;
    const void *stored = tokens->token; /* tokens are below 2^31, so u32 equals I32 */
    uint8_t *byte;
    uint16_t *narrow;
    if (type == HAPT_H5_U8) {
        HAPT_NEW(byte, arena, tokens->count);
        for (int64_t i = 0; i < tokens->count; i++) byte[i] = (uint8_t)tokens->token[i];
        stored = byte;
    } else if (type == HAPT_H5_U16) {
        HAPT_NEW(narrow, arena, tokens->count);
        for (int64_t i = 0; i < tokens->count; i++, count_piece(i)) narrow[i] = (uint16_t)tokens->token[i];
        stored = narrow;
    }
    HAPT_TRY(hapt_h5_create(path, "hapt-data", 1, &file));
    enum hapt_status status = hapt_h5_write_attribute_int(file, "/", "vocab", tokens->vocab);
    if (status == HAPT_OK) status = hapt_h5_write_attribute_real(file, "/", "unigram_entropy", unigram, "nat/token");
    if (status == HAPT_OK) status = hapt_h5_write_attribute_real(file, "/", "bigram_entropy", bigram, "nat/token");
    if (status == HAPT_OK) status = hapt_h5_write(file, "/tokens", type, 1, &tokens->count, stored, "token");
    return hapt_h5_finish(file, status);
}

static enum hapt_status print_json(const char *path, const struct tokens *tokens, double unigram, double bigram)
{
    json_t *root = json_pack("{s:s, s:i, s:s, s:I, s:i, s:f, s:f}", "format", "hapt-data", "version", 1, "output", path,
                             "tokens", (json_int_t)tokens->count, "vocab", tokens->vocab, "unigram_entropy", unigram,
                             "bigram_entropy", bigram);
    return hapt_json_print(root, "the data's", 0);
}

static enum hapt_status make_data(const struct hapt_env *env, const struct hapt_config *config,
                                  struct hapt_arena *arena)
{
    struct tokens tokens = {0};
    double unigram = 0, bigram = 0;
    const char *path = hapt_config_text(config, "output");
    const char *type = hapt_config_text(config, "type");
    if (hapt_config_word_count(config) < 1)
        return hapt_fail(HAPT_ERR_USAGE, "hapt data text.txt --output tokens.h5", "hapt data needs one file to read");
    if (!path) return hapt_fail(HAPT_ERR_USAGE, "add --output tokens.h5", "hapt data has no file to write");
    if (strcmp(type, "auto") == 0) HAPT_TRY(hapt_data_recognise(hapt_config_word(config, 0), &type));
    if (strcmp(type, "cifar10") == 0) return hapt_data_make_images(env, config, path, arena);
    if (hapt_config_word_count(config) != 1)
        return hapt_fail(HAPT_ERR_USAGE, "hapt data text.txt --output tokens.h5", "hapt data needs one file to read");
    HAPT_TRY(read_tokens(hapt_config_word(config, 0), type, arena, &tokens));
    HAPT_TRY(entropies(&tokens, arena, &unigram, &bigram));
    HAPT_TRY(write_tokens(path, &tokens, unigram, bigram, arena));
    if (env->quiet) return print_json(path, &tokens, unigram, bigram);
    hapt_print(env, "%s: %" PRId64 " tokens, vocabulary %d\n", path, tokens.count, tokens.vocab);
    hapt_print(env, "entropy: unigram %.4f, bigram %.4f nats per token\n", unigram, bigram);
    return HAPT_OK;
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
