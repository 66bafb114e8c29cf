/* Names ranks and links that are slower than planned, and steps that differ from the prediction. */
#include "watch_slow.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
    MEDIAN_STEPS = 8, /* steps; their median counts */
    IN_A_ROW = 9,     /* medians: the last one shares no step with the first */
    SKIPPED = 2,      /* first steps: cold caches, first page faults */
};
/* ratio to the others' wall-clock time above which other processes are taking the rank's cores. If all ranks share
 * cores, some wait a little longer than others. */
#define STARVED 3.0
/* Uncertainty of CPU time. Shared cores share caches too, so it grows with the wait for a core, up to a limit. It also
 * grows with the variation between steps (interquartile range), beyond that of an idle machine. */
#define SHARING_NOISE 0.5
#define SHARING_USUAL 1.05
#define SHARING_MOST 5.0
#define SPREAD_NOISE 2.0
#define SPREAD_USUAL 0.05
/* per share of the step that the rank idles beyond the plan. After idling, cold caches and a low clock slow a rank
 * down, and its speed hardly matters. Measured: cores waited 0.7 of the time for a link at a tenth of its rate. They
 * took up to 1.7 times their CPU time, and 1.4 times that of the others. */
#define IDLE_NOISE 1.0
/* A core may be slow for a short time. So a short observation needs a larger difference, by this share; half of it
 * after DRIFT_S, and so on. */
#define DRIFT_NOISE 1.0
#define DRIFT_S 0.5
/* ratios to the predicted step that cause a warning, if the difference exceeds OFF_S */
#define OFF_MORE 1.5
#define OFF_LESS 0.5
#define OFF_S 1e-3
/* precision of a link's time: about the sleep of the communication thread and, on shared cores, some time slices */
#define LINK_TICK_S 1e-3
#define SLICES_S 30e-3
/* With network counters, processes that wait for a core hardly matter, because the kernel moves the packets with
 * priority. Measured on an unchanged trunk, cores shared by 4 to 20 processes: medians of eight steps at most 1.12 of
 * the plan; this allows 1.4. Plus one tick of the system clock, on shared cores up to one more: the last bytes may be
 * acknowledged only when the peer's process reads them. */
#define COUNTED_NOISE 0.05
#define COUNTED_TICKS 0.25

struct ring {
    double of_step[MEDIAN_STEPS];
};

/* Times of the newest steps, summed over the microbatches of a step. */
struct rank_history {
    struct ring busy_s, device_s, raw_s;
};

/* A boundary in one direction. */
struct link_history {
    struct ring time_s;
    bool counted; /* by the network, in the newest step */
    int sharing;  /* largest number of boundary directions that leave the same host and share its port */
};

struct suspect {
    int windows; /* consecutive medians for which it was slow */
    double since_s;
    bool named;
};

struct watch_slow {
    const struct worker *worker;
    struct hapt_arena *arena;
    double threshold;
    int64_t steps;
    int *host_of;              /* [world_size] lowest rank of the same host */
    double *planned_s;         /* [world_size] for all microbatches of a step */
    struct ring step_s;        /* from end to end */
    struct rank_history *rank; /* [world_size] */
    struct link_history *link; /* [2 * stages] boundary behind stage k, forward and backward */
    struct suspect *rank_suspect, *link_suspect;
    struct suspect step_suspect[2]; /* of the whole step: longer, shorter than predicted */
    bool oversubscribed;    /* this job's ranks share cores, which stretches a step by an unpredictable factor */
    double *device, *clock; /* [world_size] medians relative to the plan; 0: idle */
    /* [world_size] wall-clock time / CPU time of the worst rank of a host, stored at the host's lowest rank */
    double *core_sharing;
    double tick_s;  /* tick of the system clock that the network counters use */
    double *sorted; /* [world_size] */
};

static bool is_on(const struct watch_slow *slow, int chunk, int host, bool elsewhere)
{
    bool found = false;
    for (int r = 0; r < stage_size(slow->worker, chunk); r++)
        found = found || (slow->host_of[stage_world_rank(slow->worker, chunk, r)] == host) != elsewhere;
    return found;
}

