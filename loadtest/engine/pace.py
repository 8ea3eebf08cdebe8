"""How long an engine step takes: ``a + c·running + d·kv/1000 + e·prefill/1000 + quad·n·(p + n/2)/10⁶`` milliseconds.

Seconds out, tokens in. A run of decode steps grows the KV cache by one token a request and step, so its length is a
quadratic in the number of steps and need not be added up step by step.
"""

import math
from collections.abc import Iterable

from extproc.model import Profile


def step_s(profile: Profile, running: int, kv_tokens: int, chunks: Iterable[tuple[int, int]] = ()) -> float:
    """Return the seconds of one step.

    Parameters
    ----------
    running
        Requests in the step, decoding or prefilling.
    kv_tokens
        Tokens in the KV cache of these requests before the step.
    chunks
        ``(new, before)`` tokens of each prefill chunk.
    """
    ms = profile.a_ms + profile.c_ms * running + profile.d_ms * kv_tokens / 1000
    for new, before in chunks:
        ms += profile.e_ms * new / 1000 + profile.quad_ms * new * (before + new / 2) / 1e6
    return ms / 1000


def decode_s(profile: Profile, steps: int, running: int, kv_tokens: int) -> float:
    """Return the seconds of *steps* decode steps in a row, the first with *kv_tokens* in the KV cache."""
    each = profile.a_ms + profile.c_ms * running + profile.d_ms * kv_tokens / 1000
    growth = profile.d_ms * running / 1000
    return (each * steps + growth * steps * (steps - 1) / 2) / 1000


def decode_steps(profile: Profile, seconds: float, running: int, kv_tokens: int) -> float:
    """Return how many decode steps fit into *seconds*: the inverse of :func:`decode_s`, as a real number."""
    half = profile.d_ms * running / 2000
    each = profile.a_ms + profile.c_ms * running + profile.d_ms * kv_tokens / 1000 - half
    ms = seconds * 1000
    # The root of half·n² + each·n = ms in the form that loses no digits when half is small.
    return 2 * ms / (each + math.sqrt(each * each + 4 * half * ms))
