/* --emit of hapt plan and hapt simulate: traces of one step for another simulator. */
#ifndef HAPT_COMMAND_EMIT_H
#define HAPT_COMMAND_EMIT_H

#include "hapt/command.h"
#include "hapt/plan.h"

/* True if --emit asks for traces: then --output is their folder. */
bool hapt_emit_asked(const struct hapt_config *config);
/* Checks the folder before any long work. HAPT_ERR_USAGE: --output is missing, a file, a link, or a folder with content
 * (unless --overwrite yes is given); HAPT_ERR_IO: it cannot be written. Collective over env->world. */
enum hapt_status hapt_emit_check(const struct hapt_env *env, const struct hapt_config *config);
/* Removes earlier traces from the folder and writes those of the plan. `profile`: NULL if unknown. Collective. */
enum hapt_status hapt_emit_plan(const struct hapt_env *env, const struct hapt_config *config,
                                const struct hapt_plan *plan, const struct hapt_profile *profile);

#endif
