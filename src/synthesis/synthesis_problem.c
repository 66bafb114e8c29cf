/* Turns a graph and its costs into the search problem: layouts of tensors and choices of operators. */
#include "synthesis_private.h"

/* ---- kinds of devices ---- */

static bool devices_alike(const struct problem *problem, int a, int b)
{
    const struct hapt_axis *axis = problem->axis;
    const double *limit = problem->options->memory_bytes;
    if (problem->costs->kind && problem->costs->kind[a] != problem->costs->kind[b]) return false;
    if (limit && limit[a] != limit[b]) return false;
    for (int r = 0; axis->ratio && r < axis->ratio_count; r++)
        if (axis->ratio[r * axis->size + a] != axis->ratio[r * axis->size + b]) return false;
    return true;
}

static enum hapt_status sort_devices(struct problem *problem)
{
    const int size = problem->axis->size;
    HAPT_NEW(problem->class_of, problem->arena, size);
    for (int j = 0; j < size; j++) {
        int class = 0;
        while (class < problem->classes && !devices_alike(problem, problem->representative[class], j)) class ++;
        if (class == MOST_CLASSES) {
            class = j % MOST_CLASSES;
            problem->merged = true;
        }
        if (class == problem->classes) problem->representative[problem->classes++] = j;
        problem->class_of[j] = class;
    }
    return HAPT_OK;
}

/* ---- shares of a cut, by class ---- */

struct shares {
    int ratio;
    int64_t units;
    double share[MOST_CLASSES], largest;
};
struct share_cache {
    int count, capacity;
    struct shares *entry;
    int64_t *first;
};

static enum hapt_status shares_of(struct problem *problem, struct share_cache *cache, int ratio, int64_t units,
                                  const struct shares **found)
{
    for (int e = 0; e < cache->count; e++) {
        if (cache->entry[e].ratio != ratio || cache->entry[e].units != units) continue;
        *found = &cache->entry[e];
        return HAPT_OK;
    }
    MAKE_ROOM(cache->entry, cache->count, cache->capacity, 64, problem->arena);
    struct shares *made = &cache->entry[cache->count];
    *made = (struct shares){.ratio = ratio, .units = units};
    if (!hapt_axis_split(problem->axis, ratio, units, cache->first))
        return hapt_fail(HAPT_ERR_INPUT, "ratios must be finite and not negative, and one must be positive",
                         "ratio vector %d is invalid", ratio);
    for (int j = 0; j < problem->axis->size; j++) {
        const double share = (double)(cache->first[j + 1] - cache->first[j]) / (double)units;
        double *its = &made->share[problem->class_of[j]];
        if (share > *its) *its = share;
        if (share > made->largest) made->largest = share;
    }
    cache->count++;
    *found = made;
    return HAPT_OK;
}

/* ---- layouts ---- */

struct tensor_layouts {
    int count;
    struct hapt_property property[MOST_LAYOUTS];
};

struct builder {
    struct problem *problem;
    struct share_cache shares;
    struct hapt_op_cuts *cuts;
    struct tensor_layouts *of; /* by root: a parameter and its gradients share layout numbers */
    int unique_count;
    struct layouts **unique;
};

static int root_of(const struct hapt_graph *graph, int tensor)
{
    return hapt_graph_is_parameter_gradient(graph, tensor) ? graph->tensor[tensor].primal : tensor;
}

static int layout_number(const struct builder *builder, int tensor, struct hapt_property property)
{
    const struct tensor_layouts *of = &builder->of[root_of(builder->problem->graph, tensor)];
    for (int l = 0; l < of->count; l++)
        if (hapt_property_same(of->property[l], property)) return l;
    return -1;
}

static bool note_layout(struct builder *builder, int tensor, struct hapt_property property)
{
    if (tensor < 0 || layout_number(builder, tensor, property) >= 0) return true;
    struct tensor_layouts *of = &builder->of[root_of(builder->problem->graph, tensor)];
    if (of->count == MOST_LAYOUTS) return false;
    of->property[of->count++] = property;
    return true;
}

