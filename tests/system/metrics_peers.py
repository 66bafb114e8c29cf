"""TensorBoard and silx read the metrics of a run of 40 steps that was resumed: metrics_peers.py RUN."""
import os
import sys

import h5py
import numpy
import silx.io
from silx.io.nxdata import get_default
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

run = sys.argv[1]
with h5py.File(run + "/run.h5", "r") as file:
    train = {name: item[()] for name, item in file["train"].items() if isinstance(item, h5py.Dataset)}

with silx.io.open(run + "/run.h5") as file:
    data = get_default(file)
    assert data is not None and data.is_valid and data.is_curve, data and data.issues
    assert data.signal_dataset_name == "loss" and data.axes_dataset_names == ["step"], (data.signal_dataset_name, data.axes_dataset_names)
    assert numpy.array_equal(data.signal[()], train["loss"]) and numpy.array_equal(data.axes[0][()], numpy.arange(1, 41))

assert len(os.listdir(run + "/tensorboard")) == 2  # one for each start
events = EventAccumulator(run + "/tensorboard")
events.Reload()
tags = {"train/loss": "loss", "train/gradient_norm": "gradient_norm", "train/learning_rate": "learning_rate", "train/step_time_s": "step_time",
        "train/tokens_per_second": "tokens_per_second", "train/mfu": "mfu"}
assert set(events.Tags()["scalars"]) == set(tags) | {"memory/bytes", "validation/loss"}, events.Tags()
for tag, name in tags.items():
    scalars = events.Scalars(tag)
    assert [scalar.step for scalar in scalars] == list(range(1, 41)), (tag, [scalar.step for scalar in scalars])
    assert numpy.array_equal([scalar.value for scalar in scalars], train[name].astype("f4")), tag
scalars = events.Scalars("validation/loss")
assert [scalar.step for scalar in scalars] == list(train["validation_step"]), scalars
assert numpy.array_equal([scalar.value for scalar in scalars], train["validation_loss"].astype("f4"))
