/* Shared by data.c, data_images.c, data_read.c and data_type.c. Private to src/command. */
#ifndef HAPT_COMMAND_DATA_FILES_H
#define HAPT_COMMAND_DATA_FILES_H

#include "hapt/command.h"

/* Reads a whole file into the arena. */
enum hapt_status hapt_data_read_file(const char *path, struct hapt_arena *arena, unsigned char **bytes, size_t *size);
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
/* Finds the --type of a file from its content: bytes (plain text), llmc or cifar10. HAPT_ERR_USAGE if the user must say
 * it, HAPT_ERR_INPUT if the file cannot be data. */
enum hapt_status hapt_data_recognise(const char *path, const char **type);
/* Converts the CIFAR-10 files that the words of `config` name into the data file `path`. Call on one rank. */
enum hapt_status hapt_data_make_images(const struct hapt_env *env, const struct hapt_config *config, const char *path,
                                       struct hapt_arena *arena);

#endif
