/*
 * Arenas: memory that is given back all at once.
 *
 * A phase gets two: what it leaves in `result` outlives it, `scratch` is reset by its caller.
 * Every allocation is zeroed and aligned to 64 bytes.
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
/* Empties the arena but keeps its largest block for what comes; pointers into it are void from here on. */
void hapt_arena_reset(struct hapt_arena *arena);

/* NULL with a recorded HAPT_ERR_MEMORY when memory is exhausted (a large request that the host cannot back is refused,
 * not left to the kernel's killer) or count * size overflows. A zero size is served. */
void *hapt_arena_alloc(struct hapt_arena *arena, size_t count, size_t size);
char *hapt_arena_strdup(struct hapt_arena *arena, const char *text);
char *hapt_arena_printf(struct hapt_arena *arena, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Bytes that this process may still take: the least of what the machine, its control group and its address space leave;
 * INFINITY where nothing tells. */
double hapt_memory_available(void);

/* Assigns `count` zeroed elements to `pointer`, or returns HAPT_ERR_MEMORY from the calling function. */
#define HAPT_NEW(pointer, arena, count)                                            \
    do {                                                                           \
        (pointer) = hapt_arena_alloc((arena), (size_t)(count), sizeof *(pointer)); \
        if (!(pointer)) return HAPT_ERR_MEMORY;                                    \
    } while (0)

#endif
