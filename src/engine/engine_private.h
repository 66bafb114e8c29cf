/* The engine's own structure, shared by its files. */
#ifndef HAPT_ENGINE_PRIVATE_H
#define HAPT_ENGINE_PRIVATE_H

#include "hapt/engine.h"

/* A kernel call, or (no kernel) a collective on the first input and output of the call. */
struct bound_step {
    const struct hapt_kernel *kernel;
    struct hapt_call call;
    int op, forward_op;
    int group; /* REDUCE: group whose one call serves this sum; -1: none */
};

/* Kernel steps that follow each other without the host (engine_replay.c). */
struct chain {
    int first, end; /* steps of its section */
    enum chain_choice { CHAIN_TRIES_STEPS, CHAIN_TRIES_REPLAYS, CHAIN_STEPS, CHAIN_REPLAYS } choice;
    int trials;               /* of what is being tried */
    double steps_s, replay_s; /* the shortest of its trials; 0: none */
    struct chain_slot {
        int runs, replays; /* so far */
        struct hapt_replay *replay;
    } * slot; /* [slots] */
};

struct section_binding {
    int step_count;
    struct bound_step *step; /* [slots][step_count] */
    int chain_count;
    struct chain *chain; /* in order; none where nothing can be replayed */
};

struct hapt_engine {
    struct hapt_arena arena;
    const struct hapt_program *program;
    struct hapt_engine_options options;
    struct hapt_memory_plan *plan;
    struct hapt_queue *queue;
    char *memory; /* device memory, plan->total_bytes */
    char *bounce; /* host memory where the host cannot read the device's (engine_host.c); else NULL */
    struct section_binding section[HAPT_SECTION_COUNT];
    int parameter_count;                  /* trained ones; square sums in their order */
    int *parameter;                       /* [parameter_count] program tensors */
    struct bound_step *square_sum;        /* [parameter_count] */
    double *square;                       /* [parameter_count] host copy of the sums */
    size_t *bound;                        /* [ranks of the mesh + 1] */
    int group_before[HAPT_MEMORY_GROUPS]; /* REDUCE: the step before which the group's call comes; -1: there is none */
    struct bound_step zero;               /* of the gradient block */
    struct chain norm;                    /* the square sums; end 0: they are not replayed */
    struct {
        struct chain *chain; /* NULL: none is under way */
        struct hapt_event *from, *to;
        bool replayed;
    } trial;
    const struct hapt_kernel *convert, *update;
    enum hapt_dtype copy_dtype; /* of the weights' compute copy, where there is one */
};

/* Engine of a plan to be: everything that is known before memory is. */
enum hapt_status hapt_engine_check_kernels(const struct hapt_program *program,
                                           const struct hapt_engine_options *options);
const struct hapt_kernel *hapt_engine_find_kernel(const struct hapt_program *program,
                                                  const struct hapt_engine_options *options, int op);
/* The call of an operator without addresses: shapes, types, attributes. */
void hapt_engine_describe_call(const struct hapt_program *program, const struct hapt_engine_options *options, int op,
                               struct hapt_call *call);
/* A flat array of `elements`. */
struct hapt_view hapt_engine_flat_view(void *data, enum hapt_dtype dtype, size_t elements);
/* Where the compute type of a parameter stands: its copy, or the master weight itself. */
void *hapt_engine_operand(struct hapt_engine *engine, int tensor, int slot);
enum hapt_status hapt_engine_bind(struct hapt_engine *engine);
/* One step: starts its kernel, or moves what it moves. */
enum hapt_status hapt_engine_run(struct hapt_engine *engine, const struct bound_step *bound);
/* hapt_engine_run_part without its end. */
enum hapt_status hapt_engine_start_part(struct hapt_engine *engine, enum hapt_section section, int slot, int first_op,
                                        int end_op);
/* Waits for what is queued. */
enum hapt_status hapt_engine_finish(struct hapt_engine *engine);

/* engine_replay.c. Behind hapt_engine_bind: what can be replayed. */
enum hapt_status hapt_engine_find_chains(struct hapt_engine *engine);
void hapt_engine_forget_chains(struct hapt_engine *engine);
/* Queues a chain of the steps of a slot, in the way that is the faster or has to be tried; the trial under way is
 * judged when it has ended. */
enum hapt_status hapt_engine_run_chain(struct hapt_engine *engine, struct chain *chain, const struct bound_step *step,
                                       int slot);
void hapt_engine_judge_trial(struct hapt_engine *engine);
/* Of a part that has taken *time_s, `queued_s` of it until all was queued: what a replay takes, where that is less. */
void hapt_engine_time_replay(struct hapt_engine *engine, enum hapt_section section, int slot, int first_op, int end_op,
                             double queued_s, double *time_s);

/* engine_host.c */
void hapt_engine_release_host(struct hapt_engine *engine);
/* A collective step, by the owner's link; nothing is queued before. */
enum hapt_status hapt_engine_move(struct hapt_engine *engine, const struct bound_step *step);
/* *block becomes its copy on the host where the host cannot read it; and back. */
enum hapt_status hapt_engine_to_host(struct hapt_engine *engine, float **block, size_t elements);
enum hapt_status hapt_engine_from_host(struct hapt_engine *engine, float *block, const float *host, size_t elements);

#endif
