/* Candidates: enumerate, alias, prune. */
#include "hapt/candidates.h"

#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "hapt/efficiency.h"
#include "hapt/profile.h"
#include "hapt/synthesised.h"

unsigned hapt_candidates_programs(const struct hapt_config *config)
{
    const char *name = hapt_config_text(config, "program");
    if (strcmp(name, "data") == 0) return PROGRAM_DATA;
    if (strcmp(name, "tensor") == 0) return PROGRAM_TENSOR;
    if (strcmp(name, "synthesised") == 0) return PROGRAM_SYNTHESISED;
    return PROGRAM_DATA | PROGRAM_TENSOR | (strcmp(name, "all") == 0 ? PROGRAM_SYNTHESISED : 0);
}

static int most_tensor_parallel(const struct hapt_candidates *candidates, struct hapt_submesh submesh)
{
    const int most = candidates->tensor_parallel;
    return most == 0 || most > submesh.m ? submesh.m : most;
}

enum hapt_status hapt_candidates_variants(const struct hapt_candidates *candidates, int subcluster,
                                          struct hapt_arena *arena, struct hapt_submesh **variant, int *count)
{
    const struct hapt_subcluster *own = &candidates->cluster->subcluster[subcluster];
    const int submeshes = hapt_candidates_submeshes(own, NULL);
    struct hapt_submesh *submesh, *made;
    int most = 1, all = 0;
    for (int tp = 1; tp < own->devices_per_node; tp *= 2) most++;
    HAPT_NEW(submesh, arena, submeshes);
    HAPT_NEW(made, arena, submeshes * most * HAPT_MOST_KEEPS + candidates->layout_count);
    hapt_candidates_submeshes(own, submesh);
    for (int s = 0; s < submeshes; s++)
        for (int tp = 1; tp <= most_tensor_parallel(candidates, submesh[s]) && submesh[s].m % tp == 0; tp *= 2)
            if ((candidates->programs & (tp > 1 ? PROGRAM_TENSOR : PROGRAM_DATA)) || submesh[s].n * submesh[s].m == 1)
                for (int k = 0; k < candidates->keep_count; k++)
                    if (candidates->keep[k].weights_at != HAPT_WEIGHTS_SHARDED || submesh[s].n * submesh[s].m > tp)
                        made[all++] = (struct hapt_submesh){submesh[s].n,
                                                            submesh[s].m,
                                                            tp,
                                                            0,
                                                            candidates->keep[k].recompute,
                                                            candidates->keep[k].weights_at};
    for (int d = 0; d < candidates->mesh_count; d++) {
        const struct hapt_candidate_mesh *mesh = &candidates->mesh[d];
        if (mesh->program > 0 && (mesh->subclusters >> subcluster & 1u))
            made[all++] = (struct hapt_submesh){mesh->n, mesh->m, 1, mesh->program, 0, false};
    }
    *variant = made;
    *count = all;
    return HAPT_OK;
}

int hapt_candidates_submesh_index(const struct hapt_subcluster *subcluster, struct hapt_submesh submesh)
{
    int index = 0;
    if (submesh.m == subcluster->devices_per_node)
        return hapt_candidates_submeshes(subcluster, NULL) - subcluster->nodes + submesh.n - 1;
    for (int m = 1; m < submesh.m; m *= 2) index++;
    return index;
}

static int compare_meshes(const void *a, const void *b)
{
    const struct hapt_candidate_mesh *x = a, *y = b;
    return x->dp != y->dp ? (x->dp > y->dp) - (x->dp < y->dp) : (x->tp > y->tp) - (x->tp < y->tp);
}

