/*
 * Writing a checkpoint: every stage its shard, aside; all agree; rank 0 writes the manifest and renames the folder. The
 * one before is removed only when the new one stands. What has a name step-N is whole: folders are made under names that
 * begin with a dot, and take such a name again before they are emptied.
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

/* Also what is above it. A new folder is only there for good when the one above it has been synced. */
static enum hapt_status make_folder(const char *path, struct hapt_arena *arena)
{
    char *partial = hapt_arena_strdup(arena, path);
    if (!partial) return HAPT_ERR_MEMORY;
    for (char *slash = strchr(partial + 1, '/'), *above = NULL;; above = slash, slash = strchr(slash + 1, '/')) {
        if (slash) *slash = '\0';
        const bool made = mkdir(partial, 0777) == 0;
        if (!made && errno != EEXIST)
            return hapt_fail(HAPT_ERR_IO, "choose another --output", "folder %s cannot be made: %s", partial,
                             strerror(errno));
        if (made) {
            if (above) *above = '\0';
            HAPT_TRY(sync_folder(above == partial ? "/" : above ? partial : partial[0] == '/' ? "/" : "."));
            if (above) *above = '/';
        }
        if (!slash) return HAPT_OK;
        *slash = '/';
    }
}

static char *aside_of(const struct hapt_checkpoint_writer *writer, int64_t step, struct hapt_arena *arena)
{
    return hapt_arena_printf(arena, "%s/.partial-%08lld", writer->folder, (long long)step);
}

/* An empty folder to write in; what a run that died left there goes. */
static enum hapt_status open_aside(const char *folder, const char *aside, struct hapt_arena *arena)
{
    HAPT_TRY(make_folder(folder, arena));
    remove_folder(aside, arena);
    return make_folder(aside, arena);
}

enum hapt_status checkpoint_clean(const char *folder, struct hapt_arena *arena)
{
    HAPT_TRY(make_folder(folder, arena));
    DIR *directory = opendir(folder);
    if (!directory) return hapt_fail(HAPT_ERR_IO, "check permissions", "folder %s cannot be read: %s", folder, strerror(errno));
    for (struct dirent *entry; (entry = readdir(directory));) {
        const bool ours = !strncmp(entry->d_name, ".partial-", 9) || !strncmp(entry->d_name, ".removed-", 9) ||
                          !strncmp(entry->d_name, ".replaced-", 10);
        const char *path = ours ? hapt_arena_printf(arena, "%s/%s", folder, entry->d_name) : NULL;
        if (path) remove_folder(path, arena);
    }
    closedir(directory);
    return HAPT_OK;
}

void checkpoint_recover(const char *folder, struct hapt_arena *arena)
{
    DIR *directory = opendir(folder);
    if (!directory) return;
    for (struct dirent *entry; (entry = readdir(directory));) {
        struct stat about;
        if (strncmp(entry->d_name, ".replaced-", 10)) continue;
        const char *from = hapt_arena_printf(arena, "%s/%s", folder, entry->d_name);
        const char *to = hapt_arena_printf(arena, "%s/step-%s", folder, entry->d_name + 10);
        if (from && to && stat(to, &about) != 0 && rename(from, to) != 0) continue; /* read-only: then it is not needed either */
    }
    closedir(directory);
}

static enum hapt_status fill_shard(const struct hapt_checkpoint_writer *writer, const char *path, int64_t step)
{
    struct hapt_h5 *file = NULL;
    enum hapt_status status = path ? hapt_h5_create(path, SHARD_FORMAT, CHECKPOINT_VERSION, &file) : HAPT_ERR_MEMORY;
    if (status == HAPT_OK) status = hapt_h5_write_attribute_int(file, "/", "step", step);
    /* The other ranks of a shard wait for this one, whatever happened. */
    const enum hapt_status written = status == HAPT_OK || writer->shared
                                         ? writer->write_shard(writer->context, status == HAPT_OK ? file : NULL)
                                         : HAPT_OK;
    if (status == HAPT_OK) status = written;
    if (status == HAPT_OK) return hapt_h5_commit(file);
    hapt_h5_close(file);
    return status;
}

