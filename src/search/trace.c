/*
 * Selects the one plan of a filled table that the tie rules determine.
 *
 * Prefixes grow stage by stage. The table tells exactly which prefixes can be completed within the budget, so only
 * those of tied optima are kept. The first level that reaches the last layer has the fewest stages. The path through
 * the levels then takes the lexicographically first stage each time.
 */
#include "search.h"

#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define NOWHERE (-1)

/* A prefix: layers [0, layer). It names the next device set, because it includes the boundary behind it. */
struct prefix {
    int layer;
    int used;      /* subclusters as bits, including those of `current` */
    int current;   /* device set of the last stage; NOWHERE before the first */
    int next;      /* device set of the next stage; NOWHERE behind the last layer */
    int devices;   /* used in `current`; mixed: what it takes of the subcluster that it shares with the next */
    int launches;  /* limit for the next stage; the cap: none */
    bool finishes; /* is part of a path to the last layer with the fewest stages */
    double latency_s;
};

struct level {
    struct prefix *prefix;
    int count, room;
};

struct trace {
    const struct search_table *table;
    const struct search_problem *problem;
    double budget_s;
    struct hapt_arena *arena;
};

/* Called for every next stage with which the prefix can be completed. */
typedef enum hapt_status visit_step(const struct trace *trace, void *context, const struct search_candidate *stage,
                                    const struct prefix *to);

static int compare_prefixes(const void *left, const void *right)
{
    const struct prefix *a = left, *b = right;
    const int difference[6] = {a->layer - b->layer, a->used - b->used,       a->current - b->current,
                               a->next - b->next,   a->devices - b->devices, a->launches - b->launches};
    for (int i = 0; i < 6; i++)
        if (difference[i]) return difference[i];
    return 0;
}

/* The subcluster that the next stage shares with the last one. */
static int shared(const struct search_problem *problem, const struct prefix *prefix)
{
    return prefix->current == NOWHERE ? SEARCH_NOTHING_SHARED
                                      : search_shared_subcluster(problem, prefix->current, prefix->next);
}

/* True if a suffix that starts in to->next completes the prefix within the budget. */
static bool completes(const struct trace *trace, const struct prefix *to)
{
    const struct search_table *table = trace->table;
    const struct search_problem *problem = trace->problem;
    const int shared_subcluster = shared(problem, to);
    const bool exact = problem->options->use_all_devices;
    const int room = search_front_devices(problem, to->next) - (shared_subcluster >= 0 ? to->devices : 0);
    const int every = (1 << problem->C) - 1;
    const int taken = shared_subcluster >= 0 ? to->used & ~(1 << shared_subcluster) : to->used;
    for (int g = 0; g < problem->valid_count; g++) {
        const int mask = (int)problem->suffix_state[g].mask;
        if (problem->suffix_state[g].current != to->next || (mask & taken)) continue;
        if (exact && (mask | to->used) != every) continue;
        const struct search_row *row =
            search_row(table, to->layer, search_suffix_state(problem, (unsigned)mask, to->next));
        if (!row || row->start < 0 || room < row->low) continue;
        if (!exact && to->latency_s + table->pool[row->any_end - 1].latency_s > trace->budget_s) continue;
        if (exact && room > row->high) continue;
        const int *start = &table->starts[row->start];
        const int end = start[(room < row->high ? room : row->high) + 1 - row->low];
        for (int i = start[exact ? room - row->low : 0]; i < end; i++) {
            const struct search_point *point = &table->pool[i];
            if (point->launches <= to->launches && to->latency_s + point->latency_s <= trace->budget_s) return true;
        }
    }
    return false;
}

/* True if a prefix that ends at the last layer is a valid plan. `devices`: of the last stage's front subcluster. */
static bool ends_well(const struct trace *trace, const struct prefix *to, int devices, int launches)
{
    const struct search_problem *problem = trace->problem;
    const bool all = to->used == (1 << problem->C) - 1 && devices == search_front_devices(problem, to->current) &&
                     problem->device_set[to->current].ends;
    return launches >= 1 && to->latency_s <= trace->budget_s && (all || !problem->options->use_all_devices);
}

static bool may_go_on(const struct trace *trace, const struct prefix *to, int devices)
{
    const struct search_problem *problem = trace->problem;
    const int shared_subcluster = shared(problem, to), both = to->used & (int)problem->device_set[to->next].clusters;
    if (shared_subcluster == SEARCH_NOT_ALLOWED || both != (shared_subcluster >= 0 ? 1 << shared_subcluster : 0))
        return false;
    if (shared_subcluster == problem->device_set[to->current].front) return true; /* continues in the same subcluster */
    return !problem->options->use_all_devices || devices == search_front_devices(problem, to->current);
}

