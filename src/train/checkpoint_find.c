/* Reads checkpoints: finds the newest one whose checksums are all correct. */
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "checkpoint.h"
#include "hapt/progress.h"

static enum hapt_status read_history(struct hapt_h5 *file, int64_t step, struct hapt_arena *arena,
                                     struct hapt_history *history)
{
    HAPT_TRY(hapt_validation_read(file, "/history", step, arena, history));
    if (step == 0) return HAPT_OK;
    const struct {
        const char *name;
        double **to;
    } part[] = {{"/history/loss", &history->loss},
                {"/history/gradient_norm", &history->gradient_norm},
                {"/history/learning_rate", &history->learning_rate},
                {"/history/step_time", &history->time_s}};
    for (int i = 0; i < 4; i++) {
        int64_t shape[1] = {step};
        HAPT_TRY(hapt_h5_read(file, part[i].name, HAPT_H5_F64, 1, shape, step, arena, (void **)part[i].to));
    }
    history->count = history->capacity = step;
    return HAPT_OK;
}

/* Without the group: kind "". */
static enum hapt_status read_identity(struct hapt_h5 *file, const char *group, struct hapt_arena *arena,
                                      struct hapt_data_identity *data)
{
    const char *kind = "";
    if (!hapt_h5_exists(file, group)) return HAPT_OK;
    HAPT_TRY(hapt_h5_read_attribute_text(file, group, "kind", arena, &kind));
    snprintf(data->kind, sizeof data->kind, "%s", kind);
    HAPT_TRY(hapt_h5_read_attribute_int(file, group, "count", &data->count));
    return hapt_h5_read_attribute_int(file, group, "checksum", &data->checksum);
}

static enum hapt_status read_data(struct hapt_h5 *file, struct hapt_arena *arena, struct hapt_data_identity *data)
{
    HAPT_TRY(read_identity(file, "/data", arena, data));
    if (!hapt_h5_exists(file, "/data")) return HAPT_OK;
    int64_t epochs = 0; /* files of earlier versions have none */
    if (hapt_h5_has_attribute(file, "/data", "epochs"))
        HAPT_TRY(hapt_h5_read_attribute_int(file, "/data", "epochs", &epochs));
    data->epochs = epochs != 0;
    return hapt_h5_read_attribute_int(file, "/data", "seed", &data->seed);
}

enum hapt_status checkpoint_read_states(struct hapt_h5 *file, int64_t states, int64_t parameters,
                                        struct hapt_arena *arena, int32_t **own)
{
    if (!hapt_h5_exists(file, "/parameter_states")) {
        HAPT_NEW(*own, arena, parameters);
        for (int64_t p = 0; p < parameters; p++) (*own)[p] = (int32_t)states;
        return HAPT_OK;
    }
    HAPT_TRY(hapt_h5_read(file, "/parameter_states", HAPT_H5_I32, 1, &parameters, parameters, arena, (void **)own));
    for (int64_t p = 0; p < parameters; p++)
        if ((*own)[p] != 0 && (*own)[p] != states)
            return hapt_fail(HAPT_ERR_INPUT, NULL, "%s is inconsistent", hapt_h5_path(file));
    return HAPT_OK;
}

static enum hapt_status read_tables(struct hapt_h5 *file, struct hapt_arena *arena, struct hapt_checkpoint *checkpoint)
{
    int64_t shards[1] = {-1}, states = 0, values = 0, sampled = 0;
    HAPT_TRY(
        hapt_h5_read(file, "/shard_size", HAPT_H5_I64, 1, shards, CHECKPOINT_LIMIT, arena, (void **)&checkpoint->size));
    HAPT_TRY(hapt_h5_read(file, "/shard_checksum", HAPT_H5_I64, 1, shards, CHECKPOINT_LIMIT, arena,
                          (void **)&checkpoint->checksum));
    checkpoint->shard_count = (int)shards[0];
    HAPT_TRY(hapt_h5_read_attribute_int(file, "/", "state_count", &states));
    if (hapt_h5_has_attribute(file, "/", "sampled"))
        HAPT_TRY(hapt_h5_read_attribute_int(file, "/", "sampled", &sampled));
    checkpoint->sampled = sampled != 0;
    HAPT_TRY(hapt_h5_read_strings(file, "/parameter_name", 10000000, arena, &checkpoint->parameter_count,
                                  &checkpoint->parameter));
    int64_t parameters[1] = {checkpoint->parameter_count};
    HAPT_TRY(hapt_h5_read(file, "/parameter_shard", HAPT_H5_I32, 1, parameters, parameters[0], arena,
                          (void **)&checkpoint->parameter_shard));
    HAPT_TRY(hapt_h5_read_strings(file, "/option_name", CHECKPOINT_LIMIT, arena, &checkpoint->option_count,
                                  &checkpoint->option));
    HAPT_TRY(hapt_h5_read_strings(file, "/option_value", CHECKPOINT_LIMIT, arena, &values, &checkpoint->value));
    bool good = values == checkpoint->option_count && states >= 0 && states <= 2;
    for (int64_t p = 0; p < checkpoint->parameter_count; p++)
        good = good && checkpoint->parameter_shard[p] >= 0 && checkpoint->parameter_shard[p] < checkpoint->shard_count;
    if (!good) return hapt_fail(HAPT_ERR_INPUT, NULL, "%s is inconsistent", hapt_h5_path(file));
    checkpoint->state_count = (int)states;
    return checkpoint_read_states(file, states, checkpoint->parameter_count, arena, &checkpoint->parameter_states);
}

