/*
 * Segments of a long model, and the search of one of them. It runs once per structure and start words. If exact: A*
 * (HAP Fig. 10). Otherwise a beam search, which keeps only the cheapest states of every position, so its time is
 * bounded by that number of states per step. It runs with few states first. If some were left out, it runs again with
 * more, below the limit that the first run found.
 */
#include <stdlib.h>

#include "hapt/env.h"
#include "hapt/progress.h"
#include "synthesis_search.h"

#define NONE (-1)

enum { FIRST_WIDTH = 8, MOST_STATES = 1000, EXACT_STATES = 200000, MOST_QUOTAS = 32 };

/* ---- a segment's objects ---- */

static enum hapt_status build_segment(const struct problem *problem, int first, int end, struct segment *segment)
{
    bool *listed;
    int most = 0;
    for (int s = first; s < end; s++) most += HAPT_MAX_INPUTS + 2 * HAPT_MAX_OUTPUTS + problem->step[s].dying_count;
    *segment = (struct segment){.first = first, .end = end};
    HAPT_NEW(listed, problem->arena, problem->object_count);
    HAPT_NEW(segment->local, problem->arena, most);
    for (int s = first; s < end; s++) {
        const struct step *step = &problem->step[s];
        for (int k = 0; k < HAPT_MAX_INPUTS + 2 * HAPT_MAX_OUTPUTS + step->dying_count; k++) {
            const int o = k - HAPT_MAX_INPUTS;
            const int object = o < 0                      ? step->input[k]
                               : o < HAPT_MAX_OUTPUTS     ? step->output[o]
                               : o < 2 * HAPT_MAX_OUTPUTS ? step->previous[o - HAPT_MAX_OUTPUTS]
                                                          : step->dying[o - 2 * HAPT_MAX_OUTPUTS];
            if (object < 0 || listed[object]) continue;
            listed[object] = true;
            segment->local[segment->local_count++] = object;
        }
    }
    HAPT_NEW(segment->start, problem->arena, segment->local_count);
    HAPT_NEW(segment->at_end, problem->arena, segment->local_count);
    for (int k = 0; k < segment->local_count; k++) {
        const struct object *object = &problem->object[segment->local[k]];
        if (object->first < first) segment->start[segment->start_count++] = k;
        if (object->last >= end) segment->at_end[segment->end_count++] = k;
    }
    return HAPT_OK;
}

static uint64_t mix_int(uint64_t hash, int64_t value)
{
    return hapt_hash(hash, &value, sizeof value);
}

static uint64_t mix_objects(uint64_t hash, const int *object, int count, const int *number)
{
    for (int k = 0; k < count; k++) hash = mix_int(hash, object[k] < 0 ? NONE : number[object[k]]);
    return hash;
}

/* Hash of a segment; equal for segments whose searches are the same: choices, costs, objects and their connections. */
static uint64_t segment_structure(const struct problem *problem, const struct segment *segment, int *number)
{
    uint64_t hash = mix_int(1, segment->local_count);
    for (int k = 0; k < segment->local_count; k++) number[segment->local[k]] = k;
    for (int k = 0; k < segment->local_count; k++) {
        const struct object *object = &problem->object[segment->local[k]];
        const struct hapt_tensor *tensor = &problem->graph->tensor[object->tensor];
        const int64_t facts[] = {object->kind,
                                 (int64_t)(intptr_t)object->layouts,
                                 object->makeable,
                                 object->tracked,
                                 tensor->trainable,
                                 tensor->dtype,
                                 object->first < segment->first,
                                 object->last >= segment->end,
                                 object->parameter >= 0 ? number[object->parameter] : NONE,
                                 (int64_t)(intptr_t)object->ending};
        hash = hapt_hash(hash, facts, sizeof facts);
    }
    for (int s = segment->first; s < segment->end; s++) {
        const struct step *step = &problem->step[s];
        hash = mix_int(mix_int(mix_int(hash, step->backward), step->last_reader), step->choice_count);
        hash = mix_objects(hash, step->input, HAPT_MAX_INPUTS, number);
        hash = mix_objects(hash, step->output, HAPT_MAX_OUTPUTS, number);
        hash = mix_objects(hash, step->previous, HAPT_MAX_OUTPUTS, number);
        hash = mix_objects(hash, step->dying, step->dying_count, number);
        for (int c = 0; c < step->choice_count; c++) {
            const struct choice *choice = &step->choice[c];
            hash = hapt_hash(hash, choice->input, sizeof choice->input);
            hash = hapt_hash(hash, choice->output, sizeof choice->output);
            hash = hapt_hash(hash, &choice->exchange_s, sizeof choice->exchange_s);
            hash = hapt_hash(hash, choice->compute_s, (size_t)problem->classes * sizeof *choice->compute_s);
        }
    }
    return hash;
}

/* ---- where segments begin and end ---- */

enum { SEGMENT_MINIMUM = 4, SEGMENT_MOST = 24, MOST_CROSSING = 8 };

struct cutting {
    const struct problem *problem;
    int *crossing;       /* [step] activations and gradients that cross before it; -1: no border possible */
    int *forward_before; /* [step + 1] forward steps before it */
    bool *cut;           /* [step] */
};

static void split_long(struct cutting *cutting, int first, int end)
{
    const int *before = cutting->forward_before;
    int best = NONE;
    if (before[end] - before[first] <= SEGMENT_MOST) return;
    for (int s = first + 1; s < end; s++) {
        const int left = before[s] - before[first], right = before[end] - before[s];
        if (cutting->crossing[s] < 0 || cutting->crossing[s] > MOST_CROSSING || left < SEGMENT_MINIMUM ||
            right < SEGMENT_MINIMUM)
            continue;
        if (best != NONE && cutting->crossing[s] >= cutting->crossing[best]) continue;
        best = s;
    }
    if (best == NONE) return;
    cutting->cut[best] = true;
    split_long(cutting, first, best);
    split_long(cutting, best, end);
}

