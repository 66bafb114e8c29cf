/* The logits of a model, where the last chunk has them: inputs of its cross entropy. */
#ifndef HAPT_TRAIN_LOGITS_H
#define HAPT_TRAIN_LOGITS_H

#include "stage.h"

struct logits {
    int tensor, targets; /* of the last chunk's expanded graph */
    int64_t classes;
    enum hapt_dtype dtype;
    bool counts; /* this rank answers for its rows, as no other rank does */
};

/* *known false: ranks hold parts of a row of logits, or there is no cross entropy. The same on all ranks. Rank-local;
 * call after worker_build. */
void logits_find(struct worker *worker, struct logits *logits, bool *known);
float logits_value(const void *row, enum hapt_dtype dtype, int64_t i);

#endif
