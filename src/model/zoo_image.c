/* Shared by the zoo's image families. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "zoo.h"

enum { MAX_NAME = 160, MAX_DEPTH = 1000 };

enum hapt_status zoo_take_stages(const struct hapt_config *config, int default_depth, struct hapt_arena *arena,
                                 struct hapt_model *model, struct zoo_stages *stages)
{
    const char *text = hapt_config_text(config, "stages");
    if (!text) text = "2";
    char *end;
    *stages = (struct zoo_stages){0};
    for (const char *at = text;; at = end + 1) {
        const long depth = strtol(at, &end, 10);
        if (stages->count == ZOO_MAX_STAGES || end == at || depth < 1 || depth > MAX_DEPTH ||
            (*end != ',' && *end != '\0')) {
            return hapt_fail(HAPT_ERR_USAGE, "give a number of stages, or the depth of each: --stages 3,4,6,3",
                             "\"%s\" is not a list of up to %d stages of 1 to %d blocks", text, ZOO_MAX_STAGES,
                             MAX_DEPTH);
        }
        stages->depth[stages->count++] = (int)depth;
        if (*end == '\0') break;
    }
    if (stages->count == 1) { /* only the number of stages */
        stages->count = stages->depth[0];
        if (stages->count > ZOO_MAX_STAGES)
            return hapt_fail(HAPT_ERR_USAGE, "give --stages 3,4,6,3 for the depth of each", "%d stages are too many",
                             stages->count);
        for (int s = 0; s < stages->count; s++) stages->depth[s] = default_depth;
    }
    return hapt_model_set(model, arena, "stages", text);
}

enum hapt_status zoo_images(struct zoo *zoo, const struct hapt_config *config, struct hapt_model *model, int *images,
                            int *labels)
{
    const int64_t rows = model->microbatch, size = hapt_config_int(config, "image");
    const int64_t shape[] = {rows, hapt_config_int(config, "channels"), size, size};
    model->classes = (int)hapt_config_int(config, "classes");
    HAPT_TRY(zoo_input(zoo, "images", HAPT_ROLE_IMAGES, HAPT_F32, 4, shape, images));
    HAPT_TRY(zoo_input(zoo, "labels", HAPT_ROLE_LABELS, HAPT_I32, 1, &rows, labels));
    if (zoo->dtype == HAPT_F32) return HAPT_OK;
    const int64_t half[HAPT_MAX_ATTRIBUTES] = {zoo->dtype == HAPT_F16 ? 2 : 1};
    return hapt_graph_add_op(zoo->graph, "cast", "pixels", images, 1, half, NULL, images);
}

enum hapt_status zoo_convolution(struct zoo *zoo, const char *prefix, const struct zoo_convolution *convolution, int x,
                                 int *y)
{
    char name[MAX_NAME];
    const int64_t attributes[HAPT_MAX_ATTRIBUTES] = {convolution->stride, convolution->padding};
    const int64_t kernel = convolution->kernel;
    const int64_t shape[] = {convolution->out, zoo->graph->tensor[x].shape[1], kernel, kernel};
    const double std = sqrt(2.0 / (double)(convolution->out * kernel * kernel)); /* He initialisation, fan-out mode */
    int input[3] = {x, 0, -1};
    snprintf(name, sizeof name, "%s.weight", prefix);
    HAPT_TRY(zoo_normal(zoo, name, 4, shape, std, &input[1]));
    snprintf(name, sizeof name, "%s.bias", prefix);
    if (convolution->bias) HAPT_TRY(zoo_parameter(zoo, name, 1, shape, HAPT_INIT_ZERO, 0, &input[2]));
    return hapt_graph_add_op(zoo->graph, "conv2d", prefix, input, 3, attributes, NULL, y);
}

enum hapt_status zoo_follow_statistics(struct zoo *zoo, const struct hapt_config *config, struct hapt_arena *arena,
                                       struct hapt_model *model)
{
    const int64_t one = 1;
    const bool follows = hapt_config_bool(config, "running-statistics");
    zoo->training = -1;
    HAPT_TRY(hapt_model_set(model, arena, "running-statistics", follows ? "yes" : "no"));
    if (!follows) return HAPT_OK;
    return zoo_input(zoo, "training", HAPT_ROLE_TRAINING, HAPT_F32, 1, &one, &zoo->training);
}

static enum hapt_status running_statistics(struct zoo *zoo, const char *prefix, int64_t channels, int input[3])
{
    char name[MAX_NAME];
    snprintf(name, sizeof name, "%s.running_mean", prefix);
    HAPT_TRY(zoo_parameter(zoo, name, 1, &channels, HAPT_INIT_ZERO, 0, &input[0]));
    snprintf(name, sizeof name, "%s.running_var", prefix);
    HAPT_TRY(zoo_parameter(zoo, name, 1, &channels, HAPT_INIT_ONE, 0, &input[1]));
    input[2] = zoo->training;
    return HAPT_OK;
}

enum hapt_status zoo_batch_norm(struct zoo *zoo, const char *prefix, int x, int *y)
{
    char name[MAX_NAME];
    const int64_t *shape = zoo->graph->tensor[x].shape, channels = shape[1];
    const int64_t count[HAPT_MAX_ATTRIBUTES] = {shape[0] * shape[2] * shape[3]};
    const double epsilon[HAPT_MAX_ATTRIBUTES] = {1e-5};
    int input[8] = {x}; /* mean, variance, gamma, beta; running mean and variance, training */
    snprintf(name, sizeof name, "%s.mean", prefix);
    HAPT_TRY(hapt_graph_add_op(zoo->graph, "batch_mean", name, input, 1, count, NULL, &input[1]));
    snprintf(name, sizeof name, "%s.variance", prefix);
    HAPT_TRY(hapt_graph_add_op(zoo->graph, "batch_variance", name, input, 2, count, NULL, &input[2]));
    snprintf(name, sizeof name, "%s.weight", prefix);
    HAPT_TRY(zoo_parameter(zoo, name, 1, &channels, HAPT_INIT_ONE, 0, &input[3]));
    snprintf(name, sizeof name, "%s.bias", prefix);
    HAPT_TRY(zoo_parameter(zoo, name, 1, &channels, HAPT_INIT_ZERO, 0, &input[4]));
    if (zoo->training < 0) return hapt_graph_add_op(zoo->graph, "batch_norm", prefix, input, 5, count, epsilon, y);
    HAPT_TRY(running_statistics(zoo, prefix, channels, &input[5]));
    return hapt_graph_add_op(zoo->graph, "batch_norm_running", prefix, input, 8, count, epsilon, y);
}

enum hapt_status zoo_relu(struct zoo *zoo, const char *name, int x, int *y)
{
    return hapt_graph_add_op(zoo->graph, "relu", name, &x, 1, NULL, NULL, y);
}

enum hapt_status zoo_max_pool(struct zoo *zoo, const char *name, int64_t kernel, int64_t stride, int64_t padding, int x,
                              int *y)
{
    const int64_t attributes[HAPT_MAX_ATTRIBUTES] = {kernel, stride, padding};
    return hapt_graph_add_op(zoo->graph, "max_pool", name, &x, 1, attributes, NULL, y);
}
