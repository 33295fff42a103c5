#!/bin/bash
# Makes /project/images/torch.sqsh from dockerd://mine:1.
set -euo pipefail
exec 2>&1
# for everything but the image, and the image until it is whole
work=/tmp/shardway-image-a1b2c3d4
part=/project/images/.torch.sqsh.a1b2c3d4.tmp
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
mkdir -p -- "$work/cache" "$work/data" "$work/tmp" "$work/run" "$work/recipe"

# all that enroot writes is removed at the end
export ENROOT_DATA_PATH="$work/data" ENROOT_TEMP_PATH="$work/tmp" ENROOT_RUNTIME_PATH="$work/run"
export ENROOT_CACHE_PATH="$work/cache"
# fetch the image and make one file of it
enroot import --output "$part" -- dockerd://mine:1

# the image gets its name when it is whole; a file of that name stays as it is
mv -n -- "$part" /project/images/torch.sqsh
[ ! -e "$part" ] || { echo '/project/images/torch.sqsh exists'; exit 17; }
