/* Input: a program. Output: the linear program of its ratios (HAP 3.2, 5.1): stages between synchronisations, each
 * of one segment. */
#include <math.h>
#include <string.h>

#include "alternate_private.h"

enum hapt_status alternating_price(const struct alternating *alternating, const struct hapt_axis *axis,
                                   const struct hapt_axis_program *program, struct hapt_arena *arena,
                                   struct hapt_program_price *price)
{
    const struct hapt_alternation *asked = alternating->asked;
    return hapt_axis_program_price(asked->sharding, asked->axis_index, axis, asked->costs, &alternating->options,
                                   program, arena, price);
}

enum { MOST_RATIOS = 16 };
#define STEP 0.05 /* of a share, to either side, for tangents */

struct stages { /* of one segment */
    int count, room;
    struct hapt_ratio_stage *stage;
};
struct building {
    const struct alternating *alternating;
    const struct hapt_axis *axis;
    struct hapt_arena *arena;
    const int *run_of; /* [segments] run of each segment; the problem has runs as its segments */
    struct stages *of; /* [runs] */
    int segment;       /* run of the open stage; -1: not known yet */
    int last;          /* run of the last sharded operator */
    int *maker;        /* [tensor] run that made the sharded version; -1: none, or a collective, which can make any */
    unsigned *readers; /* [tensor] bit k: run k has read it from another run */
    double *replicated, *sharded; /* [devices] of the open stage */
    double fixed_s;               /* for the stage whose run is not known yet */
    double *waiting;              /* [devices] replicated computation before the stage's run is known */
    int (*like)[MOST_RATIOS];     /* [devices] the first device of the same kind and share, possibly itself */
};

static double share_of(const struct building *building, int ratio, int device)
{
    const struct hapt_axis *axis = building->axis;
    return axis->ratio ? axis->ratio[(size_t)ratio * axis->size + device] : 1.0 / axis->size;
}

static enum hapt_status open_stage(struct building *building, int segment, double largest_s, double times)
{
    const int devices = building->axis->size;
    struct stages *of = &building->of[segment];
    if (of->count == of->room) {
        struct hapt_ratio_stage *wider;
        const int room = of->room ? 2 * of->room : 64;
        HAPT_NEW(wider, building->arena, room);
        for (int i = 0; i < of->count; i++) wider[i] = of->stage[i];
        of->stage = wider;
        of->room = room;
    }
    HAPT_NEW(building->replicated, building->arena, devices);
    HAPT_NEW(building->sharded, building->arena, devices);
    for (int j = 0; j < devices; j++) {
        building->replicated[j] = building->waiting[j];
        building->waiting[j] = 0;
    }
    of->stage[of->count++] = (struct hapt_ratio_stage){.fixed_s = building->fixed_s,
                                                       .largest_s = largest_s,
                                                       .times = times,
                                                       .replicated_s = building->replicated,
                                                       .sharded_s = building->sharded};
    building->fixed_s = 0;
    building->segment = segment;
    return HAPT_OK;
}

/* A stage without a sharded operator does not depend on ratios; it belongs to the first segment. */
static enum hapt_status close_stage(struct building *building)
{
    double held = building->fixed_s;
    for (int j = 0; j < building->axis->size; j++) held += building->waiting[j];
    if (building->segment < 0 && held > 0) HAPT_TRY(open_stage(building, 0, 0, 1));
    building->segment = -1;
    return HAPT_OK;
}

/* A tensor that passes from run to run is resharded; the larger shares of both decide the time. Half of it is
 * charged to each run, so that runs remain separate problems. */
