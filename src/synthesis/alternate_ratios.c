/*
 * Input: a program. Output: the best ratios for it (HAP 3.2, 5), and the layers that have ratios of their own.
 *
 * The linear program of the ratios is made of stages between synchronisations, each of one run of segments. Separate
 * ratios are the best for each segment, but tensors between them are resharded (HAP 5.2).
 */
#include <math.h>
#include <string.h>

#include "alternate_private.h"

/* ---- the ratio problem of a program ---- */

enum hapt_status alternating_price(const struct alternating *alternating, const struct hapt_axis *axis,
                                   const struct hapt_axis_program *program, struct hapt_arena *arena,
                                   struct hapt_program_price *price)
{
    const struct hapt_alternation *asked = alternating->asked;
    return hapt_axis_program_price(asked->sharding, asked->axis_index, axis, asked->costs, &alternating->options,
                                   program, arena, price);
}

static double share_of(const struct hapt_axis *axis, int ratio, int device)
{
    return axis->ratio ? axis->ratio[(size_t)ratio * axis->size + device] : 1.0 / axis->size;
}

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
    int (*like)[MOST_SEGMENTS];   /* [devices] the first device of the same kind and share, possibly itself */
};

static enum hapt_status open_stage(struct building *building, int segment, double largest_s, double times)
{
    const int devices = building->axis->size;
    struct stages *of = &building->of[segment];
    MAKE_ROOM(of->stage, of->count, of->room, 64, building->arena);
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

/* A collective's seconds as a line over the largest share: *fixed_s + share * *largest_s. */
static void collective_line(const struct hapt_spmd_costs *costs, enum hapt_collective_kind kind, double bytes,
                            int devices, double *fixed_s, double *largest_s)
{
    const double n = devices, even_s = costs->collective_s(costs->context, kind, bytes, 1 / n),
                 all_s = costs->collective_s(costs->context, kind, bytes, 1);
    *largest_s = devices > 1 ? fmax(0, (all_s - even_s) / (1 - 1 / n)) : 0;
    *fixed_s = even_s - *largest_s / n;
}

/* A tensor that passes from run to run is resharded; the larger shares of both decide the time. Half of it is
 * charged to each run, so that runs remain separate problems. */
static enum hapt_status reshard_between_runs(struct building *building, int tensor, int run)
{
    const struct hapt_alternation *asked = building->alternating->asked;
    const int from = building->maker[tensor];
    if (from < 0 || from == run || building->readers[tensor] >> run & 1u) return HAPT_OK;
    building->readers[tensor] |= 1u << run;
    double fixed_s, largest_s;
    collective_line(asked->costs, HAPT_COLLECTIVE_ALL_TO_ALL,
                    hapt_full_bytes(asked->costs, asked->sharding->graph, tensor), asked->devices, &fixed_s,
                    &largest_s);
    HAPT_TRY(close_stage(building));
    building->fixed_s = fixed_s / 2;
    HAPT_TRY(open_stage(building, from, largest_s / 2, 1));
    building->segment = -1;
    building->fixed_s = fixed_s / 2;
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
    const double bytes = hapt_full_bytes(asked->costs, graph, instruction->tensor);
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
    double largest_s;
    collective_line(&costs, instruction->kind, bytes, asked->devices, &building->fixed_s, &largest_s);
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
    struct hapt_cut_rule rule;
    HAPT_TRY(hapt_cut_rule_make(asked->sharding, asked->axis_index, building->axis, instruction->op, instruction->cut,
                                &rule));
    const struct hapt_op *op = &graph->op[instruction->op];
    struct hapt_spmd_work work = hapt_work_of_rule(graph, instruction->op, &rule);
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
            tangent(asked->costs, &work, j, fmax(share_of(building->axis, ratio, j), 1e-9), &fixed, &slope);
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
            while ((kind && kind[like] != kind[j]) ||
                   share_of(building->axis, k, like) != share_of(building->axis, k, j))
                like++;
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
                    sum += mine[j] = share_of(axis, r, j) * (run_of[r] == k && j % 2 == side ? 1.5 : 1);
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
            *slope = fmin(*slope, resident[j] / fmax(share_of(axis, first, j), 1e-9));
            resident[j] -= *slope * share_of(axis, first, j);
        }
    }
    return HAPT_OK;
}

