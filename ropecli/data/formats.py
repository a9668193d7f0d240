"""What a row of a table holds: a text, or a conversation in one of the formats that people publish.

Every format but a text becomes messages in OpenAI's form: role, content, reasoning_content, tool_calls.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ropecli.errors import DataError, shortened, shown

TEXT_COLUMN = "text"
ROLES = ("system", "developer", "user", "assistant", "tool")
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys of an answer's reasoning."""
_SHAREGPT = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}
_EXAMPLE = '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'

Message = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """A row of a table, unchecked. tools: JSON schemas, as a list or as JSON text. system: the system prompt.

    read_only: number of first messages that are not trained on.
    """

    messages: list[Any]
    tools: Any = None
    system: Any = None
    read_only: int = 0


def _alpaca(row: Mapping[str, Any]) -> Conversation:
    messages: list[Any] = []
    for question, answer in row.get("history") or ():
        messages += _turn(question, answer)
    instruction = "\n".join(part for part in (row["instruction"], row.get("input")) if part)
    return Conversation([*messages, *_turn(instruction, row["output"])], row.get("tools"), row.get("system"))


def _prompt(row: Mapping[str, Any]) -> Conversation:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return Conversation(_turn(prompt, completion), row.get("tools"), row.get("system"))
    prompt, completion = _messages_of("prompt", prompt), _messages_of("completion", completion)
    return Conversation([*prompt, *completion], row.get("tools"), row.get("system"), len(prompt))


def _turn(question: Any, answer: Any) -> list[Any]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


_FORMATS: dict[tuple[str, ...], Callable[[Mapping[str, Any]], Conversation] | None] = {
    ("messages",): None,
    ("conversations",): None,
    ("instruction", "output"): _alpaca,
    ("prompt", "completion"): _prompt,
}
"""Required columns, and how they become a conversation; None for a list of messages."""
_OPTIONAL = ("tools", "system", "input", "history")


def columns_of(text_column: str) -> tuple[str, ...]:
    """All columns that may be read of a row."""
    formats = [name for names in _FORMATS for name in names] if text_column == TEXT_COLUMN else []
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
        return _conversation_in(value, row) or value
    is_named = text_column != TEXT_COLUMN or isinstance(value, list)
    formats = {(text_column,): None} if is_named else _FORMATS
    for names, read in formats.items():
        if all(row.get(name) is not None for name in names):
            if read:
                return read(row)
            return Conversation(_messages_of(names[0], row[names[0]]), row.get("tools"), row.get("system"))
    present = next((name for name in columns_of(text_column) if name in columns), None)
    if present and has_body(columns, text_column):
        raise DataError(
            f"{present} is {'null' if row.get(present) is None else shown(row[present])}; expected text "
            "or a conversation."
        )
    known = " or ".join(" and ".join(names) for names in _FORMATS)
    more = f" Expected {text_column}, or {known}, such as {_EXAMPLE}." if text_column == TEXT_COLUMN else ""
    raise DataError(f"no column {text_column!r}. Columns: {shortened(', '.join(columns), 200) or 'none'}.{more}")


def _conversation_in(text: str, row: Mapping[str, Any]) -> Conversation | None:
    """The conversation that a text is, if it is JSON of messages."""
    if not text.lstrip().startswith("["):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    is_messages = bool(value) and all(isinstance(part, dict) and {"role", "from"} & part.keys() for part in value)
    return Conversation(value, row.get("tools"), row.get("system")) if is_messages else None


def _messages_of(column: str, value: Any) -> list[Any]:
    """A list of messages, or JSON text of one."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{column} is text that is not JSON: {error}. Expected messages, such as {_EXAMPLE}."
            ) from None
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
    if conversation.system and messages[0]["role"] not in ("system", "developer"):
        messages.insert(0, {"role": "system", "content": conversation.system})
    return messages, _json_of("tools", conversation.tools) or None


def _json_of(what: str, value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) and value else value
    except (ValueError, RecursionError) as error:
        raise DataError(f"{what} is not JSON: {error}") from error


def _message(number: int, given: Any) -> Message:
    if not isinstance(given, dict):
        raise DataError(f"message {number} is {shown(given)}; expected a role and a content.")
    message = _given(given)
    if "from" in message and "role" not in message:
        role, value = message["from"], message.get("value")
        message = {"role": _SHAREGPT.get(str(role), role), "content": value}
        if role == "function_call":
            calls = _json_of(f"message {number}, a function_call,", value)
            message = {"role": "assistant", "tool_calls": calls if isinstance(calls, list) else [calls]}
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
    calls = message.get("tool_calls")
    if calls is not None:
        if not isinstance(calls, list):
            raise DataError(f"message {number} has the tool_calls {shown(calls)}; expected a list.")
        message["tool_calls"] = [_call(number, call) for call in calls]
    if not isinstance(content, str) and not (content is None and (calls or reasoning_of(message))):
        raise DataError(f"message {number} has the content {shown(content)}; expected text.")
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
