/* Synthesis from end to end: the problem, the search at several prices of memory, the program and its proof. */
#include "hapt/env.h"
#include "synthesis_private.h"

/* ---- from decisions to instructions ---- */

/*
 * Instructions are in the order of execution; slices of replicated tensors are inserted at their first read.
 *
 * The versions of a tensor and their visibility. Versions of the forward part are visible to the operators of their
 * maker and of later forward operators. Backward versions of an activation, and slices of parameters, are visible to
 * the operators of one forward operator. After a border that converts the tensor, the forward part continues from the
 * version made at the border, as in the search. A version read there is made before its first reader, where that
 * reader's backward operators see it too.
 */
struct versions {
    layout_set made, local;
    int maker[MOST_LAYOUTS], local_unit; /* first forward operator that makes it */
    bool converted;                      /* at a border */
    layout_set since, waiting;           /* made after the last such border; made at it and not read so far */
};

struct emission {
    const struct problem *problem;
    const struct chosen *chosen;
    struct hapt_axis_program *program;
    int capacity;
    struct versions *made; /* [tensor] */
    int unit;              /* forward operator of the current step */
    bool backward;
    int *written;   /* [object] layout in which a parameter's gradient was written + 1 */
    int *border_of; /* [step] first border communication after it */
    struct hapt_arena *arena;
};

static enum hapt_status put(struct emission *emission, struct hapt_axis_instruction instruction)
{
    struct hapt_axis_program *program = emission->program;
    MAKE_ROOM(program->instruction, program->count, emission->capacity, 256, emission->arena);
    program->instruction[program->count++] = instruction;
    return HAPT_OK;
}

static layout_set seen(struct emission *emission, int tensor)
{
    struct versions *versions = &emission->made[tensor];
    const enum hapt_tensor_kind kind = emission->problem->graph->tensor[tensor].kind;
    layout_set set = versions->made;
    if (kind == HAPT_TENSOR_GRADIENT) return set;
    if (versions->converted && !emission->backward) return versions->since | versions->waiting;
    if (versions->local_unit != emission->unit) versions->local = 0;
    for (int l = 0; l < MOST_LAYOUTS; l++)
        if (versions->maker[l] > emission->unit) set &= (layout_set) ~(1u << l);
    return set | versions->local | versions->waiting;
}

static void note_version(struct emission *emission, int tensor, int layout)
{
    struct versions *versions = &emission->made[tensor];
    const enum hapt_tensor_kind kind = emission->problem->graph->tensor[tensor].kind;
    if (kind == HAPT_TENSOR_GRADIENT || (kind == HAPT_TENSOR_ACTIVATION && !emission->backward)) {
        if (!(versions->made >> layout & 1u)) versions->maker[layout] = emission->unit;
        versions->made |= (layout_set)(1u << layout);
        versions->since |= (layout_set)(1u << layout);
        return;
    }
    if (versions->local_unit != emission->unit) versions->local = 0;
    versions->local_unit = emission->unit;
    versions->local |= (layout_set)(1u << layout);
}

static void set_version(struct emission *emission, int tensor, int layout)
{
    emission->made[tensor] = (struct versions){.made = (layout_set)(1u << layout), .local_unit = -1};
    emission->made[tensor].maker[layout] =
        emission->problem->graph->tensor[tensor].kind == HAPT_TENSOR_PARAMETER ? 0 : emission->unit;
}

static enum hapt_status put_collective(struct emission *emission, int tensor, int from, int to)
{
    const struct layouts *layouts = emission->problem->layouts[tensor];
    return put(emission, (struct hapt_axis_instruction){.op = -1,
                                                        .tensor = tensor,
                                                        .kind = layouts->convert_kind[from][to],
                                                        .from = layouts->property[from],
                                                        .to = layouts->property[to]});
}

static enum hapt_status put_conversion(struct emission *emission, int tensor, int from, int to)
{
    note_version(emission, tensor, to);
    return put_collective(emission, tensor, from, to);
}

