/* A shortest path with resources: labels of cost and memory. The bounds come from the prices of memory at which the
 * segments were searched. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "synthesis_chain.h"

/* Labels that go on per border: few first, for a good path as the bound; then as many as allowed. */
enum { FEW_LABELS = 300, MOST_LABELS = 5000, HALVINGS = 16 };
#define ROUNDING 1e-12
#define NONE (-1)

struct label {
    double cost_s, bound, bytes[MOST_CLASSES];
    int node, parent;
    const struct chain_arc *arc;
};
struct labels {
    int count, capacity;
    struct label *label;
};

struct walk {
    const struct chain *chain;
    struct hapt_arena arena;
    const double *limit;
    double tolerance;
    double **remaining_s;     /* [border] by node and price: least cost and priced memory to the end */
    double **remaining_bytes; /* [border] by node and class: least memory to the end */
    struct labels *labels;    /* [border] */
    int price_count;
    double (*price)[MOST_CLASSES]; /* the chain's, and one that is nearly the best */
    double known_s;                /* cost of the best path so far */
    int most_labels;
    bool exact;
};

enum hapt_status hapt_chain_init(struct chain *chain, int classes, int segment_count, struct hapt_arena *arena)
{
    const double nothing[MOST_CLASSES] = {0};
    *chain = (struct chain){.arena = arena, .classes = classes, .segment_count = segment_count};
    HAPT_NEW(chain->layer, arena, segment_count + 1);
    return hapt_chain_add_price(chain, nothing);
}

enum hapt_status hapt_chain_add_price(struct chain *chain, const double *price)
{
    if (chain->price_count == chain->price_capacity) {
        double(*grown)[MOST_CLASSES];
        const int capacity = chain->price_capacity ? 2 * chain->price_capacity : 16;
        HAPT_NEW(grown, chain->arena, capacity);
        if (chain->price_count) memcpy(grown, chain->price, (size_t)chain->price_count * sizeof *grown);
        chain->price = grown;
        chain->price_capacity = capacity;
    }
    memcpy(chain->price[chain->price_count++], price, (size_t)chain->classes * sizeof *price);
    return HAPT_OK;
}

enum hapt_status hapt_chain_add_arc(struct chain *chain, int segment, struct chain_arc arc)
{
    struct chain_layer *layer = &chain->layer[segment];
    if (layer->arc_count == layer->arc_capacity) {
        struct chain_arc *grown;
        const int capacity = layer->arc_capacity ? 2 * layer->arc_capacity : 64;
        HAPT_NEW(grown, chain->arena, capacity);
        if (layer->arc_count) memcpy(grown, layer->arc, (size_t)layer->arc_count * sizeof *grown);
        layer->arc = grown;
        layer->arc_capacity = capacity;
    }
    layer->arc[layer->arc_count++] = arc;
    if (arc.from >= layer->node_count) layer->node_count = arc.from + 1;
    if (arc.to >= layer[1].node_count) layer[1].node_count = arc.to + 1;
    return HAPT_OK;
}

/* ---- lower bounds to the end ---- */

static double priced_s(const struct chain_arc *arc, const double *price, int classes)
{
    double seconds = arc->cost_s;
    for (int j = 0; j < classes; j++) seconds += price[j] * arc->bytes[j];
    return seconds;
}

