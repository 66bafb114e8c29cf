/*
 * Pivots between vertices of a linear program.
 *
 * At a vertex, as many constraints as there are columns hold with equality: the working set, stored with the dense
 * inverse of its gradients. Column bounds and rows are treated alike. If there are too few constraints, a column is
 * pinned to its value; a pin leaves the working set as soon as that improves the cost. The steps from any working set:
 * - shift the costs until no multiplier has a wrong sign;
 * - make the point feasible by dual pivots (or prove that this is impossible);
 * - restore the true costs, and make the point optimal by primal pivots (or find a ray).
 * Each round recomputes all values from the inverse, and every REFRESH rounds the inverse from the gradients, so that
 * errors do not accumulate. If a round fails, another solver must be tried.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "hapt/env.h"
#include "solver.h"

enum { REFRESH = 50 };
#define PRIMAL_TOLERANCE 1e-9 /* of a constraint, relative to the magnitudes of its terms */
#define DUAL_TOLERANCE 1e-10
#define INFEASIBLE_BEYOND 1e-7 /* smaller violations may come from rounding of the instance's numbers */
#define RATIO_SLACK 1e-10      /* amount by which a ratio test may overstep, to get a better pivot */
#define PIVOT_TOLERANCE 1e-8
#define ACTIVE_TOLERANCE 1e-4 /* a constraint this close to equality may be active at the nearby vertex */

enum side { UPPER = -1, EQUAL = 0, LOWER = 1, PIN = 2 };

struct working_set {
    const struct hapt_lp *lp;
    int n, all;      /* columns; constraints: k < n are the bounds of column k, the others are row k - n */
    int *member;     /* [n] constraint of a slot; for a pin: its column */
    enum side *side; /* [n] */
    double *target;  /* [n] value at which the slot's constraint is held */
    int *slot;       /* [all] slot of a constraint, or -1; pins are not listed */
    double *inverse; /* [n][n] change of column j by slot s */
    double *x, *multiplier, *cost, *direction; /* [n] */
    double *activity, *scale, *rate;           /* [all] */
    double *matrix;                            /* [n][2 n] */
    bool shifted;
    uint64_t random;
    int stalled;
};

static double lower_of(const struct working_set *w, int k)
{
    return k < w->n ? w->lp->lower[k] : w->lp->row_lower[k - w->n];
}

static double upper_of(const struct working_set *w, int k)
{
    return k < w->n ? w->lp->upper[k] : w->lp->row_upper[k - w->n];
}

static double dot(const struct working_set *w, int k, const double *vector)
{
    double sum = 0;
    if (k < w->n) return vector[k];
    const struct hapt_lp *lp = w->lp;
    for (int e = lp->start[k - w->n]; e < lp->start[k - w->n + 1]; e++) sum += lp->value[e] * vector[lp->column[e]];
    return sum;
}

static void add_gradient(const struct working_set *w, int k, double factor, double *vector)
{
    const struct hapt_lp *lp = w->lp;
    if (k < w->n) {
        vector[k] += factor;
        return;
    }
    for (int e = lp->start[k - w->n]; e < lp->start[k - w->n + 1]; e++) vector[lp->column[e]] += factor * lp->value[e];
}

/* Gauss-Jordan elimination with the largest pivot of each column. */
static bool invert(struct working_set *w)
{
    const int n = w->n, width = 2 * n;
    memset(w->matrix, 0, (size_t)n * (size_t)width * sizeof *w->matrix);
    for (int s = 0; s < n; s++) {
        add_gradient(w, w->member[s], 1, w->matrix + (size_t)s * width);
        w->matrix[(size_t)s * width + n + s] = 1;
    }
    for (int j = 0; j < n; j++) {
        int best = j;
        for (int r = j + 1; r < n; r++)
            if (fabs(w->matrix[(size_t)r * width + j]) > fabs(w->matrix[(size_t)best * width + j])) best = r;
        double *pivot = w->matrix + (size_t)j * width, *other = w->matrix + (size_t)best * width;
        if (!(fabs(other[j]) > 1e-12)) return false;
        for (int c = 0; best != j && c < width; c++) {
            const double value = pivot[c];
            pivot[c] = other[c];
            other[c] = value;
        }
        const double inverse = 1 / pivot[j];
        for (int c = j; c < width; c++) pivot[c] *= inverse;
        for (int r = 0; r < n; r++) {
            double *row = w->matrix + (size_t)r * width;
            const double factor = row[j];
            if (r == j || factor == 0) continue;
            for (int c = j; c < width; c++) row[c] -= factor * pivot[c];
        }
    }
    for (int j = 0; j < n; j++)
        memcpy(w->inverse + (size_t)j * n, w->matrix + (size_t)j * width + n, (size_t)n * sizeof(double));
    return true;
}

