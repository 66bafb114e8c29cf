/* What a team's devices trade among themselves: whether they can, their groups, and the moves of a program on device memory. */
#include "devices.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hapt/env.h"

enum { REASON_CHARS = 160, ALIGNMENT = 256 };

struct team_devices {
    const struct hapt_backend *backend;
    const struct hapt_groups *groups;
    struct hapt_device *device;
    struct hapt_queue *queue; /* the engine's */
    struct hapt_group *whole, *along[HAPT_MESH_AXES];
    size_t *bound, *receive; /* [ranks of the team + 1] */
    char *scratch;           /* device memory for parts that do not stand in one piece */
    size_t scratch_bytes;
};

/* ---- waiting ---- */

/* One thing that ranks do together. */
struct errand {
    struct team_devices *devices;
    struct hapt_group *group;
    struct hapt_collective *over; /* the same ranks */
    const char *what;
};

static enum hapt_status broken(const struct errand *errand, const char *fault)
{
    char text[REASON_CHARS];
    snprintf(text, sizeof text, "%s", fault);
    errand->devices->groups->abort(errand->group);
    return hapt_collective_broken(errand->over, errand->what, text);
}

/* Until the group has settled and the event, where there is one, has come; *late instead when the time has passed. */
static const char *poll(const struct errand *errand, struct hapt_event *event, double timeout_s, bool *late)
{
    const struct team_devices *devices = errand->devices;
    const double deadline_s = hapt_time_s() + timeout_s;
    unsigned spins = 0;
    *late = false;
    for (;;) {
        bool settled;
        const char *fault = devices->groups->settled(errand->group, &settled);
        if (fault || (settled && (!event || devices->backend->done(event)))) return fault;
        if ((*late = hapt_time_s() > deadline_s)) return NULL;
        hapt_link_pause(&spins);
    }
}

static enum hapt_status wait_for(const struct errand *errand, struct hapt_event *event)
{
    bool late;
    const char *fault = poll(errand, event, hapt_collective_timeout_s(errand->over), &late);
    if (fault) return broken(errand, fault);
    if (!late) return HAPT_OK;
    errand->devices->groups->abort(errand->group);
    return hapt_collective_late(errand->over, errand->what);
}

/* What was asked, with that answer, comes into the queue. */
static enum hapt_status settle(const struct errand *errand, const char *fault)
{
    return fault ? broken(errand, fault) : wait_for(errand, NULL);
}

/* ... and is done. */
static enum hapt_status finish(const struct errand *errand, const char *fault)
{
    const struct hapt_backend *backend = errand->devices->backend;
    HAPT_TRY(settle(errand, fault));
    struct hapt_event *event = backend->record(errand->devices->queue);
    HAPT_TRY(wait_for(errand, event));
    return backend->wait(event);
}

static struct errand errand_over(const struct hapt_team *team, unsigned axes, const char *what)
{
    struct team_devices *devices = team->devices;
    return (struct errand){devices, axes == 3u ? devices->whole : devices->along[axes >> 1], hapt_team_over(team, axes), what};
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
        return aligned(bound_lists(ranks, move->send, devices->bound)) + bound_lists(ranks, move->receive, devices->receive);
    case HAPT_COLLECTIVE_ALL_REDUCE:
    case HAPT_COLLECTIVE_SLICE:
    case HAPT_COLLECTIVE_NONE:
    case HAPT_COLLECTIVE_COUNT:
        break;
    }
    return 0;
}

/* `mine` NULL: it stands in its place. */
static enum hapt_status gather(const struct errand *errand, int ranks, const struct hapt_strided *part, const void *mine, void *whole)
{
    const struct team_devices *devices = errand->devices;
    const struct hapt_groups *groups = devices->groups;
    const int rank = hapt_collective_rank(errand->over);
    const struct hapt_strided_list all = {ranks, part}, own = {1, &part[rank]};
    if (bound_parts(ranks, part, 1, devices->bound) == 0) return HAPT_OK;
    if (are_dense(ranks, part))
        return finish(errand, groups->all_gather(errand->group, devices->queue, devices->bound, mine ? mine : (char *)whole + devices->bound[rank], whole));
    if (!mine) {
        mine = devices->scratch + devices->bound[rank];
        HAPT_TRY(settle(errand, groups->pack(devices->queue, &own, whole, devices->scratch + devices->bound[rank])));
    }
    HAPT_TRY(settle(errand, groups->all_gather(errand->group, devices->queue, devices->bound, mine, devices->scratch)));
    return finish(errand, groups->unpack(devices->queue, &all, whole, devices->scratch));
}

