/* Shared by the readers of all families. */
#include "shape.h"

enum hapt_status import_check_count(const struct import_shape *shape, const char *what, int64_t count)
{
    if (count <= shape->tensors) return HAPT_OK;
    return hapt_fail(HAPT_ERR_INPUT, "config.json and weights do not belong together, or a file is missing",
                     "%s has only %lld tensors; config.json asks for %lld %s", shape->folder, (long long)shape->tensors,
                     (long long)count, what);
}

enum hapt_status import_dropout(struct import_shape *shape, const char *key, bool can_drop)
{
    double share;
    HAPT_TRY(json_options_real(shape->options, key, 0, 1, 0, &share));
    if (share > 0 && !can_drop)
        hapt_warn(shape->env, "%s: %s is %g, but hapt trains without this dropout\n", shape->options->path, key, share);
    else if (share > 0 && !hapt_config_given(shape->config, "dropout"))
        hapt_warn(shape->env, "%s: %s is %g: give --dropout %g to train with it\n", shape->options->path, key, share,
                  share);
    return HAPT_OK;
}
