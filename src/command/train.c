/* hapt train: a given plan on a given model. */
#include "hapt/run_folder.h"
#include "phases.h"

const char hapt_command_train_help[] =
    "Trains --input by --plan (or, with --resume, by the checkpoint's plan). One rank drives one device of the "
    "cluster;\n"
    "ranks the plan leaves idle only agree. A plan made from a profile alone gets its operators from --input, "
    "clustered into\n"
    "as many layers as the plan has. --schedule and --microbatches, when given, replace the plan's.\n"
    "\n"
    "Data: --data, else what the model file carries: a stream sampled by --data-seed and step, or exact batches (see\n"
    "hapt data --help). A step takes microbatches x the model's microbatch rows.\n"
    "\n"
    "The output folder holds run.h5 (/topology, /plan, /settings, and under /train: loss, gradient_norm, "
    "learning_rate, step_time,\n"
    "tokens_per_second or images_per_second [step]; stage_busy, stage_reduce, stage_idle, stage_communication, "
    "stage_microbatch\n"
    "[step][stage]; memory_planned, memory_measured [stage]) and checkpoints/step-N: shard-K.h5 per stage "
    "(/parameters, /state0,\n"
    "/state1: whole tensors by published name) and manifest.h5 (step, plan, options, history, the identity of the "
    "data, sizes and\n"
    "checksums). One job owns the folder, by its lock .hapt-lock. A folder that holds a run needs --resume or "
    "--overwrite.\n"
    "\n"
    "--resume continues from the newest whole checkpoint, bit by bit. A damaged one (wrong checksum, broken structure) "
    "is passed over with\n"
    "a warning and renamed step-N.damaged. Missing memory, a failing disk or a later format version stop the job. "
    "Training on other data\n"
    "than the checkpoint's is allowed, with a warning.\n"
    "\n"
    "Checkpoints are written while training goes on (--checkpoint-async): at the end of a step the first rank of each "
    "stage copies the\n"
    "stage's weights and optimizer state (12 bytes of host memory a parameter with AdamW, reserved at the start), and "
    "a thread writes the\n"
    "copy; it is visible a step or more later. If host memory is short, or with --checkpoint-async no, training waits. "
    "A crash costs at\n"
    "most --checkpoint-every steps and --checkpoint-minutes: an unfinished checkpoint is lost with the run, so two are "
    "begun in each\n"
    "interval, and training waits for a disk that is slower than that. --keep newest checkpoints stay, the one of "
    "lowest loss, and the\n"
    "first in each --keep-every steps.\n"
    "\n"
    "SIGTERM, SIGUSR1, SIGINT, SIGHUP, SIGPIPE and SIGXFSZ end the step under way, write a checkpoint and leave with "
    "exit code 9; so does\n"
    "--max-hours, or the end of the Slurm job, when there is no time for another step and for saving it. A second "
    "signal, a second or more\n"
    "after the first, leaves at once with 128 + its number; checkpoints are whole or not there.\n"
    "\n"
    "--trace N adds /trace, a row an event of the last N steps: rank, stage, peer_stage (-1: none), step, microbatch, "
    "kind, begin,\n"
    "end (s). Kinds are the schedule's instructions and the messages between stages: activations or gradients, left "
    "and there.\n"
    "\n"
    "--device emulated rehearses a plan without its devices, 64 of them on a laptop if need be: the same runtime, "
    "schedule and limits of\n"
    "memory, but computing lasts as long as the plan says, messages are a header and a few bytes paced to their true "
    "size, and nothing is\n"
    "learned (no loss; checkpoints hold a sample of the weights, output goes to outputs/<input's name>-emulated). No "
    "data are needed.\n"
    "All times are reported in modelled seconds; --time-scale 0.5 lets them pass twice as fast.\n";

static enum hapt_status run(struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena)
{
    struct hapt_model *model = NULL;
    struct hapt_cluster *cluster = NULL;
    struct hapt_checkpoint *checkpoint = NULL;
    struct hapt_plan *plan = NULL;
    struct hapt_train_result *result = NULL;
    HAPT_TRY(hapt_phase_model(env, config, arena, &model));
    HAPT_TRY(hapt_run_folder_claim(env, config, arena));
    HAPT_TRY(hapt_train_check_disk(env, config, model));
    HAPT_TRY(hapt_train_resume(env, config, model, arena, &checkpoint));
    if (!checkpoint && !hapt_config_text(config, "plan"))
        return hapt_env_agree(env->world, hapt_fail(HAPT_ERR_USAGE,
                                                    "make one with `hapt plan --input m.h5 --output plan.h5`, "
                                                    "then give --plan plan.h5",
                                                    "no plan given"));
    HAPT_TRY(hapt_phase_cluster(env, config, true, arena, &cluster));
    HAPT_TRY(hapt_phase_precision(env, config, cluster, checkpoint, model));
    HAPT_TRY(hapt_phase_plan_given(env, config, model, checkpoint, arena, &plan));
    plan->precision = model->precision;
    HAPT_TRY(hapt_train_run(env, cluster, model, plan, checkpoint, config, arena, &result));
    const struct hapt_run finished = {
        .config = config, .cluster = cluster, .model = model, .plan = plan, .result = result};
    return hapt_phase_report(env, &finished, arena);
}

enum hapt_status hapt_command_train(struct hapt_env *env, struct hapt_config *config)
{
    struct hapt_arena arena;
    hapt_arena_init(&arena);
    const enum hapt_status status = run(env, config, &arena);
    hapt_run_folder_leave(env);
    hapt_arena_release(&arena);
    return status;
}
