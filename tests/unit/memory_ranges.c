/* Memory of ranges without their programs, and the plans of the programs, against regions, lifetimes and peaks that
 * follow from each program's steps: equal to the byte. */
#include "cuts.h"
#include "memory_check.h"
#include "programs.h"
#include "fixture.h"

#include "hapt/memory.h"

static size_t fake_scratch(void *context, const struct hapt_program *program, int op)
{
    (void)context;
    if (op < 0) return (size_t)program->tensor_count * 24 + 100;
    return (size_t)(op * 7919 % 13) * 400;
}

static long compared, saved, waiting;

static void check_workspace(const struct hapt_memory_plan *plan, const struct hapt_program *program)
{
    struct hapt_arena arena;
    struct lifetime *lifetime[HAPT_SECTION_COUNT];
    size_t peak = 0;
    hapt_arena_init(&arena);
    CHECK_OK(memory_compare_tensors(plan, program, &arena, lifetime, &peak));
    CHECK(plan->workspace_bytes == peak + plan->scratch_bytes);
    hapt_arena_release(&arena);
}

static long away, masters_away, sliced, bounded, weights_away, less, host_updates, gradients_away, gradients_tied,
    weights_sharded, shared_less;

/* The lower bounds of a range, against the blocks of its plans. */
static void check_least(const struct hapt_memory_ranges *ranges, const struct hapt_program *program,
                        const struct hapt_memory_bytes *figures)
{
    struct hapt_memory_bytes least;
    hapt_memory_ranges_least(ranges, program->first_op, program->end_op, &least);
    CHECK(least.parameter_bytes <= figures->parameter_bytes && least.sharded_bytes <= figures->sharded_bytes);
    CHECK(least.trained_elements == figures->trained_elements && least.copies == figures->copies);
    /* the rest is the same with whole and with sharded state */
    CHECK(figures->parameter_bytes - least.parameter_bytes == figures->sharded_bytes - least.sharded_bytes);
    bounded += least.parameter_bytes > 0;
}

/* Units of one to seven operators that cover a model. */
static int random_units(int positions, uint64_t *seed, struct hapt_unit unit[])
{
    int count = 0;
    for (int first = 0; first < positions; count++) {
        int end = first + 1 + (int)(hapt_random_next(seed) % 7);
        if (end > positions) end = positions;
        unit[count] = (struct hapt_unit){first, end, false, 0};
        first = end;
    }
    return count;
}

/* With the weights on the host, too: the figures against the plan, and against that with the state there alone. */
static void compare_host_weights(const struct hapt_program *program, const struct hapt_memory_options *options,
                                 const struct hapt_memory_ranges *ranges, struct hapt_memory_work *work,
                                 const struct hapt_memory_plan *state, struct hapt_arena *arena)
{
    struct hapt_memory_plan *plan = NULL;
    struct hapt_memory_bytes figures;
    CHECK_OK(hapt_memory_plan(program, options, arena, &plan));
    CHECK_OK(hapt_memory_ranges_of(ranges, program->first_op, program->end_op, NULL, work, &figures));
    if (!plan) return;
    check_least(ranges, program, &figures);
    CHECK_OK(memory_check(plan, program));
    CHECK(figures.parameter_bytes == plan->parameter_bytes && figures.host_bytes == plan->host_bytes);
    CHECK(figures.sharded_bytes == plan->sharded_bytes && figures.activation_bytes == plan->activation_bytes);
    CHECK(plan->host_weights ==
          (plan->state_count > 0 && plan->trained_elements > 0 && plan->elements == plan->trained_elements &&
           (state->copy_offset == (size_t)-1 || state->masters_unread)));
    if (!plan->host_weights) {
        CHECK(plan->parameter_bytes == state->parameter_bytes && plan->host_bytes == state->host_bytes);
        return;
    }
    /* what left the device is on the host, but for the places and windows */
    const bool copies = state->copy_offset != (size_t)-1;
    const size_t window = hapt_align(plan->window_elements * (copies ? sizeof(uint16_t) : sizeof(float)));
    CHECK(plan->parameter_bytes + plan->host_bytes - state->host_bytes ==
          state->parameter_bytes + HAPT_WEIGHT_PLACES * plan->place_bytes + window);
    weights_away++;
    less += plan->parameter_bytes < state->parameter_bytes;
}

