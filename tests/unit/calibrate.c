/* Fits of efficiency tables: the fit recovers a known table from noisy times with outliers, and files keep it. */
#include <unistd.h>

#include "test.h"

#include "hapt/calibration.h"

enum { EACH = 120, SAMPLES = EACH * HAPT_EFFICIENCY_CLASS_COUNT };

static const struct hapt_efficiency_table known = {
    .curve = {[HAPT_EFFICIENCY_PRODUCT] = {4, {16, 22, 28, 34}, {0.05, 0.3, 0.6, 0.7}},
              [HAPT_EFFICIENCY_ATTENTION] = {3, {16, 24, 34}, {0.04, 0.2, 0.4}},
              [HAPT_EFFICIENCY_VECTOR] = {3, {14, 20, 28}, {0.02, 0.05, 0.04}},
              [HAPT_EFFICIENCY_MEMORY] = {3, {14, 22, 30}, {0.3, 0.9, 0.6}}},
    .launch_s = 0.5e-6,
};

static struct hapt_calibration_device device_of(struct hapt_calibration_sample *sample, int count)
{
    return (struct hapt_calibration_device){.name = "thing",
                                            .backend = "cpu",
                                            .dtype = HAPT_F32,
                                            .peak_flops = 200e9,
                                            .vector_flops = 100e9,
                                            .bandwidth = 30e9,
                                            .sample_count = count,
                                            .sample = sample};
}

static double normal(uint64_t *random)
{
    double sum = -6;
    for (int k = 0; k < 12; k++) sum += hapt_random_unit(random);
    return sum;
}

/* Samples of all classes, with their true times in *truth. `wild` of them take 8 times as long or a third of the
 * time. */
static void make_samples(uint64_t seed, double noise, double wild, struct hapt_calibration_sample *sample,
                         double *truth)
{
    struct hapt_calibration_device device = device_of(NULL, 0);
    device.table = known;
    for (int s = 0; s < SAMPLES; s++) {
        const enum hapt_efficiency_class class = (enum hapt_efficiency_class)(s / EACH);
        const double low = class < HAPT_EFFICIENCY_VECTOR ? 18 : 16, high = class < HAPT_EFFICIENCY_VECTOR ? 33 : 27;
        const double size = exp2(low + (high - low) * hapt_random_unit(&seed));
        sample[s] = (struct hapt_calibration_sample){.op = "op", .class = class};
        /* Every class is limited by its own rate. */
        sample[s].flops = class == HAPT_EFFICIENCY_MEMORY ? size / 1000 : size;
        sample[s].bytes = class == HAPT_EFFICIENCY_MEMORY ? size : class == HAPT_EFFICIENCY_VECTOR ? size : size / 100;
        truth[s] = hapt_calibration_predicted_s(&device, &sample[s]);
        sample[s].time_s = truth[s] * exp(noise * normal(&seed));
        if (hapt_random_unit(&seed) < wild) sample[s].time_s *= hapt_random_unit(&seed) < 0.7 ? 8 : 0.33;
    }
}

static int compare(const void *a, const void *b)
{
    return (*(const double *)a > *(const double *)b) - (*(const double *)a < *(const double *)b);
}

static void a_known_table_comes_back(void)
{
    for (uint64_t seed = 1; seed <= 20; seed++) {
        struct hapt_calibration_sample sample[SAMPLES];
        double truth[SAMPLES], apart[SAMPLES];
        const double noise = 0.03, wild = seed % 2 ? 0.06 : 0;
        make_samples(seed, noise, wild, sample, truth);
        struct hapt_calibration_device device = device_of(sample, SAMPLES);
        CHECK_OK(hapt_calibration_fit(&device));
        for (int s = 0; s < SAMPLES; s++)
            apart[s] = fabs(hapt_calibration_predicted_s(&device, &sample[s]) / truth[s] - 1);
        qsort(apart, SAMPLES, sizeof *apart, compare);
        /* About ten samples per knot reduce the noise by a factor of three. Knots are 1.25 octaves apart, so bends
         * between them add a small error. */
        CHECK_MESSAGE(apart[SAMPLES / 2] < noise, "seed %d: half of the times are off by more than %.1f %%", (int)seed,
                      100 * apart[SAMPLES / 2]);
        CHECK_MESSAGE(apart[SAMPLES * 95 / 100] < 4 * noise, "seed %d: a twentieth is off by more than %.1f %%",
                      (int)seed, 100 * apart[SAMPLES * 95 / 100]);
        CHECK(device.median_residual > 0.3 * noise && device.median_residual < 2 * noise);
        int counted = 0;
        for (int class = 0; class < HAPT_EFFICIENCY_CLASS_COUNT; class ++)
            for (int k = 0; k < device.table.curve[class].count; k++) counted += device.curve[class].samples[k];
        CHECK(counted == SAMPLES);
    }
}

/* For any measurements the table is valid: a larger operator never takes less time. */
static void any_samples_make_a_sound_table(void)
{
    for (uint64_t seed = 1; seed <= 3000; seed++) {
        uint64_t random = seed;
        struct hapt_calibration_sample sample[40];
        const int count = (int)(hapt_random_next(&random) % 41);
        for (int s = 0; s < count; s++)
            sample[s] = (struct hapt_calibration_sample){
                .class = (enum hapt_efficiency_class)(hapt_random_next(&random) % HAPT_EFFICIENCY_CLASS_COUNT),
                .flops = exp2(45 * hapt_random_unit(&random)),
                .bytes = exp2(45 * hapt_random_unit(&random)),
                .time_s = exp2(-30 + 40 * hapt_random_unit(&random))};
        struct hapt_calibration_device device = device_of(sample, count);
        const enum hapt_status status = hapt_calibration_fit(&device);
        CHECK_MESSAGE(status == HAPT_OK, "seed %d: %s", (int)seed, hapt_fail_message());
        hapt_fail_reset();
    }
}

