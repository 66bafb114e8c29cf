#include "json_options.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define CONFIG_LIMIT ((size_t)1 << 20)

static enum hapt_status cannot_read(const char *path, int error)
{
    return hapt_fail(error == ENOMEM ? HAPT_ERR_MEMORY : HAPT_ERR_INPUT, NULL, "%s cannot be read: %s", path,
                     strerror(error));
}

static enum hapt_status read_text(const char *path, size_t limit, char **text, size_t *size)
{
    struct stat about;
    const int descriptor = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (descriptor < 0) return cannot_read(path, errno);
    enum hapt_status status = HAPT_OK;
    if (fstat(descriptor, &about) != 0 || !S_ISREG(about.st_mode))
        status = hapt_fail(HAPT_ERR_INPUT, NULL, "%s is not a regular file", path);
    else if ((uint64_t)about.st_size > limit)
        status = hapt_fail(HAPT_ERR_INPUT, NULL, "%s has %lld bytes; at most %zu are possible", path,
                           (long long)about.st_size, limit);
    else if (!(*text = malloc((size_t)about.st_size + 1)))
        status = hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory for %s", path);
    while (status == HAPT_OK && *size < (size_t)about.st_size) {
        const ssize_t got = read(descriptor, *text + *size, (size_t)about.st_size - *size);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) status = cannot_read(path, errno);
        if (got <= 0) break;
        *size += (size_t)got;
    }
    close(descriptor);
    return status;
}

enum hapt_status json_read(const char *path, size_t limit, json_t **json)
{
    char *text = NULL;
    size_t size = 0;
    json_error_t error;
    enum hapt_status status = read_text(path, limit, &text, &size);
    if (status == HAPT_OK) {
        *json = json_loadb(text, size, JSON_REJECT_DUPLICATES, &error);
        if (!*json)
            status = hapt_fail(HAPT_ERR_INPUT, "the file is damaged: download it again", "%s, line %d: %s", path,
                               error.line, error.text);
    }
    free(text);
    return status;
}

const char *json_shown(const json_t *value, char text[64])
{
    char *all = json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT | JSON_REAL_PRECISION(9));
    snprintf(text, 64, "%.50s%s", all ? all : "?", all && strlen(all) > 50 ? "..." : "");
    free(all);
    return text;
}

enum hapt_status json_options_open(const char *path, struct json_options *options)
{
    json_t *json = NULL;
    HAPT_TRY(json_read(path, CONFIG_LIMIT, &json));
    *options = (struct json_options){.path = path};
    if (json_is_object(json)) options->left = json_copy(json);
    const bool is_object = json_is_object(json);
    json_decref(json);
    if (!is_object) return hapt_fail(HAPT_ERR_INPUT, NULL, "%s does not contain a JSON object", path);
    return options->left ? HAPT_OK : hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory for %s", path);
}

void json_options_release(struct json_options *options)
{
    json_decref(options->left);
    options->left = NULL;
}

enum hapt_status json_options_finish(const struct json_options *options)
{
    const char *key;
    json_t *value;
    char text[64];
    json_object_foreach(options->left, key, value)
    {
        if (json_is_null(value)) continue;
        return hapt_fail(HAPT_ERR_INPUT, "if it changes nothing in the forward pass, remove it from config.json",
                         "%s: unknown option %s%.60s = %s", options->path, options->where, key,
                         json_shown(value, text));
    }
    return HAPT_OK;
}

bool json_options_names(const struct json_options *options, const char *key)
{
    return json_object_get(options->left, key) != NULL;
}

bool json_options_has(const struct json_options *options, const char *key)
{
    const json_t *value = json_object_get(options->left, key);
    return value && !json_is_null(value);
}

/* Removes and returns the option; the caller releases it. NULL: absent. */
static json_t *take(struct json_options *options, const char *key)
{
    json_t *value = json_object_get(options->left, key);
    if (!value) return NULL;
    json_incref(value);
    json_object_del(options->left, key);
    if (!json_is_null(value)) return value;
    json_decref(value);
    return NULL;
}

json_t *json_options_take(struct json_options *options, const char *key)
{
    return take(options, key);
}

static enum hapt_status missing(const struct json_options *options, const char *key)
{
    return hapt_fail(HAPT_ERR_INPUT, "compare it with the published file", "%s: %s%s is missing", options->path,
                     options->where, key);
}

