/*
 * The search of one segment. If exact: A* (HAP Fig. 10). Otherwise a beam search, which keeps only the cheapest states
 * of every position, so its time is bounded by that number of states per step. It runs with few states first. If some
 * were left out, it runs again with more, below the limit that the first run found.
 */
#include <stdlib.h>
#include <string.h>

#include "hapt/progress.h"
#include "synthesis_states.h"

enum { FIRST_WIDTH = 8, MOST_STATES = 1000, EXACT_STATES = 200000, MOST_QUOTAS = 32 };

/* ---- the queue ---- */

static bool comes_before(const struct search *search, int a, int b)
{
    const struct state *x = &search->state[a], *y = &search->state[b];
    if (search->depth_first && x->position != y->position) return x->position > y->position;
    if (x->bound != y->bound) return x->bound < y->bound;
    if (x->position != y->position) return x->position > y->position;
    return a < b;
}

static void sift_down(struct search *search, int at)
{
    for (;;) {
        int least = at;
        for (int child = 2 * at + 1; child <= 2 * at + 2 && child < search->heap_count; child++)
            if (comes_before(search, search->heap[child], search->heap[least])) least = child;
        if (least == at) return;
        const int moved = search->heap[at];
        search->heap[at] = search->heap[least];
        search->heap[least] = moved;
        at = least;
    }
}

static bool push(struct search *search, int state)
{
    if (search->heap_count == search->heap_capacity) {
        const int capacity = search->heap_capacity ? 2 * search->heap_capacity : 1024;
        int *grown = realloc(search->heap, (size_t)capacity * sizeof *grown);
        if (!grown) return false;
        search->heap = grown;
        search->heap_capacity = capacity;
    }
    int at = search->heap_count++;
    for (; at > 0 && comes_before(search, state, search->heap[(at - 1) / 2]); at = (at - 1) / 2)
        search->heap[at] = search->heap[(at - 1) / 2];
    search->heap[at] = state;
    return true;
}

static int pop(struct search *search)
{
    const int first = search->heap[0];
    search->heap[0] = search->heap[--search->heap_count];
    sift_down(search, 0);
    return first;
}

/* ---- from state to state ---- */

static bool fits_memory(const struct search *search, const double *bytes)
{
    const struct problem *problem = search->problem;
    for (int j = 0; problem->memory_resource && j < search->classes; j++)
        for (int device = 0; device < problem->axis->size; device++)
            if (problem->class_of[device] == j && !at_most(bytes[j], problem->options->memory_bytes[device]))
                return false;
    return true;
}

/* Adds the operator to its side's open stage. A communication closes the stage on its far side; returns that
 * stage's seconds. A suffix grows at its front. */
static double close_stages(const struct search *search, const struct advance *advance, double *open)
{
    const bool first = advance->step->backward ? advance->synchronises_after : advance->synchronises;
    const bool then = advance->step->backward ? advance->synchronises : advance->synchronises_after;
    double closed = 0;
    for (int side = 0; side < 2; side++) {
        if (side ? then : first) {
            closed += slowest(open, search->classes);
            memset(open, 0, (size_t)search->classes * sizeof *open);
        }
        for (int j = 0; side == 0 && j < search->classes; j++) open[j] += advance->choice->compute_s[j];
    }
    return closed;
}

static enum hapt_status add(struct search *search, struct state *made)
{
    int index;
    hapt_state_set_bound(search, made);
    HAPT_TRY(hapt_state_keep(search, made, &index));
    if (index == NO_STATE || search->width > 0 || push(search, index)) return HAPT_OK;
    return hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory for the states of a synthesis");
}

