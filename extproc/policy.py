"""What operators write: one pydantic model per file of the policy folder.

Keys carry their units (``ttft_ms``); properties hand the core seconds and tokens. Unknown keys are errors. Each field's
description is its documentation: ``policies/README.md`` is checked against it. Rules between keys report every
:class:`Fault` they find, not the first.
"""

from collections.abc import Collection, Iterable, Iterator
from functools import cached_property
from ipaddress import ip_address
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, model_validator

from extproc.model import Profile, Task

NAME = r"^[A-Za-z0-9][A-Za-z0-9._:/@-]*$"
LABEL = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
JURISDICTION = r"^[a-z0-9][a-z0-9-]*$"
HEADER = r"^[A-Za-z0-9!#$%&'*+.^_`|~-]+$"
SHA256 = r"^[0-9a-f]{64}$"
DNS = r"^[A-Za-z0-9._-]+:[0-9]{1,5}$"

EXT_PROC_CLUSTER = "tokenfleet-ext-proc"
"""Envoy's cluster of our own servers; no site may take the name."""

Name = Annotated[str, Field(min_length=1, max_length=200, pattern=NAME)]
Label = Annotated[str, Field(min_length=1, max_length=100, pattern=LABEL)]
"""A name that also names a file or an Envoy cluster: no slash, no colon."""
Jurisdiction = Annotated[str, Field(pattern=JURISDICTION)]
Percent = Annotated[float, Field(ge=0, le=100)]
Ms = Annotated[float, Field(gt=0, le=86_400_000)]


class Section(BaseModel):
    """A part of a policy: frozen, and a typo in it is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Fault(NamedTuple):
    """One broken rule between keys: where, from the section that holds the rule, and what, as a sentence."""

    path: tuple[str | int, ...]
    sentence: str


class Faults(ValueError):  # noqa: N818 - the vocabulary's word for several of them
    """Every broken rule that one section found."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults = tuple(faults)
        super().__init__("; ".join(fault.sentence for fault in self.faults))


def _hold(faults: Iterable[Fault]) -> None:
    if found := tuple(faults):
        raise Faults(found)


def _again(places: Iterable[tuple[str, tuple[str | int, ...]]], sentence: str) -> Iterator[Fault]:
    """Yield a fault at every place whose value stood at an earlier one; *sentence* has a ``{}`` for the value."""
    seen: set[str] = set()
    for value, path in places:
        if value in seen:
            yield Fault(path, sentence.format(value))
        seen.add(value)


def _listed(values: Iterable[str]) -> str:
    return ", ".join(sorted(values)) or "none"


def _address(value: str) -> str:
    host, _, port = value.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    try:
        fits = ip_address(host[1:-1] if bracketed else host).version == (6 if bracketed else 4)
    except ValueError:
        fits = False
    if not fits:
        raise ValueError("must be `ip:port`, an IPv6 address in brackets; for a host name use `dns`")
    return _with_port(value, port)


def _dns(value: str) -> str:
    return _with_port(value, value.rpartition(":")[2])


def _with_port(value: str, port: str) -> str:
    if not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65_535):
        raise ValueError("the port must be a number from 1 to 65535")
    return value


def _not_ours(value: str) -> str:
    if value.startswith(("x-tokenfleet-", "x-gateway-destination-")):
        raise ValueError("Envoy removes headers of this prefix before they are read; choose another name")
    return value


# --- gateway.yaml -----------------------------------------------------------------------------------------------------


class Jwt(Section):
    """Where Envoy's JWT filter leaves a verified claim."""

    namespace: str = Field("envoy.filters.http.jwt_authn", description="Metadata namespace the JWT filter writes to.")
    path: tuple[str, ...] = Field(
        ("payload", "tenant"), min_length=1, description="Keys from the namespace down to the tenant's name."
    )


class Trust(Section):
    """Which sources may name the tenant; the first that answers wins, every other one is ignored."""

    jwt: Jwt | None = Field(None, description="Take the tenant from a claim that Envoy has verified.")
    tenant_header: (
        Annotated[str, StringConstraints(to_lower=True, pattern=HEADER), AfterValidator(_not_ours)] | None
    ) = Field(None, description="Take the tenant from this request header. Only behind something that sets it itself.")
    api_keys: bool = Field(
        True, description="Take the tenant from the API key (`authorization: Bearer` or `x-api-key`) by its SHA-256."
    )


