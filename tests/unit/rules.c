/*
 * Every sharding that the rules derive, for every operator and every letter of its signature. The cpu kernels run the
 * shards, and the shards are joined by their properties. The result must be that of the whole operator.
 */
#include "shards.h"

#include "hapt/rules.h"

enum { SHARDS = 2, LARGEST = 4096 };

struct operand {
    int dims;
    int64_t shape[HAPT_MAX_DIMS];
    bool present, integer;
    double value[LARGEST]; /* values of every type as doubles */
};

struct job {
    int type;
    const struct hapt_signature *signature;
    struct hapt_op op;
    struct operand input[HAPT_MAX_INPUTS], output[HAPT_MAX_OUTPUTS];
    unsigned accumulate;
};

static bool of_experts(int type)
{
    const char *name = hapt_op_type_at(type)->name;
    return strncmp(name, "moe_", 4) == 0 || strncmp(name, "expert_", 7) == 0;
}

static bool of_images(int type)
{
    static const char *const names[] = {"conv2d",  "max_pool", "mean_pool",      "adaptive_pool",
                                        "flatten", "batch_",   "grouped_conv2d", "group_norm"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strncmp(hapt_op_type_at(type)->name, names[i], strlen(names[i])) == 0) return true;
    return false;
}

/* Windows of 3 x 3 at every pixel: results have the size of the images. */
static int64_t size_of_image_letter(char letter)
{
    return letter == 'k' || letter == 'l' ? 3 : letter == 'b' || letter == 'c' ? 4 : letter == 'f' ? 4 * 6 * 6 : 6;
}

/* As the attributes of sample_attributes ask for. */
static const struct {
    const char *name;
    char letter;
    int64_t size;
} shape_sizes[] = {{"reshape", 'f', 24},         {"reshape", 'e', 3},           {"expand", 'e', 1},
                   {"expand_dx", 'e', 1},        {"strided_slice", 'e', 3},     {"pad", 'e', 17},
                   {"strided_slice_dx", 'c', 8}, {"strided_slice_dx", 'e', 12}, {"concat", 'f', 12 + 24}};

static int64_t size_of_letter(int type, char letter)
{
    if (of_images(type) && strchr("ig", letter)) return 2; /* 4 channels in 2 groups */
    if (of_images(type)) return size_of_image_letter(letter);
    if (of_experts(type) && strchr("eck", letter)) return letter == 'e' ? 4 : letter == 'c' ? 6 : 2;
    const char *name = hapt_op_type_at(type)->name;
    if (strncmp(name, "patch_embedding", 15) == 0) { /* 2 x 2 patches of 3 x 3 pixels */
        if (strchr("xy", letter)) return 6;
        if (strchr("hw", letter)) return 3;
        if (letter == 'p') return 4;
    }
    for (size_t s = 0; s < sizeof shape_sizes / sizeof *shape_sizes; s++)
        if (strcmp(name, shape_sizes[s].name) == 0 && letter == shape_sizes[s].letter) return shape_sizes[s].size;
    if (strncmp(name, "class_token", 11) == 0 && strchr("uwpm", letter)) return letter == 'p' ? 5 : 1;
    if (strcmp(name, "dropout") == 0 && letter == 'k') return 2;                 /* numbers of a key */
    if (strncmp(name, "class_and_mean", 14) == 0 && letter == 'e') return 2 * 8; /* 2 d */
    if (strncmp(name, "head_rms_norm", 13) == 0 && letter == 'n') return 12;     /* 24 columns of 2 heads */
    if (strncmp(name, "linear_packed", 13) == 0 && strchr("giw", letter)) /* int8: 9 words per block of 32 columns */
        return letter == 'w' ? 9 : letter == 'g' ? 4 : 4 * 32;
    switch (letter) {
    case 'b': return 4;
    case 't': return 6;
    case 'd': return 8;
    case 'e': return 24; /* 3 d */
    case 'h': return 2;  /* heads */
    case 'n': return 4;  /* query heads: two share one key-value head */
    case 'q': return 24;
    case 'v': return 10;
    default: return 12;
    }
}

