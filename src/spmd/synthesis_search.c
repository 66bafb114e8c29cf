/*
 * The states of one segment: A* (HAP Fig. 10) where the answer is to be exact, else step by step, of every place the cheapest states
 * alone, so that no model takes longer than so many states a step. That search runs first with few states, then with more of them
 * where some were left out, now below the limit that the first one found.
 *
 * States at the same place with equal words are found by hash; the others at a place are compared with the cheapest ones. Costs
 * that differ by rounding alone count as equal, so that the order of sums never decides.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "hapt/env.h"
#include "synthesis_moves.h"

enum { MOST_COMPARED = 96, FIRST_WIDTH = 24, MOST_STATES = 1000, FIRST_SEGMENT = 8, EXACT_STATES = 200000 };
#define ROUNDING 1e-12
#define NONE (-1)

struct state {
    double base;    /* s: closed stages, communications, gradients that are done */
    double bound;   /* with the least that is left */
    double *vector; /* [classes] since the last synchronisation, [classes] until the next, [classes] bytes settled */
    uint32_t *word; /* by slot of its place */
    uint64_t hash;
    int place, parent, next; /* next in the hash chain */
    bool dead, expanded;
    struct decision decision;
};

/* A step behind that reads what lives at a place, or writes the gradients that the suffix waits for there. */
struct meeting {
    int step;
    int count;
    struct { unsigned char slot, operand; } object[HAPT_MAX_INPUTS + HAPT_MAX_OUTPUTS]; /* operands as of a move */
};

struct place { /* between two steps */
    int slot_count, *slot; /* local objects that live there */
    int meeting_count;     /* every object is in one of them at most */
    struct meeting *meeting;
    int compared_count, compared[MOST_COMPARED];
    int bucket_count, used, *bucket;
};

struct search {
    const struct problem *problem;
    const struct segment *segment;
    struct hapt_arena *arena; /* scratch */
    int steps, classes;
    bool vectors;             /* false: one class, stages do not matter */
    bool meets;               /* behind the last step the prefix and the suffix are one stage */
    struct place *place;
    struct state *state;
    int state_count, state_capacity;
    int *heap, heap_count, heap_capacity;
    uint32_t *word;           /* [object] */
    double limit;             /* states above it are no use */
    double spread;            /* what conversions at the segment's end cost at most */
    bool depth_first;         /* too many states */
    int width;                /* of the search step by step: states of a place that go on; 0: A* */
    bool trimmed;             /* there were more */
    int parent;               /* being expanded */
    enum hapt_status status;
    struct search_tally *tally;
    struct outcome *outcome;
    int outcome_count, outcome_capacity;
    int *outcome_state;
    struct hapt_arena *result;
};

static bool at_most(double a, double b) { return a <= b + ROUNDING * (fabs(a) + fabs(b)); }

/* ---- the queue ---- */

