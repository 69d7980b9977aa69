"""The Dockerfiles, without a Docker engine: what they copy is built and imported as their images would."""

from __future__ import annotations

import fnmatch
import functools
import importlib.metadata
import json
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import grimp
import pytest
from dockerfile_parse import DockerfileParser
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from tests.deploy.facts import (
    LEAF,
    OPTION_BY_ENV,
    PROJECT,
    ROOT,
    SERVICES,
    UID,
    assert_env_is_known,
    module_exists,
    ports,
    requirements_closure,
)

pytestmark = pytest.mark.parametrize("service", SERVICES)
CACHE = "/var/cache/triptych"
WALLS = {"frontend": {"torch"}, "enginecore": {"torch", "tokenizers", "fastapi"}, "worker": {"fastapi"}}
"""Packages that an image must not contain, even indirectly."""


def instructions(service: str) -> list[tuple[str, str]]:
    parser = DockerfileParser(path=str(ROOT / "services" / service / "Dockerfile"), cache_content=True)
    return [(i["instruction"], i["value"]) for i in parser.structure if i["instruction"] != "COMMENT"]


def final_stage(service: str) -> list[tuple[str, str]]:
    all_of_them = instructions(service)
    last = max(index for index, (name, _) in enumerate(all_of_them) if name == "FROM")
    return all_of_them[last:]


def only(service: str, name: str) -> str:
    (value,) = [value for instruction, value in final_stage(service) if instruction == name]
    return value


def copies(service: str) -> list[tuple[list[str], str]]:
    """Sources and target of each COPY out of the repository."""
    words = [shlex.split(value) for name, value in instructions(service) if name == "COPY"]
    return [(w[:-1], w[-1]) for w in words if not w[0].startswith("--from")]


def pip_installs(service: str) -> list[str]:
    """Return what follows `pip install` in each call of it."""
    runs = [value for name, value in instructions(service) if name == "RUN"]
    return [call for value in runs for call in re.findall(r"/pip install ([^&|;]*)", value)]


def is_ignored(path: Path) -> bool:
    """Whether .dockerignore keeps `path` (relative) from the builder; the last matching line decides."""
    ignored = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        pattern = line.lstrip("!")
        candidates = [path, *path.parents][:-1]
        if pattern.startswith("**/"):
            matches = any(fnmatch.fnmatch(candidate.name, pattern[3:]) for candidate in candidates)
        else:
            matches = any(fnmatch.fnmatch(str(candidate), pattern) for candidate in candidates)
        if matches:
            ignored = not line.startswith("!")
    return ignored


def test_it_builds_in_two_stages_on_a_slim_base(service):
    bases = [value for name, value in instructions(service) if name == "FROM"]
    assert bases == ["${PYTHON_IMAGE} AS build", "${PYTHON_IMAGE}"], "one argument, which may hold a digest"
    (image,) = [v for n, v in instructions(service) if n == "ARG" and v.startswith("PYTHON_IMAGE=")]
    version = re.fullmatch(r"PYTHON_IMAGE=python:([0-9.]+)-slim", image)[1]
    assert SpecifierSet(importlib.metadata.metadata("triptych")["Requires-Python"]).contains(version)


def test_it_does_not_run_as_root(service):
    assert only(service, "USER") == f"{UID}:{UID}"
    runs = " ".join(value for name, value in final_stage(service) if name == "RUN")
    assert f"--uid {UID}" in runs
    if service != "enginecore":  # which reads no model files
        assert f"install --directory --owner={UID} --group={UID} {CACHE}" in runs


def test_it_starts_its_service(service):
    command = json.loads(only(service, "ENTRYPOINT"))
    assert command == ["python", "-m", f"triptych_services.{service}"]
    assert module_exists(f"triptych_services.{service}.__main__")


def test_it_exposes_the_ports_of_the_config(service):
    assert [int(port) for port in only(service, "EXPOSE").split()] == list(ports(service).values())


def test_its_environment_is_read_by_the_code(service):
    env = dict(word.split("=", 1) for word in shlex.split(only(service, "ENV")))
    assert_env_is_known(env)
    assert env[f"TRIPTYCH_{LEAF[service]}_HOST".upper()] == "0.0.0.0"
    assert OPTION_BY_ENV[f"TRIPTYCH_{LEAF[service]}_HOST".upper()].default == "127.0.0.1"
    if service != "enginecore":
        assert env["TRIPTYCH_HOME"] == CACHE
        assert Path(env["HF_HOME"]).is_relative_to(CACHE)
    assert "/opt/triptych/bin" in env["PATH"].split(":")


def test_a_cuda_worker_has_a_compiler_and_a_folder_for_kernels(service):
    env = dict(word.split("=", 1) for word in shlex.split(only(service, "ENV")))
    commands = [value for instruction, value in final_stage(service) if instruction == "RUN"]
    compiles = service == "worker"
    assert ("TRITON_CACHE_DIR" in env) == compiles
    assert any('"${TORCH}" in cpu) exit' in line and "gcc libc6-dev" in line for line in commands) == compiles
    if compiles:
        assert any("install --directory" in line and env["TRITON_CACHE_DIR"] in line for line in commands)


def test_everything_it_copies_is_there_and_reaches_the_builder(service):
    for sources, _ in copies(service):
        for source in sources:
            assert (ROOT / source).exists(), source
            assert not is_ignored(Path(source)), source
    assert is_ignored(Path("tests/deploy/test_images.py"))
    assert is_ignored(Path(".venv/bin/python"))
    assert is_ignored(Path("libs/triptych/__pycache__/x.pyc"))


