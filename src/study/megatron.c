/*
 * Megatron: equally many blocks per stage, one submesh shape and one (dp, tp) everywhere, all devices used.
 *
 * The fastest simulated plan over all shapes and orders of subclusters wins. If the blocks do not divide evenly, stages
 * differ by one block. Megatron itself would refuse, so this makes the baseline stronger. Transfers overlap
 * computation, as HAPT 6.1.2 assumes for it through data parallelism.
 */
#include "baselines.h"
#include "hapt/search.h"

enum { MOST_ORDERED = 6 };

struct trial {
    struct selection selection;
    const struct hapt_strategy_options *options;
    struct hapt_submesh shape;
    int stages[HAPT_MAX_SUBCLUSTERS]; /* per subcluster */
    int stage_count;
};

/* Number of stages of the shape per subcluster. False: devices are left over, or a subcluster has no such submesh. */
static bool fill(struct trial *trial)
{
    const struct hapt_profile *profile = trial->selection.profile;
    trial->stage_count = 0;
    for (int c = 0; c < profile->cluster_count; c++) {
        const struct hapt_profile_cluster *cluster = &profile->cluster[c];
        const int devices = cluster->nodes * cluster->devices_per_node, each = trial->shape.n * trial->shape.m;
        if (find_submesh(cluster, &trial->shape) < 0 || devices % each != 0 || cluster->nodes % trial->shape.n != 0)
            return false;
        trial->stages[c] = devices / each;
        trial->stage_count += trial->stages[c];
    }
    return true;
}

/* Stage i takes units [i U / S, (i + 1) U / S). unit_end[U]: end of each unit in layers. */
static enum hapt_status enter(struct trial *trial, const int *order, const int *unit_end, int units)
{
    const struct hapt_profile *profile = trial->selection.profile;
    const int S = trial->stage_count;
    struct hapt_plan *plan;
    HAPT_NEW(plan, trial->selection.result, 1);
    *plan = hapt_search_plan(profile, &trial->options->search);
    HAPT_TRY(hapt_plan_allot(plan, S, trial->selection.result));
    int64_t i = 0;
    for (int k = 0; k < profile->cluster_count; k++) {
        for (int own = 0; own < trial->stages[order[k]]; own++, i++) {
            struct hapt_plan_stage *stage = &plan->stage[i];
            stage->first_layer = i > 0 ? plan->stage[i - 1].end_layer : 0;
            stage->end_layer = unit_end[(i + 1) * units / S - 1];
            hapt_plan_stage_run(profile, order[k], &trial->shape, stage);
        }
    }
    return selection_enter(&trial->selection, plan, NULL);
}

static enum hapt_status enter_orders(struct trial *trial, const int *unit_end, int units)
{
    const int C = trial->selection.profile->cluster_count;
    int order[HAPT_MAX_SUBCLUSTERS];
    if (units < trial->stage_count) return HAPT_OK;
    order_first(order, C);
    do HAPT_TRY(enter(trial, order, unit_end, units));
    while (order_next(order, C, MOST_ORDERED));
    return HAPT_OK;
}

static int collect_units(const bool *boundary, int layers, int *unit_end)
{
    int units = 0;
    for (int l = 0; l < layers; l++)
        if (l == layers - 1 || !boundary || boundary[l]) unit_end[units++] = l + 1;
    return units;
}

/* Splits by blocks if known, else by layers: once by their number, once by their work. */
static enum hapt_status enter_shape(struct trial *trial, int *unit_end, struct hapt_arena *scratch)
{
    const struct hapt_profile *profile = trial->selection.profile;
    const int L = profile->layer_count;
    const bool *block_end = trial->options->block_end;
    bool *boundary;
    HAPT_TRY(enter_orders(trial, unit_end, collect_units(block_end, L, unit_end)));
    if (block_end || trial->stage_count > L) return HAPT_OK;
    HAPT_TRY(hapt_plan_grid(profile, trial->stage_count, NULL, scratch, &boundary));
    return enter_orders(trial, unit_end, collect_units(boundary, L, unit_end));
}

static enum hapt_status enter_all(struct trial *trial, struct hapt_arena *scratch)
{
    const struct hapt_profile *profile = trial->selection.profile;
    int *unit_end;
    HAPT_NEW(unit_end, scratch, profile->layer_count);
    for (int s = 0; s < profile->cluster[0].submesh_count; s++) {
        trial->shape = profile->cluster[0].submesh[s];
        if (trial->shape.program > 0) continue; /* it has only data and tensor parallelism */
        if (fill(trial)) HAPT_TRY(enter_shape(trial, unit_end, scratch));
    }
    return HAPT_OK;
}

enum hapt_status plan_megatron(const struct hapt_profile *profile, const struct hapt_strategy_options *options,
                               struct hapt_arena *result, struct hapt_plan **plan)
{
    struct trial trial = {.selection = selection_open(profile, result), .options = options};
    struct hapt_arena scratch;
    HAPT_TRY(need_equal_nodes(profile, HAPT_STRATEGY_MEGATRON));
    hapt_arena_init(&scratch);
    const enum hapt_status status = enter_all(&trial, &scratch);
    hapt_arena_release(&scratch);
    HAPT_TRY(status);
    return selection_close(&trial.selection, HAPT_STRATEGY_MEGATRON, plan);
}
