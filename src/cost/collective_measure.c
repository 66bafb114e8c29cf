/*
 * Measures collectives over the ranks that will use them (HAP 3.2): every kind at sizes that grow by a factor of four,
 * with even shards and with one rank holding most. A call counts by its slowest rank; of several calls, the quickest
 * counts. Ranks agree on times before any decision that depends on them, so that all take the same branch.
 *
 * A team's collectives run as in its programs: by the devices, or by the host behind a copy from the device and before
 * one to it.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "hapt/collective_cost.h"
#include "hapt/link.h"
#include "hapt/progress.h"
#include "hapt/ratios.h"
#include "hapt/sharding.h"
#include "hapt/team.h"

enum {
    FEWEST_UNITS = 64, /* smallest tensor: 16 KiB */
    GROWTH = 4,
    SIZES = 6, /* largest tensor: 16 MiB */
    MOST_ROUNDS = 25,
    FEW_ROUNDS = 3
};

/* A tensor [units][units] of cells, sharded by rows or by columns with equal shares. */
struct bench {
    struct hapt_collective *collective;
    int ranks, rank;
    size_t units; /* at least one per rank */
    size_t cell;  /* bytes */
    int64_t *first;
    struct hapt_strided *row;         /* [ranks] rows of a rank, in the full tensor */
    struct hapt_strided *give, *take; /* [ranks] all-to-all: parts of this rank's rows and of its columns */
    struct hapt_strided_list *give_list, *take_list;
    double *ratio;
    char *whole, *mine, *other; /* in host memory, or in device memory if devices run the collectives */
    struct hapt_team *team;     /* whose devices run the collectives; NULL: the host does */
    const struct hapt_backend *backend;
    struct hapt_device *device;
    char *staged; /* device memory that the host cannot read, copied from and to; NULL: none */
};

static size_t full_bytes(const struct bench *bench)
{
    return bench->units * bench->units * bench->cell;
}

static void lay_out(struct bench *bench, bool skewed)
{
    const int n = bench->ranks;
    const size_t line = bench->units * bench->cell;
    for (int r = 0; r < n; r++) bench->ratio[r] = (r == 0 && skewed ? 0.5 : 0) + (skewed ? 0.5 : 1) / n;
    HAPT_ASSERT(hapt_split(bench->ratio, n, (int64_t)bench->units, bench->first));
    const size_t own_first = (size_t)bench->first[bench->rank], own = (size_t)bench->first[bench->rank + 1] - own_first;
    for (int r = 0; r < n; r++) {
        const size_t first = (size_t)bench->first[r], units = (size_t)bench->first[r + 1] - first;
        bench->row[r] = (struct hapt_strided){first * line, 1, units * line, units * line};
        bench->give[r] = (struct hapt_strided){first * bench->cell, own, units * bench->cell, line};
        bench->take[r] =
            (struct hapt_strided){first * own * bench->cell, 1, units * own * bench->cell, units * own * bench->cell};
        bench->give_list[r] = (struct hapt_strided_list){1, &bench->give[r]};
        bench->take_list[r] = (struct hapt_strided_list){1, &bench->take[r]};
    }
}

static size_t largest_shard(const struct bench *bench)
{
    int64_t most = 0;
    for (int r = 0; r < bench->ranks; r++)
        if (bench->first[r + 1] - bench->first[r] > most) most = bench->first[r + 1] - bench->first[r];
    return (size_t)most;
}

static const char what[] = "measuring collectives";

static struct hapt_team_collective plan(const struct bench *bench, enum hapt_collective_kind kind)
{
    const size_t units = largest_shard(bench);
    return (struct hapt_team_collective){.kind = kind,
                                         .dtype = HAPT_F32,
                                         .elements = full_bytes(bench) / sizeof(float),
                                         .part = bench->row,
                                         .send = bench->give_list,
                                         .receive = bench->take_list,
                                         .longest = units * units * bench->cell};
}

