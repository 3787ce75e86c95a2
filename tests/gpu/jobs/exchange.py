"""Rows of the exchange: transports, the way over pinned host memory, compressors, Horovod."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hvdtrain.backends import load
from hvdtrain.cluster import boot
from hvdtrain.config import ExchangeConfig
from hvdtrain.core.protocols import Control
from jobs import kit

N = 100_003
"""Elements of a vector, no multiple of anything."""


def values(rank: int, n: int, dtype: str, salt: int = 0) -> np.ndarray:
    """Return whole numbers, so that their sums are exact in every order."""
    return np.random.default_rng((salt, rank)).integers(-50, 50, n).astype(dtype)


def tensor(array: np.ndarray) -> torch.Tensor:
    """Return it on this rank's device."""
    return torch.from_numpy(array).to(kit.device())


def every_collective(wire: Any, control: Control) -> int:
    """Compare each collective with numpy; return how many calls were made."""
    rank, size, calls = control.rank, control.size, 0
    sizes = [N // 3, N - N // 3] + [0] * (size - 2)
    for dtype in ("float32", "float64", "float16", "int32", "int64"):
        all_PN = np.stack([values(r, N, dtype, 1) for r in range(size)])
        rows_PPK = np.stack([values(r, size * 7, dtype, 2).reshape(size, 7) for r in range(size)])
        begin = sum(sizes[:rank])
        want = {
            "allreduce": all_PN.sum(0, dtype=dtype), "allgather": all_PN, "alltoall": rows_PPK[:, rank],
            "reducescatterv": all_PN.sum(0, dtype=dtype)[begin:begin + sizes[rank]],
            "allgatherv": np.concatenate([all_PN[r][:k] for r, k in enumerate(sizes)]), "broadcast": all_PN[size - 1],
        }
        own = all_PN[rank]
        handles = {
            "allreduce": wire.allreduce(tensor(own.copy()), f"a.{dtype}"),
            "allgather": wire.allgather(tensor(own), f"b.{dtype}"),
            "alltoall": wire.alltoall(tensor(rows_PPK[rank]), f"c.{dtype}"),
            "reducescatterv": wire.reducescatterv(tensor(own.copy()), sizes, f"d.{dtype}"),
            "allgatherv": wire.allgatherv(tensor(own[:sizes[rank]].copy()), sizes, f"e.{dtype}"),
            "broadcast": wire.broadcast(tensor(own.copy()), f"f.{dtype}", size - 1),
        }
        for name, handle in handles.items():
            found = handle.wait()
            assert found.device.type == kit.device().type, f"{name} gave a tensor on {found.device}"
            np.testing.assert_array_equal(found.cpu().numpy(), want[name], f"{name} of {dtype} over {wire.name}")
            calls += 1
    return calls


def gigabytes_a_second(wire: Any, control: Control, mib: int = 32, rounds: int = 5) -> float:
    """Return 1e9 bytes of a float32 vector summed each second, the median of a few rounds."""
    x = torch.ones(mib << 18, device=kit.device())
    seconds = []
    for number in range(rounds + 1):
        control.barrier("a round", 60.0)
        begin = time.perf_counter()
        wire.allreduce(x, "speed").wait()
        if kit.ON_GPU:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return round(x.numel() * 4 / float(np.median(seconds[1:])) / 1e9, 2)


def host_wires(control: Control) -> dict[str, Any]:
    """Return the transports of host memory by name, each staged for tensors of this rank's device."""
    from hvdtrain.comm.collectives.mpi import MpiCollectives
    from hvdtrain.comm.collectives.shared import SharedCollectives, SharedUnavailable

    stage = load("torch").stage
    found = {"mpi": stage(MpiCollectives(boot.mpi_comm(), timeout_s=60.0), control)}
    try:
        found["shared"] = stage(SharedCollectives(boot.mpi_comm(), timeout_s=60.0), control)
    except SharedUnavailable:  # told by the number of transports
        pass
    return found


def wires(control: Control) -> dict[str, Any]:
    """Check shared memory and plain MPI."""
    found = host_wires(control)
    calls = {name: every_collective(wire, control) for name, wire in found.items()}
    speed = {name: gigabytes_a_second(wire, control) for name, wire in found.items()}
    told = ", ".join(f"{name} {calls[name]} calls exact, 32 MiB at {speed[name]:g} GB/s" for name in found)
    return {"detail": f"{told}; from {kit.device().type} tensors", "numbers": {"gb_per_s": speed}}


def staged(control: Control) -> dict[str, Any]:
    """Send tensors of which the GPU is still making the values, and read results in the GPU's own order.

    A copy that began too early, or memory lent again too soon, gives another sum.
    """
    wire = host_wires(control)["mpi"]
    slow = torch.randn(2048, 2048, device="cuda")
    rounds, tensors, size = 40, 8, control.size
    wrong = torch.zeros((), device="cuda")
    for number in range(rounds):
        handles = []
        for index in range(tensors):
            for _ in range(3):
                slow = torch.tanh(slow @ slow) * 0.5
            x = torch.zeros(50_000 + index, device="cuda") + slow[0, 0] * 0 + (number * 10 + index + control.rank)
            handles.append(wire.allreduce(x, f"round.{index}"))
        for index, handle in enumerate(handles):
            want = size * (number * 10 + index) + size * (size - 1) / 2
            wrong += (handle.wait() != want).sum()
        slow = slow / slow.abs().max()
    assert float(wrong) == 0, f"{float(wrong):.0f} elements of {rounds * tensors} sums are wrong"
    only_s, both_s, alone_s = _overlap(wire, control)
    hidden = max(0.0, min(1.0, (only_s + alone_s - both_s) / max(only_s, 1e-9)))
    return {"detail": f"{rounds * tensors} sums exact while the GPU computed; of 64 MiB in {1e3 * only_s:.1f} ms "
                      f"{hidden:.0%} are hidden behind {1e3 * alone_s:.1f} ms of products",
            "numbers": {"exchange_s": only_s, "compute_s": alone_s, "both_s": both_s, "hidden": hidden}}


def _overlap(wire: Any, control: Control) -> tuple[float, float, float]:
    """Seconds of an exchange alone, of both at once, and of computing alone."""
    x, a = torch.ones(16 << 20, device="cuda"), torch.randn(4096, 4096, device="cuda") / 64

    def compute() -> None:
        for _ in range(20):
            a.mm(a)

    def timed(work: Callable[[], Any]) -> float:
        seconds = []
        for _ in range(4):
            torch.cuda.synchronize()
            control.barrier("a round", 60.0)
            begin = time.perf_counter()
            work()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)
        return float(np.median(seconds[1:]))

    def both() -> None:
        handle = wire.allreduce(x, "overlap")
        compute()
        handle.wait()

    return timed(lambda: wire.allreduce(x, "overlap").wait()), timed(both), timed(compute)


