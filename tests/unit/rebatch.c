/* Models with other rows of a microbatch, compared with the family's own graph; and graphs that fit one number of rows
 * only. */
#include "test.h"

#include "hapt/model.h"
#include "hapt/ops.h"

static struct hapt_arena arena;

static const char *const family_options[][16] = {
    {"gpt", "--layers", "2", "--hidden", "64", "--heads", "4", "--sequence", "64", "--vocab", "256"},
    {"gpt", "--layers", "2", "--hidden", "64", "--heads", "4", "--sequence", "8", "--vocab", "64", "--tied-embeddings",
     "no"},
    {"bert", "--layers", "2", "--hidden", "48", "--heads", "4", "--sequence", "32", "--vocab", "120"},
    {"bert-moe", "--layers", "2", "--hidden", "32", "--heads", "4", "--sequence", "24", "--vocab", "96", "--experts",
     "5", "--capacity-factor", "1.5"},
    {"llama", "--layers", "2", "--hidden", "64", "--heads", "4", "--kv-heads", "2", "--ffn", "160", "--sequence", "32",
     "--vocab", "128"},
    {"vit", "--layers", "2", "--hidden", "48", "--heads", "4", "--image", "16", "--patch", "4", "--classes", "7"},
    {"vgg", "--hidden", "64", "--image", "16", "--width", "8", "--classes", "7"},
    {"vgg", "--hidden", "64", "--image", "32", "--width", "8", "--classes", "7", "--pool", "7"},
    {"resnet", "--image", "32", "--width", "8", "--stages", "2", "--classes", "7"},
};

static struct hapt_model *build(const char *const *options, int rows, const char *dtype)
{
    char text[16];
    const char *words[32] = {"hapt",         "model", options[0], "--output", "none.h5",
                             "--microbatch", text,    "--dtype",  dtype};
    struct hapt_config *config = NULL;
    struct hapt_model *model = NULL;
    int count = 9;
    snprintf(text, sizeof text, "%d", rows);
    for (int w = 1; options[w]; w++) words[count++] = options[w];
    CHECK_OK(hapt_config_parse(count, (char **)words, &arena, &config));
    if (config) CHECK_OK(hapt_model_build(options[0], config, &arena, &model));
    if (!model) exit(1);
    return model;
}

static bool same_tensor(const struct hapt_tensor *a, const struct hapt_tensor *b)
{
    bool same = strcmp(a->name, b->name) == 0 && a->kind == b->kind && a->role == b->role && a->dtype == b->dtype &&
                a->dims == b->dims && a->producer == b->producer && a->gradient == b->gradient &&
                a->primal == b->primal && a->trainable == b->trainable && a->init == b->init &&
                a->init_std == b->init_std;
    for (int d = 0; d < a->dims; d++) same = same && a->shape[d] == b->shape[d];
    return same;
}

static bool same_op(const struct hapt_op *a, const struct hapt_op *b)
{
    bool same = strcmp(a->name, b->name) == 0 && a->type == b->type && a->input_count == b->input_count &&
                a->output_count == b->output_count && a->accumulate == b->accumulate && a->forward_op == b->forward_op;
    for (int i = 0; same && i < a->input_count; i++) same = a->input[i] == b->input[i];
    for (int o = 0; same && o < a->output_count; o++) same = a->output[o] == b->output[o];
    for (int k = 0; same && k < HAPT_MAX_ATTRIBUTES; k++)
        same = a->integer[k] == b->integer[k] && a->real[k] == b->real[k];
    return same;
}

static void compare(const struct hapt_model *a, const struct hapt_model *b, const char *what)
{
    const struct hapt_graph *from = a->graph, *to = b->graph;
    CHECK(a->microbatch == b->microbatch && a->dtype == b->dtype && a->setting_count == b->setting_count);
    for (int k = 0; k < a->setting_count; k++)
        CHECK_MESSAGE(strcmp(a->setting[k].value, b->setting[k].value) == 0, "%s: setting %s", what,
                      a->setting[k].name);
    CHECK_MESSAGE(from->tensor_count == to->tensor_count && from->op_count == to->op_count &&
                      from->forward_count == to->forward_count && from->loss == to->loss,
                  "%s: another size of the graph", what);
    for (int t = 0; t < from->tensor_count && t < to->tensor_count; t++)
        CHECK_MESSAGE(same_tensor(&from->tensor[t], &to->tensor[t]), "%s: tensor %s", what, from->tensor[t].name);
    for (int o = 0; o < from->op_count && o < to->op_count; o++)
        CHECK_MESSAGE(same_op(&from->op[o], &to->op[o]), "%s: operator %s", what, from->op[o].name);
    CHECK(hapt_model_flops(a) == hapt_model_flops(b));
}

