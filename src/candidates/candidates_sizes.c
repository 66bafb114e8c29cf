/* Memory of all items of a mesh from one gathering (memory.h), and of what they may recompute. */
#include <string.h>

#include "hapt/candidates.h"
#include "hapt/progress.h"

enum hapt_status hapt_candidates_shardings(const struct hapt_candidates *candidates, int mesh_index,
                                           struct hapt_arena *arena, struct hapt_candidate_shardings *shardings)
{
    const struct hapt_candidate_mesh *mesh = &candidates->mesh[mesh_index];
    const struct hapt_unit *unit = candidates->unit;
    *shardings = (struct hapt_candidate_shardings){.again = candidates->sharding[mesh_index]};
    shardings->recomputes = hapt_candidates_recompute(candidates) && mesh->program == 0 && mesh->dp > 0;
    for (int u = 0; u < candidates->unit_count; u++)
        shardings->recomputes =
            shardings->recomputes && hapt_sharding_allows(shardings->again, unit[u].first_op, unit[u].end_op);
    if (shardings->recomputes)
        HAPT_TRY(hapt_sharding_recompute(shardings->again, unit, candidates->unit_count, arena, &shardings->again));
    return candidates->split && !candidates->roomy ? hapt_sharding_split(shardings->again, arena, &shardings->split)
                                                   : HAPT_OK;
}

/* The sources of the memory of ranges. */
struct sizing {
    struct hapt_memory_ranges *ranges, *split;  /* split NULL: no figures of split passes */
    struct hapt_memory_work *work, *split_work; /* NULL: of residents only */
};

static enum hapt_status begin_sizing(const struct hapt_candidate_shardings *shardings,
                                     const struct hapt_memory_options *options, struct hapt_arena *arena,
                                     struct sizing *sizing)
{
    *sizing = (struct sizing){0};
    const bool walks = !options->residents_only;
    HAPT_TRY(hapt_memory_ranges_create(shardings->again, options, arena, &sizing->ranges));
    if (walks) HAPT_TRY(hapt_memory_work_create(sizing->ranges, arena, &sizing->work));
    if (!shardings->split) return HAPT_OK;
    HAPT_TRY(hapt_memory_ranges_create(shardings->split, options, arena, &sizing->split));
    return walks ? hapt_memory_work_create(sizing->split, arena, &sizing->split_work) : HAPT_OK;
}

/* Memory of a range for its activations, unsplit and split. It is the same wherever the weights are. */
struct activations {
    struct hapt_memory_activations whole, split;
};

static enum hapt_status walk_range(const struct sizing *sizing, int first_op, int end_op, const unsigned char *again,
                                   struct activations *activations)
{
    HAPT_TRY(hapt_memory_ranges_activations(sizing->ranges, first_op, end_op, again, NULL, sizing->work,
                                            &activations->whole));
    if (!sizing->split) return HAPT_OK;
    return hapt_memory_ranges_activations(sizing->split, first_op, end_op, again, &activations->whole,
                                          sizing->split_work, &activations->split);
}

static void size_range(const struct hapt_candidates *candidates, const struct sizing *sizing, int first_op, int end_op,
                       const struct activations *activations, struct hapt_item_memory *memory)
{
    struct hapt_memory_bytes figures;
    hapt_memory_ranges_add(sizing->ranges, first_op, end_op, &activations->whole, &figures);
    *memory = hapt_candidates_memory(candidates, &figures);
    if (!sizing->split) return;
    hapt_memory_ranges_add(sizing->split, first_op, end_op, &activations->split, &figures);
    memory->split_parameter_bytes = (double)figures.parameter_bytes;
    memory->weight_slot_bytes = (double)figures.weight_slot_bytes;
}

