#include "json_offset.h"

#include <string.h>

static const char *skip_space(const char *at)
{
    return at + strspn(at, " \t\r\n");
}

/* `at` is the opening quote; returns the character after the closing one. */
static const char *skip_string(const char *at)
{
    for (at++; *at && *at != '"'; at++)
        if (*at == '\\' && at[1]) at++;
    return *at ? at + 1 : at;
}

/* Returns the end of the value at `at`. Counts brackets instead of recursing, because files may nest deeply. */
static const char *skip_value(const char *at)
{
    int depth = 0;
    while (*at) {
        if (*at == '"') {
            at = skip_string(at);
        } else if (*at == '{' || *at == '[') {
            depth++;
            at++;
        } else if (*at == '}' || *at == ']') {
            if (depth == 0) return at;
            depth--;
            at++;
        } else if (*at == ',' && depth == 0) {
            return at;
        } else {
            at++;
            continue;
        }
        if (depth == 0) return at;
    }
    return at;
}

const char *hapt_json_offset_value(const char *at)
{
    return skip_space(at);
}

const char *hapt_json_offset_key(const char *object, const char *key)
{
    const size_t length = strlen(key);
    if (*object != '{') return object;
    const char *at = skip_space(object + 1);
    while (*at == '"') {
        const char *end = skip_string(at);
        if ((size_t)(end - at) == length + 2 && strncmp(at + 1, key, length) == 0) return at;
        at = skip_space(end);
        if (*at != ':') break;
        at = skip_space(skip_value(skip_space(at + 1)));
        if (*at != ',') break;
        at = skip_space(at + 1);
    }
    return object;
}

const char *hapt_json_offset_member(const char *object, const char *key)
{
    const char *at = hapt_json_offset_key(object, key);
    if (at == object) return object;
    at = skip_space(skip_string(at));
    return *at == ':' ? skip_space(at + 1) : object;
}

const char *hapt_json_offset_element(const char *array, int index)
{
    if (*array != '[') return array;
    const char *at = skip_space(array + 1);
    for (; index > 0; index--) {
        at = skip_space(skip_value(at));
        if (*at != ',') return array;
        at = skip_space(at + 1);
    }
    return *at == ']' ? array : at;
}

int hapt_json_offset_line(const char *text, const char *at)
{
    int line = 1;
    for (; text < at; text++) line += *text == '\n';
    return line;
}
