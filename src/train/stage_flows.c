/*
 * The messages of a stage: boundary tensors and the gradients of tied parameters, between any two layouts. If several
 * ranks hold the same tensor, each receives a part, so every element is sent once. Then they all-gather the parts
 * (stage_rebuild).
 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "runtime.h"
#include "trace.h"

static int boundary_index(const struct hapt_boundary *boundary, int tensor)
{
    for (int i = 0; i < boundary->count; i++)
        if (boundary->tensor[i] == tensor) return i;
    return -1;
}

void stage_release_flows(struct stage *stage)
{
    if (stage->bounce) stage->backend->unpin(stage->bounce);
    for (int t = 0; t < stage->tie_count; t++)
        if (stage->tie[t].on_device) stage->backend->unpin(stage->tie[t].gradient);
    stage->bounce = NULL;
    stage->tie_count = 0;
}

/* Address of a tensor: in a transfer slot or, for activations to send, in the slot where they were computed. */
static void *tensor_address(struct stage *stage, const struct hapt_edge *edge, bool sends, int index, int slot)
{
    const struct hapt_program *program = stage->program[stage->chunk];
    const int tensor = sends ? edge->source[index] : edge->tensor[index];
    if (!edge->backward) {
        if (sends) return hapt_engine_tensor(stage->engine, tensor, slot);
        return hapt_engine_staging(stage->engine, HAPT_STAGING_FORWARD_IN, slot,
                                   boundary_index(&program->forward_in, tensor));
    }
    return sends ? hapt_engine_staging(stage->engine, HAPT_STAGING_BACKWARD_OUT, slot,
                                       boundary_index(&program->backward_out, tensor))
                 : hapt_engine_staging(stage->engine, HAPT_STAGING_BACKWARD_IN, slot,
                                       boundary_index(&program->backward_in, tensor));
}

/* One transfer of a tensor between two chunks with different layouts. */
struct crossing {
    int from, to;       /* chunks */
    int source, tensor; /* the sender's and the receiver's version of it */
    bool compact;       /* the receiver has a dense copy of its part */
};

/* The elements that rank `sender` of one chunk sends to rank `receiver` of the other. None if a replica of `sender`
 * sends them. */
static enum hapt_status cross(const struct stage *stage, const struct crossing *crossing, int sender, int receiver,
                              struct hapt_arena *arena, struct hapt_strided_list *sent,
                              struct hapt_strided_list *received)
{
    int copies, copy, replicas, replica;
    *sent = *received = (struct hapt_strided_list){0, NULL};
    stage_replica(stage, crossing->from, sender, crossing->source, &copies, &copy);
    stage_replica(stage, crossing->to, receiver, crossing->tensor, &replicas, &replica);
    if (receiver % copies != copy) return HAPT_OK;
    struct hapt_box had, wanted;
    stage_box(stage, crossing->from, sender, crossing->source, &had);
    stage_box(stage, crossing->to, receiver, crossing->tensor, &wanted);
    struct hapt_reshard_part part = hapt_reshard_slice(&wanted, replicas, replica);
    part.compact = crossing->compact;
    const enum hapt_dtype dtype = stage->sharding[crossing->from]->graph->tensor[crossing->source].dtype;
    return hapt_reshard_common(&had, &wanted, &part, hapt_dtype_bytes(dtype), arena, sent, received);
}

static struct hapt_piece make_piece(int peer, int buffer, const struct hapt_strided_list *runs)
{
    struct hapt_piece piece = {.peer = peer, .buffer = buffer, .bytes = hapt_strided_bytes(runs), .runs = *runs};
    if (runs->count == 1 && (runs->part->count == 1 || runs->part->run == runs->part->stride)) {
        piece.offset = runs->part->offset;
        piece.runs.count = 0; /* one contiguous run */
    }
    return piece;
}

