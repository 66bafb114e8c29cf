/*
 * Replays. Between two waits of the host a section always queues the same kernels, with the same arguments: a chain. It
 * is captured once for each slot and replayed, if that is faster by the device's clock than queueing its steps: the
 * shortest of some runs either way. The first run of a slot is never a capture, because then libraries choose their
 * algorithms and kernels are loaded. What cannot be captured goes on step by step.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine_private.h"
#include "hapt/config.h"

enum { TRIALS = 3, LEAST_STEPS = 2 };
#define PAYS 0.98      /* a replay takes at most so much of the time of the steps */
#define HOST_BOUND 0.5 /* the device may have waited for a host that took this share of the time to queue a part */

enum wish { WISH_MEASURED, WISH_NEVER, WISH_ALWAYS };

static enum wish wish(void)
{
    const char *choice = getenv("HAPT_CUDA_GRAPHS");
    if (!choice || (strcmp(choice, "0") != 0 && strcmp(choice, "1") != 0)) return WISH_MEASURED;
    return choice[0] == '0' ? WISH_NEVER : WISH_ALWAYS;
}

/* ---- what there is ---- */

/* The host has nothing to do before or behind it: as hapt_engine_run has it. */
static bool flows_on(const struct hapt_engine *engine, const struct bound_step *step)
{
    return step->kernel ? !step->call.exchange : !engine->options.links.collective;
}

static enum hapt_status chain_init(struct hapt_engine *engine, struct chain *chain, int first, int end, int slots)
{
    *chain =
        (struct chain){.first = first, .end = end, .choice = wish() == WISH_ALWAYS ? CHAIN_REPLAYS : CHAIN_TRIES_STEPS};
    HAPT_NEW(chain->slot, &engine->arena, slots);
    return HAPT_OK;
}

static enum hapt_status find_in_section(struct hapt_engine *engine, struct section_binding *binding)
{
    HAPT_NEW(binding->chain, &engine->arena, binding->step_count);
    for (int first = 0, end; first < binding->step_count; first = end) {
        for (end = first; end < binding->step_count && flows_on(engine, &binding->step[end]);) end++;
        if (end - first >= LEAST_STEPS)
            HAPT_TRY(chain_init(engine, &binding->chain[binding->chain_count++], first, end, engine->options.slots));
        if (end == first) end++;
    }
    return HAPT_OK;
}

static bool can_replay(const struct hapt_engine *engine)
{
    return engine->options.backend->capture && engine->options.backend->mark && wish() != WISH_NEVER;
}

enum hapt_status hapt_engine_find_chains(struct hapt_engine *engine)
{
    if (!can_replay(engine)) return HAPT_OK;
    HAPT_TRY(find_in_section(engine, &engine->section[HAPT_SECTION_FORWARD]));
    HAPT_TRY(find_in_section(engine, &engine->section[HAPT_SECTION_BACKWARD]));
    return engine->parameter_count >= LEAST_STEPS ? chain_init(engine, &engine->norm, 0, engine->parameter_count, 1)
                                                  : HAPT_OK;
}

/* Goes on step by step, for good. */
static void forget(struct hapt_engine *engine, struct chain *chain, int slots)
{
    for (int slot = 0; slot < slots && chain->slot; slot++) {
        if (chain->slot[slot].replay) engine->options.backend->forget(chain->slot[slot].replay);
        chain->slot[slot].replay = NULL;
    }
    chain->choice = CHAIN_STEPS;
}

static void give_up(struct hapt_engine *engine, struct chain *chain)
{
    forget(engine, chain, chain == &engine->norm ? 1 : engine->options.slots);
}

void hapt_engine_forget_chains(struct hapt_engine *engine)
{
    for (int section = 0; section < HAPT_SECTION_COUNT; section++)
        for (int c = 0; c < engine->section[section].chain_count; c++)
            give_up(engine, &engine->section[section].chain[c]);
    give_up(engine, &engine->norm);
}

/* ---- captures ---- */

/* `clean`: no failure was on record when it began. */
static struct hapt_replay *end_capture(struct hapt_engine *engine, enum hapt_status status, bool clean)
{
    struct hapt_replay *replay = engine->options.backend->captured(engine->queue);
    if (status == HAPT_OK) return replay;
    if (replay) engine->options.backend->forget(replay);
    if (clean) hapt_fail_reset(); /* what cannot be captured may well be run */
    return NULL;
}

static struct hapt_replay *capture(struct hapt_engine *engine, const struct chain *chain, const struct bound_step *step)
{
    const bool clean = hapt_fail_message()[0] == '\0';
    enum hapt_status status = HAPT_OK;
    if (!engine->options.backend->capture(engine->queue)) return NULL;
    for (int s = chain->first; s < chain->end && status == HAPT_OK; s++) status = hapt_engine_run(engine, &step[s]);
    return end_capture(engine, status, clean);
}

