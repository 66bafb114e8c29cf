/* Memory held once per node: MPI shared-memory windows, with private copies where those cannot be had. */
#include <stdlib.h>

#include "hapt/env.h"

struct hapt_shared {
    MPI_Comm node;  /* of the environment */
    MPI_Win window; /* MPI_WIN_NULL: a private copy */
    void *memory;
    size_t bytes;
    bool first; /* this rank writes */
    struct hapt_shared *next;
};

/* The newest first. Ranks of a node create in the same order, so they release in the same order. */
static struct hapt_shared *all;

enum { ALIGNMENT = 64 };

/* One window whose memory is the first rank's. */
static int open_window(struct hapt_shared *shared)
{
    void *mine;
    MPI_Aint bytes;
    int unit, error = MPI_Win_allocate_shared(shared->first ? (MPI_Aint)(shared->bytes + ALIGNMENT) : 0, 1,
                                              MPI_INFO_NULL, shared->node, &mine, &shared->window);
    if (error != MPI_SUCCESS) {
        shared->window = MPI_WIN_NULL;
        return error;
    }
    error = MPI_Win_shared_query(shared->window, 0, &bytes, &unit, &mine);
    if (error == MPI_SUCCESS) {
        /* segments start on pages, so the offset to the boundary is the same for all */
        shared->memory = (char *)mine + (ALIGNMENT - (size_t)mine % ALIGNMENT) % ALIGNMENT;
        error = MPI_Win_lock_all(MPI_MODE_NOCHECK, shared->window);
    }
    return error;
}

static void close_window(struct hapt_shared *shared)
{
    if (shared->window == MPI_WIN_NULL) return;
    MPI_Win_unlock_all(shared->window);
    MPI_Win_free(&shared->window);
}

/* The window where every rank of the node has it, else a private copy. */
static enum hapt_status find_memory(struct hapt_shared *shared)
{
    int failed = open_window(shared) != MPI_SUCCESS;
    HAPT_MPI(MPI_Allreduce(MPI_IN_PLACE, &failed, 1, MPI_INT, MPI_MAX, shared->node));
    if (!failed) return HAPT_OK;
    /* some ranks may hold a window that others lack: it cannot be freed together, and is left to the end of the process
     */
    shared->window = MPI_WIN_NULL;
    shared->memory = aligned_alloc(ALIGNMENT, (shared->bytes + ALIGNMENT) / ALIGNMENT * ALIGNMENT);
    failed = shared->memory == NULL;
    HAPT_MPI(MPI_Allreduce(MPI_IN_PLACE, &failed, 1, MPI_INT, MPI_MAX, shared->node));
    if (!failed) return HAPT_OK;
    return hapt_fail(HAPT_ERR_MEMORY, "give the job more host memory",
                     "host memory exhausted: %zu bytes on each rank of a node", shared->bytes);
}

enum hapt_status hapt_shared_create(const struct hapt_env *env, size_t bytes, struct hapt_shared **shared)
{
    unsigned long long asked = bytes;
    HAPT_MPI(MPI_Bcast(&asked, 1, MPI_UNSIGNED_LONG_LONG, 0, env->node));
    struct hapt_shared *made = malloc(sizeof *made);
    int failed = made == NULL;
    HAPT_MPI(MPI_Allreduce(MPI_IN_PLACE, &failed, 1, MPI_INT, MPI_MAX, env->node));
    if (failed) {
        free(made);
        return hapt_fail(HAPT_ERR_MEMORY, "give the job more host memory", "host memory exhausted");
    }
    *made = (struct hapt_shared){
        .node = env->node, .window = MPI_WIN_NULL, .bytes = (size_t)asked, .first = env->node_rank == 0, .next = all};
    const enum hapt_status status = find_memory(made);
    if (status != HAPT_OK) {
        free(made->memory);
        free(made);
        return status;
    }
    all = made;
    *shared = made;
    return HAPT_OK;
}

void *hapt_shared_memory(const struct hapt_shared *shared)
{
    return shared->memory;
}

enum hapt_status hapt_shared_publish(struct hapt_shared *shared)
{
    enum { PIECE = 1 << 30 };
    if (shared->window != MPI_WIN_NULL) {
        HAPT_MPI(MPI_Win_sync(shared->window));
        HAPT_MPI(MPI_Barrier(shared->node));
        HAPT_MPI(MPI_Win_sync(shared->window));
        return HAPT_OK;
    }
    for (size_t done = 0; done < shared->bytes; done += PIECE) {
        const size_t left = shared->bytes - done;
        HAPT_MPI(MPI_Bcast((char *)shared->memory + done, left < PIECE ? (int)left : PIECE, MPI_BYTE, 0, shared->node));
    }
    return HAPT_OK;
}

void hapt_shared_release(struct hapt_shared *shared)
{
    if (!shared) return;
    struct hapt_shared **link = &all;
    while (*link && *link != shared) link = &(*link)->next;
    if (*link) *link = shared->next;
    if (shared->window == MPI_WIN_NULL) free(shared->memory);
    close_window(shared);
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
