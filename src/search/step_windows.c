/*
 * Windows: a few consecutive stages of a good plan are replaced by all others that hold the same layers, with any
 * boundaries, submeshes and programs. The stages behind and in front stay. So good bounds of a plan are known before it
 * is simulated, and most plans are dropped.
 *
 * Single moves (step_refine.c, step_rows.c) often have to pass worse plans where memory is tight: another submesh needs
 * other boundaries and other launch counts at the same time.
 *
 * A job is a window and the number of stages in it. The ranks share the jobs.
 */
#include <math.h>
#include <string.h>

#include "step_suffix.h"

/* TRIED: plans of a job that are simulated. REFINED: plans of all windows that are refined. */
enum { MOST_LAYERS = 64, MOST_REACH = 4, TRIED = 24, REFINED = 2, MOST_ROUNDS = 12 };
/* Stages of a window: around the best plan, and around the seeds. */
enum { REACH = 4, SEED_REACH = 3 };
/* Partial plans of a round, by the work of the refinement: about half a second by default. The jobs share them. */
#define MOST_NODES 0.08
/* Partial plans that a job may have in any case: fewer missed plans where the work is limited. */
#define LEAST_NODES 50000
/* Limit of a round's simulations, in microbatches times stages, over the limit of the refinement: about two seconds by
 * default. Windows hold fewer stages where steps have many microbatches. */
#define ROUND_WORK 1.5
/* Simulations of a job: launch counts of all its plans, on average. */
#define COUNTS_OF_A_JOB 40
/* Plans are refined if their step is at most this factor longer than that of the base. */
#define WINDOW_WORTH 1.01
/* Seeds that are slower than the best by more than this factor get no windows. */
#define SEED_WORTH 1.05

/* Stages that are placed in a window. */
struct placement {
    double least_s; /* the bound of the plan */
    int count;
    struct step_stage stage[MOST_REACH]; /* the last one first */
};

/* Bounds of what is in front of the window's stages. */
struct ahead {
    double *pass_s; /* [L] the least time of a microbatch in front of each of the window's layers, there and back */
    double fits;    /* microbatches in flight that fit on the stages in front of the window */
    double most_s;  /* time of a microbatch in the window and behind it that these stages allow */
};

struct windows {
    struct step_search *search;
    struct step_suffixes suffixes;
    double *time_s; /* [L][L + 1] the least time of a stage of layers [first, end) */
    double *comm_s; /* [L]        the least time of a transfer behind a layer */
    struct step_candidate base, trial;
    struct step_suffix *behind; /* [most stages + 1] the base's stages from i on */
    int first, last, begin;     /* the window: stages first to last of the base, from layer `begin` on */
    struct ahead ahead;
    struct step_stage placed[MOST_REACH];
    struct placement found[TRIED]; /* by ascending bound */
    int found_count;
    int64_t nodes, most_nodes, jobs;
    struct step_kept kept, best; /* of this rank, and of all */
};

static int first_layer(const struct step_candidate *candidate, int i)
{
    return i > 0 ? candidate->stage[i - 1].end : 0;
}

static double base_work_s(const struct windows *windows, int i)
{
    const struct step_stage *stage = &windows->base.stage[i];
    return step_work_s(windows->search, stage->device_set, stage->submesh, first_layer(&windows->base, i), stage->end);
}

/* ---- Bounds ---- */

/* False: the base is no plan. */
static bool look_behind(struct windows *windows)
{
    const struct step_candidate *base = &windows->base;
    windows->behind[base->count] = step_suffix_nothing(&windows->suffixes);
    for (int i = base->count - 1; i >= 0; i--)
        if (!isfinite(step_suffix_extend(&windows->suffixes, &windows->behind[i + 1], base->stage[i].device_set,
                                         base->stage[i].submesh, first_layer(base, i), &windows->behind[i])))
            return false;
    return true;
}

