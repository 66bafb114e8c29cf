/*
 * Other rows of submeshes around good candidates: a stage split in two, two stages joined, or their devices shared out
 * anew. Each row is tried once. It starts from its best boundaries by the formula (hapt/recut.h). The ranks share the
 * rows. The best rows are refined, and may become bases themselves.
 */
#include "step.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "hapt/recut.h"

/* Candidates that may be bases. */
enum { MOST_BASES = 32 };

/* Limits the rows that are tried. */
struct reach {
    int kept;          /* rows around one base that are refined */
    int bases;         /* candidates around which rows are tried */
    double base_worth; /* their steps are at most this factor longer than the best */
    double row_worth;  /* the same of rows that are refined, and of their values by the formula */
    bool idle;         /* stages may take idle devices, or leave devices idle */
    bool relaxed;      /* rows are also cut with fewer microbatches in flight than the rule asks for */
};

static const struct reach narrow = {3, 4, 1.005, 1.01, false, false}, wide = {6, 16, 1.05, 1.2, true, true};

/* Searches of boundaries end after this much work, as a share of the refinement's: stages times layers squared. */
#define ROW_WORK 0.4
/* The refinement's work on far rows: a tenth of a second on a core. */
#define FAR_WORK 1e7

struct rows {
    struct step_search *search;
    const struct reach *reach;
    struct step_candidate base, trial;
    struct step_kept kept, best; /* of this rank, and of all; by the numbers of rows */
    int base_count, bases_done;
    struct step_candidate bases[MOST_BASES];
    bool is_done[MOST_BASES]; /* the rows around it were tried */
    int64_t tried;            /* rows on all ranks */
    int64_t first;            /* the number of the first one around this base */
    uint64_t *hash;           /* [tried] of the rows */
    int64_t room;
    struct hapt_search_options options;
    int count;                    /* of the row that is tried */
    struct hapt_recut_slot *slot; /* [base.count + 1] */
    double work, most_work;
    const struct hapt_profile *view; /* in which the rows are cut */
    double most_s;                   /* of the formula: rows above are left out */
    struct hapt_arena scratch;
};

static struct hapt_recut_slot slot_of(const struct step_search *search, const struct step_stage *stage)
{
    const struct hapt_submesh *submesh = &search->profile->cluster[stage->device_set].submesh[stage->submesh];
    return (struct hapt_recut_slot){stage->device_set, submesh->n, submesh->m};
}

/* Notes the row; *is_new: it was not tried before. */
static enum hapt_status note_row(struct rows *rows, bool *is_new)
{
    const uint64_t hash = hapt_hash(0, rows->slot, (size_t)rows->count * sizeof *rows->slot);
    *is_new = false;
    for (int64_t k = 0; k < rows->tried; k++)
        if (rows->hash[k] == hash) return HAPT_OK;
    if (rows->tried == rows->room) {
        const int64_t room = 2 * rows->room + 256;
        uint64_t *wider = realloc(rows->hash, (size_t)room * sizeof *wider);
        if (!wider)
            return hapt_fail(HAPT_ERR_MEMORY, "give the job more host memory", "host memory exhausted by the search");
        rows->hash = wider;
        rows->room = room;
    }
    rows->hash[rows->tried++] = hash;
    *is_new = true;
    return HAPT_OK;
}

/* Cuts and prices rows->slot; rows->trial is the result. */
static enum hapt_status cut(struct rows *rows)
{
    struct step_search *search = rows->search;
    struct hapt_plan *plan;
    rows->trial.step_s = INFINITY;
    hapt_arena_reset(&rows->scratch);
    HAPT_TRY(hapt_plan_recut(rows->view, &rows->options, rows->slot, rows->count, rows->most_s, &rows->scratch, &plan));
    if (!plan) return HAPT_OK;
    HAPT_TRY(step_candidate_from(search, plan, &rows->trial));
    return step_price_launches(search, rows->reach->row_worth * search->best.step_s, &rows->trial);
}

/* Keeps the trial if it is among the best rows. The base is left out: it was refined before. */
static void keep(struct rows *rows, int64_t number)
{
    if (!step_same_stages(&rows->base, &rows->trial)) step_keep(&rows->kept, &rows->trial, number);
}

