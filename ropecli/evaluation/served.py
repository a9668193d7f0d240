"""Tells which scaling a server applies, by its log-probabilities of the same tokens.

The checkpoint is read by transformers as it is, unpatched, and with half and double its factor. Quantization and
rounding shift a server's log-probabilities, so no tolerance decides. What decides is where the server lies between the
readings: its share toward another reading is Σ (server − checkpoint)(other − checkpoint) / Σ (other − checkpoint)²,
0 where it computes as the checkpoint and 1 where it computes as the other, with a bootstrap interval. Both differences
are taken off their least-squares line over the checkpoint's log-probabilities, since errors of logits also lower and
flatten these, and a server that names its most probable tokens chooses those that its errors raise. Without that, a
rounding server seems to lie toward every reading that does the same.

After a single token no scaling matters, since a single key gets all attention. How far the server is there from the
checkpoint is its rounding, or other weights.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch

from ropecli.checkpoint.opening import Checkpoint
from ropecli.checkpoint.patch_plan import make_plan
from ropecli.checkpoint.state import read_state
from ropecli.config.layers import acts_nowhere
from ropecli.data.documents import special_tokens, tokenize
from ropecli.errors import DataError, EndpointError, MethodError, PatchError
from ropecli.evaluation.completions import Endpoint, PromptRefusedError, logprobs_of
from ropecli.evaluation.progress import Progress, Speed
from ropecli.evaluation.readers.live import LiveReader
from ropecli.evaluation.statistics import ratio_interval
from ropecli.evaluation.subject import LiveReaderFactory, Subject
from ropecli.messages import progress_bar, warn
from ropecli.scaling.spec import ScaledRope, make_spec, varies_with_length

CHECKPOINT, UNPATCHED, HALF, DOUBLE = "checkpoint", "unpatched", "half", "double"
SERVED, NOT_SERVED, UNCLEAR = "served", "not served", "unclear"
_PREFIXES, _PREFIXES_READ_ALONE = 128, 16
"""Prompts of different length; fewer where frequencies follow the length, so that each needs a pass of its own."""
_EVERY, _WIDER = 8, 1.5
"""Every eighth prompt is asked first. They decide alone if intervals 1.5 times as wide (99.7%) decide."""
_SINGLES = 32
"""Prompts of a single token."""
_SERVER_TOP, _REFERENCE_TOP = 5, 64
"""Most probable next tokens: asked of the server, and kept of the checkpoint."""
_BLOCK = 32
"""Neighbouring tokens that the bootstrap keeps together."""
_APART, _CLOSE = 0.2, 0.5
"""Not served: an interval of shares lies beyond 0.2. Served: all intervals lie within 0.5, half-way to the reading."""
_FAR, _EXPLAINED, _LEAST = 1.5, 6.0, 1e-3
"""Far from all: differs by 1.5 times what the readings do. Rounding explains up to 6 times the difference after a
single token, and 0.006 nats; ropecli/engines/README.md has what was measured."""


@dataclass(frozen=True)
class Reading:
    """The log-probabilities of the tokens with one scaling.

    role: checkpoint, unpatched, half or double. losses: by length of the prompt, -ln p of each of its tokens but the
    first, nats. next_tokens: by length, ln p of the most probable next tokens, by id.
    """

    role: str
    label: str
    losses: dict[int, list[float]]
    next_tokens: dict[int, dict[int, float]]


@dataclass(frozen=True)
class Single:
    """A prompt of a single token. following: ln p of the text's next one, by id. next_tokens: of the most probable."""

    token: int
    following: dict[int, float]
    next_tokens: dict[int, float]


@dataclass(frozen=True)
class Expected:
    """The checkpoint's side. ids: the tokens. pretraining_length: tokens."""

    ids: list[int]
    pretraining_length: int
    singles: list[Single]
    readings: list[Reading]

    @property
    def lengths(self) -> list[int]:
        """Lengths of the prompts after which the next token is compared, tokens, ascending."""
        return sorted(self.readings[0].next_tokens)

    @property
    def scored_lengths(self) -> list[int]:
        """Lengths of the prompts whose own tokens are compared: within the pretraining length, and beyond."""
        return sorted(self.readings[0].losses)


