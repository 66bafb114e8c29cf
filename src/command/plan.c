/* hapt plan: finds the best plan of a profile, or of a model on a cluster. */
#include "emit.h"
#include "fix.h"
#include "hapt/picture.h"
#include "outputs.h"
#include "plan_explain.h"
#include "strategy_preset.h"

const char hapt_command_plan_help[] =
    "Searches stages, submeshes, the order of subclusters and launch counts for the least simulated step. A lower\n"
    "bound of all plans is printed with it. --schedule and --hide-threshold restrict the launch counts. JSON:\n"
    "\"bound_s\", \"bound_gap\". Tensors that stages past the next one read are messages of their own; each crosses a\n"
    "link between subclusters once. JSON: \"messages\".\n"
    "--objective formula minimises HAPT (13) instead: the sum of t_i + 2 c_i over the stages plus (B - 1) t_max.\n"
    "t_i is a stage's compute time per microbatch, c_i the transfer time at its end, B the number of microbatches.\n"
    "t_max is at least every t_i and c_i. The plan is the exact optimum, or within --gap of it; then its proven\n"
    "distance is printed. With a --schedule other than h1f1b, that schedule's launch counts determine the memory.\n"
    "Every device must hold its parameters and the activations of all microbatches in flight.\n"
    "Split backward passes (zero bubble) make the gradients of parameters in idle times. A device then holds some\n"
    "gradients of activations for longer; the launches must fit with them. The number of waiting passes is the one\n"
    "that fits and gives the shortest step, and the boundaries of the stages are moved for it. --split-backward auto,\n"
    "the default: splits if that step is shorter, with measured times by 1 %. The lower bound holds for all plans,\n"
    "split and not; with --split-backward no, for those without. JSON: \"split_backward\"; per stage \"weight_s\",\n"
    "\"slots\", \"weight_slots\".\n"
    "A stage may drop the activations inside a block and make them again in the backward pass\n"
    "(--recompute): all of them, or selectively those of norms, activation functions and other light operators, which\n"
    "takes little time. auto, the default, considers this if plans that keep everything are slower for lack of\n"
    "memory, or if there is none. Losses and weights stay the same bits. Mixed and synthesised stages keep\n"
    "everything. JSON: per stage \"recomputed_units\", and how many of them are \"selective_units\". A measured\n"
    "profile has the times of stages that keep everything, and of the forward operators that run again: a predicted\n"
    "part of the measured forward times. With --recompute all stages begin and end at blocks.\n"
    "--offload optimizer keeps the optimizer state of all stages in the memory of the hosts, and with 16-bit weights\n"
    "their fp32 master copies. The update copies both to the device and back, part by part; losses and weights stay\n"
    "the same bits. The copies take the time that the cluster file's host bandwidth gives (hapt help topology),\n"
    "once a step. --update-order priority lets the next step begin at once: each operator of its first forward pass\n"
    "waits only for the update of its own weights, so that the copies of the others hide behind it. This holds for\n"
    "stages of one device, without loops. JSON: \"offload\", per stage \"deferred_s\".\n"
    "With --update-on host the CPUs of the hosts update the parameters. Gradients are copied to them, weights back:\n"
    "with 16-bit weights and AdamW these are 6 bytes of a parameter instead of 24. The cluster file's \"update_rate\"\n"
    "says how fast a host is. auto, the default, takes host if it is faster on all devices (GPUs: and the rate is\n"
    "given). CPU devices get the same bits; the last bits of a GPU's own updates may differ.\n"
    "--offload weights keeps the weights there as well. Each pass copies them to the device, block by block, while it\n"
    "computes with the block before; only two blocks are on the device. Mixed and synthesised stages, and those with\n"
    "frozen weights, keep their weights. --offload gradients also keeps there the gradients of stages of one device\n"
    "whose weights no other stage has; three blocks of them are on the device. A backward pass fetches those of the\n"
    "next block and returns those of the block before while it computes; a step's first one fetches none. The hosts\n"
    "update. auto plans stages so if there is no plan otherwise, first their weights, then gradients as well. JSON:\n"
    "per stage \"host_weights\" and \"host_gradients\".\n"
    "--sharded-weights shards the weights of data-parallel stages (ZeRO-3). Each device has a slice of the weights\n"
    "beside its slice of the optimizer state. Before a block runs, its devices gather the block's weights; two blocks\n"
    "are on a device. Gradients stay whole on each device, so their sums keep their order and their bits. Mixed and\n"
    "synthesised stages keep their weights, and so do those with frozen weights, or with fp32 weights whose optimizer\n"
    "state is on the hosts. JSON: per stage \"sharded_weights\".\n"
    "A mixed stage runs on devices of several subclusters (if the profile has such stages). It may be first, last,\n"
    "or between the stages of two of its subclusters. A transfer at its boundary takes as long as on the slowest of\n"
    "its subclusters' fastest links. JSON: \"devices\" and \"ratios\" instead of \"subcluster\".\n"
    "--global-batch N gives the rows of a step. The planner then chooses the rows of a microbatch: the model's own or\n"
    "a power of two that divides N (measured: the model's own, half, a quarter). The bound holds for all of them.\n"
    "--explain and --what-if then use the chosen rows. JSON: \"rows\", \"global_batch\". --fix restricts single\n"
    "decisions. JSON: \"tied_exchange\" with type, seconds and bytes in each direction, if stages exchange gradients.\n"
    "--schedule interleaved, breadth-first and looped plan several stages for each submesh (--loops, --placement,\n"
    "--loop-batch, --prefetch); nothing is proven. Without --schedule, looped plans are tried with up to 16\n"
    "microbatches and 64 layers, and taken if the step is shorter by 2 %; not with --loops 1, --gap, --explain\n"
    "and --what-if. --stages then names each submesh once per loop. JSON: \"loops\",\n"
    "and for each stage \"submesh\" and \"forward_only\".\n"
    "--run outputs/NAME/run.h5 corrects the profile by an earlier run: each subcluster's times are scaled by\n"
    "measured over profiled stage time. This includes effects that a profile cannot see: other work on the hosts,\n"
    "the CPU cost of the network, lower clocks under load. JSON: \"corrected\", the factor of each subcluster.\n"
    "--stages prices the given stages instead. --strategy even splits the layers evenly over the optimum's\n"
    "submeshes.\n"
    "Other systems in the same simulator (HAPT 6.1), each at its best settings:\n"
    "  megatron    even blocks, one submesh and tensor-parallel degree everywhere, every device used; 1f1b or\n"
    "              interleaved\n"
    "  alpa        8 or 16 layers; assumes identical devices and free links; eager1f1b\n"
    "  pfeife      layers by a beam; assumes identical devices; data parallelism, prefetched forward passes\n"
    "  deepspeed   stages of equal parameter bytes; data parallelism; 1f1b\n"
    "  colossal    stages of equal time on identical devices; 1f1b\n"
    "  hexiscale   48 layers; knows the devices' speeds; a stage does not compute while it sends or receives; 1f1b\n"
    "megatron and hexiscale are also priced as independent pipelines, which hapt cannot run: each holds the whole\n"
    "model and takes its own microbatches; gradients are reduced over them. JSON: \"pipelines\".\n"
    "Strategies of one device inside pipelines (AutoHete 4.1):\n"
    "  recompute-all  hapt with --recompute all --offload no\n"
    "  zero-offload   deepspeed with --recompute all --offload optimizer --update-on host --update-order in-order\n"
    "  stronghold     deepspeed with --recompute all --offload weights --update-on host\n"
    "  autohete       deepspeed with --recompute auto --offload optimizer --update-on host --update-order priority\n"
    "--granularity N and --ignore-communication are ablations of hapt (HAPT 6.4, 6.5). --compare prints one table\n"
    "of hapt, the other systems and the ablations: simulated step, its ratio to hapt's, t_max, the slowest transfer "
    "between subclusters and the\n"
    "share of it that is hidden, balance, model FLOPs utilisation. A system without a plan shows the reason. (The\n"
    "hidden share is negative if a transfer blocks both ends and so costs more than its own time.)\n"
    "\n"
    "--explain first prints what limits the plan: compute of a stage, memory, or the link between two subclusters\n"
    "with the bandwidth at which it takes as long as the slowest stage. For stages that recompute it prints the time\n"
    "that this takes and the memory that keeping everything would need, and of all plans how much longer the step is\n"
    "for sums of gradients, updates and copies of offloaded state. Then it prints the plan's rivals, each the\n"
    "best plan of its kind that a short search finds (--objective formula: the optimum): subclusters in another\n"
    "order; fewer or more of them; the boundary between two of them one layer earlier or later, or where other\n"
    "bytes cross; a stage split in two, or two stages of a subcluster joined (same other submeshes, free\n"
    "boundaries); idle devices used or used ones idle; faster plans that do not fit. Each rival's reason names\n"
    "what makes it slower (t_max set by its slowest stage, link or launches; pipeline fill and drain; transfers),\n"
    "or the missing bytes and their stage. Candidates that the profile left out for lack of memory are not\n"
    "considered. Last, the plan is compared with each subcluster alone, with as many microbatches, and with\n"
    "separate jobs side by side. With --stages the best plan is one of the rivals. --explain all --input adds\n"
    "the program of every stage: the index by which each axis of the devices shards an operator, the collectives\n"
    "between operators and their cost. Equal layers are printed once (--full: every layer). JSON: \"explain\" with\n"
    "limit, recomputing, weights, updates, rivals, worth, and with --input programs.\n"
    "\n"
    "--what-if sweeps a value and searches the best plan at every point (with --stages: prices the given stages).\n"
    "Commas separate sweeps:\n"
    "  link=1..25Gbit/s             every link between subclusters; link=a100-v100:1..25Gbit/s one of them\n"
    "  nodes.v100=1..8              nodes of a subcluster; with --profile alone at most the profile's number\n"
    "  memory=16..80GB              memory of every device; a loaded profile has no candidates beyond its own memory\n"
    "  memory.v100=16..80GB         memory of the devices of a subcluster\n"
    "  microbatches=32..512         B\n"
    "  host-memory=64..512GB        memory of every node, for --offload; host-memory.v100=... of a subcluster's nodes\n"
    "  host-bandwidth=4..50GB/s     between every device and its node's memory; host-bandwidth.v100=... as above\n"
    "  inter-node=1..100Gbit/s      between the nodes of every subcluster; inter-node.v100=... of one\n"
    "  intra-node=16..300GB/s       between the devices of every node; intra-node.v100=... of a subcluster's nodes\n"
    "RANGE:N takes N points. For a cluster on paper, all but links and microbatches is predicted again at each\n"
    "point; hosts and networks inside subclusters can only be swept so. The knee is: the least bandwidth or memory\n"
    "from which the step stays within 1 % of that at the largest value; the number of nodes from which a further\n"
    "node gains less than 2 %; the number of microbatches from which one costs at most 2 % more than at the largest\n"
    "number. A link's sweep also prints the bandwidth at which its transfer takes as long as the slowest stage.\n"
    "JSON: \"what_if\", one entry per sweep.\n"
    "\n"
    "hapt plan --diff a.h5 b.h5 compares two plan files: step times (x: second over first), matching stages (each\n"
    "shares most layers with the other) and their changes (= none, ~ some, - removed, + new), and the layers that\n"
    "run in another subcluster. JSON: format hapt-plan-diff with stages, moved, a and b.\n"
    "\n"
    "--html out.html writes a page without outside references: the predicted timeline of a step, the memory of each\n"
    "stage, the cluster, the plan's rivals (as --compare), the step over the bandwidth of the links with its knee (or\n"
    "the sweeps of --what-if), and the plan in words. Attributes data-* hold its numbers. Rivals and sweep take about\n"
    "ten times as long as the plan. Plans by --strategy and ablations have neither.\n"
    "\n"
    "--emit simgrid|chakra writes the plan's instruction lists as traces for another simulator, to the folder\n"
    "--output, instead of a plan file (hapt help simulate describes the files; it emits an existing plan).\n"
    "--emit torchtitan|megatron|deepspeed writes TRAINER.json for another trainer: settings (the modules of each\n"
    "stage, or its layout), and cannot, sentences on what the trainer lacks. For torchtitan, schedule.csv is the\n"
    "schedule for PyTorch's pipelining runtime. Stages must begin and end at blocks: --recompute all, or --stages.\n"
    "\n"
    "A plan file (--output) holds one row per stage in each table:\n"
    "  /stage_layers [S][2]            layers [first, end), counted from 0\n"
    "  /stage_ops [S][2]               forward operators [first, end); -1 if planned from a profile alone\n"
    "  /stage_subcluster, _name [S]    where it runs\n"
    "  /stage_submesh [S][2]           nodes, devices per node\n"
    "  /stage_tensor_parallel [S]      tensor-parallel degree; the rest of the submesh is data-parallel\n"
    "  /stage_program [S], /program_k  if stages run synthesised programs: k of each (0: none); per axis of the\n"
    "                                  devices its instructions and ratios\n"
    "  /stage_warmup [S]               microbatches in flight at most\n"
    "  /stage_recompute [S]             if stages recompute: of 12 parts of a stage's blocks, those that make all\n"
    "                                   activations again; plus 16 if its other blocks are selective; plus 32 if\n"
    "                                   the parts are of the bytes that the blocks could free\n"
    "  /recomputed_unit [K][3 or 4]     their stage and forward operators [first, end); 1 if the block is selective\n"
    "  /stage_host_weights [S]          if weights are on the hosts: 1 for the stages whose weights are; 2 if their\n"
    "                                   gradients are as well. 3: their weights are sharded\n"
    "  /weight_unit [K][3]              their blocks: stage and forward operators [first, end)\n"
    "  /stage_weight, _slots, _weight_slots, _weight_slot_bytes [S]     if backward passes are split: seconds that\n"
    "                                  gradients of parameters take per microbatch; microbatches whose activations\n"
    "                                  a device holds; of these, those that may wait; bytes that each takes then\n"
    "  /stage_deferred [S][2]          if stages defer their update: seconds of it that the next step's first forward\n"
    "                                  pass may hide; of these, seconds of computation\n"
    "  /stage_submesh_index [S]        stages with the same number share a submesh\n"
    "  /stage_forward_only, _ahead [S] if there are any: 1: no backward pass; loops: forward passes of the submesh\n"
    "                                  before its first backward pass\n"
    "  /stage_compute, _forward, _step, _comm [S]          seconds: t_i, its forward part, once per step, c_i\n"
    "  /stage_parameter_bytes, _activation_bytes, _memory_bytes, _device_memory_bytes [S]     per device\n"
    "  /edge_stages [E][2], _time, _bytes, _link, _share [E], /relay_stages [R][3]    if tensors go past the next\n"
    "                                  stage: messages from stage to stage, seconds and byte per microbatch;\n"
    "                                  messages with the same link above 0 share it, share: of its bandwidth; the\n"
    "                                  second stage of a relay passes messages of the first on to the third\n"
    "  /mixed_stage, _subcluster, _subcluster_name, _devices, _*_bytes [R]    if there are mixed stages: a row for\n"
    "                                  each of their subclusters\n"
    "  /mixed_ratio                    share of the work of each of their devices, row by row; NaN: unknown\n"
    "and as attributes: microbatches, schedule, hide_threshold, latency and simulated (s), t_max (s), limit (what\n"
    "sets t_max: compute, link or memory), balance_eta (HAPT 25), blocking (1: priced without overlap),\n"
    "flops_per_microbatch, peak_flops, search figures. Optional: loop_batch, prefetch of loops;\n"
    "transfer_slots of each message, if loops or skips need more than three;\n"
    "precision of times and bytes (fp32, tf32, bf16, fp16; training uses it unless --precision is given),\n"
    "boundary_dtype (type of the tensors between stages), profile (measured, predicted), rows (of a microbatch, if\n"
    "chosen; training uses them), offload (optimizer: its state is on the hosts; update: they update as well),\n"
    "tied_exchange (16bit; else fp32) and exchange_bytes. Times and bytes are those of\n"
    "--precision; for GPUs, also on paper, those of the precision that would run there.\n";

