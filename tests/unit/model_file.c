/* The model file: round trips, initial values, and invalid files. */
#include "test.h"

#include <unistd.h>

#include "../../src/model/init.h"
#include "hapt/model.h"
#include "hapt/ops.h"

static struct hapt_arena arena;
static char path[64], other_path[64];

static struct hapt_model *gpt(const char *const *more, int count)
{
    const char *argv[64] = {"hapt", "model", "gpt", "--output", "x.h5"};
    int argc = 5;
    for (int i = 0; i < count; i++) argv[argc++] = more[i];
    struct hapt_config *config = NULL;
    struct hapt_model *model = NULL;
    CHECK_OK(hapt_config_parse(argc, (char **)argv, &arena, &config));
    if (config) CHECK_OK(hapt_model_build("gpt", config, &arena, &model));
    if (!model) exit(1);
    return model;
}
#define GPT(...) gpt((const char *const[]){__VA_ARGS__}, (int)(sizeof((const char *[]){__VA_ARGS__}) / sizeof(char *)))

static struct hapt_model *small(void)
{
    return GPT("--layers", "2", "--hidden", "24", "--heads", "4", "--sequence", "10", "--vocab", "31", "--microbatch",
               "3", "--seed", "7", "--learning-rate", "1e-3", "--steps", "20");
}

static bool equal_ops(const struct hapt_op *a, const struct hapt_op *b)
{
    return a->type == b->type && !strcmp(a->name, b->name) && a->input_count == b->input_count &&
           a->output_count == b->output_count && a->accumulate == b->accumulate && a->forward_op == b->forward_op &&
           !memcmp(a->input, b->input, (size_t)a->input_count * sizeof(int)) &&
           !memcmp(a->output, b->output, (size_t)a->output_count * sizeof(int)) &&
           !memcmp(a->integer, b->integer, sizeof a->integer) && !memcmp(a->real, b->real, sizeof a->real);
}

static bool equal_tensors(const struct hapt_tensor *a, const struct hapt_tensor *b)
{
    return !strcmp(a->name, b->name) && a->kind == b->kind && a->role == b->role && a->dtype == b->dtype &&
           a->dims == b->dims && !memcmp(a->shape, b->shape, (size_t)a->dims * sizeof a->shape[0]) &&
           a->producer == b->producer && a->gradient == b->gradient && a->primal == b->primal &&
           a->trainable == b->trainable && a->init == b->init && a->init_std == b->init_std;
}

static bool equal_models(const struct hapt_model *a, const struct hapt_model *b)
{
    const struct hapt_graph *g = a->graph, *h = b->graph;
    bool equal = !strcmp(a->family, b->family) && a->setting_count == b->setting_count &&
                 a->microbatch == b->microbatch && a->training_count == b->training_count &&
                 a->sequence == b->sequence && a->vocab == b->vocab && a->dtype == b->dtype && a->seed == b->seed &&
                 g->loss == h->loss && g->op_count == h->op_count && g->tensor_count == h->tensor_count &&
                 g->forward_count == h->forward_count;
    for (int i = 0; equal && i < a->setting_count; i++) {
        equal = !strcmp(a->setting[i].name, b->setting[i].name) && !strcmp(a->setting[i].value, b->setting[i].value);
    }
    for (int i = 0; equal && i < a->training_count; i++) {
        equal =
            !strcmp(a->training[i].name, b->training[i].name) && !strcmp(a->training[i].value, b->training[i].value);
    }
    for (int op = 0; equal && op < g->op_count; op++) equal = equal_ops(&g->op[op], &h->op[op]);
    for (int t = 0; equal && t < g->tensor_count; t++) equal = equal_tensors(&g->tensor[t], &h->tensor[t]);
    return equal;
}

