"""Bodies of inference calls → :class:`extproc.model.Request`, and errors in the caller's own shape.

OpenAI chat completions, completions, embeddings and Responses; Anthropic messages. Prompt text is read once,
counted, hashed and forgotten: nothing here keeps or logs it, and only ``with_priority`` alters a body.

``calls``     which paths
``callers``   tenant and client headers
``fields``    checked JSON values
``shapes``    one function an API: where its prompt stands
``prompt``    the canonical prompt: its length in tokens and its block hashes
``read``      all of it, in order
``replies``   mistakes and refusals as HTTP answers
``priority``  the one change of a body
"""

from extproc.adapters.openai.calls import Call, classify_path, passes
from extproc.adapters.openai.priority import with_priority
from extproc.adapters.openai.read import Reader
from extproc.adapters.openai.replies import BadRequest, Reply, refusal, reply_for

__all__ = ["BadRequest", "Call", "Reader", "Reply", "classify_path", "passes", "refusal", "reply_for", "with_priority"]
