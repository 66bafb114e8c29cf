/*
 * Process groups of the devices of several ranks (struct hapt_groups). This file adds what device communication
 * libraries do not provide: checking that all ranks can take part, creating a group on all ranks or on none, waiting
 * with a deadline, and naming missing ranks. The hosts agree through a collective of the same ranks, so a rank that
 * fails alone blocks no other.
 */
#ifndef HAPT_DEVICE_GROUPS_H
#define HAPT_DEVICE_GROUPS_H

#include "hapt/device.h"
#include "hapt/link.h"

#define HAPT_GROUPS_TEXT_CHARS 160

struct hapt_device_group {
    const struct hapt_backend *backend;
    const struct hapt_device_comm_ops *groups;
    struct hapt_device *device;     /* whose memory is communicated */
    struct hapt_queue *queue;       /* queue of the operations */
    struct hapt_collective *over;   /* the same ranks, in the same order; borrowed */
    struct hapt_device_comm *group; /* NULL: none was made */
};

/* Finds the back end's functions for process groups. Sets *groups, and `reason` to "", if three conditions hold: every
 * rank of `over` has its own device on a back end with groups, no rank's environment has HAPT_COLLECTIVES=host, and no
 * slow link is emulated. Otherwise `reason` says why not, the same on all ranks. Collective. */
enum hapt_status hapt_device_groups_find(struct hapt_collective *over, const struct hapt_backend *backend,
                                         const struct hapt_device_comm_ops **groups,
                                         char reason[HAPT_GROUPS_TEXT_CHARS]);
/* In: why this rank cannot continue; "" if it can. Out: one reason, the same on all ranks. Collective. */
enum hapt_status hapt_device_groups_agree(struct hapt_collective *over, char reason[HAPT_GROUPS_TEXT_CHARS]);

/* Creates the group of all ranks of group->over. `fault` receives what went wrong, to be agreed on; then nothing is
 * created. Collective. */
enum hapt_status hapt_device_group_create(struct hapt_device_group *group, char fault[HAPT_GROUPS_TEXT_CHARS]);
/* *part: the group of the ranks with the same color, ordered by key; NULL if the color is negative. Uses the library's
 * split if it has one, else creates a new group. `fault` as above. Collective over parent->over. */
enum hapt_status hapt_device_group_split(const struct hapt_device_group *parent, int color, int key,
                                         struct hapt_device_comm **part, char fault[HAPT_GROUPS_TEXT_CHARS]);

/* Connects a group by using it once, because groups connect at first use, which can fail like their creation. `group`
 * has all ranks of with->over or some of them; `pairwise`: rank 0 sends to rank 1. NULL: no effect. `fault` as above.
 */
void hapt_device_group_connect(const struct hapt_device_group *with, struct hapt_device_comm *group, bool pairwise,
                               int rank, int ranks, char fault[HAPT_GROUPS_TEXT_CHARS]);

/* Waits until the group's last operation is in the queue, or is complete; `answer` is that operation's return value.
 * HAPT_ERR_COMM names the missing rank, or what broke, and `what`; the group is then aborted. */
enum hapt_status hapt_device_group_settle(const struct hapt_device_group *group, const char *what, const char *answer);
enum hapt_status hapt_device_group_finish(const struct hapt_device_group *group, const char *what, const char *answer);

#endif
