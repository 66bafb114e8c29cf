/*
 * The best boundaries for a given row of submeshes. With fixed submeshes, slot and first layer identify a suffix of the
 * pipeline. For each suffix the least latency is kept, per launch count of its first stage.
 */
#include "hapt/recut.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define SLOWEST_S 1e300 /* a t_max that nothing reaches; finite, so that its product with epsilon 0 is 0 */

struct suffix {
    double latency_s;         /* INFINITY: none */
    int end, submesh, behind; /* its first stage; the launch index of the suffix behind it */
};

/* A stage that may start at some layer. */
struct entry {
    double time_s;
    int end, submesh;
    int most; /* microbatches in flight that fit, at most B */
};

/* The stages on n x m devices of a subcluster; slots of the same kind share them. */
struct entries {
    struct hapt_recut_slot kind;
    int *first; /* [L + 1] those that start at layer l are entry[first[l]] to entry[first[l + 1] - 1], by end */
    struct entry *entry;
};

struct recut {
    const struct hapt_profile *profile;
    const struct hapt_search_options *options;
    const struct hapt_recut_slot *slot;
    int count, L, B;
    int launches;          /* number of launch counts; 1 (index 0) under GPipe */
    struct suffix *suffix; /* [slot][layer][launches] */
    int *low, *high;       /* [slot] layers at which a suffix starts; low > high: none */
    int kinds;
    struct entries *entries;   /* [kinds] */
    const struct entries **of; /* [slot] */
    int *delta;                /* [L + 1] launches that a boundary adds at the t_max of `fill`; -1: not allowed */
    double *comm_s;            /* [L + 1] */
    double *t_max;
    int64_t t_max_count;
    double best_s, best_t_max_s;
};

static struct suffix *suffix_at(const struct recut *recut, int slot, int layer)
{
    return &recut->suffix[((size_t)slot * (size_t)recut->L + (size_t)layer) * (size_t)recut->launches];
}

static bool serves(const struct recut *recut, int slot, int submesh)
{
    const struct hapt_recut_slot *at = &recut->slot[slot];
    const struct hapt_submesh *candidate = &recut->profile->cluster[at->subcluster].submesh[submesh];
    return candidate->n == at->n && candidate->m == at->m;
}

static double time_of(const struct recut *recut, int slot, size_t cell)
{
    const struct hapt_profile_cluster *cluster = &recut->profile->cluster[recut->slot[slot].subcluster];
    return cluster->stage_time[cell] + (cluster->step_time ? cluster->step_time[cell] : 0) / recut->B;
}

static double comm_behind(const struct recut *recut, int slot, int end)
{
    if (slot == recut->count - 1) return 0;
    return hapt_profile_comm_s(recut->profile, end - 1, recut->slot[slot].subcluster, recut->slot[slot + 1].subcluster);
}

/* The most launches, of those that can occur, that fit into the memory. */
static int most_launches(const struct recut *recut, const struct hapt_profile_cluster *cluster, size_t cell)
{
    const bool all = recut->options->schedule == HAPT_SCHEDULE_GPIPE;
    int most = all ? recut->B : recut->launches;
    while (most > 0 && !hapt_at_most(cluster->parameter_bytes[cell] + most * cluster->activation_bytes[cell],
                                     cluster->device_memory_bytes))
        most = all ? 0 : most - 1;
    return most;
}

/* True if an entry for the same layers makes the new one useless. */
static bool is_beaten(const struct entry *list, int count, const struct entry *one)
{
    for (int k = count - 1; k >= 0 && list[k].end == one->end; k--)
        if (list[k].time_s <= one->time_s && list[k].most >= one->most) return true;
    return false;
}

/* The ends of all stages of a slot that start at a layer. */
static struct hapt_profile_ends ends_of(const struct recut *recut, int slot, int layer)
{
    const struct hapt_profile_cluster *cluster = &recut->profile->cluster[recut->slot[slot].subcluster];
    struct hapt_profile_ends all = {recut->L + 1, 0};
    for (int s = 0; s < cluster->submesh_count; s++) {
        if (!serves(recut, slot, s)) continue;
        const struct hapt_profile_ends own = hapt_profile_ends_of(recut->profile, cluster, s, layer);
        if (own.least < all.least) all.least = own.least;
        if (own.most > all.most) all.most = own.most;
    }
    return all;
}

