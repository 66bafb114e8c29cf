/* Saves the weights and optimizer state of a worker in checkpoints: a shard per submesh, and one of frozen weights. */
#include "save.h"

#include <math.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/statvfs.h>

#include "checkpoint.h"
#include "hapt/link.h"
#include "hapt/progress.h"
#include "hapt/run_folder.h"
#include "runtime.h"

/* The first rows of a dataset create it. */
static enum hapt_status write_rows(const struct saver *saver, struct hapt_h5 *file, int tensor, int state,
                                   const struct hapt_rows *rows, const float *value)
{
    const struct hapt_tensor *about = &saver->worker->graph->tensor[tensor];
    struct hapt_arena scratch;
    int dims;
    int64_t shape[HAPT_MAX_DIMS];
    worker_kept(saver->worker, about, &dims, shape);
    hapt_arena_init(&scratch);
    const char *dataset = checkpoint_dataset(&scratch, about->name, state);
    enum hapt_status status = dataset ? HAPT_OK : HAPT_ERR_MEMORY;
    if (status == HAPT_OK && rows->first == 0)
        status = hapt_h5_write_begin(file, dataset, HAPT_H5_F32, dims, shape, "");
    if (status == HAPT_OK) status = hapt_h5_write_rows(file, dataset, HAPT_H5_F32, rows->first, rows->count, value);
    hapt_arena_release(&scratch);
    return status;
}

/* A weight or state, as pass_tensors takes it. copy NULL, or its place there. *written: the first failure to write. */
static void pass_tensor(const struct saver *saver, struct stage *stage, int tensor, int state, bool from_stage,
                        float *copy, struct hapt_h5 *file, enum hapt_status *written)
{
    const struct worker *worker = saver->worker;
    const struct hapt_tensor *parameter = &worker->graph->tensor[tensor];
    int64_t elements;
    for (struct hapt_rows rows = {0}; worker_next_block(worker, parameter, &rows, &elements);) {
        float *value = copy ? copy : saver->buffer;
        const enum hapt_status gathered =
            from_stage ? worker->runtime->gather(stage, tensor, state, &rows, saver->local, value) : HAPT_OK;
        if (gathered != HAPT_OK) hapt_die(gathered); /* peers may wait */
        if (from_stage && worker->runtime->computes && stage->rank == 0)
            hapt_parameter_unpack(parameter, rows.count, value);
        if (file && *written == HAPT_OK) *written = write_rows(saver, file, tensor, state, &rows, value);
        if (copy) copy += elements;
    }
}

/* Constant tensors, which are frozen weights, go to shards of their own. */
enum group { CHANGING, CONSTANT };

static bool is_constant(const struct worker *worker, int tensor)
{
    return worker->runtime->computes && !worker->graph->tensor[tensor].trainable;
}

static int states_of(const struct worker *worker, int tensor, int state_count)
{
    return is_constant(worker, tensor) ? 0 : state_count;
}

/* Takes each tensor of a group that the worker saves, in the same order on all ranks
 * of its submesh: from the stage to the file (synchronous), from the stage to the copy, or from the copy to the file. A
 * rank that cannot write still takes part in all gathers. file NULL: another rank writes, or nothing is written yet. */
static enum hapt_status pass_tensors(const struct saver *saver, enum group group, bool from_stage, float *copy,
                                     struct hapt_h5 *file)
{
    const struct worker *worker = saver->worker;
    enum hapt_status status = HAPT_OK;
    for (int t = 0; t < worker->graph->tensor_count; t++) {
        const struct hapt_tensor *parameter = &worker->graph->tensor[t];
        if (parameter->kind != HAPT_TENSOR_PARAMETER || is_constant(worker, t) != (group == CONSTANT)) continue;
        struct stage *stage = worker_stage(worker, stage_owner(worker, t));
        for (int state = -1; stage && state < states_of(worker, t, saver->state_count); state++) {
            pass_tensor(saver, stage, t, state, from_stage, copy, file, &status);
            if (copy) copy += worker_kept(worker, parameter, NULL, NULL);
            if (!saver->saving.copies) hapt_progress_advance(1);
        }
    }
    return status;
}

