/* The devices of stages: building them, comparing them, and the allowed positions of mixed stages in the pipeline. */
#include "hapt/plan.h"

#include <stdio.h>
#include <string.h>

enum hapt_status hapt_plan_stage_parts(struct hapt_plan_stage *stage, int parts, struct hapt_arena *arena)
{
    struct hapt_plan_submesh *submesh = stage->submesh;
    HAPT_NEW(submesh->subcluster, arena, parts);
    HAPT_NEW(submesh->devices, arena, parts);
    HAPT_NEW(submesh->part_name, arena, parts);
    HAPT_NEW(submesh->device_memory_bytes, arena, parts);
    HAPT_NEW(stage->part_parameter_bytes, arena, parts);
    HAPT_NEW(stage->part_activation_bytes, arena, parts);
    for (int k = 0; k < parts; k++) submesh->part_name[k] = "";
    submesh->part_count = parts;
    return HAPT_OK;
}

enum hapt_status hapt_plan_allot(struct hapt_plan *plan, int stages, struct hapt_arena *arena)
{
    HAPT_NEW(plan->submesh, arena, stages);
    HAPT_NEW(plan->stage, arena, stages);
    plan->arena = arena;
    plan->stage_count = plan->submesh_count = stages;
    for (int i = 0; i < stages; i++) {
        plan->stage[i] = (struct hapt_plan_stage){.first_op = -1, .end_op = -1, .submesh = &plan->submesh[i]};
        HAPT_TRY(hapt_plan_stage_parts(&plan->stage[i], 1, arena));
    }
    return HAPT_OK;
}

void hapt_plan_submesh_set_name(struct hapt_plan_submesh *submesh)
{
    size_t length = 0;
    for (int k = 0; k < submesh->part_count; k++) {
        const size_t room = sizeof submesh->name - length;
        const int more = snprintf(submesh->name + length, room, "%s%s", k ? "+" : "", submesh->part_name[k]);
        length += (size_t)more < room ? (size_t)more : room - 1;
    }
}

struct hapt_subclusters hapt_plan_stage_subclusters(const struct hapt_plan_stage *stage)
{
    return (struct hapt_subclusters){stage->submesh->part_count, stage->submesh->subcluster};
}

int hapt_plan_stage_devices(const struct hapt_plan_stage *stage, int subcluster)
{
    const struct hapt_plan_submesh *submesh = stage->submesh;
    for (int k = 0; k < submesh->part_count; k++)
        if (submesh->subcluster[k] == subcluster)
            return submesh->part_count > 1 ? submesh->devices[k] : hapt_plan_submesh_size(submesh);
    return 0;
}

static int write_devices(const struct hapt_plan_submesh *submesh, const char *times, char text[64])
{
    int length = 0;
    if (submesh->part_count == 1) return snprintf(text, 64, "%d%s%d", submesh->nodes, times, submesh->devices_per_node);
    for (int k = 0; k < submesh->part_count && length < 48; k++)
        length += snprintf(text + length, (size_t)(64 - length), "%s%d", k ? "+" : "", submesh->devices[k]);
    return length;
}

static void write_layout(const struct hapt_layout *layout, char *text, int room)
{
    int length = 0;
    if (layout->kind == HAPT_LAYOUT_TENSOR) length = snprintf(text, (size_t)room, " tp%d", layout->tensor_parallel);
    if (layout->kind == HAPT_LAYOUT_PROGRAM) snprintf(text + length, (size_t)(room - length), " p%d", layout->number);
}

const char *hapt_plan_stage_submesh(const struct hapt_plan_stage *stage, char text[64])
{
    const int length = write_devices(stage->submesh, " x ", text);
    write_layout(&stage->layout, text + length, 64 - length);
    return text;
}

const char *hapt_plan_stage_short(const struct hapt_plan_stage *stage, const char *times, char text[64])
{
    if (hapt_plan_is_mixed(stage)) return hapt_plan_stage_submesh(stage, text);
    write_devices(stage->submesh, times, text);
    return text;
}

const char *hapt_plan_stage_title(const struct hapt_plan *plan, int stage, char text[HAPT_PLAN_STAGE_TITLE])
{
    const struct hapt_plan_stage *at = &plan->stage[stage];
    char submesh[64];
    snprintf(text, HAPT_PLAN_STAGE_TITLE, "stage %d (layers %d-%d on %s %s)", stage, at->first_layer, at->end_layer,
             at->submesh->name, hapt_plan_stage_short(at, " x ", submesh));
    return text;
}

