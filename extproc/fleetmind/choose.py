"""Home, unless another lawful site is better by more than the margin."""

import math
from collections.abc import Mapping

from extproc.policy import FleetMindPolicy


def choose(cost: Mapping[str, float], home: str, policy: FleetMindPolicy) -> str | None:
    """Return the site to send to.

    Parameters
    ----------
    cost
        Site → predicted seconds, network included; ``inf`` where nothing can take the request now.
    home
        The gateway's own site, which wins ties and anything within the margin.
    policy
        The margin.

    """
    open_sites = {name: seconds for name, seconds in cost.items() if math.isfinite(seconds)}
    if not open_sites:
        return None
    margin = policy.margin_ms / 1000
    return min(open_sites, key=lambda name: (open_sites[name] + (margin if name != home else 0.0), name != home, name))


def others(cost: Mapping[str, float], chosen: str) -> list[str]:
    """Return the other sites that can take the request now, the cheapest first."""
    open_sites = [name for name, seconds in cost.items() if name != chosen and math.isfinite(seconds)]
    return sorted(open_sites, key=lambda name: (cost[name], name))
