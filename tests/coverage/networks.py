"""Networks that no package has: after TorchBench's, in their smallest forms, and of what tests/coverage needs beside them."""
import torch
import torchvision.models as vision

from steps import CLASSES, TOKENS, VOCABULARY


class GroupNorms(torch.nn.Module):
    """A residual network of group norms, as functorch's for CIFAR-10."""

    def __init__(self):
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 16, 3, padding=1)
        self.norms = torch.nn.ModuleList(torch.nn.GroupNorm(4, 16) for _ in range(2))
        self.convolutions = torch.nn.ModuleList(torch.nn.Conv2d(16, 16, 3, padding=1) for _ in range(2))
        self.head = torch.nn.Linear(16, CLASSES)

    def forward(self, x):
        x = self.stem(x)
        for norm, convolution in zip(self.norms, self.convolutions):
            x = x + convolution(torch.relu(norm(x)))
        return self.head(x.mean((2, 3)))


class UNet(torch.nn.Module):
    """A segmentation U-Net as TorchBench's pytorch_unet (milesial/Pytorch-UNet), with bilinear or transposed convolutions on the way up: long
    skips join each pair of levels."""

    def __init__(self, widths, bilinear):
        super().__init__()
        self.bilinear, self.down, self.up, self.grow = bilinear, torch.nn.ModuleList(), torch.nn.ModuleList(), torch.nn.ModuleList()
        before = 3
        for width in widths:
            self.down.append(self.convolutions(before, width))
            before = width
        for width in reversed(widths[:-1]):
            self.grow.append(torch.nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True) if bilinear else
                             torch.nn.ConvTranspose2d(before, before, 2, stride=2))
            self.up.append(self.convolutions(before + width, width))
            before = width
        self.head = torch.nn.Conv2d(before, CLASSES, 1)

    @staticmethod
    def convolutions(inside, outside):
        return torch.nn.Sequential(torch.nn.Conv2d(inside, outside, 3, padding=1, bias=False), torch.nn.BatchNorm2d(outside), torch.nn.ReLU(inplace=True),
                                   torch.nn.Conv2d(outside, outside, 3, padding=1, bias=False), torch.nn.BatchNorm2d(outside), torch.nn.ReLU(inplace=True))

    def forward(self, x):
        skips = []
        for level, block in enumerate(self.down):
            x = block(x if level == 0 else torch.nn.functional.max_pool2d(x, 2))
            skips.append(x)
        skips.pop()
        for grow, block in zip(self.grow, self.up):
            x = block(torch.cat([skips.pop(), grow(x)], 1))
        return self.head(x)


class Resized(torch.nn.Module):
    """Bilinear interpolation by a factor that leaves a fraction, and to given sizes."""

    def __init__(self):
        super().__init__()
        self.stem, self.middle, self.head = torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.Conv2d(8, 8, 3), torch.nn.Linear(8, CLASSES)

    def forward(self, x):
        x = torch.nn.functional.interpolate(self.stem(x), scale_factor=1.5, mode="bilinear")
        x = torch.nn.functional.interpolate(torch.relu(self.middle(x)), size=(7, 5), mode="bilinear", align_corners=False)
        return self.head(torch.nn.functional.interpolate(torch.tanh(x), size=(9, 6), mode="bilinear", align_corners=True).mean((2, 3)))


class Generator(torch.nn.Module):
    """The generator of DCGAN, from noise of one pixel to an image, whose channels are the scores of classes here."""

    def __init__(self, noise=12, width=8):
        super().__init__()
        sizes = [noise, 4 * width, 2 * width, width]
        layers = []
        for level, (before, after) in enumerate(zip(sizes, sizes[1:])):
            layers += [torch.nn.ConvTranspose2d(before, after, 4, 1 if level == 0 else 2, 0 if level == 0 else 1, bias=False),
                       torch.nn.BatchNorm2d(after), torch.nn.ReLU(True)]
        self.main = torch.nn.Sequential(*layers, torch.nn.ConvTranspose2d(width, CLASSES, 3, 2, 1, output_padding=1), torch.nn.Tanh())

    def forward(self, x):
        return self.main(x)


class PhlippeResnet(torch.nn.Module):
    """The residual network for CIFAR-10 of the UvA tutorials, as TorchBench has it: three groups of blocks."""

    def __init__(self):
        super().__init__()
        layers, before = [torch.nn.Conv2d(3, 16, 3, padding=1, bias=False), torch.nn.BatchNorm2d(16), torch.nn.ReLU()], 16
        for width in (16, 32, 64):
            layers.append(vision.resnet.BasicBlock(before, width, 1 if width == before else 2, None if width == before else torch.nn.Sequential(
                torch.nn.Conv2d(before, width, 1, 2))))
            before = width
        self.blocks, self.head = torch.nn.Sequential(*layers), torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d((1, 1)), torch.nn.Flatten(),
                                                                                   torch.nn.Linear(64, CLASSES))

    def forward(self, x):
        return self.head(self.blocks(x))


