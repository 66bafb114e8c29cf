#!/usr/bin/env python3
"""Exports a PyTorch model as a model file of hapt, with its weights. Needs PyTorch 2.5 or later, and h5py.

    import hapt_export

    hapt_export.export(model, images, labels, "m.h5")   # or tokens and targets

`model` is a module in training mode; its result, or the field `logits` of it, is compared with the targets by the cross entropy. The
example tensors give shapes and types: int64 tokens [rows][T] with targets [rows][T], or float images [rows][C][H][W] with labels [rows].
hapt may train with other rows. On the command line:

    hapt_export.py FILE.py --output m.h5                 # FILE.py defines model(), which returns (model, inputs, targets)

torch.export makes the graph before any decomposition. Parts that depend on neither inputs nor weights are computed here. Operators that
hapt lacks are listed, all of them; then there is no file, and the exit code is 3."""
import argparse
import collections
import importlib.util
import math
import os
import sys

import torch

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import hapt  # noqa: E402

ATEN = torch.ops.aten
MOST_DIMENSIONS = hapt.MOST_DIMENSIONS


VIEWS = {"select", "slice", "view", "reshape", "transpose", "permute", "t", "unsqueeze", "squeeze", "expand", "expand_as", "split", "split_with_sizes",
         "chunk", "unbind", "flatten", "unflatten", "getitem", "alias", "detach", "narrow", "diagonal", "as_strided", "unfold"}
# Their numbers may grow with the rows.
OF_SHAPES = VIEWS | {"_unsafe_view", "arange", "zeros", "ones", "full", "new_zeros", "new_ones", "new_full", "eye", "tril", "triu", "repeat"}


class Unsupported(Exception):
    """Something that hapt's operators cannot express."""


class Lacking(Unsupported):
    """Operators of PyTorch that hapt lacks."""


def base_name(node):
    """aten.add_.Tensor: add_"""
    return str(node.target).split(".")[1] if str(node.target).startswith("aten.") else getattr(node.target, "__name__", str(node.target))


def is_in_place(node):
    return node.op == "call_function" and base_name(node).endswith("_") and not base_name(node).startswith("_")


def numbers_of(argument):
    if isinstance(argument, (list, tuple)):
        return [number for one in argument for number in numbers_of(one)]
    return [argument] if isinstance(argument, (int, float)) else []


class Loss(torch.nn.Module):
    """The model, and the cross entropy of its result."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, inputs, targets):
        logits = self.model(inputs)
        logits = getattr(logits, "logits", logits)
        if isinstance(logits, (tuple, list)):
            logits = logits[0]
        return torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))


class Value:
    """The result of a node of the graph: a tensor of hapt's graph, a parameter, a constant, or an input of integers.

    shape: with the example's rows; wide: with twice as many. A dimension that differs grows with the rows."""

    def __init__(self, shape, wide, tensor=None, parameter=None, constant=None, wide_constant=None, targets=False):
        self.shape, self.wide = tuple(shape), tuple(wide)
        self.tensor, self.parameter, self.constant, self.targets = tensor, parameter, constant, targets
        self.wide_constant = constant if wide_constant is None else wide_constant
        self.made_by = None  # (operator, its input, attributes) of reshapes and permutations, which may cancel

    def rows_dimensions(self):
        return [d for d, pair in enumerate(zip(self.shape, self.wide)) if pair[0] != pair[1]]


