/* Ring costs over one link, and emulation of a slow link: a collective then lasts as long as a ring over it. */
#include <math.h>

#include "collective.h"

const char *hapt_collective_key(enum hapt_collective_kind kind)
{
    static const char *const key[HAPT_COLLECTIVE_COUNT] = {
        [HAPT_COLLECTIVE_NONE] = "none",
        [HAPT_COLLECTIVE_ALL_REDUCE] = "all_reduce",
        [HAPT_COLLECTIVE_REDUCE_SCATTER] = "reduce_scatter",
        [HAPT_COLLECTIVE_ALL_GATHER] = "all_gather",
        [HAPT_COLLECTIVE_GROUPED_BROADCAST] = "grouped_broadcast",
        [HAPT_COLLECTIVE_ALL_TO_ALL] = "all_to_all",
        [HAPT_COLLECTIVE_SLICE] = "slice",
    };
    return key[kind];
}

bool hapt_collective_communicates(enum hapt_collective_kind kind)
{
    return kind != HAPT_COLLECTIVE_NONE && kind != HAPT_COLLECTIVE_SLICE;
}

bool hapt_collective_pads(enum hapt_collective_kind kind)
{
    return kind == HAPT_COLLECTIVE_ALL_GATHER || kind == HAPT_COLLECTIVE_REDUCE_SCATTER ||
           kind == HAPT_COLLECTIVE_ALL_TO_ALL;
}

double hapt_ring_s(enum hapt_collective_kind kind, int ranks, double bytes, double largest_share, double bandwidth,
                   double latency_s)
{
    const double n = ranks, hops = n - 1, whole_s = bytes / bandwidth, largest_s = whole_s * fmax(largest_share, 1 / n);
    if (ranks < 2) return 0;
    switch (kind) {
    case HAPT_COLLECTIVE_ALL_REDUCE: return 2 * hops * (latency_s + whole_s / n);
    case HAPT_COLLECTIVE_REDUCE_SCATTER:
    case HAPT_COLLECTIVE_ALL_GATHER: return hops * (latency_s + largest_s);
    case HAPT_COLLECTIVE_ALL_TO_ALL: return hops * (latency_s + largest_s / n);
    case HAPT_COLLECTIVE_GROUPED_BROADCAST: return (n + hops) * latency_s + whole_s;
    case HAPT_COLLECTIVE_NONE:
    case HAPT_COLLECTIVE_SLICE:
    case HAPT_COLLECTIVE_COUNT: break;
    }
    return 0;
}

void hapt_collective_emulate_link(struct hapt_collective *collective, double bandwidth, double latency_s)
{
    collective->emulated_bandwidth = bandwidth;
    collective->emulated_latency_s = latency_s;
}

bool hapt_collective_emulates_link(const struct hapt_collective *collective)
{
    return collective->emulated_bandwidth > 0;
}

/* All ranks finish within the time that copying takes, so each waits from its own end. */
void collective_wait_ring(const struct hapt_collective *collective, enum hapt_collective_kind kind, double bytes,
                          double largest_share)
{
    if (!(collective->emulated_bandwidth > 0)) return;
    hapt_time_sleep_until(hapt_time_s() + hapt_ring_s(kind, collective->size, bytes, largest_share,
                                                      collective->emulated_bandwidth, collective->emulated_latency_s));
}
