/*
 * Inside src/plan: the search problem in the form that one pass of the DP wants, and the pass itself.
 *
 * A suffix of the pipeline covers layers [k, L). Its group is (subclusters it uses, place of its first stage), its
 * points are Pareto-optimal (latency, launch count of its first stage) by devices d used in the front subcluster of
 * that place. A prefix covers [0, k) and leaves the rest to a suffix: it may use the subclusters outside the suffix's
 * group, and all but d devices of the group's front subcluster.
 *
 * A place is what a stage runs on, submesh aside: a subcluster, which is its own front; or a group of mixed stages with
 * one of its subclusters as front. By the rule of mixed stages (hapt/plan.h) the stages in front of a mixed one use at
 * most one of its subclusters, its front, and those behind at most one other, which is the front of the next stage: all
 * stages between would use it too, and it can be shared on one side only. So
 *   - d of one subcluster, the front, is all that stages in front of a suffix must know; a suffix that starts with a
 *     mixed stage has d = what that stage takes of its front, as no other stage of it uses the front;
 *   - whether a stage may stand before a suffix is known from both places, the mask and d: what it takes of the shared
 *     subcluster must be left there (`joint`), its others must be new to the suffix. Behind it nothing of that matters.
 * The points and their dominance are as without mixed stages: fewer devices of the front, fewer launches and less
 * latency allow every prefix that more of them allow. (With use_all_devices only equal devices compare, and every
 * subcluster of a stage that no neighbour shares must be used up.) Hence the optimum stays exact. A mixed stage at
 * which the pipeline begins stands for each choice of its front; these ways to one plan tie.
 */
#ifndef HAPT_PLAN_SEARCH_H
#define HAPT_PLAN_SEARCH_H

#include "hapt/plan.h"

/* The state of a suffix names its set of subclusters by bits. */
#define HAPT_SEARCH_MAX_SUBCLUSTERS 12

struct search_candidate {
    double time_s; /* t_i, step_time / B included */
    int end;       /* layers [k, end), k by the list it stands in */
    int submesh;   /* index in the profile; mixed: 0 */
    int devices;   /* n * m; mixed: of the front subcluster */
    int launches;  /* most microbatches in flight that fit its memory, at most the problem's cap */
};

struct search_place {
    int front;         /* subcluster */
    unsigned clusters; /* all that it uses, as bits */
    int group;         /* of mixed stages; -1: a subcluster alone */
    bool ends;         /* may stand last, as far as its devices go */
};

/* What a stage and the one behind it share: a subcluster, or nothing; or they may not follow each other. */
enum { SEARCH_APART = -1, SEARCH_NEVER = -2 };

struct search_problem {
    const struct hapt_profile *profile;
    const struct hapt_search_options *options;
    int L, C, B;
    int P;                      /* places: those of the subclusters come first, by their index */
    struct search_place *place; /* [P] */
    int *taken;                 /* [P][C] devices that a mixed stage takes of each subcluster */
    int *joint;                 /* [in front][behind] a subcluster, SEARCH_APART or SEARCH_NEVER */
    int group_count;            /* groups by index mask * P + current */
    /* Subclusters with equal tables and links are interchangeable: suffixes take them from the highest index down, so
     * only such groups count. `group` lists them by rising mask, of one mask those that start with a mixed stage first;
     * `valid` [group_count]. */
    struct search_group {
        unsigned mask;
        int current; /* place */
    } * group;
    int valid_count;
    bool *valid;
    unsigned
        kind[HAPT_SEARCH_MAX_SUBCLUSTERS]; /* [c] the subclusters interchangeable with c, itself included, as bits */
    int cap;           /* of every launch count: B; 1 under GPipe, whose stages all launch B and stand here for one */
    int most_launches; /* bound of every N_i */
    int most_devices;  /* of a subcluster */
    int devices[HAPT_MAX_SUBCLUSTERS];
    /* submeshes with the same number of devices are one class: those of place p are [first_class[p], first_class[p +
     * 1]) by rising class_devices; class_of[p][submesh] */
    int class_count, *first_class, *class_devices, **class_of;
    double *comm_s;   /* [from][to][L] behind layer l, by places; infinite where they may not follow */
    double longest_s; /* the largest pace that can matter */
    struct search_candidate **candidate; /* [P * L], by place and first layer */
    int *candidate_count;
    int64_t all_candidates;
    bool thinned; /* slower programs for the same layers were left out */
};

/*
 * `memory_factor` scales every device's memory (1; other values only to explain infeasibility). A candidate is left out
 * when another one for the same layers with at most as many devices is at least as fast and fits as many launches: no
 * pass finds a smaller latency with it. It stays when it is slower by no more than `tie_s` and precedes the other in
 * the order of ties; negative: never.
 */