/* Collects the layouts that cuts need; drops cuts that need more layouts than possible. */
static void note_layouts(struct builder *builder)
{
    const struct hapt_graph *graph = builder->problem->graph;
    for (int t = 0; t < graph->tensor_count; t++) {
        builder->of[t].count = SHARDED;
        builder->of[t].property[REPLICATED].kind = HAPT_PROPERTY_REPLICATED;
        builder->of[t].property[PARTIAL].kind = HAPT_PROPERTY_PARTIAL;
    }
    for (int o = 0; o < graph->op_count; o++) {
        const struct hapt_op *op = &graph->op[o];
        int kept = 0;
        for (int c = 0; c < builder->cuts[o].count; c++) {
            const struct hapt_cut_rule *rule = &builder->cuts[o].rule[c];
            bool fits = true;
            for (int i = 0; i < op->input_count; i++)
                fits = note_layout(builder, op->input[i], rule->rule.input[i]) && fits;
            for (int i = 0; i < op->output_count; i++)
                fits = note_layout(builder, op->output[i], rule->rule.output[i]) && fits;
            if (fits)
                builder->cuts[o].rule[kept++] = *rule;
            else
                builder->problem->crowded = true;
        }
        builder->cuts[o].count = kept;
    }
}

/* Shares of what an outer axis leaves to its first rank. NULL: the outer axis shards the tensor differently from
 * its parameter, and the rest is too small for this layout. */
static enum hapt_status shares_of_layout(struct builder *builder, int tensor, struct hapt_property property,
                                         const struct shares **found)
{
    struct problem *problem = builder->problem;
    const int64_t grain = (property.blocks > 1 ? property.blocks : 1) * (property.unit > 1 ? property.unit : 1);
    *found = NULL;
    if (!hapt_property_fits(problem->sharding, problem->axis_index, problem->axis, tensor, property)) return HAPT_OK;
    return shares_of(problem, &builder->shares, property.ratio,
                     problem->sharding->shard->tensor[tensor].shape[property.dim] / grain, found);
}

/* ---- intermediate layouts ---- */

/*
 * Intermediate layouts: partial sums, and addends to a gradient, may become shards that no operator reads, from which
 * the replicated tensor is gathered. An exact search adds the plain layouts of all dimensions and ratios. It leaves out
 * those that another shard replaces at no more cost for all conversions from and to it, since an equal program without
 * them exists.
 */
enum { MOST_STOPS = 2 * MOST_LAYOUTS };
struct stop {
    struct hapt_property property;
    const struct shares *shares; /* NULL: replicated, or partial sums */
    bool left_out;
};
struct stops {
    double bytes;
    int count;
    struct stop stop[MOST_STOPS];
};

static double stop_to_stop_s(const struct problem *problem, double bytes, const struct stop *from,
                             const struct stop *to)
{
    double seconds;
    hapt_conversion(problem->costs, bytes, from->property, from->shares ? from->shares->largest : 1, to->property,
                    to->shares ? to->shares->largest : 1, &seconds);
    return seconds;
}

static bool replaces(const struct problem *problem, const struct stops *stops, const struct stop *a,
                     const struct stop *b)
{
    if (a == b || a->left_out || !a->shares) return false;
    for (int j = 0; problem->options->memory_bytes && j < problem->classes; j++)
        if (a->shares->share[j] > b->shares->share[j]) return false;
    for (int k = 0; k < stops->count; k++) {
        const struct stop *other = &stops->stop[k];
        if (other == a || other == b) continue;
        if (stop_to_stop_s(problem, stops->bytes, other, a) > stop_to_stop_s(problem, stops->bytes, other, b) ||
            stop_to_stop_s(problem, stops->bytes, a, other) > stop_to_stop_s(problem, stops->bytes, b, other))
            return false;
    }
    return true;
}

/* Adds a layout if it fits and is new. */
static enum hapt_status add_stop(struct builder *builder, int tensor, struct hapt_property property,
                                 struct stops *stops)
{
    struct stop made = {.property = property};
    for (int k = 0; k < stops->count; k++)
        if (hapt_property_same(stops->stop[k].property, property)) return HAPT_OK;
    if (property.kind == HAPT_PROPERTY_SHARDED) {
        HAPT_TRY(shares_of_layout(builder, tensor, property, &made.shares));
        if (!made.shares) return HAPT_OK;
    }
    if (stops->count == MOST_STOPS)
        builder->problem->crowded = true;
    else
        stops->stop[stops->count++] = made;
    return HAPT_OK;
}

