/*
 * The step of a chain, without instruction lists: each chunk on a submesh of its own, messages between neighbours only.
 *
 * Stage i computes the forward passes 0 .. N_i - 1, then a backward and a forward pass in turn. So forward pass k of a
 * stage follows its backward pass k - N_i. Backward pass m follows its forward pass m + N_i - 1. Rounds over m, down
 * the pipeline and up again, therefore find each operand computed. The maxima and sums are those of simulate.c, so the
 * times have the same bits. Several steps only if all stages agree at the end of each.
 */
#include <math.h>

#include "play.h"

/* Rounds between two looks at whether the step may still be short enough. */
enum { CHECK_EVERY = 16 };
/* More than the rounding of a sum of all passes. */
#define ROUNDING 1e-9

/* A stage, its newest passes, and the boundary behind it. Rings by microbatch hold the ends of passes and transfers. */
struct stage {
    double *forward_end_s, *backward_end_s, *activation_s, *gradient_s;
    double clock_s;
    double update_s;                    /* end of its deferred update, if nothing delays it */
    double forward_free_s, back_free_s; /* channels over the boundary */
    double forward_s, backward_s;       /* of a pass */
    double comm_s;                      /* over the boundary */
    double after_s;                     /* from its last backward pass to that of stage 0, at least */
    int launches, next;                 /* `next`: the next forward pass */
};

struct chain {
    const struct hapt_chain *about;
    const struct hapt_costs *costs;
    int slots, mask;
    struct stage *stage; /* [chunk] */
};

static size_t place(struct chain *chain, char *block)
{
    const size_t chunks = (size_t)chain->about->chunks, row = ((size_t)chain->mask + 1) * sizeof(double);
    size_t used = 0;
    chain->stage = play_carve(block, &used, chunks * sizeof *chain->stage);
    for (size_t i = 0; i < chunks; i++) {
        struct stage stage = {0};
        stage.forward_end_s = play_carve(block, &used, row);
        stage.backward_end_s = play_carve(block, &used, row);
        stage.activation_s = play_carve(block, &used, row);
        stage.gradient_s = play_carve(block, &used, row);
        if (block) chain->stage[i] = stage;
    }
    return used;
}

static enum hapt_status begin(struct chain *chain, struct hapt_simulate_work *work)
{
    const struct hapt_chain *about = chain->about;
    const struct hapt_costs *costs = chain->costs;
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
        struct stage *const stage = &chain->stage[i];
        stage->forward_s = costs->forward_s[i];
        stage->backward_s = costs->backward_s[i];
        stage->comm_s = i + 1 < about->chunks ? costs->comm_s[i] : 0;
        stage->launches = about->launches[i];
        stage->after_s = i > 0 ? stage[-1].after_s + stage[-1].backward_s + stage[-1].comm_s : 0;
    }
    return HAPT_OK;
}

/* An update that ends at clock_s, apart from what is deferred. Returns its whole end. */
static double defer(struct chain *chain, int i, double clock_s)
{
    chain->stage[i].clock_s = clock_s;
    chain->stage[i].update_s = clock_s + (chain->costs->deferred_s ? chain->costs->deferred_s[i] : 0);
    return chain->stage[i].update_s;
}

/* Forward passes of a stage up to microbatch `last`, in a step that begins with microbatch `first`. */
static void run_forward(struct chain *chain, int i, int first, int last)
{
    const int mask = chain->mask, slots = chain->slots;
    struct stage *const mine = &chain->stage[i], *const front = i > 0 ? mine - 1 : NULL;
    const bool sends = i + 1 < chain->about->chunks;
    double clock_s = mine->clock_s;
    int k = mine->next;
    for (; k <= last; k++) {
        double start_s = clock_s;
        if (front) {
            double sent_s = later(front->forward_end_s[k & mask], front->forward_free_s);
            if (slots > 0 && k >= slots) sent_s = later(sent_s, mine->forward_end_s[(k - slots) & mask]);
            const double arrived_s = sent_s + front->comm_s;
            front->forward_free_s = front->activation_s[k & mask] = arrived_s;
            start_s = later(start_s, arrived_s);
        }
        /* the microbatch before in the same slot must have been sent */
        if (sends && k >= mine->launches) start_s = later(start_s, mine->activation_s[(k - mine->launches) & mask]);
        clock_s =
            k == first ? play_first_forward_end(chain->costs, i, start_s, mine->update_s) : start_s + mine->forward_s;
        mine->forward_end_s[k & mask] = clock_s;
    }
    mine->clock_s = clock_s;
    mine->next = k;
}

