/* One step of a worker: executes the same instruction list that the simulator reads. */
#include "runtime.h"

#include <math.h>
#include <string.h>

#include "hapt/heartbeat.h"
#include "trace.h"

/* ---- Inputs ---- */

static enum hapt_status put(struct stage *stage, int tensor, int slot, const void *value)
{
    const struct worker *worker = stage->worker;
    return worker->backend->copy(worker->backend->queue(worker->device, 0),
                                 hapt_engine_tensor(stage->engine, tensor, slot), value,
                                 hapt_engine_tensor_bytes(stage->engine, tensor));
}

/* Waits until the copies of host memory are done. */
static enum hapt_status finish_puts(const struct worker *worker)
{
    return worker->backend->wait(worker->backend->record(worker->backend->queue(worker->device, 0)));
}

/* Sets the inputs that stay during the passes of a step, or those over held-out rows. */
static enum hapt_status put_scalars(struct stage *stage, bool trains)
{
    const struct worker *worker = stage->worker;
    const float training = trains,
                scale = worker->data && trains
                            ? (float)(worker->loss_scale / (double)hapt_data_targets(worker->data, worker->data_step))
                            : 0;
    for (int i = 0; i < stage->input_count; i++)
        if (hapt_role_is_scalar(stage->input[i].role))
            HAPT_TRY(
                put(stage, stage->input[i].tensor, 0, stage->input[i].role == HAPT_ROLE_TRAINING ? &training : &scale));
    return finish_puts(worker); /* they are local variables */
}

static enum hapt_status put_inputs(struct stage *stage, int microbatch, int slot)
{
    const struct worker *worker = stage->worker;
    for (int i = 0; worker->data && i < stage->input_count; i++) {
        const struct stage_input *input = &stage->input[i];
        const int first = microbatch * worker->model->microbatch + input->first_row;
        const void *value = worker->row_buffer;
        if (hapt_role_is_scalar(input->role)) continue;
        hapt_data_read(worker->data, input->role, input->field, worker->data_step, first, input->rows,
                       worker->row_buffer);
        if (input->runs.count > 0) {
            hapt_strided_pack(&input->runs, worker->row_buffer, 0, hapt_strided_bytes(&input->runs),
                              worker->shard_buffer);
            value = worker->shard_buffer;
        }
        HAPT_TRY(put(stage, input->tensor, slot, value));
        HAPT_TRY(finish_puts(worker)); /* the buffer is reused at once */
    }
    return HAPT_OK;
}

static void expect(const struct stage *stage, const struct stage_flows *incoming, int messages)
{
    for (int f = 0; f < incoming->count; f++)
        hapt_comm_thread_expect(stage->worker->comm_thread, incoming->flow[f], messages);
}

static void begin_forward(struct stage *stage, int microbatches)
{
    stage->loss = stage->square_sum = 0;
    stage->team.free_s = hapt_time_s(); /* all stages have agreed on the previous step */
    stage->team.step = stage->worker->step;
    expect(stage, &stage->forward_in, microbatches);
}

static enum hapt_status begin_step(struct stage *stage)
{
    const struct worker *worker = stage->worker;
    HAPT_TRY(hapt_engine_begin_step(stage->engine));
    HAPT_TRY(put_scalars(stage, true));
    begin_forward(stage, worker->plan->microbatches);
    expect(stage, &stage->backward_in, worker->plan->microbatches);
    return HAPT_OK;
}

/* ---- Messages and boundary tensors ---- */

static int64_t sequence(const struct worker *worker, bool backward, int microbatch)
{
    return (backward ? worker->backward_sequence : worker->forward_sequence) + microbatch;
}

static enum hapt_status wait_received(struct stage *stage, bool backward, int microbatch)
{
    const struct stage_flows *flows = backward ? &stage->backward_in : &stage->forward_in;
    for (int f = 0; f < flows->count; f++)
        HAPT_TRY(stage->worker->runtime->wait_received(stage, flows->flow[f],
                                                       sequence(stage->worker, backward, microbatch)));
    return HAPT_OK;
}

