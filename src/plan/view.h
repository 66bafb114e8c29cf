/*
 * Inside src/plan: views of a profile for restricted searches. A view borrows every table that it does not change.
 */
#ifndef HAPT_PLAN_VIEW_H
#define HAPT_PLAN_VIEW_H

#include "hapt/plan.h"

/* Exactly these subclusters, in this order; the cut behind the k-th lies at layer cut_low[k] to cut_high[k]. */
struct view_order {
    int count;
    int subcluster[HAPT_MAX_SUBCLUSTERS];
    int cut_low[HAPT_MAX_SUBCLUSTERS], cut_high[HAPT_MAX_SUBCLUSTERS];
};

enum hapt_status view_create(const struct hapt_profile *profile, struct hapt_arena *arena, struct hapt_profile **view);
/* Only subclusters whose bit is set run stages; mixed ones must have all of theirs set. */
void view_keep_subclusters(struct hapt_profile *view, unsigned subclusters);
/* Only plans of this order are left, and all of them without mixed stages. */
enum hapt_status view_keep_order(struct hapt_profile *view, const struct view_order *order, struct hapt_arena *arena);

/* The order in which a plan first visits subclusters, its cuts free; whether it visits each only once, without mixed
 * stages. */
bool view_order_of(const struct hapt_plan *plan, struct view_order *order);
/* Every cut anywhere. */
void view_order_free(struct view_order *order, int layer_count);

/* The best plan of a view; NULL when there is none: the error record then says why. Collective. */
enum hapt_status view_search(MPI_Comm comm, const struct hapt_profile *view, const struct hapt_search_options *options,
                             struct hapt_arena *arena, struct hapt_plan **plan);

#endif
