/* Sample values for timing. */
#include "samples.h"

#include <stdlib.h>
#include <string.h>

#include "hapt/env.h"
#include "hapt/progress.h"

/* Plausible weights: values do not change the time, except infinities and denormals. */
static enum hapt_status fill_parameter(struct hapt_engine *engine, const struct hapt_graph *graph, int tensor,
                                       float *value)
{
    const struct hapt_tensor *parameter = &graph->tensor[tensor], published = hapt_tensor_published(parameter);
    uint64_t random = (uint64_t)tensor;
    for (int64_t i = 0; i < hapt_tensor_elements(&published); i++) {
        if (parameter->init == HAPT_INIT_NORMAL)
            value[i] = (float)(parameter->init_std * 3.4 * (hapt_random_unit(&random) - 0.5));
        else
            value[i] = parameter->init == HAPT_INIT_ONE ? 1.0f : 0.0f;
    }
    hapt_parameter_pack(parameter, parameter->shape[0], value);
    return hapt_engine_set(engine, tensor, -1, value);
}

static enum hapt_status fill_input(const struct hapt_model *model, const struct hapt_engine_options *options,
                                   const struct hapt_graph *graph, struct hapt_engine *engine, int tensor)
{
    const struct hapt_tensor *input = &graph->tensor[tensor];
    const size_t bytes = hapt_engine_tensor_bytes(engine, tensor);
    const struct hapt_backend *backend = options->backend;
    struct hapt_queue *queue = backend->queue(options->device, 0);
    void *place = hapt_engine_tensor(engine, tensor, 0);
    if (hapt_role_is_scalar(input->role)) {
        const float scalar = input->role == HAPT_ROLE_LOSS_SCALE ? 1.0f / (float)hapt_model_items(model) : 1;
        HAPT_TRY(backend->copy(queue, place, &scalar, sizeof scalar));
        return backend->wait(backend->record(queue));
    }
    union {
        int32_t index;
        float pixel;
    } *value = malloc(bytes); /* integers; images and fields of real numbers */
    if (!value) return hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory for %zu bytes of samples", bytes);
    const int field = input->role == HAPT_ROLE_FIELD ? hapt_model_find_field(model, input->name) : -1;
    const uint64_t values = (uint64_t)(field >= 0           ? hapt_model_field_limit(model, field)
                                       : model->classes > 0 ? model->classes
                                                            : model->vocab);
    uint64_t random = 1;
    for (size_t i = 0; i < bytes / sizeof *value; i++) {
        if (input->role == HAPT_ROLE_POSITIONS)
            value[i].index = (int32_t)(i % (uint64_t)model->sequence); /* one document a row */
        else if (input->dtype == HAPT_I32)
            value[i].index = (int32_t)(hapt_random_next(&random) % values);
        else
            value[i].pixel = (float)(2 * hapt_random_unit(&random) - 1);
    }
    const enum hapt_status status = backend->copy(queue, place, value, bytes),
                           done = backend->wait(backend->record(queue));
    free(value);
    return status != HAPT_OK ? status : done;
}

enum hapt_status samples_fill_boundary(const struct hapt_engine_options *options, const struct hapt_program *program,
                                       struct hapt_engine *engine, enum hapt_staging_kind kind, int transfer,
                                       const struct hapt_boundary *boundary)
{
    for (int i = 0; i < boundary->count; i++) {
        const struct hapt_tensor *tensor = &program->graph->tensor[boundary->tensor[i]];
        const size_t bytes = hapt_engine_tensor_bytes(engine, boundary->tensor[i]);
        char *value = calloc(bytes + sizeof(float), 1);
        uint64_t random = 2;
        if (!value) return hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory for %zu bytes of samples", bytes);
        /* Indices stay 0. */
        for (size_t at = 0; tensor->dtype != HAPT_I32 && at < bytes; at += hapt_dtype_bytes(tensor->dtype)) {
            const float number = (float)(hapt_random_unit(&random) - 0.5);
            const uint16_t half = tensor->dtype == HAPT_F16 ? hapt_f16_from_f32(number) : hapt_bf16_from_f32(number);
            if (tensor->dtype == HAPT_F32)
                memcpy(value + at, &number, sizeof number);
            else
                memcpy(value + at, &half, sizeof half);
        }
        const enum hapt_status status = options->backend->copy(
            options->backend->queue(options->device, 0), hapt_engine_staging(engine, kind, transfer, i), value, bytes);
        const enum hapt_status done =
            options->backend->wait(options->backend->record(options->backend->queue(options->device, 0)));
        free(value);
        HAPT_TRY(status);
        HAPT_TRY(done);
    }
    return HAPT_OK;
}

enum hapt_status samples_fill(const struct hapt_model *model, const struct hapt_engine_options *options,
                              const struct hapt_program *program, struct hapt_engine *engine)
{
    const struct hapt_graph *graph = program->graph;
    int64_t largest = 0;
    for (int t = 0; t < graph->tensor_count; t++) {
        const struct hapt_tensor published = hapt_tensor_published(&graph->tensor[t]);
        if (published.kind == HAPT_TENSOR_PARAMETER && hapt_tensor_elements(&published) > largest)
            largest = hapt_tensor_elements(&published);
    }
    float *value = malloc((size_t)largest * sizeof *value);
    if (!value) return hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory for %lld weights", (long long)largest);
    enum hapt_status status = HAPT_OK;
    hapt_progress_expect(graph->tensor_count);
    for (int t = 0; t < graph->tensor_count && status == HAPT_OK; t++) {
        hapt_progress_advance(1);
        if (!hapt_engine_tensor(engine, t, 0)) continue;
        if (graph->tensor[t].kind == HAPT_TENSOR_PARAMETER) status = fill_parameter(engine, graph, t, value);
        if (graph->tensor[t].kind == HAPT_TENSOR_INPUT) status = fill_input(model, options, graph, engine, t);
    }
    free(value);
    return status;
}
