/*
 * Plan files (format hapt-plan, version 2). Scalars are attributes of the group. Each table has one row per stage:
 *
 *     stage_layers [S][2]            half-open
 *     stage_ops [S][2]               -1: planned from a profile
 *     stage_submesh [S][2]           (n, m)
 *     stage_submesh_index [S]        stages with the same number share one submesh; since version 2
 *     stage_subcluster [S], stage_subcluster_name [S], stage_warmup [S]
 *     stage_tensor_parallel [S]      absent: 1
 *     stage_program [S]              only with layouts, which follow as in hapt/layout.h
 *     stage_forward_only [S]         1: no backward pass; absent: 0
 *     stage_ahead [S]                looped: forwards of its submesh before the first backward; absent: the schedule's
 *     stage_deferred [S][2]          s of stage_step that the next step's first forward pass may hide, and how many of
 *                                    them are computation; absent: 0
 *     stage_compute [S] and so on    seconds and bytes, `tables` below
 *
 *     stage_weight [S], stage_slots [S], stage_weight_slots [S], stage_weight_slot_bytes [S]   only with the attribute
 *                                    split_backward (1): as in hapt_plan_stage; the bytes are those of split programs
 *
 * Mixed submeshes have one row per subcluster, in the order of their stages:
 *
 *     mixed_stage [R], mixed_subcluster [R], mixed_subcluster_name [R], mixed_devices [R]
 *     mixed_parameter_bytes [R], mixed_activation_bytes [R], mixed_device_memory_bytes [R]    per device
 *     mixed_ratio [D]                one per device, row by row; NaN: unknown
 *
 * Messages past the next stage: plan_edges_io.c. Units that are recomputed or have weights on the host:
 * plan_units_io.c.
 *
 * Optional attributes: precision (fp32, tf32, bf16, fp16) of the model, boundary_dtype (of tensors between stages;
 * follows from precision, for readers), offload (optimizer: its state is on the host), profile (measured, predicted),
 * rows of a microbatch (if the planner chose them), tied_exchange (16bit; else fp32), exchange_bytes in each direction,
 * loop_batch, prefetch and transfer_slots of a looped schedule (the lists follow from these, from stage_submesh_index
 * and from stage_ahead). Version 1 has no stage_submesh_index: each stage has a submesh of its own.
 */
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "plan_private.h"

#define FORMAT "hapt-plan"
#define MAX_STAGES 65536
#define MAX_DEVICES (1 << 20)
#define PATH_MAX_CHARS 512

/* Location of the values of a row: in the stage or its submesh, or there at element k of an array. */
enum place { STAGE, SUBMESH, STAGE_PART, SUBMESH_PART, SUBMESH_INDEX, STAGE_INDEX /* written from no member */ };
/* When a file has a table. MIXED tables have a row for each part k of the mixed stages, others one (k = 0) per stage.
 */
enum presence {
    ALWAYS,
    NEWER,      /* files of the first release lack it */
    PROGRAMS,   /* some stage runs a program */
    TIED,       /* tied parameters are exchanged */
    SPLIT,      /* backward passes are split */
    FROZEN,     /* some stage has no backward pass */
    RECOMPUTES, /* some stage recomputes */
    AWAY,       /* some stage has its weights on the host, or sharded */
    DEFERS,     /* some stage defers its update */
    AHEAD,      /* looped, with forwards before the first backward of their own */
    MIXED       /* some stage is mixed */
};

