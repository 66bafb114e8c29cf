/*
 * The output folder of a run: run.h5, checkpoints/, metrics.csv, tensorboard/, and the lock (lock.h) of the one job
 * that owns it.
 *
 * A folder that holds a run requires --resume (continue) or --overwrite yes (restart). A restart keeps the earlier run
 * under other names until the new one has its first checkpoint. Without --output the folder is outputs/NAME, NAME being
 * the input's file name. If that holds a run or is in use, the folder is outputs/NAME-2, and so on; --resume takes the
 * last of them.
 */
#ifndef HAPT_RUN_FOLDER_H
#define HAPT_RUN_FOLDER_H

#include "hapt/config.h"
#include "hapt/env.h"

/* Chooses the folder, takes its lock and tests writing, from rank 0 and from every host. The folder becomes the value
 * of --output. Call hapt_run_folder_leave afterwards, whatever this returns. HAPT_ERR_USAGE: it holds a run, or another
 * job owns it. HAPT_ERR_IO: it cannot be written, or a host does not see it. Call before long work. Collective over
 * env->world; ends in agreement. */
enum hapt_status hapt_run_folder_claim(const struct hapt_env *env, struct hapt_config *config,
                                       struct hapt_arena *arena);
/* Call when all ranks have finished. Releases the lock and removes folders that the claim created and that are still
 * empty. Collective over env->world. */
void hapt_run_folder_leave(const struct hapt_env *env);
/* The folder: --output, or the default name. */
enum hapt_status hapt_run_folder_name(const struct hapt_config *config, struct hapt_arena *arena, const char **folder);
/* With --overwrite yes, directly before the first step: renames the earlier run's checkpoints/, run.h5,
 * metrics.csv and tensorboard/ to NAME.overwritten. Rank 0. */
enum hapt_status hapt_run_folder_begin(const struct hapt_config *config, const char *folder);
/* Removes the earlier run, because this run's first checkpoint exists. Rank 0. */
void hapt_run_folder_first_checkpoint(const char *folder);

#endif