static enum hapt_status read_manifest(const char *path, struct hapt_arena *arena, struct hapt_checkpoint **checkpoint)
{
    struct hapt_checkpoint *made;
    HAPT_NEW(made, arena, 1);
    made->path = hapt_arena_strdup(arena, path);
    const char *manifest = hapt_arena_printf(arena, "%s/manifest.h5", path);
    if (!made->path || !manifest) return HAPT_ERR_MEMORY;
    struct hapt_h5 *file = NULL;
    HAPT_TRY(hapt_h5_open(manifest, CHECKPOINT_FORMAT, HAPT_CHECKPOINT_VERSION, false, &file));
    enum hapt_status status = hapt_h5_read_attribute_int(file, "/", "step", &made->step);
    if (status == HAPT_OK && made->step < 0)
        status = hapt_fail(HAPT_ERR_INPUT, NULL, "%s is inconsistent", hapt_h5_path(file));
    if (status == HAPT_OK) status = read_tables(file, arena, made);
    if (status == HAPT_OK) status = read_history(file, made->step, arena, &made->history);
    if (status == HAPT_OK) status = read_data(file, arena, &made->data);
    if (status == HAPT_OK) status = read_identity(file, "/held_out", arena, &made->held_out);
    if (status == HAPT_OK) status = hapt_plan_read(file, "/plan", arena, &made->plan);
    hapt_h5_close(file);
    if (status == HAPT_OK) *checkpoint = made;
    return status;
}

static enum hapt_status verify_shard(const struct hapt_checkpoint *checkpoint, int shard, struct hapt_arena *arena)
{
    int64_t size, checksum;
    const char *path = checkpoint_shard_path(arena, checkpoint->path, shard);
    if (!path) return HAPT_ERR_MEMORY;
    HAPT_TRY(checkpoint_measure(path, &size, &checksum));
    if (size != checkpoint->size[shard])
        return hapt_fail(HAPT_ERR_INPUT, NULL, "%s has %lld bytes instead of %lld", path, (long long)size,
                         (long long)checkpoint->size[shard]);
    if (checksum != checkpoint->checksum[shard])
        return hapt_fail(HAPT_ERR_INPUT, NULL, "%s has a wrong checksum", path);
    return HAPT_OK;
}

/* One rank's finding. Only wrong bytes on the disk count as damage. A failing system or a newer version must not lead
 * to older weights. */
enum finding { FOUND_GOOD, FOUND_DAMAGED, FOUND_UNREADABLE };

static enum finding finding_of(enum hapt_status status)
{
    const enum hapt_h5_fault fault = hapt_h5_last_fault();
    if (status == HAPT_OK) return FOUND_GOOD;
    return status == HAPT_ERR_INPUT && fault != HAPT_H5_FAULT_NEWER && fault != HAPT_H5_FAULT_SYSTEM ? FOUND_DAMAGED
                                                                                                     : FOUND_UNREADABLE;
}

