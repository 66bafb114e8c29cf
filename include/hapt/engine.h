/*
 * The engine executes a program on one rank. It binds every kernel once per slot to planned memory and allocates
 * nothing after hapt_engine_create. The profiler and the trainer both run stages through it. No MPI: its owner
 * implements communication.
 */
#ifndef HAPT_ENGINE_H
#define HAPT_ENGINE_H

#include "hapt/memory.h"
#include "hapt/span_log.h"

struct hapt_engine;

/*
 * Communication between the ranks of a mesh while a program runs, implemented by the engine's owner. Called between
 * steps, with nothing queued on the device. Addresses are device addresses, or those of a host copy if the host cannot
 * read device memory. Slots absent: collectives are skipped, so that only computation is timed.
 */
struct hapt_engine_links {
    void *context;
    /* Collective operator `op` of the program's graph, from its input to its output (the same address: in place). */
    enum hapt_status (*collective)(void *context, int op, const void *from, void *to);
    /* data[i] = sum over the ranks of the mesh axes in `axes` (bit a: axis a): gradients of one parameter group
     * (hapt_parameter_group). */
    enum hapt_status (*all_reduce)(void *context, unsigned axes, float *data, size_t elements);
    /* For sharded state only, both in place. Reduce-scatter: rank r of the axes gets the sums of elements [bound[r],
     * bound[r + 1]). All-gather: every rank gets all ranks' slices. */
    enum hapt_status (*reduce_scatter)(void *context, unsigned axes, float *data, const size_t *bound);
    enum hapt_status (*all_gather)(void *context, unsigned axes, float *data, const size_t *bound);
    /* For operators that communicate while they run, over mesh axis a: shard_reduce(shard_reduce_context[a], ...). */
    hapt_shard_reduce *shard_reduce;
    void *shard_reduce_context[HAPT_MESH_AXES];
    /* Before and after a forward pass updates parameters (hapt_engine_defer_update): this time is not the pass's.
     * `share`: FLOPs of the steps so far, over those of the pass. */
    void (*leave)(void *context, double share);
    void (*resume)(void *context);
    /* After kernels of an update, which took this thread cpu_s. A slowed CPU delays the copies that wait for them. */
    void (*updated)(void *context, double cpu_s);
    /* All links except `shard_reduce` take device addresses, even if the host cannot read them. */
    bool on_device;
};

struct hapt_engine_options {
    const struct hapt_backend *backend;
    struct hapt_device *device;
    int threads;
    int state_count;
    int slots;
    int weight_slots;      /* of split programs; 0: 1 */
    int transfer_slots;    /* 0: HAPT_TRANSFER_SLOTS */
    bool sharded_state;    /* ZeRO-1; with weight units ZeRO-3: hapt_memory_options */
    bool host_state;       /* hapt_memory_options */
    bool host_update;      /* the same */
    int weight_unit_count; /* the same: weights on the host, or sharded */
    const struct hapt_unit *weight_unit;
    int gradient_unit_count; /* the same: those whose gradients are there, too */
    const struct hapt_unit *gradient_unit;
    /* CPUs: copies of state on the host are slowed down to so many byte/s in each direction; 0: they are not. The job
     * ends if they make no progress for host_timeout_s; 0: never. */
    double host_pace, host_timeout_s;
    bool all_reduce_gradients; /* with sharded_state: gradients are still all-reduced, since other stages hold the same
                             parameters */
    struct hapt_engine_links links;
};

/* Plans memory, reserves it on the device and on the host, and binds kernels. HAPT_ERR_MEMORY: over the device's cap
 * (the message names both figures), or the host lacks memory. HAPT_ERR_INPUT: the back end lacks an operator. */
enum hapt_status hapt_engine_create(const struct hapt_program *program, const struct hapt_engine_options *options,
                                    struct hapt_engine **engine);
/* Engines of the chunks of one device, in one allocation (hapt_memory_plan_chunks) that is freed with the last of them.
 * options[k]: of chunk k; they may differ in `links` and `all_reduce_gradients`. engine[0 .. chunks): all, or none. */
enum hapt_status hapt_engine_create_chunks(const struct hapt_program *const *program, int chunks,
                                           const struct hapt_engine_options *options, struct hapt_engine **engine);
void hapt_engine_destroy(struct hapt_engine *engine);
/* On back ends with `pin`, runs every kernel once on zeros, then clears the memory of all chunks. Loading a kernel may
 * synchronise the device, which would deadlock a pending collective. Call right after hapt_engine_create. */
enum hapt_status hapt_engine_warm_up(struct hapt_engine *engine);
/* Call before the first collective. `on_device`: collectives take device addresses. Otherwise, if the host cannot read
 * device memory, reserves host memory for what collectives transfer. */
