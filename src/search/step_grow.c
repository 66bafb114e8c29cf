/*
 * Plans grown from the last layer on. Each boundary between layers keeps the partial plans with the shortest estimated
 * steps: HAPT (13), if the layers in front took the least. The time that each stage holds a microbatch is then known.
 * So these plans are other seeds than those of the formula, above all if memory is tight. They serve instances that
 * have too many plans for the enumeration.
 *
 * Every rank grows the same plans. The best few are priced and refined.
 */
#include "step_suffix.h"

#include <math.h>
#include <string.h>

enum {
    MOST_LAYERS = 64,
    WIDTH = 2000,
    MOST_ORDERS = 32,
    LEAST_PER_ORDER = 20,
    MOST_PER_ORDER = 200,
    TRIED = 200,
    REFINED = 8
};
/* Partial plans of an order of device sets, by the work of the refinement: about half a second in all. */
#define PER_ORDER 2e-5
/* Grown plans that are slower than the best by more than this factor are not refined. */
#define GROWN_WORTH 1.05

struct partial {
    struct step_suffix suffix;
    double estimate_s;
    uint64_t sets; /* the order of its device sets */
    int parent;    /* the partial plan without its first stage, in the level of that stage's end */
};

/* Those of an order of device sets in a level. worst_s: the largest estimate, if there are per_order of them. */
struct order {
    uint64_t sets;
    double worst_s;
};

/* Partial plans that begin at a layer. */
struct level {
    struct order full[MOST_ORDERS]; /* orders that have enough partial plans */
    int full_count;
    struct partial *partial; /* [WIDTH] */
    int order[WIDTH];        /* by ascending estimate */
    int count;
};

struct growing {
    struct step_search *search;
    struct step_suffixes suffixes;
    struct level *level; /* [L] */
    int per_order;       /* partial plans that a level keeps of an order of device sets */
    struct step_candidate trial;
    struct step_kept kept;
};

static bool dominates(const struct step_suffix *a, const struct step_suffix *b)
{
    return a->stage.device_set == b->stage.device_set && a->visited == b->visited &&
           memcmp(a->used, b->used, sizeof a->used) == 0 && a->sum_s <= b->sum_s && a->stage_s <= b->stage_s &&
           a->comm_s <= b->comm_s && a->pace_s <= b->pace_s;
}

/* Early answer for most: their order has enough better ones. */
static bool is_hopeless(const struct level *level, const struct partial *made)
{
    for (int k = 0; k < level->full_count; k++)
        if (level->full[k].sets == made->sets) return made->estimate_s >= level->full[k].worst_s;
    return false;
}

/* Remembers the worst plan of an order, if that has enough. */
static void note_worst(struct level *level, uint64_t sets, int per_order)
{
    int count = 0, k = 0;
    double worst_s = 0;
    for (int i = 0; i < level->count; i++) {
        const struct partial *partial = &level->partial[level->order[i]];
        if (partial->sets != sets) continue;
        worst_s = partial->estimate_s;
        count++;
    }
    if (count < per_order) return;
    while (k < level->full_count && level->full[k].sets != sets) k++;
    if (k == MOST_ORDERS) return;
    level->full[k] = (struct order){sets, worst_s};
    if (k == level->full_count) level->full_count++;
}

/* The place in the order that a plan may take: behind all, or that of the worst plan with the same order of device
 * sets. -1: none. */
static int place_for(const struct level *level, const struct partial *made, int per_order)
{
    int same = 0, worst = -1;
    for (int k = 0; k < level->count; k++) {
        const struct partial *other = &level->partial[level->order[k]];
        if (other->sets != made->sets) continue;
        if (dominates(&other->suffix, &made->suffix)) return -1;
        same++;
        worst = k;
    }
    if (same < per_order && level->count < WIDTH) return level->count;
    if (same == 0 || made->estimate_s >= level->partial[level->order[worst]].estimate_s) return -1;
    return worst;
}

/* Inserts a partial plan in the level of its layers, unless that has enough better ones. */
static void insert(struct growing *growing, const struct partial *made)
{
    struct level *level = &growing->level[made->suffix.first];
    if (is_hopeless(level, made)) return;
    int at = place_for(level, made, growing->per_order);
    if (at < 0) return;
    const int slot = at < level->count ? level->order[at] : level->count++;
    for (; at > 0 && made->estimate_s < level->partial[level->order[at - 1]].estimate_s; at--)
        level->order[at] = level->order[at - 1];
    level->order[at] = slot;
    level->partial[slot] = *made;
    note_worst(level, made->sets, growing->per_order);
}

