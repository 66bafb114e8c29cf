/*
 * For kernels_*.c: calls kernels (of the cpu back end, or of HAPT_TEST_BACKEND) on random tensors. The tests contain
 * forward functions in double precision as references. Expected gradients are central differences of these functions,
 * so no derivative is derived by hand twice. Every test runs once per instruction-set level of this CPU (HAPT_ISA),
 * with 1 and with 2 threads.
 */
#ifndef HAPT_TEST_KERNELS_H
#define HAPT_TEST_KERNELS_H

#include <stdint.h>
#include <sys/wait.h>
#include <unistd.h>

#include "hapt/device.h"
#include "kept.h"
#include "test.h"

#define BF16_UNIT 0x1p-8 /* largest relative error of one rounding to bfloat16 */
#define HALF_UNIT(dtype) ((dtype) == HAPT_F16 ? 0x1p-11 : BF16_UNIT)

#define RANDOM_SEED 0x9e3779b97f4a7c15u
static uint64_t random_state = RANDOM_SEED;

static inline uint64_t random_bits(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

static inline double random_uniform(double low, double high)
{
    return low + (high - low) * (double)(random_bits() >> 11) * 0x1p-53;
}

static inline double f16_get(uint16_t bits)
{
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    const double value = exponent == 31 ? (fraction ? NAN : INFINITY)
                         : exponent     ? ldexp(1024 + fraction, exponent - 25)
                                        : ldexp(fraction, -24);
    return bits & 0x8000 ? -value : value;
}

/* Rounds finite values within the range, to nearest even. */
static inline uint16_t f16_set(double value)
{
    int exponent = -14;
    if (fabs(value) >= 0x1p-14) frexp(value, &exponent), exponent--;
    const int fraction =
        (int)nearbyint(ldexp(fabs(value), 10 - exponent)); /* up to 2048, which is 1024 of the next exponent */
    return (uint16_t)((signbit(value) ? 0x8000 : 0) + ((exponent + 14) << 10) + fraction);
}

/* HAPT_TEST_SHAPES=1x129x1x64,2x3x16 limits some tests to these shapes. Checkers that slow kernels down a hundred times
 * then finish in time. */
static long shapes_taken;

__attribute__((unused)) static bool shape_wanted(int dims, const int64_t *shape)
{
    char name[128];
    int length = 0;
    for (int d = 0; d < dims; d++)
        length += snprintf(name + length, sizeof name - (size_t)length, "%s%lld", d ? "x" : "", (long long)shape[d]);
    const bool wanted = test_listed(getenv("HAPT_TEST_SHAPES"), name);
    shapes_taken += wanted;
    return wanted;
}

/* A tensor on the device, with the same values in double. */
struct tensor {
    struct hapt_view view;
    int64_t count;
    double *value;
};

static inline double element_get(const struct hapt_view *view, int64_t i)
{
    if (view->dtype == HAPT_BF16) return hapt_bf16_to_f32(((const uint16_t *)view->data)[i]);
    if (view->dtype == HAPT_F16) return f16_get(((const uint16_t *)view->data)[i]);
    if (view->dtype == HAPT_I32) return ((const int32_t *)view->data)[i];
    return ((const float *)view->data)[i];
}

static inline void element_set(struct hapt_view *view, int64_t i, double value)
{
    if (view->dtype == HAPT_BF16)
        ((uint16_t *)view->data)[i] = hapt_bf16_from_f32((float)value);
    else if (view->dtype == HAPT_F16)
        ((uint16_t *)view->data)[i] = f16_set(value);
    else if (view->dtype == HAPT_I32)
        ((int32_t *)view->data)[i] = (int32_t)value;
    else
        ((float *)view->data)[i] = (float)value;
}

/* Uniform in [low, high], rounded to the type. The shape ends with 0. */
__attribute__((unused)) static struct tensor tensor_make(enum hapt_dtype dtype, const int64_t *shape, double low,
                                                         double high)
{
    struct tensor tensor = {.view = {.dtype = dtype}, .count = 1};
    for (; shape[tensor.view.dims]; tensor.view.dims++) {
        tensor.view.shape[tensor.view.dims] = shape[tensor.view.dims];
        tensor.count *= shape[tensor.view.dims];
    }
    const size_t bytes = ((size_t)tensor.count * hapt_dtype_bytes(dtype) + 127) / 64 * 64;
    tensor.view.data = aligned_alloc(64, bytes);
    tensor.value = malloc((size_t)tensor.count * sizeof(double));
    memset(tensor.view.data, 0xab, bytes); /* no kernel may change the bytes behind the tensor */
    for (int64_t i = 0; i < tensor.count; i++) {
        element_set(&tensor.view, i, random_uniform(low, high));
        tensor.value[i] = element_get(&tensor.view, i);
    }
    return tensor;
}

#define TENSOR(dtype, low, high, ...) tensor_make(dtype, (const int64_t[]){__VA_ARGS__, 0}, low, high)

__attribute__((unused)) static void tensor_free(struct tensor *tensor)
{
    free(tensor->view.data);
    free(tensor->value);
}

static inline void check_guard(const struct hapt_view *view, const char *op)
{
    const size_t used = (size_t)hapt_view_elements(view) * hapt_dtype_bytes(view->dtype);
    const unsigned char *bytes = view->data;
    for (size_t i = used; i < (used + 127) / 64 * 64; i++)
        if (!CHECK_MESSAGE(bytes[i] == 0xab, "%s wrote behind an output", op)) return;
}

static struct hapt_device *test_device;
static const struct hapt_backend *test_backend; /* HAPT_TEST_BACKEND, or cpu */

/* A case that differs from another only in its threads has the same numbers on a separate device. */
__attribute__((unused)) static bool is_repeat(bool two_threads)
{
    return two_threads && strcmp(test_backend->name, "cpu") != 0;
}

/* fp32 is checked beside the first half-precision type alone: the other would repeat it. */
static enum hapt_dtype half_now = HAPT_BF16;
__attribute__((unused)) static bool is_seen(enum hapt_dtype dtype)
{
    return dtype == HAPT_F32 && half_now != HAPT_BF16;
}

/* Rounds of random cases: a quarter of them where HAPT_TEST_QUICK asks for it. */
__attribute__((unused)) static int rounds_of(int all)
{
    return getenv("HAPT_TEST_QUICK") ? (all + 3) / 4 : all;
}

/* Operands where the kernel runs: on other back ends copies, tensors at the same address together. */
struct mirror {
    int count;
    struct {
        void *host, *device;
        size_t bytes;
    } block[HAPT_MAX_INPUTS + HAPT_MAX_OUTPUTS];
};

static inline size_t view_bytes(const struct hapt_view *view)
{
    return (size_t)hapt_view_elements(view) * hapt_dtype_bytes(view->dtype);
}

static inline bool mirror_copy(struct hapt_queue *queue, void *to, const void *from, size_t bytes)
{
    return CHECK(test_backend->copy(queue, to, from, bytes) == HAPT_OK) &&
           CHECK(test_backend->wait(test_backend->record(queue)) == HAPT_OK);
}

static inline void mirror_add(struct mirror *mirror, const struct hapt_view *view)
{
    int i = 0;
    if (!view->data) return;
    while (i < mirror->count && mirror->block[i].host != view->data) i++;
    if (i == mirror->count) mirror->block[mirror->count++].bytes = 0;
    mirror->block[i].host = view->data;
    if (view_bytes(view) > mirror->block[i].bytes) mirror->block[i].bytes = view_bytes(view);
}

static inline void *mirror_find(const struct mirror *mirror, const void *host)
{
    for (int i = 0; i < mirror->count; i++)
        if (mirror->block[i].host == host) return mirror->block[i].device;
    return NULL;
}

enum { MIRROR_GUARD = 64 };

/* Tensors with guard bytes behind them. */
static inline void mirror_fill(struct mirror *mirror, struct hapt_queue *queue)
{
    unsigned char guard[MIRROR_GUARD];
    memset(guard, 0xab, sizeof guard);
    for (int i = 0; i < mirror->count; i++) {
        const size_t bytes = mirror->block[i].bytes;
        CHECK_OK(test_backend->allocate(test_device, bytes + MIRROR_GUARD, &mirror->block[i].device));
        mirror_copy(queue, mirror->block[i].device, mirror->block[i].host, bytes);
        mirror_copy(queue, (char *)mirror->block[i].device + bytes, guard, sizeof guard);
    }
}

static inline void mirror_read(struct mirror *mirror, struct hapt_queue *queue, const char *op)
{
    for (int i = 0; i < mirror->count; i++) {
        unsigned char guard[MIRROR_GUARD];
        const size_t bytes = mirror->block[i].bytes;
        mirror_copy(queue, mirror->block[i].host, mirror->block[i].device, bytes);
        mirror_copy(queue, guard, (char *)mirror->block[i].device + bytes, sizeof guard);
        for (int g = 0; g < MIRROR_GUARD; g++)
            if (!CHECK_MESSAGE(guard[g] == 0xab, "%s wrote behind an operand", op)) break;
        test_backend->free(test_device, mirror->block[i].device);
    }
}

static inline enum hapt_status kernel_call(const struct hapt_kernel *kernel, const char *op,
                                           const struct hapt_call *call, void *workspace, struct hapt_queue *queue)
{
    struct hapt_call mirrored = *call;
    struct mirror mirror = {0};
    mirrored.workspace = workspace;
    if (strcmp(test_backend->name, "cpu") == 0) return kernel->run(&mirrored, queue);
    for (int i = 0; i < call->input_count; i++) mirror_add(&mirror, &call->input[i]);
    for (int o = 0; o < call->output_count; o++) mirror_add(&mirror, &call->output[o]);
    mirror_fill(&mirror, queue);
    for (int i = 0; i < call->input_count; i++) mirrored.input[i].data = mirror_find(&mirror, call->input[i].data);
    for (int o = 0; o < call->output_count; o++) mirrored.output[o].data = mirror_find(&mirror, call->output[o].data);
    enum hapt_status status = kernel->run(&mirrored, queue);
    const enum hapt_status waited = test_backend->wait(test_backend->record(queue));
    if (status == HAPT_OK) status = waited;
    mirror_read(&mirror, queue, op);
    return status;
}

/* Runs a kernel on a queue, with a workspace full of NaN, and waits for it. */
static inline enum hapt_status kernel_run_on(int queue_index, const char *op, enum hapt_dtype dtype,
                                             struct hapt_call *call)
{
    const struct hapt_kernel *kernel = test_backend->find_kernel(test_device, op, dtype);
    struct hapt_queue *queue = test_backend->queue(test_device, queue_index);
    if (!CHECK_MESSAGE(kernel != NULL, "no kernel %s for %s", op, hapt_dtype_name(dtype))) return HAPT_ERR_INTERNAL;
    const size_t bytes = kernel->workspace_bytes ? kernel->workspace_bytes(call) : 0, room = bytes / 64 * 64 + 128;
    unsigned char *garbage = malloc(room);
    void *workspace = NULL;
    memset(garbage, 0xff, room);
    CHECK_OK(test_backend->allocate(test_device, room, &workspace));
    mirror_copy(queue, workspace, garbage, room);
    call->workspace_bytes = bytes;
    const enum hapt_status status = kernel_call(kernel, op, call, workspace, queue);
    mirror_copy(queue, garbage, workspace, room);
    for (size_t i = bytes; i < room; i++)
        if (!CHECK_MESSAGE(garbage[i] == 0xff, "%s wrote behind its workspace", op)) break;
    test_backend->free(test_device, workspace);
    free(garbage);
    return status;
}

/* Outputs must be `guarded` tensors. */
__attribute__((unused)) static void kernel_run(const char *op, enum hapt_dtype dtype, struct hapt_call *call)
{
    CHECK_OK(kernel_run_on(0, op, dtype, call));
    for (int o = 0; o < call->output_count; o++)
        if (call->output[o].data && call->output[o].shape[0]) check_guard(&call->output[o], op);
}

/* The largest absolute error of rounding to the type near 0. */
static inline double tiny_unit(enum hapt_dtype dtype)
{
    return dtype == HAPT_F16 ? 0x1p-25 : 0;
}

/* |got - expected| <= tolerance * (largest |expected| / 2 + |expected|); NaN always fails. */
__attribute__((unused)) static void check_close(const struct hapt_view *got, const double *expected, double tolerance,
                                                const char *what)
{
    const int64_t count = hapt_view_elements(got);
    double largest = 0;
    for (int64_t i = 0; i < count; i++) largest = fmax(largest, fabs(expected[i]));
    for (int64_t i = 0; i < count; i++) {
        const double value = element_get(got, i), apart = fabs(value - expected[i]);
        if (apart <= tolerance * (0.5 * largest + fabs(expected[i])) + tiny_unit(got->dtype) + 1e-30) continue;
        CHECK_MESSAGE(false, "%s[%lld] = %.9g, not %.9g (%s)", what, (long long)i, value, expected[i],
                      hapt_dtype_name(got->dtype));
        return;
    }
    test_checks++;
}

/* A forward function in double: reads `value` of its inputs, writes out. */
struct problem {
    void (*forward)(const struct problem *problem, double *out);
    struct tensor *input[4];
    int64_t out_count;
    const double *dy; /* weights of the outputs: the scalar is sum(dy * out) */
    int64_t integer[HAPT_MAX_ATTRIBUTES];
    double real[HAPT_MAX_ATTRIBUTES];
};

static inline double problem_scalar(const struct problem *problem, double *out)
{
    problem->forward(problem, out);
    double sum = 0;
    for (int64_t i = 0; i < problem->out_count; i++) sum += problem->dy[i] * out[i];
    return sum;
}

/* Differences of the scalar with respect to `taken` elements of input `which`. The first level keeps them for the next
 * ones, which compare with the same numbers. */
static inline void central_differences(const struct problem *problem, int which, const int64_t *place, int taken,
                                       double *difference)
{
    struct tensor *input = problem->input[which];
    /* the function by its place in the program, which lies elsewhere in each process */
    uint64_t key = (uint64_t)which + HAPT_MAX_INPUTS * ((uintptr_t)problem->forward - (uintptr_t)problem_scalar);
    key = kept_hash(key, problem->dy, (size_t)problem->out_count * sizeof *problem->dy);
    key = kept_hash(key, problem->integer, sizeof problem->integer);
    key = kept_hash(key, problem->real, sizeof problem->real);
    key = kept_hash(key, place, (size_t)taken * sizeof *place);
    for (int i = 0; i < 4 && problem->input[i]; i++)
        key = kept_hash(key, problem->input[i]->value, (size_t)problem->input[i]->count * sizeof(double));
    if (kept_find(key, taken, difference)) return;
    double *out = malloc((size_t)problem->out_count * sizeof *out);
    for (int s = 0; s < taken; s++) {
        double *value = &input->value[place[s]];
        const double kept = *value, step = 1e-5;
        *value = kept + step;
        const double up = problem_scalar(problem, out);
        *value = kept - step;
        const double down = problem_scalar(problem, out);
        *value = kept;
        difference[s] = (up - down) / (2 * step);
    }
    free(out);
    kept_add(key, taken, difference);
}

/*
 * The gradient of the scalar with respect to input `which`, at up to `samples` elements, by central differences. It is
 * compared with got - base (base NULL: 0). The tolerance is relative to the largest expected gradient.
 */
__attribute__((unused)) static void check_gradient(const struct problem *problem, int which,
                                                   const struct hapt_view *got, const double *base, int samples,
                                                   double tolerance, const char *what)
{
    const int64_t count = problem->input[which]->count;
    const int taken = count < samples ? (int)count : samples;
    double *expected = malloc((size_t)taken * sizeof *expected), largest = 0;
    int64_t *place = malloc((size_t)taken * sizeof *place);
    for (int s = 0; s < taken; s++) place[s] = count <= samples ? s : (int64_t)(random_bits() % (uint64_t)count);
    central_differences(problem, which, place, taken, expected);
    for (int s = 0; s < taken; s++) {
        expected[s] += base ? base[place[s]] : 0;
        largest = fmax(largest, fabs(expected[s]));
    }
    for (int s = 0; s < taken; s++) {
        const double value = element_get(got, place[s]);
        if (!CHECK_MESSAGE(fabs(value - expected[s]) <= tolerance * largest + tiny_unit(got->dtype) + 1e-8,
                           "%s[%lld] = %.9g, not %.9g (%s)", what, (long long)place[s], value, expected[s],
                           hapt_dtype_name(got->dtype)))
            break;
    }
    free(place);
    free(expected);
}

/* Runs the whole program again at each lower level, because a process chooses its level once. */
__attribute__((unused)) static void kernels_init(int *argc, char ***argv)
{
    test_init(argc, argv);
    static const char *const levels[] = {"v2", "v3"};
    const char *asked = getenv("HAPT_TEST_BACKEND"), *reason = "";
    test_backend = hapt_backend_find(asked ? asked : "cpu");
    if (!test_backend || test_backend->device_count(&reason) == 0) {
        printf("no %s device: %s\n", asked, reason);
        exit(77);
    }
    if (!asked && !getenv("HAPT_ISA")) kept_open();
    for (int i = 0; i < 2 && !asked && !getenv("HAPT_ISA"); i++) {
        const pid_t child = fork();
        if (child == 0) {
            setenv("HAPT_ISA", levels[i], 1);
            execv((*argv)[0], *argv);
            _exit(127);
        }
        int status = -1;
        waitpid(child, &status, 0);
        kept_written();
        CHECK_MESSAGE(WIFEXITED(status) && WEXITSTATUS(status) == 0, "level %s failed", levels[i]);
    }
    CHECK_OK(test_backend->open(0, 2, 0, &test_device));
}

/* for (HALF_TYPES(half)): the half-precision types that the back end has, bf16 and perhaps fp16. */
__attribute__((unused)) static bool half_type_begin(enum hapt_dtype dtype)
{
    random_state = RANDOM_SEED;
    half_now = dtype;
    return dtype <= HAPT_F16 && test_backend->find_kernel(test_device, "linear", dtype);
}
#define HALF_TYPES(half)              \
    enum hapt_dtype half = HAPT_BF16; \
    half_type_begin(half);            \
    half++

__attribute__((unused)) static int kernels_finish(void)
{
    test_backend->close(test_device);
    if (getenv("HAPT_TEST_SHAPES"))
        CHECK_MESSAGE(shapes_taken > 0, "no test has any of the shapes %s", getenv("HAPT_TEST_SHAPES"));
    return test_finish();
}

#endif