static enum hapt_status reshard_between_runs(struct building *building, int tensor, int run)
{
    const struct hapt_alternation *asked = building->alternating->asked;
    const int from = building->maker[tensor];
    if (from < 0 || from == run || building->readers[tensor] >> run & 1u) return HAPT_OK;
    building->readers[tensor] |= 1u << run;
    const double bytes = hapt_full_bytes(asked->costs, asked->sharding->graph, tensor), n = asked->devices;
    const double even_s = asked->costs->collective_s(asked->costs->context, HAPT_COLLECTIVE_ALL_TO_ALL, bytes, 1 / n);
    const double all_s = asked->costs->collective_s(asked->costs->context, HAPT_COLLECTIVE_ALL_TO_ALL, bytes, 1);
    const double largest_s = n > 1 ? fmax(0, (all_s - even_s) / (1 - 1 / n)) : 0;
    HAPT_TRY(close_stage(building));
    building->fixed_s = (even_s - largest_s / n) / 2;
    HAPT_TRY(open_stage(building, from, largest_s / 2, 1));
    building->segment = -1;
    building->fixed_s = (even_s - largest_s / n) / 2;
    return open_stage(building, run, largest_s / 2, 1);
}

/* The run whose ratios a communication depends on. It is the run of its source version, or else of the last
 * operator. For a gradient it is the run that shards its parameter. Properties cannot tell: runs of equal ratios have
 * the same one. */
static int run_of_communication(const struct building *building, const struct hapt_axis_instruction *instruction,
                                bool sum)
{
    const struct hapt_alternation *asked = building->alternating->asked;
    const struct hapt_graph *graph = asked->sharding->graph;
    if (building->maker[instruction->tensor] >= 0 && instruction->from.kind == HAPT_PROPERTY_SHARDED)
        return building->maker[instruction->tensor];
    if (!sum) return building->last;
    const int primal = graph->tensor[instruction->tensor].primal, *ratio_of = building->alternating->options.ratio_of;
    for (int o = 0; ratio_of && o < graph->forward_count; o++)
        for (int i = 0; i < graph->op[o].input_count; i++)
            if (graph->op[o].input[i] == primal) return building->run_of[ratio_of[o]];
    return building->run_of[0];
}

static enum hapt_status communicate(struct building *building, const struct hapt_axis_instruction *instruction)
{
    const struct hapt_alternation *asked = building->alternating->asked;
    const struct hapt_graph *graph = asked->sharding->graph;
    const bool sum = hapt_graph_is_parameter_gradient(graph, instruction->tensor);
    const double bytes = hapt_full_bytes(asked->costs, graph, instruction->tensor), n = asked->devices;
    const struct hapt_spmd_costs costs = hapt_costs_of_tensor(asked->costs, sum);
    if (instruction->kind == HAPT_COLLECTIVE_SLICE) return HAPT_OK;
    HAPT_TRY(close_stage(building));
    const struct hapt_property sharded =
        instruction->to.kind == HAPT_PROPERTY_SHARDED ? instruction->to : instruction->from;
    if (sharded.kind != HAPT_PROPERTY_SHARDED) { /* an all-reduce: the same at all ratios */
        const double seconds = costs.collective_s(costs.context, instruction->kind, bytes, 1);
        building->fixed_s = sum ? seconds / building->alternating->microbatches : seconds;
        return sum ? close_stage(building) : HAPT_OK;
    }
    const double even_s = costs.collective_s(costs.context, instruction->kind, bytes, 1 / n);
    const double all_s = costs.collective_s(costs.context, instruction->kind, bytes, 1);
    const double largest_s = n > 1 ? fmax(0, (all_s - even_s) / (1 - 1 / n)) : 0;
    building->fixed_s = even_s - largest_s / n;
    HAPT_TRY(open_stage(building, run_of_communication(building, instruction, sum), largest_s,
                        sum ? 1 / building->alternating->microbatches : 1));
    building->maker[instruction->tensor] = -1;
    if (sum) building->segment = -1; /* no computation follows it */
    return HAPT_OK;
}

static void tangent(const struct hapt_spmd_costs *costs, struct hapt_spmd_work *work, int device, double share,
                    double *at_zero, double *slope)
{
    double value[3];
    for (int k = 0; k < 3; k++) {
        work->share = share * (1 + STEP * (k - 1));
        value[k] = costs->compute_s(costs->context, work, device);
    }
    *slope = fmax(0, (value[2] - value[0]) / (2 * STEP * share));
    *at_zero = value[1] - *slope * share;
    if (*at_zero >= 0) return;
    *at_zero = 0;
    *slope = value[1] / share;
}

