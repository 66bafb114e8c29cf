/*
 * Mixtures of experts: the gate, tokens into the slots of their experts and back, and the gradients. Products:
 * isa_expert.c.
 *
 * Slots are [rows][experts][capacity][columns]. A row's slots at an expert are filled from the front, in the order of
 * its tokens, then of a token's choices. A call may hold a shard of the experts, from first_value on; the other slots
 * are on other shards.
 */
#include <math.h>

#include "isa.h"

/* Sizes of a call's slots and tokens. */
struct slots {
    const struct hapt_call *call;
    const int32_t *expert; /* [rows][tokens][choices] */
    int64_t rows, tokens, choices, experts, capacity;
};

static struct slots slots_of(const struct hapt_call *call, const struct hapt_view *choices,
                             const struct hapt_view *slots)
{
    return (struct slots){.call = call,
                          .expert = choices->data,
                          .rows = choices->shape[0],
                          .tokens = choices->shape[1],
                          .choices = choices->shape[2],
                          .experts = slots->shape[1],
                          .capacity = slots->shape[2]};
}

static int64_t choice_count(const struct slots *slots)
{
    return slots->rows * slots->tokens * slots->choices;
}

static int64_t slot_count(const struct slots *slots)
{
    return slots->rows * slots->experts * slots->capacity;
}

/* Expert of a choice, counted from this shard's first one, or -1. */
static int64_t local_expert(const struct slots *slots, int64_t choice)
{
    const int64_t expert = slots->expert[choice] - slots->call->first_value;
    return expert >= 0 && expert < slots->experts ? expert : -1;
}

/*
 * Finds the slot of every choice (-1: on another shard, or no room) and the choice in every slot (-1: empty); either
 * may be NULL. filled [rows][experts] counts the choices. False if a row has more of them than slots.
 */
static bool find_slots(const struct slots *slots, int64_t *filled, int64_t *slot, int64_t *choice)
{
    const int64_t row_choices = slots->tokens * slots->choices;
    const int64_t row_slots =
        slot || choice ? slots->experts * slots->capacity : 0; /* counting alone needs no capacity */
    bool fits = true;
#pragma omp parallel for schedule(static) reduction(&& : fits) num_threads(threads_for(slots->call, choice_count(slots) * 8))
    for (int64_t r = 0; r < slots->rows; r++) {
        int64_t *count = filled + r * slots->experts;
        memset(count, 0, (size_t)slots->experts * sizeof *count);
        for (int64_t s = 0; choice && s < row_slots; s++) choice[r * row_slots + s] = -1;
        for (int64_t q = r * row_choices; q < (r + 1) * row_choices; q++) {
            const int64_t expert = local_expert(slots, q);
            if (slot) slot[q] = -1;
            if (expert < 0) continue;
            const int64_t at = count[expert]++;
            fits = fits && at < slots->capacity;
            if (at >= slots->capacity) continue;
            if (!slot && !choice) continue;
            const int64_t index = r * row_slots + expert * slots->capacity + at;
            if (slot) slot[q] = index;
            if (choice) choice[index] = q;
        }
    }
    return fits;
}

static enum hapt_status too_many(const struct slots *slots, const int64_t *filled)
{
    int64_t worst = 0;
    for (int64_t k = 0; k < slots->rows * slots->experts; k++)
        if (filled[k] > filled[worst]) worst = k;
    return hapt_fail(HAPT_ERR_INPUT, "give the model a larger --capacity-factor, or 0: room for every token",
                     "%lld tokens of one row go to expert %lld, which has room for %lld", (long long)filled[worst],
                     (long long)(slots->call->first_value + worst % slots->experts), (long long)slots->capacity);
}

static size_t index_workspace(const struct slots *slots, int64_t places)
{
    return (size_t)(slots->rows * slots->experts + places) * sizeof(int64_t);
}

/* Softmax over all experts; the largest are kept and scaled to sum 1. This equals the softmax of the largest logits
 * alone. */
