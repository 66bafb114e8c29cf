/* Small graphs with random costs, and the exhaustive search of their programs, for the tests of synthesis. */
#ifndef HAPT_TEST_SYNTHESIS_RANDOM_H
#define HAPT_TEST_SYNTHESIS_RANDOM_H

#include "hapt/ratios.h"
#include "hapt/sharding.h"
#include "hapt/synthesis.h"
#include "test.h"

#include "hapt/rules.h"

/* ---- an instance ---- */

enum { RANDOM_DEVICES = 4 };
struct random_instance {
    struct hapt_graph *graph;
    struct hapt_sharding *whole; /* its trivial sharding, */
    int axis_index;              /* or one with an outer axis, and its expanded graph */
    struct hapt_axis axis;
    struct hapt_spmd_costs costs;
    struct hapt_synthesis_options options;
    double ratio[RANDOM_DEVICES], slowness[RANDOM_DEVICES], alpha[HAPT_COLLECTIVE_COUNT], beta[HAPT_COLLECTIVE_COUNT];
    double scale_s; /* seconds of communication */
    int kind[RANDOM_DEVICES];
    uint64_t seed;
};

static double random_compute_s(const void *context, const struct hapt_spmd_work *work, int device)
{
    const struct random_instance *instance = context;
    const int64_t key[] = {(int64_t)instance->seed, work->op, work->cut.letter};
    uint64_t random = hapt_hash(1, key, sizeof key);
    const double whole = 0.2 + hapt_random_unit(&random);
    return (0.02 + whole * work->share) * instance->slowness[device];
}

static double random_collective_s(const void *context, enum hapt_collective_kind kind, double bytes,
                                  double largest_share)
{
    const struct random_instance *instance = context;
    return instance->scale_s * (instance->alpha[kind] + instance->beta[kind] * bytes / 1000 * largest_share);
}

/* A chain with skips on [rows][T][d]: linear, linear_t, gelu, add, copy, layer norm, then a loss. `ops` includes the
 * loss. */
