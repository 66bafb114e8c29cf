/*
 * Weights on the host. The kernels of a unit (hapt_weight_unit) read its weights in one of two places on the device.
 *
 * While a unit waits for its weights and runs, those of the next one in the order of the section are copied to the
 * other place. That begins when the kernels before the unit have ended, since its neighbours' weights share a place.
 * The forward pass ends with the units that the backward pass needs first, and the other way round.
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

enum hapt_status hapt_engine_weights_need(struct hapt_engine *engine, enum hapt_section section, int step)
{
    struct weight_places *weights = &engine->weights;
    if (!engine->plan->host_weights) return HAPT_OK;
    const int u = weights->steps[section].unit[step], next = weights->steps[section].next[step];
    if (u < 0 || u == weights->current) return HAPT_OK;
    HAPT_TRY(hapt_engine_finish(engine));
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
    if (!engine->plan->host_weights) return HAPT_OK;
    HAPT_TRY(hapt_engine_weights_changed(engine));
    for (int section = 0; section < HAPT_SECTION_REDUCE; section++)
        HAPT_TRY(hapt_engine_find_units(engine, (enum hapt_section)section, reads_weights, &weights->steps[section]));
    return HAPT_OK;
}