static enum hapt_status call_on_devices(struct bench *bench, enum hapt_collective_kind kind)
{
    const struct hapt_team_collective planned = plan(bench, kind);
    const bool whole_from = kind == HAPT_COLLECTIVE_ALL_REDUCE || kind == HAPT_COLLECTIVE_REDUCE_SCATTER;
    char *to = kind == HAPT_COLLECTIVE_REDUCE_SCATTER ? bench->mine
               : kind == HAPT_COLLECTIVE_ALL_TO_ALL   ? bench->other
                                                      : bench->whole;
    return hapt_team_run_collective(bench->team, &planned, what, whole_from ? bench->whole : bench->mine, to);
}

static enum hapt_status call_on_host(struct bench *bench, enum hapt_collective_kind kind)
{
    const size_t units = largest_shard(bench);
    switch (kind) {
    case HAPT_COLLECTIVE_ALL_REDUCE:
        return hapt_collective_all_reduce(bench->collective, what, (float *)bench->whole,
                                          full_bytes(bench) / sizeof(float));
    case HAPT_COLLECTIVE_REDUCE_SCATTER:
        return hapt_collective_reduce_scatter(bench->collective, what, HAPT_F32, bench->row, bench->whole, bench->mine);
    case HAPT_COLLECTIVE_ALL_GATHER:
    case HAPT_COLLECTIVE_GROUPED_BROADCAST:
        return hapt_collective_gather_shards(bench->collective, what, kind == HAPT_COLLECTIVE_ALL_GATHER, bench->row,
                                             bench->mine, bench->whole);
    case HAPT_COLLECTIVE_ALL_TO_ALL:
        return hapt_collective_all_to_all(bench->collective, what, units * units * bench->cell, bench->give_list,
                                          bench->mine, bench->take_list, bench->other);
    default: return HAPT_OK;
    }
}

static enum hapt_status copy(const struct bench *bench, void *to, const void *from, size_t bytes)
{
    struct hapt_queue *queue = bench->backend->queue(bench->device, 0);
    HAPT_TRY(bench->backend->copy(queue, to, from, bytes));
    return bench->backend->wait(bench->backend->record(queue));
}

static enum hapt_status call(struct bench *bench, enum hapt_collective_kind kind)
{
    const size_t all = full_bytes(bench),
                 own = (size_t)(bench->first[bench->rank + 1] - bench->first[bench->rank]) * bench->units * bench->cell;
    const bool from_all = kind == HAPT_COLLECTIVE_ALL_REDUCE || kind == HAPT_COLLECTIVE_REDUCE_SCATTER,
               to_own = kind == HAPT_COLLECTIVE_REDUCE_SCATTER || kind == HAPT_COLLECTIVE_ALL_TO_ALL;
    if (bench->team) return call_on_devices(bench, kind);
    if (bench->staged)
        HAPT_TRY(copy(bench, from_all ? bench->whole : bench->mine, bench->staged, from_all ? all : own));
    HAPT_TRY(call_on_host(bench, kind));
    if (!bench->staged) return HAPT_OK;
    const char *result = kind == HAPT_COLLECTIVE_REDUCE_SCATTER ? bench->mine
                         : kind == HAPT_COLLECTIVE_ALL_TO_ALL   ? bench->other
                                                                : bench->whole;
    return copy(bench, bench->staged, result, to_own ? own : all);
}

/* The maximum over all ranks, on all ranks. */
static enum hapt_status agree_on(struct bench *bench, double *value)
{
    float most = (float)*value;
    HAPT_TRY(hapt_collective_combine(bench->collective, what, HAPT_COMBINE_MAXIMUM, HAPT_F32, &most, 1));
    *value = (double)most;
    return HAPT_OK;
}

static enum hapt_status time_call(struct bench *bench, enum hapt_collective_kind kind, double *time_s)
{
    double ready = 0;
    HAPT_TRY(agree_on(bench, &ready)); /* all start together */
    const double start_s = hapt_time_s();
    HAPT_TRY(call(bench, kind));
    *time_s = hapt_time_s() - start_s;
    return agree_on(bench, time_s);
}

