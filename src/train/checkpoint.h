/* Inside checkpoints: what writing (checkpoint_save.c) and reading (checkpoint_find.c) share. */
#ifndef HAPT_TRAIN_CHECKPOINT_H
#define HAPT_TRAIN_CHECKPOINT_H

#include "hapt/train.h"

#define CHECKPOINT_FORMAT "hapt-checkpoint"
#define SHARD_FORMAT "hapt-checkpoint-shard"
#define CHECKPOINT_VERSION 1
#define CHECKPOINT_LIMIT 100000 /* checkpoints in a folder, options, shards */

/* "FOLDER/shard-0003.h5" */
char *checkpoint_shard_path(struct hapt_arena *arena, const char *folder, int shard);
/* "/parameters/NAME", "/state0/NAME" */
char *checkpoint_dataset(struct hapt_arena *arena, const char *parameter, int state);
/* Size and checksum of a whole file. HAPT_ERR_INPUT when it is not there; HAPT_ERR_IO, HAPT_ERR_MEMORY when the system
 * cannot read it. */
enum hapt_status checkpoint_measure(const char *path, int64_t *size, int64_t *checksum);
/* Is it step-N? */
bool checkpoint_is_name(const char *name, int64_t *step);
/* Steps of the folders step-N inside `folder`, newest first; none when there is no folder. HAPT_ERR_IO when it cannot
 * be read. */
enum hapt_status checkpoint_list(const char *folder, struct hapt_arena *arena, int *count, int64_t **step);
char *checkpoint_folder(struct hapt_arena *arena, const char *folder, int64_t step);

/* Which of `count` steps (newest first) stay on the disk: the newest `keep`, the one of lowest loss (mean of ten steps,
 * the last one computed with its own weights), and the first at or after each multiple of `every` (0: none). */
void checkpoint_choose(int count, const int64_t *step, int64_t keep, int64_t every, const struct hapt_history *history,
                       bool *stays);
/* `name` inside `folder` changes to name.WHY, with a warning: what is damaged or foreign is never removed. */
void checkpoint_set_aside(const char *folder, const char *name, const char *why);
/* Removes all checkpoints of a folder, and the folder when nothing else is in it. Best effort. */
void checkpoint_remove_all(const char *folder);

/* Is there a checkpoint in the folder of a run, good or damaged? Collective over env->world; ends in agreement. */
enum hapt_status checkpoint_any(const struct hapt_env *env, const char *run, struct hapt_arena *arena, bool *any);

/* What a writing rank tells rank 0 of its shard; `shard` -1: it has none. */
struct checkpoint_shard {
    int64_t shard, size, checksum;
};

/* The parts of a save, each on one rank; the caller brings the ranks together between them. */
/* The folder of checkpoints is there and holds nothing half-made that a killed run left; what such a run had moved
 * aside has its name again. */
enum hapt_status checkpoint_clean(const char *folder, struct hapt_arena *arena);
/* A checkpoint that a killed run had moved aside for its successor takes its name again. Best effort. */
void checkpoint_recover(const char *folder, struct hapt_arena *arena);
/* This rank's shard of the checkpoint after `step` steps. */
enum hapt_status checkpoint_write_shard(const struct hapt_checkpoint_writer *writer, int64_t step,
                                        struct hapt_arena *arena, struct checkpoint_shard *written);
/* All shards are there, those of `ranks` ranks: the manifest is written, the folder takes its name, older ones go. */
enum hapt_status checkpoint_publish(const struct hapt_checkpoint_writer *writer, int64_t step,
                                    const struct hapt_history *history, const struct checkpoint_shard *shard, int ranks,
                                    struct hapt_arena *arena);
/* What a save that failed has left. Best effort. */
void checkpoint_discard(const struct hapt_checkpoint_writer *writer, int64_t step, struct hapt_arena *arena);

/* Is the checkpoint of that step certainly a rehearsal's? */
bool checkpoint_is_sampled(const char *folder, int64_t step, struct hapt_arena *arena);

#endif
