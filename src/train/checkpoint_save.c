/*
 * Writing a checkpoint: every stage its shard, aside; all agree; rank 0 writes the manifest and renames the folder. The
 * one before is removed only when the new one stands.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "checkpoint.h"
#include "hapt/link.h"

char *checkpoint_shard_path(struct hapt_arena *arena, const char *folder, int shard)
{
    return hapt_arena_printf(arena, "%s/shard-%04d.h5", folder, shard);
}

char *checkpoint_dataset(struct hapt_arena *arena, const char *parameter, int state)
{
    return state < 0 ? hapt_arena_printf(arena, "/parameters/%s", parameter)
                     : hapt_arena_printf(arena, "/state%d/%s", state, parameter);
}

char *checkpoint_folder(struct hapt_arena *arena, const char *folder, int64_t step)
{
    return hapt_arena_printf(arena, "%s/step-%08lld", folder, (long long)step);
}

enum hapt_status checkpoint_measure(const char *path, int64_t *size, int64_t *checksum)
{
    enum { BLOCK = 1 << 20 };
    FILE *file = fopen(path, "rb");
    unsigned char *block = malloc(BLOCK);
    uint64_t hash = 0;
    int64_t total = 0;
    bool good = file && block;
    for (size_t got; good && (got = fread(block, 1, BLOCK, file)) > 0; total += (int64_t)got)
        hash = hapt_hash(hash, block, got);
    good = good && !ferror(file);
    const int error = errno;
    if (file) fclose(file);
    free(block);
    if (!good) return hapt_fail(HAPT_ERR_INPUT, NULL, "%s cannot be read: %s", path, strerror(error));
    *size = total;
    *checksum = (int64_t)hash;
    return HAPT_OK;
}

static int newest_first(const void *a, const void *b)
{
    const int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return x < y ? 1 : x > y ? -1 : 0;
}

enum hapt_status checkpoint_list(const char *folder, struct hapt_arena *arena, int *count, int64_t **step)
{
    *count = 0;
    HAPT_NEW(*step, arena, CHECKPOINT_LIMIT);
    DIR *directory = opendir(folder);
    if (!directory) return HAPT_OK;
    for (struct dirent *entry; (entry = readdir(directory)) && *count < CHECKPOINT_LIMIT;) {
        char *end;
        if (strncmp(entry->d_name, "step-", 5)) continue;
        const long long value = strtoll(entry->d_name + 5, &end, 10);
        if (end != entry->d_name + 5 && !*end && value >= 0) (*step)[(*count)++] = value;
    }
    closedir(directory);
    qsort(*step, (size_t)*count, sizeof **step, newest_first);
    return HAPT_OK;
}

/* Removes a folder of files; what is not there is no failure. */
static void remove_folder(const char *path, struct hapt_arena *arena)
{
    DIR *directory = opendir(path);
    if (!directory) return;
    for (struct dirent *entry; (entry = readdir(directory));) {
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..")) continue;
        const char *file = hapt_arena_printf(arena, "%s/%s", path, entry->d_name);
        if (file) unlink(file);
    }
    closedir(directory);
    rmdir(path);
}

static enum hapt_status sync_folder(const char *path)
{
    const int descriptor = open(path, O_RDONLY | O_DIRECTORY);
    const bool good = descriptor >= 0 && fsync(descriptor) == 0;
    const int error = errno;
    if (descriptor >= 0) close(descriptor);
    return good ? HAPT_OK : hapt_fail(HAPT_ERR_IO, "is the disk full?", "folder %s: %s", path, strerror(error));
}

static enum hapt_status make_folder(const char *path, struct hapt_arena *arena)
{
    char *partial = hapt_arena_strdup(arena, path);
    if (!partial) return HAPT_ERR_MEMORY;
    for (char *slash = strchr(partial + 1, '/');; slash = strchr(slash + 1, '/')) {
        if (slash) *slash = '\0';
        if (mkdir(partial, 0777) && errno != EEXIST)
            return hapt_fail(HAPT_ERR_IO, "choose another --output", "folder %s cannot be made: %s", partial,
                             strerror(errno));
        if (!slash) return HAPT_OK;
        *slash = '/';
    }
}

/* An empty folder to write in; what a run that died left there goes. */
static enum hapt_status open_aside(const char *folder, const char *aside, struct hapt_arena *arena)
{
    HAPT_TRY(make_folder(folder, arena));
    remove_folder(aside, arena);
    return make_folder(aside, arena);
}

struct shard_record {
    int64_t shard, size, checksum;
};

