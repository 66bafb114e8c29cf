#include "hapt/model.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hapt/ops.h"
#include "hapt/text.h"
#include "init.h"
#include "weights.h"
#include "zoo.h"

static const struct {
    const char *name;
    enum hapt_status (*build)(const struct hapt_config *config, struct hapt_arena *arena, struct hapt_model *model);
} families[] = {{"bert", hapt_zoo_bert},   {"bert-moe", hapt_zoo_bert_moe}, {"gpt", hapt_zoo_gpt},
                {"llama", hapt_zoo_llama}, {"resnet", hapt_zoo_resnet},     {"vgg", hapt_zoo_vgg},
                {"vit", hapt_zoo_vit}};
enum { FAMILIES = sizeof families / sizeof families[0] };

enum { MAX_SETTINGS = 64 };

const char *hapt_model_title(const struct hapt_model *model, char text[HAPT_MODEL_TITLE])
{
    if (model->path)
        snprintf(text, HAPT_MODEL_TITLE, "%.255s (%.40s)", hapt_text_base_name(model->path), model->family);
    else
        snprintf(text, HAPT_MODEL_TITLE, "%.40s", model->family);
    hapt_text_make_printable(text, false);
    return text;
}

enum hapt_status hapt_model_set(struct hapt_model *model, struct hapt_arena *arena, const char *name, const char *value)
{
    if (!model->setting) HAPT_NEW(model->setting, arena, MAX_SETTINGS);
    HAPT_ASSERT(model->setting_count < MAX_SETTINGS);
    struct hapt_model_setting *setting = &model->setting[model->setting_count];
    setting->name = hapt_arena_strdup(arena, name);
    setting->value = hapt_arena_strdup(arena, value);
    if (!setting->name || !setting->value) return HAPT_ERR_MEMORY;
    model->setting_count++;
    return HAPT_OK;
}

/* Stores training options from the command line or a named model as the model's defaults. */
struct training_visit {
    const struct hapt_config *config;
    struct hapt_arena *arena;
    struct hapt_model *model;
    enum hapt_status status;
};

static void visit_training(void *context, const char *name, const char *value)
{
    struct training_visit *visit = context;
    if (visit->status != HAPT_OK || !value || !hapt_config_chosen(visit->config, name)) return;
    HAPT_ASSERT(visit->model->training_count < MAX_SETTINGS);
    struct hapt_model_setting *setting = &visit->model->training[visit->model->training_count];
    setting->name = hapt_arena_strdup(visit->arena, name);
    setting->value = hapt_arena_strdup(visit->arena, value);
    if (!setting->name || !setting->value) visit->status = HAPT_ERR_MEMORY;
    visit->model->training_count++;
}

/* Finds a given option that the family does not use. A family records each option it uses as a setting; any other would
 * silently do nothing. */
struct unused_visit {
    const struct hapt_model *model;
    const char *unused;
};

static void visit_unused(void *context, const char *name, const char *value)
{
    struct unused_visit *visit = context;
    (void)value;
    if (strcmp(name, "weights") == 0 || strcmp(name, "seed") == 0) return;
    if (!hapt_model_setting(visit->model, name)) visit->unused = name;
}

static enum hapt_status check_options(const struct hapt_config *config, const struct hapt_model *model)
{
    struct unused_visit visit = {.model = model};
    hapt_config_visit_model(config, visit_unused, &visit);
    if (!visit.unused) return HAPT_OK;
    return hapt_fail(HAPT_ERR_USAGE, "leave it out, or choose the family that has it",
                     "models of the family %s have no --%s", model->family, visit.unused);
}

const char *hapt_model_family_name(int index)
{
    return index < FAMILIES ? families[index].name : NULL;
}

static enum hapt_status unknown_family(const char *name)
{
    char known[256] = "";
    struct hapt_nearest nearest = {0};
    for (int i = 0; i < FAMILIES; i++) {
        const size_t used = strlen(known);
        snprintf(known + used, sizeof known - used, "%s%s", i ? ", " : "", families[i].name);
        hapt_text_consider(&nearest, name, families[i].name);
    }
    for (int i = 0; hapt_model_preset_name(i); i++) hapt_text_consider(&nearest, name, hapt_model_preset_name(i));
    char hint[80];
    if (nearest.name) snprintf(hint, sizeof hint, "did you mean hapt model %s?", nearest.name);
    return hapt_fail(HAPT_ERR_USAGE, nearest.name ? hint : "named models: see hapt help model",
                     "unknown model family \"%s\"; known are %s", name, known);
}

