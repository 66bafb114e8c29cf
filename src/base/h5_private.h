/* Private declarations of the files that wrap the HDF5 library. */
#ifndef HAPT_H5_PRIVATE_H
#define HAPT_H5_PRIVATE_H

#include <hdf5.h>

#include "hapt/h5.h"

/* Locks the HDF5 library until the end of the block. The library is not thread safe, and a checkpoint may be written
 * while the compute thread uses another file. The lock is recursive, because these functions call each other. */
struct hapt_h5_held {
    char unused;
};
struct hapt_h5_held hapt_h5_lock(void);
void hapt_h5_unlock(struct hapt_h5_held *held);
#define H5_HOLD_LOCK __attribute__((cleanup(hapt_h5_unlock), unused)) struct hapt_h5_held held = hapt_h5_lock()

#define H5_HINT "the file is damaged or of another kind: `hapt help COMMAND` says what it must hold"

struct hapt_h5 {
    hid_t id;
    bool writing;
    bool checked_sizes; /* its own tables have checksums: superblock version 2 or later */
    int error;          /* errno of the first failed write (h5_disk.c), or of a failed query when reading; 0: none */
    int descriptor;     /* descriptor that HDF5 uses; -1: none */
    struct {
        int64_t bytes, device, number;
    } identity;                  /* of a file that is read (fstat) */
    char *path, *temporary_path; /* temporary name, renamed at commit */
};

/* Makes HDF5 use `descriptor` by h5_disk.c and open nothing else. Errors of a new file are kept in *error; errors of
 * reading are noted there. Hold the lock from here until H5Fcreate or H5Fopen returns. */
bool hapt_h5_use_disk(hid_t access, int descriptor, bool writing, int *error);
/* Call after H5Fcreate or H5Fopen. True: closing a file that is read also closes its descriptor. */
bool hapt_h5_leave_disk(void);

/* Failures of reading (h5_fault.c). */
void hapt_h5_set_fault(enum hapt_h5_fault fault);
/* Wrap the result of H5Aiterate and H5Literate in this: they fail without the error callback. True: they succeeded. */
bool hapt_h5_iterated(herr_t result);
int *hapt_h5_noted(void); /* errno of the first system failure since the lock was taken; 0: none */
int hapt_h5_system_error(const struct hapt_h5 *file); /* the same, except errors that damage of the file can explain */
bool hapt_h5_is_system_error(int error);              /* for errno of an open: false if a wrong path explains it */
enum hapt_status hapt_h5_fail_system(const char *path, int error);
/* Reports a failure of the content, or of the system if the system failed. */
enum hapt_status hapt_h5_fail_content(const struct hapt_h5 *file, const char *hint, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* Fails and names the external link on the path to `name`; HAPT_OK: there is none. */
enum hapt_status hapt_h5_check_inside(struct hapt_h5 *file, const char *name);
/* True if data are stored in other files: external or virtual storage. */
bool hapt_h5_is_outside(hid_t dataset);
/* Reports a failure to read or write an item inside the file. */
enum hapt_status hapt_h5_fail(struct hapt_h5 *file, const char *what, const char *name);
/* hapt_h5_open without the sandbox: for the sandbox's children. */
enum hapt_status hapt_h5_open_unsandboxed(const char *path, const char *format, int version, bool foreign,
                                          struct hapt_h5 **result);
/* True if hapt_h5_read would accept the type, shape and chunks of the dataset. Leaves no error record. */
bool hapt_h5_readable(struct hapt_h5 *file, hid_t id, const char *name, int *dims, int64_t *shape);

/* Checks references of variable-length strings in the bytes of the file (h5_heap.c). NULL: the file cannot be read this
 * way, or no memory. */
struct hapt_h5_heap *hapt_h5_heap_create(struct hapt_h5 *file);
void hapt_h5_heap_destroy(struct hapt_h5_heap *heap);
/* False if a string of the dataset `object`, or of its attribute, refers to an address without an object of that
 * length. True for other types. */
bool hapt_h5_heap_references_are_valid(struct hapt_h5_heap *heap, hid_t object, const char *attribute);

#endif