INLINE void gate_row(const void *logits, int64_t row, int64_t experts, int64_t choices, bool half, float *weight,
                     int32_t *expert)
{
    double sum = 0;
    for (int64_t j = 0; j < choices; j++) {
        float most = 0;
        int64_t best = -1;
        for (int64_t e = 0; e < experts; e++) {
            bool taken = false;
            for (int64_t i = 0; i < j; i++) taken = taken || expert[i] == e;
            const float value = load(logits, row * experts + e, 1, half)[0];
            if (taken || (best >= 0 && !(value > most))) continue; /* of equal logits, the first */
            most = value;
            best = e;
        }
        expert[j] = (int32_t)best;
        weight[j] = most;
        sum += exp((double)most - (double)weight[0]);
    }
    const float top = weight[0];
    for (int64_t j = 0; j < choices; j++) weight[j] = (float)(exp((double)weight[j] - (double)top) / sum);
}

/* Turns the weights of the chosen experts, a softmax among these, into their part of the softmax over all experts.
 * Returns the logsumexp over all. */
INLINE float weigh_among_all(const void *logits, int64_t row, int64_t experts, int64_t choices, bool half,
                             float *weight, const int32_t *expert)
{
    const double top = (double)load(logits, row * experts + expert[0], 1, half)[0];
    double sum = 0, chosen = 0;
    for (int64_t e = 0; e < experts; e++) sum += exp((double)load(logits, row * experts + e, 1, half)[0] - top);
    for (int64_t j = 0; j < choices; j++)
        chosen += exp((double)load(logits, row * experts + expert[j], 1, half)[0] - top);
    for (int64_t j = 0; j < choices; j++) weight[j] = (float)((double)weight[j] * chosen / sum);
    return (float)(top + log(sum));
}

/* With a third output, weights are those of the softmax over all experts. */
static enum hapt_status gate(const struct hapt_call *call, struct hapt_queue *queue)
{
    (void)queue;
    const struct hapt_view *logits = &call->input[0]; /* [rows][tokens][experts] */
    float *weight = call->output[0].data;             /* [rows][tokens][choices] */
    float *lse = call->output_count > 2 ? call->output[2].data : NULL;
    int32_t *expert = call->output[1].data;
    const int64_t rows = view_rows(logits), experts = view_columns(logits), choices = view_columns(&call->output[0]);
    const bool half = logits->dtype == HAPT_BF16;
#pragma omp parallel for schedule(static) num_threads(threads_for(call, rows *experts *choices * 4))
    for (int64_t r = 0; r < rows; r++) {
        gate_row(logits->data, r, experts, choices, half, weight + r * choices, expert + r * choices);
        if (lse)
            lse[r] =
                weigh_among_all(logits->data, r, experts, choices, half, weight + r * choices, expert + r * choices);
    }
    return HAPT_OK;
}

/* Gradient of the softmax over all experts: p_e ([e chosen] dw_e - sum of w dw). Input: logits, weights, experts,
 * logsumexp, dweights. */
static enum hapt_status gate_over_all_dx(const struct hapt_call *call, struct hapt_queue *queue)
{
    (void)queue;
    const float *weight = call->input[1].data, *lse = call->input[3].data, *dweight = call->input[4].data;
    const int32_t *expert = call->input[2].data;
    const struct hapt_view *logits = &call->input[0], *dlogits = &call->output[0];
    const int64_t rows = view_rows(logits), experts = view_columns(logits), choices = view_columns(&call->input[1]);
    const bool half = dlogits->dtype == HAPT_BF16;
    for (int64_t r = 0; r < rows; r++) {
        double mean = 0;
        for (int64_t j = 0; j < choices; j++)
            mean += (double)weight[r * choices + j] * (double)dweight[r * choices + j];
        for (int64_t e = 0; e < experts; e++) {
            const int64_t at = r * experts + e;
            double incoming = -mean;
            for (int64_t j = 0; j < choices; j++)
                if (expert[r * choices + j] == e) incoming += (double)dweight[r * choices + j];
            vector value =
                vector_set((float)(exp((double)load(logits->data, at, 1, half)[0] - (double)lse[r]) * incoming));
            if (call->accumulate & 1u) value += load(dlogits->data, at, 1, half);
            store(dlogits->data, at, 1, half, value);
        }
    }
    return HAPT_OK;
}

