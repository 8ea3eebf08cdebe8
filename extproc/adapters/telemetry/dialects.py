"""All dialects, and which one a page speaks.

Triton and MindIE are not here: they publish metrics on another port than the one they serve on.
"""

from extproc.adapters.telemetry.dialect import Dialect, Numbers
from extproc.adapters.telemetry.exposition import Page
from extproc.adapters.telemetry.llamacpp import LLAMACPP
from extproc.adapters.telemetry.sglang import SGLANG
from extproc.adapters.telemetry.tgi import TGI
from extproc.adapters.telemetry.trtllm import TRTLLM
from extproc.adapters.telemetry.vllm import VLLM

DIALECTS: dict[str, Dialect] = {one.name: one for one in (VLLM, SGLANG, LLAMACPP, TRTLLM, TGI)}


def read(text: str, dialect: str) -> Numbers | None:
    """Return what a page says in *dialect* (``auto`` recognises it); ``None`` if it does not speak it."""
    page = Page(text)
    tried = DIALECTS.values() if dialect == "auto" else (DIALECTS[dialect],)
    return next((one.read(page) for one in tried if page.mentions(one.mark)), None)


def paths(dialect: str) -> tuple[str, ...]:
    """Return where to ask for the page, likeliest first."""
    if dialect == "auto":
        return tuple(dict.fromkeys(one.path for one in DIALECTS.values()))
    return (DIALECTS[dialect].path,)
