/*
 * Tensor-parallel programs. The proof that they are right: all ranks of a small mesh are interpreted in lock step with the cpu
 * kernels and naive collectives, and whatever they hold, put together, is what one device computes.
 */
#include "fixture.h"
#include "shards.h"

#include "hapt/memory.h"

#include "../../src/spmd/rules.h"

enum { MOST_RANKS = 8 };

/* ---- an interpreter ---- */

struct world {
    const struct hapt_graph *graph;
    const struct hapt_program *program;
    int size[HAPT_MESH_AXES], ranks;
    void **data[MOST_RANKS]; /* [rank][graph tensor] 4-byte elements */
};

static int place_on(const struct world *world, int rank, int axis)
{
    return axis == 0 ? rank / world->size[1] : rank % world->size[1];
}

static int64_t local_elements(const struct world *world, int tensor)
{
    return hapt_tensor_elements(&world->program->shard->tensor[tensor]);
}

/* Index in the whole tensor of element k of a rank's shard; -1: padding. Both axes never share a dimension in these programs. */
static int64_t whole_index(const struct world *world, int tensor, int rank, int64_t k)
{
    const struct hapt_tensor *whole = &world->graph->tensor[tensor], *local = &world->program->shard->tensor[tensor];
    int64_t shape[HAPT_MAX_DIMS];
    memcpy(shape, local->shape, sizeof shape);
    for (int axis = HAPT_MESH_AXES - 1; axis >= 0; axis--) {
        const struct hapt_property property = world->program->tensor[world->program->local[tensor]].property[axis];
        if (property.kind != HAPT_PROPERTY_ALL_GATHER || world->size[axis] == 1) continue;
        k = shards_whole_index(shape, whole->dims, property.dim, property.blocks > 1 ? property.blocks : 1,
                               place_on(world, rank, axis), whole->shape[property.dim], k);
        if (k < 0) return -1;
        shape[property.dim] = whole->shape[property.dim];
    }
    return k;
}

static void open_world(struct world *world, const struct hapt_program *program)
{
    *world = (struct world){.graph = program->graph, .program = program, .size = {program->nodes, program->devices}};
    world->ranks = program->nodes * program->devices;
    CHECK(world->ranks <= MOST_RANKS);
    for (int r = 0; r < world->ranks; r++) {
        world->data[r] = calloc((size_t)program->graph->tensor_count, sizeof(void *));
        for (int t = 0; t < program->graph->tensor_count; t++) {
            if (program->local[t] < 0) continue;
            const size_t bytes = ((size_t)local_elements(world, t) * 4 + 63) / 64 * 64;
            world->data[r][t] = aligned_alloc(64, bytes);
            memset(world->data[r][t], 0, bytes);
        }
    }
}

static void close_world(struct world *world)
{
    for (int r = 0; r < world->ranks; r++) {
        for (int t = 0; t < world->graph->tensor_count; t++) free(world->data[r][t]);
        free(world->data[r]);
    }
}

/* Parameters and inputs, the same for every mesh. */
static void feed(struct world *world, int vocab)
{
    for (int t = 0; t < world->graph->tensor_count; t++) {
        const struct hapt_tensor *tensor = &world->graph->tensor[t];
        if (world->program->local[t] < 0) continue;
        if (tensor->kind != HAPT_TENSOR_INPUT && tensor->kind != HAPT_TENSOR_PARAMETER) continue;
        uint64_t random = (uint64_t)t + 5;
        const int64_t count = hapt_tensor_elements(tensor);
        float *whole = malloc((size_t)count * 4);
        for (int64_t k = 0; k < count; k++) {
            const int32_t token = (int32_t)(hapt_random_next(&random) % (uint64_t)vocab);
            if (tensor->role == HAPT_ROLE_LOSS_SCALE)
                whole[k] = 0.125f;
            else if (tensor->kind == HAPT_TENSOR_INPUT)
                ((int32_t *)whole)[k] = tensor->role == HAPT_ROLE_TARGETS && k % 7 == 3 ? -100 : token;
            else
                whole[k] = 0.3f * (float)(2 * hapt_random_unit(&random) - 1) + (tensor->init == HAPT_INIT_ONE ? 1 : 0);
        }
        for (int r = 0; r < world->ranks; r++) {
            for (int64_t k = 0; k < local_elements(world, t); k++) {
                const int64_t at = whole_index(world, t, r, k);
                if (at >= 0) ((float *)world->data[r][t])[k] = whole[at];
            }
        }
        free(whole);
    }
}

