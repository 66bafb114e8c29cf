/* Model segments with ratios of their own (HAP 5.2): runs of layers with similar computation over communication. */
#include <math.h>
#include <string.h>

#include "alternate_private.h"

/* Seconds of computation (of the mean device) and of communication of each layer. */
static enum hapt_status layer_times(const struct alternating *alternating, const struct hapt_axis *axis,
                                    const struct hapt_axis_program *program, struct hapt_arena *arena,
                                    double *compute_s, double *communicate_s)
{
    const struct hapt_alternation *asked = alternating->asked;
    const struct hapt_graph *graph = asked->sharding->graph;
    int *layer_of, *reader, next = 0;
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
    HAPT_NEW(compute_s, arena, asked->layer_count);
    HAPT_NEW(communicate_s, arena, asked->layer_count);
    HAPT_TRY(layer_times(alternating, axis, program, arena, compute_s, communicate_s));
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
    HAPT_NEW(compute_s, arena, layers);
    HAPT_NEW(communicate_s, arena, layers);
    HAPT_NEW(value, arena, layers);
    HAPT_NEW(weight, arena, layers);
    HAPT_TRY(layer_times(alternating, axis, program, arena, compute_s, communicate_s));
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
