/*
 * Execution traces of MLCommons Chakra in the JSON form of its feeder (mlcommons/chakra, src/feeder/json_node.cpp): a
 * file per rank, {"workload_graph": [node, ...]}. The schema's binary form has the same fields (et_def.proto).
 *
 * All dependencies are data_deps, because readers of this form follow these alone:
 *   computation   the computation before it, the messages it needs, and the send whose transfer slot it fills
 *   send          the computation that made the message
 *   receive       the computation that freed the transfer slot
 * "runtime" is in whole microseconds, as in the schema; "time_s" is exact.
 */
#include <math.h>

#include "emit.h"

enum { COMP_NODE = 4, COMM_SEND_NODE = 5, COMM_RECV_NODE = 6 }; /* NodeType of et_def.proto */
enum { NO_NODE = -1, MOST_NEEDED = 64 };

struct state {
    int64_t next, computed; /* nodes: the next one, the last computation */
    int64_t **message;      /* [channel_count][message] its node on this rank */
    int needed_count;
    int64_t needed[MOST_NEEDED]; /* by the next computation */
};

static enum hapt_status begin(struct emit_trace *trace, struct hapt_arena *arena)
{
    const struct emit_step *step = trace->step;
    struct state *state;
    HAPT_NEW(state, arena, 1);
    state->computed = NO_NODE;
    HAPT_NEW(state->message, arena, step->channel_count);
    for (int c = 0; c < step->channel_count; c++) {
        const struct emit_channel *channel = &step->channel[c];
        if (channel->from == trace->submesh || channel->to == trace->submesh)
            HAPT_NEW(state->message[c], arena, step->schedule->microbatches);
    }
    trace->state = state;
    fprintf(trace->file, "{\"format\": \"chakra\", \"version\": \"0.0.4\", \"rank\": %d, \"workload_graph\": [",
            trace->submesh);
    return HAPT_OK;
}

/* Begins a node and writes its dependencies; NO_NODE is none. */
static void open_node(struct emit_trace *trace, const char *name, int chunk, int microbatch, int type, int count,
                      const int64_t *needed)
{
    struct state *state = trace->state;
    const char *comma = "";
    fprintf(trace->file, "%s\n{\"Id\": %lld, \"Name\": \"%s", state->next > 0 ? "," : "", (long long)state->next, name);
    if (chunk >= 0) fprintf(trace->file, " chunk %d", chunk);
    if (microbatch >= 0) fprintf(trace->file, " microbatch %d", microbatch);
    fprintf(trace->file, "\", \"NodeType\": %d, \"is_cpu_op\": false, \"data_deps\": [", type);
    for (int i = 0; i < count; i++) {
        if (needed[i] == NO_NODE) continue;
        fprintf(trace->file, "%s%lld", comma, (long long)needed[i]);
        comma = ", ";
    }
    fprintf(trace->file, "]");
    state->next++;
}

static void need(struct state *state, int64_t node)
{
    HAPT_ASSERT(state->needed_count < MOST_NEEDED);
    state->needed[state->needed_count++] = node;
}

static void compute(struct emit_trace *trace, const char *name, const struct hapt_instruction *at, double time_s)
{
    struct state *state = trace->state;
    need(state, state->computed);
    open_node(trace, name, at->chunk, at->microbatch, COMP_NODE, state->needed_count, state->needed);
    state->needed_count = 0;
    state->computed = state->next - 1;
    fprintf(trace->file, ", \"runtime\": %.0f, \"time_s\": %.17g}", time_s * 1e6, time_s);
}

static void communicate(struct emit_trace *trace, const struct emit_channel *channel, int at, int type)
{
    struct state *state = trace->state;
    const bool tied = channel->index >= EMIT_DIRECTIONS * trace->step->schedule->chunk_count;
    const char *what[2][2] = {{"send activations", "send gradients"}, {"receive activations", "receive gradients"}};
    const char *what_tied[2] = {"send tied gradients", "receive tied gradients"};
    const int receives = type == COMM_RECV_NODE;
    const char *name = tied ? what_tied[receives] : what[receives][channel->index % EMIT_DIRECTIONS];
    state->message[channel->index][at] = state->next;
    open_node(trace, name, -1, tied ? -1 : at, type, 1, &state->computed);
    fprintf(trace->file,
            ", \"runtime\": 0, \"comm_src\": %d, \"comm_dst\": %d, \"comm_tag\": %d, \"comm_size\": %.0f, "
            "\"time_s\": %.17g}",
            channel->from, channel->to, channel->index, round(channel->bytes), channel->cost_s);
}

static void post(struct emit_trace *trace, const struct emit_channel *channel, int at)
{
    communicate(trace, channel, at, COMM_RECV_NODE);
}

static void send(struct emit_trace *trace, const struct emit_channel *channel, int at)
{
    communicate(trace, channel, at, COMM_SEND_NODE);
}

static void wait(struct emit_trace *trace, const struct emit_channel *channel, int at)
{
    struct state *state = trace->state;
    need(state, state->message[channel->index][at]);
}

/* Nothing follows the waits for the last sends. */
static void end(struct emit_trace *trace)
{
    fprintf(trace->file, "\n]}\n");
}

static const struct emit_file no_files[] = {{NULL, NULL}};

const struct emit_functions emit_chakra = {.file_name = "rank.%d.json",
                                           .begin = begin,
                                           .compute = compute,
                                           .post = post,
                                           .receive = wait,
                                           .send = send,
                                           .sent = wait,
                                           .end = end,
                                           .file = no_files};
