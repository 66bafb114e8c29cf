/* Inside src/study: shared by the baselines. */
#ifndef HAPT_STUDY_BASELINES_H
#define HAPT_STUDY_BASELINES_H

#include "hapt/baselines.h"

/* A profile with coarse layers: its own tables, small enough to change and to search many times. */
struct coarse {
    struct hapt_profile *profile;
    int *end_layer; /* [coarse layers] ends, in layers of the fine profile */
};
/* Builds the coarse profile. Coarse layers end where `boundary` is true (hapt_plan_grid) and at the last layer. */
enum hapt_status coarse_make(const struct hapt_profile *fine, const bool *boundary, struct hapt_arena *arena,
                             struct coarse *coarse);
/* Converts a plan's coarse layers to fine ones. Its times and bytes stay those of the coarse profile. */
void coarse_restore(const struct coarse *coarse, const struct hapt_profile *fine, struct hapt_plan *plan);

/* Candidates of one system: the fastest simulated one wins. If none can run, the nearest miss gives the reason. */
struct selection {
    const struct hapt_profile *profile; /* the true profile */
    struct hapt_arena *result;
    struct hapt_plan *best;
    int64_t entered; /* number of candidates so far; `winner`: the winning one */
    int64_t winner;
    double excess;                /* of the nearest miss: needed / available memory; infinite: unknown */
    char reason[1024], hint[512]; /* of the nearest miss; "": none yet */
    double seconds;               /* time of all searches */
    int64_t candidates, evaluated;
};
struct selection selection_open(const struct hapt_profile *profile, struct hapt_arena *result);
/* Prices a candidate's stages with the true profile. A candidate that cannot run is no error. `fits` (may be NULL):
 * whether it can. */
enum hapt_status selection_enter(struct selection *selection, struct hapt_plan *candidate, bool *fits);
/* The same with the candidate's own launch counts. */
enum hapt_status selection_enter_launches(struct selection *selection, struct hapt_plan *candidate);
/* Records a search without a plan as a miss, with the recorded failure. Returns HAPT_OK, or the status of any other
 * failure. */
enum hapt_status selection_miss(struct selection *selection, enum hapt_status status);
enum hapt_status selection_close(const struct selection *selection, enum hapt_strategy strategy,
                                 struct hapt_plan **plan);

/* The index of this submesh with this program in a subcluster; -1: none. */
int find_submesh(const struct hapt_profile_cluster *cluster, const struct hapt_submesh *submesh);

/* Orders of the subclusters: all orders of up to `most` subclusters, beyond that the profile's own and its reverse. */
void order_first(int *order, int count);
bool order_next(int *order, int count, int most);
/* Allows only this order of stages: all other links get an infinite latency. */
void order_links(struct hapt_profile *profile, const int *order);
/* Sets all links to infinite bandwidth and zero latency. */
void free_links(struct hapt_profile *profile);
/* HAPT_ERR_INFEASIBLE: the subclusters differ in devices per node. */
enum hapt_status need_equal_nodes(const struct hapt_profile *profile, enum hapt_strategy strategy);

/* The systems; collective over `comm` if they take one. */
enum hapt_status plan_megatron(const struct hapt_profile *profile, const struct hapt_strategy_options *options,
                               struct hapt_arena *result, struct hapt_plan **plan);
enum hapt_status plan_pfeife(const struct hapt_profile *profile, const struct hapt_strategy_options *options,
                             struct hapt_arena *result, struct hapt_plan **plan);
enum hapt_status plan_deepspeed(const struct hapt_profile *profile, const struct hapt_strategy_options *options,
                                struct hapt_arena *result, struct hapt_plan **plan);
enum hapt_status plan_colossal(const struct hapt_profile *profile, const struct hapt_strategy_options *options,
                               struct hapt_arena *result, struct hapt_plan **plan);
enum hapt_status plan_alpa(MPI_Comm comm, const struct hapt_profile *profile,
                           const struct hapt_strategy_options *options, struct hapt_arena *result,
                           struct hapt_plan **plan, const char **note);
enum hapt_status plan_hexiscale(MPI_Comm comm, const struct hapt_profile *profile,
                                const struct hapt_strategy_options *options, struct hapt_arena *result,
                                struct hapt_plan **plan);

#endif
