/* Finds the rivals of a plan by restricted searches. Each plan is listed once. */
#include "rivals.h"

#include "hapt/progress.h"
#include "view.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    MOST_PERMUTED = 3
}; /* subclusters for which all orders are tried; with more: swapped neighbours, and the reverse */

enum { MOST_UNWANTED = 16 }; /* limit of excluded boundaries with few bytes, because each may cost a search */

/* Work of the refinement of one rival: about a tenth of a second. */
#define QUICK 1e6

struct finder {
    const struct hapt_env *env;
    const struct hapt_profile *profile;
    const struct hapt_search_options *options;
    const struct hapt_plan *plan;
    const struct hapt_join_benefit *benefit;
    struct view_order order;            /* of the plan */
    bool in_order;                      /* the plan visits each subcluster once; given plans may not */
    int boundary[HAPT_MAX_SUBCLUSTERS]; /* layer of the boundary behind the k-th subcluster */
    struct hapt_arena *arena;
    struct hapt_rivals *rivals;
    int room;
    long searches;
    struct hapt_progress progress;
};

static const char *name_of(const struct finder *finder, int c)
{
    return finder->profile->cluster[c].name;
}

static double value_of(const struct finder *finder, const struct hapt_plan *plan)
{
    return hapt_search_value_s(finder->options->objective, plan);
}

/* Counts a search for the progress display, whose total is an estimate. */
static void count_search(struct finder *finder)
{
    if (++finder->searches > finder->progress.total) finder->progress.total = finder->searches;
    hapt_progress_update(&finder->progress, finder->searches, "rivals");
}

static bool same_stages(const struct hapt_plan *a, const struct hapt_plan *b)
{
    if (a->stage_count != b->stage_count) return false;
    for (int i = 0; i < a->stage_count; i++) {
        const struct hapt_plan_stage *x = &a->stage[i], *y = &b->stage[i];
        if (x->end_layer != y->end_layer || !hapt_plan_same_devices(x, y)) return false;
    }
    return true;
}

static enum hapt_status note_rival(struct finder *finder, const char *what, struct hapt_plan *found, bool fits)
{
    struct hapt_rivals *rivals = finder->rivals;
    if (!what) return HAPT_ERR_MEMORY;
    if (found && fits && same_stages(found, finder->plan)) return HAPT_OK;
    for (int i = 0; found && i < rivals->count; i++) {
        struct hapt_rival *other = &rivals->rival[i];
        if (!other->plan || other->fits != fits || !same_stages(other->plan, found)) continue;
        if (strstr(other->what, what)) return HAPT_OK;
        other->what = hapt_arena_printf(finder->arena, "%s; %s", other->what, what);
        return other->what ? HAPT_OK : HAPT_ERR_MEMORY;
    }
    if (rivals->count == finder->room) {
        struct hapt_rival *wider;
        finder->room = finder->room ? 2 * finder->room : 16;
        HAPT_NEW(wider, finder->arena, finder->room);
        for (int i = 0; i < rivals->count; i++) wider[i] = rivals->rival[i];
        rivals->rival = wider;
    }
    struct hapt_rival *rival = &rivals->rival[rivals->count++];
    *rival = (struct hapt_rival){.what = what, .plan = found, .fits = fits};
    if (found) return rivals_judge(finder->profile, finder->options->objective, finder->plan, finder->arena, rival);
    rival->reason = hapt_arena_strdup(finder->arena, hapt_fail_message());
    return rival->reason ? HAPT_OK : HAPT_ERR_MEMORY;
}

/* `found` NULL: no plan; the error record gives the reason. Collective. */
static enum hapt_status add_rival(struct finder *finder, const char *what, struct hapt_plan *found, bool fits)
{
    const enum hapt_status status = note_rival(finder, what, found, fits);
    if (status == HAPT_OK) hapt_fail_reset();
    return hapt_env_agree(finder->env->world, status);
}

/* The best plan within these limits; NULL: none. `all_devices`: every one must be used. */
static enum hapt_status search_within(struct finder *finder, const struct view_limits *limits, bool all_devices,
                                      struct hapt_plan **found)
{
    struct hapt_search_options options = *finder->options;
    options.use_all_devices = all_devices;
    const enum hapt_status status = view_search(finder->env, finder->profile, limits, &options, finder->arena, found);
    count_search(finder);
    return status;
}

/* The best plan of an order; NULL: none. If subclusters are left out, devices may stay idle. */
static enum hapt_status search_order(struct finder *finder, const struct view_order *order, struct hapt_plan **found)
{
    const bool complete = order->count == finder->profile->cluster_count;
    return search_within(finder, &(struct view_limits){.order = order}, finder->options->use_all_devices && complete,
                         found);
}