class Exporter:
    def __init__(self, name, example, program, wide_program, state):
        self.program, self.state = program, state
        self.nodes = list(program.graph.nodes)
        self.wide = {node: other for node, other in zip(self.nodes, wide_program.graph.nodes)}
        self.narrow = {other: node for node, other in self.wide.items()}
        if len(self.nodes) != len(list(wide_program.graph.nodes)) or any(
                node.op != other.op or (node.op == "call_function" and node.target != other.target) for node, other in self.wide.items()):
            raise Unsupported("the graph depends on the number of rows")
        inputs, targets = example
        self.rows = inputs.shape[0]
        self.of_tokens = not inputs.is_floating_point()
        if len(inputs.shape) != (2 if self.of_tokens else 4) or (not self.of_tokens and inputs.shape[2] != inputs.shape[3]):
            raise Unsupported("inputs are neither tokens [rows][T] nor square images [rows][C][H][H]")
        if targets.shape != (inputs.shape if self.of_tokens else inputs.shape[:1]):
            raise Unsupported("targets are neither tokens [rows][T] nor labels [rows]")
        self.check_nodes()
        logits = next(node.args[0].meta["val"] for node in self.nodes if node.target == ATEN.cross_entropy_loss.default)
        sizes = {"sequence": inputs.shape[1], "vocab": logits.shape[-1]} if self.of_tokens else {
            "channels": inputs.shape[1], "image": inputs.shape[2], "classes": logits.shape[-1]}
        self.graph = hapt.Graph(name, self.rows, **sizes)
        self.values, self.parameters, self.constants, self.loss = {}, {}, 0, None
        self.notes = set()
        self.rows_source = None  # a value with a dimension of rows, for what is repeated for each of them

    # ---- the graph as a whole ----

    def check_nodes(self):
        """Refuses nodes that later steps would not notice."""
        for k, node in enumerate(self.nodes):
            if node.op == "placeholder" or node.op == "output":
                continue
            if node.op != "call_function" or "grad_enabled" in str(node.target):
                raise Unsupported("a part of the model that switches gradients off")
            if is_in_place(node):
                self.check_in_place(k, node)
            if base_name(node) not in OF_SHAPES and node.target != ATEN.cross_entropy_loss.default:
                other = self.wide[node]
                if numbers_of([*node.args, *node.kwargs.values()]) != numbers_of([*other.args, *other.kwargs.values()]):
                    raise Unsupported("%s: its numbers depend on the number of rows" % node.target)

    def check_in_place(self, k, node):
        """An in-place operator is as good as another one if no other name of its operand is read later."""
        operand = node.args[0]
        if operand.op == "placeholder":
            if operand.meta["val"].is_floating_point():
                raise Unsupported("%s changes an input or a weight" % node.target)
            return  # counters of batches
        root, order = operand, {other: place for place, other in enumerate(self.nodes)}
        while base_name(root) in VIEWS or is_in_place(root):
            root = root.args[0]
        family, stack = set(), [root]
        while stack:
            member = stack.pop()
            family.add(member)
            stack += [user for user in member.users if (base_name(user) in VIEWS or is_in_place(user)) and user.args[0] is member]
        followed = operand  # those of which the operand is another name follow it (call)
        while is_in_place(followed):
            family.discard(followed)
            followed = followed.args[0]
        family.discard(followed)
        if any(order[member] < k and any(order[user] > k for user in member.users) for member in family):
            raise Unsupported("%s changes a tensor of which another view is read later" % node.target)

    # ---- values ----

    def shapes_of(self, node):
        return tuple(node.meta["val"].shape), tuple(self.wide[node].meta["val"].shape)

    def made(self, tensor, shape, wide, made_by=None):
        value = Value(shape, wide, tensor=tensor)
        value.made_by = made_by
        return value

    def tensor(self, value):
        """The tensor of hapt's graph: parameters and constants are copied first."""
        if value.tensor is None and value.parameter is not None:
            value.tensor = self.graph.op("copy", value.parameter)
        if value.tensor is None and value.constant is not None:
            self.constants += 1
            self.drop_rows(value)
            constant = value.constant.detach().float()
            if constant.dim() == 0:
                constant = constant.reshape(1)
            if constant.dim() > MOST_DIMENSIONS:
                raise Unsupported("a constant of %d dimensions" % constant.dim())
            parameter = self.graph.parameter("constant.%d" % self.constants, tuple(constant.shape), value=constant.numpy(), trainable=False)
            value.tensor = self.graph.op("copy", parameter)
        if value.tensor is None:
            raise Unsupported("integers that are computed from inputs")
        return value.tensor

    def drop_rows(self, value):
        """A constant is the same in each row. So one element is enough where it grows with the rows; others are repeated later."""
        one, other = value.wide_constant, value.constant
        for d in value.rows_dimensions():
            one, other = one.narrow(d, 0, 1), other.narrow(d, 0, 1)
        if not torch.equal(one.expand(value.wide), value.wide_constant) or not torch.equal(one, other):
            raise Unsupported("a constant that differs from row to row, or depends on their number")
        value.shape = value.wide = tuple(one.shape)
        value.constant = value.wide_constant = one

    def parameter(self, name):
        key = self.state[name].data_ptr(), tuple(self.state[name].shape), self.state[name].stride()  # of tied parameters it is the same
        if key not in self.parameters:
            value = self.state[name].detach()
            shape = tuple(value.shape) or (1,)
            trains = self.state[name].requires_grad or name in self.buffers_that_run
            self.parameters[key] = self.graph.parameter(name.removeprefix("model."), shape, value=value.float().reshape(shape).numpy(),
                                                        trainable=trains)
        return self.parameters[key]

    # ---- operators that other ones are made of ----

    def op(self, kind, values, shape, wide, **attributes):
        operands = []
        for value in values:
            operand = self.tensor(value) if isinstance(value, Value) else value
            operands.append(self.graph.op("copy", operand) if operand is not None and operand in operands else operand)
        made = self.graph.op(kind, *operands, **attributes)
        return self.made(made[0] if isinstance(made, tuple) else made, shape, wide)

    def alike(self, kind, value, *others, **attributes):
        return self.op(kind, [value, *others], value.shape, value.wide, **attributes)

    def reshape(self, value, shape, wide):
        shape, wide = tuple(shape) or (1,), tuple(wide) or (1,)
        while value.made_by and value.made_by[0] == "reshape":
            value = value.made_by[1]
        if value.shape == shape and value.wide == wide:
            return value
        if len(shape) > MOST_DIMENSIONS:
            raise Unsupported("a tensor of %d dimensions" % len(shape))
        growing = [d for d in range(len(shape)) if shape[d] != wide[d]]
        if len(growing) > 1:
            raise Unsupported("a tensor with two dimensions that grow with the rows")
        sizes = [-1 if d in growing else shape[d] for d in range(len(shape))]
        made = self.graph.op("reshape", self.tensor(value), integers=sizes)
        return self.made(made, shape, wide, ("reshape", value, None))

    def permute(self, value, order):
        order = [d % len(value.shape) for d in order]
        if value.made_by and value.made_by[0] == "permute":
            order, value = [value.made_by[2][d] for d in order], value.made_by[1]
        if order == list(range(len(order))):
            return value
        made = self.graph.op("permute", self.tensor(value), integers=order)
        return self.made(made, [value.shape[d] for d in order], [value.wide[d] for d in order], ("permute", value, order))

    def expand(self, value, like):
        """`value` with the shape of `like`, which has at least as many dimensions."""
        if value.constant is not None:
            self.drop_rows(value)
        if value.shape == like.shape and value.wide == like.wide:
            return value
        missing = len(like.shape) - len(value.shape)
        value = self.reshape(value, (1,) * missing + value.shape, (1,) * missing + value.wide)
        return self.op("expand", [value, like], like.shape, like.wide)

    def broadcast(self, a, b):
        """Two values of one shape."""
        for value in (a, b):
            if value.constant is not None:
                self.drop_rows(value)
        if len(a.shape) < len(b.shape):
            b, a = self.broadcast(b, a)
            return a, b
        missing = len(a.shape) - len(b.shape)
        b = self.reshape(b, (1,) * missing + b.shape, (1,) * missing + b.wide)
        widens = [one == 1 and other != 1 for one, other in zip(a.shape, b.shape)]
        if any(widens):
            sizes = [b.shape[d] if widens[d] else 0 for d in range(len(widens))]
            if any(widens[d] and b.shape[d] != b.wide[d] for d in range(len(widens))):
                if not all(w or one == other for w, one, other in zip(widens, a.shape, b.shape)):
                    raise Unsupported("two tensors that repeat each other's rows")
                return self.expand(a, b), b
            shape = [b.shape[d] if widens[d] else a.shape[d] for d in range(len(widens))]
            wide = [b.wide[d] if widens[d] else a.wide[d] for d in range(len(widens))]
            a = self.op("expand", [a, None], shape, wide, integers=sizes)
        return a, self.expand(b, a)

    def slice(self, value, dim, first, end, step=1):
        dim %= len(value.shape)
        size = value.shape[dim]
        first, end = max(0, first + size if first < 0 else first), min(size, end + size if end < 0 else end)
        if (first, end, step) == (0, size, 1):
            return value
        if dim in value.rows_dimensions():
            raise Unsupported("a slice of the rows")
        length = (end - first - 1) // step + 1
        if length < 1:
            raise Unsupported("an empty slice")
        shape, wide = list(value.shape), list(value.wide)
        shape[dim] = wide[dim] = length
        return self.op("strided_slice", [value], shape, wide, integers=[dim, first, end, step])

    def take_rows(self, table, indices):
        """Rows of a matrix that is a parameter: its product with ones in the right places."""
        if table.parameter is None or len(table.shape) != 2:
            raise Unsupported("constant indices of something else than a matrix of parameters")
        ones = torch.nn.functional.one_hot(indices, table.shape[0]).float()
        shape = (len(indices), table.shape[1])
        return self.op("linear", [Value(ones.shape, ones.shape, constant=ones), table.parameter, None], shape, shape)

    def select(self, value, dim, index):
        dim %= len(value.shape)
        index %= value.shape[dim]
        one = self.slice(value, dim, index, index + 1)
        return self.reshape(one, one.shape[:dim] + one.shape[dim + 1:], one.wide[:dim] + one.wide[dim + 1:])

    def concat(self, values, dim):
        made = values[0]
        dim %= len(made.shape)
        for value in values[1:]:
            shape, wide = list(made.shape), list(made.wide)
            shape[dim] += value.shape[dim]
            wide[dim] += value.wide[dim]
            made = self.op("concat", [made, value], shape, wide, integers=[dim])
        return made

    def reduce(self, kind, value, dims, keep):
        dims = sorted({d % len(value.shape) for d in dims} if dims else range(len(value.shape)))
        if any(d in value.rows_dimensions() for d in dims):
            raise Unsupported("a %s over the rows" % kind)
        shape, wide = ([1 if d in dims else size for d, size in enumerate(sizes) if keep or d not in dims] or [1] for sizes in (value.shape, value.wide))
        return self.op(kind, [value], shape, wide, integers=[sum(1 << d for d in dims), int(keep)])

    def matmul(self, a, b):
        transposed = [False, False]
        for k, value in enumerate((a, b)):
            order = value.made_by[2] if value.made_by and value.made_by[0] == "permute" else None
            if order and order == list(range(len(order) - 2)) + [len(order) - 1, len(order) - 2]:
                transposed[k] = True
        a, b = (value.made_by[1] if flag else value for value, flag in zip((a, b), transposed))
        row, column = (-1 if transposed[0] else -2), (-2 if transposed[1] else -1)
        shape, wide = a.shape[:-2] + (a.shape[row], b.shape[column]), a.wide[:-2] + (a.wide[row], b.wide[column])
        return self.op("matmul", [a, b], shape, wide, integers=[transposed[0] + 2 * transposed[1]])

    def general_matmul(self, a, b):
        """torch.matmul, with leading dimensions that are repeated where one operand lacks them."""
        if len(a.shape) == 1 or len(b.shape) == 1:
            raise Unsupported("a product with a vector")
        if len(a.shape) > 2 and len(b.shape) == 2 and b.parameter is not None:
            return self.op("linear", [a, b.parameter, None], a.shape[:-1] + b.shape[-1:], a.wide[:-1] + b.wide[-1:])
        if a.shape[:-2] != b.shape[:-2]:
            lead = [Value(v.shape[:-2] + (1, 1), v.wide[:-2] + (1, 1)) for v in (a, b)]
            if len(lead[0].shape) < len(lead[1].shape) or any(x == 1 != y for x, y in zip(lead[0].shape, lead[1].shape)):
                raise Unsupported("a product of matrices that repeats its first operand")
            size = [n if n != 1 else 0 for n in a.shape[:-2]] + [0, 0]
            missing = len(a.shape) - len(b.shape)
            b = self.reshape(b, (1,) * missing + b.shape, (1,) * missing + b.wide)
            if any(a.shape[d] != a.wide[d] and b.shape[d] == 1 for d in range(len(a.shape) - 2)):
                raise Unsupported("a product of matrices that repeats an operand for each row")
            b = self.op("expand", [b, None], a.shape[:-2] + b.shape[-2:], a.wide[:-2] + b.wide[-2:], integers=size)
        return self.matmul(a, b)

    def simple_mask(self, mask, causal, shape):
        """The mask to be added to scores, or None, and whether attention is causal."""
        if mask is None or mask.constant is None:
            return mask, causal
        self.drop_rows(mask)
        seen = mask.constant
        if seen.dtype != torch.bool:
            seen = seen == 0
            if (mask.constant[~seen] > torch.finfo(torch.float32).min / 2).any():  # it weighs what is seen
                return mask, causal
        if seen.all():
            return None, causal
        if seen.numel() == shape[0] * shape[1] and torch.equal(seen.reshape(shape), torch.ones(shape, dtype=torch.bool).tril()):
            return None, True
        return Value(mask.shape, mask.wide, constant=torch.zeros(mask.shape).masked_fill(~seen, -math.inf)), causal

    def attention(self, q, k, v, mask, causal, scale):
        """Softmax of scaled scores; q, k, v [b][heads][T][head size]."""
        b, heads, length, head = q.shape
        scale = 1 / math.sqrt(head) if scale is None else scale
        mask, causal = self.simple_mask(mask, causal, (length, k.shape[2]))
        if mask is None and k.shape[2] == length and v.shape[3] == head and heads % k.shape[1] == 0:
            flat = [self.permute(x, [0, 2, 1, 3]) for x in (q, k, v)]
            flat = [self.reshape(x, x.shape[:2] + (x.shape[2] * x.shape[3],), x.wide[:2] + (x.shape[2] * x.shape[3],)) for x in flat]
            out = self.graph.op("grouped_attention", *[self.tensor(x) for x in flat], outputs=2, integers=[k.shape[1], int(causal), 0],
                                reals=[scale])[0]
            made = self.made(out, flat[0].shape, flat[0].wide)
            return self.permute(self.reshape(made, (b, length, heads, head), (q.wide[0], length, heads, head)), [0, 2, 1, 3])
        scores = self.matmul(q, self.permute(k, [0, 1, 3, 2]))
        scores = self.alike("scale", scores, reals=[scale])
        if causal:
            seen = torch.ones(length, k.shape[2], dtype=torch.bool).tril()
            mask = Value(seen.shape, seen.shape, constant=torch.zeros(seen.shape).masked_fill(~seen, -math.inf))
        if mask is not None:
            scores = self.alike("add", scores, self.expand(mask, scores))
        return self.matmul(self.alike("softmax", scores), v)

    # ---- nodes ----

    def value_of(self, argument):
        if isinstance(argument, torch.fx.Node):
            return self.values[argument]
        if isinstance(argument, (list, tuple)):
            return [self.value_of(one) for one in argument]
        return argument

    def is_known(self, argument):
        if isinstance(argument, Value):
            return argument.constant is not None
        if isinstance(argument, (list, tuple)):
            return all(self.is_known(one) for one in argument)
        return True

    def computed(self, node, wide):
        """The result of a node whose inputs are known, for the example's rows or for twice as many."""
        def known(argument):
            if isinstance(argument, torch.fx.Node):
                value = self.values[self.narrow.get(argument, argument)]
                return (value.wide_constant if wide else value.constant) if isinstance(value, Value) else value
            if isinstance(argument, (list, tuple)):
                return type(argument)(known(one) for one in argument)
            return argument
        source = self.wide[node] if wide else node
        return node.target(*[known(one) for one in source.args], **{key: known(one) for key, one in source.kwargs.items()})

    def constants_of(self, node):
        made, wide = self.computed(node, False), self.computed(node, True)
        if isinstance(made, (list, tuple)):
            return [Value(one.shape, other.shape, constant=one, wide_constant=other) for one, other in zip(made, wide)]
        return Value(made.shape, wide.shape, constant=made, wide_constant=wide) if isinstance(made, torch.Tensor) else made

    def placeholder(self, node, signature, inputs):
        shape, wide = self.shapes_of(node) if hasattr(node.meta.get("val"), "shape") else ((), ())
        name = node.name
        if name in signature.inputs_to_parameters:
            return Value(shape, wide, parameter=self.parameter(signature.inputs_to_parameters[name]))
        if name in signature.inputs_to_buffers:
            buffer = signature.inputs_to_buffers[name]
            if buffer in self.buffers_that_run:
                return Value(shape, wide, parameter=self.parameter(buffer))
            return Value(shape, wide, constant=self.state[buffer].detach())
        if name in signature.inputs_to_lifted_tensor_constants:
            return Value(shape, wide, constant=self.program.constants[signature.inputs_to_lifted_tensor_constants[name]])
        first = inputs.index(node) == 0
        if not first:
            return Value(shape, wide, targets=True)
        source = self.graph.tokens if self.of_tokens else self.graph.op("cast", self.graph.images)
        made = Value(shape, wide, tensor=source)
        self.rows_source = None if self.of_tokens else made
        return made

    def run(self):
        signature = self.program.graph_signature
        inputs = [node for node in self.nodes if node.op == "placeholder" and node.name in signature.user_inputs]
        self.buffers_that_run = {signature.inputs_to_buffers[node.args[k].name] for node in self.nodes
                                 if node.target == ATEN.batch_norm.default and node.args[5] for k in (3, 4) if isinstance(node.args[k], torch.fx.Node)}
        unknown, needed = collections.Counter(), self.nodes_needed()
        for node in self.nodes:
            if node not in needed:
                continue
            if node.op == "placeholder":
                self.values[node] = self.placeholder(node, signature, inputs)
            elif node.op == "call_function":
                try:
                    self.values[node] = self.call(node)
                except Unsupported as error:
                    unknown["%s (%s)" % (node.target, error)] += 1
                    self.values[node] = self.stand_in(node)
                except KeyError:
                    unknown[str(node.target)] += 1
                    self.values[node] = self.stand_in(node)
                except (TypeError, ValueError, AttributeError, RuntimeError, IndexError) as error:
                    unknown["%s (%s)" % (node.target, str(error).split("\n")[0])] += 1
                    self.values[node] = self.stand_in(node)
        if unknown:
            raise Lacking(", ".join("%s%s" % (name, " x %d" % count if count > 1 else "") for name, count in sorted(unknown.items())))

    def stand_in(self, node):
        """For what cannot be expressed: later nodes are looked at, too. No file is written."""
        value = node.meta.get("val")
        if isinstance(value, (list, tuple)):
            return [Value(one.shape, one.shape, tensor=self.graph.op("copy", self.graph.targets)) for one in value]
        shape, wide = self.shapes_of(node)
        return Value(shape, wide, tensor=self.graph.op("copy", self.graph.targets))

    def nodes_needed(self):
        """The nodes that the loss depends on. In-place operators change the tensors that they read."""
        needed, stack = set(), [node for node in self.nodes if node.op == "output"]
        while stack:
            node = stack.pop()
            if node in needed:
                continue
            needed.add(node)
            stack += node.all_input_nodes
            stack += [user for user in node.users if is_in_place(user)]
        return needed

    def call(self, node):
        arguments = [self.value_of(one) for one in node.args]
        named = {name: self.value_of(one) for name, one in node.kwargs.items()}
        if getattr(node.target, "__name__", "") == "getitem":
            return arguments[0][arguments[1]]
        name, in_place = base_name(node), is_in_place(node)
        if node.target != ATEN.batch_norm.default and all(self.is_known(one) for one in [*arguments, *named.values()]):
            if torch.Tag.nondeterministic_seeded in node.target.tags or "empty" in name:
                raise Unsupported("random numbers, or none")
            return self.constants_of(node)
        made = HANDLERS[name.rstrip("_") if in_place else name](self, node, *arguments, **named)
        changed = node
        while is_in_place(changed):  # the operand, and that of which it is another name
            changed = changed.args[0]
            self.values[changed] = made
        return made


