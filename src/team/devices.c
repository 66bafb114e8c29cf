/* Collectives that a team's devices run: their communicators, and a program's collectives on device memory. */
#include "devices.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ALIGNMENT = 256 };

struct team_devices {
    const struct hapt_backend *backend;
    const struct hapt_device_comm_ops *ops;
    struct hapt_device *device;
    struct hapt_queue *queue; /* the engine's */
    struct hapt_device_group all_ranks, axis_comm[HAPT_MESH_AXES];
    size_t *bound, *receive; /* [ranks of the team + 1] */
    char *scratch;           /* device memory for parts that are not contiguous */
    size_t scratch_bytes;
};

/* A collective to run. */
struct device_collective {
    struct team_devices *devices;
    const struct hapt_device_group *among;
    struct hapt_device_comm *comm;
    struct hapt_collective *over; /* the same ranks */
    const char *what;
};

/* Waits until the work of the call that returned `answer` is in the queue. */
static enum hapt_status wait_queued(const struct device_collective *running, const char *answer)
{
    return hapt_device_group_settle(running->among, running->what, answer);
}

/* Waits until that work is done. */
static enum hapt_status wait_done(const struct device_collective *running, const char *answer)
{
    return hapt_device_group_finish(running->among, running->what, answer);
}

static struct device_collective device_collective_on(const struct hapt_team *team, unsigned axes, const char *what)
{
    struct team_devices *devices = team->devices;
    const struct hapt_device_group *among = axes == 3u ? &devices->all_ranks : &devices->axis_comm[axes >> 1];
    return (struct device_collective){devices, among, among->group, among->over, what};
}

/* ---- collectives ---- */

static size_t part_bytes(const struct hapt_strided *part)
{
    return part->count * part->run;
}

/* True if the parts are contiguous and follow each other without gaps. */
static bool are_dense(int ranks, const struct hapt_strided *part)
{
    size_t at = 0;
    for (int r = 0; r < ranks; r++) {
        const size_t bytes = part_bytes(&part[r]);
        if (bytes > 0 && (part[r].offset != at || (part[r].count > 1 && part[r].stride != part[r].run))) return false;
        at += bytes;
    }
    return true;
}

static size_t bound_parts(int ranks, const struct hapt_strided *part, size_t unit, size_t *bound)
{
    bound[0] = 0;
    for (int r = 0; r < ranks; r++) bound[r + 1] = bound[r] + part_bytes(&part[r]) / unit;
    return bound[ranks];
}

static size_t bound_lists(int ranks, const struct hapt_strided_list *list, size_t *bound)
{
    bound[0] = 0;
    for (int r = 0; r < ranks; r++) bound[r + 1] = bound[r] + hapt_strided_bytes(&list[r]);
    return bound[ranks];
}