static const struct table {
    const char *name, *units; /* units NULL: text */
    enum presence presence;
    enum hapt_h5_type type;
    int columns; /* members that follow each other */
    enum place place;
    size_t offset; /* of the first member, or of the array */
} tables[] = {
#define OF_STAGE(place, member) place, offsetof(struct hapt_plan_stage, member)
#define OF_SUBMESH(place, member) place, offsetof(struct hapt_plan_submesh, member)
    {"stage_layers", "", ALWAYS, HAPT_H5_I32, 2, OF_STAGE(STAGE, first_layer)},
    {"stage_ops", "", ALWAYS, HAPT_H5_I32, 2, OF_STAGE(STAGE, first_op)},
    {"stage_submesh", "", ALWAYS, HAPT_H5_I32, 2, OF_SUBMESH(SUBMESH, nodes)},
    {"stage_submesh_index", "", ALWAYS, HAPT_H5_I32, 1, SUBMESH_INDEX, 0},
    {"stage_subcluster", "", ALWAYS, HAPT_H5_I32, 1, OF_SUBMESH(SUBMESH_PART, subcluster)},
    {"stage_warmup", "", ALWAYS, HAPT_H5_I32, 1, OF_STAGE(STAGE, warmup)},
    {"stage_tensor_parallel", "", NEWER, HAPT_H5_I32, 1, OF_STAGE(STAGE, layout.tensor_parallel)},
    {"stage_forward_only", "", FROZEN, HAPT_H5_I32, 1, OF_STAGE(STAGE, forward_only)},
    {"stage_recompute", "", RECOMPUTES, HAPT_H5_I32, 1, OF_STAGE(STAGE, layout.recompute)},
    {"stage_host_weights", "", AWAY, HAPT_H5_I32, 1, OF_STAGE(STAGE, layout.weights_at)},
    {"stage_deferred", "s", DEFERS, HAPT_H5_F64, 2, OF_STAGE(STAGE, deferred_s)},
    {"stage_ahead", "", AHEAD, HAPT_H5_I32, 1, OF_SUBMESH(SUBMESH, ahead)},
    {"stage_program", "", PROGRAMS, HAPT_H5_I32, 1, OF_STAGE(STAGE, layout.number)},
    {"stage_subcluster_name", NULL, ALWAYS, HAPT_H5_U8, 1, OF_SUBMESH(SUBMESH, name)},
    {"stage_compute", "s", ALWAYS, HAPT_H5_F64, 1, OF_STAGE(STAGE, compute_s)},
    {"stage_forward", "s", ALWAYS, HAPT_H5_F64, 1, OF_STAGE(STAGE, forward_s)},
    {"stage_step", "s", ALWAYS, HAPT_H5_F64, 1, OF_STAGE(STAGE, step_s)},
    {"stage_comm", "s", ALWAYS, HAPT_H5_F64, 1, OF_STAGE(STAGE, comm_s)},
    {"stage_parameter_bytes", "byte", ALWAYS, HAPT_H5_F64, 1, OF_STAGE(STAGE, parameter_bytes)},
    {"stage_activation_bytes", "byte", ALWAYS, HAPT_H5_F64, 1, OF_STAGE(STAGE, activation_bytes)},
    {"stage_memory_bytes", "byte", ALWAYS, HAPT_H5_F64, 1, OF_STAGE(STAGE, memory_bytes)},
    {"stage_device_memory_bytes", "byte", ALWAYS, HAPT_H5_F64, 1, OF_STAGE(STAGE, device_memory_bytes)},
    {"stage_tied", "s", TIED, HAPT_H5_F64, 1, OF_STAGE(STAGE, tied_s)},
    {"stage_weight", "s", SPLIT, HAPT_H5_F64, 1, OF_STAGE(STAGE, weight_s)},
    {"stage_slots", "", SPLIT, HAPT_H5_I32, 1, OF_STAGE(STAGE, slots)},
    {"stage_weight_slots", "", SPLIT, HAPT_H5_I32, 1, OF_STAGE(STAGE, weight_slots)},
    {"stage_weight_slot_bytes", "byte", SPLIT, HAPT_H5_F64, 1, OF_STAGE(STAGE, weight_slot_bytes)},
    {"mixed_stage", "", MIXED, HAPT_H5_I32, 1, STAGE_INDEX, 0},
    {"mixed_subcluster", "", MIXED, HAPT_H5_I32, 1, OF_SUBMESH(SUBMESH_PART, subcluster)},
    {"mixed_subcluster_name", NULL, MIXED, HAPT_H5_U8, 1, OF_SUBMESH(SUBMESH_PART, part_name)},
    {"mixed_devices", "", MIXED, HAPT_H5_I32, 1, OF_SUBMESH(SUBMESH_PART, devices)},
    {"mixed_parameter_bytes", "byte", MIXED, HAPT_H5_F64, 1, OF_STAGE(STAGE_PART, part_parameter_bytes)},
    {"mixed_activation_bytes", "byte", MIXED, HAPT_H5_F64, 1, OF_STAGE(STAGE_PART, part_activation_bytes)},
    {"mixed_device_memory_bytes", "byte", MIXED, HAPT_H5_F64, 1, OF_SUBMESH(SUBMESH_PART, device_memory_bytes)},
};
enum { TABLES = sizeof tables / sizeof tables[0] };

static const char *join(char path[PATH_MAX_CHARS], const char *group, const char *name)
{
    snprintf(path, PATH_MAX_CHARS, "%s/%s", group, name);
    return path;
}

static const char *root_of(const char *group)
{
    return *group ? group : "/";
}

/* Bytes of a row. */
static size_t size_of(const struct table *table)
{
    const size_t each = !table->units ? sizeof(char *) : table->type == HAPT_H5_F64 ? sizeof(double) : sizeof(int);
    return each * (size_t)table->columns;
}

static void *cell(const struct table *table, struct hapt_plan_stage *stage, int k)
{
    const bool of_submesh = table->place == SUBMESH || table->place == SUBMESH_PART;
    char *at = (of_submesh ? (char *)stage->submesh : (char *)stage) + table->offset, *array;
    if (table->place == STAGE || table->place == SUBMESH) return at;
    memcpy(&array, at, sizeof array); /* an array of any type */
    return array + (size_t)k * size_of(table);
}

