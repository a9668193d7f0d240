"""Trains the chosen extension with finetune's own loop, on documents that are not measured on.

Two losses of the choice score it: of far text, and of text within the pretraining length, which gives the cost. Of the
steps within the cost the one with the least far loss is kept; training ends where that no longer falls.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, expm1
from pathlib import Path
from typing import Any

import numpy as np

from ropecli.checkpoint.files import RUN
from ropecli.checkpoint.opening import Checkpoint
from ropecli.checkpoint.state import read_state
from ropecli.data.stream import open_stream
from ropecli.errors import DataError, RecipeError
from ropecli.evaluation.protocols import short_context
from ropecli.evaluation.subject import Subject
from ropecli.live.loading import load_tokenizer
from ropecli.live.stock_transformers import read_stock_config
from ropecli.messages import duration, say, size
from ropecli.names import ADAPTERS, DEMO, DEMO_TRAIN
from ropecli.training.finetuning import Listener, for_this_device, run_stages
from ropecli.training.launch import Launch, start_launch
from ropecli.training.memory_plan.estimate import MemoryEstimator
from ropecli.training.memory_plan.setups import PLAIN_CHANGES, find_setup, memory_of
from ropecli.training.recipe_files import recipe_path
from ropecli.training.recipe_schema import Recipe, make_recipe
from ropecli.training.run_folder import metrics_until
from ropecli.training.stages import plan_stages
from ropecli.training.validation import TIMED_STEPS, Scored, Scoring

RECIPE = Path("extend")
_STEP_TOKENS = 2**13
"""Tokens of a step, over all processes, where a sequence has no more."""
_SCORINGS, _STEPS_PER_SCORING = 10, 5
"""Ten scorings after the start; fewer of few steps: each takes as long as one or two steps."""
_PATIENCE = 3
"""Scorings without a better one after which training ends."""
_PARAMETERS, _GROWTH, _OF_LORA = 7e9, 0.35, 10
"""The rate of the recipe is for 7 billion parameters, and greater for fewer. LoRA's is ten times that of all
parameters: Schulman 2025, LoRA Without Regret, https://thinkingmachines.ai/blog/lora."""
_UNKNOWN_STEPS = 10**6


