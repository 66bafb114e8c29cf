/* hapt plan --html: gathers what the page of a plan shows. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "hapt/picture.h"
#include "hapt/text.h"
#include "plan_explain.h"

/* The sweep of the page: from a tenth of the slowest link between subclusters to ten times the fastest. */
enum { RANGE = 10, POINTS = 7 };

/* True if rivals and sweeps are of the same kind as the plan. */
static bool has_rivals(const struct hapt_config *config)
{
    enum hapt_schedule_kind kind;
    const char *schedule = hapt_config_text(config, "schedule");
    const bool looped = hapt_schedule_kind_parse(schedule, &kind) && hapt_schedule_loops(kind);
    return strcmp(hapt_config_text(config, "strategy"), "hapt") == 0 && hapt_config_int(config, "granularity") == 0 &&
           !hapt_config_bool(config, "ignore-communication") && !looped;
}

/* In the syntax of --what-if; false: there is no link whose bandwidth is known. */
static bool link_range(const struct hapt_profile *profile, char text[80])
{
    double low = INFINITY, high = 0;
    for (int i = 0; i < profile->cluster_count; i++)
        for (int j = 0; j < profile->cluster_count; j++) {
            const double rate = profile->link_bandwidth[i * profile->cluster_count + j];
            if (i == j || !(rate > 0) || !isfinite(rate)) continue;
            low = fmin(low, rate);
            high = fmax(high, rate);
        }
    if (!(high > 0)) return false;
    snprintf(text, 80, "link=%.6g..%.6gGbit/s:%d", 8e-9 * low / RANGE, 8e-9 * high * RANGE, POINTS);
    return true;
}

/* The cluster of a profile, which does not hold the names and rates of devices. */
static enum hapt_status cluster_of(const struct hapt_profile *profile, struct hapt_arena *arena,
                                   const struct hapt_cluster **result)
{
    const int count = profile->cluster_count;
    struct hapt_cluster *cluster;
    HAPT_NEW(cluster, arena, 1);
    HAPT_NEW(cluster->subcluster, arena, count);
    HAPT_NEW(cluster->link, arena, count * count);
    cluster->count = count;
    for (int c = 0; c < count; c++) {
        struct hapt_subcluster *own = &cluster->subcluster[c];
        snprintf(own->name, sizeof own->name, "%s", profile->cluster[c].name);
        own->nodes = profile->cluster[c].nodes;
        own->devices_per_node = profile->cluster[c].devices_per_node;
        own->device.memory_bytes = profile->cluster[c].device_memory_bytes;
        own->device.peak_flops[HAPT_F32] = profile->cluster[c].peak_flops;
        own->intra_node_latency = own->inter_node_latency = -1;
        cluster->rank_count += own->nodes * own->devices_per_node;
    }
    for (int l = 0; l < count * count; l++) {
        const double rate = profile->link_bandwidth[l], latency = profile->link_latency[l];
        cluster->link[l].bandwidth = isfinite(rate) ? rate : 0;
        cluster->link[l].latency = isfinite(latency) ? latency : -1;
    }
    *result = cluster;
    return HAPT_OK;
}

enum hapt_status hapt_plan_html(struct hapt_env *env, struct hapt_config *config, const struct hapt_planning *planning,
                                const struct hapt_prediction_inputs *inputs, const struct hapt_plan_sweeps *sweeps,
                                struct hapt_arena *arena)
{
    const char *path = hapt_config_text(config, "html");
    const char *output = hapt_config_text(config, "output"), *profile = hapt_config_text(config, "profile");
    struct hapt_compare_row *rows = NULL;
    struct hapt_plan_sweeps own = *sweeps;
    char range[80], title[HAPT_MODEL_TITLE];
    int count = 0, microbatches;
    if (!path) return HAPT_OK;
    if (has_rivals(config))
        HAPT_TRY(hapt_plan_compare_rows(env, config, planning->profile, planning->layers, arena, &rows, &count,
                                        &microbatches));
    if (has_rivals(config) && own.count == 0 && link_range(planning->profile, range))
        HAPT_TRY(hapt_plan_sweep(env, config, range, planning->profile, inputs, arena, NULL, &own));
    if (env->world_rank != 0) return hapt_env_agree(env->world, HAPT_OK);
    struct hapt_picture_plan picture = {.model = planning->model ? hapt_model_title(planning->model, title)
                                                                 : hapt_text_base_name(profile),
                                        .name = output && !hapt_config_chosen(config, "emit") ? output : "not saved",
                                        .plan = planning->plan,
                                        .cluster = planning->cluster,
                                        .row_count = count,
                                        .row = rows,
                                        .sweep_count = own.count,
                                        .sweep = own.sweep};
    enum hapt_status status = HAPT_OK;
    if (!picture.cluster) status = cluster_of(planning->profile, arena, &picture.cluster);
    if (status == HAPT_OK) status = hapt_picture_save_plan(&picture, path);
    return hapt_env_agree(env->world, status);
}
