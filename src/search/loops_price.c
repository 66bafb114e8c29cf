/* The simulated step of a looped plan with given boundaries. */
#include "loops.h"

#include <math.h>
#include <string.h>

enum hapt_status loops_candidate_create(struct loops_search *search, struct loops_candidate *candidate)
{
    *candidate = (struct loops_candidate){.step_s = INFINITY};
    HAPT_NEW(candidate->slot, &search->arena, search->most_slots);
    HAPT_NEW(candidate->ahead, &search->arena, search->most_slots);
    HAPT_NEW(candidate->end, &search->arena, search->most_stages);
    return HAPT_OK;
}

void loops_candidate_copy(struct loops_candidate *to, const struct loops_candidate *from)
{
    const struct loops_candidate kept = *to;
    *to = *from;
    to->slot = kept.slot;
    to->ahead = kept.ahead;
    to->end = kept.end;
    memcpy(to->slot, from->slot, (size_t)from->slots * sizeof *from->slot);
    memcpy(to->ahead, from->ahead, (size_t)from->slots * sizeof *from->ahead);
    memcpy(to->end, from->end, (size_t)(from->slots * from->loops) * sizeof *from->end);
}

/* ---- The plan ---- */

static enum hapt_status allot(const struct loops_search *search, const struct loops_candidate *candidate,
                              struct hapt_arena *arena, struct hapt_plan *plan)
{
    const int stages = candidate->slots * candidate->loops;
    *plan = hapt_search_plan(search->profile, search->options);
    plan->loop_batch = candidate->loop_batch;
    plan->prefetch = candidate->prefetch;
    HAPT_TRY(hapt_plan_allot(plan, stages, arena));
    for (int i = 0; i < stages; i++)
        plan->stage[i].submesh = &plan->submesh[hapt_plan_place(i, candidate->slots, search->options->loops.v)];
    plan->submesh_count = candidate->slots;
    return HAPT_OK;
}

static void fill(const struct loops_search *search, const struct loops_candidate *candidate, struct hapt_plan *plan)
{
    for (int i = 0; i < plan->stage_count; i++) {
        struct hapt_plan_stage *stage = &plan->stage[i];
        const struct loops_slot *slot = &candidate->slot[stage->submesh - plan->submesh];
        stage->first_layer = i > 0 ? candidate->end[i - 1] : 0;
        stage->end_layer = candidate->end[i];
        stage->submesh->ahead = candidate->ahead[stage->submesh - plan->submesh];
        hapt_plan_stage_run(search->profile, slot->cluster,
                            &search->profile->cluster[slot->cluster].submesh[slot->submesh], stage);
    }
}

enum hapt_status loops_plan(const struct loops_search *search, const struct loops_candidate *candidate,
                            struct hapt_arena *arena, struct hapt_plan *plan)
{
    HAPT_TRY(allot(search, candidate, arena, plan));
    fill(search, candidate, plan);
    plan->transfer_slots = candidate->transfer_slots;
    return HAPT_OK;
}

/* ---- Lists ---- */

static struct loops_setting setting_of(const struct loops_candidate *candidate)
{
    return (struct loops_setting){candidate->loops, candidate->loop_batch, candidate->prefetch};
}

static bool has_frame(const struct loops_search *search, const struct loops_candidate *candidate)
{
    const struct loops_candidate *key = &search->key;
    return key->slots == candidate->slots && key->loops == candidate->loops &&
           key->loop_batch == candidate->loop_batch && key->prefetch == candidate->prefetch &&
           memcmp(key->ahead, candidate->ahead, (size_t)key->slots * sizeof *key->ahead) == 0;
}

