/* Assigns devices to stages: whole nodes first, then parts of nodes in descending size: powers of two always pack. */
#include "hapt/plan.h"

#include <string.h>

#define HINT "plan for this cluster (hapt plan); to continue a run on other devices: hapt --resume yes --replan"

static enum hapt_status check_mixed(const struct hapt_plan_stage *stage, int i, const struct hapt_cluster *cluster)
{
    const struct hapt_plan_mixed *mixed = stage->mixed;
    for (int k = 0; k < mixed->count; k++)
        if (mixed->cluster[k] >= cluster->count ||
            strcmp(cluster->subcluster[mixed->cluster[k]].name, mixed->name[k]) != 0)
            return hapt_fail(HAPT_ERR_INPUT, HINT, "stage %d uses subcluster %d, %s, which this cluster does not have",
                             i, mixed->cluster[k], mixed->name[k]);
    return HAPT_OK;
}

static enum hapt_status check_assignment(const struct hapt_plan *plan, const struct hapt_cluster *cluster)
{
    for (int i = 0; i < plan->stage_count; i++) {
        const struct hapt_plan_stage *stage = &plan->stage[i];
        if (stage->mixed) {
            HAPT_TRY(check_mixed(stage, i, cluster));
            continue;
        }
        if (stage->subcluster < 0 || stage->subcluster >= cluster->count)
            return hapt_fail(HAPT_ERR_INPUT, HINT, "stage %d uses subcluster %d; the cluster has %d", i,
                             stage->subcluster, cluster->count);
        const struct hapt_subcluster *subcluster = &cluster->subcluster[stage->subcluster];
        if (strcmp(subcluster->name, stage->subcluster_name) != 0)
            return hapt_fail(HAPT_ERR_INPUT, HINT, "stage %d uses subcluster %s, but it is called %s here", i,
                             stage->subcluster_name, subcluster->name);
        const bool whole = stage->devices_per_node == subcluster->devices_per_node && stage->nodes <= subcluster->nodes;
        const bool part = stage->nodes == 1 && stage->devices_per_node < subcluster->devices_per_node &&
                          subcluster->devices_per_node % stage->devices_per_node == 0;
        if (stage->nodes < 1 || stage->devices_per_node < 1 || !(whole || part))
            return hapt_fail(HAPT_ERR_INPUT, HINT, "stage %d cannot use %d x %d devices of subcluster %s (%d x %d)", i,
                             stage->nodes, stage->devices_per_node, subcluster->name, subcluster->nodes,
                             subcluster->devices_per_node);
    }
    return HAPT_OK;
}

/* The largest stage size below `below` in a subcluster. Stages take devices by descending size; ties in plan order. */
static int largest_below(const struct hapt_plan *plan, int subcluster, int below)
{
    int largest = 0;
    for (int i = 0; i < plan->stage_count; i++) {
        const int size = plan->stage[i].nodes * plan->stage[i].devices_per_node;
        if (plan->stage[i].mixed || plan->stage[i].subcluster != subcluster) continue;
        if (size < below && size > largest) largest = size;
    }
    return largest;
}

/* The first device of subcluster c for every stage that uses it, in first[stage_count]. Mixed stages take the rest:
 * they accept any number of devices, on as few nodes as remain. */
static enum hapt_status assign_in(const struct hapt_plan *plan, const struct hapt_cluster *cluster, int c, int *first)
{
    const int devices = cluster->subcluster[c].nodes * cluster->subcluster[c].devices_per_node;
    int next = 0;
    for (int size = largest_below(plan, c, devices + 1); size > 0; size = largest_below(plan, c, size)) {
        for (int i = 0; i < plan->stage_count; i++) {
            const struct hapt_plan_stage *stage = &plan->stage[i];
            if (stage->mixed || stage->subcluster != c || stage->nodes * stage->devices_per_node != size) continue;
            first[i] = next;
            next += size;
        }
    }
    for (int i = 0; i < plan->stage_count; i++) {
        const int size = plan->stage[i].mixed ? hapt_plan_stage_devices(&plan->stage[i], c) : 0;
        if (size == 0) continue;
        first[i] = next;
        next += size;
    }
    if (next <= devices) return HAPT_OK;
    return hapt_fail(HAPT_ERR_INPUT, HINT, "the stages need %d devices, there are %d in subcluster %s", next, devices,
                     cluster->subcluster[c].name);
}

enum hapt_status hapt_plan_assign_devices(const struct hapt_plan *plan, const struct hapt_cluster *cluster,
                                          int *first_device)
{
    struct hapt_arena scratch;
    int *first;
    HAPT_TRY(check_assignment(plan, cluster));
    hapt_arena_init(&scratch);
    first = hapt_arena_alloc(&scratch, (size_t)plan->stage_count, sizeof *first);
    enum hapt_status status = first ? HAPT_OK : HAPT_ERR_MEMORY;
    for (int c = 0; c < cluster->count && status == HAPT_OK; c++) {
        status = assign_in(plan, cluster, c, first);
        for (int i = 0; i < plan->stage_count && status == HAPT_OK; i++)
            if (plan->stage[i].subcluster == c) first_device[i] = first[i];
    }
    hapt_arena_release(&scratch);
    return status;
}

enum hapt_status hapt_plan_ranks(const struct hapt_plan *plan, const struct hapt_cluster *cluster, int stage, int *rank)
{
    const struct hapt_subclusters mine = hapt_plan_stage_subclusters(&plan->stage[stage]);
    struct hapt_arena scratch;
    int *first, count = 0;
    HAPT_TRY(check_assignment(plan, cluster));
    hapt_arena_init(&scratch);
    first = hapt_arena_alloc(&scratch, (size_t)plan->stage_count, sizeof *first);
    enum hapt_status status = first ? HAPT_OK : HAPT_ERR_MEMORY;
    for (int k = 0; k < mine.count && status == HAPT_OK; k++) {
        const int c = mine.index[k];
        HAPT_ASSERT(cluster->subcluster[c].ranks);
        status = assign_in(plan, cluster, c, first);
        for (int d = 0; status == HAPT_OK && d < hapt_plan_stage_devices(&plan->stage[stage], c); d++)
            rank[count++] = cluster->subcluster[c].ranks[first[stage] + d];
    }
    hapt_arena_release(&scratch);
    return status;
}
