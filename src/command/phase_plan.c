#include <math.h>
#include <string.h>

#include "fix.h"
#include "hapt/candidates.h"
#include "hapt/search.h"
#include "hapt/unit_choice.h"
#include "phases.h"

/* The units that a range overlaps. */
static int units_in(const struct hapt_unit *unit, int count, const struct hapt_plan_stage *stage, int *first)
{
    int end;
    *first = 0;
    while (*first < count && unit[*first].end_op <= stage->first_op) ++*first;
    for (end = *first; end < count && unit[end].first_op < stage->end_op; end++) {
    }
    return end - *first;
}

/* Lists the units of a stage that recompute. */
static enum hapt_status bind_units(struct hapt_plan *plan, struct hapt_plan_stage *stage, const struct hapt_unit *unit,
                                   int units, struct hapt_unit_choices *choices)
{
    struct hapt_unit *own;
    unsigned char *choice;
    int first, end;
    HAPT_NEW(choice, plan->arena, units);
    HAPT_TRY(hapt_unit_choose(choices, stage->first_op, stage->end_op, stage->layout.recompute, choice, &first, &end));
    HAPT_NEW(own, plan->arena, end - first);
    stage->layout.unit = own;
    stage->layout.unit_count = 0;
    for (int u = first; u < end; u++) {
        if (choice[u] == HAPT_UNIT_KEPT) continue;
        own[stage->layout.unit_count] = unit[u];
        own[stage->layout.unit_count++].selective = choice[u] == HAPT_UNIT_SELECTIVE;
    }
    return HAPT_OK;
}

/* Sets the operator ranges of a plan's stages, the units that recompute, and those of weights that move. */
static enum hapt_status bind_operators(struct hapt_plan *plan, const struct hapt_layers *layers)
{
    struct hapt_unit *unit, *weight_unit;
    struct hapt_unit_choices *choices;
    int units, weight_units, first;
    if (plan->layer_count != layers->count)
        return hapt_fail(HAPT_ERR_INPUT, "plan again for this model and granularity (--layers-per-model)",
                         "the plan has %d layers, the model %d", plan->layer_count, layers->count);
    HAPT_TRY(hapt_layers_units(layers, plan->arena, &unit, &units));
    HAPT_TRY(hapt_layers_weight_units(layers, plan->arena, &weight_unit, &weight_units));
    HAPT_TRY(hapt_unit_choices_create(layers->graph, unit, units, plan->arena, &choices));
    for (int i = 0; i < plan->stage_count; i++) {
        struct hapt_plan_stage *stage = &plan->stage[i];
        stage->first_op = hapt_layers_first_op(layers, stage->first_layer);
        stage->end_op = layers->end_op[stage->end_layer - 1];
        if (stage->layout.recompute > 0) HAPT_TRY(bind_units(plan, stage, unit, units, choices));
        if (!hapt_weights_move(stage->layout.weights_at)) continue;
        stage->layout.weight_unit_count = units_in(weight_unit, weight_units, stage, &first);
        stage->layout.weight_unit = &weight_unit[first];
    }
    return HAPT_OK;
}

static enum hapt_strategy strategy_of(const struct hapt_config *config)
{
    enum hapt_strategy strategy;
    const bool known = hapt_strategy_parse(hapt_config_text(config, "strategy"), &strategy);
    HAPT_ASSERT(known);
    return strategy;
}

static enum hapt_schedule_kind schedule_of(const struct hapt_config *config)
{
    enum hapt_schedule_kind kind;
    const bool known = hapt_schedule_kind_parse(hapt_config_text(config, "schedule"), &kind);
    HAPT_ASSERT(known);
    return kind;
}

