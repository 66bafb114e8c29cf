/* Synthesis from end to end: the problem, the search at several prices of memory, the program and its proof. */
#include <math.h>
#include <string.h>

#include "hapt/env.h"
#include "synthesis_private.h"

struct attempt {
    struct hapt_axis_program program;
    struct hapt_program_price price;
    double worst; /* memory of the fullest device, relative to its limit */
    int device;   /* the fullest device */
};

/* The fullest device: relative to its limit, without limits by bytes. */
static void find_fullest(const struct hapt_axis *axis, const struct hapt_synthesis_options *options,
                         struct attempt *attempt)
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

/* Turns decisions into a program, checks it and prices it device by device. */
static enum hapt_status check_and_price(const struct problem *problem, const struct chosen *chosen,
                                        struct hapt_arena *arena, struct attempt *attempt)
{
    HAPT_TRY(hapt_program_emit(problem, chosen, arena, &attempt->program));
    HAPT_TRY(hapt_axis_program_price(problem->sharding, problem->axis_index, problem->axis, problem->costs,
                                     problem->options, &attempt->program, arena, &attempt->price));
    find_fullest(problem->axis, problem->options, attempt);
    return HAPT_OK;
}

static enum hapt_status try_prices(struct problem *problem, struct hapt_arena *arena, struct hapt_path_chain *chain,
                                   struct hapt_synthesis_report *report, struct attempt *attempt)
{
    struct chosen chosen = {0};
    double cost_s;
    HAPT_TRY(hapt_path_search(problem, problem->arena, chain, &chosen, &cost_s, report));
    HAPT_TRY(check_and_price(problem, &chosen, arena, attempt));
    bool priced = false;
    for (int j = 0; j < problem->classes; j++) priced = priced || problem->multiplier[j] > 0;
    /* The search may only overestimate: segments synchronise more often than the program, and memory has a price. */
    HAPT_ASSERT(priced || attempt->price.cost_s <= cost_s * (1 + 1e-9) + 1e-12);
    return HAPT_OK;
}

static bool is_within(const struct problem *problem, const struct attempt *attempt)
{
    return !problem->options->memory_bytes || attempt->worst <= 1 + 1e-12;
}

/*
 * Lagrange multiplier for memory: on kinds of devices short of memory, bytes cost seconds. The price is raised until
 * the program fits. Then prices between the highest that does not fit and the lowest that fits are tried: the next one
 * makes both programs cost the same. Either a program is found that is cheaper there than both, or there is none.
 * Finally, the paths through every segment from all searches are joined into the cheapest program that fits. Every
 * program is checked exactly.
 */
struct prices {
    struct problem *problem;
    struct hapt_path_chain *chain;
    struct hapt_arena *arena;
    struct hapt_synthesis_report *report;
    bool scarce[MOST_CLASSES];
    double low_price, high_price;
    struct attempt low, high; /* does not fit; fits */
    bool found;
};

static void report_program(const struct problem *problem, const struct attempt *attempt)
{
    const struct hapt_synthesis_options *options = problem->options;
    if (options->found)
        options->found(options->found_context, &attempt->program, attempt->price.cost_s,
                       attempt->price.memory_bytes[attempt->device]);
}

static enum hapt_status try_price(struct prices *prices, double price, struct attempt *attempt)
{
    struct problem *problem = prices->problem;
    for (int j = 0; j < problem->classes; j++) problem->multiplier[j] = prices->scarce[j] ? price : 0;
    HAPT_TRY(try_prices(problem, prices->arena, prices->chain, prices->report, attempt));
    report_program(problem, attempt);
    if (is_within(problem, attempt)) {
        if (!prices->found || attempt->price.cost_s < prices->high.price.cost_s) prices->high = *attempt;
        prices->found = true;
        prices->high_price = price;
    } else {
        prices->low = *attempt;
        prices->low_price = price;
    }
    return HAPT_OK;
}

static double scarce_bytes(const struct prices *prices, const struct attempt *attempt)
{
    double bytes = 0;
    for (int j = 0; j < prices->problem->classes; j++)
        if (prices->scarce[j]) bytes += attempt->price.memory_bytes[prices->problem->representative[j]];
    return bytes;
}

