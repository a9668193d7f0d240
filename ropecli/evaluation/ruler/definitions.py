"""The tasks of RULER: wording, sizes and number of generated tokens.

Source: Hsieh et al. 2024, arXiv:2404.06654, and the configuration of github.com/NVIDIA/RULER (scripts/synthetic.yaml,
scripts/data/synthetic/constants.py). The wording and the scores follow the code.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ropecli.errors import MethodError, did_you_mean, shown

PUBLISHED = 0.856
"""RULER's threshold: the score of Llama-2-7B at 4,096 tokens over thirteen tasks (arXiv:2404.06654, section 4)."""
_CONTROL = re.compile(r"[\x00-\x1f]")
Words = Literal["numbers", "words", "uuids"]
NEEDLE = "One of the special magic {values} for {key} is: {value}."
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
SMALL = 4096
"""Below this length, the lists of common words are smaller, as in RULER's code."""


@dataclass(frozen=True)
class Wording:
    """head: before the context. tail: after it. answer: how the answer begins; the model continues it."""

    head: str
    tail: str
    answer: str


@dataclass(frozen=True)
class RulerTask:
    """generated: tokens that the model may generate. They count for the length of a prompt.

    ranked: whether the mode `rank` has candidates.
    """

    name: str
    wording: Wording
    generated: int
    ranked: bool = True


@dataclass(frozen=True)
class Needles(RulerTask):
    """Needles in a haystack. haystack: essay, noise, or other needles. key, value: their form.

    keys: needles with different keys. values: needles of each key. asked: keys that the question asks for.
    """

    haystack: Literal["noise", "essay", "needles"] = "essay"
    key: Words = "words"
    value: Words = "numbers"
    keys: int = 1
    values: int = 1
    asked: int = 1

    @property
    def one_answer(self) -> bool:
        return self.asked * self.values == 1


@dataclass(frozen=True)
class Variables(RulerTask):
    """A chain of variable assignments in noise. hops: assignments after the first. Begins with a solved example."""

    hops: int = 4


@dataclass(frozen=True)
class ListSize:
    """Sizes of a list. in_list: how often a common and another word appear. example, in_example: of the solved one."""

    in_list: tuple[int, int]
    example: int
    in_example: tuple[int, int]


@dataclass(frozen=True)
class CommonWords(RulerTask):
    """A numbered list in which ten words are more frequent than the others. Begins with a solved example.

    sizes: the second one below 4,096 tokens, and wherever the first does not fit.
    """

    common: int = 10
    sizes: tuple[ListSize, ...] = (ListSize((30, 3), 40, (10, 3)), ListSize((6, 1), 20, (3, 1)))


@dataclass(frozen=True)
class FrequentWords(RulerTask):
    """Coded words whose frequencies follow a zeta distribution. The three most frequent are asked for."""

    alpha: float = 2.0
    letters: int = 6
    asked: int = 3


@dataclass(frozen=True)
class Questions(RulerTask):
    """A question about one or several of many documents. source: squad or hotpotqa."""

    source: Literal["squad", "hotpotqa"] = "squad"


_NEEDLES = Wording(
    "Some special magic {values} are hidden within the following text. Make sure to memorize it. I will quiz you about "
    "the {values} afterwards.\n",
    "\nWhat are all the special magic {values} for {asked} mentioned in the provided text?",
    " The special magic {values} for {asked} mentioned in the provided text are",
)
_NEEDLE = Wording(
    "A special magic {values} is hidden within the following text. Make sure to memorize it. I will quiz you about the "
    "{values} afterwards.\n",
    "\nWhat is the special magic {values} for {asked} mentioned in the provided text?",
    " The special magic {values} for {asked} mentioned in the provided text is",
)
_VARIABLES = Wording(
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n",
    "\nQuestion: Find all variables that are assigned the value {value} in the text above.",
    " Answer: According to the chain(s) of variable assignment in the text above, {count} variables are assigned the "
    "value {value}, they are:",
)
_COMMON = Wording(
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often.\n",
    "\nQuestion: What are the 10 most common words in the above list?",
    " Answer: The top 10 words that appear most often in the list are:",
)
_FREQUENT = Wording(
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared "
    "coded words.",
    "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently "
    "appeared words in the above coded text?",
    " Answer: According to the coded text above, the three most frequently appeared words are:",
)
_ONLY_THE_ANSWER = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words."
)
_QUESTIONS = Wording(
    f"{_ONLY_THE_ANSWER}\n\nThe following are given documents.\n\n",
    f"\n\n{_ONLY_THE_ANSWER}\n\nQuestion: {{question}}",
    " Answer:",
)

TASKS: dict[str, RulerTask] = {
    task.name: task
    for task in (
        Needles("niah_single_1", _NEEDLE, 128, haystack="noise"),
        Needles("niah_single_2", _NEEDLE, 128),
        Needles("niah_single_3", _NEEDLE, 128, value="uuids"),
        Needles("niah_multikey_1", _NEEDLE, 128, keys=4),
        Needles("niah_multikey_2", _NEEDLE, 128, haystack="needles"),
        Needles("niah_multikey_3", _NEEDLE, 128, haystack="needles", key="uuids", value="uuids"),
        Needles("niah_multivalue", _NEEDLES, 128, values=4),
        Needles("niah_multiquery", _NEEDLES, 128, keys=4, asked=4),
        Variables("vt", _VARIABLES, 30),
        CommonWords("cwe", _COMMON, 120),
        FrequentWords("fwe", _FREQUENT, 50),
        Questions("qa_1", _QUESTIONS, 32, ranked=False),
        Questions("qa_2", _QUESTIONS, 32, ranked=False, source="hotpotqa"),
    )
}
SYNTHETIC = tuple(name for name, task in TASKS.items() if not isinstance(task, Questions))
"""The eleven tasks that need no dataset of questions."""


def choose_tasks(names: Sequence[str] | None, mode: str, questions: Sequence[str]) -> list[RulerTask]:
    """The tasks of these names, in RULER's order. Default: the eleven, and those whose `questions` were given.

    Raises MethodError for an unknown name, a task without candidates in the mode rank or without its questions, or
    questions without their task.
    """
    chosen = [*SYNTHETIC, *questions] if names is None else list(names)
    for name in chosen:
        if name not in TASKS:
            raise MethodError(f"Unknown task {shown(name)}. Known: {', '.join(TASKS)}.{did_you_mean(name, TASKS)}")
        task = TASKS[name]
        if isinstance(task, Questions) and name not in questions:
            raise MethodError(f"{name} needs a file of questions: --{task.source} FILE.")
        if mode == "rank" and not task.ranked:
            raise MethodError(f"{name} has no candidates to rank. Use --mode generate.")
    for name, task in TASKS.items():
        if isinstance(task, Questions) and name in questions and name not in chosen:
            raise MethodError(f"--{task.source} is for {name}, which is not in --tasks. Add it, or remove the file.")
    return [task for name, task in TASKS.items() if name in chosen]


def score_of(answer: str, references: Sequence[str], *, any_of: bool = False) -> float:
    """Share of the references that appear in the answer, ignoring case. any_of: 1 if any of them does."""
    text = _CONTROL.sub("\n", answer.strip()).strip().lower()
    hits = [reference.lower() in text for reference in references]
    return float(any(hits)) if any_of else sum(hits) / len(hits)


def effective_length(means: Mapping[int, float], threshold: float) -> int | None:
    """The longest length up to which every mean score is at or above the threshold; None if there is none."""
    longest = None
    for length in sorted(means):
        if means[length] < threshold:
            break
        longest = length
    return longest