@dataclass(frozen=True)
class Comparison:
    """The server against one reading.

    difference: mean |Δ ln p|, nats. within, beyond: up to the pretraining length, and beyond; None where nothing was
    compared. share: how far the server lies from the checkpoint toward this reading; low, high: its 95%
    interval, -1 to 1 where the two readings are too close to tell.
    """

    role: str
    label: str
    difference: float
    within: float | None
    beyond: float | None
    share: float = 0.0
    low: float = 0.0
    high: float = 0.0


@dataclass(frozen=True)
class Verdict:
    """verdict: served, not served or unclear. nearest: the label of the nearest reading. reason: a sentence.

    after_single: mean |Δ ln p| after a single token, nats.
    """

    verdict: str
    nearest: str
    reason: str
    after_single: float
    comparisons: list[Comparison]


def alternatives(checkpoint: Checkpoint) -> dict[str, Subject]:
    """The checkpoint as it is, unpatched, and with half and double its factor, by role, without doubles.

    Raises MethodError for a checkpoint without a scaling, CheckpointError, PatchError.
    """
    state = read_state(checkpoint)
    if nowhere := acts_nowhere(state.settings.layers):
        raise MethodError(f"{checkpoint.name}: there is nothing to check. {nowhere}")
    spec, patched = state.positions.main.spec, state.note is not None
    subjects, tables = {CHECKPOINT: Subject(checkpoint)}, [_tables(state.positions.ropes)]
    specs = {UNPATCHED: make_spec("none" if patched else "unscaled")}
    if spec.method.uses_factor:
        specs |= {HALF: replace(spec, factor=spec.factor / 2), DOUBLE: replace(spec, factor=2 * spec.factor)}
    for role, alternative in specs.items():
        if alternative.factor < 1:
            continue
        try:
            plan = make_plan(checkpoint, alternative, in_memory=True)
        except (MethodError, PatchError):  # ×1 has no effect: unpatched stands for it
            continue
        if _tables(plan.positions.ropes) not in tables:
            tables.append(_tables(plan.positions.ropes))
            subjects[role] = Subject(checkpoint, plan)
    if len(subjects) == 1 or spec.method.name == "none":
        raise MethodError(f"{checkpoint.name} has no scaling, so there is nothing to check. Give a patched checkpoint.")
    return subjects


def _tables(ropes: Mapping[Any, ScaledRope]) -> list[tuple[bytes, float, str]]:
    """Equal for scalings that a model computes equally."""
    return [
        (np.float32(rope.inv_freq).tobytes(), rope.attention_factor, rope.spec.label * varies_with_length(rope))
        for rope in ropes.values()
    ]


def read_tokens(texts: Iterable[tuple[str, str]], tokenizer: Any, count: int) -> list[int]:
    """The first `count` tokens of the texts, joined. Raises DataError if there are fewer."""
    special = special_tokens(tokenizer)
    ids = list(special.prefix)
    for document in tokenize(texts, tokenizer):
        ids += special.bare(document.ids).tolist()
        if len(ids) >= count:
            return ids[:count]
    raise DataError(
        f"The text has {len(ids)} tokens; expected {count}. Choose longer texts with --data, or a smaller --length."
    )