static struct hapt_model *family_in(const char *family, const char *dtype)
{
    const char *argv[] = {"hapt",    "model",   family,       "--layers", "2",       "--hidden", "24",
                          "--heads", "4",       "--sequence", "10",       "--vocab", "31",       "--microbatch",
                          "3",       "--dtype", dtype,        "--output", "x.h5"};
    const char *images[] = {"hapt",         "model", family,    "--image", "32",       "--classes", "5",
                            "--microbatch", "3",     "--dtype", dtype,     "--output", "x.h5"};
    const bool pictures = !strcmp(family, "vgg") || !strcmp(family, "resnet") || !strcmp(family, "vit");
    struct hapt_config *config = NULL;
    struct hapt_model *model = NULL;
    CHECK_OK(pictures ? hapt_config_parse((int)(sizeof images / sizeof *images), (char **)images, &arena, &config)
                      : hapt_config_parse((int)(sizeof argv / sizeof *argv), (char **)argv, &arena, &config));
    if (config) CHECK_OK(hapt_model_build(family, config, &arena, &model));
    return model;
}

/* Converting a model to another type gives the model that the zoo makes in that type. */
static void precisions(void)
{
    static const char *const family[] = {"gpt", "bert", "bert-moe", "llama", "vit", "vgg", "resnet"}, *const type[] = {
                                                                                                          "fp32",
                                                                                                          "bf16",
                                                                                                          "fp16"};
    for (int f = 0; f < 7; f++)
        for (int from = 0; from < 3; from++)
            for (int to = 0; to < 3; to++) {
                struct hapt_model *model = family_in(family[f], type[from]), *wanted = family_in(family[f], type[to]);
                if (!model || !wanted) return;
                CHECK_OK(hapt_model_compute_in(model, hapt_precision_find(type[to])));
                CHECK_MESSAGE(equal_models(model, wanted), "%s in %s is not one that was made in %s", family[f],
                              type[from], type[to]);
            }
    struct hapt_model *model = small();
    CHECK_OK(hapt_model_compute_in(model, HAPT_PRECISION_TF32));
    CHECK(model->precision == HAPT_PRECISION_TF32 && model->dtype == HAPT_F32 && equal_models(model, small()));
}

static void round_trip(void)
{
    const struct hapt_model *models[] = {small(),
                                         GPT("--layers", "1", "--hidden", "8", "--heads", "1", "--sequence", "4",
                                             "--vocab", "300", "--dtype", "bf16", "--tied-embeddings", "no")};
    for (int i = 0; i < 2; i++) {
        struct hapt_model *loaded = NULL;
        CHECK_OK(hapt_model_save(models[i], NULL, NULL, path));
        CHECK_OK(hapt_model_load(path, &arena, &loaded));
        if (!loaded) continue;
        CHECK(equal_models(models[i], loaded));
        CHECK(!loaded->has_parameters && !loaded->has_data && !strcmp(loaded->path, path));
        CHECK_OK(hapt_model_check(loaded));
    }
    CHECK(!strcmp(hapt_model_setting(models[0], "hidden"), "24"));
    CHECK(hapt_model_setting(models[0], "nonsense") == NULL);
    CHECK(models[0]->training_count == 2 && !strcmp(models[0]->training[0].name, "steps"));
}

/* 12 d^2 + 13 d per block, embeddings, final norm; a head only if untied. */
static void parameter_names_and_counts(void)
{
    const struct hapt_model *tied = small();
    const int64_t d = 24, V = 31, T = 10, expected = 2 * (12 * d * d + 13 * d) + V * d + T * d + 2 * d;
    CHECK(hapt_model_parameter_count(tied) == expected);
    CHECK(hapt_graph_find_tensor(tied->graph, "lm_head.weight") == -1);
    static const char *const names[] = {"wte.weight",
                                        "wpe.weight",
                                        "h.0.ln_1.weight",
                                        "h.0.ln_1.bias",
                                        "h.0.attn.c_attn.weight",
                                        "h.0.attn.c_attn.bias",
                                        "h.0.attn.c_proj.weight",
                                        "h.0.attn.c_proj.bias",
                                        "h.1.ln_2.weight",
                                        "h.1.ln_2.bias",
                                        "h.1.mlp.c_fc.weight",
                                        "h.1.mlp.c_fc.bias",
                                        "h.1.mlp.c_proj.weight",
                                        "h.1.mlp.c_proj.bias",
                                        "ln_f.weight",
                                        "ln_f.bias"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        const int t = hapt_graph_find_tensor(tied->graph, names[i]);
        CHECK_MESSAGE(t >= 0 && tied->graph->tensor[t].kind == HAPT_TENSOR_PARAMETER, "no parameter %s", names[i]);
    }
    const struct hapt_model *untied = GPT("--layers", "2", "--hidden", "24", "--heads", "4", "--sequence", "10",
                                          "--vocab", "31", "--tied-embeddings", "no");
    CHECK(hapt_model_parameter_count(untied) == expected + V * d);
    CHECK(hapt_graph_find_tensor(untied->graph, "lm_head.weight") >= 0);
    /* GPT-2 itself. */
    CHECK(hapt_model_parameter_count(GPT("--layers", "12")) == 124439808);
}