/* True if operators outside of a program read one of its trained weights. */
static bool is_tied_outside(const struct hapt_program *program)
{
    const struct hapt_graph *source = program->sharding->source;
    for (int t = 0; t < source->tensor_count; t++) {
        bool inside = false, outside = false;
        if (source->tensor[t].kind != HAPT_TENSOR_PARAMETER || !source->tensor[t].trainable) continue;
        for (int o = 0; o < source->forward_count; o++)
            for (int i = 0; i < source->op[o].input_count; i++) {
                if (source->op[o].input[i] != t) continue;
                *(o >= program->first_op && o < program->end_op ? &inside : &outside) = true;
            }
        if (inside && outside) return true;
    }
    return false;
}

/* Weights on the host and updates there, without and with gradients: the figures against the plan, and plan against
 * plan. The device has three places instead of the gradients, and the host has them instead of a window. */
static void compare_host_gradients(const struct hapt_program *program, const struct hapt_memory_options *options,
                                   const struct hapt_memory_ranges *ranges, struct hapt_memory_work *work,
                                   struct hapt_arena *arena)
{
    struct hapt_memory_options weights = *options;
    struct hapt_memory_plan *with = NULL, *without = NULL;
    struct hapt_memory_bytes figures;
    const struct hapt_axis *axis = program->sharding->axis;
    weights.gradient_unit_count = 0;
    CHECK_OK(hapt_memory_plan(program, &weights, arena, &without));
    CHECK_OK(hapt_memory_plan(program, options, arena, &with));
    CHECK_OK(hapt_memory_ranges_of(ranges, program->first_op, program->end_op, NULL, work, &figures));
    if (!with || !without) return;
    const bool alone = axis[0].size * axis[1].size == 1, tied = is_tied_outside(program);
    check_least(ranges, program, &figures);
    CHECK_OK(memory_check(with, program));
    CHECK_OK(memory_check(without, program));
    CHECK(figures.parameter_bytes == with->parameter_bytes && figures.host_bytes == with->host_bytes);
    CHECK(figures.activation_bytes == with->activation_bytes);
    CHECK(!without->host_gradients && with->host_gradients == (without->host_weights && alone && !tied));
    CHECK(figures.gradient_bytes == (with->host_gradients ? with->trained_elements * sizeof(float) : 0));
    gradients_tied += without->host_weights && alone && tied;
    const size_t gradients = hapt_align(without->trained_elements * sizeof(float)),
                 window = hapt_align(without->window_elements * sizeof(float));
    if (!with->host_gradients) {
        CHECK(with->parameter_bytes == without->parameter_bytes && with->host_bytes == without->host_bytes);
        return;
    }
    CHECK(with->parameter_bytes + gradients ==
          without->parameter_bytes + HAPT_GRADIENT_PLACES * with->gradient_place_bytes);
    CHECK(with->host_bytes + window == without->host_bytes + gradients);
    gradients_away++;
}

/* True if ranks sum some gradients of a program, by its parameter groups. */
static bool sums_gradients(const struct hapt_memory_plan *plan, const struct hapt_program *program)
{
    for (int g = 1; g < HAPT_PARAMETER_GROUPS; g++) {
        int ranks = 1;
        for (int axis = 0; axis < HAPT_MESH_AXES; axis++)
            if (plan->group[g].axes >> axis & 1u) ranks *= program->sharding->axis[axis].size;
        if (plan->group[g].end > plan->group[g].first && ranks > 1) return true;
    }
    return false;
}

/* Sharded weights, with the state on the device and on the host: the figures against the plan, and that against the
 * plan with sharded state alone. A rank has two places and its slices instead of all weights. */
