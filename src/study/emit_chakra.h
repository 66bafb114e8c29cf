/* Nodes of MLCommons Chakra, and the two forms in which they are written. Field numbers and enums: et_def.proto there.
 */
#ifndef HAPT_STUDY_EMIT_CHAKRA_H
#define HAPT_STUDY_EMIT_CHAKRA_H

#include <stdint.h>

#include "emit.h"

enum { CHAKRA_COMP_NODE = 4, CHAKRA_COMM_SEND_NODE = 5, CHAKRA_COMM_RECV_NODE = 6 };
enum { CHAKRA_MOST_NEEDED = 256, CHAKRA_NAME = 96 };
#define CHAKRA_VERSION "0.0.4" /* of the schema */

struct chakra_node {
    int64_t id;
    char name[CHAKRA_NAME];
    int type;
    int needed_count;
    int64_t needed[CHAKRA_MOST_NEEDED]; /* ids */
    double time_s;
    const struct emit_channel *channel; /* of a send or a receive */
};

struct chakra_writer {
    void (*begin)(FILE *file, int rank);
    void (*write)(FILE *file, const struct chakra_node *node);
    void (*end)(FILE *file);
};
extern const struct chakra_writer chakra_json, chakra_et;

/* Whole microseconds and bytes, as in the schema. */
static inline int64_t chakra_whole(double value)
{
    return value < 9e18 ? (int64_t)(value + 0.5) : INT64_MAX;
}

#endif
