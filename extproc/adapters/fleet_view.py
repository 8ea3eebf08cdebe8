"""A server's view of the fleet: reads the store at a fixed pace and hands over whole snapshots.

Store away or collector silent: what was read last is kept and ages, beyond its expiry in the store too, since nobody is
there who could have dropped it on purpose. Both end by themselves.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

import structlog

from extproc.adapters.discovery import listed
from extproc.model import Fleet, Reading
from extproc.policy import Policy
from extproc.ports import Store, StoreAway
from extproc.snapshot import build

RENEW_S = 0.5
"""A snapshot without news is built again after this long, for the ages that it tells."""

_log = structlog.get_logger()


class FleetView:
    """Keeps *on_fleet* supplied."""

    def __init__(
        self, policy: Policy, store: Store, on_fleet: Callable[[Fleet], None], wall: Callable[[], float] = time.time
    ) -> None:
        """*wall* is the clock of the readings: wall-clock seconds."""
        self.away = False
        """Whether the store was away when last asked."""
        self._policy = policy
        self._listed = listed(policy)
        self._store = store
        self._on_fleet = on_fleet
        self._wall = wall
        self._known: dict[str, Reading] = {}
        self._fleet: Fleet | None = None

    @property
    def age_s(self) -> float:
        """Seconds since anything was heard of any instance; ``inf`` if never."""
        newest = max((reading.at for reading in self._known.values()), default=-float("inf"))
        return max(0.0, self._wall() - newest)

    async def run(self) -> None:
        """Refresh until cancelled."""
        while True:
            await self.refresh()
            await asyncio.sleep(self._policy.fleet.telemetry.refresh_ms / 1000)

    async def refresh(self) -> None:
        """Look once; hands over a snapshot if there is news, or the last one has become old or blind."""
        try:
            news = self._learn(await self._store.read())
            self._note(None)
        except StoreAway as error:
            news = False
            self._note(str(error))
        now = self._wall()
        last = self._fleet
        if news or last is None or not 0 <= now - last.at < RENEW_S or (not last.blind and self._stale(now)):
            self._fleet = build(self._policy.fleet, self._listed, tuple(self._known.values()), now)
            self._on_fleet(self._fleet)

    def _learn(self, readings: Sequence[Reading]) -> bool:
        """Take in what was read; return whether it differs from what was known."""
        read = {reading.instance.name: reading for reading in readings}
        newest = max((reading.at for reading in readings), default=-float("inf"))
        if self._wall() - newest > self._bound_s:
            read = self._known | read
        # The store gives the very objects it gave before where rows did not change, so this compares identities.
        if read == self._known:
            return False
        self._known = read
        return True

    def _stale(self, now: float) -> bool:
        return now - max((reading.at for reading in self._known.values()), default=-float("inf")) > self._bound_s

    @property
    def _bound_s(self) -> float:
        return self._policy.fleet.telemetry.lost_after_ms / 1000

    def _note(self, error: str | None) -> None:
        if (error is not None) != self.away:
            if error is None:
                _log.info("store_back")
            else:
                _log.warning("store_away", error=error)
        self.away = error is not None
