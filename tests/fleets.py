"""Snapshots for tests: the fleet that a policy lists, all ready and idle but for what is said."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from extproc.model import Fleet, Instance, Reading, State
from extproc.policy import Policy
from extproc.snapshot import build


def instances_of(policy: Policy) -> list[Instance]:
    found = []
    for site in policy.fleet.sites:
        for group in site.instances:
            for one in group.static or ():
                name = one.profile or group.profile
                found.append(
                    Instance(
                        name=one.name,
                        site=site.name,
                        address=one.address,
                        models=one.models or group.models,
                        profile=policy.profiles[name].profile(name),
                        draining=one.draining,
                    )
                )
    return found


def a_fleet(
    policy: Policy,
    *,
    missing: Collection[str] = (),
    blind: bool = False,
    states: Mapping[str, State] | None = None,
    **readings: Mapping[str, Any],
) -> Fleet:
    """*missing* instances have left; *states* and *readings* (``a_0={"waiting": 3}``) differ from ready and idle."""
    states = states or {}
    wall = 1000.0
    found = []
    for one in instances_of(policy):
        if one.name not in missing:
            idle = Reading(one, State.READY, wall, waiting=0.0, running=0.0, kv_usage=0.0)
            found.append(
                replace(idle, state=states.get(one.name, State.READY), **readings.get(one.name.replace("-", "_"), {}))
            )
    bound = policy.fleet.telemetry.lost_after_ms / 1000
    return build(policy.fleet, (), found, wall + (bound + 1 if blind else 0))
