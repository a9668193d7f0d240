"""Renders conversations with the chat template, finds the tokens to train on, and proves that nothing is lost.

An answer is what follows the generation prompt, up to and including what ends it: an end marker, or the token that
begins the next message where the template writes no other (GLM). A template with `{% generation %}` marks its answers
itself, with or without their end; of another one, prefixes of the conversation are rendered, and each must be a prefix
of the whole. If that also holds without the turns between the first and the current one, these are skipped, which
takes linear time.

A template may leave out what it does not know: tool calls, reasoning, a system prompt. So every text is looked for in
what is rendered, in the order of the messages: what is not found is lost. Reasoning of earlier answers may be left out,
as it is at inference.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from ropecli.data.documents import Document, encode
from ropecli.data.formats import REASONING, Conversation, Fault, Message, messages_of, reasoning_of
from ropecli.errors import DataError, reason_of

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_THINKING = re.compile(r"(\s*<think>)(.*?)(</think>)(.*)", re.DOTALL)
_BATCH = 32
_KEYS = ("role", "content", "tool_calls", "weight")
_MARKERS = "Use a chat template with {% generation %} markers."
_END = "Use a chat template that writes an end token after each answer, or train_on: all."
_EACH = (
    "Use train_on: each-answer, which makes a sequence per answer, or a chat template with {% generation %} markers."
)
Spans = list[tuple[int, int]]
"""(start, stop) of each answer, characters."""


@dataclass(frozen=True)
class Rendered:
    """The text of a sequence to train on. spans: of the answers. turns: where its turns start, characters.

    lost, unused: see Document; of the first text of a conversation.
    """

    text: str
    spans: Spans
    turns: list[int]
    lost: str = ""
    unused: frozenset[str] = frozenset()


@dataclass(frozen=True)
class _Part:
    """A text or value that the template must render. message: its number; None for a tool."""

    message: int | None
    role: str
    what: str
    value: Any

    def forms(self) -> Iterator[str]:
        """The value as it is, and as JSON."""
        for write in (str, json.dumps, lambda value: json.dumps(value, ensure_ascii=False)):
            form = write(self.value)
            yield form[1:-1] if isinstance(self.value, str) and write is not str else form

    def find(self, text: str, start: int = 0) -> tuple[int, int] | None:
        """(start, stop) of the value in the text; None if it is not there."""
        places = ((text.find(form, start), form) for form in self.forms())
        return next(((place, place + len(form)) for place, form in places if place >= 0), None)

    def __str__(self) -> str:
        return self.what if self.message is None else f"{self.what} of message {self.message}, by the {self.role}"


def tokenize_conversations(
    rows: Iterable[tuple[str, Conversation]], tokenizer, train_on: str = "assistant", *, drop_unrendered: bool = False
) -> Iterator[Document | Fault]:
    """Render and tokenize (name, conversation) pairs; a Fault for one that cannot be trained on.

    train_on: assistant, all answers in one document; each-answer, a document per answer, which ends with it; all, every
    token. drop_unrendered: keep conversations of which the template leaves something out. Raises DataError without a
    chat template.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(
            "The tokenizer has no chat template, which conversations need. Put a chat_template.jinja into the "
            "checkpoint's folder, or render the conversations into a column of text."
        )
    renderer, rows = _Renderer(tokenizer, train_on, drop_unrendered), iter(rows)
    while batch := list(islice(rows, _BATCH)):
        rendered: list[tuple[str, Rendered | Fault]] = []
        for name, conversation in batch:
            try:
                texts = renderer.render(conversation)
            except DataError as error:
                rendered.append((name, Fault(f"{name}: {error}")))
                continue
            for number, answer in enumerate(texts, 1):
                rendered.append((f"{name}, answer {number}" if len(texts) > 1 else name, answer))
        whole = [text.text for _, text in rendered if isinstance(text, Rendered)]
        tokens: Any = {"input_ids": [], "offset_mapping": []}
        if whole:  # the template has the special tokens
            tokens = encode(tokenizer, whole, add_special_tokens=False, return_offsets_mapping=True)
        encoded = zip(tokens["input_ids"], tokens["offset_mapping"], strict=True)
        for name, text in rendered:
            yield text if isinstance(text, Fault) else _document(name, text, *next(encoded), train_on)


