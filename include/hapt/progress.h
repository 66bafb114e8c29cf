/*
 * Progress of long work on standard error, by rank 0: nothing in the first 2 s, then a line every few seconds, on a
 * terminal a bar. A thread prints, so work shows progress also where a single call takes long. Work of other ranks may
 * call everything here; it prints nothing.
 *
 * Phases nest: the outermost one is printed, the fraction of an inner one counts as part of its current unit.
 */
#ifndef HAPT_PROGRESS_H
#define HAPT_PROGRESS_H

#include "hapt/env.h"

struct hapt_progress {
    const struct hapt_env *env;
    const char *what;
    long first; /* units that were complete before the phase began (a resumed run): 0 unless the caller changes it
                   before the first update */
    long total; /* units, those included; 0: the work itself tells by hapt_progress_expect and _advance */
    double
        every_s; /* between lines where there is no terminal: 5 unless the caller changes it before the first update */
    int slot;    /* place in the stack of phases; -1: none */
};

/* Begins a phase. Each one must be released, the last one begun first. `env` and `what` are borrowed until then. env
 * NULL, for rooms that know none: an inner phase, which is not shown where there is no outer one. */
void hapt_progress_init(struct hapt_progress *progress, const struct hapt_env *env, const char *what, long total);
/* `done` units are complete. `detail` is copied; it may be NULL or "". */
void hapt_progress_update(struct hapt_progress *progress, long done, const char *detail);
void hapt_progress_release(struct hapt_progress *progress);

/* For rooms that know no env, from any thread: so many more parts will come, so many are done. They belong to the
 * current unit of the innermost phase, and have no effect without one. Cheap: an atomic addition. */
void hapt_progress_expect(long parts);
void hapt_progress_advance(long parts);

#endif
