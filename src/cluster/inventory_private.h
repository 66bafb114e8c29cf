/* Shared by the readers of an inventory. */
#ifndef HAPT_CLUSTER_INVENTORY_PRIVATE_H
#define HAPT_CLUSTER_INVENTORY_PRIVATE_H

#include "hapt/inventory.h"

/* Reads a text file, "-" for standard input: valid UTF-8 without control characters, these become '?'. At most 16 MiB.
 * HAPT_ERR_INPUT, HAPT_ERR_MEMORY. */
enum hapt_status hapt_inventory_read_text(const char *path, struct hapt_arena *arena, char **text);
/* Ends the line at *text with '\0', returns it without blanks around it, and advances *text; NULL at the end. */
char *hapt_inventory_next_line(char **text);
/* Adds `nodes` nodes that have `devices` of this device each, or adds to the nodes of an equal kind. host_memory 0:
 * unknown. HAPT_ERR_INPUT if the cluster gets too large. */
enum hapt_status hapt_inventory_add(struct hapt_inventory *inventory, const struct hapt_device_spec *device,
                                    int devices, int nodes, double host_memory_bytes);
/* The device with as much memory as a GPU of `memory_bytes` has left beside CUDA's context and libraries, if that is
 * less than the data sheet says; adds a note then. memory_bytes 0: unknown. */
struct hapt_device_spec hapt_inventory_gpu(struct hapt_inventory *inventory, const struct hapt_device_spec *device,
                                           double memory_bytes);
#endif
