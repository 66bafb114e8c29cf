/*
 * Communicators of devices (NCCL) with one rank: create, split, sums, all-gather, send to itself, abort, release. Then
 * a communicator whose other rank never comes, which must be left within a time limit. Each step is printed before it
 * begins, so that the last line names a step that hangs. Exit code 77: the build has no NCCL.
 */
#include <dlfcn.h>

#include "hapt/device.h"
#include "test.h"

enum { WORDS = 1000 };
static const double LIMIT_S = 20, LONELY_S = 2;

static const struct hapt_backend *backend;
static const struct hapt_device_comm_ops *groups;
static struct hapt_device *device;
static struct hapt_queue *queue;
static float *from, *to; /* device [WORDS] */
static double begun_s;

static void begin(const char *what)
{
    printf("%s ...", what);
    fflush(stdout);
    begun_s = hapt_time_s();
}

static void done(void)
{
    printf(" %.3f s\n", hapt_time_s() - begun_s);
    fflush(stdout);
}

/* NULL, an error, or "late". */
static const char *settle(struct hapt_device_comm *group, const char *answer, struct hapt_event *event, double limit_s)
{
    const double until_s = hapt_time_s() + limit_s;
    while (!answer) {
        bool settled;
        answer = groups->poll(group, &settled);
        if (answer || (settled && (!event || backend->done(event)))) return answer;
        if (hapt_time_s() > until_s) return "late";
        hapt_time_sleep_until(hapt_time_s() + 1e-4);
    }
    return answer;
}

static bool ends(struct hapt_device_comm *group, const char *answer)
{
    const char *fault = settle(group, answer, NULL, LIMIT_S);
    if (!fault) fault = settle(group, NULL, backend->record(queue), LIMIT_S);
    return CHECK_MESSAGE(!fault, "%s", fault);
}

static void put(void *where, float first)
{
    float value[WORDS];
    for (int i = 0; i < WORDS; i++) value[i] = first + (float)i;
    CHECK_OK(backend->copy(queue, where, value, sizeof value));
    CHECK_OK(backend->wait(backend->record(queue)));
}

static void expect(const void *where, float first, const char *what)
{
    float value[WORDS];
    int wrong = 0;
    CHECK_OK(backend->copy(queue, value, where, sizeof value));
    CHECK_OK(backend->wait(backend->record(queue)));
    for (int i = 0; i < WORDS; i++) wrong += value[i] != first + (float)i;
    CHECK_MESSAGE(wrong == 0, "%s: %d of %d words are others", what, wrong, WORDS);
}

static void moves(struct hapt_device_comm *group)
{
    const size_t words[] = {0, WORDS}, bytes[] = {0, WORDS * sizeof(float)};
    begin("all-reduce"), put(from, 1), put(to, 0);
    if (ends(group, groups->all_reduce(group, queue, false, HAPT_F32, from, to, WORDS)))
        expect(to, 1, "all-reduce"), done();
    begin("reduce-scatter"), put(from, 2), put(to, 0);
    if (ends(group, groups->reduce_scatter(group, queue, HAPT_F32, words, from, to)))
        expect(to, 2, "reduce-scatter"), done();
    begin("all-gather"), put(from, 3), put(to, 0);
    if (ends(group, groups->all_gather(group, queue, bytes, from, to))) expect(to, 3, "all-gather"), done();
    begin("all-to-all"), put(from, 4), put(to, 0);
    if (ends(group, groups->all_to_all(group, queue, bytes, from, bytes, to))) expect(to, 4, "all-to-all"), done();
}

/* NCCL requires both ends of such a transfer in one group of calls. hapt never sends to itself, so the test opens the
 * group itself. */
static void to_itself(struct hapt_device_comm *group)
{
    const struct hapt_library *file = NULL;
    for (int l = 0;
         backend->loaded_library && (file = backend->loaded_library(l)) && !(file->path && strstr(file->name, "nccl"));
         l++)
        continue;
    void *library = file ? dlopen(file->path, RTLD_NOW | RTLD_NOLOAD) : NULL, *start = NULL, *end = NULL;
    int (*group_start)(void), (*group_end)(void);
    if (library) start = dlsym(library, "ncclGroupStart"), end = dlsym(library, "ncclGroupEnd");
    if (!start || !end || !groups->send) {
        puts("blocks to itself: not tried, NCCL is no library of its own here");
        return;
    }
    memcpy(&group_start, &start, sizeof group_start);
    memcpy(&group_end, &end, sizeof group_end);
    const struct hapt_block out = {from, WORDS * sizeof(float)}, in = {to, WORDS * sizeof(float)};
    begin("blocks to itself"), put(from, 5), put(to, 0);
    group_start();
    const char *fault = groups->send(group, queue, 1, &out, 0);
    if (!fault) fault = groups->receive(group, queue, 1, &in, 0);
    group_end(); /* the communicator reports the same */
    if (ends(group, fault)) expect(to, 5, "blocks to itself"), done();
}

static const char *make(int ranks, struct hapt_device_comm **group)
{
    unsigned char id[HAPT_DEVICE_COMM_ID_BYTES];
    const char *fault = groups->id(id);
    *group = NULL;
    return fault ? fault : groups->create(id, 0, ranks, group);
}

static void splits(struct hapt_device_comm *group)
{
    struct hapt_device_comm *part = NULL, *none = group;
    if (!groups->split) {
        puts("split: this NCCL has none");
        return;
    }
    begin("split");
    if (!ends(group, groups->split(group, 0, 0, 0, 1, &part))) return;
    done();
    moves(part);
    begin("split of no color");
    if (ends(group, groups->split(group, -1, 0, 0, 0, &none))) CHECK(none == NULL), done();
    begin("end of a part"), groups->destroy(part), done();
}

static void lonely(void)
{
    struct hapt_device_comm *group;
    begin("a group whose other rank never comes");
    const char *fault = make(2, &group);
    fault = settle(group, fault, NULL, LONELY_S);
    CHECK_MESSAGE(fault != NULL, "it is there without its other rank");
    if (group) groups->abort(group);
    groups->destroy(group);
    CHECK_MESSAGE(hapt_time_s() - begun_s < LIMIT_S, "it was left behind %.1f s", hapt_time_s() - begun_s);
    done();
}

int main(void)
{
    const char *reason = "";
    backend = hapt_backend_find("cuda");
    if (!backend || backend->device_count(&reason) == 0) return printf("no device: %s\n", reason), 1;
    CHECK_OK(backend->open(0, 1, 0, &device));
    queue = backend->queue(device, HAPT_QUEUE_COMPUTE);
    groups = backend->device_comms(&reason);
    if (!groups) return printf("no groups: %s\n", reason), strncmp(reason, "this build", 10) == 0 ? 77 : 1;
    puts(groups->library());
    CHECK_OK(backend->allocate(device, WORDS * sizeof *from, (void **)&from));
    CHECK_OK(backend->allocate(device, WORDS * sizeof *to, (void **)&to));
    begin("create");
    struct hapt_device_comm *group;
    const char *fault = make(1, &group);
    if (ends(group, fault)) {
        done();
        moves(group);
        to_itself(group);
        splits(group);
        begin("end"), groups->destroy(group), done();
        begin("create and abort");
        fault = make(1, &group);
        if (ends(group, fault)) groups->abort(group), groups->destroy(group), done();
    }
    lonely();
    backend->free(device, from);
    backend->free(device, to);
    backend->close(device);
    return test_finish();
}
