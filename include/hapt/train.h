/*
 * Training: a plan is placed on ranks; each rank runs its stage's instruction list, step after step.
 *
 * Training runs the same instruction list that was simulated (schedule.h). The communication thread (link.h) transfers
 * tensors between stages; a deterministic collective sums the gradients of a submesh. A plan fixes the order of all
 * sums. So a run is repeatable bit by bit, in one piece or continued from a checkpoint.
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
 * The rows of every step, readable by every rank: a stream of tokens or images sampled by seed and step, or exact
 * batches. The content of a row is independent of plan and ranks. The file is mapped if its elements stand there as
 * they are needed, and must then stay as it is; else there is one copy per node, in shared memory.
 */
struct hapt_data;

/* Which rows a run reads. */
struct hapt_data_order {
    int rows;      /* per step */
    int64_t steps; /* in the run: exact batches need as many */
    uint64_t seed; /* --data-seed */
    bool epochs; /* each row of a stream once per epoch, in an order of its own; else rows are drawn with replacement */
};

/* Opens `path` (a data file, or a model file that contains data). Token models: /batches [step][row][T + 1], or
 * [step][row][T] with /targets of the same shape (-100: excluded from the loss), or /tokens [n], alone or with /targets
 * [n]. Image models: /images [step][row][C][H][W] and /labels [step][row], or a stream /images [n][C][H][W] and /labels
 * [n]; bytes or floats. Models with fields: /batches/NAME [step][row]... or [n]... of each. With /mean [C] and /std [C]
 * a pixel is (stored - mean) / std; without them a byte is divided by 255. HAPT_ERR_INPUT: wrong number or size of
 * rows, too few steps, tokens outside the vocabulary, labels outside the classes, epochs of exact batches. `order`
 * NULL: all rows of the file, in any number per batch. Collective over env->world; ends in agreement. */
enum hapt_status hapt_data_open(const struct hapt_env *env, const char *path, const struct hapt_model *model,
                                const struct hapt_data_order *order, struct hapt_data **data);
/* Checks form, rows, steps and the range of tokens and labels as hapt_data_open does; `order` NULL: as
 * hapt_data_open_held_out. Call early: a wrong file then fails before long work. Collective over env->world; ends in
 * agreement. */
enum hapt_status hapt_data_check(const struct hapt_env *env, const char *path, const struct hapt_model *model,
                                 const struct hapt_data_order *order);
/* The number of different rows: those of an epoch. Checks the form alone. Collective as above. */
enum hapt_status hapt_data_rows(const struct hapt_env *env, const char *path, const struct hapt_model *model,
                                const struct hapt_data_order *order, int64_t *rows);
/* Opens held-out data for validation. Its rows come in order, each of them once, `rows` per step: windows of T tokens
 * that follow each other, the images of a stream, or the rows of exact batches of any size. `most` > 0: at most so
 * many, evenly spaced. Behind the last one, rows have no targets. Collective over env->world; ends in agreement. */
enum hapt_status hapt_data_open_held_out(const struct hapt_env *env, const char *path, const struct hapt_model *model,
                                         int rows, int64_t most, struct hapt_data **data);
/* Number of rows of held-out data. */
int64_t hapt_data_held_out_rows(const struct hapt_data *data);
void hapt_data_close(struct hapt_data *data);
/* Reads rows [first, first + count) of a step, from the input with that role: tokens and targets [count][T] int32,
 * images [count][C][H][W] fp32, labels [count] int32, row keys [count][2] int32 (of held-out rows: 0), the field of
 * this number (hapt_model_field; else -1) [count][...] int32 or fp32. */
void hapt_data_read(const struct hapt_data *data, enum hapt_tensor_role role, int field, int64_t step, int first,
                    int count, void *values);
/* Number of targets in a step that count for the loss: the divisor of the loss sum. 1 if a step of a stream has none:
 * its loss is then 0. */
int64_t hapt_data_targets(const struct hapt_data *data, int64_t step);

