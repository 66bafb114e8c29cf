/* Efficiency curves and the roofline that uses them. */
#include "hapt/efficiency.h"

#include <math.h>
#include <string.h>

/*
 * Well-tuned libraries reach three quarters of the data sheet's rate on large matrix products, less than half in fused
 * attention, and four fifths of the memory bandwidth. Small products cannot fill an accelerator: a product of 2^30
 * FLOPs (6 us of an A100 at its peak) runs at half of that rate. In general the efficiency follows s / (s + 2^30). A
 * core needs 2^16 instead.
 */
static const struct hapt_efficiency_table accelerator = {
    .curve = {[HAPT_EFFICIENCY_PRODUCT] = {7,
                                           {24, 26, 28, 30, 32, 34, 38},
                                           {0.01154, 0.04412, 0.15, 0.375, 0.6, 0.7059, 0.747}},
              [HAPT_EFFICIENCY_ATTENTION] = {7,
                                             {24, 26, 28, 30, 32, 34, 38},
                                             {0.006923, 0.02647, 0.09, 0.225, 0.36, 0.4235, 0.4482}},
              [HAPT_EFFICIENCY_VECTOR] = {1, {0}, {0.3}},
              [HAPT_EFFICIENCY_MEMORY] = {1, {0}, {0.8}}},
    .launch_s = 4e-6,
};
static const struct hapt_efficiency_table core = {
    .curve = {[HAPT_EFFICIENCY_PRODUCT] = {7,
                                           {10, 12, 14, 16, 18, 20, 24},
                                           {0.01154, 0.04412, 0.15, 0.375, 0.6, 0.7059, 0.747}},
              [HAPT_EFFICIENCY_ATTENTION] = {7,
                                             {10, 12, 14, 16, 18, 20, 24},
                                             {0.006923, 0.02647, 0.09, 0.225, 0.36, 0.4235, 0.4482}},
              [HAPT_EFFICIENCY_VECTOR] = {1, {0}, {0.3}},
              [HAPT_EFFICIENCY_MEMORY] = {1, {0}, {0.8}}},
    .launch_s = 0.5e-6,
};

const struct hapt_efficiency_table *hapt_efficiency_default(const char *backend)
{
    return strcmp(backend, "cpu") == 0 ? &core : &accelerator;
}

double hapt_efficiency_of(const struct hapt_efficiency_table *table, enum hapt_efficiency_class class, double size)
{
    const struct hapt_efficiency_curve *curve = &table->curve[class];
    const double at = size > 1 ? log2(size) : 0;
    if (at <= curve->size[0]) return curve->share[0];
    for (int k = 1; k < curve->count; k++) {
        if (at > curve->size[k]) continue;
        const double along = (at - curve->size[k - 1]) / (curve->size[k] - curve->size[k - 1]);
        return curve->share[k - 1] * pow(curve->share[k] / curve->share[k - 1], along);
    }
    return curve->share[curve->count - 1];
}

const char *hapt_efficiency_class_name(enum hapt_efficiency_class class)
{
    static const char *const name[] = {"product", "attention", "vector", "memory"};
    HAPT_ASSERT(class >= 0 && class < HAPT_EFFICIENCY_CLASS_COUNT);
    return name[class];
}

enum hapt_efficiency_class hapt_efficiency_class_of(const struct hapt_op_type *type)
{
    if (!type->heavy) return HAPT_EFFICIENCY_VECTOR;
    return type->contracts || type->product ? HAPT_EFFICIENCY_PRODUCT : HAPT_EFFICIENCY_ATTENTION;
}