enum hapt_status hapt_model_begin(const char *family, const struct hapt_config *config, struct hapt_arena *arena,
                                  struct hapt_model **model)
{
    struct hapt_model *built;
    HAPT_NEW(built, arena, 1);
    built->family = family;
    built->seed = (uint64_t)hapt_config_int(config, "seed");
    HAPT_TRY(hapt_graph_create(arena, &built->graph));
    *model = built;
    return HAPT_OK;
}

enum hapt_status hapt_model_finish(struct hapt_model *model, const struct hapt_config *config, struct hapt_arena *arena)
{
    model->precision = hapt_precision_of(model->dtype);
    HAPT_TRY(zoo_freeze(model, config, arena));
    HAPT_TRY(check_options(config, model));
    HAPT_NEW(model->training, arena, MAX_SETTINGS);
    struct training_visit visit = {config, arena, model, HAPT_OK};
    hapt_config_visit_training(config, visit_training, &visit);
    HAPT_TRY(visit.status);
    HAPT_TRY(hapt_graph_check(model->graph));
    HAPT_TRY(hapt_graph_differentiate(model->graph));
    HAPT_TRY(hapt_model_check_momentum(model, config));
    return hapt_model_check(model);
}

enum hapt_status hapt_model_build(const char *family, const struct hapt_config *config, struct hapt_arena *arena,
                                  struct hapt_model **model)
{
    for (int i = 0; i < FAMILIES; i++) {
        struct hapt_model *built;
        if (strcmp(family, families[i].name) != 0) continue;
        HAPT_TRY(hapt_model_begin(families[i].name, config, arena, &built));
        HAPT_TRY(families[i].build(config, arena, built));
        HAPT_TRY(hapt_model_finish(built, config, arena));
        *model = built;
        return HAPT_OK;
    }
    return unknown_family(family);
}

/* Checks that tables and logits cover the full vocabulary, or all classes: tokens and labels index them. */
static enum hapt_status check_vocabulary(const struct hapt_model *model)
{
    const struct hapt_graph *graph = model->graph;
    const int known = model->classes > 0 ? model->classes : model->vocab;
    const int embedding = hapt_op_type_find("embedding"), loss = hapt_op_type_find("cross_entropy");
    for (int index = 0; index < graph->forward_count; index++) {
        const struct hapt_op *op = &graph->op[index];
        int64_t size = known;
        if (op->type == embedding) size = graph->tensor[op->input[1]].shape[0];
        if (op->type == embedding && graph->tensor[op->input[0]].role == HAPT_ROLE_POSITIONS) {
            if (size >= model->sequence) continue;
            return hapt_fail(HAPT_ERR_INPUT, "set the model's sequence to at most the size of its table of positions",
                             "operator %s has only %lld positions, a row has %d", op->name, (long long)size,
                             model->sequence);
        }
        if (op->type == loss) size = graph->tensor[op->input[0]].shape[graph->tensor[op->input[0]].dims - 1];
        if (size >= known || hapt_model_field(model, 0) >= 0) continue; /* fields have limits of their own */
        return hapt_fail(HAPT_ERR_INPUT, "set the model's vocabulary or classes to at most the size of its tables",
                         "operator %s takes only %lld values, the model has %d", op->name, (long long)size, known);
    }
    return HAPT_OK;
}

/* Checks that the forward part has forward operators only. Backward operators rely on their forward operator,
 * collectives on the mesh. */
static enum hapt_status check_forward(const struct hapt_graph *graph)
{
    for (int index = 0; index < graph->forward_count; index++) {
        const struct hapt_op *op = &graph->op[index];
        const struct hapt_op_type *type = hapt_op_type_at(op->type);
        if (type->gradient || type->backward) continue;
        return hapt_fail(HAPT_ERR_INPUT, "write only the forward part: hapt derives the backward part",
                         "operator %s: %s %s", op->name, type->name,
                         type->collective ? "belongs in sharded graphs only" : "belongs to the backward part");
    }
    return HAPT_OK;
}

