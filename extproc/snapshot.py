"""Readings → the fleet at one moment.

Pure: the same function serves the gateway and the lab. Invariant: a row is ready only if its reading says so and is
fresh; when *every* reading is stale (collector or store away) the fleet is blind and last known states stand.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from extproc.model import Fleet, Floats, Instance, Reading, Site, State
from extproc.policy import FleetPolicy, SiteSpec


def build(policy: FleetPolicy, listed: Iterable[Instance], readings: Sequence[Reading], now: float) -> Fleet:
    """Return the snapshot of all instances that *listed* or *readings* name.

    Parameters
    ----------
    policy
        Sites, models, staleness bound.
    listed
        Instances known from the policy itself; a reading's own description wins, since discovery is newer.
    readings
        From the store, any age.
    now
        Wall-clock seconds, the readings' clock.

    """
    by_name = {reading.instance.name: reading for reading in readings}
    known = {one.name: one for one in listed} | {name: reading.instance for name, reading in by_name.items()}
    bound = policy.telemetry.lost_after_ms / 1000
    blind = all(now - reading.at > bound for reading in readings)
    sites = tuple(_site(spec, known.values(), by_name, now, None if blind else bound, policy) for spec in policy.sites)
    models = frozenset(policy.models) | {name for site in sites for name in site.serves}
    return Fleet(at=now, sites=sites, blind=blind, models=models)


def _site(
    spec: SiteSpec,
    known: Iterable[Instance],
    readings: dict[str, Reading],
    now: float,
    bound: float | None,
    policy: FleetPolicy,
) -> Site:
    rows = sorted((one for one in known if one.site == spec.name), key=lambda one: one.name)
    found = [readings.get(one.name) for one in rows]
    served = [_served(one, reading, policy) for one, reading in zip(rows, found, strict=True)]
    return Site(
        name=spec.name,
        cluster=spec.envoy_cluster,
        jurisdictions=spec.jurisdictions,
        network_s=spec.rtt_ms / 1000,
        draining=spec.draining,
        instances=tuple(rows),
        states=tuple(_state(one, reading, now, bound) for one, reading in zip(rows, found, strict=True)),
        waiting=_column(reading.waiting if reading else None for reading in found),
        running=_column(reading.running if reading else None for reading in found),
        kv_usage=_column(reading.kv_usage if reading else None for reading in found),
        age_s=np.array([now - reading.at if reading else np.inf for reading in found]),
        serves={name: np.array([name in one for one in served], dtype=bool) for name in {n for s in served for n in s}},
    )


def _served(instance: Instance, reading: Reading | None, policy: FleetPolicy) -> frozenset[str]:
    """Model names as clients write them; an engine's own list narrows what discovery claims and adds adapters."""
    said = None if reading is None else reading.models
    if said is None:
        return frozenset(instance.models)
    own = {policy.canonical.get(name, name) for name in said}
    # An engine started under another served name (a path, say) answers to none of ours: believe discovery then.
    return frozenset(own if own & set(instance.models) else {*instance.models, *own})


def _state(instance: Instance, reading: Reading | None, now: float, bound: float | None) -> State:
    """*bound* is ``None`` when blind: nothing is fresh, so nothing is lost for being old."""
    if reading is None:
        return State.STARTING
    if reading.state is State.READY and bound is not None and now - reading.at > bound:
        return State.LOST
    if reading.state is State.READY and instance.draining:
        return State.DRAINING
    return reading.state


def _column(values: Iterable[float | None]) -> Floats:
    return np.array([0.0 if value is None else value for value in values], dtype=np.float64)
