"""The one owner of decision state: offer, observe, first_token, settle, tick.

Synchronous and without I/O; the same dispatcher runs behind Envoy, in the lab and in tests. Invariants: a request is
either in the line, in flight, or gone; in-flight counts return to zero when every request has been settled; no verdict
names a site that the request may not go to.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from extproc.accounting import Accounts
from extproc.fleetmind import cost
from extproc.flights import Flight, Flights
from extproc.model import (
    Admit,
    Ending,
    Final,
    Fleet,
    Outcome,
    Reason,
    Refuse,
    Request,
    State,
    Verdict,
    Wait,
)
from extproc.placement import Place, Placement
from extproc.policy import ClassSpec, Policy
from extproc.slomax import admission, classify
from extproc.slomax.line import Like, Line
from extproc.tokenpilot.health import Health
from extproc.tokenpilot.ledger import Ledger
from extproc.tokenpilot.prefix import PrefixIndex
from extproc.tokenpilot.rows import Slots

_FIRST_PROMPT = 1000.0
_LEARNING = 0.02

Granted = tuple[str, Final]
"""A held request and its verdict."""


_PASSING = frozenset({Reason.NO_INSTANCE, Reason.SUBSET})
"""Refusals on arrival that a held request waits out: an instance may come back before its wait is over."""


class Dispatcher:
    """Composes SLOMax, FleetMind and TokenPilot over one snapshot and one set of counts."""

    def __init__(self, policy: Policy, rng: np.random.Generator) -> None:
        self._policy = policy
        self._rng = rng
        self._slots = Slots()
        self._ledger = Ledger()
        self._index = PrefixIndex(policy.tokenpilot.index_ttl_s)
        self._health = Health(policy.tokenpilot.fail_after, policy.tokenpilot.rest_ms / 1000)
        self._line = Line()
        self._prompt = _FIRST_PROMPT
        self.accounts = Accounts()
        self._flights = Flights(self._slots, self._ledger, self._index, self._health, self.accounts)
        self._placement = Placement(policy, rng, self._slots, self._ledger, self._index, self._health)

    @property
    def fleet(self) -> Fleet:
        """The snapshot that decisions are made from."""
        return self._placement.fleet

    # --- events -------------------------------------------------------------------------------------------------------

    def offer(self, request: Request, now: float) -> Verdict:
        """Decide on a new request. A ``Wait`` is answered later, by what another event returns.

        Offered again, a request keeps what it has: its place in the line or its instance.
        """
        if (known := self._known(request.id)) is not None:
            return known
        klass = classify.classify(request, self._policy.slomax)
        self._prompt += _LEARNING * (request.prompt_tokens - self._prompt)
        if not request.steer:
            return self._shadow(request, klass, now)
        # Whoever may go to the same places and waits already goes first.
        found = None if self._line.has_like(request, klass) else self._place(request, klass, now)
        if isinstance(found, Admit):
            return found
        if isinstance(found, Refuse):
            return self._refused(request, found, now)
        full = admission.refusal_when_full(klass, self._line.of_class(klass.name), self._drain_s())
        if full is not None:
            return self._refused(request, full, now)
        until = request.arrived + classify.longest_wait_s(request, klass)
        if until <= now:
            return self._refused(request, admission.refusal_at_deadline(klass, now - request.arrived), now)
        self._line.add(request, klass, until)
        return Wait(klass.name, until)

    def observe(self, fleet: Fleet, now: float) -> list[Granted]:
        """Replace the snapshot."""
        self._placement.observe(fleet)
        if not fleet.blind:
            for site in fleet.sites:
                for one, state in zip(site.instances, site.states, strict=True):
                    if state in (State.LOST, State.STARTING):
                        self._index.forget(self._slots.of(one))
        return self._grant(now)

    def first_token(self, request_id: str, now: float) -> list[Granted]:
        """Note that a request's prefill is over."""
        return self._grant(now) if self._flights.begin(request_id) else []

    def settle(self, request_id: str, outcome: Outcome, now: float) -> list[Granted]:
        """End a request, wherever it is: idempotent, frees its place, and returns who may go next.

        With ``outcome.ending=None`` (the stream ended, nobody knows how) the place is free at once, and the books wait
        for the access log's outcome or, at most ``flights.LOG_GRACE_S``, for none.
        """
        waiting = self._line.remove(request_id)
        if waiting is not None:
            ending = outcome if outcome.ending else replace(outcome, ending=Ending.CANCELLED)
            self.accounts.end(waiting.request, waiting.klass, "", now - waiting.request.arrived, ending)
            return []
        return self._grant(now) if self._flights.end(request_id, outcome, self._placement.rows, now) else []

    def tick(self, now: float) -> list[Granted]:
        """Let time pass: waits that are over, books whose log entry never came, prefixes past their life."""
        granted: list[Granted] = []
        for one in self._line.expired(now):
            refuse = admission.refusal_at_deadline(one.klass, now - one.request.arrived)
            granted.append((one.request.id, self._refused(one.request, refuse, now)))
        self._flights.close_unlogged(self._placement.rows, now)
        self._index.expire(now)
        return granted + self._grant(now)

    def adopt(self, request: Request, admit: Admit, now: float) -> None:
        """Take over a request that runs already (admitted by a worker alone, or before this dispatcher started)."""
        if not admit.steer or self._flights.placed(request.id) is not None:
            return
        self.withdraw(request.id)
        slot = self._slots.known(admit.instance, admit.address)
        self._ledger.grow(len(self._slots))
        klass = self._policy.slomax.by_name.get(admit.klass) or classify.classify(request, self._policy.slomax)
        work = self._placement.work(request)
        flight = Flight(request, klass, admit, slot, float(work.prompt), float(work.total), 0, now - request.arrived)
        self._flights.launch(flight, self._placement.rows, now)

    def withdraw(self, request_id: str) -> Request | None:
        """Take a request out without a word in the books: somebody else owns it now. Return it if it was held."""
        waiting = self._line.remove(request_id)
        self._flights.withdraw(request_id)
        return None if waiting is None else waiting.request

    # --- what is going on ---------------------------------------------------------------------------------------------

    def in_flight(self) -> dict[str, int]:
        """Return instance → requests in flight, as this gateway counts them."""
        return {
            one.name: int(self._ledger.requests[slot])
            for one, slot in zip(self._placement.rows.instances, self._placement.rows.slots, strict=True)
        }

    def total_in_flight(self) -> int:
        """Return requests in flight on any instance, also on those that have left the snapshot."""
        return int(self._ledger.requests.sum())

    def prefill_in_flight(self) -> float:
        """Return uncached prompt tokens whose first token has not come, on any instance."""
        return float(self._ledger.prefill.sum())

    def waiting(self) -> dict[str, int]:
        """Return class → held requests."""
        return self._line.counts()

    def running(self) -> list[str]:
        """Return ids of requests that hold a place."""
        return self._flights.running()

    def resting(self, now: float) -> list[str]:
        """Return names of instances that rest after failures."""
        resting = set(self._health.resting(now))
        return [
            one.name
            for one, s in zip(self._placement.rows.instances, self._placement.rows.slots, strict=True)
            if int(s) in resting
        ]

    def index_blocks(self) -> int:
        """Return distinct prefix blocks believed cached somewhere."""
        return len(self._index)

    # --- decision -----------------------------------------------------------------------------------------------------

    def _known(self, request_id: str) -> Admit | Wait | None:
        """Return what was said of a request that comes again, from a worker whose connection was cut."""
        if (held := self._line.get(request_id)) is not None:
            return Wait(held.klass.name, held.until)
        if (flight := self._flights.placed(request_id)) is not None:
            return flight.admit
        self._flights.withdraw(request_id)  # its place is free since the cut, and it is not over after all
        return None

    def _place(self, request: Request, klass: ClassSpec, now: float) -> Admit | Refuse | None:
        """Return a verdict, or ``None`` when it could run but nobody has room now."""
        found = self._placement.find(request, self._prompt, now)
        if isinstance(found, Refuse):
            return replace(found, klass=klass.name)
        return None if found is None else self._admit(request, klass, found, now)

    def _admit(self, request: Request, klass: ClassSpec, place: Place, now: float) -> Admit:
        """Give the request its place."""
        admit = self._verdict(request, klass, place, now)
        rows, row = self._placement.rows, place.ranked[0]
        slot = int(rows.slots[row])
        prefill, tokens = float(place.prices.uncached[row]), float(place.work.total)
        flight = Flight(request, klass, admit, slot, prefill, tokens, place.matched.get(slot, 0), admit.why["held"])
        self._flights.launch(flight, rows, now)
        return admit

    def _shadow(self, request: Request, klass: ClassSpec, now: float) -> Admit:
        """Say what would be done, and do nothing."""
        found = self._placement.find(request, self._prompt, now)
        if isinstance(found, Place):
            admit = replace(self._verdict(request, klass, found, now), steer=False, would="admit")
        else:
            would = "wait" if found is None else str(found.reason)
            admit = Admit("", "", "", (), klass.name, steer=False, would=would)
        self.accounts.note_shadow(klass.name, admit.would)
        return admit

    def _verdict(self, request: Request, klass: ClassSpec, place: Place, now: float) -> Admit:
        rows, row = self._placement.rows, place.ranked[0]
        site = self.fleet.sites[int(rows.site_of[row])]
        held = max(0.0, now - request.arrived)
        return Admit(
            instance=rows.instances[row].name,
            site=site.name,
            cluster=site.cluster,
            hosts=tuple(rows.instances[one].address for one in place.ranked),
            klass=klass.name,
            clusters=self._clusters(place.ranked),
            why=place.prices.why(row) | {"network": cost.network_s(site, self._policy.fleetmind), "held": held},
        )

    def _clusters(self, ranked: Sequence[int]) -> tuple[str, ...]:
        if not self._policy.gateway.cross_site_retries:
            return ()
        return tuple(self.fleet.sites[int(self._placement.rows.site_of[row])].cluster for row in ranked)

    def _refused(self, request: Request, refuse: Refuse, now: float) -> Refuse:
        self.accounts.refuse(request, refuse.klass, refuse.reason, max(0.0, now - request.arrived))
        return refuse

    # --- the line -----------------------------------------------------------------------------------------------------

    def _grant(self, now: float) -> list[Granted]:
        """Bind whoever of the first of the waiting can run now."""
        if not len(self._line):
            return []
        granted: list[Granted] = []
        full: set[Like] = set()
        for one in self._line.heads(self._policy.slomax.look_ahead, self._placement.any_room):
            if one.like in full:
                continue
            found = self._place(one.request, one.klass, now)
            if found is None or (isinstance(found, Refuse) and found.reason in _PASSING):
                full.add(one.like)  # those behind it may go nowhere else
                continue
            self._line.remove(one.request.id)
            if isinstance(found, Refuse):
                found = self._refused(one.request, found, now)
            granted.append((one.request.id, found))
        return granted

    def _drain_s(self) -> float:
        """Return roughly when a place will be free: one second a hundred waiting, at most a minute."""
        return min(60.0, 1.0 + len(self._line) / 100)
