/* The runtime of modelled devices: times, messages and the sample of the weights. */

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "checkpoint.h"
#include "runtime.h"

/* Header of a message; bytes computed from its seed follow. */
struct message {
    double arrival_s; /* written by the communication thread */
    int64_t step, microbatch, sequence, modelled_bytes;
    int32_t tag, from_stage, from_rank, to_rank;
    uint64_t seed;
};

#define MESSAGE_BYTES ((size_t)1024)
_Static_assert(sizeof(struct message) < 1024 && 1024 <= HAPT_LINK_SHORT_BYTES, "a message is short");

struct emulated_flow {
    struct hapt_flow_options options;
    int64_t next; /* sequence number of the next message */
    int peers;
    int *peer;        /* [peers] world ranks */
    size_t *modelled; /* [peers] bytes */
    char *memory;     /* [slot_count][peers][MESSAGE_BYTES] */
};

struct emulation {
    struct emulated_flow *flow; /* [flow_count] indexed as in the communication thread */
    int flow_count, flow_capacity;
    char *barrier_buffer; /* [ranks of the submesh] */
};

/* Sample of all parameters of a stage, those with weight decay first: weights and states, one array each. */
struct emulated_sample {
    const struct hapt_kernel *optimizer;
    int state_count;
    int64_t elements, decayed;
    int64_t *first; /* [tensors of the graph] offset of its sample; -1: not here */
    float *value[3], *gradient;
};

/* ---- the sample ---- */

static int64_t sample_of(const struct hapt_tensor *parameter)
{
    return checkpoint_elements(parameter, true);
}

/* A number in [-1, 1), a function of the arguments. */
static float by_rule(uint64_t seed, const char *name, int64_t step, int64_t element)
{
    const int64_t key[2] = {step, element};
    uint64_t state = hapt_hash(hapt_hash(seed, name, strlen(name)), key, sizeof key);
    return (float)(2 * hapt_random_unit(&state) - 1);
}

/* Samples are one block (worker_next_block). */
static enum hapt_status initial(const struct worker *worker, int parameter, const struct hapt_rows *rows, float *value)
{
    (void)rows;
    const struct hapt_tensor *about = &worker->graph->tensor[parameter];
    for (int64_t i = 0; i < sample_of(about); i++) value[i] = 0.02f * by_rule(worker->model->seed, about->name, -1, i);
    return HAPT_OK;
}

static bool is_sampled(const struct stage *stage, int tensor)
{
    return stage->worker->graph->tensor[tensor].kind == HAPT_TENSOR_PARAMETER && stage->program->local[tensor] >= 0;
}

static enum hapt_status list_parameters(struct stage *stage, struct emulated_sample *made)
{
    const struct hapt_graph *graph = stage->worker->graph;
    HAPT_NEW(made->first, stage->worker->arena, graph->tensor_count);
    for (int decays = 1; decays >= 0; decays--) {
        for (int t = 0; t < graph->tensor_count; t++) {
            const struct hapt_tensor *parameter = &graph->tensor[t];
            if (decays) made->first[t] = -1;
            if (!is_sampled(stage, t) || (parameter->dims >= 2) != (decays == 1)) continue;
            made->first[t] = made->elements;
            made->elements += sample_of(parameter);
        }
        if (decays) made->decayed = made->elements;
    }
    for (int k = 0; k <= made->state_count; k++) HAPT_NEW(made->value[k], stage->worker->arena, made->elements + 1);
    HAPT_NEW(made->gradient, stage->worker->arena, made->elements + 1);
    return HAPT_OK;
}

static enum hapt_status create_sample(struct stage *stage, int state_count)
{
    struct emulated_sample *made;
    HAPT_NEW(made, stage->worker->arena, 1);
    made->state_count = state_count;
    /* the real optimizer on the CPU, because the sample is in host memory */
    made->optimizer = hapt_backend_find("cpu")->find_kernel(NULL, state_count == 2 ? "adamw" : "sgd", HAPT_F32);
    HAPT_ASSERT(made->optimizer && state_count <= 2);
    stage->sample = made;
    return list_parameters(stage, made);
}