static void grow(struct growing *growing, const struct step_suffix *suffix, uint64_t sets, int parent)
{
    const struct step_search *search = growing->search;
    for (int p = 0; p < step_device_sets(search); p++)
        for (int s = 0; s < step_submeshes_of(search, p); s++) {
            if (!step_suffix_allows(&growing->suffixes, suffix, p, s)) continue;
            for (int first = suffix->first - 1; first >= 0; first--) {
                struct partial made = {.parent = parent, .sets = sets};
                if (suffix->count == 0 || suffix->stage.device_set != p) made.sets = sets * 64 + (uint64_t)p + 1;
                const double least_s = step_suffix_extend(&growing->suffixes, suffix, p, s, first, &made.suffix);
                if (least_s >= search->best.step_s) continue;
                if (first == 0 && search->options.use_all_devices &&
                    !step_suffix_uses_all(&growing->suffixes, &made.suffix))
                    continue;
                made.estimate_s = step_suffix_estimate(&growing->suffixes, &made.suffix);
                insert(growing, &made);
            }
        }
}

static void grow_all(struct growing *growing)
{
    const struct step_search *search = growing->search;
    const struct step_suffix nothing = step_suffix_nothing(&growing->suffixes);
    grow(growing, &nothing, 0, -1);
    for (int first = search->L - 1; first > 0; first--)
        for (int k = 0; k < growing->level[first].count; k++) {
            const int slot = growing->level[first].order[k];
            const struct partial *partial = &growing->level[first].partial[slot];
            if (partial->suffix.count < search->most_stages) grow(growing, &partial->suffix, partial->sets, slot);
        }
}

/* The stages of a complete plan become growing->trial. */
static void read_stages(struct growing *growing, const struct partial *partial)
{
    struct step_candidate *trial = &growing->trial;
    trial->count = partial->suffix.count;
    for (int i = 0; i < trial->count; i++) {
        trial->stage[i] = partial->suffix.stage;
        if (i + 1 < trial->count) partial = &growing->level[trial->stage[i].end].partial[partial->parent];
    }
}

static enum hapt_status price_all(struct growing *growing)
{
    struct step_search *search = growing->search;
    const struct level *level = &growing->level[0];
    for (int k = 0; k < level->count && k < TRIED; k++) {
        read_stages(growing, &level->partial[level->order[k]]);
        HAPT_TRY(step_price_launches(search, GROWN_WORTH * search->best.step_s, &growing->trial));
        if (growing->trial.step_s <= STEP_NEARBY_WORTH * search->best.step_s)
            HAPT_TRY(step_price_nearby(search, &growing->trial));
        step_keep(&growing->kept, &growing->trial, k);
    }
    return HAPT_OK;
}

static enum hapt_status find(struct growing *growing)
{
    struct step_search *search = growing->search;
    growing->per_order = (int)fmin(MOST_PER_ORDER, fmax(LEAST_PER_ORDER, PER_ORDER * search->most_work));
    HAPT_TRY(step_suffixes_create(search, false, &growing->suffixes));
    HAPT_TRY(step_candidate_create(search, &growing->trial));
    HAPT_TRY(step_kept_create(search, REFINED, &growing->kept));
    HAPT_NEW(growing->level, &search->arena, search->L);
    for (int first = 0; first < search->L; first++) HAPT_NEW(growing->level[first].partial, &search->arena, WIDTH);
    grow_all(growing);
    return price_all(growing);
}

enum hapt_status step_grow(struct step_search *search)
{
    struct growing growing = {.search = search};
    if (search->L > MOST_LAYERS || search->options.no_enumeration) return HAPT_OK;
    HAPT_TRY(hapt_env_agree(search->comm, find(&growing)));
    const double worth_s = GROWN_WORTH * search->best.step_s;
    for (int k = 0; k < REFINED; k++)
        if (growing.kept.candidate[k].step_s <= worth_s)
            HAPT_TRY(step_improve_seed(search, &growing.kept.candidate[k]));
    return HAPT_OK;
}
