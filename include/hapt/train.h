/*
 * Training: a plan is placed on ranks, each rank runs its stage's instruction list, step after step.
 *
 * The list that is run is the one that was simulated (schedule.h). Stage boundaries move by the courier (link.h); the
 * gradients of a submesh are summed by a deterministic collective. The sums of a plan come in one order, so a run can
 * be repeated bit by bit, be it in one piece or continued from a checkpoint.
 */
#ifndef HAPT_TRAIN_H
#define HAPT_TRAIN_H

#include "hapt/cluster.h"
#include "hapt/config.h"
#include "hapt/engine.h"
#include "hapt/environment.h"
#include "hapt/model.h"
#include "hapt/plan.h"

/* ---- Data ---- */

/*
 * The rows of every step, known to every rank: a stream of tokens or images sampled by seed and step, or exact batches.
 * What a row holds depends on neither plan nor ranks. One copy a node, in shared memory.
 */
struct hapt_data;

/* Opens `path` (a data file, or a model file with data in it). Models of tokens: /batches [step][row][T + 1], or
 * [step][row][T] beside /targets of the same shape (-100: no loss taken), else /tokens [n]. Models of images: /images
 * [step][row][C][H][W] and /labels [step][row], or a stream /images [n][C][H][W] and /labels [n]; bytes or floats, with
 * /mean [C] and /std [C] a pixel is (stored - mean) / std, without them a byte is divided by 255. `rows` of one step;
 * `steps` the run will take. HAPT_ERR_INPUT for another number of rows or size of a row, too few steps, tokens outside
 * the vocabulary, labels outside the classes. Collective over env->world; ends in agreement. */
enum hapt_status hapt_data_open(const struct hapt_env *env, const char *path, const struct hapt_model *model, int rows,
                                int64_t steps, uint64_t seed, struct hapt_data **data);
/* The same checks, of form, rows, steps and the range of tokens and labels. Early, so that a wrong file fails before
 * long work. Collective over env->world; ends in agreement. */
enum hapt_status hapt_data_check(const struct hapt_env *env, const char *path, const struct hapt_model *model, int rows,
                                 int64_t steps);
void hapt_data_close(struct hapt_data *data);
/* Rows [first, first + count) of a step of the input of that role: tokens and targets [count][T] int32, images
 * [count][C][H][W] fp32, labels [count] int32. */
void hapt_data_read(const struct hapt_data *data, enum hapt_tensor_role role, int64_t step, int first, int count,
                    void *values);
/* Targets in a step that a loss is taken of: what the sum of the loss is divided by. */
int64_t hapt_data_targets(const struct hapt_data *data, int64_t step);

/* What data are, beyond the name of their file: two runs with equal identities saw the same rows at the same steps. */
struct hapt_data_identity {
    char kind[16];    /* "tokens", "images": streams sampled by seed; "batches", "image batches": exact ones */
    int64_t count;    /* tokens or images of a stream, targets included in the checksum; of exact batches: those of the
                         steps done */
    int64_t checksum; /* of all of them; of a stream beyond 64 MiB: of 64 KiB in every so many */
    int64_t seed;     /* --data-seed; 0 where it does nothing */
};
/* After `steps` steps. Rank-local. */
void hapt_data_identify(struct hapt_data *data, int64_t steps, struct hapt_data_identity *identity);

/* ---- Routes: which tensor goes from which chunk to which ---- */

struct hapt_route {
    int from, to;  /* chunks */
    bool backward; /* gradients; else activations */
    int count;
    int *tensor; /* as the receiver has it: in its expanded graph, ascending */
    int *source; /* as the sender has it: another version of the same tensor of the model, perhaps */
};

struct hapt_routes {
    int count;
    struct hapt_route *route; /* by (backward, from, to) */
};

/* Direct routes of a chain of programs, chunk k = program[k]: an activation from its producer to each chunk that reads
 * it; a gradient from each chunk that writes it to the chunks that read it next, up to and with the next that adds to
 * it. Rank-local, deterministic. */
enum hapt_status hapt_routes_build(struct hapt_program *const *program, int chunks, struct hapt_arena *arena,
                                   struct hapt_routes **routes);

/* A trainable parameter that several chunks hold: copies with one gradient. */
struct hapt_tie {
    int tensor;
    int chunk_count;
    int *chunk; /* ascending */
};
struct hapt_ties {
    int count;
    struct hapt_tie *tie;
};
enum hapt_status hapt_ties_find(struct hapt_program *const *program, int chunks, struct hapt_arena *arena,
                                struct hapt_ties **ties);

/* ---- Optimizer settings ---- */

struct hapt_optimizer_options {
    enum hapt_optimizer optimizer;
    bool cosine;
    double learning_rate, min_ratio, beta1, beta2, epsilon, momentum, weight_decay, clip_norm;
    int64_t warmup_steps, steps;
    int state_count; /* fp32 tensors of state per parameter */
};
void hapt_optimizer_options(const struct hapt_config *config, struct hapt_optimizer_options *options);
/* Learning rate of a step (from 0): constant, or linear warm-up and a cosine down to min_ratio. */
double hapt_optimizer_rate(const struct hapt_optimizer_options *options, int64_t step);
/* What the engine needs for one update; `norm` is the global gradient norm. */
void hapt_optimizer_update(const struct hapt_optimizer_options *options, int64_t step, double norm,
                           struct hapt_update *update);

