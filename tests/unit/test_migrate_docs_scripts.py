"""`migrate` moves every script that docs/migrate shows, and finds nothing to do in one that moved."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdtrain.migrate import plan, rules, source

DOCS = Path(__file__).resolve().parents[2] / "docs" / "migrate"
KINDS = {"horovod_keras": "horovod_keras", "tf_distribute": "tf_distribute", "ddp": "ddp", "accelerate": "accelerate",
         "data_parallel": "data_parallel"}
WENT = {"horovod_keras": "horovod.", "tf_distribute": "strategy", "ddp": "DistributedDataParallel",
        "accelerate": "accelerator", "data_parallel": "DataParallel"}
CAME = {"horovod_keras": "import hvdtrain.keras as hvd", "tf_distribute": "hvd.shard(", "ddp": "trainer.fit(",
        "accelerate": "trainer.fit(", "data_parallel": "trainer.fit("}


def test_every_folder_is_told_of():
    assert {folder.name for folder in DOCS.iterdir() if folder.is_dir()} == set(KINDS)


@pytest.mark.parametrize("name", KINDS)
def test_a_script_of_the_docs_moves_whole(name):
    found = plan.migrate(source.read(str(DOCS / name / "before.py")), rules.Wish(ranks=2))
    after = found.after.decode()
    code = after.partition('"""\n\n')[2]  # behind the sentence that opens the file
    assert found.kind == KINDS[name] and not [f for f in found.findings if f.kind == "by hand"], found.findings
    assert CAME[name] in code and WENT[name] not in code.replace("hvdtrain.keras", "")
    compile(after, name, "exec")


@pytest.mark.parametrize("name", KINDS)
def test_a_script_that_moved_stays(name):
    moved = source.read(str(DOCS / name / "after.py"))
    assert plan.migrate(moved, rules.Wish()).after == (DOCS / name / "after.py").read_bytes()
