/*
 * Expanded graphs of forced cuts. All ranks run in lock step, with the cpu kernels and naive collectives. Their shards
 * together must be the result of one device. Programs that the rules do not derive must be refused.
 */
#include "cuts.h"
#include "programs.h"
#include "world.h"

struct tally {
    int programs, infeasible, kinds[HAPT_COLLECTIVE_COUNT], uneven, copies, passed, refused, accepted;
};

static void count(struct tally *tally, const struct hapt_sharding *sharding)
{
    const struct hapt_graph *graph = sharding->graph;
    tally->programs++;
    for (int o = 0; o < graph->op_count; o++) {
        tally->kinds[hapt_op_type_at(graph->op[o].type)->collective]++;
        tally->copies += !hapt_op_type_at(graph->op[o].type)->collective && strstr(graph->op[o].name, ".copy") != NULL;
        for (int axis = 0; axis < HAPT_MESH_AXES; axis++)
            tally->passed += sharding->cut[o][axis].letter == HAPT_CUT_PARTIAL;
    }
    for (int t = 0; t < graph->tensor_count; t++)
        for (int axis = 0; axis < HAPT_MESH_AXES; axis++)
            tally->uneven += sharding->property[t][axis].unit > 1 || sharding->property[t][axis].ratio > 0;
}

/* Each communication is needed: without it the program is refused, or is still right. No two collectives make the same
 * tensor. */
static void check_refusals(const struct hapt_sharding *sharding, int vocab, const struct hapt_axis *axis,
                           const struct hapt_axis_program *program, const char *what, struct tally *tally)
{
    struct hapt_axis_program less = {.count = program->count - 1};
    less.instruction = calloc((size_t)program->count, sizeof *less.instruction);
    for (int skip = 0; skip < program->count; skip++) {
        struct hapt_arena arena;
        struct hapt_sharding *made = NULL;
        if (program->instruction[skip].op >= 0) continue;
        hapt_arena_init(&arena);
        for (int i = 0; i < program->count; i++)
            if (i != skip) less.instruction[i - (i > skip)] = program->instruction[i];
        const enum hapt_status status = hapt_sharding_apply(sharding, 0, axis, &less, &arena, &made);
        /* An addend of a gradient may arrive by another collective. Then the result must be right. */
        CHECK(status == HAPT_OK || status == HAPT_ERR_INFEASIBLE);
        tally->refused += status != HAPT_OK;
        tally->accepted += status == HAPT_OK;
        if (status == HAPT_OK) world_compare_sharding(sharding->graph, vocab, made, what);
        struct hapt_axis_instruction *changed = &program->instruction[skip], kept = *changed;
        for (int kind = 1; kind < HAPT_COLLECTIVE_COUNT; kind++) {
            const bool gathers =
                kept.kind == HAPT_COLLECTIVE_ALL_GATHER || kept.kind == HAPT_COLLECTIVE_GROUPED_BROADCAST;
            changed->kind = (enum hapt_collective_kind)kind;
            const bool fits =
                changed->kind == kept.kind || (gathers && (changed->kind == HAPT_COLLECTIVE_ALL_GATHER ||
                                                           changed->kind == HAPT_COLLECTIVE_GROUPED_BROADCAST));
            CHECK_MESSAGE((hapt_sharding_apply(sharding, 0, axis, program, &arena, &made) == HAPT_OK) == fits,
                          "%s: instruction %d as collective %d instead of %d", what, skip, kind, kept.kind);
        }
        *changed = kept;
        hapt_fail_reset();
        hapt_arena_release(&arena);
    }
    free(less.instruction);
}

/* A broadcast may replace each all-gather. */
static void broadcast_some(struct hapt_axis_program *program, uint64_t *random)
{
    for (int i = 0; i < program->count; i++)
        if (program->instruction[i].op < 0 && program->instruction[i].kind == HAPT_COLLECTIVE_ALL_GATHER &&
            hapt_random_next(random) % 2)
            program->instruction[i].kind = HAPT_COLLECTIVE_GROUPED_BROADCAST;
}

