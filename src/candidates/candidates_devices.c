/* Submeshes of a subcluster and speeds of its devices. */
#include "hapt/candidates.h"
#include "hapt/efficiency.h"
#include "hapt/profile.h"

int hapt_candidates_submeshes(const struct hapt_subcluster *subcluster, struct hapt_submesh *submesh)
{
    return hapt_profile_submeshes(subcluster->nodes, subcluster->devices_per_node, submesh);
}

double hapt_candidates_device_speed(const struct hapt_candidates *candidates, int subcluster)
{
    const struct hapt_device_spec *device = &candidates->cluster->subcluster[subcluster].device;
    const double flops = hapt_roofline_peak_flops(device, candidates->model->dtype);
    return flops / (device->slowdown >= 1 ? device->slowdown : 1);
}
