/*
 * Every sharding that the rules derive, for every operator and every letter of its signature: shards are run by the cpu
 * kernels and put together by their properties; the result must be the whole operator's.
 */
#include "test.h"

#include "../../src/spmd/rules.h"

enum { SHARDS = 2, LARGEST = 4096 };

struct operand {
    int dims;
    int64_t shape[HAPT_MAX_DIMS];
    bool present, integer;
    double value[LARGEST]; /* every type's values as doubles */
};

struct job {
    int type;
    const struct hapt_signature *signature;
    struct hapt_op op;
    struct operand input[HAPT_MAX_INPUTS], output[HAPT_MAX_OUTPUTS];
    unsigned accumulate;
};

static int64_t size_of_letter(char letter)
{
    switch (letter) {
    case 'b':
        return 4;
    case 't':
        return 6;
    case 'd':
        return 8;
    case 'e':
        return 24; /* 3 d */
    case 'h':
        return 2; /* heads */
    case 'v':
        return 10;
    default:
        return 12;
    }
}

static int64_t elements_of(const struct operand *operand)
{
    int64_t count = 1;
    for (int d = 0; d < operand->dims; d++) count *= operand->shape[d];
    return count;
}

static void shape_of(const struct hapt_signature_operand *signature, struct operand *operand)
{
    operand->dims = signature->dims;
    for (int d = 0; d < signature->dims; d++) operand->shape[d] = size_of_letter(signature->letter[d]);
    if (signature->dims == 0) operand->dims = 1, operand->shape[0] = 1;
}

static void prepare(struct job *job, int type, bool optional)
{
    const struct hapt_op_type *row = hapt_op_type_at(type);
    uint64_t random = (uint64_t)type + 1;
    *job = (struct job){.type = type, .signature = hapt_op_signature(type)};
    job->op.type = type, job->op.name = row->name;
    job->op.input_count = job->signature->input_count, job->op.output_count = job->signature->output_count;
    if (strstr(row->name, "attention")) job->op.integer[0] = 2, job->op.integer[1] = 1;
    if (strstr(row->name, "layer_norm")) job->op.real[0] = 1e-5;
    /* Gradients of parameters always accumulate. */
    const char *tail = strrchr(row->name, '_');
    if (tail && strcmp(tail, "_dw") == 0) job->accumulate = ~0u;
    if (strcmp(row->name, "layer_norm_backward") == 0) job->accumulate = 6;
    for (int i = 0; i < job->op.input_count; i++) {
        struct operand *operand = &job->input[i];
        shape_of(&job->signature->input[i], operand);
        operand->present = optional || !job->signature->input[i].optional;
        operand->integer = row->dtypes[i] == 'i';
        job->op.input[i] = operand->present ? i : -1;
        CHECK(elements_of(operand) <= LARGEST);
        for (int64_t k = 0; k < elements_of(operand); k++)
            operand->value[k] = operand->integer ? (double)(hapt_random_next(&random) % 10)
                                                 : (float)(2 * hapt_random_unit(&random) - 1);
    }
    for (int o = 0; o < job->op.output_count; o++) {
        shape_of(&job->signature->output[o], &job->output[o]);
        if (!optional && job->signature->output[o].optional) job->op.output_count = o;
    }
}

static struct hapt_view view_of(const struct operand *operand, bool with_values)
{
    struct hapt_view view = {.dtype = operand->integer ? HAPT_I32 : HAPT_F32, .dims = operand->dims};
    memcpy(view.shape, operand->shape, sizeof view.shape);
    const int64_t count = elements_of(operand);
    view.data = aligned_alloc(64, ((size_t)count * 4 + 63) / 64 * 64);
    memset(view.data, 0, (size_t)count * 4);
    for (int64_t k = 0; with_values && k < count; k++) {
        if (operand->integer)
            ((int32_t *)view.data)[k] = (int32_t)operand->value[k];
        else
            ((float *)view.data)[k] = (float)operand->value[k];
    }
    return view;
}

