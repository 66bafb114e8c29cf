/*
 * Megatron: equally many blocks per stage, one submesh shape and one (dp, tp) everywhere, all devices used.
 *
 * The fastest simulated plan over all shapes and orders of subclusters wins, under 1F1B and, where the microbatches are
 * a multiple of the stages, under the interleaved schedule with 2 to 8 model chunks per device (arXiv 2104.04473, 2.2).
 * If the blocks do not divide evenly, stages differ by one block. Megatron itself would refuse, so this makes the
 * baseline stronger. Transfers overlap computation, as HAPT 6.1.2 assumes for it through data parallelism.
 *
 * Data parallelism inside a stage stands for pipelines that visit the subclusters alike. Megatron can also place
 * pipelines one after another in the order of ranks (--use-tp-pp-dp-mapping), each then mostly on devices of one kind.
 * Such pipelines are priced only (struct hapt_pipelines), because hapt cannot run them. They have equally many stages
 * and microbatches, and gradients are reduced over them at the end.
 *
 * Recomputation is part of a shape: all stages recompute the same share of their blocks, as with Megatron's flags. The
 * profile has such shapes only where devices lack memory (--recompute auto).
 *
 * Not modelled: sequence and context parallelism, a reduction that begins in the last backward passes.
 *
 * Reproduces arXiv 2104.04473, 2.2: with equal stages and free links, the bubble is exactly (p - 1) / (v m) of the
 * ideal time, for p stages, m microbatches and v chunks per device, v = 1 under 1F1B
 * (tests/unit/baselines_published.c).
 */
#include "even_rows.h"
#include "hapt/search.h"
#include "pipelines.h"

#include <string.h>

enum { MOST_CHUNKS = 8, MOST_PIPELINE_ORDERS = 4 };

struct trial {
    const struct hapt_profile *profile;
    const struct hapt_strategy_options *options;
    int *unit_end, *end; /* [L] */
    struct hapt_arena scratch;
    struct selection selection;
    struct hapt_arena *result;
    struct hapt_pipelines *pipelines;
};

/* Stages of `loops` chunks per submesh: chunk i takes units [i U / n, (i + 1) U / n) of n. */
static enum hapt_status make_plan(struct trial *trial, const struct even_row *row,
                                  const struct hapt_search_options *options, int units, int loops,
                                  struct hapt_plan **plan)
{
    struct even_row chunks = *row;
    const int64_t n = (int64_t)row->count * loops;
    chunks.count = (int)n;
    HAPT_NEW(chunks.subcluster, &trial->scratch, n);
    for (int64_t i = 0; i < n; i++) {
        chunks.subcluster[i] = row->subcluster[i % row->count];
        trial->end[i] = trial->unit_end[(i + 1) * units / n - 1];
    }
    return even_rows_plan(&chunks, options, trial->end, trial->result, plan);
}

/* The row under the interleaved schedule. */
static enum hapt_status enter_interleaved(struct trial *trial, const struct even_row *row,
                                          const struct hapt_search_options *options, int units, int loops,
                                          struct selection *selection)
{
    struct hapt_plan *plan;
    HAPT_TRY(make_plan(trial, row, options, units, loops, &plan));
    plan->schedule = HAPT_SCHEDULE_INTERLEAVED;
    enum hapt_status status = hapt_plan_fold(plan, row->count, false);
    if (status == HAPT_OK) status = hapt_plan_price_tables(row->profile, plan);
    if (status == HAPT_OK) status = hapt_plan_choose_transfer_slots(plan);
    if (status == HAPT_OK) return selection_enter_launches(selection, plan);
    if (status == HAPT_ERR_USAGE) { /* its lists do not run */
        hapt_fail_reset();
        return HAPT_OK;
    }
    return selection_miss(selection, status);
}

static enum hapt_status enter(struct trial *trial, const struct even_row *row,
                              const struct hapt_search_options *options, int units, struct selection *selection)
{
    const int S = row->count;
    struct hapt_plan *plan;
    if (units < S) return HAPT_OK;
    HAPT_TRY(make_plan(trial, row, options, units, 1, &plan));
    HAPT_TRY(selection_enter(selection, plan, NULL));
    if (S == 1 || options->microbatches % S != 0) return HAPT_OK;
    for (int loops = 2; loops <= MOST_CHUNKS && S * loops <= units; loops++)
        HAPT_TRY(enter_interleaved(trial, row, options, units, loops, selection));
    return HAPT_OK;
}

