"""Writes images in CIFAR-10's binary format: a label byte, then 32 x 32 pixels in three planes. Class k has stripes of direction k.
usage: images.py FILE COUNT SEED"""
import random
import sys

path, count, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
rng = random.Random(seed)
with open(path, "wb") as file:
    for _ in range(count):
        label = rng.randrange(10)
        dx, dy, phase = (label % 5) + 1, label // 5 * 3, rng.randrange(16)
        plane = bytes(128 + rng.randrange(-40, 40) + (60 if (dx * x + dy * y + phase) // 8 % 2 else -60) for y in range(32) for x in range(32))
        file.write(bytes([label]) + plane * 3)