static bool comes_before(const struct search *search, int a, int b)
{
    const struct state *x = &search->state[a], *y = &search->state[b];
    if (search->depth_first && x->place != y->place) return x->place > y->place;
    if (x->bound != y->bound) return x->bound < y->bound;
    if (x->place != y->place) return x->place > y->place;
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

/* ---- dominance ---- */

static double conversion_from(const struct layouts *layouts, layout_set from, int to)
{
    double least = INFINITY;
    for (int l = 0; l < layouts->count; l++)
        if (l != PARTIAL && from >> l & 1u) least = fmin(least, layouts->convert_s[l][to]);
    return least;
}

/* What state a would pay to have made what b has, and to wait for no more; up to `limit`. */
static double shortfall(const struct object *object, uint32_t a, uint32_t b, double limit, bool exact)
{
    if (a == b) return 0;
    if (object->kind == OBJECT_PARAMETER || object->kind == OBJECT_PARAMETER_GRADIENT) return INFINITY;
    const struct layouts *layouts = object->layouts;
    const layout_set made = closure_of(layouts, made_of(a)), promised = closure_of(layouts, awaited_of(b));
    const layout_set lacking = (layout_set)(made_of(b) & ~made), waiting = (layout_set)(awaited_of(a) & ~promised & ~made);
    double sum = 0;
    if (waiting) { /* its readers are decided: only its writer can still make it, from the one version promised */
        const bool one = promised & 1u << WHOLE || (promised & (promised - 1)) == 0;
        if (exact || object->kind != OBJECT_GRADIENT || waiting & 1u << PARTIAL || promised & 1u << PARTIAL || !one || !promised) return INFINITY;
        for (int l = 0; l < layouts->count; l++)
            if (waiting >> l & 1u) sum += conversion_from(layouts, promised, l);
    }
    for (int l = 0; l < layouts->count && sum <= limit; l++)
        if (lacking >> l & 1u) sum += conversion_from(layouts, made, l);
    return sum;
}

/* The most that a may cost above b's and still be no worse on any kind of device, stages included. */
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

static double slack_of(const struct state *a, const struct state *b) { return ROUNDING * (fabs(a->base) + fabs(b->base)); }

static bool same_words(const struct search *search, const struct state *a, const struct state *b)
{
    return a->hash == b->hash &&
           memcmp(a->word, b->word, (size_t)search->place[a->place].slot_count * sizeof *a->word) == 0;
}

static bool needs_no_more_memory(const struct search *search, const struct state *a, const struct state *b)
{
    if (!search->problem->memory_resource) return true;
    for (int j = 0; j < search->classes; j++)
        if (!at_most(a->vector[2 * search->classes + j], b->vector[2 * search->classes + j])) return false;
    return true;
}

/* Whatever b may become, a becomes something no worse. */
static bool dominates(const struct search *search, const struct state *a, const struct state *b)
{
    const struct place *place = &search->place[a->place];
    double left = advantage(search, a, b) + slack_of(a, b);
    if (left < 0 || !needs_no_more_memory(search, a, b)) return false;
    /* Which versions are kept decides memory; what is bought later opens another stage. */
    if (search->problem->memory_resource) return same_words(search, a, b);
    const bool buys = !search->vectors || !search->problem->options->exact;
    for (int k = 0; k < place->slot_count; k++) {
        const struct object *object = &search->problem->object[search->segment->local[place->slot[k]]];
        const double price = shortfall(object, a->word[k], b->word[k], left, search->problem->options->exact);
        if (price > left || (price > 0 && !buys)) return false;
        left -= price;
    }
    return true;
}

static bool is_dominated(struct search *search, const struct state *made)
{
    struct place *place = &search->place[made->place];
    for (int s = place->bucket[made->hash & (uint64_t)(place->bucket_count - 1)]; s != NONE; s = search->state[s].next) {
        const struct state *other = &search->state[s];
        if (!other->dead && same_words(search, other, made) && dominates(search, other, made)) return true;
    }
    if (search->problem->memory_resource) return false;
    for (int k = 0; k < place->compared_count; k++) {
        const struct state *other = &search->state[place->compared[k]];
        if (!other->dead && dominates(search, other, made)) return true;
    }
    return false;
}

static void bury_dominated(struct search *search, int index)
{
    const struct state *made = &search->state[index];
    struct place *place = &search->place[made->place];
    int kept = 0;
    for (int s = place->bucket[made->hash & (uint64_t)(place->bucket_count - 1)]; s != NONE; s = search->state[s].next) {
        struct state *other = &search->state[s];
        if (s != index && !other->dead && same_words(search, other, made) && dominates(search, made, other)) other->dead = true;
    }
    if (search->problem->memory_resource) return;
    for (int k = 0; k < place->compared_count; k++) {
        struct state *other = &search->state[place->compared[k]];
        if (!other->dead && dominates(search, made, other)) other->dead = true;
        if (!other->dead) place->compared[kept++] = place->compared[k];
    }
    place->compared_count = kept;
    if (kept < MOST_COMPARED) {
        place->compared[place->compared_count++] = index;
        return;
    }
    int worst = 0; /* cheap states fell others */
    for (int k = 1; k < kept; k++)
        if (search->state[place->compared[k]].bound > search->state[place->compared[worst]].bound) worst = k;
    if (made->bound < search->state[place->compared[worst]].bound) place->compared[worst] = index;
}

/* ---- states ---- */

static enum hapt_status rehash(struct search *search, struct place *place, int at)
{
    const int count = place->bucket_count ? 4 * place->bucket_count : 64;
    HAPT_NEW(place->bucket, search->arena, count);
    for (int b = 0; b < count; b++) place->bucket[b] = NONE;
    place->bucket_count = count;
    for (int s = 0; s < search->state_count; s++) {
        struct state *state = &search->state[s];
        if (state->place != at) continue;
        state->next = place->bucket[state->hash & (uint64_t)(count - 1)];
        place->bucket[state->hash & (uint64_t)(count - 1)] = s;
    }
    return HAPT_OK;
}

static uint64_t hash_words(const uint32_t *word, int count)
{
    uint64_t hash = 0x9e3779b97f4a7c15u;
    for (int k = 0; k < count; k++) {
        hash = (hash ^ word[k]) * 0xbf58476d1ce4e5b9u;
        hash ^= hash >> 29;
    }
    return hash;
}

static int vector_length(const struct search *search)
{
    return search->problem->memory_resource ? 3 * search->classes : search->vectors ? 2 * search->classes : 0;
}

static double meeting_choice(const struct search *search, const struct place *place, const struct meeting *meeting,
                             const struct choice *choice, const uint32_t *word, double limit)
{
    double sum = 0;
    for (int k = 0; k < meeting->count && sum < limit; k++) {
        const int slot = meeting->object[k].slot, operand = meeting->object[k].operand;
        const struct layouts *layouts = search->problem->object[search->segment->local[place->slot[slot]]].layouts;
        double seconds = operand < HAPT_MAX_INPUTS ? INFINITY : 0;
        for (int l = 0; l < layouts->count; l++) {
            if (operand < HAPT_MAX_INPUTS) { /* from the versions that there are */
                if (made_of(word[slot]) >> l & 1u) seconds = fmin(seconds, layouts->reach_s[l][choice->input[operand]]);
            } else if (awaited_of(word[slot]) >> l & 1u) {
                seconds = fmax(seconds, layouts->reach_s[choice->output[operand - HAPT_MAX_INPUTS]][l]);
            }
        }
        sum += seconds;
    }
    return sum;
}

/* The least communication between what lives here and the steps that it meets next: operands that go together meet one cut. */
static double least_communication(const struct search *search, const struct state *state)
{
    const struct place *place = &search->place[state->place];
    double sum = 0;
    for (int m = 0; m < place->meeting_count; m++) {
        const struct meeting *meeting = &place->meeting[m];
        const struct step *step = &search->problem->step[meeting->step];
        double least = INFINITY;
        for (int c = 0; c < step->choice_count && least > 0; c++)
            least = fmin(least, meeting_choice(search, place, meeting, &step->choice[c], state->word, least));
        sum += least;
    }
    return sum;
}

static void set_bound(const struct search *search, struct state *state)
{
    const double communication = least_communication(search, state);
    const struct problem *problem = search->problem;
    const int at = (search->segment->first + state->place) * search->classes, end = search->segment->end * search->classes;
    if (!search->vectors) {
        state->bound = state->base + communication + problem->left[at] - problem->left[end];
        return;
    }
    double since = 0, until = 0, together = 0;
    for (int j = 0; j < search->classes; j++) {
        const double f = state->vector[j], b = state->vector[search->classes + j];
        since = fmax(since, f + problem->forward_left[at + j] - problem->forward_left[end + j]);
        until = fmax(until, b + problem->backward_left[at + j] - problem->backward_left[end + j]);
        together = fmax(together, f + b + problem->left[at + j] - problem->left[end + j]);
    }
    state->bound = state->base + communication + (search->meets ? together : fmax(since + until, together));
}

/* Keeps a state that is worth it: `word` and `vector` are copied. */
static enum hapt_status keep(struct search *search, struct state *made)
{
    struct place *place = &search->place[made->place];
    search->tally->generated++;
    if (!isfinite(made->bound) || !at_most(made->bound, search->limit)) return HAPT_OK;
    made->hash = hash_words(made->word, place->slot_count);
    if (place->bucket_count == 0) HAPT_TRY(rehash(search, place, made->place));
    if (is_dominated(search, made)) return HAPT_OK;
    if (search->state_count == search->state_capacity) {
        const int capacity = search->state_capacity ? 2 * search->state_capacity : 4096;
        struct state *grown = realloc(search->state, (size_t)capacity * sizeof *grown);
        if (!grown) return hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory for the states of a synthesis");
        search->state = grown;
        search->state_capacity = capacity;
    }
    const int index = search->state_count;
    struct state *kept = &search->state[index];
    *kept = *made;
    HAPT_NEW(kept->word, search->arena, place->slot_count);
    HAPT_NEW(kept->vector, search->arena, vector_length(search));
    memcpy(kept->word, made->word, (size_t)place->slot_count * sizeof *kept->word);
    memcpy(kept->vector, made->vector, (size_t)vector_length(search) * sizeof *kept->vector);
    if (place->used++ > 2 * place->bucket_count) HAPT_TRY(rehash(search, place, made->place));
    int *bucket = &place->bucket[kept->hash & (uint64_t)(place->bucket_count - 1)];
    kept->next = *bucket;
    *bucket = index;
    search->state_count++;
    bury_dominated(search, index);
    if (search->width > 0) return HAPT_OK;
    return push(search, index) ? HAPT_OK : hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory for the states of a synthesis");
}

static double slowest(const double *seconds, int count)
{
    double most = 0;
    for (int j = 0; j < count; j++) most = fmax(most, seconds[j]);
    return most;
}

static bool fits_memory(const struct search *search, const double *bytes)
{
    const struct problem *problem = search->problem;
    for (int j = 0; problem->memory_resource && j < search->classes; j++)
        for (int device = 0; device < problem->axis->size; device++)
            if (problem->class_of[device] == j && !at_most(bytes[j], problem->options->memory_bytes[device])) return false;
    return true;
}

/* Adds the operator to the open stage of its side; what is behind a communication, seen from the other side, is closed: its seconds
 * come back. A suffix grows at its front. */
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

/* A way to go on was found: the state behind it. */
static void found(struct advance *advance, void *context)
{
    struct search *search = context;
    const struct state *parent = &search->state[search->parent];
    const int classes = search->classes, at = parent->place + 1;
    const struct place *place = &search->place[at];
    uint32_t word[512];
    double vector[3 * MOST_CLASSES];
    if (search->status != HAPT_OK) return;
    struct state made = {.base = parent->base + advance->moved_s + advance->after_s + advance->later_s, .vector = vector, .word = word,
                         .place = at, .parent = search->parent, .decision = advance->decision};
    if (search->vectors) {
        memcpy(vector, parent->vector, 2 * (size_t)classes * sizeof *vector);
        made.base += close_stages(search, advance, vector + (advance->step->backward ? classes : 0));
    } else {
        made.base += advance->choice->compute_s[0];
    }
    if (search->problem->memory_resource) {
        for (int j = 0; j < classes; j++)
            vector[2 * classes + j] = parent->vector[2 * classes + j] + advance->memory[j];
        if (!fits_memory(search, vector + 2 * classes)) return;
    }
    for (int k = 0; k < place->slot_count; k++) word[k] = advance->word[search->segment->local[place->slot[k]]];
    set_bound(search, &made);
    search->status = keep(search, &made);
}

static void load(struct search *search, const struct state *state)
{
    const struct place *place = &search->place[state->place];
    for (int k = 0; k < place->slot_count; k++) search->word[search->segment->local[place->slot[k]]] = state->word[k];
}

static enum hapt_status expand(struct search *search, int index)
{
    const int place = search->state[index].place;
    struct advance advance = {.problem = search->problem, .step = &search->problem->step[search->segment->first + place],
                              .word = search->word, .found = found, .context = search};
    load(search, &search->state[index]);
    for (int k = 0; k < HAPT_MAX_OUTPUTS; k++) /* what appears here has no history */
        if (advance.step->output[k] >= 0 &&
            search->problem->object[advance.step->output[k]].first == search->segment->first + place)
            search->word[advance.step->output[k]] = 0;
    for (int k = 0; k < HAPT_MAX_INPUTS + HAPT_MAX_OUTPUTS; k++) {
        const int object = k < HAPT_MAX_INPUTS ? advance.step->input[k] : advance.step->previous[k - HAPT_MAX_INPUTS];
        if (object >= 0 && search->problem->object[object].first == search->segment->first + place) search->word[object] = 0;
    }
    search->parent = index;
    search->tally->expanded++;
    hapt_advance_all(&advance);
    return search->status;
}

/* ---- the segment's end ---- */

struct border { /* being filled in */
    int state;
    double cost;
    uint32_t word[MOST_CROSSING_OBJECTS];
    int moves;
    struct border_move move[128];
};

static enum hapt_status note_outcome(struct search *search, const struct border *border)
{
    const int width = search->segment->end_count;
    int at = 0;
    while (at < search->outcome_count && memcmp(search->outcome[at].word, border->word, (size_t)width * sizeof(uint32_t))) at++;
    if (at < search->outcome_count && at_most(search->outcome[at].cost_s, border->cost)) return HAPT_OK;
    if (at == search->outcome_count) {
        if (at == search->outcome_capacity) {
            struct outcome *grown;
            int *states;
            const int capacity = at ? 2 * at : 32;
            HAPT_NEW(grown, search->arena, capacity);
            HAPT_NEW(states, search->arena, capacity);
            if (at) memcpy(grown, search->outcome, (size_t)at * sizeof *grown);
            if (at) memcpy(states, search->outcome_state, (size_t)at * sizeof *states);
            search->outcome = grown;
            search->outcome_state = states;
            search->outcome_capacity = capacity;
        }
        search->outcome_count++;
        HAPT_NEW(search->outcome[at].word, search->result, width);
        memcpy(search->outcome[at].word, border->word, (size_t)width * sizeof(uint32_t));
    }
    search->outcome_state[at] = border->state;
    search->outcome[at].cost_s = border->cost;
    search->outcome[at].border_count = border->moves;
    HAPT_NEW(search->outcome[at].border, search->result, border->moves);
    memcpy(search->outcome[at].border, border->move, (size_t)border->moves * sizeof border->move[0]);
    if (border->cost + search->spread < search->limit) search->limit = border->cost + search->spread;
    return HAPT_OK;
}

/* Every layout of crossing object k and those behind it. */
static enum hapt_status cross(struct search *search, struct border *border, int k)
{
    const struct segment *segment = search->segment;
    if (!at_most(border->cost, search->limit)) return HAPT_OK;
    if (k == segment->end_count) return note_outcome(search, border);
    const int index = segment->local[segment->at_end[k]];
    const struct object *object = &search->problem->object[index];
    const uint32_t word = search->word[index];
    if (object->kind == OBJECT_PARAMETER || object->kind == OBJECT_PARAMETER_GRADIENT) {
        border->word[k] = word;
        return cross(search, border, k + 1);
    }
    for (int l = 0; l < object->layouts->count; l++) {
        const int moves = border->moves;
        const double cost = border->cost;
        int more;
        if (!hapt_border_allows(search->problem, object->layouts, l) || moves + MOST_LAYOUTS > 128) continue;
        const double seconds = hapt_border_cost(object, word, l, &border->move[moves], &more);
        if (!isfinite(seconds)) continue;
        for (int m = 0; m < more; m++) border->move[moves + m].object = segment->at_end[k];
        border->moves += more;
        border->cost += seconds;
        const layout_set set = (layout_set)(1u << l);
        border->word[k] = object->kind == OBJECT_FORWARD ? word_of(set, 0) : word_of(0, set);
        HAPT_TRY(cross(search, border, k + 1));
        border->moves = moves;
        border->cost = cost;
    }
    return HAPT_OK;
}

static enum hapt_status reach_end(struct search *search, int index)
{
    const struct state *state = &search->state[index];
    struct border border = {.state = index, .cost = state->base};
    double together = 0;
    for (int j = 0; search->vectors && j < search->classes; j++)
        together = fmax(together, state->vector[j] + state->vector[search->classes + j]);
    if (search->vectors && !search->meets)
        together = slowest(state->vector, search->classes) + slowest(state->vector + search->classes, search->classes);
    border.cost += together;
    load(search, state);
    return cross(search, &border, 0);
}

/* ---- the whole ---- */

static void add_meeting(struct place *place, int step, int slot, int operand)
{
    int m = 0;
    while (m < place->meeting_count && place->meeting[m].step != step) m++;
    struct meeting *meeting = &place->meeting[m];
    if (m == place->meeting_count) *meeting = (struct meeting){.step = step};
    place->meeting_count += m == place->meeting_count;
    if (meeting->count == HAPT_MAX_INPUTS + HAPT_MAX_OUTPUTS) return;
    meeting->object[meeting->count].slot = (unsigned char)slot;
    meeting->object[meeting->count++].operand = (unsigned char)operand;
}

/* An activation meets the next forward step that reads it, a gradient its writer: where those are in this segment. */
static enum hapt_status list_meetings(struct search *search, int at)
{
    const struct segment *segment = search->segment;
    struct place *place = &search->place[at];
    HAPT_NEW(place->meeting, search->arena, place->slot_count);
    for (int slot = 0; slot < place->slot_count && slot < 256; slot++) {
        const int index = segment->local[place->slot[slot]];
        const bool forward = search->problem->object[index].kind == OBJECT_FORWARD;
        bool met = !forward && search->problem->object[index].kind != OBJECT_GRADIENT;
        for (int s = segment->first + at; s < segment->end && !met; s++) {
            const struct step *step = &search->problem->step[s];
            for (int k = 0; k < (forward ? HAPT_MAX_INPUTS : HAPT_MAX_OUTPUTS) && !met; k++) {
                met = forward ? !step->backward && step->input[k] == index : step->output[k] == index;
                if (met) add_meeting(place, s, slot, forward ? k : HAPT_MAX_INPUTS + k);
            }
        }
    }
    return HAPT_OK;
}

static enum hapt_status prepare(struct search *search)
{
    const struct segment *segment = search->segment;
    HAPT_NEW(search->place, search->arena, search->steps + 1);
    HAPT_NEW(search->word, search->arena, search->problem->object_count);
    for (int at = 0; at <= search->steps; at++) {
        struct place *place = &search->place[at];
        HAPT_NEW(place->slot, search->arena, segment->local_count);
        for (int k = 0; k < segment->local_count; k++) {
            const struct object *object = &search->problem->object[segment->local[k]];
            if (object->first < segment->first + at && object->last >= segment->first + at) place->slot[place->slot_count++] = k;
        }
        if (place->slot_count > 512) return hapt_fail(HAPT_ERR_INFEASIBLE, NULL, "too many tensors live at once");
        HAPT_TRY(list_meetings(search, at));
    }
    if (segment->end_count > MOST_CROSSING_OBJECTS) return hapt_fail(HAPT_ERR_INFEASIBLE, NULL, "too many tensors cross a cut");
    search->spread = hapt_border_spread(search->problem, segment);
    return HAPT_OK;
}

static enum hapt_status keep_first(struct search *search, const uint32_t *start)
{
    double vector[3 * MOST_CLASSES] = {0};
    struct state first = {.vector = vector, .word = (uint32_t *)start, .parent = NONE};
    set_bound(search, &first);
    return keep(search, &first);
}

struct ranked { double bound; int state; };

static int compare_ranked(const void *a, const void *b)
{
    const struct ranked *x = a, *y = b;
    if (x->bound != y->bound) return x->bound < y->bound ? -1 : 1;
    return (x->state > y->state) - (x->state < y->state);
}

/* All states of a place are known before the first of them goes on. */
static enum hapt_status run_in_steps(struct search *search, const uint32_t *start)
{
    HAPT_TRY(keep_first(search, start));
    for (int at = 0, first = 0; at <= search->steps; at++) {
        const int end = search->state_count;
        struct ranked *ranked;
        int count = 0;
        HAPT_NEW(ranked, search->arena, end - first);
        for (int s = first; s < end; s++)
            if (!search->state[s].dead) ranked[count++] = (struct ranked){search->state[s].bound, s};
        qsort(ranked, (size_t)count, sizeof *ranked, compare_ranked);
        search->trimmed = search->trimmed || count > search->width;
        for (int k = 0; k < count && k < search->width; k++) {
            if (!at_most(ranked[k].bound, search->limit)) break;
            HAPT_TRY(at == search->steps ? reach_end(search, ranked[k].state) : expand(search, ranked[k].state));
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
        if (state->place == search->steps) {
            HAPT_TRY(reach_end(search, index));
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

static enum hapt_status hand_over(struct search *search, struct outcome **outcome, int *count)
{
    HAPT_NEW(*outcome, search->result, search->outcome_count);
    *count = 0;
    for (int k = 0; k < search->outcome_count; k++) {
        struct outcome *made = &search->outcome[k];
        if (!at_most(made->cost_s, search->limit)) continue;
        HAPT_NEW(made->decision, search->result, search->steps);
        for (int s = search->outcome_state[k]; search->state[s].parent != NONE; s = search->state[s].parent)
            made->decision[search->state[s].place - 1] = search->state[s].decision;
        (*outcome)[(*count)++] = *made;
    }
    return HAPT_OK;
}

struct result { struct outcome *outcome; int count; double least; bool trimmed; };

/* One search of the segment: by A* (width 0), or step by step below a limit. */
static enum hapt_status search_once(const struct problem *problem, const struct segment *segment, const uint32_t *start, int width,
                                    double limit, struct hapt_arena *arena, struct search_tally *tally, struct result *result)
{
    struct hapt_arena scratch;
    hapt_arena_init(&scratch);
    struct search search = {.problem = problem, .segment = segment, .arena = &scratch, .result = arena, .tally = tally,
                            .steps = segment->end - segment->first, .classes = problem->classes, .width = width, .limit = limit,
                            .vectors = problem->classes > 1 || problem->memory_resource,
                            .meets = segment->end == problem->step_count};
    enum hapt_status status = prepare(&search);
    if (status == HAPT_OK) status = width > 0 ? run_in_steps(&search, start) : run_astar(&search, start);
    if (status == HAPT_OK) status = hand_over(&search, &result->outcome, &result->count);
    result->trimmed = search.trimmed;
    result->least = INFINITY;
    for (int k = 0; status == HAPT_OK && k < result->count; k++) result->least = fmin(result->least, result->outcome[k].cost_s);
    free(search.heap);
    free(search.state);
    hapt_arena_release(&scratch);
    return status;
}

enum hapt_status hapt_segment_search(const struct problem *problem, const struct segment *segment, const uint32_t *start,
                                     struct hapt_arena *arena, struct outcome **outcome, int *outcome_count,
                                     struct search_tally *tally)
{
    const long most = problem->options->most_states > 0 ? problem->options->most_states : MOST_STATES;
    /* The first segment is searched once, and decides the layouts of shared tables. */
    const long share = (segment->start_count == 0 ? FIRST_SEGMENT : 1) * most / (segment->end - segment->first);
    const int widest = share < FIRST_WIDTH ? FIRST_WIDTH : (int)share;
    struct result best = {.least = INFINITY};
    if (problem->options->exact) {
        HAPT_TRY(search_once(problem, segment, start, 0, INFINITY, arena, tally, &best));
    } else {
        for (int width = FIRST_WIDTH; width <= widest; width = width < widest ? widest : widest + 1) {
            struct result wider;
            HAPT_TRY(search_once(problem, segment, start, width, hapt_border_limit(problem, segment, best.outcome, best.count), arena, tally, &wider));
            if (wider.least <= best.least) best = wider;
            if (!wider.trimmed) break;
        }
        tally->capped = tally->capped || best.trimmed;
    }
    *outcome = best.outcome;
    *outcome_count = best.count;
    return HAPT_OK;
}
