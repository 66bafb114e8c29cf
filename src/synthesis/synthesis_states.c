/*
 * The states of one segment, and the outcomes at its end. States of a position with equal words are found by hash. A*
 * also compares the other states of a position with its cheapest ones as they are made.
 */
#include <stdlib.h>

#include "hapt/env.h"
#include "synthesis_search.h"

enum { MOST_COMPARED = 96 };

/* ---- dominance ---- */

static double conversion_from(const struct layouts *layouts, layout_set from, int to)
{
    const int best = hapt_cheapest_source(layouts, from, to);
    return best < 0 ? (double)INFINITY : layouts->convert_s[best][to];
}

/* Cost for state a to make what b has made and to wait for no more; capped at `limit`. */
static double shortfall(const struct object *object, uint32_t a, uint32_t b, double limit, bool exact)
{
    if (a == b) return 0;
    if (is_parameter(object)) return INFINITY;
    const struct layouts *layouts = object->layouts;
    const layout_set made = closure_of(layouts, made_of(a)), promised = closure_of(layouts, awaited_of(b));
    const layout_set lacking = (layout_set)(made_of(b) & ~made),
                     waiting = (layout_set)(awaited_of(a) & ~promised & ~made);
    double sum = 0;
    if (waiting) { /* its readers are decided: only its writer can still make it, from the one promised version */
        const bool one = promised & 1u << REPLICATED || (promised & (promised - 1)) == 0;
        if (exact || object->kind != OBJECT_GRADIENT || waiting & 1u << PARTIAL || promised & 1u << PARTIAL || !one ||
            !promised)
            return INFINITY;
        for (int l = 0; l < layouts->count; l++)
            if (waiting >> l & 1u) sum += conversion_from(layouts, promised, l);
    }
    for (int l = 0; l < layouts->count && sum <= limit; l++)
        if (lacking >> l & 1u) sum += conversion_from(layouts, made, l);
    return sum;
}

/* The most that a may cost above b and still be no worse on any kind of device, open stages included. */
static double advantage(const struct search *search, const struct state *a, const struct state *b)
{
    double since = INFINITY, until = INFINITY;
    if (!search->vectors) return b->base - a->base;
    for (int j = 0; j < search->classes; j++) {
        since = fmin(since, b->vector[j] - a->vector[j]);
        until = fmin(until, b->vector[search->classes + j] - a->vector[search->classes + j]);
    }
    return b->base - a->base + since + until;
}

static double slack_of(const struct state *a, const struct state *b)
{
    return ROUNDING * (fabs(a->base) + fabs(b->base));
}

static bool same_words(const struct search *search, const struct state *a, const struct state *b)
{
    return a->hash == b->hash &&
           memcmp(a->word, b->word, (size_t)search->bound[a->position].slot_count * sizeof *a->word) == 0;
}

static bool needs_no_more_memory(const struct search *search, const struct state *a, const struct state *b)
{
    if (!search->problem->memory_resource) return true;
    for (int j = 0; j < search->classes; j++)
        if (!at_most(a->vector[2 * search->classes + j], b->vector[2 * search->classes + j])) return false;
    return true;
}

bool hapt_state_dominates(const struct search *search, const struct state *a, const struct state *b)
{
    const struct bound_at *bound = &search->bound[a->position];
    if (a->decided != b->decided) return false;
    double left = advantage(search, a, b) + slack_of(a, b);
    if (left < 0 || !needs_no_more_memory(search, a, b)) return false;
    /* Kept versions determine memory, and a version bought later opens another stage. */
    if (search->problem->memory_resource) return same_words(search, a, b);
    const bool buys = !search->vectors || !search->problem->options->exact;
    for (int k = 0; k < bound->slot_count; k++) {
        if (a->word[k] == b->word[k]) continue;
        const struct object *object = &search->problem->object[search->segment->local[bound->slot[k]]];
        const double price = shortfall(object, a->word[k], b->word[k], left, search->problem->options->exact);
        if (price > left || (price > 0 && !buys)) return false;
        left -= price;
    }
    return true;
}

/* ---- states of equal words ---- */

static int *bucket_of(const struct position *position, const struct state *state)
{
    return &position->bucket[state->hash & (uint64_t)(position->bucket_count - 1)];
}

static bool is_repeated(const struct search *search, const struct state *made)
{
    for (int s = *bucket_of(&search->position[made->position], made); s != NO_STATE; s = search->state[s].next) {
        const struct state *other = &search->state[s];
        if (!other->dead && same_words(search, other, made) && hapt_state_dominates(search, other, made)) return true;
    }
    return false;
}

