/*
 * Plans under a looped schedule that was asked for. In: rows of submeshes from the search without loops. Around them,
 * rows with a submesh split in two, two joined, or one of another size are tried; all rows, if there are few. Each row
 * is cut into loops x submeshes stages of equal time under each setting; the best are refined by the beam. No bound is
 * proven.
 */
#include "loops.h"
#include "search.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* Work of all beams together: about three seconds on one core. */
#define MOST_WORK 6e7
/* Of the search without loops, which only gives rows. */
#define ROW_WORK 1e7
/* Items beside the best of each row are refined if they are at most this factor slower than the best plan so far. */
#define ITEM_WORTH 1.3
/* They may use this share of the work. */
#define ITEM_WORK 0.5
/* Pricing the settings of new rows may use this share. */
#define ROW_SHARE 0.15
enum {
    MOST_SETTINGS = 96,
    MOST_BATCHES = 6,
    MOST_PREFETCH = 8,
    MOST_ROWS = 512,
    FEW_ROWS = 256,
    DISTINCT = 8,
    KEPT = 32,
    MOST_ROUNDS = 3
};

struct setting {
    int loops, loop_batch, prefetch;
};

struct row {
    int slots;
    struct loops_slot *slot;
};

struct rows {
    struct loops_search *search;
    int count, done; /* done: rows that were priced */
    struct row row[MOST_ROWS];
    struct loops_candidate trial, other, kept[KEPT], best;
};

/* ---- Settings ---- */

static int add_setting(struct setting *setting, int count, struct setting added)
{
    if (count < MOST_SETTINGS) setting[count++] = added;
    return count;
}

/* Group sizes of the looped kind: divisors of B that are at least the number of submeshes, the smallest ones and B. */
static int list_batches(const struct hapt_search_options *options, int submeshes, int batch[MOST_BATCHES])
{
    const int B = options->microbatches;
    int count = 0;
    if (options->schedule != HAPT_SCHEDULE_LOOPED || options->loops.loop_batch > 0) {
        batch[0] = options->loops.loop_batch;
        return 1;
    }
    for (int d = submeshes < B ? submeshes : B; d < B && count < MOST_BATCHES - 1; d++)
        if (B % d == 0) batch[count++] = d;
    batch[count++] = B;
    return count;
}

/* The settings of a number of loops. */
static int add_settings(const struct hapt_search_options *options, int submeshes, int loops, struct setting *setting,
                        int count)
{
    int batch[MOST_BATCHES];
    const int batches = list_batches(options, submeshes, batch);
    const bool chosen = options->schedule == HAPT_SCHEDULE_LOOPED && options->loops.prefetch < 0;
    const int given = options->schedule == HAPT_SCHEDULE_LOOPED && !chosen ? options->loops.prefetch : 0;
    const int last = chosen ? (submeshes - 1 < MOST_PREFETCH ? submeshes - 1 : MOST_PREFETCH) : given;
    for (int k = 0; k < batches; k++) {
        const int of = hapt_schedule_loop_batch(options->schedule, options->microbatches, submeshes, batch[k]);
        if (options->microbatches % of != 0) continue;
        for (int b = chosen ? 0 : given; b <= last; b++)
            count = add_setting(setting, count, (struct setting){loops, batch[k], b});
    }
    return count;
}

static int list_settings(const struct hapt_search_options *options, int submeshes, int least_loops, int most_loops,
                         struct setting setting[MOST_SETTINGS])
{
    int count = 0;
    for (int loops = least_loops; loops <= most_loops; loops++)
        count = add_settings(options, submeshes, loops, setting, count);
    return count;
}

/* HAPT_ERR_USAGE: groups that do not divide the microbatches of a step. */
static enum hapt_status check_batch(const struct hapt_search_options *options, int batch)
{
    const int B = options->microbatches;
    char hint[96];
    if (B % batch == 0) return HAPT_OK;
    int nearest = 1;
    for (int d = 1; d <= B; d++)
        if (B % d == 0 && fabs((double)d - batch) < fabs((double)nearest - batch)) nearest = d;
    const int more = (B + batch / 2) / batch * batch;
    snprintf(hint, sizeof hint, "give --loop-batch %d, or --microbatches %d", nearest, more > 0 ? more : batch);
    return hapt_fail(HAPT_ERR_USAGE, hint, "%d microbatches cannot be divided into groups of %d", B, batch);
}

