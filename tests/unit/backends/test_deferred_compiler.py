"""Processes that compile nothing do without the import of PyTorch's compiler."""

import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.slow

SCRIPT = """
import sys
import torch
from hvdtrain import Config, Trainer
from hvdtrain.backends.torch.placement import defer_compiler

x, y = torch.arange(48.0).reshape(12, 4).sin(), torch.arange(12) % 3
run = Trainer(Config(epochs=1, global_batch=4, progress="off", out="run"))
run.fit(torch.nn.Linear(4, 3), ((x.numpy(), y.numpy()), (x.numpy(), y.numpy())))
defer_compiler()  # a second call changes nothing


def train(kind, compiled):
    torch.manual_seed(0)
    one, other = torch.nn.Linear(4, 3), torch.nn.Linear(3, 3)
    optimizer = kind(one.parameters(), lr=0.01)
    optimizer.add_param_group({"params": list(other.parameters())})
    update = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
    for _ in range(3):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(other(one(x)), y).backward()
        update()
    optimizer.load_state_dict(optimizer.state_dict())
    assert torch.is_grad_enabled()
    return [*one.parameters(), *other.parameters()]


kinds = [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad]
plain = [train(kind, False) for kind in kinds]
assert "torch._dynamo" not in sys.modules and "sympy" not in sys.modules
for kind, expected in zip(kinds, plain):
    assert all(map(torch.equal, train(kind, False), expected))
    for got, wanted in zip(train(kind, True), expected):
        torch.testing.assert_close(got, wanted)
assert "torch._dynamo" in sys.modules
x.requires_grad_()
optimizer = torch.optim.SGD([x], lr=0.1, differentiable=True)
x.sum().backward()
assert torch.equal(torch.compile(lambda: optimizer.zero_grad(), backend="eager")() or x.detach(), x)
assert x.grad is None  # inside of compiled code, too
"""


def test_a_run_and_optimizers_do_not_import_the_compiler(tmp_path):
    """Only `torch.compile` imports it; results are the same before, after and in compiled code."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
