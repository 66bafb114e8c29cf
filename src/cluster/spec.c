/* Parses the JSON cluster file. The parser is strict: an error names file, line and the correct form. */
#include <jansson.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "database.h"
#include "hapt/cluster.h"
#include "hapt/config.h"
#include "json_offset.h"

enum {
    MAX_FILE_BYTES = 1 << 20,
    MAX_NODES = 65536,
    MAX_DEVICES_PER_NODE = 1024,
    MAX_DEVICES = 1 << 20,
    MAX_HINT = 640,
    HOST_CHARS = 256,
};

struct reader {
    const char *path;
    const char *text;
    struct hapt_arena *arena;
};

/* A JSON object, its offset in the text, and its name in messages. */
struct object {
    const struct reader *reader;
    json_t *json;
    const char *at;
    const char *what;
};

/* A kind of number: its unit, how it may be written, and its limits. */
struct quantity {
    bool (*parse)(const char *text, double *value); /* NULL: a plain number */
    double low, high;
    const char *name, *hint;
};
static const struct quantity bytes_quantity = {hapt_units_parse_bytes, 1, 1e15, "a size",
                                               "write a number of bytes or a string such as \"400 MB\" or \"40 GB\""};
static const struct quantity bandwidth_quantity = {
    hapt_units_parse_bandwidth, 1, 1e15, "a bandwidth",
    "write a number in byte/s or a string such as \"200 Mbit/s\" or \"25 GB/s\""};
static const struct quantity time_quantity = {hapt_units_parse_time, 0, 10, "a latency",
                                              "write a number of seconds (at most 10) or a string such as \"50 us\""};
static const struct quantity flops_quantity = {hapt_units_parse_flops, 1, 1e21, "a compute rate",
                                               "write a number in FLOP/s or a string such as \"312 TFLOP/s\""};
static const struct quantity padding_quantity = {
    NULL, 0, 1e4, "a factor", "write the cost of a padded byte as a multiple of the cost of a tensor byte"};
static const struct quantity update_quantity = {NULL, 1, 1e15, "a number of parameters per second",
                                                "write the parameters that a node's CPUs update per second: 4e9"};
static const struct quantity slowdown_quantity = {NULL, 1, 1e4, "a slowdown",
                                                  "write a number from 1 (full speed of the device) to 10000"};

/* Makes text of an untrusted file printable on one line of a message. */
static const char *printable(const char *text, char buffer[64])
{
    size_t length = 0;
    for (; text[length] && length < 60; length++) {
        const unsigned char c = (unsigned char)text[length];
        buffer[length] = c < 0x20 || c == 0x7f ? '?' : (char)c;
    }
    while (length > 0 && text[length] && ((unsigned char)text[length] & 0xc0) == 0x80)
        length--; /* whole characters only */
    buffer[length] = '\0';
    if (text[length]) strcat(buffer, "...");
    return buffer;
}

