"""A PyTorch model that is built in parts: its outline, the tape of its builder, blocks with the bits of the whole."""

from __future__ import annotations

import random
import threading
import weakref

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
import split_models  # noqa: E402
from small_runs import HIDDEN, config  # noqa: E402
from split_models import Chain, deep, tied  # noqa: E402
from torch import nn  # noqa: E402
from torch_tools import one_thread  # noqa: E402,F401

from hvdtrain.backends.model_spec import Spec  # noqa: E402
from hvdtrain.backends.torch import blocks  # noqa: E402
from hvdtrain.backends.torch.maker import build_lazy  # noqa: E402
from hvdtrain.backends.torch.pipelined import create  # noqa: E402
from hvdtrain.backends.torch.pipelined.outline import outline, source_of  # noqa: E402
from hvdtrain.backends.torch.pipelined.tape import Inexact, Tape  # noqa: E402
from hvdtrain.cluster.control import agreed  # noqa: E402
from hvdtrain.comm.collectives.lockstep import LockstepWorld  # noqa: E402
from hvdtrain.config import PipelineConfig  # noqa: E402
from hvdtrain.core import rng  # noqa: E402
from hvdtrain.core.errors import UserError  # noqa: E402
from hvdtrain.core.mesh import Mesh  # noqa: E402
from hvdtrain.parallel.precision import FP32  # noqa: E402


def initialised(seed=0):
    """Layers and initialisers of PyTorch's own, some that look at what they draw, tables, ties and numbers of numpy."""
    model = nn.Sequential(nn.Linear(30, 40), nn.LSTM(40, 50, 2), nn.TransformerEncoderLayer(32, 4), nn.BatchNorm1d(5),
                          nn.Embedding(10, 6, padding_idx=2), nn.Linear(6, 10))
    nn.init.trunc_normal_(model[0].weight, std=0.02)
    nn.init.orthogonal_(model[4].weight)
    model[0].bias.data.copy_(torch.tensor([0.5] * 40))
    model[3].register_buffer("mask", torch.tril(torch.ones(5, 5)).bool())
    model[3].register_buffer("waves", torch.sin(torch.arange(10.0)[:, None] * torch.exp(torch.arange(0, 4.0) * -2)))
    model[3].register_buffer("drawn", torch.from_numpy(np.random.rand(3)) * random.random())
    model.apply(lambda m: nn.init.xavier_uniform_(m.weight) if isinstance(m, nn.Linear) else None)
    nn.utils.parametrizations.weight_norm(model[0])
    model[3](torch.randn(6, 5))  # statistics of a forward pass
    model[5].weight = model[4].weight
    return model


def seeded(make):
    """``make`` with all generators at one place."""
    def made():
        rng.seed(5, 0)
        torch.manual_seed(5)
        return make()
    return made


def outlined(make):
    """Return the outline of what ``make`` builds from the same place."""
    return seeded(lambda: None)() or outline(make)


def gpt():
    import torch_models.gpt

    return torch_models.gpt.build(vocab=20, context=8, width=16, depth=2, heads=2)


def resnet():
    import torch_models.resnet

    return torch_models.resnet.build(width=4, depth=1, norm="batch")