/* Identity of the data, independent of the file name: equal identities mean the same rows at the same steps. */
struct hapt_data_identity {
    char kind[16]; /* "tokens", "images", "rows": streams sampled by seed; "batches", "image batches", "row batches" */
    int64_t count; /* tokens, images or rows of a stream; exact batches: those of the steps done */
    int64_t checksum; /* of inputs and targets; of a stream above 64 MiB: of 64 KiB at regular intervals */
    int64_t seed;     /* --data-seed; 0 if it has no effect */
    bool epochs;      /* each row once per epoch */
};
/* The identity after `steps` steps; of held-out data that of all rows that are read. Rank-local. */
void hapt_data_identify(struct hapt_data *data, int64_t steps, struct hapt_data_identity *identity);

/* ---- Edges: tensors from one chunk to another ---- */

struct hapt_edge {
    int from, to;  /* chunks */
    bool backward; /* gradients; else activations */
    bool relayed;  /* activations that `from` received as well, and passes on from the transfer slots */
    int count;
    int *tensor; /* numbering of the receiver's expanded graph, ascending */
    int *source; /* numbering of the sender: possibly another version of the same model tensor */
};

struct hapt_edges {
    int count;
    struct hapt_edge *edge; /* by (backward, from, to, relayed) */
};

/* Direct edges of a chain of programs, chunk k = program[k]. An activation goes from its producer to each chunk that
 * reads it; in another subcluster it goes from reader to reader (hapt_plan_source). A gradient goes from each chunk
 * that writes it to the next chunks that read it. The last of these is the next chunk that adds to it. `plan` NULL: no
 * relays. Rank-local, deterministic. */
enum hapt_status hapt_edges_build(struct hapt_program *const *program, int chunks, const struct hapt_plan *plan,
                                  struct hapt_arena *arena, struct hapt_edges **edges);

/* A trainable parameter that several chunks hold: copies that share one gradient. */
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

enum hapt_rate_schedule {
    HAPT_RATE_CONSTANT,
    HAPT_RATE_COSINE,
    HAPT_RATE_LINEAR,
    HAPT_RATE_WSD,         /* warm-up, stable, decay (Hu et al. 2024): the last decay_steps fall linearly */
    HAPT_RATE_INVERSE_SQRT /* sqrt(warm-up steps / step) (Vaswani et al. 2017) */
};

struct hapt_optimizer_options {
    enum hapt_optimizer optimizer;
    enum hapt_rate_schedule schedule;
    double learning_rate, min_ratio, beta1, beta2, epsilon, momentum, weight_decay, clip_norm, statistic_rate;
    int64_t warmup_steps, decay_steps, steps;
    int state_count; /* fp32 tensors of state per parameter */
};
/* Notes in the model's graph what is trained for: parameters without weight decay (--no-decay), the smoothing of
 * labels. HAPT_ERR_USAGE: a pattern that matches no parameter, a
 * --batch-norm-momentum without effect. */
enum hapt_status hapt_optimizer_prepare(const struct hapt_config *config, const struct hapt_model *model);
void hapt_optimizer_options(const struct hapt_config *config, struct hapt_optimizer_options *options);
/* Learning rate of a step (from 0). All schedules except the constant one begin with a linear warm-up. They never fall
 * below min_ratio of the peak afterwards. */
double hapt_optimizer_rate(const struct hapt_optimizer_options *options, int64_t step);
/* Fills the engine's settings for one update; `norm`: the global gradient norm. `microbatches`: of a step. */
void hapt_optimizer_update(const struct hapt_optimizer_options *options, int64_t step, double norm, int microbatches,
                           struct hapt_update *update);

/* ---- History and result ---- */

/* The loss on held-out data. */
struct hapt_evaluation {
    double loss; /* per target, nat */
    double top1; /* share of targets that are the largest logit; NAN: not counted, or not known */
    int64_t rows, targets;
};
/* The same after so many steps. */
struct hapt_validation {
    int64_t step;
    double loss, top1;
};
/* One entry per step, from step 0; and one per validation. */
struct hapt_history {
    int64_t count, capacity;
    double *loss, *gradient_norm, *learning_rate, *time_s;
    const char *loss_units; /* hapt_model_loss_units; NULL: "nat" */
    int64_t validation_count, validation_capacity;
    struct hapt_validation *validation; /* by step */
};

