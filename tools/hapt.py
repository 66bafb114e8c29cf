"""Writes graphs of your own as model files of hapt (format hapt-model, version 2; docs/files.md). Needs h5py.

    import hapt

    graph = hapt.Graph("mlp", rows=8, channels=3, image=32, classes=10)
    x = graph.op("flatten", graph.op("cast", graph.images))
    x = graph.op("relu", graph.linear(x, "hidden", 3 * 32 * 32, 256))
    x = graph.linear(x, "classifier", 256, 10)
    graph.save("mlp.h5", loss=graph.cross_entropy(x))

`hapt ops` lists all operators, `hapt ops NAME` explains one. hapt checks the file when it reads it, and finds shapes, gradients,
shardings, memory and stages by itself. examples/graph-in-python is a whole model."""
import operator
import os

import h5py

PACKED_COLUMNS, PACKED_WORDS = 32, {"nf4": 5, "int8": 9, "bf16": 16}  # of a block of a packed matrix
MOST_DIMENSIONS, MOST_INPUTS, MOST_OUTPUTS, MOST_ATTRIBUTES = 5, 10, 4, 6


class Tensor:
    """A tensor of a graph: an input, a parameter, or what an operator makes. packed: how devices hold it, or None."""

    def __init__(self, graph, row, name):
        self.graph, self.row, self.name, self.packed = graph, row, name, None

    def __add__(self, other):
        return self.graph.op("add", self, other)


class NoValue:
    """Stands for the value of a parameter in a model file that is only planned with. hapt refuses to train with it."""

    def __init__(self, shape):
        self.shape = shape


