/*
 * Plans under a looped schedule that was asked for. In: rows of submeshes (loops_rows.c). Each is cut into loops x
 * submeshes stages of equal time under each setting; the best are refined by the beam. No bound is proven.
 */
#include "loops.h"
#include "search.h"

#include <math.h>
#include <string.h>

/* Work of all beams together: about three seconds on one core. */
#define MOST_WORK 6e7
/* Items beside the best of each row are refined if they are at most this factor slower than the best plan so far. */
#define ITEM_WORTH 1.3
/* They may use this share of the work. */
#define ITEM_WORK 0.5
/* Pricing the settings of new rows may use this share. */
#define ROW_SHARE 0.15
enum { DISTINCT = 8, KEPT = 32, MOST_ROUNDS = 3 };

struct rows {
    struct loops_search *search;
    struct loops_rows all;
    int done; /* rows that were priced */
    struct loops_candidate trial, other, kept[KEPT], best;
};

/* ---- Pricing ---- */

/* Cuts a row under a setting into stages of equal time, and prices it. */
static enum hapt_status price_even(struct rows *rows, const struct loops_row *row, const struct loops_setting *setting,
                                   struct loops_candidate *candidate)
{
    struct loops_search *search = rows->search;
    candidate->slots = row->slots;
    candidate->loops = setting->loops;
    candidate->loop_batch = setting->loop_batch;
    candidate->prefetch = setting->prefetch;
    candidate->step_s = INFINITY;
    memcpy(candidate->slot, row->slot, (size_t)row->slots * sizeof *row->slot);
    memset(candidate->ahead, 0, (size_t)row->slots * sizeof *candidate->ahead);
    bool found;
    HAPT_TRY(loops_even_boundaries(search, false, candidate, &found));
    if (!found && search->obstacle < LOOPS_NO_RANGES) search->obstacle = LOOPS_NO_RANGES;
    if (found) HAPT_TRY(loops_price(search, INFINITY, candidate));
    if (!found || loops_is_plan(candidate) || !search->lists) return HAPT_OK;
    /* it lacks memory */
    loops_candidate_copy(&rows->other, candidate);
    HAPT_TRY(loops_even_boundaries(search, true, candidate, &found));
    if (found) HAPT_TRY(loops_price(search, INFINITY, candidate));
    if (!found || candidate->step_s > rows->other.step_s) loops_candidate_copy(candidate, &rows->other);
    return HAPT_OK;
}

struct item {
    int row, group; /* a group has the settings of a row under a number of loops */
    bool first;     /* it is priced before others of its group */
    struct loops_setting setting;
};

struct items {
    int count;
    struct item *item;
    double *step_s; /* INFINITY: not priced, or no plan */
    bool *taken, *group_taken;
};

/* Settings of a row that are priced first: the smallest groups, with little prefetch and with most. */
static bool is_first(const struct loops_setting *setting, int count, int k)
{
    return setting[k].loop_batch == setting[0].loop_batch &&
           (setting[k].prefetch == (count > 1 ? 1 : setting[0].prefetch) || k + 1 == count ||
            setting[k + 1].loop_batch != setting[0].loop_batch);
}

/* All settings of the rows that were not priced yet. */
static enum hapt_status list_items(struct rows *rows, struct hapt_arena *scratch, struct items *items)
{
    struct loops_search *search = rows->search;
    const int asked = search->options->loops.loops;
    struct loops_setting setting[LOOPS_MOST_SETTINGS];
    HAPT_NEW(items->item, scratch, (rows->all.count - rows->done) * 3 * LOOPS_MOST_SETTINGS + 1);
    HAPT_NEW(items->group_taken, scratch, (rows->all.count - rows->done) * 3 + 1);
    bool several = search->options->any_loops;
    int groups = 0;
    for (int r = 0; r < rows->all.count; r++) several = several || rows->all.row[r].slots > 1;
    for (int r = rows->done; r < rows->all.count; r++)
        for (int loops = asked > 0 ? asked : 2; loops <= (asked > 0 ? asked : 4); loops++) {
            const int D = rows->all.row[r].slots,
                      settings = loops_list_settings(search->options, D, loops, loops, setting);
            if (D == 1 && several) continue; /* loops around one submesh are none */
            if ((int64_t)D * loops * search->B > HAPT_PLAN_MOST_LOOPED_PASSES) continue; /* no file may hold the plan */
            if (D * loops > search->L) {
                if (search->obstacle < LOOPS_NO_LAYERS) search->obstacle = LOOPS_NO_LAYERS;
                continue;
            }
            for (int k = 0; k < settings; k++)
                items->item[items->count++] = (struct item){r, groups, is_first(setting, settings, k), setting[k]};
            groups++;
        }
    rows->done = rows->all.count;
    HAPT_NEW(items->step_s, scratch, items->count + 1);
    HAPT_NEW(items->taken, scratch, items->count + 1);
    for (int k = 0; k < items->count; k++) items->step_s[k] = INFINITY;
    return HAPT_OK;
}