/* Sets up the messages of this rank and the samples of its stages. */
static enum hapt_status prepare(struct worker *worker, int state_count)
{
    HAPT_NEW(worker->emulation, worker->arena, 1);
    HAPT_NEW(worker->emulation->barrier_buffer, worker->arena, worker->stage[0].size);
    for (int s = 0; s < worker->stage_count; s++) HAPT_TRY(create_sample(&worker->stage[s], state_count));
    return HAPT_OK;
}

static struct hapt_view part_of(float *values, int64_t first, int64_t end)
{
    return (struct hapt_view){.data = values + first, .dtype = HAPT_F32, .dims = 1, .shape = {end - first}};
}

static enum hapt_status update_part(struct emulated_sample *sample, const struct hapt_update *update, int64_t first,
                                    int64_t end, double decay)
{
    struct hapt_call call = {
        .input_count = 1, .output_count = update->optimizer == HAPT_OPTIMIZER_ADAMW ? 4 : 3, .threads = 1};
    const double adamw[] = {update->learning_rate, update->beta1, update->beta2, update->epsilon, decay, 1};
    const double sgd[] = {update->learning_rate, update->momentum, 0, 0, decay, 1};
    if (first == end) return HAPT_OK;
    memcpy(call.real, update->optimizer == HAPT_OPTIMIZER_ADAMW ? adamw : sgd, sizeof adamw);
    call.integer[0] = update->step;
    call.input[0] = part_of(sample->gradient, first, end);
    for (int k = 0; k <= sample->state_count; k++) call.output[k] = part_of(sample->value[k], first, end);
    return sample->optimizer->run(&call, NULL);
}

/* One optimizer step on the whole sample, with the first group. */
static enum hapt_status update_sample(struct stage *stage, int group, const struct hapt_update *update)
{
    struct emulated_sample *sample = stage->sample;
    const struct hapt_graph *graph = stage->worker->graph;
    if (group > 0) return HAPT_OK;
    for (int t = 0; t < graph->tensor_count; t++) {
        if (sample->first[t] < 0) continue;
        const int64_t count = sample_of(&graph->tensor[t]);
        for (int64_t i = 0; i < count; i++)
            sample->gradient[sample->first[t] + i] =
                by_rule(stage->worker->model->seed, graph->tensor[t].name, update->step, i);
    }
    HAPT_TRY(update_part(sample, update, 0, sample->decayed, update->weight_decay));
    return update_part(sample, update, sample->decayed, sample->elements, 0);
}

static enum hapt_status set_sample(struct stage *stage, int parameter, int state, const struct hapt_rows *rows,
                                   const float *full, float *local)
{
    struct emulated_sample *sample = stage->sample;
    (void)rows;
    (void)local;
    memcpy(sample->value[state + 1] + sample->first[parameter], full,
           (size_t)sample_of(&stage->worker->graph->tensor[parameter]) * sizeof *full);
    return HAPT_OK;
}

static enum hapt_status get_sample(struct stage *stage, int parameter, int state, const struct hapt_rows *rows,
                                   float *local, float *full)
{
    const struct emulated_sample *sample = stage->sample;
    (void)rows;
    (void)local;
    memcpy(full, sample->value[state + 1] + sample->first[parameter],
           (size_t)sample_of(&stage->worker->graph->tensor[parameter]) * sizeof *full);
    return HAPT_OK;
}

/* ---- messages ---- */

static enum hapt_status list_peers(const struct hapt_flow_options *options, struct hapt_arena *arena,
                                   struct emulated_flow *flow)
{
    HAPT_NEW(flow->peer, arena, options->piece_count);
    HAPT_NEW(flow->modelled, arena, options->piece_count);
    for (int i = 0; i < options->piece_count; i++) {
        int p = 0;
        while (p < flow->peers && flow->peer[p] != options->piece[i].peer) p++;
        if (p == flow->peers) flow->peer[flow->peers++] = options->piece[i].peer;
        flow->modelled[p] += options->piece[i].bytes;
    }
    return HAPT_OK;
}

