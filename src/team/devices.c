/* What a team's devices trade among themselves: their groups, and the moves of a program on device memory. */
#include "devices.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ALIGNMENT = 256 };

struct team_devices {
    const struct hapt_backend *backend;
    const struct hapt_groups *groups;
    struct hapt_device *device;
    struct hapt_queue *queue; /* the engine's */
    struct hapt_device_group whole, along[HAPT_MESH_AXES];
    size_t *bound, *receive; /* [ranks of the team + 1] */
    char *scratch;           /* device memory for parts that do not stand in one piece */
    size_t scratch_bytes;
};

/* One thing that ranks do together. */
struct errand {
    struct team_devices *devices;
    const struct hapt_device_group *among;
    struct hapt_group *group;
    struct hapt_collective *over; /* the same ranks */
    const char *what;
};

/* What was asked, with that answer, comes into the queue. */
static enum hapt_status settle(const struct errand *errand, const char *answer)
{
    return hapt_device_group_settle(errand->among, errand->what, answer);
}

/* ... and is done. */
static enum hapt_status finish(const struct errand *errand, const char *answer)
{
    return hapt_device_group_finish(errand->among, errand->what, answer);
}

static struct errand errand_over(const struct hapt_team *team, unsigned axes, const char *what)
{
    struct team_devices *devices = team->devices;
    const struct hapt_device_group *among = axes == 3u ? &devices->whole : &devices->along[axes >> 1];
    return (struct errand){devices, among, among->group, among->over, what};
}

/* ---- moves ---- */

static size_t part_bytes(const struct hapt_strided *part)
{
    return part->count * part->run;
}

/* Do the parts stand one behind the other, each in one piece? */
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

static size_t scratch_of(const struct hapt_team *team, const struct hapt_team_move *move)
{
    const int ranks = team->sharding->axis[move->axis].size;
    struct team_devices *devices = team->devices;
    switch (move->kind) {
    case HAPT_COLLECTIVE_REDUCE_SCATTER:
    case HAPT_COLLECTIVE_ALL_GATHER:
    case HAPT_COLLECTIVE_GROUPED_BROADCAST:
        return are_dense(ranks, move->part) ? 0 : bound_parts(ranks, move->part, 1, devices->bound);
    case HAPT_COLLECTIVE_ALL_TO_ALL:
        return aligned(bound_lists(ranks, move->send, devices->bound)) +
               bound_lists(ranks, move->receive, devices->receive);
    case HAPT_COLLECTIVE_ALL_REDUCE:
    case HAPT_COLLECTIVE_SLICE:
    case HAPT_COLLECTIVE_NONE:
    case HAPT_COLLECTIVE_COUNT: break;
    }
    return 0;
}

/* `mine` NULL: it stands in its place. */
static enum hapt_status gather(const struct errand *errand, int ranks, const struct hapt_strided *part,
                               const void *mine, void *whole)
{
    const struct team_devices *devices = errand->devices;
    const struct hapt_groups *groups = devices->groups;
    const int rank = hapt_collective_rank(errand->over);
    const struct hapt_strided_list all = {ranks, part}, own = {1, &part[rank]};
    if (bound_parts(ranks, part, 1, devices->bound) == 0) return HAPT_OK;
    if (are_dense(ranks, part))
        return finish(errand, groups->all_gather(errand->group, devices->queue, devices->bound,
                                                 mine ? mine : (char *)whole + devices->bound[rank], whole));
    if (!mine) {
        mine = devices->scratch + devices->bound[rank];
        HAPT_TRY(settle(errand, groups->pack(devices->queue, &own, whole, devices->scratch + devices->bound[rank])));
    }
    HAPT_TRY(settle(errand, groups->all_gather(errand->group, devices->queue, devices->bound, mine, devices->scratch)));
    return finish(errand, groups->unpack(devices->queue, &all, whole, devices->scratch));
}

static enum hapt_status reduce_scatter(const struct errand *errand, int ranks, enum hapt_dtype dtype,
                                       const struct hapt_strided *part, const void *partial, void *mine)
{
    const struct team_devices *devices = errand->devices;
    const struct hapt_groups *groups = devices->groups;
    const struct hapt_strided_list all = {ranks, part};
    if (bound_parts(ranks, part, hapt_dtype_bytes(dtype), devices->bound) == 0) return HAPT_OK;
    if (!are_dense(ranks, part)) {
        HAPT_TRY(settle(errand, groups->pack(devices->queue, &all, partial, devices->scratch)));
        partial = devices->scratch;
    }
    return finish(errand, groups->reduce_scatter(errand->group, devices->queue, dtype, devices->bound, partial, mine));
}

