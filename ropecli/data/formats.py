"""What a row of a table holds: a text, or a conversation in one of the formats that people publish.

Every format but a text becomes messages in OpenAI's form: role, content, reasoning_content, tool_calls.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ropecli.errors import DataError, shortened, shown

TEXT_COLUMN = "text"
ROLES = ("system", "developer", "user", "assistant", "tool")
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys of an answer's reasoning."""
FLAGS = ("weight", "train", "loss")
"""Keys of whether an answer is trained on: OpenAI's, axolotl's, ms-swift's."""
_TOOLS = ("tools", "tool_defs", "functions")
_SHAREGPT = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}
_EXAMPLE = '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'

Message = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """A row of a table, unchecked. tools: JSON schemas, as a list or as JSON text. system: the system prompt.

    read_only: number of first messages that are not trained on. unused: columns of the row that nothing reads.
    """

    messages: list[Any]
    tools: Any = None
    system: Any = None
    read_only: int = 0
    unused: list[str] = field(default_factory=list, compare=False)


@dataclass(frozen=True)
class Fault:
    """A row that cannot be used. message: the reason."""

    message: str


class Row(NamedTuple):
    """A row of a table, or the text of a file. name: the file, with the number of a line or row."""

    name: str
    body: str | Conversation | Fault


def _alpaca(row: Mapping[str, Any]) -> list[Any]:
    messages, history = list[Any](), row.get("history") or []
    if not isinstance(history, list) or any(not isinstance(turn, list) or len(turn) != 2 for turn in history):
        raise DataError(f"history is {shown(history)}; expected a list of pairs of a question and an answer.")
    for question, answer in history:
        messages += _turn(question, answer)
    for name in ("instruction", "input"):
        if not isinstance(row.get(name), str | None):
            raise DataError(f"{name} is {shown(row[name])}; expected text.")
    instruction = "\n".join(part for part in (row["instruction"], row.get("input")) if part)
    return [*messages, *_turn(instruction, row["output"])]


def _turn(question: Any, answer: Any) -> list[Any]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


_FORMATS = (("messages",), ("conversations",), ("instruction", "output"), ("prompt", "completion"))
"""Columns that make a conversation."""
_OPTIONAL = (*_TOOLS, "system")
_OF_ALPACA = ("input", "history")


def columns_of(text_column: str) -> tuple[str, ...]:
    """All columns that may be read of a row."""
    formats = [*(name for names in _FORMATS for name in names), *_OF_ALPACA] if text_column == TEXT_COLUMN else []
    return tuple(dict.fromkeys((text_column, *formats, *_OPTIONAL)))


def has_body(columns: Sequence[str], text_column: str) -> bool:
    """Whether a row with these columns is read."""
    formats = _FORMATS if text_column == TEXT_COLUMN else ()
    return text_column in columns or any(set(names) <= set(columns) for names in formats)


def body_of(row: Mapping[str, Any], text_column: str, columns: Sequence[str]) -> str | Conversation:
    """The text or the conversation of a row. Raises DataError.

    text_column: if it is the default, other formats are read too. columns: of the table.
    """
    value = row.get(text_column)
    if isinstance(value, str) and text_column not in ("messages", "conversations"):
        messages = _messages_in(value)
        return value if messages is None else _conversation(messages, row, (text_column,), columns)
    is_named = text_column != TEXT_COLUMN or isinstance(value, list)
    for names in ((text_column,),) if is_named else _FORMATS:
        if any(row.get(name) is None for name in names):
            continue
        if "instruction" in names:
            return _conversation(_alpaca(row), row, (*names, *_OF_ALPACA), columns)
        if "prompt" in names and all(isinstance(row[name], str) for name in names):
            return _conversation(_turn(*(row[name] for name in names)), row, names, columns)
        parts = [_messages_of(name, row[name]) for name in names]
        read_only = len(parts[0]) if len(parts) > 1 else 0
        return _conversation([message for part in parts for message in part], row, names, columns, read_only)
    present = next((name for name in columns_of(text_column) if name in columns), None)
    if present and has_body(columns, text_column):
        raise DataError(
            f"{present} is {'null' if row.get(present) is None else shown(row[present])}; expected text "
            "or a conversation."
        )
    known = " or ".join(" and ".join(names) for names in _FORMATS)
    more = f" Expected {text_column}, or {known}, such as {_EXAMPLE}." if text_column == TEXT_COLUMN else ""
    raise DataError(f"no column {text_column!r}. Columns: {shortened(', '.join(columns), 200) or 'none'}.{more}")


def _conversation(
    messages: list[Any], row: Mapping[str, Any], names: Sequence[str], columns: Sequence[str], read_only: int = 0
) -> Conversation:
    """names: the columns that the messages are of."""
    given = [name for name in _TOOLS if row.get(name)]
    if len(given) > 1:
        raise DataError(f"{given[0]} and {given[1]} both have tools. Remove one of them.")
    tools = row[given[0]] if given else None
    if given == ["functions"] and isinstance(parsed := _json_of("functions", tools), list):
        tools = [{"type": "function", "function": function} for function in parsed]
    used_or_null = {*names, *_OPTIONAL, *(name for name, value in row.items() if value is None)}
    unused = [name for name in columns if name not in used_or_null]
    return Conversation(messages, tools, row.get("system"), read_only, unused)


