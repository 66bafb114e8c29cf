/*
 * offload [fused]: AutoHete and its rivals on paper, beside the figures that AutoHete's authors measured. GPT models of
 * their Table 1 on one A100-40GB, 1024 tokens per row. fused: attention keeps no scores.
 *
 * The rates are assumptions, except the device's data sheet: blocks reach 50 % of the peak, the link carries 22 GB/s in
 * each direction (PCIe 4.0), the host updates 4e9 parameters/s. The paper gives neither rates, batches nor heads. Heads
 * of width 128, and attention that keeps its scores, are assumptions too.
 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "hapt/offload_rivals.h"

/* AutoHete Table 1, up to what it calls single-GPU sizes. */
static const struct size {
    int billions, layers, hidden;
} size_table[] = {{2, 42, 2048},  {4, 21, 4096},  {6, 32, 4096},  {8, 42, 4096},
                  {10, 34, 5120}, {12, 30, 6144}, {14, 35, 6144}, {16, 40, 6144}};
enum { SIZES = sizeof size_table / sizeof *size_table, TABLE_SIZE = 1 }; /* the table below is for 4B */
static const int batch_table[] = {4, 8, 16};
enum { BATCHES = sizeof batch_table / sizeof *batch_table };

static bool fused;

static enum hapt_status make_case(const struct size *size, int batch, double device_memory_bytes,
                                  struct hapt_offload_case *made)
{
    const struct hapt_offload_gpt gpt = {.layers = size->layers,
                                         .hidden = size->hidden,
                                         .heads = size->hidden / 128,
                                         .vocabulary = 50257,
                                         .sequence = 1024,
                                         .batch = batch,
                                         .fused_attention = fused};
    const struct hapt_offload_machine machine = {.peak_flops = 312e12,
                                                 .efficiency = 0.5,
                                                 .device_bandwidth_bytes_per_s = 1.555e12,
                                                 .link_bandwidth_bytes_per_s = 22e9,
                                                 .host_update_parameters_per_s = 4e9,
                                                 .device_memory_bytes = device_memory_bytes,
                                                 .host_memory_bytes = 1e12};
    return hapt_offload_case_gpt(&gpt, &machine, made);
}

/* A plan with period_s NAN where the system has none. */
static enum hapt_status plan_of(const struct hapt_offload_case *given, enum hapt_offload_rival rival, bool clipping,
                                struct hapt_offload_plan *plan)
{
    const enum hapt_status status = hapt_offload_rival_plan(given, rival, clipping, plan);
    if (status != HAPT_ERR_INFEASIBLE) return status;
    hapt_fail_reset();
    *plan = (struct hapt_offload_plan){.period_s = NAN};
    return HAPT_OK;
}

/* The period of AutoHete's plan in order / its period. */
static enum hapt_status find_priority_gain(const struct hapt_offload_case *given, const struct hapt_offload_plan *plan,
                                           double *gain)
{
    struct hapt_offload_execution in_order = plan->execution;
    double period_s;
    in_order.priority = false;
    HAPT_TRY(hapt_offload_period(given, plan->choice, in_order, &period_s));
    *gain = period_s / plan->period_s;
    return HAPT_OK;
}

/* gain NAN: the system has no priority, and (6) is not its cost. */
static void print_row(const char *name, int batch, const struct hapt_offload_case *given,
                      const struct hapt_offload_plan *plan, double zero_s, double gain)
{
    char choice[32] = "-", step[32] = "-", sum[32] = "-", ratio[32] = "-", priority[32] = "-";
    if (!isnan(plan->period_s)) {
        snprintf(choice, sizeof choice, "%d/%d/%d", plan->choice.recomputed, plan->choice.weights_away,
                 plan->choice.state_away);
        snprintf(step, sizeof step, "%.3f", plan->period_s);
        snprintf(ratio, sizeof ratio, "%.2f", zero_s / plan->period_s);
    }
    if (!isnan(gain)) {
        snprintf(sum, sizeof sum, "%.3f",
                 hapt_offload_forward_s(given, plan->choice) + hapt_offload_backward_s(given, plan->choice));
        snprintf(priority, sizeof priority, "%.3f", gain);
    }
    printf("  %-14s %4d %9s %9s %9s %9s %9s\n", name, batch, choice, sum, step, ratio, priority);
}

