/* Makes the profile from items: the variants of a submesh that are worth a row, and the cells. */
#include <math.h>
#include <string.h>

#include "hapt/candidates.h"
#include "hapt/profile.h"

struct filling {
    const struct hapt_candidates *candidates;
    struct hapt_item_memory *const *memory; /* [subcluster][item] */
    struct hapt_item_time *const *time;     /* [subcluster][item] */
    double *const *weight_share;            /* [subcluster][item], or NULL */
    struct hapt_item_again *const *again;   /* [subcluster][item][keep_stride], or NULL */
    hapt_candidates_all_reduce *all_reduce;
    const void *context;
};

/* The figures of an item if a submesh does not keep all on its devices; NULL: it does. */
static const struct hapt_item_again *again_of(const struct filling *filling, int subcluster, int item,
                                              struct hapt_submesh submesh)
{
    const struct hapt_candidates *candidates = filling->candidates;
    const struct hapt_keep *keep = candidates->keep;
    if (submesh.recompute == 0 && !hapt_weights_move(submesh.weights_at)) return NULL;
    while (keep->recompute != submesh.recompute || keep->weights_at != submesh.weights_at) keep++;
    return &filling
                ->again[subcluster][(size_t)item * (size_t)candidates->keep_stride + (size_t)(keep - candidates->keep)];
}

/* --sharded-weights yes: the weights of all ranges that can are sharded. */
static bool is_sharded_instead(const struct filling *filling, int subcluster, int item, struct hapt_submesh submesh)
{
    if (filling->candidates->weight_sharding != HAPT_WEIGHT_SHARDING_ALL || submesh.program > 0 ||
        submesh.n * submesh.m == submesh.tp || submesh.weights_at != HAPT_WEIGHTS_RESIDENT || !filling->again)
        return false;
    submesh.weights_at = HAPT_WEIGHTS_SHARDED;
    return again_of(filling, subcluster, item, submesh)->memory.weight_bytes > 0;
}

static const struct hapt_item_memory *memory_of(const struct filling *filling, int subcluster, int item,
                                                struct hapt_submesh submesh)
{
    static const struct hapt_item_memory nowhere = FITS_NOWHERE;
    if (is_sharded_instead(filling, subcluster, item, submesh)) return &nowhere;
    const struct hapt_item_again *again = again_of(filling, subcluster, item, submesh);
    return again ? &again->memory : &filling->memory[subcluster][item];
}

/* The location of the weights of an item with some on the host. */
static enum hapt_weights_at weights_at_of(const struct hapt_item_memory *memory)
{
    return memory->gradient_bytes > 0 ? HAPT_GRADIENTS_ON_HOST : HAPT_WEIGHTS_ON_HOST;
}

/* Seconds that updates on the host take longer if the weights are on the host, negative: shorter. Ranks do not share
 * the state then, and the weights are not copied back. */
static double more_updates_s(const struct hapt_candidates *candidates, const struct hapt_subcluster *own,
                             const struct hapt_item_memory *memory, const struct hapt_item_memory *whole)
{
    const double own_bytes = hapt_candidates_host_bytes(candidates, whole, own->device.memory_bytes);
    const double share = whole->host_bytes > 0 ? own_bytes / whole->host_bytes : 0; /* 0: it was not sized */
    return hapt_candidates_host_update_s(own, memory, memory->trained_elements, weights_at_of(memory)) -
           hapt_candidates_host_update_s(own, whole, memory->trained_elements * share, HAPT_WEIGHTS_RESIDENT);
}

/* Seconds to gather the sharded weights of one unit. */
static double gather_s(const struct filling *filling, int subcluster, struct hapt_submesh submesh,
                       const struct hapt_item_memory *memory)
{
    enum { RUNS = 2 }; /* collectives of a unit: weights with decay, and without */
    if (memory->weight_units == 0) return 0;
    return RUNS * 0.5 *
           filling->all_reduce(filling->context, subcluster, submesh,
                               memory->weight_bytes / memory->weight_units / RUNS);
}

