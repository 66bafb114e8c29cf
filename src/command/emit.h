/* --emit of hapt plan and hapt simulate: traces of one step for another simulator, or the plan for another trainer. */
#ifndef HAPT_COMMAND_EMIT_H
#define HAPT_COMMAND_EMIT_H

#include "hapt/command.h"
#include "hapt/plan.h"

/* True if --emit asks for traces: then --output is their folder. */
bool hapt_emit_asked(const struct hapt_config *config);
/* Checks the folder before any long work. HAPT_ERR_USAGE: --output is missing, a file, a link, or a folder with content
 * (unless --overwrite yes is given); HAPT_ERR_IO: it cannot be written. Collective over env->world. */
enum hapt_status hapt_emit_check(const struct hapt_env *env, const struct hapt_config *config);
/* Removes earlier files of its own from the folder and writes those of the plan. `profile`, `model`: NULL if unknown;
 * other trainers need the model. Collective. */
enum hapt_status hapt_emit_plan(const struct hapt_env *env, const struct hapt_config *config,
                                const struct hapt_plan *plan, const struct hapt_profile *profile,
                                const struct hapt_model *model);
/* HAPT_ERR_USAGE if --emit names a trainer. Rank-local. */
enum hapt_status hapt_emit_refuse_trainers(const struct hapt_config *config);

#endif
