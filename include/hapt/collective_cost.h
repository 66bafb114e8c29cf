/*
 * Seconds of collectives: every prediction of communication inside a stage. There are two models.
 *
 * 1. The devices of a submesh (struct hapt_collective_span), equal devices of one subcluster. A collective runs inside
 *    the nodes first, then between the nodes. Groups of a node that run at the same time share the node's link. An
 *    all-reduce among p peers is the faster of two algorithms (Sanders, Speck and Traeff 2009), at 0.8 of the
 *    bandwidth. A ring has 2 (p - 1) rounds of bytes / p; two trees at once have 2 log2 p rounds and twice the bytes.
 *    Reduce-scatter and all-gather cost half an all-reduce, times p times the largest share. Others are rings
 *    (hapt_ring_s). Plain and synthesised programs of all stages on one subcluster are compared by this model.
 * 2. Any devices as one mesh axis of HAP (struct hapt_collective_model; HAP 3.2): latency + bytes / bandwidth for each
 *    kind. The terms are fitted to collectives measured at several sizes and skews, or are rings over the slowest link
 *    at its full bandwidth. Mixed stages and hapt_spmd_mesh use it. If messages are padded, the largest of uneven
 *    shards determines the time; for a grouped broadcast, the sum of all, with one launch each. A fit finds the weight
 *    of both for the library in use.
 *
 * The two differ for the same devices. The second uses all of a link, has no trees and no levels, and does not scale
 * latency by the largest share. Only the first is corrected by measured sums (hapt_calibration_sum_factor).
 */
#ifndef HAPT_COLLECTIVE_COST_H
#define HAPT_COLLECTIVE_COST_H

#include "hapt/calibration.h"
#include "hapt/profile.h"

/* ---- the devices of a submesh ---- */

/* The devices that one collective joins: `inside` devices in each of `nodes` nodes. `beside` such groups of a node run
 * at the same time and share its link to others. */
struct hapt_collective_span {
    const struct hapt_subcluster *subcluster;
    int inside, nodes, beside;
};
/* Along an axis of a submesh. Plain programs: 0 is data-parallel, 1 tensor-parallel. Programs by synthesis: 0 is the
 * nodes, 1 the devices of a node. */
struct hapt_collective_span hapt_collective_span_of(const struct hapt_subcluster *subcluster,
                                                    struct hapt_submesh submesh, int axis);
/* Seconds by the links. `bytes`: of all shards of one group together. `largest_share`: the part in the largest shard;
 * 0: even shards. */
double hapt_collective_span_s(const struct hapt_collective_span *span, enum hapt_collective_kind kind, double bytes,
                              double largest_share);
/* The same, corrected by measured sums of `bytes`. `efficiency` NULL: no correction. */
double hapt_collective_corrected_s(const struct hapt_collective_span *span, const struct hapt_efficiency *efficiency,
                                   enum hapt_dtype dtype, enum hapt_collective_kind kind, double bytes,
                                   double largest_share);

/* ---- any devices ---- */

/* Seconds, linear in the largest share; a `largest_share` below 1 / ranks counts as even. */
double hapt_collective_cost_s(const struct hapt_collective_model *model, enum hapt_collective_kind kind, double bytes,
                              double largest_share);

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
/* The same for the collectives of programs: the devices of the team run them or, if the host does, copies between
 * device and host are included where the host cannot read the device's memory. `team`: connected, all ranks along axis
 * 0; it has asked for its devices. `device`: this rank's, open. */
struct hapt_team;
struct hapt_backend;
struct hapt_device;
enum hapt_status hapt_collective_measure_team(struct hapt_team *team, const struct hapt_backend *backend,
                                              struct hapt_device *device, double seconds,
                                              struct hapt_collective_model *model);

#endif
