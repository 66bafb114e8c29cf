/* Profiles predicted from the description of the devices alone. */
#ifndef HAPT_PREDICT_H
#define HAPT_PREDICT_H

#include "hapt/calibration.h"
#include "hapt/profile.h"

/* Makes the profile that hapt_profile_measure would make, without the devices; rank-local and deterministic. It knows
 * tensor-parallel variants of a submesh (--tensor-parallel). Costs come from the operators' local shapes, collectives
 * from latency and bandwidth of the submesh's links, memory from the planner.
 * `efficiency`: calibrated tables; NULL: the built-in ones. */
struct hapt_predict_options {
    bool recompute; /* with stages that recompute, as --recompute says */
    struct hapt_offloading offload;
    bool roomy;    /* as if no device lacked memory: all ranges are candidates and keep all; memory is not sized */
    int node_rank; /* chooses the device that tells its kernels' scratch: a process can open its own one alone */
};
enum hapt_status hapt_profile_predict(const struct hapt_cluster *cluster, const struct hapt_model *model,
                                      const struct hapt_layers *layers, const struct hapt_config *config,
                                      const struct hapt_efficiency *efficiency,
                                      const struct hapt_predict_options *options, struct hapt_arena *result,
                                      struct hapt_profile **profile);

#endif
