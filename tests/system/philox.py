"""The elements that dropout keeps (include/hapt/philox.h), from the definition of Philox4x32-10 (Salmon et al., SC 2011), in NumPy."""
import numpy as np


def philox(counter, key):
    """Four arrays of random words. counter: four arrays, key: two numbers."""
    counter, key = [np.asarray(c, dtype=np.uint64) for c in counter], [int(k) for k in key]
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    for _ in range(10):
        even, odd = np.uint64(0xD2511F53) * counter[0], np.uint64(0xCD9E8D57) * counter[2]
        counter = [(odd >> shift) ^ counter[1] ^ np.uint64(key[0]), odd & low, (even >> shift) ^ counter[3] ^ np.uint64(key[1]), even & low]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return counter


def key_of(seed, step, row):
    """The key of a row: hapt_hash, which is FNV-1a between two steps of splitmix64, with its lowest bit set."""
    ones = (1 << 64) - 1

    def mix(z):
        z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & ones
        z = ((z ^ z >> 27) * 0x94D049BB133111EB) & ones
        return z ^ z >> 31

    words = np.array([step, row, 6], dtype=np.int64).tobytes()
    value = 0xCBF29CE484222325 ^ mix((seed + 0x9E3779B97F4A7C15) & ones)
    for byte in words:
        value = ((value ^ byte) * 0x100000001B3) & ones
    value = mix(value ^ len(words)) | 1
    return value & 0xFFFFFFFF, value >> 32


def kept(shape, number, seed, step, share):
    """True for the elements [row][...] that dropout `number` keeps in a step, whose first row is the first one of `shape`."""
    element = np.arange(int(np.prod(shape[1:])), dtype=np.uint64)
    block, word = element // 64 * 16 + element % 16, element // 16 % 4
    mask = np.empty((shape[0], len(element)), dtype=bool)
    for row in range(shape[0]):
        words = philox((block, 0 * block, 0 * block + number, 0 * block), key_of(seed, step, row))
        mask[row] = np.choose(word.astype(np.int64), words) >= int(share * 2**32)
    return mask.reshape(shape)
