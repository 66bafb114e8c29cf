/* hapt plan: the best plan of a profile, or of a model on a cluster. */
#include "outputs.h"
#include "plan_why.h"

const char hapt_command_plan_help[] =
    "Searches stages, submeshes and order of subclusters for the least time of a step: the sum of t_i + 2 c_i over "
    "the\n"
    "stages and (B - 1) t_max, where the pace t_max is no less than every t_i (compute of a microbatch) and c_i "
    "(transfer\n"
    "behind the stage), and every device holds its parameters and the activations of all microbatches in flight. The "
    "plan\n"
    "is the exact optimum, or within --gap of it: then the plan says how close it is proven to be. Under --schedule\n"
    "other than h1f1b the launch counts of that schedule rule the memory.\n"
    "Where the profile has stages on devices of several subclusters, such a stage may stand between the stages of two "
    "of\n"
    "them, or first or last; its boundaries take as long as the slowest of the nearest links of its subclusters. "
    "JSON:\n"
    "\"devices\" and \"ratios\" instead of \"subcluster\".\n"
    "--run outputs/NAME/run.h5 corrects the profile by what an earlier run measured: candidates of each subcluster "
    "take longer or shorter\n"
    "in the proportion in which its stages did. What a profile cannot see is in there: other work on the hosts, what "
    "the network costs\n"
    "the cores, clocks that fall under load. JSON: \"corrected\", the factor of each subcluster.\n"
    "--stages prices given stages instead; --strategy even splits the layers evenly over the submeshes of the "
    "optimum.\n"
    "Other systems in the same simulator (HAPT 6.1), each at its best settings:\n"
    "  megatron    even blocks, one submesh and tensor-parallel degree everywhere, every device used; 1f1b\n"
    "  alpa        8 or 16 layers, takes devices for identical and links for free; eager1f1b\n"
    "  hexiscale   48 layers, knows the devices' speeds, stands still while it sends and receives; 1f1b\n"
    "--granularity N and --ignore-communication are ablations of hapt (HAPT 6.4, 6.5). --compare prints one table of "
    "all "
    "of\n"
    "them: simulated step, its ratio to hapt's, pace, the slowest link between subclusters and how much of it is "
    "hidden,\n"
    "balance, model FLOPs utilisation; a system that has no plan gives its reason. (Hidden is below zero where a "
    "transfer\n"
    "stops both ends, and so costs more than it takes.)\n"
    "\n"
    "--explain says what limits the plan (compute of a stage, the link between two subclusters and the bandwidth at "
    "which\n"
    "it takes as long as the slowest stage, memory), then its rivals: the best plans with the subclusters in another "
    "order,\n"
    "on fewer or more of them, with the cut between two of them a layer earlier or later or where other bytes cross, "
    "with a\n"
    "stage split in two or two of a subcluster joined (the other submeshes stay, all cuts are free), with idle devices "
    "used\n"
    "or left, and those that are faster but do not fit. Each is the exact optimum of its kind; its reason\n"
    "names what makes it slower (the pace of its slowest stage, link or launches; filling and draining its stages; "
    "its\n"
    "transfers) or how many bytes which stage lacks. Candidates that the profile left out for want of memory are not "
    "seen.\n"
    "Last comes whether it is worth it: against each subcluster alone with as many microbatches, and against separate "
    "jobs\n"
    "side by side. With --stages the best plan is among the rivals. With --input the program of every stage follows: "
    "the index by\n"
    "which each axis of its devices cuts an operator, the collectives between them and what they take, each kind of "
    "layer once\n"
    "(--full: every layer). JSON: \"explain\" with limit, rivals, worth, programs.\n"
    "\n"
    "--what-if sweeps and searches the best plan at every point (with --stages: prices the given ones); commas "
    "separate sweeps:\n"
    "  link=1..25Gbit/s             every link between subclusters; link=a100-v100:1..25Gbit/s one of them\n"
    "  nodes.v100=1..8              nodes of a subcluster; with --profile alone at most the profile's own\n"
    "  memory.v100=16..80GB         of a device; a profile that was read knows no candidates beyond its own memory\n"
    "  microbatches=32..512         B\n"
    "RANGE:N takes N points. On a cluster on paper nodes and memory are predicted anew at each. The knee is the least\n"
    "bandwidth or memory from which the step stays within 1 % of that at the largest, the nodes from which no further "
    "one\n"
    "gains 2 %, the microbatches from which one costs at most 2 % more than at the most. A link's sweep also names "
    "the\n"
    "bandwidth at which its transfer takes as long as the slowest stage. JSON: \"what_if\", one entry a sweep.\n"
    "\n"
    "hapt plan --diff a.h5 b.h5 shows two plan files side by side: how their steps compare (x: second to first), which "
    "stages\n"
    "are counterparts (each overlaps the other's layers most) and what changed in them (= nothing, ~ something, - "
    "gone,\n"
    "+ new), and which layers run in another subcluster. JSON: format hapt-plan-diff with stages, moved, a and b.\n"
    "\n"
    "A plan file (--output) holds one row a stage in each table:\n"
    "  /stage_layers [S][2]            layers [first, end), counted from 0\n"
    "  /stage_ops [S][2]               forward operators [first, end); -1 when planned from a profile alone\n"
    "  /stage_subcluster, _name [S]    where it runs\n"
    "  /stage_submesh [S][2]           nodes, devices per node\n"
    "  /stage_tensor_parallel [S]      of the devices of a node; the other factor of the submesh is data-parallel\n"
    "  /stage_program [S], /program_k  where stages run synthesised programs: k of each (0: none); per axis of the "
    "devices its\n"
    "                                  instructions and ratios\n"
    "  /stage_warmup [S]               microbatches in flight at most\n"
    "  /stage_compute, _forward, _step, _comm [S]          seconds: t_i, its forward part, once per step, c_i\n"
    "  /stage_parameter_bytes, _activation_bytes, _memory_bytes, _device_memory_bytes [S]     per device\n"
    "  /mixed_stage, _subcluster, _subcluster_name, _devices, _*_bytes [R]    where stages run on several subclusters: "
    "a row\n"
    "                                  for each of theirs\n"
    "  /mixed_ratio                    share of the work of each of their devices, row by row; NaN: not told\n"
    "and as attributes: microbatches, schedule, hide_threshold, latency and simulated (s), t_max (s), limit (what "
    "sets\n"
    "the pace: compute, link or memory), balance_eta (HAPT 25), blocking (1: priced without overlap),\n"
    "flops_per_microbatch, peak_flops, search figures; optional: precision (fp32, tf32, bf16, fp16) of its times and "
    "bytes, which\n"
    "training keeps to unless --precision says otherwise, boundary_dtype (of what crosses between stages), profile "
    "(measured,\n"
    "predicted). Times and bytes are those of --precision: on GPUs, also on paper, what would run there.\n";

