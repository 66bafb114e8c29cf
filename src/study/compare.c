/* Runs every strategy and ablation, for hapt_plan_compare. */
#include "baselines.h"
#include "hapt/progress.h"
#include "hapt/search.h"

#include <math.h>

static const struct hapt_compare_row table[] = {
    {.name = "hapt", .schedule = HAPT_SCHEDULE_H1F1B},
    {.name = "hexiscale", .strategy = HAPT_STRATEGY_HEXISCALE},
    {.name = "alpa", .strategy = HAPT_STRATEGY_ALPA},
    {.name = "megatron", .strategy = HAPT_STRATEGY_MEGATRON},
    {.name = "pfeife", .strategy = HAPT_STRATEGY_PFEIFE},
    {.name = "deepspeed", .strategy = HAPT_STRATEGY_DEEPSPEED},
    {.name = "colossal", .strategy = HAPT_STRATEGY_COLOSSAL},
    {.name = "even", .strategy = HAPT_STRATEGY_EVEN, .schedule = HAPT_SCHEDULE_H1F1B},
    {.name = "granularity 8", .schedule = HAPT_SCHEDULE_H1F1B, .granularity = 8},
    {.name = "granularity 16", .schedule = HAPT_SCHEDULE_H1F1B, .granularity = 16},
    {.name = "granularity 48", .schedule = HAPT_SCHEDULE_H1F1B, .granularity = 48},
    {.name = "ignore-communication", .schedule = HAPT_SCHEDULE_H1F1B, .ignore_communication = true},
    {.name = "schedule 1f1b", .schedule = HAPT_SCHEDULE_1F1B},
    {.name = "schedule eager1f1b", .schedule = HAPT_SCHEDULE_EAGER},
    {.name = "schedule gpipe", .schedule = HAPT_SCHEDULE_GPIPE},
};
enum { ROWS = sizeof table / sizeof table[0] };

/* Finds the slowest boundary between two subclusters. */
static enum hapt_status look_at_link(struct hapt_compare_row *row)
{
    const struct hapt_plan *plan = row->plan;
    for (int i = 0; i < plan->stage_count - 1; i++) {
        const struct hapt_plan_stage *here = &plan->stage[i], *next = &plan->stage[i + 1];
        if (!hapt_plan_is_mixed(here) && !hapt_plan_is_mixed(next) &&
            here->submesh->subcluster[0] == next->submesh->subcluster[0])
            continue;
        if (row->boundary < 0 || plan->stage[i].comm_s > plan->stage[row->boundary].comm_s) row->boundary = i;
    }
    if (row->boundary < 0) return HAPT_OK;
    row->comm_s = plan->stage[row->boundary].comm_s;
    return hapt_plan_overlap(plan, row->boundary, &row->overlap);
}

double hapt_compare_step_s(const struct hapt_compare_row *row)
{
    return fmin(row->plan ? row->plan->simulated_s : INFINITY, row->pipelines ? row->pipelines->simulated_s : INFINITY);
}

static enum hapt_status fill_row(MPI_Comm comm, const struct hapt_profile *profile,
                                 const struct hapt_strategy_options *options, struct hapt_arena *result,
                                 struct hapt_compare_row *row)
{
    struct hapt_strategy_options own = *options;
    struct hapt_plan *plan = NULL;
    own.search.schedule = row->schedule;
    own.search.any_schedule = options->search.any_schedule && row->schedule == HAPT_SCHEDULE_H1F1B;
    own.search.any_loops = options->search.any_loops && own.search.any_schedule &&
                           row->strategy == HAPT_STRATEGY_HAPT && row->granularity == 0 && !row->ignore_communication;
    own.search.may_fail = true;
    own.granularity = row->granularity;
    own.ignore_communication = row->ignore_communication;
    row->schedule = hapt_strategy_schedule(row->strategy, row->schedule);
    row->boundary = -1;
    row->ratio = row->comm_s = row->overlap = NAN;
    enum hapt_status status = hapt_plan_by_strategy(comm, profile, row->strategy, &own, result, &plan, &row->note);
    if (status == HAPT_ERR_INFEASIBLE || status == HAPT_ERR_INPUT) {
        row->reason = hapt_arena_strdup(result, hapt_fail_message());
        status = row->reason ? HAPT_OK : HAPT_ERR_MEMORY;
        if (row->reason) hapt_fail_reset();
    } else {
        HAPT_TRY(status); /* agreed and printed already */
        row->plan = plan;
        if (row->strategy == HAPT_STRATEGY_MEGATRON || own.search.any_loops)
            row->schedule = plan->schedule; /* chosen */
        status = look_at_link(row);
    }
    HAPT_TRY(hapt_env_agree(comm, status));
    struct hapt_pipelines *pipelines;
    HAPT_TRY(hapt_plan_pipelines(comm, profile, row->strategy, &own, result, &pipelines));
    row->pipelines = pipelines;
    return HAPT_OK;
}

enum hapt_status hapt_plan_compare(MPI_Comm comm, const struct hapt_profile *profile,
                                   const struct hapt_strategy_options *options, struct hapt_arena *result,
                                   struct hapt_compare_row **rows, int *count)
{
    struct hapt_compare_row *made = hapt_arena_alloc(result, ROWS, sizeof *made);
    HAPT_TRY(hapt_env_agree(comm, made ? HAPT_OK : HAPT_ERR_MEMORY));
    struct hapt_progress progress;
    enum hapt_status status = HAPT_OK;
    hapt_progress_init(&progress, NULL, "strategies", ROWS);
    for (int r = 0; r < ROWS && status == HAPT_OK; r++) {
        made[r] = table[r];
        hapt_progress_update(&progress, r, NULL);
        status = fill_row(comm, profile, options, result, &made[r]);
        const double step_s = hapt_compare_step_s(&made[r]);
        if (isfinite(step_s) && made[0].plan) made[r].ratio = step_s / made[0].plan->simulated_s;
    }
    hapt_progress_release(&progress);
    HAPT_TRY(status);
    *rows = made;
    *count = ROWS;
    return HAPT_OK;
}
