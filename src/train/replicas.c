/* Hashes the weights that several ranks hold, and finds the rank that differs. */
#include "replicas.h"

#include <stdio.h>
#include <string.h>

#include "hapt/heartbeat.h"
#include "runtime.h"

enum { BLOCK = 64 }; /* parameters per message: a few kB from each rank */

/* A rank's copy of one parameter. part 0: none. Equal parts must have equal hashes. */
struct replica_mark {
    uint64_t part, hash;
};

/* The holder (record of a stage on a rank) that differs, or two that differ from each other. */
struct mismatch {
    int rank, other, copies, ranks; /* rank -1: none; other -1: `rank` is outvoted; ranks: that differ */
    int parameter, parameters;      /* the first parameter, and their number */
};

enum hapt_status replicas_prepare(struct replicas *replicas, struct worker *worker, int64_t every)
{
    const struct hapt_graph *graph = worker->graph;
    size_t largest = 1;
    *replicas = (struct replicas){.worker = worker, .every = every, .checked = -1};
    if (every == 0) return HAPT_OK;
    HAPT_NEW(replicas->parameter, worker->arena, graph->tensor_count);
    for (int t = 0; t < graph->tensor_count; t++) {
        if (graph->tensor[t].kind != HAPT_TENSOR_PARAMETER) continue;
        replicas->parameter[replicas->count++] = t;
        for (int s = 0; s < worker->stage_count && worker->runtime->computes; s++) {
            const struct stage *stage = &worker->stage[s];
            if (stage->program->local[t] < 0) continue;
            const size_t elements = hapt_engine_tensor_bytes(stage->engine, t) / sizeof(float);
            if (elements > largest) largest = elements;
        }
    }
    replicas->holders = worker->env->world_size * worker->most;
    HAPT_NEW(replicas->value, worker->arena, (int64_t)largest);
    HAPT_NEW(replicas->mine, worker->arena, (int64_t)worker->most * BLOCK);
    HAPT_NEW(replicas->all, worker->arena, (int64_t)replicas->holders * BLOCK);
    return HAPT_OK;
}

/* Hash of the arithmetic: updates round alike on devices of one kind, and on CPUs that all have fused multiply-add or
 * all lack it. */
static uint64_t arithmetic(const struct worker *worker)
{
    const int subcluster = worker->cluster->subcluster_of_rank[worker->env->world_rank];
    const char *device = subcluster < 0 ? "" : worker->cluster->subcluster[subcluster].device.name;
    int fuses = -1;
#ifdef __x86_64__
    fuses = __builtin_cpu_supports("fma") != 0;
#endif
    uint64_t hash = hapt_hash(1, worker->backend->name, strlen(worker->backend->name));
    hash = hapt_hash(hash, device, strlen(device));
    return hapt_hash(hash, &fuses, sizeof fuses);
}

/* True if the weights that kernels read are compared, not their masters. */
static bool compares_weights(const struct stage *stage, int parameter)
{
    return stage->worker->graph->tensor[parameter].dtype != HAPT_F32 &&
           (stage->worker->plan->host_state || hapt_engine_is_sliced(stage->engine, parameter, -1));
}

/* Identifies the part of the parameter that this rank holds, and what of it is compared. */
static uint64_t part_of(const struct stage *stage, int parameter)
{
    struct hapt_box box;
    stage_box(stage->worker, stage->chunk, stage->rank, parameter, &box);
    const bool weights = compares_weights(stage, parameter);
    uint64_t hash = hapt_hash(arithmetic(stage->worker), &weights, sizeof weights);
    hash = hapt_hash(hash, &box.dims, sizeof box.dims);
    for (int d = 0; d < box.dims; d++) hash = hapt_hash(hash, box.run[d], (size_t)box.runs[d] * sizeof box.run[d][0]);
    return hash | 1;
}

