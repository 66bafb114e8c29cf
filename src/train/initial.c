#include "initial.h"

#include "hapt/progress.h"
#include "runtime.h"

static enum hapt_status set_rows(struct stage *stage, int tensor, int state, const struct hapt_checkpoint *checkpoint,
                                 const struct hapt_rows *rows, float *full, float *local)
{
    const struct worker *worker = stage->worker;
    const struct hapt_tensor *parameter = &stage->program->graph->tensor[tensor];
    const int64_t elements = worker_kept(worker, parameter, NULL, NULL);
    HAPT_TRY(checkpoint ? hapt_checkpoint_read_rows(checkpoint, parameter->name, state, elements, rows, full)
                        : worker->runtime->initial(worker, tensor, rows, full));
    if (checkpoint && worker->runtime->computes) hapt_parameter_pack(parameter, rows->count, full);
    return worker->runtime->set(stage, tensor, state, rows, full, local);
}

static enum hapt_status set_parameter(struct stage *stage, int tensor, const struct hapt_checkpoint *checkpoint,
                                      int state_count, float *full, float *local)
{
    const struct hapt_tensor *parameter = &stage->program->graph->tensor[tensor];
    int64_t elements;
    for (int state = -1; state < (checkpoint ? state_count : 0); state++)
        for (struct hapt_rows rows = {0}; worker_next_block(stage->worker, parameter, &rows, &elements);)
            HAPT_TRY(set_rows(stage, tensor, state, checkpoint, &rows, full, local));
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