/* Names the line of `key` in the object; NULL: the line of the object. */
static enum hapt_status refuse(const struct object *object, const char *key, const char *hint, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
static enum hapt_status refuse(const struct object *object, const char *key, const char *hint, const char *format, ...)
{
    char message[512];
    const char *at = key ? hapt_json_offset_key(object->at, key) : object->at;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    return hapt_fail(HAPT_ERR_INPUT, hint, "%s: line %d: %s", object->reader->path,
                     hapt_json_offset_line(object->reader->text, at), message);
}

static const char *type_name(const json_t *json)
{
    switch (json_typeof(json)) {
    case JSON_OBJECT: return "an object";
    case JSON_ARRAY: return "a list";
    case JSON_STRING: return "text";
    case JSON_INTEGER:
    case JSON_REAL: return "a number";
    case JSON_TRUE:
    case JSON_FALSE: return "true or false";
    default: return "null";
    }
}

static void append(char hint[MAX_HINT], const char *text, const char *separator)
{
    snprintf(hint + strlen(hint), MAX_HINT - strlen(hint), "%s%s", text, separator);
}

static bool is_listed(const char *list, const char *name)
{
    const size_t length = strlen(name);
    if (strchr(name, ',')) return false;
    for (const char *at = list; at; at = strstr(at, ", ") ? strstr(at, ", ") + 2 : NULL)
        if (strncmp(at, name, length) == 0 && (at[length] == ',' || at[length] == '\0')) return true;
    return false;
}

/* Rejects keys that are not in `known` (separated by ", "). */
static enum hapt_status check_keys(const struct object *object, const char *known)
{
    const char *key;
    json_t *value;
    json_object_foreach(object->json, key, value)
    {
        char hint[MAX_HINT], shown[64];
        if (is_listed(known, key)) continue;
        snprintf(hint, sizeof hint, "known keys: %s", known);
        return refuse(object, key, hint, "unknown key \"%s\" in %s", printable(key, shown), object->what);
    }
    return HAPT_OK;
}

/* The value of `key`; NULL with HAPT_OK when it is absent and optional. */
static enum hapt_status find(const struct object *object, const char *key, bool required, json_t **value)
{
    *value = json_object_get(object->json, key);
    if (*value || !required) return HAPT_OK;
    char hint[128];
    snprintf(hint, sizeof hint, "add the key \"%s\"; hapt help topology describes the format", key);
    return refuse(object, NULL, hint, "\"%s\" is missing in %s", key, object->what);
}

/* The object in `key` of another object. */
static struct object member(const struct object *object, const char *key, const char *what)
{
    return (struct object){object->reader, json_object_get(object->json, key), hapt_json_offset_member(object->at, key),
                           what};
}

/* Element `index` of the list in `key`. */
static struct object element(const struct object *object, const char *key, int index, const char *what)
{
    return (struct object){object->reader, json_array_get(json_object_get(object->json, key), (size_t)index),
                           hapt_json_offset_element(hapt_json_offset_member(object->at, key), index), what};
}

/* Leaves *value unchanged if the key is absent. */
static enum hapt_status read_quantity(const struct object *object, const char *key, bool required,
                                      const struct quantity *quantity, double *value)
{
    double number = 0;
    char shown[64];
    json_t *json;
    HAPT_TRY(find(object, key, required, &json));
    if (!json) return HAPT_OK;
    if (json_is_number(json)) {
        number = json_number_value(json);
    } else if (json_is_string(json) && quantity->parse) {
        if (!quantity->parse(json_string_value(json), &number))
            return refuse(object, key, quantity->hint, "\"%s\": \"%s\" is not %s", key,
                          printable(json_string_value(json), shown), quantity->name);
    } else {
        return refuse(object, key, quantity->hint, "\"%s\" must be %s, not %s", key, quantity->name, type_name(json));
    }
    if (!(number >= quantity->low && number <= quantity->high))
        return refuse(object, key, quantity->hint, "\"%s\" is %g, outside of %g to %g", key, number, quantity->low,
                      quantity->high);
    *value = number;
    return HAPT_OK;
}

/* An optional true or false; false without it. */
static enum hapt_status read_switch(const struct object *object, const char *key, bool *value)
{
    const json_t *json = json_object_get(object->json, key);
    if (json && !json_is_boolean(json))
        return refuse(object, key, "write true or false", "\"%s\" must be true or false, not %s", key, type_name(json));
    *value = json_is_true(json);
    return HAPT_OK;
}

static enum hapt_status read_count(const struct object *object, const char *key, int limit, int *value)
{
    char hint[64];
    json_t *json;
    HAPT_TRY(find(object, key, true, &json));
    snprintf(hint, sizeof hint, "write a whole number from 1 to %d", limit);
    if (!json_is_integer(json))
        return refuse(object, key, hint, "\"%s\" must be a whole number, not %s", key,
                      json_is_real(json) ? "a fraction" : type_name(json));
    const json_int_t number = json_integer_value(json);
    if (number < 1 || number > limit)
        return refuse(object, key, hint, "\"%s\" is %" JSON_INTEGER_FORMAT ", outside of 1 to %d", key, number, limit);
    *value = (int)number;
    return HAPT_OK;
}

static bool is_name(const json_t *json, size_t size)
{
    const char *text = json_string_value(json);
    bool plain = text && text[0] != '\0' && strlen(text) < size;
    for (const char *c = text; plain && *c; c++) plain = (unsigned char)*c > 0x20 && *c != 0x7f;
    return plain;
}

/* `at`: key of the value, for its line; NULL: the object itself is at this line. */
static enum hapt_status check_name(const struct object *object, const char *at, const char *key, const json_t *json,
                                   size_t size)
{
    if (is_name(json, size)) return HAPT_OK;
    if (!json_is_string(json))
        return refuse(object, at, "write a name in quotes", "\"%s\" must be text, not %s", key, type_name(json));
    char shown[64], hint[96];
    snprintf(hint, sizeof hint, "write 1 to %zu bytes without spaces", size - 1);
    return refuse(object, at, hint, "\"%s\": \"%s\" is not a name", key, printable(json_string_value(json), shown));
}

static enum hapt_status read_name(const struct object *object, const char *key, bool required, char *buffer,
                                  size_t size)
{
    json_t *json;
    HAPT_TRY(find(object, key, required, &json));
    if (!json) return HAPT_OK;
    HAPT_TRY(check_name(object, key, key, json, size));
    snprintf(buffer, size, "%s", json_string_value(json));
    return HAPT_OK;
}

/* Reads one rate for all floating types, or an object with a rate per type. */
static enum hapt_status read_peak_flops(const struct object *object, double peak_flops[HAPT_DTYPE_COUNT])
{
    const struct object rates = member(object, "peak_flops", "\"peak_flops\"");
    double rate = 0;
    if (!json_is_object(rates.json)) {
        HAPT_TRY(read_quantity(object, "peak_flops", true, &flops_quantity, &rate));
        peak_flops[HAPT_F32] = peak_flops[HAPT_BF16] = peak_flops[HAPT_F16] = rate;
        return HAPT_OK;
    }
    HAPT_TRY(check_keys(&rates, "fp32, bf16, fp16"));
    HAPT_TRY(read_quantity(&rates, "fp32", true, &flops_quantity, &peak_flops[HAPT_F32]));
    HAPT_TRY(read_quantity(&rates, "bf16", false, &flops_quantity, &peak_flops[HAPT_BF16]));
    return read_quantity(&rates, "fp16", false, &flops_quantity, &peak_flops[HAPT_F16]);
}

static enum hapt_status read_device(const struct object *subcluster, struct hapt_device_spec *device)
{
    json_t *json;
    HAPT_TRY(find(subcluster, "device", true, &json));
    if (json_is_string(json)) {
        const struct hapt_device_spec *known = hapt_device_spec_find(json_string_value(json));
        if (known) {
            *device = *known;
            return HAPT_OK;
        }
        char hint[MAX_HINT] = "known devices: ", shown[64];
        for (int i = 0; hapt_device_spec_at(i); i++) append(hint, hapt_device_spec_at(i)->name, ", ");
        append(hint, "or an object with name, peak_flops, memory and memory_bandwidth", "");
        return refuse(subcluster, "device", hint, "unknown device \"%s\"", printable(json_string_value(json), shown));
    }
    if (!json_is_object(json))
        return refuse(subcluster, "device",
                      "name a device such as \"A100-40GB\" or \"cpu\", or describe it in an object",
                      "\"device\" must be text or an object, not %s", type_name(json));
    const struct object object = member(subcluster, "device", "\"device\"");
    HAPT_TRY(check_keys(&object, "name, backend, peak_flops, memory, memory_bandwidth"));
    HAPT_TRY(read_name(&object, "name", true, device->name, sizeof device->name));
    snprintf(device->backend, sizeof device->backend, "%s", strcmp(device->name, "cpu") == 0 ? "cpu" : "cuda");
    HAPT_TRY(read_name(&object, "backend", false, device->backend, sizeof device->backend));
    HAPT_TRY(read_peak_flops(&object, device->peak_flops));
    HAPT_TRY(read_quantity(&object, "memory", true, &bytes_quantity, &device->memory_bytes));
    return read_quantity(&object, "memory_bandwidth", true, &bandwidth_quantity, &device->memory_bandwidth);
}

/* Lists may be long, so an element's offset is searched only for an error message. */
static enum hapt_status take_hosts(const struct object *object, json_t *list, json_t *seen, const char *hint,
                                   struct hapt_subcluster *subcluster)
{
    for (int i = 0; i < subcluster->nodes; i++) {
        const json_t *host = json_array_get(list, (size_t)i);
        const char *name = json_string_value(host);
        char shown[64];
        if (!is_name(host, HOST_CHARS)) {
            const struct object at = element(object, "hosts", i, NULL);
            return check_name(&at, NULL, "hosts", host, HOST_CHARS);
        }
        if (json_object_get(seen, name)) {
            const struct object at = element(object, "hosts", i, NULL);
            return refuse(&at, NULL, hint, "host \"%s\" is named twice", printable(name, shown));
        }
        subcluster->hosts[i] = hapt_arena_strdup(object->reader->arena, name);
        if (!subcluster->hosts[i]) return HAPT_ERR_MEMORY;
        if (json_object_set_new(seen, name, json_true()) != 0)
            return hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory for the names of hosts");
    }
    return HAPT_OK;
}

static enum hapt_status read_hosts(const struct object *object, struct hapt_subcluster *subcluster)
{
    static const char hint[] = "list one host name for each of the subcluster's nodes";
    json_t *json = json_object_get(object->json, "hosts");
    if (!json) return HAPT_OK;
    if (!json_is_array(json)) return refuse(object, "hosts", hint, "\"hosts\" must be a list, not %s", type_name(json));
    if (json_array_size(json) != (size_t)subcluster->nodes)
        return refuse(object, "hosts", hint, "\"hosts\" names %zu hosts for %d nodes", json_array_size(json),
                      subcluster->nodes);
    HAPT_NEW(subcluster->hosts, object->reader->arena, subcluster->nodes);
    json_t *seen = json_object();
    const enum hapt_status status = take_hosts(object, json, seen, hint, subcluster);
    json_decref(seen);
    HAPT_TRY(status);
    subcluster->host_count = subcluster->nodes;
    return HAPT_OK;
}

static enum hapt_status read_host(const struct object *object, struct hapt_subcluster *own)
{
    const json_t *json = json_object_get(object->json, "host");
    if (!json) return HAPT_OK;
    if (!json_is_object(json))
        return refuse(object, "host", "give memory and bandwidth of a node's host in an object",
                      "\"host\" must be an object, not %s", type_name(json));
    const struct object host = member(object, "host", "\"host\"");
    HAPT_TRY(check_keys(&host, "memory, bandwidth, update_rate, paced"));
    HAPT_TRY(read_quantity(&host, "memory", false, &bytes_quantity, &own->host_memory_bytes));
    HAPT_TRY(read_quantity(&host, "bandwidth", false, &bandwidth_quantity, &own->host_bandwidth));
    HAPT_TRY(read_quantity(&host, "update_rate", false, &update_quantity, &own->host_update_rate));
    HAPT_TRY(read_switch(&host, "paced", &own->host_paced));
    if (own->host_paced && strcmp(own->device.backend, "cpu") != 0)
        return refuse(&host, "paced", "leave it out", "\"paced\" slows down copies of CPUs alone, not of %s",
                      own->device.name);
    if (own->host_paced && own->host_bandwidth == 0)
        return refuse(&host, "paced", "give \"bandwidth\"",
                      "\"paced\" needs the bandwidth to which copies are slowed down");
    return HAPT_OK;
}

static enum hapt_status read_subcluster(const struct object *object, struct hapt_subcluster *own)
{
    HAPT_TRY(check_keys(
        object, "name, nodes, devices_per_node, device, slowdown, steady, memory, host, hosts, intra_node_bandwidth, "
                "inter_node_bandwidth, intra_node_latency, inter_node_latency"));
    HAPT_TRY(read_name(object, "name", true, own->name, sizeof own->name));
    HAPT_TRY(read_count(object, "nodes", MAX_NODES, &own->nodes));
    HAPT_TRY(read_count(object, "devices_per_node", MAX_DEVICES_PER_NODE, &own->devices_per_node));
    HAPT_TRY(read_device(object, &own->device));
    own->device.slowdown = 1;
    own->intra_node_latency = own->inter_node_latency = -1;
    HAPT_TRY(read_quantity(object, "slowdown", false, &slowdown_quantity, &own->device.slowdown));
    HAPT_TRY(read_switch(object, "steady", &own->device.steady));
    if (own->device.steady && own->device.slowdown == 1)
        return refuse(object, "steady", "give a \"slowdown\" above 1", "only a slowed device can be steady");
    HAPT_TRY(read_quantity(object, "memory", false, &bytes_quantity, &own->device.memory_bytes));
    own->device.memory_capped = json_object_get(object->json, "memory") != NULL;
    HAPT_TRY(read_quantity(object, "intra_node_bandwidth", false, &bandwidth_quantity, &own->intra_node_bandwidth));
    HAPT_TRY(read_quantity(object, "inter_node_bandwidth", false, &bandwidth_quantity, &own->inter_node_bandwidth));
    HAPT_TRY(read_quantity(object, "intra_node_latency", false, &time_quantity, &own->intra_node_latency));
    HAPT_TRY(read_quantity(object, "inter_node_latency", false, &time_quantity, &own->inter_node_latency));
    HAPT_TRY(read_host(object, own));
    return read_hosts(object, own);
}

static enum hapt_status read_subclusters(const struct object *root, struct hapt_cluster *cluster)
{
    json_t *json;
    HAPT_TRY(find(root, "subclusters", true, &json));
    const size_t count = json_is_array(json) ? json_array_size(json) : 0;
    if (count < 1 || count > HAPT_MAX_SUBCLUSTERS)
        return refuse(root, "subclusters",
                      "list 1 to 16 subclusters, each an object with name, nodes, devices_per_node, device",
                      "\"subclusters\" %s",
                      json_is_array(json) ? (count ? "has more than 16 entries" : "is empty") : "must be a list");
    HAPT_NEW(cluster->subcluster, root->reader->arena, count);
    cluster->count = (int)count;
    for (int i = 0; i < cluster->count; i++) {
        struct hapt_subcluster *own = &cluster->subcluster[i];
        const struct object object = element(root, "subclusters", i, "a subcluster");
        if (!json_is_object(object.json))
            return refuse(&object, NULL, "each subcluster is an object with name, nodes, devices_per_node, device",
                          "a subcluster must be an object, not %s", type_name(object.json));
        HAPT_TRY(read_subcluster(&object, own));
        for (int j = 0; j < i; j++)
            if (strcmp(own->name, cluster->subcluster[j].name) == 0)
                return refuse(&object, "name", "give every subcluster its own name",
                              "two subclusters are called \"%s\"", own->name);
        const long devices = (long)own->nodes * own->devices_per_node;
        if (cluster->rank_count + devices > MAX_DEVICES)
            return refuse(&object, "nodes", "check nodes and devices_per_node", "the cluster has more than %d devices",
                          MAX_DEVICES);
        cluster->rank_count += (int)devices;
    }
    return HAPT_OK;
}

static enum hapt_status read_link_ends(const struct object *object, const struct hapt_cluster *cluster, int end[2])
{
    json_t *json;
    HAPT_TRY(find(object, "between", true, &json));
    if (!json_is_array(json) || json_array_size(json) != 2)
        return refuse(object, "between", "write \"between\": [\"one\", \"other\"]",
                      "\"between\" must name two subclusters");
    for (int e = 0; e < 2; e++) {
        const struct object name = element(object, "between", e, NULL);
        const char *text = json_is_string(name.json) ? json_string_value(name.json) : "";
        end[e] = 0;
        while (end[e] < cluster->count && strcmp(cluster->subcluster[end[e]].name, text) != 0) end[e]++;
        if (end[e] < cluster->count) continue;
        char hint[MAX_HINT] = "subclusters of this file: ", shown[64];
        for (int i = 0; i < cluster->count; i++)
            append(hint, cluster->subcluster[i].name, i < cluster->count - 1 ? ", " : "");
        return refuse(&name, NULL, hint, "a link names an unknown subcluster \"%s\"", printable(text, shown));
    }
    return HAPT_OK;
}

/* "transport": "mpi", or "tcp" with the "interfaces" at both ends. */
static enum hapt_status read_transport(const struct object *object, struct hapt_link *link)
{
    const json_t *transport = json_object_get(object->json, "transport"),
                 *interfaces = json_object_get(object->json, "interfaces");
    const char *text = json_is_string(transport) ? json_string_value(transport) : "";
    if (transport && strcmp(text, "mpi") != 0 && strcmp(text, "tcp") != 0)
        return refuse(object, "transport", "leave it out to let hapt choose the faster one",
                      "\"transport\" must be \"mpi\" or \"tcp\"");
    const bool tcp = strcmp(text, "tcp") == 0;
    if (tcp != (interfaces != NULL))
        return refuse(object, tcp ? "transport" : "interfaces",
                      "write \"transport\": \"tcp\", \"interfaces\": [\"eth0\", \"eth0\"]",
                      "\"tcp\" and \"interfaces\" must be given together");
    snprintf(link->transport, sizeof link->transport, "%s", text);
    for (size_t e = 0; tcp && e < 2; e++) {
        const json_t *name =
            json_is_array(interfaces) && json_array_size(interfaces) == 2 ? json_array_get(interfaces, e) : NULL;
        if (!json_is_string(name) || json_string_length(name) == 0 ||
            json_string_length(name) >= sizeof link->interface[e])
            return refuse(object, "interfaces", "ip link lists them",
                          "\"interfaces\" must be the names of two network interfaces");
        snprintf(link->interface[e], sizeof link->interface[e], "%s", json_string_value(name));
    }
    return HAPT_OK;
}

/* The same link from its other end. */
static struct hapt_link reversed(struct hapt_link link)
{
    char name[sizeof link.interface[0]];
    memcpy(name, link.interface[0], sizeof name);
    memcpy(link.interface[0], link.interface[1], sizeof name);
    memcpy(link.interface[1], name, sizeof name);
    return link;
}

static enum hapt_status read_link(const struct object *object, struct hapt_cluster *cluster, bool *seen)
{
    int end[2];
    struct hapt_link link = {.latency = -1};
    HAPT_TRY(check_keys(object, "between, bandwidth, latency, paced, transport, interfaces"));
    HAPT_TRY(read_link_ends(object, cluster, end));
    HAPT_TRY(read_quantity(object, "bandwidth", false, &bandwidth_quantity, &link.bandwidth));
    HAPT_TRY(read_quantity(object, "latency", false, &time_quantity, &link.latency));
    HAPT_TRY(read_transport(object, &link));
    HAPT_TRY(read_switch(object, "paced", &link.paced));
    if (link.paced && link.bandwidth == 0)
        return refuse(object, "paced", "add \"bandwidth\"", "a paced link needs a bandwidth");
    const int forth = end[0] * cluster->count + end[1], back = end[1] * cluster->count + end[0];
    if (seen[forth])
        return refuse(object, NULL, "keep one of them: a link holds for both directions",
                      "a second link between \"%s\" and \"%s\"", cluster->subcluster[end[0]].name,
                      cluster->subcluster[end[1]].name);
    seen[forth] = seen[back] = true;
    cluster->link[back] = reversed(link);
    cluster->link[forth] = link;
    return HAPT_OK;
}

static enum hapt_status read_links(const struct object *root, struct hapt_cluster *cluster)
{
    struct hapt_arena *arena = root->reader->arena;
    const json_t *json = json_object_get(root->json, "links");
    bool *seen;
    HAPT_NEW(cluster->link, arena, cluster->count * cluster->count);
    HAPT_NEW(seen, arena, cluster->count * cluster->count);
    for (int i = 0; i < cluster->count * cluster->count; i++) cluster->link[i] = (struct hapt_link){.latency = -1};
    if (json && !json_is_array(json))
        return refuse(root, "links", "write a list of objects with between and bandwidth",
                      "\"links\" must be a list, not %s", type_name(json));
    for (size_t i = 0; json && i < json_array_size(json); i++) {
        const struct object object = element(root, "links", (int)i, "a link");
        if (!json_is_object(object.json))
            return refuse(&object, NULL, "each link is an object with between and bandwidth",
                          "a link must be an object, not %s", type_name(object.json));
        HAPT_TRY(read_link(&object, cluster, seen));
    }
    /* Stages of one subcluster are on neighbouring nodes, unless the file has a link of the subcluster with itself. */
    for (int i = 0; i < cluster->count; i++) {
        const struct hapt_subcluster *own = &cluster->subcluster[i];
        const bool wide = own->nodes > 1;
        struct hapt_link *link = &cluster->link[i * cluster->count + i];
        if (link->bandwidth == 0) link->bandwidth = wide ? own->inter_node_bandwidth : own->intra_node_bandwidth;
        if (link->latency < 0) link->latency = wide ? own->inter_node_latency : own->intra_node_latency;
    }
    return HAPT_OK;
}

/* Reads one collective for one number of ranks. */
static enum hapt_status read_collective(const struct object *entry, enum hapt_collective_kind kind,
                                        struct hapt_collective_term *term)
{
    double bandwidth = 0, padding = hapt_collective_pads(kind) ? 1 : 0;
    const char *key = hapt_collective_key(kind);
    json_t *json;
    HAPT_TRY(find(entry, key, true, &json));
    if (!json_is_object(json))
        return refuse(entry, key, "write { \"latency\": ..., \"bandwidth\": ... }", "\"%s\" must be an object, not %s",
                      key, type_name(json));
    const struct object object = member(entry, key, key);
    HAPT_TRY(check_keys(&object, "latency, bandwidth, padding"));
    HAPT_TRY(read_quantity(&object, "latency", false, &time_quantity, &term->latency_s));
    HAPT_TRY(read_quantity(&object, "bandwidth", true, &bandwidth_quantity, &bandwidth));
    HAPT_TRY(read_quantity(&object, "padding", false, &padding_quantity, &padding));
    term->byte_s = 1 / bandwidth;
    term->skew_s = padding / bandwidth;
    return HAPT_OK;
}

static enum hapt_status read_collectives(const struct object *root, struct hapt_cluster *cluster)
{
    static const char hint[] =
        "list one object for each number of ranks that was measured, 64 at most (hapt topology --collectives)";
    const json_t *json = json_object_get(root->json, "collectives");
    if (!json) return HAPT_OK;
    if (!json_is_array(json) || json_array_size(json) > HAPT_MAX_COLLECTIVE_MODELS)
        return refuse(root, "collectives", hint, "\"collectives\" %s",
                      json_is_array(json) ? "has too many entries" : "must be a list");
    cluster->collective_count = (int)json_array_size(json);
    HAPT_NEW(cluster->collective, root->reader->arena, cluster->collective_count);
    for (int i = 0; i < cluster->collective_count; i++) {
        struct hapt_collective_model *model = &cluster->collective[i];
        const struct object object = element(root, "collectives", i, "measured collectives");
        if (!json_is_object(object.json)) return refuse(&object, NULL, hint, "measured collectives must be an object");
        HAPT_TRY(check_keys(&object, "ranks, all_reduce, reduce_scatter, all_gather, grouped_broadcast, all_to_all"));
        HAPT_TRY(read_count(&object, "ranks", MAX_DEVICES, &model->ranks));
        model->measured = true;
        for (int kind = 0; kind < HAPT_COLLECTIVE_COUNT; kind++)
            if (hapt_collective_communicates((enum hapt_collective_kind)kind))
                HAPT_TRY(read_collective(&object, (enum hapt_collective_kind)kind, &model->term[kind]));
        for (int j = 0; j < i; j++)
            if (cluster->collective[j].ranks == model->ranks)
                return refuse(&object, "ranks", hint, "collectives over %d ranks are listed twice", model->ranks);
    }
    return HAPT_OK;
}

static enum hapt_status read_root(const struct reader *reader, json_t *json, struct hapt_cluster *cluster)
{
    static const char hint[] = "a cluster file starts with { \"format\": \"hapt-cluster\", \"version\": 1, ...";
    const struct object root = {reader, json, hapt_json_offset_value(reader->text), "the cluster file"};
    if (!json_is_object(json))
        return refuse(&root, NULL, hint, "the file must hold an object, not %s", type_name(json));
    json_t *format, *version;
    HAPT_TRY(find(&root, "format", true, &format));
    if (!json_is_string(format) || strcmp(json_string_value(format), "hapt-cluster") != 0)
        return refuse(&root, "format", hint, "\"format\" is not \"hapt-cluster\"");
    HAPT_TRY(find(&root, "version", true, &version));
    if (json_is_integer(version) && json_integer_value(version) > 1)
        return refuse(&root, "version", "use a newer hapt", "the cluster file has a later version than 1");
    if (!json_is_integer(version) || json_integer_value(version) != 1)
        return refuse(&root, "version", "this hapt reads version 1", "\"version\" of the cluster file is not 1");
    HAPT_TRY(check_keys(&root, "format, version, subclusters, links, collectives"));
    HAPT_TRY(read_subclusters(&root, cluster));
    HAPT_TRY(read_links(&root, cluster));
    HAPT_TRY(read_collectives(&root, cluster));
    cluster->from_file = true;
    return HAPT_OK;
}

static enum hapt_status read_text(const char *path, struct hapt_arena *arena, char **text, size_t *size)
{
    FILE *file = fopen(path, "rb");
    if (!file) return hapt_fail(HAPT_ERR_INPUT, "check the path given to --cluster", "cannot read %s: %m", path);
    char *buffer = malloc(MAX_FILE_BYTES + 1); /* a pipe's size is unknown until its end */
    *size = buffer ? fread(buffer, 1, MAX_FILE_BYTES + 1, file) : 0;
    const bool broken = ferror(file);
    fclose(file);
    enum hapt_status status = HAPT_OK;
    if (broken)
        status = hapt_fail(HAPT_ERR_INPUT, "check the path given to --cluster",
                           "cannot read %s: it is not a plain file", path);
    else if (*size >= 4 && memcmp(buffer, "\x89HDF", 4) == 0)
        status = hapt_fail(HAPT_ERR_INPUT, "give a model with --input, a profile with --profile, a plan with --plan",
                           "%s is an HDF5 file; a cluster file is JSON", path);
    else if (*size > MAX_FILE_BYTES)
        status = hapt_fail(HAPT_ERR_INPUT, "a cluster file has at most 1 MiB", "%s is larger than 1 MiB", path);
    else if (!buffer)
        status = hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory to read %s", path);
    else if (!(*text = hapt_arena_alloc(arena, *size + 1, 1)))
        status = HAPT_ERR_MEMORY;
    else
        memcpy(*text, buffer, *size);
    free(buffer);
    return status;
}

enum hapt_status hapt_cluster_load(const char *path, struct hapt_arena *arena, struct hapt_cluster **cluster)
{
    struct hapt_cluster *loaded;
    char *text = NULL;
    size_t size = 0;
    HAPT_NEW(loaded, arena, 1);
    HAPT_TRY(read_text(path, arena, &text, &size));
    json_error_t error;
    json_t *json = json_loadb(text, size, JSON_REJECT_DUPLICATES, &error);
    if (!json) {
        char shown[64];
        return hapt_fail(HAPT_ERR_INPUT, "the file must be JSON; hapt help topology describes the format",
                         "%s: line %d: %s", path, error.line > 0 ? error.line : 1, printable(error.text, shown));
    }
    const struct reader reader = {path, text, arena};
    enum hapt_status status = read_root(&reader, json, loaded);
    json_decref(json);
    HAPT_TRY(status);
    HAPT_TRY(hapt_cluster_check(loaded));
    *cluster = loaded;
    return HAPT_OK;
}
