/* Finds the tokens of an input, by its type and its header. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <unistd.h>

#include "data_files.h"

static enum hapt_status add_words(const char *path, int64_t size, int64_t header, int width, struct hapt_arena *arena,
                                  struct hapt_token_source *source)
{
    if ((size - header) % width != 0)
        return hapt_fail(HAPT_ERR_INPUT, "choose another --type", "the size of %s is not a multiple of %d-bit tokens",
                         path, 8 * width);
    return hapt_data_add_piece(source, arena,
                               &(struct hapt_token_piece){path, header, (size - header) / width, width, false});
}

static enum hapt_status read_head(const char *path, unsigned char *head, size_t *size)
{
    const int descriptor = open(path, O_RDONLY | O_CLOEXEC);
    const ssize_t got = descriptor < 0 ? -1 : pread(descriptor, head, *size, 0);
    const int error = errno;
    if (descriptor >= 0) close(descriptor);
    if (got < 0) return hapt_fail(HAPT_ERR_INPUT, "check the path", "cannot read %s: %s", path, strerror(error));
    *size = (size_t)got;
    return HAPT_OK;
}

static enum hapt_status add_llmc(const char *path, int64_t size, struct hapt_arena *arena,
                                 struct hapt_token_source *source)
{
    unsigned char head[LLMC_HEADER_BYTES];
    size_t head_bytes = sizeof head;
    int version;
    int64_t count;
    HAPT_TRY(read_head(path, head, &head_bytes));
    if (!hapt_data_is_llmc(head, head_bytes, &version, &count))
        return hapt_fail(HAPT_ERR_INPUT, "llm.c writes magic 20240520, version 1; choose another --type",
                         "%s has no llm.c header", path);
    if (version != LLMC_NARROW && version != LLMC_WIDE)
        return hapt_fail(HAPT_ERR_INPUT, "write tokens of 16 bits (version 1) or of 32 bits (version 7)",
                         "%s has llm.c's version %d, which hapt does not know", path, version);
    const int width = version == LLMC_WIDE ? 4 : 2, header = LLMC_HEADER_BYTES;
    if (count < 0 || (size - header) / width != count || (size - header) % width != 0)
        return hapt_fail(HAPT_ERR_INPUT, "the file is truncated or has extra bytes: create it again",
                         "the header of %s says %" PRId64 " tokens, the file holds %" PRId64, path, count,
                         (size - header) / width);
    return add_words(path, size, header, width, arena, source);
}

enum hapt_status hapt_data_find_tokens(const struct hapt_data_inputs *inputs, const char *type,
                                       struct hapt_arena *arena, struct hapt_token_source *source)
{
    *source = (struct hapt_token_source){.pieces = 0};
    for (int i = 0; i < inputs->count; i++) {
        int64_t size = 0;
        const char *path = inputs->path[i];
        if (!strcmp(type, "megatron")) {
            bool twin = false; /* a pattern names both files */
            for (int other = 0; other < inputs->count; other++)
                twin = twin || hapt_data_is_index_of(path, inputs->path[other]);
            if (twin) continue;
            HAPT_TRY(hapt_data_add_megatron(path, arena, source));
            continue;
        }
        HAPT_TRY(hapt_data_file_size(path, &size));
        if (!strcmp(type, "llmc"))
            HAPT_TRY(add_llmc(path, size, arena, source));
        else
            HAPT_TRY(add_words(path, size, 0,
                               !strcmp(type, "uint16")   ? 2
                               : !strcmp(type, "uint32") ? 4
                                                         : 1,
                               arena, source));
    }
    if (source->count >= 2) return HAPT_OK;
    return hapt_fail(HAPT_ERR_INPUT, "give more text", "%s holds fewer than two tokens", inputs->path[0]);
}