/* The number of rows of a stage. */
static int rows_of(const struct table *table, const struct hapt_plan_stage *stage)
{
    if (table->presence != MIXED) return 1;
    return hapt_plan_is_mixed(stage) ? stage->submesh->part_count : 0;
}

static int count_rows(const struct table *table, const struct hapt_plan *plan)
{
    int count = 0;
    for (int i = 0; i < plan->stage_count; i++) count += rows_of(table, &plan->stage[i]);
    return count;
}

static bool is_needed(const struct table *table, const struct hapt_plan *plan)
{
    bool programs = false, recomputes = false, defers = false, away = false;
    for (int i = 0; i < plan->stage_count; i++) {
        programs |= plan->stage[i].layout.number > 0;
        recomputes |= plan->stage[i].layout.recompute > 0;
        defers |= plan->stage[i].deferred_s > 0;
        away |= plan->stage[i].layout.weights_at != HAPT_WEIGHTS_RESIDENT;
    }
    return (table->presence != PROGRAMS || programs) && (table->presence != TIED || plan->exchange_s != 0) &&
           (table->presence != SPLIT || plan->split) && (table->presence != FROZEN || plan->stage[0].forward_only) &&
           (table->presence != RECOMPUTES || recomputes) && (table->presence != DEFERS || defers) &&
           (table->presence != AWAY || away) && (table->presence != AHEAD || plan->submesh[0].ahead > 0) &&
           (table->presence != MIXED || hapt_plan_first_mixed(plan) >= 0);
}

static enum hapt_status write_attributes(struct hapt_h5 *file, const char *at, const struct hapt_plan *plan)
{
    HAPT_TRY(hapt_h5_write_attribute_int(file, at, "microbatches", plan->microbatches));
    HAPT_TRY(hapt_h5_write_attribute_text(file, at, "schedule", hapt_schedule_kind_name(plan->schedule)));
    HAPT_TRY(hapt_h5_write_attribute_real(file, at, "hide_threshold", plan->hide_threshold, ""));
    HAPT_TRY(hapt_h5_write_attribute_int(file, at, "replicas", plan->replicas));
    HAPT_TRY(hapt_h5_write_attribute_int(file, at, "layers", plan->layer_count));
    HAPT_TRY(hapt_h5_write_attribute_int(file, at, "threads", plan->threads));
    HAPT_TRY(hapt_h5_write_attribute_real(file, at, "latency", plan->latency_s, "s"));
    HAPT_TRY(hapt_h5_write_attribute_real(file, at, "simulated", plan->simulated_s, "s"));
    HAPT_TRY(hapt_h5_write_attribute_real(file, at, "t_max", plan->t_max_s, "s"));
    HAPT_TRY(hapt_h5_write_attribute_text(file, at, "limit", plan->limit));
    HAPT_TRY(hapt_h5_write_attribute_real(file, at, "balance_eta", plan->balance_eta, ""));
    HAPT_TRY(hapt_h5_write_attribute_int(file, at, "blocking", plan->blocking));
    HAPT_TRY(hapt_h5_write_attribute_real(file, at, "flops_per_microbatch", plan->flops, "FLOP"));
    HAPT_TRY(hapt_h5_write_attribute_real(file, at, "peak_flops", plan->peak_flops, "FLOP/s"));
    if (plan->precision != HAPT_PRECISION_UNKNOWN) {
        const char *boundary = hapt_dtype_name(hapt_precision_dtype(plan->precision));
        HAPT_TRY(hapt_h5_write_attribute_text(file, at, "precision", hapt_precision_name(plan->precision)));
        HAPT_TRY(hapt_h5_write_attribute_text(file, at, "boundary_dtype", boundary));
    }
    if (plan->profile != HAPT_PROFILE_UNKNOWN)
        HAPT_TRY(hapt_h5_write_attribute_text(file, at, "profile", hapt_profile_origin_name(plan->profile)));
    if (plan->split) HAPT_TRY(hapt_h5_write_attribute_int(file, at, "split_backward", 1));
    if (plan->host_state)
        HAPT_TRY(hapt_h5_write_attribute_text(file, at, "offload", plan->host_update ? "update" : "optimizer"));
    if (plan->loop_batch > 0) HAPT_TRY(hapt_h5_write_attribute_int(file, at, "loop_batch", plan->loop_batch));
    if (plan->prefetch > 0) HAPT_TRY(hapt_h5_write_attribute_int(file, at, "prefetch", plan->prefetch));
    if (plan->transfer_slots > 0)
        HAPT_TRY(hapt_h5_write_attribute_int(file, at, "transfer_slots", plan->transfer_slots));
    if (plan->exchange_s > 0) HAPT_TRY(hapt_h5_write_attribute_real(file, at, "exchange", plan->exchange_s, "s"));
    if (plan->exchange_bytes > 0)
        HAPT_TRY(hapt_h5_write_attribute_real(file, at, "exchange_bytes", plan->exchange_bytes, "byte"));
    if (plan->exchange != HAPT_TIED_EXCHANGE_FP32)
        HAPT_TRY(hapt_h5_write_attribute_text(file, at, "tied_exchange", hapt_tied_exchange_name(plan->exchange)));
    if (plan->rows > 0) HAPT_TRY(hapt_h5_write_attribute_int(file, at, "rows", plan->rows));
    if (plan->bound_s > 0) HAPT_TRY(hapt_h5_write_attribute_real(file, at, "bound", plan->bound_s, "s"));
    HAPT_TRY(hapt_h5_write_attribute_real(file, at, "search_gap", plan->search.gap, ""));
    HAPT_TRY(hapt_h5_write_attribute_real(file, at, "search_seconds", plan->search.seconds, "s"));
    HAPT_TRY(hapt_h5_write_attribute_int(file, at, "search_candidates", plan->search.candidates));
    return hapt_h5_write_attribute_int(file, at, "search_evaluated", plan->search.evaluated);
}