/* Gradient of a softmax at the chosen logits; 0 at the others. */
static enum hapt_status gate_dx(const struct hapt_call *call, struct hapt_queue *queue)
{
    (void)queue;
    const float *weight = call->input[0].data, *dweight = call->input[2].data; /* [rows][tokens][choices] */
    const int32_t *expert = call->input[1].data;
    struct hapt_view dlogits = call->output[0];
    const int64_t rows = view_rows(&dlogits), experts = view_columns(&dlogits), choices = view_columns(&call->input[0]);
    const bool half = dlogits.dtype == HAPT_BF16;
    if (!(call->accumulate & 1u)) memset(dlogits.data, 0, (size_t)(rows * experts) * hapt_dtype_bytes(dlogits.dtype));
    for (int64_t r = 0; r < rows; r++) {
        const float *w = weight + r * choices, *dw = dweight + r * choices;
        double mean = 0;
        for (int64_t j = 0; j < choices; j++) mean += (double)w[j] * (double)dw[j];
        for (int64_t j = 0; j < choices; j++) {
            const int64_t e = expert[r * choices + j] - call->first_value, at = r * experts + e;
            if (e < 0 || e >= experts) continue; /* on another shard */
            const float d = (float)((double)w[j] * ((double)dw[j] - mean));
            store(dlogits.data, at, 1, half, load(dlogits.data, at, 1, half) + d);
        }
    }
    return HAPT_OK;
}

static size_t count_workspace(const struct hapt_call *call)
{
    return (size_t)hapt_view_elements(&call->output[0]) * sizeof(int64_t);
}

static enum hapt_status count(const struct hapt_call *call, struct hapt_queue *queue)
{
    (void)queue;
    struct hapt_view slots_view = {.dims = 4, .shape = {0, call->output[0].shape[1], INT64_MAX, 0}}; /* room for all */
    const struct slots slots = slots_of(call, &call->input[0], &slots_view);
    int64_t *filled = call->workspace;
    float *counts = call->output[0].data; /* [rows][experts] */
    find_slots(&slots, filled, NULL, NULL);
    for (int64_t k = 0; k < slots.rows * slots.experts; k++) counts[k] = (float)filled[k];
    return HAPT_OK;
}

/* Every slot: its row of x, times its weight if there are weights; empty slots 0. */
INLINE enum hapt_status fill(const struct hapt_call *call, const struct hapt_view *choices, const float *weight,
                             bool half, bool strict)
{
    const struct hapt_view *view = &call->output[0];
    const struct slots slots = slots_of(call, choices, view);
    const void *x = call->input[0].data; /* [rows][tokens][columns] */
    void *y = view->data;
    const int64_t columns = view_columns(view), count = slot_count(&slots);
    const bool accumulate = call->accumulate & 1u;
    int64_t *filled = call->workspace, *choice = filled + slots.rows * slots.experts; /* [slots] */
    if (!find_slots(&slots, filled, NULL, choice) && strict) return too_many(&slots, filled);
#pragma omp parallel for schedule(static) num_threads(threads_for(call, count *columns))
    for (int64_t s = 0; s < count; s++) {
        const int64_t q = choice[s], from = q / slots.choices * columns;
        const float by = q >= 0 && weight ? weight[q] : 1.0f;
        if (q < 0 && accumulate) continue;
        for (int64_t c = 0; c < columns; c += LANES) {
            const int64_t left = columns - c, at = s * columns + c;
            vector value = {0};
            if (q >= 0) value = load(x, from + c, left, half) * by;
            if (accumulate) value += load(y, at, left, half);
            store(y, at, left, half, value);
        }
    }
    return HAPT_OK;
}

/* Every token: the sum of its slots, weighted if there are weights. */
INLINE void gather(const struct hapt_call *call, const struct hapt_view *choices, const float *weight, bool half)
{
    const struct hapt_view *view = &call->output[0];
    const struct slots slots = slots_of(call, choices, &call->input[0]);
    const void *from = call->input[0].data;
    void *y = view->data; /* [rows][tokens][columns] */
    const int64_t columns = view_columns(view), tokens = slots.rows * slots.tokens;
    const bool accumulate = call->accumulate & 1u;
    int64_t *filled = call->workspace, *slot = filled + slots.rows * slots.experts; /* [choices] */
    find_slots(&slots, filled, slot, NULL);
#pragma omp parallel for schedule(static) num_threads(threads_for(call, tokens *columns *slots.choices))
    for (int64_t r = 0; r < tokens; r++)
        for (int64_t c = 0; c < columns; c += LANES) {
            const int64_t left = columns - c, at = r * columns + c;
            vector sum = {0};
            for (int64_t q = r * slots.choices; q < (r + 1) * slots.choices; q++) {
                if (slot[q] < 0) continue;
                const vector value = load(from, slot[q] * columns + c, left, half);
                sum += weight ? value * weight[q] : value;
            }
            if (accumulate) sum += load(y, at, left, half);
            store(y, at, left, half, sum);
        }
}

