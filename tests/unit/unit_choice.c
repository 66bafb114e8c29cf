/*
 * The choice of units that recompute: equal units in order, unlike ones against enumeration, with times and bytes that
 * are computed here.
 */
#include "fixture.h"

#include "hapt/layers.h"
#include "hapt/ops.h"
#include "hapt/unit_choice.h"

enum { MOST_UNITS = 16 };

struct model {
    struct hapt_arena arena;
    struct hapt_model *model;
    struct hapt_layers *layers;
    struct hapt_unit *unit;
    int units;
    struct hapt_unit_choices *choices;
};

static void make(struct model *made, int count, char **words)
{
    struct hapt_config *config = NULL;
    const struct hapt_layers_options options = {.granularity = 0, .heavy_minimum = 2};
    hapt_arena_init(&made->arena);
    CHECK_OK(hapt_config_parse(count, words, &made->arena, &config));
    CHECK_OK(hapt_model_build(words[2], config, &made->arena, &made->model));
    CHECK_OK(hapt_layers_build(made->model->graph, &options, &made->arena, &made->layers));
    CHECK_OK(hapt_layers_units(made->layers, &made->arena, &made->unit, &made->units));
    CHECK(made->units >= 3 && made->units <= MOST_UNITS);
    CHECK_OK(hapt_unit_choices_create(made->model->graph, made->unit, made->units, &made->arena, &made->choices));
}

/* Operations of what a unit runs again, and the bytes of a slot that it frees, from a program that consists of the unit
 * alone. */
static void weigh(const struct model *made, int u, bool selective, double *time, double *bytes)
{
    struct hapt_arena arena;
    struct hapt_sharding *plain = NULL, *again = NULL;
    struct hapt_program *program[2] = {NULL};
    struct hapt_memory_plan *plan[2] = {NULL};
    struct hapt_unit unit = made->unit[u];
    const struct hapt_memory_options options = {.slots = 1};
    unit.selective = selective;
    hapt_arena_init(&arena);
    CHECK_OK(hapt_sharding_trivial(made->model->graph, &arena, &plain));
    CHECK_OK(hapt_sharding_recompute(plain, &unit, 1, &arena, &again));
    CHECK_OK(hapt_program_build(plain, unit.first_op, unit.end_op, &arena, &program[0]));
    CHECK_OK(hapt_program_build(again, unit.first_op, unit.end_op, &arena, &program[1]));
    for (int k = 0; k < 2; k++) CHECK_OK(hapt_memory_plan(program[k], &options, &arena, &plan[k]));
    *bytes = (double)plan[0]->activation_bytes - (double)plan[1]->activation_bytes;
    *time = 0;
    for (int s = 0; s < program[1]->step_count[HAPT_SECTION_BACKWARD]; s++) {
        const struct hapt_op *op = &again->graph->op[program[1]->step[HAPT_SECTION_BACKWARD][s].op];
        if (op->output_count == 0 || op->output[0] < 0) continue;
        if (!strstr(again->graph->tensor[op->output[0]].name, ".again")) continue;
        *time += hapt_op_flops(again->graph, op, 1);
        for (int i = 0; i < op->input_count; i++)
            if (op->input[i] >= 0) *time += 100 * (double)hapt_tensor_bytes(&again->graph->tensor[op->input[i]]);
        for (int k = 0; k < op->output_count; k++)
            if (op->output[k] >= 0) *time += 100 * (double)hapt_tensor_bytes(&again->graph->tensor[op->output[k]]);
    }
    hapt_arena_release(&arena);
}

