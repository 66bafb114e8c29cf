/* Shardings that recompute: what is made again, and that it changes no bit and saves memory. */
#include "fixture.h"
#include "memory_check.h"
#include "random_program.h"
#include "world.h"

#include "hapt/engine.h"

enum { MOST_UNITS = 16 };

struct units {
    int count;
    struct hapt_unit unit[MOST_UNITS];
};

/* Disjoint units of [first, end) that end where programs may end. None, all or a third of them are selective. */
static struct units random_units(const struct hapt_sharding *sharding, int first, int end, uint64_t *random)
{
    const int selective = (int)(hapt_random_next(random) % 3);
    struct units units = {0};
    for (int at = first; at < end && units.count < MOST_UNITS;) {
        int next = at + 1 + (int)(hapt_random_next(random) % 6);
        while (next < end && sharding->not_a_boundary[next]) next++;
        if (next > end) next = end;
        if (hapt_random_next(random) % 3 > 0)
            units.unit[units.count++] = (struct hapt_unit){
                at, next, selective == 1 || (selective == 2 && hapt_random_next(random) % 3 == 0), 0};
        at = next;
    }
    return units;
}

static struct hapt_program *recomputed(const struct hapt_program *whole, const struct units *units, bool split,
                                       struct hapt_arena *arena)
{
    struct hapt_sharding *sharding = NULL;
    struct hapt_program *program = NULL;
    CHECK_OK(hapt_sharding_recompute(whole->sharding, units->unit, units->count, arena, &sharding));
    if (sharding && split) CHECK_OK(hapt_sharding_split(sharding, arena, &sharding));
    if (sharding) CHECK_OK(hapt_program_build(sharding, whole->first_op, whole->end_op, arena, &program));
    if (!program) exit(1);
    return program;
}

static bool reads(const struct hapt_op *op, int tensor)
{
    for (int i = 0; i < op->input_count; i++)
        if (op->input[i] == tensor) return true;
    return false;
}

static int unit_of(const struct units *units, int position)
{
    for (int u = 0; u < units->count; u++)
        if (position >= units->unit[u].first_op && position < units->unit[u].end_op) return u;
    return -1;
}

/* By the definition: what runs again serves a backward operator of its unit, and backward operators read such
 * activations of their own full unit from the forward part only that operators outside of it read as well. A selective
 * unit repeats no product and no collective. Returns the number of steps that run again. */
static long light_steps;

static int check_steps(const struct hapt_program *program, const struct hapt_program *whole, const struct units *units)
{
    const struct hapt_graph *graph = program->graph;
    const struct hapt_program_step *step = program->step[HAPT_SECTION_BACKWARD];
    const int steps = program->step_count[HAPT_SECTION_BACKWARD];
    int again = 0;
    for (int s = 0; s < steps; s++) {
        const struct hapt_op *op = &graph->op[step[s].op];
        const int unit = unit_of(units, op->forward_op);
        bool serves = false, makes = false;
        for (int k = 0; k < op->output_count; k++) {
            if (op->output[k] < 0 || !strstr(graph->tensor[op->output[k]].name, ".again")) continue;
            makes = true;
            for (int later = s + 1; later < steps; later++) {
                const struct hapt_op *reader = &graph->op[step[later].op];
                serves = serves || (reads(reader, op->output[k]) && unit_of(units, reader->forward_op) == unit);
            }
        }
        CHECK_MESSAGE(!makes || (serves && unit >= 0), "%s runs again and serves nothing", op->name);
        again += makes;
        const bool selective = unit >= 0 && units->unit[unit].selective;
        const struct hapt_op_type *type = hapt_op_type_at(op->type);
        CHECK_MESSAGE(!makes || !selective || !(type->heavy || type->collective), "%s is not light", op->name);
        light_steps += makes && selective;
        if (selective) continue;
        for (int i = 0; i < op->input_count; i++) {
            const struct hapt_tensor *input = op->input[i] < 0 ? NULL : &graph->tensor[op->input[i]];
            if (!input || input->kind != HAPT_TENSOR_ACTIVATION || input->producer >= graph->forward_count) continue;
            if (unit < 0 || unit_of(units, graph->op[input->producer].forward_op) != unit) continue;
            bool elsewhere = false; /* an operator outside of the unit reads it */
            for (int o = 0; o < program->sharding->reduce_first; o++)
                elsewhere = elsewhere ||
                            (reads(&graph->op[o], op->input[i]) && unit_of(units, graph->op[o].forward_op) != unit);
            CHECK_MESSAGE(elsewhere, "%s reads %s, which nobody else needs", op->name, input->name);
        }
    }
    CHECK(steps == whole->step_count[HAPT_SECTION_BACKWARD] + again);
    CHECK(program->step_count[HAPT_SECTION_FORWARD] == whole->step_count[HAPT_SECTION_FORWARD]);
    return again;
}

