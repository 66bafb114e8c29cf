/* Efficiency curves: interpolation, monotonous times, the roofline. */
#include "test.h"

#include <math.h>

#include "hapt/efficiency.h"

static void built_in_tables_are_sound(void)
{
    const char *const backends[] = {"cpu", "cuda", "emulated"};
    for (int b = 0; b < 3; b++) {
        const struct hapt_efficiency_table *table = hapt_efficiency_default(backends[b]);
        CHECK_OK(hapt_efficiency_check(table));
        for (int class = 0; class < HAPT_EFFICIENCY_CLASS_COUNT; class ++) {
            double before = 0;
            for (double size = 0; size < 50; size += 0.01) {
                const double share = hapt_efficiency_of(table, class, exp2(size)), time = exp2(size) / share;
                CHECK(share > 0 && share <= 1);
                CHECK_MESSAGE(time >= before * (1 - 1e-12), "%s: a larger operator is faster at 2^%g",
                              hapt_efficiency_class_name(class), size);
                before = time;
            }
        }
    }
}

static void curves_pass_their_knots(void)
{
    struct hapt_efficiency_table table = *hapt_efficiency_default("cuda");
    table.curve[HAPT_EFFICIENCY_PRODUCT] = (struct hapt_efficiency_curve){3, {10, 12, 20}, {0.1, 0.2, 0.8}};
    CHECK_OK(hapt_efficiency_check(&table));
    for (int k = 0; k < 3; k++)
        CHECK_NEAR(
            hapt_efficiency_of(&table, HAPT_EFFICIENCY_PRODUCT, exp2(table.curve[HAPT_EFFICIENCY_PRODUCT].size[k])),
            table.curve[HAPT_EFFICIENCY_PRODUCT].share[k], 1e-12);
    CHECK_NEAR(hapt_efficiency_of(&table, HAPT_EFFICIENCY_PRODUCT, exp2(11)), sqrt(0.1 * 0.2), 1e-12);
    CHECK_NEAR(hapt_efficiency_of(&table, HAPT_EFFICIENCY_PRODUCT, exp2(14)), 0.2 * sqrt(2), 1e-12);
    CHECK_NEAR(hapt_efficiency_of(&table, HAPT_EFFICIENCY_PRODUCT, 0), 0.1, 0);
    CHECK_NEAR(hapt_efficiency_of(&table, HAPT_EFFICIENCY_PRODUCT, 1e30), 0.8, 0);
}

static void bad_tables_are_refused(void)
{
    const struct hapt_efficiency_curve bad[] = {
        {0, {0}, {0.5}},
        {HAPT_EFFICIENCY_KNOTS + 1, {0}, {0.5}},
        {1, {0}, {0}},
        {1, {0}, {NAN}},
        {2, {10, 10}, {0.5, 0.5}},
        {2, {10, 11}, {0.1, 0.3}}, /* twice the size in two thirds of the time */
    };
    for (size_t k = 0; k < sizeof bad / sizeof *bad; k++) {
        struct hapt_efficiency_table table = *hapt_efficiency_default("cuda");
        table.curve[HAPT_EFFICIENCY_ATTENTION] = bad[k];
        CHECK_FAILS(hapt_efficiency_check(&table), HAPT_ERR_INPUT);
        hapt_fail_reset();
    }
    struct hapt_efficiency_table table = *hapt_efficiency_default("cuda");
    table.launch_s = -1;
    CHECK_FAILS(hapt_efficiency_check(&table), HAPT_ERR_INPUT);
    hapt_fail_reset();
}

static void the_roofline_takes_the_longer(void)
{
    const struct hapt_efficiency_table flat = {
        .curve = {{1, {0}, {0.5}}, {1, {0}, {0.25}}, {1, {0}, {0.2}}, {1, {0}, {0.8}}}, .launch_s = 1e-6};
    struct hapt_device_spec device = {.backend = "cuda", .memory_bandwidth = 1e12, .slowdown = 3};
    device.peak_flops[HAPT_F32] = 10e12;
    device.peak_flops[HAPT_F16] = 100e12;
    CHECK_NEAR(hapt_roofline_peak_flops(&device, HAPT_BF16), 100e12, 0); /* fp16 replaces bf16 */
    const struct hapt_roofline roofline = hapt_roofline_describe(&device, HAPT_BF16, &flat);
    CHECK_NEAR(hapt_roofline_operator_s(&roofline, HAPT_EFFICIENCY_PRODUCT, 50e9, 8e6), 3 * (1e-6 + 1e-3), 1e-12);
    CHECK_NEAR(hapt_roofline_operator_s(&roofline, HAPT_EFFICIENCY_ATTENTION, 50e9, 8e6), 3 * (1e-6 + 2e-3), 1e-12);
    CHECK_NEAR(hapt_roofline_operator_s(&roofline, HAPT_EFFICIENCY_PRODUCT, 1e6, 8e6), 3 * (1e-6 + 1e-5), 1e-12);
    CHECK_NEAR(hapt_roofline_operator_s(&roofline, HAPT_EFFICIENCY_VECTOR, 2e9, 8e6), 3 * (1e-6 + 1e-3), 1e-12);
    CHECK_NEAR(hapt_roofline_stream_s(&roofline, 8e9), 3 * 1e-2, 1e-12);
    device.peak_flops[HAPT_F16] = 0;
    CHECK_NEAR(hapt_roofline_peak_flops(&device, HAPT_BF16), 10e12, 0);
}

/* Operators that are matrix products in other notation count as one. Fused attention and vector kernels do not. */
static void operators_have_classes(void)
{
    static const char *const product[] = {"linear",          "linear_t_dw",        "conv2d",       "conv2d_dx",
                                          "patch_embedding", "patch_embedding_dw", "expert_linear"};
    for (size_t i = 0; i < sizeof product / sizeof *product; i++)
        CHECK(hapt_efficiency_class_of(hapt_op_type_at(hapt_op_type_find(product[i]))) == HAPT_EFFICIENCY_PRODUCT);
    CHECK(hapt_efficiency_class_of(hapt_op_type_at(hapt_op_type_find("grouped_attention"))) ==
          HAPT_EFFICIENCY_ATTENTION);
    CHECK(hapt_efficiency_class_of(hapt_op_type_at(hapt_op_type_find("max_pool"))) == HAPT_EFFICIENCY_VECTOR);
}

int main(int argc, char **argv)
{
    test_init(&argc, &argv);
    RUN(built_in_tables_are_sound);
    RUN(curves_pass_their_knots);
    RUN(bad_tables_are_refused);
    RUN(the_roofline_takes_the_longer);
    RUN(operators_have_classes);
    return test_finish();
}
