/*
 * Chakra's nodes in the binary form that ASTRA-sim and Chakra's tools read: messages of Protocol Buffers, each behind
 * its length. Fields are those of et_def.proto; a writer of its own, because only four kinds of fields are needed.
 */
#include <string.h>

#include "emit_chakra.h"

enum { NODE_ID = 1, NODE_NAME = 2, NODE_TYPE = 3, NODE_DATA_DEPS = 5, NODE_DURATION_MICROS = 7, NODE_ATTR = 10 };
enum { ATTR_NAME = 1, ATTR_DOUBLE = 3, ATTR_INT32 = 7, ATTR_INT64 = 9, ATTR_BOOL = 27 };
enum { METADATA_VERSION = 1 };
enum { WIRE_VARINT = 0, WIRE_FIXED64 = 1, WIRE_LENGTH = 2 };

/* A message under construction. The largest node: its name, 64 dependencies and six attributes. */
struct message {
    size_t size;
    unsigned char byte[2048];
};

static void put_byte(struct message *message, unsigned byte)
{
    HAPT_ASSERT(message->size < sizeof message->byte);
    message->byte[message->size++] = (unsigned char)byte;
}

static void put_varint(struct message *message, uint64_t value)
{
    for (; value >= 0x80; value >>= 7) put_byte(message, (unsigned)(value & 0x7f) | 0x80);
    put_byte(message, (unsigned)value);
}

static void put_number(struct message *message, int field, uint64_t value)
{
    put_varint(message, (uint64_t)field << 3 | WIRE_VARINT);
    put_varint(message, value);
}

static void put_bytes(struct message *message, int field, const void *bytes, size_t size)
{
    put_varint(message, (uint64_t)field << 3 | WIRE_LENGTH);
    put_varint(message, size);
    for (size_t i = 0; i < size; i++) put_byte(message, ((const unsigned char *)bytes)[i]);
}

static void put_double(struct message *message, int field, double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    put_varint(message, (uint64_t)field << 3 | WIRE_FIXED64);
    for (int i = 0; i < 8; i++) put_byte(message, (unsigned)(bits >> 8 * i) & 0xff);
}

static void put_attribute(struct message *node, const char *name, int field, uint64_t value)
{
    struct message attribute = {.size = 0};
    put_bytes(&attribute, ATTR_NAME, name, strlen(name));
    put_number(&attribute, field, value);
    put_bytes(node, NODE_ATTR, attribute.byte, attribute.size);
}

static void put_time(struct message *node, double time_s)
{
    struct message attribute = {.size = 0};
    put_bytes(&attribute, ATTR_NAME, "time_s", strlen("time_s"));
    put_double(&attribute, ATTR_DOUBLE, time_s);
    put_bytes(node, NODE_ATTR, attribute.byte, attribute.size);
}

static void flush(FILE *file, const struct message *message)
{
    struct message length = {.size = 0};
    put_varint(&length, message->size);
    fwrite(length.byte, 1, length.size, file);
    fwrite(message->byte, 1, message->size, file);
}

static void begin(FILE *file, int rank)
{
    struct message metadata = {.size = 0};
    (void)rank;
    put_bytes(&metadata, METADATA_VERSION, CHAKRA_VERSION, strlen(CHAKRA_VERSION));
    flush(file, &metadata);
}

static void write(FILE *file, const struct chakra_node *node)
{
    struct message message = {.size = 0}, needed = {.size = 0};
    put_number(&message, NODE_ID, (uint64_t)node->id);
    put_bytes(&message, NODE_NAME, node->name, strlen(node->name));
    put_number(&message, NODE_TYPE, (uint64_t)node->type);
    for (int i = 0; i < node->needed_count; i++) put_varint(&needed, (uint64_t)node->needed[i]);
    if (needed.size > 0) put_bytes(&message, NODE_DATA_DEPS, needed.byte, needed.size);
    if (!node->channel) put_number(&message, NODE_DURATION_MICROS, (uint64_t)chakra_whole(1e6 * node->time_s));
    put_attribute(&message, "is_cpu_op", ATTR_BOOL, 0);
    if (node->channel) {
        put_attribute(&message, "comm_src", ATTR_INT32, (uint64_t)node->channel->from);
        put_attribute(&message, "comm_dst", ATTR_INT32, (uint64_t)node->channel->to);
        put_attribute(&message, "comm_tag", ATTR_INT32, (uint64_t)node->channel->tag);
        put_attribute(&message, "comm_size", ATTR_INT64, (uint64_t)chakra_whole(node->channel->bytes));
    }
    put_time(&message, node->time_s);
    flush(file, &message);
}

static void end(FILE *file)
{
    (void)file;
}

const struct chakra_writer chakra_et = {begin, write, end};