def compressors(control: Control) -> dict[str, Any]:
    """Train with each compressor: all ranks end with one model, and the loss has fallen."""
    from hvdtrain.engine.callbacks.base import Callback

    class Losses(Callback):
        where = "all"

        def __init__(self) -> None:
            self.seen: list[float] = []

        def step_end(self, run: Any) -> None:
            self.seen.append(run.state.loss)

    x, y = kit.vectors(480)
    told, numbers = [], {}
    for name in ("fp16", "bf16", "int8", "topk", "powersgd"):
        model, losses = kit.perceptron(), Losses()
        kit.fitted(kit.config(control, compression=name, exchange=ExchangeConfig(topk_ratio=0.1)), model, (x, y),
                   callbacks=[losses])
        digests = control.gather(float(sum(p.double().abs().sum() for p in model.parameters())))
        assert len(set(digests)) == 1, f"{name}: ranks hold {digests}"
        seen = [loss for loss in losses.seen if np.isfinite(loss)]
        first, last = float(np.mean(seen[:5])), float(np.mean(seen[-5:]))
        assert last < 0.8 * first, f"{name}: the loss went from {first:.3f} to {last:.3f}"
        told.append(f"{name} {first:.2f} to {last:.2f}")
        numbers[name] = last
    return {"detail": "losses: " + ", ".join(told), "numbers": numbers}


def _over_horovod(control: Control, exchange_device: str) -> dict[str, Any]:
    x, y = kit.vectors(96)
    start = kit.perceptron()
    model = kit.perceptron()
    settings = kit.config(control, collectives="horovod", exchange_device=exchange_device)
    trainer = kit.fitted(settings, model, (x, y))
    assert trainer.run is not None
    far = kit.same(control, model, kit.plainly(start, (x, y), 16, kit.classes), start)
    wire = trainer.run.collectives
    calls = every_collective(wire, control)
    speed = gigabytes_a_second(wire, control)
    return {"detail": f"{wire.name}: {calls} calls exact, 32 MiB at {speed:g} GB/s; weights within {far:.0e} of plain "
                      "PyTorch", "numbers": {"gb_per_s": speed, "apart": far}}


def horovod(control: Control) -> dict[str, Any]:
    """Check Horovod's operations of host memory."""
    return _over_horovod(control, "cpu")


def nccl(control: Control) -> dict[str, Any]:
    """Check Horovod over NCCL, a GPU for each rank."""
    return _over_horovod(control, "device")
