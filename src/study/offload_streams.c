/*
 * Training steps with offload on four streams: a list of operations with dependences in, the steady period out
 * (AutoHete 3.2.2 and 3.3).
 *
 * Streams that run in order get a dependence on the operation before. So the streams of both orders are served by the
 * same loop: an idle stream starts the ready operation with the least key.
 */
#include "hapt/arena.h"
#include "hapt/offload_rivals.h"

enum { STEPS = 3, MOST_EDGES = 24 }; /* 24: edges per block and step, counted over the calls of link_to */

enum kind {
    FETCH_FORWARD, /* weights for FORWARD */
    FORWARD,
    FETCH_BACKWARD, /* weights for RECOMPUTE and BACKWARD */
    RECOMPUTE,
    BACKWARD,
    DEVICE_UPDATE,
    OFFLOAD,
    HOST_UPDATE,
    STEP_END, /* of block 0 only: all updates of a step are done */
    KINDS
};
enum stream { COMPUTE, COPY_IN, COPY_OUT, HOST, EVENT, STREAMS }; /* EVENT: takes no time */

struct operation {
    bool present;
    enum stream stream;
    double seconds, end_s;
    int key;        /* the least key of a stream's ready operations starts first */
    int waits;      /* predecessors that have not ended */
    int first_edge; /* into graph.edge; -1: no successor */
};

struct edge {
    int to, next; /* next of the same predecessor; -1: none */
};

struct graph {
    const struct hapt_offload_case *given;
    struct hapt_offload_choice choice;
    struct hapt_offload_execution execution;
    int L, sequence;
    struct operation *operation; /* [STEPS * KINDS * L] */
    struct edge *edge;
    int edge_count, edge_capacity;
    int tail[STREAMS]; /* the last operation of a stream in order; -1: none */
    int *ready[STREAMS], ready_count[STREAMS];
};

static bool recomputes(const struct graph *graph, int block)
{
    return block < graph->choice.recomputed;
}

static bool state_is_away(const struct graph *graph, int block)
{
    return block >= graph->L - graph->choice.state_away;
}

static bool weights_are_away(const struct graph *graph, int block)
{
    return state_is_away(graph, block) && block < graph->L - graph->choice.state_away + graph->choice.weights_away;
}

/* Updates wait for the last backward pass. */
static bool updates_last(const struct graph *graph)
{
    return graph->execution.clipping || graph->execution.overlap <= HAPT_OFFLOAD_PHASES;
}

static int find(const struct graph *graph, int step, enum kind kind, int block)
{
    return (step * KINDS + (int)kind) * graph->L + block;
}

/* `after` waits for `before`, if both exist. */
static void link_to(struct graph *graph, int before, int after)
{
    struct operation *from = &graph->operation[before];
    if (!from->present || !graph->operation[after].present) return;
    HAPT_ASSERT(graph->edge_count < graph->edge_capacity);
    graph->edge[graph->edge_count] = (struct edge){after, from->first_edge};
    from->first_edge = graph->edge_count++;
    graph->operation[after].waits++;
}

static void append(struct graph *graph, int step, enum kind kind, int block)
{
    static const enum stream stream_of[KINDS] = {COPY_IN, COMPUTE,  COPY_IN, COMPUTE, COMPUTE,
                                                 COMPUTE, COPY_OUT, HOST,    EVENT};
    const struct hapt_offload_case *given = graph->given;
    const double seconds[KINDS] = {given->fetch_s,   given->forward_s,     given->fetch_s,
                                   given->forward_s, given->backward_s,    given->device_update_s,
                                   given->offload_s, given->host_update_s, 0};
    const int at = find(graph, step, kind, block);
    const bool one_stream = graph->execution.overlap == HAPT_OFFLOAD_SYNCHRONOUS && kind != STEP_END;
    const enum stream stream = one_stream ? COMPUTE : stream_of[kind];
    const bool by_block = graph->execution.priority && (stream == COPY_OUT || stream == HOST);
    graph->operation[at] = (struct operation){.present = true,
                                              .stream = stream,
                                              .seconds = seconds[kind],
                                              .key = by_block ? step * graph->L + block : graph->sequence++,
                                              .first_edge = -1};
    if (stream == EVENT || (graph->execution.priority && stream != COMPUTE)) return;
    if (graph->tail[stream] >= 0) link_to(graph, graph->tail[stream], at);
    graph->tail[stream] = at;
}

/* The operations of a step, in the order in which streams without priority run them. */
static void append_step(struct graph *graph, int step)
{
    const int L = graph->L;
    for (int i = 0; i < L; i++) {
        if (state_is_away(graph, i)) append(graph, step, FETCH_FORWARD, i);
        append(graph, step, FORWARD, i);
    }
    for (int i = L - 1; i >= 0; i--) {
        const bool away = state_is_away(graph, i);
        if (weights_are_away(graph, i)) append(graph, step, FETCH_BACKWARD, i);
        if (recomputes(graph, i)) append(graph, step, RECOMPUTE, i);
        append(graph, step, BACKWARD, i);
        if (away) append(graph, step, OFFLOAD, i);
        if (!updates_last(graph)) append(graph, step, away ? HOST_UPDATE : DEVICE_UPDATE, i);
    }
    for (int i = L - 1; updates_last(graph) && i >= 0; i--)
        append(graph, step, state_is_away(graph, i) ? HOST_UPDATE : DEVICE_UPDATE, i);
    append(graph, step, STEP_END, 0);
}

