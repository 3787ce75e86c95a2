"""``python -m hvdtrain launch --launcher kubernetes``: the job as manifests, printed or passed to kubectl.

Owns the options, the YAML and the calls of kubectl; `hvdtrain.cluster.launchers.kubernetes` decides what is in it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence

from hvdtrain.cluster.launchers.kubernetes import HOSTFILE, KINDS, Manifest, PodJob, claim, secret
from hvdtrain.cluster.launchers.spec import valid_name
from hvdtrain.core.errors import UserError
from hvdtrain.core.resolve import check_url, is_url, redacted

NAME = "kubernetes"
RESTARTS = 10
KUBECTL_S = 60.0
"""Longest wait for kubectl, which has its own limit of `REQUEST` for a request."""

REQUEST = "--request-timeout=30s"

NOT_RUN = "# Rendered by hvdtrain; checked against schemas. The developers of hvdtrain have not run it on a cluster."
"""First line of every rendered file."""

_PRIVATE = re.compile(r"SECRET|TOKEN|PASSW|CREDENTIAL|PRIVATE|(^|_)KEY($|_)|APIKEY", re.IGNORECASE)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that only this launcher reads."""
    group = parser.add_argument_group("Kubernetes", "with --launcher kubernetes: one pod and one GPU for each rank")
    group.add_argument("--image", default="", help="image made from containers/Containerfile, with a digest")
    group.add_argument("--kind", choices=list(KINDS), default="mpijob",
                       help="mpijob: MPI operator (default); trainjob: Kubeflow Trainer v2")
    group.add_argument("--name", default="hvdtrain", help="name of the job (default hvdtrain)")
    group.add_argument("--namespace", default="default", help="namespace (default: default)")
    group.add_argument("--gpu", default="nvidia.com/gpu", metavar="RESOURCE",
                       help="resource of which each pod gets one (default nvidia.com/gpu); none for CPUs")
    group.add_argument("--claim", action="append", default=[], metavar="CLAIM[:PATH]",
                       help="mount a PersistentVolumeClaim (default path /runs); may be repeated")
    group.add_argument("--secret", action="append", default=[], metavar="VARIABLE=SECRET[/KEY]",
                       help="set a variable from a Secret of the cluster; may be repeated")


def refuse(args: argparse.Namespace) -> None:
    """Raise `UserError` for options of this launcher beside another one, which would be ignored."""
    for name, default in (("image", ""), ("claim", []), ("secret", []), ("kind", "mpijob"), ("name", "hvdtrain"),
                          ("namespace", "default"), ("gpu", "nvidia.com/gpu")):
        if getattr(args, name) != default:
            raise UserError(f"--{name} is given without --launcher kubernetes", "both, or neither",
                            f"add --launcher kubernetes, or remove --{name}")


def main(args: argparse.Namespace) -> int:
    """Print the manifests, or have kubectl create the job; return 0 when kubectl accepted it."""
    job = job_of(args)
    manifests = KINDS[args.kind](job)
    if "@sha256:" not in job.image:
        print(f"note: {job.image} has no digest: a restart may get another image", file=sys.stderr)
    if args.dry_run:
        print(as_yaml(manifests), end="")
        return 0
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        raise UserError("there is no kubectl on PATH", "kubectl with access to the cluster",
                        "install it, or pass --dry-run and create the job from the printed file")
    *shared, own = manifests
    for manifest in shared:
        call([kubectl, "apply", REQUEST, "-f", "-"], as_yaml([manifest]))
    # Not apply: a finished job of this name would be left as it is, and nothing would run.
    call([kubectl, "create", REQUEST, "--namespace", job.namespace, "-f", "-"], as_yaml([own]))
    selector = f"job-name={job.name}-launcher" if args.kind == "mpijob" else f"job-name={job.name}-launcher-0"
    print(f"hvdtrain launch: {job.ranks} pods, {args.kind} {job.name} in {job.namespace}\n"
          f"follow it: kubectl logs --namespace {job.namespace} --selector {selector} --follow\n"
          f"end it: kubectl delete --namespace {job.namespace} {args.kind} {job.name}", file=sys.stderr)
    return 0


