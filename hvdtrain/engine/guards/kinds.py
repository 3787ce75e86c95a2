"""Which ranks compute alike to the bit: the same device with the same number of threads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvdtrain.cluster.topology import affinity, compute_threads

if TYPE_CHECKING:
    from hvdtrain.engine.run import Run


def kinds(run: Run) -> list[str]:
    """Return a text for each rank: ranks with the same one have like devices, libraries and threads; collective.

    A GPU computes alike whatever the host's threads; kernels on CPUs add up by threads and by the processor's model.
    """
    device = run.devices[run.control.rank]
    text = f"{device.kind} {device.name} {device.arch}"
    if device.kind == "cpu":
        host = run.topology.host_of(run.control.rank)
        text += f", {compute_threads(len(affinity()), host.cores, len(host.ranks), run.config.threads)} threads"
    return run.control.gather(text)
