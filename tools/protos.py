"""Generates the protobuf stubs and checks protos and stubs; `make protos`, `make verify-protos`."""

from __future__ import annotations

import argparse
import difflib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
LIBS = ROOT / "libs"
BUILD = ROOT / "build"
BUF = Path(sys.executable).parent / "buf"

REQUIREMENTS = PROTOS / "requirements.txt"
"""Versions and hashes of the generator, which lives in a virtual environment of its own."""
PUBLIC = ("triptych/v1", "triptych/admin/v1")
RELEASED = PROTOS / "public.binpb"
"""The public protos as last released, as a buf image: what later ones must not break."""
INTERNAL = "triptych/internal/v1"
BEFORE = PROTOS / "internal.binpb"
"""The internal protos of the protocol version before, as a buf image: what its build sends must be read still."""
PROTOBUF_6 = PROTOS / "protobuf-6.txt"
"""Version and hashes of the oldest one that pyproject.toml admits; .venv has a 7."""
WIRE_RULES = '{"version": "v2", "breaking": {"use": ["WIRE"]}}'
"""Numbers and types must stay; names may change."""
STUB_SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=("generate", "verify", "release"))
    match parser.parse_args().command:
        case "generate":
            generate()
        case "verify":
            return verify()
        case "release":
            release()
    return 0


def generate() -> None:
    """Write the stubs into libs/; those of protos that are gone are removed."""
    write_stubs(LIBS)
    for stub in stubs(LIBS) - expected_stubs():
        (LIBS / stub).unlink()
        print(f"removed {stub}: its proto is gone")


def release() -> None:
    """Take the protos of now as those that later ones are held to."""
    for image, paths in ((RELEASED, public_paths()), (BEFORE, ("--path", INTERNAL))):
        buf("build", ".", *paths, "--exclude-source-info", "--output", image.name)
        print(f"{image.relative_to(ROOT)} is what later protos are held to")


def verify() -> int:
    problems = [
        *stub_differences(),
        *failure("buf lint", lambda: buf("lint")),
        *failure(
            "buf breaking (a break on purpose: make protos-release)",
            lambda: buf("breaking", ".", "--against", RELEASED.name, *public_paths()),
        ),
        *failure(
            "buf breaking of the internal protos (for the build before)",
            lambda: buf(
                "breaking", ".", "--against", BEFORE.name, "--path", INTERNAL, "--config", WIRE_RULES
            ),
        ),
        *breaks_since(last_release()),
        *failure("stubs with protobuf 6", lambda: import_stubs(6, [str(protobuf_6()), str(LIBS)])),
        *failure("stubs with protobuf 7", lambda: import_stubs(7, [str(LIBS)])),
    ]
    for problem in problems:
        print(f"verify-protos: {problem}", file=sys.stderr)
    if not problems:
        print(f"{len(proto_files())} protos: lint, compatibility, stubs, protobuf 6 and 7: all good")
    return 1 if problems else 0


