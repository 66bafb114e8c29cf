/* gemm_peak fp32|bf16 THREADS [SIZE]: the rate of large matrix products, the yardstick of `make bench`. Prints JSON. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hapt/device.h"
#include "hapt/env.h"

int main(int argc, char **argv)
{
    enum { ROUNDS = 8 };
    enum hapt_dtype dtype;
    const int64_t size = argc == 4 ? atoi(argv[3]) : 2048;
    if (argc < 3 || argc > 4 || !hapt_dtype_parse(argv[1], &dtype) || atoi(argv[2]) < 1 || size < 1) {
        fprintf(stderr, "usage: gemm_peak fp32|bf16 THREADS [SIZE]\n");
        return 2;
    }
    const struct hapt_backend *backend = hapt_backend_find("cpu");
    struct hapt_device *device = NULL;
    if (backend->open(0, atoi(argv[2]), 0, &device) != HAPT_OK) return 5;
    const struct hapt_kernel *kernel = backend->find_kernel(device, "linear", dtype);
    struct hapt_call call = {.input_count = 3, .output_count = 1, .threads = atoi(argv[2])};
    struct hapt_view *view[3] = {&call.input[0], &call.input[1], &call.output[0]};
    for (int i = 0; i < 3; i++) {
        *view[i] = (struct hapt_view){.dtype = dtype, .dims = i == 1 ? 2 : 3, .shape = {1, size, size}};
        if (i == 1) view[i]->shape[0] = size;
        if (backend->allocate(device, (size_t)(size * size) * hapt_dtype_bytes(dtype), &view[i]->data) != HAPT_OK)
            return 5;
    }
    call.input[2] = (struct hapt_view){.dtype = dtype, .dims = 1, .shape = {size}};
    call.workspace_bytes = kernel->workspace_bytes ? kernel->workspace_bytes(&call) : 0;
    if (backend->allocate(device, call.workspace_bytes + 64, &call.workspace) != HAPT_OK) return 5;
    double best = 1e30;
    for (int round = 0; round <= ROUNDS; round++) {
        const double start = hapt_time_s();
        if (kernel->run(&call, backend->queue(device, 0)) != HAPT_OK) return 8;
        const double took = hapt_time_s() - start;
        if (round > 0 && took < best) best = took; /* the first round warms up */
    }
    printf("{\"dtype\": \"%s\", \"flops\": %.6e}\n", argv[1], 2.0 * (double)(size * size * size) / best);
    return 0;
}