/* Agrees on the worst finding; rank 0 reports damage. HAPT_OK with *good false: try the next checkpoint. */
static enum hapt_status agree_on_finding(const struct hapt_env *env, enum hapt_status status, const char *path,
                                         bool *good)
{
    char message[512] = "";
    const int mine = (int)finding_of(status);
    int worst = mine, vote = mine == FOUND_DAMAGED ? env->world_rank : env->world_size, lowest = vote;
    HAPT_MPI(MPI_Allreduce(&mine, &worst, 1, MPI_INT, MPI_MAX, env->world));
    *good = worst == FOUND_GOOD;
    if (*good) return HAPT_OK;
    if (worst == FOUND_UNREADABLE) {
        if (mine != FOUND_UNREADABLE) hapt_fail_reset();
        return hapt_env_agree(env->world, mine == FOUND_UNREADABLE ? status : HAPT_OK);
    }
    HAPT_MPI(MPI_Allreduce(&vote, &lowest, 1, MPI_INT, MPI_MIN, env->world));
    if (lowest == env->world_rank) snprintf(message, sizeof message, "%s", hapt_fail_message());
    HAPT_MPI(MPI_Bcast(message, (int)sizeof message, MPI_CHAR, lowest, env->world));
    hapt_warn(env, "checkpoint %s is damaged and skipped: %s\n", path, message);
    hapt_fail_reset();
    return HAPT_OK;
}

static bool exists(const char *path)
{
    struct stat about;
    return path && stat(path, &about) == 0;
}

static bool is_file(const char *path)
{
    struct stat about;
    return stat(path, &about) == 0 && !S_ISDIR(about.st_mode);
}

/* Folders to try, newest first; rank 0 lists and broadcasts them. */
static enum hapt_status list_candidates(const struct hapt_env *env, const char *path, struct hapt_arena *arena,
                                        int *count, const char ***candidate)
{
    int found[2] = {0, 0}; /* count; 1: inside path/checkpoints */
    int64_t *step = NULL;
    enum hapt_status status = HAPT_OK;
    const char *inner = hapt_arena_printf(arena, "%s/checkpoints", path);
    if (env->world_rank == 0 && !exists(hapt_arena_printf(arena, "%s/manifest.h5", path))) {
        const char *hint =
            "give the folder of a run with checkpoints, or of one checkpoint; to start anew, leave out --resume";
        found[1] = exists(inner);
        checkpoint_recover(found[1] ? inner : path, arena);
        /* "/." because reading may follow a link */
        const char *listed = hapt_arena_printf(arena, "%s/.", found[1] ? inner : path);
        status = is_file(path) ? hapt_fail(HAPT_ERR_INPUT, hint, "%s is a file; a checkpoint is a folder", path)
                 : listed      ? checkpoint_list(listed, arena, &found[0], &step)
                               : HAPT_ERR_MEMORY;
        if (status == HAPT_OK && found[0] == 0)
            status = hapt_fail(HAPT_ERR_INPUT, hint, "there is no checkpoint in %s", path);
    }
    HAPT_TRY(hapt_env_agree(env->world, status));
    MPI_Bcast(found, 2, MPI_INT, 0, env->world);
    *count = found[0] > 0 ? found[0] : 1;
    *candidate = hapt_arena_alloc(arena, (size_t)*count, sizeof **candidate);
    if (env->world_rank != 0 && found[0] > 0) step = hapt_arena_alloc(arena, (size_t)found[0], sizeof *step);
    HAPT_TRY(hapt_env_agree(env->world, *candidate && inner && (step || found[0] == 0) ? HAPT_OK : HAPT_ERR_MEMORY));
    (*candidate)[0] = path;
    if (found[0] == 0) return HAPT_OK;
    HAPT_MPI(MPI_Bcast(step, found[0], MPI_INT64_T, 0, env->world));
    bool complete = true;
    for (int i = 0; i < *count; i++) {
        (*candidate)[i] = checkpoint_folder(arena, found[1] ? inner : path, step[i]);
        complete = complete && (*candidate)[i];
    }
    return hapt_env_agree(env->world, complete ? HAPT_OK : HAPT_ERR_MEMORY);
}

bool checkpoint_is_sampled(const char *folder, int64_t step, struct hapt_arena *arena)
{
    const char *path = checkpoint_folder(arena, folder, step),
               *manifest = path ? hapt_arena_printf(arena, "%s/manifest.h5", path) : NULL;
    struct hapt_h5 *file = NULL;
    int64_t sampled = 0;
    if (!manifest || hapt_h5_open(manifest, CHECKPOINT_FORMAT, HAPT_CHECKPOINT_VERSION, false, &file) != HAPT_OK ||
        !hapt_h5_has_attribute(file, "/", "sampled") ||
        hapt_h5_read_attribute_int(file, "/", "sampled", &sampled) != HAPT_OK)
        sampled = 0;
    hapt_h5_close(file);
    hapt_fail_reset();
    return sampled != 0;
}

