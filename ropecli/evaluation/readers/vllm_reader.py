"""Reads samples with vLLM in this process. How the work is distributed (tensor_parallel_size, ...) is vLLM's business.

vLLM generates at least one token. A prompt that fills the context length is read without its last token, which is then
generated: its log-probability is that of the logits, before the bias that forces it.
"""

import contextlib
import gc
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np

from ropecli.checkpoint.opening import Checkpoint
from ropecli.errors import MethodError, RopecliError, reason_of
from ropecli.evaluation.protocols import Window
from ropecli.evaluation.readers.reader import PromptAndAnswers, Reader, batches
from ropecli.evaluation.subject import ReaderFactory, Subject
from ropecli.live.proof import require_reading
from ropecli.messages import progress_bar

_AT_ONCE = 64
"""Samples per call; vLLM itself decides how many it computes at a time."""


class VllmReader(Reader):
    """start: starts a vllm.LLM for samples of up to this many tokens. Call `prepare` once, and `close` when done."""

    batch_size = _AT_ONCE

    def __init__(self, start: Callable[[int], Any]) -> None:
        self._start, self.max_length = start, 0
        self.llm: Any = None

    def prepare(
        self, longest: np.ndarray, length: int, largest: int = 0, *, answers: bool = False, losses: bool = True
    ) -> None:
        self.llm = self._start(length)
        self.max_length = int(self.llm.llm_engine.model_config.max_model_len)

    def close(self) -> None:
        if self.llm is not None:
            self.llm.llm_engine.engine_core.shutdown()
            self.llm = None
            gc.collect()

    def dtype_and_device(self) -> tuple[str, str]:
        return str(self.llm.llm_engine.model_config.dtype).removeprefix("torch."), engine()

    def losses(self, windows: Iterable[Window]) -> Iterator[np.ndarray]:
        for batch in batches(windows, lambda window: None, _AT_ONCE):
            values = self._prompt_losses([window.ids for window in batch])
            for window, losses in zip(batch, values, strict=True):
                yield losses[len(losses) - window.targets :]

    def log_probabilities(self, questions: Iterable[PromptAndAnswers]) -> Iterator[np.ndarray]:
        """Reads each prompt once per answer."""
        for ids, answers in questions:
            values = self._prompt_losses([np.append(ids, answer) for answer in answers], tokens=len(ids))
            yield np.array(
                [-losses[len(losses) - len(answer) :].sum() for losses, answer in zip(values, answers, strict=True)]
            )

    def generate(
        self, prompts: Sequence[np.ndarray], limit: int, done: Callable[[int, list[int]], bool]
    ) -> list[list[int]]:
        from vllm import SamplingParams

        parameters = [
            SamplingParams(temperature=0.0, max_tokens=min(limit, self.max_length - len(ids))) for ids in prompts
        ]
        answers = []
        for output in self._ask(prompts, parameters, sum(map(len, prompts))):
            answer = list(output.outputs[0].token_ids)
            answers.append(answer[:-1] if output.outputs[0].finish_reason == "stop" else answer)  # an end token
        return answers

    def _prompt_losses(self, prompts: Sequence[np.ndarray], tokens: int | None = None) -> list[np.ndarray]:
        """-ln p of each token but the first, nats. tokens: to advance by; default: all."""
        from vllm import SamplingParams

        parameters = []
        for ids in prompts:
            last = [int(ids[-1])] if len(ids) == self.max_length else None
            forced = {"allowed_token_ids": last, "logprobs": 0} if last else {}
            parameters.append(SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, **forced))
        shortened = [ids[: self.max_length - 1] for ids in prompts]
        losses = []
        for ids, output in zip(
            prompts, self._ask(shortened, parameters, tokens or sum(map(len, prompts))), strict=True
        ):
            chosen = [*output.prompt_logprobs[1:], *(output.outputs[0].logprobs or [])]
            pairs = zip(ids[1:].tolist(), chosen, strict=True)
            losses.append(np.array([-by_token[token].logprob for token, by_token in pairs]))
        return losses

    def _ask(self, prompts: Sequence[np.ndarray], parameters: Sequence[Any], tokens: int) -> list[Any]:
        inputs = [{"prompt_token_ids": ids.tolist()} for ids in prompts]
        outputs = self.llm.generate(inputs, parameters, use_tqdm=False)
        self.advance(tokens)
        return outputs


class VllmReaderFactory(ReaderFactory):
    """Opens a reader for each subject, one engine at a time. A patch in memory is a set of overrides, as in `export`.

    arguments: of vllm.LLM. overrides_of: see vllm_overrides. Raises MethodError without vLLM.
    """

    def __init__(
        self, arguments: Mapping[str, Any], overrides_of: Callable[[Checkpoint, Checkpoint, int], dict[str, Any]]
    ) -> None:
        if find_spec("vllm") is None:
            raise MethodError("--engine vllm needs vLLM: pip install 'ropecli[vllm]'.")
        self.arguments, self.overrides_of = dict(arguments), overrides_of
        for name, value in {"VLLM_LOGGING_STREAM": "ext://sys.stderr", "VLLM_LOGGING_LEVEL": "WARNING"}.items():
            os.environ.setdefault(name, value)  # standard output has the result

    def request(self) -> dict[str, Any]:
        return {"engine": engine(), "arguments": self.arguments}

    @contextlib.contextmanager
    def open(self, subject: Subject, tokenizer: Any, scalings: Sequence[Subject] = ()) -> Iterator[VllmReader]:
        """Raises PatchError where vLLM does not compute the scaling."""
        checkpoint, plan = subject.checkpoint, subject.plan
        patched = replace(checkpoint, config=plan.config) if plan else checkpoint
        if plan:
            require_reading(checkpoint.config)
        self.overrides_of(patched, checkpoint, subject.positions.context_length)  # refuses before the samples are made

        def start(length: int) -> Any:
            max_length = max(length, subject.positions.context_length)
            overrides = self.overrides_of(patched, checkpoint, max_length)
            with progress_bar(f"starting vLLM with {checkpoint.name}", None):
                from vllm import LLM

                arguments = {"max_model_len": max_length, "hf_overrides": overrides, **self.arguments}
                try:
                    return LLM(model=str(checkpoint.folder), **arguments)
                except (ValueError, TypeError, RuntimeError, ImportError) as error:
                    raise RopecliError(f"vLLM does not start: {reason_of(error)}") from error

        with contextlib.closing(VllmReader(start)) as reader:
            yield reader


def engine() -> str:
    """Name and version."""
    import vllm

    return f"vllm {vllm.__version__}"
