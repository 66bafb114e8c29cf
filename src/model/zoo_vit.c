/*
 * Vision transformer (Dosovitskiy et al. 2021): image patches as tokens after a class token, learned positions, pre-LN
 * blocks of full attention and an erf-GELU feed-forward, a classifier on the class token. DINOv2 (Oquab et al. 2023)
 * adds layer scales, and its classifier also takes the mean of the patches. Attention has no dropout. Parameter names
 * and layouts are Hugging Face's ([out][in], patch kernel [out][in][height][width]).
 */
#include <inttypes.h>
#include <stdio.h>

#include "zoo.h"

#define NORM_EPSILON 1e-12
#define WEIGHT_STD 0.02

/* Names of a family's parameters. norm: of the two halves of a block. */
struct names {
    const char *model, *norm[2], *in, *out;
};
static const struct names vit_names = {"vit",
                                       {"layernorm_before", "layernorm_after"},
                                       "intermediate.dense",
                                       "output.dense"},
                          dinov2_names = {"dinov2", {"norm1", "norm2"}, "mlp.fc1", "mlp.fc2"};

struct vit {
    struct zoo zoo;
    struct hapt_vit of;
    const struct names *names;
    char name[96];
};

/* "vit.PART", until the next name is made */
static const char *model_name(struct vit *vit, const char *part)
{
    snprintf(vit->name, sizeof vit->name, "%s.%s", vit->names->model, part);
    return vit->name;
}

static const char *block_name(struct vit *vit, int64_t index, const char *part)
{
    snprintf(vit->name, sizeof vit->name, "%s.encoder.layer.%" PRId64 ".%s", vit->names->model, index, part);
    return vit->name;
}

/* Adds y to the residual stream *x; DINOv2: scaled. `half` of a block: 1 or 2. */
static enum hapt_status add_half(struct vit *vit, int64_t index, int half, int y, int *x)
{
    struct zoo *zoo = &vit->zoo;
    char part[32];
    const double share = vit->of.dinov2 ? 0 : zoo->dropout; /* DINOv2 drops embeddings alone (transformers 5) */
    HAPT_TRY(
        zoo_drop(zoo, block_name(vit, index, half == 1 ? "attention.output.dropout" : "output.dropout"), share, y, &y));
    if (vit->of.dinov2) {
        int scaled[2] = {y, -1};
        snprintf(part, sizeof part, "layer_scale%d.lambda1", half);
        HAPT_TRY(zoo_parameter(zoo, block_name(vit, index, part), 1, &zoo->hidden, HAPT_INIT_ONE, 0, &scaled[1]));
        snprintf(part, sizeof part, "layer_scale%d", half);
        HAPT_TRY(hapt_graph_add_op(zoo->graph, "layer_scale", block_name(vit, index, part), scaled, 2, NULL, NULL, &y));
    }
    snprintf(part, sizeof part, "residual_%d", half);
    return zoo_add(zoo, block_name(vit, index, part), *x, y, x);
}