enum hapt_status search_problem_create(const struct hapt_profile *profile, const struct hapt_search_options *options,
                                       double memory_factor, double tie_s, struct hapt_arena *arena,
                                       struct search_problem **problem);
/* The paces in [least_s, most_s] that can be optimal, rising and distinct: some t, c, 2c or c / epsilon. Frees with the
 * arena. */
enum hapt_status search_paces(const struct search_problem *problem, double least_s, double most_s,
                              struct hapt_arena *arena, double **pace, int64_t *count);
/* Places, and what they share; then interchangeable subclusters and the groups: parts of search_problem_create. */
enum hapt_status search_problem_places(struct search_problem *problem, struct hapt_arena *arena);
struct hapt_subclusters search_place_subclusters(const struct search_problem *problem, int p);
enum hapt_status search_problem_group(struct search_problem *problem, struct hapt_arena *arena);
/* The subcluster that a plan names for the place `current` (mixed: C + its group), the latest of those in `used`:
 * interchangeable ones stand in a plan by rising index, whatever a pass took them for. */
int search_name(const struct search_problem *problem, unsigned used, int current);
/* A lower bound of the sum of t_i + 2 c_i at any pace: stages over unlimited devices. */
enum hapt_status search_least_sum(const struct search_problem *problem, struct hapt_arena *scratch, double *least_s);

struct search_point {
    double latency_s;
    int launches;
};

/* Suffixes of one (layer, group) that any pipeline can hold at this pace: d in [low, high]. */
struct search_row {
    int low, high; /* empty: low > high */
    int current;   /* the group's place */
    int64_t cell;  /* of d = low in `prefix_s`; its points are [start[d - low], start[d - low + 1]) of the pool */
    int64_t start; /* in `starts`; -1: no points */
    int any_first, any_end; /* Pareto points over all d, for stages in front that do not share the front subcluster */
    double least_prefix_s;  /* over d */
    double least_s;         /* of its points */
    int first_d, last_d;    /* the devices that have some */
};

/* One pass for one pace. */
struct search_table {
    const struct search_problem *problem;
    double t_max_s;
    unsigned char *delta;               /* as comm_s: extra launches; UCHAR_MAX: the transfer is slower than t_max */
    struct search_candidate *active;    /* those of the pace */
    int64_t *active_first, *active_end; /* [L][P] those of layer and place */
    /* those of a pace that no later one exceeds, where that is known; ceiling_s infinite: the problem's own lists */
    struct search_candidate *ceiling;
    int64_t *ceiling_first, *ceiling_end;
    double ceiling_s;
    int *least_launches;     /* [L][P] of a stage that starts there; INT_MAX: none can */
    int *behind;             /* [L + 1][P] of a stage of the place that ends there */
    int *furthest, *nearest; /* [class][L + 1] furthest end of a stage that starts up to there; nearest start */
    int *prefix_reach,
        *suffix_reach;           /* [group][devices + 1]: the last layer a prefix, the first a suffix can come to */
    int *group_low, *group_high; /* [group] layers with rows; low > high: none */
    int64_t *group_row;          /* [group] row of layer group_low */
    struct search_row *row;
    int64_t row_room, row_count;
    double *prefix_s;   /* least sum of a prefix, launch counts aside */
    double *handover_s; /* [row] least sum of a prefix that leaves the front subcluster untouched */
    int *starts;
    int64_t cell_room, cell_count;
    struct search_point *pool;
    int64_t pool_count, pool_room;
    double *work;    /* [devices + 1][most_launches + 1] */
    double *carry;   /* [most_launches + 1] */
    int *low, *high; /* [devices + 1] launches present in work */
    double budget_s;
    double *least_behind_s;                /* [L + 1] least latency of the points made at a layer */
    const struct search_candidate **close; /* of a layer and place: those that may stay within the budget */
    void (*poll)(void *context);           /* called now and then; NULL: not */
    void *poll_context;
    struct hapt_search_effort effort;
};

enum hapt_status search_table_init(const struct search_problem *problem, struct hapt_arena *arena,
                                   struct search_table *table);
void search_table_release(struct search_table *table);
/* Whether stages reach over all layers at this pace, memory beyond one launch and most links aside. */
enum hapt_status search_table_reaches(struct search_table *table, double t_max_s, bool *reaches);
/* No pace above that of the last call will be asked for: later calls start from its candidates. search_table_forget:
 * any may. */
void search_table_keep(struct search_table *table);
void search_table_forget(struct search_table *table);
/* Fills the table for one t_max. `latency_s`: the least sum of t_i + 2 c_i, infinite when nothing is within `budget_s`.
 * The sum does not depend on the budget. Afterwards the table holds every suffix of a plan within *latency_s; of worse
 * plans within the budget only where `whole` is set. */