/* Loads --input with its cluster and layers, as far as they are given. */
static enum hapt_status get_inputs(struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena,
                                   struct hapt_planning *planning)
{
    if (!hapt_config_text(config, "input")) return HAPT_OK;
    HAPT_TRY(hapt_phase_model(env, config, arena, &planning->model));
    if (!hapt_config_text(config, "profile"))
        HAPT_TRY(hapt_phase_cluster(env, config, false, arena, &planning->cluster));
    HAPT_TRY(hapt_phase_precision(env, config, planning->cluster, NULL, planning->model));
    return hapt_phase_layers(env, config, planning->model, arena, &planning->layers);
}

/* Sets *inputs to the inputs of the plan's profile, as far as they are known. *what_if: the same if the profile was
 * predicted, else NULL. */
static void describe(const struct hapt_config *config, const struct hapt_planning *planning,
                     struct hapt_prediction_inputs *inputs, struct hapt_prediction_inputs *what_if)
{
    *inputs = (struct hapt_prediction_inputs){planning->cluster, planning->model, planning->layers};
    *what_if = (struct hapt_prediction_inputs){0};
    if (!planning->cluster) return; /* from a file */
    if (!planning->cluster->subcluster_of_rank || hapt_config_bool(config, "predict")) *what_if = *inputs;
}

