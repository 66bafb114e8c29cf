"""For hapt_export.py: the nodes of torch.export's graph become operators of hapt. Those of single PyTorch operators are in
hapt_export_operators.py and hapt_export_images.py."""
import collections
import math
import os
import sys

import torch
from torch._subclasses.fake_tensor import FakeTensor

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import hapt  # noqa: E402

ATEN = torch.ops.aten
MOST_DIMENSIONS = hapt.MOST_DIMENSIONS
HIDDEN = -3e4  # added to scores that are not seen: finite in fp16, and its exponential is 0
VIEWS = {"select", "slice", "view", "reshape", "transpose", "permute", "t", "unsqueeze", "squeeze", "expand", "expand_as", "split", "split_with_sizes",
         "chunk", "unbind", "flatten", "unflatten", "getitem", "alias", "detach", "narrow", "diagonal", "as_strided", "unfold"}
# Their numbers may grow with the rows.
OF_SHAPES = VIEWS | {"_unsafe_view", "arange", "zeros", "ones", "full", "new_zeros", "new_ones", "new_full", "eye", "tril", "triu", "repeat"}


class Unsupported(Exception):
    """Something that hapt's operators cannot express."""


class NoGraph(Unsupported):
    """torch.export makes no graph of the model."""


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


class Value:
    """The result of a node of the graph: a tensor of hapt's graph, a parameter, a constant, or an input of integers.

    shape: with the example's rows; wide: with twice as many. A dimension that differs grows with the rows."""

    def __init__(self, shape, wide, tensor=None, parameter=None, constant=None, wide_constant=None, targets=False):
        self.shape, self.wide = tuple(shape), tuple(wide)
        self.tensor, self.parameter, self.constant, self.targets = tensor, parameter, constant, targets
        self.wide_constant = constant if wide_constant is None else wide_constant
        self.whole = constant, self.wide_constant  # for what is computed of it here; drop_rows leaves them
        self.made_by = None  # (operator, its input, attributes) of reshapes and permutations, which may cancel

    def rows_dimensions(self):
        return [d for d, pair in enumerate(zip(self.shape, self.wide)) if pair[0] != pair[1]]


