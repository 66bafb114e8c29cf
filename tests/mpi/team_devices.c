/* ranks: 4; HAPT_LONG: 2 3
 * A team whose devices communicate directly, compared with the same team through the host: all collectives, equal bits.
 * Measuring collectives uses what would run them.
 * The devices are part of this test. An operation writes its result only when the communicator is ready, which takes a
 * few polls. No work may be queued before that. */
#include "test.h"

#include "hapt/collective_cost.h"
#include "hapt/link.h"
#include "hapt/ratios.h"
#include "hapt/sharding.h"
#include "hapt/reshard.h"
#include "hapt/team.h"

enum { MOST = 8, LINGER = 3, WIDTH = 4 };

/* ---- devices ---- */

struct hapt_device_comm {
    MPI_Comm comm;
    int rank, ranks, left; /* polls until it is ready */
    char *kept;            /* requested data, [bytes], for rank `to` */
    void *to;
    size_t bytes;
};

static struct {
    bool none, shared, fails, stuck, faulty, splits; /* how communicators behave */
    int groups, asked;                               /* communicators alive; operations so far */
    struct hapt_device_comm *busy;
    bool full;  /* no memory on rank 1 */
    int copied; /* between device and host */
    size_t used;
} fake;

static const char *library(void)
{
    return "messages";
}

static const char *pci_address(char address[16])
{
    snprintf(address, 16, "device %d", fake.shared ? 0 : test_env.world_rank);
    return NULL;
}

static const char *make_id(unsigned char id[HAPT_DEVICE_COMM_ID_BYTES])
{
    memset(id, 7, HAPT_DEVICE_COMM_ID_BYTES);
    return NULL;
}

/* All ranks, or a line of the mesh. The ranks of a line have the distance of its first two. */
static const char *create(const unsigned char id[HAPT_DEVICE_COMM_ID_BYTES], int rank, int ranks,
                          struct hapt_device_comm **group)
{
    CHECK(id[0] == 7 && id[HAPT_DEVICE_COMM_ID_BYTES - 1] == 7);
    if (fake.fails && test_env.world_rank == 1) return "no way to its peers";
    *group = calloc(1, sizeof **group);
    **group = (struct hapt_device_comm){.rank = rank, .ranks = ranks, .left = LINGER};
    if (fake.fails) (*group)->left = 1 << 30;
    fake.groups++;
    if (fake.fails) return NULL;
    /* Each rank is in one communicator at a time: of the first ranks, or of every second rank. */
    const int color = ranks == test_env.world_size ? 0
                      : fake.groups == 2           ? test_env.world_rank % 2
                                                   : test_env.world_rank / 2;
    MPI_Comm_split(MPI_COMM_WORLD, color, rank, &(*group)->comm);
    return NULL;
}

/* The split communicator exists when its parent is ready. */
static const char *split(struct hapt_device_comm *group, int color, int key, int rank, int ranks,
                         struct hapt_device_comm **part)
{
    CHECK(group->left == 0);
    group->left = LINGER;
    *part = calloc(1, sizeof **part);
    **part = (struct hapt_device_comm){.rank = rank, .ranks = ranks};
    fake.groups++;
    MPI_Comm_split(group->comm, color, key, &(*part)->comm);
    int found[2];
    MPI_Comm_rank((*part)->comm, &found[0]);
    MPI_Comm_size((*part)->comm, &found[1]);
    CHECK_MESSAGE(found[0] == rank && found[1] == ranks, "rank %d of %d has the description of rank %d of %d", found[0],
                  found[1], rank, ranks);
    return NULL;
}

static const char *poll_comm(struct hapt_device_comm *group, bool *settled)
{
    *settled = group->left == 0;
    if (fake.faulty && group->kept) return "the wire is cut";
    if (*settled || (fake.stuck && group->kept)) return NULL;
    if (--group->left > 0) return NULL;
    if (group->bytes) memcpy(group->to, group->kept, group->bytes);
    free(group->kept);
    group->kept = NULL;
    group->bytes = 0;
    if (fake.busy == group) fake.busy = NULL;
    return NULL;
}

