"""Predicted seconds of queue, prefill and decode, one value a row.

The engine step of a continuous batch, ``a + c·running + d·kv + e·prefill`` (fitted to measured rows, see
``policies/profiles``), turned round: a step full of prefill moves ``batch`` tokens, so prefill runs at
``batch / (a + c·running + d·kv + e·batch)`` tokens a second, and one output token takes one step.
"""

from dataclasses import dataclass

import numpy as np

from extproc.model import Floats
from extproc.tokenpilot.rows import Rows


@dataclass(frozen=True, slots=True)
class Load:
    """What is on each row: requests running and waiting, prefill tokens ahead, KV tokens held."""

    running: Floats
    waiting: Floats
    prefill: Floats
    kv_tokens: Floats


def prefill_rate(rows: Rows, load: Load) -> Floats:
    """Return tokens a second."""
    return rows.batch / (rows.a_s + rows.c_s * load.running + rows.d_s * load.kv_tokens + rows.e_s * rows.batch)


def prefill_s(rows: Rows, load: Load, uncached: Floats, cached: Floats) -> Floats:
    """Return seconds from the start of a request's prefill to its first token.

    As many whole steps as *uncached* tokens need (one at least, however short), their tokens, the square term of
    attention behind *cached* ones, and what passes outside the steps.
    """
    steps = np.ceil(uncached / rows.batch)
    idle = rows.a_s + rows.c_s * load.running + rows.d_s * load.kv_tokens
    attention = rows.quad_s * uncached * (cached + uncached / 2)
    return steps * idle + rows.e_s * uncached + attention + rows.front_s + rows.front_token_s * (cached + uncached)


def queue_s(load: Load, rate: Floats, rows: Rows, token_s: Floats, output: float) -> Floats:
    """Return seconds until a new request's prefill may start.

    Prefill ahead of it, and, where every place in the batch is taken, its turn among those waiting for one: places
    free at ``max_running / (output · token_s)`` a second.
    """
    short = np.maximum(load.running + load.waiting + 1 - rows.max_running, 0.0)
    turn: Floats = short * max(output, 1.0) * token_s / rows.max_running
    return load.prefill / rate + turn


def token_s(rows: Rows, load: Load) -> Floats:
    """Return seconds per output token with the new request in the batch."""
    return rows.a_s + rows.c_s * (load.running + 1) + rows.d_s * load.kv_tokens