static void read_version(struct emission *emission, int tensor, int layout)
{
    struct versions *versions = &emission->made[tensor];
    if (!(versions->waiting >> layout & 1u)) return;
    versions->waiting &= (layout_set) ~(1u << layout);
    note_version(emission, tensor, layout);
}

/* Ensures that a version exists if the replicated tensor does. */
static enum hapt_status put_slice(struct emission *emission, int tensor, int layout)
{
    const layout_set set = seen(emission, tensor);
    read_version(emission, tensor, layout);
    if (set >> layout & 1u) return HAPT_OK;
    if (!(set >> REPLICATED & 1u))
        return hapt_fail(HAPT_ERR_INTERNAL, NULL, "synthesis lost a version of %s",
                         emission->problem->graph->tensor[tensor].name);
    read_version(emission, tensor, REPLICATED);
    return put_conversion(emission, tensor, REPLICATED, layout);
}

static enum hapt_status put_converted(struct emission *emission, int tensor, int from, int to)
{
    const bool there = seen(emission, tensor) >> to & 1u; /* a segment's end may have made it already */
    HAPT_TRY(put_slice(emission, tensor, there ? to : from));
    return there ? HAPT_OK : put_conversion(emission, tensor, from, to);
}

/* Communications after the operator: an output is converted from the layout it is made in to the wanted one. */
static enum hapt_status put_after(struct emission *emission, const struct step *step, const struct decision *decision)
{
    for (int m = 0; m < decision->conversion_count; m++) {
        const struct conversion *conversion = &decision->conversion[m];
        const int o = conversion->operand - OPERANDS;
        if (o < 0) continue;
        const int tensor = emission->problem->object[step->output[o % HAPT_MAX_OUTPUTS]].tensor;
        HAPT_TRY(put_conversion(emission, tensor, conversion->from, conversion->to));
        if (o < HAPT_MAX_OUTPUTS)
            set_version(emission, tensor, conversion->to); /* the partial sums are not read again */
    }
    return HAPT_OK;
}

static enum hapt_status put_step(struct emission *emission, int index)
{
    const struct problem *problem = emission->problem;
    const struct step *step = &problem->step[index];
    const struct decision *decision = &emission->chosen->decision[index];
    const struct choice *choice = &step->choice[decision->choice];
    int output_layout[HAPT_MAX_OUTPUTS];
    emission->unit = problem->graph->op[step->op].forward_op;
    emission->backward = step->backward;
    for (int o = 0; o < HAPT_MAX_OUTPUTS; o++) output_layout[o] = choice->output[o];
    for (int m = 0; m < decision->conversion_count; m++) {
        const struct conversion *conversion = &decision->conversion[m];
        if (conversion->operand >= OPERANDS) {
            if (conversion->operand < ALL_OPERANDS) output_layout[conversion->operand - OPERANDS] = conversion->to;
            continue;
        }
        const int tensor = problem->object[object_at(step, conversion->operand)].tensor;
        HAPT_TRY(put_converted(emission, tensor, conversion->from, conversion->to));
    }
    for (int i = 0; i < HAPT_MAX_INPUTS; i++) {
        if (step->input[i] < 0) continue;
        const struct object *object = &problem->object[step->input[i]];
        if (object->kind == OBJECT_PARAMETER && !emission->made[object->tensor].made)
            set_version(emission, object->tensor, choice->input[i]);
        HAPT_TRY(put_slice(emission, object->tensor, choice->input[i]));
    }
    for (int o = 0; o < HAPT_MAX_OUTPUTS; o++) {
        if (step->output[o] < 0) continue;
        const struct object *object = &problem->object[step->output[o]];
        if (step->previous[o] >= 0) HAPT_TRY(put_slice(emission, object->tensor, output_layout[o]));
        if (object->kind == OBJECT_PARAMETER_GRADIENT) emission->written[step->output[o]] = choice->output[o] + 1;
        set_version(emission, object->tensor, choice->output[o]);
    }
    HAPT_TRY(put(emission, (struct hapt_axis_instruction){.op = step->op, .cut = choice->rule->cut, .tensor = -1}));
    return put_after(emission, step, decision);
}

