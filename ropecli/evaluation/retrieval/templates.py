"""The wording of a retrieval task: introduction, needle and question, built in or given by the user.

Each needle is a separate line. The question is the last line, which the key completes.
"""

from dataclasses import dataclass
from string import Formatter

from ropecli.data.sources import DEMO, DEMO_TRAIN
from ropecli.errors import MethodError, did_you_mean

_NAMES = (
    "Amber Birch Cedar Clover Copper Coral Crystal Dahlia Ebony Ember Falcon Fern Garnet Ginger Hazel Indigo Ivory "
    "Jasmine Lotus Maple Marble Nectar Olive Onyx Orchid Pearl Quartz Raven Ruby Saffron Topaz Willow"
)
NAMES = tuple(_NAMES.split())
_OPENING = "\"'`([{<"


def _fields(what: str, template: str) -> set[str]:
    try:
        parts = [part[1:] for part in Formatter().parse(template) if part[1] is not None]
    except ValueError as error:
        raise MethodError(
            f"The {what} {template!r} is not a valid template: {error}. Write a literal brace as {{{{ or }}}}."
        ) from error
    if any(field not in ("key", "name") or spec or conversion for field, spec, conversion in parts):
        raise MethodError(f"The {what} is {template!r}; only {{key}} and {{name}} are allowed in braces.")
    return {str(field) for field, _, _ in parts}


@dataclass(frozen=True)
class Templates:
    """The wording of a prompt. needle: contains {key}, and {name} for several needles. question: contains {name} then.

    names: values for {name}, a different one for each needle. Raises MethodError for invalid templates.
    """

    needle: str
    question: str
    introduction: str = ""
    names: tuple[str, ...] = NAMES

    def __post_init__(self) -> None:
        if "key" not in _fields("needle", self.needle):
            raise MethodError(f"The needle is {self.needle!r}; expected {{key}} in it.")
        if "key" in _fields("question", self.question):
            raise MethodError(f"The question is {self.question!r}; remove {{key}}, which is the answer.")

    @property
    def named(self) -> bool:
        """Whether needle and question contain {name}."""
        return "name" in _fields("needle", self.needle) and "name" in _fields("question", self.question)

    def check_keys(self, count: int) -> None:
        """Raise MethodError if the templates do not distinguish `count` needles."""
        if not 0 < count <= len(self.names):
            raise MethodError(f"The number of keys is {count}; expected 1 to {len(self.names)}.")
        if count > 1 and not self.named:
            raise MethodError(
                f"{count} keys require {{name}} in the needle and in the question; they are {self.needle!r} and "
                f"{self.question!r}."
            )

    def needle_line(self, name: str, key: str) -> str:
        return f"\n{self.needle.format(name=name, key=key)}\n"

    def question_line(self, name: str) -> str:
        """The question, ending with white space or an opening quote or bracket, so that the key can follow."""
        line = f"\n{self.question.format(name=name)}"
        return line if line[-1].isspace() or line[-1] in _OPENING else f"{line} "


# Mohtashami & Jaggi 2023, arXiv:2305.16300: the prompt, line by line. After the needle, the sentences continue where
# they were cut instead of starting again.
PASSKEY = Templates(
    introduction="There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there.",
    needle="The pass key is {key}. Remember it. {key} is the pass key.",
    question="What is the pass key? The pass key is",
)
PASSKEY_FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."

STYLES = {
    # the question repeats the needle's words: small models that follow no instructions can copy from there
    "code": Templates(
        needle="{name}_KEY = {key}", question="{name}_KEY =", names=tuple(name.upper() for name in NAMES)
    ),
    "prose": Templates(
        introduction="Somewhere in the text below a secret number is given. Remember it for the question at the end.",
        needle="The secret number of {name} is {key}.",
        question="What is the secret number of {name}? The secret number of {name} is",
    ),
}


def default_style(source: str) -> str:
    """The style for this data: code for the demo text, else prose."""
    return "code" if source in (DEMO, DEMO_TRAIN) else "prose"


def choose_templates(style: str | None, needle: str | None, question: str | None, default: str) -> Templates:
    """Return the templates of a style, or the user's own with the names of the style `default`.

    Raises MethodError for an unknown style, for only one of two templates, and for a style together with templates.
    """
    if needle is None and question is None:
        style = style or default
        if style not in STYLES:
            raise MethodError(f"Unknown style {style!r}. Known: {', '.join(STYLES)}.{did_you_mean(style, STYLES)}")
        return STYLES[style]
    if needle is None or question is None:
        raise MethodError("--needle and --question must be given together.")
    if style is not None:
        raise MethodError(f"--style {style} cannot be used with --needle and --question.")
    return Templates(needle, question, names=STYLES[default].names)
