/*
 * Tensor-parallel programs. All ranks of a small mesh run in lock step, with the cpu kernels and naive collectives.
 * Their shards together must be the result of one device.
 */
#include "world.h"
#include "memory_check.h"
#include "programs.h"

#include "hapt/memory.h"

static void compare(const struct hapt_graph *graph, int vocab, int dp, int tp, const char *what)
{
    struct hapt_arena arena;
    struct hapt_program *program = NULL;
    char name[96];
    snprintf(name, sizeof name, "%s, dp %d, tp %d", what, dp, tp);
    hapt_arena_init(&arena);
    CHECK_OK(program_tensor_parallel(graph, 0, graph->forward_count, dp, tp, &arena, &program));
    world_compare(graph, vocab, program, 2e-4, name);
    hapt_arena_release(&arena);
}

static void gpt_equals_one_device(void)
{
    static const int mesh[][2] = {{1, 2}, {1, 4}, {2, 2}, {2, 1}, {2, 4}};
    for (int tied = 0; tied < 2; tied++) {
        for (int heads = 2; heads <= 4; heads += 2) {       /* 2: attention stays whole on 4 ranks */
            for (int vocab = 32; vocab <= 37; vocab += 5) { /* 37: shards of unlike sizes */
                struct hapt_arena arena;
                hapt_arena_init(&arena);
                const struct hapt_model *model =
                    fixture_gpt(&arena, (struct fixture_gpt){2, 16, heads, 8, vocab, 4, tied, false});
                for (size_t k = 0; k < sizeof mesh / sizeof *mesh; k++)
                    compare(model->graph, vocab, mesh[k][0], mesh[k][1], "GPT");
                hapt_arena_release(&arena);
            }
        }
    }
}

/* Separate products for queries, keys and values, gates, and residual sums of a norm's output. They must be cut as in
 * Megatron, with two reductions per block and direction. Where heads cannot be shared, attention stays whole and the
 * feed-forward is cut. */
static void families_equal_one_device(void)
{
    static const struct {
        const char *word[24];
        int vocab, heavy, whole; /* products of a block and its attention's, with their backward parts; of those uncut
                                    on two devices */
    } family[] = {
        {{"bert", "--layers", "1", "--hidden", "16", "--heads", "4", "--sequence", "4", "--vocab", "14"}, 14, 20, 0},
        {{"llama", "--layers", "1", "--hidden", "16", "--heads", "4", "--kv-heads", "2", "--ffn", "24", "--sequence",
          "4", "--vocab", "14"},
         14,
         23,
         0},
        {{"llama", "--layers", "1", "--hidden", "16", "--heads", "4", "--kv-heads", "1", "--ffn", "24", "--sequence",
          "4", "--vocab", "14"},
         14,
         23,
         14},
        {{"vit", "--layers", "1", "--hidden", "16", "--heads", "4", "--image", "8", "--patch", "4", "--ffn", "16",
          "--classes", "6"},
         6,
         20,
         0},
        {{"bert-moe", "--layers", "2", "--hidden", "8", "--heads", "2", "--sequence", "4", "--vocab", "14", "--experts",
          "4", "--top-k", "2"},
         14,
         0,
         0},
    };
    static const int mesh[][2] = {{1, 2}, {2, 2}, {1, 4}};
    for (size_t f = 0; f < sizeof family / sizeof *family; f++) {
        struct hapt_arena arena;
        struct hapt_config *config = NULL;
        struct hapt_model *model = NULL;
        struct hapt_sharding *sharding = NULL;
        char *words[40] = {"hapt", "model", (char *)family[f].word[0], "--microbatch", "4", "--output", "x.h5"};
        int count = 7, heavy = 0, whole = 0;
        for (int w = 1; family[f].word[w]; w++) words[count++] = (char *)family[f].word[w];
        hapt_arena_init(&arena);
        CHECK_OK(hapt_config_parse(count, words, &arena, &config));
        if (config) CHECK_OK(hapt_model_build(family[f].word[0], config, &arena, &model));
        for (size_t k = 0; model && k < sizeof mesh / sizeof *mesh; k++)
            compare(model->graph, family[f].vocab, mesh[k][0], mesh[k][1], family[f].word[0]);
        if (model) CHECK_OK(hapt_sharding_tensor_parallel(model->graph, 1, 2, &arena, &sharding));
        for (int o = 0; sharding && o < sharding->graph->op_count; o++) {
            const struct hapt_op *op = &sharding->graph->op[o];
            const char *block = strstr(op->name, "layer.0."), *llama = strstr(op->name, "layers.0.");
            if (!hapt_op_type_at(op->type)->heavy || (!block && !llama)) continue;
            heavy++;
            whole += sharding->cut[o][1].letter == HAPT_CUT_REPLICATED;
        }
        if (family[f].heavy > 0)
            CHECK_MESSAGE(heavy == family[f].heavy && whole == family[f].whole,
                          "%s %d: %d of %d products of a block are whole", family[f].word[0], (int)f, whole, heavy);
        hapt_arena_release(&arena);
    }
}