static enum hapt_status note_stops_of(struct builder *builder, int tensor)
{
    struct problem *problem = builder->problem;
    const struct tensor_layouts *of = &builder->of[tensor];
    const int ratios = problem->axis->ratio ? problem->axis->ratio_count : 1;
    struct stops stops = {.bytes = hapt_full_bytes(problem->costs, problem->graph, tensor)};
    for (int l = 0; l < of->count; l++) HAPT_TRY(add_stop(builder, tensor, of->property[l], &stops));
    const int asked = stops.count;
    for (int dim = 0; dim < problem->graph->tensor[tensor].dims; dim++)
        for (int ratio = 0; ratio < ratios; ratio++) {
            struct hapt_property property = {
                .kind = HAPT_PROPERTY_SHARDED, .dim = dim, .blocks = 1, .unit = 1, .ratio = ratio};
            if (!hapt_property_fits(problem->sharding, problem->axis_index, problem->axis, tensor, property)) continue;
            property = hapt_property_canonical(problem->sharding, problem->axis_index, problem->axis, tensor, property);
            HAPT_TRY(add_stop(builder, tensor, property, &stops));
        }
    for (int k = asked; k < stops.count; k++) {
        struct stop *stop = &stops.stop[k];
        for (int other = 0; other < stops.count && !stop->left_out; other++)
            stop->left_out = replaces(problem, &stops, &stops.stop[other], stop);
        if (!stop->left_out && !note_layout(builder, tensor, stop->property)) problem->crowded = true;
    }
    return HAPT_OK;
}

/* For tensors that some operator makes as partial sums or adds to. Parameter gradients go straight to their
 * parameter's layout. */
static enum hapt_status note_stops(struct builder *builder)
{
    const struct hapt_graph *graph = builder->problem->graph;
    bool *stops_over; /* [tensor] */
    HAPT_NEW(stops_over, builder->problem->arena, graph->tensor_count);
    for (int o = 0; o < graph->op_count; o++)
        for (int k = 0; k < graph->op[o].output_count; k++) {
            const int tensor = graph->op[o].output[k];
            if (tensor < 0 || hapt_graph_is_parameter_gradient(graph, tensor)) continue;
            bool stops = graph->op[o].accumulate >> k & 1u;
            for (int c = 0; c < builder->cuts[o].count; c++)
                stops = stops || builder->cuts[o].rule[c].rule.output[k].kind == HAPT_PROPERTY_PARTIAL;
            stops_over[tensor] = stops_over[tensor] || stops;
        }
    for (int t = 0; t < graph->tensor_count; t++)
        if (stops_over[t]) HAPT_TRY(note_stops_of(builder, t));
    return HAPT_OK;
}

static enum hapt_status fill_layouts(struct builder *builder, int tensor, struct layouts *made)
{
    struct problem *problem = builder->problem;
    const struct hapt_spmd_costs costs = hapt_costs_of_tensor(problem->costs, made->parameter_gradient);
    for (int l = 0; l < made->count; l++) {
        const struct hapt_property property = made->property[l];
        made->largest[l] = 1;
        for (int j = 0; j < problem->classes; j++) made->share[l][j] = 1;
        if (property.kind != HAPT_PROPERTY_SHARDED) continue;
        const struct shares *shares;
        HAPT_TRY(shares_of_layout(builder, tensor, property, &shares));
        made->missing |= shares ? 0 : (layout_set)(1u << l);
        if (!shares) continue;
        made->sharded |= (layout_set)(1u << l);
        made->largest[l] = shares->largest;
        memcpy(made->share[l], shares->share, sizeof made->share[l]);
    }
    for (int a = 0; a < made->count; a++)
        for (int b = 0; b < made->count; b++)
            made->convert_kind[a][b] =
                (unsigned char)hapt_conversion(&costs, made->bytes, made->property[a], made->largest[a],
                                               made->property[b], made->largest[b], &made->convert_s[a][b]);
    for (int a = 0; a < made->count; a++)
        for (int b = 0; b < made->count; b++)
            if ((made->missing >> a | made->missing >> b) & 1u) made->convert_s[a][b] = INFINITY;
    memcpy(made->reach_s, made->convert_s, sizeof made->reach_s);
    for (int a = 0; a < made->count; a++) made->reach_s[a][a] = 0;
    for (int k = 0; k < made->count; k++)
        for (int a = 0; a < made->count; a++)
            for (int b = 0; b < made->count; b++)
                made->reach_s[a][b] = fmin(made->reach_s[a][b], made->reach_s[a][k] + made->reach_s[k][b]);
    return HAPT_OK;
}

