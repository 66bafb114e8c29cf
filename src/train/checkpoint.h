/* Inside checkpoints: shared by writing (checkpoint_save.c) and reading (checkpoint_find.c). */
#ifndef HAPT_TRAIN_CHECKPOINT_H
#define HAPT_TRAIN_CHECKPOINT_H

#include "hapt/train.h"

#define CHECKPOINT_FORMAT "hapt-checkpoint"
#define SHARD_FORMAT "hapt-checkpoint-shard"
#define SHARD_VERSION 1
#define CHECKPOINT_LIMIT 100000 /* of checkpoints in a folder, options, shards */
#define CHECKPOINT_SAMPLE 64    /* elements per parameter in a sampled checkpoint, at most */

/* Elements of a parameter in a checkpoint; `sampled`: of modelled devices. */
static inline int64_t checkpoint_elements(const struct hapt_tensor *parameter, bool sampled)
{
    const struct hapt_tensor published = hapt_tensor_published(parameter);
    const int64_t elements = hapt_tensor_elements(&published);
    return sampled && elements > CHECKPOINT_SAMPLE ? CHECKPOINT_SAMPLE : elements;
}

/* "FOLDER/shard-0003.h5" */
char *checkpoint_shard_path(struct hapt_arena *arena, const char *folder, int shard);
/* "/parameters/NAME", "/state0/NAME" */
char *checkpoint_dataset(struct hapt_arena *arena, const char *parameter, int state);
/* Size and checksum of a file. HAPT_ERR_INPUT: the file is missing. HAPT_ERR_IO, HAPT_ERR_MEMORY: the system cannot
 * read it. */
enum hapt_status checkpoint_measure(const char *path, int64_t *size, int64_t *checksum);
/* True if the name is step-N. */
bool checkpoint_is_name(const char *name, int64_t *step);
/* *own [parameters]: the number of optimizer states that a checkpoint has of each parameter, 0 or `states`. */
enum hapt_status checkpoint_read_states(struct hapt_h5 *file, int64_t states, int64_t parameters,
                                        struct hapt_arena *arena, int32_t **own);
/* Steps of the folders step-N inside `folder`, newest first; none if the folder is missing. HAPT_ERR_IO: it cannot be
 * read. */
enum hapt_status checkpoint_list(const char *folder, struct hapt_arena *arena, int *count, int64_t **step);
char *checkpoint_folder(struct hapt_arena *arena, const char *folder, int64_t step);

/* Chooses which of `count` steps (newest first) stay on disk: the newest `keep`, the one of lowest loss, and the first
 * at or after each multiple of `every` (0: none). Loss: that of the newest validation up to the checkpoint; without
 * validation the mean of ten steps, the last one computed with the checkpoint's own weights. */
void checkpoint_choose(int count, const int64_t *step, int64_t keep, int64_t every, const struct hapt_history *history,
                       bool *stays);
/* Renames `name` inside `folder` to name.WHY, with a warning. Damaged or foreign files are never removed. */
void checkpoint_set_aside(const char *folder, const char *name, const char *why);
/* Removes all checkpoints of a folder, and the folder if it is then empty. Best effort. */
void checkpoint_remove_all(const char *folder);

/* *any: the folder of a run holds a checkpoint, good or damaged. Collective over env->world; ends in agreement. */
enum hapt_status checkpoint_any(const struct hapt_env *env, const char *run, struct hapt_arena *arena, bool *any);

/* A rank's report of its shards to rank 0; `shard`, `constant` -1: none. */
struct checkpoint_shard {
    int64_t shard, size, checksum;
    int64_t constant, constant_size, constant_checksum;
};

/* The parts of a save, each on one rank; saving.h synchronises the ranks between them. */
/* Creates the folder of checkpoints, removes unfinished ones of a killed run, and calls checkpoint_recover. */
enum hapt_status checkpoint_clean(const char *folder, struct hapt_arena *arena);
/* Restores the name of a checkpoint that a killed run had renamed before replacing it. Best effort. */
void checkpoint_recover(const char *folder, struct hapt_arena *arena);
/* Creates an empty folder to write in; removes what a killed run left there. */
enum hapt_status checkpoint_begin(const struct hapt_checkpoint_writer *writer, int64_t step);
/* Gives the constant shard at `path` the name from which checkpoints of this run link it. HAPT_ERR_IO: it cannot have
 * another name. */
enum hapt_status checkpoint_keep_constant(const struct hapt_checkpoint_writer *writer, const char *path);
/* Removes that name. Best effort. */
void checkpoint_drop_constant(const struct hapt_checkpoint_writer *writer);
/* Writes this rank's shards of the checkpoint after `step` steps. */
enum hapt_status checkpoint_write_shard(const struct hapt_checkpoint_writer *writer, int64_t step,
                                        struct hapt_arena *arena, struct checkpoint_shard *written);
/* Call when all shards of `ranks` ranks are written: writes the manifest, renames the folder, removes older
 * checkpoints. A failure leaves no unfinished folder. */
enum hapt_status checkpoint_publish(const struct hapt_checkpoint_writer *writer, int64_t step,
                                    const struct hapt_history *history, const struct checkpoint_shard *shard, int ranks,
                                    struct hapt_arena *arena);
/* Removes the remains of shards that failed. Best effort. */
void checkpoint_discard(const struct hapt_checkpoint_writer *writer, int64_t step);

/* True if the checkpoint of that step is certainly one of --device emulated. */
bool checkpoint_is_sampled(const char *folder, int64_t step, struct hapt_arena *arena);

#endif
