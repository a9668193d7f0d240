"""Fetches a checkpoint from the Hub, or finds it in the Hub's cache. Owns what is fetched, and how a failure is said.

Where the Hub does not answer, or is switched off by HF_HUB_OFFLINE, the cache alone is looked into.
"""

import contextlib
from pathlib import Path
from typing import NamedTuple

from ropecli.checkpoint.files import CHECKPOINT_FILES, CODE, CONFIG, PROVENANCE, TOKENIZER_CONFIG, WEIGHTS
from ropecli.errors import CheckpointError, reason_of

_ALL = [*CHECKPOINT_FILES, CODE, PROVENANCE]
_NONE_OF = ["*/*", "consolidated*"]
_PATIENCE = 10.0  # seconds for the Hub's first answer


class Fetched(NamedTuple):
    """folder: where the files are. revision, commit: of a Hub id, what was asked for and what it stood for."""

    folder: Path
    revision: str | None = None
    commit: str | None = None


def fetch(name: str, revision: str | None, *, weights: bool) -> Fetched:
    """The folder in the Hub's cache that holds the config files of `name`, or with `weights` all its files.

    Raises CheckpointError.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import IncompleteSnapshotError
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # five retries are not worth a line each
    problem = _ask(name, revision)
    get = _get_all if weights else _get_configs
    try:
        folder = get(name, revision, cached_only=problem is not None)
        if problem and weights and not any(folder.glob(WEIGHTS)):
            raise IncompleteSnapshotError("no weights", str(folder))
    except Exception as error:  # the Hub client raises many kinds; each means that the name gave no folder
        kept = "only in part" if isinstance(error, IncompleteSnapshotError) else "not"
        explained = _explain(name, revision, problem or error, f"{kept} in the Hub's cache ({constants.HF_HUB_CACHE})")
        raise CheckpointError(f"{name} is no folder here, {explained}") from (problem or error)
    return Fetched(folder, revision or constants.DEFAULT_REVISION, folder.name)


def _ask(name: str, revision: str | None) -> Exception | None:
    """Why the Hub does not give `name`; None where it does.

    Asked before anything is fetched, because the client's downloads try a silent network for half a minute.
    """
    from huggingface_hub import HfApi

    try:
        HfApi().model_info(name, revision=revision, timeout=_PATIENCE)
    except Exception as error:  # those of the Hub, of the network, of proxies and certificates
        return error
    return None


def _get_configs(name: str, revision: str | None, *, cached_only: bool) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError, RemoteEntryNotFoundError

    absent = LocalEntryNotFoundError if cached_only else RemoteEntryNotFoundError
    folder = Path(hf_hub_download(name, CONFIG, revision=revision, local_files_only=cached_only)).parent
    for beside in (TOKENIZER_CONFIG, PROVENANCE):
        with contextlib.suppress(absent):  # not every checkpoint has them
            hf_hub_download(name, beside, revision=folder.name, local_files_only=cached_only)
    return folder


def _get_all(name: str, revision: str | None, *, cached_only: bool) -> Path:
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            name, revision=revision, allow_patterns=_ALL, ignore_patterns=_NONE_OF, local_files_only=cached_only
        )
    )


def _explain(name: str, revision: str | None, error: Exception, cached: str) -> str:
    """The rest of a sentence that says what is missing, and the next step."""
    from huggingface_hub import constants, errors

    named = f"{name} --revision {revision}" if revision else name
    login = "log in with `hf auth login`"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return f"{cached}, and HF_HUB_OFFLINE forbids to fetch it. Unset that, or fill the cache: hf download {named}."
    if isinstance(error, errors.GatedRepoError):
        return f"and gated on the Hub. Ask for access at {constants.ENDPOINT}/{name}, then {login}."
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"and the Hub has no such model, or hides it. Check the name; if it is private, {login}."
    if isinstance(error, errors.RevisionNotFoundError):
        return f"and on the Hub it has no revision {revision}. Give --revision a branch, a tag or a commit of it."
    if isinstance(error, errors.RemoteEntryNotFoundError):
        return f"and on the Hub it has no {CONFIG}. A repository of adapters or GGUF files is no checkpoint."
    if isinstance(error, errors.HfHubHTTPError):
        status = error.response.status_code
        step = f"Check your token, or {login}." if status in (401, 403) else "Try again later."
        return f"{cached}, and the Hub answers with status {status}. {step}"
    if isinstance(error, errors.HTTPError):  # the HTTP client's own: no connection, no name, no certificate
        return f"{cached}, and {constants.ENDPOINT} cannot be reached: {reason_of(error)}. Check network and proxies."
    return f"and the Hub did not give it: {reason_of(error)}"
