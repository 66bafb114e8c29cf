"""For hapt_export.py: operators of PyTorch and the operators of hapt that they become. To add one: a function under its name."""
import math
import sys

import torch

from hapt_export_graph import ATEN, VIEWS, Unsupported, Value, base_name

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
    own = bias.parameter if bias is not None and weight.parameter is not None else None
    if own is not None and weight.parameter.packed and e.graph.trains(own):
        own = None  # a packed layer has no gradient of its bias
    if weight.parameter is None:
        made = e.general_matmul(x, e.permute(weight, [1, 0]))
    else:
        made = e.op("linear_packed" if weight.parameter.packed else "linear_t", [x, weight.parameter, own], x.shape[:-1] + weight.shape[:1],
                    x.wide[:-1] + weight.wide[:1])
    return made if bias is None or own is not None else HANDLERS["add"](e, node, made, bias)


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
    if table.parameter is None or len(indices.shape) != 2 or indices.tensor not in e.integers():
        raise Unsupported("indices that are no input of integers [rows][T]")
    made = e.op("embedding", [indices, table.parameter, None], indices.shape + table.shape[1:], indices.wide + table.wide[1:])
    e.rows_source = e.rows_source or made
    return made


@handles("layer_norm")
def layer_norm(e, node, x, normalized, weight=None, bias=None, epsilon=1e-5, *rest):
    if len(normalized) != 1 or weight is None or bias is None or weight.parameter is None or bias.parameter is None:
        raise Unsupported("of %d dimensions, or without weight and bias" % len(normalized))
    made = e.graph.op("layer_norm", e.tensor(x), weight.parameter, bias.parameter, outputs=3, reals=[epsilon])[0]
    return e.made(made, x.shape, x.wide)


@handles("softmax", "_softmax")
def softmax(e, node, x, dim, *rest, **named):
    dim %= len(x.shape)
    if dim == len(x.shape) - 1:
        return e.alike("softmax", x)
    order = [d for d in range(len(x.shape)) if d != dim] + [dim]
    back = [order.index(d) for d in range(len(order))]
    return e.permute(e.alike("softmax", e.permute(x, order)), back)


@handles("log_softmax")
def log_softmax(e, node, x, dim, *rest):
    """The cross entropy of log probabilities is that of the scores."""
    ends, stack = [], list(node.users)
    while stack:
        user = stack.pop()
        if base_name(user) in VIEWS or base_name(user) in ("_unsafe_view", "contiguous", "clone"):
            stack += list(user.users)
        else:
            ends.append(user.target)
    if ends != [ATEN.cross_entropy_loss.default] or dim % len(x.shape) != (1 if e.places or (e.fields and len(x.shape) > 3) else len(x.shape) - 1):
        raise Unsupported("something else than the cross entropy reads it")
    return x


@handles("mean")
def mean(e, node, x, dims=None, keep=False, **named):
    return e.reduce("mean", x, dims, keep)


@handles("sum")
def total(e, node, x, dims=None, keep=False, **named):
    return e.reduce("sum", x, dims, keep)


@handles("view", "view_as", "reshape", "reshape_as", "_unsafe_view", "flatten", "unflatten", "unsqueeze", "squeeze")
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


@handles("cat", "concat")
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


def comparison(name):
    """Compares tokens with a number: each token is looked up in a table of results, 0 or 1. Such a result equals 0 where it is false."""
    def handler(e, node, x, number):
        if isinstance(number, Value) or x.constant is not None:
            raise Unsupported("of two tensors")
        if x.tensor in e.integers():
            table = node.target(torch.arange(e.graph.sizes["vocab"]), number).float()[:, None]
            found = e.op("embedding", [x, e.constant_parameter(table), None], x.shape + (1,), x.wide + (1,))
            return e.reshape(found, x.shape, x.wide)
        if name == "eq" and number == 0 and node.args[0].meta["val"].dtype == torch.bool:
            return HANDLERS["rsub"](e, node, x, 1.0)
        raise Unsupported("of something else than tokens")
    return handler


for name in ("eq", "ne", "gt", "ge", "lt", "le"):
    HANDLERS[name] = comparison(name)
HANDLERS["logical_not"] = lambda e, node, x: HANDLERS["rsub"](e, node, x, 1.0)


@handles("repeat")
def repeat(e, node, x, times):
    missing = len(times) - len(x.shape)
    x = e.reshape(x, (1,) * missing + x.shape, (1,) * missing + x.wide)
    if any(count != 1 and x.shape[d] != 1 for d, count in enumerate(times)):
        raise Unsupported("a dimension of several elements that repeats")
    shape, wide = e.shapes_of(node)
    sizes = [shape[d] if x.shape[d] != shape[d] else 0 for d in range(len(shape))]
    if any(sizes[d] and shape[d] != wide[d] for d in range(len(shape))):
        raise Unsupported("rows that are repeated")
    return e.op("expand", [x, None], shape, wide, integers=sizes) if any(sizes) else x


@handles("std", "var")
def spread_of(e, node, x, dims=None, unbiased=True, keep=False, correction=None, keepdim=None):
    keep, correction = keep if keepdim is None else keepdim, int(unbiased) if correction is None else correction
    dims = [dims] if isinstance(dims, int) else dims
    count = math.prod(x.shape[d] for d in dims) if dims else math.prod(x.shape)
    away = HANDLERS["sub"](e, node, x, e.reduce("mean", x, dims, True))
    variance = e.reduce("sum", e.alike("power", away, reals=[2.0]), dims, keep)
    variance = e.alike("scale", variance, reals=[1 / (count - correction)])
    return e.alike("power", variance, reals=[0.5]) if "std" in str(node.target) else variance