static enum hapt_status keep_flow(struct stage *stage, const struct emulated_flow *flow, int number)
{
    struct emulation *emulation = stage->worker->emulation;
    HAPT_ASSERT(number == emulation->flow_count);
    if (emulation->flow_count == emulation->flow_capacity) {
        struct emulated_flow *grown;
        const int capacity = emulation->flow_capacity ? 2 * emulation->flow_capacity : 16;
        HAPT_NEW(grown, stage->worker->arena, capacity);
        if (emulation->flow_count) memcpy(grown, emulation->flow, (size_t)emulation->flow_count * sizeof *grown);
        emulation->flow = grown;
        emulation->flow_capacity = capacity;
    }
    emulation->flow[emulation->flow_count++] = *flow;
    return HAPT_OK;
}

/* One message per peer, throttled to the link in `options`. */
static enum hapt_status add_flow(struct stage *stage, const struct hapt_flow_options *options, bool paced, int *flow)
{
    struct hapt_arena *arena = stage->worker->arena;
    struct emulated_flow made = {.options = *options};
    struct hapt_piece *piece;
    void **base;
    HAPT_TRY(list_peers(options, arena, &made));
    HAPT_NEW(piece, arena, made.peers);
    HAPT_NEW(base, arena, options->slot_count * made.peers);
    HAPT_NEW(made.memory, arena, (size_t)options->slot_count * (size_t)made.peers * MESSAGE_BYTES);
    for (int p = 0; p < made.peers; p++)
        piece[p] = (struct hapt_piece){
            .peer = made.peer[p], .buffer = p, .bytes = MESSAGE_BYTES, .modelled_bytes = made.modelled[p]};
    for (int i = 0; i < options->slot_count * made.peers; i++) base[i] = made.memory + (size_t)i * MESSAGE_BYTES;
    made.options.buffer_count = made.options.piece_count = made.peers;
    made.options.base = base;
    made.options.piece = piece;
    made.options.stamped = true;
    for (int p = 0; p < made.peers; p++)
        made.options.stamped =
            made.options.stamped && hapt_comm_thread_has_wakeup(stage->worker->comm_thread, made.peer[p]);
    made.options.bandwidth = paced ? options->bandwidth / stage->worker->time_scale : 0;
    made.options.latency_s = paced ? options->latency_s * stage->worker->time_scale : 0;
    HAPT_TRY(hapt_comm_thread_add(stage->worker->comm_thread, &made.options, flow));
    return keep_flow(stage, &made, *flow);
}

static struct message message_of(const struct stage *stage, const struct emulated_flow *flow, int peer,
                                 int64_t sequence)
{
    const bool sends = flow->options.sends;
    const int me = stage->worker->env->world_rank;
    struct message message = {.step = stage->worker->step,
                              .microbatch = sequence % flow->options.per_step,
                              .sequence = sequence,
                              .modelled_bytes = (int64_t)flow->modelled[peer],
                              .tag = flow->options.tag,
                              .from_stage = sends ? flow->options.stage : flow->options.peer_stage,
                              .from_rank = sends ? me : flow->peer[peer],
                              .to_rank = sends ? flow->peer[peer] : me};
    message.seed = hapt_hash(stage->worker->model->seed, &message, sizeof message); /* arrival_s is still 0 */
    return message;
}

static char *message_address(const struct emulated_flow *flow, int slot, int peer)
{
    return flow->memory + ((size_t)slot * (size_t)flow->peers + (size_t)peer) * MESSAGE_BYTES;
}

static void fill_sample(uint64_t seed, char sample[MESSAGE_BYTES - sizeof(struct message)])
{
    for (size_t i = 0; i < MESSAGE_BYTES - sizeof(struct message); i += sizeof seed) {
        const uint64_t value = hapt_random_next(&seed);
        memcpy(sample + i, &value, sizeof value);
    }
}

