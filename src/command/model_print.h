/* Tells what a written model file holds: a line, or one JSON object with --json. Private to the command room. */
#ifndef HAPT_COMMAND_MODEL_PRINT_H
#define HAPT_COMMAND_MODEL_PRINT_H

#include "hapt/env.h"
#include "hapt/model.h"

enum hapt_status hapt_model_print(const struct hapt_env *env, const struct hapt_model *model, const char *path);

#endif