static void one_case(const struct hapt_graph *graph, int vocab, int seed, struct tally *tally)
{
    struct hapt_arena arena;
    struct hapt_sharding *trivial = NULL, *outer = NULL, *inner = NULL;
    struct hapt_axis_program *program;
    uint64_t random = (uint64_t)seed * 7919 + 13;
    char what[64];
    const int first = 1 + (int)(hapt_random_next(&random) % 4),
              second = 1 + (int)(hapt_random_next(&random) % (first > 2 ? 2 : 4));
    snprintf(what, sizeof what, "case %d on %d x %d", seed, first, second);
    hapt_arena_init(&arena);
    CHECK_OK(hapt_sharding_trivial(graph, &arena, &trivial));
    outer = first > 1 ? cuts_add_axis(trivial, 0, first, &random, &arena, &program) : trivial;
    if (outer && first > 1) {
        struct hapt_sharding *broadcasting = NULL;
        broadcast_some(program, &random);
        CHECK_OK(hapt_sharding_apply(trivial, 0, &outer->axis[0], program, &arena, &broadcasting));
        if (seed % 10 == 0) check_refusals(trivial, vocab, &outer->axis[0], program, what, tally);
        if (broadcasting) outer = broadcasting;
    }
    if (outer) inner = second > 1 ? cuts_add_axis(outer, 1, second, &random, &arena, &program) : outer;
    if (inner) {
        count(tally, inner);
        world_compare_sharding(graph, vocab, inner, what);
    } else {
        tally->infeasible++;
    }
    hapt_fail_reset();
    hapt_arena_release(&arena);
}

static void report(const struct tally *tally, int cases)
{
    /* The runs included every kind of step. */
    for (int kind = 1; kind < HAPT_COLLECTIVE_COUNT; kind++)
        CHECK_MESSAGE(tally->kinds[kind] > cases / 4, "collective %d: %d", kind, tally->kinds[kind]);
    CHECK_MESSAGE(tally->refused > 10 * tally->accepted, "%d of %d communications are not needed", tally->accepted,
                  tally->accepted + tally->refused);
    CHECK_MESSAGE(tally->infeasible < cases / 5, "%d of %d infeasible", tally->infeasible, cases);
    CHECK_MESSAGE(tally->uneven > cases && tally->copies > 0 && tally->passed > 0, "%d uneven, %d copies, %d passed",
                  tally->uneven, tally->copies, tally->passed);
}

static void gpt(void)
{
    /* Heads that most meshes share unevenly, tied tables, an odd vocabulary. */
    static const struct fixture_gpt shape[] = {
        {1, 12, 3, 4, 13, 4, true, false}, {2, 16, 4, 4, 17, 4, false, false}, {1, 20, 5, 6, 11, 6, true, false}};
    struct tally tally = {0};
    const int cases = test_long() ? 2000 : 90;
    for (int k = 0; k < cases; k++) {
        struct hapt_arena arena;
        hapt_arena_init(&arena);
        const struct hapt_model *model = fixture_gpt(&arena, shape[k % 3]);
        one_case(model->graph, shape[k % 3].vocab, k, &tally);
        hapt_arena_release(&arena);
    }
    report(&tally, cases);
}

static void random_graphs(void)
{
    struct tally tally = {0};
    const int cases = test_long() ? 4000 : 150;
    for (int k = 0; k < cases; k++) {
        struct hapt_arena arena;
        uint64_t random = (uint64_t)k + 31337;
        hapt_arena_init(&arena);
        const struct hapt_graph *graph = fixture_random(&arena, &random, 3 + k % 16);
        one_case(graph, 11, k, &tally);
        hapt_arena_release(&arena);
    }
    report(&tally, cases);
}

