/*
 * Cost of a collective over the ranks of a mesh axis (HAP 3.2): latency + bytes / bandwidth for each kind. The terms
 * are fitted to collectives measured at several sizes and skews, or derived from the latency and bandwidth of links.
 *
 * Uneven shards: if messages are padded, the largest shard determines the time; for a grouped broadcast, the sum of
 * all, with one launch each. A fit finds the weight of both for the library in use.
 */
#ifndef HAPT_COLLECTIVE_COST_H
#define HAPT_COLLECTIVE_COST_H

#include <stdio.h>

#include "hapt/cluster.h"
#include "hapt/ops.h"

/* Seconds; a `largest_share` below 1 / ranks counts as even. */
double hapt_collective_cost_s(const struct hapt_collective_model *model, enum hapt_collective_kind kind, double bytes,
                              double largest_share);
/* The same, linear in the largest share: fixed_s + largest_s * largest_share (ratios.h). */
void hapt_collective_cost_line(const struct hapt_collective_model *model, enum hapt_collective_kind kind, double bytes,
                               double *fixed_s, double *largest_s);

/* ---- from links ---- */

struct hapt_collective_links {
    int ranks;
    double latency_s, bandwidth; /* of the slowest link: s, byte/s per direction and rank */
};
/* Costs of ring algorithms (hapt_ring_s). */
void hapt_collective_model_links(const struct hapt_collective_links *links, struct hapt_collective_model *model);
/* The cluster file's model of collectives over that many ranks; NULL: it has none. */
const struct hapt_collective_model *hapt_collective_model_measured(const struct hapt_cluster *cluster, int ranks);
/* The slowest latency and bandwidth on a ring through `devices` [cluster->count] devices of each subcluster, taken
 * node by node. HAPT_ERR_INPUT if a link's values are unknown (hapt_cluster_assume, hapt_cluster_probe). */
enum hapt_status hapt_collective_links_slowest(const struct hapt_cluster *cluster, const int *devices,
                                               struct hapt_collective_links *links);

/* ---- from measurements ---- */

struct hapt_collective_sample {
    double bytes, largest_share, time_s;
};
/* Least squares of relative errors over non-negative terms. Bytes always cost time; outliers have less weight.
 * Without skewed samples, padded kinds are assumed to be padded and the others insensitive to skew. False, with `term`
 * unchanged, if fewer than two sizes were measured. */
bool hapt_collective_fit(enum hapt_collective_kind kind, int ranks, int count,
                         const struct hapt_collective_sample *sample, struct hapt_collective_term *term);

struct hapt_collective;
/* Runs every kind of collective over the ranks of `collective` (link.h) at several sizes, even and skewed, for
 * about `seconds` in total, and fits the model. `sample` (may be NULL) gets at most HAPT_COLLECTIVE_SAMPLES per kind,
 * `count` their number. All ranks get the same model. Collective call; HAPT_ERR_MEMORY and HAPT_ERR_COMM are returned
 * on all ranks alike. */
#define HAPT_COLLECTIVE_SAMPLES 20
enum hapt_status hapt_collective_measure(struct hapt_collective *collective, double seconds,
                                         struct hapt_collective_model *model,
                                         struct hapt_collective_sample (*sample)[HAPT_COLLECTIVE_SAMPLES], int *count);

void hapt_collective_model_print(const struct hapt_collective_model *model, FILE *stream);
/* Checks that every number is defined and not negative; else HAPT_ERR_INPUT. */
enum hapt_status hapt_collective_model_check(const struct hapt_collective_model *model);

#endif
