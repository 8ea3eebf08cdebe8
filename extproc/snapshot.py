"""Readings → the fleet at one moment.

Pure: the same function serves the gateway and the lab. Age is judged against the newest reading of all, the collector's
heartbeat, so that a collector that stops does not make instances lost one after another, in the order in which it last
saw them: only once the heartbeat itself is too old is the fleet *blind*. Then last known states stand, since nobody
knows better, and the numbers are put to zero, since nobody should steer by them: own counts alone decide.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from extproc.model import Bools, Fleet, Floats, Instance, Reading, Site, State
from extproc.policy import FleetPolicy, SiteSpec

_Row = tuple[Instance, Reading | None]


def build(policy: FleetPolicy, listed: Iterable[Instance], readings: Sequence[Reading], now: float) -> Fleet:
    """Return the snapshot of all instances that *listed* or *readings* name.

    Parameters
    ----------
    policy
        Sites, models, staleness bound.
    listed
        Instances known from the policy itself; a reading's own description wins, since discovery is newer. One without
        a reading is starting.
    readings
        From the store, any age. Those of sites that the policy does not have are left out.
    now
        Wall-clock seconds, the readings' clock.

    """
    rows: dict[str, _Row] = {one.name: (one, None) for one in listed}
    rows |= {reading.instance.name: (reading.instance, reading) for reading in readings}
    by_site: dict[str, list[_Row]] = {}
    for name in sorted(rows):
        by_site.setdefault(rows[name][0].site, []).append(rows[name])
    heartbeat = max((reading.at for reading in readings), default=-np.inf)
    bound = policy.telemetry.lost_after_ms / 1000
    blind = bool(now - heartbeat > bound)
    oldest = heartbeat - bound
    sites = tuple(_site(spec, by_site.get(spec.name, ()), now, oldest, blind, policy) for spec in policy.sites)
    models = frozenset(policy.models) | {name for site in sites for name in site.serves}
    return Fleet(at=now, sites=sites, blind=blind, models=models)


def _site(spec: SiteSpec, rows: Sequence[_Row], now: float, oldest: float, blind: bool, policy: FleetPolicy) -> Site:
    found = [reading for _, reading in rows]
    return Site(
        name=spec.name,
        cluster=spec.envoy_cluster,
        jurisdictions=spec.jurisdictions,
        network_s=spec.rtt_ms / 1000,
        draining=spec.draining,
        instances=tuple(instance for instance, _ in rows),
        states=tuple(_state(instance, reading, oldest) for instance, reading in rows),
        waiting=_column([None if reading is None or blind else reading.waiting for reading in found]),
        running=_column([None if reading is None or blind else reading.running for reading in found]),
        kv_usage=_column([None if reading is None or blind else reading.kv_usage for reading in found]),
        age_s=np.array([np.inf if reading is None else max(now - reading.at, 0.0) for reading in found]),
        serves=_serves(rows, policy.canonical),
    )


def _state(instance: Instance, reading: Reading | None, oldest: float) -> State:
    if reading is None:
        return State.STARTING
    if reading.state not in {State.READY, State.DRAINING}:
        return reading.state
    if reading.at < oldest:
        return State.LOST
    return State.DRAINING if instance.draining else reading.state


def _serves(rows: Sequence[_Row], canonical: Mapping[str, str]) -> dict[str, Bools]:
    masks: dict[str, Bools] = {}
    # A fleet has few different lists of models and many instances of each.
    named: dict[tuple[tuple[str, ...], tuple[str, ...] | None], frozenset[str]] = {}
    for row, (instance, reading) in enumerate(rows):
        key = (instance.models, None if reading is None else reading.models)
        if key not in named:
            named[key] = _names(*key, canonical)
        for name in named[key]:
            if name not in masks:
                masks[name] = np.zeros(len(rows), dtype=np.bool_)
            masks[name][row] = True
    return masks


def _names(claimed: tuple[str, ...], said: tuple[str, ...] | None, canonical: Mapping[str, str]) -> frozenset[str]:
    """Model names as clients write them; an engine's own list narrows what discovery claims and adds adapters."""
    if said is None:
        return frozenset(claimed)
    own = {canonical.get(name, name) for name in said}
    # An engine started under another served name (a path, say) answers to none of ours: believe discovery then.
    return frozenset(own if own & set(claimed) else {*claimed, *own})


def _column(values: Sequence[float | None]) -> Floats:
    return np.array([0.0 if value is None else value for value in values], dtype=np.float64)
