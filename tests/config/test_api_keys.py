"""The file of API keys: what it may say, what is wrong with it, and how a change of it is noticed."""

from __future__ import annotations

import hashlib
import os

import pytest

from triptych.config.api_keys import ApiKey, draw_key, entry_line, read_api_keys
from triptych.config.watched_files import WatchedFiles, signature_of
from triptych.errors import ConfigError

A, B = "a" * 64, "b" * 64


def test_entries_are_read_with_their_defaults(tmp_path):
    file = tmp_path / "keys.yaml"
    file.write_text(
        f"- {{name: one, sha256: {A}}}\n- name: two\n  sha256: {B}\n  tenant: acme\n  admin: true\n"
        "  tokens_per_minute: 9\n"
    )
    assert read_api_keys(file) == (ApiKey("one", A, "one"), ApiKey("two", B, "acme", True, 0, 9))


def test_a_line_is_read_as_it_was_written(tmp_path):
    file, key = tmp_path / "keys.yaml", draw_key()
    file.write_text(entry_line("a@b", key, tenant="*", admin=True, min_priority=-3) + "\n")
    sha256 = hashlib.sha256(key.encode()).hexdigest()
    assert read_api_keys(file) == (ApiKey("a@b", sha256, "*", True, min_priority=-3),)
    assert key not in file.read_text()
    assert draw_key() != key


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "expected a list"),
        ("keys: []", "expected a list"),
        ("- one", "entry 1: expected a mapping"),
        ("- {name: one}", "entry 1: sha256: expected 64"),
        (f"- {{name: one, sha256: {A[1:]}}}", "entry 1: sha256: expected 64"),
        (f"- {{name: one, sha256: {A}}}\n- {{name: '', sha256: {B}}}", "entry 2: name: expected"),
        (f"- {{name: one, sha256: {A}, tenants: x}}", "no such field 'tenants'"),
        (f"- {{name: one, sha256: {A}, tenant: 7}}", "tenant: expected a text"),
        (f"- {{name: one, sha256: {A}, admin: 1}}", "admin: expected true or false"),
        (f"- {{name: one, sha256: {A}}}\n- {{name: one, sha256: {B}}}", "two entries have the name 'one'"),
        (f"- {{name: one, sha256: {A}}}\n- {{name: two, sha256: {A}}}", "two entries have the sha256"),
        (
            f"- {{name: one, sha256: {A}, tokens_per_minute: 0}}",
            "tokens_per_minute: expected a number from 1",
        ),
        (f"- {{name: one, sha256: {A}, requests_per_minute: '9'}}", "requests_per_minute: expected a number"),
        (
            f"- {{name: one, sha256: {A}, min_priority: 1}}",
            "min_priority: expected an integer of -2147483648..0",
        ),
        (f"- {{name: one, sha256: {A}, min_priority: null}}", "min_priority: expected an integer"),
        ("- {name: one", "is not yaml"),
    ],
)
def test_a_bad_file_is_refused_by_name(text, why, tmp_path):
    file = tmp_path / "keys.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_api_keys(file)
    assert str(file) in str(caught.value)
    assert why in str(caught.value)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        read_api_keys(tmp_path / "none.yaml")


@pytest.fixture
def instant(monkeypatch):
    """Look at the files at every use."""
    monkeypatch.setattr("triptych.config.watched_files.CHECK_INTERVAL_S", 0.0)


def test_a_changed_file_is_read_again_and_an_unchanged_one_is_not(tmp_path, instant):
    file, times = tmp_path / "value", []
    file.write_text("first")

    def read() -> str:
        times.append(1)
        return file.read_text()

    watched = WatchedFiles([file], read, what="value")
    assert [watched.get(), watched.get(), len(times)] == ["first", "first", 1]
    file.write_text("second")
    assert [watched.get(), watched.get(), len(times)] == ["second", "second", 2]


def test_a_broken_file_keeps_the_old_value_and_is_logged_once(tmp_path, instant, caplog):
    file = tmp_path / "keys.yaml"
    file.write_text(f"- {{name: one, sha256: {A}}}\n")
    watched = WatchedFiles([file], lambda: read_api_keys(file), what="keys")
    old = watched.get()
    file.write_text("- {name: one")
    assert [watched.get(), watched.get()] == [old, old]
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1
    file.unlink()
    assert watched.get() == old
    file.write_text(f"- {{name: two, sha256: {B}}}\n")
    assert [key.name for key in watched.get()] == ["two"]


def test_a_file_behind_a_link_that_is_moved_has_another_signature(tmp_path):
    """As a Secret that Kubernetes mounts."""
    for name in ("old", "new"):
        (tmp_path / name).write_text("same size")
        os.utime(tmp_path / name, ns=(1, 1))
    link = tmp_path / "link"
    link.symlink_to("old")
    before = signature_of([link])
    link.unlink()
    link.symlink_to("new")
    assert signature_of([link]) != before