static void end(struct hapt_device_comm *group)
{
    free(group->kept);
    group->kept = NULL;
    if (fake.busy == group) fake.busy = NULL;
}

static void destroy(struct hapt_device_comm *group)
{
    if (!group) return;
    end(group);
    if (!fake.fails) MPI_Comm_free(&group->comm);
    free(group);
    fake.groups--;
}

static char *ask(struct hapt_device_comm *group, void *to, size_t bytes)
{
    CHECK(!fake.busy && group->left == 0);
    fake.busy = group;
    fake.asked++;
    group->left = LINGER;
    group->to = to;
    group->bytes = bytes;
    return group->kept = malloc(bytes + 1);
}

/* Elements [first, first + count) of all ranks' arrays of `elements`, added in order of rank as the host does. */
static void add(const struct hapt_device_comm *group, enum hapt_dtype dtype, const void *from, size_t elements,
                size_t first, size_t count, void *sum)
{
    const size_t width = hapt_dtype_bytes(dtype);
    char *all = malloc((size_t)group->ranks * elements * width + 1);
    MPI_Allgather(from, (int)(elements * width), MPI_BYTE, all, (int)(elements * width), MPI_BYTE, group->comm);
    for (size_t i = 0; i < count; i++) {
        float total = 0;
        for (int r = 0; r < group->ranks; r++) {
            const char *term = all + ((size_t)r * elements + first + i) * width;
            const float next = dtype == HAPT_F32 ? *(const float *)(const void *)term
                                                 : hapt_bf16_to_f32(*(const uint16_t *)(const void *)term);
            total = r == 0 ? next : total + next;
        }
        if (dtype == HAPT_F32)
            ((float *)sum)[i] = total;
        else
            ((uint16_t *)sum)[i] = hapt_bf16_from_f32(total);
    }
    free(all);
}

static const char *all_reduce(struct hapt_device_comm *group, struct hapt_queue *queue, bool largest,
                              enum hapt_dtype dtype, const void *from, void *to, size_t elements)
{
    (void)queue;
    CHECK(!largest && elements > 0);
    if (fake.stuck || fake.faulty) return ask(group, to, elements * hapt_dtype_bytes(dtype)), NULL;
    add(group, dtype, from, elements, 0, elements, ask(group, to, elements * hapt_dtype_bytes(dtype)));
    return NULL;
}

static const char *reduce_scatter(struct hapt_device_comm *group, struct hapt_queue *queue, enum hapt_dtype dtype,
                                  const size_t *bound, const void *from, void *to)
{
    (void)queue;
    const size_t mine = bound[group->rank], count = bound[group->rank + 1] - mine, width = hapt_dtype_bytes(dtype);
    add(group, dtype, (const char *)from + bound[0] * width, bound[group->ranks] - bound[0], mine - bound[0], count,
        ask(group, to, count * width));
    return NULL;
}

static const char *all_gather(struct hapt_device_comm *group, struct hapt_queue *queue, const size_t *bound,
                              const void *mine, void *whole)
{
    (void)queue;
    int count[MOST], first[MOST];
    for (int r = 0; r < group->ranks; r++) {
        count[r] = (int)(bound[r + 1] - bound[r]);
        first[r] = (int)(bound[r] - bound[0]);
    }
    char *kept = ask(group, (char *)whole + bound[0], bound[group->ranks] - bound[0]);
    MPI_Allgatherv(mine, count[group->rank], MPI_BYTE, kept, count, first, MPI_BYTE, group->comm);
    return NULL;
}

static const char *all_to_all(struct hapt_device_comm *group, struct hapt_queue *queue, const size_t *send,
                              const void *from, const size_t *receive, void *to)
{
    (void)queue;
    int out[MOST], out_first[MOST], in[MOST], in_first[MOST];
    for (int r = 0; r < group->ranks; r++) {
        out[r] = (int)(send[r + 1] - send[r]);
        out_first[r] = (int)send[r];
        in[r] = (int)(receive[r + 1] - receive[r]);
        in_first[r] = (int)receive[r];
    }
    MPI_Alltoallv(from, out, out_first, MPI_BYTE, ask(group, to, receive[group->ranks]), in, in_first, MPI_BYTE,
                  group->comm);
    return NULL;
}

