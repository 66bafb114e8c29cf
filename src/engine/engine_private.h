/* The engine's structure, shared by its source files. */
#ifndef HAPT_ENGINE_PRIVATE_H
#define HAPT_ENGINE_PRIVATE_H

#include "hapt/engine.h"
#include "state_copies.h"

/* A kernel call, or (no kernel) a collective on the first input and output of the call. */
struct bound_step {
    const struct hapt_kernel *kernel;
    struct hapt_call call;
    int op, forward_op;
    bool weight;         /* hapt_program_step */
    int parameter_group; /* REDUCE: parameter group whose collective does this sum; -1: none */
};

/* Consecutive kernel steps without host work between them (engine_replay.c). */
struct replay_range {
    int first, end; /* steps of its section */
    enum range_choice { RANGE_TRIES_STEPS, RANGE_TRIES_REPLAYS, RANGE_STEPS, RANGE_REPLAYS } choice;
    int variants;             /* slots times weight slots */
    int trials;               /* of the current choice */
    double steps_s, replay_s; /* shortest trial; 0: none */
    struct range_slot {
        int runs, replays; /* so far */
        struct hapt_replay *replay;
    } * slot; /* [slots][weight_slots] of its section */
};

struct section_binding {
    int step_count;
    int weight_slots;        /* BACKWARD and WEIGHT: those of the plan; else 1 */
    struct bound_step *step; /* [slots][weight_slots][step_count] */
    int range_count;
    struct replay_range *range; /* in order; none if nothing can be replayed */
};

/* Shared by the engines of the chunks of a device. */
struct engine_memory {
    int users;
    struct hapt_arena arena; /* of the memory plans */
    char *address;           /* device memory, plan->total_bytes */
    char *host; /* state and masters on the host, plan->host_bytes; NULL: none, or the device is modelled */
    struct state_copies *copies; /* paced copies of them; NULL: the back end's queues copy */
    struct hapt_span_log *log;   /* of copies and updates on the host; NULL: none */
};

/* How elements of a parameter group are updated. Those of a kind follow each other. */
enum update_kind { UPDATE_DECAYED, UPDATE_UNDECAYED, UPDATE_STATISTIC, UPDATE_KINDS };

static inline size_t update_first(const struct hapt_parameter_group *group, enum update_kind kind)
{
    return kind == UPDATE_DECAYED     ? group->first
           : kind == UPDATE_UNDECAYED ? group->decayed_end
                                      : group->statistic_first;
}

static inline size_t update_end(const struct hapt_parameter_group *group, enum update_kind kind)
{
    return kind == UPDATE_STATISTIC ? group->end : update_first(group, kind + 1);
}

/* A part of the parameters, of one group, whose state passes through the window at once (engine_away.c). */
struct update_piece {
    int group;
    size_t first, end;     /* elements of the resident blocks */
    size_t state_first;    /* of the state blocks */
    enum update_kind kind; /* of all of them */
    const char *name;      /* of the first parameter of which it has elements */
    int needed;            /* the first FORWARD step that reads one of its weights; INT_MAX: none */
};

/* Copies of a piece in one direction. */
struct state_move {
    bool pending;
    struct hapt_event *end; /* NULL: paced, and: */
    int64_t mark;
    double begin_s; /* if it is not paced */
};

/* The units that the steps of a section need; NULL: they need none. */
struct step_units {
    int *unit; /* [step_count] the unit of a step; -1: none */
    int *next; /* [step_count] that of the first later step with another one; -1: none */
};

/* The contents of the places for weights (engine_weights.c). */
struct weight_places {
    struct step_units steps[HAPT_SECTION_COUNT]; /* that read weights */
    int current;                                 /* the unit that runs, or -1 */
    struct weight_place {
        int unit; /* or -1 */
        struct state_move move;
    } place[HAPT_WEIGHT_PLACES];
};

/* The gradients of a unit to which one section adds. */
struct unit_gradients {
    int count;
    struct unit_gradient {
        int index;      /* in `parameter` of the engine */
        size_t element; /* from the start of the place */
    } * gradient;
    bool shared; /* other units, or another section, add to one of them */
};