static enum hapt_status write_table(struct hapt_h5 *file, const char *group, const struct hapt_plan *plan,
                                    const struct table *table, struct hapt_arena *scratch)
{
    const int64_t shape[2] = {count_rows(table, plan), table->columns};
    const size_t size = size_of(table);
    char path[PATH_MAX_CHARS], *data, *to;
    HAPT_NEW(data, scratch, (size_t)shape[0] * size);
    to = data;
    for (int i = 0; i < plan->stage_count; i++) {
        const int index = table->place == STAGE_INDEX ? i : (int)(plan->stage[i].submesh - plan->submesh);
        for (int k = 0; k < rows_of(table, &plan->stage[i]); k++, to += size) {
            const void *value = table->place >= SUBMESH_INDEX ? &index : cell(table, &plan->stage[i], k);
            const bool inside = !table->units && table->place == SUBMESH; /* the text itself, not a pointer to it */
            memcpy(to, inside ? (const void *)&value : value, size);
        }
    }
    join(path, group, table->name);
    if (!table->units) return hapt_h5_write_strings(file, path, shape[0], (const char *const *)(void *)data);
    return hapt_h5_write(file, path, table->type, table->columns > 1 ? 2 : 1, shape, data, table->units);
}

/* One ratio for each device of the mixed stages. */
static enum hapt_status write_ratios(struct hapt_h5 *file, const char *group, const struct hapt_plan *plan,
                                     struct hapt_arena *scratch)
{
    int64_t devices = 0;
    double *ratio;
    char path[PATH_MAX_CHARS];
    for (int i = 0; i < plan->stage_count; i++) devices += plan->stage[i].submesh->devices_per_node; /* at most */
    HAPT_NEW(ratio, scratch, devices);
    devices = 0;
    for (int i = 0; i < plan->stage_count; i++) {
        const struct hapt_plan_stage *stage = &plan->stage[i];
        for (int d = 0; hapt_plan_is_mixed(stage) && d < stage->submesh->devices_per_node; d++)
            ratio[devices++] = stage->layout.ratio ? stage->layout.ratio[d] : NAN;
    }
    if (devices == 0) return HAPT_OK;
    return hapt_h5_write(file, join(path, group, "mixed_ratio"), HAPT_H5_F64, 1, &devices, ratio, "");
}

static enum hapt_status write_tables(struct hapt_h5 *file, const char *group, const struct hapt_plan *plan,
                                     struct hapt_arena *scratch)
{
    for (int t = 0; t < TABLES; t++)
        if (is_needed(&tables[t], plan)) HAPT_TRY(write_table(file, group, plan, &tables[t], scratch));
    HAPT_TRY(write_ratios(file, group, plan, scratch));
    HAPT_TRY(plan_write_units(file, group, plan, scratch));
    for (int i = 0; i < plan->stage_count; i++) { /* each layout once */
        const struct hapt_layout *layout = &plan->stage[i].layout;
        if (layout->number > 0 && !hapt_stage_layout_exists(file, group, layout->number))
            HAPT_TRY(hapt_stage_layout_write(file, group, layout->number, layout->program));
    }
    return HAPT_OK;
}

enum hapt_status hapt_plan_write(struct hapt_h5 *file, const char *group, const struct hapt_plan *plan)
{
    struct hapt_arena scratch;
    hapt_arena_init(&scratch);
    const enum hapt_status status = write_tables(file, group, plan, &scratch);
    hapt_arena_release(&scratch);
    if (status == HAPT_OK) HAPT_TRY(plan_write_edges(file, group, plan));
    return status == HAPT_OK ? write_attributes(file, root_of(group), plan) : status;
}

enum hapt_status hapt_plan_save(const char *path, const struct hapt_plan *plan)
{
    struct hapt_h5 *file;
    HAPT_TRY(hapt_h5_create(path, FORMAT, HAPT_PLAN_VERSION, &file));
    return hapt_h5_finish(file, hapt_plan_write(file, "", plan));
}

