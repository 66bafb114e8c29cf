"""The zoo's ResNet in NumPy, fp64, forward only, with torchvision's names."""
import numpy as np

EPSILON = 1e-5


def windows(x, kernel, stride, padding, fill=0.0):
    """[row][channel][y][x][kernel][kernel]"""
    x = np.pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)), constant_values=fill)
    view = np.lib.stride_tricks.sliding_window_view(x, (kernel, kernel), (2, 3))
    return view[:, :, ::stride, ::stride]


class Resnet:
    """`running`: normalise by running statistics; else by those of the batch, which `statistics` then holds by name: the mean, and the
    variance of a sample."""

    def __init__(self, weights, depths, running):
        self.w, self.depths, self.running, self.statistics = weights, depths, running, {}

    def convolution(self, name, x, stride=1, padding=0):
        w = self.w[name + ".weight"]
        return np.einsum("bcyxkl,ockl->boyx", windows(x, w.shape[2], stride, padding), w, optimize=True)

    def norm(self, name, x):
        if self.running:
            mean, variance = self.w[name + ".running_mean"], self.w[name + ".running_var"]
        else:
            mean, variance, count = x.mean((0, 2, 3)), x.var((0, 2, 3)), x.size // x.shape[1]
            self.statistics[name + ".running_mean"] = mean
            self.statistics[name + ".running_var"] = variance * count / (count - 1)
        column = (slice(None), None, None)
        factor = self.w[name + ".weight"] / np.sqrt(variance + EPSILON)
        return (x - mean[column]) * factor[column] + self.w[name + ".bias"][column]

    def logits(self, x):
        def relu(x):
            return np.maximum(x, 0)
        x = relu(self.norm("bn1", self.convolution("conv1", x, 2, 3)))
        x = windows(x, 3, 2, 1, -np.inf).max((4, 5))
        for stage, depth in enumerate(self.depths):
            for block in range(depth):
                name, stride = f"layer{stage + 1}.{block}.", 2 if stage > 0 and block == 0 else 1
                y = relu(self.norm(name + "bn1", self.convolution(name + "conv1", x)))
                y = relu(self.norm(name + "bn2", self.convolution(name + "conv2", y, stride, 1)))
                y = self.norm(name + "bn3", self.convolution(name + "conv3", y))
                if block == 0:
                    x = self.norm(name + "downsample.1", self.convolution(name + "downsample.0", x, stride))
                x = relu(x + y)
        return x.mean((2, 3)) @ self.w["fc.weight"].T + self.w["fc.bias"]

    def losses(self, images, labels):
        """Per image; and whether its label has the largest logit."""
        logits = self.logits(images.astype(np.float64))
        most = logits.max(-1, keepdims=True)
        total = np.log(np.exp(logits - most).sum(-1)) + most[:, 0]
        return total - np.take_along_axis(logits, labels[:, None], -1)[:, 0], logits.argmax(-1) == labels
