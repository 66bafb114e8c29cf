/* Optimizer settings, learning-rate schedule, clipping. */
#include <math.h>
#include <string.h>

#include "hapt/train.h"

void hapt_optimizer_options(const struct hapt_config *config, struct hapt_optimizer_options *options)
{
    const bool adamw = strcmp(hapt_config_text(config, "optimizer"), "adamw") == 0;
    *options = (struct hapt_optimizer_options){
        .optimizer = adamw ? HAPT_OPTIMIZER_ADAMW : HAPT_OPTIMIZER_SGD,
        .cosine = strcmp(hapt_config_text(config, "lr-schedule"), "cosine") == 0,
        .learning_rate = hapt_config_real(config, "learning-rate"),
        .min_ratio = hapt_config_real(config, "min-lr-ratio"),
        .beta1 = hapt_config_real(config, "beta1"),
        .beta2 = hapt_config_real(config, "beta2"),
        .epsilon = hapt_config_real(config, "epsilon"),
        .momentum = hapt_config_real(config, "momentum"),
        .weight_decay = hapt_config_real(config, "weight-decay"),
        .clip_norm = hapt_config_real(config, "clip-norm"),
        .warmup_steps = hapt_config_int(config, "warmup-steps"),
        .steps = hapt_config_int(config, "steps"),
    };
    options->state_count = adamw ? 2 : options->momentum > 0 ? 1 : 0;
}

double hapt_optimizer_rate(const struct hapt_optimizer_options *options, int64_t step)
{
    const double peak = options->learning_rate;
    if (!options->cosine) return peak;
    if (step < options->warmup_steps) return peak * (double)(step + 1) / (double)options->warmup_steps;
    const int64_t span = options->steps - options->warmup_steps;
    if (span <= 0) return peak;
    const double pi = 3.14159265358979323846;
    const double done = fmin(1, (double)(step - options->warmup_steps) / (double)span);
    return peak * (options->min_ratio + (1 - options->min_ratio) * 0.5 * (1 + cos(pi * done)));
}

void hapt_optimizer_update(const struct hapt_optimizer_options *options, int64_t step, double norm,
                           struct hapt_update *update)
{
    const bool clips = options->clip_norm > 0 && norm > options->clip_norm;
    *update = (struct hapt_update){
        .optimizer = options->optimizer,
        .learning_rate = hapt_optimizer_rate(options, step),
        .beta1 = options->beta1,
        .beta2 = options->beta2,
        .epsilon = options->epsilon,
        .weight_decay = options->weight_decay,
        .momentum = options->momentum,
        .gradient_scale = clips ? options->clip_norm / norm : 1,
        .step = step + 1,
    };
}