static enum hapt_status reduce_scatter(const struct errand *errand, int ranks, enum hapt_dtype dtype, const struct hapt_strided *part,
                                       const void *partial, void *mine)
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

static enum hapt_status trade(const struct errand *errand, int ranks, const struct hapt_team_move *move, const void *from, void *to)
{
    const struct team_devices *devices = errand->devices;
    const struct hapt_groups *groups = devices->groups;
    char *sent = devices->scratch, *received = sent + aligned(bound_lists(ranks, move->send, devices->bound));
    const char *fault = NULL;
    bound_lists(ranks, move->receive, devices->receive);
    for (int r = 0; r < ranks && !fault; r++) fault = groups->pack(devices->queue, &move->send[r], from, sent + devices->bound[r]);
    HAPT_TRY(settle(errand, fault));
    HAPT_TRY(settle(errand, groups->trade(errand->group, devices->queue, devices->bound, sent, devices->receive, received)));
    for (int r = 0; r < ranks && !fault; r++) fault = groups->unpack(devices->queue, &move->receive[r], to, received + devices->receive[r]);
    return finish(errand, fault);
}

enum hapt_status team_devices_move(struct hapt_team *team, const struct hapt_team_move *move, const char *what, const void *from, void *to)
{
    const struct errand errand = errand_over(team, 1u << move->axis, what);
    const int ranks = hapt_collective_ranks(errand.over);
    switch (move->kind) {
    case HAPT_COLLECTIVE_ALL_REDUCE:
        if (move->elements == 0) return HAPT_OK;
        return finish(&errand, team->devices->groups->all_reduce(errand.group, team->devices->queue, false, move->dtype, from, to, move->elements));
    case HAPT_COLLECTIVE_REDUCE_SCATTER:
        return reduce_scatter(&errand, ranks, move->dtype, move->part, from, to);
    case HAPT_COLLECTIVE_ALL_GATHER:
    case HAPT_COLLECTIVE_GROUPED_BROADCAST:
        return gather(&errand, ranks, move->part, from, to);
    case HAPT_COLLECTIVE_ALL_TO_ALL:
        return trade(&errand, ranks, move, from, to);
    case HAPT_COLLECTIVE_SLICE:
    case HAPT_COLLECTIVE_NONE:
    case HAPT_COLLECTIVE_COUNT:
        break;
    }
    return HAPT_OK;
}

enum hapt_status team_devices_slice(struct hapt_team *team, const struct hapt_strided_list *own, const void *from, void *to)
{
    const char *fault = team->devices->groups->pack(team->devices->queue, own, from, to);
    return fault ? hapt_fail(HAPT_ERR_INTERNAL, "see hapt doctor", "a slice of a tensor: %s", fault) : HAPT_OK;
}

enum hapt_status team_devices_rebuild(struct hapt_team *team, unsigned axes, const char *what, const struct hapt_strided *part, void *whole)
{
    const struct errand errand = errand_over(team, axes, what);
    return gather(&errand, hapt_collective_ranks(errand.over), part, NULL, whole);
}

enum hapt_status team_devices_all_reduce(struct hapt_team *team, unsigned axes, const char *what, float *data, size_t elements)
{
    const struct errand errand = errand_over(team, axes, what);
    if (elements == 0) return HAPT_OK;
    return finish(&errand, team->devices->groups->all_reduce(errand.group, team->devices->queue, false, HAPT_F32, data, data, elements));
}

enum hapt_status team_devices_reduce_scatter(struct hapt_team *team, unsigned axes, const char *what, float *data, const size_t *bound)
{
    const struct errand errand = errand_over(team, axes, what);
    const int ranks = hapt_collective_ranks(errand.over), rank = hapt_collective_rank(errand.over);
    if (bound[0] == bound[ranks]) return HAPT_OK;
    return finish(&errand, team->devices->groups->reduce_scatter(errand.group, team->devices->queue, HAPT_F32, bound, data, data + bound[rank]));
}

