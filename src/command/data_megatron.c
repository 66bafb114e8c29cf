/*
 * Megatron's indexed data. NAME.bin holds tokens and nothing else. NAME.idx says which: the magic MMIDIDX and two zero
 * bytes; version 1 (8 bytes); the code of the type of a token (1 byte); the numbers of sequences and of entries of the
 * table of documents (8 bytes each); the length of each sequence (4 bytes), its offset in bytes (8); the first sequence
 * of each document, and the number of sequences (8); for data of several modalities, a byte for each sequence.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "data_files.h"

enum { MAGIC_BYTES = 9, HEADER_BYTES = MAGIC_BYTES + 8 + 1 + 8 + 8 };

static const char magic[MAGIC_BYTES] = "MMIDIDX\0";

static const char *with_suffix(const char *path, const char *suffix, struct hapt_arena *arena)
{
    const char *dot = strrchr(path, '.');
    const bool cut = dot && (!strcmp(dot, ".bin") || !strcmp(dot, ".idx"));
    return hapt_arena_printf(arena, "%.*s%s", cut ? (int)(dot - path) : (int)strlen(path), path, suffix);
}

static bool begins_with_magic(const char *path)
{
    char head[MAGIC_BYTES];
    FILE *stream = path ? fopen(path, "rb") : NULL;
    const bool found =
        stream && fread(head, 1, sizeof head, stream) == sizeof head && !memcmp(head, magic, sizeof magic);
    if (stream) fclose(stream);
    return found;
}

bool hapt_data_is_index_of(const char *index, const char *other)
{
    const size_t length = strlen(index), suffix = strlen(".idx");
    return length > suffix && !strcmp(index + length - suffix, ".idx") && strlen(other) == length &&
           !strcmp(other + length - suffix, ".bin") && !strncmp(index, other, length - suffix);
}

bool hapt_data_is_megatron(const char *path)
{
    const char *dot = strrchr(path, '.');
    struct hapt_arena arena;
    hapt_arena_init(&arena);
    const bool found = (dot && !strcmp(dot, ".idx") && begins_with_magic(path)) ||
                       (dot && !strcmp(dot, ".bin") && begins_with_magic(with_suffix(path, ".idx", &arena)));
    hapt_arena_release(&arena);
    return found;
}

static int64_t number_at(const unsigned char *at, int bytes)
{
    uint64_t value = 0;
    for (int b = 0; b < bytes; b++) value |= (uint64_t)at[b] << 8 * b;
    return bytes == 4 ? (int32_t)value : (int64_t)value;
}

static bool is_signed(int code)
{
    return code >= 2 && code <= 5;
}

/* Bytes of a token; 0: no integers. */
static int width_of(int code)
{
    static const int width[] = {[1] = 1, [2] = 1, [3] = 2, [4] = 4, [5] = 8, [8] = 2};
    return code < 0 || code >= (int)(sizeof width / sizeof *width) ? 0 : width[code];
}

struct index {
    const char *path;
    int width;
    bool is_signed;
    int64_t sequences, entries;
    const unsigned char *length, *offset, *document;
};

static enum hapt_status damaged(const char *path, const char *what)
{
    return hapt_fail(HAPT_ERR_INPUT, "create the file again, or choose another --type", "%s: %s", path, what);
}

static enum hapt_status read_index(const char *path, struct hapt_arena *arena, struct index *index)
{
    unsigned char *bytes;
    size_t size;
    HAPT_TRY(hapt_data_read_file(path, arena, &bytes, &size));
    if (size < HEADER_BYTES || memcmp(bytes, magic, sizeof magic) != 0)
        return damaged(path, "this is no index of Megatron's data");
    if (number_at(bytes + MAGIC_BYTES, 8) != 1) return damaged(path, "the version of the index is not 1");
    const int code = bytes[MAGIC_BYTES + 8];
    const int64_t sequences = number_at(bytes + MAGIC_BYTES + 9, 8), entries = number_at(bytes + MAGIC_BYTES + 17, 8);
    const int64_t rest = (int64_t)size - HEADER_BYTES;
    if (sequences < 0 || entries < 0 || sequences > rest / 12 || entries > (rest - 12 * sequences) / 8)
        return damaged(path, "the index is truncated");
    const int64_t needed = 12 * sequences + 8 * entries;
    if (rest != needed && rest != needed + sequences) return damaged(path, "the index has extra bytes");
    if (width_of(code) == 0)
        return hapt_fail(HAPT_ERR_INPUT, "tokens are integers", "%s: the tokens are of Megatron's type %d", path, code);
    *index = (struct index){path,
                            width_of(code),
                            is_signed(code),
                            sequences,
                            entries,
                            bytes + HEADER_BYTES,
                            bytes + HEADER_BYTES + 4 * sequences,
                            bytes + HEADER_BYTES + 12 * sequences};
    return HAPT_OK;
}

static enum hapt_status check_documents(const struct index *index)
{
    int64_t before = 0;
    for (int64_t d = 0; d < index->entries; d++) {
        const int64_t first = number_at(index->document + 8 * d, 8);
        if (first < before || first > index->sequences || (d == 0 && first != 0))
            return damaged(index->path, "the table of documents is damaged");
        before = first;
    }
    return HAPT_OK;
}

enum hapt_status hapt_data_add_megatron(const char *path, struct hapt_arena *arena, struct hapt_token_source *source)
{
    struct index index = {0};
    int64_t size;
    const char *tokens = with_suffix(path, ".bin", arena), *described = with_suffix(path, ".idx", arena);
    if (!tokens || !described) return HAPT_ERR_MEMORY;
    HAPT_TRY(read_index(described, arena, &index));
    HAPT_TRY(check_documents(&index));
    HAPT_TRY(hapt_data_file_size(tokens, &size));
    for (int64_t s = 0; s < index.sequences; s++) {
        const int64_t length = number_at(index.length + 4 * s, 4), offset = number_at(index.offset + 8 * s, 8);
        if (length < 0 || offset < 0 || length > size / index.width || offset > size - length * index.width)
            return hapt_fail(HAPT_ERR_INPUT, "the file is truncated, or belongs to another index",
                             "%s: sequence %" PRId64 " lies beyond the end of %s", described, s, tokens);
        HAPT_TRY(hapt_data_add_piece(source, arena,
                                     &(struct hapt_token_piece){tokens, offset, length, index.width, index.is_signed}));
    }
    return HAPT_OK;
}
