"""For hapt_export.py: PyTorch's operators of images: convolutions, pools, norms of channels, interpolation."""
import math

import torch

from hapt_export_graph import Unsupported, Value
from hapt_export_operators import HANDLERS, as_list, handles, pad



@handles("conv2d")
def conv2d(e, node, x, weight, bias=None, stride=(1, 1), padding=(0, 0), dilation=(1, 1), groups=1):
    stride, dilation = as_list(stride, 2), as_list(dilation, 2)
    padding = as_list(padding, 2) if not isinstance(padding, str) else [None, None]
    if stride[0] != stride[1] or dilation[0] != dilation[1] or padding[0] is None:
        raise Unsupported("stride %s, padding %s, dilation %s" % (stride, padding, dilation))
    if padding[0] != padding[1]:
        x, padding = pad(e, node, x, [padding[1], padding[1], padding[0], padding[0]]), [0, 0]
    shape, wide = e.shapes_of(node)
    if bias is not None and bias.parameter is None:
        made = conv2d(e, node, x, weight, None, stride, padding, dilation, groups)
        return HANDLERS["add"](e, node, made, e.reshape(bias, bias.shape + (1, 1), bias.wide + (1, 1)))
    operands = [x, weight.parameter or weight, bias.parameter if bias is not None else None]
    if groups == 1 and dilation == [1, 1]:
        return e.op("conv2d", operands, shape, wide, integers=[stride[0], padding[0]])
    return e.op("grouped_conv2d", operands, shape, wide, integers=[groups, stride[0], padding[0], dilation[0]])


