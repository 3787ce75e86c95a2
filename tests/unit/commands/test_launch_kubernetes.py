"""Launcher kubernetes: manifests against the schemas of Kubernetes and of both operators; kubectl as a recording."""

import copy
import json
import re

import pytest
import yaml

from hvdtrain.cluster.launchers.prepare import service_names
from hvdtrain.commands.launch import kubernetes
from hvdtrain.commands.launch.cli import main
from hvdtrain.core import ROOT
from hvdtrain.core.errors import UserError

DIGEST = "registry.example/team/hvdtrain@sha256:" + "a" * 64
BASE = ["--launcher", "kubernetes", "--image", DIGEST, "-np", "4", "--claim", "runs", "--claim", "photos:/data",
        "--secret", "AWS_SECRET_ACCESS_KEY=storage", "--secret", "WANDB_API_KEY=tracker/token", "--env",
        "NCCL_DEBUG=INFO"]
TRAIN = ["--", "train", "--config", "hvdtrain:digits", "--out", "/runs/first"]


def rendered(capsys, *more, program=TRAIN):
    """Return (text, documents) of a dry run."""
    assert main([*BASE, *more, "--dry-run", *program]) == 0
    text = capsys.readouterr().out
    return text, list(yaml.safe_load_all(text))


def pods(documents):
    """Yield (role, pod template) of a job's manifests."""
    if documents[0]["kind"] == "MPIJob":
        for role, spec in documents[0]["spec"]["mpiReplicaSpecs"].items():
            yield role.lower(), spec["template"] | {"restart": spec["restartPolicy"]}
        return
    for one in documents[0]["spec"]["template"]["spec"]["replicatedJobs"]:
        yield one["name"], one["template"]["spec"]["template"]


@pytest.mark.parametrize("kind", ["mpijob", "trainjob"])
def test_pods_are_valid_rootless_and_have_one_gpu(kind, capsys):
    import kubernetes_validate

    text, documents = rendered(capsys, "--kind", kind)
    assert text.startswith("# ") and "not run it on a cluster" in text.splitlines()[0]
    for role, template in pods(documents):
        spec = copy.deepcopy(template["spec"])
        spec.setdefault("restartPolicy", template.get("restart"))
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x", **template["metadata"]}, "spec": spec}
        kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)
        container, = spec["containers"]
        assert container["resources"] == {"limits": {"nvidia.com/gpu": 1}} and container["image"] == DIGEST
        assert spec["securityContext"]["runAsUser"] == 1000 and spec["terminationGracePeriodSeconds"] >= 60
        assert container["securityContext"]["readOnlyRootFilesystem"]
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        mounted = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
        assert mounted["/dev/shm"]["emptyDir"]["medium"] == "Memory"
        assert {"/tmp", "/home/trainer", "/runs", "/data"} <= set(mounted)
        assert template["metadata"]["annotations"] == {"sidecar.istio.io/inject": "false"}
        worker = role in ("worker", "node")
        assert worker == ("preStop" in container.get("lifecycle", {})) == (container["args"] == ["sshd"])
    broken = copy.deepcopy(pod)
    broken["spec"]["containers"][0]["image_"] = "x"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, kubernetes_validate.latest_version(), strict=True)