static enum hapt_status compute(struct building *building, const struct hapt_axis_instruction *instruction)
{
    const struct hapt_alternation *asked = building->alternating->asked;
    const struct hapt_graph *graph = asked->sharding->graph;
    struct hapt_spmd_work work = {.graph = graph, .op = instruction->op, .cut = instruction->cut, .share = 1};
    struct hapt_cut_rule rule;
    HAPT_TRY(hapt_cut_rule_make(asked->sharding, asked->axis_index, building->axis, instruction->op, instruction->cut,
                                &rule));
    const struct hapt_op *op = &graph->op[instruction->op];
    for (int i = 0; i < op->input_count; i++)
        if (op->input[i] >= 0 && rule.rule.input[i].kind == HAPT_PROPERTY_SHARDED) work.sharded_input |= 1u << i;
    for (int o = 0; o < op->output_count; o++)
        if (op->output[o] >= 0 && rule.rule.output[o].kind == HAPT_PROPERTY_SHARDED) work.sharded_output |= 1u << o;
    const int run = building->run_of[instruction->cut.ratio];
    for (int i = 0; i < op->input_count; i++)
        if (work.sharded_input >> i & 1u) HAPT_TRY(reshard_between_runs(building, op->input[i], run));
    for (int o = 0; o < op->output_count; o++) {
        if (op->output[o] < 0) continue;
        const bool shared = work.sharded_output >> o & 1u;
        if (shared && op->accumulate >> o & 1u)
            HAPT_TRY(reshard_between_runs(building, op->output[o], run));
        else
            building->readers[op->output[o]] = 0;
        building->maker[op->output[o]] = shared ? run : -1;
    }
    if (rule.rule.exchange) {
        HAPT_TRY(close_stage(building));
        building->fixed_s = hapt_exchange_seconds(asked->costs, graph, instruction->op);
    }
    if (!rule.units) { /* replicated or on partial sums: every device does all of it, in any open stage */
        for (int j = 0; j < building->axis->size; j++)
            (building->segment < 0 ? building->waiting : building->replicated)[j] +=
                asked->costs->compute_s(asked->costs->context, &work, j);
        return HAPT_OK;
    }
    const int ratio = instruction->cut.ratio;
    building->last = run;
    if (building->segment != run) HAPT_TRY(open_stage(building, run, 0, 1));
    double *replicated = building->replicated, *sharded = building->sharded, fixed, slope;
    double its_fixed[HAPT_ALTERNATION_DEVICES], its_slope[HAPT_ALTERNATION_DEVICES];
    for (int j = 0; j < building->axis->size; j++) {
        const int like = building->like[j][ratio];
        if (like == j) {
            tangent(asked->costs, &work, j, fmax(share_of(building, ratio, j), 1e-9), &fixed, &slope);
            its_fixed[j] = fixed;
            its_slope[j] = slope;
        }
        replicated[j] += its_fixed[like];
        sharded[j] += its_slope[like];
    }
    return HAPT_OK;
}

static void find_alike(struct building *building, int segments)
{
    const int *kind = building->alternating->asked->costs->kind;
    for (int j = 0; j < building->axis->size; j++)
        for (int k = 0; k < segments; k++) {
            int like = 0;
            while ((kind && kind[like] != kind[j]) || share_of(building, k, like) != share_of(building, k, j)) like++;
            building->like[j][k] = like;
        }
}

/*
 * Memory is linear in the shares except for whole units. The bytes per unit of share follow from the exact memory at
 * two vectors that differ on every device. The remainder does not depend on the shares.
 */
