/*
 * Execution traces of MLCommons Chakra: the graph of one rank.
 *
 * All dependencies are data_deps, because the feeders of Chakra follow these alone:
 *   computation   the computation before it, the messages it needs, and the send whose transfer slot it fills
 *   send          the computation that made the message
 *   receive       the computation that freed the transfer slot, and the sends that passed its message on
 */
#include "emit_chakra.h"

#include <string.h>

enum { NO_NODE = -1 };

struct state {
    const struct chakra_writer *writer;
    int64_t next, computed; /* nodes: the next one, the last computation */
    int64_t **message;      /* [channel_count][message] its node on this rank */
    int needed_count;
    int64_t needed[CHAKRA_MOST_NEEDED]; /* by the next computation */
    int held_count;
    int64_t held[CHAKRA_MOST_NEEDED]; /* sends from the slot of the next receive */
};

static enum hapt_status begin(struct emit_trace *trace, const struct chakra_writer *writer, struct hapt_arena *arena)
{
    const struct emit_step *step = trace->step;
    struct state *state;
    HAPT_NEW(state, arena, 1);
    state->writer = writer;
    state->computed = NO_NODE;
    HAPT_NEW(state->message, arena, step->channel_count);
    for (int c = 0; c < step->channel_count; c++) {
        const struct emit_channel *channel = &step->channel[c];
        if (channel->from == trace->submesh || channel->to == trace->submesh)
            HAPT_NEW(state->message[c], arena, step->schedule->microbatches);
    }
    trace->state = state;
    writer->begin(trace->file, trace->submesh);
    return HAPT_OK;
}

static enum hapt_status begin_json(struct emit_trace *trace, struct hapt_arena *arena)
{
    return begin(trace, &chakra_json, arena);
}

static enum hapt_status begin_et(struct emit_trace *trace, struct hapt_arena *arena)
{
    return begin(trace, &chakra_et, arena);
}

static void need(int *count, int64_t needed[CHAKRA_MOST_NEEDED], int64_t node)
{
    if (node == NO_NODE) return;
    HAPT_ASSERT(*count < CHAKRA_MOST_NEEDED);
    needed[(*count)++] = node;
}

static void write_node(struct emit_trace *trace, struct chakra_node *node)
{
    struct state *state = trace->state;
    node->id = state->next++;
    state->writer->write(trace->file, node);
}

static void compute(struct emit_trace *trace, const char *name, const struct hapt_instruction *at, double time_s)
{
    struct state *state = trace->state;
    struct chakra_node node = {.type = CHAKRA_COMP_NODE, .needed_count = state->needed_count, .time_s = time_s};
    if (at->microbatch < 0)
        snprintf(node.name, sizeof node.name, "%s chunk %d", name, at->chunk);
    else
        snprintf(node.name, sizeof node.name, "%s chunk %d microbatch %d", name, at->chunk, at->microbatch);
    memcpy(node.needed, state->needed, sizeof node.needed);
    need(&node.needed_count, node.needed, state->computed);
    write_node(trace, &node);
    state->needed_count = 0;
    state->computed = node.id;
}

static void communicate(struct emit_trace *trace, const struct emit_channel *channel, int at, int type)
{
    struct state *state = trace->state;
    struct chakra_node node = {.type = type, .time_s = channel->cost_s, .channel = channel};
    const char *does = type == CHAKRA_COMM_SEND_NODE ? "send" : "receive";
    const int from = channel->from_chunk, to = channel->to_chunk;
    const char *what = from < to ? "activations" : "gradients";
    if (from < 0)
        snprintf(node.name, sizeof node.name, "%s tied gradients", does);
    else if (to == from + 1 || from == to + 1)
        snprintf(node.name, sizeof node.name, "%s %s behind chunk %d microbatch %d", does, what, from < to ? from : to,
                 at);
    else
        snprintf(node.name, sizeof node.name, "%s %s from chunk %d to chunk %d microbatch %d", does, what, from, to,
                 at);
    need(&node.needed_count, node.needed, state->computed);
    for (int k = 0; k < state->held_count; k++) need(&node.needed_count, node.needed, state->held[k]);
    state->held_count = 0;
    write_node(trace, &node);
    state->message[channel->index][at] = node.id;
}

static void post(struct emit_trace *trace, const struct emit_channel *channel, int at)
{
    communicate(trace, channel, at, CHAKRA_COMM_RECV_NODE);
}

static void send(struct emit_trace *trace, const struct emit_channel *channel, int at)
{
    communicate(trace, channel, at, CHAKRA_COMM_SEND_NODE);
}

static void passes_on(struct emit_trace *trace, const struct emit_channel *channel, int at)
{
    struct state *state = trace->state;
    need(&state->held_count, state->held, state->message[channel->index][at]);
}

static void wait(struct emit_trace *trace, const struct emit_channel *channel, int at)
{
    struct state *state = trace->state;
    need(&state->needed_count, state->needed, state->message[channel->index][at]);
}

static void end(struct emit_trace *trace)
{
    const struct state *state = trace->state;
    state->writer->end(trace->file);
}

static const struct emit_file no_files[] = {{NULL, NULL}};

#define CHAKRA(name, begins)                                                                                 \
    {                                                                                                        \
        .file_name = name, .begin = begins, .compute = compute, .post = post, .receive = wait, .send = send, \
        .sent = wait, .passes_on = passes_on, .end = end, .file = no_files                                   \
    }
const struct emit_functions emit_chakra_json = CHAKRA("rank.%d.json", begin_json);
const struct emit_functions emit_chakra_et = CHAKRA("rank.%d.et", begin_et);
