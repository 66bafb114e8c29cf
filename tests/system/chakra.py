#!/usr/bin/python3
"""chakra.py FOLDER: rank.N.et and rank.N.json hold the same nodes. Decodes Protocol Buffers by the wire format alone; field names are those of
Chakra's et_def.proto."""
import glob
import json
import struct
import sys

NODE = {1: "id", 2: "name", 3: "type", 5: "data_deps", 7: "duration_micros", 10: "attr"}
ATTRIBUTE = {1: "name", 3: "double", 7: "int32", 9: "int64", 27: "bool"}


def varint(data, at):
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if not data[at - 1] & 0x80:
            return value, at


def fields(data):
    """(field, value) of a message: int, float or bytes."""
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        if key & 7 == 0:
            value, at = varint(data, at)
        elif key & 7 == 1:
            value, at = struct.unpack_from("<d", data, at)[0], at + 8
        else:
            assert key & 7 == 2, key
            size, at = varint(data, at)
            value, at = data[at:at + size], at + size
            assert len(value) == size
        yield key >> 3, value


def messages(path):
    data, at = open(path, "rb").read(), 0
    while at < len(data):
        size, at = varint(data, at)
        assert at + size <= len(data)
        yield data[at:at + size]
        at += size


def node_of(message):
    """As in the JSON form."""
    node = {"data_deps": []}
    for field, value in fields(message):
        name = NODE[field]
        if name == "data_deps":
            at = 0
            while at < len(value):
                dependency, at = varint(value, at)
                node["data_deps"].append(dependency)
        elif name == "attr":
            parts = {ATTRIBUTE[f]: v for f, v in fields(value)}
            text = parts.pop("name").decode()
            (kind, number), = parts.items()
            assert kind == {"is_cpu_op": "bool", "time_s": "double", "comm_size": "int64"}.get(text, "int32"), (text, kind)
            node[text] = bool(number) if kind == "bool" else number
        else:
            node[{"id": "Id", "name": "Name", "type": "NodeType", "duration_micros": "runtime"}[name]] = value.decode() if name == "name" else value
    node.setdefault("runtime", 0)
    return node


total = 0
paths = glob.glob(sys.argv[1] + "/rank.*.et")
assert len(paths) == len(glob.glob(sys.argv[1] + "/rank.*.json")) > 0
for path in paths:
    first, *rest = messages(path)
    whole = json.load(open(path[:-2] + "json"))
    assert dict(fields(first)) == {1: whole["version"].encode()}
    nodes = [node_of(message) for message in rest]
    for node, same in zip(nodes, whole["workload_graph"]):
        assert node == same, (node, same)
    assert len(nodes) == len(whole["workload_graph"])
    total += len(nodes)
print("%d nodes" % total)
