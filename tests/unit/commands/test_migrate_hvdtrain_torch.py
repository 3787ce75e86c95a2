"""Scripts to hvdtrain.torch: Horovod's by their imports, DDP's by a diff of a few lines, or findings."""

import pytest

from hvdtrain.commands.migrate.finding import MigrateOptions
from hvdtrain.commands.migrate.plan import Migration, migrate, of_text


def planned(text: str, kind: str, target: str = "auto") -> Migration:
    compile(text, kind, "exec")
    found = migrate(of_text(text), MigrateOptions(target))
    assert found.kind == kind
    return found


def changed(found: Migration) -> tuple[list[str], list[str]]:
    """Return (lines that went, lines that came), stripped."""
    before, after = ([line.strip() for line in data.decode().splitlines()]
                     for data in (found.source.data, found.after))
    return [line for line in before if line not in after], [line for line in after if line not in before]


HOROVOD = '''import torch
import horovod.torch as hvd

hvd.init()
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=hvd.Sum)
if hvd.rank() == 0:
    print(hvd.size())
'''


@pytest.mark.parametrize("old, new", [
    ("import horovod.torch as hvd", "import hvdtrain.torch as hvd"),
    ("from horovod import torch as hvd", "from hvdtrain import torch as hvd"),
    ("import horovod\nimport horovod.torch as hvd", "import horovod\nimport hvdtrain.torch as hvd"),
    ("import horovod.torch as hvd\nfrom horovod.torch import Sum, rank", "import hvdtrain.torch as hvd\n"
     "from hvdtrain.torch import Sum, rank"),
])
def test_a_horovod_script_changes_its_import_and_nothing_else(old, new):
    text = HOROVOD.replace("import horovod.torch as hvd", old)
    found = planned(text, "horovod_torch")
    assert found.after.decode() == text.replace(old, new)
    assert not [f for f in found.findings if f.kind == "by hand"]
    assert planned(found.after.decode(), "hvdtrain").after == found.after


def test_a_plain_import_changes_where_it_is_read():
    text = HOROVOD.replace(" as hvd", "").replace("hvd.", "horovod.torch.")
    assert planned(text, "horovod_torch").after.decode() == text.replace("horovod.torch", "hvdtrain.torch")


@pytest.mark.parametrize("line, named, do", [
    ("state = hvd.elastic.TorchState(model)", "elastic", "resume: auto"),
    ("import horovod.torch.elastic", "elastic", "resume: auto"),
    ("hvd.no_such_name()", "no_such_name", "replace these names"),
])
def test_a_horovod_script_that_uses_more_stays(line, named, do):
    found = planned(HOROVOD + line + "\n", "horovod_torch")
    assert found.after == found.source.data
    assert any(named in f.what and do in f.do for f in found.findings if f.kind == "by hand")


def test_a_start_from_python_is_that_of_hvdtrain():
    found = planned("import horovod\n" + HOROVOD + "horovod.run(main, np=2)\n", "horovod_torch")
    assert [f.line for f in found.findings if "hvdtrain.run(function" in f.do] == [9]


DDP = '''import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=16, sampler=sampler)
    model = nn.Linear(4, 3)
    model = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
    if rank == 0:
        torch.save(model.module.state_dict(), "model.pt")
    dist.destroy_process_group()


main()
'''
WRAPPED = "optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())"
SENT = "hvd.broadcast_parameters(model.state_dict(), root_rank=0)"


def test_a_ddp_loop():
    found = planned(DDP, "ddp")
    went, came = changed(found)
    assert went == ["import os", "import torch.distributed as dist",
                    "from torch.nn.parallel import DistributedDataParallel as DDP",
                    'dist.init_process_group("gloo")', 'rank = int(os.environ["RANK"])',
                    "sampler = DistributedSampler(train)", "model = DDP(model)",
                    'torch.save(model.module.state_dict(), "model.pt")', "dist.destroy_process_group()"]
    assert came == ["import hvdtrain.torch as hvd", "hvd.init()", "rank = hvd.rank()",
                    "sampler = DistributedSampler(train, num_replicas=hvd.size(), rank=hvd.rank())", SENT, WRAPPED,
                    'torch.save(model.state_dict(), "model.pt")', "hvd.shutdown()"]
    assert {f.kind for f in found.findings} == {"changed", "note", "unsafe"}, found.findings
    assert planned(found.after.decode(), "hvdtrain").after == found.after
    assert planned(DDP, "ddp", "trainer").snippet, "Trainer's code is one option away"