enum hapt_status checkpoint_write_shard(const struct hapt_checkpoint_writer *writer, int64_t step, struct hapt_arena *arena,
                                        struct checkpoint_shard *written)
{
    *written = (struct checkpoint_shard){.shard = writer->shard};
    if (writer->shard < 0) return writer->shared ? writer->write_shard(writer->context, NULL) : HAPT_OK;
    const char *aside = aside_of(writer, step, arena);
    const char *path = aside ? checkpoint_shard_path(arena, aside, writer->shard) : NULL;
    HAPT_TRY(fill_shard(writer, path, step));
    return checkpoint_measure(path, &written->size, &written->checksum);
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

/* Which data, and where in them the run stands: rows are functions of seed and step, so these are the whole state of what is random. */
static enum hapt_status write_data(struct hapt_h5 *file, const struct hapt_data_identity *data, int64_t step)
{
    HAPT_TRY(hapt_h5_write_attribute_text(file, "/data", "kind", data->kind));
    HAPT_TRY(hapt_h5_write_attribute_int(file, "/data", "count", data->count));
    HAPT_TRY(hapt_h5_write_attribute_int(file, "/data", "checksum", data->checksum));
    HAPT_TRY(hapt_h5_write_attribute_int(file, "/data", "seed", data->seed));
    return hapt_h5_write_attribute_int(file, "/data", "next_step", step);
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
    HAPT_TRY(hapt_h5_write_attribute_int(file, "/", "sampled", writer->sampled));
    HAPT_TRY(hapt_h5_write(file, "/shard_size", HAPT_H5_I64, 1, shards, size, "byte"));
    HAPT_TRY(hapt_h5_write(file, "/shard_checksum", HAPT_H5_I64, 1, shards, checksum, ""));
    HAPT_TRY(hapt_h5_write_strings(file, "/parameter_name", writer->parameter_count, writer->parameter));
    HAPT_TRY(hapt_h5_write(file, "/parameter_shard", HAPT_H5_I32, 1, parameters, writer->parameter_shard, ""));
    HAPT_TRY(hapt_h5_write_strings(file, "/option_name", options->count, options->name));
    HAPT_TRY(hapt_h5_write_strings(file, "/option_value", options->count, options->value));
    HAPT_TRY(write_history(file, history));
    if (writer->data) HAPT_TRY(write_data(file, writer->data, step));
    return hapt_plan_write(file, "/plan", writer->plan);
}

static enum hapt_status write_manifest(const struct hapt_checkpoint_writer *writer, const char *aside, int64_t step,
                                       const struct hapt_history *history, const struct checkpoint_shard *record, int ranks,
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
static enum hapt_status take_place(const char *aside, const char *path, const char *old, struct hapt_arena *arena)
{
    if (rename(aside, path) == 0) return HAPT_OK;
    if (renameat2(AT_FDCWD, aside, AT_FDCWD, path, RENAME_EXCHANGE) == 0) return HAPT_OK;
    const bool replaces = rename(path, old) == 0;
    if (rename(aside, path) == 0) return HAPT_OK;
    const int error = errno;
    if (replaces) rename(old, path);
    remove_folder(aside, arena);
    return hapt_fail(HAPT_ERR_IO, "check the rights in the output folder", "%s cannot be put in place: %s", path,
                     strerror(error));
}

/* A checkpoint loses its name at once and its files behind that: what a name stands for is whole. */
static void remove_checkpoint(const char *folder, int64_t step, struct hapt_arena *arena)
{
    const char *path = checkpoint_folder(arena, folder, step);
    const char *gone = hapt_arena_printf(arena, "%s/.removed-%08lld", folder, (long long)step);
    if (!path || !gone) return;
    remove_folder(gone, arena);
    remove_folder(rename(path, gone) == 0 ? gone : path, arena);
}

/* The new one in place first; then those of an abandoned future and the oldest go. */
static enum hapt_status put_in_place(const struct hapt_checkpoint_writer *writer, const char *aside, int64_t step,
                                     struct hapt_arena *arena)
{
    const char *path = checkpoint_folder(arena, writer->folder, step);
    const char *old = hapt_arena_printf(arena, "%s/.replaced-%08lld", writer->folder, (long long)step);
    if (!path || !old) return HAPT_ERR_MEMORY;
    remove_folder(old, arena);
    HAPT_TRY(take_place(aside, path, old, arena));
    HAPT_TRY(sync_folder(writer->folder));
    remove_folder(aside, arena);
    remove_folder(old, arena);
    int count, kept = 0;
    int64_t *steps;
    HAPT_TRY(checkpoint_list(writer->folder, arena, &count, &steps));
    for (int i = 0; i < count; i++)
        if (steps[i] > step || kept++ >= writer->keep) remove_checkpoint(writer->folder, steps[i], arena);
    return HAPT_OK;
}

enum hapt_status checkpoint_publish(const struct hapt_checkpoint_writer *writer, int64_t step, const struct hapt_history *history,
                                    const struct checkpoint_shard *shard, int ranks, struct hapt_arena *arena)
{
    const char *aside = aside_of(writer, step, arena);
    if (!aside) return HAPT_ERR_MEMORY;
    const enum hapt_status status = write_manifest(writer, aside, step, history, shard, ranks, arena);
    if (status != HAPT_OK) remove_folder(aside, arena);
    return status == HAPT_OK ? put_in_place(writer, aside, step, arena) : status;
}

void checkpoint_discard(const struct hapt_checkpoint_writer *writer, int64_t step, struct hapt_arena *arena)
{
    const char *aside = aside_of(writer, step, arena);
    if (aside) remove_folder(aside, arena);
}

static enum hapt_status save(const struct hapt_env *env, const struct hapt_checkpoint_writer *writer, int64_t step,
                             const struct hapt_history *history, struct hapt_arena *scratch)
{
    const char *aside = aside_of(writer, step, scratch);
    struct checkpoint_shard mine, *all = hapt_arena_alloc(scratch, (size_t)env->world_size, sizeof *all);
    char what[64];
    snprintf(what, sizeof what, "checkpoint of step %lld", (long long)step);
    enum hapt_status status = aside && all ? HAPT_OK : HAPT_ERR_MEMORY;
    if (status == HAPT_OK && env->world_rank == 0) status = open_aside(writer->folder, aside, scratch);
    HAPT_TRY(hapt_link_agree(env->world, what, writer->patience_s, status));
    status = hapt_link_agree(env->world, what, writer->patience_s, checkpoint_write_shard(writer, step, scratch, &mine));
    if (status != HAPT_OK && env->world_rank == 0) checkpoint_discard(writer, step, scratch); /* a full disk has its room again */
    HAPT_TRY(status);
    status = hapt_link_all_gather(env->world, what, writer->patience_s, &mine, sizeof mine, all);
    if (status != HAPT_OK) hapt_die(status);
    if (env->world_rank == 0) status = checkpoint_publish(writer, step, history, all, env->world_size, scratch);
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
