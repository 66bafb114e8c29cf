/*
 * The model file (format "hapt-model", version 1 or 2). It stores only the forward graph; readers check and
 * differentiate it. Other programs write version 2. It may leave out what follows from the operator table. Activations
 * then have a shape of zeros and the dtype "". Outputs of an operator after its first are -1; they get the names
 * OUTPUT.1, OUTPUT.2, ...
 *
 *   /                          attributes family, loss (name of the loss tensor), microbatch, dtype, seed;
 *                              sequence and vocab, or classes (image models)
 *   /settings/name, value      [n] text: hyper-parameters
 *   /training/option, value    [n] text: defaults of training options
 *   /tensors/name, kind, role, dtype, init  [t] text; kinds input, parameter, activation; inits zero, one, normal
 *   /tensors/shape             [t][5] sizes, 0 after the last dimension
 *   /tensors/init_std          [t] standard deviation of normal initial values
 *   /tensors/trainable         [t] 1: the optimizer updates this parameter
 *   /operators/name, type      [n] text, in topological order; types of the operator table
 *   /operators/input           [n][10] rows of /tensors, -1 where absent
 *   /operators/output          [n][4] rows of /tensors, -1 after the last
 *   /operators/integer, real   [n][6] attributes, see the operator table
 *   /parameters/NAME           initial values, fp32 (optional; computed from seed and name if absent);
 *                              stacks (graph.h) element by element
 *   /files/NAME                bytes of files that `hapt export` copies (optional): config, tokenizer
 *   /tokens, /batches, /targets, /images, /labels, /mean, /std  data (optional), see `hapt help data`; /batches/NAME
 *                              for the input NAME with the role field
 */
#include <stdio.h>
#include <string.h>

#include "graph_parts.h"
#include "hapt/model.h"
#include "hapt/ops.h"
#include "hapt/progress.h"
#include "init.h"
#include "weights.h"

#define FORMAT "hapt-model"
enum { VERSION = HAPT_MODEL_VERSION, WRITTEN_VERSION = 1, MAX_OPTIONS = 64, MAX_NAME = 200 };

static const char *const kind_names[] = {"input", "parameter", "activation"};
static const char *const role_names[] = {"",       "tokens",   "targets",  "loss_scale", "images",
                                         "labels", "row_keys", "training", "positions",  "field"};
static const char *const init_names[] = {"zero", "one", "normal"};
#define COUNT(array) ((int)(sizeof(array) / sizeof(array)[0]))

static int find_name(const char *const *names, int count, const char *name)
{
    for (int i = 0; i < count; i++)
        if (strcmp(names[i], name) == 0) return i;
    return -1;
}

/* Writing. */

static enum hapt_status write_pairs(struct hapt_h5 *file, const char *names, const char *values, int count,
                                    const struct hapt_model_setting *setting)
{
    const char *name[MAX_OPTIONS], *value[MAX_OPTIONS];
    HAPT_ASSERT(count <= MAX_OPTIONS);
    for (int i = 0; i < count; i++) {
        name[i] = setting[i].name;
        value[i] = setting[i].value;
    }
    HAPT_TRY(hapt_h5_write_strings(file, names, count, name));
    return hapt_h5_write_strings(file, values, count, value);
}

/* Number of tensors of the forward graph, which come first. Those added by differentiation are not stored. */
static int stored_tensors(const struct hapt_graph *graph)
{
    int count = 0;
    while (count < graph->tensor_count && graph->tensor[count].kind != HAPT_TENSOR_GRADIENT &&
           graph->tensor[count].role != HAPT_ROLE_LOSS_SCALE)
        count++;
    return count;
}

