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
#define HAPT_PROFILE_MAX_CROSSINGS ((int64_t)1 << 24)

/* The groups of mixed stages (mixed.c, mixed_io.c). Adds the number of their candidates to *candidates. */
enum hapt_status hapt_profile_check_mixed(const struct hapt_profile *profile, int64_t *candidates);
enum hapt_status hapt_profile_copy_mixed(const struct hapt_profile *profile, struct hapt_arena *arena,
                                         struct hapt_profile *copy);
enum hapt_status hapt_profile_write_mixed(struct hapt_h5 *file, const char *group, const struct hapt_profile *profile);
/* Their number, and the bytes of their tables. */
enum hapt_status hapt_profile_count_mixed(struct hapt_h5 *file, const char *group, int L, int *count, double *bytes);
enum hapt_status hapt_profile_read_mixed(struct hapt_h5 *file, const char *group, struct hapt_arena *arena,
                                         struct hapt_profile *profile);
/* crossings_io.c */
enum hapt_status profile_write_crossings(struct hapt_h5 *file, const char *group,
                                         const struct hapt_crossings *crossings);
/* A file without the tables leaves *crossings as it is. */
enum hapt_status profile_read_crossings(struct hapt_h5 *file, const char *group, struct hapt_arena *arena,
                                        const struct hapt_crossings **crossings);

#endif
