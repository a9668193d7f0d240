"""The text that a chat template puts around a user's message."""

from dataclasses import dataclass
from typing import Any

from ropecli.data.conversations import warn_if_slow
from ropecli.errors import DataError, MethodError, reason_of

_MARK = "ROPECLI-MESSAGE"
CHOICES = ("auto", "none")


@dataclass(frozen=True)
class Frame:
    """before: up to the message, with the special tokens. after: up to the assistant's answer."""

    before: str
    after: str


def find_frame(tokenizer: Any, choice: str) -> Frame | None:
    """The frame of the tokenizer's chat template. choice: auto, if it has one; none, never.

    Raises MethodError for another choice, DataError for a template that fails or changes the message.
    """
    if choice not in CHOICES:
        raise MethodError(f"--chat-template is {choice!r}; expected auto or none.")
    if choice == "none" or not getattr(tokenizer, "chat_template", None):
        return None
    try:
        with warn_if_slow():
            text = tokenizer.apply_chat_template(
                [{"role": "user", "content": _MARK}], tokenize=False, add_generation_prompt=True
            )
    except Exception as error:  # a template is a program
        raise DataError(f"The chat template fails: {reason_of(error)}. Use --chat-template none.") from error
    before, mark, after = str(text).partition(_MARK)
    if not mark or _MARK in after:
        raise DataError("The chat template does not contain the message once. Use --chat-template none.")
    return Frame(before, after)
