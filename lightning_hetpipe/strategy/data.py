"""One reader: rank 0 has the real loaders, other ranks have stand-ins of the same length.

A loader of known length needs no word between ranks. One whose end shows only when it comes is
announced: rank 0 tells the others before each batch whether there is one.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_hetpipe.strategy.exchange import Exchange


class AbsentBatch:
    """What other ranks see in place of a batch.

    Attributes:
        n_samples: Set once rank 0 has said how many samples the batch has.
    """

    def __init__(self, n_samples: int) -> None:
        self.n_samples = n_samples

    def __iter__(self) -> Iterator[Tensor]:
        # Lightning infers the batch size from the first tensor it finds.
        return iter([torch.empty(self.n_samples, device="meta")])


class AbsentLoader:
    """A loader of `AbsentBatch`; everything but iteration is asked of the loader it replaces."""

    def __init__(self, loader: Any, exchange: Exchange, announced: bool) -> None:
        self._loader = loader
        self._exchange = exchange
        self.announced = announced

    def __iter__(self) -> Iterator[AbsentBatch]:
        if self.announced:
            while self._exchange.broadcast():
                yield AbsentBatch(1)
        else:
            for _ in range(len(self)):
                yield AbsentBatch(1)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "batch_sampler":  # nothing is sampled here
            raise AttributeError(name)
        return getattr(self.__dict__["_loader"], name)


class SizedAbsentLoader(AbsentLoader):
    """An `AbsentLoader` with the length of rank 0's loader."""

    def __init__(self, loader: Any, exchange: Exchange, announced: bool, length: int) -> None:
        super().__init__(loader, exchange, announced)
        self._length = length

    def __len__(self) -> int:
        return self._length


class AnnouncingLoader:
    """Rank 0's loader, which tells the other ranks before each batch that there is one."""

    announced = True

    def __init__(self, loader: Any, exchange: Exchange) -> None:
        self._loader = loader
        self._exchange = exchange

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            self._exchange.broadcast(True)
            yield batch
        self._exchange.broadcast(False)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__dict__["_loader"], name)


class SizedAnnouncingLoader(AnnouncingLoader):
    """An `AnnouncingLoader` whose source says how many batches it has."""

    def __len__(self) -> int:
        return len(self._loader)


def for_this_rank(loader: Any, exchange: Exchange) -> Any:
    """The loader that this rank iterates: rank 0's own, or a stand-in for it. Called on all ranks."""
    if exchange.world_size == 1:
        return loader
    if not exchange.leads:
        length, announced = exchange.broadcast()
        if length is None:
            return AbsentLoader(loader, exchange, announced)
        return SizedAbsentLoader(loader, exchange, announced, length)
    length, announced = _length(loader), not _has_exact_length(loader)
    exchange.broadcast((length, announced))
    if not announced:
        return loader
    return AnnouncingLoader(loader, exchange) if length is None else SizedAnnouncingLoader(loader, exchange)


def peek(fetcher: Any) -> Any:
    """The batch that the fetcher will give first; it will still give it.

    Returns:
        The batch, or None if there is none.
    """
    batches = getattr(fetcher, "batches", None)
    if batches:
        return batches[0][0]
    first = next(fetcher.iterator, None)
    if first is None:
        return None
    fetcher.iterator = itertools.chain([first], fetcher.iterator)
    return first[0]


def can_be_read_beside(loader: Any) -> bool:
    """True if reading its first batch changes nothing; equal on all ranks for what `for_this_rank` gave."""
    if isinstance(loader, (AbsentLoader, AnnouncingLoader)):
        return not loader.announced
    return _has_exact_length(loader)


def first_of(loader: Any) -> Any:
    """The first batch of a loader that can be read again; a map-style one is read beside its iterator.

    Iterators and workers are not started, generators are put back.
    """
    if not is_map_style(loader):
        return next(iter(loader))
    generators = [
        generator
        for generator in (loader.generator, getattr(loader.sampler, "generator", None))
        if generator is not None
    ]
    states = [generator.get_state() for generator in generators]
    try:
        batch_sampler = loader.batch_sampler
        indices: Any = next(iter(batch_sampler if batch_sampler is not None else loader.sampler))
        if batch_sampler is None:
            return loader.collate_fn(loader.dataset[indices])
        return loader.collate_fn([loader.dataset[index] for index in indices])
    finally:
        for generator, state in zip(generators, states):
            generator.set_state(state)


def is_map_style(loader: Any) -> bool:
    """True for a ``DataLoader`` over a dataset that can be read in any order."""
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)


def _has_exact_length(loader: Any) -> bool:
    return is_map_style(loader) or isinstance(loader, (list, tuple))


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None
