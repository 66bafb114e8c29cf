/*
 * Inside src/study: views of a profile for restricted searches. A view borrows every table that it does not change.
 */
#ifndef HAPT_STUDY_VIEW_H
#define HAPT_STUDY_VIEW_H

#include "hapt/search.h"

/* Exactly these subclusters, in this order. The boundary behind the k-th lies at layer boundary_low[k] to
 * boundary_high[k]. */
struct view_order {
    int count;
    int subcluster[HAPT_MAX_SUBCLUSTERS];
    int boundary_low[HAPT_MAX_SUBCLUSTERS], boundary_high[HAPT_MAX_SUBCLUSTERS];
};

/* A copy with tables of its own for clusters, links and mixed groups, but not for what these point to. */
enum hapt_status view_create(const struct hapt_profile *profile, struct hapt_arena *arena, struct hapt_profile **view);
/* The order in which a plan first visits its subclusters, with free boundaries. True if it visits each once and has no
 * mixed stages. */
bool view_order_of(const struct hapt_plan *plan, struct view_order *order);
/* Allows every boundary at any layer. */
void view_order_free(struct view_order *order, int layer_count);

/* Restrictions of a search; zeros: none. */
struct view_limits {
    const struct view_order *order; /* all plans of this order without mixed stages, and no others; NULL: any order */
    unsigned left_out;              /* bits of subclusters without stages, also without mixed ones */
    bool unmixed;                   /* no mixed stages */
    bool unlimited_memory;
};
/* The best plan of a view. NULL: none; the error record gives the reason. Collective over env->world. */
enum hapt_status view_search(const struct hapt_env *env, const struct hapt_profile *profile,
                             const struct view_limits *limits, const struct hapt_search_options *options,
                             struct hapt_arena *arena, struct hapt_plan **plan);

#endif
