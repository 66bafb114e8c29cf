/*
 * HDF5 files as hapt writes and reads them; the HDF5 library itself is seen by src/base/h5.c alone.
 *
 * What is written: root attributes `format`, `version`, `creator`; a `units` attribute on every number; fletcher32
 * checksums on datasets; the file appears under its name only when complete (written aside, flushed, renamed). What is
 * read is taken as hostile: sizes are bounded before memory is reserved, a failure of the content is HAPT_ERR_INPUT,
 * and where the guard (guard.h) is on duty a child process reads a file before this one does. A failure of the system
 * is never blamed on the file: it is HAPT_ERR_MEMORY or HAPT_ERR_IO (no memory, too many open files, read errors).
 * hapt_h5_last_fault tells these and more apart. A file never makes hapt read another one: external links, external
 * storage and virtual datasets are refused and named. Only one rank writes a file; any rank may read one.
 */
#ifndef HAPT_H5_H
#define HAPT_H5_H

#include <stdbool.h>
#include <stdint.h>

#include "hapt/arena.h"
#include "hapt/status.h"

struct hapt_h5;

enum hapt_h5_type { HAPT_H5_U8, HAPT_H5_U16, HAPT_H5_I32, HAPT_H5_I64, HAPT_H5_F32, HAPT_H5_F64 };

#define HAPT_H5_MAX_DIMS 5

/* Why the last hapt_h5_* call that failed on this thread failed while reading. hapt_h5_open sets NONE when it begins,
 * so after HAPT_ERR_INPUT the value NONE means: the file was read, its values contradict each other. */
enum hapt_h5_fault {
    HAPT_H5_FAULT_NONE,
    HAPT_H5_FAULT_MISSING, /* no file of that name, or no regular one */
    HAPT_H5_FAULT_DAMAGED, /* a wrong checksum or a broken structure; only this is damage */
    HAPT_H5_FAULT_NEWER,   /* of a later format version: HAPT_ERR_INPUT */
    HAPT_H5_FAULT_FOREIGN, /* another format, or none: HAPT_ERR_INPUT */
    HAPT_H5_FAULT_SYSTEM   /* memory, open files, permissions, the disk: HAPT_ERR_MEMORY, HAPT_ERR_IO, or HAPT_ERR_INPUT
                              (permissions) */
};
enum hapt_h5_fault hapt_h5_last_fault(void);

/* Creates `path` (missing folders included), written aside (aside.h). It becomes visible at hapt_h5_commit, where it
 * replaces a regular file or a symbolic link of that name; the file that the link leads to stays as it is. Fails with
 * HAPT_ERR_IO. */
enum hapt_status hapt_h5_create(const char *path, const char *format, int version, struct hapt_h5 **file);
/* Flushes, fsyncs and renames into place, then closes; on failure the old file of that name is untouched. */
enum hapt_status hapt_h5_commit(struct hapt_h5 *file);
/* Opens for reading. `format` NULL accepts any (of hapt's own formats up to `version`; 0: every version); else the root
 * attribute `format` must equal it (a missing one passes when `foreign`) and `version`, where present, must be at most
 * `version`. */
enum hapt_status hapt_h5_open(const char *path, const char *format, int version, bool foreign, struct hapt_h5 **file);
/* Opens the file, reads all that the functions below may read of it, whatever it is, and closes it. For the guard
 * (guard.h), in a process whose crash harms nobody. False when the library fails over groups, objects or attributes
 * that are there: it must not go on with them; hapt_guard_refused is told where memory or open files were the reason.
 * (Values that cannot be read are told by those who need them, and so is what is no HDF5 file at all.) NULL: nothing
 * but the library's own preparations. */
bool hapt_h5_rehearse(const char *path);
/* Closes; a file being created that was not committed is discarded. NULL is allowed. */
void hapt_h5_close(struct hapt_h5 *file);
const char *hapt_h5_path(const struct hapt_h5 *file);

