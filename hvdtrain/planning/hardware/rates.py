"""Rates of a plan: how fast devices compute and links carry, by calibration where there is one, else assumed. Pure.

Calibrating is left to `hvdtrain.engine.calibration`, reading assumptions to `hvdtrain.commands.plan`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from hvdtrain.config.inventory import InventoryLinks
from hvdtrain.core.errors import UserError
from hvdtrain.planning.compressor_choice import CodecCost
from hvdtrain.planning.hardware.catalogue import CPU, Device
from hvdtrain.planning.hardware.workload import Workload
from hvdtrain.planning.linear import LinearTime, Link

BEYOND = 2.0
"""A micro-batch may be this many times smaller or larger than those that were timed, a link slower or faster."""

LEAST_SLOPE_S = 1e-12
"""Seconds of a sample at least: a plan needs a line that rises."""

MOST_ERROR = 0.9
"""Relative error of a calibration at most."""

CASTS = {"fp16": 0.5, "bf16": 0.5}
"""Compressors whose bytes per byte of fp32 gradients need no measurement."""


@dataclass(frozen=True)
class ZeroUpdate:
    """Measured update by ZeRO. ``update_s``: of a rank's shard, one of ``ranks``. ``copy_s``: as in
    `hvdtrain.planning.simulator.Exchange`. ``overlaps``: so does stage 2, whose transport may differ.
    """

    ranks: int
    update_s: float
    copy_s: float
    overlaps: bool

    def shard_s(self, ranks: int) -> float:
        """Return the seconds of updating one of ``ranks`` shards."""
        return self.update_s * self.ranks / ranks


@dataclass(frozen=True)
class Calibration:
    """Measurements of one device kind with one model. ``device``: its name in the catalogue, or the processor's.

    ``local``, ``hosts``: ranks of each host, and hosts, that computed at the same time. ``line`` of micro-batches of
    ``sizes`` samples. ``error``: relative, of the step predicted for the calibration itself. ``within``, ``between``:
    as in `hvdtrain.planning.simulator.Exchange`, and ``late``; None: not measured. ``codecs``: by compressor.
    ``save_s``: seconds that a checkpoint blocks training, and to write it. ``fixed_s``: of a step beyond all that:
    agreement, callbacks, jitter of the ranks. ``accumulate_s``: of adding a micro-batch's gradients to earlier ones.
    ``zero``: None: not measured. ``history``: where runs keep what such steps took.
    """

    device: str
    precision: str
    local: int
    hosts: int
    line: LinearTime
    sizes: tuple[int, ...]
    update_s: float
    error: float
    transport: str = "null"
    overlaps: bool = False
    within: Link | None = None
    between: Link | None = None
    codecs: Mapping[str, CodecCost] = field(default_factory=dict)
    save_s: tuple[float, float] = (0.0, 0.0)
    fixed_s: float = 0.0
    late: float = 0.0
    accumulate_s: float = 0.0
    zero: ZeroUpdate | None = None
    history: str = ""
    when: str = ""

    def covers(self, samples: int) -> bool:
        """Return whether a micro-batch of so many samples is near those that were timed."""
        return in_range(samples, self.sizes)


def in_range(samples: int, sizes: Sequence[int]) -> bool:
    """Return whether a micro-batch is at most `BEYOND` times smaller or larger than ``sizes``; () allows any."""
    return not sizes or min(sizes) / BEYOND <= samples <= BEYOND * max(sizes)


def near(link: Link, nominal_Bps: float) -> bool:
    """Return whether a measured link can be one of ``nominal_Bps``; 0: unknown, of any."""
    seconds = link.beta_s_per_byte * nominal_Bps
    return not nominal_Bps or 1 / BEYOND <= seconds <= BEYOND


@dataclass(frozen=True)
class AssumedDevice:
    """Assumptions about a device; ``peak``: FLOP/s by type, in place of the catalogue's. None: those of all devices."""

    efficiency: float | None = None
    peak: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Assumptions:
    """``efficiency``: fraction of the peak FLOP/s that forward and backward reach; None: not assumed.

    ``overhead_s``: fixed seconds of a micro-batch. ``link_efficiency``: fraction of a link's nominal bandwidth;
    ``latency_s``: of a message between ranks. ``overlaps``: buckets travel during backward. ``peak``: FLOP/s by type
    of devices that have none in ``devices``.
    """

    path: str = ""
    efficiency: float | None = None
    overhead_s: float = 0.0
    link_efficiency: float = 1.0
    latency_s: float = 0.0
    overlaps: bool = True
    devices: Mapping[str, AssumedDevice] = field(default_factory=dict)
    peak: Mapping[str, float] = field(default_factory=dict)

    def of(self, device: Device) -> AssumedDevice:
        """Return what is assumed about a device."""
        name = CPU if device.kind == "cpu" and device.name not in self.devices else device.name
        own = self.devices.get(name, AssumedDevice())
        return AssumedDevice(self.efficiency if own.efficiency is None else own.efficiency, own.peak or self.peak)


