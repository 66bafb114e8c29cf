/* hapt simulate: simulates one step of a plan and prints busy, idle and transfer times. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "emit.h"
#include "json_print.h"
#include "phases.h"

const char hapt_command_simulate_help[] =
    "Simulates one step of a plan file (--plan) from its instruction lists: computation in order, transfers in\n"
    "parallel to it, at most three received microbatches waiting at a boundary. --schedule simulates another\n"
    "schedule on the same stages with the plan's t_max (launch counts and memory follow), --microbatches a step of\n"
    "another size. --profile takes the costs from that profile. --blocking yes simulates a framework without overlap:\n"
    "a transfer occupies its sender and its receiver. --split-backward with --profile: the same stages with split\n"
    "backward passes, or without them.\n"
    "\n"
    "The critical path is the chain of passes, transfers and updates that decides the step: each begins when the one\n"
    "before ends. Only a change on it shortens the step. JSON: \"critical\" of each stage, in seconds.\n"
    "\n"
    "--emit simgrid --output FOLDER writes the same lists as traces for SimGrid, with updates in order: rank.N.txt\n"
    "for each submesh, the platform, the hosts, and replay.sh, which replays them with smpirun and prints the time of\n"
    "the step. --emit chakra writes execution traces of MLCommons Chakra: rank.N.et for each submesh, which ASTRA-sim\n"
    "reads, and the same nodes as rank.N.json. --profile gives messages their bytes. hapt plan takes the same\n"
    "options.\n";

struct outcome {
    const struct hapt_plan *plan; /* with the launch counts of the simulated schedule */
    struct hapt_simulation *simulation;
    struct hapt_plan_path path;
    double period_s; /* time per microbatch in the steady state */
    double *overlap; /* [stage] hidden share of the transfer at its end */
    bool hidden;     /* period_s <= t_max (1 + 2 epsilon) */
    bool fits;       /* in every device's memory */
};

/* Prices the plan's stages anew; split as before, or as --split-backward says. */
static enum hapt_status price(const struct hapt_config *config, const struct hapt_profile *profile,
                              struct hapt_plan *plan)
{
    const char *choice = hapt_config_text(config, "split-backward");
    const bool given = hapt_config_given(config, "split-backward"),
               split = given ? !strcmp(choice, "yes") : plan->split;
    bool fits;
    plan->split = false;
    for (int i = 0; i < plan->stage_count; i++) plan->stage[i].slots = plan->stage[i].weight_slots = 0;
    HAPT_TRY(hapt_plan_price(profile, plan));
    if (given && !strcmp(choice, "auto")) return hapt_plan_split_if_shorter(profile, plan, &fits);
    return split ? hapt_plan_split_backward(profile, plan) : HAPT_OK;
}

static enum hapt_status prepare(const struct hapt_config *config, struct hapt_arena *arena, struct hapt_plan **plan,
                                struct hapt_profile **profile)
{
    const char *path = hapt_config_text(config, "plan"), *profile_path = hapt_config_text(config, "profile");
    const char *blocking = hapt_config_text(config, "blocking");
    *profile = NULL;
    if (!path)
        return hapt_fail(HAPT_ERR_USAGE, "make one with `hapt plan --output plan.h5`, then give --plan plan.h5",
                         "no plan file given");
    HAPT_TRY(hapt_plan_load(path, arena, plan));
    if (strcmp(blocking, "auto") != 0) (*plan)->blocking = strcmp(blocking, "yes") == 0;
    if (profile_path) {
        HAPT_TRY(hapt_profile_load(profile_path, arena, profile));
        HAPT_TRY(price(config, *profile, *plan));
    }
    return hapt_phase_plan_override(config, *plan);
}