/* Datasets. Missing groups on the way are made. `units` "" for pure numbers; NULL only for text. */
enum hapt_status hapt_h5_write(struct hapt_h5 *file, const char *name, enum hapt_h5_type type, int dims,
                               const int64_t *shape, const void *data, const char *units);
enum hapt_status hapt_h5_write_strings(struct hapt_h5 *file, const char *name, int64_t count, const char *const *text);

bool hapt_h5_exists(struct hapt_h5 *file, const char *name);
/* The extent of a dataset; dims must fit in HAPT_H5_MAX_DIMS. */
enum hapt_status hapt_h5_shape(struct hapt_h5 *file, const char *name, int *dims, int64_t *shape);
/* Fails unless all of a dataset was written, in chunks of a sane size: before memory is reserved for it and
 * hapt_h5_read_rows is called (hapt_h5_read looks by itself). */
enum hapt_status hapt_h5_check_written(struct hapt_h5 *file, const char *name);
/* Is it stored as integers? Read as such, other numbers lose their fractions. */
bool hapt_h5_is_integer(struct hapt_h5 *file, const char *name);
/* Is it stored as unsigned bytes? */
bool hapt_h5_is_byte(struct hapt_h5 *file, const char *name);
/* Reads a whole dataset of exactly `dims` dimensions, converted to `type`. `shape` is in-out: entries >= 0 must match,
 * entries < 0 are filled in. At most `limit` elements are accepted. */
enum hapt_status hapt_h5_read(struct hapt_h5 *file, const char *name, enum hapt_h5_type type, int dims, int64_t *shape,
                              int64_t limit, struct hapt_arena *arena, void **data);
/* Reads rows [first, first + count) of the leading dimension into the caller's buffer. */
enum hapt_status hapt_h5_read_rows(struct hapt_h5 *file, const char *name, enum hapt_h5_type type, int64_t first,
                                   int64_t count, void *data);
enum hapt_status hapt_h5_read_strings(struct hapt_h5 *file, const char *name, int64_t limit, struct hapt_arena *arena,
                                      int64_t *count, const char ***text);

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
/* The same of the root of a file that is opened for it alone (hapt_h5_open); "" where it is missing, cut off at `size`.
 */
enum hapt_status hapt_h5_peek_text(const char *path, const char *format, int version, bool foreign, const char *name,
                                   char *text, size_t size);

/* Attributes that are rows of numbers. Reading fills `value` [limit] and says how many there are; more than `limit`, or
 * none, fail. */
enum hapt_status hapt_h5_write_attribute_ints(struct hapt_h5 *file, const char *object, const char *name, int count,
                                              const int *value);
enum hapt_status hapt_h5_write_attribute_reals(struct hapt_h5 *file, const char *object, const char *name, int count,
                                               const double *value, const char *units);
enum hapt_status hapt_h5_read_attribute_ints(struct hapt_h5 *file, const char *object, const char *name, int limit,
                                             int *count, int *value);
enum hapt_status hapt_h5_read_attribute_reals(struct hapt_h5 *file, const char *object, const char *name, int limit,
                                              int *count, double *value);

/* Reads everything that the file holds, each dataset whole (so against its checksum), and counts it. Values that cannot
 * be read, what was never written, and links and storage that lead to other files fail as they do for the functions
 * above. */
struct hapt_h5_content {
    int64_t groups, datasets, attributes;
    int64_t bytes; /* of the datasets' values */
};
enum hapt_status hapt_h5_verify(struct hapt_h5 *file, struct hapt_h5_content *content);

/* The names of a group's members in alphabetical order; fails when there are more than `limit`. */
enum hapt_status hapt_h5_list(struct hapt_h5 *file, const char *group, int64_t limit, struct hapt_arena *arena,
                              int64_t *count, const char ***names);

/* Of the HDF5 library, for `hapt doctor`. */
const char *hapt_h5_library_version(void);
bool hapt_h5_library_is_parallel(void);

#endif
