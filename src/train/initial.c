#include "initial.h"

#include "hapt/progress.h"
#include "runtime.h"

static enum hapt_status set_parameter(struct stage *stage, int tensor, const struct hapt_checkpoint *checkpoint,
                                      int state_count, float *full, float *local)
{
    const struct worker *worker = stage->worker;
    const struct hapt_tensor *parameter = &stage->program->graph->tensor[tensor];
    const int64_t elements = worker_kept(worker, parameter, NULL, NULL);
    for (int state = -1; state < (checkpoint ? state_count : 0); state++) {
        HAPT_TRY(checkpoint ? hapt_checkpoint_read(checkpoint, parameter->name, state, elements, full)
                            : worker->runtime->initial(worker, tensor, full));
        if (checkpoint && worker->runtime->computes) hapt_parameter_pack(parameter, full);
        HAPT_TRY(worker->runtime->set(stage, tensor, state, full, local));
    }
    return HAPT_OK;
}

enum hapt_status initial_set(struct worker *worker, const struct hapt_checkpoint *checkpoint, int state_count,
                             float *full, float *local)
{
    struct hapt_progress progress;
    enum hapt_status status = HAPT_OK;
    if (worker->stage_count == 0) return HAPT_OK;
    hapt_progress_init(&progress, worker->env, checkpoint ? "loading weights" : "initialising weights", 0);
    for (int s = 0; s < worker->stage_count; s++) hapt_progress_expect(worker->stage[s].program->tensor_count);
    for (int s = 0; s < worker->stage_count; s++) {
        const struct hapt_program *program = worker->stage[s].program;
        for (int t = 0; t < program->tensor_count && status == HAPT_OK; t++, hapt_progress_advance(1)) {
            const int tensor = program->tensor[t].tensor;
            if (program->graph->tensor[tensor].kind == HAPT_TENSOR_PARAMETER)
                status = set_parameter(&worker->stage[s], tensor, checkpoint, state_count, full, local);
        }
    }
    hapt_progress_release(&progress);
    return status;
}