/* Constraint k replaces that of slot s; `rate` [n] is k's gradient times the inverse. */
static void exchange(struct working_set *w, int s, int k, enum side side, double target, const double *rate)
{
    const int n = w->n;
    const double pivot = 1 / rate[s];
    for (int j = 0; j < n; j++) {
        double *row = w->inverse + (size_t)j * n;
        const double factor = row[s] * pivot;
        if (factor == 0) continue;
        for (int t = 0; t < n; t++) row[t] -= factor * rate[t];
        row[s] = factor;
    }
    if (w->side[s] != PIN) w->slot[w->member[s]] = -1;
    w->member[s] = k;
    w->side[s] = side;
    w->target[s] = target;
    w->slot[k] = s;
}

static void evaluate(struct working_set *w)
{
    const int n = w->n;
    const struct hapt_lp *lp = w->lp;
    memset(w->multiplier, 0, (size_t)n * sizeof *w->multiplier);
    for (int j = 0; j < n; j++) {
        const double *row = w->inverse + (size_t)j * n;
        double sum = 0;
        for (int s = 0; s < n; s++) sum += row[s] * w->target[s];
        w->x[j] = sum;
        if (w->cost[j] == 0) continue;
        for (int s = 0; s < n; s++) w->multiplier[s] += w->cost[j] * row[s];
    }
    for (int k = 0; k < n; k++) {
        w->activity[k] = w->x[k];
        w->scale[k] = 1 + fabs(w->x[k]);
    }
    for (int i = 0; i < lp->row_count; i++) {
        double sum = 0, scale = 1;
        for (int e = lp->start[i]; e < lp->start[i + 1]; e++) {
            const double term = lp->value[e] * w->x[lp->column[e]];
            sum += term;
            scale += fabs(term);
        }
        w->activity[n + i] = sum;
        w->scale[n + i] = scale;
    }
}

/* Amount by which a multiplier has the wrong sign. */
static double wrong(const struct working_set *w, int s)
{
    const double y = w->multiplier[s];
    switch (w->side[s]) {
    case LOWER: return -y;
    case UPPER: return y;
    case PIN: return fabs(y);
    default: return 0;
    }
}

/* Finds the slot with the worst multiplier. After many pivots without progress, a random wrong one: a random walk does
 * not cycle. */
static int find_wrong(struct working_set *w)
{
    int best = -1, count = 0;
    double most = DUAL_TOLERANCE;
    for (int s = 0; s < w->n; s++) {
        const double size = wrong(w, s);
        if (size <= DUAL_TOLERANCE) continue;
        count++;
        if (w->stalled > 2 * w->n ? hapt_random_next(&w->random) % (uint64_t)count == 0 : size > most) {
            best = s;
            most = size;
        }
    }
    return best;
}

/* Relative violation of a constraint. */
static double excess(const struct working_set *w, int k)
{
    return fmax(lower_of(w, k) - w->activity[k], w->activity[k] - upper_of(w, k)) / w->scale[k];
}

static int find_violated(const struct working_set *w)
{
    int worst = -1;
    for (int k = 0; k < w->all; k++)
        if (w->slot[k] < 0 && excess(w, k) > (worst < 0 ? PRIMAL_TOLERANCE : excess(w, worst))) worst = k;
    return worst;
}