/* True: a replay is queued. */
static bool start_replay(struct hapt_engine *engine, struct chain *chain, const struct bound_step *step,
                         struct chain_slot *slot)
{
    if (slot->runs == 0 || (chain->choice != CHAIN_TRIES_REPLAYS && chain->choice != CHAIN_REPLAYS)) return false;
    if (!slot->replay) slot->replay = capture(engine, chain, step);
    if (slot->replay && engine->options.backend->replay(slot->replay, engine->queue)) return true;
    give_up(engine, chain);
    return false;
}

/* ---- runs and trials ---- */

static bool is_tried(const struct chain *chain, bool replayed)
{
    return chain->choice == (replayed ? CHAIN_TRIES_REPLAYS : CHAIN_TRIES_STEPS);
}

enum hapt_status hapt_engine_run_chain(struct hapt_engine *engine, struct chain *chain, const struct bound_step *step,
                                       int slot)
{
    const struct hapt_backend *backend = engine->options.backend;
    struct chain_slot *at = &chain->slot[slot];
    const bool tries = is_tried(chain, false) || is_tried(chain, true);
    struct hapt_event *from = tries ? backend->mark(engine->queue) : NULL;
    const bool replayed = start_replay(engine, chain, step, at);
    for (int s = chain->first; s < chain->end && !replayed; s++) HAPT_TRY(hapt_engine_run(engine, &step[s]));
    const bool first = (replayed ? at->replays++ : at->runs++) == 0;
    if (!from || first || !is_tried(chain, replayed)) return HAPT_OK;
    engine->trial.chain = chain;
    engine->trial.from = from;
    engine->trial.to = backend->mark(engine->queue);
    engine->trial.replayed = replayed;
    return HAPT_OK;
}

void hapt_engine_judge_trial(struct hapt_engine *engine)
{
    struct chain *chain = engine->trial.chain;
    if (!chain) return;
    engine->trial.chain = NULL;
    const double time_s = engine->options.backend->seconds(engine->trial.from, engine->trial.to);
    double *shortest_s = engine->trial.replayed ? &chain->replay_s : &chain->steps_s;
    if (time_s < 0) {
        give_up(engine, chain);
        return;
    }
    if (chain->trials == 0 || time_s < *shortest_s) *shortest_s = time_s;
    if (++chain->trials < TRIALS) return;
    chain->trials = 0;
    if (chain->choice == CHAIN_TRIES_STEPS)
        chain->choice = CHAIN_TRIES_REPLAYS;
    else if (chain->replay_s < PAYS * chain->steps_s)
        chain->choice = CHAIN_REPLAYS;
    else
        give_up(engine, chain);
}

int hapt_engine_trial_runs(const struct hapt_engine *engine)
{
    int chains = 0;
    for (int section = 0; section < HAPT_SECTION_COUNT; section++) chains += engine->section[section].chain_count;
    return chains > 0 ? 2 * (1 + TRIALS) : 1;
}

void hapt_engine_describe_replays(const struct hapt_engine *engine, char text[HAPT_ENGINE_REPLAY_CHARS])
{
    int chains = 0, replayed = 0;
    double steps_s = 0, replay_s = 0;
    char short_text[32], long_text[32];
    for (int section = 0; section < HAPT_SECTION_COUNT; section++)
        for (int c = 0; c < engine->section[section].chain_count; c++) {
            const struct chain *chain = &engine->section[section].chain[c];
            chains++;
            if (chain->choice != CHAIN_REPLAYS) continue;
            replayed++;
            steps_s += chain->steps_s;
            replay_s += chain->replay_s;
        }
    int length = 0;
    text[0] = '\0';
    if (chains > 0)
        length =
            snprintf(text, HAPT_ENGINE_REPLAY_CHARS, "%d of %d runs of kernels replayed as graphs", replayed, chains);
    if (replay_s > 0)
        snprintf(text + length, HAPT_ENGINE_REPLAY_CHARS - (size_t)length, ", %s instead of %s",
                 hapt_units_time(replay_s, short_text), hapt_units_time(steps_s, long_text));
}

/* ---- parts ---- */

void hapt_engine_time_replay(struct hapt_engine *engine, enum hapt_section section, int slot, int first_op, int end_op,
                             double queued_s, double *time_s)
{
    const struct hapt_backend *backend = engine->options.backend;
    const bool clean = hapt_fail_message()[0] == '\0';
    if (!can_replay(engine) || (wish() == WISH_MEASURED && queued_s < HOST_BOUND * *time_s) ||
        !backend->capture(engine->queue))
        return;
    struct hapt_replay *replay =
        end_capture(engine, hapt_engine_start_part(engine, section, slot, first_op, end_op), clean);
    if (!replay) return;
    double replay_s = -1;
    if (backend->replay(replay, engine->queue)) { /* the first one brings it to the device */
        struct hapt_event *from = backend->mark(engine->queue);
        if (backend->replay(replay, engine->queue)) replay_s = backend->seconds(from, backend->mark(engine->queue));
    }
    backend->forget(replay);
    if (replay_s > 0 && (replay_s < *time_s || wish() == WISH_ALWAYS)) *time_s = replay_s;
}