/* Adds the pieces that this rank sends or receives, in the order of the peers. */
static enum hapt_status add_pieces(const struct stage *stage, const struct crossing *crossing, bool sends, int buffer,
                                   struct hapt_piece *piece, int *count)
{
    const int other = sends ? crossing->to : crossing->from;
    for (int r = 0; r < stage_size(stage, other); r++) {
        struct hapt_strided_list sent, received;
        HAPT_TRY(
            cross(stage, crossing, sends ? stage->rank : r, sends ? r : stage->rank, stage->arena, &sent, &received));
        const struct hapt_strided_list *mine = sends ? &sent : &received;
        if (hapt_strided_bytes(mine) > 0)
            piece[(*count)++] = make_piece(stage_world_rank(stage, other, r), buffer, mine);
    }
    return HAPT_OK;
}

enum hapt_status stage_edge_bytes(const struct stage *stage, const struct hapt_edge *edge, int from, int to,
                                  struct hapt_arena *scratch, size_t *bytes, size_t *in_runs)
{
    *bytes = *in_runs = 0;
    for (int i = 0; i < edge->count; i++) {
        const struct crossing crossing = {edge->from, edge->to, edge->source[i], edge->tensor[i], false};
        struct hapt_strided_list sent, received;
        HAPT_TRY(cross(stage, &crossing, from, to, scratch, &sent, &received));
        const struct hapt_piece piece = make_piece(0, i, edge->from == stage->chunk ? &sent : &received);
        *bytes += piece.bytes;
        *in_runs += piece.runs.count > 0 ? piece.bytes : 0;
    }
    return HAPT_OK;
}

static double throttle_of(const struct hapt_link *link)
{
    return link->paced && link->bandwidth > 0 ? link->bandwidth : INFINITY;
}

/* The slowest link over which rank `sender` of the sending chunk sends any of these tensors; NULL: it sends none. */
static enum hapt_status find_link(const struct stage *stage, const struct crossing *crossing, int tensors, int sender,
                                  const struct hapt_link **slowest)
{
    const int *subcluster = stage->cluster->subcluster_of_rank;
    *slowest = NULL;
    for (int t = 0; t < tensors; t++)
        for (int r = 0; r < stage_size(stage, crossing->to); r++) {
            const struct hapt_link *link =
                hapt_cluster_link(stage->cluster, subcluster[stage_world_rank(stage, crossing->from, sender)],
                                  subcluster[stage_world_rank(stage, crossing->to, r)]);
            struct hapt_strided_list sent, received;
            if (*slowest && throttle_of(link) >= throttle_of(*slowest)) continue;
            HAPT_TRY(cross(stage, &crossing[t], sender, r, stage->arena, &sent, &received));
            if (hapt_strided_bytes(&sent) > 0) *slowest = link;
        }
    return HAPT_OK;
}

/* Sets the bandwidth of a throttled link, shared by the ranks that send over it at the same time. */
static enum hapt_status set_throttle(const struct stage *stage, const struct crossing *crossing, int tensors,
                                     struct hapt_flow_options *options)
{
    const struct hapt_link *mine, *link;
    int senders = 0;
    HAPT_TRY(find_link(stage, crossing, tensors, stage->rank, &mine));
    if (!mine || isinf(throttle_of(mine))) return HAPT_OK;
    for (int s = 0; s < stage_size(stage, crossing->from); s++) {
        HAPT_TRY(find_link(stage, crossing, tensors, s, &link));
        senders += link == mine;
    }
    options->bandwidth = mine->bandwidth / senders;
    options->latency_s = mine->latency > 0 ? mine->latency : 0;
    return HAPT_OK;
}

/* The device pairs of all pieces; NULL if a piece has none. */
static enum hapt_status find_pairs(const struct stage *stage, int edge, bool sends, int count,
                                   const struct hapt_piece *piece, const struct hapt_pair **pair)
{
    const int me = stage->env->world_rank;
    struct hapt_pair *made;
    *pair = NULL;
    HAPT_NEW(made, stage->arena, count);
    for (int p = 0; p < count; p++) {
        const struct hapt_pair *found =
            sends ? stage_find_pair(stage, edge, me, piece[p].peer) : stage_find_pair(stage, edge, piece[p].peer, me);
        if (!found) return HAPT_OK;
        made[p] = *found;
    }
    *pair = made;
    return HAPT_OK;
}

