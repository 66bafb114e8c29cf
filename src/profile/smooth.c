/* Robust additive fit and shrinkage. */
#include "smooth.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { ITERATIONS = 6 };
#define HUBER 0.05 /* relative residuals beyond this count linearly at most */

struct fit {
    const int *variable;
    int count;      /* of variables */
    double *part_s; /* [count] */
    double *matrix; /* [count][count] normal equations */
    double *right;  /* [count] */
    double *uses;   /* [count] of one range */
};

static int compare_doubles(const void *a, const void *b)
{
    return (*(const double *)a > *(const double *)b) - (*(const double *)a < *(const double *)b);
}

static double predict(const struct fit *fit, const struct smooth_point *point)
{
    double sum = 0;
    for (int l = point->first; l <= point->last; l++) sum += fit->part_s[fit->variable[l]];
    return sum;
}

/* Adds weight * (uses . part = time) in relative terms. */
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

/* Cholesky in place; the matrix is positive definite because every variable is measured on its own. */
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
            const double residual = iteration == 0 ? 0 : fabs(predict(fit, &point[p]) / point[p].time_s - 1);
            add_equation(fit, &point[p], residual <= HUBER ? 1 : HUBER / residual);
        }
        if (!solve(fit)) return false;
        for (int v = 0; v < fit->count; v++) fit->part_s[v] = fmax(fit->part_s[v], 0);
    }
    return true;
}

/* What sums cannot explain: the spread of the residuals, robustly, less what is noise. Relative variance. */
static double misfit(const struct fit *fit, const struct smooth_point *point, int count, double noise, double *buffer)
{
    int used = 0;
    for (int p = 0; p < count; p++)
        if (point[p].time_s > 0) buffer[used++] = fabs(point[p].time_s / fmax(predict(fit, &point[p]), 1e-12) - 1);
    if (used == 0) return 0;
    qsort(buffer, (size_t)used, sizeof *buffer, compare_doubles);
    const double spread = 1.4826 * buffer[used / 2]; /* of a normal distribution from its median */
    return fmax(spread * spread - noise * noise, 0);
}

enum hapt_status smooth_times(const int *variable, int variable_count, double noise, int point_count,
                              struct smooth_point *point, struct hapt_arena *scratch)
{
    struct fit fit = {.variable = variable, .count = variable_count};
    double *buffer;
    HAPT_NEW(fit.part_s, scratch, variable_count);
    HAPT_NEW(fit.matrix, scratch, (size_t)variable_count * (size_t)variable_count);
    HAPT_NEW(fit.right, scratch, variable_count);
    HAPT_NEW(fit.uses, scratch, variable_count);
    HAPT_NEW(buffer, scratch, point_count);
    if (!fit_parts(&fit, point, point_count))
        return hapt_fail(HAPT_ERR_INTERNAL, NULL, "the times of layer ranges do not determine those of the layers");
    const double true_spread = misfit(&fit, point, point_count, noise, buffer);
    for (int p = 0; p < point_count; p++) {
        const double sum = predict(&fit, &point[p]);
        const double keep = true_spread + noise * noise > 0 ? true_spread / (true_spread + noise * noise) : 1;
        point[p].estimate_s = point[p].time_s < 0 ? sum : sum + keep * (point[p].time_s - sum);
    }
    return HAPT_OK;
}