__attribute__((unused)) static struct hapt_graph *random_graph(struct hapt_arena *arena, uint64_t *random, int ops)
{
    struct hapt_graph *graph = NULL;
    const int64_t rows = 2 + (int64_t)(hapt_random_next(random) % 3),
                  length = 1 + (int64_t)(hapt_random_next(random) % 5);
    int value[16], count = 0, targets, output[HAPT_MAX_OUTPUTS];
    char name[32];
    CHECK_OK(hapt_graph_create(arena, &graph));
    struct hapt_tensor x = {.name = "x",
                            .kind = HAPT_TENSOR_INPUT,
                            .dtype = HAPT_F32,
                            .dims = 3,
                            .shape = {rows, length, 2 + (int64_t)(hapt_random_next(random) % 7)},
                            .producer = -1,
                            .gradient = -1,
                            .primal = -1};
    struct hapt_tensor y = {.name = "y",
                            .kind = HAPT_TENSOR_INPUT,
                            .role = HAPT_ROLE_TARGETS,
                            .dtype = HAPT_I32,
                            .dims = 2,
                            .shape = {rows, length},
                            .producer = -1,
                            .gradient = -1,
                            .primal = -1};
    CHECK_OK(hapt_graph_add_tensor(graph, &x, &value[count++]));
    CHECK_OK(hapt_graph_add_tensor(graph, &y, &targets));
    for (int k = 0; k + 1 < ops; k++) {
        const int from =
            value[hapt_random_next(random) % 3 || k + 2 == ops ? count - 1
                                                               : (int)(hapt_random_next(random) % (uint64_t)count)];
        const int64_t d = graph->tensor[from].shape[2], wide = 2 + (int64_t)(hapt_random_next(random) % 7);
        int other = value[hapt_random_next(random) % (uint64_t)count], input[3] = {from, -1, -1};
        double epsilon[HAPT_MAX_ATTRIBUTES] = {1e-5};
        struct hapt_tensor weight = {.kind = HAPT_TENSOR_PARAMETER,
                                     .dtype = HAPT_F32,
                                     .dims = 2,
                                     .trainable = true,
                                     .producer = -1,
                                     .gradient = -1,
                                     .primal = -1};
        const char *type = (const char *[]){"linear", "linear_t", "gelu", "add", "copy", "layer_norm"}
            [k == 0 || k + 2 == ops ? hapt_random_next(random) % 2 : hapt_random_next(random) % 6];
        const bool fits = other != from && graph->tensor[other].shape[2] == d;
        if (!strcmp(type, "add") && !fits) type = "linear";
        snprintf(name, sizeof name, "w%d", k);
        weight.name = name;
        int inputs = 1;
        if (!strncmp(type, "linear", 6)) {
            const bool turned = type[6] != '\0';
            weight.shape[0] = turned ? wide : d;
            weight.shape[1] = turned ? d : wide;
            CHECK_OK(hapt_graph_add_tensor(graph, &weight, &input[1]));
            inputs = 3;
            if (hapt_random_next(random) % 2) {
                snprintf(name, sizeof name, "b%d", k);
                weight.dims = 1;
                weight.shape[0] = wide;
                CHECK_OK(hapt_graph_add_tensor(graph, &weight, &input[2]));
            }
        } else if (!strcmp(type, "layer_norm")) {
            weight.dims = 1;
            weight.shape[0] = d;
            CHECK_OK(hapt_graph_add_tensor(graph, &weight, &input[1]));
            snprintf(name, sizeof name, "b%d", k);
            CHECK_OK(hapt_graph_add_tensor(graph, &weight, &input[2]));
            inputs = 3;
        } else if (!strcmp(type, "add")) {
            input[1] = other;
            inputs = 2;
        }
        snprintf(name, sizeof name, "%s%d", type, k);
        CHECK_OK(hapt_graph_add_op(graph, type, name, input, inputs, NULL, epsilon, output));
        value[count++] = output[0];
    }
    const int loss[] = {value[count - 1], targets};
    CHECK_OK(hapt_graph_add_op(graph, "cross_entropy", "loss", loss, 2, NULL, NULL, output));
    graph->loss = output[0];
    CHECK_OK(hapt_graph_differentiate(graph));
    return graph;
}

__attribute__((unused)) static void random_instance(struct random_instance *instance, struct hapt_arena *arena,
                                                    uint64_t seed, int least_ops, int most_ops)
{
    uint64_t random = seed;
    *instance = (struct random_instance){.seed = seed};
    instance->graph = random_graph(arena, &random,
                                   least_ops + (int)(hapt_random_next(&random) % (uint64_t)(most_ops - least_ops + 1)));
    CHECK_OK(hapt_sharding_trivial(instance->graph, arena, &instance->whole));
    instance->axis.size = 2 + (int)(hapt_random_next(&random) % 3);
    instance->axis.ratio_count = 1;
    const int kinds = 1 + (int)(hapt_random_next(&random) % 3);
    for (int j = 0; j < instance->axis.size; j++) {
        instance->kind[j] = (int)(hapt_random_next(&random) % (uint64_t)kinds);
        instance->slowness[j] = 1 + instance->kind[j];
        instance->ratio[j] = 1.0 / (1 + (double)(hapt_random_next(&random) % 3));
    }
    if (hapt_random_next(&random) % 2) instance->axis.ratio = instance->ratio;
    for (int k = 0; k < HAPT_COLLECTIVE_COUNT; k++) {
        instance->alpha[k] = hapt_random_unit(&random);
        instance->beta[k] = hapt_random_unit(&random);
    }
    instance->scale_s = 0.01 * pow(100, hapt_random_unit(&random));
    instance->costs = (struct hapt_spmd_costs){.context = instance,
                                               .kind = instance->kind,
                                               .compute_s = random_compute_s,
                                               .collective_s = random_collective_s};
    instance->options = (struct hapt_synthesis_options){.exact = true,
                                                        .microbatches = 1 + (int)(hapt_random_next(&random) % 4),
                                                        .in_flight = 1 + (int)(hapt_random_next(&random) % 3)};
}

/* ---- every program ---- */

