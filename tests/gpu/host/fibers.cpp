/*
 * Host CUDA: the threads of a block as fibers.
 *
 * A fiber runs the block's threads one after another on the same stack. Only when a thread must wait, another fiber
 * continues: first the threads whose barrier has opened, then a new fiber with the next thread. So a kernel without
 * barriers never switches, and a warp's shuffles switch within that warp only.
 *
 * If threads wait and none can run, the kernel has a bug that may hang a GPU. Here it aborts.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "host_cuda.h"
#include "mma.h"

#if !defined(__x86_64__) && !defined(HOST_CUDA_UCONTEXT)
#define HOST_CUDA_UCONTEXT
#endif
#ifdef HOST_CUDA_UCONTEXT
#include <ucontext.h>
#endif

#define STACK_BYTES ((size_t)128 << 10)
#define STACK_SHIFT                                                                                                    \
    ((size_t)40                                                                                                        \
     << 10) /* stacks begin at different offsets below it, so that they do not compete for the same cache sets */
#define MOST_THREADS 1024
#define LANES 32

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

struct fiber {
#ifdef HOST_CUDA_UCONTEXT
    ucontext_t context;
#else
    void *stack_pointer;
#endif
    struct fiber *next; /* in the free list or in the queue of ready ones */
    unsigned int thread;
};

struct warp {
    uint64_t value[LANES],
        seen[LANES]; /* values of the waiting lanes; values of the last synchronisation of each lane */
    unsigned int mask[LANES];
    enum host_cuda_meeting kind[LANES];
    unsigned int waiting; /* lanes */
};

static struct {
    const void *kernel;
    void (*run)(void *);
    void *arguments;
    unsigned int threads, started, ended;
    bool backwards;
    unsigned int arrived, sum, last_sum; /* threads at the block's barrier; sum of their predicates; sum at the last barrier that opened */
    enum host_cuda_barrier kind;
    struct fiber *waiting[MOST_THREADS]; /* by thread */
    struct warp warp[MOST_THREADS / LANES];
    struct fiber *ready, **ready_end, *free, *current;
    struct fiber host; /* the thread that launched */
} block;

#ifdef HOST_CUDA_UCONTEXT
static void switch_fiber(struct fiber *from, struct fiber *to)
{
    swapcontext(&from->context, &to->context);
}
#else
/* Saves on the old stack the registers that the System V ABI preserves across calls, and continues on the new stack. */
extern "C" HOST_CUDA_HIDDEN void host_cuda_switch(void **from, void *to);
__asm__(".text\n"
        ".hidden host_cuda_switch\n"
        ".globl host_cuda_switch\n"
        ".type host_cuda_switch, @function\n"
        "host_cuda_switch:\n"
        "    pushq %rbp\n"
        "    pushq %rbx\n"
        "    pushq %r12\n"
        "    pushq %r13\n"
        "    pushq %r14\n"
        "    pushq %r15\n"
        "    movq %rsp, (%rdi)\n"
        "    movq %rsi, %rsp\n"
        "    popq %r15\n"
        "    popq %r14\n"
        "    popq %r13\n"
        "    popq %r12\n"
        "    popq %rbx\n"
        "    popq %rbp\n"
        "    ret\n"
        ".size host_cuda_switch, .-host_cuda_switch\n");

static void switch_fiber(struct fiber *from, struct fiber *to)
{
    host_cuda_switch(&from->stack_pointer, to->stack_pointer);
}
#endif

