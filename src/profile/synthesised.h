/*
 * Synthesised candidates: for every kind of device and mesh (n, m) of a cluster, the programs that synthesis finds
 * (synthesis.h) for both axes, i.e. nodes and their devices, at the costs of that device and these links. If a stage of
 * a mesh's share of the model would not fit, slower programs that need less memory are added.
 */
#ifndef HAPT_PROFILE_SYNTHESISED_H
#define HAPT_PROFILE_SYNTHESISED_H

#include "candidates.h"

/* Adds meshes with programs to candidates->mesh and ->sharding, which have room for `room` more. Leaves out
 * programs that shard the graph like an existing mesh, and meshes without a program. */
enum hapt_status synthesised_add(struct candidates *candidates, int room, struct hapt_arena *arena);
/* Upper limit of the meshes added: all (n, m) of all subclusters, with several programs each. */
int synthesised_room(const struct candidates *candidates);

/* Seconds of a collective of a mesh with a program, on `bytes` (the full tensor along the axis). */
double synthesised_collective_s(const struct candidates *candidates, int subcluster, const struct mesh *mesh, int axis,
                                enum hapt_collective_kind kind, double bytes, double largest_share);
/* Seconds of all end-of-step collectives of layers [first, last]. */
struct synthesised_reduce;
enum hapt_status synthesised_reduce_create(const struct candidates *candidates, int subcluster, int mesh_index,
                                           struct hapt_arena *arena, struct synthesised_reduce **reduce);
double synthesised_reduce_s(const struct synthesised_reduce *reduce, int first, int last);

#endif