static enum hapt_status find_memory(const struct alternating *alternating, const struct hapt_axis *axis,
                                    const int *run_of, const struct hapt_axis_program *program,
                                    const struct hapt_program_price *here, struct hapt_arena *arena,
                                    struct hapt_ratio_problem *problem)
{
    const int devices = axis->size;
    double *resident, *sharded, *tilted;
    problem->limit_bytes = alternating->asked->memory_bytes;
    HAPT_NEW(resident, arena, devices);
    HAPT_NEW(sharded, arena, devices * problem->segment_count);
    HAPT_NEW(tilted, arena, devices * axis->ratio_count);
    problem->resident_bytes = resident;
    problem->sharded_bytes = sharded;
    for (int j = 0; j < devices; j++) resident[j] = here->memory_bytes[j];
    for (int k = 0; problem->limit_bytes && k < problem->segment_count; k++) {
        struct hapt_program_price price[2];
        double share[2][HAPT_ALTERNATION_DEVICES];
        for (int side = 0; side < 2; side++) {
            const struct hapt_axis other = {.size = devices, .ratio_count = axis->ratio_count, .ratio = tilted};
            for (int r = 0; r < axis->ratio_count; r++) {
                double sum = 0, *mine = tilted + (size_t)r * devices;
                for (int j = 0; j < devices; j++)
                    sum += mine[j] = share_of_axis(axis, r, j) * (run_of[r] == k && j % 2 == side ? 1.5 : 1);
                for (int j = 0; j < devices; j++) mine[j] /= sum;
                if (run_of[r] == k) memcpy(share[side], mine, (size_t)devices * sizeof *mine);
            }
            if (alternating_price(alternating, &other, program, arena, &price[side]) != HAPT_OK) {
                hapt_fail_reset(); /* the layouts exist at these ratios only: the program's memory counts as constant */
                return HAPT_OK;
            }
        }
        int first = 0;
        while (run_of[first] != k) first++;
        for (int j = 0; j < devices; j++) {
            double *slope = &sharded[(size_t)k * devices + j];
            *slope = fmax(0, (price[1].memory_bytes[j] - price[0].memory_bytes[j]) / (share[1][j] - share[0][j]));
            *slope = fmin(*slope, resident[j] / fmax(share_of_axis(axis, first, j), 1e-9));
            resident[j] -= *slope * share_of_axis(axis, first, j);
        }
    }
    return HAPT_OK;
}

enum hapt_status alternating_ratio_problem(const struct alternating *alternating, const struct hapt_axis *axis,
                                           const int *run_of, const struct hapt_axis_program *program,
                                           const struct hapt_program_price *here, struct hapt_arena *arena,
                                           struct hapt_ratio_problem *problem)
{
    const int segments = axis->ratio_count, runs = run_of[segments - 1] + 1,
              tensors = alternating->asked->sharding->graph->tensor_count;
    struct building building = {
        .alternating = alternating, .axis = axis, .arena = arena, .run_of = run_of, .segment = -1};
    struct hapt_ratio_segment *segment;
    HAPT_ASSERT(segments <= MOST_RATIOS);
    HAPT_NEW(building.of, arena, runs);
    HAPT_NEW(building.maker, arena, tensors);
    HAPT_NEW(building.readers, arena, tensors);
    for (int t = 0; t < tensors; t++) building.maker[t] = -1;
    HAPT_NEW(building.waiting, arena, axis->size);
    HAPT_NEW(building.like, arena, axis->size);
    HAPT_NEW(segment, arena, runs);
    find_alike(&building, segments);
    for (int i = 0; i < program->count; i++)
        HAPT_TRY(program->instruction[i].op < 0 ? communicate(&building, &program->instruction[i])
                                                : compute(&building, &program->instruction[i]));
    HAPT_TRY(close_stage(&building));
    for (int k = 0; k < runs; k++)
        segment[k] = (struct hapt_ratio_segment){.stage_count = building.of[k].count, .stage = building.of[k].stage};
    *problem = (struct hapt_ratio_problem){
        .devices = axis->size, .segment_count = runs, .segment = segment, .power = alternating->asked->power};
    return find_memory(alternating, axis, run_of, program, here, arena, problem);
}
