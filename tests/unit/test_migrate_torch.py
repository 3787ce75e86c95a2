"""PyTorch scripts (DDP, DataParallel, horovod.torch, Accelerate) to Trainer, where their loop is the standard one."""

import pytest

from hvdtrain.migrate.plan import Migration, migrate
from hvdtrain.migrate.rules import Wish
from hvdtrain.migrate.source import of_text


def moved(text: str, kind: str, ranks: int = 1) -> Migration:
    found = migrate(of_text(text), Wish("auto", ranks))
    assert found.kind == kind
    again = migrate(of_text(found.after.decode()), Wish("auto", ranks))
    assert again.after == found.after
    return found


DDP = '''"""DDP."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

EPOCHS = 3


def main():
    # Processes.
    dist.init_process_group("gloo")
    rank, world_size = 0, 0
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)

    # Data.
    dataset = TensorDataset(torch.randn(64, 4), torch.randint(0, 3, (64,)))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler, num_workers=2)

    model = nn.Linear(4, 3).to(device)  # the model
    model = DDP(model, device_ids=[local_rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * dist.get_world_size(), momentum=0.9)
    criterion = nn.CrossEntropyLoss()

    # Train.
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        model.train()
        running = 0.0
        for i, (x, y) in enumerate(loader):
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
            out = model(x)
            loss = criterion(out, y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            running += loss.item()
            if i % 10 == 0 and dist.get_rank() == 0:
                print(epoch, i, loss.item())
        print(f"epoch {epoch}: {running / len(loader):.4f}")

    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
'''.replace("    rank, world_size = 0, 0\n", "")


def test_ddp():
    assert moved(DDP, "ddp", 4).after.decode() == '''"""DDP."""
import os

import torch
from torch import nn
from torch.utils.data import TensorDataset
from hvdtrain import Config, Trainer
from hvdtrain.cluster.launcher import launch_facts
from hvdtrain.config import Named

EPOCHS = 3


def main():

    # Data.
    dataset = TensorDataset(torch.randn(64, 4), torch.randint(0, 3, (64,)))

    model = nn.Linear(4, 3)  # the model

    # Train.
    trainer = Trainer(Config(
        epochs=EPOCHS, global_batch=64, lr=0.1 * 4,
        optimizer=Named("SGD", {"momentum": 0.9}), loss=Named("CrossEntropyLoss"),
        clip_norm=1.0,
    ))
    trainer.fit(model, dataset)

    if launch_facts(os.environ).rank == 0:
        torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
'''


def test_one_rank_keeps_its_batch_and_rate():
    found = moved(DDP, "ddp")
    assert "global_batch=16, lr=0.1," in found.after.decode()
    assert any("global_batch is that of 1 of them" in f.what for f in found.findings)


def test_data_parallel_has_the_global_batch_already():
    before = '''import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

device = "cuda"
net = torch.nn.DataParallel(torch.nn.Linear(4, 1)).to(device)
opt = torch.optim.Adam(net.parameters())
for epoch in range(1, 2 + 1):
    for x, y in DataLoader(data, 32):
        x = x.to(device)
        y = y.to(device)
        loss = F.mse_loss(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
torch.save(net.module.state_dict(), "m.pt")
'''
    assert moved(before, "data_parallel", 4).after.decode() == '''import torch
import os
from hvdtrain import Config, Trainer
from hvdtrain.cluster.launcher import launch_facts
from hvdtrain.config import Data, Named

net = torch.nn.Linear(4, 1)
trainer = Trainer(Config(
    epochs=2, global_batch=32, lr=0.001, optimizer=Named("Adam"),
    loss=Named("mse_loss"), metrics=[], data=Data(shuffle=False),
))
trainer.fit(net, data)
if launch_facts(os.environ).rank == 0:
    torch.save(net.state_dict(), "m.pt")
'''


HOROVOD = '''import torch
import torch.nn.functional as F
import torch.optim as optim
import horovod.torch as hvd
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

hvd.init()
if torch.cuda.is_available():
    torch.cuda.set_device(hvd.local_rank())
sampler = DistributedSampler(train, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(train, batch_size=BATCH, sampler=sampler)
model = Net()
model.cuda()
optimizer = optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.5)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(),
                                     compression=hvd.Compression.fp16)
for epoch in range(args.epochs):
    sampler.set_epoch(epoch)
    for data, target in loader:
        data, target = data.cuda(), target.cuda()
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
if hvd.rank() == 0:
    torch.save(model.state_dict(), "m.pt")
'''


def test_horovod_torch():
    assert moved(HOROVOD, "horovod_torch", 2).after.decode() == '''import torch
import os
from hvdtrain import Config, Trainer
from hvdtrain.cluster.launcher import launch_facts
from hvdtrain.config import Named

model = Net()
trainer = Trainer(Config(
    epochs=args.epochs, global_batch=BATCH * 2, lr=args.lr * 2,
    optimizer=Named("SGD", {"momentum": 0.5}), loss=Named("nll_loss"),
    compression="fp16",
))
trainer.fit(model, train)
if launch_facts(os.environ).rank == 0:
    torch.save(model.state_dict(), "m.pt")
'''


ACCELERATE = '''import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader

accelerator = Accelerator(mixed_precision="bf16")
loader = DataLoader(data, batch_size=32, shuffle=True)
model = torch.nn.Linear(4, 3)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(2):
    for batch in loader:
        x, y = batch
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
        accelerator.backward(loss)
        optimizer.step()
    accelerator.print(epoch, loss.item())
accelerator.wait_for_everyone()
if accelerator.is_main_process:
    torch.save(accelerator.unwrap_model(model).state_dict(), "m.pt")
'''


