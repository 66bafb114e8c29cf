/* Private to src/picture: a cluster as boxes and links. */
#ifndef HAPT_PICTURE_TOPOLOGY_DRAW_H
#define HAPT_PICTURE_TOPOLOGY_DRAW_H

#include "charts.h"
#include "hapt/cluster.h"

/* As an element of a page, or as a file of its own. note [cluster->count]: a text in each box, "" for none; NULL: none.
 */
void picture_topology_draw(struct hapt_svg *svg, const struct hapt_cluster *cluster, bool file,
                           const char *const *note);

#endif
