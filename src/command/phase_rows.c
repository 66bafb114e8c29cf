/* --global-batch: chooses the rows of a microbatch. Each number of rows has its own graph, layers and profile; the best
 * plan over all of them is kept. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "fix.h"
#include "phases.h"

enum { MOST_ROWS = 24, MOST_CASES = 2 * MOST_ROWS, MOST_MICROBATCHES = 1000000 };
/* Measured profiles: how many numbers of rows below the model's own are tried, each half of the one before. Each needs
 * a measurement. */
enum { MEASURED_ROWS = 2 };

/* A number of rows, and what is planned with it. If it has two profiles (hapt_profile_case), there are two cases. */
struct rows_case {
    int rows, microbatches;
    struct hapt_planning planning;
};

struct rows {
    struct hapt_env *env;
    struct hapt_config *config;
    struct hapt_arena *arena;
    int64_t global_batch;
    bool quietly; /* "no plan" is not printed */
    int listed_count;
    struct rows_case listed[MOST_ROWS];   /* by list_rows, without profiles */
    struct hapt_profile *kept[MOST_ROWS]; /* by list_rows, where the last profiles had candidates; else NULL */
    int worse[MOST_ROWS], worse_count;    /* rows that have no better plan than a known one */
    int count;                            /* cases that have a profile: the model's own rows first, then ascending */
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
    *one = (struct rows_case){.rows = value, .microbatches = (int)(rows->global_batch / value), .planning = *from};
    if (value == from->model->microbatch) return HAPT_OK;
    HAPT_TRY(hapt_env_agree(env->world, hapt_model_rebatch(from->model, value, rows->arena, &one->planning.model)));
    return hapt_phase_layers(env, rows->config, one->planning.model, rows->arena, &one->planning.layers);
}

static void add_case(struct rows *rows, const struct rows_case *one, struct hapt_profile *profile)
{
    struct rows_case *added = &rows->one[rows->count];
    *added = *one;
    added->planning.profile = profile;
    rows->batching[rows->count++] = (struct hapt_search_batching){one->microbatches, profile};
}