def test_an_mpijob_fits_the_schema_of_the_operator(capsys):
    import jsonschema

    schema = json.loads((ROOT.parent / "tests/fixtures/mpijob_v2beta1.json").read_text())
    assert "mpi-operator" in schema["$comment"]
    _, (job,) = rendered(capsys, "--restarts", "7")
    jsonschema.validate(job, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**job, "spec": {**job["spec"], "slots": 1}}, schema)
    spec = job["spec"]
    assert spec["launcherCreationPolicy"] == "WaitForWorkersReady" and spec["runLauncherAsWorker"]
    assert spec["mpiReplicaSpecs"]["Worker"]["replicas"] == 3 and spec["runPolicy"]["backoffLimit"] == 7
    args = spec["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]["args"]
    assert args[:6] == ["job", "python", "-m", "hvdtrain", "launch", "--hostfile"] and "--restarts" in args
    assert args[args.index("--"):] == [*TRAIN, "--resume", "auto"]


def test_a_trainjob_and_its_runtime_fit_the_models_of_trainer(capsys):
    import kubernetes_validate
    from kubeflow_trainer_api import models

    _, (runtime, job) = rendered(capsys, "--kind", "trainjob")
    # The models drop names that they do not know: what they return is compared.
    assert models.TrainerV1alpha1ClusterTrainingRuntime.from_dict(runtime).to_dict() == runtime
    assert models.TrainerV1alpha1TrainJob.from_dict(job).to_dict() == job
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    _, launcher = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    inner = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": launcher["template"]["spec"]}
    kubernetes_validate.validate(inner, kubernetes_validate.latest_version(), strict=True)
    rules = launcher["template"]["spec"]["podFailurePolicy"]["rules"]
    assert [rule["action"] for rule in rules] == ["Ignore", "FailJob"]
    assert rules[1]["onExitCodes"] | {"containerName": ""} == {"containerName": "", "operator": "NotIn", "values": [75]}


def test_secrets_are_references_and_ranks_get_them(capsys, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    text, (job,) = rendered(capsys)
    assert "hunter2" not in text
    container = job["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]
    assert container["env"] == [
        {"name": "NCCL_DEBUG", "value": "INFO"},
        {"name": "AWS_SECRET_ACCESS_KEY",
         "valueFrom": {"secretKeyRef": {"name": "storage", "key": "AWS_SECRET_ACCESS_KEY"}}},
        {"name": "WANDB_API_KEY", "valueFrom": {"secretKeyRef": {"name": "tracker", "key": "token"}}}]
    passed = [container["args"][i + 1] for i, word in enumerate(container["args"]) if word == "--env"]
    assert passed == ["NCCL_DEBUG", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY"]


def test_other_programs_and_cpus(capsys):
    _, (job,) = rendered(capsys, "--gpu", "none", "--out", "s3://bucket/run", program=["--", "python", "script.py"])
    container = job["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]
    assert "resources" not in container
    assert container["args"][-5:] == ["--out", "s3://bucket/run", "--", "python", "script.py"]


@pytest.mark.parametrize("more, program, words", [
    (["-np", "1"], TRAIN, "single rank needs no MPI"),
    (["--image", "a b"], TRAIN, "--image is 'a b'"),
    (["--name", "Big"], TRAIN, "--name is 'Big'"),
    (["--claim", "runs:relative"], TRAIN, "--claim is"),
    (["--claim", "other"], TRAIN, "two --claim"),
    (["--claim", "x:/tmp"], TRAIN, "which the pod uses"),
    (["-H", "a:2"], TRAIN, "one rank in each pod"),
    (["--env", "HOME"], TRAIN, "a value of this host"),
    (["--env", "HF_TOKEN=abc"], TRAIN, "a secret into the manifest"),
    (["--env", "URL=https://me:pw@host/"], TRAIN, "a secret into the manifest"),
    (["--env", "AWS_SECRET_ACCESS_KEY=x"], TRAIN, "a secret into the manifest"),
    (["--secret", "A=B C"], TRAIN, "--secret does not name"),
    (["--gpu", "gpu"], TRAIN, "--gpu is"),
    ([], ["--", "train"], "there is no --out"),
    (["--out", "/runs/x"], ["--", "train"], "which has its own --out"),
    ([], ["--", "train", "--out=runs/x"], "lost with the pod"),
    ([], ["--", "train", "--out", "s3://me:pw@b/x"], "credentials"),
    ([], ["--", "python", "script.py"], "there is no --out"),
])
def test_what_is_refused(more, program, words):
    with pytest.raises(UserError) as error:
        main([*BASE, *more, "--dry-run", *program])
    assert words in str(error.value) and "pw@" not in str(error.value) and "abc" not in str(error.value)


def test_options_of_kubernetes_elsewhere_are_refused():
    with pytest.raises(UserError, match="--image is given without --launcher kubernetes"):
        main(["--image", DIGEST, "-np", "2", "--dry-run", *TRAIN])


@pytest.fixture
def kubectl(tmp_path, monkeypatch):
    """Put a kubectl on PATH that records its words and input; it fails for a verb in the file ``fails``."""
    tool = tmp_path / "bin" / "kubectl"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/bash\ncd {tmp_path}\nn=$(ls | grep -c words); echo "$*" >"words-$n"; cat >"input-$n"\n'
                    'if [ -e "fails-$1" ]; then echo "Warning" >&2; echo "Error: $(cat "fails-$1")" >&2; exit 1; fi\n'
                    'echo created\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")
    return tmp_path


def test_kubectl_gets_the_runtime_and_then_creates_the_job(kubectl, capsys):
    assert main([*BASE, "--kind", "trainjob", "--name", "cifar", "--namespace", "team", *TRAIN]) == 0
    calls = [(kubectl / f"words-{i}").read_text().split() for i in range(2)]
    assert calls == [["apply", "--request-timeout=30s", "-f", "-"],
                     ["create", "--request-timeout=30s", "--namespace", "team", "-f", "-"]]
    kinds = [yaml.safe_load((kubectl / f"input-{i}").read_text())["kind"] for i in range(2)]
    assert kinds == ["ClusterTrainingRuntime", "TrainJob"]
    told = capsys.readouterr()
    assert told.out == "created\ncreated\n" and "kubectl logs --namespace team" in told.err


def test_the_last_words_of_a_kubectl_that_fails(kubectl, monkeypatch):
    (kubectl / "fails-create").write_text("mpijobs.kubeflow.org \"hvdtrain\" already exists")
    with pytest.raises(UserError, match=re.escape('status 1: Error: mpijobs.kubeflow.org "hvdtrain" already exists')):
        main([*BASE, *TRAIN])
    (kubectl / "bin" / "kubectl").write_text("#!/bin/bash\nsleep 60\n")
    monkeypatch.setattr(kubernetes, "KUBECTL_S", 0.2)
    with pytest.raises(UserError, match="did not answer within 0.2 s"):
        main([*BASE, *TRAIN])
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match="no kubectl on PATH"):
        main([*BASE, *TRAIN])


def test_a_pod_knows_its_service_names(monkeypatch):
    monkeypatch.setattr("socket.getfqdn", lambda: "a-launcher.a.team.svc.cluster.local")
    assert service_names({}) == ()
    assert "a-launcher.a.team.svc" in service_names({"KUBERNETES_SERVICE_HOST": "10.0.0.1"})
