/* Creating process groups of devices and waiting for them. */
#include "hapt/device_groups.h"

#include <math.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hapt/env.h"

/* ---- waiting ---- */

/* Spins on short waits, and sleeps on longer ones, which adds a small share to them. */
static void pause_since(double start_s, double now_s)
{
    if (now_s - start_s < 100e-6)
        sched_yield();
    else
        hapt_time_sleep_until(now_s + fmin(0.05 * (now_s - start_s), 300e-6));
}

/* Polls until no call of the group is pending and the event, if any, is complete. Sets *late if the time-out passes
 * first. */
static const char *poll(const struct hapt_device_group *with, struct hapt_device_comm *group, struct hapt_event *event,
                        double timeout_s, bool *late)
{
    const double start_s = hapt_time_s();
    *late = false;
    for (;;) {
        bool settled;
        const char *fault = with->groups->poll(group, &settled);
        if (fault || (settled && (!event || with->backend->done(event)))) return fault;
        const double now_s = hapt_time_s();
        if ((*late = now_s > start_s + timeout_s)) return NULL;
        pause_since(start_s, now_s);
    }
}

static enum hapt_status broken(const struct hapt_device_group *group, const char *what, const char *fault)
{
    char text[HAPT_GROUPS_TEXT_CHARS];
    snprintf(text, sizeof text, "%s", fault);
    group->groups->abort(group->group);
    return hapt_collective_broken(group->over, what, text);
}

static enum hapt_status wait_for(const struct hapt_device_group *group, const char *what, struct hapt_event *event)
{
    bool late;
    const char *fault = poll(group, group->group, event, hapt_collective_timeout_s(group->over), &late);
    if (fault) return broken(group, what, fault);
    if (!late) return HAPT_OK;
    group->groups->abort(group->group);
    return hapt_collective_late(group->over, what);
}

enum hapt_status hapt_device_group_settle(const struct hapt_device_group *group, const char *what, const char *answer)
{
    return answer ? broken(group, what, answer) : wait_for(group, what, NULL);
}

enum hapt_status hapt_device_group_finish(const struct hapt_device_group *group, const char *what, const char *answer)
{
    HAPT_TRY(hapt_device_group_settle(group, what, answer));
    struct hapt_event *event = group->backend->record(group->queue);
    HAPT_TRY(wait_for(group, what, event));
    return group->backend->wait(event);
}

/* ---- agreements ---- */

static const char among_devices[] = "agreement on device groups";

/* all [ranks]. */
static enum hapt_status gather(struct hapt_collective *over, const void *mine, size_t bytes, void *all)
{
    const int ranks = hapt_collective_ranks(over);
    struct hapt_strided *part = calloc((size_t)ranks, sizeof *part);
    /* Returning here would block the peers in this collective. */
    if (!part) hapt_die(hapt_fail(HAPT_ERR_MEMORY, NULL, "host memory exhausted: an agreement of %d ranks", ranks));
    for (int r = 0; r < ranks; r++) part[r] = (struct hapt_strided){(size_t)r * bytes, 1, bytes, 0};
    const enum hapt_status status = hapt_collective_gather_shards(over, among_devices, false, part, mine, all);
    free(part);
    return status;
}

static void *reserve(struct hapt_collective *over, size_t bytes)
{
    void *all = calloc((size_t)hapt_collective_ranks(over), bytes);
    if (!all)
        hapt_die(hapt_fail(HAPT_ERR_MEMORY, NULL, "host memory exhausted: an agreement of %d ranks",
                           hapt_collective_ranks(over)));
    return all;
}

/* The reason of ranks that waited for a rank with a better reason. */
static const char timed_out_reason[] = "its ranks did not find each other in time";

/* Keeps the first reason other than timed_out_reason. */
static void take_reason(char kept[HAPT_GROUPS_TEXT_CHARS], const char *said)
{
    if (said[0] && (!kept[0] || strcmp(kept, timed_out_reason) == 0))
        snprintf(kept, HAPT_GROUPS_TEXT_CHARS, "%s", said);
}

enum hapt_status hapt_device_groups_agree(struct hapt_collective *over, char reason[HAPT_GROUPS_TEXT_CHARS])
{
    char(*all)[HAPT_GROUPS_TEXT_CHARS] = reserve(over, sizeof *all), mine[HAPT_GROUPS_TEXT_CHARS] = "";
    snprintf(mine, sizeof mine, "%s", reason); /* clears the bytes after the end: they are sent, too */
    const enum hapt_status status = gather(over, mine, sizeof mine, all);
    reason[0] = '\0';
    for (int r = 0; r < hapt_collective_ranks(over) && status == HAPT_OK; r++) take_reason(reason, all[r]);
    free(all);
    return status;
}