/* The dependences of one block in one step. Those on the same stream follow from the order of computing. */
static void link_block(struct graph *graph, int step, int i)
{
    const int L = graph->L, last_forward = find(graph, step, FORWARD, L - 1);
    const int fetch = find(graph, step, FETCH_FORWARD, i), forward = find(graph, step, FORWARD, i);
    const int again = find(graph, step, FETCH_BACKWARD, i), backward = find(graph, step, BACKWARD, i);
    const int host = find(graph, step, HOST_UPDATE, i), end = find(graph, step, STEP_END, 0);
    link_to(graph, fetch, forward);
    if (graph->execution.overlap == HAPT_OFFLOAD_PHASES && i > 0) link_to(graph, fetch, find(graph, step, FORWARD, 0));
    link_to(graph, i + 2 < L ? find(graph, step, BACKWARD, i + 2) : last_forward, again);
    link_to(graph, again, find(graph, step, recomputes(graph, i) ? RECOMPUTE : BACKWARD, i));
    link_to(graph, backward, find(graph, step, OFFLOAD, i));
    link_to(graph, find(graph, step, OFFLOAD, i), host);
    if (updates_last(graph)) link_to(graph, find(graph, step, BACKWARD, 0), host);
    link_to(graph, host, end);
    link_to(graph, find(graph, step, DEVICE_UPDATE, i), end);
    if (step == 0) return;
    link_to(graph, find(graph, step - 1, HOST_UPDATE, i), fetch);
    if (graph->choice.weights_away > 0)
        link_to(graph, find(graph, step - 1, FETCH_BACKWARD, L - graph->choice.state_away), fetch);
    if (graph->execution.overlap > HAPT_OFFLOAD_WITHIN_STEP) return;
    if (graph->execution.overlap == HAPT_OFFLOAD_WITHIN_STEP) link_to(graph, find(graph, step - 1, STEP_END, 0), fetch);
    if (i == 0) link_to(graph, find(graph, step - 1, STEP_END, 0), forward);
}

static void note_ready(struct graph *graph, int at)
{
    const enum stream stream = graph->operation[at].stream;
    graph->ready[stream][graph->ready_count[stream]++] = at;
}

/* Takes the ready operation with the least key; -1: none. */
static int take(struct graph *graph, enum stream stream)
{
    int *ready = graph->ready[stream], *count = &graph->ready_count[stream], best = 0;
    if (*count == 0) return -1;
    for (int k = 1; k < *count; k++)
        if (graph->operation[ready[k]].key < graph->operation[ready[best]].key) best = k;
    const int at = ready[best];
    ready[best] = ready[--*count];
    return at;
}

/* Fills end_s of all operations. Operations end before others start at the same time. */
static void run_streams(struct graph *graph)
{
    int running[STREAMS] = {-1, -1, -1, -1, -1};
    double now_s = 0;
    for (int at = 0; at < STEPS * KINDS * graph->L; at++)
        if (graph->operation[at].present && graph->operation[at].waits == 0) note_ready(graph, at);
    for (;;) {
        int first = -1;
        for (int stream = 0; stream < STREAMS; stream++) {
            if (running[stream] < 0) {
                running[stream] = take(graph, (enum stream)stream);
                if (running[stream] >= 0)
                    graph->operation[running[stream]].end_s = now_s + graph->operation[running[stream]].seconds;
            }
            if (running[stream] < 0) continue;
            if (first < 0 || graph->operation[running[stream]].end_s < graph->operation[first].end_s)
                first = running[stream];
        }
        if (first < 0) return;
        now_s = graph->operation[first].end_s;
        for (int stream = 0; stream < STREAMS; stream++) {
            if (running[stream] < 0 || graph->operation[running[stream]].end_s > now_s) continue;
            for (int e = graph->operation[running[stream]].first_edge; e >= 0; e = graph->edge[e].next)
                if (--graph->operation[graph->edge[e].to].waits == 0) note_ready(graph, graph->edge[e].to);
            running[stream] = -1;
        }
    }
}

static enum hapt_status measure(struct graph *graph, struct hapt_arena *scratch, double *period_s)
{
    const int L = graph->L, all = STEPS * KINDS * L;
    graph->edge_capacity = MOST_EDGES * STEPS * L;
    HAPT_NEW(graph->operation, scratch, all);
    HAPT_NEW(graph->edge, scratch, graph->edge_capacity);
    for (int stream = 0; stream < STREAMS; stream++) {
        HAPT_NEW(graph->ready[stream], scratch, all);
        graph->tail[stream] = -1;
    }
    for (int step = 0; step < STEPS; step++) append_step(graph, step);
    for (int step = 0; step < STEPS; step++)
        for (int i = 0; i < L; i++) link_block(graph, step, i);
    run_streams(graph);
    *period_s = graph->operation[find(graph, STEPS - 1, FORWARD, L - 1)].end_s -
                graph->operation[find(graph, STEPS - 2, FORWARD, L - 1)].end_s;
    return HAPT_OK;
}

enum hapt_status hapt_offload_period(const struct hapt_offload_case *given, struct hapt_offload_choice choice,
                                     struct hapt_offload_execution execution, double *period_s)
{
    struct graph graph = {.given = given, .choice = choice, .execution = execution, .L = given->block_count};
    struct hapt_arena scratch;
    HAPT_ASSERT(0 <= choice.recomputed && choice.recomputed <= graph.L);
    HAPT_ASSERT(0 <= choice.weights_away && choice.weights_away <= choice.state_away && choice.state_away <= graph.L);
    HAPT_ASSERT(!execution.priority || execution.overlap == HAPT_OFFLOAD_ACROSS_STEPS);
    hapt_arena_init(&scratch);
    const enum hapt_status status = measure(&graph, &scratch, period_s);
    hapt_arena_release(&scratch);
    return status;
}