enum hapt_status team_devices_all_gather(struct hapt_team *team, unsigned axes, const char *what, float *data, const size_t *bound)
{
    const struct errand errand = errand_over(team, axes, what);
    const int ranks = hapt_collective_ranks(errand.over), rank = hapt_collective_rank(errand.over);
    for (int r = 0; r <= ranks; r++) team->devices->bound[r] = bound[r] * sizeof *data;
    if (bound[0] == bound[ranks]) return HAPT_OK;
    return finish(&errand, team->devices->groups->all_gather(errand.group, team->devices->queue, team->devices->bound, data + bound[rank], data));
}

/* ---- making and ending ---- */

/* What a rank says of itself before groups are made; one without a reason is ready. */
struct seat {
    char host[HAPT_HOSTNAME_CHARS], place[16], reason[REASON_CHARS];
};

static const struct hapt_groups *look(const struct hapt_team *team, const struct hapt_backend *backend, struct seat *seat)
{
    const char *choice = getenv("HAPT_COLLECTIVES"), *reason = NULL;
    const struct hapt_groups *groups = NULL;
    int rank = 0;
    memset(seat, 0, sizeof *seat); /* it is sent as bytes */
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    snprintf(seat->host, sizeof seat->host, "%s", hapt_env_host(rank));
    if (choice && *choice)
        snprintf(seat->reason, sizeof seat->reason, "HAPT_COLLECTIVES=%.20s%s", choice,
                 strcmp(choice, "host") == 0 ? "" : " (host is all that it can be)");
    else if (!backend->groups)
        snprintf(seat->reason, sizeof seat->reason, "the back end %s has no collectives of its own", backend->name);
    else if (hapt_collective_is_paced(team->whole))
        snprintf(seat->reason, sizeof seat->reason, "the cluster file has a link rehearsed");
    else if (!(groups = backend->groups(&reason)) || (reason = groups->place(seat->place)))
        snprintf(seat->reason, sizeof seat->reason, "%s", reason);
    return groups;
}

struct roll {
    struct seat mine, *all; /* [size of the team] */
    struct hapt_strided *part;
};

static enum hapt_status call_roll(const struct hapt_team *team, struct roll *roll)
{
    for (int r = 0; r < team->size; r++) roll->part[r] = (struct hapt_strided){(size_t)r * sizeof *roll->all, 1, sizeof *roll->all, 0};
    return hapt_collective_gather_shards(team->whole, "collectives among devices", false, roll->part, &roll->mine, roll->all);
}

/* What ranks say that wait for one that says better. */
static const char waited_in_vain[] = "its ranks did not find each other in time";

/* Why these ranks cannot trade among their devices; "": they can. The same on all. */
static void judge(const struct hapt_team *team, const struct seat *seat, char reason[REASON_CHARS])
{
    reason[0] = '\0';
    for (int r = 0; r < team->size; r++)
        if (seat[r].reason[0] && (!reason[0] || strcmp(reason, waited_in_vain) == 0)) snprintf(reason, REASON_CHARS, "%s", seat[r].reason);
    for (int r = 0; r < team->size && !reason[0]; r++)
        for (int s = 0; s < r && !reason[0]; s++)
            if (strcmp(seat[r].host, seat[s].host) == 0 && strcmp(seat[r].place, seat[s].place) == 0)
                snprintf(reason, REASON_CHARS, "ranks share the device %s of host %.64s", seat[r].place, seat[r].host);
}

/* One group; *fault where there will be none. */
static enum hapt_status join(struct team_devices *devices, struct hapt_collective *over, struct hapt_group **group, char fault[REASON_CHARS])
{
    static const char what[] = "the making of a group of devices";
    struct {
        unsigned char id[HAPT_GROUP_ID_BYTES];
        char fault[REASON_CHARS];
    } word = {0};
    const char *said = hapt_collective_rank(over) == 0 ? devices->groups->id(word.id) : NULL;
    bool late = false;
    if (said) snprintf(word.fault, sizeof word.fault, "%s", said);
    HAPT_TRY(hapt_collective_broadcast(over, what, 0, &word, sizeof word));
    if (word.fault[0]) {
        snprintf(fault, REASON_CHARS, "%s", word.fault);
        return HAPT_OK;
    }
    said = devices->groups->create(word.id, hapt_collective_rank(over), hapt_collective_ranks(over), group);
    const struct errand made = {devices, *group, over, what};
    /* Who has failed waits for the others behind it: they must have given up by then. */
    if (!said) said = poll(&made, NULL, 0.5 * hapt_collective_timeout_s(over), &late);
    if (said || late) snprintf(fault, REASON_CHARS, "%s", said ? said : waited_in_vain);
    if ((said || late) && *group) devices->groups->abort(*group);
    return HAPT_OK;
}

