/* Boundaries of chunks by a beam under the simulator. In: lists, costs of ranges. Out: ends, simulated step
 * (Pfeife 3.4, Algorithm 1). */
#include "hapt/chunk_cuts.h"

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* WIDTH: twice that of the paper's code finds the optimum in 99.9 instead of 98.8 % of small cases. SHORT: layers a
 * chunk. */
enum { WIDTH = 16, REACH = 10, LONGEST_RUN = 5, RUN_REACH = 2, SHORT = 4 };

/* Boundaries and their price. While memory is exceeded, step_s is infinite and `excess` decides. */
struct entry {
    int *end; /* [chunks] */
    double step_s;
    double excess; /* of the fullest submesh: needed / available memory - 1; 0: all fit */
    bool expanded; /* its moves were tried already */
};

struct beam {
    const struct hapt_chunk_cuts *problem;
    int chunks, submeshes, width, reach;
    struct hapt_chunk_costs *chunk; /* [chunks] of the boundaries that are priced */
    double *cost_s;                 /* [5][chunks] for the simulator */
    double *busy_s, *bytes, *slot;  /* [submeshes] */
    struct hapt_simulate_work work;
    int count;
    struct entry *entry; /* [width] the best first */
    struct entry trial;
    struct hapt_chunk_cuts_found *found;
    /* Boundaries that were priced: a hash table with open addresses. A move often leads to boundaries of another entry.
     */
    uint64_t *seen; /* [seen_room] 0: empty */
    size_t seen_room, seen_count;
};

static int nearest(double value)
{
    return (int)floor(value + 0.5);
}

/* True if each chunk has a layer. */
static bool are_ends(const int *end, int chunks)
{
    for (int c = 0, first = 0; c < chunks; first = end[c++])
        if (end[c] <= first) return false;
    return true;
}

bool hapt_chunk_cuts_move(const int *from, int chunks, int layers, int at, int by, bool in_proportion, int *to)
{
    const int old = from[at], now = old + by;
    if (at >= chunks - 1 || now < 1 || now >= layers) return false;
    for (int c = 0; c < chunks; c++) {
        to[c] = from[c];
        if (in_proportion && c < at) to[c] = nearest((double)from[c] * now / old);
        if (in_proportion && c > at && c < chunks - 1)
            to[c] = now + nearest((double)(from[c] - old) * (layers - now) / (layers - old));
    }
    to[at] = now;
    return are_ends(to, chunks);
}

static double range_s(const struct hapt_chunk_cuts *problem, int chunk, int first, int end)
{
    struct hapt_chunk_costs costs = {0};
    problem->chunk(problem->context, chunk, first, end, &costs);
    return costs.forward_s + costs.backward_s + costs.weight_s;
}

enum hapt_status hapt_chunk_cuts_even(const struct hapt_chunk_cuts *problem, struct hapt_arena *scratch, int *end)
{
    const int N = problem->schedule->chunk_count, L = problem->layer_count, row = L + 1;
    double *least_s; /* [N + 1][row] longest of the first c chunks with l layers */
    int *before;     /* [N + 1][row] where the last of them begins */
    HAPT_ASSERT(L >= N);
    HAPT_NEW(least_s, scratch, (size_t)(N + 1) * (size_t)row);
    HAPT_NEW(before, scratch, (size_t)(N + 1) * (size_t)row);
    for (int l = 1; l <= L; l++) least_s[l] = INFINITY;
    for (int c = 1; c <= N; c++) {
        const double *prior_s = least_s + (c - 1) * row;
        double *own_s = least_s + c * row;
        for (int l = 0; l <= L; l++) {
            own_s[l] = INFINITY;
            before[c * row + l] = l - 1;
            if (l < c || l > L - (N - c)) continue;
            for (int first = l - 1; first >= c - 1; first--) {
                const double last_s = range_s(problem, c - 1, first, l), longest_s = fmax(prior_s[first], last_s);
                if (longest_s < own_s[l]) before[c * row + l] = first;
                own_s[l] = fmin(own_s[l], longest_s);
                if (isfinite(last_s) && last_s >= own_s[l]) break; /* more layers take longer */
            }
        }
    }
    for (int c = N, l = L; c > 0; l = before[c-- * row + l]) end[c - 1] = l;
    return HAPT_OK;
}

