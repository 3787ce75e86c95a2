"""PyTorch scripts to Trainer (DDP, DataParallel, horovod.torch, Accelerate): removed lines, decisions, new code."""

import pytest

from hvdtrain.commands.migrate.finding import MigrateOptions
from hvdtrain.commands.migrate.plan import Migration, migrate, of_text
from hvdtrain.config import Config, DataConfig, ExchangeConfig, Named, ScheduleConfig  # noqa: F401


def looked(text: str, kind: str, ranks: int = 1) -> Migration:
    compile(text, kind, "exec")
    found = migrate(of_text(text), MigrateOptions("trainer", ranks))
    assert found.kind == kind and found.after.decode() == text
    compile(found.snippet, "snippet", "exec")
    return found


def told(found: Migration) -> str:
    return "\n".join(f"{f.line} {f.what}" for f in found.findings if f.kind == "by hand")


DDP = '''import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

EPOCHS = 3


def main():
    dist.init_process_group("gloo")
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    sampler = DistributedSampler(train)
    tests = DataLoader(test, batch_size=99)
    loader = DataLoader(train, batch_size=16, sampler=sampler, num_workers=2)
    model = nn.Linear(4, 3).to(device)
    model = DDP(model, device_ids=[local_rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * dist.get_world_size(), momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(loader):
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "model.pt")
    dist.destroy_process_group()


main()
'''


def test_ddp():
    found = looked(DDP, "ddp", 4)
    assert found.snippet == '''from hvdtrain import Config, Trainer
from hvdtrain.config import Named

trainer = Trainer(Config(
    epochs=EPOCHS,
    global_batch=64,
    lr=...,
    optimizer=Named("SGD", {"momentum": 0.9}),
    loss=Named("cross_entropy"),
    clip_norm=1.0,
))
trainer.fit(model, (train, test))'''
    assert "14 removed: dist.init_process_group (line 14), DistributedSampler (line 17), DDP (line 21)" in told(found)
    assert "dist.destroy_process_group (line 35)" in told(found) and "get_rank" not in told(found)
    assert "30 Trainer runs the training loop" in told(found) and "of one process" not in told(found)


def test_the_batch_of_one_process_is_reported():
    found = looked(DDP, "ddp")
    assert "    global_batch=16,\n" in found.snippet
    assert "19 global_batch is that of one process in the code below" in told(found)


@pytest.mark.parametrize("loop, epochs", [
    ("range(args.epochs)", "args.epochs"), ("range(0, n)", "..."), ("itertools.count()", "...")])
def test_epochs_are_read_from_a_plain_range_around_the_batches(loop, epochs):
    text = DDP.replace("range(EPOCHS)", loop)
    assert f"\n    epochs={epochs},\n" in looked(text, "ddp").snippet
    steps = text.replace("        for i, (x, y) in enumerate(loader):\n", "        if True:\n")
    assert "\n    epochs=...,\n" in looked(steps, "ddp").snippet, "a single loop may be that of steps"


@pytest.mark.parametrize("size, ranks, batch", [
    ("16", 4, "64"), ("args.batch", 4, "args.batch * 4"), ("TOTAL // dist.get_world_size()", 4, "..."),
    ("a + b", 4, "(a + b) * 4")])
def test_the_batch_is_that_of_all_processes(size, ranks, batch):
    found = looked(DDP.replace("batch_size=16", f"batch_size={size}"), "ddp", ranks)
    assert f"\n    global_batch={batch},\n" in found.snippet and "global_batch is that" not in told(found)


def test_a_loader_in_order_and_losses_of_two_names():
    text = DDP.replace("sampler=sampler", "shuffle=False").replace(
        "    criterion =", "    other = nn.MSELoss()\n    criterion =")
    snippet = looked(text, "ddp").snippet
    assert "data=DataConfig(shuffle=False)," in snippet and 'loss=Named("..."),' in snippet


def test_several_loaders_leave_the_batch_open():
    other = DDP.replace("    tests = ", "    more = DataLoader(extra, batch_size=8)\n    tests = ")
    assert "\n    global_batch=...,\n" in looked(other, "ddp").snippet


