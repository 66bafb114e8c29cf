"""Coverage of PyTorch's models: coverage.py HAPT FOLDER [--keep KEPT] [NAME...]. Each model of models.py gets four marks: it is exported; hapt has
its operators; five steps equal PyTorch's (losses 1e-5, the change of all weights 1e-3); two and four stages give the bits of one. The
reference is PyTorch in double precision, with the gradients of two microbatches. If PyTorch in fp32 is itself farther away, four times its
distance is allowed, and printed. --keep writes model files and references for tests without PyTorch 2. Needs PyTorch 2, torchvision,
transformers."""
import copy
import os
import shutil
import sys
import warnings

import h5py
import numpy
import torch

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tools"))
import hapt_export  # noqa: E402
import models  # noqa: E402
import steps  # noqa: E402

warnings.filterwarnings("ignore")
os.environ.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1", OMPI_MCA_mpi_yield_when_idle="1")


def train_torch(model, rate, inputs, targets):
    model = hapt_export.Loss(model)
    kind = next(model.parameters()).dtype
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=rate, betas=(0.9, 0.95), eps=1e-4, weight_decay=0)
    losses = []
    for step in range(steps.STEPS):
        optimizer.zero_grad()
        loss = 0.0
        for k in range(steps.MICROBATCHES):
            def part_of(data):
                if isinstance(data, dict):
                    return {key: part_of(value) for key, value in data.items()}
                part = torch.tensor(data[step]).chunk(steps.MICROBATCHES)[k]
                return part.to(kind) if part.is_floating_point() else part.long()
            part = model(part_of(inputs), part_of(targets)) / steps.MICROBATCHES
            part.backward()
            loss += part.item()
        optimizer.step()
        losses.append(loss)
    used = {name.removeprefix("model."): weight for name, weight in model.named_parameters() if weight.grad is not None}
    return numpy.array(losses), {name: weight.detach().numpy() for name, weight in used.items()}


def is_shared(model, name):
    """Is this another name of an earlier parameter?"""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return any(other is parameters[name] for key, other in parameters.items() if key != name)


def compare(ours, model, before, rate, data):
    """(good, what was found, the reference)"""
    rounded = copy.deepcopy(model)
    expected, after = train_torch(model.double(), rate, *data)
    after = {key: value for key, value in after.items() if key in ours[1] or not is_shared(model, key)}

    def far(losses, weights):
        return numpy.max(numpy.abs(losses - expected) / expected), steps.distance(weights, before, after)
    off, limit, said = far(*ours), [1e-5, 1e-3], ""
    if off[0] > limit[0] or off[1] > limit[1]:
        theirs = far(*train_torch(rounded, rate, *data))
        limit = [max(limit[k], 4 * theirs[k]) for k in range(2)]
        said = "; PyTorch in fp32: %.1g and %.1g" % theirs
    good = len(after) > 0 and off[0] <= limit[0] and off[1] <= limit[1]
    return good, "losses within %.1g, changes within %.1g%s" % (off + (said,)), (expected, after)


def cover(name, folder, kept):
    """(marks, what was found)"""
    os.makedirs(folder, exist_ok=True)
    path, data_path = os.path.join(folder, "m.h5"), os.path.join(folder, "data.h5")
    torch.manual_seed(1)
    model, inputs, targets = models.MODELS[name]()
    before = {key: weight.detach().clone().numpy() for key, weight in model.named_parameters()}
    try:
        hapt_export.export(model, inputs, targets, path)
    except hapt_export.Unsupported as error:
        return 0 if isinstance(error, hapt_export.NoGraph) else 1, str(error)
    named = {key: (tuple(one.shape), one.is_floating_point()) for key, one in {**inputs, "targets": targets}.items()} if isinstance(inputs, dict) else None
    of_images = not named and inputs.is_floating_point()
    pixels = targets.shape[1:] if of_images else ()
    data = steps.named_batches(named) if named else steps.batches(inputs.shape, of_images, pixels)
    rate, shares = steps.RATE[of_images], steps.shares_weights(path)
    steps.write_data(data_path, *data)
    try:
        ours = steps.train(path, data_path, folder, "--learning-rate", rate)
    except RuntimeError as error:
        return 2, str(error)
    good, said, reference = compare(ours, model, before, rate, data)
    if not good:
        return 2, said
    try:
        for ranks in (2, 4):
            again = steps.train(path, data_path, folder, "--learning-rate", rate, *steps.stages(path, folder, ranks), ranks=ranks)
            if not steps.same(ours, again) and (not shares or numpy.max(numpy.abs(again[0] - ours[0]) / ours[0]) > 1e-6):
                return 3, "other bits in %d stages" % ranks
    except RuntimeError as error:
        return 3, str(error)
    if kept:
        keep(name, path, kept, {"named": repr(named)} if named else {"microbatch": inputs.shape, "images": of_images, "pixels": list(pixels)}, before, *reference)
    return 4, said + ("; shared weights: stages within 1e-6" if shares else "")


def keep(name, path, folder, about, before, losses, after):
    shutil.copy(path, os.path.join(folder, name + ".h5"))
    with h5py.File(os.path.join(folder, "reference.h5"), "a") as file:
        file.pop(name, None)
        group = file.create_group(name)
        group.attrs.update(about)
        group["loss_fp64"] = losses
        for key, value in after.items():  # of each parameter the 2-norm of its change, and the change along a direction
            change = (value - before[key].astype(numpy.float64)).reshape(-1)
            group["change/" + key] = [numpy.linalg.norm(change), change @ numpy.cos(numpy.arange(len(change)))]


arguments = sys.argv[3:]
kept = arguments.pop(1) if arguments[:1] == ["--keep"] else None
names = arguments[kept is not None:] or list(models.MODELS)
whole = 0
for name in names:
    marks, said = cover(name, os.path.join(sys.argv[2], name), kept)
    whole += marks == 4
    print("%-26s %s  %s" % (name, "".join("x" if k < marks else "-" for k in range(4)), said), flush=True)
print("%d of %d models have all four marks" % (whole, len(names)))
sys.exit(whole < len(names))
