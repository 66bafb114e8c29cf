/* One step of a stage on one rank: executes the same instruction list that the simulator reads. */
#include "runtime.h"

#include <math.h>
#include <string.h>

#include "hapt/heartbeat.h"
#include "trace.h"

static enum hapt_status put(struct stage *stage, int tensor, int slot, const void *value)
{
    struct hapt_queue *queue = stage->backend->queue(stage->device, 0);
    return stage->backend->copy(queue, hapt_engine_tensor(stage->engine, tensor, slot), value,
                                hapt_engine_tensor_bytes(stage->engine, tensor));
}

static enum hapt_status put_inputs(struct stage *stage, int microbatch, int slot)
{
    for (int i = 0; stage->data && i < stage->input_count; i++) {
        const struct stage_input *input = &stage->input[i];
        const int first = microbatch * stage->model->microbatch + input->first_row;
        const void *value = stage->row_buffer;
        if (input->role == HAPT_ROLE_LOSS_SCALE) continue;
        hapt_data_read(stage->data, input->role, stage->step, first, input->rows, stage->row_buffer);
        if (input->runs.count > 0) {
            hapt_strided_pack(&input->runs, stage->row_buffer, 0, hapt_strided_bytes(&input->runs),
                              stage->shard_buffer);
            value = stage->shard_buffer;
        }
        HAPT_TRY(put(stage, input->tensor, slot, value));
        /* the buffer is reused at once */
        struct hapt_queue *queue = stage->backend->queue(stage->device, 0);
        HAPT_TRY(stage->backend->wait(stage->backend->record(queue)));
    }
    return HAPT_OK;
}

static enum hapt_status begin_step(struct stage *stage)
{
    const float scale =
        stage->data ? (float)(stage->loss_scale / (double)hapt_data_targets(stage->data, stage->step)) : 0;
    HAPT_TRY(hapt_engine_begin_step(stage->engine));
    stage->team.free_s = hapt_time_s(); /* all stages have agreed on the previous step */
    for (int i = 0; i < stage->input_count; i++)
        if (stage->input[i].role == HAPT_ROLE_LOSS_SCALE) HAPT_TRY(put(stage, stage->input[i].tensor, 0, &scale));
    HAPT_TRY(stage->backend->wait(
        stage->backend->record(stage->backend->queue(stage->device, 0)))); /* `scale` is a local variable */
    const struct stage_flows *incoming[] = {&stage->forward_in, &stage->backward_in};
    for (int k = 0; k < 2; k++)
        for (int f = 0; f < incoming[k]->count; f++)
            hapt_comm_thread_expect(stage->comm_thread, incoming[k]->flow[f], stage->plan->microbatches);
    return HAPT_OK;
}

static enum hapt_status wait_received(struct stage *stage, const struct stage_flows *flows, int microbatch)
{
    for (int f = 0; f < flows->count; f++) {
        const int64_t sequence = stage->sequence + microbatch;
        HAPT_TRY(stage->runtime->wait_received(stage, flows->flow[f], sequence));
    }
    return HAPT_OK;
}

static enum hapt_status wait_sent(struct stage *stage, const struct stage_flows *flows, int slot)
{
    for (int f = 0; f < flows->count; f++) HAPT_TRY(stage->runtime->wait_sent(stage, flows->flow[f], slot));
    return HAPT_OK;
}

static void send(struct stage *stage, const struct stage_flows *flows, int slot)
{
    for (int f = 0; f < flows->count; f++) stage->runtime->send(stage, flows->flow[f], slot);
}

static void free_received(struct stage *stage, const struct stage_flows *flows)
{
    for (int f = 0; f < flows->count; f++) stage->runtime->free(stage, flows->flow[f]);
}

