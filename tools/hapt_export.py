#!/usr/bin/env python3
"""Exports a PyTorch model as a model file of hapt, with its weights. Needs PyTorch 2.5 or later, and h5py.

    import hapt_export

    hapt_export.export(model, images, labels, "m.h5")   # or tokens and targets

`model` is a module in training mode; its result, or the field `logits` of it, is compared with the targets by the cross entropy. The
example tensors give shapes and types: int64 tokens [rows][T] with targets [rows][T], or float images [rows][C][H][W] with labels [rows],
or with a label for each pixel, [rows][H][W], and logits [rows][classes][H][W]. Other models have named inputs, a dict of the arguments of
`model`, {"input_ids": ..., "pixel_values": ...}: tensors [rows][...]. Their targets are integers [rows][...], or real numbers, which are
compared by the mean squared error. The data file then holds /batches/NAME of each input, and /batches/targets.
hapt may train with other rows. hapt can plan with a model of any size before it has weights:

    with hapt_export.without_values():
        model = ...

On the command line:

    hapt_export.py FILE.py --output m.h5          # FILE.py defines model(), which returns (model, inputs, targets) or (..., targets, loss)

torch.export makes the graph before any decomposition. Parts that depend on neither inputs nor weights are computed here. Operators that
hapt lacks are listed, all of them; then there is no file, and the exit code is 3."""
import argparse
import contextlib
import copy
import importlib.util
import os
import sys
import weakref

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from hapt_export_graph import Exporter, Lacking, NoGraph, Unsupported  # noqa: E402
import hapt_export_images  # noqa: E402,F401: it adds operators
from hapt_export_operators import HANDLERS  # noqa: E402


class Loss(torch.nn.Module):
    """The model, and the loss of its result."""

    def __init__(self, model, loss=None):
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, inputs, targets):
        logits = self.model(**inputs) if isinstance(inputs, dict) else self.model(inputs)
        logits = getattr(logits, "logits", logits)
        if isinstance(logits, (tuple, list)):
            logits = logits[0]
        if self.loss is not None:
            return self.loss(logits, targets)
        if targets.is_floating_point():
            return torch.nn.functional.mse_loss(logits, targets)
        if logits.dim() > 3:  # of pixels
            return torch.nn.functional.cross_entropy(logits, targets)
        return torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))


@contextlib.contextmanager
def without_values():
    """Parameters of modules that are made inside have shapes but no values, and take no memory. hapt can only plan with the model file."""
    register, made = torch.nn.Module.register_parameter, {}

    def of_shape(module, name, parameter):
        if parameter is not None and not parameter.is_meta:
            known, shape = made.get(id(parameter), (None, None))
            if known is None or known() is not parameter:  # an id is used again after its object's end
                shape = torch.nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
                made[id(parameter)] = weakref.ref(parameter), shape
            parameter = shape
        register(module, name, parameter)
    torch.nn.Module.register_parameter = of_shape
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register


def with_fakes(model, mode):
    """A copy of the model, in which parameters without values are fake tensors (PyTorch's, on the CPU). Tied ones stay tied."""
    if any(buffer.is_meta for buffer in model.buffers()):
        raise Unsupported("buffers without values; make the model in without_values() instead of a meta device")
    with mode:
        made = {id(weight): torch.nn.Parameter(torch.empty(weight.shape, dtype=weight.dtype), requires_grad=weight.requires_grad)
                for weight in model.parameters() if weight.is_meta}
    return copy.deepcopy(model, made)


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


def export(model, inputs, targets, path, name=None, frozen_weights="fp32", loss=None):
    """Writes the model file. Raises Unsupported, with all operators that hapt lacks, before it writes anything.

    loss: a function of the result and the targets, in place of the loss above. frozen_weights: how devices hold matrices that do not train
    and that only linear layers read: fp32, bf16, int8 or nf4 (hapt help import)."""
    lacks_values = any(weight.is_meta for weight in model.parameters())
    mode = FakeTensorMode(allow_non_fake_inputs=True) if lacks_values else contextlib.nullcontext()
    wrapped = Loss(with_fakes(model, mode) if lacks_values else model, loss)

    def times(count, one):
        return {key: times(count, value) for key, value in one.items()} if isinstance(one, dict) else torch.cat([one] * count)
    examples = [tuple(times(count, one) for one in (inputs, targets)) for count in (1, 2)]  # copies: one tensor may be given twice
    if any(weight.dtype != torch.float32 for weight in model.parameters()):
        raise Unsupported("weights are not fp32; hapt converts the model, --dtype")
    try:
        with mode:
            programs = [torch.export.export(wrapped, example) for example in examples]
    except Exception as error:  # it has many kinds of them
        raise NoGraph("torch.export makes no graph of it: %s: %s" % (type(error).__name__, str(error).strip().split("\n")[0])) from error
    state = dict(wrapped.named_parameters(remove_duplicate=False))
    state.update(wrapped.named_buffers(remove_duplicate=False))
    exporter = Exporter(name or type(model).__name__, (inputs, targets), *programs, state, HANDLERS, frozen_weights)
    exporter.run()
    if exporter.loss is None:
        raise Unsupported("the loss is neither a cross entropy nor a mean squared error nor a binary cross entropy of logits")
    if frozen_weights != "fp32" and not any(operator[1] == "linear_packed" for operator in exporter.graph.operators):
        raise Unsupported("no layer can be packed: a frozen matrix that only linear layers read, with a multiple of 32 columns")
    for note in sorted(exporter.notes):
        print("hapt_export: note: %s" % note, file=sys.stderr)
    prune(exporter.graph, exporter.loss)
    exporter.graph.save(path, exporter.loss)
    return exporter.graph


def fail(code, error, hint):
    print("hapt_export: error: %s\nhint: %s" % (error, hint), file=sys.stderr)
    sys.exit(code)


def main():
    parser = argparse.ArgumentParser(description="Exports a PyTorch model as a model file of hapt.")
    parser.add_argument("file", help="FILE.py, which defines model(): it returns (model, inputs, targets)")
    parser.add_argument("--output", required=True, help="the model file")
    parser.add_argument("--frozen-weights", choices=["fp32", "bf16", "int8", "nf4"], default="fp32", help="how devices hold frozen weights of linear layers")
    options = parser.parse_args()
    spec = importlib.util.spec_from_file_location("exported", options.file)
    if spec is None or not os.path.isfile(options.file):
        fail(3, "there is no Python file %s" % options.file, "name a file NAME.py that defines model()")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, os.path.dirname(os.path.abspath(options.file)))  # it may import its neighbours
    spec.loader.exec_module(module)
    if not callable(getattr(module, "model", None)):
        fail(3, "%s defines no function model()" % options.file, "let it return the model, its inputs and the targets")
    made = module.model()
    if not isinstance(made, tuple) or len(made) not in (3, 4):
        fail(3, "model() of %s returns neither three nor four values" % options.file, "let it return the model, its inputs, the targets, and perhaps the loss")
    try:
        graph = export(*made[:3], options.output, frozen_weights=options.frozen_weights, loss=(made + (None,))[3])
    except Unsupported as error:
        lacking = isinstance(error, Lacking)
        fail(3, "%s: %s%s" % (options.file, "hapt has no operators for " if lacking else "", error),
             "hapt ops lists the operators" if lacking else "see the head of hapt_export.py")
    except OSError as error:
        fail(6, "%s cannot be written: %s" % (options.output, error), "check the folder and its space")
    print("%s: %d operators, %d parameters" % (options.output, len(graph.operators), sum(tensor[1] == "parameter" for tensor in graph.tensors)))


if __name__ == "__main__":
    main()
