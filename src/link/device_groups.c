/* Making groups of devices and waiting for them. */
#include "hapt/device_groups.h"

#include <math.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hapt/env.h"

/* ---- waiting ---- */

/* Short things are waited for awake; long ones are seen late by a small share. */
static void pause_since(double start_s, double now_s)
{
    if (now_s - start_s < 100e-6)
        sched_yield();
    else
        hapt_time_sleep_until(now_s + fmin(0.05 * (now_s - start_s), 300e-6));
}

/* Until the group has settled and the event, where there is one, has come; *late instead when the time has passed. */
static const char *poll(const struct hapt_device_group *with, struct hapt_group *group, struct hapt_event *event,
                        double timeout_s, bool *late)
{
    const double start_s = hapt_time_s();
    *late = false;
    for (;;) {
        bool settled;
        const char *fault = with->groups->settled(group, &settled);
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

/* ---- words of all ranks ---- */

static const char among_devices[] = "groups of devices";

/* all [ranks]. */
static enum hapt_status gather(struct hapt_collective *over, const void *mine, size_t bytes, void *all)
{
    const int ranks = hapt_collective_ranks(over);
    struct hapt_strided *part = calloc((size_t)ranks, sizeof *part);
    /* Its peers are on their way to meet it. */
    if (!part) hapt_die(hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory for the words of %d ranks", ranks));
    for (int r = 0; r < ranks; r++) part[r] = (struct hapt_strided){(size_t)r * bytes, 1, bytes, 0};
    const enum hapt_status status = hapt_collective_gather_shards(over, among_devices, false, part, mine, all);
    free(part);
    return status;
}

static void *reserve(struct hapt_collective *over, size_t bytes)
{
    void *all = calloc((size_t)hapt_collective_ranks(over), bytes);
    if (!all)
        hapt_die(hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory for the words of %d ranks", hapt_collective_ranks(over)));
    return all;
}

/* What ranks say that wait for one that says better. */
static const char waited_in_vain[] = "its ranks did not find each other in time";

/* Of several reasons the first that is more than that. */
static void take_reason(char kept[HAPT_GROUPS_TEXT_CHARS], const char *said)
{
    if (said[0] && (!kept[0] || strcmp(kept, waited_in_vain) == 0)) snprintf(kept, HAPT_GROUPS_TEXT_CHARS, "%s", said);
}

enum hapt_status hapt_device_groups_agree(struct hapt_collective *over, char reason[HAPT_GROUPS_TEXT_CHARS])
{
    char(*all)[HAPT_GROUPS_TEXT_CHARS] = reserve(over, sizeof *all), mine[HAPT_GROUPS_TEXT_CHARS] = "";
    snprintf(mine, sizeof mine, "%s", reason); /* what is behind its end is sent, too */
    const enum hapt_status status = gather(over, mine, sizeof mine, all);
    reason[0] = '\0';
    for (int r = 0; r < hapt_collective_ranks(over) && status == HAPT_OK; r++) take_reason(reason, all[r]);
    free(all);
    return status;
}

/* What a rank says of itself; one without a reason is ready. */
struct seat {
    char host[HAPT_HOSTNAME_CHARS], place[16], reason[HAPT_GROUPS_TEXT_CHARS];
};

static const struct hapt_groups *look(const struct hapt_collective *over, const struct hapt_backend *backend,
                                      struct seat *seat)
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
    else if (hapt_collective_is_paced(over))
        snprintf(seat->reason, sizeof seat->reason, "the cluster file has a link rehearsed");
    else if (!(groups = backend->groups(&reason)) || (reason = groups->place(seat->place)))
        snprintf(seat->reason, sizeof seat->reason, "%s", reason);
    return groups;
}

enum hapt_status hapt_device_groups_find(struct hapt_collective *over, const struct hapt_backend *backend,
                                         const struct hapt_groups **groups, char reason[HAPT_GROUPS_TEXT_CHARS])
{
    const int ranks = hapt_collective_ranks(over);
    struct seat mine, *seat = reserve(over, sizeof *seat);
    *groups = look(over, backend, &mine);
    const enum hapt_status status = gather(over, &mine, sizeof mine, seat);
    reason[0] = '\0';
    for (int r = 0; r < ranks && status == HAPT_OK; r++) take_reason(reason, seat[r].reason);
    for (int r = 0; r < ranks && status == HAPT_OK && !reason[0]; r++)
        for (int s = 0; s < r && !reason[0]; s++)
            if (strcmp(seat[r].host, seat[s].host) == 0 && strcmp(seat[r].place, seat[s].place) == 0)
                snprintf(reason, HAPT_GROUPS_TEXT_CHARS, "ranks share the device %s of host %.64s", seat[r].place,
                         seat[r].host);
    free(seat);
    hapt_link_sharpen_timers(); /* who waits for devices sleeps shortly */
    return status;
}

/* ---- making ---- */

/* What a rank wants of a split, and whether it can. */
struct wish {
    int color, key;
    char fault[HAPT_GROUPS_TEXT_CHARS];
};

struct part {
    int color, first, rank, ranks; /* first: which rank of the whole has its rank 0 */
};

static struct part part_of(const struct wish *wish, int ranks, int me)
{
    struct part part = {.color = wish[me].color, .first = me};
    for (int r = 0; r < ranks && part.color >= 0; r++) {
        if (wish[r].color != part.color) continue;
        const bool before = wish[r].key < wish[me].key || (wish[r].key == wish[me].key && r < me);
        const int first = part.first;
        if (wish[r].key < wish[first].key || (wish[r].key == wish[first].key && r < first)) part.first = r;
        part.rank += before;
        part.ranks++;
    }
    return part;
}

/* Rank 0 of each part makes an id, which all hear. */
static enum hapt_status join(const struct hapt_device_group *with, const struct part *part, struct hapt_group **made,
                             char fault[HAPT_GROUPS_TEXT_CHARS])
{
    struct {
        unsigned char id[HAPT_GROUP_ID_BYTES];
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

/* `whole` NULL: there is no group yet that could be split. */
static enum hapt_status make(const struct hapt_device_group *with, struct hapt_group *whole, int color, int key,
                             struct hapt_group **made, char fault[HAPT_GROUPS_TEXT_CHARS])
{
    const int ranks = hapt_collective_ranks(with->over);
    const bool split = whole && with->groups->split;
    struct wish mine = {.color = color, .key = key}, *wish = reserve(with->over, sizeof *wish);
    *made = NULL;
    snprintf(mine.fault, sizeof mine.fault, "%s", fault);
    enum hapt_status status = gather(with->over, &mine, sizeof mine, wish);
    for (int r = 0; r < ranks && status == HAPT_OK; r++) take_reason(fault, wish[r].fault);
    const struct part part = part_of(wish, ranks, hapt_collective_rank(with->over));
    free(wish);
    if (status != HAPT_OK || fault[0]) return status;
    const char *said = NULL;
    if (split)
        said = with->groups->split(whole, color, key, part.rank, part.ranks, made);
    else
        HAPT_TRY(join(with, &part, made, fault));
    if (fault[0]) said = fault;
    struct hapt_group *waits = split ? whole : *made; /* a part is there when the whole has settled */
    bool late = false;
    /* Who has failed waits for the others behind it: they must have given up by then. */
    if (!said && waits) said = poll(with, waits, NULL, 0.5 * hapt_collective_timeout_s(with->over), &late);
    if (late) said = waited_in_vain;
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
                                         struct hapt_group **part, char fault[HAPT_GROUPS_TEXT_CHARS])
{
    return make(parent, parent->group, color, key, part, fault);
}

/* The queue has what was asked of the group, with that answer: nothing may be queued behind it before. */
static const char *settle_until(const struct hapt_device_group *with, struct hapt_group *group, const char *answer,
                                struct hapt_event *event, double until_s)
{
    bool late = false;
    const char *fault = answer ? answer : poll(with, group, event, until_s - hapt_time_s(), &late);
    return late ? waited_in_vain : fault;
}

/* A sum and a gathering of a word of each rank; or a word from one to the other. */
static const char *use(const struct hapt_device_group *with, struct hapt_group *group, bool trades, int rank, int ranks,
                       float *word, double until_s)
{
    const struct hapt_block block = {word, sizeof *word};
    if (trades && rank == 0) return with->groups->send(group, with->queue, 1, &block, 1);
    if (trades) return with->groups->receive(group, with->queue, 1, &block, 0);
    size_t *bound = calloc((size_t)ranks + 1, sizeof *bound);
    if (!bound) return "a host has no memory left";
    for (int r = 0; r <= ranks; r++) bound[r] = (size_t)r * sizeof *word;
    const char *fault = with->groups->all_reduce(group, with->queue, false, HAPT_F32, word, word, 1);
    fault = settle_until(with, group, fault, NULL, until_s);
    if (!fault) fault = with->groups->all_gather(group, with->queue, bound, word + rank, word);
    free(bound);
    return fault;
}

void hapt_device_group_connect(const struct hapt_device_group *with, struct hapt_group *group, bool trades, int rank,
                               int ranks, char fault[HAPT_GROUPS_TEXT_CHARS])
{
    void *word;
    if (!group || fault[0]) return;
    if (with->backend->allocate(with->device, (size_t)ranks * sizeof(float), &word) != HAPT_OK) {
        hapt_fail_reset(); /* there is another way */
        snprintf(fault, HAPT_GROUPS_TEXT_CHARS, "a device has no memory left to connect with others");
        return;
    }
    /* Who has failed waits for the others behind it: they must have given up by then. */
    const double until_s = hapt_time_s() + 0.5 * hapt_collective_timeout_s(with->over);
    const char *said = settle_until(with, group, use(with, group, trades, rank, ranks, word, until_s), NULL, until_s);
    struct hapt_event *event = said ? NULL : with->backend->record(with->queue);
    said = settle_until(with, group, said, event, until_s);
    if (said) {
        snprintf(fault, HAPT_GROUPS_TEXT_CHARS, "%s", said);
        with->groups->abort(group); /* what is in the queue writes to the word no more */
    } else if (with->backend->wait(event) != HAPT_OK) {
        snprintf(fault, HAPT_GROUPS_TEXT_CHARS, "%s", hapt_fail_message());
        hapt_fail_reset();
    }
    with->backend->free(with->device, word);
}
