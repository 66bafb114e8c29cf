/*
 * The static memory plan of a program under a schedule: regions and offsets, known before anything runs. Pure
 * functions.
 *
 * One allocation holds the chunks of a device: residents | N slots | weight slots | workspace | transfer
 * slots. Every tensor is aligned to 64 bytes.
 *   resident   fp32 master weights, bf16 compute copies, fp32 gradients, optimizer state, the loss scale
 *              With sharded optimizer state (ZeRO-1): the slice that the rank updates. With the state on the host
 *              (AutoHete, ZeRO-Offload): a window for it. The update copies a window in, updates the weights, and
 *              copies it out, so that its bits are those of an update with resident state. If the host updates, the
 *              window is there. In both cases masters are
 *              treated like the state if all trained weights have compute copies.
 *              With the weights on the host, too (AutoHete's p blocks): masters are treated like the state in any case,
 *              and two places hold the weights of one unit each (hapt_weight_unit) while its operators run.
 *              With sharded weights (ZeRO-3) compute copies are treated like the state, too, or in fp32 masters; a rank
 *              gathers those of a unit from its peers to a place.
 *              With the gradients on the host as well, three places hold those of one unit each.
 *   slot       tensors that live from forward to backward; a microbatch's inputs, loss and boundary activations
 *   weight     weight slots of a split sharding (hapt_sharding_split): tensors that BACKWARD keeps for WEIGHT
 *   workspace  tensors of one instruction, offsets by liveness, and kernel scratch; also gradients that cross a
 *              boundary: they are copied from and to their transfer slots
 *   transfer   HAPT_TRANSFER_SLOTS buffers per boundary, or as many as asked for: activations and gradients received,
 *              gradients sent (activations are sent from their slot)
 * parameter_bytes = everything but the slots; peak = parameter_bytes + slots * activation_bytes + weight_slots *
 * weight_slot_bytes, exactly.
 */
#ifndef HAPT_MEMORY_H
#define HAPT_MEMORY_H

#include "hapt/program.h"
#include "hapt/schedule.h"

enum hapt_optimizer { HAPT_OPTIMIZER_SGD, HAPT_OPTIMIZER_ADAMW };

/* The memory space. Tensors of programs are on the device; optimizer state and master weights may be on the host. */
enum hapt_memory_space { HAPT_SPACE_DEVICE, HAPT_SPACE_HOST };

enum hapt_region {
    HAPT_REGION_NONE,
    HAPT_REGION_RESIDENT,
    HAPT_REGION_SLOT,
    HAPT_REGION_WEIGHT_SLOT,
    HAPT_REGION_WORKSPACE
};

/* The location of a program tensor. */
struct hapt_memory_location {
    enum hapt_memory_space space;
    enum hapt_region region;
    size_t offset; /* from the start of its region (slot, weight slot: of one of them) */
};

/* Scratch bytes of an operator's kernel with local shapes, as the back end reports it; context is the caller's.
 * Operator -1: the kernels that run once per step over the resident blocks (square sums, update). */
typedef size_t hapt_kernel_scratch(void *context, const struct hapt_program *program, int op);

/* Transfer slots of one boundary: slot k at offset + k * stride, boundary tensor i at tensor_offset[i] inside it. */
struct hapt_staging {
    int slots;
    size_t offset, stride;
    size_t *tensor_offset;
};

/* Parameter group: trained parameters whose gradients are all-reduced in place over the same axes. It has elements
 * [first, end) of the blocks; those before `decayed_end` have weight decay, those from `statistic_first` on are running
 * statistics. One collective per axis serves a group, instead of its REDUCE steps that sum in place inside the gradient
 * block. */
struct hapt_parameter_group {
    unsigned axes; /* bit a: over mesh axis a */
    size_t first, decayed_end, statistic_first, end;
    /* Elements that this rank updates: all, or its slice among the ranks of the axes (ZeRO-1, Rajbhandari et al. 2020).
     * Their state starts at state_first in the state blocks. */
    size_t slice_first, slice_end, state_first;
};
#define HAPT_PARAMETER_GROUPS (1 << HAPT_MESH_AXES)

