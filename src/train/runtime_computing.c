/* The runtime of devices that compute: the engine, the collectives of the team, and routed messages. */
#include "runtime.h"

static enum hapt_status prepare(struct worker *worker, int state_count)
{
    (void)worker;
    (void)state_count;
    return HAPT_OK;
}

/* A stage on several subclusters is throttled to the slow link between them. A mixed stage has one axis. */
static enum hapt_status connect_team(struct stage *stage)
{
    int *world_rank;
    HAPT_TRY(hapt_team_connect(&stage->team, stage->worker->comm, stage->name, stage->worker->timeout_s));
    HAPT_NEW(world_rank, stage->worker->arena, stage->size);
    for (int r = 0; r < stage->size; r++) world_rank[r] = stage_world_rank(stage->worker, stage->chunk, r);
    hapt_cluster_pace(stage->worker->cluster, stage->size, world_rank, stage->team.all_ranks);
    return HAPT_OK;
}

static enum hapt_status connect_devices(struct stage *stage)
{
    HAPT_TRY(hapt_team_use_devices(&stage->team, stage->worker->backend, stage->worker->device, stage->group,
                                   stage->carrier));
    return hapt_engine_connect(stage->engine, stage->team.devices != NULL);
}

static enum hapt_status create_comm_thread(struct worker *worker)
{
    struct hapt_path *path = NULL;
    const enum hapt_status status = hapt_cluster_paths(worker->env, worker->cluster, worker->arena, &path);
    HAPT_TRY(hapt_link_all_or_none(worker->env->world, "the routes between hosts", status));
    return hapt_comm_thread_create(&hapt_transfer_routed, worker->env->world, path, worker->timeout_s,
                                   &worker->comm_thread);
}

static enum hapt_status add_flow(struct stage *stage, const struct hapt_flow_options *options, bool paced, int *flow)
{
    (void)paced;
    return hapt_comm_thread_add(stage->worker->comm_thread, options, flow);
}

static enum hapt_status wait_received(struct stage *stage, int flow, int64_t sequence)
{
    return hapt_comm_thread_wait_received(stage->worker->comm_thread, flow, sequence);
}

static enum hapt_status wait_sent(struct stage *stage, int flow, int slot)
{
    return hapt_comm_thread_wait_sent(stage->worker->comm_thread, flow, slot);
}

static void send(struct stage *stage, int flow, int slot)
{
    hapt_comm_thread_send(stage->worker->comm_thread, flow, slot);
}

static void free_slot(struct stage *stage, int flow)
{
    hapt_comm_thread_free(stage->worker->comm_thread, flow);
}

static void begin_pass(struct stage *stage, double planned_s)
{
    if (stage->worker->steady && stage->size == 1) hapt_team_set_steady(&stage->team, planned_s);
}

static enum hapt_status add_loss(struct stage *stage, int slot)
{
    float value;
    struct hapt_queue *queue = stage->worker->backend->queue(stage->worker->device, 0);
    const void *loss = hapt_engine_tensor(stage->engine, stage->program->graph->loss, slot);
    HAPT_TRY(stage->worker->backend->copy(queue, &value, loss, sizeof value));
    HAPT_TRY(stage->worker->backend->wait(stage->worker->backend->record(queue)));
    stage->loss += value;
    return HAPT_OK;
}

static enum hapt_status reduce(struct stage *stage)
{
    return hapt_engine_reduce(stage->engine);
}

static void end_exchange(struct worker *worker, double start_s)
{
    worker->active->team.reduce_s += hapt_time_s() - start_s;
}

static void end_step(struct stage *stage)
{
    (void)stage;
}

static enum hapt_status update(struct stage *stage, int group, const struct hapt_update *update)
{
    enum hapt_status status = HAPT_OK;
    hapt_team_stretch_begin(&stage->team);
    if (!stage_defers(stage))
        status = hapt_engine_update(stage->engine, group, stage->worker->schedule->update_groups, update);
    else if (group == 0)
        status = hapt_engine_defer_update(stage->engine, update);
    hapt_team_stretch_end(&stage->team);
    return status;
}

static enum hapt_status initial(const struct worker *worker, int parameter, const struct hapt_rows *rows, float *value)
{
    return hapt_model_initial_rows(worker->model, parameter, rows->first, rows->count, value);
}

const struct stage_runtime runtime_computing = {.computes = true,
                                                .links = hapt_team_links,
                                                .prepare = prepare,
                                                .connect_team = connect_team,
                                                .connect_devices = connect_devices,
                                                .create_comm_thread = create_comm_thread,
                                                .add_flow = add_flow,
                                                .wait_received = wait_received,
                                                .wait_sent = wait_sent,
                                                .send = send,
                                                .free = free_slot,
                                                .begin_pass = begin_pass,
                                                .add_loss = add_loss,
                                                .reduce = reduce,
                                                .end_exchange = end_exchange,
                                                .end_step = end_step,
                                                .update = update,
                                                .initial = initial,
                                                .gather = runtime_gather_parameter,
                                                .set = runtime_set_parameter};
