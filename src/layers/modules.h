/* Repeated modules of a sequence of operators. Private to the layers room. */
#ifndef HAPT_LAYERS_MODULES_H
#define HAPT_LAYERS_MODULES_H

#include "hapt/layers.h"

/* HAPT 5.1, steps (i) and (ii), on any sequence: key[i] names the structure of element i, heavy[i] whether it is heavy.
 * Again and again the most frequent contiguous subsequence with at least `heavy_minimum` heavy elements that occurs at
 * least twice becomes a repeated module at each of its occurrences (without overlap, leftmost first); among equally
 * frequent ones the longest, then the first. module[] covers the sequence in order; what repeats nowhere has kind -1.
 */
enum hapt_status hapt_modules_find(const int *key, const bool *heavy, int count, int heavy_minimum,
                                   struct hapt_arena *arena, struct hapt_module **module, int *module_count);

#endif
