/* Fits efficiency curves to timed operators. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "hapt/calibration.h"
#include "hapt/env.h"

#define MOVER_FLOPS_PER_BYTE 0.25 /* an operator with fewer FLOPs per byte measures memory */
#define INLIER_OCTAVES 1.0        /* a sample further from the median of its knot is ignored */

enum hapt_efficiency_class hapt_calibration_class(const struct hapt_op_type *type, double flops, double bytes)
{
    const enum hapt_efficiency_class class = hapt_efficiency_class_of(type);
    return class == HAPT_EFFICIENCY_VECTOR && flops < MOVER_FLOPS_PER_BYTE * bytes ? HAPT_EFFICIENCY_MEMORY : class;
}

static struct hapt_roofline roofline_of(const struct hapt_calibration_device *device)
{
    return (struct hapt_roofline){device->peak_flops, device->vector_flops, device->bandwidth, 1, &device->table};
}

double hapt_calibration_predicted_s(const struct hapt_calibration_device *device,
                                    const struct hapt_calibration_sample *sample)
{
    const struct hapt_roofline roofline = roofline_of(device);
    const enum hapt_efficiency_class class =
        sample->class == HAPT_EFFICIENCY_MEMORY ? HAPT_EFFICIENCY_VECTOR : sample->class;
    return hapt_roofline_operator_s(&roofline, class, sample->flops, sample->bytes);
}

/* log2 of the size, and of the seconds per FLOP or byte without the launch. */
struct spot {
    double size, cost;
};

static int by_size(const void *a, const void *b)
{
    return hapt_compare_doubles(&((const struct spot *)a)->size, &((const struct spot *)b)->size);
}

static double rate_of(const struct hapt_calibration_device *device, enum hapt_efficiency_class class)
{
    if (class == HAPT_EFFICIENCY_MEMORY) return device->bandwidth;
    return class == HAPT_EFFICIENCY_VECTOR ? device->vector_flops : device->peak_flops;
}

static double size_of(const struct hapt_calibration_sample *sample)
{
    return sample->class == HAPT_EFFICIENCY_MEMORY ? sample->bytes : sample->flops;
}

static int list_spots(const struct hapt_calibration_device *device, enum hapt_efficiency_class class, struct spot *spot)
{
    int count = 0;
    for (int s = 0; s < device->sample_count; s++) {
        const struct hapt_calibration_sample *sample = &device->sample[s];
        const double beyond_s = sample->time_s - device->table.launch_s, size = size_of(sample);
        if (sample->class != class || !(beyond_s > 0) || !(size > 1)) continue;
        spot[count++] = (struct spot){log2(size), log2(beyond_s / size)};
    }
    qsort(spot, (size_t)count, sizeof *spot, by_size);
    return count;
}

/* One knot from the spots [first, end): robust means. */
static struct spot knot_of(const struct spot *spot, int first, int end, double *buffer)
{
    struct spot sum = {0, 0};
    int inliers = 0;
    for (int k = first; k < end; k++) buffer[k - first] = spot[k].cost;
    const double centre = hapt_median(buffer, end - first);
    for (int k = first; k < end; k++) {
        if (fabs(spot[k].cost - centre) > INLIER_OCTAVES) continue;
        sum.size += spot[k].size;
        sum.cost += exp2(spot[k].cost);
        inliers++;
    }
    return inliers ? (struct spot){sum.size / inliers, log2(sum.cost / inliers)}
                   : (struct spot){spot[first].size, centre};
}

/* Pools neighbours until seconds rise with size; size + cost is log2 of the seconds. */
static void make_isotonic(struct spot *knot, int count)
{
    struct pool {
        double sum;
        int count;
    } pool[HAPT_EFFICIENCY_KNOTS];
    int pools = 0;
    for (int k = 0; k < count; k++) {
        pool[pools++] = (struct pool){knot[k].size + knot[k].cost, 1};
        while (pools > 1 && pool[pools - 2].sum / pool[pools - 2].count > pool[pools - 1].sum / pool[pools - 1].count) {
            pool[pools - 2].sum += pool[pools - 1].sum;
            pool[pools - 2].count += pool[pools - 1].count;
            pools--;
        }
    }
    for (int p = 0, k = 0; p < pools; p++)
        for (int i = 0; i < pool[p].count; i++, k++) knot[k].cost = pool[p].sum / pool[p].count - knot[k].size;
}