/* The same for a pass that begins with the units with which the one before ended. */
static double gathers_s(const struct filling *filling, int subcluster, struct hapt_submesh submesh,
                        const struct hapt_item_memory *memory)
{
    return fmax(memory->weight_units - HAPT_WEIGHT_PLACES, 0) * gather_s(filling, subcluster, submesh, memory);
}

/* Bytes of an all-reduce that takes as long as a stage's sums, and its gather of weights, if that is no part of passes.
 */
static double summed_bytes(const struct filling *filling, int subcluster, struct hapt_submesh submesh,
                           const struct hapt_item_memory *memory, const struct hapt_item_memory *whole)
{
    if (submesh.weights_at == HAPT_WEIGHTS_SHARDED && memory->weight_units > 0) return 2 * memory->trained_elements;
    return hapt_candidates_summed_bytes(filling->candidates, subcluster,
                                        hapt_weights_on_host(submesh.weights_at) ? memory : whole);
}

/* Cost of a candidate outside the pipeline. Weights on the host are updated and copied there; the first units of the
 * next step are fetched again. The last gradients leave behind the last pass. */
static double step_s(const struct filling *filling, int subcluster, struct hapt_submesh submesh, int item)
{
    const struct hapt_candidates *candidates = filling->candidates;
    const struct hapt_item_memory *memory = memory_of(filling, subcluster, item, submesh),
                                  *whole = &filling->memory[subcluster][item];
    double seconds = filling->time[subcluster][item].update_s;
    if (submesh.program == 0 && submesh.n * submesh.m > submesh.tp)
        seconds += filling->all_reduce(filling->context, subcluster, submesh,
                                       summed_bytes(filling, subcluster, submesh, memory, whole));
    if (submesh.weights_at == HAPT_WEIGHTS_SHARDED)
        return seconds +
               fmin(memory->weight_units, HAPT_WEIGHT_PLACES) * gather_s(filling, subcluster, submesh, memory);
    if (!hapt_weights_on_host(submesh.weights_at)) return seconds;
    const struct hapt_subcluster *own = &candidates->cluster->subcluster[subcluster];
    const double first_s =
        (memory->weight_bytes - memory->fetch_bytes + memory->gradient_last_bytes) / hapt_cluster_host_bandwidth(own);
    if (candidates->host_update) return fmax(seconds + more_updates_s(candidates, own, memory, whole), 0) + first_s;
    const double more = memory->host_bytes - hapt_candidates_host_bytes(candidates, whole, own->device.memory_bytes);
    return seconds + (hapt_candidates_copies_itself(own) ? 2 : 1) * more / hapt_cluster_host_bandwidth(own) + first_s;
}

struct passes {
    double forward_s, backward_s;
};

/* Sharded weights are gathered by the passes. Weights on the host are fetched while others are used. This holds for
 * forward and backward passes in turn; after a pass of the same direction the first two units are fetched as well.
 * Gradients on the host leave in the other direction, and but for a step's first microbatch they are fetched like
 * weights. */
static struct passes passes_of(const struct filling *filling, int subcluster, int item, struct hapt_submesh submesh)
{
    const struct hapt_item_time *time = &filling->time[subcluster][item];
    const struct hapt_item_again *again = again_of(filling, subcluster, item, submesh);
    struct passes passes = {time->forward_s, time->backward_s + (again ? again->again_s : 0)};
    if (!hapt_weights_move(submesh.weights_at) || again->memory.weight_bytes == 0) return passes;
    if (submesh.weights_at == HAPT_WEIGHTS_SHARDED) {
        const double more_s = gathers_s(filling, subcluster, submesh, &again->memory);
        return (struct passes){passes.forward_s + more_s, passes.backward_s + more_s};
    }
    const struct hapt_subcluster *own = &filling->candidates->cluster->subcluster[subcluster];
    const double fetch_s = again->memory.fetch_bytes / hapt_cluster_host_bandwidth(own),
                 hides =
                     hapt_candidates_copies_itself(own) ? 0 : again->memory.fetch_bytes / again->memory.weight_bytes;
    const double later = 1 - 1.0 / filling->candidates->microbatches; /* microbatches */
    const double in_s = fetch_s + later * again->memory.gradient_fetch_bytes / hapt_cluster_host_bandwidth(own),
                 out_s = again->memory.gradient_bytes / hapt_cluster_host_bandwidth(own),
                 copies_s = hapt_candidates_copies_itself(own) ? in_s + out_s : fmax(in_s, out_s);
    passes.forward_s += fmax(0, fetch_s - hides * passes.forward_s);
    passes.backward_s += fmax(0, copies_s - hides * passes.backward_s);
    return passes;
}

