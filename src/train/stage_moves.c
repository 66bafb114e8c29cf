/* What the ranks of one stage exchange: the collectives of its program, over communicators of the mesh axes. */
#include <string.h>

#include "stage.h"

/* ---- places and boxes ---- */

void stage_place(const struct stage *stage, int chunk, int index, int place[HAPT_MESH_AXES])
{
    const int inner = stage->sharding[chunk]->axis[1].size;
    place[0] = index / inner;
    place[1] = index % inner;
}

void stage_box(const struct stage *stage, int chunk, int index, int tensor, struct hapt_box *box)
{
    int place[HAPT_MESH_AXES];
    stage_place(stage, chunk, index, place);
    hapt_sharding_box(stage->sharding[chunk], tensor, place, box);
}

void stage_replica(const struct stage *stage, int chunk, int index, int tensor, int *count, int *replica)
{
    const struct hapt_sharding *sharding = stage->sharding[chunk];
    int place[HAPT_MESH_AXES];
    stage_place(stage, chunk, index, place);
    *count = 1;
    *replica = 0;
    for (int axis = 0; axis < HAPT_MESH_AXES; axis++) {
        if (sharding->property[tensor][axis].kind != HAPT_PROPERTY_IDENTITY) continue;
        *count *= sharding->axis[axis].size;
        *replica = *replica * sharding->axis[axis].size + place[axis];
    }
}

bool stage_counts(const struct stage *stage, int tensor, unsigned sliced)
{
    const struct hapt_sharding *sharding = stage->sharding[stage->chunk];
    for (int axis = 0; axis < HAPT_MESH_AXES; axis++)
        if (!(sliced >> axis & 1u) && sharding->property[tensor][axis].kind == HAPT_PROPERTY_IDENTITY && stage->place[axis] > 0) return false;
    return true;
}

/* ---- preparation ---- */

static const struct hapt_sharding *sharding_of(const struct stage *stage)
{
    return stage->sharding[stage->chunk];
}

/* Where the shards of `sharded` lie in `whole`, a version of it that is whole along the axis. */
static enum hapt_status prepare_parts(struct stage *stage, struct stage_move *move, int whole, int sharded)
{
    const struct hapt_sharding *sharding = sharding_of(stage);
    const struct hapt_tensor *local = &sharding->shard->tensor[whole];
    const struct hapt_property property = sharding->property[sharded][move->axis];
    const struct hapt_axis *axis = &sharding->axis[move->axis];
    const int64_t extent = local->shape[property.dim];
    const size_t blocks = property.blocks > 1 ? (size_t)property.blocks : 1;
    size_t outer = blocks, inner = hapt_dtype_bytes(move->dtype);
    for (int d = 0; d < property.dim; d++) outer *= (size_t)local->shape[d];
    for (int d = property.dim + 1; d < local->dims; d++) inner *= (size_t)local->shape[d];
    HAPT_NEW(move->part, stage->arena, axis->size);
    for (int r = 0; r < axis->size; r++) {
        int64_t first, count;
        HAPT_ASSERT(hapt_property_share(property, axis, extent, r, &first, &count));
        move->part[r] = (struct hapt_strided){.offset = (size_t)first * inner,
                                              .count = outer,
                                              .run = (size_t)count * inner,
                                              .stride = (size_t)extent / blocks * inner};
    }
    return HAPT_OK;
}

static void box_along(const struct stage *stage, int axis, int rank, int tensor, struct hapt_box *box)
{
    int place[HAPT_MESH_AXES];
    memcpy(place, stage->place, sizeof place);
    place[axis] = rank;
    hapt_sharding_box(sharding_of(stage), tensor, place, box);
}

static enum hapt_status prepare_trade(struct stage *stage, struct stage_move *move, int from, int to)
{
    const int ranks = sharding_of(stage)->axis[move->axis].size, me = stage->place[move->axis];
    const size_t width = hapt_dtype_bytes(move->dtype);
    HAPT_NEW(move->send, stage->arena, ranks);
    HAPT_NEW(move->receive, stage->arena, ranks);
    for (int s = 0; s < ranks; s++)
        for (int r = 0; r < ranks; r++) {
            struct hapt_box had, wanted;
            struct hapt_strided_list in_had, in_wanted;
            box_along(stage, move->axis, s, from, &had);
            box_along(stage, move->axis, r, to, &wanted);
            HAPT_TRY(hapt_reshard_common(&had, &wanted, NULL, width, stage->arena, &in_had, &in_wanted));
            if (hapt_strided_bytes(&in_had) > move->longest) move->longest = hapt_strided_bytes(&in_had);
            if (s == me) move->send[r] = in_had;
            if (r == me) move->receive[s] = in_wanted;
        }
    return HAPT_OK;
}