static enum hapt_status damaged(struct hapt_h5 *file, const char *what)
{
    return hapt_fail(HAPT_ERR_INPUT, "create the plan again with `hapt plan --output`", "%s: %s", hapt_h5_path(file),
                     what);
}

static enum hapt_status read_int(struct hapt_h5 *file, const char *at, const char *name, int64_t low, int64_t high,
                                 int64_t *value)
{
    HAPT_TRY(hapt_h5_read_attribute_int(file, at, name, value));
    if (*value < low || *value > high)
        return hapt_fail(HAPT_ERR_INPUT, "create the plan again with `hapt plan --output`", "%s: %s is %lld",
                         hapt_h5_path(file), name, (long long)*value);
    return HAPT_OK;
}

static enum hapt_status read_making(struct hapt_h5 *file, const char *at, struct hapt_arena *arena,
                                    struct hapt_plan *plan)
{
    const char *text;
    if (hapt_h5_has_attribute(file, at, "precision")) {
        HAPT_TRY(hapt_h5_read_attribute_text(file, at, "precision", arena, &text));
        plan->precision = hapt_precision_find(text);
        if (plan->precision == HAPT_PRECISION_UNKNOWN) return damaged(file, "unknown precision");
    }
    if (hapt_h5_has_attribute(file, at, "offload")) {
        HAPT_TRY(hapt_h5_read_attribute_text(file, at, "offload", arena, &text));
        plan->host_update = !strcmp(text, "update");
        plan->host_state = plan->host_update || !strcmp(text, "optimizer");
        if (!plan->host_state) return damaged(file, "unknown offload");
    }
    if (hapt_h5_has_attribute(file, at, "profile")) {
        HAPT_TRY(hapt_h5_read_attribute_text(file, at, "profile", arena, &text));
        plan->profile = hapt_profile_origin_find(text);
    }
    if (hapt_h5_has_attribute(file, at, "tied_exchange")) {
        HAPT_TRY(hapt_h5_read_attribute_text(file, at, "tied_exchange", arena, &text));
        if (!hapt_tied_exchange_find(text, &plan->exchange)) return damaged(file, "unknown tied_exchange");
    }
    return HAPT_OK;
}

static enum hapt_status read_attributes(struct hapt_h5 *file, const char *at, struct hapt_arena *arena,
                                        struct hapt_plan *plan)
{
    static const char *const limits[] = {"compute", "link", "memory"};
    int64_t microbatches, replicas, layers, threads, blocking = 0, split = 0, rows = 0;
    int64_t loop_batch = 0, prefetch = 0, slots = 0;
    const char *schedule, *limit;
    HAPT_TRY(read_int(file, at, "microbatches", 1, 1000000, &microbatches));
    HAPT_TRY(read_int(file, at, "replicas", 1, 1000000, &replicas));
    HAPT_TRY(read_int(file, at, "layers", 1, 1000000, &layers));
    HAPT_TRY(read_int(file, at, "threads", 0, 1000000, &threads));
    HAPT_TRY(read_int(file, at, "search_candidates", 0, INT64_MAX, &plan->search.candidates));
    HAPT_TRY(read_int(file, at, "search_evaluated", 0, INT64_MAX, &plan->search.evaluated));
    plan->microbatches = (int)microbatches;
    plan->replicas = (int)replicas;
    plan->layer_count = (int)layers;
    plan->threads = (int)threads;
    HAPT_TRY(hapt_h5_read_attribute_text(file, at, "schedule", arena, &schedule));
    if (!hapt_schedule_kind_parse(schedule, &plan->schedule)) return damaged(file, "unknown schedule");
    HAPT_TRY(hapt_h5_read_attribute_text(file, at, "limit", arena, &limit));
    for (int k = 0; k < 3; k++)
        if (strcmp(limit, limits[k]) == 0) plan->limit = limits[k];
    if (!plan->limit) return damaged(file, "unknown limit");
    const struct {
        const char *name;
        double *value;
        bool newer; /* files of the first release lack it */
    } reals[] = {{"hide_threshold", &plan->hide_threshold, false},
                 {"latency", &plan->latency_s, false},
                 {"simulated", &plan->simulated_s, false},
                 {"t_max", &plan->t_max_s, false},
                 {"balance_eta", &plan->balance_eta, false},
                 {"search_seconds", &plan->search.seconds, false},
                 {"flops_per_microbatch", &plan->flops, true},
                 {"peak_flops", &plan->peak_flops, true},
                 {"exchange", &plan->exchange_s, true},
                 {"exchange_bytes", &plan->exchange_bytes, true},
                 {"bound", &plan->bound_s, true},
                 {"search_gap", &plan->search.gap, true}};
    for (int k = 0; k < (int)(sizeof reals / sizeof reals[0]); k++)
        if (!reals[k].newer || hapt_h5_has_attribute(file, at, reals[k].name))
            HAPT_TRY(hapt_h5_read_attribute_real(file, at, reals[k].name, reals[k].value));
    if (hapt_h5_has_attribute(file, at, "blocking")) HAPT_TRY(read_int(file, at, "blocking", 0, 1, &blocking));
    if (hapt_h5_has_attribute(file, at, "split_backward")) HAPT_TRY(read_int(file, at, "split_backward", 0, 1, &split));
    plan->blocking = blocking != 0;
    plan->split = split != 0;
    if (hapt_h5_has_attribute(file, at, "rows")) HAPT_TRY(read_int(file, at, "rows", 1, 1000000, &rows));
    plan->rows = (int)rows;
    if (hapt_h5_has_attribute(file, at, "loop_batch"))
        HAPT_TRY(read_int(file, at, "loop_batch", 1, 1000000, &loop_batch));
    if (hapt_h5_has_attribute(file, at, "prefetch")) HAPT_TRY(read_int(file, at, "prefetch", 1, 1000000, &prefetch));
    if (hapt_h5_has_attribute(file, at, "transfer_slots"))
        HAPT_TRY(read_int(file, at, "transfer_slots", 1, 1000000, &slots));
    plan->transfer_slots = (int)slots;
    plan->loop_batch = (int)loop_batch;
    plan->prefetch = (int)prefetch;
    return read_making(file, at, arena, plan);
}