static double stage_s(const struct hapt_item_time *time)
{
    return time->forward_s + time->backward_s;
}

static double item_s(const struct filling *filling, int subcluster, int item, struct hapt_submesh submesh)
{
    const struct passes passes = passes_of(filling, subcluster, item, submesh);
    return passes.forward_s + passes.backward_s;
}

static bool has_candidates(const struct filling *filling, int subcluster, struct hapt_submesh variant)
{
    const struct hapt_candidates *candidates = filling->candidates;
    const int mesh_index = hapt_candidates_mesh_index_of(candidates, variant);
    for (int k = 0; mesh_index >= 0 && k < candidates->structure_count; k++) {
        const struct hapt_item_memory *memory =
            memory_of(filling, subcluster, k * candidates->mesh_count + mesh_index, variant);
        if (hapt_candidates_wanted(candidates, subcluster, variant, candidates->first[k], candidates->last[k], memory))
            return true;
    }
    return false;
}

/* True if `variant` is never better than `other` of the same submesh, in time, step time or memory, on any range. */
static bool is_dominated(const struct filling *filling, int subcluster, struct hapt_submesh variant,
                         struct hapt_submesh other)
{
    const struct hapt_candidates *candidates = filling->candidates;
    const int mine = hapt_candidates_mesh_index_of(candidates, variant),
              its = hapt_candidates_mesh_index_of(candidates, other);
    const double limit = candidates->cluster->subcluster[subcluster].device.memory_bytes;
    for (int k = 0; k < candidates->structure_count; k++) {
        const int a = k * candidates->mesh_count + mine, b = k * candidates->mesh_count + its;
        const struct hapt_item_memory *x = memory_of(filling, subcluster, a, variant),
                                      *y = memory_of(filling, subcluster, b, other);
        if (!hapt_candidates_wanted(candidates, subcluster, variant, candidates->first[k], candidates->last[k], x))
            continue;
        if (y->parameter_bytes > x->parameter_bytes || y->activation_bytes > x->activation_bytes) return false;
        if (hapt_candidates_resident_bytes(candidates, y, limit) > hapt_candidates_resident_bytes(candidates, x, limit))
            return false;
        if (hapt_candidates_host_bytes(candidates, y, limit) > hapt_candidates_host_bytes(candidates, x, limit))
            return false;
        if (item_s(filling, subcluster, b, other) > item_s(filling, subcluster, a, variant)) return false;
        if (step_s(filling, subcluster, other, b) > step_s(filling, subcluster, variant, a)) return false;
    }
    return true;
}

/* The rows of a subcluster's tables. If two variants dominate each other, the earlier one stays. */
static enum hapt_status choose_rows(const struct filling *filling, int subcluster, struct hapt_arena *scratch,
                                    struct hapt_submesh **row, int *rows)
{
    struct hapt_submesh *its;
    bool *drop;
    int all, count = 0, kept = 0;
    HAPT_TRY(hapt_candidates_variants(filling->candidates, subcluster, scratch, &its, &all));
    HAPT_NEW(drop, scratch, all);
    *row = its;
    *rows = all;
    if (filling->candidates->tensor_parallel == 1 && filling->candidates->layout_count == 0 &&
        filling->candidates->keep_count == 1)
        return HAPT_OK;
    const struct hapt_submesh none = its[0];
    for (int v = 0; v < all; v++)
        if (has_candidates(filling, subcluster, its[v])) its[count++] = its[v];
    for (int v = 0; v < count; v++) {
        for (int w = 0; w < count && !drop[v]; w++) {
            if (w == v || drop[w] || its[w].n != its[v].n || its[w].m != its[v].m) continue;
            if (its[v].program == 0 && its[w].program > 0)
                continue; /* --program may remove programs from the profile later */
            drop[v] = is_dominated(filling, subcluster, its[v], its[w]) &&
                      (w < v || !is_dominated(filling, subcluster, its[w], its[v]));
        }
    }
    for (int v = 0; v < count; v++)
        if (!drop[v]) its[kept++] = its[v];
    if (kept == 0) its[kept++] = none; /* a table needs a row, even if all NaN */
    *rows = kept;
    return HAPT_OK;
}