static const char *pack(struct hapt_queue *queue, const struct hapt_strided_list *list, const void *base, void *dense)
{
    (void)queue;
    CHECK(!fake.busy);
    hapt_strided_pack(list, base, 0, hapt_strided_bytes(list), dense);
    return NULL;
}

static const char *unpack(struct hapt_queue *queue, const struct hapt_strided_list *list, void *base, const void *dense)
{
    (void)queue;
    CHECK(!fake.busy);
    hapt_strided_unpack(list, base, 0, hapt_strided_bytes(list), dense);
    return NULL;
}

static const struct hapt_device_comm_ops *groups(const char **reason)
{
    static struct hapt_device_comm_ops all = {library, pci_address, make_id,        create,     poll_comm,  end,
                                              destroy, all_reduce,  reduce_scatter, all_gather, all_to_all, pack,
                                              unpack,  NULL,        NULL,           NULL};
    all.split = fake.splits ? split : NULL;
    *reason = "no library of groups";
    return fake.none && test_env.world_rank == 0 ? NULL : &all;
}

static struct hapt_queue *queue(struct hapt_device *device, int index)
{
    CHECK(index == 0);
    return (struct hapt_queue *)(void *)device;
}

static struct hapt_event *record(struct hapt_queue *queue)
{
    CHECK(!fake.busy);
    return (struct hapt_event *)(void *)queue;
}

static bool done(struct hapt_event *event)
{
    return event != NULL;
}

static enum hapt_status wait(struct hapt_event *event)
{
    return event ? HAPT_OK : HAPT_ERR_INTERNAL;
}

static enum hapt_status allocate(struct hapt_device *device, size_t bytes, void **memory)
{
    if (fake.full && test_env.world_rank == 1) return hapt_fail(HAPT_ERR_MEMORY, NULL, "a full device");
    fake.used += device != NULL && bytes > 0;
    *memory = calloc(1, bytes + 1);
    return HAPT_OK;
}

static void give_back(struct hapt_device *device, void *memory)
{
    fake.used -= device != NULL;
    free(memory);
}

static const struct hapt_backend backend = {.name = "fake",
                                            .queue = queue,
                                            .record = record,
                                            .done = done,
                                            .wait = wait,
                                            .allocate = allocate,
                                            .free = give_back,
                                            .device_comms = groups};
static struct hapt_device *const device = (struct hapt_device *)&fake;

/* ---- collectives of a team ---- */

enum { ALL_REDUCE, REDUCE_SCATTER, GATHER, BROADCAST, TRADE, SLICE, MOVES };

struct bench {
    struct hapt_arena arena;
    struct hapt_graph graph;
    struct hapt_sharding sharding;
    struct hapt_program program;
    struct hapt_team team;
    struct hapt_op op[MOVES];
    int axis, ranks, rank; /* the axis of the collective; its ranks */
    size_t elements, rows, own, most;
};

static uint64_t shared_random; /* equal on all ranks */

static size_t pick(size_t most)
{
    return 1 + hapt_random_next(&shared_random) % most;
}

static void cut(int ranks, size_t units, int64_t *first)
{
    double ratio[MOST];
    const bool even = hapt_random_next(&shared_random) % 3 == 0 && units % (size_t)ranks == 0;
    for (int r = 0; r < ranks; r++) ratio[r] = even ? 1.0 : 0.05 + hapt_random_unit(&shared_random);
    CHECK(hapt_split(ratio, ranks, (int64_t)units, first));
}

/* A tensor [outer][extent][inner] sharded along the middle, and the same tensor as rows [outer * extent] with other
 * shares, for an all-to-all with columns. */
