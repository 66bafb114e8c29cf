/* The edges of a schedule: which chunks exchange tensors, and the channels between submeshes. */
#include "hapt/schedule.h"

#include <stdlib.h>
#include <string.h>

int hapt_schedule_compare_edges(const struct hapt_schedule_edge *a, const struct hapt_schedule_edge *b)
{
    if (a->backward != b->backward) return a->backward ? 1 : -1;
    if (a->from != b->from) return a->from - b->from;
    return a->to - b->to;
}

static int compare_edges(const void *a, const void *b)
{
    return hapt_schedule_compare_edges(a, b);
}

/* Between neighbours: activations, and gradients unless the receiver is forward-only. */
static void connect_neighbours(const struct hapt_schedule *schedule, struct hapt_schedule_edges *edges)
{
    for (int c = 0; c + 1 < schedule->chunk_count; c++) {
        edges->edge[edges->count++] = (struct hapt_schedule_edge){c, c + 1, false, 0};
        if (!schedule->forward_only[c]) edges->edge[edges->count++] = (struct hapt_schedule_edge){c + 1, c, true, 0};
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

/* True if two edges leave the same submesh over one channel. */
static bool same_channel(const struct hapt_schedule *schedule, const struct hapt_schedule_edge *a,
                         const struct hapt_schedule_edge *b)
{
    const int *submesh_of = schedule->submesh_of;
    if (submesh_of[a->from] != submesh_of[b->from] || a->link != b->link) return false;
    return a->link > 0 || submesh_of[a->to] == submesh_of[b->to];
}

/* Numbers the channels by their first edges. */
static void find_channels(const struct hapt_schedule *schedule, struct hapt_schedule_edges *edges)
{
    const int chunks = schedule->chunk_count;
    for (int e = 0; e < edges->count; e++) {
        const struct hapt_schedule_edge *edge = &edges->edge[e];
        edges->channel_of[e] = -1;
        if (schedule->submesh_of[edge->from] == schedule->submesh_of[edge->to]) continue;
        for (int other = 0; other < e && edges->channel_of[e] < 0; other++)
            if (same_channel(schedule, &edges->edge[other], edge)) edges->channel_of[e] = edges->channel_of[other];
        if (edges->channel_of[e] < 0) edges->channel_of[e] = edges->channel_count++;
        edges->sends[edge->backward * chunks + edge->from] = true;
        edges->receives[edge->backward * chunks + edge->to] = true;
    }
}

/* The forward edge between two chunks of different submeshes; -1: none. */
static int find_edge(const struct hapt_schedule *schedule, int from, int to)
{
    const struct hapt_schedule_edges *edges = &schedule->edges;
    for (int e = edges->out_start[from]; e < edges->out_start[from + 1]; e++)
        if (edges->edge[e].to == to) return edges->channel_of[e] < 0 ? -1 : e;
    return -1;
}

/* One direction of the relation between edges: pair [count][2] from an edge (column `key`) to another. */
static enum hapt_status index_relays(int edge_count, int count, const int *pair, int key, struct hapt_arena *arena,
                                     int **start, int **other)
{
    int *end;
    HAPT_NEW(*start, arena, edge_count + 1);
    HAPT_NEW(*other, arena, count);
    HAPT_NEW(end, arena, edge_count + 1);
    for (int k = 0; k < count; k++) (*start)[pair[2 * k + key] + 1]++;
    for (int e = 0; e < edge_count; e++) (*start)[e + 1] += (*start)[e];
    memcpy(end, *start, (size_t)(edge_count + 1) * sizeof *end);
    for (int k = 0; k < count; k++) (*other)[end[pair[2 * k + key]]++] = pair[2 * k + 1 - key];
    return HAPT_OK;
}

static enum hapt_status find_relays(const struct hapt_schedule *schedule, const struct hapt_schedule_options *options,
                                    struct hapt_schedule_edges *edges, struct hapt_arena *arena)
{
    int *pair, count = 0;
    if (options->relay_count == 0) return HAPT_OK;
    HAPT_NEW(pair, arena, 2 * (int64_t)options->relay_count);
    for (int k = 0; k < options->relay_count; k++) {
        const struct hapt_schedule_relay *relay = &options->relay[k];
        const int in = find_edge(schedule, relay->from, relay->via), out = find_edge(schedule, relay->via, relay->to);
        if (in < 0 || out < 0) continue;
        pair[2 * count] = in, pair[2 * count + 1] = out;
        count++;
    }
    if (count == 0) return HAPT_OK;
    HAPT_TRY(index_relays(edges->count, count, pair, 0, arena, &edges->next_start, &edges->next));
    return index_relays(edges->count, count, pair, 1, arena, &edges->before_start, &edges->before);
}

enum hapt_status hapt_schedule_connect(struct hapt_schedule *schedule, const struct hapt_schedule_options *options,
                                       struct hapt_arena *arena)
{
    struct hapt_schedule_edges *edges = &schedule->edges;
    const struct hapt_schedule_edge *edge = options->edge;
    const int chunks = schedule->chunk_count, most = edge ? options->edge_count : 2 * chunks;
    *edges = (struct hapt_schedule_edges){.given = edge != NULL};
    HAPT_NEW(edges->edge, arena, most);
    HAPT_NEW(edges->in, arena, most);
    HAPT_NEW(edges->channel_of, arena, most);
    HAPT_NEW(edges->out_start, arena, 2 * chunks + 1);
    HAPT_NEW(edges->in_start, arena, 2 * chunks + 1);
    HAPT_NEW(edges->sends, arena, 2 * chunks);
    HAPT_NEW(edges->receives, arena, 2 * chunks);
    if (!edge) connect_neighbours(schedule, edges);
    for (int e = 0; edge && e < options->edge_count; e++) {
        const bool falls = edge[e].to < edge[e].from;
        HAPT_ASSERT(edge[e].from >= 0 && edge[e].from < chunks && edge[e].to >= 0 && edge[e].to < chunks);
        HAPT_ASSERT(edge[e].from != edge[e].to && edge[e].backward == falls);
        edges->edge[edges->count++] = edge[e];
    }
    qsort(edges->edge, (size_t)edges->count, sizeof *edges->edge, compare_edges);
    index_edges(schedule, edges);
    find_channels(schedule, edges);
    return find_relays(schedule, options, edges, arena);
}