/* The quickest of several calls, since disturbances only slow a call down. The first call also pays one-time setup.
 * *spent_s includes all calls. */
static enum hapt_status quickest_call(struct bench *bench, enum hapt_collective_kind kind, double seconds,
                                      double *time_s, double *spent_s)
{
    double first_s, sum_s = 0, least_s = INFINITY;
    HAPT_TRY(time_call(bench, kind, &first_s));
    for (int count = 0; count < MOST_ROUNDS && (count < FEW_ROUNDS || sum_s < seconds); count++) {
        double round_s;
        HAPT_TRY(time_call(bench, kind, &round_s));
        sum_s += round_s;
        least_s = fmin(least_s, round_s);
    }
    *time_s = least_s;
    *spent_s += first_s + sum_s;
    return HAPT_OK;
}

/* Fails on all ranks alike. */
static enum hapt_status agree_on_status(struct bench *bench, enum hapt_status status)
{
    double failed = status != HAPT_OK;
    HAPT_TRY(agree_on(bench, &failed));
    if (failed == 0 || status != HAPT_OK) return status;
    return hapt_fail(HAPT_ERR_MEMORY, NULL, "another rank has no memory to measure collectives");
}

static enum hapt_status prepare_call(struct bench *bench, enum hapt_collective_kind kind, bool skewed)
{
    lay_out(bench, skewed);
    if (!bench->team) return HAPT_OK;
    const struct hapt_team_collective planned = plan(bench, kind);
    return agree_on_status(bench, hapt_team_reserve_collective(bench->team, &planned));
}

static enum hapt_status measure_kind(struct bench *bench, enum hapt_collective_kind kind, double seconds, int *count,
                                     struct hapt_collective_sample *sample)
{
    double spent_s = 0;
    *count = 0;
    size_t cell = sizeof(float);
    for (int size = 0; size < SIZES; size++, cell *= GROWTH) {
        bench->cell = cell;
        hapt_progress_advance(1);
        for (int skewed = 0; skewed < (kind == HAPT_COLLECTIVE_ALL_REDUCE ? 1 : 2); skewed++) {
            struct hapt_collective_sample *next = &sample[(*count)++];
            HAPT_TRY(prepare_call(bench, kind, skewed));
            *next =
                (struct hapt_collective_sample){.bytes = (double)full_bytes(bench),
                                                .largest_share = (double)largest_shard(bench) / (double)bench->units};
            HAPT_TRY(quickest_call(bench, kind, seconds / (2 * SIZES), &next->time_s, &spent_s));
        }
        /* Larger sizes would exceed the time; a line needs three sizes. */
        if (size >= 2 && spent_s + 2 * GROWTH * FEW_ROUNDS * sample[*count - 1].time_s > seconds) break;
    }
    return HAPT_OK;
}

/* True if the host runs the collectives and cannot read the device's memory. */
static bool is_staged(const struct bench *bench)
{
    return !bench->team && bench->backend && bench->backend->pin;
}

static enum hapt_status allocate(const struct bench *bench, size_t bytes, char **block)
{
    void *memory;
    HAPT_TRY(bench->backend->allocate(bench->device, bytes, &memory));
    *block = memory;
    return HAPT_OK;
}

static enum hapt_status reserve_block(const struct bench *bench, size_t bytes, struct hapt_arena *arena, char **block)
{
    void *memory;
    if (bench->team) return allocate(bench, bytes, block);
    if (!is_staged(bench)) {
        HAPT_NEW(*block, arena, bytes);
        return HAPT_OK;
    }
    HAPT_TRY(hapt_backend_pin(bench->backend, bytes, &memory));
    *block = memset(memory, 0, bytes);
    return HAPT_OK;
}

