"""TokenFleet: tells a stock Envoy when a request runs, where, and on which instance.

::

  client ─▶ Envoy ══ext_proc══▶ adapters/server ─▶ session ─▶ adapters/waiting_room ─▶ dispatcher ─┬▶ slomax      WHEN
              │ ▲                                   (state table)                        │  ▲  ▲    ├▶ fleetmind   WHERE
              │ └── routing headers + metadata ◀────────────────────────────────────────┘  │  │    └▶ tokenpilot  WHICH
              ├─▶ the chosen instance, in the chosen site's cluster                         │  │
              └─▶ access log (TTFT, tokens, ending) ─▶ adapters/access_log ─────────────────┘  │
  engines' /metrics ─▶ adapters/telemetry ─▶ Redis ─▶ fleet snapshot ──────────────────────────┘

Everything left of the adapters is synchronous Python without I/O: it takes events and ``now`` and returns decisions.

The words, one per concept
--------------------------
request    one call of a client, as the noun :class:`extproc.model.Request`
instance   one engine endpoint, ``host:port`` (never pod, replica, backend)
site       one data centre; one Envoy cluster
class      what a request is for SLOMax: its targets, priority and longest wait
tenant     who pays; a tenant has a tier and may be bound to jurisdictions
admit      run now, on these hosts · wait: held at the gateway · refuse: told no, with a reason
settle     the one door through which every request leaves
reading    what one scrape of one instance said · snapshot: the whole fleet at one moment, replaced whole
on-target  completed, with TTFT and mean TPOT within the class's targets
TTFT       seconds from arrival to first token · TPOT: seconds between output tokens
verdict    admit, wait or refuse, with ``why``: term → seconds
"""

__version__ = "0.1.0"
