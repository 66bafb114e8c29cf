/*
 * Weights on the host, or sharded. The kernels of a unit (hapt_weight_unit) read its weights in one of two places on
 * the device.
 *
 * On the host: while a unit waits for its weights and runs, those of the next one in the order of the section are
 * copied to the other place. That begins when the kernels before the unit have ended, since its neighbours' weights
 * share a place.
 *
 * Sharded (ZeRO-3, Rajbhandari et al. 2020): before a unit runs, its ranks gather its weights from their slices. A
 * slice is a part of all parameters of a group, so mostly one rank or two have all of a unit.
 *
 * The forward pass ends with the units that the backward pass needs first, and the other way round: they stay in their
 * places.
 */
#include "engine_private.h"

size_t hapt_engine_weight_bytes(const struct hapt_engine *engine)
{
    return engine->plan->copy_offset == (size_t)-1 ? sizeof(float) : sizeof(uint16_t);
}

void *hapt_engine_host_weight(struct hapt_engine *engine, size_t element)
{
    const struct hapt_memory_plan *plan = engine->plan;
    if (plan->copy_offset == (size_t)-1) return hapt_engine_state_address(engine, -1, element);
    return (uint16_t *)(engine->shared->host + plan->host_copy_offset) + element;
}

static char *place_of(struct hapt_engine *engine, int unit)
{
    return engine->memory + engine->plan->place_offset +
           (size_t)(unit % HAPT_WEIGHT_PLACES) * engine->plan->place_bytes;
}

void *hapt_engine_place_address(struct hapt_engine *engine, int op, int tensor)
{
    int u;
    const size_t element = hapt_engine_element_in_place(engine, op, tensor, &u);
    return place_of(engine, u) + element * hapt_engine_weight_bytes(engine);
}

enum hapt_status hapt_engine_weights_changed(struct hapt_engine *engine)
{
    engine->weights.current = -1;
    for (int k = 0; k < HAPT_WEIGHT_PLACES; k++) {
        engine->weights.place[k].unit = -1;
        HAPT_TRY(hapt_engine_wait_copies(engine, STATE_IN, &engine->weights.place[k].move));
    }
    return HAPT_OK;
}

/* Starts to copy a unit's weights to its place, unless they are there or on their way. */
static enum hapt_status fetch(struct hapt_engine *engine, int u)
{
    const struct hapt_weight_unit *unit = &engine->plan->unit[u];
    struct weight_place *place = &engine->weights.place[u % HAPT_WEIGHT_PLACES];
    const size_t size = hapt_engine_weight_bytes(engine);
    if (place->unit == u) return HAPT_OK;
    HAPT_TRY(hapt_engine_wait_copies(engine, STATE_IN, &place->move));
    for (int k = 0; k < unit->count; k++) {
        const struct hapt_unit_weight *weight = &unit->weight[k];
        const int tensor = engine->program->tensor[weight->parameter].tensor;
        HAPT_TRY(hapt_engine_start_copy(
            engine, STATE_IN, engine->program->graph->tensor[tensor].name, place_of(engine, u) + weight->element * size,
            hapt_engine_host_weight(engine, engine->plan->parameter_element[weight->parameter]),
            hapt_engine_elements(engine, tensor) * size));
    }
    hapt_engine_end_copies(engine, STATE_IN, &place->move);
    place->unit = u;
    return HAPT_OK;
}

/* Weights [first, end) of a unit, which follow each other in their place and in the blocks of one group. */
struct weight_run {
    int first, end;
    size_t element, elements; /* of the blocks */
    const struct hapt_parameter_group *group;
};

static const struct hapt_parameter_group *group_of(const struct hapt_memory_plan *plan, size_t element)
{
    int g = 0;
    while (element < plan->group[g].first || element >= plan->group[g].end) g++;
    return &plan->group[g];
}

static struct weight_run run_from(const struct hapt_memory_plan *plan, const struct hapt_weight_unit *unit, int first)
{
    const size_t begin = plan->parameter_element[unit->weight[first].parameter];
    struct weight_run run = {.first = first, .end = first, .element = begin, .group = group_of(plan, begin)};
    while (run.end < unit->count && plan->parameter_element[unit->weight[run.end].parameter] == begin + run.elements &&
           begin + run.elements < run.group->end)
        run.elements += unit->weight[run.end++].padded;
    return run;
}

