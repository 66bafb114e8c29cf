/*
 * Predicted profiles. Every mesh (dp, tp) has one sharding of the full graph. An operator's time is a roofline over its
 * local FLOPs and bytes (efficiency.h). A tensor-parallel sum's time is a latency-bandwidth model of the node's links
 * (collective_cost.h). A range takes the sum over its layers. Memory is exactly the planner's, with kernel scratch from
 * the back end if it is available, otherwise from its estimate.
 */
#include <math.h>
#include <string.h>

#include "hapt/calibration.h"
#include "hapt/collective_cost.h"
#include "hapt/mixed_programs.h"
#include "hapt/predict.h"
#include "hapt/progress.h"
#include "hapt/synthesised.h"
#include "predict_mixed.h"

static struct hapt_roofline describe(const struct hapt_candidates *candidates, int subcluster)
{
    return hapt_calibration_roofline(candidates->efficiency, &candidates->cluster->subcluster[subcluster].device,
                                     candidates->model->dtype);
}

/* Collective of an operator: links of its axis, and the local part of the axis' tensor. In plain meshes all are over
 * the tensor-parallel axis. */
static double collective_s(const struct hapt_candidates *candidates, int subcluster,
                           const struct hapt_candidate_mesh *mesh, const struct hapt_sharding *sharding, int o)
{
    const struct hapt_op *op = &sharding->shard->op[o];
    const struct hapt_op_type *type = hapt_op_type_at(op->type);
    const enum hapt_collective_kind kind = type->collective ? type->collective : HAPT_COLLECTIVE_ALL_REDUCE;
    const int axis = type->collective ? (int)op->integer[0] : sharding->exchange[o],
              times = type->collective ? 1 : type->inner_all_reduces;
    /* the devices of a node share its link to others */
    const double beside = mesh->program > 0 && axis == 0 ? mesh->m : 1;
    double bytes;
    if (type->collective) {
        const double in = (double)hapt_tensor_bytes(&sharding->shard->tensor[op->input[0]]);
        const double out = (double)hapt_tensor_bytes(&sharding->shard->tensor[op->output[0]]);
        bytes = kind == HAPT_COLLECTIVE_ALL_TO_ALL ? sharding->axis[axis].size * in : fmax(in, out);
    } else {
        bytes = hapt_sharding_exchange_bytes(sharding->shard, o);
    }
    bytes = beside * bytes / times;
    if (mesh->program > 0)
        return times * hapt_synthesised_collective_s(candidates, subcluster, mesh, axis, kind, bytes, 0);
    const struct hapt_subcluster *where = &candidates->cluster->subcluster[subcluster];
    const struct hapt_collective_span span = {where, mesh->tp, 1, 1};
    return times * hapt_collective_span_s(&span, kind, bytes, 0) *
           hapt_calibration_sum_factor(candidates->efficiency, &where->device, candidates->model->dtype, bytes);
}

/* Seconds of operator `o` of the expanded graph on one rank of a mesh, from local shapes. */
static double operator_s(const struct hapt_candidates *candidates, const struct hapt_roofline *roofline, int subcluster,
                         int mesh_index, const struct hapt_sharding *sharding, int o)
{
    const bool computes = !hapt_op_type_at(sharding->shard->op[o].type)->collective,
               moves = !computes || sharding->exchange[o] >= 0;
    const double seconds = computes ? hapt_roofline_graph_s(roofline, sharding->shard, o) : 0;
    return moves ? seconds + collective_s(candidates, subcluster, &candidates->mesh[mesh_index], sharding, o) : seconds;
}

/* Seconds of every layer on one device of a subcluster: forward [L], backward [L], and the part of the backward that a
 * split pass defers [L]. */
static enum hapt_status time_layers(const struct hapt_candidates *candidates, int subcluster, int mesh_index,
                                    struct hapt_arena *scratch, double *forward_s, double *backward_s, double *weight_s)
{
    const struct hapt_sharding *sharding = candidates->sharding[mesh_index];
    const struct hapt_graph *graph = sharding->graph;
    const struct hapt_roofline roofline = describe(candidates, subcluster);
    int *layer_of;
    HAPT_TRY(hapt_layers_of_operators(candidates->layers, scratch, &layer_of));
    for (int l = 0; l < candidates->layer_count; l++) forward_s[l] = backward_s[l] = weight_s[l] = 0;
    for (int o = 0; o < sharding->reduce_first; o++) {
        const int l = layer_of[graph->op[o].forward_op];
        const double seconds = operator_s(candidates, &roofline, subcluster, mesh_index, sharding, o);
        (o < graph->forward_count ? forward_s : backward_s)[l] += seconds;
        if (sharding->weight[o]) weight_s[l] += seconds;
    }
    return HAPT_OK;
}