enum hapt_status search_check_loops(const struct hapt_search_options *options)
{
    const struct hapt_search_loops *loops = &options->loops;
    HAPT_ASSERT(hapt_schedule_loops(options->schedule));
    return loops->loop_batch > 0 ? check_batch(options, loops->loop_batch) : HAPT_OK;
}

/* ---- Rows ---- */

static bool is_known(const struct rows *rows, const struct row *row)
{
    for (int k = 0; k < rows->count; k++)
        if (rows->row[k].slots == row->slots &&
            memcmp(rows->row[k].slot, row->slot, (size_t)row->slots * sizeof *row->slot) == 0)
            return true;
    return false;
}

static enum hapt_status add_row(struct rows *rows, const struct loops_slot *slot, int slots)
{
    struct row row = {slots, NULL};
    if (slots > rows->search->most_slots || rows->count == MOST_ROWS) return HAPT_OK;
    HAPT_NEW(row.slot, &rows->search->arena, slots);
    memcpy(row.slot, slot, (size_t)slots * sizeof *slot);
    if (!is_known(rows, &row)) rows->row[rows->count++] = row;
    return HAPT_OK;
}

/* A submesh of n x m devices with the program that is fastest for an equal share of the layers; -1: none. */
static int find_submesh(const struct loops_search *search, int c, int n, int m, int shares)
{
    const struct hapt_profile_cluster *cluster = &search->profile->cluster[c];
    const int last = search->L / shares > 1 ? search->L / shares - 1 : 0;
    double least_s = INFINITY;
    int found = -1;
    for (int s = 0; s < cluster->submesh_count; s++) {
        const double time_s = cluster->stage_time[hapt_profile_index(search->profile, s, 0, last)];
        if (cluster->submesh[s].n != n || cluster->submesh[s].m != m) continue;
        if (found >= 0 && !(time_s < least_s)) continue;
        found = s;
        least_s = isfinite(time_s) ? time_s : INFINITY;
    }
    return found;
}

/* Half of a slot's devices; -1: it has an odd number, or the profile has no such submesh. */
static int half_of(const struct loops_search *search, const struct loops_slot *slot, int shares)
{
    const struct hapt_submesh *whole = &search->profile->cluster[slot->cluster].submesh[slot->submesh];
    if (whole->n % 2 == 0) return find_submesh(search, slot->cluster, whole->n / 2, whole->m, shares);
    return whole->n == 1 && whole->m % 2 == 0 ? find_submesh(search, slot->cluster, 1, whole->m / 2, shares) : -1;
}

/* A submesh with the devices of two; -1: none. */
static int joined(const struct loops_search *search, const struct loops_slot *a, const struct loops_slot *b, int shares)
{
    const struct hapt_submesh *x = &search->profile->cluster[a->cluster].submesh[a->submesh];
    const struct hapt_submesh *y = &search->profile->cluster[b->cluster].submesh[b->submesh];
    if (a->cluster != b->cluster) return -1;
    if (x->n == 1 && y->n == 1) {
        const int found = find_submesh(search, a->cluster, 1, x->m + y->m, shares);
        if (found >= 0) return found;
    }
    return x->m == y->m ? find_submesh(search, a->cluster, x->n + y->n, x->m, shares) : -1;
}

/* Adds the row with slot `at` split; at -1: all that can be. *changed: there is one. */
static enum hapt_status add_split(struct rows *rows, const struct row *row, int at, bool *changed)
{
    struct loops_slot *slot;
    int count = 0;
    *changed = false;
    HAPT_NEW(slot, &rows->search->arena, 2 * row->slots);
    for (int k = 0; k < row->slots; k++) {
        const int half = at < 0 || at == k ? half_of(rows->search, &row->slot[k], 2 * row->slots) : -1;
        const struct loops_slot part = half < 0 ? row->slot[k] : (struct loops_slot){row->slot[k].cluster, half};
        slot[count++] = part;
        if (half >= 0) slot[count++] = part;
        *changed = *changed || half >= 0;
    }
    return *changed ? add_row(rows, slot, count) : HAPT_OK;
}

