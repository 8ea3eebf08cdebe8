"""The one case in which a body is altered: the policy asks for engine priorities."""

import json
from pathlib import Path

import pytest

from tests.e2e.rig import BODY, a_rig

pytestmark = pytest.mark.e2e

SLOMAX = {"classes": [{"name": "standard", "engine_priority": 7}]}


@pytest.mark.parametrize("body_mode", ["buffered", "full-duplex"])
@pytest.mark.parametrize("size", [10, 200_000])
async def test_the_priority_of_the_class_reaches_the_engine_if_the_policy_says_so(
    tmp_path_factory: pytest.TempPathFactory, body_mode: str, size: int
) -> None:
    folder: Path = tmp_path_factory.mktemp("p")
    body = BODY | {"user": "x" * size}
    async with a_rig(folder, mesh={"body_mode": body_mode}, gateway={"alter_body": "priority"}, slomax=SLOMAX) as rig:
        rig.go_on.set()
        async with rig.http.post(f"{rig.url}/v1/chat/completions", json=body) as answer:
            assert answer.status == 200
            await answer.read()
        assert json.loads(rig.bodies[0]) == body | {"priority": 7}


async def test_a_body_is_not_touched_otherwise(tmp_path_factory: pytest.TempPathFactory) -> None:
    odd = b'{ "messages":[{"role":"user","content":"hi"}] ,"model":"chat-model", "temperature":1.0e0,"x":{"b":1,"a":2}}'
    async with a_rig(tmp_path_factory.mktemp("p"), slomax=SLOMAX) as rig:
        rig.go_on.set()
        url = f"{rig.url}/v1/chat/completions"
        async with rig.http.post(url, data=odd, headers={"content-type": "application/json"}) as answer:
            assert answer.status == 200
            await answer.read()
        assert rig.bodies == [odd]
