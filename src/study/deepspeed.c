/*
 * DeepSpeed's pipeline engine: stages of about equal parameter bytes (its partition method "parameters": the least
 * largest stage), data parallelism inside a stage, all devices used, 1F1B.
 *
 * Every shape of submeshes and every order of the subclusters is tried; the fastest simulated plan wins. Layers are
 * blocks where the model has them, as in its list of layers. It knows neither speeds nor links. Not modelled: ZeRO
 * beyond what the profile holds, tensor parallelism by Megatron, activation checkpoints.
 *
 * Reproduces DeepSpeed's column of Pfeife Table 1, ViT-g/14 on 2 to 8 A100s, within 1 % (tests/unit/pfeife.c).
 */
#include "even_rows.h"

struct trial {
    struct selection selection;
    const struct hapt_strategy_options *options;
    int *unit_end, *end; /* [L] */
    struct hapt_arena scratch;
};

static double bytes_of(const struct even_stage *stage)
{
    return stage->parameter_bytes;
}

static enum hapt_status enter_row(void *context, const struct even_row *row)
{
    struct trial *trial = context;
    struct hapt_plan *plan;
    const int units = even_rows_units(row->profile, trial->options->block_end, trial->unit_end);
    if (units < row->count) return HAPT_OK;
    hapt_arena_reset(&trial->scratch);
    HAPT_TRY(even_rows_balance(row, trial->unit_end, units, bytes_of, &trial->scratch, trial->end));
    HAPT_TRY(even_rows_plan(row, &trial->options->search, trial->end, trial->selection.result, &plan));
    return selection_enter(&trial->selection, plan, NULL);
}

enum hapt_status plan_deepspeed(const struct hapt_profile *profile, const struct hapt_strategy_options *options,
                                struct hapt_arena *result, struct hapt_plan **plan)
{
    struct trial trial = {.selection = selection_open(profile, result), .options = options};
    HAPT_TRY(need_equal_nodes(profile, HAPT_STRATEGY_DEEPSPEED));
    HAPT_NEW(trial.unit_end, result, profile->layer_count);
    HAPT_NEW(trial.end, result, profile->layer_count);
    hapt_arena_init(&trial.scratch);
    const enum hapt_status status = even_rows_each(profile, false, 1, enter_row, &trial);
    hapt_arena_release(&trial.scratch);
    HAPT_TRY(status);
    return selection_close(&trial.selection, HAPT_STRATEGY_DEEPSPEED, plan);
}
