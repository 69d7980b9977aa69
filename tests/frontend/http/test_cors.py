"""Pages of other origins: they may call the HTTP API where the operator has named them, and nowhere else."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.fake_generator import MODEL
from tests.helpers.http_api import open_api
from triptych.config.api_keys import entry_line
from triptych_services.frontend.access.keys import ApiKeys

PAGE = "https://app.example"
PREFLIGHT = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-os",
}
BODY = {"model": MODEL, "prompt": "Hi", "max_tokens": 1}


async def test_without_the_option_no_header_is_sent():
    async with open_api() as api:
        response = await api.http.options("/v1/completions", headers=PREFLIGHT)
        assert response.status_code == 405
        response = await api.http.post("/v1/completions", json=BODY, headers={"origin": PAGE})
        assert response.status_code == 200
        assert "access-control-allow-origin" not in response.headers


async def test_a_named_origin_is_let_in_and_another_is_not():
    async with open_api(cors_origins=(PAGE,)) as api:
        response = await api.http.options("/v1/completions", headers=PREFLIGHT)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == PAGE
        allowed = response.headers["access-control-allow-headers"].lower()
        assert {"authorization", "content-type"} <= {name.strip() for name in allowed.split(",")}
        response = await api.http.post("/v1/completions", json=BODY, headers={"origin": PAGE})
        assert response.headers["access-control-allow-origin"] == PAGE
        assert "x-request-id" in response.headers["access-control-expose-headers"].lower()
        other = {**PREFLIGHT, "origin": "https://evil.example"}
        response = await api.http.options("/v1/completions", headers=other)
        assert response.status_code == 400
        assert "access-control-allow-origin" not in response.headers


async def test_a_preflight_needs_no_key_and_a_page_reads_its_error(tmp_path: Path):
    file = tmp_path / "keys.yaml"
    file.write_text(entry_line("one", "tk-one") + "\n")
    async with open_api(keys=ApiKeys(file), cors_origins=("*",)) as api:
        assert (await api.http.options("/v1/completions", headers=PREFLIGHT)).status_code == 200
        response = await api.http.post("/v1/completions", json=BODY, headers={"origin": PAGE})
        assert response.status_code == 401
        assert response.headers["access-control-allow-origin"] == "*"