/* Refuses options of looped schedules that have no effect on the schedule that runs. */
static enum hapt_status check_loops(const struct hapt_config *config, enum hapt_schedule_kind kind)
{
    if (!hapt_schedule_loops(kind)) {
        const bool none = hapt_config_int(config, "loops") == 1 && hapt_phase_searches_steps(config) &&
                          !hapt_config_given(config, "schedule");
        return hapt_phase_refuse_unused(config, "it is for --schedule interleaved, breadth-first and looped",
                                        none ? "placement loop-batch prefetch" : "loops placement loop-batch prefetch");
    }
    if (kind == HAPT_SCHEDULE_BREADTH_FIRST)
        HAPT_TRY(hapt_phase_refuse_unused(config, "--schedule breadth-first has one group", "loop-batch"));
    if (kind == HAPT_SCHEDULE_LOOPED) return HAPT_OK;
    return hapt_phase_refuse_unused(config, "it is for --schedule looped", "prefetch");
}

bool hapt_phase_explains(const struct hapt_config *config)
{
    return strcmp(hapt_config_text(config, "explain"), "no") != 0;
}

/* Refuses options that the search of looped plans would ignore. */
static enum hapt_status check_looped_search(const struct hapt_config *config, enum hapt_strategy strategy)
{
    if (strategy != HAPT_STRATEGY_HAPT)
        return hapt_fail(HAPT_ERR_USAGE, "leave out --strategy, or choose another --schedule",
                         "--strategy %s has no looped schedules", hapt_strategy_name(strategy));
    if (!strcmp(hapt_config_text(config, "objective"), "formula"))
        return hapt_fail(HAPT_ERR_USAGE, "leave out --objective", "HAPT (13) knows no looped schedules");
    HAPT_TRY(hapt_phase_refuse_unused(config, "looped plans have no proven gap", "gap"));
    if (hapt_config_command(config) != HAPT_COMMAND_PLAN) return HAPT_OK;
    if (hapt_phase_explains(config))
        return hapt_fail(HAPT_ERR_USAGE, "leave out --explain", "--explain compares plans without loops only");
    return hapt_phase_refuse_unused(config, "it compares plans without loops",
                                    "granularity ignore-communication what-if");
}

enum hapt_status hapt_phase_plan_options(const struct hapt_config *config)
{
    const enum hapt_strategy strategy = strategy_of(config);
    const enum hapt_schedule_kind asked = schedule_of(config), runs = hapt_strategy_schedule(strategy, asked);
    const char *name = hapt_strategy_name(strategy);
    HAPT_TRY(check_loops(config, runs));
    if (hapt_schedule_loops(asked)) HAPT_TRY(check_looped_search(config, strategy));
    if (hapt_config_text(config, "stages"))
        HAPT_TRY(hapt_phase_refuse_unused(config, "--stages leaves nothing to choose",
                                          "strategy granularity ignore-communication gap"));
    /* --explain searches rivals, also with --stages */
    const bool searched = hapt_config_command(config) == HAPT_COMMAND_PLAN && hapt_phase_explains(config);
    if (hapt_config_text(config, "stages") && !searched)
        HAPT_TRY(hapt_phase_refuse_unused(config, "--stages determines which devices work", "use-all-devices"));
    if (strategy != HAPT_STRATEGY_HAPT) {
        HAPT_TRY(hapt_phase_refuse_unused(config, "it is for --strategy hapt; other strategies choose their own layers",
                                          "granularity ignore-communication"));
        HAPT_TRY(hapt_phase_refuse_unused(
            config, "it is for --strategy hapt; other strategies have their own objective", "objective"));
    }
    if (strategy != HAPT_STRATEGY_HAPT && strategy != HAPT_STRATEGY_EVEN && hapt_config_given(config, "gap"))
        return hapt_fail(HAPT_ERR_USAGE, "leave out --gap",
                         "--gap applies to the search of --strategy hapt; %s has another search", name);
    if (strategy != HAPT_STRATEGY_HAPT)
        HAPT_TRY(hapt_phase_refuse_unused(
            config, "it is for --strategy hapt; other systems do not split backward passes", "split-backward"));
    if (hapt_config_given(config, "schedule") && runs != asked)
        return hapt_fail(HAPT_ERR_USAGE, "leave out --schedule", "--strategy %s runs %s, not %s", name,
                         hapt_schedule_kind_name(runs), hapt_schedule_kind_name(asked));
    /* even takes its submeshes from an H-1F1B plan, which uses the threshold, under any schedule */
    if (hapt_config_given(config, "hide-threshold") && runs != HAPT_SCHEDULE_H1F1B && strategy != HAPT_STRATEGY_EVEN)
        return hapt_fail(HAPT_ERR_USAGE, "leave out --hide-threshold",
                         "--hide-threshold has no effect: the launch counts of %s do not use it",
                         hapt_schedule_kind_name(runs));
    if (strategy == HAPT_STRATEGY_HEXISCALE && hapt_config_command(config) == HAPT_COMMAND_JOB)
        return hapt_fail(HAPT_ERR_USAGE,
                         "compare with `hapt plan --strategy hexiscale`, or train with another strategy",
                         "--strategy hexiscale plans for a system without overlap, but hapt always overlaps");
    return HAPT_OK;
}

