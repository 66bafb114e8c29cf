/* Programs of mixed stages: asks synthesis and filters its answers. */
#include "hapt/mixed_programs.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "hapt/calibration.h"
#include "hapt/alternate.h"
#include "hapt/spmd_mesh.h"

enum { MOST_STATES = 1000 }; /* per search; more than in synthesised.c, since there are few groups */
#define WORTH 0.99           /* of the seconds of data parallelism: programs that gain less are not tried */

/* A cluster of only the group's devices. */
struct part_cluster {
    struct hapt_cluster cluster;
    struct hapt_subcluster subcluster[2];
    struct hapt_link link[4];
};

static void take_part(const struct hapt_cluster *cluster, const struct hapt_mixed_group *group,
                      struct part_cluster *part)
{
    *part = (struct part_cluster){.cluster = {.count = 2}};
    part->cluster.subcluster = part->subcluster;
    part->cluster.link = part->link;
    for (int k = 0; k < 2; k++) {
        struct hapt_subcluster *its = &part->subcluster[k];
        *its = cluster->subcluster[group->cluster[k]];
        const int devices = group->devices[k], whole = its->devices_per_node;
        its->nodes = devices <= whole ? 1 : devices % whole == 0 ? devices / whole : devices;
        its->devices_per_node = devices / its->nodes;
        for (int other = 0; other < 2; other++)
            part->link[2 * k + other] = *hapt_cluster_link(cluster, group->cluster[k], group->cluster[other]);
    }
}

/* Seconds per step to update one element, on each device. */
static enum hapt_status price_updates(const struct hapt_candidates *candidates,
                                      const struct hapt_mixed_question *question, struct hapt_arena *arena,
                                      struct hapt_spmd_mesh *mesh)
{
    enum { MANY = 100000000 }; /* elements of which a window is a small part */
    const struct hapt_item_memory one = hapt_candidates_state_memory(candidates, 1),
                                  many = hapt_candidates_state_memory(candidates, MANY);
    const double bytes = hapt_candidates_update_bytes(candidates, &one);
    double *update_s;
    HAPT_NEW(update_s, arena, mesh->size);
    for (int j = 0; j < mesh->size; j++) {
        const int c = question->group->cluster[j >= question->group->devices[0]];
        const struct hapt_roofline roofline = hapt_calibration_roofline(
            question->efficiency, &candidates->cluster->subcluster[c].device, candidates->model->dtype);
        /* One launch serves all elements. */
        update_s[j] = (hapt_roofline_stream_s(&roofline, 1e6 * bytes) - hapt_roofline_stream_s(&roofline, 0)) / 1e6 +
                      hapt_candidates_host_copies_s(candidates, c, &many) / MANY;
    }
    mesh->update_s = update_s;
    return HAPT_OK;
}

static enum hapt_status keep(const struct hapt_alternation_result *result, const struct hapt_candidates *candidates,
                             const struct hapt_mixed_group *group, struct hapt_arena *arena,
                             struct hapt_stage_layout *layout[MIXED_PROGRAMS], int *count)
{
    struct hapt_stage_layout *made;
    struct hapt_axis_program *program;
    HAPT_NEW(made, arena, 1);
    HAPT_NEW(program, arena, 1);
    *program = result->program;
    made->axis[0] = result->axis;
    made->axis[1].size = 1;
    made->program[0] = program;
    for (int other = 0; other < *count; other++)
        if (hapt_stage_layout_same(layout[other], made)) return HAPT_OK;
    snprintf(made->name, sizeof made->name, "synthesised %.16s:%d+%.16s:%d",
             candidates->cluster->subcluster[group->cluster[0]].name, group->devices[0],
             candidates->cluster->subcluster[group->cluster[1]].name, group->devices[1]);
    const size_t length = strlen(made->name);
    if (result->axis.ratio_count > 1)
        snprintf(made->name + length, sizeof made->name - length, ", %d ratios", result->axis.ratio_count);
    layout[(*count)++] = made;
    return HAPT_OK;
}