static void moments(const float *value, int64_t count, double *mean, double *deviation)
{
    *mean = *deviation = 0;
    for (int64_t i = 0; i < count; i++) *mean += value[i] / (double)count;
    for (int64_t i = 0; i < count; i++) *deviation += (value[i] - *mean) * (value[i] - *mean) / (double)count;
    *deviation = sqrt(*deviation);
}

/* Initial values depend on seed and name only, not on the model, the microbatch or the requested part. */
static void initial_values(void)
{
    const struct hapt_model *model =
        GPT("--layers", "2", "--hidden", "64", "--heads", "4", "--sequence", "16", "--vocab", "100", "--seed", "7");
    const struct hapt_model *wider = GPT("--layers", "2", "--hidden", "64", "--heads", "2", "--sequence", "32",
                                         "--vocab", "100", "--seed", "7", "--microbatch", "9", "--dtype", "bf16");
    const int t = hapt_graph_find_tensor(model->graph, "h.1.mlp.c_fc.weight");
    const struct hapt_tensor *tensor = &model->graph->tensor[t];
    const int64_t count = hapt_tensor_elements(tensor);
    float *value = hapt_arena_alloc(&arena, (size_t)count, sizeof *value),
          *again = hapt_arena_alloc(&arena, (size_t)count, sizeof *again);
    double mean, deviation;
    CHECK_OK(hapt_model_initial(model, t, value));
    CHECK_OK(hapt_model_initial(wider, hapt_graph_find_tensor(wider->graph, "h.1.mlp.c_fc.weight"), again));
    CHECK(!memcmp(value, again, (size_t)count * sizeof *value));
    uint64_t seed = 3;
    for (int64_t first = 0; first < count;) {
        int64_t part = 1 + (int64_t)(hapt_random_next(&seed) % 97);
        if (part > count - first) part = count - first;
        memset(again, 0, (size_t)count * sizeof *again);
        hapt_init_values(model->seed, tensor, first, part, again);
        CHECK(!memcmp(value + first, again, (size_t)part * sizeof *again));
        first += part;
    }
    /* 16,384 draws: three standard errors of the mean are 0.023 std, of the deviation 0.017 std. */
    moments(value, count, &mean, &deviation);
    CHECK_NEAR(mean, 0, 0.03 * 0.02);
    CHECK_NEAR(deviation, 0.02, 0.03 * 0.02);
    const int projection = hapt_graph_find_tensor(model->graph, "h.1.mlp.c_proj.weight");
    CHECK_OK(hapt_model_initial(model, projection, again));
    moments(again, count, &mean, &deviation);
    CHECK_NEAR(deviation, 0.02 / sqrt(4), 0.03 * 0.01);
    CHECK(memcmp(value, again, (size_t)count * sizeof *value) != 0);
    hapt_init_values(8, tensor, 0, count, again);
    CHECK(memcmp(value, again, (size_t)count * sizeof *value) != 0);
    CHECK_OK(hapt_model_initial(model, hapt_graph_find_tensor(model->graph, "ln_f.weight"), again));
    for (int i = 0; i < 64; i++) CHECK(again[i] == 1);
    CHECK_OK(hapt_model_initial(model, hapt_graph_find_tensor(model->graph, "ln_f.bias"), again));
    for (int i = 0; i < 64; i++) CHECK(again[i] == 0);
}

