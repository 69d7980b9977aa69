"""HTTP answers are counted by route and status, under names that no client makes up."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.helpers.http_api import open_api
from triptych.config.api_keys import entry_line
from triptych_services.frontend.access.keys import ApiKeys
from triptych_services.frontend.http.guards import MAX_BODY_BYTES


class Counted(Counter[tuple[str, int]]):
    def note(self, route: str, status: int) -> None:
        self[route, status] += 1


async def test_answers_are_counted_by_route_and_status() -> None:
    counted = Counted()
    async with open_api(on_response=counted.note) as api:
        body = {"prompt": "a", "max_tokens": 2}
        await api.http.post("/v1/completions", json=body)
        await api.http.post("/v1/completions", json={**body, "stream": True})
        await api.http.post("/v1/completions", json={**body, "max_tokens": "x"})
        await api.http.get("/v1/completions")
        await api.http.get("/health")
        await api.http.head("/health")
    assert counted == {
        ("/v1/completions", 200): 2,
        ("/v1/completions", 400): 1,
        ("/v1/completions", 405): 1,
        ("/health", 200): 2,
    }


async def test_paths_of_clients_are_no_labels() -> None:
    counted = Counted()
    async with open_api(on_response=counted.note) as api:
        for number in range(20):
            await api.http.get(f"/made/up/{number}")
            await api.http.get(f"/v1/models/made-up-{number}")
        await api.http.post("/v1/completions", content=b"x" * (MAX_BODY_BYTES + 1))
    routes = {route for route, _ in counted}
    assert routes == {"other", "/v1/models/{model:path}"}
    assert counted["other", 404] == 20
    assert counted["other", 413] == 1


async def test_a_request_without_a_key_is_counted(tmp_path: Path) -> None:
    counted = Counted()
    file = tmp_path / "keys.yaml"
    file.write_text(entry_line("a", "key-a"))
    async with open_api(on_response=counted.note, keys=ApiKeys(file)) as api:
        await api.http.get("/v1/models")
    assert counted == {("other", 401): 1}
