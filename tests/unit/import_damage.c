/*
 * Damaged folders of published models: each is read in full, or refused with one error. Bytes, numbers, words and
 * lengths of config.json, of safetensors and of their index change at random; the sizes of files, too. Memory that is
 * reserved for a folder stays below a limit that its own size gives.
 */
#include <malloc.h>
#include <unistd.h>

#include "hapt/import.h"
#include "test.h"

enum { MAX_FILES = 12, SPARE = 64 };

struct file {
    char name[64];
    unsigned char *bytes;
    size_t size;
};
struct folder {
    int count;
    struct file file[MAX_FILES];
    size_t bytes;
};

static const char *const models[] = {"gemma3", "gpt2", "llama3", "mistral", "mixtral", "qwen2", "qwen3", "qwen3-moe"};
enum { MODELS = sizeof models / sizeof models[0] };
static struct folder originals[MODELS];
static char scratch[] = "/tmp/hapt-import-XXXXXX";
static uint64_t state = 1;

static uint64_t draw(uint64_t below)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state % below;
}

static void load_file(struct folder *folder, const char *model, const char *name)
{
    char path[256];
    struct file *file = &folder->file[folder->count];
    snprintf(path, sizeof path, "tests/data/hf/%s/%s", model, name);
    FILE *stream = fopen(path, "rb");
    if (!stream) return;
    fseek(stream, 0, SEEK_END);
    file->size = (size_t)ftell(stream);
    rewind(stream);
    file->bytes = malloc(file->size);
    CHECK(fread(file->bytes, 1, file->size, stream) == file->size);
    fclose(stream);
    snprintf(file->name, sizeof file->name, "%s", name);
    folder->bytes += file->size;
    folder->count++;
}

static void load_folder(struct folder *folder, const char *model)
{
    char name[64];
    load_file(folder, model, "config.json");
    load_file(folder, model, "model.safetensors");
    load_file(folder, model, "model.safetensors.index.json");
    for (int i = 1; i <= 7; i++) {
        snprintf(name, sizeof name, "model-0000%d-of-00007.safetensors", i);
        load_file(folder, model, name);
    }
    CHECK(folder->count >= 2);
}

static void write_file(const char *name, const unsigned char *bytes, size_t size)
{
    char path[256];
    snprintf(path, sizeof path, "%s/%s", scratch, name);
    FILE *stream = fopen(path, "wb");
    CHECK(stream && fwrite(bytes, 1, size, stream) == size && fclose(stream) == 0);
}

static void clear_folder(const struct folder *folder)
{
    char path[256];
    for (int i = 0; i < folder->count; i++) {
        snprintf(path, sizeof path, "%s/%s", scratch, folder->file[i].name);
        unlink(path);
    }
}

/* Replaces `old` bytes at `at` by `text`. */
static size_t replace(unsigned char *bytes, size_t size, size_t at, size_t old, const char *text)
{
    const size_t length = strlen(text);
    if (at + old > size || size - old + length > size + SPARE) return size;
    memmove(bytes + at + length, bytes + at + old, size - at - old);
    memcpy(bytes + at, text, length);
    return size - old + length;
}

/* A number, word or bracket in the text [first, end) becomes another one. */
static size_t change_text(unsigned char *bytes, size_t size, size_t first, size_t end)
{
    static const char *const texts[] = {"0",      "-1",   "1",     "3",    "7",     "1e308", "99999999999999999999",
                                        "null",   "true", "false", "\"\"", "[]",    "{}",    ",",
                                        "]",      "}",    "\"x\"", "0.5",  "65536", "4096",  "1024",
                                        "\\u0000"};
    size_t at = first + draw(end - first), stop = at;
    while (at > first && (bytes[at - 1] == '.' || (bytes[at - 1] >= '0' && bytes[at - 1] <= '9'))) at--;
    while (stop < end && (bytes[stop] == '.' || (bytes[stop] >= '0' && bytes[stop] <= '9'))) stop++;
    return replace(bytes, size, at, stop > at ? stop - at : 1, texts[draw(sizeof texts / sizeof texts[0])]);
}

