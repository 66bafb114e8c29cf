/* Shared by the files that wrap the HDF5 library alone. */
#ifndef HAPT_H5_PRIVATE_H
#define HAPT_H5_PRIVATE_H

#include <hdf5.h>

#include "hapt/h5.h"

/* The library is not thread safe, and a checkpoint may be written while the compute thread reads or writes another
 * file: every call into it holds one lock, taken again by the functions that call each other. Held to the end of the
 * block. */
struct hapt_h5_held {
    char unused;
};
struct hapt_h5_held hapt_h5_lock(void);
void hapt_h5_unlock(struct hapt_h5_held *held);
#define H5_HOLD_LOCK __attribute__((cleanup(hapt_h5_unlock), unused)) struct hapt_h5_held held = hapt_h5_lock()

#define H5_HINT "the file is damaged or of another kind: `hapt COMMAND --help` says what it must hold"

struct hapt_h5 {
    hid_t id;
    bool writing;
    bool checked_sizes; /* checksums cover its own tables: superblock version 2 or later */
    int error; /* errno: writing, of the first write that failed (h5_disk.c); reading, of a question that got no answer;
                  0: none */
    int descriptor;     /* that HDF5 writes to; -1: none */
    char *path, *aside; /* written aside, renamed by the commit */
};

/* HDF5 works on `descriptor` by h5_disk.c and opens nothing else. A new file's errors are kept in *error; what is read
 * notes them. Under the lock, up to H5Fcreate or H5Fopen. */
bool hapt_h5_use_disk(hid_t access, int descriptor, bool writing, int *error);
bool hapt_h5_leave_disk(void); /* behind H5Fcreate or H5Fopen. True: what is read closes its descriptor itself. */

/* Failures of reading (h5_fault.c). */
void hapt_h5_set_fault(enum hapt_h5_fault fault);
int *hapt_h5_noted(void); /* errno of the first system failure since the lock was taken, 0: none */
int hapt_h5_system_error(const struct hapt_h5 *file); /* the same, less what the file's own damage explains */
bool hapt_h5_is_system_error(int error);              /* of an open: not what a wrong path explains */
enum hapt_status hapt_h5_lack(const char *path, int error);
/* A failure of the content, unless the system failed. */
enum hapt_status hapt_h5_refuse(const struct hapt_h5 *file, const char *hint, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* Names the external link on the way to `name`; HAPT_OK: there is none. */
enum hapt_status hapt_h5_check_inside(struct hapt_h5 *file, const char *name);
/* The same of storage in other files: external or virtual. */
bool hapt_h5_is_outside(hid_t dataset);
/* Records a read or write failure of something inside the file. */
enum hapt_status hapt_h5_fail(struct hapt_h5 *file, const char *what, const char *name);
/* hapt_h5_open without the guard: for its children. */
enum hapt_status hapt_h5_open_unguarded(const char *path, const char *format, int version, bool foreign,
                                        struct hapt_h5 **result);
/* Whether reading a dataset as numbers is tried at all: type, shape and chunks are such as hapt_h5_read takes. No
 * record is left. */
bool hapt_h5_readable(struct hapt_h5 *file, hid_t id, const char *name, int *dims, int64_t *shape);

/* Follows the references of strings of variable length in the bytes of the file (h5_heap.c). NULL: the file cannot be
 * read so, or no memory. */
struct hapt_h5_heap *hapt_h5_heap_create(struct hapt_h5 *file);
void hapt_h5_heap_destroy(struct hapt_h5_heap *heap);
/* False: a string of the dataset `object`, or of its attribute, lies where the file has none of that length. Another
 * type: true. */
bool hapt_h5_heap_leads(struct hapt_h5_heap *heap, hid_t object, const char *attribute);

#endif