static enum hapt_status make_layouts(struct builder *builder)
{
    struct problem *problem = builder->problem;
    const struct hapt_graph *graph = problem->graph;
    int capacity = 0;
    for (int t = 0; t < graph->tensor_count; t++) {
        if (graph->tensor[t].kind == HAPT_TENSOR_INPUT) continue;
        const struct tensor_layouts *of = &builder->of[root_of(graph, t)];
        const double bytes = hapt_full_bytes(problem->costs, graph, t);
        const bool gradient = hapt_graph_is_parameter_gradient(graph, t);
        int64_t shape_same = 0;
        for (int u = 0; u < builder->unique_count && !problem->layouts[t]; u++) {
            const struct layouts *other = builder->unique[u];
            shape_same = other->count == of->count && other->bytes == bytes && other->parameter_gradient == gradient &&
                         !memcmp(other->property, of->property, (size_t)of->count * sizeof of->property[0]);
            if (!shape_same) continue;
            bool same = true; /* equal bytes may hide different dimension sizes */
            for (int l = SHARDED; same && l < of->count; l++) {
                const struct shares *shares;
                const struct hapt_property p = of->property[l];
                HAPT_TRY(shares_of_layout(builder, t, p, &shares));
                same = (shares == NULL) == (other->missing >> l & 1u);
                if (same && shares)
                    same = shares->largest == other->largest[l] &&
                           !memcmp(shares->share, other->share[l], sizeof shares->share);
            }
            if (same) problem->layouts[t] = other;
        }
        if (problem->layouts[t]) continue;
        MAKE_ROOM(builder->unique, builder->unique_count, capacity, 64, problem->arena);
        struct layouts *made;
        HAPT_NEW(made, problem->arena, 1);
        made->count = of->count;
        memcpy(made->property, of->property, sizeof made->property);
        made->bytes = bytes;
        made->parameter_gradient = gradient;
        HAPT_TRY(fill_layouts(builder, t, made));
        builder->unique[builder->unique_count++] = made;
        problem->layouts[t] = made;
    }
    return HAPT_OK;
}

/* ---- choices ---- */

static double compute_seconds(const struct problem *problem, const struct hapt_cut_rule *rule,
                              const struct hapt_spmd_work *work, const struct shares *shares, int class)
{
    struct hapt_spmd_work its = *work;
    its.share = rule->units ? shares->share[class] : 1;
    const struct hapt_spmd_costs *costs = problem->costs;
    if (!problem->merged) return costs->compute_s(costs->context, &its, problem->representative[class]);
    double most = 0;
    for (int j = 0; j < problem->axis->size; j++)
        if (problem->class_of[j] == class) most = fmax(most, costs->compute_s(costs->context, &its, j));
    return most;
}

static enum hapt_status make_choice(struct builder *builder, int index, const struct hapt_cut_rule *rule,
                                    struct choice *choice)
{
    struct problem *problem = builder->problem;
    const struct hapt_op *op = &problem->graph->op[index];
    const struct hapt_spmd_work work = hapt_work_of_rule(problem->graph, index, rule);
    *choice = (struct choice){.rule = rule};
    for (int i = 0; i < op->input_count; i++)
        if (op->input[i] >= 0)
            choice->input[i] = (unsigned char)layout_number(builder, op->input[i], rule->rule.input[i]);
    for (int o = 0; o < op->output_count; o++)
        if (op->output[o] >= 0)
            choice->output[o] = (unsigned char)layout_number(builder, op->output[o], rule->rule.output[o]);
    if (rule->rule.exchange) choice->exchange_s = hapt_exchange_seconds(problem->costs, problem->graph, index);
    const struct shares *shares = NULL;
    double *seconds;
    if (rule->units) HAPT_TRY(shares_of(problem, &builder->shares, rule->cut.ratio, rule->units, &shares));
    HAPT_NEW(seconds, problem->arena, problem->classes);
    for (int j = 0; j < problem->classes; j++) {
        seconds[j] = compute_seconds(problem, rule, &work, shares, j);
        if (!(seconds[j] >= 0) || !isfinite(seconds[j]))
            return hapt_fail(HAPT_ERR_INPUT, NULL, "operator %s has no finite time", op->name);
    }
    choice->compute_s = seconds;
    return HAPT_OK;
}

