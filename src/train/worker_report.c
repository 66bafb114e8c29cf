/* The description of a run: the environment of its ranks, the carriers of their data, replays, device memory. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "runtime.h"

static bool uses_device_comms(const struct worker *worker)
{
    return worker->pair_count > 0 || (worker->stage_count > 0 && worker->stage[0].team.devices);
}

void worker_describe(const struct worker *worker, struct hapt_train_result *result)
{
    const double items = (double)hapt_model_items(worker->model);
    result->item = hapt_model_item(worker->model);
    result->items_per_step = worker->plan->microbatches * hapt_model_items(worker->model);
    result->flops_per_item = hapt_model_flops(worker->model) / items;
    result->peak_flops = worker->plan->peak_flops;
}

enum hapt_status worker_gather_environment(const struct worker *worker, struct hapt_train_result *result)
{
    const int subcluster = worker->cluster->subcluster_of_rank[worker->env->world_rank];
    struct hapt_environment mine;
    hapt_environment_collect(&mine);
    mine.stage = worker_first_chunk(worker, worker->env->world_rank);
    if (subcluster >= 0) {
        const struct hapt_subcluster *home = &worker->cluster->subcluster[subcluster];
        snprintf(mine.subcluster, sizeof mine.subcluster, "%s", home->name);
        snprintf(mine.device, sizeof mine.device, "%s", home->device.name);
        snprintf(mine.back_end, sizeof mine.back_end, "%s", home->device.backend);
    }
    if (worker->backend) {
        mine.threads = worker->threads;
        const char *libraries = worker->backend->libraries ? worker->backend->libraries() : NULL, *also = NULL, *reason;
        if (uses_device_comms(worker)) also = worker->backend->device_comms(&reason)->library();
        if (libraries)
            snprintf(mine.libraries, sizeof mine.libraries, "%s%s%.40s", libraries, also ? ", " : "", also ? also : "");
    }
    result->rank_count = worker->env->world_size;
    return hapt_environment_gather(worker->env, &mine, worker->arena, &result->environment);
}

enum hapt_status worker_report_carriers(const struct worker *worker)
{
    const int stages = worker->plan->stage_count;
    char(*mine)[2][HAPT_TEAM_TRANSPORT_CHARS], (*all)[2][HAPT_TEAM_TRANSPORT_CHARS];
    HAPT_NEW(mine, worker->arena, worker->most);
    HAPT_NEW(all, worker->arena, worker->env->world_size * worker->most);
    for (int s = 0; s < worker->stage_count && worker->backend->device_comms; s++) {
        memcpy(mine[s][0], worker->stage[s].carrier, sizeof mine[s][0]);
        memcpy(mine[s][1], worker->stage[s].boundary_route, sizeof mine[s][1]);
    }
    HAPT_TRY(hapt_link_all_gather(worker->env->world, "carriers of collectives", worker_agreement_timeout_s(worker),
                                  mine, (size_t)worker->most * sizeof *mine, all));
    for (int what = 0; what < 2; what++)
        for (int c = 0, same = 0; c < stages; c = same) {
            const char *carrier = all[worker_record(worker, c, 0)][what];
            for (same = c + 1; same < stages && strcmp(all[worker_record(worker, same, 0)][what], carrier) == 0;)
                same++;
            if (!carrier[0]) continue;
            const char *name = what == 0 ? "collectives" : "boundaries";
            if (same == c + 1)
                hapt_note(worker->env, "stage %d: %s of its devices by %s\n", c, name, carrier);
            else
                hapt_note(worker->env, "stages %d to %d: %s of their devices by %s\n", c, same - 1, name, carrier);
        }
    return HAPT_OK;
}

enum hapt_status worker_report_replays(const struct worker *worker)
{
    char(*mine)[HAPT_ENGINE_REPLAY_CHARS], (*all)[HAPT_ENGINE_REPLAY_CHARS];
    HAPT_NEW(mine, worker->arena, worker->most);
    HAPT_NEW(all, worker->arena, worker->env->world_size * worker->most);
    for (int s = 0; s < worker->stage_count; s++) hapt_engine_describe_replays(worker->stage[s].engine, mine[s]);
    HAPT_TRY(hapt_link_all_gather(worker->env->world, "replays", worker_agreement_timeout_s(worker), mine,
                                  (size_t)worker->most * sizeof *mine, all));
    for (int c = 0; c < worker->plan->stage_count; c++)
        if (all[worker_record(worker, c, 0)][0])
            hapt_note(worker->env, "stage %d: %s\n", c, all[worker_record(worker, c, 0)]);
    return HAPT_OK;
}

enum hapt_status worker_gather_memory(const struct worker *worker, struct hapt_train_result *result)
{
    struct {
        double planned, measured, host;
    } mine = {0, 0, 0}, *all;
    /* New arrays: the observer may be reading the earlier ones. */
    const int stages = worker->plan->stage_count;
    double *planned, *measured, *host;
    HAPT_NEW(all, worker->arena, worker->env->world_size);
    HAPT_NEW(planned, worker->arena, stages);
    HAPT_NEW(measured, worker->arena, stages);
    HAPT_NEW(host, worker->arena, stages);
    if (worker->stage_count > 0) {
        mine.planned = (double)hapt_engine_memory(worker->stage[0].engine)->total_bytes;
        mine.host = (double)hapt_engine_memory(worker->stage[0].engine)->host_bytes;
        mine.measured = (double)worker->backend->memory_peak(worker->device);
    }
    HAPT_TRY(hapt_link_all_gather(worker->env->world, "memory of the stages", worker_agreement_timeout_s(worker), &mine,
                                  sizeof mine, all));
    for (int c = 0; c < stages; c++) {
        planned[c] = result->planned_bytes[c];
        measured[c] = result->measured_bytes[c];
        host[c] = result->host_bytes[c];
        for (int r = 0; r < stage_size(worker, c); r++) {
            const int rank = stage_world_rank(worker, c, r);
            planned[c] = fmax(planned[c], all[rank].planned);
            measured[c] = fmax(measured[c], all[rank].measured);
            host[c] = fmax(host[c], all[rank].host);
        }
    }
    result->planned_bytes = planned;
    result->measured_bytes = measured;
    result->host_bytes = host;
    return HAPT_OK;
}