class Gateway(Section):
    """``gateway.yaml``: what this gateway does with requests before and after the decision."""

    steer_percent: Percent = Field(
        100.0,
        description=(
            "Share of requests that are steered; the rest is decided, logged and counted, and goes home unrouted: "
            "never held, refused or counted on an instance, and not checked for permission or residency."
        ),
    )
    other_paths: Literal["pass", "refuse"] = Field(
        "pass",
        description=(
            "Requests that are no inference call: `pass` lets GET, HEAD and OPTIONS through to the home site, "
            "unchecked, and answers 404 to every other method; `refuse` answers 404 to all."
        ),
    )
    max_body_bytes: int = Field(
        16_777_216,
        ge=1024,
        le=1_073_741_824,
        description=(
            "Largest body that is read; a larger one gets 413. "
            "Raising it costs memory: each held request keeps its body."
        ),
    )
    max_prompt_tokens: int = Field(
        10_000_000, ge=1, description="Largest estimated prompt; a larger one is refused with 400."
    )
    debug: bool = Field(False, description="Answer `tokenfleet-debug` with the verdict's terms in `x-tokenfleet-why`.")
    cross_site_retries: bool = Field(
        False,
        description=(
            "True: retries may go to the next lawful site, whose best instance takes a place in the host list behind "
            "the first two. Needs `envoy-config --style priority-group`."
        ),
    )
    alter_body: Literal["never", "priority"] = Field(
        "never", description="`priority` writes the class's engine priority into the body; `never` leaves it alone."
    )
    trust: Trust = Field(Trust(), description="Which sources may name the tenant.")


# --- fleet.yaml -------------------------------------------------------------------------------------------------------


class ModelSpec(Section):
    """One model that clients may name."""

    aliases: tuple[Name, ...] = Field((), description="Other names that clients use for it.")
    bytes_per_token: float = Field(
        4.0,
        gt=0.5,
        le=16,
        description=(
            "Prompt bytes per token, to estimate length before the engine tells it; "
            "raising it makes prompts look shorter."
        ),
    )
    image_tokens: int = Field(
        800,
        ge=0,
        le=1_000_000,
        description="Prompt tokens that one image counts; raising it makes requests with images look longer.",
    )
    audio_tokens: int = Field(
        500,
        ge=0,
        le=1_000_000,
        description="Prompt tokens that one audio part counts; raising it makes requests with audio look longer.",
    )
    expected_output_tokens: int = Field(
        256,
        ge=1,
        le=1_000_000,
        description="Answer length assumed where the caller sets no budget; raising it gives decode more weight.",
    )


class StaticInstance(Section):
    """One instance, written down."""

    name: Name = Field(description="Unique name in logs and metrics.")
    address: Annotated[str, AfterValidator(_address)] = Field(description="`ip:port`, IPv6 in brackets.")
    models: tuple[Name, ...] = Field((), description="Models it serves; empty takes the group's.")
    profile: Label | None = Field(None, description="Engine profile; none takes the group's.")
    draining: bool = Field(False, description="True: finish what runs, take nothing new.")