/*
 * A depth-first search over the operators in the order of execution. It tries every cut, and every source and target of
 * every collective. Only a bound prunes it. Layouts of a tensor: 0 whole, 1 partial sums, 2 + d sharded on d. Operators
 * behind reduce_first end a step on an outer axis: they cost 1/B, and each reads its gradient in one layout.
 */
enum { BRUTE_TENSORS = 96, BRUTE_OPS = 72, BRUTE_CUTS = 8, BRUTE_LAYOUTS = 2 + HAPT_MAX_DIMS };
struct brute_cut {
    struct hapt_rule rule;
    int input[HAPT_MAX_INPUTS], output[HAPT_MAX_OUTPUTS];
    double seconds[RANDOM_DEVICES];
};
struct brute {
    const struct random_instance *instance;
    const struct hapt_graph *graph;
    int size, cut_count[BRUTE_OPS];
    struct brute_cut cut[BRUTE_OPS][BRUTE_CUTS];
    double rest[BRUTE_OPS + 1][RANDOM_DEVICES];
    double share[BRUTE_TENSORS][BRUTE_LAYOUTS][RANDOM_DEVICES];
    double best;
    long nodes, most_nodes;
    /* Called with each complete program, for callers that want all of them. */
    void (*found)(void *context, const struct hapt_axis_program *program);
    void *context;
    struct hapt_axis_program trace;
    struct brute_program {                       /* so far */
        unsigned made[BRUTE_TENSORS];            /* layouts of an activation: those the forward part made, */
        int maker[BRUTE_TENSORS][BRUTE_LAYOUTS]; /* for the operators of this forward operator and later ones, */
        unsigned local[BRUTE_TENSORS];           /* those the backward part made, for the operators of local_of only, */
        int local_of[BRUTE_TENSORS];
        unsigned kept[BRUTE_TENSORS]; /* those of the forward part that the backward part reads */
        int layout[BRUTE_TENSORS];    /* layout of parameters + 1; layout of a parameter's gradient + 1 */
        int landed[HAPT_MAX_OUTPUTS]; /* the end of the outputs of the current operator */
        double since[RANDOM_DEVICES], cost;
    } now;
};

static bool brute_is_sum(const struct hapt_graph *graph, int tensor)
{
    return graph->tensor[tensor].kind == HAPT_TENSOR_GRADIENT &&
           graph->tensor[graph->tensor[tensor].primal].kind == HAPT_TENSOR_PARAMETER;
}

static int brute_layout(struct hapt_property property)
{
    return property.kind == HAPT_PROPERTY_REPLICATED ? 0
           : property.kind == HAPT_PROPERTY_PARTIAL  ? 1
                                                     : 2 + property.dim;
}

static double brute_largest(const struct brute *brute, int tensor, int layout)
{
    double most = 0;
    for (int j = 0; j < brute->size; j++) most = fmax(most, brute->share[tensor][layout][j]);
    return most;
}

static double brute_collective_s(const struct brute *brute, enum hapt_collective_kind kind, double bytes,
                                 double largest_share)
{
    return brute->instance->costs.collective_s(brute->instance->costs.context, kind, bytes, largest_share);
}

static double brute_bytes(const struct brute *brute, int tensor)
{
    const struct hapt_spmd_costs *costs = &brute->instance->costs;
    return costs->tensor_bytes ? costs->tensor_bytes(costs->context, brute->graph, tensor)
                               : (double)hapt_tensor_bytes(&brute->graph->tensor[tensor]);
}

/* The collective from one layout to another; NONE: there is none. */
static enum hapt_collective_kind brute_kind(int from, int to)
{
    if (to == 1 || from == to) return HAPT_COLLECTIVE_NONE;
    if (from == 0) return HAPT_COLLECTIVE_SLICE;
    if (from == 1) return to == 0 ? HAPT_COLLECTIVE_ALL_REDUCE : HAPT_COLLECTIVE_REDUCE_SCATTER;
    return to == 0 ? HAPT_COLLECTIVE_ALL_GATHER : HAPT_COLLECTIVE_ALL_TO_ALL;
}