class Training:
    """What `extend` trains, and how. All processes make it together.

    texts: `data` and the options of its tables. measured: token ids of the documents that are not trained on. steps:
    None if `seconds` decide. Raises DataError if nothing is left to train on, RecipeError if it does not fit.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        length: int,
        texts: Mapping[str, Any],
        measured: Sequence[np.ndarray],
        steps: int | None,
        seconds: float | None,
    ) -> None:
        self.checkpoint, self.length = checkpoint, length
        self.steps, self.seconds = steps, seconds
        keys = {key: texts[key] for key in ("text_column", "split", "skip_faulty") if texts[key]}
        keys |= {"data": DEMO_TRAIN if texts["data"] == DEMO else texts["data"], "length": length}
        if length <= short_context(read_state(checkpoint).positions.pretraining_length).first:
            keys |= {"loss": "next-token", "longce_cap": None}  # nothing has a short context to compare with
        recipe = make_recipe(recipe_path(RECIPE), {**keys, "steps": steps or _UNKNOWN_STEPS})
        self.launch = start_launch(recipe)
        recipe = for_this_device(recipe, say if self.launch.is_main else lambda message: None)
        ranks = self.launch.data_ranks
        warmup = min(recipe.warmup_steps, steps // 4 if steps else TIMED_STEPS)  # a short time has few steps
        keys = {"batch_size": max(1, _STEP_TOKENS // length // ranks), "warmup_steps": warmup}
        recipe = recipe.model_copy(update=keys)
        opened = load_tokenizer(checkpoint), length, length
        try:
            self.stream = open_stream(recipe, *opened, held_out=measured)
        except DataError:  # no document that is left has the length: join them
            recipe = recipe.model_copy(update={"sequences": "concat", "end_token": "none"})
            self.stream = open_stream(recipe, *opened, held_out=measured)
        self.sequences = recipe.batch_size * ranks
        self.recipe = self.launch.from_main(lambda: self._fitted(recipe))

    def _fitted(self, recipe: Recipe) -> Recipe:
        """The recipe for all parameters if they fit the memory of this machine, else for LoRA."""
        device = self.launch.accelerator.device
        config = read_stock_config(self.checkpoint.folder, self.checkpoint.name)
        estimator = MemoryEstimator(config, gpu=device.type == "cuda")
        rate = recipe.learning_rate * (_PARAMETERS / estimator.shape.total) ** _GROWTH
        memory = memory_of(device)
        for keys in ({"learning_rate": rate}, {"learning_rate": _OF_LORA * rate, "adapter": "lora"}):
            fitted = recipe.model_copy(update=keys)
            setup = find_setup(estimator, fitted, self.length, self.launch, memory, changes=PLAIN_CHANGES)
            if setup.fits:
                return setup.recipe
        raise RecipeError(
            f"Training on {self.length:,} tokens needs {size(setup.estimate.total)} even with LoRA, and a device here "
            f"has {size(memory)}. `ropecli plan {self.checkpoint.name} --recipe {RECIPE} --length {self.length}` "
            "says what fits where."
        )

    def sentence(self) -> str:
        what = ADAPTERS[self.recipe.adapter]
        long = f"{self.steps:,} steps" if self.steps else f"{duration(self.seconds or 0)}, in steps"
        return (
            f"Then it trains {what} for {long} of {self.sequences} × {self.length:,} tokens, with a rate of "
            f"{self.recipe.learning_rate:.1e}, on documents that are not measured on."
        )

    def run(
        self,
        candidate: Subject,
        losses: tuple[Sequence[Scored], Sequence[Scored], float],
        most_cost: float,
        output: Path,
        listener: Listener,
        remember: Callable[[int], None],
    ) -> "TwoLosses":
        """Patch as the candidate is patched, and train into the folder `output`, or resume what it contains.

        losses: see Extension.two_losses. remember: called with the number of steps once it is known. Errors: those of
        run_stages.
        """
        keys = self.recipe.record()
        if candidate.plan:
            spec = candidate.plan.spec
            keys["patch"] = {"method": spec.method.name, "factor": spec.factor, "target_length": self.length}
            keys["patch"] |= {"params": dict(spec.params)}
        scoring = TwoLosses(self.steps, *losses, most_cost, self.seconds, remember)
        resume = (output / RUN).exists()
        stages = plan_stages(self.checkpoint, make_recipe(None, keys))
        run_stages(stages, output, resume=resume, listener=listener, scoring=scoring, stream=self.stream)
        for line in metrics_until(output, _UNKNOWN_STEPS):  # of a run that was finished before
            scoring.follow(line)
        return scoring

    def as_json(self, scoring: "TwoLosses") -> dict[str, Any]:
        """What was trained, for extend.json."""
        keys = ("data", "adapter", "loss", "longce_cap", "learning_rate", "length")
        chosen = {key: getattr(self.recipe, key) for key in keys}
        return {**chosen, "sequences_per_step": self.sequences, "steps": scoring.steps, "kept_step": scoring.best}


@dataclass
class TwoLosses(Scoring):
    """The far loss and the cost of the trained model, on the measured documents.

    far: passes of recall. short: texts within the pretraining length. base: their loss by the base, nats per token.
    most_cost: allowed relative change of perplexity. seconds: the time of the training, if that decides its steps.
    remember: called with them.
    """

    far: Sequence[Scored]
    short: Sequence[Scored]
    base: float
    most_cost: float
    seconds: float | None
    remember: Callable[[int], None]
    _seen: dict[int, tuple[float, float]] = field(default_factory=dict)
    _took: float = 0.0

    @property
    def texts(self) -> Mapping[str, Sequence[Scored]]:
        return {"far text": self.far, "text within the pretraining length": self.short}

    def run(self, launch: Launch, wrapped: Any, step: int) -> dict[str, Any]:
        started = time.monotonic()
        line = super().run(launch, wrapped, step)
        self._took = time.monotonic() - started
        return line

    def affordable(self, seconds: float) -> int:
        allowed, least = self.seconds or 0.0, TIMED_STEPS + 1
        counts = range(int(allowed / seconds), least, -1)
        fits = (count for count in counts if count * seconds + (self._scorings(count) + 1) * self._took <= allowed)
        steps = next(fits, least)
        self.remember(steps)
        return steps

    def due(self, step: int) -> bool:
        if self.steps is None:
            return step == 0
        return step == self.steps or step % ceil(self.steps / self._scorings(self.steps)) == 0

    def _scorings(self, steps: int) -> int:
        return min(_SCORINGS, max(1, steps // _STEPS_PER_SCORING))

    def line(self, losses: Sequence[float]) -> dict[str, Any]:
        far, short = losses
        return {"far_nll": far, "cost": expm1(short - self.base)}

    def words(self, line: Mapping[str, Any]) -> str:
        return f"loss of far text {line['far_nll']:.3f}, cost {100 * line['cost']:+.1f}%"

    def follow(self, line: Mapping[str, Any]) -> None:
        if "far_nll" in line:
            self._seen[line["step"]] = max(0.0, line["cost"] - self.most_cost), line["far_nll"]

    @property
    def best(self) -> int | None:
        trained = [step for step in self._seen if step]
        return min(trained, key=lambda step: (self._seen[step], step), default=None)

    @property
    def ended(self) -> bool:
        best = self.best
        return best is not None and sum(step > best for step in self._seen) >= _PATIENCE
