/*
 * The inventory: kinds of devices and the nodes that have them, for `hapt cluster init`.
 *
 * It is read from what a site's tools print (sinfo, nvidia-smi), or from discovered hosts. Nothing is measured: a
 * cluster made of it has unknown link values.
 */
#ifndef HAPT_INVENTORY_H
#define HAPT_INVENTORY_H

#include "hapt/cluster.h"
#include "hapt/host.h"

#define HAPT_INVENTORY_NOTES 64 /* up to three per subcluster, and some of the files */

struct hapt_inventory_kind {
    struct hapt_device_spec device;
    int devices_per_node, nodes;
    double host_memory_bytes; /* the least of its nodes; 0: unknown */
};

struct hapt_inventory {
    int count;
    struct hapt_inventory_kind kind[HAPT_MAX_SUBCLUSTERS]; /* in the order of the input */
    int note_count;                                        /* what was left out or assumed, for the user to check */
    char note[HAPT_INVENTORY_NOTES][224];
};

/* Adds the nodes that `sinfo` lists in the file; "-": standard input. The first line names the columns as sinfo does.
 * HOSTNAMES (or NODELIST) and GRES are needed; STATE, CPUS, MEMORY and AVAIL_FEATURES are used if they are there.
 * Nodes that are down or drained, and MIG slices, are left out with a note. If no node has a GPU, the nodes' CPUs are
 * the devices. HAPT_ERR_INPUT names the line of what is wrong or unknown. Rank-local. */
enum hapt_status hapt_inventory_read_sinfo(const char *path, struct hapt_arena *arena,
                                           struct hapt_inventory *inventory);
/* Adds `nodes` equal nodes with the GPUs that the file lists, one a line: "NVIDIA A100-SXM4-40GB, 40960 MiB". "-":
 * standard input. HAPT_ERR_INPUT names the line of what is wrong or unknown. Rank-local. */
enum hapt_status hapt_inventory_read_nvidia_smi(const char *path, int nodes, struct hapt_arena *arena,
                                                struct hapt_inventory *inventory);
/* Adds all GPUs of the hosts, whether ranks drive them or not. GPUs that the device database does not have are left out
 * with a note. HAPT_ERR_INPUT if none is left. */
enum hapt_status hapt_inventory_add_hosts(const struct hapt_hosts *hosts, struct hapt_inventory *inventory);
/* Adds a note for the user, unless it is there already or the list is full. */
void hapt_inventory_note(struct hapt_inventory *inventory, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
/* A cluster with one subcluster for each kind, named by its device; link values are unknown. It is not bound. */
enum hapt_status hapt_inventory_cluster(const struct hapt_inventory *inventory, struct hapt_arena *arena,
                                        struct hapt_cluster **cluster);

#endif
