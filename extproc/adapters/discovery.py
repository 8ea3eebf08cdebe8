"""Which instances exist: lists in the policy, names in DNS, watched files.

A source that breaks (name not resolved, file not readable) keeps its last good list and is reported once; dead
instances in it are found by telemetry. Names are resolved as everything else on the machine resolves them (hosts file,
search domains), so instances are what ``getaddrinfo`` says; it tells no TTL, hence a fixed period.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from extproc.adapters import policy_files
from extproc.model import Instance
from extproc.policy import Instances, Policy, SiteSpec, StaticInstance

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Host and port → IP addresses. Raises :class:`OSError`, also for a time-out."""

FILE_S = 1.0
DNS_S = 5.0
_RESOLVE_S = 4.0

_log = structlog.get_logger()


class SourceBroken(Exception):  # noqa: N818 - it names the fact, as the vocabulary does
    """A source of instances gives no list now; the sentence says why."""


@dataclass(frozen=True, slots=True)
class Found:
    """What discovery knows at one moment."""

    instances: tuple[Instance, ...]
    known: frozenset[str]
    """Sites all of whose sources have answered at least once; the others' lists are not complete yet."""


def listed(policy: Policy) -> tuple[Instance, ...]:
    """Return the instances written in the policy itself, in its order."""
    return tuple(
        one
        for site in policy.fleet.sites
        for group in site.instances
        if group.static is not None
        for one in _described(policy, site, group, group.static)
    )


def clusters(policy: Policy, found: Found) -> Mapping[str, Sequence[str]]:
    """Return Envoy cluster → addresses for each site that is known."""
    return {
        site.envoy_cluster: tuple(sorted(one.address for one in found.instances if one.site == site.name))
        for site in policy.fleet.sites
        if site.name in found.known
    }


async def resolve(host: str, port: int) -> Sequence[str]:
    """Return every A and AAAA record of *host* as this machine sees it."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(_RESOLVE_S):
            rows = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(f"{host!r} is no host name") from error
    return sorted({str(row[4][0]).partition("%")[0] for row in rows})


@dataclass(slots=True)
class _Source:
    """One group of the policy and what it last said."""

    site: SiteSpec
    group: Instances
    instances: tuple[Instance, ...] | None = None
    stamp: object = None
    broken: str | None = None


@dataclass
class Discovery:
    """Watches every source; hands over the whole when anything changed, and once at start."""

    policy: Policy
    folder: Path
    """The policy folder, which relative file names start from."""
    resolve: Resolve = resolve
    file_s: float = FILE_S
    dns_s: float = DNS_S
    _sources: list[_Source] = field(init=False)
    _told: Found | None = field(init=False, default=None)
    _twice: set[str] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        """Lay out the sources."""
        self._sources = [_Source(site, group) for site in self.policy.fleet.sites for group in site.instances]

    async def run(self, on_found: Callable[[Found], None]) -> None:
        """Watch until cancelled, telling *on_found*; returns at once where nothing can change."""
        await asyncio.gather(*(self._look(source) for source in self._sources))
        self._tell(on_found)
        moving = [source for source in self._sources if source.group.static is None]
        await asyncio.gather(*(self._watch(source, on_found) for source in moving))

    async def _watch(self, source: _Source, on_found: Callable[[Found], None]) -> None:
        while True:
            await asyncio.sleep(self.file_s if source.group.file is not None else self.dns_s)
            await self._look(source)
            self._tell(on_found)

    async def _look(self, source: _Source) -> None:
        where = source.group.file or source.group.dns or "static"
        try:
            entries = await self._entries(source)
            if entries is not None:
                source.instances = tuple(_described(self.policy, source.site, source.group, entries))
            broken = None
        except SourceBroken as error:
            broken = str(error)
        if broken != source.broken:
            source.broken = broken
            if broken is None:
                _log.info("instances_source_back", site=source.site.name, source=where)
            else:
                _log.warning("instances_source_broken", site=source.site.name, source=where, error=broken)

    async def _entries(self, source: _Source) -> Sequence[StaticInstance] | None:
        """Return what the source lists; ``None`` if that has not changed."""
        group = source.group
        if group.static is not None:
            return group.static
        if group.dns is not None:
            return await self._resolved(source.site.name, group.dns)
        return self._written(source, self.folder / str(group.file))

    async def _resolved(self, site: str, name: str) -> Sequence[StaticInstance]:
        host, _, port = name.rpartition(":")
        try:
            addresses = await self.resolve(host, int(port))
        except OSError as error:
            raise SourceBroken(str(error) or type(error).__name__) from error
        if not addresses:
            raise SourceBroken(f"{host} has no address")
        return [
            StaticInstance(name=f"{site}-{ip}-{port}", address=f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}")
            for ip in addresses
        ]

    def _written(self, source: _Source, path: Path) -> Sequence[StaticInstance] | None:
        try:
            stat = path.stat()
            stamp = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
            if stamp == source.stamp:
                if source.broken is not None:
                    raise SourceBroken(source.broken)
                return None
            source.stamp = stamp
            entries = policy_files.instances(path)
        except OSError as error:
            source.stamp = None
            raise SourceBroken(str(error)) from error
        except policy_files.PolicyError as error:
            raise SourceBroken(str(error)) from error
        self._check(entries)
        return entries

    def _check(self, entries: Sequence[StaticInstance]) -> None:
        for one in entries:
            if one.profile is not None and one.profile not in self.policy.profiles:
                raise SourceBroken(f"instance {one.name!r} names unknown profile {one.profile!r}")
            if unknown := set(one.models) - self.policy.fleet.models.keys():
                raise SourceBroken(f"instance {one.name!r} serves {', '.join(sorted(unknown))}, not listed in models")

    def _tell(self, on_found: Callable[[Found], None]) -> None:
        unknown = {source.site.name for source in self._sources if source.instances is None}
        known = frozenset(site.name for site in self.policy.fleet.sites) - unknown
        found = Found(self._merged(), known)
        if found != self._told:
            self._told = found
            on_found(found)

    def _merged(self) -> tuple[Instance, ...]:
        """Return all instances; of two with one name or address the first stands, and the clash is reported once."""
        kept: list[Instance] = []
        taken: set[str] = set()
        for one in (one for source in self._sources for one in source.instances or ()):
            if clash := {one.name, one.address} & taken:
                if not clash <= self._twice:
                    self._twice |= clash
                    _log.warning("instance_listed_twice", instance=one.name, clash=sorted(clash))
                continue
            taken |= {one.name, one.address}
            kept.append(one)
        return tuple(kept)


def _described(
    policy: Policy, site: SiteSpec, group: Instances, entries: Sequence[StaticInstance]
) -> Sequence[Instance]:
    profiles = {name: policy.profiles[name].profile(name) for name in {one.profile or group.profile for one in entries}}
    return [
        Instance(
            name=one.name,
            site=site.name,
            address=one.address,
            models=one.models or group.models,
            profile=profiles[one.profile or group.profile],
            dialect=group.dialect,
            draining=one.draining,
        )
        for one in entries
    ]