static void compare_sharded_weights(const struct hapt_program *program, const struct hapt_memory_options *options,
                                    struct hapt_memory_ranges *const ranges[2], struct hapt_memory_work *const work[2],
                                    bool check, struct hapt_arena *arena)
{
    for (int host = 0; host < 2; host++) {
        struct hapt_memory_options own = *options;
        struct hapt_memory_plan *with = NULL, *without = NULL;
        struct hapt_memory_bytes figures;
        own.host_state = host;
        CHECK_OK(hapt_memory_plan(program, &own, arena, &with));
        own.weight_unit_count = 0;
        CHECK_OK(hapt_memory_plan(program, &own, arena, &without));
        CHECK_OK(hapt_memory_ranges_of(ranges[host], program->first_op, program->end_op, NULL, work[host], &figures));
        if (!with || !without) return;
        check_least(ranges[host], program, &figures);
        if (check) CHECK_OK(memory_check(with, program));
        CHECK(figures.parameter_bytes == with->parameter_bytes && figures.host_bytes == with->host_bytes);
        CHECK(figures.sharded_bytes == with->parameter_bytes && with->host_bytes == without->host_bytes);
        CHECK(figures.activation_bytes == with->activation_bytes);
        const bool copies = with->copy_offset != (size_t)-1;
        CHECK(!with->host_weights && !without->sharded_weights);
        CHECK(with->sharded_weights == (with->trained_elements > 0 && with->elements == with->trained_elements &&
                                        (copies ? with->masters_unread : without->state_space == HAPT_SPACE_DEVICE) &&
                                        sums_gradients(with, program)));
        if (!with->sharded_weights) {
            CHECK(with->parameter_bytes == without->parameter_bytes && figures.weight_units == 0);
            continue;
        }
        const size_t size = copies ? sizeof(uint16_t) : sizeof(float);
        CHECK(with->parameter_bytes + hapt_align(with->elements * size) == without->parameter_bytes +
                                                                               hapt_align(with->state_elements * size) +
                                                                               HAPT_WEIGHT_PLACES * with->place_bytes);
        CHECK(figures.weight_units == with->unit_count && figures.weight_bytes == with->trained_elements * size);
        weights_sharded++;
        shared_less += with->parameter_bytes < without->parameter_bytes;
    }
}

/* With optimizer state on the host: the figures against the plans, and against those with state on the device. */
static void compare_host_state(const struct hapt_program *program, const struct hapt_memory_options *options,
                               const struct hapt_memory_ranges *ranges, struct hapt_memory_work *work,
                               const struct hapt_memory_options *weights,
                               const struct hapt_memory_ranges *weight_ranges, struct hapt_memory_work *weight_work,
                               const struct hapt_memory_plan *here, bool check, struct hapt_arena *arena)
{
    struct hapt_memory_options host = *options;
    struct hapt_memory_plan *plan = NULL, *sharded = NULL;
    struct hapt_memory_bytes figures;
    host.host_state = true;
    CHECK_OK(hapt_memory_plan(program, &host, arena, &plan));
    host.sharded_state = true;
    CHECK_OK(hapt_memory_plan(program, &host, arena, &sharded));
    CHECK_OK(hapt_memory_ranges_of(ranges, program->first_op, program->end_op, NULL, work, &figures));
    if (!plan || !sharded) return;
    check_least(ranges, program, &figures);
    if (check) CHECK_OK(memory_check(plan, program));
    if (check) CHECK_OK(memory_check(sharded, program));
    CHECK(figures.parameter_bytes == plan->parameter_bytes && figures.sharded_bytes == sharded->parameter_bytes);
    CHECK(figures.activation_bytes == plan->activation_bytes && figures.activation_bytes == here->activation_bytes);
    CHECK(figures.host_bytes == plan->host_bytes && figures.sharded_host_bytes == sharded->host_bytes);
    CHECK(plan->sharded_bytes == figures.sharded_bytes && plan->sharded_host_bytes == figures.sharded_host_bytes);
    /* what left the device is on the host, but for the windows */
    const bool masters = plan->master_space == HAPT_SPACE_HOST;
    const size_t windows = (size_t)(plan->state_count + masters) * hapt_align(plan->window_elements * sizeof(float));
    CHECK(masters == (plan->host_bytes > 0 && here->copy_offset != (size_t)-1)); /* all or no weights of these models */
    CHECK(here->parameter_bytes == plan->parameter_bytes + plan->host_bytes - windows * (plan->host_bytes > 0));
    masters_away += masters;
    CHECK(sharded->host_bytes <= plan->host_bytes);
    away += plan->parameter_bytes < here->parameter_bytes;
    compare_host_weights(program, weights, weight_ranges, weight_work, plan, arena);
}

