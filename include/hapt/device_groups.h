/*
 * Groups of devices of several ranks (struct hapt_groups), with what a library among devices does not do: finding out
 * whether all can, being made for all or for none, waiting with a deadline, and telling who is missing. The host's
 * words about it go over a collective of the same ranks, so a rank that fails alone holds up nobody.
 */
#ifndef HAPT_DEVICE_GROUPS_H
#define HAPT_DEVICE_GROUPS_H

#include "hapt/device.h"
#include "hapt/link.h"

#define HAPT_GROUPS_TEXT_CHARS 160

struct hapt_device_group {
    const struct hapt_backend *backend;
    const struct hapt_groups *groups;
    struct hapt_device *device;   /* whose memory is traded */
    struct hapt_queue *queue;     /* where its work goes */
    struct hapt_collective *over; /* the same ranks, in the same order; borrowed */
    struct hapt_group *group;     /* NULL: none was made */
};

/* `reason` is "" and *groups are there where every rank of `over` has a device of its own on a back end with groups, no
 * rank's environment has HAPT_COLLECTIVES=host, and nothing rehearses a slow link; else why not, the same on all.
 * Collective. */
enum hapt_status hapt_device_groups_find(struct hapt_collective *over, const struct hapt_backend *backend,
                                         const struct hapt_groups **groups, char reason[HAPT_GROUPS_TEXT_CHARS]);
/* In: why this rank cannot go on, "" where it can. Out: the same on all. Collective. */
enum hapt_status hapt_device_groups_agree(struct hapt_collective *over, char reason[HAPT_GROUPS_TEXT_CHARS]);

/* Makes the group of all ranks of group->over. What goes wrong comes into `fault`, to be agreed on; where there is
 * something, nothing is made. Collective. */
enum hapt_status hapt_device_group_create(struct hapt_device_group *group, char fault[HAPT_GROUPS_TEXT_CHARS]);
/* *part: of the ranks that give the same color, in order of their keys; NULL where the color is negative. By the
 * library where it can, else as if anew. `fault` as above. Collective over parent->over. */
enum hapt_status hapt_device_group_split(const struct hapt_device_group *parent, int color, int key,
                                         struct hapt_group **part, char fault[HAPT_GROUPS_TEXT_CHARS]);

/* Groups connect when they are first used, which can fail as much as making them. Uses one of all ranks of with->over,
 * or of some of them, for that: where its ranks trade, rank 0 sends to rank 1. NULL: nothing. `fault` as above. */
void hapt_device_group_connect(const struct hapt_device_group *with, struct hapt_group *group, bool trades, int rank,
                               int ranks, char fault[HAPT_GROUPS_TEXT_CHARS]);

/* What was asked of the group, with that answer, comes into the queue; is done. HAPT_ERR_COMM names who is missing, or
 * what broke, and `what`; the group is then aborted. */
enum hapt_status hapt_device_group_settle(const struct hapt_device_group *group, const char *what, const char *answer);
enum hapt_status hapt_device_group_finish(const struct hapt_device_group *group, const char *what, const char *answer);

#endif
