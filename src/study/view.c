/* Restricted searches: the planner's own search on a profile with fewer candidates or links. */
#include "view.h"
#include "hapt/search.h"

#include <math.h>
#include <string.h>

enum hapt_status view_create(const struct hapt_profile *profile, struct hapt_arena *arena, struct hapt_profile **view)
{
    const size_t C = (size_t)profile->cluster_count;
    struct hapt_profile *made;
    HAPT_NEW(made, arena, 1);
    *made = *profile;
    HAPT_NEW(made->cluster, arena, C);
    HAPT_NEW(made->link_bandwidth, arena, C * C);
    HAPT_NEW(made->link_latency, arena, C * C);
    memcpy(made->cluster, profile->cluster, C * sizeof *made->cluster);
    memcpy(made->link_bandwidth, profile->link_bandwidth, C * C * sizeof(double));
    memcpy(made->link_latency, profile->link_latency, C * C * sizeof(double));
    HAPT_NEW(made->mixed, arena, profile->mixed_count);
    if (profile->mixed_count > 0)
        memcpy(made->mixed, profile->mixed, (size_t)profile->mixed_count * sizeof *made->mixed);
    if (!made->tied_latency) made->tied_latency = profile->link_latency;
    *view = made;
    return HAPT_OK;
}

static void keep_subclusters(struct hapt_profile *view, unsigned subclusters)
{
    for (int c = 0; c < view->cluster_count; c++)
        if (!(subclusters >> c & 1u)) view->cluster[c].submesh_count = 0;
    int kept = 0;
    for (int k = 0; k < view->mixed_count; k++) {
        unsigned others = 0;
        for (int i = 0; i < view->mixed[k].count; i++) others |= 1u << view->mixed[k].cluster[i] & ~subclusters;
        if (!others) view->mixed[kept++] = view->mixed[k];
    }
    view->mixed_count = kept;
}

/* Restricts the stages of subcluster c to layers [first, end). */
static enum hapt_status keep_range(struct hapt_profile *view, int c, int first, int end, struct hapt_arena *arena)
{
    struct hapt_profile_cluster *cluster = &view->cluster[c];
    const size_t cells = hapt_profile_index(view, cluster->submesh_count, 0, 0);
    double *time_s;
    HAPT_NEW(time_s, arena, cells);
    for (size_t cell = 0; cell < cells; cell++) time_s[cell] = NAN;
    for (int s = 0; s < cluster->submesh_count; s++) {
        for (int i = first; i < end; i++) {
            const size_t cell = hapt_profile_index(view, s, i, i);
            memcpy(&time_s[cell], &cluster->stage_time[cell], (size_t)(end - i) * sizeof *time_s);
        }
    }
    cluster->stage_time = time_s;
    return HAPT_OK;
}

/*
 * Allows all plans of this order without mixed stages, and no others.
 *
 * Links exist only from each subcluster to the next, so a pipeline must follow the order. Only the first subcluster
 * holds layer 0 and only the last holds the last layer, so the pipeline visits all of them. Mixed stages are left out,
 * because they belong to two positions of an order.
 */
static enum hapt_status keep_order(struct hapt_profile *view, const struct view_order *order, struct hapt_arena *arena)
{
    const int C = view->cluster_count, last = order->count - 1;
    unsigned kept = 0;
    view->mixed_count = 0;
    for (int k = 0; k <= last; k++) {
        const int first = k == 0 ? 0 : order->boundary_low[k - 1];
        const int end = k == last ? view->layer_count : order->boundary_high[k];
        kept |= 1u << order->subcluster[k];
        if (last > 0) HAPT_TRY(keep_range(view, order->subcluster[k], first, end, arena));
    }
    keep_subclusters(view, kept);
    for (int from = 0; from < C; from++) {
        for (int to = 0; to < C; to++) {
            bool follows = from == to;
            for (int k = 0; k < last; k++) follows |= order->subcluster[k] == from && order->subcluster[k + 1] == to;
            if (!follows) view->link_latency[from * C + to] = INFINITY;
        }
    }
    return HAPT_OK;
}

bool view_order_of(const struct hapt_plan *plan, struct view_order *order)
{
    unsigned seen = 0;
    bool once = true;
    order->count = 0;
    for (int i = 0; i < plan->stage_count; i++) {
        const struct hapt_subclusters mine = hapt_plan_stage_subclusters(&plan->stage[i]);
        const int c = mine.index[0];
        if (i > 0 && mine.count == 1 && !hapt_plan_is_mixed(&plan->stage[i - 1]) &&
            c == plan->stage[i - 1].submesh->subcluster[0])
            continue;
        if (mine.count > 1 || seen >> c & 1u) once = false;
        for (int k = 0; k < mine.count; k++) {
            if (!(seen >> mine.index[k] & 1u)) order->subcluster[order->count++] = mine.index[k];
            seen |= 1u << mine.index[k];
        }
    }
    view_order_free(order, plan->layer_count);
    return once;
}

void view_order_free(struct view_order *order, int layer_count)
{
    for (int k = 0; k < order->count; k++) {
        order->boundary_low[k] = 1;
        order->boundary_high[k] = layer_count - 1;
    }
}

static enum hapt_status restrict_view(struct hapt_profile *view, const struct view_limits *limits,
                                      struct hapt_arena *arena)
{
    if (limits->unmixed) view->mixed_count = 0;
    for (int c = 0; limits->unlimited_memory && c < view->cluster_count; c++)
        view->cluster[c].device_memory_bytes = INFINITY;
    if (limits->left_out) keep_subclusters(view, ~limits->left_out);
    return limits->order ? keep_order(view, limits->order, arena) : HAPT_OK;
}

enum hapt_status view_search(const struct hapt_env *env, const struct hapt_profile *profile,
                             const struct view_limits *limits, const struct hapt_search_options *options,
                             struct hapt_arena *arena, struct hapt_plan **plan)
{
    struct hapt_search_options question = *options;
    struct hapt_profile *view;
    struct hapt_arena scratch;
    question.may_fail = true;
    hapt_arena_init(&scratch);
    enum hapt_status status = view_create(profile, &scratch, &view);
    if (status == HAPT_OK) status = restrict_view(view, limits, &scratch);
    status = hapt_env_agree(env->world, status);
    if (status == HAPT_OK) {
        hapt_fail_reset();
        status = hapt_plan_search(env->world, view, &question, arena, plan);
    }
    hapt_arena_release(&scratch);
    if (status != HAPT_OK) *plan = NULL;
    return status == HAPT_ERR_INFEASIBLE ? HAPT_OK : status;
}