/* Raises the price until a program fits or the memory no longer shrinks. */
static enum hapt_status raise_price(struct prices *prices, double first)
{
    enum { RAISES = 16, IDLE = 3 };
    double least = prices->low.worst;
    for (int round = 0, idle = 0; round < RAISES && !prices->found && idle < IDLE; round++) {
        struct attempt attempt;
        HAPT_TRY(try_price(prices, round == 0 ? first : 8 * prices->low_price, &attempt));
        if (prices->found) break;
        const int class = prices->problem->class_of[attempt.device];
        /* A price many times all other costs has saved all it can. */
        const bool saves =
            attempt.worst < least * (1 - 1e-9) || !prices->scarce[class] || prices->low_price < 16 * first;
        idle = saves ? 0 : idle + 1;
        least = fmin(least, attempt.worst);
        prices->scarce[class] = true;
    }
    return HAPT_OK;
}

static bool same_attempt(const struct attempt *a, const struct attempt *b)
{
    return fabs(a->price.cost_s - b->price.cost_s) <= 1e-12 * b->price.cost_s && a->worst == b->worst;
}

/* The search's memory differs from the program's if segments share kept tensors. Shift the limit by the difference
 * and join the paths again. */
static enum hapt_status join_paths(struct prices *prices)
{
    enum { TRIES = 4 };
    const struct problem *problem = prices->problem;
    double limit[MOST_CLASSES], bytes[MOST_CLASSES];
    for (int j = 0; j < problem->classes; j++) limit[j] = problem->options->memory_bytes[problem->representative[j]];
    for (int k = 0; k < TRIES; k++) {
        struct chosen chosen = {0};
        struct attempt attempt;
        const enum hapt_status status = hapt_path_chain_search(prices->chain, limit, problem->arena, &chosen, bytes);
        if (status == HAPT_ERR_INFEASIBLE) {
            hapt_fail_reset();
            return HAPT_OK;
        }
        HAPT_TRY(status);
        HAPT_TRY(check_and_price(problem, &chosen, prices->arena, &attempt));
        report_program(problem, &attempt);
        const bool within = is_within(problem, &attempt);
        if (within && (!prices->found || attempt.price.cost_s < prices->high.price.cost_s)) prices->high = attempt;
        prices->found = prices->found || within;
        if (within && attempt.worst > 0.995) break;
        for (int j = 0; j < problem->classes; j++) { /* by the fullest device of each kind */
            double most = 0;
            for (int device = 0; device < problem->axis->size; device++)
                if (problem->class_of[device] == j) most = fmax(most, attempt.price.memory_bytes[device]);
            const double allowed = problem->options->memory_bytes[problem->representative[j]] + bytes[j] - most;
            limit[j] = within ? fmax(limit[j], allowed) : fmin(allowed, 0.999 * limit[j]);
        }
    }
    return HAPT_OK;
}

/* Reports programs between the fastest and the one that fits, at limits between the memory of both. */
static enum hapt_status report_between(struct prices *prices, const struct attempt *fastest)
{
    enum { STEPS = 5 };
    const struct problem *problem = prices->problem;
    double limit[MOST_CLASSES], bytes[MOST_CLASSES];
    for (int k = 1; k < STEPS && fastest->worst > 1; k++) {
        struct chosen chosen = {0};
        struct attempt attempt;
        const double part = pow(fastest->worst, (double)k / STEPS); /* of the limit */
        for (int j = 0; j < problem->classes; j++)
            limit[j] = part * problem->options->memory_bytes[problem->representative[j]];
        const enum hapt_status status = hapt_path_chain_search(prices->chain, limit, problem->arena, &chosen, bytes);
        if (status == HAPT_ERR_INFEASIBLE) {
            hapt_fail_reset();
            continue;
        }
        HAPT_TRY(status);
        HAPT_TRY(check_and_price(problem, &chosen, prices->arena, &attempt));
        report_program(problem, &attempt);
    }
    return HAPT_OK;
}

