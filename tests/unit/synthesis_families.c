/* Synthesis of whole models against programs that are known beforehand, and against itself with more states. */
#include <string.h>

#include "fixture.h"
#include "hapt/synthesis.h"
#include "test.h"

struct family { const char *model; char *option[12]; };

/* Small ones for every day; as they are known, for the long campaign. */
static const struct family small[] = {
    {"bert", {"--layers", "2", "--hidden", "128", "--heads", "8", "--sequence", "64"}},
    {"vit-base", {"--layers", "2", "--hidden", "192", "--heads", "8"}},
    {"vgg19", {"--image", "32"}},
    {"resnet50", {"--image", "32"}},
    {"gpt", {"--layers", "2", "--hidden", "128", "--heads", "8", "--sequence", "64"}},
    {"bert-moe", {"--layers", "2", "--hidden", "128", "--heads", "8", "--experts", "8"}},
    {"llama", {"--layers", "2", "--hidden", "128", "--heads", "8", "--kv-heads", "4"}},
};
static const struct family large[] = {
    {"bert-base", {0}}, {"vit-base", {0}}, {"vgg19", {0}}, {"resnet50", {0}}, {"gpt2-124m", {0}}, {"bert-moe-base", {"--experts", "64"}},
    {"llama", {"--layers", "12", "--hidden", "1024", "--heads", "16", "--sequence", "512", "--vocab", "32000"}},
};
enum { FAMILIES = sizeof small / sizeof small[0], MOST_DEVICES = 64 };

struct machine {
    struct hapt_spmd_rates rates;
    struct hapt_spmd_costs costs;
    struct hapt_axis axis;
    double flops[MOST_DEVICES], bytes[MOST_DEVICES], ratio[MOST_DEVICES];
    int kind[MOST_DEVICES];
};

/* The first `fast` devices are three times as fast as the others and get as much more. */
static void set_machine(struct machine *machine, int size, int fast, double bandwidth)
{
    *machine = (struct machine){.axis = {.size = size}};
    for (int j = 0; j < size; j++) {
        machine->flops[j] = (j < fast ? 3 : 1) * 15e12;
        machine->bytes[j] = (j < fast ? 3 : 1) * 300e9;
        machine->ratio[j] = (double)(j < fast ? 3 : 1) / (size + 2 * fast);
    }
    if (fast > 0) machine->axis.ratio_count = 1, machine->axis.ratio = machine->ratio;
    machine->rates = (struct hapt_spmd_rates){.size = size, .flops_per_s = machine->flops, .bytes_per_s = machine->bytes,
                                              .launch_s = 5e-6, .latency_s = 5e-6, .bandwidth_bytes_per_s = bandwidth};
    hapt_spmd_rates_costs(&machine->rates, machine->kind, &machine->costs);
}

static struct hapt_sharding *build(const struct family *family, struct hapt_arena *arena)
{
    char *words[20] = {"hapt", "model", (char *)family->model, "--microbatch", "64"};
    int count = 5;
    const char *name;
    struct hapt_config *config;
    struct hapt_model *model;
    struct hapt_sharding *whole = NULL;
    for (int k = 0; k < 12 && family->option[k]; k++) words[count++] = family->option[k];
    CHECK_OK(hapt_config_parse(count, words, arena, &config));
    CHECK_OK(hapt_model_preset(family->model, config, &name));
    CHECK_OK(hapt_model_build(name, config, arena, &model));
    CHECK_OK(hapt_graph_differentiate(model->graph));
    CHECK_OK(hapt_sharding_trivial(model->graph, arena, &whole));
    return whole;
}

/* ---- programs known beforehand ---- */

/* The cuts of tensor parallelism as Megatron-LM has it, by operator. */
static bool tensor_cuts(const struct hapt_graph *graph, int size, struct hapt_arena *arena, struct hapt_cut *cut)
{
    struct hapt_sharding *sharding;
    const bool made = hapt_sharding_tensor_parallel(graph, 1, size, arena, &sharding) == HAPT_OK;
    for (int o = 0; made && o < sharding->graph->op_count; o++)
        if (!hapt_op_type_at(sharding->graph->op[o].type)->collective) cut[sharding->source_op[o]] = sharding->cut[o][1];
    hapt_fail_reset();
    return made;
}

static bool data_cuts(const struct hapt_sharding *whole, const struct hapt_axis *axis, struct hapt_arena *arena, struct hapt_cut *cut)
{
    struct hapt_axis_program *program;
    const bool made = hapt_axis_program_data_parallel(whole, 0, axis, arena, &program) == HAPT_OK;
    for (int i = 0; made && i < program->count; i++)
        if (program->instruction[i].op >= 0) cut[program->instruction[i].op] = program->instruction[i].cut;
    hapt_fail_reset();
    return made;
}

/* Seconds of the program with these cuts; INFINITY where there is none. */
static double price_of_cuts(const struct hapt_sharding *whole, const struct machine *machine, const struct hapt_synthesis_options *options,
                            const struct hapt_cut *cut, struct hapt_arena *arena)
{
    struct hapt_axis_program *program;
    struct hapt_program_price price = {.cost_s = INFINITY};
    /* Sums of tied tables in several layouts are not priced. */
    if (hapt_axis_program_complete(whole, 0, &machine->axis, cut, arena, &program) != HAPT_OK ||
        hapt_axis_program_price(whole, 0, &machine->axis, &machine->costs, options, program, arena, &price) != HAPT_OK)
        price.cost_s = INFINITY;
    hapt_fail_reset();
    return price.cost_s;
}

