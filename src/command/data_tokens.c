/* Tokens of files that are larger than memory, read in blocks. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "data_files.h"
#include "hapt/progress.h"

enum hapt_status hapt_data_add_piece(struct hapt_token_source *source, struct hapt_arena *arena,
                                     const struct hapt_token_piece *piece)
{
    struct hapt_token_piece *last = source->pieces > 0 ? &source->piece[source->pieces - 1] : NULL;
    if (piece->count == 0) return HAPT_OK;
    source->count += piece->count;
    if (last && last->path == piece->path && last->width == piece->width &&
        last->offset + last->count * last->width == piece->offset) {
        last->count += piece->count;
        return HAPT_OK;
    }
    if (source->pieces == source->capacity) {
        struct hapt_token_piece *larger;
        source->capacity = 2 * source->capacity + 16;
        HAPT_NEW(larger, arena, source->capacity);
        if (source->pieces > 0) memcpy(larger, source->piece, (size_t)source->pieces * sizeof *larger);
        source->piece = larger;
    }
    source->piece[source->pieces++] = *piece;
    return HAPT_OK;
}

/* Little-endian numbers; those that are no 32-bit tokens become one that is refused. */
static void decode(const unsigned char *at, const struct hapt_token_piece *piece, int64_t count, uint32_t *token)
{
    const int width = piece->width;
    for (int64_t i = 0; i < count; i++, at += width) {
        uint64_t value = 0;
        for (int b = 0; b < width; b++) value |= (uint64_t)at[b] << 8 * b;
        const bool negative = piece->is_signed && at[width - 1] >> 7;
        token[i] = negative || value > UINT32_MAX ? UINT32_MAX : (uint32_t)value;
    }
}

static enum hapt_status read_all(int descriptor, const char *path, unsigned char *bytes, size_t size, int64_t offset)
{
    for (size_t done = 0; done < size;) {
        const ssize_t got = pread(descriptor, bytes + done, size - done, (off_t)(offset + (int64_t)done));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return hapt_fail(HAPT_ERR_IO, NULL, "cannot read %s: %s", path, strerror(errno));
        if (got == 0)
            return hapt_fail(HAPT_ERR_INPUT, "do not change the file while it is read", "cannot read all of %s", path);
        done += (size_t)got;
    }
    return HAPT_OK;
}

struct reader {
    hapt_token_visitor *visit;
    void *context;
    unsigned char *bytes; /* of the part of a piece that is read */
    uint32_t *token;      /* [HAPT_TOKEN_BLOCK] */
    int64_t first, filled;
    int descriptor;
    const char *path; /* that is open */
};

static enum hapt_status pass_block(struct reader *reader)
{
    const enum hapt_status status = reader->visit(reader->context, reader->first, reader->token, reader->filled);
    reader->first += reader->filled;
    reader->filled = 0;
    hapt_progress_advance(1);
    return status;
}

static enum hapt_status read_piece(struct reader *reader, const struct hapt_token_piece *piece)
{
    if (reader->path != piece->path) {
        if (reader->descriptor >= 0) close(reader->descriptor);
        reader->path = piece->path;
        reader->descriptor = open(piece->path, O_RDONLY | O_CLOEXEC);
        if (reader->descriptor < 0)
            return hapt_fail(HAPT_ERR_INPUT, "check the path", "cannot open %s: %s", piece->path, strerror(errno));
    }
    for (int64_t done = 0, part; done < piece->count; done += part) {
        part = HAPT_TOKEN_BLOCK - reader->filled;
        if (part > piece->count - done) part = piece->count - done;
        HAPT_TRY(read_all(reader->descriptor, piece->path, reader->bytes, (size_t)part * (size_t)piece->width,
                          piece->offset + done * piece->width));
        decode(reader->bytes, piece, part, reader->token + reader->filled);
        reader->filled += part;
        if (reader->filled == HAPT_TOKEN_BLOCK) HAPT_TRY(pass_block(reader));
    }
    return HAPT_OK;
}

enum hapt_status hapt_data_visit_tokens(const struct hapt_token_source *source, hapt_token_visitor *visit,
                                        void *context)
{
    struct reader reader = {.visit = visit,
                            .context = context,
                            .bytes = malloc((size_t)HAPT_TOKEN_BLOCK * sizeof(uint64_t)),
                            .token = malloc(HAPT_TOKEN_BLOCK * sizeof(uint32_t)),
                            .descriptor = -1};
    enum hapt_status status =
        reader.bytes && reader.token ? HAPT_OK : hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory to read tokens");
    for (int64_t p = 0; p < source->pieces && status == HAPT_OK; p++) status = read_piece(&reader, &source->piece[p]);
    if (status == HAPT_OK && reader.filled > 0) status = pass_block(&reader);
    if (reader.descriptor >= 0) close(reader.descriptor);
    free(reader.bytes);
    free(reader.token);
    return status;
}

long hapt_data_visit_parts(const struct hapt_token_source *source)
{
    return (long)((source->count + HAPT_TOKEN_BLOCK - 1) / HAPT_TOKEN_BLOCK);
}
