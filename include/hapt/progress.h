/* Progress of long work: a bar on a terminal, a plain line every few seconds elsewhere. Rank 0 prints, on standard error. */
#ifndef HAPT_PROGRESS_H
#define HAPT_PROGRESS_H

#include "hapt/env.h"

struct hapt_progress {
    const struct hapt_env *env;
    const char *what;
    long first, total; /* of the whole, `first` was done before: 0 unless the caller changes it */
    double start_s, printed_s;
    double every_s; /* between lines elsewhere: 5 unless the caller changes it */
    bool terminal;
};

void hapt_progress_init(struct hapt_progress *progress, const struct hapt_env *env, const char *what, long total);
/* `detail` may be NULL or "". Prints at most every 0.1 s (terminal) or every_s. */
void hapt_progress_update(struct hapt_progress *progress, long done, const char *detail);
void hapt_progress_release(struct hapt_progress *progress);

#endif
