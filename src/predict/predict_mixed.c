/*
 * Predicted seconds of a mixed stage's program (HAP 3.2). Every device computes independently between two
 * communications. So a summary of a range is enough: each device's time before the first communication, the time from
 * the first to the last, and each device's time after the last. Summaries of neighbouring ranges combine into one.
 */
#include <math.h>
#include <string.h>

#include "hapt/calibration.h"
#include "predict_mixed.h"

struct stretch {       /* of operators, as seen by all devices */
    bool communicates; /* they communicate */
    double middle_s;
    double *head, *tail; /* [devices]; without communication everything is in head */
};

struct predicting {
    const struct hapt_candidates *candidates;
    const struct hapt_mixed_group *group;
    const struct hapt_sharding *sharding;
    int devices;
    const struct hapt_graph **shard;    /* [devices] local shapes */
    struct hapt_roofline *roofline;     /* [devices] */
    int *layer_of;                      /* [source forward operator] */
    struct stretch *forward, *backward; /* [layer] */
    double *reduce_s;                   /* [layer] collectives at the end of a step */
    double *update_s;                   /* [layer][devices] on the devices, */
    double *elements;                   /* of these */
};

static double longest(const double *seconds, int devices)
{
    double most = 0;
    for (int j = 0; j < devices; j++) most = fmax(most, seconds[j]);
    return most;
}

static void communicate(struct stretch *stretch, double seconds, int devices)
{
    if (stretch->communicates) stretch->middle_s += longest(stretch->tail, devices);
    stretch->communicates = true;
    stretch->middle_s += seconds;
    memset(stretch->tail, 0, (size_t)devices * sizeof *stretch->tail);
}

static void join(struct stretch *into, const struct stretch *next, int devices)
{
    double *open = into->communicates ? into->tail : into->head;
    for (int j = 0; j < devices; j++) open[j] += next->head[j];
    if (!next->communicates) return;
    if (into->communicates) into->middle_s += longest(into->tail, devices);
    into->middle_s += next->middle_s;
    into->communicates = true;
    memcpy(into->tail, next->tail, (size_t)devices * sizeof *into->tail);
}

/* Time per repetition: the tail of one is joined to the head of the next. */
static double round_s(const struct stretch *stretch, int devices)
{
    double most = 0;
    if (!stretch->communicates) return longest(stretch->head, devices);
    for (int j = 0; j < devices; j++) most = fmax(most, stretch->head[j] + stretch->tail[j]);
    return stretch->middle_s + most;
}

static enum hapt_status new_stretches(int count, int devices, struct hapt_arena *scratch, struct stretch **stretch)
{
    HAPT_NEW(*stretch, scratch, count);
    for (int s = 0; s < count; s++) {
        HAPT_NEW((*stretch)[s].head, scratch, devices);
        HAPT_NEW((*stretch)[s].tail, scratch, devices);
    }
    return HAPT_OK;
}

static void clear(struct stretch *stretch, int devices)
{
    stretch->communicates = false;
    stretch->middle_s = 0;
    memset(stretch->head, 0, (size_t)devices * sizeof *stretch->head);
    memset(stretch->tail, 0, (size_t)devices * sizeof *stretch->tail);
}

static double collective_s(const struct predicting *with, int o)
{
    const struct hapt_op *op = &with->sharding->graph->op[o];
    const int ends[2] = {op->input[0], op->output[0]};
    double bytes = 0, largest = 0;
    for (int k = 0; k < 2; k++) {
        double most = 0, sum = 0;
        bytes = fmax(bytes, (double)hapt_tensor_bytes(&with->sharding->graph->tensor[ends[k]]));
        for (int j = 0; j < with->devices; j++) {
            const double its = (double)hapt_tensor_bytes(&with->shard[j]->tensor[ends[k]]);
            most = fmax(most, its);
            sum += its;
        }
        if (with->sharding->property[ends[k]][0].kind == HAPT_PROPERTY_SHARDED) largest = fmax(largest, most / sum);
    }
    return hapt_collective_cost_s(&with->group->sums, hapt_op_type_at(op->type)->collective, bytes, largest);
}

static double exchange_s(const struct predicting *with, int o)
{
    const int times = hapt_op_type_at(with->sharding->graph->op[o].type)->inner_all_reduces;
    double bytes = 0;
    for (int j = 0; j < with->devices; j++) bytes = fmax(bytes, hapt_sharding_exchange_bytes(with->shard[j], o));
    return times * hapt_collective_cost_s(&with->group->sums, HAPT_COLLECTIVE_ALL_REDUCE, bytes / times, 0);
}

static void add_operator(const struct predicting *with, int o, struct stretch *stretch)
{
    const struct hapt_op_type *type = hapt_op_type_at(with->sharding->graph->op[o].type);
    if (type->collective == HAPT_COLLECTIVE_SLICE) return;
    if (type->collective) {
        communicate(stretch, collective_s(with, o), with->devices);
        return;
    }
    if (with->sharding->exchange[o] >= 0) communicate(stretch, exchange_s(with, o), with->devices);
    for (int j = 0; j < with->devices; j++)
        (stretch->communicates ? stretch->tail : stretch->head)[j] +=
            hapt_roofline_graph_s(&with->roofline[j], with->shard[j], o);
}

