/* Converts a model to another compute type. */
#include <string.h>

#include "rebuild.h"

enum hapt_status hapt_model_compute_in(struct hapt_model *model, enum hapt_precision precision)
{
    const struct hapt_graph_change change = {hapt_precision_dtype(precision), model->microbatch, model->microbatch};
    HAPT_ASSERT(precision != HAPT_PRECISION_UNKNOWN);
    model->precision = precision;
    if (change.dtype == model->dtype) return HAPT_OK;
    HAPT_TRY(hapt_graph_rebuild(model->graph, &change, model->graph->arena, &model->graph));
    model->dtype = change.dtype;
    for (int i = 0; i < model->setting_count; i++)
        if (strcmp(model->setting[i].name, "dtype") == 0) model->setting[i].value = hapt_dtype_name(model->dtype);
    return hapt_model_check(model);
}
