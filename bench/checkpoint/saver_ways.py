"""Saving and loading with a plain file, ours, `torch.save` and `torch.distributed.checkpoint`: a round of each."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed.checkpoint as dcp
from saver_bench import Bench, Paced, evict, flatten
from torch import nn

from shardway.checkpoint.manager import AsyncSave
from shardway.checkpoint.reader import load_latest
from shardway.checkpoint.writer import collect_content, shared_place, write_checkpoint
from shardway.ranks.launcher import Placement
from shardway.ranks.start import Ranks

BLOCK = 2**22


def alone(bench: Bench) -> Ranks:
    """The one rank that saves."""
    return Ranks(Placement(0, 1, 0, 1, 0, 1, "127.0.0.1", 0, "none"), bench.device, grouped=False)


def plain(bench: Bench) -> None:
    """The state's bytes in one file; read into one block after the other, and into the state's own memory."""
    path, tensors = bench.folder / "plain", flatten(bench.tensors)
    parts = [tensor.detach().cpu().numpy().data.cast("B") for tensor in tensors if tensor.ndim]
    path.unlink(missing_ok=True)
    with bench.timed("write"), open(path, "wb", buffering=0) as file:
        for part in parts:
            file.write(part)
        os.fsync(file.fileno())
    evict(path)
    block = bytearray(BLOCK)
    with bench.timed("read"), open(path, "rb", buffering=0) as file:
        while file.readinto(block):
            pass
    evict(path)
    with bench.timed("read in place"), open(path, "rb", buffering=0) as file:
        for part in parts:  # which has these bytes already
            done = 0
            while done < len(part):
                done += file.readinto(part[done : done + BLOCK])
    path.unlink()


def ours(bench: Bench) -> None:
    """Save, wait until it is complete; compare and load."""
    bench.fresh("run")
    bench.directory.create()
    ranks = alone(bench)
    with bench.timed("save"):
        content = collect_content(ranks, bench.trained, 1, {"step": 1})
        write_checkpoint(shared_place(bench.directory, ranks), ranks, content)
    evict(bench.directory.checkpoints)
    with bench.timed("load"):
        load_latest(bench.directory, ranks, bench.trained)
    bench.fresh("run")


def background(bench: Bench) -> None:
    """What a save in the background holds the run up for; steps beside it; a copy, and steps without it."""
    bench.fresh("run")
    bench.directory.create()
    ranks = alone(bench)
    buffers = [torch.zeros_like(each, device="cpu", pin_memory=each.is_cuda) for each in flatten(bench.tensors)]
    with bench.timed("copy"):
        for buffer, tensor in zip(buffers, flatten(bench.tensors), strict=True):
            buffer.copy_(tensor, non_blocking=True)
    step, by_itself = make_step(bench), Paced()
    for _ in range(10):
        by_itself.take(step)
    by_itself.note(bench, "step")
    with bench.timed("stall"):
        content = collect_content(ranks, bench.trained, 1, {"step": 1})
        copied = replace(content, tensors=bench.staging.stage(content.tensors))
        save = AsyncSave(1, ranks, lambda: write_checkpoint(shared_place(bench.directory, ranks), ranks, copied))
        save.start()
    beside = Paced()
    while not save.has_ended:
        beside.take(step)
    if save.error is not None:
        raise SystemExit(f"the save failed: {save.error}")
    beside.note(bench, "step beside a save")
    bench.fresh("run")


def make_step(bench: Bench) -> Callable[[], None]:
    """A small training step."""
    device = bench.device
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8))).to(device)
    optimizer, inputs = torch.optim.AdamW(model.parameters(), fused=True), torch.randn(256, 256, device=device)

    def step() -> None:
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        bench.settle()

    return step


def torchs(bench: Bench) -> None:
    """torch.save with fsync, torch.load."""
    path, tensors = bench.folder / "torch", bench.tensors
    with bench.timed("torch.save"), open(path, "wb") as file:
        torch.save(tensors, file)
        file.flush()
        os.fsync(file.fileno())
    evict(path)
    with bench.timed("torch.load"):
        torch.load(path)
    path.unlink()


def dcps(bench: Bench) -> None:
    """dcp.save and dcp.load, one file a rank."""
    path, tensors = bench.fresh("dcp"), bench.tensors
    with bench.timed("dcp.save"):
        dcp.save(tensors, storage_writer=dcp.FileSystemWriter(path), no_dist=True)
    evict(path)
    with bench.timed("dcp.load"):
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    bench.fresh("dcp")


def dcps_async(bench: Bench) -> None:
    """What dcp.async_save holds a loop up for."""
    path, tensors = bench.fresh("dcp"), bench.tensors
    with bench.timed("dcp.async_save"):
        future = dcp.async_save(tensors, storage_writer=dcp.FileSystemWriter(path), no_dist=True)
    future.result()  # type: ignore[union-attr]
    bench.fresh("dcp")


WAYS = (plain, ours, background, torchs, dcps, dcps_async)
