/*
 * Refinement by a beam over stage boundaries, programs and launch counts (Pfeife 4.3).
 *
 * A move shifts one boundary by some layers. SINGLE moves it alone; PROPORTIONAL stretches the stages in front and
 * compresses those behind. PROGRAM gives a stage another program on as many devices. LAUNCHES adds or takes a launch.
 */
#include "beam.h"
#include "step.h"

#include <math.h>
#include <string.h>

#include "hapt/chunk_cuts.h"

/* Work to price a stage, where a simulated microbatch of a stage is 1. */
enum { PRICING = 12 };

/* Moves of stage `at`. `by`: layers; PROGRAM: the submesh; LAUNCHES: more launches of stages [first, at]. */
enum kind { SINGLE, PROPORTIONAL, PROGRAM, LAUNCHES };

struct refinement {
    struct step_search *search;
    int *from, *to; /* [most_stages] ends */
};

static enum hapt_status create(void *context, void **candidate)
{
    const struct refinement *refinement = context;
    struct step_candidate *made;
    HAPT_NEW(made, &refinement->search->arena, 1);
    *candidate = made;
    return step_candidate_create(refinement->search, made);
}

static void copy(void *to, const void *from)
{
    step_candidate_copy(to, from);
}

static double *step_of(void *candidate)
{
    return &((struct step_candidate *)candidate)->step_s;
}

static double lower_of(const void *candidate)
{
    return ((const struct step_candidate *)candidate)->lower_s;
}

static bool same(const void *first, const void *second)
{
    const struct step_candidate *a = first, *b = second;
    return step_same_stages(a, b) && memcmp(a->launches, b->launches, (size_t)a->count * sizeof *a->launches) == 0;
}

static struct beam_key key_of(const void *candidate)
{
    return step_key(candidate);
}

/* False: a count would leave [1, B] or rise along the pipeline. */
static bool change_launches(const struct beam_move *move, int B, struct step_candidate *to)
{
    to->schedule = HAPT_SCHEDULE_H1F1B; /* 1F1B and eager 1F1B differ from it in their counts alone */
    for (int i = move->first; i <= move->at; i++) {
        to->launches[i] += move->by;
        if (to->launches[i] < 1 || to->launches[i] > B) return false;
    }
    const int s = move->at, f = move->first;
    return (s + 1 == to->count || to->launches[s] >= to->launches[s + 1]) &&
           (f == 0 || to->launches[f - 1] >= to->launches[f]);
}

static bool move_boundary(const struct refinement *refinement, const struct beam_move *move, struct step_candidate *to)
{
    for (int i = 0; i < to->count; i++) refinement->from[i] = to->stage[i].end;
    if (!hapt_chunk_cuts_move(refinement->from, to->count, refinement->search->L, move->at, move->by,
                              move->kind == PROPORTIONAL, refinement->to))
        return false;
    for (int i = 0; i < to->count; i++) to->stage[i].end = refinement->to[i];
    return true;
}

/* False: a stage would be empty, or launch counts are impossible. */
static bool apply(struct beam *beam, const struct beam_move *move)
{
    const struct refinement *refinement = beam->context;
    struct step_candidate *to = beam->trial;
    if (move->kind == LAUNCHES) return change_launches(move, refinement->search->B, to);
    if (move->kind != PROGRAM) return move_boundary(refinement, move, to);
    to->stage[move->at].submesh = move->by;
    return true;
}

/* The programs that a stage may run on as many devices. */
static enum hapt_status add_programs(struct beam *beam, int entry, int stage)
{
    const struct step_search *search = ((struct refinement *)beam->context)->search;
    const struct step_stage *at = &((struct step_candidate *)beam->entry[entry])->stage[stage];
    if (at->device_set >= search->C) return HAPT_OK;
    const struct hapt_profile_cluster *cluster = &search->profile->cluster[at->device_set];
    const int devices = cluster->submesh[at->submesh].n * cluster->submesh[at->submesh].m;
    for (int s = 0; s < cluster->submesh_count; s++)
        if (s != at->submesh && cluster->submesh[s].n * cluster->submesh[s].m == devices)
            HAPT_TRY(beam_add_move(beam, (struct beam_move){.kind = PROGRAM, .entry = entry, .at = stage, .by = s}));
    return HAPT_OK;
}

/* One launch more or less: of the stage, or of all up to it. */
static enum hapt_status add_launches(struct beam *beam, int entry, int stage)
{
    for (int by = -1; by <= 1; by += 2)
        for (int first = 0; first <= stage; first += stage > 0 ? stage : 1)
            HAPT_TRY(beam_add_move(
                beam, (struct beam_move){.kind = LAUNCHES, .entry = entry, .at = stage, .by = by, .first = first}));
    return HAPT_OK;
}

static enum hapt_status list(struct beam *beam, int entry)
{
    const struct step_candidate *of = beam->entry[entry];
    const int reach = entry == 0 ? BEAM_REACH : BEAM_NEAR;
    for (int s = 0; s < of->count; s++) {
        HAPT_TRY(add_programs(beam, entry, s));
        if (step_launches_are_free(((struct refinement *)beam->context)->search, of))
            HAPT_TRY(add_launches(beam, entry, s));
        for (int k = -reach; k <= reach && s + 1 < of->count; k++)
            for (int kind = SINGLE; kind <= PROPORTIONAL && k != 0; kind++)
                HAPT_TRY(beam_add_move(beam, (struct beam_move){.kind = kind, .entry = entry, .at = s, .by = k}));
    }
    return HAPT_OK;
}

static enum hapt_status price(struct beam *beam, double limit_s, double most_s)
{
    return step_price(((struct refinement *)beam->context)->search, limit_s, most_s, beam->trial);
}

static double move_work(const struct beam *beam, const void *entry, bool simulated)
{
    const double stages = ((const struct step_candidate *)entry)->count;
    return PRICING * stages + (simulated ? ((struct refinement *)beam->context)->search->B * stages : 0);
}

/* Gives the best entry the launch counts of the rules, if they are better for its new boundaries. */
static enum hapt_status relaunch(struct beam *beam, bool *changed)
{
    copy(beam->trial, beam->entry[0]);
    HAPT_TRY(step_price_launches(((struct refinement *)beam->context)->search, INFINITY, beam->trial));
    if (!(*step_of(beam->trial) < *step_of(beam->entry[0]))) return HAPT_OK;
    copy(beam->entry[0], beam->trial);
    *changed = true;
    return HAPT_OK;
}

static const struct beam_rules rules = {.create = create,
                                        .copy = copy,
                                        .step_s = step_of,
                                        .lower_s = lower_of,
                                        .same = same,
                                        .key = key_of,
                                        .worth = 1.02,
                                        .list = list,
                                        .apply = apply,
                                        .price = price,
                                        .move_work = move_work,
                                        .settle = relaunch};

enum hapt_status step_refine(struct step_search *search, struct step_candidate *candidate)
{
    struct refinement refinement = {.search = search};
    refinement.from = hapt_arena_alloc(&search->arena, (size_t)search->most_stages, sizeof *refinement.from);
    refinement.to = hapt_arena_alloc(&search->arena, (size_t)search->most_stages, sizeof *refinement.to);
    HAPT_TRY(hapt_env_agree(search->comm, refinement.from && refinement.to ? HAPT_OK : HAPT_ERR_MEMORY));
    struct beam beam = {.rules = &rules,
                        .context = &refinement,
                        .comm = search->comm,
                        .rank = search->rank,
                        .size = search->size,
                        .work = &search->work,
                        .memo = &search->memo,
                        .most_work = search->most_work};
    return beam_run(&beam, candidate);
}
