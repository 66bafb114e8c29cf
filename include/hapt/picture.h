/*
 * Pictures of clusters, plans and runs: an SVG file, or one HTML page with SVG inside that loads nothing from
 * elsewhere.
 *
 * Times are in s, sizes in byte, bandwidths in byte/s; data-* attributes hold them with 17 digits, texts with units.
 * Each function writes one file, whole or not at all. HAPT_ERR_IO: it cannot be written; HAPT_ERR_MEMORY. Rank-local:
 * call on one rank.
 */
#ifndef HAPT_PICTURE_H
#define HAPT_PICTURE_H

#include "hapt/baselines.h"
#include "hapt/cluster.h"
#include "hapt/report.h"
#include "hapt/sweep.h"

/* First bytes of these files, by which a command knows its own. */
#define HAPT_PICTURE_SVG_HEAD "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<!-- hapt picture -->\n"
#define HAPT_PICTURE_PAGE_HEAD "<!DOCTYPE html>\n<!-- hapt page -->\n"

/* The subclusters with nodes and devices, and the links between them. */
enum hapt_status hapt_picture_save_cluster(const struct hapt_cluster *cluster, const char *path);

struct hapt_picture_plan {
    const char *model; /* a name for the reader; NULL: unknown */
    const char *name;  /* of the plan */
    const struct hapt_plan *plan;
    const struct hapt_cluster *cluster;
    int row_count; /* rows of hapt_plan_compare; 0: none */
    const struct hapt_compare_row *row;
    int sweep_count; /* results of hapt_sweep_run */
    struct hapt_sweep *const *sweep;
};
/* The predicted timeline, memory, cluster, rivals, what-if curves, and the plan in words. */
enum hapt_status hapt_picture_save_plan(const struct hapt_picture_plan *picture, const char *path);

struct hapt_picture_run {
    const char *model, *name; /* as above; `name`: the run file */
    const char *written;      /* when the run file was written; NULL: unknown */
    const struct hapt_report *report;
    const struct hapt_cluster *cluster;
    const struct hapt_report_trace *trace; /* NULL: none was kept */
};
/* The timelines, loss, memory, cluster, and the plan in words. */
enum hapt_status hapt_picture_save_run(const struct hapt_picture_run *picture, const char *path);

#endif
