/* The alternation of programs and ratios (HAP 3.1). */
#include "hapt/alternate.h"

#include <math.h>
#include <string.h>

#include "alternate_private.h"
#include "hapt/env.h"

#define SAME_RATIO 1e-4 /* ratios this close are the same */

/* A program and its ratios after a turn. */
struct pair {
    struct hapt_axis axis;
    struct hapt_axis_program program;
    struct hapt_program_price price;
    struct hapt_synthesis_report report;
    const char *origin;
};

static struct alternating start_with(const struct hapt_alternation *asked)
{
    return (struct alternating){.asked = asked,
                                .microbatches = asked->microbatches > 0 ? asked->microbatches : 1,
                                .options = {.microbatches = asked->microbatches,
                                            .most_states = asked->most_states > 0 ? asked->most_states : 2000,
                                            .memory_bytes = asked->memory_bytes,
                                            .in_flight = asked->in_flight,
                                            .optimizer_bytes_per_element = asked->optimizer_bytes_per_element}};
}

static bool fits(const struct hapt_alternation *asked, const struct hapt_program_price *price)
{
    for (int j = 0; asked->memory_bytes && j < asked->devices; j++)
        if (price->memory_bytes[j] > asked->memory_bytes[j] * (1 + 1e-9)) return false;
    return true;
}

static enum hapt_status make_axis(int devices, int vectors, const double *ratio, bool repeat, struct hapt_arena *arena,
                                  struct hapt_axis *axis)
{
    double *copy;
    HAPT_NEW(copy, arena, vectors * devices);
    for (int k = 0; k < vectors; k++) {
        const double *from = ratio ? ratio + (repeat ? 0 : (size_t)k * devices) : NULL;
        double sum = 0;
        for (int j = 0; j < devices; j++) sum += from ? from[j] : 1;
        for (int j = 0; j < devices; j++) copy[k * devices + j] = (from ? from[j] : 1) / sum;
    }
    *axis = (struct hapt_axis){.size = devices, .ratio_count = vectors, .ratio = copy};
    return HAPT_OK;
}

static double distance(const struct hapt_axis *a, const struct hapt_axis *b)
{
    double most = 0;
    for (int i = 0; i < a->size * a->ratio_count; i++) most = fmax(most, fabs(a->ratio[i] - b->ratio[i]));
    return most;
}

/* Programs with equal hashes are taken as equal. */
static uint64_t program_hash(const struct hapt_axis_program *program)
{
    uint64_t hash = (uint64_t)program->count;
    for (int i = 0; i < program->count; i++) {
        const struct hapt_axis_instruction *its = &program->instruction[i];
        const int64_t words[] = {its->op,
                                 its->cut.letter,
                                 its->cut.blocks,
                                 its->cut.unit,
                                 its->cut.ratio,
                                 its->tensor,
                                 its->kind,
                                 its->op < 0 ? (int64_t)its->to.kind : 0,
                                 its->op < 0 ? its->to.dim : 0};
        hash = hapt_hash(hash, words, sizeof words);
    }
    return hash;
}

/* Some layouts exist only at the previous ratios (e.g. if all shares were equal). Then make the program anew from
 * its cuts. */
static enum hapt_status carry_over(const struct alternating *alternating, const struct hapt_axis *axis,
                                   struct hapt_arena *arena, struct pair *pair)
{
    const struct hapt_alternation *asked = alternating->asked;
    struct hapt_axis_program *program;
    struct hapt_cut *cut;
    if (alternating_price(alternating, axis, &pair->program, arena, &pair->price) == HAPT_OK) return HAPT_OK;
    hapt_fail_reset();
    HAPT_NEW(cut, arena, asked->sharding->graph->op_count);
    for (int i = 0; i < pair->program.count; i++)
        if (pair->program.instruction[i].op >= 0)
            cut[pair->program.instruction[i].op] = pair->program.instruction[i].cut;
    HAPT_TRY(hapt_axis_program_complete(asked->sharding, asked->axis_index, axis, cut, arena, &program));
    HAPT_TRY(alternating_price(alternating, axis, program, arena, &pair->price));
    pair->program = *program;
    return HAPT_OK;
}

static void keep_better(const struct alternating *alternating, const struct pair *pair, struct pair *best, bool *found)
{
    if (!fits(alternating->asked, &pair->price) || (*found && pair->price.cost_s >= best->price.cost_s)) return;
    *best = *pair;
    *found = true;
}

/* Uses the program at these ratios if that is cheaper than `second`: whole units may undo the gain of the linear
 * program. */