/* Lists the stages of a slot's kind. */
static enum hapt_status list_entries(const struct recut *recut, int slot, struct hapt_arena *scratch,
                                     struct entries *list)
{
    const struct hapt_profile_cluster *cluster = &recut->profile->cluster[recut->slot[slot].subcluster];
    int programs = 0, count = 0;
    for (int s = 0; s < cluster->submesh_count; s++) programs += serves(recut, slot, s);
    list->kind = recut->slot[slot];
    HAPT_NEW(list->first, scratch, recut->L + 1);
    list->entry = hapt_arena_alloc_unset(scratch, (size_t)programs * (size_t)recut->L * (size_t)(recut->L + 1) / 2,
                                         sizeof *list->entry);
    if (!list->entry) return HAPT_ERR_MEMORY;
    for (int layer = 0; layer < recut->L; layer++) {
        const struct hapt_profile_ends all = ends_of(recut, slot, layer);
        list->first[layer] = count;
        for (int end = all.least; end <= all.most; end++)
            for (int s = 0; s < cluster->submesh_count; s++) {
                if (!serves(recut, slot, s)) continue;
                const size_t cell = hapt_profile_index(recut->profile, s, layer, end - 1);
                struct entry one = {.time_s = time_of(recut, slot, cell), .end = end, .submesh = s};
                if (!isfinite(one.time_s)) continue;
                one.most = most_launches(recut, cluster, cell);
                if (one.most == 0 || is_beaten(&list->entry[list->first[layer]], count - list->first[layer], &one))
                    continue;
                list->entry[count++] = one;
            }
    }
    list->first[recut->L] = count;
    return HAPT_OK;
}

/* Prices the boundaries behind a slot at a t_max. */
static void price_boundaries(struct recut *recut, int slot, double t_max_s)
{
    for (int end = 1; end <= recut->L; end++) {
        const double comm_s = comm_behind(recut, slot, end);
        recut->comm_s[end] = comm_s;
        recut->delta[end] =
            isfinite(comm_s) && hapt_at_most(comm_s, t_max_s)
                ? hapt_schedule_delta(recut->options->schedule, comm_s, t_max_s, recut->options->hide_threshold)
                : -1;
    }
}

/* Puts a stage in front of every suffix that starts at its end. `here`: the suffixes from its first layer on. */
static void put_stage(struct recut *recut, int slot, const struct entry *entry, struct suffix *here)
{
    const bool all = recut->options->schedule == HAPT_SCHEDULE_GPIPE, last = slot == recut->count - 1;
    const int delta = recut->delta[entry->end];
    const double cost_s = entry->time_s + 2 * recut->comm_s[entry->end];
    if (last) {
        if (cost_s < here[0].latency_s) here[0] = (struct suffix){cost_s, entry->end, entry->submesh, 0};
        return;
    }
    const struct suffix *behind = suffix_at(recut, slot + 1, entry->end);
    const int stages = recut->count - 1 - slot; /* behind: they have at least `stages` launches, at most 3 more each */
    const int first = all ? 0 : stages - 1 < recut->B - 1 ? stages - 1 : recut->B - 1;
    const int highest = 3 * (stages - 1), end = all ? 1 : highest < recut->launches ? highest + 1 : recut->launches;
    for (int k = first; k < end; k++) {
        const double rest_s = behind[k].latency_s;
        const int more = k + 1 + delta; /* index k means k + 1 launches */
        const int launches = all || more > recut->B ? recut->B : more;
        if (launches > entry->most) return;
        struct suffix *to = &here[all ? 0 : launches - 1];
        const double latency_s = cost_s + rest_s;
        if (latency_s < to->latency_s) *to = (struct suffix){latency_s, entry->end, entry->submesh, k};
    }
}