static size_t clamp(size_t element, size_t first, size_t end)
{
    return element < first ? first : element > end ? end : element;
}

/* Brings a run to `place`: this rank's part from its slice, then those of the others. Slices and weights begin at even
 * elements, so that compute copies are gathered in pairs. */
static enum hapt_status gather_run(struct hapt_engine *engine, const struct weight_run *run, char *place)
{
    const struct hapt_engine_links *links = &engine->options.links;
    const struct hapt_parameter_group *group = run->group;
    const size_t size = hapt_engine_weight_bytes(engine), in_one = sizeof(float) / size,
                 end = run->element + run->elements, from = clamp(group->slice_first, run->element, end),
                 to = clamp(group->slice_end, run->element, end);
    int own;
    if (from < to)
        HAPT_TRY(engine->options.backend->copy(engine->queue, place + (from - run->element) * size,
                                               hapt_engine_own_weight(engine, from), (to - from) * size));
    const int ranks = hapt_parameter_group_ranks(engine->program->sharding, group->axes, &own);
    if (ranks == 1 || !links->all_gather) return HAPT_OK;
    float *whole = (float *)(void *)place, *block = whole;
    hapt_engine_slice_bounds(engine, group);
    for (int r = 0; r <= ranks; r++)
        engine->bound[r] = (clamp(group->first + engine->bound[r], run->element, end) - run->element) / in_one;
    HAPT_TRY(hapt_engine_finish(engine));
    HAPT_TRY(hapt_engine_to_host(engine, &block, run->elements / in_one));
    HAPT_TRY(links->all_gather(links->context, group->axes, block, engine->bound));
    return hapt_engine_from_host(engine, whole, block, run->elements / in_one);
}

/* Gathers a unit's weights, unless its place has them. */
static enum hapt_status gather(struct hapt_engine *engine, int u)
{
    const struct hapt_weight_unit *unit = &engine->plan->unit[u];
    struct weight_place *place = &engine->weights.place[u % HAPT_WEIGHT_PLACES];
    if (place->unit == u) return HAPT_OK;
    for (int k = 0; k < unit->count;) {
        const struct weight_run run = run_from(engine->plan, unit, k);
        HAPT_TRY(
            gather_run(engine, &run, place_of(engine, u) + unit->weight[k].element * hapt_engine_weight_bytes(engine)));
        k = run.end;
    }
    place->unit = u;
    return HAPT_OK;
}

enum hapt_status hapt_engine_weights_need(struct hapt_engine *engine, enum hapt_section section, int step)
{
    struct weight_places *weights = &engine->weights;
    if (!hapt_memory_has_places(engine->plan)) return HAPT_OK;
    const int u = weights->steps[section].unit[step], next = weights->steps[section].next[step];
    if (u < 0 || u == weights->current) return HAPT_OK;
    HAPT_TRY(hapt_engine_finish(engine));
    if (engine->plan->sharded_weights) {
        weights->current = u;
        return gather(engine, u);
    }
    HAPT_TRY(fetch(engine, u));
    /* before the wait, so that copies follow each other without a pause */
    if (next >= 0 && next % HAPT_WEIGHT_PLACES != u % HAPT_WEIGHT_PLACES) HAPT_TRY(fetch(engine, next));
    weights->current = u;
    return hapt_engine_wait_copies(engine, STATE_IN, &weights->place[u % HAPT_WEIGHT_PLACES].move);
}

static bool reads_weights(const struct hapt_engine *engine, int op)
{
    const struct hapt_graph *graph = engine->program->graph;
    for (int i = 0; i < graph->op[op].input_count; i++)
        if (graph->op[op].input[i] >= 0 && graph->tensor[graph->op[op].input[i]].kind == HAPT_TENSOR_PARAMETER)
            return true;
    return false;
}

enum hapt_status hapt_engine_bind_weights(struct hapt_engine *engine)
{
    struct weight_places *weights = &engine->weights;
    if (!hapt_memory_has_places(engine->plan)) return HAPT_OK;
    HAPT_TRY(hapt_engine_weights_changed(engine));
    for (int section = 0; section < HAPT_SECTION_REDUCE; section++)
        HAPT_TRY(hapt_engine_find_units(engine, (enum hapt_section)section, reads_weights, &weights->steps[section]));
    return HAPT_OK;
}
