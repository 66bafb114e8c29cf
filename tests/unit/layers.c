/* Repeated modules against brute force, and the layers of GPTs. */
#include "test.h"

#include "../../src/layers/modules.h"
#include "../../src/layers/structure.h"
#include "hapt/layers.h"
#include "hapt/model.h"
#include "hapt/ops.h"

static struct hapt_arena arena;

static struct hapt_model *model_of(const char *family, const char *const *more, int count)
{
    const char *argv[64] = {"hapt", "model", family, "--output", "none.h5"};
    int argc = 5;
    for (int i = 0; i < count; i++) argv[argc++] = more[i];
    struct hapt_config *config = NULL;
    struct hapt_model *model = NULL;
    CHECK_OK(hapt_config_parse(argc, (char **)argv, &arena, &config));
    if (config) CHECK_OK(hapt_model_build(family, config, &arena, &model));
    if (!model) exit(1);
    return model;
}
#define MODEL(family, ...) \
    model_of(family, (const char *const[]){__VA_ARGS__}, (int)(sizeof((const char *[]){__VA_ARGS__}) / sizeof(char *)))
#define GPT(...) MODEL("gpt", __VA_ARGS__)

static struct hapt_model *small_gpt(void)
{
    return GPT("--layers", "12", "--hidden", "128", "--heads", "4", "--sequence", "128", "--vocab", "256",
               "--microbatch", "2");
}

/* Layers and modules cover the operators in order, without gaps. */
static void check_cover(const struct hapt_layers *layers, int ops)
{
    for (int l = 0, end = 0; l < layers->count; end = layers->end_op[l++]) {
        CHECK(layers->end_op[l] > end && layers->flops[l] >= 0 && layers->boundary_bytes[l] >= 0);
        CHECK(layers->module_of[l] >= 0 && layers->module_of[l] < layers->module_count);
    }
    for (int m = 0, end = 0; m < layers->module_count; end = layers->module[m++].end_op)
        CHECK(layers->module[m].first_op == end && layers->module[m].end_op > end);
    CHECK(layers->end_op[layers->count - 1] == ops && layers->module[layers->module_count - 1].end_op == ops);
    CHECK(layers->boundary_bytes[layers->count - 1] == 0);
}

static struct hapt_layers *layers_of(const struct hapt_model *model, int granularity)
{
    struct hapt_layers *layers = NULL;
    CHECK_OK(hapt_layers_build(model->graph, &(struct hapt_layers_options){granularity, 2}, &arena, &layers));
    if (!layers) exit(1);
    check_cover(layers, model->graph->forward_count);
    return layers;
}

/* The definition, literally: every window compared with every other. */
static int brute_find(const int *key, const bool *heavy, int count, int minimum, int *module_first, int *module_kind)
{
    int kind[64], opens[65];
    for (int i = 0; i < count; i++) kind[i] = -1, opens[i] = i == 0;
    opens[count] = 1;
    for (int round = 0;; round++) {
        int best = 1, best_length = 0, best_position = 0;
        for (int position = 0; position < count; position++) {
            for (int length = 1; position + length <= count; length++) {
                int heavies = 0, found = 0;
                bool inside = true;
                for (int i = 0; i < length; i++) {
                    heavies += heavy[position + i];
                    inside = inside && kind[position + i] < 0 && (i == 0 || !opens[position + i]);
                }
                if (!inside || heavies < minimum) continue;
                for (int start = 0; start + length <= count;) {
                    bool equal = true;
                    for (int i = 0; i < length; i++) {
                        equal = equal && key[start + i] == key[position + i] && kind[start + i] < 0 &&
                                (i == 0 || !opens[start + i]);
                    }
                    found += equal;
                    start += equal ? length : 1;
                }
                if (found > best || (found == best && found > 1 && length > best_length)) {
                    best = found, best_length = length, best_position = position;
                }
            }
        }
        if (best < 2) break;
        for (int start = 0; start + best_length <= count;) {
            bool equal = true;
            for (int i = 0; i < best_length; i++) {
                equal = equal && key[start + i] == key[best_position + i] && kind[start + i] < 0 &&
                        (i == 0 || !opens[start + i]);
            }
            if (!equal) {
                start++;
                continue;
            }
            /* only kinds change, because the loop reads the keys of the pattern itself */
            for (int i = 0; i < best_length; i++) kind[start + i] = 1000 + round;
            opens[start] = opens[start + best_length] = 1;
            start += best_length;
        }
        for (int i = 0; i < count; i++) kind[i] = kind[i] >= 1000 ? kind[i] - 1000 : kind[i];
    }
    int modules = 0;
    for (int i = 0; i < count; i++) {
        if (!opens[i]) continue;
        module_first[modules] = i;
        module_kind[modules++] = kind[i];
    }
    return modules;
}

