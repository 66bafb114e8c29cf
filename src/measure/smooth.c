/* Robust additive fit and shrinkage. */
#include "smooth.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "hapt/order.h"

enum { ITERATIONS = 6, BENDS = 24, BEND_POINTS = 3 };
#define HUBER 0.05 /* relative residuals beyond this count linearly */

/* Measured over summed time, as a function of the sum: linear between bends on a logarithmic scale, constant
 * outside. */
struct bend {
    double octave, factor;
};

struct fit {
    const int *variable;
    int count;      /* number of variables */
    double *part_s; /* [count] */
    double *matrix; /* [count][count] normal equations */
    double *right;  /* [count] */
    double *uses;   /* [count] occurrences in one range */
    int bend_count;
    struct bend bend[BENDS];
};

static double sum_of_parts(const struct fit *fit, const struct smooth_point *point)
{
    double sum = 0;
    for (int l = point->first; l <= point->last; l++) sum += fit->part_s[fit->variable[l]];
    return sum;
}

static double factor_at(const struct fit *fit, double sum)
{
    const struct bend *bend = fit->bend;
    const int last = fit->bend_count - 1;
    if (last < 0 || sum <= 0) return 1;
    const double octave = log2(sum);
    if (octave <= bend[0].octave) return bend[0].factor;
    if (octave >= bend[last].octave) return bend[last].factor;
    int k = 1;
    while (octave > bend[k].octave) k++;
    const double share = (octave - bend[k - 1].octave) / (bend[k].octave - bend[k - 1].octave);
    return bend[k - 1].factor + share * (bend[k].factor - bend[k - 1].factor);
}

static double predict(const struct fit *fit, const struct smooth_point *point)
{
    const double sum = sum_of_parts(fit, point);
    return sum * factor_at(fit, sum);
}

/* Adds the equation uses . part = time, in relative terms and with a weight. */
static void add_equation(struct fit *fit, const struct smooth_point *point, double weight)
{
    memset(fit->uses, 0, (size_t)fit->count * sizeof *fit->uses);
    for (int l = point->first; l <= point->last; l++) fit->uses[fit->variable[l]] += 1 / point->time_s;
    for (int a = 0; a < fit->count; a++) {
        if (fit->uses[a] == 0) continue;
        fit->right[a] += weight * fit->uses[a];
        for (int b = 0; b < fit->count; b++) fit->matrix[a * fit->count + b] += weight * fit->uses[a] * fit->uses[b];
    }
}

/* Cholesky in place. The matrix is positive definite, because every variable is measured alone. */
static bool solve(struct fit *fit)
{
    const int n = fit->count;
    double *m = fit->matrix, *x = fit->part_s;
    for (int j = 0; j < n; j++) {
        double pivot = m[j * n + j];
        const double before = pivot;
        for (int k = 0; k < j; k++) pivot -= m[j * n + k] * m[j * n + k];
        if (!(pivot > 1e-13 * before)) return false;
        m[j * n + j] = sqrt(pivot);
        for (int i = j + 1; i < n; i++) {
            double sum = m[i * n + j];
            for (int k = 0; k < j; k++) sum -= m[i * n + k] * m[j * n + k];
            m[i * n + j] = sum / m[j * n + j];
        }
    }
    for (int i = 0; i < n; i++) {
        double sum = fit->right[i];
        for (int k = 0; k < i; k++) sum -= m[i * n + k] * x[k];
        x[i] = sum / m[i * n + i];
    }
    for (int i = n - 1; i >= 0; i--) {
        double sum = x[i];
        for (int k = i + 1; k < n; k++) sum -= m[k * n + i] * x[k];
        x[i] = sum / m[i * n + i];
    }
    return true;
}

