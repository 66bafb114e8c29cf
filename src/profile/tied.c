/* Parameters that two stages hold: the cost of exchanging their gradients, and the part of it in a candidate's
 * step_time. */
#include <math.h>

#include "hapt/profile.h"
#include "profile_private.h"

enum hapt_status hapt_profile_tied_bytes(const struct hapt_graph *graph, const struct hapt_layers *layers,
                                         struct hapt_arena *result, struct hapt_arena *scratch, double **tied)
{
    int *first, *last; /* [tensor] first and last forward operator that reads it; first counts from 1, 0: none */
    double *bytes;     /* [forward operator] across the boundary before it */
    bool any = false;
    HAPT_NEW(first, scratch, graph->tensor_count);
    HAPT_NEW(last, scratch, graph->tensor_count);
    HAPT_NEW(bytes, scratch, graph->forward_count + 1);
    for (int o = 0; o < graph->forward_count; o++) {
        for (int i = 0; i < graph->op[o].input_count; i++) {
            const int t = graph->op[o].input[i];
            if (t < 0) continue;
            if (!first[t]) first[t] = o + 1;
            last[t] = o;
        }
    }
    for (int t = 0; t < graph->tensor_count; t++) {
        const struct hapt_tensor *tensor = &graph->tensor[t];
        if (tensor->kind != HAPT_TENSOR_PARAMETER || !tensor->trainable || !first[t]) continue;
        bytes[first[t]] += 4.0 * (double)hapt_tensor_elements(tensor);    /* fp32, whatever the element type */
        bytes[last[t] + 1] -= 4.0 * (double)hapt_tensor_elements(tensor); /* integers, so exact */
    }
    for (int cut = 1; cut <= graph->forward_count; cut++) bytes[cut] += bytes[cut - 1];
    HAPT_NEW(*tied, result, layers->count);
    for (int l = 1; l < layers->count; l++) {
        (*tied)[l] = bytes[hapt_layers_first_op(layers, l)];
        any = any || (*tied)[l] > 0;
    }
    if (!any) *tied = NULL;
    return HAPT_OK;
}

/* Seconds for both ends of a link to send their gradients to each other. */
static double link_s(const struct hapt_profile *profile, int a, int b, double bytes)
{
    const int link = a * profile->cluster_count + b;
    const double *latency = profile->tied_latency ? profile->tied_latency : profile->link_latency;
    return latency[link] + bytes / profile->link_bandwidth[link];
}

static double last_owes(const struct hapt_profile *profile, int last, double bytes)
{
    double least = INFINITY;
    if (profile->cluster_count == 1) return link_s(profile, 0, 0, bytes);
    for (int first = 0; first < profile->cluster_count; first++)
        if (first != last) least = fmin(least, link_s(profile, first, last, bytes));
    return least;
}

static double first_owes(const struct hapt_profile *profile, int first, double bytes)
{
    double least = INFINITY;
    if (profile->cluster_count == 1) return 0;
    for (int last = 0; last < profile->cluster_count; last++)
        if (last != first) least = fmin(least, link_s(profile, first, last, bytes) - last_owes(profile, last, bytes));
    return least;
}

double hapt_profile_tied_share_s(const struct hapt_profile *profile, int subcluster, int first, int last)
{
    const int L = profile->layer_count;
    if (!profile->tied_bytes) return 0;
    if (first > 0 && last == L - 1 && profile->tied_bytes[first] > 0)
        return last_owes(profile, subcluster, profile->tied_bytes[first]);
    if (first == 0 && last < L - 1 && profile->tied_bytes[L - 1] > 0)
        return first_owes(profile, subcluster, profile->tied_bytes[L - 1]);
    return 0;
}

double hapt_profile_tied_s(const struct hapt_profile *profile, int first_layer, struct hapt_subclusters first,
                           struct hapt_subclusters last)
{
    double slowest_s = 0;
    if (!profile->tied_bytes || first_layer == 0 || profile->tied_bytes[first_layer] <= 0) return 0;
    for (int a = 0; a < first.count; a++)
        for (int b = 0; b < last.count; b++)
            slowest_s =
                fmax(slowest_s, link_s(profile, first.index[a], last.index[b], profile->tied_bytes[first_layer]));
    return slowest_s;
}