static enum hapt_status add_join(struct rows *rows, const struct row *row, int at)
{
    struct loops_slot *slot;
    int count = 0;
    const int both = joined(rows->search, &row->slot[at], &row->slot[at + 1], row->slots);
    if (both < 0) return HAPT_OK;
    HAPT_NEW(slot, &rows->search->arena, row->slots);
    for (int k = 0; k < row->slots; k++)
        if (k != at + 1) slot[count++] = k == at ? (struct loops_slot){row->slot[k].cluster, both} : row->slot[k];
    return add_row(rows, slot, count);
}

/* The devices of a subcluster that no slot takes. */
static int left_of(const struct loops_search *search, const struct loops_slot *slot, int slots, int c)
{
    const struct hapt_profile_cluster *cluster = &search->profile->cluster[c];
    int left = cluster->nodes * cluster->devices_per_node;
    for (int k = 0; k < slots; k++)
        if (slot[k].cluster == c) left -= cluster->submesh[slot[k].submesh].n * cluster->submesh[slot[k].submesh].m;
    return left;
}

/* Is the submesh the first of its size in the profile? Others differ in their programs. */
static bool is_own_size(const struct hapt_profile_cluster *cluster, int s)
{
    for (int other = 0; other < s; other++)
        if (cluster->submesh[other].n == cluster->submesh[s].n && cluster->submesh[other].m == cluster->submesh[s].m)
            return false;
    return true;
}

/* Adds the rows with slot `at` on a submesh of another size. */
static enum hapt_status add_sizes(struct rows *rows, const struct row *row, int at)
{
    const struct loops_search *search = rows->search;
    const int c = row->slot[at].cluster;
    const struct hapt_profile_cluster *cluster = &search->profile->cluster[c];
    const struct hapt_submesh *own = &cluster->submesh[row->slot[at].submesh];
    const int devices = own->n * own->m + left_of(search, row->slot, row->slots, c);
    struct loops_slot *slot;
    HAPT_NEW(slot, &rows->search->arena, row->slots);
    memcpy(slot, row->slot, (size_t)row->slots * sizeof *slot);
    for (int s = 0; s < cluster->submesh_count; s++) {
        const struct hapt_submesh *other = &cluster->submesh[s];
        if (!is_own_size(cluster, s) || other->n * other->m > devices) continue;
        slot[at].submesh = find_submesh(search, c, other->n, other->m, row->slots);
        HAPT_TRY(add_row(rows, slot, row->slots));
    }
    return HAPT_OK;
}

/* Rows with a submesh more or less, with a larger or smaller one, or in reverse order. */
static enum hapt_status add_neighbours(struct rows *rows, const struct row *row)
{
    bool changed;
    struct loops_slot *slot;
    for (int k = 0; k < row->slots; k++) HAPT_TRY(add_split(rows, row, k, &changed));
    for (int k = 0; k + 1 < row->slots; k++) HAPT_TRY(add_join(rows, row, k));
    for (int k = 0; k < row->slots; k++) HAPT_TRY(add_sizes(rows, row, k));
    HAPT_NEW(slot, &rows->search->arena, row->slots);
    for (int k = 0; k < row->slots; k++) slot[k] = row->slot[row->slots - 1 - k];
    return add_row(rows, slot, row->slots);
}

/* Adds all rows that start with these slots, in which the submeshes of a subcluster are neighbours. Stops at FEW_ROWS.
 */
static enum hapt_status extend(struct rows *rows, struct loops_slot *slot, int slots)
{
    const struct loops_search *search = rows->search;
    if (slots > 0) HAPT_TRY(add_row(rows, slot, slots));
    for (int c = 0; c < search->profile->cluster_count && slots < search->most_slots && rows->count < FEW_ROWS; c++) {
        const struct hapt_profile_cluster *cluster = &search->profile->cluster[c];
        bool used = false;
        for (int k = 0; k + 1 < slots; k++) used = used || slot[k].cluster == c;
        if (used && slot[slots - 1].cluster != c) continue;
        const int left = left_of(search, slot, slots, c);
        for (int s = 0; s < cluster->submesh_count; s++) {
            const struct hapt_submesh *own = &cluster->submesh[s];
            if (!is_own_size(cluster, s) || own->n * own->m > left) continue;
            slot[slots] = (struct loops_slot){c, find_submesh(search, c, own->n, own->m, 2 * (slots + 1))};
            HAPT_TRY(extend(rows, slot, slots + 1));
        }
    }
    return HAPT_OK;
}

