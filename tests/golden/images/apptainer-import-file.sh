#!/bin/bash
# Makes /project/images/torch.sif from /project/images/it's base.sqsh.
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
export APPTAINER_TMPDIR="$work/tmp"
export APPTAINER_CACHEDIR="$work/cache"
# fetch the image and make one file of it
apptainer build "$part" '/project/images/it'\''s base.sqsh'

# the image gets its name when it is whole; a file of that name stays as it is
mv -n -- "$part" /project/images/torch.sif
[ ! -e "$part" ] || { echo '/project/images/torch.sif exists'; exit 17; }
