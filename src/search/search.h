/*
 * Inside src/search: the search problem in the form that one pass of the DP needs, and the pass itself.
 *
 * A suffix of the pipeline covers layers [k, L). Its state is (subclusters it uses, device set of its first stage). Its
 * points are Pareto-optimal (latency, launch count of its first stage), for each number d of devices used in the front
 * subcluster of that device set. A prefix covers [0, k). It may use the subclusters outside the suffix's state, and all
 * but d devices of the state's front subcluster.
 *
 * A device set (struct search_device_set) is what a stage runs on, without the submesh: a subcluster, which is its own
 * front; or a mixed group of the profile with one of its subclusters as front. By the rules of mixed stages
 * (hapt/plan.h) the stages in front of a mixed stage use at most one of its subclusters, its front. The stages behind
 * it use at most one other, which is the front of the next stage: all stages between would use it too, and only one
 * side can share it. So
 *   - The stages in front of a suffix need only d of the front subcluster. If the suffix starts with a mixed stage,
 *     d is what that stage takes of its front, because no other stage of the suffix uses the front.
 *   - Both device sets, the mask and d decide whether a stage may precede a suffix. The devices that it takes of the
 *     shared subcluster (`shared_subcluster`) must be free there, and its other subclusters must be new to the suffix.
 * Dominance of points is the same as without mixed stages: fewer devices of the front, fewer launches and less latency
 * allow at least the same prefixes. With use_all_devices only equal device counts compare, and every subcluster of a
 * stage that no neighbour shares must be used up. So the optimum stays exact. A mixed first stage is tried with each of
 * its fronts; these variants of one plan tie.
 */
#ifndef HAPT_SEARCH_PRIVATE_H
#define HAPT_SEARCH_PRIVATE_H

#include "hapt/search.h"

/* limit of the bit set of subclusters in the state of a suffix */
#define HAPT_SEARCH_MAX_SUBCLUSTERS 12

struct search_candidate {
    double time_s; /* t_i, step_time / B included */
    int end;       /* layers [k, end); k is that of its list */
    int submesh;   /* index in the profile; mixed: 0 */
    int devices;   /* n * m; mixed: of the front subcluster */
    int launches;  /* most microbatches in flight that fit its memory, at most the problem's cap */
};

struct search_device_set {
    int front;         /* subcluster */
    unsigned clusters; /* all subclusters that it uses, as bits */
    int mixed_group;   /* mixed group of the profile; -1: a single subcluster */
    bool ends;         /* may be last, as far as its devices allow */
};

/* Values of `shared_subcluster` if there is none: the device sets are disjoint, or must not follow each other. */
enum { SEARCH_NOTHING_SHARED = -1, SEARCH_NOT_ALLOWED = -2 };

struct search_problem {
    const struct hapt_profile *profile;
    const struct hapt_search_options *options;
    int L, C, B;
    int device_set_count;
    struct search_device_set *device_set; /* those of the subclusters come first, by index */
    int *taken;                           /* [device set][C] devices that a mixed one takes of each subcluster */
    int *shared_subcluster;               /* [in front][behind]: a subcluster, or a value of the enum above */
    int suffix_state_count;               /* index: mask * device_set_count + current */
    /* Subclusters with equal tables and links are interchangeable. Suffixes take them from the highest index down, so
     * only such states are valid. `suffix_state` lists these by ascending mask; of one mask, those that start with a
     * mixed stage first. `valid` [suffix_state_count]. */
    struct search_suffix_state {
        unsigned mask;
        int current; /* device set */
    } * suffix_state;
    int valid_count;
    bool *valid;
    unsigned kind[HAPT_SEARCH_MAX_SUBCLUSTERS]; /* [c] subclusters interchangeable with c, including c, as bits */
    int cap;           /* limit of every launch count: B; 1 under GPipe, because all its stages launch B */
    int most_launches; /* upper bound of every N_i */
    int most_devices;  /* largest device count of a subcluster */
    int devices[HAPT_MAX_SUBCLUSTERS];
    /* Submeshes with the same number of devices form a class. Device set p has those in
     * [first_class[p], first_class[p + 1]), by ascending class_devices; class_of[p][submesh]. */
    int class_count, *first_class, *class_devices, **class_of;
    double *comm_s;                      /* [from][to][L] behind layer l, by device sets; infinite: not allowed */
    double longest_s;                    /* the largest t_max that can matter */
    double longest_stage_s;              /* stages that take longer without step times are no candidates */
    struct search_candidate **candidate; /* by device set and first layer */
    int *candidate_count;
    int64_t all_candidates;
    bool thinned; /* slower programs for the same layers were omitted */
};