bool hapt_phase_searches_steps(const struct hapt_config *config)
{
    return strategy_of(config) == HAPT_STRATEGY_HAPT && !hapt_config_text(config, "stages") &&
           !hapt_schedule_loops(schedule_of(config)) && strcmp(hapt_config_text(config, "objective"), "formula") != 0 &&
           hapt_config_int(config, "granularity") == 0 && !hapt_config_bool(config, "ignore-communication");
}

/* By default searches of the simulated step choose; other plans are not split. */
static enum hapt_split_choice split_choice(const struct hapt_config *config)
{
    const char *text = hapt_config_text(config, "split-backward");
    const bool searched = hapt_candidates_wants_split(config) && !hapt_schedule_loops(schedule_of(config));
    if (!strcmp(text, "no")) return HAPT_SPLIT_NO;
    if (!hapt_config_given(config, "split-backward") && !searched) return HAPT_SPLIT_NO;
    return !strcmp(text, "yes") ? HAPT_SPLIT_YES : HAPT_SPLIT_AUTO;
}

/* --explain and --what-if study plans without loops, and --gap needs a bound, which looped plans lack. */
static bool may_loop(const struct hapt_config *config)
{
    if (!hapt_phase_searches_steps(config) || hapt_config_given(config, "schedule") ||
        hapt_config_given(config, "gap") || hapt_config_int(config, "loops") == 1)
        return false;
    if (hapt_config_command(config) != HAPT_COMMAND_PLAN) return hapt_config_command(config) == HAPT_COMMAND_JOB;
    return !hapt_phase_explains(config) && !hapt_config_text(config, "what-if");
}

enum hapt_status hapt_phase_strategy(const struct hapt_config *config, const struct hapt_profile *profile,
                                     const struct hapt_layers *layers, struct hapt_arena *arena,
                                     struct hapt_strategy_options *options)
{
    const bool formula = !strcmp(hapt_config_text(config, "objective"), "formula");
    const bool loops = hapt_schedule_loops(schedule_of(config)); /* the model file may ask for them */
    *options = (struct hapt_strategy_options){
        .search = {.objective = formula ? HAPT_OBJECTIVE_FORMULA : HAPT_OBJECTIVE_STEP,
                   .any_schedule = !hapt_config_given(config, "schedule") && !loops,
                   .any_loops = may_loop(config),
                   .any_threshold = !hapt_config_given(config, "hide-threshold"),
                   .microbatches = (int)hapt_config_int(config, "microbatches"),
                   .schedule = schedule_of(config),
                   .loops = {(int)hapt_config_int(config, "loops"), (int)hapt_config_int(config, "loop-batch"),
                             (int)hapt_config_int(config, "prefetch"),
                             !strcmp(hapt_config_text(config, "placement"), "v")},
                   .hide_threshold = hapt_config_real(config, "hide-threshold"),
                   .split = split_choice(config),
                   .use_all_devices = hapt_config_bool(config, "use-all-devices"),
                   .gap = hapt_config_real(config, "gap")},
        .granularity = (int)hapt_config_int(config, "granularity"),
        .ignore_communication = hapt_config_bool(config, "ignore-communication")};
    if (!layers || layers->count != profile->layer_count) return HAPT_OK;
    return hapt_plan_blocks(layers, arena, &options->block_end);
}

