/* The collectives of a program, over communicators of the mesh axes. */
#include "hapt/team.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "devices.h"
#include "hapt/reshard.h"

/* ---- preparation ---- */

/* Offsets of the shards of `sharded` in `whole`, its version with the full extent along the axis. */
static enum hapt_status prepare_parts(const struct hapt_team *team, struct hapt_arena *arena,
                                      struct hapt_team_collective *planned, int whole, int sharded)
{
    const struct hapt_sharding *sharding = team->sharding;
    const struct hapt_tensor *local = &sharding->shard->tensor[whole];
    const struct hapt_property property = sharding->property[sharded][planned->axis];
    const struct hapt_axis *axis = &sharding->axis[planned->axis];
    const int64_t extent = local->shape[property.dim];
    const size_t blocks = property.blocks > 1 ? (size_t)property.blocks : 1;
    size_t outer = blocks, inner = hapt_dtype_bytes(planned->dtype);
    for (int d = 0; d < property.dim; d++) outer *= (size_t)local->shape[d];
    for (int d = property.dim + 1; d < local->dims; d++) inner *= (size_t)local->shape[d];
    HAPT_NEW(planned->part, arena, axis->size);
    for (int r = 0; r < axis->size; r++) {
        int64_t first, count;
        HAPT_ASSERT(hapt_property_share(property, axis, extent, r, &first, &count));
        planned->part[r] = (struct hapt_strided){.offset = (size_t)first * inner,
                                                 .count = outer,
                                                 .run = (size_t)count * inner,
                                                 .stride = (size_t)extent / blocks * inner};
    }
    return HAPT_OK;
}

static void box_along(const struct hapt_team *team, int axis, int rank, int tensor, struct hapt_box *box)
{
    int mesh_coordinate[HAPT_MESH_AXES];
    memcpy(mesh_coordinate, team->mesh_coordinate, sizeof mesh_coordinate);
    mesh_coordinate[axis] = rank;
    hapt_sharding_box(team->sharding, tensor, mesh_coordinate, box);
}

static enum hapt_status prepare_all_to_all(const struct hapt_team *team, struct hapt_arena *arena,
                                           struct hapt_team_collective *planned, int from, int to)
{
    const int ranks = team->sharding->axis[planned->axis].size, me = team->mesh_coordinate[planned->axis];
    const size_t width = hapt_dtype_bytes(planned->dtype);
    HAPT_NEW(planned->send, arena, ranks);
    HAPT_NEW(planned->receive, arena, ranks);
    for (int s = 0; s < ranks; s++)
        for (int r = 0; r < ranks; r++) {
            struct hapt_box had, wanted;
            struct hapt_strided_list in_had, in_wanted;
            box_along(team, planned->axis, s, from, &had);
            box_along(team, planned->axis, r, to, &wanted);
            HAPT_TRY(hapt_reshard_common(&had, &wanted, NULL, width, arena, &in_had, &in_wanted));
            if (hapt_strided_bytes(&in_had) > planned->longest) planned->longest = hapt_strided_bytes(&in_had);
            if (s == me) planned->send[r] = in_had;
            if (r == me) planned->receive[s] = in_wanted;
        }
    return HAPT_OK;
}

static enum hapt_status prepare_collective(struct hapt_team *team, struct hapt_arena *arena,
                                           const struct hapt_program_step *step)
{
    const struct hapt_sharding *sharding = team->sharding;
    const struct hapt_op *op = &sharding->graph->op[step->op];
    struct hapt_team_collective *planned = &team->collective[step->op];
    const int from = op->input[0], to = op->output[0];
    *planned = (struct hapt_team_collective){.kind = step->kind,
                                             .axis = step->axis,
                                             .dtype = sharding->graph->tensor[to].dtype,
                                             .elements = (size_t)hapt_tensor_elements(&sharding->shard->tensor[to])};
    switch (step->kind) {
    case HAPT_COLLECTIVE_ALL_GATHER:
    case HAPT_COLLECTIVE_GROUPED_BROADCAST: return prepare_parts(team, arena, planned, to, from);
    case HAPT_COLLECTIVE_REDUCE_SCATTER:
    case HAPT_COLLECTIVE_SLICE: return prepare_parts(team, arena, planned, from, to);
    case HAPT_COLLECTIVE_ALL_TO_ALL: return prepare_all_to_all(team, arena, planned, from, to);
    case HAPT_COLLECTIVE_ALL_REDUCE:
    case HAPT_COLLECTIVE_NONE:
    case HAPT_COLLECTIVE_COUNT: break;
    }
    return HAPT_OK;
}