/* Operators whose weights are on the device at the same time, if the weights are on the host or sharded: a module, as
 * far as the chunk has it. They stand one behind the other in the place `index mod 2`, in the order of the blocks. A
 * weight that several units read has a copy in each. So do their gradients, if they are on the host: of fp32 elements,
 * in the place `index mod 3`. */
struct hapt_weight_unit {
    int first_op, end_op;
    int count;
    struct hapt_unit_weight {
        int parameter;  /* program tensor */
        size_t element; /* the first one, from the start of the place */
        size_t padded;  /* elements up to the next weight */
    } * weight;         /* [count] */
};
#define HAPT_WEIGHT_PLACES 2
#define HAPT_GRADIENT_PLACES 3 /* of the unit that runs, of the one that leaves, and of the one that comes */

/* Windows of host_update. Gradients: none if all are on the host. Masters: none if they are laid out like the state.
 * Copies: none if there are none, or if they are on the host. */
enum hapt_host_window { HAPT_WINDOW_GRADIENTS, HAPT_WINDOW_MASTERS, HAPT_WINDOW_COPIES };

struct hapt_memory_plan {
    size_t parameter_bytes;   /* resident + workspace + transfer slots */
    size_t sharded_bytes;     /* parameter_bytes with sharded optimizer state */
    size_t activation_bytes;  /* one slot; a slot holds one microbatch of one chunk */
    size_t weight_slot_bytes; /* one weight slot; 0: the programs are not split */
    size_t total_bytes;       /* parameter_bytes + slots * activation_bytes + weight_slots * weight_slot_bytes */
    int slots;                /* N */
    int weight_slots;         /* at least 1 */
    struct hapt_memory_location *location;  /* [program->tensor_count] */
    size_t slot_offset, weight_slot_offset; /* of slot 0 in the allocation */
    size_t workspace_offset, workspace_bytes;
    size_t scratch_offset, scratch_bytes; /* kernel scratch, inside the workspace */
    /* Resident blocks: trained parameters by group, then frozen ones, in the same order in every block. Every parameter
     * starts on a 64-byte boundary (padding elements are 0), so one kernel call covers a whole range. Weights and their
     * copies have `elements`; gradients have `trained_elements`, and so has optimizer state unless sharded. Sums that
     * change their layout before they are gradients come after the gradients. A step zeroes `zeroed_elements` from
     * gradient_offset on. */
    size_t elements, trained_elements, zeroed_elements, state_elements;
    size_t window_elements; /* of what may be on the host, in its device blocks: state_elements, or those of a window */
    /* The CPU of the host updates the parameters. Then the window is on the host, not on the device: of gradients, of
     * masters that are on the device, and of compute copies. */
    bool host_update;
    bool sharded_state;
    struct hapt_parameter_group group[HAPT_PARAMETER_GROUPS];
    size_t master_offset, gradient_offset, state_offset[2], copy_offset; /* copy: bf16 or (size_t)-1 */
    size_t frozen_offset;               /* of the masters of frozen parameters, elements [trained_elements, elements) */
    enum hapt_memory_space state_space; /* of the optimizer state, which is no tensor of the program */
    /* The masters of trained parameters are laid out like a state: each rank has those that it updates, in their space.
     * The program's parameters are then their compute copies. If the state is sharded or on the host, and no kernel
     * reads a master. */
    bool masters_like_state;
    bool masters_unread; /* no kernel reads the master of a trained parameter, of which there are some */
    enum hapt_memory_space master_space;
    /* Weights on the host: the compute copies, or in fp32 the masters. Units that read any are in order. Place k is
     * at place_offset + k * place_bytes. The update writes compute copies to a window (copy_offset) of as many elements
     * as that of the state. */
    bool host_weights;
    /* Weights are sharded: compute copies, or in fp32 masters, are laid out like the state on the device, and so is
     * their block. The places are those of weights on the host. */
    bool sharded_weights;
    int unit_count;
    struct hapt_weight_unit *unit;
    size_t place_offset, place_bytes, host_copy_offset;
    /* With the weights, their gradients are on the host, in the order of the blocks. The device has places for them,
     * and zeroed_elements is 0. */
    bool host_gradients;
    size_t gradient_place_offset, gradient_place_bytes, host_gradient_offset;
    size_t host_state_offset[2], host_master_offset; /* in the host allocation, if they are there */
    size_t host_window_offset[3];                    /* the same, by enum hapt_host_window */
    size_t host_bytes;                               /* of the host allocation, of all chunks of the device */
    size_t sharded_host_bytes;                       /* the same with sharded optimizer state */
    int state_count;                                 /* 0 SGD without momentum, 1 with, 2 AdamW */
    size_t *parameter_element; /* [program->tensor_count] first element of a parameter in the blocks; (size_t)-1 for
                                  others */
    struct hapt_staging forward_in, backward_in, backward_out;
};