def make_expected(
    subjects: Mapping[str, Subject], factory: LiveReaderFactory, tokenizer: Any, ids: list[int]
) -> Expected:
    """Read the tokens with every scaling. Raises CheckpointError, PatchError."""
    pretraining, longest = subjects[CHECKPOINT].positions.pretraining_length, len(ids)
    alone = any(varies_with_length(subject.positions.main) for subject in subjects.values())
    count = _PREFIXES_READ_ALONE if alone else _PREFIXES
    lengths = sorted({max(1, longest * (index + 1) // count) for index in range(count)})
    # room for one more token, if the server is unpatched
    within = [length for length in lengths if length < pretraining][-1:]
    scored_lengths = sorted({*within, longest})
    tokens, readings = np.array(ids, dtype=np.int64), []
    singles: list[Single] = []
    progress = Progress([{longest: longest}] * len(subjects))
    with progress.shown():
        for number, (role, subject) in enumerate(subjects.items(), 1):
            label = subject.spec.label if role != UNPATCHED else "unpatched"
            with factory.open(subject, tokenizer) as reader:
                reader.prepare(tokens, longest)
                with progress.job(f"transformers, {label} ({number} of {len(subjects)})", reader):
                    progress.begin(longest, longest)
                    readings.append(_read_scaling(reader, tokens, lengths, scored_lengths, role, label))
                singles = singles or _read_singles(reader, tokens)
    return Expected(ids, pretraining, singles, readings)


@torch.inference_mode()
def _read_scaling(
    reader: LiveReader, ids: np.ndarray, lengths: list[int], scored_lengths: list[int], role: str, label: str
) -> Reading:
    """One pass serves all lengths, unless the frequencies follow the length."""
    losses: dict[int, list[float]] = {}
    following: dict[int, dict[int, float]] = {}
    for ends in [[length] for length in lengths] if reader.follows_length else [lengths]:
        values: list[float] = []
        tokens = torch.from_numpy(ids[: ends[-1]])[None].to(reader.device)
        for start, outputs in reader.decode(tokens, reader.chunk if reader.cache_is_exact else None):
            hidden = outputs.last_hidden_state
            stop = start + hidden.shape[1]
            targets = tokens[:, start + 1 : stop + 1]
            values += reader.score(outputs, hidden[:, : targets.shape[1]], targets)[0].double().cpu().tolist()
            for end in ends:
                if start < end <= stop:
                    logits = reader.split.logits(outputs, hidden[:, end - 1 - start : end - start])[0, 0].double()
                    following[end] = _most_probable(logits.log_softmax(-1))
        losses |= {length: values[: length - 1] for length in scored_lengths if length in ends}
    return Reading(role, label, losses, following)


@torch.inference_mode()
def _read_singles(reader: LiveReader, ids: np.ndarray) -> list[Single]:
    tokens, following = (values[:: -(-len(ids) // _SINGLES)] for values in (ids, np.roll(ids, -1)))
    ((_, outputs),) = reader.decode(torch.from_numpy(tokens)[:, None].to(reader.device), None)
    values = reader.split.logits(outputs, outputs.last_hidden_state)[:, 0].double().log_softmax(-1)
    return [
        Single(token, {after: float(row[after])}, _most_probable(row))
        for token, after, row in zip(tokens.tolist(), following.tolist(), values, strict=True)
    ]


def _most_probable(values: torch.Tensor) -> dict[int, float]:
    """values: ln p by id."""
    best = values.topk(min(_REFERENCE_TOP, len(values)))
    return dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))


@dataclass(frozen=True)
class Answers:
    """The server's side.

    gives_losses: whether it gives log-probabilities of the prompt's tokens; else those of the next token. losses,
    next_tokens: see Reading. singles: ln p by id after the single tokens of the expected side. accepted: the longest
    prompt, tokens, 0 if none.
    """

    gives_losses: bool
    losses: dict[int, list[float]]
    next_tokens: dict[int, dict[int, float]]
    singles: list[dict[int, float]]

    @property
    def accepted(self) -> int:
        return max([0, *self.losses, *self.next_tokens])


def ask(endpoint: Endpoint, expected: Expected, tokenizer: Any, *, gives_losses: bool) -> tuple[Answers, Verdict]:
    """Ask the server for the expected lengths that it accepts, until the verdict is clear. Raises EndpointError.

    gives_losses: see Endpoint.gives_prompt_losses.
    """
    answers = Answers(gives_losses, {}, {}, [])
    ids_by_text = cache(lambda: _ids_by_text(tokenizer))

    def following(ids: Sequence[int]) -> dict[int, float]:
        return _next_tokens(endpoint, ids, ids_by_text)

    for single in expected.singles:
        if gives_losses:
            (token,) = single.following
            answers.singles.append({token: -endpoint.prompt_losses([single.token, token])[0]})
        else:
            answers.singles.append(following([single.token]))
    if gives_losses:
        _ask_lengths(expected, expected.scored_lengths, answers.losses, endpoint.prompt_losses)
        return answers, judge(answers, expected)
    first = expected.lengths[::-1][::_EVERY][::-1]
    _ask_lengths(expected, first, answers.next_tokens, following)
    if not (any(answers.next_tokens.values()) and any(answers.singles)):
        raise EndpointError(
            f"{endpoint.url} names tokens by texts that do not tell the checkpoint's tokens. It serves another "
            "model, or needs an option to name them by id, such as vLLM's --return-tokens-as-token-ids."
        )
    verdict = judge(answers, expected, wider=_WIDER)
    if verdict.verdict == UNCLEAR:
        rest = [length for length in expected.lengths if length < answers.accepted and length not in first]
        _ask_lengths(expected, rest, answers.next_tokens, following)
        verdict = judge(answers, expected)
    return answers, verdict


def _ask_lengths(
    expected: Expected, lengths: Sequence[int], found: dict[int, Any], ask_server: Callable[[Sequence[int]], Any]
) -> None:
    """Add the server's answers to prompts of these lengths, ascending, up to the first that it refuses."""
    speed, begun = Speed(), time.monotonic()
    with progress_bar("asking the server", 1) as step:
        for number, length in enumerate(lengths, 1):
            started = time.monotonic()
            try:
                found[length] = ask_server(expected.ids[:length])
            except PromptRefusedError as error:
                if not found:
                    raise
                warn(f"Comparing up to {max(found)} tokens: {error}")
                return
            now = time.monotonic()
            speed.add(length, length, now - started)
            left = sum(later * speed.seconds_per_token(later) for later in lengths[number:])
            step(done=(now - begun) / (now - begun + left), left=left)


def _next_tokens(
    endpoint: Endpoint, ids: Sequence[int], ids_by_text: Callable[[], Mapping[str, int]]
) -> dict[int, float]:
    """ln p of the server's most probable next tokens, by id; without those whose text does not tell the id."""
    choice = endpoint.complete(ids, max_tokens=1, logprobs=_SERVER_TOP)
    logprobs = logprobs_of(choice)
    if entries := logprobs.get("content"):  # llama-server
        values = [(entry.get("id", -1), entry["logprob"]) for entry in entries[0]["top_logprobs"]]
    else:
        by_text = (logprobs.get("top_logprobs") or [None])[-1] or {}
        values = [(ids_by_text().get(text, -1), value) for text, value in by_text.items()]
    # llama-server gives none for a part of a character, which it writes as U+FFFD
    if not values and "\ufffd" not in str(choice.get("text")):
        raise EndpointError(
            f"{endpoint.url} gives no log-probabilities of the next token. Start the server with log-probabilities."
        )
    return {token: value for token, value in values if token >= 0}


def _ids_by_text(tokenizer: Any) -> dict[str, int]:
    """The ids of the names that servers give tokens, without names of several tokens, such as parts of a character.

    Decoded alone, a sentencepiece token loses its leading space, which some servers keep. vLLM can name ids.
    """
    ids: dict[str, set[int]] = defaultdict(set)
    for token in range(len(tokenizer)):
        names = {tokenizer.decode([token]), f"token_id:{token}"}
        if "▁" in (piece := tokenizer.convert_ids_to_tokens(token) or ""):
            names.add(piece.replace("▁", " "))
        for name in names:
            ids[name].add(token)
    return {name: tokens.pop() for name, tokens in ids.items() if len(tokens) == 1}


@dataclass(frozen=True)
class _Block:
    """Neighbouring log-probabilities. beyond: whether beyond the pretraining length. readings: by role."""

    beyond: bool
    server: np.ndarray
    readings: dict[str, np.ndarray]


def _blocks(answers: Answers, expected: Expected) -> Iterator[_Block]:
    if not answers.gives_losses:
        for length, tokens in sorted(answers.next_tokens.items()):
            if not tokens:
                continue
            values = {reading.role: _values_of(tokens, reading.next_tokens[length]) for reading in expected.readings}
            yield _Block(length > expected.pretraining_length, np.array(list(tokens.values())), values)
        return
    first = 1
    for length, losses in sorted(answers.losses.items()):
        for start in range(first, length, _BLOCK):
            part = slice(start - 1, min(start - 1 + _BLOCK, length - 1))
            read = {reading.role: -np.array(reading.losses[length][part]) for reading in expected.readings}
            yield _Block(start >= expected.pretraining_length, -np.array(losses[part]), read)
        first = length


def _values_of(tokens: Iterable[int], kept: Mapping[int, float]) -> np.ndarray:
    """ln p of the tokens. One that was not kept is at most as probable as the least one that was."""
    least = min(kept.values())
    return np.array([kept.get(token, least) for token in tokens])


def judge(answers: Answers, expected: Expected, wider: float = 1.0) -> Verdict:
    """Say which reading the server computes. wider: times the 95% intervals."""
    blocks = list(_blocks(answers, expected))
    comparisons = [_compare(reading.role, reading.label, blocks, wider) for reading in expected.readings]
    checkpoint, *rest = comparisons
    nearest = min(comparisons, key=lambda comparison: comparison.difference)
    apart = max(
        _mean_difference(block.readings[comparison.role] - block.readings[CHECKPOINT] for block in blocks)
        for comparison in rest
    )
    after_single = _mean_difference(
        np.array(list(values.values()))
        - _values_of(values, single.following if answers.gives_losses else single.next_tokens)
        for values, single in zip(answers.singles, expected.singles, strict=True)
    )
    rounding = _EXPLAINED * max(after_single, _LEAST)
    close = [comparison for comparison in rest if not -_CLOSE < comparison.low <= comparison.high < _CLOSE]
    unsure = ", ".join(comparison.label for comparison in close)
    differs = (
        f"The server differs from {checkpoint.label} by {checkpoint.difference:.2g} nats, and after a single token, "
        f"where no scaling matters, by {after_single:.2g}: "
    )
    hint = f" Nearest: {nearest.label}. Use a larger --length."
    if max(_FAR * apart, _LEAST) < nearest.difference <= rounding:
        verdict, reason = UNCLEAR, differs + "it has other weights, reads other tokens, or rounds too much."
    elif 1 - _APART < nearest.low <= nearest.high < 1 + _APART:
        verdict, reason = NOT_SERVED, f"The server computes as {nearest.label}, not as {checkpoint.label}."
    elif checkpoint.difference > max(apart, rounding):
        same = "its weights are the checkpoint's, as far as single tokens tell, but not its scaling."
        verdict, reason = NOT_SERVED, f"{differs}{same} Nearest: {nearest.label}."
    elif any(comparison.low > _APART or comparison.high < -_APART for comparison in rest):
        verdict, reason = NOT_SERVED, f"The server does not compute as {checkpoint.label}"
        reason += "." if nearest is checkpoint else f"; the nearest reading is {nearest.label}."
    elif unsure:
        verdict = UNCLEAR
        reason = f"The server rounds so much that {checkpoint.label} cannot be told from {unsure}.{hint}"
    elif checkpoint.difference > max(_CLOSE * apart, rounding):
        verdict, reason = UNCLEAR, f"{differs}more than rounding explains.{hint}"
    else:
        verdict, reason = SERVED, f"The server computes as {checkpoint.label}."
    return Verdict(verdict, nearest.label, reason, after_single, comparisons)


def _compare(role: str, label: str, blocks: Sequence[_Block], wider: float) -> Comparison:
    differences = {
        place: [block.server - block.readings[role] for block in blocks if block.beyond is place]
        for place in (False, True)
    }
    within, beyond = (_mean_difference(parts) if parts else None for parts in differences.values())
    difference = _mean_difference([*differences[False], *differences[True]])
    if role == CHECKPOINT:
        return Comparison(role, label, difference, within, beyond)
    base = np.concatenate([block.readings[CHECKPOINT] for block in blocks])
    toward = _off_line(np.concatenate([block.readings[role] for block in blocks]) - base, base)
    away = _off_line(np.concatenate([block.server for block in blocks]) - base, base)
    starts = np.cumsum([0, *(len(block.server) for block in blocks[:-1])])
    sums, weights = np.add.reduceat(away * toward, starts), np.add.reduceat(toward * toward, starts)
    low, high = ratio_interval(sums, weights)
    # too few tokens, or the same for these tokens, as dynamic NTK at the beginning
    if low is None or high is None or np.abs(toward).mean() <= np.abs(away).mean() / 20:
        return Comparison(role, label, difference, within, beyond, 0.0, -1.0, 1.0)
    share = float(sums.sum() / weights.sum())
    low, high = (share + wider * (end - share) for end in (low, high))
    return Comparison(role, label, difference, within, beyond, share, low, high)


def _off_line(values: np.ndarray, base: np.ndarray) -> np.ndarray:
    """The values less their least-squares line over the base."""
    line = np.stack([np.ones_like(base), base], axis=1)
    return values - line @ np.linalg.lstsq(line, values, rcond=None)[0]


def _mean_difference(values: Iterable[np.ndarray]) -> float:
    return float(np.abs(np.concatenate(list(values))).mean())
