"""The wording of a retrieval task: introduction, needle and question, built in or given by the user.

A needle is a line of its own; the question is the last line, which the key completes.
"""

from dataclasses import dataclass
from string import Formatter

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
        raise MethodError(f"The {what} {template!r} is no template: {error}. Write a brace as {{{{ or }}}}.") from error
    if any(field not in ("key", "name") or spec or conversion for field, spec, conversion in parts):
        raise MethodError(f"The {what} is {template!r}; only {{key}} and {{name}} may be in braces.")
    return {str(field) for field, _, _ in parts}


@dataclass(frozen=True)
class Templates:
    """What a prompt says. needle: with {key}, and {name} where there are several. question: with the same {name}.

    names: one of which each needle bears. Raises MethodError for templates that cannot be asked about.
    """

    needle: str
    question: str
    introduction: str = ""
    names: tuple[str, ...] = NAMES

    def __post_init__(self) -> None:
        if "key" not in _fields("needle", self.needle):
            raise MethodError(f"The needle {self.needle!r} hides no key. Write {{key}} in its place.")
        if "key" in _fields("question", self.question):
            raise MethodError(
                f"The question {self.question!r} holds {{key}}, the answer. Leave it out: the key follows the question."
            )

    @property
    def named(self) -> bool:
        """Whether needle and question bear a name."""
        return "name" in _fields("needle", self.needle) and "name" in _fields("question", self.question)

    def check_keys(self, count: int) -> None:
        """Raises MethodError where the templates do not tell `count` needles apart."""
        if not 0 < count <= len(self.names):
            raise MethodError(f"{count} keys were asked for; there are names for 1 to {len(self.names)}.")
        if count > 1 and not self.named:
            raise MethodError(
                f"{count} keys need {{name}} in the needle and in the question, to tell which is asked for; they are "
                f"{self.needle!r} and {self.question!r}."
            )

    def needle_line(self, name: str, key: str) -> str:
        return f"\n{self.needle.format(name=name, key=key)}\n"

    def question_line(self, name: str) -> str:
        """The question as the key follows it: after one space, or after an opening quote or bracket."""
        line = f"\n{self.question.format(name=name)}"
        return line if line[-1].isspace() or line[-1] in _OPENING else f"{line} "


# Mohtashami & Jaggi 2023, arXiv:2305.16300: the prompt, line by line. Beyond the needle the sentences go on where they
# were cut, instead of beginning anew.
PASSKEY = Templates(
    introduction="There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there.",
    needle="The pass key is {key}. Remember it. {key} is the pass key.",
    question="What is the pass key? The pass key is",
)
PASSKEY_FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."

STYLES = {
    # repeats the needle's own words: models of a few million parameters, that follow no instruction, copy from there
    "code": Templates(
        needle="{name}_KEY = {key}", question="{name}_KEY =", names=tuple(name.upper() for name in NAMES)
    ),
    "prose": Templates(
        introduction="Somewhere in the text below a secret number is given. Remember it for the question at the end.",
        needle="The secret number of {name} is {key}.",
        question="What is the secret number of {name}? The secret number of {name} is",
    ),
}


def choose_templates(style: str | None, needle: str | None, question: str | None, default: str) -> Templates:
    """Those of a style, or the user's own, with the names of the style `default`.

    Raises MethodError for an unknown style, for one template of two, and for a style beside templates.
    """
    if needle is None and question is None:
        style = style or default
        if style not in STYLES:
            raise MethodError(f"Unknown style {style!r}. Known: {', '.join(STYLES)}.{did_you_mean(style, STYLES)}")
        return STYLES[style]
    if needle is None or question is None:
        raise MethodError("Give --needle and --question together.")
    if style is not None:
        raise MethodError(f"--style {style} has no effect beside --needle and --question.")
    return Templates(needle, question, names=STYLES[default].names)