/* Appends to the list of routes, each once. */
static void note_route(struct stage *stage, const char *route, const char *why)
{
    const size_t length = strlen(stage->boundary_route);
    if (!stage->backend->pin || strstr(stage->boundary_route, route)) return;
    snprintf(stage->boundary_route + length, sizeof stage->boundary_route - length, "%s%s%s%s", length > 0 ? ", " : "",
             route, why[0] ? ": " : "", why);
}

static enum hapt_status add_edge(struct stage *stage, const struct hapt_edge *edge, int tag, bool sends,
                                 struct stage_flows *flows)
{
    const int other = sends ? edge->to : edge->from;
    const int slots = sends && !edge->backward ? stage->list->slots : HAPT_TRANSFER_SLOTS;
    struct hapt_piece *piece;
    struct crossing *crossing;
    void **base;
    HAPT_NEW(piece, stage->arena, edge->count * stage_size(stage, other));
    HAPT_NEW(crossing, stage->arena, edge->count);
    HAPT_NEW(base, stage->arena, slots * edge->count);
    int pieces = 0;
    for (int i = 0; i < edge->count; i++) {
        crossing[i] = (struct crossing){edge->from, edge->to, edge->source[i], edge->tensor[i], false};
        HAPT_TRY(add_pieces(stage, &crossing[i], sends, i, piece, &pieces));
        for (int s = 0; s < slots; s++) base[s * edge->count + i] = tensor_address(stage, edge, sends, i, s);
    }
    if (pieces == 0) return HAPT_OK;
    struct hapt_flow_options options = {.what = edge->backward ? "gradients" : "activations",
                                        .stage = stage->chunk,
                                        .peer_stage = other,
                                        .sends = sends,
                                        .tag = tag,
                                        .per_step = stage->plan->microbatches,
                                        .first_step = stage->first_step,
                                        .peer_slots = HAPT_TRANSFER_SLOTS,
                                        .slot_count = slots,
                                        .buffer_count = edge->count,
                                        .base = base,
                                        .on_device = stage->backend->pin != NULL,
                                        .piece_count = pieces,
                                        .piece = piece};
    const char *reason;
    HAPT_TRY(find_pairs(stage, tag, sends, pieces, piece, &options.pair));
    if (sends) HAPT_TRY(set_throttle(stage, crossing, edge->count, &options));
    HAPT_TRY(trace_add_flow(stage, other, edge->backward, sends, &options.time_count, &options.time_s));
    if (flows->count == MAX_STAGE_FLOWS)
        return hapt_fail(HAPT_ERR_INFEASIBLE, "use fewer stages", "stage %d exchanges tensors with more than %d stages",
                         stage->chunk, MAX_STAGE_FLOWS);
    flows->peer[flows->count] = other;
    HAPT_TRY(stage->runtime->add_flow(stage, &options, true, &flows->flow[flows->count]));
    const bool copies = hapt_comm_thread_copies(stage->comm_thread, flows->flow[flows->count++]);
    if (sends && options.pair)
        note_route(stage, stage->backend->device_comms(&reason)->library(), "");
    else if (sends)
        note_route(stage, copies ? "page-locked host memory" : "GPU-aware MPI", stage->no_direct_reason);
    return HAPT_OK;
}

static int tie_tag(const struct stage *stage, int tie, int from, int to)
{
    const int chunks = stage->plan->stage_count;
    return stage->edges->count + (tie * chunks + from) * chunks + to;
}

static enum hapt_status add_tie_flow(struct stage *stage, int tie, const struct crossing *crossing, bool sends,
                                     void *address, int *flow)
{
    const int other = sends ? crossing->to : crossing->from;
    struct hapt_piece *piece;
    int pieces = 0;
    void *base[1] = {address};
    *flow = -1;
    HAPT_NEW(piece, stage->arena, stage_size(stage, other));
    HAPT_TRY(add_pieces(stage, crossing, sends, 0, piece, &pieces));
    if (pieces == 0) return HAPT_OK;
    struct hapt_flow_options options = {.what = "gradients of tied parameters",
                                        .stage = stage->chunk,
                                        .peer_stage = other,
                                        .sends = sends,
                                        .tag = sends ? tie_tag(stage, tie, stage->chunk, other)
                                                     : tie_tag(stage, tie, other, stage->chunk),
                                        .per_step = 1,
                                        .first_step = stage->first_step,
                                        .peer_slots = 1,
                                        .slot_count = 1,
                                        .buffer_count = 1,
                                        .base = base,
                                        .piece_count = pieces,
                                        .piece = piece};
    if (sends) HAPT_TRY(set_throttle(stage, crossing, 1, &options));
    return stage->runtime->add_flow(stage, &options, false, flow); /* modelled: its time counts in end_exchange */
}

