/*
 * HexiScale's unequal pipelines (arXiv 2409.01143): each has nodes, layers per stage, tensor-parallel degrees and a
 * number of microbatches of its own. They are priced only, because hapt cannot run them.
 *
 * Tried: one pipeline per subcluster, and two pipelines of any nodes, of which the splits nearest to equal peak FLOP/s.
 * HexiScale finds its groups by graph partitioning, and may have more of them; it may also divide a node. Each
 * pipeline is planned as in hexiscale.c. Microbatches are divided so that all pipelines take equally long.
 *
 * Optimizer state is sharded over the pipelines, as by its FSDP. A reduction then scatters gradients and gathers
 * weights, which takes as long as the all-reduce.
 *
 * Pipelines are in step (HAPT 6.1.2: strict synchronisation), so those that cross a link between subclusters share it.
 */
#include "pipelines.h"

#include <math.h>
#include <stdlib.h>

enum { MOST_SPLITS = 6, MOST_LISTED = 512, MOST_GROUPS = HAPT_MAX_SUBCLUSTERS };

struct split {
    int count;
    int nodes[MOST_GROUPS][HAPT_MAX_SUBCLUSTERS]; /* [pipeline][subcluster] */
    double share[MOST_GROUPS];                    /* of the peak FLOP/s */
};

struct hexi_groups {
    MPI_Comm comm;
    const struct hapt_profile *profile;
    struct hapt_strategy_options options;
    struct hapt_arena *result;
    struct hapt_arena scratch;
    struct hapt_pipelines *best;
};

/* ---- Splits ---- */

static void set_shares(const struct hapt_profile *profile, struct split *split)
{
    double all = 0;
    bool known = true;
    for (int c = 0; c < profile->cluster_count; c++) known = known && profile->cluster[c].peak_flops > 0;
    for (int p = 0; p < split->count; p++) {
        split->share[p] = 0;
        for (int c = 0; c < profile->cluster_count; c++)
            split->share[p] += split->nodes[p][c] * profile->cluster[c].devices_per_node *
                               (known ? profile->cluster[c].peak_flops : 1);
        all += split->share[p];
    }
    for (int p = 0; p < split->count; p++) split->share[p] /= all;
}

/* The next vector of nodes of the first pipeline, in rising order; false: it was the last. */
static bool count_up(const struct hapt_profile *profile, int *nodes)
{
    for (int c = profile->cluster_count - 1; c >= 0; c--) {
        if (nodes[c]++ < profile->cluster[c].nodes) return true;
        nodes[c] = 0;
    }
    return false;
}

static int compare_splits(const void *a, const void *b)
{
    const struct split *left = a, *right = b;
    const double unequal = fabs(left->share[0] - 0.5), other = fabs(right->share[0] - 0.5);
    if (fabs(unequal - other) > 1e-9) return unequal < other ? -1 : 1;
    for (int c = 0; c < HAPT_MAX_SUBCLUSTERS; c++)
        if (left->nodes[0][c] != right->nodes[0][c]) return left->nodes[0][c] < right->nodes[0][c] ? -1 : 1;
    return 0;
}

/* Two pipelines, the first with at most half of the FLOP/s; the splits nearest to halves first. */
static int list_splits(const struct hapt_profile *profile, struct split *split)
{
    int nodes[HAPT_MAX_SUBCLUSTERS] = {0}, count = 0;
    while (count < MOST_LISTED && count_up(profile, nodes)) {
        struct split next = {.count = 2};
        int rest = 0;
        for (int c = 0; c < profile->cluster_count; c++) {
            next.nodes[0][c] = nodes[c];
            next.nodes[1][c] = profile->cluster[c].nodes - nodes[c];
            rest += next.nodes[1][c];
        }
        if (rest == 0) continue;
        set_shares(profile, &next);
        if (next.share[0] < 0.5 + 1e-9) split[count++] = next;
    }
    qsort(split, (size_t)count, sizeof *split, compare_splits);
    return count < MOST_SPLITS ? count : MOST_SPLITS;
}

/* ---- Planning ---- */

/* Whole numbers of at least 1 that add up to `sum`, nearest to `wanted`. */
static void round_to_sum(int count, const double *wanted, int sum, int *rounded)
{
    for (int p = 0; p < count; p++) {
        rounded[p] = (int)fmax(1, floor(wanted[p]));
        sum -= rounded[p];
    }
    while (sum != 0) {
        int at = -1;
        for (int p = 0; p < count; p++) {
            const double missing = wanted[p] - rounded[p];
            if (sum < 0 && rounded[p] == 1) continue;
            if (at < 0 || (sum > 0 ? missing > wanted[at] - rounded[at] : missing < wanted[at] - rounded[at])) at = p;
        }
        rounded[at] += sum > 0 ? 1 : -1;
        sum -= sum > 0 ? 1 : -1;
    }
}

