/*
 * DeepSpeed's pipeline engine: stages of about equal parameter bytes (its partition method "parameters": the least
 * largest stage), data parallelism inside a stage, all devices used, 1F1B.
 *
 * Every shape of submeshes and every order of the subclusters is tried; the fastest simulated plan wins. Layers are
 * blocks where the model has them, as in its list of layers. It knows neither speeds nor links. ZeRO,
 * recomputation and offloading are what the profile's rows hold, one choice for all stages. Not modelled: tensor
 * parallelism by Megatron.
 *
 * Reproduces DeepSpeed's column of Pfeife Table 1, ViT-g/14 on 2 to 8 A100s, within 1 % (tests/unit/pfeife.c).
 */
#include "even_rows.h"

static double bytes_of(const struct even_stage *stage)
{
    return stage->parameter_bytes;
}

enum hapt_status plan_deepspeed(const struct hapt_profile *profile, const struct hapt_strategy_options *options,
                                struct hapt_arena *result, struct hapt_plan **plan)
{
    return even_rows_best(profile, HAPT_STRATEGY_DEEPSPEED, options, false, bytes_of, result, plan);
}
