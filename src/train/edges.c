/* Builds the edges between chunks from the boundary tensors of their programs. */
#include "hapt/train.h"

/* The boundary tensor of a program that is a version of `origin`, or -1. */
static int version_in(const struct hapt_program *program, const struct hapt_boundary *boundary, int origin)
{
    for (int i = 0; i < boundary->count; i++)
        if (program->origin[boundary->tensor[i]] == origin) return boundary->tensor[i];
    return -1;
}

/* The chunk that sends `tensor` to chunk `to`, or -1; *sent: the tensor's number there. */
static int source(struct hapt_program *const *program, int chunks, int to, bool backward, int tensor, int *sent)
{
    const int origin = program[to]->origin[tensor];
    const int step = backward ? 1 : -1; /* gradients come from the nearest writer behind, which has the sum so far */
    for (int c = to + step; c >= 0 && c < chunks; c += step) {
        *sent = version_in(program[c], backward ? &program[c]->backward_out : &program[c]->forward_out, origin);
        if (*sent >= 0) return c;
    }
    return -1;
}

struct building {
    struct hapt_program *const *program;
    int chunks;
    const struct hapt_plan *plan; /* NULL: no relays */
    int *reader;                  /* [chunks] */
};

/* The chunk that sends an activation to chunk `to`: its producer, or a reader before, which passes it on. -1: none. */
static int sender(const struct building *building, int to, int tensor, int *sent)
{
    struct hapt_program *const *program = building->program;
    const int producer = source(program, building->chunks, to, false, tensor, sent);
    const int origin = program[to]->origin[tensor];
    int readers = 0;
    if (!building->plan || producer < 0) return producer;
    for (int c = producer + 1; c <= to; c++)
        if (version_in(program[c], &program[c]->forward_in, origin) >= 0) building->reader[readers++] = c;
    const int from = hapt_plan_source(building->plan, producer, building->reader, readers - 1);
    if (from != producer) *sent = version_in(program[from], &program[from]->forward_in, origin);
    return from;
}

/* True if the sender received the tensor. */
static bool is_received(const struct hapt_program *program, int tensor)
{
    for (int i = 0; i < program->forward_in.count; i++)
        if (program->forward_in.tensor[i] == tensor) return true;
    return false;
}

/* Adds the edge, if a tensor goes over it. */
static enum hapt_status add_edge(const struct building *building, struct hapt_edge edge, struct hapt_arena *arena,
                                 struct hapt_edges *made)
{
    const struct hapt_program *to = building->program[edge.to];
    const struct hapt_boundary *in = edge.backward ? &to->backward_in : &to->forward_in;
    HAPT_NEW(edge.tensor, arena, in->count);
    HAPT_NEW(edge.source, arena, in->count);
    for (int i = 0; i < in->count; i++) {
        int sent;
        const int from = edge.backward
                             ? source(building->program, building->chunks, edge.to, true, in->tensor[i], &sent)
                             : sender(building, edge.to, in->tensor[i], &sent);
        if (from != edge.from) continue;
        if (!edge.backward && is_received(building->program[from], sent) != edge.relayed) continue;
        edge.source[edge.count] = sent;
        edge.tensor[edge.count++] = in->tensor[i];
    }
    if (edge.count > 0) made->edge[made->count++] = edge;
    return HAPT_OK;
}

enum hapt_status hapt_edges_build(struct hapt_program *const *program, int chunks, const struct hapt_plan *plan,
                                  struct hapt_arena *arena, struct hapt_edges **edges)
{
    struct building building = {.program = program, .chunks = chunks, .plan = plan};
    struct hapt_edges *made;
    HAPT_NEW(made, arena, 1);
    HAPT_NEW(made->edge, arena, 3 * chunks * chunks);
    HAPT_NEW(building.reader, arena, chunks);
    for (int backward = 0; backward < 2; backward++)
        for (int from = 0; from < chunks; from++)
            for (int to = 0; to < chunks; to++)
                for (int relayed = 0; relayed < (backward ? 1 : 2); relayed++) {
                    const struct hapt_edge edge = {.from = from, .to = to, .backward = backward, .relayed = relayed};
                    HAPT_TRY(add_edge(&building, edge, arena, made));
                }
    for (int c = 0; c < chunks; c++)
        for (int backward = 0; backward < 2; backward++) {
            const struct hapt_boundary *in = backward ? &program[c]->backward_in : &program[c]->forward_in;
            int sent;
            for (int i = 0; i < in->count; i++)
                if (source(program, chunks, c, backward, in->tensor[i], &sent) < 0)
                    return hapt_fail(HAPT_ERR_INTERNAL, NULL, "no stage sends %s to stage %d",
                                     program[c]->graph->tensor[in->tensor[i]].name, c);
        }
    *edges = made;
    return HAPT_OK;
}

enum hapt_status hapt_ties_find(struct hapt_program *const *program, int chunks, struct hapt_arena *arena,
                                struct hapt_ties **ties)
{
    const struct hapt_graph *graph = program[0]->sharding->source;
    struct hapt_ties *made;
    HAPT_NEW(made, arena, 1);
    HAPT_NEW(made->tie, arena, graph->tensor_count);
    for (int t = 0; t < graph->tensor_count; t++) {
        if (graph->tensor[t].kind != HAPT_TENSOR_PARAMETER || graph->tensor[t].gradient < 0) continue;
        struct hapt_tie tie = {.tensor = t};
        HAPT_NEW(tie.chunk, arena, chunks);
        for (int c = 0; c < chunks; c++)
            if (program[c]->local[program[c]->graph->tensor[t].gradient] >= 0) tie.chunk[tie.chunk_count++] = c;
        if (tie.chunk_count > 1) made->tie[made->count++] = tie;
    }
    *ties = made;
    return HAPT_OK;
}
