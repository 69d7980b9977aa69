"""Stands in for triptych_services.enginecore where a test is about processes, not tokens."""

from __future__ import annotations

from tests.helpers.fake_services.service import run

run("enginecore", "engine")
