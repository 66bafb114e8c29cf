/* A file that grows by whole records: after a failed write it has none of the record. */
#ifndef HAPT_REPORT_APPEND_H
#define HAPT_REPORT_APPEND_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

struct append {
    int descriptor; /* -1: closed */
    off_t end;      /* of the last whole record */
};

/* Opens a regular file, or creates it; links are not followed. Its end is the file's. False: errno says why. */
bool append_open(struct append *file, const char *path);
/* Drops what follows after `end`. False: errno says why. */
bool append_cut(struct append *file, off_t end);
/* Appends a record by one write: when this returns, the record survives the end of the process. False: errno says why;
 * if the file cannot be restored, it is closed. */
bool append_write(struct append *file, const void *record, size_t bytes);
void append_close(struct append *file);

#endif
