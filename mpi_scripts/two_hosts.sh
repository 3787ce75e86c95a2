#!/usr/bin/env bash
# Two (or N) "hosts" on this machine, and COMMAND on the first of them:
#
#   mpi_scripts/two_hosts.sh RATE COMMAND...          RATE: 1gbit, 100mbit, ... or none (no limit)
#   HOSTS=3 SLOTS=2 mpi_scripts/two_hosts.sh ...      3 hosts of 2 slots each; the default is 2 of 1
#
# A host is a network, mount, UTS and IPC namespace: its own name (host0, host1, ...), address (10.77.0.1, ...), eth0,
# /dev/shm and TMPDIR. Processors, memory, process ids and all other files are shared. RATE holds on every host's link,
# in both directions. docs/benchmarks/two-hosts.md has the variables that COMMAND sees. Exit status: COMMAND's; 2 for a wrong call;
# 77 where this cannot run, with one line that says why.
#
# Everything lives in one process namespace whose first process dies with this script, SIGKILL included. Its processes,
# mounts, networks and temporary files go with it; nothing outside it is touched.

state=/dev/shm/two_hosts     # in a tmpfs of our own, so no other run is met here
hosts=$state/hosts           # hosts/NAME is a link to the namespaces of a process on that host
agent=$state/two_hosts_agent # this script: a path without blanks and colons, which mpirun would take apart

refuse() { echo "two_hosts: $1" >&2; exit 2; }
skip() { echo "two_hosts: skipped: ${1//$'\n'/; }" >&2; exit 77; }

