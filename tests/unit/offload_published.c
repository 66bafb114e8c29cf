/*
 * AutoHete's claims for one GPU, on paper (hapt/offload_rivals.h): what the model gives beside what its authors
 * measured. The machine and the models are those of bench/offload.c, which prints the whole table.
 *
 * The paper gives neither batches, rates nor heads. So a claim is tested at a stated batch, or between batches, and
 * each function says where model and paper differ. Assumed: 50 % of the peak, PCIe at 22 GB/s, a host that updates 4e9
 * parameters/s, heads of width 128, attention that keeps its scores. No constant was fitted to a figure.
 */
#include "hapt/offload_rivals.h"

#include "test.h"

static const struct size {
    int billions, layers, hidden;
} size_table[] = {{2, 42, 2048},  {4, 21, 4096},  {6, 32, 4096},  {8, 42, 4096},
                  {10, 34, 5120}, {12, 30, 6144}, {14, 35, 6144}, {16, 40, 6144}}; /* AutoHete Table 1 */
enum { SIZES = sizeof size_table / sizeof *size_table, SIZE_4B = 1, SIZE_6B = 2, SIZE_12B = 5 };

static struct hapt_offload_case case_of(int size, int batch, double memory_bytes)
{
    struct hapt_offload_case made = {0};
    const struct hapt_offload_gpt gpt = {.layers = size_table[size].layers,
                                         .hidden = size_table[size].hidden,
                                         .heads = size_table[size].hidden / 128,
                                         .vocabulary = 50257,
                                         .sequence = 1024,
                                         .batch = batch};
    const struct hapt_offload_machine a100 = {.peak_flops = 312e12,
                                              .efficiency = 0.5,
                                              .device_bandwidth_bytes_per_s = 1.555e12,
                                              .link_bandwidth_bytes_per_s = 22e9,
                                              .host_update_parameters_per_s = 4e9,
                                              .device_memory_bytes = memory_bytes,
                                              .host_memory_bytes = 1e12};
    CHECK_OK(hapt_offload_case_gpt(&gpt, &a100, &made));
    return made;
}

/* period_s NAN: no plan. */
static struct hapt_offload_plan plan_of(const struct hapt_offload_case *given, enum hapt_offload_rival rival,
                                        bool clipping)
{
    struct hapt_offload_plan plan = {.period_s = NAN};
    const enum hapt_status status = hapt_offload_rival_plan(given, rival, clipping, &plan);
    hapt_fail_reset();
    CHECK(status == HAPT_OK || status == HAPT_ERR_INFEASIBLE);
    return plan;
}

/* In billions of parameters; 0: none. */
static int largest_of(enum hapt_offload_rival rival, int batch)
{
    int largest = 0;
    for (int k = 0; k < SIZES; k++) {
        const struct hapt_offload_case given = case_of(k, batch, 40e9);
        if (!isnan(plan_of(&given, rival, false).period_s)) largest = size_table[k].billions;
    }
    return largest;
}

static double in_order_s(const struct hapt_offload_case *given, const struct hapt_offload_plan *plan,
                         enum hapt_offload_overlap overlap)
{
    const struct hapt_offload_execution execution = {.overlap = overlap, .clipping = plan->execution.clipping};
    double period_s = NAN;
    CHECK_OK(hapt_offload_period(given, plan->choice, execution, &period_s));
    return period_s;
}

/* One block of 4B against figures from the formulas in hapt_offload_case_gpt, made by hand. */
static void case_by_hand(void)
{
    const struct hapt_offload_case given = case_of(SIZE_4B, 4, 40e9);
    CHECK(given.weight_bytes == 402653184 && given.state_bytes == 2415919104); /* 2 and 12 of 12 * 4096^2 */
    CHECK(given.checkpoint_bytes == 33554432);                                 /* 2 * 4096 * 4096 */
    CHECK(given.activation_bytes == 34.0 * 4096 * 4096 + 5.0 * 4 * 32 * 1024 * 1024);
    /* 2 * 201,326,592 parameters * 4096 tokens, and 4 * 4 * 1024^2 * 4096 of attention, at 156 Tflop/s */
    CHECK_NEAR(given.forward_s, (1649267441664.0 + 68719476736.0) / 156e12, 1e-15);
    CHECK_NEAR(given.backward_s, 2 * given.forward_s, 1e-15);
    CHECK_NEAR(given.fetch_s, 0.0183024, 1e-7);
    CHECK_NEAR(given.host_update_s, 0.0503316, 1e-7);
    CHECK_NEAR(given.device_update_s, 0.0036252, 1e-7); /* 28 bytes a parameter */
    struct hapt_offload_gpt gpt = {
        .layers = 1, .hidden = 8, .heads = 1, .vocabulary = 10, .sequence = 4, .batch = 1, .fused_attention = true};
    struct hapt_offload_machine machine = {1, 1, 1, 1, 1, 1, 1};
    struct hapt_offload_case made;
    CHECK_OK(hapt_offload_case_gpt(&gpt, &machine, &made));
    CHECK(made.activation_bytes == 34 * 4 * 8 && made.host_constant_bytes == 14 * 80);
    CHECK(made.device_constant_bytes == 4 * 80 + 10 * 40);
    machine.efficiency = 1.1;
    CHECK_FAILS(hapt_offload_case_gpt(&gpt, &machine, &made), HAPT_ERR_INPUT);
    machine.efficiency = 1, gpt.heads = 0;
    CHECK_FAILS(hapt_offload_case_gpt(&gpt, &machine, &made), HAPT_ERR_INPUT);
}