static bool fit_parts(struct fit *fit, const struct smooth_point *point, int count)
{
    for (int iteration = 0; iteration < ITERATIONS; iteration++) {
        memset(fit->matrix, 0, (size_t)fit->count * (size_t)fit->count * sizeof *fit->matrix);
        memset(fit->right, 0, (size_t)fit->count * sizeof *fit->right);
        for (int p = 0; p < count; p++) {
            if (point[p].time_s <= 0) continue;
            const double residual = iteration == 0 ? 0 : fabs(sum_of_parts(fit, &point[p]) / point[p].time_s - 1);
            add_equation(fit, &point[p], residual <= HUBER ? 1 : HUBER / residual);
        }
        if (!solve(fit)) return false;
        for (int v = 0; v < fit->count; v++) fit->part_s[v] = fmax(fit->part_s[v], 0);
    }
    return true;
}

struct ratio {
    double octave, factor;
};

static int by_octave(const void *a, const void *b)
{
    return hapt_compare_doubles(&((const struct ratio *)a)->octave, &((const struct ratio *)b)->octave);
}

/* Medians over octaves of time, each of at least BEND_POINTS ranges. */
static void bend_sums(struct fit *fit, const struct smooth_point *point, int count, struct ratio *ratio, double *buffer)
{
    int used = 0;
    for (int p = 0; p < count; p++) {
        const double sum = sum_of_parts(fit, &point[p]);
        if (point[p].time_s > 0 && sum > 0) ratio[used++] = (struct ratio){log2(sum), point[p].time_s / sum};
    }
    qsort(ratio, (size_t)used, sizeof *ratio, by_octave);
    for (int first = 0, end; first < used && fit->bend_count < BENDS; first = end) {
        end = first;
        while (end < used && (ratio[end].octave < ratio[first].octave + 1 || end - first < BEND_POINTS)) end++;
        if (used - end < BEND_POINTS) end = used; /* too few left for a median of their own */
        for (int k = first; k < end; k++) buffer[k - first] = ratio[k].factor;
        qsort(buffer, (size_t)(end - first), sizeof *buffer, hapt_compare_doubles);
        fit->bend[fit->bend_count++] =
            (struct bend){ratio[first + (end - first) / 2].octave, buffer[(end - first) / 2]};
    }
}

/* Relative variance that the fit cannot explain: the robust spread of the residuals minus the noise. */
static double misfit(const struct fit *fit, const struct smooth_point *point, int count, double noise, double *buffer)
{
    int used = 0;
    for (int p = 0; p < count; p++)
        if (point[p].time_s > 0) buffer[used++] = fabs(point[p].time_s / fmax(predict(fit, &point[p]), 1e-12) - 1);
    if (used == 0) return 0;
    qsort(buffer, (size_t)used, sizeof *buffer, hapt_compare_doubles);
    const double spread = 1.4826 * buffer[used / 2]; /* standard deviation of a normal distribution from its median */
    return fmax(spread * spread - noise * noise, 0);
}

enum hapt_status smooth_times(const int *variable, int variable_count, double noise, int point_count,
                              struct smooth_point *point, struct hapt_arena *scratch)
{
    struct fit fit = {.variable = variable, .count = variable_count};
    double *buffer;
    struct ratio *ratio;
    HAPT_NEW(ratio, scratch, point_count);
    HAPT_NEW(fit.part_s, scratch, variable_count);
    HAPT_NEW(fit.matrix, scratch, (size_t)variable_count * (size_t)variable_count);
    HAPT_NEW(fit.right, scratch, variable_count);
    HAPT_NEW(fit.uses, scratch, variable_count);
    HAPT_NEW(buffer, scratch, point_count);
    if (!fit_parts(&fit, point, point_count))
        return hapt_fail(HAPT_ERR_INTERNAL, NULL, "the times of layer ranges do not determine those of the layers");
    bend_sums(&fit, point, point_count, ratio, buffer);
    const double true_spread = misfit(&fit, point, point_count, noise, buffer);
    for (int p = 0; p < point_count; p++) {
        const double fitted = predict(&fit, &point[p]);
        const double keep = true_spread + noise * noise > 0 ? true_spread / (true_spread + noise * noise) : 1;
        point[p].estimate_s = point[p].time_s < 0 ? fitted : fitted + keep * (point[p].time_s - fitted);
    }
    return HAPT_OK;
}
