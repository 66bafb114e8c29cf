/* Private to src/profile. */
#ifndef HAPT_PROFILE_PRIVATE_H
#define HAPT_PROFILE_PRIVATE_H

#include "hapt/profile.h"

/* Limits for values in files. */
#define HAPT_PROFILE_MAX_DEVICES 65536 /* per subcluster */
#define HAPT_PROFILE_MAX_LAYERS 8192
#define HAPT_PROFILE_SMALL_BYTES (64 * 1048576.0) /* of all tables: below this, the host's memory is not checked */
#define HAPT_PROFILE_MAX_CELLS ((int64_t)1 << 27) /* per table: 1 GiB */

#define HAPT_PROFILE_MAX_MIXED 256 /* groups of mixed stages */

/* The groups of mixed stages (mixed.c, mixed_io.c). Adds the number of their candidates to *candidates. */
enum hapt_status hapt_profile_check_mixed(const struct hapt_profile *profile, int64_t *candidates);
enum hapt_status hapt_profile_copy_mixed(const struct hapt_profile *profile, struct hapt_arena *arena,
                                         struct hapt_profile *copy);
enum hapt_status hapt_profile_write_mixed(struct hapt_h5 *file, const char *group, const struct hapt_profile *profile);
/* Their number, and the bytes of their tables. */
enum hapt_status hapt_profile_count_mixed(struct hapt_h5 *file, const char *group, int L, int *count, double *bytes);
enum hapt_status hapt_profile_read_mixed(struct hapt_h5 *file, const char *group, struct hapt_arena *arena,
                                         struct hapt_profile *profile);

/* tied [layer_count]: bytes of parameters that layers on both sides of the boundary before a layer read; NULL: none
 * (tied.c). */
enum hapt_status profile_tied_bytes(const struct hapt_graph *graph, const struct hapt_layers *layers,
                                    struct hapt_arena *result, struct hapt_arena *scratch, double **tied);

/* Counts the submeshes of a subcluster, and lists them in the profile's order if `submesh` is not NULL. */
int hapt_profile_submeshes(int nodes, int devices_per_node, struct hapt_submesh *submesh);

#endif
