/* What a stage sends and receives: boundaries cut into pieces by rows, and the gradients of tied parameters by slices.
 */
#include <string.h>

#include "stage.h"

static int boundary_index(const struct hapt_boundary *boundary, int tensor)
{
    for (int i = 0; i < boundary->count; i++)
        if (boundary->tensor[i] == tensor) return i;
    return -1;
}

static bool is_sharded(const struct hapt_program *program, int tensor)
{
    const struct hapt_program_tensor *mine = &program->tensor[program->local[tensor]];
    for (int axis = 0; axis < HAPT_MESH_AXES; axis++)
        if (mine->property[axis].kind == HAPT_PROPERTY_ALL_GATHER) return true;
    return false;
}

/* A tensor's place here: a transfer slot, or, for activations sent, the slot they were computed in. */
static void *tensor_address(struct stage *stage, const struct hapt_route *route, bool sends, int tensor, int slot)
{
    const struct hapt_program *program = stage->program[stage->chunk];
    if (!route->backward) {
        if (sends) return hapt_engine_tensor(stage->engine, tensor, slot);
        return hapt_engine_staging(stage->engine, HAPT_STAGING_FORWARD_IN, slot,
                                   boundary_index(&program->forward_in, tensor));
    }
    return sends ? hapt_engine_staging(stage->engine, HAPT_STAGING_BACKWARD_OUT, slot,
                                       boundary_index(&program->backward_out, tensor))
                 : hapt_engine_staging(stage->engine, HAPT_STAGING_BACKWARD_IN, slot,
                                       boundary_index(&program->backward_in, tensor));
}

/* Rows [first, end) of a microbatch that rank `rank` of `ranks` holds. */
static void rows_of(int rows, int ranks, int rank, int *first, int *end)
{
    *first = rank * (rows / ranks);
    *end = *first + rows / ranks;
}

/* The pieces of a tensor exchanged between this rank and those of the other chunk: each row crosses once. A tensor that
 * every rank holds whole comes from one rank of the other chunk. */
static int cut_tensor(const struct stage *stage, int other, bool sends, int tensor, int buffer,
                      struct hapt_piece *piece)
{
    const int ranks = stage_size(stage, other), rows = stage->model->microbatch;
    const struct hapt_tensor *whole = &stage->graph->tensor[tensor];
    const size_t bytes = hapt_tensor_bytes(whole);
    const bool sharded = is_sharded(stage->program[stage->chunk], tensor) || is_sharded(stage->program[other], tensor);
    int count = 0, first, end;
    rows_of(rows, stage->size, stage->rank, &first, &end);
    if (sharded) HAPT_ASSERT(whole->shape[0] % rows == 0);
    for (int r = 0; r < ranks; r++) {
        const int peer = stage_world_rank(stage, other, r);
        if (!sharded) {
            const bool paired = sends ? r % stage->size == stage->rank : stage->rank % ranks == r;
            if (paired) piece[count++] = (struct hapt_piece){.peer = peer, .buffer = buffer, .bytes = bytes};
            continue;
        }
        int from, to;
        rows_of(rows, ranks, r, &from, &to);
        if (from < first) from = first;
        if (to > end) to = end;
        if (from >= to) continue;
        const size_t row_bytes = bytes / (size_t)rows;
        piece[count++] = (struct hapt_piece){.peer = peer,
                                             .buffer = buffer,
                                             .offset = (size_t)(from - first) * row_bytes,
                                             .bytes = (size_t)(to - from) * row_bytes};
    }
    return count;
}

static const struct hapt_link *link_between(const struct stage *stage, int from, int to)
{
    return hapt_cluster_link(stage->cluster, stage->plan->stage[from].subcluster, stage->plan->stage[to].subcluster);
}

/* A paced link is shared by the ranks that send over it at the same time. */
static void set_pace(const struct stage *stage, int from, int to, int senders, struct hapt_flow_options *options)
{
    const struct hapt_link *link = link_between(stage, from, to);
    if (!link->paced || link->bandwidth <= 0) return;
    options->bandwidth = link->bandwidth / senders;
    options->latency_s = link->latency > 0 ? link->latency : 0;
}

