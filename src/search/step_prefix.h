/* Partial plans: the stages of the first layers, with bounds of all plans that begin with them. */
#ifndef HAPT_STEP_PREFIX_H
#define HAPT_STEP_PREFIX_H

#include "step.h"

/* What all prefixes of a search share. */
struct step_prefixes {
    const struct step_search *search;
    struct step_rest rest;
    bool split; /* backward passes are split; search->profile is a split view */
};

struct step_prefix {
    int count;              /* stages */
    struct step_stage last; /* of them */
    int used[HAPT_MAX_SUBCLUSTERS];
    unsigned visited; /* subclusters, as bits */
    double sum_s;     /* of work and 2 c_i; split: of work that does not wait */
    double head_s;    /* of forward passes and c_i; split only */
    double stage_s;   /* the largest bound by a stage */
    double comm_s;    /* the largest c_i */
    double pace_s;    /* the longest time between two microbatches, by a stage or a transfer */
    double in_flight; /* microbatches that fit on each of its stages */
};

enum hapt_status step_prefixes_create(struct step_search *search, bool split, struct step_prefixes *prefixes);
/* A prefix without stages. */
struct step_prefix step_prefix_nothing(void);
/* True if a stage on the device set may come next: its devices are free, and a subcluster that was left is not used
 * again. */
bool step_prefix_allows(const struct step_prefixes *prefixes, const struct step_prefix *prefix, int device_set,
                        int submesh);
/* The prefix with one more stage. Returns the least step of a plan that begins so; INFINITY: the stage is no candidate
 * or does not fit. */
double step_prefix_extend(const struct step_prefixes *prefixes, const struct step_prefix *prefix,
                          const struct step_stage *stage, struct step_prefix *next);
/* The step of a plan that begins so, by the formula HAPT (13), if the layers behind took the least. */
double step_prefix_estimate(const struct step_prefixes *prefixes, const struct step_prefix *prefix);
bool step_prefix_uses_all(const struct step_prefixes *prefixes, const struct step_prefix *prefix);

#endif
