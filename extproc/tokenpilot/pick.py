"""From prices to hosts: the best first, the next best behind it for Envoy's retries.

Ties are broken by chance, so that gateways with the same stale view do not herd: among rows within *near* of the best
one is drawn, the rest keep their order.
"""

from collections.abc import Sequence

import numpy as np

from extproc.model import Bools, Floats


def pick(total: Floats, open_rows: Bools, near: float, rng: np.random.Generator, count: int) -> list[int]:
    """Return at most *count* of the *open_rows*, best first; empty when none is open."""
    candidates = np.flatnonzero(open_rows)
    if not len(candidates):
        return []
    prices = total[candidates]
    order = candidates[np.argsort(prices, kind="stable")]
    bound = total[order[0]] + near * abs(total[order[0]]) + 1e-9
    equals = int(np.searchsorted(total[order], bound, side="right"))
    ranked = [int(row) for row in order[: max(count, equals)]]
    if equals > 1:
        chosen = ranked.pop(int(rng.integers(equals)))
        ranked.insert(0, chosen)
    return ranked[:count]


def spares(total: Floats, fit: Bools, ranked: Sequence[int], count: int) -> list[int]:
    """Return rows of *fit* that fill *ranked* up to *count*, best first: they may still catch a retry."""
    missing = count - len(ranked)
    if missing <= 0:
        return []
    left = [int(row) for row in np.flatnonzero(fit) if row not in ranked]
    return sorted(left, key=lambda row: float(total[row]))[:missing]


def best(total: Floats, open_rows: Bools) -> int:
    """Return the cheapest of the *open_rows*, of which there is one at least."""
    return int(np.argmin(np.where(open_rows, total, np.inf)))


def mixed(here: Sequence[int], away: Sequence[int], count: int) -> list[int]:
    """Return at most *count* rows for retries that may change the site.

    The chosen site keeps the first two places where it has two, the other sites' best follow in their order.
    """
    kept = here[: max(2, count - len(away))]
    return [*kept, *away][:count]
