/* Profiles and efficiency tables measured on the ranks of a bound cluster (HAPT 5.1). */
#ifndef HAPT_MEASURE_H
#define HAPT_MEASURE_H

#include "hapt/calibration.h"
#include "hapt/profile.h"

/* Measures the model. Steps: enumerate candidates; prune those that are out of memory or badly unbalanced; alias
 * structural duplicates; run the rest by the engine in parallel. Collective over env->world; every rank gets the
 * complete profile. recompute: also stages that recompute, as --recompute says; with auto only if some device may lack
 * memory. *kept: the same profile without stages that recompute or whose weights move; *profile if there are
 * none; NULL if some layer fits nowhere without. `kept` may be NULL. */
enum hapt_status hapt_profile_measure(const struct hapt_env *env, const struct hapt_cluster *cluster,
                                      const struct hapt_model *model, const struct hapt_layers *layers,
                                      const struct hapt_config *config, bool recompute, struct hapt_offloading offload,
                                      struct hapt_arena *result, struct hapt_profile **profile,
                                      struct hapt_profile **kept);
/* Times every operator of the model, forward and backward, and fits the efficiency tables. It uses every device count
 * that a microbatch's rows can be shared over. Collective over env->world; every rank gets all tables. */
enum hapt_status hapt_profile_calibrate(const struct hapt_env *env, const struct hapt_cluster *cluster,
                                        const struct hapt_model *model, const struct hapt_layers *layers,
                                        const struct hapt_config *config, struct hapt_arena *result,
                                        struct hapt_efficiency **efficiency);

#endif
