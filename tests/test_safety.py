"""What a run records and removes: no secret, and nothing that Shardway has not made."""

from __future__ import annotations

from pathlib import Path

import pytest

from pool import ranks
from runs import lone_rank, train_tiny

SECRETS = ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "PASSWORD", "SOMETHING_OF_MINE")
SENTINEL = "hunter2-4711"

REMOVERS = {
    "bench/disk.py": "the file that it writes to measure a disk, as soon as it is open",
    "checkpoint/manager.py": "checkpoints by their names, unfinished ones too",
    "checkpoint/writer.py": "the unfinished folder of this step",
    "checkpoint/export.py": "the hidden, unfinished neighbour of the folder that it writes, and a file in it",
    "checkpoint/local_tier.py": "the folder of links and of received files that it made to read through, or damaged",
    "ranks/supervisor.py": "empty folders for output of a start that was refused",
    "cli/doctor.py": "a temporary folder of its own",
    "data/sources/tokens.py": "temporary files of its own",
    "data/formats/compressed.py": "a temporary copy of its own",
    "data/formats/indexes.py": "an index or temporary file of its own",
    "data/formats/megatron.py": "the unfinished files that it writes",
    "data/formats/mds.py": "a temporary copy of its own",
    "prefetch/hub.py": "a damaged or unfinished file of the cache, whose bytes are not those that the hub lists",
    "data/formats/shard_file.py": "a temporary shard of its own",
    "data/formats/shard_repair.py": "a temporary file of its own",
    "data/prepare.py": "shards of a smaller token type and unfinished ones that it wrote itself",
    "data/convert.py": "the hidden, unfinished neighbour of what it writes",
    "data/remote.py": "the copy that it made of remote data",
    "data/stage.py": "staged copies of this user that no process holds",
    "launch/hosts/local.py": "a temporary folder of its own",
    "launch/serving/watcher.py": "temporary files and an unfinished export of its own, and its earlier key",
    "launch/snapshot.py": "the snapshot that it could not finish",
    "ranks/heartbeat.py": "pages and gates of this user that an agent which was killed has left in memory",
    "ranks/evidence.py": "an earlier answer of a rank, in the agent's own folder in memory",
    "ranks/doctor/checks.py": "files that it wrote to measure a disk",
    "ranks/doctor/examine.py": "a file that it wrote to measure a disk",
    "ranks/local.py": "a folder that it has just made to see whether it can, output of spares that were never ranks",
    "rundir/file_io.py": "temporary files of its own, and for those above and below the folder that they name",
    "rundir/lease.py": "files of older epochs; the lock and lease that it has just made, which nothing ever held",
    "rundir/names.py": "what this run, by its id, has saved on the disk of a node",
    "train/profiling.py": "the unfinished files of a trace that it writes",
    "train/run_weights.py": "the hidden, unfinished neighbour of the run directory that it makes",
    "train/tune.py": "the note of what this run was trying, in the user's cache folder",
    "train/session.py": "empty folders that it made for a start that was refused",
    "rundir/directory.py": "a mark that it has just made, and the stop file",
}
"""Who removes files or folders, and which. Whoever joins them shows here that it made what it removes."""


@ranks(1)
def test_nothing_of_the_environment_is_recorded(rank: int, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name in SECRETS:
            patch.setenv(name, SENTINEL)
        train_tiny(tmp_path / "run", lone_rank(), "train.steps=8", "checkpoint.every=4 steps")
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(files) > 8
    assert [path.name for path in files if SENTINEL.encode() in path.read_bytes()] == []
