/* Converts between the parts of parameters on the ranks of a stage and the full tensors of initial values and
 * checkpoints, a block of rows at a time. */
#include <string.h>

#include "checkpoint.h"
#include "runtime.h"

/* A block has at least one row, and the rows of whole chunks of a dataset. */
enum { CHUNK = HAPT_H5_CHUNK_ELEMENTS, CHUNKS_PER_BLOCK = 4 };

bool worker_next_block(const struct worker *worker, const struct hapt_tensor *parameter, struct hapt_rows *rows,
                       int64_t *elements)
{
    int dims;
    int64_t shape[HAPT_MAX_DIMS];
    const int64_t kept = worker_kept(worker, parameter, &dims, shape), row = kept / shape[0];
    const int64_t most = row < CHUNK ? CHUNK / row * CHUNKS_PER_BLOCK : 1;
    rows->first += rows->count;
    rows->total = shape[0];
    rows->count = rows->total - rows->first < most ? rows->total - rows->first : most;
    *elements = rows->count * row;
    return rows->count > 0;
}

int64_t worker_block_elements(const struct worker *worker)
{
    int64_t largest = 1, elements;
    for (int t = 0; t < worker->graph->tensor_count; t++) {
        struct hapt_rows first = {0};
        if (worker->graph->tensor[t].kind != HAPT_TENSOR_PARAMETER) continue;
        worker_next_block(worker, &worker->graph->tensor[t], &first, &elements);
        if (elements > largest) largest = elements;
    }
    return largest;
}

/* Keeps rows [first, first + count) of a box. Returns the number of its elements before them: both are neighbours in
 * its local copy, because rows ascend there. */
static size_t keep_rows(struct hapt_box *box, const struct hapt_rows *rows)
{
    const int64_t end = rows->first + rows->count;
    int64_t before = 0, kept = 0;
    int runs = 0;
    for (int r = 0; r < box->runs[0]; r++) {
        const struct hapt_box_run run = box->run[0][r];
        const int64_t from = run.start > rows->first ? run.start : rows->first;
        const int64_t to = run.start + run.count < end ? run.start + run.count : end;
        if (run.start < rows->first) before += from < run.start + run.count ? from - run.start : run.count;
        if (from >= to) continue;
        box->run[0][runs++] = (struct hapt_box_run){from, to - from};
        kept += to - from;
    }
    box->runs[0] = runs;
    box->extent[0] = kept;
    for (int d = 1; d < box->dims; d++) before *= box->extent[d];
    return (size_t)before;
}

static size_t elements_of(const struct hapt_box *box)
{
    int64_t elements = 1;
    for (int d = 0; d < box->dims; d++) elements *= box->extent[d];
    return (size_t)elements;
}

/* The boxes of the rows, of one rank and in full. Returns the elements before them in the rank's copy. */
static size_t boxes_of(const struct stage *stage, int rank, int parameter, const struct hapt_rows *rows,
                       struct hapt_box *box, struct hapt_box *full)
{
    stage_box(stage->worker, stage->chunk, rank, parameter, box);
    hapt_reshard_full_box(&stage->worker->graph->tensor[parameter], full);
    keep_rows(full, rows);
    return keep_rows(box, rows);
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

enum hapt_status runtime_set_parameter(struct stage *stage, int parameter, int state, const struct hapt_rows *rows,
                                       const float *full, float *local)
{
    struct hapt_box box, all;
    struct hapt_strided_list in_full, here;
    struct hapt_arena scratch;
    const size_t before = boxes_of(stage, stage->rank, parameter, rows, &box, &all), elements = elements_of(&box);
    if (elements == 0) return HAPT_OK;
    if (hapt_reshard_same(&box, &all))
        return hapt_engine_set_part(stage->engine, parameter, state, before, elements, full);
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
    return status == HAPT_OK ? hapt_engine_set_part(stage->engine, parameter, state, before, elements, local) : status;
}

/* Sends each part to rank 0, from the first rank that holds it. */
static enum hapt_status gather(struct stage *stage, int parameter, const struct hapt_rows *rows, const float *local,
                               float *full, struct hapt_arena *scratch)
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
        boxes_of(stage, r, parameter, rows, &box, &all);
        HAPT_TRY(hapt_reshard_common(&all, &box, NULL, sizeof(float), scratch, &in_full, &there));
        if (hapt_strided_bytes(&there) > longest) longest = hapt_strided_bytes(&there);
        if (stage->rank == 0) receive[r] = in_full;
        if (stage->rank == r) send[0] = there;
    }
    return hapt_collective_all_to_all(stage->team.all_ranks, "gather of parameters for a checkpoint", longest, send,
                                      local, receive, full);
}

enum hapt_status runtime_gather_parameter(struct stage *stage, int parameter, int state, const struct hapt_rows *rows,
                                          float *local, float *full)
{
    struct hapt_arena scratch;
    const struct hapt_program *program = stage->program;
    const unsigned sliced = hapt_engine_is_sliced(stage->engine, parameter, state)
                                ? stage_sliced_axes(stage, program->local[parameter])
                                : 0;
    struct hapt_box box, all;
    size_t before = boxes_of(stage, 0, parameter, rows, &box, &all);
    if (sliced == 0 && hapt_reshard_same(&box, &all)) /* rank 0 has the rows */
        return stage->rank == 0 ? hapt_engine_get_part(stage->engine, parameter, state, before, elements_of(&box), full)
                                : HAPT_OK;
    before = boxes_of(stage, stage->rank, parameter, rows, &box, &all);
    const size_t elements = elements_of(&box);
    if (elements > 0) HAPT_TRY(hapt_engine_get_part(stage->engine, parameter, state, before, elements, local));
    /* Slices of other ranks are -0 here, so the sum is the whole. The ranks that share slices have equal boxes. */
    if (sliced != 0 && elements > 0)
        HAPT_TRY(hapt_collective_all_reduce(hapt_team_comm(&stage->team, sliced), "gather of slices for a checkpoint",
                                            local, elements));
    hapt_arena_init(&scratch);
    const enum hapt_status status = gather(stage, parameter, rows, local, full, &scratch);
    hapt_arena_release(&scratch);
    return status;
}
