/*
 * A cluster as boxes and links.
 *
 * Up to MOST_BOXES subclusters: boxes below each other with nodes and devices, and a line for each link on a lane to
 * the right. Two links share a lane if their lines end above each other. A link's text stands in a gap between two
 * boxes, where no line runs to a box, so texts and lines never cross. More subclusters: a row for each, and a matrix of
 * links.
 */
#include "topology_draw.h"

#include <math.h>
#include <string.h>

#include "hapt/config.h"

enum { MOST_BOXES = 5, BOX_X = 8, BOX_WIDTH = 448, BOX_HEIGHT = 112, BOX_GAP = 56, TOP = 40, LANE_X = 476 };
enum { MOST_NODES = 8, MOST_DEVICES = 16, CELL = 11, NODE_GAP = 6, MATRIX_ROW = 44 };

static int device_columns(const struct hapt_subcluster *own)
{
    return own->devices_per_node <= 4 ? own->devices_per_node : (own->devices_per_node + 1) / 2;
}

static int node_width(const struct hapt_subcluster *own)
{
    return own->devices_per_node <= MOST_DEVICES ? device_columns(own) * CELL + 5 : 96;
}

/* Nodes of this width fit into a box if there are at most so many. */
static int nodes_shown(const struct hapt_subcluster *own)
{
    const int fit = (BOX_WIDTH - 20) / (node_width(own) + NODE_GAP);
    return own->nodes <= fit && own->nodes <= MOST_NODES ? own->nodes : 1;
}

static void put_node(struct hapt_svg *svg, const struct hapt_subcluster *own, double x, double y)
{
    const int columns = device_columns(own);
    hapt_svg_put(svg, "<rect class=\"node\" x=\"%.1f\" y=\"%.1f\" width=\"%d\" height=\"28\" rx=\"3\"/>\n", x, y,
                 node_width(own));
    for (int d = 0; d < own->devices_per_node && own->devices_per_node <= MOST_DEVICES; d++)
        hapt_svg_put(svg, "<rect class=\"device\" x=\"%.1f\" y=\"%.1f\" width=\"%d\" height=\"%d\"/>",
                     x + 3 + d % columns * CELL, y + 3 + d / columns * (CELL + 1), CELL - 2, CELL - 2);
    if (own->devices_per_node > MOST_DEVICES) {
        char text[32];
        snprintf(text, sizeof text, "%d devices", own->devices_per_node);
        hapt_svg_label(svg, x + 48, y + 18, 92, 11, "soft", "middle", text);
    }
}

static void put_nodes(struct hapt_svg *svg, const struct hapt_subcluster *own, double x, double y)
{
    const int shown = nodes_shown(own);
    if (shown < own->nodes) {
        char text[48];
        for (int k = 2; k > 0; k--)
            hapt_svg_put(svg, "<rect class=\"node\" x=\"%.1f\" y=\"%.1f\" width=\"%d\" height=\"28\" rx=\"3\"/>\n",
                         x + 4 * k, y - 3 * k, node_width(own));
        snprintf(text, sizeof text, "one of %d nodes", own->nodes);
        hapt_svg_label(svg, x + node_width(own) + 18, y + 18, 200, 12, "soft", "start", text);
    }
    for (int n = 0; n < shown; n++) put_node(svg, own, x + n * (node_width(own) + NODE_GAP), y);
}

static void device_text(const struct hapt_subcluster *own, char text[200])
{
    const struct hapt_device_spec *device = &own->device;
    char memory[32], peak[32];
    const double flops =
        fmax(device->peak_flops[HAPT_F32], fmax(device->peak_flops[HAPT_BF16], device->peak_flops[HAPT_F16]));
    int length =
        snprintf(text, 200, "%d node%s \xC3\x97 %d %s", own->nodes, own->nodes > 1 ? "s" : "", own->devices_per_node,
                 device->name[0]             ? device->name
                 : own->devices_per_node > 1 ? "devices"
                                             : "device");
    length +=
        snprintf(text + length, 200 - (size_t)length, ", %s each", hapt_units_bytes(device->memory_bytes, memory));
    if (flops > 0) length += snprintf(text + length, 200 - (size_t)length, ", %s", hapt_units_flops(flops, peak));
    if (device->slowdown > 1) snprintf(text + length, 200 - (size_t)length, ", slowed %g times", device->slowdown);
}