/* Every family, type and number of rows: the graph of hapt_model_build. */
static void families_are_rebatched(void)
{
    static const int rows[] = {1, 2, 3, 8, 4};
    static const char *const dtypes[] = {"fp32", "bf16"};
    for (int f = 0; f < (int)(sizeof family_options / sizeof *family_options); f++)
        for (int d = 0; d < 2; d++) {
            const struct hapt_model *own = build(family_options[f], 4, dtypes[d]);
            CHECK(hapt_model_mixes_rows(own) == (strcmp(family_options[f][0], "resnet") == 0));
            for (int k = 0; k < 5; k++) {
                struct hapt_model *made = NULL;
                char what[64];
                snprintf(what, sizeof what, "%s %s of %d rows", family_options[f][0], dtypes[d], rows[k]);
                CHECK_OK(hapt_model_rebatch(own, rows[k], &arena, &made));
                if (made) compare(made, build(family_options[f], rows[k], dtypes[d]), what);
            }
        }
}

/* A parameter with a value for each row of the microbatch: the graph fits one number of rows. */
static void rows_in_a_parameter_are_refused(void)
{
    const struct hapt_model *gpt = build(family_options[0], 4, "fp32");
    struct hapt_model *made = NULL, odd = *gpt;
    struct hapt_graph *own = NULL;
    CHECK_OK(hapt_graph_create(&arena, &own));
    const struct hapt_tensor input = {.name = "images",
                                      .kind = HAPT_TENSOR_INPUT,
                                      .role = HAPT_ROLE_IMAGES,
                                      .dtype = HAPT_F32,
                                      .dims = 4,
                                      .shape = {4, 2, 4, 4}};
    const struct hapt_tensor labels = {.name = "labels",
                                       .kind = HAPT_TENSOR_INPUT,
                                       .role = HAPT_ROLE_LABELS,
                                       .dtype = HAPT_I32,
                                       .dims = 1,
                                       .shape = {4}};
    const struct hapt_tensor shift = {.name = "shift",
                                      .kind = HAPT_TENSOR_PARAMETER,
                                      .dtype = HAPT_F32,
                                      .dims = 2,
                                      .shape = {4, 32},
                                      .trainable = true};
    int images, label, parameter, flat[HAPT_MAX_OUTPUTS], moved[HAPT_MAX_OUTPUTS], loss[HAPT_MAX_OUTPUTS];
    CHECK_OK(hapt_graph_add_tensor(own, &input, &images));
    CHECK_OK(hapt_graph_add_tensor(own, &labels, &label));
    CHECK_OK(hapt_graph_add_op(own, "flatten", "flat", &images, 1, NULL, NULL, flat));
    CHECK_OK(hapt_graph_add_tensor(own, &shift, &parameter));
    CHECK_OK(hapt_graph_add_op(own, "add", "moved", (int[]){flat[0], parameter}, 2, NULL, NULL, moved));
    CHECK_OK(hapt_graph_add_op(own, "cross_entropy", "loss", (int[]){moved[0], label}, 2, NULL, NULL, loss));
    own->loss = loss[0];
    CHECK_OK(hapt_graph_differentiate(own));
    odd.graph = own;
    odd.family = "odd";
    odd.sequence = odd.vocab = 0;
    odd.classes = 32;
    CHECK_OK(hapt_model_check(&odd));
    CHECK_FAILS(hapt_model_rebatch(&odd, 2, &arena, &made), HAPT_ERR_INPUT);
    CHECK(made == NULL);
}

int main(int argc, char **argv)
{
    test_init(&argc, &argv);
    hapt_arena_init(&arena);
    RUN(families_are_rebatched);
    RUN(rows_in_a_parameter_are_refused);
    hapt_arena_release(&arena);
    return test_finish();
}
