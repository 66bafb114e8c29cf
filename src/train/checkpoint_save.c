/*
 * The files of a checkpoint. Every stage writes its shard to a folder under a temporary name; all ranks agree
 * (saving.h); rank 0 writes the manifest and renames the folder. The previous checkpoint is removed only after that. A
 * folder named step-N is always complete: folders are created under names that begin with a dot, and get such a name
 * again before their files are removed. Files that this run did not write are renamed at most.
 */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "checkpoint.h"
#include "hapt/folder.h"
#include "hapt/lock.h"

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

/* A missing file is damage; a system that cannot read it is not. */
static enum hapt_status fail_to_read(const char *path, int error)
{
    const enum hapt_status status = error == ENOENT || error == EISDIR ? HAPT_ERR_INPUT
                                    : error == ENOMEM                  ? HAPT_ERR_MEMORY
                                                                       : HAPT_ERR_IO;
    return hapt_fail(
        status, status == HAPT_ERR_IO ? "check the disk, the rights, and the limit of open files (ulimit -n)" : NULL,
        "%s cannot be read: %s", path, strerror(error));
}

enum hapt_status checkpoint_measure(const char *path, int64_t *size, int64_t *checksum)
{
    enum { BLOCK = 1 << 20 };
    uint64_t hash = 0;
    int64_t total = 0;
    const int descriptor = open(path, O_RDONLY | O_CLOEXEC);
    if (descriptor < 0) return fail_to_read(path, errno);
    unsigned char *block = malloc(BLOCK);
    ssize_t got = -1;
    errno = ENOMEM;
    for (size_t held = 0; block && (got = read(descriptor, block + held, BLOCK - held)) != 0;) {
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) break;
        held += (size_t)got;
        total += got;
        if (held < BLOCK) continue;
        hash = hapt_hash(hash, block, held);
        held = 0;
    }
    const int error = errno;
    if (got == 0 && total % BLOCK > 0) hash = hapt_hash(hash, block, (size_t)(total % BLOCK));
    close(descriptor);
    free(block);
    if (got != 0) return fail_to_read(path, error);
    *size = total;
    *checksum = (int64_t)hash;
    return HAPT_OK;
}

static int newest_first(const void *a, const void *b)
{
    const int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return x < y ? 1 : x > y ? -1 : 0;
}

struct step_list {
    int count;
    int64_t *step;
};

bool checkpoint_is_name(const char *name, int64_t *step)
{
    char *end;
    if (strncmp(name, "step-", 5)) return false;
    errno = 0;
    *step = strtoll(name + 5, &end, 10);
    return end != name + 5 && !*end && *step >= 0 && errno == 0;
}

static bool add_step(void *context, const char *name)
{
    struct step_list *list = context;
    if (checkpoint_is_name(name, &list->step[list->count])) list->count++;
    return list->count < CHECKPOINT_LIMIT;
}

enum hapt_status checkpoint_list(const char *folder, struct hapt_arena *arena, int *count, int64_t **step)
{
    struct step_list list = {0};
    *count = 0;
    HAPT_NEW(list.step, arena, CHECKPOINT_LIMIT + 1);
    HAPT_TRY(hapt_folder_list(folder, add_step, &list));
    qsort(list.step, (size_t)list.count, sizeof *list.step, newest_first);
    *count = list.count;
    *step = list.step;
    return HAPT_OK;
}

/* True for files that hapt writes into a checkpoint, also unfinished ones (longer name): shard-0003.h5, manifest.h5. */
static bool is_ours(const char *name)
{
    const char *rest = name;
    if (strncmp(name, "manifest", 8) == 0) rest = name + 8;
    if (strncmp(name, "shard-", 6) == 0) rest = name + 6 + strspn(name + 6, "0123456789");
    return rest > name + 6 && strncmp(rest, ".h5", 3) == 0 && (rest[3] == '\0' || rest[3] == '.');
}

#define CONSTANT ".constant-" /* names of constant shards of the run at work */