static void inside_text(const struct hapt_subcluster *own, const struct hapt_link *self, char text[200])
{
    char rate[32];
    int length = 0;
    text[0] = '\0';
    if (own->devices_per_node > 1 && own->intra_node_bandwidth > 0)
        length += snprintf(text, 200, "in a node %s", hapt_units_bandwidth(own->intra_node_bandwidth, rate));
    if (own->nodes > 1 && own->inter_node_bandwidth > 0)
        length += snprintf(text + length, 200 - (size_t)length, "%sbetween nodes %s", length ? ", " : "",
                           hapt_units_bits(own->inter_node_bandwidth, rate));
    if (self->paced && self->bandwidth > 0)
        snprintf(text + length, 200 - (size_t)length, "%sbetween its stages %s (paced)", length ? ", " : "",
                 hapt_units_bits(self->bandwidth, rate));
}

/* Opens the group of a subcluster, with its numbers. */
static void open_group(struct hapt_svg *svg, const struct hapt_subcluster *own)
{
    hapt_svg_put(svg, "<g class=\"subcluster\" data-name=\"");
    hapt_svg_text(svg, own->name);
    hapt_svg_put(svg, "\" data-nodes=\"%d\" data-devices-per-node=\"%d\"", own->nodes, own->devices_per_node);
    hapt_svg_number(svg, "memory-bytes", own->device.memory_bytes);
    hapt_svg_put(svg, ">\n");
}

static void put_box(struct hapt_svg *svg, const struct hapt_cluster *cluster, int c, const char *note)
{
    const struct hapt_subcluster *own = &cluster->subcluster[c];
    const double y = TOP + c * (BOX_HEIGHT + BOX_GAP);
    const double note_px = note && note[0] ? fmin(hapt_svg_width(note, 12) + 8, 240) : 0;
    char text[200];
    open_group(svg, own);
    hapt_svg_put(svg, "<rect class=\"box\" x=\"%d\" y=\"%.1f\" width=\"%d\" height=\"%d\" rx=\"6\"/>\n", BOX_X, y,
                 BOX_WIDTH, BOX_HEIGHT);
    hapt_svg_label(svg, BOX_X + 10, y + 21, BOX_WIDTH - 20 - note_px, 15, "strong", "start", own->name);
    if (note_px > 0) hapt_svg_label(svg, BOX_X + BOX_WIDTH - 10, y + 21, 240, 12, "soft", "end", note);
    device_text(own, text);
    hapt_svg_label(svg, BOX_X + 10, y + 41, BOX_WIDTH - 20, 12, "what", "start", text);
    inside_text(own, hapt_cluster_link(cluster, c, c), text);
    hapt_svg_label(svg, BOX_X + 10, y + 59, BOX_WIDTH - 20, 12, "soft", "start", text);
    put_nodes(svg, own, BOX_X + 10, y + 76);
    hapt_svg_put(svg, "</g>\n");
}

/* A link's attributes, with the text that a pointer shows. */
static void put_link_data(struct hapt_svg *svg, const struct hapt_cluster *cluster, int from, int to)
{
    const struct hapt_link *link = hapt_cluster_link(cluster, from, to);
    hapt_svg_put(svg, " data-from=\"");
    hapt_svg_text(svg, cluster->subcluster[from].name);
    hapt_svg_put(svg, "\" data-to=\"");
    hapt_svg_text(svg, cluster->subcluster[to].name);
    hapt_svg_put(svg, "\"");
    if (link->bandwidth > 0) hapt_svg_number(svg, "bandwidth", link->bandwidth);
    if (link->latency >= 0) hapt_svg_number(svg, "latency", link->latency);
}

static void put_link_title(struct hapt_svg *svg, const struct hapt_cluster *cluster, int from, int to)
{
    const struct hapt_link *link = hapt_cluster_link(cluster, from, to);
    char rate[32] = "unknown", delay[32] = "unknown";
    if (link->bandwidth > 0) hapt_units_bits(link->bandwidth, rate);
    if (link->latency >= 0) hapt_units_time(link->latency, delay);
    hapt_svg_put(svg, "<title>");
    hapt_svg_textf(svg, "%s - %s: %s in each direction, latency %s", cluster->subcluster[from].name,
                   cluster->subcluster[to].name, rate, delay);
    hapt_svg_put(svg, "</title>");
}

/* The range of the bandwidths of all links between subclusters. */
static void find_rates(const struct hapt_cluster *cluster, double *low, double *high)
{
    *low = INFINITY;
    *high = 0;
    for (int i = 0; i < cluster->count; i++)
        for (int j = i + 1; j < cluster->count; j++) {
            const double rate = hapt_cluster_link(cluster, i, j)->bandwidth;
            if (!(rate > 0) || !isfinite(rate)) continue;
            *low = fmin(*low, rate);
            *high = fmax(*high, rate);
        }
}

static double line_width(const struct hapt_cluster *cluster, double rate)
{
    double low, high;
    find_rates(cluster, &low, &high);
    return high > low && rate > 0 && isfinite(rate) ? 1.5 + 4.5 * log(rate / low) / log(high / low) : 2.5;
}