/* Every family. The signatures of operators give their possible cuts; this test does not know operator names. */
static void families(void)
{
    static const char *const shape[][24] = {
        {"bert", "--layers", "1", "--hidden", "12", "--heads", "3", "--sequence", "4", "--vocab", "13"},
        {"bert-moe", "--layers", "2", "--hidden", "8", "--heads", "2", "--sequence", "4", "--vocab", "13", "--experts",
         "5", "--top-k", "2"},
        {"llama", "--layers", "1", "--hidden", "24", "--heads", "6", "--kv-heads", "3", "--sequence", "4", "--vocab",
         "13"},
        {"vit", "--layers", "1", "--hidden", "12", "--heads", "3", "--image", "8", "--patch", "4", "--ffn", "16",
         "--classes", "7"},
        {"vgg", "--hidden", "10", "--image", "8", "--width", "4", "--classes", "7", "--stages", "1,1", "--pool", "3"},
        {"resnet", "--image", "8", "--width", "4", "--classes", "7", "--stages", "1,1"},
    };
    static const int vocab[] = {13, 13, 13, 7, 7, 7};
    const int families_count = (int)(sizeof shape / sizeof *shape), cases = test_long() ? 300 : 12;
    for (int f = 0; f < families_count; f++) {
        struct tally tally = {0};
        struct hapt_arena arena;
        struct hapt_config *config = NULL;
        struct hapt_model *model = NULL;
        char *words[40] = {"hapt", "model", (char *)shape[f][0], "--microbatch", "4", "--output", "x.h5"};
        int count = 7;
        for (int w = 1; shape[f][w]; w++) words[count++] = (char *)shape[f][w];
        hapt_arena_init(&arena);
        CHECK_OK(hapt_config_parse(count, words, &arena, &config));
        if (config) CHECK_OK(hapt_model_build(shape[f][0], config, &arena, &model));
        for (int k = 0; model && k < cases; k++) one_case(model->graph, vocab[f], 1000 * f + k, &tally);
        CHECK_MESSAGE(tally.programs > cases / 2, "%s: %d of %d programs", shape[f][0], tally.programs, cases);
        hapt_arena_release(&arena);
    }
}

/* ---- stages with other layouts ---- */

enum { MOST_STAGES = 3 };

static int version_in(const struct hapt_program *program, const struct hapt_boundary *boundary, int origin)
{
    int found = -1;
    for (int b = 0; b < boundary->count; b++) {
        if (program->origin[boundary->tensor[b]] != origin) continue;
        CHECK(found < 0); /* one tensor of this origin leaves */
        found = boundary->tensor[b];
    }
    return found;
}

/* Copies the inputs of a stage from the stage that made them or added to them last. */
static void receive(struct world *stage, int stages, int to, bool backward)
{
    const struct hapt_program *mine = stage[to].program;
    const struct hapt_boundary *in = backward ? &mine->backward_in : &mine->forward_in;
    for (int b = 0; b < in->count; b++) {
        const int tensor = in->tensor[b], origin = mine->origin[tensor];
        int from = -1, sent = -1;
        for (int s = backward ? to + 1 : to - 1; s >= 0 && s < stages && sent < 0; s += backward ? 1 : -1) {
            const struct hapt_program *its = stage[s].program;
            sent = version_in(its, backward ? &its->backward_out : &its->forward_out, origin);
            from = s;
        }
        CHECK_MESSAGE(sent >= 0, "%s has no source", mine->graph->tensor[tensor].name);
        if (sent < 0) continue;
        double *whole = malloc((size_t)hapt_tensor_elements(&mine->graph->tensor[tensor]) * sizeof *whole);
        world_gather(&stage[from], sent, whole);
        for (int r = 0; r < stage[to].ranks; r++) {
            int64_t *index = world_indices(&stage[to], r, tensor);
            for (int64_t k = 0; k < world_elements(&stage[to], r, tensor); k++)
                ((float *)stage[to].data[r][tensor])[k] = (float)whole[index[k]];
            free(index);
        }
        free(whole);
    }
}

/* Gradients of parameters, with tied ones summed over the stages that hold them, compared with one device. */
static void compare_stages(struct world *stage, int stages, const struct world *one, const char *what)
{
    const struct hapt_graph *source = one->program->sharding->source;
    for (int t = 0; t < source->tensor_count; t++) {
        if (source->tensor[t].kind != HAPT_TENSOR_PARAMETER || source->tensor[t].gradient < 0) continue;
        const int gradient = source->tensor[t].gradient;
        const int64_t count = hapt_tensor_elements(&source->tensor[t]);
        double *sum = calloc((size_t)count, sizeof *sum), *its = calloc((size_t)count, sizeof *its), apart = 0,
               scale = 1e-3;
        for (int s = 0; s < stages; s++) {
            if (stage[s].program->local[gradient] < 0) continue;
            apart = fmax(apart, world_gather(&stage[s], gradient, its));
            for (int64_t k = 0; k < count; k++) sum[k] += its[k];
        }
        world_gather(one, gradient, its);
        for (int64_t k = 0; k < count; k++) {
            apart = fmax(apart, fabs(sum[k] - its[k]));
            scale = fmax(scale, fabs(its[k]));
        }
        CHECK_MESSAGE(apart < 5e-4 * scale, "%s: %s differs by %g of %g", what, source->tensor[gradient].name, apart,
                      scale);
        free(sum);
        free(its);
    }
}

