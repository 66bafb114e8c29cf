/*
 * Atomic file replacement: a file is written under a temporary name beside its final path and renamed when complete.
 * So a reader sees either the complete new file or the old one.
 *
 * The temporary file is never opened through a link. Renaming over a symbolic link replaces the link, not its target;
 * commands refuse such an output without --overwrite yes (src/command/outputs.c).
 */
#ifndef HAPT_ATOMIC_FILE_H
#define HAPT_ATOMIC_FILE_H

#include <stddef.h>

#include "hapt/status.h"

enum { HAPT_TEMPORARY_SUFFIX_BYTES = 64 }; /* maximum length of the suffix that the temporary name adds to the path */

/* Creates a new file beside `path` for reading and writing and writes its name to `temporary_path` [size]; size is at
 * least strlen(path) + HAPT_TEMPORARY_SUFFIX_BYTES. Names left over from dead processes are skipped. Returns the
 * descriptor; or -1 with errno set and `temporary_path` "". */
int hapt_atomic_file_open(const char *path, char *temporary_path, size_t size);
/* Flushes the file to disk, closes it and renames it to `path`. Returns 0 or errno; after an error the temporary file
 * still exists. */
int hapt_atomic_file_commit(int descriptor, const char *temporary_path, const char *path);

/* Writes the content to `descriptor`. Returns 0 or errno. */
typedef int hapt_atomic_file_writer(int descriptor, const void *content);
/* Replaces the file `path` whole. HAPT_ERR_IO: it cannot be written; a file of that name is unchanged. HAPT_ERR_MEMORY.
 */
enum hapt_status hapt_atomic_file_replace(const char *path, hapt_atomic_file_writer *writer, const void *content);

/* Removes temporary files of `path` that dead processes left. Call only if no process writes the file. */
void hapt_atomic_file_drop_leftovers(const char *path);

#endif