static enum hapt_status simulate_step(const struct hapt_plan *plan, struct hapt_arena *arena, struct outcome *outcome)
{
    *outcome = (struct outcome){.plan = plan, .fits = true};
    HAPT_TRY(hapt_plan_simulate(plan, arena, &outcome->simulation));
    HAPT_TRY(hapt_plan_path(plan, arena, &outcome->path));
    HAPT_NEW(outcome->overlap, arena, plan->stage_count);
    for (int i = 0; i < plan->stage_count - 1; i++) HAPT_TRY(hapt_plan_overlap(plan, i, &outcome->overlap[i]));
    HAPT_TRY(hapt_plan_period(plan, &outcome->period_s));
    outcome->hidden = hapt_at_most(outcome->period_s, plan->t_max_s * (1 + 2 * plan->hide_threshold));
    for (int i = 0; i < plan->stage_count; i++) outcome->fits &= hapt_plan_submesh_fits(plan, plan->stage[i].submesh);
    return HAPT_OK;
}

/* If a link sets t_max: compute time of the slowest stage; else 0. */
static double slowest_compute_s(const struct hapt_plan *plan)
{
    double slowest_s = 0;
    if (strcmp(plan->limit, "link") != 0) return 0;
    for (int i = 0; i < plan->stage_count; i++)
        if (plan->stage[i].compute_s > slowest_s) slowest_s = plan->stage[i].compute_s;
    return slowest_s;
}

#define NOTABLE 5e-4 /* share of the step: smaller ones would be printed as 0.0 % */

/* The stages that decide a part of the step, longest first. */
static void print_path_of(const struct hapt_env *env, const char *what, const double *seconds, int stages,
                          double step_s)
{
    char text[400];
    size_t used = 0;
    double most_s = INFINITY;
    for (int printed = -1; used + 60 < sizeof text;) {
        int next = -1;
        for (int i = 0; i < stages; i++)
            if ((seconds[i] < most_s || (seconds[i] == most_s && i > printed)) &&
                (next < 0 || seconds[i] > seconds[next]))
                next = i;
        if (next < 0 || seconds[next] < NOTABLE * step_s) break;
        used += (size_t)snprintf(text + used, sizeof text - used, "%sstage %d: %.1f%%", used > 0 ? ", " : "", next,
                                 100 * seconds[next] / step_s);
        most_s = seconds[next];
        printed = next;
    }
    if (used > 0) hapt_print_wrapped(env, 27, "    %-22s %s\n", what, text);
}

static void print_path(const struct hapt_env *env, const struct outcome *outcome)
{
    const int stages = outcome->plan->stage_count;
    const double step_s = outcome->simulation->step_s;
    if (step_s <= 0) return;
    hapt_print(env, "  critical path (what decides the step):\n");
    print_path_of(env, "computing", outcome->path.compute_s, stages, step_s);
    print_path_of(env, "transfers behind", outcome->path.transfer_s, stages, step_s);
    print_path_of(env, "sums and updates", outcome->path.update_s, stages, step_s);
    if (outcome->path.exchange_s >= NOTABLE * step_s)
        hapt_print(env, "    %-22s %.1f%%\n", "tied parameters", 100 * outcome->path.exchange_s / step_s);
}

static void print_outcome(const struct hapt_env *env, const struct outcome *outcome)
{
    const struct hapt_plan *plan = outcome->plan;
    const struct hapt_simulation *simulation = outcome->simulation;
    char time[4][32], bytes[2][32];
    hapt_print_wrapped(
        env, 6, "simulated step %s: %s%s%s, %d stages, %d microbatches, steady period %s, t_max %s, communication %s\n",
        hapt_units_time(simulation->step_s, time[0]), hapt_schedule_kind_name(plan->schedule),
        plan->blocking ? " without overlap" : "", plan->split ? ", split backward" : "", plan->stage_count,
        plan->microbatches, hapt_units_time(outcome->period_s, time[1]), hapt_units_time(plan->t_max_s, time[2]),
        outcome->hidden ? "hidden" : "not hidden");
    const double compute_s = slowest_compute_s(plan);
    if (compute_s > 0)
        hapt_print_wrapped(
            env, 6, "  the link is the limit: its slowest transfer takes %.3g times as long as the slowest stage, %s\n",
            plan->t_max_s / compute_s, hapt_units_time(compute_s, time[0]));
    hapt_print(env, "  %5s %-9s %-12s %8s %8s %10s %8s %8s  %s\n", "stage", "layers", "subcluster", "busy", "idle",
               "transfer", "hidden", "launches", "memory of device");
    for (int i = 0; i < plan->stage_count; i++) {
        const struct hapt_plan_stage *stage = &plan->stage[i];
        char layers[32], hidden[32];
        snprintf(layers, sizeof layers, "%d-%d", stage->first_layer, stage->end_layer);
        snprintf(hidden, sizeof hidden, "%.1f %%", 100 * outcome->overlap[i]);
        const bool last = i == plan->stage_count - 1;
        hapt_print(env, "  %5d %-9s %-12s %6.1f %% %6.1f %% %10s %8s %8d  %s of %s\n", i, layers, stage->submesh->name,
                   100 * simulation->busy_s[i] / simulation->step_s, 100 * simulation->idle_s[i] / simulation->step_s,
                   last ? "-" : hapt_units_time(stage->comm_s, time[3]), last ? "-" : hidden, stage->warmup,
                   hapt_units_bytes(stage->memory_bytes, bytes[0]),
                   hapt_units_bytes(stage->device_memory_bytes, bytes[1]));
    }
    print_path(env, outcome);
    if (!outcome->fits) hapt_warn(env, "this schedule does not fit into the devices' memory\n");
}