static void lay_out(struct bench *bench, int round)
{
    const enum hapt_collective_kind kind[MOVES] = {HAPT_COLLECTIVE_ALL_REDUCE, HAPT_COLLECTIVE_REDUCE_SCATTER,
                                                   HAPT_COLLECTIVE_ALL_GATHER, HAPT_COLLECTIVE_GROUPED_BROADCAST,
                                                   HAPT_COLLECTIVE_ALL_TO_ALL, HAPT_COLLECTIVE_SLICE};
    static const char *const name[MOVES] = {"sum", "scatter", "gather", "broadcast", "trade", "slice"};
    const enum hapt_dtype dtype = round % 2 ? HAPT_BF16 : HAPT_F32;
    const size_t width = hapt_dtype_bytes(dtype), n = (size_t)bench->ranks;
    const size_t outer = round % 3 ? pick(5) : 1, extent = n * pick(4) + (round % 4 ? pick(3) : 0), inner = pick(40),
                 lines = n + pick(9);
    int64_t first[MOST + 1], row[MOST + 1], column[MOST + 1];
    cut(bench->ranks, extent, first);
    cut(bench->ranks, lines, row);
    cut(bench->ranks, extent, column);
    bench->elements = outer * extent * inner;
    for (int m = 0; m < MOVES; m++) {
        struct hapt_team_collective *move = &bench->team.collective[m];
        bench->op[m] = (struct hapt_op){.name = name[m]};
        *move = (struct hapt_team_collective){
            .kind = kind[m], .axis = bench->axis, .dtype = dtype, .elements = bench->elements};
        move->part = hapt_arena_alloc(&bench->arena, n, sizeof *move->part);
        for (size_t r = 0; r < n; r++)
            move->part[r] = (struct hapt_strided){.offset = (size_t)first[r] * inner * width,
                                                  .count = outer,
                                                  .run = (size_t)(first[r + 1] - first[r]) * inner * width,
                                                  .stride = extent * inner * width};
    }
    bench->own =
        bench->team.collective[GATHER].part[bench->rank].count * bench->team.collective[GATHER].part[bench->rank].run;
    /* From rows of [lines][extent] to columns. */
    struct hapt_team_collective *swap = &bench->team.collective[TRADE];
    const size_t me = (size_t)bench->rank, my_rows = (size_t)(row[me + 1] - row[me]),
                 my_columns = (size_t)(column[me + 1] - column[me]);
    swap->send = hapt_arena_alloc(&bench->arena, n, sizeof *swap->send);
    swap->receive = hapt_arena_alloc(&bench->arena, n, sizeof *swap->receive);
    for (size_t r = 0; r < n; r++) {
        struct hapt_strided *give = hapt_arena_alloc(&bench->arena, 2, sizeof *give);
        const size_t columns = (size_t)(column[r + 1] - column[r]), rows = (size_t)(row[r + 1] - row[r]);
        give[0] = (struct hapt_strided){(size_t)column[r] * width, my_rows, columns * width, extent * width};
        give[1] = (struct hapt_strided){(size_t)row[r] * my_columns * width, 1, rows * my_columns * width, 0};
        swap->send[r] = (struct hapt_strided_list){1, &give[0]};
        swap->receive[r] = (struct hapt_strided_list){1, &give[1]};
    }
    swap->longest = lines * extent * width;
    bench->rows = my_rows * extent * width;
    bench->most = (bench->elements + (lines + extent) * extent) * WIDTH;
}

/* inner: number of ranks of the second axis. */
static void open_bench(struct bench *bench, int inner, int axis)
{
    memset(bench, 0, sizeof *bench);
    hapt_arena_init(&bench->arena);
    bench->graph.op_count = MOVES;
    bench->graph.op = bench->op;
    bench->sharding.graph = &bench->graph;
    bench->sharding.axis[0].size = test_env.world_size / inner;
    bench->sharding.axis[1].size = inner;
    bench->program.graph = &bench->graph;
    bench->program.sharding = &bench->sharding;
    CHECK_OK(hapt_team_prepare(&bench->team, &bench->sharding, &bench->program, test_env.world_rank, 1, &bench->arena));
    CHECK_OK(hapt_team_connect(&bench->team, test_env.world, "test", 1));
    bench->axis = axis;
    bench->ranks = bench->sharding.axis[axis].size;
    bench->rank = bench->team.mesh_coordinate[axis];
}

static void close_bench(struct bench *bench)
{
    hapt_team_release(&bench->team);
    hapt_arena_release(&bench->arena);
    CHECK(fake.groups == 0 && fake.used == 0 && !fake.busy);
}