static void shift_costs(struct working_set *w)
{
    for (int s = 0; s < w->n; s++) {
        if (wrong(w, s) <= 0) continue;
        add_gradient(w, w->member[s], -w->multiplier[s], w->cost);
        w->multiplier[s] = 0;
        w->shifted = true;
    }
}

/* The violated constraint k enters the working set. False: the working set proves that the instance is infeasible. */
static bool pivot_dual(struct working_set *w, int k)
{
    const int n = w->n;
    const bool low = w->activity[k] < lower_of(w, k);
    const double sign = low ? 1 : -1;
    double *rate = w->rate, limit = INFINITY, most = 0;
    int best = -1;
    memset(rate, 0, (size_t)n * sizeof *rate);
    for (int j = 0; j < n; j++) w->direction[j] = 0;
    add_gradient(w, k, 1, w->direction);
    for (int j = 0; j < n; j++) {
        if (w->direction[j] == 0) continue;
        for (int s = 0; s < n; s++) rate[s] += w->direction[j] * w->inverse[(size_t)j * n + s];
    }
    for (int s = 0; s < n; s++) most = fmax(most, fabs(rate[s]));
    const double least = PIVOT_TOLERANCE * fmax(1, most);
    for (int pass = 0; pass < 2; pass++) {
        double largest = 0;
        for (int s = 0; s < n; s++) {
            const double r = sign * rate[s];
            const bool blocks = w->side[s] == PIN     ? fabs(r) > least
                                : w->side[s] == LOWER ? r > least
                                : w->side[s] == UPPER ? r < -least
                                                      : false;
            if (!blocks) continue;
            const double y = w->side[s] == PIN ? 0 : fmax(0, w->side[s] * w->multiplier[s]);
            if (pass == 0) {
                limit = fmin(limit, (y + DUAL_TOLERANCE) / fabs(r));
            } else if (y / fabs(r) <= limit && fabs(r) > largest) {
                largest = fabs(r);
                best = s;
            }
        }
    }
    if (best < 0) return false;
    const enum side side = lower_of(w, k) == upper_of(w, k) ? EQUAL : low ? LOWER : UPPER;
    exchange(w, best, k, side, low ? lower_of(w, k) : upper_of(w, k), rate);
    return true;
}

/* Slot s leaves its constraint and moves to the next one. False: nothing stops it (a ray). */
static bool pivot_primal(struct working_set *w, int s)
{
    const int n = w->n;
    const double sign = w->side[s] == PIN ? (w->multiplier[s] > 0 ? -1 : 1) : w->side[s];
    double limit = INFINITY, largest = 0, most = 0;
    int best = -1;
    for (int j = 0; j < n; j++) {
        w->direction[j] = sign * w->inverse[(size_t)j * n + s];
        most = fmax(most, fabs(w->direction[j]));
    }
    const double least = PIVOT_TOLERANCE * most;
    for (int k = 0; k < w->all; k++) {
        if (w->slot[k] >= 0 && w->slot[k] != s) {
            w->rate[k] = 0;
            continue;
        }
        w->rate[k] = w->slot[k] == s ? sign : dot(w, k, w->direction);
        const double r = w->rate[k], room = r < 0 ? w->activity[k] - lower_of(w, k) : upper_of(w, k) - w->activity[k];
        if (fabs(r) > least) limit = fmin(limit, (fmax(0, room) + RATIO_SLACK * w->scale[k]) / fabs(r));
    }
    if (limit == INFINITY) return false;
    for (int k = 0; k < w->all; k++) {
        const double r = w->rate[k], room = r < 0 ? w->activity[k] - lower_of(w, k) : upper_of(w, k) - w->activity[k];
        if (fabs(r) <= least || fmax(0, room) / fabs(r) > limit || fabs(r) <= largest) continue;
        best = k;
        largest = fabs(r);
    }
    w->stalled = limit * fabs(w->multiplier[s]) > 1e-9 ? 0 : w->stalled + 1;
    const enum side side = lower_of(w, best) == upper_of(w, best) ? EQUAL : w->rate[best] < 0 ? LOWER : UPPER;
    const double target = w->rate[best] < 0 ? lower_of(w, best) : upper_of(w, best);
    if (w->slot[best] == s) { /* the same constraint: from one bound to the other */
        w->side[s] = side;
        w->target[s] = target;
        return true;
    }
    for (int j = 0; j < n; j++) w->direction[j] = 0;
    add_gradient(w, best, 1, w->direction);
    double *rate = w->rate;
    memset(rate, 0, (size_t)n * sizeof *rate);
    for (int j = 0; j < n; j++) {
        if (w->direction[j] == 0) continue;
        for (int t = 0; t < n; t++) rate[t] += w->direction[j] * w->inverse[(size_t)j * n + t];
    }
    exchange(w, s, best, side, target, rate);
    return true;
}

