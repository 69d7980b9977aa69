"""Checks which third-party packages each of our packages may import, and which work where others are missing.

Who of us may import whom stands in pyproject.toml, [tool.importlinter].
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("libs/triptych", "kernels/triptych_kernels", "services")

GRPC = {"grpc", "grpc_health", "grpc_reflection", "grpc_status", "google"}
HTTP = {"fastapi", "fastapi_offline", "starlette", "uvicorn", "pydantic", "pydantic_core", "annotated_types"}
ALLOWED: dict[str, set[str]] = {
    "triptych": set(),
    "triptych.types": {"numpy"},
    "triptych.config": {"yaml"},
    "triptych.v1": GRPC,
    "triptych.admin.v1": GRPC,
    "triptych.internal.v1": GRPC,
    "triptych.compat": GRPC,
    "triptych.wire": {"numpy"},
    "triptych.wire.codec": {"google", "numpy"},
    "triptych.wire.journal": {"google"},
    "triptych.rpc": GRPC,
    "triptych.observe": {"prometheus_client"},
    "triptych.hub": {"gguf", "huggingface_hub", "tokenizers", "numpy"},
    "triptych.text": {"tokenizers", "jinja2"},
    "triptych.client": GRPC | {"numpy", "tqdm"},
    "triptych.client.http_client": {"aiohttp"},
    "triptych.client.served_tokenizer": GRPC | {"jinja2"},
    "triptych.launcher": GRPC,
    "triptych.cli": GRPC,
    "triptych.cli.chat.line_reader": {"prompt_toolkit"},
    "triptych.cli.bench": {"numpy"},
    "triptych.cli.bench.plot": {"numpy", "matplotlib"},
    "triptych.cli.bench.serve": {"numpy", "tqdm"},
    "triptych.cli.completion": {"shtab"},
    "triptych.cli.run_batch": {"tqdm"},
    "triptych.checkpoint": {"numpy"},
    "triptych.checkpoint.gguf": {"gguf", "numpy", "tokenizers"},
    "triptych.checkpoint.sentencepiece": {"tokenizers"},
    "triptych.checkpoint.tokenizer_files": {"tokenizers", "google"},
    "triptych_kernels": {"torch"},
    "triptych_kernels.triton": {"torch", "triton"},
    "triptych.rpc.service_main": {"uvloop", "prometheus_client"},
    "triptych_services.frontend": {"numpy"},
    "triptych_services.frontend.engines.client": {"grpc"},
    "triptych_services.frontend.app": {"prometheus_client"},
    "triptych_services.frontend.siblings.siblings": {"prometheus_client"},
    "triptych_services.frontend.engines.outbox": {"grpc", "numpy"},
    "triptych_services.frontend.engines.status_watch": {"grpc"},
    "triptych_services.frontend.grpc": {"grpc", "google", "numpy"},
    "triptych_services.frontend.requests.grammars.grammar_process": {"llguidance"},
    "triptych_services.frontend.offload.tokenizer_process": {"tokenizers"},
    "triptych_services.frontend.http": HTTP | {"prometheus_client", "numpy", "orjson"},
    "triptych_services.frontend.http.anthropic": HTTP,
    "triptych_services.frontend.http.operators": HTTP,
    "triptych_services.frontend.http.operators.routes": HTTP | {"grpc", "google"},
    "triptych_services.enginecore": {"numpy"},
    "triptych_services.enginecore.frontends.servicer": {"grpc"},
    "triptych_services.enginecore.workers.grpc_executor": {"grpc"},
    "triptych_services.worker": {"torch", "numpy"},
    "triptych_services.worker.loader": {"torch", "numpy", "safetensors", "gguf"},
    "triptych_services.worker.adapters.store": {"torch", "safetensors", "numpy"},
    "triptych_services.worker.models.fallback": {"torch", "transformers"},
    "triptych_services.worker.runner.drafting.grammar": {"llguidance", "numpy"},
    "triptych_services.worker.sampling.form_output": {"llguidance", "numpy"},
    "triptych_services.worker.sampling.grammars": {"llguidance"},
    "triptych_services.worker.sampling.logits_processors.structured_outputs": {
        "llguidance",
        "torch",
        "numpy",
    },
    "triptych_services.worker.runner.startup.compile_ahead": {"torch", "triton"},
    "triptych_services.worker.service.servicer": {"grpc"},
    "triptych_services.worker.group.servicer": {"grpc"},
    "triptych_services.worker.group.messages": {"google"},
}
"""Package or module -> the third-party packages that it may import; the longest name that fits counts."""


def allowed_key(module: str) -> str:
    return max(
        (package for package in ALLOWED if f"{module}.".startswith(f"{package}.")), key=len, default=""
    )


def test_each_package_imports_only_the_third_party_packages_that_it_may():
    graph = grimp.build_graph(
        "triptych", "triptych_kernels", "triptych_services", include_external_packages=True, cache_dir=None
    )
    strangers = []
    for module in graph.modules:
        if graph.is_module_squashed(module):
            continue
        for imported in graph.find_modules_directly_imported_by(module):
            package = imported.split(".")[0]
            if not graph.is_module_squashed(imported) or package in sys.stdlib_module_names:
                continue
            if package not in ALLOWED.get(allowed_key(module), set()):
                strangers.append(f"{module} imports {package}")
    assert sorted(strangers) == []


BY_NAME = {
    "libs/triptych/__init__.py": "its public names, from triptych.client and triptych.types",
    "libs/triptych/vllm/__init__.py": "its public names, from its own package",
    "libs/triptych/cli/__init__.py": "one module per command, from its own package",
    "kernels/triptych_kernels/registry.py": "an implementation of an op, from its own package",
    "services/worker/attention/flash_attn.py": "a package that need not be installed",
    "services/worker/attention/flashinfer.py": "likewise",
    "libs/triptych/launcher/child.py": "the app of the service that it runs",
    "libs/triptych/checkpoint/families/registry.py": "a family's keys, from its own package or an installed one",
    "services/worker/models/registry.py": "a model family, from its own package",
    "services/worker/runner/startup/pooler.py": "a pooler, from an installed package",
}
"""File -> what it imports by a name that is put together at run time, out of sight of the checks."""


def test_nothing_else_is_imported_by_a_name_that_the_checks_cannot_read():
    found = set()
    for source in SOURCES:
        for path in (ROOT / source).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                name = ast.unparse(node.func).split(".")[-1] if isinstance(node, ast.Call) else ""
                if name in ("import_module", "__import__"):
                    found.add(str(path.relative_to(ROOT)))
    assert found == set(BY_NAME)


def modules_of(*packages: str) -> list[str]:
    """Every module of these packages, but __main__, which would run."""
    roots = {"triptych": "libs", "triptych_kernels": "kernels", "triptych_services": "libs"}
    names = []
    for package in packages:
        root = ROOT / roots[package.split(".")[0]]
        for path in (root / package.replace(".", "/")).rglob("*.py"):
            parts = path.relative_to(root).with_suffix("").parts
            names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return sorted(name for name in names if not name.endswith("__main__"))


IMPORT_BEHIND_A_WALL = """
import importlib, sys
class Wall:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in {blocked!r}:
            raise ModuleNotFoundError(name + ' is behind the wall', name=name)
