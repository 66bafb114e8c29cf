/* Group norm: a loop in double computes the forward, central differences its gradients. */
#include "kernels.h"

static enum hapt_dtype types[] = {HAPT_F32, HAPT_BF16}; /* the second: each half-precision type */

/* input: x, gamma, beta; integer: groups; real: epsilon. Output: y, mean, rstd. */
static void reference(const struct problem *problem, double *out)
{
    const struct tensor *x = problem->input[0], *gamma = problem->input[1], *beta = problem->input[2];
    const int64_t rows = x->view.shape[0], channels = x->view.shape[1], groups = problem->integer[0];
    const int64_t pixels = x->view.shape[2] * x->view.shape[3], size = channels / groups * pixels;
    for (int64_t g = 0; g < rows * groups; g++) {
        double mean = 0, variance = 0;
        for (int64_t i = 0; i < size; i++) mean += x->value[g * size + i] / (double)size;
        for (int64_t i = 0; i < size; i++) variance += pow(x->value[g * size + i] - mean, 2) / (double)size;
        const double rstd = 1 / sqrt(variance + problem->real[0]);
        for (int64_t i = 0; i < size; i++) {
            const int64_t channel = (g * size + i) / pixels % channels;
            out[g * size + i] = (x->value[g * size + i] - mean) * rstd * gamma->value[channel] + beta->value[channel];
        }
        if (problem->out_count == x->count) continue; /* without statistics */
        out[x->count + g] = mean;
        out[x->count + rows * groups + g] = rstd;
    }
}

static void check_group_norm(const int64_t *shape, int64_t groups, float middle, enum hapt_dtype dtype, bool add,
                             int threads)
{
    struct tensor x = tensor_make(dtype, shape, middle - 2, middle + 2), y = tensor_make(dtype, shape, 0, 0),
                  dy = tensor_make(dtype, shape, -1, 1), dx = tensor_make(dtype, shape, -1, 1);
    struct tensor gamma = TENSOR(dtype, -2, 2, shape[1]), beta = TENSOR(dtype, -1, 1, shape[1]);
    struct tensor mean = TENSOR(HAPT_F32, 0, 0, shape[0], groups), rstd = TENSOR(HAPT_F32, 0, 0, shape[0], groups);
    struct tensor dgamma = TENSOR(HAPT_F32, -1, 1, shape[1]), dbeta = TENSOR(HAPT_F32, -1, 1, shape[1]);
    struct problem problem = {.forward = reference,
                              .input = {&x, &gamma, &beta},
                              .out_count = y.count + 2 * mean.count,
                              .dy = dy.value,
                              .integer = {groups},
                              .real = {1e-3}};
    const double unit = (dtype != HAPT_F32 ? HALF_UNIT(dtype) : 0) + 2e-7 * fabsf(middle - 1); /* the mean is fp32 */
    double *expected = malloc((size_t)problem.out_count * sizeof *expected);
    reference(&problem, expected);
    problem.out_count = y.count;
    struct hapt_call call = {.input_count = 3,
                             .output_count = 3,
                             .input = {x.view, gamma.view, beta.view},
                             .output = {y.view, mean.view, rstd.view},
                             .integer = {groups},
                             .real = {1e-3},
                             .threads = threads};
    kernel_run("group_norm", dtype, &call);
    check_close(&y.view, expected, 3e-6 + unit, "group_norm");
    check_close(&mean.view, expected + y.count, 2e-6, "group_norm's mean");
    check_close(&rstd.view, expected + y.count + mean.count, 4e-6, "group_norm's rstd");
    struct hapt_call back = {.input_count = 5,
                             .output_count = 3,
                             .input = {x.view, gamma.view, mean.view, rstd.view, dy.view},
                             .output = {dx.view, dgamma.view, dbeta.view},
                             .integer = {groups},
                             .accumulate = add ? 7 : 0,
                             .threads = threads};
    kernel_run("group_norm_backward", dtype, &back);
    check_gradient(&problem, 0, &dx.view, add ? dx.value : NULL, 40, 2e-5 + 2 * unit, "group_norm's dx");
    check_gradient(&problem, 1, &dgamma.view, add ? dgamma.value : NULL, 20, 1e-5 + (middle > 1 ? 2 * unit : 0),
                   "group_norm's dgamma");
    check_gradient(&problem, 2, &dbeta.view, add ? dbeta.value : NULL, 20, 1e-5, "group_norm's dbeta");
    struct tensor frozen = tensor_make(dtype, shape, -1, 1);
    back.output_count = 1, back.output[0] = frozen.view, back.accumulate = add;
    kernel_run("group_norm_dx", dtype, &back);
    check_gradient(&problem, 0, &frozen.view, add ? frozen.value : NULL, 40, 2e-5 + 2 * unit, "group_norm_dx");
    free(expected);
    struct tensor *made[] = {&x, &y, &dy, &dx, &gamma, &beta, &mean, &rstd, &dgamma, &dbeta, &frozen};
    for (size_t i = 0; i < sizeof made / sizeof *made; i++) tensor_free(made[i]);
}

/* Planes of one pixel, of odd sizes, of whole packs, and of more pixels than a warp takes; groups of many channels. */
static void group_norms(void)
{
    static const struct {
        int64_t shape[5], groups;
    } cases[] = {{{3, 12, 1, 1}, 3},  {{2, 6, 7, 5}, 6},   {{3, 10, 4, 6}, 1}, {{1, 4, 16, 16}, 2},
                 {{2, 4, 33, 37}, 2}, {{1, 2, 40, 40}, 1}, {{2, 80, 3, 3}, 2}, {{1, 300, 2, 3}, 1}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int v = 0; v < 8 && !is_repeat(v & 4); v++)
            if (!is_seen(types[v & 1]) && shape_wanted(4, cases[i].shape))
                check_group_norm(cases[i].shape, cases[i].groups, 1, types[v & 1], v & 2, v & 4 ? 2 : 1);
}

/* The mean is much larger than the deviations: sums of squares would cancel. */
static void far_from_zero(void)
{
    const int64_t shape[] = {2, 6, 9, 11, 0};
    for (int threads = 1; threads <= 2 && !is_repeat(threads > 1); threads++)
        if (!is_seen(HAPT_F32)) check_group_norm(shape, 2, 1000, HAPT_F32, false, threads);
}

int main(int argc, char **argv)
{
    kernels_init(&argc, &argv);
    for (HALF_TYPES(half)) {
        types[1] = half;
        RUN(group_norms);
        RUN(far_from_zero);
    }
    return kernels_finish();
}