static double least_data_parallel_s(const struct hapt_alternation *alternation, const double *power,
                                    struct hapt_arena *scratch)
{
    double least_s = INFINITY;
    for (int even = 0; even < 2; even++) {
        struct hapt_axis axis;
        struct hapt_axis_program program;
        struct hapt_program_price price;
        if (hapt_alternation_data_parallel(alternation, even ? NULL : power, scratch, &axis, &program, &price) ==
            HAPT_OK)
            least_s = fmin(least_s, price.cost_s);
        else
            hapt_fail_reset(); /* e.g. fewer rows than devices */
    }
    return least_s;
}

static enum hapt_status find(const struct hapt_mixed_question *question, struct hapt_arena *arena,
                             struct hapt_arena *scratch, struct hapt_stage_layout *layout[MIXED_PROGRAMS], int *count)
{
    const struct hapt_candidates *candidates = question->candidates;
    const struct hapt_mixed_group *group = question->group;
    struct part_cluster part;
    struct hapt_spmd_mesh *mesh;
    struct hapt_sharding *trivial;
    double *limit, speed = 0;
    take_part(candidates->cluster, group, &part);
    HAPT_TRY(hapt_spmd_mesh_build(&part.cluster, candidates->model->graph, candidates->model->dtype, HAPT_SPMD_DEVICES,
                                  question->efficiency, candidates->microbatches, scratch, &mesh));
    if (question->collectives) mesh->collectives = *question->collectives;
    HAPT_TRY(price_updates(candidates, question, scratch, mesh));
    HAPT_TRY(hapt_sharding_trivial(candidates->model->graph, scratch, &trivial));
    /* These devices hold only a part of the model, so each may hold proportionally more of the full one. */
    for (int k = 0; k < 2; k++)
        speed += hapt_candidates_device_speed(candidates, group->cluster[k]) * group->devices[k];
    const double share = candidates->speed > 0 && speed < candidates->speed ? speed / candidates->speed : 1;
    HAPT_NEW(limit, scratch, mesh->size);
    for (int j = 0; j < mesh->size; j++) limit[j] = mesh->memory_bytes[j] / share;
    struct hapt_alternation alternation = {.sharding = trivial,
                                           .devices = mesh->size,
                                           .costs = &mesh->costs,
                                           .power = mesh->power,
                                           .memory_bytes = limit,
                                           .microbatches = candidates->microbatches,
                                           .in_flight = fmin(candidates->microbatches, ceil(1 / share)),
                                           .optimizer_bytes_per_element = hapt_candidates_state_bytes(candidates),
                                           .layer_count = candidates->layer_count,
                                           .end_op = candidates->layers->end_op,
                                           .segments = question->segments,
                                           .most_states = MOST_STATES};
    const double data_s = least_data_parallel_s(&alternation, mesh->power, scratch);
    for (int tried = 0; tried < MIXED_PROGRAMS; tried++) {
        struct hapt_alternation_result result;
        if (tried > 0) alternation.segments = 1;
        const enum hapt_status status = hapt_alternate(&alternation, arena, &result);
        if (status == HAPT_ERR_INFEASIBLE) {
            hapt_fail_reset();
            return HAPT_OK;
        }
        HAPT_TRY(status);
        if (result.price.cost_s < WORTH * data_s) HAPT_TRY(keep(&result, candidates, group, arena, layout, count));
        if (result.axis.ratio_count == 1) break; /* same result as before */
    }
    return HAPT_OK;
}

enum hapt_status hapt_mixed_programs_find(const struct hapt_mixed_question *question, struct hapt_arena *arena,
                                          struct hapt_stage_layout *layout[MIXED_PROGRAMS], int *count)
{
    struct hapt_arena scratch;
    *count = 0;
    hapt_arena_init(&scratch);
    const enum hapt_status status = find(question, arena, &scratch, layout, count);
    hapt_arena_release(&scratch);
    return status;
}
