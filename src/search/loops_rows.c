/*
 * Rows of submeshes for looped plans: those of plans without loops, with all their submeshes split again and again, and
 * their neighbourhood: a submesh split, joined with the next, or of another size. All rows, if there are few.
 */
#include "loops.h"

#include <math.h>
#include <string.h>

/* Work of the search without loops, which only gives rows. */
#define ROW_WORK 1e7
enum { FEW_ROWS = 256 };

static bool is_known(const struct loops_rows *rows, const struct loops_row *row)
{
    for (int k = 0; k < rows->count; k++)
        if (rows->row[k].slots == row->slots &&
            memcmp(rows->row[k].slot, row->slot, (size_t)row->slots * sizeof *row->slot) == 0)
            return true;
    return false;
}

/* False: --use-all-devices forbids the row. */
static bool uses_enough(const struct loops_search *search, const struct loops_slot *slot, int slots)
{
    for (int c = 0; c < search->profile->cluster_count && search->options->use_all_devices; c++) {
        const struct hapt_profile_cluster *cluster = &search->profile->cluster[c];
        int idle = cluster->nodes * cluster->devices_per_node;
        for (int k = 0; k < slots; k++)
            if (slot[k].cluster == c) idle -= cluster->submesh[slot[k].submesh].n * cluster->submesh[slot[k].submesh].m;
        if (idle > 0) return false;
    }
    return true;
}

static enum hapt_status add_row(struct loops_rows *rows, const struct loops_slot *slot, int slots)
{
    struct loops_row row = {slots, NULL};
    if (slots > rows->search->most_slots || rows->count == LOOPS_MOST_ROWS) return HAPT_OK;
    if (!uses_enough(rows->search, slot, slots)) return HAPT_OK;
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
static enum hapt_status add_split(struct loops_rows *rows, const struct loops_row *row, int at, bool *changed)
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

static enum hapt_status add_join(struct loops_rows *rows, const struct loops_row *row, int at)
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
static enum hapt_status add_sizes(struct loops_rows *rows, const struct loops_row *row, int at)
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

enum hapt_status loops_add_neighbours(struct loops_rows *rows, const struct loops_row *row)
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
static enum hapt_status extend(struct loops_rows *rows, struct loops_slot *slot, int slots)
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
static enum hapt_status enumerate(struct loops_rows *rows)
{
    const int before = rows->count;
    struct loops_slot *slot;
    HAPT_NEW(slot, &rows->search->arena, rows->search->most_slots + 1);
    HAPT_TRY(extend(rows, slot, 0));
    if (rows->count >= FEW_ROWS) rows->count = before;
    return HAPT_OK;
}

/* The row, and those with all submeshes split again and again. */
static enum hapt_status add_halves(struct loops_rows *rows, const struct loops_slot *slot, int slots)
{
    const int before = rows->count;
    bool changed = true;
    HAPT_TRY(add_row(rows, slot, slots));
    for (int at = before; changed && at < rows->count; at++) {
        const struct loops_row row = rows->row[at];
        HAPT_TRY(add_split(rows, &row, -1, &changed));
    }
    return HAPT_OK;
}

static enum hapt_status add_plan(struct loops_rows *rows, const struct hapt_plan *plan)
{
    struct loops_slot *slot;
    HAPT_NEW(slot, &rows->search->arena, plan->stage_count);
    for (int i = 0; i < plan->stage_count; i++) {
        const struct hapt_plan_stage *stage = &plan->stage[i];
        const int c = stage->submesh->subcluster[0];
        const struct hapt_profile_cluster *cluster = &rows->search->profile->cluster[c];
        int s = 0;
        while (s < cluster->submesh_count && !hapt_plan_stage_runs(stage, &cluster->submesh[s])) s++;
        HAPT_ASSERT(s < cluster->submesh_count);
        slot[i] = (struct loops_slot){c, s};
    }
    return add_halves(rows, slot, plan->stage_count);
}

/* Rows of the plans without loops: of the least simulated step and of the formula's optimum. Collective. */
static enum hapt_status plan_without_loops(struct loops_rows *rows)
{
    const struct loops_search *search = rows->search;
    struct hapt_search_options rule = *search->options;
    struct hapt_plan *plan;
    struct hapt_arena scratch;
    rule.schedule = HAPT_SCHEDULE_H1F1B;
    rule.any_schedule = rule.any_threshold = true;
    if (rule.work <= 0) rule.work = ROW_WORK;
    hapt_arena_init(&scratch);
    enum hapt_status status = HAPT_OK;
    if (!search->unlooped) status = hapt_plan_search_step(search->comm, search->profile, &rule, &scratch, &plan);
    if (status == HAPT_OK)
        status = hapt_env_agree(search->comm, add_plan(rows, search->unlooped ? search->unlooped : plan));
    if (status == HAPT_OK) status = hapt_plan_search_formula(search->comm, search->profile, &rule, &scratch, &plan);
    if (status == HAPT_OK) status = hapt_env_agree(search->comm, add_plan(rows, plan));
    hapt_arena_release(&scratch);
    return status;
}

enum hapt_status loops_find_rows(struct loops_rows *rows)
{
    HAPT_TRY(plan_without_loops(rows));
    const int seeds = rows->count;
    enum hapt_status status = HAPT_OK;
    for (int r = 0; r < seeds && status == HAPT_OK; r++) {
        const struct loops_row row = rows->row[r];
        status = loops_add_neighbours(rows, &row);
    }
    if (status == HAPT_OK) status = enumerate(rows);
    return hapt_env_agree(rows->search->comm, status);
}