@pytest.mark.parametrize("old, new, expected", [
    ("model = DDP(model)", "model = DDP(model, [rank], bucket_cap_mb=9, find_unused_parameters=False)", [SENT]),
    ("    model = DDP(model)", "    net = DDP(model)", ["net = model", "hvd.broadcast_parameters(net.state_dict(), "
                                                        "root_rank=0)", WRAPPED]),
    ("    model = nn.Linear(4, 3)\n    model = DDP(model)", "    model = DDP(nn.Linear(4, 3))", [
        "model = nn.Linear(4, 3)", SENT]),
    ("rank = int(os.environ[\"RANK\"])", "rank = int(os.environ.get('LOCAL_RANK', 0))", ["rank = hvd.local_rank()"]),
    ("rank = int(os.environ[\"RANK\"])", "rank, n = dist.get_rank(), os.environ['WORLD_SIZE']", [
        "rank, n = hvd.rank(), str(hvd.size())"]),
    ("DistributedSampler(train)", "DistributedSampler(train, dist.get_world_size(), rank)", [
        "sampler = DistributedSampler(train, hvd.size(), rank)"]),
    ("loss.backward()", "loss.backward()\n            dist.all_reduce(loss, op=dist.ReduceOp.MAX)", [
        "hvd.allreduce_(loss, op=hvd.Max)"]),
    ("loss.backward()", "loss.backward()\n            dist.all_reduce(loss)\n            dist.broadcast(n, src=0)", [
        "hvd.allreduce_(loss, op=hvd.Sum)", "hvd.broadcast_(n, root_rank=0)"]),
    ("    if rank == 0:", "    dist.barrier(device_ids=[rank])\n    if rank == 0:", ["hvd.barrier()"]),
    ("    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)", "    if big:\n        optimizer = torch.optim.SGD("
     "model.parameters())\n    else:\n        optimizer = torch.optim.Adam(model.parameters())",
     [WRAPPED]),
])
def test_a_line_of_a_ddp_loop(old, new, expected):
    assert old in DDP
    found = planned(DDP.replace(old, new), "ddp")
    assert not [f for f in found.findings if f.kind == "by hand"], found.findings
    after = [line.strip() for line in found.after.decode().splitlines()]
    assert all(line in after for line in expected), after
    assert not {"dist", "DDP", "environ"} & set(found.after.decode().replace(".", " ").split())


def test_ranks_are_asked_for_below_init():
    text = DDP.replace('    dist.init_process_group("gloo")\n    rank = int(os.environ["RANK"])\n',
                       '    # ranks\n    rank = int(os.environ["RANK"])\n    dist.init_process_group("gloo")\n')
    assert "    # ranks\n    hvd.init()\n    rank = hvd.rank()\n    sampler" in planned(text, "ddp").after.decode()


STEP = """            loss.backward()
            optimizer.step()
"""


@pytest.mark.parametrize("loop, after", [
    ("""            loss.backward()
            print(loss.item())
            # clip
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()  # move
""", """            loss.backward()
            print(loss.item())
            # clip
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with optimizer.skip_synchronize():
                optimizer.step()  # move
"""),
    ("""            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
""", """            scaler.scale(loss).backward()
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
"""),
    ("""            loss.backward()
            if args.log:
                print([p.grad.norm() for p in model.parameters()])
            optimizer.step()
""", """            loss.backward()
            optimizer.synchronize()
            if args.log:
                print([p.grad.norm() for p in model.parameters()])
            with optimizer.skip_synchronize():
                optimizer.step()
"""),
])
def test_gradients_are_synchronized_before_they_are_used(loop, after):
    assert STEP in DDP
    assert after in planned(DDP.replace(STEP, loop), "ddp").after.decode()


