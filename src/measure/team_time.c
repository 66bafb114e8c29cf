/* Times a range on its team: builds it, runs it in steps, combines its parts. */
#include "team_time.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "hapt/env.h"

#include "samples.h"

enum { LEAST_ROUNDS = 3, MOST_ROUNDS = 9, MOST_SLOTS = 4, MOST_MICROBATCHES = MOST_SLOTS + 2 };
#define ROUND_S 0.1 /* minimum duration of a step's microbatches, if MOST_MICROBATCHES allows */

/* One rank's seconds. */
struct part {
    double forward_s, backward_s; /* per microbatch */
    double reduce_s, norm_s;      /* once a step: summing gradients, their norm */
    double update_s;              /* update, and setting gradients to zero */
};
enum { PARTS = sizeof(struct part) / sizeof(double) };

struct range {
    struct team_stage *stage;
    struct hapt_engine_options options; /* slots: number of microbatches in flight */
    int begun;                          /* microbatches before this step */
    struct hapt_arena arena;
    struct hapt_program *program;
    struct hapt_engine *engine;
    char *input;       /* host copy of the inputs */
    struct part *part; /* [ranks] */
    char *gathered;    /* [ranks] */
    struct part sample[MOST_ROUNDS];
};

static enum hapt_status all_ready(const struct range *range, const char *what)
{
    const char mine = 0;
    return hapt_link_all_gather(range->stage->comm, what, range->stage->timeout_s, &mine, sizeof mine, range->gathered);
}

/*
 * The last stage runs a microbatch backward right after its forward. Other stages keep several in flight, so that a
 * slot has left the caches before it is used again: as many as memory allows.
 */
static enum hapt_status prepare(struct range *range, int first, int last)
{
    struct team_stage *stage = range->stage;
    const struct hapt_candidates *candidates = stage->candidates;
    const struct hapt_team connected = stage->team;
    struct hapt_memory_plan *plan;
    HAPT_NEW(range->part, &range->arena, connected.size);
    HAPT_NEW(range->gathered, &range->arena, connected.size);
    HAPT_TRY(hapt_program_build(stage->sharding, hapt_layers_first_op(candidates->layers, first),
                                candidates->layers->end_op[last], &range->arena, &range->program));
    HAPT_TRY(
        hapt_team_prepare(&stage->team, stage->sharding, range->program, stage->rank, stage->slowdown, &range->arena));
    stage->team.all_ranks = connected.all_ranks;
    memcpy(stage->team.axis_comm, connected.axis_comm, sizeof connected.axis_comm);
    stage->team.devices = connected.devices;
    hapt_team_clock(&stage->team, stage->options.backend, stage->options.device);
    HAPT_TRY(hapt_team_reserve(&stage->team));
    range->options = stage->options;
    range->options.slots = 1;
    hapt_team_links(&stage->team, &range->options.links);
    HAPT_TRY(hapt_engine_plan_memory(range->program, &range->options, &range->arena, &plan));
    const int others = candidates->microbatches < MOST_SLOTS ? candidates->microbatches : MOST_SLOTS;
    const int most = team_ends_model(candidates, last) ? 1 : others;
    while (range->options.slots < most &&
           (double)plan->parameter_bytes + (range->options.slots + 1) * (double)plan->activation_bytes <=
               stage->memory_bytes)
        range->options.slots++;
    return HAPT_OK;
}

/* The minimum over ranks, since they run microbatches together. */
static enum hapt_status agree_on_slots(struct range *range)
{
    const char mine = (char)range->options.slots;
    HAPT_TRY(hapt_link_all_gather(range->stage->comm, "a range's microbatches in flight", range->stage->timeout_s,
                                  &mine, sizeof mine, range->gathered));
    for (int r = 0; r < range->stage->team.size; r++)
        if (range->gathered[r] < range->options.slots) range->options.slots = range->gathered[r];
    return HAPT_OK;
}

static enum hapt_status build(struct range *range)
{
    const struct team_stage *stage = range->stage;
    const struct hapt_program *program = range->program;
    HAPT_TRY(hapt_engine_create(program, &range->options, &range->engine));
    HAPT_TRY(hapt_engine_connect(range->engine, stage->team.devices != NULL));
    HAPT_TRY(samples_fill(stage->candidates->model, &range->options, program, range->engine));
    for (int t = 0; t < HAPT_TRANSFER_SLOTS; t++) {
        HAPT_TRY(samples_fill_boundary(&range->options, program, range->engine, HAPT_STAGING_FORWARD_IN, t,
                                       &program->forward_in));
        HAPT_TRY(samples_fill_boundary(&range->options, program, range->engine, HAPT_STAGING_BACKWARD_IN, t,
                                       &program->backward_in));
    }
    size_t bytes = 1;
    for (int t = 0; t < program->graph->tensor_count; t++)
        if (program->graph->tensor[t].kind == HAPT_TENSOR_INPUT && hapt_engine_tensor(range->engine, t, 0))
            bytes += hapt_engine_tensor_bytes(range->engine, t);
    range->input = calloc(bytes, 1);
    if (!range->input) return hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory for %zu bytes of inputs", bytes);
    return hapt_engine_begin_step(range->engine);
}