class DenseLayer(torch.nn.Module):
    def __init__(self, inside, growth):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.BatchNorm2d(inside), torch.nn.ReLU(), torch.nn.Conv2d(inside, 2 * growth, 1, bias=False),
                                       torch.nn.BatchNorm2d(2 * growth), torch.nn.ReLU(), torch.nn.Conv2d(2 * growth, growth, 3, padding=1, bias=False))

    def forward(self, x):
        return torch.cat([self.net(x), x], dim=1)


def phlippe_densenet(growth=8):
    """The dense network for CIFAR-10 of the UvA tutorials."""
    layers, inside = [torch.nn.Conv2d(3, 2 * growth, 3, padding=1)], 2 * growth
    for block in range(2):
        for _ in range(2):
            layers.append(DenseLayer(inside, growth))
            inside += growth
        if block == 0:
            layers += [torch.nn.BatchNorm2d(inside), torch.nn.ReLU(), torch.nn.Conv2d(inside, inside // 2, 1, bias=False), torch.nn.AvgPool2d(2, 2)]
            inside //= 2
    return torch.nn.Sequential(*layers, torch.nn.BatchNorm2d(inside), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d((1, 1)), torch.nn.Flatten(),
                               torch.nn.Linear(inside, CLASSES))


class Painter(torch.nn.Module):
    """The actor of LearningToPaint: a residual network of 9 channels (canvas, target, step, coordinates) with 65 results between 0 and 1."""

    def __init__(self):
        super().__init__()
        block, down = vision.resnet.BasicBlock, torch.nn.Sequential(torch.nn.Conv2d(8, 16, 1, 2, bias=False), torch.nn.BatchNorm2d(16))
        self.body = torch.nn.Sequential(torch.nn.Conv2d(9, 8, 3, 2, 1, bias=False), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), block(8, 8), block(8, 16, 2, down))
        self.head = torch.nn.Linear(16 * 4, 65)

    def forward(self, x):
        x = torch.nn.functional.avg_pool2d(self.body(x), 4)
        return torch.sigmoid(self.head(x.flatten(1)))


def lennard_jones():
    """The network of functorch's example, from one number to scores of classes instead of an energy."""
    layers = [torch.nn.Flatten(), torch.nn.Linear(1, 16), torch.nn.Tanh()]
    for _ in range(2):
        layers += [torch.nn.Linear(16, 16), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(16, CLASSES))


class ItsNorm(torch.nn.Module):
    """By the standard deviation, as BERT_pytorch has it."""

    def __init__(self, width):
        super().__init__()
        self.weight, self.bias = torch.nn.Parameter(torch.ones(width)), torch.nn.Parameter(torch.zeros(width))

    def forward(self, x):
        return self.weight * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6) + self.bias


class ItsBlock(torch.nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.norms = heads, torch.nn.ModuleList(ItsNorm(width) for _ in range(2))
        self.parts = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(4))
        self.wide, self.narrow = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def attend(self, x, mask):
        q, k, v = (part(x).view(x.shape[0], -1, self.heads, x.shape[2] // self.heads).transpose(1, 2) for part in self.parts[:3])
        scores = (torch.matmul(q, k.transpose(-2, -1)) / q.shape[-1] ** 0.5).masked_fill(mask == 0, -1e9)
        return self.parts[3](torch.matmul(torch.softmax(scores, -1), v).transpose(1, 2).contiguous().view(x.shape))

    def forward(self, x, mask):
        x = x + self.attend(self.norms[0](x), mask)
        y = self.wide(self.norms[1](x))
        return x + self.narrow(0.5 * y * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (y + 0.044715 * torch.pow(y, 3)))))


class BertPytorch(torch.nn.Module):
    """TorchBench's BERT_pytorch (codertimo/BERT-pytorch): a mask made of the tokens, fixed positions, a table of segments."""

    def __init__(self, width=32, heads=2):
        super().__init__()
        self.tokens, self.segments = torch.nn.Embedding(VOCABULARY, width, padding_idx=0), torch.nn.Embedding(3, width, padding_idx=0)
        place = torch.arange(TOKENS).float()[:, None] * torch.exp(torch.arange(0, width, 2).float() * -(torch.log(torch.tensor(10000.0)) / width))
        self.register_buffer("places", torch.stack([torch.sin(place), torch.cos(place)], -1).reshape(1, TOKENS, width))
        self.blocks = torch.nn.ModuleList(ItsBlock(width, heads) for _ in range(2))
        self.head = torch.nn.Linear(width, VOCABULARY)

    def forward(self, tokens):
        mask = (tokens > 0).unsqueeze(1).repeat(1, tokens.size(1), 1).unsqueeze(1)
        x = self.tokens(tokens) + self.places[:, :tokens.size(1)] + self.segments(torch.ones(1, tokens.size(1), dtype=torch.long))
        for block in self.blocks:
            x = block(x, mask)
        return torch.log_softmax(self.head(x), -1)