HANDLERS = {}


def handles(*names):
    def decorate(function):
        for name in names:
            HANDLERS[name] = function
        return function
    return decorate


def as_list(value, count):
    return list(value) * (count if len(value) == 1 else 1) if isinstance(value, (list, tuple)) else [value] * count


def map_of(kind, reals=lambda: ()):
    return lambda e, node, x, *arguments, **named: e.alike(kind, x, reals=list(reals(*arguments, **named)))


for torch_name, kind in (("relu", "relu"), ("sigmoid", "sigmoid"), ("silu", "silu"), ("tanh", "tanh"), ("hardswish", "hardswish"),
                         ("hardsigmoid", "hardsigmoid"), ("exp", "exp"), ("log", "log"), ("sin", "sin"), ("cos", "cos")):
    HANDLERS[torch_name] = map_of(kind)
HANDLERS["leaky_relu"] = map_of("leaky_relu", lambda slope=0.01: (slope,))
HANDLERS["elu"] = map_of("elu", lambda alpha=1.0: (alpha,))
HANDLERS["hardtanh"] = map_of("clamp", lambda low=-1.0, high=1.0: (low, high))
HANDLERS["relu6"] = map_of("clamp", lambda: (0.0, 6.0))
HANDLERS["sqrt"] = map_of("power", lambda: (0.5,))
HANDLERS["rsqrt"] = map_of("power", lambda: (-0.5,))
HANDLERS["reciprocal"] = map_of("power", lambda: (-1.0,))
HANDLERS["neg"] = map_of("scale", lambda: (-1.0,))


