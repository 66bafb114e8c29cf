/* Finds the devices of two subclusters that may run a stage together, and the rows of a microbatch that each of
 * them gets. */
#include <math.h>
#include <string.h>

#include "hapt/calibration.h"
#include "hapt/candidates.h"
#include "hapt/mixed_programs.h"

/* --mixed auto: accepts groups that sum the full model's gradients within this fraction of the time to compute it.
 * A stage has a part of both, so the rule does not depend on the stage boundaries. */
#define SUM_SHARE 0.5
enum { MOST_GROUPS = 32, SMALL_SUBCLUSTER = 8, MOST_COUNTS = 64 };

/* The options' requests. */
struct mixing {
    bool all; /* include groups that the rule of --mixed auto leaves out */
    const char *rows;
    unsigned programs;
};

static double compute_s(const struct hapt_candidates *candidates, int subcluster, const struct hapt_sharding *sharding)
{
    const struct hapt_graph *shard = sharding->shard;
    const struct hapt_roofline roofline = hapt_calibration_roofline(
        candidates->efficiency, &candidates->cluster->subcluster[subcluster].device, candidates->model->dtype);
    double seconds = 0;
    for (int o = 0; o < sharding->reduce_first; o++)
        if (!hapt_op_type_at(shard->op[o].type)->collective) seconds += hapt_roofline_graph_s(&roofline, shard, o);
    return seconds;
}

/* The sharding seen by the one of two ranks that has `rows` rows. */
static enum hapt_status shard_rows(const struct hapt_candidates *candidates, int rows, struct hapt_arena *arena,
                                   struct hapt_sharding **sharding)
{
    const int all = candidates->model->microbatch;
    const double ratio[2] = {(double)rows / all, (double)(all - rows) / all};
    const struct hapt_axis axis = {.size = 2, .ratio_count = 1, .ratio = ratio};
    struct hapt_sharding *made;
    const int place[HAPT_MESH_AXES] = {0, 0};
    HAPT_TRY(hapt_sharding_rows(candidates->model->graph, &axis, arena, &made));
    return hapt_sharding_at(made, place, arena, sharding);
}

static double trained_elements(const struct hapt_graph *graph)
{
    double elements = 0;
    for (int t = 0; t < graph->tensor_count; t++)
        if (graph->tensor[t].kind == HAPT_TENSOR_PARAMETER && graph->tensor[t].trainable)
            elements += (double)hapt_tensor_elements(&graph->tensor[t]);
    return elements;
}

struct hapt_device_times hapt_candidates_device_times(const struct hapt_candidates *candidates, double all_s,
                                                      double few_s, double update_s)
{
    const int rows = candidates->model->microbatch, few = hapt_candidates_few_rows(candidates);
    const double row_s = fmax(all_s - few_s, 0) / (rows - few);
    return (struct hapt_device_times){.fixed_s = fmax(all_s - rows * row_s, 0), .row_s = row_s, .update_s = update_s};
}

static enum hapt_status predict_device_times(const struct hapt_candidates *candidates, struct hapt_arena *scratch,
                                             struct hapt_device_times *times)
{
    struct hapt_sharding *all, *some;
    HAPT_TRY(hapt_sharding_trivial(candidates->model->graph, scratch, &all));
    HAPT_TRY(shard_rows(candidates, hapt_candidates_few_rows(candidates), scratch, &some));
    const struct hapt_item_memory whole =
        hapt_candidates_state_memory(candidates, trained_elements(candidates->model->graph));
    for (int c = 0; c < candidates->cluster->count; c++) {
        const struct hapt_roofline roofline = hapt_calibration_roofline(
            candidates->efficiency, &candidates->cluster->subcluster[c].device, candidates->model->dtype);
        times[c] = hapt_candidates_device_times(
            candidates, compute_s(candidates, c, all), compute_s(candidates, c, some),
            hapt_roofline_stream_s(&roofline, hapt_candidates_update_bytes(candidates, &whole)) +
                hapt_candidates_host_copies_s(candidates, c, &whole));
    }
    return HAPT_OK;
}

