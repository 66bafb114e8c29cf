/* Layouts in files. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "hapt/layout.h"

enum { COLUMNS = 17, MAX_INSTRUCTIONS = 1 << 22, MAX_RATIOS = 4096, MAX_RANKS = 65536, MAX_BLOCKS = 1 << 20 };
#define PATH_CHARS 640
#define DAMAGED "make the profile or the plan again"

static const char *path_of(char path[PATH_CHARS], const char *group, int k, const char *name)
{
    snprintf(path, PATH_CHARS, "%s/program_%d%s%s", group, k, *name ? "/" : "", name);
    return path;
}

static const char *table_of(char path[PATH_CHARS], const char *group, int k, int axis, const char *what)
{
    char name[64];
    snprintf(name, sizeof name, "axis_%d_%s", axis, what);
    return path_of(path, group, k, name);
}

static void flatten(const struct hapt_axis_instruction *from, int32_t *row)
{
    const struct hapt_property property[2] = {from->from, from->to};
    const bool computes = from->op >= 0;
    const struct hapt_cut cut = computes ? from->cut : (struct hapt_cut){.letter = HAPT_CUT_REPLICATED};
    int at = 0;
    row[at++] = computes ? from->op : -1;
    row[at++] = cut.letter, row[at++] = cut.blocks, row[at++] = (int32_t)cut.unit, row[at++] = cut.ratio;
    row[at++] = computes ? -1 : from->tensor, row[at++] = computes ? HAPT_COLLECTIVE_NONE : (int)from->kind;
    for (int p = 0; p < 2; p++) {
        const struct hapt_property its =
            computes ? (struct hapt_property){.kind = HAPT_PROPERTY_REPLICATED} : property[p];
        row[at++] = (int)its.kind, row[at++] = its.dim, row[at++] = its.blocks, row[at++] = (int32_t)its.unit,
        row[at++] = its.ratio;
    }
    HAPT_ASSERT(at == COLUMNS);
}

static enum hapt_status write_axis(struct hapt_h5 *file, const char *group, int k, int axis,
                                   const struct hapt_stage_layout *layout, struct hapt_arena *scratch)
{
    const struct hapt_axis_program *program = layout->program[axis];
    const struct hapt_axis *its = &layout->axis[axis];
    char path[PATH_CHARS];
    int32_t *table;
    if (!program) return HAPT_OK;
    const int64_t shape[2] = {program->count, COLUMNS}, ratios[2] = {its->ratio_count, its->size};
    HAPT_NEW(table, scratch, (size_t)program->count * COLUMNS);
    for (int i = 0; i < program->count; i++) flatten(&program->instruction[i], &table[i * COLUMNS]);
    HAPT_TRY(hapt_h5_write(file, table_of(path, group, k, axis, "instructions"), HAPT_H5_I32, 2, shape, table, ""));
    if (!its->ratio || its->ratio_count < 1) return HAPT_OK;
    return hapt_h5_write(file, table_of(path, group, k, axis, "ratio"), HAPT_H5_F64, 2, ratios, its->ratio, "");
}

enum hapt_status hapt_stage_layout_write(struct hapt_h5 *file, const char *group, int k,
                                         const struct hapt_stage_layout *layout)
{
    char path[PATH_CHARS];
    const int sizes[HAPT_MESH_AXES] = {layout->axis[0].size, layout->axis[1].size};
    struct hapt_arena scratch;
    hapt_arena_init(&scratch);
    enum hapt_status status = HAPT_OK;
    for (int axis = 0; axis < HAPT_MESH_AXES && status == HAPT_OK; axis++)
        status = write_axis(file, group, k, axis, layout, &scratch);
    hapt_arena_release(&scratch);
    HAPT_TRY(status);
    HAPT_TRY(hapt_h5_write_attribute_text(file, path_of(path, group, k, ""), "name", layout->name));
    return hapt_h5_write_attribute_ints(file, path, "axes", HAPT_MESH_AXES, sizes);
}

bool hapt_stage_layout_exists(struct hapt_h5 *file, const char *group, int k)
{
    char path[PATH_CHARS];
    return hapt_h5_exists(file, path_of(path, group, k, ""));
}

static bool read_property(const int32_t *row, int ratios, struct hapt_property *property)
{
    if (row[0] < 0 || row[0] > HAPT_PROPERTY_PARTIAL || row[1] < 0 || row[1] >= HAPT_MAX_DIMS) return false;
    if (row[2] < 0 || row[2] > MAX_BLOCKS || row[3] < 0 || row[4] < 0 || row[4] >= ratios) return false;
    *property = (struct hapt_property){(enum hapt_property_kind)row[0], row[1], row[2], row[3], row[4]};
    return true;
}

/* True if a row can be an instruction of some graph. */
static bool read_row(const int32_t *row, int ratios, struct hapt_axis_instruction *instruction)
{
    const bool letter = row[1] == HAPT_CUT_REPLICATED || row[1] == HAPT_CUT_PARTIAL || (row[1] > ' ' && row[1] < 127);
    if (row[0] < -1 || !letter || row[2] < 0 || row[2] > MAX_BLOCKS || row[3] < 0 || row[4] < 0 || row[4] >= ratios)
        return false;
    const bool computes = row[0] >= 0;
    if (!computes && (row[5] < 0 || row[6] <= HAPT_COLLECTIVE_NONE || row[6] >= HAPT_COLLECTIVE_COUNT)) return false;
    *instruction =
        (struct hapt_axis_instruction){.op = row[0],
                                       .cut = {(char)row[1], row[2], row[3], row[4]},
                                       .tensor = computes ? -1 : row[5],
                                       .kind = computes ? HAPT_COLLECTIVE_NONE : (enum hapt_collective_kind)row[6]};
    return read_property(&row[7], ratios, &instruction->from) && read_property(&row[12], ratios, &instruction->to);
}

