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
 *     stage_compute [S] and so on    seconds and bytes, `columns` below
 *
 * Mixed submeshes have one row per subcluster, in the order of their stages:
 *
 *     mixed_stage [R], mixed_subcluster [R], mixed_subcluster_name [R], mixed_devices [R]
 *     mixed_parameter_bytes [R], mixed_activation_bytes [R], mixed_device_memory_bytes [R]    per device
 *     mixed_ratio [D]                one per device, row by row; NaN: unknown
 *
 * Optional attributes: precision (fp32, tf32, bf16, fp16) of the model, boundary_dtype (of tensors between stages;
 * follows from precision, for readers), profile (measured, predicted). Version 1 has no stage_submesh_index: each
 * stage has a submesh of its own.
 */
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "plan_private.h"

#define FORMAT "hapt-plan"
#define VERSION 2
#define MAX_STAGES 65536
#define PATH_MAX_CHARS 512

static const struct {
    const char *name, *units;
    size_t offset;
} columns[] = {
    {"stage_compute", "s", offsetof(struct hapt_plan_stage, compute_s)},
    {"stage_forward", "s", offsetof(struct hapt_plan_stage, forward_s)},
    {"stage_step", "s", offsetof(struct hapt_plan_stage, step_s)},
    {"stage_comm", "s", offsetof(struct hapt_plan_stage, comm_s)},
    {"stage_parameter_bytes", "byte", offsetof(struct hapt_plan_stage, parameter_bytes)},
    {"stage_activation_bytes", "byte", offsetof(struct hapt_plan_stage, activation_bytes)},
    {"stage_memory_bytes", "byte", offsetof(struct hapt_plan_stage, memory_bytes)},
    {"stage_device_memory_bytes", "byte", offsetof(struct hapt_plan_stage, device_memory_bytes)},
    {"stage_tied", "s", offsetof(struct hapt_plan_stage, tied_s)}, /* present only if tied parameters are exchanged */
};
#define COLUMNS ((int)(sizeof columns / sizeof columns[0]))

static double *column_of(struct hapt_plan_stage *stage, int column)
{
    return (double *)(void *)((char *)stage + columns[column].offset);
}

static const char *join(char path[PATH_MAX_CHARS], const char *group, const char *name)
{
    snprintf(path, PATH_MAX_CHARS, "%s/%s", group, name);
    return path;
}

static const char *root_of(const char *group)
{
    return *group ? group : "/";
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
    if (plan->exchange_s > 0) HAPT_TRY(hapt_h5_write_attribute_real(file, at, "exchange", plan->exchange_s, "s"));
    HAPT_TRY(hapt_h5_write_attribute_real(file, at, "search_gap", plan->search.gap, ""));
    HAPT_TRY(hapt_h5_write_attribute_real(file, at, "search_seconds", plan->search.seconds, "s"));
    HAPT_TRY(hapt_h5_write_attribute_int(file, at, "search_candidates", plan->search.candidates));
    return hapt_h5_write_attribute_int(file, at, "search_evaluated", plan->search.evaluated);
}