static bool is_allowed(const struct builder *builder, int index, const struct hapt_cut_rule *rule)
{
    const struct hapt_synthesis_options *options = builder->problem->options;
    const struct hapt_graph *graph = builder->problem->graph;
    const struct hapt_cut *forced = options->forced ? options->forced[index] : NULL;
    if (forced)
        return forced->letter == rule->cut.letter && (forced->blocks < 1 || forced->blocks == rule->cut.blocks) &&
               (forced->unit < 1 || forced->unit == rule->cut.unit);
    if (!options->no_replicated_gradients || rule->cut.letter || builder->cuts[index].count == 1) return true;
    if (index >= builder->problem->sharding->reduce_first) return true; /* takes any number of parts */
    for (int o = 0; o < graph->op[index].output_count; o++)
        if (hapt_graph_is_parameter_gradient(graph, graph->op[index].output[o])) return false;
    return true;
}

static enum hapt_status make_choices(struct builder *builder, struct step *steps, int count)
{
    struct problem *problem = builder->problem;
    for (int s = 0; s < count; s++) {
        struct step *step = &steps[s];
        const struct hapt_op_cuts *cuts = &builder->cuts[step->op];
        HAPT_NEW(step->choice, problem->arena, cuts->count);
        for (int c = 0; c < cuts->count; c++)
            if (is_allowed(builder, step->op, &cuts->rule[c]))
                HAPT_TRY(make_choice(builder, step->op, &cuts->rule[c], &step->choice[step->choice_count++]));
        if (step->choice_count == 0)
            return hapt_fail(HAPT_ERR_INFEASIBLE, "force another cut, or none",
                             "the forced cut of operator %s is impossible on %d devices",
                             problem->graph->op[step->op].name, problem->axis->size);
    }
    return HAPT_OK;
}

/* Notes the layouts that the writer of a gradient value can make, and the readers of partial sums. */
static void note_makeable(struct problem *problem)
{
    for (int s = 0; s < problem->step_count; s++) {
        const struct step *step = &problem->step[s];
        for (int c = 0; c < step->choice_count; c++) {
            const struct choice *choice = &step->choice[c];
            for (int i = 0; i < HAPT_MAX_INPUTS; i++)
                if (step->input[i] >= 0 && choice->input[i] == PARTIAL)
                    problem->object[step->input[i]].partial_is_read = true;
            for (int o = 0; o < HAPT_MAX_OUTPUTS; o++) {
                if (step->output[o] < 0) continue;
                struct object *object = &problem->object[step->output[o]];
                object->makeable |= closure_of(object->layouts, (layout_set)(1u << choice->output[o]));
                if (choice->output[o] == PARTIAL || step->previous[o] >= 0)
                    object->makeable |= (layout_set)(object->layouts->sharded | 1u << REPLICATED);
            }
        }
    }
}

enum hapt_status hapt_problem_build(const struct hapt_sharding *sharding, int axis_index, const struct hapt_axis *axis,
                                    const struct hapt_spmd_costs *costs, const struct hapt_synthesis_options *options,
                                    struct hapt_arena *arena, struct problem *problem)
{
    struct builder builder = {.problem = problem};
    const struct hapt_graph *graph = sharding->graph;
    *problem = (struct problem){.sharding = sharding,
                                .axis_index = axis_index,
                                .graph = graph,
                                .axis = axis,
                                .costs = costs,
                                .options = options,
                                .arena = arena,
                                .microbatches = hapt_microbatches(options),
                                .in_flight = hapt_in_flight(options),
                                .state_bytes = hapt_state_bytes(options)};
    problem->memory_resource = problem->counts_memory = options->exact && options->memory_bytes;
    HAPT_TRY(sort_devices(problem));
    HAPT_NEW(builder.shares.first, arena, axis->size + 1);
    HAPT_NEW(builder.cuts, arena, graph->op_count);
    HAPT_NEW(builder.of, arena, graph->tensor_count);
    HAPT_NEW(problem->layouts, arena, graph->tensor_count);
    HAPT_TRY(hapt_cuts_enumerate(sharding, axis_index, axis, options->ratio_of, arena, builder.cuts));
    note_layouts(&builder);
    if (options->exact) HAPT_TRY(note_stops(&builder));
    HAPT_TRY(make_layouts(&builder));
    HAPT_TRY(hapt_fold(problem));
    HAPT_TRY(make_choices(&builder, problem->step, problem->step_count));
    HAPT_TRY(make_choices(&builder, problem->reduce, problem->reduce_count));
    HAPT_TRY(hapt_endings_build(problem));
    note_makeable(problem);
    return HAPT_OK;
}