static struct hapt_view view_of(const struct world *world, int rank, int tensor)
{
    const struct hapt_tensor *local = &world->program->shard->tensor[tensor];
    struct hapt_view view = {.data = world->data[rank][tensor], .dtype = local->dtype, .dims = local->dims};
    memcpy(view.shape, local->shape, sizeof view.shape);
    return view;
}

/* Does the operator stand on the shard of an indexed dimension of axis 1? Where, then: first place and those that are not
 * padding. */
static bool indexed_range(const struct world *world, const struct hapt_op *op, int rank, int64_t *first, int64_t *valid)
{
    const struct hapt_signature *signature = hapt_op_signature(op->type);
    for (int k = 0; k < op->input_count + op->output_count; k++) {
        const bool input = k < op->input_count;
        const int tensor = input ? op->input[k] : op->output[k - op->input_count];
        const struct hapt_signature_operand *operand =
            input ? &signature->input[k] : &signature->output[k - op->input_count];
        if (tensor < 0) continue;
        const struct hapt_property property = world->program->tensor[world->program->local[tensor]].property[1];
        if (property.kind != HAPT_PROPERTY_ALL_GATHER || !operand->indexed[property.dim] || world->size[1] == 1) continue;
        const int64_t local = world->program->shard->tensor[tensor].shape[property.dim];
        const int64_t whole = world->graph->tensor[tensor].shape[property.dim];
        *first = local * place_on(world, rank, 1);
        *valid = whole - *first < local ? whole - *first : local;
        if (*valid < 0) *valid = 0;
        return true;
    }
    return false;
}

static void compute(struct world *world, const struct hapt_program_step *step, int rank)
{
    const struct hapt_op *op = &world->program->shard->op[step->op];
    struct hapt_call call = {.input_count = op->input_count,
                             .output_count = op->output_count,
                             .accumulate = op->accumulate,
                             .threads = 1};
    int64_t first = 0, valid = 0;
    memcpy(call.integer, op->integer, sizeof call.integer);
    memcpy(call.real, op->real, sizeof call.real);
    for (int i = 0; i < op->input_count; i++) {
        bool here = op->input[i] >= 0;
        for (int axis = 0; axis < HAPT_MESH_AXES; axis++)
            if (step->once[axis] >> i & 1u && place_on(world, rank, axis) > 0) here = false;
        if (here) call.input[i] = view_of(world, rank, op->input[i]);
    }
    for (int o = 0; o < op->output_count; o++) call.output[o] = view_of(world, rank, op->output[o]);
    const bool indexed = indexed_range(world, op, rank, &first, &valid);
    shards_run(op, &call, indexed, first, valid);
}

/* What cross-entropy on vocabulary shards exchanges: each rank has the logsumexp of its columns and the loss of the targets that
 * lie in them, by that logsumexp; all get the true ones. */