/* ---- Pricing ---- */

static enum hapt_status create(struct beam *beam, const struct hapt_chunk_cuts *problem,
                               struct hapt_chunk_cuts_found *found, struct hapt_arena *arena)
{
    const int chunks = problem->schedule->chunk_count, submeshes = problem->schedule->submesh_count;
    *beam = (struct beam){.problem = problem,
                          .chunks = chunks,
                          .submeshes = submeshes,
                          .width = problem->width > 0 ? problem->width : WIDTH,
                          .reach = problem->reach > 0 ? problem->reach : REACH,
                          .found = found};
    HAPT_NEW(beam->chunk, arena, chunks);
    HAPT_NEW(beam->cost_s, arena, 5 * (size_t)chunks);
    HAPT_NEW(beam->busy_s, arena, submeshes);
    HAPT_NEW(beam->bytes, arena, submeshes);
    HAPT_NEW(beam->slot, arena, submeshes);
    HAPT_NEW(beam->entry, arena, beam->width);
    for (int e = 0; e < beam->width; e++) HAPT_NEW(beam->entry[e].end, arena, chunks);
    HAPT_NEW(beam->trial.end, arena, chunks);
    return HAPT_OK;
}

/* The costs of the trial's chunks; false: a chunk cannot hold its layers. */
static bool read_chunks(struct beam *beam)
{
    bool possible = true;
    for (int c = 0, first = 0; c < beam->chunks; first = beam->trial.end[c++]) {
        struct hapt_chunk_costs *chunk = &beam->chunk[c];
        *chunk = (struct hapt_chunk_costs){0};
        beam->problem->chunk(beam->problem->context, c, first, beam->trial.end[c], chunk);
        if (c == beam->chunks - 1) chunk->comm_s = 0;
        possible &= isfinite(chunk->forward_s + chunk->backward_s + chunk->weight_s + chunk->comm_s);
        double *const cost_s[] = {&beam->cost_s[c], &beam->cost_s[beam->chunks + c],
                                  &beam->cost_s[2 * beam->chunks + c], &beam->cost_s[3 * beam->chunks + c],
                                  &beam->cost_s[4 * beam->chunks + c]};
        *cost_s[0] = chunk->forward_s;
        *cost_s[1] = chunk->backward_s;
        *cost_s[2] = chunk->weight_s;
        *cost_s[3] = chunk->comm_s;
        *cost_s[4] = chunk->step_s;
    }
    return possible;
}

static double excess(struct beam *beam)
{
    const struct hapt_schedule *schedule = beam->problem->schedule;
    double most = 0;
    if (!beam->problem->memory_bytes) return 0;
    for (int s = 0; s < beam->submeshes; s++) beam->bytes[s] = beam->slot[s] = 0;
    for (int c = 0; c < beam->chunks; c++) {
        const int s = schedule->submesh_of[c];
        beam->bytes[s] += beam->chunk[c].parameter_bytes;
        beam->slot[s] = fmax(beam->slot[s], beam->chunk[c].activation_bytes);
    }
    for (int s = 0; s < beam->submeshes; s++) {
        const double need = beam->bytes[s] + schedule->list[s].slots * beam->slot[s];
        const double room = beam->problem->memory_bytes[s];
        if (!hapt_at_most(need, room)) most = fmax(most, room > 0 ? need / room - 1 : INFINITY);
    }
    return most;
}

/* A lower bound of the step: a submesh computes between the first arrival at its first chunk and the last gradient that
 * leaves it. */
