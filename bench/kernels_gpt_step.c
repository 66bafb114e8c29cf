/*
 * One training step of the reference GPT (4 layers, d 256, 4 heads, T 128, batch 8, vocabulary 512, tied, AdamW) as
 * plain kernel calls on one device. Prints time by operator, GFLOP/s of matrix products and tokens per second.
 *
 *     build/release/bench/kernels_gpt_step [--dtype fp32|bf16] [--threads N] [--steps N] [--serve]
 *
 * --serve: runs a block of steps for every line on standard input and prints one JSON line. So a caller can interleave
 * two programs on a shared machine.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "hapt/device.h"

enum { LAYERS = 4, WIDTH = 256, HEADS = 4, LENGTH = 128, BATCH = 8, VOCABULARY = 512, WIDE = 4 * WIDTH };
enum { MAX_PARAMETERS = 64, MAX_CALLS = 512, MAX_OPERATORS = 48 };

static const struct hapt_backend *backend;
static struct hapt_device *device;
static struct hapt_queue *queue;
static enum hapt_dtype compute;
static int threads;

static void stop_on(enum hapt_status status)
{
    if (status == HAPT_OK) return;
    fprintf(stderr, "%s\n", hapt_fail_message());
    exit((int)status);
}

static double clock_s(clockid_t id)
{
    struct timespec now;
    clock_gettime(id, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static struct hapt_view view_of(enum hapt_dtype dtype, int dims, int64_t a, int64_t b, int64_t c)
{
    static char *arena;
    static size_t used, size = (size_t)400 << 20;
    struct hapt_view view = {.dtype = dtype, .dims = dims, .shape = {a, b, c}};
    if (!arena) {
        void *memory = NULL;
        stop_on(backend->allocate(device, size, &memory));
        arena = memory;
    }
    view.data = arena + used;
    used += ((size_t)hapt_view_elements(&view) * hapt_dtype_bytes(dtype) + 63) / 64 * 64;
    if (used > size) abort();
    return view;
}

static struct hapt_view rows_of(int64_t columns)
{
    return view_of(compute, 3, BATCH, LENGTH, columns);
}

static struct hapt_view per_row(void)
{
    return view_of(HAPT_F32, 2, BATCH, LENGTH, 0);
}

/* Master weight, moments and gradient in fp32. Kernels read `weight`. */
struct parameter {
    struct hapt_view master, m, v, gradient, weight;
};

static struct parameter parameter[MAX_PARAMETERS];
static int parameter_count;

static struct parameter *parameter_make(int dims, int64_t a, int64_t b, double value, double spread)
{
    struct parameter *p = &parameter[parameter_count++];
    p->master = view_of(HAPT_F32, dims, a, b, 0);
    p->m = view_of(HAPT_F32, dims, a, b, 0);
    p->v = view_of(HAPT_F32, dims, a, b, 0);
    p->weight = compute == HAPT_F32 ? p->master : view_of(compute, dims, a, b, 0);
    float *to = p->master.data;
    for (int64_t i = 0; i < hapt_view_elements(&p->master); i++) {
        to[i] = (float)(value + spread * (2.0 * (double)rand() / RAND_MAX - 1));
        if (compute == HAPT_BF16) ((uint16_t *)p->weight.data)[i] = hapt_bf16_from_f32(to[i]);
    }
    return p;
}

/* The step: a list of bound calls, as in the engine. */
static struct bound {
    const struct hapt_kernel *kernel;
    struct hapt_call call;
    double flops,
        best_s; /* best: least seconds of this call in a block of steps, because other programs only make it slower */
    int label;
} bound[MAX_CALLS];
static int bound_count;
static struct {
    const char *name;
    double seconds, flops;
} label[MAX_OPERATORS];
static int label_count;
static size_t workspace_bytes;

#define VIEWS(...)             \
    (const struct hapt_view[]) \
    {                          \
        __VA_ARGS__            \
    }
static const struct hapt_view none;

static struct hapt_call *bind(const char *op, const char *name, int inputs, const struct hapt_view *input, int outputs,
                              const struct hapt_view *output)
{
    struct bound *b = &bound[bound_count++];
    b->kernel = backend->find_kernel(device, op, compute);
    if (!b->kernel) b->kernel = backend->find_kernel(device, op, HAPT_F32);
    if (!b->kernel) {
        fprintf(stderr, "no kernel %s\n", op);
        exit(1);
    }
    b->call = (struct hapt_call){.input_count = inputs, .output_count = outputs, .threads = threads};
    memcpy(b->call.input, input, (size_t)inputs * sizeof *input);
    memcpy(b->call.output, output, (size_t)outputs * sizeof *output);
    while (b->label < label_count && strcmp(label[b->label].name, name)) b->label++;
    if (b->label == label_count) label[label_count++].name = name;
    if (!strncmp(op, "linear", 6))
        b->flops = 2.0 * BATCH * LENGTH; /* multiplied by the number of elements of the weight */
    if (!strncmp(op, "attention", 9))
        b->flops = (outputs == 2 ? 4.0 : 10.0) * BATCH * LENGTH * (LENGTH + 1) / 2 * WIDTH;
    return &b->call;
}

