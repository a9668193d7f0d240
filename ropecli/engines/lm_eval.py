"""The command of lm-evaluation-harness, checked by running release 0.4.13 (models/huggingface.py, tasks/ruler).

- `hf` loads the folder by `AutoModelForCausalLM`, so the patch applies. The attention of a distance method must be
  registered before, by `import ropecli.attention`.
- `max_length` counts the prompt and its answer (`max_gen_toks`); of a longer prompt the beginning is cut off silently.
  So it is raised above the context length, and an answer after a full prompt is read beyond that.
- The tasks of RULER make prompts of the lengths in the metadata `max_seq_lengths`, 4,096 by default.
"""

from typing import Any

from ropecli.engines.engine_table import EngineInput, EngineTable

_ROOM = 256
"""Tokens of an answer, lm-eval's default."""
_WITH_ATTENTION = "import ropecli.attention\nfrom lm_eval.__main__ import cli_evaluate\ncli_evaluate()"


def _overrides(p: EngineInput) -> dict[str, Any]:
    lengths = [p.original_length]
    while 2 * lengths[-1] <= p.length:
        lengths.append(2 * lengths[-1])
    revision = {} if p.revision is None else {"revision": p.revision}
    arguments = {"pretrained": p.checkpoint, **revision, "max_length": p.length + _ROOM}
    return {"--model_args": arguments, "--metadata": {"max_seq_lengths": lengths}}


def _command(p: EngineInput) -> tuple[object, ...]:
    program = ("lm_eval",) if p.rope.remapping is None else ("python", "-c", _WITH_ATTENTION)
    options = [word for pair in _overrides(p).items() for word in pair]
    return (*program, "--model", "hf", *options, "--tasks", "TASKS")


ENGINE = EngineTable(
    title="lm-eval 0.4.13",
    command=_command,
    overrides=_overrides,
    remaps=True,
    notes=(
        "Replace TASKS, for example by niah_single_1,ruler_vt. The metadata set the lengths of RULER's prompts.",
        (
            f"max_length is the context length and {_ROOM} tokens for the answer, which may lie beyond the context "
            "length. Otherwise lm-eval silently cuts the beginning of a prompt that does not fit with its answer."
        ),
    ),
)
