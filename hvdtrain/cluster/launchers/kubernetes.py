"""Kubernetes: one job as manifests, an MPIJob of the MPI operator or a TrainJob of Kubeflow Trainer. Pure.

Owns the pods: their users, volumes, probes and restarts. `commands.launch.kubernetes` writes YAML and calls kubectl.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from hvdtrain.core.errors import UserError

Manifest = dict[str, Any]

ENTRY = "/opt/hvdtrain/containers/entry"
TINI = ("/usr/bin/tini", "--")
KEYS = "/keys"
"""Where the operator mounts the ssh key of the job; ``containers/entry`` copies it from here."""

HOSTFILE = "/etc/mpi/hostfile"
"""Written by both operators, one line per pod."""

WORKER = ["sshd"]
"""Words for `ENTRY` in a pod that only runs ranks; those of the launcher begin with ``job``."""

HOME = "/home/trainer"
USER = 1000
SSH_PORT = 2222
SHM = "1Gi"
"""Limit of /dev/shm: the default of 64 MiB is too small for data workers."""

GRACE_S = 180
"""Seconds that a pod has to save, as in mpi_scripts/run.sbatch."""

REQUEUE = 75
"""The one exit status after which the launcher's pod is started again (`hvdtrain.cluster.exit.EXIT_REQUEUE`)."""

MOST_PODS = 4096
LONGEST_NAME = 40
"""The operators append the pod's role and number; a pod's name has at most 63 characters."""

_LABEL = re.compile(r"[a-z](?:[-a-z0-9]*[a-z0-9])?")
_IMAGE = re.compile(r"[\w.-]+(?::\d+)?(?:/[\w.-]+)*(?::[\w.-]+)?(?:@sha256:[0-9a-f]{64})?", re.ASCII)
_OBJECT = re.compile(r"[a-z0-9](?:[-.a-z0-9]*[a-z0-9])?")
_RESOURCE = re.compile(r"[a-z0-9.-]+/[A-Za-z0-9._-]+")


@dataclass(frozen=True)
class PodJob:
    """A job of ``ranks`` pods with one rank each; ``words``: what the first pod runs, a supervised ``launch``.

    ``claims``: (PersistentVolumeClaim, mount path). ``env``: (name, value). ``secrets``: (variable, Secret, its key).
    ``gpu``: the resource of which each pod gets one, "" for none.
    """

    name: str
    image: str
    ranks: int
    words: tuple[str, ...]
    namespace: str = "default"
    restarts: int = 10
    gpu: str = "nvidia.com/gpu"
    claims: tuple[tuple[str, str], ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    secrets: tuple[tuple[str, str, str], ...] = ()

    def check(self) -> None:
        """Raise `UserError` for what the operators or Kubernetes would refuse."""
        if not _IMAGE.fullmatch(self.image):
            raise UserError(f"--image is {self.image!r}", "an image such as registry/hvdtrain@sha256:DIGEST",
                            "build containers/Containerfile, push it, and name it with --image")
        for option, text in (("--name", self.name), ("--namespace", self.namespace)):
            if not _LABEL.fullmatch(text) or len(text) > LONGEST_NAME:
                raise UserError(f"{option} is {text!r}", f"lower-case letters, digits and '-', at most {LONGEST_NAME}, "
                                "beginning with a letter", f"correct {option}")
        if not 2 <= self.ranks <= MOST_PODS:
            raise UserError(f"-np is {self.ranks or 'not given'}", f"2 to {MOST_PODS}, one pod for each rank",
                            "pass -np N; a single rank needs no MPI, only a Job that runs train")
        if self.gpu and not _RESOURCE.fullmatch(self.gpu):
            raise UserError(f"--gpu is {self.gpu!r}", "a resource such as nvidia.com/gpu or amd.com/gpu, or none",
                            "correct --gpu")


def claim(text: str) -> tuple[str, str]:
    """Parse ``--claim``: CLAIM or CLAIM:PATH, mounted at /runs by default."""
    name, colon, path = text.partition(":")
    path = path if colon else "/runs"
    if not _OBJECT.fullmatch(name) or not re.fullmatch(r"(/[\w.-]+)+", path, re.ASCII) or ".." in path:
        raise UserError(f"--claim is {text!r}", "a PersistentVolumeClaim and an absolute path, such as data:/data",
                        "correct --claim")
    if path in (HOME, KEYS, "/tmp", "/dev/shm") or path.startswith(("/opt", "/etc", "/usr", "/dev", "/proc", "/sys")):
        raise UserError(f"--claim mounts at {path}, which the pod uses", "a folder of its own, such as /runs or /data",
                        "correct --claim")
    return name, path


def secret(text: str) -> tuple[str, str, str]:
    """Parse ``--secret``: VARIABLE=SECRET or VARIABLE=SECRET/KEY; the key is the variable's name by default."""
    variable, _, place = text.partition("=")
    name, _, key = place.partition("/")
    key = key or variable
    if not re.fullmatch(r"[A-Za-z_]\w*", variable, re.ASCII) or not _OBJECT.fullmatch(name) \
            or not re.fullmatch(r"[\w.-]+", key, re.ASCII):
        raise UserError(f"--secret does not name a variable and a Secret: it begins with {variable!r}",
                        "VARIABLE=SECRET or VARIABLE=SECRET/KEY, the names and not the value",
                        "create the Secret with kubectl create secret generic, and name it")
    return variable, name, key


def mpi_job(job: PodJob) -> list[Manifest]:
    """Return the MPIJob v2beta1. Its launcher, created when all workers are ready, is also rank 0's pod.

    The operator gives the launcher's Job no pod failure policy: it starts the container again after any failure, so
    that ``entry job`` refuses to run again after a status other than 75.
    """
    spec = {
        "slotsPerWorker": 1,
        "runLauncherAsWorker": True,
        "launcherCreationPolicy": "WaitForWorkersReady",
        "mpiImplementation": "OpenMPI",
        "sshAuthMountPath": KEYS,
        "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": job.restarts},
        "mpiReplicaSpecs": {
            "Launcher": {"replicas": 1, "restartPolicy": "OnFailure",
                         "template": _template(job, "launcher", ["job", *job.words], env=True)},
            "Worker": {"replicas": job.ranks - 1, "restartPolicy": "OnFailure",
                       "template": _template(job, "worker", WORKER)},
        },
    }
    return [{"apiVersion": "kubeflow.org/v2beta1", "kind": "MPIJob", "metadata": _metadata(job), "spec": spec}]