/* Random networks: skips of any length, products beside sums. */
static void random_graphs_equal_one_device(void)
{
    const int cases = test_long() ? 2000 : 120;
    int sharded = 0;
    for (int k = 0; k < cases; k++) {
        struct hapt_arena arena;
        struct hapt_sharding *sharding = NULL;
        char name[32];
        uint64_t random = (uint64_t)k + 911;
        hapt_arena_init(&arena);
        const struct hapt_graph *graph = fixture_random(&arena, &random, 3 + k % 20);
        snprintf(name, sizeof name, "random graph %d", k);
        compare(graph, 11, 1 + k % 2, k % 3 == 2 ? 4 : 2, name);
        CHECK_OK(hapt_sharding_tensor_parallel(graph, 1, 2, &arena, &sharding));
        for (int t = 0; sharding && t < graph->tensor_count; t++)
            sharded += graph->tensor[t].kind == HAPT_TENSOR_PARAMETER && graph->tensor[t].dims == 2 &&
                       strcmp(graph->tensor[t].name, "weight") != 0 &&
                       sharding->property[t][1].kind == HAPT_PROPERTY_SHARDED;
        hapt_arena_release(&arena);
    }
    CHECK_MESSAGE(sharded > cases / 4, "only %d products were cut", sharded);
}

static int parameter(struct hapt_graph *graph, const char *name, int64_t rows, int64_t columns)
{
    const struct hapt_tensor tensor = {.name = name,
                                       .kind = HAPT_TENSOR_PARAMETER,
                                       .dtype = HAPT_F32,
                                       .dims = 2,
                                       .shape = {rows, columns},
                                       .trainable = true,
                                       .init = HAPT_INIT_NORMAL,
                                       .init_std = 0.02};
    int index = -1;
    CHECK_OK(hapt_graph_add_tensor(graph, &tensor, &index));
    return index;
}

/* y = x w, or its gelu. */
static int product(struct hapt_graph *graph, const char *name, int x, int w, bool gelu)
{
    char after[32];
    int y = -1;
    CHECK_OK(hapt_graph_add_op(graph, "linear", name, (int[]){x, w, -1}, 3, NULL, NULL, &y));
    snprintf(after, sizeof after, "%s.gelu", name);
    if (gelu) CHECK_OK(hapt_graph_add_op(graph, "gelu", after, &y, 1, NULL, NULL, &y));
    return y;
}

/* Two feed-forward networks with the same input. Their gradients are partial sums that are reduced once, so no boundary
 * may separate them. Operators: embedding, [a, a.gelu, b], [c, c.gelu, d], sum, head, loss. */
