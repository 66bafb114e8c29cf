/*
 * Progress of long work on standard error, from rank 0: nothing in the first 2 s, then a line every few seconds; on a
 * terminal a bar, and lines that the work keeps. A separate thread prints, so progress also shows during one long call.
 * Other ranks may call all functions here; they print nothing.
 *
 * Phases nest: the outermost one is printed, and an inner phase adds a fraction of the outer one's current unit.
 */
#ifndef HAPT_PROGRESS_H
#define HAPT_PROGRESS_H

#include "hapt/env.h"

struct hapt_progress {
    const struct hapt_env *env;
    const char *what;
    long first; /* units complete before the phase began (a resumed run): 0 unless the caller sets it before the first
                   update */
    long total; /* units, including `first`; 0: the work reports by hapt_progress_expect and _advance */
    double every_s; /* between lines without a terminal, and between kept lines: 5 unless the caller sets it before the
                       first update */
    int slot;       /* index in the stack of phases; -1: none */
};

/* Begins a phase. Phases must be released in reverse order. `env` and `what` are borrowed until then. `env` NULL, for
 * code without an env: an inner phase, which is shown only inside an outer one. */
void hapt_progress_init(struct hapt_progress *progress, const struct hapt_env *env, const char *what, long total);
/* `done` units are complete. `detail` is copied; NULL and "" are allowed. */
void hapt_progress_update(struct hapt_progress *progress, long done, const char *detail);
/* The same; prints also "hapt: WHAT DONE/TOTAL LINE" if the last such line is every_s old, and for the last unit. These
 * lines stay on a terminal, above the bar. Other lines of the phase then show only units that take long. `line` is
 * borrowed during the call. */
void hapt_progress_keep(struct hapt_progress *progress, long done, const char *detail, const char *line);
void hapt_progress_release(struct hapt_progress *progress);

/* For code without an env, from any thread: `parts` more parts are expected, or complete. They belong to the current
 * unit of the innermost phase and have no effect without one. Cost: one atomic addition. */
void hapt_progress_expect(long parts);
void hapt_progress_advance(long parts);

#endif
