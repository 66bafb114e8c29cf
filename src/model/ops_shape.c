/*
 * Rows of the operator table: operators whose signatures follow from attributes and shapes: those of graphs that come
 * from other programs. Each letter stands for one dimension. `signs` writes them from 'b' on, so that 'b' is the first
 * dimension of the first operand.
 *
 * Dimensions that an attribute names count from 0. Their kernels read shapes from the operands, so shards need no
 * attributes of their own.
 */
#include <stdio.h>

#include "graph_parts.h"
#include "ops_rows.h"

/* ---- writing signatures ---- */

struct signs {
    char *text;
    size_t length;
    char next; /* the next letter that is free */
};

static struct signs signs_begin(char text[HAPT_SIGNATURE_SIZE])
{
    text[0] = '\0';
    return (struct signs){text, 0, 'b'};
}

static void put(struct signs *signs, const char *piece)
{
    const int written = snprintf(signs->text + signs->length, HAPT_SIGNATURE_SIZE - signs->length, "%s", piece);
    signs->length += (size_t)written;
    HAPT_ASSERT(signs->length < HAPT_SIGNATURE_SIZE);
}

static char new_letter(struct signs *signs)
{
    HAPT_ASSERT(signs->next <= 'z');
    return signs->next++;
}

static void put_letter(struct signs *signs, char letter, bool sharded)
{
    put(signs, (const char[]){letter, sharded ? '\0' : '!', '\0'});
}

/* The letters of all dimensions of an operand; bit d of `whole`: dimension d cannot be sharded. */
static void put_letters(struct signs *signs, const char *letter, int dims, unsigned whole)
{
    for (int d = 0; d < dims; d++) put_letter(signs, letter[d], !(whole >> d & 1u));
}

static void new_letters(struct signs *signs, char *letter, int dims)
{
    for (int d = 0; d < dims; d++) letter[d] = new_letter(signs);
}

static const struct hapt_tensor *input_of(const struct hapt_graph *graph, const struct hapt_op *op, int i)
{
    return i < op->input_count && op->input[i] >= 0 ? &graph->tensor[op->input[i]] : NULL;
}

/* The gradient that a backward operator makes, whose shape it has from its forward operand; NULL: it is not known. */
static const struct hapt_tensor *gradient_of(const struct hapt_graph *graph, const struct hapt_op *op)
{
    return op->output_count > 0 ? &graph->tensor[op->output[0]] : NULL;
}

static enum hapt_status lacks_operand(const struct hapt_op *op)
{
    return hapt_op_bad_attribute(op, "it lacks an operand");
}

/* Checks the attribute that names a dimension. */
static enum hapt_status check_dim(const struct hapt_op *op, int attribute, const struct hapt_tensor *x)
{
    if (!x) return lacks_operand(op);
    return op->integer[attribute] >= 0 && op->integer[attribute] < x->dims
               ? HAPT_OK
               : hapt_op_bad_attribute(op, "its input has no such dimension");
}

/* Appends a backward operator with attributes of its own. */
static enum hapt_status append_with(struct hapt_graph *graph, int op, const char *type, int input, int primal,
                                    const int64_t integer[HAPT_MAX_ATTRIBUTES])
{
    HAPT_TRY(hapt_gradient_append(graph, op, type, &input, 1, &primal, 1));
    memcpy(graph->op[graph->op_count - 1].integer, integer, sizeof graph->op->integer);
    return HAPT_OK;
}

/* ---- permute ---- */