/* The meshes of all submeshes' variants over which the full model can be sharded, each once, and their shardings. */
static enum hapt_status find_meshes(struct hapt_candidates *candidates, struct hapt_arena *arena,
                                    struct hapt_arena *scratch)
{
    const struct hapt_cluster *cluster = candidates->cluster;
    const int rows = candidates->model->microbatch, room = hapt_synthesised_room(candidates);
    int count = 0, variants[HAPT_MAX_SUBCLUSTERS];
    struct hapt_submesh *variant[HAPT_MAX_SUBCLUSTERS];
    struct hapt_candidate_mesh *mesh;
    for (int c = 0; c < cluster->count; c++) {
        HAPT_TRY(hapt_candidates_variants(candidates, c, scratch, &variant[c], &variants[c]));
        count += variants[c];
    }
    HAPT_NEW(mesh, arena, count + room);
    HAPT_NEW(candidates->sharding, arena, count + room);
    candidates->mesh = mesh;
    count = 0;
    for (int c = 0; c < cluster->count; c++) {
        for (int v = 0; v < variants[c]; v++) {
            const struct hapt_submesh its = variant[c][v];
            const struct hapt_candidate_mesh wanted = {.dp = its.n * its.m / its.tp, .tp = its.tp};
            if (rows >= wanted.dp) mesh[count++] = wanted;
        }
    }
    qsort(mesh, (size_t)count, sizeof *mesh, compare_meshes);
    struct hapt_sharding *outer = NULL; /* of the last dp */
    for (int k = 0, dp = 0; k < count; k++) {
        const int d = candidates->mesh_count;
        enum hapt_status status = HAPT_OK;
        if (d > 0 && compare_meshes(&mesh[d - 1], &mesh[k]) == 0) continue;
        if (mesh[k].dp != dp) status = hapt_sharding_outer_rows(candidates->model->graph, mesh[k].dp, arena, &outer);
        if (status == HAPT_OK) dp = mesh[k].dp;
        if (status == HAPT_OK) status = hapt_sharding_inner_tensor(outer, mesh[k].tp, arena, &candidates->sharding[d]);
        if (status == HAPT_OK)
            mesh[candidates->mesh_count++] = mesh[k];
        else if (status == HAPT_ERR_INFEASIBLE)
            hapt_fail_reset();
        else
            return status;
    }
    if (candidates->programs & PROGRAM_SYNTHESISED) HAPT_TRY(hapt_synthesised_add(candidates, room, arena));
    if (candidates->mesh_count > 0) return HAPT_OK;
    return hapt_fail(HAPT_ERR_INFEASIBLE, "give at least one row per device (--microbatch-rows)",
                     "no submesh can share %d rows", candidates->model->microbatch);
}

struct range {
    uint64_t structure;
    int first, last;
};

static int compare_ranges(const void *a, const void *b)
{
    const struct range *x = a, *y = b;
    if (x->structure != y->structure) return x->structure < y->structure ? -1 : 1;
    return x->first != y->first ? x->first - y->first : x->last - y->last;
}

/* Makes ranges differ that begin or end elsewhere in a unit. */
static void mark_units(const struct hapt_unit *unit, int count, uint64_t *hash)
{
    for (int u = 0; u < count; u++) {
        hash[unit[u].first_op] = hapt_hash(hash[unit[u].first_op], "first", 5);
        hash[unit[u].end_op - 1] = hapt_hash(hash[unit[u].end_op - 1], "last", 4);
    }
}

static enum hapt_status find_structures(struct hapt_candidates *candidates, struct hapt_arena *arena,
                                        struct hapt_arena *scratch)
{
    const int L = candidates->layer_count;
    struct range *range;
    uint64_t *structure, *hash;
    int count = 0;
    if ((int64_t)L * L > INT_MAX)
        return hapt_fail(HAPT_ERR_MEMORY, "plan over fewer layers (--layers-per-model)",
                         "a model of %d layers has too many ranges", L);
    HAPT_NEW(structure, scratch, (size_t)L * (size_t)L);
    HAPT_NEW(hash, scratch, candidates->model->graph->op_count);
    /* Equal operators may be cut differently, because of other operators that read their outputs. */
    for (int d = 0; d < candidates->mesh_count; d++) hapt_sharding_hash(candidates->sharding[d], hash);
    if (hapt_candidates_recompute(candidates)) mark_units(candidates->unit, candidates->unit_count, hash);
    mark_units(candidates->weight_unit, candidates->weight_unit_count, hash);
    HAPT_TRY(hapt_layers_structures(candidates->layers, candidates->model->graph, hash, structure));
    HAPT_NEW(range, scratch, (size_t)L * (size_t)(L + 1) / 2);
    HAPT_NEW(candidates->structure, arena, (size_t)L * (size_t)L);
    HAPT_NEW(candidates->first, arena, (size_t)L * (size_t)(L + 1) / 2);
    HAPT_NEW(candidates->last, arena, (size_t)L * (size_t)(L + 1) / 2);
    for (int cell = 0; cell < L * L; cell++) candidates->structure[cell] = -1;
    for (int i = 0; i < L; i++)
        for (int j = i; j < L; j++) range[count++] = (struct range){structure[i * L + j], i, j};
    qsort(range, (size_t)count, sizeof *range, compare_ranges);
    for (int r = 0; r < count; r++) {
        if (r == 0 || range[r].structure != range[r - 1].structure) {
            candidates->first[candidates->structure_count] = range[r].first;
            candidates->last[candidates->structure_count++] = range[r].last;
        }
        candidates->structure[range[r].first * L + range[r].last] = candidates->structure_count - 1;
    }
    return HAPT_OK;
}

