/* Mixed stages in plan files: one row per subcluster of each stage (plan_io.c). */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "plan_private.h"

enum { PATH_CHARS = 512, MAX_ROWS = 65536, MAX_DEVICES = 1 << 20 };

static const char *join(char path[PATH_CHARS], const char *group, const char *name)
{
    snprintf(path, PATH_CHARS, "%s/mixed_%s", group, name);
    return path;
}

struct rows {
    int count, device_count;
    int *stage, *subcluster, *devices; /* [count] */
    const char **name;
    double *bytes[3]; /* parameter, activation, device memory */
    double *ratio;    /* [device_count] */
};

static const char *const bytes_name[3] = {"parameter_bytes", "activation_bytes", "device_memory_bytes"};

static enum hapt_status make_rows(const struct hapt_plan *plan, struct hapt_arena *arena, struct rows *rows)
{
    *rows = (struct rows){0};
    for (int i = 0; i < plan->stage_count; i++) {
        const struct hapt_plan_submesh *submesh = plan->stage[i].submesh;
        if (submesh->part_count == 1) continue;
        rows->count += submesh->part_count;
        rows->device_count += submesh->devices_per_node;
    }
    HAPT_NEW(rows->stage, arena, rows->count);
    HAPT_NEW(rows->subcluster, arena, rows->count);
    HAPT_NEW(rows->devices, arena, rows->count);
    HAPT_NEW(rows->name, arena, rows->count);
    for (int b = 0; b < 3; b++) HAPT_NEW(rows->bytes[b], arena, rows->count);
    HAPT_NEW(rows->ratio, arena, rows->device_count);
    for (int i = 0, r = 0, device = 0; i < plan->stage_count; i++) {
        const struct hapt_plan_stage *stage = &plan->stage[i];
        const struct hapt_plan_submesh *submesh = stage->submesh;
        if (submesh->part_count == 1) continue;
        for (int k = 0; k < submesh->part_count; k++, r++) {
            rows->stage[r] = i;
            rows->subcluster[r] = submesh->subcluster[k];
            rows->devices[r] = submesh->devices[k];
            rows->name[r] = submesh->part_name[k];
            rows->bytes[0][r] = stage->part_parameter_bytes[k];
            rows->bytes[1][r] = stage->part_activation_bytes[k];
            rows->bytes[2][r] = submesh->device_memory_bytes[k];
        }
        for (int d = 0; d < submesh->devices_per_node; d++)
            rows->ratio[device++] = stage->layout.ratio ? stage->layout.ratio[d] : NAN;
    }
    return HAPT_OK;
}

enum hapt_status plan_write_mixed(struct hapt_h5 *file, const char *group, const struct hapt_plan *plan,
                                  struct hapt_arena *scratch)
{
    struct rows rows;
    char path[PATH_CHARS];
    HAPT_TRY(make_rows(plan, scratch, &rows));
    const int64_t R = rows.count, D = rows.device_count;
    HAPT_TRY(hapt_h5_write(file, join(path, group, "stage"), HAPT_H5_I32, 1, &R, rows.stage, ""));
    HAPT_TRY(hapt_h5_write(file, join(path, group, "subcluster"), HAPT_H5_I32, 1, &R, rows.subcluster, ""));
    HAPT_TRY(hapt_h5_write_strings(file, join(path, group, "subcluster_name"), R, rows.name));
    HAPT_TRY(hapt_h5_write(file, join(path, group, "devices"), HAPT_H5_I32, 1, &R, rows.devices, ""));
    for (int b = 0; b < 3; b++)
        HAPT_TRY(hapt_h5_write(file, join(path, group, bytes_name[b]), HAPT_H5_F64, 1, &R, rows.bytes[b], "byte"));
    return hapt_h5_write(file, join(path, group, "ratio"), HAPT_H5_F64, 1, &D, rows.ratio, "");
}

static enum hapt_status damaged(struct hapt_h5 *file, const char *what)
{
    return hapt_fail(HAPT_ERR_INPUT, "create the plan again with `hapt plan --output`", "%s: %s", hapt_h5_path(file),
                     what);
}

