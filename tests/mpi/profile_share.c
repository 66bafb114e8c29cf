/* ranks: 1 2 3 4
 * Runs beside others: it measures no time.
 * A profile with one copy per node is the same for every rank. If one rank fails, all ranks fail. */
#include "random_profile.h"

#include <unistd.h>

static bool same_bytes(const void *a, const void *b, size_t bytes)
{
    return (a == NULL) == (b == NULL) && (!a || memcmp(a, b, bytes) == 0);
}

static void compare_clusters(const struct hapt_profile *profile, const struct hapt_profile *own, int c, uint64_t seed)
{
    const struct hapt_profile_cluster *a = &profile->cluster[c], *b = &own->cluster[c];
    if (!CHECK(a->submesh_count == b->submesh_count)) return;
    const size_t table = hapt_profile_index(own, b->submesh_count, 0, 0) * sizeof(double);
    const bool same =
        strcmp(a->name, b->name) == 0 && a->nodes == b->nodes && a->devices_per_node == b->devices_per_node &&
        a->device_memory_bytes == b->device_memory_bytes && a->peak_flops == b->peak_flops &&
        same_bytes(a->submesh, b->submesh, (size_t)b->submesh_count * sizeof *b->submesh) &&
        same_bytes(a->stage_time, b->stage_time, table) &&
        same_bytes(a->stage_forward_time, b->stage_forward_time, table) &&
        same_bytes(a->parameter_bytes, b->parameter_bytes, table) &&
        same_bytes(a->activation_bytes, b->activation_bytes, table) && same_bytes(a->step_time, b->step_time, table) &&
        same_bytes(a->weight_time, b->weight_time, table) &&
        same_bytes(a->split_parameter_bytes, b->split_parameter_bytes, table) &&
        same_bytes(a->weight_slot_bytes, b->weight_slot_bytes, table);
    CHECK_MESSAGE(same, "seed %llu: subcluster %d differs", (unsigned long long)seed, c);
}

static void compare_mixed(const struct hapt_profile *own, const struct hapt_profile_mixed *a,
                          const struct hapt_profile_mixed *b, uint64_t seed)
{
    const size_t table = hapt_profile_index(own, 1, 0, 0) * sizeof(double), K = (size_t)b->count;
    const size_t memory = (size_t)b->memory_rows * table;
    size_t devices = 0;
    if (!CHECK(a->count == b->count && a->memory_rows == b->memory_rows)) return;
    for (size_t i = 0; i < K; i++) devices += (size_t)b->devices[i];
    const bool same =
        same_bytes(a->cluster, b->cluster, K * sizeof(int)) && same_bytes(a->devices, b->devices, K * sizeof(int)) &&
        same_bytes(a->ratio, b->ratio, devices * sizeof(double)) && same_bytes(a->stage_time, b->stage_time, table) &&
        same_bytes(a->stage_forward_time, b->stage_forward_time, table) &&
        same_bytes(a->parameter_bytes, b->parameter_bytes, memory) &&
        same_bytes(a->activation_bytes, b->activation_bytes, memory) && same_bytes(a->step_time, b->step_time, table);
    CHECK_MESSAGE(same, "seed %llu: a group of mixed stages differs", (unsigned long long)seed);
}

static void compare(const struct hapt_profile *profile, const struct hapt_profile *own, uint64_t seed)
{
    const size_t C = (size_t)own->cluster_count, L = (size_t)own->layer_count;
    if (!CHECK(profile->cluster_count == own->cluster_count && profile->layer_count == own->layer_count)) return;
    CHECK(profile->flops == own->flops);
    CHECK(same_bytes(profile->boundary_bytes, own->boundary_bytes, L * sizeof(double)));
    CHECK(same_bytes(profile->link_bandwidth, own->link_bandwidth, C * C * sizeof(double)));
    CHECK(same_bytes(profile->link_latency, own->link_latency, C * C * sizeof(double)));
    for (int c = 0; c < own->cluster_count; c++) compare_clusters(profile, own, c, seed);
    if (!CHECK(profile->mixed_count == own->mixed_count)) return;
    for (int k = 0; k < own->mixed_count; k++) compare_mixed(own, &profile->mixed[k], &own->mixed[k], seed);
}