/* ---- History and result ---- */

/* One entry a step, from step 0. */
struct hapt_history {
    int64_t count, capacity;
    double *loss, *gradient_norm, *learning_rate, *time_s;
};

/* Of the timeline (--trace): an instruction of the schedule, or a message between stages when it left or was there. */
enum hapt_event_kind {
    HAPT_EVENT_ACTIVATIONS_LEFT = HAPT_INSTRUCTION_UPDATE + 1, /* below: enum hapt_instruction_kind */
    HAPT_EVENT_ACTIVATIONS_THERE,
    HAPT_EVENT_GRADIENTS_LEFT,
    HAPT_EVENT_GRADIENTS_THERE,
    HAPT_EVENT_COUNT
};
struct hapt_train_event {
    int rank, stage, peer_stage; /* peer_stage -1: none */
    int kind, microbatch, step;
    double begin_s, end_s; /* after the first event; a message: equal */
};

/* A rank or a link that was slower than planned, or steps that last much longer or shorter than predicted. */
struct hapt_train_warning {
    int64_t step;
    int rank, stage;                     /* a link: of its sending end; -1: it is about the whole step */
    int peer_stage;                      /* a link: the receiving end; -1: it is about a rank or the whole step */
    double measured_s, planned_s, ratio; /* a step's microbatches; a link: one microbatch; the whole step */
    char text[512];
};

struct hapt_train_result {
    int64_t first_step; /* of this run; steps before it come from the checkpoint */
    struct hapt_history history;
    const char *item; /* what items are: hapt_model_item */
    int64_t items_per_step;
    double steady_step_s; /* median time of a step, the first few left out; 0 when there were none */
    double items_per_s;   /* at that time */
    int stage_count;
    /* [history.count - first_step][stage], seconds from update to update, mean of the stage's ranks (comm_s: largest);
     * valid on rank 0; modelled ones of modelled devices */
    double *busy_s;       /* forward, backward, update; stretched by the slowdown */
    double *reduce_s;     /* gradients across the submesh and of tied parameters */
    double *idle_s;       /* the rest */
    double *microbatch_s; /* forward and backward of one, collectives inside included; 0: modelled */
    double *comm_s;       /* during which the boundary behind the stage carried activations (hidden or not) */
    double time_scale;    /* of modelled devices, whose times are modelled ones and losses NaN; 0: devices computed */
    double late_s;        /* by which a modelled computation ended late at most */
    double *planned_bytes, *measured_bytes; /* [stage] device memory of its ranks at most; valid on rank 0 */
    int64_t event_count;
    const struct hapt_train_event *event; /* by rank and step; on rank 0 */
    int64_t rank_count;
    struct hapt_environment *environment; /* [rank_count]; valid on rank 0 */
    int warning_count;
    struct hapt_train_warning *warning; /* valid on rank 0 */
    const char *checkpoint;             /* the newest one */
    int64_t checkpoints;                /* written by this run */
    double checkpoint_s;                /* during which the run stood still for them, outside any step's time */
    const char
        *stopped_by; /* a signal, a limit of time: the process leaves with HAPT_STOPPED; NULL: it went to its end */
};

/* Median of the steps [from, to) of `time_s`, the first `skip` left out where enough remain. */
double hapt_train_median(const double *time_s, int64_t from, int64_t to, int64_t skip);
/* Writes /trace of a run file: a column a field, `kind` as text; nothing where there was no --trace. Rank 0. */
enum hapt_status hapt_train_write_trace(struct hapt_h5 *file, const struct hapt_train_result *result);
/* Writes /train/... of a run file, with /train/warnings where there are any: step, rank, stage, peer_stage, ratio,
 * text. Rank 0. */
enum hapt_status hapt_train_write(struct hapt_h5 *file, const struct hapt_train_result *result);

/* ---- Checkpoints ---- */

/*
 * A folder checkpoints/step-N: shard-K.h5, one a stage, with whole tensors under their published names (/parameters,
 * /state0, /state1, fp32; of modelled devices a sample of them), and manifest.h5: step, plan, options, history, the
 * identity of the data, size and checksum of each shard. It is written aside and renamed when complete; older ones go
 * only afterwards.
 */
struct hapt_checkpoint {
    const char *path;
    int64_t step; /* steps done */
    struct hapt_plan *plan;
    struct hapt_history history;
    struct hapt_data_identity data; /* kind "": it does not say */
    int state_count;
    bool sampled; /* a rehearsal's (--device emulated) */
    int shard_count;
    int64_t *size, *checksum; /* [shard_count] */
    int64_t parameter_count;
    const char **parameter; /* published names */
    int32_t *parameter_shard;
    int64_t option_count;
    const char **option, **value;
    int passed_count; /* newer ones that are damaged */
    const char **passed;
};