static enum hapt_status bound_remaining(struct walk *walk)
{
    const struct chain *chain = walk->chain;
    const int prices = walk->price_count, classes = chain->classes;
    HAPT_NEW(walk->remaining_s, &walk->arena, chain->segment_count + 1);
    HAPT_NEW(walk->remaining_bytes, &walk->arena, chain->segment_count + 1);
    for (int s = chain->segment_count; s >= 0; s--) {
        const struct chain_layer *layer = &chain->layer[s];
        HAPT_NEW(walk->remaining_s[s], &walk->arena, layer->node_count * prices);
        HAPT_NEW(walk->remaining_bytes[s], &walk->arena, layer->node_count * classes);
        for (int n = 0; s < chain->segment_count && n < layer->node_count * prices; n++)
            walk->remaining_s[s][n] = INFINITY;
        for (int n = 0; s < chain->segment_count && n < layer->node_count * classes; n++)
            walk->remaining_bytes[s][n] = INFINITY;
        for (int a = 0; a < layer->arc_count; a++) {
            const struct chain_arc *arc = &layer->arc[a];
            for (int p = 0; p < prices; p++) {
                double *its = &walk->remaining_s[s][arc->from * prices + p];
                *its =
                    fmin(*its, priced_s(arc, walk->price[p], classes) + walk->remaining_s[s + 1][arc->to * prices + p]);
            }
            for (int j = 0; j < classes; j++) {
                double *its = &walk->remaining_bytes[s][arc->from * classes + j];
                *its = fmin(*its, arc->bytes[j] + walk->remaining_bytes[s + 1][arc->to * classes + j]);
            }
        }
    }
    return HAPT_OK;
}

/* For every price, a full path costs at least its priced cost minus the price of the entire memory limit. */
static bool bound_label(const struct walk *walk, int border, struct label *label)
{
    const struct chain *chain = walk->chain;
    label->bound = 0;
    for (int j = 0; j < chain->classes; j++)
        if (label->bytes[j] + walk->remaining_bytes[border][label->node * chain->classes + j] >
            walk->limit[j] * (1 + ROUNDING))
            return false;
    for (int p = 0; p < walk->price_count; p++) {
        double bound = label->cost_s + walk->remaining_s[border][label->node * walk->price_count + p];
        for (int j = 0; j < chain->classes; j++) bound -= walk->price[p][j] * (walk->limit[j] - label->bytes[j]);
        label->bound = fmax(label->bound, bound);
    }
    return isfinite(label->bound) && label->bound < walk->known_s * (1 - walk->tolerance);
}

/* ---- labels ---- */

static enum hapt_status add_label(struct walk *walk, int border, const struct label *label)
{
    struct labels *labels = &walk->labels[border];
    if (labels->count == labels->capacity) {
        const int capacity = labels->capacity ? 2 * labels->capacity : 256;
        struct label *grown = realloc(labels->label, (size_t)capacity * sizeof *grown);
        if (!grown) return hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory for the labels of a synthesis");
        labels->label = grown;
        labels->capacity = capacity;
    }
    labels->label[labels->count++] = *label;
    return HAPT_OK;
}

static int by_node_and_cost(const void *a, const void *b)
{
    const struct label *x = a, *y = b;
    if (x->node != y->node) return x->node < y->node ? -1 : 1;
    if (x->cost_s != y->cost_s) return x->cost_s < y->cost_s ? -1 : 1;
    return (x->bytes[0] > y->bytes[0]) - (x->bytes[0] < y->bytes[0]);
}

static int by_bound(const void *a, const void *b)
{
    const struct label *x = a, *y = b;
    if (x->bound != y->bound) return x->bound < y->bound ? -1 : 1;
    return by_node_and_cost(a, b);
}

static bool needs_no_more(const struct walk *walk, const struct label *a, const struct label *b)
{
    for (int j = 0; j < walk->chain->classes; j++)
        if (a->bytes[j] > b->bytes[j] * (1 + ROUNDING)) return false;
    return true;
}

/* Labels of a node are sorted by cost: one is dominated by any earlier one that needs no more memory. */
static void drop_dominated(struct walk *walk, struct labels *labels)
{
    int kept = 0, first = 0;
    if (labels->count == 0) return;
    qsort(labels->label, (size_t)labels->count, sizeof *labels->label, by_node_and_cost);
    for (int k = 0; k < labels->count; k++) {
        bool dominated = false;
        if (kept > 0 && labels->label[kept - 1].node != labels->label[k].node) first = kept;
        const int from = walk->chain->classes == 1 && kept > first ? kept - 1 : first; /* the last one needs least */
        for (int m = from; m < kept && !dominated; m++)
            dominated = needs_no_more(walk, &labels->label[m], &labels->label[k]);
        if (!dominated) labels->label[kept++] = labels->label[k];
    }
    labels->count = kept;
    if (kept <= walk->most_labels) return;
    qsort(labels->label, (size_t)kept, sizeof *labels->label, by_bound);
    labels->count = walk->most_labels;
    walk->exact = false;
}