static enum hapt_status add_route(struct stage *stage, const struct hapt_route *route, int tag, bool sends,
                                  struct stage_flows *flows)
{
    const int other = sends ? route->to : route->from;
    const int slots = sends && !route->backward ? stage->list->slots : HAPT_TRANSFER_SLOTS;
    struct hapt_piece *piece;
    void **base;
    HAPT_NEW(piece, stage->arena, route->count * stage_size(stage, other));
    HAPT_NEW(base, stage->arena, slots * route->count);
    int pieces = 0;
    for (int i = 0; i < route->count; i++) {
        pieces += cut_tensor(stage, other, sends, route->tensor[i], i, piece + pieces);
        for (int s = 0; s < slots; s++)
            base[s * route->count + i] = tensor_address(stage, route, sends, route->tensor[i], s);
    }
    if (pieces == 0) return HAPT_OK;
    struct hapt_flow_options options = {.what = route->backward ? "gradients" : "activations",
                                        .stage = stage->chunk,
                                        .peer_stage = other,
                                        .sends = sends,
                                        .tag = tag,
                                        .per_step = stage->plan->microbatches,
                                        .peer_slots = HAPT_TRANSFER_SLOTS,
                                        .slot_count = slots,
                                        .buffer_count = route->count,
                                        .base = base,
                                        .piece_count = pieces,
                                        .piece = piece};
    if (sends) set_pace(stage, stage->chunk, other, stage->size, &options);
    if (flows->count == MAX_STAGE_FLOWS)
        return hapt_fail(HAPT_ERR_INFEASIBLE, "use fewer stages", "stage %d trades with more than %d stages",
                         stage->chunk, MAX_STAGE_FLOWS);
    return hapt_courier_add(stage->courier, &options, &flows->flow[flows->count++]);
}

/* Ranks of chunk b that send slices to chunk a: rank j of a gets its slice from rank j % size of b. */
static int tie_senders(const struct stage *stage, int to, int from)
{
    const int receivers = stage_size(stage, to), senders = stage_size(stage, from);
    return receivers < senders ? receivers : senders;
}

static int tie_tag(const struct stage *stage, int tie, int from, int to)
{
    const int chunks = stage->plan->stage_count;
    return stage->routes->count + (tie * chunks + from) * chunks + to;
}

static enum hapt_status add_tie_flow(struct stage *stage, int tie, int other, bool sends, struct hapt_piece *piece,
                                     int pieces, void *address, int *flow)
{
    void *base[1] = {address};
    struct hapt_flow_options options = {.what = "gradients of tied parameters",
                                        .stage = stage->chunk,
                                        .peer_stage = other,
                                        .sends = sends,
                                        .tag = sends ? tie_tag(stage, tie, stage->chunk, other)
                                                     : tie_tag(stage, tie, other, stage->chunk),
                                        .per_step = 1,
                                        .peer_slots = 1,
                                        .slot_count = 1,
                                        .buffer_count = 1,
                                        .base = base,
                                        .piece_count = pieces,
                                        .piece = piece};
    if (sends) set_pace(stage, stage->chunk, other, tie_senders(stage, other, stage->chunk), &options);
    return hapt_courier_add(stage->courier, &options, flow);
}

/* The slices of this rank's gradient that ranks of chunk `other` are to get. */
static int cut_gradient(const struct stage *stage, int other, size_t elements, struct hapt_piece *piece)
{
    const int ranks = stage_size(stage, other);
    int count = 0;
    for (int r = 0; r < ranks; r++) {
        if (r % stage->size != stage->rank) continue;
        const size_t first = hapt_collective_slice(elements, ranks, r),
                     end = hapt_collective_slice(elements, ranks, r + 1);
        if (first < end)
            piece[count++] = (struct hapt_piece){
                .peer = stage_world_rank(stage, other, r), .offset = 4 * first, .bytes = 4 * (end - first)};
    }
    return count;
}