static enum hapt_status prepare_move(struct stage *stage, const struct hapt_program_step *step)
{
    const struct hapt_sharding *sharding = sharding_of(stage);
    const struct hapt_op *op = &sharding->graph->op[step->op];
    struct stage_move *move = &stage->move[step->op];
    const int from = op->input[0], to = op->output[0];
    *move = (struct stage_move){.kind = step->kind,
                                .axis = step->axis,
                                .dtype = sharding->graph->tensor[to].dtype,
                                .elements = (size_t)hapt_tensor_elements(&sharding->shard->tensor[to])};
    switch (step->kind) {
    case HAPT_COLLECTIVE_ALL_GATHER:
    case HAPT_COLLECTIVE_GROUPED_BROADCAST:
        return prepare_parts(stage, move, to, from);
    case HAPT_COLLECTIVE_REDUCE_SCATTER:
    case HAPT_COLLECTIVE_SLICE:
        return prepare_parts(stage, move, from, to);
    case HAPT_COLLECTIVE_ALL_TO_ALL:
        return prepare_trade(stage, move, from, to);
    case HAPT_COLLECTIVE_ALL_REDUCE:
    case HAPT_COLLECTIVE_NONE:
    case HAPT_COLLECTIVE_COUNT:
        break;
    }
    return HAPT_OK;
}

enum hapt_status stage_prepare_moves(struct stage *stage)
{
    const struct hapt_program *program = stage->program[stage->chunk];
    HAPT_NEW(stage->move, stage->arena, program->graph->op_count);
    HAPT_NEW(stage->slice, stage->arena, stage->size);
    for (int section = 0; section < HAPT_SECTION_COUNT; section++)
        for (int s = 0; s < program->step_count[section]; s++)
            if (program->step[section][s].kind != HAPT_COLLECTIVE_NONE)
                HAPT_TRY(prepare_move(stage, &program->step[section][s]));
    return HAPT_OK;
}

/* ---- execution ---- */

static const char *describe(const struct stage *stage, const char *what, char *text, size_t size)
{
    if (stage->microbatch < 0)
        snprintf(text, size, "%s of step %lld", what, (long long)stage->step);
    else
        snprintf(text, size, "%s of step %lld, microbatch %d", what, (long long)stage->step, stage->microbatch);
    return text;
}

/* Ranks wait for each other: that is neither computation nor slowed down. */
static double leave_computation(struct stage *stage)
{
    if (stage->microbatch >= 0) stage_stretch_end(stage);
    return hapt_time_s();
}

static enum hapt_status resume_computation(struct stage *stage, double start_s, enum hapt_status status)
{
    stage->reduce_s += hapt_time_s() - start_s;
    if (stage->microbatch >= 0) stage_stretch_begin(stage);
    return status;
}

static enum hapt_status run_move(struct stage *stage, const struct stage_move *move, const char *what, const void *from,
                                 void *to)
{
    struct hapt_collective *along = stage->along[move->axis];
    switch (move->kind) {
    case HAPT_COLLECTIVE_ALL_REDUCE:
        if (from != to) memcpy(to, from, move->elements * hapt_dtype_bytes(move->dtype));
        return hapt_collective_combine(along, what, HAPT_COMBINE_SUM, move->dtype, to, move->elements);
    case HAPT_COLLECTIVE_REDUCE_SCATTER:
        return hapt_collective_reduce_scatter(along, what, move->dtype, move->part, from, to);
    case HAPT_COLLECTIVE_ALL_GATHER:
        return hapt_collective_gather_shards(along, what, true, move->part, from, to);
    case HAPT_COLLECTIVE_GROUPED_BROADCAST:
        return hapt_collective_gather_shards(along, what, false, move->part, from, to);
    case HAPT_COLLECTIVE_ALL_TO_ALL:
        return hapt_collective_all_to_all(along, what, move->longest, move->send, from, move->receive, to);
    case HAPT_COLLECTIVE_SLICE:
    case HAPT_COLLECTIVE_NONE:
    case HAPT_COLLECTIVE_COUNT:
        break;
    }
    return HAPT_OK;
}

static enum hapt_status run_collective(void *context, int op, const void *from, void *to)
{
    struct stage *stage = context;
    const struct stage_move *move = &stage->move[op];
    char what[160];
    HAPT_ASSERT(move->kind != HAPT_COLLECTIVE_NONE);
    if (move->kind == HAPT_COLLECTIVE_SLICE) {
        const struct hapt_strided_list own = {1, &move->part[stage->place[move->axis]]};
        hapt_strided_pack(&own, from, 0, hapt_strided_bytes(&own), to);
        return HAPT_OK;
    }
    describe(stage, sharding_of(stage)->graph->op[op].name, what, sizeof what);
    const double start_s = leave_computation(stage);
    return resume_computation(stage, start_s, run_move(stage, move, what, from, to));
}

static enum hapt_status all_reduce(void *context, unsigned axes, float *data, size_t elements)
{
    struct stage *stage = context;
    char what[64];
    struct hapt_collective *over = axes == 3u ? stage->collective : stage->along[axes >> 1];
    describe(stage, "sum of the gradients", what, sizeof what);
    const double start_s = leave_computation(stage);
    return resume_computation(stage, start_s, hapt_collective_all_reduce(over, what, data, elements));
}

