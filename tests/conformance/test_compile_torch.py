"""compile auto in PyTorch: what is compiled and what is left, that a run goes on alike, and that nothing stays behind.

The compiler is PyTorch's without code generation, which takes the same ways through this package; the one test with
real code says so.
"""

import copy
import pickle
import shutil
import time

import numpy as np
import pytest
from small_runs import apart, bits, config, fitted, solo, weights

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
from torch import nn  # noqa: E402

from hvdtrain.backends.torch.transforms import compile as transform  # noqa: E402
from hvdtrain.engine.callbacks import auto_compile as timing  # noqa: E402


class Drops(nn.Module):
    """Linear, BatchNorm, ReLU, dropout."""

    def __init__(self, n_in, n_out):
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(n_in, n_out), nn.BatchNorm1d(n_out), nn.Dropout(0.3)

    def forward(self, x):
        return self.drop(torch.relu(self.norm(self.linear(x))))


def make(*blocks):
    torch.manual_seed(3)
    return nn.Sequential(*(blocks or (Drops(12, 16), Drops(16, 16), nn.Linear(16, 5))))


def data(n=40):
    draw = np.random.default_rng(n)
    return draw.standard_normal((n, 12)).astype(np.float32), draw.integers(0, 5, n)


def settings(**more):
    return config(global_batch=16, max_steps=4, compile="auto", **more)


@pytest.fixture
def graphs(monkeypatch):
    """Collect the compiled graphs in order, by a compiler without code generation; the machine has a compiler."""
    torch._dynamo.reset()
    made = []

    def backend(graph, inputs):
        made.append(graph)
        return aot_eager(graph, inputs)

    from torch._dynamo.backends.debugging import aot_eager

    monkeypatch.setattr(transform, "compiled", lambda function: torch.compile(function, backend=backend))
    monkeypatch.setattr(transform, "missing", lambda kind: "")
    yield made
    torch._dynamo.reset()


@pytest.fixture
def faster(monkeypatch):
    """Every option that works is measured as faster."""
    measure = timing._turns

    def turns(base, option, work):
        measure(base, option, work)
        return (1.0, 1.0), (0.5, 0.5)

    monkeypatch.setattr(timing, "TURNS", 1)
    monkeypatch.setattr(timing, "TIMED_S", 0.0)
    monkeypatch.setattr(timing, "_turns", turns)


def noted(run, words):
    assert any(words in note for note in run.notes), run.notes


def test_a_compiled_run_goes_on_as_the_plain_one_and_gives_the_model_back(graphs, faster):
    model = make()
    before = (list(model.state_dict()), [type(m) for m in model.modules()])
    run = solo(settings(), model, data())
    fitted(run)
    noted(run, "compiled is used: a micro-batch takes ")
    assert run.parts.compile.chosen == ("compiled",) and run.parts.describe()["compile"] == "compiled"
    plain = fitted(solo(config(global_batch=16, max_steps=4), make(), data()))
    assert apart(weights(run), weights(plain)) < 1e-5  # the same masks: only sums may round otherwise
    assert (list(model.state_dict()), [type(m) for m in model.modules()]) == before
    assert not any("forward" in vars(m) for m in model.modules())
    assert len(graphs) == 2  # of either block one, the last layer is left; nothing more in the short last step


def test_an_option_that_is_not_faster_leaves_nothing_behind(graphs, monkeypatch):
    monkeypatch.setattr(timing, "_turns", lambda base, option, work: (option(), work(), ((1.0,), (1.0,)))[2])
    run = fitted(solo(settings(), make(), data()))
    noted(run, "compiled is left: a micro-batch takes 1e+03 ms without and 1e+03 ms with it, 1.00")
    assert bits(run) == bits(fitted(solo(config(global_batch=16, max_steps=4), make(), data())))


def test_copies_and_pickles_of_a_model_in_training_are_plain(graphs, faster):
    model = make()
    run = solo(settings(), model, data())
    run.parts.compile.use(["compiled"])
    run.parts.compile.prepare(lambda: run.parts.stage.trial(run.feed.sample(16)), time.monotonic() + 60)
    assert isinstance(vars(model[0])["forward"], transform.Forward)
    x = torch.ones(4, 12)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not any(isinstance(vars(m).get("forward"), transform.Forward) for m in other.modules())
        with torch.no_grad():
            for block in other:  # its own weights, not the original's
                for parameter in block.parameters():
                    parameter.zero_()
            assert float(other.eval()(x).abs().sum()) == 0.0
    assert float(model.eval()(x).detach().abs().sum()) > 0.0
    run.leave()
    assert "forward" not in vars(model[0])


def test_other_sizes_and_evaluation_compute_as_they_were_written(graphs):
    model = make()
    run = solo(settings(), model, data())
    compile = run.parts.compile
    compile.use(["compiled"])
    compile.prepare(lambda: run.parts.stage.trial(run.feed.sample(16)), time.monotonic() + 60)
    made = len(graphs)
    for n in (16, 7, 3, 1 + 4):
        run.parts.stage.trial(run.feed.sample(n))
    run.parts.evaluator.add(run.feed.sample(9))
    assert len(graphs) == made == 2
    compile.prepare(lambda: run.parts.stage.trial(run.feed.sample(9)), time.monotonic() + 60)
    assert len(graphs) == 4  # a second size: code for any
    compile.prepare(lambda: run.parts.stage.trial(run.feed.sample(11)), time.monotonic() + 60)
    assert len(graphs) == 4
    run.leave()


