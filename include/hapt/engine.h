/*
 * The engine executes a program on one rank: every kernel bound once, per slot, to planned memory; nothing is allocated
 * after hapt_engine_create. The profiler and the trainer run stages through it alike. No MPI: what ranks exchange is
 * its owner's.
 */
#ifndef HAPT_ENGINE_H
#define HAPT_ENGINE_H

#include "hapt/memory.h"

struct hapt_engine;

/*
 * What moves between the ranks of a mesh while a program runs: the engine knows no ranks, its owner does. Called
 * between steps, with nothing queued on the device; addresses are the device's, or of a copy on the host where the host
 * cannot read the device's memory. Absent slots: collectives are skipped, so that computation alone is timed.
 */
struct hapt_engine_links {
    void *context;
    /* Collective operator `op` of the program's graph, from its input to its output (the same place for sums in place).
     */
    enum hapt_status (*collective)(void *context, int op, const void *from, void *to);
    /* data[i] = sum over the ranks of the mesh axes in `axes` (bit a: axis a): gradients that have one group
     * (hapt_memory_group). */
    enum hapt_status (*all_reduce)(void *context, unsigned axes, float *data, size_t elements);
    /* The same sums, but each rank gets those of elements [bound[r], bound[r + 1]) alone, r its place among the ranks
     * of the axes; and what each has of an array to all. Both in place. Needed for sharded state alone. */
    enum hapt_status (*reduce_scatter)(void *context, unsigned axes, float *data, const size_t *bound);
    enum hapt_status (*all_gather)(void *context, unsigned axes, float *data, const size_t *bound);
    /* For operators that exchange while they run, over mesh axis a: exchange(exchange_context[a], ...). */
    hapt_exchange *exchange;
    void *exchange_context[HAPT_MESH_AXES];
    /* The links but `exchange` take addresses of the device even where the host cannot read them. */
    bool on_device;
};

struct hapt_engine_options {
    const struct hapt_backend *backend;
    struct hapt_device *device;
    int threads;
    int state_count;
    int slots;
    bool sharded_state;   /* ZeRO-1: hapt_memory_options */
    bool whole_gradients; /* with it: gradients are summed whole all the same, for other stages that hold the
                             parameters, too */
    struct hapt_engine_links links;
};

/* Plans memory, reserves it on the device and binds. HAPT_ERR_MEMORY when the device's cap is exceeded (message names
 * both figures); HAPT_ERR_INPUT when the back end lacks an operator. */
enum hapt_status hapt_engine_create(const struct hapt_program *program, const struct hapt_engine_options *options,
                                    struct hapt_engine **engine);
void hapt_engine_destroy(struct hapt_engine *engine);
/* On devices of their own every kernel is run once, on zeros, and memory is cleared again: a device may have to come to
 * rest while a kernel or a plan of a library is brought to it, which must not happen while a group of devices waits in
 * it for another. Right after hapt_engine_create. */
enum hapt_status hapt_engine_warm_up(struct hapt_engine *engine);
/* Who has given links says, before the first of them is used, whether they are `on_device`: else devices whose memory
 * the host cannot read get host memory for what passes through it. */
enum hapt_status hapt_engine_connect(struct hapt_engine *engine, bool on_device);
const struct hapt_memory_plan *hapt_engine_memory(const struct hapt_engine *engine);
/* The memory plan such an engine would have, without a device allocation. */
enum hapt_status hapt_engine_plan_memory(const struct hapt_program *program, const struct hapt_engine_options *options,
                                         struct hapt_arena *arena, struct hapt_memory_plan **plan);

/* Kernel scratch as the engine asks its back end (hapt_kernel_scratch); context: struct hapt_engine_options. */
size_t hapt_engine_scratch(void *context, const struct hapt_program *program, int op);
/* The same for GPUs that are not here: their matrix products' (hapt_product_workspace). */
size_t hapt_engine_scratch_on_paper(void *context, const struct hapt_program *program, int op);

/* Device address of a graph tensor in a slot (slot ignored for resident and workspace tensors); NULL when it is not
 * here. Gradients of parameters give their fp32 gradient; parameters their fp32 master weight. */
void *hapt_engine_tensor(struct hapt_engine *engine, int tensor, int slot);
/* Local bytes of a graph tensor (the compute type for activations). */
size_t hapt_engine_tensor_bytes(const struct hapt_engine *engine, int tensor);
/* Transfer slot addresses, on the device, of boundary tensor `index` of program->forward_in, backward_in, backward_out.
 */
