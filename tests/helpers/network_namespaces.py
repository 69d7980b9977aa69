"""Hosts of their own on one machine: network namespaces behind a bridge, whose cables can be pulled."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

_NET = 0x40000000  # CLONE_NEWNET
_T = TypeVar("_T")


def why_unavailable() -> str:
    """Return why this machine has none. Empty: it has."""
    if shutil.which("ip") is None:
        return "there is no `ip` command (Debian: iproute2)"
    if os.geteuid() != 0:
        return "network namespaces take root"
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False)
    return "" if tried.returncode == 0 else f"network namespaces are refused: {tried.stderr.decode().strip()}"


class Hosts:
    """Namespaces in one network, 10.77.0.0/24. Made by `hosts`."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._switch = f"tt{os.getpid()}sw"
        self._names = {name: (f"tt{os.getpid()}{name}", number) for number, name in enumerate(names, 1)}

    def address(self, name: str) -> str:
        """Return the address of a host."""
        return f"10.77.0.{self._names[name][1]}"

    def command(self, name: str) -> tuple[str, ...]:
        """Return the words before a command that is to run on a host."""
        return ("ip", "netns", "exec", self._names[name][0])

    def cut(self, name: str) -> None:
        """Pull a host's cable: what is sent is lost, and no connection is told."""
        self._set_link(name, "down")

    def heal(self, name: str) -> None:
        """Put the cable back."""
        self._set_link(name, "up")

    def give_name(self, name: str, alias: str, to: str) -> None:
        """Let a name mean the address of a host, on another host. Call it before the first process there starts."""
        file = (
            self._folder(name) / "hosts"
        )  # ip-netns(8): it is mounted over /etc/hosts, so it is never replaced
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"127.0.0.1 localhost\n{self.address(to)} {alias}\n")

    def _folder(self, name: str) -> Path:
        """Return the folder of a host's own files of /etc."""
        return Path("/etc/netns", self._names[name][0])

    def run(self, name: str, function: Callable[[], _T]) -> _T:
        """Return what a function returns whose connections begin on a host; it must not start threads."""

        def on_host() -> _T:
            with open(f"/run/netns/{self._names[name][0]}") as namespace:
                if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _NET):
                    raise OSError(ctypes.get_errno(), f"setns to {name}")
            return function()

        with ThreadPoolExecutor(1) as pool:
            return pool.submit(on_host).result()

    def open(self) -> None:
        """Make the namespaces and connect them."""
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "br0", "up")
        for namespace, number in self._names.values():
            port = f"port{number}"
            _ip("netns", "add", namespace)
            _ip(
                "-n",
                self._switch,
                "link",
                "add",
                port,
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                namespace,
            )
            _ip("-n", self._switch, "link", "set", port, "master", "br0", "up")
            _ip("-n", namespace, "address", "add", f"10.77.0.{number}/24", "dev", "eth0")
            _ip("-n", namespace, "link", "set", "eth0", "up")
            _ip("-n", namespace, "link", "set", "lo", "up")

    def close(self) -> None:
        """Remove them, and the cables with them."""
        for name in self._names:
            shutil.rmtree(self._folder(name), ignore_errors=True)
        for namespace in (self._switch, *(name for name, _ in self._names.values())):
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)

    def _set_link(self, name: str, state: str) -> None:
        _ip("-n", self._switch, "link", "set", f"port{self._names[name][1]}", state)


@contextmanager
def hosts(*names: str) -> Iterator[Hosts]:
    """Connect so many hosts for as long as the block."""
    made = Hosts(names)
    try:
        made.open()
        yield made
    finally:
        made.close()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