/* Height of the end of link (from, other) at box `from`: links to boxes above are above those to boxes below. */
static double port_y(const struct hapt_cluster *cluster, int from, int other)
{
    const int place = other < from ? other : other - 1;
    return TOP + from * (BOX_HEIGHT + BOX_GAP) + (place + 0.5) * BOX_HEIGHT / (cluster->count - 1);
}

static void put_link(struct hapt_svg *svg, const struct hapt_cluster *cluster, int i, int j, double x, double lane_px)
{
    const struct hapt_link *link = hapt_cluster_link(cluster, i, j);
    const double from = port_y(cluster, i, j), to = port_y(cluster, j, i), edge = BOX_X + BOX_WIDTH;
    const int gap = (i + j - 1) / 2;
    const double text_y = TOP + gap * (BOX_HEIGHT + BOX_GAP) + BOX_HEIGHT + 20;
    char rate[32] = "unknown", delay[32] = "", extra[64] = "";
    hapt_svg_put(svg, "<path class=\"link\" stroke-width=\"%.2f\"%s d=\"M%.1f %.1fH%.1fV%.1fH%.1f\"",
                 line_width(cluster, link->bandwidth), link->bandwidth > 0 ? "" : " stroke-dasharray=\"3 4\"", edge,
                 from, x, to, edge);
    put_link_data(svg, cluster, i, j);
    hapt_svg_put(svg, ">");
    put_link_title(svg, cluster, i, j);
    hapt_svg_put(svg, "</path>\n");
    for (int end = 0; end < 2; end++)
        hapt_svg_put(svg, "<circle class=\"port\" cx=\"%.1f\" cy=\"%.1f\" r=\"4\"/>\n", edge, end ? to : from);
    if (link->bandwidth > 0) hapt_units_bits(link->bandwidth, rate);
    if (link->latency >= 0) hapt_units_time(link->latency, delay);
    snprintf(extra, sizeof extra, "%s%s%s", delay,
             delay[0] && link->paced ? ", paced"
             : link->paced           ? "paced"
                                     : "",
             strcmp(link->transport, "tcp") == 0 ? ", tcp" : "");
    hapt_svg_label(svg, x + 7, text_y, lane_px - 10, 12, "strong", "start", rate);
    hapt_svg_label(svg, x + 7, text_y + 15, lane_px - 10, 11, "soft", "start", extra);
}

/* The lane of each link, by ascending span; links whose lines do not lie beside each other share one. Returns the
 * number of lanes. */
static int find_lanes(int count, int lane[MOST_BOXES][MOST_BOXES])
{
    bool taken[MOST_BOXES * MOST_BOXES][MOST_BOXES] = {0}; /* [lane][gap] */
    int lanes = 0;
    for (int span = 1; span < count; span++)
        for (int i = 0; i + span < count; i++) {
            int at = 0;
            for (bool free = false; !free; at += !free) {
                free = true;
                for (int gap = i; gap < i + span; gap++) free = free && !taken[at][gap];
            }
            for (int gap = i; gap < i + span; gap++) taken[at][gap] = true;
            lane[i][i + span] = at;
            if (at >= lanes) lanes = at + 1;
        }
    return lanes;
}

static double lane_width(int lanes)
{
    return fmin(150, (PICTURE_WIDTH - LANE_X - 8.0) / (lanes > 0 ? lanes : 1));
}

/* The width that the boxes and their links take. */
static double boxes_width(const struct hapt_cluster *cluster)
{
    int lane[MOST_BOXES][MOST_BOXES];
    const int lanes = find_lanes(cluster->count, lane);
    return lanes > 0 ? LANE_X + lanes * lane_width(lanes) + 8 : 2 * BOX_X + BOX_WIDTH;
}

static void draw_boxes(struct hapt_svg *svg, const struct hapt_cluster *cluster, const char *const *note)
{
    int lane[MOST_BOXES][MOST_BOXES];
    const double lane_px = lane_width(find_lanes(cluster->count, lane));
    for (int i = 0; i < cluster->count; i++)
        for (int j = i + 1; j < cluster->count; j++)
            put_link(svg, cluster, i, j, LANE_X + lane[i][j] * lane_px + 6, lane_px);
    for (int c = 0; c < cluster->count; c++) put_box(svg, cluster, c, note ? note[c] : NULL);
}