static bool is_unfinished(const char *name)
{
    return strncmp(name, ".partial-", 9) == 0 || strncmp(name, ".removed-", 9) == 0;
}

static bool remove_any(void *context, const char *name)
{
    int64_t step;
    if (checkpoint_is_name(name, &step) || is_unfinished(name)) hapt_folder_remove(context, name, is_ours);
    return true;
}

void checkpoint_remove_all(const char *folder)
{
    char *copy = strdup(folder);
    if (copy && hapt_folder_list(copy, remove_any, copy) == HAPT_OK) rmdir(copy);
    free(copy);
}

static const char *name_of(const char *path)
{
    return strrchr(path, '/') + 1;
}

static char *temporary_path(const struct hapt_checkpoint_writer *writer, int64_t step, struct hapt_arena *arena)
{
    return hapt_arena_printf(arena, "%s/.partial-%08lld", writer->folder, (long long)step);
}

enum hapt_status checkpoint_begin(const struct hapt_checkpoint_writer *writer, int64_t step)
{
    struct hapt_arena scratch;
    hapt_arena_init(&scratch);
    const char *temporary = temporary_path(writer, step, &scratch);
    enum hapt_status status = temporary ? hapt_folder_make(writer->folder) : HAPT_ERR_MEMORY;
    if (status == HAPT_OK &&
        (!hapt_folder_remove(writer->folder, name_of(temporary), is_ours) || mkdir(temporary, 0777) != 0))
        status = hapt_fail(HAPT_ERR_IO, "check the free disk space, and that nothing else writes there",
                           "folder %s cannot be created: %s", temporary, strerror(errno));
    hapt_arena_release(&scratch);
    return status == HAPT_OK ? hapt_folder_sync(writer->folder) : status;
}

static bool remove_unfinished(void *context, const char *name)
{
    if (is_unfinished(name)) hapt_folder_remove(context, name, is_ours);
    if (strncmp(name, CONSTANT, strlen(CONSTANT)) == 0) {
        char path[PATH_MAX];
        if (snprintf(path, sizeof path, "%s/%s", (const char *)context, name) < PATH_MAX) unlink(path);
    }
    return true;
}

enum hapt_status checkpoint_clean(const char *folder, struct hapt_arena *arena)
{
    char *copy = hapt_arena_strdup(arena, folder);
    if (!copy) return HAPT_ERR_MEMORY;
    HAPT_TRY(hapt_folder_make(folder));
    hapt_folder_drop_tries(folder);
    checkpoint_recover(folder, arena);
    return hapt_folder_list(folder, remove_unfinished, copy);
}

struct recovery {
    const char *folder;
    struct hapt_arena *arena;
};

/* Restores the name of a checkpoint that was renamed, or removes it if its successor is complete. */
static bool recover(void *context, const char *name)
{
    const struct recovery *recovery = context;
    struct stat about;
    if (strncmp(name, ".replaced-", 10)) return true;
    const char *from = hapt_arena_printf(recovery->arena, "%s/%s", recovery->folder, name);
    const char *to = hapt_arena_printf(recovery->arena, "%s/step-%s", recovery->folder, name + 10);
    const char *manifest = to ? hapt_arena_printf(recovery->arena, "%s/manifest.h5", to) : NULL;
    if (!from || !manifest) return false;
    if (lstat(to, &about) != 0 && errno == ENOENT) {
        rename(from, to); /* fails on a read-only disk, where it is not needed */
    } else if (stat(manifest, &about) == 0) {
        hapt_folder_remove(recovery->folder, name, is_ours);
    }
    return true;
}

void checkpoint_recover(const char *folder, struct hapt_arena *arena)
{
    struct recovery recovery = {folder, arena};
    if (hapt_folder_list(folder, recover, &recovery) != HAPT_OK) hapt_fail_reset();
}

