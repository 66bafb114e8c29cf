/* Measures device speeds: the full model with all rows of a microbatch and with few. Used for the rows and programs
 * of mixed stages. */
#include "measure.h"

#include <math.h>
#include <string.h>

#include "measure_programs.h"

/* Every single layer with all rows of a microbatch and with few. */
static enum hapt_status choose_layers(struct measure *measure, const struct hapt_engine_options *options,
                                      const int mesh_index[2])
{
    const struct hapt_candidates *candidates = measure->candidates;
    if (measure->classes.own_class < 0) return HAPT_OK;
    for (int l = 0; l < candidates->layer_count; l++)
        for (int k = 0; k < 2; k++) {
            const int item = hapt_candidates_item(candidates, mesh_index[k], l, l);
            measure->needed[item] = measure->fits[item] = true;
        }
    return bench_engines_choose(candidates, options, measure_room(measure, options),
                                measure_memory(measure, measure->classes.own_class, 0), measure->fits, measure->scratch,
                                &measure->bench_engines);
}

/* CPU seconds of my class: all rows, few rows, update, rest of the end of a step. */
static enum hapt_status sum_layers(struct measure *measure, MPI_Comm class_comm, const int mesh_index[2], double sum[4])
{
    const struct hapt_candidates *candidates = measure->candidates;
    double trained = 0, most = -1, s_per_element[2];
    int update_item = -1;
    HAPT_TRY(measure_time_layers(measure, class_comm));
    for (int l = 0; l < candidates->layer_count && measure->classes.own_class >= 0; l++) {
        const int item = hapt_candidates_item(candidates, mesh_index[0], l, l);
        const double elements = measure_memory(measure, measure->classes.own_class, item)->trained_elements;
        for (int k = 0; k < 2; k++) sum[k] += measure->layer_s[mesh_index[k] * candidates->layer_count + l];
        trained += elements;
        if (elements <= most) continue;
        most = elements;
        update_item = item;
    }
    HAPT_TRY(measure_time_updates(measure, class_comm, update_item, s_per_element));
    if (measure->classes.own_class < 0) return HAPT_OK;
    for (int part = 0; part < 2; part++) sum[2 + part] = s_per_element[part] * trained;
    return HAPT_OK;
}

/* Fills times[subcluster]. Collective over env->world. */
static enum hapt_status measure_device_times(struct measure *measure, struct hapt_engine_options *options,
                                             const int mesh_index[2], struct hapt_device_times *times)
{
    const struct hapt_env *env = measure->env;
    double *sum; /* [class][4] */
    MPI_Comm class_comm;
    HAPT_TRY(classes_find(env, measure->cluster, measure->threads, &measure->classes));
    HAPT_TRY(hapt_env_agree(env->world, measure_set_up(measure, options)));
    HAPT_TRY(measure_sum_over_ranks(measure, (double *)measure->memory,
                                    (size_t)measure->classes.count * (size_t)measure->candidates->item_count *
                                        sizeof *measure->memory / sizeof(double)));
    HAPT_TRY(hapt_env_agree(env->world, choose_layers(measure, options, mesh_index)));
    HAPT_TRY(measure_check_cost(measure));
    sum = hapt_arena_alloc(measure->scratch, 4 * (size_t)measure->classes.count, sizeof *sum);
    HAPT_TRY(hapt_env_agree(env->world, sum ? HAPT_OK : HAPT_ERR_MEMORY));
    HAPT_MPI(MPI_Comm_split(env->world, measure->classes.own_class < 0 ? MPI_UNDEFINED : measure->classes.own_class,
                            env->world_rank, &class_comm));
    double mine[4] = {0};
    const enum hapt_status status = sum_layers(measure, class_comm, mesh_index, mine);
    if (class_comm != MPI_COMM_NULL) MPI_Comm_free(&class_comm);
    HAPT_TRY(status);
    if (measure->classes.is_lead) memcpy(&sum[4 * measure->classes.own_class], mine, sizeof mine);
    HAPT_TRY(measure_sum_over_ranks(measure, sum, 4 * (size_t)measure->classes.count));
    for (int c = 0; c < measure->cluster->count; c++) {
        const double slowdown = fmax(measure->cluster->subcluster[c].device.slowdown, 1);
        const double *its = &sum[4 * measure->classes.of_subcluster[c]];
        times[c] = hapt_candidates_device_times(measure->candidates, slowdown * its[0], slowdown * its[1],
                                                slowdown * its[2] + its[3]);
    }
    return HAPT_OK;
}

