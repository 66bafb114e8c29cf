#include "signature.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hapt/env.h"

static bool operand_parse(const char **cursor, struct hapt_signature_operand *operand)
{
    memset(operand, 0, sizeof *operand);
    const char *at = *cursor;
    if (strncmp(at, "...", 3) == 0) {
        operand->ellipsis = true;
        at += 3;
    }
    while (*at >= 'a' && *at <= 'z') {
        if (operand->dims == HAPT_MAX_DIMS) return false;
        const int d = operand->dims++;
        operand->letter[d] = operand->sharded_with[d] = *at++;
        operand->blocks[d] = 1;
        operand->shardable[d] = *at != '!';
        operand->indexed[d] = *at == '~';
        if (*at == '!' || *at == '~') {
            if (*at++ == '!' && *at == '+') operand->longer[d] = *at++ == '+';
        } else if (*at == '/') {
            if (*++at >= '1' && *at <= '9') operand->blocks[d] = *at++ - '0';
            if (*at < 'a' || *at > 'z') return false;
            operand->sharded_with[d] = *at++;
        }
    }
    if (*at == '?') {
        operand->optional = true;
        at++;
    }
    *cursor = at;
    return true;
}

static bool side_parse(const char **cursor, int limit, struct hapt_signature_operand *operand, int *count)
{
    for (*count = 0; *count < limit;) {
        if (!operand_parse(cursor, &operand[(*count)++])) return false;
        if (**cursor != ',') return true;
        (*cursor)++;
    }
    return false;
}

bool hapt_signature_parse(const char *text, struct hapt_signature *signature)
{
    *signature = (struct hapt_signature){.text = text};
    if (!side_parse(&text, HAPT_MAX_INPUTS, signature->input, &signature->input_count)) return false;
    if (strncmp(text, "->", 2) != 0) return false;
    text += 2;
    return side_parse(&text, HAPT_MAX_OUTPUTS, signature->output, &signature->output_count) && *text == '\0';
}

/* "..." is replaced by the first `leading` of these letters. */
static const char leading_letter[] = "btyzk";
enum { MAX_LEADING = 5, USUAL_LEADING = 2 };

static void operand_expand(struct hapt_signature_operand *operand, int leading)
{
    if (!operand->ellipsis || operand->dims + leading > HAPT_MAX_DIMS) return; /* no tensor has so many dimensions */
    for (int d = operand->dims - 1; d >= 0; d--) {
        operand->letter[d + leading] = operand->letter[d];
        operand->sharded_with[d + leading] = operand->sharded_with[d];
        operand->blocks[d + leading] = operand->blocks[d];
        operand->shardable[d + leading] = operand->shardable[d];
        operand->indexed[d + leading] = operand->indexed[d];
        operand->longer[d + leading] = operand->longer[d];
    }
    for (int d = 0; d < leading; d++) {
        operand->letter[d] = operand->sharded_with[d] = leading_letter[d];
        operand->blocks[d] = 1;
        operand->shardable[d] = true;
        operand->indexed[d] = operand->longer[d] = false;
    }
    operand->dims += leading;
}

static pthread_once_t parse_once = PTHREAD_ONCE_INIT;
static struct hapt_signature (*parsed)[MAX_LEADING + 1]; /* [type][dimensions that "..." stands for] */

static void parse_table(void)
{
    parsed = calloc((size_t)hapt_op_type_count(), sizeof *parsed);
    HAPT_ASSERT(parsed != NULL);
    for (int type = 0; type < hapt_op_type_count(); type++) {
        for (int leading = 0; leading <= MAX_LEADING; leading++) {
            struct hapt_signature *signature = &parsed[type][leading];
            HAPT_ASSERT(hapt_signature_parse(hapt_op_type_at(type)->signature, signature));
            for (int i = 0; i < signature->input_count; i++) operand_expand(&signature->input[i], leading);
            for (int o = 0; o < signature->output_count; o++) operand_expand(&signature->output[o], leading);
        }
    }
}