static enum hapt_status set_frame(struct loops_search *search, const struct loops_candidate *candidate)
{
    search->key.slots = 0;
    search->lists = NULL;
    hapt_arena_reset(&search->frame_arena);
    HAPT_NEW(search->frame, &search->frame_arena, 1);
    HAPT_TRY(allot(search, candidate, &search->frame_arena, search->frame));
    loops_candidate_copy(&search->key, candidate);
    const struct loops_setting setting = setting_of(candidate);
    search->key_hash = hapt_hash(hapt_hash(0, &setting, sizeof setting), candidate->ahead,
                                 (size_t)candidate->slots * sizeof *candidate->ahead);
    return HAPT_OK;
}

static uint64_t hash_lists(const struct loops_search *search)
{
    const struct hapt_plan *plan = search->frame;
    uint64_t hash = hapt_hash_word(search->key_hash, plan->exchange_s > 0);
    for (int e = 0; e < plan->edge_count; e++) {
        const struct hapt_schedule_edge *edge = &plan->edge[e].edge;
        hash = hapt_hash_word(
            hash, (int64_t)((((uint64_t)edge->from << 20 ^ (uint64_t)edge->to) << 20 ^ (uint64_t)edge->link) << 1 |
                            edge->backward));
    }
    return hapt_hash(hash, plan->relay, (size_t)plan->relay_count * sizeof *plan->relay);
}

/* True if the lists are those of the plan's stages. Boundaries decide which messages pass the next stage, and whether
 * tied parameters are exchanged; submeshes decide which messages share a link. */
static bool has_lists(const struct loops_search *search, const struct loops_lists *lists)
{
    const struct hapt_plan *plan = search->frame;
    const struct loops_setting setting = setting_of(&search->key);
    if (lists->slots != search->key.slots || memcmp(&lists->setting, &setting, sizeof setting) != 0 ||
        memcmp(lists->ahead, search->key.ahead, (size_t)lists->slots * sizeof *lists->ahead) != 0)
        return false;
    if (lists->tied != (plan->exchange_s > 0) || lists->edge_count != plan->edge_count ||
        lists->relay_count != plan->relay_count)
        return false;
    for (int e = 0; e < plan->edge_count; e++)
        if (hapt_schedule_compare_edges(&lists->edge[e], &plan->edge[e].edge) != 0 ||
            lists->edge[e].link != plan->edge[e].edge.link)
            return false;
    return plan->relay_count == 0 ||
           memcmp(lists->relay, plan->relay, (size_t)plan->relay_count * sizeof *plan->relay) == 0;
}

static enum hapt_status make_lists(struct loops_search *search, uint64_t hash, struct loops_lists *lists)
{
    struct hapt_plan *plan = search->frame;
    hapt_arena_reset(&lists->arena);
    plan->transfer_slots = 0;
    lists->hash = hash;
    lists->setting = setting_of(&search->key);
    lists->slots = search->key.slots;
    HAPT_NEW(lists->ahead, &lists->arena, lists->slots);
    memcpy(lists->ahead, search->key.ahead, (size_t)lists->slots * sizeof *lists->ahead);
    HAPT_NEW(lists->edge, &lists->arena, plan->edge_count);
    HAPT_NEW(lists->relay, &lists->arena, plan->relay_count);
    for (int e = 0; e < plan->edge_count; e++) lists->edge[e] = plan->edge[e].edge;
    for (int k = 0; k < plan->relay_count; k++) lists->relay[k] = plan->relay[k];
    lists->edge_count = plan->edge_count;
    lists->relay_count = plan->relay_count;
    lists->tied = plan->exchange_s > 0;
    HAPT_TRY(hapt_plan_find_lists(plan, &lists->arena, &lists->made));
    lists->transfer_slots = plan->transfer_slots;
    return HAPT_OK;
}

/* Finds the lists of the frame among the newest, or makes them. */
static enum hapt_status set_lists(struct loops_search *search)
{
    const uint64_t hash = hash_lists(search);
    int k = 0;
    while (k < search->list_count && (search->newest[k].hash != hash || !has_lists(search, &search->newest[k]))) k++;
    struct loops_lists *lists = &search->newest[k];
    search->lists = NULL;
    if (k == search->list_count) {
        lists = &search->newest[search->list_next];
        search->list_next = (search->list_next + 1) % search->most_lists;
        HAPT_TRY(make_lists(search, hash, lists));
        if (search->list_count < search->most_lists) search->list_count++;
    }
    search->lists = lists->made;
    search->frame->transfer_slots = lists->transfer_slots;
    return HAPT_OK;
}