static enum hapt_status check_options(struct hapt_config *config, struct hapt_arena *arena)
{
    const char *path = hapt_config_text(config, "profile");
    HAPT_TRY(hapt_plan_diff_options(config));
    if (hapt_config_bool(config, "diff")) return HAPT_OK;
    HAPT_TRY(hapt_strategy_preset(config, arena));
    HAPT_TRY(hapt_fix_options(config, arena));
    if (!path && !hapt_config_text(config, "input"))
        return hapt_fail(HAPT_ERR_USAGE, "give --profile P.h5, or --input m.h5 with --cluster C.json",
                         "nothing to plan");
    if (path && hapt_config_text(config, "cluster"))
        return hapt_fail(HAPT_ERR_USAGE, "leave out one of them",
                         "--profile already holds its cluster, so --cluster has no effect");
    if (path)
        HAPT_TRY(hapt_phase_refuse_unused(config, "--profile is not measured again",
                                          HAPT_PHASE_MEASURING " optimizer momentum sharded-optimizer device"));
    if (path && !hapt_config_text(config, "input"))
        HAPT_TRY(hapt_phase_refuse_unused(config, "--profile without --input holds layers, not operators",
                                          "layers-per-model heavy-minimum threads precision"));
    if (!hapt_config_text(config, "input")) HAPT_TRY(hapt_emit_refuse_trainers(config));
    if (hapt_config_bool(config, "compare"))
        return hapt_phase_refuse_unused(
            config, "--compare covers all strategies and schedules, and writes no plan",
            "strategy schedule stages granularity ignore-communication emit output html explain what-if "
            "split-backward");
    if (!path && hapt_config_text(config, "run") && hapt_config_text(config, "what-if"))
        return hapt_fail(HAPT_ERR_USAGE, "give --profile P.h5 instead of --input, or leave out one of them",
                         "--what-if predicts new profiles, but --run corrects only the first one");
    HAPT_TRY(hapt_phase_plan_options(config));
    HAPT_TRY(hapt_phase_rows_options(config));
    return hapt_plan_explain_options(config, arena);
}