static enum hapt_status mark(struct replicas *replicas, int first, int count)
{
    const struct worker *worker = replicas->worker;
    memset(replicas->mine, 0, (size_t)worker->most * BLOCK * sizeof *replicas->mine);
    for (int s = 0; s < worker->stage_count && worker->runtime->computes; s++) {
        const struct stage *stage = &worker->stage[s];
        for (int i = 0; i < count; i++) {
            const int parameter = replicas->parameter[first + i];
            if (stage->program->local[parameter] < 0) continue;
            if (hapt_engine_shards_weights(stage->engine)) continue; /* no two ranks have the same */
            size_t bytes = hapt_engine_tensor_bytes(stage->engine, parameter);
            /* A rank may have a slice of the masters alone. All have the weights that they compute with. */
            if (compares_weights(stage, parameter))
                HAPT_TRY(hapt_engine_get_weight(stage->engine, parameter, replicas->value, &bytes));
            else
                HAPT_TRY(hapt_engine_get(stage->engine, parameter, -1, replicas->value));
            const uint64_t hash = hapt_hash(1, replicas->value, bytes);
            replicas->mine[s * BLOCK + i] = (struct replica_mark){part_of(stage, parameter), hash};
        }
    }
    return HAPT_OK;
}

static const struct replica_mark *mark_of(const struct replicas *replicas, int holder, int i)
{
    return &replicas->all[(size_t)holder * BLOCK + (size_t)i];
}

/* True for the first rank with that part. Ranks with equal parts are mostly neighbours. */
static bool leads(const struct replicas *replicas, int rank, int i)
{
    const uint64_t part = mark_of(replicas, rank, i)->part;
    for (int r = rank - 1; r >= 0 && part != 0; r--)
        if (mark_of(replicas, r, i)->part == part) return false;
    return part != 0;
}

/* Counts the ranks with the part of `first`, and those of them with the majority's hash, if there is a majority (Boyer
 * and Moore 1991). */
static int count_copies(const struct replicas *replicas, int first, int i, uint64_t *hash, int *alike)
{
    const uint64_t part = mark_of(replicas, first, i)->part;
    int copies = 0, lead = 0;
    *hash = 0;
    *alike = 0;
    for (int r = first; r < replicas->holders; r++) {
        const struct replica_mark *its = mark_of(replicas, r, i);
        if (its->part != part) continue;
        if (lead == 0) *hash = its->hash;
        lead += its->hash == *hash ? 1 : -1;
        copies++;
    }
    for (int r = first; r < replicas->holders; r++)
        *alike += mark_of(replicas, r, i)->part == part && mark_of(replicas, r, i)->hash == *hash;
    return copies;
}

/* The first rank at or after `first` with its part and another hash. */
static int first_unlike(const struct replicas *replicas, int first, int i, uint64_t hash)
{
    const uint64_t part = mark_of(replicas, first, i)->part;
    int r = first;
    while (mark_of(replicas, r, i)->part != part || mark_of(replicas, r, i)->hash == hash) r++;
    return r;
}

/* Counts the ranks with the part of `first`. The chunks of a rank may hold copies of a parameter that is tied. */
static int count_ranks(const struct replicas *replicas, int first, int i)
{
    const uint64_t part = mark_of(replicas, first, i)->part;
    const int most = replicas->worker->most;
    int ranks = 0, last = -1;
    for (int r = first; r < replicas->holders; r++) {
        if (mark_of(replicas, r, i)->part != part || r / most == last) continue;
        last = r / most;
        ranks++;
    }
    return ranks;
}

/* Judges parameter i of the block over all ranks; returns the largest number of ranks with copies of a part. A rank
 * against a majority takes precedence over two that differ. */
static int judge(const struct replicas *replicas, int parameter, int i, struct mismatch *mismatch)
{
    struct mismatch found = {.rank = -1};
    int most = 0;
    for (int r = 0; r < replicas->holders; r++) {
        uint64_t hash;
        int alike;
        if (!leads(replicas, r, i)) continue;
        const int copies = count_copies(replicas, r, i, &hash, &alike);
        const bool majority = 2 * alike > copies;
        const int ranks = count_ranks(replicas, r, i);
        if (ranks > most) most = ranks;
        if (alike == copies || (found.rank >= 0 && (found.other < 0 || !majority))) continue;
        const int unlike = first_unlike(replicas, r, i, majority ? hash : mark_of(replicas, r, i)->hash);
        found =
            majority
                ? (struct mismatch){.rank = unlike,
                                    .other = -1,
                                    .copies = copies,
                                    .ranks = copies - alike,
                                    .parameter = parameter}
                : (struct mismatch){.rank = r, .other = unlike, .copies = copies, .ranks = 2, .parameter = parameter};
    }
    if (found.rank < 0) return most;
    const int parameters = mismatch->parameters + 1;
    if (mismatch->rank < 0 || (mismatch->other >= 0 && found.other < 0)) *mismatch = found;
    mismatch->parameters = parameters;
    return most;
}

