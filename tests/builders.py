"""Builders: every field has a default but the one under test."""

from typing import Any

from extproc.model import Instance, Profile, Reading, Request, State
from extproc.policy import Policy

CHAT = "chat-model"


def a_profile(**fields: Any) -> Profile:
    base: dict[str, Any] = {"name": "default", "a_ms": 10.0, "c_ms": 0.1, "d_ms": 0.02, "e_ms": 40.0}
    return Profile(**base | fields)


def an_instance(name: str = "a-0", site: str = "a", **fields: Any) -> Instance:
    port = 9000 + sum(name.encode())
    base: dict[str, Any] = {"address": f"127.0.0.1:{port}", "models": (CHAT,), "profile": a_profile()}
    return Instance(name=name, site=site, **base | fields)


def a_reading(instance: Instance | None = None, **fields: Any) -> Reading:
    base: dict[str, Any] = {"state": State.READY, "at": 0.0, "waiting": 0.0, "running": 0.0, "kv_usage": 0.0}
    return Reading(instance=instance or an_instance(), **base | fields)


def a_request(**fields: Any) -> Request:
    base: dict[str, Any] = {"id": "r1", "model": CHAT, "tenant": "default", "prompt_tokens": 1000}
    return Request(**base | fields)


def a_policy(**files: Any) -> Policy:
    """Two sites, ``a`` (home) and ``b``, of two instances each; *files* replaces whole files or merges mappings."""

    def site(name: str, first: int) -> dict[str, Any]:
        listed = [{"name": f"{name}-{i}", "address": f"127.0.0.1:{first + i}"} for i in range(2)]
        return {
            "name": name,
            "jurisdictions": ["eu" if name == "a" else "us"],
            "instances": [{"models": [CHAT], "static": listed}],
        }

    base: dict[str, Any] = {
        "gateway": {},
        "fleet": {"home": "a", "models": {CHAT: {}}, "sites": [site("a", 9100), site("b", 9200)]},
        "tenants": {},
        "slomax": {"classes": [{"name": "standard", "ttft_ms": 1000, "tpot_ms": 50}]},
        "fleetmind": {},
        "tokenpilot": {},
        "profiles": {"default": {"source": "test", "a_ms": 10.0, "c_ms": 0.1, "d_ms": 0.02, "e_ms": 40.0}},
    }
    return Policy.model_validate({name: value | files.get(name, {}) for name, value in base.items()})