@handles("pow")
def power(e, node, x, exponent):
    if not isinstance(x, Value) or isinstance(exponent, Value):
        raise Unsupported("a power that is a tensor")
    return e.alike("power", x, reals=[float(exponent)])


@handles("gelu")
def gelu(e, node, x, approximate="none"):
    return e.alike("gelu", x, integers=[int(approximate == "none")])


@handles("softplus")
def softplus(e, node, x, beta=1, threshold=20):
    if beta != 1 or threshold < 20:
        raise Unsupported("beta %g, threshold %g" % (beta, threshold))
    return e.alike("softplus", x)  # beyond the threshold both are x, to fp32


@handles("clone", "contiguous", "alias", "to", "_to_copy", "lift_fresh_copy")
def same(e, node, x, *arguments, **named):
    if not x.targets and node.meta["val"].dtype != node.args[0].meta["val"].dtype:
        raise Unsupported("a conversion to %s" % node.meta["val"].dtype)
    return x


@handles("dropout")
def dropout(e, node, x, p, train):
    if not train or p == 0:
        return x
    rows = x.rows_dimensions()
    if rows != [0] or x.shape[0] != e.rows:
        raise Unsupported("a tensor whose first dimension is not the rows")
    flat = e.reshape(x, (x.shape[0], 1, math.prod(x.shape[1:])), (x.wide[0], 1, math.prod(x.shape[1:])))
    made = e.made(e.graph.op("dropout", e.tensor(flat), e.graph.input("row_keys"), reals=[p]), flat.shape, flat.wide)
    return e.reshape(made, x.shape, x.wide)