static enum hapt_status try_row(void *context)
{
    struct rows *rows = context;
    const int count = rows->count;
    struct step_search *search = rows->search;
    bool is_new;
    const double cuts = rows->reach->relaxed ? 1 + STEP_RELAXATIONS : 1;
    const double work = cuts * count * search->L * search->L;
    if (count > search->most_stages || rows->work + work > rows->most_work) return HAPT_OK;
    HAPT_TRY(note_row(rows, &is_new));
    if (!is_new) return HAPT_OK;
    rows->work += work;
    const int64_t number = rows->tried - 1;
    if (!step_is_mine(search, search->size, number - rows->first)) return HAPT_OK;
    rows->view = &search->useful;
    HAPT_TRY(cut(rows));
    keep(rows, number);
    for (int level = 0; level < STEP_RELAXATIONS && rows->reach->relaxed; level++) {
        HAPT_TRY(step_relaxed(search, level, &rows->view));
        HAPT_TRY(cut(rows));
        keep(rows, number);
    }
    return HAPT_OK;
}

static enum hapt_status create(struct rows *rows)
{
    struct step_search *search = rows->search;
    HAPT_TRY(step_candidate_create(search, &rows->base));
    HAPT_TRY(step_candidate_create(search, &rows->trial));
    HAPT_TRY(step_kept_create(search, rows->reach->kept, &rows->kept));
    HAPT_TRY(step_kept_create(search, rows->reach->kept, &rows->best));
    for (int k = 0; k < MOST_BASES; k++) HAPT_TRY(step_candidate_create(search, &rows->bases[k]));
    HAPT_NEW(rows->slot, &search->arena, search->most_stages + 2);
    return HAPT_OK;
}

/* Devices of subcluster c that the base leaves idle. */
static int idle_devices(const struct rows *rows, int c)
{
    const struct hapt_profile_cluster *cluster = &rows->search->profile->cluster[c];
    int idle = cluster->nodes * cluster->devices_per_node;
    for (int k = 0; k < rows->base.count; k++) {
        const struct hapt_recut_slot slot = slot_of(rows->search, &rows->base.stage[k]);
        if (slot.subcluster == c) idle -= slot.n * slot.m;
    }
    return idle;
}

/* Replaces `taken` stages from i on by `given`, on their devices and, with reach.idle, on idle ones. */
static enum hapt_status replace(struct rows *rows, int i, int taken, int given)
{
    const struct step_candidate *base = &rows->base;
    int devices = rows->reach->idle ? idle_devices(rows, base->stage[i].device_set) : 0;
    for (int k = 0; k < base->count; k++) {
        const struct hapt_recut_slot slot = slot_of(rows->search, &base->stage[k]);
        if (k >= i && k < i + taken) devices += slot.n * slot.m;
        if (k < i) rows->slot[k] = slot;
        if (k >= i + taken) rows->slot[k + given - taken] = slot;
    }
    rows->count = base->count + given - taken;
    if (rows->count == 0) return HAPT_OK;
    if (given == 0) return try_row(rows);
    return hapt_recut_share(rows->search->profile, base->stage[i].device_set, devices, given == 2,
                            !rows->reach->idle || rows->search->options.use_all_devices, &rows->slot[i], try_row, rows);
}

static enum hapt_status try_all(struct rows *rows)
{
    const struct step_candidate *base = &rows->base;
    for (int i = 0; i < base->count; i++) {
        HAPT_TRY(replace(rows, i, 1, 2));
        if (i + 1 < base->count && base->stage[i].device_set == base->stage[i + 1].device_set) {
            HAPT_TRY(replace(rows, i, 2, 1));
            HAPT_TRY(replace(rows, i, 2, 2));
        }
        if (rows->reach->idle) HAPT_TRY(replace(rows, i, 1, 1));
        if (rows->reach->idle && !rows->search->options.use_all_devices) HAPT_TRY(replace(rows, i, 1, 0));
    }
    return HAPT_OK;
}