/* Seconds per microbatch on the slower kind of device. An update follows the last microbatch without waiting (HAP
 * 3.2), so its part of a microbatch is included. */
static double group_s(const struct hapt_candidates *candidates, const struct hapt_device_times *times,
                      const struct hapt_mixed_group *group)
{
    double longest = 0;
    for (int k = 0; k < 2; k++) {
        const struct hapt_device_times *its = &times[group->cluster[k]];
        longest = fmax(longest, its->fixed_s + group->rows[k] * its->row_s + its->update_s / candidates->microbatches);
    }
    return longest;
}

/* Distance of rows from the optimum of `rule` (--mixed-rows): the time they take, or the difference from a share. */
static double row_cost(const struct hapt_candidates *candidates, const struct hapt_device_times *times,
                       const char *rule, const struct hapt_mixed_group *group)
{
    double power[2] = {1, 1};
    if (strcmp(rule, "solved") == 0) return group_s(candidates, times, group);
    for (int k = 0; k < 2 && strcmp(rule, "proportional") == 0; k++)
        power[k] = hapt_candidates_device_speed(candidates, group->cluster[k]);
    return fabs(group->rows[0] * power[1] - group->rows[1] * power[0]);
}

/* Chooses whole rows, equal for all devices of a kind, by trying every split. */
static bool choose_rows(const struct hapt_candidates *candidates, const struct hapt_device_times *times,
                        const char *rule, struct hapt_mixed_group *group)
{
    const int rows = candidates->model->microbatch;
    struct hapt_mixed_group tried = *group;
    double least = INFINITY;
    for (int first = 1; first * group->devices[0] < rows; first++) {
        const int rest = rows - first * group->devices[0];
        if (rest % group->devices[1] != 0) continue;
        tried.rows[0] = first;
        tried.rows[1] = rest / group->devices[1];
        const double its = row_cost(candidates, times, rule, &tried);
        if (its >= least) continue;
        least = its;
        *group = tried;
    }
    return isfinite(least);
}

/* Numbers of devices, descending: all, powers of two, and in a small subcluster what such submeshes leave over. */
static int device_counts(const struct hapt_subcluster *subcluster, int *count)
{
    const int all = subcluster->nodes * subcluster->devices_per_node;
    int counts = 0;
    for (int n = all; n >= 1 && counts<MOST_COUNTS; n = all> SMALL_SUBCLUSTER && n != all ? n / 2 : n - 1) {
        if (n != all && all > SMALL_SUBCLUSTER)
            while (n & (n - 1)) n--;
        const int left = all - n;
        if (n == all || !(n & (n - 1)) || !(left & (left - 1))) count[counts++] = n;
    }
    return counts;
}

/* The mesh of devices with that many rows: that of an even share of as many rows, if there is one. */
static enum hapt_status row_mesh(struct hapt_candidates *candidates, int rows, struct hapt_arena *arena,
                                 int *mesh_index)
{
    for (int d = 0; d < candidates->mesh_count; d++) {
        const struct hapt_candidate_mesh *mesh = &candidates->mesh[d];
        const int its = mesh->dp > 1 && mesh->tp == 1 ? candidates->model->microbatch / mesh->dp : mesh->rows;
        *mesh_index = d;
        if (its == rows) return HAPT_OK;
    }
    *mesh_index = candidates->mesh_count;
    candidates->mesh[*mesh_index] = (struct hapt_candidate_mesh){.dp = 0, .tp = 1, .rows = rows};
    HAPT_TRY(shard_rows(candidates, rows, arena, &candidates->sharding[*mesh_index]));
    candidates->mesh_count++;
    return HAPT_OK;
}