static size_t aligned(size_t bytes)
{
    return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

static size_t scratch_of(const struct hapt_team *team, const struct hapt_team_collective *planned)
{
    const int ranks = team->sharding->axis[planned->axis].size;
    struct team_devices *devices = team->devices;
    switch (planned->kind) {
    case HAPT_COLLECTIVE_REDUCE_SCATTER:
    case HAPT_COLLECTIVE_ALL_GATHER:
    case HAPT_COLLECTIVE_GROUPED_BROADCAST:
        return are_dense(ranks, planned->part) ? 0 : bound_parts(ranks, planned->part, 1, devices->bound);
    case HAPT_COLLECTIVE_ALL_TO_ALL:
        return aligned(bound_lists(ranks, planned->send, devices->bound)) +
               bound_lists(ranks, planned->receive, devices->receive);
    case HAPT_COLLECTIVE_ALL_REDUCE:
    case HAPT_COLLECTIVE_SLICE:
    case HAPT_COLLECTIVE_NONE:
    case HAPT_COLLECTIVE_COUNT: break;
    }
    return 0;
}

/* All-gather. `mine` NULL: this rank's part is in `whole` already. */
static enum hapt_status gather(const struct device_collective *running, int ranks, const struct hapt_strided *part,
                               const void *mine, void *whole)
{
    const struct team_devices *devices = running->devices;
    const struct hapt_device_comm_ops *ops = devices->ops;
    const int rank = hapt_collective_rank(running->over);
    const struct hapt_strided_list all = {ranks, part}, own = {1, &part[rank]};
    if (bound_parts(ranks, part, 1, devices->bound) == 0) return HAPT_OK;
    if (are_dense(ranks, part))
        return wait_done(running, ops->all_gather(running->comm, devices->queue, devices->bound,
                                                  mine ? mine : (char *)whole + devices->bound[rank], whole));
    if (!mine) {
        mine = devices->scratch + devices->bound[rank];
        HAPT_TRY(wait_queued(running, ops->pack(devices->queue, &own, whole, devices->scratch + devices->bound[rank])));
    }
    HAPT_TRY(
        wait_queued(running, ops->all_gather(running->comm, devices->queue, devices->bound, mine, devices->scratch)));
    return wait_done(running, ops->unpack(devices->queue, &all, whole, devices->scratch));
}

static enum hapt_status reduce_scatter(const struct device_collective *running, int ranks, enum hapt_dtype dtype,
                                       const struct hapt_strided *part, const void *partial, void *mine)
{
    const struct team_devices *devices = running->devices;
    const struct hapt_device_comm_ops *ops = devices->ops;
    const struct hapt_strided_list all = {ranks, part};
    if (bound_parts(ranks, part, hapt_dtype_bytes(dtype), devices->bound) == 0) return HAPT_OK;
    if (!are_dense(ranks, part)) {
        HAPT_TRY(wait_queued(running, ops->pack(devices->queue, &all, partial, devices->scratch)));
        partial = devices->scratch;
    }
    return wait_done(running, ops->reduce_scatter(running->comm, devices->queue, dtype, devices->bound, partial, mine));
}

static enum hapt_status all_to_all(const struct device_collective *running, int ranks,
                                   const struct hapt_team_collective *planned, const void *from, void *to)
{
    const struct team_devices *devices = running->devices;
    const struct hapt_device_comm_ops *ops = devices->ops;
    char *sent = devices->scratch, *received = sent + aligned(bound_lists(ranks, planned->send, devices->bound));
    const char *fault = NULL;
    bound_lists(ranks, planned->receive, devices->receive);
    for (int r = 0; r < ranks && !fault; r++)
        fault = ops->pack(devices->queue, &planned->send[r], from, sent + devices->bound[r]);
    HAPT_TRY(wait_queued(running, fault));
    HAPT_TRY(wait_queued(
        running, ops->all_to_all(running->comm, devices->queue, devices->bound, sent, devices->receive, received)));
    for (int r = 0; r < ranks && !fault; r++)
        fault = ops->unpack(devices->queue, &planned->receive[r], to, received + devices->receive[r]);
    return wait_done(running, fault);
}

enum hapt_status team_devices_collective(struct hapt_team *team, const struct hapt_team_collective *planned,
                                         const char *what, const void *from, void *to)
{
    const struct device_collective running = device_collective_on(team, 1u << planned->axis, what);
    const int ranks = hapt_collective_ranks(running.over);
    switch (planned->kind) {
    case HAPT_COLLECTIVE_ALL_REDUCE:
        if (planned->elements == 0) return HAPT_OK;
        return wait_done(&running, team->devices->ops->all_reduce(running.comm, team->devices->queue, false,
                                                                  planned->dtype, from, to, planned->elements));
    case HAPT_COLLECTIVE_REDUCE_SCATTER:
        return reduce_scatter(&running, ranks, planned->dtype, planned->part, from, to);
    case HAPT_COLLECTIVE_ALL_GATHER:
    case HAPT_COLLECTIVE_GROUPED_BROADCAST: return gather(&running, ranks, planned->part, from, to);
    case HAPT_COLLECTIVE_ALL_TO_ALL: return all_to_all(&running, ranks, planned, from, to);
    case HAPT_COLLECTIVE_SLICE:
    case HAPT_COLLECTIVE_NONE:
    case HAPT_COLLECTIVE_COUNT: break;
    }
    return HAPT_OK;
}

enum hapt_status team_devices_slice(struct hapt_team *team, const struct hapt_strided_list *own, const void *from,
                                    void *to)
{
    const char *fault = team->devices->ops->pack(team->devices->queue, own, from, to);
    return fault ? hapt_fail(HAPT_ERR_INTERNAL, "see hapt doctor", "a slice of a tensor: %s", fault) : HAPT_OK;
}

enum hapt_status team_devices_rebuild(struct hapt_team *team, unsigned axes, const char *what,
                                      const struct hapt_strided *part, void *whole)
{
    const struct device_collective running = device_collective_on(team, axes, what);
    return gather(&running, hapt_collective_ranks(running.over), part, NULL, whole);
}

enum hapt_status team_devices_all_reduce(struct hapt_team *team, unsigned axes, const char *what, float *data,
                                         size_t elements)
{
    const struct device_collective running = device_collective_on(team, axes, what);
    if (elements == 0) return HAPT_OK;
    return wait_done(&running, team->devices->ops->all_reduce(running.comm, team->devices->queue, false, HAPT_F32, data,
                                                              data, elements));
}

enum hapt_status team_devices_reduce_scatter(struct hapt_team *team, unsigned axes, const char *what, float *data,
                                             const size_t *bound)
{
    const struct device_collective running = device_collective_on(team, axes, what);
    const int ranks = hapt_collective_ranks(running.over), rank = hapt_collective_rank(running.over);
    if (bound[0] == bound[ranks]) return HAPT_OK;
    return wait_done(&running, team->devices->ops->reduce_scatter(running.comm, team->devices->queue, HAPT_F32, bound,
                                                                  data, data + bound[rank]));
}

enum hapt_status team_devices_all_gather(struct hapt_team *team, unsigned axes, const char *what, float *data,
                                         const size_t *bound)
{
    const struct device_collective running = device_collective_on(team, axes, what);
    const int ranks = hapt_collective_ranks(running.over), rank = hapt_collective_rank(running.over);
    for (int r = 0; r <= ranks; r++) team->devices->bound[r] = bound[r] * sizeof *data;
    if (bound[0] == bound[ranks]) return HAPT_OK;
    return wait_done(&running, team->devices->ops->all_gather(running.comm, team->devices->queue, team->devices->bound,
                                                              data + bound[rank], data));
}

/* ---- creation and release ---- */

/* Creates communicators of all ranks, if there is none yet, and of each axis. */
static enum hapt_status make_comms(struct hapt_team *team, char fault[HAPT_GROUPS_TEXT_CHARS])
{
    struct team_devices *devices = team->devices;
    if (!devices->all_ranks.group) {
        HAPT_TRY(hapt_device_group_create(&devices->all_ranks, fault));
        hapt_device_group_connect(&devices->all_ranks, devices->all_ranks.group, false,
                                  hapt_collective_rank(team->all_ranks), team->size, fault);
    }
    for (int axis = 0; axis < HAPT_MESH_AXES; axis++) {
        if (!team->axis_comm[axis]) continue;
        devices->axis_comm[axis] = devices->all_ranks;
        if (team->axis_comm[axis] == team->all_ranks) continue;
        devices->axis_comm[axis].over = team->axis_comm[axis];
        devices->axis_comm[axis].group = NULL;
        HAPT_TRY(hapt_device_group_split(&devices->all_ranks, team->mesh_coordinate[1 - axis],
                                         team->mesh_coordinate[axis], &devices->axis_comm[axis].group, fault));
        hapt_device_group_connect(&devices->all_ranks, devices->axis_comm[axis].group, false,
                                  hapt_collective_rank(team->axis_comm[axis]),
                                  hapt_collective_ranks(team->axis_comm[axis]), fault);
    }
    return HAPT_OK;
}

static struct team_devices *create(const struct hapt_team *team, const struct hapt_backend *backend,
                                   const struct hapt_device_comm_ops *ops, struct hapt_device *device)
{
    struct team_devices *devices = calloc(1, sizeof *devices);
    if (!devices) return NULL;
    *devices = (struct team_devices){
        .backend = backend, .ops = ops, .device = device, .queue = backend->queue(device, HAPT_QUEUE_COMPUTE)};
    devices->all_ranks = (struct hapt_device_group){
        .backend = backend, .groups = ops, .device = device, .queue = devices->queue, .over = team->all_ranks};
    devices->bound = calloc((size_t)team->size + 1, sizeof *devices->bound);
    devices->receive = calloc((size_t)team->size + 1, sizeof *devices->receive);
    if (devices->bound && devices->receive) return devices;
    team_devices_destroy(devices);
    return NULL;
}

void team_devices_destroy(struct team_devices *devices)
{
    if (!devices) return;
    for (int axis = 0; axis < HAPT_MESH_AXES; axis++)
        if (devices->axis_comm[axis].group != devices->all_ranks.group)
            devices->ops->destroy(devices->axis_comm[axis].group);
    devices->ops->destroy(devices->all_ranks.group);
    if (devices->scratch) devices->backend->free(devices->device, devices->scratch);
    free(devices->bound);
    free(devices->receive);
    free(devices);
}

static enum hapt_status grow_scratch(struct team_devices *devices, size_t bytes)
{
    void *memory;
    if (bytes <= devices->scratch_bytes) return HAPT_OK;
    if (devices->scratch) devices->backend->free(devices->device, devices->scratch);
    devices->scratch = NULL;
    devices->scratch_bytes = 0;
    HAPT_TRY(devices->backend->allocate(devices->device, bytes, &memory));
    devices->scratch = memory;
    devices->scratch_bytes = bytes;
    return HAPT_OK;
}

enum hapt_status hapt_team_reserve(struct hapt_team *team)
{
    size_t most = 0;
    for (int op = 0; team->devices && team->collective && op < team->program->graph->op_count; op++) {
        const size_t bytes = scratch_of(team, &team->collective[op]);
        if (bytes > most) most = bytes;
    }
    return team->devices ? grow_scratch(team->devices, most) : HAPT_OK;
}

enum hapt_status hapt_team_reserve_collective(struct hapt_team *team, const struct hapt_team_collective *planned)
{
    return team->devices ? grow_scratch(team->devices, scratch_of(team, planned)) : HAPT_OK;
}

enum hapt_status hapt_team_reserve_parts(struct hapt_team *team, unsigned axes, const struct hapt_strided *part)
{
    if (!team->devices) return HAPT_OK;
    const int ranks = hapt_collective_ranks(hapt_team_comm(team, axes));
    if (are_dense(ranks, part)) return HAPT_OK;
    return grow_scratch(team->devices, bound_parts(ranks, part, 1, team->devices->bound));
}

/* Communicators and memory, once all ranks are known to be able: on all ranks or, with the reason, on none. */
static enum hapt_status set_up(struct hapt_team *team, struct hapt_device_comm *existing,
                               char reason[HAPT_GROUPS_TEXT_CHARS])
{
    if (!team->devices)
        snprintf(reason, HAPT_GROUPS_TEXT_CHARS, "a host has no memory left");
    else if (hapt_team_reserve(team) != HAPT_OK) {
        hapt_fail_reset(); /* the host carries the collectives instead */
        snprintf(reason, HAPT_GROUPS_TEXT_CHARS, "a device has no memory left for communication buffers");
    }
    if (team->devices) team->devices->all_ranks.group = existing;
    HAPT_TRY(hapt_device_groups_agree(team->all_ranks, reason));
    if (reason[0]) return HAPT_OK;
    HAPT_TRY(make_comms(team, reason));
    return hapt_device_groups_agree(team->all_ranks, reason);
}

enum hapt_status hapt_team_use_devices(struct hapt_team *team, const struct hapt_backend *backend,
                                       struct hapt_device *device, struct hapt_device_comm *existing, char *text)
{
    char reason[HAPT_GROUPS_TEXT_CHARS];
    const char *ignored;
    const struct hapt_device_comm_ops *ops;
    text[0] = '\0';
    if (team->size == 1) return HAPT_OK;
    HAPT_TRY(hapt_device_groups_find(team->all_ranks, backend, &ops, reason));
    if (!reason[0]) {
        team->devices = create(team, backend, ops, device);
        HAPT_TRY(set_up(team, existing, reason));
    }
    snprintf(text, HAPT_TEAM_TRANSPORT_CHARS, "%s%s", reason[0] ? "the host: " : ops->library(), reason);
    if (!reason[0]) return HAPT_OK;
    if (existing && !(team->devices && team->devices->all_ranks.group))
        backend->device_comms(&ignored)->destroy(existing);
    team_devices_destroy(team->devices);
    team->devices = NULL;
    return HAPT_OK;
}
