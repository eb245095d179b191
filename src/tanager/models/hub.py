"""Weights by name from the Hugging Face Hub.

``hf:OWNER/REPOSITORY``, optionally ``@REVISION`` and ``:FILE``. huggingface_hub
downloads into its own cache (`HF_HOME`), shows progress, and retries a broken
connection from where it stopped. A second use asks only whether there is a newer file.
"""

import contextlib
import functools
import hashlib
import os
import re
import threading
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from tanager import _validate as validate
from tanager.models.tensors import INDEX, SAFETENSORS, files_of


_NAME = re.compile(
    r"hf:(?P<repository>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?(?::(?P<file>.+))?"
)
_SHA256 = re.compile("[0-9a-f]{64}")
_SECONDS = 3.0  # for the Hub to answer
_TIMM = re.compile(r"timm/[\w.-]+([@:].+)?")


class HubFile(NamedTuple):
    """One file of a repository ``OWNER/NAME`` at a branch, tag or commit."""

    repository: str
    revision: str
    file: str


def is_hub_name(weights: object) -> bool:
    """Return whether `weights` is a name on the Hub."""
    return isinstance(weights, str) and weights.startswith("hf:")


def full_name(source: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Return ``timm/NAME`` with ``hf:`` before it, unless there is such a path."""
    if not isinstance(source, str) or not _TIMM.fullmatch(source):
        return source
    return source if Path(source).exists() else f"hf:{source}"


def parse(name: str, file: str = SAFETENSORS, argument: str = "weights") -> HubFile:
    """Return the file of ``hf:OWNER/REPOSITORY[@REVISION][:FILE]``, or else `file`."""
    match = _NAME.fullmatch(name)
    if not match or ".." in name:
        rule = "must be hf:OWNER/REPOSITORY[@REVISION][:FILE]"
        such = "such as hf:timm/vit_base_patch16_224.augreg_in21k"
        validate.refuse(argument, name, rule, such * (argument == "weights"))
    repository, revision, named_file = match.groups()
    return HubFile(repository, revision or "main", named_file or file)


def beside(name: str, file: str) -> str:
    """Return the name of another file of the same repository and revision."""
    wanted = parse(name)
    return f"hf:{wanted.repository}@{wanted.revision}:{file}"


def download_weights(name: str) -> Path:
    """Download all files of weights, and return the path of the one, or of the index.

    A name without a file is of ``model.safetensors``, or, if there is none, of what
    ``model.safetensors.index.json`` names.
    """
    path = download(name, SAFETENSORS, INDEX)
    file = PurePosixPath(parse(name, INDEX).file)
    for shard in files_of(path)[1:]:
        download(beside(name, str(file.with_name(shard.name))))
    return path


def download(name: str, file: str = SAFETENSORS, *others: str) -> Path:
    """Download a file of the Hub unless it is in the cache, and return its path.

    Args:
        name: see `parse`.
        file: see `parse`.
        others: looked for in turn if the name has no file, and `file` is not there.

    Raises:
        ValueError: the name has another form, huggingface_hub is not installed, the
            Hub has no such file, or access to it is restricted.
        OSError: the Hub is unreachable and the cache has no copy, the download was
            interrupted, or the file has another digest than the Hub states.
    """
    wanted = parse(name, file)
    url = "https://huggingface.co/{}/resolve/{}/{}".format(*wanted)
    by_hand = f"download {url} by hand and give the path of that file"
    try:
        from huggingface_hub import errors, hf_hub_download
    except ImportError:
        remedy = f"pip install huggingface_hub; or {by_hand}"
        validate.refuse("weights", name, "needs the package huggingface_hub", remedy)
    cached_only = not _answers()

    def first(files: list[str]) -> str:
        missing = []
        for each in files:
            try:
                return hf_hub_download(
                    wanted.repository,
                    each,
                    revision=wanted.revision,
                    library_name="tanager",
                    local_files_only=cached_only,
                )
            except errors.EntryNotFoundError as error:
                missing.append(error)
        raise missing[0]

    refuse = functools.partial(validate.refuse, "weights", name)
    try:
        path = first([wanted.file, *(others if wanted.file == file else ())])
    except errors.GatedRepoError:  # which is a repository that was not found, too
        refuse("is not open to everyone", "ask for access, then `hf auth login`")
    except errors.RepositoryNotFoundError:
        refuse("is not on the Hub", "check the spelling, and `hf auth login`")
    except errors.RevisionNotFoundError:
        refuse(f"has no revision {wanted.revision}", "leave out @REVISION")
    except errors.RemoteEntryNotFoundError:
        remedy = "name another one after a colon; if there are only pickled weights "
        remedy += "(.bin, .pth), download them by hand and give their path: the "
        remedy += "message then has the command that converts them"
        refuse(f"has no file {wanted.file}", remedy)
    except errors.LocalEntryNotFoundError as error:
        raise OSError(
            f"cannot download {name}: the Hub is unreachable (or HF_HUB_OFFLINE is "
            f"set) and the cache has no copy; {by_hand}"
        ) from error
    except (ValueError, TypeError, AttributeError, ImportError):
        raise
    except Exception as error:  # of the disk, the network, or an HTTP library
        raise OSError(
            f"cannot download {name}: the download was interrupted "
            f"({type(error).__name__}: {error}); run the command again, or {by_hand}"
        ) from error
    _check_digest(Path(path), name)
    return Path(path)


def _answers() -> bool:
    """Return whether the Hub answers: its package would try again for half a minute.

    The thread is for names that take longer than that to be looked up.
    """
    from huggingface_hub import constants, get_session

    answers = []

    def ask() -> None:
        with contextlib.suppress(Exception):
            get_session().head(constants.ENDPOINT, timeout=_SECONDS)
            answers.append(True)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_SECONDS)
    return bool(answers)


def _check_digest(path: Path, name: str) -> None:
    """Delete a file that has another digest than the Hub states, and refuse it."""
    blob = path.resolve()  # the cache names large files by their SHA-256
    if not _SHA256.fullmatch(blob.name):
        return
    digest = sha256(blob)
    if digest != blob.name:
        blob.unlink()
        raise OSError(
            f"cannot download {name}: the file is damaged (its SHA-256 is {digest}, "
            f"the Hub states {blob.name}) and was deleted; run the command again"
        )


def sha256(*paths: Path) -> str:
    """Return the SHA-256 of files one after the other, in hexadecimal."""
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()
