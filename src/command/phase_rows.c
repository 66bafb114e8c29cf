/* Plans a model: chooses the rows of a microbatch (--global-batch), or has those of the model. Each number of rows has
 * its own graph, layers and profile; the best plan over all of them is kept. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "fix.h"
#include "hapt/candidates.h"
#include "hapt/counter.h"
#include "phases.h"

enum { MOST_ROWS = 24, MOST_CASES = 2 * MOST_ROWS, MOST_MICROBATCHES = 1000000 };
/* Measured profiles: how many numbers of rows below the model's own are tried, each half of the one before. Each needs
 * a measurement. */
enum { MEASURED_ROWS = 2 };
/* Numbers of rows that are planned together, where bounds exclude others. */
enum { ROWS_AT_A_TIME = 4 };

/* Users are told how to search in less time after a search of this length. */
#define LONG_SEARCH_S 20

/* A number of rows, and what is planned with it. If it has two profiles (hapt_profile_case), there are two cases. */
struct rows_case {
    int rows, microbatches;
    struct hapt_planning planning;
};

struct rows {
    struct hapt_env *env;
    struct hapt_config *config;
    struct hapt_arena *arena;
    int64_t global_batch;          /* 0: the model's rows */
    bool quietly;                  /* "no plan" is not printed */
    bool keeps_all;                /* plans keep all on the devices */
    bool kept_is_known;            /* such plans were searched before */
    bool lone_choice;              /* plans have the choice of plan_state_on_hosts only */
    double known_s;                /* the step of the best plan so far; 0: there is none */
    double bound_s;                /* no plan without loops of the rows so far takes less */
    bool loops;                    /* the last plan has loops, and so no bound */
    int64_t candidates, evaluated; /* of all searches */
    int listed_count;
    struct rows_case listed[MOST_ROWS];   /* by list_rows, without profiles */
    struct hapt_profile *kept[MOST_ROWS]; /* listed: profiles that keep all on the devices, if there are any */
    bool is_tried[MOST_ROWS], has_candidates[MOST_ROWS];  /* listed: by prepare_tried */
    bool was_tried[MOST_ROWS], had_candidates[MOST_ROWS]; /* listed: at any time */
    double floors_of_s;                                   /* the step that was known when floor_s was found */
    double floor_s[MOST_ROWS];                            /* listed: no plan takes less; 0: unknown */
    int least_without; /* the fewest rows without candidates, of those that note_without may use; 0: none */
    int count;         /* cases that have a profile: the model's own rows first, then ascending */
    struct rows_case one[MOST_CASES];
    struct hapt_search_batching batching[MOST_CASES];
};

/* The rows that --fix or --microbatches determine; 0: neither does. */
static enum hapt_status find_given(const struct rows *rows, int *given)
{
    const struct hapt_config *config = rows->config;
    const long long N = rows->global_batch;
    const bool counted = hapt_config_given(config, "microbatches");
    const int B = counted ? (int)hapt_config_int(config, "microbatches") : 0;
    *given = hapt_fix_number(config, "rows");
    if (counted && N % B != 0)
        return hapt_fail(HAPT_ERR_USAGE, "leave out --microbatches, or give a divisor of the rows",
                         "--global-batch %lld rows cannot be divided into --microbatches %d", N, B);
    if (*given > 0 && (N % *given != 0 || (counted && N / *given != B)))
        return hapt_fail(HAPT_ERR_USAGE, "leave out one of them",
                         counted ? "--fix rows=%d contradicts --global-batch %lld with --microbatches %d"
                                 : "--fix rows=%d does not divide --global-batch %lld",
                         *given, N, B);
    if (counted) *given = (int)(N / B);
    return HAPT_OK;
}

static void add_rows(const struct rows *rows, int64_t value, int list[MOST_ROWS], int *count)
{
    if (value < 1 || rows->global_batch % value != 0 || rows->global_batch / value > MOST_MICROBATCHES) return;
    for (int k = 0; k < *count; k++)
        if (list[k] == value) return;
    if (*count < MOST_ROWS) list[(*count)++] = (int)value;
}

