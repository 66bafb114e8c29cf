/*
 * Where a value stands in the text of a JSON file, so that an error can name its line.
 *
 * The text must already have been accepted by the JSON parser: these functions only walk.
 */
#ifndef HAPT_CLUSTER_PLACE_H
#define HAPT_CLUSTER_PLACE_H

/* First character of the value at or behind `at`. */
const char *hapt_place_value(const char *at);
/* The key's opening quote inside the object at `object`; the object itself when the key is absent or written with
 * escapes. */
const char *hapt_place_key(const char *object, const char *key);
/* Value of a key found by hapt_place_key. */
const char *hapt_place_member(const char *object, const char *key);
/* Element `index` of the array at `array`; the array itself when it is shorter. */
const char *hapt_place_element(const char *array, int index);
/* Line of `at`, from 1. */
int hapt_place_line(const char *text, const char *at);

#endif
