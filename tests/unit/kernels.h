/*
 * For kernels_*.c: calls of cpu kernels on random tensors, checked against double-precision forward functions written
 * in the tests. Expected gradients are central differences of those forward functions, never a second derivation by
 * hand. Every test runs once per instruction-set level that this CPU has (HAPT_ISA), with 1 and with 2 threads.
 */
#ifndef HAPT_TEST_KERNELS_H
#define HAPT_TEST_KERNELS_H

#include <stdint.h>
#include <sys/wait.h>
#include <unistd.h>

#include "hapt/device.h"
#include "test.h"

#define BF16_UNIT 0x1p-8 /* one rounding to bfloat16 errs by at most this, relatively */

static uint64_t random_state = 0x9e3779b97f4a7c15u;

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

/* A tensor on the device and the same values in double. */
struct tensor {
    struct hapt_view view;
    int64_t count;
    double *value;
};

static inline double element_get(const struct hapt_view *view, int64_t i)
{
    if (view->dtype == HAPT_BF16) return hapt_bf16_to_f32(((const uint16_t *)view->data)[i]);
    if (view->dtype == HAPT_I32) return ((const int32_t *)view->data)[i];
    return ((const float *)view->data)[i];
}

static inline void element_set(struct hapt_view *view, int64_t i, double value)
{
    if (view->dtype == HAPT_BF16)
        ((uint16_t *)view->data)[i] = hapt_bf16_from_f32((float)value);
    else if (view->dtype == HAPT_I32)
        ((int32_t *)view->data)[i] = (int32_t)value;
    else
        ((float *)view->data)[i] = (float)value;
}

/* Uniform in [low, high], rounded to the type; shape ends with 0. */
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
    memset(tensor.view.data, 0xab, bytes); /* the bytes behind the tensor must survive every kernel */
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

/* Runs a kernel with a workspace full of NaN; outputs must be `guarded` tensors. */
__attribute__((unused)) static void kernel_run(const char *op, enum hapt_dtype dtype, struct hapt_call *call)
{
    const struct hapt_backend *cpu = hapt_backend_find("cpu");
    const struct hapt_kernel *kernel = cpu->find_kernel(test_device, op, dtype);
    if (!CHECK_MESSAGE(kernel != NULL, "no kernel %s for %s", op, hapt_dtype_name(dtype))) return;
    const size_t bytes = kernel->workspace_bytes ? kernel->workspace_bytes(call) : 0, room = bytes / 64 * 64 + 128;
    unsigned char *workspace = aligned_alloc(64, room);
    memset(workspace, 0xff, room);
    call->workspace = workspace;
    call->workspace_bytes = bytes;
    CHECK_OK(kernel->run(call, cpu->queue(test_device, 0)));
    for (size_t i = bytes; i < room; i++)
        if (!CHECK_MESSAGE(workspace[i] == 0xff, "%s wrote behind its workspace", op)) break;
    for (int o = 0; o < call->output_count; o++)
        if (call->output[o].data && call->output[o].shape[0]) check_guard(&call->output[o], op);
    free(workspace);
}

/* |got - expected| <= tolerance * (largest |expected| / 2 + |expected|); a NaN is never accepted. */
__attribute__((unused)) static void check_close(const struct hapt_view *got, const double *expected, double tolerance,
                                                const char *what)
{
    const int64_t count = hapt_view_elements(got);
    double largest = 0;
    for (int64_t i = 0; i < count; i++) largest = fmax(largest, fabs(expected[i]));
    for (int64_t i = 0; i < count; i++) {
        const double value = element_get(got, i), apart = fabs(value - expected[i]);
        if (apart <= tolerance * (0.5 * largest + fabs(expected[i])) + 1e-30) continue;
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
    int64_t integer[4];
    double real[4];
};

static inline double problem_scalar(const struct problem *problem, double *out)
{
    problem->forward(problem, out);
    double sum = 0;
    for (int64_t i = 0; i < problem->out_count; i++) sum += problem->dy[i] * out[i];
    return sum;
}

/*
 * Gradient of the scalar with respect to input `which`, at up to `samples` places, by central differences; compared
 * with got - base (base NULL: 0). Tolerance is relative to the largest expected gradient.
 */
__attribute__((unused)) static void check_gradient(const struct problem *problem, int which,
                                                   const struct hapt_view *got, const double *base, int samples,
                                                   double tolerance, const char *what)
{
    struct tensor *input = problem->input[which];
    double *out = malloc((size_t)problem->out_count * sizeof *out);
    const int64_t count = input->count;
    const int taken = count < samples ? (int)count : samples;
    double *expected = malloc((size_t)taken * sizeof *expected), largest = 0;
    int64_t *place = malloc((size_t)taken * sizeof *place);
    for (int s = 0; s < taken; s++) {
        const int64_t i = place[s] = count <= samples ? s : (int64_t)(random_bits() % (uint64_t)count);
        const double kept = input->value[i], step = 1e-5;
        input->value[i] = kept + step;
        const double up = problem_scalar(problem, out);
        input->value[i] = kept - step;
        const double down = problem_scalar(problem, out);
        input->value[i] = kept;
        expected[s] = (up - down) / (2 * step) + (base ? base[i] : 0);
        largest = fmax(largest, fabs(expected[s]));
    }
    for (int s = 0; s < taken; s++) {
        const double value = element_get(got, place[s]);
        if (!CHECK_MESSAGE(fabs(value - expected[s]) <= tolerance * largest + 1e-8, "%s[%lld] = %.9g, not %.9g (%s)",
                           what, (long long)place[s], value, expected[s], hapt_dtype_name(got->dtype)))
            break;
    }
    free(place);
    free(expected);
    free(out);
}

/* Runs the whole program again at each lower level: levels are chosen once per process. */
__attribute__((unused)) static void kernels_init(int *argc, char ***argv)
{
    test_init(argc, argv);
    static const char *const levels[] = {"v2", "v3"};
    for (int i = 0; i < 2 && !getenv("HAPT_ISA"); i++) {
        const pid_t child = fork();
        if (child == 0) {
            setenv("HAPT_ISA", levels[i], 1);
            execv((*argv)[0], *argv);
            _exit(127);
        }
        int status = -1;
        waitpid(child, &status, 0);
        CHECK_MESSAGE(WIFEXITED(status) && WEXITSTATUS(status) == 0, "level %s failed", levels[i]);
    }
    CHECK_OK(hapt_backend_find("cpu")->open(0, 2, 0, &test_device));
}

__attribute__((unused)) static int kernels_finish(void)
{
    hapt_backend_find("cpu")->close(test_device);
    return test_finish();
}

#endif
