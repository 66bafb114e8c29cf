/* Partial plans: the stages of the last layers, with bounds of all plans that end with them. */
#ifndef HAPT_STEP_SUFFIX_H
#define HAPT_STEP_SUFFIX_H

#include "step.h"

/* Tables that all suffixes of a search share. */
struct step_suffixes {
    const struct step_search *search;
    struct step_front front;
    bool split; /* backward passes are split; search->profile is a split view */
};

struct step_suffix {
    int count;               /* stages */
    int first;               /* layer of the first of them; L: there is none */
    struct step_stage stage; /* the first of them */
    int used[HAPT_MAX_SUBCLUSTERS];
    unsigned visited; /* subclusters, as bits */
    double fits;      /* microbatches in flight that fit on its first stage */
    double sum_s;     /* of work and 2 c_i; split: of work that does not wait */
    double stage_s;   /* the largest bound by a stage */
    double comm_s;    /* the largest c_i */
    double pace_s;    /* the longest time between two microbatches, by a stage, its memory, or a transfer */
};

enum hapt_status step_suffixes_create(struct step_search *search, bool split, struct step_suffixes *suffixes);
/* A suffix without stages. */
struct step_suffix step_suffix_nothing(const struct step_suffixes *suffixes);
/* True if a stage on the device set may come in front: its devices are free, and a subcluster that was left is not used
 * again. */
bool step_suffix_allows(const struct step_suffixes *suffixes, const struct step_suffix *suffix, int device_set,
                        int submesh);
/* The suffix with one more stage in front, from layer `first` on. Returns the least step of a plan that ends so;
 * INFINITY: the stage is no candidate or does not fit. */
double step_suffix_extend(const struct step_suffixes *suffixes, const struct step_suffix *suffix, int device_set,
                          int submesh, int first, struct step_suffix *next);
/* The step of a plan that ends so, by the formula HAPT (13), if the layers in front took the least. */
double step_suffix_estimate(const struct step_suffixes *suffixes, const struct step_suffix *suffix);
bool step_suffix_uses_all(const struct step_suffixes *suffixes, const struct step_suffix *suffix);

#endif