@dataclass(frozen=True)
class RankRate:
    """Speed of one rank. ``assumed``: the assumption behind it, "" where it was calibrated; ``error``: relative."""

    line: LinearTime
    update_s: float
    error: float = 0.0
    assumed: str = ""
    sizes: tuple[int, ...] = ()
    save_s: tuple[float, float] = (0.0, 0.0)
    fixed_s: float = 0.0
    accumulate_s: float = 0.0
    zero: ZeroUpdate | None = None


@dataclass(frozen=True)
class Wiring:
    """Exchange of a set-up, apart from its buckets. ``assumed``: the assumptions behind it."""

    transport: str
    within: Link
    between: Link
    overlaps: bool
    assumed: tuple[str, ...] = ()
    late: float = 0.0


@dataclass(frozen=True)
class Rates:
    """``calibrations``: of this workload. ``collectives``: the key's value."""

    workload: Workload
    calibrations: Sequence[Calibration] = ()
    assumptions: Assumptions | None = None
    links: InventoryLinks = InventoryLinks()
    collectives: str = "auto"

    def pace(self, device: Device, local: int, precision: str) -> RankRate:
        """Return the speed of a rank on ``device``, one of ``local`` on its host; `UserError` where it is unknown."""
        own = [c for c in self.calibrations if c.device == device.name and c.precision == precision]
        fitting = [c for c in own if c.local == local or device.kind != "cpu"]
        if fitting:
            found = fitting[-1]
            return RankRate(found.line, found.update_s, found.error, "", found.sizes, found.save_s, found.fixed_s,
                            found.accumulate_s, found.zero)
        if self.assumptions is not None:
            return self._assumed(device, precision, self.assumptions)
        if own:
            raise UserError(f"{device.name} was calibrated with {own[-1].local} ranks on a host, not with {local}",
                            "a calibration with as many ranks, which share the processor",
                            f"run mpirun -np {local} python -m hvdtrain plan --inventory here with the same options "
                            "there, or add --assume FILE")
        raise UserError(f"{device.name} was not calibrated with this model in {precision}",
                        "a calibration, or assumptions about the device",
                        "run python -m hvdtrain plan --inventory here with the same options on such a host, or add "
                        "--assume FILE with its efficiency")

    def _assumed(self, device: Device, precision: str, given: Assumptions) -> RankRate:
        own = given.of(device)
        efficiency = own.efficiency
        peak = Device(device.name, flops={**device.flops, **own.peak}).peak(precision)
        if efficiency is None:
            raise UserError(f"{given.path!r} has no efficiency of {device.name}",
                            "the fraction of its peak that a step reaches", f"add efficiency: 0.4, for all devices or "
                            f"under devices: {device.name}:")
        if not peak:
            raise UserError(f"there is no peak of {device.name} in {precision}",
                            f"one of {', '.join(device.flops) or 'the types that the device has'}",
                            f"name its FLOP/s under devices: {device.name}: peak: in {given.path!r}, or change "
                            "--precision")
        if not self.workload.flops:
            raise UserError(f"operations of {self.workload.name} are not known: {self.workload.why}",
                            "a model whose operations are counted", "calibrate on such a device, or describe the model "
                            f"under model: in {given.path!r}")
        update_s = self.workload.update_bytes / device.bandwidth_Bps if device.bandwidth_Bps else 0.0
        line = LinearTime(given.overhead_s, max(LEAST_SLOPE_S, self.workload.flops / (peak * efficiency)))
        return RankRate(line, update_s, 0.0, f"{device.name} reaches {100 * efficiency:g} % of "
                        f"{peak / 1e12:g} TFLOPS ({precision})")

    def wiring(self, hosts: Sequence[Sequence[Device]]) -> Wiring:
        """Return the exchange among ranks on ``hosts``, the devices of each; `UserError` where a link is unknown."""
        most = max(len(host) for host in hosts)
        devices = [device for host in hosts for device in host]
        if len(devices) < 2:
            return Wiring("null", Link(0.0, 0.0), Link(0.0, 0.0), False)
        measured = self._measured({device.name for device in devices}, len(hosts) > 1)
        all_cpu = all(device.kind == "cpu" for device in devices)
        transport = self.collectives if self.collectives != "auto" else measured.transport if measured else (
            ("shared" if most > 1 else "mpi") if all_cpu else "horovod")
        said: list[str] = []
        links: list[Link | None] = [measured.within, measured.between] if measured else [None, None]
        if links[0] is None:
            links[0] = self._within(hosts, said) if most > 1 else Link(0.0, 0.0)
        if links[1] is None:
            links[1] = self._between(said) if len(hosts) > 1 else Link(0.0, 0.0)
        if said and self.assumptions is None:
            raise UserError(f"the links were not calibrated, which needs assumptions: {said[0]}",
                            "a calibration over these links, or --assume FILE",
                            "run the plan with --inventory here under mpirun on these hosts, or add --assume FILE")
        overlaps = measured.overlaps if measured else not all_cpu and (
            self.assumptions is None or self.assumptions.overlaps)
        if said and self.collectives == "auto":
            said.append(f"transport {transport}")
        assert links[0] is not None and links[1] is not None
        return Wiring(transport, links[0], links[1], overlaps, tuple(said), measured.late if measured else 0.0)

    def _measured(self, names: Collection[str], several: bool) -> Calibration | None:
        """Return the latest calibration whose links can be those among devices ``names``; None without one.

        A calibration of ``several`` hosts has all of its exchange in ``between``, so tells nothing of one host.
        """
        own = [c for c in self.calibrations if c.device in names and self.collectives in ("auto", c.transport)]
        over = [c for c in own if c.hosts > 1 and c.between is not None and near(
            c.between, (self.links.between_hosts_gbit or 0.0) * 1e9 / 8)]
        inside = [c for c in own if c.hosts == 1 and c.within is not None and near(
            c.within, (self.links.within_host_GBps or 0.0) * 1e9)]
        return next(reversed((over or inside) if several else inside), None)

    def _within(self, hosts: Sequence[Sequence[Device]], said: list[str]) -> Link:
        """Return the link of each rank inside its host; ``said`` gets the assumption."""
        given = self.assumptions or Assumptions()
        if self.links.within_host_GBps:
            each_Bps, source = 1e9 * self.links.within_host_GBps, "the inventory"
        else:
            known = [device.host_link_Bps for host in hosts if len(host) > 1 for device in host]
            each_Bps, source = min(known), "PCIe by the data sheet"
            if not each_Bps:
                raise UserError("the bandwidth within a host is not known", "within_host_GBps under links:",
                                "add it to the inventory, or calibrate there")
        said.append(f"within hosts {each_Bps * given.link_efficiency / 1e9:g} GB/s per rank ({source})")
        return Link(given.latency_s, 1 / (each_Bps * given.link_efficiency))

    def _between(self, said: list[str]) -> Link:
        given = self.assumptions or Assumptions()
        gbit = self.links.between_hosts_gbit
        if not gbit:
            raise UserError("the bandwidth between hosts is not known", "between_hosts_gbit under links:",
                            "add it to the inventory")
        said.append(f"between hosts {gbit * given.link_efficiency:g} Gbit/s per host (the inventory)")
        return Link(given.latency_s, 8 / (1e9 * gbit * given.link_efficiency))

    def codec(self, name: str, devices: Sequence[Device]) -> tuple[CodecCost, str]:
        """Return (cost, assumption or "") of a compressor; `UserError` if unknown."""
        if name == "none":
            return CodecCost(0.0, 1.0), ""
        own = next((c for c in reversed(self.calibrations) if name in c.codecs), None)
        if own is not None and all(device.name == own.device for device in devices):
            return own.codecs[name], ""
        if name in CASTS and self.assumptions is not None:
            slowest = min(device.bandwidth_Bps for device in devices)
            seconds = 3 * self.workload.gradient_bytes / slowest if slowest else 0.0  # read, write, read back
            return CodecCost(seconds, CASTS[name]), f"{name} costs what its memory traffic does"
        raise UserError(f"compression {name} was not calibrated", "a calibration on these devices",
                        "run the plan with --inventory here there")