/* Reads numbers. count -1: any number of rows. */
static enum hapt_status read_numbers(struct hapt_h5 *file, const char *group, const char *name, enum hapt_h5_type type,
                                     int columns, int64_t *count, struct hapt_arena *arena, void **data)
{
    char path[PATH_MAX_CHARS];
    int64_t shape[2] = {*count, columns};
    HAPT_TRY(hapt_h5_read(file, join(path, group, name), type, columns > 1 ? 2 : 1, shape,
                          (int64_t)columns * MAX_STAGES, arena, data));
    *count = shape[0];
    return HAPT_OK;
}

static enum hapt_status read_names(struct hapt_h5 *file, const char *group, struct hapt_plan *plan,
                                   const struct table *table, struct hapt_arena *arena)
{
    const bool mixed = table->presence == MIXED;
    int64_t count;
    char path[PATH_MAX_CHARS];
    const char **name;
    HAPT_TRY(hapt_h5_read_strings(file, join(path, group, table->name), MAX_STAGES, arena, &count, &name));
    if (count != count_rows(table, plan))
        return damaged(file, mixed ? "mixed_subcluster_name and mixed_stage differ in length"
                                   : "stage_subcluster_name and stage_layers differ in length");
    for (int i = 0; i < plan->stage_count; i++) {
        struct hapt_plan_submesh *submesh = plan->stage[i].submesh;
        for (int k = 0; k < rows_of(table, &plan->stage[i]); k++) submesh->part_name[k] = *name++;
        if (mixed) continue;
        if (strlen(submesh->part_name[0]) >= sizeof submesh->name)
            return damaged(file, "a subcluster's name is too long");
        snprintf(submesh->name, sizeof submesh->name, "%s", submesh->part_name[0]);
    }
    return HAPT_OK;
}

/* Reads the tables of mixed stages, or all others. */
static enum hapt_status read_tables(struct hapt_h5 *file, const char *group, bool mixed, struct hapt_arena *arena,
                                    struct hapt_plan *plan)
{
    for (const struct table *table = tables; table < tables + TABLES; table++) {
        const bool optional = table->presence == NEWER || table->presence == PROGRAMS || table->presence == FROZEN ||
                              table->presence == AHEAD || table->presence == RECOMPUTES || table->presence == DEFERS ||
                              table->presence == AWAY;
        int64_t count = count_rows(table, plan);
        char path[PATH_MAX_CHARS];
        void *data;
        if ((table->presence == MIXED) != mixed || table->place >= SUBMESH_INDEX) continue;
        if (optional ? !hapt_h5_exists(file, join(path, group, table->name)) : !is_needed(table, plan)) continue;
        if (!table->units) {
            HAPT_TRY(read_names(file, group, plan, table, arena));
            continue;
        }
        HAPT_TRY(read_numbers(file, group, table->name, table->type, table->columns, &count, arena, &data));
        const char *from = data;
        for (int i = 0; i < plan->stage_count; i++)
            for (int k = 0; k < rows_of(table, &plan->stage[i]); k++, from += size_of(table))
                memcpy(cell(table, &plan->stage[i], k), from, size_of(table));
    }
    return HAPT_OK;
}