static const char *describe_order(const struct finder *finder, const struct view_order *order)
{
    const char *text = name_of(finder, order->subcluster[0]);
    for (int k = 1; k < order->count && text; k++)
        text = hapt_arena_printf(finder->arena, "%s before %s", text, name_of(finder, order->subcluster[k]));
    return text;
}

static enum hapt_status try_order(struct finder *finder, const struct view_order *order)
{
    struct hapt_plan *found;
    bool same = order->count == finder->order.count;
    for (int k = 0; same && k < order->count; k++) same = order->subcluster[k] == finder->order.subcluster[k];
    if (same) return HAPT_OK;
    HAPT_TRY(search_order(finder, order, &found));
    return add_rival(finder, describe_order(finder, order), found, true);
}

static void swap(struct view_order *order, int a, int b)
{
    const int kept = order->subcluster[a];
    order->subcluster[a] = order->subcluster[b];
    order->subcluster[b] = kept;
}

static enum hapt_status permute(struct finder *finder, struct view_order *order, int from)
{
    if (from == order->count) return try_order(finder, order);
    for (int k = from; k < order->count; k++) {
        swap(order, from, k);
        HAPT_TRY(permute(finder, order, from + 1));
        swap(order, from, k);
    }
    return HAPT_OK;
}

static enum hapt_status other_orders(struct finder *finder)
{
    const int count = finder->order.count;
    struct view_order order = finder->order;
    if (count <= MOST_PERMUTED) return permute(finder, &order, 0);
    for (int k = 0; k + 1 < count; k++) {
        order = finder->order;
        swap(&order, k, k + 1);
        HAPT_TRY(try_order(finder, &order));
    }
    order = finder->order;
    for (int k = 0; k < count / 2; k++) swap(&order, k, count - 1 - k);
    return try_order(finder, &order);
}

static enum hapt_status other_subclusters(struct finder *finder)
{
    const int C = finder->profile->cluster_count;
    struct hapt_plan *found;
    unsigned used = 0;
    for (int k = 0; k < finder->order.count; k++) used |= 1u << finder->order.subcluster[k];
    for (int c = 0; C > 1 && c < C; c++) {
        found = finder->benefit->alone[c];
        if (!found) hapt_fail(HAPT_ERR_INFEASIBLE, NULL, "%s", finder->benefit->obstacle[c]);
        HAPT_TRY(add_rival(finder, hapt_arena_printf(finder->arena, "%s alone", name_of(finder, c)), found, true));
    }
    for (int c = 0; C > 2 && c < C; c++) {
        if (!(used >> c & 1u) || finder->order.count == 1) continue;
        HAPT_TRY(search_within(finder, &(struct view_limits){.left_out = 1u << c}, false, &found));
        HAPT_TRY(add_rival(finder, hapt_arena_printf(finder->arena, "without %s", name_of(finder, c)), found, true));
    }
    for (int c = 0; c < C; c++) { /* unused ones: inserted at each position */
        struct hapt_plan *best = NULL;
        if (used >> c & 1u) continue;
        for (int position = 0; position <= finder->order.count; position++) {
            struct view_order order = {.count = finder->order.count + 1};
            for (int k = 0; k < order.count; k++)
                order.subcluster[k] = k == position ? c : finder->order.subcluster[k - (k > position)];
            view_order_free(&order, finder->profile->layer_count);
            HAPT_TRY(search_order(finder, &order, &found));
            if (found && (!best || value_of(finder, found) < value_of(finder, best))) best = found;
        }
        HAPT_TRY(add_rival(finder, hapt_arena_printf(finder->arena, "with %s too", name_of(finder, c)), best, true));
    }
    return HAPT_OK;
}

static enum hapt_status shifted_boundaries(struct finder *finder)
{
    for (int k = 0; k + 1 < finder->order.count; k++) {
        for (int step = -1; step <= 1; step += 2) {
            struct view_order order = finder->order;
            struct hapt_plan *found;
            order.boundary_low[k] = order.boundary_high[k] = finder->boundary[k] + step;
            if (order.boundary_low[k] < 1 || order.boundary_low[k] >= finder->profile->layer_count) continue;
            HAPT_TRY(search_order(finder, &order, &found));
            HAPT_TRY(
                add_rival(finder,
                          hapt_arena_printf(finder->arena, "the boundary between %s and %s a layer %s",
                                            name_of(finder, order.subcluster[k]),
                                            name_of(finder, order.subcluster[k + 1]), step < 0 ? "earlier" : "later"),
                          found, true));
        }
    }
    return HAPT_OK;
}

/* A range of boundary layers between two subclusters, and its best plan: a lower bound for the wanted boundaries. */
struct span {
    int low, high;
    struct hapt_plan *plan;
};

struct spans {
    struct span *span;
    int count;
    int k;              /* index of the boundary */
    const bool *wanted; /* [layer] */
};

