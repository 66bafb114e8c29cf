/* The edges of a schedule: which chunks exchange tensors, and the channels between submeshes. */
#include "hapt/schedule.h"

#include <stdlib.h>

static int compare_edges(const void *a, const void *b)
{
    const struct hapt_schedule_edge *x = a, *y = b;
    if (x->backward != y->backward) return x->backward ? 1 : -1;
    if (x->from != y->from) return x->from - y->from;
    return x->to - y->to;
}

/* Between neighbours: activations, and gradients unless the receiver is forward-only. */
static void connect_neighbours(const struct hapt_schedule *schedule, struct hapt_schedule_edges *edges)
{
    for (int c = 0; c + 1 < schedule->chunk_count; c++) {
        edges->edge[edges->count++] = (struct hapt_schedule_edge){c, c + 1, false};
        if (!schedule->forward_only[c]) edges->edge[edges->count++] = (struct hapt_schedule_edge){c + 1, c, true};
    }
}

/* Lists the edges by their receivers. */
static void index_edges(const struct hapt_schedule *schedule, struct hapt_schedule_edges *edges)
{
    const int chunks = schedule->chunk_count;
    for (int e = 0; e < edges->count; e++) {
        const struct hapt_schedule_edge *edge = &edges->edge[e];
        edges->out_start[edge->backward * chunks + edge->from + 1]++;
        edges->in_start[edge->backward * chunks + edge->to + 1]++;
    }
    for (int k = 0; k < 2 * chunks; k++) {
        edges->out_start[k + 1] += edges->out_start[k];
        edges->in_start[k + 1] += edges->in_start[k];
    }
    for (int e = edges->count - 1; e >= 0; e--) { /* in_start[k + 1] moves down to the start of k + 1, and back below */
        const struct hapt_schedule_edge *edge = &edges->edge[e];
        edges->in[--edges->in_start[edge->backward * chunks + edge->to + 1]] = e;
    }
    for (int k = 0; k < 2 * chunks; k++) edges->in_start[k] = edges->in_start[k + 1];
    edges->in_start[2 * chunks] = edges->count;
}

/* Numbers the channels by their first edges. */
static void find_channels(const struct hapt_schedule *schedule, struct hapt_schedule_edges *edges)
{
    const int chunks = schedule->chunk_count;
    for (int e = 0; e < edges->count; e++) {
        const struct hapt_schedule_edge *edge = &edges->edge[e];
        const int from = schedule->submesh_of[edge->from], to = schedule->submesh_of[edge->to];
        edges->channel_of[e] = -1;
        if (from == to) continue;
        for (int other = 0; other < e && edges->channel_of[e] < 0; other++)
            if (schedule->submesh_of[edges->edge[other].from] == from &&
                schedule->submesh_of[edges->edge[other].to] == to)
                edges->channel_of[e] = edges->channel_of[other];
        if (edges->channel_of[e] < 0) edges->channel_of[e] = edges->channel_count++;
        edges->sends[edge->backward * chunks + edge->from] = true;
        edges->receives[edge->backward * chunks + edge->to] = true;
    }
}

enum hapt_status hapt_schedule_connect(struct hapt_schedule *schedule, int edge_count,
                                       const struct hapt_schedule_edge *edge, struct hapt_arena *arena)
{
    struct hapt_schedule_edges *edges = &schedule->edges;
    const int chunks = schedule->chunk_count, most = edge ? edge_count : 2 * chunks;
    *edges = (struct hapt_schedule_edges){0};
    HAPT_NEW(edges->edge, arena, most);
    HAPT_NEW(edges->in, arena, most);
    HAPT_NEW(edges->channel_of, arena, most);
    HAPT_NEW(edges->out_start, arena, 2 * chunks + 1);
    HAPT_NEW(edges->in_start, arena, 2 * chunks + 1);
    HAPT_NEW(edges->sends, arena, 2 * chunks);
    HAPT_NEW(edges->receives, arena, 2 * chunks);
    if (!edge) connect_neighbours(schedule, edges);
    for (int e = 0; edge && e < edge_count; e++) {
        const bool falls = edge[e].to < edge[e].from;
        HAPT_ASSERT(edge[e].from >= 0 && edge[e].from < chunks && edge[e].to >= 0 && edge[e].to < chunks);
        HAPT_ASSERT(edge[e].from != edge[e].to && edge[e].backward == falls);
        edges->edge[edges->count++] = edge[e];
    }
    qsort(edges->edge, (size_t)edges->count, sizeof *edges->edge, compare_edges);
    index_edges(schedule, edges);
    find_channels(schedule, edges);
    return HAPT_OK;
}