/* Units of a row of S stages: blocks if known, else layers: once by their number, once by their work. 0: none. */
static enum hapt_status find_units(struct trial *trial, int pass, int stages, int *units)
{
    bool *boundary;
    const bool *block_end = trial->options->block_end;
    *units = 0;
    if (pass > 0 && stages > trial->profile->layer_count) return HAPT_OK;
    if (pass > 0) {
        HAPT_TRY(hapt_plan_grid(trial->profile, stages, NULL, &trial->scratch, &boundary));
        block_end = boundary;
    }
    *units = even_rows_units(trial->profile, block_end, trial->unit_end);
    return HAPT_OK;
}

static enum hapt_status enter_row(void *context, const struct even_row *row)
{
    struct trial *trial = context;
    int units;
    hapt_arena_reset(&trial->scratch);
    HAPT_TRY(find_units(trial, row->pass, row->count, &units));
    return enter(trial, row, &trial->options->search, units, &trial->selection);
}

/* ---- Pipelines one after another ---- */

/* The row as `count` pipelines of equally many stages. */
static enum hapt_status enter_pipelines(struct trial *trial, const struct even_row *row, int count, int units)
{
    struct hapt_search_options options = trial->options->search;
    struct even_row own = *row;
    struct hapt_plan **plan;
    struct hapt_pipelines *priced;
    options.microbatches /= count;
    own.count = row->count / count;
    HAPT_NEW(plan, &trial->scratch, count);
    for (int p = 0; p < count; p++) {
        const size_t bytes = (size_t)own.count * sizeof *own.subcluster;
        struct selection selection = selection_open(row->profile, trial->result);
        own.subcluster = row->subcluster + p * own.count;
        if (p > 0 && memcmp(own.subcluster, own.subcluster - own.count, bytes) == 0) {
            plan[p] = plan[p - 1];
            continue;
        }
        HAPT_TRY(enter(trial, &own, &options, units, &selection));
        plan[p] = selection.best;
        if (!plan[p]) return HAPT_OK;
    }
    HAPT_TRY(pipelines_price(row->profile, count, plan, trial->result, &priced));
    pipelines_keep(priced, &trial->pipelines);
    return HAPT_OK;
}

static enum hapt_status enter_row_pipelines(void *context, const struct even_row *row)
{
    struct trial *trial = context;
    const int B = trial->options->search.microbatches;
    int units;
    for (int i = 0; i + 1 < row->count && row->profile->cluster_count > MOST_PIPELINE_ORDERS; i++)
        if (row->subcluster[i] > row->subcluster[i + 1]) return HAPT_OK; /* too many orders */
    for (int count = 2; count <= row->count; count++) {
        if (row->count % count != 0 || B % count != 0) continue;
        hapt_arena_reset(&trial->scratch);
        HAPT_TRY(find_units(trial, row->pass, row->count / count, &units));
        HAPT_TRY(enter_pipelines(trial, row, count, units));
    }
    return HAPT_OK;
}

/* ---- Both ---- */

static enum hapt_status each_row(struct trial *trial, const struct hapt_profile *profile,
                                 const struct hapt_strategy_options *options, struct hapt_arena *result,
                                 enum hapt_status (*take)(void *context, const struct even_row *row))
{
    *trial = (struct trial){
        .profile = profile, .options = options, .selection = selection_open(profile, result), .result = result};
    HAPT_TRY(need_equal_nodes(profile, HAPT_STRATEGY_MEGATRON));
    HAPT_NEW(trial->unit_end, result, profile->layer_count);
    HAPT_NEW(trial->end, result, profile->layer_count);
    hapt_arena_init(&trial->scratch);
    const enum hapt_status status = even_rows_each(profile, true, options->block_end ? 1 : 2, take, trial);
    hapt_arena_release(&trial->scratch);
    return status;
}

enum hapt_status plan_megatron(const struct hapt_profile *profile, const struct hapt_strategy_options *options,
                               struct hapt_arena *result, struct hapt_plan **plan)
{
    struct trial trial;
    HAPT_TRY(each_row(&trial, profile, options, result, enter_row));
    return selection_close(&trial.selection, HAPT_STRATEGY_MEGATRON, plan);
}

enum hapt_status pipelines_megatron(const struct hapt_profile *profile, const struct hapt_strategy_options *options,
                                    struct hapt_arena *result, struct hapt_pipelines **best)
{
    struct trial trial;
    const enum hapt_status status = each_row(&trial, profile, options, result, enter_row_pipelines);
    *best = NULL;
    if (status == HAPT_ERR_INFEASIBLE) { /* unequal nodes */
        hapt_fail_reset();
        return HAPT_OK;
    }
    HAPT_TRY(status);
    *best = trial.pipelines;
    return HAPT_OK;
}
