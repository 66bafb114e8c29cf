/* Shared by the files that wrap the HDF5 library alone. */
#ifndef HAPT_H5_PRIVATE_H
#define HAPT_H5_PRIVATE_H

#include <hdf5.h>

#include "hapt/h5.h"

/* The library is not thread safe, and a checkpoint may be written while the compute thread reads or writes another file: every call
 * into it holds one lock, taken again by the functions that call each other. Held to the end of the block. */
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
    int error;          /* errno of the first write that failed (h5_disk.c), 0: none did */
    char *path, *aside; /* written aside, renamed by the commit */
};

/* A new file goes to the disk by h5_disk.c, which keeps errors to itself: in *error. Under the lock, up to H5Fcreate. */
bool hapt_h5_use_disk(hid_t access, int *error);
/* Records a read or write failure of something inside the file. */
enum hapt_status hapt_h5_fail(struct hapt_h5 *file, const char *what, const char *name);
/* hapt_h5_open without the guard: for its children. */
enum hapt_status hapt_h5_open_unguarded(const char *path, const char *format, int version, bool foreign, struct hapt_h5 **result);
/* Whether reading a dataset as numbers is tried at all: type, shape and chunks are such as hapt_h5_read takes. No record is left. */
bool hapt_h5_readable(struct hapt_h5 *file, hid_t id, const char *name, int *dims, int64_t *shape);

/* Follows the references of strings of variable length in the bytes of the file (h5_heap.c). NULL: the file cannot be read so, or no memory. */
struct hapt_h5_heap *hapt_h5_heap_create(struct hapt_h5 *file);
void hapt_h5_heap_destroy(struct hapt_h5_heap *heap);
/* False: a string of the dataset `object`, or of its attribute, lies where the file has none of that length. Another type: true. */
bool hapt_h5_heap_leads(struct hapt_h5_heap *heap, hid_t object, const char *attribute);

#endif
