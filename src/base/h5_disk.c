/*
 * HDF5 file driver of hapt: works on a descriptor that hapt opened and opens no other file.
 *
 * If writing fails, HDF5 keeps the data that it could not flush, refuses to close the file, and crashes when the
 * library ends. So the driver reports success after a write error: it keeps the first error for hapt_h5_fail, and the
 * file is discarded anyway. Read errors are reported to HDF5 and noted (h5_fault.c).
 */
#include "h5_private.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "hapt/sandbox.h"

#if H5_VERSION_GE(1, 13, 0)
#include <H5FDdevelop.h>
#endif

struct disk {
    H5FD_t base; /* HDF5's part: must be first */
    int descriptor;
    bool writing;
    int *error; /* errno of the first failed call; 0: none */
    haddr_t eoa, eof;
};

/* State for the next file to open; guarded by the library lock. HDF5 opens a new file twice. */
static struct {
    int descriptor; /* -1: no file may be opened */
    bool writing, taken;
    int *error;
} opening = {.descriptor = -1};

static void keep(struct disk *disk)
{
    const int error = errno ? errno : EIO;
    if (*disk->error == 0) *disk->error = error;
    if (!disk->writing)
        hapt_sandbox_note_system_error(error); /* at once, because the library may crash after this error */
}

static H5FD_t *disk_open(const char *name, unsigned flags, hid_t access, haddr_t most)
{
    (void)name, (void)flags, (void)access, (void)most;
    struct disk *disk = opening.descriptor < 0 ? NULL : calloc(1, sizeof *disk);
    struct stat about;
    if (!disk) return NULL;
    disk->error = opening.error;
    disk->writing = opening.writing;
    disk->descriptor = opening.descriptor;
    opening.taken = true;
    if (fstat(disk->descriptor, &about) == 0) {
        disk->eof = (haddr_t)about.st_size;
        return &disk->base;
    }
    keep(disk);
    if (!disk->writing) close(disk->descriptor);
    free(disk);
    return NULL;
}

static herr_t disk_close(H5FD_t *base)
{
    struct disk *disk = (struct disk *)base;
    if (!disk->writing) close(disk->descriptor); /* else hapt closes it after fsync */
    free(disk);
    return 0;
}

static int disk_compare(const H5FD_t *a, const H5FD_t *b)
{
    return a < b ? -1 : a > b;
}

static herr_t disk_query(const H5FD_t *base, unsigned long *flags)
{
    (void)base;
    if (flags)
        *flags = H5FD_FEAT_AGGREGATE_METADATA | H5FD_FEAT_ACCUMULATE_METADATA | H5FD_FEAT_DATA_SIEVE |
                 H5FD_FEAT_AGGREGATE_SMALLDATA;
    return 0;
}

static haddr_t disk_get_eoa(const H5FD_t *base, H5FD_mem_t type)
{
    (void)type;
    return ((const struct disk *)base)->eoa;
}

static herr_t disk_set_eoa(H5FD_t *base, H5FD_mem_t type, haddr_t address)
{
    (void)type;
    ((struct disk *)base)->eoa = address;
    return 0;
}

static haddr_t disk_get_eof(const H5FD_t *base, H5FD_mem_t type)
{
    (void)type;
    return ((const struct disk *)base)->eof;
}

static herr_t disk_read(H5FD_t *base, H5FD_mem_t type, hid_t transfer, haddr_t address, size_t bytes, void *data)
{
    (void)type, (void)transfer;
    struct disk *disk = (struct disk *)base;
    char *to = data;
    while (bytes > 0) {
        const ssize_t got = pread(disk->descriptor, to, bytes, (off_t)address);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) keep(disk);
        if (got < 0 && !disk->writing) return -1;
        if (got <= 0) break;
        to += got;
        address += (haddr_t)got;
        bytes -= (size_t)got;
    }
    memset(to, 0, bytes); /* after the end of the file */
    return 0;
}

static herr_t disk_write(H5FD_t *base, H5FD_mem_t type, hid_t transfer, haddr_t address, size_t bytes, const void *data)
{
    (void)type, (void)transfer;
    struct disk *disk = (struct disk *)base;
    const char *from = data;
    const haddr_t end = address + bytes;
    while (bytes > 0 && *disk->error == 0) {
        const ssize_t put = pwrite(disk->descriptor, from, bytes, (off_t)address);
        if (put < 0 && errno == EINTR) continue;
        if (put <= 0) {
            keep(disk);
            break;
        }
        from += put;
        address += (haddr_t)put;
        bytes -= (size_t)put;
    }
    if (end > disk->eof) disk->eof = end;
    return 0;
}

static herr_t disk_truncate(H5FD_t *base, hid_t transfer, hbool_t closing)
{
    (void)transfer, (void)closing;
    struct disk *disk = (struct disk *)base;
    if (disk->eoa == disk->eof) return 0;
    if (*disk->error == 0 && ftruncate(disk->descriptor, (off_t)disk->eoa) != 0) keep(disk);
    disk->eof = disk->eoa;
    return 0;
}

static const H5FD_class_t driver = {
#if H5_VERSION_GE(1, 13, 0)
    .version = H5FD_CLASS_VERSION,
    .value = (H5FD_class_value_t)600, /* from the range for drivers outside the library */
#endif
    .name = "hapt",
    .maxaddr = INT64_MAX,
    .fc_degree = H5F_CLOSE_WEAK,
    .open = disk_open,
    .close = disk_close,
    .cmp = disk_compare,
    .query = disk_query,
    .get_eoa = disk_get_eoa,
    .set_eoa = disk_set_eoa,
    .get_eof = disk_get_eof,
    .read = disk_read,
    .write = disk_write,
    .truncate = disk_truncate,
    .fl_map = H5FD_FLMAP_DICHOTOMY,
};

bool hapt_h5_use_disk(hid_t access, int descriptor, bool writing, int *error)
{
    static hid_t id = -1;
    if (id < 0) id = H5FDregister(&driver);
    opening.descriptor = descriptor;
    opening.writing = writing;
    opening.taken = false;
    opening.error = error;
    return id >= 0 && H5Pset_driver(access, id, NULL) >= 0;
}

bool hapt_h5_leave_disk(void)
{
    opening.descriptor = -1;
    return opening.taken;
}
