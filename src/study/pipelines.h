/*
 * Inside src/study: independent data-parallel pipelines. Megatron and HexiScale choose among them.
 *
 * The all-reduce over pipelines is priced low rather than high, since hapt has no such plans to compare it with.
 */
#ifndef HAPT_STUDY_PIPELINES_H
#define HAPT_STUDY_PIPELINES_H

#include "baselines.h"

/*
 * Prices pipelines whose plans are priced. Gradients of a layer are ready when every pipeline has ended its last
 * backward pass of that layer. Subclusters first sum among themselves, each over the network of its stage's nodes. Then
 * one ring over the subclusters carries each gradient once, in 16 bits (fp32 models: 32). The links between subclusters
 * carry one layer range at a time. A range is updated when it is reduced.
 *
 * *priced NULL: the profile does not give the bytes of the parameters.
 */
enum hapt_status pipelines_price(const struct hapt_profile *profile, int count, struct hapt_plan *const *plan,
                                 struct hapt_arena *result, struct hapt_pipelines **priced);
/* Keeps the faster one in *best; both may be NULL. */
void pipelines_keep(struct hapt_pipelines *priced, struct hapt_pipelines **best);
/* Bytes of the messages for the gradients of layers [first, end); NaN: unknown. */
double pipelines_gradient_bytes(const struct hapt_profile *profile, int first, int end);
/* A view of the profile with nodes[c] nodes of each subcluster, those without nodes left out, and without mixed stages.
 * Links between subclusters have a `sharing`-th of their bandwidth. Optimizer state is sharded over `shards` pipelines,
 * where stages have no replicas. subcluster_of [subclusters of the view]. */
enum hapt_status pipelines_view(const struct hapt_profile *profile, const int *nodes, int sharing, int shards,
                                struct hapt_arena *arena, struct hapt_profile **view, int *subcluster_of);
/* Gives the plan of a view the subclusters of the profile. */
void pipelines_restore(const int *subcluster_of, struct hapt_plan *plan);

/* The fastest pipelines of a system; NULL: none. Collective over `comm` if it takes one. */
enum hapt_status pipelines_megatron(const struct hapt_profile *profile, const struct hapt_strategy_options *options,
                                    struct hapt_arena *result, struct hapt_pipelines **best);
enum hapt_status pipelines_hexiscale(MPI_Comm comm, const struct hapt_profile *profile,
                                     const struct hapt_strategy_options *options, struct hapt_arena *result,
                                     struct hapt_pipelines **best);

#endif
