/* Teams on submeshes: who is in them, what they run. */
#include "submesh_team.h"

void submesh_team_find(const struct hapt_submesh *now, struct submesh_team *team)
{
    const struct measure *measure = team->measure;
    const int c = measure->cluster->subcluster_of_rank[measure->env->world_rank];
    team->subcluster = c;
    team->submesh = (struct hapt_submesh){0};
    team->color = MPI_UNDEFINED;
    team->rank = 0;
    team->mesh_index = -1;
    if (c < 0 || now[c].n == 0) return;
    const struct hapt_subcluster *own = &measure->cluster->subcluster[c];
    const int all = own->nodes * own->devices_per_node, size = now[c].n * now[c].m;
    int index = 0;
    while (own->ranks[index] != measure->env->world_rank) index++;
    team->submesh = now[c];
    team->mesh_index = hapt_candidates_mesh_index_of(measure->candidates, now[c]);
    if ((index / size + 1) * size <= all) team->color = own->ranks[index / size * size];
    team->rank = index % size;
}

static const struct hapt_item_memory *memory_of(const struct submesh_team *team, int first, int last)
{
    return measure_memory(team->measure, team->measure->classes.of_subcluster[team->subcluster],
                          hapt_candidates_item(team->measure->candidates, team->mesh_index, first, last));
}

bool submesh_team_wants(const void *context, int first, int last)
{
    const struct submesh_team *team = context;
    return hapt_candidates_wanted(team->measure->candidates, team->subcluster, team->submesh, first, last,
                                  memory_of(team, first, last));
}

bool submesh_team_wants_time(const void *context, int first, int last)
{
    const struct submesh_team *team = context;
    return submesh_team_wants(team, first, last) ||
           measure_wants_again(team->measure, team->subcluster, team->submesh, first, last);
}

bool submesh_team_shards(const void *context, int first, int last)
{
    const struct submesh_team *team = context;
    return team->submesh.n * team->submesh.m > 1 &&
           hapt_candidates_shards_state(team->measure->candidates, memory_of(team, first, last),
                                        team->measure->cluster->subcluster[team->subcluster].device.memory_bytes);
}

enum hapt_status submesh_team_list(const struct submesh_team *team, team_wanted *wanted, struct team_ranges *ranges)
{
    const struct hapt_candidates *candidates = team->measure->candidates;
    struct hapt_range_times *times;
    HAPT_TRY(hapt_range_times_create(candidates->layer_count, team->scratch, &times));
    HAPT_TRY(team_ranges_list(candidates, wanted, team, times, team->scratch, ranges));
    return team_ranges_mark_sharded(ranges, submesh_team_shards, team, team->scratch);
}

enum hapt_status submesh_team_run(const struct submesh_team *team, const struct hapt_engine_options *options,
                                  MPI_Comm comm, double budget_s, struct team_ranges *ranges)
{
    const struct measure *measure = team->measure;
    const struct hapt_device_spec *device = &measure->cluster->subcluster[team->subcluster].device;
    struct hapt_sharding *whole = measure->candidates->sharding[team->mesh_index], *sharding = NULL;
    int mesh_coordinate[HAPT_MESH_AXES];
    hapt_team_mesh_coordinate(whole, team->rank, mesh_coordinate);
    HAPT_TRY(hapt_link_all_or_none(comm, "a submesh's program",
                                   hapt_sharding_at(whole, mesh_coordinate, team->scratch, &sharding)));
    struct team_stage stage = {.candidates = measure->candidates,
                               .sharding = sharding,
                               .options = *options,
                               .comm = comm,
                               .rank = team->rank,
                               .slowdown = device->slowdown,
                               .timeout_s = hapt_config_real(measure->config, "timeout"),
                               .memory_bytes = device->memory_bytes};
    enum hapt_status status = team_stage_open(&stage);
    if (status == HAPT_OK) status = team_stage_use_devices(&stage);
    if (status == HAPT_OK) status = team_ranges_run(ranges, &stage, budget_s);
    team_stage_close(&stage);
    return status;
}