/* Border communications after a step: of activations in the forward part, of gradients in the backward part. */
static enum hapt_status put_borders(struct emission *emission, int step, bool backward)
{
    const struct chosen *chosen = emission->chosen;
    for (int b = emission->border_of[step]; b < chosen->border_count && chosen->border[b].step == step; b++) {
        const struct object *object = &emission->problem->object[chosen->border[b].object];
        if ((object->kind == OBJECT_GRADIENT) != backward) continue;
        struct versions *versions = &emission->made[object->tensor];
        const int from = chosen->border[b].from, to = chosen->border[b].to;
        if (backward) HAPT_TRY(put_converted(emission, object->tensor, from, to));
        if (backward || seen(emission, object->tensor) >> to & 1u) continue;
        if (!(versions->waiting >> from & 1u)) HAPT_TRY(put_slice(emission, object->tensor, from));
        HAPT_TRY(put_collective(emission, object->tensor, from, to));
        versions->converted = true;
        versions->since = 0;
        versions->waiting = (layout_set)(1u << to);
    }
    return HAPT_OK;
}

/* ---- at the end of a step ---- */

static int layout_of_parameter(const struct emission *emission, int gradient)
{
    const struct problem *problem = emission->problem;
    return lowest_layout(emission->made[problem->object[problem->object[gradient].parameter].tensor].made);
}

/* An operator of an outer axis at the end of a step, with the conversions of its input. */
struct reduction {
    int object, position;
};

static enum hapt_status put_reduction(struct emission *emission, int index, const struct reduction *reduction)
{
    const struct problem *problem = emission->problem;
    const struct step *step = &problem->reduce[index];
    const int written = emission->written[reduction->object] - 1, k = reduction->position;
    struct ending_sequence sequence;
    hapt_ending_trace(problem, reduction->object, written, layout_of_parameter(emission, reduction->object), &sequence);
    if (sequence.arrive[k] != sequence.need[k])
        HAPT_TRY(put_conversion(emission, hapt_ending_tensor(problem, reduction->object, &sequence, k),
                                sequence.arrive[k], sequence.need[k]));
    return put(emission, (struct hapt_axis_instruction){
                             .op = step->op, .cut = step->choice[sequence.choice[k]].rule->cut, .tensor = -1});
}

/* All of them in order; then every gradient to its parameter's layout, once for all parts in one layout. */
static enum hapt_status put_end(struct emission *emission)
{
    const struct problem *problem = emission->problem;
    struct reduction *reduction;
    layout_set *ended; /* [tensor] */
    struct ending_sequence sequence;
    HAPT_NEW(reduction, problem->arena, problem->reduce_count);
    HAPT_NEW(ended, problem->arena, problem->graph->tensor_count);
    for (int r = 0; r < problem->reduce_count; r++) reduction[r].object = -1;
    for (int k = 0; k < problem->object_count; k++) {
        if (problem->object[k].kind != OBJECT_PARAMETER_GRADIENT || !emission->written[k]) continue;
        hapt_ending_trace(problem, k, emission->written[k] - 1, layout_of_parameter(emission, k), &sequence);
        for (int c = 0; c < sequence.length; c++) reduction[sequence.chain[c]] = (struct reduction){k, c};
    }
    for (int r = 0; r < problem->reduce_count; r++) {
        HAPT_ASSERT(reduction[r].object >= 0);
        HAPT_TRY(put_reduction(emission, r, &reduction[r]));
    }
    for (int k = 0; k < problem->object_count; k++) {
        if (problem->object[k].kind != OBJECT_PARAMETER_GRADIENT || !emission->written[k]) continue;
        const int layout = layout_of_parameter(emission, k);
        hapt_ending_trace(problem, k, emission->written[k] - 1, layout, &sequence);
        const int tensor = hapt_ending_tensor(problem, k, &sequence, sequence.length),
                  from = sequence.arrive[sequence.length];
        if (from != layout && !(ended[tensor] >> from & 1u)) HAPT_TRY(put_conversion(emission, tensor, from, layout));
        ended[tensor] |= (layout_set)(1u << from);
    }
    return HAPT_OK;
}

