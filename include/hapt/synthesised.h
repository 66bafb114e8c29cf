/*
 * Synthesised candidates: for every kind of device and mesh (n, m) of a cluster, the programs that synthesis finds
 * (synthesis.h) for both axes, i.e. nodes and their devices, at the costs of that device and these links. If a stage of
 * a mesh's share of the model would not fit, slower programs that need less memory are added.
 */
#ifndef HAPT_SYNTHESISED_H
#define HAPT_SYNTHESISED_H

#include "hapt/candidates.h"

/* Adds meshes with programs to candidates->mesh and ->sharding, which have room for `room` more. Leaves out
 * programs that shard the graph like an existing mesh, and meshes without a program. */
enum hapt_status hapt_synthesised_add(struct hapt_candidates *candidates, int room, struct hapt_arena *arena);
/* Adds a mesh with a known program: its n, m and subclusters count, and the layout is borrowed. The candidates have
 * room for it. */
enum hapt_status hapt_synthesised_add_layout(struct hapt_candidates *candidates, const struct hapt_candidate_mesh *like,
                                             const struct hapt_stage_layout *layout, struct hapt_arena *arena);
/* Upper limit of the meshes added: all (n, m) of all subclusters, with several programs each. */
int hapt_synthesised_room(const struct hapt_candidates *candidates);

/* Seconds of a collective of a mesh with a program, on `bytes` (the full tensor along the axis). */
double hapt_synthesised_collective_s(const struct hapt_candidates *candidates, int subcluster,
                                     const struct hapt_candidate_mesh *mesh, int axis, enum hapt_collective_kind kind,
                                     double bytes, double largest_share);
/* Seconds of all end-of-step collectives of layers [first, last]. */
struct hapt_synthesised_reduce;
enum hapt_status hapt_synthesised_reduce_create(const struct hapt_candidates *candidates, int subcluster,
                                                int mesh_index, struct hapt_arena *arena,
                                                struct hapt_synthesised_reduce **reduce);
double hapt_synthesised_reduce_s(const struct hapt_synthesised_reduce *reduce, int first, int last);

#endif