static enum hapt_status trade(const struct errand *errand, int ranks, const struct hapt_team_move *move,
                              const void *from, void *to)
{
    const struct team_devices *devices = errand->devices;
    const struct hapt_groups *groups = devices->groups;
    char *sent = devices->scratch, *received = sent + aligned(bound_lists(ranks, move->send, devices->bound));
    const char *fault = NULL;
    bound_lists(ranks, move->receive, devices->receive);
    for (int r = 0; r < ranks && !fault; r++)
        fault = groups->pack(devices->queue, &move->send[r], from, sent + devices->bound[r]);
    HAPT_TRY(settle(errand, fault));
    HAPT_TRY(
        settle(errand, groups->trade(errand->group, devices->queue, devices->bound, sent, devices->receive, received)));
    for (int r = 0; r < ranks && !fault; r++)
        fault = groups->unpack(devices->queue, &move->receive[r], to, received + devices->receive[r]);
    return finish(errand, fault);
}

enum hapt_status team_devices_move(struct hapt_team *team, const struct hapt_team_move *move, const char *what,
                                   const void *from, void *to)
{
    const struct errand errand = errand_over(team, 1u << move->axis, what);
    const int ranks = hapt_collective_ranks(errand.over);
    switch (move->kind) {
    case HAPT_COLLECTIVE_ALL_REDUCE:
        if (move->elements == 0) return HAPT_OK;
        return finish(&errand, team->devices->groups->all_reduce(errand.group, team->devices->queue, false, move->dtype,
                                                                 from, to, move->elements));
    case HAPT_COLLECTIVE_REDUCE_SCATTER: return reduce_scatter(&errand, ranks, move->dtype, move->part, from, to);
    case HAPT_COLLECTIVE_ALL_GATHER:
    case HAPT_COLLECTIVE_GROUPED_BROADCAST: return gather(&errand, ranks, move->part, from, to);
    case HAPT_COLLECTIVE_ALL_TO_ALL: return trade(&errand, ranks, move, from, to);
    case HAPT_COLLECTIVE_SLICE:
    case HAPT_COLLECTIVE_NONE:
    case HAPT_COLLECTIVE_COUNT: break;
    }
    return HAPT_OK;
}

enum hapt_status team_devices_slice(struct hapt_team *team, const struct hapt_strided_list *own, const void *from,
                                    void *to)
{
    const char *fault = team->devices->groups->pack(team->devices->queue, own, from, to);
    return fault ? hapt_fail(HAPT_ERR_INTERNAL, "see hapt doctor", "a slice of a tensor: %s", fault) : HAPT_OK;
}

enum hapt_status team_devices_rebuild(struct hapt_team *team, unsigned axes, const char *what,
                                      const struct hapt_strided *part, void *whole)
{
    const struct errand errand = errand_over(team, axes, what);
    return gather(&errand, hapt_collective_ranks(errand.over), part, NULL, whole);
}

enum hapt_status team_devices_all_reduce(struct hapt_team *team, unsigned axes, const char *what, float *data,
                                         size_t elements)
{
    const struct errand errand = errand_over(team, axes, what);
    if (elements == 0) return HAPT_OK;
    return finish(&errand, team->devices->groups->all_reduce(errand.group, team->devices->queue, false, HAPT_F32, data,
                                                             data, elements));
}

enum hapt_status team_devices_reduce_scatter(struct hapt_team *team, unsigned axes, const char *what, float *data,
                                             const size_t *bound)
{
    const struct errand errand = errand_over(team, axes, what);
    const int ranks = hapt_collective_ranks(errand.over), rank = hapt_collective_rank(errand.over);
    if (bound[0] == bound[ranks]) return HAPT_OK;
    return finish(&errand, team->devices->groups->reduce_scatter(errand.group, team->devices->queue, HAPT_F32, bound,
                                                                 data, data + bound[rank]));
}

enum hapt_status team_devices_all_gather(struct hapt_team *team, unsigned axes, const char *what, float *data,
                                         const size_t *bound)
{
    const struct errand errand = errand_over(team, axes, what);
    const int ranks = hapt_collective_ranks(errand.over), rank = hapt_collective_rank(errand.over);
    for (int r = 0; r <= ranks; r++) team->devices->bound[r] = bound[r] * sizeof *data;
    if (bound[0] == bound[ranks]) return HAPT_OK;
    return finish(&errand, team->devices->groups->all_gather(errand.group, team->devices->queue, team->devices->bound,
                                                             data + bound[rank], data));
}

/* ---- making and ending ---- */