enum hapt_status hapt_phase_plan_complete(struct hapt_env *env, const struct hapt_config *config,
                                          const struct hapt_profile *profile, const struct hapt_layers *layers,
                                          struct hapt_plan *plan)
{
    const bool formula = !strcmp(hapt_config_text(config, "objective"), "formula");
    plan->precision = profile->precision;
    plan->profile = profile->origin;
    if (!formula && strategy_of(config) == HAPT_STRATEGY_HAPT) /* the formula's plans, and others', are as they were */
        HAPT_TRY(hapt_env_agree(env->world, hapt_plan_widen_skips(profile, plan)));
    if (!layers) return HAPT_OK;
    plan->threads = hapt_env_threads(env, (int)hapt_config_int(config, "threads"));
    return hapt_env_agree(env->world, bind_operators(plan, layers));
}

static bool keeps_on_hosts(const struct hapt_plan *plan, int subcluster)
{
    for (int i = 0; i < plan->stage_count; i++) {
        const struct hapt_subclusters its = hapt_plan_stage_subclusters(&plan->stage[i]);
        for (int k = 0; k < its.count; k++)
            if (its.index[k] == subcluster &&
                (plan->host_state || hapt_weights_on_host(plan->stage[i].layout.weights_at)))
                return true;
    }
    return false;
}

void hapt_phase_note_hosts(const struct hapt_env *env, const struct hapt_cluster *cluster, const struct hapt_plan *plan)
{
    char names[HAPT_MAX_SUBCLUSTERS * 66] = "";
    if (!cluster || !cluster->from_file) return;
    for (int c = 0; c < cluster->count; c++) {
        const struct hapt_subcluster *own = &cluster->subcluster[c];
        if (own->host_memory_bytes > 0 || !keeps_on_hosts(plan, c)) continue;
        snprintf(names + strlen(names), sizeof names - strlen(names), "%s%s", names[0] ? ", " : "", own->name);
    }
    if (names[0])
        hapt_note(
            env,
            "the cluster file does not say how much memory the hosts of %s have, so that nothing limits what they "
            "keep: add \"host\": {\"memory\": \"256 GB\"}\n",
            names);
}

struct question {
    struct hapt_env *env;
    const struct hapt_config *config;
    struct hapt_strategy_options options;
    const char *note; /* of the strategy */
};

static enum hapt_status force(const struct question *question, const struct hapt_profile *profile,
                              struct hapt_arena *arena, struct hapt_plan **plan)
{
    HAPT_TRY(
        hapt_plan_force(profile, &question->options.search, hapt_config_text(question->config, "stages"), arena, plan));
    return hapt_fix_launches(question->config, profile, *plan);
}

/* The same with split backward passes, also with fewer launches if those do not fit. */
static enum hapt_status force_split(const struct question *question, const struct hapt_profile *profile,
                                    struct hapt_arena *arena, struct hapt_plan **plan)
{
    const struct hapt_profile *view;
    HAPT_TRY(hapt_plan_split_view(profile, arena, &view));
    HAPT_TRY(force(question, view, arena, plan));
    return hapt_plan_split_backward(profile, *plan);
}

static enum hapt_status force_by_choice(const struct question *question, const struct hapt_profile *profile,
                                        struct hapt_arena *arena, struct hapt_plan **plan)
{
    const enum hapt_split_choice split = question->options.search.split;
    struct hapt_plan *other;
    bool fits = true;
    if (split == HAPT_SPLIT_YES) return force_split(question, profile, arena, plan);
    HAPT_TRY(force(question, profile, arena, plan));
    if (split == HAPT_SPLIT_AUTO) HAPT_TRY(hapt_plan_split_if_shorter(profile, *plan, &fits));
    if (fits) return HAPT_OK;
    const enum hapt_status status = force_split(question, profile, arena, &other);
    if (status == HAPT_OK && other->simulated_s < hapt_plan_split_worth(profile) * (*plan)->simulated_s) *plan = other;
    if (status != HAPT_ERR_INFEASIBLE && status != HAPT_ERR_INPUT) return status;
    hapt_fail_reset();
    return HAPT_OK;
}