static enum hapt_status check_inputs(const struct hapt_model *model)
{
    const bool images = model->classes > 0;
    if (model->microbatch < 1 ||
        (images ? model->sequence != 0 || model->vocab != 0 : model->sequence < 1 || model->vocab < 1))
        return hapt_fail(HAPT_ERR_INPUT,
                         "a model needs rows, and either a sequence and a vocabulary, or classes of images",
                         "microbatch %d, sequence %d, vocabulary %d or %d classes are impossible", model->microbatch,
                         model->sequence, model->vocab, model->classes);
    for (int t = 0; t < model->graph->tensor_count; t++) {
        const struct hapt_tensor *tensor = &model->graph->tensor[t];
        if (tensor->kind != HAPT_TENSOR_INPUT) continue;
        if (hapt_role_is_scalar(tensor->role) && hapt_model_input(model, tensor->role) == t) continue;
        const bool of_images = tensor->role == HAPT_ROLE_IMAGES || tensor->role == HAPT_ROLE_LABELS;
        const bool first = hapt_model_input(model, tensor->role) == t;
        const bool keys = tensor->role == HAPT_ROLE_ROW_KEYS;
        if (tensor->role == HAPT_ROLE_FIELD && !images && tensor->shape[0] == model->microbatch) continue;
        const bool long_enough = images || keys || tensor->shape[1] == model->sequence;
        if ((of_images == images || keys) && first && tensor->shape[0] == model->microbatch && long_enough) continue;
        return hapt_fail(HAPT_ERR_INPUT,
                         "one input per role but field: tokens, targets and positions are [microbatch][sequence], "
                         "images, labels, fields and row keys have microbatch rows, training is a scalar",
                         "input %s does not fit the model", tensor->name);
    }
    if (images && hapt_model_input(model, HAPT_ROLE_IMAGES) < 0)
        return hapt_fail(HAPT_ERR_INPUT, "add an input with the role images", "a model of %d classes reads no images",
                         model->classes);
    return HAPT_OK;
}

int64_t hapt_model_document_end(const struct hapt_model *model)
{
    const char *text = hapt_model_setting(model, "document-end");
    char *end;
    if (!text) return -1;
    const long long token = strtoll(text, &end, 10);
    return *text && *end == '\0' ? token : -1;
}

static enum hapt_status check_documents(const struct hapt_model *model)
{
    const int64_t end = hapt_model_document_end(model);
    const bool positions = hapt_model_input(model, HAPT_ROLE_POSITIONS) >= 0;
    if (end < 0 && positions)
        return hapt_fail(HAPT_ERR_INPUT, "add the setting document-end: the token that ends documents",
                         "the model has the input positions, but no token that ends documents");
    if (end >= 0 && !positions)
        return hapt_fail(HAPT_ERR_INPUT, "remove the setting document-end, or let operators read the input positions",
                         "a token ends documents, but the model has no input positions");
    if (end >= 0 && end >= model->vocab)
        return hapt_fail(HAPT_ERR_INPUT, "set document-end to the token that ends documents in the data",
                         "the token that ends documents, %lld, is outside the vocabulary of %d", (long long)end,
                         model->vocab);
    return HAPT_OK;
}

/* Positions may exceed the vocabulary, and targets may be -100: only operators that expect them may read them. */
static enum hapt_status check_readers(const struct hapt_model *model)
{
    const struct hapt_graph *graph = model->graph;
    for (int index = 0; index < graph->forward_count; index++) {
        const struct hapt_op *op = &graph->op[index];
        const char *type = hapt_op_type_at(op->type)->name;
        for (int i = 0; i < op->input_count; i++) {
            const enum hapt_tensor_role role = op->input[i] < 0 ? HAPT_ROLE_NONE : graph->tensor[op->input[i]].role;
            const bool loss = strcmp(type, "cross_entropy") == 0, table = strcmp(type, "embedding") == 0;
            if (!(role == HAPT_ROLE_POSITIONS && loss) && !(role == HAPT_ROLE_TARGETS && table)) continue;
            return hapt_fail(HAPT_ERR_INPUT, "a table is read at tokens or positions, and a loss has targets or labels",
                             "operator %s (%s) cannot read the input %s", op->name, type,
                             graph->tensor[op->input[i]].name);
        }
    }
    return HAPT_OK;
}

static bool is_loss(const struct hapt_op *op)
{
    const char *type = hapt_op_type_at(op->type)->name;
    return strcmp(type, "cross_entropy") == 0 || strcmp(type, "mse") == 0 || strcmp(type, "bce") == 0;
}

