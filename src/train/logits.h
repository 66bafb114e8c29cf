/* The logits of a model, where the last chunk has them: inputs of its cross entropy. */
#ifndef HAPT_TRAIN_LOGITS_H
#define HAPT_TRAIN_LOGITS_H

#include "stage.h"

struct logits {
    int tensor, targets; /* of the last chunk's expanded graph */
    int64_t classes;
    enum hapt_dtype dtype;
    bool whole;  /* each rank has whole rows of logits, with their targets */
    bool counts; /* this rank answers for its part of the logits, as no other rank does */
};

/* *known false: there is no cross entropy. The same on all ranks, but for `counts`. Rank-local; call after
 * worker_build. */
void logits_find(struct worker *worker, struct logits *logits, bool *known);
float logits_value(const void *row, enum hapt_dtype dtype, int64_t i);

#endif
