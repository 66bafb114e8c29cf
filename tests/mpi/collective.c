/* ranks: 1 2 3 4
 * Collectives, by shared memory and by messages. Sums are compared with sums in order of rank, and layouts with the
 * position of every element. All ranks must have equal bits, and no byte outside the result may change. */
#include "test.h"

#include "hapt/link.h"
#include "hapt/ratios.h"
#include "hapt/sharding.h"

/* The values of rank `rank` at `i`: ones whose float sum depends on the order. */
static float value(int round, int rank, size_t i)
{
    static const double scale[] = {1, 1e3, 1e6, 1e2, 1e5, 1e1, 1e4};
    uint64_t state = (uint64_t)round * 131 + (uint64_t)rank + i * 0x9e3779b97f4a7c15u;
    return (float)((hapt_random_unit(&state) - 0.5) * scale[rank % 7]);
}

static void sum_all(bool shared_memory)
{
    struct hapt_collective *collective = NULL;
    CHECK_OK(hapt_collective_create(test_env.world, "test", 60, shared_memory, &collective));
    const size_t sizes[] = {1, 2, 3, 7, 1000, 262144, 262145, 700001};
    for (int round = 0; round < 16; round++) {
        const size_t n = sizes[round % 8];
        float *data = malloc((n + 1) * sizeof *data);
        for (size_t i = 0; i < n; i++) data[i] = value(round, test_env.world_rank, i);
        data[n] = -7;
        CHECK_OK(hapt_collective_all_reduce(collective, "sum", data, n));
        long wrong = 0;
        for (size_t i = 0; i < n; i++) {
            float sum = value(round, 0, i);
            for (int r = 1; r < test_env.world_size; r++) sum += value(round, r, i);
            wrong += memcmp(&sum, &data[i], sizeof sum) != 0;
        }
        CHECK_MESSAGE(wrong == 0, "round %d: %ld of %zu sums differ", round, wrong, n);
        CHECK(data[n] == -7);
        free(data);
    }
    hapt_collective_destroy(collective);
}

static void shared_memory(void)
{
    sum_all(true);
}

static void messages(void)
{
    sum_all(false);
}

/* ---- random layouts: a tensor [outer][blocks * extent][middle][blocks * extent][inner], compared element by element
 * ---- */

enum { MOST = 16 };
static uint64_t shared_random; /* equal on all ranks */

/* A random partition of `units` into one non-empty part per rank. */
static void random_cut(int ranks, int64_t units, int64_t *first)
{
    double ratio[MOST];
    for (int r = 0; r < ranks; r++) ratio[r] = 0.05 + hapt_random_unit(&shared_random);
    CHECK(hapt_split(ratio, ranks, units, first));
}

struct dimension { /* of a tensor [outer][blocks][extent][inner], where inner is in elements */
    size_t outer, blocks, extent, inner;
    int64_t first[MOST + 1];
};

static struct dimension random_dimension(int ranks)
{
    struct dimension made = {.outer = 1 + hapt_random_next(&shared_random) % 5,
                             .blocks = 1 + hapt_random_next(&shared_random) % 3,
                             .extent = (size_t)ranks + hapt_random_next(&shared_random) % 9,
                             .inner = 1 + hapt_random_next(&shared_random) % 7};
    if (hapt_random_next(&shared_random) % 10 == 0) made.inner *= 2003; /* more than one block of the transport */
    random_cut(ranks, (int64_t)made.extent, made.first);
    return made;
}

static struct hapt_strided part_of(const struct dimension *dimension, int rank, size_t width)
{
    const size_t inner = dimension->inner * width;
    return (struct hapt_strided){.offset = (size_t)dimension->first[rank] * inner,
                                 .count = dimension->outer * dimension->blocks,
                                 .run = (size_t)(dimension->first[rank + 1] - dimension->first[rank]) * inner,
                                 .stride = dimension->extent * inner};
}

/* The rank whose shard contains element `i` of the whole tensor, and its position there. */
static int owner(const struct dimension *dimension, size_t i, size_t *local)
{
    const size_t inner = i % dimension->inner, at = i / dimension->inner % dimension->extent;
    const size_t row = i / dimension->inner / dimension->extent;
    int rank = 0;
    while ((int64_t)at >= dimension->first[rank + 1]) rank++;
    const size_t mine = (size_t)(dimension->first[rank + 1] - dimension->first[rank]);
    *local = (row * mine + at - (size_t)dimension->first[rank]) * dimension->inner + inner;
    return rank;
}

static float get(const void *data, enum hapt_dtype dtype, size_t i)
{
    return dtype == HAPT_F32 ? ((const float *)data)[i] : hapt_bf16_to_f32(((const uint16_t *)data)[i]);
}