static void say_deadlock(void)
{
    unsigned int in_warps = 0, first = 0;
    while (first < block.threads && !block.waiting[first]) first++;
    for (unsigned int warp = 0; warp < MOST_THREADS / LANES; warp++)
        in_warps += (unsigned int)__builtin_popcount(block.warp[warp].waiting);
    Dl_info info = {};
    const bool named = dladdr(block.kernel, &info) && info.dli_sname;
    const struct warp *warp = &block.warp[first / LANES];
    host_cuda_die("deadlock in block (%u, %u, %u) of (%u, %u, %u), kernel %s at %p: of %u threads %u have ended, %u "
                  "wait at a barrier of the "
                  "block, %u at one of their warp; first to wait: thread %u (warp's lanes that wait: %08x, mask of "
                  "that thread: %08x)",
                  blockIdx.x, blockIdx.y, blockIdx.z, gridDim.x, gridDim.y, gridDim.z, named ? info.dli_sname : "?",
                  block.kernel, block.threads, block.ended, block.arrived, in_warps, first, warp->waiting,
                  warp->waiting >> first % LANES & 1 ? warp->mask[first % LANES] : 0);
}

static void fiber_main(void);

static struct fiber *create_fiber(void)
{
    static unsigned int created;
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), shift = (created % 8 * 4096 + created % 64 * 64) % STACK_SHIFT;
    created++;
    char *stack =
        (char *)mmap(NULL, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    struct fiber *fiber = (struct fiber *)calloc(1, sizeof *fiber);
    if (stack == MAP_FAILED || !fiber || mprotect(stack, page, PROT_NONE))
        host_cuda_die("no memory for a thread's stack");
#ifdef HOST_CUDA_UCONTEXT
    getcontext(&fiber->context);
    fiber->context.uc_stack.ss_sp = stack;
    fiber->context.uc_stack.ss_size = STACK_BYTES - shift;
    makecontext(&fiber->context, fiber_main, 0);
#else
    /* The stack as if fiber_main had been called and had switched at once: six registers, the return address, and its
     * (absent) caller. */
    void **top = (void **)(stack + STACK_BYTES - shift) - 1;
    *--top = (void *)fiber_main;
    fiber->stack_pointer = top - 6;
#endif
    return fiber;
}

static struct fiber *take_free(void)
{
    struct fiber *fiber = block.free;
    if (!fiber) return create_fiber();
    block.free = fiber->next;
    return fiber;
}

static void make_ready(unsigned int thread)
{
    struct fiber *fiber = block.waiting[thread];
    block.waiting[thread] = NULL;
    fiber->next = NULL;
    *block.ready_end = fiber;
    block.ready_end = &fiber->next;
}

/* The existing lanes of the warp that begins at thread `first`. */
static unsigned int lanes_of(unsigned int first)
{
    return block.threads - first >= LANES ? ~0u : (1u << (block.threads - first)) - 1;
}

static void open_lanes(unsigned int first, unsigned int lanes)
{
    for (unsigned int i = 0; i < LANES; i++) {
        const unsigned int lane = block.backwards ? LANES - 1 - i : i;
        if (lanes >> lane & 1) make_ready(first + lane);
    }
}

static struct fiber *take_ready(void)
{
    struct fiber *fiber = block.ready;
    if (!fiber) return NULL;
    block.ready = fiber->next;
    if (!block.ready) block.ready_end = &block.ready;
    return fiber;
}

static void go_on(struct fiber *to)
{
    struct fiber *from = block.current;
    block.current = to;
    switch_fiber(from, to);
}

static void fiber_main(void)
{
    for (;;) {
        while (!block.ready && block.started < block.threads) {
            const unsigned int number = block.started++, thread = block.backwards ? block.threads - 1 - number : number;
            const unsigned int x = blockDim.x, y = blockDim.y;
            block.current->thread = thread;
            threadIdx = {thread % x, thread / x % y, thread / x / y};
            block.run(block.arguments);
            block.ended++;
        }
        struct fiber *next = take_ready();
        if (!next) {
            if (block.ended != block.threads) say_deadlock();
            next = &block.host;
        }
        block.current->next = block.free;
        block.free = block.current;
        go_on(next);
    }
}