/* Small multiples of one half: sums are exact in both types. */
static void fill(void *data, enum hapt_dtype dtype, size_t elements, int round)
{
    uint64_t state = (uint64_t)(round * 64 + test_env.world_rank);
    for (size_t i = 0; i < elements; i++) {
        const float value = (float)(hapt_random_next(&state) % 32) * (dtype == HAPT_F32 ? 0.37f : 0.5f) - 4;
        if (dtype == HAPT_F32)
            ((float *)data)[i] = value;
        else
            ((uint16_t *)data)[i] = hapt_bf16_from_f32(value);
    }
}

static size_t bytes_in(const struct bench *bench, int move)
{
    if (move == TRADE) return bench->rows;
    return move == GATHER || move == BROADCAST ? bench->own
                                               : bench->elements * hapt_dtype_bytes(bench->team.collective[0].dtype);
}

static void run_moves(struct bench *bench, int round, char *to)
{
    struct hapt_engine_links links;
    char *from = malloc(bench->most);
    hapt_team_links(&bench->team, &links);
    for (int m = 0; m < MOVES; m++) {
        const enum hapt_dtype dtype = bench->team.collective[m].dtype;
        fill(from, dtype, bytes_in(bench, m) / hapt_dtype_bytes(dtype), round);
        memset(to + (size_t)m * bench->most, 0x7f, bench->most);
        CHECK_OK(links.collective(links.context, m, from, to + (size_t)m * bench->most));
    }
    /* Only the rank's own part is there, in its position. */
    const struct hapt_strided *part = bench->team.collective[GATHER].part;
    const struct hapt_strided_list own = {1, &part[bench->rank]};
    char *whole = to + MOVES * bench->most;
    memset(whole, 0x7f, bench->most);
    fill(from, bench->team.collective[GATHER].dtype, bench->elements, round);
    hapt_strided_unpack(&own, whole, 0, hapt_strided_bytes(&own), from);
    CHECK_OK(hapt_team_reserve_parts(&bench->team, 1u << bench->axis, part));
    CHECK_OK(hapt_team_rebuild(&bench->team, 1u << bench->axis, "a whole", part, whole));
    free(from);
}

/* The collectives that end a step, over the axes: sums, sums of slices, all-gathers of slices. */
static void run_flat(struct bench *bench, unsigned axes, int round, float *to, size_t elements)
{
    struct hapt_engine_links links;
    size_t bound[MOST + 1];
    int64_t first[MOST + 1];
    const int ranks = hapt_collective_ranks(hapt_team_comm(&bench->team, axes)),
              me = hapt_collective_rank(hapt_team_comm(&bench->team, axes));
    hapt_team_links(&bench->team, &links);
    shared_random = (uint64_t)round;
    cut(ranks, elements, first);
    for (int r = 0; r <= ranks; r++) bound[r] = (size_t)first[r];
    fill(to, HAPT_F32, elements, round);
    CHECK_OK(links.all_reduce(links.context, axes, to, elements));
    fill(to + elements, HAPT_F32, elements, round);
    CHECK_OK(links.reduce_scatter(links.context, axes, to + elements, bound));
    for (size_t i = 0; i < elements; i++) /* slices of other ranks are undefined */
        if (i < bound[me] || i >= bound[me + 1]) to[elements + i] = 0;
    memcpy(to + 2 * elements, to + elements, elements * sizeof *to);
    CHECK_OK(links.all_gather(links.context, axes, to + 2 * elements, bound));
    CHECK(memcmp(to, to + 2 * elements, elements * sizeof *to) == 0);
}

