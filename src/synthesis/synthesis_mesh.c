/* Synthesis of both axes of a mesh: the costs of one axis given the other, and the methods to find a program of
 * both. */
#include "hapt/env.h"
#include "synthesis_private.h"

/* ---- costs of one axis ---- */

/* Context of the costs of axis `axis`; `sharding` is made, or expected, by the other axis. */
struct axis_context {
    const struct hapt_mesh_costs *costs;
    int axis, outer_size;
    const struct hapt_sharding *sharding;  /* so far */
    const double *op_share, *tensor_share; /* [of its graph] part that the other axis is expected to leave; NULL: all */
};

static double bytes_on(const struct axis_context *axis_context, int tensor)
{
    return (double)hapt_tensor_bytes(&axis_context->sharding->shard->tensor[tensor]);
}

/* A collective of the outer axis on the part that an inner rank holds. */
static double outer_s(const struct axis_context *axis_context, const struct hapt_op *op, enum hapt_collective_kind kind,
                      double part)
{
    const double in = bytes_on(axis_context, op->input[0]), out = bytes_on(axis_context, op->output[0]);
    const double bytes = kind == HAPT_COLLECTIVE_ALL_TO_ALL ? axis_context->outer_size * in : fmax(in, out);
    if (kind == HAPT_COLLECTIVE_SLICE) return 0;
    return axis_context->costs->collective_s(axis_context->costs->context, 0, kind, part * bytes, 0);
}

static double compute_s(const void *context, const struct hapt_spmd_work *work, int device)
{
    const struct axis_context *axis_context = context;
    const struct hapt_sharding *sharding = axis_context->sharding;
    const struct hapt_op_type *type = hapt_op_type_at(sharding->graph->op[work->op].type);
    const double part = work->sharded_output ? work->share : 1;
    struct hapt_spmd_work its = *work;
    (void)device;
    its.graph = sharding->shard;
    if (type->collective) return outer_s(axis_context, &sharding->graph->op[work->op], type->collective, part);
    double seconds = axis_context->costs->compute_s(axis_context->costs->context, &its,
                                                    axis_context->op_share ? axis_context->op_share[work->op] : 1);
    if (sharding->exchange[work->op] >= 0)
        seconds += type->inner_all_reduces *
                   axis_context->costs->collective_s(
                       axis_context->costs->context, sharding->exchange[work->op], HAPT_COLLECTIVE_ALL_REDUCE,
                       part * hapt_sharding_exchange_bytes(sharding->shard, work->op) / type->inner_all_reduces, 0);
    return seconds;
}

static double collective_s(const void *context, enum hapt_collective_kind kind, double bytes, double largest_share)
{
    const struct axis_context *axis_context = context;
    return axis_context->costs->collective_s(axis_context->costs->context, axis_context->axis, kind, bytes,
                                             largest_share);
}

static double tensor_bytes(const void *context, const struct hapt_graph *graph, int tensor)
{
    const struct axis_context *axis_context = context;
    (void)graph;
    return bytes_on(axis_context, tensor) * (axis_context->tensor_share ? axis_context->tensor_share[tensor] : 1);
}

static struct hapt_spmd_costs costs_of(const struct axis_context *axis_context)
{
    return (struct hapt_spmd_costs){
        .context = axis_context, .compute_s = compute_s, .collective_s = collective_s, .tensor_bytes = tensor_bytes};
}

/* ---- methods ---- */

struct mesh_search {
    const struct hapt_axis *axis;
    const struct hapt_mesh_costs *costs;
    const struct hapt_mesh_options *options;
    const struct hapt_sharding *trivial;
    struct hapt_arena *arena;   /* of the result */
    struct hapt_arena *scratch; /* lives as long as the search */
    struct hapt_axis_program best[HAPT_MESH_AXES];
    bool found;
    struct hapt_mesh_report report;
    int known_count; /* outer programs tried already */
    struct hapt_axis_program known[8];
};

static enum hapt_status options_of(const struct mesh_search *search, int size, bool limited,
                                   struct hapt_synthesis_options *options)
{
    const struct hapt_mesh_options *all = search->options;
    double *limit = NULL;
    if (limited && all->memory_bytes > 0) {
        HAPT_NEW(limit, search->scratch, size);
        for (int rank = 0; rank < size; rank++) limit[rank] = all->memory_bytes;
    }
    *options = (struct hapt_synthesis_options){.microbatches = all->microbatches,
                                               .memory_bytes = limit,
                                               .in_flight = all->in_flight,
                                               .optimizer_bytes_per_element = all->optimizer_bytes_per_element,
                                               .most_states = all->most_states,
                                               .most_prices = all->most_prices,
                                               .exact = all->exact};
    return HAPT_OK;
}