/* Writes FOLDER/validation_step, validation_loss and validation_top1; without validation nothing. */
enum hapt_status hapt_validation_write(struct hapt_h5 *file, const char *folder, const struct hapt_history *history);
/* Reads them, if they are there, after at most `last` steps. HAPT_ERR_INPUT: damaged. */
enum hapt_status hapt_validation_read(struct hapt_h5 *file, const char *folder, int64_t last, struct hapt_arena *arena,
                                      struct hapt_history *history);

/* Timeline events (--trace): an instruction of the schedule, a message between stages that was sent or arrived, or a
 * copy or update of offloaded data. */
enum hapt_event_kind {
    HAPT_EVENT_ACTIVATIONS_SENT = HAPT_INSTRUCTION_UPDATE + 1, /* below: enum hapt_instruction_kind */
    HAPT_EVENT_ACTIVATIONS_ARRIVED,
    HAPT_EVENT_GRADIENTS_SENT,
    HAPT_EVENT_GRADIENTS_ARRIVED,
    HAPT_EVENT_COPY_TO_DEVICE, /* of offloaded data */
    HAPT_EVENT_COPY_TO_HOST,
    HAPT_EVENT_HOST_UPDATE,
    HAPT_EVENT_COUNT
};
struct hapt_train_event {
    int rank, stage, peer_stage; /* peer_stage -1: none */
    int kind, microbatch, step;
    double begin_s, end_s; /* after the first event; equal for a message */
};

/* A rank or link slower than planned, or steps much longer or shorter than predicted. */
struct hapt_train_warning {
    int64_t step;
    int rank, stage;                     /* a link: its sending end; -1: concerns the whole step */
    int peer_stage;                      /* a link: its receiving end; -1: concerns a rank or the whole step */
    double measured_s, planned_s, ratio; /* a step's microbatches; a link: one microbatch; or the whole step */
    char text[512];
};

struct hapt_train_result {
    int64_t first_step; /* of this run; earlier steps come from the checkpoint */
    struct hapt_history history;
    int64_t end_step; /* the run ends after so many steps, unless it is stopped */
    const char *item; /* name of the items: hapt_model_item */
    int64_t items_per_step;
    double flops_per_item; /* of the model, forward and backward, without recomputation */
    double peak_flops;     /* FLOP/s: hapt_plan.peak_flops, of all devices, so that both have one MFU; 0: unknown */
    double steady_step_s;  /* median step time without the first few; 0: no steps */
    double items_per_s;    /* at that time */
    int stage_count;
    /* [history.count - first_step][stage], seconds from update to update, mean over the stage's ranks (comm_s:
     * largest); valid on rank 0. Modelled devices: modelled times. */
    double *busy_s;       /* forward, backward, update; includes the slowdown */
    double *reduce_s;     /* sum of gradients across the submesh and of tied parameters */
    double *idle_s;       /* the rest */
    double *microbatch_s; /* forward and backward of one microbatch, including their collectives; 0: modelled */
    double *comm_s;       /* time in which the boundary behind the stage carried activations (hidden or not) */
    double time_scale;    /* modelled devices: times are modelled, losses NaN; 0: devices computed */
    double late_s;        /* largest delay of the end of a modelled computation */
    double *planned_bytes, *measured_bytes; /* [stage] maximum device memory of its ranks; valid on rank 0 */
    double *host_bytes;                     /* [stage] the same of optimizer state on the host; 0: none */
    int64_t event_count;
    const struct hapt_train_event *event; /* by rank and step; valid on rank 0 */
    int64_t rank_count;
    struct hapt_environment *environment; /* [rank_count]; valid on rank 0 */
    int warning_count;
    struct hapt_train_warning *warning; /* valid on rank 0 */
    const char *checkpoint;             /* the newest one */
    int64_t checkpoints;                /* written by this run */
    double checkpoint_s;                /* time that training stopped for them, outside of step times */
    double validation_s;                /* the same for validation */
    const char *stopped_by; /* a signal or a time limit: the process exits with HAPT_STOPPED; NULL: all steps done */
};

/* Model FLOPs utilisation of a step that took `time_s`: FLOPs of the model over those that the devices could do. NAN:
 * unknown. */