static void bind_linear(const char *op, const char *name, struct hapt_view x, struct parameter *w, struct parameter *b,
                        struct hapt_view y)
{
    bind(op, name, 3, VIEWS(x, w->weight, b ? b->weight : none), 1, &y);
    bound[bound_count - 1].flops *= (double)hapt_view_elements(&w->master);
}

/* dw, db, then dx. */
static void bind_linear_backward(bool transposed, const char *name_dx, const char *name_dw, struct hapt_view x,
                                 struct parameter *w, struct parameter *b, struct hapt_view dy, struct hapt_view dx)
{
    struct hapt_call *call = bind(transposed ? "linear_t_dw" : "linear_dw", name_dw, 2, VIEWS(x, dy), b ? 2 : 1,
                                  VIEWS(w->gradient, b ? b->gradient : none));
    call->accumulate = 3;
    bound[bound_count - 1].flops *= (double)hapt_view_elements(&w->master);
    bind(transposed ? "linear_t_dx" : "linear_dx", name_dx, 2, VIEWS(dy, w->weight), 1, &dx);
    bound[bound_count - 1].flops *= (double)hapt_view_elements(&w->master);
}

struct norm {
    struct parameter *gamma, *beta;
    struct hapt_view y, mean, rstd;
};

static struct norm bind_norm(struct hapt_view x)
{
    struct norm norm = {parameter_make(1, WIDTH, 0, 1, 0), parameter_make(1, WIDTH, 0, 0, 0), rows_of(WIDTH), per_row(),
                        per_row()};
    bind("layer_norm", "layer_norm", 3, VIEWS(x, norm.gamma->weight, norm.beta->weight), 3,
         VIEWS(norm.y, norm.mean, norm.rstd))
        ->real[0] = 1e-5;
    return norm;
}

static void bind_norm_backward(const struct norm *norm, struct hapt_view x, struct hapt_view dy, struct hapt_view dx,
                               unsigned accumulate)
{
    bind("layer_norm_backward", "layer_norm_backward", 5, VIEWS(x, norm->gamma->weight, norm->mean, norm->rstd, dy), 3,
         VIEWS(dx, norm->gamma->gradient, norm->beta->gradient))
        ->accumulate = 6 | accumulate;
}

struct block {
    struct norm norm1, norm2;
    struct parameter *qkv_w, *qkv_b, *out_w, *out_b, *up_w, *up_b, *down_w, *down_b;
    struct hapt_view input, qkv, attended, lse, middle, up, active, output;
};

static void block_forward(struct block *k, struct hapt_view x)
{
    k->input = x;
    k->norm1 = bind_norm(x);
    k->qkv_w = parameter_make(2, WIDTH, 3 * WIDTH, 0, 0.06), k->qkv_b = parameter_make(1, 3 * WIDTH, 0, 0, 0);
    k->out_w = parameter_make(2, WIDTH, WIDTH, 0, 0.06), k->out_b = parameter_make(1, WIDTH, 0, 0, 0);
    k->up_w = parameter_make(2, WIDTH, WIDE, 0, 0.06), k->up_b = parameter_make(1, WIDE, 0, 0, 0);
    k->down_w = parameter_make(2, WIDE, WIDTH, 0, 0.03), k->down_b = parameter_make(1, WIDTH, 0, 0, 0);
    k->qkv = rows_of(3 * WIDTH), k->attended = rows_of(WIDTH), k->lse = view_of(HAPT_F32, 3, BATCH, HEADS, LENGTH);
    k->middle = rows_of(WIDTH), k->up = rows_of(WIDE), k->active = rows_of(WIDE), k->output = rows_of(WIDTH);
    const struct hapt_view projected = rows_of(WIDTH), down = rows_of(WIDTH);
    bind_linear("linear", "linear", k->norm1.y, k->qkv_w, k->qkv_b, k->qkv);
    struct hapt_call *attention = bind("attention", "attention", 1, &k->qkv, 2, VIEWS(k->attended, k->lse));
    attention->integer[0] = HEADS, attention->integer[1] = 1;
    bind_linear("linear", "linear", k->attended, k->out_w, k->out_b, projected);
    bind("add", "add", 2, VIEWS(x, projected), 1, &k->middle);
    k->norm2 = bind_norm(k->middle);
    bind_linear("linear", "linear", k->norm2.y, k->up_w, k->up_b, k->up);
    bind("gelu", "gelu", 1, &k->up, 1, &k->active);
    bind_linear("linear", "linear", k->active, k->down_w, k->down_b, down);
    bind("add", "add", 2, VIEWS(k->middle, down), 1, &k->output);
}

