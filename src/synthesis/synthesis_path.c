/*
 * Segments and the shortest path through them. A segment is searched once per structure and start words. A node of the
 * path is the layouts of the tensors that cross a border.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "hapt/env.h"
#include "synthesis_chain.h"

#define NONE (-1)

/* ---- borders ---- */

enum { SEGMENT_MINIMUM = 4, SEGMENT_MOST = 24, MOST_CROSSING = 8, MOST_NODES = 512 };

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
    const int wished = problem->options->segment_minimum, minimum = wished > 0 ? wished : SEGMENT_MINIMUM;
    int least = MOST_CROSSING, last = 0;
    if (problem->options->exact) return;
    for (int s = 1; s < problem->step_count; s++)
        if (cutting->crossing[s] > 0 && cutting->crossing[s] < least) least = cutting->crossing[s];
    for (int s = 1; s < problem->step_count; s++) {
        const int *before = cutting->forward_before;
        if (cutting->crossing[s] < 0 || cutting->crossing[s] > least || before[s] - before[last] < minimum) continue;
        if (before[problem->step_count] - before[s] < minimum) break;
        cutting->cut[s] = true;
        last = s;
    }
    for (int first = 0, s = 1; s <= problem->step_count; s++) {
        if (s < problem->step_count && !cutting->cut[s]) continue;
        split_long(cutting, first, s);
        first = s;
    }
}

static enum hapt_status find_segments(const struct problem *problem, struct hapt_arena *arena,
                                      struct segment **segments, int *count)
{
    struct cutting cutting = {.problem = problem};
    HAPT_NEW(cutting.crossing, arena, problem->step_count + 1);
    HAPT_NEW(cutting.forward_before, arena, problem->step_count + 1);
    HAPT_NEW(cutting.cut, arena, problem->step_count + 1);
    for (int k = 0; k < problem->object_count; k++) {
        const struct object *object = &problem->object[k];
        if (object->first < 0 || object->kind == OBJECT_PARAMETER || object->kind == OBJECT_PARAMETER_GRADIENT)
            continue;
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
        HAPT_TRY(hapt_segment_build(problem, first, s, &(*segments)[(*count)++]));
        first = s;
    }
    return HAPT_OK;
}

/* ---- a segment's objects ---- */

enum hapt_status hapt_segment_build(const struct problem *problem, int first, int end, struct segment *segment)
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

static uint64_t mix(uint64_t hash, const void *data, size_t bytes)
{
    return hapt_hash(hash, data, bytes);
}

static uint64_t mix_int(uint64_t hash, int64_t value)
{
    return mix(hash, &value, sizeof value);
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
        hash = mix(hash, facts, sizeof facts);
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
            hash = mix(hash, choice->input, sizeof choice->input);
            hash = mix(hash, choice->output, sizeof choice->output);
            hash = mix(hash, &choice->exchange_s, sizeof choice->exchange_s);
            hash = mix(hash, choice->compute_s, (size_t)problem->classes * sizeof *choice->compute_s);
        }
    }
    return hash;
}

/* ---- the path ---- */

struct searched { /* a segment's structure with its start words */
    uint64_t structure;
    int start_count;
    const uint32_t *start;
    struct outcome *outcome;
    int outcome_count;
};
struct node {
    uint64_t hash;
    uint32_t *word; /* [crossing objects] */
    double cost_s;
    int parent, order; /* parent node, creation order */
    const struct outcome *outcome;
};
struct border {                /* before a segment */
    int object_count, *object; /* crossing ones, ascending */
    int node_count, node_capacity;
    struct node *node;
};
/* Nodes of the borders by their words, over all searches, and the arcs between them. */
struct hapt_path_chain {
    const struct problem *problem;
    struct segment *segment;
    struct chain chain;
    struct named {
        int count, capacity;
        struct node *node;
    } * named; /* [segment_count + 1] */
};
struct path {
    const struct problem *problem;
    struct hapt_path_chain *chain; /* or NULL */
    struct hapt_arena *arena;
    int segment_count;
    struct segment *segment;
    uint64_t *structure;
    struct border *border; /* [segment_count + 1] */
    int searched_count, searched_capacity;
    struct searched *searched;
    struct search_tally tally;
    int *crossing_index; /* [object] its index among the crossing objects of the current border */
};