static enum hapt_status write_tables(struct hapt_h5 *file, const char *group, const struct hapt_plan *plan,
                                     struct hapt_arena *scratch)
{
    const int64_t S = plan->stage_count, pair[2] = {S, 2};
    char path[PATH_MAX_CHARS];
    int *layers, *ops, *submesh, *submesh_index, *subcluster, *warmup, *tp, *program;
    bool named = false;
    const char **name;
    double *values;
    HAPT_NEW(layers, scratch, 2 * S);
    HAPT_NEW(ops, scratch, 2 * S);
    HAPT_NEW(submesh, scratch, 2 * S);
    HAPT_NEW(submesh_index, scratch, S);
    HAPT_NEW(subcluster, scratch, S);
    HAPT_NEW(warmup, scratch, S);
    HAPT_NEW(tp, scratch, S);
    HAPT_NEW(program, scratch, S);
    HAPT_NEW(name, scratch, S);
    HAPT_NEW(values, scratch, S);
    for (int i = 0; i < S; i++) {
        const struct hapt_plan_stage *stage = &plan->stage[i];
        layers[2 * i] = stage->first_layer, layers[2 * i + 1] = stage->end_layer;
        ops[2 * i] = stage->first_op, ops[2 * i + 1] = stage->end_op;
        submesh[2 * i] = stage->submesh->nodes, submesh[2 * i + 1] = stage->submesh->devices_per_node;
        submesh_index[i] = (int)(stage->submesh - plan->submesh);
        subcluster[i] = stage->submesh->subcluster[0];
        warmup[i] = stage->warmup;
        tp[i] = stage->layout.tensor_parallel;
        program[i] = stage->layout.number;
        named = named || program[i] > 0;
        name[i] = stage->submesh->name;
    }
    HAPT_TRY(hapt_h5_write(file, join(path, group, "stage_layers"), HAPT_H5_I32, 2, pair, layers, ""));
    HAPT_TRY(hapt_h5_write(file, join(path, group, "stage_ops"), HAPT_H5_I32, 2, pair, ops, ""));
    HAPT_TRY(hapt_h5_write(file, join(path, group, "stage_submesh"), HAPT_H5_I32, 2, pair, submesh, ""));
    HAPT_TRY(hapt_h5_write(file, join(path, group, "stage_submesh_index"), HAPT_H5_I32, 1, &S, submesh_index, ""));
    HAPT_TRY(hapt_h5_write(file, join(path, group, "stage_subcluster"), HAPT_H5_I32, 1, &S, subcluster, ""));
    HAPT_TRY(hapt_h5_write(file, join(path, group, "stage_warmup"), HAPT_H5_I32, 1, &S, warmup, ""));
    HAPT_TRY(hapt_h5_write(file, join(path, group, "stage_tensor_parallel"), HAPT_H5_I32, 1, &S, tp, ""));
    if (named) HAPT_TRY(hapt_h5_write(file, join(path, group, "stage_program"), HAPT_H5_I32, 1, &S, program, ""));
    HAPT_TRY(hapt_h5_write_strings(file, join(path, group, "stage_subcluster_name"), S, name));
    for (int column = 0; column < COLUMNS - (plan->exchange_s == 0); column++) {
        for (int i = 0; i < S; i++) values[i] = *column_of(&plan->stage[i], column);
        HAPT_TRY(hapt_h5_write(file, join(path, group, columns[column].name), HAPT_H5_F64, 1, &S, values,
                               columns[column].units));
    }
    return HAPT_OK;
}

/* Writes each used layout once. */
static enum hapt_status write_layouts(struct hapt_h5 *file, const char *group, const struct hapt_plan *plan)
{
    for (int i = 0; i < plan->stage_count; i++) {
        const struct hapt_plan_stage *stage = &plan->stage[i];
        if (stage->layout.number > 0 && !hapt_stage_layout_exists(file, group, stage->layout.number))
            HAPT_TRY(hapt_stage_layout_write(file, group, stage->layout.number, stage->layout.program));
    }
    return HAPT_OK;
}

enum hapt_status hapt_plan_write(struct hapt_h5 *file, const char *group, const struct hapt_plan *plan)
{
    struct hapt_arena scratch;
    hapt_arena_init(&scratch);
    enum hapt_status status = write_tables(file, group, plan, &scratch);
    if (status == HAPT_OK && hapt_plan_first_mixed(plan) >= 0) status = plan_write_mixed(file, group, plan, &scratch);
    if (status == HAPT_OK) status = write_layouts(file, group, plan);
    hapt_arena_release(&scratch);
    return status == HAPT_OK ? write_attributes(file, root_of(group), plan) : status;
}

enum hapt_status hapt_plan_save(const char *path, const struct hapt_plan *plan)
{
    struct hapt_h5 *file;
    HAPT_TRY(hapt_h5_create(path, FORMAT, VERSION, &file));
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
    if (hapt_h5_has_attribute(file, at, "profile")) {
        HAPT_TRY(hapt_h5_read_attribute_text(file, at, "profile", arena, &text));
        plan->profile = hapt_profile_origin_find(text);
    }
    return HAPT_OK;
}