static enum hapt_status write_shard(const struct hapt_checkpoint_writer *writer, const char *aside, int64_t step,
                                    struct hapt_arena *arena, struct shard_record *record)
{
    *record = (struct shard_record){.shard = writer->shard};
    if (writer->shard < 0) return writer->shared ? writer->write_shard(writer->context, NULL) : HAPT_OK;
    struct hapt_h5 *file = NULL;
    const char *path = checkpoint_shard_path(arena, aside, writer->shard);
    if (!path) hapt_die(HAPT_ERR_MEMORY);
    enum hapt_status status = hapt_h5_create(path, SHARD_FORMAT, CHECKPOINT_VERSION, &file);
    if (status == HAPT_OK) status = hapt_h5_write_attribute_int(file, "/", "step", step);
    /* The other ranks of a shard wait for this one, whatever happened. */
    const enum hapt_status written = status == HAPT_OK || writer->shared
                                         ? writer->write_shard(writer->context, status == HAPT_OK ? file : NULL)
                                         : HAPT_OK;
    if (status == HAPT_OK) status = written;
    if (status != HAPT_OK) {
        if (file) hapt_h5_close(file);
        return status;
    }
    HAPT_TRY(hapt_h5_commit(file));
    return checkpoint_measure(path, &record->size, &record->checksum);
}

#define OPTION_LIMIT 1000
struct option_list {
    struct hapt_arena *arena;
    int64_t count;
    const char *name[OPTION_LIMIT], *value[OPTION_LIMIT];
};

static void add_option(void *context, const char *name, const char *value)
{
    struct option_list *list = context;
    HAPT_ASSERT(list->count < OPTION_LIMIT);
    list->name[list->count] = hapt_arena_strdup(list->arena, name);
    list->value[list->count++] = hapt_arena_strdup(list->arena, value ? value : "");
}

static enum hapt_status write_history(struct hapt_h5 *file, const struct hapt_history *history)
{
    const int64_t shape[1] = {history->count};
    if (history->count == 0) return HAPT_OK;
    HAPT_TRY(hapt_h5_write(file, "/history/loss", HAPT_H5_F64, 1, shape, history->loss, "nat"));
    HAPT_TRY(hapt_h5_write(file, "/history/gradient_norm", HAPT_H5_F64, 1, shape, history->gradient_norm, ""));
    HAPT_TRY(hapt_h5_write(file, "/history/learning_rate", HAPT_H5_F64, 1, shape, history->learning_rate, ""));
    return hapt_h5_write(file, "/history/step_time", HAPT_H5_F64, 1, shape, history->time_s, "s");
}

static enum hapt_status fill_manifest(struct hapt_h5 *file, const struct hapt_checkpoint_writer *writer, int64_t step,
                                      const struct hapt_history *history, const int64_t *size, const int64_t *checksum,
                                      struct hapt_arena *arena)
{
    const int64_t shards[1] = {writer->shard_count}, parameters[1] = {writer->parameter_count};
    struct option_list *options;
    HAPT_NEW(options, arena, 1);
    options->arena = arena;
    hapt_config_visit_training(writer->config, add_option, options);
    HAPT_TRY(hapt_h5_write_attribute_int(file, "/", "step", step));
    HAPT_TRY(hapt_h5_write_attribute_int(file, "/", "state_count", writer->state_count));
    HAPT_TRY(hapt_h5_write(file, "/shard_size", HAPT_H5_I64, 1, shards, size, "byte"));
    HAPT_TRY(hapt_h5_write(file, "/shard_checksum", HAPT_H5_I64, 1, shards, checksum, ""));
    HAPT_TRY(hapt_h5_write_strings(file, "/parameter_name", writer->parameter_count, writer->parameter));
    HAPT_TRY(hapt_h5_write(file, "/parameter_shard", HAPT_H5_I32, 1, parameters, writer->parameter_shard, ""));
    HAPT_TRY(hapt_h5_write_strings(file, "/option_name", options->count, options->name));
    HAPT_TRY(hapt_h5_write_strings(file, "/option_value", options->count, options->value));
    HAPT_TRY(write_history(file, history));
    return hapt_plan_write(file, "/plan", writer->plan);
}

