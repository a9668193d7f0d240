"""Reads samples with vLLM in this process. How the work is distributed (tensor_parallel_size, ...) is vLLM's business.

vLLM generates at least one token. A prompt that fills the context length is read without its last token, which is then
generated: its log-probability is that of the logits, before the bias that forces it.
"""

import contextlib
import gc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np

from ropecli.checkpoint.opening import Checkpoint
from ropecli.errors import MethodError, RopecliError, reason_of
from ropecli.evaluation.readers.reader import SequenceReader
from ropecli.evaluation.subject import ReaderFactory, Subject
from ropecli.live.proof import require_reading
from ropecli.messages import progress_bar


class VllmReader(SequenceReader):
    """start: starts a vllm.LLM for samples of up to this many tokens. Call `prepare` once, and `close` when done.

    vLLM itself decides how many samples of a call it computes at a time.
    """

    batch_size = 64

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

    def generate(
        self, prompts: Sequence[np.ndarray], limit: int, done: Callable[[int, list[int]], bool]
    ) -> list[list[int]]:
        from vllm import SamplingParams

        parameters = [
            SamplingParams(temperature=0.0, max_tokens=min(limit, self.max_length - len(ids))) for ids in prompts
        ]
        answers = []
        for output in self._ask(prompts, parameters):
            answer = list(output.outputs[0].token_ids)
            answers.append(answer[:-1] if output.outputs[0].finish_reason == "stop" else answer)  # an end token
        self.advance(sum(map(len, prompts)))
        return answers

    def sequence_losses(self, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
        from vllm import SamplingParams

        parameters = []
        for ids in sequences:
            last = [int(ids[-1])] if len(ids) == self.max_length else None
            forced = {"allowed_token_ids": last, "logprobs": 0} if last else {}
            parameters.append(SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, **forced))
        outputs = self._ask([ids[: self.max_length - 1] for ids in sequences], parameters)
        losses = []
        for ids, output in zip(sequences, outputs, strict=True):
            chosen = [*output.prompt_logprobs[1:], *(output.outputs[0].logprobs or [])]
            pairs = zip(ids[1:].tolist(), chosen, strict=True)
            losses.append(np.array([-by_token[token].logprob for token, by_token in pairs]))
        return losses

    def _ask(self, prompts: Sequence[np.ndarray], parameters: Sequence[Any]) -> list[Any]:
        inputs = [{"prompt_token_ids": ids.tolist()} for ids in prompts]
        return self.llm.generate(inputs, parameters, use_tqdm=False)


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