static enum hapt_status print_json(const struct outcome *outcome)
{
    const struct hapt_plan *plan = outcome->plan;
    const struct hapt_simulation *simulation = outcome->simulation;
    json_t *stages = json_array();
    for (int i = 0; stages && i < plan->stage_count; i++)
        json_array_append_new(stages, json_pack("{s:f, s:f, s:f, s:f, s:i, s:f, s:{s:f, s:f, s:f}}", "busy_s",
                                                simulation->busy_s[i], "idle_s", simulation->idle_s[i], "comm_s",
                                                simulation->comm_s[i], "overlap", outcome->overlap[i], "warmup",
                                                plan->stage[i].warmup, "memory_bytes", plan->stage[i].memory_bytes,
                                                "critical", "compute_s", outcome->path.compute_s[i], "transfer_s",
                                                outcome->path.transfer_s[i], "update_s", outcome->path.update_s[i]));
    json_t *object =
        json_pack("{s:s, s:i, s:i, s:s, s:f, s:f, s:f, s:s, s:b, s:b, s:o}", "format", "hapt-simulation", "version", 1,
                  "microbatches", plan->microbatches, "schedule", hapt_schedule_kind_name(plan->schedule),
                  "simulated_s", simulation->step_s, "period_s", outcome->period_s, "t_max_s", plan->t_max_s, "limit",
                  plan->limit, "hidden", outcome->hidden, "fits", outcome->fits, "stages", stages);
    if (object && plan->blocking) json_object_set_new(object, "blocking", json_true());
    if (object && plan->split) json_object_set_new(object, "split_backward", json_true());
    if (object) json_object_set_new(object, "critical_exchange_s", json_real(outcome->path.exchange_s));
    return hapt_json_print(object, "the simulation's", 2);
}

static enum hapt_status check_options(const struct hapt_env *env, const struct hapt_config *config)
{
    if (!hapt_config_text(config, "profile"))
        HAPT_TRY(hapt_env_agree(env->world,
                                hapt_phase_refuse_unused(config, "it needs the costs of --profile", "split-backward")));
    HAPT_TRY(hapt_env_agree(env->world, hapt_emit_refuse_trainers(config)));
    if (hapt_emit_asked(config)) return hapt_emit_check(env, config);
    return hapt_env_agree(env->world,
                          hapt_phase_refuse_unused(config, "without --emit, nothing is written", "output overwrite"));
}

enum hapt_status hapt_command_simulate(struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena)
{
    struct hapt_plan *plan;
    struct hapt_profile *profile;
    struct outcome outcome;
    HAPT_TRY(check_options(env, config));
    enum hapt_status status = prepare(config, arena, &plan, &profile);
    if (status == HAPT_OK) status = simulate_step(plan, arena, &outcome);
    HAPT_TRY(hapt_env_agree(env->world, status));
    print_outcome(env, &outcome);
    if (hapt_emit_asked(config)) HAPT_TRY(hapt_emit_plan(env, config, plan, profile, NULL));
    if (env->world_rank == 0 && env->quiet) status = print_json(&outcome);
    return hapt_env_agree(env->world, status);
}
