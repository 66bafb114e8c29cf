/*
 * A team: the ranks that run one program together. It implements the engine's collectives over communicators of the
 * mesh axes, and stretches computation on slowed devices. The profiler and the trainer both run stages through it.
 */
#ifndef HAPT_TEAM_H
#define HAPT_TEAM_H

#include <mpi.h>

#include "hapt/device.h"
#include "hapt/engine.h"
#include "hapt/link.h"

/* A collective operator of the program, with its sizes and offsets. */
struct hapt_team_collective {
    enum hapt_collective_kind kind; /* NONE: no collective */
    int axis;
    enum hapt_dtype dtype;
    size_t elements;                          /* of an all-reduce */
    struct hapt_strided *part;                /* [ranks of the axis] shards in the unsharded tensor */
    struct hapt_strided_list *send, *receive; /* [ranks of the axis] all-to-all */
    size_t longest;
};

/* Time of the microbatches: busy_s stretched; device_s on the device (hapt_team_clock) and wall_s on the wall clock
 * without the stretch, both times slowdown, on a steady device both as planned; wait_s in collectives. */
struct hapt_team_times {
    double busy_s, device_s, wall_s, wait_s;
};

struct team_devices; /* src/team/devices.h */

struct hapt_team {
    const struct hapt_sharding *sharding; /* this rank's view */
    const struct hapt_program *program;
    int rank, size; /* of the team */
    int mesh_coordinate[HAPT_MESH_AXES];
    double slowdown;     /* of this rank's device; up to 1: none */
    double planned_s;    /* of the current computation on a steady device; 0: not known */
    double planned_left; /* share of it behind the updates inside the pass so far */
    struct hapt_collective *all_ranks;
    struct hapt_collective *axis_comm[HAPT_MESH_AXES]; /* of the ranks of an axis; NULL: it has one rank */
    struct team_devices *devices;                      /* collectives between devices; NULL: through the host */
    struct hapt_team_axis {
        struct hapt_team *team;
        int axis;
    } shard_reduce_context[HAPT_MESH_AXES];
    struct hapt_team_collective *collective; /* [operators of the program's graph] */
    struct hapt_strided *slice;              /* [size] slices of a flat array during a collective */
    /* Current step and microbatch, for messages; -1: end of the step. Only microbatches count in `times`. */
    int64_t step;
    int microbatch;
    int passing;                      /* microbatch of the pass that updates interrupt */
    double passing_s;                 /* planned_s of that pass */
    double busy_s, reduce_s;          /* computing; waiting for the team. Since the owner last reset them */
    struct hapt_team_times times;     /* likewise */
    const struct hapt_backend *clock; /* clock of computation; NULL: CPU time of its thread */
    struct hapt_queue *queue;         /* whose timestamps the clock records */
    struct hapt_team_stretch {
        double start_s, cpu_s;
        struct hapt_event *timestamp;
    } computation; /* start of the current computation */
    /* A modelled device (hapt_team_set_length). */
    bool modelled;
    double length_s; /* of the current computation */
    double free_s;   /* when the device ends its last computation or its inputs arrive, whichever is later */
    double late_s;   /* largest delay of a computation's end here, since the owner last reset it */
};

/* Mesh coordinates of rank `rank`. */
void hapt_team_mesh_coordinate(const struct hapt_sharding *sharding, int rank, int mesh_coordinate[HAPT_MESH_AXES]);
/* Prepares the collectives of a program of `sharding` (this rank's view). Rank-local; allocates from `arena`. */
enum hapt_status hapt_team_prepare(struct hapt_team *team, const struct hapt_sharding *sharding,
                                   const struct hapt_program *program, int rank, double slowdown,
                                   struct hapt_arena *arena);
/* Creates communicators of all ranks and of each axis. Collective over `comm`, whose ranks are the team's, in order.
 * `who`: for messages, borrowed. */