static double brute_move_s(const struct brute *brute, int tensor, int from, int to)
{
    const double bytes = brute_bytes(brute, tensor);
    const double a = brute_largest(brute, tensor, from), b = brute_largest(brute, tensor, to);
    if (to == 1 || from == to) return INFINITY;
    if (from == 0) return 0;
    if (from == 1)
        return brute_collective_s(brute, to == 0 ? HAPT_COLLECTIVE_ALL_REDUCE : HAPT_COLLECTIVE_REDUCE_SCATTER, bytes,
                                  b);
    if (to > 1) return brute_collective_s(brute, HAPT_COLLECTIVE_ALL_TO_ALL, bytes, fmax(a, b));
    return fmin(brute_collective_s(brute, HAPT_COLLECTIVE_ALL_GATHER, bytes, a),
                brute_collective_s(brute, HAPT_COLLECTIVE_GROUPED_BROADCAST, bytes, a));
}

static void brute_op(struct brute *brute, int op);

enum { BRUTE_INSTRUCTIONS = 256 };

static struct hapt_property brute_property(int layout)
{
    if (layout < 2)
        return (struct hapt_property){.kind = layout == 0 ? HAPT_PROPERTY_REPLICATED : HAPT_PROPERTY_PARTIAL};
    return (struct hapt_property){.kind = HAPT_PROPERTY_SHARDED, .dim = layout - 2};
}

static void brute_note(struct brute *brute, struct hapt_axis_instruction instruction)
{
    if (!brute->found) return;
    HAPT_ASSERT(brute->trace.count < BRUTE_INSTRUCTIONS);
    brute->trace.instruction[brute->trace.count++] = instruction;
}

static void brute_note_move(struct brute *brute, int tensor, int from, int to)
{
    brute_note(brute, (struct hapt_axis_instruction){.op = -1,
                                                     .tensor = tensor,
                                                     .kind = brute_kind(from, to),
                                                     .from = brute_property(from),
                                                     .to = brute_property(to)});
}

/* The memory of a complete program, if there is a limit. */
static bool brute_fits(const struct brute *brute)
{
    const struct hapt_synthesis_options *options = &brute->instance->options;
    double bytes[RANDOM_DEVICES] = {0};
    for (int t = 0; t < brute->graph->tensor_count; t++) {
        const double whole = (double)hapt_tensor_bytes(&brute->graph->tensor[t]);
        const bool parameter = brute->graph->tensor[t].kind == HAPT_TENSOR_PARAMETER,
                   sum = brute_is_sum(brute->graph, t);
        const int copies = brute->graph->tensor[t].trainable ? 1 + 8 / 4 : 1; /* itself, and two moments */
        for (int j = 0; j < brute->size; j++) {
            if (parameter && brute->now.layout[t])
                bytes[j] += whole * copies * brute->share[t][brute->now.layout[t] - 1][j];
            if (sum) {
                const int wrote = brute->now.layout[t] - 1,
                          final = brute->now.layout[brute->graph->tensor[t].primal] - 1;
                bytes[j] += whole * brute->share[t][wrote][j];
                if (wrote != final && !(wrote == 1 && final == 0)) bytes[j] += whole * brute->share[t][final][j];
            }
            for (int l = 0; !sum && !parameter && l < 2 + HAPT_MAX_DIMS; l++)
                if (brute->now.kept[t] >> l & 1u) bytes[j] += whole * options->in_flight * brute->share[t][l][j];
        }
    }
    for (int j = 0; options->memory_bytes && j < brute->size; j++)
        if (bytes[j] > options->memory_bytes[j] * (1 + 1e-12)) return false;
    return true;
}