def test_a_block_that_does_not_compile_is_named_and_left(graphs, faster, monkeypatch):
    usual = transform.compiled

    def some(function):
        if function.__self__.linear.in_features == 12:
            raise RuntimeError("no such instruction\nand much more")
        return usual(function)

    monkeypatch.setattr(transform, "compiled", some)
    run = fitted(solo(settings(), make(), data()))
    noted(run, "not compiled: 0 (RuntimeError: no such instruction)")
    assert run.state.cursor.step == 4


def test_without_a_compiler_or_with_none_of_the_blocks_compiled_training_goes_on(graphs, monkeypatch):
    monkeypatch.setattr(transform, "missing", lambda kind: "there is no C++ compiler here")
    noted(fitted(solo(settings(), make(), data())), "compiled is left: there is no C++ compiler here")

    def broken(function):
        raise OSError("disk full")

    monkeypatch.setattr(transform, "missing", lambda kind: "")
    monkeypatch.setattr(transform, "compiled", broken)
    run = fitted(solo(settings(), make(), data()))
    noted(run, "compiled is left: RuntimeError: no block was compiled: 0, 1 (OSError: disk full)")
    assert run.state.cursor.step == 4


def test_a_compiler_that_takes_too_long_is_interrupted(graphs, faster, monkeypatch):
    def slow(function):
        time.sleep(60)

    monkeypatch.setattr(transform, "compiled", slow)
    monkeypatch.setattr(timing, "COMPILE_S", 0.3)
    begin = time.monotonic()
    run = fitted(solo(settings(), make(), data()))
    assert time.monotonic() - begin < 30
    noted(run, f"no block was compiled: 0, 1 ({transform.NO_TIME})")


def test_a_resumed_run_keeps_the_choice(graphs, faster):
    run = solo(settings(), make(), data())
    auto = next(c for c in run.callbacks if type(c).__name__ == "AutoCompile")
    fitted(run)
    state = auto.state_dict()
    assert list(state["chosen"].values()) == [["compiled"]]
    again = solo(settings(), make(), data())
    next(c for c in again.callbacks if type(c).__name__ == "AutoCompile").load_state_dict(state)
    fitted(again)
    noted(again, "compile auto: compiled, as decided before")
    assert bits(again) == bits(run)


class Image(nn.Module):
    """Two convolutions on (B, 12) as (B, 3, 2, 2)."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 1), nn.Linear(32, 5)
        self.layouts = []

    def forward(self, x):
        x = torch.relu(self.first(x.reshape(-1, 3, 2, 2)))
        x = self.second(x)
        self.layouts.append(x.is_contiguous(memory_format=torch.channels_last))
        return self.head(x.flatten(1))


def test_convolutions_in_channels_last_keep_weights_and_their_layout(faster, monkeypatch):
    monkeypatch.setattr(transform, "missing", lambda kind: "no compiler")
    torch.manual_seed(5)
    model = Image()
    run = fitted(solo(settings(), model, data()))
    noted(run, "channels_last is used: ")
    assert run.parts.describe()["compile"] == "channels_last" and model.layouts[-1]
    assert all(p.is_contiguous() for p in model.parameters())
    assert not any(m._forward_pre_hooks for m in model.modules())
    torch.manual_seed(5)
    plain = fitted(solo(config(global_batch=16, max_steps=4), Image(), data()))
    assert apart(weights(run), weights(plain)) < 1e-5


def test_blocks_are_the_named_ones_or_parts_with_parts_or_the_model():
    inner = nn.Sequential(Drops(2, 2), Drops(2, 2))
    model = nn.Module()
    model.stem, model.stages, model.head = nn.Linear(2, 2), nn.ModuleList([inner, Drops(2, 2)]), Drops(2, 2)
    found = transform.units(model, [])
    assert [name for name, _ in found] == ["stages.0.0", "stages.0.1", "stages.1", "head"]
    assert transform.units(model, [("a", inner), ("b", model.stem)]) == [("a", inner)]
    alone = Image()
    assert transform.units(alone, []) == [("the model", alone)]


def test_blocks_that_are_left_say_why():
    norm = Drops(2, 2)
    assert "wait" in transform.refusal(norm, waits=True) and not transform.refusal(norm, waits=False)
    own = nn.Linear(2, 2)
    own.compile()
    assert transform.refusal(nn.Sequential(own), False) == "already compiled by the user"
    assert "computes nothing" in transform.refusal(nn.ModuleList([own]), False)
    left = dict.fromkeys("abcd", "x") | {"e": "", "f": "y"}
    assert transform.grouped(left) == "a, b, c and 1 more (x); f (y)"


def test_the_folder_of_compiled_code_is_the_users_own(monkeypatch, tmp_path):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    first = transform.own_folder()
    assert first.startswith(str(tmp_path)) and (tmp_path / first).stat().st_mode & 0o077 == 0
    (tmp_path / first).chmod(0o777)  # anybody could have put code there
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    assert transform.own_folder() != first
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")
    assert transform.own_folder() == "/elsewhere"


@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="no C++ compiler is here")
def test_real_code_draws_the_same_masks(faster, monkeypatch, tmp_path):
    torch._dynamo.reset()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "0")  # PyTorch sets it for what it has compiled
    block = nn.Sequential(nn.Linear(12, 5), nn.GELU(), nn.Dropout(0.5))
    monkeypatch.setattr(transform, "units", lambda model, named: [("0", model[0])])
    run = fitted(solo(settings(control_timeout_s=300.0), make(copy.deepcopy(block)), data()))
    noted(run, "compiled is used: ")
    after = torch.get_rng_state()
    plain = fitted(solo(config(global_batch=16, max_steps=4), make(copy.deepcopy(block)), data()))
    assert 0 <= apart(weights(run), weights(plain)) < 1e-5
    assert torch.equal(after, torch.get_rng_state())