/* --run: corrects a copy of the profile by measured stage times; the factors go to `extra`. */
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

/* Runs --explain and --what-if; prints the JSON. */
static enum hapt_status answer(struct hapt_env *env, struct hapt_config *config, const struct hapt_profile *profile,
                               const struct hapt_prediction_inputs *inputs,
                               const struct hapt_prediction_inputs *what_if_inputs, const struct hapt_plan *plan,
                               struct hapt_arena *arena, json_t *extra, struct hapt_plan_sweeps *sweeps)
{
    enum hapt_status status = HAPT_OK;
    if (hapt_phase_explains(config)) {
        HAPT_TRY(hapt_plan_explain(env, config, profile, plan, arena, extra));
        HAPT_TRY(hapt_plan_programs(env, config, inputs, plan, arena, extra));
    }
    if (hapt_config_text(config, "what-if"))
        HAPT_TRY(hapt_plan_sweep(env, config, hapt_config_text(config, "what-if"), profile, what_if_inputs, arena,
                                 extra, sweeps));
    if (env->world_rank == 0 && env->quiet) status = hapt_plan_print_json(plan, extra);
    return hapt_env_agree(env->world, status);
}

/* Writes --output: the plan, or its traces. */
static enum hapt_status save(const struct hapt_env *env, const struct hapt_config *config,
                             const struct hapt_profile *profile, const struct hapt_model *model,
                             const struct hapt_plan *plan)
{
    enum hapt_status status = HAPT_OK;
    if (hapt_emit_asked(config)) return hapt_emit_plan(env, config, plan, profile, model);
    if (env->world_rank == 0 && hapt_config_text(config, "output"))
        status = hapt_plan_save(hapt_config_text(config, "output"), plan);
    return hapt_env_agree(env->world, status);
}