enum hapt_status checkpoint_any(const struct hapt_env *env, const char *run, struct hapt_arena *arena, bool *any)
{
    int count = 0;
    int64_t *step = NULL;
    enum hapt_status status = HAPT_OK;
    if (env->world_rank == 0) {
        const char *folder = hapt_arena_printf(arena, "%s/checkpoints", run);
        if (folder) checkpoint_recover(folder, arena);
        status = folder ? checkpoint_list(folder, arena, &count, &step) : HAPT_ERR_MEMORY;
    }
    HAPT_TRY(hapt_env_agree(env->world, status));
    MPI_Bcast(&count, 1, MPI_INT, 0, env->world);
    *any = count > 0;
    return HAPT_OK;
}

/* Verifies this rank's share of the candidate. */
static enum hapt_status verify(const struct hapt_env *env, const char *candidate, struct hapt_arena *arena,
                               struct hapt_checkpoint **read)
{
    enum hapt_status status = read_manifest(candidate, arena, read);
    if (status == HAPT_OK) hapt_progress_expect(((*read)->shard_count + env->world_size - 1) / env->world_size);
    for (int s = env->world_rank; status == HAPT_OK && s < (*read)->shard_count;
         s += env->world_size, hapt_progress_advance(1))
        status = verify_shard(*read, s, arena);
    return status;
}

enum hapt_status hapt_checkpoint_find(const struct hapt_env *env, const char *path, struct hapt_arena *arena,
                                      struct hapt_checkpoint **checkpoint)
{
    int count = 0;
    const char **candidate = NULL;
    HAPT_TRY(list_candidates(env, path, arena, &count, &candidate));
    for (int i = 0; i < count; i++) {
        struct hapt_checkpoint *read = NULL;
        struct hapt_progress progress;
        bool good = false;
        hapt_progress_init(&progress, env, "verifying checkpoints", 0);
        const enum hapt_status found =
            agree_on_finding(env, verify(env, candidate[i], arena, &read), candidate[i], &good);
        hapt_progress_release(&progress);
        HAPT_TRY(found);
        if (!good) continue;
        read->skipped_count = i;
        read->skipped = candidate;
        *checkpoint = read;
        return HAPT_OK;
    }
    return hapt_env_agree(env->world,
                          hapt_fail(HAPT_ERR_INPUT, "give the folder of another run; to start anew, leave out --resume",
                                    "no checkpoint in %s is intact", path));
}

enum hapt_status hapt_checkpoint_defaults(const struct hapt_checkpoint *checkpoint, struct hapt_config *config)
{
    for (int64_t i = 0; i < checkpoint->option_count; i++)
        if (checkpoint->value[i][0]) HAPT_TRY(hapt_config_default(config, checkpoint->option[i], checkpoint->value[i]));
    return HAPT_OK;
}

/* -1: absent */
static int64_t find_parameter(const struct hapt_checkpoint *checkpoint, const char *parameter)
{
    int64_t p = 0;
    while (p < checkpoint->parameter_count && strcmp(checkpoint->parameter[p], parameter) != 0) p++;
    return p < checkpoint->parameter_count ? p : -1;
}

static int shard_of(const struct hapt_checkpoint *checkpoint, const char *parameter)
{
    const int64_t p = find_parameter(checkpoint, parameter);
    return p < 0 ? -1 : checkpoint->parameter_shard[p];
}

/* rows NULL: all. */
static enum hapt_status read_tensor(struct hapt_h5 *file, const char *dataset, int64_t elements,
                                    const struct hapt_rows *rows, float *value)
{
    int dims = 0;
    int64_t shape[HAPT_H5_MAX_DIMS], found = 1;
    HAPT_TRY(hapt_h5_shape(file, dataset, &dims, shape));
    for (int d = 0; d < dims; d++) found *= shape[d];
    if (dims < 1 || found != elements)
        return hapt_fail(HAPT_ERR_INPUT, "resume with the model the checkpoint was made with",
                         "%s: %s has %lld elements, the model's has %lld", hapt_h5_path(file), dataset,
                         (long long)found, (long long)elements);
    if (rows && rows->total != shape[0])
        return hapt_fail(HAPT_ERR_INPUT, "resume with the model the checkpoint was made with",
                         "%s: %s has %lld rows, the model's has %lld", hapt_h5_path(file), dataset, (long long)shape[0],
                         (long long)rows->total);
    HAPT_TRY(hapt_h5_check_written(file, dataset));
    return hapt_h5_read_rows(file, dataset, HAPT_H5_F32, rows ? rows->first : 0, rows ? rows->count : shape[0], value);
}

