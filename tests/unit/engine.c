/* The engine on one rank: cuts, shards, gradients, memory, updates. */
#include "fixture.h"
#include "memory_check.h"
#include "programs.h"

#include "hapt/engine.h"

enum { BATCHES = 3, SLOTS = 2, STAGES = 4 };

struct stage {
    struct hapt_program *program;
    struct hapt_engine *engine;
    struct hapt_device *device;
};

static const struct hapt_backend *cpu(void)
{
    return hapt_backend_find("cpu");
}

static enum hapt_status open_stage(const struct hapt_graph *graph, int first, int end, int shards, size_t cap,
                                   struct hapt_arena *arena, struct stage *stage)
{
    *stage = (struct stage){0};
    CHECK_OK(program_data_parallel(graph, first, end, 1, shards, arena, &stage->program));
    CHECK_OK(cpu()->open(0, 1, cap, &stage->device));
    const struct hapt_engine_options options = {
        .backend = cpu(), .device = stage->device, .threads = 1, .state_count = 2, .slots = SLOTS};
    return hapt_engine_create(stage->program, &options, &stage->engine);
}

static void close_stage(struct stage *stage)
{
    hapt_engine_destroy(stage->engine);
    cpu()->close(stage->device);
}

/* Deterministic data: rows of a microbatch depend on the microbatch only. */
static void fill_input(const struct hapt_model *model, int batch, enum hapt_tensor_role role, int32_t *value)
{
    uint64_t random = (uint64_t)(100 * batch + (int)role);
    for (int i = 0; i < model->microbatch * model->sequence; i++)
        value[i] = (int32_t)(hapt_random_next(&random) % (uint64_t)model->vocab);
    if (role == HAPT_ROLE_TARGETS) value[1] = -100;
}

/* Copies rows [shard, shard + 1) / shards of a microbatch to the engine. */
static void feed(const struct hapt_model *model, struct stage *stage, int batch, int slot, int shard)
{
    int32_t value[4096];
    for (int t = 0; t < model->graph->tensor_count; t++) {
        const struct hapt_tensor *tensor = &model->graph->tensor[t];
        void *place = hapt_engine_tensor(stage->engine, t, slot);
        if (tensor->kind != HAPT_TENSOR_INPUT || !place) continue;
        if (tensor->role == HAPT_ROLE_LOSS_SCALE) {
            *(float *)place = 1.0f / 64;
            continue;
        }
        fill_input(model, batch, tensor->role, value);
        const size_t bytes = hapt_engine_tensor_bytes(stage->engine, t);
        memcpy(place, (const char *)value + (size_t)shard * bytes, bytes);
    }
}

static void set_parameters(const struct hapt_model *model, struct stage *stage, double factor)
{
    for (int t = 0; t < model->graph->tensor_count; t++) {
        const struct hapt_tensor *tensor = &model->graph->tensor[t];
        if (tensor->kind != HAPT_TENSOR_PARAMETER || stage->program->local[t] < 0) continue;
        const size_t count = (size_t)hapt_tensor_elements(tensor);
        float *value = malloc(count * sizeof *value);
        uint64_t random = hapt_hash(7, tensor->name, strlen(tensor->name));
        for (size_t i = 0; i < count; i++)
            value[i] =
                (float)((tensor->init == HAPT_INIT_ONE ? 1.0 : 0.0) + factor * (hapt_random_unit(&random) - 0.5));
        CHECK_OK(hapt_engine_set(stage->engine, t, -1, value));
        free(value);
    }
}

/* Sends a boundary tensor from the stage that wrote it last to a transfer slot. */
static void transfer(const struct hapt_graph *graph, struct stage *stage, int stages, int to, bool forward, int slot,
                     int staged)
{
    const struct hapt_boundary *in = forward ? &stage[to].program->forward_in : &stage[to].program->backward_in;
    for (int b = 0; b < in->count; b++) {
        const int tensor = in->tensor[b];
        const void *from = NULL;
        for (int s = 0; s < stages; s++) {
            const struct hapt_program *program = stage[s].program;
            const struct hapt_boundary *out = forward ? &program->forward_out : &program->backward_out;
            for (int o = 0; o < out->count; o++) {
                if (out->tensor[o] != tensor || (forward ? s >= to : s <= to || from)) continue;
                from = forward ? hapt_engine_tensor(stage[s].engine, tensor, slot)
                               : hapt_engine_staging(stage[s].engine, HAPT_STAGING_BACKWARD_OUT, staged, o);
            }
        }
        CHECK_MESSAGE(from != NULL, "no stage sends %s", graph->tensor[tensor].name);
        if (!from) continue;
        const enum hapt_staging_kind kind = forward ? HAPT_STAGING_FORWARD_IN : HAPT_STAGING_BACKWARD_IN;
        memcpy(hapt_engine_staging(stage[to].engine, kind, staged, b), from,
               hapt_engine_tensor_bytes(stage[to].engine, tensor));
    }
}

