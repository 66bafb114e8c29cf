/* How gradients of parameters end: the collectives of an outer axis once a step, seen from the inner axis. */
#include <math.h>
#include <string.h>

#include "synthesis_private.h"

#define NONE (-1)

struct walk { /* the cheapest sequences from one written layout */
    int length, chain[MOST_REDUCES];
    double arrive_s[MOST_REDUCES + 1][MOST_LAYOUTS], need_s[MOST_REDUCES + 1][MOST_LAYOUTS];
    int source[MOST_REDUCES + 1][MOST_LAYOUTS]; /* by need: the layout that it arrived in */
    int choice[MOST_REDUCES][MOST_LAYOUTS];     /* by the next arrival */
};

static int tensor_at(const struct problem *problem, int tensor, const int *chain, int k)
{
    return k == 0 ? tensor : problem->graph->op[problem->reduce[chain[k - 1]].op].output[0];
}

int hapt_ending_tensor(const struct problem *problem, int object, const struct ending_sequence *sequence, int k)
{
    return tensor_at(problem, problem->object[object].tensor, sequence->chain, k);
}

/* Lists the operators that follow a gradient. */
static int list_chain(const struct problem *problem, int tensor, int *chain)
{
    int length = 0;
    for (int r = problem->reduced_by[tensor]; r != NONE; length++) {
        HAPT_ASSERT(length < MOST_REDUCES);
        chain[length] = r;
        r = problem->reduced_by[problem->graph->op[problem->reduce[r].op].output[0]];
    }
    return length;
}

/* The slowest kind of device determines a collective's time. */
static double seconds_of(const struct problem *problem, const struct choice *choice)
{
    double most = 0;
    for (int j = 0; j < problem->classes; j++) most = fmax(most, choice->compute_s[j]);
    return most;
}

static void convert(const struct layouts *layouts, struct walk *walk, int k)
{
    for (int to = 0; to < layouts->count; to++) {
        walk->need_s[k][to] = walk->arrive_s[k][to];
        walk->source[k][to] = to;
        for (int from = 0; from < layouts->count; from++) {
            const double seconds = walk->arrive_s[k][from] + layouts->convert_s[from][to];
            if (from == to || !(seconds < walk->need_s[k][to])) continue;
            walk->need_s[k][to] = seconds;
            walk->source[k][to] = from;
        }
    }
}

static void walk_from(const struct problem *problem, int tensor, int written, struct walk *walk)
{
    walk->length = list_chain(problem, tensor, walk->chain);
    for (int k = 0; k <= walk->length; k++)
        for (int l = 0; l < MOST_LAYOUTS; l++) walk->arrive_s[k][l] = INFINITY;
    walk->arrive_s[0][written] = 0;
    for (int k = 0; k <= walk->length; k++) {
        convert(problem->layouts[tensor_at(problem, tensor, walk->chain, k)], walk, k);
        if (k == walk->length) break;
        const struct step *step = &problem->reduce[walk->chain[k]];
        for (int c = 0; c < step->choice_count; c++) {
            const int to = step->choice[c].output[0];
            const double seconds = walk->need_s[k][step->choice[c].input[0]] + seconds_of(problem, &step->choice[c]);
            if (!(seconds < walk->arrive_s[k + 1][to])) continue;
            walk->arrive_s[k + 1][to] = seconds;
            walk->choice[k][to] = c;
        }
    }
}

static void trace(const struct problem *problem, const struct walk *walk, int wanted, struct ending_sequence *sequence)
{
    sequence->length = walk->length;
    int layout = walk->source[walk->length][wanted];
    sequence->arrive[walk->length] = layout;
    for (int k = walk->length - 1; k >= 0; k--) {
        sequence->chain[k] = walk->chain[k];
        sequence->choice[k] = walk->choice[k][layout];
        sequence->need[k] = problem->reduce[walk->chain[k]].choice[sequence->choice[k]].input[0];
        sequence->arrive[k] = layout = walk->source[k][sequence->need[k]];
    }
}

void hapt_ending_trace(const struct problem *problem, int object, int written, int wanted,
                       struct ending_sequence *sequence)
{
    struct walk walk;
    walk_from(problem, problem->object[object].tensor, written, &walk);
    trace(problem, &walk, wanted, sequence);
}

static void add_bytes(const struct problem *problem, int tensor, int layout, double *bytes)
{
    for (int j = 0; j < problem->classes; j++) bytes[j] += layout_bytes(problem->layouts[tensor], layout, j);
}

/* All-reduces of this axis and of the outer one work in place. */
static void count_bytes(const struct problem *problem, int tensor, int written, int wanted,
                        const struct ending_sequence *sequence, double *bytes)
{
    add_bytes(problem, tensor, written, bytes);
    for (int k = 0; k <= sequence->length; k++) {
        const int at = tensor_at(problem, tensor, sequence->chain, k),
                  need = k < sequence->length ? sequence->need[k] : wanted;
        if (need != sequence->arrive[k] && !(sequence->arrive[k] == PARTIAL && need == REPLICATED))
            add_bytes(problem, at, need, bytes);
        if (k == sequence->length) break;
        const struct hapt_op *op = &problem->graph->op[problem->reduce[sequence->chain[k]].op];
        const bool sums = hapt_op_type_at(op->type)->collective == HAPT_COLLECTIVE_ALL_REDUCE;
        if (!sums || problem->written_by[op->output[0]] > 1)
            add_bytes(problem, op->output[0], sequence->arrive[k + 1], bytes);
    }
}

static void fill(struct problem *problem, int tensor, struct ending *ending)
{
    const int count = problem->layouts[tensor]->count;
    for (int from = 0; from < MOST_LAYOUTS; from++)
        for (int to = 0; to < MOST_LAYOUTS; to++) ending->seconds[from][to] = INFINITY;
    for (int from = 0; from < count; from++) {
        struct walk walk;
        walk_from(problem, tensor, from, &walk);
        for (int k = 0; k < walk.length; k++)
            problem->joins_parts =
                problem->joins_parts ||
                hapt_op_type_at(problem->graph->op[problem->reduce[walk.chain[k]].op].type)->collective ==
                    HAPT_COLLECTIVE_NONE;
        for (int to = 0; to < count; to++) {
            struct ending_sequence sequence;
            ending->seconds[from][to] = walk.need_s[walk.length][to];
            if (!isfinite(ending->seconds[from][to])) continue;
            trace(problem, &walk, to, &sequence);
            count_bytes(problem, tensor, from, to, &sequence, ending->bytes[from][to]);
        }
    }
}

enum hapt_status hapt_endings_build(struct problem *problem)
{
    struct ending **unique, *made = NULL;
    int count = 0;
    HAPT_NEW(unique, problem->arena, problem->object_count);
    for (int k = 0; k < problem->object_count; k++) {
        struct object *object = &problem->object[k];
        if (object->kind != OBJECT_PARAMETER_GRADIENT) continue;
        if (!made) HAPT_NEW(made, problem->arena, 1);
        memset(made, 0, sizeof *made);
        fill(problem, object->tensor, made);
        for (int u = 0; u < count && !object->ending; u++)
            if (!memcmp(unique[u], made, sizeof *made)) object->ending = unique[u];
        if (object->ending) continue;
        object->ending = unique[count++] = made;
        made = NULL;
    }
    return HAPT_OK;
}