static int stage_of(const struct worker *worker, int holder)
{
    for (int c = 0; c < worker->plan->stage_count; c++)
        for (int r = 0; r < stage_size(worker, c); r++)
            if (worker_record(worker, c, r) == (size_t)holder) return c;
    return -1;
}

static enum hapt_status report_mismatch(const struct replicas *replicas, int64_t done, const struct mismatch *mismatch)
{
    const struct worker *worker = replicas->worker;
    const int rank = mismatch->rank / worker->most, other = mismatch->other / worker->most;
    const char *name = worker->graph->tensor[mismatch->parameter].name;
    static const char *const hint = "a host's memory or processor may be faulty: remove %s from the job and start "
                                    "again with --resume yes; no checkpoint holds these weights";
    char more[32] = "", ranks[64] = "", do_this[192];
    snprintf(do_this, sizeof do_this, hint, mismatch->other >= 0 ? "each of the two in turn" : "that host");
    if (mismatch->parameters > 1) snprintf(more, sizeof more, " (and %d more)", mismatch->parameters - 1);
    if (mismatch->other >= 0)
        return hapt_fail(HAPT_ERR_INTERNAL, do_this,
                         "after step %lld rank %d of stage %d on host %s and rank %d of stage %d on host %s differ in "
                         "their copies of parameter %s%s",
                         (long long)done, rank, stage_of(worker, mismatch->rank), hapt_env_host(rank), other,
                         stage_of(worker, mismatch->other), hapt_env_host(other), name, more);
    if (mismatch->ranks > 1) snprintf(ranks, sizeof ranks, "; %d ranks differ in all", mismatch->ranks);
    return hapt_fail(HAPT_ERR_INTERNAL, do_this,
                     "after step %lld rank %d of stage %d on host %s differs from most of the %d ranks that hold "
                     "copies of parameter %s%s%s",
                     (long long)done, rank, stage_of(worker, mismatch->rank), hapt_env_host(rank), mismatch->copies,
                     name, more, ranks);
}

static void report_once(const struct replicas *replicas)
{
    if (replicas->checked >= 0) return;
    if (replicas->shared == 0)
        hapt_note(replicas->worker->env,
                  "replica check: no two ranks hold copies of the same weights; nothing is compared\n");
    else
        hapt_note(replicas->worker->env,
                  "replica check: %d of %d parameters have copies, on up to %d ranks; compared every %lld step%s and "
                  "before checkpoints\n",
                  replicas->shared, replicas->count, replicas->most, (long long)replicas->every,
                  replicas->every == 1 ? "" : "s");
}

enum hapt_status replicas_check(struct replicas *replicas, int64_t done, bool now, bool *compared)
{
    const struct worker *worker = replicas->worker;
    struct mismatch mismatch = {.rank = -1};
    *compared = false;
    if (replicas->every == 0 || replicas->checked == done || (!now && done % replicas->every != 0)) return HAPT_OK;
    hapt_heartbeat_note((struct hapt_activity){"comparison of replicas",
                                               worker_first_chunk(worker, worker->env->world_rank), -1, done - 1, -1});
    for (int first = 0; first < replicas->count; first += BLOCK) {
        const int count = replicas->count - first < BLOCK ? replicas->count - first : BLOCK;
        enum hapt_status status = mark(replicas, first, count);
        if (status == HAPT_OK)
            status = hapt_link_all_gather(worker->env->world, "comparison of replicas",
                                          worker_agreement_timeout_s(worker), replicas->mine,
                                          (size_t)worker->most * BLOCK * sizeof *replicas->mine, replicas->all);
        if (status != HAPT_OK) hapt_die(status); /* peers may wait */
        for (int i = 0; i < count; i++) {
            const int ranks = judge(replicas, replicas->parameter[first + i], i, &mismatch);
            if (ranks > replicas->most) replicas->most = ranks;
            if (replicas->checked < 0) replicas->shared += ranks > 1;
        }
    }
    report_once(replicas);
    replicas->checked = done;
    *compared = true;
    return mismatch.rank < 0 ? HAPT_OK : hapt_env_agree(worker->env->world, report_mismatch(replicas, done, &mismatch));
}