/* Copies a slot's inputs from the host, as before every microbatch; `back`: copies them to the host. */
static enum hapt_status move_inputs(struct range *range, int slot, bool back)
{
    const struct hapt_backend *backend = range->stage->options.backend;
    struct hapt_queue *queue = backend->queue(range->stage->options.device, 0);
    char *host = range->input;
    for (int t = 0; t < range->program->graph->tensor_count; t++) {
        if (range->program->graph->tensor[t].kind != HAPT_TENSOR_INPUT) continue;
        void *place = hapt_engine_tensor(range->engine, t, slot);
        if (!place) continue;
        const size_t bytes = hapt_engine_tensor_bytes(range->engine, t);
        HAPT_TRY(backend->copy(queue, back ? host : place, back ? place : host, bytes));
        HAPT_TRY(backend->wait(backend->record(queue)));
        host += bytes;
    }
    return HAPT_OK;
}

/* Runs passes like the trainer (train/stage.c). */
static enum hapt_status forward(struct range *range, int microbatch, struct part *part)
{
    struct hapt_team *team = &range->stage->team;
    const double start_s = hapt_time_s();
    const int slot = microbatch % range->options.slots, transfer = microbatch % HAPT_TRANSFER_SLOTS;
    team->microbatch = microbatch;
    hapt_team_stretch_begin(team);
    HAPT_TRY(move_inputs(range, slot, false));
    HAPT_TRY(hapt_engine_forward(range->engine, slot, range->program->forward_in.count ? transfer : -1));
    hapt_team_stretch_end(team);
    part->forward_s += hapt_time_s() - start_s;
    return HAPT_OK;
}

static enum hapt_status backward(struct range *range, int microbatch, struct part *part)
{
    struct hapt_team *team = &range->stage->team;
    const struct hapt_program *program = range->program;
    const double start_s = hapt_time_s();
    const int transfer = microbatch % HAPT_TRANSFER_SLOTS;
    team->microbatch = microbatch;
    hapt_team_stretch_begin(team);
    HAPT_TRY(hapt_engine_backward(range->engine, microbatch % range->options.slots,
                                  program->backward_in.count ? transfer : -1,
                                  program->backward_out.count ? transfer : -1));
    hapt_team_stretch_end(team);
    part->backward_s += hapt_time_s() - start_s;
    return HAPT_OK;
}

static enum hapt_status run_step(struct range *range, int microbatches, int step, struct part *part)
{
    struct hapt_team *team = &range->stage->team;
    const bool adamw = range->stage->options.state_count == 2;
    const struct hapt_update update = {.optimizer = adamw ? HAPT_OPTIMIZER_ADAMW : HAPT_OPTIMIZER_SGD,
                                       .learning_rate = 1e-6, /* small: the weights hardly change */
                                       .beta1 = 0.9,
                                       .beta2 = 0.95,
                                       .epsilon = 1e-8,
                                       .gradient_scale = 1,
                                       .microbatches = 1,
                                       .step = step + 1,
                                       .momentum = range->stage->options.state_count == 1 ? 0.9 : 0};
    double squares, now_s, then_s;
    *part = (struct part){0};
    team->step = step;
    HAPT_TRY(all_ready(range, "start of a timed step"));
    const int lead = range->options.slots - 1;
    for (int m = 0; m < microbatches + lead; m++) {
        if (m < microbatches) HAPT_TRY(forward(range, range->begun + m, part));
        if (m >= lead) HAPT_TRY(backward(range, range->begun + m - lead, part));
    }
    range->begun += microbatches;
    part->forward_s /= microbatches;
    part->backward_s /= microbatches;
    team->microbatch = -1;
    then_s = hapt_time_s();
    if (team->size > 1) HAPT_TRY(hapt_engine_reduce(range->engine));
    now_s = hapt_time_s();
    part->reduce_s = now_s - then_s;
    HAPT_TRY(hapt_engine_square_sum(range->engine, NULL, &squares));
    part->norm_s = hapt_time_s() - now_s;
    HAPT_TRY(all_ready(range, "end of a timed step"));
    then_s = hapt_time_s();
    hapt_team_stretch_begin(team);
    HAPT_TRY(hapt_engine_update(range->engine, 0, 1, &update));
    hapt_team_stretch_end(team);
    HAPT_TRY(hapt_engine_begin_step(range->engine));
    part->update_s = hapt_time_s() - then_s;
    return HAPT_OK;
}

static struct part median_part(const struct range *range, int rounds)
{
    struct part middle;
    for (int p = 0; p < PARTS; p++) {
        double value[MOST_ROUNDS];
        for (int r = 0; r < rounds; r++) value[r] = ((const double *)&range->sample[r])[p];
        qsort(value, (size_t)rounds, sizeof *value, hapt_compare_doubles);
        ((double *)&middle)[p] = value[rounds / 2];
    }
    return middle;
}

/*
 * A rank computes B microbatches and its update without waiting for others. (If it waits inside microbatches, all ranks
 * take equally long.) The last rank to arrive finds all others ready to sum gradients. The update follows when all have
 * agreed on the norm.
 */
