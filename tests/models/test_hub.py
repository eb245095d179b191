"""The hub's names, against a small hub of our own on the loopback."""

import hashlib
import http.server
import importlib
import json
import re
import sys
import threading
from typing import cast

import equinox as eqx
import jax
import pytest
from safetensors import numpy as safetensors

from tanager import models
from tanager.models import exported, hub


COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAME = "hf:ours/small"


class Hub(http.server.ThreadingHTTPServer):
    """Serves `files` by path as the Hub does, and keeps the Range header of each GET.

    The connection breaks at the byte `limit`, `breaks` times (None: every time).
    """

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.ranges, self.limit = {}, [], None
        self.breaks = None

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    @property
    def hub(self):
        return cast(Hub, self.server)

    def log_message(self, format, *args):
        pass

    def do_HEAD(self):
        self._answer(with_body=False)

    def do_GET(self):
        self._answer(with_body=True)

    def _answer(self, with_body):
        match = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self.path)
        if not match:  # its API, of other questions than these
            return self._refuse(404, "NotFound")
        if with_body:
            self.hub.ranges.append(self.headers["Range"])
        repository, revision, file = match.groups()
        if repository == "ours/gated":
            return self._refuse(403, "GatedRepo")
        if repository != "ours/small":
            return self._refuse(401, "RepoNotFound")
        if revision not in ("main", COMMIT):
            return self._refuse(404, "RevisionNotFound")
        if file not in self.hub.files:
            return self._refuse(404, "EntryNotFound")
        content = self.hub.files[file]
        start = int((self.headers["Range"] or "bytes=0-")[6:-1])
        self.send_response(206 if start else 200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("Content-Length", str(len(content) - start))
        if start:
            whole = len(content)
            self.send_header("Content-Range", f"bytes {start}-{whole - 1}/{whole}")
        self.end_headers()
        if with_body:
            breaks = self.hub.breaks is None or len(self.hub.ranges) <= self.hub.breaks
            self.wfile.write(content[start : self.hub.limit if breaks else None])
        return None

    def _refuse(self, status, code):
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


@pytest.fixture
def server(tmp_path, monkeypatch):
    """Return our hub, asked instead of huggingface.co, with an empty cache."""
    constants = importlib.import_module("huggingface_hub.constants")
    ours = Hub()
    thread = threading.Thread(target=ours.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        template.replace(constants.ENDPOINT, ours.url),
    )
    monkeypatch.setattr(constants, "ENDPOINT", ours.url)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    yield ours
    ours.shutdown()
    ours.server_close()
    thread.join()


def model(seed):
    return models.SmallCNN(5, (8, 8, 3), key=jax.random.key(seed))


@pytest.fixture
def content(tmp_path):
    models.save_weights(model(0), tmp_path / "small.safetensors")
    return (tmp_path / "small.safetensors").read_bytes()


def test_a_model_loads_by_name_and_comes_from_the_cache_afterwards(server, content):
    server.files["model.safetensors"] = content
    loaded, origin = models.load_weights(model(1), NAME)
    assert eqx.tree_equal(loaded, model(0))
    assert origin["weights"] == NAME
    assert origin["sha256"] == hashlib.sha256(content).hexdigest()
    models.load_weights(model(1), f"{NAME}@{COMMIT}")
    models.load_weights(model(1), f"{NAME}@main:model.safetensors")
    assert server.ranges == [None]


@pytest.mark.parametrize("folder", ["", "weights/"])
def test_weights_in_several_files_load_by_name(server, content, folder):
    tensors = safetensors.load(content)
    shards = {}
    for n, (name, array) in enumerate(tensors.items()):
        shards.setdefault(f"model-{n % 2}.safetensors", {})[name] = array
    for shard, held in shards.items():
        server.files[folder + shard] = safetensors.save(held)
    mapped = {name: shard for shard, held in shards.items() for name in held}
    index = json.dumps({"metadata": {}, "weight_map": mapped}).encode()
    server.files[f"{folder}model.safetensors.index.json"] = index
    name = f"{NAME}:{folder}model.safetensors.index.json" if folder else NAME
    loaded, origin = models.load_weights(model(1), name)
    assert eqx.tree_equal(loaded, model(0))
    assert len(server.ranges) == 3
    whole = index + b"".join(server.files[folder + shard] for shard in sorted(shards))
    assert origin["sha256"] == hashlib.sha256(whole).hexdigest()
    server.shutdown()
    server.server_close()
    again = models.load_weights(model(1), name)  # from the cache, without the network
    assert again.origin == origin


def test_timms_own_names_are_understood(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    name = "timm/vit_base_patch16_224.augreg_in21k"
    assert hub.full_name(name) == f"hf:{name}"
    assert hub.full_name(f"{name}@main:a.npz") == f"hf:{name}@main:a.npz"
    for other in ("timmy/a", "my/timm/a", "timm/a/b.safetensors", tmp_path):
        assert hub.full_name(other) == other
    (tmp_path / "timm").mkdir()
    (tmp_path / name).touch()
    assert hub.full_name(name) == name


def test_a_name_of_timms_is_on_record_as_one_of_the_hub(server, content, monkeypatch):
    server.files["model.safetensors"] = content
    monkeypatch.setattr(hub, "full_name", lambda _: NAME)
    origin = models.load_weights(model(1), "timm/small").origin
    assert origin["weights"] == NAME


def test_a_broken_connection_is_resumed_where_it_stopped(server, content):
    server.files["model.safetensors"] = content
    half = len(content) // 2000 * 1000
    server.limit, server.breaks = half + 10, 1
    assert hub.download(NAME).read_bytes() == content
    assert server.ranges == [None, f"bytes={half}-"]


def test_an_interrupted_download_says_what_to_do(server, content, tmp_path):
    server.files["model.safetensors"] = content
    server.limit = 10
    with pytest.raises(OSError, match="the download was interrupted") as broken:
        hub.download(NAME)
    assert "; run the command again, or download https://" in str(broken.value)
    assert not [*(tmp_path / "cache").rglob("*.safetensors")]
    server.limit = None
    assert hub.download(NAME).read_bytes() == content


def test_a_file_with_another_digest_is_deleted(server, content):
    server.files["model.safetensors"] = content
    path = hub.download(NAME)
    path.resolve().write_bytes(b"something else")
    with pytest.raises(OSError, match=r"is damaged .* was deleted; run the command"):
        hub.download(NAME)
    assert hub.download(NAME).read_bytes() == content
    assert len(server.ranges) == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hf:ours/other", "is not on the Hub: check the spelling"),
        ("hf:ours/gated", "is not open to everyone: ask for access"),
        (f"{NAME}@old", "has no revision old: leave out @REVISION"),
        (f"{NAME}:pytorch_model.bin", "has no file pytorch_model.bin: name another"),
        (NAME, "has no file model.safetensors: name another one after a colon; if"),
    ],
)
def test_what_the_hub_does_not_give_is_refused_by_name(server, name, message):
    with pytest.raises(ValueError, match=re.escape(f"weights (={name!r}) {message}")):
        hub.download_weights(name)