/* Gradients on the host: the contents of the places on the device (engine_gradients.c). */
struct gradient_places {
    struct step_units steps[HAPT_SECTION_COUNT];      /* that add to gradients */
    struct unit_gradients *added[HAPT_SECTION_COUNT]; /* [unit_count] */
    bool *begun;                                      /* [parameter_count] the step has added to a gradient */
    double *sum;                                      /* [parameter_count] room for square sums */
    struct unit_gradients *current;                   /* those to which kernels add; NULL: none */
    struct gradient_place {
        const struct unit_gradients *unit; /* or NULL */
        struct state_move move[2];         /* [enum state_direction] */
    } place[HAPT_GRADIENT_PLACES];
};

/* The update of parameters whose state is on the host. */
struct away_update {
    int piece_count;
    struct update_piece *piece;   /* [piece_count] in the order of need */
    double *flops;                /* [FORWARD steps + 1] of the steps before it */
    struct state_move move[2][2]; /* [half of the window][enum state_direction] */
    /* The update that is going on: */
    bool pending;
    unsigned groups; /* bits */
    struct hapt_update update;
    int next, half;            /* the next piece, and its half */
    double kernels_s;          /* of all updates so far, on the device */
    double copying_s[2];       /* by direction: when the copies began that the next mark will end; 0: none has */
    double copied_s[2];        /* by direction: the end of the last copy that was logged */
    bool zeroes;               /* the step has begun: gradients are zeroed when they have been used */
    struct host_updater *host; /* NULL: the device updates */
};

struct hapt_engine {
    struct hapt_arena arena;
    struct engine_memory *shared;
    const struct hapt_program *program;
    struct hapt_engine_options options;
    struct hapt_memory_plan *plan;
    struct hapt_queue *queue;
    char *memory; /* shared->address */
    char *bounce; /* bounce buffer on the host if it cannot read device memory (engine_host.c); else NULL */
    struct section_binding section[HAPT_SECTION_COUNT];
    int parameter_count;                     /* trained parameters; square sums are in their order */
    int *parameter;                          /* [parameter_count] program tensors */
    struct bound_step *square_sum;           /* [parameter_count] */
    double *square;                          /* [parameter_count] host copy of the sums */
    size_t *bound;                           /* [ranks of the mesh + 1] */
    int group_before[HAPT_PARAMETER_GROUPS]; /* REDUCE: the group's collective runs before this step; -1: it has none */
    struct bound_step zero;                  /* zeroes the gradient block */
    struct replay_range norm;                /* the square sums; end 0: not replayed */
    struct {
        struct replay_range *range; /* NULL: no trial is running */
        struct hapt_event *from, *to;
        bool replayed;
    } trial;
    const struct hapt_kernel *convert, *update[UPDATE_KINDS];
    struct away_update away;
    struct weight_places weights;
    struct gradient_places gradients;
    enum hapt_dtype copy_dtype; /* of the weights' compute copy, if any */
};

/* Usable before memory is planned. */
enum hapt_status hapt_engine_check_kernels(const struct hapt_program *program,
                                           const struct hapt_engine_options *options);
const struct hapt_kernel *hapt_engine_find_kernel(const struct hapt_program *program,
                                                  const struct hapt_engine_options *options, int op);
/* Fills an operator's call except for addresses: shapes, types, attributes. */
void hapt_engine_describe_call(const struct hapt_program *program, const struct hapt_engine_options *options, int op,
                               struct hapt_call *call);
/* View of a flat array. */
struct hapt_view hapt_engine_flat_view(void *data, enum hapt_dtype dtype, size_t elements);
/* Address that kernels read: a parameter's compute copy if it has one, else the tensor itself. */
void *hapt_engine_operand(struct hapt_engine *engine, int tensor, int slot, int weight_slot);
/* hapt_engine_tensor in any weight slot. */
void *hapt_engine_address(struct hapt_engine *engine, int tensor, int slot, int weight_slot);
/* Elements of this rank's part of a tensor. */
size_t hapt_engine_elements(const struct hapt_engine *engine, int tensor);
enum hapt_status hapt_engine_bind(struct hapt_engine *engine);
/* Runs one step: starts its kernel, or runs its collective. */
enum hapt_status hapt_engine_run(struct hapt_engine *engine, const struct bound_step *bound);
/* hapt_engine_run_part without the wait at its end. */
enum hapt_status hapt_engine_start_part(struct hapt_engine *engine, enum hapt_section section, int slot, int first_op,
                                        int end_op);