static double forward_all(const struct hapt_model *model, struct stage *stage, int stages, int batch)
{
    const int slot = batch % SLOTS, staged = batch % HAPT_TRANSFER_SLOTS;
    for (int s = 0; s < stages; s++) {
        feed(model, &stage[s], batch, slot, 0);
        transfer(model->graph, stage, stages, s, true, slot, staged);
        CHECK_OK(hapt_engine_forward(stage[s].engine, slot, staged));
    }
    return *(float *)hapt_engine_tensor(stage[stages - 1].engine, model->graph->loss, slot);
}

static void backward_all(const struct hapt_model *model, struct stage *stage, int stages, int batch)
{
    const int slot = batch % SLOTS, staged = batch % HAPT_TRANSFER_SLOTS;
    for (int s = stages - 1; s >= 0; s--) {
        transfer(model->graph, stage, stages, s, false, slot, staged);
        CHECK_OK(hapt_engine_backward(stage[s].engine, slot, staged, staged));
    }
}

/* One step with two microbatches in flight, as in 1F1B. */
static void run_step(const struct hapt_model *model, struct stage *stage, int stages, double *loss)
{
    for (int s = 0; s < stages; s++) CHECK_OK(hapt_engine_begin_step(stage[s].engine));
    loss[0] = forward_all(model, stage, stages, 0);
    for (int b = 1; b < BATCHES; b++) {
        loss[b] = forward_all(model, stage, stages, b);
        backward_all(model, stage, stages, b - 1);
    }
    backward_all(model, stage, stages, BATCHES - 1);
}

static const float *gradient_of(const struct hapt_graph *graph, struct stage *stage, int tensor)
{
    const int gradient = graph->tensor[tensor].gradient;
    if (stage->program->local[tensor] < 0 || gradient < 0) return NULL;
    return hapt_engine_tensor(stage->engine, gradient, 0);
}

/* Largest difference between the parameter gradients of a cut or sharded model and those of the whole model, relative
 * to the largest gradient of the tensor. */
static double worst_difference(const struct hapt_graph *graph, struct stage *whole, struct stage *part, int parts)
{
    double worst = 0;
    for (int t = 0; t < graph->tensor_count; t++) {
        if (graph->tensor[t].kind != HAPT_TENSOR_PARAMETER) continue;
        const float *expected = gradient_of(graph, whole, t);
        double scale = 1e-6, apart = 0;
        for (int64_t i = 0; i < hapt_tensor_elements(&graph->tensor[t]); i++) {
            double sum = 0;
            for (int p = 0; p < parts; p++) {
                const float *mine = gradient_of(graph, &part[p], t);
                if (mine) sum += mine[i];
            }
            scale = fmax(scale, fabs((double)expected[i]));
            apart = fmax(apart, fabs(sum - (double)expected[i]));
        }
        worst = fmax(worst, apart / scale);
    }
    return worst;
}

static void cut_at(const struct hapt_model *model, const int *cut, int stages, struct stage *whole, const double *loss,
                   double tolerance)
{
    struct hapt_arena arena;
    struct stage stage[STAGES];
    double mine[BATCHES];
    hapt_arena_init(&arena);
    for (int s = 0; s < stages; s++) {
        CHECK_OK(open_stage(model->graph, cut[s], cut[s + 1], 1, 0, &arena, &stage[s]));
        set_parameters(model, &stage[s], 0.3);
    }
    run_step(model, stage, stages, mine);
    for (int b = 0; b < BATCHES; b++) CHECK_NEAR(mine[b], loss[b], 0);
    const double apart = worst_difference(model->graph, whole, stage, stages);
    CHECK_MESSAGE(apart <= tolerance, "cut at %d: gradients differ by %g", cut[1], apart);
    for (int s = 0; s < stages; s++) close_stage(&stage[s]);
    hapt_arena_release(&arena);
}