def _document(
    name: str, text: Rendered, token_ids: list[int], offsets: list[tuple[int, int]], train_on: str
) -> Document | Fault:
    ids, turns = np.array(token_ids, dtype=np.int64), np.searchsorted([start for start, _ in offsets], text.turns)
    try:
        trained = None if train_on == "all" else _trained(text.text, offsets, text.spans)
    except DataError as error:
        return Fault(f"{name}: {error}")
    return Document(name, ids, trained=trained, turns=turns, lost=text.lost, unused=text.unused)


class _Renderer:
    """Renders conversations with one template. See tokenize_conversations."""

    def __init__(self, tokenizer: Any, train_on: str, drop_unrendered: bool) -> None:
        self.tokenizer, self.train_on, self.drop_unrendered = tokenizer, train_on, drop_unrendered
        self.tokens = sorted(tokenizer.get_added_vocab(), key=len, reverse=True)

    def render(self, conversation: Conversation) -> list[Rendered]:
        """One text, or one for each answer. Raises DataError."""
        messages, tools = messages_of(conversation)
        template = str(self.tokenizer.get_chat_template(tools=tools))
        unused = {f"column {column}" for column in conversation.unused}
        keys = {key for message in messages for key in message.keys() - {*_KEYS, *REASONING}}
        unused |= {f"key {key} of messages" for key in keys if not re.search(rf"\b{re.escape(key)}\b", template)}
        known = [name for name in REASONING if re.search(rf"\b{name}\b", template)]
        messages = [_with_known_reasoning(message, known) for message in messages] if known else messages
        if any("tool_calls" in message for message in messages) and self._joins_arguments(messages, tools):
            messages = [_with_text_arguments(message) for message in messages]
        first = conversation.read_only + len(messages) - len(conversation.messages)
        one = _Conversation(self, messages, tools, bool(_GENERATION.search(template)), first)
        first_text, *others = one.answer_by_answer() if self.train_on == "each-answer" else [one.whole()]
        lost = str(one.lost[0]) if one.lost else ""
        return [replace(first_text, lost=lost, unused=frozenset(unused)), *others]

    def text_of(self, messages: Sequence[Message], tools: Any, *, prompt: bool = False) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                list(messages), tools=tools, tokenize=False, add_generation_prompt=prompt
            )
        except Exception as error:  # a template is a program
            empty = [number for number, message in enumerate(messages) if message.get("content") is None]
            more = f" Message {empty[0]} has no content, which it may need." if empty else ""
            raise DataError(f"the chat template fails: {reason_of(error)}.{more}".replace("..", ".")) from error

    def ending(self, tools: Any) -> tuple[str, str] | None:
        """(what ends an answer, empty where the next message does; what follows one before a question).

        None if the template does not render the answer to a short question as it is.
        """
        probe = [{"role": role, "content": f"Part{role}"} for role in ("user", "assistant", "user")]
        try:
            last = self.text_of(probe[:2], tools).partition("Partassistant")
            earlier = self.text_of(probe, tools).partition("Partassistant")
        except DataError:
            return None
        if not (last[1] and earlier[1]):
            return None
        end, followed = last[2], earlier[2]
        # a template may also end a text with eos
        bare = end.removesuffix(self.tokenizer.eos_token or "")
        end = bare if bare.strip() and followed.startswith(bare) and not followed.startswith(end) else end
        return end.strip(), followed

    def _joins_arguments(self, messages: list[Message], tools: Any) -> bool:
        """Whether the template, like DeepSeek's, joins the arguments to a text, so that they must be JSON text."""
        try:
            text = self.text_of(messages, tools)
        except DataError:
            return True
        calls = (call for message in messages for call in message.get("tool_calls", ()))
        return any(repr(call["function"]["arguments"]) in text for call in calls if call["function"]["arguments"])


