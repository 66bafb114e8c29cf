/* A simple cost model for tests and benchmarks: an operator takes the time of its FLOPs or of its bytes, a collective
 * that of a ring. */
#ifndef HAPT_TEST_SPMD_RATES_H
#define HAPT_TEST_SPMD_RATES_H

#include <math.h>

#include "hapt/synthesis.h"

struct spmd_rates {
    int size;
    const double *flops_per_s, *bytes_per_s; /* [size] of each device */
    double launch_s;                         /* s per operator */
    double latency_s, bandwidth_bytes_per_s; /* of the axis' links, per rank and direction; rings */
};

static double rates_compute_s(const void *context, const struct hapt_spmd_work *work, int device)
{
    const struct spmd_rates *rates = context;
    const double flops = work->share * hapt_op_flops(work->graph, &work->graph->op[work->op], 1);
    return rates->launch_s +
           fmax(flops / rates->flops_per_s[device], hapt_spmd_work_bytes(work, 1) / rates->bytes_per_s[device]);
}

static double rates_collective_s(const void *context, enum hapt_collective_kind kind, double bytes,
                                 double largest_share)
{
    const struct spmd_rates *rates = context;
    return hapt_ring_s(kind, rates->size, bytes, largest_share, rates->bandwidth_bytes_per_s, rates->latency_s);
}

/* Fills `costs` to use `rates`, which must outlive it. The caller owns `kind` [size], which is filled: devices of equal
 * rates are of one kind. */
static void spmd_rates_costs(const struct spmd_rates *rates, int *kind, struct hapt_spmd_costs *costs)
{
    for (int j = 0; j < rates->size; j++) {
        int like = 0;
        while (rates->flops_per_s[like] != rates->flops_per_s[j] || rates->bytes_per_s[like] != rates->bytes_per_s[j])
            like++;
        kind[j] = like;
    }
    *costs = (struct hapt_spmd_costs){
        .context = rates, .kind = kind, .compute_s = rates_compute_s, .collective_s = rates_collective_s};
}

#endif