static enum hapt_status sign_permute(const struct hapt_graph *graph, const struct hapt_op *op,
                                     char text[HAPT_SIGNATURE_SIZE])
{
    const struct hapt_tensor *x = input_of(graph, op, 0);
    struct signs signs = signs_begin(text);
    char letter[HAPT_MAX_DIMS] = {0};
    unsigned seen = 0;
    if (!x) return lacks_operand(op);
    for (int d = 0; d < x->dims; d++) {
        HAPT_TRY(check_dim(op, d, x));
        seen |= 1u << op->integer[d];
    }
    if (seen != (1u << x->dims) - 1) return hapt_op_bad_attribute(op, "it names a dimension twice");
    new_letters(&signs, letter, x->dims);
    put_letters(&signs, letter, x->dims, 0);
    put(&signs, "->");
    for (int d = 0; d < x->dims; d++) put_letter(&signs, letter[op->integer[d]], true);
    return HAPT_OK;
}

static enum hapt_status gradient_permute(struct hapt_graph *graph, int op)
{
    const struct hapt_op forward = graph->op[op];
    int64_t inverse[HAPT_MAX_ATTRIBUTES] = {0};
    for (int d = 0; d < graph->tensor[forward.input[0]].dims; d++) inverse[forward.integer[d]] = d;
    return append_with(graph, op, "permute", hapt_gradient_incoming(graph, op), forward.input[0], inverse);
}

/* ---- reshape ---- */

/* The shape that the attributes name; the size -1 follows from the others. */
static enum hapt_status shape_wanted(const struct hapt_op *op, const struct hapt_tensor *x, int64_t *shape, int *dims)
{
    int64_t left = 1;
    int open = -1;
    for (int d = 0; d < x->dims; d++) {
        if (x->shape[d] < 1 || x->shape[d] > HAPT_MAX_ELEMENTS / left)
            return hapt_op_bad_attribute(op, "it has too many elements");
        left *= x->shape[d];
    }
    for (*dims = 0; *dims < HAPT_MAX_DIMS && op->integer[*dims] != 0; (*dims)++) {
        const int64_t size = op->integer[*dims];
        if (size < -1 || (size == -1 && open >= 0))
            return hapt_op_bad_attribute(op, "a size is negative, or more than one is -1");
        if (size == -1) open = *dims;
        if (size > 0 && left % size != 0) return hapt_op_bad_attribute(op, "its sizes have not as many elements as x");
        if (size > 0) left /= size;
        shape[*dims] = size;
    }
    if (*dims == 0) return hapt_op_bad_attribute(op, "it has no sizes");
    if (open >= 0)
        shape[open] = left;
    else if (left != 1)
        return hapt_op_bad_attribute(op, "its sizes have not as many elements as x");
    return HAPT_OK;
}

/* Dimensions [first, end) of one side, which have as many elements as those of the other side. */
struct group {
    int first, end;
    int64_t elements;
};

static int first_wide(const struct group *group, const int64_t *shape)
{
    for (int d = group->first; d < group->end; d++)
        if (shape[d] > 1) return d;
    return -1;
}

/* A dimension of its own letter, sharded whenever `with` is. */
struct dim_sign {
    char letter, with; /* with 0: it cannot be sharded */
};

/* Elements of both sides stand in the same order. So shards of the first dimension of one side are shards of that of
 * the other, if one size is a multiple of the other. */
static void sign_group(struct signs *signs, const struct group group[2], const int64_t *const shape[2],
                       struct dim_sign *const sign[2])
{
    const int dim[2] = {first_wide(&group[0], shape[0]), first_wide(&group[1], shape[1])};
    for (int side = 0; side < 2; side++)
        for (int d = group[side].first; d < group[side].end; d++)
            sign[side][d] = (struct dim_sign){new_letter(signs), 0};
    if (dim[0] < 0 || dim[1] < 0) return;
    const int64_t size[2] = {shape[0][dim[0]], shape[1][dim[1]]};
    for (int side = 0; side < 2; side++) { /* this side has the letter, the other one follows it */
        struct dim_sign *own = &sign[side][dim[side]], *other = &sign[!side][dim[!side]];
        if (size[!side] % size[side] != 0) continue;
        if (size[0] == size[1]) other->letter = own->letter;
        own->with = other->with = own->letter;
        return;
    }
}