static long compared, repeated, saved, collectives;

static void compare_bits(const struct hapt_program *whole, const struct units *units, bool split, int vocab,
                         const char *what)
{
    struct hapt_arena arena;
    struct hapt_memory_plan *plan[2] = {NULL};
    const struct hapt_memory_options options = {.slots = 2, .state_count = 2};
    hapt_arena_init(&arena);
    const struct hapt_program *again = recomputed(whole, units, split, &arena);
    if (!split) repeated += check_steps(again, whole, units);
    CHECK_OK(program_check(again));
    CHECK_OK(hapt_memory_plan(whole, &options, &arena, &plan[0]));
    CHECK_OK(hapt_memory_plan(again, &options, &arena, &plan[1]));
    CHECK_OK(memory_check(plan[1], again));
    saved += plan[1]->activation_bytes < plan[0]->activation_bytes;
    for (int s = 0; s < again->step_count[HAPT_SECTION_BACKWARD]; s++) {
        const struct hapt_op *op = &again->graph->op[again->step[HAPT_SECTION_BACKWARD][s].op];
        collectives += again->step[HAPT_SECTION_BACKWARD][s].kind != HAPT_COLLECTIVE_NONE && op->output[0] >= 0 &&
                       strstr(again->graph->tensor[op->output[0]].name, ".again") != NULL;
    }
    world_compare_bits(whole, again, vocab, what);
    compared++;
    hapt_arena_release(&arena);
}

/* Random graphs, shardings, ranges and units, split or not: every tensor of every rank has the same bits. */
static void recomputing_changes_no_bit(void)
{
    const int cases = test_long() ? 1500 : 150;
    for (int k = 0; k < cases; k++) {
        struct hapt_arena arena;
        uint64_t random = (uint64_t)k + 909;
        char what[32];
        int vocab;
        snprintf(what, sizeof what, "case %d", k);
        hapt_arena_init(&arena);
        const struct hapt_program *program = random_program(k, &random, &arena, &vocab);
        if (program) {
            const struct units units = random_units(program->sharding, program->first_op, program->end_op, &random);
            compare_bits(program, &units, k % 5 == 0, vocab, what);
        }
        hapt_arena_release(&arena);
    }
    CHECK_MESSAGE(2 * compared > cases && repeated > 2 * compared && saved > compared / 3,
                  "%ld programs, %ld steps again, %ld save memory", compared, repeated, saved);
    CHECK_MESSAGE(collectives > 0, "%ld collectives run again", collectives);
    CHECK_MESSAGE(light_steps > cases / 4, "%ld steps of selective units run again", light_steps);
}

static long figures_compared, cheaper, between;

/* Figures of the range by the sharding with all units, against the program with those in the range as `choice` [unit]
 * says. */