/* Reads attributes that files of the first release do not have. */
static enum hapt_status read_newer_attributes(struct hapt_h5 *file, const char *at, struct hapt_plan *plan)
{
    const struct {
        const char *name;
        double *value;
    } reals[] = {{"flops_per_microbatch", &plan->flops},
                 {"peak_flops", &plan->peak_flops},
                 {"exchange", &plan->exchange_s},
                 {"search_gap", &plan->search.gap}};
    for (int k = 0; k < 4; k++)
        if (hapt_h5_has_attribute(file, at, reals[k].name))
            HAPT_TRY(hapt_h5_read_attribute_real(file, at, reals[k].name, reals[k].value));
    int64_t blocking = 0;
    if (hapt_h5_has_attribute(file, at, "blocking")) HAPT_TRY(read_int(file, at, "blocking", 0, 1, &blocking));
    plan->blocking = blocking != 0;
    return HAPT_OK;
}

static enum hapt_status read_attributes(struct hapt_h5 *file, const char *at, struct hapt_arena *arena,
                                        struct hapt_plan *plan)
{
    static const char *const limits[] = {"compute", "link", "memory"};
    int64_t microbatches, replicas, layers, threads;
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
    } reals[] = {{"hide_threshold", &plan->hide_threshold}, {"latency", &plan->latency_s},
                 {"simulated", &plan->simulated_s},         {"t_max", &plan->t_max_s},
                 {"balance_eta", &plan->balance_eta},       {"search_seconds", &plan->search.seconds}};
    for (int k = 0; k < 6; k++) HAPT_TRY(hapt_h5_read_attribute_real(file, at, reals[k].name, reals[k].value));
    HAPT_TRY(read_making(file, at, arena, plan));
    return read_newer_attributes(file, at, plan);
}

static enum hapt_status read_ints(struct hapt_h5 *file, const char *group, const char *name, int dims, int64_t *count,
                                  struct hapt_arena *arena, int **values)
{
    char path[PATH_MAX_CHARS];
    int64_t shape[2] = {*count, 2};
    void *data;
    HAPT_TRY(hapt_h5_read(file, join(path, group, name), HAPT_H5_I32, dims, shape, 2 * MAX_STAGES, arena, &data));
    *count = shape[0];
    *values = data;
    return HAPT_OK;
}

/* Reads the layouts of the stages; stages with the same number share one. */
static enum hapt_status read_layouts(struct hapt_h5 *file, const char *group, struct hapt_arena *arena,
                                     struct hapt_plan *plan)
{
    int *program;
    int64_t S = plan->stage_count;
    char path[PATH_MAX_CHARS];
    if (!hapt_h5_exists(file, join(path, group, "stage_program"))) return HAPT_OK;
    HAPT_TRY(read_ints(file, group, "stage_program", 1, &S, arena, &program));
    for (int i = 0; i < plan->stage_count; i++) {
        struct hapt_plan_stage *stage = &plan->stage[i];
        struct hapt_stage_layout *read = NULL;
        if (program[i] == 0) continue;
        if (program[i] < 0 || program[i] > HAPT_MAX_LAYOUTS)
            return damaged(file, "stage_program has an invalid program number");
        stage->layout.kind = HAPT_LAYOUT_PROGRAM;
        stage->layout.number = program[i];
        for (int before = 0; before < i && !stage->layout.program; before++)
            if (program[before] == program[i]) stage->layout.program = plan->stage[before].layout.program;
        if (stage->layout.program) continue;
        HAPT_TRY(hapt_stage_layout_read(file, group, program[i], arena, &read));
        stage->layout.program = read;
    }
    return HAPT_OK;
}

