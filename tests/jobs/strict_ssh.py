"""A placeholder for ssh on the two hosts of mpi_scripts/two_hosts.sh: like sshd it starts with an empty environment.

Owns the script and the question whether two hosts can be made here. It notes each call in SCRIPT.log.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from runner import ROOT

TWO_HOSTS = str(ROOT / "mpi_scripts" / "two_hosts.sh")
CANNOT = 77

_SSH = """#!/bin/bash
echo "$*" >>"$0.log"
host=
while (($#)); do
    case $1 in
        -p | -o | -i) shift 2 ;; # horovodrun has options after the host, too
        -*) shift ;;
        *) [[ -z $host ]] || break; host=$1; shift ;;
    esac
done
exec env -i PATH=/usr/bin:/bin HOME="$HOME" /dev/shm/two_hosts/two_hosts_agent "$host" "$@"
"""


def write_ssh(folder: Path) -> Path:
    """Write the script as ``folder/ssh``."""
    path = folder / "ssh"
    path.write_text(_SSH)
    path.chmod(0o755)
    return path


def require_two_hosts() -> None:
    """Skip, with the rig's own words, where two hosts cannot be made."""
    tried = subprocess.run([TWO_HOSTS, "none", "true"], capture_output=True, text=True, timeout=30)
    if tried.returncode == CANNOT:
        pytest.skip(tried.stderr.strip())
    assert tried.returncode == 0, tried.stderr
