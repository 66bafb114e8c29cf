/* hapt profile: times and memory of every candidate stage, measured or predicted. */
#include <jansson.h>
#include <math.h>
#include <stdio.h>

#include "outputs.h"
#include "phases.h"

const char hapt_command_profile_help[] =
    "Measures the model on the ranks of the cluster, each layer range once per structure and device count, and writes "
    "a\n"
    "profile that `hapt plan --profile` reads. With --predict yes, times come from the devices' description instead; "
    "so\n"
    "they do when the cluster file has more devices than there are ranks.\n"
    "\n"
    "Thread CPU time is measured and multiplied by the device's slowdown, so a rehearsal on few cores is priced as if\n"
    "every rank had its own; on GPUs it is the time between events on the device, one rank of a device at a time.\n"
    "Nothing is measured twice: ranges of equal structure share one time, and of the unique ones only the short and a\n"
    "ladder of long ones are run, which the others are composed of; where a few witnesses show that composing is not "
    "as\n"
    "exact as measuring, all are run. So the cost grows with what is unique in a model, not with its depth. When\n"
    "--profile-seconds do not allow three rounds, a sample is timed. The times of overlapping ranges support each "
    "other, so\n"
    "that noise does not mislead the search. Rounds are spread over --profile-seconds, a quarter of them where the "
    "rounds\n"
    "agree. The noise is what the times may be off by: of single ranges, of the rounds (95 %), and the drift between "
    "the\n"
    "first and the last rounds, whichever is largest. Above 10 % a warning says so.\n"
    "Measuring is refused (exit code 2) where it would take over 60 s (or a longer --profile-seconds), or over half of "
    "the\n"
    "free memory of a host.\n"
    "\n"
    "--calibrate E.h5 times every operator of the model by the engine that trains, forward and backward, at every "
    "number of\n"
    "devices that the rows divide over, and fits what share of the device's rates each class of operators reaches by "
    "its\n"
    "size: robust means of the medians of at most 15 runs. --efficiency E.h5 then makes predictions, of this model and "
    "of\n"
    "others, take the table of each device's name and type. With --output a profile is made as well.\n"
    "\n"
    "An efficiency file (HDF5; one group a kind of device and type; an operator takes launch + max(FLOPs / (rate x\n"
    "efficiency), bytes / (memory_bandwidth x efficiency)); efficiency between sizes by interpolation of logarithms):\n"
    "  /device_k/                                attributes name, backend, dtype; peak_flops, vector_flops FLOP/s,\n"
    "                                            memory_bandwidth byte/s, launch s, median_residual\n"
    "  /device_k/class [K]                       product, attention (of peak_flops), vector (of vector_flops), memory\n"
    "  /device_k/size, efficiency [K]            FLOP (memory: byte), share of the rate\n"
    "  /device_k/samples, worst_residual [K]     operators near that size, worst |predicted / measured - 1| among "
    "them\n"
    "  /device_k/operator, _flops, _bytes, _time, _predicted [R]    the operators themselves; optional\n"
    "  /device_k/all_reduce [Q][4]               devices, byte, s measured, s predicted from the links; optional: "
    "predicted\n"
    "                                            sums are scaled by measured / predicted of the nearest size\n"
    "\n"
    "A profile (HDF5; c: subcluster, L layers, S submeshes; entry [s][i][j] covers layers i to j, both included):\n"
    "  /boundary_bytes [L]                       byte, across the cut after each layer; the last is 0\n"
    "  /tied_bytes [L]                           byte of parameters that layers before a layer and layers from it on "
    "both\n"
    "                                            read: exchanged every step when a stage begins there; optional\n"
    "  /link_bandwidth [C][C], /link_latency     byte/s, s; the diagonal is between stages inside one subcluster\n"
    "  /                                         optional attributes precision (fp32, tf32, bf16, fp16) that it was "
    "made in, and\n"
    "                                            origin (measured, predicted); training keeps to that precision; noise "
    "and\n"
    "                                            drift (shares, of measured times)\n"
    "  /cluster_c/                               attributes name, nodes, devices_per_node, device_memory_bytes, "
    "peak_flops\n"
    "  /cluster_c/submesh [S][2]                 nodes and devices of each\n"
    "  /cluster_c/tensor_parallel [S]            optional, 1: devices that share each operator; with it a submesh may "
    "stand\n"
    "                                            in several rows, one a program\n"
    "  /cluster_c/program [S], /program_k        optional, 0: the row's program is the k-th of the file: attributes "
    "name and\n"
    "                                            axes, tables axis_a_instructions and axis_a_ratio\n"
    "  /cluster_c/stage_time [S][L][L]           s per microbatch, forward and backward; NaN: no candidate\n"
    "  /cluster_c/stage_forward_time             s per microbatch, forward\n"
    "  /cluster_c/parameter_bytes                byte per device, resident\n"
    "  /cluster_c/activation_bytes               byte per device and microbatch in flight\n"
    "  /cluster_c/step_time                      s per step outside the pipeline: gradient reduction, update, exchange "
    "of\n"
    "                                            tied weights; optional\n"
    "  /mixed_k/                                 optional: stages on devices of several subclusters; attributes "
    "clusters\n"
    "                                            (rising indices, two or more), counts (devices of each), ratios "
    "(optional:\n"
    "                                            share of the work of each subcluster, or of each device, subcluster "
    "by\n"
    "                                            subcluster; sum 1), program (optional, 0: rows by the ratios; k: the "
    "file's k-th,\n"
    "                                            all devices along its axis 0, with ratios of its own)\n"
    "  /mixed_k/stage_time [L][L] ...            the same tables for that one submesh ([1][L][L] is taken too); the "
    "bytes\n"
    "                                            [L][L] for every device (the tightest relative to its memory decides) "
    "or\n"
    "                                            [K][L][L], one table for the devices of each of its K subclusters\n"
    "\n"
    "Predicted submeshes stand once for each tensor-parallel degree up to --tensor-parallel that has candidates and is "
    "not\n"
    "worse than another on every range; data-parallel groups of that many neighbours share the rows.\n"
    "\n"
    "No candidates (NaN): a microbatch has fewer rows than there are devices to share them; one in flight exceeds the\n"
    "device's memory; the range's share of the work exceeds the submesh's share of the cluster's speed --imbalance "
    "times.\n";