static enum hapt_status try_ratios(const struct alternating *alternating, const struct pair *first, const double *ratio,
                                   struct hapt_arena *arena, struct pair *second)
{
    const struct hapt_alternation *asked = alternating->asked;
    struct pair other = *first;
    HAPT_TRY(make_axis(asked->devices, first->axis.ratio_count, ratio, true, arena, &other.axis));
    if (carry_over(alternating, &other.axis, arena, &other) != HAPT_OK) {
        hapt_fail_reset();
        return HAPT_OK;
    }
    if (fits(asked, &other.price) && (!fits(asked, &second->price) || other.price.cost_s < second->price.cost_s))
        *second = other;
    return HAPT_OK;
}

/* HAP (1) at the axis' ratios, then (2). *next: the axis at the new ratios. HAPT_ERR_INFEASIBLE: no program at
 * these ratios. */
static enum hapt_status take_turn(const struct alternating *alternating, const char *start,
                                  const struct hapt_axis *axis, struct hapt_arena *arena,
                                  struct hapt_alternation_turn *turn, struct pair *first, struct pair *second)
{
    const struct hapt_alternation *asked = alternating->asked;
    double *ratio;
    const double start_s = hapt_time_s();
    *turn = (struct hapt_alternation_turn){.start = start, .segments = axis->ratio_count, .ratios_s = INFINITY};
    *first = (struct pair){.axis = *axis, .origin = start};
    HAPT_TRY(hapt_synthesise(asked->sharding, asked->axis_index, axis, asked->costs, &alternating->options, arena,
                             &first->program, &first->report));
    HAPT_TRY(alternating_price(alternating, axis, &first->program, arena, &first->price));
    turn->program_s = first->price.cost_s;
    turn->synthesis_seconds = hapt_time_s() - start_s;
    *second = *first;
    HAPT_TRY(alternating_solve(alternating, axis, &first->program, &first->price, arena, &ratio, &turn->solver));
    HAPT_TRY(make_axis(asked->devices, axis->ratio_count, ratio, false, arena, &second->axis));
    if (carry_over(alternating, &second->axis, arena, second) != HAPT_OK) {
        hapt_fail_reset();
        second->price.cost_s = INFINITY;
    }
    HAPT_TRY(try_ratios(alternating, first, NULL, arena, second));
    if (asked->power) HAPT_TRY(try_ratios(alternating, first, asked->power, arena, second));
    if (fits(asked, &second->price)) turn->ratios_s = second->price.cost_s;
    turn->solve_seconds = hapt_time_s() - start_s - turn->synthesis_seconds;
    return HAPT_OK;
}

/* Turns from one start; *why: the reason for ending. */
static enum hapt_status alternate_from(const struct alternating *alternating, const char *start, struct hapt_axis axis,
                                       struct hapt_arena *arena, struct hapt_alternation_result *result,
                                       struct pair *best, bool *found, const char **why)
{
    uint64_t hash[HAPT_ALTERNATION_TURNS];
    struct hapt_axis seen[HAPT_ALTERNATION_TURNS];
    *why = "turns";
    for (int t = 0; t < HAPT_ALTERNATION_TURNS; t++) {
        struct hapt_alternation_turn *turn = &result->turn[result->turn_count];
        struct pair first, second;
        if (alternating->progress) hapt_progress_update(alternating->progress, result->turn_count, NULL);
        const enum hapt_status status = take_turn(alternating, start, &axis, arena, turn, &first, &second);
        if (status == HAPT_ERR_INFEASIBLE) { /* nothing fits at these ratios; other starts may fit */
            *why = "infeasible";
            if (isfinite(turn->program_s) && turn->program_s > 0) keep_better(alternating, &first, best, found);
            return HAPT_OK;
        }
        HAPT_TRY(status);
        result->turn_count++;
        keep_better(alternating, &first, best, found);
        if (isfinite(second.price.cost_s)) keep_better(alternating, &second, best, found);
        hash[t] = program_hash(&first.program);
        seen[t] = second.axis;
        if (distance(&second.axis, &axis) < SAME_RATIO) {
            *why = "converged";
            return HAPT_OK;
        }
        for (int s = 0; s < t; s++) {
            if (hash[s] != hash[t] || distance(&seen[s], &seen[t]) >= SAME_RATIO) continue;
            *why = s == t - 1 ? "converged" : "oscillated";
            return HAPT_OK;
        }
        axis = second.axis;
    }
    return HAPT_OK;
}