/* A rank's description; "" as reason: it is ready. */
struct rank_info {
    char host[HAPT_HOSTNAME_CHARS], place[16], reason[HAPT_GROUPS_TEXT_CHARS];
};

static const struct hapt_device_comm_ops *look(const struct hapt_collective *over, const struct hapt_backend *backend,
                                               struct rank_info *info)
{
    const char *choice = getenv("HAPT_COLLECTIVES"), *reason = NULL;
    const struct hapt_device_comm_ops *groups = NULL;
    int rank = 0;
    memset(info, 0, sizeof *info); /* it is sent as bytes */
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    snprintf(info->host, sizeof info->host, "%s", hapt_env_host(rank));
    if (choice && *choice)
        snprintf(info->reason, sizeof info->reason, "HAPT_COLLECTIVES=%.20s%s", choice,
                 strcmp(choice, "host") == 0 ? "" : " (the only valid value is host)");
    else if (!backend->device_comms)
        snprintf(info->reason, sizeof info->reason, "the back end %s has no device collectives", backend->name);
    else if (hapt_collective_emulates_link(over))
        snprintf(info->reason, sizeof info->reason, "the cluster file emulates a slow link");
    else if (!(groups = backend->device_comms(&reason)) || (reason = groups->pci_address(info->place)))
        snprintf(info->reason, sizeof info->reason, "%s", reason);
    return groups;
}

enum hapt_status hapt_device_groups_find(struct hapt_collective *over, const struct hapt_backend *backend,
                                         const struct hapt_device_comm_ops **groups,
                                         char reason[HAPT_GROUPS_TEXT_CHARS])
{
    const int ranks = hapt_collective_ranks(over);
    struct rank_info mine, *info = reserve(over, sizeof *info);
    *groups = look(over, backend, &mine);
    const enum hapt_status status = gather(over, &mine, sizeof mine, info);
    reason[0] = '\0';
    for (int r = 0; r < ranks && status == HAPT_OK; r++) take_reason(reason, info[r].reason);
    for (int r = 0; r < ranks && status == HAPT_OK && !reason[0]; r++)
        for (int s = 0; s < r && !reason[0]; s++)
            if (strcmp(info[r].host, info[s].host) == 0 && strcmp(info[r].place, info[s].place) == 0)
                snprintf(reason, HAPT_GROUPS_TEXT_CHARS, "ranks share the device %s of host %.64s", info[r].place,
                         info[r].host);
    free(info);
    hapt_link_sharpen_timers(); /* waits for devices use short sleeps */
    return status;
}

/* ---- creating ---- */

/* A rank's request to a split, and its failure if any. */
struct split_request {
    int color, key;
    char fault[HAPT_GROUPS_TEXT_CHARS];
};

struct part {
    int color, first, rank, ranks; /* first: rank 0 of the part, as a rank of the parent */
};

static struct part part_of(const struct split_request *request, int ranks, int me)
{
    struct part part = {.color = request[me].color, .first = me};
    for (int r = 0; r < ranks && part.color >= 0; r++) {
        if (request[r].color != part.color) continue;
        const bool before = request[r].key < request[me].key || (request[r].key == request[me].key && r < me);
        const int first = part.first;
        if (request[r].key < request[first].key || (request[r].key == request[first].key && r < first)) part.first = r;
        part.rank += before;
        part.ranks++;
    }
    return part;
}

/* Rank 0 of each part creates an id and sends it to all. */
static enum hapt_status join(const struct hapt_device_group *with, const struct part *part,
                             struct hapt_device_comm **made, char fault[HAPT_GROUPS_TEXT_CHARS])
{
    struct {
        unsigned char id[HAPT_DEVICE_COMM_ID_BYTES];
        char fault[HAPT_GROUPS_TEXT_CHARS];
    } mine = {0}, *all = reserve(with->over, sizeof *all);
    const char *said = part->color >= 0 && part->rank == 0 ? with->groups->id(mine.id) : NULL;
    if (said) snprintf(mine.fault, sizeof mine.fault, "%s", said);
    const enum hapt_status status = gather(with->over, &mine, sizeof mine, all);
    for (int r = 0; r < hapt_collective_ranks(with->over) && status == HAPT_OK; r++) take_reason(fault, all[r].fault);
    if (status == HAPT_OK && !fault[0] && part->color >= 0) {
        said = with->groups->create(all[part->first].id, part->rank, part->ranks, made);
        if (said) snprintf(fault, HAPT_GROUPS_TEXT_CHARS, "%s", said);
    }
    free(all);
    return status;
}