/* Runs on the writer thread if there is a copy. */
static enum hapt_status write_shard(void *context, struct hapt_h5 *file)
{
    const struct saver *saver = context;
    if (saver->saving.copies) return pass_tensors(saver, CHANGING, false, saver->copy, file);
    hapt_progress_expect(saver->tensors);
    return pass_tensors(saver, CHANGING, true, NULL, file);
}

/* Likewise. A copy has constant tensors after the others, if later checkpoints cannot link to the first one's. */
static enum hapt_status write_constant(void *context, struct hapt_h5 *file)
{
    const struct saver *saver = context;
    if (saver->saving.copies) return pass_tensors(saver, CONSTANT, false, saver->copy + saver->changing, file);
    hapt_progress_expect(saver->constants);
    return pass_tensors(saver, CONSTANT, true, NULL, file);
}

/* ---- Setup ---- */

#define SLOWEST_DISK_BYTES_PER_S 10e6 /* peers wait for a shard as long as this disk takes */

enum hapt_status saver_prepare(struct saver *saver, struct worker *worker, const struct hapt_config *config,
                               int state_count, const char *folder)
{
    const struct hapt_graph *graph = worker->graph;
    const int *submesh_of = worker->schedule->submesh_of, shards = worker->schedule->submesh_count;
    const int own = worker->stage_count > 0 ? submesh_of[worker->stage[0].chunk] : -1;
    struct hapt_arena *arena = worker->arena;
    const char **name;
    int32_t *shard, *states;
    int *constant_of; /* [submeshes] shard of its constants; -1: none yet */
    int64_t count = 0;
    int constants = 0;
    double *bytes, *constant_bytes, most = 0; /* bytes of each submesh; of the largest one */
    *saver = (struct saver){.env = worker->env,
                            .worker = worker,
                            .state_count = state_count,
                            .saved = -1,
                            .folder = folder,
                            .overwrites = hapt_config_bool(config, "overwrite")};
    HAPT_NEW(bytes, arena, shards);
    HAPT_NEW(constant_bytes, arena, shards);
    HAPT_NEW(constant_of, arena, shards);
    HAPT_NEW(name, arena, graph->tensor_count);
    HAPT_NEW(shard, arena, graph->tensor_count);
    HAPT_NEW(states, arena, graph->tensor_count);
    for (int s = 0; s < shards; s++) constant_of[s] = -1;
    for (int t = 0; t < graph->tensor_count; t++) {
        if (graph->tensor[t].kind != HAPT_TENSOR_PARAMETER) continue;
        const int64_t elements = worker_kept(worker, &graph->tensor[t], NULL, NULL);
        const int owner = stage_owner(worker, t);
        HAPT_ASSERT(owner >= 0); /* every parameter belongs to a stage */
        const int submesh = submesh_of[owner];
        const bool constant = is_constant(worker, t);
        if (constant && constant_of[submesh] < 0) constant_of[submesh] = shards + constants++;
        shard[count] = constant ? constant_of[submesh] : submesh;
        states[count] = states_of(worker, t, state_count);
        *(constant ? &constant_bytes[submesh] : &bytes[submesh]) += 4.0 * (double)elements * (1 + states[count]);
        most = fmax(most, bytes[submesh] + constant_bytes[submesh]);
        if (submesh == own) *(constant ? &saver->constants : &saver->tensors) += 1 + states[count];
        name[count++] = graph->tensor[t].name;
    }
    saver->shard_bytes = most;
    const int64_t block = worker_block_elements(worker);
    const bool writes = own >= 0 && worker->stage[0].rank == 0;
    HAPT_NEW(saver->buffer, arena, block);
    HAPT_NEW(saver->local, arena, block);
    saver->writer = (struct hapt_checkpoint_writer){
        .folder = hapt_arena_printf(arena, "%s/checkpoints", folder),
        .keep = hapt_config_int(config, "keep"),
        .keep_every = hapt_config_int(config, "keep-every"),
        .resumed_step = -1,
        .patience_s = worker_agreement_timeout_s(worker) + most / SLOWEST_DISK_BYTES_PER_S,
        .shard_count = shards + constants,
        .shard = writes ? own : -1,
        .constant_shard = writes ? constant_of[own] : -1,
        .parameter_count = count,
        .parameter = name,
        .parameter_shard = shard,
        .parameter_states = constants > 0 ? states : NULL,
        .state_count = state_count,
        .sampled = !worker->runtime->computes,
        .plan = worker->plan,
        .config = config,
        .data = &saver->identity,
        .held_out = &saver->held_out,
        .write_shard = write_shard,
        .write_constant = constants > 0 ? write_constant : NULL,
        .constant = &saver->constant,
        .context = saver,
    };
    if (!saver->writer.folder) return HAPT_ERR_MEMORY;
    if (worker->env->world_rank == 0) { /* writes the manifests */
        HAPT_TRY(hapt_model_files(worker->model, arena, &saver->files));
        saver->writer.files = &saver->files;
    }
    if (writes) {
        saver->copy_bytes = (size_t)bytes[own];
        saver->changing = (int64_t)(bytes[own] / 4);
        saver->constant_bytes = (size_t)constant_bytes[own];
    }
    return saving_open(&saver->saving, worker->env, &saver->writer, arena);
}