/* One block; *x [rows][patches + 1][d] is the residual stream. */
static enum hapt_status block(struct vit *vit, int64_t index, int *x)
{
    struct zoo *zoo = &vit->zoo;
    const int64_t d = zoo->hidden, attention[HAPT_MAX_ATTRIBUTES] = {zoo->heads, 0},
                  gelu_kind[HAPT_MAX_ATTRIBUTES] = {!vit->of.tanh};
    const double epsilon = vit->of.norm_epsilon;
    const bool bias = vit->of.qkv_bias;
    int y, qkv[3], output[HAPT_MAX_OUTPUTS];
#define NAME(part) block_name(vit, index, part)
    HAPT_TRY(zoo_layer_norm(zoo, NAME(vit->names->norm[0]), d, epsilon, *x, &y));
    HAPT_TRY(zoo_linear(zoo, NAME("attention.attention.query"), d, d, WEIGHT_STD, bias, y, &qkv[0]));
    HAPT_TRY(zoo_linear(zoo, NAME("attention.attention.key"), d, d, WEIGHT_STD, bias, y, &qkv[1]));
    HAPT_TRY(zoo_linear(zoo, NAME("attention.attention.value"), d, d, WEIGHT_STD, bias, y, &qkv[2]));
    HAPT_TRY(hapt_graph_add_op(zoo->graph, "grouped_attention", NAME("attention"), qkv, 3, attention, NULL, output));
    HAPT_TRY(zoo_linear(zoo, NAME("attention.output.dense"), d, d, WEIGHT_STD, true, output[0], &y));
    HAPT_TRY(add_half(vit, index, 1, y, x));
    HAPT_TRY(zoo_layer_norm(zoo, NAME(vit->names->norm[1]), d, epsilon, *x, &y));
    HAPT_TRY(zoo_linear(zoo, NAME(vit->names->in), d, vit->of.ffn, WEIGHT_STD, true, y, &y));
    HAPT_TRY(hapt_graph_add_op(zoo->graph, "gelu", NAME("gelu"), &y, 1, gelu_kind, NULL, &y));
    HAPT_TRY(zoo_linear(zoo, NAME(vit->names->out), vit->of.ffn, d, WEIGHT_STD, true, y, &y));
    return add_half(vit, index, 2, y, x);
#undef NAME
}

/* Class token and patches, with positions added. */
static enum hapt_status embed(struct vit *vit, int *x)
{
    struct zoo *zoo = &vit->zoo;
    const int64_t d = zoo->hidden, side = vit->of.image / vit->of.patch;
    const int64_t images[] = {zoo->rows, vit->of.channels, vit->of.image, vit->of.image};
    const int64_t kernel[] = {d, vit->of.channels, vit->of.patch, vit->of.patch};
    int patches[3], tokens[4];
    HAPT_TRY(zoo_input(zoo, "images", HAPT_ROLE_IMAGES, HAPT_F32, 4, images, &patches[0]));
    HAPT_TRY(zoo_normal(zoo, model_name(vit, "embeddings.cls_token"), 3, (int64_t[]){1, 1, d}, WEIGHT_STD, &tokens[1]));
    HAPT_TRY(zoo_normal(zoo, model_name(vit, "embeddings.position_embeddings"), 3, (int64_t[]){1, side * side + 1, d},
                        WEIGHT_STD, &tokens[2]));
    HAPT_TRY(zoo_normal(zoo, model_name(vit, "embeddings.patch_embeddings.projection.weight"), 4, kernel, WEIGHT_STD,
                        &patches[1]));
    HAPT_TRY(zoo_parameter(zoo, model_name(vit, "embeddings.patch_embeddings.projection.bias"), 1, &d, HAPT_INIT_ZERO,
                           0, &patches[2]));
    HAPT_TRY(hapt_graph_add_op(zoo->graph, "patch_embedding", model_name(vit, "embeddings.patch_embeddings"), patches,
                               3, NULL, NULL, &tokens[0]));
    if (vit->of.mask_token) {
        HAPT_TRY(zoo_parameter(zoo, model_name(vit, "embeddings.mask_token"), 2, (int64_t[]){1, d}, HAPT_INIT_ZERO, 0,
                               &tokens[3]));
        zoo->graph->tensor[tokens[3]].trainable = false;
    }
    HAPT_TRY(hapt_graph_add_op(zoo->graph, "class_token", model_name(vit, "embeddings"), tokens, 3 + vit->of.mask_token,
                               NULL, NULL, x));
    return zoo_drop(zoo, model_name(vit, "embeddings.dropout"), zoo->dropout, *x, x);
}

