"""Price every instance for one request.

Each term is a predicted cost in seconds, each weight a plain ratio; lower is better everywhere. When the fleet is blind
nothing but our own counts is known, and the price is that of waiting behind our own requests: least-request.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from extproc.model import Floats
from extproc.policy import Weights
from extproc.tokenpilot import latency
from extproc.tokenpilot.ledger import Ledger
from extproc.tokenpilot.rows import Rows
from extproc.tokenpilot.workload import Work


@dataclass(frozen=True, slots=True)
class Scores:
    """One value a row in each term, in weighted seconds."""

    terms: Mapping[str, Floats]
    total: Floats
    uncached: Floats
    """Prompt tokens that the row would have to compute."""

    def why(self, row: int) -> dict[str, float]:
        """Return term → seconds for one row."""
        return {name: float(column[row]) for name, column in self.terms.items()}


def load_of(rows: Rows, ledger: Ledger, strangers: tuple[Floats, Floats], typical_prompt: float) -> latency.Load:
    """Return the load of every row: our own counts now, and the strangers' of the last snapshot.

    A stranger's waiting request is taken to be *typical_prompt* tokens long, since nobody tells its length.
    """
    running, waiting = strangers
    own = ledger.requests[rows.slots]
    return latency.Load(
        running=running + own,
        waiting=waiting,
        prefill=ledger.prefill[rows.slots] + waiting * typical_prompt,
        kv_tokens=np.maximum(rows.kv_tokens_used, ledger.tokens[rows.slots]),
    )


def score(rows: Rows, load: latency.Load, work: Work, cached: Floats, weights: Weights) -> Scores:
    """Return the price of each row; *cached* is in tokens and never more than the prompt less one."""
    cached = np.minimum(cached, work.prompt - 1.0)
    uncached = work.prompt - cached
    pace = latency.token_s(rows, load)
    rate = latency.prefill_rate(rows, load)
    terms = {
        "queue": weights.queue * latency.queue_s(load, rate, rows, pace, work.output),
        "prefill": weights.prefill * latency.prefill_s(rows, load, uncached, cached),
        "decode": weights.decode * (work.output * pace),
    }
    return Scores(terms, sum(terms.values(), np.zeros(len(uncached))), uncached)


def score_blind(rows: Rows, ledger: Ledger, work: Work) -> Scores:
    """Return a price that grows with our own requests in flight alone."""
    own = ledger.requests[rows.slots]
    service = rows.e_s * work.prompt + rows.a_s * (work.output + 1)
    terms = {"queue": own * service}
    return Scores(terms, terms["queue"], np.full(len(own), float(work.prompt)))
