/*
 * The step of a chain, without instruction lists: each chunk on a submesh of its own, messages between neighbours only.
 *
 * Stage i computes the forward passes 0 .. N_i - 1, then a backward and a forward pass in turn. So forward pass k of a
 * stage follows its backward pass k - N_i. Backward pass m follows its forward pass m + N_i - 1. Rounds over m, down
 * the pipeline and up again, therefore find each operand computed. The maxima and sums are those of simulate.c, so the
 * times have the same bits. Several steps only if all stages agree at the end of each.
 */
#include <string.h>

#include "play.h"

/* Times of the newest passes of a stage, and of the transfers over the boundary behind it: rings by microbatch. */
struct ring {
    double *forward_end_s, *backward_end_s, *activation_s, *gradient_s;
};

struct chain {
    const struct hapt_chain *about;
    const struct hapt_costs *costs;
    int slots, mask;
    struct ring *ring;                    /* [chunk] */
    double *clock_s;                      /* [chunk] */
    double *update_s;                     /* [chunk] end of its deferred update, if nothing delays it */
    double *forward_free_s, *back_free_s; /* [chunk] channels over the boundary behind it */
    int *next;                            /* [chunk] the next forward pass */
};

static size_t place(struct chain *chain, char *block)
{
    const size_t chunks = (size_t)chain->about->chunks, row = ((size_t)chain->mask + 1) * sizeof(double);
    size_t used = 0;
    chain->ring = play_carve(block, &used, chunks * sizeof *chain->ring);
    chain->clock_s = play_carve(block, &used, chunks * sizeof(double));
    chain->update_s = play_carve(block, &used, chunks * sizeof(double));
    chain->forward_free_s = play_carve(block, &used, chunks * sizeof(double));
    chain->back_free_s = play_carve(block, &used, chunks * sizeof(double));
    chain->next = play_carve(block, &used, chunks * sizeof *chain->next);
    for (size_t i = 0; i < chunks; i++) {
        struct ring ring;
        ring.forward_end_s = play_carve(block, &used, row);
        ring.backward_end_s = play_carve(block, &used, row);
        ring.activation_s = play_carve(block, &used, row);
        ring.gradient_s = play_carve(block, &used, row);
        if (block) chain->ring[i] = ring;
    }
    return used;
}

static enum hapt_status begin(struct chain *chain, struct hapt_simulate_work *work)
{
    const struct hapt_chain *about = chain->about;
    int longest = 0;
    for (int i = 0; i < about->chunks; i++) longest = about->launches[i] > longest ? about->launches[i] : longest;
    chain->mask = 1;
    while (chain->mask < longest + chain->slots + 2) chain->mask *= 2;
    chain->mask--;
    const size_t bytes = place(chain, NULL);
    if (bytes > work->bytes) {
        hapt_simulate_work_release(work);
        work->block = malloc(bytes);
        if (!work->block)
            return hapt_fail(HAPT_ERR_MEMORY, "plan fewer microbatches",
                             "host memory exhausted by a simulation of %d stages, %d microbatches", about->chunks,
                             about->microbatches);
        work->bytes = bytes;
    }
    place(chain, work->block);
    for (int i = 0; i < about->chunks; i++) {
        chain->clock_s[i] = chain->update_s[i] = chain->forward_free_s[i] = chain->back_free_s[i] = 0;
        chain->next[i] = 0;
    }
    return HAPT_OK;
}

/* Times a transfer that fills a transfer slot: `before_s` is the end of the pass that frees it. */
static inline double transfer(double ready_s, double before_s, double comm_s, double *free_s)
{
    const double start_s = later(later(ready_s, *free_s), before_s);
    *free_s = start_s + comm_s;
    return *free_s;
}

/* An update that ends at clock_s, apart from what is deferred. Returns its whole end. */
static double defer(struct chain *chain, int i, double clock_s)
{
    chain->clock_s[i] = clock_s;
    chain->update_s[i] = clock_s + (chain->costs->deferred_s ? chain->costs->deferred_s[i] : 0);
    return chain->update_s[i];
}

