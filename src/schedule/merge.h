/* The passes of submeshes with several chunks. */
#ifndef HAPT_SCHEDULE_MERGE_H
#define HAPT_SCHEDULE_MERGE_H

#include "hapt/schedule.h"

/* Merges the lists of the chunks, part[chunk_count], into those of their submeshes, whose slots they then divide among
 * them. The order within a chunk stays. HAPT_ERR_INTERNAL if the lists deadlock. */
enum hapt_status schedule_merge(struct hapt_schedule *schedule, const struct hapt_instruction_list *part);

#endif