/* The launch indices that suffixes of a slot can have: [*first, *end). Each boundary behind adds 1 to 3 launches. */
static void find_launches(const struct recut *recut, int slot, int *first, int *end)
{
    const int behind = recut->count - 1 - slot, most = recut->launches - 1;
    *first = behind < most ? behind : most;
    *end = 1 + (3 * behind < most ? 3 * behind : most);
}

/* The least latency sum at a t_max. A slot reads only suffixes between `low` and `high` of the next slot. All of them
 * were set before in the same call. */
static double fill(struct recut *recut, double t_max_s)
{
    double best_s = INFINITY;
    int first = 0, end = 0;
    for (int slot = recut->count - 1; slot >= 0; slot--) {
        const struct entries *list = recut->of[slot];
        const bool last = slot == recut->count - 1;
        const int furthest = last ? recut->L : recut->high[slot + 1], nearest = last ? recut->L : recut->low[slot + 1];
        price_boundaries(recut, slot, t_max_s);
        find_launches(recut, slot, &first, &end);
        recut->low[slot] = recut->L;
        recut->high[slot] = -1;
        for (int layer = slot; layer < furthest && layer <= (slot == 0 ? 0 : recut->L - 1); layer++) {
            struct suffix *here = suffix_at(recut, slot, layer);
            for (int k = first; k < end; k++) here[k].latency_s = INFINITY;
            for (int e = list->first[layer]; e < list->first[layer + 1]; e++) {
                const struct entry *entry = &list->entry[e];
                if (entry->end > furthest) break;
                if (entry->end < nearest || recut->delta[entry->end] < 0 || !hapt_at_most(entry->time_s, t_max_s))
                    continue;
                put_stage(recut, slot, entry, here);
            }
            bool some = false;
            for (int k = first; k < end; k++) some |= isfinite(here[k].latency_s);
            if (!some) continue;
            if (layer < recut->low[slot]) recut->low[slot] = layer;
            recut->high[slot] = layer;
        }
        if (recut->high[slot] < 0) return INFINITY;
    }
    for (int k = first; k < end; k++) best_s = fmin(best_s, suffix_at(recut, 0, 0)[k].latency_s);
    return best_s;
}

static double objective(const struct recut *recut, double t_max_s, double latency_s)
{
    return latency_s + (recut->B - 1) * t_max_s;
}

/* Collects the t_max values in (low_s, high_s] at which something changes; returns their number. `t_max` NULL: only
 * counts. */
static int64_t collect(const struct recut *recut, double low_s, double high_s, double *t_max)
{
    int64_t count = 0;
    for (int slot = 0; slot < recut->count; slot++) {
        const struct hapt_profile_cluster *cluster = &recut->profile->cluster[recut->slot[slot].subcluster];
        for (int s = 0; s < cluster->submesh_count; s++) {
            for (int i = 0; serves(recut, slot, s) && i < recut->L; i++) {
                const struct hapt_profile_ends ends = hapt_profile_ends_of(recut->profile, cluster, s, i);
                for (int end = ends.least; end <= ends.most; end++) {
                    const double time_s = time_of(recut, slot, hapt_profile_index(recut->profile, s, i, end - 1));
                    if (!(time_s > low_s && time_s <= high_s)) continue;
                    if (t_max) t_max[count] = time_s;
                    count++;
                }
            }
        }
        for (int end = 1; end < recut->L; end++) {
            const double c = comm_behind(recut, slot, end), each[3] = {c, 2 * c, c / recut->options->hide_threshold};
            for (int k = 0; k < 3; k++) {
                if (!(each[k] > low_s && each[k] <= high_s && isfinite(each[k]))) continue;
                if (t_max) t_max[count] = each[k];
                count++;
            }
        }
    }
    return count;
}