/* Plans at the given rows of a microbatch. *done: --compare has printed its table. */
static enum hapt_status plan_given_rows(struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena,
                                        json_t *extra, struct hapt_planning *planning, bool *done)
{
    struct hapt_prediction_inputs inputs, what_if;
    HAPT_TRY(hapt_phase_profile(env, config, planning->cluster, planning->model, planning->layers, arena,
                                &planning->profile, &planning->other));
    if (hapt_config_text(config, "run")) planning->other = NULL; /* it is not corrected */
    HAPT_TRY(correct(env, config, arena, extra, &planning->profile));
    describe(config, planning, &inputs, &what_if);
    HAPT_TRY(hapt_plan_what_if_check(env, config, planning->profile, &what_if, arena));
    *done = hapt_config_bool(config, "compare");
    if (*done) return hapt_plan_compare_print(env, config, planning->profile, planning->layers, arena);
    return hapt_phase_plan_either(env, config, arena, planning);
}

static enum hapt_status plan_all_rows(struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena,
                                      struct hapt_planning *planning)
{
    struct hapt_prediction_inputs inputs, what_if;
    HAPT_TRY(hapt_phase_plan_rows(env, config, arena, planning));
    describe(config, planning, &inputs, &what_if);
    return hapt_plan_what_if_check(env, config, planning->profile, &what_if, arena);
}

