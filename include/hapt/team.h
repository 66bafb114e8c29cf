/*
 * A team: the ranks that run one program together. It carries out what the engine asks of other ranks, the program's
 * collectives, over communicators of the mesh axes, and stretches computation where a device is slowed down. The
 * profiler and the trainer run stages through it alike.
 */
#ifndef HAPT_TEAM_H
#define HAPT_TEAM_H

#include <mpi.h>

#include "hapt/device.h"
#include "hapt/engine.h"
#include "hapt/link.h"

/* A collective operator of the program, with where everything goes. */
struct hapt_team_move {
    enum hapt_collective_kind kind; /* NONE: no collective */
    int axis;
    enum hapt_dtype dtype;
    size_t elements;                          /* of an all-reduce */
    struct hapt_strided *part;                /* [ranks of the axis] shards in the whole */
    struct hapt_strided_list *send, *receive; /* [ranks of the axis] all-to-all */
    size_t longest;
};

/* What the microbatches took: stretched; the device's time (hapt_team_clock) and wall time without the sleeping, both
 * times slowdown; in collectives. */
struct hapt_team_effort {
    double busy_s, device_s, raw_s, wait_s;
};

struct team_devices; /* src/team/devices.h */

struct hapt_team {
    const struct hapt_sharding *sharding; /* as this rank sees it */
    const struct hapt_program *program;
    int rank, size;                                /* of the team */
    int place[HAPT_MESH_AXES];                     /* on the axes of its mesh */
    double slowdown;                               /* of this rank's device; up to 1: none */
    struct hapt_collective *whole;                 /* of all ranks */
    struct hapt_collective *along[HAPT_MESH_AXES]; /* of the ranks of an axis; NULL: it has one rank */
    struct team_devices *devices; /* that trade among themselves; NULL: what ranks trade passes through the host */
    struct hapt_team_axis {
        struct hapt_team *team;
        int axis;
    } exchange_context[HAPT_MESH_AXES];
    struct hapt_team_move *move; /* [operators of the program's graph] */
    struct hapt_strided *slice;  /* [size] of a flat array, while it moves */
    /* of the step under way: for messages; computation is stretched in microbatches alone (-1: the end of a step) */
    int64_t step;
    int microbatch;
    double busy_s, reduce_s;          /* computing; waiting for the team: since the owner last took them */
    struct hapt_team_effort effort;   /* the same */
    const struct hapt_backend *clock; /* NULL: a computation takes the CPU time of its thread */
    struct hapt_queue *queue;         /* by whose marks it is timed else */
    struct hapt_team_stretch {
        double start_s, cpu_s;
        struct hapt_event *mark;
    } begun; /* of the computation under way */
    /* A modelled device (hapt_team_model). */
    bool modelled;
    double length_s; /* of the computation under way */
    double free_s;   /* when the device ended what it did before, or had what it waited for */
    double late_s;   /* by which a computation ended late here at most: since the owner last took it */
};

/* Where rank `rank` of a mesh stands on its axes. */
void hapt_team_place(const struct hapt_sharding *sharding, int rank, int place[HAPT_MESH_AXES]);
/* Prepares the collectives of a program of `sharding`, which is as this rank sees it. Rank-local; all lives in `arena`.
 */
enum hapt_status hapt_team_prepare(struct hapt_team *team, const struct hapt_sharding *sharding,
                                   const struct hapt_program *program, int rank, double slowdown,
                                   struct hapt_arena *arena);
/* Opens communicators of all ranks and of each axis. Collective over `comm`, whose ranks are the team's, in order;
 * `who` for messages, borrowed. */
enum hapt_status hapt_team_connect(struct hapt_team *team, MPI_Comm comm, const char *who, double timeout_s);
/*
 * Has what the engines' links move traded by the devices themselves, where each rank has one of its own on a back end
 * with groups, nothing rehearses a slow link, and no rank's environment has HAPT_COLLECTIVES=host; else, and where that
 * fails, it goes on passing through the host. `whole`: a group of the team's ranks that was made already, which is then
 * the team's; NULL: there is none. `text` (HAPT_TEAM_CARRIER_CHARS): what trades, "NCCL 2.28.9", or why the host does;
 * "" for one rank. Behind hapt_team_prepare or with hapt_team_reserve to follow. Collective over the team.
 */
#define HAPT_TEAM_CARRIER_CHARS 192
enum hapt_status hapt_team_use_devices(struct hapt_team *team, const struct hapt_backend *backend,
                                       struct hapt_device *device, struct hapt_group *whole, char *text);
/* Device memory for the moves of a program that was prepared since, and for a rebuilding; nothing where the host
 * carries them. Rank-local. */
enum hapt_status hapt_team_reserve(struct hapt_team *team);
enum hapt_status hapt_team_reserve_parts(struct hapt_team *team, unsigned axes, const struct hapt_strided *part);
void hapt_team_release(struct hapt_team *team);
/* What the engine calls; refers to the team. */
void hapt_team_links(struct hapt_team *team, struct hapt_engine_links *links);
/* The ranks of mesh axes (bits). */
struct hapt_collective *hapt_team_over(const struct hapt_team *team, unsigned axes);
/* Rank r of mesh axes `axes` has the runs part[r] of `whole`, in their place; all get all. `whole` is the device's
 * where the team's devices trade among themselves, the host's elsewhere. Collective over the ranks of the axes. */
enum hapt_status hapt_team_rebuild(struct hapt_team *team, unsigned axes, const char *what,
                                   const struct hapt_strided *part, void *whole);
/* "WHAT of step 3, microbatch 1", for messages. */
const char *hapt_team_describe(const struct hapt_team *team, const char *what, char *text, size_t size);

/* Computations take the time that the device's own clock tells, where its back end has one, instead of CPU time. Behind
 * hapt_team_prepare. */
void hapt_team_clock(struct hapt_team *team, const struct hapt_backend *backend, struct hapt_device *device);
/* A computation of a slowed device begins; ends: no earlier than its start plus slowdown x the CPU or device time it
 * took. Of a modelled device it ends `length_s` behind its start, which is the end of the one before or when what it
 * waited for since was there: that this process was woken late delays no device. */
void hapt_team_stretch_begin(struct hapt_team *team);
void hapt_team_stretch_end(struct hapt_team *team);
void hapt_team_model(struct hapt_team *team, double length_s);
/* The device cannot go on before `time_s`. */
void hapt_team_waited(struct hapt_team *team, double time_s);

#endif