static enum hapt_status write_tensors(struct hapt_h5 *file, const struct hapt_graph *graph, struct hapt_arena *arena)
{
    const int count = stored_tensors(graph);
    const char **name, **kind, **role, **dtype, **init;
    int64_t *shape;
    double *init_std;
    uint8_t *trainable;
    HAPT_NEW(name, arena, count);
    HAPT_NEW(kind, arena, count);
    HAPT_NEW(role, arena, count);
    HAPT_NEW(dtype, arena, count);
    HAPT_NEW(init, arena, count);
    HAPT_NEW(shape, arena, (size_t)count * HAPT_MAX_DIMS);
    HAPT_NEW(init_std, arena, count);
    HAPT_NEW(trainable, arena, count);
    for (int t = 0; t < count; t++) {
        const struct hapt_tensor *tensor = &graph->tensor[t];
        name[t] = tensor->name;
        kind[t] = kind_names[tensor->kind];
        role[t] = role_names[tensor->role];
        dtype[t] = hapt_dtype_name(tensor->dtype);
        init[t] = init_names[tensor->init];
        for (int d = 0; d < tensor->dims; d++) shape[t * HAPT_MAX_DIMS + d] = tensor->shape[d];
        init_std[t] = tensor->init_std;
        trainable[t] = tensor->trainable;
    }
    const int64_t rows[] = {count, HAPT_MAX_DIMS};
    HAPT_TRY(hapt_h5_write_strings(file, "/tensors/name", count, name));
    HAPT_TRY(hapt_h5_write_strings(file, "/tensors/kind", count, kind));
    HAPT_TRY(hapt_h5_write_strings(file, "/tensors/role", count, role));
    HAPT_TRY(hapt_h5_write_strings(file, "/tensors/dtype", count, dtype));
    HAPT_TRY(hapt_h5_write(file, "/tensors/shape", HAPT_H5_I64, 2, rows, shape, "elements"));
    HAPT_TRY(hapt_h5_write_strings(file, "/tensors/init", count, init));
    HAPT_TRY(hapt_h5_write(file, "/tensors/init_std", HAPT_H5_F64, 1, rows, init_std, ""));
    return hapt_h5_write(file, "/tensors/trainable", HAPT_H5_U8, 1, rows, trainable, "");
}

static enum hapt_status write_operators(struct hapt_h5 *file, const struct hapt_graph *graph, struct hapt_arena *arena)
{
    const int count = graph->forward_count;
    const char **name, **type;
    int32_t *input, *output;
    int64_t *integer;
    double *real;
    HAPT_NEW(name, arena, count);
    HAPT_NEW(type, arena, count);
    HAPT_NEW(input, arena, (size_t)count * HAPT_MAX_INPUTS);
    HAPT_NEW(output, arena, (size_t)count * HAPT_MAX_OUTPUTS);
    HAPT_NEW(integer, arena, (size_t)count * HAPT_MAX_ATTRIBUTES);
    HAPT_NEW(real, arena, (size_t)count * HAPT_MAX_ATTRIBUTES);
    for (int index = 0; index < count; index++) {
        const struct hapt_op *op = &graph->op[index];
        name[index] = op->name;
        type[index] = hapt_op_type_at(op->type)->name;
        for (int i = 0; i < HAPT_MAX_INPUTS; i++)
            input[index * HAPT_MAX_INPUTS + i] = i < op->input_count ? op->input[i] : -1;
        for (int o = 0; o < HAPT_MAX_OUTPUTS; o++)
            output[index * HAPT_MAX_OUTPUTS + o] = o < op->output_count ? op->output[o] : -1;
        memcpy(&integer[index * HAPT_MAX_ATTRIBUTES], op->integer, sizeof op->integer);
        memcpy(&real[index * HAPT_MAX_ATTRIBUTES], op->real, sizeof op->real);
    }
    const int64_t inputs[] = {count, HAPT_MAX_INPUTS}, outputs[] = {count, HAPT_MAX_OUTPUTS},
                  attributes[] = {count, HAPT_MAX_ATTRIBUTES};
    HAPT_TRY(hapt_h5_write_strings(file, "/operators/name", count, name));
    HAPT_TRY(hapt_h5_write_strings(file, "/operators/type", count, type));
    HAPT_TRY(hapt_h5_write(file, "/operators/input", HAPT_H5_I32, 2, inputs, input, "row of /tensors"));
    HAPT_TRY(hapt_h5_write(file, "/operators/output", HAPT_H5_I32, 2, outputs, output, "row of /tensors"));
    HAPT_TRY(hapt_h5_write(file, "/operators/integer", HAPT_H5_I64, 2, attributes, integer, ""));
    return hapt_h5_write(file, "/operators/real", HAPT_H5_F64, 2, attributes, real, "");
}

