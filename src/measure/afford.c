/* Is measuring affordable on this machine? */
#include "afford.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "hapt/efficiency.h"

enum { LAYER_ROUNDS = 3, PASS_ROUNDS = 2, PASS_ITEMS = 8 }; /* minimum run by measure_rounds.c */
enum { TEAM_MICROBATCHES = 8 };                             /* minimum run by team_time.c */
#define MEMORY_SHARE 0.5                                    /* of a host's free memory */
#define TOLERANCE 1.05     /* free memory changes a little after the benchmark engines were chosen by it */
#define TOUCH_RATE 5e8     /* byte/s of host memory touched for the first time */
#define DRAW_RATE 8e8      /* byte/s of weights drawn at random */
#define WARM_SECONDS 0.005 /* shorter items run twice */
/* Upper limit of a core's speed, whatever the cluster file says: two fused multiply-adds of 16 lanes per cycle at 3
 * GHz. */
#define CORE_FLOPS 2e11
#define CORE_BANDWIDTH 1e11
/* Estimates in this range, relative to the limit, are corrected by a trial: a layer of at most TRIAL_SECONDS and
 * TRIAL_SHARE of the memory limit. */
#define TRIAL_LOW 0.125
#define TRIAL_HIGH 8.0
#define TRIAL_SECONDS 0.25
#define TRIAL_SHARE 0.25

struct estimate {
    double *layer_s; /* [mesh][L + 1] forward and backward of the layers before, prefix sums */
    double time_s;   /* which --profile-seconds cannot shorten */
    double bytes;
};

double afford_room(const struct hapt_engine_options *options, const struct classes *classes)
{
    if (!options->backend || options->backend->pin) return INFINITY;
    return MEMORY_SHARE * hapt_memory_available() / (classes->actives > 0 ? classes->actives : 1);
}

static struct hapt_roofline describe(const struct afford_question *question)
{
    const struct hapt_candidates *candidates = question->candidates;
    const int mine = candidates->cluster->subcluster_of_rank[question->env->world_rank];
    const struct hapt_device_spec *device = &candidates->cluster->subcluster[mine].device;
    struct hapt_roofline roofline = hapt_roofline_describe(device, candidates->model->dtype, NULL);
    roofline.slowdown = 1; /* measuring does not emulate slow devices */
    if (strcmp(device->backend, "cpu") != 0) return roofline;
    const double cores = question->bench_engines->options.threads;
    roofline.peak_flops = fmin(roofline.peak_flops, cores * CORE_FLOPS);
    roofline.vector_flops = fmin(roofline.vector_flops, cores * CORE_FLOPS);
    roofline.bandwidth = fmin(roofline.bandwidth, cores * CORE_BANDWIDTH);
    return roofline;
}

static enum hapt_status time_layers(const struct afford_question *question, struct hapt_arena *scratch, double *layer_s)
{
    const struct hapt_candidates *candidates = question->candidates;
    const struct hapt_roofline roofline = describe(question);
    const int L = candidates->layer_count;
    int *layer_of;
    HAPT_TRY(hapt_layers_of_operators(candidates->layers, scratch, &layer_of));
    for (int d = 0; d < candidates->mesh_count; d++) {
        const struct hapt_sharding *sharding = candidates->sharding[d];
        double *sum = &layer_s[d * (L + 1)];
        for (int o = 0; o < sharding->reduce_first; o++) {
            if (hapt_op_type_at(sharding->shard->op[o].type)->collective) continue;
            sum[layer_of[sharding->graph->op[o].forward_op] + 1] +=
                hapt_roofline_graph_s(&roofline, sharding->shard, o);
        }
        for (int l = 0; l < L; l++) sum[l + 1] += sum[l];
    }
    return HAPT_OK;
}

static double range_s(const struct afford_question *question, const struct estimate *estimate, int mesh_index,
                      int first, int last)
{
    const double *sum = &estimate->layer_s[mesh_index * (question->candidates->layer_count + 1)];
    return sum[last + 1] - sum[first];
}

static double item_s(const struct afford_question *question, const struct estimate *estimate, int item)
{
    const struct hapt_candidates *candidates = question->candidates;
    const int structure = item / candidates->mesh_count;
    return range_s(question, estimate, item % candidates->mesh_count, candidates->first[structure],
                   candidates->last[structure]);
}

static bool is_layer(const struct hapt_candidates *candidates, int item)
{
    const int structure = item / candidates->mesh_count;
    return candidates->first[structure] == candidates->last[structure];
}

