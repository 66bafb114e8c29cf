#include "hapt/arena.h"

#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    ALIGNMENT = 64,
    LARGE_BYTES = 1 << 28, /* from here on, check the available memory first */
#ifdef __SANITIZE_ADDRESS__
    BLOCK_BYTES = 0, /* one block per allocation, so that AddressSanitizer detects overruns */
#else
    BLOCK_BYTES = 1 << 18,
#endif
};

struct hapt_arena_block {
    struct hapt_arena_block *next;
    size_t used, size; /* bytes after the header */
    char pad[ALIGNMENT - 3 * sizeof(size_t)];
};

_Static_assert(sizeof(struct hapt_arena_block) == ALIGNMENT, "the block header keeps the alignment");

void hapt_arena_init(struct hapt_arena *arena)
{
    *arena = (struct hapt_arena){0};
}

void hapt_arena_release(struct hapt_arena *arena)
{
    for (struct hapt_arena_block *block = arena->head, *next; block; block = next) {
        next = block->next;
        free(block);
    }
    hapt_arena_init(arena);
}

void hapt_arena_reset(struct hapt_arena *arena)
{
    struct hapt_arena_block *kept = arena->head;
    for (struct hapt_arena_block *block = kept; block; block = block->next)
        if (block->size > kept->size) kept = block;
    for (struct hapt_arena_block *block = arena->head, *next; block; block = next) {
        next = block->next;
        if (block != kept) free(block);
    }
    if (kept) *kept = (struct hapt_arena_block){.size = kept->size};
    *arena = (struct hapt_arena){.head = kept};
}

void hapt_arena_adopt(struct hapt_arena *arena, struct hapt_arena *from)
{
    struct hapt_arena_block **end = &arena->head;
    while (*end) end = &(*end)->next;
    *end = from->head;
    arena->used_bytes += from->used_bytes;
    hapt_arena_init(from);
}

static void *fail(size_t bytes)
{
    hapt_fail(HAPT_ERR_MEMORY, "give the job more host memory, or plan a smaller model",
              "host memory exhausted: %zu bytes", bytes);
    return NULL;
}

void *hapt_arena_alloc(struct hapt_arena *arena, size_t count, size_t size)
{
    void *memory = hapt_arena_alloc_unset(arena, count, size);
    if (memory) memset(memory, 0, count * size);
    return memory;
}

void *hapt_arena_alloc_unset(struct hapt_arena *arena, size_t count, size_t size)
{
    if (size && count > (SIZE_MAX / 2) / size) return fail(SIZE_MAX);
    const size_t bytes = (count * size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    struct hapt_arena_block *block = arena->head;
    if (!block || block->size - block->used < bytes) {
        const size_t size_bytes = bytes > BLOCK_BYTES ? bytes : BLOCK_BYTES;
        if (bytes > LARGE_BYTES && (double)bytes > hapt_memory_available()) return fail(bytes);
        block = aligned_alloc(ALIGNMENT, sizeof *block + size_bytes);
        if (!block) return fail(bytes);
        *block = (struct hapt_arena_block){.size = size_bytes};
        /* A block for a single large allocation goes after the head, because the head has free bytes. */
        if (bytes > BLOCK_BYTES && arena->head) {
            block->next = arena->head->next;
            arena->head->next = block;
        } else {
            block->next = arena->head;
            arena->head = block;
        }
    }
    void *memory = (char *)(block + 1) + block->used;
    block->used += bytes;
    arena->used_bytes += bytes;
    return memory;
}

char *hapt_arena_strdup(struct hapt_arena *arena, const char *text)
{
    const size_t bytes = strlen(text) + 1;
    char *copy = hapt_arena_alloc(arena, bytes, 1);
    if (copy) memcpy(copy, text, bytes);
    return copy;
}

char *hapt_arena_printf(struct hapt_arena *arena, const char *format, ...)
{
    va_list arguments, again;
    va_start(arguments, format);
    va_copy(again, arguments);
    const int length = vsnprintf(NULL, 0, format, arguments);
    va_end(arguments);
    char *text = length < 0 ? NULL : hapt_arena_alloc(arena, (size_t)length + 1, 1);
    if (text) vsnprintf(text, (size_t)length + 1, format, again);
    va_end(again);
    return text;
}
