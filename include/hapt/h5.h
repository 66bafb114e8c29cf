/*
 * HDF5 files as hapt writes and reads them. Only src/base/h5*.c use the HDF5 library itself.
 *
 * Writing: root attributes `format`, `version`, `creator`; a `units` attribute on every number; fletcher32 checksums
 * on datasets. A file appears under its name only when complete (temporary name, flush, rename; atomic_file.h).
 *
 * Reading: content is not trusted. Sizes are checked before memory is reserved, and bad content is HAPT_ERR_INPUT. If
 * the sandbox (sandbox.h) runs, a child process reads each file first. A failure of the system (no memory, too many
 * open files, read errors) is HAPT_ERR_MEMORY or HAPT_ERR_IO and is never blamed on the file. hapt_h5_last_fault
 * distinguishes more cases. External links, external storage and virtual datasets are refused and named, so a file
 * never makes hapt read another one. Only one rank writes a file; any rank may read one.
 */
#ifndef HAPT_H5_H
#define HAPT_H5_H

#include <stdbool.h>
#include <stdint.h>

#include "hapt/arena.h"
#include "hapt/status.h"

struct hapt_h5;

enum hapt_h5_type { HAPT_H5_U8, HAPT_H5_U16, HAPT_H5_I32, HAPT_H5_I64, HAPT_H5_F32, HAPT_H5_F64 };

size_t hapt_h5_type_bytes(enum hapt_h5_type type);

#define HAPT_H5_MAX_DIMS 5

/* Why the last failed hapt_h5_* call on this thread failed while reading. hapt_h5_open resets it to NONE, so NONE after
 * HAPT_ERR_INPUT means: the file was read, but its values contradict each other. */
enum hapt_h5_fault {
    HAPT_H5_FAULT_NONE,
    HAPT_H5_FAULT_MISSING, /* no file of that name, or not a regular file */
    HAPT_H5_FAULT_DAMAGED, /* a wrong checksum or a broken structure; only this is damage */
    HAPT_H5_FAULT_NEWER,   /* a later format version: HAPT_ERR_INPUT */
    HAPT_H5_FAULT_FOREIGN, /* another format, or none: HAPT_ERR_INPUT */
    HAPT_H5_FAULT_SYSTEM   /* memory, open files, permissions, disk: HAPT_ERR_MEMORY, HAPT_ERR_IO, or HAPT_ERR_INPUT
                              (permissions) */
};
enum hapt_h5_fault hapt_h5_last_fault(void);

/* Creates `path` and missing folders, under a temporary name (atomic_file.h). It becomes visible at hapt_h5_commit,
 * which replaces a regular file or a symbolic link of that name; the link's target does not change. Fails with
 * HAPT_ERR_IO. */
enum hapt_status hapt_h5_create(const char *path, const char *format, int version, struct hapt_h5 **file);
/* Flushes, fsyncs, renames to the final name and closes. After a failure the old file of that name is unchanged. */
enum hapt_status hapt_h5_commit(struct hapt_h5 *file);
/* Commits the file if `status` is HAPT_OK; else discards it and returns `status`. */
enum hapt_status hapt_h5_finish(struct hapt_h5 *file, enum hapt_status status);
/* Opens for reading. `format` NULL accepts any file; `version` then limits only hapt's own formats (0: no limit).
 * Otherwise the root attribute `format` must equal it, or be missing if `foreign`; `version`, if present, must be at
 * most `version`. */
enum hapt_status hapt_h5_open(const char *path, const char *format, int version, bool foreign, struct hapt_h5 **file);
/* Opens the file, reads everything that the functions below may read, and closes it: for the sandbox (sandbox.h), in a
 * process that may crash.
 *
 * False if the HDF5 library fails on existing groups, objects or attributes, because this process must not use it
 * afterwards. If memory or open files were the reason, this is reported by hapt_sandbox_note_system_error. Unreadable
 * values, and files that are not HDF5 at all, are left to later reads. NULL: only initializes the library. */
bool hapt_h5_trial_read(const char *path);
/* Closes. An uncommitted new file is discarded. NULL is allowed. */
void hapt_h5_close(struct hapt_h5 *file);
const char *hapt_h5_path(const struct hapt_h5 *file);

/* Elements of a chunk of a written dataset, at most; rows are divided only if one has more. */
enum { HAPT_H5_CHUNK_ELEMENTS = 1 << 18 };

/* Datasets. Missing groups on the path are created. `units` is "" for pure numbers; NULL only for text. */
enum hapt_status hapt_h5_write(struct hapt_h5 *file, const char *name, enum hapt_h5_type type, int dims,
                               const int64_t *shape, const void *data, const char *units);
/* The same in parts: creates the dataset, then writes rows [first, first + count) of the leading dimension. Each row is
 * written once. */
enum hapt_status hapt_h5_write_begin(struct hapt_h5 *file, const char *name, enum hapt_h5_type type, int dims,
                                     const int64_t *shape, const char *units);
enum hapt_status hapt_h5_write_rows(struct hapt_h5 *file, const char *name, enum hapt_h5_type type, int64_t first,
                                    int64_t count, const void *data);
enum hapt_status hapt_h5_write_strings(struct hapt_h5 *file, const char *name, int64_t count, const char *const *text);

/* Gives a dataset of the same new file a second name (a hard link). Missing groups on the path are created. */
enum hapt_status hapt_h5_link(struct hapt_h5 *file, const char *object, const char *name);