/* "AutoHete offloaded the optimizer states of only the last 13 out of 21 transformer blocks" of 4B: within one block of
 * it at 4 rows. At 8 rows the model takes all 21. */
static void host_optimizers(void)
{
    const struct hapt_offload_case given = case_of(SIZE_4B, 4, 40e9), twice = case_of(SIZE_4B, 8, 40e9);
    const int o = plan_of(&given, HAPT_RIVAL_AUTOHETE, false).choice.state_away;
    printf("  4B: optimizer state of %d of 21 blocks on the host at 4 rows, %d at 8; paper 13\n", o,
           plan_of(&twice, HAPT_RIVAL_AUTOHETE, false).choice.state_away);
    CHECK_MESSAGE(abs(o - 13) <= 1, "%d blocks at 4 rows, paper 13", o);
}

/* "ZeRO-Offload runs out of GPU memory when the model size exceeds 12B", while the others go on. The model brackets
 * 12B: ZeRO-Offload holds it at 4 rows, where 14B still fits by 1 % of the memory, and only 10B at 8. */
static void sizes_that_fit(void)
{
    const int at_4 = largest_of(HAPT_RIVAL_ZERO_OFFLOAD, 4), at_8 = largest_of(HAPT_RIVAL_ZERO_OFFLOAD, 8);
    const struct hapt_offload_case given = case_of(SIZE_12B, 4, 40e9);
    printf("  zero-offload: up to %dB at 4 rows, %dB at 8; paper 12B\n", at_4, at_8);
    CHECK(at_8 <= 12 && at_4 >= 12 && at_4 < 16);
    CHECK(!isnan(plan_of(&given, HAPT_RIVAL_ZERO_OFFLOAD, false).period_s));
    CHECK(!isnan(plan_of(&given, HAPT_RIVAL_AUTOHETE, false).period_s));
    for (int rival = HAPT_RIVAL_PATRICKSTAR; rival < HAPT_RIVAL_COUNT; rival++)
        CHECK(largest_of((enum hapt_offload_rival)rival, 8) == 16);
}

/* Fig. 8: "ZeRO-Offload fails to sustain 4B model training when the GPU memory budget is less than 16GB, and training
 * the 6B model requires a minimum of 24GB": the first holds at 4 rows, the second at 8, in budgets of 4 GB. */
static void memory_budgets(void)
{
    int least[2] = {0};
    for (int k = 0; k < 2; k++)
        for (int gigabytes = 40; gigabytes >= 4; gigabytes -= 4) {
            const struct hapt_offload_case given = case_of(SIZE_4B + k, 4 + 4 * k, gigabytes * 1e9);
            if (!isnan(plan_of(&given, HAPT_RIVAL_ZERO_OFFLOAD, false).period_s)) least[k] = gigabytes;
        }
    printf("  zero-offload needs %d GB for 4B at 4 rows, %d GB for 6B at 8; paper 16 and 24\n", least[0], least[1]);
    CHECK(least[0] == 16 && least[1] == 24);
}

/* "With merely 12GB of GPU memory consumption, AutoHete achieves higher training throughput than StrongHold,
 * PatrickStar, and ZeRO-Offload running under the 40GB GPU memory budget." Not over StrongHold as modelled: its window
 * has no overheads here. */
static void twelve_gigabytes(void)
{
    for (int k = SIZE_4B; k <= SIZE_6B; k++) {
        const struct hapt_offload_case small = case_of(k, 4, 12e9), large = case_of(k, 4, 40e9);
        const double ours_s = plan_of(&small, HAPT_RIVAL_AUTOHETE, false).period_s;
        double other_s[HAPT_RIVAL_COUNT];
        for (int rival = 0; rival < HAPT_RIVAL_COUNT; rival++)
            other_s[rival] = plan_of(&large, (enum hapt_offload_rival)rival, false).period_s;
        printf("  %dB: AutoHete with 12 GB %.2f s; with 40 GB zero-offload %.2f s, patrickstar %.2f s, stronghold %.2f "
               "s\n",
               size_table[k].billions, ours_s, other_s[HAPT_RIVAL_ZERO_OFFLOAD], other_s[HAPT_RIVAL_PATRICKSTAR],
               other_s[HAPT_RIVAL_STRONGHOLD]);
        CHECK(ours_s < other_s[HAPT_RIVAL_ZERO_OFFLOAD] && ours_s < other_s[HAPT_RIVAL_PATRICKSTAR]);
    }
}