static void drop_repeated(struct search *search, int index)
{
    const struct state *made = &search->state[index];
    for (int s = *bucket_of(&search->position[made->position], made); s != NO_STATE; s = search->state[s].next) {
        struct state *other = &search->state[s];
        if (s != index && !other->dead && same_words(search, other, made) && hapt_state_dominates(search, made, other))
            other->dead = true;
    }
}

/* ---- the cheapest states of a position ---- */

static bool is_dominated(const struct search *search, const struct state *made)
{
    const struct position *position = &search->position[made->position];
    for (int k = 0; k < position->compared_count; k++) {
        const struct state *other = &search->state[position->compared[k]];
        if (!other->dead && hapt_state_dominates(search, other, made)) return true;
    }
    return false;
}

static void drop_dominated(struct search *search, int index)
{
    const struct state *made = &search->state[index];
    struct position *position = &search->position[made->position];
    int kept = 0;
    for (int k = 0; k < position->compared_count; k++) {
        struct state *other = &search->state[position->compared[k]];
        if (!other->dead && hapt_state_dominates(search, made, other)) other->dead = true;
        if (!other->dead) position->compared[kept++] = position->compared[k];
    }
    position->compared_count = kept;
    if (kept < MOST_COMPARED) {
        position->compared[position->compared_count++] = index;
        return;
    }
    int worst = 0; /* replace the one that cost most: cheap states dominate others */
    for (int k = 1; k < kept; k++)
        if (search->state[position->compared[k]].bound > search->state[position->compared[worst]].bound) worst = k;
    if (made->bound < search->state[position->compared[worst]].bound) position->compared[worst] = index;
}

/* ---- storage ---- */

static enum hapt_status rehash(struct search *search, struct position *position)
{
    const int count = position->bucket_count ? 4 * position->bucket_count : 64, before = position->bucket_count;
    int *bucket;
    HAPT_NEW(bucket, search->arena, count);
    for (int b = 0; b < count; b++) bucket[b] = NO_STATE;
    for (int b = 0; b < before; b++) {
        for (int s = position->bucket[b], next; s != NO_STATE; s = next) {
            int *to = &bucket[search->state[s].hash & (uint64_t)(count - 1)];
            next = search->state[s].next;
            search->state[s].next = *to;
            *to = s;
        }
    }
    position->bucket = bucket;
    position->bucket_count = count;
    return HAPT_OK;
}

static uint64_t mix_word(uint64_t hash, uint32_t word)
{
    hash = (hash ^ word) * 0xbf58476d1ce4e5b9u;
    return hash ^ hash >> 29;
}

static void hash_words(const struct search *search, struct state *state)
{
    const struct position *position = &search->position[state->position];
    state->decided = 0x9e3779b97f4a7c15u;
    for (int k = 0; k < position->decided_count; k++) {
        if (k == position->shared_count) state->shared = state->decided;
        state->decided = mix_word(state->decided, state->word[position->decided[k]]);
    }
    if (position->shared_count == position->decided_count) state->shared = state->decided;
    state->hash = state->decided;
    for (int k = 0; k < search->bound[state->position].slot_count; k++)
        state->hash = mix_word(state->hash, state->word[k]);
}

static int vector_length(const struct search *search)
{
    return search->problem->counts_memory ? 3 * search->classes : search->vectors ? 2 * search->classes : 0;
}

static enum hapt_status grow(struct search *search)
{
    if (search->state_count < search->state_capacity) return HAPT_OK;
    const int capacity = search->state_capacity ? 2 * search->state_capacity : 4096;
    struct state *grown = realloc(search->state, (size_t)capacity * sizeof *grown);
    if (!grown) return hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory for the states of a synthesis");
    search->state = grown;
    search->state_capacity = capacity;
    return HAPT_OK;
}

enum hapt_status hapt_state_keep(struct search *search, struct state *made, int *index)
{
    struct position *position = &search->position[made->position];
    const int slots = search->bound[made->position].slot_count;
    const bool compares = search->width == 0 && !search->problem->memory_resource;
    *index = NO_STATE;
    search->tally->generated++;
    if (!isfinite(made->bound) || !at_most(made->bound, search->limit)) return HAPT_OK;
    hash_words(search, made);
    if (position->bucket_count == 0) HAPT_TRY(rehash(search, position));
    if (is_repeated(search, made) || (compares && is_dominated(search, made))) return HAPT_OK;
    HAPT_TRY(grow(search));
    struct state *kept = &search->state[search->state_count];
    *kept = *made;
    HAPT_NEW(kept->word, search->arena, slots);
    HAPT_NEW(kept->vector, search->arena, vector_length(search));
    memcpy(kept->word, made->word, (size_t)slots * sizeof *kept->word);
    if (vector_length(search)) memcpy(kept->vector, made->vector, (size_t)vector_length(search) * sizeof *kept->vector);
    if (position->used++ > 2 * position->bucket_count) HAPT_TRY(rehash(search, position));
    kept->next = *bucket_of(position, kept);
    *bucket_of(position, kept) = search->state_count;
    *index = search->state_count++;
    drop_repeated(search, *index);
    if (compares) drop_dominated(search, *index);
    return HAPT_OK;
}

