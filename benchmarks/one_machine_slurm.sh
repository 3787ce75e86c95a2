#!/usr/bin/env bash
# A Slurm of several nodes on this machine, and COMMAND in it:
#
#   benchmarks/one_machine_slurm.sh COMMAND...
#   NODES=3 CPUS=2 benchmarks/one_machine_slurm.sh sbatch --wait -N2 -n2 job.sh      (default: 2 nodes of 4 CPUs)
#   OPTIONS='SlurmctldParameters=preempt_send_user_signal' benchmarks/one_machine_slurm.sh ...   (lines of slurm.conf)
#
# Needs Debian's slurmctld, slurmd, slurm-client and munge, libpmix-dev for --mpi=pmix, and root. Nodes are n0, n1, ... Partitions: main (default),
# two (main's nodes again, for heterogeneous jobs) and high, which preempts main with REQUEUE and a grace of 20 s.
# COMMAND sees SLURM_CONF, SLURM_ROOT (logs in log/) and sbatch, srun, scontrol on PATH. Nodes share the processors and
# all files but TmpFS. Exit status: COMMAND's; 2 for a wrong call; 77 where this cannot run, with one line on why.
#
# Everything lives in one process namespace whose first process dies with this script, SIGKILL included.

refuse() { echo "one_machine_slurm: $1" >&2; exit 2; }
skip() { echo "one_machine_slurm: skipped: ${1//$'\n'/; }" >&2; exit 77; }

# --- inside: the first process of the new namespaces --------------------------------------------------------
write_conf() {
    local i
    cat <<END
ClusterName=toy
SlurmctldHost=$HOSTNAME(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort=16817
AuthType=auth/munge
AuthInfo=socket=$SLURM_ROOT/run/munge.socket,cred_expire=5
CryptoType=crypto/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0,sched_min_interval=0
StateSaveLocation=$SLURM_ROOT/state
SlurmdSpoolDir=$SLURM_ROOT/spool/%n
SlurmctldPidFile=$SLURM_ROOT/run/ctld.pid
SlurmdPidFile=$SLURM_ROOT/run/slurmd.%n.pid
SlurmctldLogFile=$SLURM_ROOT/log/ctld.log
SlurmdLogFile=$SLURM_ROOT/log/slurmd.%n.log
SlurmdParameters=config_overrides
ReturnToService=2
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
KillWait=10
InactiveLimit=0
MinJobAge=300
TmpFS=$SLURM_ROOT/tmp/%n
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
END
    for ((i = 0; i < NODES; i++)); do
        echo "NodeName=n$i NodeHostname=$HOSTNAME NodeAddr=127.0.0.1 Port=$((17001 + i)) CPUs=$CPUS RealMemory=8000"
    done
    for i in "main Default=YES PriorityTier=1 GraceTime=20 PreemptMode=REQUEUE" \
        "two PriorityTier=1 PreemptMode=OFF" "high PriorityTier=10 PreemptMode=OFF"; do
        echo "PartitionName=${i%% *} Nodes=ALL MaxTime=60 State=UP ${i#* }"
    done
    echo "${OPTIONS:-}"
}
await() { # SECONDS WORDS... : until the command succeeds
    local ends_at=$((SECONDS + $1)) log
    while ((SECONDS < ends_at)); do "${@:2}" >/dev/null 2>&1 && return; sleep 0.05; done
    for log in "$SLURM_ROOT"/log/*; do echo "== $log"; tail -n 5 "$log"; done >&2
    echo "one_machine_slurm: not within $1 s: ${*:2}" >&2
    exit 1
}
if [[ ${1:-} == --inside ]]; then
    mount -t tmpfs -o mode=1777 slurm /dev/shm # segments of ranks that are killed go with it
    trap 'exit 143' TERM INT # the first process of a namespace ignores what it has no handler for
    ip link set lo up
    # Slurm resolves its own address only where an interface other than the loopback has one.
    ip link add slurm0 type veth peer name slurm1
    ip address add 10.78.0.1/24 dev slurm0
    ip link set slurm0 up
    ip link set slurm1 up
    HOSTNAME=$(hostname -s)
    mkdir -p "$SLURM_ROOT"/{state,spool,run,log,tmp}
    for ((i = 0; i < NODES; i++)); do mkdir -m 1777 "$SLURM_ROOT/tmp/n$i"; done
    write_conf >"$SLURM_CONF"
    (umask 077; head -c 128 /dev/urandom >"$SLURM_ROOT/munge.key")
    munged --force --foreground --key-file="$SLURM_ROOT/munge.key" --socket="$SLURM_ROOT/run/munge.socket" \
        --pid-file="$SLURM_ROOT/run/munge.pid" --seed-file="$SLURM_ROOT/run/munge.seed" \
        --log-file="$SLURM_ROOT/log/munge.log" >"$SLURM_ROOT/log/munge.out" 2>&1 &
    await 10 test -S "$SLURM_ROOT/run/munge.socket"
    slurmctld -D >"$SLURM_ROOT/log/ctld.out" 2>&1 &
    for ((i = 0; i < NODES; i++)); do slurmd -D -N "n$i" >"$SLURM_ROOT/log/n$i.out" 2>&1 & done
    ready() { [[ $(timeout 2 sinfo -h -p main -t idle -o %D 2>/dev/null) == "$NODES" ]]; }
    await 20 ready
    trap 'kill -TERM "$command" 2>/dev/null' TERM
    "${@:2}" <&0 &
    command=$!
    while wait "$command"; status=$?; kill -0 "$command" 2>/dev/null; do :; done # a signal ends a wait early
    exit "$status" # the kernel ends what is left of this process namespace
fi

# --- outside: check, start, and end it on a signal ----------------------------------------------------------
(($# >= 1)) || refuse "no COMMAND; see the head of this file"
export NODES=${NODES:-2} CPUS=${CPUS:-4}
[[ $NODES =~ ^[1-9][0-9]?$ && $CPUS =~ ^[1-9][0-9]?$ ]] || refuse "got NODES=$NODES CPUS=$CPUS; expected 1 to 99"
export PATH=$PATH:/usr/sbin:/sbin
lacks=()
for program in slurmctld slurmd srun sbatch scontrol munged unshare setpriv ip; do
    command -v "$program" >/dev/null || lacks+=("$program")
done
((${#lacks[@]} == 0)) || skip "not installed: ${lacks[*]} (apt-get install slurmctld slurmd slurm-client munge)"
((EUID == 0)) || skip "needs root"
for variable in $(compgen -v SLURM_); do unset "$variable"; done
export SLURM_ROOT=/dev/shm/slurm SLURM_CONF=/dev/shm/slurm/slurm.conf # in a tmpfs of our own
new=(unshare --net --mount --ipc --pid --fork --kill-child --mount-proc)
problem=$("${new[@]}" true 2>&1) || skip "namespaces are not allowed here: $problem"

# shellcheck source=/dev/null
. "${BASH_SOURCE%/*}/../mpi_scripts/inside.sh"
run_inside "$@"