/* `parent` NULL: no group exists yet that could be split. */
static enum hapt_status make(const struct hapt_device_group *with, struct hapt_device_comm *parent, int color, int key,
                             struct hapt_device_comm **made, char fault[HAPT_GROUPS_TEXT_CHARS])
{
    const int ranks = hapt_collective_ranks(with->over);
    const bool split = parent && with->groups->split;
    struct split_request mine = {.color = color, .key = key}, *request = reserve(with->over, sizeof *request);
    *made = NULL;
    snprintf(mine.fault, sizeof mine.fault, "%s", fault);
    enum hapt_status status = gather(with->over, &mine, sizeof mine, request);
    for (int r = 0; r < ranks && status == HAPT_OK; r++) take_reason(fault, request[r].fault);
    const struct part part = part_of(request, ranks, hapt_collective_rank(with->over));
    free(request);
    if (status != HAPT_OK || fault[0]) return status;
    const char *said = NULL;
    if (split)
        said = with->groups->split(parent, color, key, part.rank, part.ranks, made);
    else
        HAPT_TRY(join(with, &part, made, fault));
    if (fault[0]) said = fault;
    struct hapt_device_comm *waits = split ? parent : *made; /* a split is polled on its parent */
    bool late = false;
    /* A failed rank waits for the others in the next agreement, so they must time out earlier: half the time-out. */
    if (!said && waits) said = poll(with, waits, NULL, 0.5 * hapt_collective_timeout_s(with->over), &late);
    if (late) said = timed_out_reason;
    if (!said) return HAPT_OK;
    if (said != fault) snprintf(fault, HAPT_GROUPS_TEXT_CHARS, "%s", said);
    if (waits) with->groups->abort(waits);
    return HAPT_OK;
}

enum hapt_status hapt_device_group_create(struct hapt_device_group *group, char fault[HAPT_GROUPS_TEXT_CHARS])
{
    return make(group, NULL, 0, hapt_collective_rank(group->over), &group->group, fault);
}

enum hapt_status hapt_device_group_split(const struct hapt_device_group *parent, int color, int key,
                                         struct hapt_device_comm **part, char fault[HAPT_GROUPS_TEXT_CHARS])
{
    return make(parent, parent->group, color, key, part, fault);
}

/* Waits until the queue holds the operation whose return value is `answer`. Nothing may be queued after it before. */
static const char *settle_until(const struct hapt_device_group *with, struct hapt_device_comm *group,
                                const char *answer, struct hapt_event *event, double until_s)
{
    bool late = false;
    const char *fault = answer ? answer : poll(with, group, event, until_s - hapt_time_s(), &late);
    return late ? timed_out_reason : fault;
}

/* An all-reduce and an all-gather of one value per rank; or one value from rank 0 to rank 1. */
static const char *use(const struct hapt_device_group *with, struct hapt_device_comm *group, bool pairwise, int rank,
                       int ranks, float *value, double until_s)
{
    const struct hapt_block block = {value, sizeof *value};
    if (pairwise && rank == 0) return with->groups->send(group, with->queue, 1, &block, 1);
    if (pairwise) return with->groups->receive(group, with->queue, 1, &block, 0);
    size_t *bound = calloc((size_t)ranks + 1, sizeof *bound);
    if (!bound) return "a host has no memory left";
    for (int r = 0; r <= ranks; r++) bound[r] = (size_t)r * sizeof *value;
    const char *fault = with->groups->all_reduce(group, with->queue, false, HAPT_F32, value, value, 1);
    fault = settle_until(with, group, fault, NULL, until_s);
    if (!fault) fault = with->groups->all_gather(group, with->queue, bound, value + rank, value);
    free(bound);
    return fault;
}

void hapt_device_group_connect(const struct hapt_device_group *with, struct hapt_device_comm *group, bool pairwise,
                               int rank, int ranks, char fault[HAPT_GROUPS_TEXT_CHARS])
{
    void *value;
    if (!group || fault[0]) return;
    if (with->backend->allocate(with->device, (size_t)ranks * sizeof(float), &value) != HAPT_OK) {
        hapt_fail_reset(); /* the caller can fall back to the host */
        snprintf(fault, HAPT_GROUPS_TEXT_CHARS, "device memory exhausted: connecting the devices");
        return;
    }
    /* See make(): half the time-out. */
    const double until_s = hapt_time_s() + 0.5 * hapt_collective_timeout_s(with->over);
    const char *said =
        settle_until(with, group, use(with, group, pairwise, rank, ranks, value, until_s), NULL, until_s);
    struct hapt_event *event = said ? NULL : with->backend->record(with->queue);
    said = settle_until(with, group, said, event, until_s);
    if (said) {
        snprintf(fault, HAPT_GROUPS_TEXT_CHARS, "%s", said);
        with->groups->abort(group); /* so that queued operations no longer write to `value` */
    } else if (with->backend->wait(event) != HAPT_OK) {
        snprintf(fault, HAPT_GROUPS_TEXT_CHARS, "%s", hapt_fail_message());
        hapt_fail_reset();
    }
    with->backend->free(with->device, value);
}
