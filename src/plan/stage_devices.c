/* Mixed stages: their devices, and their allowed positions in the pipeline. */
#include "hapt/plan.h"

#include <stdio.h>
#include <string.h>

struct hapt_subclusters hapt_plan_stage_subclusters(const struct hapt_plan_stage *stage)
{
    if (stage->mixed) return (struct hapt_subclusters){stage->mixed->count, stage->mixed->cluster};
    return (struct hapt_subclusters){1, &stage->subcluster};
}

int hapt_plan_stage_devices(const struct hapt_plan_stage *stage, int subcluster)
{
    if (!stage->mixed) return stage->subcluster == subcluster ? stage->nodes * stage->devices_per_node : 0;
    for (int i = 0; i < stage->mixed->count; i++)
        if (stage->mixed->cluster[i] == subcluster) return stage->mixed->devices[i];
    return 0;
}

const char *hapt_plan_stage_submesh(const struct hapt_plan_stage *stage, char text[64])
{
    int length = 0;
    for (int i = 0; stage->mixed && i < stage->mixed->count && length < 48; i++)
        length += snprintf(text + length, (size_t)(64 - length), "%s%d", i ? "+" : "", stage->mixed->devices[i]);
    if (!stage->mixed) length = snprintf(text, 64, "%d x %d", stage->nodes, stage->devices_per_node);
    if (stage->tensor_parallel > 1) snprintf(text + length, (size_t)(64 - length), " tp%d", stage->tensor_parallel);
    if (stage->program > 0) snprintf(text + length, (size_t)(64 - length), " p%d", stage->program);
    return text;
}

const char *hapt_plan_stage_short(const struct hapt_plan_stage *stage, char text[64])
{
    if (stage->mixed) return hapt_plan_stage_submesh(stage, text);
    snprintf(text, 64, "%dx%d", stage->nodes, stage->devices_per_node);
    return text;
}

const char *hapt_plan_stage_text(const struct hapt_plan_stage *stage, char text[HAPT_PLAN_STAGE_CHARS])
{
    const struct hapt_plan_mixed *mixed = stage->mixed;
    int length = snprintf(text, HAPT_PLAN_STAGE_CHARS, "%d-%d@", stage->first_layer, stage->end_layer);
    if (!mixed)
        snprintf(text + length, (size_t)(HAPT_PLAN_STAGE_CHARS - length), "%s:%dx%d%c%d", stage->subcluster_name,
                 stage->nodes, stage->devices_per_node, stage->program > 0 ? 'p' : 't',
                 stage->program > 0 ? stage->program : stage->tensor_parallel);
    for (int k = 0; mixed && k < mixed->count && length < HAPT_PLAN_STAGE_CHARS; k++)
        length += snprintf(text + length, (size_t)(HAPT_PLAN_STAGE_CHARS - length), "%s%s:%d", k ? "+" : "",
                           mixed->name[k], mixed->devices[k]);
    if (mixed && length < HAPT_PLAN_STAGE_CHARS)
        snprintf(text + length, (size_t)(HAPT_PLAN_STAGE_CHARS - length), "p%d", stage->program);
    return text;
}

bool hapt_plan_same_devices(const struct hapt_plan_stage *a, const struct hapt_plan_stage *b)
{
    if (!a->mixed != !b->mixed || a->subcluster != b->subcluster || a->nodes != b->nodes ||
        a->devices_per_node != b->devices_per_node || a->tensor_parallel != b->tensor_parallel ||
        a->program != b->program)
        return false;
    if (!a->mixed) return true;
    const size_t bytes = (size_t)a->mixed->count * sizeof(int);
    return a->mixed->count == b->mixed->count && memcmp(a->mixed->cluster, b->mixed->cluster, bytes) == 0 &&
           memcmp(a->mixed->devices, b->mixed->devices, bytes) == 0;
}

int hapt_plan_first_mixed(const struct hapt_plan *plan)
{
    for (int i = 0; i < plan->stage_count; i++)
        if (plan->stage[i].mixed) return i;
    return -1;
}

void hapt_plan_stage_run(const struct hapt_profile *profile, const struct hapt_submesh *submesh,
                         struct hapt_plan_stage *stage)
{
    stage->tensor_parallel = submesh->tp;
    stage->program = submesh->program;
    stage->layout = submesh->program > 0 ? profile->layout[submesh->program - 1] : NULL;
}

enum hapt_status hapt_plan_stage_mix(const struct hapt_profile *profile, int group, struct hapt_arena *arena,
                                     struct hapt_plan_stage *stage)
{
    const struct hapt_profile_mixed *from = &profile->mixed[group];
    const int K = from->count;
    struct hapt_plan_mixed *made;
    int devices = 0;
    size_t length = 0;
    HAPT_NEW(made, arena, 1);
    *made = (struct hapt_plan_mixed){.count = K};
    HAPT_NEW(made->cluster, arena, K);
    HAPT_NEW(made->devices, arena, K);
    HAPT_NEW(made->name, arena, K);
    HAPT_NEW(made->parameter_bytes, arena, K);
    HAPT_NEW(made->activation_bytes, arena, K);
    HAPT_NEW(made->device_memory_bytes, arena, K);
    for (int i = 0; i < K; i++) {
        const char *name = profile->cluster[from->cluster[i]].name;
        made->cluster[i] = from->cluster[i];
        made->devices[i] = from->devices[i];
        made->name[i] = hapt_arena_strdup(arena, name);
        if (!made->name[i]) return HAPT_ERR_MEMORY;
        devices += from->devices[i];
        const size_t room = sizeof stage->subcluster_name - length;
        const int more = snprintf(stage->subcluster_name + length, room, "%s%s", i ? "+" : "", name);
        length += (size_t)more < room ? (size_t)more : room - 1;
    }
    if (from->ratio) {
        HAPT_NEW(made->ratio, arena, devices);
        memcpy(made->ratio, from->ratio, (size_t)devices * sizeof *made->ratio);
    }
    stage->mixed = made;
    stage->program = from->program;
    stage->layout = from->program > 0 ? profile->layout[from->program - 1] : NULL;
    stage->subcluster = made->cluster[0];
    stage->nodes = 1;
    stage->devices_per_node = devices;
    stage->tensor_parallel = 1;
    return HAPT_OK;
}

int hapt_plan_stage_mixed_group(const struct hapt_profile *profile, const struct hapt_plan_stage *stage)
{
    const struct hapt_plan_mixed *mixed = stage->mixed;
    for (int k = 0; k < profile->mixed_count; k++) {
        const struct hapt_profile_mixed *group = &profile->mixed[k];
        const size_t bytes = (size_t)mixed->count * sizeof(int);
        if (group->program == stage->program && group->count == mixed->count &&
            memcmp(group->cluster, mixed->cluster, bytes) == 0 && memcmp(group->devices, mixed->devices, bytes) == 0)
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
                             index, plan->stage[index].subcluster_name);
    if (used[0] && used[1])
        return MISPLACED("the mixed stage %d (%s) has stages of one of its subclusters both in front and behind", index,
                         plan->stage[index].subcluster_name);
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
                             plan->stage[i].subcluster_name, count[0] > 1 ? "in front of" : "behind");
    }
    return HAPT_OK;
}