def two_operands(kind):
    def handler(e, node, a, b, alpha=1):
        if not isinstance(a, Value):
            a = Value((1,), (1,), constant=torch.tensor([float(a)]))
        if not isinstance(b, Value):
            if kind == "mul":
                return e.alike("scale", a, reals=[float(b)])
            if kind == "div":
                return e.alike("scale", a, reals=[1 / float(b)])
            b = Value((1,), (1,), constant=torch.tensor([float(b)]))
        if alpha != 1:
            b = e.alike("scale", b, reals=[float(alpha)])
        a, b = e.broadcast(a, b)
        return e.op(kind, [a, b], a.shape, a.wide)
    return handler


for kind in ("add", "sub", "mul", "div"):
    HANDLERS[kind] = two_operands(kind)
HANDLERS["rsub"] = lambda e, node, a, b, alpha=1: HANDLERS["sub"](e, node, Value((1,), (1,), constant=torch.tensor([float(b)]))
                                                                 if not isinstance(b, Value) else b, a, alpha)


@handles("linear")
def linear(e, node, x, weight, bias=None):
    if weight.parameter is None or (bias is not None and bias.parameter is None):
        made = e.general_matmul(x, e.permute(weight, [1, 0]))
        return HANDLERS["add"](e, node, made, bias) if bias is not None else made
    return e.op("linear_t", [x, weight.parameter, bias.parameter if bias is not None else None], x.shape[:-1] + weight.shape[:1],
                x.wide[:-1] + weight.wide[:1])


@handles("addmm")
def addmm(e, node, bias, x, weight, beta=1, alpha=1):
    if beta != 1 or alpha != 1:
        raise Unsupported("factors")
    shapes = x.shape[:1] + weight.shape[1:], x.wide[:1] + weight.wide[1:]
    if weight.parameter is not None and bias.parameter is not None:
        return e.op("linear", [x, weight.parameter, bias.parameter], *shapes)
    source = weight.made_by[1] if weight.made_by and weight.made_by[0] == "permute" else None
    if source is not None and source.parameter is not None and bias.parameter is not None:
        return e.op("linear_t", [x, source.parameter, bias.parameter], *shapes)
    return HANDLERS["add"](e, node, e.general_matmul(x, weight), bias)


