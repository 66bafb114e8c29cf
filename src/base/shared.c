/*
 * Memory stored once per host: an anonymous file (memfd) of rank 0, which the others open through /proc. It counts
 * as memory, not against /dev/shm, which has only 64 MB in many containers. If that fails, every rank has a private
 * copy.
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "hapt/arena.h"
#include "hapt/env.h"

enum { ALIGNMENT = 64 };

struct hapt_shared {
    MPI_Comm comm; /* the ranks of one host; borrowed */
    void *memory;
    size_t bytes;
    bool common; /* mapped by all ranks; otherwise a private copy */
    struct hapt_shared *next;
};

/* Newest first. The ranks of a node create in the same order, so they release in the same order. */
static struct hapt_shared *all;

/* After the caller's bytes: proves that both sides mean the same process by the process number. */
struct check_token {
    uint64_t token;
};

static size_t mapped_bytes(size_t bytes)
{
    return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT + sizeof(struct check_token);
}

static struct check_token *check_token_of(void *memory, size_t bytes)
{
    return (struct check_token *)((char *)memory + mapped_bytes(bytes) - sizeof(struct check_token));
}

/* Sent by rank 0 to the others. */
struct mapping_offer {
    int64_t process, descriptor; /* descriptor -1: there is no file */
    uint64_t token;
};

/* whole: all pages at once, since a fault for each page of a large table takes as long as its copy. Otherwise the rank
 * that touches a page first has it in its near memory. */