struct summary {
    int candidates, longest;
    double layer_low_s, layer_high_s, whole_s;
};

/* Of one table [L][L]. */
static struct summary summarize_table(int L, const double *stage_time)
{
    struct summary summary = {.layer_low_s = INFINITY, .layer_high_s = 0};
    for (int i = 0; i < L; i++) {
        for (int j = i; j < L; j++) {
            const double time = stage_time[(size_t)i * (size_t)L + (size_t)j];
            if (!isfinite(time)) continue;
            summary.candidates++;
            if (j - i + 1 > summary.longest) summary.longest = j - i + 1;
            if (i == j) {
                summary.layer_low_s = fmin(summary.layer_low_s, time);
                summary.layer_high_s = fmax(summary.layer_high_s, time);
            }
        }
    }
    summary.whole_s = stage_time[L - 1];
    return summary;
}

static struct summary summarize(const struct hapt_profile *profile, const struct hapt_profile_cluster *cluster, int s)
{
    return summarize_table(profile->layer_count, cluster->stage_time + hapt_profile_index(profile, s, 0, 0));
}

static struct summary summarize_mixed(const struct hapt_profile *profile, int group)
{
    return summarize_table(profile->layer_count, profile->mixed[group].stage_time);
}

static long candidates_of(const struct hapt_profile *profile)
{
    long count = 0;
    for (int c = 0; c < profile->cluster_count; c++)
        for (int s = 0; s < profile->cluster[c].submesh_count; s++)
            count += summarize(profile, &profile->cluster[c], s).candidates;
    for (int k = 0; k < profile->mixed_count; k++) count += summarize_mixed(profile, k).candidates;
    return count;
}

static void print_effort(const struct hapt_env *env, const struct hapt_profile *profile)
{
    const struct hapt_profile_effort *effort = &profile->effort;
    char seconds[32];
    hapt_print(env, "%ld candidates, %lld unique, %lld timed", candidates_of(profile), (long long)effort->unique,
               (long long)effort->timed);
    if (effort->timed > 0)
        hapt_print(env, " by %lld runs of %lld program%s", (long long)effort->runs, (long long)effort->programs,
                   effort->programs == 1 ? "" : "s");
    hapt_print(env, ", %s\n", hapt_units_time(effort->seconds, seconds));
    if (profile->noise > 0)
        hapt_print(env, "times may be off by %.1f %%, the devices became %.1f %% %s meanwhile\n", 100 * profile->noise,
                   100 * fabs(profile->drift), profile->drift < 0 ? "faster" : "slower");
}