/* All systems at one size and batch. */
static enum hapt_status print_table(int batch, bool clipping)
{
    struct hapt_offload_case given;
    struct hapt_offload_plan plan[HAPT_RIVAL_COUNT], joint;
    double gain;
    HAPT_TRY(make_case(&size_table[TABLE_SIZE], batch, 40e9, &given));
    for (int r = 0; r < HAPT_RIVAL_COUNT; r++)
        HAPT_TRY(plan_of(&given, (enum hapt_offload_rival)r, clipping, &plan[r]));
    const double zero_s = plan[HAPT_RIVAL_ZERO_OFFLOAD].period_s;
    for (int r = 0; r < HAPT_RIVAL_AUTOHETE; r++)
        print_row(hapt_offload_rival_name((enum hapt_offload_rival)r), batch, &given, &plan[r], zero_s, NAN);
    HAPT_TRY(find_priority_gain(&given, &plan[HAPT_RIVAL_AUTOHETE], &gain));
    print_row(hapt_offload_rival_name(HAPT_RIVAL_AUTOHETE), batch, &given, &plan[HAPT_RIVAL_AUTOHETE], zero_s, gain);
    joint.execution = plan[HAPT_RIVAL_AUTOHETE].execution;
    HAPT_TRY(hapt_offload_jointly(&given, joint.execution, &joint.choice, &joint.period_s));
    HAPT_TRY(find_priority_gain(&given, &joint, &gain));
    print_row("jointly", batch, &given, &joint, zero_s, gain);
    return HAPT_OK;
}

struct tally {
    int count;
    double sum, most;
};

static void add(struct tally *tally, double value)
{
    if (isnan(value)) return;
    tally->count++;
    tally->sum += value;
    tally->most = fmax(tally->most, value);
}

static void print_tally(const char *name, const struct tally *tally, const char *paper)
{
    printf("    %-16s mean %.2f, most %.2f over %d sizes; paper %s\n", name, tally->sum / tally->count, tally->most,
           tally->count, paper);
}

/* AutoHete's gains over all sizes that a system fits; its gain by priority. */
static enum hapt_status print_gains(int batch, bool clipping)
{
    static const char *const paper[HAPT_RIVAL_COUNT] = {[HAPT_RIVAL_ZERO_OFFLOAD] = "1.85, most 2.08",
                                                        [HAPT_RIVAL_PATRICKSTAR] = "1.63, most 1.91",
                                                        [HAPT_RIVAL_STRONGHOLD] = "1.32, most 1.41"};
    struct tally over[HAPT_RIVAL_COUNT] = {0}, priority = {0};
    for (int k = 0; k < SIZES; k++) {
        struct hapt_offload_case given;
        struct hapt_offload_plan autohete, plan;
        double gain;
        HAPT_TRY(make_case(&size_table[k], batch, 40e9, &given));
        HAPT_TRY(plan_of(&given, HAPT_RIVAL_AUTOHETE, clipping, &autohete));
        if (isnan(autohete.period_s)) continue;
        for (int r = HAPT_RIVAL_ZERO_OFFLOAD; r < HAPT_RIVAL_AUTOHETE; r++) {
            HAPT_TRY(plan_of(&given, (enum hapt_offload_rival)r, clipping, &plan));
            add(&over[r], plan.period_s / autohete.period_s);
        }
        HAPT_TRY(find_priority_gain(&given, &autohete, &gain));
        add(&priority, gain);
    }
    printf("  %d rows, %s: AutoHete over\n", batch, clipping ? "clipping" : "no clipping");
    for (int r = HAPT_RIVAL_ZERO_OFFLOAD; r < HAPT_RIVAL_AUTOHETE; r++)
        print_tally(hapt_offload_rival_name((enum hapt_offload_rival)r), &over[r], paper[r]);
    print_tally("its own order", &priority, "1.16, most 1.24");
    return HAPT_OK;
}

