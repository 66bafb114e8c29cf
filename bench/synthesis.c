/*
 * Times the synthesis of one-axis SPMD programs (HAP 7.6) on one core.
 *
 * synthesis DEVICES FAST REPEATS MODEL [--option value ...]
 *
 * MODEL with its options is as for `hapt model`: a family or a named model. FAST of the devices are three times as fast
 * as the others, and their ratios are larger in proportion. Prints a JSON object: the best of REPEATS.
 *
 * HAP's own search takes 4 s for BERT of 12 layers, 15 s for ViT of 24 and 89 s for BERT of 48.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hapt/model.h"
#include "../tests/spmd_rates.h"

static void fail(void)
{
    fprintf(stderr, "%s\n", hapt_fail_message());
    exit(1);
}

static struct hapt_model *build(int count, char **option, struct hapt_arena *arena)
{
    enum { MOST_WORDS = 64 };
    char *words[MOST_WORDS];
    struct hapt_config *config;
    struct hapt_model *model;
    const char *family;
    if (count + 2 > MOST_WORDS) exit(2);
    words[0] = "hapt";
    words[1] = "model";
    memcpy(words + 2, option, (size_t)count * sizeof *option);
    if (hapt_config_parse(count + 2, words, arena, &config) != HAPT_OK) fail();
    if (hapt_model_preset(option[0], config, &family) != HAPT_OK) fail();
    if (hapt_model_build(family, config, arena, &model) != HAPT_OK) fail();
    if (hapt_graph_differentiate(model->graph) != HAPT_OK) fail();
    return model;
}

int main(int argc, char **argv)
{
    enum { MOST = 1024, OPTIONS = 4 };
    if (argc <= OPTIONS || atoi(argv[1]) < 1 || atoi(argv[1]) > MOST || atoi(argv[3]) < 1) {
        fprintf(stderr, "usage: synthesis DEVICES FAST REPEATS MODEL [--option value ...]\n");
        return 2;
    }
    const int size = atoi(argv[1]), fast = atoi(argv[2]), repeats = atoi(argv[3]);
    double flops[MOST], bytes[MOST], ratio[MOST], best = 1e30;
    int kind[MOST];
    for (int j = 0; j < size; j++) {
        flops[j] = (j < fast ? 3 : 1) * 15e12;
        bytes[j] = (j < fast ? 3 : 1) * 300e9;
        ratio[j] = (double)(j < fast ? 3 : 1) / (size + 2 * fast);
    }
    const struct spmd_rates rates = {.size = size,
                                     .flops_per_s = flops,
                                     .bytes_per_s = bytes,
                                     .launch_s = 5e-6,
                                     .latency_s = 5e-6,
                                     .bandwidth_bytes_per_s = 10e9};
    const struct hapt_axis axis = {.size = size, .ratio_count = 1, .ratio = fast > 0 && fast < size ? ratio : NULL};
    const struct hapt_synthesis_options options = {.microbatches = 1};
    struct hapt_spmd_costs costs;
    struct hapt_synthesis_report report;
    struct hapt_arena arena, scratch;
    hapt_arena_init(&arena);
    hapt_arena_init(&scratch);
    spmd_rates_costs(&rates, kind, &costs);
    const struct hapt_model *model = build(argc - OPTIONS, argv + OPTIONS, &arena);
    struct hapt_sharding *whole;
    if (hapt_sharding_trivial(model->graph, &arena, &whole) != HAPT_OK) fail();
    for (int r = 0; r < repeats; r++) {
        struct hapt_axis_program program;
        hapt_arena_reset(&scratch);
        if (hapt_synthesise(whole, 0, &axis, &costs, &options, &scratch, &program, &report) != HAPT_OK) fail();
        if (report.seconds < best) best = report.seconds;
    }
    printf("{\"seconds\": %.6f, \"operators\": %d, \"segments\": %d, \"unique_segments\": %d, \"expanded\": %ld, "
           "\"generated\": %ld, "
           "\"cost_s\": %.9g, \"stages\": %d, \"because\": \"%s\"}\n",
           best, model->graph->op_count, report.segments, report.unique_segments, report.expanded, report.generated,
           report.cost_s, report.stages, report.because);
    hapt_arena_release(&scratch);
    hapt_arena_release(&arena);
    return 0;
}