def tensors(model):
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@pytest.mark.parametrize("make", [initialised, gpt, resnet, deep], ids=lambda make: make.__name__)
def test_parts_of_a_model_have_the_bits_of_all_of_it(make):
    whole, model = tensors(seeded(make)()), outlined(make)
    tape, named = source_of(model), tensors(model)
    assert tape is not None and sum(t.nbytes for t in named.values() if not t.is_meta) < 100
    drawn = torch.get_rng_state()
    names = list(named)
    for some in (names, names[len(names) // 2:], names[-1:], names[1::3]):
        found = tape.fill([named[name] for name in some])
        for name in some:
            got = found[id(named[name])]
            assert got.dtype == whole[name].dtype and torch.equal(got, whole[name])
    assert torch.equal(drawn, torch.get_rng_state())


def forks():
    first = nn.Linear(3, 3)
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return nn.Sequential(first, nn.Linear(3, 3))


def keeps():
    kept = torch.get_rng_state()
    first = nn.Linear(3, 3)
    torch.set_rng_state(kept)
    return nn.Sequential(first, nn.Linear(3, 3))


def looks():
    model = nn.Linear(3, 3)
    if model.weight.sum() > 0:
        model.weight.data.neg_()
    return model


def own_generator():
    model = nn.Linear(3, 3)
    model.weight.data.normal_(generator=torch.Generator().manual_seed(1))
    return model


def left_empty():
    model = nn.Linear(3, 3)
    model.weight = nn.Parameter(torch.empty(3, 3))
    return model


@pytest.mark.parametrize("make", [forks, keeps, looks, own_generator, left_empty], ids=lambda make: make.__name__)
def test_what_might_come_out_otherwise_is_not_built_in_parts(make):
    model = outlined(make)
    assert all(p.is_meta for p in model.parameters())
    tape = source_of(model)
    if tape is not None:
        with pytest.raises(Inexact):
            tape.fill(list(model.parameters()))
    else:
        with pytest.raises((Inexact, RuntimeError)), Tape().recording():
            make()


# --- the parts of a run ----------------------------------------------------------------------------------------------

class Counts(nn.Linear):
    """Counts its calls, in a buffer, in an attribute and in BatchNorm's statistics."""

    def __init__(self) -> None:
        super().__init__(HIDDEN, HIDDEN)
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("mean", torch.zeros(HIDDEN))
        self.norm, self.calls = nn.BatchNorm1d(HIDDEN), 0

    def forward(self, x):
        self.calls, self.seen, self.mean = self.calls + 1, self.seen + 1, 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return super().forward(self.norm(x))


class Between(Chain):
    """Does something between its blocks that the outputs of most inputs do not show."""

    def forward(self, x):
        x = self.first(x)
        return self.head(self.third(self.second(x.clamp(max=1e6))))


def asks_where(model, batch):
    where = next(model.parameters()).device
    loss = nn.functional.cross_entropy(model(batch[0].to(where)), batch[1].to(where), reduction="sum")
    return loss, len(batch[1])


ONE_AT_A_TIME = threading.Lock()


def measured_in_turn(control, work, what):
    """As `agreed`, for ranks that are threads and share one generator: none may draw while another measures."""
    def alone():
        with ONE_AT_A_TIME:
            return work()

    return agreed(control, alone if what.startswith("measuring") else work, what)


def parts_of(models, task=None, again=None, cut=("third",), control_wire=None):
    """Each rank's tensors by name, of two ranks over ``models``."""
    settings = config(global_batch=8, shares=[], pipeline=PipelineConfig(2, cut=list(cut)))

    def rank(control, wire):
        spec = Spec("m", models[control.rank], "torch", task=task, blocks=split_models.blocks,
                    example=split_models.example, again=again)
        parts = create.make_parts(spec, settings, control, wire, 1, FP32, spec.example, Mesh.of([2], control.rank))
        assert parts.model is spec.model
        assert all(module.calls == 0 for module in parts.model.modules() if isinstance(module, Counts))
        return {name: t.detach().clone() for name, t in tensors(parts.model).items()}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(create, "agreed", measured_in_turn)
        return LockstepWorld(2).run(rank)


@pytest.mark.parametrize(("make", "task", "whole"), [
    (deep, None, 0), (lambda: deep(kind=Between), None, 2), (tied, None, 0), (lambda: deep(kind=looking), None, 2),
    (deep, asks_where, 2), (lambda: deep(counts=Counts()), None, 0)],
    ids=["in parts", "between", "tied", "looks", "asks where", "counts"])
def test_a_rank_gets_its_blocks_and_builds_a_model_whole_only_where_it_must(make, task, whole):
    built = []

    def again():
        built.append(seeded(make)())
        return built[-1]

    want = tensors(seeded(make)())
    found = parts_of([outlined(make) for _ in range(2)], task, again, ["head"] if make is tied else ["third"])
    assert not set(found[0]) & set(found[1]) and set(found[0]) | set(found[1]) == set(want)
    for name, tensor in {**found[0], **found[1]}.items():
        assert torch.equal(tensor, want[name])
    assert len(built) == 2 * whole


@pytest.mark.parametrize("make", [deep, lambda: deep(kind=Between)], ids=["in parts", "whole"])
def test_blocks_are_measured_with_fewer_samples_where_memory_lacks(make, monkeypatch):
    measure, agree, tried, planned = blocks.measure, create.agree, [], []

    def short(named, x, device, came=None):
        tried.append(len(x))
        if len(x) > 2:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory (of a test)")
        return measure(named, x, device, came)

    monkeypatch.setattr(blocks, "measure", short)
    monkeypatch.setattr(create, "measured_samples", lambda *_: 4)
    monkeypatch.setattr(create, "agree", lambda found, *args: (planned.append(found), agree(found, *args))[1])
    parts_of([outlined(make) for _ in range(2)], None, seeded(make), ["third"])
    assert set(tried) == {4, 2}
    assert all(found.samples == 4 and "out of memory with 4 samples" in found.why for found in planned)


def test_lazy_layers_have_the_weights_that_one_process_gives_them():
    def lazy():
        return deep(lazy=nn.LazyLinear(HIDDEN))

    whole = seeded(lazy)()
    torch.manual_seed(0)
    build_lazy(whole, Spec("m", whole, "torch"), split_models.example)
    found = parts_of([outlined(lazy) for _ in range(2)], again=seeded(lazy), cut=["second"])
    assert all(torch.equal({**found[0], **found[1]}[name], want) for name, want in tensors(whole).items())


def looking(**named):
    model = Chain(**named)
    assert model.head.weight.abs().sum() > 0
    return model


def test_no_block_is_in_memory_while_another_is_measured(monkeypatch):
    """The bytes of all of a model's tensors with values at each forward pass of a block."""
    model = outlined(lambda: nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))))
    held, alive = [], []
    real = nn.Linear.forward

    def forward(self, x):
        if not x.is_meta:
            alive[:] = [ref for ref in alive if ref() is not None]
            if not any(ref() is self for ref in alive):
                alive.append(weakref.ref(self))
            held.append(len(alive))
        return real(self, x)

    monkeypatch.setattr(nn.Linear, "forward", forward)
    spec = Spec("m", model, "torch", again=lambda: pytest.fail("it was built whole"))

    def rank(control, wire):
        create.make_parts(spec, config(global_batch=8, shares=[], pipeline=PipelineConfig(1, depths=[1])), control,
                          wire, 1,
                          FP32, lambda n: (np.zeros((n, 64), np.float32), np.zeros((n, 64), np.float32)),
                          Mesh.of([1], 0))

    LockstepWorld(1).run(rank)
    assert held and max(held) == 1


