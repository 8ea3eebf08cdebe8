"""Playbooks for the session: ``Playbook(session) >> event << action << action``.

A playbook is a shell that never fails: before each event it reports what the session waits to hear has been written.
"""

from collections import deque
from typing import Self

from extproc.session import Action, Answered, Event, Session, State


class Playbook:
    """``>>`` gives the session an event, ``<<`` names the next action; leaving the block asserts that none is left."""

    def __init__(self, session: Session | None = None) -> None:
        self.session = session or Session()
        self._left: deque[Action] = deque()
        self._last = "the start"

    def __rshift__(self, event: Event) -> Self:
        self._nothing_left()
        written(self.session)
        self._left.extend(self.session.handle(event))
        self._last = repr(event)
        return self

    def __lshift__(self, action: Action) -> Self:
        assert self._left, f"after {self._last} no action is left, wanted {action}"
        found = self._left.popleft()
        assert found == action, f"after {self._last}"
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._nothing_left()
            written(self.session)

    def _nothing_left(self) -> None:
        assert not self._left, f"after {self._last} not asked for: {list(self._left)}"


def written(session: Session) -> None:
    """Report that the answer, if one is due, has been written."""
    if session.state is State.ANSWERING:
        assert session.handle(Answered()) == ()