/* Number of directions in which stages on a host have neighbours on other hosts. */
static int remote_directions(const struct watch_slow *slow, int host)
{
    const int stages = slow->worker->plan->stage_count;
    int count = 0;
    for (int c = 0; c < stages; c++)
        for (int to = c - 1; to <= c + 1; to += 2)
            count += to >= 0 && to < stages && is_on(slow, c, host, false) && is_on(slow, to, host, true);
    return count;
}

static int most_remote_directions(const struct watch_slow *slow, int chunk)
{
    int most = 1;
    for (int r = 0; r < stage_size(slow->worker, chunk); r++) {
        const int directions = remote_directions(slow, slow->host_of[stage_world_rank(slow->worker, chunk, r)]);
        most = directions > most ? directions : most;
    }
    return most;
}

/* True if the ranks of some host outnumber the cores of this one. */
static bool shares_cores(const struct watch_slow *slow)
{
    const struct hapt_env *env = slow->worker->env;
    const int own = slow->worker->threads, planned = slow->worker->plan->threads,
              threads = own > 0       ? own
                        : planned > 0 ? planned
                                      : 1;
    bool found = false;
    for (int host = 0; host < env->world_size; host++) {
        int ranks = 0;
        for (int r = 0; r < env->world_size; r++) ranks += slow->host_of[r] == host;
        found = found || (env->cores > 0 && ranks * threads > env->cores);
    }
    return found;
}

enum hapt_status watch_slow_create(const struct worker *worker, double threshold, struct hapt_arena *arena,
                                   struct watch_slow **result)
{
    const int ranks = worker->env->world_size, stages = worker->plan->stage_count;
    struct watch_slow *slow;
    HAPT_NEW(slow, arena, 1);
    *slow = (struct watch_slow){.worker = worker, .arena = arena, .threshold = threshold};
    HAPT_NEW(slow->host_of, arena, ranks);
    HAPT_NEW(slow->planned_s, arena, ranks);
    HAPT_NEW(slow->rank, arena, ranks);
    HAPT_NEW(slow->link, arena, 2 * stages);
    HAPT_NEW(slow->rank_suspect, arena, ranks);
    HAPT_NEW(slow->link_suspect, arena, 2 * stages);
    HAPT_NEW(slow->device, arena, ranks);
    HAPT_NEW(slow->clock, arena, ranks);
    HAPT_NEW(slow->core_sharing, arena, ranks);
    HAPT_NEW(slow->sorted, arena, ranks);
    for (int r = 0; r < ranks; r++) {
        while (strcmp(hapt_env_host(slow->host_of[r]), hapt_env_host(r)) != 0) slow->host_of[r]++;
    }
    for (int c = 0; c < stages; c++) {
        const struct hapt_plan_stage *part = &worker->plan->stage[c];
        for (int r = 0; r < stage_size(worker, c); r++)
            slow->planned_s[stage_world_rank(worker, c, r)] +=
                worker->plan->microbatches * part->compute_s - part->step_s;
    }
    slow->oversubscribed = shares_cores(slow);
    for (int b = 0; b + 1 < stages; b++) {
        const int one = most_remote_directions(slow, b), other = most_remote_directions(slow, b + 1);
        slow->link[2 * b].sharing = slow->link[2 * b + 1].sharing = one > other ? one : other;
    }
    struct timespec tick = {0, 0};
    clock_getres(CLOCK_MONOTONIC_COARSE, &tick);
    slow->tick_s = (double)tick.tv_sec + 1e-9 * (double)tick.tv_nsec;
    *result = slow;
    return HAPT_OK;
}

static double median(const struct ring *ring, double *spread)
{
    double sorted[MEDIAN_STEPS];
    memcpy(sorted, ring->of_step, sizeof sorted);
    const double middle = hapt_median(sorted, MEDIAN_STEPS);
    if (spread) *spread = middle > 0 ? (sorted[3 * MEDIAN_STEPS / 4 - 1] - sorted[MEDIAN_STEPS / 4]) / middle : 0;
    return middle;
}

