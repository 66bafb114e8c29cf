/*
 * Steps of the search: an operator's cut, the communications in front of it and those behind it.
 *
 * Partial sums are removed behind their writer. What is added to a gradient in another layout than the gradient has is
 * brought to that one behind the operator, too. All other communications stand in front of the operator that needs them
 * first: a forward step makes a version from the cheapest one that the prefix has. A backward step reads an activation
 * that the forward part has made by then, or makes what it needs for itself and the other backward operators of its
 * forward operator; a version of a gradient is waited for, or made from one that is waited for instead. A whole tensor
 * may be made where a shard is needed: others may need the rest.
 */
#include <math.h>

#include "synthesis_moves.h"

enum { OPERANDS = HAPT_MAX_INPUTS + HAPT_MAX_OUTPUTS };

static void go_on(struct advance *advance, int operand);

/* ---- what ends with a step ---- */

static void charge_bytes(struct advance *advance, const double *bytes)
{
    for (int j = 0; j < advance->problem->classes; j++) {
        advance->memory[j] += bytes[j];
        advance->later_s += advance->problem->multiplier[j] * bytes[j];
    }
}

static void charge(struct advance *advance, const struct layouts *layouts, int layout, double times)
{
    double bytes[MOST_CLASSES];
    for (int j = 0; j < advance->problem->classes; j++) bytes[j] = layout_bytes(layouts, layout, j) * times;
    charge_bytes(advance, bytes);
}

/* Versions that the backward part waits for are kept from the forward part on. */
static bool settle_activation(struct advance *advance, const struct object *object, uint32_t word)
{
    const layout_set made = made_of(word), awaited = awaited_of(word);
    if (awaited & ~closure_of(object->layouts, made)) return false;
    const layout_set kept = hapt_kept_versions(word);
    for (int l = 0; l < object->layouts->count; l++)
        if (kept >> l & 1u) charge(advance, object->layouts, l, advance->problem->in_flight);
    return true;
}

static bool settle_gradient(struct advance *advance, const struct object *object, uint32_t word)
{
    const uint32_t layout = advance->word[object->parameter];
    if (layout == 0) return false;
    const double seconds = object->ending->seconds[word - 1][layout - 1];
    if (!isfinite(seconds)) return false;
    advance->later_s += seconds / advance->problem->microbatches;
    charge_bytes(advance, object->ending->bytes[word - 1][layout - 1]);
    return true;
}

static void settle_parameter(struct advance *advance, const struct object *object, uint32_t word)
{
    charge(advance, object->layouts, word ? (int)word - 1 : WHOLE, hapt_parameter_copies(advance->problem, object));
}

static bool settle(struct advance *advance)
{
    for (int d = 0; d < advance->step->dying_count; d++) {
        const int index = advance->step->dying[d];
        const struct object *object = &advance->problem->object[index];
        const uint32_t word = advance->word[index];
        if (object->kind == OBJECT_FORWARD && !settle_activation(advance, object, word)) return false;
        if (object->kind == OBJECT_PARAMETER_GRADIENT && !settle_gradient(advance, object, word)) return false;
        if (object->kind == OBJECT_PARAMETER) settle_parameter(advance, object, word);
    }
    return true;
}

static void finish(struct advance *advance)
{
    const double later_s = advance->later_s, moved_s = advance->moved_s;
    const bool synchronises = advance->synchronises;
    for (int j = 0; j < advance->problem->classes; j++) advance->memory[j] = 0;
    if (advance->choice->exchange_s > 0) {
        advance->moved_s += advance->choice->exchange_s;
        advance->synchronises = true;
    }
    if (settle(advance)) advance->found(advance, advance->context);
    advance->later_s = later_s;
    advance->moved_s = moved_s;
    advance->synchronises = synchronises;
}

/* ---- communications ---- */

static void note_move(struct advance *advance, int operand, int from, int to)
{
    advance->decision.move[advance->decision.move_count++] =
        (struct move){(unsigned char)operand, (unsigned char)from, (unsigned char)to};
}

static void go_on_with(struct advance *advance, int operand, int object, uint32_t word)
{
    const uint32_t before = advance->word[object];
    advance->word[object] = word;
    go_on(advance, operand + 1);
    advance->word[object] = before;
}

static void go_on_with_move(struct advance *advance, int operand, int object, uint32_t word, int from, int to)
{
    const double moved_s = advance->moved_s;
    const bool synchronises = advance->synchronises;
    if (advance->decision.move_count == MOST_MOVES) return;
    note_move(advance, operand, from, to);
    advance->moved_s += advance->problem->object[object].layouts->convert_s[from][to];
    advance->synchronises = true;
    go_on_with(advance, operand, object, word);
    advance->decision.move_count--;
    advance->moved_s = moved_s;
    advance->synchronises = synchronises;
}

static int cheapest_source(const struct layouts *layouts, layout_set from, int to)
{
    int best = -1;
    for (int l = 0; l < layouts->count; l++)
        if (l != PARTIAL && from >> l & 1u && l != to && isfinite(layouts->convert_s[l][to]) &&
            (best < 0 || layouts->convert_s[l][to] < layouts->convert_s[best][to]))
            best = l;
    return best;
}