static void run_backward(struct chain *chain, int i, int m)
{
    const int mask = chain->mask, slots = chain->slots;
    struct stage *const mine = &chain->stage[i];
    double start_s = mine->clock_s;
    if (i + 1 < chain->about->chunks) {
        double sent_s = later(mine[1].backward_end_s[m & mask], mine->back_free_s);
        if (slots > 0 && m >= slots) sent_s = later(sent_s, mine->backward_end_s[(m - slots) & mask]);
        const double arrived_s = sent_s + mine->comm_s;
        mine->back_free_s = mine->gradient_s[m & mask] = arrived_s;
        start_s = later(start_s, arrived_s);
    }
    if (i > 0 && slots > 0 && m >= slots) start_s = later(start_s, mine[-1].gradient_s[(m - slots) & mask]);
    mine->clock_s = mine->backward_end_s[m & mask] = start_s + mine->backward_s;
}

/* The end of a step, behind all passes. */
static double end_step(struct chain *chain)
{
    const int last = chain->about->chunks - 1;
    double end_s = 0, agreed_s = 0;
    if (chain->about->tied && last > 0) {
        const double met_s = later(chain->stage[0].clock_s, chain->stage[last].clock_s);
        chain->stage[0].clock_s = chain->stage[last].clock_s = met_s + chain->costs->exchange_s;
    }
    for (int i = 0; i <= last && chain->costs->agrees; i++) agreed_s = later(agreed_s, chain->stage[i].clock_s);
    for (int i = 0; i <= last; i++) {
        const double clock_s = later(agreed_s, chain->stage[i].clock_s);
        end_s = later(end_s, defer(chain, i, clock_s + play_update_s(chain->costs, i)));
    }
    return end_s;
}

/* The earliest end of a step whose microbatches below m passed all stages. Each stage has to compute the others, and
 * the last gradient to get from there to stage 0. */
static double earliest_end_s(const struct chain *chain, int m, int end)
{
    const int last = chain->about->chunks - 1;
    double least_s = 0;
    for (int i = 0; i <= last; i++) {
        const struct stage *const stage = &chain->stage[i];
        const double left_s = (end - stage->next) * stage->forward_s + (end - m) * stage->backward_s;
        least_s = later(least_s, stage->clock_s + left_s + stage->after_s);
    }
    if (chain->about->tied && last > 0) least_s += chain->costs->exchange_s;
    return (least_s + play_update_s(chain->costs, 0)) * (1 - ROUNDING);
}

/* Microbatches [first, end) of a step that begins at before_s. Passes and transfers of earlier steps ended before the
 * stages agreed. Returns the end of the step. If the step takes longer than most_s, a lower bound of its end may do,
 * which is later, too. */
static double run_step(struct chain *chain, int first, int end, double before_s, double most_s)
{
    const struct hapt_chain *about = chain->about;
    for (int m = first; m < end; m++) {
        if ((m - first) % CHECK_EVERY == 1 && isfinite(most_s)) {
            const double least_s = earliest_end_s(chain, m, end);
            if (least_s - before_s > most_s) return least_s;
        }
        for (int i = 0; i < about->chunks; i++) {
            const int last = m + chain->stage[i].launches - 1;
            run_forward(chain, i, first, last < end ? last : end - 1);
        }
        for (int i = about->chunks - 1; i >= 0; i--) run_backward(chain, i, m);
    }
    return end_step(chain);
}

enum hapt_status hapt_simulate_chain(const struct hapt_chain *about, const struct hapt_costs *costs, double most_s,
                                     struct hapt_simulate_work *work, double *step_s)
{
    struct chain chain = {.about = about, .costs = costs, .slots = costs->transfer_slots};
    const int B = about->microbatches, steps = costs->steps > 0 ? costs->steps : 1;
    double end_s = 0;
    HAPT_ASSERT(!costs->blocking && !costs->edge_s && (costs->steps <= 1 || costs->agrees));
    HAPT_ASSERT(!costs->steady || (costs->steps <= 1 && costs->agrees));
    HAPT_TRY(begin(&chain, work));
    for (int i = 0; costs->steady && costs->step_s && i < about->chunks; i++) {
        end_s = later(end_s, defer(&chain, i, play_update_s(costs, i)));
    }
    *step_s = 0;
    for (int step = 0; step < steps; step++) {
        const double before_s = end_s;
        end_s = run_step(&chain, step * B, (step + 1) * B, before_s, steps == 1 ? most_s : INFINITY);
        *step_s = end_s - before_s;
    }
    return HAPT_OK;
}
