/*
 * The folder that a run writes into: run.h5, checkpoints/, and the lock (lock.h) of the one job that owns it.
 *
 * A folder that holds a run is only used with --resume (go on) or --overwrite yes (start anew; the earlier run is kept
 * under other names until the new one has its first checkpoint). Without --output the folder is outputs/NAME, NAME from
 * the input's file name; where that holds a run or is in use, outputs/NAME-2, and so on; --resume takes the last of
 * them.
 */
#ifndef HAPT_RUN_FOLDER_H
#define HAPT_RUN_FOLDER_H

#include "hapt/config.h"
#include "hapt/env.h"

/* Chooses the folder, takes its lock and tries to write there, from rank 0 and from every host; it becomes the value of
 * --output. hapt_run_folder_leave follows, whatever this returns. HAPT_ERR_USAGE: it holds a run, or another job owns
 * it. HAPT_ERR_IO: it cannot be written, or a host does not see it. Call before long work. Collective over env->world;
 * ends in agreement. */
enum hapt_status hapt_run_folder_claim(const struct hapt_env *env, struct hapt_config *config,
                                       struct hapt_arena *arena);
/* When all ranks are through: gives the lock back; folders that the claim made and that stayed empty are removed.
 * Collective over env->world. */
void hapt_run_folder_leave(const struct hapt_env *env);
/* The folder: --output, or the default name. */
enum hapt_status hapt_run_folder_name(const struct hapt_config *config, struct hapt_arena *arena, const char **folder);
/* With --overwrite yes, right before the first step: the earlier run's checkpoints/ and run.h5 change to
 * checkpoints.overwritten and run.h5.overwritten. Rank 0. */
enum hapt_status hapt_run_folder_begin(const struct hapt_config *config, const char *folder);
/* The first checkpoint of this run stands: an earlier run's is removed. Rank 0. */
void hapt_run_folder_first_checkpoint(const char *folder);

#endif