/* True if there are checkpoints from which the run may link frozen weights. */
static bool resumes(const struct hapt_config *config, const char *folder)
{
    struct hapt_arena scratch;
    int count = 0;
    int64_t *step;
    if (strcmp(hapt_config_text(config, "resume"), "no") == 0) return false;
    hapt_arena_init(&scratch);
    const char *checkpoints = hapt_arena_printf(&scratch, "%s/checkpoints", folder);
    if (!checkpoints || checkpoint_list(checkpoints, &scratch, &count, &step) != HAPT_OK) hapt_fail_reset();
    hapt_arena_release(&scratch);
    return count > 0;
}

/* Checked early, because the first checkpoint may be hours away. */
enum hapt_status hapt_train_check_disk(const struct hapt_env *env, const struct hapt_config *config,
                                       const struct hapt_model *model)
{
    struct hapt_optimizer_options optimizer;
    struct statvfs disk;
    const char *folder = hapt_config_text(config, "output");
    char needed[32], left[32];
    double bytes = 0;
    if (env->world_rank != 0 || runtime_is_modelled(config) || statvfs(folder, &disk) != 0 || disk.f_blocks == 0)
        return hapt_env_agree(env->world, HAPT_OK);
    hapt_optimizer_options(config, &optimizer);
    const bool linked = resumes(config, folder);
    for (int t = 0; t < model->graph->tensor_count; t++)
        if (model->graph->tensor[t].kind == HAPT_TENSOR_PARAMETER && !(linked && !model->graph->tensor[t].trainable))
            bytes += 4.0 * (double)checkpoint_elements(&model->graph->tensor[t], false) *
                     (model->graph->tensor[t].trainable ? 1 + optimizer.state_count : 1);
    const double available = (double)disk.f_bavail * (double)disk.f_frsize;
    if (bytes <= available) return hapt_env_agree(env->world, HAPT_OK);
    return hapt_env_agree(env->world,
                          hapt_fail(HAPT_ERR_IO, "free some space, or give --output on another disk",
                                    "a checkpoint needs %s, the disk of %s has %s left",
                                    hapt_units_bytes(bytes, needed), folder, hapt_units_bytes(available, left)));
}

/* share of the node's available memory that the copies may use */
#define MOST_OF_MEMORY 0.8

/* *room: the copies of all ranks fit on every node. The same answer on every rank. */
static enum hapt_status find_room(struct saver *saver, bool *room)
{
    const struct hapt_env *env = saver->env;
    struct {
        double bytes, available;
        int64_t node;
    } mine = {(double)saver->copy_bytes, hapt_memory_available(), env->node_index}, *all;
    char most[32], left[32];
    HAPT_NEW(all, saver->worker->arena, env->world_size);
    HAPT_TRY(
        hapt_link_all_gather(env->world, "memory for checkpoints", saver->writer.patience_s, &mine, sizeof mine, all));
    *room = true;
    for (int r = 0; r < env->world_size && *room; r++) {
        double bytes = 0, available = INFINITY;
        for (int peer = 0; peer < env->world_size; peer++) {
            if (all[peer].node != all[r].node) continue;
            bytes += all[peer].bytes;
            available = fmin(available, all[peer].available);
        }
        *room = bytes <= MOST_OF_MEMORY * available;
        if (!*room)
            hapt_note(env, "checkpoints are synchronous: copies would need %s of the %s that are free on a node\n",
                      hapt_units_bytes(bytes, most), hapt_units_bytes(available, left));
    }
    return HAPT_OK;
}

