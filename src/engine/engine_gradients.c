/*
 * Gradients on the host. The kernels of a unit (hapt_weight_unit) add to its gradients in one of three places on the
 * device:
 *
 *     zeroed, or fetched if the step has added to them before  -->  kernels of the unit  -->  to the host
 *
 * While a unit runs, the gradients of the one before leave, and those of the one behind come. So each element is added
 * to in the order of the microbatches, as in a resident block. A unit that is still in its place is not fetched again.
 * Gradients to which several units add (of tied weights) are fetched when those have left the device, without overlap.
 * The square sums of a unit are computed before it leaves; those of the last microbatch remain.
 */
#include <string.h>

#include "engine_private.h"

float *hapt_engine_host_gradient(const struct hapt_engine *engine, size_t element)
{
    return (float *)(engine->shared->host + engine->plan->host_gradient_offset) + element;
}

static float *place_address(const struct hapt_engine *engine, int place)
{
    return (float *)(engine->memory + engine->plan->gradient_place_offset +
                     (size_t)place * engine->plan->gradient_place_bytes);
}

void *hapt_engine_gradient_address(struct hapt_engine *engine, int op, int parameter)
{
    int u;
    const size_t element = hapt_engine_element_in_place(engine, op, parameter, &u);
    return place_address(engine, u % HAPT_GRADIENT_PLACES) + element;
}

/* The place of a unit's gradients. */
static int place_of(const struct hapt_engine *engine, const struct unit_gradients *unit)
{
    for (int section = 0; section < HAPT_SECTION_COUNT; section++) {
        const struct unit_gradients *first = engine->gradients.added[section];
        if (first && unit >= first && unit < first + engine->plan->unit_count)
            return (int)(unit - first) % HAPT_GRADIENT_PLACES;
    }
    HAPT_ASSERT(false);
    return 0;
}

static enum hapt_status wait_move(struct hapt_engine *engine, int place, enum state_direction direction)
{
    return hapt_engine_wait_copies(engine, direction, &engine->gradients.place[place].move[direction]);
}

enum hapt_status hapt_engine_gradients_arrive(struct hapt_engine *engine)
{
    for (int place = 0; place < HAPT_GRADIENT_PLACES; place++) HAPT_TRY(wait_move(engine, place, STATE_OUT));
    return HAPT_OK;
}

static enum hapt_status start_copies(struct hapt_engine *engine, const struct unit_gradients *unit,
                                     enum state_direction direction)
{
    const int place = place_of(engine, unit);
    for (int k = 0; k < unit->count; k++) {
        const int index = unit->gradient[k].index, parameter = engine->parameter[index],
                  tensor = engine->program->tensor[parameter].tensor;
        float *here = place_address(engine, place) + unit->gradient[k].element,
              *host = hapt_engine_host_gradient(engine, engine->plan->parameter_element[parameter]);
        if (direction == STATE_IN && !engine->gradients.begun[index]) continue; /* zeroed instead */
        HAPT_TRY(hapt_engine_start_copy(engine, direction, engine->program->graph->tensor[tensor].name,
                                        direction == STATE_IN ? here : host, direction == STATE_IN ? host : here,
                                        hapt_engine_elements(engine, tensor) * sizeof(float)));
    }
    hapt_engine_end_copies(engine, direction, &engine->gradients.place[place].move[direction]);
    return HAPT_OK;
}

/* Starts to copy to its place what the host has of a unit's gradients, unless they are there. */
static enum hapt_status fetch(struct hapt_engine *engine, const struct unit_gradients *unit)
{
    const int at = place_of(engine, unit);
    struct gradient_place *place = &engine->gradients.place[at];
    if (place->unit == unit && !unit->shared) return HAPT_OK;
    HAPT_TRY(wait_move(engine, at, STATE_OUT));
    if (unit->shared) HAPT_TRY(hapt_engine_gradients_arrive(engine));
    HAPT_TRY(start_copies(engine, unit, STATE_IN));
    place->unit = unit;
    return HAPT_OK;
}

/* Kernels may add to a unit's gradients: those to which the step has not added before are 0. */
static enum hapt_status open_place(struct hapt_engine *engine, const struct unit_gradients *unit)
{
    const int place = place_of(engine, unit);
    HAPT_TRY(wait_move(engine, place, STATE_IN));
    HAPT_TRY(wait_move(engine, place, STATE_OUT)); /* of the same unit, from the microbatch before */
    for (int k = 0; k < unit->count; k++) {
        const int index = unit->gradient[k].index;
        struct bound_step zero = engine->zero;
        if (engine->gradients.begun[index]) continue;
        zero.call.output[0] = hapt_engine_flat_view(
            place_address(engine, place) + unit->gradient[k].element, HAPT_F32,
            hapt_engine_elements(engine, engine->program->tensor[engine->parameter[index]].tensor));
        HAPT_TRY(hapt_engine_run(engine, &zero));
    }
    return HAPT_OK;
}

/* Sums the squares of a unit's gradients in the place, as far as the step has added to them. */
static enum hapt_status sum_squares(struct hapt_engine *engine, const struct unit_gradients *unit)
{
    double *sum = engine->gradients.sum;
    for (int k = 0; k < unit->count; k++) {
        struct bound_step bound = engine->square_sum[unit->gradient[k].index];
        bound.call.input[0].data = place_address(engine, place_of(engine, unit)) + unit->gradient[k].element;
        bound.call.output[0] = engine->square_sum[k].call.output[0];
        HAPT_TRY(hapt_engine_run(engine, &bound));
    }
    HAPT_TRY(engine->options.backend->copy(engine->queue, sum, engine->square_sum[0].call.output[0].data,
                                           (size_t)unit->count * sizeof *sum));
    HAPT_TRY(hapt_engine_finish(engine));
    for (int k = 0; k < unit->count; k++) engine->square[unit->gradient[k].index] = sum[k];
    return HAPT_OK;
}

