/* Optimizer settings, learning-rate schedule, clipping. */
#include <math.h>
#include <string.h>

#include "hapt/ops.h"
#include "hapt/train.h"

static enum hapt_rate_schedule schedule_of(const char *name)
{
    static const char *const names[] = {[HAPT_RATE_CONSTANT] = "constant",
                                        [HAPT_RATE_COSINE] = "cosine",
                                        [HAPT_RATE_LINEAR] = "linear",
                                        [HAPT_RATE_WSD] = "wsd",
                                        [HAPT_RATE_INVERSE_SQRT] = "inverse-sqrt"};
    int schedule = 0;
    while (strcmp(names[schedule], name) != 0) schedule++; /* the option table knows no others */
    return schedule;
}

static void smooth_labels(const struct hapt_graph *graph, double smoothing)
{
    const int loss = hapt_op_type_find("cross_entropy"), backward = hapt_op_type_find("cross_entropy_dx");
    for (int op = 0; op < graph->op_count; op++)
        if (graph->op[op].type == loss || graph->op[op].type == backward) graph->op[op].real[0] = smoothing;
}

enum hapt_status hapt_optimizer_prepare(const struct hapt_config *config, const struct hapt_model *model)
{
    const struct hapt_graph *graph = model->graph;
    const char *patterns = hapt_config_text(config, "no-decay");
    const double smoothing = hapt_config_real(config, "label-smoothing");
    HAPT_TRY(hapt_model_check_momentum(model, config));
    if (smoothing > 0 || hapt_config_given(config, "label-smoothing")) smooth_labels(graph, smoothing);
    if (!patterns) return HAPT_OK;
    HAPT_TRY(hapt_patterns_check("no-decay", patterns, graph));
    for (int t = 0; t < graph->tensor_count; t++) {
        struct hapt_tensor *tensor = &graph->tensor[t];
        tensor->undecayed = tensor->kind == HAPT_TENSOR_PARAMETER && hapt_patterns_match(patterns, tensor->name);
    }
    return HAPT_OK;
}

void hapt_optimizer_options(const struct hapt_config *config, struct hapt_optimizer_options *options)
{
    const bool adamw = strcmp(hapt_config_text(config, "optimizer"), "adamw") == 0;
    *options = (struct hapt_optimizer_options){
        .optimizer = adamw ? HAPT_OPTIMIZER_ADAMW : HAPT_OPTIMIZER_SGD,
        .schedule = schedule_of(hapt_config_text(config, "lr-schedule")),
        .learning_rate = hapt_config_real(config, "learning-rate"),
        .min_ratio = hapt_config_real(config, "min-lr-ratio"),
        .beta1 = hapt_config_real(config, "beta1"),
        .beta2 = hapt_config_real(config, "beta2"),
        .epsilon = hapt_config_real(config, "epsilon"),
        .momentum = hapt_config_real(config, "momentum"),
        .weight_decay = hapt_config_real(config, "weight-decay"),
        .clip_norm = hapt_config_real(config, "clip-norm"),
        .statistic_rate = hapt_config_real(config, "batch-norm-momentum"),
        .warmup_steps = hapt_config_int(config, "warmup-steps"),
        .decay_steps = hapt_config_int(config, "decay-steps"),
        .steps = hapt_config_int(config, "steps"),
    };
    if (options->decay_steps == 0) options->decay_steps = options->steps / 10;
    options->state_count = adamw ? 2 : options->momentum > 0 ? 1 : 0;
}

/* How much of [first, end) is done before the step; 0: the range is empty. */
static double part_done(int64_t step, int64_t first, int64_t end)
{
    return end <= first ? 0 : fmax(0, fmin(1, (double)(step - first) / (double)(end - first)));
}

double hapt_optimizer_rate(const struct hapt_optimizer_options *options, int64_t step)
{
    const double peak = options->learning_rate, least = options->min_ratio, pi = 3.14159265358979323846;
    const int64_t warmup = options->warmup_steps, steps = options->steps;
    if (options->schedule == HAPT_RATE_CONSTANT) return peak;
    if (step < warmup) return peak * (double)(step + 1) / (double)warmup;
    const double done = part_done(step, warmup, steps);
    const int64_t falls = steps - options->decay_steps, stable_end = falls > warmup ? falls : warmup;
    switch (options->schedule) {
    case HAPT_RATE_COSINE: return peak * (least + (1 - least) * 0.5 * (1 + cos(pi * done)));
    case HAPT_RATE_LINEAR: return peak * (1 - (1 - least) * done);
    case HAPT_RATE_WSD: return peak * (1 - (1 - least) * part_done(step, stable_end, steps));
    case HAPT_RATE_INVERSE_SQRT: return peak * fmax(least, sqrt(fmax(1, (double)warmup) / (double)(step + 1)));
    default: return peak;
    }
}

void hapt_optimizer_update(const struct hapt_optimizer_options *options, int64_t step, double norm, int microbatches,
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
        .statistic_rate = options->statistic_rate,
        .microbatches = microbatches,
        .step = step + 1,
    };
}