/* Benchmark engines are created once if all fit the memory together, else in every round. */
static void add_bench_engines(const struct afford_question *question, struct estimate *estimate)
{
    const struct bench_engines *bench_engines = question->bench_engines;
    const bool on_host = !bench_engines->options.backend || !bench_engines->options.backend->pin;
    double sum = 0, largest = 0, fill_s = 0, run_s = 0;
    for (int w = 0; w < bench_engines->count; w++) {
        const struct bench_engine *bench_engine = &bench_engines->bench_engine[w];
        sum += bench_engine->bytes;
        largest = fmax(largest, bench_engine->bytes);
        const struct hapt_item_memory *memory = &question->memory[hapt_candidates_item(
            question->candidates, bench_engine->mesh_index, bench_engine->first, bench_engine->last)];
        fill_s += 4 * memory->trained_elements / DRAW_RATE + (on_host ? bench_engine->bytes / TOUCH_RATE : 0);
        run_s += range_s(question, estimate, bench_engine->mesh_index, bench_engine->first, bench_engine->last);
    }
    const bool together = sum <= bench_engines->limit_bytes;
    const int rounds = question->whole_rounds > 0 ? question->whole_rounds : LAYER_ROUNDS + PASS_ROUNDS;
    estimate->bytes = together ? sum : fmax(largest, bench_engines->limit_bytes);
    estimate->time_s += (together ? 1 : rounds) * (fill_s + run_s) + question->whole_rounds * run_s;
}

/* Minimum of the rounds over items: every layer, then a few of the others. */
static void add_items(const struct afford_question *question, struct estimate *estimate)
{
    const struct hapt_candidates *candidates = question->candidates;
    double layers_s = 0, others_s = 0;
    int others = 0;
    for (int item = 0; item < candidates->item_count; item++) {
        if (!question->needed[item]) continue;
        const double once_s = item_s(question, estimate, item), cost_s = once_s < WARM_SECONDS ? 2 * once_s : once_s;
        if (is_layer(candidates, item)) {
            layers_s += cost_s;
        } else {
            others_s += cost_s;
            others++;
        }
    }
    const double few = others > PASS_ITEMS ? (double)PASS_ITEMS / others : 1;
    estimate->time_s += (LAYER_ROUNDS * layers_s + PASS_ROUNDS * few * others_s) / question->classes->actives;
}

/* Minimum of the stages that teams run, all ranks at the same time. */
static void add_stages(const struct afford_question *question, struct estimate *estimate)
{
    const struct hapt_cluster *cluster = question->candidates->cluster;
    const int mine = cluster->subcluster_of_rank[question->env->world_rank];
    const double slowdown = fmax(cluster->subcluster[mine].device.slowdown, 1);
    for (int item = 0; item < question->candidates->item_count; item++)
        if (question->run_by_teams[item])
            estimate->time_s += TEAM_MICROBATCHES * slowdown * item_s(question, estimate, item);
}

/* The longest layer of at most TRIAL_SECONDS: memory bounds the quickest ones, arithmetic bounds the sum.
 * -1: no layer is quick and small enough. */
static int find_trial(const struct afford_question *question, const struct estimate *estimate)
{
    double longest_s = 0;
    int found = -1;
    for (int item = 0; item < question->candidates->item_count; item++) {
        if (!question->needed[item] || !is_layer(question->candidates, item)) continue;
        const struct hapt_item_memory *memory = &question->memory[item];
        const double once_s = item_s(question, estimate, item);
        if (once_s <= longest_s || once_s > TRIAL_SECONDS) continue;
        if (memory->parameter_bytes + memory->activation_bytes > TRIAL_SHARE * question->bench_engines->limit_bytes)
            continue;
        longest_s = once_s;
        found = item;
    }
    return found;
}

/* Measured over described time of a layer. */
static enum hapt_status try_layer(const struct afford_question *question, const struct estimate *estimate,
                                  struct hapt_arena *scratch, double *factor)
{
    const int item = find_trial(question, estimate);
    double forward_s = 0, backward_s = 0;
    struct bench_engines trial;
    bool *needed;
    if (item < 0) return HAPT_OK;
    HAPT_NEW(needed, scratch, question->candidates->item_count);
    needed[item] = true;
    HAPT_TRY(bench_engines_choose(question->candidates, &question->bench_engines->options, 1, question->memory, needed,
                                  scratch, &trial));
    enum hapt_status status = HAPT_OK;
    for (int run = 0; run < 2 && status == HAPT_OK; run++)
        status = bench_engines_time(&trial, item, &forward_s, &backward_s);
    bench_engines_close(&trial);
    *factor = (forward_s + backward_s) / item_s(question, estimate, item);
    return status;
}