/* A parameter is updated by the layer of its first reader. */
static void add_updates(struct predicting *with, bool *seen)
{
    const struct hapt_graph *graph = with->sharding->graph;
    for (int o = 0; o < graph->forward_count; o++)
        for (int i = 0; i < graph->op[o].input_count; i++) {
            const int t = graph->op[o].input[i];
            if (t < 0 || seen[t] || graph->tensor[t].kind != HAPT_TENSOR_PARAMETER || !graph->tensor[t].trainable)
                continue;
            seen[t] = true;
            for (int j = 0; j < with->devices; j++) {
                const int64_t at = (int64_t)with->layer_of[graph->op[o].forward_op] * with->devices + j;
                const double elements = (double)hapt_tensor_elements(&with->shard[j]->tensor[t]);
                const struct hapt_item_memory memory = hapt_candidates_state_memory(with->candidates, elements);
                with->elements[at] += elements;
                with->update_s[at] +=
                    hapt_roofline_stream_s(&with->roofline[j], hapt_candidates_update_bytes(with->candidates, &memory));
            }
        }
}

static enum hapt_status prepare(struct predicting *with, struct hapt_arena *scratch)
{
    const struct hapt_candidates *candidates = with->candidates;
    const struct hapt_stage_layout *layout = candidates->layout[with->group->program - 1];
    const int L = candidates->layer_count;
    struct hapt_sharding *made;
    bool *seen;
    HAPT_TRY(hapt_stage_layout_apply(layout, candidates->model->graph, scratch, &made));
    with->sharding = made;
    with->devices = layout->axis[0].size;
    HAPT_NEW(with->shard, scratch, with->devices);
    HAPT_NEW(with->roofline, scratch, with->devices);
    HAPT_TRY(hapt_layers_of_operators(candidates->layers, scratch, &with->layer_of));
    HAPT_NEW(with->reduce_s, scratch, L);
    HAPT_NEW(with->update_s, scratch, L * with->devices);
    HAPT_NEW(with->elements, scratch, L * with->devices);
    HAPT_NEW(seen, scratch, made->graph->tensor_count);
    HAPT_TRY(new_stretches(L, with->devices, scratch, &with->forward));
    HAPT_TRY(new_stretches(L, with->devices, scratch, &with->backward));
    for (int j = 0; j < with->devices; j++) {
        const int place[HAPT_MESH_AXES] = {j, 0};
        struct hapt_sharding *local;
        HAPT_TRY(hapt_sharding_at(made, place, scratch, &local));
        with->shard[j] = local->shard;
        with->roofline[j] = hapt_calibration_roofline(
            candidates->efficiency,
            &candidates->cluster->subcluster[with->group->cluster[j >= with->group->devices[0]]].device,
            candidates->model->dtype);
    }
    for (int o = 0; o < made->graph->op_count; o++) {
        const int l = with->layer_of[made->graph->op[o].forward_op];
        if (o >= made->reduce_first)
            with->reduce_s[l] += collective_s(with, o);
        else
            add_operator(with, o, o < made->graph->forward_count ? &with->forward[l] : &with->backward[l]);
    }
    add_updates(with, seen);
    return HAPT_OK;
}

/* Layers [i, j]: forward in order, backward in reverse. */
static void price_range(const struct predicting *with, int i, int j, struct stretch *both, double *longest_s)
{
    const int L = with->candidates->layer_count, B = with->candidates->microbatches, n = with->devices;
    const struct hapt_range_times *times = with->group->times;
    const size_t cell = (size_t)i * (size_t)L + (size_t)j;
    double reduce_s = 0, most = 0;
    clear(both, n);
    for (int l = i; l <= j; l++) join(both, &with->forward[l], n);
    times->forward_s[cell] = round_s(both, n);
    for (int l = j; l >= i; l--) join(both, &with->backward[l], n);
    times->stage_s[cell] = fmax(round_s(both, n), times->forward_s[cell]);
    for (int l = i; l <= j; l++) reduce_s += with->reduce_s[l];
    for (int d = 0; d < n; d++) {
        double elements = 0;
        longest_s[d] = 0;
        for (int l = i; l <= j; l++) {
            longest_s[d] += with->update_s[l * n + d];
            elements += with->elements[l * n + d];
        }
        const struct hapt_item_memory memory = hapt_candidates_state_memory(with->candidates, elements);
        longest_s[d] += hapt_candidates_host_copies_s(with->candidates,
                                                      with->group->cluster[d >= with->group->devices[0]], &memory);
    }
    /* Without communication between microbatches, an update follows the last one without waiting. */
    for (int d = 0; d < n; d++)
        most = fmax(most, longest_s[d] + (both->communicates ? B * times->stage_s[cell] : B * both->head[d]));
    times->step_s[cell] = fmax(most - B * times->stage_s[cell], 0) + reduce_s;
}

enum hapt_status predict_mixed_program(const struct hapt_candidates *candidates, struct hapt_mixed_group *group,
                                       struct hapt_arena *arena, struct hapt_arena *scratch)
{
    struct predicting with = {.candidates = candidates, .group = group};
    const int L = candidates->layer_count;
    struct stretch *both;
    double *longest_s;
    HAPT_TRY(hapt_range_times_create(L, arena, &group->times));
    HAPT_TRY(prepare(&with, scratch));
    HAPT_TRY(new_stretches(1, with.devices, scratch, &both));
    HAPT_NEW(longest_s, scratch, with.devices);
    for (int i = 0; i < L; i++)
        for (int j = i; j < L; j++) price_range(&with, i, j, both, longest_s);
    return HAPT_OK;
}