/* An infeasible method is no error; *made: it succeeded. */
static enum hapt_status passed(enum hapt_status status, bool *made)
{
    *made = status == HAPT_OK;
    if (status != HAPT_ERR_INFEASIBLE) return status;
    hapt_fail_reset();
    return HAPT_OK;
}

struct mesh_programs { /* NULL: none */
    const struct hapt_axis_program *program[HAPT_MESH_AXES];
    const char *by[HAPT_MESH_AXES];
};

static void report_program(const struct mesh_search *search, const struct mesh_programs *programs, double cost_s,
                           double memory_bytes)
{
    if (search->options->found)
        search->options->found(search->options->found_context, programs->program, cost_s, memory_bytes);
}

/* Receives the programs found by a search of the last axis. */
struct found_context {
    const struct mesh_search *search;
    struct mesh_programs programs;
    int axis;
};

static void on_found(void *context, const struct hapt_axis_program *program, double cost_s, double memory_bytes)
{
    struct found_context *found = context;
    found->programs.program[found->axis] = program;
    report_program(found->search, &found->programs, cost_s, memory_bytes);
}

/* `last`: the other axis' program, or NULL if this axis comes first. `limited`: within the memory. */
static enum hapt_status synthesise_axis(struct mesh_search *search, const struct axis_context *axis_context,
                                        const struct mesh_programs *last, bool limited,
                                        struct hapt_axis_program *program, struct hapt_synthesis_report *report,
                                        bool *made)
{
    const struct hapt_axis *axis = &search->axis[axis_context->axis];
    const struct hapt_spmd_costs costs = costs_of(axis_context);
    struct hapt_synthesis_options options;
    struct found_context found = {.search = search, .axis = axis_context->axis};
    HAPT_TRY(options_of(search, axis->size, limited, &options));
    if (last && search->options->found) {
        found.programs = *last;
        options.found = on_found;
        options.found_context = &found;
    }
    HAPT_TRY(passed(hapt_synthesise(axis_context->sharding, axis_context->axis, axis, &costs, &options, search->scratch,
                                    program, report),
                    made));
    if (*made) search->report.expanded += report->expanded;
    return HAPT_OK;
}

/* Keeps a program of both axes if it fits and costs least. */
static void consider(struct mesh_search *search, const struct mesh_programs *programs,
                     const struct hapt_synthesis_report *report, bool plain)
{
    const double limit = search->options->memory_bytes;
    search->report.priced_count++;
    if (limit > 0 && report->memory_bytes > limit * (1 + 1e-12)) return;
    if (plain) search->report.plain_s = fmin(search->report.plain_s, report->cost_s);
    if (search->found && report->cost_s >= search->report.inner.cost_s) return;
    search->found = true;
    for (int axis = 0; axis < HAPT_MESH_AXES; axis++)
        search->best[axis] = programs->program[axis] ? *programs->program[axis] : (struct hapt_axis_program){0};
    search->report.inner = *report;
    search->report.outer_by = programs->by[0];
    search->report.inner_by = programs->by[1];
}

static enum hapt_status price_plain(struct mesh_search *search, const struct axis_context *axis_context,
                                    const struct hapt_axis_program *program, struct hapt_synthesis_report *report,
                                    bool *made)
{
    const struct hapt_spmd_costs costs = costs_of(axis_context);
    const struct hapt_axis *axis = &search->axis[axis_context->axis];
    struct hapt_synthesis_options options;
    struct hapt_program_price price;
    HAPT_TRY(options_of(search, axis->size, true, &options));
    HAPT_TRY(passed(hapt_axis_program_price(axis_context->sharding, axis_context->axis, axis, &costs, &options, program,
                                            search->scratch, &price),
                    made));
    if (!*made) return HAPT_OK;
    *report = (struct hapt_synthesis_report){.cost_s = price.cost_s,
                                             .compute_s = price.compute_s,
                                             .communicate_s = price.communicate_s,
                                             .end_s = price.end_s,
                                             .stages = price.stages,
                                             .because = "no axis was searched"};
    for (int rank = 0; rank < axis->size; rank++)
        report->memory_bytes = fmax(report->memory_bytes, price.memory_bytes[rank]);
    return HAPT_OK;
}