static void brute_end(struct brute *brute)
{
    double cost = brute->now.cost, slowest = 0;
    const int traced = brute->trace.count;
    for (int j = 0; j < brute->size; j++) slowest = fmax(slowest, brute->now.since[j]);
    cost += slowest;
    for (int t = 0; t < brute->graph->tensor_count; t++) {
        if (!brute_is_sum(brute->graph, t) || brute->graph->tensor[brute->graph->tensor[t].primal].gradient != t)
            continue;
        const int wrote = brute->now.layout[t] - 1, final = brute->now.layout[brute->graph->tensor[t].primal] - 1;
        if (wrote < 0 || wrote == final) continue;
        cost += brute_move_s(brute, t, wrote, final) / brute->instance->options.microbatches;
        brute_note_move(brute, t, wrote, final);
    }
    if (brute->found) { /* all layouts */
        if (isfinite(cost)) brute->found(brute->context, &brute->trace);
    } else if (cost < brute->best && brute_fits(brute)) {
        brute->best = cost;
    }
    brute->trace.count = traced;
}

static void brute_synchronise(struct brute *brute, double seconds)
{
    double slowest = 0;
    for (int j = 0; j < brute->size; j++) slowest = fmax(slowest, brute->now.since[j]);
    memset(brute->now.since, 0, sizeof brute->now.since);
    brute->now.cost += slowest + seconds;
}

/* Runs the operator. Its inputs are present. */
static void brute_run(struct brute *brute, int index, const struct brute_cut *cut)
{
    const struct hapt_op *op = &brute->graph->op[index];
    const struct brute_program saved = brute->now;
    struct brute_program *now = &brute->now;
    bool fits = true;
    if (cut->rule.exchange) {
        const int last = op->output[op->output_count - 1]; /* exchanged in fp32 */
        const double bytes = brute_bytes(brute, last) * 4 / (double)hapt_dtype_bytes(brute->graph->tensor[last].dtype);
        brute_synchronise(brute, hapt_op_type_at(op->type)->inner_all_reduces *
                                     brute_collective_s(brute, HAPT_COLLECTIVE_ALL_REDUCE, bytes, 1));
    }
    const bool ends = index >= brute->instance->whole->reduce_first;
    const int traced = brute->trace.count;
    double slowest = 0;
    brute_note(brute, (struct hapt_axis_instruction){.op = index, .cut = cut->rule.cut, .tensor = -1});
    for (int j = 0; j < brute->size; j++) slowest = fmax(slowest, cut->seconds[j]);
    for (int j = 0; j < brute->size && !ends; j++) now->since[j] += cut->seconds[j];
    if (ends) now->cost += slowest / brute->instance->options.microbatches;
    for (int o = 0; o < op->output_count && fits; o++) {
        const int t = op->output[o], landed = now->landed[o];
        if (brute_is_sum(brute->graph, t)) {
            fits = now->layout[t] == 0 || now->layout[t] == cut->output[o] + 1;
            now->layout[t] = cut->output[o] + 1;
            continue;
        }
        if (landed != cut->output[o]) brute_note_move(brute, t, cut->output[o], landed);
        if (landed != cut->output[o] && cut->output[o] != 0)
            brute_synchronise(brute, brute_move_s(brute, t, cut->output[o], landed));
        now->made[t] = 1u << landed;
        now->maker[t][landed] = op->forward_op;
    }
    if (fits) brute_op(brute, index + 1);
    brute->trace.count = traced;
    brute->now = saved;
}

static unsigned brute_seen(const struct brute *brute, int tensor, int index)
{
    const struct brute_program *now = &brute->now;
    const int unit = brute->graph->op[index].forward_op;
    unsigned seen = 0;
    if (brute->graph->tensor[tensor].kind != HAPT_TENSOR_ACTIVATION || index < brute->graph->forward_count)
        return now->made[tensor];
    for (int l = 0; l < BRUTE_LAYOUTS; l++)
        if (now->made[tensor] >> l & 1u && now->maker[tensor][l] <= unit) seen |= 1u << l;
    return seen | (now->local_of[tensor] == unit + 1 ? now->local[tensor] : 0);
}

