/*
 * The integer program of a range, over the kinds k of its units, n[k] units of a kind:
 *
 *     minimise sum t[k] x[k]   subject to   sum b[k] x[k] >= parts / 12 * sum b[k] n[k],   0 <= x[k] <= n[k] integers
 *
 * x[k] units make all their activations again. Each takes t[k] longer than a unit that does not, and frees b[k] more.
 */
#include "hapt/unit_choice.h"

#include <string.h>

#include "hapt/layers.h"
#include "hapt/ops.h"
#include "hapt/sharding.h"
#include "hapt/solve.h"

/* Operations in the time of a byte to or from memory. Data sheets of V100 to H100 in 16 bits give 100 to 300, and
 * products reach half of the peak rate. */
#define OPERATIONS_PER_BYTE 100.0
/* The choice may take so much longer than the best one; that saves most of the nodes. */
#define GAP 1e-3

struct kind {
    int first_unit;
    double time[2], bytes[2]; /* of a selective unit, and of one that makes all again */
};

struct answer {
    const struct answer *next;
    bool selective;
    int parts;
    int *units, *full; /* [kind_count] in the range, and those of them that make all again */
};

enum { BUCKETS = 4096 };
struct hapt_unit_choices {
    const struct hapt_graph *graph;
    const struct hapt_unit *unit;
    bool measured; /* the kinds are */
    int count, kind_count;
    int *kind_of; /* [count] */
    struct kind *kind;
    int *counted; /* [kind_count] scratch */
    struct hapt_arena *arena;
    const struct answer **bucket; /* [BUCKETS] */
};

/* Sets kind_of, and the first unit of each kind. */
static void find_kinds(struct hapt_unit_choices *choices)
{
    for (int u = 0; u < choices->count; u++) {
        int k = 0;
        while (k < choices->kind_count && choices->unit[choices->kind[k].first_unit].kind != choices->unit[u].kind) k++;
        if (k == choices->kind_count) choices->kind[choices->kind_count++].first_unit = u;
        choices->kind_of[u] = k;
    }
}

static double operations(const struct hapt_graph *graph, const struct hapt_op *op)
{
    double bytes = 0;
    for (int i = 0; i < op->input_count; i++)
        if (op->input[i] >= 0) bytes += (double)hapt_tensor_bytes(&graph->tensor[op->input[i]]);
    for (int k = 0; k < op->output_count; k++)
        if (op->output[k] >= 0) bytes += (double)hapt_tensor_bytes(&graph->tensor[op->output[k]]);
    return hapt_op_flops(graph, op, 1) + OPERATIONS_PER_BYTE * bytes;
}

static void time_kinds(struct hapt_unit_choices *choices, const struct hapt_sharding *sharding)
{
    for (int o = sharding->graph->forward_count; o < sharding->reduce_first; o++) {
        const int unit = sharding->repeats[o];
        if (unit < 0 || choices->kind[choices->kind_of[unit]].first_unit != unit) continue;
        struct kind *kind = &choices->kind[choices->kind_of[unit]];
        const double more = operations(sharding->graph, &sharding->graph->op[o]);
        kind->time[1] += more;
        if (sharding->light[o]) kind->time[0] += more;
    }
}

/* A unit frees what a slot for it alone holds less. */
static enum hapt_status size_kinds(struct hapt_unit_choices *choices, const struct hapt_sharding *sharding,
                                   struct hapt_arena *scratch)
{
    const struct hapt_memory_options options = {.slots = 1};
    struct hapt_memory_ranges *ranges;
    struct hapt_memory_work *work;
    unsigned char *choice;
    HAPT_TRY(hapt_memory_ranges_create(sharding, &options, scratch, &ranges));
    HAPT_TRY(hapt_memory_work_create(ranges, scratch, &work));
    HAPT_NEW(choice, scratch, choices->count);
    for (int k = 0; k < choices->kind_count; k++) {
        struct kind *kind = &choices->kind[k];
        const struct hapt_unit *unit = &choices->unit[kind->first_unit];
        double slot[3] = {0};
        for (int what = HAPT_UNIT_KEPT; what <= HAPT_UNIT_FULL; what++) {
            struct hapt_memory_bytes figures;
            choice[kind->first_unit] = (unsigned char)what;
            HAPT_TRY(hapt_memory_ranges_of(ranges, unit->first_op, unit->end_op, choice, work, &figures));
            slot[what] = (double)figures.activation_bytes;
        }
        kind->bytes[0] = slot[HAPT_UNIT_KEPT] - slot[HAPT_UNIT_SELECTIVE];
        kind->bytes[1] = slot[HAPT_UNIT_KEPT] - slot[HAPT_UNIT_FULL];
    }
    return HAPT_OK;
}

static enum hapt_status measure_kinds(struct hapt_unit_choices *choices, struct hapt_arena *scratch)
{
    struct hapt_sharding *sharding;
    if (choices->measured) return HAPT_OK;
    HAPT_TRY(hapt_sharding_trivial(choices->graph, scratch, &sharding));
    HAPT_TRY(hapt_sharding_recompute(sharding, choices->unit, choices->count, scratch, &sharding));
    time_kinds(choices, sharding);
    choices->measured = true;
    return size_kinds(choices, sharding, scratch);
}

