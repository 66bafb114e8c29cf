/* The parts of hapt_schedule_check. */
#ifndef HAPT_SCHEDULE_CHECK_H
#define HAPT_SCHEDULE_CHECK_H

#include "hapt/schedule.h"

/* Plays the lists, each of which is good alone, against each other. at[submesh], 0 at first: the instruction that waits
 * for ever, or the end of the list. */
enum hapt_status check_play(const struct hapt_schedule *schedule, int *at, bool *ends);
/* Records the failure of a schedule that does not end. */
enum hapt_status check_deadlock(const struct hapt_schedule *schedule);

#endif