/* ---- Pricing ---- */

static void meet(struct loops_search *search, enum loops_obstacle obstacle)
{
    if (obstacle > search->obstacle) search->obstacle = obstacle;
}

/* Sets launch counts and slots. Returns the largest share of its memory that a submesh lacks; 0: all fit. */
static double find_misfit(struct loops_search *search)
{
    struct hapt_plan *plan = search->frame;
    double missing_bytes = 0, share = 0;
    for (int i = 0; i < plan->stage_count; i++) {
        plan->stage[i].warmup = search->lists->launches[i];
        plan->stage[i].submesh->slots = search->lists->list[search->lists->submesh_of[i]].slots;
    }
    hapt_plan_tighten(plan);
    for (int s = 0; s < plan->submesh_count; s++) {
        double have_bytes;
        const double bytes = hapt_plan_submesh_bytes(plan, &plan->submesh[s], &have_bytes);
        if (hapt_at_most(bytes, have_bytes)) continue;
        missing_bytes = fmax(missing_bytes, bytes - have_bytes);
        share = fmax(share, bytes / have_bytes - 1);
    }
    if (missing_bytes == 0) return 0;
    if (search->obstacle < LOOPS_NO_MEMORY || missing_bytes < search->missing_bytes)
        search->missing_bytes = missing_bytes;
    meet(search, LOOPS_NO_MEMORY);
    return share;
}

enum hapt_status loops_price(struct loops_search *search, double limit_s, struct loops_candidate *candidate)
{
    struct hapt_costs costs;
    double compute_s;
    candidate->step_s = candidate->lower_s = INFINITY;
    if (!has_frame(search, candidate)) HAPT_TRY(set_frame(search, candidate));
    const int slots = search->frame->transfer_slots;
    hapt_arena_reset(&search->trial);
    search->frame->arena = &search->trial; /* of its edges */
    fill(search, candidate, search->frame);
    const enum hapt_status status = hapt_plan_price_tables(search->profile, search->frame);
    if (status == HAPT_ERR_INPUT) {
        hapt_fail_reset();
        meet(search, LOOPS_NO_RANGES);
        return HAPT_OK;
    }
    HAPT_TRY(status);
    search->frame->t_max_s = fmax(hapt_plan_looped_work_s(search->frame, &compute_s), 1e-300);
    const struct hapt_plan_stage *stage = search->frame->stage;
    const double tied_s = stage[0].tied_s + stage[search->frame->stage_count - 1].tied_s;
    if (isfinite(search->frame->t_max_s)) {
        candidate->lower_s = search->B * search->frame->t_max_s * (1 - 1e-9) - tied_s;
        if (candidate->lower_s >= limit_s) return HAPT_OK; /* before its lists, which take most of the time */
    }
    HAPT_TRY(set_lists(search));
    if (search->frame->transfer_slots != slots) HAPT_TRY(hapt_plan_price_tables(search->profile, search->frame));
    candidate->transfer_slots = search->frame->transfer_slots;
    if (!search->lists || !isfinite(search->frame->t_max_s)) return HAPT_OK;
    const double misfit = find_misfit(search);
    if (misfit > 0) {
        candidate->step_s = LOOPS_MISFIT * (1 + misfit);
        return HAPT_OK;
    }
    HAPT_TRY(hapt_plan_costs(search->frame, &search->trial, &costs));
    return hapt_simulate_step(search->lists, &costs, &search->simulation, &candidate->step_s);
}

/* ---- Boundaries of equal time ---- */

enum { MOST_CELLS = 4000000 }; /* of the exact boundaries: stages times layers squared */