static enum hapt_status wait_sent(struct stage *stage, const struct stage_flows *flows, int slot)
{
    for (int f = 0; f < flows->count; f++) HAPT_TRY(stage->worker->runtime->wait_sent(stage, flows->flow[f], slot));
    return HAPT_OK;
}

static void send(struct stage *stage, const struct stage_flows *flows, int slot)
{
    for (int f = 0; f < flows->count; f++) stage->worker->runtime->send(stage, flows->flow[f], slot);
}

static void free_received(struct stage *stage, const struct stage_flows *flows)
{
    for (int f = 0; f < flows->count; f++) stage->worker->runtime->free(stage, flows->flow[f]);
}

static int transfer_slot(const struct worker *worker, bool backward, int microbatch)
{
    return (int)(sequence(worker, backward, microbatch) % hapt_schedule_transfer_slots(worker->schedule));
}

/* Assembles incoming tensors from the parts that this rank and its replicas received. */
static enum hapt_status rebuild(struct stage *stage, const struct hapt_boundary *boundary, enum hapt_staging_kind kind,
                                const struct stage_replicas *replicas, int transfer)
{
    for (int i = 0; i < boundary->count; i++)
        HAPT_TRY(stage_rebuild_received(stage, &replicas[i], boundary->tensor[i],
                                        hapt_engine_staging(stage->engine, kind, transfer, i)));
    return HAPT_OK;
}

/* Takes the tensors of an edge from another stage of this worker, where they have the same layout. They are in the
 * slot of the microbatch there; gradients in its transfer slot, because the engine reuses their memory. */
static enum hapt_status take(struct stage *stage, const struct hapt_edge *edge, struct stage *from, int microbatch,
                             int transfer)
{
    const struct worker *worker = stage->worker;
    for (int i = 0; i < edge->count; i++) {
        const void *there = stage_edge_address(from, edge, true, i, edge->backward ? transfer : from->slot[microbatch]);
        HAPT_TRY(worker->backend->copy(worker->backend->queue(worker->device, 0),
                                       stage_edge_address(stage, edge, false, i, transfer), there,
                                       hapt_engine_tensor_bytes(stage->engine, edge->tensor[i])));
    }
    return HAPT_OK;
}

static enum hapt_status hand_over(struct stage *stage, bool backward, int microbatch, int transfer)
{
    const struct worker *worker = stage->worker;
    for (int r = 0; r < worker->edges->count && worker->stage_count > 1; r++) {
        const struct hapt_edge *edge = &worker->edges->edge[r];
        struct stage *from = worker_stage(worker, edge->from);
        if (edge->to == stage->chunk && edge->backward == backward && from)
            HAPT_TRY(take(stage, edge, from, microbatch, transfer));
    }
    return HAPT_OK;
}

/* ---- Instructions of a stage ---- */

/* The backward time of the plan, as the simulator computes it, and the part of it that a split pass defers. */
static double backward_s(const struct stage *stage)
{
    const struct hapt_plan_stage *own = stage->plan;
    return fmax(0, own->compute_s - own->step_s / stage->worker->plan->microbatches - own->forward_s);
}

static double weight_s(const struct stage *stage)
{
    return stage->worker->plan->split ? fmin(stage->plan->weight_s, backward_s(stage)) : 0;
}

/* True if the list has instructions for the messages to the stage, or from it. Otherwise the plan knows the neighbours
 * alone, and they are on the same submesh. The passes then include the messages past them, to other submeshes. */
static bool is_received(const struct stage *stage, bool backward)
{
    return hapt_schedule_receives(stage->worker->schedule, stage->chunk, backward);
}

static bool is_sent(const struct stage *stage, bool backward)
{
    return hapt_schedule_sends(stage->worker->schedule, stage->chunk, backward);
}

/* Sends the outputs of the stage, and the received tensors that it passes on. */
static void send_activations(struct stage *stage, int slot, int microbatch)
{
    send(stage, &stage->forward_out, slot);
    send(stage, &stage->passed_on, transfer_slot(stage->worker, false, microbatch));
}

