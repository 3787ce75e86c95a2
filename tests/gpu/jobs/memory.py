"""Rows of memory: recomputed blocks, a rank that runs out, unlike memory on one GPU.

On a GPU ranks get parts of its memory of their own (`torch.cuda.set_per_process_memory_fraction`); without one, memory
runs out by an exception at the size of a micro-batch, so that the same lines run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from hvdtrain import Config
from hvdtrain.config import RebalanceConfig
from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols import Control
from jobs import kit


def large(control: Control) -> tuple[nn.Module, Any, int]:
    """Return a GPT whose activations are most of its memory, sequences for four steps, and the global batch."""
    sizes = {"context": 256, "width": 256, "heads": 8, "depth": 4, "vocab": 512} if kit.ON_GPU else {}
    batch = 128 if kit.ON_GPU else 16
    return kit.decoder(**sizes), kit.tokens(4 * batch, sizes.get("context", 32), sizes.get("vocab", 64)), batch


@contextlib.contextmanager
def short_of_memory(model: nn.Module, here: bool, peak_bytes: int, part: float, most: int) -> Iterator[None]:
    """Within it this rank has ``part`` of ``peak_bytes``, or, of a CPU, fails at micro-batches above ``most``."""
    with contextlib.ExitStack() as stack:
        if here and kit.ON_GPU:
            total = torch.cuda.get_device_properties(0).total_memory
            stack.enter_context(kit.fraction(part * peak_bytes / total))
        elif here:
            def refuse(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
                if module.training and len(inputs[0]) > most:
                    raise MemoryError(f"{len(inputs[0])} samples are more than {most}, by order of this check")
            stack.callback(model.register_forward_pre_hook(refuse).remove)
        yield


def undisturbed(control: Control, settings: Config, model: nn.Module, data: Any) -> int:
    """Train; return the most bytes of the device that were held, 0 on a CPU."""
    if not kit.ON_GPU:
        kit.fitted(settings, model, data)
        return 0
    return kit.peak(lambda: kit.fitted(settings, model, data))[1]


def oom(control: Control) -> dict[str, Any]:
    """Have rank 1 run out in its first step; compare with a run that did not."""
    whole, data, batch = large(control)
    held = undisturbed(control, kit.config(control, batch), whole, data)
    model = large(control)[0]
    with short_of_memory(model, control.rank == 1, held, 0.75, batch // 4):
        trainer = kit.fitted(kit.config(control, batch), model, data)
    assert trainer.run is not None and trainer.run.recovery is not None
    limits = control.gather(trainer.run.recovery.limit)
    assert limits[0] == 0 and limits[1] > 0, f"limits of micro-batches by rank: {limits}"
    far = kit.same(control, model, whole, large(control)[0])
    memory = f" with 75 % of its {held / 2**20:.0f} MiB" if kit.ON_GPU else ", by an exception in place of a device's"
    return {"detail": f"rank 1 ran out{memory} and went on with {limits[1]} of {batch // 2} samples at once; weights "
                      f"within {far:.0e} of the undisturbed run", "numbers": {"limits": limits, "apart": far}}


def balance(control: Control) -> dict[str, Any]:
    """Plan with unlike memory: nobody runs out, and the curve is that of equal ranks."""
    whole, data, batch = large(control)
    held = undisturbed(control, kit.config(control, batch), whole, data)
    model = large(control)[0]
    given = RebalanceConfig(probe_cache=False, probe_s=0.5, max_micro_batch=[] if kit.ON_GPU else [0, batch // 4])
    with contextlib.ExitStack() as stack:
        if kit.ON_GPU:
            total = torch.cuda.get_device_properties(0).total_memory
            stack.enter_context(kit.fraction(min(0.45, (1.6, 0.8)[control.rank] * held / total)))
        trainer = kit.fitted(kit.config(control, batch, balance="static", rebalance=given), model, data)
    run = trainer.run
    assert run is not None and run.recovery is not None
    limits = control.gather(run.recovery.limit)
    cut = run.feed.cut_at(run.state.cursor.step)
    far = kit.same(control, model, whole, large(control)[0])
    told = f"shares {list(cut.shares_P)}, micro-batches of at most {list(cut.micro_batch_P)}"
    assert limits == [0, 0], f"with {told} ranks ran out: {limits}"
    return {"detail": f"{told}; nobody ran out; weights within {far:.0e}", "numbers": {"apart": far, "cut": told}}


def micro_batch(control: Control) -> dict[str, Any]:
    """Leave the size of micro-batches to the ranks, of which one has less memory."""
    whole, data, batch = large(control)
    held = undisturbed(control, kit.config(control, batch), whole, data)
    model = large(control)[0]
    with short_of_memory(model, control.rank == 1, held, 0.75, batch // 4):
        run = kit.fitted(kit.config(control, batch, micro_batch="auto"), model, data).run
    assert run is not None and run.recovery is not None
    limits = control.gather(run.recovery.limit)
    far = kit.same(control, model, whole, large(control)[0])
    return {"detail": f"weights within {far:.0e}; limits after running out, by rank: {limits}",
            "numbers": {"apart": far, "limits": limits}}


def remat(control: Control) -> dict[str, Any]:
    """Train with and without recomputing every block, with dropout."""
    def net() -> Any:
        sizes = {"context": 512, "width": 512, "heads": 8, "depth": 6} if kit.ON_GPU else {"depth": 4}
        return kit.decoder(dropout=0.1, **sizes)

    context, batch = (512, 32) if kit.ON_GPU else (32, 8)
    data = kit.tokens(4 * batch, context)
    models, peaks = [], []
    for key in ("off", "every:1"):
        model = net()
        try:
            work = _trained(control, kit.config(control, batch, remat=key), model, data)
        except UserError as error:
            raise kit.Skipped(f"remat {key} is refused here: {error}") from error
        if work[0] is None:
            raise kit.Skipped("this tree's PyTorch recomputes no blocks yet")
        models.append(model)
        peaks.append(work[1])
    far = kit.same(control, models[1], models[0], net(), tolerance=kit.TOLERANCE if kit.ON_GPU else 1e-6)
    told = "the same bits" if far == 0 else f"weights within {far:.0e}"
    if kit.ON_GPU:
        assert peaks[1] < 0.8 * peaks[0], f"peaks are {peaks} bytes"
        told += f"; the peak fell from {peaks[0] / 2**20:.0f} to {peaks[1] / 2**20:.0f} MiB"
    return {"detail": told + ("" if kit.ON_GPU else "; no peak is told of a CPU here"),
            "numbers": {"apart": far, "peak_bytes": peaks}}


def _trained(control: Control, settings: Config, model: nn.Module, data: Any) -> tuple[Any, int]:
    """Train; return the run's transform that recomputes, and the most bytes that tensors took of the device."""
    if kit.ON_GPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    run = kit.fitted(settings, model, data).run
    assert run is not None
    return run.parts.remat, int(torch.cuda.max_memory_allocated()) if kit.ON_GPU else 0


