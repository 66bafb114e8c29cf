/*
 * Lower bound of a state's remaining cost. It adds the cheapest cut of every remaining step, with the sums that the cut
 * leaves. If steps share a parameter, it takes the cheapest cuts that agree on the parameter's layout, with the end of
 * its gradient. It adds the conversions between live tensors and the next steps that use them.
 */
#include "synthesis_search.h"

#define NONE (-1)

/*
 * A remaining step that reads objects alive at a position, or writes gradients that the suffix waits for. A forward
 * operator and its backward operators are one unit. An activation's next use is the unit that reads it next: the
 * forward step and, `again`, the backward steps, which count only what the forward step does not.
 */
enum { USE_CACHE_SIZE = 32 };
struct use_cache {
    bool known[USE_CACHE_SIZE];
    double all_s[USE_CACHE_SIZE], own_s[USE_CACHE_SIZE];
    uint32_t *word; /* [USE_CACHE_SIZE][count] */
};
struct next_use {
    struct use_cache *use_cache; /* cache by its objects' words; positions share it */
    int step;                    /* the segment's end: the writer comes later */
    int count;
    bool follows; /* belongs to the same unit as the previous one */
    struct next_use_object {
        unsigned char slot, operand;
        bool again;
        double removed_s;
    } * object; /* operands numbered as in struct conversion */
};

/* A parameter whose layout is decided at this position and has remaining steps: their extra cost over their least,
 * by layout and class. */
struct pending {
    int slot;
    const double *more_s; /* [MOST_LAYOUTS][classes] */
};

struct bounding {
    const struct problem *problem;
    const struct segment *segment;
    struct hapt_arena *arena;
    int steps, classes;
    struct bound_at *bound;
    int *number;       /* [object] local number, of the segment's objects */
    double *removal_s; /* [local] least cost to remove partial sums of it */
    bool *may_stay;    /* [local] gradients: partial sums may remain */
    double **sums_s;   /* [step] by choice: least cost of its partial sums and exchanges */
    double *least_s;   /* [step][classes] */
    int *head, *next;  /* [local], [step] steps that touch a parameter, in order */
};

/* ---- partial sums ---- */

static double least_removal(const struct layouts *layouts)
{
    double least = INFINITY;
    for (int l = 0; l < layouts->count; l++)
        if (l != PARTIAL && layouts->convert_s[PARTIAL][l] < least) least = layouts->convert_s[PARTIAL][l];
    return isfinite(least) ? least : 0;
}

static const struct object *local_object(const struct bounding *bounding, int local)
{
    return &bounding->problem->object[bounding->segment->local[local]];
}

/* Least cost of removing a choice's partial sums. A gradient's intermediate value that is only added to has
 * removal_s 0; the removal of its final value covers it. */
static double removal_of_outputs(const struct bounding *bounding, const struct step *step, const struct choice *choice)
{
    double sum = 0;
    for (int o = 0; o < HAPT_MAX_OUTPUTS; o++) {
        if (step->output[o] < 0 || choice->output[o] != PARTIAL) continue;
        sum += bounding->removal_s[bounding->number[step->output[o]]];
    }
    return sum;
}

static int partial_inputs(const struct step *step, const struct choice *choice)
{
    int count = 0;
    for (int i = 0; i < HAPT_MAX_INPUTS; i++) count += step->input[i] >= 0 && choice->input[i] == PARTIAL;
    return count;
}

/*
 * The writer of a gradient removes its partial sums unless a reader takes them. Sums of an activation are removed after
 * its writer, or after a reader that passes them on; that cost is shared among the reader's operands. Nothing is
 * removed after the segment.
 */
