/* Costs of collectives: evaluation, rings over links, the fit to measurements. */
#include "hapt/collective_cost.h"

#include <math.h>
#include <string.h>

enum { PARTS = 3, ROUNDS = 8 };
#define OUTLIER 0.1 /* relative errors beyond this count linearly */
#define SKEWED 0.05 /* least n * largest - 1 of a sample that counts as skewed */

static const char *name_of(enum hapt_collective_kind kind)
{
    static const char *const name[HAPT_COLLECTIVE_COUNT] = {
        [HAPT_COLLECTIVE_NONE] = "none",
        [HAPT_COLLECTIVE_ALL_REDUCE] = "all-reduce",
        [HAPT_COLLECTIVE_REDUCE_SCATTER] = "reduce-scatter",
        [HAPT_COLLECTIVE_ALL_GATHER] = "all-gather",
        [HAPT_COLLECTIVE_GROUPED_BROADCAST] = "grouped broadcast",
        [HAPT_COLLECTIVE_ALL_TO_ALL] = "all-to-all",
        [HAPT_COLLECTIVE_SLICE] = "slice",
    };
    return name[kind];
}

void hapt_collective_cost_line(const struct hapt_collective_model *model, enum hapt_collective_kind kind, double bytes,
                               double *fixed_s, double *largest_s)
{
    const struct hapt_collective_term *term = &model->term[kind];
    *fixed_s = *largest_s = 0;
    if (model->ranks < 2 || !hapt_collective_communicates(kind)) return;
    *fixed_s = term->latency_s + bytes * (term->byte_s - term->skew_s);
    *largest_s = bytes * term->skew_s * model->ranks;
}

double hapt_collective_cost_s(const struct hapt_collective_model *model, enum hapt_collective_kind kind, double bytes,
                              double largest_share)
{
    const struct hapt_collective_term *term = &model->term[kind];
    if (model->ranks < 2 || !hapt_collective_communicates(kind)) return 0;
    return term->latency_s + bytes * (term->byte_s + term->skew_s * fmax(0, model->ranks * largest_share - 1));
}

/* ---- links ---- */

void hapt_collective_model_links(const struct hapt_collective_links *links, struct hapt_collective_model *model)
{
    const int n = links->ranks;
    const double bandwidth = links->bandwidth;
    *model = (struct hapt_collective_model){.ranks = n};
    for (int k = 0; k < HAPT_COLLECTIVE_COUNT && n > 1; k++) {
        const enum hapt_collective_kind kind = (enum hapt_collective_kind)k;
        const double byte_s = hapt_ring_s(kind, n, 1, 1.0 / n, bandwidth, 0);
        model->term[k] = (struct hapt_collective_term){hapt_ring_s(kind, n, 0, 1.0 / n, bandwidth, links->latency_s),
                                                       byte_s, hapt_ring_s(kind, n, 1, 2.0 / n, bandwidth, 0) - byte_s};
    }
}

const struct hapt_collective_model *hapt_collective_model_measured(const struct hapt_cluster *cluster, int ranks)
{
    for (int i = 0; i < cluster->collective_count; i++)
        if (cluster->collective[i].ranks == ranks) return &cluster->collective[i];
    return NULL;
}

static bool slower(double bandwidth, double latency_s, struct hapt_collective_links *links)
{
    if (!(bandwidth > 0) || !(latency_s >= 0)) return false;
    links->bandwidth = fmin(links->bandwidth, bandwidth);
    links->latency_s = fmax(links->latency_s, latency_s);
    return true;
}

enum hapt_status hapt_collective_links_slowest(const struct hapt_cluster *cluster, const int *devices,
                                               struct hapt_collective_links *links)
{
    struct hapt_collective_links found = {.bandwidth = INFINITY};
    bool known = true;
    for (int i = 0; i < cluster->count; i++) {
        const struct hapt_subcluster *own = &cluster->subcluster[i];
        HAPT_ASSERT(devices[i] >= 0 && devices[i] <= own->nodes * own->devices_per_node);
        found.ranks += devices[i];
        if (devices[i] > 1 && own->devices_per_node > 1)
            known = slower(own->intra_node_bandwidth, own->intra_node_latency, &found) && known;
        if (devices[i] > own->devices_per_node)
            known = slower(own->inter_node_bandwidth, own->inter_node_latency, &found) && known;
        for (int j = 0; j < i; j++) {
            const struct hapt_link *link = hapt_cluster_link(cluster, j, i);
            if (devices[i] > 0 && devices[j] > 0) known = slower(link->bandwidth, link->latency, &found) && known;
        }
    }
    if (!known)
        return hapt_fail(HAPT_ERR_INPUT, "give the bandwidth and latency of every link in the cluster file",
                         "the cost of collectives needs the bandwidth and latency of every link, and some are unknown");
    *links = found;
    return HAPT_OK;
}

/* ---- fit ---- */

/* The terms of a sample's time: 1 for latency, bytes, padding; each relative to its time. */
static void parts_of(const struct hapt_collective_sample *sample, int ranks, double *part)
{
    const double skew = fmax(0, ranks * sample->largest_share - 1);
    part[0] = 1 / sample->time_s;
    part[1] = sample->bytes / sample->time_s;
    part[2] = sample->bytes * skew / sample->time_s;
}