static void put_signs(struct signs *signs, const struct dim_sign *sign, int dims)
{
    for (int d = 0; d < dims; d++) {
        if (sign[d].with && sign[d].with != sign[d].letter)
            put(signs, (const char[]){sign[d].letter, '/', sign[d].with, '\0'});
        else
            put_letter(signs, sign[d].letter, sign[d].with != 0);
    }
}

static enum hapt_status sign_reshape(const struct hapt_graph *graph, const struct hapt_op *op,
                                     char text[HAPT_SIGNATURE_SIZE])
{
    const struct hapt_tensor *x = input_of(graph, op, 0);
    struct signs signs = signs_begin(text);
    struct dim_sign in[HAPT_MAX_DIMS], out[HAPT_MAX_DIMS], *const sign[2] = {in, out};
    struct group group[2] = {{0}};
    int64_t made[HAPT_MAX_DIMS] = {0};
    int dims[2];
    if (!x) return lacks_operand(op);
    dims[0] = x->dims;
    HAPT_TRY(shape_wanted(op, x, made, &dims[1]));
    const int64_t *const shape[2] = {x->shape, made};
    while (group[0].end < dims[0] || group[1].end < dims[1]) {
        for (int side = 0; side < 2; side++) {
            group[side].first = group[side].end;
            group[side].elements = group[side].end < dims[side] ? shape[side][group[side].end++] : 1;
        }
        while (group[0].elements != group[1].elements) {
            const int side = group[0].elements > group[1].elements;
            if (group[side].end == dims[side]) return hapt_op_bad_attribute(op, "it has too many elements");
            group[side].elements *= shape[side][group[side].end++];
        }
        sign_group(&signs, group, shape, sign);
    }
    put_signs(&signs, in, dims[0]);
    put(&signs, "->");
    put_signs(&signs, out, dims[1]);
    return HAPT_OK;
}

static enum hapt_status infer_reshape(const struct hapt_graph *graph, const struct hapt_op *op,
                                      struct hapt_tensor *output)
{
    return shape_wanted(op, &graph->tensor[op->input[0]], output[0].shape, &output[0].dims);
}

static enum hapt_status gradient_reshape(struct hapt_graph *graph, int op)
{
    const int x = graph->op[op].input[0];
    int64_t shape[HAPT_MAX_ATTRIBUTES] = {0};
    for (int d = 0; d < graph->tensor[x].dims; d++) shape[d] = graph->tensor[x].shape[d];
    return append_with(graph, op, "reshape", hapt_gradient_incoming(graph, op), x, shape);
}

/* ---- expand ---- */

static enum hapt_status size_expanded(const struct hapt_graph *graph, const struct hapt_op *op, int d, int64_t *size)
{
    const struct hapt_tensor *x = input_of(graph, op, 0), *like = input_of(graph, op, 1);
    if (op->integer[d] < 0 || op->integer[d] > HAPT_MAX_ELEMENTS)
        return hapt_op_bad_attribute(op, "a size is negative or too large");
    *size = op->integer[d] > 0 ? op->integer[d] : like ? like->shape[d] : x->shape[d];
    return x->shape[d] == 1 || x->shape[d] == *size
               ? HAPT_OK
               : hapt_op_bad_attribute(op, "a dimension of x has neither one element nor those that are wanted");
}

/* Dimensions that are expanded have a letter of their own in x. */
static void put_expansion(struct signs *signs, const struct hapt_tensor *narrow, const char *letter,
                          const int64_t *size)
{
    for (int d = 0; d < narrow->dims; d++) {
        const bool expands = narrow->shape[d] == 1 && size[d] != 1;
        put_letter(signs, expands ? new_letter(signs) : letter[d], !expands);
    }
}

