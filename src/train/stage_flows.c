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
    if (stage->bounce) stage->worker->backend->unpin(stage->bounce);
    stage->bounce = NULL;
}

void *stage_edge_address(struct stage *stage, const struct hapt_edge *edge, bool sends, int index, int slot)
{
    const struct hapt_program *program = stage->program;
    const int tensor = sends ? edge->source[index] : edge->tensor[index];
    if (!edge->backward) {
        if (sends && !edge->relayed) return hapt_engine_tensor(stage->engine, tensor, slot);
        return hapt_engine_staging(stage->engine, HAPT_STAGING_FORWARD_IN, slot,
                                   boundary_index(&program->forward_in, tensor));
    }
    return sends ? hapt_engine_staging(stage->engine, HAPT_STAGING_BACKWARD_OUT, slot,
                                       boundary_index(&program->backward_out, tensor))
                 : hapt_engine_staging(stage->engine, HAPT_STAGING_BACKWARD_IN, slot,
                                       boundary_index(&program->backward_in, tensor));
}

/* The elements that rank `sender` of one chunk sends to rank `receiver` of the other. None if a replica of `sender`
 * sends them. */
static enum hapt_status cross(const struct worker *worker, const struct stage_crossing *crossing, int sender,
                              int receiver, struct hapt_arena *arena, struct hapt_strided_list *sent,
                              struct hapt_strided_list *received)
{
    int copies, copy, replicas, replica;
    *sent = *received = (struct hapt_strided_list){0, NULL};
    stage_replica(worker, crossing->from, sender, crossing->source, &copies, &copy);
    stage_replica(worker, crossing->to, receiver, crossing->tensor, &replicas, &replica);
    if (receiver % copies != copy) return HAPT_OK;
    struct hapt_box had, wanted;
    stage_box(worker, crossing->from, sender, crossing->source, &had);
    stage_box(worker, crossing->to, receiver, crossing->tensor, &wanted);
    struct hapt_reshard_part part = hapt_reshard_slice(&wanted, replicas, replica);
    part.compact = crossing->compact;
    const enum hapt_dtype dtype = worker->sharding[crossing->from]->graph->tensor[crossing->source].dtype;
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

enum hapt_status stage_add_pieces(const struct stage *stage, const struct stage_crossing *crossing, bool sends,
                                  int buffer, struct hapt_piece *piece, int *count)
{
    const int other = sends ? crossing->to : crossing->from;
    for (int r = 0; r < stage_size(stage->worker, other); r++) {
        struct hapt_strided_list sent, received;
        HAPT_TRY(cross(stage->worker, crossing, sends ? stage->rank : r, sends ? r : stage->rank, stage->worker->arena,
                       &sent, &received));
        const struct hapt_strided_list *mine = sends ? &sent : &received;
        if (hapt_strided_bytes(mine) > 0)
            piece[(*count)++] = make_piece(stage_world_rank(stage->worker, other, r), buffer, mine);
    }
    return HAPT_OK;
}

enum hapt_status stage_edge_bytes(const struct worker *worker, const struct hapt_edge *edge, int from, int to,
                                  struct hapt_arena *scratch, size_t *bytes, size_t *in_runs)
{
    *bytes = *in_runs = 0;
    for (int i = 0; i < edge->count; i++) {
        const struct stage_crossing crossing = {edge->from, edge->to, edge->source[i], edge->tensor[i], false};
        struct hapt_strided_list sent, received;
        HAPT_TRY(cross(worker, &crossing, from, to, scratch, &sent, &received));
        const struct hapt_piece piece = make_piece(0, i, worker_stage(worker, edge->from) ? &sent : &received);
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
static enum hapt_status find_link(const struct worker *worker, const struct stage_crossing *crossing, int tensors,
                                  int sender, const struct hapt_link **slowest)
{
    const int *subcluster = worker->cluster->subcluster_of_rank;
    *slowest = NULL;
    for (int t = 0; t < tensors; t++)
        for (int r = 0; r < stage_size(worker, crossing->to); r++) {
            const struct hapt_link *link =
                hapt_cluster_link(worker->cluster, subcluster[stage_world_rank(worker, crossing->from, sender)],
                                  subcluster[stage_world_rank(worker, crossing->to, r)]);
            struct hapt_strided_list sent, received;
            if (*slowest && throttle_of(link) >= throttle_of(*slowest)) continue;
            HAPT_TRY(cross(worker, &crossing[t], sender, r, worker->arena, &sent, &received));
            if (hapt_strided_bytes(&sent) > 0) *slowest = link;
        }
    return HAPT_OK;
}

/* Messages to another subcluster share the link to it. Inside a subcluster each submesh is reached over a link of its
 * own. The simulator's channels are the same (hapt_schedule_edge.link). */
static int port_of(const struct worker *worker, const struct hapt_link *link, int chunk)
{
    const int count = worker->cluster->count, index = (int)(link - worker->cluster->link);
    int first = chunk;
    if (index / count != index % count) return 1 + index % count;
    for (int c = chunk - 1; c >= 0; c--)
        if (worker_shares(worker, c, chunk)) first = c;
    return 1 + count + first;
}

enum hapt_status stage_set_throttle(const struct stage *stage, const struct stage_crossing *crossing, int tensors,
                                    struct hapt_flow_options *options)
{
    const struct hapt_link *mine, *link;
    int senders = 0;
    HAPT_TRY(find_link(stage->worker, crossing, tensors, stage->rank, &mine));
    if (!mine || isinf(throttle_of(mine))) return HAPT_OK;
    for (int s = 0; s < stage_size(stage->worker, crossing->from); s++) {
        HAPT_TRY(find_link(stage->worker, crossing, tensors, s, &link));
        senders += link == mine;
    }
    options->bandwidth = mine->bandwidth / senders;
    options->latency_s = mine->latency > 0 ? mine->latency : 0;
    options->port = port_of(stage->worker, mine, crossing->to);
    return HAPT_OK;
}

/* The device pairs of all pieces; NULL if a piece has none. */
static enum hapt_status find_pairs(const struct stage *stage, int edge, bool sends, int count,
                                   const struct hapt_piece *piece, const struct hapt_pair **pair)
{
    const int me = stage->worker->env->world_rank;
    struct hapt_pair *made;
    *pair = NULL;
    HAPT_NEW(made, stage->worker->arena, count);
    for (int p = 0; p < count; p++) {
        const struct hapt_pair *found = sends ? worker_find_pair(stage->worker, edge, me, piece[p].peer)
                                              : worker_find_pair(stage->worker, edge, piece[p].peer, me);
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
    if (!stage->worker->backend->pin || strstr(stage->boundary_route, route)) return;
    snprintf(stage->boundary_route + length, sizeof stage->boundary_route - length, "%s%s%s%s", length > 0 ? ", " : "",
             route, why[0] ? ": " : "", why);
}

static enum hapt_status add_edge(struct stage *stage, const struct hapt_edge *edge, int tag, bool sends,
                                 struct stage_flows *flows)
{
    const int other = sends ? edge->to : edge->from;
    const int transfer_slots = hapt_schedule_transfer_slots(stage->worker->schedule);
    const bool from_slots = sends && !edge->backward && !edge->relayed;
    const int slots = from_slots ? stage->worker->list->slots : transfer_slots;
    struct hapt_piece *piece;
    struct stage_crossing *crossing;
    void **base;
    HAPT_NEW(piece, stage->worker->arena, edge->count * stage_size(stage->worker, other));
    HAPT_NEW(crossing, stage->worker->arena, edge->count);
    HAPT_NEW(base, stage->worker->arena, slots * edge->count);
    int pieces = 0;
    for (int i = 0; i < edge->count; i++) {
        crossing[i] = (struct stage_crossing){edge->from, edge->to, edge->source[i], edge->tensor[i], false};
        HAPT_TRY(stage_add_pieces(stage, &crossing[i], sends, i, piece, &pieces));
        for (int s = 0; s < slots; s++) base[s * edge->count + i] = stage_edge_address(stage, edge, sends, i, s);
    }
    if (pieces == 0) return HAPT_OK;
    struct hapt_flow_options options = {.what = edge->backward ? "gradients" : "activations",
                                        .stage = stage->chunk,
                                        .peer_stage = other,
                                        .sends = sends,
                                        .tag = tag,
                                        .per_step = stage->worker->plan->microbatches,
                                        .first_step = stage->worker->first_step,
                                        .peer_slots = transfer_slots,
                                        .slot_count = slots,
                                        .buffer_count = edge->count,
                                        .base = base,
                                        .on_device = stage->worker->backend->pin != NULL,
                                        .piece_count = pieces,
                                        .piece = piece};
    const char *reason;
    HAPT_TRY(find_pairs(stage, tag, sends, pieces, piece, &options.pair));
    if (sends) HAPT_TRY(stage_set_throttle(stage, crossing, edge->count, &options));
    options.bandwidth *= hapt_plan_link_share(stage->worker->plan, edge->from, edge->to);
    HAPT_TRY(trace_add_flow(stage->worker, stage->chunk, other, edge->backward, sends, &options.time_count,
                            &options.time_s));
    if (flows->count == MAX_STAGE_FLOWS)
        return hapt_fail(HAPT_ERR_INFEASIBLE, "use fewer stages", "stage %d exchanges tensors with more than %d stages",
                         stage->chunk, MAX_STAGE_FLOWS);
    flows->peer[flows->count] = other;
    flows->edge[flows->count] = tag;
    HAPT_TRY(stage->worker->runtime->add_flow(stage, &options, true, &flows->flow[flows->count]));
    const bool copies = hapt_comm_thread_copies(stage->worker->comm_thread, flows->flow[flows->count++]);
    if (sends && options.pair)
        note_route(stage, stage->worker->backend->device_comms(&reason)->library(), "");
    else if (sends)
        note_route(stage, copies ? "page-locked host memory" : "GPU-aware MPI", stage->worker->no_direct_reason);
    return HAPT_OK;
}

/* A stage on the same submesh has the whole of its tensors: there is nothing to rebuild. */
static bool is_local(const struct stage *stage, bool backward, int tensor)
{
    const struct worker *worker = stage->worker;
    for (int r = 0; r < worker->edges->count; r++) {
        const struct hapt_edge *edge = &worker->edges->edge[r];
        for (int i = 0; i < edge->count; i++)
            if (edge->to == stage->chunk && edge->backward == backward && edge->tensor[i] == tensor)
                return worker_shares(worker, edge->from, edge->to);
    }
    return false;
}

static enum hapt_status prepare_boundary(struct stage *stage, bool backward, struct stage_replicas **replicas)
{
    const struct hapt_boundary *boundary = backward ? &stage->program->backward_in : &stage->program->forward_in;
    HAPT_NEW(*replicas, stage->worker->arena, boundary->count);
    for (int i = 0; i < boundary->count; i++) {
        struct stage_replicas *made = &(*replicas)[i];
        HAPT_TRY(stage_prepare_replicas(stage, boundary->tensor[i], made));
        if (is_local(stage, backward, boundary->tensor[i])) made->axes = 0;
        if (made->axes != 0) HAPT_TRY(hapt_team_reserve_parts(&stage->team, made->axes, made->part));
    }
    return HAPT_OK;
}

/* Reserves the buffer in which the host assembles incoming tensors. */
static enum hapt_status reserve_bounce(struct stage *stage)
{
    const struct hapt_program *program = stage->program;
    const struct hapt_boundary *boundary[] = {&program->forward_in, &program->backward_in};
    const struct stage_replicas *replicas[] = {stage->forward_replicas, stage->backward_replicas};
    size_t most = 0;
    void *memory;
    for (int k = 0; k < 2; k++)
        for (int i = 0; i < boundary[k]->count; i++) {
            const size_t bytes = hapt_engine_tensor_bytes(stage->engine, boundary[k]->tensor[i]);
            if (replicas[k][i].axes != 0 && bytes > most) most = bytes;
        }
    if (most == 0 || !stage->worker->backend->pin || stage->team.devices) return HAPT_OK;
    HAPT_TRY(hapt_backend_pin(stage->worker->backend, most, &memory));
    stage->bounce = memory;
    return HAPT_OK;
}

static bool brings(const struct hapt_edge *edge, const struct hapt_edge *next)
{
    for (int i = 0; i < edge->count; i++)
        for (int k = 0; k < next->count; k++)
            if (edge->tensor[i] == next->source[k]) return true;
    return false;
}

/* Received activations that are passed on keep their transfer slots until they are sent. */
static enum hapt_status join_relays(const struct stage *stage)
{
    const struct hapt_edge *edge = stage->worker->edges->edge;
    for (int out = 0; out < stage->passed_on.count; out++)
        for (int in = 0; in < stage->forward_in.count; in++)
            if (brings(&edge[stage->forward_in.edge[in]], &edge[stage->passed_on.edge[out]]))
                HAPT_TRY(hapt_comm_thread_pass_on(stage->worker->comm_thread, stage->forward_in.flow[in],
                                                  stage->passed_on.flow[out]));
    return HAPT_OK;
}

static struct stage_flows *flows_out(struct stage *stage, const struct hapt_edge *edge)
{
    if (edge->backward) return &stage->backward_out;
    return edge->relayed ? &stage->passed_on : &stage->forward_out;
}

/* Edges inside a submesh have no flows (hand_over in worker_step.c). */
enum hapt_status stage_add_flows(struct stage *stage)
{
    const struct worker *worker = stage->worker;
    for (int r = 0; r < worker->edges->count; r++) {
        const struct hapt_edge *edge = &worker->edges->edge[r];
        if (worker_shares(worker, edge->from, edge->to)) continue;
        if (edge->from == stage->chunk) HAPT_TRY(add_edge(stage, edge, r, true, flows_out(stage, edge)));
        if (edge->to == stage->chunk)
            HAPT_TRY(add_edge(stage, edge, r, false, edge->backward ? &stage->backward_in : &stage->forward_in));
    }
    HAPT_TRY(join_relays(stage));
    HAPT_TRY(prepare_boundary(stage, false, &stage->forward_replicas));
    HAPT_TRY(prepare_boundary(stage, true, &stage->backward_replicas));
    return reserve_bounce(stage);
}

/* Adds the times of the flows to or from a peer: the outputs of the stage and the tensors that it passes on are two
 * flows. */
static void add_link_time(const struct stage *stage, const struct stage_flows *flows, int peer,
                          struct stage_link_time *link)
{
    for (int f = 0; f < flows->count; f++) {
        bool counted;
        const double time_s = hapt_comm_thread_message_s(stage->worker->comm_thread, flows->flow[f], &counted);
        if (flows->peer[f] != peer) continue;
        link->time_s += time_s;
        link->counted = link->counted || counted;
    }
}

void stage_take_link_times(const struct stage *stage, struct stage_link_time link[STAGE_LINKS])
{
    memset(link, 0, STAGE_LINKS * sizeof *link);
    add_link_time(stage, &stage->forward_out, stage->chunk + 1, &link[STAGE_LINK_FORWARD_OUT]);
    add_link_time(stage, &stage->passed_on, stage->chunk + 1, &link[STAGE_LINK_FORWARD_OUT]);
    add_link_time(stage, &stage->backward_out, stage->chunk - 1, &link[STAGE_LINK_BACKWARD_OUT]);
    add_link_time(stage, &stage->forward_in, stage->chunk - 1, &link[STAGE_LINK_FORWARD_IN]);
    add_link_time(stage, &stage->backward_in, stage->chunk + 1, &link[STAGE_LINK_BACKWARD_IN]);
}

double stage_comm_s(const struct stage *stage)
{
    double longest = 0;
    for (int f = 0; f < stage->forward_out.count; f++) {
        const double active_s = hapt_comm_thread_active_s(stage->worker->comm_thread, stage->forward_out.flow[f]);
        if (active_s > longest) longest = active_s;
    }
    return longest;
}
