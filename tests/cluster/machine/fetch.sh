#!/bin/bash
# fetch.sh SUITE FOLDER PATTERN PACKAGE...
# Get packages of a Debian suite with all that they depend on, and unpack those whose names begin as the (extended
# regular) PATTERN says, below FOLDER/root. Nothing is installed: apt gets lists and a state of its own, so that it
# neither sees nor changes what is installed here.
set -euo pipefail
suite=$1 folder=$2 pattern=$3
shift 3
apt=$folder/apt

# The mirror that this machine uses already.
mirror=$({ cat /etc/apt/sources.list /etc/apt/sources.list.d/* 2>/dev/null || true; } |
    sed -nE 's/^(deb |URIs:).*(https?:[^ ]*\/debian)\/?( .*)?$/\2/p' | head -n 1)

mkdir -p "$apt"/lists/partial "$apt"/archives/partial
: >"$apt/status"
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
echo "deb [signed-by=$keyring] ${mirror:-http://deb.debian.org/debian} $suite main" >"$apt/sources.list"
options=(-o Dir::Etc::sourcelist="$apt/sources.list" -o Dir::Etc::sourceparts=/dev/null
    -o Dir::Etc::preferencesparts=/dev/null -o Dir::State::lists="$apt/lists" -o Dir::State::status="$apt/status"
    -o Dir::Cache="$apt" -o Dir::Cache::archives="$apt/archives" -o APT::Sandbox::User=root
    -o APT::Install-Recommends=false -o Acquire::Languages=none)
apt-get "${options[@]}" -qq update
apt-get "${options[@]}" -y -qq --download-only install "$@" >/dev/null

# /bin, /lib ... are links into /usr in these suites; packages that still say /bin must follow them.
mkdir -p "$folder"/root/usr/{bin,sbin,lib,lib64}
for name in bin sbin lib lib64; do ln -sfn usr/$name "$folder/root/$name"; done
for package in "$apt"/archives/*.deb; do
    [[ $(basename "$package") =~ ^($pattern) ]] || continue
    dpkg-deb --fsys-tarfile "$package" | tar -x --keep-directory-symlink -C "$folder/root"
done
rm -rf "$apt"