enum hapt_status hapt_engine_gradients_leave(struct hapt_engine *engine)
{
    struct gradient_places *gradients = &engine->gradients;
    const struct unit_gradients *unit = gradients->current;
    if (!unit) return HAPT_OK;
    gradients->current = NULL;
    HAPT_TRY(sum_squares(engine, unit));
    HAPT_TRY(start_copies(engine, unit, STATE_OUT));
    for (int k = 0; k < unit->count; k++) gradients->begun[unit->gradient[k].index] = true;
    return HAPT_OK;
}

enum hapt_status hapt_engine_gradients_need(struct hapt_engine *engine, enum hapt_section section, int step)
{
    struct gradient_places *gradients = &engine->gradients;
    const struct step_units *steps = &gradients->steps[section];
    if (!steps->unit || steps->unit[step] < 0) return HAPT_OK;
    struct unit_gradients *unit = &gradients->added[section][steps->unit[step]];
    if (unit == gradients->current) return HAPT_OK;
    HAPT_TRY(hapt_engine_gradients_leave(engine));
    HAPT_TRY(fetch(engine, unit));
    if (steps->next[step] >= 0) {
        const struct unit_gradients *next = &gradients->added[section][steps->next[step]];
        if (!next->shared && place_of(engine, next) != place_of(engine, unit)) HAPT_TRY(fetch(engine, next));
    }
    gradients->current = unit;
    return open_place(engine, unit);
}

void hapt_engine_forget_gradients(struct hapt_engine *engine)
{
    if (!engine->plan->host_gradients) return;
    for (int place = 0; place < HAPT_GRADIENT_PLACES; place++) engine->gradients.place[place].unit = NULL;
    memset(engine->gradients.begun, 0, (size_t)engine->parameter_count * sizeof *engine->gradients.begun);
    memset(engine->square, 0, (size_t)engine->parameter_count * sizeof *engine->square);
}

/* ---- Binding ---- */

/* The parameter to whose gradient an operator adds with output o, or -1. */
static int added_to(const struct hapt_engine *engine, int op, int o)
{
    const struct hapt_graph *graph = engine->program->graph;
    const int tensor = graph->op[op].output[o];
    return tensor >= 0 && hapt_graph_is_parameter_gradient(graph, tensor) ? graph->tensor[tensor].primal : -1;
}

static bool adds(const struct hapt_engine *engine, int op)
{
    for (int o = 0; o < engine->program->graph->op[op].output_count; o++)
        if (added_to(engine, op, o) >= 0) return true;
    return false;
}

static int index_of(const struct hapt_engine *engine, int parameter)
{
    int index = 0;
    while (engine->program->tensor[engine->parameter[index]].tensor != parameter) index++;
    return index;
}

static bool has(const struct unit_gradients *unit, int index)
{
    for (int k = 0; k < unit->count; k++)
        if (unit->gradient[k].index == index) return true;
    return false;
}

/* Lists the gradients to which the steps of a section add, by unit. */
static enum hapt_status list_added(struct hapt_engine *engine, enum hapt_section section)
{
    const struct hapt_program *program = engine->program;
    struct unit_gradients *added;
    HAPT_NEW(added, &engine->arena, engine->plan->unit_count);
    engine->gradients.added[section] = added;
    for (int u = 0; u < engine->plan->unit_count; u++)
        HAPT_NEW(added[u].gradient, &engine->arena, engine->plan->unit[u].count);
    for (int s = 0; s < program->step_count[section]; s++) {
        const int op = program->step[section][s].op;
        for (int o = 0; o < program->graph->op[op].output_count; o++) {
            const int parameter = added_to(engine, op, o);
            if (parameter < 0) continue;
            int u;
            const size_t element = hapt_engine_element_in_place(engine, op, parameter, &u);
            const int index = index_of(engine, parameter);
            if (!has(&added[u], index)) added[u].gradient[added[u].count++] = (struct unit_gradient){index, element};
        }
    }
    return HAPT_OK;
}

/* Marks the units that add to a gradient to which others add, too. */
static void find_shared(struct hapt_engine *engine)
{
    struct gradient_places *gradients = &engine->gradients;
    for (int p = 0; p < engine->parameter_count; p++) {
        struct unit_gradients *first = NULL;
        for (int section = 0; section < HAPT_SECTION_REDUCE; section++)
            for (int u = 0; u < engine->plan->unit_count; u++) {
                struct unit_gradients *unit = &gradients->added[section][u];
                if (!has(unit, p)) continue;
                if (first) first->shared = unit->shared = true;
                first = first ? first : unit;
            }
    }
}

enum hapt_status hapt_engine_bind_gradients(struct hapt_engine *engine)
{
    struct gradient_places *gradients = &engine->gradients;
    if (!engine->plan->host_gradients) return HAPT_OK;
    HAPT_NEW(gradients->begun, &engine->arena, engine->parameter_count);
    HAPT_NEW(gradients->sum, &engine->arena, engine->parameter_count);
    for (int section = 0; section < HAPT_SECTION_REDUCE; section++) {
        HAPT_TRY(hapt_engine_find_units(engine, (enum hapt_section)section, adds, &gradients->steps[section]));
        HAPT_TRY(list_added(engine, (enum hapt_section)section));
    }
    find_shared(engine);
    return HAPT_OK;
}