/* HAPT_ERR_USAGE: no microbatches. */
static inline enum hapt_status search_check_options(const struct hapt_search_options *options)
{
    if (options->microbatches >= 1) return HAPT_OK;
    return hapt_fail(HAPT_ERR_USAGE, "give --microbatches 1 or more", "%d microbatches per step",
                     options->microbatches);
}
/* split.c. The launches of a plan do not fit when it is split: options of a search for the best plan of those that do,
 * and the choice between both. HAPT_OK also if there is none. */
struct hapt_search_options search_split_again(const struct hapt_search_options *options);
enum hapt_status search_take_split(const struct hapt_profile *profile, enum hapt_status status, struct hapt_plan *split,
                                   struct hapt_plan **plan);
/* loops.c. HAPT_ERR_USAGE: the settings of a looped schedule do not fit the microbatches. */
enum hapt_status search_check_loops(const struct hapt_search_options *options);
/* Folds given stages onto submeshes, and prices them with the best of the settings that the options allow. */
enum hapt_status search_price_loops(const struct hapt_profile *profile, const struct hapt_search_options *options,
                                    struct hapt_plan *plan);
/* True if looped plans are worth a search beside those without loops. */
bool search_may_loop(const struct hapt_profile *profile, const struct hapt_search_options *options);
/* *plan becomes a looped one with a step below `limit_s`, if one is found. The search starts from the submeshes of
 * `unlooped`. Collective. */
enum hapt_status search_choose_loops(MPI_Comm comm, const struct hapt_profile *profile,
                                     const struct hapt_search_options *options, const struct hapt_plan *unlooped,
                                     double limit_s, struct hapt_arena *result, struct hapt_plan **plan);
/* hapt_plan_search_batchings without loops. each [count], may be NULL: also the plans of all batchings that are not
 * much slower, without splits; NULL: none. */
enum hapt_status search_batchings(MPI_Comm comm, const struct hapt_search_batching *batching, int count,
                                  const struct hapt_search_options *options, struct hapt_arena *result,
                                  struct hapt_plan **plan, int *chosen, struct hapt_plan **each);
/*
 * Builds the problem. `memory_factor` scales every device's memory (1; other values only explain infeasibility). Stages
 * that take longer than `longest_stage_s`, step times apart, are no candidates. A candidate is also omitted if another
 * one for the same layers dominates it: at most as many devices, at least as fast, at least as many launches fit. No
 * pass finds a smaller latency with it. It stays if it is slower by at most `tie_s` and precedes the other in the order
 * of ties. `tie_s` < 0: it never stays.
 */
enum hapt_status search_problem_create(const struct hapt_profile *profile, const struct hapt_search_options *options,
                                       double memory_factor, double longest_stage_s, double tie_s,
                                       struct hapt_arena *arena, struct search_problem **problem);
/* The t_max values in [least_s, most_s] that can be optimal, ascending and distinct: some t, c, 2c or c / epsilon.
 * *t_max is in `arena`. */
enum hapt_status search_t_max_candidates(const struct search_problem *problem, double least_s, double most_s,
                                         struct hapt_arena *arena, double **t_max, int64_t *count);
/* Parts of search_problem_create: first device sets and their shared subclusters, then interchangeable subclusters and
 * suffix states. */
enum hapt_status search_problem_device_sets(struct search_problem *problem, struct hapt_arena *arena);
struct hapt_subclusters search_device_set_subclusters(const struct search_problem *problem, int p);
enum hapt_status search_problem_suffix_states(struct search_problem *problem, struct hapt_arena *arena);
/* The subcluster that a plan names for device set `current` (mixed: C + its mixed group), the latest of those in
 * `used`. A plan names interchangeable subclusters by ascending index, independent of the pass. */