/* Populates the pages now, so that the first copy is not slowed down. */
static bool reserve_copy(struct saver *saver)
{
    if (saver->copy_bytes == 0) return true;
    void *memory =
        mmap(NULL, saver->copy_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (memory == MAP_FAILED) return false;
    saver->copy = memory;
    return true;
}

static void release_copy(struct saver *saver)
{
    if (saver->copy) munmap(saver->copy, saver->copy_bytes);
    saver->copy = NULL;
    saver->background = false;
}

static enum hapt_status open_background(struct saver *saver)
{
    const struct hapt_env *env = saver->env;
    bool room = false;
    HAPT_TRY(find_room(saver, &room));
    if (!room) return HAPT_OK;
    const enum hapt_status reserved =
        reserve_copy(saver) ? HAPT_OK : hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory for a copy of a checkpoint");
    const enum hapt_status all_reserved = hapt_link_all_or_none(env->world, "memory for checkpoints", reserved);
    if (all_reserved != HAPT_OK) {
        hapt_fail_reset();
        release_copy(saver);
        hapt_note(env, "checkpoints are synchronous: a rank cannot reserve memory for its copy\n");
        return HAPT_OK;
    }
    saver->background = true;
    return saving_start_thread(&saver->saving);
}

/* Renames an earlier run (--overwrite), and damaged checkpoints that were skipped, so that nobody resumes from them. */
static enum hapt_status clear_folder(const struct saver *saver, const struct hapt_config *config,
                                     const struct hapt_checkpoint *checkpoint)
{
    struct hapt_arena scratch;
    hapt_arena_init(&scratch);
    enum hapt_status status = hapt_run_folder_begin(config, saver->folder);
    if (status == HAPT_OK) status = checkpoint_clean(saver->writer.folder, &scratch);
    for (int i = 0; checkpoint && status == HAPT_OK && i < checkpoint->skipped_count; i++)
        checkpoint_set_aside(saver->writer.folder, strrchr(checkpoint->skipped[i], '/') + 1, "damaged");
    hapt_arena_release(&scratch);
    return status;
}

enum hapt_status saver_open(struct saver *saver, const struct hapt_config *config, struct hapt_data *data,
                            struct hapt_data *held_out, const struct hapt_checkpoint *checkpoint, bool several)
{
    const struct hapt_env *env = saver->env;
    enum hapt_status status = HAPT_OK;
    saver->data = data;
    if (held_out && env->world_rank == 0) hapt_data_identify(held_out, 0, &saver->held_out);
    if (env->world_rank == 0) status = clear_folder(saver, config, checkpoint);
    HAPT_TRY(hapt_env_agree(env->world, status));
    HAPT_TRY(saver_find_links(saver, checkpoint));
    if (several && hapt_config_bool(config, "checkpoint-async")) status = open_background(saver);
    return hapt_env_agree(env->world, status);
}

static bool differs(const struct hapt_data_identity *then, const struct hapt_data_identity *now)
{
    return strcmp(then->kind, now->kind) != 0 || then->count != now->count || then->checksum != now->checksum;
}

void saver_compare_data(const struct saver *saver, const struct hapt_checkpoint *checkpoint)
{
    struct hapt_data_identity now;
    const struct hapt_data_identity *then = &checkpoint->data;
    if (saver->env->world_rank != 0) return;
    if (checkpoint->held_out.kind[0] && saver->held_out.kind[0] && differs(&checkpoint->held_out, &saver->held_out))
        hapt_warn(saver->env,
                  "the held-out rows differ from those of checkpoint %s: validation losses before and after it do not "
                  "compare\n",
                  checkpoint->path);
    if (!then->kind[0] || !saver->data) return; /* modelled devices need none */
    hapt_data_identify(saver->data, checkpoint->step, &now);
    if (differs(then, &now))
        hapt_warn(saver->env,
                  "the data differ from those of checkpoint %s (%lld %s there, %lld %s here%s); training continues "
                  "with the new data\n",
                  checkpoint->path, (long long)then->count, then->kind, (long long)now.count, now.kind,
                  then->count == now.count && !strcmp(then->kind, now.kind) ? ", other content" : "");
    else if (then->seed != now.seed)
        hapt_warn(saver->env, "--data-seed is %lld, not %lld as in checkpoint %s: %s\n", (long long)now.seed,
                  (long long)then->seed, checkpoint->path,
                  strstr(now.kind, "batches") ? "the masks of dropout differ" : "the order of the data differs");
    else if (then->epochs != now.epochs)
        hapt_warn(saver->env, "--data-order is %s, not as in checkpoint %s: the order of the data differs\n",
                  now.epochs ? "epochs" : "random", checkpoint->path);
}

/* ---- Saving ---- */

static enum hapt_status mark_complete(struct saver *saver, int64_t step)
{
    saver->saved = step;
    saver->constant.linked = saver->constant.links;
    if (saver->count++ == 0 && saver->overwrites && saver->env->world_rank == 0)
        hapt_run_folder_first_checkpoint(saver->folder);
    saver->taken_s = hapt_time_s() - saver->started_s;
    saver->path = checkpoint_folder(saver->worker->arena, saver->writer.folder, step);
    return saver->path ? HAPT_OK : HAPT_ERR_MEMORY;
}

enum hapt_status saver_advance(struct saver *saver)
{
    bool done = false;
    HAPT_TRY(saving_advance(&saver->saving, &done));
    return done ? mark_complete(saver, saver->saving.step) : HAPT_OK;
}

/* Waits for the checkpoint in progress, or does a synchronous one after the steps of `now`. */
static enum hapt_status complete(struct saver *saver, const struct hapt_history *now)
{
    bool done = false;
    struct hapt_progress progress;
    enum hapt_status status = HAPT_OK;
    hapt_progress_init(&progress, saver->env, now ? "writing the checkpoint" : "finishing the checkpoint", 0);
    if (now) status = saving_begin(&saver->saving, now->count, now, false);
    if (status == HAPT_OK) status = saving_finish(&saver->saving, &done);
    hapt_progress_release(&progress);
    return done ? mark_complete(saver, saver->saving.step) : status;
}

enum hapt_status saver_finish(struct saver *saver, bool last)
{
    const double start_s = hapt_time_s();
    if (!saving_is_active(&saver->saving)) return HAPT_OK;
    HAPT_TRY(complete(saver, NULL));
    if (!last && !saver->slow)
        hapt_note(saver->env,
                  "checkpoints take longer to write than --checkpoint-every allows: training waited %.2g s for one\n",
                  hapt_time_s() - start_s);
    saver->slow = saver->slow || !last;
    return HAPT_OK;
}

enum hapt_status saver_save(struct saver *saver, const struct hapt_history *history, bool last)
{
    if (saver->saved == history->count) return HAPT_OK;
    saver->started_s = hapt_time_s();
    if (saver->env->world_rank == 0 && saver->data) hapt_data_identify(saver->data, history->count, &saver->identity);
    /* The first one with links writes the constant tensors, which are not copied. */
    const bool first = saver->writer.write_constant && saver->constant.links && !saver->constant.linked;
    const bool copies = saver->background && !last && !first, holds = saver->worker->stage_count > 0;
    if (first && saver->background && !last)
        hapt_note(saver->env, "training waits for the first checkpoint, which holds the frozen weights\n");
    saver->waits = !copies;
    saver->writer.shared = holds && !copies;
    if (!copies) return complete(saver, history);
    HAPT_TRY(saving_begin(&saver->saving, history->count, history, true));
    if (holds) HAPT_TRY(pass_tensors(saver, CHANGING, true, saver->copy, NULL));
    if (holds && saver->writer.write_constant && !saver->constant.links)
        HAPT_TRY(pass_tensors(saver, CONSTANT, true, saver->copy ? saver->copy + saver->changing : NULL, NULL));
    saving_copied(&saver->saving);
    return HAPT_OK;
}

void saver_release(struct saver *saver)
{
    saving_release(&saver->saving);
    if (saver->constant.linked && saver->writer.constant_shard >= 0) checkpoint_drop_constant(&saver->writer);
    release_copy(saver);
}
