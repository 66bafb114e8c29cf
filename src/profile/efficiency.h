/*
 * Efficiency: the fraction of a device's rates that an operator reaches, by its class and size. This one table turns
 * FLOPs and bytes into seconds. Built-in curves describe a typical device of a back end; others are fitted or loaded.
 *
 * Roofline: an operator takes launch_s + max(FLOPs / (rate * share(FLOPs)), bytes / (bandwidth * share(bytes))). A
 * curve is piecewise linear in (log2 size, log2 share) and constant beyond its ends. No share rises faster than its
 * size, so a larger operator never takes less time (efficiency_check).
 */
#ifndef HAPT_PROFILE_EFFICIENCY_H
#define HAPT_PROFILE_EFFICIENCY_H

#include "hapt/cluster.h"
#include "hapt/ops.h"

enum efficiency_class {
    EFFICIENCY_PRODUCT,   /* matrix products: FLOPs relative to the peak in the model's type */
    EFFICIENCY_ATTENTION, /* fused attention: FLOPs relative to the same peak */
    EFFICIENCY_VECTOR,    /* element-wise arithmetic and reductions: FLOPs relative to the fp32 rate */
    EFFICIENCY_MEMORY,    /* bytes of any operator relative to the memory bandwidth */
    EFFICIENCY_CLASS_COUNT
};

enum { EFFICIENCY_KNOTS = 12 };

struct efficiency_curve {
    int count;                      /* number of knots, 1 to EFFICIENCY_KNOTS */
    double size[EFFICIENCY_KNOTS];  /* log2 of FLOPs (memory: of bytes), ascending */
    double share[EFFICIENCY_KNOTS]; /* fraction of the rate, > 0 */
};

struct efficiency_table {
    struct efficiency_curve curve[EFFICIENCY_CLASS_COUNT];
    double launch_s; /* per operator, at any size */
};

/* The built-in table of a back end ("cpu", "cuda", ...); unknown ones count as accelerators. */
const struct efficiency_table *efficiency_default(const char *backend);
/* The fraction of the rate reached at `size` FLOPs or bytes. */
double efficiency_of(const struct efficiency_table *table, enum efficiency_class class, double size);
/* "product", "attention", "vector" or "memory". */
const char *efficiency_class_name(enum efficiency_class class);
/* The class of an operator's FLOPs (never MEMORY). */
enum efficiency_class efficiency_class_of(const struct hapt_op_type *type);
/* Checks the invariants above; HAPT_ERR_INPUT. */
enum hapt_status efficiency_check(const struct efficiency_table *table);

/* A device's peak rates in one element type, from its description, and the fractions that operators reach. A rate
 * of 0 is unknown and costs nothing. */
struct roofline {
    double peak_flops, vector_flops; /* FLOP/s without slowdown */
    double bandwidth;                /* byte/s */
    double slowdown;                 /* >= 1: factor on every time */
    const struct efficiency_table *table;
};

/* `table` NULL: the built-in one of the device's back end. A bf16 model runs in fp16 on a device without bf16, and
 * in fp32 on one without either. */
struct roofline roofline_describe(const struct hapt_device_spec *device, enum hapt_dtype dtype,
                                  const struct efficiency_table *table);
double roofline_peak_flops(const struct hapt_device_spec *device, enum hapt_dtype dtype);
/* Seconds of one operator of that class. */
double roofline_operator_s(const struct roofline *roofline, enum efficiency_class class, double flops, double bytes);
/* Seconds to stream bytes through memory. */
double roofline_stream_s(const struct roofline *roofline, double bytes);

#endif