static enum hapt_status fill_frame(const struct filling *filling, struct hapt_arena *result, struct hapt_arena *scratch,
                                   struct hapt_profile *profile)
{
    const struct hapt_candidates *candidates = filling->candidates;
    const struct hapt_cluster *cluster = candidates->cluster;
    for (int l = 0; l < candidates->layer_count; l++)
        profile->boundary_bytes[l] = candidates->layers->boundary_bytes[l];
    HAPT_TRY(hapt_crossings_find(candidates->model->graph, candidates->layers, result, scratch, &profile->crossings));
    for (int a = 0; a < cluster->count; a++) {
        const struct hapt_subcluster *subcluster = &cluster->subcluster[a];
        struct hapt_submesh *row;
        int rows;
        HAPT_TRY(choose_rows(filling, a, scratch, &row, &rows));
        HAPT_TRY(hapt_profile_add_cluster(profile, a, subcluster->name, subcluster->nodes, subcluster->devices_per_node,
                                          subcluster->device.memory_bytes, hapt_candidates_device_speed(candidates, a),
                                          row, rows, result));
        if (filling->weight_share) HAPT_TRY(hapt_profile_add_split(profile, a, result));
        for (int b = 0; b < cluster->count; b++) {
            const struct hapt_link *link = hapt_cluster_link(cluster, a, b);
            profile->link_bandwidth[a * cluster->count + b] = link->bandwidth;
            profile->link_latency[a * cluster->count + b] = fmax(link->latency, 0);
        }
    }
    return HAPT_OK;
}

/* The times of a structure, which all its ranges share. */
struct structure_times {
    bool known;
    struct passes passes;
    double step_s;
};

/* One row of a subcluster's tables. times [structure]: work space. */
static void fill_row(const struct filling *filling, int subcluster, int s, struct structure_times *times, bool *seen,
                     struct hapt_profile *profile)
{
    const struct hapt_candidates *candidates = filling->candidates;
    struct hapt_profile_cluster *table = &profile->cluster[subcluster];
    const struct hapt_submesh submesh = table->submesh[s];
    const int mesh_index = hapt_candidates_mesh_index_of(candidates, submesh), L = candidates->layer_count;
    const double speed = hapt_candidates_device_speed(candidates, subcluster) * submesh.n * submesh.m;
    memset(times, 0, (size_t)candidates->structure_count * sizeof *times);
    for (int i = 0; mesh_index >= 0 && i < L; i++) {
        for (int j = i; j < L && hapt_candidates_are_balanced(candidates, speed, i, j); j++) {
            const int item = hapt_candidates_item(candidates, mesh_index, i, j);
            const size_t cell = hapt_profile_index(profile, s, i, j);
            const struct hapt_item_memory *memory = memory_of(filling, subcluster, item, submesh);
            struct structure_times *its = &times[candidates->structure[i * L + j]];
            if (!hapt_candidates_fit(candidates, subcluster, memory)) continue;
            if (!its->known)
                *its = (struct structure_times){true, passes_of(filling, subcluster, item, submesh),
                                                step_s(filling, subcluster, submesh, item)};
            profile->effort.unique += !seen[item];
            seen[item] = true;
            table->stage_forward_time[cell] = its->passes.forward_s;
            table->stage_time[cell] = its->passes.forward_s + its->passes.backward_s;
            table->parameter_bytes[cell] =
                hapt_candidates_resident_bytes(candidates, memory, table->device_memory_bytes);
            table->activation_bytes[cell] = memory->activation_bytes;
            table->step_time[cell] = its->step_s + hapt_profile_tied_share_s(profile, subcluster, i, j);
            if (!table->weight_time) continue;
            table->weight_time[cell] =
                filling->weight_share[subcluster][item] * filling->time[subcluster][item].backward_s;
            table->split_parameter_bytes[cell] =
                memory->split_parameter_bytes + table->parameter_bytes[cell] - memory->parameter_bytes;
            table->weight_slot_bytes[cell] = memory->weight_slot_bytes;
        }
    }
}