/* True if a device of the cluster may hold the range. */
static bool may_fit(const struct hapt_candidates *candidates, const struct sizing *sizing, int first_op, int end_op)
{
    if (!sizing->ranges) return false;
    struct hapt_memory_bytes least;
    hapt_memory_ranges_least(sizing->ranges, first_op, end_op, &least);
    const struct hapt_item_memory memory = hapt_candidates_memory(candidates, &least);
    for (int c = 0; c < candidates->cluster->count; c++) {
        const double limit = candidates->cluster->subcluster[c].device.memory_bytes;
        if (hapt_candidates_resident_bytes(candidates, &memory, limit) <= limit) return true;
    }
    return false;
}

/* True if a unit is only partly inside the range. */
static bool cuts_unit(const struct hapt_candidates *candidates, int first_op, int end_op)
{
    for (int u = 0; u < candidates->unit_count; u++) {
        const struct hapt_unit *unit = &candidates->unit[u];
        const bool apart = unit->end_op <= first_op || unit->first_op >= end_op,
                   inside = unit->first_op >= first_op && unit->end_op <= end_op;
        if (!apart && !inside) return true;
    }
    return false;
}

/* Ranks of stages whose weights are on the host have the whole state each, also if some weights cannot leave. */
static void never_share(struct hapt_item_memory *memory)
{
    memory->sharded_bytes = memory->parameter_bytes;
    memory->sharded_host_bytes = memory->host_bytes;
    memory->masters_unread = 0;
}

/* Scratch of the choices of a range: what its units recompute, and activations by choice of recomputation. */
struct unit_scratch {
    struct activations activations[HAPT_MOST_KEEPS];
    bool walked[HAPT_MOST_KEEPS];
    unsigned char *own, *before[HAPT_WEIGHTS_CHOICES]; /* [unit_count] the last choice with weights there */
};

/* The same for each choice of what is kept. Some are no candidates: choices that differ in nothing from an earlier one,
 * and those with weights that do not move. If all are to move, a range keeps gradients or weights that cannot. With
 * --recompute all, ranges that cut a unit are no candidates, since its activations would be kept. sizing, before: by
 * enum hapt_weights_at. */
static enum hapt_status size_keeps(const struct hapt_candidates *candidates,
                                   const struct sizing sizing[HAPT_WEIGHTS_CHOICES], bool recomputes, int first_op,
                                   int end_op, struct unit_scratch *units, struct hapt_item_again *again)
{
    const bool all = candidates->keep[0].recompute == HAPT_RECOMPUTE_PARTS,
               away = candidates->keep[0].weights_at != HAPT_WEIGHTS_RESIDENT;
    bool seen[HAPT_WEIGHTS_CHOICES] = {true}, gradients = false;
    memset(units->before[0], HAPT_UNIT_KEPT, (size_t)candidates->unit_count);
    memset(units->walked, 0, sizeof units->walked);
    for (int k = 0; k < candidates->keep_count; k++) {
        const struct hapt_keep keep = candidates->keep[k];
        unsigned char *own = units->own, *before = units->before[keep.weights_at];
        int first, end;
        HAPT_TRY(hapt_unit_choose(candidates->units, first_op, end_op, keep.recompute, own, &first, &end));
        const bool forced = k == 0 && keep.recompute > 0,
                   same = seen[keep.weights_at] && memcmp(own + first, before + first, (size_t)(end - first)) == 0;
        if ((same && !forced) || (keep.recompute > 0 && !recomputes) || !sizing[keep.weights_at].ranges) continue;
        if (all && cuts_unit(candidates, first_op, end_op)) continue;
        if (!may_fit(candidates, &sizing[keep.weights_at], first_op, end_op)) continue;
        int walked; /* the first choice with the same recomputation */
        for (walked = 0; candidates->keep[walked].recompute != keep.recompute; walked++) {
        }
        if (!units->walked[walked])
            HAPT_TRY(walk_range(&sizing[0], first_op, end_op, own, &units->activations[walked]));
        units->walked[walked] = true;
        size_range(candidates, &sizing[keep.weights_at], first_op, end_op, &units->activations[walked],
                   &again[k].memory);
        if (hapt_weights_on_host(keep.weights_at)) never_share(&again[k].memory);
        memcpy(before + first, own + first, (size_t)(end - first));
        seen[keep.weights_at] = true;
        gradients = gradients || again[k].memory.gradient_bytes > 0;
        if (keep.weights_at == HAPT_GRADIENTS_ON_HOST
                ? !gradients
                : hapt_weights_move(keep.weights_at) && (away ? gradients : again[k].memory.weight_bytes == 0))
            again[k].memory = FITS_NOWHERE;
    }
    return HAPT_OK;
}