class _Conversation:
    """A conversation to render. first: number of the first message to train on. lost: what the template leaves out."""

    def __init__(
        self, renderer: _Renderer, messages: list[Message], tools: Any, marks_answers: bool, first: int
    ) -> None:
        self._renderer, self._messages, self._tools = renderer, messages, tools
        self._marks_answers, self._first = marks_answers, first
        self.lost: list[_Part] = []

    def _text(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        return self._renderer.text_of(messages, self._tools, prompt=prompt)

    def whole(self) -> Rendered:
        """The whole conversation in one text."""
        text = self._text(self._messages)
        if self._renderer.train_on == "all":
            if skipped := [number for number, message in enumerate(self._messages) if message.get("weight") == 0]:
                raise DataError(f"message {skipped[0]} is not to be trained on. Remove that, or train_on: all.")
            self._refuse_lost(self._messages, text)
            return Rendered(text, [], self._turns(text))
        if not self._marks_answers:
            spans, turns = self._answers(text)
            return Rendered(*self._ended(self._messages, text, spans), turns)
        self._refuse_lost(self._messages, text, keeps_reasoning=True)
        spans = self._marked(self._messages)
        answers = [part for part in _parts_of(self._messages, None) if part.role == "assistant"]
        if not all(any(part.find(text[start:stop]) for part in answers) for start, stop in spans):
            raise DataError("the chat template marks an answer without a text of it, so nothing would be trained on.")
        return Rendered(*self._ended(self._messages, text, spans), self._turns(text))

    def _ended(self, messages: list[Message], text: str, spans: Spans) -> tuple[str, Spans]:
        """The text of the messages, and the answers in it up to what ends them, which is added after the last one."""
        if (ending := self._renderer.ending(self._tools)) is None or not spans:
            return text, spans
        end, followed = ending
        answers = [part for part in _parts_of(messages, None) if part.role == "assistant"]
        ended: Spans = []
        for (start, stop), border in zip(spans, [*(start for start, _ in spans[1:]), len(text)], strict=True):
            answer, rest = text[start:stop].rstrip(), text[stop:border]
            has_end = answer.endswith(end) or not any(answer.endswith(tuple(part.forms())) for part in answers)
            is_part = self._marks_answers and border < len(text) and end not in rest
            if end and rest.lstrip().startswith(end):
                stop = text.index(end, stop) + len(end)
            elif end and (has_end or is_part):
                stop = start + len(answer)
            else:
                if is_last := not rest.strip():
                    rest += self._next_message(messages, text) or followed
                bare = rest.lstrip()
                token = next((token for token in self._renderer.tokens if bare.startswith(token)), None)
                if token is None:
                    raise DataError(f"the chat template does not end answers, so none would learn to stop. {_END}")
                end_token = rest[: len(rest) - len(bare) + len(token)]
                text = text[:stop] + end_token if is_last else text
                stop += len(end_token)
            ended.append((start, stop))
        return text, ended

    def _next_message(self, messages: list[Message], text: str) -> str:
        """The text between a tool call at the end of the messages and its result; empty without such a call."""
        if not messages[-1].get("tool_calls"):
            return ""
        try:
            whole = self._text([*messages, {"role": "tool", "content": "text"}])
        except DataError:
            return ""
        return whole[len(text) :] if whole.startswith(text) else ""

    def _is_trained(self, number: int) -> bool:
        """Whether to train on an answer. OpenAI's format has a weight of 0 for others."""
        return number >= self._first and self._messages[number].get("weight") != 0

    def answer_by_answer(self) -> list[Rendered]:
        """A text for each answer, as at inference."""
        rendered = []
        for number, message in enumerate(self._messages):
            if message["role"] != "assistant" or not self._is_trained(number):
                continue
            until = self._messages[: number + 1]
            if self._marks_answers:
                text, (start, stop) = self._text(until), self._marked(until)[-1]
            else:
                before, text, closing = self._prompt_of(number, until[:-1])
                start, stop = len(before), len(text.removesuffix(closing).rstrip())
            self._refuse_lost(until, text[:start], text[start:stop])
            rendered.append(Rendered(*self._ended(until, text, [(start, stop)]), [0]))
        if not rendered:
            raise DataError("the conversation has no answer of the assistant.")
        return rendered

    def _prompt_of(self, number: int, context: list[Message]) -> tuple[str, str, str]:
        """(prompt, text with the answer, end of a text that is not the answer's) of an answer after `context`."""
        question = context or [{"role": "user", "content": "text"}]
        before, unprompted = self._text(question, prompt=True), self._text(question)
        # Phi-3's template ends a text with eos, unless it ends with the generation prompt
        closing = "" if before.startswith(unprompted) else self._renderer.tokenizer.eos_token or ""
        text = self._text([*context, self._messages[number]])
        if not context:  # which templates rarely render
            opening = before[len(unprompted.removesuffix(closing)) :]
            if not opening or opening not in text:
                raise DataError(f"message 0 is the assistant's, and nothing shows where it starts. {_MARKERS}")
            before = text[: text.index(opening) + len(opening)]
        answer = text.removesuffix(closing)[len(before) :].lstrip()
        if before == unprompted and not answer.startswith((self._messages[number].get("content") or "").strip()):
            raise DataError(f"the chat template ignores add_generation_prompt. {_MARKERS}")
        if not text.startswith(before):
            raise DataError(f"message {number} does not start with the chat template's generation prompt. {_MARKERS}")
        return before, text, closing

    def _marked(self, messages: list[Message]) -> Spans:
        """The answers that the template marks."""
        from transformers.utils.chat_template_utils import render_jinja_template

        tokenizer = self._renderer.tokenizer
        options = {"chat_template": tokenizer.get_chat_template(tools=self._tools), **tokenizer.special_tokens_map}
        marked: Any = render_jinja_template([messages], tools=self._tools, return_assistant_tokens_mask=True, **options)
        spans: Spans = []
        for start, stop in marked[1][0]:
            touches = bool(spans) and not marked[0][0][spans[-1][1] : start].strip()  # as eos after the end marker
            spans[-1:] = [(spans[-1][0], stop)] if touches else [*spans[-1:], (start, stop)]
        answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if all(map(self._is_trained, answers)):
            return spans
        if len(spans) != len(answers):
            raise DataError("the chat template marks several answers as one, so some of them cannot be left out.")
        return [span for span, number in zip(spans, answers, strict=True) if self._is_trained(number)]

    def _turns(self, text: str) -> list[int]:
        """The characters where a user's message follows an answer, if what is before it is rendered the same alone."""
        starts = [number for number in range(1, len(self._messages)) if self._starts_turn(number)]
        eos = self._renderer.tokenizer.eos_token or ""
        prefixes = [self._text(self._messages[:number]) for number in starts]
        # Phi-3's template ends a text with eos
        prefixes = [prefix if text.startswith(prefix) else prefix.removesuffix(eos) for prefix in prefixes]
        return [0, *(len(prefix) for prefix in prefixes if text.startswith(prefix))]

    def _starts_turn(self, number: int) -> bool:
        return self._messages[number]["role"] == "user" and self._messages[number - 1]["role"] == "assistant"

    def _answers(self, rendered: str) -> tuple[Spans, list[int]]:
        """The answers, and the starts of turns."""
        spans: Spans = []
        turns = [0]
        # messages, and characters of `rendered`: of the first turn; before this turn
        first, head, start, stop = 0, 0, 0, 0

        def place(number: int, context: list[Message], head: int, offset: int) -> tuple[int, int]:
            """(start, stop) of an answer after `context`, of which `head` characters replace `offset` of the whole."""
            before, text, closing = self._prompt_of(number, context)
            after = text.removesuffix(closing)
            if after[:head] != rendered[:head] or not rendered.startswith(after[head:], offset):
                raise DataError(
                    f"the chat template renders message {number} differently if others follow, for example without "
                    f"its reasoning. {_EACH}"
                )
            self._refuse_lost([*context, self._messages[number]], before, after[len(before) :])
            begin = offset + len(before) - head
            return begin, begin + len(after) - len(before)

        for number, message in enumerate(self._messages):
            if number and self._starts_turn(number):
                start = number
                turns.append(stop)
                first, head = (first, head) if first else (start, stop)
            if message["role"] != "assistant":
                continue
            try:
                begin, stop = place(number, self._messages[:first] + self._messages[start:number], head, turns[-1])
            except DataError:
                begin, stop = place(number, self._messages[:number], 0, 0)
            if self._is_trained(number):
                # white space after the end marker is not part of the answer
                spans.append((begin, begin + len(rendered[begin:stop].rstrip())))
        return spans, turns

    def _refuse_lost(
        self, messages: list[Message], before: str, answer: str | None = None, *, keeps_reasoning: bool = False
    ) -> None:
        """Raise DataError if `before` lacks a part of the messages, or `answer` of the last one, an answer.

        keeps_reasoning: whether earlier answers must have their reasoning.
        """
        last = len(messages) - 1 if answer is not None else None
        parts = _parts_of(messages, self._tools)
        if last is not None and not any(part.message == last for part in parts):
            raise DataError(f"message {last}, an answer, is empty.")
        lost = _missing(parts, before, answer or "", last, keeps_reasoning)
        if lost and not self._renderer.drop_unrendered:
            way = "Use a template that renders it, remove it from the data, or set drop_unrendered: true."
            answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
            earlier = keeps_reasoning and lost[0].what == "reasoning" and lost[0].message not in answers[-1:]
            raise DataError(f"the chat template leaves out the {lost[0]}. {_EACH if earlier else way}")
        if last is not None and {part.what for part in parts if part.message == last} <= {
            part.what for part in lost if part.message == last
        }:
            raise DataError(f"the chat template leaves out all of message {last}, an answer.")
        self.lost += lost


def _with_known_reasoning(message: Message, known: Sequence[str]) -> Message:
    """The message with its reasoning, also of the form <think>...</think>, under a name that the template knows."""
    key, content = reasoning_of(message), message.get("content") or ""
    if message["role"] != "assistant" or key in known:
        return message
    if key is None and (thought := _THINKING.fullmatch(content)):
        return {**message, known[0]: thought[2].strip("\n"), "content": thought[4].lstrip("\n")}
    return {known[0] if name == key else name: value for name, value in message.items()}


def _with_text_arguments(message: Message) -> Message:
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls}