/* What is remembered of a set of versions: the whole one gives all shards. */
static layout_set remembered(const struct object *object, layout_set made)
{
    return made & 1u << WHOLE && !object->tracked ? (layout_set)(1u << WHOLE) : made;
}

static void need_forward(struct advance *advance, int operand, int index, int need)
{
    const struct object *object = &advance->problem->object[index];
    const layout_set made = made_of(advance->word[index]), kept = awaited_of(advance->word[index]);
    const layout_set there = closure_of(object->layouts, made);
    if (there >> need & 1u) {
        go_on_with(advance, operand, index, word_of(remembered(object, (layout_set)(made | 1u << need)), kept));
        return;
    }
    if (need == PARTIAL) return;
    for (int to = need;; to = WHOLE) {
        const int from = cheapest_source(object->layouts, there, to);
        const layout_set then = (layout_set)(made | 1u << to | (to != need && object->tracked ? 1u << need : 0));
        if (from >= 0) go_on_with_move(advance, operand, index, word_of(remembered(object, then), kept), from, to);
        if (to == WHOLE) return;
    }
}

/* Of an activation the forward part's versions are there; others are made for the operators of one forward operator
 * alone. What is waited for and there is remembered where memory matters: it is kept from the forward part on. */
static void need_activation(struct advance *advance, int operand, int index, int need)
{
    const struct object *object = &advance->problem->object[index];
    const struct layouts *layouts = object->layouts;
    const layout_set made = made_of(advance->word[index]), awaited = awaited_of(advance->word[index]);
    const layout_set there = closure_of(layouts, made),
                     remember = advance->problem->counts_memory ? (layout_set)~0u : (layout_set)~there;
    const bool last = advance->step->last_reader >> operand & 1u;
    const layout_set waiting = (layout_set)((awaited | 1u << need) & remember);
    if (!last || !(waiting & ~there)) go_on_with(advance, operand, index, word_of(made, waiting));
    if (need == PARTIAL || there >> need & 1u) return;
    for (int to = need;; to = WHOLE) {
        const layout_set rest = (layout_set)(awaited & (~closure_of(layouts, (layout_set)(1u << to)) | there));
        const int only = cheapest_source(layouts, there, to);
        for (int from = 0; from < layouts->count; from++) {
            if (from == to || from == PARTIAL || !(there >> from & 1u) || !isfinite(layouts->convert_s[from][to]))
                continue;
            if (from != only && !advance->problem->memory_resource) continue;
            if (last && rest & ~there) continue;
            go_on_with_move(advance, operand, index, word_of(made, (layout_set)((rest | 1u << from) & remember)), from,
                            to);
        }
        if (to == WHOLE) return;
    }
}

static void need_gradient(struct advance *advance, int operand, int index, int need)
{
    const struct object *object = &advance->problem->object[index];
    const struct layouts *layouts = object->layouts;
    const layout_set awaited = awaited_of(advance->word[index]), waiting = (layout_set)(awaited | 1u << need);
    const layout_set hope = advance->step->last_reader >> operand & 1u ? object->makeable : (layout_set)~0u;
    if (!(waiting & ~hope)) go_on_with(advance, operand, index, word_of(0, waiting));
    if (need == PARTIAL || !advance->problem->options->exact) return; /* else its writer converts it */
    for (int to = need;; to = WHOLE) {
        const layout_set rest = (layout_set)(awaited & ~closure_of(layouts, (layout_set)(1u << to)));
        for (int from = SHARDED; from < layouts->count; from++) {
            const layout_set then = (layout_set)(rest | 1u << from);
            if (from == to || from == need || !isfinite(layouts->convert_s[from][to]) || then & ~hope) continue;
            go_on_with_move(advance, operand, index, word_of(0, then), from, to);
        }
        if (to == WHOLE) return;
    }
}

static void need_parameter(struct advance *advance, int operand, int index, int need)
{
    const uint32_t word = advance->word[index];
    if (word == 0)
        go_on_with(advance, operand, index, (uint32_t)need + 1);
    else if ((int)word - 1 == need || (word - 1 == WHOLE && need >= SHARDED))
        go_on(advance, operand + 1);
}

/* Meets the needs of operand and those behind it in every way. */
static void go_on(struct advance *advance, int operand)
{
    const struct step *step = advance->step;
    for (; operand < OPERANDS; operand++)
        if ((operand < HAPT_MAX_INPUTS ? step->input[operand] : step->previous[operand - HAPT_MAX_INPUTS]) >= 0) break;
    if (operand == OPERANDS) {
        finish(advance);
        return;
    }
    const bool input = operand < HAPT_MAX_INPUTS;
    const int index = input ? step->input[operand] : step->previous[operand - HAPT_MAX_INPUTS];
    const int need = input ? advance->choice->input[operand] : advance->landed[operand - HAPT_MAX_INPUTS];
    if (advance->problem->object[index].kind == OBJECT_PARAMETER)
        need_parameter(advance, operand, index, need);
    else if (!step->backward)
        need_forward(advance, operand, index, need);
    else if (advance->problem->object[index].kind == OBJECT_FORWARD)
        need_activation(advance, operand, index, need);
    else
        need_gradient(advance, operand, index, need);
}