/* The gradient of a parameter that a chunk's update reads. */
static int gradient_in(const struct stage *stage, int chunk, int parameter)
{
    return stage->program[chunk]->graph->tensor[parameter].gradient;
}

static enum hapt_status add_tie(struct stage *stage, int index, const struct hapt_tie *tie)
{
    struct stage_tie *mine = &stage->tie[stage->tie_count++];
    const int gradient = gradient_in(stage, stage->chunk, tie->tensor);
    mine->tie = tie;
    mine->gradient = hapt_engine_tensor(stage->engine, gradient, 0);
    if (stage->backend->pin) {
        void *host;
        HAPT_TRY(hapt_backend_pin(stage->backend, hapt_engine_tensor_bytes(stage->engine, gradient), &host));
        mine->on_device = mine->gradient;
        mine->gradient = host;
    }
    HAPT_TRY(stage_prepare_replicas(stage, gradient, &mine->replicas));
    mine->mine = mine->replicas.part[mine->replicas.index];
    HAPT_NEW(mine->received, stage->arena, tie->chunk_count);
    HAPT_NEW(mine->receive_flow, stage->arena, tie->chunk_count);
    for (int c = 0; c < tie->chunk_count; c++) {
        const int other = tie->chunk[c];
        int flow;
        mine->receive_flow[c] = -1;
        if (other == stage->chunk) continue;
        const int its = gradient_in(stage, other, tie->tensor);
        const struct crossing out = {stage->chunk, other, gradient, its, true};
        const struct crossing in = {other, stage->chunk, its, gradient, true};
        HAPT_TRY(add_tie_flow(stage, index, &out, true, mine->gradient, &flow));
        HAPT_ASSERT(mine->send.count < MAX_STAGE_FLOWS);
        if (flow >= 0) mine->send.flow[mine->send.count++] = flow;
        if (stage->runtime->computes)
            HAPT_NEW(mine->received[c], stage->arena, mine->mine.count * mine->mine.run / sizeof(float));
        HAPT_TRY(add_tie_flow(stage, index, &in, false, mine->received[c], &mine->receive_flow[c]));
    }
    return HAPT_OK;
}

static enum hapt_status prepare_boundary(struct stage *stage, const struct hapt_boundary *boundary,
                                         struct stage_replicas **replicas)
{
    HAPT_NEW(*replicas, stage->arena, boundary->count);
    for (int i = 0; i < boundary->count; i++) {
        struct stage_replicas *made = &(*replicas)[i];
        HAPT_TRY(stage_prepare_replicas(stage, boundary->tensor[i], made));
        if (made->axes != 0) HAPT_TRY(hapt_team_reserve_parts(&stage->team, made->axes, made->part));
    }
    return HAPT_OK;
}

/* Reserves the buffer in which the host assembles incoming tensors. */
static enum hapt_status reserve_bounce(struct stage *stage)
{
    const struct hapt_program *program = stage->program[stage->chunk];
    const struct hapt_boundary *boundary[] = {&program->forward_in, &program->backward_in};
    const struct stage_replicas *replicas[] = {stage->forward_replicas, stage->backward_replicas};
    size_t most = 0;
    void *memory;
    for (int k = 0; k < 2; k++)
        for (int i = 0; i < boundary[k]->count; i++) {
            const size_t bytes = hapt_engine_tensor_bytes(stage->engine, boundary[k]->tensor[i]);
            if (replicas[k][i].axes != 0 && bytes > most) most = bytes;
        }
    if (most == 0 || !stage->backend->pin || stage->team.devices) return HAPT_OK;
    HAPT_TRY(hapt_backend_pin(stage->backend, most, &memory));
    stage->bounce = memory;
    return HAPT_OK;
}

