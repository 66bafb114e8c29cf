/* Inside the team: collectives that its devices run (struct hapt_device_comm_ops of device.h), on device addresses. */
#ifndef HAPT_TEAM_DEVICES_H
#define HAPT_TEAM_DEVICES_H

#include "hapt/device_groups.h"
#include "hapt/team.h"

void team_devices_destroy(struct team_devices *devices); /* NULL is allowed */
/* Like the collectives of link.h. Nothing may be queued before; on return all work is done (a slice is only queued). */
enum hapt_status team_devices_collective(struct hapt_team *team, const struct hapt_team_collective *planned,
                                         const char *what, const void *from, void *to);
enum hapt_status team_devices_slice(struct hapt_team *team, const struct hapt_strided_list *own, const void *from,
                                    void *to);
enum hapt_status team_devices_rebuild(struct hapt_team *team, unsigned axes, const char *what,
                                      const struct hapt_strided *part, void *whole);
enum hapt_status team_devices_all_reduce(struct hapt_team *team, unsigned axes, const char *what, float *data,
                                         size_t elements);
enum hapt_status team_devices_reduce_scatter(struct hapt_team *team, unsigned axes, const char *what, float *data,
                                             const size_t *bound);
enum hapt_status team_devices_all_gather(struct hapt_team *team, unsigned axes, const char *what, float *data,
                                         const size_t *bound);

#endif