static enum hapt_status wrong(const struct json_options *options, const char *key, const json_t *value,
                              const char *what)
{
    char text[64];
    return hapt_fail(HAPT_ERR_INPUT, "compare it with the published file", "%s: %s%s is %s, not %s", options->path,
                     options->where, key, json_shown(value, text), what);
}

enum hapt_status json_options_int(struct json_options *options, const char *key, int64_t low, int64_t high,
                                  int64_t absent, int64_t *value)
{
    json_t *json = take(options, key);
    char range[80];
    *value = absent;
    if (!json) return HAPT_OK;
    enum hapt_status status = HAPT_OK;
    *value = json_integer_value(json);
    snprintf(range, sizeof range, "an integer from %" PRId64 " to %" PRId64, low, high);
    if (!json_is_integer(json) || *value < low || *value > high) status = wrong(options, key, json, range);
    json_decref(json);
    return status;
}

enum hapt_status json_options_need_int(struct json_options *options, const char *key, int64_t low, int64_t high,
                                       int64_t *value)
{
    if (!json_options_has(options, key)) return missing(options, key);
    return json_options_int(options, key, low, high, 0, value);
}

enum hapt_status json_options_real(struct json_options *options, const char *key, double low, double high,
                                   double absent, double *value)
{
    json_t *json = take(options, key);
    char range[80];
    *value = absent;
    if (!json) return HAPT_OK;
    enum hapt_status status = HAPT_OK;
    *value = json_number_value(json);
    snprintf(range, sizeof range, "a number from %g to %g", low, high);
    if (!json_is_number(json) || !(*value >= low && *value <= high)) status = wrong(options, key, json, range);
    json_decref(json);
    return status;
}

enum hapt_status json_options_need_real(struct json_options *options, const char *key, double low, double high,
                                        double *value)
{
    if (!json_options_has(options, key)) return missing(options, key);
    return json_options_real(options, key, low, high, 0, value);
}

enum hapt_status json_options_bool(struct json_options *options, const char *key, bool absent, bool *value)
{
    json_t *json = take(options, key);
    *value = absent;
    if (!json) return HAPT_OK;
    *value = json_is_true(json);
    const enum hapt_status status = json_is_boolean(json) ? HAPT_OK : wrong(options, key, json, "true or false");
    json_decref(json);
    return status;
}

enum hapt_status json_options_text(struct json_options *options, const char *key, const char *absent,
                                   struct hapt_arena *arena, const char **value)
{
    json_t *json = take(options, key);
    *value = absent;
    if (!json) return HAPT_OK;
    enum hapt_status status = HAPT_OK;
    if (!json_is_string(json))
        status = wrong(options, key, json, "a text");
    else if (!(*value = hapt_arena_strdup(arena, json_string_value(json))))
        status = HAPT_ERR_MEMORY;
    json_decref(json);
    return status;
}

enum hapt_status json_options_object(struct json_options *options, const char *key, struct json_options *inside)
{
    json_t *json = take(options, key);
    *inside = (struct json_options){.path = options->path};
    snprintf(inside->where, sizeof inside->where, "%.30s%.30s.", options->where, key);
    enum hapt_status status = HAPT_OK;
    if (json && !json_is_object(json)) status = wrong(options, key, json, "an object");
    inside->left = json && status == HAPT_OK ? json_copy(json) : json_object();
    json_decref(json);
    if (status == HAPT_OK && !inside->left)
        status = hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory for %s", options->path);
    return status;
}

void json_options_drop(struct json_options *options, const char *const *keys)
{
    for (; *keys; keys++) json_object_del(options->left, *keys);
}

enum hapt_status json_options_expect_bool(struct json_options *options, const char *key, bool value)
{
    bool found;
    HAPT_TRY(json_options_bool(options, key, value, &found));
    if (found == value) return HAPT_OK;
    return hapt_fail(HAPT_ERR_INPUT, "hapt cannot compute this variant", "%s: %s%s is %s; only %s is possible",
                     options->path, options->where, key, found ? "true" : "false", value ? "true" : "false");
}

enum hapt_status json_options_expect_int(struct json_options *options, const char *key, int64_t value)
{
    int64_t found;
    HAPT_TRY(json_options_int(options, key, INT64_MIN, INT64_MAX, value, &found));
    if (found == value) return HAPT_OK;
    return hapt_fail(HAPT_ERR_INPUT, "hapt cannot compute this variant",
                     "%s: %s%s is %" PRId64 "; only %" PRId64 " is possible", options->path, options->where, key, found,
                     value);
}
