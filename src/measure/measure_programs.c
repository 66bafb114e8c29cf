/*
 * The programs of measured candidates: data- and tensor-parallel ones by rule, synthesised ones from operators
 * calibrated here and measured collectives.
 *
 * With --program auto tensor-parallel stages are candidates only if data-parallel ones lack memory: a range that fits
 * no data-parallel submesh of its subcluster fits a tensor-parallel one. --tensor-parallel or another --program
 * measures them in any case. With --recompute auto stages that recompute are candidates only if the model may lack
 * memory with all microbatches of a step in flight.
 */
#include <math.h>
#include <string.h>

#include "hapt/synthesised.h"
#include "calibrate.h"
#include "measure_programs.h"

#define CALIBRATION_SHARE 0.15 /* of --profile-seconds, to time the operators from which programs are priced */
#define NEARLY_FULL 0.8        /* of the device memory: kernel scratch and a rounding may not be counted */

/* True if the rule of --program auto decides about tensor-parallel stages. */
static bool depends_on_memory(const struct hapt_config *config)
{
    return strcmp(hapt_config_text(config, "program"), "auto") == 0 && !hapt_config_given(config, "tensor-parallel");
}

/* ---- does data parallelism lack memory? ---- */

/* lacks[0]: the full model may not fit some subcluster with one microbatch in flight; lacks[1]: with all of them.
 * Memory grows with the range, so otherwise every range fits. */
static enum hapt_status may_lack_memory(const struct hapt_candidates *candidates, struct hapt_arena *scratch,
                                        bool lacks[2])
{
    const int in_flight[2] = {1, candidates->microbatches};
    struct hapt_item_memory *memory;
    struct hapt_submesh *submesh;
    lacks[0] = lacks[1] = false;
    HAPT_NEW(memory, scratch, candidates->mesh_count);
    for (int d = 0; d < candidates->mesh_count; d++)
        HAPT_TRY(hapt_candidates_plan_memory(
            candidates, hapt_candidates_item(candidates, d, 0, candidates->layer_count - 1), NULL, &memory[d]));
    for (int c = 0; c < candidates->cluster->count; c++) {
        const struct hapt_subcluster *own = &candidates->cluster->subcluster[c];
        const double limit = own->device.memory_bytes;
        const int count = hapt_candidates_submeshes(own, NULL);
        bool fits[2] = {false, false};
        HAPT_NEW(submesh, scratch, count);
        hapt_candidates_submeshes(own, submesh);
        for (int s = 0; s < count; s++) {
            const int d = hapt_candidates_mesh_index_of(candidates, submesh[s]);
            for (int k = 0; d >= 0 && k < 2; k++)
                fits[k] = fits[k] || hapt_candidates_resident_bytes(candidates, &memory[d], limit) +
                                             in_flight[k] * memory[d].activation_bytes <=
                                         NEARLY_FULL * limit;
        }
        for (int k = 0; k < 2; k++) lacks[k] = lacks[k] || !fits[k];
    }
    return HAPT_OK;
}

/* True if a range fits the memory of a data-parallel submesh of the subcluster. */
static bool fits_data_parallel(const struct measure *measure, int subcluster, int structure,
                               const struct hapt_submesh *submesh, int count)
{
    const struct hapt_candidates *candidates = measure->candidates;
    const double limit = measure->cluster->subcluster[subcluster].device.memory_bytes;
    for (int s = 0; s < count; s++) {
        const int d = hapt_candidates_mesh_index_of(candidates, submesh[s]);
        if (d < 0) continue;
        const struct hapt_item_memory *memory =
            measure_memory(measure, measure->classes.of_subcluster[subcluster], structure * candidates->mesh_count + d);
        if (hapt_candidates_resident_bytes(candidates, memory, limit) + memory->activation_bytes <= limit) return true;
    }
    return false;
}

static bool lacks_memory(const struct measure *measure, int subcluster, struct hapt_submesh variant,
                         const struct hapt_submesh *submesh, int count)
{
    const struct hapt_candidates *candidates = measure->candidates;
    const int d = hapt_candidates_mesh_index_of(candidates, variant);
    for (int k = 0; d >= 0 && k < candidates->structure_count; k++) {
        const struct hapt_item_memory *memory =
            measure_memory(measure, measure->classes.of_subcluster[subcluster], k * candidates->mesh_count + d);
        if (hapt_candidates_wanted(candidates, subcluster, variant, candidates->first[k], candidates->last[k],
                                   memory) &&
            !fits_data_parallel(measure, subcluster, k, submesh, count))
            return true;
    }
    return false;
}

enum hapt_status programs_choose(const struct measure *measure, struct hapt_candidates *candidates)
{
    if (!depends_on_memory(measure->config)) return HAPT_OK;
    for (int c = 0; c < measure->cluster->count; c++) {
        const struct hapt_subcluster *own = &measure->cluster->subcluster[c];
        const int count = hapt_candidates_submeshes(own, NULL);
        struct hapt_submesh *variant, *submesh;
        int variants;
        HAPT_NEW(submesh, measure->scratch, count);
        hapt_candidates_submeshes(own, submesh);
        HAPT_TRY(hapt_candidates_variants(candidates, c, measure->scratch, &variant, &variants));
        for (int v = 0; v < variants; v++)
            if (variant[v].tp > 1 && lacks_memory(measure, c, variant[v], submesh, count)) return HAPT_OK;
    }
    candidates->tensor_parallel = 1;
    return HAPT_OK;
}

/* ---- candidates ---- */