/* Every other profile has mixed stages, every third the tables of split backward passes. */
static struct hapt_profile *some_profile(uint64_t *seed, struct hapt_arena *arena)
{
    const bool split = *seed % 3 == 0;
    struct hapt_profile *profile = *seed % 2 ? random_mixed_profile(seed, arena) : random_profile(seed, arena);
    for (int c = 0; split && c < profile->cluster_count; c++) {
        CHECK_OK(hapt_profile_add_split(profile, c, arena));
        profile->cluster[c].weight_time[0] = 0.5 + c;
    }
    return profile;
}

/* Rank 0 of the node makes the profile and releases its own copy. The other ranks make one only for comparison. */
static void shared_tables(void)
{
    for (uint64_t start = 1; start <= 100; start++) {
        uint64_t seed = start, again = start;
        struct hapt_arena arena, mine;
        struct hapt_profile *made = NULL, *profile = NULL;
        hapt_arena_init(&arena);
        hapt_arena_init(&mine);
        if (test_env.node_rank == 0) {
            made = some_profile(&seed, test_env.node_size > 1 ? &mine : &arena);
            made->flops = (double)start;
        }
        CHECK_OK(hapt_profile_share(&test_env, HAPT_OK, made, &arena, &profile));
        hapt_arena_release(&mine);
        struct hapt_profile *own = some_profile(&again, &arena);
        own->flops = (double)start;
        if (profile) compare(profile, own, start);
        if (start % 10 == 0) hapt_shared_release_newer(NULL);
        hapt_arena_release(&arena);
    }
}

/* One rank writes into the block and the others see it: there is one copy. */
static void one_copy(void)
{
    struct hapt_shared *block;
    CHECK_OK(hapt_shared_create(&test_env, test_env.node_rank == 0 ? 1000 : 0, &block));
    unsigned char *memory = hapt_shared_memory(block);
    CHECK((uintptr_t)memory % 64 == 0);
    for (int round = 0; round < 20; round++) {
        if (test_env.node_rank == 0) memset(memory, round, 1000);
        CHECK_OK(hapt_shared_publish(block));
        CHECK(memory[0] == round && memory[999] == round);
        MPI_Barrier(test_env.node);
    }
    hapt_shared_release(block);
}

/* The first rank reads a file. A bad file fails on all ranks. */
static void files(void)
{
    char path[64];
    snprintf(path, sizeof path, "/tmp/hapt-share-%d.h5", (int)getpid());
    MPI_Bcast(path, sizeof path, MPI_CHAR, 0, test_env.world);
    struct hapt_arena arena;
    struct hapt_profile *own, *profile = NULL;
    uint64_t seed = 5;
    hapt_arena_init(&arena);
    own = some_profile(&seed, &arena);
    if (test_env.world_rank == 0) CHECK_OK(hapt_profile_save(path, own));
    MPI_Barrier(test_env.world);
    CHECK_OK(hapt_profile_load_shared(&test_env, path, &arena, &profile));
    if (profile) compare(profile, own, 5);
    MPI_Barrier(test_env.world);
    if (test_env.world_rank == 0) CHECK(truncate(path, 300) == 0);
    MPI_Barrier(test_env.world);
    profile = NULL;
    const enum hapt_status status = hapt_profile_load_shared(&test_env, path, &arena, &profile);
    CHECK_MESSAGE(status == HAPT_ERR_INPUT && !profile, "a truncated file gives %s", hapt_status_name(status));
    CHECK((hapt_fail_message()[0] != '\0') == (test_env.node_rank == 0));
    hapt_fail_reset();
    MPI_Barrier(test_env.world);
    if (test_env.world_rank == 0) unlink(path);
    hapt_arena_release(&arena);
}

int main(int argc, char **argv)
{
    test_init_mpi(&argc, &argv);
    RUN(shared_tables);
    RUN(one_copy);
    RUN(files);
    return test_finish();
}
