/* Flat kernels (optimizers, square sum, convert, zero, copy, add) and their device. */
#include "kernels.h"

static const int64_t counts[] = {1, 3, 16, 100, 5000, 40961};
#define CASES (int)(sizeof counts / sizeof *counts)

/* Decoupled AdamW of one element, in double. */
static void adamw_reference(double g, double *p, double *m, double *v, const double *real, int step)
{
    g *= real[5];
    *m = real[1] * *m + (1 - real[1]) * g;
    *v = real[2] * *v + (1 - real[2]) * g * g;
    *p *= 1 - real[0] * real[4];
    *p -= real[0] * (*m / (1 - pow(real[1], step))) / (sqrt(*v / (1 - pow(real[2], step))) + real[3]);
}

/* The type of the weights' copies in a case. */
static enum hapt_dtype half_of(int k)
{
    return k % 3 == 1 ? HAPT_F16 : HAPT_BF16;
}

static void check_half(const struct hapt_view *copy, int64_t i, float master)
{
    const uint16_t expected = copy->dtype == HAPT_F16 ? hapt_f16_from_f32(master) : hapt_bf16_from_f32(master);
    CHECK(((uint16_t *)copy->data)[i] == expected);
}

static void adamw(void)
{
    for (int k = 0; k < CASES; k++) {
        const int64_t n = counts[k];
        struct tensor p = TENSOR(HAPT_F32, -1, 1, n), m = TENSOR(HAPT_F32, 0, 0, n), v = TENSOR(HAPT_F32, 0, 0, n);
        struct tensor copy = TENSOR(HAPT_BF16, 0, 0, n);
        copy.view.dtype = half_of(k);
        struct hapt_call call = {.input_count = 1,
                                 .output_count = 4,
                                 .output = {p.view, m.view, v.view, copy.view},
                                 .real = {3e-3, 0.9, 0.95, 1e-8, 0.1, 0.5},
                                 .threads = 1 + k % 2};
        for (int step = 1; step <= 5; step++) {
            struct tensor g = TENSOR(HAPT_F32, -1, 1, n);
            call.input[0] = g.view;
            call.integer[0] = step;
            if (step == 3) call.output[3].data = NULL; /* no 16-bit copy */
            if (step == 4) call.output[3].data = copy.view.data;
            kernel_run("adamw", HAPT_F32, &call);
            for (int64_t i = 0; i < n; i++)
                adamw_reference(g.value[i], &p.value[i], &m.value[i], &v.value[i], call.real, step);
            tensor_free(&g);
        }
        check_close(&p.view, p.value, 1e-6, "adamw's weights");
        check_close(&m.view, m.value, 1e-6, "adamw's m");
        check_close(&v.view, v.value, 1e-6, "adamw's v");
        for (int64_t i = 0; i < n; i++) check_half(&copy.view, i, ((float *)p.view.data)[i]);
        tensor_free(&p);
        tensor_free(&m);
        tensor_free(&v);
        tensor_free(&copy);
    }
}

static void sgd(void)
{
    for (int k = 0; k < 2 * CASES; k++) {
        const int64_t n = counts[k / 2];
        const double momentum = k % 2 ? 0.9 : 0;
        struct tensor p = TENSOR(HAPT_F32, -1, 1, n), buffer = TENSOR(HAPT_F32, 0, 0, n),
                      copy = TENSOR(HAPT_BF16, 0, 0, n);
        copy.view.dtype = half_of(k / 2);
        struct hapt_call call = {.input_count = 1,
                                 .output_count = 3,
                                 .output = {p.view, buffer.view, copy.view},
                                 .real = {0.01, momentum, 0, 0, 0.1, 0.5},
                                 .threads = 1 + k % 2};
        if (momentum == 0) call.output[1].data = NULL;
        for (int step = 1; step <= 3; step++) {
            struct tensor g = TENSOR(HAPT_F32, -1, 1, n);
            call.input[0] = g.view;
            call.integer[0] = step;
            kernel_run("sgd", HAPT_F32, &call);
            for (int64_t i = 0; i < n; i++) {
                buffer.value[i] = momentum * buffer.value[i] + 0.5 * g.value[i];
                p.value[i] -= 0.01 * 0.1 * p.value[i] + 0.01 * buffer.value[i];
            }
            tensor_free(&g);
        }
        check_close(&p.view, p.value, 1e-6, "sgd's weights");
        for (int64_t i = 0; i < n; i++) check_half(&copy.view, i, ((float *)p.view.data)[i]);
        tensor_free(&p);
        tensor_free(&buffer);
        tensor_free(&copy);
    }
}

static void square_sum(void)
{
    for (int k = 0; k < CASES; k++) {
        struct tensor x = TENSOR(HAPT_F32, -1, 1, counts[k]);
        struct tensor place = TENSOR(HAPT_F32, 0, 0, 2); /* room for a double */
        double expected = 0, sum[2] = {0};
        for (int64_t i = 0; i < x.count; i++) expected += x.value[i] * x.value[i];
        for (int threads = 1; threads <= 2; threads++) {
            struct hapt_call call = {.input_count = 1, .output_count = 1, .input = {x.view}, .threads = threads};
            call.output[0] = place.view;
            kernel_run("square_sum", HAPT_F32, &call);
            memcpy(&sum[threads - 1], place.view.data, sizeof *sum);
        }
        CHECK_NEAR(sum[0], expected, 1e-12 * expected);
        CHECK(sum[0] == sum[1]); /* the order does not depend on the threads */
        tensor_free(&x);
        tensor_free(&place);
    }
}