/* *plan NULL: the pipeline has none. */
static enum hapt_status plan_pipeline(struct hexi_groups *groups, const struct split *split, int p, int microbatches,
                                      struct hapt_plan **plan)
{
    int crossing = 0, subcluster_of[HAPT_MAX_SUBCLUSTERS];
    struct hapt_profile *view;
    struct hapt_strategy_options options = groups->options;
    for (int q = 0; q < split->count; q++) {
        int used = 0;
        for (int c = 0; c < groups->profile->cluster_count; c++) used += split->nodes[q][c] > 0;
        crossing += used > 1;
    }
    *plan = NULL;
    options.search.microbatches = microbatches;
    options.search.may_fail = true;
    HAPT_TRY(hapt_env_agree(groups->comm, pipelines_view(groups->profile, split->nodes[p], crossing > 1 ? crossing : 1,
                                                         split->count, &groups->scratch, &view, subcluster_of)));
    const enum hapt_status status = plan_hexiscale(groups->comm, view, &options, groups->result, plan);
    if (status == HAPT_OK)
        pipelines_restore(subcluster_of, *plan);
    else
        *plan = NULL;
    if (status != HAPT_ERR_INFEASIBLE && status != HAPT_ERR_INPUT) return status;
    hapt_fail_reset();
    return HAPT_OK;
}

/* Plans all pipelines with these microbatches and prices them. *all false: one has no plan. */
static enum hapt_status plan_all(struct hexi_groups *groups, const struct split *split, const int *microbatches,
                                 struct hapt_plan **plan, bool *all)
{
    struct hapt_pipelines *priced;
    *all = true;
    for (int p = 0; p < split->count && *all; p++) {
        HAPT_TRY(plan_pipeline(groups, split, p, microbatches[p], &plan[p]));
        *all = plan[p] != NULL;
    }
    if (!*all) return HAPT_OK;
    HAPT_TRY(
        hapt_env_agree(groups->comm, pipelines_price(groups->profile, split->count, plan, groups->result, &priced)));
    pipelines_keep(priced, &groups->best);
    return HAPT_OK;
}

/* Microbatches with which all pipelines take equally long, by their steady periods. */
static enum hapt_status rebalance(int count, struct hapt_plan *const *plan, int sum, int *microbatches)
{
    double period_s[MOST_GROUPS], fill_s[MOST_GROUPS], wanted[MOST_GROUPS], work = sum, rate = 0;
    for (int p = 0; p < count; p++) {
        HAPT_TRY(hapt_plan_period(plan[p], &period_s[p]));
        if (period_s[p] <= 0) return HAPT_OK;
        fill_s[p] = plan[p]->simulated_s - plan[p]->microbatches * period_s[p];
        work += fill_s[p] / period_s[p];
        rate += 1 / period_s[p];
    }
    for (int p = 0; p < count; p++) wanted[p] = (work / rate - fill_s[p]) / period_s[p];
    round_to_sum(count, wanted, sum, microbatches);
    return HAPT_OK;
}

static enum hapt_status try_split(struct hexi_groups *groups, const struct split *split)
{
    struct hapt_plan *plan[MOST_GROUPS];
    const int B = groups->options.search.microbatches;
    int microbatches[MOST_GROUPS], before[MOST_GROUPS];
    double wanted[MOST_GROUPS];
    bool all, moved = false;
    if (B < split->count) return HAPT_OK;
    hapt_arena_reset(&groups->scratch);
    for (int p = 0; p < split->count; p++) wanted[p] = split->share[p] * B;
    round_to_sum(split->count, wanted, B, microbatches);
    HAPT_TRY(plan_all(groups, split, microbatches, plan, &all));
    if (!all) return HAPT_OK;
    for (int p = 0; p < split->count; p++) before[p] = microbatches[p];
    HAPT_TRY(hapt_env_agree(groups->comm, rebalance(split->count, plan, B, microbatches)));
    for (int p = 0; p < split->count; p++) moved = moved || microbatches[p] != before[p];
    return moved ? plan_all(groups, split, microbatches, plan, &all) : HAPT_OK;
}

static enum hapt_status try_all(struct hexi_groups *groups)
{
    const struct hapt_profile *profile = groups->profile;
    struct split each = {.count = profile->cluster_count}, *split = NULL;
    struct hapt_arena lists;
    hapt_arena_init(&lists);
    split = hapt_arena_alloc(&lists, MOST_LISTED, sizeof *split);
    enum hapt_status status = hapt_env_agree(groups->comm, split ? HAPT_OK : HAPT_ERR_MEMORY);
    for (int c = 0; c < profile->cluster_count; c++) each.nodes[c][c] = profile->cluster[c].nodes;
    set_shares(profile, &each);
    if (status == HAPT_OK && each.count > 2) status = try_split(groups, &each); /* two are among the splits */
    const int count = status == HAPT_OK ? list_splits(profile, split) : 0;
    for (int k = 0; k < count && status == HAPT_OK; k++) status = try_split(groups, &split[k]);
    hapt_arena_release(&lists);
    return status;
}

enum hapt_status pipelines_hexiscale(MPI_Comm comm, const struct hapt_profile *profile,
                                     const struct hapt_strategy_options *options, struct hapt_arena *result,
                                     struct hapt_pipelines **best)
{
    struct hexi_groups groups = {.comm = comm, .profile = profile, .options = *options, .result = result};
    *best = NULL;
    hapt_arena_init(&groups.scratch);
    const enum hapt_status status = try_all(&groups);
    hapt_arena_release(&groups.scratch);
    HAPT_TRY(status);
    *best = groups.best;
    return HAPT_OK;
}
