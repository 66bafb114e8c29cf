/*
 * Arenas: memory that is freed all at once.
 *
 * A phase gets two: data in `result` outlives the phase; its caller resets `scratch`. Every allocation is zeroed and
 * aligned to 64 bytes.
 */
#ifndef HAPT_ARENA_H
#define HAPT_ARENA_H

#include <stddef.h>

#include "hapt/status.h"

struct hapt_arena_block;
struct hapt_arena {
    struct hapt_arena_block *head; /* newest block */
    size_t used_bytes;             /* handed out so far */
};

void hapt_arena_init(struct hapt_arena *arena);
void hapt_arena_release(struct hapt_arena *arena);
/* Empties the arena but keeps its largest block for reuse. Pointers into the arena become invalid. */
void hapt_arena_reset(struct hapt_arena *arena);
/* Moves all of `from` into the arena; pointers stay valid. `from` is empty afterwards. */
void hapt_arena_adopt(struct hapt_arena *arena, struct hapt_arena *from);

/* Bytes rounded up to the alignment of allocations and of tensors. */
static inline size_t hapt_align(size_t bytes)
{
    return (bytes + 63) / 64 * 64;
}

/* NULL with a recorded HAPT_ERR_MEMORY when memory is exhausted or count * size overflows. A large request that the
 * host cannot back is refused, so that the kernel's OOM killer does not end the process. A zero size is allowed. */
void *hapt_arena_alloc(struct hapt_arena *arena, size_t count, size_t size);
/* The same, not zeroed: for large tables that the caller fills. */
void *hapt_arena_alloc_unset(struct hapt_arena *arena, size_t count, size_t size);
char *hapt_arena_strdup(struct hapt_arena *arena, const char *text);
char *hapt_arena_printf(struct hapt_arena *arena, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Bytes that this process may still allocate: the minimum of what the machine, its cgroup and its address-space limit
 * leave. INFINITY if no limit is known. */
double hapt_memory_available(void);
/* true: freed memory stays in the process, for phases that often free and reserve large arenas: the kernel then does
 * not have to clear its pages each time (8 % of a long search). false: gives it back to the system. */
void hapt_memory_keep(bool keep);

/* Assigns `count` zeroed elements to `pointer`, or returns HAPT_ERR_MEMORY from the calling function. */
#define HAPT_NEW(pointer, arena, count)                                            \
    do {                                                                           \
        (pointer) = hapt_arena_alloc((arena), (size_t)(count), sizeof *(pointer)); \
        if (!(pointer)) return HAPT_ERR_MEMORY;                                    \
    } while (0)

#endif