/* The ratio problem of a program that was made at `axis`, with tangents there; `here` is its price. Segment k of
 * the axis belongs to run run_of[k]. Runs ascend from 0 and are the problem's segments. */
static enum hapt_status make_ratio_problem(const struct alternating *alternating, const struct hapt_axis *axis,
                                           const int *run_of, const struct hapt_axis_program *program,
                                           const struct hapt_program_price *here, struct hapt_arena *arena,
                                           struct hapt_ratio_problem *problem)
{
    const int segments = axis->ratio_count, runs = run_of[segments - 1] + 1,
              tensors = alternating->asked->sharding->graph->tensor_count;
    struct building building = {
        .alternating = alternating, .axis = axis, .arena = arena, .run_of = run_of, .segment = -1};
    struct hapt_ratio_segment *segment;
    HAPT_ASSERT(segments <= MOST_SEGMENTS);
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

/* ---- neighbouring segments that share their ratios ---- */

struct ratio_search {
    const struct alternating *alternating;
    const struct hapt_axis *axis;
    const struct hapt_axis_program *program;
    const struct hapt_program_price *here;
    struct hapt_arena *arena;
    /* The best so far. */
    bool separate[MOST_SEGMENTS]; /* segment k has other ratios than segment k - 1 */
    struct hapt_ratio_result result;
};

static void number_runs(const bool *separate, int segments, int *run_of)
{
    run_of[0] = 0;
    for (int k = 1; k < segments; k++) run_of[k] = run_of[k - 1] + separate[k];
}

static enum hapt_status solve_separate(const struct ratio_search *ratio_search, const bool *separate,
                                       struct hapt_ratio_result *result)
{
    int run_of[MOST_SEGMENTS];
    struct hapt_ratio_problem problem;
    number_runs(separate, ratio_search->axis->ratio_count, run_of);
    HAPT_TRY(make_ratio_problem(ratio_search->alternating, ratio_search->axis, run_of, ratio_search->program,
                                ratio_search->here, ratio_search->arena, &problem));
    return hapt_ratios_solve(&problem, ratio_search->arena, result);
}

/* Local search: changes the entry that gains most until none gains. Ratios that fit no memory cost INFINITY. */
static enum hapt_status descend(struct ratio_search *ratio_search, bool *separate)
{
    const int segments = ratio_search->axis->ratio_count;
    struct hapt_ratio_result best;
    enum hapt_status status = solve_separate(ratio_search, separate, &best);
    if (status == HAPT_ERR_INFEASIBLE)
        best.cost_s = INFINITY;
    else
        HAPT_TRY(status);
    for (int entry = 0; entry >= 0;) {
        entry = -1;
        for (int k = 1; k < segments; k++) {
            struct hapt_ratio_result other;
            separate[k] = !separate[k];
            status = solve_separate(ratio_search, separate, &other);
            separate[k] = !separate[k];
            if (status == HAPT_ERR_INFEASIBLE) continue;
            HAPT_TRY(status);
            if (other.cost_s >= best.cost_s * (1 - 1e-9)) continue;
            best = other;
            entry = k;
        }
        if (entry > 0) separate[entry] = !separate[entry];
    }
    hapt_fail_reset();
    if (best.cost_s >= ratio_search->result.cost_s) return HAPT_OK;
    ratio_search->result = best;
    memcpy(ratio_search->separate, separate, sizeof ratio_search->separate);
    return HAPT_OK;
}

enum hapt_status alternating_solve(const struct alternating *alternating, const struct hapt_axis *axis,
                                   const struct hapt_axis_program *program, const struct hapt_program_price *here,
                                   struct hapt_arena *arena, double **ratio, const char **solver)
{
    const int segments = axis->ratio_count, devices = axis->size;
    struct ratio_search ratio_search = {
        .alternating = alternating, .axis = axis, .program = program, .here = here, .arena = arena};
    int run_of[MOST_SEGMENTS];
    bool separate[MOST_SEGMENTS] = {false};
    double *made;
    HAPT_ASSERT(segments <= MOST_SEGMENTS);
    HAPT_NEW(made, arena, (size_t)segments * devices);
    if (segments == 1) { /* report its own error */
        HAPT_TRY(solve_separate(&ratio_search, separate, &ratio_search.result));
    } else {
        ratio_search.result.cost_s = INFINITY;
        HAPT_TRY(descend(&ratio_search, separate));
        for (int k = 1; k < segments; k++) separate[k] = true; /* two entries may gain only together */
        HAPT_TRY(descend(&ratio_search, separate));
        if (!isfinite(ratio_search.result.cost_s)) /* reports what does not fit */
            HAPT_TRY(solve_separate(&ratio_search, (bool[MOST_SEGMENTS]){false}, &ratio_search.result));
    }
    number_runs(ratio_search.separate, segments, run_of);
    for (int k = 0; k < segments; k++)
        memcpy(made + (size_t)k * devices, ratio_search.result.ratio + (size_t)run_of[k] * devices,
               (size_t)devices * sizeof *made);
    *ratio = made;
    *solver = ratio_search.result.solver;
    return HAPT_OK;
}

/* ---- segments: runs of layers with similar computation over communication ---- */

/* Seconds of computation (of the mean device) and of communication of each layer. */
static enum hapt_status layer_times(const struct alternating *alternating, const struct hapt_axis *axis,
                                    const struct hapt_axis_program *program, struct hapt_arena *arena, double **compute,
                                    double **communicate)
{
    const struct hapt_alternation *asked = alternating->asked;
    const struct hapt_graph *graph = asked->sharding->graph;
    double *compute_s, *communicate_s;
    int *layer_of, *reader, next = 0;
    HAPT_NEW(compute_s, arena, asked->layer_count);
    HAPT_NEW(communicate_s, arena, asked->layer_count);
    *compute = compute_s;
    *communicate = communicate_s;
    HAPT_NEW(layer_of, arena, graph->forward_count);
    HAPT_NEW(reader, arena, graph->tensor_count); /* first forward operator that reads a parameter */
    for (int o = 0, l = 0; o < graph->forward_count; o++) {
        while (l + 1 < asked->layer_count && o >= asked->end_op[l]) l++;
        layer_of[o] = l;
    }
    for (int o = graph->forward_count - 1; o >= 0; o--)
        for (int i = 0; i < graph->op[o].input_count; i++)
            if (graph->op[o].input[i] >= 0) reader[graph->op[o].input[i]] = o;
    for (int i = program->count - 1; i >= 0; i--) {
        const struct hapt_axis_instruction *instruction = &program->instruction[i];
        if (instruction->op >= 0) {
            struct hapt_spmd_work work = {.graph = graph, .op = instruction->op, .cut = instruction->cut};
            next = graph->op[instruction->op].forward_op;
            work.share = instruction->cut.letter == HAPT_CUT_REPLICATED || instruction->cut.letter == HAPT_CUT_PARTIAL
                             ? 1
                             : 1.0 / axis->size;
            double sum = 0;
            for (int j = 0; j < axis->size; j++) sum += asked->costs->compute_s(asked->costs->context, &work, j);
            compute_s[layer_of[next]] += sum / axis->size;
            continue;
        }
        const bool gradient = hapt_graph_is_parameter_gradient(graph, instruction->tensor);
        const struct hapt_spmd_costs costs = hapt_costs_of_tensor(asked->costs, gradient);
        const double seconds =
            costs.collective_s(costs.context, instruction->kind,
                               hapt_full_bytes(asked->costs, graph, instruction->tensor), 1.0 / axis->size);
        const int op = gradient ? reader[graph->tensor[instruction->tensor].primal] : next;
        if (instruction->kind != HAPT_COLLECTIVE_SLICE)
            communicate_s[layer_of[op]] += gradient ? seconds / alternating->microbatches : seconds;
    }
    return HAPT_OK;
}

/* Least weighted squared deviation of the logarithms over at most `most` runs, by dynamic programming; end[k] in
 * layers. */
static enum hapt_status part(int layers, const double *value, const double *weight, int most, struct hapt_arena *arena,
                             int *end)
{
    double(*best)[MOST_SEGMENTS + 1];
    int(*from)[MOST_SEGMENTS + 1];
    HAPT_NEW(best, arena, layers + 1);
    HAPT_NEW(from, arena, layers + 1);
    for (int l = 0; l <= layers; l++)
        for (int k = 0; k <= most; k++) best[l][k] = l == 0 && k == 0 ? 0 : INFINITY;
    for (int l = 1; l <= layers; l++) {
        double w = 0, wv = 0, wvv = 0;
        for (int i = l - 1; i >= 0; i--) { /* the last run is layers [i, l) */
            w += weight[i];
            wv += weight[i] * value[i];
            wvv += weight[i] * value[i] * value[i];
            const double off = w > 0 ? fmax(0, wvv - wv * wv / w) : 0;
            for (int k = 1; k <= most; k++) {
                if (best[i][k - 1] + off >= best[l][k]) continue;
                best[l][k] = best[i][k - 1] + off;
                from[l][k] = i;
            }
        }
    }
    for (int l = layers, k = most; k > 0; k--) {
        end[k - 1] = l;
        l = from[l][k];
    }
    return HAPT_OK;
}

enum hapt_status alternating_computes(const struct alternating *alternating, const struct hapt_axis *axis,
                                      const struct hapt_axis_program *program, const int *end, int count,
                                      struct hapt_arena *arena, bool *computes)
{
    const struct hapt_alternation *asked = alternating->asked;
    double *compute_s, *communicate_s;
    HAPT_TRY(layer_times(alternating, axis, program, arena, &compute_s, &communicate_s));
    for (int k = 0, l = 0; k < count; k++) {
        double balance = 0;
        for (; l < asked->layer_count && asked->end_op[l] <= end[k]; l++) balance += compute_s[l] - communicate_s[l];
        computes[k] = balance > 0;
    }
    return HAPT_OK;
}

enum hapt_status alternating_segments(const struct alternating *alternating, const struct hapt_axis *axis,
                                      const struct hapt_axis_program *program, struct hapt_arena *arena, int *ratio_of,
                                      int *end, int *count)
{
    const struct hapt_alternation *asked = alternating->asked;
    const int layers = asked->layer_count;
    const int most = asked->segments < layers ? asked->segments : layers;
    double *compute_s, *communicate_s, *value, *weight, all = 0;
    HAPT_ASSERT(most >= 1 && most <= MOST_SEGMENTS);
    HAPT_NEW(value, arena, layers);
    HAPT_NEW(weight, arena, layers);
    HAPT_TRY(layer_times(alternating, axis, program, arena, &compute_s, &communicate_s));
    for (int l = 0; l < layers; l++) all += weight[l] = compute_s[l] + communicate_s[l];
    const double least = 1e-3 * all / layers; /* keeps layers without communication at a finite distance */
    for (int l = 0; l < layers; l++) value[l] = log((compute_s[l] + least) / (communicate_s[l] + least));
    HAPT_TRY(part(layers, value, weight, most, arena, end));
    for (int k = 0, o = 0; k < most; k++) {
        end[k] = asked->end_op[end[k] - 1];
        for (; o < end[k]; o++) ratio_of[o] = k;
    }
    *count = most;
    return HAPT_OK;
}