/* Finds a plan, or prices the given stages. Collective. */
static enum hapt_status find_plan(struct question *question, const struct hapt_profile *profile,
                                  struct hapt_arena *arena, struct hapt_plan **plan)
{
    struct hapt_progress progress;
    enum hapt_status status;
    hapt_progress_init(&progress, question->env, "planning", 0);
    if (hapt_config_text(question->config, "stages"))
        status = hapt_search_agree(question->env->world, &question->options.search,
                                   force_by_choice(question, profile, arena, plan));
    else
        status = hapt_plan_by_strategy(question->env->world, profile, strategy_of(question->config), &question->options,
                                       arena, plan, &question->note);
    hapt_progress_release(&progress);
    return status;
}

static enum hapt_status make_plan(struct hapt_env *env, struct hapt_config *config, const struct hapt_profile *profile,
                                  const struct hapt_layers *layers, bool quietly, struct hapt_arena *arena,
                                  struct hapt_plan **plan)
{
    struct question question = {.env = env, .config = config};
    HAPT_TRY(hapt_env_agree(env->world,
                            hapt_phase_plan_options(config))); /* again: the model file may have set the schedule */
    HAPT_TRY(hapt_env_agree(env->world, hapt_phase_strategy(config, profile, layers, arena, &question.options)));
    question.options.search.may_fail = quietly;
    const enum hapt_status status = find_plan(&question, profile, arena, plan);
    if (question.note) hapt_note(env, "%s: %s\n", hapt_strategy_name(strategy_of(config)), question.note);
    HAPT_TRY(status);
    return hapt_phase_plan_complete(env, config, profile, layers, *plan);
}

enum hapt_status hapt_phase_plan(struct hapt_env *env, struct hapt_config *config, const struct hapt_profile *profile,
                                 const struct hapt_layers *layers, struct hapt_arena *arena, struct hapt_plan **plan)
{
    return make_plan(env, config, profile, layers, false, arena, plan);
}

enum hapt_status hapt_phase_plan_quietly(struct hapt_env *env, struct hapt_config *config,
                                         const struct hapt_profile *profile, const struct hapt_layers *layers,
                                         struct hapt_arena *arena, struct hapt_plan **plan)
{
    return make_plan(env, config, profile, layers, true, arena, plan);
}

void hapt_phase_note_sharding(const struct hapt_env *env, const struct hapt_config *config,
                              const struct hapt_plan *plan)
{
    for (int i = 0; i < plan->stage_count; i++)
        if (plan->stage[i].layout.weights_at == HAPT_WEIGHTS_SHARDED) return;
    if (hapt_phase_weight_sharding(config, false) == HAPT_WEIGHT_SHARDING_ALL)
        hapt_note(env,
                  "--sharded-weights yes: no stage of the plan has weights to shard. That takes several devices that "
                  "share its rows, and no frozen weights; fp32 weights also need the optimizer state on the devices\n");
}

static enum hapt_status plan_either(struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena,
                                    struct hapt_planning *planning)
{
    struct hapt_plan *plan = NULL, *other;
    if (!planning->other)
        return hapt_phase_plan(env, config, planning->profile, planning->layers, arena, &planning->plan);
    enum hapt_status status = hapt_phase_plan_quietly(env, config, planning->profile, planning->layers, arena, &plan);
    if (status != HAPT_OK && status != HAPT_ERR_INFEASIBLE) return status;
    planning->plan = plan;
    const bool alone = status != HAPT_OK;
    if (alone) hapt_fail_reset();
    status = alone ? hapt_phase_plan(env, config, planning->other, planning->layers, arena, &other)
                   : hapt_phase_plan_quietly(env, config, planning->other, planning->layers, arena, &other);
    if (status == HAPT_OK && (alone || other->simulated_s < plan->simulated_s)) {
        planning->plan = other;
        planning->profile = planning->other;
    }
    if (alone || status != HAPT_ERR_INFEASIBLE) return status;
    hapt_fail_reset();
    return HAPT_OK;
}

enum hapt_status hapt_phase_plan_either(struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena,
                                        struct hapt_planning *planning)
{
    HAPT_TRY(plan_either(env, config, arena, planning));
    hapt_phase_note_sharding(env, config, planning->plan);
    return HAPT_OK;
}