/* Lists the rows to try. */
static enum hapt_status list_rows(const struct rows *rows, const struct hapt_model *model, bool measured,
                                  int list[MOST_ROWS], int *count)
{
    const long long N = rows->global_batch;
    const int own = model->microbatch;
    int given;
    *count = 0;
    if (N == 0) {
        list[(*count)++] = own;
        return HAPT_OK;
    }
    HAPT_TRY(find_given(rows, &given));
    if (given > 0) {
        list[(*count)++] = given;
        return HAPT_OK;
    }
    add_rows(rows, own, list, count);
    if (hapt_model_mixes_rows(model)) {
        hapt_note(rows->env, "rows of a microbatch are not chosen: batch norm uses the statistics of a microbatch\n");
        if (*count > 0) return HAPT_OK;
        return hapt_fail(HAPT_ERR_USAGE, "give a multiple of the model's rows, or --fix rows=R",
                         "--global-batch %lld is no multiple of the model's %d rows", N, own);
    }
    if (measured)
        for (int k = 0, value = own; k < MEASURED_ROWS && value % 2 == 0; k++) add_rows(rows, value /= 2, list, count);
    for (int64_t value = 1; value <= N && (!measured || *count == 0); value *= 2) add_rows(rows, value, list, count);
    if (*count > 0) return HAPT_OK;
    return hapt_fail(HAPT_ERR_USAGE, "give fewer rows, or --fix rows=R",
                     "--global-batch %lld: the model's %d rows and the powers of two that divide it give more than %d "
                     "microbatches",
                     N, own, MOST_MICROBATCHES);
}

/* Makes graph and layers of one number of rows. */
static enum hapt_status prepare(const struct rows *rows, int value, const struct hapt_planning *from,
                                struct rows_case *one)
{
    struct hapt_env *env = rows->env;
    *one =
        (struct rows_case){.rows = value,
                           .microbatches = rows->global_batch > 0 ? (int)(rows->global_batch / value)
                                                                  : (int)hapt_config_int(rows->config, "microbatches"),
                           .planning = *from};
    if (value == from->model->microbatch) return HAPT_OK;
    HAPT_TRY(hapt_env_agree(env->world, hapt_model_rebatch(from->model, value, rows->arena, &one->planning.model)));
    return hapt_phase_layers(env, rows->config, one->planning.model, rows->arena, &one->planning.layers);
}

static void add_case(struct rows *rows, const struct rows_case *one, struct hapt_profile *profile)
{
    struct rows_case *added = &rows->one[rows->count];
    *added = *one;
    added->planning.profile = profile;
    rows->batching[rows->count++] =
        (struct hapt_search_batching){one->microbatches, profile, rows->kept_is_known && !profile->host_state};
}

/* Makes graphs and layers of all numbers of rows. */
static enum hapt_status prepare_list(struct rows *rows, const struct hapt_planning *from, bool measured)
{
    int list[MOST_ROWS], count;
    HAPT_TRY(hapt_env_agree(rows->env->world, list_rows(rows, from->model, measured, list, &count)));
    for (int k = 0; k < count; k++) HAPT_TRY(prepare(rows, list[k], from, &rows->listed[k]));
    rows->listed_count = count;
    return HAPT_OK;
}