/* Adds the mesh of a side: the program as seen by the device that holds most, for memory planning. */
static enum hapt_status add_side(struct hapt_candidates *candidates, const struct hapt_sharding *sharding,
                                 struct hapt_mixed_group *group, int side, struct hapt_arena *arena,
                                 struct hapt_arena *scratch)
{
    const int first = side == 0 ? 0 : group->devices[0], d = candidates->mesh_count;
    double most = -1;
    int chosen[HAPT_MESH_AXES] = {first, 0};
    for (int j = first; j < first + group->devices[side]; j++) {
        const int place[HAPT_MESH_AXES] = {j, 0};
        struct hapt_sharding *local;
        double bytes = 0;
        HAPT_TRY(hapt_sharding_at(sharding, place, scratch, &local));
        for (int t = 0; t < local->shard->tensor_count; t++)
            bytes += (double)hapt_tensor_bytes(&local->shard->tensor[t]);
        if (bytes > most) chosen[0] = j;
        most = fmax(most, bytes);
    }
    HAPT_TRY(hapt_sharding_at(sharding, chosen, arena, &candidates->sharding[d]));
    candidates->mesh[d] = (struct hapt_candidate_mesh){
        .tp = 1, .n = group->devices[0] + group->devices[1], .m = 1, .program = group->program};
    group->mesh_index[side] = d;
    candidates->mesh_count++;
    return HAPT_OK;
}

enum hapt_status hapt_candidates_mix_program(struct hapt_candidates *candidates, const struct hapt_mixed_group *like,
                                             const struct hapt_stage_layout *layout, struct hapt_arena *arena)
{
    const struct hapt_stage_layout **list;
    struct hapt_mixed_group group = *like;
    struct hapt_sharding *sharding;
    struct hapt_arena scratch;
    HAPT_NEW(list, arena, candidates->layout_count + 1);
    if (candidates->layout_count > 0) memcpy(list, candidates->layout, (size_t)candidates->layout_count * sizeof *list);
    list[candidates->layout_count++] = layout;
    candidates->layout = list;
    group.program = candidates->layout_count;
    group.rows[0] = group.rows[1] = 0;
    HAPT_TRY(hapt_stage_layout_apply(layout, candidates->model->graph, arena, &sharding));
    hapt_arena_init(&scratch);
    enum hapt_status status = HAPT_OK;
    for (int side = 0; side < 2 && status == HAPT_OK; side++)
        status = add_side(candidates, sharding, &group, side, arena, &scratch);
    hapt_arena_release(&scratch);
    HAPT_TRY(status);
    candidates->mixed[candidates->mixed_count++] = group;
    return HAPT_OK;
}

static enum hapt_status add_group(struct hapt_candidates *candidates, const struct hapt_device_times *times,
                                  const struct mixing *mixing, struct hapt_mixed_group group, struct hapt_arena *arena)
{
    struct hapt_collective_links links;
    int devices[HAPT_MAX_SUBCLUSTERS] = {0};
    const bool shares = choose_rows(candidates, times, mixing->rows, &group);
    for (int k = 0; k < 2; k++) devices[group.cluster[k]] = group.devices[k];
    HAPT_TRY(hapt_collective_links_slowest(candidates->cluster, devices, &links));
    hapt_collective_model_links(&links, &group.sums);
    const double sum_s = hapt_collective_cost_s(&group.sums, HAPT_COLLECTIVE_ALL_REDUCE,
                                                4 * trained_elements(candidates->model->graph), 0);
    if (!mixing->all && (!shares || sum_s > SUM_SHARE * candidates->microbatches * group_s(candidates, times, &group)))
        return HAPT_OK;
    if (mixing->programs & PROGRAM_SYNTHESISED) candidates->mixable[candidates->mixable_count++] = group;
    if (!shares || !(mixing->programs & PROGRAM_DATA)) return HAPT_OK;
    for (int k = 0; k < 2; k++) HAPT_TRY(row_mesh(candidates, group.rows[k], arena, &group.mesh_index[k]));
    candidates->mixed[candidates->mixed_count++] = group;
    return HAPT_OK;
}

