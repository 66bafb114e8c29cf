/* Training with offload on paper: cases, AutoHete's equations and their optimum, and the choices of other systems. */
#include "hapt/offload_rivals.h"

#include <math.h>
#include <stddef.h>

enum { MOST_BLOCKS = 4096 };

/* ---- Cases ---- */

enum hapt_status hapt_offload_case_check(const struct hapt_offload_case *given)
{
    const struct {
        const char *name;
        double value;
    } field[] = {
        {"forward_s", given->forward_s},
        {"backward_s", given->backward_s},
        {"fetch_s", given->fetch_s},
        {"offload_s", given->offload_s},
        {"device_update_s", given->device_update_s},
        {"host_update_s", given->host_update_s},
        {"weight_bytes", given->weight_bytes},
        {"state_bytes", given->state_bytes},
        {"activation_bytes", given->activation_bytes},
        {"checkpoint_bytes", given->checkpoint_bytes},
        {"device_constant_bytes", given->device_constant_bytes},
        {"host_constant_bytes", given->host_constant_bytes},
        {"device_memory_bytes", given->device_memory_bytes},
        {"host_memory_bytes", given->host_memory_bytes},
    };
    for (size_t k = 0; k < sizeof field / sizeof *field; k++)
        if (!(field[k].value >= 0 && isfinite(field[k].value)))
            return hapt_fail(HAPT_ERR_INPUT, "times and sizes are finite and not negative", "offload case: %s is %g",
                             field[k].name, field[k].value);
    if (given->block_count < 1 || given->block_count > MOST_BLOCKS)
        return hapt_fail(HAPT_ERR_INPUT, "give 1 to 4096 blocks", "offload case: %d blocks", given->block_count);
    if (given->checkpoint_bytes > given->activation_bytes)
        return hapt_fail(HAPT_ERR_INPUT, "a checkpoint is a part of the activations",
                         "offload case: a checkpoint of %.0f bytes, but activations of %.0f bytes",
                         given->checkpoint_bytes, given->activation_bytes);
    return HAPT_OK;
}

enum hapt_status hapt_offload_case_gpt(const struct hapt_offload_gpt *gpt, const struct hapt_offload_machine *machine,
                                       struct hapt_offload_case *made)
{
    /* Adam: 2 the gradient, 6 x 4 weight and moments read and written, 2 the 16-bit weight */
    enum { UPDATE_BYTES = 2 + 6 * 4 + 2 };
    if (gpt->layers < 1 || gpt->hidden < 1 || gpt->heads < 1 || gpt->vocabulary < 1 || gpt->sequence < 1 ||
        gpt->batch < 1)
        return hapt_fail(HAPT_ERR_INPUT, "all sizes of the model are positive",
                         "offload case: GPT of %d layers, hidden %d, %d heads, vocabulary %d, sequence %d, batch %d",
                         gpt->layers, gpt->hidden, gpt->heads, gpt->vocabulary, gpt->sequence, gpt->batch);
    if (!(machine->peak_flops > 0 && machine->efficiency > 0 && machine->efficiency <= 1 &&
          machine->device_bandwidth_bytes_per_s > 0 && machine->link_bandwidth_bytes_per_s > 0 &&
          machine->host_update_parameters_per_s > 0))
        return hapt_fail(HAPT_ERR_INPUT, "rates are positive, and the efficiency is at most 1",
                         "offload case: %g flop/s at efficiency %g, memory %g B/s, link %g B/s, %g parameters/s",
                         machine->peak_flops, machine->efficiency, machine->device_bandwidth_bytes_per_s,
                         machine->link_bandwidth_bytes_per_s, machine->host_update_parameters_per_s);
    const double h = gpt->hidden, s = gpt->sequence, rows = gpt->batch, tokens = rows * s;
    const double parameters = 12 * h * h; /* M_p: qkv 3, projection 1, MLP 8 */
    const double score_count = gpt->fused_attention ? 0 : rows * gpt->heads * s * s;
    const double flops = 2 * parameters * tokens + 4 * rows * s * s * h; /* products with weights; attention */
    const double embedding = h * gpt->vocabulary, logits = tokens * gpt->vocabulary;
    const struct hapt_offload_case filled = {
        .block_count = gpt->layers,
        .forward_s = flops / (machine->efficiency * machine->peak_flops),
        .backward_s = 2 * flops / (machine->efficiency * machine->peak_flops),
        .fetch_s = 2 * parameters / machine->link_bandwidth_bytes_per_s,
        .offload_s = 2 * parameters / machine->link_bandwidth_bytes_per_s,
        .device_update_s = UPDATE_BYTES * parameters / machine->device_bandwidth_bytes_per_s,
        .host_update_s = parameters / machine->host_update_parameters_per_s,
        .weight_bytes = 2 * parameters,
        .state_bytes = 12 * parameters,
        /* arXiv 2205.05198, (1): 34 s b h, and 5 a s^2 b for scores, their softmax and its dropout */
        .activation_bytes = 34 * tokens * h + 5 * score_count,
        .checkpoint_bytes = 2 * tokens * h,
        /* 16-bit embedding and its gradient; 16-bit logits, their log-softmax and its gradient in fp32 */
        .device_constant_bytes = 4 * embedding + 10 * logits,
        .host_constant_bytes = 14 * embedding, /* its state and gradient, as the paper's M_cc has it */
        .device_memory_bytes = machine->device_memory_bytes,
        .host_memory_bytes = machine->host_memory_bytes,
    };
    HAPT_TRY(hapt_offload_case_check(&filled));
    *made = filled;
    return HAPT_OK;
}

