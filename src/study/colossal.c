/*
 * Colossal-AI's pipeline: stages of about equal time on devices that it takes for equal, data and tensor parallelism of
 * one degree inside all stages, all devices used, 1F1B.
 *
 * Every shape of submeshes and every order of the subclusters is tried; the fastest simulated plan wins. The time of a
 * stage is the mean over the subclusters. Layers are blocks where the model has them. It knows neither speeds nor
 * links. Not modelled: its Gemini memory manager, its interleaved and zero-bubble schedules.
 *
 * Reproduces Colossal-AI's column of Pfeife Table 1 within 2 % in three of six rows (2 devices; 4 devices with 4
 * microbatches). In the others its runtime was 7 to 28 % slower than DeepSpeed's with equal stages; the simulator has
 * no reason for that (tests/unit/pfeife.c).
 */
#include "even_rows.h"

struct trial {
    struct selection selection;
    const struct hapt_strategy_options *options;
    int *unit_end, *end; /* [L] */
    struct hapt_arena scratch;
};

static double time_of(const struct even_stage *stage)
{
    return stage->stage_s;
}

static enum hapt_status enter_row(void *context, const struct even_row *row)
{
    struct trial *trial = context;
    struct hapt_plan *plan;
    const int units = even_rows_units(row->profile, trial->options->block_end, trial->unit_end);
    if (units < row->count) return HAPT_OK;
    hapt_arena_reset(&trial->scratch);
    HAPT_TRY(even_rows_balance(row, trial->unit_end, units, time_of, &trial->scratch, trial->end));
    HAPT_TRY(even_rows_plan(row, &trial->options->search, trial->end, trial->selection.result, &plan));
    return selection_enter(&trial->selection, plan, NULL);
}

enum hapt_status plan_colossal(const struct hapt_profile *profile, const struct hapt_strategy_options *options,
                               struct hapt_arena *result, struct hapt_plan **plan)
{
    struct trial trial = {.selection = selection_open(profile, result), .options = options};
    HAPT_TRY(need_equal_nodes(profile, HAPT_STRATEGY_COLOSSAL));
    HAPT_NEW(trial.unit_end, result, profile->layer_count);
    HAPT_NEW(trial.end, result, profile->layer_count);
    hapt_arena_init(&trial.scratch);
    const enum hapt_status status = even_rows_each(profile, true, 1, enter_row, &trial);
    hapt_arena_release(&trial.scratch);
    HAPT_TRY(status);
    return selection_close(&trial.selection, HAPT_STRATEGY_COLOSSAL, plan);
}