def _parts_of(messages: list[Message], tools: Any) -> list[_Part]:
    """The texts and values that the template must render."""
    parts: list[_Part] = []

    def add(number: int | None, role: str, what: str, text: str) -> None:
        if bare := text.strip():
            parts.append(_Part(number, role, what, bare))

    def add_arguments(number: int, value: Any) -> None:
        if isinstance(value, str):
            add(number, "assistant", "arguments", value)
        elif isinstance(value, dict | list):
            for part in (part for pair in value.items() for part in pair) if isinstance(value, dict) else value:
                add_arguments(number, part)
        else:
            parts.append(_Part(number, "assistant", "arguments", value))

    for number, message in enumerate(messages):
        role, content = message["role"], message.get("content") or ""
        if key := reasoning_of(message):
            add(number, role, "reasoning", message[key])
        if thought := _THINKING.fullmatch(content) if role == "assistant" else None:
            add(number, role, "reasoning", thought[2])
            content = thought[4]
        add(number, role, "content", content)
        for function in (call["function"] for call in message.get("tool_calls", ())):
            add(number, role, "tool call", function["name"])
            written = function["arguments"]
            add_arguments(number, json.loads(written) if isinstance(written, str) else written)
    for tool in tools if isinstance(tools, list) else ():
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if isinstance(function, dict) and isinstance(name := function.get("name"), str):
            add(None, "", f"tool {name}", name)
    return parts