static void parallel_branches(void)
{
    struct hapt_arena arena;
    struct hapt_graph *graph = NULL;
    struct hapt_sharding *sharding = NULL;
    const int64_t d = 8, vocab = 11;
    int tokens = -1, targets = -1, x = -1, y[2], sum = -1, logits = -1, loss[2];
    hapt_arena_init(&arena);
    CHECK_OK(hapt_graph_create(&arena, &graph));
    struct hapt_tensor input = {.name = "tokens",
                                .kind = HAPT_TENSOR_INPUT,
                                .role = HAPT_ROLE_TOKENS,
                                .dtype = HAPT_I32,
                                .dims = 2,
                                .shape = {4, 6}};
    CHECK_OK(hapt_graph_add_tensor(graph, &input, &tokens));
    input.name = "targets", input.role = HAPT_ROLE_TARGETS;
    CHECK_OK(hapt_graph_add_tensor(graph, &input, &targets));
    const int table = parameter(graph, "table", vocab, d);
    CHECK_OK(hapt_graph_add_op(graph, "embedding", "x", (int[]){tokens, table, -1}, 3, NULL, NULL, &x));
    y[0] = product(graph, "b", product(graph, "a", x, parameter(graph, "wa", d, 4 * d), true),
                   parameter(graph, "wb", 4 * d, d), false);
    y[1] = product(graph, "d", product(graph, "c", x, parameter(graph, "wc", d, 2 * d), true),
                   parameter(graph, "wd", 2 * d, d), false);
    CHECK_OK(hapt_graph_add_op(graph, "add", "sum", y, 2, NULL, NULL, &sum));
    CHECK_OK(hapt_graph_add_op(graph, "linear_t", "head", (int[]){sum, table, -1}, 3, NULL, NULL, &logits));
    CHECK_OK(hapt_graph_add_op(graph, "cross_entropy", "loss", (int[]){logits, targets}, 2, NULL, NULL, loss));
    graph->loss = loss[0];
    CHECK_OK(hapt_graph_differentiate(graph));
    CHECK_OK(hapt_graph_check(graph));
    compare(graph, vocab, 1, 2, "parallel branches");
    compare(graph, vocab, 2, 4, "parallel branches");
    CHECK_OK(hapt_sharding_tensor_parallel(graph, 1, 2, &arena, &sharding));
    int of_x = 0;
    for (int o = 0; sharding && o < sharding->graph->op_count; o++) {
        const struct hapt_op *op = &sharding->graph->op[o];
        of_x += hapt_op_type_at(op->type)->collective == HAPT_COLLECTIVE_ALL_REDUCE &&
                sharding->origin[op->input[0]] == graph->tensor[x].gradient;
    }
    CHECK_MESSAGE(of_x == 1, "the gradient of x is summed %d times", of_x);
    for (int cut = 1; sharding && cut < graph->forward_count; cut++) {
        struct hapt_program *program = NULL;
        const bool parts = cut >= 2 && cut <= 4; /* behind a, before the end of c */
        CHECK_MESSAGE(hapt_sharding_allows(sharding, 0, cut) == !parts, "a cut before operator %d", cut);
        CHECK((hapt_program_build(sharding, cut, graph->forward_count, &arena, &program) == HAPT_OK) == !parts);
        hapt_fail_reset();
    }
    hapt_arena_release(&arena);
}

/* Equal operators with different cuts have different programs. Equal blocks have the same one. */
static void marks(void)
{
    struct hapt_arena arena;
    struct hapt_sharding *sharding = NULL;
    uint64_t hash[256] = {0};
    hapt_arena_init(&arena);
    const struct hapt_model *model = fixture_gpt(&arena, (struct fixture_gpt){3, 16, 4, 8, 37, 4, false, true});
    const struct hapt_graph *graph = model->graph;
    CHECK(graph->op_count <= 256);
    CHECK_OK(hapt_sharding_tensor_parallel(graph, 1, 2, &arena, &sharding));
    if (sharding) hapt_sharding_hash(sharding, hash);
    for (int o = 1; sharding && o + 20 < graph->forward_count - 3; o++)
        CHECK(hash[o] == hash[o + 10]); /* block by block */
    CHECK(hash[2] != hash[4]);          /* a product by columns, one by rows */
    hapt_arena_release(&arena);
}

/* ---- known properties of Megatron-LM's sharding ---- */

static const struct hapt_property *property_named(const struct hapt_sharding *sharding, const char *name)
{
    int tensor = hapt_graph_find_tensor(sharding->source, name);
    CHECK_MESSAGE(tensor >= 0, "no tensor %s", name);
    if (tensor < 0) return NULL;
    if (tensor == sharding->source->loss) tensor = sharding->graph->loss;
    return &sharding->property[tensor][1];
}

/* Shoeybi et al. 2019, section 3: columns, then rows, in attention and in the feed-forward network; tables by
 * vocabulary. */
