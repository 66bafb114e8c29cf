/*
 * Safetensors files: 8 bytes of length, a JSON header, the tensors' bytes. A folder has model.safetensors, or shards
 * and their index model.safetensors.index.json. Nothing in a file is trusted: sizes, offsets and names are checked
 * before memory is reserved. Private to the import room.
 */
#ifndef HAPT_IMPORT_SAFETENSORS_H
#define HAPT_IMPORT_SAFETENSORS_H

#include <stdbool.h>
#include <stdint.h>

#include "hapt/arena.h"
#include "hapt/dtype.h"
#include "hapt/status.h"

enum { SAFETENSORS_MAX_DIMS = 5 };

struct safetensors_tensor {
    const char *name, *path; /* of the tensor, of its file */
    const char *type;        /* "BF16" */
    int dims;
    int64_t shape[SAFETENSORS_MAX_DIMS];
    int64_t offset, bytes; /* in the file */
    bool used;             /* for callers */
};

struct safetensors {
    int64_t count;
    struct safetensors_tensor *tensor; /* in the order of their names */
};

/* Reads the headers of a folder's files. HAPT_ERR_INPUT names the file and the tensor. */
enum hapt_status safetensors_open(const char *folder, struct hapt_arena *arena, struct safetensors **opened);
struct safetensors_tensor *safetensors_find(const struct safetensors *of, const char *name); /* NULL: absent */
/* All elements as fp32. HAPT_ERR_INPUT: another type than fp32, bf16 or fp16, or values that are not finite. */
enum hapt_status safetensors_read(const struct safetensors_tensor *tensor, float *value);

#endif