static void fit_curve(struct hapt_calibration_device *device, enum hapt_efficiency_class class, struct spot *spot,
                      double *buffer)
{
    struct hapt_efficiency_curve *curve = &device->table.curve[class];
    struct spot knot[HAPT_EFFICIENCY_KNOTS];
    const int count = list_spots(device, class, spot);
    const double rate = rate_of(device, class);
    if (count == 0 || rate <= 0) return;
    const double width = fmax((spot[count - 1].size - spot[0].size) / HAPT_EFFICIENCY_KNOTS * (1 + 1e-9), 1);
    int knots = 0;
    for (int first = 0, end; first < count; first = end) {
        const double bin = floor((spot[first].size - spot[0].size) / width);
        end = first;
        while (end < count && floor((spot[end].size - spot[0].size) / width) <= bin) end++;
        knot[knots++] = knot_of(spot, first, end, buffer);
    }
    make_isotonic(knot, knots);
    curve->count = knots;
    for (int k = 0; k < knots; k++) {
        curve->size[k] = knot[k].size;
        curve->share[k] = exp2(-knot[k].cost) / rate;
    }
}

/* A launch takes at most half the time of the shortest operator. */
static double launch_of(const struct hapt_calibration_device *device)
{
    double launch_s = hapt_efficiency_default(device->backend)->launch_s;
    for (int s = 0; s < device->sample_count; s++) launch_s = fmin(launch_s, 0.5 * device->sample[s].time_s);
    return launch_s;
}

static int nearest_knot(const struct hapt_efficiency_curve *curve, double size)
{
    int best = 0;
    for (int k = 1; k < curve->count; k++)
        if (fabs(curve->size[k] - log2(size)) < fabs(curve->size[best] - log2(size))) best = k;
    return best;
}

static void find_residuals(struct hapt_calibration_device *device, double *buffer)
{
    int count = 0;
    memset(device->curve, 0, sizeof device->curve);
    for (int s = 0; s < device->sample_count; s++) {
        const struct hapt_calibration_sample *sample = &device->sample[s];
        if (!(sample->time_s > 0) || !(size_of(sample) > 1)) continue;
        struct hapt_calibration_curve *curve = &device->curve[sample->class];
        const int k = nearest_knot(&device->table.curve[sample->class], size_of(sample));
        const double residual = fabs(hapt_calibration_predicted_s(device, sample) / sample->time_s - 1);
        curve->samples[k]++;
        curve->residual[k] = fmax(curve->residual[k], residual);
        buffer[count++] = residual;
    }
    device->median_residual = count ? hapt_median(buffer, count) : 0;
}

enum hapt_status hapt_calibration_fit(struct hapt_calibration_device *device)
{
    const size_t count = (size_t)device->sample_count + 1;
    struct spot *spot = calloc(count, sizeof *spot);
    double *buffer = calloc(count, sizeof *buffer);
    enum hapt_status status = HAPT_OK;
    if (spot && buffer) {
        device->table = *hapt_efficiency_default(device->backend);
        device->table.launch_s = launch_of(device);
        for (int class = 0; class < HAPT_EFFICIENCY_CLASS_COUNT; class ++) fit_curve(device, class, spot, buffer);
        find_residuals(device, buffer);
        status = hapt_efficiency_check(&device->table);
    } else {
        status = hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory to fit %d samples", device->sample_count);
    }
    free(spot);
    free(buffer);
    return status;
}

static const struct hapt_calibration_device *find(const struct hapt_efficiency *efficiency, const char *name,
                                                  enum hapt_dtype dtype)
{
    for (int d = 0; efficiency && d < efficiency->count; d++)
        if (strcasecmp(efficiency->device[d].name, name) == 0 && efficiency->device[d].dtype == dtype)
            return &efficiency->device[d];
    return NULL;
}

bool hapt_efficiency_covers(const struct hapt_efficiency *efficiency, const char *device, enum hapt_dtype dtype)
{
    return find(efficiency, device, dtype) != NULL;
}

struct hapt_roofline hapt_calibration_roofline(const struct hapt_efficiency *efficiency,
                                               const struct hapt_device_spec *device, enum hapt_dtype dtype)
{
    const struct hapt_calibration_device *held = find(efficiency, device->name, dtype);
    struct hapt_roofline roofline = hapt_roofline_describe(device, dtype, held ? &held->table : NULL);
    if (!held) return roofline;
    roofline.peak_flops = held->peak_flops;
    roofline.vector_flops = held->vector_flops;
    roofline.bandwidth = held->bandwidth;
    return roofline;
}

double hapt_calibration_sum_factor(const struct hapt_efficiency *efficiency, const struct hapt_device_spec *device,
                                   enum hapt_dtype dtype, double bytes)
{
    const struct hapt_calibration_device *held = find(efficiency, device->name, dtype);
    double product = 0, nearest = INFINITY;
    int count = 0;
    /* The nearest measured size; over submeshes the geometric mean. */
    for (int s = 0; held && bytes > 0 && s < held->sum_count; s++)
        nearest = fmin(nearest, fabs(log2(bytes / held->sum[s].bytes)));
    for (int s = 0; held && bytes > 0 && s < held->sum_count; s++) {
        if (fabs(log2(bytes / held->sum[s].bytes)) > nearest + 1e-9 || held->sum[s].predicted_s <= 0) continue;
        product += log2(held->sum[s].time_s / held->sum[s].predicted_s);
        count++;
    }
    return count ? exp2(product / count) : 1;
}
