/* The long help of every command (hapt help NAME): what it does, its files and its JSON. */
#include <stddef.h>

#include "hapt/command.h"

static const char help_help[] =
    "hapt help COMMAND explains a command: every option, its files and its JSON. hapt help job explains hapt without\n"
    "a command. hapt help OPTION explains an option.\n"
    "--as man prints manual pages in roff: all of them, one after another; with a command its own.\n"
    "--as bash prints a completion script; put it into ~/.local/share/bash-completion/completions/hapt.\n";

const char *hapt_command_explanation(enum hapt_command command)
{
    switch (command) {
    case HAPT_COMMAND_TOPOLOGY: return hapt_command_topology_help;
    case HAPT_COMMAND_PROFILE: return hapt_command_profile_help;
    case HAPT_COMMAND_PLAN: return hapt_command_plan_help;
    case HAPT_COMMAND_SPMD: return hapt_command_spmd_help;
    case HAPT_COMMAND_SIMULATE: return hapt_command_simulate_help;
    case HAPT_COMMAND_TRAIN: return hapt_command_train_help;
    case HAPT_COMMAND_EVALUATE: return hapt_command_evaluate_help;
    case HAPT_COMMAND_GENERATE: return hapt_command_generate_help;
    case HAPT_COMMAND_MODEL: return hapt_command_model_help;
    case HAPT_COMMAND_IMPORT: return hapt_command_import_help;
    case HAPT_COMMAND_DATA: return hapt_command_data_help;
    case HAPT_COMMAND_EXPORT: return hapt_command_export_help;
    case HAPT_COMMAND_REPORT: return hapt_command_report_help;
    case HAPT_COMMAND_CHECK: return hapt_command_check_help;
    case HAPT_COMMAND_CLUSTER: return hapt_command_cluster_help;
    case HAPT_COMMAND_OPS: return hapt_command_ops_help;
    case HAPT_COMMAND_HELP: return help_help;
    case HAPT_COMMAND_JOB:
    case HAPT_COMMAND_DOCTOR:
    case HAPT_COMMAND_COUNT: break;
    }
    return NULL;
}
