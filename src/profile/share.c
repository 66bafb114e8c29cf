/* A profile held once per node, in one block of shared memory. The writer and the readers use the same code for its
 * layout. */
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "hapt/profile.h"

struct layout {
    char *base; /* NULL: only computes the size */
    size_t used;
    bool frees; /* the pages of tables that move */
};

/* Returns the next piece of the block; copies `from` into it if given. */
static void *next_piece(struct layout *layout, const void *from, size_t bytes)
{
    void *piece = layout->base ? layout->base + layout->used : NULL;
    layout->used += hapt_align(bytes);
    if (piece && from) memcpy(piece, from, bytes);
    return piece;
}

/* The same for a table that moves. In large profiles its pages are freed as soon as they are copied, so that tables
 * never exist twice. */
static void *copy_and_free(struct layout *layout, double *from, size_t bytes)
{
    void *piece = next_piece(layout, from, bytes);
    if (!piece || !from || !layout->frees) return piece;
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), first = ((uintptr_t)from + page - 1) / page * page,
                    end = ((uintptr_t)from + bytes) / page * page;
    if (first < end) madvise((void *)first, end - first, MADV_DONTNEED); /* if it fails, the pages stay longer */
    return piece;
}

/* Places the arrays of `to`, whose counts are set; copies them from `from` if this rank holds the original. */
static void pack_cluster(struct layout *layout, int L, const struct hapt_profile_cluster *from,
                         struct hapt_profile_cluster *to)
{
    const size_t S = (size_t)to->submesh_count, bytes = S * (size_t)L * (size_t)L * sizeof(double);
    const bool steps = to->step_time != NULL; /* a reader's copy has the writer's pointer: compare with NULL only */
    const bool splits = to->weight_time != NULL;
    to->ends = NULL;
    to->submesh = next_piece(layout, from ? from->submesh : NULL, S * sizeof *to->submesh);
    to->stage_time = copy_and_free(layout, from ? from->stage_time : NULL, bytes);
    to->stage_forward_time = copy_and_free(layout, from ? from->stage_forward_time : NULL, bytes);
    to->parameter_bytes = copy_and_free(layout, from ? from->parameter_bytes : NULL, bytes);
    to->activation_bytes = copy_and_free(layout, from ? from->activation_bytes : NULL, bytes);
    to->step_time = steps ? copy_and_free(layout, from ? from->step_time : NULL, bytes) : NULL;
    if (!splits) return;
    to->weight_time = copy_and_free(layout, from ? from->weight_time : NULL, bytes);
    to->split_parameter_bytes = copy_and_free(layout, from ? from->split_parameter_bytes : NULL, bytes);
    to->weight_slot_bytes = copy_and_free(layout, from ? from->weight_slot_bytes : NULL, bytes);
}

/* The same for a mixed group. */
static void pack_mixed(struct layout *layout, int L, const struct hapt_profile_mixed *from,
                       struct hapt_profile_mixed *to)
{
    const size_t K = (size_t)to->count, bytes = (size_t)L * (size_t)L * sizeof(double);
    const size_t memory_bytes = (size_t)to->memory_rows * bytes;
    const bool steps = to->step_time != NULL, ratios = to->ratio != NULL;
    size_t devices = 0;
    to->cluster = next_piece(layout, from ? from->cluster : NULL, K * sizeof *to->cluster);
    /* without a block (size only) `next_piece` returns NULL */
    to->devices = next_piece(layout, from ? from->devices : NULL, K * sizeof *to->devices);
    const int *counts = to->devices ? to->devices : from->devices;
    for (size_t i = 0; i < K; i++) devices += (size_t)counts[i];
    to->ratio = ratios ? next_piece(layout, from ? from->ratio : NULL, devices * sizeof *to->ratio) : NULL;
    to->stage_time = copy_and_free(layout, from ? from->stage_time : NULL, bytes);
    to->stage_forward_time = copy_and_free(layout, from ? from->stage_forward_time : NULL, bytes);
    to->parameter_bytes = copy_and_free(layout, from ? from->parameter_bytes : NULL, memory_bytes);
    to->activation_bytes = copy_and_free(layout, from ? from->activation_bytes : NULL, memory_bytes);
    to->step_time = steps ? copy_and_free(layout, from ? from->step_time : NULL, bytes) : NULL;
}

/* Places a complete layout. */
static enum hapt_status pack_layout(struct layout *layout, const struct hapt_stage_layout *from,
                                    struct hapt_arena *arena, const struct hapt_stage_layout **to)
{
    char *block = layout->base ? layout->base + layout->used : NULL;
    *to = from;
    if (block && from) hapt_stage_layout_pack(from, block);
    if (block) HAPT_TRY(hapt_stage_layout_unpack(block, arena, to));
    next_piece(layout, NULL, hapt_stage_layout_pack(*to, NULL));
    return HAPT_OK;
}

static enum hapt_status pack_crossings(struct layout *layout, const struct hapt_crossings *from,
                                       struct hapt_arena *arena, const struct hapt_crossings **to)
{
    struct hapt_crossings *made;
    const struct hapt_crossings *frame = next_piece(layout, from, sizeof *from);
    HAPT_NEW(made, arena, 1);
    *made = from ? *from : *frame;
    const size_t count = (size_t)made->count;
    made->bytes = next_piece(layout, from ? from->bytes : NULL, count * sizeof(double));
    made->start = next_piece(layout, from ? from->start : NULL, (count + 1) * sizeof(int));
    const int *start = made->start ? made->start : from->start; /* without a block (size only) it is NULL */
    const size_t layers = (size_t)start[count];
    made->layer = next_piece(layout, from ? from->layer : NULL, layers * sizeof(int));
    made->writes = next_piece(layout, from ? from->writes : NULL, layers * sizeof(bool));
    *to = made;
    return HAPT_OK;
}