bool hapt_h5_exists(struct hapt_h5 *file, const char *name);
/* True if it exists inside the file and is a group. */
bool hapt_h5_is_group(struct hapt_h5 *file, const char *name);
/* The shape of a dataset, at most HAPT_H5_MAX_DIMS dimensions. */
enum hapt_status hapt_h5_shape(struct hapt_h5 *file, const char *name, int *dims, int64_t *shape);
/* Fails unless the dataset was written completely, in chunks of a reasonable size. Call it before reserving memory for
 * the dataset and calling hapt_h5_read_rows; hapt_h5_read does this check itself. */
enum hapt_status hapt_h5_check_written(struct hapt_h5 *file, const char *name);
/* True if stored as integers. Reading other numbers as integers loses their fractions. */
bool hapt_h5_is_integer(struct hapt_h5 *file, const char *name);
/* True if stored as unsigned bytes. */
bool hapt_h5_is_byte(struct hapt_h5 *file, const char *name);
/* Reads a complete dataset of exactly `dims` dimensions, converted to `type`. `shape` is in-out: entries >= 0 must
 * match, entries < 0 are filled in. At most `limit` elements are accepted. */
enum hapt_status hapt_h5_read(struct hapt_h5 *file, const char *name, enum hapt_h5_type type, int dims, int64_t *shape,
                              int64_t limit, struct hapt_arena *arena, void **data);
/* Reads rows [first, first + count) of the leading dimension into the caller's buffer. */
enum hapt_status hapt_h5_read_rows(struct hapt_h5 *file, const char *name, enum hapt_h5_type type, int64_t first,
                                   int64_t count, void *data);
enum hapt_status hapt_h5_read_strings(struct hapt_h5 *file, const char *name, int64_t limit, struct hapt_arena *arena,
                                      int64_t *count, const char ***text);

/* How a dataset lies in its file: in blocks of equal size, each with the elements that follow those of the previous
 * one. The last block may be longer than what the shape leaves for it. */
struct hapt_h5_blocks {
    enum hapt_h5_type type; /* I32 also for uint32: the caller checks that values are below 2^31 */
    int64_t elements;       /* of each block */
    int64_t count;
};
/* False if the elements do not stand in the file as this machine reads them: compressed, of another byte order or type,
 * in other files, in chunks that divide rows of the leading dimension, or in very many chunks. */
bool hapt_h5_find_blocks(struct hapt_h5 *file, const char *name, struct hapt_h5_blocks *blocks);
/* The size, device and inode of an opened file. They differ from those of another file, also of a later one of its
 * name. */
void hapt_h5_file_identity(const struct hapt_h5 *file, int64_t *bytes, int64_t *device, int64_t *number);
/* offset[blocks->count]: where each block begins, bytes. False if a block is missing or reaches beyond `file_bytes`. */
bool hapt_h5_block_offsets(struct hapt_h5 *file, const char *name, const struct hapt_h5_blocks *blocks,
                           int64_t file_bytes, int64_t *offset);

/* Attributes of a group or dataset ("/" is the root). */
enum hapt_status hapt_h5_write_attribute_int(struct hapt_h5 *file, const char *object, const char *name, int64_t value);
enum hapt_status hapt_h5_write_attribute_real(struct hapt_h5 *file, const char *object, const char *name, double value,
                                              const char *units);
enum hapt_status hapt_h5_write_attribute_text(struct hapt_h5 *file, const char *object, const char *name,
                                              const char *value);
bool hapt_h5_has_attribute(struct hapt_h5 *file, const char *object, const char *name);
enum hapt_status hapt_h5_read_attribute_int(struct hapt_h5 *file, const char *object, const char *name, int64_t *value);
enum hapt_status hapt_h5_read_attribute_real(struct hapt_h5 *file, const char *object, const char *name, double *value);
enum hapt_status hapt_h5_read_attribute_text(struct hapt_h5 *file, const char *object, const char *name,
                                             struct hapt_arena *arena, const char **value);
/* Reads one root attribute of a file that is opened only for that (hapt_h5_open). "" if it is missing; truncated to
 * `size`. */
enum hapt_status hapt_h5_peek_text(const char *path, const char *format, int version, bool foreign, const char *name,
                                   char *text, size_t size);

/* Attributes that are arrays of numbers. Reading fills `value` [limit] and sets the count; more than `limit` values, or
 * none, is a failure. */
enum hapt_status hapt_h5_write_attribute_ints(struct hapt_h5 *file, const char *object, const char *name, int count,
                                              const int *value);
enum hapt_status hapt_h5_write_attribute_reals(struct hapt_h5 *file, const char *object, const char *name, int count,
                                               const double *value, const char *units);
enum hapt_status hapt_h5_read_attribute_ints(struct hapt_h5 *file, const char *object, const char *name, int limit,
                                             int *count, int *value);
enum hapt_status hapt_h5_read_attribute_reals(struct hapt_h5 *file, const char *object, const char *name, int limit,
                                              int *count, double *value);

/* Reads everything in the file, each dataset completely (so its checksums are verified), and counts it. Unreadable
 * values, data that was never written, and links or storage in other files fail as they do for the functions above. */
struct hapt_h5_content {
    int64_t groups, datasets, attributes;
    int64_t bytes; /* of the datasets' values */
};
enum hapt_status hapt_h5_verify(struct hapt_h5 *file, struct hapt_h5_content *content);

/* The names of a group's members in alphabetical order; fails if there are more than `limit`. */
enum hapt_status hapt_h5_list(struct hapt_h5 *file, const char *group, int64_t limit, struct hapt_arena *arena,
                              int64_t *count, const char ***names);

/* About the HDF5 library, for `hapt doctor`. */
const char *hapt_h5_library_version(void);
bool hapt_h5_library_is_parallel(void);

#endif