enum hapt_status hapt_engine_connect(struct hapt_engine *engine, bool on_device);
const struct hapt_memory_plan *hapt_engine_memory(const struct hapt_engine *engine);
/* The memory plans that such engines would have, without a device allocation. */
enum hapt_status hapt_engine_plan_chunks(const struct hapt_program *const *program, int chunks,
                                         const struct hapt_engine_options *options, struct hapt_arena *arena,
                                         struct hapt_memory_plan **plan);
static inline enum hapt_status hapt_engine_plan_memory(const struct hapt_program *program,
                                                       const struct hapt_engine_options *options,
                                                       struct hapt_arena *arena, struct hapt_memory_plan **plan)
{
    return hapt_engine_plan_chunks(&program, 1, options, arena, plan);
}

/* Kernel scratch as the back end reports it (hapt_kernel_scratch); context: struct hapt_engine_options. */
size_t hapt_engine_scratch(void *context, const struct hapt_program *program, int op);
/* The same for GPUs that are not present: scratch of their matrix products (hapt_product_workspace). */
size_t hapt_engine_scratch_predicted(void *context, const struct hapt_program *program, int op);

/* Device address of a graph tensor in a slot (ignored for resident and workspace tensors; weight slot 0); NULL: not on
 * this rank. A parameter gives its fp32 master weight, or its compute copy (hapt_memory_plan's masters_like_state); its
 * gradient the fp32 gradient, also if that is on the host. */
void *hapt_engine_tensor(struct hapt_engine *engine, int tensor, int slot);
/* Local bytes of a graph tensor (the compute type for activations). */
size_t hapt_engine_tensor_bytes(const struct hapt_engine *engine, int tensor);
/* Device address of boundary tensor `index` of program->forward_in, backward_in or backward_out, in a transfer slot. */
enum hapt_staging_kind { HAPT_STAGING_FORWARD_IN, HAPT_STAGING_BACKWARD_IN, HAPT_STAGING_BACKWARD_OUT };
void *hapt_engine_staging(struct hapt_engine *engine, enum hapt_staging_kind kind, int slot, int index);

/* Copies a parameter's master weight (state -1) or optimizer state (0, 1) from and to the host: fp32, local elements
 * [first, first + count), or all. Setting a weight also updates its compute copy. Slices of other ranks are skipped,
 * and read as -0; states of frozen parameters read as 0. */
enum hapt_status hapt_engine_set_part(struct hapt_engine *engine, int tensor, int state, size_t first, size_t count,
                                      const float *value);
enum hapt_status hapt_engine_get_part(struct hapt_engine *engine, int tensor, int state, size_t first, size_t count,
                                      float *value);
enum hapt_status hapt_engine_set(struct hapt_engine *engine, int tensor, int state, const float *value);
enum hapt_status hapt_engine_get(struct hapt_engine *engine, int tensor, int state, float *value);
/* True if each rank of a parameter's group has its own slice of that state; state -1: of the master. */
bool hapt_engine_is_sliced(const struct hapt_engine *engine, int tensor, int state);
/* True if kernels read weights that are gathered from slices; then no rank has a whole one. */
bool hapt_engine_shards_weights(const struct hapt_engine *engine);
/* Copies a parameter as kernels read it, in its compute type. Not for sharded weights. */
enum hapt_status hapt_engine_get_weight(struct hapt_engine *engine, int tensor, void *value, size_t *bytes);
/* The first element of this rank's part of the master, `*count` elements, for back ends whose memory the host can read;
 * NULL: it has none. */
const float *hapt_engine_master(struct hapt_engine *engine, int tensor, size_t *count);

/* Start of a step: zeroes the gradients of parameters. */
enum hapt_status hapt_engine_begin_step(struct hapt_engine *engine);
/* Forward and backward of one microbatch in `slot`. INPUT tensors (hapt_engine_tensor) and incoming boundary tensors
 * must be in memory already. staged >= 0: incoming boundary tensors are first copied from that transfer slot.
 * staged_out >= 0: outgoing gradients are copied to that transfer slot. */
enum hapt_status hapt_engine_forward(struct hapt_engine *engine, int slot, int staged);
enum hapt_status hapt_engine_backward(struct hapt_engine *engine, int slot, int staged, int staged_out);
/* The same for split programs: the tensors that WEIGHT reads stay in a weight slot. hapt_engine_backward takes weight
 * slot 0. */
enum hapt_status hapt_engine_backward_split(struct hapt_engine *engine, int slot, int weight_slot, int staged,
                                            int staged_out);
/* Computes the gradients of parameters of one microbatch. Call behind its backward pass. It does nothing if the program
 * is not split. */
