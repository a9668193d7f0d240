"""Chooses the files of a checkpoint that belong on the Hub, and uploads them in one commit.

The Hub's client sends the files first, only those that the Hub does not have, and commits them together, so a
repository never has half a checkpoint.
"""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatch
from glob import glob
from pathlib import Path
from typing import Any, NamedTuple

from ropecli.atomic import as_path
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
from ropecli.checkpoint.opening import Checkpoint, open_checkpoint
from ropecli.checkpoint.provenance import entry
from ropecli.checkpoint.state import CheckpointState, read_state
from ropecli.errors import CheckpointError, OutputError, RopecliError, quoted, shortened, shown
from ropecli.messages import say
from ropecli.names import HUB_ID
from ropecli.scaling.spec import label_of

_LONGEST_CHAIN = 8


class HubModel(NamedTuple):
    """A model on the Hub. revision: a commit, None for the default branch."""

    repo: str
    revision: str | None


def files_to_push(checkpoint: Checkpoint, include: Sequence[str] = ()) -> dict[str, Path]:
    """The files of a checkpoint that belong on the Hub, ropecli.yaml and tune.json, by name.

    include: patterns of other files in the folder. Says which files look like those of a checkpoint and are not among
    them. Raises OutputError for a pattern without a file, and for an adapter beside a whole model, which readers of the
    repository would load instead.
    """
    if is_own_file(checkpoint.folder / ADAPTER_CONFIG):
        raise OutputError(
            f"{checkpoint.folder} has {ADAPTER_CONFIG} beside a whole model: from the Hub, transformers would load the "
            f"base model that it names, instead of {CONFIG}. Move it to another folder."
        )
    folder, files = checkpoint.folder, [path for path in checkpoint.files() if not path.name.startswith(".")]
    written = [path for name in (CONFIG, PROVENANCE, TUNING, FACTORS) if is_own_file(path := folder / name)]
    public = {path.name: path for path in [*written, *filter(_is_public, files)]}
    for pattern in include:
        names = glob(pattern, root_dir=folder, recursive=True)  # noqa: PTH207, Path.glob refuses some patterns
        files_named = {name: folder / name for name in names if (folder / name).is_file()}
        added = {
            name: path
            for name, path in files_named.items()
            if path.resolve().is_relative_to(folder.resolve()) and not is_of_mistral(path)
        }
        if not added:
            raise OutputError(f"--include is {shown(pattern)}, but {folder} has no such file to upload.")
        public |= added
    for warning in checkpoint.skip_warnings():
        say(warning)
    if left_out := [path.name for path in files if path.name not in public]:
        say(f"Not uploaded: {shortened(', '.join(left_out), 200)}. To upload one of them, add --include NAME.")
    return public


def _is_public(path: Path) -> bool:
    name = path.name.lower()
    return any(fnmatch(name, pattern) for pattern in PUBLIC_FILES) and not name.startswith("optimizer")


def hub_origin(record: dict[str, Any]) -> HubModel | None:
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
            return HubModel(name, str(commit))
        try:
            source = open_checkpoint(name) if as_path(name).is_dir() else None
            if source is None or origin.get("digest") != source.digest():
                return None
        except (RopecliError, OSError):
            return None
        record = source.record
    return None


def refuse_repo(repo: str, option: str) -> None:
    """Raise OutputError unless `repo`, given with `option`, is owner/name."""
    if not HUB_ID.fullmatch(repo):
        raise OutputError(f"{option} is {shown(repo)}; expected owner/name, such as my-name/my-model-128k.")


def upload(files: Mapping[str, Path | bytes], repo: str, *, public: bool, message: str) -> tuple[str, bool]:
    """Upload files, by their names in the repository, in one commit. Creates the repository if there is none.

    Returns the commit, and whether the repository is private. Raises OutputError.
    """
    from huggingface_hub import CommitOperationAdd, HfApi, get_token

    token, api = get_token(), HfApi()
    try:
        api.create_repo(repo, private=not public, exist_ok=True)
        existing = api.model_info(repo)
        if not (existing.private or public):
            raise OutputError(f"{repo} is public. Add --public to publish there, or choose another --repo.")
        _refuse_other_weights(repo, [file.rfilename for file in existing.siblings or []], files)
        additions = [CommitOperationAdd(name, file) for name, file in files.items()]
        return api.create_commit(repo, additions, commit_message=message).oid, bool(existing.private)
    except RopecliError:
        raise
    except Exception as error:  # errors of the Hub, the network, certificates, storage
        # without the client's error, which may contain what was sent
        message = _explain(repo, error)
        raise OutputError(message.replace(token, "<token>") if token else message) from None


def _refuse_other_weights(repo: str, existing: Iterable[str], files: Mapping[str, Any]) -> None:
    """Refuse a repository with weights, an index or an adapter that the checkpoint lacks: engines could load both."""
    loaded = (name for name in existing if "/" not in name and (fnmatch(name, f"{WEIGHTS}*") or name == ADAPTER_CONFIG))
    if stale := sorted(name for name in loaded if name not in files):
        more = f" and {len(stale) - 1} more" if len(stale) > 1 else ""
        raise OutputError(
            f"{repo} has {stale[0]}{more}, which this checkpoint does not have; engines could load both. Delete it by "
            f"`hf repos delete-files {quoted(repo, *stale[:4])}`, or choose another --repo."
        )


def _explain(repo: str, error: Exception) -> str:
    """A message: the failure, and the next step."""
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(error, UnicodeEncodeError):
        return f"The Hub cannot be asked: {BAD_TOKEN}"
    why = " ".join(str(error).split())
    if isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403, 404):
        why += " Check --repo, and log in with `hf auth login` and a token with write access."
    return f"The upload to {repo} failed: {why} The same command sends only what the Hub does not have."


def open_written(folder: Path, repo: str) -> CheckpointState:
    """Open a finished folder that ropecli wrote. Raises CheckpointError."""
    checkpoint = open_checkpoint(folder, weights=True)
    checkpoint.weight_files()
    if not checkpoint.record:
        raise CheckpointError(
            f"{folder} has no ropecli.yaml: ropecli did not change this checkpoint. Upload it with: hf upload "
            f"{quoted(repo, folder)}"
        )
    state = read_state(checkpoint)
    if state.edited:
        raise CheckpointError(
            f"config.json in {folder} was edited after ropecli.yaml was written ({', '.join(state.edited.edited)}), so "
            "the model card would be wrong. Undo the edit, or patch again."
        )
    return state


def commit_message(state: CheckpointState) -> str:
    spec, length = state.positions.main.spec, state.positions.context_length
    return f"{label_of(spec.method.name, spec.factor, {})}, {length} tokens, written by ropecli"
