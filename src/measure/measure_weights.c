/*
 * The part of backward passes that a split defers (hapt_sharding.weight), timed by the engine. Output:
 * measure->weight_share, a share of the backward pass: it stays right when later corrections change that pass.
 * Single layers are timed alone; items are sums of layers. Layers of tensor-parallel and synthesised stages run without
 * their collectives here, so their share is that of the computation. Also how much
 * longer split backward passes take than unsplit ones.
 */
#include "measure.h"

#include <math.h>

/* Times the layers of one mesh; one layer stands for those of equal structure. weight_s [L], backward_s [L]: NaN where
 * `engines` have no engine for it. */
static enum hapt_status time_layers(const struct measure *measure, struct bench_engines *engines, int mesh_index,
                                    double *weight_s, double *backward_s)
{
    const struct hapt_candidates *candidates = measure->candidates;
    const int L = candidates->layer_count;
    for (int l = 0; l < L; l++) {
        const int item = hapt_candidates_item(candidates, mesh_index, l, l);
        int same = 0;
        while (candidates->structure[same * L + same] != candidates->structure[l * L + l]) same++;
        weight_s[l] = same < l ? weight_s[same] : NAN;
        backward_s[l] = same < l ? backward_s[same] : NAN;
        if (same == l && engines->bench_engine_of[item] >= 0)
            HAPT_TRY(bench_engines_time_weight(engines, item, &weight_s[l], &backward_s[l]));
    }
    return HAPT_OK;
}

/* Sums the layers of each item of a mesh. Writes 1 + the share: 0 stands for unknown in sums over ranks. */
static enum hapt_status time_mesh(struct measure *measure, struct bench_engines *engines, int mesh_index,
                                  double *weight_s, double *backward_s)
{
    const struct hapt_candidates *candidates = measure->candidates;
    const int class = measure->classes.own_class;
    HAPT_TRY(time_layers(measure, engines, mesh_index, weight_s, backward_s));
    for (int item = mesh_index; item < candidates->item_count; item += candidates->mesh_count) {
        const int structure = item / candidates->mesh_count;
        double weights_s = 0, all_s = 0;
        for (int l = candidates->first[structure]; l <= candidates->last[structure]; l++) {
            weights_s += weight_s[l];
            all_s += backward_s[l];
        }
        if (!isfinite(weights_s)) continue;
        measure->weight_share[(size_t) class * (size_t)candidates->item_count + (size_t)item] =
            1 + (all_s > 0 ? weights_s / all_s : 0);
    }
    return HAPT_OK;
}

/* Adds the longest range of a mesh that has an engine to sum_s: its split and its unsplit backward pass. In a split
 * one, what waits runs behind all layers, when less is left in the caches. */
static enum hapt_status add_split_pass(struct bench_engines *engines, int mesh_index, double sum_s[2])
{
    int longest = -1;
    double split_s, whole_s;
    for (int w = 0; w < engines->count; w++) {
        const struct bench_engine *engine = &engines->bench_engine[w];
        if (engine->mesh_index != mesh_index) continue;
        if (longest < 0 ||
            engine->last - engine->first > engines->bench_engine[longest].last - engines->bench_engine[longest].first)
            longest = w;
    }
    if (longest < 0) return HAPT_OK;
    HAPT_TRY(bench_engines_time_split(engines, longest, &split_s, &whole_s));
    if (!isfinite(split_s)) return HAPT_OK;
    sum_s[0] += split_s;
    sum_s[1] += whole_s;
    return HAPT_OK;
}

static bool communicates(struct hapt_submesh submesh)
{
    return submesh.tp > 1 || submesh.program > 0;
}

/* Times the single layers of those stages of my class that only teams run. */
static void mark_team_layers(const struct measure *measure, bool *layer, bool *of_mesh)
{
    const struct hapt_candidates *candidates = measure->candidates;
    for (int c = 0; c < measure->cluster->count; c++) {
        if (measure->classes.of_subcluster[c] != measure->classes.own_class) continue;
        for (int s = 0; s < measure->stages.count[c]; s++) {
            const int mesh_index = hapt_candidates_mesh_index_of(candidates, measure->stages.submesh[c][s]);
            if (mesh_index < 0 || !communicates(measure->stages.submesh[c][s])) continue;
            of_mesh[mesh_index] = true;
            for (int l = 0; l < candidates->layer_count; l++)
                layer[hapt_candidates_item(candidates, mesh_index, l, l)] = true;
        }
    }
}

static enum hapt_status time_class(struct measure *measure, const struct hapt_engine_options *options)
{
    const struct hapt_candidates *candidates = measure->candidates;
    struct bench_engines team;
    double *weight_s, *backward_s, sum_s[2] = {0};
    bool *layer, *of_mesh;
    HAPT_NEW(weight_s, measure->scratch, candidates->layer_count);
    HAPT_NEW(backward_s, measure->scratch, candidates->layer_count);
    HAPT_NEW(layer, measure->scratch, candidates->item_count);
    HAPT_NEW(of_mesh, measure->scratch, candidates->mesh_count);
    mark_team_layers(measure, layer, of_mesh);
    for (int d = 0; d < candidates->mesh_count; d++) {
        if (of_mesh[d]) continue;
        HAPT_TRY(time_mesh(measure, &measure->bench_engines, d, weight_s, backward_s));
        HAPT_TRY(add_split_pass(&measure->bench_engines, d, sum_s));
    }
    bench_engines_close(&measure->bench_engines); /* the others need their memory */
    HAPT_TRY(bench_engines_choose(candidates, options, measure_room(measure, options),
                                  measure_memory(measure, measure->classes.own_class, 0), layer, measure->scratch,
                                  &team));
    enum hapt_status status = HAPT_OK;
    for (int d = 0; d < candidates->mesh_count && status == HAPT_OK; d++)
        if (of_mesh[d]) status = time_mesh(measure, &team, d, weight_s, backward_s);
    bench_engines_close(&team);
    if (sum_s[0] > sum_s[1]) measure->split_overhead[measure->classes.own_class] = sum_s[0] / sum_s[1] - 1;
    return status;
}

enum hapt_status measure_weights(struct measure *measure, const struct hapt_engine_options *options)
{
    const size_t cells = (size_t)measure->classes.count * (size_t)measure->candidates->item_count;
    enum hapt_status status = HAPT_OK;
    measure->weight_share = hapt_arena_alloc(measure->scratch, cells, sizeof *measure->weight_share);
    measure->split_overhead =
        hapt_arena_alloc(measure->scratch, (size_t)measure->classes.count, sizeof *measure->split_overhead);
    if (!measure->weight_share || !measure->split_overhead) status = HAPT_ERR_MEMORY;
    if (status == HAPT_OK && measure->classes.is_lead) status = time_class(measure, options);
    HAPT_TRY(hapt_env_agree(measure->env->world, status));
    HAPT_TRY(measure_sum_over_ranks(measure, measure->weight_share, cells));
    HAPT_TRY(measure_sum_over_ranks(measure, measure->split_overhead, (size_t)measure->classes.count));
    for (size_t cell = 0; cell < cells; cell++)
        measure->weight_share[cell] = measure->weight_share[cell] > 0 ? measure->weight_share[cell] - 1 : NAN;
    return HAPT_OK;
}