enum hapt_staging_kind { HAPT_STAGING_FORWARD_IN, HAPT_STAGING_BACKWARD_IN, HAPT_STAGING_BACKWARD_OUT };
void *hapt_engine_staging(struct hapt_engine *engine, enum hapt_staging_kind kind, int slot, int index);

/* Host copy in and out of a parameter's master weight or optimizer state (state -1: the weight; 0, 1: state), fp32, all
 * local elements. Setting a weight also refreshes its compute copy. Of sharded state other ranks' part is skipped, and
 * read as 0. */
enum hapt_status hapt_engine_set(struct hapt_engine *engine, int tensor, int state, const float *value);
enum hapt_status hapt_engine_get(struct hapt_engine *engine, int tensor, int state, float *value);

/* Start of a step: gradients of parameters to zero. */
enum hapt_status hapt_engine_begin_step(struct hapt_engine *engine);
/* Forward and backward of one microbatch in `slot`. Inputs (hapt_engine_tensor of the INPUT tensors) and incoming
 * boundary tensors must stand in their places; when `staged` >= 0 incoming boundaries are first copied from that
 * transfer slot, and the backward's outgoing gradients are copied to transfer slot `staged_out` (>= 0). */
enum hapt_status hapt_engine_forward(struct hapt_engine *engine, int slot, int staged);
enum hapt_status hapt_engine_backward(struct hapt_engine *engine, int slot, int staged, int staged_out);
/* Only what belongs to forward operators [first_op, end_op) of a section, without any copies: one engine of a long
 * range times every range inside it. */
enum hapt_status hapt_engine_run_part(struct hapt_engine *engine, enum hapt_section section, int slot, int first_op,
                                      int end_op);

typedef double hapt_engine_clock(void);
/* The same on a back end with a clock (hapt_backend.mark), and its seconds there: what the device waits for the host in
 * between is in them, how long the host waits for its end is not. Where replays are faster, theirs: the part then runs
 * more than once. `clock`: the host's. */
enum hapt_status hapt_engine_time_part(struct hapt_engine *engine, enum hapt_section section, int slot, int first_op,
                                       int end_op, hapt_engine_clock *clock, double *time_s);

/* Runs a whole section step by step and times every step: step_s [program->step_count[section]]. What is calibrated is
 * what trains. By the device's clock, or where it has none by the caller's, each step finished before the next. */
enum hapt_status hapt_engine_time_section(struct hapt_engine *engine, enum hapt_section section, int slot,
                                          hapt_engine_clock *clock, double *step_s);

/*
 * Replays: on back ends that can (hapt_backend.capture), what a section queues between two waits of the host is
 * captured, slot by slot, and replayed where the device's clock has found that to be faster. Results are the same bits.
 * HAPT_CUDA_GRAPHS=0 in the environment: never; 1: always, untried.
 */
/* Microbatches in one slot until all is tried; 1: nothing is. */
int hapt_engine_trial_runs(const struct hapt_engine *engine);
/* "2 of 3 runs of kernels replayed as graphs, 1.2 ms instead of 1.9 ms"; "" where nothing can be. */
#define HAPT_ENGINE_REPLAY_CHARS 128
void hapt_engine_describe_replays(const struct hapt_engine *engine, char text[HAPT_ENGINE_REPLAY_CHARS]);

/* End of the microbatches of a step: the REDUCE section. Gradients are then what the update reads; with sharded state
 * those of other ranks' slices are void. */
enum hapt_status hapt_engine_reduce(struct hapt_engine *engine);

/* Sum of squares of local gradients of parameters for which weight[program tensor] is 1 (0: a tied copy counted
 * elsewhere; NULL: all count), in double, in a fixed order. */
enum hapt_status hapt_engine_square_sum(struct hapt_engine *engine, const double *weight, double *sum);

struct hapt_update {
    enum hapt_optimizer optimizer;
    double learning_rate, beta1, beta2, epsilon, weight_decay, momentum;
    double gradient_scale; /* clipping: gradients are multiplied by it */
    int64_t step;          /* 1 for the first update */
};
/* Updates every trainable parameter; decay only where its published dimensions are >= 2 (decoupled). */
enum hapt_status hapt_engine_update(struct hapt_engine *engine, const struct hapt_update *update);

#endif
