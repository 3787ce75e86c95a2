"""Runs under a URL: what is stored, in which order, and resumed; storage that fails, hangs or has a second writer."""

import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
from small_runs import SLOW_TENSORFLOW, bits, config, fitted, lockstep, make_model, samples

from hvdtrain.checkpoint import CheckpointStore, remote
from hvdtrain.checkpoint.downloads import staging
from hvdtrain.commands import main
from hvdtrain.commands.launch.job import job_of
from hvdtrain.config import CheckpointConfig, Config
from hvdtrain.core.errors import UserError
from hvdtrain.core.resolve import is_url, redacted
from hvdtrain.engine.callbacks.base import Callback
from hvdtrain.trainer import Trainer

fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")
memory = pytest.importorskip("fsspec.implementations.memory")

DATA = samples(40)
URL = "test://runs/one"
ROOT = "/runs/one"


class Storage(memory.MemoryFileSystem):
    """Memory that keeps each call as (verb, name), after ``before(verb, name)``, which may raise or wait."""

    protocol = "test"
    store: dict = {}
    pseudo_dirs = [""]
    cachable = False
    calls: list = []
    before = staticmethod(lambda verb, name: None)

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("test://", "memory://"))

    def _made(self, verb, path):
        name = self._strip_protocol(path).removeprefix(ROOT).lstrip("/")
        type(self).before(verb, name)
        self.calls.append((verb, name))

    def put_file(self, lpath, rpath, **options):
        self._made("put", rpath)
        super().put_file(lpath, rpath, **options)

    def rm_file(self, path):
        self._made("remove", path)
        super().rm_file(path)

    def ls(self, path, detail=True, **options):
        self._made("list", path)
        return super().ls(path, detail, **options)


@pytest.fixture
def storage(tmp_path, monkeypatch):
    """Return an empty storage under test://, and a host whose cache is empty; retries without waits."""
    fsspec.register_implementation("test", Storage, clobber=True)
    for name, value in (("store", {}), ("pseudo_dirs", [""]), ("calls", []), ("before", lambda verb, name: None)):
        monkeypatch.setattr(Storage, name, staticmethod(value) if callable(value) else value)
    monkeypatch.setattr("hvdtrain.core.object_store.RETRY_WAITS_S", (0.0, 0.0))
    host(monkeypatch, tmp_path, "first")
    return Storage


