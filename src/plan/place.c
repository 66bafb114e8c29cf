/* From stages to devices: whole nodes first, then parts of nodes by falling size; powers of two then always pack. */
#include "hapt/plan.h"

#include <string.h>

static enum hapt_status check_place(const struct hapt_plan *plan, const struct hapt_cluster *cluster)
{
    for (int i = 0; i < plan->stage_count; i++) {
        const struct hapt_plan_stage *stage = &plan->stage[i];
        if (stage->subcluster < 0 || stage->subcluster >= cluster->count)
            return hapt_fail(HAPT_ERR_INPUT, "plan for this cluster",
                             "stage %d lies in subcluster %d; the cluster has %d", i, stage->subcluster,
                             cluster->count);
        const struct hapt_subcluster *subcluster = &cluster->subcluster[stage->subcluster];
        if (strcmp(subcluster->name, stage->subcluster_name) != 0)
            return hapt_fail(HAPT_ERR_INPUT, "plan for this cluster",
                             "stage %d lies in subcluster %s, which is %s here", i, stage->subcluster_name,
                             subcluster->name);
        const bool whole = stage->devices_per_node == subcluster->devices_per_node && stage->nodes <= subcluster->nodes;
        const bool part = stage->nodes == 1 && stage->devices_per_node < subcluster->devices_per_node &&
                          subcluster->devices_per_node % stage->devices_per_node == 0;
        if (stage->nodes < 1 || stage->devices_per_node < 1 || !(whole || part))
            return hapt_fail(HAPT_ERR_INPUT, "plan for this cluster",
                             "stage %d wants %d x %d devices of subcluster %s (%d x %d)", i, stage->nodes,
                             stage->devices_per_node, subcluster->name, subcluster->nodes,
                             subcluster->devices_per_node);
    }
    return HAPT_OK;
}

/* Devices in the order in which stages take them: by falling size, in plan order among equals. */
static int largest_below(const struct hapt_plan *plan, int subcluster, int below)
{
    int largest = 0;
    for (int i = 0; i < plan->stage_count; i++) {
        const int size = plan->stage[i].nodes * plan->stage[i].devices_per_node;
        if (plan->stage[i].subcluster == subcluster && size < below && size > largest) largest = size;
    }
    return largest;
}

enum hapt_status hapt_plan_place(const struct hapt_plan *plan, const struct hapt_cluster *cluster, int *first_device)
{
    HAPT_TRY(check_place(plan, cluster));
    for (int c = 0; c < cluster->count; c++) {
        const int devices = cluster->subcluster[c].nodes * cluster->subcluster[c].devices_per_node;
        int next = 0;
        for (int size = largest_below(plan, c, devices + 1); size > 0; size = largest_below(plan, c, size)) {
            for (int i = 0; i < plan->stage_count; i++) {
                const struct hapt_plan_stage *stage = &plan->stage[i];
                if (stage->subcluster != c || stage->nodes * stage->devices_per_node != size) continue;
                first_device[i] = next;
                next += size;
            }
        }
        if (next > devices)
            return hapt_fail(HAPT_ERR_INPUT, "plan for this cluster",
                             "the stages take %d of the %d devices of subcluster %s", next, devices,
                             cluster->subcluster[c].name);
    }
    return HAPT_OK;
}
