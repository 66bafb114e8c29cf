/* Synthesis from end to end: the problem, the search under the price of memory, the program, its proof. */
#include <math.h>
#include <string.h>

#include "hapt/env.h"
#include "synthesis_private.h"

struct attempt {
    struct hapt_axis_program program;
    struct hapt_program_price price;
    double worst; /* part of its limit that the fullest device needs */
    int device;   /* that one */
};

/* With limits the fullest device by its limit, else by bytes. */
static void judge_memory(const struct hapt_axis *axis, const struct hapt_synthesis_options *options, struct attempt *attempt)
{
    attempt->worst = -1;
    for (int j = 0; j < axis->size; j++) {
        const double bytes = attempt->price.memory_bytes[j];
        const double part = options->memory_bytes ? bytes / options->memory_bytes[j] : bytes;
        if (part <= attempt->worst) continue;
        attempt->worst = part;
        attempt->device = j;
    }
}

static enum hapt_status try_prices(struct problem *problem, struct hapt_arena *arena, struct hapt_synthesis_report *report,
                                   struct attempt *attempt)
{
    struct chosen chosen = {0};
    double cost_s;
    HAPT_TRY(hapt_path_search(problem, problem->arena, &chosen, &cost_s, report));
    HAPT_TRY(hapt_program_emit(problem, &chosen, arena, &attempt->program));
    HAPT_TRY(hapt_axis_program_price(problem->sharding, problem->axis_index, problem->axis, problem->costs, problem->options, &attempt->program, arena,
                                     &attempt->price));
    bool priced = false;
    for (int j = 0; j < problem->classes; j++) priced = priced || problem->multiplier[j] > 0;
    /* Segments synchronise more often than the program does, memory has a price: the search may only be dearer. */
    HAPT_ASSERT(priced || attempt->price.cost_s <= cost_s * (1 + 1e-9) + 1e-12);
    judge_memory(problem->axis, problem->options, attempt);
    return HAPT_OK;
}

static bool is_within(const struct problem *problem, const struct attempt *attempt)
{
    return !problem->options->memory_bytes || attempt->worst <= 1 + 1e-12;
}

/*
 * Memory by a Lagrange multiplier: bytes of the kinds of devices that lack memory cost seconds. The price is raised until the program
 * fits, then bisected; every program is checked exactly.
 */
static enum hapt_status search_prices(struct problem *problem, struct hapt_arena *arena, struct hapt_synthesis_report *report,
                                      struct attempt *best)
{
    bool scarce[MOST_CLASSES] = {false}, found = false;
    double low = 0, high = 0, unit;
    enum { RAISES = 24, HALVINGS = 12 };
    unit = best->price.cost_s / problem->options->memory_bytes[best->device];
    if (!(unit > 0)) unit = 1e-12;
    scarce[problem->class_of[best->device]] = true;
    for (int round = 0, halvings = 0; round < RAISES || halvings < HALVINGS; round++) {
        struct attempt attempt;
        const double price = found ? (low + high) / 2 : round == 0 ? unit / 16 : 4 * low;
        if (!found && round >= RAISES) break;
        for (int j = 0; j < problem->classes; j++) problem->multiplier[j] = scarce[j] ? price : 0;
        problem->counts_memory = true;
        HAPT_TRY(try_prices(problem, arena, report, &attempt));
        if (is_within(problem, &attempt)) {
            if (!found || attempt.price.cost_s < best->price.cost_s) *best = attempt;
            found = true;
            high = price;
        } else {
            scarce[problem->class_of[attempt.device]] = true;
            low = price;
        }
        if (found && ++halvings > HALVINGS) break;
    }
    if (found) return HAPT_OK;
    return hapt_fail(HAPT_ERR_INFEASIBLE, "use more devices, a smaller microbatch or more stages",
                     "no program was found whose weights, gradients and activations fit the memory of %d devices", problem->axis->size);
}

static enum hapt_status check_arguments(const struct hapt_axis *axis, const struct hapt_synthesis_options *options)
{
    if (axis->size < 1 || (axis->ratio && axis->ratio_count < 1))
        return hapt_fail(HAPT_ERR_INPUT, NULL, "an axis has at least one device and, with ratios, at least one vector of them");
    for (int j = 0; options->memory_bytes && j < axis->size; j++)
        if (!(options->memory_bytes[j] > 0)) return hapt_fail(HAPT_ERR_INPUT, NULL, "the memory limit of device %d is not positive", j);
    return HAPT_OK;
}

static void fill_report(const struct problem *problem, const struct attempt *attempt, struct hapt_synthesis_report *report)
{
    bool priced = false;
    for (int j = 0; j < problem->classes; j++) priced = priced || problem->multiplier[j] > 0;
    report->cost_s = attempt->price.cost_s;
    report->compute_s = attempt->price.compute_s;
    report->communicate_s = attempt->price.communicate_s;
    report->end_s = attempt->price.end_s;
    report->stages = attempt->price.stages;
    report->memory_bytes = attempt->price.memory_bytes[attempt->device];
    if (report->because[0] != '\0') return;
    if (problem->merged)
        report->because = "devices of too many kinds count as alike";
    else if (priced)
        report->because = "memory is kept by a price on it";
    else if (report->segments > 1)
        report->because = "tensors cross from segment to segment in one layout";
    else if (problem->joins_parts)
        report->because = "parts of one gradient are brought to their parameter one by one";
    else if (problem->memory_resource && problem->reduce_count > 0)
        report->because = "sums of gradients over the outer axis end as fast as can be, whatever memory that takes";
    else if (!problem->options->exact)
        report->because = "versions of gradients are made behind their writers";
    else
        report->optimal = true;
}

static enum hapt_status synthesise(const struct hapt_sharding *sharding, int axis_index, const struct hapt_axis *axis,
                                   const struct hapt_spmd_costs *costs,
                                   const struct hapt_synthesis_options *options, struct hapt_arena *scratch, struct hapt_arena *arena,
                                   struct attempt *best, struct hapt_synthesis_report *report)
{
    struct problem problem;
    HAPT_TRY(check_arguments(axis, options));
    HAPT_TRY(hapt_problem_build(sharding, axis_index, axis, costs, options, scratch, &problem));
    HAPT_TRY(try_prices(&problem, arena, report, best));
    if (!is_within(&problem, best)) HAPT_TRY(search_prices(&problem, arena, report, best));
    fill_report(&problem, best, report);
    return HAPT_OK;
}

enum hapt_status hapt_synthesise(const struct hapt_sharding *sharding, int axis_index, const struct hapt_axis *axis,
                                 const struct hapt_spmd_costs *costs,
                                 const struct hapt_synthesis_options *options, struct hapt_arena *arena,
                                 struct hapt_axis_program *program, struct hapt_synthesis_report *report)
{
    struct hapt_arena scratch;
    struct hapt_synthesis_report made = {.because = ""};
    struct attempt best = {.device = 0};
    const double start_s = hapt_time_s();
    hapt_arena_init(&scratch);
    const enum hapt_status status = synthesise(sharding, axis_index, axis, costs, options, &scratch, arena, &best, &made);
    hapt_arena_release(&scratch);
    HAPT_TRY(status);
    made.seconds = hapt_time_s() - start_s;
    *program = best.program;
    if (report) *report = made;
    return HAPT_OK;
}