/* Searches the t_max values [first, end). No sum there is below `least_s`, the sum at the next larger t_max. */
static void explore(struct recut *recut, int64_t first, int64_t end, double least_s)
{
    while (first < end) {
        if (!(objective(recut, recut->t_max[first], least_s) < recut->best_s)) return;
        const int64_t middle = first + (end - first) / 2;
        const double t_max_s = recut->t_max[middle], latency_s = fill(recut, t_max_s);
        if (objective(recut, t_max_s, latency_s) < recut->best_s) {
            recut->best_s = objective(recut, t_max_s, latency_s);
            recut->best_t_max_s = t_max_s;
        }
        if (isfinite(latency_s)) explore(recut, first, middle, latency_s);
        if (!(latency_s > least_s)) return; /* a larger t_max gains nothing */
        first = middle + 1;
    }
}

static enum hapt_status read_plan(struct recut *recut, struct hapt_arena *arena, struct hapt_plan **plan)
{
    struct hapt_plan *made;
    fill(recut, recut->best_t_max_s);
    HAPT_NEW(made, arena, 1);
    *made = hapt_search_plan(recut->profile, recut->options);
    HAPT_TRY(hapt_plan_allot(made, recut->count, arena));
    int best, end, layer = 0;
    find_launches(recut, 0, &best, &end);
    for (int k = best + 1; k < end; k++)
        if (suffix_at(recut, 0, 0)[k].latency_s < suffix_at(recut, 0, 0)[best].latency_s) best = k;
    for (int slot = 0; slot < recut->count; slot++) {
        const struct suffix *at = &suffix_at(recut, slot, layer)[best];
        const int c = recut->slot[slot].subcluster;
        made->stage[slot].first_layer = layer;
        made->stage[slot].end_layer = at->end;
        hapt_plan_stage_run(recut->profile, c, &recut->profile->cluster[c].submesh[at->submesh], &made->stage[slot]);
        layer = at->end;
        best = at->behind;
    }
    *plan = made;
    return hapt_plan_price_at(recut->profile, recut->best_t_max_s, made);
}

/* Narrows the range of t_max. At or below *low_s no plan exists. Above *high_s none beats a plan just above *low_s.
 * `least_s`: lower bound of all sums. */
static void bracket(struct recut *recut, double least_s, double *low_s, double *high_s)
{
    double feasible_s = isfinite(*high_s) ? *high_s : 1;
    *low_s = 0;
    while (!isfinite(fill(recut, feasible_s))) feasible_s *= 2;
    for (int i = 0; i < 200 && feasible_s - *low_s > 1e-3 * feasible_s; i++) {
        const double middle_s = 0.5 * (*low_s + feasible_s);
        *(isfinite(fill(recut, middle_s)) ? &feasible_s : low_s) = middle_s;
    }
    const double known_s = objective(recut, feasible_s, fill(recut, feasible_s));
    if (recut->B > 1) *high_s = fmin(*high_s, (known_s - least_s) / (recut->B - 1) * (1 + 1e-9));
}

static enum hapt_status search(struct recut *recut, double bound_s, struct hapt_arena *scratch)
{
    /* a larger t_max exceeds the bound */
    double low_s, high_s = recut->B > 1 ? bound_s / (recut->B - 1) : INFINITY;
    double least_s = fill(recut, fmin(high_s, SLOWEST_S));
    if (!isfinite(least_s) || least_s >= bound_s) return HAPT_OK;
    /* A t_max is also excluded if it exceeds the bound with the least sum at a larger t_max. This ends the search for
     * most rows of submeshes. */
    for (double slower_s = INFINITY; recut->B > 1 && high_s < 0.999 * slower_s;) {
        slower_s = high_s;
        high_s = fmin(high_s, (bound_s - least_s) / (recut->B - 1) * (1 + 1e-9));
        least_s = fill(recut, fmin(high_s, SLOWEST_S));
        if (!isfinite(least_s) || least_s >= bound_s) return HAPT_OK;
    }
    bracket(recut, least_s, &low_s, &high_s);
    const int64_t count = collect(recut, low_s, high_s, NULL);
    HAPT_NEW(recut->t_max, scratch, count);
    collect(recut, low_s, high_s, recut->t_max);
    qsort(recut->t_max, (size_t)count, sizeof *recut->t_max, hapt_compare_doubles);
    for (int64_t i = 0; i < count; i++)
        if (i == 0 || recut->t_max[i] != recut->t_max[recut->t_max_count - 1])
            recut->t_max[recut->t_max_count++] = recut->t_max[i];
    explore(recut, 0, recut->t_max_count, least_s);
    return HAPT_OK;
}