/* Every forward operator, with its backward ones, like `a` or like `b`: by ranges that alternate. */
static void mix(const struct hapt_graph *graph, const struct hapt_cut *a, const struct hapt_cut *b, int length, struct hapt_cut *cut)
{
    for (int o = 0; o < graph->op_count; o++) cut[o] = graph->op[o].forward_op / length % 2 ? b[o] : a[o];
}

static void check_against_known(const char *name, const struct hapt_sharding *whole, const struct machine *machine,
                                const struct hapt_synthesis_options *options, double cost_s, struct hapt_arena *arena)
{
    const struct hapt_graph *graph = whole->graph;
    struct hapt_cut *rows, *operators, *mixed;
    int programs = 0;
    HAPT_ASSERT((rows = calloc(3 * (size_t)graph->op_count, sizeof *rows)) != NULL);
    operators = rows + graph->op_count;
    mixed = operators + graph->op_count;
    const bool by_rows = data_cuts(whole, &machine->axis, arena, rows), by_operators = tensor_cuts(graph, machine->axis.size, arena, operators);
    for (int k = 0; k < 2 + 6; k++) { /* all rows, all operators, mixtures */
        const int length = k < 2 ? graph->forward_count : k < 5 ? 1 << k : graph->forward_count >> (k - 4);
        const struct hapt_cut *a = k % 2 ? operators : rows, *b = k % 2 ? rows : operators;
        if ((a == rows || k > 1) && !by_rows) continue;
        if ((a == operators || k > 1) && !by_operators) continue;
        mix(graph, a, b, length > 0 ? length : 1, mixed);
        const double known_s = price_of_cuts(whole, machine, options, mixed, arena);
        programs += isfinite(known_s);
        CHECK_MESSAGE(cost_s <= known_s * (1 + 1e-9), "%s on %d devices: mixture %d takes %.9g s, what was synthesised %.9g s", name,
                      machine->axis.size, k, known_s, cost_s);
    }
    CHECK_MESSAGE(programs > 0, "%s on %d devices: nothing to compare with", name, machine->axis.size);
    free(rows);
}

/* ---- all families ---- */

static double synthesise(const char *name, const struct hapt_sharding *whole, const struct machine *machine, long states, struct hapt_arena *arena,
                         struct hapt_synthesis_report *report)
{
    const struct hapt_synthesis_options options = {.microbatches = 1, .most_states = states};
    struct hapt_axis_program program;
    const enum hapt_status status = hapt_synthesise(whole, 0, &machine->axis, &machine->costs, &options, arena, &program, report);
    CHECK_MESSAGE(status == HAPT_OK, "%s on %d devices: %s", name, machine->axis.size, hapt_fail_message());
    return status == HAPT_OK ? report->cost_s : INFINITY;
}

static void compare(const struct family *family, int size, int fast, double bandwidth)
{
    static const long wider[] = {10, 50};
    struct hapt_arena arena;
    struct machine machine;
    struct hapt_synthesis_report report = {0}, wide;
    hapt_arena_init(&arena);
    set_machine(&machine, size, fast, bandwidth);
    const struct hapt_sharding *whole = build(family, &arena);
    const double cost_s = synthesise(family->model, whole, &machine, 0, &arena, &report);
    check_against_known(family->model, whole, &machine, &(struct hapt_synthesis_options){.microbatches = 1}, cost_s, &arena);
    for (int k = 0; test_long() && k < 2; k++) {
        const double wide_s = synthesise(family->model, whole, &machine, 1000 * wider[k], &arena, &wide);
        printf("%s %d devices %d fast %g B/s: x%ld %.9g s against %.9g s (%+.3g %%), %.2f s against %.2f s\n", family->model, size, fast, bandwidth,
               wider[k], wide_s, cost_s, 100 * (cost_s / wide_s - 1), wide.seconds, report.seconds);
        fflush(stdout);
        CHECK_MESSAGE(cost_s <= wide_s * 1.01, "%s on %d devices, %d of them fast: %ld times as many states find %.9g s, not %.9g s",
                      family->model, size, fast, wider[k], wide_s, cost_s);
    }
    hapt_arena_release(&arena);
}

static void no_known_program_is_cheaper(void)
{
    static const int sizes[] = {8, 16, 64};
    static const double bandwidth[] = {10e9, 1e9, 100e9};
    for (int f = 0; f < FAMILIES; f++)
        for (int s = 0; s < 3; s++)
            for (int fast = 0; fast <= sizes[s] / 8; fast += sizes[s] / 8)
                for (int b = 0; b < 3; b++)
                    compare(test_long() ? &large[f] : &small[f], sizes[s], fast, bandwidth[b]);
}

int main(int argc, char **argv)
{
    test_init(&argc, &argv);
    RUN(no_known_program_is_cheaper);
    return test_finish();
}
