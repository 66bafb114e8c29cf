/* What the makers of data files share. Private to the command room. */
#ifndef HAPT_COMMAND_DATA_FILES_H
#define HAPT_COMMAND_DATA_FILES_H

#include "hapt/command.h"

/* All bytes of a file. */
enum hapt_status hapt_data_read_file(const char *path, struct hapt_arena *arena, unsigned char **bytes, size_t *size);
enum {
    LLMC_HEADER_BYTES = 4 * 256,
    LLMC_NARROW = 1,
    LLMC_WIDE = 7, /* versions: tokens of 16 and of 32 bits */
    CIFAR_CLASSES = 10,
    CIFAR_RECORD_BYTES = 1 + 3 * 32 * 32,
    MOST_VOCAB = 100000000, /* of --vocab */
};
/* Does the file begin with llm.c's header? Its version and its number of tokens. */
bool hapt_data_is_llmc(const unsigned char *bytes, size_t size, int *version, int64_t *count);
/* The --type of a file by its content: bytes (plain text), llmc or cifar10. HAPT_ERR_USAGE where only the user can
 * tell, HAPT_ERR_INPUT for what cannot be data. */
enum hapt_status hapt_data_recognise(const char *path, const char **type);
/* The words of `config` name CIFAR-10 files; `path` becomes their data file. One rank. */
enum hapt_status hapt_data_make_images(const struct hapt_env *env, const struct hapt_config *config, const char *path,
                                       struct hapt_arena *arena);

#endif