static enum hapt_status visit_stage(const struct trace *trace, const struct prefix *from,
                                    const struct search_candidate *stage, visit_step *visit, void *context)
{
    const struct search_problem *problem = trace->problem;
    const bool mixed = problem->device_set[from->next].mixed_group >= 0;
    const int devices = stage->devices + (shared(problem, from) >= 0 ? from->devices : 0);
    struct prefix to = {.layer = stage->end,
                        .used = from->used | (int)problem->device_set[from->next].clusters,
                        .current = from->next,
                        .devices = mixed ? 0 : devices};
    if (devices > search_front_devices(problem, to.current)) return HAPT_OK;
    const int launches = stage->launches < from->launches ? stage->launches : from->launches;
    if (stage->end == problem->L) {
        to.next = NOWHERE;
        to.latency_s = from->latency_s + stage->time_s;
        return ends_well(trace, &to, devices, launches) ? visit(trace, context, stage, &to) : HAPT_OK;
    }
    for (to.next = 0; to.next < problem->device_set_count; to.next++) {
        const size_t link = search_link(problem, to.current, to.next, stage->end - 1);
        const int delta = trace->table->delta[link];
        if (delta == UCHAR_MAX || !may_go_on(trace, &to, devices)) continue;
        const int shared_subcluster = shared(problem, &to);
        if (mixed)
            to.devices = shared_subcluster >= 0 ? problem->taken[to.current * problem->C + shared_subcluster] : 0;
        to.latency_s = from->latency_s + (stage->time_s + 2 * problem->comm_s[link]);
        to.launches = launches >= problem->cap ? problem->cap : launches - delta;
        if (completes(trace, &to)) HAPT_TRY(visit(trace, context, stage, &to));
    }
    return HAPT_OK;
}

static enum hapt_status visit_steps(const struct trace *trace, const struct prefix *from, visit_step *visit,
                                    void *context)
{
    const struct search_problem *problem = trace->problem;
    if (from->next == NOWHERE) return HAPT_OK;
    const int list = from->layer * problem->device_set_count + from->next;
    for (int64_t i = trace->table->active_first[list]; i < trace->table->active_end[list]; i++)
        HAPT_TRY(visit_stage(trace, from, &trace->table->active[i], visit, context));
    return HAPT_OK;
}

static enum hapt_status append(struct level *level, const struct prefix *prefix, struct hapt_arena *arena)
{
    if (level->count == level->room) {
        struct prefix *wider;
        const int room = level->room ? 2 * level->room : 64;
        HAPT_NEW(wider, arena, room);
        for (int i = 0; i < level->count; i++) wider[i] = level->prefix[i];
        level->prefix = wider;
        level->room = room;
    }
    level->prefix[level->count++] = *prefix;
    return HAPT_OK;
}

static enum hapt_status grow(const struct trace *trace, void *context, const struct search_candidate *stage,
                             const struct prefix *to)
{
    (void)stage;
    return append(context, to, trace->arena);
}

/* Keeps one prefix per state, with the least latency. */
static void merge(struct level *level)
{
    if (level->count == 0) return;
    qsort(level->prefix, (size_t)level->count, sizeof *level->prefix, compare_prefixes);
    int kept = 0;
    for (int i = 1; i < level->count; i++) {
        struct prefix *last = &level->prefix[kept];
        if (compare_prefixes(last, &level->prefix[i]) != 0)
            level->prefix[++kept] = level->prefix[i];
        else if (level->prefix[i].latency_s < last->latency_s)
            last->latency_s = level->prefix[i].latency_s;
    }
    level->count = kept + 1;
}

static bool has_end(const struct level *level)
{
    for (int i = 0; i < level->count; i++)
        if (level->prefix[i].next == NOWHERE) return true;
    return false;
}

static struct prefix *find(const struct level *level, const struct prefix *key)
{
    return bsearch(key, level->prefix, (size_t)level->count, sizeof *level->prefix, compare_prefixes);
}

struct marking {
    const struct level *behind;
    bool finishes;
};

static enum hapt_status mark(const struct trace *trace, void *context, const struct search_candidate *stage,
                             const struct prefix *to)
{
    (void)trace, (void)stage;
    struct marking *marking = context;
    const struct prefix *known = find(marking->behind, to);
    marking->finishes |= known && known->finishes;
    return HAPT_OK;
}

struct choosing {
    const struct level *behind;
    const struct search_candidate *best; /* stage so far */
    int best_subcluster;                 /* its name by search_name */
    struct level reached;                /* prefixes that end with it */
};

/* Negative if stage a in subcluster x precedes stage b in subcluster y. */
static int compare_stages(const struct search_problem *problem, const struct search_candidate *a, int x,
                          const struct search_candidate *b, int y)
{
    if (a->end != b->end) return a->end - b->end;
    if (x != y || x >= problem->C) return x - y;
    const struct hapt_submesh *submesh = problem->profile->cluster[x].submesh;
    return search_compare_submeshes(&submesh[a->submesh], &submesh[b->submesh]);
}