double hapt_train_mfu(const struct hapt_train_result *result, double time_s);
/* The largest device memory of a rank, bytes, as far as it was measured; valid on rank 0. */
double hapt_train_memory(const struct hapt_train_result *result);
/* Sets steady_step_s and items_per_s. */
void hapt_train_summarise(struct hapt_train_result *result);
/* Median of the steps [from, to) of `time_s`, without the first `skip` if enough remain. */
double hapt_train_median(const double *time_s, int64_t from, int64_t to, int64_t skip);
/* Writes /trace of a run file: one column per field, `kind` as text; nothing without --trace. Rank 0. */
enum hapt_status hapt_train_write_trace(struct hapt_h5 *file, const struct hapt_train_result *result);
/* Writes /train/... of a run file, and /train/warnings if there are any: step, rank, stage, peer_stage, ratio, text.
 * Rank 0. */
enum hapt_status hapt_train_write(struct hapt_h5 *file, const struct hapt_train_result *result);

/* ---- Checkpoints ---- */

/* The newest version of manifests. 2: parameters have states of their own number (/parameter_states). Manifests without
 * frozen parameters are still written as version 1. */
#define HAPT_CHECKPOINT_VERSION 2

/*
 * A folder checkpoints/step-N. shard-K.h5, one per stage, holds full tensors under their published names (/parameters,
 * /state0, /state1, fp32; for modelled devices a sample of them). manifest.h5 holds step, plan, options, history, the
 * identities of the data and of the held-out data, size and checksum of each shard. The folder is written under a
 * temporary name and renamed when complete; older checkpoints are removed only then.
 *
 * Frozen weights, which have no state, are in shards of their own, after the others. Checkpoints of a run share their
 * files by hard links. The manifest then has version 2 and /parameter_states: the states of each parameter.
 */
struct hapt_checkpoint {
    const char *path;
    int64_t step; /* steps done */
    struct hapt_plan *plan;
    struct hapt_history history;
    struct hapt_data_identity data, held_out; /* kind "": not recorded */
    int state_count;
    bool sampled; /* written by --device emulated */
    int shard_count;
    int64_t *size, *checksum; /* [shard_count] */
    int64_t parameter_count;
    const char **parameter; /* published names */
    int32_t *parameter_shard;
    int32_t *parameter_states; /* optimizer states of each parameter */
    int64_t option_count;
    const char **option, **value;
    int skipped_count; /* newer ones, which are damaged */
    const char **skipped;
};

/* The checkpoint at `path`: a checkpoint itself, or the newest good one in a folder of checkpoints or of a run. Damaged
 * ones (wrong checksum, broken structure) are skipped with a warning; HAPT_ERR_INPUT: none is left. A newer format
 * version ends the search with HAPT_ERR_INPUT. A read failure of the system (memory, disk, open files) ends it with
 * HAPT_ERR_MEMORY or HAPT_ERR_IO. In both cases no older one is used. Every file is read and its checksum compared; the
 * ranks share the work. Collective over env->world; ends in agreement. */
enum hapt_status hapt_checkpoint_find(const struct hapt_env *env, const char *path, struct hapt_arena *arena,
                                      struct hapt_checkpoint **checkpoint);
/* Verifies a complete checkpoint: manifest, checksums of the shards, their contents. Rank-local, one rank. */
struct hapt_checkpoint_content {
    int64_t version, step, shards, parameters, states, bytes; /* states: of parameters that have some */
};
enum hapt_status hapt_checkpoint_verify(const char *path, struct hapt_checkpoint_content *content);
/* HAPT_ERR_INPUT: the checkpoint's parameters differ from the model's in name or size. Rank-local. */
enum hapt_status hapt_checkpoint_fits(const struct hapt_checkpoint *checkpoint, const struct hapt_model *model);
/* Uses the options of the checkpoint's run as defaults. */
enum hapt_status hapt_checkpoint_defaults(const struct hapt_checkpoint *checkpoint, struct hapt_config *config);
/* The weight (state -1) or state of a parameter of `elements` elements: all, or some of its rows. A state that it does
 * not have, because the parameter was frozen, is 0. HAPT_ERR_INPUT: it has another number of elements or rows.
 * Rank-local. */
