/*
 * Teams on submeshes: the ranks of each subcluster that would train a stage on one of its submeshes, as many teams as
 * there is room for. All subclusters run at the same time, as in training.
 */
#ifndef HAPT_MEASURE_SUBMESH_TEAM_H
#define HAPT_MEASURE_SUBMESH_TEAM_H

#include "measure.h"
#include "team_ranges.h"

/* This rank's part. */
struct submesh_team {
    const struct measure *measure;
    struct hapt_arena *scratch;
    int subcluster; /* this rank's; -1: none */
    struct hapt_submesh submesh;
    int mesh_index;
    int color, rank; /* the team's number, MPI_UNDEFINED if this rank is in none; the rank in it */
};

/* Finds this rank's team. now[c]: the submesh of subcluster c; n 0: none. Sets all but measure and scratch. */
void submesh_team_find(const struct hapt_submesh *now, struct submesh_team *team);
/* For team_wanted; `team`: a struct submesh_team. submesh_team_wants: layers [first, last] are a candidate.
 * submesh_team_shards: the candidate has sharded optimizer state. */
bool submesh_team_wants(const void *team, int first, int last);
bool submesh_team_shards(const void *team, int first, int last);
/* Also those that are candidates only if they recompute: they are not run but composed. */
bool submesh_team_wants_time(const void *team, int first, int last);
/* Lists the wanted ranges (team_ranges_list), with new times. Rank-local. */
enum hapt_status submesh_team_list(const struct submesh_team *team, team_wanted *wanted, struct team_ranges *ranges);
/* Runs them for about `budget_s`. Collective over `comm`, the team's ranks in order. */
enum hapt_status submesh_team_run(const struct submesh_team *team, const struct hapt_engine_options *options,
                                  MPI_Comm comm, double budget_s, struct team_ranges *ranges);

#endif