static enum hapt_status read_tables(struct hapt_h5 *file, const char *group, struct hapt_arena *arena,
                                    struct hapt_plan *plan)
{
    int64_t S = -1, names;
    int *layers, *ops, *submesh, *subcluster, *warmup, *tp = NULL;
    char path[PATH_MAX_CHARS];
    const char **name;
    void *data;
    HAPT_TRY(read_ints(file, group, "stage_layers", 2, &S, arena, &layers));
    HAPT_TRY(read_ints(file, group, "stage_ops", 2, &S, arena, &ops));
    HAPT_TRY(read_ints(file, group, "stage_submesh", 2, &S, arena, &submesh));
    HAPT_TRY(read_ints(file, group, "stage_subcluster", 1, &S, arena, &subcluster));
    HAPT_TRY(read_ints(file, group, "stage_warmup", 1, &S, arena, &warmup));
    if (hapt_h5_exists(file, join(path, group, "stage_tensor_parallel")))
        HAPT_TRY(read_ints(file, group, "stage_tensor_parallel", 1, &S, arena, &tp));
    HAPT_TRY(hapt_h5_read_strings(file, join(path, group, "stage_subcluster_name"), MAX_STAGES, arena, &names, &name));
    if (names != S) return damaged(file, "stage_subcluster_name and stage_layers differ in length");
    HAPT_TRY(hapt_plan_allot(plan, (int)S, arena));
    for (int i = 0; i < S; i++) {
        struct hapt_plan_stage *stage = &plan->stage[i];
        stage->first_layer = layers[2 * i];
        stage->end_layer = layers[2 * i + 1];
        stage->first_op = ops[2 * i];
        stage->end_op = ops[2 * i + 1];
        stage->warmup = warmup[i];
        stage->layout = hapt_layout_plain(tp ? tp[i] : 1);
        stage->submesh->nodes = submesh[2 * i];
        stage->submesh->devices_per_node = submesh[2 * i + 1];
        stage->submesh->subcluster[0] = subcluster[i];
        stage->submesh->part_name[0] = name[i];
        if (strlen(name[i]) >= sizeof stage->submesh->name) return damaged(file, "a subcluster's name is too long");
        snprintf(stage->submesh->name, sizeof stage->submesh->name, "%s", name[i]);
    }
    for (int column = 0; column < COLUMNS - (plan->exchange_s == 0); column++) {
        HAPT_TRY(
            hapt_h5_read(file, join(path, group, columns[column].name), HAPT_H5_F64, 1, &S, MAX_STAGES, arena, &data));
        for (int i = 0; i < S; i++) *column_of(&plan->stage[i], column) = ((double *)data)[i];
    }
    for (int i = 0; i < S; i++) { /* mixed stages have tables of their own */
        struct hapt_plan_stage *stage = &plan->stage[i];
        stage->part_parameter_bytes[0] = stage->parameter_bytes;
        stage->part_activation_bytes[0] = stage->activation_bytes;
        stage->submesh->device_memory_bytes[0] = stage->device_memory_bytes;
        stage->submesh->devices[0] = hapt_plan_submesh_size(stage->submesh);
    }
    return HAPT_OK;
}

/* Lets stages with the same stage_submesh_index share one submesh. */
static enum hapt_status read_sharing(struct hapt_h5 *file, const char *group, struct hapt_arena *arena,
                                     struct hapt_plan *plan)
{
    int *index;
    int64_t S = plan->stage_count;
    char path[PATH_MAX_CHARS];
    if (!hapt_h5_exists(file, join(path, group, "stage_submesh_index"))) return HAPT_OK;
    HAPT_TRY(read_ints(file, group, "stage_submesh_index", 1, &S, arena, &index));
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
        stage->submesh = first.submesh;
    }
    return HAPT_OK;
}

enum hapt_status hapt_plan_read(struct hapt_h5 *file, const char *group, struct hapt_arena *arena,
                                struct hapt_plan **plan)
{
    struct hapt_plan *read;
    HAPT_NEW(read, arena, 1);
    HAPT_TRY(read_attributes(file, root_of(group), arena, read));
    HAPT_TRY(read_tables(file, group, arena, read));
    HAPT_TRY(plan_read_mixed(file, group, arena, read));
    HAPT_TRY(read_layouts(file, group, arena, read));
    HAPT_TRY(read_sharing(file, group, arena, read));
    HAPT_TRY(hapt_plan_check(read));
    *plan = read;
    return HAPT_OK;
}

enum hapt_status hapt_plan_load(const char *path, struct hapt_arena *arena, struct hapt_plan **plan)
{
    struct hapt_h5 *file;
    HAPT_TRY(hapt_h5_open(path, FORMAT, VERSION, false, &file));
    const enum hapt_status status = hapt_plan_read(file, "", arena, plan);
    hapt_h5_close(file);
    return status;
}

enum hapt_status hapt_plan_precision(const char *path, enum hapt_precision *precision)
{
    char name[16];
    HAPT_TRY(hapt_h5_peek_text(path, FORMAT, VERSION, false, "precision", name, sizeof name));
    *precision = hapt_precision_find(name); /* an unknown name is reported when the whole file is read */
    return HAPT_OK;
}
