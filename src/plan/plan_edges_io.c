/*
 * The messages between stages in plan files; optional, since most plans have those between neighbours alone:
 *
 *     edge_stages [E][2]      from, to; forward edges first, ascending
 *     edge_time [E], edge_bytes [E], edge_share [E]
 *     edge_link [E]           messages of one submesh with the same link above 0 take turns
 *     relay_stages [R][3]     the second stage passes on to the third what it gets from the first; optional
 */
#include "plan_private.h"

#define MAX_EDGES (1 << 20)

static const char *join(char path[512], const char *group, const char *name)
{
    snprintf(path, 512, "%s/%s", group, name);
    return path;
}

static enum hapt_status write(struct hapt_h5 *file, const char *group, const struct hapt_plan *plan,
                              struct hapt_arena *scratch)
{
    const int64_t E = plan->edge_count, R = plan->relay_count, pairs[2] = {E, 2}, triples[2] = {R, 3};
    int *stages, *link;
    double *time_s, *bytes, *share;
    char path[512];
    HAPT_NEW(stages, scratch, 2 * E);
    HAPT_NEW(link, scratch, E);
    HAPT_NEW(time_s, scratch, E);
    HAPT_NEW(bytes, scratch, E);
    HAPT_NEW(share, scratch, E);
    for (int e = 0; e < E; e++) {
        const struct hapt_plan_edge *at = &plan->edge[e];
        stages[2 * e] = at->edge.from, stages[2 * e + 1] = at->edge.to;
        link[e] = at->edge.link;
        time_s[e] = at->time_s, bytes[e] = at->bytes, share[e] = at->share;
    }
    HAPT_TRY(hapt_h5_write(file, join(path, group, "edge_stages"), HAPT_H5_I32, 2, pairs, stages, ""));
    HAPT_TRY(hapt_h5_write(file, join(path, group, "edge_link"), HAPT_H5_I32, 1, &E, link, ""));
    HAPT_TRY(hapt_h5_write(file, join(path, group, "edge_time"), HAPT_H5_F64, 1, &E, time_s, "s"));
    HAPT_TRY(hapt_h5_write(file, join(path, group, "edge_bytes"), HAPT_H5_F64, 1, &E, bytes, "byte"));
    HAPT_TRY(hapt_h5_write(file, join(path, group, "edge_share"), HAPT_H5_F64, 1, &E, share, ""));
    if (R == 0) return HAPT_OK;
    HAPT_NEW(stages, scratch, 3 * R);
    for (int k = 0; k < R; k++) {
        stages[3 * k] = plan->relay[k].from;
        stages[3 * k + 1] = plan->relay[k].via;
        stages[3 * k + 2] = plan->relay[k].to;
    }
    return hapt_h5_write(file, join(path, group, "relay_stages"), HAPT_H5_I32, 2, triples, stages, "");
}

enum hapt_status plan_write_edges(struct hapt_h5 *file, const char *group, const struct hapt_plan *plan)
{
    struct hapt_arena scratch;
    if (plan->edge_count == 0) return HAPT_OK;
    hapt_arena_init(&scratch);
    const enum hapt_status status = write(file, group, plan, &scratch);
    hapt_arena_release(&scratch);
    return status;
}

static enum hapt_status read_relays(struct hapt_h5 *file, const char *group, struct hapt_arena *arena,
                                    struct hapt_plan *plan)
{
    int64_t shape[2] = {-1, 3};
    char path[512];
    void *stages;
    if (!hapt_h5_exists(file, join(path, group, "relay_stages"))) return HAPT_OK;
    HAPT_TRY(hapt_h5_read(file, path, HAPT_H5_I32, 2, shape, 3 * MAX_EDGES, arena, &stages));
    HAPT_NEW(plan->relay, arena, shape[0]);
    plan->relay_count = (int)shape[0];
    for (int k = 0; k < plan->relay_count; k++) {
        const int *row = (const int *)stages + 3 * (ptrdiff_t)k;
        plan->relay[k] = (struct hapt_schedule_relay){row[0], row[1], row[2]};
    }
    return HAPT_OK;
}

enum hapt_status plan_read_edges(struct hapt_h5 *file, const char *group, struct hapt_arena *arena,
                                 struct hapt_plan *plan)
{
    int64_t shape[2] = {-1, 2};
    char path[512];
    void *stages, *link, *time_s, *bytes, *share;
    if (!hapt_h5_exists(file, join(path, group, "edge_stages"))) return HAPT_OK;
    HAPT_TRY(hapt_h5_read(file, path, HAPT_H5_I32, 2, shape, 2 * MAX_EDGES, arena, &stages));
    HAPT_TRY(hapt_h5_read(file, join(path, group, "edge_link"), HAPT_H5_I32, 1, shape, MAX_EDGES, arena, &link));
    HAPT_TRY(hapt_h5_read(file, join(path, group, "edge_time"), HAPT_H5_F64, 1, shape, MAX_EDGES, arena, &time_s));
    HAPT_TRY(hapt_h5_read(file, join(path, group, "edge_bytes"), HAPT_H5_F64, 1, shape, MAX_EDGES, arena, &bytes));
    HAPT_TRY(hapt_h5_read(file, join(path, group, "edge_share"), HAPT_H5_F64, 1, shape, MAX_EDGES, arena, &share));
    HAPT_NEW(plan->edge, arena, shape[0]);
    plan->edge_count = (int)shape[0];
    for (int e = 0; e < plan->edge_count; e++) {
        const int from = ((const int *)stages)[2 * e], to = ((const int *)stages)[2 * e + 1];
        plan->edge[e] = (struct hapt_plan_edge){
            .edge = {.from = from, .to = to, .backward = to < from, .link = ((const int *)link)[e]},
            .time_s = ((const double *)time_s)[e],
            .bytes = ((const double *)bytes)[e],
            .share = ((const double *)share)[e]};
    }
    return read_relays(file, group, arena, plan);
}