enum hapt_status stage_add_flows(struct stage *stage)
{
    for (int r = 0; r < stage->edges->count; r++) {
        const struct hapt_edge *edge = &stage->edges->edge[r];
        if (edge->from == stage->chunk)
            HAPT_TRY(add_edge(stage, edge, r, true, edge->backward ? &stage->backward_out : &stage->forward_out));
        if (edge->to == stage->chunk)
            HAPT_TRY(add_edge(stage, edge, r, false, edge->backward ? &stage->backward_in : &stage->forward_in));
    }
    const struct hapt_program *program = stage->program[stage->chunk];
    HAPT_TRY(prepare_boundary(stage, &program->forward_in, &stage->forward_replicas));
    HAPT_TRY(prepare_boundary(stage, &program->backward_in, &stage->backward_replicas));
    HAPT_TRY(reserve_bounce(stage));
    HAPT_NEW(stage->tie, stage->arena, stage->ties->count);
    for (int t = 0; t < stage->ties->count; t++) {
        const struct hapt_tie *tie = &stage->ties->tie[t];
        for (int c = 0; c < tie->chunk_count; c++)
            if (tie->chunk[c] == stage->chunk) HAPT_TRY(add_tie(stage, t, tie));
    }
    return HAPT_OK;
}

/* Sums this rank's part in the order of the chunks, so every chunk gets the same bits. */
static void sum_part(const struct stage *stage, const struct stage_tie *tie)
{
    const size_t row = tie->mine.run / sizeof(float), stride = tie->mine.stride / sizeof(float);
    for (size_t k = 0; k < tie->mine.count; k++) {
        float *own = tie->gradient + tie->mine.offset / sizeof(float) + k * stride;
        for (size_t i = 0; i < row; i++) {
            float sum = 0;
            for (int c = 0; c < tie->tie->chunk_count; c++) {
                const float term = tie->tie->chunk[c] == stage->chunk ? own[i] : tie->received[c][k * row + i];
                sum = c == 0 ? term : sum + term;
            }
            own[i] = sum;
        }
    }
}

enum hapt_status stage_exchange(struct stage *stage)
{
    const double start_s = hapt_time_s();
    for (int t = 0; t < stage->tie_count; t++) {
        struct stage_tie *tie = &stage->tie[t];
        const int gradient = gradient_in(stage, stage->chunk, tie->tie->tensor);
        if (tie->on_device)
            HAPT_TRY(
                stage_copy(stage, tie->gradient, tie->on_device, hapt_engine_tensor_bytes(stage->engine, gradient)));
        for (int f = 0; f < tie->send.count; f++) stage->runtime->send(stage, tie->send.flow[f], 0);
        for (int c = 0; c < tie->tie->chunk_count; c++)
            if (tie->receive_flow[c] >= 0) hapt_comm_thread_expect(stage->comm_thread, tie->receive_flow[c], 1);
    }
    for (int t = 0; t < stage->tie_count; t++) {
        struct stage_tie *tie = &stage->tie[t];
        for (int f = 0; f < tie->send.count; f++)
            HAPT_TRY(hapt_comm_thread_wait_sent(stage->comm_thread, tie->send.flow[f], 0));
        /* one exchange per step: sequence number = steps before */
        const int64_t exchanges = stage->sequence / stage->plan->microbatches;
        for (int c = 0; c < tie->tie->chunk_count; c++) {
            if (tie->receive_flow[c] < 0) continue;
            HAPT_TRY(stage->runtime->wait_received(stage, tie->receive_flow[c], exchanges));
        }
        if (stage->runtime->computes) sum_part(stage, tie);
        for (int c = 0; c < tie->tie->chunk_count; c++)
            if (tie->receive_flow[c] >= 0) hapt_comm_thread_free(stage->comm_thread, tie->receive_flow[c]);
        const int gradient = gradient_in(stage, stage->chunk, tie->tie->tensor);
        HAPT_TRY(stage_rebuild(stage, &tie->replicas, gradient, tie->gradient));
        if (tie->on_device)
            HAPT_TRY(
                stage_copy(stage, tie->on_device, tie->gradient, hapt_engine_tensor_bytes(stage->engine, gradient)));
    }
    stage->runtime->end_exchange(stage, start_s);
    return HAPT_OK;
}