/* Stores the state after a transition. */
static void found(struct advance *advance, void *context)
{
    struct search *search = context;
    const struct state *parent = &search->state[search->parent];
    const int classes = search->classes, at = parent->position + 1;
    const struct bound_at *bound = &search->bound[at];
    uint32_t word[MOST_SLOTS];
    double vector[3 * MOST_CLASSES] = {0};
    if (search->status != HAPT_OK) return;
    struct state made = {.base = parent->base + advance->moved_s + advance->after_s + advance->later_s,
                         .vector = vector,
                         .word = word,
                         .position = at,
                         .parent = search->parent,
                         .decision = advance->decision};
    if (search->vectors) {
        memcpy(vector, parent->vector, 2 * (size_t)classes * sizeof *vector);
        made.base += close_stages(search, advance, vector + (advance->step->backward ? classes : 0));
    } else {
        made.base += advance->choice->compute_s[0];
    }
    if (search->problem->counts_memory) {
        for (int j = 0; j < classes; j++)
            vector[2 * classes + j] = parent->vector[2 * classes + j] + advance->memory[j];
        if (!fits_memory(search, vector + 2 * classes)) return;
    }
    for (int k = 0; k < bound->slot_count; k++) word[k] = advance->word[search->segment->local[bound->slot[k]]];
    search->status = add(search, &made);
}

static enum hapt_status expand(struct search *search, int index)
{
    const int position = search->state[index].position;
    struct advance advance = {.problem = search->problem,
                              .step = &search->problem->step[search->segment->first + position],
                              .word = search->word,
                              .found = found,
                              .context = search};
    hapt_state_load(search, &search->state[index]);
    for (int k = 0; k < HAPT_MAX_OUTPUTS; k++) /* objects that appear here have no history */
        if (advance.step->output[k] >= 0 &&
            search->problem->object[advance.step->output[k]].first == search->segment->first + position)
            search->word[advance.step->output[k]] = 0;
    for (int k = 0; k < HAPT_MAX_INPUTS + HAPT_MAX_OUTPUTS; k++) {
        const int object = k < HAPT_MAX_INPUTS ? advance.step->input[k] : advance.step->previous[k - HAPT_MAX_INPUTS];
        if (object >= 0 && search->problem->object[object].first == search->segment->first + position)
            search->word[object] = 0;
    }
    search->parent = index;
    search->tally->expanded++;
    hapt_advance_all(&advance);
    return search->status;
}

/* ---- entry points ---- */

static enum hapt_status keep_first(struct search *search, const uint32_t *start)
{
    double vector[3 * MOST_CLASSES] = {0};
    struct state first = {.vector = vector, .word = (uint32_t *)start, .parent = NO_STATE};
    return add(search, &first);
}

struct ranked {
    double bound;
    int state;
};

static int compare_ranked(const void *a, const void *b)
{
    const struct ranked *x = a, *y = b;
    if (x->bound != y->bound) return x->bound < y->bound ? -1 : 1;
    return (x->state > y->state) - (x->state < y->state);
}

/* Limits the states kept per layout of what segments share, since those layouts cost something only in later
 * segments. */
struct quota {
    uint64_t shared;
    int count;
};

static struct quota *quota_of(struct quota *quota, int *count, uint64_t shared)
{
    int k = 0;
    while (k < *count && quota[k].shared != shared) k++;
    if (k == *count && k < MOST_QUOTAS) quota[(*count)++] = (struct quota){.shared = shared};
    return &quota[k < MOST_QUOTAS ? k : MOST_QUOTAS - 1];
}

/* The cheapest states of a position, from `first` on, that no earlier one dominates: at most the search's width for
 * each layout of what segments share. */
static int choose(struct search *search, int first, struct ranked *ranked)
{
    struct quota quota[MOST_QUOTAS];
    int count = 0, chosen = 0, quotas = 0;
    for (int s = first; s < search->state_count; s++)
        if (!search->state[s].dead && at_most(search->state[s].bound, search->limit))
            ranked[count++] = (struct ranked){search->state[s].bound, s};
    qsort(ranked, (size_t)count, sizeof *ranked, compare_ranked);
    for (int k = 0; k < count; k++) {
        const struct state *state = &search->state[ranked[k].state];
        struct quota *its = quota_of(quota, &quotas, state->shared);
        bool dominated = its->count == search->width && search->trimmed;
        for (int c = 0; c < chosen && !dominated; c++)
            dominated = hapt_state_dominates(search, &search->state[ranked[c].state], state);
        if (dominated) continue;
        if (its->count == search->width) {
            search->trimmed = true;
            continue;
        }
        its->count++;
        ranked[chosen++] = ranked[k];
    }
    return chosen;
}