static void run(const struct job *job, const struct operand *input, struct operand *output)
{
    const struct hapt_backend *cpu = hapt_backend_find("cpu");
    const struct hapt_kernel *kernel = cpu->find_kernel(NULL, hapt_op_type_at(job->type)->name, HAPT_F32);
    CHECK_MESSAGE(kernel != NULL, "no kernel for %s", hapt_op_type_at(job->type)->name);
    if (!kernel) return;
    struct hapt_call call = {.input_count = job->op.input_count,
                             .output_count = job->op.output_count,
                             .accumulate = job->accumulate,
                             .threads = 1};
    memcpy(call.integer, job->op.integer, sizeof call.integer);
    memcpy(call.real, job->op.real, sizeof call.real);
    for (int i = 0; i < call.input_count; i++)
        if (input[i].present) call.input[i] = view_of(&input[i], true);
    for (int o = 0; o < call.output_count; o++) call.output[o] = view_of(&output[o], false);
    call.workspace_bytes = kernel->workspace_bytes ? kernel->workspace_bytes(&call) : 0;
    call.workspace = aligned_alloc(64, (call.workspace_bytes + 64) / 64 * 64);
    CHECK_OK(kernel->run(&call, NULL));
    for (int o = 0; o < call.output_count; o++)
        for (int64_t k = 0; k < elements_of(&output[o]); k++) output[o].value[k] = ((float *)call.output[o].data)[k];
    for (int i = 0; i < call.input_count; i++) free(call.input[i].data);
    for (int o = 0; o < call.output_count; o++) free(call.output[o].data);
    free(call.workspace);
}

/* Index in the whole of element k of a shard on `dim`. */
static int64_t whole_index(const struct operand *shard, int dim, int rank, int64_t k)
{
    int64_t index = 0, stride = 1;
    for (int d = shard->dims - 1; d >= 0; d--) {
        const int64_t at = k % shard->shape[d], extent = shard->shape[d] * (d == dim ? SHARDS : 1);
        index += (at + (d == dim ? rank * shard->shape[d] : 0)) * stride;
        stride *= extent;
        k /= shard->shape[d];
    }
    return index;
}

static void cut(struct operand *shard, const struct operand *whole, struct hapt_property property, int rank)
{
    *shard = *whole;
    if (property.kind != HAPT_PROPERTY_ALL_GATHER) return;
    shard->shape[property.dim] /= SHARDS;
    for (int64_t k = 0; k < elements_of(shard); k++)
        shard->value[k] = whole->value[whole_index(shard, property.dim, rank, k)];
}

static void put_together(struct operand *combined, const struct operand *shard, struct hapt_property property, int rank)
{
    for (int64_t k = 0; k < elements_of(shard); k++) {
        if (property.kind == HAPT_PROPERTY_ALL_GATHER)
            combined->value[whole_index(shard, property.dim, rank, k)] = shard->value[k];
        else if (property.kind == HAPT_PROPERTY_ALL_REDUCE)
            combined->value[k] += shard->value[k];
        else
            combined->value[k] = shard->value[k];
    }
}

/* Runs the shards of a job and compares; fp32 sums in another order differ by rounding alone. */
static void check_sharding(const struct job *job, const struct hapt_property *in, const struct hapt_property *out,
                           char letter)
{
    static struct operand input[HAPT_MAX_INPUTS], output[HAPT_MAX_OUTPUTS], combined[HAPT_MAX_OUTPUTS];
    for (int o = 0; o < job->op.output_count; o++) {
        combined[o] = job->output[o];
        memset(combined[o].value, 0, sizeof combined[o].value);
    }
    for (int rank = 0; rank < SHARDS; rank++) {
        for (int i = 0; i < job->op.input_count; i++) cut(&input[i], &job->input[i], in[i], rank);
        for (int o = 0; o < job->op.output_count; o++) cut(&output[o], &job->output[o], out[o], rank);
        run(job, input, output);
        for (int o = 0; o < job->op.output_count; o++) put_together(&combined[o], &output[o], out[o], rank);
    }
    for (int o = 0; o < job->op.output_count; o++) {
        double apart = 0, scale = 1e-3;
        for (int64_t k = 0; k < elements_of(&combined[o]); k++) {
            apart = fmax(apart, fabs(combined[o].value[k] - job->output[o].value[k]));
            scale = fmax(scale, fabs(job->output[o].value[k]));
        }
        CHECK_MESSAGE(apart <= 1e-5 * scale, "%s sharded on %c: output %d differs by %g of %g", job->op.name, letter, o,
                      apart, scale);
    }
}