/* ---- paths ---- */

static bool is_within(const struct walk *walk, const struct label *label)
{
    for (int j = 0; j < walk->chain->classes; j++)
        if (label->bytes[j] > walk->limit[j] * (1 + ROUNDING)) return false;
    return true;
}

static void go_along(const struct chain *chain, const struct chain_arc *arc, struct label *label)
{
    label->cost_s += arc->cost_s;
    label->node = arc->to;
    label->arc = arc;
    for (int j = 0; j < chain->classes; j++) label->bytes[j] += arc->bytes[j];
}

/* The best path at one price; returns its memory. Records it if it fits and is the best so far. */
static enum hapt_status try_price(struct walk *walk, const double *price, const struct chain_arc **path, double *bytes)
{
    const struct chain *chain = walk->chain;
    double *ahead, *behind;
    const struct chain_arc ***best, **its; /* [segment][node] */
    struct label label = {.node = 0};
    HAPT_NEW(best, &walk->arena, chain->segment_count);
    HAPT_NEW(its, &walk->arena, chain->segment_count);
    HAPT_NEW(behind, &walk->arena, chain->layer[chain->segment_count].node_count);
    for (int s = chain->segment_count - 1; s >= 0; s--, behind = ahead) {
        const struct chain_layer *layer = &chain->layer[s];
        HAPT_NEW(best[s], &walk->arena, layer->node_count);
        HAPT_NEW(ahead, &walk->arena, layer->node_count);
        for (int n = 0; n < layer->node_count; n++) ahead[n] = INFINITY;
        for (int a = 0; a < layer->arc_count; a++) {
            const struct chain_arc *arc = &layer->arc[a];
            const double seconds = priced_s(arc, price, chain->classes) + behind[arc->to];
            if (seconds >= ahead[arc->from]) continue;
            ahead[arc->from] = seconds;
            best[s][arc->from] = arc;
        }
    }
    for (int s = 0; s < chain->segment_count; s++) {
        its[s] = best[s][label.node];
        if (!its[s]) return HAPT_OK;
        go_along(chain, its[s], &label);
    }
    memcpy(bytes, label.bytes, sizeof label.bytes);
    if (!is_within(walk, &label) || label.cost_s >= walk->known_s) return HAPT_OK;
    walk->known_s = label.cost_s;
    memcpy(path, its, (size_t)chain->segment_count * sizeof *path);
    return HAPT_OK;
}

/* Finds good prices for bounds: the chain's and, by bisection between one that exceeds the memory and one that
 * fits, nearly the best. */
static enum hapt_status find_prices(struct walk *walk, const struct chain_arc **path)
{
    const struct chain *chain = walk->chain;
    const double *last = chain->price[chain->price_count - 1];
    double low = 0, high = 1, price[MOST_CLASSES], bytes[MOST_CLASSES] = {0};
    HAPT_NEW(walk->price, &walk->arena, chain->price_count + 2);
    for (int p = 0; p < chain->price_count; p++) {
        memcpy(walk->price[walk->price_count++], chain->price[p], sizeof *walk->price);
        HAPT_TRY(try_price(walk, chain->price[p], path, bytes));
    }
    for (int k = 0; k < HALVINGS; k++) { /* of the last price */
        const double part = (low + high) / 2;
        for (int j = 0; j < chain->classes; j++) price[j] = part * last[j];
        HAPT_TRY(try_price(walk, price, path, bytes));
        bool within = true;
        for (int j = 0; j < chain->classes; j++) within = within && bytes[j] <= walk->limit[j];
        if (within)
            high = part;
        else
            low = part;
    }
    for (int k = 0; k < 2; k++, walk->price_count++)
        for (int j = 0; j < chain->classes; j++) walk->price[walk->price_count][j] = (k ? high : low) * last[j];
    return HAPT_OK;
}