static enum hapt_status list_crossing(struct path *path, int at, int step)
{
    struct border *border = &path->border[at];
    const struct problem *problem = path->problem;
    for (int pass = 0; pass < 2; pass++) {
        border->object_count = 0;
        for (int k = 0; k < problem->object_count; k++) {
            if (problem->object[k].first < 0 || problem->object[k].first >= step || problem->object[k].last < step)
                continue;
            if (pass) border->object[border->object_count] = k;
            border->object_count++;
        }
        if (!pass) HAPT_NEW(border->object, path->arena, border->object_count);
    }
    return HAPT_OK;
}

static enum hapt_status outcomes_of(struct path *path, int s, const uint32_t *start, double limit,
                                    const struct searched **found)
{
    const struct segment *segment = &path->segment[s];
    const size_t bytes = (size_t)segment->start_count * sizeof *start;
    for (int k = 0; k < path->searched_count; k++) {
        *found = &path->searched[k];
        if ((*found)->structure == path->structure[s] && (*found)->start_count == segment->start_count &&
            !memcmp((*found)->start, start, bytes))
            return HAPT_OK;
    }
    if (path->searched_count == path->searched_capacity) {
        struct searched *grown;
        const int capacity = path->searched_capacity ? 2 * path->searched_capacity : 64;
        HAPT_NEW(grown, path->arena, capacity);
        if (path->searched_count) memcpy(grown, path->searched, (size_t)path->searched_count * sizeof *grown);
        path->searched = grown;
        path->searched_capacity = capacity;
    }
    struct searched *made = &path->searched[path->searched_count];
    uint32_t *copy;
    HAPT_NEW(copy, path->arena, segment->start_count);
    if (bytes > 0) memcpy(copy, start, bytes);
    *made = (struct searched){.structure = path->structure[s], .start_count = segment->start_count, .start = copy};
    HAPT_TRY(hapt_segment_search(path->problem, segment, start, limit, path->arena, &made->outcome,
                                 &made->outcome_count, &path->tally));
    path->searched_count++;
    *found = made;
    return HAPT_OK;
}

static enum hapt_status add_node(struct path *path, int at, const uint32_t *word, double cost_s, int parent,
                                 const struct outcome *outcome)
{
    struct border *border = &path->border[at];
    const size_t bytes = (size_t)border->object_count * sizeof *word;
    const uint64_t hash = mix(1, word, bytes);
    int n = 0;
    while (n < border->node_count &&
           (border->node[n].hash != hash || (bytes > 0 && memcmp(border->node[n].word, word, bytes))))
        n++;
    if (n < border->node_count && border->node[n].cost_s <= cost_s) return HAPT_OK;
    if (n == border->node_count) {
        if (n == border->node_capacity) {
            struct node *grown;
            const int capacity = n ? 2 * n : 16;
            HAPT_NEW(grown, path->arena, capacity);
            if (n) memcpy(grown, border->node, (size_t)n * sizeof *grown);
            border->node = grown;
            border->node_capacity = capacity;
        }
        border->node[n].order = border->node_count++;
        HAPT_NEW(border->node[n].word, path->arena, border->object_count);
        if (bytes > 0) memcpy(border->node[n].word, word, bytes);
    }
    border->node[n].hash = hash;
    border->node[n].cost_s = cost_s;
    border->node[n].parent = parent;
    border->node[n].outcome = outcome;
    return HAPT_OK;
}

static int single_layout(const struct object *object, uint32_t word)
{
    if (object->kind == OBJECT_PARAMETER || object->kind == OBJECT_PARAMETER_GRADIENT) return NONE;
    const layout_set set = object->kind == OBJECT_FORWARD ? made_of(word) : awaited_of(word);
    int layout = 0;
    while (!(set >> layout & 1u)) layout++;
    return layout;
}