static void classes_without_samples_stay_built_in(void)
{
    struct hapt_calibration_sample sample = {"linear", HAPT_EFFICIENCY_PRODUCT, 1e9, 1e6, 0.02};
    struct hapt_calibration_device device = device_of(&sample, 1);
    CHECK_OK(hapt_calibration_fit(&device));
    CHECK_NEAR(hapt_calibration_predicted_s(&device, &sample), 0.02, 1e-9);
    const struct hapt_efficiency_table *built_in = hapt_efficiency_default("cpu");
    CHECK(memcmp(&device.table.curve[HAPT_EFFICIENCY_ATTENTION], &built_in->curve[HAPT_EFFICIENCY_ATTENTION],
                 sizeof(struct hapt_efficiency_curve)) == 0);
    /* Additions and copies measure memory bandwidth, arithmetic and matrix products measure their own rates. */
    const struct hapt_op_type *add = hapt_op_type_at(hapt_op_type_find("add"));
    const struct hapt_op_type *norm = hapt_op_type_at(hapt_op_type_find("layer_norm"));
    const struct hapt_op_type *linear = hapt_op_type_at(hapt_op_type_find("linear"));
    CHECK(hapt_calibration_class(add, 1e3, 12e3) == HAPT_EFFICIENCY_MEMORY &&
          hapt_calibration_class(norm, 7e3, 8e3) == HAPT_EFFICIENCY_VECTOR);
    CHECK(hapt_calibration_class(linear, 1e3, 1e6) == HAPT_EFFICIENCY_PRODUCT);
}

static void files_keep_tables(void)
{
    char path[64];
    struct hapt_arena arena;
    struct hapt_calibration_sample sample[SAMPLES];
    struct hapt_calibration_sum sum[] = {{2, 4096, 2e-5, 1e-5}, {4, 4096, 8e-5, 1e-5}, {2, 1 << 20, 3e-3, 1e-3}};
    double truth[SAMPLES];
    make_samples(1, 0.02, 0, sample, truth);
    struct hapt_calibration_device device = device_of(sample, SAMPLES);
    CHECK_OK(hapt_calibration_fit(&device));
    device.sum = sum, device.sum_count = 3;
    struct hapt_efficiency made = {NULL, 1, &device}, *read = NULL;
    hapt_arena_init(&arena);
    snprintf(path, sizeof path, "/tmp/hapt-calibrate-test-%ld.h5", (long)getpid());
    CHECK_OK(hapt_efficiency_save(path, &made));
    CHECK_OK(hapt_efficiency_load(path, &arena, &read));
    unlink(path);
    if (!read) exit(1);
    CHECK(hapt_efficiency_covers(read, "THING", HAPT_F32) && !hapt_efficiency_covers(read, "thing", HAPT_BF16));
    CHECK(hapt_efficiency_row_count(read) == hapt_efficiency_row_count(&made));
    for (int s = 0; s < SAMPLES; s++)
        CHECK_NEAR(hapt_calibration_predicted_s(&read->device[0], &sample[s]) /
                       hapt_calibration_predicted_s(&device, &sample[s]),
                   1, 1e-12);
    /* Prediction uses the rates that the table's shares refer to. The cluster file's rates for a device of that name do
     * not matter. */
    struct hapt_device_spec spec = {.name = "thing", .backend = "cpu", .memory_bandwidth = 1, .slowdown = 2};
    spec.peak_flops[HAPT_F32] = 1;
    const struct hapt_roofline held = hapt_calibration_roofline(read, &spec, HAPT_F32);
    CHECK_NEAR(hapt_roofline_operator_s(&held, HAPT_EFFICIENCY_PRODUCT, sample[0].flops, sample[0].bytes),
               2 * hapt_calibration_predicted_s(&device, &sample[0]), 1e-9 * truth[0]);
    spec.peak_flops[HAPT_BF16] = 5;
    CHECK(hapt_calibration_roofline(read, &spec, HAPT_BF16).table == hapt_efficiency_default("cpu"));
    CHECK_NEAR(hapt_calibration_roofline(read, &spec, HAPT_BF16).peak_flops, 5, 0);
    /* The expected sums: the geometric mean of 2 and 8 for small sizes, 3 for large ones, and no change where nothing
     * is known. */
    CHECK_NEAR(hapt_calibration_sum_factor(read, &spec, HAPT_F32, 100), 4, 1e-9);
    CHECK_NEAR(hapt_calibration_sum_factor(read, &spec, HAPT_F32, 1e7), 3, 1e-9);
    CHECK_NEAR(hapt_calibration_sum_factor(NULL, &spec, HAPT_F32, 1e7), 1, 0);
    hapt_arena_release(&arena);
}

int main(int argc, char **argv)
{
    test_init(&argc, &argv);
    RUN(a_known_table_comes_back);
    RUN(any_samples_make_a_sound_table);
    RUN(classes_without_samples_stay_built_in);
    RUN(files_keep_tables);
    return test_finish();
}
