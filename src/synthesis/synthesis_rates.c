/* The simple cost model: an operator takes the time of its FLOPs or of its bytes, a collective that of a ring. */
#include <math.h>
#include <string.h>

#include "hapt/synthesis.h"

static double compute_s(const void *context, const struct hapt_spmd_work *work, int device)
{
    const struct hapt_spmd_rates *rates = context;
    const double flops = work->share * hapt_op_flops(work->graph, &work->graph->op[work->op], 1);
    return rates->launch_s +
           fmax(flops / rates->flops_per_s[device], hapt_spmd_work_bytes(work, 1) / rates->bytes_per_s[device]);
}

static double collective_s(const void *context, enum hapt_collective_kind kind, double bytes, double largest_share)
{
    const struct hapt_spmd_rates *rates = context;
    return hapt_ring_s(kind, rates->size, bytes, largest_share, rates->bandwidth_bytes_per_s, rates->latency_s);
}

void hapt_spmd_rates_costs(const struct hapt_spmd_rates *rates, int *kind, struct hapt_spmd_costs *costs)
{
    for (int j = 0; j < rates->size; j++) {
        int like = 0;
        while (rates->flops_per_s[like] != rates->flops_per_s[j] || rates->bytes_per_s[like] != rates->bytes_per_s[j])
            like++;
        kind[j] = like;
    }
    *costs =
        (struct hapt_spmd_costs){.context = rates, .kind = kind, .compute_s = compute_s, .collective_s = collective_s};
}