@pytest.mark.parametrize("rate, after", [
    ("args.lr * dist.get_world_size()", "...,"), ("args.lr * scaler", "...,"), ("args.lr", "args.lr,")])
def test_a_rate_that_grows_with_the_processes(rate, after):
    text = DDP.replace("0.1 * dist.get_world_size()", rate).replace(
        "    criterion =", "    scaler = dist.get_world_size() if big else 1\n    criterion =")
    found = looked(text, "ddp", 4)
    assert f"\n    lr={after}" in found.snippet
    assert ("..." in after) == ("depends on the number of processes" in told(found))
    assert any("learning rate is" in f.what for f in found.findings) == ("*" in rate)


@pytest.mark.parametrize("groups, after", [
    ('[{"params": model.parameters(), "lr": args.lr}]', "..."), ("[{'params': net, 'lr': 1.0}]", "..."),
    ("groups", "..."), ("model.parameters()", "0.001")])
def test_a_rate_of_a_group_is_not_taken_for_the_usual_one(groups, after):
    text = DDP.replace("SGD(model.parameters(), lr=0.1 * dist.get_world_size(), momentum=0.9)", f"Adam({groups})")
    assert text != DDP and f"\n    lr={after},\n" in looked(text, "ddp").snippet


@pytest.mark.parametrize("line", [
    "s = torch.optim.lr_scheduler.LambdaLR(optimizer, f)", "s = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)",
])
def test_a_schedule_is_reported(line):
    found = looked(DDP.replace("    criterion =", f"    {line}\n    criterion ="), "ddp")
    assert "the rate follows" in told(found)
    assert "schedule=" not in found.snippet and not [f for f in looked(DDP, "ddp").findings if "the rate f" in f.what]


@pytest.mark.parametrize("old, new, named", [
    ("nn.CrossEntropyLoss()", "nn.CrossEntropyLoss(weight=w)", "the loss is"),
    ("model.parameters(), lr", "groups, lr", "the optimizer is of groups"),
    ("lr=0.1 * dist.get_world_size(), momentum=0.9", "0.1, 0.9", "has no name: 0.9"),
    ("lr=0.1 * dist.get_world_size(), momentum=0.9", "**options", "has no name: **options"),
    ("num_workers=2", "collate_fn=pad", "the loader has collate_fn=pad"),
    ("sampler=sampler", "sampler=WeightedSampler(w)", "the loader has sampler=WeightedSampler(w)"),
    ("            loss.backward()", "            with model.no_sync():\n                loss.backward()", "no_sync()"),
    ("nn.utils.clip_grad_norm_", "nn.utils.clip_grad_value_", "clipped by value"),
    ("    criterion =", "    other = torch.optim.Adam(model.parameters())\n    criterion =", "2 optimizers are made"),
    ("    sampler =", "    amp = torch.amp.GradScaler(enabled=args.amp)\n    sampler =", "sets the compute type"),
])
def test_what_has_to_be_decided_is_told(old, new, named):
    text = DDP.replace(old, new)
    assert text != DDP and named in told(looked(text, "ddp", 2)) and named not in told(looked(DDP, "ddp", 2))


def test_synchronized_batchnorm_has_a_key():
    made = "    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)\n    model = DDP("
    text = DDP.replace("    model = DDP(", made)
    assert "sync_batchnorm=True" in looked(text, "ddp").snippet


def test_names_that_are_taken_are_not_taken_again():
    snippet = looked("class Trainer:\n    pass\n\n\ntrainer = Trainer()\n" + DDP, "ddp").snippet
    assert "from hvdtrain import Config, Trainer as HvdTrainer\n" in snippet
    assert "\nhvd_trainer = HvdTrainer(Config(\n" in snippet
    assert snippet.endswith("hvd_trainer.fit(model, (train, test))")


