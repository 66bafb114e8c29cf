/*
 * Outputs of the commands that write single files, looked at before any long work.
 *
 * Refused with HAPT_ERR_USAGE unless --overwrite yes is given: an output that is an input of the command under any name
 * (compared by device and inode), a symbolic link, and an existing file of another kind than the one to be written. A
 * folder or a device is refused always, and so are two outputs of one name. An existing file of the same kind, or an
 * empty one, is replaced. A symbolic link is replaced itself; the file that it leads to is never touched. A folder that
 * cannot be written to is HAPT_ERR_IO. With --overwrite an output may be an input: inputs are read whole before, and
 * outputs are written aside and renamed.
 */
#ifndef HAPT_COMMAND_OUTPUTS_H
#define HAPT_COMMAND_OUTPUTS_H

#include "hapt/command.h"

struct hapt_output {
    const char *option; /* that names the file; not given: nothing to check */
    const char *format; /* of HDF5 files; NULL: a JSON object with the member `key` */
    const char *key;
};

/* Collective over env->world: rank 0 looks, all agree. */
enum hapt_status hapt_outputs_check(const struct hapt_env *env, const struct hapt_config *config, int count,
                                    const struct hapt_output *output);

#endif
