# shellcheck shell=bash
# What stands in the files of the cluster: users, names of hosts, Slurm's configuration, ssh, modules. To be sourced by
# up.sh; all of it is written before anything starts.

# alice has accounts; eve is known to the machine and not to Slurm.
USERS=(alice:20001 eve:20002)

write_etc() {
    local etc=$ROOT/system/etc file user id
    mkdir -p "$etc"/{slurm,ssh,lmod}
    for file in passwd group shadow; do grep -vE '^(alice|eve):' "/etc/$file" >"$etc/$file"; done
    chmod 640 "$etc/shadow"
    for user in "${USERS[@]}"; do
        id=${user#*:} user=${user%:*}
        echo "$user:x:$id:$id:$user:$ROOT/home/$user:/bin/bash" >>"$etc/passwd"
        echo "$user:x:$id:" >>"$etc/group"
        echo "$user:*:19000::::::" >>"$etc/shadow" # "!" would be a locked user, whom sshd refuses
        echo "$user:$((id * 100000)):65536" | tee -a "$etc/subuid" >>"$etc/subgid"
        install -d -m 755 -o "$id" -g "$id" "$ROOT/home/$user"
    done
    {
        echo "127.0.0.1 localhost"
        echo "$(ip_of laptop) laptop"
        echo "$(ip_of ctl) ctl"
        echo "$(ip_of login) login"
        for number in $(seq "$NODES"); do echo "$(ip_of "n$number") n$number n$number.$NAME.test"; done
    } >"$etc/hosts"
    : >"$etc/resolv.conf" # compute nodes reach no name server
}

write_slurm_conf() {
    local conf=$ROOT/conf/slurm number gres='' plugins=''
    mkdir -p "$conf" "$ROOT/run/munge"
    (umask 077 && head -c 1024 /dev/urandom >"$ROOT/conf/munge.key")
    [ -z "$SLURM" ] || plugins="PluginDir=$SLURM/root/usr/lib/$(uname -m)-linux-gnu/slurm-wlm"
    if [ "$GPUS" -gt 0 ]; then
        gres="Gres=gpu:fake:$GPUS"
        write_gpus
    fi
    write_tracking
    {
        render_slurm_conf
        [ "$GPUS" = 0 ] || printf '%s\n' GresTypes=gpu AccountingStorageTRES=gres/gpu
        for number in $(seq "$NODES"); do
            echo "NodeName=n$number NodeAddr=$(ip_of "n$number") CPUs=$CPUS RealMemory=$MEM $gres State=UNKNOWN"
        done
        render_partitions
        echo "$plugins"
    } >"$conf/slurm.conf"
}

# Character devices with NVIDIA's number, so that there is something to be allowed or refused.
write_gpus() {
    local number
    mkdir -p "$ROOT/dev"
    for number in $(seq 0 $((GPUS - 1))); do mknod -m 666 "$ROOT/dev/nvidia$number" c 195 "$number"; done
    echo "NodeName=n[1-$NODES] Name=gpu Type=fake File=$ROOT/dev/nvidia[0-$((GPUS - 1))]" >"$ROOT/conf/slurm/gres.conf"
}

# What users mount images with; machines without fuse3's rules let nobody but root do that.
write_fuse() {
    mkdir -p "$ROOT/dev"
    [ ! -e /dev/fuse ] || mknod -m 666 "$ROOT/dev/fuse" c 10 229
}

write_tracking() {
    if [ "$CGROUPS" = 0 ]; then
        TRACKING=$(printf '%s\n' ProctrackType=proctrack/linuxproc TaskPlugin=task/none \
            JobAcctGatherType=jobacct_gather/linux)
        return
    fi
    TRACKING=$(printf '%s\n' ProctrackType=proctrack/cgroup TaskPlugin=task/cgroup \
        JobAcctGatherType=jobacct_gather/cgroup)
    printf '%s\n' CgroupPlugin=cgroup/v1 CgroupMountpoint=/sys/fs/cgroup ConstrainRAMSpace=yes ConstrainSwapSpace=no \
        "ConstrainDevices=$([ "$GPUS" = 0 ] && echo no || echo yes)" ConstrainCores=no >"$ROOT/conf/slurm/cgroup.conf"
}

# Times are short, so that a test sees within seconds what takes minutes elsewhere. cred_expire sets the pause before a
# requeued job starts again, which is one second longer; below 6 Slurm falls back to its 120.
render_slurm_conf() {
    cat <<EOC
ClusterName=$NAME
SlurmctldHost=ctl($(ip_of ctl))
SlurmUser=root
AuthType=auth/munge
AuthInfo=cred_expire=6
CredType=cred/munge
SlurmdParameters=config_overrides
MpiDefault=none
$TRACKING
ReturnToService=2
SlurmctldTimeout=10
SlurmdTimeout=6
MessageTimeout=4
BatchStartTimeout=10
InactiveLimit=0
MinJobAge=600
KillWait=5
OverTimeLimit=0
CompleteWait=0
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=100000,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=$((MEM / CPUS))
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=$(ip_of ctl)
AccountingStorageEnforce=associations,limits,qos
JobCompType=jobcomp/none
SlurmctldPidFile=$ROOT/run/slurmctld.pid
SlurmdPidFile=$ROOT/run/slurmd.%n.pid
SlurmdSpoolDir=$ROOT/spool/%n
StateSaveLocation=$ROOT/state
SlurmctldLogFile=$ROOT/log/slurmctld.log
SlurmdLogFile=$ROOT/log/slurmd.%n.log
SlurmctldDebug=info
SlurmdDebug=info
EOC
}

# batch: the usual one. debug: one node, five minutes. preempt: its jobs make room for those of batch. staff: for an
# account that alice does not have. closed: takes jobs and starts none.
render_partitions() {
    local usual="Nodes=ALL Default=NO DefaultTime=10 MaxTime=60 State=UP"
    cat <<EOC
PartitionName=batch ${usual/Default=NO/Default=YES} PriorityTier=5 PreemptMode=OFF
PartitionName=debug Nodes=n1 Default=NO DefaultTime=1 MaxTime=5 State=UP PriorityTier=10 PreemptMode=OFF
PartitionName=preempt $usual PriorityTier=1 PreemptMode=REQUEUE GraceTime=4
PartitionName=staff $usual PriorityTier=5 PreemptMode=OFF AllowAccounts=staff
PartitionName=closed ${usual/State=UP/State=DOWN} PriorityTier=5 PreemptMode=OFF
EOC
}

write_slurmdbd_conf() {
    (umask 077 && cat >"$ROOT/conf/slurm/slurmdbd.conf") <<EOC
AuthType=auth/munge
DbdHost=ctl
DbdAddr=$(ip_of ctl)
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm_acct_db
LogFile=$ROOT/log/slurmdbd.log
PidFile=$ROOT/run/slurmdbd.pid
DebugLevel=info
$(grep ^PluginDir "$ROOT/conf/slurm/slurm.conf" || true)
EOC
}

# One key for every host, one that brings the laptop's user in as alice, and alice from one host to another.
write_ssh() {
    local ssh=$ROOT/conf/ssh home=$ROOT/home/alice host
    mkdir -p "$ssh" "$home/.ssh"
    ssh-keygen -q -t ed25519 -N '' -C "$NAME" -f "$ssh/host_ed25519"
    ssh-keygen -q -t ed25519 -N '' -C "$NAME" -f "$ssh/id_ed25519"
    cp "$ssh"/id_ed25519{,.pub} "$home/.ssh/"
    cp "$ssh/id_ed25519.pub" "$home/.ssh/authorized_keys"
    chmod -R go= "$home/.ssh"
    chown -R --reference="$home" "$home/.ssh"
    for host in login $(seq -f 'n%g' "$NODES"); do
        echo "$host,$(ip_of "$host") $(cut -d' ' -f1,2 "$ssh/host_ed25519.pub")"
    done | tee "$ROOT/system/etc/ssh/ssh_known_hosts" >"$ssh/known_hosts"
    printf '%s\n' "HostKey $ssh/host_ed25519" "PidFile none" "PasswordAuthentication no" "UsePAM no" "StrictModes no" \
        "LogLevel ERROR" "Subsystem sftp internal-sftp" >"$ROOT/conf/sshd_config"
    printf '%s\n' "Host login" "  HostName $(ip_of login)" "  User alice" "  IdentityFile $ssh/id_ed25519" \
        "  IdentitiesOnly yes" "  UserKnownHostsFile $ssh/known_hosts" "  StrictHostKeyChecking yes" \
        "  GlobalKnownHostsFile /dev/null" >"$ssh/config"
}

# What podman needs without systemd, without crun (which refuses control groups of version 1) and without a network of
# its own; nothing that a user would have to know. Containers live on the host's own disk, as two hosts that shared a
# store would take each other's for dead ones; images are read from a store that is shared.
write_podman() {
    local etc=$ROOT/system/etc/containers home=$ROOT/home/alice
    mkdir -p "$etc" "$home/.config/containers" "$home/images"
    printf '%s\n' '[engine]' 'runtime = "runc"' 'cgroup_manager = "cgroupfs"' 'events_logger = "file"' \
        '[containers]' 'netns = "host"' >"$etc/containers.conf"
    printf '%s\n' '[storage]' 'driver = "overlay"' 'graphroot = "/tmp/containers-alice"' \
        '[storage.options]' "additionalimagestores = [\"$home/images\"]" >"$home/.config/containers/storage.conf"
    chown -R --reference="$home" "$home/.config" "$home/images"
}

# Two modules that do nothing but set a variable.
write_modules() {
    local modules=$ROOT/conf/modules name
    echo "$modules" >"$ROOT/system/etc/lmod/modulespath"
    for name in Toolchain/2025 CUDA/12.4; do
        mkdir -p "$modules/${name%/*}"
        echo "setenv(\"TEST_MODULE_${name%/*}\", \"${name#*/}\")" >"$modules/$name.lua"
    done
}