static void choices_are_best(const struct model *made)
{
    double time[2][MOST_UNITS], bytes[2][MOST_UNITS];
    int compared = 0, not_first = 0;
    for (int u = 0; u < made->units; u++)
        for (int full = 0; full < 2; full++) weigh(made, u, !full, &time[full][u], &bytes[full][u]);
    for (int first = 0; first < made->units; first++)
        for (int end = first + 1; end <= made->units; end++)
            for (int parts = 0; parts <= HAPT_RECOMPUTE_PARTS; parts++)
                for (int selective = 0; selective < 2; selective++) {
                    unsigned char choice[MOST_UNITS];
                    double most = 0, least_s = INFINITY, own_s = 0, own_bytes = 0;
                    int begin, behind;
                    CHECK_OK(hapt_unit_choose(made->choices, made->unit[first].first_op, made->unit[end - 1].end_op,
                                              HAPT_RECOMPUTE_BY_BYTES + selective * HAPT_RECOMPUTE_SELECTIVE + parts,
                                              choice, &begin, &behind));
                    CHECK(begin == first && behind == end);
                    for (int u = first; u < end; u++) {
                        const double more_s = time[1][u] - (selective ? time[0][u] : 0),
                                     more_bytes = bytes[1][u] - (selective ? bytes[0][u] : 0);
                        most += more_bytes;
                        CHECK(choice[u] == HAPT_UNIT_FULL ||
                              choice[u] == (selective ? HAPT_UNIT_SELECTIVE : HAPT_UNIT_KEPT));
                        if (u > first) not_first += choice[u] > choice[u - 1];
                        if (choice[u] != HAPT_UNIT_FULL) continue;
                        own_s += more_s;
                        own_bytes += more_bytes;
                    }
                    const double wanted = most * parts / HAPT_RECOMPUTE_PARTS - 1;
                    for (int set = 0; set < 1 << (end - first); set++) {
                        double set_s = 0, set_bytes = 0;
                        for (int u = first; u < end; u++) {
                            if (!(set >> (u - first) & 1)) continue;
                            set_s += time[1][u] - (selective ? time[0][u] : 0);
                            set_bytes += bytes[1][u] - (selective ? bytes[0][u] : 0);
                        }
                        if (set_bytes >= wanted && set_s < least_s) least_s = set_s;
                    }
                    CHECK_MESSAGE(own_bytes >= wanted && own_s <= least_s * 1.002 + 1,
                                  "units [%d, %d), %d parts: %g operations free %g bytes of %g, least %g", first, end,
                                  parts, own_s, own_bytes, wanted, least_s);
                    compared++;
                }
    CHECK_MESSAGE(compared > 100 && not_first > 0, "%d choices, %d units before another kind", compared, not_first);
}

static void unlike_units(void)
{
    struct model made;
    char *resnet[] = {"hapt", "model",   "resnet", "--stages",     "2,3,2,3", "--width",
                      "8",    "--image", "32",     "--microbatch", "4"},
         *moe[] = {"hapt",    "model", "bert-moe",   "--layers", "4",       "--hidden", "32",
                   "--heads", "2",     "--sequence", "16",       "--vocab", "64"};
    make(&made, 11, resnet);
    CHECK(hapt_unit_choices_differ(made.choices));
    choices_are_best(&made);
    hapt_arena_release(&made.arena);
    make(&made, 13, moe);
    CHECK(hapt_unit_choices_differ(made.choices));
    choices_are_best(&made);
    hapt_arena_release(&made.arena);
}

/* Equal units recompute in order, as many as the parts, rounded up; the number alone decides. */
static void equal_units(void)
{
    struct model made;
    char *words[] = {"hapt",    "model", "gpt",        "--layers", "7",       "--hidden", "16",
                     "--heads", "2",     "--sequence", "8",        "--vocab", "32"};
    make(&made, 13, words);
    CHECK(!hapt_unit_choices_differ(made.choices) && made.units == 7);
    for (int first = 0; first < made.units; first++)
        for (int end = first; end <= made.units; end++)
            for (int number = 0; number < 2 * HAPT_RECOMPUTE_BY_BYTES; number++) {
                unsigned char choice[MOST_UNITS];
                int begin, behind;
                if (!hapt_recompute_is_valid(number)) continue;
                const int first_op = made.unit[first].first_op,
                          end_op = end > first ? made.unit[end - 1].end_op : first_op + 1, parts = number % 16,
                          full = ((end - first) * parts + 11) / 12;
                CHECK_OK(hapt_unit_choose(made.choices, first_op, end_op, number, choice, &begin, &behind));
                CHECK(behind - begin == end - first && (end == first || begin == first));
                for (int u = begin; u < behind; u++)
                    CHECK(choice[u] == (u < begin + full       ? HAPT_UNIT_FULL
                                        : number / 16 % 2 == 1 ? HAPT_UNIT_SELECTIVE
                                                               : HAPT_UNIT_KEPT));
            }
    hapt_arena_release(&made.arena);
}

int main(int argc, char **argv)
{
    test_init_mpi(&argc, &argv);
    RUN(equal_units);
    RUN(unlike_units);
    return test_finish();
}