/* The formula's value of the base without step times. */
static enum hapt_status formula_s(struct rows *rows, double *latency_s)
{
    struct hapt_plan plan;
    int misfit;
    HAPT_TRY(step_candidate_plan(rows->search, &rows->base, &rows->scratch, &plan));
    HAPT_TRY(hapt_plan_launch(&rows->search->passes, INFINITY, &plan, &misfit));
    double sum_s = 0, longest_s = 0;
    for (int i = 0; i < plan.stage_count; i++) {
        sum_s += plan.stage[i].compute_s + 2 * plan.stage[i].comm_s;
        longest_s = fmax(longest_s, fmax(plan.stage[i].compute_s, plan.stage[i].comm_s));
    }
    *latency_s = sum_s + (rows->search->B - 1) * longest_s;
    return HAPT_OK;
}

/* Tries the rows around a candidate. */
static enum hapt_status find_rows(struct rows *rows, const struct step_candidate *base)
{
    step_candidate_copy(&rows->base, base);
    rows->options = rows->search->options;
    rows->options.schedule = base->schedule;
    rows->options.hide_threshold = base->hide_threshold;
    step_kept_clear(&rows->kept);
    rows->first = rows->tried;
    step_begin_numbers(rows->search, rows->search->size);
    HAPT_TRY(formula_s(rows, &rows->most_s));
    rows->most_s *= rows->reach->row_worth;
    return try_all(rows);
}

static void add_base(struct rows *rows, const struct step_candidate *candidate)
{
    for (int i = 0; i < candidate->count; i++)
        if (candidate->stage[i].device_set >= rows->search->C) return; /* slots are submeshes of one subcluster */
    for (int k = 0; k < rows->base_count; k++)
        if (step_same_stages(&rows->bases[k], candidate)) return;
    if (rows->base_count < MOST_BASES) step_candidate_copy(&rows->bases[rows->base_count++], candidate);
}

/* The best base around which no rows were tried, if it is good enough; -1: none. */
static int next_base(const struct rows *rows)
{
    const struct step_search *search = rows->search;
    int next = -1;
    if (search->work >= search->most_work || rows->bases_done == rows->reach->bases ||
        hapt_at_most(search->best.step_s, (1 + search->options.gap) * search->bound_s))
        return -1;
    for (int k = 0; k < rows->base_count; k++)
        if (!rows->is_done[k] && (next < 0 || rows->bases[k].step_s < rows->bases[next].step_s)) next = k;
    return next >= 0 && rows->bases[next].step_s <= rows->reach->base_worth * search->best.step_s ? next : -1;
}

static enum hapt_status refine_kept(struct rows *rows)
{
    struct step_search *search = rows->search;
    for (int k = 0; k < rows->best.size && isfinite(rows->best.candidate[k].step_s); k++) {
        HAPT_TRY(step_improve_seed(search, &rows->best.candidate[k]));
        add_base(rows, &rows->best.candidate[k]);
    }
    return HAPT_OK;
}

enum hapt_status step_rows(struct step_search *search, bool far)
{
    const double all_work = search->most_work;
    struct rows rows = {.search = search, .reach = far ? &wide : &narrow};
    rows.most_work = ROW_WORK * (far ? fmin(FAR_WORK, all_work) : all_work);
    if (far) search->most_work = fmin(all_work, search->work + FAR_WORK);
    hapt_arena_init(&rows.scratch);
    enum hapt_status status = hapt_env_agree(search->comm, create(&rows));
    if (status == HAPT_OK) add_base(&rows, &search->best);
    for (int k = 0; k < search->seed_count && status == HAPT_OK && far; k++) add_base(&rows, &search->seed[k]);
    for (int base; status == HAPT_OK && (base = next_base(&rows)) >= 0;) {
        rows.is_done[base] = true;
        rows.bases_done++;
        status = hapt_env_agree(search->comm, find_rows(&rows, &rows.bases[base]));
        if (status == HAPT_OK) status = step_gather(search, &rows.kept, &rows.best);
        if (status == HAPT_OK) status = refine_kept(&rows);
    }
    search->most_work = all_work;
    free(rows.hash);
    hapt_arena_release(&rows.scratch);
    return status;
}