_Static_assert((1024 - sizeof(struct message)) % sizeof(uint64_t) == 0, "samples are whole words");

/* Messages carry a description of themselves, which is checked. They advance the device's modelled time: it is free
 * from the time at which the awaited event was due. */
static void send_message(struct stage *stage, int number, int slot)
{
    struct emulated_flow *flow = &stage->worker->emulation->flow[number];
    const int64_t sequence = flow->next++;
    for (int p = 0; p < flow->peers; p++) {
        const struct message message = message_of(stage, flow, p, sequence);
        memcpy(message_address(flow, slot, p), &message, sizeof message);
        fill_sample(message.seed, message_address(flow, slot, p) + sizeof message);
    }
    hapt_comm_thread_send_at(stage->worker->comm_thread, number, slot, stage->team.free_s);
}

/* Checks the part of message `sequence` that came from `peer`. */
static enum hapt_status check(const struct stage *stage, const struct emulated_flow *flow, int64_t sequence, int peer,
                              double *arrival_s)
{
    const char *received = message_address(flow, (int)(sequence % flow->options.slot_count), peer);
    struct message wanted = message_of(stage, flow, peer, sequence), found;
    char sample[MESSAGE_BYTES - sizeof(struct message)];
    memcpy(&found, received, sizeof found);
    fill_sample(wanted.seed, sample);
    wanted.arrival_s = *arrival_s = found.arrival_s;
    if (memcmp(&found, &wanted, sizeof found) == 0 && memcmp(received + sizeof found, sample, sizeof sample) == 0)
        return HAPT_OK;
    return hapt_fail(HAPT_ERR_INTERNAL, NULL,
                     "stage %d expected %s of step %lld, microbatch %lld from rank %d but got a message of step %lld, "
                     "microbatch %lld from rank %d to rank %d (flow %d, %lld modelled bytes)",
                     stage->chunk, flow->options.what, (long long)wanted.step, (long long)wanted.microbatch,
                     wanted.from_rank, (long long)found.step, (long long)found.microbatch, found.from_rank,
                     found.to_rank, found.tag, (long long)found.modelled_bytes);
}

/* For messages from another host, whose clock differs, only the wakeup time is known. */
static void wait_until_now(struct stage *stage, double start_s)
{
    const double looking_s = 100e-6;
    if (hapt_time_s() - start_s > looking_s) hapt_team_inputs_ready(&stage->team, hapt_time_s());
}

static enum hapt_status wait_received(struct stage *stage, int number, int64_t sequence)
{
    const struct emulated_flow *flow = &stage->worker->emulation->flow[number];
    const double start_s = hapt_time_s();
    HAPT_TRY(hapt_comm_thread_wait_received(stage->worker->comm_thread, number, sequence));
    if (!flow->options.stamped) wait_until_now(stage, start_s);
    for (int p = 0; p < flow->peers; p++) {
        double arrival_s;
        HAPT_TRY(check(stage, flow, sequence, p, &arrival_s));
        if (flow->options.stamped) hapt_team_inputs_ready(&stage->team, arrival_s);
    }
    return HAPT_OK;
}

static enum hapt_status wait_sent(struct stage *stage, int number, int slot)
{
    const struct emulated_flow *flow = &stage->worker->emulation->flow[number];
    const double start_s = hapt_time_s();
    HAPT_TRY(hapt_comm_thread_wait_sent(stage->worker->comm_thread, number, slot));
    if (flow->options.stamped)
        hapt_team_inputs_ready(&stage->team, hapt_comm_thread_due_s(stage->worker->comm_thread, number, slot));
    else
        wait_until_now(stage, start_s);
    return HAPT_OK;
}

static void free_slot(struct stage *stage, int number)
{
    hapt_comm_thread_free_at(stage->worker->comm_thread, number, stage->team.free_s);
}

/* ---- the stage ---- */

/* Communication inside a stage is part of its planned time. */
static void no_links(struct hapt_team *team, struct hapt_engine_links *links)
{
    (void)team;
    (void)links;
}