int search_name(const struct search_problem *problem, unsigned used, int current);
/* A lower bound of the sum of t_i + 2 c_i at any t_max: unlimited devices. */
enum hapt_status search_least_sum(const struct search_problem *problem, struct hapt_arena *scratch, double *least_s);

struct search_point {
    double latency_s;
    int launches;
};

/* Suffixes of one (layer, suffix state) that a pipeline can contain at this t_max: d in [low, high]. */
struct search_row {
    int low, high; /* empty: low > high */
    int current;   /* the state's device set */
    int64_t cell;  /* index of d = low in `prefix_s`; its points are [start[d - low], start[d - low + 1]) of the pool */
    int64_t start; /* index in `starts`; -1: no points */
    int any_first, any_end; /* Pareto points over all d, for preceding stages that do not share the front subcluster */
    double least_prefix_s;  /* least over d */
    double least_s;         /* least latency of its points */
    int first_d, last_d;    /* device counts d that have points */
};

/* One pass for one t_max. */
struct search_table {
    const struct search_problem *problem;
    double t_max_s;
    unsigned char *delta;            /* index as comm_s: extra launches; UCHAR_MAX: the transfer is slower than t_max */
    struct search_candidate *active; /* candidates fast enough for t_max */
    int64_t *active_first, *active_end; /* [L][device set] */
    /* Candidates of a t_max that no later one exceeds. ceiling_s infinite: unknown, use the problem's lists. */
    struct search_candidate *ceiling;
    int64_t *ceiling_first, *ceiling_end;
    double ceiling_s;
    int *least_launches;     /* [L][device set] of a stage that starts there; INT_MAX: none can */
    int *behind;             /* [L + 1][device set] of a stage that ends there */
    int *furthest, *nearest; /* [class][L + 1] furthest end of a stage that starts at or before; nearest start of one
                                that ends at or behind */
    int *prefix_reach,
        *suffix_reach; /* [suffix state][devices + 1]: last layer that a prefix can reach, first that a suffix can */
    int *suffix_state_low, *suffix_state_high; /* [suffix state] layers with rows; low > high: none */
    int64_t *suffix_state_row;                 /* [suffix state] row of layer suffix_state_low */
    struct search_row *row;
    int64_t row_room, row_count;
    double *prefix_s;           /* least sum of a prefix, without launch counts */
    double *untouched_prefix_s; /* [row] least sum of a prefix that uses no device of the front subcluster */
    int *starts;
    int64_t cell_room, cell_count;
    struct search_point *pool;
    int64_t pool_count, pool_room;
    double *work;    /* [devices + 1][most_launches + 1] */
    double *carry;   /* [most_launches + 1] */
    int *low, *high; /* [devices + 1] range of launches present in work */
    double limit_s;  /* of the prefixes: what is in front of a stage, and B times the stage, take at most this; set by
                        search_table_init to infinity */
    double budget_s;
    double *least_behind_s;                /* [L + 1] least latency of the points at a layer */
    const struct search_candidate **close; /* candidates of a layer and device set that may stay within the budget */
    void (*poll)(void *context);           /* called at intervals; may be NULL */
    void *poll_context;
    struct hapt_search_effort effort;
};

static inline enum hapt_status search_no_memory(int64_t states)
{
    return hapt_fail(HAPT_ERR_MEMORY, "plan with fewer layers (--layers-per-model), or with --gap",
                     "the search needs memory for %lld states", (long long)states);
}
enum hapt_status search_table_init(const struct search_problem *problem, struct hapt_arena *arena,
                                   struct search_table *table);
void search_table_release(struct search_table *table);
/* True if stages can cover all layers at this t_max. Memory beyond one launch and most links are ignored. */
enum hapt_status search_table_reaches(struct search_table *table, double t_max_s, bool *reaches);
/* search_table_keep: no later t_max exceeds the last one, so later calls start from its candidates.
 * search_table_forget: any t_max may follow. */