@handles("conv1d")
def conv1d(e, node, x, weight, bias=None, stride=(1,), padding=(0,), dilation=(1,), groups=1):
    """The convolution of an image of height 1."""
    if isinstance(padding, str):
        raise Unsupported("padding %s" % padding)
    (stride,), (padding,), (dilation,) = as_list(stride, 1), as_list(padding, 1), as_list(dilation, 1)

    def line(value):
        return e.reshape(value, value.shape[:2] + (1,) + value.shape[2:], value.wide[:2] + (1,) + value.wide[2:])
    operands = [pad(e, node, line(x), [padding, padding]), line(weight), bias.parameter if bias is not None else None]
    shape, wide = e.shapes_of(node)
    kind, integers = ("conv2d", [stride, 0]) if groups == dilation == 1 else ("grouped_conv2d", [groups, stride, 0, dilation])
    made = e.op(kind, operands, shape[:2] + (1,) + shape[2:], wide[:2] + (1,) + wide[2:], integers=integers)
    return e.reshape(made, shape, wide)


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
    if kernel != stride or padding != [0, 0] or height % kernel[0] or width % kernel[1]:
        if ceil or divisor is not None or not (counts_padding or padding == [0, 0]) or stride[0] != stride[1] or padding[0] != padding[1]:
            raise Unsupported("windows that overlap, or do not cover the image")
        share = e.constant_parameter(torch.full((c, 1, *kernel), 1 / math.prod(kernel)))
        return e.op("grouped_conv2d", [x, share, None], *e.shapes_of(node), integers=[c, stride[0], padding[0], 1])
    if divisor is not None:
        raise Unsupported("a divisor")
    tiles = (height // kernel[0], kernel[0], width // kernel[1], kernel[1])
    flat = e.reshape(x, (b * c * tiles[0],) + tiles[1:], (wide[0] * c * tiles[0],) + tiles[1:])
    made = e.reduce("mean", flat, [1, 3], False)
    return e.reshape(made, (b, c, tiles[0], tiles[2]), (wide[0], c, tiles[0], tiles[2]))


def standardise(e, node, x, weight, bias, epsilon):
    """Zero mean and variance one for each channel, of a tensor without rows: a kernel."""
    others = [d for d in range(len(x.shape)) if d != 1]
    x = HANDLERS["sub"](e, node, x, e.reduce("mean", x, others, True))
    variance = e.reduce("mean", e.alike("power", x, reals=[2.0]), others, True)
    x = HANDLERS["mul"](e, node, x, e.alike("power", HANDLERS["add"](e, node, variance, epsilon), reals=[-0.5]))
    one = (x.shape[1],) + (1,) * (len(x.shape) - 2)
    x = HANDLERS["mul"](e, node, x, e.reshape(weight, one, one)) if weight is not None else x
    return HANDLERS["add"](e, node, x, e.reshape(bias, one, one)) if bias is not None else x


@handles("batch_norm")
def batch_norm(e, node, x, weight, bias, mean, variance, training, momentum, epsilon, *rest):
    if training and mean is None and variance is None and not x.rows_dimensions():
        return standardise(e, node, x, weight, bias, epsilon)
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
    channels, pixels = x.shape[1], math.prod(x.shape[2:])
    image = x if len(x.shape) == 4 else e.reshape(x, (x.shape[0], channels, 1, pixels), (x.wide[0], channels, 1, pixels))
    operands = []
    computed = [given if given is not None and given.parameter is None else None for given in (weight, bias)]
    for given, own, absent in zip((weight, bias), computed, (torch.ones, torch.zeros)):
        operands.append(e.constant_parameter(absent(channels)) if given is None or own is not None else given.parameter)
    made = e.graph.op("group_norm", e.tensor(image), *operands, outputs=3, integers=[groups], reals=[epsilon])
    made = e.reshape(e.made(made[0], image.shape, image.wide), x.shape, x.wide)
    one = (channels,) + (1,) * (len(x.shape) - 2)
    for kind, own in zip(("mul", "add"), computed):  # what is no parameter
        made = made if own is None else HANDLERS[kind](e, node, made, e.reshape(own, one, one))
    return made


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


def resample(e, x, matrix):
    """The last dimension times a matrix of constants."""
    return e.op("linear", [x, e.constant_parameter(matrix), None], x.shape[:-1] + matrix.shape[1:], x.wide[:-1] + matrix.shape[1:])


@handles("upsample_bilinear2d")
def upsample_bilinear(e, node, x, size, align_corners, *factors):
    """Interpolation is linear in each dimension, so it is a product with a matrix: the interpolated unit vectors. factors: of height and
    width, or one list of them; PyTorch samples by a factor that is given, and otherwise by the ratio of the sizes."""
    shape, _ = e.shapes_of(node)
    factors = list(factors[0]) if factors and isinstance(factors[0], (list, tuple)) else list(factors)
    factors = factors if len(factors) == 2 else [None, None]
    for swap, old, new, factor in ((False, x.shape[3], shape[3], factors[1]), (True, x.shape[2], shape[2], factors[0])):
        by = {"size": new} if factor is None or align_corners else {"scale_factor": factor}
        matrix = torch.nn.functional.interpolate(torch.eye(old)[:, None, :], mode="linear", align_corners=align_corners, **by)[:, 0]
        if matrix.shape[1] != new:
            raise Unsupported("a factor of %g from %d to %d" % (factor, old, new))
        x = e.permute(x, [0, 1, 3, 2]) if swap else x
        x = resample(e, x, matrix)
        x = e.permute(x, [0, 1, 3, 2]) if swap else x
    return x


def spread(e, node, x, dim, step):
    """Puts step - 1 zeros between neighbours of a dimension."""
    size = x.shape[dim]
    if step == 1 or size == 1:
        return x
    lead, tail = math.prod(x.shape[:dim + 1]), math.prod(x.shape[dim + 1:])
    wide = math.prod(x.wide[:dim + 1])
    apart = pad(e, node, e.reshape(x, (lead, 1, tail), (wide, 1, tail)), [0, 0, 0, step - 1])
    long = x.shape[:dim] + (size * step,) + x.shape[dim + 1:], x.wide[:dim] + (size * step,) + x.wide[dim + 1:]
    return e.slice(e.reshape(apart, *long), dim, 0, (size - 1) * step + 1)


def overlapping_transpose(e, node, x, weight, stride, padding, output_padding):
    """The convolution of pixels that zeros separate with the kernel, which is turned around and whose channels change places."""
    inside, outside, down, across = weight.shape
    around = [down - 1 - padding[0], across - 1 - padding[1]]
    if min(around) < 0:
        raise Unsupported("a padding that is larger than the kernel")
    turn = torch.eye(down * across).flip(0)
    kernel = e.permute(Value(weight.shape, weight.shape, parameter=weight.parameter), [1, 0, 2, 3])
    kernel = resample(e, e.reshape(kernel, (outside, inside, down * across), (outside, inside, down * across)), turn)
    kernel = e.reshape(kernel, (outside, inside, down, across), (outside, inside, down, across))
    x = spread(e, node, spread(e, node, x, 2, stride[0]), 3, stride[1])
    x = pad(e, node, x, [around[1], around[1] + output_padding[1], around[0], around[0] + output_padding[0]])
    return e.op("conv2d", [x, kernel, None], *e.shapes_of(node), integers=[1, 0])


@handles("conv_transpose2d")
def conv_transpose2d(e, node, x, weight, bias=None, stride=(1, 1), padding=(0, 0), output_padding=(0, 0), groups=1, dilation=(1, 1)):
    """With windows that do not overlap, each pixel becomes a tile: a product with the kernel as a matrix."""
    stride, padding, output_padding = as_list(stride, 2), as_list(padding, 2), as_list(output_padding, 2)
    inside, outside, down, across = weight.shape
    if groups != 1 or as_list(dilation, 2) != [1, 1]:
        raise Unsupported("groups or dilation")
    if weight.parameter is None or (bias is not None and bias.parameter is None):
        raise Unsupported("a kernel or bias that is no parameter")
    if stride != [down, across] or padding != [0, 0] or output_padding != [0, 0]:
        made = overlapping_transpose(e, node, x, weight, stride, padding, output_padding)
        return HANDLERS["add"](e, node, made, e.reshape(bias, (outside, 1, 1), (outside, 1, 1))) if bias is not None else made
    (b, _, height, width), wide = x.shape, x.wide[0]
    pixels = e.reshape(e.permute(x, [0, 2, 3, 1]), (b * height * width, inside), (wide * height * width, inside))
    kernel = e.reshape(Value(weight.shape, weight.shape, parameter=weight.parameter), (inside, outside * down * across), (inside, outside * down * across))
    tiles = e.matmul(pixels, kernel)
    tiles = e.reshape(tiles, (b * height, width, outside, down, across), (wide * height, width, outside, down, across))
    tiles = e.reshape(e.permute(tiles, [0, 2, 3, 1, 4]), (b, height, outside, down, width * across), (wide, height, outside, down, width * across))
    shape, both = e.shapes_of(node)
    made = e.reshape(e.permute(tiles, [0, 2, 1, 3, 4]), shape, both)
    return HANDLERS["add"](e, node, made, e.reshape(bias, (outside, 1, 1), (outside, 1, 1))) if bias is not None else made