/* Sets pass_s[begin], fits and most_s, which come from the stages in front of the window. */
static void look_at_front(struct windows *windows)
{
    const int first = windows->first;
    const struct step_suffix *behind = windows->behind;
    struct ahead *ahead = &windows->ahead;
    ahead->pass_s[windows->begin] = 0;
    ahead->fits = windows->search->B;
    ahead->most_s = INFINITY;
    if (first == 0) return;
    /* The last transfer in front depends on the window: the least one counts. */
    const double comm_s = behind[first - 1].sum_s - behind[first].sum_s - base_work_s(windows, first - 1);
    const double rest_s = behind[first].sum_s + comm_s - 2 * windows->comm_s[windows->begin - 1];
    ahead->pass_s[windows->begin] = behind[0].sum_s - rest_s;
    for (int i = 0; i < first; i++) { /* B microbatches take the stage (its time + that behind it) B / fits */
        const double head_s = behind[0].sum_s - behind[i].sum_s;
        ahead->fits = fmin(ahead->fits, behind[i].fits);
        ahead->most_s = fmin(ahead->most_s, (windows->base.step_s - head_s) * ahead->fits / windows->search->B -
                                                (behind[i].sum_s - rest_s));
    }
}

static void look_ahead(struct windows *windows)
{
    const int L = windows->search->L, end_layer = windows->base.stage[windows->last].end;
    double *pass_s = windows->ahead.pass_s;
    look_at_front(windows);
    for (int end = windows->begin + 1; end < end_layer; end++) {
        double best_s = INFINITY;
        for (int first = windows->begin; first < end; first++)
            best_s = fmin(best_s, pass_s[first] + windows->time_s[first * (L + 1) + end]);
        pass_s[end] = best_s + 2 * windows->comm_s[end - 1];
    }
}

/* False: no plan that ends so is better than the base. */
static bool promises(const struct windows *windows, const struct step_suffix *next)
{
    const struct ahead *ahead = &windows->ahead;
    const double B = windows->search->B, head_s = ahead->pass_s[next->first], limit_s = windows->base.step_s;
    return next->sum_s + head_s - ahead->pass_s[windows->begin] < ahead->most_s &&
           head_s + B * next->sum_s / fmin(next->fits, ahead->fits) < limit_s &&
           head_s + next->sum_s + (B - 1) * next->comm_s < limit_s;
}

/* The bound of the plan with the base's stages in front of the suffix; INFINITY: it is none, or not better. */
static double complete(const struct windows *windows, const struct step_suffix *suffix, double least_s)
{
    struct step_suffix at = *suffix, next;
    for (int i = windows->first - 1; i >= 0; i--) {
        const struct step_stage *stage = &windows->base.stage[i];
        if (!step_suffix_allows(&windows->suffixes, &at, stage->device_set, stage->submesh)) return INFINITY;
        least_s = step_suffix_extend(&windows->suffixes, &at, stage->device_set, stage->submesh,
                                     first_layer(&windows->base, i), &next);
        if (least_s >= windows->base.step_s) return INFINITY;
        at = next;
    }
    if (windows->search->options.use_all_devices && !step_suffix_uses_all(&windows->suffixes, &at)) return INFINITY;
    return least_s;
}

/* ---- Placements ---- */

static bool is_base(const struct windows *windows, int count)
{
    if (count != windows->last - windows->first + 1) return false;
    for (int k = 0; k < count; k++)
        if (memcmp(&windows->placed[k], &windows->base.stage[windows->last - k], sizeof windows->placed[k]) != 0)
            return false;
    return true;
}

static void note(struct windows *windows, int count, double least_s)
{
    int at = windows->found_count;
    if (at < TRIED)
        windows->found_count++;
    else if (least_s >= windows->found[--at].least_s)
        return;
    for (; at > 0 && least_s < windows->found[at - 1].least_s; at--) windows->found[at] = windows->found[at - 1];
    windows->found[at].least_s = least_s;
    windows->found[at].count = count;
    memcpy(windows->found[at].stage, windows->placed, (size_t)count * sizeof *windows->placed);
}