enum hapt_status search_table_fill(struct search_table *table, double t_max_s, double budget_s, bool whole,
                                   double *latency_s);

/* Bounds of search_bound.c: active candidates, reach and rows of a pace; then the relaxed prefixes. */
enum hapt_status search_bound_reach(struct search_table *table, double t_max_s, bool *reaches);
enum hapt_status search_bound_prefixes(struct search_table *table, double *least_s);

/* Among the plans whose latency sum is at most `budget_s` (tolerance included) under the filled table: fewest stages,
 * then the lexicographically first (layers, subcluster, n, m); mixed stages count as subclusters behind all others, in
 * the order of their groups. Stages get their layers, subcluster and submesh. */
enum hapt_status search_trace(const struct search_table *table, double budget_s, struct hapt_arena *arena,
                              struct hapt_plan *plan);

/* The end of a phase of planning: where options->may_fail, a missing plan is not printed. */
static inline enum hapt_status search_agree(MPI_Comm comm, const struct hapt_search_options *options,
                                            enum hapt_status status)
{
    return options->may_fail ? hapt_env_agree_quietly(comm, status) : hapt_env_agree(comm, status);
}

/* Says why nothing is feasible; returns HAPT_ERR_INFEASIBLE. */
enum hapt_status search_explain(const struct hapt_profile *profile, const struct hapt_search_options *options);

/* Makes `stage` one of the profile's mixed group, its prices left at 0 (mixed.c). */
/* The program of a row of the profile is the stage's. */
void plan_stage_run(const struct hapt_profile *profile, const struct hapt_submesh *submesh,
                    struct hapt_plan_stage *stage);
enum hapt_status plan_stage_mix(const struct hapt_profile *profile, int group, struct hapt_arena *arena,
                                struct hapt_plan_stage *stage);
/* Its memory becomes that of the device which its launches fill most. */
void plan_stage_tighten(struct hapt_plan_stage *stage);
/* "2x4", or "2+1" devices of a mixed stage. */
const char *plan_stage_short(const struct hapt_plan_stage *stage, char text[64]);
/* The group of a mixed stage; -1: the profile has none on these devices. */
int plan_stage_group(const struct hapt_profile *profile, const struct hapt_plan_stage *stage);
/* Their tables in plan files (plan_io.c). */
enum hapt_status plan_write_mixed(struct hapt_h5 *file, const char *group, const struct hapt_plan *plan,
                                  struct hapt_arena *scratch);
enum hapt_status plan_read_mixed(struct hapt_h5 *file, const char *group, struct hapt_arena *arena,
                                 struct hapt_plan *plan);
/* HAPT_ERR_INPUT unless every mixed stage stands where it may (hapt/plan.h). */
enum hapt_status plan_check_mixed_order(const struct hapt_plan *plan);

/* Stage tables from the profile, launch counts, latency, eta and simulated time for a given t_max. */
enum hapt_status plan_price_at(const struct hapt_profile *profile, double t_max_s, struct hapt_plan *plan);

static inline size_t search_group(const struct search_problem *problem, unsigned mask, int current)
{
    return (size_t)mask * (size_t)problem->P + (size_t)current;
}

/* What is left of a suffix's mask behind a first stage at place p that shares `joint` with the next. */
static inline unsigned search_rest(const struct search_problem *problem, unsigned mask, int p, int joint)
{
    return mask & ~(problem->place[p].clusters & ~(joint >= 0 ? 1u << joint : 0));
}

/* Devices of the front subcluster of place p. */
static inline int search_front_devices(const struct search_problem *problem, int p)
{
    return problem->devices[problem->place[p].front];
}

static inline int search_joint(const struct search_problem *problem, int p, int q)
{
    return problem->joint[p * problem->P + q];
}

/* Devices of `joint` that the stages behind one at the mixed place p may use. */
static inline int search_left(const struct search_problem *problem, int p, int joint)
{
    return problem->devices[joint] - problem->taken[p * problem->C + joint];
}

/* NULL: no suffix of this group starts there. */
static inline struct search_row *search_row(const struct search_table *table, int layer, size_t group)
{
    if (layer < table->group_low[group] || layer > table->group_high[group]) return NULL;
    struct search_row *row = &table->row[table->group_row[group] + (layer - table->group_low[group])];
    return row->low <= row->high ? row : NULL;
}

static inline size_t search_link(const struct search_problem *problem, int from, int to, int layer)
{
    return ((size_t)from * (size_t)problem->P + (size_t)to) * (size_t)problem->L + (size_t)layer;
}

static inline int search_launches(const struct search_problem *problem, int after, int delta)
{
    return after + delta < problem->cap ? after + delta : problem->cap;
}

#endif