/* ---- AutoHete's equations ---- */

static void assert_choice(const struct hapt_offload_case *given, struct hapt_offload_choice choice)
{
    HAPT_ASSERT(0 <= choice.recomputed && choice.recomputed <= given->block_count);
    HAPT_ASSERT(0 <= choice.weights_away && choice.weights_away <= choice.state_away);
    HAPT_ASSERT(choice.state_away <= given->block_count);
}

double hapt_offload_device_bytes(const struct hapt_offload_case *given, struct hapt_offload_choice choice)
{
    const int L = given->block_count;
    assert_choice(given, choice);
    return given->checkpoint_bytes * choice.recomputed + given->activation_bytes * (L - choice.recomputed + 1) +
           given->weight_bytes * (L - choice.weights_away + 1) + given->state_bytes * (L - choice.state_away) +
           given->device_constant_bytes;
}

double hapt_offload_host_bytes(const struct hapt_offload_case *given, struct hapt_offload_choice choice)
{
    assert_choice(given, choice);
    return (given->weight_bytes + given->state_bytes) * choice.state_away + given->host_constant_bytes;
}

bool hapt_offload_fits(const struct hapt_offload_case *given, struct hapt_offload_choice choice)
{
    return hapt_offload_device_bytes(given, choice) <= given->device_memory_bytes &&
           hapt_offload_host_bytes(given, choice) <= given->host_memory_bytes;
}

double hapt_offload_forward_s(const struct hapt_offload_case *given, struct hapt_offload_choice choice)
{
    assert_choice(given, choice);
    return fmax(given->forward_s * given->block_count, given->fetch_s * choice.state_away + given->forward_s);
}

double hapt_offload_backward_s(const struct hapt_offload_case *given, struct hapt_offload_choice choice)
{
    const int L = given->block_count, first_away = L - choice.state_away;
    const int shared = choice.recomputed - first_away; /* recomputed blocks with their state on the host */
    const int both = shared < 0 ? 0 : shared < choice.weights_away ? shared : choice.weights_away; /* v */
    assert_choice(given, choice);
    const double wait_s = both * fmax(given->fetch_s - given->forward_s - given->backward_s, 0) +
                          (choice.weights_away - both) * fmax(given->fetch_s - given->backward_s, 0);
    const double compute_s = given->backward_s * L + given->forward_s * choice.recomputed +
                             given->device_update_s * (L - choice.state_away) + wait_s;
    return fmax(compute_s, given->backward_s + given->offload_s + given->host_update_s * choice.state_away);
}

static enum hapt_status fail_memory(const struct hapt_offload_case *given, const char *system)
{
    return hapt_fail(HAPT_ERR_INFEASIBLE, "take fewer rows a step, a smaller model, or more memory",
                     "%s: no choice fits in %.1f GB of device memory and %.1f GB of host memory", system,
                     given->device_memory_bytes / 1e9, given->host_memory_bytes / 1e9);
}

enum hapt_status hapt_offload_optimum(const struct hapt_offload_case *given, struct hapt_offload_choice *choice)
{
    const int L = given->block_count;
    double least_s = INFINITY;
    struct hapt_offload_choice best = {0};
    for (int o = 0; o <= L; o++) {
        for (int c = 0; c <= L; c++) {
            struct hapt_offload_choice tried = {c, 0, o};
            /* More weights away save memory and never save time: the least p that fits is the best one. */
            while (tried.weights_away < o && !hapt_offload_fits(given, tried)) tried.weights_away++;
            if (!hapt_offload_fits(given, tried)) continue;
            const double sum_s = hapt_offload_forward_s(given, tried) + hapt_offload_backward_s(given, tried);
            if (!(sum_s < least_s)) continue;
            least_s = sum_s;
            best = tried;
        }
    }
    if (!isfinite(least_s)) return fail_memory(given, "AutoHete's program");
    *choice = best;
    return HAPT_OK;
}

