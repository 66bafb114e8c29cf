/*
 * Pfeife: data parallelism inside a stage, a pipeline with prefetched forward passes, and boundaries from its beam
 * under its own simulation (Pfeife 3.4, Algorithm 1). All devices are used.
 *
 * Pfeife profiles one device and takes all for equal, so a stage has the mean time of the subclusters; it measures the
 * links. Every shape of submeshes, order of the subclusters and prefetch b = 0, 1, 2, 4, 8 is tried; the fastest
 * simulated plan on the true devices wins. Stages are cut between operators, here between the profile's layers.
 *
 * Not modelled: loops (N_l = 1 only); tensor parallelism, which it does not have.
 *
 * Reproduces Fig. 4's cuts (6, 11) (tests/unit/baselines.c). The beam itself, with loops, reproduces Table 5's nine
 * estimates within 2 % (tests/unit/pfeife.c).
 */
#include "even_rows.h"

#include <math.h>

#include "hapt/chunk_cuts.h"

/* The largest prefetch that is tried. */
enum { MOST_PREFETCH = 8 };
/* Of a beam, in simulated microbatches times stages: about a tenth of a second. */
#define BEAM_WORK 2e6

struct trial {
    struct selection selection;
    const struct hapt_strategy_options *options;
    struct hapt_arena scratch;
};

/* Pfeife's costs of a stage. The table holds the mean stage of each range of layers. */
struct belief {
    const struct even_row *row;
    const struct even_stage *stage; /* [L][L] layers [i, j + 1) */
};

static void believe(const void *context, int chunk, int first, int end, struct hapt_chunk_costs *costs)
{
    const struct belief *belief = context;
    const struct even_row *row = belief->row;
    const struct hapt_profile *profile = row->profile;
    const struct even_stage *stage = &belief->stage[hapt_profile_index(profile, 0, first, end - 1)];
    costs->forward_s = isnan(stage->stage_s) ? INFINITY : stage->forward_s;
    costs->backward_s = fmax(0, stage->stage_s - stage->forward_s);
    costs->step_s = stage->step_s;
    costs->parameter_bytes = stage->parameter_bytes;
    costs->activation_bytes = stage->activation_bytes;
    if (chunk + 1 < row->count)
        costs->comm_s = hapt_profile_comm_s(profile, end - 1, row->subcluster[chunk], row->subcluster[chunk + 1]);
}

static enum hapt_status make_table(const struct even_row *row, struct hapt_arena *scratch,
                                   const struct even_stage **table)
{
    const struct hapt_profile *profile = row->profile;
    struct even_stage *made;
    HAPT_NEW(made, scratch, hapt_profile_index(profile, 1, 0, 0));
    for (int i = 0; i < profile->layer_count; i++)
        for (int j = i; j < profile->layer_count; j++)
            made[hapt_profile_index(profile, 0, i, j)] = even_rows_mean(row, i, j + 1);
    *table = made;
    return HAPT_OK;
}

/* The beam with b prefetched forward passes. N_i = min(B, S - i + min(b, S - i - 1)), i from 0. */
static enum hapt_status enter_prefetch(struct trial *trial, const struct belief *belief, const double *memory_bytes,
                                       int prefetch)
{
    const struct even_row *row = belief->row;
    const int S = row->count, B = trial->options->search.microbatches;
    struct hapt_schedule *schedule;
    struct hapt_chunk_cuts_found found;
    struct hapt_plan *plan;
    int *launches;
    HAPT_NEW(launches, &trial->scratch, S);
    for (int i = 0; i < S; i++) {
        const int behind = S - i - 1, ahead = behind + 1 + (prefetch < behind ? prefetch : behind);
        launches[i] = ahead < B ? ahead : B;
    }
    HAPT_TRY(hapt_schedule_build(HAPT_SCHEDULE_H1F1B, S, B, launches, NULL, &trial->scratch, &schedule));
    const struct hapt_chunk_cuts problem = {.layer_count = row->profile->layer_count,
                                            .schedule = schedule,
                                            .chunk = believe,
                                            .context = belief,
                                            .memory_bytes = memory_bytes,
                                            .transfer_slots = HAPT_TRANSFER_SLOTS,
                                            .most_simulations = 1 + (int64_t)(BEAM_WORK / ((double)B * S))};
    const enum hapt_status status = hapt_chunk_cuts_beam(&problem, NULL, &trial->scratch, &found);
    if (status != HAPT_OK) return selection_miss(&trial->selection, status);
    HAPT_TRY(even_rows_plan(row, &trial->options->search, found.end, trial->selection.result, &plan));
    for (int i = 0; i < S; i++) plan->stage[i].warmup = launches[i];
    return selection_enter_launches(&trial->selection, plan);
}

static enum hapt_status enter_row(void *context, const struct even_row *row)
{
    struct trial *trial = context;
    struct belief belief = {.row = row};
    double *memory_bytes;
    if (row->profile->layer_count < row->count) return HAPT_OK;
    hapt_arena_reset(&trial->scratch);
    HAPT_TRY(make_table(row, &trial->scratch, &belief.stage));
    HAPT_NEW(memory_bytes, &trial->scratch, row->count);
    for (int i = 0; i < row->count; i++)
        memory_bytes[i] = row->profile->cluster[row->subcluster[i]].device_memory_bytes;
    for (int b = 0; b < row->count && b <= MOST_PREFETCH; b = b > 0 ? 2 * b : 1)
        HAPT_TRY(enter_prefetch(trial, &belief, memory_bytes, b));
    return HAPT_OK;
}

enum hapt_status plan_pfeife(const struct hapt_profile *profile, const struct hapt_strategy_options *options,
                             struct hapt_arena *result, struct hapt_plan **plan)
{
    struct trial trial = {.selection = selection_open(profile, result), .options = options};
    HAPT_TRY(need_equal_nodes(profile, HAPT_STRATEGY_PFEIFE));
    hapt_arena_init(&trial.scratch);
    const enum hapt_status status = even_rows_each(profile, false, 1, enter_row, &trial);
    hapt_arena_release(&trial.scratch);
    HAPT_TRY(status);
    return selection_close(&trial.selection, HAPT_STRATEGY_PFEIFE, plan);
}
