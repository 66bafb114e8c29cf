/*
 * Efficiency: which share of a device's rates an operator reaches, by its class and size; the one table that turns
 * FLOPs and bytes into seconds. Built-in curves stand for a back end at large; others are fitted or loaded by whoever
 * holds measurements.
 *
 * An operator takes launch_s + max(FLOPs / (rate * share(FLOPs)), bytes / (bandwidth * share(bytes))), the roofline.
 * A curve is piecewise linear in (log2 size, log2 share) and flat beyond its ends. No share rises faster than its size,
 * so that a larger operator never takes less time (efficiency_check).
 */
#ifndef HAPT_PROFILE_EFFICIENCY_H
#define HAPT_PROFILE_EFFICIENCY_H

#include "hapt/cluster.h"
#include "hapt/ops.h"

enum efficiency_class {
    EFFICIENCY_PRODUCT,   /* matrix products: FLOPs against the peak in the model's type */
    EFFICIENCY_ATTENTION, /* fused attention: FLOPs against the same peak */
    EFFICIENCY_VECTOR,    /* element-wise arithmetic and reductions: FLOPs against the fp32 rate */
    EFFICIENCY_MEMORY,    /* bytes of any operator against the memory bandwidth */
    EFFICIENCY_CLASS_COUNT
};

enum { EFFICIENCY_KNOTS = 12 };

struct efficiency_curve {
    int count;                      /* of knots, 1 to EFFICIENCY_KNOTS */
    double size[EFFICIENCY_KNOTS];  /* log2 of FLOPs (memory: of bytes), ascending */
    double share[EFFICIENCY_KNOTS]; /* of the rate, above 0 */
};

struct efficiency_table {
    struct efficiency_curve curve[EFFICIENCY_CLASS_COUNT];
    double launch_s; /* of one operator, whatever its size */
};

/* The built-in table of a back end ("cpu", "cuda", ...; unknown ones are taken for accelerators). */
const struct efficiency_table *efficiency_default(const char *backend);
/* Share of the rate that `size` FLOPs or bytes reach. */
double efficiency_of(const struct efficiency_table *table, enum efficiency_class class, double size);
/* "product", "attention", "vector" or "memory". */
const char *efficiency_class_name(enum efficiency_class class);
/* Whose FLOPs an operator's are (never MEMORY). */
enum efficiency_class efficiency_class_of(const struct hapt_op_type *type);
/* Every invariant above; HAPT_ERR_INPUT. */
enum hapt_status efficiency_check(const struct efficiency_table *table);

/* What a device can do at best in one element type, as its description has it, and which share of it operators reach. A
 * rate of 0 is not known and costs nothing. */
struct roofline {
    double peak_flops, vector_flops; /* FLOP/s without slowdown */
    double bandwidth;                /* byte/s */
    double slowdown;                 /* >= 1: stretches every time */
    const struct efficiency_table *table;
};

/* `table` NULL: the built-in one of the device's back end. A device without bf16 computes such a model in fp16, one
 * without either in fp32. */
struct roofline roofline_describe(const struct hapt_device_spec *device, enum hapt_dtype dtype,
                                  const struct efficiency_table *table);
double roofline_peak_flops(const struct hapt_device_spec *device, enum hapt_dtype dtype);
/* Seconds of one operator of that class. */
double roofline_operator_s(const struct roofline *roofline, enum efficiency_class class, double flops, double bytes);
/* Seconds to stream bytes through memory. */
double roofline_stream_s(const struct roofline *roofline, double bytes);

#endif