static enum hapt_status add_tie(struct stage *stage, int index, const struct hapt_tie *tie)
{
    struct stage_tie *mine = &stage->tie[stage->tie_count++];
    const int gradient = stage->graph->tensor[tie->tensor].gradient;
    mine->tie = tie;
    mine->elements = (size_t)hapt_tensor_elements(&stage->graph->tensor[tie->tensor]);
    mine->first = hapt_collective_slice(mine->elements, stage->size, stage->rank);
    mine->end = hapt_collective_slice(mine->elements, stage->size, stage->rank + 1);
    mine->gradient = hapt_engine_tensor(stage->engine, gradient, 0);
    HAPT_NEW(mine->received, stage->arena, tie->chunk_count);
    HAPT_NEW(mine->receive_flow, stage->arena, tie->chunk_count);
    for (int c = 0; c < tie->chunk_count; c++) {
        const int other = tie->chunk[c];
        mine->receive_flow[c] = -1;
        if (other == stage->chunk) continue;
        struct hapt_piece *piece;
        HAPT_NEW(piece, stage->arena, stage_size(stage, other));
        const int pieces = cut_gradient(stage, other, mine->elements, piece);
        if (pieces > 0) {
            HAPT_ASSERT(mine->send.count < MAX_STAGE_FLOWS);
            HAPT_TRY(add_tie_flow(stage, index, other, true, piece, pieces, mine->gradient,
                                  &mine->send.flow[mine->send.count++]));
        }
        if (mine->first == mine->end) continue;
        struct hapt_piece whole = {.peer = stage_world_rank(stage, other, stage->rank % stage_size(stage, other)),
                                   .bytes = 4 * (mine->end - mine->first)};
        HAPT_NEW(mine->received[c], stage->arena, mine->end - mine->first);
        HAPT_TRY(add_tie_flow(stage, index, other, false, &whole, 1, mine->received[c], &mine->receive_flow[c]));
    }
    return HAPT_OK;
}

enum hapt_status stage_add_flows(struct stage *stage)
{
    for (int r = 0; r < stage->routes->count; r++) {
        const struct hapt_route *route = &stage->routes->route[r];
        if (route->from == stage->chunk)
            HAPT_TRY(add_route(stage, route, r, true, route->backward ? &stage->backward_out : &stage->forward_out));
        if (route->to == stage->chunk)
            HAPT_TRY(add_route(stage, route, r, false, route->backward ? &stage->backward_in : &stage->forward_in));
    }
    HAPT_NEW(stage->tie, stage->arena, stage->ties->count);
    for (int t = 0; t < stage->ties->count; t++) {
        const struct hapt_tie *tie = &stage->ties->tie[t];
        for (int c = 0; c < tie->chunk_count; c++)
            if (tie->chunk[c] == stage->chunk) HAPT_TRY(add_tie(stage, t, tie));
    }
    return HAPT_OK;
}

/* The sum of a slice in order of the chunks: every chunk gets the same bits. */
static void sum_slice(const struct stage *stage, const struct stage_tie *tie)
{
    float *own = tie->gradient + tie->first;
    for (size_t i = 0; i < tie->end - tie->first; i++) {
        float sum = 0;
        for (int c = 0; c < tie->tie->chunk_count; c++) {
            const float term = tie->tie->chunk[c] == stage->chunk ? own[i] : tie->received[c][i];
            sum = c == 0 ? term : sum + term;
        }
        own[i] = sum;
    }
}

enum hapt_status stage_exchange(struct stage *stage)
{
    const double start_s = hapt_time_s();
    for (int t = 0; t < stage->tie_count; t++) {
        struct stage_tie *tie = &stage->tie[t];
        for (int f = 0; f < tie->send.count; f++) hapt_courier_send(stage->courier, tie->send.flow[f], 0);
        for (int c = 0; c < tie->tie->chunk_count; c++)
            if (tie->receive_flow[c] >= 0) hapt_courier_expect(stage->courier, tie->receive_flow[c], 1);
    }
    for (int t = 0; t < stage->tie_count; t++) {
        struct stage_tie *tie = &stage->tie[t];
        for (int f = 0; f < tie->send.count; f++)
            HAPT_TRY(hapt_courier_wait_sent(stage->courier, tie->send.flow[f], 0));
        /* One exchange a step: as many as there were whole steps before. */
        for (int c = 0; c < tie->tie->chunk_count; c++)
            if (tie->receive_flow[c] >= 0)
                HAPT_TRY(hapt_courier_wait_received(stage->courier, tie->receive_flow[c],
                                                    stage->sequence / stage->plan->microbatches));
        sum_slice(stage, tie);
        for (int c = 0; c < tie->tie->chunk_count; c++)
            if (tie->receive_flow[c] >= 0) hapt_courier_free(stage->courier, tie->receive_flow[c]);
        HAPT_TRY(
            hapt_collective_all_gather(stage->collective, "gather of tied gradients", tie->gradient, tie->elements));
    }
    stage->reduce_s += hapt_time_s() - start_s;
    return HAPT_OK;
}
