#!/bin/bash
# install.sh [STEP...]
# Put on this machine what the cluster needs; each step tells its time and does nothing where its work is done.
#
# packages   Debian's own: Slurm with accounting, MPI, ssh, modules, container runtimes
# download   gets the files of `packages` alone, so that a machine can do so beside other work
# apptainer  from Debian's newer suite, unpacked beside the system
# slurm24    Slurm 24.11 from Debian's newer suite, unpacked beside the system
# image      a small system with Python, as a folder and as squashfs, for containers
#
# Only `packages` changes the system. The others fill $CACHE; the cluster lays $CACHE/system over its own view of /usr
# and /etc. Needs root, Debian or a relative of it.
set -euo pipefail
cd "$(dirname "$0")"
. machine/settings.sh

PACKAGES=(slurm-wlm slurm-client slurmctld slurmd slurmdbd munge mariadb-server-core mariadb-client-core
    iproute2 procps libpmix2 openmpi-bin lmod openssh-server openssh-client rsync git
    patchelf binutils squashfs-tools squashfuse charliecloud-runtime podman runc uidmap)
# The suite that Debian's next release comes from. Apptainer is in no release.
NEWER=sid
NEWER_SLURM=trixie
LIBRARIES=usr/lib/$(uname -m)-linux-gnu
SYSTEM=$CACHE/system           # what is laid over /usr and /etc of the cluster's hosts, and of them alone

list_missing() {
    local package
    for package in "${PACKAGES[@]}"; do
        dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || echo "$package"
    done
}