static void brute_add(struct brute *brute, int tensor, int index, int layout)
{
    struct brute_program *now = &brute->now;
    const int unit = brute->graph->op[index].forward_op;
    if (brute->graph->tensor[tensor].kind == HAPT_TENSOR_ACTIVATION && index >= brute->graph->forward_count) {
        if (now->local_of[tensor] != unit + 1) now->local[tensor] = 0;
        now->local_of[tensor] = unit + 1;
        now->local[tensor] |= 1u << layout;
    } else if (!(now->made[tensor] >> layout & 1u)) {
        now->made[tensor] |= 1u << layout;
        now->maker[tensor][layout] = unit;
    }
}

static void brute_need(struct brute *brute, int index, const struct brute_cut *cut, int operand);

/* The backward part reads a layout of an activation. The forward part's layout must be kept for it. */
static void brute_keep(struct brute *brute, int tensor, int index, int layout)
{
    const struct brute_program *now = &brute->now;
    const bool activation = brute->graph->tensor[tensor].kind == HAPT_TENSOR_ACTIVATION;
    if (!activation || index < brute->graph->forward_count) return;
    if (now->made[tensor] >> layout & 1u && now->maker[tensor][layout] <= brute->graph->op[index].forward_op)
        brute->now.kept[tensor] |= 1u << layout;
}

static void brute_move(struct brute *brute, int index, const struct brute_cut *cut, int operand, int tensor, int from,
                       int to, int need)
{
    const struct brute_program saved = brute->now;
    const double seconds = brute_move_s(brute, tensor, from, to);
    if (!isfinite(seconds)) return;
    const int traced = brute->trace.count;
    if (from != 0) brute_synchronise(brute, seconds); /* a slice needs no communication */
    brute_note_move(brute, tensor, from, to);
    if (to != need) brute_note_move(brute, tensor, to, need);
    brute_keep(brute, tensor, index, from);
    brute_add(brute, tensor, index, to);
    brute_add(brute, tensor, index, need);
    brute_need(brute, index, cut, operand);
    brute->trace.count = traced;
    brute->now = saved;
}

/* Makes a layout that is needed in every possible way, unless it exists. */
static void brute_get(struct brute *brute, int index, const struct brute_cut *cut, int operand, int tensor, int need)
{
    const unsigned seen = brute_seen(brute, tensor, index);
    if (seen >> need & 1u) {
        const unsigned kept = brute->now.kept[tensor];
        brute_keep(brute, tensor, index, need);
        brute_need(brute, index, cut, operand + 1);
        brute->now.kept[tensor] = kept;
        return;
    }
    if (seen & 1u) {
        if (need > 1) brute_move(brute, index, cut, operand + 1, tensor, 0, need, need);
        return;
    }
    for (int from = 2; need != 1 && from < BRUTE_LAYOUTS; from++) {
        if (!(seen >> from & 1u)) continue;
        brute_move(brute, index, cut, operand + 1, tensor, from, need, need);
        if (need != 0) brute_move(brute, index, cut, operand + 1, tensor, from, 0, need);
    }
}

/* The end of an output: partial sums may be reduced, and an addend may be brought to the layout of the gradient. */
static void brute_land(struct brute *brute, int index, const struct brute_cut *cut, int operand, int o)
{
    const struct hapt_op *op = &brute->graph->op[index];
    const int tensor = op->output[o], made = cut->output[o];
    const bool adds = op->accumulate >> o & 1u && brute->now.made[tensor];
    for (int to = 0; to < BRUTE_LAYOUTS; to++) {
        if (to != made && (brute_is_sum(brute->graph, tensor) || !(adds || made == 1) ||
                           (to > 1 && to - 2 >= brute->graph->tensor[tensor].dims) || brute->share[tensor][to][0] < 0 ||
                           !isfinite(brute_move_s(brute, tensor, made, to))))
            continue;
        brute->now.landed[o] = to;
        if (adds && !brute_is_sum(brute->graph, tensor))
            brute_get(brute, index, cut, operand, tensor, to);
        else
            brute_need(brute, index, cut, operand + 1);
    }
}

