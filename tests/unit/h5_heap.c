/* References of variable-length strings, in each place in which the HDF5 library stores them. Valid ones pass the
 * sandbox's trial read. Each modified one is found before the library follows it. */
#include <hdf5.h>
#include <unistd.h>

#include "hapt/h5.h"
#include "test.h"

enum { STRINGS = 5, SHORTEST = 40, MOST_FILE = 1 << 16 };
enum place { CONTIGUOUS, CHUNKED, COMPACT, ATTRIBUTE, PLACES };
static const char *const place_name[PLACES] = {"contiguous", "chunked", "compact", "attribute"};

static char path[] = "/tmp/hapt-heap-XXXXXX";

static void write_strings(enum place place, bool newest, hsize_t user_block)
{
    static char text[STRINGS][SHORTEST + STRINGS + 1];
    const char *strings[STRINGS];
    const hsize_t count = STRINGS, per_chunk = 2;
    for (int i = 0; i < STRINGS; i++) {
        memset(text[i], 'a' + i, (size_t)(SHORTEST + i));
        strings[i] = text[i];
    }
    const hid_t made = H5Pcreate(H5P_FILE_CREATE), access = H5Pcreate(H5P_FILE_ACCESS),
                how = H5Pcreate(H5P_DATASET_CREATE);
    const hid_t type = H5Tcopy(H5T_C_S1), space = H5Screate_simple(1, &count, NULL);
    H5Pset_userblock(made, user_block);
    if (newest) H5Pset_libver_bounds(access, H5F_LIBVER_LATEST, H5F_LIBVER_LATEST);
    if (place == CHUNKED) H5Pset_chunk(how, 1, &per_chunk);
    if (place == COMPACT) H5Pset_layout(how, H5D_COMPACT);
    H5Tset_size(type, H5T_VARIABLE);
    const hid_t file = H5Fcreate(path, H5F_ACC_TRUNC, made, access),
                group = H5Gcreate2(file, "/g", H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT);
    if (place == ATTRIBUTE) {
        for (int other = 0; other < 6; other++) { /* its message moves to another block of the object header */
            char name[16];
            snprintf(name, sizeof name, "other%d", other);
            H5Aclose(H5Acreate2(group, name, H5T_NATIVE_INT, space, H5P_DEFAULT, H5P_DEFAULT));
        }
        const hid_t id = H5Acreate2(group, "names", type, space, H5P_DEFAULT, H5P_DEFAULT);
        CHECK(H5Awrite(id, type, strings) >= 0);
        H5Aclose(id);
    } else {
        const hid_t id = H5Dcreate2(group, "names", type, space, H5P_DEFAULT, how, H5P_DEFAULT);
        CHECK(H5Dwrite(id, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, strings) >= 0);
        H5Dclose(id);
    }
    H5Gclose(group), H5Sclose(space), H5Tclose(type), H5Pclose(how), H5Pclose(access), H5Pclose(made);
    CHECK(H5Fclose(file) >= 0);
}

static long read_whole(unsigned char *bytes)
{
    FILE *file = fopen(path, "rb");
    const long count = file ? (long)fread(bytes, 1, MOST_FILE, file) : 0;
    if (file) fclose(file);
    return count;
}

static void write_whole(const unsigned char *bytes, long count)
{
    FILE *file = fopen(path, "wb");
    CHECK(file && fwrite(bytes, 1, (size_t)count, file) == (size_t)count);
    if (file) fclose(file);
}

/* Reference i: its length, the address of the only collection, an index in the order that the library uses. */
static long find_reference(const unsigned char *bytes, long count, uint64_t collection, int i)
{
    for (long at = 0; at + 16 <= count; at++) {
        uint32_t length, index;
        uint64_t address;
        memcpy(&length, bytes + at, 4), memcpy(&address, bytes + at + 4, 8), memcpy(&index, bytes + at + 12, 4);
        if (length == (uint32_t)(SHORTEST + i) && address == collection && index >= 1 && index <= STRINGS) return at;
    }
    return -1;
}

static void check_place(enum place place, bool newest, hsize_t user_block)
{
    static unsigned char bytes[MOST_FILE], damaged[MOST_FILE];
    /* offset in the reference and the added value: index behind the last object, behind the table, beyond 16 bits;
     * length; address */
    static const struct {
        int at;
        uint32_t by;
    } damage[] = {{12, STRINGS}, {12, 4000},      {12, 1 << 20}, {12, UINT32_MAX - 2},
                  {0, 1},        {0, UINT32_MAX}, {4, 8},        {4, 1 << 30}};
    write_strings(place, newest, user_block);
    const long count = read_whole(bytes);
    const unsigned char *heap = memmem(bytes, (size_t)count, "GCOL", 4);
    if (!CHECK(heap != NULL)) return;
    CHECK_MESSAGE(hapt_h5_trial_read(path), "%s, newest %d, user block %d: a whole file is refused", place_name[place],
                  newest, (int)user_block);
    for (int i = 0; i < STRINGS; i++) {
        const long at = find_reference(bytes, count, (uint64_t)(heap - bytes) - user_block, i);
        if (!CHECK_MESSAGE(at >= 0, "%s, newest %d: no reference %d", place_name[place], newest, i)) continue;
        for (size_t d = 0; d < sizeof damage / sizeof *damage; d++) {
            uint32_t value;
            memcpy(damaged, bytes, (size_t)count);
            memcpy(&value, damaged + at + damage[d].at, 4);
            value += damage[d].by;
            memcpy(damaged + at + damage[d].at, &value, 4);
            write_whole(damaged, count);
            CHECK_MESSAGE(!hapt_h5_trial_read(path),
                          "%s, newest %d, user block %d, string %d: byte %d and %u more is accepted", place_name[place],
                          newest, (int)user_block, i, damage[d].at, damage[d].by);
        }
    }
}

static void references(void)
{
    const int file = mkstemp(path);
    CHECK(file >= 0);
    close(file);
    for (int place = 0; place < PLACES; place++)
        for (int way = 0; way < 4; way++) check_place((enum place)place, way & 1, way & 2 ? 512 : 0);
    unlink(path);
}

/* Objects of the collection that claim more bytes than remain. */
static void collections(void)
{
    static unsigned char bytes[MOST_FILE], damaged[MOST_FILE];
    strcpy(path, "/tmp/hapt-heap-XXXXXX");
    const int file = mkstemp(path);
    CHECK(file >= 0);
    close(file);
    write_strings(CONTIGUOUS, false, 0);
    const long count = read_whole(bytes);
    const unsigned char *heap = memmem(bytes, (size_t)count, "GCOL", 4);
    static const struct {
        int at;
        unsigned char value;
    } damage[] = {{0, 'g'}, {4, 2}, {13, 1}, {16, 9}, {16 + 8 + 6, 1}, {8, 15}};
    for (size_t d = 0; heap && d < sizeof damage / sizeof *damage; d++) {
        memcpy(damaged, bytes, (size_t)count);
        damaged[heap - bytes + damage[d].at] = damage[d].value;
        write_whole(damaged, count);
        CHECK_MESSAGE(!hapt_h5_trial_read(path), "byte %d of the collection as %d is accepted", damage[d].at,
                      damage[d].value);
    }
    unlink(path);
}

int main(int argc, char **argv)
{
    test_init(&argc, &argv);
    hapt_h5_trial_read(NULL);
    H5Eset_auto2(H5E_DEFAULT, NULL, NULL);
    RUN(references);
    RUN(collections);
    return test_finish();
}
