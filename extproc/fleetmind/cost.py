"""What going to a site costs beyond the work there, in seconds."""

from extproc.model import Site
from extproc.policy import FleetMindPolicy


def network_s(site: Site, policy: FleetMindPolicy) -> float:
    """Return the price of the round trip."""
    return policy.network_weight * site.network_s
