"""One call → one :class:`Request`, or why not. It never raises, keeps no prompt text and alters nothing."""

from collections.abc import Mapping
from typing import Any

from extproc.adapters.openai import callers
from extproc.adapters.openai.calls import Call, classify_path
from extproc.adapters.openai.fields import LARGEST, Wrong, flag, integer, load, text, wrong
from extproc.adapters.openai.prompt import Measured, Prompt, Scale, root
from extproc.adapters.openai.replies import BadRequest
from extproc.adapters.openai.shapes import SHAPES
from extproc.model import Request
from extproc.policy import ModelSpec, Policy

_MOST_CHOICES = 16_384
"""Largest ``n``: vLLM's own bound, far above OpenAI's 128."""
_LONGEST_NAME = 256
_HEADERS = frozenset(
    {
        ":method",
        ":path",
        "authorization",
        "x-api-key",
        "content-encoding",
        "tokenfleet-class",
        "tokenfleet-deadline-ms",
        "tokenfleet-residency",
        "tokenfleet-debug",
    }
)


class Reader:
    """Reads calls under one policy; build a new one when the policy changes.

    *salt* goes into every block hash. Processes that share a prefix index must share it; with a secret one, nobody
    outside can make prompts whose blocks collide.
    """

    def __init__(self, policy: Policy, salt: str = "") -> None:
        block_tokens = policy.tokenpilot.block_tokens
        self._policy = policy
        self._salt = salt
        self._canonical = policy.fleet.canonical
        self._scales = {name: Scale.of(spec, block_tokens) for name, spec in policy.fleet.models.items()}
        self._scale = Scale.of(ModelSpec(), block_tokens)
        trusted = policy.gateway.trust.tenant_header
        self.headers = _HEADERS if trusted is None else _HEADERS | {trusted.lower()}
        """Every header that :meth:`read` looks at; who calls it may leave out all others."""

    def read(
        self,
        request_id: str,
        headers: Mapping[str, str],
        metadata: Mapping[str, Any],
        body: bytes | memoryview,
        now: float,
    ) -> Request | BadRequest:
        """Return the request that a call makes.

        *headers* are lower-cased and include ``:method`` and ``:path``; *metadata* is Envoy's, as nested dicts. A model
        that the fleet does not know is no mistake here: the dispatcher refuses it, or finds it loaded as an adapter.
        """
        call = classify_path(headers.get(":method", "POST"), headers.get(":path", ""))
        if call is None:
            return BadRequest(404, "this path is no inference call", None, "not_found", "openai")
        try:
            return self._read(call, request_id, headers, metadata, body, now)
        except Wrong as error:
            return BadRequest(error.status, str(error), error.param, error.code, call.api)

    def _read(
        self,
        call: Call,
        request_id: str,
        headers: Mapping[str, str],
        metadata: Mapping[str, Any],
        body: bytes | memoryview,
        now: float,
    ) -> Request:
        gateway = self._policy.gateway
        tenant = callers.tenant(self._policy, headers, metadata)
        _check_size(len(body), gateway.max_body_bytes)
        _check_encoding(headers)
        wanted_class, deadline_s = callers.wanted_class(headers), callers.deadline_s(headers)
        residency, subset = callers.residency(headers), callers.subset(metadata)
        fields = load(body)
        model = _model(fields)
        model = self._canonical.get(model, model)
        prompt = Prompt(self._scales.get(model, self._scale), gateway.max_prompt_tokens)
        prompts = SHAPES[call.path](fields, prompt) or 1
        measured = prompt.close()
        self._check_length(call, measured)
        return Request(
            id=request_id,
            model=model,
            tenant=tenant,
            tier=self._policy.tenants.of(tenant).tier,
            task=call.task,
            api=call.api,
            path=call.path,
            prompt_tokens=measured.tokens,
            output_budget=_budget(call, fields),
            choices=prompts * _choices(call, fields),
            stream=flag(fields, "stream"),
            priority=integer(fields, "priority", -LARGEST, LARGEST),
            blocks=measured.blocks(root(self._salt, model, text(fields, "cache_salt"))),
            block_tokens=self._policy.tokenpilot.block_tokens,
            body_bytes=len(body),
            wanted_class=wanted_class,
            deadline_s=deadline_s,
            residency=residency,
            subset=subset,
            debug=gateway.debug and callers.debug(headers),
            arrived=now,
        )

    def _check_length(self, call: Call, measured: Measured) -> None:
        most = self._policy.gateway.max_prompt_tokens
        if measured.tokens > most:
            raise Wrong(
                f"{call.prompt} has about {measured.tokens} tokens; at most {most} are taken",
                call.prompt,
                code="context_length_exceeded",
            )


def _check_size(size: int, most: int) -> None:
    if size > most:
        raise Wrong(f"the body has {size} bytes; at most {most} are taken", status=413, code="request_too_large")


def _check_encoding(headers: Mapping[str, str]) -> None:
    if headers.get("content-encoding", "").strip().lower() not in {"", "identity"}:
        raise Wrong("a compressed body cannot be read; send plain JSON", "content-encoding", status=415)


def _model(fields: Mapping[str, Any]) -> str:
    name = text(fields, "model")
    if name is None:
        wrong("model", "is missing")
    if not 0 < len(name) <= _LONGEST_NAME:
        wrong("model", f"must have 1 to {_LONGEST_NAME} characters")
    return name


def _budget(call: Call, fields: Mapping[str, Any]) -> int | None:
    """Return the most output tokens of a choice; an embedding has none."""
    if call.task == "embedding":
        return 0
    given = [integer(fields, name, call.least_budget) for name in call.budgets]
    return next((budget for budget in given if budget is not None), None)


def _choices(call: Call, fields: Mapping[str, Any]) -> int:
    return (integer(fields, "n", 1, _MOST_CHOICES) or 1) if call.choices else 1