static enum hapt_status choose(const struct trace *trace, void *context, const struct search_candidate *stage,
                               const struct prefix *to)
{
    struct choosing *choosing = context;
    const struct prefix *known = find(choosing->behind, to);
    if (!known || !known->finishes) return HAPT_OK;
    const int name = search_name(trace->problem, (unsigned)to->used, to->current);
    const int order =
        choosing->best ? compare_stages(trace->problem, stage, name, choosing->best, choosing->best_subcluster) : -1;
    if (order > 0) return HAPT_OK;
    if (order < 0) {
        choosing->best = stage;
        choosing->best_subcluster = name;
        choosing->reached.count = 0;
    }
    return append(&choosing->reached, to, trace->arena);
}

/* Grows levels until one holds a complete pipeline. Then marks, from the back, the prefixes that lead to it. */
static enum hapt_status build_levels(const struct trace *trace, struct level *level, int *stages)
{
    for (int p = 0; p < trace->problem->device_set_count; p++) {
        const struct prefix start = {.current = NOWHERE, .next = p, .launches = trace->problem->cap};
        HAPT_TRY(append(&level[0], &start, trace->arena));
    }
    for (*stages = 1;; ++*stages) {
        HAPT_ASSERT(*stages <= trace->problem->L);
        for (int i = 0; i < level[*stages - 1].count; i++)
            HAPT_TRY(visit_steps(trace, &level[*stages - 1].prefix[i], grow, &level[*stages]));
        merge(&level[*stages]);
        if (has_end(&level[*stages])) break;
    }
    for (int i = 0; i < level[*stages].count; i++)
        level[*stages].prefix[i].finishes = level[*stages].prefix[i].next == NOWHERE;
    for (int l = *stages - 1; l >= 0; l--) {
        for (int i = 0; i < level[l].count; i++) {
            struct marking marking = {.behind = &level[l + 1]};
            HAPT_TRY(visit_steps(trace, &level[l].prefix[i], mark, &marking));
            level[l].prefix[i].finishes = marking.finishes;
        }
    }
    return HAPT_OK;
}

/* Fills the stage of layers [first, at->end) in the subcluster or mixed group `name` (search_name). */
static enum hapt_status fill_stage(const struct search_problem *problem, int first, const struct search_candidate *at,
                                   int name, struct hapt_arena *result, struct hapt_plan_stage *stage)
{
    stage->first_layer = first;
    stage->end_layer = at->end;
    if (name >= problem->C) return hapt_plan_stage_mix(problem->profile, name - problem->C, result, stage);
    hapt_plan_stage_run(problem->profile, name, &problem->profile->cluster[name].submesh[at->submesh], stage);
    return HAPT_OK;
}

static enum hapt_status walk(const struct trace *trace, const struct level *level, struct hapt_arena *result,
                             struct hapt_plan *plan)
{
    const struct search_problem *problem = trace->problem;
    struct level here = {0};
    for (int i = 0; i < level[0].count; i++) HAPT_TRY(append(&here, &level[0].prefix[i], trace->arena));
    for (int l = 0; l < plan->stage_count; l++) {
        struct choosing choosing = {.behind = &level[l + 1]};
        for (int i = 0; i < here.count; i++) HAPT_TRY(visit_steps(trace, &here.prefix[i], choose, &choosing));
        HAPT_ASSERT(choosing.best);
        HAPT_TRY(fill_stage(problem, here.prefix[0].layer, choosing.best, choosing.best_subcluster, result,
                            &plan->stage[l]));
        here = choosing.reached;
    }
    return HAPT_OK;
}

static enum hapt_status trace_plan(const struct trace *trace, struct hapt_arena *result, struct hapt_plan *plan)
{
    struct level *level;
    int stages;
    HAPT_NEW(level, trace->arena, trace->problem->L + 1);
    HAPT_TRY(build_levels(trace, level, &stages));
    HAPT_TRY(hapt_plan_allot(plan, stages, result));
    return walk(trace, level, result, plan);
}

enum hapt_status search_trace(const struct search_problem *problem, double t_max_s, double budget_s,
                              struct hapt_arena *arena, struct hapt_plan *plan)
{
    const bool any = isinf(budget_s);
    struct hapt_arena scratch;
    struct search_table table = {0};
    double latency_s = INFINITY;
    hapt_arena_init(&scratch);
    enum hapt_status status = search_table_init(problem, &scratch, &table);
    if (status == HAPT_OK) status = search_table_fill(&table, t_max_s, budget_s, !any, &latency_s);
    if (status == HAPT_OK && (!any || isfinite(latency_s))) {
        /* sums from the front and from the back round differently; far below the difference between plans */
        const double least_s = any ? latency_s * (1 + 1e-12) : budget_s;
        const struct trace trace = {
            .table = &table, .problem = problem, .budget_s = least_s * (1 + 1e-14), .arena = &scratch};
        status = trace_plan(&trace, arena, plan);
    }
    search_table_release(&table);
    hapt_arena_release(&scratch);
    return status;
}