static enum hapt_status emit_program(const struct problem *problem, const struct chosen *chosen,
                                     struct hapt_arena *arena, struct hapt_axis_program *program)
{
    struct emission emission = {.problem = problem, .chosen = chosen, .program = program, .arena = arena};
    *program = (struct hapt_axis_program){0};
    HAPT_NEW(emission.made, problem->arena, problem->graph->tensor_count);
    HAPT_NEW(emission.written, problem->arena, problem->object_count);
    HAPT_NEW(emission.border_of, problem->arena, problem->step_count);
    for (int s = 0; s < problem->step_count; s++) emission.border_of[s] = chosen->border_count;
    for (int t = 0; t < problem->graph->tensor_count; t++) emission.made[t].local_unit = -1;
    for (int b = chosen->border_count - 1; b >= 0; b--) emission.border_of[chosen->border[b].step] = b;
    for (int s = 0; s < problem->step_count; s++) {
        if (!problem->step[s].backward) HAPT_TRY(put_step(&emission, s));
        HAPT_TRY(put_borders(&emission, s, false));
    }
    for (int s = problem->step_count - 1; s >= 0; s--) {
        HAPT_TRY(put_borders(&emission, s, true));
        if (problem->step[s].backward) HAPT_TRY(put_step(&emission, s));
    }
    return put_end(&emission);
}

/* ---- prices of memory ---- */

struct attempt {
    struct hapt_axis_program program;
    struct hapt_program_price price;
    double worst; /* memory of the fullest device, relative to its limit */
    int device;   /* the fullest device */
};

/* The fullest device: relative to its limit, without limits by bytes. */
static void find_fullest(const struct hapt_axis *axis, const struct hapt_synthesis_options *options,
                         struct attempt *attempt)
{
    attempt->worst = -1;
    for (int j = 0; j < axis->size; j++) {
        const double bytes = attempt->price.memory_bytes[j];
        const double part = options->memory_bytes ? bytes / options->memory_bytes[j] : bytes;
        if (part <= attempt->worst) continue;
        attempt->worst = part;
        attempt->device = j;
    }
}

/* Turns decisions into a program, checks it and prices it device by device. */
static enum hapt_status check_and_price(const struct problem *problem, const struct chosen *chosen,
                                        struct hapt_arena *arena, struct attempt *attempt)
{
    HAPT_TRY(emit_program(problem, chosen, arena, &attempt->program));
    HAPT_TRY(hapt_axis_program_price(problem->sharding, problem->axis_index, problem->axis, problem->costs,
                                     problem->options, &attempt->program, arena, &attempt->price));
    find_fullest(problem->axis, problem->options, attempt);
    return HAPT_OK;
}

static bool memory_is_priced(const struct problem *problem)
{
    for (int j = 0; j < problem->classes; j++)
        if (problem->multiplier[j] > 0) return true;
    return false;
}

static enum hapt_status try_prices(struct problem *problem, struct hapt_arena *arena, struct hapt_path_chain *chain,
                                   struct hapt_synthesis_report *report, struct attempt *attempt)
{
    struct chosen chosen = {0};
    double cost_s;
    HAPT_TRY(hapt_path_search(problem, problem->arena, chain, &chosen, &cost_s, report));
    HAPT_TRY(check_and_price(problem, &chosen, arena, attempt));
    /* The search may only overestimate: segments synchronise more often than the program, and memory has a price. */
    HAPT_ASSERT(memory_is_priced(problem) || attempt->price.cost_s <= cost_s * (1 + 1e-9) + 1e-12);
    return HAPT_OK;
}

