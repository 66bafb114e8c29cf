/* hapt profile: measures or predicts time and memory of every candidate stage; --calibrate measures operators. */
#include "hapt/calibration.h"
#include "hapt/measure.h"
#include <math.h>
#include <stdio.h>

#include "outputs.h"
#include "json_print.h"
#include "phases.h"

const char hapt_command_profile_help[] =
    "Measures the model on the ranks of the cluster and writes a profile for `hapt plan --profile`. Each layer\n"
    "range is measured once per structure and device count. With --predict yes, or if the cluster file has more\n"
    "devices than there are ranks, times are predicted from the device descriptions instead.\n"
    "\n"
    "On CPUs, thread CPU time is measured and multiplied by the device's slowdown, so a rehearsal on few cores\n"
    "costs as if every rank had its own cores. On GPUs it is the time between events on the device, one rank per\n"
    "device at a time.\n"
    "\n"
    "Ranges of equal structure share one time. Only the short unique ranges and some long ones (of doubling\n"
    "lengths) are measured; the others are composed of these. A few further ranges are measured as a\n"
    "check: if composing is less exact than measuring, all unique ranges are measured. So the cost grows with the\n"
    "unique parts of a model, not with its depth. If --profile-seconds does not allow three rounds, only a sample\n"
    "is measured. Times of overlapping ranges are fitted together, so noise does not mislead the search. Rounds are\n"
    "spread over --profile-seconds, and end after a quarter of it if they agree. The reported noise is the largest\n"
    "of: the error of single ranges, of the rounds (95 %), and the drift between the first and the last rounds.\n"
    "Above 10 % there is a warning.\n"
    "The ranks that would train a tensor-parallel or synthesised stage run it together, as training does, at the\n"
    "same time as those of other subclusters. Wall time counts. A few ranges are run: the longest, single layers,\n"
    "then others while the time lasts. The others are composed of these. The same holds for the end of a step with\n"
    "sharded optimizer state (--sharded-optimizer).\n"
    "Measuring is refused (exit code 2) if it would take over 60 s (or a longer --profile-seconds), or over half of\n"
    "the free memory of a host.\n"
    "\n"
    "--calibrate E.h5 measures every operator of the model with the training engine, forward and backward, at every\n"
    "number of devices that divides the rows. It fits the efficiency of each operator class by size, as a share of\n"
    "the device's rates: robust means of the medians of at most 15 runs. --efficiency E.h5 then predicts this model\n"
    "and others with the table of each device's name and type. With --output a profile is made as well.\n"
    "\n"
    "An efficiency file (HDF5; one group per kind of device and type). An operator takes launch + max(FLOPs / (rate\n"
    "x efficiency), bytes / (memory_bandwidth x efficiency)); between sizes, logarithms of efficiency are\n"
    "interpolated.\n"
    "  /device_k/                                attributes name, backend, dtype; peak_flops, vector_flops FLOP/s,\n"
    "                                            memory_bandwidth byte/s, launch s, median_residual\n"
    "  /device_k/class [K]                       product, attention (of peak_flops), vector (of vector_flops),\n"
    "                                            memory\n"
    "  /device_k/size, efficiency [K]            FLOP (memory: byte), share of the rate\n"
    "  /device_k/samples, worst_residual [K]     operators near that size, largest |predicted / measured - 1| of\n"
    "                                            them\n"
    "  /device_k/operator, _flops, _bytes, _time, _predicted [R]    the operators themselves; optional\n"
    "  /device_k/all_reduce [Q][4]               devices, byte, s measured, s predicted from the links; optional:\n"
    "                                            predicted sums are scaled by measured / predicted of the nearest\n"
    "                                            size\n"
    "\n"
    "A profile (HDF5; c: subcluster, L layers, S submeshes; entry [s][i][j] covers layers i to j, both included):\n"
    "  /boundary_bytes [L]                       byte across the boundary after each layer; the last is 0\n"
    "  /tied_bytes [L]                           byte of parameters that are read both before a layer and from it\n"
    "                                            on: exchanged every step if a stage begins there; optional\n"
    "  /crossing_bytes [K], /crossing_start [K + 1], /crossing_layer, /crossing_writes [N]\n"
    "                                            tensors that more than two layers, or no neighbours, use; optional:\n"
    "                                            byte, and for entry k rows crossing_start[k] to crossing_start[k + "
    "1]\n"
    "                                            of the layers in the order of computing (gradients: descending) and\n"
    "                                            whether they write it (1) or only read it (0)\n"
    "  /link_bandwidth [C][C], /link_latency     byte/s, s; the diagonal is between stages inside one subcluster\n"
    "  /                                         optional attributes: precision of the profile (fp32, tf32, bf16,\n"
    "                                            fp16), which training keeps; origin (measured, predicted); noise\n"
    "                                            and drift (shares, of measured times); tied_exchange (16bit:\n"
    "                                            tied_bytes are of 16-bit messages; else of fp32);\n"
    "                                            offload (optimizer: its state, and masters of 16-bit\n"
    "                                            weights, are on the hosts; update: the hosts update as well)\n"
    "  /cluster_c/                               attributes name, nodes, devices_per_node, device_memory_bytes,\n"
    "                                            peak_flops; optional, if the optimizer is offloaded: deferrable,\n"
    "                                            the part of step_time that the next forward pass may hide\n"
    "  /cluster_c/submesh [S][2]                 nodes and devices of each\n"
    "  /cluster_c/tensor_parallel [S]            optional, 1: devices that share each operator; with it, a submesh\n"
    "                                            may have several rows, one per program\n"
    "  /cluster_c/host_weights [S]               optional, 1: the weights of these stages are on the hosts;\n"
    "                                            2: their gradients as well; 3: the weights are sharded\n"
    "  /cluster_c/program [S], /program_k        optional, 0: the row's program is the k-th of the file: attributes\n"
    "                                            name and axes, tables axis_a_instructions and axis_a_ratio\n"
    "  /cluster_c/stage_time [S][L][L]           s per microbatch, forward and backward; NaN: no candidate\n"
    "  /cluster_c/stage_forward_time             s per microbatch, forward\n"
    "  /cluster_c/parameter_bytes                byte per device, resident\n"
    "  /cluster_c/activation_bytes               byte per device and microbatch in flight\n"
    "  /cluster_c/step_time                      s per step outside the pipeline: gradient reduction, update,\n"
    "                                            exchange of tied weights; optional\n"
    "  /cluster_c/weight_time                    s per microbatch, the part of the backward pass that makes gradients\n"
    "                                            of parameters only; NaN: unknown. Optional, with\n"
    "                                            split_parameter_bytes (parameter_bytes for split backward\n"
    "                                            passes: hapt plan --split-backward) and weight_slot_bytes (byte per\n"
    "                                            device and microbatch whose gradients of parameters wait);\n"
    "                                            attribute split_overhead: a split backward pass takes 1 + this\n"
    "                                            times as long as an unsplit one (0)\n"
    "  /cluster_c/recompute                      [S] of 12 parts of a range's blocks, rounded up: those that make\n"
    "                                            all activations again in the backward pass, plus 16 if the other\n"
    "                                            blocks do it selectively, plus 32 if the parts are of the bytes\n"
    "                                            that the blocks could free (--recompute); optional (0)\n"
    "  /mixed_k/                                 optional: stages on devices of several subclusters; attributes\n"
    "                                            clusters (rising indices, two or more), counts (devices of each),\n"
    "                                            ratios (optional: share of the work of each subcluster, or of each\n"
    "                                            device, subcluster by subcluster; sum 1), program (optional, 0:\n"
    "                                            rows by the ratios; k: the file's k-th program, all devices along\n"
    "                                            its axis 0, with ratios of its own)\n"
    "  /mixed_k/stage_time [L][L] ...            the same tables for that one submesh ([1][L][L] is accepted); the\n"
    "                                            bytes [L][L] for every device (the one with the least relative\n"
    "                                            memory left decides), or [K][L][L], one table for the devices of\n"
    "                                            each subcluster\n"
    "\n"
    "A submesh has one row per tensor-parallel degree up to --tensor-parallel, if that degree has candidates and\n"
    "is not worse than another on every range. Data-parallel groups of that many neighbours share the rows.\n"
    "Measured profiles have tensor-parallel rows with --program tensor or all, or with --tensor-parallel. Otherwise\n"
    "they have them if a range fits the devices' memory tensor-parallel only. Synthesised rows need --program all\n"
    "or synthesised; programs are found from operators and sums of gradients measured here.\n"
    "\n"
    "No candidate (NaN): a microbatch has fewer rows than there are devices to share them; one in flight exceeds\n"
    "the device's memory; or the range's share of the work exceeds the submesh's share of the cluster's speed\n"
    "--imbalance times.\n";

