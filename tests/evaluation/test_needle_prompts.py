"""Prompts are exact to the token: N tokens with the answer, a whole needle, a key that stands nowhere else."""

from itertools import islice

import numpy as np
import pytest

from ropecli.errors import DataError
from ropecli.evaluation.needle_prompts import PASSKEY_FILLER, STYLES, RetrievalPrompts, draw_keys, numbers_in
from ropecli.evaluation.prompt_pieces import PieceTokenizer, read_haystack, repeat_sentences


@pytest.fixture(scope="module", params=["no special tokens", "a beginning and an end"])
def pieces(request, tokenizer):
    import copy

    from tokenizers.processors import TemplateProcessing

    tokenizer = copy.deepcopy(tokenizer)
    if request.param != "no special tokens":
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<s> $A <s>", special_tokens=[("<s>", 0)]
        )
    return PieceTokenizer(tokenizer)


@pytest.fixture(scope="module")
def tasks(pieces, corpus):
    haystack = read_haystack([(path.name, path.read_text()) for path in sorted(corpus.iterdir())], pieces)
    sentences = repeat_sentences(PASSKEY_FILLER, pieces, 900)
    return {
        name: RetrievalPrompts(templates, sentences if name == "passkey" else haystack, pieces)
        for name, templates in STYLES.items()
    }


@pytest.mark.parametrize("name", STYLES)
def test_the_text_is_what_the_templates_say(tasks, name):
    task = tasks[name]
    prompt = task.prompt(600, 0.5, 0)
    text, key = task.pieces.text(prompt.ids), prompt.candidates[0]
    lines = text.removeprefix(task.pieces.text(task.pieces.prefix)).split("\n")
    names = [one for one in task.templates.names if task.templates.needle.format(name=one, key=key) in lines]
    assert names
    assert lines[0] == task.templates.introduction or not task.templates.introduction
    for answer, candidate in zip(prompt.answers, prompt.candidates, strict=True):
        end = task.pieces.text([*prompt.ids, *answer]).split("\n")[-1]
        assert end in {
            task.templates.question.format(name=one).rstrip() + space + candidate
            for one in names
            for space in ("", " ")
        }


@pytest.mark.parametrize("name", STYLES)
def test_prompt_with_answer_has_the_requested_length_and_one_key(tasks, name):
    task = tasks[name]
    for index, (length, depth) in enumerate([(601, 0), (601, 0.3), (601, 1), (900, 0), (900, 0.3), (900, 1)]):
        prompt = task.prompt(length, depth, index)
        assert len(prompt.ids) + len(prompt.answers[0]) == length
        assert len({len(answer) for answer in prompt.answers}) == 1
        assert tuple(prompt.ids[: len(task.pieces.prefix)]) == task.pieces.prefix
        assert 0 not in prompt.ids[len(task.pieces.prefix) :]
        text = task.pieces.text(prompt.ids)
        assert len(set(prompt.candidates)) == 10
        assert [key in text for key in prompt.candidates] == [True, *[False] * 9]


@pytest.mark.parametrize("name", STYLES)
def test_depth_places_the_needle(tasks, name):
    task = tasks[name]
    for depth in (0, 0.5, 1):
        prompt = task.prompt(900, depth, 0)
        text = task.pieces.text(prompt.ids).removeprefix(task.pieces.text(task.pieces.prefix))
        needle = next(line for line in text.split("\n") if prompt.candidates[0] in line)
        before, after = text.split(needle, 1)
        if depth == 0:
            assert before.strip("\n") == task.templates.introduction
        if depth == 0.5:
            assert len(before) == pytest.approx(len(after), rel=0.3)
        if depth == 1:
            assert after.strip("\n").count("\n") == 0  # only the question follows


def drawn(seed, count, taken=frozenset(), form_of=len):
    return list(islice(draw_keys(np.random.default_rng(seed), taken, form_of), count))


def test_keys_have_the_most_common_form_and_are_not_in_the_text():
    for seed in range(20):  # some seeds begin with a rare one
        keys = drawn(seed, 300, form_of=lambda key: 3 if key[-1] == "7" else 5)
        assert len(set(keys)) == 300
        assert not any(key.endswith("7") for key in keys)
    taken = numbers_in(" ".join(str(number) for number in range(10_000, 99_990)))
    assert {int(key) for key in drawn(0, 10, taken)} == set(range(99_990, 100_000))
    with pytest.raises(DataError, match="--data"):
        drawn(0, 11, taken)
