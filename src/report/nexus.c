/* The root is an NXroot whose default is /train, an NXentry whose default is /train/curves, an NXdata
 * (https://manual.nexusformat.org). */
#include "nexus.h"

#include <stdio.h>

static enum hapt_status write_default(struct hapt_h5 *file, const char *group, const char *class, const char *then)
{
    HAPT_TRY(hapt_h5_write_attribute_text(file, group, "NX_class", class));
    return then ? hapt_h5_write_attribute_text(file, group, "default", then) : HAPT_OK;
}

static enum hapt_status link_curve(struct hapt_h5 *file, const char *name)
{
    char from[64], to[64];
    snprintf(from, sizeof from, "/train/%s", name);
    snprintf(to, sizeof to, "/train/curves/%s", name);
    return hapt_h5_exists(file, from) ? hapt_h5_link(file, from, to) : HAPT_OK;
}

enum hapt_status nexus_write(struct hapt_h5 *file, const struct hapt_train_result *result)
{
    static const char *const curve[] = {"loss", "gradient_norm", "learning_rate", "step_time", "time", "step", "mfu"};
    char rate[64];
    HAPT_TRY(write_default(file, "/", "NXroot", "train"));
    HAPT_TRY(write_default(file, "/train", "NXentry", result->history.count > 0 ? "curves" : NULL));
    if (result->history.count == 0) return HAPT_OK;
    HAPT_TRY(write_default(file, "/train/curves", "NXdata", NULL));
    HAPT_TRY(
        hapt_h5_write_attribute_text(file, "/train/curves", "signal", result->time_scale == 0 ? "loss" : "step_time"));
    HAPT_TRY(hapt_h5_write_attribute_text(file, "/train/curves", "axes", "step"));
    for (size_t i = 0; i < sizeof curve / sizeof *curve; i++) HAPT_TRY(link_curve(file, curve[i]));
    snprintf(rate, sizeof rate, "%ss_per_second", result->item);
    return link_curve(file, rate);
}