/* Seconds of layers [i, j + 1) of a mixed group without its own times: the slowest device decides, then all sum
 * their gradients. */
static void compose_mixed(const struct filling *filling, const struct hapt_mixed_group *group, int i, int j,
                          double *stage_time, double *forward_time, double *step_time)
{
    const struct hapt_candidates *candidates = filling->candidates;
    double longest_s = 0;
    *stage_time = 0;
    for (int k = 0; k < 2; k++) {
        const struct hapt_item_time *time =
            &filling->time[group->cluster[k]][hapt_candidates_item(candidates, group->mesh_index[k], i, j)];
        /* An update follows the last microbatch without waiting for slower devices. */
        longest_s = fmax(longest_s, stage_s(time) * candidates->microbatches + time->update_s);
        if (stage_s(time) < *stage_time) continue;
        *stage_time = stage_s(time);
        *forward_time = time->forward_s;
    }
    const struct hapt_item_memory *memory =
        &filling->memory[group->cluster[0]][hapt_candidates_item(candidates, group->mesh_index[0], i, j)];
    *step_time = fmax(longest_s - *stage_time * candidates->microbatches, 0) +
                 hapt_collective_cost_s(&group->sums, HAPT_COLLECTIVE_ALL_REDUCE, 4 * memory->trained_elements, 0);
}

static void fill_mixed_cell(const struct filling *filling, const struct hapt_mixed_group *group, int i, int j,
                            size_t cells, const struct hapt_profile *profile, struct hapt_profile_mixed *table)
{
    const struct hapt_candidates *candidates = filling->candidates;
    const size_t cell = (size_t)i * (size_t)candidates->layer_count + (size_t)j;
    const struct hapt_item_memory *memory[2];
    double owed_s = 0;
    for (int k = 0; k < 2; k++)
        memory[k] = &filling->memory[group->cluster[k]][hapt_candidates_item(candidates, group->mesh_index[k], i, j)];
    if (!hapt_candidates_wanted_mixed(candidates, group, i, j, memory)) return;
    if (group->times && !isfinite(group->times->stage_s[cell])) return;
    for (int k = 0; k < 2; k++) {
        owed_s = fmax(owed_s, hapt_profile_tied_share_s(profile, group->cluster[k], i, j));
        table->parameter_bytes[(size_t)k * cells + cell] = hapt_candidates_resident_bytes(
            candidates, memory[k], candidates->cluster->subcluster[group->cluster[k]].device.memory_bytes);
        table->activation_bytes[(size_t)k * cells + cell] = memory[k]->activation_bytes;
    }
    if (group->times) {
        table->stage_time[cell] = group->times->stage_s[cell];
        table->stage_forward_time[cell] = fmin(group->times->forward_s[cell], group->times->stage_s[cell]);
        table->step_time[cell] = group->times->step_s[cell];
    } else {
        compose_mixed(filling, group, i, j, &table->stage_time[cell], &table->stage_forward_time[cell],
                      &table->step_time[cell]);
    }
    table->step_time[cell] += owed_s;
}