/* All rows, if there are few. */
static enum hapt_status enumerate(struct rows *rows)
{
    const int before = rows->count;
    struct loops_slot *slot;
    HAPT_NEW(slot, &rows->search->arena, rows->search->most_slots + 1);
    HAPT_TRY(extend(rows, slot, 0));
    if (rows->count >= FEW_ROWS) rows->count = before;
    return HAPT_OK;
}

/* The row, and those with all submeshes split again and again. */
static enum hapt_status add_halves(struct rows *rows, const struct loops_slot *slot, int slots)
{
    const int before = rows->count;
    bool changed = true;
    HAPT_TRY(add_row(rows, slot, slots));
    for (int at = before; changed && at < rows->count; at++) {
        const struct row row = rows->row[at];
        HAPT_TRY(add_split(rows, &row, -1, &changed));
    }
    return HAPT_OK;
}

static enum hapt_status add_plan(struct rows *rows, const struct hapt_plan *plan)
{
    struct loops_slot *slot;
    HAPT_NEW(slot, &rows->search->arena, plan->stage_count);
    for (int i = 0; i < plan->stage_count; i++) {
        const struct hapt_plan_stage *stage = &plan->stage[i];
        const int c = stage->submesh->subcluster[0];
        const struct hapt_profile_cluster *cluster = &rows->search->profile->cluster[c];
        int s = 0;
        while (s < cluster->submesh_count && (cluster->submesh[s].n != stage->submesh->nodes ||
                                              cluster->submesh[s].m != stage->submesh->devices_per_node ||
                                              cluster->submesh[s].tp != stage->layout.tensor_parallel ||
                                              cluster->submesh[s].program != stage->layout.number))
            s++;
        HAPT_ASSERT(s < cluster->submesh_count);
        slot[i] = (struct loops_slot){c, s};
    }
    return add_halves(rows, slot, plan->stage_count);
}

/* Rows of the plans without loops: of the least simulated step and of the formula's optimum. Collective. */
static enum hapt_status find_rows(struct rows *rows)
{
    const struct loops_search *search = rows->search;
    struct hapt_search_options rule = *search->options;
    struct hapt_plan *plan;
    struct hapt_arena scratch;
    rule.schedule = HAPT_SCHEDULE_H1F1B;
    rule.any_schedule = rule.any_threshold = true;
    if (rule.work <= 0) rule.work = ROW_WORK;
    hapt_arena_init(&scratch);
    enum hapt_status status = hapt_plan_search_step(search->comm, search->profile, &rule, &scratch, &plan);
    if (status == HAPT_OK) status = hapt_env_agree(search->comm, add_plan(rows, plan));
    if (status == HAPT_OK) status = hapt_plan_search_formula(search->comm, search->profile, &rule, &scratch, &plan);
    if (status == HAPT_OK) status = hapt_env_agree(search->comm, add_plan(rows, plan));
    hapt_arena_release(&scratch);
    return status;
}

/* ---- Pricing ---- */

/* Cuts a row under a setting into stages of equal time, and prices it. */
static enum hapt_status price_even(struct rows *rows, const struct row *row, const struct setting *setting,
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
    struct setting setting;
};

struct items {
    int count;
    struct item *item;
    double *step_s; /* INFINITY: not priced, or no plan */
    bool *taken, *group_taken;
};

