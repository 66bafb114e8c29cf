/* Recognises the type of a data input from its content; an ambiguous file is an error. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data_files.h"
#include "hapt/text.h"

enum { BLOCK_BYTES = 1 << 16 };
enum { LLMC_MAGIC = 20240520, LLMC_WIDE_MAGIC = 20240801 };

/* Files that are often given by mistake, with a hint for each. */
static const struct {
    const char *signature;
    size_t bytes;
    const char *name, *hint;
} known[] = {
    {"\211HDF\r\n\032\n", 8, "an HDF5 file",
     "give a data file to --data directly; see `hapt help data` for what a data file holds"},
    {"\037\213", 2, "compressed by gzip", "unpack it first"},
    {"\375"
     "7zXZ",
     5, "compressed by xz", "unpack it first"},
    {"\050\265\057\375", 4, "compressed by zstd", "unpack it first"},
    {"BZh", 3, "compressed by bzip2", "unpack it first"},
    {"PK\003\004", 4, "a zip archive", "unpack it first"},
    {"PAR1", 4, "a Parquet file", "write its text to a plain file, or its tokens as 16-bit numbers (--type uint16)"},
    {"\223NUMPY", 6, "a NumPy array",
     "write its tokens without the header (array.tofile) and give --type uint16 or uint32"},
    {"\377\376", 2, "UTF-16 text", "convert it: iconv -f UTF-16 -t UTF-8"},
    {"\376\377", 2, "UTF-16 text", "convert it: iconv -f UTF-16 -t UTF-8"},
};

static int64_t word(const unsigned char *bytes, int index)
{
    const unsigned char *at = bytes + 4 * (size_t)index;
    return (int32_t)((uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24);
}

bool hapt_data_is_llmc(const unsigned char *bytes, size_t size, int *version, int64_t *count)
{
    if (size < LLMC_HEADER_BYTES || (word(bytes, 0) != LLMC_MAGIC && word(bytes, 0) != LLMC_WIDE_MAGIC)) return false;
    *version = (int)word(bytes, 1);
    *count = word(bytes, 2);
    return true;
}

struct content {
    struct hapt_text text;
    bool labels; /* each record of CIFAR-10's size begins with a class */
    int64_t size;
    size_t head_bytes;
    unsigned char head[LLMC_HEADER_BYTES];
};

static void read_block(struct content *content, const unsigned char *block, size_t size)
{
    hapt_text_read(&content->text, block, size);
    const int64_t past = content->size % CIFAR_RECORD_BYTES;
    for (size_t at = past == 0 ? 0 : (size_t)(CIFAR_RECORD_BYTES - past); at < size; at += CIFAR_RECORD_BYTES)
        content->labels = content->labels && block[at] < CIFAR_CLASSES;
    if (content->size == 0) {
        content->head_bytes = size < sizeof content->head ? size : sizeof content->head;
        memcpy(content->head, block, content->head_bytes);
    }
    content->size += (int64_t)size;
}

static enum hapt_status read_content(const char *path, struct content *content)
{
    FILE *stream = fopen(path, "rb");
    if (!stream) return hapt_fail(HAPT_ERR_INPUT, "check the path", "cannot open %s: %s", path, strerror(errno));
    unsigned char *block = malloc(BLOCK_BYTES);
    *content = (struct content){.text = {.plain = true}, .labels = true};
    for (size_t got; block && (got = fread(block, 1, BLOCK_BYTES, stream)) > 0;) read_block(content, block, got);
    const int error = ferror(stream) ? errno : 0;
    free(block);
    fclose(stream);
    if (!block) return hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory to read %s", path);
    if (error == EISDIR) return hapt_fail(HAPT_ERR_INPUT, "give a file", "%s is not a file", path);
    return error ? hapt_fail(HAPT_ERR_IO, NULL, "cannot read %s: %s", path, strerror(error)) : HAPT_OK;
}

enum hapt_status hapt_data_recognise(const char *path, const char **type)
{
    struct content content;
    int version;
    int64_t count;
    if (hapt_data_is_megatron(path)) {
        *type = "megatron";
        return HAPT_OK;
    }
    HAPT_TRY(read_content(path, &content));
    if (content.size == 0) return hapt_fail(HAPT_ERR_INPUT, "give a file with text or tokens", "%s is empty", path);
    if (hapt_data_is_llmc(content.head, content.head_bytes, &version, &count))
        *type = "llmc";
    else if (content.text.plain && content.text.missing == 0)
        *type = "bytes";
    else if (content.labels && content.size % CIFAR_RECORD_BYTES == 0)
        *type = "cifar10";
    else {
        for (size_t k = 0; k < sizeof known / sizeof *known; k++)
            if (content.head_bytes >= known[k].bytes && memcmp(content.head, known[k].signature, known[k].bytes) == 0)
                return hapt_fail(HAPT_ERR_INPUT, known[k].hint, "%s is %s, neither text nor tokens", path,
                                 known[k].name);
        return hapt_fail(HAPT_ERR_USAGE, "give --type uint16 (nanoGPT's .bin), uint32, or bytes (each byte a token)",
                         "%s is not recognised: it is not plain text (ASCII, UTF-8) and has no known header", path);
    }
    return HAPT_OK;
}