/* The least part of an update that is copies, over the items of a subcluster; 0 where copies hide behind nothing. */
static double copied_share(const struct hapt_candidates *candidates, int subcluster,
                           const struct hapt_item_memory *memory)
{
    const struct hapt_subcluster *own = &candidates->cluster->subcluster[subcluster];
    const struct hapt_roofline roofline = describe(candidates, subcluster);
    double least = 1;
    bool some = false;
    if (hapt_candidates_copies_itself(own)) return 0;
    for (int item = 0; item < candidates->item_count; item++) {
        const double copies_s = hapt_candidates_host_copies_s(candidates, subcluster, &memory[item]);
        if (!(copies_s > 0)) continue;
        some = true;
        least = fmin(least, copies_s / (copies_s + hapt_roofline_stream_s(&roofline, hapt_candidates_update_bytes(
                                                                                         candidates, &memory[item]))));
    }
    return some ? least : 0;
}

static enum hapt_status time_items(const struct hapt_candidates *candidates, int subcluster,
                                   const struct hapt_item_memory *memory, struct hapt_arena *scratch,
                                   struct hapt_item_time *time, double *weight_share)
{
    const struct hapt_roofline roofline = describe(candidates, subcluster);
    const int L = candidates->layer_count;
    double *forward_s, *backward_s, *weight_s;
    HAPT_NEW(forward_s, scratch, L);
    HAPT_NEW(backward_s, scratch, L);
    HAPT_NEW(weight_s, scratch, L);
    for (int d = 0; d < candidates->mesh_count; d++) {
        struct hapt_synthesised_reduce *reduce = NULL;
        const struct hapt_candidate_mesh *mesh = &candidates->mesh[d];
        if (mesh->program > 0 && !(mesh->subclusters >> subcluster & 1u)) continue;
        if (mesh->program > 0) HAPT_TRY(hapt_synthesised_reduce_create(candidates, subcluster, d, scratch, &reduce));
        HAPT_TRY(time_layers(candidates, subcluster, d, scratch, forward_s, backward_s, weight_s));
        for (int k = 0; k < candidates->structure_count; k++) {
            const int item = k * candidates->mesh_count + d;
            struct hapt_item_time mine = {0};
            double waits_s = 0;
            for (int l = candidates->first[k]; l <= candidates->last[k]; l++) {
                mine.forward_s += forward_s[l];
                mine.backward_s += backward_s[l];
                waits_s += weight_s[l];
            }
            weight_share[item] = mine.backward_s > 0 ? waits_s / mine.backward_s : 0;
            mine.update_s = hapt_roofline_stream_s(&roofline, hapt_candidates_update_bytes(candidates, &memory[item]));
            mine.update_s += hapt_candidates_host_copies_s(candidates, subcluster, &memory[item]);
            if (reduce) mine.update_s += hapt_synthesised_reduce_s(reduce, candidates->first[k], candidates->last[k]);
            time[item] = mine;
        }
    }
    return HAPT_OK;
}

static double all_reduce(const void *context, int subcluster, struct hapt_submesh submesh, double bytes)
{
    const struct hapt_candidates *candidates = context;
    const struct hapt_collective_span span =
        hapt_collective_span_of(&candidates->cluster->subcluster[subcluster], submesh, 0);
    return hapt_collective_corrected_s(&span, candidates->efficiency, candidates->model->dtype,
                                       HAPT_COLLECTIVE_ALL_REDUCE, bytes, 0);
}

/* Memory of every item as the engine plans it. Kernel scratch is included if the back end is available, and for
 * predicted GPUs that of matrix products. Subclusters with the same back end share the figures. */
