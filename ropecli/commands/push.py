"""`ropecli push`: uploads a checkpoint to the Hub with a model card."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from annotated_doc import Doc

from ropecli.atomic import as_path
from ropecli.errors import OutputError, shown
from ropecli.messages import warn
from ropecli.names import HUB_ID
from ropecli.options import IS_CHECKPOINT, OUTPUT
from ropecli.signature import Flag, command


@dataclass(frozen=True)
class PushResult:
    """files: sizes in bytes by name, with the card as README.md. card: its text. private: whether the repository is.

    commit, private: None for a dry run.
    """

    folder: Path
    repo: str
    url: str
    files: dict[str, int]
    card: str
    commit: str | None = None
    private: bool | None = None

    def as_json(self) -> dict[str, Any]:
        return {
            "repo": self.repo,
            "url": self.url,
            "commit": self.commit,
            "private": self.private,
            "card": self.card,
            "files": [{"name": name, "size": size} for name, size in self.files.items()],
        }


@command
def push(
    folder: Annotated[
        str | Path,
        Flag("folder", metavar="DIR"),
        Doc("Folder written by patch, finetune or merge."),
        IS_CHECKPOINT,
    ],
    *,
    repo: Annotated[str, Flag("--repo", metavar="OWNER/NAME"), Doc("Repository on the Hub. Created if it is missing.")],
    report: Annotated[
        Sequence[str | Path] | None,
        Flag("--report", metavar="FILE"),
        Doc("Report of this checkpoint to show in the model card; repeatable."),
    ] = None,
    base_model: Annotated[
        str | None,
        Flag("--base-model", metavar="OWNER/NAME"),
        Doc("Base model on the Hub. Default: from ropecli.yaml."),
    ] = None,
    public: Annotated[bool, Doc("Publish the repository. Default: private.")] = False,
    dry_run: Annotated[
        bool, Doc("List the files, with --verbose print the model card too, and upload nothing."), OUTPUT
    ] = False,
) -> PushResult:
    """Upload a checkpoint to the Hub with a model card.

    The card comes first. Uses the token of `hf auth login` or HF_TOKEN. Run it again to continue after an interruption.
    """
    from huggingface_hub import constants

    from ropecli.checkpoint.files import README
    from ropecli.checkpoint.upload import files_to_push, hub_origin, open_written, upload
    from ropecli.reporting.model_card import make_card, read_measurements
    from ropecli.scaling.spec import label_of

    for option, name in {"--repo": repo, "--base-model": base_model}.items():
        if name is not None and not HUB_ID.fullmatch(name):
            raise OutputError(f"{option} is {shown(name)}; expected owner/name, such as my-name/my-model-128k.")
    state = open_written(as_path(folder), repo)
    checkpoint = state.checkpoint
    measured = read_measurements([as_path(path) for path in report or ()], checkpoint)
    base = base_model or hub_origin(checkpoint)
    if base == repo:
        raise OutputError(f"--repo is {repo}, which is the base model. Choose another repository.")
    card = make_card(state, repo, measured, base)
    if base is None:
        warn("The base model's Hub id is unknown. Name it with --base-model owner/name.")
    files = files_to_push(checkpoint)
    if not card.data.get("license"):
        text = next((file.name for file in files if file.name.upper().startswith(("LICENSE", "LICENCE"))), None)
        known = f"{text} is uploaded, but the card does not name the license" if text else "The license is unknown"
        warn(f"{known}. Add `license:` to the metadata of {checkpoint.folder / README}.")
    sizes = {file.name: file.stat().st_size for file in files} | {README: len(card.content.encode())}
    url = f"{constants.ENDPOINT}/{repo}"
    if dry_run:
        return PushResult(checkpoint.folder, repo, url, sizes, card.content)
    spec = state.positions.main.spec
    message = f"{label_of(spec.method.name, spec.factor, {})}, {state.positions.context_length} tokens, by ropecli"
    commit, private = upload(files, card.content, repo, public=public, message=message)
    return PushResult(checkpoint.folder, repo, url, sizes, card.content, commit, private)
