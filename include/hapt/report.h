/*
 * A run's plan, predictions and measurements: gathered into one structure, saved as the run file, read back, printed.
 *
 * Run file (HDF5, format "hapt-run"): /topology, /layers, /profile, /plan as their rooms write them, /settings,
 * /environment, /train, /trace. Root attributes: `state` ("running", "finished", "stopped") and `written` (ISO 8601).
 * NeXus attributes make h5web and silx open on /train/curves, the loss by step.
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
    double microbatch_s;                     /* median over the steps; 0: unknown */
    double planned_bytes, measured_bytes;    /* device memory of one rank */
    double host_bytes;                       /* optimizer state of one rank on its host; 0: none */
};

struct hapt_report_warning {
    int64_t step;
    const char *text;
};

struct hapt_report {
    const struct hapt_plan *plan;
    const struct hapt_cluster *cluster;      /* unbound */
    const char *model;                       /* its file's name and its family; NULL: an older file without it */
    int64_t steps, first_step;               /* total done; first step of this run */
    double first_loss, last_loss, mean_loss; /* mean_loss is over the last loss_window steps */
    int loss_window;
    double step_s, predicted_step_s; /* measured median; simulated */
    const char *item;                /* "token" or "image" */
    int64_t items_per_step;
    double items_per_s, flops_per_item;
    double peak_flops;                    /* FLOP/s of the plan's devices; 0: unknown */
    struct hapt_report_stage *stage;      /* [plan->stage_count] */
    const double *loss, *gradient_norm;   /* [steps]; NULL: modelled devices compute none */
    const double *learning_rate, *time_s; /* [steps] */
    int64_t validation_count;
    const struct hapt_validation *validation; /* [validation_count] */
    double time_scale;                        /* real seconds per modelled second; 0: devices computed */
    double max_lateness_s;                    /* modelled: the most by which a computation ended late */
    const char *checkpoint;                   /* the newest one */
    double checkpoint_s;                      /* total time that training waited for checkpoints */
    int64_t rank_count;
    struct hapt_environment *environment; /* [rank_count] */
    int warning_count;
    struct hapt_report_warning *warning; /* [warning_count] ranks and links that were slower than planned */
    bool stopped;                        /* before its last step, by a signal, the time limit or a failure */
    const char *state, *written;         /* as in the run file; "": unknown */
};

#define HAPT_RUN_RUNNING "running"
#define HAPT_RUN_FINISHED "finished"
#define HAPT_RUN_STOPPED "stopped"
/* Writes the run file in one of these states. HAPT_ERR_IO: it cannot be written, or this job lost the lock of its
 * folder. Rank 0. */
enum hapt_status hapt_run_save(const struct hapt_run *run, const char *state, const char *path);
enum hapt_status hapt_report_build(const struct hapt_run *run, struct hapt_arena *arena, struct hapt_report **report);
/* Reads a run file. Rank-local. */
enum hapt_status hapt_report_load(const char *path, struct hapt_arena *arena, struct hapt_report **report);
/* Prints hosts with their ranks, and versions. Rank 0 prints. */
void hapt_report_print_environment(const struct hapt_env *env, const struct hapt_report *report);
/* The events that a run kept, in order of ranks. */
struct hapt_report_trace {
    int64_t count;
    int64_t *rank, *stage, *step, *microbatch; /* [count]; microbatch -1: none */
    double *begin_s, *end_s;                   /* [count] finite; from the first event */
    const char **kind;                         /* [count] "forward", "update", ...: printable ASCII */
    double exchange_bytes;                     /* of tied gradients, in each direction; 0: unknown or none */
};
/* Reads /trace of a run file; *trace NULL: it has none. Rank-local. */
enum hapt_status hapt_report_trace_load(const char *run_path, struct hapt_arena *arena,
                                        struct hapt_report_trace **trace);
/* Writes /trace of a run file as Chrome trace events, for Perfetto: one process per stage, one thread per rank,
 * and one for each kind of copies and updates of offloaded data. Call on one rank. */
enum hapt_status hapt_report_trace(const char *run_path, const char *path);
/* Scales a profile's candidate times by the run's measurements. The ratio of a subcluster is the measured time of its
 * stages in the run over their profiled time. All its candidates are scaled by it; mixed candidates by the mean ratio
 * of their subclusters. A subcluster without a stage of its own in the run keeps its times. HAPT_ERR_INPUT if the run's
 * stages are not candidates of the profile, or have no measured times. ratio [profile->cluster_count]: the applied
 * ratios. */
enum hapt_status hapt_report_correct(const struct hapt_report *report, struct hapt_profile *profile, double *ratio);
void hapt_report_print(const struct hapt_env *env, const struct hapt_report *report);
enum hapt_status hapt_report_print_json(const struct hapt_report *report);

#endif