static enum hapt_status write_manifest(const struct hapt_checkpoint_writer *writer, const char *aside, int64_t step,
                                       const struct hapt_history *history, const struct shard_record *record, int ranks,
                                       struct hapt_arena *arena)
{
    int64_t *size, *checksum;
    HAPT_NEW(size, arena, writer->shard_count);
    HAPT_NEW(checksum, arena, writer->shard_count);
    for (int r = 0; r < ranks; r++) {
        if (record[r].shard < 0) continue;
        size[record[r].shard] = record[r].size;
        checksum[record[r].shard] = record[r].checksum;
    }
    const char *path = hapt_arena_printf(arena, "%s/manifest.h5", aside);
    if (!path) return HAPT_ERR_MEMORY;
    struct hapt_h5 *file = NULL;
    HAPT_TRY(hapt_h5_create(path, CHECKPOINT_FORMAT, CHECKPOINT_VERSION, &file));
    const enum hapt_status status = fill_manifest(file, writer, step, history, size, checksum, arena);
    if (status != HAPT_OK) {
        hapt_h5_close(file);
        return status;
    }
    HAPT_TRY(hapt_h5_commit(file));
    return sync_folder(aside);
}

/* The finished folder takes its name; what stood there changes places with it in one step, so that at every moment one of
 * them is whole. File systems that cannot exchange see the old one moved aside first. */
static enum hapt_status take_place(const char *aside, const char *path, const char *old)
{
    if (rename(aside, path) == 0) return HAPT_OK;
    if (renameat2(AT_FDCWD, aside, AT_FDCWD, path, RENAME_EXCHANGE) == 0) return HAPT_OK;
    const bool replaces = rename(path, old) == 0;
    if (rename(aside, path) == 0) return HAPT_OK;
    const int error = errno;
    if (replaces) rename(old, path);
    return hapt_fail(HAPT_ERR_IO, "check the rights in the output folder", "%s cannot be put in place: %s", path,
                     strerror(error));
}

/* The new one in place first; then those of an abandoned future and the oldest go. */
static enum hapt_status put_in_place(const struct hapt_checkpoint_writer *writer, const char *aside, int64_t step,
                                     struct hapt_arena *arena)
{
    const char *path = checkpoint_folder(arena, writer->folder, step);
    const char *old = hapt_arena_printf(arena, "%s/.replaced", writer->folder);
    if (!path || !old) return HAPT_ERR_MEMORY;
    remove_folder(old, arena);
    HAPT_TRY(take_place(aside, path, old));
    HAPT_TRY(sync_folder(writer->folder));
    remove_folder(aside, arena);
    remove_folder(old, arena);
    int count, kept = 0;
    int64_t *steps;
    HAPT_TRY(checkpoint_list(writer->folder, arena, &count, &steps));
    for (int i = 0; i < count; i++) {
        if (steps[i] <= step && kept++ < writer->keep) continue;
        const char *gone = checkpoint_folder(arena, writer->folder, steps[i]);
        if (gone) remove_folder(gone, arena);
    }
    return HAPT_OK;
}

static enum hapt_status save(const struct hapt_env *env, const struct hapt_checkpoint_writer *writer, int64_t step,
                             const struct hapt_history *history, struct hapt_arena *scratch)
{
    const char *aside = hapt_arena_printf(scratch, "%s/.partial", writer->folder);
    struct shard_record mine, *all = hapt_arena_alloc(scratch, (size_t)env->world_size, sizeof *all);
    char what[64];
    snprintf(what, sizeof what, "checkpoint of step %lld", (long long)step);
    enum hapt_status status = aside && all ? HAPT_OK : HAPT_ERR_MEMORY;
    if (status == HAPT_OK && env->world_rank == 0) status = open_aside(writer->folder, aside, scratch);
    HAPT_TRY(hapt_link_agree(env->world, what, writer->patience_s, status));
    status = write_shard(writer, aside, step, scratch, &mine);
    HAPT_TRY(hapt_link_agree(env->world, what, writer->patience_s, status));
    status = hapt_link_all_gather(env->world, what, writer->patience_s, &mine, sizeof mine, all);
    if (status != HAPT_OK) hapt_die(status);
    if (env->world_rank == 0) {
        status = write_manifest(writer, aside, step, history, all, env->world_size, scratch);
        if (status == HAPT_OK) status = put_in_place(writer, aside, step, scratch);
    }
    return hapt_link_agree(env->world, what, writer->patience_s, status);
}

enum hapt_status hapt_checkpoint_save(const struct hapt_env *env, const struct hapt_checkpoint_writer *writer,
                                      int64_t step, const struct hapt_history *history, struct hapt_arena *arena,
                                      const char **path)
{
    struct hapt_arena scratch;
    hapt_arena_init(&scratch);
    const enum hapt_status status = save(env, writer, step, history, &scratch);
    if (status == HAPT_OK) *path = checkpoint_folder(arena, writer->folder, step);
    hapt_arena_release(&scratch);
    return status;
}