struct summary {
    int candidates, longest;
    double layer_low_s, layer_high_s, all_layers_s;
};

/* Summary of one table [L][L]. */
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
    summary.all_layers_s = stage_time[L - 1];
    return summary;
}

static struct summary summarize(const struct hapt_profile *profile, const struct hapt_profile_cluster *cluster, int s)
{
    return summarize_table(profile->layer_count, cluster->stage_time + hapt_profile_index(profile, s, 0, 0));
}

static struct summary summarize_mixed(const struct hapt_profile *profile, int mixed_index)
{
    return summarize_table(profile->layer_count, profile->mixed[mixed_index].stage_time);
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
        hapt_print(env, "times may be off by %.1f %%; the devices became %.1f %% %s while measuring\n",
                   100 * profile->noise, 100 * fabs(profile->drift), profile->drift < 0 ? "faster" : "slower");
}

static void print_row(const struct hapt_env *env, const char *name, const char *shape, const struct summary *summary)
{
    char low[32], high[32], all_layers[32], layer[80] = "-";
    if (isfinite(summary->layer_low_s))
        snprintf(layer, sizeof layer, "%s to %s", hapt_units_time(summary->layer_low_s, low),
                 hapt_units_time(summary->layer_high_s, high));
    hapt_print(env, "  %-16s %11s %10d %8d  %-23s %s\n", name, shape, summary->candidates, summary->longest, layer,
               isfinite(summary->all_layers_s) ? hapt_units_time(summary->all_layers_s, all_layers) : "-");
}