void search_table_keep(struct search_table *table);
void search_table_forget(struct search_table *table);
/* Fills the table for one t_max. `latency_s`: the least sum of t_i + 2 c_i; infinite: none within `budget_s`. It does
 * not depend on the budget. Afterwards the table holds every suffix of a plan within *latency_s. It holds those of
 * worse plans within the budget only if `whole` is set. */
enum hapt_status search_table_fill(struct search_table *table, double t_max_s, double budget_s, bool whole,
                                   double *latency_s);

/* Bounds of search_bound.c: active candidates, reach and rows for a t_max; then the relaxed prefixes. */
enum hapt_status search_bound_reach(struct search_table *table, double t_max_s, bool *reaches);
/* *least_s: of all prefixes that reach the last layer. */
enum hapt_status search_bound_prefixes(struct search_table *table, double *least_s);

/* Selects one plan at t_max of those whose latency sum is at most `budget_s` (tolerance included; infinite: the least
 * sum): fewest stages, then the lexicographically first (layers, subcluster, n, m). Mixed stages count as subclusters
 * after all others, in the order of their groups. Fills layers, subcluster and submesh of the stages; no stages: there
 * is no plan. */
enum hapt_status search_trace(const struct search_problem *problem, double t_max_s, double budget_s,
                              struct hapt_arena *arena, struct hapt_plan *plan);
/* The order of ties between submeshes of a subcluster: negative if `a` comes first. */
static inline int search_compare_submeshes(const struct hapt_submesh *a, const struct hapt_submesh *b)
{
    if (a->n != b->n) return a->n - b->n;
    if (a->m != b->m) return a->m - b->m;
    if (a->tp != b->tp) return a->tp - b->tp;
    if (a->program != b->program) return a->program - b->program;
    return a->recompute != b->recompute ? a->recompute - b->recompute : a->weights_at - b->weights_at;
}

/* Explains why nothing is feasible; returns HAPT_ERR_INFEASIBLE. */
enum hapt_status search_explain(const struct hapt_profile *profile, const struct hapt_search_options *options);

static inline size_t search_suffix_state(const struct search_problem *problem, unsigned mask, int current)
{
    return (size_t)mask * (size_t)problem->device_set_count + (size_t)current;
}

/* The subclusters left for a suffix behind a first stage on device set p that shares `shared_subcluster` with the next
 * stage. */
static inline unsigned search_rest(const struct search_problem *problem, unsigned mask, int p, int shared_subcluster)
{
    return mask & ~(problem->device_set[p].clusters & ~(shared_subcluster >= 0 ? 1u << shared_subcluster : 0));
}

/* Devices of the front subcluster of device set p. */
static inline int search_front_devices(const struct search_problem *problem, int p)
{
    return problem->devices[problem->device_set[p].front];
}

static inline int search_shared_subcluster(const struct search_problem *problem, int p, int q)
{
    return problem->shared_subcluster[p * problem->device_set_count + q];
}

/* Devices of `shared_subcluster` left to the stages behind one on the mixed device set p. */
static inline int search_left(const struct search_problem *problem, int p, int shared_subcluster)
{
    return problem->devices[shared_subcluster] - problem->taken[p * problem->C + shared_subcluster];
}

/* NULL: no suffix of this state starts there. */
static inline struct search_row *search_row(const struct search_table *table, int layer, size_t state)
{
    if (layer < table->suffix_state_low[state] || layer > table->suffix_state_high[state]) return NULL;
    struct search_row *row = &table->row[table->suffix_state_row[state] + (layer - table->suffix_state_low[state])];
    return row->low <= row->high ? row : NULL;
}

static inline size_t search_link(const struct search_problem *problem, int from, int to, int layer)
{
    return ((size_t)from * (size_t)problem->device_set_count + (size_t)to) * (size_t)problem->L + (size_t)layer;
}

static inline int search_launches(const struct search_problem *problem, int after, int delta)
{
    return after + delta < problem->cap ? after + delta : problem->cap;
}

#endif