enum hapt_status hapt_candidates_find_structures(struct hapt_candidates *candidates, struct hapt_arena *arena)
{
    struct hapt_arena scratch;
    hapt_arena_init(&scratch);
    candidates->structure_count = 0;
    const enum hapt_status status = find_structures(candidates, arena, &scratch);
    hapt_arena_release(&scratch);
    HAPT_TRY(status);
    if ((int64_t)candidates->structure_count * candidates->mesh_count > INT_MAX)
        return hapt_fail(HAPT_ERR_MEMORY,
                         "plan over fewer layers (--layers-per-model), or with a smaller --tensor-parallel",
                         "there are too many candidates: %d different ranges of layers on %d meshes",
                         candidates->structure_count, candidates->mesh_count);
    candidates->item_count = candidates->structure_count * candidates->mesh_count;
    return HAPT_OK;
}

int hapt_candidates_states(const struct hapt_config *config)
{
    if (strcmp(hapt_config_text(config, "optimizer"), "adamw") == 0) return 2;
    return hapt_config_real(config, "momentum") > 0 ? 1 : 0;
}

bool hapt_candidates_defers(const struct hapt_config *config)
{
    return strcmp(hapt_config_text(config, "update-order"), "priority") == 0;
}

static enum state_sharing state_sharing_of(const struct hapt_config *config)
{
    const char *choice = hapt_config_text(config, "sharded-optimizer");
    return strcmp(choice, "yes") == 0 ? STATE_SHARDED : strcmp(choice, "no") == 0 ? STATE_REPLICATED : STATE_AS_NEEDED;
}

bool hapt_candidates_recompute(const struct hapt_candidates *candidates)
{
    for (int k = 0; k < candidates->keep_count; k++)
        if (candidates->keep[k].recompute > 0) return true;
    return false;
}

bool hapt_candidates_chooses(const struct hapt_candidates *candidates)
{
    return candidates->weight_unit_count > 0 || hapt_candidates_recompute(candidates);
}

static void add_keep(struct hapt_candidates *candidates, int recompute, enum hapt_weights_at weights_at)
{
    HAPT_ASSERT(candidates->keep_count < HAPT_MOST_KEEPS);
    candidates->keep[candidates->keep_count++] = (struct hapt_keep){recompute, (int)weights_at};
}

enum { MOST_RECOMPUTATIONS = 6 };

/* The choices of --recompute, and their number. auto: nothing, then all units selective, then quarters of them make all
 * again. Unlike units are chosen by quarters of the bytes that they free. */
static int list_recomputation(const struct hapt_config *config, bool recompute,
                              const struct hapt_candidates *candidates, int choices[MOST_RECOMPUTATIONS])
{
    const char *choice = recompute ? hapt_config_text(config, "recompute") : "no";
    const int by_bytes = hapt_unit_choices_differ(candidates->units) ? HAPT_RECOMPUTE_BY_BYTES : 0;
    int count = 0;
    choices[0] = 0;
    if (!strcmp(choice, "no") || candidates->unit_count == 0) return 1;
    if (strcmp(choice, "auto") != 0) {
        choices[0] = hapt_layers_recompute(choice);
        HAPT_ASSERT(choices[0] >= 0);
        return 1;
    }
    choices[count++] = 0;
    choices[count++] = HAPT_RECOMPUTE_SELECTIVE;
    for (int quarters = 1; quarters < 4; quarters++)
        choices[count++] = by_bytes + HAPT_RECOMPUTE_SELECTIVE + quarters * HAPT_RECOMPUTE_PARTS / 4;
    choices[count++] = HAPT_RECOMPUTE_PARTS;
    return count;
}