static void find_removals(struct bounding *bounding)
{
    const struct segment *segment = bounding->segment;
    for (int s = segment->first; s < segment->end; s++) { /* in ascending order: the previous value of a gradient is
                                                             written earlier but appears later in the folded steps */
        const struct step *step = &bounding->problem->step[s];
        for (int o = 0; o < HAPT_MAX_OUTPUTS; o++) {
            if (step->output[o] < 0 || step->previous[o] < 0) continue;
            bounding->may_stay[bounding->number[step->previous[o]]] =
                bounding->problem->object[step->output[o]].partial_is_read ||
                bounding->may_stay[bounding->number[step->output[o]]];
        }
    }
    for (int k = 0; k < segment->local_count; k++) {
        const struct object *object = local_object(bounding, k);
        const bool stays = object->kind == OBJECT_GRADIENT && (object->partial_is_read || bounding->may_stay[k]);
        const bool counts = object->kind == OBJECT_GRADIENT || object->kind == OBJECT_FORWARD;
        bounding->removal_s[k] = counts && object->is_read && !stays ? least_removal(object->layouts) : 0;
    }
    for (int s = segment->end - 1; s >= segment->first; s--) {
        const struct step *step = &bounding->problem->step[s];
        for (int c = 0; c < step->choice_count; c++) {
            const struct choice *choice = &step->choice[c];
            const int count = partial_inputs(step, choice);
            if (count == 0) continue;
            const double each = removal_of_outputs(bounding, step, choice) / count;
            for (int i = 0; i < HAPT_MAX_INPUTS; i++) {
                if (step->input[i] < 0 || choice->input[i] != PARTIAL) continue;
                double *its = &bounding->removal_s[bounding->number[step->input[i]]];
                if (each < *its) *its = each;
            }
        }
    }
}

/* ---- steps ---- */

static enum hapt_status price_steps(struct bounding *bounding)
{
    for (int s = 0; s < bounding->steps; s++) {
        const struct step *step = &bounding->problem->step[bounding->segment->first + s];
        HAPT_NEW(bounding->sums_s[s], bounding->arena, step->choice_count);
        for (int j = 0; j < bounding->classes; j++) bounding->least_s[s * bounding->classes + j] = INFINITY;
        for (int c = 0; c < step->choice_count; c++) {
            const struct choice *choice = &step->choice[c];
            bounding->sums_s[s][c] =
                choice->exchange_s + (partial_inputs(step, choice) ? 0 : removal_of_outputs(bounding, step, choice));
            for (int j = 0; j < bounding->classes; j++) {
                double *least = &bounding->least_s[s * bounding->classes + j];
                *least = fmin(*least, choice->compute_s[j] + bounding->sums_s[s][c]);
            }
        }
    }
    return HAPT_OK;
}

/* The largest parameter that a step reads, or whose gradient it writes, as a local object; or NONE. */
static int parameter_of(const struct bounding *bounding, const struct step *step)
{
    const struct problem *problem = bounding->problem;
    int best = NONE;
    for (int k = 0; k < HAPT_MAX_INPUTS + HAPT_MAX_OUTPUTS; k++) {
        int object = k < HAPT_MAX_INPUTS ? step->input[k] : step->output[k - HAPT_MAX_INPUTS];
        if (object < 0) continue;
        if (problem->object[object].kind == OBJECT_PARAMETER_GRADIENT) object = problem->object[object].parameter;
        if (problem->object[object].kind != OBJECT_PARAMETER) continue;
        if (best == NONE || problem->object[object].layouts->bytes > problem->object[best].layouts->bytes)
            best = object;
    }
    return best == NONE ? NONE : bounding->number[best];
}

/* True if only this step writes the gradient and the gradient ends in the segment. */
static bool ends_gradient(const struct bounding *bounding, int gradient, int step)
{
    const struct problem *problem = bounding->problem;
    const struct segment *segment = bounding->segment;
    if (problem->object[gradient].first < segment->first || problem->object[gradient].last >= segment->end)
        return false;
    for (int s = segment->first; s < segment->end; s++)
        for (int o = 0; s != step && o < HAPT_MAX_OUTPUTS; o++)
            if (problem->step[s].output[o] == gradient) return false;
    return true;
}

