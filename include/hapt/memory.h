/*
 * The static memory plan of a program under a schedule: regions and offsets, known before anything runs. Pure
 * functions.
 *
 * One allocation holds: resident | N slots | workspace | transfer slots, every tensor aligned to 64 bytes.
 *   slot       every tensor that lives from a microbatch's forward to its backward; the microbatch's inputs, its loss
 * and the stage's boundary activations included workspace  tensors that live inside one instruction (gradients that
 * cross a boundary too: they are copied from and to their transfer slots); offsets by liveness; plus kernel scratch
 *   resident   fp32 master weights, bf16 compute copies, fp32 gradients, optimizer state, the loss scale
 *   transfer   HAPT_TRANSFER_SLOTS buffers per boundary that moves outside the slots: activations and gradients
 * received, gradients sent (activations are sent from their slot) parameter_bytes = everything but the slots; peak =
 * parameter_bytes + slots * activation_bytes, exactly.
 */
#ifndef HAPT_MEMORY_H
#define HAPT_MEMORY_H

#include "hapt/program.h"

#define HAPT_TRANSFER_SLOTS 3

enum hapt_optimizer { HAPT_OPTIMIZER_SGD, HAPT_OPTIMIZER_ADAMW };

enum hapt_region { HAPT_REGION_NONE, HAPT_REGION_RESIDENT, HAPT_REGION_SLOT, HAPT_REGION_WORKSPACE };

/* Kernel scratch of an operator with local shapes, asked of the back end; context is the caller's. Operator -1 stands
 * for what runs once per step over the resident blocks (square sums, update). */
typedef size_t hapt_kernel_scratch(void *context, const struct hapt_program *program, int op);

/* One boundary's staging: slot k at offset + k * stride; tensors of the boundary at tensor_offset[i] inside it. */
struct hapt_staging {
    size_t offset, stride;
    size_t *tensor_offset;
};

/* Trained parameters whose gradients are all-reduced in place over the same axes: elements [first, end) of the blocks,
 * those that decay before `decayed_end`. One collective an axis serves a group: its steps in the REDUCE section are
 * those whose output stands in the gradient block in the place of its input. */
struct hapt_memory_group {
    unsigned axes; /* bit a: over mesh axis a */
    size_t first, decayed_end, end;
    /* What this rank updates: all of it, or (ZeRO-1, Rajbhandari et al. 2020) its slice among the ranks of the axes;
     * its state stands from state_first on in the state blocks. */
    size_t slice_first, slice_end, state_first;
};
#define HAPT_MEMORY_GROUPS (1 << HAPT_MESH_AXES)

struct hapt_memory_plan {
    size_t parameter_bytes;   /* resident + workspace + transfer slots */
    size_t activation_bytes;  /* one slot */
    size_t total_bytes;       /* parameter_bytes + slots * activation_bytes */
    int slots;                /* N */
    enum hapt_region *region; /* [program->tensor_count] */
    size_t *offset;           /* [program->tensor_count] from the start of its region (slot: of one slot) */
    size_t slot_offset;       /* of slot 0 in the allocation */
    size_t workspace_offset, workspace_bytes;
    size_t scratch_offset, scratch_bytes; /* kernel scratch, inside the workspace */
    /* Resident blocks: trained parameters by group, frozen ones last, all in one order. Every parameter starts on a
     * 64-byte boundary (padding elements are 0), so one kernel call serves a whole range. Weights and their copies have
     * `elements`, gradients and without sharded state the optimizer's `trained_elements`. Behind the gradients stand
     * sums that a step brings to another shape before they are gradients; a step clears `zeroed_elements` from
     * gradient_offset on. */
    size_t elements, trained_elements, zeroed_elements, state_elements;
    bool sharded_state;
    struct hapt_memory_group group[HAPT_MEMORY_GROUPS];
    size_t master_offset, gradient_offset, state_offset[2], copy_offset; /* copy: bf16 or (size_t)-1 */
    int state_count;                                                     /* 0 SGD without momentum, 1 with, 2 AdamW */
    size_t *parameter_element; /* [program->tensor_count] first element of a parameter in the blocks; (size_t)-1 for
                                  others */
    struct hapt_staging forward_in, backward_in, backward_out;
};

struct hapt_memory_options {
    int slots;
    int state_count;
    bool sharded_state; /* ranks that sum a gradient update a slice each and hold the state of that slice alone */
    hapt_kernel_scratch *scratch;
    void *scratch_context;
};

/* Slice `index` of the ranks of a group: elements [*first, *end) of the blocks; ranks in order of their places, by the
 * ratios of the axis where there is one axis that has ratios. */
void hapt_memory_group_slice(const struct hapt_sharding *sharding, const struct hapt_memory_group *group, int index,
                             size_t *first, size_t *end);
/* Ranks of a group's axes, and which of them the sharding's place is. */
int hapt_memory_group_ranks(const struct hapt_sharding *sharding, unsigned axes, int *index);

/* HAPT_ERR_MEMORY only for host memory; the device's limit is the caller's to check. Deterministic. */
enum hapt_status hapt_memory_plan(const struct hapt_program *program, const struct hapt_memory_options *options,
                                  struct hapt_arena *arena, struct hapt_memory_plan **plan);
/*
 * The same figures for many ranges of one sharding, without their programs: what does not depend on the range is
 * gathered once. Exactly those of hapt_memory_plan for every number of slots.
 */
struct hapt_memory_figures {
    size_t parameter_bytes, activation_bytes;
    size_t sharded_bytes; /* parameter_bytes, were the optimizer's state sharded */
    size_t trained_elements;
    bool copies; /* weights have compute copies */
};
struct hapt_memory_ranges;
/* `slots` of the options is not looked at. Lives in `arena`, reads the sharding. */
enum hapt_status hapt_memory_ranges_create(const struct hapt_sharding *sharding,
                                           const struct hapt_memory_options *options, struct hapt_arena *arena,
                                           struct hapt_memory_ranges **ranges);
/* What one thread needs meanwhile. */
struct hapt_memory_work;
enum hapt_status hapt_memory_work_create(const struct hapt_memory_ranges *ranges, struct hapt_arena *arena,
                                         struct hapt_memory_work **work);
/* Figures of operators [first_op, end_op). A range that no program can stand on (a cut that parts the writers of a
 * partial sum) has figures all the same. */
enum hapt_status hapt_memory_ranges_of(const struct hapt_memory_ranges *ranges, int first_op, int end_op,
                                       struct hapt_memory_work *work, struct hapt_memory_figures *figures);

/* No two live tensors overlap; everything inside its region. */
enum hapt_status hapt_memory_check(const struct hapt_memory_plan *plan, const struct hapt_program *program);

#endif