/* Slices between the bounds, as bytes of a flat array. */
static struct hapt_collective *slices(struct stage *stage, unsigned axes, const size_t *bound)
{
    struct hapt_collective *over = axes == 3u ? stage->collective : stage->along[axes >> 1];
    for (int r = 0; r < hapt_collective_ranks(over); r++)
        stage->slice[r] = (struct hapt_strided){.offset = bound[r] * sizeof(float),
                                                .count = 1,
                                                .run = (bound[r + 1] - bound[r]) * sizeof(float)};
    return over;
}

static enum hapt_status reduce_scatter(void *context, unsigned axes, float *data, const size_t *bound)
{
    struct stage *stage = context;
    char what[64];
    struct hapt_collective *over = slices(stage, axes, bound);
    describe(stage, "sum of slices of the gradients", what, sizeof what);
    const double start_s = leave_computation(stage);
    return resume_computation(stage, start_s,
                              hapt_collective_reduce_scatter(over, what, HAPT_F32, stage->slice, data,
                                                             data + bound[hapt_collective_rank(over)]));
}

static enum hapt_status all_gather(void *context, unsigned axes, float *data, const size_t *bound)
{
    struct stage *stage = context;
    char what[64];
    struct hapt_collective *over = slices(stage, axes, bound);
    describe(stage, "gather of the weights", what, sizeof what);
    stage_stretch_end(stage); /* the update so far */
    const double start_s = hapt_time_s();
    const enum hapt_status status = hapt_collective_gather_shards(over, what, false, stage->slice, NULL, data);
    stage->reduce_s += hapt_time_s() - start_s;
    stage_stretch_begin(stage);
    return status;
}

static enum hapt_status exchange(void *context, float *data, size_t elements, bool largest)
{
    const struct stage_axis *axis = context;
    struct stage *stage = axis->stage;
    char what[64];
    describe(stage, "exchange inside an operator", what, sizeof what);
    const double start_s = leave_computation(stage);
    return resume_computation(stage, start_s,
                              hapt_collective_combine(stage->along[axis->axis], what,
                                                      largest ? HAPT_COMBINE_MAXIMUM : HAPT_COMBINE_SUM, HAPT_F32, data,
                                                      elements));
}

void stage_engine_links(struct stage *stage, struct hapt_engine_links *links)
{
    *links = (struct hapt_engine_links){
        .context = stage,
        .collective = run_collective,
        .all_reduce = all_reduce,
        .reduce_scatter = reduce_scatter,
        .all_gather = all_gather,
        .exchange = exchange};
    for (int axis = 0; axis < HAPT_MESH_AXES; axis++) {
        stage->exchange_context[axis] = (struct stage_axis){stage, axis};
        links->exchange_context[axis] = &stage->exchange_context[axis];
    }
}

/* ---- replicas ---- */

enum hapt_status stage_prepare_replicas(struct stage *stage, int tensor, struct stage_replicas *replicas)
{
    const struct hapt_sharding *sharding = sharding_of(stage);
    const size_t width = hapt_dtype_bytes(sharding->graph->tensor[tensor].dtype);
    struct hapt_box box;
    int whole = 0, last = 0;
    *replicas = (struct stage_replicas){.count = 1};
    stage_replica(stage, stage->chunk, stage->rank, tensor, &replicas->count, &replicas->index);
    for (int axis = 0; axis < HAPT_MESH_AXES; axis++) {
        if (sharding->property[tensor][axis].kind != HAPT_PROPERTY_IDENTITY || sharding->axis[axis].size == 1) continue;
        whole++;
        last = axis;
    }
    stage_box(stage, stage->chunk, stage->rank, tensor, &box);
    replicas->mine = hapt_reshard_slice(&box, replicas->count, replicas->index);
    replicas->collective = whole == 0 ? NULL : whole == 1 ? stage->along[last] : stage->collective;
    HAPT_NEW(replicas->part, stage->arena, replicas->count);
    for (int r = 0; r < replicas->count; r++) {
        const struct hapt_reshard_part part = hapt_reshard_slice(&box, replicas->count, r);
        replicas->part[r] = hapt_reshard_part_runs(&box, &part, width);
    }
    return HAPT_OK;
}

enum hapt_status stage_rebuild(struct stage *stage, const struct stage_replicas *replicas, int tensor, void *data)
{
    char what[160];
    if (!replicas->collective) return HAPT_OK;
    const double start_s = hapt_time_s();
    describe(stage, sharding_of(stage)->graph->tensor[tensor].name, what, sizeof what);
    const enum hapt_status status =
        hapt_collective_gather_shards(replicas->collective, what, false, replicas->part, NULL, data);
    stage->reduce_s += hapt_time_s() - start_s;
    return status;
}
