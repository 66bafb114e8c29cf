/* Which tensor goes from which chunk to which, straight from the boundaries of the chunks' programs. */
#include "hapt/train.h"

static bool holds(const struct hapt_boundary *boundary, int tensor)
{
    for (int i = 0; i < boundary->count; i++)
        if (boundary->tensor[i] == tensor) return true;
    return false;
}

/* The chunk that sends `tensor` to chunk `to`, or -1. */
static int source(struct hapt_program *const *program, int chunks, int to, bool backward, int tensor)
{
    if (backward) { /* the nearest writer behind: the value so far */
        for (int c = to + 1; c < chunks; c++)
            if (holds(&program[c]->backward_out, tensor)) return c;
        return -1;
    }
    for (int c = to - 1; c >= 0; c--)
        if (holds(&program[c]->forward_out, tensor)) return c;
    return -1;
}

enum hapt_status hapt_routes_build(struct hapt_program *const *program, int chunks, struct hapt_arena *arena,
                                   struct hapt_routes **routes)
{
    struct hapt_routes *made;
    HAPT_NEW(made, arena, 1);
    HAPT_NEW(made->route, arena, 2 * chunks * chunks);
    for (int backward = 0; backward < 2; backward++)
        for (int from = 0; from < chunks; from++)
            for (int to = 0; to < chunks; to++) {
                const struct hapt_boundary *in = backward ? &program[to]->backward_in : &program[to]->forward_in;
                struct hapt_route route = {.from = from, .to = to, .backward = backward};
                HAPT_NEW(route.tensor, arena, in->count);
                for (int i = 0; i < in->count; i++)
                    if (source(program, chunks, to, backward, in->tensor[i]) == from)
                        route.tensor[route.count++] = in->tensor[i];
                if (route.count > 0) made->route[made->count++] = route;
            }
    for (int c = 0; c < chunks; c++)
        for (int backward = 0; backward < 2; backward++) {
            const struct hapt_boundary *in = backward ? &program[c]->backward_in : &program[c]->forward_in;
            for (int i = 0; i < in->count; i++)
                if (source(program, chunks, c, backward, in->tensor[i]) < 0)
                    return hapt_fail(HAPT_ERR_INTERNAL, NULL, "no stage sends %s to stage %d",
                                     program[c]->graph->tensor[in->tensor[i]].name, c);
        }
    *routes = made;
    return HAPT_OK;
}

enum hapt_status hapt_ties_find(struct hapt_program *const *program, int chunks, struct hapt_arena *arena,
                                struct hapt_ties **ties)
{
    const struct hapt_graph *graph = program[0]->graph;
    struct hapt_ties *made;
    HAPT_NEW(made, arena, 1);
    HAPT_NEW(made->tie, arena, graph->tensor_count);
    for (int t = 0; t < graph->tensor_count; t++) {
        const int gradient = graph->tensor[t].gradient;
        if (graph->tensor[t].kind != HAPT_TENSOR_PARAMETER || gradient < 0) continue;
        struct hapt_tie tie = {.tensor = t};
        HAPT_NEW(tie.chunk, arena, chunks);
        for (int c = 0; c < chunks; c++)
            if (program[c]->local[gradient] >= 0) tie.chunk[tie.chunk_count++] = c;
        if (tie.chunk_count > 1) made->tie[made->count++] = tie;
    }
    *ties = made;
    return HAPT_OK;
}
