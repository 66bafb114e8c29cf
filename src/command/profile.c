/* hapt profile: times and memory of every candidate stage, measured or predicted. */
#include <jansson.h>
#include <math.h>
#include <stdio.h>

#include "phases.h"

const char hapt_command_profile_help[] =
    "Measures the model on the ranks of the cluster, each layer range once per structure and device count, and writes "
    "a\n"
    "profile that `hapt plan --profile` reads. With --predict yes, times come from the devices' description instead; "
    "so\n"
    "they do when the cluster file has more devices than there are ranks.\n"
    "\n"
    "Thread CPU time is measured and multiplied by the device's slowdown, so a rehearsal on few cores is priced as if\n"
    "every rank had its own. Nothing is measured twice: ranges of equal structure share one time, and of the unique ones\n"
    "only the short and a ladder of long ones are run, which the others are composed of; where a few witnesses show that\n"
    "composing is not as exact as measuring, all are run. So the cost grows with what is unique in a model, not with its\n"
    "depth. When --profile-seconds do not allow three rounds, a sample is timed. The times of overlapping ranges support\n"
    "each other, so that noise does not mislead the search.\n"
    "\n"
    "A profile (HDF5; c: subcluster, L layers, S submeshes; entry [s][i][j] covers layers i to j, both included):\n"
    "  /boundary_bytes [L]                       byte, across the cut after each layer; the last is 0\n"
    "  /link_bandwidth [C][C], /link_latency     byte/s, s; the diagonal is between stages inside one subcluster\n"
    "  /cluster_c/                               attributes name, nodes, devices_per_node, device_memory_bytes, "
    "peak_flops\n"
    "  /cluster_c/submesh [S][2]                 nodes and devices of each\n"
    "  /cluster_c/tensor_parallel [S]            optional, 1: devices that share each operator; with it a submesh may stand\n"
    "                                            in several rows, one a program\n"
    "  /cluster_c/stage_time [S][L][L]           s per microbatch, forward and backward; NaN: no candidate\n"
    "  /cluster_c/stage_forward_time             s per microbatch, forward\n"
    "  /cluster_c/parameter_bytes                byte per device, resident\n"
    "  /cluster_c/activation_bytes               byte per device and microbatch in flight\n"
    "  /cluster_c/step_time                      s per step outside the pipeline: gradient reduction, update, exchange "
    "of\n"
    "                                            tied weights; optional\n"
    "\n"
    "No candidates (NaN): the rows of a microbatch do not divide over the devices; one microbatch in flight exceeds "
    "the\n"
    "device's memory; the range's share of the work exceeds the submesh's share of the cluster's speed --imbalance "
    "times.\n";

struct summary {
    int candidates, longest;
    double layer_low_s, layer_high_s, whole_s;
};

static struct summary summarize(const struct hapt_profile *profile, const struct hapt_profile_cluster *cluster, int s)
{
    const int L = profile->layer_count;
    struct summary summary = {.layer_low_s = INFINITY, .layer_high_s = 0};
    for (int i = 0; i < L; i++) {
        for (int j = i; j < L; j++) {
            const double time = cluster->stage_time[hapt_profile_index(profile, s, i, j)];
            if (!isfinite(time)) continue;
            summary.candidates++;
            if (j - i + 1 > summary.longest) summary.longest = j - i + 1;
            if (i == j) {
                summary.layer_low_s = fmin(summary.layer_low_s, time);
                summary.layer_high_s = fmax(summary.layer_high_s, time);
            }
        }
    }
    summary.whole_s = cluster->stage_time[hapt_profile_index(profile, s, 0, L - 1)];
    return summary;
}

static long candidates_of(const struct hapt_profile *profile)
{
    long count = 0;
    for (int c = 0; c < profile->cluster_count; c++)
        for (int s = 0; s < profile->cluster[c].submesh_count; s++)
            count += summarize(profile, &profile->cluster[c], s).candidates;
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
}

