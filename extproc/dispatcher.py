"""The one owner of decision state: offer, observe, first_token, settle, tick.

Synchronous and without I/O; the same dispatcher runs behind Envoy, in the lab and in tests. Invariants: a request is
either in the line, in flight, or gone; in-flight counts return to zero when every request has been settled; no verdict
names a site that the request may not go to.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from extproc.accounting import Accounts
from extproc.fleetmind import choose, cost, eligibility
from extproc.flights import Flight, Flights
from extproc.model import (
    Admit,
    Bools,
    Ending,
    Final,
    Fleet,
    Floats,
    Outcome,
    Reason,
    Refuse,
    Request,
    State,
    Verdict,
    Wait,
)
from extproc.policy import ClassSpec, Policy
from extproc.slomax import admission, classify
from extproc.slomax.line import Line, Waiting
from extproc.tokenpilot import pick, score, workload
from extproc.tokenpilot.health import Health
from extproc.tokenpilot.ledger import Ledger
from extproc.tokenpilot.prefix import PrefixIndex
from extproc.tokenpilot.rows import Rows, Slots

_FIRST_PROMPT = 1000.0
_LEARNING = 0.02

_MOST_CALLERS = 4096
"""Answers kept for one snapshot: a caller may send any model and residency."""

_Caller = tuple[str, str, frozenset[str] | None]
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
        self.fleet = Fleet(at=0.0, blind=True, models=frozenset(policy.fleet.models))
        self._rows = Rows.of(self.fleet, self._slots)
        self._strangers = self._ledger.others(self._rows)
        self._lawful_rows: dict[_Caller, Bools | Refuse] = {}
        """Who may go where under this snapshot, by all that it depends on; see :meth:`_lawful`."""

    # --- events -------------------------------------------------------------------------------------------------------

    def offer(self, request: Request, now: float) -> Verdict:
        """Decide on a new request. A ``Wait`` is answered later, by what another event returns.

        Offered again, a request keeps what it has: its place in the line or its instance.
        """
        if (known := self._known(request.id)) is not None:
            return known
        klass = classify.classify(request, self._policy.slomax)
        self._prompt += _LEARNING * (request.prompt_tokens - self._prompt)
        found = self._place(request, klass, now)
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
        self.fleet = fleet
        self._rows = Rows.of(fleet, self._slots)
        self._ledger.grow(len(self._slots))
        self._strangers = self._ledger.others(self._rows)
        self._lawful_rows.clear()
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
        return self._grant(now) if self._flights.end(request_id, outcome, self._rows, now) else []

    def tick(self, now: float) -> list[Granted]:
        """Let time pass: waits that are over, books whose log entry never came, prefixes past their life."""
        granted: list[Granted] = []
        for one in self._line.expired(now):
            refuse = admission.refusal_at_deadline(one.klass, now - one.request.arrived)
            granted.append((one.request.id, self._refused(one.request, refuse, now)))
        self._flights.close_unlogged(self._rows, now)
        self._index.expire(now)
        return granted + self._grant(now)

    def adopt(self, request: Request, admit: Admit, now: float) -> None:
        """Take over a request that runs already (admitted by a worker alone, or before this dispatcher started)."""
        if self._flights.placed(request.id) is not None:
            return
        self.withdraw(request.id)
        slot = self._slots.known(admit.instance, admit.address)
        self._ledger.grow(len(self._slots))
        klass = self._policy.slomax.by_name.get(admit.klass) or classify.classify(request, self._policy.slomax)
        work = self._work(request)
        flight = Flight(request, klass, admit, slot, float(work.prompt), float(work.total), 0, now - request.arrived)
        self._flights.launch(flight, self._rows, now)

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
            for one, slot in zip(self._rows.instances, self._rows.slots, strict=True)
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
        return [one.name for one, s in zip(self._rows.instances, self._rows.slots, strict=True) if int(s) in resting]

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
        lawful = self._lawful(request)
        if isinstance(lawful, Refuse):
            return replace(lawful, klass=klass.name)
        open_rows = self._rested(lawful, now)
        rows, work = self._rows, self._work(request)
        room = open_rows & admission.has_room(self._ledger.requests[rows.slots], self._policy.slomax)
        if not np.count_nonzero(room):  # .any() costs four times as much on a few rows
            return None
        matched = self._index.match(request.blocks)
        prices = self._prices(request, work, matched)
        costs = self._site_costs(prices.total, room)
        chosen = choose.choose(costs, self._policy.fleet.home, self._policy.fleetmind) or self._policy.fleet.home
        here = rows.at[chosen]
        tuned = self._policy.tokenpilot
        ranked = pick.pick(prices.total, room & here, tuned.near_equal, self._rng, tuned.hosts)
        ranked += pick.spares(prices.total, open_rows & here, ranked, tuned.hosts)
        if self._policy.gateway.cross_site_retries:
            away = [pick.best(prices.total, room & rows.at[name]) for name in choose.others(costs, chosen)]
            ranked = pick.mixed(ranked, away, tuned.hosts)
        ranked += pick.spares(prices.total, lawful & here, ranked, min(tuned.hosts, 2))
        return self._admit(request, klass, work, ranked, prices, matched, now)

    def _lawful(self, request: Request) -> Bools | Refuse:
        """Return the rows that may and could serve *request*, room aside."""
        caller = (request.model, request.tenant, request.residency)
        found = self._lawful_rows.get(caller)
        if found is None:
            if len(self._lawful_rows) >= _MOST_CALLERS:
                self._lawful_rows.clear()
            found = self._lawful_rows[caller] = self._lawful_for(request)
        if request.subset is None or isinstance(found, Refuse):
            return found
        named = [in_subset(one.address, request.subset) for one in self._rows.instances]
        subset: Bools = found & np.array(named, dtype=bool)
        return subset if subset.any() else Refuse(Reason.SUBSET, "no ready instance is in the subset asked for", 1.0)

    def _lawful_for(self, request: Request) -> Bools | Refuse:
        """Return the rows for any request of this model, tenant and residency."""
        rows, tenant = self._rows, self._policy.tenants.of(request.tenant)
        if request.model not in self.fleet.models:
            return Refuse(Reason.UNKNOWN_MODEL, f"the model {request.model!r} does not exist")
        if not eligibility.may_use_model(tenant, request.model):
            return Refuse(Reason.NOT_ALLOWED, f"tenant {request.tenant!r} may not use the model {request.model!r}")
        loaded = rows.serves.get(request.model)
        if loaded is None:
            return _nobody(request)
        bars = [eligibility.barred(request, tenant, site) for site in self.fleet.sites]
        allowed: Bools = loaded & np.array([bar is None for bar in bars], dtype=bool)[rows.site_of]
        if not allowed.any():
            reasons = {bars[int(site)] for site in np.unique(rows.site_of[loaded])} - {None}
            if not reasons:
                return _nobody(request)
            reason = Reason.RESIDENCY if Reason.RESIDENCY in reasons else Reason.NOT_ALLOWED
            return Refuse(reason, f"no site that serves {request.model!r} is allowed for this request")
        ready: Bools = allowed & rows.ready
        return ready if ready.any() else _nobody(request)

    def _rested(self, lawful: Bools, now: float) -> Bools:
        """Leave out instances that rest, unless that leaves none."""
        resting = self._health.resting(now)
        if not resting:
            return lawful
        fit: Bools = lawful & ~np.isin(self._rows.slots, resting)
        return fit if fit.any() else lawful

    def _prices(self, request: Request, work: workload.Work, matched: dict[int, int]) -> score.Scores:
        rows = self._rows
        if self.fleet.blind:
            return score.score_blind(rows, self._ledger, work)
        cached = np.zeros(len(rows.slots))
        if matched:
            by_slot = np.zeros(len(self._slots))
            by_slot[list(matched)] = list(matched.values())
            cached = by_slot[rows.slots] * float(request.block_tokens)
        load = score.load_of(rows, self._ledger, self._strangers, self._prompt)
        return score.score(rows, load, work, cached, self._policy.tokenpilot.weights)

    def _site_costs(self, total: Floats, room: Bools) -> dict[str, float]:
        """Return site → seconds of its best row, network included; ``inf`` where no row has room."""
        priced = np.where(room, total, np.inf).tolist()
        bounds = zip(self.fleet.sites, self._rows.starts, self._rows.starts[1:], strict=False)
        return {
            site.name: min(priced[start:end], default=np.inf) + cost.network_s(site, self._policy.fleetmind)
            for site, start, end in bounds
        }

    def _admit(
        self,
        request: Request,
        klass: ClassSpec,
        work: workload.Work,
        ranked: Sequence[int],
        prices: score.Scores,
        matched: dict[int, int],
        now: float,
    ) -> Admit:
        rows, row = self._rows, ranked[0]
        site = self.fleet.sites[int(rows.site_of[row])]
        slot = int(rows.slots[row])
        held = max(0.0, now - request.arrived)
        why = prices.why(row) | {"network": cost.network_s(site, self._policy.fleetmind), "held": held}
        steer = self._policy.gateway.steer_percent >= 100 or (
            float(self._rng.random()) * 100 < self._policy.gateway.steer_percent
        )
        admit = Admit(
            instance=rows.instances[row].name,
            site=site.name,
            cluster=site.cluster,
            hosts=tuple(rows.instances[one].address for one in ranked),
            klass=klass.name,
            clusters=self._clusters(ranked),
            why=why,
            steer=steer,
        )
        prefill = float(prices.uncached[row])
        blocks = matched.get(slot, 0)
        flight = Flight(request, klass, admit, slot, prefill, float(work.total), blocks, held)
        self._flights.launch(flight, rows, now)
        return admit

    def _clusters(self, ranked: Sequence[int]) -> tuple[str, ...]:
        if not self._policy.gateway.cross_site_retries:
            return ()
        return tuple(self.fleet.sites[int(self._rows.site_of[row])].cluster for row in ranked)

    def _refused(self, request: Request, refuse: Refuse, now: float) -> Refuse:
        self.accounts.refuse(request, refuse.klass, refuse.reason, max(0.0, now - request.arrived))
        return refuse

    # --- the line -----------------------------------------------------------------------------------------------------

    def _grant(self, now: float) -> list[Granted]:
        """Bind whoever of the first of the waiting can run now."""
        if not len(self._line):
            return []
        granted: list[Granted] = []
        for heads in self._line.heads(self._policy.slomax.look_ahead):
            if self._any_room(heads[0].request.model):
                granted += self._grant_from(heads, now)
        return granted

    def _any_room(self, model: str) -> bool:
        """Tell cheaply whether looking at requests for *model* can bind any of them."""
        rows = self._rows
        loaded = rows.serves.get(model)
        room = admission.has_room(self._ledger.requests[rows.slots], self._policy.slomax)
        return loaded is not None and bool((loaded & rows.ready & room).any())

    def _grant_from(self, heads: Iterable[Waiting], now: float) -> list[Granted]:
        granted: list[Granted] = []
        for one in heads:
            found = self._place(one.request, one.klass, now)
            if found is None or (isinstance(found, Refuse) and found.reason in _PASSING):
                continue  # it has a wait of its own; an instance may come back within it
            self._line.remove(one.request.id)
            if isinstance(found, Refuse):
                found = self._refused(one.request, found, now)
            granted.append((one.request.id, found))
        return granted

    # --- figures ------------------------------------------------------------------------------------------------------

    def _work(self, request: Request) -> workload.Work:
        spec = self._policy.fleet.models.get(request.model)
        return workload.estimate(request, spec.expected_output_tokens if spec else 256)

    def _drain_s(self) -> float:
        """Return roughly when a place will be free: one second a hundred waiting, at most a minute."""
        return min(60.0, 1.0 + len(self._line) / 100)


def in_subset(address: str, subset: Iterable[str]) -> bool:
    """Tell whether ``ip:port`` is named by *subset*, whose bare addresses stand for all their ports."""
    host = address.rsplit(":", 1)[0]
    return any(one in (address, host, host.strip("[]")) for one in subset)


def _nobody(request: Request) -> Refuse:
    return Refuse(Reason.NO_INSTANCE, f"no instance is ready for the model {request.model!r}", retry_after_s=2.0)
