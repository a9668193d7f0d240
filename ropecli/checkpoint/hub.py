"""Downloads a checkpoint from the Hub, or finds it in the Hub's cache, and explains failures.

If the Hub does not answer, or HF_HUB_OFFLINE is set, only the cache is used.
"""

from pathlib import Path
from typing import Any

from ropecli.checkpoint import files
from ropecli.errors import CheckpointError, quoted, reason_of

_ALLOWED = [*files.CHECKPOINT_FILES, files.CODE, files.PROVENANCE]
_CONFIGS = [files.CONFIG, files.TOKENIZER_CONFIG, files.PROVENANCE]
_IGNORED = ["*/*", *files.MISTRAL_FORMAT]
DEFAULT_REVISION = "main"
PATIENCE = 10.0  # seconds for the Hub's first answer


def fetch(name: str, revision: str | None, *, weights: bool, tokenizer: bool = False) -> Path:
    """Download the config files of `name`, with `tokenizer` all but the weights, with `weights` all files.

    Returns the folder, which has the name of the commit. Raises CheckpointError.
    """
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # no line for each retry
    problem, is_partial = None, False
    try:  # before the download, because the client's downloads retry for half a minute without a network
        HfApi().model_info(name, revision=revision, timeout=PATIENCE)
    except Exception as error:  # errors of the Hub, the network, proxies, certificates
        problem = error
    options: dict[str, Any] = {"revision": revision, "local_files_only": problem is not None}
    options["allow_patterns"] = _ALLOWED if weights or tokenizer else _CONFIGS
    options["ignore_patterns"] = _IGNORED if weights else [*_IGNORED, files.WEIGHTS]
    try:
        folder = Path(snapshot_download(name, **options))
        has_needed = files.weights_in(folder) if weights else tokenizer or (folder / files.CONFIG).exists()
        if is_partial := bool(not has_needed and (problem or not weights)):
            raise FileNotFoundError
    except Exception as error:  # the Hub client raises many kinds; each means that there is no folder
        cached = "only partly" if is_partial or hasattr(error, "snapshot_path") else "not"
        reason = _explain(name, revision, problem or error, f"{cached} in the Hub's cache ({constants.HF_HUB_CACHE})")
        raise CheckpointError(f"{name} is not a local folder, {reason}") from (problem or error)
    return folder


def _explain(name: str, revision: str | None, error: Exception, cached: str) -> str:
    """The rest of a message: what is missing, and the next step."""
    from huggingface_hub import constants, errors

    named = quoted(name, *(["--revision", revision] if revision else []))
    login = "log in with `hf auth login`"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return f"{cached}, and HF_HUB_OFFLINE is set. Unset it, or download the model first: hf download {named}"
    if isinstance(error, errors.GatedRepoError):
        return f"and it is gated on the Hub. Request access at {constants.ENDPOINT}/{name}, then {login}."
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"and it was not found on the Hub. Check the name; if it is private, {login}."
    if isinstance(error, errors.RevisionNotFoundError):
        return f"and it has no revision {revision} on the Hub. Set --revision to a branch, tag or commit."
    if type(error) is FileNotFoundError:  # of fetch
        return f"and it has no {files.CONFIG} on the Hub. Repositories of adapters or GGUF files are not supported."
    if isinstance(error, errors.HfHubHTTPError):
        status = error.response.status_code
        step = f"Check your token, or {login}." if status in (401, 403) else "Try again later."
        return f"{cached}, and the Hub answered with status {status}. {step}"
    if isinstance(error, errors.HTTPError):  # errors of the HTTP client: connection, DNS, certificates
        reason = f"{cached}, and {constants.ENDPOINT} cannot be reached: {reason_of(error)}"
        return f"{reason}. Check network and proxies, or give a folder."
    return f"and the download from the Hub failed: {reason_of(error)}"