/* Updates on the host: the figures against the plans. The device lacks the windows, the host has those of gradients,
 * of masters on the device and of copies. */
static void compare_host_updates(const struct hapt_program *program, const struct hapt_memory_options *options,
                                 const struct hapt_memory_ranges *ranges, struct hapt_memory_work *work, bool check,
                                 struct hapt_arena *arena)
{
    for (int sharded = 0; sharded < 2; sharded++) {
        struct hapt_memory_options host = *options;
        struct hapt_memory_plan *copied = NULL, *plan = NULL;
        struct hapt_memory_bytes figures;
        host.host_state = true;
        host.sharded_state = sharded;
        CHECK_OK(hapt_memory_plan(program, &host, arena, &copied));
        host.host_update = true;
        CHECK_OK(hapt_memory_plan(program, &host, arena, &plan));
        CHECK_OK(hapt_memory_ranges_of(ranges, program->first_op, program->end_op, NULL, work, &figures));
        if (!copied || !plan) return;
        if (check) CHECK_OK(memory_check(plan, program));
        check_least(ranges, program, &figures);
        CHECK((sharded ? figures.sharded_bytes : figures.parameter_bytes) == plan->parameter_bytes);
        CHECK((sharded ? figures.sharded_host_bytes : figures.host_bytes) == plan->host_bytes);
        const size_t block = hapt_align(copied->window_elements * sizeof(float));
        const bool masters = copied->master_space == HAPT_SPACE_HOST, copies = copied->copy_offset != (size_t)-1;
        CHECK(plan->host_update == (copied->state_space == HAPT_SPACE_HOST));
        if (!plan->host_update) continue;
        CHECK(plan->parameter_bytes + (size_t)(plan->state_count + masters) * block == copied->parameter_bytes);
        CHECK(plan->host_bytes == copied->host_bytes + (masters ? 1 : 2) * block +
                                      (copies ? hapt_align(copied->window_elements * sizeof(uint16_t)) : 0));
        host_updates++;
    }
}

/* Residents alone, without activations: the figures of whole ranges. */
static void compare_residents(const struct hapt_memory_ranges *whole, const struct hapt_memory_ranges *residents,
                              int first, int end, struct hapt_memory_work *work)
{
    struct hapt_memory_activations activations;
    struct hapt_memory_bytes all, least, own, own_least;
    CHECK_OK(hapt_memory_ranges_activations(whole, first, end, NULL, NULL, work, &activations));
    hapt_memory_ranges_add(whole, first, end, &activations, &all);
    hapt_memory_ranges_add(residents, first, end, &activations, &own);
    hapt_memory_ranges_least(whole, first, end, &least);
    hapt_memory_ranges_least(residents, first, end, &own_least);
    CHECK(own.parameter_bytes == all.parameter_bytes && own.sharded_bytes == all.sharded_bytes &&
          own.activation_bytes == all.activation_bytes && own.host_bytes == all.host_bytes &&
          own.sharded_host_bytes == all.sharded_host_bytes && own.trained_elements == all.trained_elements &&
          own.weight_bytes == all.weight_bytes && own.fetch_bytes == all.fetch_bytes &&
          own.weight_units == all.weight_units && own.gradient_bytes == all.gradient_bytes &&
          own.gradient_fetch_bytes == all.gradient_fetch_bytes && own.gradient_last_bytes == all.gradient_last_bytes);
    CHECK(own_least.parameter_bytes == least.parameter_bytes && own_least.sharded_bytes == least.sharded_bytes &&
          own_least.trained_elements == least.trained_elements);
}