def _messages_in(text: str) -> list[Any] | None:
    """The messages that a text is JSON of."""
    value: Any = None
    if text.lstrip().startswith("["):
        with suppress(ValueError, RecursionError):
            value = json.loads(text)
    is_messages = bool(value) and all(isinstance(part, dict) and {"role", "from"} & part.keys() for part in value)
    return value if is_messages else None


def _messages_of(column: str, value: Any) -> list[Any]:
    """A list of messages, or JSON text of one."""
    value = _json_of(column, value)
    if not isinstance(value, list) or any(isinstance(part, str) for part in value):
        raise DataError(f"{column} is {shown(value)}; expected text or a conversation.")
    return value


def messages_of(conversation: Conversation) -> tuple[list[Message], Any]:
    """The messages in OpenAI's form, and the tools; None without. Raises DataError."""
    if not conversation.messages:
        raise DataError("the conversation is empty.")
    messages = [_message(number, message) for number, message in enumerate(conversation.messages)]
    if not isinstance(conversation.system, str | None):
        raise DataError(f"system is {shown(conversation.system)}; expected text.")
    if conversation.system:
        if messages[0]["role"] not in ("system", "developer"):
            messages.insert(0, {"role": "system", "content": conversation.system})
        elif messages[0].get("content") != conversation.system:
            raise DataError("the row has a system prompt in its column system, and another in message 0. Remove one.")
    tools = _json_of("tools", conversation.tools) or None
    if not isinstance(tools, list | None):
        raise DataError(f"tools is {shown(tools)}; expected a list.")
    return messages, tools


def _json_of(what: str, value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) and value else value
    except (ValueError, RecursionError) as error:
        raise DataError(f"{what} is text that is not JSON: {error}") from error


def _message(number: int, given: Any) -> Message:
    if not isinstance(given, dict):
        raise DataError(f"message {number} is {shown(given)}; expected a role and a content.")
    message = _given(given)
    if "from" in message and "role" not in message:
        role, value = message.pop("from"), message.pop("value", None)
        message |= {"role": _SHAREGPT.get(str(role), role)}
        if role == "function_call":
            calls = _json_of(f"message {number}, a function_call,", value)
            message["tool_calls"] = calls if isinstance(calls, list) else [calls]
        else:
            message["content"] = value
    if message.get("role") == "function":  # OpenAI's name of a tool before 2023-11
        message["role"] = "tool"
    if "function_call" in message:  # of the same time
        if message.get("tool_calls"):
            raise DataError(f"message {number} has both tool_calls and a function_call. Remove one of them.")
        message["tool_calls"] = [message.pop("function_call")]
    if message.get("role") not in ROLES:
        raise DataError(
            f"message {number} has the role {shown(message.get('role'))}; expected {', '.join(ROLES)}, or ShareGPT's "
            f"{', '.join(_SHAREGPT)}."
        )
    content = message.get("content")
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        texts = [part.get("text", "") for part in content]
        if all(isinstance(text, str) for text in texts):
            content = message["content"] = "".join(texts)
    flags = [key for key in FLAGS if key in message]
    for key in flags:
        if message[key] not in (0, 1):
            raise DataError(f"message {number} has the {key} {shown(message[key])}; expected 0 or 1, false or true.")
    if message["role"] == "assistant" and flags:
        weight = int(all(message[key] for key in flags))
        message = {key: value for key, value in message.items() if key not in flags} | {"weight": weight}
    calls = message.get("tool_calls")
    if calls is not None:
        if not isinstance(calls, list):
            raise DataError(f"message {number} has the tool_calls {shown(calls)}; expected a list.")
        message["tool_calls"] = [_call(number, call) for call in calls]
    if not isinstance(content, str) and not (content is None and (calls or reasoning_of(message))):
        raise DataError(f"message {number} has the content {shown(content)}; expected text.")
    reasoning = reasoning_of(message)
    if reasoning and not isinstance(message[reasoning], str):
        raise DataError(f"message {number} has the {reasoning} {shown(message[reasoning])}; expected text.")
    return message


def reasoning_of(message: Message) -> str | None:
    return next((key for key in REASONING if message.get(key)), None)


def _call(number: int, call: Any) -> dict[str, Any]:
    """A tool call with its arguments as an object; OpenAI writes them as JSON text."""
    call = _given(call) if isinstance(call, dict) else {}
    function = _given(call["function"]) if isinstance(call.get("function"), dict) else call
    arguments = _json_of(f"message {number}: the arguments of a tool call", function.get("arguments")) or {}
    if not isinstance(function.get("name"), str) or not isinstance(arguments, dict):
        raise DataError(
            f"message {number} has the tool call {shown(call)}; expected a name, and arguments as an object."
        )
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else {"type": "function", "function": function}


def _given(value: Mapping[str, Any]) -> dict[str, Any]:
    """Without the keys that are null: OpenAI and tables write them for what a message has not."""
    return {key: part for key, part in value.items() if part is not None}