enum hapt_status hapt_checkpoint_read(const struct hapt_checkpoint *checkpoint, const char *parameter, int state,
                                      int64_t elements, float *value)
{
    return hapt_checkpoint_read_rows(checkpoint, parameter, state, elements, NULL, value);
}

enum hapt_status hapt_checkpoint_read_rows(const struct hapt_checkpoint *checkpoint, const char *parameter, int state,
                                           int64_t elements, const struct hapt_rows *rows, float *value)
{
    const int shard = shard_of(checkpoint, parameter);
    if (shard < 0)
        return hapt_fail(HAPT_ERR_INPUT, "resume with the model the checkpoint was made with",
                         "checkpoint %s has no parameter %s", checkpoint->path, parameter);
    if (state >= checkpoint->state_count)
        return hapt_fail(HAPT_ERR_INPUT, "resume with the optimizer the checkpoint was made with",
                         "checkpoint %s has no optimizer state %d", checkpoint->path, state);
    if (state >= checkpoint->parameter_states[find_parameter(checkpoint, parameter)]) {
        const int64_t count = rows ? elements / rows->total * rows->count : elements;
        memset(value, 0, (size_t)count * sizeof *value);
        return HAPT_OK;
    }
    struct hapt_arena arena;
    hapt_arena_init(&arena);
    struct hapt_h5 *file = NULL;
    const char *path = checkpoint_shard_path(&arena, checkpoint->path, shard);
    const char *dataset = checkpoint_dataset(&arena, parameter, state);
    enum hapt_status status = path && dataset ? HAPT_OK : HAPT_ERR_MEMORY;
    if (status == HAPT_OK) status = hapt_h5_open(path, SHARD_FORMAT, SHARD_VERSION, false, &file);
    if (status == HAPT_OK) status = read_tensor(file, dataset, elements, rows, value);
    hapt_h5_close(file);
    hapt_arena_release(&arena);
    return status;
}

static enum hapt_status fits_tensor(const struct hapt_checkpoint *checkpoint, const struct hapt_tensor *tensor,
                                    struct hapt_arena *arena)
{
    const char *hint = "give the model that the run was started with (--input), or start anew without --resume";
    const int shard = shard_of(checkpoint, tensor->name);
    struct hapt_h5 *file = NULL;
    int dims = 0;
    int64_t shape[HAPT_H5_MAX_DIMS], count = 1;
    if (shard < 0)
        return hapt_fail(HAPT_ERR_INPUT, hint, "checkpoint %s belongs to another model: it has no parameter %s",
                         checkpoint->path, tensor->name);
    const char *path = checkpoint_shard_path(arena, checkpoint->path, shard),
               *dataset = checkpoint_dataset(arena, tensor->name, -1);
    if (!path || !dataset) return HAPT_ERR_MEMORY;
    HAPT_TRY(hapt_h5_open(path, SHARD_FORMAT, SHARD_VERSION, false, &file));
    const enum hapt_status status = hapt_h5_shape(file, dataset, &dims, shape);
    hapt_h5_close(file);
    HAPT_TRY(status);
    for (int d = 0; d < dims; d++) count *= shape[d];
    const int64_t elements = checkpoint_elements(tensor, checkpoint->sampled);
    if (count == elements) return HAPT_OK;
    return hapt_fail(HAPT_ERR_INPUT, hint, "checkpoint %s belongs to another model: its %s has %lld elements, not %lld",
                     checkpoint->path, tensor->name, (long long)count, (long long)elements);
}

enum hapt_status hapt_checkpoint_fits(const struct hapt_checkpoint *checkpoint, const struct hapt_model *model)
{
    const struct hapt_graph *graph = model->graph;
    struct hapt_arena arena;
    enum hapt_status status = HAPT_OK;
    int64_t count = 0;
    hapt_arena_init(&arena);
    for (int t = 0; t < graph->tensor_count && status == HAPT_OK; t++) {
        if (graph->tensor[t].kind != HAPT_TENSOR_PARAMETER) continue;
        status = fits_tensor(checkpoint, &graph->tensor[t], &arena);
        count++;
    }
    hapt_arena_release(&arena);
    HAPT_TRY(status);
    if (count == checkpoint->parameter_count) return HAPT_OK;
    return hapt_fail(HAPT_ERR_INPUT,
                     "give the model that the run was started with (--input), or start anew without --resume",
                     "checkpoint %s belongs to another model: it has %lld parameters, not %lld", checkpoint->path,
                     (long long)checkpoint->parameter_count, (long long)count);
}