enum hapt_status hapt_efficiency_check(const struct hapt_efficiency_table *table)
{
    if (!(table->launch_s >= 0 && isfinite(table->launch_s)))
        return hapt_fail(HAPT_ERR_INPUT, NULL, "an operator's launch takes %g s; it must be finite and not negative",
                         table->launch_s);
    for (int class = 0; class < HAPT_EFFICIENCY_CLASS_COUNT; class ++) {
        const struct hapt_efficiency_curve *curve = &table->curve[class];
        const char *name = hapt_efficiency_class_name(class);
        if (curve->count < 1 || curve->count > HAPT_EFFICIENCY_KNOTS)
            return hapt_fail(HAPT_ERR_INPUT, NULL, "the efficiency of class %s has %d knots", name, curve->count);
        for (int k = 0; k < curve->count; k++) {
            if (!(curve->share[k] > 0 && isfinite(curve->share[k])) || !(curve->size[k] >= 0 && curve->size[k] < 128))
                return hapt_fail(HAPT_ERR_INPUT, NULL, "the efficiency of class %s is %g at size 2^%g", name,
                                 curve->share[k], curve->size[k]);
            if (k == 0) continue;
            const double rise = curve->size[k] - curve->size[k - 1];
            if (!(rise > 0))
                return hapt_fail(HAPT_ERR_INPUT, NULL, "the sizes of class %s do not ascend at 2^%g", name,
                                 curve->size[k]);
            if (log2(curve->share[k] / curve->share[k - 1]) > rise + 1e-9)
                return hapt_fail(HAPT_ERR_INPUT, "an efficiency may rise with the size, but not faster than the size",
                                 "class %s would take less time at size 2^%g than at 2^%g", name, curve->size[k],
                                 curve->size[k - 1]);
        }
    }
    return HAPT_OK;
}

double hapt_roofline_peak_flops(const struct hapt_device_spec *device, enum hapt_dtype dtype)
{
    double flops = device->peak_flops[dtype];
    if (dtype == HAPT_F32 && device->tf32) flops = device->peak_flops[HAPT_BF16] / 2;
    if (flops <= 0 && dtype == HAPT_BF16) flops = device->peak_flops[HAPT_F16];
    if (flops <= 0 && dtype == HAPT_F16) flops = device->peak_flops[HAPT_BF16];
    return flops > 0 ? flops : device->peak_flops[HAPT_F32];
}

struct hapt_roofline hapt_roofline_describe(const struct hapt_device_spec *device, enum hapt_dtype dtype,
                                            const struct hapt_efficiency_table *table)
{
    const double peak = hapt_roofline_peak_flops(device, dtype), fp32 = device->peak_flops[HAPT_F32];
    return (struct hapt_roofline){.peak_flops = peak,
                                  .vector_flops = fp32 > 0 ? fp32 : peak,
                                  .bandwidth = device->memory_bandwidth,
                                  .slowdown = device->slowdown >= 1 ? device->slowdown : 1,
                                  .table = table ? table : hapt_efficiency_default(device->backend)};
}

double hapt_roofline_graph_s(const struct hapt_roofline *roofline, const struct hapt_graph *graph, int op)
{
    const struct hapt_op *what = &graph->op[op];
    return hapt_roofline_operator_s(roofline, hapt_efficiency_class_of(hapt_op_type_at(what->type)),
                                    hapt_op_flops(graph, what, 1), hapt_op_bytes(graph, what, 1)) +
           hapt_roofline_stream_s(roofline, hapt_op_pass_bytes(graph, what));
}

double hapt_roofline_stream_s(const struct hapt_roofline *roofline, double bytes)
{
    if (roofline->bandwidth <= 0) return 0;
    return roofline->slowdown * bytes /
           (roofline->bandwidth * hapt_efficiency_of(roofline->table, HAPT_EFFICIENCY_MEMORY, bytes));
}

double hapt_roofline_operator_s(const struct hapt_roofline *roofline, enum hapt_efficiency_class class, double flops,
                                double bytes)
{
    const double rate = class == HAPT_EFFICIENCY_VECTOR ? roofline->vector_flops : roofline->peak_flops;
    const double compute_s =
        rate > 0 ? roofline->slowdown * flops / (rate * hapt_efficiency_of(roofline->table, class, flops)) : 0;
    return roofline->slowdown * roofline->table->launch_s + fmax(compute_s, hapt_roofline_stream_s(roofline, bytes));
}
