/*
 * Efficiency: the fraction of a device's rates that an operator reaches, by its class and size. This one table turns
 * FLOPs and bytes into seconds. Built-in curves describe a typical device of a back end; others are fitted or loaded.
 *
 * Roofline: an operator takes launch_s + max(FLOPs / (rate * share(FLOPs)), bytes / (bandwidth * share(bytes))). A
 * curve is piecewise linear in (log2 size, log2 share) and constant beyond its ends. No share rises faster than its
 * size, so a larger operator never takes less time (hapt_efficiency_check).
 */
#ifndef HAPT_EFFICIENCY_H
#define HAPT_EFFICIENCY_H

#include "hapt/cluster.h"
#include "hapt/ops.h"

enum hapt_efficiency_class {
    HAPT_EFFICIENCY_PRODUCT,   /* matrix products: FLOPs relative to the peak in the model's type */
    HAPT_EFFICIENCY_ATTENTION, /* fused attention: FLOPs relative to the same peak */
    HAPT_EFFICIENCY_VECTOR,    /* element-wise arithmetic and reductions: FLOPs relative to the fp32 rate */
    HAPT_EFFICIENCY_MEMORY,    /* bytes of any operator relative to the memory bandwidth */
    HAPT_EFFICIENCY_CLASS_COUNT
};

enum { HAPT_EFFICIENCY_KNOTS = 12 };

struct hapt_efficiency_curve {
    int count;                           /* number of knots, 1 to HAPT_EFFICIENCY_KNOTS */
    double size[HAPT_EFFICIENCY_KNOTS];  /* log2 of FLOPs (memory: of bytes), ascending */
    double share[HAPT_EFFICIENCY_KNOTS]; /* fraction of the rate, > 0 */
};

struct hapt_efficiency_table {
    struct hapt_efficiency_curve curve[HAPT_EFFICIENCY_CLASS_COUNT];
    double launch_s; /* per operator, at any size */
};

/* The built-in table of a back end ("cpu", "cuda", ...); unknown ones count as accelerators. */
const struct hapt_efficiency_table *hapt_efficiency_default(const char *backend);
/* The fraction of the rate reached at `size` FLOPs or bytes. */
double hapt_efficiency_of(const struct hapt_efficiency_table *table, enum hapt_efficiency_class class, double size);
/* "product", "attention", "vector" or "memory". */
const char *hapt_efficiency_class_name(enum hapt_efficiency_class class);
/* The class of an operator's FLOPs (never MEMORY). */
enum hapt_efficiency_class hapt_efficiency_class_of(const struct hapt_op_type *type);
/* Checks the invariants above; HAPT_ERR_INPUT. */
enum hapt_status hapt_efficiency_check(const struct hapt_efficiency_table *table);

/* A device's peak rates in one element type, from its description, and the fractions that operators reach. A rate
 * of 0 is unknown and costs nothing. */
struct hapt_roofline {
    double peak_flops, vector_flops; /* FLOP/s without slowdown */
    double bandwidth;                /* byte/s */
    double slowdown;                 /* >= 1: factor on every time */
    const struct hapt_efficiency_table *table;
};

/* `table` NULL: the built-in one of the device's back end. A bf16 model runs in fp16 on a device without bf16, and
 * in fp32 on one without either. */
struct hapt_roofline hapt_roofline_describe(const struct hapt_device_spec *device, enum hapt_dtype dtype,
                                            const struct hapt_efficiency_table *table);
double hapt_roofline_peak_flops(const struct hapt_device_spec *device, enum hapt_dtype dtype);
/* Seconds of one operator of that class. */
double hapt_roofline_operator_s(const struct hapt_roofline *roofline, enum hapt_efficiency_class class, double flops,
                                double bytes);
/* The same for operator `op` of a graph, by its shapes there. */
double hapt_roofline_graph_s(const struct hapt_roofline *roofline, const struct hapt_graph *graph, int op);
/* Seconds to stream bytes through memory. */
double hapt_roofline_stream_s(const struct hapt_roofline *roofline, double bytes);

#endif
