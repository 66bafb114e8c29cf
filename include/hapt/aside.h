/*
 * A file that is written aside: under a name of its own beside its place, and renamed when it is complete, so that a
 * file of that name is whole or the old one. It is never opened through a link. Renaming over a symbolic link replaces
 * the link, not the file that it leads to; commands refuse such an output without --overwrite yes
 * (src/command/outputs.c).
 */
#ifndef HAPT_ASIDE_H
#define HAPT_ASIDE_H

#include <stddef.h>

#include "hapt/status.h"

enum { HAPT_ASIDE_BYTES = 64 }; /* that the name aside is longer than the path, at most */

/* Makes a new file beside `path` for reading and writing; its name goes to `aside` [size], size at least strlen(path) +
 * HAPT_ASIDE_BYTES. Leftovers of dead processes are passed over. Returns the descriptor; -1: errno says why, and
 * `aside` is "". */
int hapt_aside_open(const char *path, char *aside, size_t size);
/* Brings it to the disk, closes it and gives it its name. Returns 0, else errno; then the file aside is still there. */
int hapt_aside_commit(int descriptor, const char *aside, const char *path);

#endif