download_packages() {
    local missing
    mapfile -t missing < <(list_missing)
    [ ${#missing[@]} -gt 0 ] || return 0
    apt-get -qq update
    quiet_install --download-only "${missing[@]}"
}

install_packages() {
    local missing
    mapfile -t missing < <(list_missing)
    if [ ${#missing[@]} -gt 0 ]; then
        # Lists that are missing or too old for the mirror are the only reason to get new ones.
        without_services quiet_install "${missing[@]}" 2>/dev/null || {
            apt-get -qq update
            without_services quiet_install "${missing[@]}"
        }
    fi
    # Slurm asks for PMIx by the name that only the development package has.
    mkdir -p "$SYSTEM/$LIBRARIES/pmix2/lib"
    ln -sfn libpmix.so.2 "$SYSTEM/$LIBRARIES/pmix2/lib/libpmix.so"
    touch "$CACHE/packages.ready"
}

quiet_install() {
    DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends -o Dpkg::Use-Pty=0 \
        -o Dpkg::Options::=--force-unsafe-io "$@" >/dev/null 2>"$CACHE/apt.log" ||
        { cat "$CACHE/apt.log" >&2 && return 1; }
}

# A package that is installed starts its daemons; here they start in the cluster alone.
without_services() {
    local policy=/usr/sbin/policy-rc.d
    if [ -e $policy ]; then "$@"; return; fi
    printf '#!/bin/sh\nexit 101\n' >$policy && chmod +x $policy
    local code=0
    "$@" || code=$?
    rm -f $policy
    return $code
}

# Another step may be installing them now.
await_packages() { wait_for 600 "the packages" test -e "$CACHE/packages.ready"; }

# run_beside FOLDER FILE...: let these programs and libraries use the loader and the libraries of FOLDER.
run_beside() {
    local root=$1 file loader
    shift
    await_packages
    loader=$(readlink -f "$root/usr/lib64/ld-linux-x86-64.so.2")
    for file in "$@"; do
        [ "$(head -c 4 "$file" | tail -c 3)" = ELF ] || continue
        # A RUNPATH would not be inherited by the libraries that a library needs.
        patchelf --force-rpath --set-rpath "$root/$LIBRARIES/slurm-wlm:$root/$LIBRARIES" "$file"
        if readelf -l "$file" | grep -q INTERP; then patchelf --set-interpreter "$loader" "$file"; fi
    done
}

# fill FOLDER COMMAND...: let the command fill a folder of the cache, unless it has done so already. In place, as
# programs get paths into it.
fill() {
    local folder=$1
    shift
    [ ! -e "$folder/.filled" ] || return 0
    rm -rf "$folder"
    mkdir -p "$folder"
    "$@" "$folder"
    touch "$folder/.filled"
}

fill_apptainer() {
    local root=$1/root own=$LIBRARIES/apptainer
    machine/fetch.sh $NEWER "$1" 'apptainer|lib' apptainer
    run_beside "$root" "$root/usr/bin/apptainer" "$root/$own"/bin/*
    # It looks for its helpers where it was built for, hence they are laid over the cluster's /usr at that place.
    mkdir -p "$SYSTEM"/{usr/bin,$LIBRARIES,etc}
    cp -a "$root/usr/bin/apptainer" "$SYSTEM/usr/bin/"
    cp -a "$root/$own" "$SYSTEM/$LIBRARIES/"
    cp -a "$root/etc/apptainer" "$SYSTEM/etc/"
}

fill_slurm24() {
    local root=$1/root over=$1/over/usr file name
    machine/fetch.sh $NEWER_SLURM "$1" 'slurm|lib|mariadb-common|mysql-common' \
        slurmctld slurmd slurm-client slurmdbd slurm-wlm-mysql-plugin slurm-wlm-plugins libpmix2
    run_beside "$root" "$root/$LIBRARIES"/slurm-wlm/*.so
    # What is laid over the cluster's /usr are the commands and daemons alone.
    for file in "$root"/usr/bin/s* "$root"/usr/sbin/slurm*; do
        readelf -d "$file" 2>/dev/null | grep -q libslurm || continue
        run_beside "$root" "$file"
        name=${file#"$root/usr/"}
        mkdir -p "$over/${name%/*}"
        cp -a "$file" "$over/${name%-wlm}"
    done
}

fill_image() {
    local root=$1/root
    machine/fetch.sh bookworm "$1" . base-files base-passwd libc-bin bash coreutils grep sed hostname findutils \
        iproute2 python3 libgomp1 libstdc++6 libnuma1 ca-certificates
    cp "$root"/usr/share/base-passwd/passwd.master "$root/etc/passwd"
    cp "$root"/usr/share/base-passwd/group.master "$root/etc/group"
    ln -sfn bash "$root/usr/bin/sh"
    chroot "$root" /sbin/ldconfig
    # Where a host's folders can be mounted, also by a runtime that cannot make them in an image that is read-only.
    mkdir -p "$root"{/opt/site-packages,/opt/src,/dev,/proc,/sys,/tmp,/run,/home,/mnt,"$(dirname "$ROOT")"}
    : >"$root/etc/resolv.conf"
    echo "127.0.0.1 localhost" >"$root/etc/hosts"
    # What is mounted at /opt/src and /opt/site-packages can be imported, with the .pth files that it holds.
    printf '/opt/src\nimport site; site.addsitedir("/opt/site-packages")\n' \
        >"$root/usr/lib/python3/dist-packages/host.pth"
    rm -rf "$root"/usr/share/{doc,man,locale,info,lintian} "$root"/var/lib/apt "$root"/var/cache
    chmod -R a+rX "$root"
    # Without device nodes an ordinary user can unpack it.
    find "$root/dev" -mindepth 1 -delete
    await_packages
    mksquashfs "$root" "$1/image.sqsh" -comp zstd -Xcompression-level 1 -no-progress -quiet >/dev/null
}

step() { # step NAME COMMAND...
    local start=$SECONDS
    "${@:2}"
    printf '%-10s %3d s\n' "$1" $((SECONDS - start))
}

do_step() {
    case $1 in
    packages) step packages install_packages ;;
    download) step download download_packages ;;
    apptainer)
        mkdir -p /var/lib/apptainer/mnt/session # a path that is compiled in
        step apptainer fill "$CACHE/apptainer" fill_apptainer
        ;;
    slurm24 | image) step "$1" fill "$CACHE/$1" "fill_$1" ;;
    *) fail "no step $1; there are: packages, download, apptainer, slurm24, image" ;;
    esac
}

[ "$(id -u)" = 0 ] || fail "needs root, as it installs packages"
command -v apt-get >/dev/null || fail "needs apt-get: the packages are Debian's"
mkdir -p "$CACHE"
if [ $# -gt 0 ]; then
    [ -e "$CACHE/packages.ready" ] || [ "$*" = download ] || do_step packages
    for name in "$@"; do do_step "$name"; done
    exit
fi
# All at once, as they mostly wait for the network.
running=()
for name in apptainer slurm24 image; do do_step $name & running+=($!); done
do_step packages & packages=$!
wait $packages || { kill "${running[@]}"; exit 1; }
for process in "${running[@]}"; do wait "$process"; done