static void combine_parts(const struct part *part, int ranks, int microbatches, struct team_seconds *seconds)
{
    double longest_s = 0, reduce_s = INFINITY, norm_s = 0;
    *seconds = (struct team_seconds){0};
    for (int r = 0; r < ranks; r++) {
        const double stage_s = part[r].forward_s + part[r].backward_s;
        longest_s = fmax(longest_s, microbatches * stage_s + part[r].update_s);
        reduce_s = fmin(reduce_s, part[r].reduce_s);
        norm_s = fmax(norm_s, part[r].norm_s);
        if (stage_s < seconds->stage_s) continue;
        seconds->stage_s = stage_s;
        seconds->forward_s = part[r].forward_s;
    }
    seconds->step_s = longest_s - microbatches * seconds->stage_s + reduce_s + norm_s;
}

/* The maximum over ranks, since they run microbatches together. */
static enum hapt_status trial_runs(struct range *range, int *runs)
{
    const char mine = (char)hapt_engine_trial_runs(range->engine);
    HAPT_TRY(hapt_link_all_gather(range->stage->comm, "a range's trials", range->stage->timeout_s, &mine, sizeof mine,
                                  range->gathered));
    *runs = 1;
    for (int r = 0; r < range->stage->team.size; r++)
        if (range->gathered[r] > *runs) *runs = range->gathered[r];
    return HAPT_OK;
}

static enum hapt_status time_range(struct range *range, double budget_s, struct team_seconds *seconds)
{
    struct team_stage *stage = range->stage;
    const int ranks = stage->team.size, all = stage->candidates->microbatches;
    struct part first, mine, *part = range->part;
    int trials;
    const int slots = range->options.slots;
    /* First run once to touch every page, and until each engine has finished its trials. The second step gives the
     * number of steps that fit the time. */
    HAPT_TRY(trial_runs(range, &trials));
    for (int step = 0; step < 2; step++) HAPT_TRY(run_step(range, step == 0 ? trials * slots : 1, step, &first));
    HAPT_TRY(hapt_link_all_gather(stage->comm, "a range's first step", stage->timeout_s, &first, sizeof first, part));
    struct team_seconds rough;
    combine_parts(part, ranks, 1, &rough);
    const double stage_s = fmax(rough.stage_s, 1e-6), wanted = fmax(ceil(ROUND_S / stage_s), slots + 2);
    int microbatches = (int)fmax(fmin(wanted, fmin(MOST_MICROBATCHES, budget_s / (LEAST_ROUNDS * stage_s))), 1);
    if (microbatches > all) microbatches = all;
    const double round_s = microbatches * rough.stage_s + rough.step_s;
    const int rounds = (int)fmin(fmax(budget_s / fmax(round_s, 1e-6), LEAST_ROUNDS), MOST_ROUNDS);
    for (int round = 0; round < rounds; round++)
        HAPT_TRY(run_step(range, microbatches, 2 + round, &range->sample[round]));
    mine = median_part(range, rounds);
    HAPT_TRY(hapt_link_all_gather(stage->comm, "a range's seconds", stage->timeout_s, &mine, sizeof mine, part));
    combine_parts(part, ranks, all, seconds);
    return HAPT_OK;
}

enum hapt_status team_stage_time(struct team_stage *stage, int first, int last, double budget_s,
                                 struct team_seconds *seconds)
{
    struct range *range = calloc(1, sizeof *range);
    enum hapt_status status = range ? HAPT_OK : hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory to time a range of layers");
    if (range) {
        range->stage = stage;
        hapt_arena_init(&range->arena);
        status = prepare(range, first, last);
    }
    status = hapt_link_all_or_none(stage->comm, "a range's memory", status);
    if (status == HAPT_OK) status = agree_on_slots(range);
    if (status == HAPT_OK) {
        status = build(range);
        if (status == HAPT_OK) status = move_inputs(range, 0, true);
        status = hapt_link_all_or_none(stage->comm, "a range's timing", status);
    }
    if (status == HAPT_OK) status = time_range(range, budget_s, seconds);
    if (range) {
        hapt_engine_destroy(range->engine);
        hapt_arena_release(&range->arena);
        free(range->input);
    }
    free(range);
    return status;
}

enum hapt_status team_stage_open(struct team_stage *stage)
{
    stage->team = (struct hapt_team){.sharding = stage->sharding, .rank = stage->rank};
    stage->team.size = stage->sharding->axis[0].size * stage->sharding->axis[1].size;
    hapt_team_mesh_coordinate(stage->sharding, stage->rank, stage->team.mesh_coordinate);
    return hapt_team_connect(&stage->team, stage->comm, "profile", stage->timeout_s);
}

enum hapt_status team_stage_use_devices(struct team_stage *stage)
{
    char carrier[HAPT_TEAM_TRANSPORT_CHARS];
    return hapt_team_use_devices(&stage->team, stage->options.backend, stage->options.device, NULL, carrier);
}

void team_stage_close(struct team_stage *stage)
{
    hapt_team_release(&stage->team);
}
