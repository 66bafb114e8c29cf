/* hapt train: trains a given model with a given plan. */
#include "hapt/run_folder.h"
#include "phases.h"

const char hapt_command_train_help[] =
    "Trains --input with --plan (or, with --resume, with the checkpoint's plan). One rank drives one device of the\n"
    "cluster; ranks that the plan leaves idle only take part in agreements. If the plan was made from a profile\n"
    "alone, its operators come from --input, clustered into as many layers as the plan has. --schedule and\n"
    "--microbatches, if given, replace the plan's.\n"
    "\n"
    "Data: --data, else the data in the model file: a stream sampled by --data-seed and step, or exact batches (see\n"
    "hapt help data). A step takes microbatches x the rows of a microbatch: the plan's, if its search chose them\n"
    "(--global-batch), else the model's.\n"
    "\n"
    "The output folder holds run.h5 (/topology, /plan, /settings, and under /train: loss, gradient_norm,\n"
    "learning_rate, step_time, tokens_per_second or images_per_second, mfu [step]; stage_busy, stage_reduce, "
    "stage_idle,\n"
    "stage_communication, stage_microbatch [step][stage]; memory_planned, memory_measured,\n"
    "host_memory (on the hosts, --offload) [stage]),\n"
    "metrics.csv (a line per step, written at once), tensorboard/ (--tensorboard yes) and\n"
    "checkpoints/step-N: shard-K.h5 per stage, and per stage with frozen weights (/parameters, /state0, /state1:\n"
    "whole tensors by published name), and\n"
    "manifest.h5 (step, plan, options, history, identity of the data, sizes and checksums). One job owns the\n"
    "folder, through its lock .hapt-lock. A folder that holds a run needs --resume or --overwrite.\n"
    "\n"
    "run.h5 is replaced every --metrics-every by a complete file, so it can be read while training runs and after a\n"
    "crash: its attribute state is running, finished or stopped, and written is its time. h5web and silx open it on\n"
    "the loss. A metric that cannot be written is a warning; training goes on.\n"
    "\n"
    "--resume continues from the newest complete checkpoint and gives the same bits as an uninterrupted run. A\n"
    "damaged checkpoint (wrong checksum, broken structure) is skipped with a warning and renamed step-N.damaged.\n"
    "Lack of memory, a failing disk or a later format version stops the job. Training on different data is allowed,\n"
    "with a warning.\n"
    "\n"
    "Checkpoints are written while training goes on (--checkpoint-async). At the end of a step the first rank of\n"
    "each stage copies the stage's weights and optimizer state to host memory (12 bytes per trained parameter, AdamW,\n"
    "reserved at the start). A thread writes the copy; it is visible a step or more later. If host memory is short,\n"
    "or with --checkpoint-async no, training waits. It also waits for the first checkpoint with frozen weights.\n"
    "A crash loses at most --checkpoint-every steps and --checkpoint-minutes. An unfinished checkpoint is lost with\n"
    "the run, so two are started in each interval; training waits only for a disk that is slower than that. hapt\n"
    "keeps the --keep newest checkpoints, the one of lowest loss, and the first in each --keep-every steps.\n"
    "\n"
    "SIGTERM, SIGUSR1, SIGINT, SIGHUP, SIGPIPE and SIGXFSZ end the current step, write a checkpoint and exit with\n"
    "code 9. --max-hours and the end of the Slurm job do the same when there is no time for another step and for\n"
    "saving it. A second signal, a second or more after the first, exits at once with 128 + its number; no partial\n"
    "checkpoint stays.\n"
    "\n"
    "--trace N adds /trace, a row per event of the last N steps: rank, stage, peer_stage (-1: none), step,\n"
    "microbatch, kind, begin, end (s). Kinds are the schedule's instructions and the messages between stages:\n"
    "activations or gradients, sent and received. With offloading, copies to the device and to the host and updates\n"
    "on the host have rows, too, the newest 8192 of a rank (a GPU's copies end when they are waited for).\n"
    "\n"
    "--device emulated rehearses a plan without its devices, for example 64 on a laptop. Runtime, schedule and\n"
    "memory limits are the real ones. Computation takes the plan's time; a message is a header and a few bytes,\n"
    "delayed as long as its true size takes. Nothing is learned: no loss, no data needed, checkpoints hold a sample\n"
    "of the weights, and the output folder is outputs/<input's name>-emulated. All times are in modelled seconds;\n"
    "with --time-scale 0.5 they pass twice as fast.\n";

static enum hapt_status run_train(struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena)
{
    struct hapt_model *model = NULL;
    struct hapt_cluster *cluster = NULL;
    struct hapt_checkpoint *checkpoint = NULL;
    struct hapt_plan *plan = NULL;
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
    HAPT_TRY(hapt_phase_rebatch(env, plan, arena, &model));
    plan->precision = model->precision;
    HAPT_TRY(hapt_train_settle_steps(env, config, model, plan));
    struct hapt_run run = {.config = config, .cluster = cluster, .model = model, .plan = plan};
    HAPT_TRY(hapt_phase_train(env, &run, checkpoint, arena));
    return hapt_phase_report(env, &run, arena);
}

enum hapt_status hapt_command_train(struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena)
{
    const enum hapt_status status = run_train(env, config, arena);
    hapt_env_end_alone(env, status);
    hapt_run_folder_leave(env);
    return status;
}
