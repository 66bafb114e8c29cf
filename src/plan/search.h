/*
 * Inside src/plan: the search problem in the form that one pass of the DP wants, and the pass itself.
 *
 * A suffix of the pipeline covers layers [k, L). Its group is (subclusters it uses, subcluster of its first stage), its
 * points are Pareto-optimal (latency, launch count of its first stage) by devices used in that first subcluster.
 */
#ifndef HAPT_PLAN_SEARCH_H
#define HAPT_PLAN_SEARCH_H

#include "hapt/plan.h"

/* The state of a suffix names its set of subclusters by bits. */
#define HAPT_SEARCH_MAX_SUBCLUSTERS 12

struct search_candidate {
    double time_s; /* t_i, step_time / B included */
    int end;       /* layers [k, end), k by the list it stands in */
    int submesh;   /* index in the profile */
    int devices;   /* n * m */
    int launches;  /* most microbatches in flight that fit its memory, at most B */
};

struct search_problem {
    const struct hapt_profile *profile;
    const struct hapt_search_options *options;
    int L, C, B;
    int group_count;   /* groups by index mask * C + current; those with the bit unset are unused */
    int most_launches; /* bound of every N_i */
    int devices[HAPT_MAX_SUBCLUSTERS];
    double *comm_s;                      /* [from][to][L] behind layer l */
    struct search_candidate **candidate; /* [C][L] by rising time */
    int *candidate_count;                /* [C][L] */
    double *t_max;                       /* rising, distinct */
    int64_t t_max_count;
};

/* `memory_factor` scales every device's memory (1; other values only to explain infeasibility). */
enum hapt_status search_problem_create(const struct hapt_profile *profile, const struct hapt_search_options *options,
                                       double memory_factor, struct hapt_arena *arena, struct search_problem **problem);

struct search_point {
    double latency_s;
    int launches;
};

/* Points of one (layer, group): those with d devices are [start[d], start[d + 1]) of the pool; NULL start: none.
 * `any` are the Pareto points over all d that may hand over to another subcluster. */
struct search_row {
    int *start;
    int any_first, any_end;
};

struct search_table {
    const struct search_problem *problem;
    double t_max_s;
    struct search_row *row; /* [L][group] */
    unsigned char *delta;   /* [from][to][L] extra launches; UCHAR_MAX: the transfer is slower than t_max */
    struct search_point *pool;
    int64_t pool_count, pool_room;
    int *starts;     /* storage of row->start */
    double *work;    /* [devices + 1][most_launches + 1] */
    double *carry;   /* [most_launches + 1] */
    int *low, *high; /* [devices + 1] launches present in work */
};

enum hapt_status search_table_init(const struct search_problem *problem, struct hapt_arena *arena,
                                   struct search_table *table);
void search_table_release(struct search_table *table);
/* Fills the table for one t_max. `latency_s`: the least sum of t_i + 2 c_i, infinite when nothing fits. */
enum hapt_status search_table_fill(struct search_table *table, double t_max_s, double *latency_s);

/* Among the plans whose latency sum is at most `budget_s` (tolerance included) under the filled table: fewest stages,
 * then the lexicographically first (layers, subcluster, n, m). Stages get their layers, subcluster and submesh. */
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

/* Stage tables from the profile, launch counts, latency, eta and simulated time for a given t_max. */
enum hapt_status plan_price_at(const struct hapt_profile *profile, double t_max_s, struct hapt_plan *plan);

static inline size_t search_group(const struct search_problem *problem, unsigned mask, int current)
{
    return (size_t)mask * (size_t)problem->C + (size_t)current;
}

static inline struct search_row *search_row(const struct search_table *table, int layer, size_t group)
{
    return &table->row[(size_t)layer * (size_t)table->problem->group_count + group];
}

static inline size_t search_link(const struct search_problem *problem, int from, int to, int layer)
{
    return ((size_t)from * (size_t)problem->C + (size_t)to) * (size_t)problem->L + (size_t)layer;
}

static inline int search_launches(const struct search_problem *problem, int after, int delta)
{
    return after + delta < problem->B ? after + delta : problem->B;
}

#endif
