#include "initial.h"

#include "hapt/progress.h"
#include "runtime.h"

static enum hapt_status set_parameter(struct stage *stage, int tensor, const struct hapt_checkpoint *checkpoint,
                                      int state_count, float *full, float *local)
{
    const struct hapt_tensor *parameter = &stage->program[stage->chunk]->graph->tensor[tensor];
    const int64_t elements = stage_kept(stage, parameter, NULL, NULL);
    for (int state = -1; state < (checkpoint ? state_count : 0); state++) {
        HAPT_TRY(checkpoint ? hapt_checkpoint_read(checkpoint, parameter->name, state, elements, full)
                            : stage->runtime->initial(stage, tensor, full));
        HAPT_TRY(stage->runtime->set(stage, tensor, state, full, local));
    }
    return HAPT_OK;
}

enum hapt_status initial_set(struct stage *stage, const struct hapt_checkpoint *checkpoint, int state_count,
                             float *full, float *local)
{
    struct hapt_progress progress;
    enum hapt_status status = HAPT_OK;
    if (stage->chunk < 0) return HAPT_OK;
    const struct hapt_program *program = stage->program[stage->chunk];
    hapt_progress_init(&progress, stage->env, checkpoint ? "loading weights" : "initialising weights", 0);
    hapt_progress_expect(program->tensor_count);
    for (int t = 0; t < program->tensor_count && status == HAPT_OK; t++, hapt_progress_advance(1)) {
        const int tensor = program->tensor[t].tensor;
        if (program->graph->tensor[tensor].kind == HAPT_TENSOR_PARAMETER)
            status = set_parameter(stage, tensor, checkpoint, state_count, full, local);
    }
    hapt_progress_release(&progress);
    return status;
}