static double sum(const struct ring *ring)
{
    double total = 0;
    for (int i = 0; i < MEDIAN_STEPS; i++) total += ring->of_step[i];
    return total;
}

/* Lower quartile of the other ranks; 0: there are none. */
static double others(struct watch_slow *slow, const double *value, int rank)
{
    int count = 0;
    for (int r = 0; r < slow->worker->env->world_size; r++)
        if (r != rank && value[r] > 0) slow->sorted[count++] = value[r];
    if (count == 0) return 0;
    qsort(slow->sorted, (size_t)count, sizeof *slow->sorted, hapt_compare_doubles);
    return slow->sorted[(count - 1) / 4];
}

/* Additional share by which it must be slower; decreases with time. */
static double drift(const struct suspect *suspect)
{
    return suspect->windows == 0 ? DRIFT_NOISE : DRIFT_NOISE / (1 + (hapt_time_s() - suspect->since_s) / DRIFT_S);
}

/* True if the suspect is to be named now: slow for long enough, and `clearly` slow. */
static bool suspect_add(struct suspect *suspect, bool slower, bool clearly)
{
    if (slower && suspect->windows == 0) suspect->since_s = hapt_time_s();
    suspect->windows = slower ? suspect->windows + 1 : 0;
    if (suspect->named || suspect->windows < IN_A_ROW || !clearly) return false;
    return suspect->named = true;
}

static enum hapt_status warn(struct watch_slow *slow, struct hapt_train_result *result,
                             const struct hapt_train_warning *warning)
{
    const int most = slow->worker->env->world_size + 2 * slow->worker->plan->stage_count + 1;
    if (!result->warning) HAPT_NEW(result->warning, slow->arena, most); /* each is named once */
    HAPT_ASSERT(result->warning_count < most);
    result->warning[result->warning_count++] = *warning;
    hapt_warn(slow->worker->env, "step %lld: %s\n", (long long)warning->step, warning->text);
    return HAPT_OK;
}

static enum hapt_status name_rank(struct watch_slow *slow, int64_t step, int rank, double measured_s, bool starved,
                                  struct hapt_train_result *result)
{
    const int chunk = worker_first_chunk(slow->worker, rank);
    char measured[32], planned[32];
    struct hapt_train_warning warning = {.step = step,
                                         .rank = rank,
                                         .stage = chunk,
                                         .peer_stage = -1,
                                         .measured_s = measured_s,
                                         .planned_s = slow->planned_s[rank]};
    warning.ratio = measured_s / warning.planned_s;
    snprintf(warning.text, sizeof warning.text,
             "rank %d of stage %d on host %s computes %.1f times as long as the plan assumes (%s per step, planned "
             "%s), unlike the others: %splan again (--resume --replan)",
             rank, chunk, hapt_env_host(rank), warning.ratio, hapt_units_time(measured_s, measured),
             hapt_units_time(warning.planned_s, planned), starved ? "see what else runs on its cores, or " : "");
    return warn(slow, result, &warning);
}

static enum hapt_status name_link(struct watch_slow *slow, int64_t step, int boundary, bool backward, double measured_s,
                                  struct hapt_train_result *result)
{
    const int from = boundary + backward, to = boundary + !backward;
    const int rank = stage_world_rank(slow->worker, from, 0), peer = stage_world_rank(slow->worker, to, 0);
    const char *own = slow->worker->plan->stage[from].submesh->name, *its = slow->worker->plan->stage[to].submesh->name;
    char measured[32], planned[32];
    struct hapt_train_warning warning = {.step = step,
                                         .rank = rank,
                                         .stage = from,
                                         .peer_stage = to,
                                         .measured_s = measured_s,
                                         .planned_s = slow->worker->plan->stage[boundary].comm_s};
    warning.ratio = measured_s / warning.planned_s;
    snprintf(
        warning.text, sizeof warning.text,
        "the link from stage %d (subcluster %s, rank %d on host %s) to stage %d (subcluster %s, rank %d on host %s) "
        "takes %.1f times as long as the plan assumes (%s per microbatch, planned %s): plan again (--resume --replan)",
        from, own, rank, hapt_env_host(rank), to, its, peer, hapt_env_host(peer), warning.ratio,
        hapt_units_time(measured_s, measured), hapt_units_time(warning.planned_s, planned));
    return warn(slow, result, &warning);
}