/* Equal bits if embeddings are untied. Tied gradients are added in another order, which differs by rounding. */
static void cuts(void)
{
    for (int tied = 0; tied < 2; tied++) {
        struct hapt_arena arena;
        struct stage whole;
        double loss[BATCHES];
        hapt_arena_init(&arena);
        const struct hapt_model *model = fixture_gpt(&arena, (struct fixture_gpt){2, 16, 2, 8, 24, 4, tied, false});
        const int end = model->graph->forward_count;
        CHECK_OK(open_stage(model->graph, 0, end, 1, 0, &arena, &whole));
        set_parameters(model, &whole, 0.3);
        run_step(model, &whole, 1, loss);
        CHECK(loss[0] > 1 && isfinite(loss[0]) && loss[0] != loss[1]);
        const double tolerance = tied ? 1e-6 : 0;
        for (int k = 1; k < end; k++) cut_at(model, (int[]){0, k, end}, 2, &whole, loss, tolerance);
        for (int k = 3; k + 7 < end; k += 2)
            cut_at(model, (int[]){0, k - 1, k + 3, k + 6, end}, 4, &whole, loss, tolerance);
        close_stage(&whole);
        hapt_arena_release(&arena);
    }
}

/* Shards of the rows: their gradients and losses add up to those of the whole, apart from the order of fp32
 * additions. */
static void shards(void)
{
    struct hapt_arena arena;
    struct stage whole, part[4];
    double loss[BATCHES];
    hapt_arena_init(&arena);
    const struct hapt_model *model = fixture_gpt(&arena, (struct fixture_gpt){2, 16, 2, 8, 24, 4, true, false});
    const int end = model->graph->forward_count;
    CHECK_OK(open_stage(model->graph, 0, end, 1, 0, &arena, &whole));
    set_parameters(model, &whole, 0.3);
    run_step(model, &whole, 1, loss);
    for (int k = 2; k <= 4; k *= 2) {
        double sum[BATCHES] = {0};
        for (int p = 0; p < k; p++) {
            CHECK_OK(open_stage(model->graph, 0, end, k, 0, &arena, &part[p]));
            set_parameters(model, &part[p], 0.3);
            CHECK_OK(hapt_engine_begin_step(part[p].engine));
            for (int b = 0; b < BATCHES; b++) {
                feed(model, &part[p], b, 0, p);
                CHECK_OK(hapt_engine_forward(part[p].engine, 0, -1));
                sum[b] += *(float *)hapt_engine_tensor(part[p].engine, model->graph->loss, 0);
                CHECK_OK(hapt_engine_backward(part[p].engine, 0, -1, -1));
            }
        }
        for (int b = 0; b < BATCHES; b++) CHECK_NEAR(sum[b], loss[b], 1e-6 * loss[b]);
        const double apart = worst_difference(model->graph, &whole, part, k);
        CHECK_MESSAGE(apart < 1e-5, "%d shards: gradients differ by %g", k, apart);
        for (int p = 0; p < k; p++) close_stage(&part[p]);
    }
    close_stage(&whole);
    hapt_arena_release(&arena);
}

static double loss_at(const struct hapt_model *model, struct stage *stage, int tensor, const float *base,
                      const float *direction, double step)
{
    float value[4096];
    const int64_t count = hapt_tensor_elements(&model->graph->tensor[tensor]);
    for (int64_t i = 0; i < count; i++) value[i] = (float)(base[i] + step * (double)direction[i]);
    CHECK_OK(hapt_engine_set(stage->engine, tensor, -1, value));
    CHECK_OK(hapt_engine_forward(stage->engine, 0, -1));
    return *(float *)hapt_engine_tensor(stage->engine, model->graph->loss, 0);
}

/* Directional derivatives of every parameter, compared with central differences of fourth order. The loss (about 100)
 * is in fp32 with a rounding of 4e-6. The step changes it by about 0.5, so the relative error is 1e-5. Rounding in the
 * forward pass raises it to 7e-5 of the derivative along the gradient here, and to 3e-4 with other roundings. */