/* Adds choices with the least, half and the most of the recomputation. */
static void add_thirds(struct hapt_candidates *candidates, const int *recompute, int count,
                       enum hapt_weights_at weights_at)
{
    for (int third = 0, last = -1; third < 3; third++) {
        const int k = third * (count - 1) / 2;
        if (k != last) add_keep(candidates, recompute[k], weights_at);
        last = k;
    }
}

/* Weights on the host or sharded with some of the recomputation; gradients, too, with the most. If weights are given to
 * be there, all choices of recomputation have them there, as far as they can move. */
static void choose_keeps(const struct hapt_config *config, const struct hapt_candidates_options *options,
                         struct hapt_candidates *candidates)
{
    if (candidates->roomy) {
        add_keep(candidates, 0, HAPT_WEIGHTS_RESIDENT);
        return;
    }
    int recompute[MOST_RECOMPUTATIONS];
    const int count = list_recomputation(config, options->recompute, candidates, recompute);
    const enum hapt_offload what = options->offload.what;
    const bool on_host = what == HAPT_OFFLOAD_WEIGHTS || what == HAPT_OFFLOAD_GRADIENTS;
    for (int k = 0; k < count; k++) {
        if (on_host && candidates->host_gradients) add_keep(candidates, recompute[k], HAPT_GRADIENTS_ON_HOST);
        add_keep(candidates, recompute[k], on_host ? HAPT_WEIGHTS_ON_HOST : HAPT_WEIGHTS_RESIDENT);
        if (candidates->weight_sharding == HAPT_WEIGHT_SHARDING_ALL)
            add_keep(candidates, recompute[k], HAPT_WEIGHTS_SHARDED);
    }
    if (candidates->weight_sharding == HAPT_WEIGHT_SHARDING_MAY)
        add_thirds(candidates, recompute, count, HAPT_WEIGHTS_SHARDED);
    if ((what != HAPT_OFFLOAD_STAGES && what != HAPT_OFFLOAD_STAGES_GRADIENTS) ||
        candidates->state_sharing == STATE_SHARDED)
        return;
    add_thirds(candidates, recompute, count, HAPT_WEIGHTS_ON_HOST);
    if (candidates->host_gradients) add_keep(candidates, recompute[count - 1], HAPT_GRADIENTS_ON_HOST);
}