/* The largest model of each system, in billions of parameters. */
static enum hapt_status print_largest(int batch)
{
    printf("  %d rows: largest of Table 1:", batch);
    for (int r = 0; r < HAPT_RIVAL_COUNT; r++) {
        int largest = 0;
        for (int k = 0; k < SIZES; k++) {
            struct hapt_offload_case given;
            struct hapt_offload_plan plan;
            HAPT_TRY(make_case(&size_table[k], batch, 40e9, &given));
            HAPT_TRY(plan_of(&given, (enum hapt_offload_rival)r, false, &plan));
            if (!isnan(plan.period_s)) largest = size_table[k].billions;
        }
        char text[32] = "none";
        if (largest > 0) snprintf(text, sizeof text, "%dB", largest);
        printf(" %s %s%s", hapt_offload_rival_name((enum hapt_offload_rival)r), text,
               r + 1 < HAPT_RIVAL_COUNT ? "," : "; paper: zero-offload 12B\n");
    }
    return HAPT_OK;
}

/* Periods as the device's memory shrinks (AutoHete Fig. 8). */
static enum hapt_status print_memory(const struct size *size, int batch)
{
    printf("  %dB, %d rows:  ", size->billions, batch);
    for (int r = 0; r < HAPT_RIVAL_COUNT; r++) printf("%15s", hapt_offload_rival_name((enum hapt_offload_rival)r));
    printf("\n");
    for (int gigabytes = 40; gigabytes >= 8; gigabytes -= 4) {
        struct hapt_offload_case given;
        HAPT_TRY(make_case(size, batch, gigabytes * 1e9, &given));
        printf("  %2d GB         ", gigabytes);
        for (int r = 0; r < HAPT_RIVAL_COUNT; r++) {
            struct hapt_offload_plan plan;
            HAPT_TRY(plan_of(&given, (enum hapt_offload_rival)r, false, &plan));
            if (isnan(plan.period_s))
                printf("%15s", "-");
            else
                printf("%15.3f", plan.period_s);
        }
        printf("\n");
    }
    return HAPT_OK;
}

static enum hapt_status print_all(void)
{
    printf("c/p/o: blocks that recompute, whose weights are away, whose optimizer state is on the host\n"
           "(6): one step alone by the paper's equations; step: simulated; over ZeRO: step of zero-offload / step\n"
           "priority: step in order of the passes / step by priority; jointly: c/p/o of the least simulated step\n");
    for (int clipping = 0; clipping < 2; clipping++) {
        printf("%dB, %s\n  %-14s %4s %9s %9s %9s %9s %9s\n", size_table[TABLE_SIZE].billions,
               clipping ? "gradients clipped by their global norm" : "no clipping", "system", "rows", "c/p/o", "(6), s",
               "step, s", "over ZeRO", "priority");
        for (int b = 0; b < BATCHES; b++) HAPT_TRY(print_table(batch_table[b], clipping));
    }
    printf("paper, 4B: AutoHete has the state of 13 of 21 blocks on the host\n");
    printf("ratios of steps\n");
    for (int clipping = 0; clipping < 2; clipping++)
        for (int b = 0; b < BATCHES; b++) HAPT_TRY(print_gains(batch_table[b], clipping));
    printf("sizes that fit\n");
    for (int b = 0; b < BATCHES; b++) HAPT_TRY(print_largest(batch_table[b]));
    printf("steps in s by device memory, no clipping; paper: ZeRO-Offload needs 16 GB for 4B and 24 GB for 6B\n");
    for (int k = TABLE_SIZE; k < TABLE_SIZE + 2; k++) HAPT_TRY(print_memory(&size_table[k], 8));
    return HAPT_OK;
}

int main(int argc, char **argv)
{
    fused = argc == 2 && strcmp(argv[1], "fused") == 0;
    if (argc > 2 || (argc == 2 && !fused)) {
        fprintf(stderr, "usage: offload [fused]\n");
        return HAPT_ERR_USAGE;
    }
    const enum hapt_status status = print_all();
    if (status != HAPT_OK) fprintf(stderr, "offload: %s\nhint: %s\n", hapt_fail_message(), hapt_fail_hint());
    return status;
}