static enum hapt_status sign_expand(const struct hapt_graph *graph, const struct hapt_op *op,
                                    char text[HAPT_SIGNATURE_SIZE])
{
    const struct hapt_tensor *x = input_of(graph, op, 0), *like = input_of(graph, op, 1);
    struct signs signs = signs_begin(text);
    char letter[HAPT_MAX_DIMS] = {0};
    int64_t size[HAPT_MAX_DIMS] = {0};
    if (!x) return lacks_operand(op);
    if (like && like->dims != x->dims) return hapt_op_bad_attribute(op, "its inputs have not as many dimensions");
    new_letters(&signs, letter, x->dims);
    for (int d = 0; d < x->dims; d++) HAPT_TRY(size_expanded(graph, op, d, &size[d]));
    put_expansion(&signs, x, letter, size);
    put(&signs, ",");
    for (int d = 0; like && d < x->dims; d++) { /* a size of the attributes may differ from that of `like` */
        const bool same = like->shape[d] == size[d];
        put_letter(&signs, same ? letter[d] : new_letter(&signs), same);
    }
    put(&signs, "?->");
    put_letters(&signs, letter, x->dims, 0);
    return HAPT_OK;
}

static enum hapt_status infer_expand(const struct hapt_graph *graph, const struct hapt_op *op,
                                     struct hapt_tensor *output)
{
    for (int d = 0; d < output[0].dims; d++) HAPT_TRY(size_expanded(graph, op, d, &output[0].shape[d]));
    return HAPT_OK;
}

static enum hapt_status sign_expand_dx(const struct hapt_graph *graph, const struct hapt_op *op,
                                       char text[HAPT_SIGNATURE_SIZE])
{
    const struct hapt_tensor *dy = input_of(graph, op, 0), *dx = gradient_of(graph, op);
    struct signs signs = signs_begin(text);
    char letter[HAPT_MAX_DIMS] = {0};
    if (!dy || !dx || dy->dims != dx->dims) return lacks_operand(op);
    new_letters(&signs, letter, dy->dims);
    put_letters(&signs, letter, dy->dims, 0);
    put(&signs, "->");
    put_expansion(&signs, dx, letter, dy->shape);
    return HAPT_OK;
}

/* ---- slice, pad, concat ---- */

/* Both have the same letters, but for dimension integer[0]. */
static enum hapt_status sign_along(const struct hapt_graph *graph, const struct hapt_op *op,
                                   char text[HAPT_SIGNATURE_SIZE])
{
    const struct hapt_tensor *x = input_of(graph, op, 0);
    struct signs signs = signs_begin(text);
    char letter[HAPT_MAX_DIMS] = {0};
    const int inputs = hapt_op_signature(op->type)->input_count;
    HAPT_TRY(check_dim(op, 0, x));
    const unsigned whole = 1u << op->integer[0];
    new_letters(&signs, letter, x->dims);
    for (int operand = 0; operand <= inputs; operand++) {
        if (operand > 0) {
            put(&signs, operand < inputs ? "," : "->");
            letter[op->integer[0]] = new_letter(&signs);
        }
        put_letters(&signs, letter, x->dims, whole);
    }
    return HAPT_OK;
}

static enum hapt_status infer_slice(const struct hapt_graph *graph, const struct hapt_op *op,
                                    struct hapt_tensor *output)
{
    const int64_t first = op->integer[1], end = op->integer[2], step = op->integer[3] == 0 ? 1 : op->integer[3];
    if (first < 0 || end <= first || end > graph->tensor[op->input[0]].shape[op->integer[0]] || step < 1 ||
        step > end - first)
        return hapt_op_bad_attribute(op, "its first element, end or step is not inside the dimension");
    output[0].shape[op->integer[0]] = (end - first - 1) / step + 1;
    return HAPT_OK;
}