void hapt_team_mesh_coordinate(const struct hapt_sharding *sharding, int rank, int mesh_coordinate[HAPT_MESH_AXES])
{
    const int inner = sharding->axis[1].size;
    mesh_coordinate[0] = rank / inner;
    mesh_coordinate[1] = rank % inner;
}

enum hapt_status hapt_team_prepare(struct hapt_team *team, const struct hapt_sharding *sharding,
                                   const struct hapt_program *program, int rank, double slowdown,
                                   struct hapt_arena *arena)
{
    *team = (struct hapt_team){.sharding = sharding,
                               .program = program,
                               .rank = rank,
                               .size = sharding->axis[0].size * sharding->axis[1].size,
                               .slowdown = slowdown,
                               .microbatch = -1};
    hapt_team_mesh_coordinate(sharding, rank, team->mesh_coordinate);
    HAPT_NEW(team->collective, arena, program->graph->op_count);
    HAPT_NEW(team->slice, arena, team->size);
    for (int section = 0; section < HAPT_SECTION_COUNT; section++)
        for (int s = 0; s < program->step_count[section]; s++)
            if (program->step[section][s].kind != HAPT_COLLECTIVE_NONE)
                HAPT_TRY(prepare_collective(team, arena, &program->step[section][s]));
    return HAPT_OK;
}

enum hapt_status hapt_team_connect(struct hapt_team *team, MPI_Comm comm, const char *who, double timeout_s)
{
    HAPT_TRY(hapt_collective_create(comm, who, timeout_s, true, &team->all_ranks));
    for (int axis = 0; axis < HAPT_MESH_AXES; axis++) {
        const int ranks = team->sharding->axis[axis].size;
        if (ranks == 1) continue;
        team->axis_comm[axis] = team->all_ranks;
        if (ranks == team->size) continue;
        MPI_Comm part;
        team->axis_comm[axis] = NULL;
        HAPT_MPI(MPI_Comm_split(comm, team->mesh_coordinate[1 - axis], team->mesh_coordinate[axis], &part));
        const enum hapt_status status = hapt_collective_create(part, who, timeout_s, true, &team->axis_comm[axis]);
        MPI_Comm_free(&part);
        HAPT_TRY(hapt_link_all_or_none(comm, "the collectives of a mesh axis", status));
    }
    return HAPT_OK;
}

void hapt_team_release(struct hapt_team *team)
{
    team_devices_destroy(team->devices);
    team->devices = NULL;
    for (int axis = 0; axis < HAPT_MESH_AXES; axis++)
        if (team->axis_comm[axis] != team->all_ranks) hapt_collective_destroy(team->axis_comm[axis]);
    hapt_collective_destroy(team->all_ranks);
    team->all_ranks = team->axis_comm[0] = team->axis_comm[1] = NULL;
}

enum hapt_status hapt_team_rebuild(struct hapt_team *team, unsigned axes, const char *what,
                                   const struct hapt_strided *part, void *whole)
{
    if (team->devices) return team_devices_rebuild(team, axes, what, part, whole);
    return hapt_collective_gather_shards(hapt_team_comm(team, axes), what, false, part, NULL, whole);
}

/* ---- execution ---- */

void hapt_team_clock(struct hapt_team *team, const struct hapt_backend *backend, struct hapt_device *device)
{
    team->clock = backend->timestamp ? backend : NULL;
    team->queue = backend->queue(device, 0);
}

void hapt_team_stretch_begin(struct hapt_team *team)
{
    team->computation = (struct hapt_team_stretch){hapt_time_s(), hapt_time_thread_cpu_s(), NULL};
    if (team->clock && team->slowdown > 1) team->computation.timestamp = team->clock->timestamp(team->queue);
    if (team->modelled) team->computation.start_s = team->free_s;
}

void hapt_team_set_length(struct hapt_team *team, double length_s)
{
    team->modelled = true;
    team->length_s = length_s;
}

void hapt_team_set_steady(struct hapt_team *team, double planned_s)
{
    team->planned_s = planned_s;
    team->planned_left = 1;
}

void hapt_team_inputs_ready(struct hapt_team *team, double time_s)
{
    if (time_s > team->free_s) team->free_s = time_s;
}

static void end_modelled(struct hapt_team *team)
{
    const double due_s = team->computation.start_s + team->length_s;
    hapt_time_sleep_until(due_s);
    const double late_s = hapt_time_s() - due_s;
    if (late_s > team->late_s) team->late_s = late_s;
    team->busy_s += team->length_s;
    team->free_s = due_s;
    team->length_s = 0;
}