static enum hapt_status plain_program(struct mesh_search *search, const struct hapt_sharding *sharding, int axis,
                                      bool tensor, struct hapt_axis_program **program, bool *made)
{
    return passed((tensor ? hapt_axis_program_tensor_parallel : hapt_axis_program_data_parallel)(
                      sharding, axis, &search->axis[axis], search->scratch, program),
                  made);
}

/* ---- the second axis, given the first ---- */

static const char *const plain_name[] = {"rows", "tensor parallel"};
static const char by_synthesis[] = "synthesised";

static enum hapt_status finish_plain(struct mesh_search *search, const struct axis_context *axis_context,
                                     struct mesh_programs programs, bool plain_outer)
{
    for (int tensor = 0; tensor < 2; tensor++) {
        struct hapt_synthesis_report report;
        struct hapt_axis_program *program = NULL;
        bool made;
        HAPT_TRY(plain_program(search, axis_context->sharding, axis_context->axis, tensor, &program, &made));
        if (made) HAPT_TRY(price_plain(search, axis_context, program, &report, &made));
        if (!made) continue;
        programs.program[axis_context->axis] = program;
        programs.by[axis_context->axis] = plain_name[tensor];
        report_program(search, &programs, report.cost_s, report.memory_bytes);
        consider(search, &programs, &report, plain_outer);
    }
    return HAPT_OK;
}

static enum hapt_status finish_synthesised(struct mesh_search *search, const struct axis_context *axis_context,
                                           struct mesh_programs programs)
{
    struct hapt_axis_program *program;
    struct hapt_synthesis_report report;
    bool made;
    HAPT_NEW(program, search->scratch, 1);
    HAPT_TRY(synthesise_axis(search, axis_context, &programs, true, program, &report, &made));
    if (!made) return HAPT_OK;
    programs.program[axis_context->axis] = program;
    programs.by[axis_context->axis] = by_synthesis;
    consider(search, &programs, &report, false);
    return HAPT_OK;
}

static bool same_program(const struct hapt_axis_program *a, const struct hapt_axis_program *b)
{
    if (a->count != b->count) return false;
    for (int i = 0; i < a->count; i++) {
        const struct hapt_axis_instruction *x = &a->instruction[i], *y = &b->instruction[i];
        if (x->op != y->op) return false;
        if (x->op >= 0 ? x->cut.letter != y->cut.letter || x->cut.blocks != y->cut.blocks ||
                             x->cut.unit != y->cut.unit || x->cut.ratio != y->cut.ratio
                       : x->tensor != y->tensor || x->kind != y->kind || !hapt_property_same(x->from, y->from) ||
                             !hapt_property_same(x->to, y->to))
            return false;
    }
    return true;
}

/* The inner axis by every requested method, for an outer program not tried yet. */
static enum hapt_status go_inside(struct mesh_search *search, const struct hapt_axis_program *outer,
                                  const char *outer_by, bool plain_outer)
{
    const unsigned methods = search->options->methods ? search->options->methods : HAPT_MESH_METHOD_ALL;
    struct hapt_sharding *sharding;
    bool made;
    for (int k = 0; k < search->known_count; k++)
        if (same_program(&search->known[k], outer)) return HAPT_OK;
    HAPT_ASSERT(search->known_count < (int)(sizeof search->known / sizeof *search->known));
    search->known[search->known_count++] = *outer;
    HAPT_TRY(
        passed(hapt_sharding_apply(search->trivial, 0, &search->axis[0], outer, search->scratch, &sharding), &made));
    if (!made) return HAPT_OK;
    const struct axis_context axis_context = {
        .costs = search->costs, .axis = 1, .outer_size = search->axis[0].size, .sharding = sharding};
    const struct mesh_programs programs = {.program = {outer}, .by = {outer_by}};
    if (plain_outer || (methods & HAPT_MESH_METHOD_PLAIN_INNER))
        HAPT_TRY(finish_plain(search, &axis_context, programs, plain_outer));
    if (plain_outer && !(methods & HAPT_MESH_METHOD_PLAIN_OUTER)) return HAPT_OK;
    return finish_synthesised(search, &axis_context, programs);
}

/* ---- the first axis, with assumptions on the other ---- */

struct expected {
    double *op_share, *tensor_share;
};