/* The rules ask a graph for shapes. In this graph tensor k is operand k, inputs first. */
static struct hapt_tensor tensors[HAPT_MAX_INPUTS + HAPT_MAX_OUTPUTS];
static struct hapt_op operator;
static const struct hapt_graph graph = {
    .tensor = tensors, .tensor_count = HAPT_MAX_INPUTS + HAPT_MAX_OUTPUTS, .op = &operator, .op_count = 1 };
static const struct hapt_sharding sharding = {.source = &graph, .graph = &graph, .axis = {{.size = 1}, {.size = 1}}};
static const struct hapt_axis axis = {.size = SHARDS};

static enum hapt_status rule_of(const struct hapt_op *op, char letter, struct hapt_rule *rule)
{
    operator= * op;
    return hapt_rule_of_cut(&sharding, 0, &axis, 0, (struct hapt_cut){.letter = letter}, rule);
}

static enum hapt_status derive(const struct hapt_op *op, const struct hapt_property *input,
                               const struct hapt_property *wanted, struct hapt_rule *rule)
{
    operator= * op;
    return hapt_rule_derive(&sharding, 0, &axis, 0, input, wanted, rule);
}

static int64_t elements_of(const struct operand *operand)
{
    int64_t count = 1;
    for (int d = 0; d < operand->dims; d++) count *= operand->shape[d];
    return count;
}

static void shape_of(int type, const struct hapt_signature_operand *signature, struct operand *operand)
{
    operand->dims = signature->dims;
    for (int d = 0; d < signature->dims; d++) operand->shape[d] = size_of_letter(type, signature->letter[d]);
    if (signature->dims == 0) operand->dims = 1, operand->shape[0] = 1;
}

static void set_tensor(int index, const struct operand *operand)
{
    tensors[index].kind = HAPT_TENSOR_ACTIVATION;
    tensors[index].dims = operand->dims;
    memcpy(tensors[index].shape, operand->shape, sizeof operand->shape);
}

/* Random values, except where the operator needs special ones: the experts of a token differ, and counts of slots are
 * whole. */
static double input_value(int type, const struct operand *operand, char code, int64_t k, uint64_t *random)
{
    if (of_experts(type) && code == 'i')
        return k % 2 ? ((int)operand->value[k - 1] + 1) % 4 : (double)(hapt_random_next(random) % 4);
    if (of_experts(type) && code == 'f' && operand->dims == 2) return (double)(hapt_random_next(random) % 7);
    if (of_images(type) && code == 'f') return (float)(0.1 + hapt_random_unit(random)); /* some of them are variances */
    return code == 'i' ? (double)(hapt_random_next(random) % 10) : (float)(2 * hapt_random_unit(random) - 1);
}

/* Attributes with which operators have the signature of their row (of those that write their own). */
static void sample_attributes(struct hapt_op *op, const char *name)
{
    static const struct {
        const char *name;
        int64_t integer[HAPT_MAX_ATTRIBUTES];
    } samples[] = {{"permute", {0, 2, 1}},          {"reshape", {-1, 8, 3}}, {"expand", {4}},
                   {"strided_slice", {1, 3, 9, 2}}, {"pad", {1, 2, 3}},      {"concat", {1}},
                   {"strided_slice_dx", {1, 1, 9}}};
    for (size_t s = 0; s < sizeof samples / sizeof *samples; s++)
        if (strcmp(name, samples[s].name) == 0) memcpy(op->integer, samples[s].integer, sizeof op->integer);
    if (strcmp(name, "sum") == 0 || strcmp(name, "mean") == 0 || strcmp(name, "sum_dx") == 0 ||
        strcmp(name, "mean_dx") == 0)
        op->integer[0] = 4;
    if (strcmp(name, "leaky_relu") == 0 || strcmp(name, "elu") == 0) op->real[0] = 0.3;
    if (strcmp(name, "clamp") == 0) op->real[0] = -0.5, op->real[1] = 0.7;
    if (strcmp(name, "power") == 0) op->real[0] = 2;
}