/* A random sharding for which operators [first, end) can be a stage, or NULL. */
static struct hapt_program *random_stage(const struct hapt_graph *graph, int first, int end, uint64_t *random,
                                         struct hapt_arena *arena)
{
    struct hapt_sharding *trivial = NULL, *made = NULL;
    struct hapt_axis_program *list;
    struct hapt_program *program = NULL;
    const int size[] = {1 + (int)(hapt_random_next(random) % 3), 1 + (int)(hapt_random_next(random) % 2)};
    CHECK_OK(hapt_sharding_trivial(graph, arena, &trivial));
    made = size[0] > 1 ? cuts_add_axis(trivial, 0, size[0], random, arena, &list) : trivial;
    if (made && size[1] > 1) made = cuts_add_axis(made, 1, size[1], random, arena, &list);
    if (made && hapt_program_build(made, first, end, arena, &program) != HAPT_OK) program = NULL;
    if (program) CHECK_OK(program_check(program));
    hapt_fail_reset();
    return program;
}

static bool run_stages(const struct hapt_graph *graph, int vocab, int seed)
{
    struct hapt_arena arena;
    struct hapt_program *single = NULL;
    struct world one, stage[MOST_STAGES];
    uint64_t random = (uint64_t)seed * 31 + 9;
    const int stages = 2 + seed % 2;
    int cut[MOST_STAGES + 1] = {0}, made = 0;
    char what[32];
    snprintf(what, sizeof what, "pipeline %d", seed);
    hapt_arena_init(&arena);
    for (int s = 1; s < stages; s++)
        cut[s] = cut[s - 1] + 1 +
                 (int)(hapt_random_next(&random) % (uint64_t)(graph->forward_count - (stages - s) - cut[s - 1]));
    cut[stages] = graph->forward_count;
    for (; made < stages; made++) {
        struct hapt_program *program = NULL;
        for (int attempt = 0; attempt < 20 && !program; attempt++)
            program = random_stage(graph, cut[made], cut[made + 1], &random, &arena);
        if (!program) break;
        world_open(&stage[made], program);
        world_feed(&stage[made], vocab);
    }
    if (made == stages) {
        CHECK_OK(program_data_parallel(graph, 0, graph->forward_count, 1, 1, &arena, &single));
        world_run_all(&one, single, vocab);
        for (int s = 0; s < stages; s++) {
            receive(stage, stages, s, false);
            world_run(&stage[s], HAPT_SECTION_FORWARD);
        }
        for (int s = stages - 1; s >= 0; s--) {
            receive(stage, stages, s, true);
            world_run(&stage[s], HAPT_SECTION_BACKWARD);
            world_run(&stage[s], HAPT_SECTION_REDUCE);
        }
        compare_stages(stage, stages, &one, what);
        world_close(&one);
    }
    for (int s = 0; s < made; s++) world_close(&stage[s]);
    hapt_arena_release(&arena);
    return made == stages;
}

static void pipelines(void)
{
    const int cases = test_long() ? 1000 : 60;
    int made = 0;
    for (int k = 0; k < cases; k++) {
        struct hapt_arena arena;
        uint64_t random = (uint64_t)k + 99;
        hapt_arena_init(&arena);
        const bool gpt_model = k % 3 == 0;
        const struct hapt_graph *graph =
            gpt_model ? fixture_gpt(&arena, (struct fixture_gpt){1, 12, 3, 4, 13, 4, k % 2 == 0, false})->graph
                      : fixture_random(&arena, &random, 3 + k % 14);
        made += run_stages(graph, gpt_model ? 13 : 11, k);
        hapt_arena_release(&arena);
    }
    CHECK_MESSAGE(made > cases / 2, "%d of %d pipelines", made, cases);
}