def train_job(job: PodJob) -> list[Manifest]:
    """Return the ClusterTrainingRuntime and the TrainJob of Kubeflow Trainer v2."""
    template = {"spec": {
        "network": {"publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": ["launcher"]},
        "failurePolicy": {"maxRestarts": 0},
        "replicatedJobs": [
            {"name": "node", "template": {"spec": {"backoffLimit": job.restarts, "template": _template(
                job, "node", WORKER, "OnFailure")}}},
            {"name": "launcher", "dependsOn": [{"name": "node", "status": "Ready"}], "template": {
                "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
                "spec": {"backoffLimit": job.restarts, "podFailurePolicy": _failure_policy(),
                         "template": _template(job, "node", ["job", *job.words], "Never")}}},
        ]}}
    runtime = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "ClusterTrainingRuntime",
        "metadata": {"name": f"{job.name}-runtime", "labels": {"trainer.kubeflow.org/framework": "hvdtrain"}},
        "spec": {"mlPolicy": {"numNodes": job.ranks, "mpi": {
            "numProcPerNode": 1, "mpiImplementation": "OpenMPI", "sshAuthMountPath": KEYS, "runLauncherAsNode": True}},
            "template": template}}
    trainer: Manifest = {"numNodes": job.ranks, "numProcPerNode": 1, "image": job.image, "args": ["job", *job.words]}
    if job.env or job.secrets:
        trainer["env"] = _variables(job)
    spec = {"runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "ClusterTrainingRuntime",
                           "name": f"{job.name}-runtime"}, "trainer": trainer}
    return [runtime, {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": _metadata(job),
                      "spec": spec}]


KINDS = {"mpijob": mpi_job, "trainjob": train_job}
"""Values of ``--kind``."""


def _metadata(job: PodJob) -> Manifest:
    return {"name": job.name, "namespace": job.namespace}


def _failure_policy() -> Manifest:
    """Return the rules of the launcher's Job: preempted pods do not count, status 75 counts, others end the job."""
    return {"rules": [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "FailJob", "onExitCodes": {"containerName": "node", "operator": "NotIn", "values": [REQUEUE]}},
    ]}


def _variables(job: PodJob) -> list[Manifest]:
    values: list[Manifest] = [{"name": name, "value": value} for name, value in job.env]
    return values + [{"name": variable, "valueFrom": {"secretKeyRef": {"name": name, "key": key}}}
                     for variable, name, key in job.secrets]


def _template(job: PodJob, container: str, args: list[str], restart: str = "", env: bool = False) -> Manifest:
    """Return the template of a pod; ``env``: with the job's variables. The MPI operator sets ``restart`` itself."""
    volumes: list[Manifest] = [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": SHM}},
                               {"name": "home", "emptyDir": {}}, {"name": "tmp", "emptyDir": {}}]
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}, {"name": "home", "mountPath": HOME},
              {"name": "tmp", "mountPath": "/tmp"}]
    for i, (name, path) in enumerate(job.claims):
        volumes.append({"name": f"claim-{i}", "persistentVolumeClaim": {"claimName": name}})
        mounts.append({"name": f"claim-{i}", "mountPath": path})
    made: Manifest = {
        "name": container, "image": job.image, "command": [*TINI, ENTRY], "args": args,
        "ports": [{"containerPort": SSH_PORT, "name": "ssh", "protocol": "TCP"}],
        "securityContext": {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True,
                            "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": mounts}
    if env and (job.env or job.secrets):
        made["env"] = _variables(job)
    if job.gpu:
        made["resources"] = {"limits": {job.gpu: 1}}
    if args == WORKER:
        # sshd ends at SIGTERM, and the ranks with its container: they save first.
        made["lifecycle"] = {"preStop": {"exec": {"command": [ENTRY, "drain"]}}}
        made["readinessProbe"] = {"tcpSocket": {"port": SSH_PORT}, "periodSeconds": 5}
    spec: Manifest = {
        "automountServiceAccountToken": False, "enableServiceLinks": False, "terminationGracePeriodSeconds": GRACE_S,
        "securityContext": {"runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER, "fsGroup": USER,
                            "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [made], "volumes": volumes}
    if restart:
        spec["restartPolicy"] = restart
    # A mesh's proxy would stand between the ranks, and keep a finished pod alive.
    return {"metadata": {"labels": {"sidecar.istio.io/inject": "false"},
                         "annotations": {"sidecar.istio.io/inject": "false"}}, "spec": spec}