sys.meta_path.insert(0, Wall())
for name in {modules!r}:
    importlib.import_module(name)
print(*sorted({{name.split('.')[0] for name in sys.modules}}))
"""


def import_without(blocked: set[str], modules: list[str]) -> set[str]:
    """Import `modules` in a fresh process that has no `blocked` packages; the top-level names it then has."""
    assert modules
    code = IMPORT_BEHIND_A_WALL.format(blocked=blocked, modules=modules)
    command = [sys.executable, "-c", code]
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}  # needs numpy
    result = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


def test_runner_and_kernels_import_on_a_bare_gpu_box():
    core = [
        f"triptych_services.worker.{name}"
        for name in ("runner", "models", "layers", "sampling", "attention", "loader")
    ]
    missing = GRPC | HTTP | {"prometheus_client", "tokenizers", "transformers"}
    # what needs transformers is imported for its models only
    fallback = "triptych_services.worker.models.fallback."
    modules = [name for name in modules_of(*core, "triptych_kernels") if not name.startswith(fallback)]
    import_without(missing, modules)


@pytest.mark.thorough
def test_tests_for_a_gpu_import_on_a_bare_box():
    """Or none of them would run: pytest gives up where one file cannot be imported."""
    files = [
        path.relative_to(ROOT).with_suffix("")
        for folder in ("tests/gpu", "tests/kernels/ops", "tests/kernels/triton", "tests/worker/gpu")
        for path in (ROOT / folder).rglob("test_*.py")
    ]
    loaded = import_without(set(), [".".join(file.parts) for file in files])
    assert not loaded & (GRPC - {"google"} | {"prometheus_client", "hypothesis", "xdist"})


def test_kernels_import_without_anything_of_ours():
    import_without(GRPC | {"triptych", "triptych_services", "numpy"}, modules_of("triptych_kernels"))


@pytest.mark.parametrize("service", ["frontend", "enginecore"])
def test_a_service_without_tensors_imports_without_torch(service):
    import_without({"torch", "triptych_kernels", "transformers"}, modules_of(f"triptych_services.{service}"))


def test_libs_import_without_torch_and_services():
    import_without(
        HTTP | {"torch", "transformers", "triptych_kernels", "triptych_services"}, modules_of("triptych")
    )


def test_importing_triptych_costs_nothing():
    """The public face is lazy: a script that asks for the version, or `--help`, loads no gRPC."""
    loaded = import_without(set(), ["triptych"])
    assert not loaded & (GRPC | {"numpy", "torch", "tokenizers", "yaml"})


def test_types_and_errors_need_numpy_alone():
    loaded = import_without(set(), [*modules_of("triptych.types"), "triptych.errors"])
    plain = import_without(set(), ["numpy.typing", "dataclasses"])
    assert loaded - plain - set(sys.stdlib_module_names) == {"triptych"}


@pytest.mark.parametrize(
    ("module", "lazy"),
    [
        (
            "triptych_services.worker.parallel.create",
            "triptych_services.worker.parallel.process_group",
        ),  # not in every torch
        ("triptych.hub.resolve", "triptych.hub.embedded"),
        ("triptych.hub.resolve", "triptych.hub.gguf_convert"),
    ],
)
def test_start_imports_only_what_it_needs(module: str, lazy: str):
    code = f"import sys, {module}; print({lazy!r} in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]