def job_of(args: argparse.Namespace) -> PodJob:
    """Return the job of these options. `UserError` for options of other launchers, and for values in manifests."""
    for option, given in (("-H", args.hosts), ("--hostfile", args.hostfile), ("--ssh", args.ssh is not None),
                          ("--allow-run-as-root", args.allow_run_as_root), ("--oversubscribe", args.oversubscribe)):
        if given:
            raise UserError(f"{option} is given with --launcher kubernetes, whose operator places one rank in each pod",
                            "-np N", f"remove {option}")
    claims = tuple(claim(text) for text in args.claim)
    if len({path for _, path in claims}) < len(claims):
        raise UserError("two --claim have one path", "a path for each", "add :PATH to one of them")
    secrets = tuple(secret(text) for text in args.secret)
    env = tuple(_value(word) for word in args.env)
    names = [name for name, *_ in (*env, *secrets)]
    if len(set(names)) < len(names):
        raise UserError("a variable is given twice by --env and --secret", "each once", "remove one of the two")
    restarts = RESTARTS if args.restarts is None else args.restarts
    words = ["python", "-m", "hvdtrain", "launch", "--hostfile", HOSTFILE, "--restarts", str(restarts)]
    words += [word for name in names for word in ("--env", name)]
    words += ["--iface", args.iface] if args.iface else []
    words += ["--bind", args.bind] if args.bind != "none" else []
    words += ["--cores-per-rank", str(args.cores_per_rank)] if args.cores_per_rank != 1 else []
    words += [f"--mpi-args={text}" for text in args.mpi_args]
    words += _program(args.words, args.out, claims)
    job = PodJob(args.name, args.image, args.np, tuple(words), args.namespace, restarts,
                 "" if args.gpu == "none" else args.gpu, claims, env, secrets)
    job.check()
    return job


def as_yaml(manifests: Sequence[Manifest]) -> str:
    """Return the manifests as one file of YAML documents."""
    import yaml

    return NOT_RUN + "\n" + "---\n".join(
        yaml.dump(one, Dumper=_plain(), sort_keys=False, width=110, allow_unicode=True) for one in manifests)


def call(words: Sequence[str], text: str) -> None:
    """Run kubectl with ``text`` as its input; `UserError` with its last line where it fails or does not answer."""
    try:
        # In a session of its own: a plugin that fetches credentials would outlive kubectl, and hold its pipes.
        child = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                 text=True, start_new_session=True)
    except OSError as error:
        raise UserError(f"kubectl cannot be started: {error.strerror}", "a kubectl that runs", "install it") from None
    try:
        output, errors = child.communicate(text, timeout=KUBECTL_S)
    except subprocess.TimeoutExpired:
        raise UserError(f"kubectl {words[1]} did not answer within {KUBECTL_S:g} s", "a cluster that answers",
                        "run kubectl cluster-info") from None
    finally:
        if child.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(child.pid, signal.SIGKILL)
    print(output, end="", flush=True)
    if child.returncode:
        lines = [line.strip() for line in errors.splitlines() if line.strip()] or ["no message"]
        raise UserError(f"kubectl {words[1]} ended with status {child.returncode}: {lines[-1][:300].rstrip('.')}",
                        "a job that the cluster accepts",
                        "for a name in use pass --name; for an unknown kind have the operator installed; "
                        "`kubectl auth can-i create mpijobs` shows missing rights")


def _program(words: Sequence[str], out: str, claims: Sequence[tuple[str, str]]) -> list[str]:
    """Return the words behind the options of the launch in the pod, which may start many times.

    A pod's own files are gone with it: the run must be on a claim or under a URL, and resume.
    """
    trains = words[0] == "train" or words[0].startswith("-")
    if trains and out:
        raise UserError("launch has --out for train, which has its own --out", "--out behind the --",
                        "write: launch ... -- train --out FOLDER")
    folder, resumes = out, False
    for i, word in enumerate(words if trains else ()):
        name, equals, value = word.partition("=")
        if name == "--out":
            folder = value if equals else "".join(words[i + 1:i + 2])
        resumes |= name == "--resume"
    check_url("--out", folder)
    if not is_url(folder) and not any(folder.startswith(path + "/") for _, path in claims):
        raise UserError(f"--out is {redacted(folder)!r}, which is lost with the pod" if folder else "there is no --out",
                        "a folder below a mounted claim, or a URL",
                        f"write {'-- train --out' if trains else 'before the -- --out'} /runs/NAME with --claim CLAIM, "
                        "or s3://bucket/NAME with --secret")
    if trains:
        return ["--", *words, *([] if resumes else ["--resume", "auto"])]
    return ["--out", folder, "--", *words]


def _value(word: str) -> tuple[str, str]:
    """Parse ``--env``: only NAME=VALUE, for a value that anybody who reads manifests may see."""
    name, equals, value = word.partition("=")
    if not valid_name(name):
        raise UserError("--env does not begin with a variable's name", "NAME=VALUE", "correct --env")
    if not equals or _PRIVATE.search(name) or redacted(value) != value:
        raise UserError(f"--env {name} would put " + ("a value of this host" if not equals else "a secret")
                        + " into the manifest", "NAME=VALUE that anybody may read, or --secret",
                        f"create a Secret (kubectl create secret generic NAME --from-literal={name}=...), and pass "
                        f"--secret {shlex.quote(name)}=NAME")
    return name, value


def _plain() -> type:
    """Return a dumper without anchors, which are hard to read where pods are alike."""
    import yaml

    class Plain(yaml.SafeDumper):
        def ignore_aliases(self, data: object) -> bool:
            return True

    return Plain