/* Settings of a row that are priced first: the smallest groups, with little prefetch and with most. */
static bool is_first(const struct setting *setting, int count, int k)
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
    struct setting setting[MOST_SETTINGS];
    HAPT_NEW(items->item, scratch, (rows->count - rows->done) * 3 * MOST_SETTINGS + 1);
    HAPT_NEW(items->group_taken, scratch, (rows->count - rows->done) * 3 + 1);
    bool several = false;
    int groups = 0;
    for (int r = 0; r < rows->count; r++) several = several || rows->row[r].slots > 1;
    for (int r = rows->done; r < rows->count; r++)
        for (int loops = asked > 0 ? asked : 2; loops <= (asked > 0 ? asked : 4); loops++) {
            const int D = rows->row[r].slots, settings = list_settings(search->options, D, loops, loops, setting);
            if (D == 1 && several) continue; /* loops around one submesh are none */
            if (D * loops > search->L) {
                if (search->obstacle < LOOPS_NO_LAYERS) search->obstacle = LOOPS_NO_LAYERS;
                continue;
            }
            for (int k = 0; k < settings; k++)
                items->item[items->count++] = (struct item){r, groups, is_first(setting, settings, k), setting[k]};
            groups++;
        }
    rows->done = rows->count;
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
        status = price_even(rows, &rows->row[item->row], &item->setting, &rows->trial);
        items->step_s[order[k]] = rows->trial.step_s;
    }
    HAPT_TRY(hapt_env_agree(search->comm, status));
    if (search->size > 1)
        HAPT_MPI(MPI_Allreduce(MPI_IN_PLACE, items->step_s, items->count, MPI_DOUBLE, MPI_MIN, search->comm));
    for (int k = 0; k < count; k++) {
        const struct item *item = &items->item[order[k]], *before = k > 0 ? &items->item[order[k - 1]] : item;
        const int slots = rows->row[item->row].slots;
        const bool builds = k == 0 || slots != rows->row[before->row].slots ||
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
                        (items->item[k].setting.prefetch > 1) == much && rows->row[items->item[k].row].slots == slots)
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
        status = price_even(rows, &rows->row[items.item[best].row], &items.item[best].setting, &rows->kept[(*kept)++]);
    }
    return hapt_env_agree(rows->search->comm, status);
}