static enum hapt_status fill_mixed(const struct filling *filling, const struct hapt_mixed_group *group,
                                   struct hapt_arena *result, struct hapt_profile *profile)
{
    const struct hapt_candidates *candidates = filling->candidates;
    const int L = candidates->layer_count, devices = group->devices[0] + group->devices[1];
    const size_t cells = hapt_profile_index(profile, 1, 0, 0);
    struct hapt_profile_mixed *table;
    HAPT_TRY(hapt_profile_add_mixed(profile, 2, group->cluster, group->devices, result, &table));
    table->program = group->program;
    HAPT_NEW(table->ratio, result, devices);
    HAPT_NEW(table->step_time, result, cells);
    const double *ratio = group->program > 0 ? candidates->layout[group->program - 1]->axis[0].ratio : NULL;
    for (int d = 0; d < devices; d++)
        table->ratio[d] = ratio ? ratio[d]
                          : group->program > 0
                              ? 1.0 / devices
                              : (double)group->rows[d >= group->devices[0]] / candidates->model->microbatch;
    for (int i = 0; i < L; i++)
        for (int j = i; j < L; j++) fill_mixed_cell(filling, group, i, j, cells, profile, table);
    return HAPT_OK;
}

/* True if some candidate of a row has the layer. */
static bool has_layer(const struct hapt_profile *profile, const struct hapt_profile_cluster *table, int s, int layer)
{
    if (isfinite(table->stage_time[hapt_profile_index(profile, s, layer, layer)])) return true;
    for (int i = 0; i <= layer; i++)
        for (int j = layer; j < profile->layer_count; j++)
            if (isfinite(table->stage_time[hapt_profile_index(profile, s, i, j)])) return true;
    return false;
}

/* The subcluster that a layer exceeds least. */
struct shortage {
    double ratio, needed_bytes, room_bytes;
    const char *subcluster;
};

static void note_need(const struct hapt_candidates *candidates, const struct hapt_item_memory *memory, int mesh_index,
                      const struct hapt_profile_cluster *table, struct shortage *least)
{
    const struct hapt_candidate_mesh *mesh = &candidates->mesh[mesh_index];
    const double room = table->device_memory_bytes,
                 needed = hapt_candidates_resident_bytes(candidates, memory, room) + memory->activation_bytes;
    if (mesh->program > 0 || mesh->dp * mesh->tp > table->nodes * table->devices_per_node ||
        mesh->tp > table->devices_per_node || needed / room >= least->ratio)
        return;
    *least = (struct shortage){needed / room, needed, room, table->name};
}

/* Every layer must fit some device. Memory grows with the range, so a single layer that fits nowhere is in no
 * candidate, unless longer ranges alone are candidates (--recompute all). */
static enum hapt_status check_single_layers(const struct hapt_candidates *candidates,
                                            struct hapt_item_memory *const *memory, const struct hapt_profile *profile)
{
    for (int l = 0; l < profile->layer_count; l++) {
        struct shortage least = {.ratio = INFINITY};
        bool fits = false;
        for (int c = 0; c < profile->cluster_count && !fits; c++) {
            const struct hapt_profile_cluster *table = &profile->cluster[c];
            for (int d = 0; d < candidates->mesh_count; d++)
                note_need(candidates, &memory[c][hapt_candidates_item(candidates, d, l, l)], d, table, &least);
            for (int s = 0; s < table->submesh_count; s++)
                fits = fits || (hapt_candidates_mesh_index_of(candidates, table->submesh[s]) >= 0 &&
                                has_layer(profile, table, s, l));
        }
        char needed[32], there[32];
        if (!fits && !least.subcluster)
            return hapt_fail(HAPT_ERR_INFEASIBLE, "allow more programs or other rows of a microbatch",
                             "layer %d can run on no submesh", l);
        if (!fits && least.ratio <= 1)
            return hapt_fail(HAPT_ERR_INFEASIBLE, "give the hosts more memory in the cluster file, or --offload no",
                             "the hosts of %s have too little memory for the optimizer state of layer %d",
                             least.subcluster, l);
        if (!fits)
            return hapt_fail(
                HAPT_ERR_INFEASIBLE, "use fewer --microbatch-rows, finer layers or devices with more memory",
                "layer %d needs %s of device memory with one microbatch in flight, but %s has %s per device", l,
                hapt_units_bytes(least.needed_bytes, needed), least.subcluster,
                hapt_units_bytes(least.room_bytes, there));
    }
    return HAPT_OK;
}

struct numbering {
    const struct hapt_candidates *candidates;
    struct hapt_arena *result;
    int *number; /* [program of the candidates] number in the profile; 0: none yet */
    const struct hapt_stage_layout **layout;
};

