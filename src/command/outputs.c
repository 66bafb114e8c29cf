/* Checks that an output is not an input, not a file of another kind, and in a writable folder. */
#include "outputs.h"

#include <errno.h>
#include <jansson.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "hapt/atomic_file.h"
#include "hapt/h5.h"

enum { MOST_PATH = 4096 };

/* Options of any command that name an input. */
static const char *const inputs[] = {"input", "cluster",    "data",       "weights", "profile",
                                     "plan",  "checkpoint", "efficiency", "run",     "sinfo"};

static bool is_same(const char *path, const struct stat *about)
{
    struct stat other;
    return path && stat(path, &other) == 0 && other.st_dev == about->st_dev && other.st_ino == about->st_ino;
}

static bool words_are_files(const struct hapt_config *config)
{
    const enum hapt_command command = hapt_config_command(config);
    return command != HAPT_COMMAND_MODEL && command != HAPT_COMMAND_CLUSTER;
}

/* Path of the input that is the same file, or NULL. */
static const char *input_of(const struct hapt_config *config, const struct stat *about)
{
    for (size_t i = 0; i < sizeof inputs / sizeof *inputs; i++)
        if (is_same(hapt_config_text(config, inputs[i]), about)) return hapt_config_text(config, inputs[i]);
    for (int w = 0; w < hapt_config_word_count(config); w++)
        if (words_are_files(config) && is_same(hapt_config_word(config, w), about)) return hapt_config_word(config, w);
    return NULL;
}

static bool is_json_with(const char *path, const char *key)
{
    json_t *root = json_load_file(path, 0, NULL);
    const bool found = json_object_get(root, key) != NULL;
    json_decref(root);
    return found;
}

static bool begins_with(const char *path, const char *text)
{
    char read[128] = "";
    FILE *file = fopen(path, "r");
    const size_t count = file ? fread(read, 1, sizeof read - 1, file) : 0;
    if (file) fclose(file);
    return count >= strlen(text) && memcmp(read, text, strlen(text)) == 0;
}

/* False for damaged files and files without a format. */
static bool is_kind(const char *path, const struct hapt_output *output)
{
    char format[64] = "";
    if (output->begins) return begins_with(path, output->begins);
    if (!output->format) return is_json_with(path, output->key);
    const enum hapt_status status = hapt_h5_peek_text(path, NULL, 0, true, "format", format, sizeof format);
    hapt_fail_reset();
    return status == HAPT_OK && !strcmp(format, output->format);
}

static enum hapt_status check_existing(const struct hapt_config *config, const char *path,
                                       const struct hapt_output *output)
{
    struct stat about;
    const bool overwrite = hapt_config_bool(config, "overwrite");
    const char *option = output->option;
    if (lstat(path, &about) != 0) return HAPT_OK; /* no such file, or hapt_outputs_try_parent reports the error */
    if (S_ISLNK(about.st_mode) && !overwrite)
        return hapt_fail(HAPT_ERR_USAGE, "give the target of the link, or --overwrite yes to replace the link itself",
                         "--%s %s is a symbolic link", option, path);
    if (stat(path, &about) != 0) return HAPT_OK;
    if (!S_ISREG(about.st_mode))
        return hapt_fail(HAPT_ERR_USAGE, "give the path of a file", "--%s %s is %s; hapt replaces only files", option,
                         path, S_ISDIR(about.st_mode) ? "a folder" : "not a regular file");
    const char *input = input_of(config, &about);
    if (input && !overwrite)
        return hapt_fail(HAPT_ERR_USAGE, "give another name, or --overwrite yes to replace the input",
                         "--%s %s is the input %s", option, path, input);
    if (overwrite || about.st_size == 0 || is_kind(path, output)) return HAPT_OK;
    return hapt_fail(HAPT_ERR_USAGE, "give another name, or --overwrite yes to replace it",
                     "--%s %s exists and is not %s", option, path,
                     output->format   ? output->format
                     : output->begins ? "a picture of hapt"
                     : output->kind   ? output->kind
                                      : "such a file");
}

enum hapt_status hapt_outputs_try_parent(const char *option, const char *path)
{
    char folder[MOST_PATH], probe[MOST_PATH + HAPT_TEMPORARY_SUFFIX_BYTES];
    struct stat about;
    if (snprintf(folder, sizeof folder, "%s", path) >= (int)sizeof folder)
        return hapt_fail(HAPT_ERR_IO, "use a shorter path", "path too long: %.60s...", path);
    for (;;) { /* up to the first folder that exists */
        char *slash = strrchr(folder, '/');
        if (!slash) snprintf(folder, sizeof folder, ".");
        if (slash) slash[slash == folder ? 1 : 0] = '\0';
        if (stat(folder, &about) == 0) break;
        if (errno != ENOENT || !slash)
            return hapt_fail(HAPT_ERR_IO, "check permissions", "--%s %s cannot be written: %s: %s", option, path,
                             folder, strerror(errno));
    }
    if (!S_ISDIR(about.st_mode))
        return hapt_fail(HAPT_ERR_IO, "give a path inside a folder", "--%s %s cannot be written: %s is not a folder",
                         option, path, folder);
    char name[MOST_PATH];
    snprintf(name, sizeof name, "%.*s/.hapt-probe", MOST_PATH - 20, folder);
    const int descriptor = hapt_atomic_file_open(name, probe, sizeof probe);
    if (descriptor < 0)
        return hapt_fail(HAPT_ERR_IO, "check permissions and free space, or give another folder",
                         "--%s %s cannot be written: %s: %s", option, path, folder, strerror(errno));
    close(descriptor);
    unlink(probe);
    return HAPT_OK;
}

/* Refuses two outputs with the same path; they need not exist yet. */
static enum hapt_status check_pair(const struct hapt_config *config, const char *first, const char *second)
{
    char a[PATH_MAX], b[PATH_MAX];
    const char *one = hapt_config_text(config, first), *other = hapt_config_text(config, second);
    const bool same = !strcmp(one, other) || (realpath(one, a) && realpath(other, b) && !strcmp(a, b));
    if (!same) return HAPT_OK;
    return hapt_fail(HAPT_ERR_USAGE, "give two different names", "--%s and --%s are the same file %s", first, second,
                     one);
}

static enum hapt_status check_all(const struct hapt_config *config, int count, const struct hapt_output *output)
{
    for (int i = 0; i < count; i++) {
        const char *path = hapt_config_text(config, output[i].option);
        if (!path) continue;
        HAPT_TRY(check_existing(config, path, &output[i]));
        HAPT_TRY(hapt_outputs_try_parent(output[i].option, path));
        for (int j = 0; j < i; j++)
            if (hapt_config_text(config, output[j].option))
                HAPT_TRY(check_pair(config, output[j].option, output[i].option));
    }
    return HAPT_OK;
}

enum hapt_status hapt_outputs_check(const struct hapt_env *env, const struct hapt_config *config, int count,
                                    const struct hapt_output *output)
{
    return hapt_env_agree(env->world, env->world_rank == 0 ? check_all(config, count, output) : HAPT_OK);
}