static enum hapt_status write_parameters(struct hapt_h5 *file, const struct hapt_graph *graph,
                                         const struct hapt_weights *weights)
{
    enum hapt_status status = HAPT_OK;
    hapt_progress_expect(graph->tensor_count);
    for (int t = 0; t < graph->tensor_count && status == HAPT_OK; t++) {
        hapt_progress_advance(1);
        const struct hapt_tensor *tensor = &graph->tensor[t];
        if (tensor->kind != HAPT_TENSOR_PARAMETER) continue;
        struct hapt_arena arena; /* one tensor at a time: the weights need not fit into memory twice */
        hapt_arena_init(&arena);
        const struct hapt_tensor published = hapt_tensor_published(tensor);
        float *value = hapt_arena_alloc(&arena, (size_t)hapt_tensor_elements(&published), sizeof *value);
        status = value ? weights->read(weights->context, tensor, value) : HAPT_ERR_MEMORY;
        if (status == HAPT_OK)
            status = hapt_weights_write(file, published.name, published.dims, published.shape, value);
        hapt_arena_release(&arena);
    }
    return status;
}

static enum hapt_status write_model(struct hapt_h5 *file, const struct hapt_model *model,
                                    const struct hapt_weights *weights, const struct hapt_attachments *files,
                                    const char *data, struct hapt_arena *arena)
{
    const struct hapt_graph *graph = model->graph;
    HAPT_TRY(hapt_h5_write_attribute_text(file, "/", "family", model->family));
    HAPT_TRY(hapt_h5_write_attribute_text(file, "/", "loss", graph->tensor[graph->loss].name));
    HAPT_TRY(hapt_h5_write_attribute_int(file, "/", "microbatch", model->microbatch));
    if (model->classes > 0) {
        HAPT_TRY(hapt_h5_write_attribute_int(file, "/", "classes", model->classes));
    } else {
        HAPT_TRY(hapt_h5_write_attribute_int(file, "/", "sequence", model->sequence));
        HAPT_TRY(hapt_h5_write_attribute_int(file, "/", "vocab", model->vocab));
    }
    HAPT_TRY(hapt_h5_write_attribute_text(file, "/", "dtype", hapt_dtype_name(model->dtype)));
    HAPT_TRY(hapt_h5_write_attribute_int(file, "/", "seed", (int64_t)model->seed));
    HAPT_TRY(write_pairs(file, "/settings/name", "/settings/value", model->setting_count, model->setting));
    HAPT_TRY(write_pairs(file, "/training/option", "/training/value", model->training_count, model->training));
    HAPT_TRY(write_tensors(file, graph, arena));
    HAPT_TRY(write_operators(file, graph, arena));
    if (weights) HAPT_TRY(write_parameters(file, graph, weights));
    if (files) HAPT_TRY(hapt_attachments_write(file, files));
    return data ? hapt_model_copy_data(file, model, data, arena) : HAPT_OK;
}

enum hapt_status hapt_model_save_with(const struct hapt_model *model, const struct hapt_weights *weights,
                                      const struct hapt_attachments *files, const char *data, const char *path)
{
    struct hapt_h5 *file;
    struct hapt_arena arena;
    HAPT_TRY(hapt_h5_create(path, FORMAT, WRITTEN_VERSION, &file));
    hapt_arena_init(&arena);
    const enum hapt_status status = write_model(file, model, weights, files, data, &arena);
    hapt_arena_release(&arena);
    return hapt_h5_finish(file, status);
}

