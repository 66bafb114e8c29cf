/* Parameters that two stages hold: the cost of exchanging their gradients, and the part of it in a candidate's
 * step_time. */
#include <math.h>
#include <string.h>

#include "hapt/profile.h"
#include "profile_private.h"

static const char *const exchange_names[] = {"fp32", "16bit"};

const char *hapt_tied_exchange_name(enum hapt_tied_exchange exchange)
{
    return exchange_names[exchange];
}

bool hapt_tied_exchange_find(const char *name, enum hapt_tied_exchange *exchange)
{
    for (int k = 0; k < 2; k++)
        if (strcmp(name, exchange_names[k]) == 0) {
            *exchange = (enum hapt_tied_exchange)k;
            return true;
        }
    return false;
}

enum hapt_status hapt_profile_tied_bytes(const struct hapt_graph *graph, const struct hapt_layers *layers,
                                         enum hapt_tied_exchange exchange, struct hapt_arena *result,
                                         struct hapt_arena *scratch, double **tied)
{
    const double each = hapt_tied_exchange_bytes(exchange);
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
        bytes[first[t]] += each * (double)hapt_tensor_elements(tensor);    /* whatever the parameter's element type */
        bytes[last[t] + 1] -= each * (double)hapt_tensor_elements(tensor); /* integers, so exact */
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

/* The share of tied parameters in the step_time of a mixed stage: the largest share of its subclusters. */
static double mixed_share_s(const struct hapt_profile *profile, const struct hapt_profile_mixed *mixed, int i, int j)
{
    double share_s = 0;
    for (int k = 0; k < mixed->count; k++)
        share_s = fmax(share_s, hapt_profile_tied_share_s(profile, mixed->cluster[k], i, j));
    return share_s;
}

/* Adds `sign` times the shares to step_time. */
static void add_shares(struct hapt_profile *profile, double sign)
{
    const int L = profile->layer_count;
    for (int i = 0; i < L; i++) {
        for (int j = i; j < L; j++) {
            if (i > 0 && j < L - 1) continue; /* neither the first nor the last stage */
            for (int c = 0; c < profile->cluster_count; c++) {
                const struct hapt_profile_cluster *cluster = &profile->cluster[c];
                const double share_s = sign * hapt_profile_tied_share_s(profile, c, i, j);
                for (int s = 0; cluster->step_time && s < cluster->submesh_count; s++) {
                    double *step_s = &cluster->step_time[hapt_profile_index(profile, s, i, j)];
                    *step_s = fmax(0, *step_s + share_s);
                }
            }
            for (int k = 0; k < profile->mixed_count; k++) {
                const struct hapt_profile_mixed *mixed = &profile->mixed[k];
                if (!mixed->step_time) continue;
                double *step_s = &mixed->step_time[hapt_profile_index(profile, 0, i, j)];
                *step_s = fmax(0, *step_s + sign * mixed_share_s(profile, mixed, i, j));
            }
        }
    }
}

void hapt_profile_exchange_in(struct hapt_profile *profile, enum hapt_tied_exchange exchange)
{
    const double factor = hapt_tied_exchange_bytes(exchange) / hapt_tied_exchange_bytes(profile->exchange);
    if (exchange == profile->exchange) return;
    profile->exchange = exchange;
    if (!profile->tied_bytes) return;
    add_shares(profile, -1);
    for (int l = 0; l < profile->layer_count; l++) profile->tied_bytes[l] *= factor;
    add_shares(profile, 1);
}