/* ---- HAP Fig. 11 ---- */

/* e1 is an embedding of tokens in a table; e3 = e1 e2; then the loss. */
struct figure {
    struct hapt_arena arena;
    struct hapt_graph *graph;
    int e1, e2, e3; /* tensors */
    struct hapt_sharding *trivial;
};

static int figure_parameter(struct hapt_graph *graph, const char *name, int64_t rows, int64_t columns)
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

static void open_figure(struct figure *figure)
{
    struct hapt_tensor input = {.name = "tokens",
                                .kind = HAPT_TENSOR_INPUT,
                                .role = HAPT_ROLE_TOKENS,
                                .dtype = HAPT_I32,
                                .dims = 2,
                                .shape = {4, 6}};
    int tokens = -1, targets = -1, loss[2];
    hapt_arena_init(&figure->arena);
    CHECK_OK(hapt_graph_create(&figure->arena, &figure->graph));
    CHECK_OK(hapt_graph_add_tensor(figure->graph, &input, &tokens));
    input.name = "targets", input.role = HAPT_ROLE_TARGETS;
    CHECK_OK(hapt_graph_add_tensor(figure->graph, &input, &targets));
    const int table = figure_parameter(figure->graph, "table", 8, 8);
    figure->e2 = figure_parameter(figure->graph, "e2", 8, 12);
    CHECK_OK(
        hapt_graph_add_op(figure->graph, "embedding", "e1", (int[]){tokens, table, -1}, 3, NULL, NULL, &figure->e1));
    CHECK_OK(hapt_graph_add_op(figure->graph, "linear", "e3", (int[]){figure->e1, figure->e2, -1}, 3, NULL, NULL,
                               &figure->e3));
    CHECK_OK(
        hapt_graph_add_op(figure->graph, "cross_entropy", "loss", (int[]){figure->e3, targets}, 2, NULL, NULL, loss));
    figure->graph->loss = loss[0];
    CHECK_OK(hapt_sharding_trivial(figure->graph, &figure->arena, &figure->trivial));
}

static enum hapt_status try_list(struct figure *figure, int count, struct hapt_axis_instruction *instruction)
{
    const struct hapt_axis axis = {.size = 2};
    const struct hapt_axis_program program = {count, instruction};
    struct hapt_sharding *made = NULL;
    return hapt_sharding_apply(figure->trivial, 0, &axis, &program, &figure->arena, &made);
}

#define COMPUTE(op, letter)                                                                  \
    {                                                                                        \
        op, {letter, 1, 1, 0}, -1, HAPT_COLLECTIVE_NONE, {.kind = HAPT_PROPERTY_REPLICATED}, \
        {                                                                                    \
            .kind = HAPT_PROPERTY_REPLICATED                                                 \
        }                                                                                    \
    }
#define MOVE(tensor, kind, from, to)              \
    {                                             \
        -1, {.letter = 0}, tensor, kind, from, to \
    }
#define REPLICATED                       \
    {                                    \
        .kind = HAPT_PROPERTY_REPLICATED \
    }
#define PARTIAL                       \
    {                                 \
        .kind = HAPT_PROPERTY_PARTIAL \
    }
#define SHARD(dim)                          \
    {                                       \
        HAPT_PROPERTY_SHARDED, dim, 1, 1, 0 \
    }