/* Solves the normal equations of the chosen parts by elimination. */
static bool solve_parts(int chosen, const double (*matrix)[PARTS], const double *right, double *value)
{
    double m[PARTS][PARTS + 1];
    int index[PARTS], n = 0;
    for (int p = 0; p < PARTS; p++)
        if (chosen >> p & 1) index[n++] = p;
    for (int a = 0; a < n; a++) {
        for (int b = 0; b < n; b++) m[a][b] = matrix[index[a]][index[b]];
        m[a][n] = right[index[a]];
    }
    for (int p = 0; p < PARTS; p++) value[p] = 0;
    for (int a = 0; a < n; a++) {
        if (!(m[a][a] > 1e-12 * matrix[index[a]][index[a]])) return false;
        for (int r = a + 1; r < n; r++) {
            const double factor = m[r][a] / m[a][a];
            for (int c = a; c <= n; c++) m[r][c] -= factor * m[a][c];
        }
    }
    for (int a = n - 1; a >= 0; a--) {
        double sum = m[a][n];
        for (int b = a + 1; b < n; b++) sum -= m[a][b] * value[index[b]];
        value[index[a]] = sum / m[a][a];
        if (!(value[index[a]] >= 0)) return false;
    }
    return true;
}

/* The best non-negative parts at the current weights; bytes always cost time. There are few parts, so every subset
 * is tried. */
static void fit_weighted(int most, int ranks, int count, const struct hapt_collective_sample *sample,
                         const double *weight, double *best)
{
    double matrix[PARTS][PARTS] = {{0}}, right[PARTS] = {0}, least = INFINITY;
    for (int i = 0; i < count; i++) {
        double part[PARTS];
        parts_of(&sample[i], ranks, part);
        for (int a = 0; a < PARTS; a++) {
            right[a] += weight[i] * part[a];
            for (int b = 0; b < PARTS; b++) matrix[a][b] += weight[i] * part[a] * part[b];
        }
    }
    for (int chosen = 1; chosen <= most; chosen++) {
        double value[PARTS], error = 0;
        if ((chosen & most) != chosen || !(chosen >> 1 & 1) ||
            !solve_parts(chosen, (const double(*)[PARTS])matrix, right, value))
            continue;
        /* |P v - 1|^2 without its constant. */
        for (int a = 0; a < PARTS; a++) {
            error -= 2 * right[a] * value[a];
            for (int b = 0; b < PARTS; b++) error += matrix[a][b] * value[a] * value[b];
        }
        if (error >= least || value[1] == 0) continue;
        least = error;
        memcpy(best, value, sizeof value);
    }
}

bool hapt_collective_fit(enum hapt_collective_kind kind, int ranks, int count,
                         const struct hapt_collective_sample *sample, struct hapt_collective_term *term)
{
    enum { MOST_SAMPLES = 256 };
    double weight[MOST_SAMPLES], value[PARTS], smallest = INFINITY, largest = 0, least_byte_s = INFINITY;
    bool skewed = false;
    if (count > MOST_SAMPLES) count = MOST_SAMPLES;
    for (int i = 0; i < count; i++) {
        if (!(sample[i].bytes > 0) || !(sample[i].time_s > 0) || !isfinite(sample[i].time_s)) return false;
        smallest = fmin(smallest, sample[i].bytes);
        largest = fmax(largest, sample[i].bytes);
        skewed = skewed || ranks * sample[i].largest_share - 1 > SKEWED;
        least_byte_s = fmin(least_byte_s, sample[i].time_s / sample[i].bytes);
        weight[i] = 1;
    }
    if (!(largest > smallest)) return false;
    const bool find_skew = skewed && kind != HAPT_COLLECTIVE_ALL_REDUCE;
    for (int round = 0; round < ROUNDS; round++) {
        /* No line with a positive slope fits: the best measured rate. */
        memcpy(value, (const double[PARTS]){0, least_byte_s, 0}, sizeof value);
        fit_weighted(find_skew ? 7 : 3, ranks, count, sample, weight, value);
        for (int i = 0; i < count; i++) {
            double part[PARTS], error = -1;
            parts_of(&sample[i], ranks, part);
            for (int p = 0; p < PARTS; p++) error += part[p] * value[p];
            weight[i] = fmin(1, OUTLIER / fmax(1e-12, fabs(error)));
        }
    }
    *term = (struct hapt_collective_term){value[0], value[1],
                                          find_skew                    ? value[2]
                                          : hapt_collective_pads(kind) ? value[1]
                                                                       : 0};
    return true;
}

/* ---- show and check ---- */

void hapt_collective_model_print(const struct hapt_collective_model *model, FILE *stream)
{
    fprintf(stream, "collectives over %d ranks, %s\n", model->ranks, model->measured ? "measured" : "from links");
    for (int k = 0; k < HAPT_COLLECTIVE_COUNT; k++) {
        const struct hapt_collective_term *term = &model->term[k];
        if (!hapt_collective_communicates((enum hapt_collective_kind)k) || model->ranks < 2) continue;
        fprintf(stream, "  %-18s %8.2f us  %8.3f ms/MB", name_of((enum hapt_collective_kind)k), 1e6 * term->latency_s,
                1e9 * term->byte_s);
        if (term->skew_s > 0) fprintf(stream, "  %8.3f ms/MB of padding", 1e9 * term->skew_s);
        fputc('\n', stream);
    }
}

enum hapt_status hapt_collective_model_check(const struct hapt_collective_model *model)
{
    bool sound = model->ranks >= 1;
    for (int k = 0; k < HAPT_COLLECTIVE_COUNT; k++) {
        const struct hapt_collective_term *term = &model->term[k];
        sound = sound && term->latency_s >= 0 && term->byte_s >= 0 && term->skew_s >= 0 &&
                isfinite(term->latency_s + term->byte_s + term->skew_s);
    }
    return sound ? HAPT_OK
                 : hapt_fail(HAPT_ERR_INPUT, "measure them again, or give the links in the cluster file",
                             "the cost of a collective is undefined or negative");
}