static void modules_equal_brute_force(void)
{
    uint64_t seed = 20261121;
    for (int round = 0; round < (test_long() ? 20000 : 1500); round++) {
        int key[40], first[40], kind[40];
        bool heavy[40];
        const int count = 1 + (int)(hapt_random_next(&seed) % 28), letters = 1 + (int)(hapt_random_next(&seed) % 4);
        const int minimum = 1 + (int)(hapt_random_next(&seed) % 3);
        for (int i = 0; i < count; i++) {
            key[i] = (int)(hapt_random_next(&seed) % (uint64_t)letters);
            heavy[i] = key[i] % 2 == 0;
        }
        const int expected = brute_find(key, heavy, count, minimum, first, kind);
        struct hapt_module *module = NULL;
        int modules = 0;
        struct hapt_arena scratch;
        hapt_arena_init(&scratch);
        CHECK_OK(hapt_modules_find(key, heavy, count, minimum, &scratch, &module, &modules));
        bool equal = modules == expected;
        for (int m = 0; equal && m < modules; m++) {
            equal = module[m].first_op == first[m] && module[m].kind == kind[m] &&
                    module[m].end_op == (m + 1 < modules ? first[m + 1] : count);
        }
        CHECK_MESSAGE(equal, "round %d: %d modules found, %d expected or other places", round, modules, expected);
        hapt_arena_release(&scratch);
    }
}

static void gpt_modules_are_blocks(void)
{
    const struct hapt_model *model = small_gpt();
    const struct hapt_layers *layers = layers_of(model, 0);
    CHECK(layers->module_count == 14);
    for (int m = 1; m <= 12; m++) {
        CHECK(layers->module[m].kind == layers->module[1].kind && layers->module[m].kind >= 0);
        CHECK(layers->module[m].end_op - layers->module[m].first_op == 10);
    }
    CHECK(layers->module[0].kind == -1 && layers->module[13].kind == -1);
    CHECK(layers->module[0].first_op == 0 && layers->module[0].end_op == 1);
    CHECK(!strcmp(model->graph->op[layers->module[1].first_op].name, "h.0.ln_1"));
    CHECK(!strcmp(model->graph->op[layers->module[13].first_op].name, "ln_f"));
}

/* The paper divides a GPT of 48 blocks into 146 layers: three per block, the embedding and the head. */
static void gpt_granularities(void)
{
    const struct hapt_model *model = small_gpt();
    CHECK(layers_of(model, 0)->count == 38);
    CHECK(layers_of(model, 26)->count == 26);
    CHECK(layers_of(model, 14)->count == 14);
    CHECK(layers_of(model, 8)->count == 8);
    CHECK(layers_of(model, 1)->count == 1);
    const int fine = layers_of(model, 100)->count;
    CHECK(fine >= 90 && fine <= 126);
    const struct hapt_model *large = GPT("--layers", "48", "--hidden", "8192", "--heads", "64", "--sequence", "1024",
                                         "--vocab", "50257", "--microbatch", "1", "--dtype", "bf16");
    CHECK(layers_of(large, 0)->count == 146);
}

