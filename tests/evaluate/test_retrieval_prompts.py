"""Prompts are exact to the token: N tokens with the answer, whole needles, a key that stands nowhere else."""

import numpy as np
import pytest

from ropecli.errors import DataError, MethodError
from ropecli.evaluate.retrieval.haystack import Haystack, read_haystack, repeated
from ropecli.evaluate.retrieval.keys import draw_keys
from ropecli.evaluate.retrieval.pieces import Pieces, common_beginning
from ropecli.evaluate.retrieval.prompts import Task
from ropecli.evaluate.retrieval.templates import PASSKEY, PASSKEY_FILLER, STYLES, Templates, choose_templates


@pytest.fixture(scope="module", params=["no special tokens", "a beginning", "a beginning and an end"])
def pieces(request, tokenizer):
    import copy

    from tokenizers.processors import TemplateProcessing

    tokenizer = copy.deepcopy(tokenizer)
    forms = {"a beginning": "<s> $A", "a beginning and an end": "<s> $A <s>"}
    if request.param in forms:
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=forms[request.param], special_tokens=[("<s>", 0)]
        )
    return Pieces(tokenizer)


@pytest.fixture(scope="module")
def tasks(pieces, corpus):
    haystack = read_haystack([(path.name, path.read_text()) for path in sorted(corpus.iterdir())], pieces)
    return {
        "passkey": Task("passkey", PASSKEY, repeated(PASSKEY_FILLER, pieces, 900), pieces),
        "code": Task("needle", STYLES["code"], haystack, pieces),
        "prose": Task("needle", STYLES["prose"], haystack, pieces, keys=4, candidates=6),
        "quoted": Task("needle", Templates('word = "{key}"', 'assert word == "'), haystack, pieces, candidates=2),
    }


TASKS = ["passkey", "code", "prose", "quoted"]
GRID = [(length, depth) for length in (601, 900) for depth in (0, 0.3, 1)]


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize(("length", "depth"), GRID)
def test_prompt_and_answer_are_as_long_as_asked(tasks, name, length, depth):
    for trial in range(3):
        prompt = tasks[name].prompt(length, depth, trial)
        assert len(prompt.ids) + len(prompt.answers[0]) == length
        assert len({len(answer) for answer in prompt.answers}) == 1


@pytest.mark.parametrize("name", TASKS)
def test_the_text_is_what_the_templates_say(tasks, name):
    task = tasks[name]
    prompt = task.prompt(600, 0.5, 0)
    text, key = task.pieces.text(prompt.ids), prompt.keys[0]
    lines = text.removeprefix(task.pieces.text(task.pieces.prefix)).split("\n")
    names = [one for one in task.templates.names if task.templates.needle.format(name=one, key=key) in lines]
    assert names
    assert lines[0] == task.templates.introduction or not task.templates.introduction
    for answer, candidate in zip(prompt.answers, prompt.keys, strict=True):
        end = task.pieces.text([*prompt.ids, *answer]).split("\n")[-1]
        assert end in {
            task.templates.question.format(name=one).rstrip() + space + candidate
            for one in names
            for space in ("", " ")
        }


@pytest.mark.parametrize("name", TASKS)
def test_keys_that_were_not_hidden_stand_nowhere(tasks, name):
    task = tasks[name]
    for trial in range(5):
        prompt = task.prompt(600, 0.5, trial)
        text = task.pieces.text(prompt.ids)
        assert len(set(prompt.keys)) == task.candidates
        assert [key in text for key in prompt.keys] == [index < task.keys for index in range(task.candidates)]


def test_the_special_tokens_stand_at_the_beginning_and_nowhere_else(tasks):
    task = tasks["code"]
    ids = task.prompt(600, 0.5, 0).ids
    assert tuple(ids[: len(task.pieces.prefix)]) == task.pieces.prefix
    assert 0 not in ids[len(task.pieces.prefix) :]
    assert len(task.pieces.prefix) == (0 if len(task.pieces.tokenizer("")["input_ids"]) == 0 else 1)


@pytest.mark.parametrize("name", TASKS)
def test_depth_places_the_needle(tasks, name):
    task = tasks[name]
    introduction = f"{task.templates.introduction}\n" if task.templates.introduction else ""
    head = len(task.pieces.prefix) + len(task.pieces.opening(introduction))
    first, middle, last = (task.prompt(900, depth, 0) for depth in (0, 0.5, 1))
    assert first.needle == head
    assert middle.needle == pytest.approx(450, abs=120)
    needle = next(line for line in task.pieces.text(last.ids).split("\n") if last.keys[0] in line)
    after = task.pieces.text(last.ids).split(needle)[1]
    assert after.startswith("\n")
    assert after.strip("\n").count("\n") == 0  # only the question follows


def test_several_needles_spread_over_the_text(tasks):
    prompt = tasks["prose"].prompt(900, 0, 0)
    text = tasks["prose"].pieces.text(prompt.ids)
    places = [text.index(key) / len(text) for key in prompt.keys[:4]]
    assert places == sorted(places)
    assert np.diff(places).min() > 0.1


