/* Tensors between layers: for each, the layers that make it and use it. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "hapt/profile.h"

/* The layers that use a tensor, in the order of computing: forward ascending, backward descending. */
struct use {
    int layer;
    bool writes;
};

struct finding {
    const struct hapt_graph *graph;
    int *layer_of;   /* [forward operator] */
    int *start;      /* [tensors + 1] into `use` */
    struct use *use; /* one for each input and output of an operator */
};

/* Activations and their gradients go from stage to stage. Gradients of parameters are summed where they are. */
static bool is_sent(const struct hapt_graph *graph, int tensor)
{
    const struct hapt_tensor *of = &graph->tensor[tensor];
    if (of->kind == HAPT_TENSOR_GRADIENT) return graph->tensor[of->primal].kind != HAPT_TENSOR_PARAMETER;
    return of->kind == HAPT_TENSOR_ACTIVATION;
}

/* Calls with each input and output of an operator. */
static int tensor_at(const struct hapt_op *op, int k, bool *writes)
{
    *writes = k >= op->input_count;
    return *writes ? op->output[k - op->input_count] : op->input[k];
}

static enum hapt_status list_uses(struct finding *finding, struct hapt_arena *scratch)
{
    const struct hapt_graph *graph = finding->graph;
    int *end;
    bool writes;
    HAPT_NEW(finding->start, scratch, graph->tensor_count + 1);
    HAPT_NEW(end, scratch, graph->tensor_count);
    for (int pass = 0; pass < 2; pass++) {
        for (int o = 0; o < graph->op_count; o++)
            for (int k = 0; k < graph->op[o].input_count + graph->op[o].output_count; k++) {
                const int tensor = tensor_at(&graph->op[o], k, &writes);
                if (tensor < 0 || !is_sent(graph, tensor)) continue;
                if (pass == 0)
                    finding->start[tensor + 1]++;
                else
                    finding->use[end[tensor]++] = (struct use){finding->layer_of[graph->op[o].forward_op], writes};
            }
        if (pass == 1) break;
        for (int t = 0; t < graph->tensor_count; t++) {
            finding->start[t + 1] += finding->start[t];
            end[t] = finding->start[t];
        }
        HAPT_NEW(finding->use, scratch, finding->start[graph->tensor_count]);
    }
    return HAPT_OK;
}

static int ascending(const void *a, const void *b)
{
    return ((const struct use *)a)->layer - ((const struct use *)b)->layer;
}

static int descending(const void *a, const void *b)
{
    return ascending(b, a);
}

/* The layers of a tensor, each once. Returns their number. */
static int layers_of(struct finding *finding, int tensor, struct use *layer)
{
    const int first = finding->start[tensor], count = finding->start[tensor + 1] - first;
    const bool backward = finding->graph->tensor[tensor].kind == HAPT_TENSOR_GRADIENT;
    int made = 0;
    qsort(finding->use + first, (size_t)count, sizeof(struct use), backward ? descending : ascending);
    for (int k = first; k < first + count; k++) {
        if (made == 0 || finding->use[k].layer != layer[made - 1].layer) layer[made++] = (struct use){-1, false};
        layer[made - 1].layer = finding->use[k].layer;
        layer[made - 1].writes = layer[made - 1].writes || finding->use[k].writes;
    }
    return made;
}

/* The entry with these layers among those with the same first one, which end with the last; -1: none. */
static int same_layers(const struct hapt_crossings *made, const struct use *layer, int count)
{
    for (int k = made->count - 1; k >= 0 && made->layer[made->start[k]] == layer[0].layer; k--) {
        bool same = made->start[k + 1] - made->start[k] == count;
        for (int i = 0; same && i < count; i++)
            same = made->layer[made->start[k] + i] == layer[i].layer &&
                   made->writes[made->start[k] + i] == layer[i].writes;
        if (same) return k;
    }
    return -1;
}

static void add_entry(struct hapt_crossings *made, const struct use *layer, int count, double bytes)
{
    int k = same_layers(made, layer, count);
    if (k < 0) {
        k = made->count++;
        for (int i = 0; i < count; i++) {
            made->layer[made->start[k] + i] = layer[i].layer;
            made->writes[made->start[k] + i] = layer[i].writes;
        }
        made->start[k + 1] = made->start[k] + count;
    }
    made->bytes[k] += bytes;
}

static enum hapt_status allot(int entries, int layers, struct hapt_arena *arena, struct hapt_crossings *made)
{
    HAPT_NEW(made->bytes, arena, entries);
    HAPT_NEW(made->start, arena, entries + 1);
    HAPT_NEW(made->layer, arena, layers);
    HAPT_NEW(made->writes, arena, layers);
    return HAPT_OK;
}

