/* Structures of all ranges at once against those of one range by its definition. */
#include "fixture.h"

#include "hapt/layers.h"

static uint64_t mix(uint64_t hash, int64_t value)
{
    return hapt_hash(hash, &value, sizeof value);
}

/* Flags of an activation or its gradient: it crosses the boundaries of a range of forward operators. An activation
 * enters if written before the range, and leaves if read after it. A gradient enters if written after the range, and
 * leaves if read or added to before it. */
enum { ENTERS = 1, LEAVES = 2 };

static void note_crossings(const struct hapt_graph *graph, int first_op, int end_op, unsigned char *crossing)
{
    for (int index = 0; index < graph->op_count; index++) {
        const struct hapt_op *op = &graph->op[index];
        if (op->forward_op >= first_op && op->forward_op < end_op) continue;
        const bool before = op->forward_op < first_op;
        for (int k = 0; k < op->input_count + op->output_count; k++) {
            const bool reads = k < op->input_count;
            const int tensor = reads ? op->input[k] : op->output[k - op->input_count];
            if (tensor < 0) continue;
            const bool gradient = graph->tensor[tensor].kind == HAPT_TENSOR_GRADIENT;
            if (before == gradient || !reads) crossing[tensor] |= before == gradient ? LEAVES : ENTERS;
        }
    }
}

/* Hash of one range's program: its operators in the graph's order, with tensors numbered by first appearance. */
static uint64_t structure_of(const struct hapt_layers *layers, const struct hapt_graph *graph, int first, int end)
{
    const int first_op = hapt_layers_first_op(layers, first), end_op = layers->end_op[end - 1];
    unsigned char *crossing = calloc((size_t)graph->tensor_count, 1);
    int *number = calloc((size_t)graph->tensor_count, sizeof *number), numbers = 0;
    uint64_t hash = 2;
    note_crossings(graph, first_op, end_op, crossing);
    for (int index = 0; index < graph->op_count; index++) {
        const struct hapt_op *op = &graph->op[index];
        const int64_t facts[] = {op->type, op->input_count, op->output_count, op->accumulate,
                                 op->forward_op - first_op};
        if (op->forward_op < first_op || op->forward_op >= end_op) continue;
        hash = hapt_hash(hash, facts, sizeof facts);
        hash = hapt_hash(hash, op->integer, sizeof op->integer);
        hash = hapt_hash(hash, op->real, sizeof op->real);
        for (int k = 0; k < op->input_count + op->output_count; k++) {
            const int t = k < op->input_count ? op->input[k] : op->output[k - op->input_count];
            if (t >= 0 && number[t] == 0) {
                const struct hapt_tensor *of = &graph->tensor[t];
                const enum hapt_tensor_kind primal = of->primal >= 0 ? graph->tensor[of->primal].kind : of->kind;
                const int64_t about[] = {of->kind,
                                         of->role,
                                         of->dtype,
                                         of->dims,
                                         of->trainable,
                                         primal,
                                         primal == HAPT_TENSOR_ACTIVATION ? crossing[t] : 0};
                number[t] = ++numbers;
                hash = hapt_hash(hash, about, sizeof about);
                hash = hapt_hash(hash, of->shape, (size_t)of->dims * sizeof of->shape[0]);
            }
            hash = mix(hash, t < 0 ? -1 : number[t]);
        }
    }
    free(crossing);
    free(number);
    return hash;
}

/* All at once tell the same ranges apart and the same ones alike as one by one. */
static void check_all_structures(const struct hapt_graph *graph, int granularity, struct hapt_arena *arena,
                                 const char *what)
{
    const struct hapt_layers_options options = {.granularity = granularity, .heavy_minimum = 1};
    struct hapt_layers *layers = NULL;
    CHECK_OK(hapt_layers_build(graph, &options, arena, &layers));
    if (!layers) return;
    const int L = layers->count;
    uint64_t *all = calloc((size_t)L * (size_t)L, sizeof *all), *one = calloc((size_t)L * (size_t)L, sizeof *one);
    CHECK_OK(hapt_layers_structures(layers, graph, NULL, all));
    for (int i = 0; i < L; i++)
        for (int j = i; j < L; j++) one[i * L + j] = structure_of(layers, graph, i, j + 1);
    for (int a = 0; a < L * L; a++)
        for (int b = 0; b < a; b++)
            if (one[a] && one[b] && (one[a] == one[b]) != (all[a] == all[b])) {
                CHECK_MESSAGE(false, "%s: layers %d to %d and %d to %d", what, a / L, a % L, b / L, b % L);
                a = b = L * L;
            }
    free(all);
    free(one);
}

static void all_structures(void)
{
    for (int tied = 0; tied < 2; tied++) {
        struct hapt_arena arena;
        hapt_arena_init(&arena);
        const struct hapt_model *model = fixture_gpt(&arena, (struct fixture_gpt){8, 16, 2, 8, 24, 2, tied, false});
        check_all_structures(model->graph, 0, &arena, "GPT");
        check_all_structures(model->graph, 200, &arena, "fine GPT");
        hapt_arena_release(&arena);
    }
    const int cases = test_long() ? 3000 : 300;
    for (int k = 0; k < cases; k++) {
        struct hapt_arena arena;
        uint64_t random = (uint64_t)k + 31;
        char name[32];
        hapt_arena_init(&arena);
        snprintf(name, sizeof name, "random graph %d", k);
        check_all_structures(fixture_random(&arena, &random, 3 + k % 40), 1000, &arena, name);
        hapt_arena_release(&arena);
    }
}

int main(int argc, char **argv)
{
    test_init(&argc, &argv);
    RUN(all_structures);
    return test_finish();
}