enum hapt_status hapt_candidates_build(const struct hapt_cluster *cluster, const struct hapt_model *model,
                                       const struct hapt_layers *layers, const struct hapt_config *config,
                                       const struct hapt_candidates_options *options, struct hapt_arena *arena,
                                       struct hapt_candidates *candidates)
{
    const bool gradients =
        options->offload.what == HAPT_OFFLOAD_STAGES_GRADIENTS || options->offload.what == HAPT_OFFLOAD_GRADIENTS;
    *candidates = (struct hapt_candidates){
        .cluster = cluster,
        .model = model,
        .layers = layers,
        .layer_count = layers->count,
        .tensor_parallel = options->tensor_parallel,
        .programs = options->programs,
        .split = options->split,
        .host_state = options->offload.what != HAPT_OFFLOAD_NO,
        .host_update = options->offload.host_update,
        .host_weights = options->offload.what >= HAPT_OFFLOAD_STAGES && !options->roomy,
        .host_gradients = gradients && !options->roomy,
        .weight_sharding = options->roomy ? HAPT_WEIGHT_SHARDING_NO : options->offload.weight_sharding,
        .roomy = options->roomy,
        .efficiency = options->efficiency,
        .imbalance = hapt_config_real(config, "imbalance"),
        .microbatches = (int)hapt_config_int(config, "microbatches"),
        .state_count = hapt_candidates_states(config),
        .state_sharing = state_sharing_of(config)};
    struct hapt_arena scratch;
    HAPT_ASSERT(hapt_tied_exchange_find(hapt_config_text(config, "tied-exchange"), &candidates->exchange));
    for (int c = 0; c < cluster->count; c++)
        candidates->speed += hapt_candidates_device_speed(candidates, c) * cluster->subcluster[c].nodes *
                             cluster->subcluster[c].devices_per_node;
    HAPT_TRY(hapt_layers_units(layers, arena, &candidates->unit, &candidates->unit_count));
    HAPT_TRY(
        hapt_unit_choices_create(model->graph, candidates->unit, candidates->unit_count, arena, &candidates->units));
    if (candidates->host_weights || candidates->weight_sharding != HAPT_WEIGHT_SHARDING_NO)
        HAPT_TRY(hapt_layers_weight_units(layers, arena, &candidates->weight_unit, &candidates->weight_unit_count));
    choose_keeps(config, options, candidates);
    candidates->keep_stride = candidates->keep_count;
    hapt_arena_init(&scratch);
    const enum hapt_status status = find_meshes(candidates, arena, &scratch);
    hapt_arena_release(&scratch);
    HAPT_TRY(status);
    HAPT_TRY(hapt_candidates_find_structures(candidates, arena));
    HAPT_NEW(candidates->work, arena, layers->count + 1);
    for (int l = 0; l < layers->count; l++) candidates->work[l + 1] = candidates->work[l] + layers->flops[l];
    return HAPT_OK;
}

int hapt_candidates_mesh_index(const struct hapt_candidates *candidates, int dp, int tp)
{
    for (int d = 0; d < candidates->mesh_count; d++)
        if (candidates->mesh[d].program == 0 && candidates->mesh[d].dp == dp && candidates->mesh[d].tp == tp) return d;
    return -1;
}

int hapt_candidates_mesh_index_of_program(const struct hapt_candidates *candidates, int program)
{
    for (int d = 0; d < candidates->mesh_count; d++)
        if (candidates->mesh[d].program == program) return d;
    return -1;
}

enum hapt_status hapt_candidates_program(const struct hapt_candidates *candidates, int first, int last, int mesh_index,
                                         struct hapt_arena *arena, struct hapt_program **program)
{
    const struct hapt_layers *layers = candidates->layers;
    return hapt_program_build(candidates->sharding[mesh_index], hapt_layers_first_op(layers, first),
                              layers->end_op[last], arena, program);
}

static enum hapt_status plan_program(const struct hapt_candidates *candidates, const struct hapt_program *program,
                                     const struct hapt_engine_options *engine, struct hapt_arena *arena,
                                     struct hapt_memory_plan **plan)
{
    const struct hapt_memory_options options = {.slots = 1,
                                                .state_count = candidates->state_count,
                                                .host_state = candidates->host_state,
                                                .host_update = candidates->host_update};
    if (!engine) return hapt_memory_plan(program, &options, arena, plan);
    struct hapt_engine_options one = *engine;
    one.slots = 1;
    one.state_count = candidates->state_count;
    one.host_state = candidates->host_state;
    one.host_update = candidates->host_update;
    return hapt_engine_plan_memory(program, &one, arena, plan);
}

bool hapt_candidates_wants_split(const struct hapt_config *config)
{
    const bool chosen = !strcmp(hapt_config_text(config, "strategy"), "hapt") && !hapt_config_text(config, "stages") &&
                        strcmp(hapt_config_text(config, "objective"), "formula") != 0;
    return hapt_config_command(config) == HAPT_COMMAND_PROFILE ||
           (strcmp(hapt_config_text(config, "split-backward"), "no") != 0 &&
            (chosen || hapt_config_given(config, "split-backward")));
}

