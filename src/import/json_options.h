/*
 * A JSON object of options, such as a published model's config.json. Each option that is read is crossed off. Options
 * that are left at the end are unknown, and so refused: none is ignored silently. null counts as absent. Private to the
 * import room.
 */
#ifndef HAPT_IMPORT_JSON_OPTIONS_H
#define HAPT_IMPORT_JSON_OPTIONS_H

#include <jansson.h>

#include "hapt/arena.h"
#include "hapt/status.h"

struct json_options {
    const char *path; /* for messages */
    char where[64];   /* "rope_scaling.": inside the file */
    json_t *left;     /* options that nobody has read */
};

/* Reads a file of at most `limit` bytes as one JSON value. HAPT_ERR_INPUT names file, line and problem. */
enum hapt_status json_read(const char *path, size_t limit, json_t **json);
/* Text that is an option's name or value, cut to what a message can show. */
const char *json_shown(const json_t *value, char text[64]);

/* Opens a file that must contain one object; release it with json_options_release. */
enum hapt_status json_options_open(const char *path, struct json_options *options);
void json_options_release(struct json_options *options);
/* HAPT_ERR_INPUT names the first option that nobody has read. */
enum hapt_status json_options_finish(const struct json_options *options);

/* True if the option is there, even as null. */
bool json_options_names(const struct json_options *options, const char *key);
bool json_options_has(const struct json_options *options, const char *key);
/* HAPT_ERR_INPUT: an option of another type or outside of [low, high], or, for the functions without a default, a
 * missing one. */
enum hapt_status json_options_need_int(struct json_options *options, const char *key, int64_t low, int64_t high,
                                       int64_t *value);
enum hapt_status json_options_int(struct json_options *options, const char *key, int64_t low, int64_t high,
                                  int64_t absent, int64_t *value);
enum hapt_status json_options_need_real(struct json_options *options, const char *key, double low, double high,
                                        double *value);
enum hapt_status json_options_real(struct json_options *options, const char *key, double low, double high,
                                   double absent, double *value);
enum hapt_status json_options_bool(struct json_options *options, const char *key, bool absent, bool *value);
/* `value` is allocated in the arena. */
enum hapt_status json_options_text(struct json_options *options, const char *key, const char *absent,
                                   struct hapt_arena *arena, const char **value);
/* The option as JSON; borrowed until the release of `options`. NULL: absent. */
json_t *json_options_take(struct json_options *options, const char *key);
/* An object inside; *inside has no options if it is absent. Release it, too. */
enum hapt_status json_options_object(struct json_options *options, const char *key, struct json_options *inside);
/* Crosses off options that change nothing that hapt computes; `keys` ends with NULL. */
void json_options_drop(struct json_options *options, const char *const *keys);
/* HAPT_ERR_INPUT unless the option is absent or has that value: hapt has no other one. */
enum hapt_status json_options_expect_bool(struct json_options *options, const char *key, bool value);
enum hapt_status json_options_expect_int(struct json_options *options, const char *key, int64_t value);

#endif
