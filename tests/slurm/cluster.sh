#!/usr/bin/env bash
# A SLURM cluster on one machine, from the system's packages: seven nodes with two GPUs each (plain files stand in for the
# cards), accounting with slurmdbd and MariaDB, memory limits that kill. For tests and for trying the profile; as root.
# Partitions: cpu (n1, n2), spare (n3, n4), low and high (n5; high preempts low), gpu (n6, n7), big (two nodes of eight GPUs that
# are never up: jobs can be submitted there and looked at).
#
#   tests/slurm/cluster.sh start [folder]    about 10 s
#   tests/slurm/cluster.sh stop [folder]     stops every daemon and takes /etc/slurm/*.conf links away
#   tests/slurm/cluster.sh install           Debian and Ubuntu: the packages, without starting their services
#
# Everything lies in the folder (/var/tmp/posttrain-slurm unless named). Only /etc/slurm/{slurm,gres}.conf are links
# outside it, because Snakemake's executor removes SLURM_CONF from a job's environment; a file that is not this script's
# is never replaced.
set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin
folder=${2:-/var/tmp/posttrain-slurm}
port=${SLURM_TEST_PORT:-17000}

fail() { echo "error: $*" >&2; exit 2; }

await() { # await SECONDS WHAT COMMAND...
    local left=$(($1 * 5)) what=$2
    shift 2
    until timeout 5 "$@" > /dev/null 2>&1; do
        left=$((left - 1))
        [ "$left" -gt 0 ] || fail "$what did not come up; look into $folder/log"
        sleep 0.2
    done
}

install_packages() {
    command -v apt-get > /dev/null || fail "no apt-get here: install slurmctld, slurmd, slurmdbd, munge and mariadb-server yourself"
    apt-get update -q
    DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends slurm-wlm slurmdbd munge mariadb-server bindfs
}

write_configuration() {
    local cpus memory
    cpus=$(nproc)
    memory=$(awk '/MemTotal/ {print int($2 / 1024 * 0.8)}' /proc/meminfo)
    cat > "$folder/slurm.conf" << END
ClusterName=posttrain
SlurmctldHost=$(hostname)
SlurmctldPort=$port
SlurmctldPidFile=$folder/slurmctld.pid
SlurmctldLogFile=$folder/log/slurmctld.log
StateSaveLocation=$folder/state
SlurmUser=root
SlurmdPidFile=$folder/slurmd-%n.pid
SlurmdLogFile=$folder/log/slurmd-%n.log
SlurmdSpoolDir=$folder/spool-%n
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket
CryptoType=crypto/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=5,bf_interval=5
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1
JobAcctGatherParams=OverMemoryKill
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=localhost
AccountingStoragePort=$((port + 3))
AccountingStoragePass=$folder/munge.socket
AccountingStorageTRES=gres/gpu
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
MinJobAge=120
KillWait=3
SlurmdTimeout=60
InactiveLimit=0
ReturnToService=2
MpiDefault=none
GresTypes=gpu
# The nodes offer more CPUs than the machine may have, so that two-node jobs fit on a small one.
NodeName=n[1-7] NodeHostname=$(hostname) NodeAddr=127.0.0.1 Port=[$((port + 11))-$((port + 17))] Sockets=1 CoresPerSocket=$((cpus > 4 ? cpus : 4)) ThreadsPerCore=1 RealMemory=$memory Gres=gpu:2
NodeName=big[1-2] NodeAddr=127.0.0.1 Port=[$((port + 21))-$((port + 22))] Sockets=2 CoresPerSocket=64 ThreadsPerCore=1 RealMemory=2000000 Gres=gpu:8 State=DOWN
PartitionName=cpu Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP PriorityTier=5
PartitionName=gpu Nodes=n[6-7] MaxTime=INFINITE State=UP PriorityTier=5
PartitionName=spare Nodes=n[3-4] MaxTime=INFINITE State=UP PriorityTier=5
PartitionName=low Nodes=n5 MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=high Nodes=n5 MaxTime=INFINITE State=UP PriorityTier=10
PartitionName=big Nodes=big[1-2] MaxTime=INFINITE State=UP PriorityTier=5
SlurmdParameters=config_overrides
END
    mkdir -p "$folder/gpu"
    ln -s /dev/null "$folder/gpu/nvidia0" && ln -s /dev/null "$folder/gpu/nvidia1" # SLURM wants a character device
    echo "NodeName=n[1-7] Name=gpu File=$folder/gpu/nvidia[0-1]" > "$folder/gres.conf"
    cat > "$folder/slurmdbd.conf" << END
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket
DbdHost=localhost
DbdPort=$((port + 3))
SlurmUser=root
LogFile=$folder/log/slurmdbd.log
PidFile=$folder/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort=$((port + 4))
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm_acct_db
END
    chmod 600 "$folder/slurmdbd.conf"
}