static void put(void *data, enum hapt_dtype dtype, size_t i, float value)
{
    if (dtype == HAPT_F32)
        ((float *)data)[i] = value;
    else
        ((uint16_t *)data)[i] = hapt_bf16_from_f32(value);
}

/* The value, rounded to the type. */
static float rounded(enum hapt_dtype dtype, float value)
{
    return dtype == HAPT_F32 ? value : hapt_bf16_to_f32(hapt_bf16_from_f32(value));
}

/* The sum or the maximum over `ranks`, in order of rank, rounded once. */
static float combined(enum hapt_dtype dtype, int round, int ranks, size_t i, bool largest)
{
    float sum = rounded(dtype, value(round, 0, i));
    for (int r = 1; r < ranks; r++) {
        const float term = rounded(dtype, value(round, r, i));
        if (!largest)
            sum += term;
        else if (term > sum)
            sum = term;
    }
    return rounded(dtype, sum);
}

static void gather_scatter(struct hapt_collective *collective, int round, enum hapt_dtype dtype)
{
    const int ranks = test_env.world_size, me = test_env.world_rank;
    const size_t width = hapt_dtype_bytes(dtype);
    const struct dimension dimension = random_dimension(ranks);
    const size_t n = dimension.outer * dimension.blocks * dimension.extent * dimension.inner;
    struct hapt_strided part[MOST];
    for (int r = 0; r < ranks; r++) part[r] = part_of(&dimension, r, width);
    const size_t own = part[me].count * part[me].run / width;
    char *whole = malloc(n * width + 1), *mine = malloc(own * width + 1);
    for (int way = 0; way < 4; way++) {
        const bool padded = way & 1, in_place = way & 2;
        size_t local, wrong = 0;
        memset(whole, 0x7f, n * width + 1);
        for (size_t i = 0; i < n; i++)
            if (owner(&dimension, i, &local) == me)
                put(in_place ? whole : mine, dtype, in_place ? i : local, value(round, 20, i));
        CHECK_OK(hapt_collective_gather_shards(collective, "gather", padded, part, in_place ? NULL : mine, whole));
        for (size_t i = 0; i < n; i++) wrong += get(whole, dtype, i) != rounded(dtype, value(round, 20, i));
        CHECK_MESSAGE(wrong == 0, "round %d: %zu of %zu gathered elements are wrong", round, wrong, n);
        CHECK(whole[n * width] == 0x7f);
    }
    size_t local, wrong = 0;
    for (size_t i = 0; i < n; i++) put(whole, dtype, i, value(round, me, i));
    memset(mine, 0x7f, own * width + 1);
    CHECK_OK(hapt_collective_reduce_scatter(collective, "scatter", dtype, part, whole, mine));
    for (size_t i = 0; i < n; i++)
        if (owner(&dimension, i, &local) == me) {
            const float sum = combined(dtype, round, ranks, i, false), got = get(mine, dtype, local);
            wrong += memcmp(&sum, &got, sizeof sum) != 0;
        }
    CHECK_MESSAGE(wrong == 0, "round %d: %zu of %zu scattered sums are wrong", round, wrong, own);
    CHECK(mine[own * width] == 0x7f);
    for (int largest = 0; largest < 2; largest++) {
        for (size_t i = 0; i < n; i++) put(whole, dtype, i, value(round, me, i));
        CHECK_OK(hapt_collective_combine(collective, "combine", largest ? HAPT_COMBINE_MAXIMUM : HAPT_COMBINE_SUM,
                                         dtype, whole, n));
        for (size_t i = 0; i < n; i++) wrong += get(whole, dtype, i) != combined(dtype, round, ranks, i, largest);
        CHECK_MESSAGE(wrong == 0, "round %d: %zu of %zu elements are combined wrongly", round, wrong, n);
    }
    free(whole);
    free(mine);
}

/* From sharded on rows to sharded on columns of [a][b][c] (c in elements). Each rank sends a rectangle to each other
 * rank. */