/* From --profile, or from --input: measured where the ranks are, predicted on paper. `layers` stays NULL with --profile
 * alone. */
static enum hapt_status get_profile(struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena,
                                    struct hapt_layers **layers, struct hapt_plan_paper *from,
                                    struct hapt_plan_paper *paper, struct hapt_profile **profile)
{
    const char *path = hapt_config_text(config, "profile");
    struct hapt_model *model = NULL;
    struct hapt_cluster *cluster = NULL;
    *layers = NULL;
    *paper = *from = (struct hapt_plan_paper){0};
    if (hapt_config_text(config, "input")) {
        HAPT_TRY(hapt_phase_model(env, config, arena, &model));
        if (!path) HAPT_TRY(hapt_phase_cluster(env, config, false, arena, &cluster));
        HAPT_TRY(hapt_phase_precision(env, config, cluster, NULL, model));
        HAPT_TRY(hapt_phase_layers(env, config, model, arena, layers));
        *from = (struct hapt_plan_paper){cluster, model, *layers};
    }
    if (path) return hapt_phase_profile(env, config, NULL, NULL, NULL, arena, profile); /* from there */
    if (!cluster->subcluster_of_rank || hapt_config_bool(config, "predict")) *paper = *from;
    return hapt_phase_profile(env, config, cluster, model, *layers, arena, profile);
}

static enum hapt_status check_options(const struct hapt_config *config, struct hapt_arena *arena)
{
    const char *path = hapt_config_text(config, "profile");
    HAPT_TRY(hapt_plan_diff_options(config));
    if (hapt_config_bool(config, "diff")) return HAPT_OK;
    if (!path && !hapt_config_text(config, "input"))
        return hapt_fail(HAPT_ERR_USAGE, "give --profile P.h5, or --input m.h5 with --cluster C.json",
                         "nothing to plan");
    if (path && hapt_config_text(config, "cluster"))
        return hapt_fail(HAPT_ERR_USAGE, "leave out one of them",
                         "--profile already holds its cluster: --cluster says it twice");
    const char *const measuring[] = {"imbalance",         "profile-seconds", "predict", "efficiency", "tensor-parallel",
                                     "optimizer",         "momentum",        "mixed",   "mixed-rows", "segments",
                                     "sharded-optimizer", "device",          NULL};
    const char *const choosing[] = {"strategy", "schedule", "stages",  "granularity", "ignore-communication",
                                    "output",   "explain",  "what-if", NULL};
    const char *const cutting[] = {"layers-per-model", "heavy-minimum", "threads", "precision", NULL};
    if (path) HAPT_TRY(hapt_phase_unused(config, "--profile is not measured again", measuring));
    if (path && !hapt_config_text(config, "input"))
        HAPT_TRY(hapt_phase_unused(config, "--profile without --input holds layers, not operators", cutting));
    if (hapt_config_bool(config, "compare"))
        return hapt_phase_unused(config, "--compare goes through all strategies and schedules, and writes no plan",
                                 choosing);
    if (!path && hapt_config_text(config, "run") && hapt_config_text(config, "what-if"))
        return hapt_fail(HAPT_ERR_USAGE, "give --profile P.h5 instead of --input, or leave out one of them",
                         "--what-if predicts profiles anew, --run would correct the first one only");
    HAPT_TRY(hapt_phase_plan_options(config));
    return hapt_plan_why_options(config, arena);
}

