"""Packed weights (include/hapt/packing.h) as NumPy rounds them: matrices [out][in] of fp32 that hold what devices unpack."""
import numpy as np


def to_int8(matrix):
    """Blocks of 32 columns: a scale of 16 significant bits, and bytes."""
    blocks = matrix.reshape(matrix.shape[0], -1, 32)
    scale = (np.abs(blocks).max(-1, keepdims=True) / np.float32(127)).astype(np.float32)
    scale = ((scale.view(np.uint32) + np.uint32(0x80)) & np.uint32(0xffffff00)).view(np.float32)
    whole = np.clip(np.rint(blocks / np.where(scale > 0, scale, 1)), -127, 127)
    return (whole.astype(np.float32) * scale).reshape(matrix.shape)


def to_bf16(matrix):
    bits = matrix.view(np.uint32)
    return ((bits + 0x7fff + ((bits >> 16) & 1)) & np.uint32(0xffff0000)).view(np.float32)


# QLoRA (arXiv 2305.14314), appendix E.
LEVELS = np.array([-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
                   -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
                   0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0], np.float32)


def to_nf4(matrix):
    """Blocks of 32 columns: the nearest level, times the largest magnitude."""
    blocks = matrix.reshape(matrix.shape[0], -1, 32)
    scale = np.abs(blocks).max(-1, keepdims=True)
    nearest = np.abs((blocks / np.where(scale > 0, scale, 1))[..., None] - LEVELS).argmin(-1)
    return (LEVELS[nearest] * scale).reshape(matrix.shape)
