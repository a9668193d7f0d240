"""A callback for transformers' Trainer and TRL's trainers that checks that the scaling is on.

    from ropecli.integrations import ScalingCallback

    trainer = SFTTrainer("qwen-128k", ..., callbacks=[ScalingCallback("qwen-128k")])

Importing this module imports transformers.
"""

from pathlib import Path
from typing import Any, Literal

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ropecli.attention.loaded import check_loaded
from ropecli.checkpoint.opening import open_checkpoint
from ropecli.messages import say, warn


class ScalingCallback(TrainerCallback):
    """Check the model when training begins, wrapped and patched as it then is, and again after the first step.

    checkpoint: the folder or Hub id whose scaling the model must compute. on_difference: stop with ProofError, or warn.
    All processes check. See ropecli.check_loaded.
    """

    def __init__(self, checkpoint: str | Path, *, on_difference: Literal["stop", "warn"] = "stop") -> None:
        if on_difference not in ("stop", "warn"):
            raise ValueError(f"on_difference is {on_difference!r}; expected 'stop' or 'warn'.")
        self.checkpoint, self.on_difference = open_checkpoint(checkpoint, adapters=True), on_difference
        self._first_step: int | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **named: Any
    ) -> None:
        self._first_step = state.global_step + 1
        self._check(state, named["model"])

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **named: Any) -> None:
        if state.global_step == self._first_step:
            self._check(state, named["model"])

    def _check(self, state: TrainerState, model: Any) -> None:
        check = check_loaded(model, self.checkpoint, strict=self.on_difference == "stop")
        if not state.is_world_process_zero:
            return
        for difference in check.differences:
            warn(difference)
        for reason in check.unproved:
            say(f"Not compared: {reason}")
        if check.tables and not check.differences:
            say(
                f"The model computes the scaling of {self.checkpoint.name}: {check.tables} rotary tables and "
                f"{check.layers} attention layers were compared."
            )