enum hapt_status hapt_engine_weight(struct hapt_engine *engine, int slot, int weight_slot);
/* Runs only the steps of forward operators [first_op, end_op) of a section, without copies. So one engine of a long
 * range can time every range inside it. HAPT_SECTION_WEIGHT of an unsplit program runs the steps of BACKWARD that a
 * split would defer. It serves for their time only, since their inputs may have been overwritten. */
enum hapt_status hapt_engine_run_part(struct hapt_engine *engine, enum hapt_section section, int slot, int first_op,
                                      int end_op);

typedef double hapt_engine_clock(void);
/* hapt_engine_run_part, timed by the device's clock (needs hapt_backend.timestamp). The time includes the device's
 * waits for the host, but not the host's wait for the end. If a replay is faster, its time is given; the part then runs
 * more than once. `clock`: the host's. */
enum hapt_status hapt_engine_time_part(struct hapt_engine *engine, enum hapt_section section, int slot, int first_op,
                                       int end_op, hapt_engine_clock *clock, double *time_s);

/* Runs a section and times every step: step_s [program->step_count[section]]. So calibration times the code that
 * trains. Uses the device's clock; without one, `clock`, and each step is finished before the next. */
enum hapt_status hapt_engine_time_section(struct hapt_engine *engine, enum hapt_section section, int slot,
                                          hapt_engine_clock *clock, double *step_s);

/*
 * Replays, on back ends with hapt_backend.capture. The work that a section queues between two host waits is captured,
 * per slot. It is replayed if that is faster by the device's clock. Results are bitwise equal. Environment:
 * HAPT_CUDA_GRAPHS=0: never; 1: always, without a trial.
 */
/* Microbatches in one slot until all trials are done; 1: there are no trials. */
int hapt_engine_trial_runs(const struct hapt_engine *engine);
/* "2 of 3 runs of kernels replayed as graphs, 1.2 ms instead of 1.9 ms"; "" if nothing can be replayed. */
#define HAPT_ENGINE_REPLAY_CHARS 128
void hapt_engine_describe_replays(const struct hapt_engine *engine, char text[HAPT_ENGINE_REPLAY_CHARS]);

/* End of a step's microbatches: the REDUCE section. Gradients are then ready for the update. With sharded state, those
 * in other ranks' slices are undefined (unless all_reduce_gradients). */
enum hapt_status hapt_engine_reduce(struct hapt_engine *engine);

/* Sum of squares of the local gradients, each parameter times weight[program tensor], in double, in a fixed order.
 * weight 0: a tied copy counted elsewhere; NULL: all count. Running statistics do not count. */
enum hapt_status hapt_engine_square_sum(struct hapt_engine *engine, const double *weight, double *sum);

struct hapt_update {
    enum hapt_optimizer optimizer;
    double learning_rate, beta1, beta2, epsilon, weight_decay, momentum;
    double gradient_scale; /* clipping: factor of the gradients */
    /* Running statistics (hapt_tensor.statistic) r become r + statistic_rate (s / microbatches - r), where s is the sum
     * in the place of their gradient. */
    double statistic_rate;
    int microbatches;
    int64_t step; /* 1 for the first update */
};
/* Updates the trainable parameters of part `part` of `parts`: of each parameter group g with g mod parts = part. Parts
 * may be updated in any order. Weight decay is decoupled, and only for published dimensions >= 2. */
enum hapt_status hapt_engine_update(struct hapt_engine *engine, int part, int parts, const struct hapt_update *update);

/*
 * Updates that may be deferred, for engines with state on the host (AutoHete's priority across iterations). Parts of
 * the parameters are updated in the order in which the forward pass reads them. hapt_engine_forward updates what its
 * operators read right before them, so copies of the rest hide behind its computation. The weights have the same bits
 * as with hapt_engine_update.
 */
/* True if the engine has state on the host. */
bool hapt_engine_defers(const struct hapt_engine *engine);
/* Begins to update all parameters. Those whose state is sharded, or on the device, are updated at once. */
enum hapt_status hapt_engine_defer_update(struct hapt_engine *engine, const struct hapt_update *update);
bool hapt_engine_is_updating(const struct hapt_engine *engine);
/* Seconds that the kernels of all updates took so far; the rest were copies. State on the host only. */
double hapt_engine_update_kernels_s(const struct hapt_engine *engine);
/* Logs copies of offloaded data and updates on the host from now on, for all engines of the device, which the log
 * outlives. A GPU's copies last until they are waited for. */
void hapt_engine_log_spans(struct hapt_engine *engine, struct hapt_span_log *log);
/* Updates the next part, if there is one. If the host updates it and takes longer than a millisecond, this returns
 * without it; it waits for the copy of weights that have been updated. */
enum hapt_status hapt_engine_continue_update(struct hapt_engine *engine);
/* Updates the rest. hapt_engine_get and hapt_engine_set do so as well. */
enum hapt_status hapt_engine_settle(struct hapt_engine *engine);

#endif