/* Mixed stages, named in the syntax of --stages. */
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
    hapt_print_wrapped(env, 6, "Profile of %d layers in %s, %s; times are per microbatch, forward and backward\n",
                       profile->layer_count, hapt_precision_name(profile->precision),
                       profile->origin == HAPT_PROFILE_PREDICTED
                           ? "predicted from the device descriptions, not measured"
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
        json_t *all_layers = isfinite(summary.all_layers_s) ? json_real(summary.all_layers_s) : json_null();
        json_array_append_new(submeshes,
                              json_pack("{s:i, s:i, s:i, s:i, s:o}", "nodes", cluster->submesh[s].n, "devices_per_node",
                                        cluster->submesh[s].m, "tensor_parallel", cluster->submesh[s].tp, "candidates",
                                        summary.candidates, "all_layers_s", all_layers));
    }
    return submeshes;
}

static json_t *mixed_json(const struct hapt_profile *profile)
{
    json_t *mixed_stages = json_array();
    for (int k = 0; mixed_stages && k < profile->mixed_count; k++) {
        const struct hapt_profile_mixed *mixed = &profile->mixed[k];
        const struct summary summary = summarize_mixed(profile, k);
        json_t *all_layers = isfinite(summary.all_layers_s) ? json_real(summary.all_layers_s) : json_null(),
               *devices = json_array();
        for (int i = 0; i < mixed->count; i++)
            json_array_append_new(devices,
                                  json_pack("{s:s, s:i}", "subcluster", profile->cluster[mixed->cluster[i]].name,
                                            "count", mixed->devices[i]));
        json_array_append_new(mixed_stages,
                              json_pack("{s:o, s:i, s:i, s:o}", "devices", devices, "program", mixed->program,
                                        "candidates", summary.candidates, "all_layers_s", all_layers));
    }
    return mixed_stages;
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

/* Outputs of the command: a profile, efficiency tables, or both. */
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
    if (!products->profile) return hapt_json_print(efficiency, "the profile's", 2);
    json_t *profile = profile_json(products->profile, products->profile_path);
    if (profile && efficiency && json_object_set_new(profile, "calibration", efficiency) != 0) {
        json_decref(profile);
        profile = NULL;
    }
    return hapt_json_print(profile, "the profile's", 2);
}

static enum hapt_status check_options(const struct hapt_config *config)
{
    if (hapt_config_text(config, "calibrate")) {
        if (hapt_precision_find(hapt_config_text(config, "precision")) == HAPT_PRECISION_TF32)
            return hapt_fail(HAPT_ERR_USAGE, "calibrate in fp32 or bf16", "--calibrate has no tables for TF32");
        if (hapt_config_bool(config, "predict"))
            return hapt_fail(HAPT_ERR_USAGE, "leave out one of them",
                             "--calibrate measures the devices, --predict yes works without them");
        if (!hapt_config_text(config, "output"))
            return hapt_phase_refuse_unused(config, "without --output no profile is made",
                                            "imbalance efficiency tensor-parallel");
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
        status = hapt_fail(HAPT_ERR_INPUT, "start one rank for each device, on the hosts of the devices",
                           "--calibrate has no devices to measure: the cluster is on paper or emulated");
    HAPT_TRY(hapt_env_agree(env->world, status));
    HAPT_TRY(hapt_profile_calibrate(env, cluster, model, layers, config, arena, efficiency));
    hapt_print(env,
               "Efficiency of the operators, as shares of the devices' rates; residual: predicted against measured\n");
    print_efficiency(env, *efficiency);
    return HAPT_OK;
}

enum hapt_status hapt_command_profile(struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena)
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
        HAPT_TRY(hapt_phase_profile(env, config, cluster, model, layers, arena, &products.profile, NULL));
        print_table(env, products.profile);
        print_effort(env, products.profile);
    }
    return hapt_env_agree(env->world, save(env, &products));
}