static double lower_s(struct beam *beam)
{
    const struct hapt_schedule *schedule = beam->problem->schedule;
    double least_s = 0, before_s = 0;
    for (int s = 0; s < beam->submeshes; s++) beam->busy_s[s] = 0;
    for (int c = 0; c < beam->chunks; c++) {
        const struct hapt_chunk_costs *chunk = &beam->chunk[c];
        beam->busy_s[schedule->submesh_of[c]] +=
            chunk->forward_s + (schedule->forward_only[c] ? 0 : chunk->backward_s + chunk->weight_s);
    }
    for (int c = 0, seen = 0; c < beam->chunks; c++) {
        const struct hapt_chunk_costs *chunk = &beam->chunk[c];
        const bool crosses = hapt_schedule_crosses(schedule, c);
        if (schedule->submesh_of[c] == seen) /* its first chunk; submeshes are numbered by them */
            least_s = fmax(least_s, before_s + schedule->microbatches * beam->busy_s[seen++]);
        before_s += chunk->forward_s + (crosses ? chunk->comm_s : 0);
        if (!schedule->forward_only[c] && !schedule->split)
            before_s += chunk->backward_s + (crosses ? chunk->comm_s : 0);
    }
    return least_s * (1 - 1e-12);
}

/* Prices the trial. Boundaries whose lower bound reaches `limit_s` are not simulated. */
static enum hapt_status price(struct beam *beam, double limit_s)
{
    const struct hapt_chunk_cuts *problem = beam->problem;
    const int N = beam->chunks;
    struct entry *trial = &beam->trial;
    trial->step_s = INFINITY;
    trial->excess = INFINITY;
    trial->expanded = false;
    beam->found->looked++;
    if (!read_chunks(beam)) return HAPT_OK;
    trial->excess = excess(beam);
    if (trial->excess > 0 || lower_s(beam) >= limit_s) return HAPT_OK;
    const struct hapt_costs costs = {.forward_s = beam->cost_s,
                                     .backward_s = beam->cost_s + N,
                                     .weight_s = beam->cost_s + 2 * N,
                                     .comm_s = beam->cost_s + 3 * N,
                                     .step_s = beam->cost_s + 4 * N,
                                     .exchange_s = problem->exchange_s,
                                     .blocking = problem->blocking,
                                     .transfer_slots = problem->transfer_slots};
    beam->found->simulated++;
    return hapt_simulate_step(problem->schedule, &costs, &beam->work, &trial->step_s);
}

enum hapt_status hapt_chunk_cuts_price(const struct hapt_chunk_cuts *problem, const int *end,
                                       struct hapt_simulate_work *work, double *step_s)
{
    struct hapt_chunk_cuts_found found = {0};
    struct hapt_arena scratch;
    struct beam beam;
    hapt_arena_init(&scratch);
    enum hapt_status status = create(&beam, problem, &found, &scratch);
    if (status == HAPT_OK) {
        beam.work = *work;
        memcpy(beam.trial.end, end, (size_t)beam.chunks * sizeof *end);
        status = price(&beam, INFINITY);
        *work = beam.work;
    }
    if (status == HAPT_OK) *step_s = beam.trial.step_s;
    hapt_arena_release(&scratch);
    return status;
}

/* ---- The beam ---- */

static bool is_better(const struct entry *a, const struct entry *b)
{
    return a->excess != b->excess ? a->excess < b->excess : a->step_s < b->step_s;
}

/* 64 bits of the boundaries (FNV-1a by layers); never 0. */
static uint64_t hash_of(const int *end, int chunks)
{
    uint64_t hash = 14695981039346656037u;
    for (int c = 0; c < chunks; c++) hash = (hash ^ (uint64_t)(unsigned)end[c]) * 1099511628211u;
    hash ^= hash >> 29; /* the low bits choose the place in the table */
    return hash ? hash : 1;
}

static uint64_t *find_seen(const struct beam *beam, uint64_t hash)
{
    size_t at = (size_t)hash & (beam->seen_room - 1);
    while (beam->seen[at] && beam->seen[at] != hash) at = (at + 1) & (beam->seen_room - 1);
    return &beam->seen[at];
}

