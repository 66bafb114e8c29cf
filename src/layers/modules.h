/* Finds repeated modules in a sequence of operators. Private to the layers room. */
#ifndef HAPT_LAYERS_MODULES_H
#define HAPT_LAYERS_MODULES_H

#include "hapt/layers.h"

/* HAPT 5.1, steps (i) and (ii), for any sequence: key[i] identifies the structure of element i, heavy[i] tells whether
 * it is heavy. Repeatedly chooses the contiguous subsequence that occurs most often (at least twice) and has at least
 * `heavy_minimum` heavy elements; ties go to the longest, then the first. Each of its occurrences (without overlap,
 * leftmost first) becomes a repeated module. module[] covers the sequence in order; modules that do not repeat have
 * kind -1. */
enum hapt_status hapt_modules_find(const int *key, const bool *heavy, int count, int heavy_minimum,
                                   struct hapt_arena *arena, struct hapt_module **module, int *module_count);

#endif