/* Waits until the slot's microbatch before, of any stage of this worker, is no longer being sent. */
static enum hapt_status take_slot(struct stage *stage, int slot)
{
    struct stage **owner = &stage->worker->slot_owner[slot];
    if (*owner) HAPT_TRY(wait_sent(*owner, &(*owner)->forward_out, slot));
    *owner = stage;
    return HAPT_OK;
}

static bool has_activations(const struct stage *stage, int microbatch)
{
    const struct worker *worker = stage->worker;
    for (int f = 0; f < stage->forward_in.count; f++)
        if (!hapt_comm_thread_has_received(worker->comm_thread, stage->forward_in.flow[f],
                                           sequence(worker, false, microbatch)))
            return false;
    return true;
}

/* Waits for the activations of a microbatch. Meanwhile a deferred update continues. */
static enum hapt_status wait_activations(struct stage *stage, int microbatch)
{
    while (hapt_engine_is_updating(stage->engine) && !has_activations(stage, microbatch)) {
        stage->team.microbatch = -1;
        hapt_team_stretch_begin(&stage->team);
        HAPT_TRY(hapt_engine_continue_update(stage->engine));
        hapt_team_stretch_end(&stage->team);
        stage->team.microbatch = microbatch;
    }
    return wait_received(stage, false, microbatch);
}

static enum hapt_status forward(struct stage *stage, const struct hapt_instruction *instruction)
{
    struct worker *worker = stage->worker;
    const struct hapt_program *program = stage->program;
    const int slot = instruction->slot, microbatch = instruction->microbatch;
    const int transfer = transfer_slot(worker, false, microbatch);
    stage->slot[microbatch] = slot;
    if (!is_received(stage, false)) HAPT_TRY(wait_activations(stage, microbatch));
    HAPT_TRY(take_slot(stage, slot));
    HAPT_TRY(wait_sent(stage, &stage->passed_on, transfer)); /* a replica may not have received the message itself */
    worker->begun_s = hapt_time_s();
    HAPT_TRY(rebuild(stage, &program->forward_in, HAPT_STAGING_FORWARD_IN, stage->forward_replicas, transfer));
    worker->runtime->begin_pass(stage, stage->plan->forward_s);
    hapt_team_stretch_begin(&stage->team);
    HAPT_TRY(put_inputs(stage, microbatch, slot));
    HAPT_TRY(hand_over(stage, false, microbatch, transfer));
    HAPT_TRY(hapt_engine_forward(stage->engine, slot, transfer));
    if (stage->chunk == worker->plan->stage_count - 1 && stage_counts(stage, program->graph->loss, 0))
        HAPT_TRY(worker->runtime->add_loss(stage, slot));
    if (stage->chunk == worker->plan->stage_count - 1 && worker->observer.run)
        HAPT_TRY(worker->observer.run(worker->observer.context, stage, microbatch, slot));
    hapt_team_stretch_end(&stage->team);
    free_received(stage, &stage->forward_in);
    if (!is_sent(stage, false)) send_activations(stage, slot, microbatch);
    return HAPT_OK;
}

static enum hapt_status backward(struct stage *stage, const struct hapt_instruction *instruction)
{
    struct worker *worker = stage->worker;
    const struct hapt_program *program = stage->program;
    const int microbatch = instruction->microbatch, transfer = transfer_slot(worker, true, microbatch);
    if (!is_received(stage, true)) HAPT_TRY(wait_received(stage, true, microbatch));
    HAPT_TRY(wait_sent(stage, &stage->backward_out, transfer));
    worker->begun_s = hapt_time_s();
    HAPT_TRY(rebuild(stage, &program->backward_in, HAPT_STAGING_BACKWARD_IN, stage->backward_replicas, transfer));
    worker->runtime->begin_pass(stage, backward_s(stage) - weight_s(stage));
    hapt_team_stretch_begin(&stage->team);
    HAPT_TRY(hand_over(stage, true, microbatch, transfer));
    HAPT_TRY(
        hapt_engine_backward_split(stage->engine, instruction->slot, instruction->weight_slot, transfer, transfer));
    hapt_team_stretch_end(&stage->team);
    free_received(stage, &stage->backward_in);
    if (!is_sent(stage, true)) send(stage, &stage->backward_out, transfer);
    return HAPT_OK;
}