/* `dx` holds the gradient of the block's output, then that of its input. Residual branches share it. */
static void block_backward(const struct block *k, struct hapt_view dx)
{
    const struct hapt_view dactive = rows_of(WIDE), dup = rows_of(WIDE), dnorm = rows_of(WIDTH),
                           dqkv = rows_of(3 * WIDTH);
    bind_linear_backward(false, "linear_dx", "linear_dw", k->active, k->down_w, k->down_b, dx, dactive);
    bind("gelu_dx", "gelu_dx", 2, VIEWS(k->up, dactive), 1, &dup);
    bind_linear_backward(false, "linear_dx", "linear_dw", k->norm2.y, k->up_w, k->up_b, dup, dnorm);
    bind_norm_backward(&k->norm2, k->middle, dnorm, dx, 1);
    bind_linear_backward(false, "linear_dx", "linear_dw", k->attended, k->out_w, k->out_b, dx, dnorm);
    struct hapt_call *attention =
        bind("attention_backward", "attention_backward", 4, VIEWS(k->qkv, k->attended, k->lse, dnorm), 1, &dqkv);
    attention->integer[0] = HEADS, attention->integer[1] = 1;
    bind_linear_backward(false, "linear_dx", "linear_dw", k->norm1.y, k->qkv_w, k->qkv_b, dqkv, dnorm);
    bind_norm_backward(&k->norm1, k->input, dnorm, dx, 1);
}

static struct hapt_view tokens, targets, loss, squares, loss_scale, gradients;

static void bind_updates(void)
{
    for (int i = 0; i < parameter_count; i++) {
        struct hapt_view sum = squares;
        sum.data = (double *)squares.data + i;
        bind("square_sum", "square_sum", 1, &parameter[i].gradient, 1, &sum);
    }
    for (int i = 0; i < parameter_count; i++) {
        struct parameter *p = &parameter[i];
        struct hapt_call *call = bind("adamw", "adamw", 1, &p->gradient, 4,
                                      VIEWS(p->master, p->m, p->v, compute == HAPT_F32 ? none : p->weight));
        const double real[6] = {3e-4, 0.9, 0.95, 1e-8, p->master.dims > 1 ? 0.1 : 0, 1};
        memcpy(call->real, real, sizeof real);
        call->integer[0] = 1;
    }
}

static void bind_step(void)
{
    static struct block block[LAYERS];
    struct parameter *table = parameter_make(2, VOCABULARY, WIDTH, 0, 0.03);
    struct parameter *position = parameter_make(2, LENGTH, WIDTH, 0, 0.03);
    tokens = view_of(HAPT_I32, 2, BATCH, LENGTH, 0), targets = view_of(HAPT_I32, 2, BATCH, LENGTH, 0);
    loss = view_of(HAPT_F32, 0, 0, 0, 0), loss_scale = view_of(HAPT_F32, 0, 0, 0, 0);
    squares = view_of(HAPT_F32, 1, 2 * MAX_PARAMETERS, 0, 0);
    *(float *)loss_scale.data = 1.0f / (BATCH * LENGTH);
    gradients = view_of(HAPT_F32, 1, 0, 0, 0); /* filled in once all parameters are known */
    bind("zero", "zero", 0, NULL, 1, &gradients);
    struct hapt_view x = rows_of(WIDTH);
    bind("embedding", "embedding", 3, VIEWS(tokens, table->weight, position->weight), 1, &x);
    for (int l = 0; l < LAYERS; l++) {
        block_forward(&block[l], x);
        x = block[l].output;
    }
    const struct norm norm = bind_norm(x);
    const struct hapt_view logits = rows_of(VOCABULARY), lse = per_row(), dlogits = rows_of(VOCABULARY);
    const struct hapt_view dnorm = rows_of(WIDTH), dx = rows_of(WIDTH);
    int64_t total = 0;
    for (int i = 0; i < parameter_count; i++) {
        struct parameter *p = &parameter[i];
        p->gradient = view_of(HAPT_F32, p->master.dims, p->master.shape[0], p->master.shape[1], 0);
        total = ((float *)p->gradient.data - (float *)parameter[0].gradient.data) + hapt_view_elements(&p->gradient);
    }
    gradients = parameter[0].gradient;
    gradients.dims = 1, gradients.shape[0] = total;
    bound[0].call.output[0] = gradients;
    bind_linear("linear_t", "linear", norm.y, table, NULL, logits);
    bind("cross_entropy", "cross_entropy", 2, VIEWS(logits, targets), 2, VIEWS(loss, lse));
    bind("cross_entropy_dx", "cross_entropy_dx", 4, VIEWS(logits, targets, lse, loss_scale), 1, &dlogits);
    bind_linear_backward(true, "linear_dx", "linear_dw", norm.y, table, NULL, dlogits, dnorm);
    bind_norm_backward(&norm, x, dnorm, dx, 0);
    for (int l = LAYERS - 1; l >= 0; l--) block_backward(&block[l], dx);
    bind("embedding_dw", "embedding_dw", 2, VIEWS(tokens, dx), 2, VIEWS(table->gradient, position->gradient));
    bind_updates();
}

