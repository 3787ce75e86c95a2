"""Tools of the tests of split PyTorch models: this CPU as several devices, a plan by hand, and a step split by it.

Imports PyTorch: a test asks for it first (pytest.importorskip).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from small_runs import config, samples
from split_models import blocks
from torch_tools import spec

from hvdtrain.backends.torch import Ops, placement
from hvdtrain.backends.torch.maker import Maker
from hvdtrain.comm.collectives.base import NullCollectives
from hvdtrain.comm.compressors import create
from hvdtrain.comm.reducer.reducer import Reducer
from hvdtrain.config import Named
from hvdtrain.core.buckets import plan_buckets
from hvdtrain.parallel.data_parallel.replicate import Replicate
from hvdtrain.parallel.pipeline.plan import DevicePlan
from hvdtrain.parallel.precision import FP32
from hvdtrain.planning.pipeline.blocks import Block, DeviceProfile, Needs
from hvdtrain.planning.pipeline.search import Partition, Task

CPU, META = torch.device("cpu"), torch.device("meta")
BASE = config(global_batch=32, max_steps=12, optimizer=Named("SGD", {"momentum": 0.5}), lr=0.1, control_timeout_s=30.0)
DATA = samples(107)


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path):
    """Run each test in a directory of its own."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(name="cpus")
def all_cpu(monkeypatch):
    """Let this host's CPU stand for each of a rank's devices."""
    monkeypatch.setattr(placement, "devices", lambda n: [CPU] * n)


def plan_of(named, starts, devices, micros=4):
    made = tuple(Block(name, 1.0, 4, 4) for name, _ in named)
    names = tuple(map(str, devices))
    task = Task(tuple(DeviceProfile(made, 1, 0, Needs(), name) for name in names), tuple(range(len(names))), "gpipe",
                micros, ordered=True)
    choice = Partition(task.kind_of, tuple(starts))
    return DevicePlan(task, choice, choice.played(task), names)


def split_parts(model, starts, settings, devices=None, **parts):
    """Parts whose cut is given, in place of measured."""
    made = Maker(spec(model, blocks=blocks, **parts), replace(settings, model_parallel=1), 0, NullCollectives(0, 2), 10,
                 FP32)
    made.placement.devices = devices or [CPU] * len(starts)
    made.placement.split(plan_of(blocks(model), starts, made.placement.devices))
    return made.parts()


# --- the forward pass ------------------------------------------------------------------------------------------------


def replicated(parts, bucket_mb, compression):
    """Return what takes gradients of ``parts`` for a rank whose other has none."""
    reducer = Reducer(plan_buckets(parts.params.specs, bucket_mb), create(compression, BASE), NullCollectives(0, 2),
                      Ops(), parts.ops_of_place)
    return Replicate(reducer, parts.optimizer)