class Exporter:
    """handlers: by the name of a PyTorch operator, a function of the exporter, the node and the values of its arguments; it returns a value."""

    def __init__(self, name, example, program, wide_program, state, handlers, frozen_weights="fp32"):
        self.program, self.state, self.handlers = program, state, handlers
        self.packing = None if frozen_weights == "fp32" else frozen_weights
        self.nodes = list(program.graph.nodes)
        self.wide = {node: other for node, other in zip(self.nodes, wide_program.graph.nodes)}
        self.narrow = {other: node for node, other in self.wide.items()}
        if len(self.nodes) != len(list(wide_program.graph.nodes)) or any(
                node.op != other.op or (node.op == "call_function" and node.target != other.target) for node, other in self.wide.items()):
            raise Unsupported("the graph depends on the number of rows")
        inputs, targets = example
        self.fields = inputs if isinstance(inputs, dict) else None
        self.rows = targets.shape[0]
        self.check_nodes()
        self.values, self.parameters, self.constants, self.loss = {}, {}, 0, None
        self.notes = set()
        self.rows_source = None  # a value with a dimension of rows, for what is repeated for each of them
        self.graph = hapt.Graph(name, self.rows, **(self.sizes_of_fields(targets) if self.fields else self.sizes_of_example(inputs, targets)))

    def sizes_of_fields(self, targets):
        """Arguments of the graph for named inputs."""
        self.of_tokens, self.places, self.target_shape = False, None, tuple(targets.shape)
        sizes = [node.args[0].meta["val"].shape[0] for node in self.nodes if base_name(node) in ("embedding", "embedding_bag")]
        sizes += [node.args[0].meta["val"].shape[1] for node in self.nodes if node.target == ATEN.cross_entropy_loss.default]
        sizes += [int(one.max()) + 1 for one in self.fields.values() if not one.is_floating_point()]
        fields = {**self.fields, "targets": targets}
        if "targets" in self.fields or any(one.dim() < 1 or one.shape[0] != self.rows for one in fields.values()):
            raise Unsupported("named inputs are tensors [rows][...], and none of them is named targets")
        return {"vocab": max(sizes, default=1), "target": "targets",
                "fields": {key: (tuple(one.shape[1:]), "fp32" if one.is_floating_point() else "int32") for key, one in fields.items()}}

    def sizes_of_example(self, inputs, targets):
        """Arguments of the graph for tokens or images."""
        self.of_tokens = not inputs.is_floating_point()
        if len(inputs.shape) != (2 if self.of_tokens else 4) or (not self.of_tokens and inputs.shape[2] != inputs.shape[3]):
            raise Unsupported("inputs are neither tokens [rows][T] nor square images [rows][C][H][H]")
        fits = targets.shape == inputs.shape if self.of_tokens else targets.shape[:1] == inputs.shape[:1] and targets.dim() in (1, 3)
        if not fits or targets.is_floating_point():
            raise Unsupported("targets are neither tokens [rows][T] nor labels [rows] or [rows][H][W]; other models have a dict of inputs")
        logits = next(node.args[0].meta["val"] for node in self.nodes if node.target == ATEN.cross_entropy_loss.default)
        sizes = {"sequence": inputs.shape[1], "vocab": logits.shape[-1]} if self.of_tokens else {
            "channels": inputs.shape[1], "image": inputs.shape[2], "classes": logits.shape[1]}
        self.places = None if targets.dim() == 1 or self.of_tokens else math.prod(targets.shape[1:])
        if self.places:
            sizes["labels"] = self.places
        return sizes

    def integers(self):
        """The inputs that are integers, which tables are read at."""
        if self.fields:
            return [self.graph.fields[key] for key, one in self.fields.items() if not one.is_floating_point()]
        return [self.graph.tokens] if self.of_tokens else []

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
            self.drop_rows(value)
            value.tensor = self.graph.op("copy", self.constant_parameter(value.constant))
        if value.tensor is None:
            raise Unsupported("integers that are computed from inputs")
        return value.tensor

    def constant_parameter(self, constant):
        """A parameter that does not train."""
        self.constants += 1
        constant = constant.detach().float()
        if constant.dim() == 0:
            constant = constant.reshape(1)
        if constant.dim() > MOST_DIMENSIONS:
            raise Unsupported("a constant of %d dimensions" % constant.dim())
        return self.graph.parameter("constant.%d" % self.constants, tuple(constant.shape), value=constant.contiguous().numpy(), trainable=False)

    def drop_rows(self, value):
        """A constant is the same in each row. So one element is enough where it grows with the rows; others are repeated later."""
        one, other = value.wide_constant, value.constant
        for d in value.rows_dimensions():
            one, other = one.narrow(d, 0, 1), other.narrow(d, 0, 1)
        if not torch.equal(one.expand(value.wide), value.wide_constant) or not torch.equal(one, other):
            raise Unsupported("a constant that differs from row to row, or depends on their number")
        value.shape = value.wide = tuple(one.shape)
        value.constant = value.wide_constant = one

    def key_of(self, name):
        """The same for tied parameters."""
        value = self.state[name].detach()
        return id(self.state[name]) if isinstance(value, FakeTensor) else (value.data_ptr(), tuple(value.shape), value.stride())

    def is_packed(self, name, node):
        """True for a frozen matrix that only linear layers read."""
        value = self.state[name]
        return (self.packing and not value.requires_grad and value.dim() == 2 and value.shape[1] % hapt.PACKED_COLUMNS == 0 and
                all(user.target == ATEN.linear.default and user.args[1] is node and user.args[0] is not node for user in node.users) and
                sum(self.key_of(other) == self.key_of(name) for other in self.state) == 1)

    def parameter(self, name, node):
        value, key = self.state[name].detach(), self.key_of(name)
        unknown = isinstance(value, FakeTensor)
        if key not in self.parameters:
            shape = tuple(value.shape) or (1,)
            trains = self.state[name].requires_grad or name in self.buffers_that_run
            self.parameters[key] = self.graph.parameter(name.removeprefix("model."), shape, trainable=trains,
                                                        packed=self.packing if self.is_packed(name, node) else None,
                                                        value=hapt.NoValue(shape) if unknown else value.float().reshape(shape).numpy())
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
            if (mask.constant[~seen] > HIDDEN).any():  # it weighs what is seen
                return Value(mask.shape, mask.wide, constant=mask.constant.clamp(min=HIDDEN)), causal
        if seen.all():
            return None, causal
        if seen.numel() == shape[0] * shape[1] and torch.equal(seen.reshape(shape), torch.ones(shape, dtype=torch.bool).tril()):
            return None, True
        return Value(mask.shape, mask.wide, constant=torch.zeros(mask.shape).masked_fill(~seen, HIDDEN)), causal

    def attention(self, q, k, v, mask, causal, scale, drop=None):
        """Softmax of scaled scores; q, k, v [b][heads][T][head size]. drop: a function of the weights, or None."""
        b, heads, length, head = q.shape
        scale = 1 / math.sqrt(head) if scale is None else scale
        mask, causal = self.simple_mask(mask, causal, (length, k.shape[2]))
        if drop is None and mask is None and (k.shape[2] == length or not causal) and v.shape[3] == head and heads % k.shape[1] == 0:
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
            mask = Value(seen.shape, seen.shape, constant=torch.zeros(seen.shape).masked_fill(~seen, HIDDEN))
        if mask is not None:
            scores = self.alike("add", scores, self.expand(mask, scores))
        weights = self.alike("softmax", scores)
        return self.matmul(drop(weights) if drop else weights, v)

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
                return value.whole[wide] if isinstance(value, Value) else value
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
            return Value(shape, wide, parameter=self.parameter(signature.inputs_to_parameters[name], node))
        if name in signature.inputs_to_buffers:
            buffer = signature.inputs_to_buffers[name]
            if buffer in self.buffers_that_run:
                return Value(shape, wide, parameter=self.parameter(buffer, node))
            return Value(shape, wide, constant=self.state[buffer].detach())
        if name in signature.inputs_to_lifted_tensor_constants:
            return Value(shape, wide, constant=self.program.constants[signature.inputs_to_lifted_tensor_constants[name]])
        if inputs.index(node) == len(inputs) - 1:
            return Value(shape, wide, targets=True)
        if self.fields:
            field = self.graph.fields[list(self.fields)[inputs.index(node)]]
            made = Value(shape, wide, tensor=field if field in self.integers() else self.graph.op("cast", field))
            if field not in self.integers():
                self.rows_source = self.rows_source or made
            return made
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
        made = self.handlers[name.rstrip("_") if in_place else name](self, node, *arguments, **named)
        changed = node
        while is_in_place(changed):  # the operand, and that of which it is another name
            changed = changed.args[0]
            self.values[changed] = made
        return made