/* The model file can contain weights and tokens. */
static void weights_and_tokens(void)
{
    const struct hapt_model *model = small();
    struct hapt_h5 *file = NULL;
    int64_t tokens[] = {40};
    int32_t token[40];
    float *value = hapt_arena_alloc(&arena, 100000, sizeof *value),
          *read = hapt_arena_alloc(&arena, 100000, sizeof *read);
    for (int i = 0; i < 40; i++) token[i] = i % 31;
    for (int fault = 0; fault < 4; fault++) { /* 1: a wrong shape, 2: a missing parameter, 3: not a number */
        CHECK_OK(hapt_h5_create(other_path, "weights", 1, &file));
        for (int t = 0; t < model->graph->tensor_count; t++) {
            const struct hapt_tensor *tensor = &model->graph->tensor[t];
            if (tensor->kind != HAPT_TENSOR_PARAMETER) continue;
            char name[128];
            const bool last = !strcmp(tensor->name, "ln_f.bias");
            const int64_t shape[] = {tensor->shape[0] + (last && fault == 1), tensor->shape[1]};
            if (last && fault == 2) continue;
            for (int64_t i = 0; i < hapt_tensor_elements(tensor); i++) value[i] = (float)(t + 1e-3 * (double)i);
            if (last && fault == 3) value[3] = NAN;
            snprintf(name, sizeof name, "/parameters/%s", tensor->name);
            CHECK_OK(hapt_h5_write(file, name, HAPT_H5_F32, tensor->dims, shape, value, ""));
        }
        CHECK_OK(hapt_h5_write(file, "/tokens", HAPT_H5_I32, 1, tokens, token, "token"));
        CHECK_OK(hapt_h5_commit(file));
        if (fault > 0) CHECK_FAILS(hapt_model_save(model, other_path, NULL, path), HAPT_ERR_INPUT);
        if (fault == 0) CHECK_OK(hapt_model_save(model, other_path, other_path, path));
    }
    struct hapt_model *loaded = NULL;
    CHECK_OK(hapt_model_load(path, &arena, &loaded)); /* failed writes left the valid file intact */
    if (!loaded) return;
    CHECK(loaded->has_parameters && loaded->has_data);
    for (int t = 0; t < loaded->graph->tensor_count; t++) {
        const struct hapt_tensor *tensor = &loaded->graph->tensor[t];
        if (tensor->kind != HAPT_TENSOR_PARAMETER) continue;
        CHECK_OK(hapt_model_initial(loaded, t, read));
        for (int64_t i = 0; i < hapt_tensor_elements(tensor); i++) {
            if (!CHECK(read[i] == (float)(t + 1e-3 * (double)i))) break;
        }
    }
    void *data = NULL;
    tokens[0] = -1;
    CHECK_OK(hapt_h5_open(path, "hapt-model", 1, false, &file));
    CHECK_OK(hapt_h5_read(file, "/tokens", HAPT_H5_I32, 1, tokens, 1000, &arena, &data));
    CHECK(tokens[0] == 40 && data && !memcmp(data, token, sizeof token));
    hapt_h5_close(file);
    /* Tokens of a vocabulary of 300 take 16 bits. A vocabulary of 10 refuses token 30. */
    const struct hapt_model *wide =
        GPT("--layers", "1", "--hidden", "8", "--heads", "1", "--sequence", "4", "--vocab", "300");
    CHECK_OK(hapt_model_save(wide, NULL, other_path, path));
    CHECK_OK(hapt_h5_open(path, "hapt-model", 1, false, &file));
    CHECK_OK(hapt_h5_read(file, "/tokens", HAPT_H5_I32, 1, tokens, 1000, &arena, &data));
    CHECK(!memcmp(data, token, sizeof token));
    hapt_h5_close(file);
    const struct hapt_model *narrow =
        GPT("--layers", "1", "--hidden", "8", "--heads", "1", "--sequence", "4", "--vocab", "10");
    CHECK_FAILS(hapt_model_save(narrow, NULL, other_path, path), HAPT_ERR_INPUT);
}