static double limit_s(const struct afford_question *question)
{
    const bool given = hapt_config_given(question->config, "profile-seconds");
    return given ? fmax(AFFORD_SECONDS, hapt_config_real(question->config, "profile-seconds")) : AFFORD_SECONDS;
}

/* This rank's estimate. */
static enum hapt_status estimate_own(const struct afford_question *question, struct hapt_arena *scratch,
                                     struct estimate *estimate)
{
    const struct hapt_candidates *candidates = question->candidates;
    const bool own_memory = question->bench_engines->options.backend && question->bench_engines->options.backend->pin;
    double stage_bytes = 0, factor = 1;
    *estimate = (struct estimate){0};
    if (question->classes->own_class < 0) return HAPT_OK;
    for (int item = 0; item < candidates->item_count; item++)
        if ((question->teams && question->needed[item]) || (question->run_by_teams && question->run_by_teams[item]))
            stage_bytes =
                fmax(stage_bytes, question->memory[item].parameter_bytes + question->memory[item].activation_bytes +
                                      question->memory[item].host_bytes);
    if (question->classes->active >= 0) {
        HAPT_NEW(estimate->layer_s, scratch, (size_t)candidates->mesh_count * (size_t)(candidates->layer_count + 1));
        HAPT_TRY(time_layers(question, scratch, estimate->layer_s));
        add_bench_engines(question, estimate);
        if (question->whole_rounds == 0) add_items(question, estimate);
        if (question->run_by_teams) add_stages(question, estimate);
    }
    if (estimate->time_s > TRIAL_LOW * limit_s(question) && estimate->time_s < TRIAL_HIGH * limit_s(question))
        HAPT_TRY(try_layer(question, estimate, scratch, &factor));
    estimate->time_s *= factor;
    estimate->bytes = own_memory ? 0 : fmax(estimate->bytes, stage_bytes);
    return HAPT_OK;
}

static const char *alternative_hint(const struct hapt_config *config)
{
    if (hapt_config_command(config) == HAPT_COMMAND_JOB)
        return "predict the profile (--predict yes), or give one (--profile) or a plan (--plan)";
    if (hapt_config_command(config) == HAPT_COMMAND_PROFILE && hapt_config_text(config, "calibrate"))
        return "calibrate with a smaller model that has the same kinds of layers";
    return "plan for the machines that will train (--cluster C.json), or predict (--predict yes)";
}

static enum hapt_status check_limits(const struct afford_question *question, double time_s, double bytes,
                                     double available)
{
    char hint[240], text[2][32];
    if (bytes > TOLERANCE * MEMORY_SHARE * available)
        return hapt_fail(HAPT_ERR_USAGE, alternative_hint(question->config),
                         "measuring this model would take %s of host %s, more than half of its free memory (%s)",
                         hapt_units_bytes(bytes, text[0]), hapt_env_host(question->env->world_rank),
                         hapt_units_bytes(available, text[1]));
    if (time_s <= limit_s(question)) return HAPT_OK;
    snprintf(hint, sizeof hint, "%s; --profile-seconds %.0f measures anyway", alternative_hint(question->config),
             ceil(1.2 * time_s));
    return hapt_fail(HAPT_ERR_USAGE, hint, "measuring this model here would take about %s, more than %s",
                     hapt_units_time(time_s, text[0]), hapt_units_time(limit_s(question), text[1]));
}

enum hapt_status afford_check(const struct afford_question *question, struct hapt_arena *scratch)
{
    const struct hapt_env *env = question->env;
    struct estimate own;
    double available = hapt_memory_available();
    HAPT_TRY(hapt_env_agree(env->world, estimate_own(question, scratch, &own)));
    HAPT_MPI(MPI_Allreduce(MPI_IN_PLACE, &own.time_s, 1, MPI_DOUBLE, MPI_MAX, env->world));
    HAPT_MPI(MPI_Allreduce(MPI_IN_PLACE, &own.bytes, 1, MPI_DOUBLE, MPI_SUM, env->node));
    HAPT_MPI(MPI_Allreduce(MPI_IN_PLACE, &available, 1, MPI_DOUBLE, MPI_MIN, env->node));
    return hapt_env_agree(env->world, check_limits(question, own.time_s, own.bytes, available));
}