const char *hapt_plan_stage_text(const struct hapt_plan_stage *stage, char text[HAPT_PLAN_STAGE_CHARS])
{
    const struct hapt_plan_submesh *submesh = stage->submesh;
    const struct hapt_layout *layout = &stage->layout;
    const size_t room = HAPT_PLAN_STAGE_CHARS;
    int length = snprintf(text, room, "%d-%d@", stage->first_layer, stage->end_layer);
    if (submesh->part_count == 1) {
        const bool program = layout->kind == HAPT_LAYOUT_PROGRAM;
        snprintf(text + length, room - (size_t)length, "%s:%dx%d%c%d", submesh->name, submesh->nodes,
                 submesh->devices_per_node, program ? 'p' : 't', program ? layout->number : layout->tensor_parallel);
        return text;
    }
    for (int k = 0; k < submesh->part_count && length < HAPT_PLAN_STAGE_CHARS; k++)
        length += snprintf(text + length, room - (size_t)length, "%s%s:%d", k ? "+" : "", submesh->part_name[k],
                           submesh->devices[k]);
    if (length < HAPT_PLAN_STAGE_CHARS) snprintf(text + length, room - (size_t)length, "p%d", layout->number);
    return text;
}

static bool same_parts(const struct hapt_plan_submesh *a, int count, const int *subcluster, const int *devices)
{
    const size_t bytes = (size_t)count * sizeof(int);
    return a->part_count == count && memcmp(a->subcluster, subcluster, bytes) == 0 &&
           (count == 1 || memcmp(a->devices, devices, bytes) == 0);
}

bool hapt_plan_submesh_fits(const struct hapt_plan *plan, const struct hapt_plan_submesh *submesh)
{
    double bytes = 0, largest = 0, largest_weight = 0, least = INFINITY;
    int slots = 0, weight_slots = 0, stages = 0;
    for (int i = 0; i < plan->stage_count; i++) {
        const struct hapt_plan_stage *stage = &plan->stage[i];
        if (stage->submesh != submesh) continue;
        if (!hapt_at_most(stage->memory_bytes, stage->device_memory_bytes)) return false;
        bytes += stage->parameter_bytes;
        slots += hapt_plan_stage_slots(stage);
        weight_slots += stage->weight_slots;
        largest_weight = fmax(largest_weight, stage->weight_slot_bytes);
        largest = fmax(largest, stage->activation_bytes);
        least = fmin(least, stage->device_memory_bytes);
        stages++;
    }
    if (submesh->slots > 0) slots = submesh->slots;
    return stages <= 1 || hapt_at_most(bytes + slots * largest + weight_slots * largest_weight, least);
}

bool hapt_plan_same_devices(const struct hapt_plan_stage *a, const struct hapt_plan_stage *b)
{
    const struct hapt_plan_submesh *other = b->submesh;
    return a->submesh->nodes == other->nodes && a->submesh->devices_per_node == other->devices_per_node &&
           a->layout.tensor_parallel == b->layout.tensor_parallel && a->layout.number == b->layout.number &&
           same_parts(a->submesh, other->part_count, other->subcluster, other->devices);
}

int hapt_plan_first_mixed(const struct hapt_plan *plan)
{
    for (int i = 0; i < plan->stage_count; i++)
        if (hapt_plan_is_mixed(&plan->stage[i])) return i;
    return -1;
}

void hapt_plan_stage_run(const struct hapt_profile *profile, int c, const struct hapt_submesh *submesh,
                         struct hapt_plan_stage *stage)
{
    stage->submesh->subcluster[0] = c;
    stage->submesh->nodes = submesh->n;
    stage->submesh->devices_per_node = submesh->m;
    stage->submesh->devices[0] = submesh->n * submesh->m;
    stage->layout = hapt_layout_plain(submesh->tp);
    if (submesh->program > 0)
        stage->layout = (struct hapt_layout){.kind = HAPT_LAYOUT_PROGRAM,
                                             .tensor_parallel = submesh->tp,
                                             .number = submesh->program,
                                             .program = profile->layout[submesh->program - 1]};
    stage->layout.recompute = submesh->recompute;
    stage->layout.weights_at = submesh->weights_at;
}

bool hapt_plan_stage_runs(const struct hapt_plan_stage *stage, const struct hapt_submesh *submesh)
{
    return submesh->n == stage->submesh->nodes && submesh->m == stage->submesh->devices_per_node &&
           submesh->tp == stage->layout.tensor_parallel && submesh->program == stage->layout.number &&
           (stage->layout.recompute < 0 || submesh->recompute == stage->layout.recompute) &&
           (stage->layout.weights_at < 0 || submesh->weights_at == stage->layout.weights_at);
}