/* Makes the profiles of the numbers of rows that are tried, and leaves out those without candidates. */
static enum hapt_status prepare_tried(struct rows *rows, const struct hapt_planning *from)
{
    struct hapt_profile_case its[MOST_ROWS] = {0};
    int place[MOST_ROWS], count = 0;
    const struct rows_case *one[MOST_ROWS];
    rows->count = 0;
    for (int k = 0; k < rows->listed_count; k++) {
        if (!rows->is_tried[k]) continue;
        one[count] = &rows->listed[k];
        its[count] = (struct hapt_profile_case){.microbatches = one[count]->microbatches,
                                                .model = one[count]->planning.model,
                                                .layers = one[count]->planning.layers,
                                                .kept = rows->lone_choice ? NULL : rows->kept[k]};
        place[count++] = k;
    }
    HAPT_TRY(hapt_phase_profiles(rows->env, rows->config, from->cluster, its, count, true, rows->arena));
    HAPT_TRY(
        hapt_env_agree(rows->env->world, hapt_phase_decide_microbatches(rows->config, one[count - 1]->microbatches)));
    for (int k = 0; k < count; k++) {
        rows->has_candidates[place[k]] = its[k].profile != NULL;
        rows->had_candidates[place[k]] |= its[k].profile != NULL;
        rows->was_tried[place[k]] = true;
        if (its[k].profile) add_case(rows, one[k], its[k].profile);
        if (its[k].profile && its[k].other) add_case(rows, one[k], its[k].other);
        if (rows->keeps_all) rows->kept[place[k]] = its[k].profile;
    }
    if (rows->count == 0 && rows->quietly) return HAPT_ERR_INFEASIBLE;
    if (rows->count == 0) { /* again, to print why; or the search does, since there may be candidates, but no plan */
        HAPT_TRY(hapt_phase_profiles(rows->env, rows->config, from->cluster, its, 1, false, rows->arena));
        HAPT_TRY(hapt_env_agree(rows->env->world, hapt_phase_decide_microbatches(rows->config, one[0]->microbatches)));
        add_case(rows, one[0], its[0].profile);
    }
    return HAPT_OK;
}

/* The same for all numbers of rows. */
static enum hapt_status prepare_all(struct rows *rows, const struct hapt_planning *from)
{
    for (int k = 0; k < rows->listed_count; k++) rows->is_tried[k] = true;
    return prepare_tried(rows, from);
}

static enum hapt_status decide_microbatches(const struct rows *rows, const struct rows_case *one)
{
    return hapt_env_agree(rows->env->world, hapt_phase_decide_microbatches(rows->config, one->microbatches));
}

/* The shorter of both becomes *best. */
static void take_shorter(const struct rows_case *one, struct rows_case *best)
{
    const struct hapt_plan *before = best->planning.plan;
    if (!before || one->planning.plan->simulated_s < before->simulated_s) *best = *one;
}

/* Plans each case by itself. */
static enum hapt_status plan_each(struct rows *rows, struct rows_case *best)
{
    for (int k = 0; k < rows->count; k++) {
        struct rows_case *one = &rows->one[k];
        HAPT_TRY(decide_microbatches(rows, one));
        const enum hapt_status status = hapt_phase_plan_quietly(rows->env, rows->config, one->planning.profile,
                                                                one->planning.layers, rows->arena, &one->planning.plan);
        const bool lacks = status == HAPT_ERR_INFEASIBLE || status == HAPT_ERR_INPUT; /* INPUT: given stages */
        if (status != HAPT_OK && !lacks) return status;
        if (status == HAPT_OK) take_shorter(one, best);
        hapt_fail_reset();
    }
    return HAPT_OK;
}

/* The shortest plan of all cases becomes *best, unless that is shorter. */
static enum hapt_status plan_together(struct rows *rows, struct rows_case *best)
{
    struct hapt_strategy_options options;
    struct hapt_plan *plan = NULL;
    int chosen = -1;
    const struct hapt_planning *first = &rows->one[0].planning;
    HAPT_TRY(hapt_env_agree(rows->env->world,
                            hapt_phase_strategy(rows->config, first->profile, first->layers, rows->arena, &options)));
    options.search.may_fail = rows->quietly;
    options.search.known_s = rows->lone_choice ? 0 : rows->known_s;
    struct hapt_progress progress;
    hapt_progress_init(&progress, rows->env, "planning", 0);
    const enum hapt_status status = hapt_plan_search_batchings(rows->env->world, rows->batching, rows->count,
                                                               &options.search, rows->arena, &plan, &chosen);
    hapt_progress_release(&progress);
    HAPT_TRY(status);
    struct rows_case *one = &rows->one[chosen];
    one->planning.plan = plan;
    HAPT_TRY(decide_microbatches(rows, one));
    HAPT_TRY(hapt_phase_plan_complete(rows->env, rows->config, one->planning.profile, one->planning.layers, plan));
    take_shorter(one, best);
    rows->known_s = best->planning.plan->simulated_s;
    rows->candidates += plan->search.candidates;
    rows->evaluated += plan->search.evaluated;
    rows->loops = plan->bound_s == 0;
    if (!rows->loops) rows->bound_s = fmin(rows->bound_s, plan->bound_s);
    return HAPT_OK;
}