static void compare(int inner, int axis)
{
    char text[HAPT_TEAM_TRANSPORT_CHARS];
    for (int round = 0; round < (test_long() ? 200 : 24); round++) {
        struct bench bench;
        open_bench(&bench, inner, axis);
        shared_random = (uint64_t)(round + 1000 * inner);
        fake.splits = round % 2 == 0;
        lay_out(&bench, round);
        char *expected = malloc((MOVES + 1) * bench.most), *got = malloc((MOVES + 1) * bench.most);
        const size_t elements = pick(3) * (size_t)test_env.world_size + (size_t)(round % 3);
        float *sums = malloc(6 * elements * sizeof *sums);
        const unsigned axes = inner > 1 && round % 2 ? 3u : 1u << axis;
        run_moves(&bench, round, expected);
        run_flat(&bench, axes, round, sums, elements);
        CHECK(fake.asked == 0);
        CHECK_OK(hapt_team_use_devices(&bench.team, &backend, device, NULL, text));
        CHECK_MESSAGE(bench.team.devices && strcmp(text, "messages") == 0, "devices by %s", text);
        CHECK_MESSAGE(fake.asked == 2 * fake.groups, "%d groups were connected by %d operations", fake.groups,
                      fake.asked);
        fake.asked = 0;
        run_moves(&bench, round, got);
        run_flat(&bench, axes, round, sums + 3 * elements, elements);
        CHECK(fake.asked == 9); /* a slice communicates nothing */
        fake.asked = 0;
        for (int m = 0; m <= MOVES; m++)
            CHECK_MESSAGE(memcmp(expected + (size_t)m * bench.most, got + (size_t)m * bench.most, bench.most) == 0,
                          "round %d: %s differs", round, m < MOVES ? bench.op[m].name : "a rebuilt whole");
        CHECK(memcmp(sums, sums + 3 * elements, 3 * elements * sizeof *sums) == 0);
        close_bench(&bench);
        free(expected);
        free(got);
        free(sums);
    }
}

static void one_axis(void)
{
    compare(1, 0);
    compare(test_env.world_size, 1);
}

static void two_axes(void)
{
    compare(2, 0);
    compare(2, 1);
}

static void refused(const char *why)
{
    char text[HAPT_TEAM_TRANSPORT_CHARS];
    struct bench bench;
    open_bench(&bench, 1, 0);
    CHECK_OK(hapt_team_use_devices(&bench.team, &backend, device, NULL, text));
    CHECK_MESSAGE(!bench.team.devices && strncmp(text, "the host: ", 10) == 0 && strstr(text, why), "%s: %s", why,
                  text);
    close_bench(&bench);
}

/* If one rank fails, all ranks report its reason. */
static void reasons(void)
{
    fake.none = true;
    refused("no library of groups");
    fake.none = false;
    fake.shared = true;
    refused("ranks share the device device 0");
    fake.shared = false;
    fake.fails = true;
    refused("no way to its peers");
    fake.fails = false;
    fake.faulty = true; /* at its first use */
    refused("the wire is cut");
    fake.faulty = false;
    fake.stuck = true;
    refused("its ranks did not find each other in time");
    fake.stuck = false;
    if (test_env.world_rank == 1) setenv("HAPT_COLLECTIVES", "host", 1);
    refused("HAPT_COLLECTIVES=host");
    unsetenv("HAPT_COLLECTIVES");
}

/* All kinds cost time, the same on all ranks. */
static void check_model(const struct hapt_collective_model *model)
{
    CHECK(model->measured && model->ranks == test_env.world_size);
    for (int kind = HAPT_COLLECTIVE_ALL_REDUCE; kind <= HAPT_COLLECTIVE_ALL_TO_ALL; kind++)
        CHECK(hapt_collective_cost_s(model, (enum hapt_collective_kind)kind, 1 << 20, 0) > 0);
    struct hapt_collective_model first = *model;
    MPI_Bcast(&first, sizeof first, MPI_BYTE, 0, test_env.world);
    CHECK(memcmp(first.term, model->term, sizeof first.term) == 0);
}

static enum hapt_status measure(const struct hapt_backend *by, struct hapt_collective_model *model)
{
    char text[HAPT_TEAM_TRANSPORT_CHARS];
    struct bench bench;
    open_bench(&bench, 1, 0);
    CHECK_OK(hapt_team_use_devices(&bench.team, by, device, NULL, text));
    fake.asked = fake.copied = 0;
    const enum hapt_status status = hapt_collective_measure_team(&bench.team, by, device, 0.1, model);
    close_bench(&bench);
    return status;
}