/* Prices the items [0, count) of `order`; every rank gets all prices. Collective. */
static enum hapt_status price_share(struct rows *rows, struct items *items, const int *order, int count)
{
    struct loops_search *search = rows->search;
    enum hapt_status status = HAPT_OK;
    for (int k = 0; k < count && status == HAPT_OK; k++) {
        const struct item *item = &items->item[order[k]];
        if (k % search->size != search->rank) continue;
        status = price_even(rows, &rows->all.row[item->row], &item->setting, &rows->trial);
        items->step_s[order[k]] = rows->trial.step_s;
    }
    HAPT_TRY(hapt_env_agree(search->comm, status));
    if (search->size > 1)
        HAPT_MPI(MPI_Allreduce(MPI_IN_PLACE, items->step_s, items->count, MPI_DOUBLE, MPI_MIN, search->comm));
    for (int k = 0; k < count; k++) {
        const struct item *item = &items->item[order[k]], *before = k > 0 ? &items->item[order[k - 1]] : item;
        const int slots = rows->all.row[item->row].slots;
        const bool builds = k == 0 || slots != rows->all.row[before->row].slots ||
                            memcmp(&item->setting, &before->setting, sizeof item->setting) != 0;
        search->work += (builds ? LOOPS_BUILDING : 1) * search->B * (double)(slots * item->setting.loops);
    }
    return HAPT_OK;
}

/* The best item that is not taken; `distinct`: of a group of which none is. -1: none. */
static int best_item(const struct items *items, bool distinct)
{
    int best = -1;
    for (int k = 0; k < items->count; k++) {
        const bool known = items->taken[k] || (distinct && items->group_taken[items->item[k].group]);
        if (!known && items->step_s[k] < (best < 0 ? INFINITY : items->step_s[best])) best = k;
    }
    return best;
}

static void take_item(struct items *items, int item)
{
    items->taken[item] = items->group_taken[items->item[item].group] = true;
}

/* Prices a setting of each row, then all settings of the best rows. Collective. */
static enum hapt_status price_rows(struct rows *rows, struct items *items, struct hapt_arena *scratch)
{
    struct loops_search *search = rows->search;
    const double most_work = search->work + ROW_SHARE * search->most_work;
    int *order, count = 0;
    HAPT_TRY(hapt_env_agree(search->comm, list_items(rows, scratch, items)));
    order = hapt_arena_alloc(scratch, (size_t)items->count + 1, sizeof *order);
    HAPT_TRY(hapt_env_agree(search->comm, order ? HAPT_OK : HAPT_ERR_MEMORY));
    for (int slots = 1; slots <= search->most_slots; slots++) /* rows of a length share their lists */
        for (int loops = 1; loops <= search->L / slots; loops++)
            for (int much = 0; much < 2; much++)
                for (int k = 0; k < items->count; k++)
                    if (items->item[k].first && items->item[k].setting.loops == loops &&
                        (items->item[k].setting.prefetch > 1) == much &&
                        rows->all.row[items->item[k].row].slots == slots)
                        order[count++] = k;
    HAPT_TRY(price_share(rows, items, order, count));
    for (int row = best_item(items, true); row >= 0 && search->work < most_work; row = best_item(items, true)) {
        take_item(items, row);
        count = 0;
        for (int k = 0; k < items->count; k++)
            if (!items->item[k].first && items->item[k].group == items->item[row].group) order[count++] = k;
        HAPT_TRY(price_share(rows, items, order, count));
    }
    for (int k = 0; k < items->count; k++) items->taken[k] = items->group_taken[items->item[k].group] = false;
    return HAPT_OK;
}

/* Keeps the best items: first of distinct rows, then of all. Collective. */
static enum hapt_status price_items(struct rows *rows, struct hapt_arena *scratch, int *kept, int *distinct)
{
    struct items items = {0};
    enum hapt_status status = HAPT_OK;
    *kept = *distinct = 0;
    HAPT_TRY(price_rows(rows, &items, scratch));
    for (bool all = false; *kept < KEPT && status == HAPT_OK;) {
        all = all || *kept == DISTINCT;
        const int best = best_item(&items, !all);
        if (best < 0 && all) break;
        all = all || best < 0;
        if (best < 0) continue;
        take_item(&items, best);
        *distinct += !all;
        status =
            price_even(rows, &rows->all.row[items.item[best].row], &items.item[best].setting, &rows->kept[(*kept)++]);
    }
    return hapt_env_agree(rows->search->comm, status);
}

