/* Independent data-parallel pipelines: views of the cluster, and the all-reduce over pipelines. */
#include "pipelines.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Longer steps are not simulated in full (price.c). */
enum { LONGEST = 1 << 16 };

/* ---- Gradients ---- */

/* Resident bytes that a layer adds to a stage: mean over pairs of stages in one table that differ by it alone. */
static double added_bytes(const struct hapt_profile *profile, const struct hapt_profile_cluster *cluster, int s, int l)
{
    double sum = 0;
    int count = 0;
    for (int other = 0; other < profile->layer_count; other++) {
        if (other == l) continue;
        const size_t with = hapt_profile_index(profile, s, other < l ? other : l, other < l ? l : other);
        const size_t without = hapt_profile_index(profile, s, other < l ? other : l + 1, other < l ? l - 1 : other);
        if (!isfinite(cluster->stage_time[with]) || !isfinite(cluster->stage_time[without])) continue;
        sum += cluster->parameter_bytes[with] - cluster->parameter_bytes[without];
        count++;
    }
    if (count > 0) return fmax(0, sum / count);
    const size_t alone = hapt_profile_index(profile, s, l, l);
    return isfinite(cluster->stage_time[alone]) ? cluster->parameter_bytes[alone] : NAN;
}

/* Resident bytes of a layer on all its devices, from submeshes without replicas: these do not shard optimizer state. */
static double layer_bytes(const struct hapt_profile *profile, int l)
{
    for (int c = 0; c < profile->cluster_count; c++) {
        const struct hapt_profile_cluster *cluster = &profile->cluster[c];
        for (int s = 0; s < cluster->submesh_count; s++) {
            const struct hapt_submesh *submesh = &cluster->submesh[s];
            if (submesh->program > 0 || submesh->n * submesh->m != submesh->tp) continue;
            const double bytes = added_bytes(profile, cluster, s, l);
            if (isfinite(bytes)) return submesh->tp * bytes;
        }
    }
    return NAN;
}

/* Resident bytes of a parameter with AdamW: fp32 weight, gradient and two moments; beside 16-bit computation also a
 * copy of the size of a message. Sharding spreads the moments, and the fp32 weight if there is a copy. */
struct parameter_bytes {
    double resident, message, sharded;
};

static struct parameter_bytes bytes_of(const struct hapt_profile *profile)
{
    const bool single = profile->precision == HAPT_PRECISION_FP32 || profile->precision == HAPT_PRECISION_TF32;
    return single ? (struct parameter_bytes){16, 4, 8} : (struct parameter_bytes){18, 2, 12};
}

double pipelines_gradient_bytes(const struct hapt_profile *profile, int first, int end)
{
    const struct parameter_bytes bytes = bytes_of(profile);
    double sum = 0;
    for (int l = first; l < end; l++) sum += bytes.message / bytes.resident * layer_bytes(profile, l);
    return sum;
}

/* ---- The all-reduce over pipelines ---- */

/* Layers that each pipeline holds in one stage. */
struct segment {
    int first, end;
    double ready_s; /* every pipeline has its gradients, and subclusters have summed among themselves */
    double ring_s;  /* over the links between subclusters */
    double step_s;  /* of the slowest stage */
};

static int compare_ready(const void *a, const void *b)
{
    const struct segment *left = a, *right = b;
    if (left->ready_s != right->ready_s) return left->ready_s < right->ready_s ? -1 : 1;
    return left->first - right->first;
}

/* ended_s[stage]: when the stage's last backward pass ends. */
static enum hapt_status find_ends(const struct hapt_plan *plan, struct hapt_arena *scratch, double *ended_s)
{
    struct hapt_schedule *schedule;
    struct hapt_costs costs;
    struct hapt_simulation *simulation;
    for (int i = 0; i < plan->stage_count; i++) ended_s[i] = plan->simulated_s - plan->stage[i].step_s;
    if (plan->microbatches > LONGEST) return HAPT_OK;
    HAPT_TRY(hapt_plan_lay_out(plan, scratch, &schedule, &costs));
    HAPT_TRY(hapt_simulate(schedule, &costs, scratch, &simulation));
    for (int i = 0; i < plan->stage_count; i++) ended_s[i] = 0;
    for (int d = 0; d < schedule->submesh_count; d++) {
        for (int k = 0; k < schedule->list[d].count; k++) {
            const struct hapt_instruction *instruction = &schedule->list[d].instruction[k];
            if (instruction->kind != HAPT_INSTRUCTION_BACKWARD) continue;
            ended_s[instruction->chunk] = fmax(ended_s[instruction->chunk], simulation->time[d][k].end_s);
        }
    }
    return HAPT_OK;
}

