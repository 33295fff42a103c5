"""Samples of an iterable Dataset of the user's own, which the function of data.dataset makes: read in sequence.

Invariants:
- Sample p is the p-th that the dataset gives, from 0 on over its epochs. What a sample becomes is that of a map-style
  dataset (`own_dataset`).
- Sample 0 is read, twice, from iterators of its own before a run, in every process that reads the dataset. So the run
  begins with it, in each process alike.
- The state of the dataset is its own: `open` gives the dataset itself, and samples are converted after they are read.
  One that does not bring back sample 1 after sample 0, since a buffer is no part of it, is not used.
- A source is pickled without its dataset, as a map-style one is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from shardway.data.sources.base import Arrays, Ids
from shardway.data.sources.decoded import importing_here
from shardway.data.sources.own_dataset import Array, OwnSamples, is_same, outline_sample
from shardway.errors import ShardwayError, UserError

_END = object()


def find_length(dataset: Any) -> int | None:
    """The length of an iterable dataset; None if it has none. An error of its `__len__` passes through."""
    if hasattr(dataset, "__len__"):
        with contextlib.suppress(TypeError, NotImplementedError):
            return len(dataset)
    return None


@dataclass(eq=False)
class OwnStream(OwnSamples):
    """The samples of an iterable dataset; `size` is 0 if it has no length."""

    state_is_exact: bool = True
    """Whether the state of the dataset, if it has one, brings back the sample that comes next."""

    @property
    def name(self) -> str:
        """What messages call it."""
        return f'data.dataset "{self.call.name}"{self.call.render_split()}'

    def locate(self, number: int) -> str:
        """A sample by its number, and by its epoch where that is known."""
        epoch = f" (number {number % self.size} of epoch {number // self.size + 1})" if self.size else ""
        return f"sample {number}{epoch} in the sequence of {self.name}"

    def open(self) -> Any:
        """The dataset, made in this process where it was not yet, at its beginning the first time. Raises UserError."""
        if self._dataset is None:
            made = self.call.make()
            if (size := find_length(made) or 0) != self.size:
                raise self.call.differs(f"{self.size} samples and, called again, {size}")
            self._dataset = made
            first = self.read_first()
            self.check_repeats(*first)  # as in the process that opened it first
            if outline_sample(*first) != self.first:
                raise self.call.differs("another sample 0 when it was called again")
        return self._dataset

    @contextlib.contextmanager
    def reading(self, find_number: Callable[[], int]) -> Iterator[None]:
        """The context in which samples are read. An error of the dataset is raised as JobError with `find_number()`,
        the number of the sample that was to come."""
        with importing_here():
            try:
                yield
            except ShardwayError:
                raise
            except Exception as error:
                raise self.call.failure(find_number(), error) from error

    def join(self, samples: Sequence[Any], numbers: Ids) -> Arrays:
        """Inputs and targets of samples as the dataset gives them. Raises UserError for one that does not serve."""
        pairs = zip(samples, numbers.tolist(), strict=True)
        return self.gather(numbers, (self.read_sample(sample, number) for sample, number in pairs))

    # --- sample 0, before the run

    def draw_first(self) -> tuple[Array, Any]:
        """Sample 0 as the run will read it, of an iterator that is dropped; the dataset is at its beginning then."""
        from shardway.data.samplers import RandomStates, read_state, rewind

        dataset, begin = self._dataset, read_state(self._dataset)
        RandomStates.seeded(self.call.seed, 0).put_back()
        with self.reading(lambda: 0):
            if hasattr(dataset, "set_epoch"):
                dataset.set_epoch(0)
            sample = next(iter(dataset), _END)
            rewind(dataset, begin)
        if sample is _END:
            raise self.call.error(f"has made a dataset without samples{self.call.render_split()}")
        return self.read_sample(sample, 0)

    def check_repeats(self, inputs: Array, target: Any) -> None:
        """Raise UserError if the dataset does not begin anew with the same sample when it is asked for another
        iterator."""
        dataset, kind = self._dataset, type(self._dataset)
        once = iter(dataset) is dataset and kind.__module__ in ("builtins", "itertools")
        try:
            same = not once and is_same((inputs, target), self.read_first())
        except UserError:
            same = False
        if not same and (once or iter(dataset) is dataset):
            raise self.call.error(
                f"has returned {kind.__name__}, which can be run through only once, and a run begins it again in each "
                "epoch and when it goes on",
                "an object whose __iter__ begins anew each time",
                "make it a class with __iter__, and yield the samples there",
            )
        if not same:
            raise self.refuse(
                0,
                "is not the same when the dataset is begun again, so that no run could go on exactly",
                "an __iter__ that begins anew each time, and draws from the global generators of torch, numpy and "
                "random, which are seeded for each epoch",
                "keep no place, open file or generator of random numbers between two calls of __iter__; or give the "
                "dataset state_dict() and load_state_dict(), whose state holds them",
            )
        self.state_is_exact = self._brings_back_next()

    def _brings_back_next(self) -> bool:
        """Whether the state after sample 0 leads to sample 1. Where the dataset draws from the global generators its
        state is not used anyway."""
        from shardway.data.samplers import RandomStates, has_state, kept_random_states, load_state, read_state, rewind

        dataset, begin = self._dataset, read_state(self._dataset)
        with kept_random_states(), self.reading(lambda: 1):
            fresh = RandomStates.seeded(self.call.seed, 0)
            fresh.put_back()
            iterator = iter(dataset)
            next(iterator, _END)
            of_iterator = has_state(iterator)
            state = read_state(iterator if of_iterator else dataset)
            if state is None or not fresh.equals(RandomStates.read()):
                rewind(dataset, begin)
                return True
            expected = next(iterator, _END)
            if not of_iterator:
                load_state(dataset, state)
            again = iter(dataset)
            if of_iterator:
                load_state(again, state)
            found = next(again, _END)
            rewind(dataset, begin)
        if expected is _END or found is _END:
            return expected is found
        try:
            return is_same(self.read_sample(expected, 1), self.read_sample(found, 1))
        except UserError:  # which the run meets at sample 1
            return True
