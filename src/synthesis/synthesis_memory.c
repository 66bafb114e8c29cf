/* The memory that the search counts, and its cost at the current price. */
#include "synthesis_private.h"

double hapt_priced_seconds(const struct problem *problem, const struct layouts *layouts, int layout, double times)
{
    double seconds = 0;
    for (int j = 0; j < problem->classes; j++)
        seconds += problem->multiplier[j] * layout_bytes(layouts, layout, j) * times;
    return seconds;
}

double hapt_parameter_copies(const struct problem *problem, const struct object *object)
{
    const struct hapt_tensor *tensor = &problem->graph->tensor[object->tensor];
    const double element = (double)hapt_dtype_bytes(tensor->dtype);
    const double state = problem->state_bytes + (tensor->dtype == HAPT_F32 ? 0 : 4); /* fp32 master weights */
    return 1 + (tensor->trainable ? state / element : 0);
}

layout_set hapt_kept_versions(uint32_t word)
{
    const layout_set made = made_of(word), awaited = awaited_of(word);
    return (layout_set)((awaited & made) | (awaited & ~made ? 1u << REPLICATED : 0));
}

double hapt_kept_seconds(const struct problem *problem, const struct object *object, uint32_t word)
{
    const layout_set made = made_of(word), awaited = awaited_of(word),
                     later = (layout_set)(awaited & ~closure_of(object->layouts, made));
    const layout_set kept = later ? (layout_set)(awaited & made) : hapt_kept_versions(word);
    double sum = 0, most = 0;
    for (int l = 0; l < object->layouts->count; l++) {
        const double seconds =
            (kept | later) >> l & 1u ? hapt_priced_seconds(problem, object->layouts, l, problem->in_flight) : 0;
        if (kept >> l & 1u) sum += seconds;
        if (later >> l & 1u && seconds > most) most = seconds;
    }
    return sum + most;
}