enum hapt_status hapt_alternation_ratios(const struct hapt_alternation *asked, const struct hapt_axis_program *program,
                                         struct hapt_arena *arena, struct hapt_ratio_regimes *regimes)
{
    enum { TANGENTS = 3 };
    struct hapt_ratio_regimes made = {INFINITY, INFINITY, INFINITY, NULL};
    const struct alternating alternating = start_with(asked);
    struct pair best = {.program = *program};
    best.price.cost_s = INFINITY;
    for (int start = 0; start < (asked->power ? 2 : 1); start++) {
        struct pair pair = {.program = *program};
        HAPT_TRY(make_axis(asked->devices, 1, start ? asked->power : NULL, true, arena, &pair.axis));
        const enum hapt_status status = carry_over(&alternating, &pair.axis, arena, &pair);
        hapt_fail_reset();
        if (status != HAPT_OK || !fits(asked, &pair.price)) continue;
        *(start ? &made.proportional_s : &made.even_s) = pair.price.cost_s;
        if (pair.price.cost_s < best.price.cost_s) best = pair;
        for (int t = 0; t < TANGENTS; t++) {
            struct pair next = pair;
            double *ratio;
            const char *solver;
            HAPT_TRY(alternating_solve(&alternating, &pair.axis, &pair.program, &pair.price, arena, &ratio, &solver));
            HAPT_TRY(make_axis(asked->devices, 1, ratio, false, arena, &next.axis));
            if (carry_over(&alternating, &next.axis, arena, &next) != HAPT_OK || !fits(asked, &next.price)) break;
            if (next.price.cost_s < best.price.cost_s) best = next;
            pair = next;
        }
        hapt_fail_reset();
    }
    if (!isfinite(best.price.cost_s))
        return hapt_fail(HAPT_ERR_INFEASIBLE, NULL,
                         "the program is impossible at even or proportional ratios, or exceeds the memory");
    made.best_s = best.price.cost_s;
    made.ratio = best.axis.ratio;
    *regimes = made;
    return HAPT_OK;
}

enum hapt_status hapt_alternation_data_parallel(const struct hapt_alternation *asked, const double *ratio,
                                                struct hapt_arena *arena, struct hapt_axis *axis,
                                                struct hapt_axis_program *program, struct hapt_program_price *price)
{
    struct hapt_axis_program *made;
    const struct alternating alternating = start_with(asked);
    HAPT_TRY(make_axis(asked->devices, 1, ratio, true, arena, axis));
    HAPT_TRY(hapt_axis_program_data_parallel(asked->sharding, asked->axis_index, axis, arena, &made));
    *program = *made;
    return alternating_price(&alternating, axis, program, arena, price);
}

/* Data-parallel programs are candidates too, since synthesis by segments may miss them. */
static enum hapt_status try_data_parallel(const struct alternating *alternating, const double *ratio,
                                          struct hapt_arena *arena, struct pair *best, bool *found)
{
    struct pair pair = {.origin = "data parallel", .report = {.because = "no synthesised program is cheaper"}};
    const enum hapt_status status =
        hapt_alternation_data_parallel(alternating->asked, ratio, arena, &pair.axis, &pair.program, &pair.price);
    if (status == HAPT_ERR_INFEASIBLE) {
        hapt_fail_reset();
        return HAPT_OK;
    }
    HAPT_TRY(status);
    pair.report.cost_s = pair.price.cost_s;
    keep_better(alternating, &pair, best, found);
    return HAPT_OK;
}

/* Proportional ratios for segments in which data parallelism computes longer than it communicates, even ones for
 * the others (HAP Fig. 2). A program that needs both is not the best at any ratios shared by all segments. False: one
 * vector for all is as good. */
static enum hapt_status mixed_regime_start(const struct alternating *alternating, const int *end, int count,
                                           struct hapt_arena *arena, struct hapt_axis *axis, bool *differ)
{
    const struct hapt_alternation *asked = alternating->asked;
    struct hapt_axis rows;
    struct hapt_axis_program program;
    struct hapt_program_price price;
    bool computes[MOST_SEGMENTS];
    double *ratio;
    *differ = false;
    if (!asked->power) return HAPT_OK;
    if (hapt_alternation_data_parallel(asked, asked->power, arena, &rows, &program, &price) != HAPT_OK) {
        hapt_fail_reset();
        return HAPT_OK;
    }
    HAPT_TRY(alternating_computes(alternating, &rows, &program, end, count, arena, computes));
    HAPT_NEW(ratio, arena, (size_t)count * asked->devices);
    for (int k = 0; k < count; k++) {
        *differ = *differ || computes[k] != computes[0];
        for (int j = 0; j < asked->devices; j++) ratio[k * asked->devices + j] = computes[k] ? rows.ratio[j] : 1;
    }
    return make_axis(asked->devices, count, ratio, false, arena, axis);
}

