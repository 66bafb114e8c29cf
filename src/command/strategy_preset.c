/*
 * Strategies of one device (AutoHete 4.1) inside pipelines. Their choices of what leaves the device are options. The
 * stages are those of DeepSpeed's pipeline engine; full recomputation belongs to no system, so it has hapt's own.
 *
 *   recompute-all  Chen et al. 2016: all blocks recompute, nothing leaves the device
 *   zero-offload   Ren et al. 2021: weights stay, all optimizer state is on the hosts, which update after the last
 *                  backward pass
 *   stronghold     Sun et al. 2022: the weights of a window of blocks are on the device, with all gradients; the hosts
 *                  have the rest
 *   autohete       optimizer state on the hosts, recomputation where memory asks for it, and priority across steps
 *
 * PatrickStar moves chunks as memory asks for, one operation at a time. hapt always overlaps copies, so it has no
 * preset; bench/run autohete prices it on one device.
 */
#include "strategy_preset.h"

#include <string.h>

static const struct preset {
    const char *name, *base;
    const char *recompute, *offload, *update_on, *update_order; /* NULL: as by default, or as given */
} presets[] = {{"recompute-all", "hapt", "all", "no", NULL, NULL},
               {"zero-offload", "deepspeed", "all", "optimizer", "host", "in-order"},
               {"stronghold", "deepspeed", "all", "weights", "host", NULL},
               {"autohete", "deepspeed", "auto", "optimizer", "host", "priority"}};

enum hapt_status hapt_strategy_preset(struct hapt_config *config, struct hapt_arena *arena)
{
    const char *name = hapt_config_text(config, "strategy");
    for (size_t k = 0; k < sizeof presets / sizeof *presets; k++) {
        const struct preset *preset = &presets[k];
        if (strcmp(preset->name, name) != 0) continue;
        if (!hapt_config_given(config, "plan") && hapt_config_text(config, "profile"))
            return hapt_fail(HAPT_ERR_USAGE, "give --input and --cluster instead, or the base strategy",
                             "--strategy %s chooses what leaves the device, which --profile already holds; its base "
                             "is %s",
                             name, preset->base);
        const char *source = hapt_arena_printf(arena, "--strategy %s", name);
        if (!source) return HAPT_ERR_MEMORY;
        const char *const choice[][2] = {{"recompute", preset->recompute},
                                         {"offload", preset->offload},
                                         {"update-on", preset->update_on},
                                         {"update-order", preset->update_order}};
        for (size_t c = 0; c < sizeof choice / sizeof *choice; c++)
            if (choice[c][1]) HAPT_TRY(hapt_config_give(config, choice[c][0], choice[c][1], source));
        return hapt_config_decide(config, "strategy", preset->base);
    }
    return HAPT_OK;
}