@handles("matmul", "mm", "bmm")
def matmul(e, node, a, b):
    return e.general_matmul(a, b)


@handles("index")
def index(e, node, table, indices):
    if len(indices) != 1 or indices[0].constant is None:
        raise Unsupported("indices that are computed from inputs, or several")
    e.drop_rows(indices[0])
    some = e.take_rows(table, indices[0].constant.reshape(-1))
    return e.reshape(some, indices[0].shape + table.shape[1:], indices[0].wide + table.wide[1:])


@handles("embedding")
def embedding(e, node, table, indices, padding=-1, by_frequency=False, sparse=False):
    if by_frequency:
        raise Unsupported("gradients that are scaled by frequency")
    if padding >= 0:
        e.notes.add("the row of padding, %d, of an embedding trains as the others do" % padding)
    if indices.constant is not None:  # rows of a table that are the same for all: positions
        e.drop_rows(indices)
        flat = indices.constant.reshape(-1)
        first, count = int(flat[0]), flat.numel()
        if torch.equal(flat, torch.arange(first, first + count)):
            some = e.slice(Value(table.shape, table.wide, parameter=table.parameter), 0, first, first + count)
        else:
            some = e.take_rows(table, flat)
        return e.reshape(some, indices.shape + table.shape[1:], indices.wide + table.wide[1:])
    if table.parameter is None or len(indices.shape) != 2 or indices.tensor is not e.graph.tokens:
        raise Unsupported("indices that are not the model's tokens")
    made = e.op("embedding", [indices, table.parameter, None], indices.shape + table.shape[1:], indices.wide + table.wide[1:])
    e.rows_source = e.rows_source or made
    return made


@handles("conv2d")
def conv2d(e, node, x, weight, bias=None, stride=(1, 1), padding=(0, 0), dilation=(1, 1), groups=1):
    stride, dilation = as_list(stride, 2), as_list(dilation, 2)
    padding = as_list(padding, 2) if not isinstance(padding, str) else [None, None]
    if stride[0] != stride[1] or dilation[0] != dilation[1] or padding[0] is None:
        raise Unsupported("stride %s, padding %s, dilation %s" % (stride, padding, dilation))
    if weight.parameter is None or (bias is not None and bias.parameter is None):
        raise Unsupported("a kernel or bias that is no parameter")
    if padding[0] != padding[1]:
        x, padding = pad(e, node, x, [padding[1], padding[1], padding[0], padding[0]]), [0, 0]
    shape, wide = e.shapes_of(node)
    operands = [x, weight.parameter, bias.parameter if bias is not None else None]
    if groups == 1 and dilation == [1, 1]:
        return e.op("conv2d", operands, shape, wide, integers=[stride[0], padding[0]])
    return e.op("grouped_conv2d", operands, shape, wide, integers=[groups, stride[0], padding[0], dilation[0]])