static void layout_is_megatrons(void)
{
    static const struct {
        const char *name;
        struct hapt_property property;
    } expected[] = {
        {"wte.weight", {HAPT_PROPERTY_SHARDED, 0, 1, 0, 0}},
        {"wpe.weight", {.kind = HAPT_PROPERTY_REPLICATED}},
        {"h.0.ln_1.weight", {.kind = HAPT_PROPERTY_REPLICATED}},
        {"h.0.attn.c_attn.weight", {HAPT_PROPERTY_SHARDED, 1, 3, 0, 0}},
        {"h.0.attn.c_attn.bias", {HAPT_PROPERTY_SHARDED, 0, 3, 0, 0}},
        {"h.0.attn.c_attn.bias.grad", {HAPT_PROPERTY_SHARDED, 0, 3, 0, 0}},
        {"h.0.attn.1", {HAPT_PROPERTY_SHARDED, 1, 1, 0, 0}},
        {"h.0.attn.c_proj.weight", {HAPT_PROPERTY_SHARDED, 0, 1, 0, 0}},
        {"h.0.attn.c_proj.bias", {.kind = HAPT_PROPERTY_REPLICATED}},
        {"h.0.attn.c_proj.bias.grad", {.kind = HAPT_PROPERTY_REPLICATED}},
        {"h.0.residual_1", {.kind = HAPT_PROPERTY_REPLICATED}},
        {"h.0.mlp.c_fc.weight", {HAPT_PROPERTY_SHARDED, 1, 1, 0, 0}},
        {"h.0.mlp.gelu", {HAPT_PROPERTY_SHARDED, 2, 1, 0, 0}},
        {"h.0.mlp.c_proj.weight", {HAPT_PROPERTY_SHARDED, 0, 1, 0, 0}},
        {"lm_head", {HAPT_PROPERTY_SHARDED, 2, 1, 0, 0}},
        {"loss", {.kind = HAPT_PROPERTY_REPLICATED}},
    };
    struct hapt_arena arena;
    struct hapt_sharding *sharding = NULL;
    hapt_arena_init(&arena);
    const struct hapt_model *model = fixture_gpt(&arena, (struct fixture_gpt){1, 16, 4, 8, 37, 4, true, true});
    CHECK_OK(hapt_sharding_tensor_parallel(model->graph, 2, 4, &arena, &sharding));
    for (size_t k = 0; sharding && k < sizeof expected / sizeof *expected; k++)
        CHECK_MESSAGE(hapt_property_same(*property_named(sharding, expected[k].name), expected[k].property),
                      "%s is laid out otherwise", expected[k].name);
    hapt_arena_release(&arena);
}

/* Per block and microbatch: two all-reduces of b s h elements forward and two backward. One more behind the embedding,
 * and one before the last norm's backward. Three of b s fp32 in the loss. Gradients are summed over axis 0 only, each
 * shard once. */
static void collectives_are_megatrons(void)
{
    const int layers = 3, hidden = 16, sequence = 8, rows = 4, vocab = 37;
    struct hapt_arena arena;
    hapt_arena_init(&arena);
    const struct hapt_model *model =
        fixture_gpt(&arena, (struct fixture_gpt){layers, hidden, 4, sequence, vocab, rows, false, true});
    for (int dp = 1; dp <= 2; dp++) {
        for (int tp = 2; tp <= 4; tp *= 2) {
            struct hapt_program *program = NULL;
            CHECK_OK(program_tensor_parallel(model->graph, 0, model->graph->forward_count, dp, tp, &arena, &program));
            if (!program) continue;
            const double bsh = 2.0 * rows / dp * sequence * hidden, bs = 4.0 * rows / dp * sequence;
            CHECK_NEAR(program_collective_bytes(program, HAPT_SECTION_FORWARD), (2 * layers + 1) * bsh + 3 * bs, 0);
            CHECK_NEAR(program_collective_bytes(program, HAPT_SECTION_BACKWARD), (2 * layers + 1) * bsh, 0);
            const double h = hidden, shard = (vocab + tp - 1) / tp * h; /* rounded up */
            const double block = (12 * h * h + 3 * h + 4 * h) / tp + 2 * h + 4 * h;
            const double gradients = 4 * (layers * block + 2 * shard + sequence * h + 2 * h);
            CHECK_NEAR(program_collective_bytes(program, HAPT_SECTION_REDUCE), dp > 1 ? gradients : 0, 0);
            int sums = 0;
            for (int section = 0; section < HAPT_SECTION_COUNT; section++) {
                for (int s = 0; s < program->step_count[section]; s++) {
                    const struct hapt_program_step *step = &program->step[section][s];
                    if (step->kind == HAPT_COLLECTIVE_NONE) continue;
                    CHECK(step->kind == HAPT_COLLECTIVE_ALL_REDUCE);
                    CHECK(step->axis == (section == HAPT_SECTION_REDUCE ? 0 : 1));
                    sums += section != HAPT_SECTION_REDUCE;
                }
            }
            CHECK(sums == 4 * layers + 2);
        }
    }
    hapt_arena_release(&arena);
}