static enum hapt_status name_step(struct watch_slow *slow, int64_t step, double measured_s, double planned_s,
                                  struct hapt_train_result *result)
{
    char measured[32], planned[32];
    struct hapt_train_warning warning = {.step = step,
                                         .rank = -1,
                                         .stage = -1,
                                         .peer_stage = -1,
                                         .measured_s = measured_s,
                                         .planned_s = planned_s,
                                         .ratio = measured_s / planned_s};
    snprintf(warning.text, sizeof warning.text,
             "a step lasts %.2f times as long as predicted (%s, predicted %s): %scorrect the profile with this run "
             "(hapt plan --profile P.h5 --run outputs/NAME/run.h5)",
             warning.ratio, hapt_units_time(measured_s, measured), hapt_units_time(planned_s, planned),
             warning.ratio > 1 ? "see what else runs on the cores, or " : "");
    return warn(slow, result, &warning);
}

/* Time of the stage's collectives themselves: the minimum over its ranks. The rest is waiting for the slowest rank. */
static double collectives_s(const struct watch_slow *slow, const struct watch_sample *sample, int chunk)
{
    double least_s = INFINITY;
    for (int r = 0; r < stage_size(slow->worker, chunk); r++)
        least_s = fmin(least_s, sample[worker_record(slow->worker, chunk, r)].effort.wait_s);
    return least_s;
}

/* Adds the collectives of the microbatches, because the plan's times include them. */
static void keep_sample(struct watch_slow *slow, const struct watch_sample *sample)
{
    const struct worker *worker = slow->worker;
    const int at = (int)(slow->steps % MEDIAN_STEPS);
    for (int r = 0; r < worker->env->world_size; r++)
        slow->rank[r].busy_s.of_step[at] = slow->rank[r].device_s.of_step[at] = slow->rank[r].raw_s.of_step[at] = 0;
    for (int c = 0; c < worker->plan->stage_count; c++) {
        const double shared_s = collectives_s(slow, sample, c);
        for (int r = 0; r < stage_size(worker, c); r++) {
            const struct hapt_team_times *effort = &sample[worker_record(worker, c, r)].effort;
            struct rank_history *its = &slow->rank[stage_world_rank(worker, c, r)];
            its->busy_s.of_step[at] += effort->busy_s + shared_s;
            its->device_s.of_step[at] += effort->device_s + shared_s;
            its->raw_s.of_step[at] += effort->wall_s + shared_s;
        }
    }
}

/* Computes each rank's medians, and how much each host shares its cores. Returns the uncertainty of the CPU times:
 * differences of ratios up to this value mean nothing. */
static double cpu_time_uncertainty(struct watch_slow *slow)
{
    double widest = 0, fullest = 1;
    for (int r = 0; r < slow->worker->env->world_size; r++) slow->core_sharing[r] = 1;
    for (int r = 0; r < slow->worker->env->world_size; r++) {
        double spread = 0;
        slow->device[r] = slow->clock[r] = 0;
        if (!(slow->planned_s[r] > 0)) continue; /* it idles, or the plan has no times */
        slow->device[r] = median(&slow->rank[r].device_s, &spread) / slow->planned_s[r];
        slow->clock[r] = median(&slow->rank[r].raw_s, NULL) / slow->planned_s[r];
        widest = fmax(widest, spread);
        if (slow->device[r] <= 0) continue;
        double *core_sharing = &slow->core_sharing[slow->host_of[r]];
        *core_sharing = fmax(*core_sharing, sum(&slow->rank[r].raw_s) / sum(&slow->rank[r].device_s));
        fullest = fmax(fullest, *core_sharing);
    }
    return SHARING_NOISE * fmax(fmin(fullest, SHARING_MOST) - SHARING_USUAL, 0) +
           SPREAD_NOISE * fmax(widest - SPREAD_USUAL, 0);
}