const struct hapt_signature *hapt_op_signature(int type)
{
    HAPT_ASSERT(type >= 0 && type < hapt_op_type_count());
    pthread_once(&parse_once, parse_table);
    return &parsed[type][USUAL_LEADING];
}

/* Signatures that `sign` has written, parsed. There are few different ones, and they stay. */
struct written {
    struct written *next;
    char text[HAPT_SIGNATURE_SIZE];
    struct hapt_signature signature;
};
enum { BUCKETS = 256 };
static _Atomic(struct written *) bucket[BUCKETS];
static pthread_mutex_t writing = PTHREAD_MUTEX_INITIALIZER;

static const struct hapt_signature *find_written(const struct written *at, const char *text)
{
    while (at && strcmp(at->text, text) != 0) at = at->next;
    return at ? &at->signature : NULL;
}

static const struct hapt_signature *parsed_of(const char *text)
{
    _Atomic(struct written *) *head = &bucket[hapt_hash(0, text, strlen(text)) % BUCKETS];
    const struct hapt_signature *found = find_written(atomic_load_explicit(head, memory_order_acquire), text);
    if (found) return found;
    pthread_mutex_lock(&writing);
    struct written *first = atomic_load_explicit(head, memory_order_relaxed);
    found = find_written(first, text);
    if (!found) {
        struct written *made = calloc(1, sizeof *made);
        HAPT_ASSERT(made != NULL);
        made->next = first;
        snprintf(made->text, sizeof made->text, "%s", text);
        HAPT_ASSERT(hapt_signature_parse(made->text, &made->signature));
        atomic_store_explicit(head, made, memory_order_release);
        found = &made->signature;
    }
    pthread_mutex_unlock(&writing);
    return found;
}

const struct hapt_signature *hapt_op_signature_of(const struct hapt_graph *graph, const struct hapt_op *op)
{
    const struct hapt_signature *usual = hapt_op_signature(op->type), *none = &parsed[op->type][0];
    const struct hapt_op_type *type = hapt_op_type_at(op->type);
    char text[HAPT_SIGNATURE_SIZE];
    if (type->sign) {
        struct hapt_failure ignored, *before = hapt_fail_divert(&ignored);
        const enum hapt_status status = type->sign(graph, op, text);
        hapt_fail_divert(before);
        return status == HAPT_OK ? parsed_of(text) : usual;
    }
    for (int i = 0; i < op->input_count && i < usual->input_count; i++) {
        if (!none->input[i].ellipsis || op->input[i] < 0) continue;
        const int leading = graph->tensor[op->input[i]].dims - none->input[i].dims;
        return leading >= 0 && leading <= MAX_LEADING ? &parsed[op->type][leading] : usual;
    }
    return usual;
}

static enum hapt_status bind_dtype(const struct hapt_op *op, const struct hapt_tensor *tensor, char code,
                                   enum hapt_dtype *compute)
{
    const char *hint = "the operator table lists the element types of each operator";
    bool fits = false;
    if (code == 'i') fits = tensor->dtype == HAPT_I32;
    if (code == 'f') fits = tensor->dtype == HAPT_F32;
    if (code == 'c') {
        const bool known = tensor->dtype == HAPT_F32 || tensor->dtype == HAPT_BF16 || tensor->dtype == HAPT_F16;
        fits = known && (*compute == HAPT_DTYPE_COUNT || *compute == tensor->dtype);
        if (known) *compute = tensor->dtype;
    }
    if (fits) return HAPT_OK;
    return hapt_fail(HAPT_ERR_INPUT, hint, "operator %s (%s): tensor %s has element type %s, which does not fit",
                     op->name, hapt_op_type_at(op->type)->name, tensor->name, hapt_dtype_name(tensor->dtype));
}