/* Invalid graphs in well-formed files. */
static void hostile_graphs(void)
{
    struct hapt_model *loaded = NULL;
#define HOSTILE(...)                                                         \
    do {                                                                     \
        struct hapt_model *model = small();                                  \
        struct hapt_graph *graph = model->graph;                             \
        (void)graph;                                                         \
        __VA_ARGS__;                                                         \
        CHECK_OK(hapt_model_save(model, NULL, NULL, path));                  \
        CHECK_FAILS(hapt_model_load(path, &arena, &loaded), HAPT_ERR_INPUT); \
    } while (0)
#define AT(name) hapt_graph_find_tensor(graph, name)
    HOSTILE(graph->op[2].input[0] = AT("ln_f"));
    HOSTILE(graph->op[2].input[0] = 1 << 30);
    HOSTILE(graph->op[2].input[0] = -7);
    HOSTILE(graph->op[2].output[0] = 1 << 30);
    HOSTILE(graph->op[2].output[0] = graph->op[1].output[0]);
    HOSTILE(graph->op[3].integer[0] = INT64_MAX);
    HOSTILE(graph->op[3].integer[0] = -4);
    HOSTILE(graph->tensor[AT("wte.weight")].shape[0] = INT64_MAX);
    HOSTILE(graph->tensor[AT("wte.weight")].shape[0] = -31);
    HOSTILE(graph->tensor[AT("wte.weight")].shape[1] = 25);
    HOSTILE(graph->tensor[AT("wte.weight")].name = "a/b");
    HOSTILE(graph->tensor[AT("wte.weight")].name = "");
    HOSTILE(graph->tensor[AT("wte.weight")].name = "ln_f.bias");
    HOSTILE(graph->tensor[AT("ln_f.bias")].dims = 0);
    HOSTILE(graph->forward_count--);
    HOSTILE(model->microbatch = 4);
    HOSTILE(model->microbatch = 0);
    HOSTILE(model->vocab = 32);
    HOSTILE(model->sequence = -1);
    HOSTILE(graph->loss = AT("ln_f"));
    HOSTILE(for (int p = 0; p < graph->tensor_count; p++) graph->tensor[p].trainable = false);
#undef HOSTILE
#undef AT
    CHECK_FAILS(hapt_model_load("build/no-such-file.h5", &arena, &loaded), HAPT_ERR_INPUT);
    CHECK_FAILS(hapt_model_load("/", &arena, &loaded), HAPT_ERR_INPUT);
    struct hapt_h5 *file = NULL;
    CHECK_OK(hapt_h5_create(path, "hapt-profile", 1, &file));
    CHECK_OK(hapt_h5_commit(file));
    CHECK_FAILS(hapt_model_load(path, &arena, &loaded), HAPT_ERR_INPUT);
    CHECK_OK(hapt_h5_create(path, "hapt-model", 1, &file)); /* the right name, but empty */
    CHECK_OK(hapt_h5_commit(file));
    CHECK_FAILS(hapt_model_load(path, &arena, &loaded), HAPT_ERR_INPUT);
    CHECK_OK(hapt_h5_create(path, "hapt-model", 99, &file));
    CHECK_OK(hapt_h5_commit(file));
    CHECK_FAILS(hapt_model_load(path, &arena, &loaded), HAPT_ERR_INPUT);
}

static unsigned char *slurp(const char *from, long *size)
{
    FILE *stream = fopen(from, "rb");
    fseek(stream, 0, SEEK_END);
    *size = ftell(stream);
    rewind(stream);
    unsigned char *bytes = hapt_arena_alloc(&arena, (size_t)*size, 1);
    CHECK(fread(bytes, 1, (size_t)*size, stream) == (size_t)*size);
    fclose(stream);
    return bytes;
}