static void finite_differences(void)
{
    struct hapt_arena arena;
    struct stage stage;
    hapt_arena_init(&arena);
    const struct hapt_model *model = fixture_gpt(&arena, (struct fixture_gpt){2, 16, 2, 8, 24, 4, true, false});
    const struct hapt_graph *graph = model->graph;
    CHECK_OK(open_stage(graph, 0, graph->forward_count, 1, 0, &arena, &stage));
    set_parameters(model, &stage, 0.5);
    feed(model, &stage, 0, 0, 0);
    CHECK_OK(hapt_engine_begin_step(stage.engine));
    CHECK_OK(hapt_engine_forward(stage.engine, 0, -1));
    CHECK_OK(hapt_engine_backward(stage.engine, 0, -1, -1));
    int checked = 0;
    for (int t = 0; t < graph->tensor_count; t++) {
        if (graph->tensor[t].kind != HAPT_TENSOR_PARAMETER) continue;
        const int64_t count = hapt_tensor_elements(&graph->tensor[t]);
        const float *gradient = gradient_of(graph, &stage, t);
        float base[4096], direction[4096];
        double norm = 0;
        CHECK(count <= 4096 && gradient != NULL);
        CHECK_OK(hapt_engine_get(stage.engine, t, -1, base));
        for (int64_t i = 0; i < count; i++) norm += (double)gradient[i] * (double)gradient[i];
        norm = sqrt(norm);
        for (int64_t i = 0; i < count; i++) direction[i] = (float)((double)gradient[i] / norm);
        const double step = fmin(0.05, 0.01 / norm);
        const double near =
            loss_at(model, &stage, t, base, direction, step) - loss_at(model, &stage, t, base, direction, -step);
        const double far = loss_at(model, &stage, t, base, direction, 2 * step) -
                           loss_at(model, &stage, t, base, direction, -2 * step);
        const double derivative = (8 * near - far) / (12 * step) / 64;
        loss_at(model, &stage, t, base, direction, 0);
        const double apart = fabs(derivative - norm) / norm;
        CHECK_MESSAGE(apart < 3e-4, "%s: %g by differences, %g by the engine", graph->tensor[t].name, derivative, norm);
        checked++;
    }
    CHECK(checked == 2 * 12 + 4);
    close_stage(&stage);
    hapt_arena_release(&arena);
}

static void memory_is_the_plan(void)
{
    struct hapt_arena arena;
    struct stage stage;
    hapt_arena_init(&arena);
    const struct hapt_model *model = fixture_gpt(&arena, (struct fixture_gpt){2, 16, 2, 8, 24, 4, true, true});
    const int end = model->graph->forward_count;
    double loss[BATCHES];
    CHECK_OK(open_stage(model->graph, 0, end, 1, 0, &arena, &stage));
    const struct hapt_memory_plan *plan = hapt_engine_memory(stage.engine);
    const size_t total = plan->total_bytes;
    CHECK_OK(memory_check(plan, stage.program));
    CHECK(plan->copy_offset != (size_t)-1);
    set_parameters(model, &stage, 0.3);
    run_step(model, &stage, 1, loss);
    CHECK(cpu()->memory_used(stage.device) == total && cpu()->memory_peak(stage.device) == total);
    CHECK(total == plan->parameter_bytes + SLOTS * plan->activation_bytes);
    close_stage(&stage);
    CHECK_OK(open_stage(model->graph, 0, end, 1, total, &arena, &stage));
    close_stage(&stage);
    CHECK_FAILS(open_stage(model->graph, 0, end, 1, total - 1, &arena, &stage), HAPT_ERR_MEMORY);
    cpu()->close(stage.device);
    hapt_arena_release(&arena);
}

/* AdamW compared with its formula in double precision. Decay applies to matrices only. Compute copies are updated as
 * well. */
