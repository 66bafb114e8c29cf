/* Rows of equal submeshes that use every device, and stages of equal weight on them. */
#include "even_rows.h"

#include <math.h>
#include <string.h>

#include "hapt/chunk_cuts.h"

enum { MOST_ORDERED = 6 };

/* Submeshes of the shape per subcluster; their sum, or 0: devices are left over, or a subcluster has no such submesh.
 */
static int count_submeshes(const struct hapt_profile *profile, const struct hapt_submesh *shape,
                           int stages[HAPT_MAX_SUBCLUSTERS])
{
    int count = 0;
    for (int c = 0; c < profile->cluster_count; c++) {
        const struct hapt_profile_cluster *cluster = &profile->cluster[c];
        const int devices = cluster->nodes * cluster->devices_per_node, each = shape->n * shape->m;
        if (find_submesh(cluster, shape) < 0 || devices % each != 0 || cluster->nodes % shape->n != 0) return 0;
        stages[c] = devices / each;
        count += stages[c];
    }
    return count;
}

static enum hapt_status take_orders(struct even_row *row, const int *stages, struct hapt_arena *scratch,
                                    enum hapt_status (*take)(void *context, const struct even_row *row), void *context)
{
    const int C = row->profile->cluster_count;
    int order[HAPT_MAX_SUBCLUSTERS];
    HAPT_NEW(row->subcluster, scratch, row->count);
    order_first(order, C);
    do {
        for (int k = 0, i = 0; k < C; k++)
            for (int own = 0; own < stages[order[k]]; own++) row->subcluster[i++] = order[k];
        HAPT_TRY(take(context, row));
    } while (order_next(order, C, MOST_ORDERED));
    return HAPT_OK;
}

enum hapt_status even_rows_each(const struct hapt_profile *profile, bool tensor_parallel, int passes,
                                enum hapt_status (*take)(void *context, const struct even_row *row), void *context)
{
    struct hapt_arena scratch;
    enum hapt_status status = HAPT_OK;
    int stages[HAPT_MAX_SUBCLUSTERS];
    hapt_arena_init(&scratch);
    for (int s = 0; s < profile->cluster[0].submesh_count && status == HAPT_OK; s++) {
        struct even_row row = {.profile = profile, .shape = profile->cluster[0].submesh[s]};
        if (row.shape.program > 0 || (row.shape.tp > 1 && !tensor_parallel)) continue;
        row.count = count_submeshes(profile, &row.shape, stages);
        for (; row.count > 0 && row.pass < passes && status == HAPT_OK; row.pass++)
            status = take_orders(&row, stages, &scratch, take, context);
        hapt_arena_reset(&scratch);
    }
    hapt_arena_release(&scratch);
    return status;
}

int even_rows_units(const struct hapt_profile *profile, const bool *block_end, int *unit_end)
{
    int units = 0;
    for (int l = 0; l < profile->layer_count; l++)
        if (l == profile->layer_count - 1 || !block_end || block_end[l]) unit_end[units++] = l + 1;
    return units;
}

enum hapt_status even_rows_plan(const struct even_row *row, const struct hapt_search_options *options, const int *end,
                                struct hapt_arena *arena, struct hapt_plan **plan)
{
    struct hapt_plan *made;
    HAPT_NEW(made, arena, 1);
    *made = hapt_search_plan(row->profile, options);
    HAPT_TRY(hapt_plan_allot(made, row->count, arena));
    for (int i = 0; i < row->count; i++) {
        made->stage[i].first_layer = i > 0 ? end[i - 1] : 0;
        made->stage[i].end_layer = end[i];
        hapt_plan_stage_run(row->profile, row->subcluster[i], &row->shape, &made->stage[i]);
    }
    *plan = made;
    return HAPT_OK;
}