static void exchange(struct world *world, const struct hapt_program_step *step)
{
    const struct hapt_op *op = &world->program->shard->op[step->op];
    const int targets = op->input[1], loss = op->output[0], lse = op->output[1];
    CHECK(strcmp(hapt_op_type_at(op->type)->name, "cross_entropy") == 0 && step->axis == 1);
    for (int group = 0; group < world->size[0]; group++) {
        const int base = group * world->size[1];
        double total = 0;
        for (int r = base; r < base + world->size[1]; r++) total += ((float *)world->data[r][loss])[0];
        for (int64_t k = 0; k < local_elements(world, lse); k++) {
            double sum = 0, most = -1e30;
            for (int r = base; r < base + world->size[1]; r++) most = fmax(most, ((float *)world->data[r][lse])[k]);
            for (int r = base; r < base + world->size[1]; r++) sum += exp(((float *)world->data[r][lse])[k] - most);
            const double whole = most + log(sum);
            for (int r = base; r < base + world->size[1]; r++) {
                int64_t first, valid;
                const int64_t target = ((int32_t *)world->data[r][targets])[k];
                CHECK(indexed_range(world, op, r, &first, &valid));
                if (target >= first && target < first + valid) total += whole - ((float *)world->data[r][lse])[k];
            }
            for (int r = base; r < base + world->size[1]; r++) ((float *)world->data[r][lse])[k] = (float)whole;
        }
        for (int r = base; r < base + world->size[1]; r++) ((float *)world->data[r][loss])[0] = (float)total;
    }
}

static void all_reduce(struct world *world, int tensor, int axis)
{
    const int other = world->size[1 - axis];
    for (int64_t k = 0; k < local_elements(world, tensor); k++) {
        for (int group = 0; group < other; group++) {
            double sum = 0;
            for (int r = 0; r < world->ranks; r++)
                if (place_on(world, r, 1 - axis) == group) sum += ((float *)world->data[r][tensor])[k];
            for (int r = 0; r < world->ranks; r++)
                if (place_on(world, r, 1 - axis) == group) ((float *)world->data[r][tensor])[k] = (float)sum;
        }
    }
}

static void run_section(struct world *world, enum hapt_section section)
{
    for (int s = 0; s < world->program->step_count[section]; s++) {
        const struct hapt_program_step *step = &world->program->step[section][s];
        if (step->kind == HAPT_STEP_COMPUTE) {
            for (int r = 0; r < world->ranks; r++) compute(world, step, r);
            if (step->axis >= 0) exchange(world, step);
            continue;
        }
        CHECK(step->kind == HAPT_STEP_ALL_REDUCE);
        for (int axis = 0; axis < HAPT_MESH_AXES; axis++)
            if (step->axis == axis || step->axis == -1)
                all_reduce(world, world->program->tensor[step->tensor].tensor, axis);
    }
}

/* Every tensor of every rank against one device's. Properties after REDUCE: gradients of parameters are summed. */
static double worst_difference(const struct world *world, const struct world *one, const char **name)
{
    const struct hapt_graph *graph = world->graph;
    double worst = 0;
    for (int t = 0; t < graph->tensor_count; t++) {
        if (world->program->local[t] < 0 || graph->tensor[t].kind == HAPT_TENSOR_INPUT) continue;
        const struct hapt_property *property = world->program->tensor[world->program->local[t]].property;
        const float *whole = one->data[0][t];
        double scale = 1e-3, apart = 0, sum = 0;
        for (int64_t k = 0; k < hapt_tensor_elements(&graph->tensor[t]); k++) scale = fmax(scale, fabs((double)whole[k]));
        for (int r = 0; r < world->ranks; r++) {
            const float *mine = world->data[r][t];
            sum += r % world->size[1] == 0 ? mine[0] : 0;
            for (int64_t k = 0; k < local_elements(world, t); k++) {
                const int64_t at = whole_index(world, t, r, k);
                if (at >= 0 && t != graph->loss) apart = fmax(apart, fabs((double)mine[k] - (double)whole[at]));
            }
        }
        if (t == graph->loss) {
            CHECK(property[1].kind == HAPT_PROPERTY_IDENTITY);
            apart = fabs(sum - (double)whole[0]);
        }
        if (apart / scale > worst) worst = apart / scale, *name = graph->tensor[t].name;
    }
    return worst;
}