static size_t damage(unsigned char *bytes, size_t size, bool is_tensors)
{
    uint64_t header = 0;
    for (int i = 7; is_tensors && i >= 0; i--) header = header << 8 | bytes[i];
    const size_t first = is_tensors ? 8 : 0, end = is_tensors ? 8 + (size_t)header : size;
    for (uint64_t times = 1 + draw(3); times > 0; times--) switch (draw(5)) {
        case 0: bytes[draw(size)] = (unsigned char)draw(256); break;
        case 1: bytes[first + draw(end - first)] = (unsigned char)draw(256); break;
        case 2: return draw(size);
        case 3:
            if (is_tensors && draw(2)) bytes[draw(8)] = (unsigned char)draw(256);
            break;
        default: return change_text(bytes, size, first, end);
        }
    return size;
}

/* Opens the folder and reads all weights. */
static enum hapt_status read_all(const struct hapt_env *env, const struct hapt_config *config, size_t *reserved)
{
    struct hapt_arena arena;
    struct hapt_import *import;
    hapt_arena_init(&arena);
    const struct mallinfo2 before = mallinfo2();
    enum hapt_status status = hapt_import_open(env, scratch, config, &arena, &import);
    const struct mallinfo2 after = mallinfo2();
    *reserved = after.uordblks + after.hblkhd - before.uordblks - before.hblkhd;
    for (int t = 0; status == HAPT_OK && t < import->model->graph->tensor_count; t++) {
        const struct hapt_tensor *tensor = &import->model->graph->tensor[t];
        if (tensor->kind != HAPT_TENSOR_PARAMETER) continue;
        float *value = malloc((size_t)hapt_tensor_elements(tensor) * sizeof *value);
        status = import->weights.read(import->weights.context, tensor, value);
        free(value);
    }
    hapt_arena_release(&arena);
    return status;
}

static void damaged_folders(void)
{
    const int inputs = getenv("HAPT_LONG") && strcmp(getenv("HAPT_LONG"), "0") != 0 ? 20000 : 2000;
    char *const words[] = {"hapt", "import", scratch, "--sequence", "16", "--microbatch", "1", "--output", "m.h5"};
    struct hapt_arena arena;
    struct hapt_config *config;
    const struct hapt_env env = {.world_rank = 1}; /* warnings are rank 0's */
    int good = 0;
    hapt_arena_init(&arena);
    CHECK_OK(hapt_config_parse(sizeof words / sizeof words[0], (char **)words, &arena, &config));
    for (int i = 0; i < inputs; i++) {
        const struct folder *folder = &originals[draw(MODELS)];
        const int which = (int)draw((uint64_t)folder->count);
        for (int f = 0; f < folder->count; f++) {
            const struct file *file = &folder->file[f];
            unsigned char *bytes = malloc(file->size + SPARE);
            size_t size = file->size;
            memcpy(bytes, file->bytes, size);
            if (f == which)
                size = damage(bytes, size, strstr(file->name, ".safetensors") && !strstr(file->name, ".json"));
            write_file(file->name, bytes, size);
            free(bytes);
        }
        size_t reserved;
        hapt_fail_reset();
        const enum hapt_status status = read_all(&env, config, &reserved);
        good += status == HAPT_OK;
        CHECK_MESSAGE(status == HAPT_OK || status == HAPT_ERR_INPUT || status == HAPT_ERR_USAGE,
                      "input %d: status %d: %s", i, status, hapt_fail_message());
        CHECK_MESSAGE(status == HAPT_OK || *hapt_fail_message(), "input %d: no message", i);
        CHECK_MESSAGE(reserved < folder->bytes + (1 << 20), "input %d: %zu bytes reserved for a folder of %zu", i,
                      reserved, folder->bytes);
        clear_folder(folder);
    }
    /* Changed weights are weights: a part of the folders is read. */
    CHECK_MESSAGE(good > inputs / 50 && good < inputs / 2, "%d of %d folders were read", good, inputs);
    hapt_arena_release(&arena);
}

int main(int argc, char **argv)
{
    test_init(&argc, &argv);
    CHECK(mkdtemp(scratch) != NULL);
    for (int m = 0; m < MODELS; m++) load_folder(&originals[m], models[m]);
    RUN(damaged_folders);
    for (int m = 0; m < MODELS; m++)
        for (int f = 0; f < originals[m].count; f++) free(originals[m].file[f].bytes);
    rmdir(scratch);
    return test_finish();
}
