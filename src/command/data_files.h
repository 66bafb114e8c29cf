/* Shared by data.c and the files data_*.c. Private to src/command. */
#ifndef HAPT_COMMAND_DATA_FILES_H
#define HAPT_COMMAND_DATA_FILES_H

#include "hapt/command.h"

/* ---- Inputs (data_read.c) ---- */

struct hapt_data_inputs {
    int count;
    const char **path;
};
/* The files that the words of `config` name, in their order. A word that is no file but has one of *?[ names the files
 * that match it, in the order of their names. HAPT_ERR_INPUT: none matches. */
enum hapt_status hapt_data_find_inputs(const struct hapt_config *config, struct hapt_arena *arena,
                                       struct hapt_data_inputs *inputs);
/* Reads a whole file into the arena. */
enum hapt_status hapt_data_read_file(const char *path, struct hapt_arena *arena, unsigned char **bytes, size_t *size);
enum hapt_status hapt_data_file_size(const char *path, int64_t *size);
enum {
    LLMC_HEADER_BYTES = 4 * 256,
    LLMC_NARROW = 1,
    LLMC_WIDE = 7, /* llm.c's versions: tokens of 16 and of 32 bits */
    CIFAR_CLASSES = 10,
    CIFAR_RECORD_BYTES = 1 + 3 * 32 * 32,
    MOST_VOCAB = 100000000, /* --vocab's upper bound */
};
/* True if the file begins with llm.c's header; then *version and *count (tokens) are set. */
bool hapt_data_is_llmc(const unsigned char *bytes, size_t size, int *version, int64_t *count);
/* Finds the --type of a file from its content: bytes (plain text), llmc, megatron or cifar10. HAPT_ERR_USAGE if the
 * user must say it, HAPT_ERR_INPUT if the file cannot be data. */
enum hapt_status hapt_data_recognise(const char *path, const char **type);

/* ---- Images (data_images.c) ---- */

/* Converts CIFAR-10 files into the data file `path`. Call on one rank. */
enum hapt_status hapt_data_make_images(const struct hapt_env *env, const struct hapt_data_inputs *inputs,
                                       const char *path, struct hapt_arena *arena);

/* ---- Tokens (data_tokens.c, data_find.c, data_megatron.c) ---- */

/* Tokens that follow each other in a file. */
struct hapt_token_piece {
    const char *path;
    int64_t offset, count; /* bytes, tokens */
    int width;             /* bytes of a token, little-endian: 1, 2, 4 or 8 */
    bool is_signed;        /* negative tokens become UINT32_MAX, as do those beyond 32 bits */
};
struct hapt_token_source {
    int64_t pieces, capacity, count; /* count: tokens */
    struct hapt_token_piece *piece;
};
/* Finds the tokens of the inputs, all of the same type. Reads headers only. */
enum hapt_status hapt_data_find_tokens(const struct hapt_data_inputs *inputs, const char *type,
                                       struct hapt_arena *arena, struct hapt_token_source *source);
enum hapt_status hapt_data_add_piece(struct hapt_token_source *source, struct hapt_arena *arena,
                                     const struct hapt_token_piece *piece);
/* True if the file, or the one beside it with the suffix .idx, begins with the header of Megatron's index. */
bool hapt_data_is_megatron(const char *path);
/* True for NAME.idx and NAME.bin. */
bool hapt_data_is_index_of(const char *index, const char *other);
/* Adds the tokens of Megatron's NAME.bin and NAME.idx; `path` is either, or NAME. */
enum hapt_status hapt_data_add_megatron(const char *path, struct hapt_arena *arena, struct hapt_token_source *source);

/* Visits all tokens in order, in blocks of at most HAPT_TOKEN_BLOCK, starting with number `first`. */
enum { HAPT_TOKEN_BLOCK = 1 << 20 };
typedef enum hapt_status hapt_token_visitor(void *context, int64_t first, const uint32_t *token, int64_t count);
enum hapt_status hapt_data_visit_tokens(const struct hapt_token_source *source, hapt_token_visitor *visit,
                                        void *context);
/* Calls of hapt_progress_advance in each visit. */
long hapt_data_visit_parts(const struct hapt_token_source *source);

/* ---- Frequencies (data_entropy.c) ---- */

struct hapt_token_counts {
    const struct hapt_token_source *source;
    int64_t vocab, capacity; /* largest token + 1 */
    int64_t *count;          /* [vocab], malloc */
    uint32_t last;
};
/* Counts each token; HAPT_ERR_INPUT: a token exceeds MOST_VOCAB. The caller frees counts->count. */
enum hapt_status hapt_data_count_tokens(const struct hapt_token_source *source, struct hapt_token_counts *counts);
/* HAPT_ERR_INPUT: an input is not as it was in an earlier pass. */
enum hapt_status hapt_data_changed(void);
/* Entropy of a token, and of a token given the previous one, from the frequencies of this text; nats. At most
 * `most_pairs` pairs of tokens are in memory at a time. */
enum hapt_status hapt_data_entropies(const struct hapt_token_source *source, const struct hapt_token_counts *counts,
                                     int64_t most_pairs, double *unigram, double *bigram);

#endif