void hapt_state_set_bound(const struct search *search, struct state *state)
{
    const struct bound_at *bound = &search->bound[state->position];
    double since = 0, until = 0, together = 0;
    if (search->vectors) {
        for (int j = 0; j < search->classes; j++) {
            const double f = state->vector[j], b = state->vector[search->classes + j];
            since = fmax(since, f + bound->forward_s[j]);
            until = fmax(until, b + bound->backward_s[j]);
            together = fmax(together, f + b + hapt_bound_left(search->problem, search->segment, bound, state->word, j));
        }
    } else {
        together = hapt_bound_left(search->problem, search->segment, bound, state->word, 0);
    }
    state->bound = state->base + (search->stages_join ? together : fmax(since + until, together));
    if (state->bound <= search->limit)
        state->bound += hapt_bound_conversions(search->problem, search->segment, bound, state->word);
}

void hapt_state_load(struct search *search, const struct state *state)
{
    const struct bound_at *bound = &search->bound[state->position];
    for (int k = 0; k < bound->slot_count; k++) search->word[search->segment->local[bound->slot[k]]] = state->word[k];
}

static enum hapt_status list_slots(const struct search *search, int at)
{
    const struct segment *segment = search->segment;
    int *slot, count = 0;
    HAPT_NEW(slot, search->arena, segment->local_count);
    for (int k = 0; k < segment->local_count; k++) {
        const struct object *object = &search->problem->object[segment->local[k]];
        if (object->first < segment->first + at && object->last >= segment->first + at) slot[count++] = k;
    }
    search->bound[at].slot = slot;
    search->bound[at].slot_count = count;
    return count <= MOST_SLOTS ? HAPT_OK : hapt_fail(HAPT_ERR_INFEASIBLE, NULL, "too many tensors are alive at once");
}

static void list_decided(const struct search *search, int at)
{
    const struct bound_at *bound = &search->bound[at];
    struct position *position = &search->position[at];
    for (int crosses = 1; crosses >= 0; crosses--) {
        for (int slot = 0; slot < bound->slot_count; slot++) {
            const struct object *object = &search->problem->object[search->segment->local[bound->slot[slot]]];
            if (!is_parameter(object)) continue;
            if ((object->last >= search->segment->end) == crosses) position->decided[position->decided_count++] = slot;
        }
        if (crosses) position->shared_count = position->decided_count;
    }
}

enum hapt_status hapt_states_prepare(struct search *search)
{
    HAPT_NEW(search->position, search->arena, search->steps + 1);
    HAPT_NEW(search->bound, search->arena, search->steps + 1);
    HAPT_NEW(search->word, search->arena, search->problem->object_count);
    if (search->segment->end_count > MOST_CROSSING_OBJECTS)
        return hapt_fail(HAPT_ERR_INFEASIBLE, NULL, "too many tensors cross a border");
    for (int at = 0; at <= search->steps; at++) {
        HAPT_TRY(list_slots(search, at));
        HAPT_NEW(search->position[at].decided, search->arena, search->bound[at].slot_count);
        list_decided(search, at);
        if (search->width == 0) HAPT_NEW(search->position[at].compared, search->arena, MOST_COMPARED);
    }
    return hapt_bounds_prepare(search->problem, search->segment, search->arena, search->bound);
}

/* ---- the end of a segment: outcomes, the cheapest for each layout of the crossing objects ---- */

struct border { /* state while filling in layouts */
    int state;
    double cost;
    double bytes[MOST_CLASSES];
    uint32_t word[MOST_CROSSING_OBJECTS];
    int conversion_count;
    struct border_conversion conversion[128];
};