static void print_row(const struct hapt_env *env, const char *name, const char *shape, const struct summary *summary)
{
    char low[32], high[32], whole[32], layer[80] = "-";
    if (isfinite(summary->layer_low_s))
        snprintf(layer, sizeof layer, "%s to %s", hapt_units_time(summary->layer_low_s, low),
                 hapt_units_time(summary->layer_high_s, high));
    hapt_print(env, "  %-16s %11s %10d %8d  %-23s %s\n", name, shape, summary->candidates, summary->longest, layer,
               isfinite(summary->whole_s) ? hapt_units_time(summary->whole_s, whole) : "-");
}

/* Stages on devices of several subclusters, as --stages names them. */
static void print_mixed(const struct hapt_env *env, const struct hapt_profile *profile)
{
    for (int k = 0; k < profile->mixed_count; k++) {
        const struct hapt_profile_mixed *mixed = &profile->mixed[k];
        const struct summary summary = summarize_mixed(profile, k);
        char name[80] = "", program[24] = "mixed";
        for (int i = 0, length = 0; i < mixed->count && length < (int)sizeof name; i++)
            length += snprintf(name + length, sizeof name - (size_t)length, "%s%s:%d", i ? "+" : "",
                               profile->cluster[mixed->cluster[i]].name, mixed->devices[i]);
        if (mixed->program > 0) snprintf(program, sizeof program, "mixed p %d", mixed->program);
        print_row(env, name, program, &summary);
    }
}

static void print_table(const struct hapt_env *env, const struct hapt_profile *profile)
{
    hapt_print(env, "Profile of %d layers in %s, %s; seconds are per microbatch, forward and backward\n",
               profile->layer_count, hapt_precision_name(profile->precision),
               profile->origin == HAPT_PROFILE_PREDICTED ? "predicted from what the devices are, not measured"
                                                         : "measured");
    hapt_print(env, "  %-16s %11s %10s %8s  %-23s %s\n", "subcluster", "submesh", "candidates", "longest", "one layer",
               "all layers");
    for (int c = 0; c < profile->cluster_count; c++) {
        const struct hapt_profile_cluster *cluster = &profile->cluster[c];
        for (int s = 0; s < cluster->submesh_count; s++) {
            const struct summary summary = summarize(profile, cluster, s);
            char shape[32];
            const int length = snprintf(shape, sizeof shape, "%dx%d", cluster->submesh[s].n, cluster->submesh[s].m);
            if (cluster->submesh[s].tp > 1)
                snprintf(shape + length, sizeof shape - (size_t)length, " tp %d", cluster->submesh[s].tp);
            if (cluster->submesh[s].program > 0)
                snprintf(shape + length, sizeof shape - (size_t)length, " p %d", cluster->submesh[s].program);
            print_row(env, s == 0 ? cluster->name : "", shape, &summary);
        }
    }
    print_mixed(env, profile);
}

static json_t *submeshes_json(const struct hapt_profile *profile, const struct hapt_profile_cluster *cluster)
{
    json_t *submeshes = json_array();
    for (int s = 0; submeshes && s < cluster->submesh_count; s++) {
        const struct summary summary = summarize(profile, cluster, s);
        json_t *whole = isfinite(summary.whole_s) ? json_real(summary.whole_s) : json_null();
        json_array_append_new(submeshes,
                              json_pack("{s:i, s:i, s:i, s:i, s:o}", "nodes", cluster->submesh[s].n, "devices_per_node",
                                        cluster->submesh[s].m, "tensor_parallel", cluster->submesh[s].tp, "candidates",
                                        summary.candidates, "all_layers_s", whole));
    }
    return submeshes;
}