/* --run: the profile corrected by what a run measured, in a copy; `extra` says by how much. */
static enum hapt_status correct(struct hapt_env *env, const struct hapt_config *config, struct hapt_arena *arena,
                                json_t *extra, struct hapt_profile **profile)
{
    const char *path = hapt_config_text(config, "run");
    struct hapt_report *report = NULL;
    struct hapt_profile *copy = NULL;
    double ratio[HAPT_MAX_SUBCLUSTERS];
    if (!path) return HAPT_OK;
    enum hapt_status status = hapt_report_load(path, arena, &report);
    if (status == HAPT_OK) status = hapt_profile_copy(*profile, arena, &copy);
    if (status == HAPT_OK) status = hapt_report_correct(report, copy, ratio);
    HAPT_TRY(hapt_env_agree(env->world, status));
    json_t *corrected = json_object();
    for (int c = 0; c < copy->cluster_count; c++) {
        hapt_note(env, "%s: stages took %.3f times as long as the profile says\n", copy->cluster[c].name, ratio[c]);
        json_object_set_new(corrected, copy->cluster[c].name, json_real(ratio[c]));
    }
    json_object_set_new(extra, "corrected", corrected);
    *profile = copy;
    return HAPT_OK;
}

/* The questions about the plan, and everything as JSON. */
static enum hapt_status answer(struct hapt_env *env, struct hapt_config *config, const struct hapt_profile *profile,
                               const struct hapt_plan_paper *from, const struct hapt_plan_paper *paper,
                               const struct hapt_plan *plan, struct hapt_arena *arena, json_t *extra)
{
    enum hapt_status status = HAPT_OK;
    if (hapt_config_bool(config, "explain")) status = hapt_plan_why(env, config, profile, plan, arena, extra);
    if (status == HAPT_OK && hapt_config_bool(config, "explain"))
        status = hapt_plan_programs(env, config, from, plan, arena, extra);
    if (status == HAPT_OK && hapt_config_text(config, "what-if"))
        status = hapt_plan_what_if(env, config, profile, paper, arena, extra);
    if (status == HAPT_OK) {
        if (env->world_rank == 0 && env->quiet) status = hapt_plan_print_json(plan, extra);
        status = hapt_env_agree(env->world, status);
    }
    return status;
}

static enum hapt_status run(struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena, json_t *extra)
{
    struct hapt_layers *layers;
    struct hapt_profile *profile;
    struct hapt_plan *plan;
    struct hapt_plan_paper from, paper;
    HAPT_TRY(hapt_env_agree(env->world, check_options(config, arena)));
    HAPT_TRY(hapt_outputs_check(env, config, 1, &(struct hapt_output){.option = "output", .format = "hapt-plan"}));
    if (hapt_config_bool(config, "diff")) return hapt_plan_diff_print(env, config, arena);
    HAPT_TRY(get_profile(env, config, arena, &layers, &from, &paper, &profile));
    HAPT_TRY(correct(env, config, arena, extra, &profile));
    HAPT_TRY(hapt_plan_what_if_check(env, config, profile, &paper, arena));
    if (hapt_config_bool(config, "compare")) return hapt_plan_compare_print(env, config, profile, layers, arena);
    HAPT_TRY(hapt_phase_plan(env, config, profile, layers, arena, &plan));
    hapt_plan_print(env, plan);
    hapt_plan_print_link(env, profile, plan);
    enum hapt_status status = HAPT_OK;
    if (env->world_rank == 0 && hapt_config_text(config, "output"))
        status = hapt_plan_save(hapt_config_text(config, "output"), plan);
    HAPT_TRY(hapt_env_agree(env->world, status));
    return answer(env, config, profile, &from, &paper, plan, arena, extra);
}

enum hapt_status hapt_command_plan(struct hapt_env *env, struct hapt_config *config)
{
    struct hapt_arena arena;
    hapt_arena_init(&arena);
    json_t *extra = json_object();
    const enum hapt_status status = run(env, config, &arena, extra);
    json_decref(extra);
    hapt_arena_release(&arena);
    return status;
}
