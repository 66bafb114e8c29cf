/* Strategies by name: HAPT with its ablations, and the code that the other systems share. */
#include "baselines.h"
#include "pipelines.h"
#include "view.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static const char *const names[HAPT_STRATEGY_COUNT] = {"hapt",      "even",   "megatron",  "alpa",
                                                       "hexiscale", "pfeife", "deepspeed", "colossal"};

const char *hapt_strategy_name(enum hapt_strategy strategy)
{
    return names[strategy];
}

bool hapt_strategy_parse(const char *name, enum hapt_strategy *strategy)
{
    for (int k = 0; k < HAPT_STRATEGY_COUNT; k++) {
        if (strcmp(name, names[k]) == 0) {
            *strategy = (enum hapt_strategy)k;
            return true;
        }
    }
    return false;
}

enum hapt_schedule_kind hapt_strategy_schedule(enum hapt_strategy strategy, enum hapt_schedule_kind asked)
{
    switch (strategy) {
    case HAPT_STRATEGY_MEGATRON:
    case HAPT_STRATEGY_DEEPSPEED:
    case HAPT_STRATEGY_COLOSSAL:
    case HAPT_STRATEGY_HEXISCALE: return HAPT_SCHEDULE_1F1B;
    case HAPT_STRATEGY_ALPA: return HAPT_SCHEDULE_EAGER;
    case HAPT_STRATEGY_PFEIFE: return HAPT_SCHEDULE_H1F1B; /* with launch counts of its own */
    default: return asked;
    }
}

struct selection selection_open(const struct hapt_profile *profile, struct hapt_arena *result)
{
    return (struct selection){.profile = profile, .result = result, .winner = -1, .excess = INFINITY};
}

/* Keeps the recorded failure if it is the nearest miss so far. Allocates nothing: a rank that failed here alone would
 * miss the next collective search. */
static void note_miss(struct selection *selection, double excess)
{
    if (!selection->reason[0] || excess < selection->excess) {
        selection->excess = excess;
        snprintf(selection->reason, sizeof selection->reason, "%s", hapt_fail_message());
        snprintf(selection->hint, sizeof selection->hint, "%s", hapt_fail_hint());
    }
    hapt_fail_reset();
}

static bool is_answer(enum hapt_status status)
{
    return status == HAPT_ERR_INFEASIBLE || status == HAPT_ERR_INPUT;
}

enum hapt_status selection_miss(struct selection *selection, enum hapt_status status)
{
    if (!is_answer(status)) return status;
    note_miss(selection, INFINITY);
    return HAPT_OK;
}

static enum hapt_status enter(struct selection *selection, struct hapt_plan *candidate, enum hapt_status status,
                              bool *fits)
{
    const int64_t number = selection->entered++;
    selection->seconds += candidate->search.seconds;
    selection->candidates += candidate->search.candidates;
    selection->evaluated += candidate->search.evaluated;
    if (fits) *fits = status == HAPT_OK;
    if (is_answer(status)) {
        double excess = status == HAPT_ERR_INFEASIBLE ? 0 : INFINITY;
        for (int i = 0; i < candidate->stage_count && status == HAPT_ERR_INFEASIBLE; i++)
            excess = fmax(excess, candidate->stage[i].memory_bytes / candidate->stage[i].device_memory_bytes);
        note_miss(selection, excess);
        return HAPT_OK;
    }
    HAPT_TRY(status);
    if (selection->best && selection->best->simulated_s <= candidate->simulated_s) return HAPT_OK;
    selection->best = candidate;
    selection->winner = number;
    return HAPT_OK;
}

enum hapt_status selection_enter(struct selection *selection, struct hapt_plan *candidate, bool *fits)
{
    return enter(selection, candidate, hapt_plan_price(selection->profile, candidate), fits);
}

enum hapt_status selection_enter_launches(struct selection *selection, struct hapt_plan *candidate)
{
    return enter(selection, candidate, hapt_plan_price_launches(selection->profile, candidate), NULL);
}

