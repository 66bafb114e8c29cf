/*
 * The metrics of a run while it trains, in its output folder:
 * - run.h5 is replaced every --metrics-every by a complete file in state "running", without /profile. A thread writes
 * it; training does not wait.
 * - metrics.csv gets a line per step, and tensorboard/ an event per step (--tensorboard). The compute thread writes
 * them.
 *
 * A job that lost the lock of its folder writes nothing. A failure is a warning, said once per file, and training goes
 * on. Missing lines follow when writing is possible again; a file that could not be opened stays away until the next
 * start.
 */
#ifndef HAPT_LIVE_H
#define HAPT_LIVE_H

#include "hapt/report.h"

/* Fills *observer for hapt_train_run, to which it and `run` are lent, as far as run->result, which is not used. Nothing
 * is opened before training begins, and all is closed when it ends. On other ranks than 0 the observer does nothing.
 * HAPT_ERR_MEMORY. Rank-local. */
enum hapt_status hapt_live_prepare(const struct hapt_env *env, const struct hapt_run *run, struct hapt_arena *arena,
                                   struct hapt_train_observer *observer);

#endif