/* ---- outputs ---- */

static void write_outputs(struct advance *advance, int o);

/* In long models the versions of a gradient that its readers wait for are made behind its writer, each by a conversion
 * of its own or all by the whole one: states wait for few sets then. */
static bool convert_landed(struct advance *advance, int o, int layout, layout_set lacking)
{
    const struct layouts *layouts = advance->problem->object[advance->step->output[o]].layouts;
    double apart = 0;
    int count = 0;
    for (int l = 0; l < layouts->count; l++) {
        if (!(lacking >> l & 1u)) continue;
        apart += layouts->convert_s[layout][l];
        count++;
    }
    if (layout == PARTIAL || (lacking & 1u << PARTIAL)) return false;
    if (layouts->convert_s[layout][WHOLE] < apart) {
        lacking = 1u << WHOLE;
        apart = layouts->convert_s[layout][WHOLE];
        count = 1;
    }
    if (!isfinite(apart) || advance->decision.move_count + count > MOST_MOVES) return false;
    for (int l = 0; l < layouts->count; l++)
        if (lacking >> l & 1u) note_move(advance, OPERANDS + HAPT_MAX_OUTPUTS + o, layout, l);
    advance->after_s += apart;
    advance->synchronises_after = true;
    return true;
}

/* Output o ends in a layout: false when the steps behind it in the program count on another. */
static bool land(struct advance *advance, int o, int layout)
{
    const int index = advance->step->output[o];
    const struct object *object = &advance->problem->object[index];
    uint32_t *word = &advance->word[index];
    advance->landed[o] = layout;
    if (object->kind == OBJECT_FORWARD) {
        *word = word_of((layout_set)(1u << layout), 0);
        return true;
    }
    if (object->kind == OBJECT_PARAMETER_GRADIENT) {
        const bool fits = *word == 0 || (int)*word == layout + 1;
        *word = (uint32_t)layout + 1;
        return fits;
    }
    const layout_set lacking =
        (layout_set)(awaited_of(*word) & ~closure_of(object->layouts, (layout_set)(1u << layout)));
    *word = 0;
    return !lacking || (!advance->problem->options->exact && convert_landed(advance, o, layout, lacking));
}

static void write_moved(struct advance *advance, int o, int from)
{
    const struct layouts *layouts = advance->problem->object[advance->step->output[o]].layouts;
    uint32_t *word = &advance->word[advance->step->output[o]];
    const uint32_t before = *word;
    const double after_s = advance->after_s;
    const bool synchronises = advance->synchronises_after;
    const unsigned char moves = advance->decision.move_count;
    for (int to = 0; to < layouts->count; to++) {
        if (to == from || !isfinite(layouts->convert_s[from][to]) || advance->decision.move_count == MOST_MOVES)
            continue;
        note_move(advance, OPERANDS + o, from, to);
        advance->after_s += layouts->convert_s[from][to];
        advance->synchronises_after = synchronises || from != WHOLE;
        if (land(advance, o, to)) write_outputs(advance, o + 1);
        *word = before;
        advance->decision.move_count = moves;
        advance->after_s = after_s;
        advance->synchronises_after = synchronises;
    }
}

/* Output o and those behind it in every layout; then the inputs. */
static void write_outputs(struct advance *advance, int o)
{
    const struct step *step = advance->step;
    while (o < HAPT_MAX_OUTPUTS && step->output[o] < 0) o++;
    if (o == HAPT_MAX_OUTPUTS) {
        go_on(advance, 0);
        return;
    }
    const struct object *object = &advance->problem->object[step->output[o]];
    const int layout = advance->choice->output[o];
    uint32_t *word = &advance->word[step->output[o]];
    const uint32_t before = *word;
    const bool moves = object->kind == OBJECT_FORWARD    ? layout == PARTIAL && object->is_read
                       : object->kind == OBJECT_GRADIENT ? layout == PARTIAL || step->previous[o] >= 0
                                                         : false;
    const double after_s = advance->after_s;
    const bool synchronises = advance->synchronises_after;
    const unsigned char move_count = advance->decision.move_count;
    if (object->kind != OBJECT_FORWARD || !moves || object->partial_is_read)
        if (land(advance, o, layout)) write_outputs(advance, o + 1);
    *word = before;
    advance->after_s = after_s;
    advance->synchronises_after = synchronises;
    advance->decision.move_count = move_count;
    if (moves) write_moved(advance, o, layout);
}

void hapt_advance_all(struct advance *advance)
{
    for (int c = 0; c < advance->step->choice_count; c++) {
        advance->choice = &advance->step->choice[c];
        advance->decision = (struct decision){.choice = (unsigned char)c};
        advance->moved_s = advance->after_s = advance->later_s = 0;
        advance->synchronises = advance->synchronises_after = false;
        write_outputs(advance, 0);
    }
}