enum hapt_status hapt_checkpoint_read(const struct hapt_checkpoint *checkpoint, const char *parameter, int state,
                                      int64_t elements, float *value);
enum hapt_status hapt_checkpoint_read_rows(const struct hapt_checkpoint *checkpoint, const char *parameter, int state,
                                           int64_t elements, const struct hapt_rows *rows, float *value);
/* The shape of a parameter: at most HAPT_H5_MAX_DIMS dimensions, at least one. Rank-local. */
enum hapt_status hapt_checkpoint_shape(const struct hapt_checkpoint *checkpoint, const char *parameter, int *dims,
                                       int64_t *shape);
/* The files that came with an imported model (hapt/import.h); none: count 0. HAPT_ERR_INPUT: a checkpoint of emulated
 * devices, which has no weights. Rank-local. */
enum hapt_status hapt_checkpoint_files(const struct hapt_checkpoint *checkpoint, struct hapt_arena *arena,
                                       struct hapt_attachments *files);
/* Writes the checkpoint's parameters to a weights file as /parameters. One rank. */
enum hapt_status hapt_checkpoint_export(const struct hapt_checkpoint *checkpoint, const char *path);

/* A shard of frozen weights, which do not change during a run. It is written once if the file system has hard links. It
 * then gets a name of its own beside the checkpoints, and later checkpoints link to it. */
struct hapt_checkpoint_constant {
    bool links;             /* the file system has hard links */
    bool linked;            /* the file has that name: link it; else write it. The same on all ranks */
    int64_t size, checksum; /* of its file, on the rank that writes it */
};

/* The content of a checkpoint and its folder. */
struct hapt_checkpoint_writer {
    const char *folder;       /* checkpoints/ */
    int64_t keep, keep_every; /* keep the newest `keep`, the best, and the first in each `keep_every` steps (0: none) */
    int64_t resumed_step;     /* the checkpoint that the run resumed from, which may be rewritten; -1: none */
    double patience_s;        /* longest wait for the slowest writer */
    int shard_count;
    int shard;   /* this rank writes it with write_shard; -1: none */
    bool shared; /* several ranks assemble a shard: all of them call write_shard, with file NULL if they write none */
    int constant_shard; /* this rank writes it, also, with write_constant; -1: none */
    int64_t parameter_count;
    const char **parameter;
    const int32_t *parameter_shard;
    const int32_t *parameter_states; /* optimizer states of each parameter, 0 or state_count; NULL: state_count */
    int state_count;
    bool sampled; /* emulated: only the first elements of each tensor */
    const struct hapt_plan *plan;
    const struct hapt_config *config;
    const struct hapt_data_identity *data, *held_out; /* NULL or kind "": unknown */
    const struct hapt_attachments *files;             /* of the model; NULL: none */
    enum hapt_status (*write_shard)(void *context, struct hapt_h5 *file);
    enum hapt_status (*write_constant)(void *context, struct hapt_h5 *file); /* NULL: no parameter is constant */
    struct hapt_checkpoint_constant *constant;
    void *context;
};

/* ---- The run ---- */

/* Sees the results of a run while it trains, on the compute thread of the ranks that pass it. Absent functions are
 * NULL. The arrays of `result` only grow: entries of steps done never change, and earlier arrays stay valid until the
 * arena is released. A failure inside is the observer's own: it must not stay in the error record. */
struct hapt_train_observer {
    void *context;
    /* Before the first step: the history is that of the checkpoint. Files of an earlier run in the folder that
     * --overwrite replaces have other names by now. */
    void (*begin)(void *context, const struct hapt_train_result *result);
    /* After each step and each validation, before the checkpoint that may follow. */
    void (*step)(void *context, const struct hapt_train_result *result);
    /* After the last step and its checkpoint, if `begin` was called. It may take long: no rank waits with a deadline.
     * failed: hapt_train_run will fail. */
    void (*end)(void *context, const struct hapt_train_result *result, bool failed);
};

/* With --resume (auto: if there is one): the checkpoint to continue from; its options become defaults (give
 * --microbatches etc. again to change them). Else NULL. HAPT_ERR_INPUT: it belongs to another model. Call before
 * planning; keep checkpoint->plan unless --replan. Collective; ends in agreement. */
