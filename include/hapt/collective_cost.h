/*
 * What a collective over the ranks of a mesh axis costs (HAP 3.2): latency + bytes / bandwidth for each kind, fitted to
 * measured collectives of several sizes and skews, or derived from the latency and bandwidth of links.
 *
 * Uneven shards: where messages are padded the largest shard decides, for a grouped broadcast the sum of all with a
 * launch for each; a fit finds how much of either is true of the library at hand.
 */
#ifndef HAPT_COLLECTIVE_COST_H
#define HAPT_COLLECTIVE_COST_H

#include <stdio.h>

#include "hapt/cluster.h"
#include "hapt/ops.h"

/* Seconds; `largest_share` below 1 / ranks counts as even. */
double hapt_collective_cost_s(const struct hapt_collective_model *model, enum hapt_collective_kind kind, double bytes,
                              double largest_share);
/* The same as a linear function of the largest share: fixed_s + largest_s * largest_share (ratios.h). */
void hapt_collective_cost_line(const struct hapt_collective_model *model, enum hapt_collective_kind kind, double bytes,
                               double *fixed_s, double *largest_s);

/* ---- from links ---- */

struct hapt_collective_links {
    int ranks;
    double latency_s, bandwidth; /* of the slowest link: s, byte/s per direction and rank */
};
/* Rings (hapt_ring_s). */
void hapt_collective_model_links(const struct hapt_collective_links *links, struct hapt_collective_model *model);
/* What the cluster file tells of collectives over so many ranks; NULL: nothing. */
const struct hapt_collective_model *hapt_collective_model_measured(const struct hapt_cluster *cluster, int ranks);
/* The slowest latency and bandwidth on the way round `devices` [cluster->count] devices of each subcluster, taken node
 * by node. HAPT_ERR_INPUT where a link's values are not known (hapt_cluster_assume, hapt_cluster_probe). */
enum hapt_status hapt_collective_links_slowest(const struct hapt_cluster *cluster, const int *devices,
                                               struct hapt_collective_links *links);

/* ---- from measurements ---- */

struct hapt_collective_sample {
    double bytes, largest_share, time_s;
};
/* Least squares of relative errors over terms that are not negative; bytes are never free, and single outliers count
 * less. Where no sample is skewed, padded kinds are padded and others do not care. False, and `term` untouched, when
 * fewer than two sizes were measured. */
bool hapt_collective_fit(enum hapt_collective_kind kind, int ranks, int count,
                         const struct hapt_collective_sample *sample, struct hapt_collective_term *term);

struct hapt_collective;
/* Runs every kind over the ranks of a collective (link.h) in several sizes, evenly and skewed, for about `seconds`
 * together, and fits. `sample` (NULL: not wanted) gets at most HAPT_COLLECTIVE_SAMPLES a kind, `count` how many. All
 * ranks get the same model. Collective; HAPT_ERR_MEMORY, HAPT_ERR_COMM on all ranks alike. */
#define HAPT_COLLECTIVE_SAMPLES 20
enum hapt_status hapt_collective_measure(struct hapt_collective *collective, double seconds,
                                         struct hapt_collective_model *model,
                                         struct hapt_collective_sample (*sample)[HAPT_COLLECTIVE_SAMPLES], int *count);

void hapt_collective_model_print(const struct hapt_collective_model *model, FILE *stream);
/* Every number defined and not negative; HAPT_ERR_INPUT. */
enum hapt_status hapt_collective_model_check(const struct hapt_collective_model *model);

#endif
