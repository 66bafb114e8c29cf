/* Assigns devices to stages: whole nodes first, then parts of nodes in descending size: powers of two always pack. */
#include "hapt/plan.h"

#include <string.h>

#define HINT                                                                                                      \
    "plan for this cluster (hapt plan), then give --plan; to continue a run on other devices: hapt --resume yes " \
    "--replan"

static enum hapt_status check_mixed(const struct hapt_plan_submesh *submesh, int i, const struct hapt_cluster *cluster)
{
    for (int k = 0; k < submesh->part_count; k++)
        if (submesh->subcluster[k] >= cluster->count ||
            strcmp(cluster->subcluster[submesh->subcluster[k]].name, submesh->part_name[k]) != 0)
            return hapt_fail(HAPT_ERR_INPUT, HINT, "stage %d uses subcluster %d, %s, which this cluster does not have",
                             i, submesh->subcluster[k], submesh->part_name[k]);
    return HAPT_OK;
}

static enum hapt_status check_alone(const struct hapt_plan_submesh *submesh, int i, const struct hapt_cluster *cluster)
{
    const int c = submesh->subcluster[0], n = submesh->nodes, m = submesh->devices_per_node;
    if (c < 0 || c >= cluster->count)
        return hapt_fail(HAPT_ERR_INPUT, HINT, "stage %d uses subcluster %d; the cluster has %d", i, c, cluster->count);
    const struct hapt_subcluster *subcluster = &cluster->subcluster[c];
    if (strcmp(subcluster->name, submesh->name) != 0)
        return hapt_fail(HAPT_ERR_INPUT, HINT, "stage %d uses subcluster %s, but it is called %s here", i,
                         submesh->name, subcluster->name);
    const bool whole = m == subcluster->devices_per_node && n <= subcluster->nodes;
    const bool part = n == 1 && m < subcluster->devices_per_node && subcluster->devices_per_node % m == 0;
    if (n < 1 || m < 1 || !(whole || part))
        return hapt_fail(HAPT_ERR_INPUT, HINT, "stage %d cannot use %d x %d devices of subcluster %s (%d x %d)", i, n,
                         m, subcluster->name, subcluster->nodes, subcluster->devices_per_node);
    return HAPT_OK;
}

static enum hapt_status check_assignment(const struct hapt_plan *plan, const struct hapt_cluster *cluster)
{
    for (int i = 0; i < plan->stage_count; i++) {
        const struct hapt_plan_submesh *submesh = plan->stage[i].submesh;
        HAPT_TRY(submesh->part_count > 1 ? check_mixed(submesh, i, cluster) : check_alone(submesh, i, cluster));
    }
    return HAPT_OK;
}

/* The size of a submesh of subcluster c alone; 0: it is mixed or of another subcluster. */
static int size_alone(const struct hapt_plan_submesh *submesh, int c)
{
    return submesh->part_count == 1 && submesh->subcluster[0] == c ? hapt_plan_submesh_size(submesh) : 0;
}

/* The largest submesh size below `below` in a subcluster. Submeshes take devices by descending size; ties in plan
 * order. */
static int largest_below(const struct hapt_plan *plan, int subcluster, int below)
{
    int largest = 0;
    for (int i = 0; i < plan->submesh_count; i++) {
        const int size = size_alone(&plan->submesh[i], subcluster);
        if (size < below && size > largest) largest = size;
    }
    return largest;
}

/* The first device of subcluster c for every submesh that uses it, in first[submesh_count]. Mixed ones take the rest:
 * they accept any number of devices, on as few nodes as remain. */
static enum hapt_status assign_in(const struct hapt_plan *plan, const struct hapt_cluster *cluster, int c, int *first)
{
    const int devices = cluster->subcluster[c].nodes * cluster->subcluster[c].devices_per_node;
    int next = 0;
    for (int size = largest_below(plan, c, devices + 1); size > 0; size = largest_below(plan, c, size)) {
        for (int i = 0; i < plan->submesh_count; i++) {
            if (size_alone(&plan->submesh[i], c) != size) continue;
            first[i] = next;
            next += size;
        }
    }
    for (int i = 0; i < plan->submesh_count; i++) {
        const struct hapt_plan_submesh *submesh = &plan->submesh[i];
        for (int k = 0; submesh->part_count > 1 && k < submesh->part_count; k++) {
            if (submesh->subcluster[k] != c) continue;
            first[i] = next;
            next += submesh->devices[k];
        }
    }
    if (next <= devices) return HAPT_OK;
    return hapt_fail(HAPT_ERR_INPUT, HINT, "the stages need %d devices, there are %d in subcluster %s", next, devices,
                     cluster->subcluster[c].name);
}

enum hapt_status hapt_plan_ranks(const struct hapt_plan *plan, const struct hapt_cluster *cluster, int stage, int *rank)
{
    const struct hapt_plan_submesh *submesh = plan->stage[stage].submesh;
    struct hapt_arena scratch;
    int *first, count = 0;
    HAPT_TRY(check_assignment(plan, cluster));
    hapt_arena_init(&scratch);
    first = hapt_arena_alloc(&scratch, (size_t)plan->submesh_count, sizeof *first);
    enum hapt_status status = first ? HAPT_OK : HAPT_ERR_MEMORY;
    for (int k = 0; k < submesh->part_count && status == HAPT_OK; k++) {
        const int c = submesh->subcluster[k], devices = hapt_plan_stage_devices(&plan->stage[stage], c);
        HAPT_ASSERT(cluster->subcluster[c].ranks);
        status = assign_in(plan, cluster, c, first);
        for (int d = 0; status == HAPT_OK && d < devices; d++)
            rank[count++] = cluster->subcluster[c].ranks[first[submesh - plan->submesh] + d];
    }
    hapt_arena_release(&scratch);
    return status;
}
