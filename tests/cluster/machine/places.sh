# shellcheck shell=bash
# How a host sees the file system: shared with all hosts, but for what is local on real ones. To be sourced inside a
# mount namespace of its own.

# What is installed for the cluster alone, and its own users and host names, laid over the system's folders. Read-only,
# as on the nodes of many a site.
lay_over_system() {
    local upper=$CACHE/system
    mkdir -p "$upper"/{usr,etc}
    mount -t overlay overlay -o "ro,lowerdir=${SLURM:+$SLURM/over/usr:}$upper/usr:/usr" /usr
    mount -t overlay overlay -o "ro,lowerdir=$ROOT/system/etc:$upper/etc:/etc" /etc
    # Not through the overlay, as a file below that must not change while it is mounted.
    mount --bind "$ROOT/conf/slurm" /etc/slurm
}

# Memory, scratch space and run-time files of this host alone; and published folders that are seen by everyone, though
# they lie in a folder that is now private, or in one that other users may not enter (such as /root).
give_own_places() {
    local folder published=() number
    mapfile -t published <"$ROOT/conf/published"
    mount -t tmpfs tmpfs /mnt
    for number in "${!published[@]}"; do
        mkdir "/mnt/$number"
        mount --bind "${published[$number]}" "/mnt/$number"
    done
    cover 1777 /tmp
    cover 1777 /dev/shm
    cover 755 /run
    mkdir -p /run/{munge,sshd,lock,user}
    mount --bind "$ROOT/run/munge" /run/munge
    [ ! -e "$ROOT/dev/fuse" ] || mount --bind "$ROOT/dev/fuse" /dev/fuse
    for folder in "${published[@]}"; do open_ways "$folder"; done
    for number in "${!published[@]}"; do
        folder=${published[$number]}
        [ -e "$folder" ] && continue
        mkdir -p "$folder"
        mount --bind "/mnt/$number" "$folder"
    done
    umount -R /mnt
    mount_own_sys
    mount --make-rshared / # as on any system with systemd; for the host's own sub-namespaces, not for other hosts
}

# The kernel's view of devices, such as network interfaces, is that of whoever mounted it.
mount_own_sys() {
    mount --rbind /sys/fs/cgroup /mnt
    mount -t sysfs -o ro sysfs /sys
    mount --rbind /mnt /sys/fs/cgroup
    umount -R /mnt
}

cover() { mount -t tmpfs -o "mode=$1" tmpfs "$2"; }

# open_ways FOLDER: cover the first folder above it that not everyone may enter
open_ways() {
    local way='' part
    while read -r -d / part; do
        way+=${part:+/$part}
        [ -e "${way:-/}" ] || return 0
        [[ $(stat -c %A "${way:-/}") == *[xt] ]] || { cover 755 "$way"; return; }
    done <<<"$1"
}