static enum hapt_status copy(struct hapt_queue *queue, void *to, const void *from, size_t bytes)
{
    CHECK(queue != NULL);
    fake.copied++;
    memcpy(to, from, bytes);
    return HAPT_OK;
}

static void *pin(size_t bytes)
{
    fake.used++;
    return malloc(bytes);
}

static void unpin(void *memory)
{
    fake.used--;
    free(memory);
}

static void measured(void)
{
    struct hapt_collective_model model = {0};
    CHECK_OK(measure(&backend, &model));
    check_model(&model);
    const int asked = fake.asked;
    CHECK_MESSAGE(asked >= 5 * 3 * 3 && fake.copied == 0, "%d operations of the devices, %d copies", asked,
                  fake.copied);
    fake.none = true; /* by the host, which reads this memory */
    CHECK_OK(measure(&backend, &model));
    check_model(&model);
    CHECK(fake.asked == 0 && fake.copied == 0);
    struct hapt_backend apart = backend; /* by the host, which does not */
    apart.pin = pin;
    apart.unpin = unpin;
    apart.copy = copy;
    CHECK_OK(measure(&apart, &model));
    check_model(&model);
    CHECK_MESSAGE(fake.asked == 0 && fake.copied >= 5 * 3 * 3 * 2, "%d copies", fake.copied);
    fake.none = false;
    fake.asked = 0;
}

/* One device without memory for the data: no rank waits for it. */
static void measured_without_memory(void)
{
    struct hapt_collective_model model = {0};
    struct hapt_backend apart = backend;
    apart.pin = pin;
    apart.unpin = unpin;
    apart.copy = copy;
    fake.full = fake.none = true;
    CHECK(measure(&apart, &model) == HAPT_ERR_MEMORY);
    CHECK(model.ranks == 0);
    fake.full = fake.none = false;
    hapt_fail_reset();
    fake.asked = 0;
}

static void failures(void)
{
    char text[HAPT_TEAM_TRANSPORT_CHARS], absent[32];
    struct bench bench;
    struct hapt_engine_links links;
    float data[4] = {1, 2, 3, 4};
    const int last = test_env.world_size - 1;
    open_bench(&bench, 1, 0);
    CHECK_OK(hapt_team_use_devices(&bench.team, &backend, device, NULL, text));
    hapt_team_links(&bench.team, &links);
    snprintf(absent, sizeof absent, "rank %d on host", last);
    fake.faulty = true;
    CHECK(links.all_reduce(links.context, 1, data, 4) == HAPT_ERR_COMM);
    CHECK_MESSAGE(strstr(hapt_fail_message(), "test: the wire is cut in: sum of the gradients of step 0"), "%s",
                  hapt_fail_message());
    hapt_fail_reset();
    close_bench(&bench);
    fake.faulty = false;
    open_bench(&bench, 1, 0);
    CHECK_OK(hapt_team_use_devices(&bench.team, &backend, device, NULL, text));
    hapt_team_links(&bench.team, &links);
    fake.stuck = true;
    if (test_env.world_rank < last) {
        CHECK(links.all_reduce(links.context, 1, data, 4) == HAPT_ERR_COMM);
        CHECK_MESSAGE(strstr(hapt_fail_message(), "test waited 1 s for ") && strstr(hapt_fail_message(), absent) &&
                          !strstr(hapt_fail_message(), "rank 0"),
                      "%s", hapt_fail_message());
    } else {
        hapt_time_sleep_until(hapt_time_s() + 2.5); /* until the others have given up */
        CHECK(hapt_collective_late(bench.team.all_ranks, "too late") ==
              HAPT_ERR_COMM); /* receives what the others have sent */
    }
    hapt_fail_reset();
    MPI_Barrier(test_env.world);
    close_bench(&bench);
    fake.stuck = false;
    fake.asked = 0;
}

int main(int argc, char **argv)
{
    test_init_mpi(&argc, &argv);
    RUN(one_axis);
    if (test_env.world_size == 4) RUN(two_axes);
    RUN(reasons);
    RUN(measured);
    RUN(measured_without_memory);
    RUN(failures);
    return test_finish();
}