static int transfer_slot(const struct stage *stage, int microbatch)
{
    return (int)((stage->sequence + microbatch) % HAPT_TRANSFER_SLOTS);
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

static const struct hapt_plan_stage *own_plan(const struct stage *stage)
{
    return &stage->plan->stage[stage->chunk];
}

/* The backward time of the plan, as the simulator computes it. */
static double backward_s(const struct stage *stage)
{
    const struct hapt_plan_stage *own = own_plan(stage);
    return fmax(0, own->compute_s - own->step_s / stage->plan->microbatches - own->forward_s);
}

static enum hapt_status forward(struct stage *stage, const struct hapt_instruction *instruction)
{
    const struct hapt_program *program = stage->program[stage->chunk];
    const int slot = instruction->slot, microbatch = instruction->microbatch;
    const int transfer = stage->forward_in.count ? transfer_slot(stage, microbatch) : -1;
    stage->team.microbatch = microbatch;
    HAPT_TRY(wait_sent(stage, &stage->forward_out, slot));
    stage->begun_s = hapt_time_s();
    HAPT_TRY(rebuild(stage, &program->forward_in, HAPT_STAGING_FORWARD_IN, stage->forward_replicas, transfer));
    stage->runtime->begin_pass(stage, own_plan(stage)->forward_s);
    hapt_team_stretch_begin(&stage->team);
    HAPT_TRY(put_inputs(stage, microbatch, slot));
    HAPT_TRY(hapt_engine_forward(stage->engine, slot, transfer));
    if (stage->chunk == stage->plan->stage_count - 1 && stage_counts(stage, program->graph->loss, 0))
        HAPT_TRY(stage->runtime->add_loss(stage, slot));
    hapt_team_stretch_end(&stage->team);
    free_received(stage, &stage->forward_in);
    return HAPT_OK;
}

static enum hapt_status backward(struct stage *stage, const struct hapt_instruction *instruction)
{
    const struct hapt_program *program = stage->program[stage->chunk];
    const int transfer = transfer_slot(stage, instruction->microbatch);
    stage->team.microbatch = instruction->microbatch;
    HAPT_TRY(wait_sent(stage, &stage->backward_out, transfer));
    stage->begun_s = hapt_time_s();
    HAPT_TRY(rebuild(stage, &program->backward_in, HAPT_STAGING_BACKWARD_IN, stage->backward_replicas, transfer));
    stage->runtime->begin_pass(stage, backward_s(stage));
    hapt_team_stretch_begin(&stage->team);
    HAPT_TRY(hapt_engine_backward(stage->engine, instruction->slot, stage->backward_in.count ? transfer : -1,
                                  stage->backward_out.count ? transfer : -1));
    hapt_team_stretch_end(&stage->team);
    free_received(stage, &stage->backward_in);
    return HAPT_OK;
}

static enum hapt_status receive_forward(struct stage *stage, const struct hapt_instruction *instruction)
{
    return wait_received(stage, &stage->forward_in, instruction->microbatch);
}

static enum hapt_status send_forward(struct stage *stage, const struct hapt_instruction *instruction)
{
    send(stage, &stage->forward_out, instruction->slot);
    return HAPT_OK;
}

static enum hapt_status receive_backward(struct stage *stage, const struct hapt_instruction *instruction)
{
    return wait_received(stage, &stage->backward_in, instruction->microbatch);
}

static enum hapt_status send_backward(struct stage *stage, const struct hapt_instruction *instruction)
{
    send(stage, &stage->backward_out, transfer_slot(stage, instruction->microbatch));
    return HAPT_OK;
}

static enum hapt_status reduce(struct stage *stage, const struct hapt_instruction *instruction)
{
    stage->team.microbatch = instruction->microbatch;
    return stage->size == 1 ? HAPT_OK : stage->runtime->reduce(stage);
}

static enum hapt_status exchange(struct stage *stage, const struct hapt_instruction *instruction)
{
    stage->team.microbatch = instruction->microbatch;
    return stage_exchange(stage);
}

static enum hapt_status norm(struct stage *stage, const struct hapt_instruction *instruction)
{
    double square_sum = 0;
    (void)instruction;
    if (stage->chunk >= 0) {
        stage->runtime->end_step(stage);
        HAPT_TRY(hapt_engine_square_sum(stage->engine, stage->counts, &square_sum));
    }
    return stage->agreement->agree(stage->agreement->context, square_sum, &stage->update, &stage->updates);
}

static enum hapt_status update(struct stage *stage, const struct hapt_instruction *instruction)
{
    stage->team.microbatch = instruction->microbatch;
    return stage->updates ? stage->runtime->update(stage, instruction->group, &stage->update) : HAPT_OK;
}

/* The function of each kind of instruction. `activity` is what the heartbeat reports to peers that wait for this rank;
 * `to`: the neighbour that this rank then waits for, 0: none. */
static const struct {
    const char *activity;
    int to;
    enum hapt_status (*run)(struct stage *stage, const struct hapt_instruction *instruction);
} executor[] = {[HAPT_INSTRUCTION_RECEIVE_FORWARD] = {"waiting for activations", -1, receive_forward},
                [HAPT_INSTRUCTION_FORWARD] = {"forward", 0, forward},
                [HAPT_INSTRUCTION_SEND_FORWARD] = {"sending activations", 1, send_forward},
                [HAPT_INSTRUCTION_RECEIVE_BACKWARD] = {"waiting for gradients", 1, receive_backward},
                [HAPT_INSTRUCTION_BACKWARD] = {"backward", 0, backward},
                [HAPT_INSTRUCTION_SEND_BACKWARD] = {"sending gradients", -1, send_backward},
                [HAPT_INSTRUCTION_REDUCE] = {"sum of the gradients", 0, reduce},
                [HAPT_INSTRUCTION_EXCHANGE] = {"sum of tied gradients", 0, exchange},
                [HAPT_INSTRUCTION_NORM] = {"end", 0, norm},
                [HAPT_INSTRUCTION_UPDATE] = {"end", 0, update}};

static void report_activity(const struct stage *stage, const struct hapt_instruction *instruction)
{
    const int to = executor[instruction->kind].to, peer = to ? stage->chunk + to : -1;
    hapt_heartbeat_note((struct hapt_activity){executor[instruction->kind].activity, stage->chunk,
                                               peer < stage->plan->stage_count ? peer : -1, stage->step,
                                               instruction->microbatch});
}

enum hapt_status stage_run_step(struct stage *stage, const struct hapt_data *data, int64_t step, int64_t sequence,
                                const struct stage_agreement *agreement)
{
    stage->data = data;
    stage->step = stage->team.step = step;
    stage->sequence = sequence;
    stage->agreement = agreement;
    stage->updates = false;
    stage->loss = 0;
    if (stage->chunk >= 0) HAPT_TRY(begin_step(stage));
    for (int i = 0; i < stage->list->count; i++) {
        const struct hapt_instruction *instruction = &stage->list->instruction[i];
        stage->begun_s = hapt_time_s();
        report_activity(stage, instruction);
        HAPT_TRY(executor[instruction->kind].run(stage, instruction));
        trace_note(stage, sequence / stage->plan->microbatches, i, stage->begun_s, hapt_time_s());
    }
    return HAPT_OK;
}

static struct stage_link_time longest_link(const struct stage *stage, const struct stage_flows *flows, int peer)
{
    struct stage_link_time longest = {0, false};
    for (int f = 0; f < flows->count; f++) {
        bool counted;
        const double time_s = hapt_comm_thread_message_s(stage->comm_thread, flows->flow[f], &counted);
        if (flows->peer[f] != peer) continue;
        longest.time_s = fmax(longest.time_s, time_s);
        longest.counted = longest.counted || counted;
    }
    return longest;
}

void stage_take_link_times(const struct stage *stage, struct stage_link_time link[STAGE_LINKS])
{
    memset(link, 0, STAGE_LINKS * sizeof *link);
    if (stage->chunk < 0) return;
    link[STAGE_LINK_FORWARD_OUT] = longest_link(stage, &stage->forward_out, stage->chunk + 1);
    link[STAGE_LINK_BACKWARD_OUT] = longest_link(stage, &stage->backward_out, stage->chunk - 1);
    link[STAGE_LINK_FORWARD_IN] = longest_link(stage, &stage->forward_in, stage->chunk - 1);
    link[STAGE_LINK_BACKWARD_IN] = longest_link(stage, &stage->backward_in, stage->chunk + 1);
}

double stage_comm_s(const struct stage *stage)
{
    double longest = 0;
    for (int f = 0; f < stage->forward_out.count; f++) {
        const double active_s = hapt_comm_thread_active_s(stage->comm_thread, stage->forward_out.flow[f]);
        if (active_s > longest) longest = active_s;
    }
    return longest;
}
