"""Which HTTP calls are inference calls. A path is compared whole, without its query and one trailing slash."""

from dataclasses import dataclass

from extproc.model import Api, Task


@dataclass(frozen=True, slots=True)
class Call:
    """One kind of inference call and the names of the body fields that differ between them."""

    path: str
    api: Api
    task: Task
    prompt: str
    """Field that holds the prompt."""
    budgets: tuple[str, ...] = ()
    """Fields that limit the output, the one that counts most first."""
    least_budget: int = 1
    """Completions may ask for no output at all: with ``echo`` they score a prompt."""
    choices: bool = False
    """Has ``n``."""


_CALLS = {
    call.path: call
    for call in (
        Call(
            "/v1/chat/completions", "openai", "chat", "messages", ("max_completion_tokens", "max_tokens"), choices=True
        ),
        Call("/v1/completions", "openai", "completion", "prompt", ("max_tokens",), least_budget=0, choices=True),
        Call("/v1/embeddings", "openai", "embedding", "input"),
        Call("/v1/responses", "openai", "chat", "input", ("max_output_tokens",)),
        Call("/v1/messages", "anthropic", "chat", "messages", ("max_tokens",)),
    )
}


_ALIASES = {"/chat/completions": "/v1/chat/completions", "/responses": "/v1/responses"}
"""Paths at which llama.cpp serves the same call. Its ``/completions`` and ``/embeddings`` are other calls, in its own
format: those stay unknown."""
_CALLS |= {alias: _CALLS[path] for alias, path in _ALIASES.items()}
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})


def classify_path(method: str, path: str) -> Call | None:
    """Return the inference call that *method* and *path* (``:path``, query allowed) make, or ``None``."""
    if method != "POST":
        return None
    return _CALLS.get(path.partition("?")[0].removesuffix("/"))


def passes(method: str) -> bool:
    """Return whether a request that is no inference call may go home unchecked: one that computes nothing.

    Engines run inference at more paths than we read (``/invocations``, ``/v1/rerank``, ``/tokenize``, …): an unknown
    ``POST`` would pass tenant, residency and permission by.
    """
    return method in _SAFE