void checkpoint_set_aside(const char *folder, const char *name, const char *why)
{
    char now[256];
    if (hapt_folder_rename_with_suffix(folder, name, why, now, sizeof now))
        fprintf(stderr, "hapt: warning: %s/%s is kept as %s\n", folder, name, now);
    else
        fprintf(stderr, "hapt: warning: %s/%s cannot be renamed: %s\n", folder, name, strerror(errno));
}

typedef enum hapt_status write_function(void *context, struct hapt_h5 *file);

static enum hapt_status fill_shard(const struct hapt_checkpoint_writer *writer, write_function *write, const char *path,
                                   int64_t step)
{
    struct hapt_h5 *file = NULL;
    enum hapt_status status = path ? hapt_h5_create(path, SHARD_FORMAT, SHARD_VERSION, &file) : HAPT_ERR_MEMORY;
    if (status == HAPT_OK) status = hapt_h5_write_attribute_int(file, "/", "step", step);
    /* call it even after a failure, because the other ranks of the shard wait for this one */
    const enum hapt_status written =
        status == HAPT_OK || writer->shared ? write(writer->context, status == HAPT_OK ? file : NULL) : HAPT_OK;
    if (status == HAPT_OK) status = written;
    return hapt_h5_finish(file, status);
}

/* The path of a shard in the unfinished checkpoint. */
static const char *unfinished_shard(const struct hapt_checkpoint_writer *writer, int shard, int64_t step,
                                    struct hapt_arena *arena)
{
    const char *temporary = temporary_path(writer, step, arena);
    return temporary ? checkpoint_shard_path(arena, temporary, shard) : NULL;
}

static enum hapt_status write_file(const struct hapt_checkpoint_writer *writer, write_function *write, int shard,
                                   int64_t step, struct hapt_arena *arena, int64_t *size, int64_t *checksum)
{
    if (shard < 0) return writer->shared ? write(writer->context, NULL) : HAPT_OK;
    const char *path = unfinished_shard(writer, shard, step, arena);
    HAPT_TRY(fill_shard(writer, write, path, step));
    return checkpoint_measure(path, size, checksum);
}

/* The name of a constant shard beside the checkpoints, which users may move or remove. A job that took the folder over
 * has others, unless the content is the same. */
static void constant_path(const struct hapt_checkpoint_writer *writer, char path[PATH_MAX])
{
    snprintf(path, PATH_MAX, "%s/" CONSTANT "%04d-%016llx.h5", writer->folder, writer->constant_shard,
             (unsigned long long)writer->constant->checksum);
}

static enum hapt_status link_file(const char *from, const char *to)
{
    if (link(from, to) == 0) return HAPT_OK;
    return hapt_fail(HAPT_ERR_IO, "leave the folder of checkpoints to the run; start again with --resume",
                     "%s cannot be linked as %s: %s", from, to, strerror(errno));
}

enum hapt_status checkpoint_keep_constant(const struct hapt_checkpoint_writer *writer, const char *path)
{
    char kept[PATH_MAX];
    constant_path(writer, kept);
    unlink(kept);
    return link_file(path, kept);
}

void checkpoint_drop_constant(const struct hapt_checkpoint_writer *writer)
{
    char kept[PATH_MAX];
    constant_path(writer, kept);
    unlink(kept);
}

/* This rank's constant shard: a link, or a file that later ones link to. */
static enum hapt_status make_constant(const struct hapt_checkpoint_writer *writer, int64_t step,
                                      struct hapt_arena *arena)
{
    struct hapt_checkpoint_constant *constant = writer->constant;
    const int shard = writer->constant_shard;
    char kept[PATH_MAX];
    if (!constant->linked)
        HAPT_TRY(write_file(writer, writer->write_constant, shard, step, arena, &constant->size, &constant->checksum));
    if (shard < 0 || !constant->links) return HAPT_OK;
    const char *path = unfinished_shard(writer, shard, step, arena);
    if (!path) return HAPT_ERR_MEMORY;
    if (!constant->linked) return checkpoint_keep_constant(writer, path);
    constant_path(writer, kept);
    return link_file(kept, path);
}