static void hold_constraint(struct working_set *w, int s, int k, bool low)
{
    w->member[s] = k;
    w->side[s] = lower_of(w, k) == upper_of(w, k) ? EQUAL : low ? LOWER : UPPER;
    w->target[s] = low ? lower_of(w, k) : upper_of(w, k);
    w->slot[k] = s;
}

static void pin(struct working_set *w, int s, int column)
{
    w->member[s] = column;
    w->side[s] = PIN;
    w->target[s] = w->x[column];
}

/* Puts each column at the bound that its cost pushes it to. */
static void start_at_bounds(struct working_set *w)
{
    for (int j = 0; j < w->n; j++) {
        const bool low = isfinite(w->lp->lower[j]), high = isfinite(w->lp->upper[j]);
        if (low || high)
            hold_constraint(w, j, j, low && (!high || w->lp->cost[j] >= 0));
        else
            pin(w, j, j);
    }
}

struct candidate {
    double distance;
    int constraint;
};

static int by_distance(const void *a, const void *b)
{
    const struct candidate *x = a, *y = b;
    if (x->distance != y->distance) return x->distance < y->distance ? -1 : 1;
    return x->constraint - y->constraint;
}

/* Holds the independent constraints that are nearest to x, and pins the remaining columns. */
static bool start_at_active(struct working_set *w, struct hapt_arena *arena)
{
    const int n = w->n;
    struct candidate *candidate = hapt_arena_alloc(arena, (size_t)w->all, sizeof *candidate);
    int *pivot = hapt_arena_alloc(arena, (size_t)n, sizeof *pivot), count = 0, held = 0;
    bool *taken = hapt_arena_alloc(arena, (size_t)n, sizeof *taken);
    if (!candidate || !pivot || !taken) return false;
    for (int k = 0; k < w->all; k++) {
        const double activity = dot(w, k, w->x);
        const double room = fmin(activity - lower_of(w, k), upper_of(w, k) - activity) / (1 + fabs(activity));
        const bool equal = lower_of(w, k) == upper_of(w, k);
        if (equal || room < ACTIVE_TOLERANCE) candidate[count++] = (struct candidate){equal ? -1 : fabs(room), k};
    }
    qsort(candidate, (size_t)count, sizeof *candidate, by_distance);
    /* Row echelon form of the accepted constraints, each scaled to a pivot of one. */
    for (int c = 0; c < count && held < n; c++) {
        const int k = candidate[c].constraint;
        double *row = w->matrix + (size_t)held * n, size = 0, left = 0;
        memset(row, 0, (size_t)n * sizeof *row);
        add_gradient(w, k, 1, row);
        for (int j = 0; j < n; j++) size = fmax(size, fabs(row[j]));
        for (int h = 0; h < held; h++) {
            const double factor = row[pivot[h]];
            if (factor == 0) continue;
            for (int j = 0; j < n; j++) row[j] -= factor * w->matrix[(size_t)h * n + j];
            row[pivot[h]] = 0;
        }
        for (int j = 0; j < n; j++) {
            if (taken[j] || fabs(row[j]) <= left) continue;
            left = fabs(row[j]);
            pivot[held] = j;
        }
        if (left < 1e-3 * size) continue;
        const double inverse = 1 / row[pivot[held]];
        for (int j = 0; j < n; j++) row[j] *= inverse;
        taken[pivot[held]] = true;
        const double activity = dot(w, k, w->x);
        hold_constraint(w, held++, k, activity - lower_of(w, k) <= upper_of(w, k) - activity);
    }
    for (int j = 0; j < n; j++)
        if (!taken[j]) pin(w, held++, j);
    return true;
}