/* Cost of ending a gradient, per microbatch, plus its memory at the current price. */
static double end_s(const struct problem *problem, const struct ending *ending, int written, int layout)
{
    double seconds = ending->seconds[written][layout] / problem->microbatches;
    for (int j = 0; problem->counts_memory && j < problem->classes; j++)
        seconds += problem->multiplier[j] * ending->bytes[written][layout][j];
    return seconds;
}

/* The cheapest choice of a step for each layout of a parameter, with the end of its gradient if only this step
 * writes it. */
static void step_with_layouts(const struct bounding *bounding, int s, int parameter,
                              double *seconds /* [MOST_LAYOUTS][classes], incremented */)
{
    const struct problem *problem = bounding->problem;
    const struct step *step = &problem->step[bounding->segment->first + s];
    const int object = bounding->segment->local[parameter], classes = bounding->classes;
    bool ends[HAPT_MAX_OUTPUTS];
    for (int o = 0; o < HAPT_MAX_OUTPUTS; o++)
        ends[o] = step->output[o] >= 0 && problem->object[step->output[o]].parameter == object &&
                  ends_gradient(bounding, step->output[o], bounding->segment->first + s);
    for (int l = 0; l < problem->object[object].layouts->count; l++) {
        double least[MOST_CLASSES];
        for (int j = 0; j < classes; j++) least[j] = INFINITY;
        for (int c = 0; c < step->choice_count; c++) {
            const struct choice *choice = &step->choice[c];
            double its = bounding->sums_s[s][c];
            for (int i = 0; i < HAPT_MAX_INPUTS; i++)
                if (step->input[i] == object && choice->input[i] != l &&
                    (l != REPLICATED || choice->input[i] == PARTIAL))
                    its = INFINITY;
            for (int o = 0; o < HAPT_MAX_OUTPUTS; o++)
                if (ends[o]) its += end_s(problem, problem->object[step->output[o]].ending, choice->output[o], l);
            for (int j = 0; j < classes; j++) least[j] = fmin(least[j], its + choice->compute_s[j]);
        }
        for (int j = 0; j < classes; j++) seconds[l * classes + j] += least[j] - bounding->least_s[s * classes + j];
    }
}

/* By position: the extra cost of the remaining steps for each layout of a parameter. */
static enum hapt_status price_parameter(struct bounding *bounding, int parameter, double *extra /* [steps][classes] */)
{
    const int classes = bounding->classes, first = bounding->head[parameter];
    double *more;
    HAPT_NEW(more, bounding->arena, MOST_LAYOUTS * classes);
    const struct object *object = local_object(bounding, parameter);
    int step[64], count = 0;
    const double copies =
        hapt_parameter_copies(&bounding->problem->graph->tensor[object->tensor], bounding->problem->state_bytes);
    for (int l = 0;
         bounding->problem->counts_memory && object->last < bounding->segment->end && l < object->layouts->count; l++)
        for (int j = 0; j < classes; j++)
            more[l * classes + j] = hapt_priced_seconds(bounding->problem, object->layouts, l, copies);
    for (int s = first; s != NONE && count < 64; s = bounding->next[s]) step[count++] = s;
    for (int m = count - 1; m >= 0; m--) {
        step_with_layouts(bounding, step[m], parameter, more);
        for (int at = step[m]; at > (m > 0 ? step[m - 1] : -1); at--) {
            struct bound_at *bound = &bounding->bound[at];
            int slot = 0;
            while (slot < bound->slot_count && bound->slot[slot] != parameter) slot++;
            if (slot == bound->slot_count || slot > 255) continue;
            bound->pending[bound->pending_count++] = (struct pending){slot, more};
        }
        if (m == 0) break;
        double *before;
        HAPT_NEW(before, bounding->arena, MOST_LAYOUTS * classes);
        memcpy(before, more, MOST_LAYOUTS * (size_t)classes * sizeof *more);
        more = before;
    }
    if (object->first < bounding->segment->first) return HAPT_OK; /* decided before the segment */
    for (int j = 0; count && j < classes; j++) {
        double least = INFINITY;
        for (int l = 0; l < object->layouts->count; l++)
            if (l != PARTIAL) least = fmin(least, more[l * classes + j]);
        if (isfinite(least) && least > 0) extra[first * classes + j] += least;
    }
    return HAPT_OK;
}

