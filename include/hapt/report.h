/*
 * What a run planned, predicted and did: gathered into one structure, saved as the run file, read back, printed.
 *
 * Run file (HDF5, format "hapt-run"): /topology, /layers, /profile, /plan as their rooms write them, /settings,
 * /environment, /train, /trace.
 */
#ifndef HAPT_REPORT_H
#define HAPT_REPORT_H

#include "hapt/cluster.h"
#include "hapt/config.h"
#include "hapt/layers.h"
#include "hapt/model.h"
#include "hapt/plan.h"
#include "hapt/profile.h"
#include "hapt/train.h"

struct hapt_run {
    const struct hapt_config *config;
    const struct hapt_cluster *cluster;
    const struct hapt_model *model;
    const struct hapt_layers *layers;   /* NULL when the plan was given */
    const struct hapt_profile *profile; /* NULL when the plan came from a file */
    const struct hapt_plan *plan;
    const struct hapt_train_result *result;
};

struct hapt_report_stage {
    double busy_s, idle_s, comm_s, reduce_s; /* medians over the steps of the run */
    double microbatch_s;                     /* likewise; 0: unknown */
    double planned_bytes, measured_bytes;    /* device memory of one rank */
};

struct hapt_report_warning {
    int64_t step;
    const char *text;
};

struct hapt_report {
    const struct hapt_plan *plan;
    int64_t steps, first_step;               /* done in all; the first of this run */
    double first_loss, last_loss, mean_loss; /* the mean is over the last loss_window steps */
    int loss_window;
    double step_s, predicted_step_s; /* median measured, simulated */
    const char *item;                /* "token" or "image" */
    double items_per_s, flops_per_item;
    struct hapt_report_stage *stage; /* [plan->stage_count] */
    const double *loss;              /* [steps]; NULL: modelled devices compute none */
    double time_scale;               /* seconds that a modelled second lasted; 0: devices computed */
    double late_s;                   /* modelled: by which a computation ended late at most */
    const char *checkpoint;          /* the newest */
    double checkpoint_s;             /* training stood still for checkpoints, in all */
    int64_t rank_count;
    struct hapt_environment *environment; /* [rank_count] */
    int warning_count;
    struct hapt_report_warning *warning; /* [warning_count] ranks and links that were slower than planned */
    bool stopped;                        /* before its last step, by a signal or for lack of time */
};

/* Writes the run file. Rank 0. */
enum hapt_status hapt_run_save(const struct hapt_run *run, const char *path);
enum hapt_status hapt_report_build(const struct hapt_run *run, struct hapt_arena *arena, struct hapt_report **report);
/* From a run file. Rank-local. */
enum hapt_status hapt_report_load(const char *path, struct hapt_arena *arena, struct hapt_report **report);
/* Hosts with their ranks, versions. Rank 0 prints. */
void hapt_report_print_environment(const struct hapt_env *env, const struct hapt_report *report);
/* /trace of a run file as Chrome trace events, which Perfetto shows: a process a stage, a thread a rank. One rank. */
enum hapt_status hapt_report_trace(const char *run_path, const char *path);
/* Scales the times of a profile's candidates by what the run measured: so that the stages it ran have its times, and
 * others of their subclusters change in proportion, mixed ones by the mean of theirs. A subcluster that ran no stage of
 * its own keeps its times. Fails with HAPT_ERR_INPUT where the run's stages are no candidates of the profile, or tell
 * no times. ratio [profile->cluster_count]: applied. */
enum hapt_status hapt_report_correct(const struct hapt_report *report, struct hapt_profile *profile, double *ratio);
void hapt_report_print(const struct hapt_env *env, const struct hapt_report *report);
enum hapt_status hapt_report_print_json(const struct hapt_report *report);

#endif