static void item_range(const struct hapt_candidates *candidates, int structure, int *first_op, int *end_op)
{
    *first_op = hapt_layers_first_op(candidates->layers, candidates->first[structure]);
    *end_op = candidates->layers->end_op[candidates->last[structure]];
}

enum hapt_status hapt_candidates_sizes(const struct hapt_candidates *candidates, int mesh_index,
                                       const struct hapt_candidate_shardings *shardings,
                                       hapt_kernel_scratch *kernel_scratch, struct hapt_engine_options *engine,
                                       struct hapt_arena *scratch, struct hapt_item_memory *memory,
                                       struct hapt_item_again *again)
{
    const struct hapt_memory_options options = {.slots = 1,
                                                .state_count = candidates->state_count,
                                                .host_state = candidates->host_state,
                                                .host_update = candidates->host_update,
                                                .scratch = kernel_scratch,
                                                .scratch_context = engine,
                                                .scratch_by_operator = kernel_scratch == hapt_engine_scratch_predicted,
                                                .residents_only = candidates->roomy};
    struct hapt_memory_options away = options, gradients, sharded;
    struct sizing sizing[HAPT_WEIGHTS_CHOICES] = {{0}};
    struct unit_scratch units;
    struct activations activations;
    unsigned char *kept;
    const bool plain = candidates->mesh[mesh_index].program == 0 && candidates->mesh[mesh_index].dp > 0;
    HAPT_NEW(kept, scratch, candidates->unit_count);
    HAPT_NEW(units.own, scratch, candidates->unit_count);
    for (int k = 0; k < HAPT_WEIGHTS_CHOICES; k++) HAPT_NEW(units.before[k], scratch, candidates->unit_count);
    away.residents_only = true; /* activations are those of sizing[0] */
    away.weight_unit_count = candidates->weight_unit_count;
    away.weight_unit = candidates->weight_unit;
    gradients = sharded = away;
    sharded.sharded_state = true;
    gradients.gradient_unit_count = away.weight_unit_count;
    gradients.gradient_unit = away.weight_unit;
    HAPT_TRY(begin_sizing(shardings, &options, scratch, &sizing[0]));
    if (candidates->host_weights && plain)
        HAPT_TRY(begin_sizing(shardings, &away, scratch, &sizing[HAPT_WEIGHTS_ON_HOST]));
    if (candidates->host_gradients && plain)
        HAPT_TRY(begin_sizing(shardings, &gradients, scratch, &sizing[HAPT_GRADIENTS_ON_HOST]));
    if (candidates->weight_sharding != HAPT_WEIGHT_SHARDING_NO && plain && candidates->mesh[mesh_index].dp > 1)
        HAPT_TRY(begin_sizing(shardings, &sharded, scratch, &sizing[HAPT_WEIGHTS_SHARDED]));
    for (int k = 0; k < candidates->structure_count; k++) {
        const size_t item = (size_t)k * (size_t)candidates->mesh_count + (size_t)mesh_index;
        const int first = candidates->first[k], last = candidates->last[k];
        int first_op, end_op;
        hapt_progress_advance(1);
        item_range(candidates, k, &first_op, &end_op);
        memory[item] = FITS_NOWHERE;
        for (int choice = 0; again && choice < candidates->keep_stride; choice++)
            again[item * (size_t)candidates->keep_stride + (size_t)choice] =
                (struct hapt_item_again){.memory = FITS_NOWHERE};
        if (!hapt_sharding_allows(candidates->sharding[mesh_index], first_op, end_op)) continue;
        if (!hapt_candidates_may_be_wanted(candidates, mesh_index, first, last)) continue;
        if (candidates->roomy) {
            struct hapt_memory_bytes least;
            hapt_memory_ranges_least(sizing[0].ranges, first_op, end_op, &least);
            memory[item] = hapt_candidates_memory(candidates, &least);
            memory[item].split_parameter_bytes = memory[item].parameter_bytes;
            continue;
        }
        /* Single layers need figures in any case: "does not fit" names them. */
        bool fits = false;
        for (int w = 0; w < HAPT_WEIGHTS_CHOICES; w++) fits = fits || may_fit(candidates, &sizing[w], first_op, end_op);
        if (first < last && !fits) continue;
        HAPT_TRY(walk_range(&sizing[0], first_op, end_op, kept, &activations));
        size_range(candidates, &sizing[0], first_op, end_op, &activations, &memory[item]);
        if (again && (shardings->recomputes || candidates->weight_unit_count > 0) &&
            hapt_candidates_may_recompute(candidates, mesh_index, first, last))
            HAPT_TRY(size_keeps(candidates, sizing, shardings->recomputes, first_op, end_op, &units,
                                &again[item * (size_t)candidates->keep_stride]));
    }
    return HAPT_OK;
}