struct hapt_memory_options {
    int slots;
    int weight_slots;   /* of split programs; 0: 1 */
    int transfer_slots; /* of each boundary; 0: HAPT_TRANSFER_SLOTS */
    int state_count;
    bool sharded_state; /* ZeRO-1: ranks that sum a gradient update one slice each and hold only that slice's state, and
                           master weights if kernels do not read them */
    bool host_state;    /* the optimizer state is on the host, and master weights if kernels do not read them */
    bool host_update;   /* with host_state: hapt_memory_plan */
    /* Units in order: with host_state and without sharded_state the trained weights of programs that lie in them are on
     * the host, too. Such a program needs a state, no frozen weights, and one type of all weights; else its weights are
     * on the device. With sharded_state these weights are sharded. Such a program needs no frozen weights, one type of
     * all weights, ranks that sum some gradients, and compute copies or no host_state; else each rank has all. */
    int weight_unit_count;
    const struct hapt_unit *weight_unit;
    /* Those of them whose gradients are on the host, too. This needs host_update and a program for one device, of which
     * no operator outside reads the same weights; else the gradients are on the device. */
    int gradient_unit_count;
    const struct hapt_unit *gradient_unit;
    hapt_kernel_scratch *scratch;
    void *scratch_context;
    bool scratch_by_operator; /* scratch(program, -1) is 0 for every program: it need not be asked */
    bool residents_only;      /* hapt_memory_ranges_create: for hapt_memory_ranges_least and _add alone */
};

/* Slice `index` of the ranks of a group: elements [*first, *end) of the blocks. Ranks are ordered by mesh coordinates.
 * If the group has one axis and the axis has ratios, the slices follow them. */
void hapt_parameter_group_slice(const struct hapt_sharding *sharding, const struct hapt_parameter_group *group,
                                int index, size_t *first, size_t *end);
/* Elements of the optimizer state that are on the device at a time, if it is on the host: all of it, or two halves, of
 * which one is updated while the other is copied. Halves are multiples of 32, as slices are. */
size_t hapt_memory_window(size_t state_elements);
/* Bytes of a window of host_update of so many elements; 0: the plan has none. gradients, masters, copies: the device
 * has all of them. */
static inline size_t hapt_host_window_bytes(enum hapt_host_window window, size_t elements, bool gradients, bool masters,
                                            bool copies)
{
    const size_t size[] = {gradients ? sizeof(float) : 0, masters ? sizeof(float) : 0, copies ? sizeof(uint16_t) : 0};
    return elements * size[window];
}
/* True if kernels read weights in places. */
static inline bool hapt_memory_has_places(const struct hapt_memory_plan *plan)
{
    return plan->host_weights || plan->sharded_weights;
}
/* Number of ranks on a group's axes; *index: the sharding's own rank among them. */
int hapt_parameter_group_ranks(const struct hapt_sharding *sharding, unsigned axes, int *index);

/* Plans the memory of a device that executes one instruction list over `chunks` programs. plan[0 .. chunks): offsets of
 * each program in the one allocation. All chunks share the pool of slots, the workspace and the totals;
 * activation_bytes and weight_slot_bytes are the largest chunk's. HAPT_ERR_MEMORY only for host memory; the caller
 * checks the device's limit. Deterministic. */
enum hapt_status hapt_memory_plan_chunks(const struct hapt_program *const *program, int chunks,
                                         const struct hapt_memory_options *options, struct hapt_arena *arena,
                                         struct hapt_memory_plan **plan);