def test_without_the_network_the_cache_serves_or_one_message_comes(server, content):
    server.files["model.safetensors"] = content
    path = hub.download(NAME)
    server.shutdown()
    server.server_close()
    assert hub.download(NAME) == path
    assert path.read_bytes() == content
    with pytest.raises(OSError, match="the Hub is unreachable") as refused:
        hub.download(f"{NAME}@v2")
    assert (
        "download https://huggingface.co/ours/small/resolve/v2/model.safetensors by "
        "hand and give the path of that file"
    ) in str(refused.value)


def test_a_hub_that_never_answers_is_waited_for_once(monkeypatch, tmp_path):
    constants = importlib.import_module("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    waits = []

    class Silent:
        def head(self, url, timeout):
            waits.append(timeout)
            raise TimeoutError

    monkeypatch.setattr("huggingface_hub.get_session", Silent)
    with pytest.raises(OSError, match="the Hub is unreachable"):
        hub.download_weights("hf:timm/resnet50.a1_in1k")
    assert waits == [3.0]


def test_without_the_package_the_way_by_hand_is_shown(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(
        ValueError, match="needs the package huggingface_hub"
    ) as refused:
        models.load_weights(model(0), NAME)
    assert "pip install huggingface_hub; or download https://hugg" in str(refused.value)


@pytest.mark.parametrize(
    "name", ["hf:", "hf:one", "hf:a/b/c", "hf:a/../b", "hf:a/b:../../x", "hf:a/b@"]
)
def test_other_forms_of_a_name_are_refused(name):
    with pytest.raises(ValueError, match="must be hf:OWNER/REPOSITORY"):
        hub.parse(name)


def test_the_name_of_a_model_is_refused_as_such():
    """`tanager predict` has no weights to name."""
    with pytest.raises(ValueError, match=r"^source \(='hf:foo'\) must be hf:OWNER"):
        exported.describe("hf:foo")


def test_a_name_says_repository_revision_and_file():
    assert hub.parse("hf:a/b.c_d-e") == ("a/b.c_d-e", "main", "model.safetensors")
    assert hub.parse("hf:a/b@v1:x/y.npz") == ("a/b", "v1", "x/y.npz")
    assert not hub.is_hub_name("a/b") and not hub.is_hub_name(None)