/* The current thread waits until another makes it ready. */
static void wait_here(void)
{
    struct fiber *self = block.current;
    const uint3 index = threadIdx;
    block.waiting[self->thread] = self;
    struct fiber *next = take_ready();
    if (!next && block.started == block.threads) say_deadlock();
    go_on(next ? next : take_free());
    threadIdx = index;
}

unsigned int host_cuda_block_barrier(enum host_cuda_barrier kind, int predicate)
{
    const unsigned int thread = block.current->thread, first = thread / LANES * LANES;
    if (block.arrived && block.kind != kind)
        host_cuda_die("thread %u waits at another kind of block barrier than the others", thread);
    block.kind = kind;
    block.sum += predicate != 0;
    if (++block.arrived < block.threads) {
        wait_here();
        return block.last_sum;
    }
    block.last_sum = block.sum;
    block.arrived = block.sum = 0;
    for (unsigned int warp = 0; warp < block.threads; warp += LANES) {
        const unsigned int other = block.backwards ? (block.threads - 1) / LANES * LANES - warp : warp;
        const unsigned int here = other == first ? ~(1u << thread % LANES) : ~0u;
        open_lanes(other, here & lanes_of(other));
    }
    return block.last_sum;
}

unsigned int host_cuda_lane(void)
{
    return block.current->thread % LANES;
}

/* Do all of `lanes` wait for the same synchronisation? */
static bool all_met(const struct warp *warp, unsigned int lanes, unsigned int lane)
{
    if ((warp->waiting & lanes) != lanes) return false;
    for (unsigned int other = 0; other < LANES; other++)
        if (lanes >> other & 1 && (warp->mask[other] != warp->mask[lane] || warp->kind[other] != warp->kind[lane]))
            return false;
    return true;
}

const uint64_t *host_cuda_warp_meet(unsigned int mask, enum host_cuda_meeting kind, uint64_t value,
                                    void (*work)(const uint64_t *values))
{
    const unsigned int thread = block.current->thread, lane = thread % LANES, first = thread - lane;
    const unsigned int lanes = mask & lanes_of(first);
    struct warp *warp = &block.warp[first / LANES];
    if (!(mask >> lane & 1)) host_cuda_die("thread %u meets under the mask %08x, which lacks its lane", thread, mask);
    warp->value[lane] = value;
    warp->mask[lane] = mask;
    warp->kind[lane] = kind;
    warp->waiting |= 1u << lane;
    if (!all_met(warp, lanes, lane)) {
        wait_here();
        return warp->seen;
    }
    for (unsigned int other = 0; other < LANES; other++)
        if (lanes >> other & 1) warp->seen[other] = warp->value[other];
    warp->waiting &= ~lanes;
    if (work && lanes != 0xffffffffu)
        host_cuda_die("thread %u: a matrix operation needs 32 lanes, these are %08x", thread, lanes);
    if (work) work(warp->seen);
    open_lanes(first, lanes & ~(1u << lane));
    return warp->seen;
}

void host_cuda_check_tile(const void *pointer, size_t row_bytes)
{
    if ((uintptr_t)pointer % 32 || row_bytes % 16)
        host_cuda_die(
            "a matrix operation at %p with rows %zu bytes apart: 32-byte tiles and multiples of 16 are needed", pointer,
            row_bytes);
}

void host_cuda_run_block(const void *kernel, void (*run)(void *), void *arguments, bool backwards)
{
    block.backwards = backwards;
    block.kernel = kernel;
    block.run = run;
    block.arguments = arguments;
    block.threads = blockDim.x * blockDim.y * blockDim.z;
    block.started = block.ended = block.arrived = block.sum = 0;
    block.ready = NULL;
    block.ready_end = &block.ready;
    for (unsigned int warp = 0; warp * LANES < block.threads; warp++) {
        for (int lane = 0; lane < LANES; lane++) block.warp[warp].seen[lane] = HOST_CUDA_LANE_GARBAGE;
        block.warp[warp].waiting = 0;
    }
    block.current = &block.host;
    go_on(take_free());
}
