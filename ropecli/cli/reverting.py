"""`ropecli patch --revert`: the checkpoint as it was before its patches."""

from pathlib import Path

from ropecli.checkpoint.opening import open_checkpoint
from ropecli.checkpoint.revert import Reversal, plan_reversal, revert_to
from ropecli.cli.terminal import out, print_json, show_changes, warn


def run(checkpoint: str, revision: str | None, output: Path | None, *, link: bool, as_json: bool) -> None:
    """Writes `output`, or shows what would change where there is none."""
    reversal = plan_reversal(open_checkpoint(checkpoint, weights=output is not None, revision=revision))
    for warning in reversal.warnings:
        warn(warning)
    if output is not None:
        revert_to(reversal, output, link=link, say=warn)
    if as_json:
        print_json(_summary(reversal, output))
    elif output is not None:
        out.print(f"{checkpoint} → {output}: as it was before its patches", markup=False, soft_wrap=True)
    else:
        show_changes("config.json", reversal.changes)
        if reversal.tokenizer_changes:
            show_changes("tokenizer_config.json", reversal.tokenizer_changes)


def _summary(reversal: Reversal, output: Path | None) -> dict:
    return {
        "output": str(output) if output else None,
        "changes": [change._asdict() for change in reversal.changes],
        "tokenizer_changes": [change._asdict() for change in reversal.tokenizer_changes],
        "warnings": list(reversal.warnings),
    }
