/* What the makers of data files share. Private to the command room. */
#ifndef HAPT_COMMAND_DATA_FILES_H
#define HAPT_COMMAND_DATA_FILES_H

#include "hapt/command.h"

/* All bytes of a file. */
enum hapt_status hapt_data_read_file(const char *path, struct hapt_arena *arena, unsigned char **bytes, size_t *size);
/* The words of `config` name CIFAR-10 files; `path` becomes their data file. One rank. */
enum hapt_status hapt_data_make_images(const struct hapt_env *env, const struct hapt_config *config, const char *path,
                                       struct hapt_arena *arena);

#endif