/* Device time of the computation that ends. `wall_s`: host time, which is good enough if nothing is stretched. */
static double device_time_s(struct hapt_team *team, const struct hapt_team_stretch *computation, double wall_s)
{
    if (!team->clock) return hapt_time_thread_cpu_s() - computation->cpu_s;
    const double time_s = computation->timestamp
                              ? team->clock->elapsed_s(computation->timestamp, team->clock->timestamp(team->queue))
                              : wall_s;
    return time_s >= 0 ? time_s : wall_s;
}

void hapt_team_stretch_end(struct hapt_team *team)
{
    const struct hapt_team_stretch computation = team->computation;
    if (team->modelled) {
        end_modelled(team);
        return;
    }
    const double slowdown = team->slowdown > 1 ? team->slowdown : 1;
    const double wall_s = hapt_time_s() - computation.start_s;
    double device_s = slowdown * device_time_s(team, &computation, wall_s);
    const bool steady = team->planned_s > 0;
    if (steady) device_s = fmax(team->planned_left * team->planned_s, wall_s);
    team->planned_s = 0;
    if (slowdown > 1) hapt_time_sleep_until(computation.start_s + device_s);
    const double busy_s = slowdown > 1 ? hapt_time_s() - computation.start_s : wall_s;
    team->busy_s += busy_s;
    if (team->microbatch < 0) return;
    team->times.busy_s += busy_s;
    team->times.device_s += device_s;
    team->times.wall_s += steady ? device_s : slowdown * wall_s;
}

const char *hapt_team_describe(const struct hapt_team *team, const char *what, char *text, size_t size)
{
    if (team->microbatch < 0)
        snprintf(text, size, "%s of step %lld", what, (long long)team->step);
    else
        snprintf(text, size, "%s of step %lld, microbatch %d", what, (long long)team->step, team->microbatch);
    return text;
}

/* Waiting for other ranks is not computation and is not slowed down. */
static double leave_computation(struct hapt_team *team)
{
    if (team->microbatch >= 0) hapt_team_stretch_end(team);
    return hapt_time_s();
}

static enum hapt_status resume_computation(struct hapt_team *team, double start_s, enum hapt_status status)
{
    const double wait_s = hapt_time_s() - start_s;
    team->reduce_s += wait_s;
    if (team->microbatch >= 0) team->times.wait_s += wait_s;
    if (team->microbatch >= 0) hapt_team_stretch_begin(team);
    return status;
}

enum hapt_status hapt_team_run_collective(struct hapt_team *team, const struct hapt_team_collective *planned,
                                          const char *what, const void *from, void *to)
{
    struct hapt_collective *comm = team->axis_comm[planned->axis];
    if (team->devices) return team_devices_collective(team, planned, what, from, to);
    switch (planned->kind) {
    case HAPT_COLLECTIVE_ALL_REDUCE:
        if (from != to) memcpy(to, from, planned->elements * hapt_dtype_bytes(planned->dtype));
        return hapt_collective_combine(comm, what, HAPT_COMBINE_SUM, planned->dtype, to, planned->elements);
    case HAPT_COLLECTIVE_REDUCE_SCATTER:
        return hapt_collective_reduce_scatter(comm, what, planned->dtype, planned->part, from, to);
    case HAPT_COLLECTIVE_ALL_GATHER: return hapt_collective_gather_shards(comm, what, true, planned->part, from, to);
    case HAPT_COLLECTIVE_GROUPED_BROADCAST:
        return hapt_collective_gather_shards(comm, what, false, planned->part, from, to);
    case HAPT_COLLECTIVE_ALL_TO_ALL:
        return hapt_collective_all_to_all(comm, what, planned->longest, planned->send, from, planned->receive, to);
    case HAPT_COLLECTIVE_SLICE:
    case HAPT_COLLECTIVE_NONE:
    case HAPT_COLLECTIVE_COUNT: break;
    }
    return HAPT_OK;
}

static enum hapt_status run_collective(void *context, int op, const void *from, void *to)
{
    struct hapt_team *team = context;
    const struct hapt_team_collective *planned = &team->collective[op];
    char what[160];
    HAPT_ASSERT(planned->kind != HAPT_COLLECTIVE_NONE);
    if (planned->kind == HAPT_COLLECTIVE_SLICE) {
        const struct hapt_strided_list own = {1, &planned->part[team->mesh_coordinate[planned->axis]]};
        if (team->devices) return team_devices_slice(team, &own, from, to);
        hapt_strided_pack(&own, from, 0, hapt_strided_bytes(&own), to);
        return HAPT_OK;
    }
    hapt_team_describe(team, team->sharding->graph->op[op].name, what, sizeof what);
    const double start_s = leave_computation(team);
    return resume_computation(team, start_s, hapt_team_run_collective(team, planned, what, from, to));
}

