"""Renders conversations with the tokenizer's chat template, and finds the tokens to train on.

A row has `messages` in OpenAI's format (role, content) or `conversations` in ShareGPT's (from, value). An answer is
what follows the generation prompt, up to and including its end marker. A template with `{% generation %}` marks its
answers itself; of another one, prefixes of the conversation are rendered, and each must be a prefix of the whole. If
that also holds without the turns between the first and the current one, these are skipped, which takes linear time.
"""

import hashlib
import json
import logging
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from ropecli.data.documents import Document, encode
from ropecli.errors import DataError, reason_of, shown

COLUMNS = ("messages", "conversations")
ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT = {"human": "user", "gpt": "assistant"}
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_BATCH = 32
_PATIENCE = 10.0
"""Seconds."""
_INSTEAD = "Use train_on: all, or a chat template with {% generation %} markers."

Messages = list[dict[str, Any]]
Spans = list[tuple[int, int]]
"""(start, stop) of each answer, characters."""


@dataclass(frozen=True)
class Conversation:
    """A row of a table, unchecked. tools: JSON schemas, as a list or as JSON text. system: the system prompt."""

    messages: list[Any]
    tools: Any = None
    system: Any = None


def template_digest(tokenizer) -> str | None:
    """sha256 over everything that determines how conversations are rendered; None without a chat template."""
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        return None
    settings = json.dumps([template, tokenizer.special_tokens_map], sort_keys=True, default=str)
    return hashlib.sha256(settings.encode()).hexdigest()