static void run_once(struct world *world, const struct hapt_program *program, int vocab)
{
    CHECK_OK(hapt_program_check(program));
    open_world(world, program);
    feed(world, vocab);
    for (int section = 0; section < HAPT_SECTION_COUNT; section++) run_section(world, section);
}

/* fp32 sums in another order: up to 1e-5 of a tensor's largest element in these small networks, 2e-4 of gradients that cancel. */
static void compare(const struct hapt_graph *graph, int vocab, int dp, int tp, const char *what)
{
    struct hapt_arena arena;
    struct hapt_program *single = NULL, *program = NULL;
    struct world one, world;
    const char *name = "";
    hapt_arena_init(&arena);
    CHECK_OK(hapt_program_data_parallel(graph, 0, graph->forward_count, 1, 1, &arena, &single));
    CHECK_OK(hapt_program_tensor_parallel(graph, 0, graph->forward_count, dp, tp, &arena, &program));
    if (single && program) {
        run_once(&one, single, vocab);
        run_once(&world, program, vocab);
        const double apart = worst_difference(&world, &one, &name);
        CHECK_MESSAGE(apart < 2e-4, "%s, dp %d, tp %d: %s differs by %g", what, dp, tp, name, apart);
        close_world(&one);
        close_world(&world);
    }
    hapt_arena_release(&arena);
}