static enum hapt_status infer_pad(const struct hapt_graph *graph, const struct hapt_op *op, struct hapt_tensor *output)
{
    const int64_t before = op->integer[1], after = op->integer[2];
    if (before < 0 || after < 0 || before > INT32_MAX || after > INT32_MAX)
        return hapt_op_bad_attribute(op, "its padding is negative or too large");
    output[0].shape[op->integer[0]] = before + graph->tensor[op->input[0]].shape[op->integer[0]] + after;
    return HAPT_OK;
}

static enum hapt_status gradient_slice_of(struct hapt_graph *graph, int op, int primal, int64_t first)
{
    const int64_t dim = graph->op[op].integer[0], end = first + graph->tensor[primal].shape[dim];
    const int64_t integer[HAPT_MAX_ATTRIBUTES] = {dim, first, end, 1};
    return append_with(graph, op, "strided_slice", hapt_gradient_incoming(graph, op), primal, integer);
}

static enum hapt_status gradient_pad(struct hapt_graph *graph, int op)
{
    return gradient_slice_of(graph, op, graph->op[op].input[0], graph->op[op].integer[1]);
}

static enum hapt_status infer_concat(const struct hapt_graph *graph, const struct hapt_op *op,
                                     struct hapt_tensor *output)
{
    const int64_t dim = op->integer[0];
    output[0].shape[dim] = graph->tensor[op->input[0]].shape[dim] + graph->tensor[op->input[1]].shape[dim];
    return HAPT_OK;
}

static enum hapt_status gradient_concat(struct hapt_graph *graph, int op)
{
    const int a = graph->op[op].input[0], b = graph->op[op].input[1];
    const int64_t first = graph->tensor[a].shape[graph->op[op].integer[0]];
    HAPT_TRY(hapt_op_check_two(graph, op));
    if (hapt_gradient_needed(graph, a)) HAPT_TRY(gradient_slice_of(graph, op, a, 0));
    return hapt_gradient_needed(graph, b) ? gradient_slice_of(graph, op, b, first) : HAPT_OK;
}

/* ---- sums and means ---- */

static bool is_reduced(const struct hapt_op *op, int d)
{
    return op->integer[0] >> d & 1;
}

static enum hapt_status sign_reduction(const struct hapt_graph *graph, const struct hapt_op *op, bool forward,
                                       bool mean, char text[HAPT_SIGNATURE_SIZE])
{
    const struct hapt_tensor *x = forward ? input_of(graph, op, 0) : gradient_of(graph, op);
    struct signs wide_signs = signs_begin(text);
    char letter[HAPT_MAX_DIMS] = {0}, wide[HAPT_SIGNATURE_SIZE], narrow[HAPT_SIGNATURE_SIZE];
    if (!x) return lacks_operand(op);
    if (op->integer[0] < 1 || op->integer[0] >> x->dims != 0)
        return hapt_op_bad_attribute(op, "it names no dimensions of its input, or others");
    if (op->integer[1] != 0 && op->integer[1] != 1) return hapt_op_bad_attribute(op, "integer[1] is neither 0 nor 1");
    new_letters(&wide_signs, letter, x->dims);
    wide_signs.text = wide, wide[0] = '\0';
    put_letters(&wide_signs, letter, x->dims, mean ? (unsigned)op->integer[0] : 0);
    struct signs narrow_signs = {narrow, 0, wide_signs.next};
    narrow[0] = '\0';
    for (int d = 0; d < x->dims; d++) {
        if (!is_reduced(op, d))
            put_letter(&narrow_signs, letter[d], true);
        else if (op->integer[1])
            put_letter(&narrow_signs, new_letter(&narrow_signs), false);
    }
    snprintf(text, HAPT_SIGNATURE_SIZE, "%s->%s", forward ? wide : narrow, forward ? narrow : wide);
    return HAPT_OK;
}

static enum hapt_status sign_sum(const struct hapt_graph *graph, const struct hapt_op *op,
                                 char text[HAPT_SIGNATURE_SIZE])
{
    return sign_reduction(graph, op, true, false, text);
}

