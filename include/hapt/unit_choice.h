/*
 * The choice of the units of a range that recompute their activations (AutoHete 4). If all units of a model are equal,
 * the first ones recompute, as many as asked for. If they differ, those recompute that free the bytes asked for in the
 * least time. A small integer program finds them; units of one kind are one variable of it.
 */
#ifndef HAPT_UNIT_CHOICE_H
#define HAPT_UNIT_CHOICE_H

#include "hapt/graph.h"
#include "hapt/memory.h"

struct hapt_unit_choices;
/* unit [count]: in order. The caller keeps the graph and the units. What a unit frees is that of one device. Its time
 * is the operations that run again; a byte read or written counts as 100 of them. */
enum hapt_status hapt_unit_choices_create(const struct hapt_graph *graph, const struct hapt_unit *unit, int count,
                                          struct hapt_arena *arena, struct hapt_unit_choices **choices);
/* True if there are several kinds of units. */
bool hapt_unit_choices_differ(const struct hapt_unit_choices *choices);
/* Decides what each unit of operators [first_op, end_op) recomputes, for a number as in layers.h. choice [count]: enum
 * hapt_unit_choice, set for those that lie in the range, [*first, *end). Answers are remembered, so one thread at a
 * time may ask. */
enum hapt_status hapt_unit_choose(struct hapt_unit_choices *choices, int first_op, int end_op, int recompute,
                                  unsigned char *choice, int *first, int *end);

#endif