/* Shrinks the range until both ends are wanted, and searches it. */
static enum hapt_status add_span(struct finder *finder, struct spans *spans, int low, int high)
{
    struct view_order order = finder->order;
    struct span *span = &spans->span[spans->count];
    while (low <= high && !spans->wanted[low]) low++;
    while (high >= low && !spans->wanted[high]) high--;
    if (low > high) return HAPT_OK;
    order.boundary_low[spans->k] = low;
    order.boundary_high[spans->k] = high;
    *span = (struct span){.low = low, .high = high};
    HAPT_TRY(search_order(finder, &order, &span->plan));
    if (span->plan) spans->count++;
    return HAPT_OK;
}

static int boundary_of(const struct hapt_plan *plan, int k)
{
    for (int i = 0; i + 1 < plan->stage_count; i++)
        if (plan->stage[i].submesh->subcluster[0] != plan->stage[i + 1].submesh->subcluster[0] && k-- == 0)
            return plan->stage[i].end_layer;
    return plan->layer_count;
}

/* The best plan of the order whose k-th boundary is wanted. Ranges are taken by ascending bound. A range is split where
 * its best plan has an unwanted boundary. */
static enum hapt_status search_wanted(struct finder *finder, int k, const bool *wanted, struct hapt_arena *scratch,
                                      struct hapt_plan **found)
{
    const int L = finder->profile->layer_count;
    struct spans spans = {.k = k, .wanted = wanted};
    *found = NULL;
    spans.span = hapt_arena_alloc(scratch, (size_t)L + 2, sizeof *spans.span);
    HAPT_TRY(hapt_env_agree(finder->env->world, spans.span ? HAPT_OK : HAPT_ERR_MEMORY));
    HAPT_TRY(add_span(finder, &spans, 1, L - 1));
    while (spans.count > 0) {
        int best = 0;
        for (int i = 1; i < spans.count; i++)
            if (value_of(finder, spans.span[i].plan) < value_of(finder, spans.span[best].plan)) best = i;
        const struct span span = spans.span[best];
        const int boundary = boundary_of(span.plan, k);
        if (wanted[boundary]) {
            *found = span.plan;
            return HAPT_OK;
        }
        spans.span[best] = spans.span[--spans.count];
        HAPT_TRY(add_span(finder, &spans, span.low, boundary - 1));
        HAPT_TRY(add_span(finder, &spans, boundary + 1, span.high));
    }
    return HAPT_OK;
}

/* Rivals with fewer and with more bytes at a boundary. "More" is rarely useful and may need a search for every boundary
 * with fewer bytes. So it is skipped if there are many of these. */
static enum hapt_status other_bytes(struct finder *finder, struct hapt_arena *scratch)
{
    const int L = finder->profile->layer_count;
    bool *wanted = hapt_arena_alloc(scratch, (size_t)L + 1, sizeof *wanted);
    HAPT_TRY(hapt_env_agree(finder->env->world, wanted ? HAPT_OK : HAPT_ERR_MEMORY));
    for (int k = 0; k + 1 < finder->order.count; k++) {
        const double bytes = finder->profile->boundary_bytes[finder->boundary[k] - 1];
        for (int fewer = 1; fewer >= 0; fewer--) {
            struct hapt_plan *found;
            int count = 0;
            for (int boundary = 1; boundary < L; boundary++) {
                const double other = finder->profile->boundary_bytes[boundary - 1];
                wanted[boundary] = fewer ? !hapt_at_most(bytes, other) : !hapt_at_most(other, bytes);
                count += wanted[boundary];
            }
            if (count == 0 || (!fewer && L - 1 - count > MOST_UNWANTED)) continue;
            HAPT_TRY(search_wanted(finder, k, wanted, scratch, &found));
            if (found)
                HAPT_TRY(
                    add_rival(finder,
                              hapt_arena_printf(finder->arena, "%s bytes between %s and %s", fewer ? "fewer" : "more",
                                                name_of(finder, finder->order.subcluster[k]),
                                                name_of(finder, finder->order.subcluster[k + 1])),
                              found, true));
        }
    }
    return HAPT_OK;
}

/* Finds faster plans that exceed the devices' memory: the gain of more memory. */
static enum hapt_status unlimited_memory(struct finder *finder)
{
    struct hapt_plan *found;
    HAPT_TRY(search_within(finder, &(struct view_limits){.unlimited_memory = true}, finder->options->use_all_devices,
                           &found));
    if (!found || hapt_at_most(value_of(finder, finder->plan), value_of(finder, found))) return HAPT_OK;
    bool fits = true;
    for (int i = 0; i < found->stage_count; i++) {
        struct hapt_plan_stage *stage = &found->stage[i];
        for (int k = 0; k < stage->submesh->part_count; k++)
            stage->submesh->device_memory_bytes[k] =
                finder->profile->cluster[stage->submesh->subcluster[k]].device_memory_bytes;
        hapt_plan_stage_tighten(stage);
        fits &= hapt_at_most(stage->memory_bytes, stage->device_memory_bytes);
    }
    return add_rival(finder, "more memory", found, fits);
}

