/* Candidates: enumerate, alias, prune; and the tables made of them. */
#include "candidates.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "efficiency.h"
#include "profile_private.h"

int candidates_submeshes(const struct hapt_subcluster *subcluster, struct hapt_submesh *submesh)
{
    return hapt_profile_submeshes(subcluster->nodes, subcluster->devices_per_node, submesh);
}

static int compare_ints(const void *a, const void *b)
{
    return (*(const int *)a > *(const int *)b) - (*(const int *)a < *(const int *)b);
}

/* Device counts of all submeshes over which the whole model can be sharded. */
static enum hapt_status find_degrees(struct candidates *candidates, struct hapt_arena *arena)
{
    const struct hapt_cluster *cluster = candidates->cluster;
    const struct hapt_graph *graph = candidates->model->graph;
    int count = 0, *devices;
    for (int c = 0; c < cluster->count; c++) count += candidates_submeshes(&cluster->subcluster[c], NULL);
    struct hapt_submesh *submesh;
    HAPT_NEW(devices, arena, count);
    HAPT_NEW(submesh, arena, count);
    count = 0;
    for (int c = 0; c < cluster->count; c++) {
        const int mine = candidates_submeshes(&cluster->subcluster[c], submesh);
        for (int s = 0; s < mine; s++) devices[count++] = submesh[s].n * submesh[s].m;
    }
    qsort(devices, (size_t)count, sizeof *devices, compare_ints);
    candidates->degree = devices;
    for (int k = 0; k < count; k++) {
        if (candidates->degree_count > 0 && devices[candidates->degree_count - 1] == devices[k]) continue;
        struct hapt_arena scratch;
        struct hapt_program *program;
        hapt_arena_init(&scratch);
        const enum hapt_status status =
            hapt_program_data_parallel(graph, 0, graph->forward_count, 1, devices[k], &scratch, &program);
        hapt_arena_release(&scratch);
        if (status == HAPT_OK)
            devices[candidates->degree_count++] = devices[k];
        else if (status == HAPT_ERR_INFEASIBLE)
            hapt_fail_reset();
        else
            return status;
    }
    if (candidates->degree_count > 0) return HAPT_OK;
    return hapt_fail(HAPT_ERR_INFEASIBLE, "choose a --microbatch that the device counts divide",
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

static enum hapt_status find_structures(struct candidates *candidates, struct hapt_arena *arena,
                                        struct hapt_arena *scratch)
{
    const int L = candidates->layer_count;
    struct range *range;
    int count = 0;
    HAPT_NEW(range, scratch, (size_t)L * (size_t)(L + 1) / 2);
    HAPT_NEW(candidates->structure, arena, (size_t)L * (size_t)L);
    HAPT_NEW(candidates->first, arena, (size_t)L * (size_t)(L + 1) / 2);
    HAPT_NEW(candidates->last, arena, (size_t)L * (size_t)(L + 1) / 2);
    for (int cell = 0; cell < L * L; cell++) candidates->structure[cell] = -1;
    for (int i = 0; i < L; i++)
        for (int j = i; j < L; j++)
            range[count++] =
                (struct range){hapt_layers_structure(candidates->layers, candidates->model->graph, i, j + 1), i, j};
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

static int optimizer_states(const struct hapt_config *config)
{
    if (strcmp(hapt_config_text(config, "optimizer"), "adamw") == 0) return 2;
    return hapt_config_real(config, "momentum") > 0 ? 1 : 0;
}

double candidates_device_speed(const struct candidates *candidates, int subcluster)
{
    const struct hapt_device_spec *device = &candidates->cluster->subcluster[subcluster].device;
    const double flops = roofline_peak_flops(device, candidates->model->dtype);
    return flops / (device->slowdown >= 1 ? device->slowdown : 1);
}

enum hapt_status candidates_build(const struct hapt_cluster *cluster, const struct hapt_model *model,
                                  const struct hapt_layers *layers, const struct hapt_config *config,
                                  struct hapt_arena *arena, struct candidates *candidates)
{
    *candidates = (struct candidates){.cluster = cluster,
                                      .model = model,
                                      .layers = layers,
                                      .layer_count = layers->count,
                                      .imbalance = hapt_config_real(config, "imbalance"),
                                      .state_count = optimizer_states(config)};
    struct hapt_arena scratch;
    hapt_arena_init(&scratch);
    enum hapt_status status = find_degrees(candidates, arena);
    if (status == HAPT_OK) status = find_structures(candidates, arena, &scratch);
    hapt_arena_release(&scratch);
    HAPT_TRY(status);
    candidates->item_count = candidates->structure_count * candidates->degree_count;
    HAPT_NEW(candidates->work, arena, layers->count + 1);
    for (int l = 0; l < layers->count; l++) candidates->work[l + 1] = candidates->work[l] + layers->flops[l];
    for (int c = 0; c < cluster->count; c++)
        candidates->speed += candidates_device_speed(candidates, c) * cluster->subcluster[c].nodes *
                             cluster->subcluster[c].devices_per_node;
    return HAPT_OK;
}

int candidates_degree(const struct candidates *candidates, int devices)
{
    for (int d = 0; d < candidates->degree_count; d++)
        if (candidates->degree[d] == devices) return d;
    return -1;
}

enum hapt_status candidates_program(const struct candidates *candidates, int first, int last, int degree_index,
                                    struct hapt_arena *arena, struct hapt_program **program)
{
    const struct hapt_layers *layers = candidates->layers;
    return hapt_program_data_parallel(candidates->model->graph, hapt_layers_first_op(layers, first),
                                      layers->end_op[last], 1, candidates->degree[degree_index], arena, program);
}

static enum hapt_status plan_program(const struct candidates *candidates, const struct hapt_program *program,
                                     const struct hapt_engine_options *engine, struct hapt_arena *arena,
                                     struct hapt_memory_plan **plan)
{
    const struct hapt_memory_options options = {.slots = 1, .state_count = candidates->state_count};
    if (!engine) return hapt_memory_plan(program, &options, arena, plan);
    struct hapt_engine_options one = *engine;
    one.slots = 1;
    one.state_count = candidates->state_count;
    return hapt_engine_plan_memory(program, &one, arena, plan);
}

enum hapt_status candidates_plan_memory(const struct candidates *candidates, int item,
                                        const struct hapt_engine_options *engine, struct item_memory *memory)
{
    const int structure = item / candidates->degree_count;
    struct hapt_arena scratch;
    struct hapt_program *program;
    struct hapt_memory_plan *plan;
    hapt_arena_init(&scratch);
    enum hapt_status status = candidates_program(candidates, candidates->first[structure], candidates->last[structure],
                                                 item % candidates->degree_count, &scratch, &program);
    if (status == HAPT_OK) status = plan_program(candidates, program, engine, &scratch, &plan);
    if (status == HAPT_OK) {
        const double trained = (double)plan->trained_elements;
        /* An update reads the gradient twice (norm, update), writes it once (zero), and reads and writes all the rest.
         */
        const double touched = 3 * 4.0 + 2 * 4.0 * (1 + plan->state_count) + (plan->copy_offset == (size_t)-1 ? 0 : 2);
        *memory = (struct item_memory){(double)plan->parameter_bytes, (double)plan->activation_bytes, trained,
                                       trained * touched};
    }
    hapt_arena_release(&scratch);
    return status;
}

bool candidates_wanted(const struct candidates *candidates, int subcluster, struct hapt_submesh submesh, int first,
                       int last, const struct item_memory *memory)
{
    const double limit = candidates->cluster->subcluster[subcluster].device.memory_bytes;
    if (memory->parameter_bytes + memory->activation_bytes > limit) return false;
    const double all = candidates->work[candidates->layer_count];
    const double share = all > 0 ? (candidates->work[last + 1] - candidates->work[first]) / all : 0;
    const double speed = candidates_device_speed(candidates, subcluster) * submesh.n * submesh.m;
    /* A single layer cannot be cut further. */
    return first == last || candidates->speed <= 0 || share <= candidates->imbalance * speed / candidates->speed;
}

/* fp32 bytes of the parameters that operators on both sides of a cut read: exchanged every step when the cut is made.
 * bytes[cut], 0 <= cut < forward_count. */
static enum hapt_status tied_bytes(const struct hapt_graph *graph, struct hapt_arena *arena, double **bytes)
{
    int *first, *last; /* [tensor] forward operators that read it; first counts from 1, 0: none */
    HAPT_NEW(first, arena, graph->tensor_count);
    HAPT_NEW(last, arena, graph->tensor_count);
    HAPT_NEW(*bytes, arena, graph->forward_count + 1);
    for (int o = 0; o < graph->forward_count; o++) {
        for (int i = 0; i < graph->op[o].input_count; i++) {
            const int t = graph->op[o].input[i];
            if (t < 0) continue;
            if (!first[t]) first[t] = o + 1;
            last[t] = o;
        }
    }
    for (int t = 0; t < graph->tensor_count; t++) {
        const struct hapt_tensor *tensor = &graph->tensor[t];
        if (tensor->kind != HAPT_TENSOR_PARAMETER || !tensor->trainable || !first[t]) continue;
        (*bytes)[first[t]] += 4.0 * (double)hapt_tensor_elements(tensor);
        (*bytes)[last[t] + 1] -= 4.0 * (double)hapt_tensor_elements(tensor); /* whole numbers: exact */
    }
    for (int cut = 1; cut <= graph->forward_count; cut++) (*bytes)[cut] += (*bytes)[cut - 1];
    return HAPT_OK;
}

/* Both ends send their gradients at once over the slowest link that may lie between them. */
static double exchange_s(const struct hapt_cluster *cluster, int subcluster, double bytes)
{
    double slowest = 0;
    if (bytes <= 0) return 0;
    for (int other = 0; other < cluster->count; other++) {
        if (other == subcluster && cluster->count > 1) continue;
        const struct hapt_link *link = hapt_cluster_link(cluster, subcluster, other);
        slowest = fmax(slowest, fmax(link->latency, 0) + (link->bandwidth > 0 ? bytes / link->bandwidth : 0));
    }
    return slowest;
}

static enum hapt_status fill_frame(const struct candidates *candidates, struct hapt_arena *result,
                                   struct hapt_profile *profile)
{
    const struct hapt_cluster *cluster = candidates->cluster;
    for (int l = 0; l < candidates->layer_count; l++)
        profile->boundary_bytes[l] = candidates->layers->boundary_bytes[l];
    for (int a = 0; a < cluster->count; a++) {
        const struct hapt_subcluster *subcluster = &cluster->subcluster[a];
        HAPT_TRY(hapt_profile_add_cluster(profile, a, subcluster->name, subcluster->nodes, subcluster->devices_per_node,
                                          subcluster->device.memory_bytes, candidates_device_speed(candidates, a),
                                          result));
        for (int b = 0; b < cluster->count; b++) {
            const struct hapt_link *link = hapt_cluster_link(cluster, a, b);
            profile->link_bandwidth[a * cluster->count + b] = link->bandwidth;
            profile->link_latency[a * cluster->count + b] = fmax(link->latency, 0);
        }
    }
    return HAPT_OK;
}

/* Every layer must fit some device by itself: memory grows with the range, so otherwise no plan can hold it. */
static enum hapt_status check_single_layers(const struct candidates *candidates, struct item_memory *const *memory,
                                            const struct hapt_profile *profile)
{
    for (int l = 0; l < profile->layer_count; l++) {
        double least = INFINITY, most = 0;
        bool fits = false;
        for (int c = 0; c < profile->cluster_count; c++) {
            const struct hapt_profile_cluster *table = &profile->cluster[c];
            most = fmax(most, table->device_memory_bytes);
            for (int s = 0; s < table->submesh_count; s++) {
                const int degree = candidates_degree(candidates, table->submesh[s].n * table->submesh[s].m);
                if (degree < 0) continue;
                const struct item_memory *need = &memory[c][candidates_item(candidates, degree, l, l)];
                least = fmin(least, need->parameter_bytes + need->activation_bytes);
                fits = fits || isfinite(table->stage_time[hapt_profile_index(profile, s, l, l)]);
            }
        }
        char needed[32], there[32];
        if (!fits)
            return hapt_fail(HAPT_ERR_INFEASIBLE, "use a smaller --microbatch, finer layers or devices with more memory",
                             "layer %d needs %s of device memory with one microbatch in flight, the largest device has %s", l,
                             hapt_units_bytes(least, needed), hapt_units_bytes(most, there));
    }
    return HAPT_OK;
}

enum hapt_status candidates_fill(const struct candidates *candidates, struct item_memory *const *memory,
                                 struct item_time *const *time, candidates_all_reduce *all_reduce, const void *context,
                                 struct hapt_arena *result, struct hapt_profile **profile)
{
    const int L = candidates->layer_count;
    const struct hapt_cluster *cluster = candidates->cluster;
    struct hapt_profile *made;
    double *tied;
    bool *seen; /* [item] of a subcluster */
    HAPT_NEW(seen, result, candidates->item_count);
    HAPT_TRY(hapt_profile_create(L, cluster->count, result, &made));
    HAPT_TRY(fill_frame(candidates, result, made));
    made->flops = hapt_model_flops(candidates->model);
    HAPT_TRY(tied_bytes(candidates->model->graph, result, &tied));
    for (int c = 0; c < cluster->count; c++) {
        struct hapt_profile_cluster *table = &made->cluster[c];
        memset(seen, 0, (size_t)candidates->item_count * sizeof *seen);
        for (int s = 0; s < table->submesh_count; s++) {
            const struct hapt_submesh submesh = table->submesh[s];
            const int degree = candidates_degree(candidates, submesh.n * submesh.m);
            for (int i = 0; degree >= 0 && i < L; i++) {
                for (int j = i; j < L; j++) {
                    const int item = candidates_item(candidates, degree, i, j);
                    const size_t cell = hapt_profile_index(made, s, i, j);
                    if (!candidates_wanted(candidates, c, submesh, i, j, &memory[c][item])) continue;
                    made->effort.unique += !seen[item];
                    seen[item] = true;
                    table->stage_forward_time[cell] = time[c][item].forward_s;
                    table->stage_time[cell] = time[c][item].forward_s + time[c][item].backward_s;
                    table->parameter_bytes[cell] = memory[c][item].parameter_bytes;
                    table->activation_bytes[cell] = memory[c][item].activation_bytes;
                    table->step_time[cell] = time[c][item].update_s;
                    if (submesh.n * submesh.m > 1)
                        table->step_time[cell] +=
                            all_reduce(context, c, s, submesh, 4 * memory[c][item].trained_elements);
                    if (j == L - 1 && i > 0) table->step_time[cell] += exchange_s(cluster, c, tied[hapt_layers_first_op(candidates->layers, i)]);
                }
            }
        }
    }
    HAPT_TRY(check_single_layers(candidates, memory, made));
    HAPT_TRY(hapt_profile_check(made));
    *profile = made;
    return HAPT_OK;
}