static enum hapt_status all_reduce(void *context, unsigned axes, float *data, size_t elements)
{
    struct hapt_team *team = context;
    char what[64];
    struct hapt_collective *over = hapt_team_comm(team, axes);
    hapt_team_describe(team, "sum of the gradients", what, sizeof what);
    const double start_s = leave_computation(team);
    return resume_computation(team, start_s,
                              team->devices ? team_devices_all_reduce(team, axes, what, data, elements)
                                            : hapt_collective_all_reduce(over, what, data, elements));
}

/* Slices between the bounds, in bytes of a flat array. */
static struct hapt_collective *slices(struct hapt_team *team, unsigned axes, const size_t *bound)
{
    struct hapt_collective *over = hapt_team_comm(team, axes);
    for (int r = 0; r < hapt_collective_ranks(over); r++)
        team->slice[r] = (struct hapt_strided){
            .offset = bound[r] * sizeof(float), .count = 1, .run = (bound[r + 1] - bound[r]) * sizeof(float)};
    return over;
}

static enum hapt_status reduce_scatter(void *context, unsigned axes, float *data, const size_t *bound)
{
    struct hapt_team *team = context;
    char what[64];
    struct hapt_collective *over = slices(team, axes, bound);
    hapt_team_describe(team, "sum of slices of the gradients", what, sizeof what);
    const double start_s = leave_computation(team);
    return resume_computation(team, start_s,
                              team->devices ? team_devices_reduce_scatter(team, axes, what, data, bound)
                                            : hapt_collective_reduce_scatter(over, what, HAPT_F32, team->slice, data,
                                                                             data + bound[hapt_collective_rank(over)]));
}

static enum hapt_status all_gather(void *context, unsigned axes, float *data, const size_t *bound)
{
    struct hapt_team *team = context;
    char what[64];
    struct hapt_collective *over = slices(team, axes, bound);
    hapt_team_describe(team, "gather of the weights", what, sizeof what);
    hapt_team_stretch_end(team); /* ends the update or the pass so far */
    const double start_s = hapt_time_s();
    const enum hapt_status status = team->devices
                                        ? team_devices_all_gather(team, axes, what, data, bound)
                                        : hapt_collective_gather_shards(over, what, false, team->slice, NULL, data);
    team->reduce_s += hapt_time_s() - start_s;
    if (team->microbatch >= 0) team->times.wait_s += hapt_time_s() - start_s; /* for a pass */
    hapt_team_stretch_begin(team);
    return status;
}

static enum hapt_status shard_reduce(void *context, float *data, size_t elements, bool largest)
{
    const struct hapt_team_axis *axis = context;
    struct hapt_team *team = axis->team;
    char what[64];
    hapt_team_describe(team, "exchange inside an operator", what, sizeof what);
    const double start_s = leave_computation(team);
    return resume_computation(team, start_s,
                              hapt_collective_combine(team->axis_comm[axis->axis], what,
                                                      largest ? HAPT_COMBINE_MAXIMUM : HAPT_COMBINE_SUM, HAPT_F32, data,
                                                      elements));
}

/* Before and after updates inside a pass: they count as the end of the step before. */
static void leave_pass(void *context, double share)
{
    struct hapt_team *team = context;
    const double left = 1 - share;
    team->passing_s = team->planned_s;
    team->planned_left -= left; /* of the part that ends here */
    hapt_team_stretch_end(team);
    team->planned_left = left;
    team->passing = team->microbatch;
    team->microbatch = -1;
    hapt_team_stretch_begin(team);
}

static void resume_pass(void *context)
{
    struct hapt_team *team = context;
    hapt_team_stretch_end(team);
    team->planned_s = team->passing_s;
    team->microbatch = team->passing;
    hapt_team_stretch_begin(team);
}

/* On a device with a clock of its own, its queue delays the copies already. */
static void updated(void *context, double cpu_s)
{
    const struct hapt_team *team = context;
    if (team->slowdown > 1 && !team->clock) hapt_time_sleep_until(hapt_time_s() + (team->slowdown - 1) * cpu_s);
}

void hapt_team_links(struct hapt_team *team, struct hapt_engine_links *links)
{
    *links = (struct hapt_engine_links){.context = team,
                                        .collective = run_collective,
                                        .all_reduce = all_reduce,
                                        .reduce_scatter = reduce_scatter,
                                        .all_gather = all_gather,
                                        .shard_reduce = shard_reduce,
                                        .leave = leave_pass,
                                        .resume = resume_pass,
                                        .updated = updated,
                                        .on_device = team->devices != NULL};
    for (int axis = 0; axis < HAPT_MESH_AXES; axis++) {
        team->shard_reduce_context[axis] = (struct hapt_team_axis){team, axis};
        links->shard_reduce_context[axis] = &team->shard_reduce_context[axis];
    }
}
