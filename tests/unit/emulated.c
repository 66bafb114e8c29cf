/* The emulated back end: it counts memory without reserving any, and its kernels and copies change nothing. */
#include "test.h"

#include <errno.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "hapt/device.h"

#define GB ((size_t)1000 * 1000 * 1000)

static const struct hapt_backend *backend(void)
{
    const struct hapt_backend *found = hapt_backend_find("emulated");
    HAPT_ASSERT(found);
    return found;
}

static struct hapt_device *open_device(size_t memory_bytes)
{
    struct hapt_device *device = NULL;
    CHECK_OK(backend()->open(0, 1, memory_bytes, &device));
    return device;
}

static void is_in_the_table(void)
{
    const char *reason = NULL;
    bool listed = false;
    for (int i = 0; hapt_backend_at(i); i++) listed = listed || hapt_backend_at(i) == backend();
    CHECK(listed);
    CHECK(backend()->device_count(&reason) >= 1);
    struct hapt_device *device = NULL;
    CHECK_FAILS(backend()->open(1, 1, 0, &device), HAPT_ERR_INTERNAL);
}

/* Random reservations, compared with a list of live blocks. */
static void counts_memory(void)
{
    enum { BLOCKS = 40, ROUNDS = 5000 };
    const size_t cap = 40 * GB;
    struct hapt_device *device = open_device(cap);
    void *memory[BLOCKS] = {NULL};
    size_t bytes[BLOCKS] = {0}, used = 0, peak = 0;
    uint64_t seed = 20261122;
    for (int round = 0; round < ROUNDS; round++) {
        const int b = (int)(hapt_random_next(&seed) % BLOCKS);
        if (memory[b]) {
            backend()->free(device, memory[b]);
            used -= bytes[b];
            memory[b] = NULL;
        } else {
            const size_t wanted = (size_t)(hapt_random_unit(&seed) * (double)(4 * GB));
            const enum hapt_status status = backend()->allocate(device, wanted, &memory[b]);
            CHECK_MESSAGE(status == (used + wanted <= cap ? HAPT_OK : HAPT_ERR_MEMORY),
                          "round %d: %zu bytes beside %zu of %zu: %s", round, wanted, used, cap,
                          hapt_status_name(status));
            hapt_fail_reset();
            if (status != HAPT_OK) {
                CHECK(memory[b] == NULL);
                continue;
            }
            CHECK((uintptr_t)memory[b] % 64 == 0);
            used += bytes[b] = wanted;
            if (used > peak) peak = used;
        }
        CHECK(backend()->memory_used(device) == used && backend()->memory_peak(device) == peak);
    }
    for (int a = 0; a < BLOCKS; a++)
        for (int b = 0; b < a; b++)
            if (memory[a] && memory[b])
                CHECK((char *)memory[a] + bytes[a] <= (char *)memory[b] ||
                      (char *)memory[b] + bytes[b] <= (char *)memory[a]);
    backend()->close(device);
}

static void keeps_to_the_cap(void)
{
    struct hapt_device *device = open_device(1000);
    void *memory = NULL, *more = NULL;
    CHECK_OK(backend()->allocate(device, 1000, &memory));
    CHECK_FAILS(backend()->allocate(device, 1, &more), HAPT_ERR_MEMORY);
    backend()->free(device, memory);
    CHECK_FAILS(backend()->allocate(device, 1001, &more), HAPT_ERR_MEMORY);
    CHECK_OK(backend()->allocate(device, 0, &more));
    backend()->close(device);
}

/* A terabyte adds nothing to the resident memory of the process. Reading or writing it kills the process. */
static long resident_pages(void)
{
    long size = 0, resident = -1;
    FILE *file = fopen("/proc/self/statm", "r");
    if (!file || fscanf(file, "%ld %ld", &size, &resident) != 2) resident = -1;
    if (file) fclose(file);
    return resident;
}

static void has_no_backing(void)
{
    struct hapt_device *device = open_device(0);
    const long before = resident_pages();
    void *memory = NULL;
    CHECK_OK(backend()->allocate(device, 1000 * GB, &memory));
    const long grown = resident_pages() - before;
    CHECK_MESSAGE(grown < 1000, "%ld pages more are resident", grown);
    const pid_t child = fork();
    if (child == 0) {
        signal(SIGSEGV, SIG_DFL);
        *(volatile char *)memory = 1;
        _exit(0);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child && !(WIFEXITED(status) && WEXITSTATUS(status) == 0));
    backend()->close(device);
    unsigned char there;
    const long page = sysconf(_SC_PAGESIZE);
    CHECK(mincore((void *)((uintptr_t)memory / (uintptr_t)page * (uintptr_t)page), 1, &there) != 0 && errno == ENOMEM);
}

static void copies_nothing(void)
{
    struct hapt_device *device = open_device(GB);
    struct hapt_queue *queue = backend()->queue(device, 0);
    char *memory = NULL, host[64], other[64];
    CHECK_OK(backend()->allocate(device, GB, (void **)&memory));
    memset(host, 7, sizeof host);
    CHECK_OK(backend()->copy(queue, memory + GB - 64, host, sizeof host)); /* discarded */
    CHECK_OK(backend()->copy(queue, memory, memory + 4096, GB - 4096));
    CHECK_OK(backend()->copy(queue, other, host, sizeof host)); /* copied between host buffers, as on other back ends */
    CHECK(memcmp(host, other, sizeof host) == 0);
    CHECK_OK(backend()->copy(queue, host, memory + GB - 64, sizeof host)); /* zeroed, as at reservation */
    for (size_t i = 0; i < sizeof host; i++) CHECK(host[i] == 0);
    struct hapt_event *event = backend()->record(queue);
    CHECK(backend()->done(event));
    CHECK_OK(backend()->wait(event));
    backend()->close(device);
}

/* Every operator has a kernel that needs no scratch memory and changes none of its operands. */
static void computes_nothing(void)
{
    struct hapt_device *device = open_device(GB);
    static const char *const names[] = {"linear", "attention", "adamw",        "square_sum",
                                        "zero",   "convert",   "cross_entropy"};
    float value[4] = {1, 2, 3, 4};
    void *memory = NULL;
    CHECK_OK(backend()->allocate(device, 4096, &memory));
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        for (int type = 0; type < HAPT_DTYPE_COUNT; type++) {
            const struct hapt_kernel *kernel = backend()->find_kernel(device, names[i], (enum hapt_dtype)type);
            struct hapt_call call = {.input_count = 1, .output_count = 2, .threads = 1};
            call.input[0] = (struct hapt_view){.data = memory, .dtype = HAPT_F32, .dims = 1, .shape = {1024}};
            call.output[0] = call.input[0];
            call.output[1] = (struct hapt_view){.data = value, .dtype = HAPT_F32, .dims = 1, .shape = {4}};
            if (!CHECK(kernel != NULL)) continue;
            CHECK(!kernel->workspace_bytes || kernel->workspace_bytes(&call) == 0);
            CHECK_OK(kernel->run(&call, backend()->queue(device, 0)));
        }
    CHECK(value[0] == 1 && value[3] == 4);
    backend()->close(device);
}

int main(int argc, char **argv)
{
    test_init(&argc, &argv);
    RUN(is_in_the_table);
    RUN(counts_memory);
    RUN(keeps_to_the_cap);
    RUN(has_no_backing);
    RUN(copies_nothing);
    RUN(computes_nothing);
    return test_finish();
}