static enum hapt_status price_parameters(struct bounding *bounding, double *extra)
{
    for (int k = 0; k < bounding->segment->local_count; k++) bounding->head[k] = NONE;
    for (int s = bounding->steps - 1; s >= 0; s--) {
        const int parameter = parameter_of(bounding, &bounding->problem->step[bounding->segment->first + s]);
        if (parameter == NONE) continue;
        bounding->next[s] = bounding->head[parameter];
        bounding->head[parameter] = s;
    }
    for (int k = 0; k < bounding->segment->local_count; k++)
        if (bounding->head[k] != NONE) HAPT_TRY(price_parameter(bounding, k, extra));
    return HAPT_OK;
}

static enum hapt_status add_up(struct bounding *bounding, const double *extra)
{
    const int classes = bounding->classes;
    for (int at = bounding->steps; at >= 0; at--) {
        struct bound_at *bound = &bounding->bound[at];
        HAPT_NEW(bound->forward_s, bounding->arena, 3 * classes);
        bound->backward_s = bound->forward_s + classes;
        bound->left_s = bound->backward_s + classes;
        if (at == bounding->steps) continue;
        const struct step *step = &bounding->problem->step[bounding->segment->first + at];
        memcpy(bound->forward_s, bound[1].forward_s, 3 * (size_t)classes * sizeof(double));
        for (int j = 0; j < classes; j++) {
            double least = INFINITY;
            for (int c = 0; c < step->choice_count; c++) least = fmin(least, step->choice[c].compute_s[j]);
            (step->backward ? bound->backward_s : bound->forward_s)[j] += least;
            bound->left_s[j] += bounding->least_s[at * classes + j] + extra[at * classes + j];
        }
    }
    return HAPT_OK;
}

/* ---- conversions to the next use ---- */

static int unit_of(const struct problem *problem, int step)
{
    return problem->graph->op[problem->step[step].op].forward_op;
}

/* The step that next uses an object at a position. For an activation, the next forward step that reads it, or,
 * after those, the next backward one. For a gradient, its writer, or the end. NONE: nothing. */
static int step_of_next_use(const struct bounding *bounding, int position, int index)
{
    const struct segment *segment = bounding->segment;
    const struct object *object = &bounding->problem->object[index];
    int backward = NONE;
    if (object->kind == OBJECT_GRADIENT && object->last >= segment->end) return segment->end;
    if (object->kind != OBJECT_FORWARD && object->kind != OBJECT_GRADIENT) return NONE;
    for (int s = segment->first + position; s < segment->end; s++) {
        const struct step *step = &bounding->problem->step[s];
        if (object->kind == OBJECT_GRADIENT) {
            for (int o = 0; o < HAPT_MAX_OUTPUTS; o++)
                if (step->output[o] == index) return s;
        } else {
            for (int i = 0; i < HAPT_MAX_INPUTS; i++) {
                if (step->input[i] != index) continue;
                if (!step->backward) return s;
                if (backward == NONE) backward = s;
            }
        }
    }
    return backward;
}

/* A next use may equal one at the previous position. */
static bool same_next_use(const struct bound_at *a, const struct next_use *x, const struct bound_at *b,
                          const struct next_use *y)
{
    bool same = x->step == y->step && x->count == y->count;
    for (int k = 0; same && k < x->count; k++)
        same = a->slot[x->object[k].slot] == b->slot[y->object[k].slot] && x->object[k].operand == y->object[k].operand;
    return same;
}