static void compare_ranges(const struct hapt_sharding *sharding, const struct hapt_memory_options *options, bool check,
                           const char *what)
{
    struct hapt_arena arena;
    struct hapt_memory_ranges *ranges = NULL, *host_ranges = NULL, *weight_ranges = NULL, *update_ranges = NULL,
                              *gradient_ranges = NULL, *residents = NULL;
    struct hapt_memory_work *work = NULL, *host_work = NULL, *weight_work = NULL, *update_work = NULL,
                            *gradient_work = NULL;
    struct hapt_memory_ranges *shared_ranges[2] = {NULL};
    struct hapt_memory_work *shared_work[2] = {NULL};
    struct hapt_memory_options host = *options, weights = *options, update = *options, gradients, shared, alone;
    const int places = sharding->source->forward_count;
    uint64_t seed = (uint64_t)places * 31 + (uint64_t)options->state_count;
    host.host_state = weights.host_state = update.host_state = update.host_update = true;
    hapt_arena_init(&arena);
    struct hapt_unit *unit = hapt_arena_alloc(&arena, (size_t)places, sizeof *unit);
    weights.weight_unit = unit;
    weights.weight_unit_count = random_units(places, &seed, unit);
    gradients = weights;
    gradients.host_update = true;
    gradients.gradient_unit = unit;
    gradients.gradient_unit_count = weights.weight_unit_count;
    shared = weights;
    shared.sharded_state = true;
    for (int on_host = 0; on_host < 2; on_host++) {
        shared.host_state = on_host;
        CHECK_OK(hapt_memory_ranges_create(sharding, &shared, &arena, &shared_ranges[on_host]));
        if (shared_ranges[on_host])
            CHECK_OK(hapt_memory_work_create(shared_ranges[on_host], &arena, &shared_work[on_host]));
    }
    CHECK_OK(hapt_memory_ranges_create(sharding, &gradients, &arena, &gradient_ranges));
    if (gradient_ranges) CHECK_OK(hapt_memory_work_create(gradient_ranges, &arena, &gradient_work));
    alone = gradients;
    alone.residents_only = true;
    CHECK_OK(hapt_memory_ranges_create(sharding, &alone, &arena, &residents));
    CHECK_OK(hapt_memory_ranges_create(sharding, &weights, &arena, &weight_ranges));
    if (weight_ranges) CHECK_OK(hapt_memory_work_create(weight_ranges, &arena, &weight_work));
    CHECK_OK(hapt_memory_ranges_create(sharding, options, &arena, &ranges));
    if (ranges) CHECK_OK(hapt_memory_work_create(ranges, &arena, &work));
    CHECK_OK(hapt_memory_ranges_create(sharding, &host, &arena, &host_ranges));
    if (host_ranges) CHECK_OK(hapt_memory_work_create(host_ranges, &arena, &host_work));
    CHECK_OK(hapt_memory_ranges_create(sharding, &update, &arena, &update_ranges));
    if (update_ranges) CHECK_OK(hapt_memory_work_create(update_ranges, &arena, &update_work));
    for (int first = 0; work && first < places; first++) {
        for (int end = first + 1; end <= places; end++) {
            struct hapt_arena scratch_arena;
            struct hapt_program *program = NULL;
            struct hapt_memory_plan *plan = NULL;
            struct hapt_memory_bytes figures;
            hapt_arena_init(&scratch_arena);
            const enum hapt_status status = hapt_program_build(sharding, first, end, &scratch_arena, &program);
            CHECK((status == HAPT_OK) == hapt_sharding_allows(sharding, first, end));
            if (status == HAPT_OK) {
                struct hapt_memory_options sharded_options = *options;
                struct hapt_memory_plan *sharded = NULL;
                sharded_options.sharded_state = true;
                CHECK_OK(hapt_memory_plan(program, options, &scratch_arena, &plan));
                CHECK_OK(hapt_memory_plan(program, &sharded_options, &scratch_arena, &sharded));
                if (check) CHECK_OK(program_check(program));
                if (check) CHECK_OK(memory_check(plan, program));
                check_workspace(plan, program);
                CHECK_OK(hapt_memory_ranges_of(ranges, first, end, NULL, work, &figures));
                CHECK_MESSAGE(figures.parameter_bytes == plan->parameter_bytes &&
                                  figures.activation_bytes == plan->activation_bytes &&
                                  figures.weight_slot_bytes == plan->weight_slot_bytes &&
                                  figures.trained_elements == plan->trained_elements &&
                                  figures.copies == (plan->copy_offset != (size_t)-1) &&
                                  figures.masters_unread == plan->masters_unread &&
                                  plan->masters_unread == sharded->masters_like_state,
                              "%s, operators [%d, %d): %zu and %zu, planned %zu and %zu", what, first, end,
                              figures.parameter_bytes, figures.activation_bytes, plan->parameter_bytes,
                              plan->activation_bytes);
                CHECK(plan->sharded_bytes == figures.sharded_bytes);
                CHECK(plan->masters_like_state == memory_masters_like_state(plan, program) &&
                      sharded->masters_like_state == memory_masters_like_state(sharded, program));
                sliced += sharded->masters_like_state && sharded->parameter_bytes < plan->parameter_bytes;
                check_least(ranges, program, &figures);
                if (residents) compare_residents(gradient_ranges, residents, first, end, gradient_work);
                CHECK_MESSAGE(figures.sharded_bytes == sharded->parameter_bytes,
                              "%s, operators [%d, %d): state sharded %zu, planned %zu", what, first, end,
                              figures.sharded_bytes, sharded->parameter_bytes);
                if (test_long() || (first + end) % 4 == 1)
                    compare_host_updates(program, options, update_ranges, update_work, check, &scratch_arena);
                if (gradient_work && (test_long() || (first + end) % 4 == 2))
                    compare_host_gradients(program, &gradients, gradient_ranges, gradient_work, &scratch_arena);
                if (test_long() || (first + end) % 4 == 3)
                    compare_sharded_weights(program, &shared, shared_ranges, shared_work, check, &scratch_arena);
                if (test_long() || (first + end) % 4 == 0)
                    compare_host_state(program, options, host_ranges, host_work, &weights, weight_ranges, weight_work,
                                       plan, check, &scratch_arena);
                waiting += plan->weight_slot_bytes > 0;
                compared++;
                saved += sharded->parameter_bytes < plan->parameter_bytes;
            }
            hapt_fail_reset();
            hapt_arena_release(&scratch_arena);
        }
    }
    hapt_arena_release(&arena);
}