/* The best setting for given boundaries. Rank-local, the same on all ranks. *changed: it is another one. */
static enum hapt_status retune(struct rows *rows, struct loops_candidate *candidate, bool *changed)
{
    struct loops_setting setting[LOOPS_MOST_SETTINGS];
    const int count =
        loops_list_settings(rows->search->options, candidate->slots, candidate->loops, candidate->loops, setting);
    *changed = false;
    for (int k = 0; k < count && rows->search->work < rows->search->most_work; k++) {
        loops_candidate_copy(&rows->trial, candidate);
        rows->trial.loop_batch = setting[k].loop_batch;
        rows->trial.prefetch = setting[k].prefetch;
        HAPT_TRY(loops_price(rows->search, candidate->step_s, &rows->trial));
        rows->search->work += LOOPS_BUILDING * rows->search->B * (double)(candidate->slots * candidate->loops);
        if (!(rows->trial.step_s < candidate->step_s)) continue;
        loops_candidate_copy(candidate, &rows->trial);
        *changed = true;
    }
    return HAPT_OK;
}

/* Boundaries and settings in turn. Collective. */
static enum hapt_status refine(struct rows *rows, struct loops_candidate *candidate)
{
    bool changed = true;
    while (changed) {
        HAPT_TRY(loops_refine(rows->search, candidate));
        HAPT_TRY(hapt_env_agree(rows->search->comm, retune(rows, candidate, &changed)));
        changed = changed && rows->search->work < rows->search->most_work;
    }
    return HAPT_OK;
}

/* True if an item beside the best ones of the rows is worth refining. */
static bool is_worth(const struct rows *rows, const struct loops_candidate *candidate)
{
    return candidate->step_s <= ITEM_WORTH * rows->best.step_s &&
           rows->search->work < ITEM_WORK * rows->search->most_work;
}

/* Prices new rows and refines the best. Collective. */
static enum hapt_status improve(struct rows *rows, bool *better)
{
    struct hapt_arena scratch;
    int kept = 0, distinct = 0;
    *better = false;
    hapt_arena_init(&scratch);
    enum hapt_status status = price_items(rows, &scratch, &kept, &distinct);
    hapt_arena_release(&scratch);
    for (int k = 0; k < kept && status == HAPT_OK; k++) {
        if (k >= distinct && !is_worth(rows, &rows->kept[k])) continue;
        status = refine(rows, &rows->kept[k]);
        if (status != HAPT_OK || !(rows->kept[k].step_s < rows->best.step_s)) continue;
        loops_candidate_copy(&rows->best, &rows->kept[k]);
        *better = true;
    }
    return status;
}

/* Rounds of rows around the best one. */
static enum hapt_status run(struct rows *rows)
{
    struct loops_search *search = rows->search;
    bool better = true;
    enum hapt_status status = HAPT_OK;
    HAPT_TRY(loops_find_rows(&rows->all));
    for (int round = 0; better && round < MOST_ROUNDS; round++) {
        HAPT_TRY(improve(rows, &better));
        if (!loops_is_plan(&rows->best)) return HAPT_OK;
        const struct loops_row row = {rows->best.slots, rows->best.slot};
        HAPT_TRY(hapt_env_agree(search->comm, loops_add_neighbours(&rows->all, &row)));
    }
    if (search->options->schedule == HAPT_SCHEDULE_LOOPED && search->options->loops.prefetch < 0)
        status = loops_refine_ahead(search, &rows->best);
    return hapt_env_agree(search->comm, status);
}

/* ---- The plan ---- */

static enum hapt_status no_plan(const struct loops_search *search)
{
    const char *kind = hapt_schedule_kind_name(search->options->schedule);
    char missing[32];
    switch (search->obstacle) {
    case LOOPS_NO_MEMORY:
        return hapt_fail(HAPT_ERR_INFEASIBLE, "use fewer loops, a smaller --loop-batch, or devices with more memory",
                         "no plan with schedule %s fits: the nearest lacks %s on a device", kind,
                         hapt_units_bytes(search->missing_bytes, missing));
    case LOOPS_NO_RANGES:
        return hapt_fail(HAPT_ERR_INFEASIBLE, "use fewer loops, or a larger --imbalance",
                         "the profile has no candidates for the short stages of schedule %s", kind);
    case LOOPS_NO_LAYERS:
        return hapt_fail(HAPT_ERR_INFEASIBLE, "give --layers-per-model a larger number, or use fewer --loops",
                         "%d layers are too few for the stages of schedule %s", search->L, kind);
    default: return HAPT_OK;
    }
}

/* No setting gives lists for any row: names the first row's obstacle. */
static enum hapt_status no_lists(const struct rows *rows)
{
    const struct hapt_search_options *options = rows->search->options;
    const int D = rows->all.row[0].slots;
    HAPT_TRY(loops_check_batch(
        options, hapt_schedule_loop_batch(options->schedule, options->microbatches, D, options->loops.loop_batch)));
    return hapt_fail(HAPT_ERR_USAGE, "choose another loop batch, or more microbatches",
                     "the lists of schedule %s deadlock with %d microbatches on %d submeshes",
                     hapt_schedule_kind_name(options->schedule), options->microbatches, D);
}