static void layers_balance_and_cuts(void)
{
    const struct hapt_model *model = small_gpt();
    const struct hapt_layers *layers = layers_of(model, 0);
    double sum = 0, residual = 2 * 128 * 128 * 4;
    for (int l = 0; l < layers->count; l++) sum += layers->flops[l];
    CHECK_NEAR(sum, hapt_model_flops(model), 1e-9 * sum);
    for (int l = 1; l + 1 < layers->count; l++) {
        CHECK(layers->flops[l] <= 1.2 * 1.1 * (layers->flops[1] + layers->flops[2] + layers->flops[3]) / 3);
        CHECK(layers->flops[l] == layers->flops[1 + (l - 1) % 3]);
    }
    /* Behind the last layer of a block only the residual stream crosses the boundary. */
    for (int l = 0; l + 1 < layers->count; l += 3) CHECK(layers->boundary_bytes[l] == residual);
    CHECK(layers->boundary_bytes[layers->count - 1] == 0);
    /* Two layers per block: the boundary is the residual stream between attention and feed-forward. */
    const struct hapt_layers *coarse = layers_of(model, 14);
    for (int l = 0; l + 1 < coarse->count; l++) CHECK(coarse->boundary_bytes[l] == residual);
}

/* Bytes across each boundary by the definition: every activation, every reader. */
static void cut_bytes_by_definition(void)
{
    const struct hapt_model *model = GPT("--layers", "2", "--hidden", "24", "--heads", "2", "--sequence", "5",
                                         "--vocab", "11", "--microbatch", "3", "--dtype", "bf16");
    const struct hapt_graph *graph = model->graph;
    double boundary_bytes[64];
    CHECK_OK(hapt_structure_boundary_bytes(graph, &arena, boundary_bytes));
    for (int cut = 0; cut <= graph->forward_count; cut++) {
        double expected = 0;
        for (int t = 0; t < graph->tensor_count; t++) {
            bool crosses = false;
            for (int op = 0; op < graph->op_count; op++) {
                for (int i = 0; i < graph->op[op].input_count; i++) {
                    crosses = crosses || (graph->op[op].input[i] == t && graph->op[op].forward_op >= cut);
                }
            }
            if (crosses && graph->tensor[t].kind == HAPT_TENSOR_ACTIVATION && graph->tensor[t].producer < cut) {
                expected += (double)hapt_tensor_bytes(&graph->tensor[t]);
            }
        }
        CHECK_MESSAGE(boundary_bytes[cut] == expected, "cut %d: %g bytes, not %g", cut, boundary_bytes[cut], expected);
    }
}

static uint64_t *structures_of(const struct hapt_layers *layers, const struct hapt_graph *graph)
{
    uint64_t *structure = hapt_arena_alloc(&arena, (size_t)layers->count * (size_t)layers->count, sizeof *structure);
    CHECK_OK(hapt_layers_structures(layers, graph, NULL, structure));
    return structure;
}

/* Shifted by a block a range is the same program; shifted by less it is not; nor is one of another length or with the
 * head. */
static void structures(void)
{
    const struct hapt_model *model = small_gpt();
    const struct hapt_graph *graph = model->graph;
    const struct hapt_layers *layers = layers_of(model, 0);
    const uint64_t *all = structures_of(layers, graph);
#define OF(first, end) all[(first)*layers->count + (end)-1]
    for (int first = 1; first < 4; first++) {
        for (int length = 1; length <= 9; length++) {
            const uint64_t here = OF(first, first + length);
            for (int other = 1; other + length <= 37; other++) {
                const bool equal = OF(other, other + length) == here;
                CHECK_MESSAGE(equal == ((other - first) % 3 == 0), "layers [%d, %d) and [%d, %d)", first,
                              first + length, other, other + length);
            }
            CHECK(OF(first, first + length + 1) != here);
        }
    }
    CHECK(OF(35, 38) != OF(32, 35));
    CHECK(OF(0, 4) != OF(3, 7));
    /* Another microbatch is another program. */
    const struct hapt_model *wide = GPT("--layers", "12", "--hidden", "128", "--heads", "4", "--sequence", "128",
                                        "--vocab", "256", "--microbatch", "3");
    const struct hapt_layers *wider = layers_of(wide, 0);
    CHECK(structures_of(wider, wide->graph)[wider->count + 3] != OF(1, 4));
#undef OF
}