static enum hapt_status no_team(struct stage *stage)
{
    (void)stage;
    return HAPT_OK;
}

/* Messages are short, so MPI carries them. */
static enum hapt_status create_comm_thread(struct worker *worker)
{
    HAPT_TRY(
        hapt_comm_thread_create(&hapt_transfer_mpi, worker->env->world, NULL, worker->timeout_s, &worker->comm_thread));
    return hapt_comm_thread_use_wakeups(worker->comm_thread, worker->env->world, worker->env->node);
}

/* The first forward pass behind a deferred update takes longer, as in the simulator. */
static double with_update_s(struct stage *stage, double length_s)
{
    const double left_s = stage->update_due_s - stage->team.free_s;
    stage->update_due_s = 0;
    if (left_s <= 0) return length_s;
    return fmax(left_s + HAPT_DEFERRED_TAIL * length_s,
                length_s + left_s * stage->plan->deferred_work_s / stage->plan->deferred_s);
}

static void begin_pass(struct stage *stage, double planned_s)
{
    double length_s = stage->worker->time_scale * planned_s;
    if (stage->update_due_s > 0) length_s = with_update_s(stage, length_s);
    hapt_team_set_length(&stage->team, length_s);
}

static enum hapt_status no_loss(struct stage *stage, int slot)
{
    (void)stage;
    (void)slot;
    return HAPT_OK;
}

/* Waits for all ranks of the stage, as the sum of its gradients does. */
static enum hapt_status wait_for_stage(struct stage *stage)
{
    char what[64], mine = 0, *all = stage->worker->emulation->barrier_buffer;
    hapt_team_describe(&stage->team, "sum of the gradients", what, sizeof what);
    return hapt_link_all_gather(stage->worker->comm, what, stage->worker->timeout_s, &mine, sizeof mine, all);
}

/* All stages that hold tied parameters have exchanged. */
static void end_exchange(struct worker *worker, double start_s)
{
    struct hapt_team *team = &worker->active->team;
    bool tied = false;
    (void)start_s;
    for (int s = 0; s < worker->stage_count; s++) tied = tied || worker->stage[s].tie_count > 0;
    if (tied && !worker_shares(worker, 0, worker->plan->stage_count - 1))
        hapt_team_inputs_ready(team, team->free_s + worker->time_scale * worker->plan->exchange_s);
}

/* The end of a step in one piece, including the sum of gradients and the update. */
static void take_end(struct stage *stage)
{
    const double deferred_s = stage_defers(stage) ? stage->plan->deferred_s : 0;
    if (stage->plan->forward_only) return;
    begin_pass(stage, stage->plan->step_s - stage->plan->tied_s - deferred_s);
    hapt_team_stretch_begin(&stage->team);
    hapt_team_stretch_end(&stage->team);
    if (deferred_s > 0) stage->update_due_s = stage->team.free_s + stage->worker->time_scale * deferred_s;
}

/* The end stands where the simulator has it: before the agreement, or after it if the optimizer state is on hosts. */
static void end_step(struct stage *stage)
{
    if (!stage->worker->plan->host_state) take_end(stage);
}

static enum hapt_status update(struct stage *stage, int group, const struct hapt_update *update)
{
    if (group == 0 && stage->worker->plan->host_state) take_end(stage);
    return update_sample(stage, group, update);
}

const struct stage_runtime runtime_modelled = {.computes = false,
                                               .links = no_links,
                                               .prepare = prepare,
                                               .connect_team = no_team,
                                               .connect_devices = no_team,
                                               .create_comm_thread = create_comm_thread,
                                               .add_flow = add_flow,
                                               .wait_received = wait_received,
                                               .wait_sent = wait_sent,
                                               .send = send_message,
                                               .free = free_slot,
                                               .begin_pass = begin_pass,
                                               .add_loss = no_loss,
                                               .reduce = wait_for_stage,
                                               .end_exchange = end_exchange,
                                               .end_step = end_step,
                                               .update = update,
                                               .initial = initial,
                                               .gather = get_sample,
                                               .set = set_sample};