/* Sets the operator ranges of a plan that was made from a profile alone. They come from the model's layers at the given
 * granularity. If the number of these layers differs from the plan's, layers by operator are tried, then the plan's
 * number. */
static enum hapt_status give_operators(const struct hapt_model *model, const struct hapt_config *config,
                                       struct hapt_arena *arena, struct hapt_plan *plan)
{
    struct hapt_layers *layers = NULL;
    struct hapt_layers_options options = {.granularity = (int)hapt_config_int(config, "layers-per-model"),
                                          .heavy_minimum = (int)hapt_config_int(config, "heavy-minimum")};
    if (plan->stage[0].first_op >= 0) return HAPT_OK;
    HAPT_TRY(hapt_layers_build(model->graph, &options, arena, &layers));
    if (layers->count != plan->layer_count) {
        options.granularity = HAPT_LAYERS_BY_OPERATOR;
        HAPT_TRY(hapt_layers_build(model->graph, &options, arena, &layers));
    }
    if (layers->count != plan->layer_count) {
        options.granularity = plan->layer_count;
        HAPT_TRY(hapt_layers_build(model->graph, &options, arena, &layers));
    }
    return bind_operators(plan, layers);
}

/* --loop-batch and --prefetch of the schedule that will run. */
static enum hapt_status override_loops(const struct hapt_config *config, enum hapt_schedule_kind kind, int microbatches,
                                       struct hapt_plan *plan, bool *changes)
{
    const bool batch_given = hapt_config_given(config, "loop-batch"), given = hapt_config_given(config, "prefetch");
    const int old_batch = plan->loop_batch, old_prefetch = plan->prefetch;
    HAPT_TRY(check_loops(config, kind));
    if (!hapt_schedule_loops(kind)) return HAPT_OK;
    if (kind != plan->schedule) plan->loop_batch = plan->prefetch = 0;
    if (batch_given) plan->loop_batch = (int)hapt_config_int(config, "loop-batch");
    if (given) plan->prefetch = hapt_config_int(config, "prefetch") > 0 ? (int)hapt_config_int(config, "prefetch") : 0;
    *changes = plan->loop_batch != old_batch || plan->prefetch != old_prefetch;
    if (*changes || kind != plan->schedule || microbatches != plan->microbatches) /* chosen for other lists */
        for (int s = 0; s < plan->submesh_count; s++) plan->submesh[s].ahead = 0;
    return HAPT_OK;
}

enum hapt_status hapt_phase_plan_override(const struct hapt_config *config, struct hapt_plan *plan)
{
    const bool given = hapt_config_given(config, "hide-threshold");
    const enum hapt_schedule_kind kind = hapt_config_given(config, "schedule") ? schedule_of(config) : plan->schedule;
    const int microbatches =
        hapt_config_given(config, "microbatches") ? (int)hapt_config_int(config, "microbatches") : plan->microbatches;
    const double hide_threshold = given ? hapt_config_real(config, "hide-threshold") : plan->hide_threshold;
    bool loops = false;
    HAPT_TRY(override_loops(config, kind, microbatches, plan, &loops));
    if (!loops && kind == plan->schedule && microbatches == plan->microbatches &&
        hide_threshold == plan->hide_threshold)
        return HAPT_OK;
    return hapt_plan_change(plan, kind, microbatches, hide_threshold);
}

/* Finds forward-only stages and the transfer slots for skips. The memory of the slots counts if the profile is known.
 */
static enum hapt_status adapt(const struct hapt_model *model, const struct hapt_profile *profile,
                              struct hapt_plan *plan)
{
    const int slots = plan->transfer_slots, edges = plan->edge_count;
    HAPT_TRY(hapt_plan_freeze(plan, hapt_graph_first_trained(model->graph)));
    HAPT_TRY(hapt_plan_choose_skip_slots(plan, model->graph));
    const bool more_edges = plan->edge_count != edges, more_slots = plan->transfer_slots != slots;
    if (more_slots && profile) HAPT_TRY(hapt_plan_price_launches(profile, plan));
    if (more_edges) HAPT_TRY(hapt_plan_choose_skip_slots(plan, model->graph)); /* the profile does not know them */
    if (!more_edges && (profile || !more_slots)) return HAPT_OK;
    return hapt_plan_change(plan, plan->schedule, plan->microbatches, plan->hide_threshold);
}