/* Seconds of a ring all-reduce of `bytes` over `parts` ends of a link. */
static double ring_s(double bytes, int parts, double bandwidth, double latency_s)
{
    return parts > 1 ? 2.0 * (parts - 1) * (bytes / parts / bandwidth + latency_s) : 0;
}

static int stage_of(const struct hapt_plan *plan, int layer)
{
    int i = 0;
    while (plan->stage[i].end_layer <= layer) i++;
    return i;
}

/* Fills ready_s, ring_s and step_s of a segment. */
static void price_segment(const struct hapt_profile *profile, int count, struct hapt_plan *const *plan,
                          double *const *ended_s, struct segment *segment)
{
    const double bytes = pipelines_gradient_bytes(profile, segment->first, segment->end);
    const int C = profile->cluster_count;
    int replicas[HAPT_MAX_SUBCLUSTERS] = {0}, nodes[HAPT_MAX_SUBCLUSTERS] = {0}, parts = 0;
    double near_s = 0, slowest = INFINITY, latency_s = 0;
    for (int p = 0; p < count; p++) {
        const int i = stage_of(plan[p], segment->first), c = plan[p]->stage[i].submesh->subcluster[0];
        const int wide = plan[p]->stage[i].submesh->nodes;
        nodes[c] = replicas[c]++ == 0 || wide < nodes[c] ? wide : nodes[c];
        segment->ready_s = fmax(segment->ready_s, ended_s[p][i]);
        segment->step_s = fmax(segment->step_s, plan[p]->stage[i].step_s);
    }
    for (int c = 0; c < C; c++) {
        if (replicas[c] == 0) continue;
        near_s = fmax(near_s, ring_s(bytes / nodes[c], replicas[c], profile->link_bandwidth[c * C + c],
                                     profile->link_latency[c * C + c]));
        parts++;
        for (int other = 0; other < C; other++) {
            if (other == c || replicas[other] == 0) continue;
            slowest = fmin(slowest, profile->link_bandwidth[c * C + other]);
            latency_s = fmax(latency_s, profile->link_latency[c * C + other]);
        }
    }
    segment->ready_s += near_s;
    segment->ring_s = ring_s(bytes, parts, slowest, latency_s);
}

static enum hapt_status reduce(const struct hapt_profile *profile, int count, struct hapt_plan *const *plan,
                               struct hapt_arena *scratch, double *step_s)
{
    double **ended_s, link_s = 0;
    struct segment *segment;
    int segments = 0, first = 0;
    HAPT_NEW(ended_s, scratch, count);
    HAPT_NEW(segment, scratch, profile->layer_count);
    *step_s = 0;
    for (int p = 0; p < count; p++) {
        HAPT_NEW(ended_s[p], scratch, plan[p]->stage_count);
        HAPT_TRY(find_ends(plan[p], scratch, ended_s[p]));
        *step_s = fmax(*step_s, plan[p]->simulated_s);
    }
    while (first < profile->layer_count) {
        int end = profile->layer_count;
        for (int p = 0; p < count; p++) {
            const int own = plan[p]->stage[stage_of(plan[p], first)].end_layer;
            if (own < end) end = own;
        }
        segment[segments] = (struct segment){.first = first, .end = end};
        price_segment(profile, count, plan, ended_s, &segment[segments++]);
        first = end;
    }
    qsort(segment, (size_t)segments, sizeof *segment, compare_ready);
    for (int k = 0; k < segments; k++) {
        const bool crosses = segment[k].ring_s > 0;
        const double done_s = crosses ? fmax(link_s, segment[k].ready_s) + segment[k].ring_s : segment[k].ready_s;
        if (crosses) link_s = done_s;
        *step_s = fmax(*step_s, done_s + segment[k].step_s);
    }
    return HAPT_OK;
}

enum hapt_status pipelines_price(const struct hapt_profile *profile, int count, struct hapt_plan *const *plan,
                                 struct hapt_arena *result, struct hapt_pipelines **priced)
{
    struct hapt_pipelines *made;
    struct hapt_arena scratch;
    double step_s = 0, alone_s = 0;
    *priced = NULL;
    if (!isfinite(pipelines_gradient_bytes(profile, 0, profile->layer_count))) return HAPT_OK;
    hapt_arena_init(&scratch);
    const enum hapt_status status = reduce(profile, count, plan, &scratch, &step_s);
    hapt_arena_release(&scratch);
    HAPT_TRY(status);
    HAPT_NEW(made, result, 1);
    HAPT_NEW(made->plan, result, count);
    for (int p = 0; p < count; p++) {
        made->plan[p] = plan[p];
        made->microbatches += plan[p]->microbatches;
        alone_s = fmax(alone_s, plan[p]->simulated_s);
    }
    made->count = count;
    made->simulated_s = step_s;
    made->reduce_s = step_s - alone_s;
    *priced = made;
    return HAPT_OK;
}