static void gpt_equals_one_device(void)
{
    static const int mesh[][2] = {{1, 2}, {1, 4}, {2, 2}, {2, 1}, {2, 4}};
    for (int tied = 0; tied < 2; tied++) {
        for (int heads = 2; heads <= 4; heads += 2) { /* 2: attention stays whole on 4 ranks */
            for (int vocab = 32; vocab <= 37; vocab += 5) { /* 37: padded shards, on 4 ranks three of them short */
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

/* Networks that nobody designed for sharding: skips of any length, products beside sums. */
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
                       sharding->property[t][1].kind == HAPT_PROPERTY_ALL_GATHER;
        hapt_arena_release(&arena);
    }
    CHECK_MESSAGE(sharded > cases / 4, "only %d products were cut", sharded);
}

static int parameter(struct hapt_graph *graph, const char *name, int64_t rows, int64_t columns)
{
    const struct hapt_tensor tensor = {.name = name, .kind = HAPT_TENSOR_PARAMETER, .dtype = HAPT_F32, .dims = 2,
                                       .shape = {rows, columns}, .trainable = true, .init = HAPT_INIT_NORMAL, .init_std = 0.02};
    int index = -1;
    CHECK_OK(hapt_graph_add_tensor(graph, &tensor, &index));
    return index;
}

/* y = x w, or gelu of it. */
static int product(struct hapt_graph *graph, const char *name, int x, int w, bool gelu)
{
    char after[32];
    int y = -1;
    CHECK_OK(hapt_graph_add_op(graph, "linear", name, (int[]){x, w, -1}, 3, NULL, NULL, &y));
    snprintf(after, sizeof after, "%s.gelu", name);
    if (gelu) CHECK_OK(hapt_graph_add_op(graph, "gelu", after, &y, 1, NULL, NULL, &y));
    return y;
}

/* Two feed-forward networks side by side on one input: their gradients meet as partial sums and are summed once; no cut may part
 * them. Operators: embedding, [a, a.gelu, b], [c, c.gelu, d], sum, head, loss. */
static void parallel_branches(void)
{
    struct hapt_arena arena;
    struct hapt_graph *graph = NULL;
    struct hapt_sharding *sharding = NULL;
    const int64_t d = 8, vocab = 11;
    int tokens = -1, targets = -1, x = -1, y[2], sum = -1, logits = -1, loss[2];
    hapt_arena_init(&arena);
    CHECK_OK(hapt_graph_create(&arena, &graph));
    struct hapt_tensor input = {.name = "tokens", .kind = HAPT_TENSOR_INPUT, .role = HAPT_ROLE_TOKENS, .dtype = HAPT_I32,
                                .dims = 2, .shape = {4, 6}};
    CHECK_OK(hapt_graph_add_tensor(graph, &input, &tokens));
    input.name = "targets", input.role = HAPT_ROLE_TARGETS;
    CHECK_OK(hapt_graph_add_tensor(graph, &input, &targets));
    const int table = parameter(graph, "table", vocab, d);
    CHECK_OK(hapt_graph_add_op(graph, "embedding", "x", (int[]){tokens, table, -1}, 3, NULL, NULL, &x));
    y[0] = product(graph, "b", product(graph, "a", x, parameter(graph, "wa", d, 4 * d), true), parameter(graph, "wb", 4 * d, d), false);
    y[1] = product(graph, "d", product(graph, "c", x, parameter(graph, "wc", d, 2 * d), true), parameter(graph, "wd", 2 * d, d), false);
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
    for (int r = 0; sharding && r < sharding->reduction_count; r++)
        of_x += sharding->reduction[r].tensor == graph->tensor[x].gradient;
    CHECK_MESSAGE(of_x == 1, "the gradient of x is summed %d times", of_x);
    for (int cut = 1; sharding && cut < graph->forward_count; cut++) {
        struct hapt_program *program = NULL;
        const bool parts = cut >= 2 && cut <= 4; /* behind a, before c's end */
        CHECK_MESSAGE(hapt_sharding_allows(sharding, 0, cut) == !parts, "a cut before operator %d", cut);
        CHECK((hapt_program_build(sharding, cut, graph->forward_count, &arena, &program) == HAPT_OK) == !parts);
        hapt_fail_reset();
    }
    hapt_arena_release(&arena);
}

/* Equal operators that are cut otherwise are told apart; equal blocks are not. */
static void marks(void)
{
    struct hapt_arena arena;
    struct hapt_sharding *sharding = NULL;
    uint64_t mark[256] = {0};
    hapt_arena_init(&arena);
    const struct hapt_model *model = fixture_gpt(&arena, (struct fixture_gpt){3, 16, 4, 8, 37, 4, false, true});
    const struct hapt_graph *graph = model->graph;
    CHECK(graph->op_count <= 256);
    CHECK_OK(hapt_sharding_tensor_parallel(graph, 1, 2, &arena, &sharding));
    if (sharding) hapt_sharding_mark(sharding, mark);
    for (int o = 1; sharding && o + 20 < graph->forward_count - 3; o++) CHECK(mark[o] == mark[o + 10]); /* block by block */
    CHECK(mark[2] != mark[4]); /* a product by columns, one by rows */
    hapt_arena_release(&arena);
}

/* ---- what is known of Megatron-LM's sharding ---- */

static const struct hapt_property *property_named(const struct hapt_sharding *sharding, const char *name)
{
    const int tensor = hapt_graph_find_tensor(sharding->graph, name);
    CHECK_MESSAGE(tensor >= 0, "no tensor %s", name);
    return tensor < 0 ? NULL : &sharding->property[tensor][1];
}

/* Shoeybi et al. 2019, section 3: columns, then rows, in attention and in the feed-forward network; tables by vocabulary. */
static void layout_is_megatrons(void)
{
    static const struct {
        const char *name;
        struct hapt_property property;
    } expected[] = {
        {"wte.weight", {HAPT_PROPERTY_ALL_GATHER, 0, 1, 0, 0}},
        {"wpe.weight", {.kind = HAPT_PROPERTY_IDENTITY}},
        {"h.0.ln_1.weight", {.kind = HAPT_PROPERTY_IDENTITY}},
        {"h.0.attn.c_attn.weight", {HAPT_PROPERTY_ALL_GATHER, 1, 3, 0, 0}},
        {"h.0.attn.c_attn.bias", {HAPT_PROPERTY_ALL_GATHER, 0, 3, 0, 0}},
        {"h.0.attn.c_attn.bias.grad", {HAPT_PROPERTY_ALL_GATHER, 0, 3, 0, 0}},
        {"h.0.attn.1", {HAPT_PROPERTY_ALL_GATHER, 1, 1, 0, 0}},
        {"h.0.attn.c_proj.weight", {HAPT_PROPERTY_ALL_GATHER, 0, 1, 0, 0}},
        {"h.0.attn.c_proj.bias", {.kind = HAPT_PROPERTY_IDENTITY}},
        {"h.0.attn.c_proj.bias.grad", {.kind = HAPT_PROPERTY_IDENTITY}},
        {"h.0.residual_1", {.kind = HAPT_PROPERTY_IDENTITY}},
        {"h.0.mlp.c_fc.weight", {HAPT_PROPERTY_ALL_GATHER, 1, 1, 0, 0}},
        {"h.0.mlp.gelu", {HAPT_PROPERTY_ALL_GATHER, 2, 1, 0, 0}},
        {"h.0.mlp.c_proj.weight", {HAPT_PROPERTY_ALL_GATHER, 0, 1, 0, 0}},
        {"lm_head", {HAPT_PROPERTY_ALL_GATHER, 2, 1, 0, 0}},
        {"loss", {.kind = HAPT_PROPERTY_IDENTITY}},
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

/* Per block and microbatch two all-reduces of b s h elements forward and two backward; one more behind the embedding, one before the
 * last norm's backward; three of b s fp32 in the loss. Gradients are summed over axis 0 alone, shards once. */
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
            CHECK_OK(hapt_program_tensor_parallel(model->graph, 0, model->graph->forward_count, dp, tp, &arena, &program));
            if (!program) continue;
            const double bsh = 2.0 * rows / dp * sequence * hidden, bs = 4.0 * rows / dp * sequence;
            CHECK_NEAR(hapt_program_collective_bytes(program, HAPT_SECTION_FORWARD), (2 * layers + 1) * bsh + 3 * bs, 0);
            CHECK_NEAR(hapt_program_collective_bytes(program, HAPT_SECTION_BACKWARD), (2 * layers + 1) * bsh, 0);
            const double h = hidden, shard = (vocab + tp - 1) / tp * h; /* rounded up */
            const double block = (12 * h * h + 3 * h + 4 * h) / tp + 2 * h + 4 * h;
            const double gradients = 4 * (layers * block + 2 * shard + sequence * h + 2 * h);
            CHECK_NEAR(hapt_program_collective_bytes(program, HAPT_SECTION_REDUCE), dp > 1 ? gradients : 0, 0);
            int sums = 0;
            for (int section = 0; section < HAPT_SECTION_COUNT; section++) {
                for (int s = 0; s < program->step_count[section]; s++) {
                    const struct hapt_program_step *step = &program->step[section][s];
                    if (step->kind == HAPT_STEP_COMPUTE) continue;
                    CHECK(step->axis == (section == HAPT_SECTION_REDUCE ? 0 : 1));
                    sums += section != HAPT_SECTION_REDUCE;
                }
            }
            CHECK(sums == 4 * layers + 2);
        }
    }
    hapt_arena_release(&arena);
}

/* All ranks together do what one device does, but for what stays whole on each: norms, sums, table rows. */
static void flops_add_up(void)
{
    struct hapt_arena arena;
    hapt_arena_init(&arena);
    const struct hapt_model *model = fixture_gpt(&arena, (struct fixture_gpt){2, 32, 4, 16, 64, 4, false, true});
    const struct hapt_graph *graph = model->graph;
    struct hapt_program *single = NULL, *program = NULL;
    CHECK_OK(hapt_program_data_parallel(graph, 0, graph->forward_count, 1, 1, &arena, &single));
    CHECK_OK(hapt_program_tensor_parallel(graph, 0, graph->forward_count, 2, 4, &arena, &program));
    for (int section = 0; program && single && section < HAPT_SECTION_REDUCE; section++) {
        double cut = 0, whole = 0;
        for (int o = 0; o < graph->op_count; o++) {
            if ((o >= graph->forward_count) != (section == HAPT_SECTION_BACKWARD)) continue;
            const struct hapt_op *op = &graph->op[o];
            const char *type = hapt_op_type_at(op->type)->name;
            const bool stays = strstr(type, "norm") || strcmp(type, "add") == 0 || strstr(type, "embedding");
            *(stays ? &whole : &cut) += hapt_op_flops(graph, op, 1);
            /* Every product and attention is cut evenly. */
            CHECK_MESSAGE(fabs(hapt_op_flops(program->shard, &program->shard->op[o], 1) * (stays ? 2 : 8) -
                               hapt_op_flops(graph, op, 1)) <= 1e-9 * hapt_op_flops(graph, op, 1),
                          "%s is not cut as it should be", op->name);
        }
        CHECK_NEAR(hapt_program_flops(single, section), cut + whole, 1e-9 * cut);
        CHECK_NEAR(8 * hapt_program_flops(program, section), cut + 4 * whole, 1e-9 * cut);
    }
    hapt_arena_release(&arena);
}

/* Korthikanti et al. 2022, equation 2, for what this graph keeps: s b h (10 + 24 / t) bytes a layer less the two dropout masks,
 * with no scores kept (the 5 a s / h term), plus the logsumexp of each head's rows and two norms' statistics in fp32. */
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
            CHECK_OK(hapt_program_tensor_parallel(graph, 1, 1 + (k + 1) * per_block, 1, tp, &arena, &program));
            CHECK_OK(hapt_memory_plan(program, &options, &arena, &plan));
            if (plan) CHECK_OK(hapt_memory_check(plan, program));
            if (plan) bytes[k] = plan->activation_bytes;
        }
        const double sb = (double)sequence * rows, sbh = sb * hidden;
        const double expected = sbh * (8 + 24.0 / tp) + 4 * sb * heads / tp + 4 * 4 * sb;
        CHECK_NEAR((double)(bytes[1] - bytes[0]), expected, 0);
    }
    hapt_arena_release(&arena);
}