/* Assumes an even share of everything; of the outer axis: of everything except parameters. */
static enum hapt_status expect_even(struct mesh_search *search, int other, struct expected *expected)
{
    const struct hapt_graph *graph = search->trivial->graph;
    const double share = 1.0 / search->axis[other].size;
    HAPT_NEW(expected->op_share, search->scratch, graph->op_count);
    HAPT_NEW(expected->tensor_share, search->scratch, graph->tensor_count);
    for (int o = 0; o < graph->op_count; o++) expected->op_share[o] = share;
    for (int t = 0; t < graph->tensor_count; t++) {
        const int primal = graph->tensor[t].primal >= 0 ? graph->tensor[t].primal : t;
        expected->tensor_share[t] = other == 0 && graph->tensor[primal].kind == HAPT_TENSOR_PARAMETER ? 1 : share;
    }
    return HAPT_OK;
}

static double largest_share(const struct hapt_axis *axis, int ratio, int64_t units, int64_t *first)
{
    double most = 0;
    if (!hapt_axis_split(axis, ratio, units, first)) return 1;
    for (int rank = 0; rank < axis->size; rank++)
        most = fmax(most, (double)(first[rank + 1] - first[rank]) / (double)units);
    return most;
}

/* Assumes what a program of the inner axis alone leaves. */
static enum hapt_status expect_program(struct mesh_search *search, const struct hapt_axis_program *inner,
                                       struct expected *expected)
{
    const struct hapt_sharding *trivial = search->trivial;
    const struct hapt_axis *axis = &search->axis[1];
    struct hapt_sharding *sharding;
    int64_t *first;
    HAPT_NEW(first, search->scratch, axis->size + 1);
    HAPT_NEW(expected->op_share, search->scratch, trivial->graph->op_count);
    HAPT_NEW(expected->tensor_share, search->scratch, trivial->graph->tensor_count);
    HAPT_TRY(hapt_sharding_apply(trivial, 1, axis, inner, search->scratch, &sharding));
    for (int i = 0; i < inner->count; i++) {
        const struct hapt_axis_instruction *instruction = &inner->instruction[i];
        struct hapt_cut_rule rule;
        if (instruction->op < 0) continue;
        HAPT_TRY(hapt_cut_rule_make(trivial, 1, axis, instruction->op, instruction->cut, &rule));
        expected->op_share[instruction->op] = rule.units ? largest_share(axis, rule.cut.ratio, rule.units, first) : 1;
    }
    for (int t = 0; t < trivial->graph->tensor_count; t++) /* further versions come after the tensors of the source */
        expected->tensor_share[t] = (double)hapt_tensor_elements(&sharding->shard->tensor[t]) /
                                    (double)hapt_tensor_elements(&trivial->graph->tensor[t]);
    return HAPT_OK;
}

static enum hapt_status first_axis(struct mesh_search *search, int axis, const struct expected *expected, bool limited,
                                   struct hapt_axis_program **program, bool *made)
{
    const struct axis_context axis_context = {.costs = search->costs,
                                              .axis = axis,
                                              .outer_size = search->axis[0].size,
                                              .sharding = search->trivial,
                                              .op_share = expected->op_share,
                                              .tensor_share = expected->tensor_share};
    struct hapt_synthesis_report report;
    HAPT_NEW(*program, search->scratch, 1);
    return synthesise_axis(search, &axis_context, NULL, limited, *program, &report, made);
}

static enum hapt_status outer_first(struct mesh_search *search, bool limited)
{
    struct hapt_axis_program *outer;
    struct expected expected;
    bool made;
    HAPT_TRY(expect_even(search, 1, &expected));
    HAPT_TRY(first_axis(search, 0, &expected, limited, &outer, &made));
    return made ? go_inside(search, outer, by_synthesis, false) : HAPT_OK;
}

static enum hapt_status inner_first(struct mesh_search *search, bool limited)
{
    struct hapt_axis_program *outer, *inner;
    struct expected expected;
    bool made;
    HAPT_TRY(expect_even(search, 0, &expected));
    HAPT_TRY(first_axis(search, 1, &expected, limited, &inner, &made));
    if (!made) return HAPT_OK;
    HAPT_TRY(expect_program(search, inner, &expected));
    HAPT_TRY(first_axis(search, 0, &expected, limited, &outer, &made));
    return made ? go_inside(search, outer, "synthesised for the inner axis", false) : HAPT_OK;
}