static enum hapt_status read_stages(struct hapt_h5 *file, const char *group, struct hapt_arena *arena,
                                    struct hapt_plan *plan)
{
    int64_t S = -1;
    void *layers;
    HAPT_TRY(read_numbers(file, group, "stage_layers", HAPT_H5_I32, 2, &S, arena, &layers)); /* for their number */
    HAPT_TRY(hapt_plan_allot(plan, (int)S, arena));
    for (int i = 0; i < S; i++) {
        plan->stage[i].layout.tensor_parallel = 1;
        plan->stage[i].weight_s = NAN;
    }
    HAPT_TRY(read_tables(file, group, false, arena, plan));
    for (int i = 0; i < S; i++) { /* mixed stages have tables of their own */
        struct hapt_plan_stage *stage = &plan->stage[i];
        stage->part_parameter_bytes[0] = stage->parameter_bytes;
        stage->part_activation_bytes[0] = stage->activation_bytes;
        stage->submesh->device_memory_bytes[0] = stage->device_memory_bytes;
        stage->submesh->devices[0] = hapt_plan_submesh_size(stage->submesh);
    }
    return HAPT_OK;
}

/* Gives each mixed stage its parts, still empty: a run of equal numbers in mixed_stage [rows]. */
static enum hapt_status allot_parts(struct hapt_h5 *file, const int *stage_of, int64_t rows, struct hapt_arena *arena,
                                    struct hapt_plan *plan)
{
    for (int64_t first = 0, end; first < rows; first = end) {
        const int i = stage_of[first];
        if (i < 0 || i >= plan->stage_count || (first > 0 && i <= stage_of[first - 1]))
            return damaged(file, "mixed_stage has an invalid or repeated stage");
        for (end = first; end < rows && stage_of[end] == i;) end++;
        if (end - first < 2) return damaged(file, "a mixed stage of one subcluster");
        HAPT_TRY(hapt_plan_stage_parts(&plan->stage[i], (int)(end - first), arena));
    }
    return HAPT_OK;
}

/* Gives each mixed stage the ratios of its devices. `alone` [S]: stage_subcluster. */
static enum hapt_status read_ratios(struct hapt_h5 *file, const char *group, const int *alone, struct hapt_arena *arena,
                                    struct hapt_plan *plan)
{
    int64_t D = -1, devices = 0;
    char path[PATH_MAX_CHARS];
    void *data;
    HAPT_TRY(hapt_h5_read(file, join(path, group, "mixed_ratio"), HAPT_H5_F64, 1, &D, MAX_DEVICES, arena, &data));
    const double *ratio = data;
    for (int i = 0; i < plan->stage_count; i++) {
        const struct hapt_plan_submesh *submesh = plan->stage[i].submesh;
        for (int k = 0; submesh->part_count > 1 && k < submesh->part_count; k++) {
            if (submesh->devices[k] < 1 || submesh->devices[k] > MAX_DEVICES)
                return damaged(file, "a mixed stage without devices");
            devices += submesh->devices[k];
        }
    }
    if (devices != D) return damaged(file, "mixed_ratio does not have one value per device");
    for (int i = 0; i < plan->stage_count; i++) {
        struct hapt_plan_stage *stage = &plan->stage[i];
        int own = 0;
        if (!hapt_plan_is_mixed(stage)) continue;
        for (int k = 0; k < stage->submesh->part_count; k++) own += stage->submesh->devices[k];
        if (own != stage->submesh->devices_per_node)
            return damaged(file, "stage_submesh and mixed_devices of a mixed stage differ");
        if (stage->submesh->subcluster[0] != alone[i] || stage->layout.tensor_parallel != 1)
            return damaged(file, "stage_subcluster or stage_tensor_parallel does not fit a mixed stage");
        stage->layout.ratio = isnan(*ratio) ? NULL : ratio;
        ratio += own;
    }
    return HAPT_OK;
}

static enum hapt_status read_mixed(struct hapt_h5 *file, const char *group, struct hapt_arena *arena,
                                   struct hapt_plan *plan)
{
    int64_t R = -1;
    int *alone;
    char path[PATH_MAX_CHARS];
    void *stage_of;
    if (!hapt_h5_exists(file, join(path, group, "mixed_stage"))) return HAPT_OK;
    HAPT_NEW(alone, arena, plan->stage_count);
    for (int i = 0; i < plan->stage_count; i++) alone[i] = plan->stage[i].submesh->subcluster[0];
    HAPT_TRY(read_numbers(file, group, "mixed_stage", HAPT_H5_I32, 1, &R, arena, &stage_of));
    HAPT_TRY(allot_parts(file, stage_of, R, arena, plan));
    HAPT_TRY(read_tables(file, group, true, arena, plan));
    return read_ratios(file, group, alone, arena, plan);
}

