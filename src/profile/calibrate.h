/*
 * Calibration: efficiency tables fitted to measured operators, one for each kind of device and element type, and the
 * file that keeps them.
 *
 * The shares of a table are of the rates that stand beside it; prediction takes both, so that a table means the same
 * wherever the cluster's description comes from.
 */
#ifndef HAPT_PROFILE_CALIBRATE_H
#define HAPT_PROFILE_CALIBRATE_H

#include "efficiency.h"
#include "hapt/profile.h"

/* One operator of one shape on one device: the median of its runs. */
struct calibrate_sample {
    char op[32];
    enum efficiency_class class; /* whose curve it tells of */
    double flops, bytes, time_s; /* without slowdown */
};

struct calibrate_curve {
    int samples[EFFICIENCY_KNOTS];     /* of each knot */
    double residual[EFFICIENCY_KNOTS]; /* worst |predicted / measured - 1| among them */
};

/* Sums over the devices of a submesh, as measured and as the links' figures predict them. */
struct calibrate_sum {
    int ranks;
    double bytes, time_s, predicted_s;
};

struct calibrate_device {
    char name[64], backend[16];
    enum hapt_dtype dtype;
    double peak_flops, vector_flops, bandwidth; /* what shares are of: FLOP/s, FLOP/s, byte/s */
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

/* The class that an operator of that type, FLOPs and bytes tells of: one that does little with what it moves tells of
 * memory. */
enum efficiency_class calibrate_class(const struct hapt_op_type *type, double flops, double bytes);

/*
 * Fits the table, the curves' statistics and the median residual of a device whose rates and samples are given. Each
 * curve has one knot an octave of size at most: the mean seconds per FLOP or byte of the samples within a factor of 2
 * of their median, so that up to half of them may be wild. Times rise with size (isotonic). A class without samples
 * keeps the built-in curve.
 */
enum hapt_status calibrate_fit(struct calibrate_device *device);
/* hapt_profile_calibrate within about `budget_s`. */
enum hapt_status calibrate_within(const struct hapt_env *env, const struct hapt_cluster *cluster,
                                  const struct hapt_model *model, const struct hapt_layers *layers,
                                  const struct hapt_config *config, double budget_s, struct hapt_arena *result,
                                  struct hapt_efficiency **efficiency);
/* Seconds a fitted device is predicted to need. */
double calibrate_predicted_s(const struct calibrate_device *device, const struct calibrate_sample *sample);

/* The rates and the table to predict a device with: calibrated where `efficiency` (may be NULL) holds it, else built
 * in. */
struct roofline calibrate_roofline(const struct hapt_efficiency *efficiency, const struct hapt_device_spec *device,
                                   enum hapt_dtype dtype);
/* Measured over predicted seconds of an all-reduce of that many bytes; 1 where nothing was measured. */
double calibrate_sum_factor(const struct hapt_efficiency *efficiency, const struct hapt_device_spec *device,
                            enum hapt_dtype dtype, double bytes);

#endif