static bool is_within(const struct problem *problem, const struct attempt *attempt)
{
    return !problem->options->memory_bytes || attempt->worst <= 1 + 1e-12;
}

/*
 * Lagrange multiplier for memory: on kinds of devices short of memory, bytes cost seconds. The price is raised until
 * the program fits. Then prices between the highest that does not fit and the lowest that fits are tried: the next one
 * makes both programs cost the same. Either a program is found that is cheaper there than both, or there is none.
 * Finally, the paths through every segment from all searches are joined into the cheapest program that fits. Every
 * program is checked exactly.
 */
struct prices {
    struct problem *problem;
    struct hapt_path_chain *chain;
    struct hapt_arena *arena;
    struct hapt_synthesis_report *report;
    bool scarce[MOST_CLASSES];
    double low_price, high_price;
    struct attempt low, high; /* does not fit; fits */
    bool found;
};

static void report_program(const struct problem *problem, const struct attempt *attempt)
{
    const struct hapt_synthesis_options *options = problem->options;
    if (options->found)
        options->found(options->found_context, &attempt->program, attempt->price.cost_s,
                       attempt->price.memory_bytes[attempt->device]);
}

static enum hapt_status try_price(struct prices *prices, double price, struct attempt *attempt)
{
    struct problem *problem = prices->problem;
    for (int j = 0; j < problem->classes; j++) problem->multiplier[j] = prices->scarce[j] ? price : 0;
    HAPT_TRY(try_prices(problem, prices->arena, prices->chain, prices->report, attempt));
    report_program(problem, attempt);
    if (is_within(problem, attempt)) {
        if (!prices->found || attempt->price.cost_s < prices->high.price.cost_s) prices->high = *attempt;
        prices->found = true;
        prices->high_price = price;
    } else {
        prices->low = *attempt;
        prices->low_price = price;
    }
    return HAPT_OK;
}

static double scarce_bytes(const struct prices *prices, const struct attempt *attempt)
{
    double bytes = 0;
    for (int j = 0; j < prices->problem->classes; j++)
        if (prices->scarce[j]) bytes += attempt->price.memory_bytes[prices->problem->representative[j]];
    return bytes;
}

/* Raises the price until a program fits or the memory no longer shrinks. */
static enum hapt_status raise_price(struct prices *prices, double first)
{
    enum { RAISES = 16, IDLE = 3 };
    double least = prices->low.worst;
    for (int round = 0, idle = 0; round < RAISES && !prices->found && idle < IDLE; round++) {
        struct attempt attempt;
        HAPT_TRY(try_price(prices, round == 0 ? first : 8 * prices->low_price, &attempt));
        if (prices->found) break;
        const int class = prices->problem->class_of[attempt.device];
        /* A price many times all other costs has saved all it can. */
        const bool saves =
            attempt.worst < least * (1 - 1e-9) || !prices->scarce[class] || prices->low_price < 16 * first;
        idle = saves ? 0 : idle + 1;
        least = fmin(least, attempt.worst);
        prices->scarce[class] = true;
    }
    return HAPT_OK;
}

static bool same_attempt(const struct attempt *a, const struct attempt *b)
{
    return fabs(a->price.cost_s - b->price.cost_s) <= 1e-12 * b->price.cost_s && a->worst == b->worst;
}

/* The cheapest program of all paths found within limits, by the search's count of memory (`bytes`). */
static enum hapt_status join_within(struct prices *prices, const double *limit, double *bytes, struct attempt *attempt,
                                    bool *found)
{
    const struct problem *problem = prices->problem;
    struct chosen chosen = {0};
    const enum hapt_status status = hapt_path_chain_search(prices->chain, limit, problem->arena, &chosen, bytes);
    *found = status == HAPT_OK;
    if (status == HAPT_ERR_INFEASIBLE) {
        hapt_fail_reset();
        return HAPT_OK;
    }
    HAPT_TRY(status);
    HAPT_TRY(check_and_price(problem, &chosen, prices->arena, attempt));
    report_program(problem, attempt);
    return HAPT_OK;
}