/* All states of a position are known before the first one is expanded. */
static enum hapt_status run_in_steps(struct search *search, const uint32_t *start)
{
    HAPT_TRY(keep_first(search, start));
    hapt_progress_expect(search->steps + 1);
    for (int at = 0, first = 0; at <= search->steps; at++) {
        const int end = search->state_count;
        hapt_progress_advance(1);
        struct ranked *ranked;
        HAPT_NEW(ranked, search->arena, end - first);
        const int count = choose(search, first, ranked);
        for (int k = 0; k < count; k++) {
            if (!at_most(ranked[k].bound, search->limit)) break;
            HAPT_TRY(at == search->steps ? hapt_end_reach(search, ranked[k].state) : expand(search, ranked[k].state));
        }
        first = end;
    }
    return HAPT_OK;
}

static enum hapt_status run_astar(struct search *search, const uint32_t *start)
{
    const long most = search->problem->options->most_states > 0 ? search->problem->options->most_states : EXACT_STATES;
    HAPT_TRY(keep_first(search, start));
    while (search->heap_count > 0) {
        const int index = pop(search);
        struct state *state = &search->state[index];
        if (state->dead || state->expanded || !at_most(state->bound, search->limit)) continue;
        state->expanded = true;
        if (state->position == search->steps) {
            HAPT_TRY(hapt_end_reach(search, index));
            if (search->depth_first && search->outcome_count > 0) break;
            continue;
        }
        HAPT_TRY(expand(search, index));
        if (search->state_count <= most || search->depth_first) continue;
        search->tally->capped = search->depth_first = true;
        if (search->outcome_count > 0) break;
        for (int at = search->heap_count / 2 - 1; at >= 0; at--) sift_down(search, at);
    }
    return HAPT_OK;
}

struct result {
    struct outcome *outcome;
    int count;
    double least;
    bool trimmed;
};

/* One search of the segment: A* (width 0), or beam search below a limit. */
static enum hapt_status search_once(const struct problem *problem, const struct segment *segment, const uint32_t *start,
                                    int width, double limit, struct hapt_arena *arena, struct search_tally *tally,
                                    struct result *result)
{
    struct hapt_arena scratch;
    hapt_arena_init(&scratch);
    struct search search = {.problem = problem,
                            .segment = segment,
                            .arena = &scratch,
                            .result = arena,
                            .tally = tally,
                            .steps = segment->end - segment->first,
                            .classes = problem->classes,
                            .width = width,
                            .limit = limit,
                            .vectors = problem->classes > 1 || problem->memory_resource,
                            .stages_join = segment->end == problem->step_count};
    enum hapt_status status = hapt_states_prepare(&search);
    search.spread = hapt_border_spread(problem, segment);
    if (status == HAPT_OK) status = width > 0 ? run_in_steps(&search, start) : run_astar(&search, start);
    if (status == HAPT_OK) status = hapt_end_hand_over(&search, &result->outcome, &result->count);
    result->trimmed = search.trimmed;
    result->least = INFINITY;
    for (int k = 0; status == HAPT_OK && k < result->count; k++)
        result->least = fmin(result->least, result->outcome[k].cost_s);
    free(search.heap);
    free(search.state);
    hapt_arena_release(&scratch);
    return status;
}

enum hapt_status hapt_segment_search(const struct problem *problem, const struct segment *segment,
                                     const uint32_t *start, double limit, struct hapt_arena *arena,
                                     struct outcome **outcome, int *outcome_count, struct search_tally *tally)
{
    const long most = problem->options->most_states > 0 ? problem->options->most_states : MOST_STATES;
    const long share = most / (segment->end - segment->first);
    const int widest = share < FIRST_WIDTH ? FIRST_WIDTH : (int)share;
    struct result best = {.least = INFINITY};
    if (problem->options->exact) {
        HAPT_TRY(search_once(problem, segment, start, 0, limit, arena, tally, &best));
    } else {
        for (int width = FIRST_WIDTH; width <= widest; width = width < widest ? widest : widest + 1) {
            struct result wider;
            const double known = fmin(limit, hapt_border_limit(problem, segment, best.outcome, best.count));
            HAPT_TRY(search_once(problem, segment, start, width, known, arena, tally, &wider));
            if (wider.least <= best.least) best = wider;
            if (!wider.trimmed) break;
        }
        tally->capped = tally->capped || best.trimmed;
    }
    *outcome = best.outcome;
    *outcome_count = best.count;
    return HAPT_OK;
}