static enum hapt_status plan_memory(const struct hapt_candidates *candidates, int subcluster, int node_rank,
                                    const struct hapt_candidate_shardings *shardings, struct hapt_item_memory **memory,
                                    struct hapt_item_again **again, struct hapt_arena *scratch)
{
    const struct hapt_subcluster *all = candidates->cluster->subcluster;
    for (int c = 0; c < subcluster; c++) {
        if (strcmp(all[c].device.backend, all[subcluster].device.backend) != 0) continue;
        memory[subcluster] = memory[c];
        for (int64_t k = 0; again && k < (int64_t)candidates->item_count * candidates->keep_stride; k++)
            again[subcluster][k].memory = again[c][k].memory;
        return HAPT_OK;
    }
    HAPT_NEW(memory[subcluster], scratch, candidates->item_count);
    const char *reason = NULL;
    struct hapt_engine_options engine = {.backend = hapt_backend_find(all[subcluster].device.backend),
                                         .threads = 1,
                                         .slots = 1,
                                         .state_count = candidates->state_count,
                                         .host_state = candidates->host_state,
                                         .host_update = candidates->host_update};
    const int devices = engine.backend ? engine.backend->device_count(&reason) : 0;
    if (devices > 0) HAPT_TRY(engine.backend->open(node_rank % devices, engine.threads, 0, &engine.device));
    enum hapt_status status = HAPT_OK;
    hapt_kernel_scratch *on_paper =
        strcmp(all[subcluster].device.backend, "cpu") != 0 ? hapt_engine_scratch_predicted : NULL;
    hapt_progress_expect(candidates->item_count);
    hapt_kernel_scratch *kernel_scratch = engine.device ? hapt_engine_scratch : on_paper;
    for (int d = 0; status == HAPT_OK && d < candidates->mesh_count; d++)
        status = hapt_candidates_sizes(candidates, d, &shardings[d], kernel_scratch, &engine, scratch,
                                       memory[subcluster], again ? again[subcluster] : NULL);
    if (engine.device) engine.backend->close(engine.device);
    return status;
}

/* Seconds that the shares of each item's units take to run again. */
static enum hapt_status time_shares(const struct hapt_candidates *candidates, int subcluster, int mesh_index,
                                    const struct hapt_sharding *sharding, struct hapt_arena *scratch,
                                    struct hapt_item_again *again)
{
    const struct hapt_roofline roofline = describe(candidates, subcluster);
    double *repeat_s; /* [reduce_first] */
    HAPT_NEW(repeat_s, scratch, sharding->reduce_first);
    for (int o = sharding->graph->forward_count; o < sharding->reduce_first; o++)
        if (sharding->repeats[o] >= 0)
            repeat_s[o] = operator_s(candidates, &roofline, subcluster, mesh_index, sharding, o);
    return hapt_candidates_again(candidates, mesh_index, sharding, repeat_s, scratch, again);
}

static enum hapt_status predict(const struct hapt_candidates *candidates, int node_rank, bool defers,
                                struct hapt_arena *scratch, struct hapt_arena *result, struct hapt_profile **profile)
{
    const struct hapt_cluster *cluster = candidates->cluster;
    struct hapt_item_memory **memory;
    struct hapt_item_time **time;
    double **weight_share;
    struct hapt_item_again **again = NULL;
    struct hapt_candidate_shardings *shardings;
    HAPT_NEW(shardings, scratch, candidates->mesh_count);
    for (int d = 0; d < candidates->mesh_count; d++)
        HAPT_TRY(hapt_candidates_shardings(candidates, d, scratch, &shardings[d]));
    if (hapt_candidates_chooses(candidates)) HAPT_NEW(again, scratch, cluster->count);
    HAPT_NEW(memory, scratch, cluster->count);
    HAPT_NEW(time, scratch, cluster->count);
    HAPT_NEW(weight_share, scratch, cluster->count);
    for (int c = 0; c < cluster->count; c++) {
        if (again) HAPT_NEW(again[c], scratch, (int64_t)candidates->item_count * candidates->keep_stride);
        HAPT_TRY(plan_memory(candidates, c, node_rank, shardings, memory, again, scratch));
        for (int d = 0; again && d < candidates->mesh_count; d++)
            if (shardings[d].recomputes) HAPT_TRY(time_shares(candidates, c, d, shardings[d].again, scratch, again[c]));
        HAPT_NEW(time[c], scratch, candidates->item_count);
        HAPT_NEW(weight_share[c], scratch, candidates->item_count);
        HAPT_TRY(time_items(candidates, c, memory[c], scratch, time[c], weight_share[c]));
    }
    HAPT_TRY(hapt_candidates_fill(candidates, memory, time, candidates->split ? weight_share : NULL, again, all_reduce,
                                  candidates, result, profile));
    for (int c = 0; c < cluster->count && candidates->host_state; c++)
        (*profile)->cluster[c].deferrable = defers ? copied_share(candidates, c, memory[c]) : 0;
    return HAPT_OK;
}

