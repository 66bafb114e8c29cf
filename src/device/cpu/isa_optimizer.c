/* Optimizer updates and sums of squares, on flat fp32 arrays, in place. */
#include <math.h>

#include "isa.h"

typedef double dvector __attribute__((vector_size(8 * LANES)));

/* fp16 copies are those of GPUs whose parameters the host updates. */
static void copy_f16(const float *master, uint16_t *copy, int64_t first, int64_t end)
{
    for (int64_t i = first; i < end; i++) copy[i] = hapt_f16_from_f32(master[i]);
}

/*
 * AdamW with decoupled decay. Factors near 1 are applied as p - p * small: rounding (1 - small) to fp32 would bias
 * every step the same way.
 */
static enum hapt_status adamw_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    (void)queue;
    const float *grad = call->input[0].data;
    float *master = call->output[0].data, *m = call->output[1].data, *v = call->output[2].data;
    uint16_t *copy = call->output_count > 3 ? call->output[3].data : NULL; /* may be NULL */
    const bool bf16 = copy && call->output[3].dtype == HAPT_BF16;
    const int64_t elements = hapt_view_elements(&call->input[0]);
    const double lr = call->real[0], beta1 = call->real[1], beta2 = call->real[2], step = (double)call->integer[0];
    const float rate = (float)(lr / (1.0 - pow(beta1, step))), decay = (float)(lr * call->real[4]);
    const float root = (float)(1.0 / sqrt(1.0 - pow(beta2, step))), epsilon = (float)call->real[3];
    const float rest1 = (float)(1.0 - beta1), rest2 = (float)(1.0 - beta2), scale = (float)call->real[5];
#pragma omp parallel for schedule(static) num_threads(threads_for(call, elements))
    for (int64_t first = 0; first < elements; first += CHUNK) {
        const int64_t end = smaller(elements, first + CHUNK);
        for (int64_t i = first; i < end; i += LANES) {
            const int64_t left = end - i;
            const vector g = load(grad, i, left, false) * scale;
            vector first_moment = load(m, i, left, false), second = load(v, i, left, false);
            first_moment += (g - first_moment) * rest1;
            second += (g * g - second) * rest2;
            vector p = load(master, i, left, false);
            p -= p * decay;
            p -= first_moment * rate / (vector_sqrt(second) * root + epsilon);
            store(m, i, left, false, first_moment);
            store(v, i, left, false, second);
            store(master, i, left, false, p);
            if (bf16) store(copy, i, left, true, p);
        }
        if (copy && !bf16) copy_f16(master, copy, first, end);
    }
    return HAPT_OK;
}

/* Decoupled decay: buffer = momentum * buffer + g (from 0, so the first buffer is g); p -= lr (buffer + decay p). */
static enum hapt_status sgd_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    (void)queue;
    const float *grad = call->input[0].data;
    float *master = call->output[0].data, *buffer = call->output_count > 1 ? call->output[1].data : NULL;
    uint16_t *copy = call->output_count > 2 ? call->output[2].data : NULL;
    const bool bf16 = copy && call->output[2].dtype == HAPT_BF16;
    const int64_t elements = hapt_view_elements(&call->input[0]);
    const float lr = (float)call->real[0], momentum = (float)call->real[1], scale = (float)call->real[5];
    const float decay = (float)(call->real[0] * call->real[4]);
#pragma omp parallel for schedule(static) num_threads(threads_for(call, elements))
    for (int64_t first = 0; first < elements; first += CHUNK) {
        const int64_t end = smaller(elements, first + CHUNK);
        for (int64_t i = first; i < end; i += LANES) {
            const int64_t left = end - i;
            vector g = load(grad, i, left, false) * scale;
            if (buffer) {
                g += load(buffer, i, left, false) * momentum;
                store(buffer, i, left, false, g);
            }
            vector p = load(master, i, left, false);
            p -= p * decay;
            p -= g * lr;
            store(master, i, left, false, p);
            if (bf16) store(copy, i, left, true, p);
        }
        if (copy && !bf16) copy_f16(master, copy, first, end);
    }
    return HAPT_OK;
}

/* In double, over at most 64 chunks whose bounds depend on the length alone. */
static enum hapt_status square_sum_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    (void)queue;
    const float *x = call->input[0].data;
    double *out = call->output[0].data, partial[64] = {0};
    const int64_t elements = hapt_view_elements(&call->input[0]);
    const int64_t even = (elements + 63) / 64, chunk = even > CHUNK ? (even + LANES - 1) / LANES * LANES : CHUNK;
    const int64_t chunks = (elements + chunk - 1) / chunk;
#pragma omp parallel for schedule(static) num_threads(threads_for(call, elements))
    for (int64_t k = 0; k < chunks; k++) {
        dvector sum[2] = {{0}};
        const int64_t end = smaller(elements, (k + 1) * chunk);
        for (int64_t i = k * chunk; i < end; i += 2 * LANES)
            for (int part = 0; part < 2; part++) {
                const int64_t at = smaller(end, i + part * LANES);
                const dvector value = __builtin_convertvector(load(x, at, end - at, false), dvector);
                sum[part] += value * value;
            }
        sum[0] += sum[1];
        for (int l = 0; l < LANES; l++) partial[k] += sum[0][l];
    }
    double total = call->accumulate & 1u ? *out : 0;
    for (int64_t k = 0; k < chunks; k++) total += partial[k];
    *out = total;
    return HAPT_OK;
}

const struct cpu_kernel ISA_NAME(hapt_cpu_optimizer)[] = {
    {HAPT_F32, {"adamw", NULL, adamw_run}},
    {HAPT_F32, {"sgd", NULL, sgd_run}},
    {HAPT_F32, {"square_sum", NULL, square_sum_run}},
    {HAPT_F32, {NULL, NULL, NULL}},
};