/* Completes the layouts; stages with the same number share a program. */
static enum hapt_status read_layouts(struct hapt_h5 *file, const char *group, struct hapt_arena *arena,
                                     struct hapt_plan *plan)
{
    for (int i = 0; i < plan->stage_count; i++) {
        struct hapt_layout *layout = &plan->stage[i].layout;
        struct hapt_stage_layout *read = NULL;
        layout->kind =
            hapt_plan_is_mixed(&plan->stage[i]) ? HAPT_LAYOUT_ROWS : hapt_layout_plain(layout->tensor_parallel).kind;
        if (layout->number == 0) continue;
        if (layout->number < 0 || layout->number > HAPT_MAX_LAYOUTS)
            return damaged(file, "stage_program has an invalid program number");
        layout->kind = HAPT_LAYOUT_PROGRAM;
        for (int before = 0; before < i && !layout->program; before++)
            if (plan->stage[before].layout.number == layout->number)
                layout->program = plan->stage[before].layout.program;
        if (layout->program) continue;
        HAPT_TRY(hapt_stage_layout_read(file, group, layout->number, arena, &read));
        layout->program = read;
    }
    return HAPT_OK;
}

/* Lets stages with the same stage_submesh_index share one submesh. */
static enum hapt_status read_sharing(struct hapt_h5 *file, const char *group, struct hapt_arena *arena,
                                     struct hapt_plan *plan)
{
    int64_t S = plan->stage_count;
    char path[PATH_MAX_CHARS];
    void *data;
    if (!hapt_h5_exists(file, join(path, group, "stage_submesh_index"))) return HAPT_OK;
    HAPT_TRY(read_numbers(file, group, "stage_submesh_index", HAPT_H5_I32, 1, &S, arena, &data));
    const int *index = data;
    plan->submesh_count = 0;
    for (int i = 0; i < plan->stage_count; i++) {
        struct hapt_plan_stage *stage = &plan->stage[i];
        if (index[i] < 0 || index[i] > plan->submesh_count)
            return damaged(file, "stage_submesh_index does not number the submeshes in the order of the stages");
        if (index[i] == plan->submesh_count) {
            plan->submesh[plan->submesh_count] = *stage->submesh;
            stage->submesh = &plan->submesh[plan->submesh_count++];
            continue;
        }
        struct hapt_plan_stage first = *stage;
        first.submesh = &plan->submesh[index[i]];
        first.layout = stage->layout;
        if (!hapt_plan_same_devices(stage, &first)) return damaged(file, "stages of one submesh have other devices");
        if (stage->submesh->ahead != first.submesh->ahead)
            return damaged(file, "stages of one submesh differ in stage_ahead");
        stage->submesh = first.submesh;
    }
    return HAPT_OK;
}

/* Launch counts, slots and memory of a looped plan follow from its lists. */
static enum hapt_status read_lists(struct hapt_h5 *file, struct hapt_plan *plan)
{
    int misfit;
    if (!hapt_schedule_loops(plan->schedule)) return HAPT_OK;
    const enum hapt_status status = hapt_plan_launch_loops(plan, &misfit);
    if (status == HAPT_ERR_USAGE || status == HAPT_ERR_INPUT) {
        hapt_fail_reset();
        return damaged(file, "its looped schedule cannot run with these microbatches, stages and submeshes");
    }
    HAPT_TRY(status);
    return misfit < 0 ? HAPT_OK : damaged(file, "its looped schedule exceeds the memory of a submesh");
}

enum hapt_status hapt_plan_read(struct hapt_h5 *file, const char *group, struct hapt_arena *arena,
                                struct hapt_plan **plan)
{
    struct hapt_plan *read;
    HAPT_NEW(read, arena, 1);
    HAPT_TRY(read_attributes(file, root_of(group), arena, read));
    HAPT_TRY(read_stages(file, group, arena, read));
    HAPT_TRY(read_mixed(file, group, arena, read));
    HAPT_TRY(read_layouts(file, group, arena, read));
    HAPT_TRY(plan_read_units(file, group, arena, read));
    HAPT_TRY(read_sharing(file, group, arena, read));
    HAPT_TRY(plan_read_edges(file, group, arena, read));
    HAPT_TRY(hapt_plan_check(read));
    HAPT_TRY(read_lists(file, read));
    *plan = read;
    return HAPT_OK;
}

enum hapt_status hapt_plan_load(const char *path, struct hapt_arena *arena, struct hapt_plan **plan)
{
    struct hapt_h5 *file;
    HAPT_TRY(hapt_h5_open(path, FORMAT, HAPT_PLAN_VERSION, false, &file));
    const enum hapt_status status = hapt_plan_read(file, "", arena, plan);
    hapt_h5_close(file);
    return status;
}

enum hapt_status hapt_plan_precision(const char *path, enum hapt_precision *precision)
{
    char name[16];
    HAPT_TRY(hapt_h5_peek_text(path, FORMAT, HAPT_PLAN_VERSION, false, "precision", name, sizeof name));
    *precision = hapt_precision_find(name); /* an unknown name is reported when the whole file is read */
    return HAPT_OK;
}