def test_it_installs_by_hash_what_its_service_needs_and_nothing_else(service):
    *locked, own = pip_installs(service)
    files = [file for call in locked for file in re.findall(r"-r (\S+)", call)]
    torch = ["requirements/torch-${TORCH}.txt"] if service == "worker" else []
    assert files == ["requirements/installers.txt", *torch, f"requirements/{service}.txt"]
    for call in locked:
        assert "--require-hashes" in call
        assert "--no-cache-dir" in call
        assert "--only-binary :all:" in call or files[0] in call
    assert own.split() == ["--no-cache-dir", "--no-index", "--no-deps", "--no-build-isolation", "."]


def test_what_it_installs_stays_within_its_walls(service):
    assert not requirements_closure(service) & WALLS[service]


def test_the_build_of_torch_is_an_argument(service):
    arguments = {value for name, value in instructions(service) if name == "ARG"}
    assert ("torch" in requirements_closure(service)) == (service == "worker")
    assert ("TORCH=cpu" in arguments) == (service == "worker")
    if service == "worker":
        copied = {source for sources, _ in copies(service) for source in sources}
        assert {f"requirements/torch-{build}.txt" for build in ("cpu", "cuda")} <= copied


@pytest.fixture(scope="session")
def wheel_of(tmp_path_factory):
    """service -> the wheel that its image's COPY and pip lines build; built when first asked for."""

    @functools.cache
    def build(service: str) -> Path:
        context = tmp_path_factory.mktemp(service)
        for sources, target in copies(service):
            for source in sources:
                copy_as_docker_does(ROOT / source, context, target, is_alone=len(sources) == 1)
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
        subprocess.run([*pip, "-w", "out", "."], cwd=context, check=True, capture_output=True)
        (wheel,) = (context / "out").glob("triptych-*.whl")
        return wheel

    return build


def copy_as_docker_does(source: Path, context: Path, target: str, *, is_alone: bool) -> None:
    destination = context / target
    if target.endswith("/") or not is_alone:
        destination /= source.name
    destination.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        kept_away = shutil.ignore_patterns("__pycache__", "*.egg-info", "Dockerfile", "*.md")
        shutil.copytree(source, destination, symlinks=True, ignore=kept_away)
    else:
        shutil.copy(source, destination)


@pytest.mark.quick_cases(1)
def test_its_wheel_holds_its_own_service_and_no_other(service, wheel_of):
    names = zipfile.ZipFile(wheel_of(service)).namelist()
    packages = {name.split("/")[0] for name in names if name.endswith(".py")}
    services = {
        name.split("/")[1] for name in names if name.startswith("triptych_services/") and name.count("/") > 1
    }
    assert services == {service}
    assert packages == {"triptych", "triptych_services"} | (
        {"triptych_kernels"} if service == "worker" else set()
    )
    assert "triptych/py.typed" in names


def test_all_that_it_imports_is_installed_in_it(service):
    """The import graph, lazy imports included: every third-party package is one that the extra brings."""
    graph = import_graph()
    reached = graph.find_upstream_modules(f"triptych_services.{service}", as_package=True)
    third_party = {
        name.split(".")[0]
        for name in reached
        if graph.is_module_squashed(name) and name.split(".")[0] not in sys.stdlib_module_names
    }
    assert {"grpc", "google"} <= third_party
    providers = importlib.metadata.packages_distributions()
    installed = requirements_closure(service) | {"pip", "setuptools"}
    missing = {
        name
        for name in third_party
        if not {canonicalize_name(d) for d in providers.get(name, ())} & installed
    }
    # CUDA builds of torch bring triton, and nothing imports it without a CUDA device; transformers is an extra, and
    # what needs it says so
    assert missing <= {"triton", "transformers"}


def import_graph() -> grimp.ImportGraph:
    return grimp.build_graph(
        "triptych",
        "triptych_kernels",
        "triptych_services",
        include_external_packages=True,
        cache_dir=str(ROOT / "build/grimp"),
    )


BLOCKED = """
import sys
allowed = set({allowed!r}) | set(sys.stdlib_module_names)
class Wall:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] not in allowed:
            raise ModuleNotFoundError(f'{{name}} is not in this image', name=name)
sys.meta_path.insert(0, Wall())
sys.path.insert(0, {wheel!r})
"""


def run_in_image(service: str, wheel: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run `code` where only the image's wheel and the packages of its extra can be imported."""
    installed = requirements_closure(service) | {"pip", "setuptools"}
    allowed = sorted(
        package
        for package, distributions in importlib.metadata.packages_distributions().items()
        if {canonicalize_name(name) for name in distributions} & installed
    )
    allowed += ["triptych", "triptych_kernels", "triptych_services"]
    prologue = BLOCKED.format(allowed=allowed, wheel=str(wheel))
    command = [sys.executable, "-c", prologue + code]
    return subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.quick_cases(1)
def test_its_service_prints_its_help_with_nothing_else_installed(service, wheel_of):
    module = f"triptych_services.{service}"
    code = f"import runpy; sys.argv = ['x', '--help']; runpy.run_module({module!r}, run_name='__main__')"
    result = run_in_image(service, wheel_of(service), code)
    assert result.returncode == 0, result.stderr
    assert f"--{LEAF[service]}.port" in result.stdout


@pytest.mark.thorough
def test_its_health_probe_runs_with_nothing_else_installed(service, wheel_of, unused_tcp_port):
    entry, _, function = PROJECT["scripts"]["triptych"].partition(":")
    arguments = ["triptych", "health", f"127.0.0.1:{unused_tcp_port}"]
    code = f"sys.argv = {arguments!r}\nfrom {entry} import {function}\nsys.exit({function}())"
    result = run_in_image(service, wheel_of(service), code)
    assert result.returncode == 1, result.stderr
    assert "Traceback" not in result.stderr
    assert str(unused_tcp_port) in result.stdout + result.stderr
