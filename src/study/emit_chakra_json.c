/*
 * Chakra's nodes as JSON, with the names of its feeder (mlcommons/chakra, src/feeder/json_node.cpp): a file is
 * {"workload_graph": [node, ...]}. "runtime" is in whole microseconds; "time_s" is exact. Names hold no character that
 * JSON escapes.
 */
#include <inttypes.h>

#include "emit_chakra.h"

static void begin(FILE *file, int rank)
{
    fprintf(file, "{\"format\": \"chakra\", \"version\": \"" CHAKRA_VERSION "\", \"rank\": %d, \"workload_graph\": [",
            rank);
}

static void write(FILE *file, const struct chakra_node *node)
{
    fprintf(file,
            "%s\n{\"Id\": %" PRId64 ", \"Name\": \"%s\", \"NodeType\": %d, \"is_cpu_op\": false, \"data_deps\": [",
            node->id > 0 ? "," : "", node->id, node->name, node->type);
    for (int i = 0; i < node->needed_count; i++) fprintf(file, "%s%" PRId64, i > 0 ? ", " : "", node->needed[i]);
    fprintf(file, "], \"runtime\": %" PRId64, node->channel ? 0 : chakra_whole(1e6 * node->time_s));
    if (node->channel)
        fprintf(file, ", \"comm_src\": %d, \"comm_dst\": %d, \"comm_tag\": %d, \"comm_size\": %" PRId64,
                node->channel->from, node->channel->to, node->channel->tag, chakra_whole(node->channel->bytes));
    fprintf(file, ", \"time_s\": %.17g}", node->time_s);
}

static void end(FILE *file)
{
    fprintf(file, "\n]}\n");
}

const struct chakra_writer chakra_json = {begin, write, end};