static void run_file_table(void)
{
    const struct hapt_model *model = small_gpt();
    const struct hapt_layers *layers = layers_of(model, 0);
    struct hapt_h5 *file = NULL;
    const char *path = "build/test-layers.h5";
    CHECK_OK(hapt_h5_create(path, "hapt-test", 1, &file));
    CHECK_OK(hapt_layers_write(file, "/layers", layers));
    CHECK_OK(hapt_h5_commit(file));
    CHECK_OK(hapt_h5_open(path, "hapt-test", 1, false, &file));
    int64_t shape[1] = {layers->count};
    void *end_op = NULL;
    CHECK_OK(hapt_h5_read(file, "/layers/end_op", HAPT_H5_I32, 1, shape, 1000, &arena, &end_op));
    CHECK(end_op && ((int32_t *)end_op)[layers->count - 1] == model->graph->forward_count);
    hapt_h5_close(file);
    remove(path);
    hapt_layers_print(&(struct hapt_env){.world_size = 1}, layers, model->graph);
}

/* The operators between a gate and the sum over its experts stay in one layer, at every granularity. */
static void mixtures_are_not_cut(void)
{
    char *words[] = {"hapt", "model",      "bert-moe", "--layers", "8",  "--hidden", "32",     "--heads",
                     "4",    "--sequence", "16",       "--vocab",  "64", "--output", "none.h5"};
    struct hapt_config *config = NULL;
    struct hapt_model *model = NULL;
    CHECK_OK(hapt_config_parse((int)(sizeof words / sizeof words[0]), words, &arena, &config));
    CHECK_OK(hapt_model_build("bert-moe", config, &arena, &model));
    if (!model) return;
    const int gate = hapt_op_type_find("moe_gate"), combine = hapt_op_type_find("moe_combine");
    for (int granularity = 0; granularity < 200; granularity = granularity * 3 + 1) {
        const struct hapt_layers *layers = layers_of(model, granularity);
        int mixtures = 0, kinds = 0;
        for (int l = 0; l < layers->count; l++) {
            int opened = 0;
            for (int op = hapt_layers_first_op(layers, l); op < layers->end_op[l]; op++) {
                opened += model->graph->op[op].type == gate;
                opened -= model->graph->op[op].type == combine;
                mixtures += model->graph->op[op].type == gate;
            }
            CHECK_MESSAGE(opened == 0, "layer %d of %d cuts a mixture", l, layers->count);
        }
        for (int m = 0; m < layers->module_count; m++) kinds += layers->module[m].kind >= 0;
        CHECK(mixtures == 4 && kinds >= 4); /* pairs of layers repeat */
        if (granularity == 0) CHECK_MESSAGE(layers->count >= 8, "%d layers", layers->count);
    }
}

/* Small image networks have no repeated modules. One convolution may have half of all FLOPs, so no boundaries balance
 * them. Still the number of layers is as requested, and no layer has much more than the heaviest operator. */
static void unbalanced_models_are_cut(void)
{
    const struct hapt_model *const models[] = {
        MODEL("vgg", "--hidden", "64", "--image", "16", "--width", "8", "--classes", "7", "--microbatch", "2"),
        MODEL("resnet", "--image", "32", "--width", "8", "--stages", "2", "--classes", "7", "--microbatch", "8")};
    for (int m = 0; m < 2; m++) {
        const struct hapt_graph *graph = models[m]->graph;
        double heaviest = 0, flops[128];
        hapt_structure_flops(graph, flops);
        for (int op = 0; op < graph->forward_count; op++) heaviest = fmax(heaviest, flops[op]);
        CHECK(layers_of(models[m], 0)->module_count == 1);
        CHECK(layers_of(models[m], 0)->count == 8);
        for (int wanted = 1; wanted <= 17; wanted++) CHECK(layers_of(models[m], wanted)->count == wanted);
        CHECK(layers_of(models[m], 1000)->count == graph->forward_count);
        for (int wanted = 4; wanted <= 12; wanted += 4) {
            const struct hapt_layers *layers = layers_of(models[m], wanted);
            for (int l = 0; l < layers->count; l++)
                CHECK_MESSAGE(layers->flops[l] <= 1.25 * heaviest, "layer %d of %d has %g FLOPs, an operator %g", l,
                              wanted, layers->flops[l], heaviest);
        }
    }
}