static enum hapt_status pack_profile(struct layout *layout, const struct hapt_profile *from, struct hapt_arena *arena,
                                     struct hapt_profile *to)
{
    const struct hapt_profile *frame = next_piece(layout, from, sizeof *from);
    *to = from ? *from : *frame;
    const size_t C = (size_t)to->cluster_count;
    const struct hapt_profile_cluster *cluster = next_piece(layout, from ? from->cluster : NULL, C * sizeof *cluster);
    if (from) cluster = from->cluster;
    HAPT_NEW(to->cluster, arena, C);
    memcpy(to->cluster, cluster, C * sizeof *cluster);
    to->boundary_bytes =
        next_piece(layout, from ? from->boundary_bytes : NULL, (size_t)to->layer_count * sizeof *to->boundary_bytes);
    if (to->tied_bytes)
        to->tied_bytes =
            next_piece(layout, from ? from->tied_bytes : NULL, (size_t)to->layer_count * sizeof *to->tied_bytes);
    if (to->crossings) HAPT_TRY(pack_crossings(layout, from ? from->crossings : NULL, arena, &to->crossings));
    to->link_bandwidth = next_piece(layout, from ? from->link_bandwidth : NULL, C * C * sizeof *to->link_bandwidth);
    to->link_latency = next_piece(layout, from ? from->link_latency : NULL, C * C * sizeof *to->link_latency);
    for (size_t c = 0; c < C; c++)
        pack_cluster(layout, to->layer_count, from ? &from->cluster[c] : NULL, &to->cluster[c]);
    const size_t groups = (size_t)to->mixed_count;
    const struct hapt_profile_mixed *mixed = next_piece(layout, from ? from->mixed : NULL, groups * sizeof *mixed);
    if (from) mixed = from->mixed;
    HAPT_NEW(to->mixed, arena, groups);
    for (size_t k = 0; k < groups; k++) {
        to->mixed[k] = mixed[k];
        pack_mixed(layout, to->layer_count, from ? &from->mixed[k] : NULL, &to->mixed[k]);
    }
    const struct hapt_stage_layout **programs;
    HAPT_NEW(programs, arena, to->layout_count);
    for (int k = 0; k < to->layout_count; k++)
        HAPT_TRY(pack_layout(layout, from ? from->layout[k] : NULL, arena, &programs[k]));
    to->layout = programs;
    return HAPT_OK;
}

static enum hapt_status block_bytes(const struct hapt_profile *made, size_t *bytes)
{
    struct hapt_arena scratch;
    struct layout layout = {0};
    struct hapt_profile sized;
    hapt_arena_init(&scratch);
    const enum hapt_status status = pack_profile(&layout, made, &scratch, &sized);
    hapt_arena_release(&scratch);
    *bytes = layout.used;
    return status;
}

/* Smaller profiles keep their pages, which serve the next profile: the kernel need not clear them again. */
enum { LARGE_BYTES = 256 << 20 };

/* The first rank of a node writes, then all others read. */
static enum hapt_status write_block(const struct hapt_env *env, struct hapt_shared *block, size_t bytes,
                                    const struct hapt_profile *made, struct hapt_arena *result,
                                    struct hapt_profile *common)
{
    struct layout layout = {.base = hapt_shared_memory(block), .frees = bytes > LARGE_BYTES};
    enum hapt_status status = common ? HAPT_OK : HAPT_ERR_MEMORY;
    if (status == HAPT_OK && env->node_rank == 0) status = pack_profile(&layout, made, result, common);
    const enum hapt_status published = hapt_shared_publish(block);
    return status == HAPT_OK ? published : status;
}

enum hapt_status hapt_profile_share(const struct hapt_env *env, enum hapt_status status, struct hapt_profile *made,
                                    struct hapt_arena *result, struct hapt_profile **profile)
{
    size_t bytes = 0;
    struct hapt_shared *block = NULL;
    struct hapt_profile *common = made;
    const bool first = env->node_rank == 0, several = env->node_size > 1;
    if (!first) status = HAPT_OK;
    if (status == HAPT_OK && first && several) status = block_bytes(made, &bytes);
    HAPT_TRY(hapt_env_agree(env->world, status));
    if (several) status = hapt_shared_create(env, bytes, &block);
    HAPT_TRY(hapt_env_agree(env->world, status));
    if (several) {
        common = hapt_arena_alloc(result, 1, sizeof *common);
        status = write_block(env, block, bytes, made, result, common);
    }
    HAPT_TRY(hapt_env_agree(env->world, status));
    if (several && !first) {
        struct layout layout = {.base = hapt_shared_memory(block)};
        status = pack_profile(&layout, NULL, result, common);
    }
    HAPT_TRY(hapt_env_agree(env->world, status));
    *profile = common;
    return HAPT_OK;
}

enum hapt_status hapt_profile_load_shared(const struct hapt_env *env, const char *path, struct hapt_arena *result,
                                          struct hapt_profile **profile)
{
    struct hapt_arena scratch; /* for the first rank's own copy */
    struct hapt_profile *made = NULL;
    enum hapt_status status = HAPT_OK;
    hapt_arena_init(&scratch);
    if (env->node_rank == 0) status = hapt_profile_load(path, env->node_size > 1 ? &scratch : result, &made);
    status = hapt_profile_share(env, status, made, result, profile);
    hapt_arena_release(&scratch);
    return status;
}
