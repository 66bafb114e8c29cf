/* hapt profile: times and memory of every candidate stage, measured or predicted. */
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
    "every rank had its own. When --profile-seconds do not allow three rounds of all candidates, a sample is timed. "
    "The\n"
    "times of overlapping ranges support each other, so that noise does not mislead the search.\n"
    "\n"
    "A profile (HDF5; c: subcluster, L layers, S submeshes; entry [s][i][j] covers layers i to j, both included):\n"
    "  /boundary_bytes [L]                       byte, across the cut after each layer; the last is 0\n"
    "  /link_bandwidth [C][C], /link_latency     byte/s, s; the diagonal is between stages inside one subcluster\n"
    "  /cluster_c/                               attributes name, nodes, devices_per_node, device_memory_bytes, "
    "peak_flops\n"
    "  /cluster_c/submesh [S][2]                 nodes and devices of each\n"
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

static void print_json(const struct hapt_profile *profile, const char *path)
{
    printf("{\"format\":\"hapt-profile-summary\",\"version\":1,\"layers\":%d,\"output\":\"%s\",\"subclusters\":[",
           profile->layer_count, path);
    for (int c = 0; c < profile->cluster_count; c++) {
        const struct hapt_profile_cluster *cluster = &profile->cluster[c];
        printf("%s{\"name\":\"%s\",\"submeshes\":[", c ? "," : "", cluster->name);
        for (int s = 0; s < cluster->submesh_count; s++) {
            const struct summary summary = summarize(profile, cluster, s);
            printf("%s{\"nodes\":%d,\"devices_per_node\":%d,\"candidates\":%d,\"all_layers_s\":", s ? "," : "",
                   cluster->submesh[s].n, cluster->submesh[s].m, summary.candidates);
            if (isfinite(summary.whole_s))
                printf("%.9g}", summary.whole_s);
            else
                printf("null}");
        }
        printf("]}");
    }
    printf("]}\n");
}

static enum hapt_status save(const struct hapt_env *env, const struct hapt_profile *profile, const char *path)
{
    if (env->world_rank != 0) return HAPT_OK;
    HAPT_TRY(hapt_profile_save(path, profile));
    if (env->quiet) print_json(profile, path);
    return HAPT_OK;
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