/* Every choice: the dot product of its slot with the gradient of its token. */
INLINE void weigh(const struct hapt_call *call, bool half)
{
    const struct slots slots = slots_of(call, &call->input[2], &call->input[1]);
    const void *dy = call->input[0].data, *from = call->input[1].data;
    float *dweight = call->output[0].data;
    const int64_t columns = view_columns(&call->input[0]), count = choice_count(&slots);
    const bool accumulate = call->accumulate & 1u;
    int64_t *filled = call->workspace, *slot = filled + slots.rows * slots.experts;
    find_slots(&slots, filled, slot, NULL);
#pragma omp parallel for schedule(static) num_threads(threads_for(call, count *columns))
    for (int64_t q = 0; q < count; q++) {
        struct sum sum = {0};
        for (int64_t c = 0; slot[q] >= 0 && c < columns; c += LANES) {
            const int64_t left = columns - c;
            sum_add(&sum, load(dy, q / slots.choices * columns + c, left, half) *
                              load(from, slot[q] * columns + c, left, half));
        }
        dweight[q] = (float)(sum_total(&sum) + (accumulate ? (double)dweight[q] : 0.0));
    }
}

/* Workspaces: an index for every slot, or for every choice. */
static size_t fill_workspace(const struct hapt_call *call)
{
    const struct slots slots = slots_of(call, &call->input[call->input_count - 1], &call->output[0]);
    return index_workspace(&slots, slot_count(&slots));
}

static size_t gather_workspace(const struct hapt_call *call)
{
    const struct slots slots = slots_of(call, &call->input[call->input_count - 1], &call->input[0]);
    return index_workspace(&slots, choice_count(&slots));
}

static size_t weigh_workspace(const struct hapt_call *call)
{
    const struct slots slots = slots_of(call, &call->input[2], &call->input[1]);
    return index_workspace(&slots, choice_count(&slots));
}

KERNELS(dispatch, return fill(call, &call->input[1], NULL, half, true))
KERNELS(dispatch_dx, gather(call, &call->input[1], NULL, half))
KERNELS(combine, gather(call, &call->input[2], call->input[1].data, half))
KERNELS(combine_dslots, return fill(call, &call->input[2], call->input[1].data, half, false))
KERNELS(combine_dweights, weigh(call, half))

const struct cpu_kernel ISA_NAME(hapt_cpu_moe)[] = {
    {HAPT_F32, {"moe_gate", NULL, gate}},
    {HAPT_BF16, {"moe_gate", NULL, gate}},
    {HAPT_F32, {"moe_gate_over_all", NULL, gate}},
    {HAPT_BF16, {"moe_gate_over_all", NULL, gate}},
    {HAPT_F32, {"moe_gate_over_all_dx", NULL, gate_over_all_dx}},
    {HAPT_BF16, {"moe_gate_over_all_dx", NULL, gate_over_all_dx}},
    {HAPT_F32, {"moe_gate_dx", NULL, gate_dx}},
    {HAPT_BF16, {"moe_gate_dx", NULL, gate_dx}},
    {HAPT_F32, {"moe_count", count_workspace, count}},
    KERNEL_ROWS("moe_dispatch", fill_workspace, dispatch),
    KERNEL_ROWS("moe_dispatch_dx", gather_workspace, dispatch_dx),
    KERNEL_ROWS("moe_combine", gather_workspace, combine),
    KERNEL_ROWS("moe_combine_dslots", fill_workspace, combine_dslots),
    KERNEL_ROWS("moe_combine_dweights", weigh_workspace, combine_dweights),
    {HAPT_F32, {NULL, NULL, NULL}},
};