static void descend(struct windows *windows, const struct step_suffix *suffix, int count, int left);

static void add_stage(struct windows *windows, const struct step_suffix *suffix, const struct step_stage *stage,
                      int first, int count, int left)
{
    struct step_suffix next;
    windows->nodes++;
    const double least_s =
        step_suffix_extend(&windows->suffixes, suffix, stage->device_set, stage->submesh, first, &next);
    if (least_s >= windows->base.step_s || !promises(windows, &next)) return;
    windows->placed[count++] = next.stage;
    if (left > 1) {
        descend(windows, &next, count, left - 1);
        return;
    }
    if (is_base(windows, count)) return;
    const double bound_s = complete(windows, &next, least_s);
    if (isfinite(bound_s)) note(windows, count, bound_s);
}

/* Enumerates `left` stages in front of the suffix, the first of which begins with the window. */
static void descend(struct windows *windows, const struct step_suffix *suffix, int count, int left)
{
    const struct step_search *search = windows->search;
    const int from = left == 1 ? windows->begin : suffix->first - 1;
    const int to = windows->begin + left - 1;
    for (int p = 0; p < step_device_sets(search); p++)
        for (int s = 0; s < step_submeshes_of(search, p); s++) {
            const struct step_stage stage = {p, s, suffix->first};
            if (!step_suffix_allows(&windows->suffixes, suffix, p, s)) continue;
            for (int first = from; first >= to && windows->nodes < windows->most_nodes; first--)
                add_stage(windows, suffix, &stage, first, count, left);
        }
}

/* The base with other stages in the window becomes windows->trial. */
static void place(struct windows *windows, const struct placement *placement)
{
    const struct step_candidate *base = &windows->base;
    struct step_candidate *trial = &windows->trial;
    int count = 0;
    for (int i = 0; i < windows->first; i++) trial->stage[count++] = base->stage[i];
    for (int k = placement->count - 1; k >= 0; k--) trial->stage[count++] = placement->stage[k];
    for (int i = windows->last + 1; i < base->count; i++) trial->stage[count++] = base->stage[i];
    trial->count = count;
}

/* Tries `stages` stages in the window. */
static enum hapt_status try_job(struct windows *windows, int stages)
{
    const double worth_s = WINDOW_WORTH * windows->base.step_s;
    windows->nodes = windows->found_count = 0;
    descend(windows, &windows->behind[windows->last + 1], 0, stages);
    for (int k = 0; k < windows->found_count; k++) {
        place(windows, &windows->found[k]);
        HAPT_TRY(step_price_launches(windows->search, worth_s, &windows->trial));
        if (windows->trial.step_s <= STEP_NEARBY_WORTH * windows->base.step_s)
            HAPT_TRY(step_price_nearby(windows->search, &windows->trial));
        if (windows->trial.step_s <= worth_s) step_keep(&windows->kept, &windows->trial, windows->jobs * TRIED + k);
    }
    return HAPT_OK;
}

static enum hapt_status try_window(struct windows *windows, int reach)
{
    const struct step_search *search = windows->search;
    const int others = windows->base.count - (windows->last - windows->first + 1);
    windows->begin = first_layer(&windows->base, windows->first);
    look_ahead(windows);
    for (int stages = 1; stages <= reach && others + stages <= search->most_stages; stages++, windows->jobs++)
        if (windows->jobs % search->size == search->rank) HAPT_TRY(try_job(windows, stages));
    return HAPT_OK;
}

/* Jobs of a round with windows of at most `reach` stages. */
static double count_jobs(const struct windows *windows, int reach)
{
    double jobs = 0;
    for (int replaced = 1; replaced <= reach && replaced <= windows->base.count; replaced++)
        jobs += (double)(windows->base.count - replaced + 1) * reach;
    return jobs;
}

