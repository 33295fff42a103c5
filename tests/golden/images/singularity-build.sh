#!/bin/bash
# Makes /project/images/torch.sif from docker://nvcr.io/nvidia/pytorch:25.04-py3.
set -euo pipefail
exec 2>&1
# for everything but the image, and the image until it is whole
work=/tmp/shardway-image-a1b2c3d4
part=/project/images/.torch.sif.a1b2c3d4.tmp
# at the end both are removed, however it ends
clean() {
  code=$?
  trap '' HUP INT TERM
  chmod -R u+rwX -- "$work" || true
  rm -rf -- "$work" "$part" || echo "cannot be removed: $work $part"
  echo "shardway-image-a1b2c3d4 ended with $code"
}
trap clean EXIT
trap 'exit 143' HUP INT TERM
# places
mkdir -p -- /project/images "$work"
chmod 700 -- "$work"
mkdir -p -- "$work/cache" "$work/tmp"

# all that is unpacked is removed at the end
export SINGULARITY_TMPDIR="$work/tmp"
export SINGULARITY_CACHEDIR="$work/cache"
# what is built
cat >"$work/image.def" <<'END_OF_FILE'
Bootstrap: docker
From: nvcr.io/nvidia/pytorch:25.04-py3

%post
    # nothing goes on after a command that failed
    set -eu
    # packages of the image's own system, no questions
    export DEBIAN_FRONTEND=noninteractive
    apt-get -o APT::Sandbox::User=root update
    apt-get -o APT::Sandbox::User=root install --yes --no-install-recommends -- libaio-dev \
      git=1:2.39.5-0+deb12u2
    rm -rf /var/lib/apt/lists/*
    # packages of Python, for the image's own Python
    export PIP_BREAK_SYSTEM_PACKAGES=1
    export PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1
    printf '%s\n' 'numpy>=1.26 # for the data' 'uvloop ; python_version < '\''3.13'\''' \
      >/tmp/shardway-requirements.txt
    python3 -m pip install --no-cache-dir --requirement /tmp/shardway-requirements.txt
    rm /tmp/shardway-requirements.txt
    python3 -m pip install --no-cache-dir deepspeed==0.16.4
    python3 -m pip install --no-cache-dir 'torch >= 2.7, <3'
    python3 -m pip install --no-cache-dir flash-attn --no-build-isolation
END_OF_FILE
# build it
/opt/bin/singularity build --fakeroot "$part" "$work/image.def"

# the image gets its name when it is whole; a file of that name stays as it is
mv -n -- "$part" /project/images/torch.sif
[ ! -e "$part" ] || { echo '/project/images/torch.sif exists'; exit 17; }
