/* Inside src/plan: what the baselines share. */
#ifndef HAPT_PLAN_BASELINES_H
#define HAPT_PLAN_BASELINES_H

#include "hapt/baselines.h"

/* A profile seen through coarse layers: its own tables, small enough to change and to search many times. */
struct coarse {
    struct hapt_profile *profile;
    int *end_layer; /* [coarse layers] in layers of the fine one */
};
/* The coarse layers end where `cut` says (hapt_plan_grid) and at the end. */
enum hapt_status coarse_make(const struct hapt_profile *fine, const bool *cut, struct hapt_arena *arena,
                             struct coarse *coarse);
/* A plan of coarse layers becomes one of fine ones; its prices are those of the coarse profile still. */
void coarse_restore(const struct coarse *coarse, const struct hapt_profile *fine, struct hapt_plan *plan);
/* The same tables under links of its own: what is left is shared and not to be written. */
enum hapt_status own_links(const struct hapt_profile *profile, struct hapt_arena *arena, struct hapt_profile *same);

/* Candidates of one system: the fastest simulated one wins; where none runs, the one that misses by least says why. */
struct contest {
    const struct hapt_profile *profile; /* the truth */
    struct hapt_arena *result;
    struct hapt_plan *best;
    int64_t entered; /* candidates so far; which one won: */
    int64_t winner;
    double excess;                /* of the nearest miss: memory it needs per memory there is; infinite: not known */
    char reason[1024], hint[512]; /* of the nearest miss; "": none yet */
    double seconds;               /* of all searches */
    int64_t candidates, evaluated;
};
struct contest contest_open(const struct hapt_profile *profile, struct hapt_arena *result);
/* Prices a candidate's stages under the true profile; one that does not run is no error. `fits` (may be NULL) says
 * whether. */
enum hapt_status contest_enter(struct contest *contest, struct hapt_plan *candidate, bool *fits);
/* A search that found nothing takes part with the recorded failure: HAPT_OK, or the status when it is another failure.
 */
enum hapt_status contest_miss(struct contest *contest, enum hapt_status status);
enum hapt_status contest_close(const struct contest *contest, enum hapt_strategy strategy, struct hapt_plan **plan);

/* Orders of the subclusters: all up to `most` of them, beyond that the profile's own and its reverse. */
void order_first(int *order, int count);
bool order_next(int *order, int count, int most);
/* Lets stages follow each other only in that order: every other link never gets across. */
void order_links(struct hapt_profile *profile, const int *order);
/* Transfers inside and between subclusters take no time. */
void free_links(struct hapt_profile *profile);
/* HAPT_ERR_INFEASIBLE when nodes of the subclusters have different numbers of devices. */
enum hapt_status need_equal_nodes(const struct hapt_profile *profile, enum hapt_strategy strategy);

/* The systems; each collective where it searches. */
enum hapt_status plan_megatron(const struct hapt_profile *profile, const struct hapt_strategy_options *options,
                               struct hapt_arena *result, struct hapt_plan **plan);
enum hapt_status plan_alpa(MPI_Comm comm, const struct hapt_profile *profile,
                           const struct hapt_strategy_options *options, struct hapt_arena *result,
                           struct hapt_plan **plan, const char **note);
enum hapt_status plan_hexiscale(MPI_Comm comm, const struct hapt_profile *profile,
                                const struct hapt_strategy_options *options, struct hapt_arena *result,
                                struct hapt_plan **plan);

#endif
