"""From prices to hosts: the best first, the next best behind it for Envoy's retries.

Ties are broken by chance, so that gateways with the same stale view do not herd: among rows within *near* of the best
one is drawn, the rest keep their order.
"""

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