static void append_rows(char *text, size_t size, const char *separator, int value)
{
    const size_t used = strlen(text);
    snprintf(text + used, size - used, "%s%d", separator, value);
}

static void say_rows(const struct rows *rows, const struct rows_case *best)
{
    char with[200] = "", without[200] = "";
    int numbers = 0;
    for (int k = 0; k < rows->listed_count; k++) {
        if (rows->had_candidates[k] || !rows->was_tried[k])
            append_rows(with, sizeof with, numbers++ > 0 ? ", " : "", rows->listed[k].rows);
        else
            append_rows(without, sizeof without, " ", rows->listed[k].rows);
    }
    if (without[0]) hapt_note(rows->env, "no candidates fit with these rows of a microbatch:%s\n", without);
    if (numbers > 1) hapt_note(rows->env, "rows of a microbatch: %d, the best of %s\n", best->rows, with);
}

enum { RECOMPUTE, OFFLOAD, SAVING };
static const char *const saving[SAVING] = {[RECOMPUTE] = "recompute", [OFFLOAD] = "offload"};

/* Which of these options decide by themselves. */
static bool find_auto(const struct hapt_config *config, bool is_auto[SAVING])
{
    bool any = false;
    for (int k = 0; k < SAVING; k++) {
        is_auto[k] = !strcmp(hapt_config_text(config, saving[k]), "auto");
        any = any || is_auto[k];
    }
    return any;
}

static enum hapt_status decide(const struct rows *rows, const bool is_auto[SAVING], const char *value)
{
    enum hapt_status status = HAPT_OK;
    for (int k = 0; k < SAVING && status == HAPT_OK; k++)
        if (is_auto[k]) status = hapt_config_decide(rows->config, saving[k], value);
    return hapt_env_agree(rows->env->world, status);
}

/* The bound of one number of rows if no device lacked memory, at most `most_s`, also if there is no plan. kept: its
 * profile, or NULL. Rank-local. */
static enum hapt_status floor_of(const struct rows *rows, const struct rows_case *one, const struct hapt_profile *kept,
                                 const struct hapt_efficiency *efficiency, const struct hapt_search_options *options,
                                 double most_s, struct hapt_arena *scratch, double *floor_s)
{
    const struct hapt_prediction of = {.config = rows->config,
                                       .cluster = one->planning.cluster,
                                       .model = one->planning.model,
                                       .layers = one->planning.layers,
                                       .efficiency = efficiency,
                                       .node_rank = rows->env->node_rank,
                                       .roomy = true};
    struct hapt_search_batching batching = {.microbatches = one->microbatches, .profile = kept};
    struct hapt_profile *profile, *other;
    *floor_s = most_s;
    HAPT_TRY(hapt_phase_decide_microbatches(rows->config, one->microbatches));
    if (kept && hapt_profile_holds_all(kept))
        return hapt_plan_floors(MPI_COMM_SELF, &batching, 1, options, most_s, floor_s);
    enum hapt_status status = hapt_phase_predict(&of, scratch, &profile, &other);
    if (status == HAPT_OK) status = hapt_fix_profile(rows->config, scratch, &profile);
    batching.profile = profile;
    if (status == HAPT_OK) status = hapt_plan_floors(MPI_COMM_SELF, &batching, 1, options, most_s, floor_s);
    if (status != HAPT_ERR_INFEASIBLE) return status;
    hapt_fail_reset();
    return HAPT_OK;
}

