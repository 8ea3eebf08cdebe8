"""Requests that were admitted and are not yet accounted for.

A flight is placed once, freed once and closed once, in that order or with the last two at the same moment: the end of
its stream frees the place, the access log closes the books. Whoever really served gets the credit: prefix blocks,
health, site. Invariant: when every flight has been freed, every count of the ledger is zero.
"""

from dataclasses import dataclass

from extproc.accounting import Accounts
from extproc.model import Admit, Ending, Outcome, Request
from extproc.policy import ClassSpec
from extproc.tokenpilot.health import Health
from extproc.tokenpilot.ledger import Ledger
from extproc.tokenpilot.prefix import PrefixIndex
from extproc.tokenpilot.rows import Rows, Slots

LOG_GRACE_S = 10.0
"""How long an ended request waits for its access-log entry; Envoy writes it within a tenth of a second or never."""


@dataclass(slots=True)
class Flight:
    """One admitted request. *prefill* and *tokens* are what its place costs in the ledger."""

    request: Request
    klass: ClassSpec
    admit: Admit
    slot: int
    prefill: float
    tokens: float
    matched: int
    """Leading blocks that the instance was believed to hold already."""
    held_s: float
    begun: bool = False
    freed: bool = False


class Flights:
    """The flights and all that is counted about instances because of them."""

    def __init__(self, slots: Slots, ledger: Ledger, index: PrefixIndex, health: Health, accounts: Accounts) -> None:
        self._slots = slots
        self._ledger = ledger
        self._index = index
        self._health = health
        self._accounts = accounts
        self._by_id: dict[str, Flight] = {}
        self._ended: dict[str, float] = {}

    def placed(self, request_id: str) -> Flight | None:
        """Return the flight of this request if it holds a place."""
        flight = self._by_id.get(request_id)
        return None if flight is None or flight.freed else flight

    def running(self) -> list[str]:
        """Return ids of flights that hold a place."""
        return [name for name, flight in self._by_id.items() if not flight.freed]

    def launch(self, flight: Flight, rows: Rows, now: float) -> None:
        """Take the place, and believe the prompt cached there from now on: the next request with it may follow."""
        self._by_id[flight.request.id] = flight
        self._ledger.place(flight.slot, flight.prefill, flight.tokens)
        self._note_blocks(flight, flight.slot, rows, now)

    def begin(self, request_id: str) -> bool:
        """Note the first token; tell whether that changed anything."""
        flight = self._by_id.get(request_id)
        if flight is None or flight.begun or flight.freed:
            return False
        flight.begun = True
        self._ledger.begun(flight.slot, flight.prefill)
        return True

    def end(self, request_id: str, outcome: Outcome, rows: Rows, now: float) -> bool:
        """Free the place, and close the books if the ending is known; tell whether a place became free."""
        flight = self._by_id.get(request_id)
        if flight is None:
            return False
        became_free = not flight.freed
        if became_free:
            flight.freed = True
            self._ledger.free(flight.slot, 0.0 if flight.begun else flight.prefill, flight.tokens)
        if outcome.ending is None:
            self._ended.setdefault(request_id, now)
        else:
            self._close(flight, outcome, rows, now)
        return became_free

    def withdraw(self, request_id: str) -> None:
        """Free the place and forget the flight; somebody else keeps its books."""
        flight = self._by_id.pop(request_id, None)
        self._ended.pop(request_id, None)
        if flight is not None and not flight.freed:
            self._ledger.free(flight.slot, 0.0 if flight.begun else flight.prefill, flight.tokens)

    def close_unlogged(self, rows: Rows, now: float) -> None:
        """Close the books of flights whose log entry never came."""
        overdue = []
        for request_id, ended in self._ended.items():
            if now - ended <= LOG_GRACE_S:
                break  # in order of ending
            overdue.append(request_id)
        for request_id in overdue:
            self._close(self._by_id[request_id], Outcome(Ending.ABANDONED), rows, now)

    def _close(self, flight: Flight, outcome: Outcome, rows: Rows, now: float) -> None:
        del self._by_id[flight.request.id]
        self._ended.pop(flight.request.id, None)
        served = self._served(flight, outcome)
        site = flight.admit.site
        if served is not None and served != flight.slot:
            row = rows.row_of.get(served)
            site = site if row is None else rows.instances[row].site
        self._accounts.end(flight.request, flight.klass, site, flight.held_s, outcome)
        self._judge(flight, outcome, served, rows, now)

    def _served(self, flight: Flight, outcome: Outcome) -> int | None:
        """Return who served, or failed last; where no address tells, the host at that place of the list."""
        if outcome.served is not None:
            return self._slots.at(outcome.served)
        if outcome.attempts < 1:
            return None
        if outcome.attempts == 1:
            return flight.slot
        return self._slots.at(flight.admit.hosts[min(outcome.attempts, len(flight.admit.hosts)) - 1])

    def _judge(self, flight: Flight, outcome: Outcome, served: int | None, rows: Rows, now: float) -> None:
        """Credit or blame; *served* is ``None`` for nobody of ours."""
        if outcome.ending in (None, Ending.ABANDONED):
            return
        tried = flight.admit.hosts[: max(0, outcome.attempts - 1)]
        failed = {slot for one in tried if one != outcome.served and (slot := self._slots.at(one)) is not None}
        hung = outcome.ending is Ending.TIMED_OUT and outcome.ttft_s is None
        if (outcome.ending is Ending.FAILED or hung) and served is not None:
            failed.add(served)
        for slot in failed:
            self._health.failed(slot, now)
        answered = outcome.ending in (Ending.COMPLETED, Ending.REJECTED) or outcome.ttft_s is not None
        if answered and served is not None and served not in failed:
            self._health.served(served)
        if served != flight.slot or not answered:
            self._index.discard(flight.slot, flight.request.blocks[flight.matched :])
        if answered and served is not None and not self._index.holds(served, flight.request.blocks):
            # Also where it was expected: a parallel request that was cut may have taken shared blocks back.
            self._note_blocks(flight, served, rows, now)

    def _note_blocks(self, flight: Flight, slot: int, rows: Rows, now: float) -> None:
        blocks = flight.request.blocks
        row = rows.row_of.get(slot)
        if blocks and row is not None:
            holds = rows.instances[row].profile.kv_tokens // flight.request.block_tokens
            self._index.insert(slot, blocks, now, max(1, holds))
