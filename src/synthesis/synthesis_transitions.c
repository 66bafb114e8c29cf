/*
 * The effects of a step and of a border on the versions of a state's tensors, with their communications and memory.
 *
 * A step is an operator's cut, the communications before it and those after it.
 * Partial sums are removed right after their writer. An addend to a gradient of another layout is also converted right
 * after its operator. All other communications run before the first operator that needs them. A forward step makes a
 * version from the cheapest one in the prefix. A backward step reads an activation version of the forward part, or
 * makes one for itself and the other backward operators of its forward operator. It waits for a version of a gradient,
 * or makes it from another version that it waits for. A replicated tensor may be made where a shard is needed, since
 * other operators may need the rest.
 */
#include "synthesis_search.h"

/* ---- memory ---- */

double hapt_priced_seconds(const struct problem *problem, const struct layouts *layouts, int layout, double times)
{
    double seconds = 0;
    for (int j = 0; j < problem->classes; j++)
        seconds += problem->multiplier[j] * layout_bytes(layouts, layout, j) * times;
    return seconds;
}

layout_set hapt_kept_versions(uint32_t word)
{
    const layout_set made = made_of(word), awaited = awaited_of(word);
    return (layout_set)((awaited & made) | (awaited & ~made ? 1u << REPLICATED : 0));
}

double hapt_kept_seconds(const struct problem *problem, const struct object *object, uint32_t word)
{
    const layout_set made = made_of(word), awaited = awaited_of(word),
                     later = (layout_set)(awaited & ~closure_of(object->layouts, made));
    const layout_set kept = later ? (layout_set)(awaited & made) : hapt_kept_versions(word);
    double sum = 0, most = 0;
    for (int l = 0; l < object->layouts->count; l++) {
        const double seconds =
            (kept | later) >> l & 1u ? hapt_priced_seconds(problem, object->layouts, l, problem->in_flight) : 0;
        if (kept >> l & 1u) sum += seconds;
        if (later >> l & 1u && seconds > most) most = seconds;
    }
    return sum + most;
}

/* ---- borders: every crossing tensor has one layout ---- */

int hapt_cheapest_source(const struct layouts *layouts, layout_set from, int to)
{
    double best_s = INFINITY;
    int best = -1;
    for (uint32_t rest = from & ~(1u << PARTIAL | 1u << to); rest; rest &= rest - 1) {
        const int l = __builtin_ctz(rest);
        if (!(layouts->convert_s[l][to] < best_s)) continue;
        best = l;
        best_s = layouts->convert_s[l][to];
    }
    return best;
}

double hapt_border_cost(const struct object *object, uint32_t word, int layout, struct border_conversion *conversion,
                        int *conversion_count)
{
    const struct layouts *layouts = object->layouts;
    const layout_set there = closure_of(layouts, made_of(word)), awaited = awaited_of(word);
    double seconds = 0;
    *conversion_count = 0;
    if (object->kind == OBJECT_FORWARD) {
        if (awaited & ~closure_of(layouts, (layout_set)(made_of(word) | 1u << layout))) return INFINITY;
        if (there >> layout & 1u) return 0;
        const int best = hapt_cheapest_source(layouts, there, layout);
        if (best < 0) return INFINITY;
        conversion[(*conversion_count)++] =
            (struct border_conversion){.from = (unsigned char)best, .to = (unsigned char)layout};
        return layouts->convert_s[best][layout];
    }
    const layout_set have = closure_of(layouts, (layout_set)(1u << layout));
    for (int l = 0; l < layouts->count; l++) {
        if (!(awaited >> l & 1u) || have >> l & 1u) continue;
        seconds += layouts->convert_s[layout][l];
        if (*conversion_count == MOST_LAYOUTS) return INFINITY;
        conversion[(*conversion_count)++] =
            (struct border_conversion){.from = (unsigned char)layout, .to = (unsigned char)l};
    }
    if (*conversion_count > 1 && layouts->convert_s[layout][REPLICATED] < seconds) {
        *conversion_count = 1;
        conversion[0] = (struct border_conversion){.from = (unsigned char)layout, .to = REPLICATED};
        seconds = layouts->convert_s[layout][REPLICATED];
    }
    return seconds;
}