/* The same for one program. */
static inline enum hapt_status hapt_memory_plan(const struct hapt_program *program,
                                                const struct hapt_memory_options *options, struct hapt_arena *arena,
                                                struct hapt_memory_plan **plan)
{
    return hapt_memory_plan_chunks(&program, 1, options, arena, plan);
}
/*
 * The same figures for many ranges of one sharding, without building their programs. Data that do not depend on the
 * range are gathered once. Equal to hapt_memory_plan for any number of slots.
 */
struct hapt_memory_bytes {
    size_t parameter_bytes, activation_bytes, weight_slot_bytes;
    size_t sharded_bytes;                  /* parameter_bytes with sharded optimizer state */
    size_t host_bytes, sharded_host_bytes; /* of the optimizer state on the host; 0: it is on the device */
    size_t trained_elements;
    /* Weights on the host, or sharded; 0: they are on the device. fetch: those that a pass copies to the device, if it
     * begins with the units with which the one before ended: all but two units', if they are equal. */
    size_t weight_bytes, fetch_bytes;
    int weight_units;
    /* Gradients on the host; 0: on the device. fetch: those that a backward pass copies to the device behind another
     * one, if units are equal: none of three, all of six or more. last: those of the largest unit. */
    size_t gradient_bytes, gradient_fetch_bytes, gradient_last_bytes;
    bool copies;         /* weights have compute copies */
    bool masters_unread; /* as in a plan */
};
struct hapt_memory_ranges;
/* The part of a range's memory that depends neither on where weights and state are nor on their types. */
struct hapt_memory_activations {
    size_t slot_bytes, weight_slot_bytes; /* of one microbatch */
    size_t forward_bytes, backward_bytes; /* workspace of the sections; of a split sharding, the larger of two */
    size_t transfer_bytes;                /* one transfer slot of every boundary */
    size_t scratch_bytes;                 /* of the kernels */
};
/* Ignores `slots` of the options. Allocates from `arena`; keeps a pointer to the sharding. */
enum hapt_status hapt_memory_ranges_create(const struct hapt_sharding *sharding,
                                           const struct hapt_memory_options *options, struct hapt_arena *arena,
                                           struct hapt_memory_ranges **ranges);
/* Scratch of one thread. */
struct hapt_memory_work;
enum hapt_status hapt_memory_work_create(const struct hapt_memory_ranges *ranges, struct hapt_arena *arena,
                                         struct hapt_memory_work **work);
/* A unit of operators recomputes nothing, its light operators, or all its activations. */
enum hapt_unit_choice { HAPT_UNIT_KEPT, HAPT_UNIT_SELECTIVE, HAPT_UNIT_FULL };
/* Figures of operators [first_op, end_op). Also given for ranges without a valid program: a boundary between the
 * writers of a partial sum. again [unit_count] by unit of the sharding, which holds all of them, none selective
 * (hapt_sharding_recompute): the enum hapt_unit_choice of those that lie in the range; NULL: they make all again. */
enum hapt_status hapt_memory_ranges_of(const struct hapt_memory_ranges *ranges, int first_op, int end_op,
                                       const unsigned char *again, struct hapt_memory_work *work,
                                       struct hapt_memory_bytes *bytes);
/* The same in two parts, of which the first takes nearly all of the time: for ranges that share a sharding and differ
 * in their options. `unsplit`: of the same operators and choices in the sharding that was split, whose forward part is
 * the same; NULL: unknown. */
enum hapt_status hapt_memory_ranges_activations(const struct hapt_memory_ranges *ranges, int first_op, int end_op,
                                                const unsigned char *again,
                                                const struct hapt_memory_activations *unsplit,
                                                struct hapt_memory_work *work,
                                                struct hapt_memory_activations *activations);
void hapt_memory_ranges_add(const struct hapt_memory_ranges *ranges, int first_op, int end_op,
                            const struct hapt_memory_activations *activations, struct hapt_memory_bytes *bytes);
/* Lower bounds of those figures, for any units that recompute: without activations, workspace, scratch, transfer slots
 * and the host. Takes a small part of the time. */
void hapt_memory_ranges_least(const struct hapt_memory_ranges *ranges, int first_op, int end_op,
                              struct hapt_memory_bytes *bytes);

#endif