/* The best setting for given boundaries. Rank-local, the same on all ranks. *changed: it is another one. */
static enum hapt_status retune(struct rows *rows, struct loops_candidate *candidate, bool *changed)
{
    struct setting setting[MOST_SETTINGS];
    const int count =
        list_settings(rows->search->options, candidate->slots, candidate->loops, candidate->loops, setting);
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

/* Is an item beside the best ones of the rows worth refining? */
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
    HAPT_TRY(find_rows(rows));
    const int seeds = rows->count;
    enum hapt_status status = HAPT_OK;
    for (int r = 0; r < seeds && status == HAPT_OK; r++) {
        const struct row row = rows->row[r];
        status = add_neighbours(rows, &row);
    }
    if (status == HAPT_OK) status = enumerate(rows);
    HAPT_TRY(hapt_env_agree(search->comm, status));
    for (int round = 0; better && round < MOST_ROUNDS; round++) {
        HAPT_TRY(improve(rows, &better));
        if (!loops_is_plan(&rows->best)) return HAPT_OK;
        const struct row row = {rows->best.slots, rows->best.slot};
        HAPT_TRY(hapt_env_agree(search->comm, add_neighbours(rows, &row)));
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
    const int D = rows->row[0].slots;
    HAPT_TRY(check_batch(
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
    if (rows) rows->search = search;
    if (status == HAPT_OK) status = create(rows);
    HAPT_TRY(hapt_env_agree(search->comm, status));
    HAPT_TRY(run(rows));
    HAPT_TRY(hapt_search_agree(search->comm, search->options, make_plan(rows, result, made)));
    made->search.seconds = hapt_time_s() - start_s;
    HAPT_MPI(MPI_Bcast(&made->search.seconds, 1, MPI_DOUBLE, 0, search->comm));
    *plan = made;
    return HAPT_OK;
}

enum hapt_status hapt_plan_search_loops(MPI_Comm comm, const struct hapt_profile *profile,
                                        const struct hapt_search_options *options, struct hapt_arena *result,
                                        struct hapt_plan **plan)
{
    struct hapt_profile alone = *profile;
    struct loops_search search = {.comm = comm,
                                  .profile = &alone,
                                  .options = options,
                                  .L = profile->layer_count,
                                  .B = options->microbatches,
                                  .most_work = options->work > 0 ? options->work : MOST_WORK};
    alone.mixed_count = 0; /* stages of several subclusters are not looped */
    HAPT_TRY(hapt_env_agree(comm, search_check_options(options)));
    HAPT_TRY(hapt_env_agree(comm, search_check_loops(options)));
    HAPT_MPI(MPI_Comm_rank(comm, &search.rank));
    HAPT_MPI(MPI_Comm_size(comm, &search.size));
    for (int c = 0; c < profile->cluster_count; c++)
        search.most_slots += profile->cluster[c].nodes * profile->cluster[c].devices_per_node;
    if (search.most_slots > search.L) search.most_slots = search.L;
    search.most_stages = search.L; /* longer rows have no stages for all submeshes */
    hapt_arena_init(&search.arena);
    hapt_arena_init(&search.trial);
    hapt_arena_init(&search.frame_arena);
    hapt_arena_init(&search.lists_arena);
    const enum hapt_status status = run_all(&search, result, plan);
    hapt_simulate_work_release(&search.simulation);
    hapt_arena_release(&search.lists_arena);
    hapt_arena_release(&search.frame_arena);
    hapt_arena_release(&search.trial);
    hapt_arena_release(&search.arena);
    return status;
}

/* ---- Given stages ---- */

/* Programs that --stages leaves open: the stages of a submesh take that of its first one. */
static enum hapt_status choose_programs(const struct hapt_profile *profile, struct hapt_plan *plan)
{
    HAPT_TRY(hapt_plan_price_tables(profile, plan));
    for (int i = plan->stage_count - 1; i >= 0; i--) {
        int first = 0;
        while (plan->stage[first].submesh != plan->stage[i].submesh) first++;
        plan->stage[i].layout = plan->stage[first].layout;
    }
    return HAPT_OK;
}

static enum hapt_status price_setting(const struct hapt_profile *profile, const struct setting *setting,
                                      struct hapt_plan *plan)
{
    plan->loop_batch = setting->loop_batch;
    plan->prefetch = setting->prefetch;
    plan->transfer_slots = 0;
    HAPT_TRY(hapt_plan_choose_transfer_slots(plan));
    return hapt_plan_price_launches(profile, plan);
}

enum hapt_status search_price_loops(const struct hapt_profile *profile, const struct hapt_search_options *options,
                                    struct hapt_plan *plan)
{
    const int loops = options->loops.loops > 0 ? options->loops.loops : 2;
    struct setting setting[MOST_SETTINGS];
    HAPT_TRY(search_check_loops(options));
    if (hapt_plan_first_mixed(plan) >= 0)
        return hapt_fail(HAPT_ERR_INPUT, "choose a schedule that is not looped",
                         "stage %d is mixed and cannot be looped", hapt_plan_first_mixed(plan));
    if (plan->stage_count % loops != 0)
        return hapt_fail(HAPT_ERR_USAGE, "name each submesh once per loop, in the order of the layers",
                         "--stages names %d stages, which are no %d loops", plan->stage_count, loops);
    HAPT_TRY(hapt_plan_fold(plan, plan->stage_count / loops, options->loops.v));
    const int settings = list_settings(options, plan->submesh_count, loops, loops, setting);
    if (settings == 0)
        return check_batch(options, hapt_schedule_loop_batch(options->schedule, options->microbatches,
                                                             plan->submesh_count, options->loops.loop_batch));
    HAPT_TRY(choose_programs(profile, plan));
    int best = 0;
    double least_s = INFINITY;
    for (int k = 0; k < settings; k++) {
        const enum hapt_status status = price_setting(profile, &setting[k], plan);
        if (status == HAPT_OK && plan->simulated_s < least_s) {
            least_s = plan->simulated_s;
            best = k;
        }
        if (status == HAPT_ERR_INFEASIBLE || status == HAPT_ERR_USAGE)
            hapt_fail_reset();
        else
            HAPT_TRY(status);
    }
    return price_setting(profile, &setting[best], plan);
}