double hapt_border_spread(const struct problem *problem, const struct segment *segment)
{
    double sum = 0;
    for (int k = 0; k < segment->end_count; k++) {
        const struct object *object = &problem->object[segment->local[segment->at_end[k]]];
        double most = 0;
        if (is_parameter(object)) return INFINITY;
        for (int a = 0; a < object->layouts->count; a++)
            for (int b = 0; b < object->layouts->count; b++)
                if (a != PARTIAL && b != PARTIAL && a != b) most = fmax(most, object->layouts->convert_s[a][b]);
        sum += most;
    }
    return sum;
}

/* ---- the limit set by known outcomes ---- */

struct limit {
    const struct problem *problem;
    const struct segment *segment;
    const struct outcome *outcome;
    int count;
    const uint32_t *decided; /* words of parameters in one outcome */
};

static const struct object *crossing(const struct limit *limit, int k)
{
    return &limit->problem->object[limit->segment->local[limit->segment->at_end[k]]];
}

static bool same_decided(const struct limit *limit, const uint32_t *word)
{
    for (int k = 0; k < limit->segment->end_count; k++)
        if (is_parameter(crossing(limit, k)) && word[k] != limit->decided[k]) return false;
    return true;
}

/* Cost of the cheapest outcome, converted to the given layouts. */
static double reached(const struct limit *limit, const unsigned char *layout)
{
    double least = INFINITY;
    for (int o = 0; o < limit->count; o++) {
        double cost = limit->outcome[o].cost_s;
        if (!same_decided(limit, limit->outcome[o].word)) continue;
        for (int k = 0; k < limit->segment->end_count && cost < least; k++) {
            const struct object *object = crossing(limit, k);
            if (is_parameter(object)) continue;
            const int from = crossing_layout(object, limit->outcome[o].word[k]);
            if (from != layout[k]) cost += crossing_seconds(object, from, layout[k]);
        }
        least = fmin(least, cost);
    }
    return least;
}

/* The highest such cost over all layouts. */
static double dearest(const struct limit *limit, int k, unsigned char *layout)
{
    double most = 0;
    if (k == limit->segment->end_count) return reached(limit, layout);
    const struct object *object = crossing(limit, k);
    if (is_parameter(object)) return dearest(limit, k + 1, layout);
    for (int l = 0; l < object->layouts->count; l++) {
        if (l == PARTIAL) continue;
        layout[k] = (unsigned char)l;
        most = fmax(most, dearest(limit, k + 1, layout));
    }
    return most;
}

double hapt_border_limit(const struct problem *problem, const struct segment *segment, const struct outcome *outcome,
                         int count)
{
    enum { MOST_LOOKED_AT = 20000 };
    struct limit limit = {.problem = problem, .segment = segment, .outcome = outcome, .count = count};
    unsigned char layout[MOST_CROSSING_OBJECTS];
    double ends = 1, most = 0, least = INFINITY;
    if (count == 0) return INFINITY;
    for (int k = 0; k < segment->end_count; k++)
        if (!is_parameter(crossing(&limit, k))) ends *= crossing(&limit, k)->layouts->count;
    for (int o = 0; o < count; o++) least = fmin(least, outcome[o].cost_s);
    if (ends * count > MOST_LOOKED_AT) return least + hapt_border_spread(problem, segment);
    for (int o = 0; o < count; o++) {
        bool known = false; /* true: these parameter layouts were tried already */
        limit.decided = outcome[o].word;
        for (int other = 0; !known && other < o; other++) known = same_decided(&limit, outcome[other].word);
        if (!known) most = fmax(most, dearest(&limit, 0, layout));
    }
    return most;
}