/* Mixed stages by rows, and with the programs found for their devices. */
static enum hapt_status mix(struct hapt_candidates *candidates, const struct hapt_config *config,
                            struct hapt_arena *scratch)
{
    HAPT_TRY(hapt_candidates_mix(candidates, config, candidates->programs, NULL, scratch, scratch));
    struct hapt_progress progress;
    enum hapt_status status = HAPT_OK;
    hapt_progress_init(&progress, NULL, "programs of mixed stages", candidates->mixable_count);
    for (int g = 0; g < candidates->mixable_count && status == HAPT_OK; g++) {
        const struct hapt_mixed_question question = {.candidates = candidates,
                                                     .group = &candidates->mixable[g],
                                                     .efficiency = candidates->efficiency,
                                                     .segments = (int)hapt_config_int(config, "segments")};
        struct hapt_stage_layout *layout[MIXED_PROGRAMS];
        int count = 0;
        status = hapt_mixed_programs_find(&question, scratch, layout, &count);
        for (int p = 0; p < count && status == HAPT_OK; p++)
            status = hapt_candidates_mix_program(candidates, question.group, layout[p], scratch);
        hapt_progress_update(&progress, g + 1, NULL);
    }
    hapt_progress_release(&progress);
    HAPT_TRY(status);
    HAPT_TRY(hapt_candidates_find_structures(candidates, scratch));
    for (int g = 0; g < candidates->mixed_count; g++)
        if (candidates->mixed[g].program > 0)
            HAPT_TRY(predict_mixed_program(candidates, &candidates->mixed[g], scratch, scratch));
    return HAPT_OK;
}

/* A copy of the cluster whose devices lack no memory. */
static enum hapt_status make_roomy(const struct hapt_cluster *cluster, struct hapt_arena *arena,
                                   const struct hapt_cluster **roomy)
{
    struct hapt_cluster *made;
    HAPT_NEW(made, arena, 1);
    *made = *cluster;
    HAPT_NEW(made->subcluster, arena, cluster->count);
    for (int c = 0; c < cluster->count; c++) {
        made->subcluster[c] = cluster->subcluster[c];
        made->subcluster[c].device.memory_bytes = HAPT_UNLIMITED_BYTES;
    }
    *roomy = made;
    return HAPT_OK;
}

enum hapt_status hapt_profile_predict(const struct hapt_cluster *cluster, const struct hapt_model *model,
                                      const struct hapt_layers *layers, const struct hapt_config *config,
                                      const struct hapt_efficiency *efficiency, const struct hapt_predict_options *how,
                                      struct hapt_arena *result, struct hapt_profile **profile)
{
    struct hapt_candidates candidates;
    struct hapt_arena scratch;
    const double start_s = hapt_time_s();
    hapt_arena_init(&scratch);
    const struct hapt_candidates_options options = {.programs = hapt_candidates_programs(config),
                                                    .tensor_parallel = (int)hapt_config_int(config, "tensor-parallel"),
                                                    .efficiency = efficiency,
                                                    .split = hapt_candidates_wants_split(config),
                                                    .recompute = how->recompute,
                                                    .offload = how->offload,
                                                    .roomy = how->roomy};
    enum hapt_status status = how->roomy ? make_roomy(cluster, &scratch, &cluster) : HAPT_OK;
    if (status == HAPT_OK)
        status = hapt_candidates_build(cluster, model, layers, config, &options, &scratch, &candidates);
    if (status == HAPT_OK && hapt_candidates_may_mix(&candidates, config)) status = mix(&candidates, config, &scratch);
    if (status == HAPT_OK)
        status = predict(&candidates, how->node_rank, hapt_candidates_defers(config), &scratch, result, profile);
    if (status == HAPT_OK) (*profile)->effort.seconds = hapt_time_s() - start_s;
    hapt_arena_release(&scratch);
    return status;
}