/* `model` gets the shape. */
static enum hapt_status build(struct vit *vit, struct hapt_arena *arena, struct hapt_model *model)
{
    struct zoo *zoo = &vit->zoo;
    int x, labels;
    HAPT_TRY(zoo_check_blocks(zoo));
    if (vit->of.image % vit->of.patch != 0)
        return hapt_fail(HAPT_ERR_USAGE, "choose --image as a multiple of --patch",
                         "images of %" PRId64 " x %" PRId64 " do not divide into patches of %" PRId64, vit->of.image,
                         vit->of.image, vit->of.patch);
    HAPT_TRY(zoo_set_number(model, arena, "ffn", vit->of.ffn));
    model->classes = (int)vit->of.classes;
    HAPT_TRY(embed(vit, &x));
    HAPT_TRY(zoo_input(zoo, "labels", HAPT_ROLE_LABELS, HAPT_I32, 1, &zoo->rows, &labels));
    for (int64_t index = 0; index < zoo->layers; index++) HAPT_TRY(block(vit, index, &x));
    HAPT_TRY(zoo_layer_norm(zoo, model_name(vit, "layernorm"), zoo->hidden, vit->of.norm_epsilon, x, &x));
    HAPT_TRY(hapt_graph_add_op(zoo->graph, vit->of.dinov2 ? "class_and_mean" : "take_token",
                               model_name(vit, "class_token"), &x, 1, NULL, NULL, &x));
    HAPT_TRY(
        zoo_linear(zoo, "classifier", (1 + vit->of.dinov2) * zoo->hidden, vit->of.classes, WEIGHT_STD, true, x, &x));
    return zoo_classify(zoo, x, labels);
}

enum hapt_status hapt_zoo_vit(const struct hapt_config *config, struct hapt_arena *arena, struct hapt_model *model)
{
    static const char *const numbers[] = {"layers", "hidden",  "heads",      "image", "channels",
                                          "patch",  "classes", "microbatch", NULL};
    struct vit vit = {.names = &vit_names,
                      .of = {.ffn = hapt_config_int(config, "ffn"),
                             .image = hapt_config_int(config, "image"),
                             .channels = hapt_config_int(config, "channels"),
                             .patch = hapt_config_int(config, "patch"),
                             .classes = hapt_config_int(config, "classes"),
                             .norm_epsilon = NORM_EPSILON,
                             .qkv_bias = true}};
    HAPT_TRY(zoo_begin(&vit.zoo, config, numbers, arena, model));
    HAPT_TRY(zoo_take_dropout(&vit.zoo, config, arena, model));
    if (vit.of.ffn == 0) vit.of.ffn = 4 * vit.zoo.hidden;
    return build(&vit, arena, model);
}

enum hapt_status hapt_vit_build(const char *family, const struct hapt_vit *of, const struct hapt_config *config,
                                struct hapt_arena *arena, struct hapt_model **model)
{
    const struct {
        const char *name;
        int64_t value;
    } number[] = {{"layers", of->layers}, {"hidden", of->hidden},     {"heads", of->heads},    {"image", of->image},
                  {"patch", of->patch},   {"channels", of->channels}, {"classes", of->classes}};
    struct hapt_model *built;
    struct vit vit = {.of = *of, .names = of->dinov2 ? &dinov2_names : &vit_names};
    HAPT_TRY(hapt_model_begin(family, config, arena, &built));
    HAPT_TRY(zoo_open(&vit.zoo, config, arena, built));
    HAPT_TRY(zoo_take_dropout(&vit.zoo, config, arena, built));
    vit.zoo.layers = of->layers;
    vit.zoo.hidden = of->hidden;
    vit.zoo.heads = of->heads;
    for (size_t i = 0; i < sizeof number / sizeof *number; i++)
        HAPT_TRY(zoo_set_number(built, arena, number[i].name, number[i].value));
    HAPT_TRY(zoo_set_number(built, arena, "microbatch", vit.zoo.rows));
    HAPT_TRY(build(&vit, arena, built));
    HAPT_TRY(hapt_model_finish(built, config, arena));
    *model = built;
    return HAPT_OK;
}