/* ---- steps ---- */

static void next_operand(struct advance *advance, int operand);

/* ---- charges when an object's life ends ---- */

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

/* Charges the versions that the backward part waits for: they are kept from the forward part on. */
static bool charge_activation(struct advance *advance, const struct object *object, uint32_t word)
{
    const layout_set made = made_of(word), awaited = awaited_of(word);
    if (awaited & ~closure_of(object->layouts, made)) return false;
    const layout_set kept = hapt_kept_versions(word);
    for (int l = 0; l < object->layouts->count; l++)
        if (kept >> l & 1u) charge(advance, object->layouts, l, advance->problem->in_flight);
    return true;
}

static bool charge_gradient(struct advance *advance, const struct object *object, uint32_t word)
{
    const uint32_t layout = advance->word[object->parameter];
    if (layout == 0) return false;
    const double seconds = object->ending->seconds[word - 1][layout - 1];
    if (!isfinite(seconds)) return false;
    advance->later_s += seconds / advance->problem->microbatches;
    charge_bytes(advance, object->ending->bytes[word - 1][layout - 1]);
    return true;
}

static void charge_parameter(struct advance *advance, const struct object *object, uint32_t word)
{
    charge(advance, object->layouts, word ? (int)word - 1 : REPLICATED,
           hapt_parameter_copies(&advance->problem->graph->tensor[object->tensor], advance->problem->state_bytes));
}