static void figure_11(void)
{
    struct figure figure;
    open_figure(&figure);
    const int e1 = figure.e1, e2 = figure.e2, e3 = figure.e3;
    /* Program 7: rows, no communication. */
    CHECK_OK(try_list(&figure, 3, (struct hapt_axis_instruction[]){COMPUTE(0, 'b'), COMPUTE(1, 'b'), COMPUTE(2, 'b')}));
    /* Program 6: e1 by rows, e2 by columns. No rule derives partial sums from these, for any index of the product. */
    CHECK_FAILS(
        try_list(&figure, 3, (struct hapt_axis_instruction[]){COMPUTE(0, 'b'), COMPUTE(1, 'o'), COMPUTE(2, '+')}),
        HAPT_ERR_INFEASIBLE);
    CHECK_FAILS(
        try_list(&figure, 3, (struct hapt_axis_instruction[]){COMPUTE(0, 'b'), COMPUTE(1, 'i'), COMPUTE(2, 'b')}),
        HAPT_ERR_INFEASIBLE);
    CHECK_FAILS(try_list(&figure, 4,
                         (struct hapt_axis_instruction[]){COMPUTE(0, 'b'), COMPUTE(1, 'b'),
                                                          MOVE(e3, HAPT_COLLECTIVE_ALL_REDUCE, PARTIAL, REPLICATED),
                                                          COMPUTE(2, 0)}),
                HAPT_ERR_INFEASIBLE);
    /* Program 9: gathers a parameter. */
    CHECK_FAILS(try_list(&figure, 4,
                         (struct hapt_axis_instruction[]){COMPUTE(0, 'b'),
                                                          MOVE(e2, HAPT_COLLECTIVE_ALL_GATHER, SHARD(1), REPLICATED),
                                                          COMPUTE(1, 'b'), COMPUTE(2, 'b')}),
                HAPT_ERR_INFEASIBLE);
    /* Columns need the whole e1, so it is gathered. */
    CHECK_OK(try_list(&figure, 4,
                      (struct hapt_axis_instruction[]){COMPUTE(0, 'b'),
                                                       MOVE(e1, HAPT_COLLECTIVE_ALL_GATHER, SHARD(0), REPLICATED),
                                                       COMPUTE(1, 'o'), COMPUTE(2, 'v')}));
    /* An operator that is left out, listed twice, or does not exist. */
    CHECK_FAILS(try_list(&figure, 2, (struct hapt_axis_instruction[]){COMPUTE(0, 'b'), COMPUTE(1, 'b')}),
                HAPT_ERR_INFEASIBLE);
    CHECK_FAILS(
        try_list(&figure, 3, (struct hapt_axis_instruction[]){COMPUTE(0, 'b'), COMPUTE(0, 'b'), COMPUTE(1, 'b')}),
        HAPT_ERR_INFEASIBLE);
    CHECK_FAILS(try_list(&figure, 1, (struct hapt_axis_instruction[]){COMPUTE(17, 'b')}), HAPT_ERR_INFEASIBLE);
    CHECK_FAILS(
        try_list(&figure, 1, (struct hapt_axis_instruction[]){MOVE(99, HAPT_COLLECTIVE_SLICE, REPLICATED, SHARD(0))}),
        HAPT_ERR_INFEASIBLE);
    CHECK_FAILS(try_list(&figure, 2,
                         (struct hapt_axis_instruction[]){COMPUTE(0, 'b'),
                                                          MOVE(e1, HAPT_COLLECTIVE_ALL_TO_ALL, SHARD(0), SHARD(7))}),
                HAPT_ERR_INFEASIBLE);
    hapt_fail_reset();
    hapt_arena_release(&figure.arena);
}

/* ---- shares ---- */

/* The boxes of all ranks are a partition. Canonical properties are equal if and only if the shares are. */
static void boxes(void)
{
    for (int k = 0; k < 300; k++) {
        struct hapt_arena arena;
        struct hapt_axis_program *program;
        uint64_t random = (uint64_t)k + 5;
        hapt_arena_init(&arena);
        const struct hapt_model *model = fixture_gpt(&arena, (struct fixture_gpt){1, 24, 6, 4, 16, 12, false, false});
        struct hapt_sharding *trivial = NULL, *outer, *inner = NULL;
        CHECK_OK(hapt_sharding_trivial(model->graph, &arena, &trivial));
        outer = cuts_add_axis(trivial, 0, 2 + k % 2, &random, &arena, &program);
        if (outer) inner = cuts_add_axis(outer, 1, 2 + k % 3, &random, &arena, &program);
        for (int t = 0; inner && t < inner->graph->tensor_count; t++) {
            const struct hapt_property *property = inner->property[t];
            int64_t elements = 0;
            int copies = 1;
            for (int axis = 0; axis < HAPT_MESH_AXES; axis++)
                if (property[axis].kind != HAPT_PROPERTY_SHARDED) copies *= inner->axis[axis].size;
            for (int r = 0; r < inner->axis[0].size * inner->axis[1].size; r++) {
                struct hapt_box box;
                int64_t own = 1;
                hapt_sharding_box(inner, t, (int[]){r / inner->axis[1].size, r % inner->axis[1].size}, &box);
                for (int d = 0; d < box.dims; d++) own *= box.extent[d];
                CHECK(own > 0);
                elements += own;
            }
            CHECK(elements == copies * hapt_tensor_elements(&inner->graph->tensor[t]));
        }
        hapt_fail_reset();
        hapt_arena_release(&arena);
    }
}

