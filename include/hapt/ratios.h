/*
 * Sharding ratios: how much of every sharded dimension each device of a mesh gets (HAP 5).
 */
#ifndef HAPT_RATIOS_H
#define HAPT_RATIOS_H

#include <stdbool.h>
#include <stdint.h>

/* Cuts `units` of a dimension into one shard a rank: shard j is [first[j], first[j + 1]), the shards add up exactly, and each has at
 * least one unit. `ratio` [ranks] >= 0 need not add up to one; NULL: even, where the first (units mod ranks) shards get one more;
 * equal ratios give the same. Otherwise sizes are rounded to nearest, then the shard whose error stays smallest changes by one
 * until the sum fits (HAP 5.1): each is less than one unit off its ratio wherever no shard had to be raised to one unit.
 * False, and `first` [ranks + 1] untouched, when there are fewer units than ranks or the ratios are no ratios (negative, not
 * finite, all zero). Pure: every rank computes the same. */
bool hapt_split(const double *ratio, int ranks, int64_t units, int64_t *first);

#endif
