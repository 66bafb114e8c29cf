/*
 * The beam over the boundaries of a looped plan and over the programs of its submeshes (Pfeife 4.3). A move shifts one
 * boundary by some layers: alone (SINGLE), or with the stages in front stretched and those behind compressed
 * (PROPORTIONAL). Behind the beam: the forwards before the first backward.
 */
#include "beam.h"
#include "loops.h"

#include <math.h>
#include <string.h>

#include "hapt/chunk_cuts.h"

/* Work to price a stage, where a simulated microbatch of a stage is 1. */
enum { PRICING = 12 };
/* The same for a move on average, if tensors skip stages: their messages, and so the lists, depend on the boundaries.
 */
enum { SKIP_BUILDING = LOOPS_BUILDING / 2 };

/* `at`: the stage in front of the boundary; PROGRAM: the slot, and `by` its submesh. */
enum kind { SINGLE, PROPORTIONAL, PROGRAM };

static int stages_of(const struct loops_candidate *candidate)
{
    return candidate->slots * candidate->loops;
}

static enum hapt_status create(void *context, void **candidate)
{
    struct loops_search *search = context;
    struct loops_candidate *made;
    HAPT_NEW(made, &search->arena, 1);
    *candidate = made;
    return loops_candidate_create(search, made);
}

static void copy(void *to, const void *from)
{
    loops_candidate_copy(to, from);
}

static double *step_of(void *candidate)
{
    return &((struct loops_candidate *)candidate)->step_s;
}

static double lower_of(const void *candidate)
{
    return ((const struct loops_candidate *)candidate)->lower_s;
}

static bool same(const void *first, const void *second)
{
    const struct loops_candidate *a = first, *b = second;
    return memcmp(a->end, b->end, (size_t)stages_of(a) * sizeof *a->end) == 0 &&
           memcmp(a->slot, b->slot, (size_t)a->slots * sizeof *a->slot) == 0;
}

static struct beam_key key_of(const void *candidate)
{
    const struct loops_candidate *of = candidate;
    struct beam_key key = {0};
    beam_key_add(&key, (uint64_t)of->slots << 32 | (uint64_t)of->loops);
    beam_key_add(&key, (uint64_t)(unsigned)of->loop_batch << 32 | (uint64_t)(unsigned)of->prefetch);
    for (int k = 0; k < of->slots; k++) {
        beam_key_add(&key, (uint64_t)of->slot[k].cluster << 32 | (uint64_t)of->slot[k].submesh);
        beam_key_add(&key, (uint64_t)of->ahead[k]);
    }
    for (int i = 0; i < stages_of(of); i++) beam_key_add(&key, (uint64_t)of->end[i]);
    return key;
}

/* False: a stage would be empty. */
static bool apply(struct beam *beam, const struct beam_move *move)
{
    const struct loops_search *search = beam->context;
    const struct loops_candidate *from = beam->entry[move->entry];
    struct loops_candidate *to = beam->trial;
    if (move->kind != PROGRAM)
        return hapt_chunk_cuts_move(from->end, stages_of(from), search->L, move->at, move->by,
                                    move->kind == PROPORTIONAL, to->end);
    to->slot[move->at].submesh = move->by;
    return true;
}

/* Other programs on the devices of a slot. */
static enum hapt_status add_programs(struct beam *beam, int entry)
{
    const struct loops_search *search = beam->context;
    const struct loops_candidate *from = beam->entry[entry];
    for (int k = 0; k < from->slots; k++) {
        const struct hapt_profile_cluster *cluster = &search->profile->cluster[from->slot[k].cluster];
        const struct hapt_submesh *own = &cluster->submesh[from->slot[k].submesh];
        for (int s = 0; s < cluster->submesh_count; s++)
            if (s != from->slot[k].submesh && cluster->submesh[s].n == own->n && cluster->submesh[s].m == own->m)
                HAPT_TRY(beam_add_move(beam, (struct beam_move){.kind = PROGRAM, .entry = entry, .at = k, .by = s}));
    }
    return HAPT_OK;
}