# --- a file that builds blocks ---------------------------------------------------------------------------------------

def names():
    return ["first", "second", "third", "head"]


def one_block(name, seed=0):
    torch.manual_seed(names().index(name) + 10 * seed)
    return getattr(split_models.Chain(**{n: getattr(deep(seed), n) for n in names()}), name)


def drifting(name):
    drawn = torch.rand(3)
    block = one_block(name)
    block.register_buffer("drift", drawn)
    return block


def test_a_file_that_builds_blocks_is_asked_for_a_ranks_own_alone():
    built = []

    def build_block(name):
        built.append(name)
        return one_block(name)

    models = [outline(lambda: looks() and deep(), names, build_block) for _ in range(2)]
    assert built == names() * 2 and source_of(models[0]) is not None
    found = parts_of(models, again=lambda: pytest.fail("it was built whole"))
    assert sorted(built) == sorted(names() * 5)
    for name in names():
        for key, want in one_block(name).named_parameters():
            assert torch.equal({**found[0], **found[1]}[f"{name}.{key}"], want)


def test_blocks_whose_weights_depend_on_what_was_drawn_before_are_not_taken_apart():
    models = [outline(lambda: looks() and deep(), names, drifting) for _ in range(2)]
    again = []
    parts_of(models, again=lambda: again.append(0) or deep())
    assert len(again) == 4
    with pytest.raises(UserError, match="block_names gives"):
        outline(looks, lambda: ["a", "a"], one_block)