static void compare_figures(const struct hapt_sharding *plain, bool split, const struct units *units, int first,
                            int end, const unsigned char *choice, const struct hapt_memory_ranges *ranges,
                            struct hapt_memory_work *work, const struct hapt_memory_options *options, const char *what)
{
    static const unsigned char kept[MOST_UNITS];
    struct hapt_arena arena;
    struct hapt_sharding *sharding = NULL;
    struct hapt_program *program = NULL;
    struct hapt_memory_plan *plan = NULL;
    struct hapt_memory_bytes figures, none, all;
    struct units own = {0};
    bool selective = false;
    hapt_arena_init(&arena);
    for (int u = 0; u < units->count; u++) {
        if (choice[u] == HAPT_UNIT_KEPT || units->unit[u].first_op < first || units->unit[u].end_op > end) continue;
        own.unit[own.count] = units->unit[u];
        own.unit[own.count++].selective = choice[u] == HAPT_UNIT_SELECTIVE;
        selective = selective || choice[u] == HAPT_UNIT_SELECTIVE;
    }
    CHECK_OK(hapt_sharding_recompute(plain, own.unit, own.count, &arena, &sharding));
    if (sharding && split) CHECK_OK(hapt_sharding_split(sharding, &arena, &sharding));
    if (sharding) CHECK_OK(hapt_program_build(sharding, first, end, &arena, &program));
    if (program) CHECK_OK(hapt_memory_plan(program, options, &arena, &plan));
    CHECK_OK(hapt_memory_ranges_of(ranges, first, end, choice, work, &figures));
    CHECK_OK(hapt_memory_ranges_of(ranges, first, end, kept, work, &none));
    CHECK_OK(hapt_memory_ranges_of(ranges, first, end, NULL, work, &all));
    CHECK_MESSAGE(plan && figures.parameter_bytes == plan->parameter_bytes &&
                      figures.activation_bytes == plan->activation_bytes &&
                      figures.weight_slot_bytes == plan->weight_slot_bytes &&
                      figures.sharded_bytes == plan->sharded_bytes,
                  "%s, operators [%d, %d): %zu and %zu, planned %zu and %zu", what, first, end, figures.parameter_bytes,
                  figures.activation_bytes, plan ? plan->parameter_bytes : 0, plan ? plan->activation_bytes : 0);
    figures_compared++;
    between += selective && figures.activation_bytes < none.activation_bytes &&
               figures.activation_bytes > all.activation_bytes;
    cheaper += figures.activation_bytes < none.activation_bytes;
    hapt_arena_release(&arena);
}

/* Planners know the memory of ranges that recompute some of their units. */
static void figures_are_those_of_programs(void)
{
    const int cases = test_long() ? 1000 : 100;
    for (int k = 0; k < cases; k++) {
        struct hapt_arena arena;
        struct hapt_sharding *plain = NULL, *all = NULL;
        struct hapt_axis_program *list;
        struct hapt_memory_ranges *ranges = NULL;
        struct hapt_memory_work *work = NULL;
        uint64_t random = (uint64_t)k + 31337;
        char what[32];
        const bool split = k % 3 == 2;
        const struct hapt_memory_options options = {.slots = 1, .state_count = k % 3};
        hapt_arena_init(&arena);
        const struct hapt_graph *graph =
            k % 4 == 0 ? fixture_gpt(&arena, (struct fixture_gpt){2, 12, 3, 4, 13, 4, k % 8 == 0, k % 16 > 8})->graph
                       : fixture_random(&arena, &random, 5 + k % 24);
        snprintf(what, sizeof what, "case %d", k);
        CHECK_OK(hapt_sharding_trivial(graph, &arena, &plain));
        if (k % 2) plain = cuts_add_axis(plain, 0, 2 + k % 3, &random, &arena, &list);
        if (plain) {
            struct units units = random_units(plain, 0, graph->forward_count, &random);
            for (int u = 0; u < units.count; u++) units.unit[u].selective = false;
            CHECK_OK(hapt_sharding_recompute(plain, units.unit, units.count, &arena, &all));
            if (all && split) CHECK_OK(hapt_sharding_split(all, &arena, &all));
            if (all) CHECK_OK(hapt_memory_ranges_create(all, &options, &arena, &ranges));
            if (ranges) CHECK_OK(hapt_memory_work_create(ranges, &arena, &work));
            for (int trial = 0; work && trial < 40; trial++) {
                const int first = (int)(hapt_random_next(&random) % (uint64_t)graph->forward_count);
                const int end = first + 1 + (int)(hapt_random_next(&random) % (uint64_t)(graph->forward_count - first));
                unsigned char choice[MOST_UNITS];
                for (int u = 0; u < units.count; u++)
                    choice[u] = trial % 3 ? (unsigned char)(hapt_random_next(&random) % 3) : HAPT_UNIT_FULL;
                if (!hapt_sharding_allows(plain, first, end)) continue;
                compare_figures(plain, split, &units, first, end, choice, ranges, work, &options, what);
            }
        }
        hapt_fail_reset();
        hapt_arena_release(&arena);
    }
    CHECK_MESSAGE(figures_compared > 10 * cases && cheaper > figures_compared / 5 && between > cases,
                  "%ld ranges, %ld save memory, %ld of them with selective units less than all", figures_compared,
                  cheaper, between);
}