static void prepare(void)
{
    for (int i = 0; i < bound_count; i++) {
        const size_t bytes = bound[i].kernel->workspace_bytes ? bound[i].kernel->workspace_bytes(&bound[i].call) : 0;
        if (bytes > workspace_bytes) workspace_bytes = bytes;
    }
    void *workspace = NULL;
    stop_on(backend->allocate(device, workspace_bytes + 64, &workspace));
    for (int i = 0; i < bound_count; i++) {
        bound[i].call.workspace = workspace;
        bound[i].call.workspace_bytes = workspace_bytes;
    }
    for (int i = 0; i < BATCH * LENGTH; i++) {
        ((int32_t *)tokens.data)[i] = rand() % VOCABULARY;
        ((int32_t *)targets.data)[i] = rand() % VOCABULARY;
    }
}

static double step(int64_t number)
{
    const double start = clock_s(CLOCK_MONOTONIC);
    double before = start;
    for (int i = 0; i < bound_count; i++) {
        if (!strcmp(bound[i].kernel->op, "adamw")) bound[i].call.integer[0] = number;
        stop_on(bound[i].kernel->run(&bound[i].call, queue));
        const double now = clock_s(CLOCK_MONOTONIC);
        if (now - before < bound[i].best_s) bound[i].best_s = now - before;
        before = now;
    }
    return before - start;
}

#if defined __x86_64__
#include <immintrin.h>

/* fp32 GFLOP/s of one core: twelve independent chains of fused multiply-adds, the best of many short rounds. */
__attribute__((target("avx512f"))) static double fma_round_wide(int64_t rounds)
{
    __m512 chain[12];
    const __m512 factor = _mm512_set1_ps(0.9999f), term = _mm512_set1_ps(1e-3f);
    for (int i = 0; i < 12; i++) chain[i] = _mm512_set1_ps((float)i);
    const double start = clock_s(CLOCK_MONOTONIC);
    for (int64_t r = 0; r < rounds; r++)
#pragma GCC unroll 12
        for (int i = 0; i < 12; i++) chain[i] = _mm512_fmadd_ps(chain[i], factor, term);
    const double seconds = clock_s(CLOCK_MONOTONIC) - start;
    for (int i = 1; i < 12; i++) chain[0] = _mm512_add_ps(chain[0], chain[i]);
    volatile float kept = _mm512_cvtss_f32(chain[0]);
    (void)kept;
    return 12.0 * 32 * (double)rounds / seconds * 1e-9;
}

__attribute__((target("avx2,fma"))) static double fma_round(int64_t rounds)
{
    __m256 chain[12];
    const __m256 factor = _mm256_set1_ps(0.9999f), term = _mm256_set1_ps(1e-3f);
    for (int i = 0; i < 12; i++) chain[i] = _mm256_set1_ps((float)i);
    const double start = clock_s(CLOCK_MONOTONIC);
    for (int64_t r = 0; r < rounds; r++)
#pragma GCC unroll 12
        for (int i = 0; i < 12; i++) chain[i] = _mm256_fmadd_ps(chain[i], factor, term);
    const double seconds = clock_s(CLOCK_MONOTONIC) - start;
    for (int i = 1; i < 12; i++) chain[0] = _mm256_add_ps(chain[0], chain[i]);
    volatile float kept = _mm256_cvtss_f32(chain[0]);
    (void)kept;
    return 12.0 * 16 * (double)rounds / seconds * 1e-9;
}

