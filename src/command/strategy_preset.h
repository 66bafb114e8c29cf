/* Private to src/command: strategies that are another one with fixed choices of memory. */
#ifndef HAPT_COMMAND_STRATEGY_PRESET_H
#define HAPT_COMMAND_STRATEGY_PRESET_H

#include "hapt/config.h"

/* Replaces such a --strategy by its base, and sets its choices as if they were given. HAPT_ERR_USAGE: one is given with
 * another value. Rank-local; call before all that reads --strategy. */
enum hapt_status hapt_strategy_preset(struct hapt_config *config, struct hapt_arena *arena);

#endif