def test_data_parallel_has_the_global_batch_already():
    found = looked('''import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

net = torch.nn.DataParallel(torch.nn.Linear(4, 1))
opt = torch.optim.Adam(net.parameters())
for epoch in range(1, 2 + 1):
    for x, y in DataLoader(data, 32):
        loss = F.mse_loss(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
torch.save(net.module.state_dict(), "m.pt")
''', "data_parallel", 4)
    assert found.snippet == '''from hvdtrain import Config, Trainer
from hvdtrain.config import DataConfig, Named

trainer = Trainer(Config(
    epochs=...,
    global_batch=32,
    data=DataConfig(shuffle=False),
    lr=0.001,
    optimizer=Named("Adam"),
    loss=Named("mse_loss"),
    metrics=[],
))
trainer.fit(net, data)'''


HOROVOD = '''import torch
import torch.nn.functional as F
import torch.optim as optim
import horovod
import horovod.torch as hvd
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

hvd.init()
loader = DataLoader(train, batch_size=BATCH, sampler=DistributedSampler(train, num_replicas=hvd.size()))
model = Net()
optimizer = optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.5)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(),
                                     compression=hvd.Compression.fp16)
for epoch in range(args.epochs):
    for data, target in loader:
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
'''


@pytest.mark.parametrize("new, parts, named", [
    ("compression=hvd.Compression.fp16", ["global_batch=BATCH * 2,", 'compression="fp16"'], ""),
    ("compression=hvd.Compression.none", ["global_batch=BATCH * 2,"], ""),
    ("compression=hvd.Compression.fp16 if args.fp16 else hvd.Compression.none", [], "has compression="),
    ("backward_passes_per_step=3", [], "has backward_passes_per_step=3"),
    ("op=hvd.Adasum", ["exchange=ExchangeConfig(adasum=True),", "import ExchangeConfig, Named\n"], ""),
    ("op=hvd.Average", [], ""), ("op=hvd.Sum", [], "DistributedOptimizer has op=hvd.Sum"),
])
def test_horovod_torch(new, parts, named):
    found = looked(HOROVOD.replace("compression=hvd.Compression.fp16", new), "horovod_torch", 2)
    assert all(part in found.snippet for part in ["epochs=args.epochs,", 'loss=Named("nll_loss"),', *parts])
    assert named in told(found)
    assert ("DistributedOptimizer has" in told(found)) == bool(named) and ("compression=" in found.snippet) == (
        "fp16" in new and not named)


ACCELERATE = '''import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader

accelerator = Accelerator(mixed_precision="bf16")
loader = DataLoader(data, batch_size=32, shuffle=True)
model = torch.nn.Linear(4, 3)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
moves = torch.optim.lr_scheduler.StepLR(optimizer, 9)
model, optimizer, loader, moves = accelerator.prepare(model, optimizer, loader, moves)
for epoch in range(2):
    for batch in loader:
        x, y = batch
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
        accelerator.backward(loss)
        optimizer.step()
        moves.step()
'''


@pytest.mark.parametrize("new, parts, named", [
    ('mixed_precision="bf16"', ['precision="bf16",', "global_batch=128,", '"label_smoothing": 0.1'], ""),
    ('mixed_precision="no", split_batches=True', ["global_batch=32,"], ""),
    ("mixed_precision=args.mixed_precision", [], "the Accelerator has mixed_precision="),
    ("gradient_accumulation_steps=2", ["global_batch=128,"], "the Accelerator has gradient_accumulation_steps=2"),
    ("fsdp_plugin=plugin", [], "the Accelerator has fsdp_plugin=plugin"),
])
def test_accelerate(new, parts, named):
    found = looked(ACCELERATE.replace('mixed_precision="bf16"', new), "accelerate", 4)
    assert all(part in found.snippet for part in parts) and named in told(found)
    assert ("the Accelerator has" in told(found)) == bool(named) and "the rate follows" in told(found)
    assert "6 removed: Accelerator (line 6), accelerator.prepare (line 11)\n" in told(found)
    assert not [f for f in found.findings if "mixed_precision" in f.what and "accumulate" in f.do]


def test_an_accelerators_clipping_has_a_key():
    found = looked(ACCELERATE.replace("        optimizer.step()", "        accelerator.clip_grad_norm_("
                                      "model.parameters(), 0.5)\n        optimizer.step()"), "accelerate")
    assert "\n    clip_norm=0.5,\n" in found.snippet