def _missing(parts: Sequence[_Part], before: str, answer: str, last: int | None, keeps_reasoning: bool) -> list[_Part]:
    """The parts that are not in `before`, in the order of their messages, and of the message `last` in `answer`."""
    missing: list[_Part] = []
    cursor = end = 0
    number: int | None = None
    for part in parts:
        if part.message != number:
            number, cursor = part.message, end
        text = answer if part.message == last and last is not None else before
        is_free = text is answer or part.message is None or part.role in ("system", "developer")
        place = part.find(text, 0 if is_free else cursor)
        if place and not is_free:
            end = max(end, place[1])
        elif not place and (keeps_reasoning or text is answer or part.what != "reasoning"):
            missing.append(part)
    return missing


def _trained(text: str, offsets: list[tuple[int, int]], spans: Spans) -> np.ndarray:
    """Whether each token belongs to an answer, shape (tokens,), bool. offsets: (start, stop) of each, characters.

    White space that a token shares with an answer does not matter: such a token belongs to what else is in it.
    """
    starts, stops = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
    borders = np.array(spans, dtype=np.int64).reshape(-1)
    passed, reached = np.searchsorted(borders, starts, side="right"), np.searchsorted(borders, stops)
    for token in np.flatnonzero(passed < reached):
        for number in range(passed[token], reached[token]):
            if text[borders[number] : stops[token]].strip():
                raise DataError(
                    f"the token {text[starts[token] : stops[token]]!r} belongs to both the answer and the "
                    f"{('prompt', 'next message')[number % 2]}, so the answer cannot be masked exactly. Use train_on: "
                    "all, or change the spaces there in the chat template."
                )
    return passed % 2 == 1
