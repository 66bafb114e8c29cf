/*
 * VGG: stages of 3x3 convolutions with ReLU, each ended by a 2x2 max pool, widths doubling up to eight times the first;
 * three dense layers. No batch norm, no dropout. Names and layouts are torchvision's. Torchvision's pool to 7x7 before
 * the dense layers changes nothing at 224 pixels; only --pool 7 adds it.
 */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>

#include "zoo.h"

#define DENSE_STD 0.01
enum { CONVOLUTIONS = 2 /* per stage, if --stages gives only their number */ };

/* Numbers count convolutions, ReLUs and pools, as torchvision's nn.Sequential does. */
static enum hapt_status features(struct zoo *zoo, const struct zoo_stages *stages, int64_t width, int *x)
{
    char name[64];
    int number = 0;
    for (int stage = 0; stage < stages->count; stage++) {
        const int64_t channels = width << (stage < 3 ? stage : 3);
        for (int c = 0; c < stages->depth[stage]; c++) {
            const struct zoo_convolution convolution = {
                .out = channels, .kernel = 3, .stride = 1, .padding = 1, .bias = true};
            snprintf(name, sizeof name, "features.%d", number++);
            HAPT_TRY(zoo_convolution(zoo, name, &convolution, *x, x));
            snprintf(name, sizeof name, "features.%d", number++);
            HAPT_TRY(zoo_relu(zoo, name, *x, x));
        }
        snprintf(name, sizeof name, "features.%d", number++);
        HAPT_TRY(zoo_max_pool(zoo, name, 2, 2, 0, *x, x));
    }
    return HAPT_OK;
}

enum hapt_status hapt_zoo_vgg(const struct hapt_config *config, struct hapt_arena *arena, struct hapt_model *model)
{
    static const char *const numbers[] = {"image",  "channels", "classes",    "width",
                                          "hidden", "pool",     "microbatch", NULL};
    const int64_t pool[HAPT_MAX_ATTRIBUTES] = {hapt_config_int(config, "pool")};
    struct zoo zoo;
    struct zoo_stages stages;
    const int64_t hidden = hapt_config_int(config, "hidden"), classes = hapt_config_int(config, "classes");
    int x, labels;
    HAPT_TRY(zoo_begin(&zoo, config, numbers, arena, model));
    HAPT_TRY(zoo_take_stages(config, CONVOLUTIONS, arena, model, &stages));
    if (hapt_config_int(config, "image") >> stages.count < 1)
        return hapt_fail(HAPT_ERR_USAGE, "choose a larger --image or fewer --stages",
                         "%d pools leave nothing of %" PRId64 " pixels", stages.count,
                         hapt_config_int(config, "image"));
    HAPT_TRY(zoo_images(&zoo, config, model, &x, &labels));
    HAPT_TRY(features(&zoo, &stages, hapt_config_int(config, "width"), &x));
    if (pool[0] > 0) HAPT_TRY(hapt_graph_add_op(zoo.graph, "adaptive_pool", "avgpool", &x, 1, pool, NULL, &x));
    HAPT_TRY(hapt_graph_add_op(zoo.graph, "flatten", "flatten", &x, 1, NULL, NULL, &x));
    HAPT_TRY(zoo_linear(&zoo, "classifier.0", zoo.graph->tensor[x].shape[1], hidden, DENSE_STD, true, x, &x));
    HAPT_TRY(zoo_relu(&zoo, "classifier.1", x, &x));
    HAPT_TRY(zoo_linear(&zoo, "classifier.3", hidden, hidden, DENSE_STD, true, x, &x));
    HAPT_TRY(zoo_relu(&zoo, "classifier.4", x, &x));
    HAPT_TRY(zoo_linear(&zoo, "classifier.6", hidden, classes, DENSE_STD, true, x, &x));
    return zoo_classify(&zoo, x, labels);
}