static enum hapt_status grow_seen(struct beam *beam)
{
    enum { FIRST = 1 << 12 };
    struct beam wider = *beam;
    wider.seen_room = beam->seen_room > 0 ? 2 * beam->seen_room : FIRST;
    wider.seen = calloc(wider.seen_room, sizeof *wider.seen);
    if (!wider.seen)
        return hapt_fail(HAPT_ERR_MEMORY, "give the job more host memory", "host memory exhausted by the search");
    for (size_t k = 0; k < beam->seen_room; k++)
        if (beam->seen[k]) *find_seen(&wider, beam->seen[k]) = beam->seen[k];
    free(beam->seen);
    beam->seen = wider.seen;
    beam->seen_room = wider.seen_room;
    return HAPT_OK;
}

/* Notes the trial's boundaries; *is_new: they were not priced before. */
static enum hapt_status note_seen(struct beam *beam, bool *is_new)
{
    if (2 * beam->seen_count >= beam->seen_room) HAPT_TRY(grow_seen(beam));
    const uint64_t hash = hash_of(beam->trial.end, beam->chunks);
    uint64_t *at = find_seen(beam, hash);
    *is_new = !*at;
    *at = hash;
    beam->seen_count += *is_new;
    return HAPT_OK;
}

/* Puts the trial into the beam, if it is better than the slowest entry. */
static void insert(struct beam *beam)
{
    const struct entry trial = beam->trial;
    int at = beam->count;
    while (at > 0 && is_better(&trial, &beam->entry[at - 1])) at--;
    if (at == beam->width || trial.excess == INFINITY) return;
    const int last = beam->count < beam->width ? beam->count++ : beam->width - 1;
    int *const room = beam->entry[last].end;
    memmove(&beam->entry[at + 1], &beam->entry[at], (size_t)(last - at) * sizeof *beam->entry);
    beam->entry[at] = trial;
    beam->trial.end = room;
}

static enum hapt_status try_trial(struct beam *beam)
{
    bool is_new;
    HAPT_TRY(note_seen(beam, &is_new));
    if (!is_new) return HAPT_OK;
    const bool full = beam->count == beam->width;
    const struct entry *slowest = &beam->entry[beam->width - 1];
    HAPT_TRY(price(beam, full && slowest->excess == 0 ? slowest->step_s : INFINITY));
    if (isfinite(beam->trial.step_s) || beam->trial.excess > 0) insert(beam);
    return HAPT_OK;
}

static bool is_exhausted(const struct beam *beam)
{
    const int64_t most = beam->problem->most_simulations;
    return most > 0 && beam->found->simulated >= most;
}

/* Shifts runs of neighbouring boundaries together by a few layers: their chunks keep their sizes. The paper has no such
 * moves. They leave optima of the others in short chains, where a chunk holds few layers. */
static enum hapt_status expand_runs(struct beam *beam, const int *from)
{
    for (int first = 0; first < beam->chunks - 1; first++)
        for (int last = first + 1; last < beam->chunks - 1 && last < first + LONGEST_RUN; last++)
            for (int by = -RUN_REACH; by <= RUN_REACH; by++) {
                if (by == 0 || is_exhausted(beam)) continue;
                for (int c = 0; c < beam->chunks; c++)
                    beam->trial.end[c] = from[c] + (c >= first && c <= last ? by : 0);
                if (are_ends(beam->trial.end, beam->chunks)) HAPT_TRY(try_trial(beam));
            }
    return HAPT_OK;
}

/* Tries all moves of boundaries `from`. */
static enum hapt_status expand(struct beam *beam, const int *from)
{
    for (int at = 0; at < beam->chunks - 1; at++)
        for (int by = -beam->reach; by <= beam->reach; by++)
            for (int in_proportion = 0; in_proportion < 2 && by != 0; in_proportion++) {
                if (is_exhausted(beam)) return HAPT_OK;
                if (hapt_chunk_cuts_move(from, beam->chunks, beam->problem->layer_count, at, by, in_proportion,
                                         beam->trial.end))
                    HAPT_TRY(try_trial(beam));
            }
    return expand_runs(beam, from);
}