static enum hapt_status make_plan(const struct rows *rows, struct hapt_arena *result, struct hapt_plan *plan)
{
    const struct loops_search *search = rows->search;
    if (!loops_is_plan(&rows->best)) {
        HAPT_TRY(no_plan(search));
        return no_lists(rows);
    }
    HAPT_TRY(loops_plan(search, &rows->best, result, plan));
    return hapt_plan_price_launches(search->profile, plan);
}

static enum hapt_status create(struct rows *rows)
{
    struct loops_search *search = rows->search;
    HAPT_TRY(loops_candidate_create(search, &search->key));
    HAPT_TRY(loops_candidate_create(search, &rows->trial));
    HAPT_TRY(loops_candidate_create(search, &rows->other));
    HAPT_TRY(loops_candidate_create(search, &rows->best));
    for (int k = 0; k < KEPT; k++) HAPT_TRY(loops_candidate_create(search, &rows->kept[k]));
    return HAPT_OK;
}

static enum hapt_status run_all(struct loops_search *search, struct hapt_arena *result, struct hapt_plan **plan)
{
    struct rows *rows = hapt_arena_alloc(&search->arena, 1, sizeof *rows);
    struct hapt_plan *made = hapt_arena_alloc(result, 1, sizeof *made);
    enum hapt_status status = rows && made ? HAPT_OK : HAPT_ERR_MEMORY;
    const double start_s = hapt_time_s();
    if (rows) rows->search = rows->all.search = search;
    if (status == HAPT_OK) status = create(rows);
    HAPT_TRY(hapt_env_agree(search->comm, status));
    HAPT_TRY(run(rows));
    HAPT_TRY(hapt_search_agree(search->comm, search->options, make_plan(rows, result, made)));
    made->search.seconds = hapt_time_s() - start_s;
    HAPT_MPI(MPI_Bcast(&made->search.seconds, 1, MPI_DOUBLE, 0, search->comm));
    *plan = made;
    return HAPT_OK;
}

enum hapt_status search_loops(MPI_Comm comm, const struct hapt_profile *profile,
                              const struct hapt_search_options *options, const struct hapt_plan *unlooped,
                              struct hapt_arena *result, struct hapt_plan **plan)
{
    struct hapt_profile alone = *profile;
    struct loops_search search = {.comm = comm,
                                  .profile = &alone,
                                  .options = options,
                                  .unlooped = unlooped,
                                  .L = profile->layer_count,
                                  .B = options->microbatches,
                                  .most_work = options->work > 0 ? options->work : MOST_WORK};
    alone.mixed_count = 0; /* stages of several subclusters are not looped */
    HAPT_TRY(hapt_env_agree(comm, search_check_options(options)));
    HAPT_TRY(hapt_search_agree(comm, options, search_check_loops(options)));
    HAPT_MPI(MPI_Comm_rank(comm, &search.rank));
    HAPT_MPI(MPI_Comm_size(comm, &search.size));
    for (int c = 0; c < profile->cluster_count; c++)
        search.most_slots += profile->cluster[c].nodes * profile->cluster[c].devices_per_node;
    if (search.most_slots > search.L) search.most_slots = search.L;
    search.most_lists = LOOPS_MOST_PASSES / (int)fmin((double)search.B * search.L, LOOPS_MOST_PASSES);
    search.most_lists = search.most_lists < LOOPS_LEAST_LISTS  ? LOOPS_LEAST_LISTS
                        : search.most_lists > LOOPS_MOST_LISTS ? LOOPS_MOST_LISTS
                                                               : search.most_lists;
    search.most_stages = search.L; /* longer rows have no stages for all submeshes */
    hapt_arena_init(&search.arena);
    hapt_arena_init(&search.trial);
    hapt_arena_init(&search.frame_arena);
    for (int k = 0; k < LOOPS_MOST_LISTS; k++) hapt_arena_init(&search.newest[k].arena);
    const enum hapt_status status = run_all(&search, result, plan);
    hapt_simulate_work_release(&search.simulation);
    beam_memo_release(&search.memo);
    for (int k = 0; k < LOOPS_MOST_LISTS; k++) hapt_arena_release(&search.newest[k].arena);
    hapt_arena_release(&search.frame_arena);
    hapt_arena_release(&search.trial);
    hapt_arena_release(&search.arena);
    return status;
}

enum hapt_status hapt_plan_search_loops(MPI_Comm comm, const struct hapt_profile *profile,
                                        const struct hapt_search_options *options, struct hapt_arena *result,
                                        struct hapt_plan **plan)
{
    return search_loops(comm, profile, options, NULL, result, plan);
}