static enum hapt_status find_cache(const struct bounding *bounding, const struct bound_at *bound,
                                   struct next_use *next_use)
{
    const struct bound_at *before = bound > bounding->bound ? bound - 1 : NULL;
    for (int m = 0; before && m < before->next_use_count; m++) {
        if (!same_next_use(before, &before->next_use[m], bound, next_use)) continue;
        next_use->use_cache = before->next_use[m].use_cache;
        return HAPT_OK;
    }
    HAPT_NEW(next_use->use_cache, bounding->arena, 1);
    HAPT_NEW(next_use->use_cache->word, bounding->arena, USE_CACHE_SIZE * next_use->count);
    return HAPT_OK;
}

/* Adds the objects of a position that step s uses, `next_step` [slot_count]. */
static enum hapt_status add_next_use(const struct bounding *bounding, struct bound_at *bound, int s,
                                     const int *next_step)
{
    const struct problem *problem = bounding->problem;
    struct next_use *next_use = &bound->next_use[bound->next_use_count];
    *next_use = (struct next_use){.step = s};
    HAPT_NEW(next_use->object, bounding->arena, bound->slot_count + HAPT_MAX_INPUTS);
    for (int slot = 0; slot < bound->slot_count && slot < 256; slot++) {
        const int index = bounding->segment->local[bound->slot[slot]];
        const double removed_s = bounding->removal_s[bound->slot[slot]];
        if (next_step[slot] == NONE) continue;
        if (s == bounding->segment->end) {
            if (next_step[slot] == s)
                next_use->object[next_use->count++] =
                    (struct next_use_object){(unsigned char)slot, HAPT_MAX_INPUTS, false, removed_s};
            continue;
        }
        const struct step *step = &problem->step[s];
        if (problem->object[index].kind == OBJECT_GRADIENT) {
            for (int o = 0; o < HAPT_MAX_OUTPUTS; o++)
                if (next_step[slot] == s && step->output[o] == index)
                    next_use->object[next_use->count++] = (struct next_use_object){
                        (unsigned char)slot, (unsigned char)(HAPT_MAX_INPUTS + o), false, removed_s};
            continue;
        }
        if (next_step[slot] == bounding->segment->end || unit_of(problem, next_step[slot]) != unit_of(problem, s))
            continue;
        for (int i = 0; i < HAPT_MAX_INPUTS; i++)
            if (step->input[i] == index)
                next_use->object[next_use->count++] =
                    (struct next_use_object){(unsigned char)slot, (unsigned char)i, step->backward, 0};
    }
    if (next_use->count == 0) return HAPT_OK;
    bound->next_use_count++;
    return find_cache(bounding, bound, next_use);
}

static enum hapt_status list_next_uses(const struct bounding *bounding, int position)
{
    const struct segment *segment = bounding->segment;
    const struct problem *problem = bounding->problem;
    struct bound_at *bound = &bounding->bound[position];
    int *next_step; /* [slot_count] the step that next uses the object */
    HAPT_NEW(next_step, bounding->arena, bound->slot_count);
    HAPT_NEW(bound->next_use, bounding->arena, bounding->steps - position + 1);
    HAPT_NEW(bound->pending, bounding->arena, bound->slot_count);
    for (int slot = 0; slot < bound->slot_count; slot++)
        next_step[slot] = step_of_next_use(bounding, position, segment->local[bound->slot[slot]]);
    for (int first = position; first < bounding->steps; first++) {
        const int its = unit_of(problem, segment->first + first);
        bool known = false;
        for (int s = position; s < first && !known; s++) known = unit_of(problem, segment->first + s) == its;
        const int before = bound->next_use_count;
        for (int s = first; s < bounding->steps && !known; s++) {
            if (unit_of(problem, segment->first + s) != its) continue;
            const int count = bound->next_use_count;
            HAPT_TRY(add_next_use(bounding, bound, segment->first + s, next_step));
            if (bound->next_use_count > count) bound->next_use[count].follows = count > before;
        }
    }
    return add_next_use(bounding, bound, segment->end, next_step);
}

/* Cost from a layout that a writer produces to all layouts that wait for the gradient: one conversion each, or all
 * from the replicated one. */