/* Bounds are rounded down by less than this. */
#define FLOOR_ROUNDING 1e-8

/* True if no plan of these rows is shorter than `step_s`. */
static bool is_excluded(const struct rows *rows, int k, double step_s)
{
    return rows->floor_s[k] >= (1 - FLOOR_ROUNDING) * step_s;
}

/* Bounds are found again beside a step that is shorter by this factor, since they are sharper then. */
#define FLOORS_AGAIN 0.98

/* Finds the floors of this rank's share of the rows: more rows take longer, so they come first. */
static enum hapt_status find_own_floors(struct rows *rows, double most_s, struct hapt_counter *counter)
{
    const char *path = hapt_config_text(rows->config, "efficiency");
    struct hapt_efficiency *efficiency = NULL;
    struct hapt_strategy_options options;
    int order[MOST_ROWS], count = 0;
    HAPT_TRY(hapt_phase_strategy(rows->config, NULL, NULL, rows->arena, &options));
    if (path) HAPT_TRY(hapt_efficiency_load(path, rows->arena, &efficiency));
    for (int k = 0; k < rows->listed_count; k++) {
        int at = count;
        if (is_excluded(rows, k, most_s)) continue;
        for (; at > 0 && rows->listed[order[at - 1]].rows < rows->listed[k].rows; at--) order[at] = order[at - 1];
        order[at] = k;
        count++;
    }
    enum hapt_status status = HAPT_OK;
    for (int i = 0; i < count; i++) {
        struct hapt_arena scratch;
        const int k = order[i];
        rows->floor_s[k] = INFINITY;
        if (!hapt_counter_is_mine(counter, i) || status != HAPT_OK) continue;
        hapt_arena_init(&scratch);
        status = floor_of(rows, &rows->listed[k], rows->kept[k], efficiency, &options.search, most_s, &scratch,
                          &rows->floor_s[k]);
        hapt_arena_release(&scratch);
    }
    return status;
}

/* Finds rows->floor_s, at most the step that is known. The ranks share out the rows. */
static enum hapt_status find_floors(struct rows *rows)
{
    struct hapt_counter counter;
    const double most_s = rows->known_s;
    if (most_s > FLOORS_AGAIN * rows->floors_of_s) return HAPT_OK;
    rows->floors_of_s = most_s;
    HAPT_TRY(hapt_env_agree(rows->env->world, hapt_counter_create(rows->env->world, &counter)));
    hapt_counter_begin(&counter);
    const enum hapt_status status = hapt_env_agree(rows->env->world, find_own_floors(rows, most_s, &counter));
    hapt_counter_release(&counter);
    HAPT_TRY(status);
    return hapt_env_mpi(
        MPI_Allreduce(MPI_IN_PLACE, rows->floor_s, rows->listed_count, MPI_DOUBLE, MPI_MIN, rows->env->world),
        "MPI_Allreduce");
}

/* Optimizer state on the hosts is searched by itself if more memory would shorten the step by more than this factor. */
#define LONE_WORTH 1.01

/* If some rows have no candidates, neither has a multiple of them, which takes more memory (least_without). */
static bool may_be_shorter(const struct rows *rows, int k)
{
    if (rows->least_without > 0 && rows->listed[k].rows % rows->least_without == 0) return false;
    if (rows->lone_choice && rows->known_s <= LONE_WORTH * rows->floor_s[k]) return false;
    return rows->known_s == 0 || !is_excluded(rows, k, rows->known_s);
}

/* How far these rows are from those of the model, as a factor. */
static double distance(const struct rows *rows, int k)
{
    const double ratio = (double)rows->listed[k].rows / rows->listed[0].rows;
    return ratio > 1 ? ratio : 1 / ratio;
}