static void spill(const char *to, const unsigned char *bytes, long size)
{
    FILE *stream = fopen(to, "wb");
    CHECK(fwrite(bytes, 1, (size_t)size, stream) == (size_t)size);
    fclose(stream);
}

/* Damage is reported, or it is in bytes without meaning. It never causes a crash or another model. */
static void damaged_files(void)
{
    const struct hapt_model *model = small();
    long size = 0;
    CHECK_OK(hapt_model_save(model, NULL, NULL, path));
    unsigned char *bytes = slurp(path, &size);
    uint64_t seed = 42;
    long refused = 0, rounds = test_long() ? 20000 : 400;
    for (long round = 0; round < rounds; round++) {
        const long at = (long)(hapt_random_next(&seed) % (uint64_t)size);
        const unsigned char mask = (unsigned char)(1u << hapt_random_next(&seed) % 8);
        struct hapt_arena scratch;
        struct hapt_model *loaded = NULL;
        hapt_arena_init(&scratch);
        bytes[at] ^= mask;
        spill(other_path, bytes, size);
        bytes[at] ^= mask;
        const enum hapt_status status = hapt_model_load(other_path, &scratch, &loaded);
        CHECK_MESSAGE(status == HAPT_ERR_INPUT || (status == HAPT_OK && equal_models(model, loaded)),
                      "flip of byte %ld by %#x: %s, %s", at, mask, hapt_status_name(status),
                      status == HAPT_OK ? "another model" : hapt_fail_message());
        refused += status != HAPT_OK;
        hapt_fail_reset();
        hapt_arena_release(&scratch);
    }
    CHECK_MESSAGE(refused > rounds / 4, "only %ld of %ld flips were refused", refused, rounds);
    for (long cut = 0; cut < 60; cut++) {
        struct hapt_model *loaded = NULL;
        spill(other_path, bytes, size * cut / 60);
        CHECK_FAILS(hapt_model_load(other_path, &arena, &loaded), HAPT_ERR_INPUT);
    }
}

static void impossible_options(void)
{
    struct hapt_config *config = NULL;
    struct hapt_model *model = NULL;
    const char *argv[] = {"hapt", "model", "gpt", "--output", "x.h5", "--hidden", "10", "--heads", "4"};
    CHECK_OK(hapt_config_parse(9, (char **)argv, &arena, &config));
    CHECK_FAILS(hapt_model_build("gpt", config, &arena, &model), HAPT_ERR_USAGE);
    CHECK_FAILS(hapt_model_build("gtp", config, &arena, &model), HAPT_ERR_USAGE);
}