# --- what mpirun calls instead of ssh: agent HOST COMMAND LINE ----------------------------------------------
if [[ ${0##*/} == two_hosts_agent ]]; then
    [[ ${1:-} =~ ^(host|10\.77\.0\.)([0-9]{1,2})$ ]] && number=$((10#${BASH_REMATCH[2]}))
    [[ ${1:-} != 10.* ]] || ((number--))
    at=$hosts/host${number:-}
    # Only what the script made: the name becomes part of a path.
    [[ -n ${number:-} && -e $at ]] || { echo "two_hosts: there is no host ${1@Q}" >&2; exit 255; }
    # Like ssh: the rest is one line for the shell over there. Unlike ssh: it inherits the environment.
    export HOSTNAME=host$number
    exec nsenter --net="$at/net" --mount="$at/mnt" --uts="$at/uts" --ipc="$at/ipc" -- sh -c "${*:2}"
fi

# --- inside: the first process of the new namespaces; host 0 ------------------------------------------------
on() { nsenter --net="$hosts/$1/net" -- "${@:2}"; } # HOST WORDS... : run them in a host's network
shape() { # HOST INTERFACE : limit what it sends, then raise it
    # The burst is 1 ms of the rate, so that a pause for computing does not make the next message free.
    local burst=$((rate_bit / 8000 > 4096 ? rate_bit / 8000 : 4096))
    [[ $rate == none ]] || on "$1" tc qdisc add dev "$2" root tbf rate "$rate" burst "$burst" latency 50ms
    on "$1" ip link set "$2" up
}
join() { # HOST INTERFACE HOST INTERFACE : a cable, limited at both ends
    ip link add "$2" netns "$hosts/$1/net" type veth peer name "$4" netns "$hosts/$3/net"
    shape "$1" "$2"
    shape "$3" "$4"
}
new_host() { # NAME : what a host has for itself; Open MPI's files of two hosts must not meet, and must not outlive them
    mount -t tmpfs -o mode=1777 two_hosts /dev/shm
    mkdir -m 1777 /dev/shm/tmp
    mkdir "$state" && install -m 755 "$0" "$agent" # mpirun's daemons look for it on every host
    echo "$1" >/proc/sys/kernel/hostname
}
set_up() {
    local i pid
    new_host host0
    mkdir "$hosts"
    ln -s /proc/1/ns "$hosts/host0"
    printf '%s\n' '127.0.0.1 localhost' '::1 localhost' >"$state/etc_hosts"
    for ((i = 0; i < HOSTS; i++)); do echo "10.77.0.$((i + 1)) host$i" >>"$state/etc_hosts"; done
    mount --bind "$state/etc_hosts" /etc/hosts # before the other hosts, which begin with copies of our mounts
    for ((i = 1; i < HOSTS; i++)); do
        read -r pid < <(exec unshare --net --mount --uts --ipc bash -e "$0" --host "host$i")
        ln -s "/proc/$pid/ns" "$hosts/host$i"
    done
    if ((HOSTS == 2)); then
        join host0 eth0 host1 eth0
    else # a switch, in a network of its own
        read -r pid < <(exec unshare --net bash -e "$0" --host)
        ln -s "/proc/$pid/ns" "$hosts/switch"
        on switch ip link add switch0 type bridge
        on switch ip link set switch0 up
        for ((i = 0; i < HOSTS; i++)); do
            join "host$i" eth0 switch "port$i"
            on switch ip link set "port$i" master switch0
        done
    fi
    for ((i = 0; i < HOSTS; i++)); do
        on "host$i" ip link set lo up
        on "host$i" ip address add "10.77.0.$((i + 1))/24" dev eth0
    done
}
if [[ ${1:-} == --host ]]; then
    [[ -z ${2:-} ]] || new_host "$2"
    echo $$
    # Namespaces last as long as a process in them. (Bound to files they need none, but Linux 6.18 refuses to bind about
    # every third mount namespace.)
    exec sleep infinity <&- >&- 2>&-
fi
if [[ ${1:-} == --inside ]]; then
    rate=$2 rate_bit=$3
    shift 3
    problem=$(set -e; set_up 2>&1)
    failed=$?
    ((failed == 0)) || skip "the hosts could not be made: $problem"
    export TMPDIR=/dev/shm/tmp HOSTNAME=host0 GLOO_SOCKET_IFNAME=eth0
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 # only root gets here
    export TWO_HOSTS_RATE=$rate TWO_HOSTS_IFACE=eth0 TWO_HOSTS_LIST=host0:$SLOTS TWO_HOSTS_MPIRUN_ARGS
    for ((i = 1; i < HOSTS; i++)); do TWO_HOSTS_LIST+=,host$i:$SLOTS; done
    # pml ob1: UCX would find that the hosts share a memory, and leave the cable. Yield: they share the processors too.
    arguments=(--mca plm_rsh_agent "$agent" --mca oob_tcp_if_include eth0 --mca btl_tcp_if_include eth0
        --mca pml ob1 --mca mpi_yield_when_idle 1 --bind-to none)
    TWO_HOSTS_MPIRUN_ARGS=${arguments[*]@Q}
    case ${1##*/} in mpirun | mpiexec)
        set -- "$1" -H "$TWO_HOSTS_LIST" "${arguments[@]}" "${@:2}" ;;
    esac
    # In the background, or bash would hear SIGTERM only afterwards; with the input and Ctrl-C, which & takes away.
    trap 'kill -TERM "$command" 2>/dev/null' TERM
    env --default-signal=INT,QUIT -- "$@" <&0 &
    command=$!
    while wait "$command"; status=$?; kill -0 "$command" 2>/dev/null; do :; done # a signal ends a wait early
    exit "$status"
fi

# --- outside: check, start, and end it on a signal ----------------------------------------------------------
(($# >= 2)) || refuse "got $# words; expected RATE COMMAND...; try: two_hosts.sh 1gbit mpirun -np 2 hostname"
rate=$1
shift
[[ $rate == none || $rate =~ ^([1-9][0-9]{0,3})([kmg])bit$ ]] ||
    refuse "got RATE ${rate@Q}; expected 1gbit, 100mbit, 500kbit, ... or none"
case ${BASH_REMATCH[2]:-} in k) unit=1000 ;; m) unit=1000000 ;; *) unit=1000000000 ;; esac
rate_bit=$((${BASH_REMATCH[1]:-0} * unit))
export HOSTS=${HOSTS:-2} SLOTS=${SLOTS:-1}
[[ $HOSTS =~ ^([2-9]|[1-5][0-9]|6[0-4])$ ]] || refuse "got HOSTS=${HOSTS@Q}; expected 2 to 64"
[[ $SLOTS =~ ^[1-9][0-9]{0,2}$ ]] || refuse "got SLOTS=${SLOTS@Q}; expected 1 to 999"
((EUID == 0)) || skip "needs root"
for tool in unshare nsenter setpriv mount ip tc install; do
    command -v "$tool" >/dev/null || skip "needs the program $tool"
done
new=(unshare --net --mount --uts --ipc --pid --fork --kill-child --mount-proc)
problem=$("${new[@]}" env --default-signal=INT true 2>&1) || skip "namespaces are not allowed here: $problem"

# shellcheck source=/dev/null
. "${BASH_SOURCE%/*}/inside.sh"
run_inside "$rate" "$rate_bit" "$@"
