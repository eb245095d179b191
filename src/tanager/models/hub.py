"""Weights by name from the Hugging Face Hub.

``hf:OWNER/REPOSITORY``, optionally ``@REVISION`` and ``:FILE``. Files are kept in
Hugging Face's own cache (`HF_HOME`): a second use asks only whether there is a newer
one, an interrupted download goes on where it stopped, and progress is shown.
"""

import fcntl
import hashlib
import re
import urllib.parse
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from tanager import _validate as validate


_NAME = re.compile(
    r"hf:(?P<repository>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?(?::(?P<file>.+))?"
)
_SHA256 = re.compile("[0-9a-f]{64}")


class HubFile(NamedTuple):
    """One file on the hub.

    Attributes:
        repository: ``OWNER/NAME``.
        revision: branch, tag or commit.
        file: its path in the repository.
    """

    repository: str
    revision: str
    file: str

    @property
    def url(self) -> str:
        """Where a person can download it."""
        return (
            f"https://huggingface.co/{self.repository}/resolve/{self.revision}/"
            f"{self.file}"
        )


def is_hub_name(weights: object) -> bool:
    """Return whether weights are asked for by a name of the hub."""
    return isinstance(weights, str) and weights.startswith("hf:")


def parse(name: str, file: str = "model.safetensors") -> HubFile:
    """Return which file a name stands for.

    Args:
        name: ``hf:OWNER/REPOSITORY[@REVISION][:FILE]``.
        file: meant where the name says none.

    Raises:
        ValueError: the name has another form.
    """
    match = _NAME.fullmatch(name)
    if not match or ".." in name:
        validate.refuse(
            "weights",
            name,
            "must be hf:OWNER/REPOSITORY[@REVISION][:FILE]",
            "such as hf:timm/vit_base_patch16_224.augreg_in21k",
        )
    repository, revision, named_file = match.groups()
    return HubFile(repository, revision or "main", named_file or file)


def download(name: str, file: str = "model.safetensors") -> Path:
    """Return the local copy of a file of the hub, downloaded where it is not there.

    Args:
        name: see `parse`.
        file: see `parse`.

    Raises:
        ValueError: the name has another form, huggingface_hub is not installed, or the
            hub has no such file, or not for everyone.
        OSError: the hub is unreachable and its cache has no copy, or the download was
            interrupted; the same call resumes it.
    """
    wanted = parse(name, file)
    try:
        import huggingface_hub  # pyright: ignore[reportMissingImports]
        from huggingface_hub import errors  # pyright: ignore[reportMissingImports]
    except ImportError:
        validate.refuse(
            "weights",
            name,
            "needs the package huggingface_hub",
            f"pip install huggingface_hub; or {_by_hand(wanted)}",
        )
    try:
        _fetch(wanted)
        path = huggingface_hub.hf_hub_download(
            wanted.repository,
            wanted.file,
            revision=wanted.revision,
            library_name="tanager",
        )
    except errors.GatedRepoError:
        _refuse(name, "is not open to everyone", "ask for access, then `hf auth login`")
    except errors.RepositoryNotFoundError:
        _refuse(name, "is not on the hub", "mind the spelling, and `hf auth login`")
    except errors.RevisionNotFoundError:
        _refuse(name, f"has no revision {wanted.revision}", "leave @REVISION away")
    except errors.RemoteEntryNotFoundError:
        _refuse(
            name,
            f"has no file {wanted.file}",
            "name another one after a colon; pickled weights (.bin, .pth) are not read",
        )
    except errors.LocalEntryNotFoundError as error:
        raise OSError(
            f"cannot download {name}: the hub is unreachable (or HF_HUB_OFFLINE is "
            f"set) and its cache has no copy: {_by_hand(wanted)}"
        ) from error
    except Exception as error:
        if not _is_network_trouble(error):
            raise
        raise OSError(
            f"the download of {name} was interrupted ({type(error).__name__}: {error})"
            f": run the command again to resume it; or {_by_hand(wanted)}"
        ) from error
    return Path(path)


def _fetch(wanted: HubFile) -> None:
    """Bring a file into Hugging Face's cache, going on with what came before.

    huggingface_hub resumes within one call only: what a killed process had is lost. So
    the file is first brought to where `hf_hub_download` looks for it: ``blobs/`` of the
    repository in the cache, under the name of its ETag.
    """
    from huggingface_hub import (  # pyright: ignore[reportMissingImports]
        constants,
        get_hf_file_metadata,
        hf_hub_url,
    )
    from huggingface_hub.file_download import (  # pyright: ignore[reportMissingImports]
        http_get,
        repo_folder_name,
    )
    from huggingface_hub.utils import (  # pyright: ignore[reportMissingImports]
        build_hf_headers,
    )

    url = hf_hub_url(wanted.repository, wanted.file, revision=wanted.revision)
    try:
        found = get_hf_file_metadata(url, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception as error:
        if _is_unreachable(error):
            return  # hf_hub_download knows what is in the cache, or says so
        raise
    if not found.etag or not found.size:
        return
    repository = repo_folder_name(repo_id=wanted.repository, repo_type="model")
    blob = Path(constants.HF_HUB_CACHE) / repository / "blobs" / found.etag
    blob.parent.mkdir(parents=True, exist_ok=True)
    partial = blob.with_name(f"{found.etag}.tanager.incomplete")
    if blob.exists():
        return
    with open(partial, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return  # another process is at it: hf_hub_download takes a file of its own
        if blob.exists():
            return
        if file.tell() > found.size:
            file.truncate(0)
            file.seek(0)
        headers = build_hf_headers(library_name="tanager")
        host, target = (urllib.parse.urlsplit(u).netloc for u in (url, found.location))
        if host != target:  # a token is for the hub alone
            headers.pop("authorization", None)
        http_get(
            found.location,
            file,
            resume_size=file.tell(),
            headers=headers,
            expected_size=found.size,
            displayed_filename=wanted.file,
        )
        file.flush()
        if _SHA256.fullmatch(found.etag) and _digest(partial) != found.etag:
            partial.unlink()
            raise OSError("it did not arrive as it was sent, and was thrown away")
        partial.rename(blob)


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _refuse(name: str, rule: str, remedy: str) -> NoReturn:
    validate.refuse("weights", name, rule, remedy)


def _by_hand(wanted: HubFile) -> str:
    return f"download {wanted.url} by hand and give the path of that file"


def _is_network_trouble(error: Any) -> bool:
    """Return whether the disk, the network or an HTTP library raised it."""
    library = type(error).__module__.partition(".")[0]
    names = ("httpx", "httpcore", "requests", "urllib3")
    return isinstance(error, OSError) or library.startswith(names)


def _is_unreachable(error: Any) -> bool:
    from huggingface_hub import errors  # pyright: ignore[reportMissingImports]

    if isinstance(error, errors.HfHubHTTPError):
        return error.response.status_code >= 500
    return _is_network_trouble(error)