static enum hapt_status take_layout(struct numbering *numbering, struct hapt_profile *profile, int *program)
{
    if (*program == 0) return HAPT_OK;
    if (numbering->number[*program] == 0) {
        numbering->number[*program] = ++profile->layout_count;
        HAPT_TRY(hapt_stage_layout_copy(numbering->candidates->layout[*program - 1], numbering->result,
                                        &numbering->layout[profile->layout_count - 1]));
    }
    *program = numbering->number[*program];
    return HAPT_OK;
}

/* Copies and renumbers the layouts that rows and mixed stages use. */
static enum hapt_status take_layouts(const struct hapt_candidates *candidates, struct hapt_arena *result,
                                     struct hapt_arena *scratch, struct hapt_profile *profile)
{
    struct numbering numbering = {.candidates = candidates, .result = result};
    HAPT_NEW(numbering.number, scratch, candidates->layout_count + 1);
    HAPT_NEW(numbering.layout, result, candidates->layout_count);
    for (int c = 0; c < profile->cluster_count; c++)
        for (int s = 0; s < profile->cluster[c].submesh_count; s++)
            HAPT_TRY(take_layout(&numbering, profile, &profile->cluster[c].submesh[s].program));
    for (int k = 0; k < profile->mixed_count; k++)
        HAPT_TRY(take_layout(&numbering, profile, &profile->mixed[k].program));
    profile->layout = numbering.layout;
    return HAPT_OK;
}

static enum hapt_status fill(struct filling *filling, struct hapt_arena *result, struct hapt_arena *scratch,
                             struct hapt_profile **profile)
{
    const struct hapt_candidates *candidates = filling->candidates;
    struct hapt_profile *made;
    struct structure_times *times;
    bool *seen; /* [item] of a subcluster */
    HAPT_NEW(times, scratch, candidates->structure_count);
    HAPT_NEW(seen, scratch, candidates->item_count);
    HAPT_TRY(hapt_profile_create(candidates->layer_count, candidates->cluster->count, result, &made));
    HAPT_TRY(fill_frame(filling, result, scratch, made));
    HAPT_TRY(hapt_profile_tied_bytes(candidates->model->graph, candidates->layers, candidates->exchange, result,
                                     scratch, &made->tied_bytes));
    made->exchange = candidates->exchange;
    made->host_state = candidates->host_state && candidates->state_count > 0;
    made->host_update = candidates->host_update && candidates->state_count > 0;
    made->flops = hapt_model_flops(candidates->model);
    for (int c = 0; c < made->cluster_count; c++) {
        memset(seen, 0, (size_t)candidates->item_count * sizeof *seen);
        for (int s = 0; s < made->cluster[c].submesh_count; s++) fill_row(filling, c, s, times, seen, made);
    }
    for (int k = 0; k < candidates->mixed_count; k++)
        HAPT_TRY(fill_mixed(filling, &candidates->mixed[k], result, made));
    HAPT_TRY(check_single_layers(candidates, filling->memory, made));
    HAPT_TRY(take_layouts(candidates, result, scratch, made));
    if (!candidates->roomy) HAPT_TRY(hapt_profile_check(made)); /* roomy ones give bounds, and are dropped */
    *profile = made;
    return HAPT_OK;
}

enum hapt_status hapt_candidates_fill(const struct hapt_candidates *candidates, struct hapt_item_memory *const *memory,
                                      struct hapt_item_time *const *time, double *const *weight_share,
                                      struct hapt_item_again *const *again, hapt_candidates_all_reduce *all_reduce,
                                      const void *context, struct hapt_arena *result, struct hapt_profile **profile)
{
    struct filling filling = {.candidates = candidates,
                              .memory = memory,
                              .time = time,
                              .weight_share = weight_share,
                              .again = again,
                              .all_reduce = all_reduce,
                              .context = context};
    struct hapt_arena scratch;
    hapt_arena_init(&scratch);
    const enum hapt_status status = fill(&filling, result, &scratch, profile);
    hapt_arena_release(&scratch);
    return status;
}