/* The gradients of parameters, behind a split backward. Nothing waits for them before REDUCE. */
static enum hapt_status weight(struct stage *stage, const struct hapt_instruction *instruction)
{
    struct worker *worker = stage->worker;
    worker->runtime->begin_pass(stage, weight_s(stage));
    hapt_team_stretch_begin(&stage->team);
    HAPT_TRY(hapt_engine_weight(stage->engine, instruction->slot, instruction->weight_slot));
    hapt_team_stretch_end(&stage->team);
    return HAPT_OK;
}

static enum hapt_status receive_forward(struct stage *stage, const struct hapt_instruction *instruction)
{
    return wait_activations(stage, instruction->microbatch);
}

static enum hapt_status send_forward(struct stage *stage, const struct hapt_instruction *instruction)
{
    send_activations(stage, instruction->slot, instruction->microbatch);
    return HAPT_OK;
}

static enum hapt_status receive_backward(struct stage *stage, const struct hapt_instruction *instruction)
{
    return wait_received(stage, true, instruction->microbatch);
}

static enum hapt_status send_backward(struct stage *stage, const struct hapt_instruction *instruction)
{
    send(stage, &stage->backward_out, transfer_slot(stage->worker, true, instruction->microbatch));
    return HAPT_OK;
}

static enum hapt_status reduce(struct stage *stage, const struct hapt_instruction *instruction)
{
    (void)instruction;
    return stage->size == 1 ? HAPT_OK : stage->worker->runtime->reduce(stage);
}

static enum hapt_status update(struct stage *stage, const struct hapt_instruction *instruction)
{
    struct worker *worker = stage->worker;
    return worker->updates ? worker->runtime->update(stage, instruction->group, &worker->update) : HAPT_OK;
}

/* ---- The list ---- */

/* The device goes on with a stage when it has ended the instructions before. */
static void activate(struct stage *stage)
{
    struct worker *worker = stage->worker;
    if (worker->active != stage) hapt_team_inputs_ready(&stage->team, worker->active->team.free_s);
    worker->active = stage;
}

static enum hapt_status exchange(struct worker *worker)
{
    for (int s = 0; s < worker->stage_count; s++) worker->stage[s].team.microbatch = -1;
    return worker_exchange(worker);
}

static enum hapt_status norm(struct worker *worker)
{
    for (int s = 0; s < worker->stage_count; s++) {
        struct stage *stage = &worker->stage[s];
        activate(stage);
        worker->runtime->end_step(stage);
        HAPT_TRY(hapt_engine_square_sum(stage->engine, stage->counts, &stage->square_sum));
    }
    return worker->agreement->agree(worker->agreement->context, &worker->update, &worker->updates);
}

/* The function of each kind of instruction: of its stage, or of the whole worker. `activity` is what the heartbeat
 * reports to peers that wait for this rank; `to`: the neighbour that this rank then waits for, 0: none. */
static const struct {
    const char *activity;
    int to;
    enum hapt_status (*run)(struct stage *stage, const struct hapt_instruction *instruction);
    enum hapt_status (*run_all)(struct worker *worker);
} executor[] = {[HAPT_INSTRUCTION_RECEIVE_FORWARD] = {"waiting for activations", -1, receive_forward, NULL},
                [HAPT_INSTRUCTION_FORWARD] = {"forward", 0, forward, NULL},
                [HAPT_INSTRUCTION_SEND_FORWARD] = {"sending activations", 1, send_forward, NULL},
                [HAPT_INSTRUCTION_RECEIVE_BACKWARD] = {"waiting for gradients", 1, receive_backward, NULL},
                [HAPT_INSTRUCTION_BACKWARD] = {"backward", 0, backward, NULL},
                [HAPT_INSTRUCTION_SEND_BACKWARD] = {"sending gradients", -1, send_backward, NULL},
                [HAPT_INSTRUCTION_WEIGHT] = {"gradients of parameters", 0, weight, NULL},
                [HAPT_INSTRUCTION_REDUCE] = {"sum of the gradients", 0, reduce, NULL},
                [HAPT_INSTRUCTION_EXCHANGE] = {"sum of tied gradients", 0, NULL, exchange},
                [HAPT_INSTRUCTION_NORM] = {"end", 0, NULL, norm},
                [HAPT_INSTRUCTION_UPDATE] = {"end", 0, update, NULL}};

