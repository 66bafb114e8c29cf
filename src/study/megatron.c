/*
 * Megatron: equally many blocks per stage, one submesh shape and one (dp, tp) everywhere, all devices used.
 *
 * The fastest simulated plan over all shapes and orders of subclusters wins. If the blocks do not divide evenly, stages
 * differ by one block. Megatron itself would refuse, so this makes the baseline stronger. Transfers overlap
 * computation, as HAPT 6.1.2 assumes for it through data parallelism.
 */
#include "even_rows.h"
#include "hapt/search.h"

struct trial {
    struct selection selection;
    const struct hapt_strategy_options *options;
    int *unit_end, *end; /* [L] */
    struct hapt_arena scratch;
};

/* Stage i takes units [i U / S, (i + 1) U / S). */
static enum hapt_status enter(struct trial *trial, const struct even_row *row, int units)
{
    struct hapt_plan *plan;
    const int64_t S = row->count;
    if (units < S) return HAPT_OK;
    for (int64_t i = 0; i < S; i++) trial->end[i] = trial->unit_end[(i + 1) * units / S - 1];
    HAPT_TRY(even_rows_plan(row, &trial->options->search, trial->end, trial->selection.result, &plan));
    return selection_enter(&trial->selection, plan, NULL);
}

/* Splits by blocks if known, else by layers: once by their number, once by their work. */
static enum hapt_status enter_row(void *context, const struct even_row *row)
{
    struct trial *trial = context;
    const struct hapt_profile *profile = row->profile;
    const bool *block_end = trial->options->block_end;
    bool *boundary;
    if (row->pass == 0) return enter(trial, row, even_rows_units(profile, block_end, trial->unit_end));
    if (row->count > profile->layer_count) return HAPT_OK;
    hapt_arena_reset(&trial->scratch);
    HAPT_TRY(hapt_plan_grid(profile, row->count, NULL, &trial->scratch, &boundary));
    return enter(trial, row, even_rows_units(profile, boundary, trial->unit_end));
}

enum hapt_status plan_megatron(const struct hapt_profile *profile, const struct hapt_strategy_options *options,
                               struct hapt_arena *result, struct hapt_plan **plan)
{
    struct trial trial = {.selection = selection_open(profile, result), .options = options};
    HAPT_TRY(need_equal_nodes(profile, HAPT_STRATEGY_MEGATRON));
    HAPT_NEW(trial.unit_end, result, profile->layer_count);
    HAPT_NEW(trial.end, result, profile->layer_count);
    hapt_arena_init(&trial.scratch);
    const enum hapt_status status = even_rows_each(profile, true, options->block_end ? 1 : 2, enter_row, &trial);
    hapt_arena_release(&trial.scratch);
    HAPT_TRY(status);
    return selection_close(&trial.selection, HAPT_STRATEGY_MEGATRON, plan);
}
