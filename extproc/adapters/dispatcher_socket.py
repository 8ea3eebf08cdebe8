"""The dispatcher's side of the socket: many workers, one waiting room.

Each request belongs to the connection that brought it last. A connection that is lost frees what it owned: a dead
worker's held requests leave the line, its running ones give their places back (Envoy has cut them).
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from extproc.adapters import wire
from extproc.adapters.waiting_room import WaitingRoom
from extproc.model import Admit, Final, Outcome, Refuse

BEAT_S = 0.25


class DispatcherSocket:
    """Serves a :class:`WaitingRoom` on a Unix socket."""

    def __init__(self, room: WaitingRoom) -> None:
        self._room = room
        self._links: set[wire.Link] = set()
        self._owner: dict[str, wire.Link] = {}

    def workers(self) -> int:
        """Return connections open now."""
        return len(self._links)

    def owned(self) -> int:
        """Return requests that some worker has held or running."""
        return len(self._owner)

    async def serve(self, path: Path) -> None:
        """Listen on *path* and beat, until cancelled."""
        _clear(path)
        server = await asyncio.get_running_loop().create_unix_server(self._link, str(path))
        try:
            while True:
                for link in self._links:
                    link.send(wire.Beat())
                await asyncio.sleep(BEAT_S)
        finally:
            server.close()
            for link in list(self._links):
                link.close()
            _clear(path)

    def _link(self) -> wire.Link:
        link = wire.Link(self._take, self._lost, self._greet)
        self._links.add(link)
        return link

    def _greet(self, link: wire.Link) -> None:
        """Tell a new worker at once that somebody is here; it does not ask before it has heard so."""
        link.send(wire.Beat())

    def _take(self, link: wire.Link, messages: Sequence[wire.Message]) -> None:
        for message in messages:
            match message:
                case wire.Offer(request):
                    self._offer(link, message)
                case wire.Adopt(request, admit):
                    self._owner[request.id] = link
                    self._room.adopt(request, admit)
                case wire.FirstToken(request_id, ttft_s):
                    self._room.first_token(request_id, ttft_s)
                case wire.Settle(request_id, outcome):
                    self._owner.pop(request_id, None)
                    self._room.settle(request_id, outcome)
                case _:
                    pass  # what only a dispatcher says

    def _offer(self, link: wire.Link, offer: wire.Offer) -> None:
        request_id = offer.request.id
        self._owner[request_id] = link
        found = self._room.offer(offer.request)
        if isinstance(found, Admit | Refuse):
            self._answer(request_id, found)
        else:
            found.add_done_callback(lambda held: None if held.cancelled() else self._answer(request_id, held.result()))

    def _answer(self, request_id: str, verdict: Final) -> None:
        link = self._owner.get(request_id)
        if isinstance(verdict, Refuse):
            self._owner.pop(request_id, None)
        if link is not None:
            link.send(wire.verdict_message(request_id, verdict))

    def _lost(self, link: wire.Link) -> None:
        self._links.discard(link)
        for request_id in [one for one, owner in self._owner.items() if owner is link]:
            del self._owner[request_id]
            self._room.settle(request_id, Outcome())


def _clear(path: Path) -> None:
    path.unlink(missing_ok=True)