def tokenize_conversations(
    rows: Iterable[tuple[str, Conversation]], tokenizer, train_on: str = "assistant"
) -> Iterator[Document]:
    """Render and tokenize (name, conversation) pairs.

    train_on: assistant, the answers; all. Raises DataError with the number of unusable rows and the first one, after
    all others.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(
            "The tokenizer has no chat template, which conversations need. Put a chat_template.jinja into the "
            "checkpoint's folder, or render the conversations into a column of text."
        )
    numbered, faults = enumerate(rows), list[tuple[int, str]]()
    while batch := list(islice(numbered, _BATCH)):
        rendered = []
        with warn_if_slow():
            for number, (name, conversation) in batch:
                try:
                    rendered.append((number, name, *_render(conversation, tokenizer, train_on)))
                except DataError as error:
                    faults.append((number, f"{name}: {error}"))
        if not rendered:
            continue
        texts = [text for _, _, text, _ in rendered]
        masked = train_on == "assistant"
        # the template has the special tokens
        encoded = encode(tokenizer, texts, add_special_tokens=False, return_offsets_mapping=masked)
        for index, (number, name, text, spans) in enumerate(rendered):
            ids = np.array(encoded["input_ids"][index], dtype=np.int64)
            try:
                trained = _trained(text, encoded["offset_mapping"][index], spans) if masked else None
            except DataError as error:
                faults.append((number, f"{name}: {error}"))
            else:
                yield Document(name, ids, trained=trained)
    if faults:
        raise DataError(min(faults)[1] + (f" {len(faults):,} rows have such faults." if len(faults) > 1 else ""))


@contextmanager
def warn_if_slow() -> Iterator[None]:
    """Warn after some seconds of rendering: a chat template is a program of its author, which may never end."""
    warning = f"The chat template has been rendering for {_PATIENCE:g} seconds and may never end. Ctrl-C stops it."
    timer = threading.Timer(_PATIENCE, logging.getLogger("ropecli").warning, [warning])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _render(conversation: Conversation, tokenizer, train_on: str) -> tuple[str, Spans]:
    """The whole text and its answers."""
    if not conversation.messages:
        raise DataError("the conversation is empty.")
    messages = [_message(number, message) for number, message in enumerate(conversation.messages)]
    if not isinstance(conversation.system, str | None):
        raise DataError(f"system is {shown(conversation.system)}; expected text.")
    if conversation.system and messages[0]["role"] not in ("system", "developer"):
        messages.insert(0, {"role": "system", "content": conversation.system})
    try:
        tools = conversation.tools
        tools = _without_none(json.loads(tools) if isinstance(tools, str) else tools) or None
    except (ValueError, RecursionError) as error:
        raise DataError(f"tools is not JSON: {error}") from error

    def render(part: Messages, prompt: bool = False) -> str:
        try:
            return tokenizer.apply_chat_template(part, tools=tools, tokenize=False, add_generation_prompt=prompt)
        except Exception as error:  # a template is a program
            raise DataError(f"the chat template fails: {reason_of(error)}") from error

    rendered = render(messages)
    _refuse_missing_text(messages, rendered)
    if train_on == "all":
        return rendered, []
    template = tokenizer.get_chat_template(tools=tools)
    if _GENERATION.search(template):
        from transformers.utils.chat_template_utils import render_jinja_template

        options = {"chat_template": template, "return_assistant_tokens_mask": True, **tokenizer.special_tokens_map}
        marked: Any = render_jinja_template([messages], tools=tools, **options)
        return rendered, [(start, stop) for start, stop in marked[1][0]]
    return rendered, _answers(messages, rendered, render, tokenizer.eos_token or "")


def _refuse_missing_text(messages: Messages, rendered: str) -> None:
    """Raise DataError if the template drops a message, as some do with the system prompt or with plain text."""
    for number, message in enumerate(messages):
        content = message.get("content", "").strip()
        # templates may move or remove reasoning, which comes first
        if message["role"] != "tool" and content and content.splitlines()[-1] not in rendered:
            raise DataError(f"the chat template leaves out message {number}, by the {message['role']}.")


def _answers(messages: Messages, rendered: str, render: Callable[..., str], eos: str) -> Spans:
    spans: Spans = []
    closing, prompts = None, False
    # messages, and characters of `rendered`: of the first turn; before this turn
    first, head, start, offset, stop = 0, 0, 0, 0, 0

    def place(number: int, context: Messages, head: int, offset: int) -> tuple[int, int]:
        """(start, stop) of an answer after `context`, of which `head` characters replace `offset` of the whole."""
        nonlocal closing, prompts
        message, before = messages[number], render(context, prompt=True)
        if closing is None:
            unprompted = render(context)
            # Phi-3's template ends a text with eos, unless it ends with the generation prompt
            closing = "" if before.startswith(unprompted) else eos
            prompts = before != unprompted
        after = render([*context, message]).removesuffix(closing)
        if not after.startswith(before):
            raise DataError(f"message {number} does not start with the chat template's generation prompt. {_INSTEAD}")
        if after[:head] != rendered[:head] or not rendered.startswith(after[head:], offset):
            raise DataError(
                f"the chat template renders message {number} differently if others follow, for example without its "
                f"reasoning. End each conversation with its only answer. {_INSTEAD}"
            )
        answer = after[len(before) :]
        if not prompts and not answer.lstrip().startswith(message.get("content", "").strip()):
            raise DataError(f"the chat template ignores add_generation_prompt. {_INSTEAD}")
        begin = offset + len(before) - head
        return begin, begin + len(answer)

    for number, message in enumerate(messages):
        if number and message["role"] == "user" and messages[number - 1]["role"] == "assistant":
            start, offset = number, stop
            first, head = (first, head) if first else (start, offset)
        if message["role"] != "assistant":
            continue
        if number == 0:
            raise DataError("message 0 is the assistant's; expected a message to answer.")
        try:
            begin, stop = place(number, messages[:first] + messages[start:number], head, offset)
        except DataError:
            begin, stop = place(number, messages[:number], 0, 0)
        # white space after the end marker is not part of the answer
        spans.append((begin, begin + len(rendered[begin:stop].rstrip())))
    return spans


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


def _message(number: int, given: Any) -> dict[str, Any]:
    message = _without_none(given)
    if not isinstance(message, dict):
        raise DataError(f"message {number} is {shown(given)}; expected a role and a content.")
    if "from" in message and "role" not in message:
        role = message["from"]
        message = {"role": _SHAREGPT.get(str(role), role), "content": message.get("value")}
    if message.get("role") not in ROLES:
        raise DataError(
            f"message {number} has the role {shown(message.get('role'))}; expected {', '.join(ROLES)}, or ShareGPT's "
            f"{' or '.join(_SHAREGPT)}."
        )
    content = message.get("content")
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        texts = [part.get("text", "") for part in content]
        if all(isinstance(text, str) for text in texts):
            content = message["content"] = "".join(texts)
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise DataError(f"message {number} has the content {shown(content)}; expected text.")
    return message


def _without_none(value: Any) -> Any:
    """Without the keys that a table adds to some rows because others have them."""
    if isinstance(value, dict):
        return {key: _without_none(part) for key, part in value.items() if part is not None}
    return [_without_none(part) for part in value] if isinstance(value, list) else value