enum hapt_status selection_close(const struct selection *selection, enum hapt_strategy strategy,
                                 struct hapt_plan **plan)
{
    if (!selection->best)
        return hapt_fail(HAPT_ERR_INFEASIBLE, selection->hint, "%s has no plan here: %s", names[strategy],
                         selection->reason[0] ? selection->reason : "none of its settings can use these devices");
    selection->best->search.seconds = selection->seconds;
    selection->best->search.candidates = selection->candidates;
    selection->best->search.evaluated = selection->evaluated;
    *plan = selection->best;
    return HAPT_OK;
}

int find_submesh(const struct hapt_profile_cluster *cluster, const struct hapt_submesh *submesh)
{
    int s = cluster->submesh_count - 1;
    while (s >= 0 && memcmp(&cluster->submesh[s], submesh, sizeof *submesh) != 0) s--; /* four ints */
    return s;
}

void order_first(int *order, int count)
{
    for (int k = 0; k < count; k++) order[k] = k;
}

static void swap(int *a, int *b)
{
    const int kept = *a;
    *a = *b;
    *b = kept;
}

static void reverse(int *order, int count)
{
    for (int k = 0; k < count / 2; k++) swap(&order[k], &order[count - 1 - k]);
}

bool order_next(int *order, int count, int most)
{
    int at = count - 2;
    if (count > most) {
        if (order[0] != 0) return false;
        reverse(order, count);
        return true;
    }
    while (at >= 0 && order[at] > order[at + 1]) at--;
    if (at < 0) return false;
    int with = count - 1;
    while (order[with] < order[at]) with--;
    swap(&order[at], &order[with]);
    reverse(&order[at + 1], count - at - 1);
    return true;
}

void order_links(struct hapt_profile *profile, const int *order)
{
    for (int from = 0; from < profile->cluster_count; from++)
        for (int to = 0; to < from; to++)
            profile->link_latency[order[from] * profile->cluster_count + order[to]] = INFINITY;
}

void free_links(struct hapt_profile *profile)
{
    for (int link = 0; link < profile->cluster_count * profile->cluster_count; link++) {
        profile->link_bandwidth[link] = INFINITY;
        profile->link_latency[link] = 0;
    }
}

enum hapt_status need_equal_nodes(const struct hapt_profile *profile, enum hapt_strategy strategy)
{
    for (int c = 1; c < profile->cluster_count; c++) {
        const struct hapt_profile_cluster *cluster = &profile->cluster[c], *first = &profile->cluster[0];
        if (cluster->devices_per_node != first->devices_per_node)
            return hapt_fail(
                HAPT_ERR_INFEASIBLE, "give it subclusters with equally many devices per node, or leave some out",
                "%s needs equal nodes: %s has %d devices per node, %s has %d (HAPT 6.1.1)", names[strategy],
                first->name, first->devices_per_node, cluster->name, cluster->devices_per_node);
    }
    return HAPT_OK;
}

/* The profile that the search sees: coarse layers, free links, or both. */
static enum hapt_status alter(const struct hapt_profile *profile, const struct hapt_strategy_options *options,
                              struct hapt_arena *scratch, struct coarse *coarse, struct hapt_profile **seen)
{
    bool *boundary;
    const struct hapt_profile *from = profile;
    if (options->granularity > 0) {
        HAPT_TRY(hapt_plan_grid(profile, options->granularity, options->block_end, scratch, &boundary));
        HAPT_TRY(coarse_make(profile, boundary, scratch, coarse));
        from = coarse->profile;
    }
    HAPT_TRY(view_create(from, scratch, seen));
    if (options->ignore_communication) free_links(*seen);
    return HAPT_OK;
}