/* The same for split backward passes. */
static void compare_sharding(const struct hapt_sharding *sharding, const struct hapt_memory_options *options,
                             bool check, const char *what)
{
    struct hapt_arena arena;
    struct hapt_sharding *split = NULL;
    char name[128];
    hapt_arena_init(&arena);
    compare_ranges(sharding, options, check, what);
    snprintf(name, sizeof name, "%s, split", what);
    CHECK_OK(hapt_sharding_split(sharding, &arena, &split));
    if (split) compare_ranges(split, options, check, name);
    hapt_arena_release(&arena);
}

static void compare(const struct hapt_graph *graph, int dp, int tp, int states, bool scratch, const char *what)
{
    struct hapt_arena arena;
    struct hapt_sharding *sharding = NULL;
    char name[96];
    const struct hapt_memory_options options = {
        .slots = 3, .state_count = states, .scratch = scratch ? fake_scratch : NULL};
    snprintf(name, sizeof name, "%s, dp %d, tp %d", what, dp, tp);
    hapt_arena_init(&arena);
    CHECK_OK(hapt_sharding_tensor_parallel(graph, dp, tp, &arena, &sharding));
    if (sharding) compare_sharding(sharding, &options, false, name);
    hapt_arena_release(&arena);
}

/* Shardings by random cuts: several versions of a tensor, sums of gradients in other shapes, collectives in the
 * backward part. */
static void forced_cuts(void)
{
    const int cases = test_long() ? 1000 : 30;
    int made = 0;
    const long before = compared;
    for (int k = 0; k < cases; k++) {
        struct hapt_arena arena;
        struct hapt_sharding *trivial = NULL, *outer, *inner = NULL;
        struct hapt_axis_program *program;
        uint64_t random = (uint64_t)k + 77;
        const struct hapt_memory_options options = {
            .slots = 2, .transfer_slots = k % 5, .state_count = k % 3, .scratch = k % 2 ? fake_scratch : NULL};
        char name[32];
        hapt_arena_init(&arena);
        const struct hapt_graph *graph =
            k % 4 == 3 ? fixture_gpt(&arena, (struct fixture_gpt){1, 12, 3, 4, 13, 4, k % 8 == 3, k % 16 > 8})->graph
                       : fixture_random(&arena, &random, 3 + k % 20);
        snprintf(name, sizeof name, "case %d", k);
        CHECK_OK(hapt_sharding_trivial(graph, &arena, &trivial));
        outer = cuts_add_axis(trivial, 0, 2 + k % 3, &random, &arena, &program);
        if (outer) inner = k % 2 ? outer : cuts_add_axis(outer, 1, 2, &random, &arena, &program);
        if (inner) compare_sharding(inner, &options, true, name);
        made += inner != NULL;
        hapt_fail_reset();
        hapt_arena_release(&arena);
    }
    CHECK_MESSAGE(made > cases / 2 && compared - before > 20 * cases, "%d shardings, %ld ranges", made,
                  compared - before);
}