/* Expands the best entry that was not expanded yet. An expanded one would only give the same boundaries again. */
static enum hapt_status run(struct beam *beam, struct hapt_arena *scratch)
{
    const size_t bytes = (size_t)beam->chunks * sizeof(int);
    int *from;
    HAPT_NEW(from, scratch, beam->chunks);
    for (int e = 0; e < beam->count && !is_exhausted(beam);) {
        if (beam->entry[e].expanded) {
            e++;
            continue;
        }
        beam->entry[e].expanded = true;
        memcpy(from, beam->entry[e].end, bytes);
        HAPT_TRY(expand(beam, from));
        e = 0;
    }
    return HAPT_OK;
}

/* A second start, from equally many layers a chunk: in short chains there are optima far from chunks of equal time. */
static enum hapt_status start_again(struct beam *beam, struct hapt_arena *scratch)
{
    const int64_t N = beam->chunks, L = beam->problem->layer_count;
    if (is_exhausted(beam)) return HAPT_OK;
    if (beam->count > 1) beam->count = 1;
    for (int64_t c = 0; c < N; c++) beam->trial.end[c] = (int)((c + 1) * L / N);
    HAPT_TRY(try_trial(beam));
    return run(beam, scratch);
}

static enum hapt_status search(struct beam *beam, const int *start, struct hapt_arena *scratch,
                               struct hapt_arena *result)
{
    const size_t bytes = (size_t)beam->chunks * sizeof(int);
    struct hapt_chunk_cuts_found *found = beam->found;
    if (start)
        memcpy(beam->trial.end, start, bytes);
    else
        HAPT_TRY(hapt_chunk_cuts_even(beam->problem, scratch, beam->trial.end));
    HAPT_TRY(try_trial(beam));
    HAPT_TRY(run(beam, scratch));
    if (!start && beam->problem->layer_count < SHORT * beam->chunks) HAPT_TRY(start_again(beam, scratch));
    if (beam->count == 0)
        return hapt_fail(HAPT_ERR_INFEASIBLE, "use other submeshes, or fewer chunks",
                         "no boundaries of the %d chunks are possible near chunks of equal time", beam->chunks);
    if (beam->entry[0].excess > 0)
        return hapt_fail(HAPT_ERR_INFEASIBLE, "use more devices, fewer loops or a smaller loop batch",
                         "the %d chunks exceed the devices' memory by at least %.0f %%", beam->chunks,
                         fmax(1, 100 * beam->entry[0].excess));
    HAPT_NEW(found->end, result, beam->chunks);
    memcpy(found->end, beam->entry[0].end, bytes);
    found->step_s = beam->entry[0].step_s;
    return HAPT_OK;
}

enum hapt_status hapt_chunk_cuts_beam(const struct hapt_chunk_cuts *problem, const int *start,
                                      struct hapt_arena *result, struct hapt_chunk_cuts_found *found)
{
    struct hapt_chunk_cuts_found made = {0};
    struct hapt_arena scratch;
    struct beam beam = {0};
    if (problem->layer_count < problem->schedule->chunk_count)
        return hapt_fail(HAPT_ERR_INFEASIBLE, "use fewer loops or fewer submeshes, or finer layers",
                         "%d layers cannot fill %d chunks", problem->layer_count, problem->schedule->chunk_count);
    hapt_arena_init(&scratch);
    enum hapt_status status = create(&beam, problem, &made, &scratch);
    if (status == HAPT_OK) status = search(&beam, start, &scratch, result);
    free(beam.seen);
    hapt_simulate_work_release(&beam.work);
    hapt_arena_release(&scratch);
    if (status == HAPT_OK) *found = made;
    return status;
}