static enum hapt_status write_constant(const struct hapt_checkpoint_writer *writer, int64_t step,
                                       struct hapt_arena *arena, struct checkpoint_shard *written)
{
    const struct hapt_checkpoint_constant *constant = writer->constant;
    if (!writer->write_constant) return HAPT_OK;
    HAPT_TRY(make_constant(writer, step, arena));
    written->constant = writer->constant_shard;
    written->constant_size = constant->size;
    written->constant_checksum = constant->checksum;
    return HAPT_OK;
}

enum hapt_status checkpoint_write_shard(const struct hapt_checkpoint_writer *writer, int64_t step,
                                        struct hapt_arena *arena, struct checkpoint_shard *written)
{
    *written = (struct checkpoint_shard){.shard = writer->shard, .constant = -1};
    const enum hapt_status status =
        write_file(writer, writer->write_shard, writer->shard, step, arena, &written->size, &written->checksum);
    /* after a failure, too: other ranks may wait for this one */
    const enum hapt_status constant = write_constant(writer, step, arena, written);
    return status == HAPT_OK ? constant : status;
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
    HAPT_TRY(hapt_validation_write(file, "/history", history));
    if (history->count == 0) return HAPT_OK;
    HAPT_TRY(hapt_h5_write(file, "/history/loss", HAPT_H5_F64, 1, shape, history->loss,
                           history->loss_units ? history->loss_units : "nat"));
    HAPT_TRY(hapt_h5_write(file, "/history/gradient_norm", HAPT_H5_F64, 1, shape, history->gradient_norm, ""));
    HAPT_TRY(hapt_h5_write(file, "/history/learning_rate", HAPT_H5_F64, 1, shape, history->learning_rate, ""));
    return hapt_h5_write(file, "/history/step_time", HAPT_H5_F64, 1, shape, history->time_s, "s");
}

static enum hapt_status write_identity(struct hapt_h5 *file, const char *group, const struct hapt_data_identity *data)
{
    HAPT_TRY(hapt_h5_write_attribute_text(file, group, "kind", data->kind));
    HAPT_TRY(hapt_h5_write_attribute_int(file, group, "count", data->count));
    return hapt_h5_write_attribute_int(file, group, "checksum", data->checksum);
}

/* The data, and the position in them. Rows are functions of seed and step, so this is the complete random state. */
static enum hapt_status write_data(struct hapt_h5 *file, const struct hapt_data_identity *data, int64_t step)
{
    HAPT_TRY(write_identity(file, "/data", data));
    HAPT_TRY(hapt_h5_write_attribute_int(file, "/data", "seed", data->seed));
    if (data->epochs) HAPT_TRY(hapt_h5_write_attribute_int(file, "/data", "epochs", 1));
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
    if (writer->parameter_states)
        HAPT_TRY(hapt_h5_write(file, "/parameter_states", HAPT_H5_I32, 1, parameters, writer->parameter_states, ""));
    HAPT_TRY(hapt_h5_write_strings(file, "/option_name", options->count, options->name));
    HAPT_TRY(hapt_h5_write_strings(file, "/option_value", options->count, options->value));
    HAPT_TRY(write_history(file, history));
    if (writer->data) HAPT_TRY(write_data(file, writer->data, step));
    if (writer->held_out && writer->held_out->kind[0]) HAPT_TRY(write_identity(file, "/held_out", writer->held_out));
    if (writer->files) HAPT_TRY(hapt_attachments_write(file, writer->files));
    return hapt_plan_write(file, "/plan", writer->plan);
}