struct hapt_item_memory hapt_candidates_memory(const struct hapt_candidates *candidates,
                                               const struct hapt_memory_bytes *figures)
{
    const double trained = (double)figures->trained_elements;
    /* An update reads the gradient twice (norm, update), writes it once (zero), and reads and writes everything
     * else. */
    const double touched = 3 * 4.0 + 2 * 4.0 * (1 + candidates->state_count) + (figures->copies ? 2 : 0);
    return (struct hapt_item_memory){.parameter_bytes = (double)figures->parameter_bytes,
                                     .copies = figures->copies,
                                     .activation_bytes = (double)figures->activation_bytes,
                                     .trained_elements = trained,
                                     .update_bytes = trained * touched,
                                     .sharded_bytes = (double)figures->sharded_bytes,
                                     .host_bytes = (double)figures->host_bytes,
                                     .sharded_host_bytes = (double)figures->sharded_host_bytes,
                                     .masters_unread = figures->masters_unread,
                                     .weight_bytes = (double)figures->weight_bytes,
                                     .fetch_bytes = (double)figures->fetch_bytes,
                                     .weight_units = figures->weight_units,
                                     .gradient_bytes = (double)figures->gradient_bytes,
                                     .gradient_fetch_bytes = (double)figures->gradient_fetch_bytes,
                                     .gradient_last_bytes = (double)figures->gradient_last_bytes};
}

bool hapt_candidates_shards_state(const struct hapt_candidates *candidates, const struct hapt_item_memory *memory,
                                  double limit)
{
    const bool fits = memory->parameter_bytes + candidates->microbatches * memory->activation_bytes <= limit;
    return candidates->state_sharing == STATE_SHARDED ||
           (candidates->state_sharing == STATE_AS_NEEDED && (candidates->host_state || candidates->roomy || !fits));
}

double hapt_candidates_resident_bytes(const struct hapt_candidates *candidates, const struct hapt_item_memory *memory,
                                      double limit)
{
    return hapt_candidates_shards_state(candidates, memory, limit) ? memory->sharded_bytes : memory->parameter_bytes;
}

double hapt_candidates_host_bytes(const struct hapt_candidates *candidates, const struct hapt_item_memory *memory,
                                  double limit)
{
    return hapt_candidates_shards_state(candidates, memory, limit) ? memory->sharded_host_bytes : memory->host_bytes;
}

double hapt_candidates_host_update_s(const struct hapt_subcluster *subcluster, const struct hapt_item_memory *memory,
                                     double elements, enum hapt_weights_at weights_at)
{
    if (elements <= 0) return 0;
    const double window = (double)hapt_memory_window((size_t)elements);
    /* bytes of what is on the device */
    const double masters = memory->masters_unread > 0 || weights_at != HAPT_WEIGHTS_RESIDENT ? 0 : 4,
                 copies = memory->copies > 0 && weights_at == HAPT_WEIGHTS_RESIDENT ? 2 : 0,
                 gradients = weights_at == HAPT_GRADIENTS_ON_HOST ? 0 : 4;
    const double byte_s = elements / hapt_cluster_host_bandwidth(subcluster), out_s = (gradients + masters) * byte_s,
                 in_s = (masters + copies) * byte_s, update_s = elements / hapt_cluster_host_update_rate(subcluster);
    const double all_s = out_s + in_s + update_s;
    const double longest_s = masters > 0 ? fmax(out_s, update_s + in_s) : fmax(fmax(out_s, in_s), update_s);
    if (hapt_candidates_copies_itself(subcluster) || window >= elements) return all_s;
    return longest_s + window / 2 / elements * (all_s - longest_s);
}

double hapt_candidates_update_bytes(const struct hapt_candidates *candidates, const struct hapt_item_memory *memory)
{
    return candidates->host_update ? 2 * 4.0 * memory->trained_elements : memory->update_bytes;
}

double hapt_candidates_host_copies_s(const struct hapt_candidates *candidates, int subcluster,
                                     const struct hapt_item_memory *memory)
{
    const struct hapt_subcluster *own = &candidates->cluster->subcluster[subcluster];
    const double bytes = hapt_candidates_host_bytes(candidates, memory, own->device.memory_bytes);
    if (candidates->host_update)
        return bytes > 0
                   ? hapt_candidates_host_update_s(own, memory, memory->trained_elements * bytes / memory->host_bytes,
                                                   HAPT_WEIGHTS_RESIDENT)
                   : 0;
    const double one_s = bytes / hapt_cluster_host_bandwidth(own);
    if (hapt_candidates_copies_itself(own)) return 2 * one_s;
    /* the last half of the window is copied back alone */
    const double elements = bytes / (4.0 * (candidates->state_count + memory->masters_unread));
    const double window = (double)hapt_memory_window((size_t)elements);
    return one_s * (1 + (window < elements ? window / 2 / elements : 1));
}