static enum hapt_status read_from_file(void *context, const struct hapt_tensor *parameter, float *value)
{
    const struct hapt_tensor published = hapt_tensor_published(parameter);
    if (!parameter->statistic || hapt_weights_exist(context, &published))
        return hapt_weights_read(context, &published, 0, published.shape[0], value);
    hapt_init_values(0, &published, 0, hapt_tensor_elements(&published), value); /* their rules need no seed */
    return HAPT_OK;
}

enum hapt_status hapt_model_save(const struct hapt_model *model, const char *weights, const char *data,
                                 const char *path)
{
    struct hapt_h5 *source = NULL;
    if (weights) HAPT_TRY(hapt_model_open_content(weights, &source));
    const struct hapt_weights from = {.read = read_from_file, .context = source};
    const enum hapt_status status = hapt_model_save_with(model, weights ? &from : NULL, NULL, data, path);
    hapt_h5_close(source);
    return status;
}

enum hapt_status hapt_model_missing_statistics(const struct hapt_model *model, const char *weights, int *missing)
{
    struct hapt_h5 *file;
    *missing = 0;
    if (!weights) return HAPT_OK;
    HAPT_TRY(hapt_model_open_content(weights, &file));
    for (int t = 0; t < model->graph->tensor_count; t++)
        *missing += model->graph->tensor[t].statistic && !hapt_weights_exist(file, &model->graph->tensor[t]);
    hapt_h5_close(file);
    return HAPT_OK;
}

/* Reading. The file is untrusted until hapt_graph_check has accepted the graph. */

static enum hapt_status read_pairs(struct hapt_h5 *file, const char *names, const char *values,
                                   struct hapt_arena *arena, int *count, struct hapt_model_setting **setting)
{
    const char **name, **value;
    int64_t name_count, value_count;
    HAPT_TRY(hapt_h5_read_strings(file, names, MAX_OPTIONS, arena, &name_count, &name));
    HAPT_TRY(hapt_h5_read_strings(file, values, MAX_OPTIONS, arena, &value_count, &value));
    if (name_count != value_count)
        return hapt_fail(HAPT_ERR_INPUT, NULL, "%s and %s of %s differ in length", names, values, hapt_h5_path(file));
    HAPT_NEW(*setting, arena, name_count);
    for (int64_t i = 0; i < name_count; i++) {
        (*setting)[i].name = name[i];
        (*setting)[i].value = value[i];
    }
    *count = (int)name_count;
    return HAPT_OK;
}

/* Reads a text column of a table of `count` rows. */
static enum hapt_status read_column(struct hapt_h5 *file, const char *dataset, int64_t count, struct hapt_arena *arena,
                                    const char ***text)
{
    int64_t found;
    HAPT_TRY(hapt_h5_read_strings(file, dataset, count, arena, &found, text));
    if (found == count) return HAPT_OK;
    return hapt_fail(HAPT_ERR_INPUT, "all columns of a table have the same length", "%s of %s has %lld rows, not %lld",
                     dataset, hapt_h5_path(file), (long long)found, (long long)count);
}

static enum hapt_status read_numbers(struct hapt_h5 *file, const char *dataset, enum hapt_h5_type type, int64_t rows,
                                     int64_t columns, struct hapt_arena *arena, void **data)
{
    int64_t shape[2] = {rows, columns};
    return hapt_h5_read(file, dataset, type, columns == 0 ? 1 : 2, shape, rows * (columns == 0 ? 1 : columns), arena,
                        data);
}

