/* Programs synthesised for the zoo's families with random costs and forced cuts, so that any collective and replicated
 * gradients can be optimal, and layouts change between segments. The rules must derive each instruction.
 * hapt_synthesise itself asserts that the program costs no more than the search's bound. mpi/equivalence trains such
 * programs. */
#include "cuts.h"

#include "hapt/model.h"

static struct hapt_arena arena;

#include "random_programs.h"

static const char *const family_options[][16] = {
    {"gpt", "--layers", "2", "--hidden", "64", "--heads", "4", "--sequence", "64", "--vocab", "256"},
    {"bert", "--layers", "2", "--hidden", "48", "--heads", "4", "--sequence", "32", "--vocab", "120"},
    {"bert-moe", "--layers", "2", "--hidden", "32", "--heads", "4", "--sequence", "24", "--vocab", "96", "--experts",
     "5"},
    {"llama", "--layers", "2", "--hidden", "64", "--heads", "4", "--kv-heads", "2", "--ffn", "160", "--sequence", "32",
     "--vocab", "128"},
    {"vit", "--layers", "2", "--hidden", "48", "--heads", "4", "--image", "16", "--patch", "4", "--classes", "7"},
    {"vgg", "--hidden", "64", "--image", "16", "--width", "8", "--classes", "7"},
    {"resnet", "--image", "32", "--width", "8", "--stages", "2", "--classes", "7"},
};

static const struct hapt_graph *graph_of(const char *const *options)
{
    const char *words[32] = {"hapt",         "model", options[0], "--output", "none.h5",
                             "--microbatch", "4",     "--dtype",  "fp32"};
    struct hapt_config *config = NULL;
    struct hapt_model *model = NULL;
    int count = 9;
    for (int w = 1; options[w]; w++) words[count++] = options[w];
    CHECK_OK(hapt_config_parse(count, (char **)words, &arena, &config));
    if (config) CHECK_OK(hapt_model_build(options[0], config, &arena, &model));
    if (!model) exit(1);
    return model->graph;
}

static void programs_are_proven(void)
{
    const int cases = test_long() ? 40 : 1;
    for (int family = 0; family < (int)(sizeof family_options / sizeof *family_options); family++)
        for (int size = 2; size <= MOST_DRAWN_DEVICES; size++) {
            int made = 0;
            for (int k = 0; k < cases; k++) {
                uint64_t random = (uint64_t)(10000 * family + 1000 * size + k);
                struct hapt_sharding *whole = NULL, *cut = NULL;
                struct cuts_axis axis;
                int forced;
                hapt_arena_reset(&arena);
                CHECK_OK(hapt_sharding_trivial(graph_of(family_options[family]), &arena, &whole));
                cuts_random_axis(&axis, size, &random);
                const struct hapt_axis_program *program = synthesised(whole, 0, &axis.axis, &random, &forced);
                if (!program) continue;
                made++;
                if (hapt_sharding_apply(whole, 0, &axis.axis, program, &arena, &cut) != HAPT_OK)
                    CHECK_MESSAGE(false, "%s on %d devices, case %d: %s", family_options[family][0], size, k,
                                  hapt_fail_message());
                hapt_fail_reset();
            }
            CHECK_MESSAGE(2 * made >= cases, "%s on %d devices: %d of %d cases have a program",
                          family_options[family][0], size, made, cases);
        }
}

int main(int argc, char **argv)
{
    test_init(&argc, &argv);
    hapt_arena_init(&arena);
    RUN(programs_are_proven);
    hapt_arena_release(&arena);
    return test_finish();
}