/* Searches without mixed stages, to show their gain. */
static enum hapt_status without_mixed(struct finder *finder)
{
    struct hapt_plan *found;
    if (hapt_plan_first_mixed(finder->plan) < 0) return HAPT_OK;
    HAPT_TRY(search_within(finder, &(struct view_limits){.unmixed = true}, finder->options->use_all_devices, &found));
    return add_rival(finder, "without mixed stages", found, true);
}

static enum hapt_status idle_devices(struct finder *finder)
{
    const bool other = !finder->options->use_all_devices;
    struct hapt_plan *found;
    struct hapt_limit limit;
    hapt_plan_limit(finder->profile, finder->plan, &limit);
    if (other && limit.idle_devices == 0) return HAPT_OK;
    HAPT_TRY(search_within(finder, &(struct view_limits){.order = NULL}, other, &found));
    return add_rival(finder, other ? "every device used" : "devices may stay idle", found, true);
}

static enum hapt_status other_stages(struct finder *finder)
{
    for (int more = -1; more <= 1; more += 2) {
        struct hapt_plan *found;
        const enum hapt_status status =
            rivals_stages(finder->profile, finder->options, finder->plan, more, finder->arena, &found);
        HAPT_TRY(hapt_env_agree(finder->env->world, status));
        count_search(finder);
        if (!found) continue;
        HAPT_TRY(add_rival(finder, more < 0 ? "two stages joined" : "a stage split in two", found, true));
    }
    return HAPT_OK;
}

static int compare_rivals(const void *left, const void *right)
{
    const struct hapt_rival *a = left, *b = right;
    if (!a->plan != !b->plan) return a->plan ? -1 : 1;
    if (a->plan && a->loss != b->loss) return a->loss < b->loss ? -1 : 1;
    return strcmp(a->what, b->what);
}

static enum hapt_status find_rivals(struct finder *finder, bool given, struct hapt_arena *scratch)
{
    if (given) {
        struct hapt_plan *found;
        HAPT_TRY(view_search(finder->env, finder->profile, &(struct view_limits){.order = NULL}, finder->options,
                             finder->arena, &found));
        HAPT_TRY(add_rival(finder, "the best plan", found, true));
    }
    HAPT_TRY(other_subclusters(finder));
    if (finder->in_order) {
        HAPT_TRY(other_orders(finder));
        HAPT_TRY(shifted_boundaries(finder));
        HAPT_TRY(other_bytes(finder, scratch));
    }
    HAPT_TRY(other_stages(finder));
    HAPT_TRY(without_mixed(finder));
    HAPT_TRY(unlimited_memory(finder));
    HAPT_TRY(idle_devices(finder));
    if (finder->rivals->count > 0)
        qsort(finder->rivals->rival, (size_t)finder->rivals->count, sizeof *finder->rivals->rival, compare_rivals);
    return HAPT_OK;
}

enum hapt_status hapt_plan_rivals(const struct hapt_env *env, const struct hapt_profile *profile,
                                  const struct hapt_search_options *options, const struct hapt_plan *plan,
                                  const struct hapt_join_benefit *benefit, bool given, struct hapt_arena *arena,
                                  struct hapt_rivals **rivals)
{
    struct hapt_search_options quick = *options; /* many searches */
    quick.work = QUICK;
    struct finder finder = {
        .env = env, .profile = profile, .options = &quick, .plan = plan, .benefit = benefit, .arena = arena};
    struct hapt_arena scratch;
    finder.rivals = hapt_arena_alloc(arena, 1, sizeof *finder.rivals);
    HAPT_TRY(hapt_env_agree(env->world, finder.rivals ? HAPT_OK : HAPT_ERR_MEMORY));
    finder.in_order = view_order_of(plan, &finder.order);
    for (int k = 0; k + 1 < finder.order.count; k++) finder.boundary[k] = boundary_of(plan, k);
    hapt_arena_init(&scratch);
    hapt_progress_init(&finder.progress, env, "searching",
                       6 + 6 * (long)(finder.order.count - 1) + profile->cluster_count);
    const enum hapt_status status = find_rivals(&finder, given, &scratch);
    if (status == HAPT_OK) hapt_fail_reset();
    hapt_progress_release(&finder.progress);
    hapt_arena_release(&scratch);
    HAPT_TRY(status);
    *rivals = finder.rivals;
    return HAPT_OK;
}
