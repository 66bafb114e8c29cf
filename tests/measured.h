/* A measured profile of this job's ranks, and what it was made from. Shared by MPI tests. */
#ifndef HAPT_TEST_MEASURED_H
#define HAPT_TEST_MEASURED_H

#include <unistd.h>

#include "fixture.h"
#include "hapt/profile.h"

struct run {
    struct hapt_arena arena;
    struct hapt_model *model;
    struct hapt_cluster *cluster;
    struct hapt_layers *layers;
    struct hapt_profile *profile;
};

/* The cluster with these subclusters (JSON objects, separated by commas), bound and probed. Collective. */
static struct hapt_cluster *measured_cluster(struct hapt_arena *arena, const char *subclusters)
{
    static int number;
    struct hapt_cluster *cluster = NULL;
    char path[128];
    snprintf(path, sizeof path, "/tmp/hapt-measured-test-%ld-%d.json", (long)getppid(), number++);
    if (test_env.world_rank == 0) {
        FILE *file = fopen(path, "w");
        CHECK(file != NULL);
        if (!file) exit(1);
        fprintf(file, "{\"format\": \"hapt-cluster\", \"version\": 1, \"subclusters\": [%s]}\n", subclusters);
        fclose(file);
    }
    MPI_Barrier(test_env.world);
    CHECK_OK(hapt_cluster_load(path, arena, &cluster));
    MPI_Barrier(test_env.world);
    if (test_env.world_rank == 0) unlink(path);
    CHECK_OK(hapt_cluster_bind(&test_env, arena, cluster));
    CHECK_OK(hapt_cluster_probe(&test_env, cluster));
    return cluster;
}

/* [L][L] structure of each range. */
static const uint64_t *structures_of(struct run *run)
{
    const size_t L = (size_t)run->layers->count;
    uint64_t *structure = hapt_arena_alloc(&run->arena, L * L, sizeof *structure);
    CHECK_OK(hapt_layers_structures(run->layers, run->model->graph, NULL, structure));
    return structure;
}

#endif