static bool is_worse(const struct rows *rows, int value)
{
    for (int k = 0; k < rows->worse_count; k++)
        if (rows->worse[k] == value) return true;
    return false;
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

/* Makes the profiles of all numbers of rows, and leaves out those without candidates, and those that are worse. */
static enum hapt_status prepare_all(struct rows *rows, const struct hapt_planning *from)
{
    const bool measured = hapt_phase_is_measured(rows->config, from->cluster);
    struct hapt_profile_case its[MOST_ROWS] = {0};
    int place[MOST_ROWS], count = 0;
    char left_out[200] = "";
    if (rows->listed_count == 0) HAPT_TRY(prepare_list(rows, from, measured));
    const struct rows_case *one[MOST_ROWS];
    for (int k = 0; k < rows->listed_count; k++) {
        if (is_worse(rows, rows->listed[k].rows)) continue;
        one[count] = &rows->listed[k];
        its[count] = (struct hapt_profile_case){.microbatches = one[count]->microbatches,
                                                .model = one[count]->planning.model,
                                                .layers = one[count]->planning.layers,
                                                .kept = rows->kept[k]};
        place[count++] = k;
    }
    HAPT_TRY(hapt_phase_profiles(rows->env, rows->config, from->cluster, its, count, true, rows->arena));
    HAPT_TRY(
        hapt_env_agree(rows->env->world, hapt_phase_decide_microbatches(rows->config, one[count - 1]->microbatches)));
    for (int k = 0; k < count; k++) {
        rows->kept[place[k]] = its[k].profile;
        if (its[k].profile) {
            add_case(rows, one[k], its[k].profile);
            if (its[k].other) add_case(rows, one[k], its[k].other);
            continue;
        }
        const size_t used = strlen(left_out);
        snprintf(left_out + used, sizeof left_out - used, " %d", one[k]->rows);
    }
    if (rows->count == 0 && rows->quietly) return HAPT_ERR_INFEASIBLE;
    if (rows->count == 0) { /* again, to print why */
        HAPT_TRY(hapt_phase_profiles(rows->env, rows->config, from->cluster, its, 1, false, rows->arena));
        return HAPT_ERR_INTERNAL;
    }
    if (left_out[0] && !rows->quietly)
        hapt_note(rows->env, "no candidates fit with these rows of a microbatch:%s\n", left_out);
    return HAPT_OK;
}

static enum hapt_status decide_microbatches(const struct rows *rows, int k)
{
    return hapt_env_agree(rows->env->world, hapt_phase_decide_microbatches(rows->config, rows->one[k].microbatches));
}

/* Plans each case by itself. */
static enum hapt_status plan_each(struct rows *rows, int *chosen)
{
    double best_s = INFINITY;
    for (int k = 0; k < rows->count; k++) {
        struct rows_case *one = &rows->one[k];
        HAPT_TRY(decide_microbatches(rows, k));
        const enum hapt_status status = hapt_phase_plan_quietly(rows->env, rows->config, one->planning.profile,
                                                                one->planning.layers, rows->arena, &one->planning.plan);
        const bool lacks = status == HAPT_ERR_INFEASIBLE || status == HAPT_ERR_INPUT; /* INPUT: given stages */
        if (status != HAPT_OK && !lacks) return status;
        if (status == HAPT_OK && one->planning.plan->simulated_s < best_s) {
            best_s = one->planning.plan->simulated_s;
            *chosen = k;
        }
        hapt_fail_reset();
    }
    return HAPT_OK;
}

static enum hapt_status plan_together(struct rows *rows, struct hapt_strategy_options *options, int *chosen)
{
    struct hapt_plan *plan = NULL;
    const struct hapt_planning *first = &rows->one[0].planning;
    HAPT_TRY(hapt_env_agree(rows->env->world,
                            hapt_phase_strategy(rows->config, first->profile, first->layers, rows->arena, options)));
    options->search.may_fail = rows->quietly;
    struct hapt_progress progress;
    hapt_progress_init(&progress, rows->env, "planning", 0);
    const enum hapt_status status = hapt_plan_search_batchings(rows->env->world, rows->batching, rows->count,
                                                               &options->search, rows->arena, &plan, chosen);
    hapt_progress_release(&progress);
    HAPT_TRY(status);
    struct hapt_planning *best = &rows->one[*chosen].planning;
    best->plan = plan;
    HAPT_TRY(decide_microbatches(rows, *chosen));
    return hapt_phase_plan_complete(rows->env, rows->config, best->profile, best->layers, best->plan);
}

static void say_rows(const struct rows *rows, int chosen)
{
    char text[200] = "";
    int numbers = 0;
    for (int k = 0; k < rows->count; k++) {
        const size_t used = strlen(text);
        if (k > 0 && rows->one[k].rows == rows->one[k - 1].rows) continue;
        snprintf(text + used, sizeof text - used, "%s%d", numbers++ > 0 ? ", " : "", rows->one[k].rows);
    }
    if (numbers > 1) hapt_note(rows->env, "rows of a microbatch: %d, the best of %s\n", rows->one[chosen].rows, text);
}

static const char *const saving[] = {"recompute", "offload"};
enum { SAVING = sizeof saving / sizeof *saving };

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

/* The bound of one number of rows if no device lacked memory, at most `most_s`. kept: its profile, or NULL. Rank-local.
 */
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
    struct hapt_profile *profile, *other;
    *floor_s = most_s;
    if (kept && hapt_profile_holds_all(kept)) {
        const struct hapt_search_batching all = {one->microbatches, kept};
        return hapt_plan_floors(MPI_COMM_SELF, &all, 1, options, most_s, floor_s);
    }
    HAPT_TRY(hapt_phase_decide_microbatches(rows->config, one->microbatches));
    enum hapt_status status = hapt_phase_predict(&of, scratch, &profile, &other);
    if (status == HAPT_OK) status = hapt_fix_profile(rows->config, scratch, &profile);
    const struct hapt_search_batching batching = {one->microbatches, profile};
    if (status == HAPT_OK) status = hapt_plan_floors(MPI_COMM_SELF, &batching, 1, options, most_s, floor_s);
    if (status != HAPT_ERR_INFEASIBLE) return status;
    hapt_fail_reset();
    return HAPT_OK;
}

/* The same for all numbers of rows, which the ranks share out. */
static enum hapt_status find_floors(const struct rows *rows, const struct hapt_search_options *options, double most_s,
                                    double floor_s[MOST_ROWS])
{
    const char *path = hapt_config_text(rows->config, "efficiency");
    struct hapt_efficiency *efficiency = NULL;
    enum hapt_status status = path ? hapt_efficiency_load(path, rows->arena, &efficiency) : HAPT_OK;
    for (int k = 0; k < rows->listed_count; k++) {
        struct hapt_arena scratch;
        floor_s[k] = most_s;
        if (k % rows->env->world_size != rows->env->world_rank || status != HAPT_OK) continue;
        hapt_arena_init(&scratch);
        status = floor_of(rows, &rows->listed[k], rows->kept[k], efficiency, options, most_s, &scratch, &floor_s[k]);
        hapt_arena_release(&scratch);
    }
    HAPT_TRY(hapt_env_agree(rows->env->world, status));
    return hapt_env_mpi(MPI_Allreduce(MPI_IN_PLACE, floor_s, rows->listed_count, MPI_DOUBLE, MPI_MIN, rows->env->world),
                        "MPI_Allreduce");
}

