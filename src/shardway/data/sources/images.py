"""Images with a label each, held in memory and normalised as they are gathered.

Invariant: inputs are float32 [n, C, H, W] (or [n, features]), targets int64 [n]. This module must not know file
formats.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shardway.data.sources.base import Arrays, DataPath, DataRequest, Ids, SourceFacts, fingerprint_arrays


@dataclass(frozen=True, eq=False)
class Images:
    """Samples (x - mean) / std of `inputs` [N, ...] with the classes `labels` [N]; uint8 is scaled to 0..1 first."""

    inputs: npt.NDArray[Any]
    labels: npt.NDArray[np.int64]
    mean: float
    std: float
    facts: SourceFacts

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def tokens_per_sample(self) -> int:
        return 1

    def batch(self, ids: Ids) -> Arrays:
        unit = 255.0 if self.inputs.dtype == np.uint8 else 1.0
        pixels = self.inputs[ids].astype(np.float32)
        pixels *= np.float32(1.0 / (unit * self.std))
        pixels -= np.float32(self.mean / self.std)
        return {"inputs": pixels, "targets": self.labels[ids]}


def make_images(
    inputs: npt.NDArray[Any], labels: npt.NDArray[Any], place: DataPath, asked: DataRequest, description: str
) -> Images:
    """The samples of an input and a label array; UserError where they do not fit each other or the model.

    `inputs`: uint8 or floating [N, H, W], [N, C, H, W] or [N, features]; `labels`: integers [N] from 0 on.
    """
    _check_arrays(inputs, labels, place)
    classes = _check_labels(labels, place, asked.classes)
    shaped = inputs[:, None] if inputs.ndim == 3 else inputs
    section = asked.section
    facts = SourceFacts(
        description=f"{len(labels)} images of shape {list(shaped.shape[1:])}, {classes} classes, {description}",
        fingerprint=fingerprint_arrays([shaped, labels], section.mean, section.std),
        sample_shape=tuple(shaped.shape[1:]),
        classes=classes,
    )
    return Images(shaped, labels.astype(np.int64), section.mean, section.std, facts)


def _check_arrays(inputs: npt.NDArray[Any], labels: npt.NDArray[Any], place: DataPath) -> None:
    if inputs.dtype != np.uint8 and inputs.dtype.kind != "f":
        raise place.error(f"has inputs of type {inputs.dtype}", allowed="uint8, or a floating type")
    if inputs.ndim not in (2, 3, 4):
        raise place.error(f"has inputs of shape {list(inputs.shape)}", allowed="[N, features], [N, H, W], [N, C, H, W]")
    if labels.dtype.kind not in "iu" or labels.ndim != 1:
        raise place.error(f"has targets of type {labels.dtype}, shape {list(labels.shape)}", allowed="integers [N]")
    if len(inputs) != len(labels):
        raise place.error(f"has {len(inputs)} inputs but {len(labels)} targets", allowed="one target for each input")
    if len(labels) == 0:
        raise place.error("has no samples")


def _check_labels(labels: npt.NDArray[Any], place: DataPath, classes: int | None) -> int:
    lowest, highest = int(labels.min()), int(labels.max())
    if lowest < 0:
        raise place.error(f"has the target {lowest}", allowed="0 and above")
    if classes is not None and highest >= classes:
        raise place.error(
            f"has the target {highest}",
            allowed=f"0 to {classes - 1}, for {classes} classes",
            remedy="set model.classes to the number of classes of the data",
        )
    return highest + 1 if classes is None else classes