def host(monkeypatch, tmp_path, name):
    """Go on as on another host, with a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))


def settings(out=URL, **changes):
    checkpoint = CheckpointConfig(**{"every_steps": 2, "keep": 2, **changes.pop("checkpoint", {})})
    return config(out=str(out), global_batch=8, checkpoint=checkpoint, **{"epochs": 2, **changes})


def train(out=URL, **changes):
    return Trainer(settings(out, **changes)).fit(make_model("numpy"), DATA)


def names():
    return {name.removeprefix(f"{ROOT}/") for name in Storage.store if name.startswith(ROOT)}


def steps():
    return sorted({int(name.split("/")[1][5:]) for name in names() if name.endswith("/manifest.json")})


def failing(verb, part, times=10**6, error=OSError):
    left = [times]

    def before(done, name):
        if done == verb and part in name and left[0] > 0:
            left[0] -= 1
            raise error("the server is down")

    Storage.before = staticmethod(before)


def test_a_run_is_stored_manifest_last_and_pruned_manifest_first(storage, capsys):
    result = train()
    assert steps() == [8, 10] and {"log.jsonl", "config.yaml", "report.html", "model/model.safetensors",
                                   "completed.json", "owner.json"} <= names()
    puts = [name for verb, name in storage.calls if verb == "put"]
    for step in (2, 10):
        own = [name for name in puts if f"{step:08d}" in name]
        data, manifest = own[:3], f"checkpoints/step-{step:08d}/manifest.json"
        assert set(own[3:]) == {manifest} and manifest not in data, "what is saved at the end again is not sent again"
    removed = [name for verb, name in storage.calls if verb == "remove" and "step-00000002" in name]
    assert len(removed) == 4 and removed[0].endswith("manifest.json")
    assert puts.index("completed.json") > puts.index("model/model.safetensors")
    assert result.out == staging(URL) and (result.out / "completed.json").exists()
    assert f"files in {URL}, with a local copy in {result.out}" in capsys.readouterr().out
    with pytest.raises(UserError, match=f"{URL} already holds a run.*--resume auto"):
        train()


@pytest.mark.parametrize("framework", SLOW_TENSORFLOW)
def test_resume_on_another_host_and_number_of_ranks_equals_a_local_resume(framework, storage, tmp_path, monkeypatch):
    found = []
    for out in (URL, tmp_path / "run"):
        lockstep(2, settings(out, epochs=1), lambda rank: make_model(framework), DATA, fitted)
        host(monkeypatch, tmp_path, "second")
        runs = lockstep(3, settings(out, resume="auto"), lambda rank: make_model(framework), DATA, fitted)
        found.append([(run.state.cursor.step, bits(run)) for run in runs])
    assert found[0] == found[1] and found[0][0][0] == 10


def test_a_resume_continues_log_and_checkpoints_of_the_url(storage, tmp_path, monkeypatch):
    train(epochs=1)
    first = Storage.store[f"{ROOT}/log.jsonl"].getvalue()
    host(monkeypatch, tmp_path, "second")
    assert train(resume="auto").steps == 10
    assert steps() == [8, 10] and Storage.store[f"{ROOT}/log.jsonl"].getvalue().startswith(first)
    kept = {path.name for path in (staging(URL) / "checkpoints").iterdir()}
    assert kept == {"step-00000008", "step-00000010"}
    host(monkeypatch, tmp_path, "third")
    before = dict(storage.store)
    assert train(resume="auto").steps == 10 and storage.store.keys() == before.keys()


def test_the_best_checkpoint_stays_and_is_downloaded(storage, tmp_path, monkeypatch):
    metric = {"keep": 1, "keep_best": "loss", "every_steps": 0, "every": "off"}
    Trainer(settings(lr=3.0, eval_every=1, epochs=4, checkpoint=metric)).fit(make_model("numpy"), (DATA, DATA))
    kept = steps()
    assert len(kept) == 2 and kept[-1] == 20, "the first evaluation with this rate is the best"
    host(monkeypatch, tmp_path, "second")
    Trainer(settings(lr=3.0, eval_every=1, epochs=5, resume="auto", checkpoint=metric)).fit(
        make_model("numpy"), (DATA, DATA))
    assert steps() == [kept[0], 25]
    assert [one.step for one in CheckpointStore(staging(URL) / "checkpoints", 1).list()] == [kept[0], 25]


@pytest.mark.parametrize("damage", ["no manifest", "a file too short", "another byte"])
def test_an_incomplete_or_damaged_upload_is_not_taken(damage, storage, tmp_path, monkeypatch, capsys):
    train()
    folder = f"{ROOT}/checkpoints/step-00000010"
    if damage == "no manifest":
        del Storage.store[f"{folder}/manifest.json"]
    else:
        file = Storage.store[f"{folder}/model.safetensors"]
        data = file.getvalue()
        file.truncate(file.seek(0))
        file.write(data[:-1] if damage == "a file too short" else data[:-1] + bytes([data[-1] ^ 1]))
    host(monkeypatch, tmp_path, "second")
    assert train(resume="auto").steps == 10
    assert "resumed at step 8" in (text := capsys.readouterr().out) and "is not used" in text
    host(monkeypatch, tmp_path, "third")
    assert train(resume="auto", epochs=3).steps == 15 and "resumed at step 10" in capsys.readouterr().out


def test_a_run_without_any_usable_checkpoint_is_not_trained_over(storage, tmp_path, monkeypatch, capsys):
    train()
    for name in [name for name in Storage.store if name.endswith("model.safetensors") and "step-" in name]:
        del Storage.store[name]
    host(monkeypatch, tmp_path, "second")
    with pytest.raises(UserError, match=f"no checkpoint in {URL} can be used"):
        train(resume="auto", epochs=3)


def test_a_listing_that_fails_does_not_start_from_scratch(storage, tmp_path, monkeypatch):
    train()
    host(monkeypatch, tmp_path, "second")
    failing("list", "")
    for resume in ("auto", ""):
        with pytest.raises(UserError, match=f"{URL} cannot be used: listing .*the server is down"):
            train(resume=resume, epochs=3)


def test_calls_are_repeated(storage):
    failing("put", "model.safetensors", times=2)
    assert train().steps == 10 and steps() == [8, 10]


def test_a_failed_upload_is_a_failed_save(storage, tmp_path, monkeypatch, capsys):
    failing("put", "step-00000010/optimizer", error=PermissionError)
    with pytest.raises(UserError, match="the last checkpoint is not stored: it could not be uploaded.*server is down"
                       ) as error:
        train()
    assert error.value.kind == "disk" and steps() == [6, 8] and "completed.json" not in names()
    failing("put", "nothing")
    assert [one.step for one in CheckpointStore(staging(URL) / "checkpoints", 1).list()] == [8, 10]
    host(monkeypatch, tmp_path, "second")
    train(resume="auto", epochs=1, checkpoint={"every_steps": 0, "at_end": False, "every": "off"})
    assert "resumed at step 8" in capsys.readouterr().out, "another host knows what is stored"


def test_the_same_host_resumes_from_what_was_not_uploaded(storage, capsys, monkeypatch):
    monkeypatch.setattr(remote, "FAILED_S", 0.0)
    failing("put", "/")
    with pytest.raises(UserError):
        train()
    failing("put", "nothing")
    with pytest.raises(UserError, match="holds files of a run that are not stored.*--resume auto"):
        train()
    assert train(resume="auto").steps == 10
    assert "resumed at step 10" in capsys.readouterr().out and steps() == [10] and "completed.json" in names()


@pytest.mark.parametrize("on_failure", ["warn", "stop"])
def test_on_failure_decides_about_uploads(on_failure, storage, capsys):
    failing("put", "step-00000004", error=PermissionError)
    changed = {"checkpoint": {"on_failure": on_failure}}
    if on_failure == "stop":
        with pytest.raises(UserError, match="the checkpoint of step 4 is not stored.*resume from the previous"):
            train(**changed)
        assert "completed.json" not in names()
    else:
        assert train(**changed).steps == 10 and steps() == [8, 10]
        assert "checkpoint not written (it could not be uploaded" in capsys.readouterr().out


def test_storage_that_hangs_ends_no_run_later_than_its_limit(storage, monkeypatch):
    go_on, late = threading.Event(), []

    def before(verb, name):
        if verb == "put" and "step-00000010/model" in name:
            go_on.wait(60)
            late.append(name)

    Storage.before = staticmethod(before)
    monkeypatch.setattr(remote, "limit_s", lambda config: 0.3)
    with pytest.raises(UserError, match="the last checkpoint is not stored.*took longer than 0 s"):
        train()
    go_on.set()
    for thread in [one for one in threading.enumerate() if one.name == "hvdtrain-storage"]:
        thread.join(10)
    assert late and steps() == [6, 8], "a call that comes back late stores no manifest"


def test_a_second_job_under_a_url_is_found_out(storage, tmp_path, monkeypatch, capsys):
    class Intruder(Callback):
        def step_end(self, run):
            if run.state.cursor.step == 5:
                run.saver.wait()
                Storage().pipe_file(f"{ROOT}/owner.json", b'{"host": "other", "pid": 7, "time": 0}')

    with pytest.raises(UserError, match="another job writes to test://runs/one: process 7 on host other"):
        Trainer(settings()).fit(make_model("numpy"), DATA, callbacks=[Intruder()])
    assert steps() == [2, 4] and "completed.json" not in names()


def test_a_staging_folder_of_an_abandoned_job_is_not_used(storage, tmp_path, monkeypatch, capsys):
    train()
    (folder := staging(URL) / "checkpoints" / "step-00000010").rename(folder.with_name("step-00000099"))
    host(monkeypatch, tmp_path, "second")
    train(resume="auto", epochs=3)
    host(monkeypatch, tmp_path, "first")
    assert train(resume="auto", epochs=4).steps == 20 and "resumed at step 15" in capsys.readouterr().out
    storage.store.clear()
    train()
    assert steps() == [8, 10] and not folder.with_name("step-00000099").exists()


def test_the_model_is_stored_before_the_run_counts_as_complete(storage):
    failing("put", "model/model.safetensors")
    with pytest.raises(UserError, match=f"the final files could not be uploaded to {URL}.*server is down"):
        train()
    assert "completed.json" not in names() and not (staging(URL) / "completed.json").exists() and steps() == [8, 10]
    failing("put", "completed.json")
    with pytest.raises(UserError, match="could not be uploaded"):
        train(resume="auto")
    assert not (staging(URL) / "completed.json").exists()


@pytest.mark.parametrize("place", [URL, f"{URL}/checkpoints", f"{URL}/checkpoints/step-00000008"])
def test_another_run_starts_from_a_url(place, storage, tmp_path, monkeypatch, capsys):
    train()
    host(monkeypatch, tmp_path, "second")
    assert train(tmp_path / "local", resume=place, epochs=3).steps == 15
    assert f"resumed at step {8 if '08' in place else 10}" in capsys.readouterr().out
    trainer = Trainer(settings(tmp_path / "other"))
    trainer.evaluate(model=make_model("numpy"), data=(DATA, DATA))
    trainer.restore(place)
    assert trainer.run.state.cursor.step == (8 if "08" in place else 10)
    assert not list((tmp_path / "second/hvdtrain/remote").iterdir()), "a copy to read once is removed"
    with pytest.raises(UserError, match="there is no complete checkpoint in test://runs/none"):
        train(tmp_path / "third", resume="test://runs/none")


def test_file_urls_are_local_paths(tmp_path):
    result = train(f"file://{tmp_path}/run")
    assert result.out == tmp_path / "run" and (tmp_path / "run/completed.json").exists()
    assert train(tmp_path / "more", resume=f"file://{tmp_path}/run", epochs=3).steps == 15
    assert main(["checkpoints", f"file://{tmp_path}/run"]) == 0


@pytest.mark.parametrize("key", ["out", "resume"])
@pytest.mark.parametrize("url, words", [
    ("s3://AKIAKEY:hush@bucket/run", "holds credentials"), ("s3://AKIAKEY:hu/sh@bucket/run", "holds credentials"),
    ("sftp://me:hush@host:22/run", "holds credentials"), ("https://host/run?signature=hush", "or a query"),
    ("file://run", "file:///absolute/path"), ("simplecache::s3://bucket/hush", "chained URL")])
def test_urls_that_are_refused(key, url, words):
    with pytest.raises(UserError, match=words) as error:
        Config(**{key: url}).check()
    assert "hush" not in str(error.value) or "::" in url


def test_drives_are_no_urls_and_messages_hold_no_credentials():
    assert not any(map(is_url, ("C:/run", "C://run", "C:\\run", "run", "/a://b", "file:///run")))
    assert all(map(is_url, ("s3://bucket/run", "gs://b", "memory://run", "abfs://container@account.net/run")))
    Config(out="abfs://container@account.net/run", resume="ftp://host:21/run").check()
    text = "GET https://b.example/run?X-Amz-Signature=hush and s3://key:hu/sh@bucket/run failed"
    assert redacted(text) == "GET https://b.example/run?*** and s3://***@bucket/run failed"


def test_a_missing_package_and_an_unknown_storage_are_named(storage, monkeypatch):
    def lacks(*_, **__):
        raise ImportError("Install s3fs to access S3")

    with monkeypatch.context() as patched:
        patched.setattr("fsspec.core.url_to_fs", lacks)
        with pytest.raises(UserError, match="s3:// needs s3fs, which is not installed.*pip install s3fs"):
            train("s3://bucket/run")
    with pytest.raises(UserError, match="cannot be opened.*Protocol not known"):
        train("nonsense://bucket/run")
    with pytest.raises(UserError, match="a folder, such as memory://bucket/run"):
        train("memory://")


def test_commands_read_a_url_or_refuse_it(storage, tmp_path, capsys):
    named = {"model": "torch_models.mlp:build", "model_args": {"in_features": 64, "hidden": (8,), "classes": 10},
             "global_batch": 512}
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    Trainer(replace(settings(epochs=2, checkpoint={"every_steps": 3, "keep": 5}), **named)).fit()
    del storage.store[f"{ROOT}/checkpoints/step-00000003/model.safetensors"]
    for more in ([], ["--checkpoint", "6"]):
        assert main(["evaluate", URL, "--out", str(out := tmp_path / f"metrics{len(more)}.json"), *more]) == 0
        assert f'"run": "{URL}"' in out.read_text()
    assert main(["predict", URL, "--out", str(tmp_path / "outputs.npz")]) == 0
    assert main(["report", URL, "--out", str(tmp_path / "report.html")]) == 0
    assert "<html" in (tmp_path / "report.html").read_text()
    assert not [one for one in staging(URL).parent.iterdir() if one.name.startswith(".")]
    for argv, words in ((["checkpoints", URL], "Copy the run to this host"), (["report", URL], "Add --out"),
                        (["report", URL, "--watch"], "Copy the run"), (["convert", URL, "new"], "Copy the run"),
                        (["evaluate", URL, "--checkpoint", "3"], "no checkpoint in"),
                        (["evaluate", "test://runs/none"], "holds no run")):
        assert main(argv) == 2 and words in capsys.readouterr().err


def test_a_supervised_job_gets_the_url(storage):
    words = ("train", "--out", URL, "--model", "m:f")
    (staging(URL) / "attempts").mkdir(parents=True)
    job = job_of(words, ("python", *words), "", ())
    assert job.out == staging(URL) and not (job.out / "attempts").exists()
    assert job.attempt(2, (), 0)[-4:] == ("--out", URL, "--resume", "auto")
    with pytest.raises(UserError, match="launch --out is test://"):
        job_of(("script.py",), ("script.py",), URL, ())


def test_a_transfer_ends_before_the_time_limit(monkeypatch):
    assert remote.limit_s(Config(control_timeout_s=100.0)) == 80.0
    monkeypatch.setattr(remote.causes, "ends_at", lambda limit_s: 1000.0)
    monkeypatch.setattr(remote, "time", SimpleNamespace(time=lambda: 980.0))
    assert remote.limit_s(Config(control_timeout_s=100.0)) == 18.0


def test_shards_that_ranks_write_into_one_staging_folder_are_stored(storage, tmp_path, monkeypatch):
    changed = {"checkpoint": {"layout": "sharded"}}
    lockstep(2, settings(epochs=1, **changed), lambda rank: make_model("numpy"), DATA, fitted)
    assert {f"checkpoints/step-00000005/shard-000{rank}.safetensors" for rank in range(2)} <= names()
    host(monkeypatch, tmp_path, "second")
    (run,) = lockstep(1, settings(resume="auto"), lambda rank: make_model("numpy"), DATA, fitted)
    assert run.state.cursor.step == 10 and steps() == [8, 10]


def test_errors_of_a_storage_are_shown_without_credentials(storage):
    def before(verb, name):
        if verb == "put":
            raise RuntimeError("PUT https://b.example/run?X-Amz-Signature=hush by s3://key:hush@b failed")

    Storage.before = staticmethod(before)
    with pytest.raises(UserError, match=r"RuntimeError: PUT https://b.example/run\?\*\*\* by s3://\*\*\*@b") as error:
        train()
    assert "hush" not in str(error.value)