static void updates(void)
{
    for (int bf16 = 0; bf16 < 2; bf16++) {
        struct hapt_arena arena;
        struct stage stage, fresh;
        double loss[BATCHES], again[BATCHES], square;
        hapt_arena_init(&arena);
        const struct hapt_model *model = fixture_gpt(&arena, (struct fixture_gpt){1, 16, 2, 8, 24, 4, true, bf16});
        const struct hapt_graph *graph = model->graph;
        CHECK_OK(open_stage(graph, 0, graph->forward_count, 1, 0, &arena, &stage));
        CHECK_OK(open_stage(graph, 0, graph->forward_count, 1, 0, &arena, &fresh));
        set_parameters(model, &stage, 0.3);
        run_step(model, &stage, 1, loss);
        double expected_square = 0;
        struct {
            float before[1024], gradient[1024], after[1024], moment[1024];
        } kept[32];
        int kept_count = 0;
        for (int t = 0; t < graph->tensor_count; t++) {
            if (graph->tensor[t].kind != HAPT_TENSOR_PARAMETER) continue;
            const int64_t count = hapt_tensor_elements(&graph->tensor[t]);
            CHECK_OK(hapt_engine_get(stage.engine, t, -1, kept[kept_count].before));
            memcpy(kept[kept_count].gradient, gradient_of(graph, &stage, t), (size_t)count * sizeof(float));
            for (int64_t i = 0; i < count; i++)
                expected_square += (double)kept[kept_count].gradient[i] * (double)kept[kept_count].gradient[i];
            kept_count++;
        }
        CHECK_OK(hapt_engine_square_sum(stage.engine, NULL, &square));
        CHECK_NEAR(square, expected_square, 1e-12 * expected_square);
        double *weight = calloc((size_t)stage.program->tensor_count, sizeof *weight);
        CHECK_OK(hapt_engine_square_sum(stage.engine, weight, &square));
        CHECK_NEAR(square, 0, 0);
        free(weight);
        const struct hapt_update update = {.optimizer = HAPT_OPTIMIZER_ADAMW,
                                           .learning_rate = 0.01,
                                           .beta1 = 0.9,
                                           .beta2 = 0.95,
                                           .epsilon = 1e-8,
                                           .weight_decay = 0.1,
                                           .gradient_scale = 0.5,
                                           .step = 1};
        for (int part = 2; part >= 0; part--) CHECK_OK(hapt_engine_update(stage.engine, part, 3, &update));
        for (int t = 0, k = 0; t < graph->tensor_count; t++) {
            if (graph->tensor[t].kind != HAPT_TENSOR_PARAMETER) continue;
            CHECK_OK(hapt_engine_get(stage.engine, t, -1, kept[k].after));
            CHECK_OK(hapt_engine_get(stage.engine, t, 0, kept[k].moment));
            const double decay = graph->tensor[t].dims >= 2 ? 0.1 : 0;
            for (int64_t i = 0; i < hapt_tensor_elements(&graph->tensor[t]); i++) {
                const double g = 0.5 * (double)kept[k].gradient[i], w = kept[k].before[i];
                const double expected = w - 0.01 * decay * w - 0.01 * g / (fabs(g) + 1e-8);
                CHECK_NEAR(kept[k].after[i], expected, 1e-6);
                CHECK_NEAR(kept[k].moment[i], 0.1 * g, 1e-6 * fabs(g) + 1e-12);
            }
            CHECK_OK(hapt_engine_set(fresh.engine, t, -1, kept[k++].after));
        }
        run_step(model, &stage, 1, loss);
        run_step(model, &fresh, 1, again);
        for (int b = 0; b < BATCHES; b++) CHECK_NEAR(loss[b], again[b], 0);
        close_stage(&stage);
        close_stage(&fresh);
        hapt_arena_release(&arena);
    }
}

/* Freezing a weight (for example one whose bias is trained) changes no other gradient, and overwrites neither the
 * weight nor any state. A kernel that makes both gradients still needs memory for the frozen one's. */