static enum hapt_status search_both(struct mesh_search *search)
{
    const unsigned methods = search->options->methods ? search->options->methods : HAPT_MESH_METHOD_ALL;
    for (int tensor = 0; tensor < 2; tensor++) { /* plain programs first, since equal programs are not tried again */
        struct hapt_axis_program *outer;
        bool made;
        HAPT_TRY(plain_program(search, search->trivial, 0, tensor, &outer, &made));
        if (made) HAPT_TRY(go_inside(search, outer, plain_name[tensor], true));
    }
    /* The first axis' memory is an estimate, so it is limited only if nothing else fits. */
    const int rounds = search->options->memory_bytes > 0 && (methods & HAPT_MESH_METHOD_LEAN_FIRST) ? 2 : 1;
    for (int limited = 0; limited < rounds && !(limited && search->found); limited++) {
        if (methods & HAPT_MESH_METHOD_OUTER_FIRST) HAPT_TRY(outer_first(search, limited));
        if (methods & HAPT_MESH_METHOD_INNER_FIRST) HAPT_TRY(inner_first(search, limited));
    }
    return HAPT_OK;
}

static enum hapt_status search_one(struct mesh_search *search, int axis)
{
    const struct axis_context axis_context = {
        .costs = search->costs, .axis = axis, .outer_size = search->axis[0].size, .sharding = search->trivial};
    const struct mesh_programs programs = {.by = {"one device", "one device"}};
    HAPT_TRY(finish_plain(search, &axis_context, programs, true));
    return finish_synthesised(search, &axis_context, programs);
}

static enum hapt_status apply_best(struct mesh_search *search, const struct hapt_axis_program *program[HAPT_MESH_AXES],
                                   struct hapt_sharding **sharding)
{
    struct hapt_sharding *now;
    HAPT_TRY(hapt_sharding_trivial(search->trivial->graph, search->arena, &now));
    for (int axis = 0; axis < HAPT_MESH_AXES; axis++) {
        struct hapt_axis_program *kept = NULL;
        if (search->axis[axis].size > 1) {
            HAPT_NEW(kept, search->arena, 1);
            HAPT_TRY(hapt_axis_program_copy(&search->best[axis], search->arena, kept));
        }
        HAPT_TRY(hapt_sharding_apply(now, axis, &search->axis[axis], kept, search->arena, &now));
        program[axis] = kept;
    }
    *sharding = now;
    return HAPT_OK;
}

static enum hapt_status synthesise_mesh(struct mesh_search *search, const struct hapt_graph *graph,
                                        const struct hapt_axis_program *program[HAPT_MESH_AXES],
                                        struct hapt_sharding **sharding)
{
    struct hapt_sharding *trivial;
    HAPT_TRY(hapt_sharding_trivial(graph, search->scratch, &trivial));
    search->trivial = trivial;
    search->report = (struct hapt_mesh_report){.plain_s = INFINITY, .outer_by = "one device", .inner_by = "one device"};
    if (search->axis[0].size > 1 && search->axis[1].size > 1)
        HAPT_TRY(search_both(search));
    else
        HAPT_TRY(search_one(search, search->axis[0].size > 1 ? 0 : 1));
    if (search->found) return apply_best(search, program, sharding);
    return hapt_fail(HAPT_ERR_INFEASIBLE, "use more devices, a smaller microbatch or more stages",
                     "no program was found that fits the memory of %d x %d devices", search->axis[0].size,
                     search->axis[1].size);
}

enum hapt_status hapt_synthesise_mesh(const struct hapt_graph *graph, const struct hapt_axis axis[HAPT_MESH_AXES],
                                      const struct hapt_mesh_costs *costs, const struct hapt_mesh_options *options,
                                      struct hapt_arena *arena, const struct hapt_axis_program *program[HAPT_MESH_AXES],
                                      struct hapt_sharding **sharding, struct hapt_mesh_report *report)
{
    struct hapt_arena scratch;
    struct mesh_search search = {.axis = axis, .costs = costs, .options = options, .arena = arena, .scratch = &scratch};
    const double start_s = hapt_time_s();
    if (axis[0].size < 2 && axis[1].size < 2)
        return hapt_fail(HAPT_ERR_INPUT, NULL, "a mesh of one device has nothing to share out");
    hapt_arena_init(&scratch);
    const enum hapt_status status = synthesise_mesh(&search, graph, program, sharding);
    hapt_arena_release(&scratch);
    HAPT_TRY(status);
    search.report.seconds = hapt_time_s() - start_s;
    if (report) *report = search.report;
    return HAPT_OK;
}
