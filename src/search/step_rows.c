/* Other rows of submeshes around the best candidate: a stage split in two, two stages joined, or their devices shared
 * out anew. Each row starts from its exact boundaries by the formula (hapt/recut.h). The best rows are refined. */
#include "step.h"

#include <math.h>

#include "hapt/recut.h"

enum { KEPT = 3 };
/* A row is refined if its step is at most this factor longer than the best. */
#define ROW_WORTH 1.01
/* Searches of boundaries end after this much work, as a share of the refinement's: stages times layers squared. */
#define ROW_WORK 0.4

struct rows {
    struct step_search *search;
    struct step_candidate base, trial;
    struct step_candidate kept[KEPT]; /* by ascending step; unused: INFINITY */
    struct hapt_search_options options;
    int count;                    /* of the row that is tried */
    struct hapt_recut_slot *slot; /* [base.count + 1] */
    double work, most_work;
    double most_s; /* of the formula: rows above are left out */
    struct hapt_arena scratch;
};

static struct hapt_recut_slot slot_of(const struct step_search *search, const struct step_stage *stage)
{
    const struct hapt_submesh *submesh = &search->profile->cluster[stage->device_set].submesh[stage->submesh];
    return (struct hapt_recut_slot){stage->device_set, submesh->n, submesh->m};
}

/* Takes the trial among the best rows. */
static void keep(struct rows *rows)
{
    int at = KEPT;
    while (at > 0 && rows->trial.step_s < rows->kept[at - 1].step_s) at--;
    for (int k = 0; k < KEPT; k++)
        if (step_same_stages(&rows->kept[k], &rows->trial)) return;
    if (at == KEPT) return;
    const struct step_candidate room = rows->kept[KEPT - 1];
    for (int k = KEPT - 1; k > at; k--) rows->kept[k] = rows->kept[k - 1];
    rows->kept[at] = room;
    step_candidate_copy(&rows->kept[at], &rows->trial);
}

static enum hapt_status try_row(void *context)
{
    struct rows *rows = context;
    const int count = rows->count;
    struct step_search *search = rows->search;
    struct hapt_plan *plan;
    const double work = (double)count * search->L * search->L;
    if (count > search->most_stages || rows->work + work > rows->most_work) return HAPT_OK;
    rows->work += work;
    hapt_arena_reset(&rows->scratch);
    HAPT_TRY(hapt_plan_recut(&search->passes, &rows->options, rows->slot, count, rows->most_s, &rows->scratch, &plan));
    if (!plan) return HAPT_OK;
    HAPT_TRY(step_candidate_from(search, plan, &rows->trial));
    HAPT_TRY(step_price_launches(search, ROW_WORTH * search->best.step_s, &rows->trial));
    keep(rows);
    return HAPT_OK;
}

/* Replaces `taken` stages from i on by `given`. */
static enum hapt_status replace(struct rows *rows, int i, int taken, int given)
{
    const struct step_candidate *base = &rows->base;
    int devices = 0;
    for (int k = 0; k < base->count; k++) {
        const struct hapt_recut_slot slot = slot_of(rows->search, &base->stage[k]);
        if (k >= i && k < i + taken) devices += slot.n * slot.m;
        if (k < i) rows->slot[k] = slot;
        if (k >= i + taken) rows->slot[k + given - taken] = slot;
    }
    rows->count = base->count + given - taken;
    return hapt_recut_share(rows->search->profile, base->stage[i].device_set, devices, given == 2, true, &rows->slot[i],
                            try_row, rows);
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

static enum hapt_status find_rows(struct rows *rows)
{
    struct step_search *search = rows->search;
    HAPT_TRY(step_candidate_create(search, &rows->base));
    HAPT_TRY(step_candidate_create(search, &rows->trial));
    for (int k = 0; k < KEPT; k++) HAPT_TRY(step_candidate_create(search, &rows->kept[k]));
    HAPT_NEW(rows->slot, &search->arena, search->most_stages + 2);
    step_candidate_copy(&rows->base, &search->best);
    HAPT_TRY(formula_s(rows, &rows->most_s));
    rows->most_s *= ROW_WORTH;
    return try_all(rows);
}

enum hapt_status step_rows(struct step_search *search)
{
    struct rows rows = {.search = search, .options = *search->options, .most_work = ROW_WORK * search->most_work};
    for (int i = 0; i < search->best.count; i++)
        if (search->best.stage[i].device_set >= search->C) return HAPT_OK; /* slots are submeshes of one subcluster */
    rows.options.schedule = search->best.schedule;
    rows.options.hide_threshold = search->best.hide_threshold;
    hapt_arena_init(&rows.scratch);
    enum hapt_status status = hapt_env_agree(search->comm, find_rows(&rows));
    for (int k = 0; k < KEPT && status == HAPT_OK; k++) {
        if (!isfinite(rows.kept[k].step_s)) break;
        status = step_refine(search, &rows.kept[k]);
        if (status == HAPT_OK && rows.kept[k].step_s < search->best.step_s)
            step_candidate_copy(&search->best, &rows.kept[k]);
    }
    hapt_arena_release(&rows.scratch);
    return status;
}
