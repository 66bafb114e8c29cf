/* The simple cost structure: an operator takes as long as its FLOPs or its bytes, a collective as a ring does. */
#include <math.h>
#include <string.h>

#include "hapt/synthesis.h"

/* Bytes of the operands, sharded ones by their share. */
static double operand_bytes(const struct hapt_spmd_work *work)
{
    const struct hapt_op *op = &work->graph->op[work->op];
    double bytes = 0;
    for (int i = 0; i < op->input_count; i++)
        if (op->input[i] >= 0)
            bytes += (double)hapt_tensor_bytes(&work->graph->tensor[op->input[i]]) * (work->sharded_input >> i & 1u ? work->share : 1);
    for (int o = 0; o < op->output_count; o++)
        if (op->output[o] >= 0)
            bytes += (double)hapt_tensor_bytes(&work->graph->tensor[op->output[o]]) * (work->sharded_output >> o & 1u ? work->share : 1) *
                     (op->accumulate >> o & 1u ? 2 : 1);
    return bytes;
}

static double compute_s(const void *context, const struct hapt_spmd_work *work, int device)
{
    const struct hapt_spmd_rates *rates = context;
    const double flops = work->share * hapt_op_flops(work->graph, &work->graph->op[work->op], 1);
    const double limit = work->share * hapt_op_bytes(work->graph, &work->graph->op[work->op], 1);
    const double bytes = fmax(limit, fmin(operand_bytes(work), hapt_op_bytes(work->graph, &work->graph->op[work->op], 1)));
    return rates->launch_s + fmax(flops / rates->flops_per_s[device], bytes / rates->bytes_per_s[device]);
}

/* Rings of `size` ranks; with uneven shards the largest one paces every round (HAP 3.2), but for broadcasts, which send each shard
 * as it is, one after the other, in a pipeline. */
static double collective_s(const void *context, enum hapt_collective_kind kind, double bytes, double largest_share)
{
    const struct hapt_spmd_rates *rates = context;
    const double rounds = rates->size - 1, whole = bytes / rates->bandwidth_bytes_per_s;
    if (rates->size == 1 || kind == HAPT_COLLECTIVE_SLICE || kind == HAPT_COLLECTIVE_NONE) return 0;
    switch (kind) {
    case HAPT_COLLECTIVE_ALL_REDUCE: return 2 * rounds * (rates->latency_s + whole / rates->size);
    case HAPT_COLLECTIVE_GROUPED_BROADCAST: return rates->size * rates->latency_s * ceil(log2(rates->size)) + whole;
    case HAPT_COLLECTIVE_ALL_TO_ALL: return rounds * (rates->latency_s + whole * largest_share / rates->size);
    default: return rounds * (rates->latency_s + whole * largest_share); /* all-gather, reduce-scatter */
    }
}

void hapt_spmd_rates_costs(const struct hapt_spmd_rates *rates, int *kind, struct hapt_spmd_costs *costs)
{
    for (int j = 0; j < rates->size; j++) {
        int like = 0;
        while (rates->flops_per_s[like] != rates->flops_per_s[j] || rates->bytes_per_s[like] != rates->bytes_per_s[j]) like++;
        kind[j] = like;
    }
    *costs = (struct hapt_spmd_costs){.context = rates, .kind = kind, .compute_s = compute_s, .collective_s = collective_s};
}