static enum hapt_status add_pair(struct hapt_candidates *candidates, const struct hapt_device_times *times,
                                 const struct mixing *mixing, int a, int b, struct hapt_arena *arena)
{
    int first[MOST_COUNTS], second[MOST_COUNTS];
    const int firsts = device_counts(&candidates->cluster->subcluster[a], first);
    const int seconds = device_counts(&candidates->cluster->subcluster[b], second);
    for (int i = 0; i < firsts; i++)
        for (int j = 0; j < seconds && candidates->mixed_count + candidates->mixable_count < MOST_GROUPS; j++)
            HAPT_TRY(add_group(candidates, times, mixing,
                               (struct hapt_mixed_group){.cluster = {a, b}, .devices = {first[i], second[j]}}, arena));
    return HAPT_OK;
}

/* Makes room for a mesh per number of rows, and for both sides of every program. */
static enum hapt_status make_room(struct hapt_candidates *candidates, struct hapt_arena *arena)
{
    if (candidates->mixed) return HAPT_OK;
    const size_t before = (size_t)candidates->mesh_count,
                 after = before + (size_t)candidates->model->microbatch + 1 + 2 * MIXED_PROGRAMS * MOST_GROUPS;
    struct hapt_candidate_mesh *mesh;
    struct hapt_sharding **sharding;
    HAPT_NEW(candidates->mixed, arena, (1 + MIXED_PROGRAMS) * MOST_GROUPS);
    HAPT_NEW(candidates->mixable, arena, MOST_GROUPS);
    HAPT_NEW(mesh, arena, after);
    HAPT_NEW(sharding, arena, after);
    memcpy(mesh, candidates->mesh, before * sizeof *mesh);
    memcpy(sharding, candidates->sharding, before * sizeof *sharding);
    candidates->mesh = mesh;
    candidates->sharding = sharding;
    return HAPT_OK;
}

bool hapt_candidates_may_mix(const struct hapt_candidates *candidates, const struct hapt_config *config)
{
    return strcmp(hapt_config_text(config, "mixed"), "no") != 0 && candidates->cluster->count > 1 &&
           candidates->model->microbatch > 1;
}

static void count_items(struct hapt_candidates *candidates)
{
    candidates->item_count = candidates->structure_count * candidates->mesh_count;
}

enum hapt_status hapt_candidates_few_rows_mesh(struct hapt_candidates *candidates, struct hapt_arena *arena,
                                               int *mesh_index)
{
    HAPT_TRY(make_room(candidates, arena));
    HAPT_TRY(row_mesh(candidates, hapt_candidates_few_rows(candidates), arena, mesh_index));
    count_items(candidates);
    return HAPT_OK;
}

enum hapt_status hapt_range_times_create(int layer_count, struct hapt_arena *arena, struct hapt_range_times **times)
{
    const size_t cells = (size_t)layer_count * (size_t)layer_count;
    struct hapt_range_times *made;
    HAPT_NEW(made, arena, 1);
    HAPT_NEW(made->stage_s, arena, cells);
    HAPT_NEW(made->forward_s, arena, cells);
    HAPT_NEW(made->step_s, arena, cells);
    for (size_t cell = 0; cell < cells; cell++) made->stage_s[cell] = made->forward_s[cell] = made->step_s[cell] = NAN;
    *times = made;
    return HAPT_OK;
}

enum hapt_status hapt_candidates_mix(struct hapt_candidates *candidates, const struct hapt_config *config,
                                     unsigned programs, const struct hapt_device_times *measured,
                                     struct hapt_arena *arena, struct hapt_arena *scratch)
{
    const struct hapt_cluster *cluster = candidates->cluster;
    const struct mixing mixing = {.all = strcmp(hapt_config_text(config, "mixed"), "yes") == 0,
                                  .rows = hapt_config_text(config, "mixed-rows"),
                                  .programs = programs};
    struct hapt_device_times *predicted;
    if (!hapt_candidates_may_mix(candidates, config)) return HAPT_OK;
    HAPT_NEW(predicted, scratch, cluster->count);
    if (!measured) HAPT_TRY(predict_device_times(candidates, scratch, predicted));
    HAPT_TRY(make_room(candidates, arena));
    for (int a = 0; a < cluster->count; a++)
        for (int b = a + 1; b < cluster->count; b++)
            HAPT_TRY(add_pair(candidates, measured ? measured : predicted, &mixing, a, b, arena));
    return HAPT_OK;
}