/* Seconds of units [first, end) that run again: sums of runs of equal choices. unit_s, light_s [unit_count + 1]: of the
 * units before, if they make all again, or are selective. */
static double again_seconds(const unsigned char *choice, int first, int end, const double *unit_s,
                            const double *light_s)
{
    double sum_s = 0;
    for (int u = first, next; u < end; u = next) {
        const double *its_s = choice[u] == HAPT_UNIT_FULL ? unit_s : light_s;
        for (next = u + 1; next < end && choice[next] == choice[u]; next++) {
        }
        if (choice[u] != HAPT_UNIT_KEPT) sum_s += its_s[next] - its_s[u];
    }
    return sum_s;
}

enum hapt_status hapt_candidates_again(const struct hapt_candidates *candidates, int mesh_index,
                                       const struct hapt_sharding *sharding, const double *repeat_s,
                                       struct hapt_arena *scratch, struct hapt_item_again *again)
{
    double *unit_s, *light_s;
    unsigned char *choice;
    HAPT_NEW(unit_s, scratch, candidates->unit_count + 1);
    HAPT_NEW(light_s, scratch, candidates->unit_count + 1);
    HAPT_NEW(choice, scratch, candidates->unit_count);
    for (int o = sharding->graph->forward_count; o < sharding->reduce_first; o++) {
        if (sharding->repeats[o] < 0) continue;
        unit_s[sharding->repeats[o] + 1] += repeat_s[o];
        if (sharding->light[o]) light_s[sharding->repeats[o] + 1] += repeat_s[o];
    }
    for (int u = 0; u < candidates->unit_count; u++) {
        unit_s[u + 1] += unit_s[u];
        light_s[u + 1] += light_s[u];
    }
    for (int k = 0; k < candidates->structure_count; k++)
        for (int keep = 0; keep < candidates->keep_count; keep++) {
            const size_t item = (size_t)k * (size_t)candidates->mesh_count + (size_t)mesh_index;
            int first_op, end_op, first, end;
            item_range(candidates, k, &first_op, &end_op);
            HAPT_TRY(hapt_unit_choose(candidates->units, first_op, end_op, candidates->keep[keep].recompute, choice,
                                      &first, &end));
            again[item * (size_t)candidates->keep_stride + (size_t)keep].again_s =
                again_seconds(choice, first, end, unit_s, light_s);
        }
    return HAPT_OK;
}