static void conversions(void)
{
    for (int k = 0; k < CASES; k++) {
        struct tensor x = TENSOR(HAPT_F32, -3, 3, counts[k]), half = TENSOR(HAPT_BF16, 0, 0, counts[k]);
        struct tensor back = TENSOR(HAPT_F32, 0, 0, counts[k]);
        if (counts[k] > 2) {
            element_set(&x.view, 1, NAN);
            element_set(&x.view, 2, 3.4e38); /* rounds to infinity */
        }
        struct hapt_call down = {
            .input_count = 1, .output_count = 1, .input = {x.view}, .output = {half.view}, .threads = 2};
        kernel_run("convert", HAPT_F32, &down);
        struct hapt_call up = {
            .input_count = 1, .output_count = 1, .input = {half.view}, .output = {back.view}, .threads = 2};
        kernel_run("convert", HAPT_BF16, &up);
        for (int64_t i = 0; i < x.count; i++) {
            const float from = ((float *)x.view.data)[i];
            CHECK(isnan(from) || ((uint16_t *)half.view.data)[i] == hapt_bf16_from_f32(from));
            CHECK(isnan(from) ? isnan(((float *)back.view.data)[i])
                              : ((float *)back.view.data)[i] == hapt_bf16_to_f32(hapt_bf16_from_f32(from)));
        }
        struct hapt_call zero = {.output_count = 1, .output = {back.view}, .threads = 2};
        kernel_run("zero", HAPT_F32, &zero);
        for (int64_t i = 0; i < x.count; i++) CHECK(((float *)back.view.data)[i] == 0);
        tensor_free(&x);
        tensor_free(&half);
        tensor_free(&back);
    }
}

static void sums(void)
{
    for (int k = 0; k < 4 * CASES; k++) {
        const enum hapt_dtype dtype = k & 1 ? HAPT_BF16 : HAPT_F32;
        const int64_t n = counts[k / 4];
        struct tensor a = TENSOR(dtype, -1, 1, n), b = TENSOR(dtype, -1, 1, n), y = TENSOR(dtype, -1, 1, n);
        struct hapt_call copy = {.input_count = 1,
                                 .output_count = 1,
                                 .input = {a.view},
                                 .output = {y.view},
                                 .accumulate = k >> 1 & 1,
                                 .threads = 2};
        kernel_run("copy", dtype, &copy);
        for (int64_t i = 0; i < n; i++) y.value[i] = a.value[i] + (k & 2 ? y.value[i] : 0);
        check_close(&y.view, y.value, dtype == HAPT_F32 ? 1e-7 : BF16_UNIT, "copy");
        struct hapt_call add = {
            .input_count = 2, .output_count = 1, .input = {a.view, b.view}, .output = {y.view}, .threads = 2};
        kernel_run("add", dtype, &add);
        for (int64_t i = 0; i < n; i++) y.value[i] = a.value[i] + b.value[i];
        check_close(&y.view, y.value, dtype == HAPT_F32 ? 1e-7 : BF16_UNIT, "add");
        tensor_free(&a);
        tensor_free(&b);
        tensor_free(&y);
    }
}

static void memory_is_accounted_and_capped(void)
{
    const struct hapt_backend *cpu = hapt_backend_find("cpu");
    CHECK(cpu == hapt_backend_at(0));
    CHECK(hapt_backend_find("abacus") == NULL);
    const char *reason = NULL;
    CHECK(cpu->device_count(&reason) == 1);
    struct hapt_device *device = NULL;
    CHECK_OK(cpu->open(0, 1, 1000000, &device));
    void *a = NULL, *b = NULL, *c = NULL;
    CHECK_OK(cpu->allocate(device, 400001, &a));
    CHECK_OK(cpu->allocate(device, 500000, &b));
    CHECK(cpu->memory_used(device) == 900001 && cpu->memory_peak(device) == 900001);
    CHECK((uintptr_t)a % 64 == 0 && (uintptr_t)b % 64 == 0);
    for (int i = 0; i < 400001; i += 997) CHECK(((char *)a)[i] == 0);
    CHECK_FAILS(cpu->allocate(device, 100000, &c), HAPT_ERR_MEMORY);
    CHECK(c == NULL && cpu->memory_used(device) == 900001);
    cpu->free(device, a);
    CHECK(cpu->memory_used(device) == 500000 && cpu->memory_peak(device) == 900001);
    CHECK_OK(cpu->allocate(device, 500000, &c));
    CHECK(cpu->memory_used(device) == 1000000 && cpu->memory_peak(device) == 1000000);
    struct hapt_queue *queue = cpu->queue(device, 0);
    CHECK_OK(cpu->copy(queue, c, "text", 5));
    struct hapt_event *event = cpu->record(queue);
    CHECK(cpu->done(event));
    CHECK_OK(cpu->wait(event));
    CHECK(!strcmp(c, "text"));
    cpu->close(device);
    CHECK_OK(cpu->open(0, 1, 0, &device)); /* no memory limit; a block on huge pages */
    CHECK_OK(cpu->allocate(device, (size_t)5 << 20, &a));
    CHECK(cpu->memory_peak(device) == (size_t)5 << 20);
    cpu->close(device);
    CHECK_FAILS(cpu->open(1, 1, 0, &device), HAPT_ERR_INTERNAL);
    CHECK(cpu->find_kernel(test_device, "no_such_operator", HAPT_F32) == NULL);
}

int main(int argc, char **argv)
{
    kernels_init(&argc, &argv);
    RUN(adamw);
    RUN(sgd);
    RUN(square_sum);
    RUN(conversions);
    RUN(sums);
    RUN(memory_is_accounted_and_capped);
    return kernels_finish();
}