static void canonical(void)
{
    struct hapt_arena arena;
    struct hapt_sharding *trivial = NULL;
    const double ratio[] = {0.5, 0.5, 0.7, 0.3, 0.69, 0.31};
    const struct hapt_axis even = {.size = 2}, uneven = {.size = 2, .ratio_count = 3, .ratio = ratio};
    char text[HAPT_PROPERTY_TEXT];
    hapt_arena_init(&arena);
    const struct hapt_model *model = fixture_gpt(&arena, (struct fixture_gpt){1, 24, 6, 4, 16, 4, false, false});
    CHECK_OK(hapt_sharding_trivial(model->graph, &arena, &trivial));
    const int qkv = hapt_graph_find_tensor(model->graph, "h.0.attn.c_attn"); /* 72 wide: heads of 4 */
    int op = model->graph->tensor[qkv].producer;
    struct hapt_rule rule;
    CHECK_OK(hapt_rule_of_cut(trivial, 0, &even, op, (struct hapt_cut){'o', 3, 4, 0}, &rule));
    CHECK(rule.output[0].unit == 1 && rule.output[0].blocks == 3); /* three heads per rank in both cases */
    CHECK_OK(hapt_rule_of_cut(trivial, 0, &uneven, op, (struct hapt_cut){'o', 3, 4, 1}, &rule));
    CHECK(rule.output[0].unit == 2 &&
          rule.output[0].ratio == 1); /* 4.2 heads round to 4, and so do 8.4 halves, but 16.8 quarters do not */
    CHECK(strcmp(hapt_property_text(rule.output[0], text), "sharded(2) in 3 blocks by units of 2 ratio 1") == 0);
    CHECK_OK(hapt_rule_of_cut(trivial, 0, &uneven, op, (struct hapt_cut){'o', 3, 4, 2}, &rule));
    CHECK(rule.output[0].unit == 2 && rule.output[0].ratio == 1); /* and 4.14 rounds to 4 */
    CHECK_OK(hapt_rule_of_cut(trivial, 0, &uneven, op, (struct hapt_cut){'o', 3, 4, 0}, &rule));
    CHECK(rule.output[0].unit == 1 && rule.output[0].ratio == 0);
    /* Attention has the heads of its input's columns. */
    struct hapt_property wanted = rule.output[0];
    CHECK_OK(hapt_rule_of_cut(trivial, 0, &uneven, op + 1, (struct hapt_cut){'h', 1, 1, 0}, &rule));
    CHECK(hapt_property_same(rule.input[0], wanted));
    CHECK_OK(hapt_rule_of_cut(trivial, 0, &uneven, op, (struct hapt_cut){'o', 3, 4, 1}, &rule));
    wanted = rule.output[0];
    CHECK_OK(hapt_rule_of_cut(trivial, 0, &uneven, op + 1, (struct hapt_cut){'h', 1, 1, 1}, &rule));
    CHECK(hapt_property_same(rule.input[0], wanted));
    /* More ranks than heads. */
    const struct hapt_axis many = {.size = 8};
    CHECK_FAILS(hapt_rule_of_cut(trivial, 0, &many, op + 1, (struct hapt_cut){'h', 1, 1, 0}, &rule),
                HAPT_ERR_INFEASIBLE);
    hapt_fail_reset();
    hapt_arena_release(&arena);
}

int main(int argc, char **argv)
{
    test_init(&argc, &argv);
    RUN(figure_11);
    RUN(canonical);
    RUN(boxes);
    RUN(random_graphs);
    RUN(gpt);
    RUN(pipelines);
    RUN(families);
    return test_finish();
}