static void trade(struct hapt_collective *collective, int round, enum hapt_dtype dtype)
{
    const int ranks = test_env.world_size, me = test_env.world_rank;
    const size_t width = hapt_dtype_bytes(dtype);
    struct dimension rows = random_dimension(ranks), columns = random_dimension(ranks);
    rows.outer = rows.blocks = columns.blocks = 1;
    rows.inner = columns.extent * columns.inner;
    columns.outer = rows.extent;
    const size_t n = rows.extent * rows.inner, c = columns.inner * width;
    const size_t my_rows = (size_t)(rows.first[me + 1] - rows.first[me]);
    const size_t my_columns = (size_t)(columns.first[me + 1] - columns.first[me]);
    struct hapt_strided send[MOST], receive[MOST];
    struct hapt_strided_list sends[MOST], receives[MOST];
    size_t longest = 0;
    for (int r = 0; r < ranks; r++) {
        const size_t its_rows = (size_t)(rows.first[r + 1] - rows.first[r]);
        const size_t its_columns = (size_t)(columns.first[r + 1] - columns.first[r]);
        send[r] = (struct hapt_strided){(size_t)columns.first[r] * c, my_rows, its_columns * c, columns.extent * c};
        receive[r] = (struct hapt_strided){(size_t)rows.first[r] * my_columns * c, 1, its_rows * my_columns * c, 0};
        sends[r] = (struct hapt_strided_list){1, &send[r]};
        receives[r] = (struct hapt_strided_list){1, &receive[r]};
        for (int s = 0; s < ranks; s++) {
            const size_t bytes = (size_t)(rows.first[s + 1] - rows.first[s]) * its_columns * c;
            if (bytes > longest) longest = bytes;
        }
    }
    char *from = malloc(my_rows * rows.inner * width), *to = malloc(rows.extent * my_columns * c + 1);
    size_t local, wrong = 0;
    memset(to, 0x7f, rows.extent * my_columns * c + 1);
    for (size_t i = 0; i < n; i++)
        if (owner(&rows, i, &local) == me) put(from, dtype, local, value(round, 30, i));
    CHECK_OK(hapt_collective_all_to_all(collective, "trade", longest, sends, from, receives, to));
    for (size_t i = 0; i < n; i++)
        if (owner(&columns, i, &local) == me) wrong += get(to, dtype, local) != rounded(dtype, value(round, 30, i));
    CHECK_MESSAGE(wrong == 0, "round %d: %zu of %zu elements of an all-to-all are wrong", round, wrong, n);
    CHECK(to[rows.extent * my_columns * c] == 0x7f);
    free(from);
    free(to);
}

static void random_layouts(void)
{
    for (int shared = 0; shared < 2; shared++) {
        struct hapt_collective *collective = NULL;
        CHECK_OK(hapt_collective_create(test_env.world, "test", 60, shared, &collective));
        shared_random = 42;
        for (int round = 0; round < (test_long() ? 1000 : 40); round++) {
            gather_scatter(collective, round, round % 2 ? HAPT_BF16 : HAPT_F32);
            trade(collective, round, round % 2 ? HAPT_F32 : HAPT_BF16);
        }
        hapt_collective_destroy(collective);
    }
}

static void slices(void)
{
    for (size_t n = 0; n < 50; n++)
        for (int p = 1; p < 9; p++) {
            CHECK(hapt_collective_slice(n, p, 0) == 0 && hapt_collective_slice(n, p, p) == n);
            for (int r = 0; r < p; r++) {
                const size_t size = hapt_collective_slice(n, p, r + 1) - hapt_collective_slice(n, p, r);
                CHECK(size == n / (size_t)p || size == n / (size_t)p + 1);
            }
        }
}

static void gather_all(void)
{
    int all[64];
    const int mine = 100 + test_env.world_rank;
    CHECK_OK(hapt_link_all_gather(test_env.world, "agreement", 60, &mine, sizeof mine, all));
    for (int r = 0; r < test_env.world_size; r++) CHECK(all[r] == 100 + r);
}

/* One rank never enters an agreement. The rank before it prints first and names only the absent rank. The other ranks
 * may print less. */
static void absent_from_agreement(void)
{
    static int all[64], mine; /* receives stay pending in these buffers */
    const int absent = test_env.world_size - 1, me = test_env.world_rank;
    double spoke_s = INFINITY, *spoken = calloc((size_t)test_env.world_size, sizeof *spoken);
    char name[64];
    MPI_Comm comm;
    MPI_Comm_dup(test_env.world, &comm); /* not freed: the communicator is broken */
    if (me != absent) {
        CHECK(hapt_link_all_gather(comm, "end of step 3", 2.0, &mine, sizeof mine, all) == HAPT_ERR_COMM);
        spoke_s = hapt_time_s();
        snprintf(name, sizeof name, "message from rank %d on host ", absent);
        const char *message = hapt_fail_message();
        CHECK_MESSAGE(strstr(message, "end of step 3") && strstr(message, "waited 2 s for a message from rank "), "%s",
                      message);
        if (me == absent - 1) CHECK_MESSAGE(strstr(message, name) && !strstr(message, "one of"), "%s", message);
        hapt_fail_reset();
    }
    MPI_Allgather(&spoke_s, 1, MPI_DOUBLE, spoken, 1, MPI_DOUBLE, test_env.world);
    CHECK_MESSAGE(spoken[2] < spoken[1] && spoken[2] < spoken[0], "%g, %g, %g", spoken[0], spoken[1], spoken[2]);
    free(spoken);
}

/* A peer never enters the collective. The wait times out, and the message names the waiting rank, the operation and the
 * peer. */
