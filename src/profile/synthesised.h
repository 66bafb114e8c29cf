/*
 * Synthesised candidates: for every kind of device and mesh (n, m) of a cluster the programs that synthesis finds
 * (synthesis.h) for both axes, nodes and the devices inside them, with the seconds of that device and of these links.
 * Where a stage of the size that falls to a mesh would not fit, slower programs that need less memory beside the
 * fastest.
 */
#ifndef HAPT_PROFILE_SYNTHESISED_H
#define HAPT_PROFILE_SYNTHESISED_H

#include "candidates.h"

/* Adds meshes with programs to candidates->degree and ->sharding, which have room for `room` more; those that shard the
 * graph as a mesh that is there already are left out, as is what has no program at all. */
enum hapt_status synthesised_add(struct candidates *candidates, int room, struct hapt_arena *arena);
/* At most so many meshes (n, m) of all subclusters, each with several programs. */
int synthesised_room(const struct candidates *candidates);

/* Seconds of a collective on `bytes` (the whole of what one axis shares) of a mesh with programs. */
double synthesised_collective_s(const struct candidates *candidates, int subcluster, const struct mesh *mesh, int axis,
                                enum hapt_collective_kind kind, double bytes, double largest_share);
/* Seconds of all collectives that a step ends with, of layers [first, last]. */
struct synthesised_reduce;
enum hapt_status synthesised_reduce_create(const struct candidates *candidates, int subcluster, int degree,
                                           struct hapt_arena *arena, struct synthesised_reduce **reduce);
double synthesised_reduce_s(const struct synthesised_reduce *reduce, int first, int last);

#endif