static bool charge_end(struct advance *advance)
{
    for (int d = 0; d < advance->step->dying_count; d++) {
        const int index = advance->step->dying[d];
        const struct object *object = &advance->problem->object[index];
        const uint32_t word = advance->word[index];
        if (object->kind == OBJECT_FORWARD && !charge_activation(advance, object, word)) return false;
        if (object->kind == OBJECT_PARAMETER_GRADIENT && !charge_gradient(advance, object, word)) return false;
        if (object->kind == OBJECT_PARAMETER) charge_parameter(advance, object, word);
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
    if (charge_end(advance)) advance->found(advance, advance->context);
    advance->later_s = later_s;
    advance->moved_s = moved_s;
    advance->synchronises = synchronises;
}

/* ---- communications ---- */

static void note_conversion(struct advance *advance, int operand, int from, int to)
{
    advance->decision.conversion[advance->decision.conversion_count++] =
        (struct conversion){(unsigned char)operand, (unsigned char)from, (unsigned char)to};
}

static void next_operand_with(struct advance *advance, int operand, int object, uint32_t word)
{
    const uint32_t before = advance->word[object];
    advance->word[object] = word;
    next_operand(advance, operand + 1);
    advance->word[object] = before;
}

static void next_operand_converted(struct advance *advance, int operand, int object, uint32_t word, int from, int to)
{
    const double moved_s = advance->moved_s;
    const bool synchronises = advance->synchronises;
    if (advance->decision.conversion_count == MOST_CONVERSIONS) return;
    note_conversion(advance, operand, from, to);
    advance->moved_s += advance->problem->object[object].layouts->convert_s[from][to];
    advance->synchronises = true;
    next_operand_with(advance, operand, object, word);
    advance->decision.conversion_count--;
    advance->moved_s = moved_s;
    advance->synchronises = synchronises;
}

/* The versions recorded of a set: a replicated one includes all shards. */
static layout_set recorded(const struct object *object, layout_set made)
{
    return made & 1u << REPLICATED && !object->tracked ? (layout_set)(1u << REPLICATED) : made;
}

static void need_forward(struct advance *advance, int operand, int index, int need)
{
    const struct object *object = &advance->problem->object[index];
    const layout_set made = made_of(advance->word[index]), kept = awaited_of(advance->word[index]);
    const layout_set there = closure_of(object->layouts, made);
    if (there >> need & 1u) {
        next_operand_with(advance, operand, index, word_of(recorded(object, (layout_set)(made | 1u << need)), kept));
        return;
    }
    if (need == PARTIAL) return;
    for (int to = need;; to = REPLICATED) {
        const int from = hapt_cheapest_source(object->layouts, there, to);
        const layout_set then = (layout_set)(made | 1u << to | (to != need && object->tracked ? 1u << need : 0));
        if (from >= 0) next_operand_converted(advance, operand, index, word_of(recorded(object, then), kept), from, to);
        if (to == REPLICATED) return;
    }
}

/* For an activation, the forward part's versions exist; others are made for the operators of one forward operator
 * only. A version that is waited for and exists is recorded if memory counts, since it is kept from the forward part
 * on. */
static void need_activation(struct advance *advance, int operand, int index, int need)
{
    const struct object *object = &advance->problem->object[index];
    const struct layouts *layouts = object->layouts;
    const layout_set made = made_of(advance->word[index]), awaited = awaited_of(advance->word[index]);
    const layout_set there = closure_of(layouts, made),
                     remember = advance->problem->counts_memory ? (layout_set)~0u : (layout_set)~there;
    const bool last = advance->step->last_reader >> operand & 1u;
    const layout_set waiting = (layout_set)((awaited | 1u << need) & remember);
    if (!last || !(waiting & ~there)) next_operand_with(advance, operand, index, word_of(made, waiting));
    if (need == PARTIAL || there >> need & 1u) return;
    for (int to = need;; to = REPLICATED) {
        const layout_set rest = (layout_set)(awaited & (~closure_of(layouts, (layout_set)(1u << to)) | there));
        const int only = hapt_cheapest_source(layouts, there, to);
        for (int from = 0; from < layouts->count; from++) {
            if (from == to || from == PARTIAL || !(there >> from & 1u) || !isfinite(layouts->convert_s[from][to]))
                continue;
            if (from != only && !advance->problem->memory_resource) continue;
            if (last && rest & ~there) continue;
            next_operand_converted(advance, operand, index, word_of(made, (layout_set)((rest | 1u << from) & remember)),
                                   from, to);
        }
        if (to == REPLICATED) return;
    }
}

static void need_gradient(struct advance *advance, int operand, int index, int need)
{
    const struct object *object = &advance->problem->object[index];
    const struct layouts *layouts = object->layouts;
    const layout_set awaited = awaited_of(advance->word[index]), waiting = (layout_set)(awaited | 1u << need);
    const layout_set hope = advance->step->last_reader >> operand & 1u ? object->makeable : (layout_set)~0u;
    if (!(waiting & ~hope)) next_operand_with(advance, operand, index, word_of(0, waiting));
    if (need == PARTIAL || !advance->problem->options->exact) return; /* otherwise its writer converts it */
    for (int to = need;; to = REPLICATED) {
        const layout_set rest = (layout_set)(awaited & ~closure_of(layouts, (layout_set)(1u << to)));
        for (int from = SHARDED; from < layouts->count; from++) {
            const layout_set then = (layout_set)(rest | 1u << from);
            if (from == to || from == need || !isfinite(layouts->convert_s[from][to]) || then & ~hope) continue;
            next_operand_converted(advance, operand, index, word_of(0, then), from, to);
        }
        if (to == REPLICATED) return;
    }
}

static void need_parameter(struct advance *advance, int operand, int index, int need)
{
    const uint32_t word = advance->word[index];
    if (word == 0)
        next_operand_with(advance, operand, index, (uint32_t)need + 1);
    else if ((int)word - 1 == need || (word - 1 == REPLICATED && need >= SHARDED))
        next_operand(advance, operand + 1);
}

/* Meets the needs of `operand` and of those after it in every possible combination. */
static void next_operand(struct advance *advance, int operand)
{
    const struct step *step = advance->step;
    while (operand < OPERANDS && object_at(step, operand) < 0) operand++;
    if (operand == OPERANDS) {
        finish(advance);
        return;
    }
    const int index = object_at(step, operand);
    const int need =
        operand < HAPT_MAX_INPUTS ? advance->choice->input[operand] : advance->output_layout[operand - HAPT_MAX_INPUTS];
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

/* In long models a gradient's versions for its readers are made right after its writer, each by its own conversion
 * or all from the replicated one. So states wait for few different sets. */
static bool convert_output(struct advance *advance, int o, int layout, layout_set lacking)
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
    if (layouts->convert_s[layout][REPLICATED] < apart) {
        lacking = 1u << REPLICATED;
        apart = layouts->convert_s[layout][REPLICATED];
        count = 1;
    }
    if (!isfinite(apart) || advance->decision.conversion_count + count > MOST_CONVERSIONS) return false;
    for (int l = 0; l < layouts->count; l++)
        if (lacking >> l & 1u) note_conversion(advance, ALL_OPERANDS + o, layout, l);
    advance->after_s += apart;
    advance->synchronises_after = true;
    return true;
}

/* Output o ends in a layout. False if later steps of the program need another one. */
static bool set_output_layout(struct advance *advance, int o, int layout)
{
    const int index = advance->step->output[o];
    const struct object *object = &advance->problem->object[index];
    uint32_t *word = &advance->word[index];
    advance->output_layout[o] = layout;
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
    return !lacking || (!advance->problem->options->exact && convert_output(advance, o, layout, lacking));
}

static void write_converted(struct advance *advance, int o, int from)
{
    const struct layouts *layouts = advance->problem->object[advance->step->output[o]].layouts;
    uint32_t *word = &advance->word[advance->step->output[o]];
    const uint32_t before = *word;
    const double after_s = advance->after_s;
    const bool synchronises = advance->synchronises_after;
    const unsigned char conversion_count = advance->decision.conversion_count;
    for (int to = 0; to < layouts->count; to++) {
        if (to == from || !isfinite(layouts->convert_s[from][to]) ||
            advance->decision.conversion_count == MOST_CONVERSIONS)
            continue;
        note_conversion(advance, OPERANDS + o, from, to);
        advance->after_s += layouts->convert_s[from][to];
        advance->synchronises_after = synchronises || from != REPLICATED;
        if (set_output_layout(advance, o, to)) write_outputs(advance, o + 1);
        *word = before;
        advance->decision.conversion_count = conversion_count;
        advance->after_s = after_s;
        advance->synchronises_after = synchronises;
    }
}

/* Tries every layout of output o and of those after it; then the inputs. */
static void write_outputs(struct advance *advance, int o)
{
    const struct step *step = advance->step;
    while (o < HAPT_MAX_OUTPUTS && step->output[o] < 0) o++;
    if (o == HAPT_MAX_OUTPUTS) {
        next_operand(advance, 0);
        return;
    }
    const struct object *object = &advance->problem->object[step->output[o]];
    const int layout = advance->choice->output[o];
    uint32_t *word = &advance->word[step->output[o]];
    const uint32_t before = *word;
    const bool converts = object->kind == OBJECT_FORWARD    ? layout == PARTIAL && object->is_read
                          : object->kind == OBJECT_GRADIENT ? layout == PARTIAL || step->previous[o] >= 0
                                                            : false;
    const double after_s = advance->after_s;
    const bool synchronises = advance->synchronises_after;
    const unsigned char conversion_count = advance->decision.conversion_count;
    if (object->kind != OBJECT_FORWARD || !converts || object->partial_is_read)
        if (set_output_layout(advance, o, layout)) write_outputs(advance, o + 1);
    *word = before;
    advance->after_s = after_s;
    advance->synchronises_after = synchronises;
    advance->decision.conversion_count = conversion_count;
    if (converts) write_converted(advance, o, layout);
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