static enum hapt_status find(struct finding *finding, int layers, struct hapt_arena *result, struct hapt_arena *scratch,
                             struct hapt_crossings *made, bool *far)
{
    const struct hapt_graph *graph = finding->graph;
    struct use *layer;
    int entries = 0, all = 0;
    HAPT_TRY(list_uses(finding, scratch));
    HAPT_NEW(layer, scratch, layers);
    *far = false;
    for (int t = 0; t < graph->tensor_count; t++) {
        const int count = is_sent(graph, t) ? layers_of(finding, t, layer) : 0;
        if (count < 2) continue;
        entries++, all += count;
        if (abs(layer[count - 1].layer - layer[0].layer) > 1) *far = true;
    }
    if (!*far) return HAPT_OK;
    HAPT_TRY(allot(entries, all, result, made));
    for (int t = 0; t < graph->tensor_count; t++) {
        const int count = is_sent(graph, t) ? layers_of(finding, t, layer) : 0;
        if (count > 1) add_entry(made, layer, count, (double)hapt_tensor_bytes(&graph->tensor[t]));
    }
    return HAPT_OK;
}

enum hapt_status hapt_crossings_find(const struct hapt_graph *graph, const struct hapt_layers *layers,
                                     struct hapt_arena *result, struct hapt_arena *scratch,
                                     const struct hapt_crossings **crossings)
{
    struct finding finding = {.graph = graph};
    struct hapt_crossings *made;
    bool far;
    *crossings = NULL;
    HAPT_NEW(made, result, 1);
    HAPT_TRY(hapt_layers_of_operators(layers, scratch, &finding.layer_of));
    HAPT_TRY(find(&finding, layers->count, result, scratch, made, &far));
    if (far) *crossings = made;
    return HAPT_OK;
}

enum hapt_status hapt_crossings_coarsen(const struct hapt_crossings *fine, const int *coarse_layer,
                                        struct hapt_arena *arena, const struct hapt_crossings **coarse)
{
    struct hapt_crossings *made;
    *coarse = NULL;
    if (!fine) return HAPT_OK;
    HAPT_NEW(made, arena, 1);
    HAPT_TRY(allot(fine->count, fine->start[fine->count], arena, made));
    for (int k = 0; k < fine->count; k++) {
        const int first = made->start[made->count];
        int end = first;
        for (int i = fine->start[k]; i < fine->start[k + 1]; i++) {
            const int layer = coarse_layer[fine->layer[i]];
            if (end == first || layer != made->layer[end - 1]) made->writes[end++] = false;
            made->layer[end - 1] = layer;
            made->writes[end - 1] = made->writes[end - 1] || fine->writes[i];
        }
        if (end - first < 2) continue;
        made->bytes[made->count] = fine->bytes[k];
        made->start[++made->count] = end;
    }
    *coarse = made;
    return HAPT_OK;
}

struct sums {
    double *next[2], *all; /* [boundary] next: activations, gradients; all: activations */
};

static void add_to_sums(const struct hapt_crossings *crossings, int k, struct sums *sums)
{
    const int *layer = crossings->layer;
    const int first = crossings->start[k], end = crossings->start[k + 1];
    const int d = layer[first + 1] < layer[first]; /* gradients descend */
    for (int writer = first, i = first + 1; i < end; i++) {
        const int boundary = d ? layer[writer] - 1 : layer[writer];
        if (abs(layer[i] - layer[writer]) == 1) sums->next[d][boundary] += crossings->bytes[k];
        if (i == first + 1 && d == 0) sums->all[boundary] += crossings->bytes[k];
        if (crossings->writes[i]) writer = i;
    }
}

enum hapt_status hapt_crossings_least_bytes(const struct hapt_crossings *crossings, int layer_count,
                                            struct hapt_arena *arena, double **next, double **all)
{
    struct sums sums;
    for (int d = 0; d < 2; d++) HAPT_NEW(sums.next[d], arena, layer_count);
    HAPT_NEW(sums.all, arena, layer_count);
    for (int k = 0; k < crossings->count; k++) add_to_sums(crossings, k, &sums);
    for (int l = 0; l < layer_count; l++) sums.next[0][l] = fmin(sums.next[0][l], sums.next[1][l]);
    *next = sums.next[0];
    *all = sums.all;
    return HAPT_OK;
}

#define BAD(...) hapt_fail(HAPT_ERR_INPUT, "`hapt help profile` describes the tables", "profile: " __VA_ARGS__)

enum hapt_status hapt_crossings_check(const struct hapt_crossings *crossings, int layer_count)
{
    if (crossings->start[0] != 0) return BAD("crossing_start[0] is %d, not 0", crossings->start[0]);
    for (int k = 0; k < crossings->count; k++) {
        const int first = crossings->start[k], end = crossings->start[k + 1];
        if (!(crossings->bytes[k] >= 0 && crossings->bytes[k] <= 1e30))
            return BAD("crossing_bytes[%d] is %g; it must be between 0 and 1e30", k, crossings->bytes[k]);
        if (end < first + 2) return BAD("crossing %d has one layer", k);
        const bool backward = crossings->layer[first + 1] < crossings->layer[first];
        for (int i = first; i < end; i++) {
            const int layer = crossings->layer[i], before = i > first ? crossings->layer[i - 1] : layer;
            if (layer < 0 || layer >= layer_count || (i > first && (layer == before || (layer < before) != backward)))
                return BAD("crossing_layer[%d] is %d; the layers of a crossing must ascend or descend, below %d", i,
                           layer, layer_count);
        }
    }
    return HAPT_OK;
}