enum hapt_status hapt_unit_choices_create(const struct hapt_graph *graph, const struct hapt_unit *unit, int count,
                                          struct hapt_arena *arena, struct hapt_unit_choices **out)
{
    struct hapt_unit_choices *choices;
    HAPT_NEW(choices, arena, 1);
    choices->graph = graph;
    choices->unit = unit;
    choices->count = count;
    choices->arena = arena;
    HAPT_NEW(choices->kind_of, arena, count);
    HAPT_NEW(choices->kind, arena, count);
    HAPT_NEW(choices->counted, arena, count);
    HAPT_NEW(choices->bucket, arena, BUCKETS);
    find_kinds(choices);
    *out = choices;
    return HAPT_OK;
}

bool hapt_unit_choices_differ(const struct hapt_unit_choices *choices)
{
    return choices->kind_count > 1;
}

/* The integer program of `answer`, whose units are given. */
static enum hapt_status solve(struct hapt_unit_choices *choices, struct answer *answer, struct hapt_arena *scratch)
{
    const int kinds = choices->kind_count;
    struct hapt_lp_solution solution;
    struct hapt_lp *lp;
    double *bytes, most = 0;
    bool *integer;
    HAPT_TRY(measure_kinds(choices, scratch));
    HAPT_TRY(hapt_lp_create(scratch, kinds, 1, kinds, &lp));
    HAPT_NEW(bytes, scratch, kinds);
    HAPT_NEW(integer, scratch, kinds);
    for (int k = 0; k < kinds; k++) {
        const struct kind *kind = &choices->kind[k];
        const int less = answer->selective;
        const double more_s = kind->time[1] - (less ? kind->time[0] : 0);
        integer[k] = true;
        lp->cost[k] = more_s > 0 ? more_s : 0;
        lp->upper[k] = answer->units[k];
        bytes[k] = kind->bytes[1] - (less ? kind->bytes[0] : 0);
        if (bytes[k] < 0) bytes[k] = 0;
        most += bytes[k] * answer->units[k];
    }
    /* Less than a byte below, so that rounding takes no further unit. */
    hapt_lp_add_row(lp, most * answer->parts / HAPT_RECOMPUTE_PARTS - 0.5, INFINITY, kinds, NULL, bytes);
    HAPT_TRY(hapt_milp_solve(lp, integer, GAP, scratch, &solution));
    for (int k = 0; k < kinds; k++) {
        /* All units satisfy the row, so there is an optimum; without a proof of it, all do. */
        const double full = solution.x ? solution.x[k] : answer->units[k];
        answer->full[k] = (int)(full + 0.5);
    }
    return HAPT_OK;
}

static uint64_t hash_of(const int *units, int kinds, bool selective, int parts)
{
    const int rest[2] = {selective, parts};
    return hapt_hash(hapt_hash(0, rest, sizeof rest), units, (size_t)kinds * sizeof *units);
}

/* The answer for choices->counted units of each kind. */
static enum hapt_status answer_for(struct hapt_unit_choices *choices, bool selective, int parts, const int **full)
{
    const int kinds = choices->kind_count;
    const size_t bytes = (size_t)kinds * sizeof(int);
    const struct answer **bucket = &choices->bucket[hash_of(choices->counted, kinds, selective, parts) % BUCKETS];
    struct hapt_arena scratch;
    struct answer *made;
    for (const struct answer *old = *bucket; old; old = old->next) {
        if (old->selective != selective || old->parts != parts || memcmp(old->units, choices->counted, bytes) != 0)
            continue;
        *full = old->full;
        return HAPT_OK;
    }
    HAPT_NEW(made, choices->arena, 1);
    HAPT_NEW(made->units, choices->arena, kinds);
    HAPT_NEW(made->full, choices->arena, kinds);
    memcpy(made->units, choices->counted, bytes);
    made->selective = selective;
    made->parts = parts;
    hapt_arena_init(&scratch);
    const enum hapt_status status = solve(choices, made, &scratch);
    hapt_arena_release(&scratch);
    HAPT_TRY(status);
    made->next = *bucket;
    *bucket = made;
    *full = made->full;
    return HAPT_OK;
}

static enum hapt_status choose_by_bytes(struct hapt_unit_choices *choices, int first, int end, bool selective,
                                        int parts, unsigned char *choice)
{
    const int *full;
    memset(choices->counted, 0, (size_t)choices->kind_count * sizeof *choices->counted);
    for (int u = first; u < end; u++) choices->counted[choices->kind_of[u]]++;
    HAPT_TRY(answer_for(choices, selective, parts, &full));
    memcpy(choices->counted, full, (size_t)choices->kind_count * sizeof *full);
    for (int u = first; u < end; u++)
        if (choices->counted[choices->kind_of[u]]-- > 0) choice[u] = HAPT_UNIT_FULL;
    return HAPT_OK;
}

enum hapt_status hapt_unit_choose(struct hapt_unit_choices *choices, int first_op, int end_op, int recompute,
                                  unsigned char *choice, int *first, int *end)
{
    const struct hapt_unit *unit = choices->unit;
    const int parts = hapt_recompute_parts(recompute);
    const bool selective = hapt_recompute_is_selective(recompute);
    *first = 0;
    while (*first < choices->count && unit[*first].first_op < first_op) ++*first;
    for (*end = *first; *end < choices->count && unit[*end].end_op <= end_op; ++*end)
        choice[*end] = selective ? HAPT_UNIT_SELECTIVE : HAPT_UNIT_KEPT;
    if (recompute >= HAPT_RECOMPUTE_BY_BYTES && hapt_unit_choices_differ(choices))
        return choose_by_bytes(choices, *first, *end, selective, parts, choice);
    const int full = ((*end - *first) * parts + HAPT_RECOMPUTE_PARTS - 1) / HAPT_RECOMPUTE_PARTS;
    memset(choice + *first, HAPT_UNIT_FULL, (size_t)full);
    return HAPT_OK;
}
