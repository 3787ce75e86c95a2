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

ranks=0
for host in ${hosts//,/ }; do ((ranks += ${host#*:})); done
mpirun=$(command -v mpirun)
exec horovodrun --mpi -np "$ranks" -H "$hosts" --network-interfaces "$interface" \
    --binding-args="--map-by slot --bind-to none" --mpi-args="--stdin none --prefix ${mpirun%/bin/*}" \
    "$python" "${train[@]}" "$@"
