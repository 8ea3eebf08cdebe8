"""From prices to hosts: the best first, the next best behind it for Envoy's retries.

Ties are broken by chance, so that gateways with the same stale view do not herd: among rows within *near* of the best
one is drawn, the rest keep their order. Lists, not arrays: on a few rows numpy costs more than it computes.
"""

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from extproc.model import Bools, Floats


def pick(total: Floats, open_rows: Bools, near: float, rng: np.random.Generator, count: int) -> list[int]:
    """Return at most *count* of the *open_rows*, best first; empty when none is open."""
    prices = total.tolist()
    ranked = sorted(_rows(open_rows), key=prices.__getitem__)
    if not ranked:
        return []
    best = prices[ranked[0]]
    bound = best + near * abs(best) + 1e-9
    equals = bisect_right(ranked, bound, key=prices.__getitem__)
    if equals > 1:
        ranked.insert(0, ranked.pop(int(rng.random() * equals)))
    return ranked[:count]


def spares(total: Floats, fit: Bools, ranked: Sequence[int], count: int) -> list[int]:
    """Return rows of *fit* that fill *ranked* up to *count*, best first: they may still catch a retry."""
    missing = count - len(ranked)
    if missing <= 0:
        return []
    left = [row for row in _rows(fit) if row not in ranked]
    return sorted(left, key=lambda row: float(total[row]))[:missing]


def _rows(flags: Bools) -> list[int]:
    rows: list[int] = flags.nonzero()[0].tolist()
    return rows


def best(total: Floats, open_rows: Bools) -> int:
    """Return the cheapest of the *open_rows*, of which there is one at least."""
    return int(np.argmin(np.where(open_rows, total, np.inf)))


def mixed(here: Sequence[int], away: Sequence[int], count: int) -> list[int]:
    """Return at most *count* rows for retries that may change the site.

    The chosen site keeps the first two places where it has two, the other sites' best follow in their order.
    """
    kept = here[: max(2, count - len(away))]
    return [*kept, *away][:count]