def readings(control: Control) -> dict[str, Any]:
    """Read each rank's process, memory by kind and GPU at the end of a training; sums must be possible ones."""
    model, data = kit.decoder(), kit.tokens(64)
    keys = {} if kit.ON_GPU else {"peak_tflops": [1.0] * control.size}  # no table has CPUs
    run = kit.fitted(kit.config(control, 16, **keys), model, data).run
    assert run is not None
    if control.rank != 0:
        return {}
    found = run.records.latest["system"].values
    parameters = sum(p.nbytes for p in model.parameters())
    for read in found["ranks"]:
        assert read["rss_bytes"] > 1e7 and read["memory"]["parameters"] >= parameters
        if kit.ON_GPU:
            assert parameters < read["allocated_bytes"] <= read["reserved_bytes"] and 0 <= read["fragmentation"] < 1
            assert read["memory"]["activations"] > 0
    assert all(n is not None and n > 6 * 32 * 0.5 * parameters / 4 for n in found["flops"]), found["flops_unknown"]
    first = found["ranks"][0]
    names = ("utilisation_percent", "sm_mhz", "throttled", "temperature_c", "power_w")
    told = ", ".join(f"{name} {first.get(name)}" for name in names) if kit.ON_GPU else "a CPU"
    used = [None if part is None else round(part, 4) for part in found["mfu"]]
    return {"detail": f"{told}; MFU by rank {used} of {found['peak_source'][0] or 'a peak that is not known'}",
            "numbers": {"mfu": found["mfu"], "flops": found["flops"], "memory": first["memory"]}}