/* Chooses the rows of mixed stages from measured speeds. */
static enum hapt_status mix_rows(const struct measure *like, struct hapt_candidates *candidates, unsigned programs,
                                 struct hapt_arena *arena, struct hapt_arena *scratch)
{
    struct measure measure = *like;
    struct hapt_engine_options options = {0};
    struct hapt_device_times times[HAPT_MAX_SUBCLUSTERS];
    int mesh_index[2] = {hapt_candidates_mesh_index(candidates, 1, 1), -1};
    if (mesh_index[0] < 0) return HAPT_OK;
    HAPT_TRY(hapt_env_agree(like->env->world, hapt_candidates_few_rows_mesh(candidates, arena, &mesh_index[1])));
    measure.scratch = scratch;
    enum hapt_status status = measure_device_times(&measure, &options, mesh_index, times);
    bench_engines_close(&measure.bench_engines);
    if (options.device) options.backend->close(options.device);
    HAPT_TRY(status);
    return hapt_env_agree(like->env->world,
                          hapt_candidates_mix(candidates, like->config, programs, times, arena, scratch));
}

/* Opens this rank's device for the collectives of mixed groups. */
static enum hapt_status open_device(const struct measure *like, struct hapt_engine_options *options)
{
    *options = (struct hapt_engine_options){.threads = like->threads};
    if (like->cluster->subcluster_of_rank[like->env->world_rank] < 0) return HAPT_OK;
    return classes_open_device(like->env, like->cluster, "measure on", "see hapt doctor", options);
}

/* Groups with synthesised programs. */
static enum hapt_status mix_programs(struct measure *like, const struct hapt_layers *layers,
                                     struct hapt_candidates *candidates, struct hapt_arena *arena)
{
    struct mixed_measuring measuring = {.env = like->env, .config = like->config, .candidates = candidates};
    struct hapt_engine_options options;
    if (candidates->mixable_count == 0) return HAPT_OK;
    HAPT_TRY(programs_calibrate(like, candidates->model, layers, arena));
    measuring.efficiency = like->efficiency;
    enum hapt_status status = hapt_env_agree(like->env->world, open_device(like, &options));
    if (status == HAPT_OK) status = measure_mixed_programs(&measuring, &options, arena);
    if (options.device) options.backend->close(options.device);
    return status;
}

static enum hapt_status mix(struct measure *like, const struct hapt_layers *layers, struct hapt_candidates *candidates,
                            struct hapt_arena *arena, struct hapt_arena *scratch)
{
    const unsigned programs = hapt_candidates_programs(like->config);
    HAPT_TRY(mix_rows(like, candidates, programs, arena, scratch));
    HAPT_TRY(mix_programs(like, layers, candidates, arena));
    HAPT_TRY(hapt_env_agree(like->env->world, hapt_candidates_find_structures(candidates, arena)));
    return classes_same_structures(like->env, candidates);
}

enum hapt_status measure_mix(struct measure *like, const struct hapt_layers *layers, struct hapt_candidates *candidates,
                             struct hapt_arena *arena)
{
    struct hapt_arena scratch;
    if (!hapt_candidates_may_mix(candidates, like->config)) return HAPT_OK;
    hapt_arena_init(&scratch);
    const enum hapt_status status = mix(like, layers, candidates, arena, &scratch);
    hapt_arena_release(&scratch);
    return status;
}