/* The share of a step in which the rank idles beyond the plan. */
static double idle_share(const struct watch_slow *slow, int rank)
{
    const struct hapt_plan *plan = slow->worker->plan;
    const double step_s = median(&slow->step_s, NULL), busy_s = median(&slow->rank[rank].busy_s, NULL);
    const double planned_s =
        fmax((isfinite(plan->simulated_s) ? plan->simulated_s : plan->latency_s) - slow->planned_s[rank], 0);
    return step_s > 0 ? fmin(fmax(step_s - busy_s - planned_s, 0) / step_s, 1) : 0;
}

static enum hapt_status judge_ranks(struct watch_slow *slow, int64_t step, struct hapt_train_result *result)
{
    const double limit = 1 + slow->threshold, noise = cpu_time_uncertainty(slow);
    for (int r = 0; r < slow->worker->env->world_size; r++) {
        const double device_others = others(slow, slow->device, r), clock_others = others(slow, slow->clock, r);
        if (slow->device[r] <= 0 || device_others <= 0) continue;
        const double planned_s = slow->planned_s[r], busy_s = median(&slow->rank[r].busy_s, NULL);
        const double unsure = limit + noise + IDLE_NOISE * idle_share(slow, r);
        const bool device_slow = slow->device[r] > unsure && slow->device[r] > unsure * device_others;
        const bool starved = slow->clock[r] > fmax(STARVED, limit) * clock_others;
        const bool slower = busy_s > limit * planned_s && (device_slow || starved);
        const double clear = unsure + drift(&slow->rank_suspect[r]);
        const bool clearly = starved || (slow->device[r] > clear && slow->device[r] > clear * device_others);
        if (suspect_add(&slow->rank_suspect[r], slower, clearly))
            HAPT_TRY(
                name_rank(slow, step, r, device_slow ? slow->device[r] * planned_s : busy_s, !device_slow, result));
    }
    return HAPT_OK;
}

/* The slowest of a stage's ranks at a link. */
static struct stage_link_time slowest(const struct watch_slow *slow, const struct watch_sample *sample, int chunk,
                                      enum stage_link link)
{
    struct stage_link_time longest = {0, false};
    for (int r = 0; r < stage_size(slow->worker, chunk); r++) {
        const struct stage_link_time *its = &sample[worker_record(slow->worker, chunk, r)].link[link];
        longest.time_s = fmax(longest.time_s, its->time_s);
        longest.counted = longest.counted || its->counted;
    }
    return longest;
}

static double core_sharing_of(const struct watch_slow *slow, int chunk)
{
    double fullest = 1;
    for (int r = 0; r < stage_size(slow->worker, chunk); r++)
        fullest = fmax(fullest, slow->core_sharing[slow->host_of[stage_world_rank(slow->worker, chunk, r)]]);
    return fullest;
}

static void keep_link(struct link_history *link, int at, struct stage_link_time out, struct stage_link_time in)
{
    link->time_s.of_step[at] = fmax(out.time_s, in.time_s);
    link->counted = out.counted;
}

static void keep_links(struct watch_slow *slow, const struct watch_sample *sample)
{
    const int at = (int)(slow->steps % MEDIAN_STEPS);
    for (int b = 0; b + 1 < slow->worker->plan->stage_count; b++) {
        keep_link(&slow->link[2 * b], at, slowest(slow, sample, b, STAGE_LINK_FORWARD_OUT),
                  slowest(slow, sample, b + 1, STAGE_LINK_FORWARD_IN));
        keep_link(&slow->link[2 * b + 1], at, slowest(slow, sample, b + 1, STAGE_LINK_BACKWARD_OUT),
                  slowest(slow, sample, b, STAGE_LINK_BACKWARD_IN));
    }
}

