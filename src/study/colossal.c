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

static double time_of(const struct even_stage *stage)
{
    return stage->stage_s;
}

enum hapt_status plan_colossal(const struct hapt_profile *profile, const struct hapt_strategy_options *options,
                               struct hapt_arena *result, struct hapt_plan **plan)
{
    return even_rows_best(profile, HAPT_STRATEGY_COLOSSAL, options, true, time_of, result, plan);
}