static enum hapt_status write_manifest(const struct hapt_checkpoint_writer *writer, const char *temporary, int64_t step,
                                       const struct hapt_history *history, const struct checkpoint_shard *record,
                                       int ranks, struct hapt_arena *arena)
{
    int64_t *size, *checksum;
    HAPT_NEW(size, arena, writer->shard_count);
    HAPT_NEW(checksum, arena, writer->shard_count);
    for (int r = 0; r < ranks; r++) {
        if (record[r].shard >= 0) {
            size[record[r].shard] = record[r].size;
            checksum[record[r].shard] = record[r].checksum;
        }
        if (record[r].constant >= 0) {
            size[record[r].constant] = record[r].constant_size;
            checksum[record[r].constant] = record[r].constant_checksum;
        }
    }
    const char *path = hapt_arena_printf(arena, "%s/manifest.h5", temporary);
    if (!path) return HAPT_ERR_MEMORY;
    struct hapt_h5 *file = NULL;
    HAPT_TRY(hapt_h5_create(path, CHECKPOINT_FORMAT, writer->parameter_states ? HAPT_CHECKPOINT_VERSION : 1, &file));
    const enum hapt_status status = fill_manifest(file, writer, step, history, size, checksum, arena);
    if (status != HAPT_OK) {
        hapt_h5_close(file);
        return status;
    }
    HAPT_TRY(hapt_h5_commit(file));
    return hapt_folder_sync(temporary);
}

/* Renames the finished folder to `path`. If that name exists, both are exchanged atomically, so that one of them is
 * always complete. File systems without exchange: the old one is renamed first. */
static enum hapt_status rename_into_place(const char *temporary, const char *path, const char *old)
{
    if (renameat2(AT_FDCWD, temporary, AT_FDCWD, path, RENAME_NOREPLACE) == 0) return HAPT_OK;
    if (renameat2(AT_FDCWD, temporary, AT_FDCWD, path, RENAME_EXCHANGE) == 0) return HAPT_OK;
    const bool replaces = rename(path, old) == 0;
    if (rename(temporary, path) == 0) return HAPT_OK;
    const int error = errno;
    if (replaces) rename(old, path);
    return hapt_fail(HAPT_ERR_IO, "check the rights in the output folder", "%s cannot be renamed into place: %s", path,
                     strerror(error));
}

/* Renames a checkpoint before it removes its files, so that a folder named step-N is always complete. */
static void remove_checkpoint(const char *folder, int64_t step, struct hapt_arena *arena)
{
    const char *path = checkpoint_folder(arena, folder, step);
    const char *gone = hapt_arena_printf(arena, "%s/.removed-%08lld", folder, (long long)step);
    if (!path || !gone || !hapt_folder_is(path)) return; /* a link belongs to somebody else */
    hapt_folder_remove(folder, name_of(gone), is_ours);
    if (rename(path, gone) == 0) hapt_folder_remove(folder, name_of(gone), is_ours);
}

/* Mean of ten losses, up to the one computed with the checkpoint's own weights. The step after the checkpoint computes
 * that, so the newest checkpoint has none: NaN. */
static double recent_loss(const struct hapt_history *history, int64_t step)
{
    enum { LOSS_STEPS = 10 };
    const int64_t from = step >= LOSS_STEPS ? step + 1 - LOSS_STEPS : 0;
    double sum = 0;
    if (!history->loss || step < 0 || step >= history->count) return NAN;
    for (int64_t i = from; i <= step; i++) sum += history->loss[i];
    return sum / (double)(step + 1 - from);
}

/* The loss of a checkpoint: of the newest validation up to it, or of its last steps. */
static double loss_of(const struct hapt_history *history, int64_t step)
{
    double loss = NAN;
    if (history->validation_count == 0) return recent_loss(history, step);
    for (int64_t i = 0; i < history->validation_count && history->validation[i].step <= step; i++)
        loss = history->validation[i].loss;
    return loss;
}

/* Steps are at most the newest; the rest is in checkpoint.h. Several checkpoints may follow one validation: the first
 * of them is nearest to it. */
