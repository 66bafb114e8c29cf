/* Borders between segments: every crossing tensor has one layout. */
#include <math.h>

#include "synthesis_private.h"

bool hapt_border_allows(const struct problem *problem, const struct layouts *layouts, int layout)
{
    const unsigned allowed = problem->options->boundary_layouts;
    if (layout == PARTIAL) return false;
    if (!allowed) return true;
    return allowed >> (layout == REPLICATED ? 0 : 1 + layouts->property[layout].dim) & 1u;
}

double hapt_border_cost(const struct object *object, uint32_t word, int layout, struct border_conversion *conversion,
                        int *conversion_count)
{
    const struct layouts *layouts = object->layouts;
    const layout_set there = (layout_set)(closure_of(layouts, made_of(word)) & ~(1u << PARTIAL)),
                     awaited = awaited_of(word);
    double seconds = 0;
    *conversion_count = 0;
    if (object->kind == OBJECT_FORWARD) {
        if (awaited & ~closure_of(layouts, (layout_set)(made_of(word) | 1u << layout))) return INFINITY;
        if (there >> layout & 1u) return 0;
        int best = REPLICATED;
        for (int l = 0; l < layouts->count; l++)
            if (there >> l & 1u &&
                layouts->convert_s[l][layout] < (there >> best & 1u ? layouts->convert_s[best][layout] : INFINITY))
                best = l;
        if (!(there >> best & 1u)) return INFINITY;
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
        if (object->kind == OBJECT_PARAMETER || object->kind == OBJECT_PARAMETER_GRADIENT) return INFINITY;
        for (int a = 0; a < object->layouts->count; a++)
            for (int b = 0; b < object->layouts->count; b++)
                if (hapt_border_allows(problem, object->layouts, a) &&
                    hapt_border_allows(problem, object->layouts, b) && a != b)
                    most = fmax(most, object->layouts->convert_s[a][b]);
        sum += most;
    }
    return sum;
}

/* ---- the limit set by known outcomes ---- */

static bool is_layout(const struct object *object)
{
    return object->kind == OBJECT_FORWARD || object->kind == OBJECT_GRADIENT;
}

static int layout_of(const struct object *object, uint32_t word)
{
    const layout_set set = object->kind == OBJECT_FORWARD ? made_of(word) : awaited_of(word);
    int layout = 0;
    while (!(set >> layout & 1u)) layout++;
    return layout;
}

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
        if (!is_layout(crossing(limit, k)) && word[k] != limit->decided[k]) return false;
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
            if (!is_layout(object)) continue;
            const int from = layout_of(object, limit->outcome[o].word[k]);
            if (from == layout[k]) continue;
            cost += object->kind == OBJECT_FORWARD ? object->layouts->convert_s[from][layout[k]]
                                                   : object->layouts->convert_s[layout[k]][from];
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
    if (!is_layout(object)) return dearest(limit, k + 1, layout);
    for (int l = 0; l < object->layouts->count; l++) {
        if (!hapt_border_allows(limit->problem, object->layouts, l)) continue;
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
        if (is_layout(crossing(&limit, k))) ends *= crossing(&limit, k)->layouts->count;
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