struct hapt_item_memory hapt_candidates_state_memory(const struct hapt_candidates *candidates, double elements)
{
    const bool copies = candidates->model->dtype != HAPT_F32,
               away = candidates->host_state && candidates->state_count > 0;
    const double bytes = 4.0 * (candidates->state_count + copies) * elements;
    const struct hapt_memory_bytes figures = {.trained_elements = (size_t)elements,
                                              .copies = copies,
                                              .masters_unread = copies,
                                              .host_bytes = away ? (size_t)bytes : 0,
                                              .sharded_host_bytes = away ? (size_t)bytes : 0};
    return hapt_candidates_memory(candidates, &figures);
}

double hapt_candidates_summed_bytes(const struct hapt_candidates *candidates, int subcluster,
                                    const struct hapt_item_memory *memory)
{
    const double limit = candidates->cluster->subcluster[subcluster].device.memory_bytes;
    const bool slices = memory->masters_unread > 0 && hapt_candidates_shards_state(candidates, memory, limit);
    return (slices ? 3 : 4) * memory->trained_elements;
}

bool hapt_candidates_copies_itself(const struct hapt_subcluster *subcluster)
{
    return strcmp(subcluster->device.backend, "cpu") == 0 && !subcluster->host_paced;
}

/* True if the hosts of a subcluster can hold the item's state for all devices of a node. */
static bool host_holds(const struct hapt_candidates *candidates, int subcluster, const struct hapt_item_memory *memory)
{
    const struct hapt_subcluster *own = &candidates->cluster->subcluster[subcluster];
    const double bytes = hapt_candidates_host_bytes(candidates, memory, own->device.memory_bytes);
    return own->host_memory_bytes == 0 || bytes * own->devices_per_node <= own->host_memory_bytes;
}

/* Adds the figures of the split program of an item. */
static enum hapt_status plan_split(const struct hapt_candidates *candidates, const struct hapt_program *whole,
                                   const struct hapt_engine_options *engine, struct hapt_arena *scratch,
                                   struct hapt_item_memory *memory)
{
    struct hapt_sharding *sharding;
    struct hapt_program *program;
    struct hapt_memory_plan *plan;
    if (!candidates->split) return HAPT_OK;
    HAPT_TRY(hapt_sharding_split(whole->sharding, scratch, &sharding));
    HAPT_TRY(hapt_program_build(sharding, whole->first_op, whole->end_op, scratch, &program));
    HAPT_TRY(plan_program(candidates, program, engine, scratch, &plan));
    memory->split_parameter_bytes = (double)plan->parameter_bytes;
    memory->weight_slot_bytes = (double)plan->weight_slot_bytes;
    HAPT_ASSERT((double)plan->activation_bytes == memory->activation_bytes);
    return HAPT_OK;
}

static enum hapt_status plan_item(const struct hapt_candidates *candidates, int item,
                                  const struct hapt_engine_options *engine, struct hapt_arena *scratch,
                                  struct hapt_item_memory *memory)
{
    const int structure = item / candidates->mesh_count;
    struct hapt_program *program;
    struct hapt_memory_plan *plan;
    HAPT_TRY(hapt_candidates_program(candidates, candidates->first[structure], candidates->last[structure],
                                     item % candidates->mesh_count, scratch, &program));
    HAPT_TRY(plan_program(candidates, program, engine, scratch, &plan));
    const struct hapt_memory_bytes figures = {.parameter_bytes = plan->parameter_bytes,
                                              .sharded_bytes = plan->sharded_bytes,
                                              .activation_bytes = plan->activation_bytes,
                                              .host_bytes = plan->host_bytes,
                                              .sharded_host_bytes = plan->sharded_host_bytes,
                                              .trained_elements = plan->trained_elements,
                                              .copies = plan->copy_offset != (size_t)-1,
                                              .masters_unread = plan->masters_unread};
    *memory = hapt_candidates_memory(candidates, &figures);
    return plan_split(candidates, program, engine, scratch, memory);
}