static bool reserve(struct working_set *w, struct hapt_arena *arena)
{
    const size_t n = (size_t)w->n, all = (size_t)w->all;
    w->member = hapt_arena_alloc(arena, n, sizeof *w->member);
    w->side = hapt_arena_alloc(arena, n, sizeof *w->side);
    w->slot = hapt_arena_alloc(arena, all, sizeof *w->slot);
    w->inverse = hapt_arena_alloc(arena, n * n, sizeof(double));
    w->matrix = hapt_arena_alloc(arena, n * 2 * n, sizeof(double));
    double **const columns[] = {&w->target, &w->x, &w->multiplier, &w->cost, &w->direction};
    double **const constraints[] = {&w->activity, &w->scale, &w->rate};
    bool there = w->member && w->side && w->slot && w->inverse && w->matrix;
    for (int i = 0; i < 5; i++) there = (*columns[i] = hapt_arena_alloc(arena, n, sizeof(double))) && there;
    for (int i = 0; i < 3; i++) there = (*constraints[i] = hapt_arena_alloc(arena, all, sizeof(double))) && there;
    for (size_t k = 0; there && k < all; k++) w->slot[k] = -1;
    return there;
}

/* One round of pivots. *finished: the result is final. */
static enum hapt_lp_result step(struct working_set *w, bool *finished)
{
    evaluate(w);
    const int violated = find_violated(w);
    *finished = false;
    if (violated >= 0) {
        if (find_wrong(w) >= 0) shift_costs(w);
        *finished = !pivot_dual(w, violated);
        return excess(w, violated) > INFEASIBLE_BEYOND ? HAPT_LP_INFEASIBLE : HAPT_LP_FAILED;
    }
    if (w->shifted) {
        memcpy(w->cost, w->lp->cost, (size_t)w->n * sizeof *w->cost);
        w->shifted = false;
        return HAPT_LP_FAILED;
    }
    const int slot = find_wrong(w);
    *finished = slot < 0 || !pivot_primal(w, slot);
    return slot < 0 ? HAPT_LP_OPTIMAL : HAPT_LP_UNBOUNDED;
}

enum hapt_lp_result lp_pivot(const struct hapt_lp *lp, bool warm_start, struct hapt_arena *arena, double *x, double *y,
                             int *pivots)
{
    struct working_set w = {.lp = lp, .n = lp->column_count, .all = lp->column_count + lp->row_count, .random = 1};
    if (!reserve(&w, arena)) return HAPT_LP_FAILED;
    memcpy(w.cost, lp->cost, (size_t)w.n * sizeof *w.cost);
    for (int j = 0; j < w.n; j++) w.x[j] = fmin(fmax(x[j], lp->lower[j]), lp->upper[j]);
    if (!warm_start)
        start_at_bounds(&w);
    else if (!start_at_active(&w, arena))
        return HAPT_LP_FAILED;
    const int limit = 200 + 20 * w.all;
    for (int round = 0, fresh = -1; round < limit; round++) {
        bool finished;
        if (fresh < 0 || round - fresh >= REFRESH) {
            if (!invert(&w)) return HAPT_LP_FAILED;
            fresh = round;
        }
        const enum hapt_lp_result result = step(&w, &finished);
        *pivots = round;
        if (!finished) continue;
        if (fresh < round) { /* a final result needs a fresh inverse */
            fresh = -1;
            continue;
        }
        for (int j = 0; j < w.n; j++) x[j] = w.x[j];
        for (int i = 0; i < lp->row_count; i++) y[i] = w.slot[w.n + i] >= 0 ? w.multiplier[w.slot[w.n + i]] : 0;
        return result;
    }
    return HAPT_LP_FAILED;
}