static double lacking_s(const struct layouts *layouts, int from, layout_set awaited)
{
    const layout_set lacking = (layout_set)(awaited & ~closure_of(layouts, (layout_set)(1u << from)));
    double apart = 0;
    if (lacking & 1u << PARTIAL || (lacking && from == PARTIAL)) return INFINITY;
    for (int l = 0; l < layouts->count; l++)
        if (lacking >> l & 1u) apart += layouts->convert_s[from][l];
    return lacking ? fmin(apart, layouts->convert_s[from][REPLICATED]) : 0;
}

/* Cost from a writer's layout to all layouts that wait. If exact, at least the dearest of them. Otherwise (long
 * models) all of them, since they are made right after the writer. */
static double deliver_s(const struct layouts *layouts, int made, layout_set awaited, bool exact)
{
    double seconds = exact ? 0 : lacking_s(layouts, made, awaited);
    for (int l = 0; l < layouts->count; l++) {
        if (exact && awaited >> l & 1u) seconds = fmax(seconds, layouts->reach_s[made][l]);
        if (!exact && l != made && layouts->convert_s[made][l] < seconds)
            seconds = fmin(seconds, layouts->convert_s[made][l] + lacking_s(layouts, l, awaited));
    }
    return seconds;
}

/* From the existing versions to the one that an operand needs. */
static double reach_s(const struct layouts *layouts, layout_set made, int need)
{
    double seconds = INFINITY;
    for (int l = 0; l < layouts->count; l++)
        if (made >> l & 1u && layouts->reach_s[l][need] < seconds) seconds = layouts->reach_s[l][need];
    return seconds;
}

/* At the segment's end: from the layout in which a gradient crosses. */
static double cross_s(const struct layouts *layouts, layout_set awaited)
{
    double seconds = INFINITY;
    for (int l = 0; l < layouts->count; l++)
        if (l != PARTIAL) seconds = fmin(seconds, lacking_s(layouts, l, awaited));
    return seconds;
}

static double operand_cost(const struct problem *problem, const struct layouts *layouts, uint32_t word,
                           const struct choice *choice, const struct next_use_object *object)
{
    if (object->operand < HAPT_MAX_INPUTS) return reach_s(layouts, made_of(word), choice->input[object->operand]);
    const int made = choice->output[object->operand - HAPT_MAX_INPUTS];
    const double seconds = deliver_s(layouts, made, awaited_of(word), problem->options->exact);
    return made == PARTIAL ? fmax(seconds - object->removed_s, 0) : seconds; /* the removal of sums is in left_s */
}

/* Least costs of converting a step's operands: *all_s of all, *own_s of those that the unit's forward step does not
 * count. */
static void use_cost(const struct problem *problem, const struct segment *segment, const struct bound_at *bound,
                     const struct next_use *next_use, const uint32_t *word, double *all_s, double *own_s)
{
    const struct step *step = &problem->step[next_use->step];
    *all_s = *own_s = INFINITY;
    for (int c = 0; c<step->choice_count && * all_s> 0; c++) {
        double all = 0, own = 0;
        for (int k = 0; k < next_use->count && (own < *own_s || all < *all_s); k++) {
            const struct next_use_object *object = &next_use->object[k];
            const struct layouts *layouts = problem->object[segment->local[bound->slot[object->slot]]].layouts;
            const double seconds = operand_cost(problem, layouts, word[object->slot], &step->choice[c], object);
            all += seconds;
            if (!object->again) own += seconds;
        }
        if (all < *all_s) *all_s = all;
        if (own < *own_s) *own_s = own;
    }
}