/* The search's memory differs from the program's if segments share kept tensors. Shift the limit by the difference
 * and join the paths again. */
static enum hapt_status join_paths(struct prices *prices)
{
    enum { TRIES = 4 };
    const struct problem *problem = prices->problem;
    double limit[MOST_CLASSES], bytes[MOST_CLASSES];
    for (int j = 0; j < problem->classes; j++) limit[j] = problem->options->memory_bytes[problem->representative[j]];
    for (int k = 0; k < TRIES; k++) {
        struct attempt attempt;
        bool found;
        HAPT_TRY(join_within(prices, limit, bytes, &attempt, &found));
        if (!found) return HAPT_OK;
        const bool within = is_within(problem, &attempt);
        if (within && (!prices->found || attempt.price.cost_s < prices->high.price.cost_s)) prices->high = attempt;
        prices->found = prices->found || within;
        if (within && attempt.worst > 0.995) break;
        for (int j = 0; j < problem->classes; j++) { /* by the fullest device of each kind */
            double most = 0;
            for (int device = 0; device < problem->axis->size; device++)
                if (problem->class_of[device] == j) most = fmax(most, attempt.price.memory_bytes[device]);
            const double allowed = problem->options->memory_bytes[problem->representative[j]] + bytes[j] - most;
            limit[j] = within ? fmax(limit[j], allowed) : fmin(allowed, 0.999 * limit[j]);
        }
    }
    return HAPT_OK;
}

/* Reports programs between the fastest and the one that fits, at limits between the memory of both. */
static enum hapt_status report_between(struct prices *prices, const struct attempt *fastest)
{
    enum { STEPS = 5 };
    const struct problem *problem = prices->problem;
    double limit[MOST_CLASSES], bytes[MOST_CLASSES];
    for (int k = 1; k < STEPS && fastest->worst > 1; k++) {
        struct attempt attempt;
        bool found;
        const double part = pow(fastest->worst, (double)k / STEPS); /* of the limit */
        for (int j = 0; j < problem->classes; j++)
            limit[j] = part * problem->options->memory_bytes[problem->representative[j]];
        HAPT_TRY(join_within(prices, limit, bytes, &attempt, &found));
    }
    return HAPT_OK;
}

static enum hapt_status search_prices(struct problem *problem, struct hapt_arena *arena,
                                      struct hapt_synthesis_report *report, struct attempt *best)
{
    enum { MOST_BETWEEN = 3 };
    const int between = problem->options->most_prices > 0 ? problem->options->most_prices : MOST_BETWEEN;
    struct prices prices = {.problem = problem, .arena = arena, .report = report, .low = *best};
    double unit = best->price.cost_s / problem->options->memory_bytes[best->device];
    if (!(unit > 0)) unit = 1e-12;
    prices.scarce[problem->class_of[best->device]] = true;
    problem->counts_memory = true;
    HAPT_TRY(hapt_path_chain_create(problem, problem->arena, &prices.chain));
    HAPT_TRY(raise_price(&prices, unit));
    for (int round = 0; prices.found && round < between; round++) {
        const struct attempt low = prices.low, high = prices.high;
        const double more = scarce_bytes(&prices, &low) - scarce_bytes(&prices, &high);
        double price = more > 0 ? (high.price.cost_s - low.price.cost_s) / more : -1;
        struct attempt attempt;
        /* Prices differ by device and searches are truncated, so the computed price may lie outside the interval. */
        if (!(price > prices.low_price && price < prices.high_price))
            price = (prices.low_price + prices.high_price) / 2;
        HAPT_TRY(try_price(&prices, price, &attempt));
        prices.scarce[problem->class_of[attempt.device]] =
            prices.scarce[problem->class_of[attempt.device]] || !is_within(problem, &attempt);
        if (same_attempt(&attempt, &low) || same_attempt(&attempt, &high)) break;
    }
    HAPT_TRY(join_paths(&prices));
    if (problem->options->found) HAPT_TRY(report_between(&prices, best));
    *best = prices.high;
    if (prices.found) return HAPT_OK;
    return hapt_fail(HAPT_ERR_INFEASIBLE, "use more devices, a smaller microbatch or more stages",
                     "no program was found whose weights, gradients and activations fit the memory of %d devices",
                     problem->axis->size);
}

