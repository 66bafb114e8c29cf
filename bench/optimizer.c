/*
 * optimizer THREADS [ELEMENTS]: the bandwidth of the CPU's AdamW update beside that of the memory, in turns. Prints
 * JSON.
 *
 * An update with bf16 weights reads 16 bytes an element (gradient, both moments, master weight) and writes 14. The
 * memory is measured by a loop that only reads and adds in place, whose lines are fetched once as well: a[i] += s *
 * b[i], 12 bytes an element.
 */
#include <stdio.h>
#include <stdlib.h>

#include "hapt/device.h"
#include "hapt/env.h"

enum { ARRAYS = 5, ROUNDS = 9 };

static int compare(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double add_s(float *restrict a, const float *restrict b, int64_t elements, int threads)
{
    const double start_s = hapt_time_s();
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t i = 0; i < elements; i++) a[i] += 1e-6f * b[i];
    return hapt_time_s() - start_s;
}

int main(int argc, char **argv)
{
    const int threads = argc > 1 ? atoi(argv[1]) : 0;
    const int64_t elements = argc == 3 ? atoll(argv[2]) : 1 << 25;
    if (argc < 2 || argc > 3 || threads < 1 || elements < 1) {
        fprintf(stderr, "usage: optimizer THREADS [ELEMENTS]\n");
        return 2;
    }
    const struct hapt_backend *backend = hapt_backend_find("cpu");
    struct hapt_device *device = NULL;
    if (backend->open(0, threads, 0, &device) != HAPT_OK) return 5;
    const struct hapt_kernel *kernel = backend->find_kernel(device, "adamw", HAPT_F32);
    struct hapt_call call = {.input_count = 1, .output_count = 4, .threads = threads, .integer = {1}};
    const double setting[] = {1e-3, 0.9, 0.95, 1e-8, 0.1, 1};
    for (int k = 0; k < 6; k++) call.real[k] = setting[k];
    struct hapt_view *view[ARRAYS] = {&call.input[0], &call.output[0], &call.output[1], &call.output[2],
                                      &call.output[3]};
    for (int k = 0; k < ARRAYS; k++) {
        *view[k] = (struct hapt_view){.dtype = k == 4 ? HAPT_BF16 : HAPT_F32, .dims = 1, .shape = {elements}};
        if (backend->allocate(device, (size_t)elements * hapt_dtype_bytes(view[k]->dtype), &view[k]->data) != HAPT_OK)
            return 5;
    }
    double update_rate[ROUNDS], memory_rate[ROUNDS], ratio[ROUNDS];
    for (int round = -1; round < ROUNDS; round++) { /* the first warms up */
        const double memory_s = add_s(call.output[0].data, call.input[0].data, elements, threads);
        const double start_s = hapt_time_s();
        if (kernel->run(&call, backend->queue(device, 0)) != HAPT_OK) return 8;
        const double update_s = hapt_time_s() - start_s;
        if (round < 0) continue;
        memory_rate[round] = 12.0 * (double)elements / memory_s;
        update_rate[round] = 30.0 * (double)elements / update_s;
        ratio[round] = update_rate[round] / memory_rate[round];
    }
    qsort(ratio, ROUNDS, sizeof *ratio, compare);
    qsort(update_rate, ROUNDS, sizeof *update_rate, compare);
    qsort(memory_rate, ROUNDS, sizeof *memory_rate, compare);
    printf("{\"threads\": %d, \"update_bytes_per_s\": %.4e, \"memory_bytes_per_s\": %.4e, \"ratio\": %.4f, \"least\": "
           "%.4f}\n",
           threads, update_rate[ROUNDS / 2], memory_rate[ROUNDS / 2], ratio[ROUNDS / 2], ratio[0]);
    return 0;
}