void checkpoint_choose(int count, const int64_t *step, int64_t keep, int64_t every, const struct hapt_history *history,
                       bool *stays)
{
    const bool validated = history->validation_count > 0;
    int best = -1;
    for (int i = 0; i < count; i++) {
        const double loss = loss_of(history, step[i]);
        const double lowest = best < 0 ? INFINITY : loss_of(history, step[best]);
        if (isfinite(loss) && (loss < lowest || (validated && loss == lowest))) best = i;
        stays[i] = i < keep;
        /* true for the first of its interval: the next one in the list is older */
        if (every > 0 && step[i] >= every && (i + 1 == count || step[i + 1] / every < step[i] / every)) stays[i] = true;
    }
    if (best >= 0) stays[best] = true;
}

/* Removes older checkpoints. A newer one is not this run's, because the lock excludes other jobs; it is renamed and
 * kept. */
static enum hapt_status remove_older(const struct hapt_checkpoint_writer *writer, int64_t newest,
                                     const struct hapt_history *history, struct hapt_arena *arena)
{
    int count, own = 0;
    int64_t *step;
    bool *stays;
    HAPT_TRY(checkpoint_list(writer->folder, arena, &count, &step));
    while (own < count && step[own] > newest) own++;
    for (int i = 0; i < own; i++) {
        const char *path = checkpoint_folder(arena, writer->folder, step[i]);
        if (path) checkpoint_set_aside(writer->folder, name_of(path), "foreign");
    }
    HAPT_NEW(stays, arena, count + 1);
    struct hapt_history known = *history;
    if (!hapt_config_text(writer->config, "validation-data")) known.validation_count = 0; /* it would be out of date */
    checkpoint_choose(count - own, step + own, writer->keep, writer->keep_every, &known, stays);
    for (int i = own; i < count; i++)
        if (!stays[i - own]) remove_checkpoint(writer->folder, step[i], arena);
    return HAPT_OK;
}

/* Moves the new checkpoint into place. `old`: the name of the one that it replaces, if there is one. */
static enum hapt_status install_checkpoint(const struct hapt_checkpoint_writer *writer, const char *temporary,
                                           const char *old, int64_t step, struct hapt_arena *arena)
{
    const char *path = checkpoint_folder(arena, writer->folder, step);
    struct stat about;
    if (!path || !old) return HAPT_ERR_MEMORY;
    HAPT_TRY(hapt_lock_check()); /* the folder may belong to another job by now */
    /* Only the checkpoint that this run resumed from may be rewritten. */
    if (lstat(path, &about) == 0 && (step != writer->resumed_step || !S_ISDIR(about.st_mode)))
        checkpoint_set_aside(writer->folder, name_of(path), "foreign");
    hapt_folder_remove(writer->folder, name_of(old), is_ours);
    return rename_into_place(temporary, path, old);
}

enum hapt_status checkpoint_publish(const struct hapt_checkpoint_writer *writer, int64_t step,
                                    const struct hapt_history *history, const struct checkpoint_shard *shard, int ranks,
                                    struct hapt_arena *arena)
{
    const char *temporary = temporary_path(writer, step, arena);
    const char *old = hapt_arena_printf(arena, "%s/.replaced-%08lld", writer->folder, (long long)step);
    if (!temporary) return HAPT_ERR_MEMORY;
    enum hapt_status status = write_manifest(writer, temporary, step, history, shard, ranks, arena);
    if (status == HAPT_OK) status = install_checkpoint(writer, temporary, old, step, arena);
    /* An exchange has left the replaced checkpoint there, which stands until the new one is on the disk. */
    if (status == HAPT_OK) HAPT_TRY(hapt_folder_sync(writer->folder));
    hapt_folder_remove(writer->folder, name_of(temporary), is_ours);
    HAPT_TRY(status);
    hapt_folder_remove(writer->folder, name_of(old), is_ours);
    return remove_older(writer, step, history, arena);
}

void checkpoint_discard(const struct hapt_checkpoint_writer *writer, int64_t step)
{
    char name[64];
    snprintf(name, sizeof name, ".partial-%08lld", (long long)step);
    hapt_folder_remove(writer->folder, name, is_ours);
}
