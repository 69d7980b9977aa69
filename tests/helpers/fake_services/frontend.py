"""Stands in for triptych_services.frontend where a test is about processes, not tokens."""

from __future__ import annotations

from tests.helpers.fake_services.service import run

run("frontend", "frontend")