link_configuration() {
    mkdir -p /etc/slurm
    for name in slurm.conf gres.conf slurmdbd.conf; do
        if [ -e "/etc/slurm/$name" ] && [ "$(readlink "/etc/slurm/$name")" != "$folder/$name" ]; then
            fail "/etc/slurm/$name is there and not from this script; this machine has a SLURM of its own"
        fi
        ln -sfn "$folder/$name" "/etc/slurm/$name"
    done
}

accounts() { timeout 20 sacctmgr -i "$@" > "$folder/log/sacctmgr.log" 2>&1; }
mysql_run() { mariadb --socket="$folder/mysql.socket" -u root "$@"; }

start() {
    [ "$(id -u)" = 0 ] || fail "starting slurmd needs root"
    for program in slurmctld slurmd slurmdbd munged mariadbd sacctmgr; do
        command -v "$program" > /dev/null || fail "$program is missing: run $0 install"
    done
    stop
    mkdir -p "$folder"/{log,state,run}
    chmod 755 "$folder"
    write_configuration
    link_configuration

    dd if=/dev/urandom bs=1 count=1024 of="$folder/munge.key" 2> /dev/null
    chmod 400 "$folder/munge.key"
    munged --force --socket="$folder/munge.socket" --key-file="$folder/munge.key" --pid-file="$folder/munged.pid" \
        --log-file="$folder/log/munged.log" --seed-file="$folder/munged.seed"

    mariadb-install-db --no-defaults --user=root --datadir="$folder/mysql" --auth-root-authentication-method=normal \
        --skip-test-db > "$folder/log/mariadb-install.log" 2>&1
    mariadbd --no-defaults --user=root --datadir="$folder/mysql" --socket="$folder/mysql.socket" --bind-address=127.0.0.1 \
        --port=$((port + 4)) --pid-file="$folder/mysql.pid" --innodb-buffer-pool-size=64M --innodb-lock-wait-timeout=900 \
        > "$folder/log/mariadb.log" 2>&1 &
    disown
    await 60 MariaDB mariadb --socket="$folder/mysql.socket" -u root -e 'select 1'
    mysql_run -e "create database slurm_acct_db; create user slurm@localhost identified by 'slurm'; create user slurm@'127.0.0.1' identified by 'slurm'; grant all on slurm_acct_db.* to slurm@localhost; grant all on slurm_acct_db.* to slurm@'127.0.0.1';"

    slurmdbd
    await 60 slurmdbd sacctmgr -n show cluster
    accounts add cluster posttrain
    accounts add account test cluster=posttrain Description=test Organization=test
    accounts add user root account=test
    slurmctld -c
    await 30 slurmctld scontrol ping
    for node in n1 n2 n3 n4 n5 n6 n7; do
        slurmd -N "$node"
    done
    await 60 "a node" bash -c '[ "$(sinfo -h -N -t idle -o %N | sort -u | wc -l)" = 7 ]'
    echo "SLURM is up, account test: $(sinfo -h -p gpu -o 'in partition gpu %D nodes with %G and %c CPUs each')"
}

stop() {
    local file
    [ -d "$folder" ] || return 0
    if [ -e "$folder/slurmctld.pid" ] && [ "$(readlink /etc/slurm/slurm.conf)" = "$folder/slurm.conf" ]; then
        timeout 10 scancel --me > /dev/null 2>&1 || true
    fi
    for file in "$folder"/slurmd-n[1-7].pid "$folder"/slurmctld.pid "$folder"/slurmdbd.pid "$folder"/mysql.pid "$folder"/munged.pid; do
        [ -s "$file" ] || continue
        local pid
        pid=$(cat "$file")
        kill "$pid" 2> /dev/null || continue
        for _ in $(seq 50); do kill -0 "$pid" 2> /dev/null || break; sleep 0.1; done
        kill -9 "$pid" 2> /dev/null || true
    done
    for file in slurm.conf gres.conf slurmdbd.conf; do
        [ "$(readlink "/etc/slurm/$file")" != "$folder/$file" ] || rm "/etc/slurm/$file"
    done
    rm -rf "$folder"
}

case ${1:-} in
    start) start ;;
    stop) stop ;;
    install) install_packages ;;
    *) sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