static enum hapt_status sign_sum_dx(const struct hapt_graph *graph, const struct hapt_op *op,
                                    char text[HAPT_SIGNATURE_SIZE])
{
    return sign_reduction(graph, op, false, false, text);
}

static enum hapt_status sign_mean(const struct hapt_graph *graph, const struct hapt_op *op,
                                  char text[HAPT_SIGNATURE_SIZE])
{
    return sign_reduction(graph, op, true, true, text);
}

static enum hapt_status sign_mean_dx(const struct hapt_graph *graph, const struct hapt_op *op,
                                     char text[HAPT_SIGNATURE_SIZE])
{
    return sign_reduction(graph, op, false, true, text);
}

static enum hapt_status infer_reduction(const struct hapt_graph *graph, const struct hapt_op *op,
                                        struct hapt_tensor *output)
{
    (void)graph;
    for (int d = 0; op->integer[1] && d < output[0].dims; d++)
        if (is_reduced(op, d)) output[0].shape[d] = 1;
    return HAPT_OK;
}

/* ---- matmul ---- */

/* integer[0] bit 0: a is stored as [..., k, m]; bit 1: b as [..., n, k]. */
static enum hapt_status sign_matmul(const struct hapt_graph *graph, const struct hapt_op *op,
                                    char text[HAPT_SIGNATURE_SIZE])
{
    const struct hapt_tensor *a = input_of(graph, op, 0);
    struct signs signs = signs_begin(text);
    char lead[HAPT_MAX_DIMS] = {0};
    if (!a) return lacks_operand(op);
    if (a->dims < 2) return hapt_op_bad_attribute(op, "its inputs are no matrices");
    if (op->integer[0] < 0 || op->integer[0] > 3) return hapt_op_bad_attribute(op, "integer[0] is not between 0 and 3");
    const int leading = a->dims - 2;
    new_letters(&signs, lead, leading);
    const char m = new_letter(&signs), k = new_letter(&signs), n = new_letter(&signs);
    const bool first = op->integer[0] & 1, second = op->integer[0] >> 1 & 1;
    put_letters(&signs, lead, leading, 0);
    put(&signs, (const char[]){first ? k : m, first ? m : k, ',', '\0'});
    put_letters(&signs, lead, leading, 0);
    put(&signs, (const char[]){second ? n : k, second ? k : n, '-', '>', '\0'});
    put_letters(&signs, lead, leading, 0);
    put(&signs, (const char[]){m, n, '\0'});
    return HAPT_OK;
}

static enum hapt_status append_matmul(struct hapt_graph *graph, int op, int left, int right, bool first, bool second,
                                      int primal)
{
    const int input[] = {left, right};
    HAPT_TRY(hapt_gradient_append(graph, op, "matmul", input, 2, &primal, 1));
    graph->op[graph->op_count - 1].integer[0] = first + 2 * second;
    return HAPT_OK;
}

/* y = A B: dA = dy B^T, dB = A^T dy, each stored as its operand is. */
static enum hapt_status gradient_matmul(struct hapt_graph *graph, int op)
{
    const int a = graph->op[op].input[0], b = graph->op[op].input[1], dy = hapt_gradient_incoming(graph, op);
    const bool first = graph->op[op].integer[0] & 1, second = graph->op[op].integer[0] >> 1 & 1;
    HAPT_TRY(hapt_op_check_two(graph, op));
    if (hapt_gradient_needed(graph, a))
        HAPT_TRY(first ? append_matmul(graph, op, b, dy, second, true, a)
                       : append_matmul(graph, op, dy, b, false, !second, a));
    if (!hapt_gradient_needed(graph, b)) return HAPT_OK;
    return second ? append_matmul(graph, op, dy, a, true, first, b) : append_matmul(graph, op, a, dy, !first, false, b);
}