/* Opens the shard that holds the parameter, and reads its shape. */
static enum hapt_status open_parameter(const struct hapt_checkpoint *checkpoint, const char *parameter,
                                       struct hapt_arena *arena, struct hapt_h5 **from, const char **dataset, int *dims,
                                       int64_t *shape)
{
    const char *path = checkpoint_shard_path(arena, checkpoint->path, shard_of(checkpoint, parameter));
    *dataset = checkpoint_dataset(arena, parameter, -1);
    if (!path || !*dataset) return HAPT_ERR_MEMORY;
    HAPT_TRY(hapt_h5_open(path, SHARD_FORMAT, SHARD_VERSION, false, from));
    HAPT_TRY(hapt_h5_shape(*from, *dataset, dims, shape));
    if (*dims >= 1) return HAPT_OK;
    return hapt_fail(HAPT_ERR_INPUT, NULL, "%s: %s is a single number", hapt_h5_path(*from), *dataset);
}

enum hapt_status hapt_checkpoint_shape(const struct hapt_checkpoint *checkpoint, const char *parameter, int *dims,
                                       int64_t *shape)
{
    struct hapt_h5 *file = NULL;
    struct hapt_arena arena;
    const char *dataset;
    hapt_arena_init(&arena);
    const enum hapt_status status = open_parameter(checkpoint, parameter, &arena, &file, &dataset, dims, shape);
    hapt_h5_close(file);
    hapt_arena_release(&arena);
    return status;
}

/* Weights of emulated devices are samples. */
static enum hapt_status check_weights(const struct hapt_checkpoint *checkpoint)
{
    if (!checkpoint->sampled) return HAPT_OK;
    return hapt_fail(HAPT_ERR_INPUT, "train on real devices to get weights",
                     "checkpoint %s was written with --device emulated: it holds samples, not weights",
                     checkpoint->path);
}

enum hapt_status hapt_checkpoint_files(const struct hapt_checkpoint *checkpoint, struct hapt_arena *arena,
                                       struct hapt_attachments *files)
{
    struct hapt_h5 *file = NULL;
    const char *path = hapt_arena_printf(arena, "%s/manifest.h5", checkpoint->path);
    if (!path) return HAPT_ERR_MEMORY;
    HAPT_TRY(check_weights(checkpoint));
    HAPT_TRY(hapt_h5_open(path, CHECKPOINT_FORMAT, HAPT_CHECKPOINT_VERSION, false, &file));
    const enum hapt_status status = hapt_attachments_read(file, arena, files);
    hapt_h5_close(file);
    return status;
}

static enum hapt_status copy_parameter(const struct hapt_checkpoint *checkpoint, const char *parameter,
                                       struct hapt_h5 *to, struct hapt_arena *arena)
{
    struct hapt_h5 *from = NULL;
    const char *dataset;
    int dims = 0;
    int64_t shape[HAPT_H5_MAX_DIMS];
    void *value = NULL;
    enum hapt_status status = open_parameter(checkpoint, parameter, arena, &from, &dataset, &dims, shape);
    if (status == HAPT_OK)
        status = hapt_h5_read(from, dataset, HAPT_H5_F32, dims, shape, (int64_t)1 << 40, arena, &value);
    if (status == HAPT_OK) status = hapt_weights_write(to, parameter, dims, shape, value);
    hapt_h5_close(from);
    return status;
}

enum hapt_status hapt_checkpoint_export(const struct hapt_checkpoint *checkpoint, const char *path)
{
    struct hapt_h5 *file = NULL;
    struct hapt_arena arena;
    HAPT_TRY(check_weights(checkpoint));
    hapt_arena_init(&arena);
    HAPT_TRY(hapt_h5_create(path, "hapt-weights", 1, &file));
    enum hapt_status status = hapt_h5_write_attribute_int(file, "/", "step", checkpoint->step);
    hapt_progress_expect((long)checkpoint->parameter_count);
    for (int64_t p = 0; p < checkpoint->parameter_count && status == HAPT_OK; p++, hapt_progress_advance(1)) {
        status = copy_parameter(checkpoint, checkpoint->parameter[p], file, &arena);
        hapt_arena_reset(&arena);
    }
    hapt_arena_release(&arena);
    return hapt_h5_finish(file, status);
}