/* True if node b is useless: a costs no more after converting its tensors. */
static bool beats(const struct problem *problem, const struct border *border, const struct node *a,
                  const struct node *b)
{
    double cost = a->cost_s;
    for (int k = 0; k < border->object_count && cost <= b->cost_s; k++) {
        if (a->word[k] == b->word[k]) continue;
        const struct object *object = &problem->object[border->object[k]];
        const int from = single_layout(object, a->word[k]), to = single_layout(object, b->word[k]);
        if (from == NONE) return false;
        /* An activation is converted after the border, a gradient before it. */
        cost += object->kind == OBJECT_FORWARD ? object->layouts->convert_s[from][to]
                                               : object->layouts->convert_s[to][from];
    }
    return cost <= b->cost_s;
}

static void drop_beaten(const struct problem *problem, struct border *border)
{
    int kept = 0;
    for (int n = 0; n < border->node_count; n++) {
        bool beaten = false;
        for (int m = 0; !beaten && m < border->node_count; m++)
            beaten = m != n && border->node[m].cost_s < border->node[n].cost_s &&
                     beats(problem, border, &border->node[m], &border->node[n]);
        if (beaten) border->node[n].cost_s = INFINITY;
    }
    for (int n = 0; n < border->node_count; n++)
        if (isfinite(border->node[n].cost_s)) border->node[kept++] = border->node[n];
    border->node_count = kept;
}

static int compare_nodes(const void *a, const void *b)
{
    const struct node *x = a, *y = b;
    if (x->cost_s != y->cost_s) return x->cost_s < y->cost_s ? -1 : 1;
    return (x->order > y->order) - (x->order < y->order);
}

/* Sorts nodes by cost; keeps only the cheapest if there are too many. */
static void sort_nodes(struct path *path, struct border *border)
{
    if (border->node_count == 0) return;
    qsort(border->node, (size_t)border->node_count, sizeof *border->node, compare_nodes);
    if (path->problem->options->exact || border->node_count <= MOST_NODES) return;
    border->node_count = MOST_NODES;
    path->tally.capped = true;
}

/* The number of a node of border `at`, common to all searches. */
static enum hapt_status name_node(struct hapt_path_chain *chain, int at, const uint32_t *word, int count, int *number)
{
    struct named *named = &chain->named[at];
    const size_t bytes = (size_t)count * sizeof *word;
    const uint64_t hash = mix(1, word, bytes);
    for (*number = 0; *number < named->count; ++*number)
        if (named->node[*number].hash == hash && memcmp(named->node[*number].word, word, bytes) == 0) return HAPT_OK;
    if (named->count == named->capacity) {
        struct node *grown;
        const int capacity = named->capacity ? 2 * named->capacity : 16;
        HAPT_NEW(grown, chain->chain.arena, capacity);
        if (named->count) memcpy(grown, named->node, (size_t)named->count * sizeof *grown);
        named->node = grown;
        named->capacity = capacity;
    }
    struct node *made = &named->node[named->count++];
    *made = (struct node){.hash = hash};
    HAPT_NEW(made->word, chain->chain.arena, count);
    memcpy(made->word, word, bytes);
    return HAPT_OK;
}

static enum hapt_status note_arc(struct path *path, int s, const uint32_t *from, const uint32_t *to,
                                 const struct outcome *outcome)
{
    struct chain_arc arc = {.cost_s = outcome->cost_s, .bytes = outcome->bytes, .outcome = outcome};
    if (!path->chain) return HAPT_OK;
    for (int j = 0; j < path->problem->classes; j++) arc.cost_s -= path->problem->multiplier[j] * outcome->bytes[j];
    HAPT_TRY(name_node(path->chain, s, from, path->border[s].object_count, &arc.from));
    HAPT_TRY(name_node(path->chain, s + 1, to, path->border[s + 1].object_count, &arc.to));
    return hapt_chain_add_arc(&path->chain->chain, s, arc);
}

