/* The end of a segment. Input: the states of its last position. Output: outcomes, the cheapest for each layout of
 * the crossing objects. */
#include <string.h>

#include "synthesis_states.h"

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
        HAPT_NEW(search->outcome[at].bytes, search->result, search->classes);
        memcpy(search->outcome[at].word, border->word, (size_t)width * sizeof(uint32_t));
    }
    search->outcome_state[at] = border->state;
    search->outcome[at].cost_s = border->cost;
    memcpy(search->outcome[at].bytes, border->bytes, (size_t)search->classes * sizeof(double));
    search->outcome[at].border_count = border->conversion_count;
    HAPT_NEW(search->outcome[at].border, search->result, border->conversion_count);
    memcpy(search->outcome[at].border, border->conversion,
           (size_t)border->conversion_count * sizeof border->conversion[0]);
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
    if (object->kind == OBJECT_PARAMETER || object->kind == OBJECT_PARAMETER_GRADIENT) {
        border->word[k] = word;
        return enumerate_border(search, border, k + 1);
    }
    for (int l = 0; l < object->layouts->count; l++) {
        const int conversion_count = border->conversion_count;
        const double cost = border->cost;
        double bytes[MOST_CLASSES];
        int more;
        memcpy(bytes, border->bytes, sizeof bytes);
        if (!hapt_border_allows(search->problem, object->layouts, l) || conversion_count + MOST_LAYOUTS > 128) continue;
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
        for (int s = search->outcome_state[k]; search->state[s].parent != NO_STATE; s = search->state[s].parent)
            made->decision[search->state[s].position - 1] = search->state[s].decision;
        (*outcome)[(*count)++] = *made;
    }
    return HAPT_OK;
}