static enum hapt_status prepare(struct recut *recut, struct hapt_arena *scratch)
{
    const int most = 1 + 3 * (recut->count - 1);
    recut->launches = recut->options->schedule == HAPT_SCHEDULE_GPIPE ? 1 : most < recut->B ? most : recut->B;
    const size_t suffixes = (size_t)recut->count * (size_t)recut->L * (size_t)recut->launches;
    recut->suffix = hapt_arena_alloc_unset(scratch, suffixes, sizeof *recut->suffix); /* `fill` reads what it has set */
    if (!recut->suffix) return HAPT_ERR_MEMORY;
    HAPT_NEW(recut->low, scratch, recut->count);
    HAPT_NEW(recut->high, scratch, recut->count);
    HAPT_NEW(recut->delta, scratch, recut->L + 1);
    HAPT_NEW(recut->comm_s, scratch, recut->L + 1);
    HAPT_NEW(recut->entries, scratch, recut->count);
    HAPT_NEW(recut->of, scratch, recut->count);
    for (int slot = 0; slot < recut->count; slot++) {
        int kind = 0;
        while (kind < recut->kinds && memcmp(&recut->entries[kind].kind, &recut->slot[slot], sizeof *recut->slot) != 0)
            kind++;
        if (kind == recut->kinds) HAPT_TRY(list_entries(recut, slot, scratch, &recut->entries[recut->kinds++]));
        recut->of[slot] = &recut->entries[kind];
    }
    return HAPT_OK;
}

enum hapt_status hapt_plan_recut(const struct hapt_profile *profile, const struct hapt_search_options *options,
                                 const struct hapt_recut_slot *slot, int count, double bound_s,
                                 struct hapt_arena *arena, struct hapt_plan **plan)
{
    struct recut recut = {.profile = profile,
                          .options = options,
                          .slot = slot,
                          .count = count,
                          .L = profile->layer_count,
                          .B = options->microbatches,
                          .best_s = bound_s};
    struct hapt_arena scratch;
    *plan = NULL;
    if (count > profile->layer_count) return HAPT_OK;
    hapt_arena_init(&scratch);
    enum hapt_status status = prepare(&recut, &scratch);
    if (status == HAPT_OK) status = search(&recut, bound_s, &scratch);
    if (status == HAPT_OK && recut.best_s < bound_s) status = read_plan(&recut, arena, plan);
    hapt_arena_release(&scratch);
    return status;
}

/* True if the same submesh is listed before, with another program. */
static bool repeats(const struct hapt_profile_cluster *cluster, int s)
{
    for (int other = 0; other < s; other++)
        if (cluster->submesh[other].n == cluster->submesh[s].n && cluster->submesh[other].m == cluster->submesh[s].m)
            return true;
    return false;
}

enum hapt_status hapt_recut_share(const struct hapt_profile *profile, int c, int devices, bool two, bool exact,
                                  struct hapt_recut_slot *slot, enum hapt_status (*take)(void *context), void *context)
{
    const struct hapt_profile_cluster *cluster = &profile->cluster[c];
    for (int s = 0; s < cluster->submesh_count; s++) {
        const int left = devices - cluster->submesh[s].n * cluster->submesh[s].m;
        if (left < 0 || repeats(cluster, s)) continue;
        *slot = (struct hapt_recut_slot){c, cluster->submesh[s].n, cluster->submesh[s].m};
        if (two)
            HAPT_TRY(hapt_recut_share(profile, c, left, false, exact, slot + 1, take, context));
        else if (left == 0 || !exact)
            HAPT_TRY(take(context));
    }
    return HAPT_OK;
}