static enum hapt_status read_ints(struct hapt_h5 *file, const char *group, const char *name, int64_t *R,
                                  struct hapt_arena *arena, int **values)
{
    char path[PATH_CHARS];
    void *data;
    HAPT_TRY(hapt_h5_read(file, join(path, group, name), HAPT_H5_I32, 1, R, MAX_ROWS, arena, &data));
    *values = data;
    return HAPT_OK;
}

static enum hapt_status read_rows(struct hapt_h5 *file, const char *group, struct hapt_arena *arena, struct rows *rows)
{
    int64_t R = -1, D = -1, names, devices = 0;
    char path[PATH_CHARS];
    void *data;
    HAPT_TRY(read_ints(file, group, "stage", &R, arena, &rows->stage));
    HAPT_TRY(read_ints(file, group, "subcluster", &R, arena, &rows->subcluster));
    HAPT_TRY(read_ints(file, group, "devices", &R, arena, &rows->devices));
    HAPT_TRY(hapt_h5_read_strings(file, join(path, group, "subcluster_name"), MAX_ROWS, arena, &names, &rows->name));
    if (names != R) return damaged(file, "mixed_subcluster_name and mixed_stage differ in length");
    for (int b = 0; b < 3; b++) {
        HAPT_TRY(hapt_h5_read(file, join(path, group, bytes_name[b]), HAPT_H5_F64, 1, &R, MAX_ROWS, arena, &data));
        rows->bytes[b] = data;
    }
    HAPT_TRY(hapt_h5_read(file, join(path, group, "ratio"), HAPT_H5_F64, 1, &D, MAX_DEVICES, arena, &data));
    rows->ratio = data;
    rows->count = (int)R;
    rows->device_count = (int)D;
    for (int r = 0; r < rows->count; r++) {
        if (rows->devices[r] < 1 || rows->devices[r] > MAX_DEVICES)
            return damaged(file, "a mixed stage without devices");
        devices += rows->devices[r];
    }
    return devices == D ? HAPT_OK : damaged(file, "mixed_ratio does not have one value per device");
}

/* Rows [first, end), and the ratios from `device` on, form one stage. */
static enum hapt_status take_rows(struct hapt_h5 *file, const struct rows *rows, int first, int end, int device,
                                  struct hapt_plan_stage *stage)
{
    struct hapt_plan_submesh *submesh = stage->submesh;
    if (end - first < 2) return damaged(file, "a mixed stage of one subcluster");
    if (submesh->subcluster[0] != rows->subcluster[first] || stage->layout.tensor_parallel != 1)
        return damaged(file, "stage_subcluster or stage_tensor_parallel does not fit a mixed stage");
    submesh->part_count = end - first;
    submesh->subcluster = rows->subcluster + first;
    submesh->devices = rows->devices + first;
    submesh->part_name = rows->name + first;
    submesh->device_memory_bytes = rows->bytes[2] + first;
    stage->part_parameter_bytes = rows->bytes[0] + first;
    stage->part_activation_bytes = rows->bytes[1] + first;
    stage->layout.kind = HAPT_LAYOUT_ROWS;
    stage->layout.ratio = isnan(rows->ratio[device]) ? NULL : rows->ratio + device;
    return HAPT_OK;
}

enum hapt_status plan_read_mixed(struct hapt_h5 *file, const char *group, struct hapt_arena *arena,
                                 struct hapt_plan *plan)
{
    struct rows rows = {0};
    char path[PATH_CHARS];
    if (!hapt_h5_exists(file, join(path, group, "stage"))) return HAPT_OK;
    HAPT_TRY(read_rows(file, group, arena, &rows));
    for (int first = 0, end, device = 0, last = -1; first < rows.count; first = end) {
        const int i = rows.stage[first];
        int devices = 0;
        if (i <= last || i >= plan->stage_count) return damaged(file, "mixed_stage has an invalid or repeated stage");
        for (end = first; end < rows.count && rows.stage[end] == i; end++) devices += rows.devices[end];
        if (devices != plan->stage[i].submesh->devices_per_node)
            return damaged(file, "stage_submesh and mixed_devices of a mixed stage differ");
        HAPT_TRY(take_rows(file, &rows, first, end, device, &plan->stage[i]));
        device += devices;
        last = i;
    }
    return HAPT_OK;
}