/* Searches with the altered profile, prices the plan with the true one. */
static enum hapt_status search_altered(MPI_Comm comm, const struct hapt_profile *profile,
                                       const struct hapt_strategy_options *options, struct hapt_arena *scratch,
                                       struct hapt_arena *result, struct hapt_plan **plan)
{
    struct hapt_search_options unsplit = options->search;
    struct coarse coarse;
    struct hapt_profile *seen;
    bool fits;
    unsplit.split = HAPT_SPLIT_NO;
    HAPT_TRY(hapt_env_agree(comm, alter(profile, options, scratch, &coarse, &seen)));
    HAPT_TRY(hapt_plan_search(comm, seen, &unsplit, result, plan));
    if (options->granularity > 0) coarse_restore(&coarse, profile, *plan);
    if (options->ignore_communication) (*plan)->search.gap = 0; /* it belongs to another objective */
    HAPT_TRY(hapt_search_agree(comm, &options->search, hapt_plan_price_stages(profile, &options->search, *plan)));
    return hapt_plan_choose_split(comm, profile, &options->search, result, plan, &fits);
}

static enum hapt_status plan_hapt(MPI_Comm comm, const struct hapt_profile *profile,
                                  const struct hapt_strategy_options *options, struct hapt_arena *result,
                                  struct hapt_plan **plan)
{
    struct hapt_arena scratch;
    if (options->granularity == 0 && !options->ignore_communication)
        return hapt_plan_search(comm, profile, &options->search, result, plan);
    hapt_arena_init(&scratch);
    const enum hapt_status status = search_altered(comm, profile, options, &scratch, result, plan);
    hapt_arena_release(&scratch);
    return status;
}

/* Options of a strategy: each has its own schedule and objective. */
static struct hapt_strategy_options own_options(enum hapt_strategy strategy,
                                                const struct hapt_strategy_options *options)
{
    struct hapt_strategy_options own = *options;
    own.search.schedule = hapt_strategy_schedule(strategy, options->search.schedule);
    if (strategy != HAPT_STRATEGY_HAPT) own.search.objective = HAPT_OBJECTIVE_FORMULA;
    if (strategy != HAPT_STRATEGY_HAPT) own.search.split = HAPT_SPLIT_NO;
    if (strategy != HAPT_STRATEGY_HAPT && strategy != HAPT_STRATEGY_EVEN) own.search.gap = 0; /* small searches */
    return own;
}

enum hapt_status hapt_plan_pipelines(MPI_Comm comm, const struct hapt_profile *profile, enum hapt_strategy strategy,
                                     const struct hapt_strategy_options *options, struct hapt_arena *result,
                                     struct hapt_pipelines **pipelines)
{
    const struct hapt_strategy_options own = own_options(strategy, options);
    *pipelines = NULL;
    if (strategy == HAPT_STRATEGY_MEGATRON)
        return hapt_env_agree(comm, pipelines_megatron(profile, &own, result, pipelines));
    return strategy == HAPT_STRATEGY_HEXISCALE ? pipelines_hexiscale(comm, profile, &own, result, pipelines) : HAPT_OK;
}

enum hapt_status hapt_plan_by_strategy(MPI_Comm comm, const struct hapt_profile *profile, enum hapt_strategy strategy,
                                       const struct hapt_strategy_options *options, struct hapt_arena *result,
                                       struct hapt_plan **plan, const char **note)
{
    const struct hapt_strategy_options own = own_options(strategy, options);
    const char *unread;
    if (!note) note = &unread;
    *note = NULL;
    switch (strategy) {
    case HAPT_STRATEGY_EVEN: return hapt_plan_even(comm, profile, &own.search, result, plan);
    case HAPT_STRATEGY_MEGATRON:
        return hapt_search_agree(comm, &own.search, plan_megatron(profile, &own, result, plan));
    case HAPT_STRATEGY_ALPA: return plan_alpa(comm, profile, &own, result, plan, note);
    case HAPT_STRATEGY_PFEIFE: return hapt_search_agree(comm, &own.search, plan_pfeife(profile, &own, result, plan));
    case HAPT_STRATEGY_DEEPSPEED:
        return hapt_search_agree(comm, &own.search, plan_deepspeed(profile, &own, result, plan));
    case HAPT_STRATEGY_COLOSSAL:
        return hapt_search_agree(comm, &own.search, plan_colossal(profile, &own, result, plan));
    case HAPT_STRATEGY_HEXISCALE: return plan_hexiscale(comm, profile, &own, result, plan);
    default: return plan_hapt(comm, profile, &own, result, plan);
    }
}