/* --recompute auto, --offload auto: plans that keep everything on the devices. *enough: there is one, and if no device
 * lacked memory no plan would be much shorter. */
static enum hapt_status plan_without(struct rows *rows, const struct hapt_planning *planning,
                                     const bool is_auto[SAVING], int *chosen, bool *enough)
{
    struct hapt_strategy_options options;
    double floor_s[MOST_ROWS], least_s;
    *enough = false;
    HAPT_TRY(decide(rows, is_auto, "no"));
    rows->quietly = true;
    enum hapt_status status = prepare_all(rows, planning);
    if (status == HAPT_OK) status = plan_together(rows, &options, chosen);
    rows->quietly = false;
    if (status != HAPT_OK && status != HAPT_ERR_INFEASIBLE) return status;
    hapt_fail_reset();
    if (status == HAPT_OK) {
        const double step_s = rows->one[*chosen].planning.plan->simulated_s;
        HAPT_TRY(find_floors(rows, &options.search, step_s, floor_s));
        least_s = step_s;
        for (int k = 0; k < rows->listed_count; k++) {
            least_s = fmin(least_s, floor_s[k]);
            if (floor_s[k] >= step_s && rows->listed[k].rows != rows->one[*chosen].rows)
                rows->worse[rows->worse_count++] = rows->listed[k].rows;
        }
        *enough = step_s <= HAPT_PHASE_MEMORY_WORTH * least_s;
    }
    return decide(rows, is_auto, "auto");
}

/* Plans all numbers of rows together. */
static enum hapt_status plan_rows(struct rows *rows, const struct hapt_planning *planning, int *chosen)
{
    struct hapt_strategy_options options;
    struct rows_case before = {0};
    bool enough, is_auto[SAVING];
    if (find_auto(rows->config, is_auto) && !hapt_phase_is_measured(rows->config, planning->cluster)) {
        HAPT_TRY(plan_without(rows, planning, is_auto, chosen, &enough));
        if (enough) return HAPT_OK;
        if (*chosen >= 0) before = rows->one[*chosen];
        rows->count = 0;
        *chosen = -1;
    }
    HAPT_TRY(prepare_all(rows, planning));
    HAPT_TRY(plan_together(rows, &options, chosen));
    if (!before.planning.plan || before.planning.plan->simulated_s > rows->one[*chosen].planning.plan->simulated_s)
        return HAPT_OK;
    for (*chosen = 0; rows->one[*chosen].rows != before.rows; ++*chosen) {
    } /* more fits, so it is among them */
    rows->one[*chosen] = before;
    return decide_microbatches(rows, *chosen);
}

static enum hapt_status plan_best(struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena,
                                  struct hapt_planning *planning)
{
    struct rows *rows = hapt_arena_alloc(arena, 1, sizeof *rows);
    int chosen = -1;
    HAPT_TRY(hapt_env_agree(env->world, rows ? HAPT_OK : HAPT_ERR_MEMORY));
    *rows = (struct rows){
        .env = env, .config = config, .arena = arena, .global_batch = hapt_config_int(config, "global-batch")};
    if (hapt_phase_searches_steps(config)) {
        HAPT_TRY(plan_rows(rows, planning, &chosen));
    } else {
        HAPT_TRY(prepare_all(rows, planning));
        HAPT_TRY(plan_each(rows, &chosen));
    }
    if (chosen < 0) { /* plans the first case again, to print why it has no plan */
        struct hapt_planning *first = &rows->one[0].planning;
        const enum hapt_status status =
            hapt_phase_plan(env, config, first->profile, first->layers, arena, &first->plan);
        return status == HAPT_OK ? HAPT_ERR_INTERNAL : status;
    }
    *planning = rows->one[chosen].planning;
    planning->plan->rows = rows->one[chosen].rows;
    HAPT_TRY(decide_microbatches(rows, chosen));
    say_rows(rows, chosen);
    return HAPT_OK;
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