/* Forward passes of a stage up to microbatch `last`, in a step that begins with microbatch `first`. */
static void run_forward(struct chain *chain, int i, int first, int last)
{
    const int mask = chain->mask, slots = chain->slots, launches = chain->about->launches[i];
    const struct ring *mine = &chain->ring[i], *front = i > 0 ? mine - 1 : NULL;
    const bool sends = i + 1 < chain->about->chunks;
    for (int k = chain->next[i]; k <= last; k++) {
        double start_s = chain->clock_s[i];
        if (front) {
            const double before_s = slots > 0 && k >= slots ? mine->forward_end_s[(k - slots) & mask] : 0;
            const double arrived_s = transfer(front->forward_end_s[k & mask], before_s, chain->costs->comm_s[i - 1],
                                              &chain->forward_free_s[i - 1]);
            front->activation_s[k & mask] = arrived_s;
            start_s = later(start_s, arrived_s);
        }
        /* the microbatch before in the same slot must have been sent */
        if (sends && k >= launches) start_s = later(start_s, mine->activation_s[(k - launches) & mask]);
        chain->clock_s[i] = mine->forward_end_s[k & mask] =
            k == first ? play_first_forward_end(chain->costs, i, start_s, chain->update_s[i])
                       : start_s + chain->costs->forward_s[i];
    }
    chain->next[i] = last + 1 > chain->next[i] ? last + 1 : chain->next[i];
}

static void run_backward(struct chain *chain, int i, int m)
{
    const int mask = chain->mask, slots = chain->slots;
    const struct ring *mine = &chain->ring[i];
    double start_s = chain->clock_s[i];
    if (i + 1 < chain->about->chunks) {
        const double before_s = slots > 0 && m >= slots ? mine->backward_end_s[(m - slots) & mask] : 0;
        const double arrived_s =
            transfer(mine[1].backward_end_s[m & mask], before_s, chain->costs->comm_s[i], &chain->back_free_s[i]);
        mine->gradient_s[m & mask] = arrived_s;
        start_s = later(start_s, arrived_s);
    }
    if (i > 0 && slots > 0 && m >= slots) start_s = later(start_s, mine[-1].gradient_s[(m - slots) & mask]);
    chain->clock_s[i] = mine->backward_end_s[m & mask] = start_s + chain->costs->backward_s[i];
}

/* The end of a step, behind all passes. */
static double end_step(struct chain *chain)
{
    const int last = chain->about->chunks - 1;
    double end_s = 0, agreed_s = 0;
    if (chain->about->tied && last > 0) {
        const double met_s = later(chain->clock_s[0], chain->clock_s[last]);
        chain->clock_s[0] = chain->clock_s[last] = met_s + chain->costs->exchange_s;
    }
    for (int i = 0; i <= last && chain->costs->agrees; i++) agreed_s = later(agreed_s, chain->clock_s[i]);
    for (int i = 0; i <= last; i++) {
        end_s = later(end_s, defer(chain, i, later(agreed_s, chain->clock_s[i]) + play_update_s(chain->costs, i)));
    }
    return end_s;
}

/* Microbatches [first, end) of a step. Passes and transfers of earlier steps ended before the stages agreed. */
static void run_step(struct chain *chain, int first, int end)
{
    const struct hapt_chain *about = chain->about;
    for (int m = first; m < end; m++) {
        for (int i = 0; i < about->chunks; i++) {
            const int last = m + about->launches[i] - 1;
            run_forward(chain, i, first, last < end ? last : end - 1);
        }
        for (int i = about->chunks - 1; i >= 0; i--) run_backward(chain, i, m);
    }
}

enum hapt_status hapt_simulate_chain(const struct hapt_chain *about, const struct hapt_costs *costs,
                                     struct hapt_simulate_work *work, double *step_s)
{
    struct chain chain = {.about = about, .costs = costs, .slots = costs->transfer_slots};
    const int B = about->microbatches;
    double end_s = 0;
    HAPT_ASSERT(!costs->blocking && !costs->edge_s && (costs->steps <= 1 || costs->agrees));
    HAPT_ASSERT(!costs->steady || (costs->steps <= 1 && costs->agrees));
    HAPT_TRY(begin(&chain, work));
    for (int i = 0; costs->steady && costs->step_s && i < about->chunks; i++) {
        end_s = later(end_s, defer(&chain, i, play_update_s(costs, i)));
    }
    *step_s = 0;
    for (int step = 0; step < (costs->steps > 0 ? costs->steps : 1); step++) {
        const double before_s = end_s;
        run_step(&chain, step * B, (step + 1) * B);
        end_s = end_step(&chain);
        *step_s = end_s - before_s;
    }
    return HAPT_OK;
}