/* Groups of all ranks, where there is none yet, and of each axis. */
static enum hapt_status make_groups(struct hapt_team *team, char fault[HAPT_GROUPS_TEXT_CHARS])
{
    struct team_devices *devices = team->devices;
    if (!devices->whole.group) {
        HAPT_TRY(hapt_device_group_create(&devices->whole, fault));
        hapt_device_group_connect(&devices->whole, devices->whole.group, false, hapt_collective_rank(team->whole),
                                  team->size, fault);
    }
    for (int axis = 0; axis < HAPT_MESH_AXES; axis++) {
        if (!team->along[axis]) continue;
        devices->along[axis] = devices->whole;
        if (team->along[axis] == team->whole) continue;
        devices->along[axis].over = team->along[axis];
        devices->along[axis].group = NULL;
        HAPT_TRY(hapt_device_group_split(&devices->whole, team->place[1 - axis], team->place[axis],
                                         &devices->along[axis].group, fault));
        hapt_device_group_connect(&devices->whole, devices->along[axis].group, false,
                                  hapt_collective_rank(team->along[axis]), hapt_collective_ranks(team->along[axis]),
                                  fault);
    }
    return HAPT_OK;
}

static struct team_devices *create(const struct hapt_team *team, const struct hapt_backend *backend,
                                   const struct hapt_groups *groups, struct hapt_device *device)
{
    struct team_devices *devices = calloc(1, sizeof *devices);
    if (!devices) return NULL;
    *devices = (struct team_devices){
        .backend = backend, .groups = groups, .device = device, .queue = backend->queue(device, HAPT_QUEUE_COMPUTE)};
    devices->whole = (struct hapt_device_group){
        .backend = backend, .groups = groups, .device = device, .queue = devices->queue, .over = team->whole};
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
        if (devices->along[axis].group != devices->whole.group) devices->groups->destroy(devices->along[axis].group);
    devices->groups->destroy(devices->whole.group);
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
    for (int op = 0; team->devices && team->move && op < team->program->graph->op_count; op++) {
        const size_t bytes = scratch_of(team, &team->move[op]);
        if (bytes > most) most = bytes;
    }
    return team->devices ? grow_scratch(team->devices, most) : HAPT_OK;
}

enum hapt_status hapt_team_reserve_parts(struct hapt_team *team, unsigned axes, const struct hapt_strided *part)
{
    if (!team->devices) return HAPT_OK;
    const int ranks = hapt_collective_ranks(hapt_team_over(team, axes));
    if (are_dense(ranks, part)) return HAPT_OK;
    return grow_scratch(team->devices, bound_parts(ranks, part, 1, team->devices->bound));
}

/* Groups and memory, once it is known that all ranks can: on all of them or, with the reason, on none. */
static enum hapt_status set_up(struct hapt_team *team, struct hapt_group *whole, char reason[HAPT_GROUPS_TEXT_CHARS])
{
    if (!team->devices)
        snprintf(reason, HAPT_GROUPS_TEXT_CHARS, "a host has no memory left");
    else if (hapt_team_reserve(team) != HAPT_OK) {
        hapt_fail_reset(); /* there is another way */
        snprintf(reason, HAPT_GROUPS_TEXT_CHARS, "a device has no memory left for parts of tensors on their way");
    }
    if (team->devices) team->devices->whole.group = whole;
    HAPT_TRY(hapt_device_groups_agree(team->whole, reason));
    if (reason[0]) return HAPT_OK;
    HAPT_TRY(make_groups(team, reason));
    return hapt_device_groups_agree(team->whole, reason);
}

enum hapt_status hapt_team_use_devices(struct hapt_team *team, const struct hapt_backend *backend,
                                       struct hapt_device *device, struct hapt_group *whole, char *text)
{
    char reason[HAPT_GROUPS_TEXT_CHARS];
    const char *ignored;
    const struct hapt_groups *groups;
    text[0] = '\0';
    if (team->size == 1) return HAPT_OK;
    HAPT_TRY(hapt_device_groups_find(team->whole, backend, &groups, reason));
    if (!reason[0]) {
        team->devices = create(team, backend, groups, device);
        HAPT_TRY(set_up(team, whole, reason));
    }
    snprintf(text, HAPT_TEAM_CARRIER_CHARS, "%s%s", reason[0] ? "the host: " : groups->library(), reason);
    if (!reason[0]) return HAPT_OK;
    if (whole && !(team->devices && team->devices->whole.group)) backend->groups(&ignored)->destroy(whole);
    team_devices_destroy(team->devices);
    team->devices = NULL;
    return HAPT_OK;
}