/* All ranks together do the work of one device, apart from what stays whole on each: norms, sums, table rows. */
static void flops_add_up(void)
{
    struct hapt_arena arena;
    hapt_arena_init(&arena);
    const struct hapt_model *model = fixture_gpt(&arena, (struct fixture_gpt){2, 32, 4, 16, 64, 4, false, true});
    const struct hapt_graph *graph = model->graph;
    struct hapt_program *single = NULL, *program = NULL;
    CHECK_OK(program_data_parallel(graph, 0, graph->forward_count, 1, 1, &arena, &single));
    CHECK_OK(program_tensor_parallel(graph, 0, graph->forward_count, 2, 4, &arena, &program));
    for (int section = 0; program && single && section < HAPT_SECTION_REDUCE; section++) {
        double cut = 0, whole = 0;
        for (int s = 0; s < program->step_count[section]; s++) {
            const int o = program->step[section][s].op;
            const struct hapt_op *op = &program->graph->op[o];
            if (program->step[section][s].kind != HAPT_COLLECTIVE_NONE) continue;
            const char *type = hapt_op_type_at(op->type)->name;
            const bool stays = strstr(type, "norm") || strcmp(type, "add") == 0 || strstr(type, "embedding");
            *(stays ? &whole : &cut) += hapt_op_flops(program->graph, op, 1);
            /* Every product and every attention is divided evenly. */
            CHECK_MESSAGE(fabs(hapt_op_flops(program->shard, &program->shard->op[o], 1) * (stays ? 2 : 8) -
                               hapt_op_flops(program->graph, op, 1)) <= 1e-9 * hapt_op_flops(program->graph, op, 1),
                          "%s is not cut as it should be", op->name);
        }
        CHECK_NEAR(program_flops(single, section), cut + whole, 1e-9 * cut);
        CHECK_NEAR(8 * program_flops(program, section), cut + 4 * whole, 1e-9 * cut);
    }
    hapt_arena_release(&arena);
}

/* Korthikanti et al. 2022, equation 2, for the tensors that this graph keeps: s b h (10 + 24 / t) bytes per layer
 * without the two dropout masks. No scores are kept (the 5 a s / h term). Added are the logsumexp of each head's rows
 * and the statistics of two norms in fp32. */
static void activations_follow_the_formula(void)
{
    const int hidden = 64, heads = 8, sequence = 32, rows = 4;
    struct hapt_arena arena;
    hapt_arena_init(&arena);
    const struct hapt_model *model =
        fixture_gpt(&arena, (struct fixture_gpt){4, hidden, heads, sequence, 128, rows, false, true});
    const struct hapt_graph *graph = model->graph;
    const struct hapt_memory_options options = {.slots = 1, .state_count = 2};
    const int per_block = (graph->forward_count - 4) / 4;
    for (int tp = 1; tp <= 8; tp *= 2) {
        size_t bytes[2] = {0};
        for (int k = 0; k < 2; k++) {
            struct hapt_program *program = NULL;
            struct hapt_memory_plan *plan = NULL;
            CHECK_OK(program_tensor_parallel(graph, 1, 1 + (k + 1) * per_block, 1, tp, &arena, &program));
            CHECK_OK(hapt_memory_plan(program, &options, &arena, &plan));
            if (plan) CHECK_OK(memory_check(plan, program));
            if (plan) bytes[k] = plan->activation_bytes;
        }
        const double sb = (double)sequence * rows, sbh = sb * hidden;
        const double expected = sbh * (8 + 24.0 / tp) + 4 * sb * heads / tp + 4 * 4 * sb;
        CHECK_NEAR((double)(bytes[1] - bytes[0]), expected, 0);
    }
    hapt_arena_release(&arena);
}