class Recommender(torch.nn.Module):
    """DLRM (arXiv 1906.00091): sums of rows of tables of categories, the output of a network on the dense features, and the products of all
    pairs of these. Its loss is the mean squared error, the default of the published code."""

    def __init__(self, tables=3, width=8):
        super().__init__()
        self.bottom = torch.nn.Sequential(torch.nn.Linear(13, 16), torch.nn.ReLU(), torch.nn.Linear(16, width), torch.nn.ReLU())
        self.tables = torch.nn.ModuleList(torch.nn.EmbeddingBag(VOCABULARY, width, mode="sum") for _ in range(tables))
        pairs = (tables + 1) * tables // 2
        self.top = torch.nn.Sequential(torch.nn.Linear(width + pairs, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1), torch.nn.Sigmoid())

    def forward(self, dense, **sparse):
        x = self.bottom(dense)
        all_features = torch.stack([x] + [table(sparse["sparse_%d" % k]) for k, table in enumerate(self.tables)], 1)
        products = torch.bmm(all_features, all_features.transpose(1, 2))
        pairs = [products[:, i, j] for i in range(all_features.shape[1]) for j in range(i)]
        return self.top(torch.cat([x, torch.stack(pairs, 1)], 1))


class Residual(torch.nn.Module):
    """Two convolutions behind group norms; the time is added between them."""

    def __init__(self, before, after, time):
        super().__init__()
        self.first, self.second = torch.nn.GroupNorm(4, before), torch.nn.GroupNorm(4, after)
        self.into, self.out = torch.nn.Conv2d(before, after, 3, padding=1), torch.nn.Conv2d(after, after, 3, padding=1)
        self.time = torch.nn.Linear(time, after)
        self.past = torch.nn.Conv2d(before, after, 1) if before != after else torch.nn.Identity()

    def forward(self, x, time):
        silu = torch.nn.functional.silu
        y = self.into(silu(self.first(x))) + self.time(silu(time))[:, :, None, None]
        return self.past(x) + self.out(silu(self.second(y)))


class Reads(torch.nn.Module):
    """Pixels attend to the words of a text."""

    def __init__(self, channels, text, heads=2):
        super().__init__()
        self.heads, self.norm = heads, torch.nn.LayerNorm(channels)
        self.q, self.k, self.v, self.out = (torch.nn.Linear(wide, channels, bias=False) for wide in (channels, text, text, channels))

    def forward(self, x, text):
        b, c, height, width = x.shape
        pixels = x.flatten(2).transpose(1, 2)
        q, k, v = (one.unflatten(2, (self.heads, -1)).transpose(1, 2) for one in (self.q(self.norm(pixels)), self.k(text), self.v(text)))
        seen = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + self.out(seen).transpose(1, 2).unflatten(2, (height, width))


class Diffusion(torch.nn.Module):
    """A latent diffusion model in its smallest form (arXiv 2112.10752): a frozen encoder of texts, and a U-Net that finds the noise in an
    image, given the time and the text. widths: channels of each resolution."""

    def __init__(self, widths=(8, 16), text=16, layers=2, vocabulary=VOCABULARY, words=12, time=16, channels=4):
        super().__init__()
        self.words, self.places = torch.nn.Embedding(vocabulary, text), torch.nn.Parameter(torch.randn(words, text) * 0.1)
        layer = torch.nn.TransformerEncoderLayer(text, 2, 2 * text, 0.0, batch_first=True, norm_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        for frozen in (self.words, self.encoder):
            frozen.requires_grad_(False)
        self.places.requires_grad_(False)
        self.register_buffer("rates", torch.exp(torch.linspace(0, -6, time // 2)))
        self.time = torch.nn.Sequential(torch.nn.Linear(time, time), torch.nn.SiLU(), torch.nn.Linear(time, time))
        self.begin = torch.nn.Conv2d(channels, widths[0], 3, padding=1)
        self.down, self.shrink, self.up, self.grow = (torch.nn.ModuleList() for _ in range(4))
        before = widths[0]
        for width in widths:
            self.down.append(torch.nn.ModuleList([Residual(before, width, time), Reads(width, text)]))
            self.shrink.append(torch.nn.Conv2d(width, width, 3, stride=2, padding=1))
            before = width
        self.middle = torch.nn.ModuleList([Residual(before, before, time), Reads(before, text), Residual(before, before, time)])
        for width in reversed(widths):
            self.grow.append(torch.nn.Sequential(torch.nn.Upsample(scale_factor=2), torch.nn.Conv2d(before, width, 3, padding=1)))
            self.up.append(torch.nn.ModuleList([Residual(2 * width, width, time), Reads(width, text)]))
            before = width
        self.end = torch.nn.Sequential(torch.nn.GroupNorm(4, before), torch.nn.SiLU(), torch.nn.Conv2d(before, channels, 3, padding=1))

    def forward(self, noisy, time, text):
        text = self.encoder(self.words(text) + self.places)
        angles = time * self.rates
        time = self.time(torch.cat([torch.sin(angles), torch.cos(angles)], 1))
        x, skips = self.begin(noisy), []
        for (residual, reads), shrink in zip(self.down, self.shrink):
            x = reads(residual(x, time), text)
            skips.append(x)
            x = shrink(x)
        x = self.middle[2](self.middle[1](self.middle[0](x, time), text), time)
        for (residual, reads), grow in zip(self.up, self.grow):
            x = reads(residual(torch.cat([grow(x), skips.pop()], 1), time), text)
        return self.end(x)