/* ---- Choices by the simulated period ---- */

/* Keeps the faster plan in *best. */
static enum hapt_status try_choice(const struct hapt_offload_case *given, struct hapt_offload_choice choice,
                                   struct hapt_offload_execution execution, struct hapt_offload_plan *best)
{
    double period_s;
    HAPT_TRY(hapt_offload_period(given, choice, execution, &period_s));
    if (period_s < best->period_s) *best = (struct hapt_offload_plan){choice, execution, period_s};
    return HAPT_OK;
}

enum hapt_status hapt_offload_jointly(const struct hapt_offload_case *given, struct hapt_offload_execution execution,
                                      struct hapt_offload_choice *choice, double *period_s)
{
    const int L = given->block_count;
    struct hapt_offload_plan best = {.period_s = INFINITY};
    for (int o = 0; o <= L; o++) {
        for (int p = 0; p <= o; p++) {
            struct hapt_offload_choice tried = {0, p, o};
            while (tried.recomputed < L && !hapt_offload_fits(given, tried)) tried.recomputed++;
            if (!hapt_offload_fits(given, tried)) continue;
            HAPT_TRY(try_choice(given, tried, execution, &best));
            if (tried.recomputed == 0) break; /* more weights away only take time */
        }
    }
    if (!isfinite(best.period_s)) return fail_memory(given, "the joint choice");
    *choice = best.choice;
    *period_s = best.period_s;
    return HAPT_OK;
}

/* ---- Other systems ---- */

static const struct {
    const char *name;
    enum hapt_offload_overlap overlap;
} rival_table[HAPT_RIVAL_COUNT] = {
    [HAPT_RIVAL_RECOMPUTE_ALL] = {"recompute-all", HAPT_OFFLOAD_ACROSS_STEPS},
    [HAPT_RIVAL_ZERO_OFFLOAD] = {"zero-offload", HAPT_OFFLOAD_PHASES},
    [HAPT_RIVAL_PATRICKSTAR] = {"patrickstar", HAPT_OFFLOAD_SYNCHRONOUS},
    [HAPT_RIVAL_STRONGHOLD] = {"stronghold", HAPT_OFFLOAD_WITHIN_STEP},
    [HAPT_RIVAL_AUTOHETE] = {"autohete", HAPT_OFFLOAD_ACROSS_STEPS},
};

const char *hapt_offload_rival_name(enum hapt_offload_rival rival)
{
    return rival_table[rival].name;
}

/* The system can choose it; all of these recompute all blocks or none. */
static bool allows(enum hapt_offload_rival rival, const struct hapt_offload_case *given,
                   struct hapt_offload_choice choice)
{
    const int L = given->block_count, p = choice.weights_away, o = choice.state_away;
    switch (rival) {
    case HAPT_RIVAL_RECOMPUTE_ALL: return choice.recomputed == L && o == 0;
    case HAPT_RIVAL_ZERO_OFFLOAD: return p == 0 && o == L;
    case HAPT_RIVAL_PATRICKSTAR: return true;
    case HAPT_RIVAL_STRONGHOLD: return p == o;
    default: HAPT_ASSERT(!"a system with a choice of its own"); return false;
    }
}

enum hapt_status hapt_offload_rival_plan(const struct hapt_offload_case *given, enum hapt_offload_rival rival,
                                         bool clipping, struct hapt_offload_plan *plan)
{
    const int L = given->block_count;
    const struct hapt_offload_execution execution = {rival_table[rival].overlap, rival == HAPT_RIVAL_AUTOHETE,
                                                     clipping};
    struct hapt_offload_plan best = {.period_s = INFINITY};
    HAPT_TRY(hapt_offload_case_check(given));
    if (rival == HAPT_RIVAL_AUTOHETE) {
        struct hapt_offload_choice choice;
        HAPT_TRY(hapt_offload_optimum(given, &choice));
        HAPT_TRY(try_choice(given, choice, execution, &best));
        *plan = best;
        return HAPT_OK;
    }
    for (int c = 0; c <= L; c += L)
        for (int o = 0; o <= L; o++)
            for (int p = 0; p <= o; p++) {
                const struct hapt_offload_choice tried = {c, p, o};
                if (!allows(rival, given, tried) || !hapt_offload_fits(given, tried)) continue;
                HAPT_TRY(try_choice(given, tried, execution, &best));
            }
    if (!isfinite(best.period_s)) return fail_memory(given, rival_table[rival].name);
    *plan = best;
    return HAPT_OK;
}
