"""How much work a request is, in tokens, before anybody has run it."""

from dataclasses import dataclass

from extproc.model import Request


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens. The prompt is shared by all choices; each choice decodes its own output."""

    prompt: int
    output: int

    @property
    def total(self) -> int:
        """Tokens in the KV cache when the request ends."""
        return self.prompt + self.output


def estimate(request: Request, expected_output: int) -> Work:
    """Return the work of *request*; *expected_output* is the model's usual answer, capped by the caller's budget."""
    if request.task == "embedding":
        return Work(request.prompt_tokens, 0)
    budget = request.output_budget
    output = expected_output if budget is None else min(budget, expected_output)
    return Work(request.prompt_tokens, output * request.choices)
