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
/* Size and checksum of a whole file. HAPT_ERR_INPUT when it cannot be read. */
enum hapt_status checkpoint_measure(const char *path, int64_t *size, int64_t *checksum);
/* Steps of the folders step-N inside `folder`, newest first; none when there is no folder. */
enum hapt_status checkpoint_list(const char *folder, struct hapt_arena *arena, int *count, int64_t **step);
char *checkpoint_folder(struct hapt_arena *arena, const char *folder, int64_t step);

#endif
