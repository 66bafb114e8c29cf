/* Weights and optimizer state between a stage and checkpoints. */
#include "save.h"

#include <math.h>

#include "checkpoint.h"

enum hapt_status saver_fill(struct saver *saver, const struct hapt_checkpoint *checkpoint)
{
    struct stage *stage = saver->stage;
    if (stage->chunk < 0) return HAPT_OK;
    const struct hapt_program *program = stage->program[stage->chunk];
    for (int t = 0; t < program->tensor_count; t++) {
        const int tensor = program->tensor[t].tensor;
        const struct hapt_tensor *parameter = &program->graph->tensor[tensor];
        if (parameter->kind != HAPT_TENSOR_PARAMETER) continue;
        const int states = checkpoint ? saver->state_count : 0;
        for (int state = -1; state < states; state++) {
            HAPT_TRY(checkpoint ? hapt_checkpoint_read(checkpoint, parameter->name, state, hapt_tensor_elements(parameter),
                                                       saver->buffer)
                                : hapt_model_initial(stage->model, tensor, saver->buffer));
            HAPT_TRY(stage_set_parameter(stage, tensor, state, saver->buffer, saver->local));
        }
    }
    return HAPT_OK;
}

/* Whole tensors, gathered one by one from the ranks of the stage: all of them come here, the first one writes. When it cannot, the others
 * are still served. */
static enum hapt_status write_shard(void *context, struct hapt_h5 *file)
{
    struct saver *saver = context;
    struct stage *stage = saver->stage;
    const struct hapt_graph *graph = stage->graph;
    struct hapt_arena scratch;
    enum hapt_status status = HAPT_OK;
    hapt_arena_init(&scratch);
    for (int t = 0; t < graph->tensor_count; t++) {
        const struct hapt_tensor *tensor = &graph->tensor[t];
        if (tensor->kind != HAPT_TENSOR_PARAMETER || stage_owner(stage, t) != stage->chunk) continue;
        for (int state = -1; state < saver->state_count; state++) {
            const enum hapt_status gathered = stage_gather_parameter(stage, t, state, saver->local, saver->buffer);
            if (gathered != HAPT_OK) hapt_die(gathered); /* peers may wait */
            if (!file || status != HAPT_OK) continue;
            const char *dataset = checkpoint_dataset(&scratch, tensor->name, state);
            status = dataset ? hapt_h5_write(file, dataset, HAPT_H5_F32, tensor->dims, tensor->shape, saver->buffer, "")
                             : HAPT_ERR_MEMORY;
        }
    }
    hapt_arena_release(&scratch);
    return status;
}

#define SLOWEST_DISK 10e6 /* byte/s: a shard may take that long before its peers give up */

enum hapt_status saver_prepare(struct saver *saver, struct stage *stage, const struct hapt_config *config, int state_count,
                               const char *folder)
{
    const struct hapt_graph *graph = stage->graph;
    const struct hapt_plan *plan = stage->plan;
    struct hapt_arena *arena = stage->arena;
    const char **name;
    int32_t *shard;
    int64_t count = 0, largest = 1;
    double *bytes, most = 0; /* of a stage's shard */
    *saver = (struct saver){.env = stage->env, .stage = stage, .state_count = state_count, .saved = -1};
    HAPT_NEW(bytes, arena, plan->stage_count);
    HAPT_NEW(name, arena, graph->tensor_count);
    HAPT_NEW(shard, arena, graph->tensor_count);
    for (int t = 0; t < graph->tensor_count; t++) {
        if (graph->tensor[t].kind != HAPT_TENSOR_PARAMETER) continue;
        const int64_t elements = hapt_tensor_elements(&graph->tensor[t]);
        if (elements > largest) largest = elements;
        shard[count] = stage_owner(stage, t);
        HAPT_ASSERT(shard[count] >= 0); /* the graph has no dangling tensors */
        bytes[shard[count]] += 4.0 * (double)elements * (1 + state_count);
        most = fmax(most, bytes[shard[count]]);
        name[count++] = graph->tensor[t].name;
    }
    saver->shard_bytes = most;
    HAPT_NEW(saver->buffer, arena, largest);
    HAPT_NEW(saver->local, arena, largest);
    saver->writer = (struct hapt_checkpoint_writer){
        .folder = hapt_arena_printf(arena, "%s/checkpoints", folder),
        .keep = hapt_config_int(config, "keep"),
        .patience_s = stage_agreement_timeout_s(stage) + most / SLOWEST_DISK,
        .shard_count = plan->stage_count,
        .shard = stage->chunk >= 0 && stage->rank == 0 ? stage->chunk : -1,
        .shared = stage->chunk >= 0,
        .parameter_count = count,
        .parameter = name,
        .parameter_shard = shard,
        .state_count = state_count,
        .plan = plan,
        .config = config,
        .write_shard = write_shard,
        .context = saver,
    };
    return saver->writer.folder ? HAPT_OK : HAPT_ERR_MEMORY;
}

enum hapt_status saver_save(struct saver *saver, const struct hapt_history *history, struct hapt_arena *arena, const char **path)
{
    if (saver->saved == history->count) return HAPT_OK;
    HAPT_TRY(hapt_checkpoint_save(saver->env, &saver->writer, history->count, history, arena, path));
    saver->saved = history->count;
    return HAPT_OK;
}