static enum hapt_status note_outcome(struct search *search, const struct border *border)
{
    const int width = search->segment->end_count;
    int at = 0;
    while (at < search->outcome_count &&
           memcmp(search->outcome[at].word, border->word, (size_t)width * sizeof(uint32_t)))
        at++;
    if (at < search->outcome_count && at_most(search->outcome[at].cost_s, border->cost)) return HAPT_OK;
    if (at == search->outcome_count) {
        MAKE_ROOM(search->outcome, at, search->outcome_capacity, 32, search->arena);
        struct outcome *made = &search->outcome[search->outcome_count++];
        HAPT_NEW(made->word, search->result, width);
        HAPT_NEW(made->bytes, search->result, search->classes);
        memcpy(made->word, border->word, (size_t)width * sizeof(uint32_t));
    }
    struct outcome *outcome = &search->outcome[at];
    outcome->state = border->state;
    outcome->cost_s = border->cost;
    memcpy(outcome->bytes, border->bytes, (size_t)search->classes * sizeof(double));
    outcome->border_count = border->conversion_count;
    HAPT_NEW(outcome->border, search->result, border->conversion_count);
    memcpy(outcome->border, border->conversion, (size_t)border->conversion_count * sizeof border->conversion[0]);
    if (border->cost + search->spread < search->limit) search->limit = border->cost + search->spread;
    return HAPT_OK;
}

/* Charges the activation versions kept for backward steps before the segment's end. The crossing layout is
 * excluded: later steps may need it, and it is kept once. */
static layout_set charge_kept(const struct search *search, struct border *border, const struct object *object,
                              uint32_t word, int layout)
{
    const layout_set set = (layout_set)(1u << layout);
    if (!search->problem->counts_memory) return 0;
    const layout_set kept = hapt_kept_versions(word_of((layout_set)(made_of(word) | set), awaited_of(word)));
    for (int l = 0; l < object->layouts->count; l++)
        if (kept >> l & 1u && l != layout) {
            border->cost += hapt_priced_seconds(search->problem, object->layouts, l, search->problem->in_flight);
            for (int j = 0; j < search->classes; j++)
                border->bytes[j] += layout_bytes(object->layouts, l, j) * search->problem->in_flight;
        }
    return kept & set;
}

/* Every layout of crossing object k and of those after it. */
static enum hapt_status enumerate_border(struct search *search, struct border *border, int k)
{
    const struct segment *segment = search->segment;
    if (!at_most(border->cost, search->limit)) return HAPT_OK;
    if (k == segment->end_count) return note_outcome(search, border);
    const int index = segment->local[segment->at_end[k]];
    const struct object *object = &search->problem->object[index];
    const uint32_t word = search->word[index];
    if (is_parameter(object)) {
        border->word[k] = word;
        return enumerate_border(search, border, k + 1);
    }
    for (int l = 0; l < object->layouts->count; l++) {
        const int conversion_count = border->conversion_count;
        const double cost = border->cost;
        double bytes[MOST_CLASSES];
        int more;
        memcpy(bytes, border->bytes, sizeof bytes);
        if (l == PARTIAL || conversion_count + MOST_LAYOUTS > 128) continue;
        const double seconds = hapt_border_cost(object, word, l, &border->conversion[conversion_count], &more);
        if (!isfinite(seconds)) continue;
        for (int m = 0; m < more; m++) border->conversion[conversion_count + m].object = segment->at_end[k];
        border->conversion_count += more;
        const layout_set set = (layout_set)(1u << l);
        border->cost += seconds;
        if (object->kind == OBJECT_FORWARD) {
            border->word[k] = word_of(set, charge_kept(search, border, object, word, l));
        } else {
            border->word[k] = word_of(0, set);
        }
        HAPT_TRY(enumerate_border(search, border, k + 1));
        border->conversion_count = conversion_count;
        border->cost = cost;
        memcpy(border->bytes, bytes, sizeof bytes);
    }
    return HAPT_OK;
}

enum hapt_status hapt_end_reach(struct search *search, int index)
{
    const struct state *state = &search->state[index];
    struct border border = {.state = index, .cost = state->base};
    double together = 0;
    for (int j = 0; search->problem->counts_memory && j < search->classes; j++)
        border.bytes[j] = state->vector[2 * search->classes + j];
    for (int j = 0; search->vectors && j < search->classes; j++)
        together = fmax(together, state->vector[j] + state->vector[search->classes + j]);
    if (search->vectors && !search->stages_join)
        together = slowest(state->vector, search->classes) + slowest(state->vector + search->classes, search->classes);
    border.cost += together;
    hapt_state_load(search, state);
    return enumerate_border(search, &border, 0);
}

enum hapt_status hapt_end_hand_over(struct search *search, struct outcome **outcome, int *count)
{
    HAPT_NEW(*outcome, search->result, search->outcome_count);
    *count = 0;
    for (int k = 0; k < search->outcome_count; k++) {
        struct outcome *made = &search->outcome[k];
        if (!at_most(made->cost_s, search->limit)) continue;
        HAPT_NEW(made->decision, search->result, search->steps);
        for (int s = made->state; search->state[s].parent != NO_STATE; s = search->state[s].parent)
            made->decision[search->state[s].position - 1] = search->state[s].decision;
        (*outcome)[(*count)++] = *made;
    }
    return HAPT_OK;
}