enum hapt_status hapt_team_connect(struct hapt_team *team, MPI_Comm comm, const char *who, double timeout_s);
/*
 * Lets the team's devices run the engine's collectives themselves. This needs: a device of its own for each rank, on a
 * back end with device communicators; no rehearsed slow link; no rank with HAPT_COLLECTIVES=host in its environment.
 * Otherwise, or if it fails, collectives still pass through the host. `existing`: a device communicator of the
 * team's ranks, which the team then owns; NULL: none. `text` (HAPT_TEAM_TRANSPORT_CHARS): what carries the collectives,
 * "NCCL 2.28.9", or why the host does; "" for one rank. Call after hapt_team_prepare, or call hapt_team_reserve later.
 * Collective over the team.
 */
#define HAPT_TEAM_TRANSPORT_CHARS 192
enum hapt_status hapt_team_use_devices(struct hapt_team *team, const struct hapt_backend *backend,
                                       struct hapt_device *device, struct hapt_device_comm *existing, char *text);
/* Device memory for the collectives of a program prepared since, and for a rebuild; nothing if the host carries them.
 * Rank-local. */
enum hapt_status hapt_team_reserve(struct hapt_team *team);
enum hapt_status hapt_team_reserve_parts(struct hapt_team *team, unsigned axes, const struct hapt_strided *part);
/* Runs one collective as the programs of the team do. `from`, `to`: device addresses if devices run the team's
 * collectives, else host addresses. Collective over the ranks of its axis. Call hapt_team_reserve_collective before;
 * that one is rank-local. */
enum hapt_status hapt_team_run_collective(struct hapt_team *team, const struct hapt_team_collective *planned,
                                          const char *what, const void *from, void *to);
enum hapt_status hapt_team_reserve_collective(struct hapt_team *team, const struct hapt_team_collective *planned);
void hapt_team_release(struct hapt_team *team);
/* The functions that the engine calls; they refer to the team. */
void hapt_team_links(struct hapt_team *team, struct hapt_engine_links *links);
/* The communicator of mesh axes `axes` (bits). */
static inline struct hapt_collective *hapt_team_comm(const struct hapt_team *team, unsigned axes)
{
    return axes == 3u ? team->all_ranks : team->axis_comm[axes >> 1];
}
/* All-gather. Rank r of mesh axes `axes` holds the runs part[r] of `whole`, at their offsets; afterwards all ranks hold
 * all. `whole`: a device address if devices run the team's collectives, else a host address. Collective over the ranks
 * of the axes. */
enum hapt_status hapt_team_rebuild(struct hapt_team *team, unsigned axes, const char *what,
                                   const struct hapt_strided *part, void *whole);
/* "WHAT of step 3, microbatch 1", for messages. */
const char *hapt_team_describe(const struct hapt_team *team, const char *what, char *text, size_t size);

/* Measures computation by the device's own clock, if its back end has one, instead of CPU time. Call after
 * hapt_team_prepare. */
void hapt_team_clock(struct hapt_team *team, const struct hapt_backend *backend, struct hapt_device *device);
/* Begin and end of a computation. On a slowed device it ends no earlier than its start plus slowdown x its CPU or
 * device time, on a steady one than its start plus the planned time. On a modelled device it ends `length_s` after its
 * start: the end of the previous computation, or the arrival of its inputs if later. So a late wakeup of this process
 * delays no modelled device. */
void hapt_team_stretch_begin(struct hapt_team *team);
void hapt_team_stretch_end(struct hapt_team *team);
void hapt_team_set_length(struct hapt_team *team, double length_s);
/* The modelled device cannot continue before `time_s`. */
void hapt_team_inputs_ready(struct hapt_team *team, double time_s);
/* The next computation of a slowed device takes `planned_s`, if it can. So the speed of the cores, which drifts, has no
 * influence on the device's. */
void hapt_team_set_steady(struct hapt_team *team, double planned_s);

#endif