@handles("max_pool2d", "max_pool2d_with_indices")
def max_pool2d(e, node, x, kernel, stride=(), padding=(0,), dilation=(1,), ceil=False):
    kernel, padding, dilation = as_list(kernel, 2), as_list(padding, 2), as_list(dilation, 2)
    stride = as_list(stride, 2) if stride else kernel
    if kernel[0] != kernel[1] or stride[0] != stride[1] or padding[0] != padding[1] or dilation != [1, 1]:
        raise Unsupported("kernel %s, stride %s, padding %s, dilation %s" % (kernel, stride, padding, dilation))
    shape, wide = e.shapes_of(node)
    if any(size != (x.shape[2 + d] + 2 * padding[0] - kernel[0]) // stride[0] + 1 for d, size in enumerate(shape[2:])):
        raise Unsupported("ceil_mode that adds a window")
    return e.op("max_pool", [x], shape, wide, integers=[kernel[0], stride[0], padding[0]])


@handles("adaptive_avg_pool2d")
def adaptive_avg_pool2d(e, node, x, size):
    size = as_list(size, 2)
    if size == [1, 1]:
        return e.reduce("mean", x, [2, 3], True)
    if size[0] != size[1]:
        raise Unsupported("a result that is not square")
    return e.op("adaptive_pool", [x], x.shape[:2] + tuple(size), x.wide[:2] + tuple(size), integers=[size[0]])


@handles("avg_pool2d")
def avg_pool2d(e, node, x, kernel, stride=(), padding=(0, 0), ceil=False, counts_padding=True, divisor=None):
    kernel, padding = as_list(kernel, 2), as_list(padding, 2)
    stride = as_list(stride, 2) if stride else kernel
    (b, c, height, width), wide = x.shape, x.wide
    if kernel != stride or padding != [0, 0] or height % kernel[0] or width % kernel[1] or divisor is not None:
        raise Unsupported("windows that overlap, or do not cover the image")
    tiles = (height // kernel[0], kernel[0], width // kernel[1], kernel[1])
    flat = e.reshape(x, (b * c * tiles[0],) + tiles[1:], (wide[0] * c * tiles[0],) + tiles[1:])
    made = e.reduce("mean", flat, [1, 3], False)
    return e.reshape(made, (b, c, tiles[0], tiles[2]), (wide[0], c, tiles[0], tiles[2]))


@handles("layer_norm")
def layer_norm(e, node, x, normalized, weight=None, bias=None, epsilon=1e-5, *rest):
    if len(normalized) != 1 or weight is None or bias is None or weight.parameter is None or bias.parameter is None:
        raise Unsupported("of %d dimensions, or without weight and bias" % len(normalized))
    made = e.graph.op("layer_norm", e.tensor(x), weight.parameter, bias.parameter, outputs=3, reals=[epsilon])[0]
    return e.made(made, x.shape, x.wide)


@handles("batch_norm")
def batch_norm(e, node, x, weight, bias, mean, variance, training, momentum, epsilon, *rest):
    if not training or any(one is None or one.parameter is None for one in (weight, bias, mean, variance)):
        raise Unsupported("without running statistics or parameters, or not in training mode")
    if e.graph.training.setdefault("batch-norm-momentum", "%g" % momentum) != "%g" % momentum:
        raise Unsupported("momentum %g beside another one: hapt has one for the run" % momentum)
    image = x
    if len(x.shape) != 4:
        tail = x.shape[2:] + (1,) * (4 - len(x.shape))
        image = e.reshape(x, x.shape[:2] + tail, x.wide[:2] + tail)
    count = [image.shape[0] * image.shape[2] * image.shape[3]]
    source = e.tensor(image)
    middle = e.graph.op("batch_mean", source, integers=count)
    around = e.graph.op("batch_variance", source, middle, integers=count)
    made = e.graph.op("batch_norm_running", source, middle, around, weight.parameter, bias.parameter, mean.parameter, variance.parameter,
                      e.graph.input("training"), integers=count, reals=[epsilon])
    return e.reshape(e.made(made, image.shape, image.wide), x.shape, x.wide)


@handles("group_norm")
def group_norm(e, node, x, groups, weight=None, bias=None, epsilon=1e-5, *rest):
    size = math.prod(x.shape[1:]) // groups
    flat = e.reshape(x, (x.shape[0], groups, size), (x.wide[0], groups, size))
    flat = HANDLERS["sub"](e, node, flat, e.reduce("mean", flat, [2], True))
    variance = e.reduce("mean", e.alike("power", flat, reals=[2.0]), [2], True)
    share = e.alike("power", HANDLERS["add"](e, node, variance, epsilon), reals=[-0.5])
    made = e.reshape(HANDLERS["mul"](e, node, flat, share), x.shape, x.wide)
    one = (x.shape[1],) + (1,) * (len(x.shape) - 2)
    if weight is not None:
        made = HANDLERS["mul"](e, node, made, e.reshape(weight, one, one))
    return HANDLERS["add"](e, node, made, e.reshape(bias, one, one)) if bias is not None else made


@handles("softmax", "_softmax")
def softmax(e, node, x, dim, *rest, **named):
    dim %= len(x.shape)
    if dim == len(x.shape) - 1:
        return e.alike("softmax", x)
    order = [d for d in range(len(x.shape)) if d != dim] + [dim]
    back = [order.index(d) for d in range(len(order))]
    return e.permute(e.alike("softmax", e.permute(x, order)), back)


@handles("mean")
def mean(e, node, x, dims=None, keep=False, **named):
    return e.reduce("mean", x, dims, keep)


@handles("sum")
def total(e, node, x, dims=None, keep=False, **named):
    return e.reduce("sum", x, dims, keep)


@handles("view", "reshape", "_unsafe_view", "flatten", "unflatten", "unsqueeze", "squeeze")
def view(e, node, x, *arguments):
    if x.targets:
        return x
    if node.target == ATEN.view.dtype:
        raise Unsupported("the bits as another type")
    shape, wide = e.shapes_of(node)
    return e.reshape(x, shape, wide)


@handles("transpose")
def transpose(e, node, x, one, other):
    order = list(range(len(x.shape)))
    order[one], order[other] = order[other], order[one]
    return e.permute(x, order)


@handles("permute")
def permute(e, node, x, order):
    return e.permute(x, order)


@handles("t")
def t(e, node, x):
    return e.permute(x, [1, 0])


@handles("expand", "expand_as")
def expand(e, node, x, *arguments, **named):
    shape, wide = e.shapes_of(node)
    if x.shape == shape and x.wide == wide:
        return x
    missing = len(shape) - len(x.shape)
    x = e.reshape(x, (1,) * missing + x.shape, (1,) * missing + x.wide)
    sizes = [shape[d] if x.shape[d] != shape[d] else 0 for d in range(len(shape))]
    if not any(sizes[d] and shape[d] != wide[d] for d in range(len(shape))):
        return e.op("expand", [x, None], shape, wide, integers=sizes)
    growing = [d for d in range(len(shape)) if sizes[d] and shape[d] != wide[d]]
    if growing != [0] or not e.rows_source:
        raise Unsupported("rows that are repeated")
    like = e.rows_source  # any tensor with a dimension of rows, cut to one element
    flat = e.reshape(like, (like.shape[0], math.prod(like.shape[1:])), (like.wide[0], math.prod(like.shape[1:])))
    one = e.slice(flat, 1, 0, 1)
    one = e.reshape(one, (shape[0],) + (1,) * (len(shape) - 1), (wide[0],) + (1,) * (len(shape) - 1))
    sizes[0] = 0
    repeated = [shape[d] if d else 0 for d in range(len(shape))]
    return e.op("expand", [x, one], shape, wide, integers=repeated)


@handles("slice")
def slice_of(e, node, x, dim=0, first=None, end=None, step=1):
    first, end = first or 0, sys.maxsize if end is None else end
    if dim % len(x.shape) in x.rows_dimensions() and first == 0 and end >= x.shape[dim] and step == 1:
        return x
    return e.slice(x, dim, first, min(end, x.shape[dim % len(x.shape)]), step)


@handles("select")
def select(e, node, x, dim, index):
    return e.select(x, dim, index)


@handles("split", "split_with_sizes", "chunk")
def split(e, node, x, sizes, dim=0):
    first, made = 0, []
    for one in node.meta["val"]:
        length = one.shape[dim]
        made.append(e.slice(x, dim, first, first + length))
        first += length
    return made


@handles("unbind")
def unbind(e, node, x, dim=0):
    return [e.select(x, dim, k) for k in range(x.shape[dim])]


@handles("cat")
def cat(e, node, values, dim=0):
    return e.concat(values, dim)


@handles("stack")
def stack(e, node, values, dim=0):
    dim %= len(values[0].shape) + 1
    return e.concat([e.reshape(v, v.shape[:dim] + (1,) + v.shape[dim:], v.wide[:dim] + (1,) + v.wide[dim:]) for v in values], dim)


@handles("pad", "constant_pad_nd")
def pad(e, node, x, widths, mode="constant", value=0):
    if mode not in ("constant", 0) or value not in (0, None) or min(widths) < 0:
        raise Unsupported("mode %s, value %s" % (mode, value))
    for k in range(0, len(widths), 2):
        dim, before, after = len(x.shape) - 1 - k // 2, widths[k], widths[k + 1]
        if before or after:
            shape, wide = list(x.shape), list(x.wide)
            shape[dim] += before + after
            wide[dim] += before + after
            x = e.op("pad", [x], shape, wide, integers=[dim, before, after])
    return x


@handles("roll")
def roll(e, node, x, shifts, dims=()):
    if not dims:
        raise Unsupported("of all elements")
    for shift, dim in zip(shifts, dims):
        size = x.shape[dim]
        cut = -shift % size
        x = e.concat([e.slice(x, dim, cut, size), e.slice(x, dim, 0, cut)], dim) if cut else x
    return x


@handles("masked_fill")
def masked_fill(e, node, x, mask, fill):
    if mask.constant is None or isinstance(fill, Value) and fill.constant is None:
        raise Unsupported("a mask that is computed from inputs")
    fill = float(fill.constant) if isinstance(fill, Value) else float(fill)
    kept = Value(mask.shape, mask.wide, constant=(~mask.constant).float())
    added = Value(mask.shape, mask.wide, constant=torch.zeros(mask.shape).masked_fill(mask.constant, fill))
    return HANDLERS["add"](e, node, HANDLERS["mul"](e, node, x, kept), added)


@handles("scaled_dot_product_attention")
def attention(e, node, q, k, v, mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    if dropout_p:
        raise Unsupported("dropout inside attention")
    if len(q.shape) != 4:
        raise Unsupported("%d dimensions" % len(q.shape))
    return e.attention(q, k, v, mask, is_causal, scale)


@handles("upsample_nearest2d")
def upsample(e, node, x, size, *rest):
    shape, wide = e.shapes_of(node)
    b, c, height, width = x.shape
    if shape[2] % height or shape[3] % width:
        raise Unsupported("a factor that is no integer")
    down, across = shape[2] // height, shape[3] // width
    flat = e.reshape(x, (b * c * height, 1, width, 1), (x.wide[0] * c * height, 1, width, 1))
    flat = e.op("expand", [flat, None], (b * c * height, down, width, across), (x.wide[0] * c * height, down, width, across),
                integers=[0, down, 0, across])
    return e.reshape(flat, shape, wide)


@handles("cross_entropy_loss")
def cross_entropy(e, node, logits, targets, weight=None, reduction=1, ignore=-100, smoothing=0.0):
    if weight is not None or reduction != 1 or ignore != -100 or not targets.targets:
        raise Unsupported("weights of classes, or another reduction than the mean")
    if smoothing:
        e.notes.add("the losses that hapt prints are those without label smoothing")
    lead = (e.rows, e.graph.sizes["sequence"]) if e.of_tokens else (e.rows,)
    twice = (2 * e.rows,) + lead[1:]
    logits = e.reshape(logits, lead + logits.shape[-1:], twice + logits.wide[-1:])
    e.loss = e.graph.op("cross_entropy", e.tensor(logits), e.graph.targets, name="loss", reals=[smoothing])
    return e.made(e.loss, (1,), (1,))


def prune(graph, loss):
    """Drops operators and tensors that the loss does not depend on: reshapes and permutations that cancelled."""
    needed = {loss.row} | {row for row, tensor in enumerate(graph.tensors) if tensor[1] == "input"}
    kept = []
    for operator in reversed(graph.operators):
        if needed.intersection(operator[3]):
            needed.update(operator[2], operator[3])
            kept.append(operator)
    rows = {row: k for k, row in enumerate(sorted(needed - {-1}))}
    rows[-1] = -1
    graph.tensors = [tensor for row, tensor in enumerate(graph.tensors) if row in rows]
    graph.operators = [(name, kind, [rows[r] for r in reads], [rows[r] for r in writes], *rest) for name, kind, reads, writes, *rest in reversed(kept)]
    names = {tensor[0] for tensor in graph.tensors}
    graph.values = {name: value for name, value in graph.values.items() if name in names}


def export(model, inputs, targets, path, name=None):
    """Writes the model file. Raises Unsupported, with all operators that hapt lacks, before it writes anything."""
    wrapped = Loss(model)
    twice = [torch.cat([one, one]) for one in (inputs, targets)]
    if any(weight.dtype != torch.float32 for weight in model.parameters()):
        raise Unsupported("weights are not fp32; hapt converts the model, --dtype")
    programs = [torch.export.export(wrapped, tuple(example)) for example in ((inputs, targets), twice)]
    state = dict(wrapped.named_parameters(remove_duplicate=False))
    state.update(wrapped.named_buffers(remove_duplicate=False))
    exporter = Exporter(name or type(model).__name__, (inputs, targets), *programs, state)
    exporter.run()
    if exporter.loss is None:
        raise Unsupported("the loss is no cross entropy")
    for note in sorted(exporter.notes):
        print("hapt_export: note: %s" % note, file=sys.stderr)
    prune(exporter.graph, exporter.loss)
    exporter.graph.save(path, exporter.loss)
    return exporter.graph


def main():
    parser = argparse.ArgumentParser(description="Exports a PyTorch model as a model file of hapt.")
    parser.add_argument("file", help="FILE.py, which defines model(): it returns (model, inputs, targets)")
    parser.add_argument("--output", required=True, help="the model file")
    options = parser.parse_args()
    spec = importlib.util.spec_from_file_location("exported", options.file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        graph = export(*module.model(), options.output)
    except Unsupported as error:
        lacking = isinstance(error, Lacking)
        print("hapt_export: error: %s: %s%s" % (options.file, "hapt has no operators for " if lacking else "", error), file=sys.stderr)
        print("hint: hapt ops lists the operators" if lacking else "hint: see the head of hapt_export.py", file=sys.stderr)
        sys.exit(3)
    print("%s: %d operators, %d parameters" % (options.output, len(graph.operators), sum(tensor[1] == "parameter" for tensor in graph.tensors)))


if __name__ == "__main__":
    main()