/* The most stages of a window, up to `reach`, for which the work suffices; 0: it does not for any. */
static int affordable(const struct windows *windows, int reach)
{
    const struct step_search *search = windows->search;
    const double time = search->profile->crossings ? STEP_LISTS_TIME : 1,
                 job_work = COUNTS_OF_A_JOB * time * search->B * windows->base.count;
    while (reach > 0 && count_jobs(windows, reach) * job_work > ROUND_WORK * search->most_work) reach--;
    return reach;
}

static enum hapt_status try_all(struct windows *windows, int reach)
{
    step_kept_clear(&windows->kept);
    if (reach == 0) return HAPT_OK;
    windows->most_nodes =
        (int64_t)fmax(LEAST_NODES, MOST_NODES * windows->search->most_work / (reach * reach * windows->base.count));
    if (!look_behind(windows)) return HAPT_OK;
    windows->jobs = 0;
    for (int replaced = 1; replaced <= reach; replaced++)
        for (windows->first = 0; windows->first + replaced <= windows->base.count; windows->first++) {
            windows->last = windows->first + replaced - 1;
            HAPT_TRY(try_window(windows, reach));
        }
    return HAPT_OK;
}

/* ---- Climbing ---- */

static enum hapt_status create(struct windows *windows)
{
    struct step_search *search = windows->search;
    const int L = search->L;
    HAPT_TRY(step_suffixes_create(search, false, &windows->suffixes));
    HAPT_TRY(step_candidate_create(search, &windows->base));
    HAPT_TRY(step_candidate_create(search, &windows->trial));
    HAPT_TRY(step_kept_create(search, REFINED, &windows->kept));
    HAPT_TRY(step_kept_create(search, REFINED, &windows->best));
    HAPT_NEW(windows->behind, &search->arena, search->most_stages + 1);
    HAPT_NEW(windows->ahead.pass_s, &search->arena, L);
    HAPT_NEW(windows->time_s, &search->arena, L * (L + 1));
    HAPT_NEW(windows->comm_s, &search->arena, L);
    for (int first = 0; first < L; first++) {
        if (first + 1 < L) windows->comm_s[first] = step_least_comm_s(search, first);
        for (int end = first + 1; end <= L; end++)
            windows->time_s[first * (L + 1) + end] = step_least_time_s(search, first, end);
    }
    return HAPT_OK;
}

/* Improves a candidate as long as windows help. */
static enum hapt_status climb(struct windows *windows, const struct step_candidate *from, int reach)
{
    struct step_search *search = windows->search;
    double before_s = INFINITY;
    step_candidate_copy(&windows->base, from);
    for (int round = 0; round < MOST_ROUNDS && windows->base.step_s < before_s; round++) {
        before_s = windows->base.step_s;
        HAPT_TRY(hapt_env_agree(search->comm, try_all(windows, affordable(windows, reach))));
        HAPT_TRY(step_gather(search, &windows->kept, &windows->best));
        for (int k = 0; k < REFINED && isfinite(windows->best.candidate[k].step_s); k++) {
            struct step_candidate *found = &windows->best.candidate[k];
            HAPT_TRY(step_improve_seed(search, found));
            if (found->step_s < windows->base.step_s) step_candidate_copy(&windows->base, found);
        }
    }
    return HAPT_OK;
}

enum hapt_status step_windows(struct step_search *search)
{
    struct windows windows = {.search = search};
    if (search->L > MOST_LAYERS || search->options.no_enumeration) return HAPT_OK;
    HAPT_TRY(hapt_env_agree(search->comm, create(&windows)));
    HAPT_TRY(climb(&windows, &search->best, REACH));
    for (int k = 0; k < search->seed_count; k++)
        if (search->seed[k].step_s <= SEED_WORTH * search->best.step_s &&
            !step_same_stages(&search->seed[k], &search->best))
            HAPT_TRY(climb(&windows, &search->seed[k], SEED_REACH));
    return HAPT_OK;
}
