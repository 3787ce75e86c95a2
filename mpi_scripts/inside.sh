# Sourced by two_hosts.sh and benchmarks/one_machine_slurm.sh.
#
# run_inside WORDS...: run `$0 --inside WORDS...` in the namespaces that ${new[@]} makes, and exit with its status. A
# signal ends it: the first process inside receives SIGTERM and has 1.8 s; then the kernel ends the rest.
run_inside() {
    # setpriv: unshare is killed with this script, and kills the first process inside. The parent is compared because
    # this script may already have gone when setpriv asked for that.
    # shellcheck disable=SC2016,SC2154
    setpriv --pdeathsig KILL bash -c '((PPID == $1)) && shift && exec "$@"' _ $$ \
        "${new[@]}" bash "$0" --inside "$@" <&0 &
    child=$!
    trap 'caught=130' INT
    trap 'caught=143' TERM
    trap 'caught=129' HUP
    caught=0
    wait "$child"
    status=$?
    ((caught)) || exit "$status"
    first=$(grep -lsxE "PPid:[[:space:]]+$child" /proc/[0-9]*/status)
    kill -TERM ${first:+"${first//[^0-9]/}"} 2>/dev/null
    for _ in {1..18}; do kill -0 "$child" 2>/dev/null && sleep 0.1; done
    kill -KILL "$child" 2>/dev/null
    exit "$caught"
}