def last_release() -> str | None:
    """Return the tag of the last release before this commit, or None: there is none, or the clone has no tags."""
    command = ["git", "describe", "--tags", "--abbrev=0", "--match", "v[0-9]*"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def breaks_since(tag: str | None) -> list[str]:
    """Return what clients and other tiers of that release could not read any more; empty without a release."""
    if tag is None:
        return []
    before = BUILD / "protos-of-last-release"
    shutil.rmtree(before, ignore_errors=True)
    before.mkdir(parents=True)
    archive = before / "protos.tar"
    run("git", "archive", f"--output={archive}", tag, "protos", cwd=ROOT)
    shutil.unpack_archive(archive, before, filter="data")
    image = before / "image.binpb"
    run(BUF, "build", ".", "--exclude-source-info", "--output", image, cwd=before / "protos")
    against = ("breaking", ".", "--against", str(image))
    return [
        *failure(f"buf breaking since {tag}", lambda: buf(*against, *public_paths())),
        *failure(
            f"buf breaking of the internal protos since {tag}",
            lambda: buf(*against, "--path", INTERNAL, "--config", WIRE_RULES),
        ),
    ]


def stub_differences() -> list[str]:
    """How the committed stubs differ from what the protos give; empty if they do not."""
    fresh = BUILD / "stubs"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    write_stubs(fresh)
    problems = [f"{stub}: its proto is gone; run make protos" for stub in sorted(stubs(LIBS) - stubs(fresh))]
    for stub in sorted(stubs(fresh)):
        committed = (LIBS / stub).read_text().splitlines() if (LIBS / stub).is_file() else []
        generated = (fresh / stub).read_text().splitlines()
        difference = list(
            difflib.unified_diff(committed, generated, "committed", "generated", lineterm="", n=0)
        )
        if difference:
            head = "\n  ".join(difference[:10])
            problems.append(f"{stub}: differs from what protos/ gives; run make protos\n  {head}")
    return problems


def write_stubs(target: Path) -> None:
    run(
        generator(), "-m", "grpc_tools.protoc", "-I", PROTOS,
        f"--python_out={target}", f"--pyi_out={target}", f"--grpc_python_out={target}", *proto_files(),
    )  # fmt: skip


def proto_files() -> list[str]:
    return sorted(str(path.relative_to(PROTOS)) for path in (PROTOS / "triptych").rglob("*.proto"))


def expected_stubs() -> set[str]:
    return {name.removesuffix(".proto") + suffix for name in proto_files() for suffix in STUB_SUFFIXES}


def stubs(root: Path) -> set[str]:
    return {
        str(path.relative_to(root)) for path in root.rglob("*_pb2*.py*") if path.name.endswith(STUB_SUFFIXES)
    }


def generator() -> Path:
    """The Python that has grpcio-tools, built anew when its pins change or a build was interrupted."""
    venv = BUILD / "protos-venv"
    stamp = venv / ".requirements.txt"
    if not stamp.is_file() or stamp.read_bytes() != REQUIREMENTS.read_bytes():
        print(f"building {venv.relative_to(ROOT)} from {REQUIREMENTS.relative_to(ROOT)}", flush=True)
        shutil.rmtree(venv, ignore_errors=True)
        run(sys.executable, "-m", "venv", venv)
        run(venv / "bin/python", "-m", "pip", "install", "--quiet", "--require-hashes", "-r", REQUIREMENTS)
        stamp.write_bytes(REQUIREMENTS.read_bytes())
    return venv / "bin/python"


def protobuf_6() -> Path:
    """A directory that holds protobuf 6 alone, to stand before .venv's on the path."""
    target = BUILD / PROTOBUF_6.stem
    stamp = target / f".{PROTOBUF_6.name}"
    if not stamp.is_file() or stamp.read_bytes() != PROTOBUF_6.read_bytes():
        print(f"installing {PROTOBUF_6.relative_to(ROOT)} into {target.relative_to(ROOT)}", flush=True)
        shutil.rmtree(target, ignore_errors=True)
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
        run(*pip, "install", "--quiet", "--no-deps", "--require-hashes", "--target", target, "-r", PROTOBUF_6)
        stamp.write_bytes(PROTOBUF_6.read_bytes())
    return target


def import_stubs(major: int, path: list[str]) -> None:
    """Import every stub in a fresh process that sees protobuf `major` first on `path`."""
    modules = sorted(
        name.removesuffix(".py").replace("/", ".") for name in stubs(LIBS) if name.endswith(".py")
    )
    code = (
        "import google.protobuf, importlib\n"
        f"assert google.protobuf.__version__.startswith('{major}.'), google.protobuf.__version__\n"
        f"for module in {modules!r}: importlib.import_module(module)\n"
    )
    run(sys.executable, "-W", "error", "-c", code, env=os.environ | {"PYTHONPATH": os.pathsep.join(path)})


def public_paths() -> list[str]:
    """Return the options of buf that name the public protos."""
    return [word for path in PUBLIC for word in ("--path", path)]


def buf(*arguments: str) -> None:
    run(BUF, *arguments, cwd=PROTOS)


def run(*command: str | Path, cwd: Path = ROOT, env: dict[str, str] | None = None) -> None:
    subprocess.run([str(word) for word in command], cwd=cwd, env=env, check=True)


def failure(title: str, check: Callable[[], None]) -> list[str]:
    try:
        check()
    except subprocess.CalledProcessError as error:
        return [f"{title} failed with status {error.returncode}"]
    return []


if __name__ == "__main__":
    sys.exit(main())