/* may_omit: version 2, which may leave out what follows from the operator table. */
static enum hapt_status read_tensors(struct hapt_h5 *file, bool may_omit, struct hapt_arena *arena,
                                     struct hapt_graph *graph)
{
    const char **name, **kind, **role, **dtype, **init;
    void *shape, *init_std, *trainable;
    int64_t count;
    HAPT_TRY(hapt_h5_read_strings(file, "/tensors/name", HAPT_MAX_TENSORS, arena, &count, &name));
    HAPT_TRY(read_column(file, "/tensors/kind", count, arena, &kind));
    HAPT_TRY(read_column(file, "/tensors/role", count, arena, &role));
    HAPT_TRY(read_column(file, "/tensors/dtype", count, arena, &dtype));
    HAPT_TRY(read_column(file, "/tensors/init", count, arena, &init));
    HAPT_TRY(read_numbers(file, "/tensors/shape", HAPT_H5_I64, count, HAPT_MAX_DIMS, arena, &shape));
    HAPT_TRY(read_numbers(file, "/tensors/init_std", HAPT_H5_F64, count, 0, arena, &init_std));
    HAPT_TRY(read_numbers(file, "/tensors/trainable", HAPT_H5_U8, count, 0, arena, &trainable));
    for (int64_t t = 0; t < count; t++) {
        const int64_t *size = (const int64_t *)shape + t * HAPT_MAX_DIMS;
        const int of_kind = find_name(kind_names, COUNT(kind_names), kind[t]);
        const int of_role = find_name(role_names, COUNT(role_names), role[t]);
        const int of_init = find_name(init_names, COUNT(init_names), init[t]);
        struct hapt_tensor tensor = {.name = name[t],
                                     .producer = -1,
                                     .gradient = -1,
                                     .primal = -1,
                                     .trainable = ((const uint8_t *)trainable)[t] != 0,
                                     .init_std = ((const double *)init_std)[t]};
        bool omitted = may_omit && of_kind == HAPT_TENSOR_ACTIVATION && dtype[t][0] == '\0';
        for (int d = 0; d < HAPT_MAX_DIMS; d++) omitted = omitted && size[d] == 0;
        if (of_kind < 0 || of_role < 0 || of_init < 0 || (!omitted && !hapt_dtype_parse(dtype[t], &tensor.dtype)) ||
            strchr(name[t], '/') || strlen(name[t]) > MAX_NAME)
            return hapt_fail(HAPT_ERR_INPUT, "see `hapt help model`",
                             "tensor %.200s of %s: unknown kind, role, type or init, or a bad name", name[t],
                             hapt_h5_path(file));
        if (may_omit && !omitted && size[0] == 0)
            return hapt_fail(HAPT_ERR_INPUT, "leave out both, or neither",
                             "tensor %.200s of %s: only one of shape and dtype is left out", name[t],
                             hapt_h5_path(file));
        tensor.kind = (enum hapt_tensor_kind)of_kind;
        tensor.role = (enum hapt_tensor_role)of_role;
        tensor.init = (enum hapt_init)of_init;
        while (tensor.dims < HAPT_MAX_DIMS && size[tensor.dims] != 0) {
            tensor.shape[tensor.dims] = size[tensor.dims];
            tensor.dims++;
        }
        int index;
        HAPT_TRY(hapt_graph_append_tensor(graph, &tensor, &index));
    }
    return HAPT_OK;
}

/* Version 1 ignores columns behind the operands of a type. */
static enum hapt_status refuse_surplus(const struct hapt_op *op, const int32_t *input, const int32_t *output)
{
    bool surplus = false;
    for (int i = op->input_count; i < HAPT_MAX_INPUTS; i++) surplus = surplus || input[i] != -1;
    for (int o = op->output_count; o < HAPT_MAX_OUTPUTS; o++) surplus = surplus || output[o] != -1;
    if (!surplus) return HAPT_OK;
    return hapt_fail(HAPT_ERR_INPUT, "hapt ops NAME lists its operands",
                     "operator %s: %s has %d inputs and %d outputs, and the file has more", op->name,
                     hapt_op_type_at(op->type)->name, op->input_count, op->output_count);
}