static enum hapt_status bind_operand(const struct hapt_op *op, const char *signature,
                                     const struct hapt_signature_operand *operand, const struct hapt_tensor *tensor,
                                     struct hapt_letter_sizes *sizes)
{
    const int dims = operand->dims == 0 ? 1 : operand->dims;
    if (tensor->dims != dims || (operand->dims == 0 && tensor->shape[0] != 1))
        return hapt_fail(HAPT_ERR_INPUT, "compare its dimensions with the signature",
                         "operator %s (%s, %s): tensor %s has %d dimensions instead of %d", op->name,
                         hapt_op_type_at(op->type)->name, signature, tensor->name, tensor->dims, operand->dims);
    for (int d = 0; d < operand->dims; d++) {
        int64_t *size = &sizes->size[operand->letter[d] - 'a'];
        if (*size == 0) *size = tensor->shape[d];
        if (operand->longer[d] ? tensor->shape[d] < *size : tensor->shape[d] != *size)
            return hapt_fail(HAPT_ERR_INPUT, "one letter of the signature has one size",
                             "operator %s (%s, %s): dimension %c of tensor %s is %lld, elsewhere %lld", op->name,
                             hapt_op_type_at(op->type)->name, signature, operand->letter[d], tensor->name,
                             (long long)tensor->shape[d], (long long)*size);
    }
    return HAPT_OK;
}

enum hapt_status hapt_signature_bind(const struct hapt_graph *graph, const struct hapt_op *op, bool with_outputs,
                                     struct hapt_letter_sizes *sizes, enum hapt_dtype *compute)
{
    const struct hapt_signature *signature = hapt_op_signature_of(graph, op);
    const char *code = hapt_op_type_at(op->type)->dtypes;
    memset(sizes, 0, sizeof *sizes);
    *compute = HAPT_DTYPE_COUNT;
    for (int i = 0; i < signature->input_count; i++) {
        const int index = i < op->input_count ? op->input[i] : -1;
        if (index < 0) {
            if (signature->input[i].optional) continue;
            return hapt_fail(HAPT_ERR_INPUT, "only operands with '?' in the signature are optional",
                             "operator %s (%s, %s) lacks input %d", op->name, hapt_op_type_at(op->type)->name,
                             signature->text, i);
        }
        HAPT_TRY(bind_dtype(op, &graph->tensor[index], code[i], compute));
        HAPT_TRY(bind_operand(op, signature->text, &signature->input[i], &graph->tensor[index], sizes));
    }
    code += signature->input_count + 2;
    for (int o = 0; with_outputs && o < op->output_count; o++) {
        HAPT_TRY(bind_dtype(op, &graph->tensor[op->output[o]], code[o], compute));
        HAPT_TRY(bind_operand(op, signature->text, &signature->output[o], &graph->tensor[op->output[o]], sizes));
    }
    return HAPT_OK;
}

enum hapt_status hapt_op_infer(const struct hapt_graph *graph, const struct hapt_op *op, struct hapt_tensor *output)
{
    const struct hapt_op_type *type = hapt_op_type_at(op->type);
    const struct hapt_signature *signature = hapt_op_signature_of(graph, op);
    struct hapt_letter_sizes sizes;
    enum hapt_dtype compute;
    char text[HAPT_SIGNATURE_SIZE];
    if (type->sign) HAPT_TRY(type->sign(graph, op, text));
    HAPT_TRY(hapt_signature_bind(graph, op, false, &sizes, &compute));
    for (int i = 0; type->reads_no_parameter && i < op->input_count; i++) {
        if (op->input[i] < 0 || graph->tensor[op->input[i]].kind != HAPT_TENSOR_PARAMETER) continue;
        return hapt_fail(HAPT_ERR_INPUT, "let it read the result of the operator copy",
                         "operator %s (%s) reads parameter %s itself", op->name, type->name,
                         graph->tensor[op->input[i]].name);
    }
    for (int o = 0; o < signature->output_count; o++) {
        const struct hapt_signature_operand *operand = &signature->output[o];
        const char code = type->dtypes[signature->input_count + 2 + o];
        output[o].dtype = code == 'c' ? compute : code == 'i' ? HAPT_I32 : HAPT_F32;
        output[o].dims = operand->dims == 0 ? 1 : operand->dims;
        output[o].shape[0] = 1;
        for (int d = 0; d < operand->dims; d++) output[o].shape[d] = hapt_letter_size(&sizes, operand->letter[d]);
    }
    return type->infer ? type->infer(graph, op, output) : HAPT_OK;
}
