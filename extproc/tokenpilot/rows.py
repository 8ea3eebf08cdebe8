"""The snapshot as columns: one row an instance, all sites end to end.

A *slot* is an instance's lasting number: counts and index bits are kept by slot and survive snapshots, in which rows
come and go. Invariant: a slot is never given to a second instance.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np

from extproc.model import Bools, Fleet, Floats, Instance, Ints, State


class Slots:
    """Instance name → slot."""

    def __init__(self) -> None:
        self._by_name: dict[str, int] = {}
        self._by_address: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    def of(self, instance: Instance) -> int:
        """Return the instance's slot, a new one at first sight."""
        slot = self._by_name.setdefault(instance.name, len(self._by_name))
        self._by_address[instance.address] = slot
        return slot

    def known(self, name: str, address: str) -> int:
        """Return the slot of an instance that something runs on already, in the snapshot or not yet."""
        slot = self._by_name.setdefault(name, len(self._by_name))
        self._by_address.setdefault(address, slot)
        return slot

    def at(self, address: str) -> int | None:
        """Return the slot of whoever listens at *address*."""
        return self._by_address.get(address)


@dataclass(frozen=True)
class Rows:
    """Columns of equal length *n*; ``starts[s]:starts[s+1]`` are the rows of site *s*."""

    fleet: Fleet
    instances: tuple[Instance, ...]
    starts: tuple[int, ...]
    site_of: Ints
    slots: Ints
    ready: Bools
    """May take a new request as far as telemetry knows."""
    waiting: Floats
    running: Floats
    kv_tokens_used: Floats
    a_s: Floats
    c_s: Floats
    """Seconds per running request."""
    d_s: Floats
    """Seconds per KV token."""
    e_s: Floats
    """Seconds per prefill token."""
    quad_s: Floats
    front_s: Floats
    """Seconds of every TTFT outside the engine's steps."""
    front_token_s: Floats
    batch: Floats
    max_running: Floats
    serves: dict[str, Bools]
    row_of: dict[int, int]
    """Slot → row."""
    at: dict[str, Bools]
    """Site → its rows."""

    @classmethod
    def of(cls, fleet: Fleet, slots: Slots) -> Self:
        """Lay *fleet* out; instances seen for the first time get slots."""
        instances = tuple(one for site in fleet.sites for one in site.instances)
        starts = np.cumsum([0, *(len(site.instances) for site in fleet.sites)])
        fit = (State.READY, State.STARTING) if fleet.blind else (State.READY,)
        ready = [s in fit and not site.draining for site in fleet.sites for s in site.states]
        site_of = np.repeat(np.arange(len(fleet.sites)), np.diff(starts))
        lasting = [slots.of(one) for one in instances]
        usage = _joined([site.kv_usage for site in fleet.sites])
        return cls(
            fleet=fleet,
            instances=instances,
            starts=tuple(int(start) for start in starts),
            site_of=site_of,
            slots=np.array(lasting, dtype=np.int64),
            ready=np.array(ready, dtype=bool),
            waiting=_joined([site.waiting for site in fleet.sites]),
            running=_joined([site.running for site in fleet.sites]),
            kv_tokens_used=usage * np.array([one.profile.kv_tokens for one in instances], dtype=np.float64),
            a_s=np.array([one.profile.a_ms for one in instances]) / 1e3,
            c_s=np.array([one.profile.c_ms for one in instances]) / 1e3,
            d_s=np.array([one.profile.d_ms for one in instances]) / 1e6,
            e_s=np.array([one.profile.e_ms for one in instances]) / 1e6,
            quad_s=np.array([one.profile.quad_ms for one in instances]) / 1e9,
            front_s=np.array([one.profile.front_ms for one in instances]) / 1e3,
            front_token_s=np.array([one.profile.front_ms_per_1k for one in instances]) / 1e6,
            batch=np.array([one.profile.batch_tokens for one in instances], dtype=np.float64),
            max_running=np.array([one.profile.max_running for one in instances], dtype=np.float64),
            serves={
                name: _joined_flags(
                    [site.serves.get(name, np.zeros(len(site.instances), bool)) for site in fleet.sites]
                )
                for name in {name for site in fleet.sites for name in site.serves}
            },
            row_of={slot: row for row, slot in enumerate(lasting)},
            at={site.name: site_of == i for i, site in enumerate(fleet.sites)},
        )


def _joined(columns: list[Floats]) -> Floats:
    return np.concatenate(columns) if columns else np.zeros(0)


def _joined_flags(columns: list[Bools]) -> Bools:
    return np.concatenate(columns) if columns else np.zeros(0, dtype=bool)