static int derived, refused;

static void try_letter(const struct job *job, char letter)
{
    struct hapt_property in[HAPT_MAX_INPUTS] = {{0}}, out[HAPT_MAX_OUTPUTS] = {{0}};
    bool used = false;
    for (int i = 0; i < job->op.input_count; i++) {
        for (int d = 0; d < job->signature->input[i].dims; d++) {
            if (job->signature->input[i].letter[d] != letter || !job->input[i].present) continue;
            in[i] = (struct hapt_property){HAPT_PROPERTY_ALL_GATHER, d};
            used = true;
        }
    }
    if (!used) return;
    const enum hapt_status status = hapt_rule_derive(&job->op, in, out);
    CHECK(status == HAPT_OK || status == HAPT_ERR_INFEASIBLE);
    CHECK_MESSAGE(status == HAPT_OK || letter != 'b', "%s cannot be sharded on its batch", job->op.name);
    hapt_fail_reset();
    if (status != HAPT_OK) {
        refused++;
        return;
    }
    derived++;
    check_sharding(job, in, out, letter);
}

static void every_operator(void)
{
    static struct job job;
    for (int type = 0; type < hapt_op_type_count(); type++) {
        for (int optional = 0; optional < 2; optional++) {
            prepare(&job, type, optional);
            run(&job, job.input, job.output);
            for (char letter = 'a'; letter <= 'z'; letter++) try_letter(&job, letter);
        }
    }
    CHECK_MESSAGE(derived > 60 && refused > 20, "%d derived, %d refused", derived, refused);
}

/* Partial sums must be reduced before anything reads them; inputs sharded on different letters do not go together. */
static void impossible_steps(void)
{
    struct hapt_op op = {
        .type = hapt_op_type_find("add"), .name = "sum", .input_count = 2, .output_count = 1, .input = {0, 1}};
    struct hapt_property in[2] = {{HAPT_PROPERTY_ALL_REDUCE, 0}, {HAPT_PROPERTY_IDENTITY, 0}}, out[1];
    CHECK_FAILS(hapt_rule_derive(&op, in, out), HAPT_ERR_INFEASIBLE);
    in[0] = (struct hapt_property){HAPT_PROPERTY_ALL_GATHER, 0};
    CHECK_FAILS(hapt_rule_derive(&op, in, out), HAPT_ERR_INFEASIBLE);
    in[1] = (struct hapt_property){HAPT_PROPERTY_ALL_GATHER, 1};
    CHECK_FAILS(hapt_rule_derive(&op, in, out), HAPT_ERR_INFEASIBLE);
    in[1] = in[0];
    CHECK_OK(hapt_rule_derive(&op, in, out));
    CHECK(out[0].kind == HAPT_PROPERTY_ALL_GATHER && out[0].dim == 0);
    /* A bias would be added once per shard of the contracted index. */
    op.type = hapt_op_type_find("linear"), op.input_count = 3, op.input[2] = 2;
    const struct hapt_property contracted[3] = {
        {HAPT_PROPERTY_ALL_GATHER, 2}, {HAPT_PROPERTY_ALL_GATHER, 0}, {HAPT_PROPERTY_IDENTITY, 0}};
    CHECK_FAILS(hapt_rule_derive(&op, contracted, out), HAPT_ERR_INFEASIBLE);
    op.input[2] = -1;
    CHECK_OK(hapt_rule_derive(&op, contracted, out));
    CHECK(out[0].kind == HAPT_PROPERTY_ALL_REDUCE);
}

int main(int argc, char **argv)
{
    test_init(&argc, &argv);
    RUN(every_operator);
    RUN(impossible_steps);
    return test_finish();
}