struct gains {
    int zero_count, count;
    double zero, in_order, least_in_order,
        most_in_order;     /* ratios of periods over AutoHete's; means but for the last two */
    double small_in_order; /* the larger one of 2B and 4B */
    double across;         /* steps apart / steps that overlap, both in order; the largest */
};

static struct gains gains_of(int batch, bool clipping)
{
    struct gains gains = {.least_in_order = INFINITY};
    for (int k = 0; k < SIZES; k++) {
        const struct hapt_offload_case given = case_of(k, batch, 40e9);
        const struct hapt_offload_plan plan = plan_of(&given, HAPT_RIVAL_AUTOHETE, clipping);
        const double zero_s = plan_of(&given, HAPT_RIVAL_ZERO_OFFLOAD, clipping).period_s;
        const double order_s = in_order_s(&given, &plan, HAPT_OFFLOAD_ACROSS_STEPS), gain = order_s / plan.period_s;
        if (!isnan(zero_s)) gains.zero_count++, gains.zero += zero_s / plan.period_s;
        gains.count++, gains.in_order += gain;
        gains.least_in_order = fmin(gains.least_in_order, gain);
        gains.most_in_order = fmax(gains.most_in_order, gain);
        if (size_table[k].billions <= 4) gains.small_in_order = fmax(gains.small_in_order, gain);
        gains.across = fmax(gains.across, in_order_s(&given, &plan, HAPT_OFFLOAD_WITHIN_STEP) / order_s);
    }
    gains.zero /= gains.zero_count, gains.in_order /= gains.count;
    printf("  %2d rows%s: over ZeRO-Offload %.2f (paper 1.85), by priority %.3f, %.3f to %.3f (1.16, most 1.24); in "
           "order, steps "
           "that overlap %.3f\n",
           batch, clipping ? ", clipping" : "", gains.zero, gains.in_order, gains.least_in_order, gains.most_in_order,
           gains.across);
    return gains;
}

/*
 * "1.85x on average (up to 2.08x)" over ZeRO-Offload: between the means at 16 and 4 rows without clipping. With
 * clipping the model gives less, since ZeRO-Offload updates behind the last backward pass anyway.
 *
 * Priority "1.16x on average (up to 1.24x)", nothing for 2B and 4B: so it is at 4 rows without clipping. At 8 and 16
 * rows without clipping the host keeps up with the device, and priority gives nothing. With clipping it gives as much
 * as in the paper at every batch and size.
 */
static void gains(void)
{
    const struct gains four = gains_of(4, false), eight = gains_of(8, false), sixteen = gains_of(16, false);
    CHECK(sixteen.zero < eight.zero && eight.zero < four.zero);
    CHECK_MESSAGE(sixteen.zero < 1.85 && four.zero > 1.85, "1.85 is not between %.2f and %.2f", sixteen.zero,
                  four.zero);
    CHECK_NEAR(four.small_in_order, 1, 0.01);
    CHECK_NEAR(four.in_order, 1.16, 0.05); /* 0.05: a third of the gain */
    CHECK(four.most_in_order > 1.24);
    CHECK_NEAR(eight.in_order, 1, 0.01);
    CHECK_NEAR(sixteen.in_order, 1, 0.01);
    CHECK(four.across <= 1.05); /* block 1 is updated last, so steps that overlap in order gain next to nothing */
    for (int batch = 4; batch <= 16; batch *= 2) {
        const struct gains clipped = gains_of(batch, true);
        CHECK(clipped.least_in_order >= 1.15 && clipped.most_in_order <= 1.26);
    }
}

/* Choosing by the period instead of one step alone gains up to a tenth on 4B. */
static void joint_choice(void)
{
    for (int clipping = 0; clipping < 2; clipping++)
        for (int batch = 4; batch <= 16; batch *= 2) {
            const struct hapt_offload_case given = case_of(SIZE_4B, batch, 40e9);
            const struct hapt_offload_plan plan = plan_of(&given, HAPT_RIVAL_AUTOHETE, clipping);
            struct hapt_offload_choice choice;
            double joint_s = NAN;
            CHECK_OK(hapt_offload_jointly(&given, plan.execution, &choice, &joint_s));
            printf("  4B, %2d rows%s: %.3f s in order, %.3f by priority, %.3f jointly\n", batch,
                   clipping ? ", clipping" : "", in_order_s(&given, &plan, HAPT_OFFLOAD_ACROSS_STEPS), plan.period_s,
                   joint_s);
            CHECK(joint_s <= plan.period_s && joint_s >= 0.85 * plan.period_s);
        }
}

int main(int argc, char **argv)
{
    test_init(&argc, &argv);
    RUN(case_by_hand);
    RUN(host_optimizers);
    RUN(sizes_that_fit);
    RUN(memory_budgets);
    RUN(twelve_gigabytes);
    RUN(gains);
    RUN(joint_choice);
    return test_finish();
}
