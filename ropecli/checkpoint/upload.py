"""Uploads the files of a checkpoint that belong on the Hub, after its model card, by the Hub's own client."""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from glob import escape
from pathlib import Path

from ropecli.checkpoint import files
from ropecli.checkpoint.opening import Checkpoint, open_checkpoint
from ropecli.checkpoint.provenance import entry
from ropecli.checkpoint.state import CheckpointState, read_state
from ropecli.errors import CheckpointError, OutputError, quoted, shortened
from ropecli.messages import say
from ropecli.names import HUB_ID
from ropecli.yaml12 import read_own_yaml


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


def files_to_push(checkpoint: Checkpoint) -> list[Path]:
    """The files of a checkpoint that belong on the Hub, with ropecli.yaml. Says which others stay."""
    own = [checkpoint.folder / name for name in (files.CONFIG, files.PROVENANCE)]
    copied = checkpoint.files()
    public = [path for path in copied if any(fnmatch(path.name.lower(), pattern) for pattern in files.PUBLIC_FILES)]
    if others := ", ".join(path.name for path in copied if path not in public):
        say(f"Not uploaded: {shortened(others, 200)}. Upload one of them with: hf upload OWNER/NAME FILE.")
    return [*filter(files.is_own_file, own), *public]


def hub_origin(checkpoint: Checkpoint) -> str | None:
    """The Hub id of the model that a checkpoint was made from, by run.yaml or ropecli.yaml; None if it is unknown."""
    run = checkpoint.folder / files.RUN  # of all stages of a training
    for record in (files.read_file(run, read_own_yaml) if files.is_own_file(run) else {}, checkpoint.record):
        finetuned, merged = entry(record, "finetuned"), entry(record, "merged")
        for origin in (entry(record, "source"), entry(finetuned, "source"), entry(merged, "base")):
            if origin.get("commit") and HUB_ID.fullmatch(name := str(origin.get("checkpoint"))):
                return name
    return None


def upload(paths: Sequence[Path], card: str, repo: str, *, public: bool, message: str) -> tuple[str, bool]:
    """Upload the card as README.md, then `paths`, all of one folder. Creates the repository if there is none.

    Returns the last commit, and whether the repository is private. Raises OutputError.
    """
    from huggingface_hub import HfApi

    api, names = HfApi(), [path.name for path in paths if path.name != files.README]
    try:
        api.create_repo(repo, private=not public, exist_ok=True)
        existing = api.model_info(repo)
        if not (existing.private or public):
            raise OutputError(f"{repo} is public. Add --public to publish there, or choose another --repo.")
        _refuse_other_weights(repo, [file.rfilename for file in existing.siblings or []], names)
        api.upload_file(
            path_or_fileobj=card.encode(),
            path_in_repo=files.README,
            repo_id=repo,
            commit_message="Model card by ropecli",
        )
        commit = api.upload_folder(
            repo_id=repo,
            folder_path=paths[0].parent,
            allow_patterns=[escape(name) for name in names],
            commit_message=message,
        )
    except OutputError:
        raise
    except Exception as error:  # errors of the Hub, the network, certificates, storage
        raise OutputError(
            f"The upload to {repo} failed: {' '.join(str(error).split())} Check the network, --repo, and the login: "
            "`hf auth login`, with a token that may write. The same command sends only what the Hub does not have."
        ) from error
    return commit.oid, bool(existing.private)


def _refuse_other_weights(repo: str, existing: Iterable[str], names: Sequence[str]) -> None:
    """Refuse a repository with weights, an index or an adapter that the checkpoint lacks: engines could load both."""
    top = {name for name in existing if "/" not in name}
    loaded = {name for name in top if fnmatch(name, f"{files.WEIGHTS}*") or name == files.ADAPTER_CONFIG}
    if others := sorted(loaded - set(names)):
        raise OutputError(
            f"{repo} has {others[0]}, which this checkpoint does not have; engines could load both. Delete it by "
            f"`hf repos delete-files {quoted(repo, *others[:4])}`, or choose another --repo."
        )
