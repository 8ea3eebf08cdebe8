"""What the shell owes the core, where there are two of it.

A :class:`Store` is memory or Redis; a :class:`Decider` is in this process or behind a socket. One contract suite runs
over both of each.
"""

from collections.abc import Awaitable, Sequence
from typing import Protocol

from extproc.model import Final, Fleet, Outcome, Reading, Request


class StoreAway(Exception):  # noqa: N818 - it names the fact, as the vocabulary does
    """The telemetry store cannot be reached; what is known stays as it is."""


class Store(Protocol):
    """Where collectors leave readings and servers find them. Raises :class:`StoreAway`, and nothing else."""

    async def write(self, readings: Sequence[Reading], expire_s: float) -> None:
        """Replace the reading of each instance named; each vanishes *expire_s* after its last write."""

    async def drop(self, names: Sequence[str]) -> None:
        """Forget the readings of these instances (no longer discovered)."""

    async def read(self) -> Sequence[Reading]:
        """Return every living reading, in order of instance name."""

    async def close(self) -> None:
        """Give back connections; safe twice."""


class Decider(Protocol):
    """Who decides: the dispatcher of this gateway, near or far. Never raises for an expected ending."""

    def offer(self, request: Request) -> Final | Awaitable[Final]:
        """Return the verdict, or a future of it while the request is held. Who stops waiting must :meth:`settle`."""

    def first_token(self, request_id: str, ttft_s: float) -> None:
        """Note that the first token of this request has reached the gateway."""

    def settle(self, request_id: str, outcome: Outcome) -> None:
        """End the request; idempotent, and completes an earlier partial outcome."""

    def fleet(self) -> Fleet:
        """Return the snapshot that decisions are made from."""