static enum hapt_status damaged(struct hapt_h5 *file, int k, const char *what)
{
    return hapt_fail(HAPT_ERR_INPUT, DAMAGED, "%s: program_%d: %s", hapt_h5_path(file), k, what);
}

static enum hapt_status read_ratios(struct hapt_h5 *file, const char *path, int k, struct hapt_arena *arena,
                                    struct hapt_axis *axis)
{
    int64_t shape[2] = {-1, axis->size};
    void *data;
    if (!hapt_h5_exists(file, path)) return HAPT_OK;
    HAPT_TRY(hapt_h5_read(file, path, HAPT_H5_F64, 2, shape, (int64_t)MAX_RATIOS * 64, arena, &data));
    if (shape[0] < 1 || shape[0] > MAX_RATIOS) return damaged(file, k, "an axis has no ratios, or too many");
    axis->ratio = data;
    axis->ratio_count = (int)shape[0];
    for (int row = 0; row < axis->ratio_count; row++) {
        double sum = 0;
        for (int rank = 0; rank < axis->size; rank++) {
            const double ratio = axis->ratio[row * axis->size + rank];
            if (!(ratio >= 0 && ratio <= 1 + 1e-9)) return damaged(file, k, "a ratio is outside 0 to 1");
            sum += ratio;
        }
        if (!(fabs(sum - 1) <= 1e-6)) return damaged(file, k, "ratios do not add up to 1");
    }
    return HAPT_OK;
}

static enum hapt_status read_axis(struct hapt_h5 *file, const char *group, int k, int axis, struct hapt_arena *arena,
                                  struct hapt_stage_layout *layout)
{
    char path[PATH_CHARS];
    int64_t shape[2] = {-1, COLUMNS};
    struct hapt_axis_program *program;
    void *data;
    if (layout->axis[axis].size == 1) return HAPT_OK;
    HAPT_TRY(read_ratios(file, table_of(path, group, k, axis, "ratio"), k, arena, &layout->axis[axis]));
    HAPT_TRY(hapt_h5_read(file, table_of(path, group, k, axis, "instructions"), HAPT_H5_I32, 2, shape,
                          (int64_t)MAX_INSTRUCTIONS * COLUMNS, arena, &data));
    const int32_t *table = data;
    const int ratios = layout->axis[axis].ratio_count > 0 ? layout->axis[axis].ratio_count : 1;
    HAPT_NEW(program, arena, 1);
    program->count = (int)shape[0];
    HAPT_NEW(program->instruction, arena, program->count);
    for (int i = 0; i < program->count; i++)
        if (!read_row(&table[(size_t)i * COLUMNS], ratios, &program->instruction[i]))
            return hapt_fail(HAPT_ERR_INPUT, DAMAGED, "%s: row %d of %s is not an instruction", hapt_h5_path(file), i,
                             path);
    layout->program[axis] = program;
    return HAPT_OK;
}

enum hapt_status hapt_stage_layout_read(struct hapt_h5 *file, const char *group, int k, struct hapt_arena *arena,
                                        struct hapt_stage_layout **layout)
{
    char path[PATH_CHARS];
    struct hapt_stage_layout *made;
    int sizes[HAPT_MESH_AXES], count;
    const char *name;
    HAPT_NEW(made, arena, 1);
    path_of(path, group, k, "");
    HAPT_TRY(hapt_h5_read_attribute_ints(file, path, "axes", HAPT_MESH_AXES, &count, sizes));
    if (count != HAPT_MESH_AXES || sizes[0] < 1 || sizes[1] < 1 || sizes[0] > MAX_RANKS / sizes[1])
        return damaged(file, k, "axes must be two numbers of ranks");
    HAPT_TRY(hapt_h5_read_attribute_text(file, path, "name", arena, &name));
    if (strlen(name) >= sizeof made->name) return damaged(file, k, "its name is too long");
    snprintf(made->name, sizeof made->name, "%s", name);
    for (int axis = 0; axis < HAPT_MESH_AXES; axis++) {
        made->axis[axis] = (struct hapt_axis){.size = sizes[axis]};
        HAPT_TRY(read_axis(file, group, k, axis, arena, made));
    }
    *layout = made;
    return HAPT_OK;
}