static void choose_cuts(struct cutting *cutting)
{
    const struct problem *problem = cutting->problem;
    int least = MOST_CROSSING, last = 0;
    if (problem->options->exact) return;
    for (int s = 1; s < problem->step_count; s++)
        if (cutting->crossing[s] > 0 && cutting->crossing[s] < least) least = cutting->crossing[s];
    for (int s = 1; s < problem->step_count; s++) {
        const int *before = cutting->forward_before;
        if (cutting->crossing[s] < 0 || cutting->crossing[s] > least || before[s] - before[last] < SEGMENT_MINIMUM)
            continue;
        if (before[problem->step_count] - before[s] < SEGMENT_MINIMUM) break;
        cutting->cut[s] = true;
        last = s;
    }
    for (int first = 0, s = 1; s <= problem->step_count; s++) {
        if (s < problem->step_count && !cutting->cut[s]) continue;
        split_long(cutting, first, s);
        first = s;
    }
}

enum hapt_status hapt_segments_find(const struct problem *problem, struct hapt_arena *arena, struct segment **segments,
                                    int *count)
{
    struct cutting cutting = {.problem = problem};
    int *number;
    HAPT_NEW(number, arena, problem->object_count);
    HAPT_NEW(cutting.crossing, arena, problem->step_count + 1);
    HAPT_NEW(cutting.forward_before, arena, problem->step_count + 1);
    HAPT_NEW(cutting.cut, arena, problem->step_count + 1);
    for (int k = 0; k < problem->object_count; k++) {
        const struct object *object = &problem->object[k];
        if (object->first < 0 || is_parameter(object)) continue;
        for (int s = object->first + 1; s <= object->last; s++) cutting.crossing[s]++;
    }
    for (int s = 0; s < problem->step_count; s++) {
        const struct step *step = &problem->step[s];
        cutting.forward_before[s + 1] = cutting.forward_before[s] + !step->backward;
        if (step->backward) cutting.crossing[s] = NONE;
    }
    choose_cuts(&cutting);
    HAPT_NEW(*segments, arena, problem->step_count);
    *count = 0;
    for (int first = 0, s = 1; s <= problem->step_count; s++) {
        if (s < problem->step_count && !cutting.cut[s]) continue;
        struct segment *segment = &(*segments)[(*count)++];
        HAPT_TRY(build_segment(problem, first, s, segment));
        segment->structure = segment_structure(problem, segment, number);
        first = s;
    }
    return HAPT_OK;
}

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
    for (int k = 0; k < ALL_OPERANDS; k++) { /* objects that appear here have no history */
        const int object = object_at(advance.step, k);
        if (object >= 0 && search->problem->object[object].first == search->segment->first + position)
            search->word[object] = 0;
    }
    search->parent = index;
    search->tally->expanded++;
    hapt_advance_all(&advance);
    return search->status;
}

/* ---- the search of one segment ---- */

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

/* Few states first; then, below the limit that they set, as many as allowed. */
static enum hapt_status search_segment(const struct problem *problem, const struct segment *segment,
                                       const uint32_t *start, double limit, struct hapt_arena *arena,
                                       struct search_tally *tally, struct result *best)
{
    const long most = problem->options->most_states > 0 ? problem->options->most_states : MOST_STATES;
    const long share = most / (segment->end - segment->first);
    const int widest = share < FIRST_WIDTH ? FIRST_WIDTH : (int)share;
    *best = (struct result){.least = INFINITY};
    if (problem->options->exact) return search_once(problem, segment, start, 0, limit, arena, tally, best);
    for (int width = FIRST_WIDTH; width <= widest; width = width < widest ? widest : widest + 1) {
        struct result wider;
        const double known = fmin(limit, hapt_border_limit(problem, segment, best->outcome, best->count));
        HAPT_TRY(search_once(problem, segment, start, width, known, arena, tally, &wider));
        if (wider.least <= best->least) *best = wider;
        if (!wider.trimmed) break;
    }
    tally->capped = tally->capped || best->trimmed;
    return HAPT_OK;
}

struct searched_segment {
    uint64_t structure;
    int start_count;
    const uint32_t *start;
    struct result result;
};

enum hapt_status hapt_segment_search(const struct problem *problem, const struct segment *segment,
                                     const uint32_t *start, double limit, struct hapt_arena *arena,
                                     struct searched *searched, struct search_tally *tally, struct outcome **outcome,
                                     int *outcome_count)
{
    const size_t bytes = (size_t)segment->start_count * sizeof *start;
    int k = 0;
    while (k < searched->count &&
           (searched->entry[k].structure != segment->structure ||
            searched->entry[k].start_count != segment->start_count || memcmp(searched->entry[k].start, start, bytes)))
        k++;
    if (k == searched->count) {
        MAKE_ROOM(searched->entry, searched->count, searched->capacity, 64, arena);
        struct searched_segment *made = &searched->entry[k];
        uint32_t *copy;
        HAPT_NEW(copy, arena, segment->start_count);
        if (bytes > 0) memcpy(copy, start, bytes);
        *made = (struct searched_segment){
            .structure = segment->structure, .start_count = segment->start_count, .start = copy};
        HAPT_TRY(search_segment(problem, segment, start, limit, arena, tally, &made->result));
        searched->count++;
    }
    *outcome = searched->entry[k].result.outcome;
    *outcome_count = searched->entry[k].result.count;
    return HAPT_OK;
}
