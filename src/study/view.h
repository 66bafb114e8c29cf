/*
 * Inside src/study: views of a profile for restricted searches. A view borrows every table that it does not change.
 */
#ifndef HAPT_STUDY_VIEW_H
#define HAPT_STUDY_VIEW_H

#include "hapt/search.h"
#include "hapt/plan.h"

/* Exactly these subclusters, in this order. The boundary behind the k-th lies at layer boundary_low[k] to
 * boundary_high[k]. */
struct view_order {
    int count;
    int subcluster[HAPT_MAX_SUBCLUSTERS];
    int boundary_low[HAPT_MAX_SUBCLUSTERS], boundary_high[HAPT_MAX_SUBCLUSTERS];
};

enum hapt_status view_create(const struct hapt_profile *profile, struct hapt_arena *arena, struct hapt_profile **view);
/* Allows stages only in subclusters whose bit is set; a mixed stage needs the bits of all its subclusters. */
void view_keep_subclusters(struct hapt_profile *view, unsigned subclusters);
/* Allows all plans of this order without mixed stages, and no others. */
enum hapt_status view_keep_order(struct hapt_profile *view, const struct view_order *order, struct hapt_arena *arena);

/* The order in which a plan first visits its subclusters, with free boundaries. True if it visits each once and has no
 * mixed stages. */
bool view_order_of(const struct hapt_plan *plan, struct view_order *order);
/* Allows every boundary at any layer. */
void view_order_free(struct view_order *order, int layer_count);

/* The best plan of a view. NULL: none; the error record gives the reason. Collective. */
enum hapt_status view_search(MPI_Comm comm, const struct hapt_profile *view, const struct hapt_search_options *options,
                             struct hapt_arena *arena, struct hapt_plan **plan);

#endif
