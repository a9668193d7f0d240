"""Uploads the files of a checkpoint to the Hub, and explains failures.

Weights are uploaded one by one and committed together at the end, so a repository never has half a checkpoint. After an
interruption, the Hub recognizes what it has and only the rest is sent. Weights that the base model's repository has
are copied there, by the Hub.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ropecli.checkpoint.files import (
    ADAPTER_CONFIG,
    CONFIG,
    FACTORS,
    PROVENANCE,
    PUBLIC_FILES,
    TUNING,
    WEIGHTS,
    is_of_mistral,
    is_own_file,
)
from ropecli.checkpoint.hub import BAD_TOKEN
from ropecli.checkpoint.opening import HUB_ID, Checkpoint, open_checkpoint
from ropecli.checkpoint.provenance import entry
from ropecli.errors import OutputError, RopecliError, quoted, reason_of, shortened, shown

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, HfApi

_AGAIN = "Run the same command again: it sends only what the Hub does not have."
_LONGEST_CHAIN = 8
_PATIENCE = 10.0
"""Seconds for the Hub's first answer."""


class Source(NamedTuple):
    """A repository on the Hub. revision: a commit, None for the default branch."""

    repo: str
    revision: str | None


class PushedFile(NamedTuple):
    """size: bytes. status: uploaded, copied (by the Hub, from the base model), or unchanged (the Hub had it)."""

    name: str
    size: int
    status: str


@dataclass(frozen=True)
class Upload:
    """commit: None if the Hub had all files. private: whether the repository is private."""

    commit: str | None
    private: bool
    files: tuple[PushedFile, ...]


def files_to_push(
    checkpoint: Checkpoint, include: Sequence[str] = (), say: Callable[[str], None] = lambda message: None
) -> dict[str, Path]:
    """The files of a checkpoint that belong on the Hub, ropecli.yaml and tune.json, by name.

    include: patterns of other files in the folder. say: called with the files that look like those of a checkpoint and
    are not among them. Raises OutputError for a pattern without a file, and for files that readers of the repository
    would read in place of config.json.
    """
    if is_own_file(checkpoint.folder / ADAPTER_CONFIG):
        raise OutputError(
            f"{checkpoint.folder} has {ADAPTER_CONFIG} beside a whole model: from the Hub, transformers would load the "
            f"base model that it names, in place of {CONFIG}. Move it to another folder."
        )
    folder, files = checkpoint.folder, [path for path in checkpoint.files() if not path.name.startswith(".")]
    written = [path for name in (CONFIG, PROVENANCE, TUNING, FACTORS) if is_own_file(path := folder / name)]
    public = {path.name: path for path in [*written, *filter(_is_public, files)]}
    for pattern in include:
        names = glob(pattern, root_dir=folder, recursive=True)  # noqa: PTH207, Path.glob refuses some patterns
        added = {name: folder / name for name in names if (folder / name).is_file()}
        added = {name: path for name, path in added.items() if path.resolve().is_relative_to(folder.resolve())}
        if not added:
            raise OutputError(f"--include is {shown(pattern)}, but {folder} has no such file.")
        if other := next((name for name, path in added.items() if is_of_mistral(path)), None):
            raise OutputError(
                f"--include is {shown(pattern)}, which has {other}: vLLM would read it in place of {CONFIG}."
            )
        public |= added
    for warning in checkpoint.skip_warnings():
        say(warning)
    if others := [path.name for path in files if path.name not in public]:
        say(f"Not uploaded: {shortened(', '.join(others), 200)}. To upload one of them, add --include NAME.")
    return public


def _is_public(path: Path) -> bool:
    name = path.name.lower()
    return any(fnmatch(name, pattern) for pattern in PUBLIC_FILES) and not name.startswith("optimizer")


def hub_origin(record: dict[str, Any]) -> Source | None:
    """The repository that a checkpoint was made from, also by way of local folders that still exist.

    record: of ropecli.yaml. None if it is unknown.
    """
    for _ in range(_LONGEST_CHAIN):
        origin = (
            entry(record, "source")
            or entry(entry(record, "finetuned"), "source")
            or entry(entry(record, "merged"), "base")
        )
        name, commit = str(origin.get("checkpoint")), origin.get("commit")
        if commit and HUB_ID.fullmatch(name):
            return Source(name, str(commit))
        try:
            source = open_checkpoint(name) if Path(name).expanduser().is_dir() else None
            if source is None or origin.get("digest") != source.digest():
                return None
        except (RopecliError, OSError, RuntimeError):
            return None
        record = source.record
    return None