/* Every range is a sound program with a sound memory plan, and the ranges of a cut do all that the whole does. */
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
            CHECK_OK(hapt_program_check(program));
            CHECK_OK(hapt_memory_plan(program, &options, &arena, &plan));
            CHECK_OK(hapt_memory_check(plan, program));
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

/* A wrong program is found: a collective left out, a bias added by all. */
static void broken_programs_are_found(void)
{
    struct hapt_arena arena;
    hapt_arena_init(&arena);
    const struct hapt_model *model = fixture_gpt(&arena, (struct fixture_gpt){1, 16, 4, 8, 32, 4, true, false});
    struct hapt_program *program = NULL;
    CHECK_OK(hapt_program_tensor_parallel(model->graph, 0, model->graph->forward_count, 1, 2, &arena, &program));
    int found = 0, tried = 0;
    for (int section = 0; program && section < HAPT_SECTION_REDUCE; section++) {
        for (int s = 0; s < program->step_count[section]; s++) {
            struct hapt_program_step *step = &program->step[section][s], kept = *step;
            if (step->kind == HAPT_STEP_COMPUTE && !step->once[1] && step->axis < 0) continue;
            if (step->kind == HAPT_STEP_COMPUTE)
                step->once[1] = 0, step->axis = -1;
            else
                step->axis = 0;
            tried++;
            found += hapt_program_check(program) != HAPT_OK;
            hapt_fail_reset();
            *step = kept;
        }
    }
    CHECK_MESSAGE(tried == 6 + 4 && found == tried, "%d of %d", found, tried);
    CHECK_OK(hapt_program_check(program));
    hapt_arena_release(&arena);
}

int main(int argc, char **argv)
{
    test_init(&argc, &argv);
    RUN(gpt_equals_one_device);
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