static enum hapt_status walk_on(struct walk *walk, int s)
{
    const struct chain_layer *layer = &walk->chain->layer[s];
    const struct labels *here = &walk->labels[s];
    int *first, *arc; /* arcs by the node they start from */
    HAPT_NEW(first, &walk->arena, layer->node_count + 2);
    HAPT_NEW(arc, &walk->arena, layer->arc_count);
    for (int a = 0; a < layer->arc_count; a++) first[layer->arc[a].from + 2]++;
    for (int n = 0; n < layer->node_count; n++) first[n + 2] += first[n + 1];
    for (int a = 0; a < layer->arc_count; a++) arc[first[layer->arc[a].from + 1]++] = a;
    for (int k = 0; k < here->count; k++) {
        for (int a = first[here->label[k].node]; a < first[here->label[k].node + 1]; a++) {
            struct label label = here->label[k];
            label.parent = k;
            go_along(walk->chain, &layer->arc[arc[a]], &label);
            if (bound_label(walk, s + 1, &label)) HAPT_TRY(add_label(walk, s + 1, &label));
        }
    }
    drop_dominated(walk, &walk->labels[s + 1]);
    return HAPT_OK;
}

/* Labels from the first border to the last; returns the best path if it beats the known one. */
static enum hapt_status walk_chain(struct walk *walk, int most_labels, const struct chain_arc **path)
{
    const struct chain *chain = walk->chain;
    struct label label = {.node = 0, .parent = NONE};
    walk->exact = true;
    walk->most_labels = most_labels;
    for (int s = 0; s <= chain->segment_count; s++) walk->labels[s].count = 0;
    if (bound_label(walk, 0, &label)) HAPT_TRY(add_label(walk, 0, &label));
    for (int s = 0; s < chain->segment_count; s++) HAPT_TRY(walk_on(walk, s));
    const struct labels *end = &walk->labels[chain->segment_count];
    int last = NONE;
    for (int k = 0; k < end->count; k++)
        if (end->label[k].cost_s < walk->known_s) walk->known_s = end->label[last = k].cost_s;
    for (int s = chain->segment_count, k = last; k != NONE && s > 0; s--) {
        path[s - 1] = walk->labels[s].label[k].arc;
        k = walk->labels[s].label[k].parent;
    }
    return HAPT_OK;
}

static enum hapt_status walk_twice(struct walk *walk, const struct chain_arc **path)
{
    if (walk->chain->layer[0].node_count == 0) return HAPT_OK;
    HAPT_NEW(walk->labels, &walk->arena, walk->chain->segment_count + 1);
    HAPT_TRY(find_prices(walk, path));
    HAPT_TRY(bound_remaining(walk));
    HAPT_TRY(walk_chain(walk, FEW_LABELS, path));
    return walk->exact ? HAPT_OK : walk_chain(walk, MOST_LABELS, path);
}

enum hapt_status hapt_chain_search(const struct chain *chain, const double *limit, double tolerance,
                                   const struct chain_arc **path, double *cost_s, bool *exact)
{
    struct walk walk = {
        .chain = chain, .limit = limit, .tolerance = fmax(tolerance, ROUNDING), .known_s = INFINITY, .exact = true};
    hapt_arena_init(&walk.arena);
    const enum hapt_status status = walk_twice(&walk, path);
    for (int s = 0; walk.labels && s <= chain->segment_count; s++) free(walk.labels[s].label);
    hapt_arena_release(&walk.arena);
    *cost_s = walk.known_s;
    *exact = walk.exact;
    return status;
}