static enum hapt_status run(struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena, json_t *extra)
{
    struct hapt_planning planning = {0};
    struct hapt_prediction_inputs inputs, what_if;
    struct hapt_plan_sweeps sweeps = {0};
    const struct hapt_output outputs[] = {{.option = "html", .begins = HAPT_PICTURE_PAGE_HEAD},
                                          {.option = "output", .format = "hapt-plan"}};
    bool done = false;
    HAPT_TRY(hapt_env_agree(env->world, check_options(config, arena)));
    if (hapt_emit_asked(config)) HAPT_TRY(hapt_emit_check(env, config));
    HAPT_TRY(hapt_outputs_check(env, config, hapt_emit_asked(config) ? 1 : 2, outputs));
    if (hapt_config_bool(config, "diff")) return hapt_plan_diff_print(env, config, arena);
    HAPT_TRY(get_inputs(env, config, arena, &planning));
    const bool one_profile = hapt_config_bool(config, "compare") || hapt_config_text(config, "run");
    HAPT_TRY(!one_profile && hapt_phase_plans_rows(config, planning.cluster)
                 ? plan_all_rows(env, config, arena, &planning)
                 : plan_given_rows(env, config, arena, extra, &planning, &done));
    if (done) return HAPT_OK;
    if (planning.model) HAPT_TRY(hapt_phase_plan_adapt(env, planning.model, planning.profile, planning.plan));
    hapt_plan_print(env, planning.plan);
    hapt_phase_note_hosts(env, planning.cluster, planning.plan);
    hapt_plan_print_link_limit(env, planning.profile, planning.plan);
    HAPT_TRY(hapt_plan_show_pipelines(env, config, planning.profile, planning.layers, planning.plan->microbatches,
                                      arena, extra));
    HAPT_TRY(save(env, config, planning.profile, planning.model, planning.plan));
    describe(config, &planning, &inputs, &what_if);
    HAPT_TRY(answer(env, config, planning.profile, &inputs, &what_if, planning.plan, arena, extra, &sweeps));
    return hapt_plan_html(env, config, &planning, &what_if, &sweeps, arena);
}

enum hapt_status hapt_command_plan(struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena)
{
    json_t *extra = json_object();
    const enum hapt_status status = run(env, config, arena, extra);
    json_decref(extra);
    return status;
}