@pytest.mark.parametrize("name", TASKS)
def test_a_length_that_is_too_short_is_refused_with_the_least_that_fits(tasks, name):
    with pytest.raises(DataError, match="too short") as refusal:
        tasks[name].prompt(30, 0.5, 0)
    least = int(str(refusal.value).split("at least ")[1].rstrip("."))
    # names and keys of other lengths are drawn for other lengths
    assert len(tasks[name].prompt(least + 30, 0.5, 0).ids) < least + 30


def test_trials_repeat_and_differ(tasks):
    task = tasks["code"]
    prints = [task.prompt(600, 0.5, trial).fingerprint() for trial in (0, 0, 1, 2)]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3
    other = Task(task.name, task.templates, task.haystack, task.pieces, seed=1)
    assert other.prompt(600, 0.5, 0).fingerprint() != prints[0]


def test_a_short_text_is_read_in_a_ring():
    stretch = Haystack(np.arange(5), anywhere=True).stretch(12, np.random.default_rng(0))
    assert set(np.diff(stretch) % 5) == {1}
    assert Haystack(np.arange(5), anywhere=False).stretch(7, np.random.default_rng(0)).tolist() == [0, 1, 2, 3, 4, 0, 1]


def test_repeated_sentences_have_no_seam(pieces):
    haystack = repeated("ba de. fi go.", pieces, 300)
    assert len(haystack.ids) >= 300
    assert set(pieces.text(haystack.ids).split(". ")) <= {"ba de", "fi go", "fi go."}


def test_a_source_without_text_is_refused(pieces):
    with pytest.raises(DataError, match="no text"):
        read_haystack([("empty", "")], pieces)


def test_keys_take_as_many_tokens_as_the_first_where_there_are_enough():
    rng = np.random.default_rng(0)
    keys = draw_keys(rng, 20, "", lambda key: 3 if key.endswith("7") else 5)
    assert len({key.endswith("7") for key in keys}) == 1
    mixed = draw_keys(rng, 3, "", lambda key: int(key))  # no two alike
    assert len(set(mixed)) == 3


def test_keys_that_stand_in_the_text_are_not_drawn():
    text = " ".join(str(number) for number in range(10_000, 99_990))
    assert {int(key) for key in draw_keys(np.random.default_rng(0), 5, text, len)} <= set(range(99_990, 100_000))


class JoiningTokenizer:
    """A space joins the digit after it, as in GPT-2, and digits go in pairs."""

    bos_token_id = None
    eos_token_id = None

    def __call__(self, text, **options):
        import re

        return {"input_ids": [hash(part) for part in re.findall(r" ?\d\d?|\s|[^\s\d]+", text)]}


def test_a_space_that_a_key_joins_belongs_to_the_answer():
    pieces = Pieces(JoiningTokenizer())
    question, completed = pieces.inside("\nkey == "), [pieces.inside(f"\nkey == {key}") for key in ("12345", "12999")]
    assert common_beginning([question, *completed]) == len(question) - 1


WRONG = {
    "no key": (("secret", "is"), "hides no key"),
    "the answer in the question": (("{key}", "is {key}"), "holds {key}"),
    "another field": (("{key} {word}", "is"), "{word}"),
    "a field's attribute": (("{key.__class__}", "is"), "{key.__class__}"),
    "a format": (("{key:>9}", "is"), "bare"),
    "a lone brace": (("{key} {", "is"), "no template"),
    "no question": (("{key}", " "), "empty"),
}


@pytest.mark.parametrize(("templates", "expected"), WRONG.values(), ids=WRONG.keys())
def test_templates_that_cannot_be_asked_about_are_refused(templates, expected):
    with pytest.raises(MethodError) as refusal:
        Templates(*templates)
    assert expected in str(refusal.value)


def test_several_keys_need_names():
    Templates("{name} {key}", "{name}").check_keys(32)
    Templates("{key}", "is").check_keys(1)
    for templates, keys in [(("{key}", "is"), 2), (("{name} {key}", "is"), 2), (("{name} {key}", "{name}"), 33)]:
        with pytest.raises(MethodError):
            Templates(*templates).check_keys(keys)


def test_a_style_and_both_templates_or_none():
    assert choose_templates("code", None, None) is STYLES["code"]
    assert choose_templates("code", "{name}: {key}", "{name}:").names == STYLES["code"].names
    for arguments in [("cod", None, None), ("code", "{key}", None), ("code", None, "is")]:
        with pytest.raises(MethodError):
            choose_templates(*arguments)


def test_braces_can_be_written():
    assert Templates("{{'key': {key}}}", "x[").needle_line("a", "12345") == "\n{'key': 12345}\n"
    assert Templates("{key}", "is").question_line("a") == "\nis "
    assert Templates("{key}", "x = '").question_line("a") == "\nx = '"


class SpacingTokenizer:
    """A space is put before every text, as in SentencePiece."""

    bos_token_id = None
    eos_token_id = None

    def __call__(self, text, **options):
        return {"input_ids": [ord(character) for character in (f" {text}" if text else "")]}


def test_pieces_inside_a_text_get_no_space_of_their_own():
    pieces = Pieces(SpacingTokenizer())
    assert "".join(map(chr, pieces.opening("ab"))) == " ab"
    assert "".join(map(chr, pieces.inside("\nab"))) == "\nab"
