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
    WIDTH = 4000,
    MOST_ORDERS = 256,
    LEAST_PER_ORDER = 20,
    MOST_PER_ORDER = 600,
    TRIED = 800,
    REFINED = 16
};
/* Partial plans of an order of device sets, by the work of the refinement: about a second in all. */
#define PER_ORDER 6e-5
/* Grown plans that are slower than the best by more than this factor are not refined. */
#define GROWN_WORTH 1.08

struct partial {
    struct step_suffix suffix;
    double estimate_s;
    uint64_t sets; /* the order of its device sets */
    int parent;    /* the partial plan without its first stage, in the level of that stage's end */
};

/* The partial plans of an order of device sets in a level. worst_s: the largest estimate, if there are per_order. */
struct order {
    uint64_t sets;
    int count;
    double worst_s;
};

/* Partial plans that begin at a layer. */
struct level {
    struct order order_of[MOST_ORDERS];
    int order_count;
    struct partial *partial; /* [WIDTH] */
    int by_estimate[WIDTH];
    int count;
};

struct growing {
    struct step_search *search;
    struct step_suffixes suffixes;
    struct level *level; /* [L] */
    int per_order;       /* partial plans that a level keeps of an order of device sets */
    struct step_candidate trial;
    struct step_kept kept, each; /* the best; the best one of each order */
};

static bool dominates(const struct step_suffix *a, const struct step_suffix *b)
{
    return a->stage.device_set == b->stage.device_set && a->visited == b->visited &&
           memcmp(a->used, b->used, sizeof a->used) == 0 && a->sum_s <= b->sum_s && a->stage_s <= b->stage_s &&
           a->comm_s <= b->comm_s && a->pace_s <= b->pace_s;
}

/* The level's record of an order; NULL: it has none, and no room for one. */
static struct order *find_order(struct level *level, uint64_t sets)
{
    for (int k = 0; k < level->order_count; k++)
        if (level->order_of[k].sets == sets) return &level->order_of[k];
    if (level->order_count == MOST_ORDERS) return NULL;
    level->order_of[level->order_count] = (struct order){.sets = sets, .worst_s = INFINITY};
    return &level->order_of[level->order_count++];
}

static bool is_dominated(const struct level *level, const struct partial *made)
{
    for (int k = 0; k < level->count; k++) {
        const struct partial *other = &level->partial[level->by_estimate[k]];
        if (other->estimate_s > made->estimate_s) return false;
        if (other->sets == made->sets && dominates(&other->suffix, &made->suffix)) return true;
    }
    return false;
}

/* The place of the worst plan with that order of device sets; -1: none. */
static int find_worst(const struct level *level, uint64_t sets)
{
    int k = level->count - 1;
    while (k >= 0 && level->partial[level->by_estimate[k]].sets != sets) k--;
    return k;
}

/* Inserts a partial plan in the level of its layers, unless its order of device sets has enough better ones. */
static void insert(struct growing *growing, const struct partial *made)
{
    struct level *level = &growing->level[made->suffix.first];
    struct order *order = find_order(level, made->sets);
    if (!order || made->estimate_s >= order->worst_s || is_dominated(level, made)) return;
    const bool grows = order->count < growing->per_order && level->count < WIDTH;
    int at = grows ? level->count : find_worst(level, made->sets);
    if (at < 0 || (!grows && made->estimate_s >= level->partial[level->by_estimate[at]].estimate_s)) return;
    const int slot = grows ? level->count++ : level->by_estimate[at];
    for (; at > 0 && made->estimate_s < level->partial[level->by_estimate[at - 1]].estimate_s; at--)
        level->by_estimate[at] = level->by_estimate[at - 1];
    level->by_estimate[at] = slot;
    level->partial[slot] = *made;
    order->count += grows;
    if (order->count == growing->per_order)
        order->worst_s = level->partial[level->by_estimate[find_worst(level, made->sets)]].estimate_s;
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
            const int slot = growing->level[first].by_estimate[k];
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

/* Prices the plan at place k of the complete ones; it becomes growing->trial. */
static enum hapt_status price(struct growing *growing, int k)
{
    struct step_search *search = growing->search;
    const struct level *level = &growing->level[0];
    read_stages(growing, &level->partial[level->by_estimate[k]]);
    HAPT_TRY(step_price_launches(search, GROWN_WORTH * search->best.step_s, &growing->trial));
    if (growing->trial.step_s <= STEP_NEARBY_WORTH * search->best.step_s)
        HAPT_TRY(step_price_nearby(search, &growing->trial));
    return HAPT_OK;
}

/* Keeps the best plans, and the best one of each order of device sets. */
static enum hapt_status price_all(struct growing *growing)
{
    const struct level *level = &growing->level[0];
    double best_s[MOST_ORDERS];
    int best[MOST_ORDERS];
    for (int o = 0; o < level->order_count; o++) best_s[o] = INFINITY;
    for (int k = 0; k < level->count && k < TRIED; k++) {
        const uint64_t sets = level->partial[level->by_estimate[k]].sets;
        int o = 0;
        HAPT_TRY(price(growing, k));
        step_keep(&growing->kept, &growing->trial, k);
        while (level->order_of[o].sets != sets) o++;
        if (!(growing->trial.step_s < best_s[o])) continue;
        best_s[o] = growing->trial.step_s;
        best[o] = k;
    }
    for (int o = 0; o < level->order_count; o++) {
        if (!isfinite(best_s[o])) continue;
        HAPT_TRY(price(growing, best[o]));
        step_keep(&growing->each, &growing->trial, best[o]);
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
    HAPT_TRY(step_kept_create(search, REFINED, &growing->each));
    HAPT_NEW(growing->level, &search->arena, search->L);
    for (int first = 0; first < search->L; first++) HAPT_NEW(growing->level[first].partial, &search->arena, WIDTH);
    grow_all(growing);
    return price_all(growing);
}

static bool is_kept(const struct step_kept *kept, const struct step_candidate *candidate)
{
    for (int k = 0; k < REFINED; k++)
        if (isfinite(kept->candidate[k].step_s) && step_same_stages(&kept->candidate[k], candidate)) return true;
    return false;
}

enum hapt_status step_grow(struct step_search *search)
{
    struct growing growing = {.search = search};
    if (search->L > MOST_LAYERS || search->options.no_enumeration) return HAPT_OK;
    HAPT_TRY(hapt_env_agree(search->comm, find(&growing)));
    const double worth_s = GROWN_WORTH * search->best.step_s;
    if (search->seed_count < STEP_MOST_SEEDS) /* windows start from it as well */
        step_candidate_copy(&search->seed[search->seed_count++], &search->best);
    for (int k = 0; k < REFINED; k++) /* before refinement changes those that are kept */
        if (is_kept(&growing.kept, &growing.each.candidate[k])) growing.each.candidate[k].step_s = INFINITY;
    for (int k = 0; k < 2 * REFINED; k++) {
        struct step_candidate *one = k < REFINED ? &growing.kept.candidate[k] : &growing.each.candidate[k - REFINED];
        if (!(one->step_s <= worth_s)) continue;
        HAPT_TRY(step_improve_seed(search, one));
        if (search->seed_count < STEP_MOST_SEEDS) step_candidate_copy(&search->seed[search->seed_count++], one);
    }
    return HAPT_OK;
}
