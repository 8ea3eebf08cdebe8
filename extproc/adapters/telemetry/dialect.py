"""A dialect: where on an engine's page each number stands.

A number is taken by a function of the page, made by :func:`total`, :func:`first`, :func:`mean` or :func:`told`; each
tries its names in order, newest first, and gives ``None`` where the page has none of them, so that one missing never
spoils another.
"""

from collections.abc import Callable
from dataclasses import dataclass

from extproc.adapters.telemetry.exposition import Page

Take = Callable[[Page], float | None]


@dataclass(frozen=True, slots=True)
class Numbers:
    """What a page says; fields as in :class:`extproc.model.Reading`."""

    waiting: float | None = None
    running: float | None = None
    kv_usage: float | None = None
    prefix_hits: float | None = None
    prefix_queries: float | None = None
    block_tokens: int | None = None
    kv_blocks: int | None = None
    adapters: tuple[str, ...] = ()
    """LoRA adapters that are running or waited for."""


def absent(_page: Page) -> None:
    """Take what this engine does not publish."""


def no_adapters(_page: Page) -> tuple[str, ...]:
    """Take the adapters of an engine that does not publish them."""
    return ()


def total(*names: str) -> Take:
    """Sum over series (ranks, cache tiers) of the first of *names* that the page has."""

    def take(page: Page) -> float | None:
        values = _values(page, names)
        return sum(values) if values else None

    return take


def first(*names: str) -> Take:
    """Take the first series of the first of *names* that the page has: the same in every rank."""
    return lambda page: next(iter(_values(page, names)), None)


def mean(*names: str) -> Take:
    """Mean over series of the first of *names* that the page has, at most 1: a share."""

    def take(page: Page) -> float | None:
        values = _values(page, names)
        return min(sum(values) / len(values), 1.0) if values else None

    return take


def told(name: str, label: str, *, once: bool) -> Take:
    """Read the number in a *label* of the information series *name*: *once*, or summed over series (ranks)."""

    def take(page: Page) -> float | None:
        written = [sample.labels.get(label, "") for sample in page.samples(name)]
        values = [float(text) for text in written if text.isdecimal()]
        return (values[0] if once else sum(values)) if values else None

    return take


def either(*takes: Take) -> Take:
    """Take the first that answers."""
    return lambda page: next((value for take in takes if (value := take(page)) is not None), None)


def added(left: Take, right: Take) -> Take:
    """Add two numbers; nothing where one is missing."""

    def take(page: Page) -> float | None:
        one, other = left(page), right(page)
        return None if one is None or other is None else one + other

    return take


def times(left: Take, right: Take) -> Take:
    """Multiply two numbers; nothing where one is missing."""

    def take(page: Page) -> float | None:
        one, other = left(page), right(page)
        return None if one is None or other is None else one * other

    return take


def _values(page: Page, names: tuple[str, ...]) -> list[float]:
    for name in names:
        if samples := page.samples(name):
            return [sample.value for sample in samples]
    return []


@dataclass(frozen=True, slots=True)
class Dialect:
    """One engine's way of publishing numbers."""

    name: str
    mark: str
    """What the names of its samples begin with."""
    path: str = "/metrics"
    waiting: Take = absent
    running: Take = absent
    kv_usage: Take = absent
    prefix_hits: Take = absent
    prefix_queries: Take = absent
    block_tokens: Take = absent
    kv_blocks: Take = absent
    adapters: Callable[[Page], tuple[str, ...]] = no_adapters

    def read(self, page: Page) -> Numbers:
        """Return what *page* says."""
        return Numbers(
            waiting=self.waiting(page),
            running=self.running(page),
            kv_usage=self.kv_usage(page),
            prefix_hits=self.prefix_hits(page),
            prefix_queries=self.prefix_queries(page),
            block_tokens=_whole(self.block_tokens(page)),
            kv_blocks=_whole(self.kv_blocks(page)),
            adapters=self.adapters(page),
        )


def _whole(value: float | None) -> int | None:
    return None if value is None or value < 1 else int(value)