/* Appends the outputs that the file leaves out after the first. */
static enum hapt_status add_omitted_outputs(struct hapt_graph *graph, struct hapt_op *op)
{
    const int first = op->output[0];
    for (int o = 1; o < op->output_count; o++) {
        if (op->output[o] != -1 || first < 0 || first >= graph->tensor_count) continue;
        char name[MAX_NAME + 8];
        snprintf(name, sizeof name, "%s.%d", graph->tensor[first].name, o);
        const struct hapt_tensor tensor = {.name = hapt_arena_strdup(graph->arena, name),
                                           .kind = HAPT_TENSOR_ACTIVATION,
                                           .producer = -1,
                                           .gradient = -1,
                                           .primal = -1};
        if (!tensor.name) return HAPT_ERR_MEMORY;
        HAPT_TRY(hapt_graph_append_tensor(graph, &tensor, &op->output[o]));
    }
    return HAPT_OK;
}

static enum hapt_status read_operators(struct hapt_h5 *file, bool may_omit, struct hapt_arena *arena,
                                       struct hapt_graph *graph)
{
    const char **name, **type;
    void *input, *output, *integer, *real;
    int64_t count;
    HAPT_TRY(hapt_h5_read_strings(file, "/operators/name", HAPT_MAX_OPS, arena, &count, &name));
    HAPT_TRY(read_column(file, "/operators/type", count, arena, &type));
    HAPT_TRY(read_numbers(file, "/operators/input", HAPT_H5_I32, count, HAPT_MAX_INPUTS, arena, &input));
    HAPT_TRY(read_numbers(file, "/operators/output", HAPT_H5_I32, count, HAPT_MAX_OUTPUTS, arena, &output));
    HAPT_TRY(read_numbers(file, "/operators/integer", HAPT_H5_I64, count, HAPT_MAX_ATTRIBUTES, arena, &integer));
    HAPT_TRY(read_numbers(file, "/operators/real", HAPT_H5_F64, count, HAPT_MAX_ATTRIBUTES, arena, &real));
    for (int64_t index = 0; index < count; index++) {
        struct hapt_op op = {.name = name[index], .type = hapt_op_type_find(type[index]), .forward_op = (int)index};
        if (op.type < 0 || strlen(name[index]) > MAX_NAME)
            return hapt_fail(HAPT_ERR_INPUT, "use a type of the operator table",
                             "operator %.200s of %s: unknown type %.40s", name[index], hapt_h5_path(file), type[index]);
        hapt_graph_set_inputs(&op, (const int32_t *)input + index * HAPT_MAX_INPUTS,
                              hapt_op_signature(op.type)->input_count);
        op.output_count = hapt_op_signature(op.type)->output_count;
        memcpy(op.output, (const int32_t *)output + index * HAPT_MAX_OUTPUTS, sizeof op.output);
        memcpy(op.integer, (const int64_t *)integer + index * HAPT_MAX_ATTRIBUTES, sizeof op.integer);
        memcpy(op.real, (const double *)real + index * HAPT_MAX_ATTRIBUTES, sizeof op.real);
        if (may_omit)
            HAPT_TRY(refuse_surplus(&op, (const int32_t *)input + index * HAPT_MAX_INPUTS,
                                    (const int32_t *)output + index * HAPT_MAX_OUTPUTS));
        if (may_omit) HAPT_TRY(add_omitted_outputs(graph, &op));
        for (int o = 0; o < op.output_count; o++) {
            if (op.output[o] < 0 || op.output[o] >= graph->tensor_count) continue; /* hapt_graph_check reports it */
            struct hapt_tensor *made = &graph->tensor[op.output[o]];
            if (made->producer < 0 && made->kind == HAPT_TENSOR_ACTIVATION) made->producer = (int)index;
        }
        HAPT_TRY(hapt_graph_append_op(graph, &op));
    }
    graph->forward_count = graph->op_count;
    return HAPT_OK;
}