static enum hapt_status search_prices(struct problem *problem, struct hapt_arena *arena,
                                      struct hapt_synthesis_report *report, struct attempt *best)
{
    enum { MOST_BETWEEN = 3 };
    const int between = problem->options->most_prices > 0 ? problem->options->most_prices : MOST_BETWEEN;
    struct prices prices = {.problem = problem, .arena = arena, .report = report, .low = *best};
    double unit = best->price.cost_s / problem->options->memory_bytes[best->device];
    if (!(unit > 0)) unit = 1e-12;
    prices.scarce[problem->class_of[best->device]] = true;
    problem->counts_memory = true;
    HAPT_TRY(hapt_path_chain_create(problem, problem->arena, &prices.chain));
    HAPT_TRY(raise_price(&prices, unit));
    for (int round = 0; prices.found && round < between; round++) {
        const struct attempt low = prices.low, high = prices.high;
        const double more = scarce_bytes(&prices, &low) - scarce_bytes(&prices, &high);
        double price = more > 0 ? (high.price.cost_s - low.price.cost_s) / more : -1;
        struct attempt attempt;
        /* Prices differ by device and searches are truncated, so the computed price may lie outside the interval. */
        if (!(price > prices.low_price && price < prices.high_price))
            price = (prices.low_price + prices.high_price) / 2;
        HAPT_TRY(try_price(&prices, price, &attempt));
        prices.scarce[problem->class_of[attempt.device]] =
            prices.scarce[problem->class_of[attempt.device]] || !is_within(problem, &attempt);
        if (same_attempt(&attempt, &low) || same_attempt(&attempt, &high)) break;
    }
    HAPT_TRY(join_paths(&prices));
    if (problem->options->found) HAPT_TRY(report_between(&prices, best));
    *best = prices.high;
    if (prices.found) return HAPT_OK;
    return hapt_fail(HAPT_ERR_INFEASIBLE, "use more devices, a smaller microbatch or more stages",
                     "no program was found whose weights, gradients and activations fit the memory of %d devices",
                     problem->axis->size);
}

static enum hapt_status check_arguments(const struct hapt_axis *axis, const struct hapt_synthesis_options *options)
{
    if (axis->size < 1 || (axis->ratio && axis->ratio_count < 1))
        return hapt_fail(HAPT_ERR_INPUT, NULL,
                         "an axis needs at least one device and, with ratios, at least one ratio vector");
    for (int j = 0; options->memory_bytes && j < axis->size; j++)
        if (!(options->memory_bytes[j] > 0))
            return hapt_fail(HAPT_ERR_INPUT, NULL, "the memory limit of device %d is not positive", j);
    return HAPT_OK;
}

static void fill_report(const struct problem *problem, const struct attempt *attempt,
                        struct hapt_synthesis_report *report)
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
        report->because = "there are too many kinds of devices, so different ones were treated as equal";
    else if (problem->crowded)
        report->because = "a tensor has more layouts than the search distinguishes";
    else if (priced)
        report->because = "the memory limit was enforced by a price on memory";
    else if (report->segments > 1)
        report->because = "a tensor crosses between segments in one layout only";
    else if (problem->joins_parts)
        report->because = "parts of one gradient are brought to their parameter's layout one by one";
    else if (problem->memory_resource && problem->reduce_count > 0)
        report->because = "sums of gradients over the outer axis end as fast as possible, whatever memory that takes";
    else if (!problem->options->exact)
        report->because = "versions of gradients are made right after their writers";
    else
        report->optimal = true;
}

static enum hapt_status synthesise(const struct hapt_sharding *sharding, int axis_index, const struct hapt_axis *axis,
                                   const struct hapt_spmd_costs *costs, const struct hapt_synthesis_options *options,
                                   struct hapt_arena *scratch, struct hapt_arena *arena, struct attempt *best,
                                   struct hapt_synthesis_report *report)
{
    struct problem problem;
    HAPT_TRY(check_arguments(axis, options));
    HAPT_TRY(hapt_problem_build(sharding, axis_index, axis, costs, options, scratch, &problem));
    HAPT_TRY(try_prices(&problem, arena, NULL, report, best));
    report_program(&problem, best);
    if (!is_within(&problem, best)) HAPT_TRY(search_prices(&problem, arena, report, best));
    fill_report(&problem, best, report);
    return HAPT_OK;
}

enum hapt_status hapt_synthesise(const struct hapt_sharding *sharding, int axis_index, const struct hapt_axis *axis,
                                 const struct hapt_spmd_costs *costs, const struct hapt_synthesis_options *options,
                                 struct hapt_arena *arena, struct hapt_axis_program *program,
                                 struct hapt_synthesis_report *report)
{
    struct hapt_arena scratch;
    struct hapt_synthesis_report made = {.because = ""};
    struct attempt best = {.device = 0};
    const double start_s = hapt_time_s();
    hapt_arena_init(&scratch);
    const enum hapt_status status =
        synthesise(sharding, axis_index, axis, costs, options, &scratch, arena, &best, &made);
    hapt_arena_release(&scratch);
    HAPT_TRY(status);
    made.seconds = hapt_time_s() - start_s;
    *program = best.program;
    if (report) *report = made;
    return HAPT_OK;
}
