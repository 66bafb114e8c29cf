/*
 * ResNet of bottleneck blocks (1x1, 3x3, 1x1 convolutions around a shortcut; a stage's first block strides in its 3x3),
 * after a 7x7/2 convolution and a 3x3/2 max pool. Names and layouts are torchvision's. Batch norm uses the statistics
 * of the full microbatch, even if it is sharded, and keeps running ones for passes over held-out rows.
 */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>

#include "zoo.h"

enum { EXPANSION = 4 /* output channels of a block / its width */, MAX_NAME = 96 };

/* Convolution `name`, then batch norm `norm`. */
static enum hapt_status convolution_and_norm(struct zoo *zoo, const char *name, const char *norm,
                                             struct zoo_convolution convolution, int x, int *y)
{
    HAPT_TRY(zoo_convolution(zoo, name, &convolution, x, y));
    return zoo_batch_norm(zoo, norm, *y, y);
}

/* One block; *x [rows][in][h][w] becomes [rows][4 width][h / stride][w / stride]. */
static enum hapt_status block(struct zoo *zoo, int stage, int index, int64_t width, int64_t stride, int *x)
{
    char name[MAX_NAME], norm[MAX_NAME];
    int y, shortcut = *x;
#define NAME(buffer, suffix) (snprintf(buffer, MAX_NAME, "layer%d.%d." suffix, stage + 1, index), buffer)
    const struct zoo_convolution in = {.out = width, .kernel = 1, .stride = 1},
                                 middle = {.out = width, .kernel = 3, .stride = stride, .padding = 1},
                                 out = {.out = EXPANSION * width, .kernel = 1, .stride = 1},
                                 projection = {.out = EXPANSION * width, .kernel = 1, .stride = stride};
    HAPT_TRY(convolution_and_norm(zoo, NAME(name, "conv1"), NAME(norm, "bn1"), in, *x, &y));
    HAPT_TRY(zoo_relu(zoo, NAME(name, "relu1"), y, &y));
    HAPT_TRY(convolution_and_norm(zoo, NAME(name, "conv2"), NAME(norm, "bn2"), middle, y, &y));
    HAPT_TRY(zoo_relu(zoo, NAME(name, "relu2"), y, &y));
    HAPT_TRY(convolution_and_norm(zoo, NAME(name, "conv3"), NAME(norm, "bn3"), out, y, &y));
    if (index == 0)
        HAPT_TRY(convolution_and_norm(zoo, NAME(name, "downsample.0"), NAME(norm, "downsample.1"), projection, *x,
                                      &shortcut));
    HAPT_TRY(zoo_add(zoo, NAME(name, "add"), shortcut, y, &y));
    return zoo_relu(zoo, NAME(name, "relu3"), y, x);
#undef NAME
}

enum hapt_status hapt_zoo_resnet(const struct hapt_config *config, struct hapt_arena *arena, struct hapt_model *model)
{
    static const char *const numbers[] = {"image", "channels", "classes", "width", "microbatch", NULL};
    struct zoo zoo;
    struct zoo_stages stages;
    const int64_t width = hapt_config_int(config, "width"), classes = hapt_config_int(config, "classes");
    const struct zoo_convolution stem = {.out = width, .kernel = 7, .stride = 2, .padding = 3};
    int x, labels;
    HAPT_TRY(zoo_begin(&zoo, config, numbers, arena, model));
    HAPT_TRY(zoo_take_stages(config, 1, arena, model, &stages));
    HAPT_TRY(zoo_follow_statistics(&zoo, config, arena, model));
    HAPT_TRY(zoo_images(&zoo, config, model, &x, &labels));
    HAPT_TRY(convolution_and_norm(&zoo, "conv1", "bn1", stem, x, &x));
    HAPT_TRY(zoo_relu(&zoo, "relu", x, &x));
    HAPT_TRY(zoo_max_pool(&zoo, "maxpool", 3, 2, 1, x, &x));
    for (int stage = 0; stage < stages.count; stage++)
        for (int index = 0; index < stages.depth[stage]; index++)
            HAPT_TRY(block(&zoo, stage, index, width << stage, stage > 0 && index == 0 ? 2 : 1, &x));
    HAPT_TRY(hapt_graph_add_op(zoo.graph, "mean_pool", "avgpool", &x, 1, NULL, NULL, &x));
    const int64_t channels = zoo.graph->tensor[x].shape[1];
    HAPT_TRY(zoo_linear(&zoo, "fc", channels, classes, 1 / sqrt(3.0 * (double)channels), true, x, &x));
    return zoo_classify(&zoo, x, labels);
}