static enum hapt_status reserve(struct bench *bench, struct hapt_arena *arena)
{
    const size_t n = (size_t)bench->ranks;
    size_t most = bench->units * bench->units * sizeof(float);
    for (int size = 1; size < SIZES; size++) most *= GROWTH;
    HAPT_NEW(bench->first, arena, n + 1);
    HAPT_NEW(bench->row, arena, n);
    HAPT_NEW(bench->give, arena, n);
    HAPT_NEW(bench->take, arena, n);
    HAPT_NEW(bench->give_list, arena, n);
    HAPT_NEW(bench->take_list, arena, n);
    HAPT_NEW(bench->ratio, arena, n);
    HAPT_TRY(reserve_block(bench, most, arena, &bench->whole));
    HAPT_TRY(reserve_block(bench, most, arena, &bench->mine));
    HAPT_TRY(reserve_block(bench, most, arena, &bench->other));
    return is_staged(bench) ? allocate(bench, most, &bench->staged) : HAPT_OK;
}

static void release(const struct bench *bench)
{
    char *const data[] = {bench->whole, bench->mine, bench->other};
    for (int k = 0; k < 3; k++) {
        if (data[k] && bench->team) bench->backend->free(bench->device, data[k]);
        if (data[k] && is_staged(bench)) bench->backend->unpin(data[k]);
    }
    if (bench->staged) bench->backend->free(bench->device, bench->staged);
}

static enum hapt_status measure(struct bench *bench, struct hapt_arena *arena, double seconds,
                                struct hapt_collective_model *model,
                                struct hapt_collective_sample (*all)[HAPT_COLLECTIVE_SAMPLES], int *counts)
{
    /* Continue only if every rank has its memory. */
    HAPT_TRY(agree_on_status(bench, reserve(bench, arena)));
    hapt_progress_expect((HAPT_COLLECTIVE_ALL_TO_ALL - HAPT_COLLECTIVE_ALL_REDUCE + 1) * SIZES);
    for (int k = HAPT_COLLECTIVE_ALL_REDUCE; k <= HAPT_COLLECTIVE_ALL_TO_ALL; k++) {
        struct hapt_collective_sample sample[HAPT_COLLECTIVE_SAMPLES];
        int count;
        HAPT_TRY(measure_kind(bench, (enum hapt_collective_kind)k, seconds / 5, &count, sample));
        HAPT_ASSERT(hapt_collective_fit((enum hapt_collective_kind)k, bench->ranks, count, sample, &model->term[k]));
        if (all) memcpy(all[k], sample, (size_t)count * sizeof *sample);
        if (all) counts[k] = count;
    }
    return HAPT_OK;
}

static enum hapt_status run(struct bench *bench, double seconds, struct hapt_collective_model *model,
                            struct hapt_collective_sample (*sample)[HAPT_COLLECTIVE_SAMPLES], int *count)
{
    struct hapt_collective_model made = {.measured = true};
    struct hapt_arena arena;
    enum hapt_status status = HAPT_OK;
    bench->ranks = made.ranks = hapt_collective_ranks(bench->collective);
    bench->rank = hapt_collective_rank(bench->collective);
    bench->units = FEWEST_UNITS;
    while (bench->units < (size_t)bench->ranks) bench->units *= 2;
    hapt_arena_init(&arena);
    if (bench->ranks > 1) status = measure(bench, &arena, seconds, &made, sample, count);
    release(bench);
    hapt_arena_release(&arena);
    if (status == HAPT_OK) *model = made;
    return status;
}

enum hapt_status hapt_collective_measure(struct hapt_collective *collective, double seconds,
                                         struct hapt_collective_model *model,
                                         struct hapt_collective_sample (*sample)[HAPT_COLLECTIVE_SAMPLES], int *count)
{
    struct bench bench = {.collective = collective};
    for (int k = 0; sample && k < HAPT_COLLECTIVE_COUNT; k++) count[k] = 0;
    return run(&bench, seconds, model, sample, count);
}

enum hapt_status hapt_collective_measure_team(struct hapt_team *team, const struct hapt_backend *backend,
                                              struct hapt_device *device, double seconds,
                                              struct hapt_collective_model *model)
{
    struct bench bench = {
        .collective = team->all_ranks, .team = team->devices ? team : NULL, .backend = backend, .device = device};
    return run(&bench, seconds, model, NULL, NULL);
}
