/*
 * Offset of a value in the text of a JSON file, so that an error can name its line.
 *
 * The JSON parser must have accepted the text before: these functions check nothing.
 */
#ifndef HAPT_CLUSTER_JSON_OFFSET_H
#define HAPT_CLUSTER_JSON_OFFSET_H

/* First character of the value at or after `at`. */
const char *hapt_json_offset_value(const char *at);
/* The key's opening quote in the object at `object`; `object` itself if the key is absent or written with escapes. */
const char *hapt_json_offset_key(const char *object, const char *key);
/* Value of a key found by hapt_json_offset_key. */
const char *hapt_json_offset_member(const char *object, const char *key);
/* Element `index` of the array at `array`; `array` itself if it is too short. */
const char *hapt_json_offset_element(const char *array, int index);
/* Line number of `at`, from 1. */
int hapt_json_offset_line(const char *text, const char *at);

#endif