/* Each unit keeps so many bytes of what it makes. */
static void check_kept(const struct hapt_program *whole, const struct units *units, size_t kept_bytes,
                       struct hapt_arena *arena)
{
    const struct hapt_program *again = recomputed(whole, units, false, arena);
    const struct hapt_memory_options options = {.slots = 1};
    struct hapt_memory_plan *plan = NULL;
    CHECK_OK(hapt_memory_plan(again, &options, arena, &plan));
    for (int u = 0; u < units->count; u++) {
        size_t bytes = 0;
        for (int t = 0; t < again->tensor_count; t++) {
            const struct hapt_tensor *tensor = &again->graph->tensor[again->tensor[t].tensor];
            const bool here = tensor->kind == HAPT_TENSOR_ACTIVATION && tensor->producer >= units->unit[u].first_op &&
                              tensor->producer < units->unit[u].end_op;
            if (here && plan->location[t].region == HAPT_REGION_SLOT) bytes += tensor_bytes(again, t);
        }
        CHECK_MESSAGE(bytes == kept_bytes, "unit %d keeps %zu bytes, not %zu", u, bytes, kept_bytes);
    }
}

/* The blocks of a GPT model as units: between the passes each block keeps its input alone. If they are selective, it
 * keeps what its products and attention made, and sums: output of attention, its log-sum-exp, queries to values, the
 * inner layer before its activation function, and both residuals. */
static void blocks_keep_their_input(void)
{
    enum { LAYERS = 4 };
    struct hapt_arena arena;
    hapt_arena_init(&arena);
    const struct hapt_graph *graph =
        fixture_gpt(&arena, (struct fixture_gpt){LAYERS, 16, 2, 8, 32, 4, false, false})->graph;
    struct hapt_program *whole = NULL;
    struct units units = {0};
    CHECK_OK(program_data_parallel(graph, 0, graph->forward_count, 1, 1, &arena, &whole));
    for (int o = 0, l = 0; o < graph->forward_count; o++) {
        char name[32];
        snprintf(name, sizeof name, "h.%d.", l);
        if (l < LAYERS && !strncmp(graph->op[o].name, name, strlen(name))) {
            units.unit[l++].first_op = o;
            units.count = l;
        }
        if (units.count > 0 && !strncmp(graph->op[o].name, "h.", 2)) units.unit[units.count - 1].end_op = o + 1;
    }
    CHECK(units.count == LAYERS);
    const size_t hidden = (size_t)4 * 8 * 16 * 4, heads = (size_t)4 * 8 * 2 * 4; /* bytes: rows, tokens, width */
    for (int selective = 0; selective < 2; selective++) {
        for (int u = 0; u < units.count; u++) units.unit[u].selective = selective;
        check_kept(whole, &units, selective ? 10 * hidden + heads : hidden, &arena);
    }
    hapt_arena_release(&arena);
}

int main(int argc, char **argv)
{
    test_init(&argc, &argv);
    RUN(recomputing_changes_no_bit);
    RUN(figures_are_those_of_programs);
    RUN(blocks_keep_their_input);
    return test_finish();
}