/* The checkpoint at `path`: itself, or the newest good one of a folder of checkpoints or of a run. Damaged ones (a
 * wrong checksum, a broken structure) are named in a warning and passed over; HAPT_ERR_INPUT when none is left. A newer
 * format version ends the search with HAPT_ERR_INPUT, a system that cannot read (memory, disk, open files) with
 * HAPT_ERR_MEMORY or HAPT_ERR_IO: older ones are not taken then. Every file is read and its checksum compared, the work
 * shared by the ranks. Collective over env->world; ends in agreement. */
enum hapt_status hapt_checkpoint_find(const struct hapt_env *env, const char *path, struct hapt_arena *arena,
                                      struct hapt_checkpoint **checkpoint);
/* Verifies a checkpoint whole: manifest, shards against its checksums, what they hold. Rank-local, one rank. */
struct hapt_checkpoint_content {
    int64_t step, shards, parameters, states, bytes;
};
enum hapt_status hapt_checkpoint_verify(const char *path, struct hapt_checkpoint_content *content);
/* HAPT_ERR_INPUT unless the checkpoint's parameters are the model's, in name and size. Rank-local. */
enum hapt_status hapt_checkpoint_fits(const struct hapt_checkpoint *checkpoint, const struct hapt_model *model);
/* Takes the options of the checkpoint's run as defaults. */
enum hapt_status hapt_checkpoint_defaults(const struct hapt_checkpoint *checkpoint, struct hapt_config *config);
/* A parameter's weight (state -1) or state, whole, [elements]. Rank-local. */
enum hapt_status hapt_checkpoint_read(const struct hapt_checkpoint *checkpoint, const char *parameter, int state,
                                      int64_t elements, float *value);
/* Writes /parameters of a weights file from it. One rank. */
enum hapt_status hapt_checkpoint_export(const struct hapt_checkpoint *checkpoint, const char *path);

/* What hapt_checkpoint_save writes. */
struct hapt_checkpoint_writer {
    const char *folder;       /* checkpoints/ */
    int64_t keep, keep_every; /* the newest so many, the best, and the first in each so many steps (0: none) */
    int64_t resumed_step;     /* the checkpoint that the run began from, which may be written again; -1: none */
    double patience_s;        /* longest wait for the slowest writer */
    int shard_count;
    int shard;   /* this rank writes it by write_shard; -1: none */
    bool shared; /* several ranks put a shard together: write_shard is called on all of them, without a file where none
                    is written */
    int64_t parameter_count;
    const char **parameter;
    const int32_t *parameter_shard;
    int state_count;
    bool sampled; /* a rehearsal's: of each tensor there are its first elements */
    const struct hapt_plan *plan;
    const struct hapt_config *config;
    const struct hapt_data_identity *data; /* NULL: not told */
    enum hapt_status (*write_shard)(void *context, struct hapt_h5 *file);
    void *context;
};
/* Collective over env->world; ends in agreement. *path (in `arena`) is the folder written. HAPT_ERR_IO leaves older
 * ones as they are. */
enum hapt_status hapt_checkpoint_save(const struct hapt_env *env, const struct hapt_checkpoint_writer *writer,
                                      int64_t step, const struct hapt_history *history, struct hapt_arena *arena,
                                      const char **path);

/* ---- The run ---- */

/* With --resume (auto: where there is one): the checkpoint to go on from, its options taken as defaults (give
 * --microbatches and the like again to change them); else NULL. HAPT_ERR_INPUT where it is another model's. Call before
 * planning; keep checkpoint->plan unless
 * --replan. Collective; ends in agreement. */
enum hapt_status hapt_train_resume(const struct hapt_env *env, struct hapt_config *config,
                                   const struct hapt_model *model, struct hapt_arena *arena,
                                   struct hapt_checkpoint **checkpoint);
/* Is there data, of so many rows a step (--microbatches) and for --steps? Call before long work. Collective; ends in
 * agreement. */
enum hapt_status hapt_train_check_data(const struct hapt_env *env, const struct hapt_config *config,
                                       const struct hapt_model *model);
/* HAPT_ERR_IO where a checkpoint is larger than what the disk of the output folder has left. Call before long work.
 * Collective; ends in agreement. */
enum hapt_status hapt_train_check_disk(const struct hapt_env *env, const struct hapt_config *config,
                                       const struct hapt_model *model);
/* Trains `plan` (stages with operator ranges) on a bound cluster until --steps, from `checkpoint` (may be NULL); ends
 * with a checkpoint. HAPT_OK with result->stopped_by after a signal or when time is up. Collective over env->world;
 * ends in agreement; a rank that fails inside a step ends the job (hapt_die). */
enum hapt_status hapt_train_run(const struct hapt_env *env, const struct hapt_cluster *cluster,
                                const struct hapt_model *model, const struct hapt_plan *plan,
                                const struct hapt_checkpoint *checkpoint, const struct hapt_config *config,
                                struct hapt_arena *arena, struct hapt_train_result **result);

#endif