static enum hapt_status list(struct beam *beam, int entry)
{
    const int reach = entry == 0 ? BEAM_REACH : BEAM_NEAR;
    HAPT_TRY(add_programs(beam, entry));
    for (int s = 0; s + 1 < stages_of(beam->entry[entry]); s++)
        for (int by = -reach; by <= reach; by++)
            for (int kind = SINGLE; kind <= PROPORTIONAL && by != 0; kind++)
                HAPT_TRY(beam_add_move(beam, (struct beam_move){.kind = kind, .entry = entry, .at = s, .by = by}));
    return HAPT_OK;
}

static enum hapt_status price(struct beam *beam, double limit_s, double most_s)
{
    (void)most_s;
    return loops_price(beam->context, limit_s, beam->trial);
}

static double move_work(const struct beam *beam, const void *entry, bool simulated)
{
    const struct loops_search *search = beam->context;
    const double stages = stages_of(entry);
    const double each = search->B * stages * (search->profile->crossings ? SKIP_BUILDING : 1);
    return PRICING * stages + (simulated ? each : 0);
}

static const struct beam_rules rules = {.create = create,
                                        .copy = copy,
                                        .step_s = step_of,
                                        .lower_s = lower_of,
                                        .same = same,
                                        .key = key_of,
                                        .worth = INFINITY,
                                        .list = list,
                                        .apply = apply,
                                        .price = price,
                                        .move_work = move_work};

enum hapt_status loops_refine(struct loops_search *search, struct loops_candidate *candidate)
{
    struct beam beam = {.rules = &rules,
                        .context = search,
                        .comm = search->comm,
                        .rank = search->rank,
                        .size = search->size,
                        .work = &search->work,
                        .memo = &search->memo,
                        .most_work = search->most_work};
    return beam_run(&beam, candidate);
}

/* ---- Forwards before the first backward ---- */

/* Writes out what the schedule would choose, so that it can be changed. */
static void read_ahead(const struct loops_search *search, struct loops_candidate *candidate)
{
    for (int s = 0; s < candidate->slots; s++) {
        const struct hapt_instruction_list *list = &search->lists->list[s];
        candidate->ahead[s] = 0;
        for (int i = 0; list->instruction[i].kind != HAPT_INSTRUCTION_BACKWARD; i++)
            candidate->ahead[s] += list->instruction[i].kind == HAPT_INSTRUCTION_FORWARD;
    }
}

/* Changes the forwards of one submesh, or of all submeshes up to it, by one. *better: the step is shorter. */
static enum hapt_status try_ahead(struct loops_search *search, const struct loops_candidate *best, int first, int last,
                                  int by, struct loops_candidate *trial, bool *better)
{
    *better = false;
    loops_candidate_copy(trial, best);
    for (int s = first; s <= last; s++) {
        trial->ahead[s] += by;
        if (trial->ahead[s] < 1) return HAPT_OK;
    }
    HAPT_TRY(loops_price(search, best->step_s, trial));
    search->work += LOOPS_BUILDING * search->B * (double)(trial->slots * trial->loops);
    *better = trial->step_s < best->step_s * (1 - 1e-9);
    return HAPT_OK;
}

enum hapt_status loops_refine_ahead(struct loops_search *search, struct loops_candidate *candidate)
{
    struct loops_candidate best, trial;
    bool changed = true;
    HAPT_TRY(loops_candidate_create(search, &best));
    HAPT_TRY(loops_candidate_create(search, &trial));
    loops_candidate_copy(&best, candidate);
    HAPT_TRY(loops_price(search, INFINITY, &best));
    if (!loops_is_plan(&best)) return HAPT_OK;
    read_ahead(search, &best);
    while (changed && search->work < search->most_work) {
        changed = false;
        for (int s = 0; s < best.slots; s++)
            for (int k = 0; k < 4; k++) {
                bool better;
                HAPT_TRY(try_ahead(search, &best, k / 2 ? 0 : s, s, k % 2 ? -1 : 1, &trial, &better));
                if (better) loops_candidate_copy(&best, &trial);
                changed |= better;
            }
    }
    if (best.step_s < candidate->step_s * (1 - 1e-9)) loops_candidate_copy(candidate, &best);
    return HAPT_OK;
}