/* True if `one` is tried before `other`: by bounds. Without a plan so far, those near the model's rows; if none keeps
 * all, the fewest rows, which take the least memory. */
static bool comes_before(const struct rows *rows, int one, int other)
{
    if (rows->known_s > 0) return rows->floor_s[one] < rows->floor_s[other];
    if (!rows->kept_is_known && distance(rows, one) != distance(rows, other))
        return distance(rows, one) < distance(rows, other);
    return rows->listed[one].rows < rows->listed[other].rows;
}

/* Chooses the next few numbers of rows that may have a plan shorter than the best one. False: none is left. */
static bool choose_next(struct rows *rows, bool is_done[MOST_ROWS])
{
    bool any = false;
    for (int k = 0; k < rows->listed_count; k++) rows->is_tried[k] = false;
    for (int i = 0; i < (rows->lone_choice ? 1 : ROWS_AT_A_TIME); i++) {
        int next = -1;
        for (int k = 0; k < rows->listed_count; k++)
            if (!is_done[k] && may_be_shorter(rows, k) && (next < 0 || comes_before(rows, k, next))) next = k;
        if (next < 0) break;
        is_done[next] = rows->is_tried[next] = any = true;
    }
    return any;
}

/* Plans the numbers of rows that are chosen; HAPT_OK also if there is no plan. Profiles take much memory: all that keep
 * all, and else those of the best plan, stay. */
static enum hapt_status try_chosen(struct rows *rows, const struct hapt_planning *planning, struct rows_case *best)
{
    struct hapt_arena *const arena = rows->arena;
    struct hapt_arena own;
    struct hapt_shared *const shared = hapt_shared_newest();
    const struct hapt_plan *before = best->planning.plan;
    hapt_arena_init(&own);
    rows->arena = &own;
    enum hapt_status status = prepare_tried(rows, planning);
    if (status == HAPT_OK) status = plan_together(rows, best);
    rows->arena = arena;
    if (best->planning.plan != before || rows->keeps_all) {
        hapt_arena_adopt(arena, &own);
        if (best->planning.plan != before) best->planning.plan->arena = arena;
    } else {
        hapt_shared_release_newer(shared);
        hapt_arena_release(&own);
    }
    rows->count = 0;
    if (status != HAPT_ERR_INFEASIBLE) return status;
    hapt_fail_reset();
    return HAPT_OK;
}

/* Notes rows without candidates. More rows would allow wider meshes, and so less memory, unless each device of a
 * subcluster has a row already. */
static void note_without(struct rows *rows)
{
    const struct hapt_cluster *cluster = rows->listed[0].planning.cluster;
    int most = 0;
    for (int c = 0; c < cluster->count; c++) {
        const int devices = cluster->subcluster[c].nodes * cluster->subcluster[c].devices_per_node;
        if (devices > most) most = devices;
    }
    for (int k = 0; k < rows->listed_count; k++) {
        const int value = rows->listed[k].rows;
        if (rows->is_tried[k] && !rows->has_candidates[k] && value >= most &&
            (rows->least_without == 0 || value < rows->least_without))
            rows->least_without = value;
    }
}

/* Plans a few numbers of rows at a time, as long as their bounds allow a shorter plan. */
static enum hapt_status try_rows(struct rows *rows, const struct hapt_planning *planning, struct rows_case *best)
{
    bool is_done[MOST_ROWS] = {false};
    rows->least_without = 0;
    rows->bound_s = INFINITY; /* plans with all choices include those that keep all */
    while (choose_next(rows, is_done)) {
        HAPT_TRY(try_chosen(rows, planning, best));
        if (rows->known_s > 0 && rows->listed_count > 1) HAPT_TRY(find_floors(rows));
        for (int k = 0; k < rows->listed_count && rows->loops; k++)
            if (rows->is_tried[k]) rows->bound_s = fmin(rows->bound_s, rows->floor_s[k]);
        rows->loops = false;
        note_without(rows);
    }
    return HAPT_OK;
}