/* Bytes of what operators before `at` make and operators from `at` on use. */
static double live_bytes(const struct hapt_graph *graph, int at)
{
    double bytes = 0;
    for (int t = 0; t < graph->tensor_count; t++) {
        bool used = false;
        if (graph->tensor[t].kind != HAPT_TENSOR_ACTIVATION || graph->tensor[t].producer >= at) continue;
        for (int o = 0; o < graph->op_count && !used; o++)
            for (int i = 0; i < graph->op[o].input_count && !used; i++)
                used = graph->op[o].input[i] == t && graph->op[o].forward_op >= at;
        bytes += used ? (double)hapt_tensor_bytes(&graph->tensor[t]) : 0;
    }
    return bytes;
}

/* Between any two heavy operators is a boundary: the automatic ones, or the one with the fewest bytes. */
static void check_by_operator(const struct hapt_model *model)
{
    const struct hapt_graph *graph = model->graph;
    const struct hapt_layers *coarse = layers_of(model, 0), *fine = layers_of(model, HAPT_LAYERS_BY_OPERATOR);
    const int ops = graph->forward_count;
    bool *is_coarse = hapt_arena_alloc(&arena, (size_t)ops + 1, sizeof *is_coarse);
    bool *is_fine = hapt_arena_alloc(&arena, (size_t)ops + 1, sizeof *is_fine);
    int added = 0;
    for (int l = 0; l < coarse->count; l++) is_coarse[coarse->end_op[l]] = true;
    for (int l = 0; l < fine->count; l++) is_fine[fine->end_op[l]] = true;
    for (int at = 0; at <= ops; at++) CHECK(is_fine[at] || !is_coarse[at]);
    for (int op = 0, last = -1; op < ops; op++) {
        if (!hapt_op_type_at(graph->op[op].type)->heavy) continue;
        int automatic = 0, own = -1;
        double least = INFINITY;
        for (int at = last + 1; at <= op && last >= 0; at++) {
            automatic += is_coarse[at];
            if (is_fine[at] && !is_coarse[at]) own = at, added++;
            least = fmin(least, live_bytes(graph, at));
        }
        CHECK_MESSAGE(last < 0 || (automatic == 0) == (own >= 0), "%s: no boundary, or one too many",
                      graph->op[op].name);
        if (own >= 0) CHECK(live_bytes(graph, own) == least);
        last = op;
    }
    CHECK(fine->count == coarse->count + added);
}

static void layers_by_operator(void)
{
    const struct hapt_model *gpt = small_gpt(),
                            *resnet = MODEL("resnet", "--stages", "2,2,2,2", "--width", "8", "--image", "32",
                                            "--classes", "10", "--microbatch", "2");
    check_by_operator(gpt);
    check_by_operator(resnet);
    check_by_operator(MODEL("llama", "--layers", "2", "--hidden", "64", "--heads", "4", "--sequence", "32", "--vocab",
                            "64", "--microbatch", "2"));
    check_by_operator(MODEL("vgg", "--stages", "1,1", "--width", "8", "--hidden", "64", "--image", "16", "--classes",
                            "10", "--microbatch", "2"));
    CHECK(layers_of(resnet, HAPT_LAYERS_BY_OPERATOR)->count > layers_of(resnet, 0)->count);
}

int main(int argc, char **argv)
{
    test_init(&argc, &argv);
    hapt_arena_init(&arena);
    RUN(modules_equal_brute_force);
    RUN(unbalanced_models_are_cut);
    RUN(gpt_modules_are_blocks);
    RUN(gpt_granularities);
    RUN(layers_balance_and_cuts);
    RUN(cut_bytes_by_definition);
    RUN(structures);
    RUN(run_file_table);
    RUN(mixtures_are_not_cut);
    RUN(layers_by_operator);
    hapt_arena_release(&arena);
    return test_finish();
}