/* This operand and those behind it: inputs, then outputs. */
static void brute_need(struct brute *brute, int index, const struct brute_cut *cut, int operand)
{
    const struct hapt_op *op = &brute->graph->op[index];
    double bound = 0;
    for (int j = 0; j < brute->size; j++) bound = fmax(bound, brute->now.since[j] + brute->rest[index][j]);
    if ((!brute->found && brute->now.cost + bound >= brute->best) || brute->nodes > brute->most_nodes) return;
    brute->nodes++;
    if (operand == op->input_count + op->output_count) {
        brute_run(brute, index, cut);
        return;
    }
    if (operand >= op->input_count) {
        brute_land(brute, index, cut, operand, operand - op->input_count);
        return;
    }
    const int tensor = op->input[operand], need = cut->input[operand];
    if (tensor < 0 || brute->graph->tensor[tensor].kind == HAPT_TENSOR_INPUT) {
        brute_need(brute, index, cut, operand + 1);
        return;
    }
    if (brute_is_sum(brute->graph, tensor)) { /* before the sum over the outer axis */
        const int layout = brute->now.layout[tensor];
        const double cost = brute->now.cost,
                     seconds = layout - 1 == need ? 0 : brute_move_s(brute, tensor, layout - 1, need);
        const int traced = brute->trace.count;
        if (!isfinite(seconds)) return;
        brute->now.layout[tensor] = need + 1;
        brute->now.cost += seconds / brute->instance->options.microbatches;
        if (layout - 1 != need) brute_note_move(brute, tensor, layout - 1, need);
        brute_need(brute, index, cut, operand + 1);
        brute->trace.count = traced;
        brute->now.layout[tensor] = layout;
        brute->now.cost = cost;
        return;
    }
    if (brute->graph->tensor[tensor].kind == HAPT_TENSOR_PARAMETER) {
        const int layout = brute->now.layout[tensor];
        if (layout && layout - 1 != need && layout - 1 != 0) return;
        const int traced = brute->trace.count;
        if (!layout) brute->now.layout[tensor] = need + 1;
        if (layout && layout - 1 != need) brute_note_move(brute, tensor, 0, need);
        brute_need(brute, index, cut, operand + 1);
        brute->trace.count = traced;
        brute->now.layout[tensor] = layout;
        return;
    }
    brute_get(brute, index, cut, operand, tensor, need);
}

static void brute_op(struct brute *brute, int op)
{
    if (op == brute->graph->op_count) {
        brute_end(brute);
        return;
    }
    for (int c = 0; c < brute->cut_count[op]; c++) brute_need(brute, op, &brute->cut[op][c], 0);
}

/* Shares of a dimension, of the part that an outer axis leaves each of its ranks (share: the first rank). */
static bool brute_split(const struct random_instance *instance, int tensor, int dim, double *share)
{
    const struct hapt_sharding *over = instance->whole;
    int64_t first[RANDOM_DEVICES + 1];
    bool fits = true;
    for (int place = over->axis[0].size - 1; place >= 0; place--) {
        const int at[] = {place, 0};
        struct hapt_box box;
        hapt_sharding_box(over, tensor, at, &box);
        fits = fits && hapt_split(instance->axis.ratio, instance->axis.size, box.extent[dim], first);
        for (int j = 0; fits && place == 0 && j < instance->axis.size; j++)
            share[j] = (double)(first[j + 1] - first[j]) / (double)box.extent[dim];
    }
    return fits;
}