/* Tolerated excess of a message over the planned time: a share and an absolute time. Times that the plan counts as
 * hidden are ignored. */
static void tolerate(const struct watch_slow *slow, const struct link_history *link, double core_sharing, double *share,
                     double *time_s)
{
    const struct hapt_plan *plan = slow->worker->plan;
    const double shared = fmin(core_sharing, SHARING_MOST), noise = link->counted ? COUNTED_NOISE * (shared - 1) : 0;
    *share = (1 + slow->threshold + noise) * (link->counted ? link->sharing : 1) - 1;
    *time_s =
        fmax(plan->hide_threshold * plan->t_max_s, link->counted ? slow->tick_s * (1 + COUNTED_TICKS * (shared - 1))
                                                                 : LINK_TICK_S + SLICES_S * (core_sharing - 1));
}

static enum hapt_status judge_links(struct watch_slow *slow, int64_t step, struct hapt_train_result *result)
{
    const struct hapt_plan *plan = slow->worker->plan;
    for (int b = 0; b + 1 < plan->stage_count; b++)
        for (int backward = 0; backward < 2; backward++) {
            const struct link_history *link = &slow->link[2 * b + backward];
            const double planned_s = plan->stage[b].comm_s, time_s = median(&link->time_s, NULL);
            double share, tolerated_s;
            tolerate(slow, link, fmax(core_sharing_of(slow, b), core_sharing_of(slow, b + 1)), &share, &tolerated_s);
            const bool slower = planned_s > 0 && time_s > planned_s + tolerated_s && time_s > (1 + share) * planned_s;
            struct suspect *suspect = &slow->link_suspect[2 * b + backward];
            if (suspect_add(suspect, slower, time_s > (1 + share + drift(suspect)) * planned_s))
                HAPT_TRY(name_link(slow, step, b, backward, time_s, result));
        }
    return HAPT_OK;
}

/* Compares the whole step with the prediction; warns once. */
static enum hapt_status judge_step(struct watch_slow *slow, int64_t step, struct hapt_train_result *result)
{
    const double planned_s = slow->worker->plan->simulated_s, step_s = median(&slow->step_s, NULL);
    double core_sharing = 1;
    if (!isfinite(planned_s) || planned_s <= 0 || slow->step_suspect[0].named || slow->step_suspect[1].named)
        return HAPT_OK;
    for (int r = 0; r < slow->worker->env->world_size && slow->oversubscribed; r++)
        core_sharing = fmax(core_sharing, slow->core_sharing[r]);
    for (int shorter = 0; shorter < 2; shorter++) {
        struct suspect *suspect = &slow->step_suspect[shorter];
        const double sure = 1 + drift(suspect), ratio = step_s / planned_s;
        const bool off =
            fabs(step_s - planned_s) > OFF_S && (shorter ? ratio < OFF_LESS : ratio > OFF_MORE * core_sharing);
        if (suspect_add(suspect, off, shorter ? ratio * sure < OFF_LESS : ratio > OFF_MORE * core_sharing * sure))
            HAPT_TRY(name_step(slow, step, step_s, planned_s, result));
    }
    return HAPT_OK;
}

enum hapt_status watch_slow_step(struct watch_slow *slow, int64_t step, double step_s,
                                 const struct watch_sample *sample, struct hapt_train_result *result)
{
    if (slow->threshold <= 0 || slow->steps++ < SKIPPED) return HAPT_OK;
    slow->step_s.of_step[slow->steps % MEDIAN_STEPS] = step_s;
    keep_sample(slow, sample);
    keep_links(slow, sample);
    if (slow->steps < SKIPPED + MEDIAN_STEPS) return HAPT_OK;
    HAPT_TRY(judge_ranks(slow, step, result));
    HAPT_TRY(judge_step(slow, step, result));
    return judge_links(slow, step, result);
}