static void print_table(const struct hapt_env *env, const struct hapt_profile *profile)
{
    char low[32], high[32], whole[32];
    hapt_print(env, "Profile of %d layers; seconds are per microbatch, forward and backward\n", profile->layer_count);
    hapt_print(env, "  %-16s %7s %10s %8s  %-23s %s\n", "subcluster", "submesh", "candidates", "longest", "one layer",
               "all layers");
    for (int c = 0; c < profile->cluster_count; c++) {
        const struct hapt_profile_cluster *cluster = &profile->cluster[c];
        for (int s = 0; s < cluster->submesh_count; s++) {
            const struct summary summary = summarize(profile, cluster, s);
            char shape[32], layer[80] = "-";
            snprintf(shape, sizeof shape, "%dx%d", cluster->submesh[s].n, cluster->submesh[s].m);
            if (isfinite(summary.layer_low_s))
                snprintf(layer, sizeof layer, "%s to %s", hapt_units_time(summary.layer_low_s, low),
                         hapt_units_time(summary.layer_high_s, high));
            hapt_print(env, "  %-16s %7s %10d %8d  %-23s %s\n", s == 0 ? cluster->name : "", shape, summary.candidates,
                       summary.longest, layer,
                       isfinite(summary.whole_s) ? hapt_units_time(summary.whole_s, whole) : "-");
        }
    }
}

static json_t *submeshes_json(const struct hapt_profile *profile, const struct hapt_profile_cluster *cluster)
{
    json_t *submeshes = json_array();
    for (int s = 0; submeshes && s < cluster->submesh_count; s++) {
        const struct summary summary = summarize(profile, cluster, s);
        json_t *whole = isfinite(summary.whole_s) ? json_real(summary.whole_s) : json_null();
        json_array_append_new(submeshes, json_pack("{s:i, s:i, s:i, s:o}", "nodes", cluster->submesh[s].n,
                                                   "devices_per_node", cluster->submesh[s].m, "candidates",
                                                   summary.candidates, "all_layers_s", whole));
    }
    return submeshes;
}

static enum hapt_status print_json(const struct hapt_profile *profile, const char *path)
{
    json_t *subclusters = json_array();
    for (int c = 0; subclusters && c < profile->cluster_count; c++)
        json_array_append_new(subclusters, json_pack("{s:s, s:o}", "name", profile->cluster[c].name, "submeshes",
                                                     submeshes_json(profile, &profile->cluster[c])));
    const struct hapt_profile_effort *effort = &profile->effort;
    json_t *object = json_pack("{s:s, s:i, s:i, s:s, s:I, s:I, s:I, s:I, s:I, s:f, s:o}", "format",
                               "hapt-profile-summary", "version", 1, "layers", profile->layer_count, "output", path,
                               "candidates", (json_int_t)candidates_of(profile), "unique", (json_int_t)effort->unique,
                               "timed", (json_int_t)effort->timed, "programs", (json_int_t)effort->programs, "runs",
                               (json_int_t)effort->runs, "seconds", effort->seconds, "subclusters", subclusters);
    if (!object) return hapt_fail(HAPT_ERR_MEMORY, NULL, "the profile's JSON could not be built");
    const int error = json_dumpf(object, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(17));
    json_decref(object);
    if (error || putchar('\n') == EOF || fflush(stdout) != 0)
        return hapt_fail(HAPT_ERR_IO, NULL, "standard output cannot be written");
    return HAPT_OK;
}

static enum hapt_status save(const struct hapt_env *env, const struct hapt_profile *profile, const char *path)
{
    if (env->world_rank != 0) return HAPT_OK;
    HAPT_TRY(hapt_profile_save(path, profile));
    return env->quiet ? print_json(profile, path) : HAPT_OK;
}

static enum hapt_status run(struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena)
{
    struct hapt_model *model;
    struct hapt_cluster *cluster;
    struct hapt_layers *layers;
    struct hapt_profile *profile;
    const char *path = hapt_config_text(config, "output");
    enum hapt_status status = HAPT_OK;
    if (!path) status = hapt_fail(HAPT_ERR_USAGE, "add --output P.h5", "hapt profile needs a file to write");
    HAPT_TRY(hapt_env_agree(env->world, status));
    HAPT_TRY(hapt_phase_model(env, config, arena, &model));
    HAPT_TRY(hapt_phase_cluster(env, config, false, arena, &cluster));
    HAPT_TRY(hapt_phase_layers(env, config, model, arena, &layers));
    HAPT_TRY(hapt_phase_profile(env, config, cluster, model, layers, arena, &profile));
    print_table(env, profile);
    print_effort(env, profile);
    return hapt_env_agree(env->world, save(env, profile, path));
}

enum hapt_status hapt_command_profile(struct hapt_env *env, struct hapt_config *config)
{
    struct hapt_arena arena;
    hapt_arena_init(&arena);
    const enum hapt_status status = run(env, config, &arena);
    hapt_arena_release(&arena);
    return status;
}