static void brute_cuts(struct brute *brute, int index)
{
    const struct random_instance *instance = brute->instance;
    const struct hapt_graph *graph = brute->graph;
    const struct hapt_op *op = &graph->op[index];
    static const char letters[] = "+abcdefghijklmnopqrstuvwxyz";
    for (size_t letter = 0; letter < sizeof letters; letter++) { /* the last cut is no letter: whole */
        struct hapt_spmd_work work = {.graph = graph, .op = index, .cut = {.letter = letters[letter]}};
        struct brute_cut cut = {.rule = {.first_rank_inputs = 0}};
        double share[RANDOM_DEVICES] = {1, 1, 1, 1};
        bool fits = hapt_rule_of_signature(graph, op, brute->instance->axis_index, work.cut, &cut.rule) == HAPT_OK;
        fits = fits && !(cut.rule.exchange && brute->instance->whole->exchange[index] >= 0);
        for (int i = 0; work.cut.letter == HAPT_CUT_PARTIAL && i < op->input_count; i++)
            fits = fits && (op->input[i] < 0 ||
                            graph->tensor[op->input[i]].kind > HAPT_TENSOR_PARAMETER); /* no operator makes such sums */
        for (int k = 0; fits && k < op->input_count + op->output_count; k++) {
            const bool input = k < op->input_count;
            const int tensor = input ? op->input[k] : op->output[k - op->input_count];
            const struct hapt_property property = input ? cut.rule.input[k] : cut.rule.output[k - op->input_count];
            if (tensor < 0) continue;
            if (property.kind == HAPT_PROPERTY_SHARDED && input) work.sharded_input |= 1u << k;
            if (property.kind == HAPT_PROPERTY_SHARDED && !input) work.sharded_output |= 1u << (k - op->input_count);
            if (property.kind == HAPT_PROPERTY_SHARDED)
                fits = brute_split(brute->instance, tensor, property.dim, share);
            *(input ? &cut.input[k] : &cut.output[k - op->input_count]) = brute_layout(property);
        }
        hapt_fail_reset();
        if (!fits) continue;
        for (int j = 0; j < brute->size; j++) {
            work.share = share[j];
            cut.seconds[j] = instance->costs.compute_s(instance->costs.context, &work, j);
        }
        HAPT_ASSERT(brute->cut_count[index] < BRUTE_CUTS);
        brute->cut[index][brute->cut_count[index]++] = cut;
    }
}

static void brute_prepare(struct brute *brute, const struct random_instance *instance)
{
    const struct hapt_graph *graph = instance->whole->graph;
    memset(brute, 0, sizeof *brute);
    brute->instance = instance;
    brute->graph = graph;
    brute->size = instance->axis.size;
    HAPT_ASSERT(graph->op_count <= BRUTE_OPS && graph->tensor_count <= BRUTE_TENSORS);
    for (int o = 0; o < graph->op_count; o++) brute_cuts(brute, o);
    for (int t = 0; t < graph->tensor_count; t++)
        for (int l = 0; l < BRUTE_LAYOUTS; l++) {
            const bool sharded = l > 1 && l - 2 < graph->tensor[t].dims;
            if (sharded && brute_split(instance, t, l - 2, brute->share[t][l])) continue;
            for (int j = 0; j < brute->size; j++) brute->share[t][l][j] = sharded ? -1 : 1; /* impossible */
        }
    for (int o = graph->op_count - 1; o >= 0; o--) {
        for (int j = 0; j < brute->size; j++) {
            double least = INFINITY;
            for (int c = 0; c < brute->cut_count[o]; c++) least = fmin(least, brute->cut[o][c].seconds[j]);
            brute->rest[o][j] = brute->rest[o + 1][j] + (o < instance->whole->reduce_first ? least : 0);
        }
    }
}

/* The least cost below `limit` of any program, or `limit`. *nodes: how many partial programs were visited; negative if
 * there were more than `most_nodes`. */
__attribute__((unused)) static double brute_force(const struct random_instance *instance, double limit, long most_nodes,
                                                  long *nodes)
{
    static struct brute brute;
    brute_prepare(&brute, instance);
    brute.best = limit;
    brute.most_nodes = most_nodes;
    brute_op(&brute, 0);
    *nodes = brute.nodes > most_nodes ? -brute.nodes : brute.nodes;
    return brute.best;
}

/* Calls found() with every program, at any cost. false: there were too many. */
__attribute__((unused)) static bool brute_all(const struct random_instance *instance, long most_nodes,
                                              void (*found)(void *context, const struct hapt_axis_program *program),
                                              void *context)
{
    static struct brute brute;
    static struct hapt_axis_instruction trace[BRUTE_INSTRUCTIONS];
    brute_prepare(&brute, instance);
    brute.most_nodes = most_nodes;
    brute.found = found;
    brute.context = context;
    brute.trace.instruction = trace;
    brute_op(&brute, 0);
    return brute.nodes <= most_nodes;
}

#endif