struct even_stage even_rows_mean(const struct even_row *row, int first, int end)
{
    const struct hapt_profile *profile = row->profile;
    struct even_stage mean = {0};
    int count = 0;
    for (int c = 0; c < profile->cluster_count; c++) {
        const struct hapt_profile_cluster *cluster = &profile->cluster[c];
        const int s = find_submesh(cluster, &row->shape);
        const size_t cell = hapt_profile_index(profile, s < 0 ? 0 : s, first, end - 1);
        if (s < 0 || !isfinite(cluster->stage_time[cell])) continue;
        const double share = 1.0 / ++count; /* running mean */
        mean.stage_s += share * (cluster->stage_time[cell] - mean.stage_s);
        mean.forward_s += share * (cluster->stage_forward_time[cell] - mean.forward_s);
        mean.step_s += share * ((cluster->step_time ? cluster->step_time[cell] : 0) - mean.step_s);
        mean.parameter_bytes += share * (cluster->parameter_bytes[cell] - mean.parameter_bytes);
        mean.activation_bytes += share * (cluster->activation_bytes[cell] - mean.activation_bytes);
    }
    if (count == 0) mean.stage_s = mean.forward_s = NAN;
    return mean;
}

/* ---- Equal weights ---- */

struct balance {
    const struct even_row *row;
    const int *unit_end;
    double (*weight)(const struct even_stage *stage);
};

/* The weight of units [first, end) as the time of a chunk. */
static void weigh(const void *context, int chunk, int first, int end, struct hapt_chunk_costs *costs)
{
    const struct balance *balance = context;
    const struct even_stage stage =
        even_rows_mean(balance->row, first > 0 ? balance->unit_end[first - 1] : 0, balance->unit_end[end - 1]);
    (void)chunk;
    costs->forward_s = isnan(stage.stage_s) ? INFINITY : balance->weight(&stage);
}

enum hapt_status even_rows_balance(const struct even_row *row, const int *unit_end, int units,
                                   double (*weight)(const struct even_stage *stage), struct hapt_arena *scratch,
                                   int *end)
{
    const struct balance balance = {row, unit_end, weight};
    struct hapt_schedule *schedule;
    int *launches;
    HAPT_NEW(launches, scratch, row->count);
    for (int i = 0; i < row->count; i++) launches[i] = 1;
    HAPT_TRY(hapt_schedule_build(HAPT_SCHEDULE_1F1B, row->count, 1, launches, NULL, scratch, &schedule));
    const struct hapt_chunk_cuts problem = {
        .layer_count = units, .schedule = schedule, .chunk = weigh, .context = &balance};
    HAPT_TRY(hapt_chunk_cuts_even(&problem, scratch, end));
    for (int i = 0; i < row->count; i++) end[i] = unit_end[end[i] - 1];
    return HAPT_OK;
}

struct even_trial {
    struct selection selection;
    const struct hapt_strategy_options *options;
    double (*weight)(const struct even_stage *stage);
    int *unit_end, *end; /* [L] */
    struct hapt_arena scratch;
};

static enum hapt_status enter_balanced(void *context, const struct even_row *row)
{
    struct even_trial *trial = context;
    struct hapt_plan *plan;
    const int units = even_rows_units(row->profile, trial->options->block_end, trial->unit_end);
    if (units < row->count) return HAPT_OK;
    hapt_arena_reset(&trial->scratch);
    HAPT_TRY(even_rows_balance(row, trial->unit_end, units, trial->weight, &trial->scratch, trial->end));
    HAPT_TRY(even_rows_plan(row, &trial->options->search, trial->end, trial->selection.result, &plan));
    return selection_enter(&trial->selection, plan, NULL);
}

enum hapt_status even_rows_best(const struct hapt_profile *profile, enum hapt_strategy strategy,
                                const struct hapt_strategy_options *options, bool tensor_parallel,
                                double (*weight)(const struct even_stage *stage), struct hapt_arena *result,
                                struct hapt_plan **plan)
{
    struct even_trial trial = {.selection = selection_open(profile, result), .options = options, .weight = weight};
    HAPT_TRY(need_equal_nodes(profile, strategy));
    HAPT_NEW(trial.unit_end, result, profile->layer_count);
    HAPT_NEW(trial.end, result, profile->layer_count);
    hapt_arena_init(&trial.scratch);
    const enum hapt_status status = even_rows_each(profile, tensor_parallel, 1, enter_balanced, &trial);
    hapt_arena_release(&trial.scratch);
    HAPT_TRY(status);
    return selection_close(&trial.selection, strategy, plan);
}