def test_accelerate():
    text = ACCELERATE.replace(", label_smoothing=0.1", "")
    assert moved(text, "accelerate", 4).after.decode() == '''import torch
import os
from hvdtrain import Config, Trainer
from hvdtrain.cluster.launcher import launch_facts
from hvdtrain.config import Named

model = torch.nn.Linear(4, 3)
trainer = Trainer(Config(
    epochs=2, global_batch=128, lr=1e-3,
    optimizer=Named("AdamW", {"weight_decay": 0.01}), loss=Named("cross_entropy"),
    precision="bf16",
))
trainer.fit(model, data)
if launch_facts(os.environ).rank == 0:
    torch.save(model.state_dict(), "m.pt")
'''
    split = text.replace('mixed_precision="bf16"', "split_batches=True")
    assert "global_batch=32," in moved(split, "accelerate", 4).after.decode()


@pytest.mark.parametrize("old, new, named", [
    ("            optimizer.step()\n", "            optimizer.step()\n            ema.update()\n",
     "also does: ema.update()"),
    ("        model.train()\n", "        scheduler.step()\n", "scheduler.step()"),
    ("            loss.backward()\n", "            (loss / 2).backward()\n", "also does"),
    ("out = model(x)", "out = model(x, mask)", "also does"),
    ("criterion(out, y)", "criterion(out, y.long())", "also does"),
    ("nn.CrossEntropyLoss()", "nn.CrossEntropyLoss(weight=w)", "the loss is"),
    ("nn.CrossEntropyLoss()", "nn.CrossEntropyLoss(reduction='sum')", "the loss is"),
    ("nn.CrossEntropyLoss()", "FocalLoss()", "criterion is not made once"),
    ("model.parameters(), lr", "groups, lr", "the optimizer is"), ("torch.optim.SGD", "Lion",
                                                                   "optimizer is not made"),
    ("num_workers=2", "collate_fn=pad", "the loader has collate_fn=pad"),
    ("range(EPOCHS)", "range(start, EPOCHS)", "epochs run over"),
    ("    if dist.get_rank() == 0:\n        torch", "    optimizer.state_dict()\n    if dist.get_rank() == 0:\n    "
                                                    "    torch",
     "optimizer is used outside"),
    ("    dist.destroy_process_group()", "    dist.all_reduce(t)", "dist.all_reduce(t) is not part"),
    ("    dist.destroy_process_group()", "    print(running)", "running, which the loop binds"),
    ("    main()\n", "    torch.multiprocessing.spawn(main, nprocs=2)\n", "spawn"),
    ("EPOCHS = 3", "EPOCHS = 3\nTrainer = None", "name Trainer"),
    ('torch.device("cuda", local_rank)', 'torch.device("cuda")\n    probe.to(device)', "device is read before"),
    ("    for epoch in range(EPOCHS):\n", "    with torch.autocast('cuda'):\n     for epoch in range(EPOCHS):\n",
     "inside 'with"),
    ("lr=0.1 * dist.get_world_size()", "lr=f(dist.get_world_size())", "depends on the number of processes"),
])
def test_what_is_not_standard_is_left_alone_with_code_to_go_on_from(old, new, named):
    text = DDP.replace(old, new)
    assert text != DDP
    found = moved(text, "ddp", 2)
    assert found.after.decode() == text
    told = [f for f in found.findings if f.kind == "by hand"]
    assert len(told) == 1 and named in told[0].what
    compile(found.snippet, "snippet", "exec")
    assert "trainer.fit(model, dataset)" in found.snippet and "global_batch=32" in found.snippet


@pytest.mark.parametrize("text, old, new, kind, part", [
    (HOROVOD, "compression=hvd.Compression.fp16", "backward_passes_per_step=2", "horovod_torch", "accumulate=2"),
    (HOROVOD, "compression=hvd.Compression.fp16", "op=hvd.Sum", "horovod_torch", "lr=args.lr"),
    (HOROVOD, "hvd.Compression.fp16", "hvd.Compression.fp16 if args.fp16 else hvd.Compression.none", "horovod_torch",
     'compression="fp16"'),
    (ACCELERATE, 'mixed_precision="bf16"', "gradient_accumulation_steps=4", "accelerate", "global_batch=32"),
    (ACCELERATE, "accelerator.backward(loss)", "accelerator.backward(loss, x)", "accelerate", 'precision="bf16"'),
])
def test_options_that_change_a_step_are_left_alone(text, old, new, kind, part):
    text = text.replace(old, new)
    found = moved(text, kind)
    assert found.after.decode() == text and found.findings[0].kind and part in found.snippet


def test_adasum_and_sync_batchnorm_have_keys():
    adasum = moved(HOROVOD.replace("compression=hvd.Compression.fp16", "op=hvd.Adasum"),
                   "horovod_torch").after.decode()
    assert "exchange=Exchange(adasum=True)" in adasum and "import Exchange, Named\n" in adasum
    sync = DDP.replace("    model = DDP(", "    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)\n    model "
                                           "= DDP(")
    assert "sync_batchnorm=True" in moved(sync, "ddp").after.decode()


def test_a_config_that_was_written_is_one_that_hvdtrain_takes():
    from hvdtrain.config import Config, Data, Exchange, Named  # noqa: F401

    text = moved(HOROVOD.replace("compression=hvd.Compression.fp16", "op=hvd.Adasum"),
                 "horovod_torch").after.decode()
    call = text[text.index("Config("):text.index("))\ntrainer.fit") + 1].replace("args.epochs", "1")
    config = eval(call.replace("args.lr", "0.1").replace("BATCH", "8"))
    assert config.check().exchange.adasum and config.optimizer.args == {"momentum": 0.5}
