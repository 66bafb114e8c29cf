/*
 * Calibration: efficiency tables fitted to measured operators, one for each kind of device and element type, and their
 * file.
 *
 * A table's efficiencies are fractions of the rates stored with it. Prediction uses both, so a table does not depend on
 * the source of the cluster's description.
 */
#ifndef HAPT_PROFILE_CALIBRATE_H
#define HAPT_PROFILE_CALIBRATE_H

#include "efficiency.h"
#include "hapt/profile.h"

/* One operator of one shape on one device; the time is the median of its runs. */
struct calibrate_sample {
    char op[32];
    enum efficiency_class class; /* the curve that it measures */
    double flops, bytes, time_s; /* without slowdown */
};

struct calibrate_curve {
    int samples[EFFICIENCY_KNOTS];     /* number per knot */
    double residual[EFFICIENCY_KNOTS]; /* worst |predicted / measured - 1| per knot */
};

/* All-reduces over the devices of a submesh, as measured and as predicted from the links. */
struct calibrate_sum {
    int ranks;
    double bytes, time_s, predicted_s;
};

struct calibrate_device {
    char name[64], backend[16];
    enum hapt_dtype dtype;
    double peak_flops, vector_flops, bandwidth; /* the rates that efficiencies refer to: FLOP/s, FLOP/s, byte/s */
    struct efficiency_table table;
    struct calibrate_curve curve[EFFICIENCY_CLASS_COUNT];
    double median_residual; /* over all samples */
    int sample_count, sum_count;
    struct calibrate_sample *sample;
    struct calibrate_sum *sum;
};

struct hapt_efficiency {
    const char *path; /* NULL: not from a file */
    int count;
    struct calibrate_device *device;
};

/* The class that an operator of that type measures: memory if it computes little per byte moved. */
enum efficiency_class calibrate_class(const struct hapt_op_type *type, double flops, double bytes);

/*
 * Fits the table, the curves' statistics and the median residual of a device; its rates and samples are inputs. Each
 * curve has at most one knot per octave of size. A knot is the mean seconds per FLOP or byte, over the samples within a
 * factor of 2 of their median. So up to half of them may be outliers. Times rise with size (isotonic). A class without
 * samples keeps the built-in curve.
 */
enum hapt_status calibrate_fit(struct calibrate_device *device);
/* hapt_profile_calibrate in about `budget_s`. */
enum hapt_status calibrate_within(const struct hapt_env *env, const struct hapt_cluster *cluster,
                                  const struct hapt_model *model, const struct hapt_layers *layers,
                                  const struct hapt_config *config, double budget_s, struct hapt_arena *result,
                                  struct hapt_efficiency **efficiency);
/* Predicted seconds on a fitted device. */
double calibrate_predicted_s(const struct calibrate_device *device, const struct calibrate_sample *sample);

/* The rates and table for predicting a device: calibrated if `efficiency` (may be NULL) has it, else built in. */
struct roofline calibrate_roofline(const struct hapt_efficiency *efficiency, const struct hapt_device_spec *device,
                                   enum hapt_dtype dtype);
/* Measured over predicted seconds of an all-reduce of that many bytes; 1 if nothing was measured. */
double calibrate_sum_factor(const struct hapt_efficiency *efficiency, const struct hapt_device_spec *device,
                            enum hapt_dtype dtype, double bytes);

#endif