enum hapt_status hapt_plan_stage_mix(const struct hapt_profile *profile, int group, struct hapt_arena *arena,
                                     struct hapt_plan_stage *stage)
{
    const struct hapt_profile_mixed *from = &profile->mixed[group];
    struct hapt_plan_submesh *submesh = stage->submesh;
    int devices = 0;
    HAPT_TRY(hapt_plan_stage_parts(stage, from->count, arena));
    for (int k = 0; k < from->count; k++) {
        submesh->subcluster[k] = from->cluster[k];
        submesh->devices[k] = from->devices[k];
        submesh->part_name[k] = hapt_arena_strdup(arena, profile->cluster[from->cluster[k]].name);
        if (!submesh->part_name[k]) return HAPT_ERR_MEMORY;
        devices += from->devices[k];
    }
    hapt_plan_submesh_set_name(submesh);
    submesh->nodes = 1;
    submesh->devices_per_node = devices;
    stage->layout = (struct hapt_layout){.kind = HAPT_LAYOUT_ROWS, .tensor_parallel = 1};
    if (from->program > 0) {
        stage->layout.kind = HAPT_LAYOUT_PROGRAM;
        stage->layout.number = from->program;
        stage->layout.program = profile->layout[from->program - 1];
    }
    if (from->ratio) {
        double *ratio;
        HAPT_NEW(ratio, arena, devices);
        memcpy(ratio, from->ratio, (size_t)devices * sizeof *ratio);
        stage->layout.ratio = ratio;
    }
    return HAPT_OK;
}

int hapt_plan_stage_mixed_group(const struct hapt_profile *profile, const struct hapt_plan_stage *stage)
{
    for (int k = 0; k < profile->mixed_count; k++) {
        const struct hapt_profile_mixed *group = &profile->mixed[k];
        if (group->program == stage->layout.number &&
            same_parts(stage->submesh, group->count, group->cluster, group->devices))
            return k;
    }
    return -1;
}

#define MISPLACED(...)                                                                                           \
    hapt_fail(HAPT_ERR_INPUT, "a mixed stage stands between the stages of two of its subclusters, or at an end", \
              __VA_ARGS__)

/* For one subcluster of the mixed stage at `index`: do stages in front and behind use it, and are they neighbours? */
static enum hapt_status check_use(const struct hapt_plan *plan, int index, int c, bool used[2])
{
    int nearest[2] = {index, index}; /* first and last stage of the unbroken run that uses it */
    while (nearest[0] > 0 && hapt_plan_stage_devices(&plan->stage[nearest[0] - 1], c) > 0) nearest[0]--;
    while (nearest[1] < plan->stage_count - 1 && hapt_plan_stage_devices(&plan->stage[nearest[1] + 1], c) > 0)
        nearest[1]++;
    used[0] = nearest[0] < index;
    used[1] = nearest[1] > index;
    for (int i = 0; i < plan->stage_count; i++)
        if (hapt_plan_stage_devices(&plan->stage[i], c) > 0 && (i < nearest[0] || i > nearest[1]))
            return MISPLACED("stage %d uses a subcluster of the mixed stage %d (%s), but stages between them do not", i,
                             index, plan->stage[index].submesh->name);
    if (used[0] && used[1])
        return MISPLACED("the mixed stage %d (%s) has stages of one of its subclusters both in front and behind", index,
                         plan->stage[index].submesh->name);
    return HAPT_OK;
}

enum hapt_status hapt_plan_check_mixed_order(const struct hapt_plan *plan)
{
    for (int i = 0; i < plan->stage_count; i++) {
        const struct hapt_subclusters mine = hapt_plan_stage_subclusters(&plan->stage[i]);
        int count[2] = {0, 0};
        if (mine.count == 1) continue;
        for (int k = 0; k < mine.count; k++) {
            bool used[2];
            HAPT_TRY(check_use(plan, i, mine.index[k], used));
            for (int side = 0; side < 2; side++) count[side] += used[side];
        }
        if (count[0] > 1 || count[1] > 1)
            return MISPLACED("the mixed stage %d (%s) shares two subclusters with the stages %s it", i,
                             plan->stage[i].submesh->name, count[0] > 1 ? "in front of" : "behind");
    }
    return HAPT_OK;
}
