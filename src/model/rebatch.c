/* The same model with other rows of a microbatch. */
#include <stdio.h>
#include <string.h>

#include "hapt/ops.h"
#include "rebuild.h"

bool hapt_model_mixes_rows(const struct hapt_model *model)
{
    for (int o = 0; o < model->graph->forward_count; o++)
        if (hapt_op_type_at(model->graph->op[o].type)->counts_batch) return true;
    return false;
}

/* The settings, with the new rows. */
static enum hapt_status copy_settings(const struct hapt_model *model, int rows, struct hapt_arena *arena,
                                      struct hapt_model *made)
{
    HAPT_NEW(made->setting, arena, model->setting_count);
    for (int i = 0; i < model->setting_count; i++) {
        made->setting[i] = model->setting[i];
        if (strcmp(model->setting[i].name, "microbatch") != 0) continue;
        made->setting[i].value = hapt_arena_printf(arena, "%d", rows);
        if (!made->setting[i].value) return HAPT_ERR_MEMORY;
    }
    return HAPT_OK;
}

/* Replaces the failure of one operator by one about the model. */
static enum hapt_status cannot_rebatch(const struct hapt_model *model, int rows)
{
    char why[512];
    snprintf(why, sizeof why, "%s", hapt_fail_message());
    hapt_fail_reset();
    return hapt_fail(HAPT_ERR_INPUT, "leave the rows of a microbatch as they are in the model file",
                     "%s: the graph fits %d rows only, not %d: %s", model->path ? model->path : model->family,
                     model->microbatch, rows, why);
}

enum hapt_status hapt_model_rebatch(const struct hapt_model *model, int rows, struct hapt_arena *arena,
                                    struct hapt_model **rebatched)
{
    const struct hapt_graph_change change = {model->dtype, model->microbatch, rows};
    struct hapt_model *made;
    HAPT_ASSERT(rows > 0);
    HAPT_NEW(made, arena, 1);
    *made = *model;
    made->microbatch = rows;
    HAPT_TRY(copy_settings(model, rows, arena, made));
    enum hapt_status status = hapt_graph_rebuild(model->graph, &change, arena, &made->graph);
    if (status == HAPT_OK) status = hapt_model_check(made);
    if (status == HAPT_ERR_INPUT) return cannot_rebatch(model, rows);
    if (status == HAPT_OK) *rebatched = made;
    return status;
}