/* Waits for queued work, then judges the trial that was running. */
enum hapt_status hapt_engine_finish(struct hapt_engine *engine);

/* engine_update.c */
/* Runs each kernel of the update once, without communication. */
enum hapt_status hapt_engine_run_update_kernels(struct hapt_engine *engine);
/* Updates the parameter groups of `groups` (bits). */
enum hapt_status hapt_engine_update_groups(struct hapt_engine *engine, unsigned groups,
                                           const struct hapt_update *update);
/* The kernel that updates parameters of a kind. */
const struct hapt_kernel *hapt_engine_find_update(const struct hapt_backend *backend, struct hapt_device *device,
                                                  int state_count, enum update_kind kind);
/* The numbers of a call of it. */
void hapt_engine_describe_update(const struct hapt_update *update, enum update_kind kind, struct hapt_call *call);
/* One call for elements [first, end) of the blocks. Their state is in its device blocks from state_first on, and so are
 * masters that are laid out like it. */
enum hapt_status hapt_engine_update_run(struct hapt_engine *engine, const struct hapt_update *update, size_t first,
                                        size_t end, size_t state_first, enum update_kind kind);
/* Element bounds of the slices of a group's ranks, relative to the group's first element; in engine->bound. */
const size_t *hapt_engine_slice_bounds(struct hapt_engine *engine, const struct hapt_parameter_group *group);
/* Address on the device of the compute copies of elements from `element` on; if the weights are sharded, of those in
 * this rank's slices. */
uint16_t *hapt_engine_copy(const struct hapt_engine *engine, size_t element);
/* Address on the device of sharded weights from `element` on, in the compute type: compute copies, or masters. */
void *hapt_engine_own_weight(struct hapt_engine *engine, size_t element);
/* Element `first` of a state where it is kept; state -1: of masters that are laid out like one. */
float *hapt_engine_state_address(struct hapt_engine *engine, int state, size_t first);

/* engine_away.c. Call bind after hapt_engine_bind. */
enum hapt_status hapt_engine_bind_away(struct hapt_engine *engine);
/* Starts to copy `bytes`, paced if the device is a CPU with a pace. Then `end`: *move ends with all copies so far.
 * `what` names them in messages and must outlive them. */
enum hapt_status hapt_engine_start_copy(struct hapt_engine *engine, enum state_direction direction, const char *what,
                                        void *to, const void *from, size_t bytes);
void hapt_engine_end_copies(struct hapt_engine *engine, enum state_direction direction, struct state_move *move);
enum hapt_status hapt_engine_wait_copies(struct hapt_engine *engine, enum state_direction direction,
                                         struct state_move *move);
/* Begins an update: fetches its first piece. Then `advance` once for each piece, while away.pending. */
enum hapt_status hapt_engine_away_begin(struct hapt_engine *engine, unsigned groups, const struct hapt_update *update);
enum hapt_status hapt_engine_away_advance(struct hapt_engine *engine);
/* The first piece from `at` on that the update includes; piece_count: none. */
int hapt_engine_next_piece(const struct hapt_engine *engine, int at);
/* Element of the window of a piece. */
size_t hapt_engine_window_of(const struct hapt_engine *engine, const struct update_piece *piece, int half);
/* Updates what FORWARD steps up to `last` read. The next step to run is `next`. */
enum hapt_status hapt_engine_update_needed(struct hapt_engine *engine, int next, int last);

/* engine_host_update.c: updates on the host. They need the pieces of engine_away.c. */
enum hapt_status hapt_engine_bind_host_updates(struct hapt_engine *engine);
void hapt_engine_end_host_updates(struct hapt_engine *engine);
/* Begins the update engine->away.update of engine->away.groups. */
void hapt_engine_begin_host_update(struct hapt_engine *engine);
/* Waits until a piece has been updated and its weights are on the device. *done is false if the update takes longer
 * than most_s seconds. The pieces of an update are waited for in order; `half` alternates, from 0 on. */
enum hapt_status hapt_engine_wait_host_update(struct hapt_engine *engine, int piece, int half, double most_s,
                                              bool *done);

/* engine_weights.c: weights in places. Without them, all but the addresses do nothing. Call bind after
 * hapt_engine_bind. */