def refuse_repo(repo: str, option: str) -> None:
    """Raise OutputError unless `repo`, given with `option`, is owner/name."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
        if not HUB_ID.fullmatch(repo):
            raise HFValidationError
    except HFValidationError as error:
        raise OutputError(f"{option} is {shown(repo)}; expected owner/name, such as my-name/my-model-128k.") from error


def upload(
    files: Mapping[str, Path | bytes],
    repo: str,
    *,
    public: bool,
    message: str,
    base: Source | None = None,
    say: Callable[[str], None] = lambda message: None,
) -> Upload:
    """Upload files, by their names in the repository, in one commit. Creates the repository if there is none.

    base: where to copy equal weights from. say: called for each weight file that is uploaded. Raises OutputError.
    """
    from huggingface_hub import HfApi, constants, get_token
    from huggingface_hub.utils import logging

    token = get_token()
    if constants.HF_HUB_OFFLINE:
        raise OutputError("HF_HUB_OFFLINE is set, so nothing can be uploaded. Unset it, or use --dry-run.")
    if not token:
        raise OutputError("Uploading needs a token with write access. Log in with `hf auth login`, or set HF_TOKEN.")
    logging.set_verbosity_error()  # no line for each retry
    api = HfApi()
    try:
        private = _prepare_repo(api, repo, public)
        _validate_card(bytes(files["README.md"]).decode())  # before hours of uploading
        return _upload(api, files, repo, private, message, base, say)
    except RopecliError:
        raise
    except Exception as error:  # errors of the Hub, the network, certificates, storage
        # without the client's error, which may contain what was sent
        raise OutputError(_explain(repo, error).replace(token, "<token>")) from None


def _validate_card(content: str) -> None:
    """Let the Hub check the metadata. Raises OutputError."""
    # not by ModelCard.validate, which ignores HF_ENDPOINT in huggingface_hub 1.33
    from huggingface_hub import constants
    from huggingface_hub.errors import BadRequestError
    from huggingface_hub.utils import get_session, hf_raise_for_status

    url = f"{constants.ENDPOINT}/api/validate-yaml"
    try:
        hf_raise_for_status(get_session().post(url, json={"repoType": "model", "content": content}))
    except BadRequestError as error:
        why = error.server_message or reason_of(error)
        raise OutputError(f"The Hub refused the metadata of README.md: {why}. Correct them in the folder.") from None


def _prepare_repo(api: "HfApi", repo: str, public: bool) -> bool:
    """Create the repository if there is none. Returns whether it is private. Raises OutputError for a public one."""
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        private = bool(api.model_info(repo, timeout=_PATIENCE).private)
    except RepositoryNotFoundError:
        api.create_repo(repo, private=not public, exist_ok=True)
        return not public
    if not (private or public):
        raise OutputError(f"{repo} is public. Add --public to publish there, or choose another --repo.")
    return private


def _upload(
    api: "HfApi",
    files: Mapping[str, Path | bytes],
    repo: str,
    private: bool,
    message: str,
    base: Source | None,
    say: Callable[[str], None],
) -> Upload:
    from huggingface_hub import CommitOperationAdd, CommitOperationCopy
    from huggingface_hub.errors import FileDuplicationError

    existing = {file.path: file for file in api.list_repo_tree(repo)}
    _refuse_other_weights(repo, existing, files)
    additions = {name: CommitOperationAdd(name, content) for name, content in files.items()}
    added = {name: addition for name, addition in additions.items() if not _is_same(addition, existing.get(name))}
    copied = _find_copies(api, base, added) if base else []
    copies = [CommitOperationCopy(name, name, base.revision, base.repo, "model") for name in copied if base]
    rest = [addition for name, addition in added.items() if name not in copied]
    try:
        commit = _commit(api, repo, [*copies, *rest], message, say)
    except FileDuplicationError:  # the repositories are in different regions
        copied, commit = [], _commit(api, repo, list(added.values()), message, say)
    status = {
        **dict.fromkeys(files, "unchanged"),
        **dict.fromkeys(added, "uploaded"),
        **dict.fromkeys(copied, "copied"),
    }
    pushed = [PushedFile(name, addition.upload_info.size, status[name]) for name, addition in additions.items()]
    return Upload(commit, private, tuple(pushed))


def _commit(api: "HfApi", repo: str, operations: list[Any], message: str, say: Callable[[str], None]) -> str | None:
    """Upload the weights one by one, so that an interruption loses one file at most, and commit all operations."""
    from huggingface_hub import CommitOperationAdd

    for addition in operations:
        if isinstance(addition, CommitOperationAdd) and fnmatch(addition.path_in_repo, WEIGHTS):
            say(f"Uploading {addition.path_in_repo} ({addition.upload_info.size / 2**20:,.1f} MiB)")
            api.preupload_lfs_files(repo, [addition], free_memory=False)
    return api.create_commit(repo, operations, commit_message=message).oid if operations else None


def _refuse_other_weights(repo: str, existing: Mapping[str, Any], files: Mapping[str, Any]) -> None:
    """Refuse a repository with weights, an index or an adapter that the checkpoint lacks: engines could load both."""
    own = (name for name in existing if fnmatch(name, f"{WEIGHTS}*") or name == ADAPTER_CONFIG)
    if stale := sorted(name for name in own if name not in files):
        more = f" and {len(stale) - 1} more" if len(stale) > 1 else ""
        raise OutputError(
            f"{repo} has {stale[0]}{more}, which this checkpoint does not have; engines could load both. Delete it by "
            f"`hf repos delete-files {quoted(repo, *stale[:4])}`, or choose another --repo."
        )


def _find_copies(api: "HfApi", base: Source, added: "Mapping[str, CommitOperationAdd]") -> list[str]:
    """The weights that the base repository has, with the same content, in a storage that can copy them."""
    from huggingface_hub.errors import HfHubHTTPError

    weights = [name for name in added if fnmatch(name, WEIGHTS)]
    try:
        existing = api.get_paths_info(base.repo, weights, revision=base.revision) if weights else []
    except HfHubHTTPError:  # gone, or not accessible with this token
        return []
    return [file.path for file in existing if getattr(file, "xet_hash", None) and _is_same(added[file.path], file)]


def _is_same(addition: "CommitOperationAdd", existing: Any) -> bool:
    """Return whether a file on the Hub has the same content. Reads the local file only if the sizes are equal."""
    if existing is None or getattr(existing, "size", None) != addition.upload_info.size:
        return False
    if existing.lfs is not None:
        return existing.lfs.sha256 == addition.upload_info.sha256.hex()
    with addition.as_file() as file:
        content = file.read()
    git_name = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
    return existing.blob_id == git_name


def _explain(repo: str, error: Exception) -> str:
    """What happened, and the next step."""
    from huggingface_hub import constants, errors

    if isinstance(error, RuntimeError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # the client names only the file
    if isinstance(error, errors.HfHubHTTPError):
        status = error.response.status_code
        why = (error.server_message or reason_of(error)).strip().split("\n")[0]
        if status in (401, 403, 404):
            return (
                f"The Hub refused to write to {repo} (status {status}): {why} Check --repo, and log in with "
                f"`hf auth login` and a token with write access ({constants.ENDPOINT}/settings/tokens)."
            )
        return f"The Hub answered with status {status}: {why} {_AGAIN}"
    if isinstance(error, errors.HTTPError):  # errors of the HTTP client: connection, DNS, certificates
        return f"{constants.ENDPOINT} cannot be reached: {reason_of(error)}. Check network and proxies. {_AGAIN}"
    if isinstance(error, UnicodeEncodeError):
        return f"The Hub cannot be asked: {BAD_TOKEN}"
    if isinstance(error, ValueError):  # checks of the client
        return f"The files cannot be uploaded: {' '.join(str(error).split())}"
    return f"The upload to {repo} failed: {reason_of(error)}. {_AGAIN}"