/* clang-format off */
const struct hapt_op_type hapt_ops_shape[] = {
    {.name = "permute", .signature = "bcd->bdc", .sign = sign_permute, .dtypes = "c->c", .linear = true, .reads_no_parameter = true,
     .gradient = gradient_permute, .attributes = "x -> y; dimension d of y is dimension integer[d] of x"},
    {.name = "reshape", .signature = "bf/d->bde!", .sign = sign_reshape, .dtypes = "c->c", .linear = true, .reads_no_parameter = true,
     .infer = infer_reshape, .gradient = gradient_reshape,
     .attributes = "x -> the same elements; integer[] sizes, -1: what is left (use it for the rows), the first 0 ends them"},
    {.name = "expand", .signature = "e!cd,bcd?->bcd", .sign = sign_expand, .dtypes = "cc->c", .reads_no_parameter = true,
     .infer = infer_expand, .backward = "expand_dx", .backward_operands = "d>0",
     .attributes = "x, like -> x, repeated along dimensions of one element until it has the shape of `like`, whose values are not read; "
                   "integer[d], if not 0: the size of dimension d"},
    {.name = "expand_dx", .signature = "bcd->e!cd", .sign = sign_expand_dx, .dtypes = "c->c", .flops_per_element = 1,
     .attributes = "dy -> dx"},
    {.name = "strided_slice", .signature = "bc!d->be!d", .sign = sign_along, .dtypes = "c->c", .linear = true, .reads_no_parameter = true,
     .infer = infer_slice, .backward = "strided_slice_dx", .backward_operands = "d>0",
     .attributes = "x -> y; integer[0] dimension, integer[1] first element, integer[2] end, integer[3] step (0: 1)"},
    {.name = "strided_slice_dx", .signature = "bc!d->be!d", .sign = sign_along, .dtypes = "c->c", .attributes = "dy -> dx; as strided_slice"},
    {.name = "pad", .signature = "bc!d->be!d", .sign = sign_along, .dtypes = "c->c", .linear = true, .reads_no_parameter = true,
     .infer = infer_pad, .gradient = gradient_pad,
     .attributes = "x -> y with zeros around it; integer[0] dimension, integer[1] elements before, integer[2] behind"},
    {.name = "concat", .signature = "bc!d,be!d->bf!d", .sign = sign_along, .dtypes = "cc->c", .linear = true, .reads_no_parameter = true,
     .infer = infer_concat, .gradient = gradient_concat, .attributes = "a, b -> b behind a; integer[0] dimension"},
    {.name = "sum", .signature = "bcd->bc", .sign = sign_sum, .dtypes = "c->c", .flops_per_element = 1, .linear = true, .reads_no_parameter = true,
     .infer = infer_reduction, .backward = "sum_dx", .backward_operands = "d>0",
     .attributes = "x -> y; integer[0] a bit for each dimension that is summed, integer[1] 1: y keeps them with one element"},
    {.name = "sum_dx", .signature = "bc->bcd", .sign = sign_sum_dx, .dtypes = "c->c", .attributes = "dy -> dx; as sum"},
    {.name = "mean", .signature = "bcd!->bc", .sign = sign_mean, .dtypes = "c->c", .flops_per_element = 1, .linear = true, .reads_no_parameter = true,
     .infer = infer_reduction, .backward = "mean_dx", .backward_operands = "d>0", .attributes = "x -> y; as sum"},
    {.name = "mean_dx", .signature = "bc->bcd!", .sign = sign_mean_dx, .dtypes = "c->c", .flops_per_element = 1, .attributes = "dy -> dx; as sum"},
    {.name = "matmul", .signature = "bcd,bde->bce", .sign = sign_matmul, .dtypes = "cc->c", .heavy = true, .contracts = true,
     .reads_no_parameter = true, .gradient = gradient_matmul,
     .attributes = "a, b -> y = a b, matrix by matrix; integer[0] + 1: a is stored transposed, + 2: b is"},
    {.name = NULL},
};
/* clang-format on */
