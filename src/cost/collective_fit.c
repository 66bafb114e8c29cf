/* Fits the terms of a collective's cost to measurements. */
#include "hapt/collective_cost.h"

#include <math.h>
#include <string.h>

enum { PARTS = 3, ROUNDS = 8 };
#define OUTLIER 0.1 /* relative errors beyond this count linearly */
#define SKEWED 0.05 /* least n * largest - 1 of a sample that counts as skewed */

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