/* --recompute auto, --offload auto: plans that keep everything on the devices. *enough: no plan would be much shorter
 * if no device lacked memory. */
static enum hapt_status plan_without(struct rows *rows, const struct hapt_planning *planning,
                                     const bool is_auto[SAVING], struct rows_case *best, bool *enough)
{
    double least_s = INFINITY;
    HAPT_TRY(decide(rows, is_auto, "no"));
    rows->keeps_all = true;
    HAPT_TRY(try_rows(rows, planning, best));
    rows->keeps_all = false;
    if (rows->known_s > 0) HAPT_TRY(find_floors(rows));
    for (int k = 0; k < rows->listed_count; k++) least_s = fmin(least_s, rows->floor_s[k]);
    *enough = rows->known_s > 0 && rows->known_s <= HAPT_PHASE_MEMORY_WORTH * least_s;
    rows->bound_s = least_s;
    return decide(rows, is_auto, "auto");
}

/* Plans whose stages keep all activations (unless --recompute is given) and have their optimizer state on the hosts.
 * The phases before may have passed over them: they consider the state on the hosts only if the formula says that
 * devices lack memory, and a search of many choices improves fewer plans of each. Here the search improves plans of
 * each number of rows as if none was known before. */
static enum hapt_status plan_state_on_hosts(struct rows *rows, const struct hapt_planning *planning,
                                            const bool is_auto[SAVING], struct rows_case *best)
{
    const double bound_s = rows->bound_s;
    HAPT_TRY(decide(rows, is_auto, "no"));
    HAPT_TRY(hapt_env_agree(rows->env->world, hapt_config_decide(rows->config, saving[OFFLOAD], "optimizer")));
    rows->lone_choice = true;
    HAPT_TRY(try_rows(rows, planning, best));
    rows->lone_choice = false;
    rows->bound_s = fmin(rows->bound_s, bound_s);
    return decide(rows, is_auto, "auto");
}

/* Plans by predicted profiles. */
static enum hapt_status plan_predicted(struct rows *rows, const struct hapt_planning *planning, struct rows_case *best)
{
    bool enough, is_auto[SAVING];
    if (!find_auto(rows->config, is_auto)) return try_rows(rows, planning, best);
    HAPT_TRY(plan_without(rows, planning, is_auto, best, &enough));
    if (enough) return HAPT_OK;
    rows->kept_is_known = true;
    HAPT_TRY(try_rows(rows, planning, best));
    rows->kept_is_known = false;
    if (rows->known_s == 0 || !is_auto[OFFLOAD] || hapt_candidates_states(rows->config) == 0) return HAPT_OK;
    return plan_state_on_hosts(rows, planning, is_auto, best);
}

/* Plans all numbers of rows; the rows with the shortest plan become *best. */
static enum hapt_status plan_rows(struct rows *rows, const struct hapt_planning *planning, struct rows_case *best)
{
    if (!hapt_phase_is_measured(rows->config, planning->cluster)) {
        rows->quietly = true;
        HAPT_TRY(plan_predicted(rows, planning, best));
        HAPT_ASSERT(!best->planning.plan || best->planning.plan->arena == rows->arena); /* not try_chosen's own */
        rows->quietly = rows->kept_is_known = false;
        if (best->planning.plan) return HAPT_OK;
    }
    HAPT_TRY(prepare_all(rows, planning)); /* predicted: to print why there is no plan */
    return plan_together(rows, best);
}