class Graph:
    """A model: inputs, parameters and operators, in the order in which they are added.

    rows: of a microbatch; hapt may plan with others (--global-batch). Models of tokens have a sequence and a vocab, models of images
    have channels, an image (height and width, pixels) and classes; labels: the number of labels of an image, if it is not one for the
    whole (the label of each pixel, or -100). dtype: type of the computation, fp32, bf16 or fp16. seed: of the
    initial weights. training: defaults of training options, {"learning-rate": 1e-3}.

    fields: named inputs instead of tokens or images, {"ids": ([16], "int32"), "price": ([1], "fp32")}: the shape of a row and the type.
    The data file holds them as /batches/NAME. self.fields has their tensors. target: the name of the one that the loss compares with.
    Integers are below vocab, and below the sizes of the tables that they index."""

    def __init__(self, name, rows, sequence=None, vocab=None, channels=None, image=None, classes=None, dtype="fp32", seed=1, training=None,
                 labels=None, fields=None, target=None):
        if fields:
            if target not in fields or not channels is image is classes is labels is None:
                raise ValueError("fields need a target, the name of one of them, and have no channels, image, classes or labels")
            if vocab is None and any(dtype == "int32" for _, dtype in fields.values()):
                raise ValueError("give vocab: the integers of fields are below it")
            sequence, vocab = sequence or 1, vocab or 1
        of_tokens = sequence is not None and vocab is not None and channels is image is classes is None
        of_images = None not in (channels, image, classes) and sequence is vocab is None
        if not of_tokens and not of_images:
            raise ValueError("give sequence and vocab (tokens), or channels, image and classes (images), or fields")
        self.name, self.rows, self.dtype, self.seed = name, rows, dtype, seed
        self.sizes = {"sequence": sequence, "vocab": vocab} if of_tokens else {"classes": classes}
        self.training = {option: str(value) for option, value in (training or {}).items()}
        self.tensors, self.operators, self.values, self.names, self.inputs, self.dropouts = [], [], {}, set(), {}, 0
        if fields:
            self.fields = {name: self._tensor(name, "input", [rows] + list(shape), kind, role="field") for name, (shape, kind) in fields.items()}
            self.targets = self.fields[target]
        elif of_tokens:
            self.tokens = self._tensor("tokens", "input", [rows, sequence], "int32", role="tokens")
            self.targets = self._tensor("targets", "input", [rows, sequence], "int32", role="targets")
        else:
            self.images = self._tensor("images", "input", [rows, channels, image, image], "fp32", role="images")
            self.targets = self._tensor("labels", "input", [rows] + ([labels] if labels else []), "int32", role="labels")

    def _free(self, kind):
        """A name for an operator without one."""
        name, k = kind, 1
        while name in self.names:
            name, k = "%s_%d" % (kind, k + 1), k + 1
        return name

    def _tensor(self, name, kind, shape=(), dtype="", role="", init="zero", std=0.0, trainable=False):
        if name in self.names:
            raise ValueError("the name %s is taken" % name)
        if len(shape) > MOST_DIMENSIONS:
            raise ValueError("%s: a tensor has at most %d dimensions" % (name, MOST_DIMENSIONS))
        shape = [operator.index(size) for size in shape]
        row = len(self.tensors)
        self.names.add(name)
        self.tensors.append((name, kind, role, dtype, init, shape + [0] * (MOST_DIMENSIONS - len(shape)), std, trainable))
        return Tensor(self, row, name)

    def input(self, role):
        """A further input: "row_keys" [rows][2], which dropout reads, or "training" [1], which is 1 while the model trains."""
        shapes = {"row_keys": ([self.rows, 2], "int32"), "training": ([1], "fp32")}
        if role not in shapes:
            raise ValueError("no input %s: there are row_keys and training" % role)
        if role not in self.inputs:
            self.inputs[role] = self._tensor(role, "input", *shapes[role], role=role)
        return self.inputs[role]

    def parameter(self, name, shape, std=0.02, init="normal", value=None, trainable=True, packed=None):
        """A parameter of this name. init: normal (with this standard deviation), zero or one. value: an array to begin with, or NoValue;
        all parameters of a graph have one, or none. packed: devices hold a frozen matrix [out][in] as nf4, int8 or bf16, in blocks of 32
        columns, for linear_packed; the value is fp32."""
        if value is not None and tuple(value.shape) != tuple(shape):
            raise ValueError("%s: the value has shape %s, not %s" % (name, tuple(value.shape), tuple(shape)))
        if packed and (trainable or len(shape) != 2 or shape[1] < 1 or shape[1] % PACKED_COLUMNS or packed not in PACKED_WORDS):
            raise ValueError("%s: only a frozen matrix is packed, as nf4, int8 or bf16, with a multiple of %d columns" % (name, PACKED_COLUMNS))
        if packed:
            shape = [shape[0], shape[1] // PACKED_COLUMNS, PACKED_WORDS[packed]]
        made = self._tensor(name, "parameter", shape, "fp32" if packed else self.dtype, init=init, std=std if init == "normal" else 0.0, trainable=trainable)
        made.packed = packed
        if value is not None:
            self.values[name] = value
        return made

    def trains(self, parameter):
        """True if the parameter is trainable."""
        return bool(self.tensors[parameter.row][7])

    def op(self, kind, *inputs, name=None, outputs=1, integers=(), reals=()):
        """Adds an operator and returns its output, or a tuple if outputs > 1. An input None is an optional one that is absent. A dropout
        without integers gets a number of its own."""
        if len(inputs) > MOST_INPUTS or not 1 <= outputs <= MOST_OUTPUTS or max(len(integers), len(reals)) > MOST_ATTRIBUTES:
            raise ValueError("%s: too many inputs, outputs or attributes" % (name or kind))
        for given in inputs:
            if given is not None and (not isinstance(given, Tensor) or given.graph is not self):
                raise ValueError("%s: an input is no tensor of this graph" % (name or kind))
        if kind == "dropout" and not integers:
            integers = [self.dropouts]
            self.dropouts += 1
        name = name or self._free(kind)
        made = tuple(self._tensor(name + (".%d" % k if k else ""), "activation") for k in range(outputs))
        self.names.update("%s.%d" % (name, k) for k in range(1, MOST_OUTPUTS))  # hapt's names of outputs that are not used
        self.operators.append((name, kind, [-1 if given is None else given.row for given in inputs], [one.row for one in made],
                               [operator.index(number) for number in integers], list(reals)))
        return made[0] if outputs == 1 else made

    def linear(self, x, name, width, out, bias=True, std=0.02, packed=None):
        """x W^T + b, with NAME.weight [out][width] and NAME.bias [out], as in PyTorch. packed: as of parameter; the layer is frozen then."""
        weight = self.parameter(name + ".weight", [out, width], std, trainable=not packed, packed=packed)
        shift = self.parameter(name + ".bias", [out], init="zero", trainable=not packed) if bias else None
        return self.op("linear_packed" if packed else "linear_t", x, weight, shift, name=name)

    def layer_norm(self, x, name, width, epsilon=1e-5):
        """The layer norm over the last dimension, with NAME.weight and NAME.bias [width]."""
        return self.op("layer_norm", x, self.parameter(name + ".weight", [width], init="one"),
                       self.parameter(name + ".bias", [width], init="zero"), name=name, reals=[epsilon])

    def cross_entropy(self, logits, name="loss"):
        """The loss of these logits: the sum over targets or labels."""
        return self.op("cross_entropy", logits, self.targets, name=name)

    def mse(self, x, name="loss"):
        """The squared error of x: the sum over the targets, which are a field of fp32. Training divides it by their number."""
        return self.op("mse", x, self.targets, name=name)

    def bce(self, x, name="loss"):
        """The binary cross entropy of logits x: the sum over the targets, a field of fp32 from 0 to 1."""
        return self.op("bce", x, self.targets, name=name)

    def save(self, path, loss):
        """Writes the model file. loss: the tensor that training reduces."""
        if loss.graph is not self:
            raise ValueError("the loss is no tensor of this graph")
        parameters = [tensor[0] for tensor in self.tensors if tensor[1] == "parameter"]
        missing = [name for name in parameters if name not in self.values]
        if self.values and missing:
            raise ValueError("parameters without a value, where others have one: %s" % ", ".join(missing))
        part = "%s.part" % path
        try:
            self._write_file(part, loss)
            os.replace(part, path)
        finally:
            if os.path.exists(part):
                os.remove(part)

    def _write_file(self, path, loss):
        columns = list(zip(*self.tensors))
        with h5py.File(path, "w") as file:
            file.attrs.update({"format": "hapt-model", "version": 2, "creator": "hapt.py", "family": self.name, "loss": loss.name,
                               "microbatch": self.rows, "dtype": self.dtype, "seed": self.seed, **self.sizes})
            for column, name in ((0, "name"), (1, "kind"), (2, "role"), (3, "dtype"), (4, "init")):
                self._write(file, "tensors/" + name, columns[column])
            file.create_dataset("tensors/shape", data=columns[5], dtype="i8")
            file.create_dataset("tensors/init_std", data=columns[6], dtype="f8")
            file.create_dataset("tensors/trainable", data=columns[7], dtype="u1")
            self._write(file, "operators/name", [one[0] for one in self.operators])
            self._write(file, "operators/type", [one[1] for one in self.operators])
            for column, name, width, absent, kind in ((2, "input", MOST_INPUTS, -1, "i4"), (3, "output", MOST_OUTPUTS, -1, "i4"),
                                                      (4, "integer", MOST_ATTRIBUTES, 0, "i8"), (5, "real", MOST_ATTRIBUTES, 0, "f8")):
                rows = [one[column] + [absent] * (width - len(one[column])) for one in self.operators]
                file.create_dataset("operators/" + name, data=rows, dtype=kind)
            self._write(file, "settings/name", [])
            self._write(file, "settings/value", [])
            self._write(file, "training/option", list(self.training))
            self._write(file, "training/value", list(self.training.values()))
            for name, value in self.values.items():
                stack = name.split(".").count("*") == 1 and len(value.shape) > 1  # such as one of experts: element by element
                for k in range(value.shape[0] if stack else 1):
                    data = None if isinstance(value, NoValue) else value[k] if stack else value  # None takes no space
                    file.create_dataset("parameters/" + (name.replace("*", str(k)) if stack else name), value.shape[1:] if stack else value.shape,
                                        dtype="f4", data=data)

    @staticmethod
    def _write(file, name, text):
        file.create_dataset(name, shape=(len(text),), data=list(text), dtype=h5py.string_dtype())