enum hapt_status hapt_engine_bind_weights(struct hapt_engine *engine);
/* Before a step runs: waits for the weights that it reads, and begins to fetch those that its section reads next. */
enum hapt_status hapt_engine_weights_need(struct hapt_engine *engine, enum hapt_section section, int step);
/* Weights change: the places hold none of them any more. */
enum hapt_status hapt_engine_weights_changed(struct hapt_engine *engine);
/* Address of a weight that kernels of an operator read: in the place of its unit. */
void *hapt_engine_place_address(struct hapt_engine *engine, int op, int tensor);
/* Address on the host of the first weight of elements from `element` on, in the compute type. */
void *hapt_engine_host_weight(struct hapt_engine *engine, size_t element);
/* Element size of weights as kernels read them. */
size_t hapt_engine_weight_bytes(const struct hapt_engine *engine);

/* engine_gradients.c: gradients on the host. Without them, all but the addresses do nothing. Call bind after
 * hapt_engine_bind. */
enum hapt_status hapt_engine_bind_gradients(struct hapt_engine *engine);
/* Before a step runs: the gradients to which it adds are in their place; those of the unit before leave it. */
enum hapt_status hapt_engine_gradients_need(struct hapt_engine *engine, enum hapt_section section, int step);
/* The steps of a section have been queued. */
enum hapt_status hapt_engine_gradients_leave(struct hapt_engine *engine);
/* All have reached the host. */
enum hapt_status hapt_engine_gradients_arrive(struct hapt_engine *engine);
/* A step begins: they are 0. */
void hapt_engine_forget_gradients(struct hapt_engine *engine);
/* Address of a parameter's gradient to which an operator adds: in the place of its unit. */
void *hapt_engine_gradient_address(struct hapt_engine *engine, int op, int parameter);
/* Address on the host of the gradients of elements from `element` on. */
float *hapt_engine_host_gradient(const struct hapt_engine *engine, size_t element);

/* engine_units.c */
typedef bool hapt_op_test(const struct hapt_engine *engine, int op);
/* Finds the units of the steps of a section whose operators need their unit. */
enum hapt_status hapt_engine_find_units(struct hapt_engine *engine, enum hapt_section section, hapt_op_test *needs,
                                        struct step_units *units);
/* True if the step is the first one of its section that needs another unit than the steps before. The unit is waited
 * for right before it, so no replay range may contain it behind its first step. */
bool hapt_engine_begins_unit(const struct hapt_engine *engine, enum hapt_section section, int step);
/* The first element of a parameter in the place of an operator's unit *u. */
size_t hapt_engine_element_in_place(const struct hapt_engine *engine, int op, int parameter, int *u);

/* engine_replay.c. Call after hapt_engine_bind: finds what can be replayed. */
enum hapt_status hapt_engine_find_replay_ranges(struct hapt_engine *engine);
void hapt_engine_disable_replays(struct hapt_engine *engine);
/* Queues a range of the steps of a slot, step by step or as a replay: whichever is faster or being tried. A running
 * trial is judged when it has ended. */
enum hapt_status hapt_engine_run_range(struct hapt_engine *engine, struct replay_range *range,
                                       const struct bound_step *step, int slot);
void hapt_engine_judge_trial(struct hapt_engine *engine);
/* A part has taken *time_s, of which queueing took `queued_s`. If a replay is faster, *time_s becomes its time. */
void hapt_engine_time_replay(struct hapt_engine *engine, enum hapt_section section, int slot, int first_op, int end_op,
                             double queued_s, double *time_s);

/* engine_host.c */
/* Host memory of the optimizer state, page-locked on back ends with `pin`, zeroed. bytes 0: *memory is unchanged. */
enum hapt_status hapt_engine_reserve_state(const struct hapt_backend *backend, size_t bytes, char **memory);
void hapt_engine_release_state(const struct hapt_backend *backend, char *memory);
void hapt_engine_release_host(struct hapt_engine *engine);
/* Runs a collective step through the owner's links; nothing may be queued before. */
enum hapt_status hapt_engine_run_collective(struct hapt_engine *engine, const struct bound_step *step);
/* to_host: *block becomes its copy on the host, if the host cannot read it. from_host: copies it back. */
enum hapt_status hapt_engine_to_host(struct hapt_engine *engine, float **block, size_t elements);
enum hapt_status hapt_engine_from_host(struct hapt_engine *engine, float *block, const float *host, size_t elements);

#endif
