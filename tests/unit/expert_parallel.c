/*
 * Expert parallelism of bert-moe. Hand-written cuts are run by all ranks of a small mesh in lock step and compared with
 * one device. Sharding rows everywhere and experts in their products is GShard's program, and its traffic is
 * all-to-all. Experts need not divide evenly.
 */
#include "world.h"
#include "programs.h"

static struct hapt_model *bert_moe(struct hapt_arena *arena, const char *experts, const char *top_k)
{
    char *words[] = {"hapt",    "model",     "bert-moe",      "--layers", "4",           "--hidden", "8",
                     "--heads", "2",         "--sequence",    "6",        "--vocab",     "23",       "--microbatch",
                     "4",       "--experts", (char *)experts, "--top-k",  (char *)top_k, "--output", "x.h5"};
    struct hapt_config *config = NULL;
    struct hapt_model *model = NULL;
    CHECK_OK(hapt_config_parse((int)(sizeof words / sizeof words[0]), words, arena, &config));
    CHECK_OK(hapt_model_build("bert-moe", config, arena, &model));
    if (!model) exit(1);
    return model;
}

/* The letter of an operator's experts, if it needs only the slots of its own experts; else 0. */
static char expert_letter(const struct hapt_graph *graph, const struct hapt_op *op)
{
    const char *name = hapt_op_type_at(op->type)->name;
    if (strncmp(name, "expert_", 7) == 0) return 'e';
    /* "..." of slots [b][e][c][columns] stands for the letters b, t, y, z. */
    if (strncmp(name, "gelu", 4) == 0 && graph->tensor[op->input[0]].dims == 4) return 't';
    return 0;
}

static bool moves_tokens(const struct hapt_op *op)
{
    const char *name = hapt_op_type_at(op->type)->name;
    return strncmp(name, "moe_", 4) == 0 && strncmp(name, "moe_gate", 8) != 0;
}

static int steps_of(const struct hapt_program *program, enum hapt_collective_kind kind)
{
    int count = 0;
    for (int section = 0; section < HAPT_SECTION_REDUCE; section++)
        for (int s = 0; s < program->step_count[section]; s++) count += program->step[section][s].kind == kind;
    return count;
}

/* `gshard`: sharded by rows except at the experts, where tokens change ranks. Otherwise all is whole except the slots
 * of experts, whose weighted sums are partial. */
static void check_program(const struct hapt_model *model, const struct hapt_axis *axis, bool gshard, int *kinds)
{
    const struct hapt_axis one_rank = {.size = 1};
    struct hapt_arena arena;
    struct hapt_sharding *trivial = NULL, *first = NULL, *both = NULL;
    struct hapt_axis_program *instructions = NULL;
    struct hapt_program *single = NULL, *program = NULL;
    struct hapt_cut *cut;
    struct world one, world;
    const char *name = "";
    hapt_arena_init(&arena);
    CHECK_OK(hapt_sharding_trivial(model->graph, &arena, &trivial));
    cut = hapt_arena_alloc(&arena, (size_t)trivial->graph->op_count, sizeof *cut);
    for (int o = 0; o < trivial->graph->op_count; o++) {
        const struct hapt_op *op = &trivial->graph->op[o];
        cut[o].letter = expert_letter(trivial->graph, op);
        if (!cut[o].letter && gshard) cut[o].letter = 'b';
        if (!cut[o].letter && moves_tokens(op)) cut[o].letter = 'e';
    }
    CHECK_OK(hapt_axis_program_complete(trivial, 0, axis, cut, &arena, &instructions));
    if (instructions) CHECK_OK(hapt_sharding_apply(trivial, 0, axis, instructions, &arena, &first));
    if (first) CHECK_OK(hapt_sharding_apply(first, 1, &one_rank, NULL, &arena, &both));
    if (both) CHECK_OK(hapt_program_build(both, 0, model->graph->forward_count, &arena, &program));
    CHECK_OK(program_data_parallel(model->graph, 0, model->graph->forward_count, 1, 1, &arena, &single));
    if (single && program) {
        world_run_all(&one, single, model->vocab);
        world_run_all(&world, program, model->vocab);
        const double apart = world_difference(&world, &one, &name);
        CHECK_MESSAGE(apart < 2e-4, "%s on %d ranks: %s differs by %g", gshard ? "GShard" : "whole tokens", axis->size,
                      name, apart);
        for (int kind = 0; kind < HAPT_COLLECTIVE_COUNT; kind++)
            kinds[kind] = steps_of(program, (enum hapt_collective_kind)kind);
        world_close(&one);
        world_close(&world);
    }
    hapt_arena_release(&arena);
}

static void experts_on_ranks(void)
{
    static const double uneven[] = {0.7, 0.3}, steep[] = {0.5, 0.25, 0.25}, even[] = {0.25, 0.25, 0.25, 0.25};
    const struct hapt_axis axes[] = {{.size = 2}, {2, 1, uneven}, {3, 1, steep}, {4, 1, even}};
    static const char *const shapes[][2] = {{"4", "2"}, {"5", "2"}, {"7", "1"}, {"6", "3"}};
    struct hapt_arena arena;
    hapt_arena_init(&arena);
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        const struct hapt_model *model = bert_moe(&arena, shapes[s][0], shapes[s][1]);
        for (size_t a = 0; a < sizeof axes / sizeof *axes; a++) {
            int kinds[HAPT_COLLECTIVE_COUNT] = {0};
            check_program(model, &axes[a], true, kinds);
            /* All-to-alls in both mixtures: of slots to the experts, of their counts, and back; and those of both
             * gradients. No activation is gathered. */
            CHECK_MESSAGE(kinds[HAPT_COLLECTIVE_ALL_TO_ALL] == 10, "%d all-to-alls", kinds[HAPT_COLLECTIVE_ALL_TO_ALL]);
            CHECK(kinds[HAPT_COLLECTIVE_ALL_GATHER] == 0 && kinds[HAPT_COLLECTIVE_ALL_REDUCE] == 0);
            check_program(model, &axes[a], false, kinds);
            /* Sums over the experts: the output of a mixture, and the gradients of its tokens and of the gate's
             * weights. */
            CHECK(kinds[HAPT_COLLECTIVE_ALL_TO_ALL] == 0);
            CHECK_MESSAGE(kinds[HAPT_COLLECTIVE_ALL_REDUCE] == 6, "%d all-reduces", kinds[HAPT_COLLECTIVE_ALL_REDUCE]);
        }
    }
    hapt_arena_release(&arena);
}

int main(int argc, char **argv)
{
    test_init(&argc, &argv);
    RUN(experts_on_ranks);
    return test_finish();
}
