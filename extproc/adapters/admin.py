"""The admin port: ``/metrics``, ``/healthz``, ``/readyz``, ``/debug/fleet``."""

from collections.abc import Callable, Mapping
from typing import Any

import orjson
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from extproc.dispatcher import Dispatcher


def application(
    registry: CollectorRegistry,
    ready: Callable[[], str | None],
    debug: Callable[[], Mapping[str, Any]],
) -> web.Application:
    """Return the web application.

    Parameters
    ----------
    registry
        What ``/metrics`` prints.
    ready
        Returns why this process cannot serve yet, or ``None`` when it can.
    debug
        Returns what ``/debug/fleet`` prints as JSON.

    """

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"content-type": CONTENT_TYPE_LATEST})

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(_: web.Request) -> web.Response:
        reason = ready()
        return web.Response(text="ok\n") if reason is None else web.Response(text=f"{reason}\n", status=503)

    async def fleet(_: web.Request) -> web.Response:
        return web.Response(body=orjson.dumps(debug(), option=orjson.OPT_INDENT_2), content_type="application/json")

    app = web.Application()
    app.add_routes(
        [
            web.get("/metrics", metrics),
            web.get("/healthz", healthz),
            web.get("/readyz", readyz),
            web.get("/debug/fleet", fleet),
        ]
    )
    return app


async def listen(app: web.Application, host: str, port: int) -> tuple[web.AppRunner, int]:
    """Serve *app* and return its runner and the port it got; ``runner.cleanup()`` ends it."""
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, host, port)
    await site.start()
    return runner, int(runner.addresses[0][1])


def describe(dispatcher: Dispatcher, now: float) -> dict[str, Any]:
    """Return the snapshot and our own counts as plain JSON values."""
    fleet = dispatcher.fleet
    in_flight = dispatcher.in_flight()
    resting = set(dispatcher.resting(now))
    return {
        "at": fleet.at,
        "blind": fleet.blind,
        "models": sorted(fleet.models),
        "held": dispatcher.waiting(),
        "in_flight": dispatcher.total_in_flight(),
        "prefill_tokens_in_flight": dispatcher.prefill_in_flight(),
        "prefix_blocks": dispatcher.index_blocks(),
        "sites": [
            {
                "name": site.name,
                "cluster": site.cluster,
                "jurisdictions": sorted(site.jurisdictions),
                "network_s": site.network_s,
                "draining": site.draining,
                "instances": [
                    {
                        "name": one.name,
                        "address": one.address,
                        "state": str(state),
                        "resting": one.name in resting,
                        "profile": one.profile.name,
                        "models": sorted(name for name, rows in site.serves.items() if rows[row]),
                        "in_flight": in_flight.get(one.name, 0),
                        "waiting": float(site.waiting[row]),
                        "running": float(site.running[row]),
                        "kv_usage": float(site.kv_usage[row]),
                        "age_s": float(site.age_s[row]),
                    }
                    for row, (one, state) in enumerate(zip(site.instances, site.states, strict=True))
                ],
            }
            for site in fleet.sites
        ],
    }
