/* One memory plan for several chunks of a device, against the plans of the chunks alone. */
#include "fixture.h"
#include "memory_check.h"
#include "programs.h"

#include "hapt/memory.h"

enum { MOST_CHUNKS = 6, MOST_SPANS = 20000 };

static size_t fake_scratch(void *context, const struct hapt_program *program, int op)
{
    (void)context, (void)program;
    return op < 0 ? 100 : (size_t)(op % 7) * 40;
}

struct span {
    int chunk;
    size_t first, end;
};

static int compare_spans(const void *a, const void *b)
{
    const struct span *x = a, *y = b;
    return x->first < y->first ? -1 : x->first > y->first;
}

static void add(struct span *span, int *count, int chunk, size_t first, size_t bytes)
{
    if (bytes == 0) return;
    HAPT_ASSERT(*count < MOST_SPANS);
    span[(*count)++] = (struct span){chunk, first, first + bytes};
}

/* A chunk's own memory: blocks of parameters, gradients and state, other residents, transfer slots. */
static void add_chunk(const struct hapt_memory_plan *plan, const struct hapt_program *program, int chunk,
                      struct span *span, int *count)
{
    add(span, count, chunk, plan->frozen_offset, (plan->elements - plan->trained_elements) * sizeof(float));
    add(span, count, chunk, plan->master_offset,
        (plan->masters_like_state ? plan->state_elements : plan->trained_elements) * sizeof(float));
    if (plan->copy_offset != (size_t)-1) add(span, count, chunk, plan->copy_offset, plan->elements * sizeof(uint16_t));
    add(span, count, chunk, plan->gradient_offset, plan->zeroed_elements * sizeof(float));
    for (int s = 0; s < plan->state_count; s++)
        add(span, count, chunk, plan->state_offset[s], plan->state_elements * sizeof(float));
    for (int t = 0; t < program->tensor_count; t++)
        if (plan->location[t].region == HAPT_REGION_RESIDENT)
            add(span, count, chunk, plan->location[t].offset,
                hapt_tensor_bytes(&program->shard->tensor[program->tensor[t].tensor]));
    const struct hapt_staging *staging[] = {&plan->forward_in, &plan->backward_in, &plan->backward_out};
    for (int k = 0; k < 3; k++)
        add(span, count, chunk, staging[k]->offset, (size_t)staging[k]->slots * staging[k]->stride);
}

static void check_chunks(struct hapt_program *const *program, int chunks, const struct hapt_memory_options *options)
{
    static struct span span[MOST_SPANS];
    struct hapt_arena arena;
    struct hapt_memory_plan *together, *alone[MOST_CHUNKS];
    size_t slot = 0, tensors = 0, kernels = 0, own = 0;
    int count = 0;
    hapt_arena_init(&arena);
    CHECK_OK(hapt_memory_plan_chunks((const struct hapt_program *const *)program, chunks, options, &arena, &together));
    for (int k = 0; k < chunks; k++) {
        CHECK_OK(hapt_memory_plan(program[k], options, &arena, &alone[k]));
        CHECK_OK(memory_check(&together[k], program[k]));
        CHECK(together[k].total_bytes == together->total_bytes && together[k].slots == options->slots);
        CHECK(together[k].slot_offset == together->slot_offset &&
              together[k].activation_bytes == together->activation_bytes);
        slot = alone[k]->activation_bytes > slot ? alone[k]->activation_bytes : slot;
        const size_t in_tensors = alone[k]->workspace_bytes - alone[k]->scratch_bytes;
        tensors = in_tensors > tensors ? in_tensors : tensors;
        kernels = alone[k]->scratch_bytes > kernels ? alone[k]->scratch_bytes : kernels;
        own += alone[k]->parameter_bytes - alone[k]->workspace_bytes;
        add_chunk(&together[k], program[k], k, span, &count);
    }
    CHECK(together->activation_bytes == slot);
    CHECK(together->total_bytes == own + tensors + kernels + (size_t)options->slots * slot);
    qsort(span, (size_t)count, sizeof *span, compare_spans);
    size_t end[MOST_CHUNKS] = {0};
    for (int i = 0; i < count; i++) {
        for (int k = 0; k < chunks; k++)
            CHECK_MESSAGE(k == span[i].chunk || end[k] <= span[i].first, "chunks %d and %d overlap", k, span[i].chunk);
        if (span[i].end > end[span[i].chunk]) end[span[i].chunk] = span[i].end;
    }
    hapt_arena_release(&arena);
}

static int below(uint64_t *seed, int count)
{
    return (int)(hapt_random_next(seed) % (uint64_t)count);
}

/* Chunks of random cuts; a device holds every second or every third one of them. */
static void random_chunks(void)
{
    for (uint64_t start = 1; start <= 60; start++) {
        uint64_t seed = start;
        struct hapt_arena arena;
        struct hapt_program *program[MOST_CHUNKS];
        hapt_arena_init(&arena);
        const bool tied = below(&seed, 2) == 1, bf16 = below(&seed, 2) == 1;
        const struct hapt_model *model = fixture_gpt(&arena, (struct fixture_gpt){4, 16, 2, 8, 32, 4, tied, bf16});
        const struct hapt_memory_options options = {.slots = 1 + below(&seed, 5),
                                                    .transfer_slots = below(&seed, 6),
                                                    .state_count = below(&seed, 3),
                                                    .scratch = fake_scratch};
        const int ops = model->graph->forward_count, apart = 1 + below(&seed, 3);
        int chunks = 0;
        for (int first = 0, k = 0; first < ops && chunks < MOST_CHUNKS; k++) {
            const int wanted = first + 1 + below(&seed, ops / 3), end = wanted < ops ? wanted : ops;
            if (k % apart == 0)
                CHECK_OK(program_data_parallel(model->graph, first, end, 1, 1, &arena, &program[chunks++]));
            first = end;
        }
        check_chunks(program, chunks, &options);
        hapt_arena_release(&arena);
    }
}

int main(int argc, char **argv)
{
    test_init(&argc, &argv);
    RUN(random_chunks);
    return test_finish();
}
