/*
 * Inside of measured profiles: the state of a measurement (measure.c), rounds over items and their evaluation
 * (measure_rounds.c), device speeds that determine the rows of mixed stages (measure_devices.c).
 */
#ifndef HAPT_MEASURE_MEASURE_H
#define HAPT_MEASURE_MEASURE_H

#include "bench_engine.h"
#include "classes.h"
#include "measure_mixed.h"
#include "measure_sums.h"
#include "steadiness.h"

enum { MEASURE_MOST_ROUNDS = 15 };

/* Stages that teams run (measure_stages.c). */
struct measure_stages {
    struct hapt_submesh *submesh[HAPT_MAX_SUBCLUSTERS]; /* [count] with their programs */
    int count[HAPT_MAX_SUBCLUSTERS], rounds;            /* rounds: the largest count */
    bool *longest;                                      /* [item] the longest range of each submesh of my subcluster */
    struct hapt_item_time *time; /* [subcluster][item] on its devices; end_s: number of teams, 0: not run. NULL: none */
};

struct measure {
    const struct hapt_env *env;
    const struct hapt_cluster *cluster;
    const struct hapt_candidates *candidates;
    const struct hapt_config *config;
    struct hapt_arena *scratch;
    double start_s, budget_s; /* for timing single devices */
    bool recompute;           /* also stages that recompute */
    struct hapt_offloading offload;
    int threads;
    struct classes classes;
    struct hapt_item_memory *memory; /* [class][item] */
    struct hapt_item_time *time;     /* [class][item] CPU or device time, without slowdown */
    /* [class][item][keep_stride] memory of shares of units that recompute, again_s 0; NULL: none recompute */
    struct hapt_item_again *again;
    double *weight_share;   /* [class][item] deferrable part of backward_s, NaN: unknown; NULL: not wanted */
    double *split_overhead; /* [class] hapt_profile_cluster.split_overhead; set with weight_share */
    double *copied_share;   /* [class] hapt_profile_cluster.deferrable; NULL: no state is on the host */
    bool *needed, *fits;    /* [item] in my class: candidates; those that fit without recomputing, which run */
    double *layer_s;        /* [mesh][L] seconds of a single layer, in my class */
    struct bench_engines bench_engines;
    unsigned char *role;               /* [item] select_role in my class */
    bool *timed;                       /* [item] */
    int *order, count;                 /* items to time in this pass, dearest first */
    int rounds;                        /* in this pass */
    double noise[2];                   /* relative standard error of a median: forward, backward */
    struct steadiness steadiness;      /* of the least steady pass */
    double *sample;                    /* [item][MEASURE_MOST_ROUNDS][2] */
    struct hapt_profile_effort effort; /* of this rank */
    struct sums_table sums;
    const struct hapt_efficiency *efficiency; /* calibrated here; NULL: not needed */
    struct measure_stages stages;
};

static inline struct hapt_item_memory *measure_memory(const struct measure *measure, int class, int item)
{
    return &measure->memory[(size_t) class * (size_t)measure->candidates->item_count + (size_t)item];
}

static inline struct hapt_item_time *measure_time(const struct measure *measure, int class, int item)
{
    return &measure->time[(size_t) class * (size_t)measure->candidates->item_count + (size_t)item];
}

static inline struct hapt_item_again *measure_again(const struct measure *measure, int class, int item)
{
    return &measure->again[((size_t) class * (size_t)measure->candidates->item_count + (size_t)item) *
                           (size_t)measure->candidates->keep_stride];
}

/* Sums over ranks; each element comes from one rank, all others give 0. Collective over env->world. */
enum hapt_status measure_sum_over_ranks(const struct measure *measure, double *data, size_t count);
/* Byte limit for all of my benchmark engines. */
double measure_room(const struct measure *measure, const struct hapt_engine_options *options);
/* Call after choosing the benchmark engines: refuses to measure if it takes too long or too much memory (afford.h).
 * Collective over env->world. */
enum hapt_status measure_check_cost(const struct measure *measure);
/* Sets up tables, this rank's device and the memory of all items. */
enum hapt_status measure_set_up(struct measure *measure, struct hapt_engine_options *options);
/* Remaining part of --profile-seconds, the same on all ranks. Collective over env->world. */
enum hapt_status measure_budget_left(const struct measure *measure, double *budget_s);

/* Times every single layer that is needed: sets layer_s and the items' times. Collective over env->world, with the
 * ranks of a class over class_comm. */
enum hapt_status measure_time_layers(struct measure *measure, MPI_Comm class_comm);
/* Seconds per trained element at the end of a step, with all measuring ranks of the class at once: [0] the update,
 * which a slowed device stretches, [1] the norm and clearing. Collective over env->world and class_comm. */
enum hapt_status measure_time_updates(struct measure *measure, MPI_Comm class_comm, int item, double s_per_element[2]);
/* Times all items and gives the times to all ranks. Collective over env->world and class_comm. */
enum hapt_status measure_run_class(struct measure *measure, MPI_Comm class_comm);

/* Times the deferrable parts of backward passes: sets weight_share. Call while the benchmark engines are open, after
 * measure_run_class; it closes them. Collective over env->world. */
enum hapt_status measure_weights(struct measure *measure, const struct hapt_engine_options *options);

/* True if layers [first, last] are a candidate on a submesh with some share of their units recomputed. */
bool measure_wants_again(const struct measure *measure, int subcluster, struct hapt_submesh submesh, int first,
                         int last);
/* The figures of all shares on a subcluster's devices: again[item][keep_stride], in measure->scratch. time[item]:
 * the final times of its items. */
enum hapt_status measure_time_again(const struct measure *measure, int subcluster, const struct hapt_item_time *time,
                                    struct hapt_item_again **again);

/* Measured seconds to sum gradients of `bytes` per device over a submesh; 0 if a team's times include the sum.
 * `measure`: a struct measure. */
hapt_candidates_all_reduce measure_sum_s;
/* True if some device is slowed down. */
bool measure_any_slowed(const struct hapt_cluster *cluster);
/* Runs stages of slowed devices as in training, for about `budget_s`, and corrects the items' times. Collective
 * over env->world. */
enum hapt_status measure_run_submeshes(struct measure *measure, const struct hapt_engine_options *options,
                                       double budget_s);

/* Lists the submeshes whose stages teams run: tensor-parallel and synthesised ones, and data-parallel ones with sharded
 * optimizer state. Call when the memory of all items is known. Rank-local; the same on all ranks. */
enum hapt_status measure_list_stages(struct measure *measure);
/* Runs a few ranges of each as in training, for about `budget_s`, and composes the others. Collective over env->world;
 * agrees on failures. */
enum hapt_status measure_run_stages(struct measure *measure, const struct hapt_engine_options *options,
                                    double budget_s);
/* Seconds of an item on a subcluster's devices: the teams' times, where teams ran it, in place of `alone`. */
struct hapt_item_time measure_stage_time(const struct measure *measure, int subcluster, int item,
                                         struct hapt_item_time alone);

/* Finds the mixed groups: rows from measured speeds, programs from calibrated operators and measured collectives.
 * Collective over env->world. */
enum hapt_status measure_mix(struct measure *like, const struct hapt_layers *layers, struct hapt_candidates *candidates,
                             struct hapt_arena *arena);

#endif