/* The same, cached by the objects' words. */
static void use_cost_cached(const struct problem *problem, const struct segment *segment, const struct bound_at *bound,
                            const struct next_use *next_use, const uint32_t *word, double *all_s, double *own_s)
{
    struct use_cache *use_cache = next_use->use_cache;
    uint64_t hash = 0;
    for (int k = 0; k < next_use->count; k++) hash = (hash ^ word[next_use->object[k].slot]) * 0xbf58476d1ce4e5b9u;
    const int at = (int)(hash >> 59); /* of USE_CACHE_SIZE */
    uint32_t *known = &use_cache->word[at * next_use->count];
    bool same = use_cache->known[at];
    for (int k = 0; same && k < next_use->count; k++) same = known[k] == word[next_use->object[k].slot];
    if (!same) {
        use_cost(problem, segment, bound, next_use, word, &use_cache->all_s[at], &use_cache->own_s[at]);
        for (int k = 0; k < next_use->count; k++) known[k] = word[next_use->object[k].slot];
        use_cache->known[at] = true;
    }
    *all_s = use_cache->all_s[at];
    *own_s = use_cache->own_s[at];
}

double hapt_bound_conversions(const struct problem *problem, const struct segment *segment,
                              const struct bound_at *bound, const uint32_t *word)
{
    double sum = 0, most = 0;
    for (int m = 0; m < bound->next_use_count; m++) {
        const struct next_use *next_use = &bound->next_use[m];
        double all_s, own_s;
        if (!next_use->follows) {
            sum += most;
            most = 0;
        }
        if (next_use->step == segment->end) {
            for (int k = 0; !problem->options->exact && k < next_use->count; k++) {
                const int slot = next_use->object[k].slot;
                sum += cross_s(problem->object[segment->local[bound->slot[slot]]].layouts, awaited_of(word[slot]));
            }
            continue;
        }
        use_cost_cached(problem, segment, bound, next_use, word, &all_s, &own_s);
        if (problem->step[next_use->step].backward) {
            sum += own_s;
            most = fmax(most, all_s - own_s);
        } else {
            most = fmax(most, all_s);
        }
    }
    return sum + most;
}

double hapt_bound_left(const struct problem *problem, const struct segment *segment, const struct bound_at *bound,
                       const uint32_t *word, int class)
{
    double sum = bound->left_s[class];
    for (int slot = 0; problem->counts_memory && slot < bound->slot_count; slot++) {
        const struct object *object = &problem->object[segment->local[bound->slot[slot]]];
        if (object->kind == OBJECT_FORWARD) sum += hapt_kept_seconds(problem, object, word[slot]);
    }
    for (int k = 0; k < bound->pending_count; k++) {
        const uint32_t layout = word[bound->pending[k].slot];
        if (layout) sum += bound->pending[k].more_s[(layout - 1) * (uint32_t)problem->classes + (uint32_t) class];
    }
    return sum;
}

enum hapt_status hapt_bounds_prepare(const struct problem *problem, const struct segment *segment,
                                     struct hapt_arena *arena, struct bound_at *bound)
{
    const int steps = segment->end - segment->first;
    struct bounding bounding = {.problem = problem,
                                .segment = segment,
                                .arena = arena,
                                .steps = steps,
                                .classes = problem->classes,
                                .bound = bound};
    double *extra;
    HAPT_NEW(bounding.number, arena, problem->object_count);
    HAPT_NEW(bounding.removal_s, arena, segment->local_count);
    HAPT_NEW(bounding.may_stay, arena, segment->local_count);
    HAPT_NEW(bounding.sums_s, arena, steps);
    HAPT_NEW(bounding.least_s, arena, steps * problem->classes);
    HAPT_NEW(bounding.head, arena, segment->local_count);
    HAPT_NEW(bounding.next, arena, steps);
    HAPT_NEW(extra, arena, steps * problem->classes);
    for (int k = 0; k < segment->local_count; k++) bounding.number[segment->local[k]] = k;
    find_removals(&bounding);
    HAPT_TRY(price_steps(&bounding));
    for (int at = 0; at <= steps; at++) HAPT_TRY(list_next_uses(&bounding, at));
    HAPT_TRY(price_parameters(&bounding, extra));
    return add_up(&bounding, extra);
}