/* Seconds of a stage over layers [first, end); INFINITY: no candidate, or too large for the memory: alone, or (`fits`)
 * if the other stages of its submesh were as large, with the slots of the newest lists. */
static double stage_s(const struct loops_search *search, const struct loops_candidate *candidate, bool fits, int stage,
                      int first, int end)
{
    const int at = hapt_plan_place(stage, candidate->slots, search->options->loops.v);
    const struct hapt_profile_cluster *cluster = &search->profile->cluster[candidate->slot[at].cluster];
    const size_t cell = hapt_profile_index(search->profile, candidate->slot[at].submesh, first, end - 1);
    const int stages = fits ? candidate->loops : 1, slots = fits ? search->lists->list[at].slots : 1;
    const double bytes = stages * cluster->parameter_bytes[cell] + slots * cluster->activation_bytes[cell];
    return isfinite(cluster->stage_time[cell]) && hapt_at_most(bytes, cluster->device_memory_bytes)
               ? cluster->stage_time[cell]
               : INFINITY;
}

/* Exact: the least slowest stage of each prefix of stages and layers. */
static enum hapt_status cut_exactly(struct loops_search *search, bool fits, struct loops_candidate *candidate,
                                    bool *found)
{
    const int stages = candidate->slots * candidate->loops, L = search->L, row = L + 1;
    double *least_s;
    int *from;
    hapt_arena_reset(&search->trial);
    HAPT_NEW(least_s, &search->trial, (stages + 1) * row);
    HAPT_NEW(from, &search->trial, (stages + 1) * row);
    for (int k = 0; k < (stages + 1) * row; k++) least_s[k] = INFINITY;
    least_s[0] = 0;
    for (int stage = 0; stage < stages; stage++)
        for (int first = stage; first < L; first++) {
            const double before_s = least_s[stage * row + first];
            for (int end = first + 1; end <= L - (stages - 1 - stage) && isfinite(before_s); end++) {
                double *const to = &least_s[(stage + 1) * row + end];
                const double time_s = fmax(before_s, stage_s(search, candidate, fits, stage, first, end));
                if (!(time_s < *to)) continue;
                *to = time_s;
                from[(stage + 1) * row + end] = first;
            }
        }
    *found = isfinite(least_s[stages * row + L]);
    for (int stage = stages, end = L; *found && stage > 0; end = from[stage-- * row + end])
        candidate->end[stage - 1] = end;
    return HAPT_OK;
}

/* Gives each stage as many layers as take at most `most_s`. False: layers are left. */
static bool pack(const struct loops_search *search, bool fits, double most_s, struct loops_candidate *candidate)
{
    const int stages = candidate->slots * candidate->loops;
    int first = 0;
    for (int i = 0; i < stages; i++) {
        int best = 0;
        for (int end = first + 1; end <= search->L - (stages - 1 - i); end++) {
            const double time_s = stage_s(search, candidate, fits, i, first, end);
            if (time_s <= most_s) best = end;
            if (isfinite(time_s) && time_s > most_s) break;
        }
        if (best == 0) return false;
        candidate->end[i] = first = best;
    }
    return first == search->L;
}

enum hapt_status loops_even_boundaries(struct loops_search *search, bool fits, struct loops_candidate *candidate,
                                       bool *found)
{
    double low_s = 0, high_s = 1e-9;
    if ((double)candidate->slots * candidate->loops * search->L * search->L <= MOST_CELLS)
        return cut_exactly(search, fits, candidate, found);
    *found = false;
    while (!pack(search, fits, high_s, candidate)) {
        high_s *= 2;
        if (high_s > 1e12) return HAPT_OK;
    }
    for (int k = 0; k < 50 && high_s - low_s > 1e-6 * high_s; k++) {
        const double middle_s = 0.5 * (low_s + high_s);
        *(pack(search, fits, middle_s, candidate) ? &high_s : &low_s) = middle_s;
    }
    *found = pack(search, fits, high_s, candidate);
    return HAPT_OK;
}