/* Fields exclude other data, and one of them has the targets. The loss ignores some of its targets, which no other
 * operator may read. */
static enum hapt_status check_fields(const struct hapt_model *model)
{
    static const enum hapt_tensor_role others[] = {HAPT_ROLE_TOKENS, HAPT_ROLE_TARGETS, HAPT_ROLE_POSITIONS};
    const struct hapt_graph *graph = model->graph;
    const int target = hapt_model_target_field(model), tensor = hapt_model_field(model, target);
    for (int index = 0; index < graph->forward_count; index++) {
        const struct hapt_op *op = &graph->op[index];
        const char *type = hapt_op_type_at(op->type)->name;
        if (is_loss(op) && strcmp(type, "cross_entropy") != 0 && graph->tensor[op->input[1]].role != HAPT_ROLE_FIELD)
            return hapt_fail(HAPT_ERR_INPUT, "give its targets as an input with the role field",
                             "operator %s (%s) reads %s, which is no field", op->name, type,
                             graph->tensor[op->input[1]].name);
    }
    if (hapt_model_field(model, 0) < 0) return HAPT_OK;
    if (hapt_model_field(model, HAPT_MOST_FIELDS) >= 0)
        return hapt_fail(HAPT_ERR_INPUT, "join inputs of real numbers", "a model has at most %d fields",
                         HAPT_MOST_FIELDS);
    for (size_t k = 0; k < sizeof others / sizeof *others; k++)
        if (hapt_model_input(model, others[k]) >= 0)
            return hapt_fail(HAPT_ERR_INPUT, "give all of its data the role field",
                             "the model has fields, and the input %s with another role",
                             graph->tensor[hapt_model_input(model, others[k])].name);
    if (target < 0)
        return hapt_fail(HAPT_ERR_INPUT, "let the loss compare with an input with the role field",
                         "no field has the targets of the loss");
    for (int index = 0; index < graph->forward_count; index++) {
        const struct hapt_op *op = &graph->op[index];
        if (is_loss(op) && op->input[1] != tensor)
            return hapt_fail(HAPT_ERR_INPUT, "let all losses compare with one field",
                             "operator %s compares with %s, another loss with %s", op->name,
                             graph->tensor[op->input[1]].name, graph->tensor[tensor].name);
        for (int i = 0; i < op->input_count; i++)
            if (op->input[i] == tensor && !(is_loss(op) && i == 1))
                return hapt_fail(HAPT_ERR_INPUT, "give those elements as another field",
                                 "operator %s reads the targets %s, which the loss alone may read", op->name,
                                 graph->tensor[tensor].name);
    }
    return HAPT_OK;
}

static bool has_statistics(const struct hapt_model *model)
{
    for (int t = 0; t < model->graph->tensor_count; t++)
        if (model->graph->tensor[t].statistic) return true;
    return false;
}

enum hapt_status hapt_model_check_momentum(const struct hapt_model *model, const struct hapt_config *config)
{
    if (!hapt_config_given(config, "batch-norm-momentum") || has_statistics(model)) return HAPT_OK;
    return hapt_fail(HAPT_ERR_USAGE, "leave it out, or make a resnet with --running-statistics yes",
                     "--batch-norm-momentum has no effect: the model has no running statistics");
}

enum hapt_status hapt_model_check(const struct hapt_model *model)
{
    const struct hapt_graph *graph = model->graph;
    HAPT_TRY(check_inputs(model));
    HAPT_TRY(check_documents(model));
    HAPT_TRY(check_readers(model));
    HAPT_TRY(check_forward(graph));
    if (graph->op_count == graph->forward_count)
        return hapt_fail(HAPT_ERR_INPUT, NULL, "the model's graph has no backward part");
    HAPT_TRY(hapt_graph_check(graph));
    HAPT_TRY(check_fields(model));
    return check_vocabulary(model);
}

int hapt_model_input(const struct hapt_model *model, enum hapt_tensor_role role)
{
    for (int t = 0; t < model->graph->tensor_count; t++)
        if (model->graph->tensor[t].kind == HAPT_TENSOR_INPUT && model->graph->tensor[t].role == role) return t;
    return -1;
}

int hapt_model_field(const struct hapt_model *model, int number)
{
    for (int t = 0; t < model->graph->tensor_count; t++)
        if (model->graph->tensor[t].role == HAPT_ROLE_FIELD && number-- == 0) return t;
    return -1;
}

