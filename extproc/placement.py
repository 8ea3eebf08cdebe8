"""Where one request could run now: the rows that may take it, their prices, and the best of them in order.

FleetMind says which sites are lawful and what going there costs, SLOMax which instances have room, TokenPilot what each
instance costs; here they meet over one snapshot. Nothing is changed by looking. Invariant: a row that the request may
not go to is in no result.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from extproc.fleetmind import choose, cost, eligibility
from extproc.model import Bools, Fleet, Floats, Reason, Refuse, Request
from extproc.policy import Policy
from extproc.slomax import admission
from extproc.tokenpilot import pick, score, workload
from extproc.tokenpilot.health import Health
from extproc.tokenpilot.ledger import Ledger
from extproc.tokenpilot.prefix import PrefixIndex
from extproc.tokenpilot.rows import Rows, Slots

_MOST_CALLERS = 4096
"""Answers kept for one snapshot: a caller may send any model and residency."""

_Caller = tuple[str, str, frozenset[str] | None]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request goes: rows of the snapshot, the chosen one first, and what was believed of them."""

    ranked: list[int]
    prices: score.Scores
    matched: dict[int, int]
    """Slot → leading prefix blocks that it holds."""
    work: workload.Work


class Placement:
    """Looks at one snapshot, the shared counts, the prefix index and the health of instances."""

    def __init__(
        self,
        policy: Policy,
        rng: np.random.Generator,
        slots: Slots,
        ledger: Ledger,
        index: PrefixIndex,
        health: Health,
    ) -> None:
        self._policy = policy
        self._rng = rng
        self._slots = slots
        self._ledger = ledger
        self._index = index
        self._health = health
        self._lawful_rows: dict[_Caller, Bools | Refuse] = {}
        """Who may go where under this snapshot, by all that it depends on; see :meth:`_lawful`."""
        self.observe(Fleet(at=0.0, blind=True, models=frozenset(policy.fleet.models)))

    def observe(self, fleet: Fleet) -> None:
        """Replace the snapshot."""
        self.fleet = fleet
        self.rows = Rows.of(fleet, self._slots)
        self._ledger.grow(len(self._slots))
        self._strangers = self._ledger.others(self.rows)
        self._lawful_rows.clear()

    def find(self, request: Request, typical_prompt: float, now: float) -> Place | Refuse | None:
        """Return where *request* runs best now, why it cannot, or ``None`` when nobody who may take it has room."""
        lawful = self._lawful(request)
        if isinstance(lawful, Refuse):
            return lawful
        open_rows = self._rested(lawful, now)
        rows, work = self.rows, self.work(request)
        room = open_rows & admission.has_room(self._ledger.requests[rows.slots], self._policy.slomax)
        if not np.count_nonzero(room):  # .any() costs four times as much on a few rows
            return None
        matched = self._index.match(request.blocks)
        prices = self._prices(request, work, matched, typical_prompt)
        return Place(self._ranked(prices.total, lawful, open_rows, room), prices, matched, work)

    def any_room(self, model: str) -> bool:
        """Tell cheaply whether looking at requests for *model* can place any of them."""
        rows = self.rows
        loaded = rows.serves.get(model)
        room = admission.has_room(self._ledger.requests[rows.slots], self._policy.slomax)
        return loaded is not None and bool((loaded & rows.ready & room).any())

    def work(self, request: Request) -> workload.Work:
        """Return the work that *request* is expected to be."""
        spec = self._policy.fleet.models.get(request.model)
        return workload.estimate(request, spec.expected_output_tokens if spec else 256)

    def _ranked(self, total: Floats, lawful: Bools, open_rows: Bools, room: Bools) -> list[int]:
        """Return the hosts' rows, best first: of the chosen site, and of others where retries may go there."""
        costs = self._site_costs(total, room)
        chosen = choose.choose(costs, self._policy.fleet.home, self._policy.fleetmind) or self._policy.fleet.home
        here = self.rows.at[chosen]
        tuned = self._policy.tokenpilot
        ranked = pick.pick(total, room & here, tuned.near_equal, self._rng, tuned.hosts)
        ranked += pick.spares(total, open_rows & here, ranked, tuned.hosts)
        if self._policy.gateway.cross_site_retries:
            away = [pick.best(total, room & self.rows.at[name]) for name in choose.others(costs, chosen)]
            ranked = pick.mixed(ranked, away, tuned.hosts)
        return ranked + pick.spares(total, lawful & here, ranked, min(tuned.hosts, 2))

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
        named = [in_subset(one.address, request.subset) for one in self.rows.instances]
        subset: Bools = found & np.array(named, dtype=bool)
        return subset if subset.any() else Refuse(Reason.SUBSET, "no ready instance is in the subset asked for", 1.0)

    def _lawful_for(self, request: Request) -> Bools | Refuse:
        """Return the rows for any request of this model, tenant and residency."""
        rows, tenant = self.rows, self._policy.tenants.of(request.tenant)
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
        fit: Bools = lawful & ~np.isin(self.rows.slots, resting)
        return fit if fit.any() else lawful

    def _prices(
        self, request: Request, work: workload.Work, matched: dict[int, int], typical_prompt: float
    ) -> score.Scores:
        rows = self.rows
        if self.fleet.blind:
            return score.score_blind(rows, self._ledger, work)
        cached = np.zeros(len(rows.slots))
        if matched:
            by_slot = np.zeros(len(self._slots))
            by_slot[list(matched)] = list(matched.values())
            cached = by_slot[rows.slots] * float(request.block_tokens)
        load = score.load_of(rows, self._ledger, self._strangers, typical_prompt)
        return score.score(rows, load, work, cached, self._policy.tokenpilot.weights)

    def _site_costs(self, total: Floats, room: Bools) -> dict[str, float]:
        """Return site → seconds of its best row, network included; ``inf`` where no row has room."""
        priced = np.where(room, total, np.inf).tolist()
        bounds = zip(self.fleet.sites, self.rows.starts, self.rows.starts[1:], strict=False)
        return {
            site.name: min(priced[start:end], default=np.inf) + cost.network_s(site, self._policy.fleetmind)
            for site, start, end in bounds
        }


def in_subset(address: str, subset: Iterable[str]) -> bool:
    """Tell whether ``ip:port`` is named by *subset*, whose bare addresses stand for all their ports."""
    host = address.rsplit(":", 1)[0]
    return any(one in (address, host, host.strip("[]")) for one in subset)


def _nobody(request: Request) -> Refuse:
    return Refuse(Reason.NO_INSTANCE, f"no instance is ready for the model {request.model!r}", retry_after_s=2.0)
