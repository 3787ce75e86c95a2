"""Common parts of the PyTorch peers: model, loss, optimizer, batches, and the process group that DDP needs.

Owns nothing that differs between them: gradients, hooks and wrappers are each peer's own.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np

from benchmarks.peers import IDLE_S, Prepared, Setup
from benchmarks.workloads import LR, MOMENTUM

TIMEOUT = timedelta(seconds=IDLE_S)
"""Of the process group."""


def build(setup: Setup) -> tuple[Any, Callable[..., Any], Any]:
    """(model on this rank's device, ``loss(model, batch)``: the mean over the batch, device), from the seed."""
    spec, device = spec_of(setup)
    return spec.model.to(device).train(), loss_of(spec), device


def spec_of(setup: Setup) -> tuple[Any, Any]:
    """(model with what its file says about it, from the seed; this rank's device)."""
    import torch

    from hvdtrain.backends.model_spec import build_spec

    spec = build_spec(setup.workload.model("torch"), setup.workload.args, setup.begin)
    return spec, torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def loss_of(spec: Any) -> Callable[..., Any]:
    """``loss(model, batch)``: the mean over the batch."""
    import torch

    def loss(model: Any, batch: tuple[Any, ...]) -> Any:
        if spec.task is not None:
            loss_sum, weight = spec.task(model, batch)
            return loss_sum / weight
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    return loss


def optimizer(model: Any) -> Any:
    """Return the one that all contenders use."""
    import torch

    return torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)


def prepared(setup: Setup, model: Any, loss: Callable[..., Any], device: Any, opt: Any, wire: str,
             backward: Callable[[Any], None] = lambda value: value.backward()) -> Prepared:
    """Return the usual loop around ``model``: zero, forward, backward, update."""
    import torch

    last: list[Any] = [None]

    def step(i: int) -> None:
        arrays = setup.batches[i % len(setup.batches)]
        batch = tuple(torch.from_numpy(x).to(device, non_blocking=True) for x in arrays)
        opt.zero_grad()
        value = loss(model, batch)
        backward(value)
        opt.step()
        last[0] = value.detach()

    sync = partial(torch.cuda.synchronize, device) if device.type == "cuda" else (lambda: None)
    return Prepared(step, lambda: float(last[0]), partial(arrays_of, model), wire, sync)


def arrays_of(model: Any) -> list[np.ndarray]:
    """Return copies of the trainable parameters."""
    return [p.detach().cpu().numpy().copy() for p in model.parameters() if p.requires_grad]


def rendezvous(setup: Setup, env: Any = os.environ, rank: int | None = None) -> None:
    """Set the variables from which torch.distributed, Accelerate and Fabric find their ranks; collective.

    ``rank``: this one's number there, where it is another than in the job. Number 0 is where they meet.
    """
    control = setup.control
    number = control.rank if rank is None else rank
    meets = (own_address(setup.iface), free_port()) if number == 0 else None
    address, port = next(place for place in control.gather(meets) if place is not None)
    hosts = list(dict.fromkeys(control.gather(control.node)))
    env.update({"MASTER_ADDR": address, "MASTER_PORT": str(port), "RANK": str(number),
                "WORLD_SIZE": str(control.size), "LOCAL_RANK": str(control.local_rank),
                "LOCAL_WORLD_SIZE": str(control.local_size), "NODE_RANK": str(hosts.index(control.node)),
                "TORCH_NCCL_ENABLE_MONITORING": "0"})  # its monitor takes a suspended job for a hung one
    name = setup.iface or (loopback() if control.local_size == control.size else "")
    if name:
        env.update({"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name})


def own_address(iface: str) -> str:
    """IPv4 address of this host on ``iface``; without one, of its name."""
    import psutil

    if iface:
        found = [a.address for a in psutil.net_if_addrs().get(iface, []) if a.family == socket.AF_INET]
        if not found:
            raise RuntimeError(f"the network interface {iface!r} has no IPv4 address on {socket.gethostname()}")
        return found[0]
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


def loopback() -> str:
    """Name of the loopback interface, "" where it has none of the usual ones."""
    import psutil

    return next((name for name in ("lo", "lo0") if name in psutil.net_if_addrs()), "")


def free_port() -> int:
    """Return a TCP port that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


def process_group(setup: Setup, device: Any, rank: int | None = None) -> str:
    """Start torch.distributed and return its backend's name: NCCL on GPUs, else Gloo; collective.

    ``rank``: as in `rendezvous`.
    """
    import torch.distributed as dist

    rendezvous(setup, rank=rank)
    name = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(name, timeout=TIMEOUT)
    return name