static void draw_matrix(struct hapt_svg *svg, const struct hapt_cluster *cluster, const char *const *note)
{
    double low, high, factor;
    find_rates(cluster, &low, &high);
    const char *unit = picture_unit_name(PICTURE_BITS_PER_S, high, &factor);
    const double left = LANE_X + 30,
                 cell = fmin(72, (PICTURE_WIDTH - left - 8) / (cluster->count > 1 ? cluster->count - 1 : 1));
    char text[200];
    snprintf(text, sizeof text, "links, %s in each direction", unit);
    hapt_svg_label(svg, left, TOP + 14, PICTURE_WIDTH - left - 8, 12, "soft", "start", text);
    for (int i = 0; i < cluster->count; i++) {
        const struct hapt_subcluster *own = &cluster->subcluster[i];
        const double y = TOP + 24 + i * MATRIX_ROW;
        const double note_px = note && note[i][0] ? fmin(hapt_svg_width(note[i], 12) + 8, 160) : 0;
        open_group(svg, own);
        hapt_svg_put(svg, "<rect class=\"box\" x=\"%d\" y=\"%.1f\" width=\"%d\" height=\"%d\" rx=\"4\"/>\n", BOX_X, y,
                     BOX_WIDTH, MATRIX_ROW - 4);
        snprintf(text, sizeof text, "%d  %s", i + 1, own->name);
        hapt_svg_label(svg, BOX_X + 10, y + 17, BOX_WIDTH - 20 - note_px, 13, "strong", "start", text);
        if (note_px > 0) hapt_svg_label(svg, BOX_X + BOX_WIDTH - 10, y + 17, 160, 12, "soft", "end", note[i]);
        device_text(own, text);
        hapt_svg_label(svg, BOX_X + 10, y + 33, BOX_WIDTH - 20, 11, "soft", "start", text);
        hapt_svg_put(svg, "</g>\n");
        for (int j = 0; j < i; j++) {
            const struct hapt_link *link = hapt_cluster_link(cluster, j, i);
            hapt_svg_put(svg, "<rect class=\"cell link-cell\" x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%d\"",
                         left + j * cell, y, cell - 3, MATRIX_ROW - 4);
            put_link_data(svg, cluster, j, i);
            hapt_svg_put(svg, ">");
            put_link_title(svg, cluster, j, i);
            hapt_svg_put(svg, "</rect>\n");
            snprintf(text, sizeof text, link->bandwidth > 0 ? "%.3g" : "?", link->bandwidth * factor);
            hapt_svg_label(svg, left + (j + 0.5) * cell - 1.5, y + 24, cell - 4, 11, "value", "middle", text);
        }
        snprintf(text, sizeof text, "%d", i + 1);
        if (i + 1 < cluster->count)
            hapt_svg_label(svg, left + (i + 0.5) * cell - 1.5, y + 24, cell - 4, 12, "strong", "middle", text);
    }
}

/* "4 subclusters, 1024 devices" */
static void put_heading(struct hapt_svg *svg, const struct hapt_cluster *cluster, bool matrix)
{
    double low, high;
    char text[160];
    find_rates(cluster, &low, &high);
    snprintf(text, sizeof text, "%d subcluster%s, %d device%s%s", cluster->count, cluster->count > 1 ? "s" : "",
             cluster->rank_count, cluster->rank_count > 1 ? "s" : "",
             !matrix && high > low ? "; a wider line has more bandwidth (logarithmic)" : "");
    hapt_svg_label(svg, BOX_X, 22, PICTURE_WIDTH - 16, 13, "soft", "start", text);
}

void picture_topology_draw(struct hapt_svg *svg, const struct hapt_cluster *cluster, bool file, const char *const *note)
{
    const bool matrix = cluster->count > MOST_BOXES;
    const double height = matrix ? TOP + 24 + cluster->count * MATRIX_ROW + 8
                                 : TOP + cluster->count * BOX_HEIGHT + (cluster->count - 1) * BOX_GAP + 12;
    const double width = matrix ? PICTURE_WIDTH : boxes_width(cluster);
    static const char desc[] =
        "Subclusters of equal nodes with their devices, and the links between them with bandwidth "
        "in each direction and latency.";
    if (file)
        hapt_svg_put(
            svg,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %.0f %.0f\" width=\"%.0f\" "
            "height=\"%.0f\" role=\"img\" aria-labelledby=\"title desc\">\n<title id=\"title\">Cluster</title>\n"
            "<desc id=\"desc\">%s</desc>\n<style>%s.paper{fill:var(--paper)}</style>\n"
            "<rect class=\"paper\" width=\"%.0f\" height=\"%.0f\"/>\n",
            width, height, width, height, desc, picture_style, width, height);
    else
        picture_open(svg, "topology", height, "Cluster", desc);
    put_heading(svg, cluster, matrix);
    if (matrix)
        draw_matrix(svg, cluster, note);
    else
        draw_boxes(svg, cluster, note);
    picture_close(svg);
}