/* Every range has a valid program and a valid memory plan. The ranges of a division do all the work of the whole. */
static void ranges_are_views(void)
{
    struct hapt_arena arena;
    hapt_arena_init(&arena);
    const struct hapt_model *model = fixture_gpt(&arena, (struct fixture_gpt){2, 16, 4, 8, 37, 4, true, true});
    const struct hapt_graph *graph = model->graph;
    const struct hapt_memory_options options = {.slots = 2, .state_count = 2};
    struct hapt_sharding *sharding = NULL;
    CHECK_OK(hapt_sharding_tensor_parallel(graph, 2, 4, &arena, &sharding));
    for (int first = 0; sharding && first < graph->forward_count; first++) {
        for (int end = first + 1; end <= graph->forward_count; end++) {
            struct hapt_program *program = NULL;
            struct hapt_memory_plan *plan = NULL;
            CHECK_OK(hapt_program_build(sharding, first, end, &arena, &program));
            if (!program) continue;
            CHECK_OK(program_check(program));
            CHECK_OK(hapt_memory_plan(program, &options, &arena, &plan));
            CHECK_OK(memory_check(plan, program));
        }
    }
    struct hapt_program *whole = NULL, *part[2] = {NULL};
    CHECK_OK(hapt_program_build(sharding, 0, graph->forward_count, &arena, &whole));
    for (int cut = 1; whole && cut < graph->forward_count; cut++) {
        CHECK_OK(hapt_program_build(sharding, 0, cut, &arena, &part[0]));
        CHECK_OK(hapt_program_build(sharding, cut, graph->forward_count, &arena, &part[1]));
        for (int section = 0; section < HAPT_SECTION_REDUCE; section++)
            CHECK(part[0]->step_count[section] + part[1]->step_count[section] == whole->step_count[section]);
    }
    hapt_arena_release(&arena);
}

/* A wrong program is found: a collective is missing, or all ranks add a bias. */
static void broken_programs_are_found(void)
{
    struct hapt_arena arena;
    hapt_arena_init(&arena);
    const struct hapt_model *model = fixture_gpt(&arena, (struct fixture_gpt){1, 16, 4, 8, 32, 4, true, false});
    struct hapt_program *program = NULL;
    CHECK_OK(program_tensor_parallel(model->graph, 0, model->graph->forward_count, 1, 2, &arena, &program));
    int found = 0, tried = 0;
    for (int section = 0; program && section < HAPT_SECTION_REDUCE; section++) {
        for (int s = 0; s < program->step_count[section]; s++) {
            struct hapt_program_step *step = &program->step[section][s], kept = *step;
            if (step->kind == HAPT_COLLECTIVE_NONE && !step->first_rank_inputs[1] && step->axis < 0) continue;
            if (step->kind == HAPT_COLLECTIVE_NONE)
                step->first_rank_inputs[1] = 0, step->axis = -1;
            else
                step->axis = 0;
            tried++;
            found += program_check(program) != HAPT_OK;
            hapt_fail_reset();
            *step = kept;
        }
    }
    CHECK_MESSAGE(tried == 6 + 4 && found == tried, "%d of %d", found, tried);
    CHECK_OK(program_check(program));
    hapt_arena_release(&arena);
}

int main(int argc, char **argv)
{
    test_init(&argc, &argv);
    RUN(gpt_equals_one_device);
    RUN(families_equal_one_device);
    RUN(random_graphs_equal_one_device);
    RUN(parallel_branches);
    RUN(marks);
    RUN(layout_is_megatrons);
    RUN(collectives_are_megatrons);
    RUN(flops_add_up);
    RUN(activations_follow_the_formula);
    RUN(ranges_are_views);
    RUN(broken_programs_are_found);
    return test_finish();
}