int hapt_model_find_field(const struct hapt_model *model, const char *name)
{
    for (int number = 0, t; (t = hapt_model_field(model, number)) >= 0; number++)
        if (strcmp(model->graph->tensor[t].name, name) == 0) return number;
    return -1;
}

const char *hapt_model_loss_units(const struct hapt_model *model)
{
    const int squares = hapt_op_type_find("mse");
    for (int op = 0; op < model->graph->forward_count; op++)
        if (model->graph->op[op].type == squares) return "";
    return "nat";
}

int hapt_model_target_field(const struct hapt_model *model)
{
    const struct hapt_graph *graph = model->graph;
    for (int number = 0, t; (t = hapt_model_field(model, number)) >= 0; number++)
        for (int op = 0; op < graph->forward_count; op++)
            if (is_loss(&graph->op[op]) && graph->op[op].input[1] == t) return number;
    return -1;
}

int64_t hapt_model_field_limit(const struct hapt_model *model, int number)
{
    const struct hapt_graph *graph = model->graph;
    const int tensor = hapt_model_field(model, number), table = hapt_op_type_find("embedding");
    int64_t limit = model->vocab;
    for (int index = 0; index < graph->forward_count; index++) {
        const struct hapt_op *op = &graph->op[index];
        const bool indexes = op->type == table && op->input[0] == tensor,
                   compares = is_loss(op) && op->input[1] == tensor;
        if (!indexes && !compares) continue;
        const struct hapt_tensor *of = &graph->tensor[op->input[indexes ? 1 : 0]];
        const int64_t size = indexes ? of->shape[0] : of->shape[of->dims - 1];
        if (size < limit) limit = size;
    }
    return limit;
}

const char *hapt_model_setting(const struct hapt_model *model, const char *name)
{
    for (int i = 0; i < model->setting_count; i++)
        if (strcmp(model->setting[i].name, name) == 0) return model->setting[i].value;
    return NULL;
}

enum hapt_status hapt_model_initial_rows(const struct hapt_model *model, int tensor, int64_t first, int64_t count,
                                         float *value)
{
    const struct hapt_tensor *parameter = &model->graph->tensor[tensor];
    HAPT_ASSERT(parameter->kind == HAPT_TENSOR_PARAMETER);
    const struct hapt_tensor published = hapt_tensor_published(parameter);
    enum hapt_status status = HAPT_OK;
    if (model->has_parameters) {
        struct hapt_h5 *file;
        HAPT_TRY(hapt_h5_open(model->path, "hapt-model", HAPT_MODEL_VERSION, false, &file));
        status = hapt_weights_read(file, &published, first, count, value);
        hapt_h5_close(file);
    } else {
        const int64_t row = hapt_tensor_elements(&published) / published.shape[0];
        hapt_init_values(model->seed, &published, first * row, count * row, value);
    }
    if (status == HAPT_OK) hapt_parameter_pack(parameter, count, value);
    return status;
}

enum hapt_status hapt_model_initial(const struct hapt_model *model, int tensor, float *value)
{
    return hapt_model_initial_rows(model, tensor, 0, model->graph->tensor[tensor].shape[0], value);
}

const char *hapt_model_item(const struct hapt_model *model)
{
    return model->classes > 0 ? "image" : hapt_model_field(model, 0) >= 0 ? "row" : "token";
}

int64_t hapt_model_items(const struct hapt_model *model)
{
    const bool whole = model->classes > 0 || hapt_model_field(model, 0) >= 0;
    return whole ? model->microbatch : (int64_t)model->microbatch * model->sequence;
}

double hapt_model_flops(const struct hapt_model *model)
{
    double flops = 0;
    for (int op = 0; op < model->graph->op_count; op++) flops += hapt_op_flops(model->graph, &model->graph->op[op], 1);
    return flops;
}

int64_t hapt_model_parameter_count(const struct hapt_model *model)
{
    int64_t count = 0;
    for (int t = 0; t < model->graph->tensor_count; t++) {
        const struct hapt_tensor *tensor = &model->graph->tensor[t];
        const struct hapt_tensor published = hapt_tensor_published(tensor);
        if (tensor->kind == HAPT_TENSOR_PARAMETER && !tensor->statistic) count += hapt_tensor_elements(&published);
    }
    return count;
}