class Instances(Section):
    """Where a group of alike instances is found; exactly one of `static`, `dns`, `file`."""

    models: tuple[Name, ...] = Field(min_length=1, description="Models that these instances serve.")
    profile: Label = Field("default", description="Engine profile: a file of `profiles/` by name.")
    dialect: Literal["auto", "vllm", "sglang", "llamacpp", "trtllm", "tgi"] = Field(
        "auto", description="Metric names to expect; `auto` recognises them."
    )
    static: tuple[StaticInstance, ...] | None = Field(None, description="A list written here.")
    dns: Annotated[str, Field(pattern=DNS), AfterValidator(_dns)] | None = Field(
        None, description="`name:port`; every A and AAAA record is an instance."
    )
    file: str | None = Field(
        None, description="A watched YAML file holding a list like `static`; relative to the policy folder."
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [name for name in ("static", "dns", "file") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of static, dns, file; found {', '.join(given) or 'none'}")
        return self

    @property
    def profiles(self) -> Iterator[tuple[str, tuple[str | int, ...]]]:
        """Each profile named here, and where in this group."""
        yield self.profile, ("profile",)
        for i, one in enumerate(self.static or ()):
            if one.profile is not None:
                yield one.profile, ("static", i, "profile")


class SiteSpec(Section):
    """One data centre."""

    name: Label = Field(description="Unique name.")
    cluster: Label | None = Field(None, description="Envoy cluster; none takes `site-NAME`.")
    jurisdictions: frozenset[Jurisdiction] = Field(
        frozenset(), description="Where data sent here lies, e.g. `eu`, `de`."
    )
    rtt_ms: float = Field(
        0.0, ge=0, le=10_000, description="Round trip from this gateway; raising it keeps traffic away."
    )
    draining: bool = Field(False, description="True: no new request goes there.")
    instances: tuple[Instances, ...] = Field(min_length=1, description="Groups of instances.")

    @property
    def envoy_cluster(self) -> str:
        """Name of the site's Envoy cluster."""
        return self.cluster or f"site-{self.name}"


class Telemetry(Section):
    """How instances are watched."""

    scrape_ms: Ms = Field(
        250.0, description="Time between two scrapes of one instance; raising it spares engines and ages what is known."
    )
    timeout_ms: Ms = Field(
        2000.0, description="Longest scrape; a busy vLLM takes 0.3 s. Raising it notices hanging engines later."
    )
    lost_after_ms: Ms = Field(
        3000.0,
        description=(
            "A reading older than this makes its instance lost; "
            "when all are, the fleet is blind. Raising it trusts silent instances longer."
        ),
    )
    expire_ms: Ms = Field(
        60_000.0, description="Life of a reading in the store; raising it remembers vanished instances longer."
    )
    refresh_ms: Ms = Field(
        100.0,
        description="Time between two looks of a server at the store; raising it spares Redis and ages what is known.",
    )


class FleetPolicy(Section):
    """``fleet.yaml``: models, sites, instances."""

    home: Name = Field(description="Site of this gateway.")
    models: dict[Name, ModelSpec] = Field(min_length=1, description="Models that clients may name.")
    sites: tuple[SiteSpec, ...] = Field(min_length=1, description="Data centres.")
    telemetry: Telemetry = Field(Telemetry(), description="How instances are watched.")

    @model_validator(mode="after")
    def _names_fit(self) -> Self:
        _hold([*self._site_faults(), *self._model_faults(), *self._instance_faults()])
        return self

    def _site_faults(self) -> Iterator[Fault]:
        sites = list(enumerate(self.sites))
        yield from _again(((site.name, ("sites", i, "name")) for i, site in sites), "site {} is named twice")
        alone = sorted({site.name: (i, site) for i, site in reversed(sites)}.values(), key=lambda one: one[0])
        clusters = ((site.envoy_cluster, ("sites", i, "cluster" if site.cluster else "name")) for i, site in alone)
        yield from _again(clusters, "two sites use the Envoy cluster {}")
        for i, site in sites:
            if site.envoy_cluster == EXT_PROC_CLUSTER:
                yield Fault(("sites", i, "cluster"), f"{EXT_PROC_CLUSTER} is the cluster of our own servers")
        if self.home not in (names := [site.name for site in self.sites]):
            yield Fault(("home",), f"home {self.home} is none of the sites: {_listed(names)}")

    def _model_faults(self) -> Iterator[Fault]:
        spelled: list[tuple[str, tuple[str | int, ...]]] = [(own, ("models", own)) for own in self.models]
        for own, spec in self.models.items():
            spelled += [(alias, ("models", own, "aliases", i)) for i, alias in enumerate(spec.aliases)]
        yield from _again(spelled, "{} already names a model; a name or alias may stand once")
        for at, group in self.groups:
            served = [(model, (*at, "models", i)) for i, model in enumerate(group.models)]
            for i, one in enumerate(group.static or ()):
                served += [(model, (*at, "static", i, "models", j)) for j, model in enumerate(one.models)]
            for model, path in served:
                if model not in self.models:
                    yield Fault(path, f"model {model} is not listed in models: {_listed(self.models)}")

    def _instance_faults(self) -> Iterator[Fault]:
        listed = [((*at, "static", i), one) for at, group in self.groups for i, one in enumerate(group.static or ())]
        yield from _again(((one.name, (*at, "name")) for at, one in listed), "instance name {} is listed twice")
        yield from _again(((one.address, (*at, "address")) for at, one in listed), "address {} is listed twice")

    @property
    def groups(self) -> Iterator[tuple[tuple[str | int, ...], Instances]]:
        """Each group of instances, and where it stands in this file."""
        for i, site in enumerate(self.sites):
            for j, group in enumerate(site.instances):
                yield ("sites", i, "instances", j), group

    @cached_property
    def canonical(self) -> dict[str, str]:
        """Every name a client may use → the model's own name."""
        return {name: own for own, spec in self.models.items() for name in (own, *spec.aliases)}


# --- tenants.yaml -----------------------------------------------------------------------------------------------------


class Tenant(Section):
    """What one tenant may do."""

    tier: Name = Field("standard", description="Service level; classes and fairness look at it.")
    api_key_sha256: tuple[Annotated[str, Field(pattern=SHA256)], ...] = Field(
        (), description="SHA-256 (hex) of each API key; keys themselves are never written down."
    )
    jurisdictions: frozenset[Jurisdiction] | None = Field(
        None, description="Data may lie only in these; none means anywhere."
    )
    sites: frozenset[str] | None = Field(None, description="Only these sites; none means all.")
    denied_sites: frozenset[str] = Field(frozenset(), description="Never these sites.")
    models: frozenset[str] | None = Field(None, description="Only these models; none means all.")


class Tenants(Section):
    """``tenants.yaml``: who may do what."""

    unknown: Literal["default", "refuse"] = Field(
        "default", description="A request without a known tenant: treat it as `default`, or refuse it with 401."
    )
    default: Tenant = Field(Tenant(), description="Rules for requests without a known tenant.")
    tenants: dict[Name, Tenant] = Field({}, description="Rules by tenant.")

    @model_validator(mode="after")
    def _keys_are_unique(self) -> Self:
        held = (
            (key, ("tenants", name, "api_key_sha256"))
            for name, tenant in self.tenants.items()
            for key in sorted(set(tenant.api_key_sha256))
        )
        # The sentence has no place for the hash: messages are read by more people than the file.
        _hold(_again(held, "an API key of this tenant is another tenant's too"))
        return self

    @property
    def places(self) -> Iterator[tuple[tuple[str, ...], Tenant]]:
        """Each set of rules, and where it stands in this file."""
        yield ("default",), self.default
        for name, tenant in self.tenants.items():
            yield ("tenants", name), tenant

    def of(self, name: str) -> Tenant:
        """Return the rules of *name*, or the default ones."""
        return self.tenants.get(name, self.default)

    @cached_property
    def by_key(self) -> dict[str, str]:
        """SHA-256 of an API key → tenant."""
        return {key: name for name, tenant in self.tenants.items() for key in tenant.api_key_sha256}


# --- slomax.yaml ------------------------------------------------------------------------------------------------------


class When(Section):
    """A rule's conditions; all that are given must hold."""

    tasks: frozenset[Task] | None = Field(None, description="Only these tasks.")
    tiers: frozenset[str] | None = Field(None, description="Only tenants of these tiers.")
    models: frozenset[str] | None = Field(None, description="Only these models.")
    min_prompt_tokens: int | None = Field(None, ge=0, description="Prompt estimated at least this long.")
    max_prompt_tokens: int | None = Field(None, ge=0, description="Prompt estimated at most this long.")
    min_output_budget: int | None = Field(None, ge=0, description="Output budget at least this large.")
    max_output_budget: int | None = Field(None, ge=0, description="Output budget set and at most this large.")
    stream: bool | None = Field(None, description="Only streaming (true) or only whole (false) answers.")


class ClassSpec(Section):
    """One service class."""

    name: Name = Field(description="Unique name; a caller may ask for a lower one by `tokenfleet-class`.")
    when: When = Field(When(), description="Which requests; the first class whose conditions hold wins.")
    priority: int = Field(0, ge=-100, le=100, description="Higher runs first.")
    ttft_ms: Ms | None = Field(None, description="Target: time to first token; none means any is on target.")
    tpot_ms: Ms | None = Field(None, description="Target: mean time per output token; none means any is on target.")
    longest_wait_ms: Ms = Field(
        30_000.0,
        description="Held at most this long, then refused with 429; raising it refuses less and answers later.",
    )
    max_waiting: int = Field(
        10_000,
        ge=0,
        description="Held at most so many; one more is refused with 429. Raising it costs memory in a surge.",
    )
    engine_priority: int = Field(
        0, description="Priority for the engine (vLLM: lower runs first); written only if the gateway may alter bodies."
    )

    @property
    def ttft_s(self) -> float | None:
        """Target in seconds."""
        return None if self.ttft_ms is None else self.ttft_ms / 1000

    @property
    def tpot_s(self) -> float | None:
        """Target in seconds."""
        return None if self.tpot_ms is None else self.tpot_ms / 1000


class SloMaxPolicy(Section):
    """``slomax.yaml``: classes and admission."""

    classes: tuple[ClassSpec, ...] = Field(
        (ClassSpec(name="standard", ttft_ms=2000, tpot_ms=100),),
        min_length=1,
        description="In the order in which rules are tried; the last one takes everything left.",
    )
    max_in_flight: int = Field(
        256,
        ge=1,
        le=100_000,
        description=(
            "Requests in flight on one instance before new ones are held at the gateway; "
            "raising it moves the line into the engines."
        ),
    )
    look_ahead: int = Field(
        32,
        ge=1,
        le=1024,
        description=(
            "Waiting requests that are looked at on a change, of each class and of those that may run in the same "
            "places; raising it finds better pairs and costs time."
        ),
    )

    @model_validator(mode="after")
    def _names_fit(self) -> Self:
        named = ((one.name, ("classes", i, "name")) for i, one in enumerate(self.classes))
        _hold([*_again(named, "class {} is named twice"), *self._open_end()])
        return self

    def _open_end(self) -> Iterator[Fault]:
        if self.classes[-1].when != When():
            path = ("classes", len(self.classes) - 1, "when")
            yield Fault(path, "the last class must have no conditions, so that every request has a class")

    @cached_property
    def by_name(self) -> dict[str, ClassSpec]:
        """Class by name."""
        return {one.name: one for one in self.classes}


# --- fleetmind.yaml ---------------------------------------------------------------------------------------------------


class FleetMindPolicy(Section):
    """``fleetmind.yaml``: when a request may leave home."""

    margin_ms: float = Field(
        50.0, ge=0, le=600_000, description="Another site must be better by this much; raising it keeps traffic home."
    )
    network_weight: float = Field(
        1.0, ge=0, le=1000, description="Price of a second of network; raising it keeps traffic near."
    )


# --- tokenpilot.yaml --------------------------------------------------------------------------------------------------


class Weights(Section):
    """Price of each predicted second."""

    queue: float = Field(1.0, ge=0, le=1000, description="Waiting behind others; raising it spreads load.")
    prefill: float = Field(1.0, ge=0, le=1000, description="Uncached prefill; raising it follows cached prefixes.")
    decode: float = Field(
        1.0, ge=0, le=1000, description="Output tokens at the instance's pace; raising it avoids crowded instances."
    )


class TokenPilotPolicy(Section):
    """``tokenpilot.yaml``: how instances are compared."""

    weights: Weights = Field(Weights(), description="Price of each predicted second.")
    block_tokens: int = Field(
        64, ge=8, le=1024, description="Tokens of one prefix block; smaller finds shorter matches and costs memory."
    )
    index_ttl_s: float = Field(
        600.0,
        gt=0,
        le=86_400,
        description=(
            "A prefix not used for this long is no longer believed cached; raising it believes engines remember longer."
        ),
    )
    hosts: int = Field(3, ge=1, le=16, description="Hosts handed to Envoy, best first; two or more allow a retry.")
    near_equal: float = Field(
        0.02,
        ge=0,
        le=1,
        description="Instances within this share of the best are picked among at random; raising it spreads load.",
    )
    fail_after: int = Field(
        2, ge=1, le=100, description="Failures in a row that rest an instance; raising it is more patient."
    )
    rest_ms: Ms = Field(
        5000.0, description="Rest of a failing instance before it is tried again; raising it tries less often."
    )


# --- profiles/*.yaml --------------------------------------------------------------------------------------------------


class ProfileSpec(Section):
    """``profiles/NAME.yaml``: measured timing of one hardware, model and engine."""

    source: str = Field(description="Where the numbers come from.")
    a_ms: float = Field(ge=0, description="Fixed time of one engine step.")
    c_ms: float = Field(ge=0, description="Added per running request.")
    d_ms: float = Field(ge=0, description="Added per 1,000 KV tokens of the running requests.")
    e_ms: float = Field(gt=0, description="Added per 1,000 prompt tokens computed in the step.")
    quad_ms: float = Field(0.0, ge=0, description="Attention over long prompts: ms per 10⁶ token pairs.")
    kv_tokens: int = Field(500_000, ge=1024, description="Tokens that the KV cache holds.")
    block_tokens: int = Field(16, ge=1, le=1024, description="Tokens of one engine KV block.")
    batch_tokens: int = Field(8192, ge=64, description="Token budget of one engine step.")
    max_running: int = Field(256, ge=1, description="Requests that run at once.")
    front_ms: float = Field(0.0, ge=0, description="Added to every TTFT outside the engine's steps.")
    front_ms_per_1k: float = Field(0.0, ge=0, description="The same for each 1,000 prompt tokens, cached or not.")

    def profile(self, name: str) -> Profile:
        """Return the noun the core works with."""
        return Profile(name=name, **self.model_dump(exclude={"source"}))


# --- all of it --------------------------------------------------------------------------------------------------------


class Policy(Section):
    """The whole folder, checked as one; never half loaded."""

    gateway: Gateway
    fleet: FleetPolicy
    tenants: Tenants
    slomax: SloMaxPolicy
    fleetmind: FleetMindPolicy
    tokenpilot: TokenPilotPolicy
    profiles: dict[Label, ProfileSpec]

    @model_validator(mode="after")
    def _references_hold(self) -> Self:
        _hold(crossing(self.fleet, self.tenants, self.profiles))
        return self


def crossing(
    fleet: FleetPolicy, tenants: Tenants | None = None, profiles: Collection[str] | None = None
) -> Iterator[Fault]:
    """Yield what one file names and another lacks; a path starts with the file's key in :class:`Policy`.

    Files that could not be read are ``None``, and what they would say stays unsaid.
    """
    if profiles is not None:
        for at, group in fleet.groups:
            for name, path in group.profiles:
                if name not in profiles:
                    has = f"profiles/ has {_listed(profiles)}"
                    yield Fault(("fleet", *at, *path), f"there is no profile {name}; {has}")
    for at, tenant in () if tenants is None else tenants.places:
        yield from _tenant_faults(("tenants", *at), tenant, fleet)


def _tenant_faults(at: tuple[str | int, ...], tenant: Tenant, fleet: FleetPolicy) -> Iterator[Fault]:
    sites = {site.name for site in fleet.sites}
    for key in ("sites", "denied_sites"):
        for name in sorted((getattr(tenant, key) or frozenset()) - sites):
            yield Fault((*at, key, name), f"there is no site {name}; fleet.yaml has {_listed(sites)}")
    for name in sorted((tenant.models or frozenset()) - fleet.models.keys()):
        own = fleet.canonical.get(name)
        hint = f"write {own}, the model's own name" if own else f"fleet.yaml has {_listed(fleet.models)}"
        yield Fault((*at, "models", name), f"{name} is {'an alias' if own else 'no model'}; {hint}")
