"""Who calls, and what the headers ask for. Only sources that ``gateway.trust`` names are believed."""

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from extproc.adapters.openai.fields import Wrong, wrong
from extproc.policy import Jwt, Policy

UNKNOWN = "default"
"""Name under which requests without a known tenant are counted."""
_SUBSET_NAMESPACE = "envoy.lb.subset_hint"
_SUBSET_KEY = "x-gateway-destination-endpoint-subset"
_DAY_MS = 86_400_000
_DECIMAL = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,199}")
_JURISDICTION = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
_MOST_JURISDICTIONS = 32


def tenant(policy: Policy, headers: Mapping[str, str], metadata: Mapping[str, Any]) -> str:
    """Return the tenant's name, :data:`UNKNOWN` where none is known; 401 where the policy refuses such requests."""
    name = _named(policy, headers, metadata)
    if name is not None and name in policy.tenants.tenants:
        return name
    if policy.tenants.unknown == "refuse":
        raise Wrong("no known tenant: send a valid API key or token", status=401, code="invalid_api_key")
    return UNKNOWN


def _named(policy: Policy, headers: Mapping[str, str], metadata: Mapping[str, Any]) -> str | None:
    """Return what the first trusted source that answers says."""
    trust = policy.gateway.trust
    if trust.jwt is not None and (name := _claim(trust.jwt, metadata)):
        return name
    if trust.tenant_header is not None and (name := headers.get(trust.tenant_header.lower(), "").strip()):
        return name
    if trust.api_keys:
        return _of_key(policy.tenants.by_key, headers)
    return None


def _claim(jwt: Jwt, metadata: Mapping[str, Any]) -> str | None:
    value: Any = metadata.get(jwt.namespace)
    for key in jwt.path:
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value if isinstance(value, str) else None


def _of_key(by_key: Mapping[str, str], headers: Mapping[str, str]) -> str | None:
    """Return the owner of the bearer token or of ``x-api-key``; a key lives no longer than this call."""
    if not by_key:
        return None
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    for key in (bearer.strip() if scheme.lower() == "bearer" else "", headers.get("x-api-key", "").strip()):
        if key:
            owner = by_key.get(hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest())
            if owner is not None:
                return owner
    return None


def wanted_class(headers: Mapping[str, str]) -> str | None:
    """Return the class that the caller asks for."""
    value = headers.get("tokenfleet-class")
    if value is None:
        return None
    if not _WORD.fullmatch(value := value.strip()):
        wrong("tokenfleet-class", "must be the name of a class")
    return value


def deadline_s(headers: Mapping[str, str]) -> float | None:
    """Return the caller's deadline in seconds from arrival."""
    value = headers.get("tokenfleet-deadline-ms")
    if value is None:
        return None
    if not _DECIMAL.fullmatch(value := value.strip()) or not 0 < float(value) <= _DAY_MS:
        wrong("tokenfleet-deadline-ms", f"must be a number above 0 and at most {_DAY_MS}")
    return float(value) / 1000


def residency(headers: Mapping[str, str]) -> frozenset[str] | None:
    """Return the jurisdictions that the caller narrows to. What cannot be read is refused, never ignored."""
    value = headers.get("tokenfleet-residency")
    if value is None:
        return None
    words = [word.strip().lower() for word in value.split(",")]
    if len(words) > _MOST_JURISDICTIONS or not all(map(_JURISDICTION.fullmatch, words)):
        wrong("tokenfleet-residency", "must be a comma-separated list of jurisdictions such as eu,de")
    return frozenset(words)


def debug(headers: Mapping[str, str]) -> bool:
    """Return whether the caller asks to be told why."""
    return headers.get("tokenfleet-debug", "").strip().lower() not in {"", "0", "false"}


def subset(metadata: Mapping[str, Any]) -> frozenset[str] | None:
    """Return the addresses that an upstream picker allows, as given; a hint that names none allows none.

    Source: Gateway API Inference Extension, proposal 004. A list or a comma-separated string.
    """
    hint = metadata.get(_SUBSET_NAMESPACE)
    if not isinstance(hint, Mapping) or _SUBSET_KEY not in hint:
        return None
    given = hint[_SUBSET_KEY]
    if isinstance(given, str):
        given = given.split(",")
    if not isinstance(given, list | tuple):
        return frozenset()
    words = (word.strip() for word in given if isinstance(word, str))
    return frozenset(word for word in words if word)