/* Separate ratios for runs of layers: from the best ratios so far, and from those that suit each run. */
static enum hapt_status add_segments(struct alternating *alternating, struct hapt_arena *arena,
                                     struct hapt_alternation_result *result, struct pair *best, const char **why,
                                     int *end, int *segments)
{
    const struct hapt_alternation *asked = alternating->asked;
    struct pair separate = *best;
    struct hapt_axis axis;
    bool found = true, differ;
    const char *ended;
    int count;
    if (asked->layer_count < 2 || asked->segments < 2) return HAPT_OK;
    HAPT_TRY(alternating_segments(alternating, &best->axis, &best->program, arena, alternating->ratio_of, end, &count));
    alternating->options.ratio_of = alternating->ratio_of;
    for (int start = 0; start < 2; start++) {
        const double before_s = separate.price.cost_s;
        if (start == 0)
            HAPT_TRY(make_axis(asked->devices, count, best->axis.ratio, true, arena, &axis));
        else
            HAPT_TRY(mixed_regime_start(alternating, end, count, arena, &axis, &differ));
        if (start > 0 && !differ) break;
        HAPT_TRY(alternate_from(alternating, start == 0 ? "segments" : "fig. 2", axis, arena, result, &separate, &found,
                                &ended));
        if (separate.price.cost_s < before_s) *why = ended;
    }
    if (separate.price.cost_s < best->price.cost_s) {
        *best = separate;
        *segments = count;
    }
    return HAPT_OK;
}

static enum hapt_status alternate(struct alternating *alternating, struct hapt_arena *arena,
                                  struct hapt_alternation_result *result)
{
    const struct hapt_alternation *asked = alternating->asked;
    const char *const start[] = {"proportional", "even"};
    struct pair best = {.origin = ""};
    bool found = false;
    result->ended = "";
    for (int s = 0; s < 2; s++) {
        struct hapt_axis axis;
        const char *ended;
        const double before_s = found ? best.price.cost_s : INFINITY;
        HAPT_TRY(make_axis(asked->devices, 1, s == 0 ? asked->power : NULL, true, arena, &axis));
        if (s > 0 && result->turn_count > 0 && asked->power) { /* equal devices: even is proportional */
            struct hapt_axis first;
            HAPT_TRY(make_axis(asked->devices, 1, asked->power, true, arena, &first));
            if (distance(&axis, &first) < SAME_RATIO) break;
        }
        HAPT_TRY(alternate_from(alternating, start[s], axis, arena, result, &best, &found, &ended));
        if (found && best.price.cost_s < before_s) result->ended = ended;
        HAPT_TRY(try_data_parallel(alternating, s == 0 ? asked->power : NULL, arena, &best, &found));
    }
    if (!found)
        return hapt_fail(HAPT_ERR_INFEASIBLE, "use more devices or a smaller microbatch",
                         "no program for these %d devices fits their memory and can be shared among them",
                         asked->devices);
    hapt_fail_reset();
    result->segment_count = 1;
    HAPT_NEW(result->segment_end, arena, MOST_SEGMENTS);
    HAPT_TRY(
        add_segments(alternating, arena, result, &best, &result->ended, result->segment_end, &result->segment_count));
    HAPT_NEW(result->ratio_of, arena, asked->sharding->graph->forward_count);
    if (result->segment_count > 1) {
        result->ratio_of = alternating->ratio_of;
    } else {
        result->segment_end[0] = asked->sharding->graph->forward_count;
    }
    result->axis = best.axis;
    result->program = best.program;
    result->price = best.price;
    result->report = best.report;
    result->origin = best.origin;
    return HAPT_OK;
}

enum hapt_status hapt_alternate(const struct hapt_alternation *asked, struct hapt_arena *arena,
                                struct hapt_alternation_result *result)
{
    struct hapt_alternation_result made = {.turn_count = 0};
    struct alternating alternating = start_with(asked);
    const double start_s = hapt_time_s();
    if (asked->devices > HAPT_ALTERNATION_DEVICES || asked->segments > MOST_SEGMENTS)
        return hapt_fail(HAPT_ERR_INPUT, NULL,
                         "an axis of %d devices and %d segments exceeds the limits of %d devices and %d segments",
                         asked->devices, asked->segments, HAPT_ALTERNATION_DEVICES, MOST_SEGMENTS);
    HAPT_NEW(alternating.ratio_of, arena, asked->sharding->graph->forward_count);
    struct hapt_progress progress;
    hapt_progress_init(&progress, NULL, "turns", 2 * HAPT_ALTERNATION_TURNS);
    alternating.progress = &progress;
    const enum hapt_status status = alternate(&alternating, arena, &made);
    hapt_progress_release(&progress);
    HAPT_TRY(status);
    made.seconds = hapt_time_s() - start_s;
    *result = made;
    return HAPT_OK;
}
