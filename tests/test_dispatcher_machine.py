"""Whatever happens to the dispatcher in whatever order, what must always hold does."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from extproc.dispatcher import Dispatcher, Granted
from extproc.flights import LOG_GRACE_S
from extproc.model import Admit, Ending, Instance, Outcome, Reason, Refuse, Request, Site, State, Verdict, Wait
from extproc.policy import Policy
from tests.builders import CHAT, a_policy, a_request
from tests.fleets import a_fleet

SMALL = "small-model"
MOST = 2
TENANTS = {
    "eu-only": {"jurisdictions": ["eu"]},
    "not-b": {"denied_sites": ["b"]},
    "only-b": {"sites": ["b"]},
    "only-small": {"models": [SMALL]},
}


def the_policy(cross: bool) -> Policy:
    def site(name: str, port: int, models: list[list[str]], regions: list[str], **more: Any) -> dict[str, Any]:
        static = [{"name": f"{name}-{i}", "address": f"10.0.0.1:{port + i}", "models": m} for i, m in enumerate(models)]
        return {"name": name, "jurisdictions": regions, "instances": [{"models": [CHAT], "static": static}], **more}

    both = [CHAT, SMALL]
    return a_policy(
        gateway={"cross_site_retries": cross},
        fleet={
            "models": {CHAT: {}, SMALL: {}},
            "sites": [
                site("a", 100, [both, [CHAT], [CHAT]], ["eu", "de"]),
                site("b", 200, [both, both], ["us"], rtt_ms=80),
                site("c", 300, [[CHAT], [SMALL]], ["eu"], rtt_ms=20),
                site("d", 400, [both], ["eu"], draining=True),
            ],
        },
        tenants={"tenants": TENANTS},
        slomax={
            "max_in_flight": MOST,
            "classes": [
                {
                    "name": "gold",
                    "priority": 10,
                    "when": {"tiers": ["gold"]},
                    "longest_wait_ms": 3000,
                    "max_waiting": 3,
                },
                {"name": "standard", "longest_wait_ms": 8000, "max_waiting": 6},
            ],
        },
        tokenpilot={"fail_after": 2, "rest_ms": 2000},
    )


POLICIES = {cross: the_policy(cross) for cross in (False, True)}
NAMES = [one.name for site in POLICIES[True].fleet.sites for group in site.instances for one in group.static or ()]
ADDRESSES = [one.address for site in POLICIES[True].fleet.sites for g in site.instances for one in g.static or ()]
OUTCOMES = st.builds(
    Outcome,
    ending=st.sampled_from([None, *Ending]),
    status=st.sampled_from([0, 200, 400, 503]),
    served=st.sampled_from([None, "10.9.9.9:1", *ADDRESSES]),
    attempts=st.integers(0, 4),
    ttft_s=st.sampled_from([None, 0.1, 5.0]),
    duration_s=st.sampled_from([None, 1.0]),
    output_tokens=st.sampled_from([None, 0, 7]),
)
REQUESTS = st.fixed_dictionaries(
    {
        "model": st.sampled_from([CHAT, CHAT, SMALL, "no-model"]),
        "tenant": st.sampled_from(["default", "default", *TENANTS]),
        "tier": st.sampled_from(["standard", "gold"]),
        "wanted_class": st.sampled_from([None, None, "gold", "standard"]),
        "prompt_tokens": st.integers(1, 20_000),
        "output_budget": st.sampled_from([None, 1, 500]),
        "residency": st.sampled_from([None, None, frozenset({"eu"}), frozenset({"us"}), frozenset({"mars"})]),
        "subset": st.sampled_from(
            [None, None, None, frozenset({"10.0.0.1:101", "10.0.0.1:200"}), frozenset({"9.9.9.9"})]
        ),
        "deadline_s": st.sampled_from([None, None, 0.5, 60.0]),
        "blocks": st.sampled_from([(), (1, 2, 3), (1, 2, 4, 5), (7,)]),
    }
)


@dataclass
class Known:
    """What the test knows of one request."""

    request: Request
    where: str
    """held, running, books, gone"""
    verdict: Verdict
    until: float = 0.0


class DispatcherMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.known: dict[str, Known] = {}
        self.counted = 0
        """Requests that must be in the books or alive."""

    @initialize(cross=st.booleans(), seed=st.integers(0, 99))
    def begin(self, cross: bool, seed: int) -> None:
        self.policy = POLICIES[cross]
        self.cross = cross
        self.dispatcher = Dispatcher(self.policy, np.random.default_rng(seed))
        self.fleet = a_fleet(self.policy)
        assert self.dispatcher.observe(self.fleet, self.now) == []

    # --- what may happen ----------------------------------------------------------------------------------------------

    @rule(fields=REQUESTS, late=st.sampled_from([0.0, 0.0, 1.0]))
    def offer(self, fields: dict[str, Any], late: float) -> None:
        name = f"r{len(self.known)}"
        request = a_request(id=name, arrived=self.now - late, **fields)
        self.counted += 1
        self._judge_offer(request)

    @precondition(lambda self: self._some("held", "running", "books"))
    @rule(data=st.data())
    def offer_again(self, data: st.DataObject) -> None:
        one = self.known[data.draw(st.sampled_from(self._some("held", "running", "books")))]
        if one.where == "books":
            self._judge_offer(one.request)
            return
        assert self.dispatcher.offer(one.request, self.now) == one.verdict

    @rule(
        states=st.dictionaries(st.sampled_from(NAMES), st.sampled_from(list(State)), max_size=4),
        missing=st.sets(st.sampled_from(NAMES), max_size=3),
        blind=st.sampled_from([False, False, False, True]),
        waiting=st.integers(0, 3),
    )
    def observe(self, states: dict[str, State], missing: set[str], blind: bool, waiting: int) -> None:
        self.fleet = a_fleet(self.policy, states=states, missing=missing, blind=blind, a_0={"waiting": float(waiting)})
        self._take(self.dispatcher.observe(self.fleet, self.now))

    @rule()
    def all_is_well(self) -> None:
        self.observe({}, set(), False, 0)

    @rule(data=st.data())
    def first_token(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([*self.known, "nobody"]))
        before = self.dispatcher.total_in_flight()
        self._take(self.dispatcher.first_token(name, self.now))
        assert self.dispatcher.total_in_flight() == before

    @rule(data=st.data(), outcome=OUTCOMES)
    def settle(self, data: st.DataObject, outcome: Outcome) -> None:
        name = data.draw(st.sampled_from([*self.known, "nobody"]))
        self._settle(name, outcome)

    @rule(passed=st.sampled_from([0.01, 0.3, 1.0, 3.0, LOG_GRACE_S + 0.1]))
    def tick(self, passed: float) -> None:
        self.now += passed
        books = set(self._some("books"))
        granted = self.dispatcher.tick(self.now)
        for name, verdict in granted:
            if isinstance(verdict, Refuse) and verdict.reason is Reason.DEADLINE:
                assert self.known[name].until <= self.now, "not before its deadline"
        self._take(granted)
        for name in self._some("held"):
            assert self.known[name].until > self.now, "nobody waits past its deadline"
            assert not self._could_run(self.known[name].request), f"{name} could run"
        if passed > LOG_GRACE_S:
            for name in books:
                self.known[name].where = "gone"

    @rule(fields=REQUESTS, number=st.integers(0, len(NAMES) - 1))
    def adopt(self, fields: dict[str, Any], number: int) -> None:
        name = f"r{len(self.known)}"
        request = a_request(id=name, arrived=self.now, **fields)
        admit = Admit(NAMES[number], NAMES[number][0], f"site-{NAMES[number][0]}", (ADDRESSES[number],), "standard")
        self.dispatcher.adopt(request, admit, self.now)
        self.known[name] = Known(request, "running", admit)
        self.counted += 1

    @precondition(lambda self: self._some("held", "running", "books"))
    @rule(data=st.data(), number=st.integers(0, len(NAMES) - 1))
    def adopt_a_known_one(self, data: st.DataObject, number: int) -> None:
        one = self.known[data.draw(st.sampled_from(self._some("held", "running", "books")))]
        admit = Admit(NAMES[number], NAMES[number][0], f"site-{NAMES[number][0]}", (ADDRESSES[number],), "gold")
        self.dispatcher.adopt(one.request, admit, self.now)
        if one.where != "running":
            one.where, one.verdict = "running", admit

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(list(self.known)))
        one = self.known[name]
        taken = self.dispatcher.withdraw(name)
        assert (taken == one.request) if one.where == "held" else (taken is None)
        if one.where != "gone":
            self.counted -= 1
        one.where = "gone"

    # --- what must hold -----------------------------------------------------------------------------------------------

    @invariant()
    def everybody_is_somewhere_once(self) -> None:
        assert sorted(self.dispatcher.running()) == sorted(self._some("running"))
        assert sum(self.dispatcher.waiting().values()) == len(self._some("held"))
        assert self.dispatcher.total_in_flight() == len(self._some("running"))
        for name, count in self.dispatcher.in_flight().items():
            running = [self.known[one].verdict for one in self._some("running")]
            assert count == sum(isinstance(one, Admit) and one.instance == name for one in running)

    @invariant()
    def no_count_is_negative(self) -> None:
        ledger = self.dispatcher._ledger
        for column in (ledger.requests, ledger.prefill, ledger.tokens):
            assert (column >= 0).all()
        idle = ledger.requests == 0
        assert not ledger.prefill[idle].any()
        assert not ledger.tokens[idle].any()

    @invariant()
    def the_books_and_the_living_are_all_that_was_offered(self) -> None:
        counts = self.dispatcher.accounts.counts.values()
        offered = sum(one.offered for one in counts)
        assert offered == sum(sum(one.refused.values()) + sum(one.endings.values()) for one in counts)
        assert offered + len(self._some("held", "running", "books")) == self.counted

    def teardown(self) -> None:
        if not hasattr(self, "dispatcher"):
            return
        while alive := self._some("held", "running"):
            self._settle(alive[0], Outcome())
        assert not self.dispatcher._ledger.requests.any()
        assert self.dispatcher.prefill_in_flight() == 0.0
        assert not self.dispatcher._ledger.tokens.any()
        self.tick(LOG_GRACE_S + 0.1)
        self.the_books_and_the_living_are_all_that_was_offered()
        assert not self.dispatcher._flights._by_id
        assert not self.dispatcher._flights._ended
        assert not self.dispatcher._line._queues

    # --- how it is known ----------------------------------------------------------------------------------------------

    def _some(self, *where: str) -> list[str]:
        return [name for name, one in self.known.items() if one.where in where]

    def _judge_offer(self, request: Request) -> None:
        could, waiting = self._could_run(request), self._some("held")
        verdict = self.dispatcher.offer(request, self.now)
        one = self.known[request.id] = Known(request, "gone", verdict)
        if isinstance(verdict, Admit):
            assert could
            one.where = "running"
            self._judge_admit(request, verdict)
        elif isinstance(verdict, Wait):
            assert not could
            one.where, one.until = "held", verdict.until
            assert self.now < verdict.until <= request.arrived + 8.0
        else:
            assert not could
            self._judge_refusal(request, verdict, waiting)

    def _judge_refusal(self, request: Request, refuse: Refuse, waiting: list[str]) -> None:
        serving = [(site, one) for site, one in self._rows() if request.model in one.models]
        allowed = [(site, one) for site, one in serving if self._allowed(request, site)]
        match refuse.reason:
            case Reason.UNKNOWN_MODEL:
                assert request.model == "no-model"
            case Reason.LINE_FULL:
                assert len([one for one in waiting if self._klass(one) == refuse.klass]) >= 3
                assert refuse.retry_after_s
            case Reason.DEADLINE:
                assert request.arrived < self.now
            case Reason.NO_INSTANCE:
                assert not self._lawful(replace(request, subset=None))
                assert refuse.retry_after_s
            case Reason.RESIDENCY | Reason.NOT_ALLOWED:
                assert (serving and not allowed) or (request.tenant == "only-small" and request.model != SMALL)
            case Reason.SUBSET:
                assert request.subset is not None
                assert self._lawful(replace(request, subset=None))
            case _:
                raise AssertionError(refuse)

    def _klass(self, name: str) -> str:
        verdict = self.known[name].verdict
        assert isinstance(verdict, Wait)
        return verdict.klass

    def _rows(self) -> list[tuple[Site, Instance]]:
        return [(site, one) for site in self.fleet.sites for one in site.instances]

    def _allowed(self, request: Request, site: Site) -> bool:
        rules = TENANTS.get(request.tenant, {})
        if site.name in rules.get("denied_sites", []) or site.name not in rules.get("sites", [site.name]):
            return False
        bounds = [set(rules["jurisdictions"])] if "jurisdictions" in rules else []
        bounds += [set(request.residency)] if request.residency is not None else []
        return all(bound & site.jurisdictions for bound in bounds)

    def _lawful(self, request: Request) -> dict[str, tuple[Site, Instance]]:
        """Address → instance that may serve *request* now, room aside."""
        if request.tenant == "only-small" and request.model != SMALL:
            return {}
        found = {}
        for site in self.fleet.sites:
            for one, state in zip(site.instances, site.states, strict=True):
                fit = state is State.READY or (self.fleet.blind and state is State.STARTING)
                asked = request.subset is None or one.address in request.subset
                if fit and asked and not site.draining and request.model in one.models and self._allowed(request, site):
                    found[one.address] = (site, one)
        return found

    def _could_run(self, request: Request) -> bool:
        lawful = {one.name for _, one in self._lawful(request).values()}
        resting = set(self.dispatcher.resting(self.now))
        return any(self.dispatcher.in_flight()[name] < MOST for name in (lawful - resting) or lawful)

    def _judge_admit(self, request: Request, admit: Admit) -> None:
        lawful = self._lawful(request)
        assert set(admit.hosts) <= set(lawful), "an unlawful host"
        assert len(set(admit.hosts)) == len(admit.hosts) <= 3
        site, first = lawful[admit.hosts[0]]
        assert (first.name, site.name, site.cluster) == (admit.instance, admit.site, admit.cluster)
        own = [address for address, (at, _) in lawful.items() if at.name == site.name]
        assert len(admit.hosts) >= min(2, len(own)), "two hosts where two exist"
        assert set(admit.hosts[: min(2, len(own))]) <= set(own), "the chosen site keeps the first two places"
        clusters = tuple(lawful[address][0].cluster for address in admit.hosts)
        assert admit.clusters == (clusters if self.cross else ())
        if not self.cross:
            assert set(clusters) == {site.cluster}
        assert self.dispatcher.in_flight()[admit.instance] <= MOST
        assert admit.predicted_s() >= 0
        assert admit.steer

    def _take(self, granted: list[Granted]) -> None:
        assert len({name for name, _ in granted}) == len(granted), "one verdict each"
        for name, verdict in granted:
            one = self.known[name]
            assert one.where == "held"
            if isinstance(verdict, Admit):
                one.where, one.verdict = "running", verdict
                self._judge_admit(one.request, verdict)
                self._judge_order(one)
            else:
                assert verdict.reason is not Reason.NO_INSTANCE, "it waits for one to come back"
                one.where = "gone"
                one.verdict = verdict

    def _judge_order(self, one: Known) -> None:
        """Nobody who came earlier, in the same queue and bound in the same way, is still waiting."""
        first = one.request

        def bound(request: Request) -> tuple[Any, ...]:
            return request.model, request.tenant, request.tier, request.wanted_class, request.residency, request.subset

        for name in self._some("held"):
            other = self.known[name].request
            assert bound(other) != bound(first) or other.arrived >= first.arrived, "order is kept"

    def _settle(self, name: str, outcome: Outcome) -> None:
        one = self.known.get(name)
        where = "gone" if one is None else one.where
        granted = self.dispatcher.settle(name, outcome, self.now)
        if where != "running":
            assert granted == []
        if one is not None and where == "running":
            one.where = "books" if outcome.ending is None else "gone"
        elif one is not None and (where == "held" or outcome.ending is not None):
            one.where = "gone"
        self._take(granted)


TestDispatcher = DispatcherMachine.TestCase
TestDispatcher.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
