/*
 * Calibration: efficiency tables fitted to measured operators, one for each kind of device and element type, and their
 * file.
 *
 * A table's efficiencies are fractions of the rates stored with it. Prediction uses both, so a table does not depend on
 * the source of the cluster's description.
 */
#ifndef HAPT_CALIBRATION_H
#define HAPT_CALIBRATION_H

#include "hapt/efficiency.h"

/* One operator of one shape on one device; the time is the median of its runs. */
struct hapt_calibration_sample {
    char op[32];
    enum hapt_efficiency_class class; /* the curve that it measures */
    double flops, bytes, time_s;      /* without slowdown */
};

struct hapt_calibration_curve {
    int samples[HAPT_EFFICIENCY_KNOTS];     /* number per knot */
    double residual[HAPT_EFFICIENCY_KNOTS]; /* worst |predicted / measured - 1| per knot */
};

/* All-reduces over the devices of a submesh, as measured and as predicted from the links. */
struct hapt_calibration_sum {
    int ranks;
    double bytes, time_s, predicted_s;
};

struct hapt_calibration_device {
    char name[64], backend[16];
    enum hapt_dtype dtype;
    double peak_flops, vector_flops, bandwidth; /* the rates that efficiencies refer to: FLOP/s, FLOP/s, byte/s */
    struct hapt_efficiency_table table;
    struct hapt_calibration_curve curve[HAPT_EFFICIENCY_CLASS_COUNT];
    double median_residual; /* over all samples */
    int sample_count, sum_count;
    struct hapt_calibration_sample *sample;
    struct hapt_calibration_sum *sum;
};

struct hapt_efficiency {
    const char *path; /* NULL: not from a file */
    int count;
    struct hapt_calibration_device *device;
};

/* The class that an operator of that type measures: memory if it computes little per byte moved. */
enum hapt_efficiency_class hapt_calibration_class(const struct hapt_op_type *type, double flops, double bytes);

/*
 * Fits the table, the curves' statistics and the median residual of a device; its rates and samples are inputs. Each
 * curve has at most one knot per octave of size. A knot is the mean seconds per FLOP or byte, over the samples within a
 * factor of 2 of their median. So up to half of them may be outliers. Times rise with size (isotonic). A class without
 * samples keeps the built-in curve.
 */
enum hapt_status hapt_calibration_fit(struct hapt_calibration_device *device);
/* Predicted seconds on a fitted device. */
double hapt_calibration_predicted_s(const struct hapt_calibration_device *device,
                                    const struct hapt_calibration_sample *sample);

/* The rates and table for predicting a device: calibrated if `efficiency` (may be NULL) has it, else built in. */
struct hapt_roofline hapt_calibration_roofline(const struct hapt_efficiency *efficiency,
                                               const struct hapt_device_spec *device, enum hapt_dtype dtype);
/* Measured over predicted seconds of an all-reduce of that many bytes; 1 if nothing was measured. */
double hapt_calibration_sum_factor(const struct hapt_efficiency *efficiency, const struct hapt_device_spec *device,
                                   enum hapt_dtype dtype, double bytes);

/* The file; format: `hapt help profile`. */
enum hapt_status hapt_efficiency_save(const char *path, const struct hapt_efficiency *efficiency);
enum hapt_status hapt_efficiency_load(const char *path, struct hapt_arena *arena, struct hapt_efficiency **efficiency);
/* The fitted tables, one row per knot of a curve. */
struct hapt_efficiency_row {
    const char *device;
    enum hapt_dtype dtype;
    const char *class, *unit; /* unit of `size` */
    double size;              /* FLOP; class memory: byte */
    int samples;
    double efficiency;     /* fraction of the device's rate */
    double worst_residual; /* |predicted / measured - 1| */
};
int hapt_efficiency_row_count(const struct hapt_efficiency *efficiency);
struct hapt_efficiency_row hapt_efficiency_row_at(const struct hapt_efficiency *efficiency, int index);
/* True if it has a table for that device and type; otherwise prediction uses the built-in one. */
bool hapt_efficiency_covers(const struct hapt_efficiency *efficiency, const char *device, enum hapt_dtype dtype);

#endif