static enum hapt_status make_groups(struct hapt_team *team, char fault[REASON_CHARS])
{
    struct team_devices *devices = team->devices;
    HAPT_TRY(join(devices, team->whole, &devices->whole, fault));
    for (int axis = 0; axis < HAPT_MESH_AXES; axis++) {
        if (!team->along[axis]) continue;
        devices->along[axis] = devices->whole;
        if (team->along[axis] == team->whole) continue;
        devices->along[axis] = NULL;
        if (!fault[0]) HAPT_TRY(join(devices, team->along[axis], &devices->along[axis], fault));
    }
    return HAPT_OK;
}

static struct team_devices *create(const struct hapt_backend *backend, const struct hapt_groups *groups, struct hapt_device *device, int ranks)
{
    struct team_devices *devices = calloc(1, sizeof *devices);
    if (!devices) return NULL;
    *devices = (struct team_devices){.backend = backend, .groups = groups, .device = device, .queue = backend->queue(device, 0)};
    devices->bound = calloc((size_t)ranks + 1, sizeof *devices->bound);
    devices->receive = calloc((size_t)ranks + 1, sizeof *devices->receive);
    if (devices->bound && devices->receive) return devices;
    team_devices_destroy(devices);
    return NULL;
}

void team_devices_destroy(struct team_devices *devices)
{
    if (!devices) return;
    for (int axis = 0; axis < HAPT_MESH_AXES; axis++)
        if (devices->along[axis] != devices->whole) devices->groups->destroy(devices->along[axis]);
    if (devices->whole) devices->groups->destroy(devices->whole);
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
static enum hapt_status set_up(struct hapt_team *team, struct roll *roll, char reason[REASON_CHARS])
{
    struct seat *mine = &roll->mine;
    if (!team->devices)
        snprintf(mine->reason, sizeof mine->reason, "a host has no memory left");
    else if (hapt_team_reserve(team) != HAPT_OK) {
        hapt_fail_reset(); /* there is another way */
        snprintf(mine->reason, sizeof mine->reason, "a device has no memory left for parts of tensors on their way");
    }
    HAPT_TRY(call_roll(team, roll));
    judge(team, roll->all, reason);
    if (reason[0]) return HAPT_OK;
    HAPT_TRY(make_groups(team, mine->reason));
    HAPT_TRY(call_roll(team, roll));
    judge(team, roll->all, reason);
    return HAPT_OK;
}

static enum hapt_status use_devices(struct hapt_team *team, const struct hapt_backend *backend, struct hapt_device *device, struct roll *roll,
                                    char *text)
{
    char reason[REASON_CHARS];
    const struct hapt_groups *groups = look(team, backend, &roll->mine);
    HAPT_TRY(call_roll(team, roll));
    judge(team, roll->all, reason);
    if (!reason[0]) {
        team->devices = create(backend, groups, device, team->size);
        HAPT_TRY(set_up(team, roll, reason));
    }
    snprintf(text, HAPT_TEAM_CARRIER_CHARS, "%s%s", reason[0] ? "the host: " : groups->library(), reason);
    if (!reason[0]) return HAPT_OK;
    team_devices_destroy(team->devices);
    team->devices = NULL;
    return HAPT_OK;
}

enum hapt_status hapt_team_use_devices(struct hapt_team *team, const struct hapt_backend *backend, struct hapt_device *device, char *text)
{
    text[0] = '\0';
    if (team->size == 1) return HAPT_OK;
    struct roll roll = {.all = calloc((size_t)team->size, sizeof *roll.all), .part = calloc((size_t)team->size, sizeof *roll.part)};
    /* Its peers are on their way to meet it. */
    if (!roll.all || !roll.part) hapt_die(hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory for a roll of %d ranks", team->size));
    const enum hapt_status status = use_devices(team, backend, device, &roll, text);
    free(roll.all);
    free(roll.part);
    return status;
}