static void prepare(struct job *job, int type, bool optional)
{
    const struct hapt_op_type *row = hapt_op_type_at(type);
    uint64_t random = (uint64_t)type + 1;
    *job = (struct job){.type = type, .signature = hapt_op_signature(type)};
    job->op.type = type, job->op.name = row->name;
    job->op.input_count = job->signature->input_count, job->op.output_count = job->signature->output_count;
    if (strstr(row->name, "attention")) job->op.integer[0] = 2, job->op.integer[1] = 1;
    if (strncmp(row->name, "rope", 4) == 0) job->op.integer[0] = 2, job->op.real[0] = 100;
    if (strncmp(row->name, "take_token", 10) == 0) job->op.integer[0] = 1;
    if (strstr(row->name, "_norm")) job->op.real[0] = 1e-5;
    if (strncmp(row->name, "head_rms_norm", 13) == 0) job->op.integer[0] = 2;
    if (strcmp(row->name, "scale") == 0 || strncmp(row->name, "softcap", 7) == 0) job->op.real[0] = 1.5;
    if (strcmp(row->name, "dropout") == 0) job->op.real[0] = 0.4;
    sample_attributes(&job->op, row->name);
    if (strstr(row->name, "batch_")) job->op.integer[0] = 4 * 6 * 6;
    if (strstr(row->name, "conv2d")) job->op.integer[0] = job->op.integer[1] = 1;
    if (strncmp(row->name, "grouped_", 8) == 0 && strstr(row->name, "conv2d"))
        job->op.integer[0] = 2, job->op.integer[2] = 1;
    if (strncmp(row->name, "group_norm", 10) == 0) job->op.integer[0] = 2;
    if (strstr(row->name, "max_pool")) job->op.integer[0] = 3, job->op.integer[1] = job->op.integer[2] = 1;
    /* Gradients of parameters always accumulate. */
    const char *tail = strrchr(row->name, '_');
    if (tail && strcmp(tail, "_dw") == 0) job->accumulate = ~0u;
    if (strcmp(row->name, "layer_norm_backward") == 0) job->accumulate = 6;
    if (strcmp(row->name, "head_rms_norm_backward") == 0) job->accumulate = 2;
    if (strcmp(row->name, "group_norm_backward") == 0) job->accumulate = 6;
    for (int i = 0; i < job->op.input_count; i++) {
        struct operand *operand = &job->input[i];
        shape_of(type, &job->signature->input[i], operand);
        set_tensor(i, operand);
        operand->present = optional || !job->signature->input[i].optional;
        operand->integer = row->dtypes[i] == 'i';
        job->op.input[i] = operand->present ? i : -1;
        CHECK(elements_of(operand) <= LARGEST);
        for (int64_t k = 0; k < elements_of(operand); k++)
            operand->value[k] = input_value(type, operand, row->dtypes[i], k, &random);
    }
    for (int o = 0; o < job->op.output_count; o++) {
        shape_of(type, &job->signature->output[o], &job->output[o]);
        job->output[o].integer = row->dtypes[job->signature->input_count + 2 + o] == 'i';
        job->op.output[o] = HAPT_MAX_INPUTS + o;
        set_tensor(HAPT_MAX_INPUTS + o, &job->output[o]);
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

static void run(const struct job *job, const struct hapt_op *op, const struct operand *input, struct operand *output,
                bool indexed, int64_t first, int64_t valid)
{
    struct hapt_call call = {
        .input_count = op->input_count, .output_count = op->output_count, .accumulate = job->accumulate, .threads = 1};
    memcpy(call.integer, op->integer, sizeof call.integer);
    memcpy(call.real, op->real, sizeof call.real);
    for (int i = 0; i < call.input_count; i++)
        if (input[i].present) call.input[i] = view_of(&input[i], true);
    for (int o = 0; o < call.output_count; o++) call.output[o] = view_of(&output[o], false);
    shards_run(op, &call, indexed, first, valid);
    for (int o = 0; o < call.output_count; o++)
        for (int64_t k = 0; k < elements_of(&output[o]); k++)
            output[o].value[k] =
                output[o].integer ? ((int32_t *)call.output[o].data)[k] : ((float *)call.output[o].data)[k];
    for (int i = 0; i < call.input_count; i++) free(call.input[i].data);
    for (int o = 0; o < call.output_count; o++) free(call.output[o].data);
}

/* Index in the whole tensor of element k of a rank's shard. */
static int64_t whole_index(const struct operand *shard, struct hapt_property property, int rank, int64_t k)
{
    const int dim = property.kind == HAPT_PROPERTY_SHARDED ? property.dim : -1;
    const int64_t extent = dim >= 0 ? shard->shape[dim] * SHARDS : 0;
    return shards_whole_index(shard->shape, shard->dims, dim, property.blocks > 1 ? property.blocks : 1, rank, extent,
                              k);
}

static void cut(struct operand *shard, const struct operand *whole, struct hapt_property property, int rank)
{
    *shard = *whole;
    if (property.kind != HAPT_PROPERTY_SHARDED) return;
    shard->shape[property.dim] /= SHARDS;
    for (int64_t k = 0; k < elements_of(shard); k++)
        shard->value[k] = whole->value[whole_index(shard, property, rank, k)];
}

static void put_together(struct operand *combined, const struct operand *shard, struct hapt_property property, int rank)
{
    for (int64_t k = 0; k < elements_of(shard); k++) {
        if (property.kind == HAPT_PROPERTY_SHARDED)
            combined->value[whole_index(shard, property, rank, k)] = shard->value[k];
        else if (property.kind == HAPT_PROPERTY_PARTIAL)
            combined->value[k] += shard->value[k];
        else
            combined->value[k] = shard->value[k];
    }
}

/* Attributes that equal the size of a sharded index. */
static struct hapt_op local_op(const struct job *job, char letter)
{
    struct hapt_op op = job->op;
    const char *sized = hapt_op_type_at(job->type)->sized_letters;
    for (int k = 0; sized && sized[k]; k++)
        if (sized[k] == letter) op.integer[k] /= SHARDS;
    return op;
}

/* Runs the shards of a job and compares. fp32 sums in another order differ by rounding only. */
static void check_sharding(const struct job *job, const struct hapt_rule *rule)
{
    static struct operand input[HAPT_MAX_INPUTS], output[HAPT_MAX_OUTPUTS], combined[HAPT_MAX_OUTPUTS];
    const struct hapt_op op = local_op(job, rule->cut.letter);
    bool indexed = false;
    for (int i = 0; i < op.input_count; i++)
        for (int d = 0; d < job->signature->input[i].dims; d++)
            indexed = indexed ||
                      (job->signature->input[i].indexed[d] && job->signature->input[i].letter[d] == rule->cut.letter);
    for (int o = 0; o < op.output_count; o++)
        for (int d = 0; d < job->signature->output[o].dims; d++)
            indexed = indexed ||
                      (job->signature->output[o].indexed[d] && job->signature->output[o].letter[d] == rule->cut.letter);
    for (int o = 0; o < op.output_count; o++) {
        combined[o] = job->output[o];
        memset(combined[o].value, 0, sizeof combined[o].value);
    }
    const int64_t range = size_of_letter(job->type, rule->cut.letter) / SHARDS;
    for (int rank = 0; rank < SHARDS; rank++) {
        for (int i = 0; i < op.input_count; i++) cut(&input[i], &job->input[i], rule->input[i], rank);
        for (int i = 0; i < op.input_count && rank > 0; i++)
            if (rule->first_rank_inputs >> i & 1u) input[i].present = false;
        for (int o = 0; o < op.output_count; o++) cut(&output[o], &job->output[o], rule->output[o], rank);
        run(job, &op, input, output, indexed, rank * range, range);
        for (int o = 0; o < op.output_count; o++) put_together(&combined[o], &output[o], rule->output[o], rank);
    }
    for (int o = 0; o < op.output_count; o++) {
        double apart = 0, scale = 1e-3;
        for (int64_t k = 0; k < elements_of(&combined[o]); k++) {
            apart = fmax(apart, fabs(combined[o].value[k] - job->output[o].value[k]));
            scale = fmax(scale, fabs(job->output[o].value[k]));
        }
        CHECK_MESSAGE(apart <= 1e-5 * scale, "%s sharded on %c: output %d differs by %g of %g", job->op.name,
                      rule->cut.letter, o, apart, scale);
    }
}

static int applied, exchanging, refused, passed_on;

static void try_letter(const struct job *job, char letter)
{
    struct hapt_rule rule, derived;
    bool used = false, of_input = false;
    for (int i = 0; i < job->op.input_count; i++)
        for (int d = 0; d < job->signature->input[i].dims; d++)
            if (job->input[i].present && job->signature->input[i].sharded_with[d] == letter) used = of_input = true;
    for (int o = 0; o < job->op.output_count; o++)
        for (int d = 0; d < job->signature->output[o].dims; d++)
            used = used || job->signature->output[o].sharded_with[d] == letter;
    const enum hapt_status status = rule_of(&job->op, letter, &rule);
    CHECK(status == HAPT_OK || status == HAPT_ERR_INFEASIBLE);
    CHECK_MESSAGE(used || status != HAPT_OK, "%s has no letter %c", job->op.name, letter);
    CHECK_MESSAGE(!used || status == HAPT_OK || letter != 'b', "%s cannot be sharded on its batch", job->op.name);
    hapt_fail_reset();
    if (status != HAPT_OK) {
        refused += used;
        return;
    }
    /* The rule can be looked up by its inputs, or by its outputs if no input has the letter. */
    CHECK_OK(derive(&job->op, rule.input, of_input ? NULL : rule.output, &derived));
    CHECK(derived.cut.letter == letter && derived.first_rank_inputs == rule.first_rank_inputs);
    for (int o = 0; o < job->op.output_count; o++) CHECK(hapt_property_same(derived.output[o], rule.output[o]));
    applied++;
    exchanging += rule.exchange;
    if (!rule.exchange) check_sharding(job, &rule);
}

/* A linear operator maps partial sums to partial sums. Other operators refuse them. */
static void try_partial(const struct job *job)
{
    static struct operand input[HAPT_MAX_INPUTS], output[HAPT_MAX_OUTPUTS], combined[HAPT_MAX_OUTPUTS];
    struct hapt_rule rule;
    uint64_t random = 77;
    const bool linear = hapt_op_type_at(job->type)->linear;
    CHECK((rule_of(&job->op, HAPT_CUT_PARTIAL, &rule) == HAPT_OK) == linear);
    hapt_fail_reset();
    if (!linear) return;
    /* Inputs of a model and weights never become partial sums. */
    for (int kind = HAPT_TENSOR_INPUT; kind <= HAPT_TENSOR_PARAMETER; kind++) {
        tensors[0].kind = (enum hapt_tensor_kind)kind;
        CHECK_FAILS(rule_of(&job->op, HAPT_CUT_PARTIAL, &rule), HAPT_ERR_INFEASIBLE);
        tensors[0].kind = HAPT_TENSOR_ACTIVATION;
    }
    CHECK_OK(rule_of(&job->op, HAPT_CUT_PARTIAL, &rule));
    for (int o = 0; o < job->op.output_count; o++) {
        CHECK(rule.output[o].kind == HAPT_PROPERTY_PARTIAL);
        combined[o] = job->output[o];
        memset(combined[o].value, 0, sizeof combined[o].value);
    }
    static double rest[HAPT_MAX_INPUTS][LARGEST];
    for (int i = 0; i < job->op.input_count; i++) memcpy(rest[i], job->input[i].value, sizeof rest[i]);
    for (int rank = 0; rank < SHARDS; rank++) {
        for (int i = 0; i < job->op.input_count; i++) {
            input[i] = job->input[i];
            CHECK(!input[i].present || rule.input[i].kind == HAPT_PROPERTY_PARTIAL);
            for (int64_t k = 0; k < elements_of(&input[i]); k++) {
                input[i].value[k] = rank == SHARDS - 1 ? rest[i][k] : (float)(2 * hapt_random_unit(&random) - 1);
                rest[i][k] -= input[i].value[k];
            }
        }
        for (int o = 0; o < job->op.output_count; o++) output[o] = job->output[o];
        run(job, &job->op, input, output, false, 0, 0);
        for (int o = 0; o < job->op.output_count; o++) put_together(&combined[o], &output[o], rule.output[o], rank);
    }
    for (int o = 0; o < job->op.output_count; o++)
        for (int64_t k = 0; k < elements_of(&combined[o]); k++)
            CHECK_NEAR(combined[o].value[k], job->output[o].value[k], 1e-5);
    passed_on++;
}

static void every_operator(void)
{
    static struct job job;
    for (int type = 0; type < hapt_op_type_count(); type++) {
        if (hapt_op_type_at(type)->collective) continue; /* link algorithms that run them */
        for (int optional = 0; optional < 2; optional++) {
            prepare(&job, type, optional);
            run(&job, &job.op, job.input, job.output, false, 0, 0);
            for (char letter = 'a'; letter <= 'z'; letter++) try_letter(&job, letter);
            try_partial(&job);
        }
    }
    CHECK_MESSAGE(applied > 70 && refused > 5, "%d applied, %d refused", applied, refused);
    CHECK(passed_on >= 4);  /* sums and copies */
    CHECK(exchanging == 2); /* cross-entropy over the vocabulary */
}

/* Operators that write their signatures, with other shapes and attributes than those of their rows. */
struct variant {
    const char *type;
    int64_t input[2][HAPT_MAX_DIMS + 1], output[HAPT_MAX_DIMS + 1]; /* end with 0; output: of backward operators */
    int64_t integer[HAPT_MAX_ATTRIBUTES];
};

static void set_operand(struct operand *operand, const int64_t *shape, int tensor)
{
    *operand = (struct operand){.present = shape[0] > 0};
    for (; shape[operand->dims]; operand->dims++) operand->shape[operand->dims] = shape[operand->dims];
    set_tensor(tensor, operand);
}

static void prepare_variant(struct job *job, const struct variant *variant)
{
    uint64_t random = 5;
    struct hapt_tensor made[HAPT_MAX_OUTPUTS] = {{0}};
    *job = (struct job){.type = hapt_op_type_find(variant->type)};
    job->op.type = job->type, job->op.name = variant->type;
    job->op.input_count = hapt_op_signature(job->type)->input_count, job->op.output_count = 1;
    memcpy(job->op.integer, variant->integer, sizeof variant->integer);
    for (int i = 0; i < job->op.input_count; i++) {
        set_operand(&job->input[i], variant->input[i], i);
        job->op.input[i] = job->input[i].present ? i : -1;
        for (int64_t k = 0; job->input[i].present && k < elements_of(&job->input[i]); k++)
            job->input[i].value[k] = (float)(2 * hapt_random_unit(&random) - 1);
    }
    job->op.output[0] = HAPT_MAX_INPUTS;
    if (variant->output[0]) {
        set_operand(&job->output[0], variant->output, HAPT_MAX_INPUTS);
    } else {
        CHECK_OK(hapt_op_infer(&graph, &job->op, made));
        job->output[0].dims = made[0].dims;
        memcpy(job->output[0].shape, made[0].shape, sizeof made[0].shape);
        set_tensor(HAPT_MAX_INPUTS, &job->output[0]);
    }
    job->signature = hapt_op_signature_of(&graph, &job->op);
}

static void written_signatures(void)
{
    static const struct variant variants[] = {
        {"permute", {{4, 6, 2, 8}}, {0}, {3, 1, 0, 2}},
        {"permute", {{2, 4, 1, 6, 2}}, {0}, {0, 1, 3, 4, 2}},
        {"reshape", {{4, 6, 16}}, {0}, {-1, 6, 2, 8}},
        {"reshape", {{4, 6, 2, 8}}, {0}, {-1, 6, 16}},
        {"reshape", {{4, 6, 16}}, {0}, {-1, 16}},
        {"reshape", {{24, 16}}, {0}, {4, 6, 16}},
        {"reshape", {{4, 12, 2, 8}}, {0}, {-1, 6, 4, 8}},
        {"reshape", {{4, 8, 3}}, {0}, {-1, 4, 6}},
        {"reshape", {{4, 1, 6}}, {0}, {4, 6}},
        {"reshape", {{12, 4}}, {0}, {6, 8}},
        {"expand", {{4, 1, 6}, {4, 8, 6}}, {0}, {0}},
        {"expand", {{1, 6, 1, 1}, {4, 6, 2, 4}}, {0}, {0}},
        {"expand", {{4, 1, 6}}, {0}, {0, 8}},
        {"expand_dx", {{4, 8, 6}}, {4, 1, 6}, {0}},
        {"expand_dx", {{4, 6, 2, 4}}, {1, 6, 1, 1}, {0}},
        {"strided_slice", {{4, 6, 9}}, {0}, {2, 1, 8, 3}},
        {"strided_slice_dx", {{4, 6, 3}}, {4, 6, 9}, {2, 1, 8, 3}},
        {"pad", {{4, 6, 9}}, {0}, {2, 1, 2}},
        {"concat", {{4, 6, 2}, {4, 6, 6}}, {0}, {2}},
        {"concat", {{4, 3, 2, 6}, {4, 5, 2, 6}}, {0}, {1}},
        {"sum", {{4, 6, 8}}, {0}, {1}},
        {"sum", {{4, 6, 2, 8}}, {0}, {12, 1}},
        {"sum", {{4, 6, 8}}, {0}, {7}},
        {"sum_dx", {{6, 8}}, {4, 6, 8}, {1}},
        {"sum_dx", {{4, 6, 1, 1}}, {4, 6, 2, 8}, {12, 1}},
        {"mean", {{4, 6, 2, 8}}, {0}, {12}},
        {"mean", {{4, 6, 8}}, {0}, {2, 1}},
        {"mean_dx", {{4, 1, 8}}, {4, 6, 8}, {2, 1}},
        {"matmul", {{4, 2, 6, 8}, {4, 2, 8, 10}}, {0}, {0}},
        {"matmul", {{4, 8, 6}, {4, 8, 10}}, {0}, {1}},
        {"matmul", {{4, 6, 8}, {4, 10, 8}}, {0}, {2}},
        {"matmul", {{8, 6}, {10, 8}}, {0}, {3}},
    };
    static struct job job;
    const int before = applied;
    for (size_t v = 0; v < sizeof variants / sizeof *variants; v++) {
        prepare_variant(&job, &variants[v]);
        run(&job, &job.op, job.input, job.output, false, 0, 0);
        for (char letter = 'a'; letter <= 'z'; letter++) try_letter(&job, letter);
        try_partial(&job);
    }
    CHECK_MESSAGE(applied - before >= 70, "%d applied", applied - before);
}

#define REPLICATED                       \
    {                                    \
        .kind = HAPT_PROPERTY_REPLICATED \
    }
#define PARTIAL                       \
    {                                 \
        .kind = HAPT_PROPERTY_PARTIAL \
    }
#define SHARD(dim, blocks)                       \
    {                                            \
        HAPT_PROPERTY_SHARDED, dim, blocks, 0, 0 \
    }

/* Partial sums must be reduced before they are read. Inputs sharded on different letters cannot be combined. */
static void impossible_steps(void)
{
    for (int k = 0; k < graph.tensor_count; k++) tensors[k] = (struct hapt_tensor){.dims = 3, .shape = {4, 6, 12}};
    struct hapt_op op = {
        .type = hapt_op_type_find("add"), .name = "sum", .input_count = 2, .output_count = 1, .input = {0, 1}};
    struct hapt_rule rule;
    CHECK_FAILS(derive(&op, (struct hapt_property[]){PARTIAL, REPLICATED}, NULL, &rule), HAPT_ERR_INFEASIBLE);
    CHECK_FAILS(derive(&op, (struct hapt_property[]){SHARD(0, 1), REPLICATED}, NULL, &rule), HAPT_ERR_INFEASIBLE);
    CHECK_FAILS(derive(&op, (struct hapt_property[]){SHARD(0, 1), SHARD(1, 1)}, NULL, &rule), HAPT_ERR_INFEASIBLE);
    CHECK_FAILS(derive(&op, (struct hapt_property[]){SHARD(2, 1), SHARD(2, 3)}, NULL, &rule), HAPT_ERR_INFEASIBLE);
    CHECK_OK(derive(&op, (struct hapt_property[]){SHARD(2, 3), SHARD(2, 3)}, NULL, &rule));
    CHECK(rule.output[0].kind == HAPT_PROPERTY_SHARDED && rule.output[0].dim == 2 && rule.output[0].blocks == 3);
    op = (struct hapt_op){.type = hapt_op_type_find("layer_norm"),
                          .name = "norm",
                          .input_count = 3,
                          .output_count = 3,
                          .input = {0, 1, 2}};
    CHECK_FAILS(rule_of(&op, 'd', &rule), HAPT_ERR_INFEASIBLE);
    /* Heads: the input is three blocks wide, the output one. */
    tensors[2].shape[2] = 4, tensors[3] = (struct hapt_tensor){.dims = 3, .shape = {4, 2, 6}};
    op = (struct hapt_op){.type = hapt_op_type_find("attention"),
                          .name = "heads",
                          .input_count = 1,
                          .output_count = 2,
                          .output = {2, 3},
                          .integer = {2}};
    CHECK_FAILS(derive(&op, (struct hapt_property[]){SHARD(2, 1)}, NULL, &rule), HAPT_ERR_INFEASIBLE);
    CHECK_OK(derive(&op, (struct hapt_property[]){SHARD(2, 3)}, NULL, &rule));
    CHECK(rule.output[0].dim == 2 && rule.output[0].blocks == 1 && rule.output[1].dim == 1);
    hapt_fail_reset();
}

/* Only one shard adds a bias to partial sums. The bias's gradient is whole where that of the output is. */
static void terms(void)
{
    tensors[1] = (struct hapt_tensor){.dims = 2, .shape = {12, 12}};
    struct hapt_op op = {
        .type = hapt_op_type_find("linear"), .name = "rows", .input_count = 3, .output_count = 1, .input = {0, 1, 2}};
    struct hapt_rule rule;
    CHECK_OK(derive(&op, (struct hapt_property[]){SHARD(2, 1), SHARD(0, 1), REPLICATED}, NULL, &rule));
    CHECK(rule.output[0].kind == HAPT_PROPERTY_PARTIAL && rule.first_rank_inputs == 4);
    op.input[2] = -1;
    CHECK_OK(derive(&op, (struct hapt_property[]){SHARD(2, 1), SHARD(0, 1), REPLICATED}, NULL, &rule));
    CHECK(rule.output[0].kind == HAPT_PROPERTY_PARTIAL && rule.first_rank_inputs == 0);
    op = (struct hapt_op){.type = hapt_op_type_find("linear_dw"),
                          .name = "dw",
                          .input_count = 2,
                          .output_count = 2,
                          .input = {0, 1},
                          .output = {2, 3}};
    CHECK_OK(derive(&op, (struct hapt_property[]){SHARD(2, 1), REPLICATED}, NULL, &rule));
    CHECK(rule.output[0].kind == HAPT_PROPERTY_SHARDED && rule.output[0].dim == 0);
    CHECK(rule.output[1].kind == HAPT_PROPERTY_REPLICATED);
}

int main(int argc, char **argv)
{
    test_init(&argc, &argv);
    RUN(every_operator);
    RUN(written_signatures);
    RUN(impossible_steps);
    RUN(terms);
    return test_finish();
}