static json_t *mixed_json(const struct hapt_profile *profile)
{
    json_t *groups = json_array();
    for (int k = 0; groups && k < profile->mixed_count; k++) {
        const struct hapt_profile_mixed *mixed = &profile->mixed[k];
        const struct summary summary = summarize_mixed(profile, k);
        json_t *whole = isfinite(summary.whole_s) ? json_real(summary.whole_s) : json_null(), *devices = json_array();
        for (int i = 0; i < mixed->count; i++)
            json_array_append_new(devices,
                                  json_pack("{s:s, s:i}", "subcluster", profile->cluster[mixed->cluster[i]].name,
                                            "count", mixed->devices[i]));
        json_array_append_new(groups, json_pack("{s:o, s:i, s:i, s:o}", "devices", devices, "program", mixed->program,
                                                "candidates", summary.candidates, "all_layers_s", whole));
    }
    return groups;
}

static json_t *profile_json(const struct hapt_profile *profile, const char *path)
{
    json_t *subclusters = json_array();
    for (int c = 0; subclusters && c < profile->cluster_count; c++)
        json_array_append_new(subclusters, json_pack("{s:s, s:o}", "name", profile->cluster[c].name, "submeshes",
                                                     submeshes_json(profile, &profile->cluster[c])));
    const struct hapt_profile_effort *effort = &profile->effort;
    return json_pack("{s:s, s:i, s:i, s:s, s:s, s:s, s:I, s:I, s:I, s:I, s:I, s:f, s:f, s:f, s:o, s:o}", "format",
                     "hapt-profile-summary", "version", 1, "layers", profile->layer_count, "precision",
                     hapt_precision_name(profile->precision), "origin", hapt_profile_origin_name(profile->origin),
                     "output", path, "candidates", (json_int_t)candidates_of(profile), "unique",
                     (json_int_t)effort->unique, "timed", (json_int_t)effort->timed, "programs",
                     (json_int_t)effort->programs, "runs", (json_int_t)effort->runs, "seconds", effort->seconds,
                     "noise", profile->noise, "drift", profile->drift, "subclusters", subclusters, "mixed",
                     mixed_json(profile));
}

static json_t *efficiency_json(const struct hapt_efficiency *efficiency, const char *path)
{
    json_t *rows = json_array();
    for (int r = 0; rows && r < hapt_efficiency_row_count(efficiency); r++) {
        const struct hapt_efficiency_row row = hapt_efficiency_row_at(efficiency, r);
        json_array_append_new(rows, json_pack("{s:s, s:s, s:s, s:f, s:s, s:i, s:f, s:f}", "device", row.device, "dtype",
                                              hapt_dtype_name(row.dtype), "class", row.class, "size", row.size, "unit",
                                              row.unit, "samples", row.samples, "efficiency", row.efficiency,
                                              "worst_residual", row.worst_residual));
    }
    return json_pack("{s:s, s:i, s:s, s:o}", "format", "hapt-efficiency-summary", "version", 1, "output", path,
                     "tables", rows);
}

static enum hapt_status print_json(json_t *object)
{
    if (!object) return hapt_fail(HAPT_ERR_MEMORY, NULL, "the profile's JSON could not be built");
    const int error = json_dumpf(object, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(17));
    json_decref(object);
    if (error || putchar('\n') == EOF || fflush(stdout) != 0)
        return hapt_fail(HAPT_ERR_IO, NULL, "standard output cannot be written");
    return HAPT_OK;
}

static void print_efficiency(const struct hapt_env *env, const struct hapt_efficiency *efficiency)
{
    const char *device = "";
    hapt_print(env, "  %-16s %-6s %-10s %14s %8s %11s %15s\n", "device", "type", "class", "size", "samples",
               "efficiency", "worst residual");
    for (int r = 0; r < hapt_efficiency_row_count(efficiency); r++) {
        const struct hapt_efficiency_row row = hapt_efficiency_row_at(efficiency, r);
        hapt_print(env, "  %-16s %-6s %-10s %9.3g %s %8d %9.1f %% %13.0f %%\n", row.device == device ? "" : row.device,
                   row.device == device ? "" : hapt_dtype_name(row.dtype), row.class, row.size, row.unit, row.samples,
                   100 * row.efficiency, 100 * row.worst_residual);
        device = row.device;
    }
}

/* What the command makes: a profile, efficiency tables, or both. */
struct products {
    const char *profile_path, *efficiency_path;
    struct hapt_profile *profile;
    struct hapt_efficiency *efficiency;
};