static enum hapt_status plan_best(struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena,
                                  struct hapt_planning *planning)
{
    struct rows *rows = hapt_arena_alloc(arena, 1, sizeof *rows);
    const double start_s = hapt_time_s();
    struct rows_case best = {0};
    HAPT_TRY(hapt_env_agree(env->world, rows ? HAPT_OK : HAPT_ERR_MEMORY));
    *rows = (struct rows){.env = env,
                          .config = config,
                          .arena = arena,
                          .bound_s = INFINITY,
                          .floors_of_s = INFINITY,
                          .global_batch = hapt_config_int(config, "global-batch")};
    HAPT_TRY(hapt_env_agree(env->world, hapt_phase_plan_options(config))); /* the model may have set the schedule */
    HAPT_TRY(hapt_env_agree(env->world, hapt_phase_profile_options(config, planning->cluster)));
    HAPT_TRY(prepare_list(rows, planning, hapt_phase_is_measured(config, planning->cluster)));
    if (hapt_phase_searches_steps(config)) {
        HAPT_TRY(plan_rows(rows, planning, &best));
    } else {
        HAPT_TRY(prepare_all(rows, planning));
        HAPT_TRY(plan_each(rows, &best));
    }
    if (!best.planning.plan) { /* plans the first case again, to print why it has no plan */
        struct hapt_planning *first = &rows->one[0].planning;
        const enum hapt_status status =
            hapt_phase_plan(env, config, first->profile, first->layers, arena, &first->plan);
        return status == HAPT_OK ? HAPT_ERR_INTERNAL : status;
    }
    *planning = best.planning;
    if (planning->plan->bound_s > 0 && isfinite(rows->bound_s))
        planning->plan->bound_s = fmin(rows->bound_s, planning->plan->simulated_s);
    if (rows->global_batch > 0) planning->plan->rows = best.rows;
    HAPT_TRY(decide_microbatches(rows, &best));
    say_rows(rows, &best);
    if (hapt_phase_is_measured(config, planning->cluster)) return HAPT_OK;
    planning->plan->search.candidates = rows->candidates;
    planning->plan->search.evaluated = rows->evaluated;
    planning->plan->search.seconds = hapt_time_s() - start_s; /* predictions included */
    HAPT_TRY(hapt_env_mpi(MPI_Bcast(&planning->plan->search.seconds, 1, MPI_DOUBLE, 0, env->world), "MPI_Bcast"));
    if (rows->listed_count > 1 && planning->plan->search.seconds > LONG_SEARCH_S && hapt_phase_searches_steps(config))
        hapt_note(env,
                  "a shorter search: --fix rows=%d, or --objective formula in seconds, whose plan is a little longer\n",
                  best.rows);
    return HAPT_OK;
}

bool hapt_phase_plans_rows(const struct hapt_config *config, const struct hapt_cluster *cluster)
{
    if (hapt_config_int(config, "global-batch") > 0) return true;
    return hapt_phase_searches_steps(config) && !hapt_config_text(config, "profile") &&
           !hapt_phase_is_measured(config, cluster);
}

enum hapt_status hapt_phase_plan_rows(struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena,
                                      struct hapt_planning *planning)
{
    hapt_memory_keep(true);
    const enum hapt_status status = plan_best(env, config, arena, planning);
    hapt_memory_keep(false);
    if (status == HAPT_OK) hapt_phase_note_sharding(env, config, planning->plan);
    return status;
}

enum hapt_status hapt_phase_rebatch(const struct hapt_env *env, const struct hapt_plan *plan, struct hapt_arena *arena,
                                    struct hapt_model **model)
{
    enum hapt_status status = HAPT_OK;
    if (plan->rows > 0 && plan->rows != (*model)->microbatch)
        status = hapt_model_rebatch(*model, plan->rows, arena, model);
    return hapt_env_agree(env->world, status);
}

enum hapt_status hapt_phase_rows_options(const struct hapt_config *config)
{
    const long long N = hapt_config_int(config, "global-batch");
    if (N == 0) return HAPT_OK;
    HAPT_TRY(hapt_phase_refuse_unused(config, "--global-batch plans with several profiles", "compare run"));
    if (hapt_config_text(config, "profile"))
        return hapt_fail(HAPT_ERR_USAGE, "give --input and --cluster, or --microbatches instead",
                         "--global-batch %lld chooses the rows of a microbatch, but --profile holds one number of "
                         "rows only",
                         N);
    return HAPT_OK;
}
