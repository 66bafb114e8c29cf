/* The order of a schedule's passes, before messages and slots are added. */
#ifndef HAPT_SCHEDULE_ORDER_H
#define HAPT_SCHEDULE_ORDER_H

#include "hapt/schedule.h"

struct pass {
    enum hapt_instruction_kind kind; /* FORWARD, BACKWARD or WEIGHT */
    int chunk, microbatch;
};

struct pass_list {
    int count;
    struct pass *pass; /* room for three passes of each (chunk, microbatch) of the submesh */
};

/* schedule_order.c: the order of a schedule. ahead [submesh]. */
void order_passes(const struct hapt_schedule *schedule, int loop_batch, const int *ahead, struct pass_list *list);
/* merge.c: the order of the chunks' own lists, played against each other. */
enum hapt_status merge_passes(const struct hapt_schedule *schedule, struct pass_list *list, bool *ends);
/* schedule_lists.c: adds messages, slots and the instructions behind all passes. */
enum hapt_status make_lists(struct hapt_schedule *schedule, const struct pass_list *order, bool tied,
                            struct hapt_arena *arena);
/* place_weights.c: adds the WEIGHT passes by simulation, with the pool and weight slots of schedule->options. */
enum hapt_status place_weights(const struct hapt_schedule *schedule, const struct hapt_costs *costs,
                               struct pass_list *list);

#endif