/* Data- and tensor-parallel candidates. */
static enum hapt_status build_plain(const struct measure *like, const struct hapt_model *model,
                                    const struct hapt_layers *layers, struct hapt_candidates *candidates,
                                    struct hapt_arena *arena)
{
    const unsigned programs = hapt_candidates_programs(like->config) & ~(unsigned)PROGRAM_SYNTHESISED;
    const bool ask = depends_on_memory(like->config),
               ask_again = like->recompute && !strcmp(hapt_config_text(like->config, "recompute"), "auto");
    struct hapt_candidates_options options = {.programs = programs,
                                              .tensor_parallel = (int)hapt_config_int(like->config, "tensor-parallel"),
                                              .split = hapt_candidates_wants_split(like->config),
                                              .recompute = like->recompute && !ask_again,
                                              .offload = like->offload};
    struct hapt_arena scratch;
    bool lacks[2];
    if (ask) options.programs = PROGRAM_DATA;
    if (!(options.programs & PROGRAM_TENSOR)) options.tensor_parallel = 1;
    HAPT_TRY(hapt_candidates_build(like->cluster, model, layers, like->config, &options, arena, candidates));
    if (!ask && !ask_again) return HAPT_OK;
    hapt_arena_init(&scratch);
    const enum hapt_status status = may_lack_memory(candidates, &scratch, lacks);
    hapt_arena_release(&scratch);
    HAPT_TRY(status);
    if (!(ask && lacks[0]) && !(ask_again && lacks[1])) return HAPT_OK;
    options.recompute = like->recompute && (!ask_again || lacks[1]);
    if (ask && lacks[0]) {
        options.programs = programs;
        options.tensor_parallel = 0;
    }
    return hapt_candidates_build(like->cluster, model, layers, like->config, &options, arena, candidates);
}

enum hapt_status programs_share_layout(const struct hapt_env *env, const struct hapt_stage_layout *own,
                                       struct hapt_arena *arena, const struct hapt_stage_layout **layout)
{
    uint64_t bytes = own ? hapt_stage_layout_pack(own, NULL) : 0;
    HAPT_MPI(MPI_Bcast(&bytes, 1, MPI_UINT64_T, 0, env->world));
    char *block = hapt_arena_alloc(arena, bytes, 1);
    HAPT_TRY(hapt_env_agree(env->world, block ? HAPT_OK : hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory for a program")));
    if (own) hapt_stage_layout_pack(own, block);
    HAPT_MPI(MPI_Bcast(block, (int)bytes, MPI_BYTE, 0, env->world));
    return hapt_env_agree(env->world, hapt_stage_layout_unpack(block, arena, layout));
}

/* Gives the meshes that rank 0 added from `first` on to all ranks. */
static enum hapt_status share_meshes(const struct hapt_env *env, struct hapt_candidates *candidates, int first,
                                     struct hapt_arena *arena)
{
    const bool root = env->world_rank == 0;
    int count = candidates->mesh_count - first;
    HAPT_MPI(MPI_Bcast(&count, 1, MPI_INT, 0, env->world));
    for (int k = 0; k < count; k++) {
        struct hapt_candidate_mesh mesh = {0};
        const struct hapt_stage_layout *layout;
        if (root) mesh = candidates->mesh[first + k];
        HAPT_MPI(MPI_Bcast(&mesh, sizeof mesh, MPI_BYTE, 0, env->world));
        HAPT_TRY(programs_share_layout(env, root ? candidates->layout[mesh.program - 1] : NULL, arena, &layout));
        HAPT_TRY(
            hapt_env_agree(env->world, root ? HAPT_OK : hapt_synthesised_add_layout(candidates, &mesh, layout, arena)));
    }
    return HAPT_OK;
}

enum hapt_status programs_calibrate(struct measure *measure, const struct hapt_model *model,
                                    const struct hapt_layers *layers, struct hapt_arena *arena)
{
    const double budget_s = CALIBRATION_SHARE * hapt_config_real(measure->config, "profile-seconds");
    struct hapt_efficiency *efficiency;
    if (measure->efficiency) return HAPT_OK;
    HAPT_TRY(
        calibrate_within(measure->env, measure->cluster, model, layers, measure->config, budget_s, arena, &efficiency));
    measure->efficiency = efficiency;
    return HAPT_OK;
}

static enum hapt_status add_synthesised(struct measure *measure, const struct hapt_layers *layers,
                                        struct hapt_candidates *candidates, struct hapt_arena *arena)
{
    const struct hapt_env *env = measure->env;
    const int first = candidates->mesh_count;
    enum hapt_status status = HAPT_OK;
    HAPT_TRY(programs_calibrate(measure, candidates->model, layers, arena));
    candidates->efficiency = measure->efficiency;
    /* Only rank 0 searches: elsewhere, rounding might give different programs from equal figures. */
    if (env->world_rank == 0) status = hapt_synthesised_add(candidates, hapt_synthesised_room(candidates), arena);
    HAPT_TRY(sums_barrier(env->world));
    HAPT_TRY(hapt_env_agree(env->world, status));
    HAPT_TRY(share_meshes(env, candidates, first, arena));
    return hapt_env_agree(env->world, hapt_candidates_find_structures(candidates, arena));
}

enum hapt_status programs_build(struct measure *measure, const struct hapt_model *model,
                                const struct hapt_layers *layers, struct hapt_candidates *candidates,
                                struct hapt_arena *arena)
{
    HAPT_TRY(hapt_env_agree(measure->env->world, build_plain(measure, model, layers, candidates, arena)));
    if (hapt_candidates_programs(measure->config) & PROGRAM_SYNTHESISED)
        HAPT_TRY(add_synthesised(measure, layers, candidates, arena));
    return classes_same_structures(measure->env, candidates);
}