static void frozen_weights_stay(void)
{
    for (int bf16 = 0; bf16 < 2; bf16++) {
        struct hapt_arena arena;
        struct stage free_stage, stage;
        double loss[BATCHES], again[BATCHES], square, expected = 0;
        hapt_arena_init(&arena);
        const struct fixture_gpt shape = {1, 16, 2, 8, 24, 4, false, bf16};
        const struct hapt_model *whole = fixture_gpt(&arena, shape), *model = fixture_gpt(&arena, shape);
        struct hapt_graph *graph = model->graph;
        graph->op_count = graph->forward_count; /* build the backward part again, with frozen weights */
        graph->tensor_count = hapt_graph_find_tensor(graph, "loss_scale");
        static const char *const frozen[] = {"wte.weight", "h.0.attn.c_attn.weight", "h.0.mlp.c_fc.weight",
                                             "ln_f.weight", "h.0.ln_2.bias"};
        for (int k = 0; k < 5; k++) graph->tensor[hapt_graph_find_tensor(graph, frozen[k])].trainable = false;
        CHECK_OK(hapt_graph_differentiate(graph));
        CHECK_OK(hapt_graph_check(graph));
        CHECK_OK(open_stage(whole->graph, 0, whole->graph->forward_count, 1, 0, &arena, &free_stage));
        CHECK_OK(open_stage(graph, 0, graph->forward_count, 1, 0, &arena, &stage));
        CHECK_OK(memory_check(hapt_engine_memory(stage.engine), stage.program));
        set_parameters(whole, &free_stage, 0.3);
        set_parameters(model, &stage, 0.3);
        run_step(whole, &free_stage, 1, loss);
        run_step(model, &stage, 1, again);
        for (int b = 0; b < BATCHES; b++) CHECK_NEAR(loss[b], again[b], 0);
        for (int t = 0; t < graph->tensor_count; t++) {
            const struct hapt_tensor *tensor = &graph->tensor[t];
            if (tensor->kind != HAPT_TENSOR_PARAMETER) continue;
            const int64_t count = hapt_tensor_elements(tensor);
            float before[1024], value[1024];
            if (tensor->trainable) {
                const float *mine = gradient_of(graph, &stage, t);
                const float *theirs =
                    gradient_of(whole->graph, &free_stage, hapt_graph_find_tensor(whole->graph, tensor->name));
                for (int64_t i = 0; i < count; i++) expected += (double)mine[i] * (double)mine[i];
                CHECK_MESSAGE(!memcmp(mine, theirs, (size_t)count * sizeof *mine), "gradient of %s", tensor->name);
                for (int s = 0; s < 2; s++) {
                    CHECK_OK(hapt_engine_get(stage.engine, t, s, value));
                    for (int64_t i = 0; i < count; i++) CHECK_NEAR(value[i], 0, 0);
                }
            }
            CHECK_OK(hapt_engine_get(stage.engine, t, -1, value));
            CHECK_OK(
                hapt_engine_get(free_stage.engine, hapt_graph_find_tensor(whole->graph, tensor->name), -1, before));
            CHECK_MESSAGE(!memcmp(before, value, (size_t)count * sizeof *value), "weight %s", tensor->name);
        }
        CHECK_OK(hapt_engine_square_sum(stage.engine, NULL, &square));
        CHECK_NEAR(square, expected, 1e-12 * expected);
        close_stage(&free_stage);
        close_stage(&stage);
        hapt_arena_release(&arena);
    }
}

static const struct hapt_kernel *lacking(const struct hapt_device *device, const char *op, enum hapt_dtype dtype)
{
    return strcmp(op, "gelu") == 0 ? NULL : cpu()->find_kernel(device, op, dtype);
}

static void a_missing_kernel_is_named(void)
{
    struct hapt_arena arena;
    hapt_arena_init(&arena);
    const struct hapt_model *model = fixture_gpt(&arena, (struct fixture_gpt){1, 16, 2, 8, 24, 4, true, false});
    struct hapt_backend backend = *cpu();
    struct hapt_program *program = NULL;
    struct hapt_engine *engine = NULL;
    struct hapt_engine_options options = {.backend = &backend, .threads = 1, .state_count = 2, .slots = 1};
    backend.find_kernel = lacking;
    CHECK_OK(program_data_parallel(model->graph, 0, model->graph->forward_count, 1, 1, &arena, &program));
    CHECK_OK(backend.open(0, 1, 0, &options.device));
    const enum hapt_status status = hapt_engine_create(program, &options, &engine);
    CHECK(status == HAPT_ERR_INPUT && strstr(hapt_fail_message(), "gelu") != NULL);
    CHECK(backend.memory_peak(options.device) == 0);
    hapt_fail_reset();
    backend.close(options.device);
    hapt_arena_release(&arena);
}

int main(int argc, char **argv)
{
    test_init(&argc, &argv);
    RUN(cuts);
    RUN(shards);
    RUN(finite_differences);
    RUN(memory_is_the_plan);
    RUN(updates);
    RUN(frozen_weights_stay);
    RUN(a_missing_kernel_is_named);
    return test_finish();
}