/* In the weights file experts are separate under their published names; in the graph they are one parameter. */
static void stacks(void)
{
    char *words[] = {"hapt",       "model", "bert-moe", "--layers", "2",         "--hidden", "8",        "--heads", "2",
                     "--sequence", "6",     "--vocab",  "20",       "--experts", "3",        "--output", "x.h5"};
    struct hapt_config *config = NULL;
    struct hapt_model *model = NULL, *loaded = NULL;
    struct hapt_h5 *file = NULL;
    float value[3 * 32 * 8] = {0}, read[3 * 32 * 8] = {0};
    CHECK_OK(hapt_config_parse((int)(sizeof words / sizeof words[0]), words, &arena, &config));
    CHECK_OK(hapt_model_build("bert-moe", config, &arena, &model));
    if (!model) return;
    const char *const published = "bert.encoder.layer.1.moe.experts.*.intermediate.dense.weight";
    const int weight = hapt_graph_find_tensor(model->graph, published);
    const int bias = hapt_graph_find_tensor(model->graph, "bert.encoder.layer.1.moe.experts.*.output.dense.bias");
    CHECK(weight >= 0 && bias >= 0);
    if (weight < 0 || bias < 0) return;
    CHECK(hapt_tensor_published_dims(&model->graph->tensor[weight]) == 2);
    CHECK(hapt_tensor_published_dims(&model->graph->tensor[bias]) == 1);
    CHECK(!hapt_tensor_is_stack("a.*", 2) && !hapt_tensor_is_stack("a.*.b", 1) && !hapt_tensor_is_stack("a.*.*.b", 3));
    for (int fault = 0; fault < 4; fault++) { /* 1: an expert is missing, 2: one too many, 3: one of another shape */
        CHECK_OK(hapt_h5_create(other_path, "weights", 1, &file));
        for (int t = 0; t < model->graph->tensor_count; t++) {
            const struct hapt_tensor *tensor = &model->graph->tensor[t];
            if (tensor->kind != HAPT_TENSOR_PARAMETER) continue;
            for (int64_t i = 0; i < hapt_tensor_elements(tensor); i++) value[i] = (float)(t + 1e-3 * (double)i);
            const int experts = t != weight ? 3 : fault == 1 ? 2 : fault == 2 ? 4 : 3;
            if (tensor->dims == 1 || !strstr(tensor->name, "experts"))
                CHECK_OK(hapt_weights_write(file, tensor->name, tensor->dims, tensor->shape, value));
            for (int e = 0; strstr(tensor->name, "experts") && e < experts; e++) { /* in PyTorch's layout */
                char name[128];
                const char *mark = strchr(tensor->name, '*');
                const int64_t each = hapt_tensor_elements(tensor) / 3, shape[] = {tensor->shape[1], tensor->shape[2]};
                const int64_t turned[] = {shape[1], shape[0]};
                snprintf(name, sizeof name, "/parameters/%.*s%d%s", (int)(mark - tensor->name), tensor->name, e,
                         mark + 1);
                CHECK_OK(hapt_h5_write(file, name, HAPT_H5_F32, tensor->dims - 1,
                                       fault == 3 && t == weight ? turned : shape, value + e % 3 * each, ""));
            }
        }
        CHECK_OK(hapt_h5_commit(file));
        if (fault > 0) CHECK_FAILS(hapt_model_save(model, other_path, NULL, path), HAPT_ERR_INPUT);
        if (fault == 0) CHECK_OK(hapt_model_save(model, other_path, NULL, path));
    }
    CHECK_OK(hapt_model_load(path, &arena, &loaded));
    if (!loaded) return;
    CHECK_OK(hapt_model_initial(loaded, weight, read));
    for (int i = 0; i < 3 * 32 * 8; i++) {
        if (!CHECK(read[i] == (float)(weight + 1e-3 * i))) break;
    }
    CHECK_OK(hapt_h5_open(path, "hapt-model", 1, false, &file));
    CHECK(hapt_h5_exists(file, "/parameters/bert.encoder.layer.1.moe.experts.2.intermediate.dense.weight"));
    hapt_h5_close(file);
}

/* An option that the family does not have is refused. */
static void options_of_other_families(void)
{
    char *words[] = {"hapt", "model", "gpt", "--output", "x.h5", "--experts", "4"};
    struct hapt_config *config = NULL;
    struct hapt_model *model = NULL;
    CHECK_OK(hapt_config_parse((int)(sizeof words / sizeof words[0]), words, &arena, &config));
    CHECK_FAILS(hapt_model_build("gpt", config, &arena, &model), HAPT_ERR_USAGE);
    CHECK_FAILS(hapt_model_build("bert", config, &arena, &model), HAPT_ERR_USAGE);
}

int main(int argc, char **argv)
{
    test_init(&argc, &argv);
    hapt_arena_init(&arena);
    snprintf(path, sizeof path, "build/test-model-%d.h5", (int)getpid());
    snprintf(other_path, sizeof other_path, "build/test-model-%d-other.h5", (int)getpid());
    RUN(round_trip);
    RUN(precisions);
    RUN(parameter_names_and_counts);
    RUN(initial_values);
    RUN(weights_and_tokens);
    RUN(hostile_graphs);
    RUN(damaged_files);
    RUN(impossible_options);
    RUN(stacks);
    RUN(options_of_other_families);
    remove(path);
    remove(other_path);
    hapt_arena_release(&arena);
    return test_finish();
}