static void *map(int descriptor, size_t bytes, bool whole)
{
    const int flags = MAP_SHARED | (whole ? MAP_POPULATE : 0);
    void *memory =
        descriptor < 0 ? MAP_FAILED : mmap(NULL, mapped_bytes(bytes), PROT_READ | PROT_WRITE, flags, descriptor, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

/* On rank 0. The file stays open until all ranks have mapped it. */
static void *create_mapping(size_t bytes, bool whole, struct mapping_offer *offer)
{
    *offer = (struct mapping_offer){.process = getpid(), .descriptor = -1};
    if (getrandom(&offer->token, sizeof offer->token, 0) != sizeof offer->token) return NULL;
    const int descriptor = memfd_create("hapt-shared", MFD_CLOEXEC);
    if (descriptor < 0) return NULL;
    void *memory = (double)bytes < hapt_memory_available() && ftruncate(descriptor, (off_t)mapped_bytes(bytes)) == 0
                       ? map(descriptor, bytes, whole)
                       : NULL;
    if (!memory) {
        close(descriptor);
        return NULL;
    }
    check_token_of(memory, bytes)->token = offer->token;
    offer->descriptor = descriptor;
    return memory;
}

static void *open_mapping(size_t bytes, bool whole, const struct mapping_offer *offer)
{
    char path[64];
    struct stat about;
    if (offer->descriptor < 0) return NULL;
    snprintf(path, sizeof path, "/proc/%lld/fd/%lld", (long long)offer->process, (long long)offer->descriptor);
    const int descriptor = open(path, O_RDWR | O_CLOEXEC);
    if (descriptor < 0) return NULL;
    void *memory = fstat(descriptor, &about) == 0 && about.st_size == (off_t)mapped_bytes(bytes)
                       ? map(descriptor, bytes, whole)
                       : NULL;
    close(descriptor);
    if (memory && check_token_of(memory, bytes)->token != offer->token) {
        munmap(memory, mapped_bytes(bytes));
        memory = NULL;
    }
    return memory;
}

/* Maps one file on all ranks of the communicator, or leaves shared->memory NULL on all of them. */
static enum hapt_status map_together(struct hapt_shared *shared, bool whole)
{
    struct mapping_offer offer = {0};
    int rank, failed;
    HAPT_MPI(MPI_Comm_rank(shared->comm, &rank));
    if (rank == 0) shared->memory = create_mapping(shared->bytes, whole, &offer);
    HAPT_MPI(MPI_Bcast(&offer, (int)sizeof offer, MPI_BYTE, 0, shared->comm));
    if (rank != 0) shared->memory = open_mapping(shared->bytes, whole, &offer);
    failed = shared->memory == NULL;
    HAPT_MPI(MPI_Allreduce(MPI_IN_PLACE, &failed, 1, MPI_INT, MPI_MAX, shared->comm));
    if (rank == 0 && offer.descriptor >= 0) close((int)offer.descriptor);
    shared->common = !failed;
    if (failed && shared->memory) {
        munmap(shared->memory, mapped_bytes(shared->bytes));
        shared->memory = NULL;
    }
    return HAPT_OK;
}

static enum hapt_status allocate(MPI_Comm comm, size_t bytes, struct hapt_shared **shared)
{
    unsigned long long asked = bytes;
    HAPT_MPI(MPI_Bcast(&asked, 1, MPI_UNSIGNED_LONG_LONG, 0, comm));
    *shared = malloc(sizeof **shared);
    int failed = *shared == NULL;
    HAPT_MPI(MPI_Allreduce(MPI_IN_PLACE, &failed, 1, MPI_INT, MPI_MAX, comm));
    if (failed) {
        free(*shared);
        return hapt_fail(HAPT_ERR_MEMORY, "give the job more host memory", "host memory exhausted");
    }
    **shared = (struct hapt_shared){.comm = comm, .bytes = (size_t)asked};
    return HAPT_OK;
}

static enum hapt_status take_private_copy(struct hapt_shared *shared)
{
    shared->memory = aligned_alloc(ALIGNMENT, (shared->bytes + ALIGNMENT) / ALIGNMENT * ALIGNMENT);
    int failed = shared->memory == NULL;
    HAPT_MPI(MPI_Allreduce(MPI_IN_PLACE, &failed, 1, MPI_INT, MPI_MAX, shared->comm));
    if (!failed) return HAPT_OK;
    return hapt_fail(HAPT_ERR_MEMORY, "give the job more host memory",
                     "host memory exhausted: %zu bytes on each rank of a node", shared->bytes);
}

enum hapt_status hapt_shared_create(const struct hapt_env *env, size_t bytes, struct hapt_shared **shared)
{
    struct hapt_shared *made;
    HAPT_TRY(allocate(env->node, bytes, &made));
    enum hapt_status status = map_together(made, true);
    if (status == HAPT_OK && !made->common) status = take_private_copy(made);
    if (status != HAPT_OK) {
        if (!made->common) free(made->memory);
        free(made);
        return status;
    }
    made->next = all;
    all = made;
    *shared = made;
    return HAPT_OK;
}

enum hapt_status hapt_shared_open(MPI_Comm comm, size_t bytes, struct hapt_shared **shared)
{
    struct hapt_shared *made;
    HAPT_TRY(allocate(comm, bytes, &made));
    const enum hapt_status status = map_together(made, false);
    if (status != HAPT_OK || !made->common) {
        free(made);
        made = NULL;
    }
    *shared = made;
    return status;
}

void *hapt_shared_memory(const struct hapt_shared *shared)
{
    return shared->memory;
}

enum hapt_status hapt_shared_publish(struct hapt_shared *shared)
{
    enum { PIECE = 1 << 30 };
    if (shared->common) return hapt_env_mpi(MPI_Barrier(shared->comm), "MPI_Barrier");
    for (size_t done = 0; done < shared->bytes; done += PIECE) {
        const size_t left = shared->bytes - done;
        HAPT_MPI(MPI_Bcast((char *)shared->memory + done, left < PIECE ? (int)left : PIECE, MPI_BYTE, 0, shared->comm));
    }
    return HAPT_OK;
}

void hapt_shared_release(struct hapt_shared *shared)
{
    if (!shared) return;
    struct hapt_shared **link = &all;
    while (*link && *link != shared) link = &(*link)->next;
    if (*link) *link = shared->next;
    if (shared->common)
        munmap(shared->memory, mapped_bytes(shared->bytes));
    else
        free(shared->memory);
    free(shared);
}

struct hapt_shared *hapt_shared_newest(void)
{
    return all;
}

void hapt_shared_release_newer(struct hapt_shared *mark)
{
    while (all && all != mark) hapt_shared_release(all);
}