static enum hapt_status check_arguments(const struct hapt_axis *axis, const struct hapt_synthesis_options *options)
{
    if (axis->size < 1 || (axis->ratio && axis->ratio_count < 1))
        return hapt_fail(HAPT_ERR_INPUT, NULL,
                         "an axis needs at least one device and, with ratios, at least one ratio vector");
    for (int j = 0; options->memory_bytes && j < axis->size; j++)
        if (!(options->memory_bytes[j] > 0))
            return hapt_fail(HAPT_ERR_INPUT, NULL, "the memory limit of device %d is not positive", j);
    return HAPT_OK;
}

static void fill_report(const struct problem *problem, const struct attempt *attempt,
                        struct hapt_synthesis_report *report)
{
    report->cost_s = attempt->price.cost_s;
    report->compute_s = attempt->price.compute_s;
    report->communicate_s = attempt->price.communicate_s;
    report->end_s = attempt->price.end_s;
    report->stages = attempt->price.stages;
    report->memory_bytes = attempt->price.memory_bytes[attempt->device];
    if (report->because[0] != '\0') return;
    if (problem->merged)
        report->because = "there are too many kinds of devices, so different ones were treated as equal";
    else if (problem->crowded)
        report->because = "a tensor has more layouts than the search distinguishes";
    else if (memory_is_priced(problem))
        report->because = "the memory limit was enforced by a price on memory";
    else if (report->segments > 1)
        report->because = "a tensor crosses between segments in one layout only";
    else if (problem->joins_parts)
        report->because = "parts of one gradient are brought to their parameter's layout one by one";
    else if (problem->memory_resource && problem->reduce_count > 0)
        report->because = "sums of gradients over the outer axis end as fast as possible, whatever memory that takes";
    else if (!problem->options->exact)
        report->because = "versions of gradients are made right after their writers";
    else
        report->optimal = true;
}

static enum hapt_status synthesise(const struct hapt_sharding *sharding, int axis_index, const struct hapt_axis *axis,
                                   const struct hapt_spmd_costs *costs, const struct hapt_synthesis_options *options,
                                   struct hapt_arena *scratch, struct hapt_arena *arena, struct attempt *best,
                                   struct hapt_synthesis_report *report)
{
    struct problem problem;
    HAPT_TRY(check_arguments(axis, options));
    HAPT_TRY(hapt_problem_build(sharding, axis_index, axis, costs, options, scratch, &problem));
    HAPT_TRY(try_prices(&problem, arena, NULL, report, best));
    report_program(&problem, best);
    if (!is_within(&problem, best)) HAPT_TRY(search_prices(&problem, arena, report, best));
    fill_report(&problem, best, report);
    return HAPT_OK;
}

enum hapt_status hapt_synthesise(const struct hapt_sharding *sharding, int axis_index, const struct hapt_axis *axis,
                                 const struct hapt_spmd_costs *costs, const struct hapt_synthesis_options *options,
                                 struct hapt_arena *arena, struct hapt_axis_program *program,
                                 struct hapt_synthesis_report *report)
{
    struct hapt_arena scratch;
    struct hapt_synthesis_report made = {.because = ""};
    struct attempt best = {.device = 0};
    const double start_s = hapt_time_s();
    hapt_arena_init(&scratch);
    const enum hapt_status status =
        synthesise(sharding, axis_index, axis, costs, options, &scratch, arena, &best, &made);
    hapt_arena_release(&scratch);
    HAPT_TRY(status);
    made.seconds = hapt_time_s() - start_s;
    *program = best.program;
    if (report) *report = made;
    return HAPT_OK;
}