static void report_activity(const struct worker *worker, const struct hapt_instruction *instruction)
{
    const int to = executor[instruction->kind].to, own = worker->stage_count > 0 ? worker->active->chunk : -1;
    const int peer = to ? own + to : -1;
    hapt_heartbeat_note((struct hapt_activity){executor[instruction->kind].activity, own,
                                               peer < worker->plan->stage_count ? peer : -1, worker->step,
                                               instruction->microbatch});
}

static enum hapt_status execute(struct worker *worker, const struct hapt_instruction *instruction)
{
    struct stage *stage = instruction->chunk >= 0 ? worker_stage(worker, instruction->chunk) : NULL;
    if (stage) {
        activate(stage);
        stage->team.microbatch = instruction->microbatch;
    }
    HAPT_ASSERT(executor[instruction->kind].activity);
    report_activity(worker, instruction);
    return stage ? executor[instruction->kind].run(stage, instruction) : executor[instruction->kind].run_all(worker);
}

enum hapt_status worker_run_step(struct worker *worker, const struct hapt_data *data, int64_t step,
                                 const struct worker_agreement *agreement)
{
    worker->data = data;
    worker->step = worker->data_step = step;
    worker->agreement = agreement;
    worker->updates = false;
    worker->active = worker->stage;
    for (int s = 0; s < worker->stage_count; s++) HAPT_TRY(begin_step(&worker->stage[s]));
    for (int i = 0; i < worker->list->count; i++) {
        worker->begun_s = hapt_time_s();
        HAPT_TRY(execute(worker, &worker->list->instruction[i]));
        trace_note(worker, step - worker->first_step, i, worker->begun_s, hapt_time_s());
    }
    worker->forward_sequence += worker->plan->microbatches;
    worker->backward_sequence += worker->plan->microbatches;
    return HAPT_OK;
}

static bool is_forward(const struct hapt_instruction *instruction)
{
    return instruction->kind == HAPT_INSTRUCTION_RECEIVE_FORWARD || instruction->kind == HAPT_INSTRUCTION_FORWARD ||
           instruction->kind == HAPT_INSTRUCTION_SEND_FORWARD;
}

/* The forward passes of a list depend on each other alone, so without the others they end, too. */
enum hapt_status worker_run_forward(struct worker *worker, const struct hapt_data *data, int64_t data_step,
                                    int microbatches)
{
    HAPT_ASSERT(microbatches <= worker->plan->microbatches);
    worker->data = data;
    worker->data_step = data_step;
    worker->active = worker->stage;
    for (int s = 0; s < worker->stage_count; s++) {
        struct stage *stage = &worker->stage[s];
        const struct stage_flows *flows[] = {&stage->forward_in, &stage->forward_out, &stage->passed_on};
        HAPT_TRY(hapt_engine_settle(stage->engine));
        for (int k = 0; k < 3; k++)
            for (int f = 0; f < flows[k]->count; f++)
                hapt_comm_thread_leave_untimed(worker->comm_thread, flows[k]->flow[f], worker->forward_sequence,
                                               microbatches);
        HAPT_TRY(put_scalars(stage, false));
        begin_forward(stage, microbatches);
    }
    if (worker->trace.spans.capacity > 0) hapt_span_log_pause(&worker->trace.spans, true);
    for (int i = 0; i < worker->list->count; i++) {
        const struct hapt_instruction *instruction = &worker->list->instruction[i];
        if (!is_forward(instruction) || instruction->microbatch >= microbatches) continue;
        worker->begun_s = hapt_time_s();
        HAPT_TRY(execute(worker, instruction));
    }
    if (worker->trace.spans.capacity > 0) hapt_span_log_pause(&worker->trace.spans, false);
    worker->forward_sequence += microbatches;
    return HAPT_OK;
}