static enum hapt_status call_alone(struct hapt_collective *collective, int operation, const char *what)
{
    static float data[4], shard[2];
    const struct hapt_strided part[2] = {{0, 1, 8, 0}, {8, 1, 8, 0}};
    const struct hapt_strided_list send[2] = {{1, &part[0]}, {1, &part[1]}};
    switch (operation) {
    case 0: return hapt_collective_all_reduce(collective, what, data, 4);
    case 1: return hapt_collective_gather_shards(collective, what, true, part, shard, data);
    case 2: return hapt_collective_reduce_scatter(collective, what, HAPT_F32, part, data, shard);
    default: return hapt_collective_all_to_all(collective, what, 8, send, data, send, data);
    }
}

static void absent_peer(void)
{
    for (int shared = 0; shared < 2; shared++) {
        for (int operation = 0; operation < 4; operation++) {
            struct hapt_collective *collective = NULL;
            CHECK_OK(hapt_collective_create(test_env.world, "stage 7", 0.2, shared, &collective));
            if (test_env.world_rank == 0) {
                CHECK(call_alone(collective, operation, "gradients of step 3") == HAPT_ERR_COMM);
                CHECK(strstr(hapt_fail_message(), "stage 7") && strstr(hapt_fail_message(), "gradients of step 3"));
                if (test_env.world_size == 2)
                    CHECK_MESSAGE(strstr(hapt_fail_message(), "for rank 1 on host "), "%s", hapt_fail_message());
                hapt_fail_reset();
            }
            /* Not released on purpose: an operation is still pending. */
        }
    }
    MPI_Barrier(test_env.world);
}

/* Only the absent rank is named, out of several ranks. */
static void absent_from_sum(void)
{
    const int absent = 2;
    char name[64];
    snprintf(name, sizeof name, "for rank %d on host %s in: gradients of step 4", absent, hapt_env_host(absent));
    for (int shared = 0; shared < 2; shared++) {
        struct hapt_collective *collective = NULL;
        float data[4] = {0};
        CHECK_OK(hapt_collective_create(test_env.world, "stage 7", 0.5, shared, &collective));
        if (test_env.world_rank != absent) {
            CHECK(hapt_collective_all_reduce(collective, "gradients of step 4", data, 4) == HAPT_ERR_COMM);
            CHECK_MESSAGE(strstr(hapt_fail_message(), name), "%s", hapt_fail_message());
            hapt_fail_reset();
        }
        MPI_Barrier(test_env.world);
        /* Not released: an operation is still pending. */
    }
}

/* Rehearsed links. The sums stay the same. No call ends before the time that its bytes need on the slowest link of a
 * ring. */
static void paced(void)
{
    enum { ELEMENTS = 6000 };
    const double bandwidth = 4e6, latency_s = 0.001, bytes = ELEMENTS * sizeof(float), n = test_env.world_size;
    struct hapt_strided part[4];
    for (int r = 0; r < test_env.world_size; r++) {
        const size_t first = hapt_collective_slice(ELEMENTS, test_env.world_size, r);
        part[r] =
            (struct hapt_strided){first * sizeof(float), 1, ELEMENTS / (size_t)test_env.world_size * sizeof(float), 0};
    }
    for (int shared = 0; shared < 2; shared++) {
        struct hapt_collective *collective = NULL;
        float data[ELEMENTS];
        CHECK_OK(hapt_collective_create(test_env.world, "test", 60, shared, &collective));
        hapt_collective_emulate_link(collective, bandwidth, latency_s);
        for (int i = 0; i < ELEMENTS; i++) data[i] = (float)(test_env.world_rank + i);
        const double sum_s = hapt_time_s();
        CHECK_OK(hapt_collective_all_reduce(collective, "sum", data, ELEMENTS));
        const double gather_s = hapt_time_s();
        for (int i = 0; i < ELEMENTS; i++) CHECK(data[i] == (float)(n * (n - 1) / 2 + n * i));
        CHECK_OK(hapt_collective_gather_shards(collective, "gather", true, part, NULL, data));
        const double end_s = hapt_time_s();
        if (test_env.world_size > 1) {
            CHECK(gather_s - sum_s >= 2 * (n - 1) * latency_s + 2 * (n - 1) / n * bytes / bandwidth);
            CHECK(end_s - gather_s >= (n - 1) * latency_s + (n - 1) / n * bytes / bandwidth);
        }
        hapt_collective_destroy(collective);
    }
}

int main(int argc, char **argv)
{
    test_init_mpi(&argc, &argv);
    RUN(slices);
    RUN(shared_memory);
    RUN(messages);
    RUN(random_layouts);
    RUN(gather_all);
    RUN(paced);
    if (test_env.world_size == 2) RUN(absent_peer);
    if (test_env.world_size == 4) RUN(absent_from_sum);
    if (test_env.world_size == 4) RUN(absent_from_agreement);
    return test_finish();
}