enum hapt_status hapt_candidates_plan_memory(const struct hapt_candidates *candidates, int item,
                                             const struct hapt_engine_options *engine, struct hapt_item_memory *memory)
{
    const int structure = item / candidates->mesh_count, first = candidates->first[structure],
              last = candidates->last[structure];
    struct hapt_arena scratch;
    if (!hapt_sharding_allows(candidates->sharding[item % candidates->mesh_count],
                              hapt_layers_first_op(candidates->layers, first), candidates->layers->end_op[last])) {
        *memory = FITS_NOWHERE;
        return HAPT_OK;
    }
    hapt_arena_init(&scratch);
    const enum hapt_status status = plan_item(candidates, item, engine, &scratch, memory);
    hapt_arena_release(&scratch);
    return status;
}

bool hapt_candidates_are_balanced(const struct hapt_candidates *candidates, double speed, int first, int last)
{
    const double all = candidates->work[candidates->layer_count];
    const double share = all > 0 ? (candidates->work[last + 1] - candidates->work[first]) / all : 0;
    return first == last || candidates->speed <= 0 || share <= candidates->imbalance * speed / candidates->speed;
}

bool hapt_candidates_may_be_wanted(const struct hapt_candidates *candidates, int mesh_index, int first, int last)
{
    const struct hapt_candidate_mesh *mesh = &candidates->mesh[mesh_index];
    if (mesh->program == 0 || mesh->subclusters == 0)
        return true; /* for mixed stages: see hapt_candidates_wanted_mixed */
    for (int c = 0; c < candidates->cluster->count; c++)
        if ((mesh->subclusters >> c & 1u) &&
            hapt_candidates_are_balanced(candidates, hapt_candidates_device_speed(candidates, c) * mesh->n * mesh->m,
                                         first, last))
            return true;
    return false;
}

bool hapt_candidates_may_recompute(const struct hapt_candidates *candidates, int mesh_index, int first, int last)
{
    const int devices = candidates->mesh[mesh_index].dp * candidates->mesh[mesh_index].tp;
    for (int c = 0; c < candidates->cluster->count; c++) {
        const struct hapt_subcluster *own = &candidates->cluster->subcluster[c];
        if (devices <= own->nodes * own->devices_per_node &&
            hapt_candidates_are_balanced(candidates, hapt_candidates_device_speed(candidates, c) * devices, first,
                                         last))
            return true;
    }
    return false;
}

bool hapt_candidates_fit(const struct hapt_candidates *candidates, int subcluster,
                         const struct hapt_item_memory *memory)
{
    const double limit = candidates->cluster->subcluster[subcluster].device.memory_bytes;
    if (hapt_candidates_resident_bytes(candidates, memory, limit) + memory->activation_bytes > limit) return false;
    return host_holds(candidates, subcluster, memory);
}

bool hapt_candidates_wanted(const struct hapt_candidates *candidates, int subcluster, struct hapt_submesh submesh,
                            int first, int last, const struct hapt_item_memory *memory)
{
    const double speed = hapt_candidates_device_speed(candidates, subcluster) * submesh.n * submesh.m;
    return hapt_candidates_fit(candidates, subcluster, memory) &&
           hapt_candidates_are_balanced(candidates, speed, first, last);
}

bool hapt_candidates_wanted_mixed(const struct hapt_candidates *candidates, const struct hapt_mixed_group *group,
                                  int first, int last, const struct hapt_item_memory *const memory[2])
{
    double speed = 0;
    for (int k = 0; k < 2; k++) {
        const double limit = candidates->cluster->subcluster[group->cluster[k]].device.memory_bytes;
        if (hapt_candidates_resident_bytes(candidates, memory[k], limit) + memory[k]->activation_bytes > limit)
            return false;
        if (!host_holds(candidates, group->cluster[k], memory[k])) return false;
        speed += hapt_candidates_device_speed(candidates, group->cluster[k]) * group->devices[k];
    }
    return hapt_candidates_are_balanced(candidates, speed, first, last);
}
