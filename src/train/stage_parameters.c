/* Converts between the parts of parameters on the ranks of a stage and the full tensors of initial values and
 * checkpoints. */
#include <string.h>

#include "checkpoint.h"
#include "runtime.h"

static void boxes_of(const struct stage *stage, int rank, int parameter, struct hapt_box *box, struct hapt_box *full)
{
    stage_box(stage->worker, stage->chunk, rank, parameter, box);
    hapt_reshard_full_box(&stage->worker->graph->tensor[parameter], full);
}

int64_t worker_kept(const struct worker *worker, const struct hapt_tensor *parameter, int *dims,
                    int64_t shape[HAPT_MAX_DIMS])
{
    const bool sampled = !worker->runtime->computes;
    const int64_t elements = checkpoint_elements(parameter, sampled);
    if (!dims) return elements;
    const struct hapt_tensor published = hapt_tensor_published(parameter);
    *dims = sampled ? 1 : published.dims;
    memcpy(shape, published.shape, sizeof published.shape);
    if (sampled) shape[0] = elements;
    return elements;
}

enum hapt_status runtime_set_parameter(struct stage *stage, int parameter, int state, const float *full, float *local)
{
    struct hapt_box box, all;
    struct hapt_strided_list in_full, here;
    struct hapt_arena scratch;
    boxes_of(stage, stage->rank, parameter, &box, &all);
    if (hapt_reshard_same(&box, &all)) return hapt_engine_set(stage->engine, parameter, state, full);
    hapt_arena_init(&scratch);
    const enum hapt_status status = hapt_reshard_common(&all, &box, NULL, sizeof(float), &scratch, &in_full, &here);
    if (status == HAPT_OK) {
        /* The lists have equal elements in equal order, which may differ from that of the local copy. */
        float *dense = hapt_arena_alloc(&scratch, hapt_strided_bytes(&here) / sizeof(float) + 1, sizeof *dense);
        if (!dense) {
            hapt_arena_release(&scratch);
            return HAPT_ERR_MEMORY;
        }
        hapt_strided_pack(&in_full, full, 0, hapt_strided_bytes(&in_full), dense);
        hapt_strided_unpack(&here, local, 0, hapt_strided_bytes(&here), dense);
    }
    hapt_arena_release(&scratch);
    return status == HAPT_OK ? hapt_engine_set(stage->engine, parameter, state, local) : status;
}

/* Sends each part to rank 0, from the first rank that holds it. */
static enum hapt_status gather(struct stage *stage, int parameter, const float *local, float *full,
                               struct hapt_arena *scratch)
{
    struct hapt_strided_list *send, *receive;
    size_t longest = 0;
    HAPT_NEW(send, scratch, stage->size);
    HAPT_NEW(receive, scratch, stage->size);
    for (int r = 0; r < stage->size; r++) {
        struct hapt_box box, all;
        struct hapt_strided_list in_full, there;
        int copies, copy;
        stage_replica(stage->worker, stage->chunk, r, parameter, &copies, &copy);
        if (copy > 0) continue;
        boxes_of(stage, r, parameter, &box, &all);
        HAPT_TRY(hapt_reshard_common(&all, &box, NULL, sizeof(float), scratch, &in_full, &there));
        if (hapt_strided_bytes(&there) > longest) longest = hapt_strided_bytes(&there);
        if (stage->rank == 0) receive[r] = in_full;
        if (stage->rank == r) send[0] = there;
    }
    return hapt_collective_all_to_all(stage->team.all_ranks, "gather of parameters for a checkpoint", longest, send,
                                      local, receive, full);
}

enum hapt_status runtime_gather_parameter(struct stage *stage, int parameter, int state, float *local, float *full)
{
    struct hapt_arena scratch;
    const struct hapt_program *program = stage->program;
    const unsigned sliced = hapt_engine_is_sliced(stage->engine, parameter, state)
                                ? stage_sliced_axes(stage, program->local[parameter])
                                : 0;
    struct hapt_box box, all;
    boxes_of(stage, 0, parameter, &box, &all);
    if (sliced == 0 && hapt_reshard_same(&box, &all)) /* rank 0 has the full tensor */
        return stage->rank == 0 ? hapt_engine_get(stage->engine, parameter, state, full) : HAPT_OK;
    HAPT_TRY(hapt_engine_get(stage->engine, parameter, state, local));
    /* Slices of other ranks are 0 here, so the sum is the whole. */
    if (sliced != 0)
        HAPT_TRY(hapt_collective_all_reduce(hapt_team_comm(&stage->team, sliced), "gather of slices for a checkpoint",
                                            local, hapt_engine_tensor_bytes(stage->engine, parameter) / sizeof *local));
    hapt_arena_init(&scratch);
    const enum hapt_status status = gather(stage, parameter, local, full, &scratch);
    hapt_arena_release(&scratch);
    return status;
}