static void gpt(void)
{
    for (int tied = 0; tied < 2; tied++) {
        struct hapt_arena arena;
        hapt_arena_init(&arena);
        const struct hapt_model *model = fixture_gpt(&arena, (struct fixture_gpt){3, 16, 4, 8, 37, 4, tied, tied});
        compare(model->graph, 1, 1, 2, true, "GPT");
        compare(model->graph, 2, 2, 2, false, "GPT");
        compare(model->graph, 1, 4, 0, true, "GPT");
        hapt_arena_release(&arena);
    }
}

static void frozen_weights(void)
{
    struct hapt_arena arena;
    hapt_arena_init(&arena);
    const struct hapt_model *model = fixture_gpt(&arena, (struct fixture_gpt){2, 16, 2, 8, 24, 4, true, true});
    struct hapt_graph *graph = model->graph;
    static const char *const frozen[] = {"wte.weight", "h.0.attn.c_attn.weight", "h.0.mlp.c_fc.weight", "ln_f.weight",
                                         "h.0.ln_2.bias"};
    graph->op_count = graph->forward_count; /* build the backward part again, with frozen weights */
    graph->tensor_count = hapt_graph_find_tensor(graph, "loss_scale");
    for (int k = 0; k < 5; k++) graph->tensor[hapt_graph_find_tensor(graph, frozen[k])].trainable = false;
    CHECK_OK(hapt_graph_differentiate(graph));
    compare(graph, 1, 1, 2, true, "frozen");
    compare(graph, 2, 2, 1, false, "frozen");
    hapt_arena_release(&arena);
}

static void random_graphs(void)
{
    const int cases = test_long() ? 2000 : 40;
    for (int k = 0; k < cases; k++) {
        struct hapt_arena arena;
        uint64_t random = (uint64_t)k + 4242;
        char name[32];
        hapt_arena_init(&arena);
        const struct hapt_graph *graph = fixture_random(&arena, &random, 3 + k % 28);
        snprintf(name, sizeof name, "random graph %d", k);
        compare(graph, 1 + k % 2, 1 << k % 3, k % 3, k % 2, name);
        hapt_arena_release(&arena);
    }
    CHECK_MESSAGE(compared > 20000, "only %ld ranges compared", compared);
    CHECK_MESSAGE(waiting > 10000, "in only %ld ranges something waits", waiting);
    CHECK_MESSAGE(saved > 1000, "sharded state saves memory in %ld of %ld ranges", saved, compared);
    CHECK_MESSAGE(away > 100, "state on the host saves memory in %ld of %ld ranges", away, compared);
    CHECK_MESSAGE(sliced > 100, "%ld ranges have slices of master weights", sliced);
    CHECK_MESSAGE(bounded > 100, "%ld ranges have a lower bound above 0", bounded);
    CHECK_MESSAGE(host_updates > 1000, "%ld ranges are updated on the host", host_updates);
    CHECK_MESSAGE(weights_away > 1000 && less > 20, "%ld ranges have weights on the host, %ld of them need less",
                  weights_away, less);
    CHECK_MESSAGE(gradients_away > 100 && gradients_tied > 10,
                  "%ld ranges have gradients on the host, %ld could but for weights that others read", gradients_away,
                  gradients_tied);
    CHECK_MESSAGE(weights_sharded > 500 && shared_less > 20, "%ld ranges have sharded weights, %ld of them need less",
                  weights_sharded, shared_less);
    CHECK_MESSAGE(masters_away > 100, "%ld ranges have master weights on the host", masters_away);
}

int main(int argc, char **argv)
{
    test_init(&argc, &argv);
    RUN(gpt);
    RUN(frozen_weights);
    RUN(random_graphs);
    RUN(forced_cuts);
    return test_finish();
}