void pipelines_keep(struct hapt_pipelines *priced, struct hapt_pipelines **best)
{
    if (priced && (!*best || priced->simulated_s < (*best)->simulated_s)) *best = priced;
}

/* ---- Views ---- */

/* The subcluster with fewer nodes: larger submeshes have no candidates. */
static enum hapt_status keep_nodes(const struct hapt_profile *profile, int nodes, struct hapt_arena *arena,
                                   struct hapt_profile_cluster *cluster)
{
    const size_t cells = hapt_profile_index(profile, 1, 0, 0), all = (size_t)cluster->submesh_count * cells;
    double *stage_time;
    cluster->nodes = nodes;
    HAPT_NEW(stage_time, arena, all);
    memcpy(stage_time, cluster->stage_time, all * sizeof *stage_time);
    for (int s = 0; s < cluster->submesh_count; s++)
        for (size_t cell = 0; cluster->submesh[s].n > nodes && cell < cells; cell++)
            stage_time[(size_t)s * cells + cell] = NAN;
    cluster->stage_time = stage_time;
    return HAPT_OK;
}

/* The subcluster with optimizer state sharded over `shards` pipelines. layer [L] bytes of each layer. Only submeshes
 * without replicas: others may shard it already. */
static enum hapt_status shard(const struct hapt_profile *profile, int shards, const double *layer,
                              struct hapt_arena *arena, struct hapt_profile_cluster *cluster)
{
    const int L = profile->layer_count;
    const size_t all = hapt_profile_index(profile, cluster->submesh_count, 0, 0);
    const struct parameter_bytes bytes = bytes_of(profile);
    const double spared = bytes.sharded / bytes.resident * (1 - 1.0 / shards);
    double *parameter_bytes;
    HAPT_NEW(parameter_bytes, arena, all);
    memcpy(parameter_bytes, cluster->parameter_bytes, all * sizeof *parameter_bytes);
    for (int s = 0; s < cluster->submesh_count; s++) {
        const struct hapt_submesh *submesh = &cluster->submesh[s];
        if (submesh->program > 0 || submesh->n * submesh->m != submesh->tp) continue;
        for (int i = 0; i < L; i++) {
            double sum = 0;
            for (int j = i; j < L; j++) {
                double *held = &parameter_bytes[hapt_profile_index(profile, s, i, j)];
                sum += layer[j];
                *held = fmax(0, *held - spared * sum / submesh->tp);
            }
        }
    }
    cluster->parameter_bytes = parameter_bytes;
    return HAPT_OK;
}

enum hapt_status pipelines_view(const struct hapt_profile *profile, const int *nodes, int sharing, int shards,
                                struct hapt_arena *arena, struct hapt_profile **view, int *subcluster_of)
{
    double *layer;
    const size_t C = (size_t)profile->cluster_count;
    struct hapt_profile *made;
    int count = 0;
    HAPT_NEW(made, arena, 1);
    *made = *profile;
    HAPT_NEW(made->cluster, arena, C);
    HAPT_NEW(made->link_bandwidth, arena, C * C);
    HAPT_NEW(made->link_latency, arena, C * C);
    HAPT_NEW(layer, arena, profile->layer_count);
    for (int l = 0; l < profile->layer_count; l++) {
        layer[l] = layer_bytes(profile, l);
        if (isnan(layer[l])) shards = 1; /* unknown */
    }
    for (int c = 0; c < profile->cluster_count; c++) {
        if (nodes[c] == 0) continue;
        made->cluster[count] = profile->cluster[c];
        HAPT_TRY(keep_nodes(profile, nodes[c], arena, &made->cluster[count]));
        if (shards > 1) HAPT_TRY(shard(profile, shards, layer, arena, &made->cluster[count]));
        subcluster_of[count++] = c;
    }
    for (int a = 0; a < count; a++) {
        for (int b = 0; b < count; b++) {
            const size_t from = (size_t)subcluster_of[a] * C + (size_t)subcluster_of[b];
            made->link_bandwidth[a * count + b] = profile->link_bandwidth[from] / (a != b ? sharing : 1);
            made->link_latency[a * count + b] = profile->link_latency[from];
        }
    }
    made->cluster_count = count;
    made->tied_latency = NULL;
    made->mixed_count = 0;
    *view = made;
    return HAPT_OK;
}

void pipelines_restore(const int *subcluster_of, struct hapt_plan *plan)
{
    for (int s = 0; s < plan->submesh_count; s++) {
        struct hapt_plan_submesh *submesh = &plan->submesh[s];
        for (int k = 0; k < submesh->part_count; k++) submesh->subcluster[k] = subcluster_of[submesh->subcluster[k]];
    }
}
