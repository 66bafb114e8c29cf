/* Verifies a complete checkpoint in one process: the manifest, size and checksum of each shard, and the required
 * contents. */
#include "checkpoint.h"

#include "hapt/h5.h"

struct manifest {
    int64_t version, shards, parameters, states;
    const int64_t *size, *checksum; /* [shards] */
    const char **parameter;         /* [parameters] */
    const int32_t *shard;           /* [parameters] shard that holds it */
    int32_t *own_states;            /* [parameters] */
};

static enum hapt_status read_manifest(struct hapt_h5 *file, struct hapt_arena *arena, int64_t *step,
                                      struct manifest *manifest)
{
    struct hapt_h5_content content;
    struct hapt_plan *plan;
    void *size, *checksum, *shard;
    int64_t checksums = -1, parameters;
    manifest->shards = -1;
    HAPT_TRY(hapt_h5_verify(file, &content));
    HAPT_TRY(hapt_h5_read_attribute_int(file, "/", "version", &manifest->version));
    HAPT_TRY(hapt_h5_read_attribute_int(file, "/", "step", step));
    HAPT_TRY(hapt_h5_read_attribute_int(file, "/", "state_count", &manifest->states));
    HAPT_TRY(hapt_h5_read(file, "/shard_size", HAPT_H5_I64, 1, &manifest->shards, CHECKPOINT_LIMIT, arena, &size));
    HAPT_TRY(hapt_h5_read(file, "/shard_checksum", HAPT_H5_I64, 1, &checksums, CHECKPOINT_LIMIT, arena, &checksum));
    HAPT_TRY(
        hapt_h5_read_strings(file, "/parameter_name", INT32_MAX, arena, &manifest->parameters, &manifest->parameter));
    parameters = manifest->parameters;
    HAPT_TRY(hapt_h5_read(file, "/parameter_shard", HAPT_H5_I32, 1, &parameters, INT32_MAX, arena, &shard));
    HAPT_TRY(hapt_plan_read(file, "/plan", arena, &plan));
    manifest->size = size;
    manifest->checksum = checksum;
    manifest->shard = shard;
    bool good = *step >= 0 && manifest->states >= 0 && manifest->states <= 16 && checksums == manifest->shards;
    for (int64_t p = 0; p < parameters; p++)
        good = good && manifest->shard[p] >= 0 && manifest->shard[p] < manifest->shards;
    if (!good) return hapt_fail(HAPT_ERR_INPUT, NULL, "%s is inconsistent", hapt_h5_path(file));
    return checkpoint_read_states(file, manifest->states, parameters, arena, &manifest->own_states);
}

/* Checks that the shard has its parameters and their optimizer states. */
static enum hapt_status check_datasets(struct hapt_h5 *file, const struct manifest *manifest, int shard)
{
    struct hapt_arena arena;
    enum hapt_status status = HAPT_OK;
    hapt_arena_init(&arena);
    for (int64_t p = 0; p < manifest->parameters && status == HAPT_OK; p++) {
        for (int state = -1; manifest->shard[p] == shard && state < manifest->own_states[p] && status == HAPT_OK;
             state++) {
            int dims;
            int64_t shape[HAPT_H5_MAX_DIMS];
            const char *dataset = checkpoint_dataset(&arena, manifest->parameter[p], state);
            status = dataset ? hapt_h5_shape(file, dataset, &dims, shape) : HAPT_ERR_MEMORY;
            hapt_arena_reset(&arena);
        }
    }
    hapt_arena_release(&arena);
    return status;
}

static enum hapt_status verify_shard(const struct manifest *manifest, const char *path, int shard, int64_t *bytes)
{
    struct hapt_h5 *file = NULL;
    struct hapt_h5_content content;
    int64_t size, checksum;
    HAPT_TRY(hapt_h5_open(path, SHARD_FORMAT, SHARD_VERSION, false, &file));
    enum hapt_status status = checkpoint_measure(path, &size, &checksum);
    if (status == HAPT_OK && size != manifest->size[shard])
        status = hapt_fail(HAPT_ERR_INPUT, NULL, "%s has %lld bytes instead of %lld", path, (long long)size,
                           (long long)manifest->size[shard]);
    if (status == HAPT_OK && checksum != manifest->checksum[shard])
        status = hapt_fail(HAPT_ERR_INPUT, NULL, "%s has a wrong checksum", path);
    if (status == HAPT_OK) status = hapt_h5_verify(file, &content);
    if (status == HAPT_OK) status = check_datasets(file, manifest, shard);
    hapt_h5_close(file);
    if (status == HAPT_OK) *bytes += size;
    return status;
}

static enum hapt_status verify(const char *path, struct hapt_arena *arena, struct hapt_checkpoint_content *content)
{
    struct hapt_h5 *file = NULL;
    struct manifest manifest = {0};
    const char *name = hapt_arena_printf(arena, "%s/manifest.h5", path);
    if (!name) return HAPT_ERR_MEMORY;
    HAPT_TRY(hapt_h5_open(name, CHECKPOINT_FORMAT, HAPT_CHECKPOINT_VERSION, false, &file));
    enum hapt_status status = read_manifest(file, arena, &content->step, &manifest);
    hapt_h5_close(file);
    for (int shard = 0; status == HAPT_OK && shard < manifest.shards; shard++) {
        name = checkpoint_shard_path(arena, path, shard);
        status = name ? verify_shard(&manifest, name, shard, &content->bytes) : HAPT_ERR_MEMORY;
    }
    content->shards = manifest.shards;
    content->parameters = manifest.parameters;
    content->states = manifest.states;
    content->version = manifest.version;
    return status;
}

enum hapt_status hapt_checkpoint_verify(const char *path, struct hapt_checkpoint_content *content)
{
    struct hapt_arena arena;
    hapt_arena_init(&arena);
    *content = (struct hapt_checkpoint_content){0};
    const enum hapt_status status = verify(path, &arena, content);
    hapt_arena_release(&arena);
    return status;
}