static enum hapt_status save(const struct hapt_env *env, const struct products *products)
{
    if (env->world_rank != 0) return HAPT_OK;
    if (products->efficiency) HAPT_TRY(hapt_efficiency_save(products->efficiency_path, products->efficiency));
    if (products->profile) HAPT_TRY(hapt_profile_save(products->profile_path, products->profile));
    if (!env->quiet) return HAPT_OK;
    json_t *efficiency = products->efficiency ? efficiency_json(products->efficiency, products->efficiency_path) : NULL;
    if (!products->profile) return print_json(efficiency);
    json_t *profile = profile_json(products->profile, products->profile_path);
    if (profile && efficiency && json_object_set_new(profile, "calibration", efficiency) != 0) {
        json_decref(profile);
        profile = NULL;
    }
    return print_json(profile);
}

static enum hapt_status check_options(const struct hapt_config *config)
{
    const char *const profiling[] = {"imbalance", "efficiency", "tensor-parallel", NULL};
    if (hapt_config_text(config, "calibrate")) {
        if (hapt_precision_find(hapt_config_text(config, "precision")) == HAPT_PRECISION_TF32)
            return hapt_fail(HAPT_ERR_USAGE, "calibrate in fp32 or bf16", "--calibrate has no tables of TF32");
        if (hapt_config_bool(config, "predict"))
            return hapt_fail(HAPT_ERR_USAGE, "leave out one of them",
                             "--calibrate measures the devices, --predict yes does without them");
        if (!hapt_config_text(config, "output"))
            return hapt_phase_unused(config, "without --output no profile is made", profiling);
        return HAPT_OK;
    }
    if (hapt_config_text(config, "output")) return HAPT_OK;
    return hapt_fail(HAPT_ERR_USAGE, "add --output P.h5, or --calibrate E.h5", "hapt profile needs a file to write");
}

static enum hapt_status calibrate(struct hapt_env *env, struct hapt_config *config, const struct hapt_cluster *cluster,
                                  const struct hapt_model *model, const struct hapt_layers *layers,
                                  struct hapt_arena *arena, struct hapt_efficiency **efficiency)
{
    enum hapt_status status = HAPT_OK;
    if (!cluster->subcluster_of_rank || cluster->subcluster[0].device.emulated)
        status = hapt_fail(HAPT_ERR_INPUT, "start one rank for each device, where the devices are",
                           "--calibrate has no devices to measure: the cluster is on paper or modelled");
    HAPT_TRY(hapt_env_agree(env->world, status));
    HAPT_TRY(hapt_profile_calibrate(env, cluster, model, layers, config, arena, efficiency));
    hapt_print(env, "Efficiency of the operators: shares of the devices' rates, predicted against measured\n");
    print_efficiency(env, *efficiency);
    return HAPT_OK;
}

static enum hapt_status run(struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena)
{
    struct hapt_model *model;
    struct hapt_cluster *cluster;
    struct hapt_layers *layers;
    struct products products = {.profile_path = hapt_config_text(config, "output"),
                                .efficiency_path = hapt_config_text(config, "calibrate")};
    const struct hapt_output outputs[] = {{.option = "output", .format = "hapt-profile"},
                                          {.option = "calibrate", .format = "hapt-efficiency"}};
    HAPT_TRY(hapt_env_agree(env->world, check_options(config)));
    HAPT_TRY(hapt_outputs_check(env, config, 2, outputs));
    HAPT_TRY(hapt_phase_model(env, config, arena, &model));
    HAPT_TRY(hapt_phase_cluster(env, config, false, arena, &cluster));
    HAPT_TRY(hapt_phase_precision(env, config, cluster, NULL, model));
    HAPT_TRY(hapt_phase_layers(env, config, model, arena, &layers));
    if (products.efficiency_path) HAPT_TRY(calibrate(env, config, cluster, model, layers, arena, &products.efficiency));
    if (products.profile_path) {
        HAPT_TRY(hapt_phase_profile(env, config, cluster, model, layers, arena, &products.profile));
        print_table(env, products.profile);
        print_effort(env, products.profile);
    }
    return hapt_env_agree(env->world, save(env, &products));
}

enum hapt_status hapt_command_profile(struct hapt_env *env, struct hapt_config *config)
{
    struct hapt_arena arena;
    hapt_arena_init(&arena);
    const enum hapt_status status = run(env, config, &arena);
    hapt_arena_release(&arena);
    return status;
}
