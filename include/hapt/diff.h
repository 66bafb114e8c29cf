/* The differences between two plans. */
#ifndef HAPT_DIFF_H
#define HAPT_DIFF_H

#include "hapt/plan.h"

/* Differences between two stages. */
enum hapt_diff_field {
    HAPT_DIFF_LAYERS = 1,
    HAPT_DIFF_SUBCLUSTER = 2,
    HAPT_DIFF_SUBMESH = 4,
    HAPT_DIFF_TENSOR_PARALLEL = 8,
    HAPT_DIFF_COMPUTE = 16,
    HAPT_DIFF_TRANSFER = 32,
    HAPT_DIFF_LAUNCHES = 64,
    HAPT_DIFF_MEMORY = 128,
    HAPT_DIFF_KEPT = 256 /* what recomputes, and where weights are */
};

struct hapt_diff_row {
    int a, b;         /* stages; -1: no counterpart in this plan */
    unsigned changed; /* hapt_diff_field; 0 without a counterpart */
};

/* Layers that run in another subcluster. */
struct hapt_diff_relocation {
    int first_layer, end_layer; /* [first, end) */
    const char *from, *to;      /* borrowed from the plans */
};

struct hapt_diff {
    bool equal;       /* stages, settings and predictions; search statistics are ignored */
    bool same_layers; /* equal layer counts; otherwise stages are matched by their share of the layers, and
                         relocations are unknown */
    int row_count;
    struct hapt_diff_row *row; /* in the order of both pipelines */
    int relocation_count;
    struct hapt_diff_relocation *relocation;
};

/* Two stages are counterparts if each overlaps the other more than any other stage does; the first wins a tie. Times
 * and sizes within 1e-12 are equal. Rank-local. */
enum hapt_status hapt_plan_diff(const struct hapt_plan *a, const struct hapt_plan *b, struct hapt_arena *arena,
                                struct hapt_diff **diff);

#endif