enum hapt_status hapt_phase_plan_adapt(struct hapt_env *env, const struct hapt_model *model,
                                       const struct hapt_profile *profile, struct hapt_plan *plan)
{
    return hapt_env_agree(env->world, adapt(model, profile, plan));
}

/* A checkpoint's plan is kept unchanged, so another --schedule would be ignored: an error. */
static enum hapt_status check_kept(const struct hapt_config *config, const struct hapt_plan *plan)
{
    const char *split = hapt_config_text(config, "split-backward");
    if (hapt_config_given(config, "split-backward") && strcmp(split, plan->split ? "no" : "yes") == 0)
        return hapt_fail(HAPT_ERR_USAGE, "leave out --split-backward, or plan again with hapt --replan",
                         "--resume keeps the checkpoint's backward passes, which are %s",
                         plan->split ? "split" : "not split");
    HAPT_TRY(hapt_phase_refuse_unused(config, "--resume keeps the checkpoint's lists", "loop-batch prefetch"));
    if (!hapt_config_given(config, "schedule") || schedule_of(config) == plan->schedule) return HAPT_OK;
    return hapt_fail(HAPT_ERR_USAGE, "leave out --schedule, or plan again with hapt --replan",
                     "--resume keeps the checkpoint's schedule %s", hapt_schedule_kind_name(plan->schedule));
}

static enum hapt_status load_given(struct hapt_config *config, const struct hapt_model *model,
                                   const struct hapt_checkpoint *checkpoint, struct hapt_arena *arena,
                                   struct hapt_plan **plan)
{
    if (checkpoint) {
        *plan = checkpoint->plan;
        HAPT_TRY(check_kept(config, *plan));
        HAPT_TRY(give_operators(model, config, arena, *plan));
        return adapt(model, NULL, *plan);
    }
    HAPT_TRY(hapt_plan_load(hapt_config_text(config, "plan"), arena, plan));
    HAPT_TRY(give_operators(model, config, arena, *plan));
    HAPT_TRY(hapt_phase_plan_override(config, *plan));
    return adapt(model, NULL, *plan);
}

/* A plan fits every model with as many layers, but its times hold for the model that it was made for. Rows change the
 * work in proportion, except for the capacities of experts, which are rounded. */
static void warn_of_other_model(const struct hapt_env *env, const struct hapt_config *config,
                                const struct hapt_model *model, const struct hapt_plan *plan)
{
    const int rows = plan->rows > 0 ? plan->rows : model->microbatch;
    const double flops = hapt_model_flops(model) * rows / model->microbatch;
    if (plan->flops <= 0 || fabs(flops - plan->flops) <= 0.05 * plan->flops) return;
    hapt_warn(
        env,
        "%s was made for another model, of %.3g GFLOP a microbatch; this one computes %.3g: the plan's times do not "
        "hold, and a new plan may be faster\n",
        hapt_config_text(config, "plan"), plan->flops * 1e-9, flops * 1e-9);
}

enum hapt_status hapt_phase_plan_given(struct hapt_env *env, struct hapt_config *config, const struct hapt_model *model,
                                       const struct hapt_checkpoint *checkpoint, struct hapt_arena *arena,
                                       struct hapt_plan **plan)
{
    /* No warning for --resume auto: a job that is submitted again always gives its first plan. */
    if (checkpoint && hapt_config_given(config, "plan") && strcmp(hapt_config_text(config, "resume"), "auto") != 0)
        hapt_warn(env, "--resume keeps the plan of %s; --plan is not read\n", checkpoint->path);
    HAPT_TRY(hapt_env_agree(env->world, load_given(config, model, checkpoint, arena, plan)));
    if (!checkpoint) warn_of_other_model(env, config, model, *plan);
    return HAPT_OK;
}