@handles("masked_fill")
def masked_fill(e, node, x, mask, fill):
    if isinstance(fill, Value) and fill.constant is None:
        raise Unsupported("a number that is computed from inputs")
    fill = float(fill.constant) if isinstance(fill, Value) else float(fill)
    if mask.constant is None:  # 0 or 1: x (1 - mask) + fill mask
        if math.isinf(fill):
            raise Unsupported("infinity where inputs say so")
        kept = HANDLERS["mul"](e, node, x, HANDLERS["rsub"](e, node, mask, 1.0))
        return HANDLERS["add"](e, node, kept, e.alike("scale", mask, reals=[fill]))
    kept = Value(mask.shape, mask.wide, constant=(~mask.constant).float())
    added = Value(mask.shape, mask.wide, constant=torch.zeros(mask.shape).masked_fill(mask.constant, fill))
    return HANDLERS["add"](e, node, HANDLERS["mul"](e, node, x, kept), added)


@handles("scaled_dot_product_attention")
def attention(e, node, q, k, v, mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    if len(q.shape) != 4:
        raise Unsupported("%d dimensions" % len(q.shape))
    return e.attention(q, k, v, mask, is_causal, scale, (lambda weights: dropout(e, node, weights, dropout_p, True)) if dropout_p else None)


@handles("cross_entropy_loss")
def cross_entropy(e, node, logits, targets, weight=None, reduction=1, ignore=-100, smoothing=0.0):
    if weight is not None or reduction != 1 or ignore != -100 or not targets.targets:
        raise Unsupported("weights of classes, or another reduction than the mean")
    if smoothing:
        e.notes.add("the losses that hapt prints are those without label smoothing")
    if e.places and (len(logits.shape) < 3 or logits.shape[0] != e.rows or math.prod(logits.shape[2:]) != e.places):
        raise Unsupported("logits that are not [rows][classes] and the pixels")
    if len(logits.shape) > 2:
        logits = e.permute(logits, [0, *range(2, len(logits.shape)), 1])
    lead = (e.rows, e.graph.sizes["sequence"]) if e.of_tokens else (e.rows, e.places) if e.places else (e.rows,)
    if e.fields:
        lead = e.target_shape
    twice = (2 * e.rows,) + lead[1:]
    logits = e.reshape(logits, lead + logits.shape[-1:], twice + logits.wide[-1:])
    e.loss = e.graph.op("cross_entropy", e.tensor(logits), e.graph.targets, name="loss", reals=[smoothing])
    return e.made(e.loss, (1,), (1,))


@handles("embedding_bag")
def embedding_bag(e, node, table, indices, offsets, by_frequency=False, mode=0, sparse=False, weights=None, last=False, padding=-1):
    """Bags of one size: the sum or the mean of their rows."""
    while indices.made_by and indices.made_by[0] == "reshape":
        indices = indices.made_by[1]
    size = indices.shape[-1]
    if padding is not None and padding >= 0:
        raise Unsupported("padding, which its sums leave out")
    if weights is not None or mode not in (0, 1) or offsets.constant is None or len(indices.shape) != 2 or \
            offsets.constant.tolist() != list(range(0, math.prod(indices.shape), size)):
        raise Unsupported("bags of several sizes, weights, or the maximum")
    rows = embedding(e, node, table, indices, -1, by_frequency)
    return [e.reduce("sum" if mode == 0 else "mean", rows, [1], False)]


@handles("broadcast_tensors")
def broadcast_tensors(e, node, values):
    """A loss asks for this, and its operands have one shape."""
    if any(value.shape != values[0].shape for value in values):
        raise Unsupported("tensors of different shapes")
    return values


@handles("where")
def where(e, node, chosen, x, other):
    """x where a constant mask is true, else other."""
    if chosen.constant is None:
        raise Unsupported("a condition that is computed from inputs")
    for value in (chosen, x, other):
        if isinstance(value, Value) and value.constant is not None:
            e.drop_rows(value)
    mask = chosen.constant.bool()
    if mask.all() and isinstance(x, Value) and torch.broadcast_shapes(mask.shape, x.shape) == torch.Size(x.shape):
        return x
    parts = []
    for value, seen in ((x, mask), (other, ~mask)):
        if isinstance(value, Value) and value.constant is None:
            parts.append(HANDLERS["mul"](e, node, value, Value(seen.shape, seen.shape, constant=seen.float())))
        else:
            number = value.constant if isinstance(value, Value) else torch.tensor(float(value))
            number = torch.where(seen, number.float(), torch.zeros(()))
            parts.append(Value(number.shape, number.shape, constant=number))
    return HANDLERS["add"](e, node, *parts)


@handles("mse_loss")
def mean_squared_error(e, node, x, targets, reduction=1):
    if reduction != 1 or not targets.targets or x.shape != targets.shape:
        raise Unsupported("another reduction than the mean, or targets of another shape")
    e.loss = e.graph.mse(e.tensor(x))
    return e.made(e.loss, (1,), (1,))


@handles("binary_cross_entropy_with_logits")
def binary_cross_entropy(e, node, x, targets, weight=None, pos_weight=None, reduction=1):
    if weight is not None or pos_weight is not None or reduction != 1 or not targets.targets or x.shape != targets.shape:
        raise Unsupported("weights, another reduction than the mean, or targets of another shape")
    e.loss = e.graph.bce(e.tensor(x))
    return e.made(e.loss, (1,), (1,))