static double core_peak(void)
{
    double best = 0;
    for (int i = 0; i < 40; i++) {
        const double rate = __builtin_cpu_supports("avx512f")                                 ? fma_round_wide(100000)
                            : __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? fma_round(100000)
                                                                                              : 0;
        best = rate > best ? rate : best;
    }
    return best;
}
#else
static double core_peak(void)
{
    return 0;
}
#endif

static int ascending(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static void run_block(int64_t first, int steps, bool table)
{
    double *wall = malloc((size_t)steps * sizeof *wall);
    for (int i = 0; i < label_count; i++) label[i].seconds = label[i].flops = 0;
    for (int i = 0; i < bound_count; i++) bound[i].best_s = INFINITY;
    const double cpu = clock_s(CLOCK_PROCESS_CPUTIME_ID);
    for (int s = 0; s < steps; s++) wall[s] = step(first + s);
    const double cpu_s = (clock_s(CLOCK_PROCESS_CPUTIME_ID) - cpu) / steps;
    qsort(wall, (size_t)steps, sizeof *wall, ascending);
    double all = 0;
    for (int i = 0; i < bound_count; i++) {
        label[bound[i].label].seconds += bound[i].best_s;
        label[bound[i].label].flops += bound[i].flops;
    }
    for (int i = 0; i < label_count; i++) all += label[i].seconds;
    if (table) {
        const double peak = core_peak() * threads;
        double flops = 0;
        for (int i = 0; i < bound_count; i++) flops += bound[i].flops;
        fprintf(stderr, "%-20s %8.3f ms (best of %d of every call), %.1f GFLOP/s", "all", all * 1e3, steps,
                flops / all * 1e-9);
        if (peak > 0)
            fprintf(stderr, ", %.0f %% of the fp32 peak of %d cores (%.0f)", flops / all * 1e-7 / peak, threads, peak);
        fprintf(stderr, "\n");
    }
    for (int i = 0; table && i < label_count; i++)
        fprintf(stderr, "%-20s %8.3f ms  %5.1f %%  %7.1f GFLOP/s\n", label[i].name, label[i].seconds * 1e3,
                100 * label[i].seconds / all, label[i].flops / label[i].seconds * 1e-9);
    printf(
        "{\"peer\":\"hapt kernels\",\"dtype\":\"%s\",\"threads\":%d,\"wall_s\":%.6f,\"wall_min_s\":%.6f,\"cpu_s\":%.6f,"
        "\"tokens_per_s\":%.1f,\"loss\":%.6f}\n",
        hapt_dtype_name(compute), threads, wall[steps / 2], wall[0], cpu_s, BATCH * LENGTH / wall[steps / 2],
        *(float *)loss.data / (BATCH * LENGTH));
    fflush(stdout);
    free(wall);
}

/*
 * libgomp's threads spin for up to 20 ms at a barrier before they sleep. If other programs want the cores, a step then
 * takes several times as long. libgomp reads the setting when it is loaded, so the program starts itself again.
 */
static void spin_briefly(char **argv)
{
    if (getenv("GOMP_SPINCOUNT") || getenv("OMP_WAIT_POLICY")) return;
    setenv("GOMP_SPINCOUNT", "1000", 1);
    execv("/proc/self/exe", argv); /* on failure: continue without the setting */
}

int main(int argc, char **argv)
{
    spin_briefly(argv);
    int steps = 20;
    bool serve = false;
    compute = HAPT_F32;
    threads = 2;
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--serve"))
            serve = true;
        else if (i + 1 < argc && !strcmp(argv[i], "--threads"))
            threads = atoi(argv[++i]);
        else if (i + 1 < argc && !strcmp(argv[i], "--steps"))
            steps = atoi(argv[++i]);
        else if (i + 1 < argc && !strcmp(argv[i], "--dtype") && hapt_dtype_parse(argv[i + 1], &compute))
            i++;
        else
            return fprintf(stderr, "unknown option %s\n", argv[i]), 2;
    }
    backend = hapt_backend_find("cpu");
    stop_on(backend->open(0, threads, 0, &device));
    queue = backend->queue(device, 0);
    bind_step();
    prepare();
    for (int s = 1; s <= 3; s++) step(s);
    if (!serve) run_block(4, steps, true);
    char line[64];
    for (int64_t block = 0; serve && fgets(line, sizeof line, stdin); block++)
        run_block(4 + block * steps, steps, false);
    backend->close(device);
    return 0;
}