static enum hapt_status read_header(struct hapt_h5 *file, struct hapt_arena *arena, struct hapt_model *model)
{
    const bool images = hapt_h5_has_attribute(file, "/", "classes");
    const char *const names[] = {"microbatch", images ? "classes" : "sequence", "vocab"};
    int *const fields[] = {&model->microbatch, images ? &model->classes : &model->sequence, &model->vocab};
    const char *dtype;
    int64_t value;
    HAPT_TRY(hapt_h5_read_attribute_text(file, "/", "family", arena, &model->family));
    for (int i = 0; i < (images ? 2 : 3); i++) {
        HAPT_TRY(hapt_h5_read_attribute_int(file, "/", names[i], &value));
        if (value < 1 || value > INT32_MAX)
            return hapt_fail(HAPT_ERR_INPUT, NULL, "%s of %s is impossible: %lld", names[i], hapt_h5_path(file),
                             (long long)value);
        *fields[i] = (int)value;
    }
    HAPT_TRY(hapt_h5_read_attribute_int(file, "/", "seed", &value));
    model->seed = (uint64_t)value;
    HAPT_TRY(hapt_h5_read_attribute_text(file, "/", "dtype", arena, &dtype));
    if (!hapt_dtype_parse(dtype, &model->dtype))
        return hapt_fail(HAPT_ERR_INPUT, NULL, "unknown element type %.20s in %s", dtype, hapt_h5_path(file));
    model->precision = hapt_precision_of(model->dtype);
    return HAPT_OK;
}

static enum hapt_status read_model(struct hapt_h5 *file, struct hapt_arena *arena, struct hapt_model *model)
{
    const char *loss;
    int64_t version = 1;
    if (hapt_h5_has_attribute(file, "/", "version"))
        HAPT_TRY(hapt_h5_read_attribute_int(file, "/", "version", &version));
    HAPT_TRY(read_header(file, arena, model));
    HAPT_TRY(read_pairs(file, "/settings/name", "/settings/value", arena, &model->setting_count, &model->setting));
    HAPT_TRY(read_pairs(file, "/training/option", "/training/value", arena, &model->training_count, &model->training));
    HAPT_TRY(hapt_graph_create(arena, &model->graph));
    HAPT_TRY(read_tensors(file, version > 1, arena, model->graph));
    HAPT_TRY(read_operators(file, version > 1, arena, model->graph));
    if (version > 1) HAPT_TRY(hapt_graph_infer(model->graph));
    HAPT_TRY(hapt_h5_read_attribute_text(file, "/", "loss", arena, &loss));
    model->graph->loss = hapt_graph_find_tensor(model->graph, loss);
    HAPT_TRY(hapt_graph_check(model->graph));
    HAPT_TRY(hapt_graph_differentiate(model->graph));
    model->has_parameters = hapt_h5_exists(file, "/parameters");
    model->has_data =
        hapt_h5_exists(file, "/tokens") || hapt_h5_exists(file, "/batches") || hapt_h5_exists(file, "/images");
    return hapt_model_check(model);
}

enum hapt_status hapt_model_load(const char *path, struct hapt_arena *arena, struct hapt_model **model)
{
    struct hapt_h5 *file;
    struct hapt_model *loaded;
    HAPT_NEW(loaded, arena, 1);
    loaded->path = hapt_arena_strdup(arena, path);
    if (!loaded->path) return HAPT_ERR_MEMORY;
    HAPT_TRY(hapt_h5_open(path, FORMAT, VERSION, false, &file));
    const enum hapt_status status = read_model(file, arena, loaded);
    hapt_h5_close(file);
    if (status == HAPT_OK) *model = loaded;
    return status;
}

enum hapt_status hapt_model_files(const struct hapt_model *model, struct hapt_arena *arena,
                                  struct hapt_attachments *files)
{
    struct hapt_h5 *file;
    *files = (struct hapt_attachments){0};
    if (!model->path) return HAPT_OK;
    HAPT_TRY(hapt_h5_open(model->path, FORMAT, VERSION, false, &file));
    const enum hapt_status status = hapt_attachments_read(file, arena, files);
    hapt_h5_close(file);
    return status;
}
