/*
 * The path through the segments: the shortest one, where a node is the layouts of the tensors that cross a border; and,
 * over the paths of several searches, the shortest one within memory. That uses labels of cost and memory. Its bounds
 * come from the prices of memory at which the segments were searched.
 */
#include <stdlib.h>

#include "hapt/env.h"
#include "synthesis_search.h"

#define NONE (-1)

/* ---- the cheapest path within memory ---- */

/* Labels that go on per border: few first, for a good path as the bound; then as many as allowed. */
enum { FEW_LABELS = 300, MOST_LABELS = 5000, HALVINGS = 16 };

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
    MAKE_ROOM(chain->price, chain->price_count, chain->price_capacity, 16, chain->arena);
    memcpy(chain->price[chain->price_count++], price, (size_t)chain->classes * sizeof *price);
    return HAPT_OK;
}

enum hapt_status hapt_chain_add_arc(struct chain *chain, int segment, struct chain_arc arc)
{
    struct chain_layer *layer = &chain->layer[segment];
    MAKE_ROOM(layer->arc, layer->arc_count, layer->arc_capacity, 64, chain->arena);
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

/* ---- walks through the chain ---- */

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

/* ---- the shortest path ---- */

struct node {
    uint64_t hash;
    uint32_t *word; /* [crossing objects] */
    double cost_s;
    int parent, order; /* parent node, creation order */
    const struct outcome *outcome;
};
struct nodes { /* by their words */
    int count, capacity;
    struct node *node;
};
struct border {                /* before a segment */
    int object_count, *object; /* crossing ones, ascending */
    struct nodes nodes;
};
/* Nodes of the borders by their words, over all searches, and the arcs between them. */
struct hapt_path_chain {
    const struct problem *problem;
    struct segment *segment;
    struct chain chain;
    struct nodes *named; /* [segment_count + 1] */
};
struct path {
    const struct problem *problem;
    struct hapt_path_chain *chain; /* or NULL */
    struct hapt_arena *arena;
    int segment_count;
    struct segment *segment;
    struct border *border; /* [segment_count + 1] */
    struct searched searched;
    struct search_tally tally;
    int *crossing_index; /* [object] its index among the crossing objects of the current border */
};

static enum hapt_status list_crossing(struct path *path, int at, int step)
{
    struct border *border = &path->border[at];
    int *list = path->crossing_index, count = 0;
    for (int k = 0; k < path->problem->object_count; k++) {
        const struct object *object = &path->problem->object[k];
        if (object->first >= 0 && object->first < step && object->last >= step) list[count++] = k;
    }
    HAPT_NEW(border->object, path->arena, count);
    memcpy(border->object, list, (size_t)count * sizeof *list);
    border->object_count = count;
    return HAPT_OK;
}

/* The node of `count` words, made if it is new: then its `order` is its number, and its cost INFINITY. */
static enum hapt_status find_node(struct nodes *nodes, const uint32_t *word, int count, struct hapt_arena *arena,
                                  int *number)
{
    const size_t bytes = (size_t)count * sizeof *word;
    const uint64_t hash = hapt_hash(1, word, bytes);
    for (*number = 0; *number < nodes->count; ++*number)
        if (nodes->node[*number].hash == hash && (bytes == 0 || !memcmp(nodes->node[*number].word, word, bytes)))
            return HAPT_OK;
    MAKE_ROOM(nodes->node, nodes->count, nodes->capacity, 16, arena);
    struct node *made = &nodes->node[*number];
    *made = (struct node){.hash = hash, .cost_s = INFINITY, .order = nodes->count++};
    HAPT_NEW(made->word, arena, count);
    if (bytes > 0) memcpy(made->word, word, bytes);
    return HAPT_OK;
}

static enum hapt_status add_node(struct path *path, int at, const uint32_t *word, double cost_s, int parent,
                                 const struct outcome *outcome)
{
    struct border *border = &path->border[at];
    int n;
    HAPT_TRY(find_node(&border->nodes, word, border->object_count, path->arena, &n));
    struct node *node = &border->nodes.node[n];
    if (node->cost_s <= cost_s) return HAPT_OK;
    node->cost_s = cost_s;
    node->parent = parent;
    node->outcome = outcome;
    return HAPT_OK;
}

/* True if node b is useless: a costs no more after converting its tensors. */
static bool beats(const struct problem *problem, const struct border *border, const struct node *a,
                  const struct node *b)
{
    double cost = a->cost_s;
    for (int k = 0; k < border->object_count && cost <= b->cost_s; k++) {
        if (a->word[k] == b->word[k]) continue;
        const struct object *object = &problem->object[border->object[k]];
        if (is_parameter(object)) return false;
        cost += crossing_seconds(object, crossing_layout(object, a->word[k]), crossing_layout(object, b->word[k]));
    }
    return cost <= b->cost_s;
}

static void drop_beaten(const struct problem *problem, struct border *border)
{
    struct nodes *nodes = &border->nodes;
    int kept = 0;
    for (int n = 0; n < nodes->count; n++) {
        bool beaten = false;
        for (int m = 0; !beaten && m < nodes->count; m++)
            beaten = m != n && nodes->node[m].cost_s < nodes->node[n].cost_s &&
                     beats(problem, border, &nodes->node[m], &nodes->node[n]);
        if (beaten) nodes->node[n].cost_s = INFINITY;
    }
    for (int n = 0; n < nodes->count; n++)
        if (isfinite(nodes->node[n].cost_s)) nodes->node[kept++] = nodes->node[n];
    nodes->count = kept;
}

static int compare_nodes(const void *a, const void *b)
{
    const struct node *x = a, *y = b;
    if (x->cost_s != y->cost_s) return x->cost_s < y->cost_s ? -1 : 1;
    return (x->order > y->order) - (x->order < y->order);
}

/* Sorts nodes by cost; keeps only the cheapest if there are too many. */
static void sort_nodes(struct path *path, struct nodes *nodes)
{
    enum { MOST_NODES = 512 };
    if (nodes->count == 0) return;
    qsort(nodes->node, (size_t)nodes->count, sizeof *nodes->node, compare_nodes);
    if (path->problem->options->exact || nodes->count <= MOST_NODES) return;
    nodes->count = MOST_NODES;
    path->tally.capped = true;
}

static enum hapt_status note_arc(struct path *path, int s, const uint32_t *from, const uint32_t *to,
                                 const struct outcome *outcome)
{
    struct chain_arc arc = {.cost_s = outcome->cost_s, .bytes = outcome->bytes, .outcome = outcome};
    if (!path->chain) return HAPT_OK;
    for (int j = 0; j < path->problem->classes; j++) arc.cost_s -= path->problem->multiplier[j] * outcome->bytes[j];
    struct chain *chain = &path->chain->chain;
    HAPT_TRY(find_node(&path->chain->named[s], from, path->border[s].object_count, chain->arena, &arc.from));
    HAPT_TRY(find_node(&path->chain->named[s + 1], to, path->border[s + 1].object_count, chain->arena, &arc.to));
    return hapt_chain_add_arc(chain, s, arc);
}

static enum hapt_status cross_segment(struct path *path, int s, int from)
{
    const struct segment *segment = &path->segment[s];
    struct border *before = &path->border[s], *behind = &path->border[s + 1];
    const struct node *node = &before->nodes.node[from];
    uint32_t *start, *then;
    struct outcome *outcome;
    int outcome_count;
    HAPT_NEW(start, path->arena, segment->start_count);
    HAPT_NEW(then, path->arena, behind->object_count);
    for (int k = 0; k < before->object_count; k++) path->crossing_index[before->object[k]] = k;
    for (int k = 0; k < segment->start_count; k++)
        start[k] = node->word[path->crossing_index[segment->local[segment->start[k]]]];
    /* If nothing crosses the next border, all paths end in one node: its best known cost is the limit. Each start
     * is searched once. */
    const double more = path->chain ? 1.05 : 1; /* a dearer path may need less memory */
    const double limit = behind->object_count == 0 && behind->nodes.count > 0
                             ? more * behind->nodes.node[0].cost_s - node->cost_s
                             : INFINITY;
    HAPT_TRY(hapt_segment_search(path->problem, segment, start, limit, path->arena, &path->searched, &path->tally,
                                 &outcome, &outcome_count));
    for (int k = 0; k < behind->object_count; k++) { /* objects that the segment does not touch cross unchanged */
        const int object = behind->object[k];
        if (path->problem->object[object].first < segment->first) then[k] = node->word[path->crossing_index[object]];
    }
    for (int k = 0; k < behind->object_count; k++) path->crossing_index[behind->object[k]] = k;
    for (int c = 0; c < outcome_count; c++) {
        for (int k = 0; k < segment->end_count; k++)
            then[path->crossing_index[segment->local[segment->at_end[k]]]] = outcome[c].word[k];
        HAPT_TRY(add_node(path, s + 1, then, node->cost_s + outcome[c].cost_s, from, &outcome[c]));
        HAPT_TRY(note_arc(path, s, node->word, then, &outcome[c]));
    }
    return HAPT_OK;
}

/* Joins the decisions and conversions of the path's segments. */
static enum hapt_status join_path(const struct segment *segment, int segment_count, const struct outcome *const *taken,
                                  int step_count, struct hapt_arena *arena, struct chosen *chosen)
{
    HAPT_NEW(chosen->decision, arena, step_count);
    chosen->border_count = 0;
    for (int s = 0; s < segment_count; s++) chosen->border_count += taken[s]->border_count;
    HAPT_NEW(chosen->border, arena, chosen->border_count);
    for (int s = 0, borders = 0; s < segment_count; s++) {
        memcpy(&chosen->decision[segment[s].first], taken[s]->decision,
               (size_t)(segment[s].end - segment[s].first) * sizeof *taken[s]->decision);
        for (int b = 0; b < taken[s]->border_count; b++)
            chosen->border[borders++] =
                (struct chosen_border){segment[s].end - 1, segment[s].local[taken[s]->border[b].object],
                                       taken[s]->border[b].from, taken[s]->border[b].to};
    }
    return HAPT_OK;
}

static enum hapt_status trace(struct path *path, struct hapt_arena *arena, struct chosen *chosen)
{
    const struct outcome **taken;
    HAPT_NEW(taken, arena, path->segment_count);
    for (int s = path->segment_count, node = 0; s > 0; node = path->border[s].nodes.node[node].parent, s--)
        taken[s - 1] = path->border[s].nodes.node[node].outcome;
    return join_path(path->segment, path->segment_count, taken, path->problem->step_count, arena, chosen);
}

/* ---- paths from several searches ---- */

enum hapt_status hapt_path_chain_create(struct problem *problem, struct hapt_arena *arena,
                                        struct hapt_path_chain **chain)
{
    struct hapt_path_chain *made;
    int count;
    HAPT_NEW(made, arena, 1);
    made->problem = problem;
    HAPT_TRY(hapt_segments_find(problem, arena, &made->segment, &count));
    HAPT_NEW(made->named, arena, count + 1);
    HAPT_TRY(hapt_chain_init(&made->chain, problem->classes, count, arena));
    *chain = made;
    return HAPT_OK;
}

#define PATH_TOLERANCE 1e-3 /* larger errors come from what the segments' searches leave out */

enum hapt_status hapt_path_chain_search(const struct hapt_path_chain *chain, const double *limit,
                                        struct hapt_arena *arena, struct chosen *chosen, double *bytes)
{
    const int segments = chain->chain.segment_count;
    const struct chain_arc **arc;
    const struct outcome **taken;
    double cost_s;
    bool exact; /* or nearly: with memory prices there is no proof in any case */
    HAPT_NEW(arc, arena, segments);
    HAPT_NEW(taken, arena, segments);
    HAPT_TRY(hapt_chain_search(&chain->chain, limit, PATH_TOLERANCE, arc, &cost_s, &exact));
    if (!isfinite(cost_s)) return hapt_fail(HAPT_ERR_INFEASIBLE, NULL, "no path through the segments fits the memory");
    for (int j = 0; j < chain->problem->classes; j++) bytes[j] = 0;
    for (int s = 0; s < segments; s++) {
        taken[s] = arc[s]->outcome;
        for (int j = 0; j < chain->problem->classes; j++) bytes[j] += arc[s]->bytes[j];
    }
    return join_path(chain->segment, segments, taken, chain->problem->step_count, arena, chosen);
}

enum hapt_status hapt_path_search(struct problem *problem, struct hapt_arena *arena, struct hapt_path_chain *chain,
                                  struct chosen *chosen, double *cost_s, struct hapt_synthesis_report *report)
{
    struct path path = {.problem = problem, .arena = arena, .chain = chain};
    HAPT_TRY(hapt_segments_find(problem, arena, &path.segment, &path.segment_count));
    HAPT_NEW(path.border, arena, path.segment_count + 1);
    HAPT_NEW(path.crossing_index, arena, problem->object_count);
    report->unique_segments = 0;
    for (int s = 0; s <= path.segment_count; s++)
        HAPT_TRY(list_crossing(&path, s, s < path.segment_count ? path.segment[s].first : problem->step_count));
    for (int s = 0; s < path.segment_count; s++) {
        bool known = false;
        for (int r = 0; r < s; r++) known = known || path.segment[r].structure == path.segment[s].structure;
        report->unique_segments += !known;
    }
    HAPT_TRY(add_node(&path, 0, NULL, 0, NONE, NULL));
    if (chain) HAPT_TRY(hapt_chain_add_price(&chain->chain, problem->multiplier));
    for (int s = 0; s < path.segment_count; s++) {
        for (int n = 0; n < path.border[s].nodes.count; n++) HAPT_TRY(cross_segment(&path, s, n));
        drop_beaten(problem, &path.border[s + 1]);
        sort_nodes(&path, &path.border[s + 1].nodes);
    }
    report->segments = path.segment_count;
    report->expanded += path.tally.expanded;
    report->generated += path.tally.generated;
    if (path.tally.capped) report->because = "a segment had more states than allowed";
    if (path.border[path.segment_count].nodes.count == 0)
        return hapt_fail(HAPT_ERR_INFEASIBLE, "loosen forced cuts, layouts between segments or memory",
                         "no program for %d devices computes this graph", problem->axis->size);
    *cost_s = path.border[path.segment_count].nodes.node[0].cost_s;
    return trace(&path, arena, chosen);
}