@pytest.mark.parametrize("old, new, named", [
    ("main()\n", "torch.multiprocessing.spawn(main, nprocs=2)\n", "starts the ranks"),
    ("    model = DDP(model)", "    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)\n    model = DDP(model)",
     "convert_sync_batchnorm(model) needs"),
    ("DDP(model)", "DDP(model, find_unused_parameters=True)", "has find_unused_parameters=True"),
    ("DDP(model)", "DDP(model, process_group=group)", "has process_group=group"),
    ("    model = DDP(model)", "    if size > 1:\n        model = DDP(model)", "stands inside 'if size > 1'"),
    ('    dist.init_process_group("gloo")', '    if "RANK" in os.environ:\n        dist.init_process_group("gloo")',
     "names \"RANK\""),
    ("main()\n", "group = dist.new_group([0])\nmain()\n", "dist.new_group([0]) uses the process group"),
    ("main()\n", "print(isinstance(m, DDP))\nmain()\n", "DDP uses the process group"),
    ("rank == 0", "dist.get_rank(group) == 0", "dist.get_rank(group) uses"),
    ("loss.backward()", "loss.backward()\n            dist.all_reduce(loss, async_op=True)", "async_op=True) uses"),
    ("loss.backward()", "loss.backward()\n            dist.all_reduce(loss / dist.get_world_size())", "all_reduce(l"),
    ("            loss.backward()", "            with model.no_sync():\n                loss.backward()", "no_sync is"),
    ("            optimizer.step()", "            if i % 4 == 0:\n                optimizer.step()",
     "no optimizer.step() of its own"),
    ("            optimizer.step()", "            optimizer.step(closure)", "no optimizer.step() of its own"),
    ("            loss.backward()", "            loss.backward()\n            more.backward()", "not the one backward"),
    ("    for epoch in range(3):", "    def clip():\n        nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
     "    for epoch in range(3):", "uses gradients outside"),
    ("torch.optim.SGD(model.parameters(), lr=0.1)", "torch.optim.SGD(other.parameters())", "the optimizer is made as"),
    ("torch.optim.SGD(model.parameters(), lr=0.1)", "make(model)", "0 optimizers"),
    ("    for epoch in range(3):", "    second = torch.optim.SGD(model.parameters())\n    for epoch in range(3):",
     "2 optimizers"),
    ("    sampler = ", "    hvd = 1\n    sampler = ", "the name hvd is taken"),
    ("model.module.state_dict()", "other.module.state_dict()", "other.module may be"),
    ('int(os.environ["RANK"])', 'int(os.environ["SLURM_PROCID"])', "another launcher"),
    ("def main():", 'rank = int(os.environ["RANK"])\n\n\ndef main():', "comes before init_process_group"),
])
def test_a_ddp_loop_that_is_not_followed_stays(old, new, named):
    text = DDP.replace(old, new) if old != "main()\n" else DDP.removesuffix(old) + new
    assert text != DDP
    found = planned(text, "ddp")
    assert found.after.decode() == text
    assert any(named in f.what for f in found.findings if f.kind == "by hand"), found.findings
    assert not [f for f in found.findings if f.kind == "changed"]


@pytest.mark.parametrize("old, new, named", [
    ('("gloo")', '("gloo", rank=args.rank, world_size=args.size)', "init_process_group has world_size=args.size"),
    ('("gloo")', '("gloo", rank=0)', "init_process_group has rank=0"),
    ("def main():\n    dist.init_process_group(\"gloo\")", "def main(own):\n    dist.init_process_group(\"gloo\", "
     "rank=own)", "init_process_group has rank=own"),
    ("DDP(model)", "DDP(model, None, None, 0, True, True, group)", "has group"),
    ("            optimizer.step()", "            if i % 4:\n                continue\n            optimizer.step()",
     "may leave the block between"),
    ("    for epoch in range(3):", "    second = Lion(model.head.parameters())\n    second.step()\n"
     "    for epoch in range(3):", "second.step() is of a second optimizer"),
    ("    for epoch in range(3):", "    optimizer.add_param_group(more)\n    for epoch in range(3):", "adds param"),
    ("    for epoch in range(3):", "    host = os.getenv('GROUP_RANK', 0)\n    for epoch in range(3):", "'GROUP_RANK'"),
])
def test_what_would_train_other_weights_stays(old, new, named):
    assert old in DDP
    found = planned(DDP.replace(old, new), "ddp")
    assert found.after == found.source.data
    assert any(named in f.what for f in found.findings if f.kind == "by hand"), found.findings


@pytest.mark.parametrize("old, new, came", [
    ("    dist.init_process_group(\"gloo\")\n    rank = int(os.environ[\"RANK\"])",
     "    rank = int(os.environ[\"RANK\"])\n    dist.init_process_group(\"gloo\", rank=rank, "
     "world_size=int(os.environ[\"WORLD_SIZE\"]))", "rank = hvd.rank()"),
    ("model = DDP(model)", "net = DDP(device_ids=None, module=model)", "net = model"),
    ("            optimizer.step()", "            for p in model.parameters():\n                if p.grad is None:\n"
     "                    continue\n            optimizer.step()", "optimizer.synchronize()"),
])
def test_what_looks_alike_is_converted(old, new, came):
    assert old in DDP
    found = planned(DDP.replace(old, new), "ddp")
    assert not [f for f in found.findings if f.kind == "by hand"], found.findings
    assert came in changed(found)[1]


def test_buffers_that_a_model_makes_are_reported():
    text = DDP.replace("    model = DDP(model)", "    model.register_buffer('queue', queue)\n    model = DDP(model)")
    assert [f.kind for f in planned(text, "ddp").findings if f.what.startswith("buffers")] == ["unsafe"]
    assert [f.kind for f in planned(DDP, "ddp").findings if f.what.startswith("buffers")] == ["note"]


def test_names_of_a_saved_state_lose_their_prefix():
    found = planned(DDP.replace("model.module.state_dict()", "model.state_dict()"), "ddp")
    assert [f.line for f in found.findings if "lose the prefix module." in f.what] == [26]
