/*
 * Checks the output files of a command before any long work.
 *
 * HAPT_ERR_USAGE, unless --overwrite yes is given: the output is an input of the command (same device and inode), a
 * symbolic link, or an existing file of another kind. HAPT_ERR_USAGE always: it is a folder or a device, or two outputs
 * have one name. HAPT_ERR_IO: the folder is not writable. An existing file of the same kind, or an empty one, is
 * replaced. For a symbolic link, the link is replaced and its target never touched. With --overwrite an output may be
 * an input: inputs are read completely first, and outputs are written under another name and renamed.
 */
#ifndef HAPT_COMMAND_OUTPUTS_H
#define HAPT_COMMAND_OUTPUTS_H

#include "hapt/command.h"

struct hapt_output {
    const char *option; /* names the file; if it is not given, nothing is checked */
    const char *format; /* format of an HDF5 file; NULL: the file is a JSON object with the member `key` */
    const char *key;
    const char *kind;   /* what such a JSON file is, for messages: "a timeline" */
    const char *begins; /* given: an existing file of the same kind begins so, whatever the other members say */
};

/* Collective over env->world: rank 0 checks, all ranks agree. */
enum hapt_status hapt_outputs_check(const struct hapt_env *env, const struct hapt_config *config, int count,
                                    const struct hapt_output *output);
/* HAPT_ERR_IO if no file can be created in the folder that holds `path`, or in its first parent that exists; the folder
 * itself is created later. Rank-local. */
enum hapt_status hapt_outputs_try_parent(const char *option, const char *path);

#endif