static enum hapt_status cross_segment(struct path *path, int s, int from)
{
    const struct segment *segment = &path->segment[s];
    struct border *before = &path->border[s], *behind = &path->border[s + 1];
    const uint32_t *word = before->node[from].word;
    uint32_t *start, *then;
    const struct searched *found;
    HAPT_NEW(start, path->arena, segment->start_count);
    HAPT_NEW(then, path->arena, behind->object_count);
    for (int k = 0; k < before->object_count; k++) path->crossing_index[before->object[k]] = k;
    for (int k = 0; k < segment->start_count; k++)
        start[k] = word[path->crossing_index[segment->local[segment->start[k]]]];
    /* If nothing crosses the next border, all paths end in one node: its best known cost is the limit. Each start
     * is searched once. */
    const double more = path->chain ? 1.05 : 1; /* a dearer path may need less memory */
    const double limit = behind->object_count == 0 && behind->node_count > 0
                             ? more * behind->node[0].cost_s - before->node[from].cost_s
                             : INFINITY;
    HAPT_TRY(outcomes_of(path, s, start, limit, &found));
    for (int k = 0; k < behind->object_count; k++) { /* objects that the segment does not touch cross unchanged */
        const int object = behind->object[k];
        if (path->problem->object[object].first < segment->first) then[k] = word[path->crossing_index[object]];
    }
    for (int k = 0; k < behind->object_count; k++) path->crossing_index[behind->object[k]] = k;
    for (int c = 0; c < found->outcome_count; c++) {
        const struct outcome *outcome = &found->outcome[c];
        for (int k = 0; k < segment->end_count; k++)
            then[path->crossing_index[segment->local[segment->at_end[k]]]] = outcome->word[k];
        HAPT_TRY(add_node(path, s + 1, then, before->node[from].cost_s + outcome->cost_s, from, outcome));
        HAPT_TRY(note_arc(path, s, word, then, outcome));
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
    for (int s = path->segment_count, node = 0; s > 0; node = path->border[s].node[node].parent, s--)
        taken[s - 1] = path->border[s].node[node].outcome;
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
    HAPT_TRY(find_segments(problem, arena, &made->segment, &count));
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
    int *number;
    HAPT_TRY(find_segments(problem, arena, &path.segment, &path.segment_count));
    HAPT_NEW(path.border, arena, path.segment_count + 1);
    HAPT_NEW(path.structure, arena, path.segment_count);
    HAPT_NEW(path.crossing_index, arena, problem->object_count);
    HAPT_NEW(number, arena, problem->object_count);
    report->unique_segments = 0;
    for (int s = 0; s <= path.segment_count; s++)
        HAPT_TRY(list_crossing(&path, s, s < path.segment_count ? path.segment[s].first : problem->step_count));
    for (int s = 0; s < path.segment_count; s++) {
        bool known = false;
        path.structure[s] = segment_structure(problem, &path.segment[s], number);
        for (int r = 0; r < s; r++) known = known || path.structure[r] == path.structure[s];
        report->unique_segments += !known;
    }
    HAPT_TRY(add_node(&path, 0, NULL, 0, NONE, NULL));
    if (chain) HAPT_TRY(hapt_chain_add_price(&chain->chain, problem->multiplier));
    for (int s = 0; s < path.segment_count; s++) {
        for (int n = 0; n < path.border[s].node_count; n++) HAPT_TRY(cross_segment(&path, s, n));
        drop_beaten(problem, &path.border[s + 1]);
        sort_nodes(&path, &path.border[s + 1]);
    }
    report->segments = path.segment_count;
    report->expanded += path.tally.expanded;
    report->generated += path.tally.generated;
    if (path.tally.capped) report->because = "a segment had more states than allowed";
    if (path.border[path.segment_count].node_count == 0)
        return hapt_fail(HAPT_ERR_INFEASIBLE, "loosen forced cuts, layouts between segments or memory",
                         "no program for %d devices computes this graph", problem->axis->size);
    *cost_s = path.border[path.segment_count].node[0].cost_s;
    return trace(&path, arena, chosen);
}
