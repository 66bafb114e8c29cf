#include "tensor_bytes.h"

size_t tensor_bytes(const struct hapt_program *program, int tensor)
{
    const struct hapt_tensor *whole = &program->graph->tensor[program->tensor[tensor].tensor];
    size_t bytes = hapt_dtype_bytes(whole->dtype);
    for (int d = 0; d < whole->dims; d++) bytes *= (size_t)program->tensor[tensor].shape[d];
    return bytes;
}

bool tensor_is_updating(const struct hapt_graph *graph, int tensor)
{
    if (!hapt_graph_is_parameter_gradient(graph, tensor)) return false;
    const struct hapt_tensor *parameter = &graph->tensor[graph->tensor[tensor].primal];
    return parameter->trainable && parameter->gradient == tensor;
}