enum hapt_status hapt_train_resume(const struct hapt_env *env, struct hapt_config *config,
                                   const struct hapt_model *model, struct hapt_arena *arena,
                                   struct hapt_checkpoint **checkpoint);
/* Checks that there is data, with enough rows per step (--microbatches) and for --steps. Call before long work.
 * Collective; ends in agreement. */
enum hapt_status hapt_train_check_data(const struct hapt_env *env, const struct hapt_config *config,
                                       const struct hapt_model *model);
/* With --epochs: decides --steps, which are as many as the plan needs for so many epochs. HAPT_ERR_USAGE: --epochs
 * contradicts other options, or there are no data. Collective; ends in agreement. */
enum hapt_status hapt_train_settle_steps(const struct hapt_env *env, struct hapt_config *config,
                                         const struct hapt_model *model, const struct hapt_plan *plan);
/* HAPT_ERR_USAGE: options of validation that have no effect. Call before long work. Rank-local. */
enum hapt_status hapt_train_check_validation(const struct hapt_config *config);
/* HAPT_ERR_IO: a checkpoint is larger than the free space on the output folder's disk. Call before long work.
 * Collective; ends in agreement. */
enum hapt_status hapt_train_check_disk(const struct hapt_env *env, const struct hapt_config *config,
                                       const struct hapt_model *model);
/* Trains `plan` (stages with operator ranges) on a bound cluster until --steps, from `checkpoint` (may be NULL), and
 * ends with a checkpoint. HAPT_OK with result->stopped_by after a signal or a time limit. Collective over env->world;
 * ends in agreement. A rank that fails inside a step ends the job (hapt_die). `observer` may be NULL, and may differ
 * between ranks. */
enum hapt_status hapt_train_run(const struct hapt_env *env, const struct hapt_cluster *cluster,
                                const struct hapt_model *model, const struct hapt_plan *plan,
                                const struct hapt_checkpoint *checkpoint, const struct hapt_config *config,
                                const struct hapt_train_observer *observer, struct hapt_arena *arena,
                                struct hapt_train_result **result);

/* ---- Evaluation ---- */

/* The loss on the held-out rows of --data (--validate-rows), with the weights of `checkpoint`, or (NULL) the model's.
 * The plan is run as in training, forward passes only. Collective over env->world; ends in agreement. */
enum hapt_status hapt_train_evaluate(const struct hapt_env *env, const struct hapt_cluster *cluster,
                                     const struct hapt_model *model, const struct hapt_plan *plan,
                                     const struct hapt_checkpoint *checkpoint, const struct hapt_config *config,
                                     struct hapt_arena *arena, struct hapt_evaluation *result);

/* ---- Generation ---- */

struct hapt_prompt {
    int64_t given, count; /* tokens of the prompt; with those that follow */
    int32_t *token;       /* [given + most] */
    bool ended;           /* by the end token, which is the last one */
};
struct hapt_generation {
    int prompts; /* at most the rows of a step */
    struct hapt_prompt *prompt;
    int64_t most;       /* new tokens of each prompt */
    double temperature; /* 0: the most likely token */
    int64_t top_k;      /* choose among so many most likely tokens; 0: all */
    uint64_t seed;
    int64_t end; /* token that ends a text; -1: none */
};

/* HAPT_ERR_INPUT unless the model predicts tokens from those before alone. Rank-local. */
enum hapt_status hapt_train_may_generate(const struct hapt_model *model);
/* Continues the prompts with the weights of `checkpoint`, or (NULL) the model's: each token by a forward pass over the
 * last T ones. The choice depends on the seed, the prompt's number and the token's, not on the plan, except where
 * rounding decides. HAPT_ERR_INPUT: logits that are not finite. Collective over env->world; ends in agreement. */
enum hapt_status hapt_train_generate(const struct hapt_env *env, const struct hapt_cluster *cluster,
                                     const struct hapt_model *model, const struct hapt_plan *plan,
                                     const struct hapt_checkpoint *checkpoint, const struct hapt_config *config,
                                     struct hapt_arena *arena, struct hapt_generation *generation);

#endif
