/* Other contents of the device database: bandwidths within a node, and PCI ids. */
#ifndef HAPT_CLUSTER_DATABASE_H
#define HAPT_CLUSTER_DATABASE_H

#include "hapt/cluster.h"

/* byte/s per direction between two devices of one node; 0 for unknown devices. */
double hapt_device_peer_bandwidth(const char *name);
/* byte/s per direction between a device and page-locked memory of its node; 0 for unknown devices and CPUs. */
double hapt_device_host_bandwidth(const char *name);
/* Entry of the database for a PCI id, or NULL. */
const struct hapt_device_spec *hapt_device_spec_of_pci(unsigned vendor, unsigned device);
/* Entry for the driver's name ("NVIDIA A100-SXM4-40GB") and memory. NULL: no entry, or several. */
const struct hapt_device_spec *hapt_device_spec_of_name(const char *name, double memory_bytes);
/* Entry for a word of an administrator: "a100", "nvidia_a100_80gb_pcie", "rtx3090", "2080ti". If the word does not say
 * which of several memories it has, *several is true and the entry is that of the least. NULL: no entry. */
const struct hapt_device_spec *hapt_device_spec_of_word(const char *word, bool *several);
/* Name of the entry that is most like this name, for "did you mean". Never NULL. */
const char *hapt_device_nearest(const char *name);

#endif
