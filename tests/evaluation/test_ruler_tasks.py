"""RULER: prompts of exact length for any tokenizer, tasks as published, and scores."""

import copy
import re
from collections import Counter
from functools import cache

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from ropecli.errors import DataError
from ropecli.evaluation.lengths import Lengths
from ropecli.evaluation.needle_prompts import PASSKEY_FILLER
from ropecli.evaluation.prompt_pieces import Frame, PieceTokenizer, find_frame
from ropecli.evaluation.ruler_prompts import PromptMaker
from ropecli.evaluation.ruler_tasks import TASKS, read_essay, score_of
from ropecli.evaluation.tasks.ruler import make_ruler
from ropecli.options import RulerOptions

TEXT = "It was a bright cold day. The clocks were striking thirteen! Was it so? A wind blew along the street. " * 40
KINDS = ("byte-level BPE", "SentencePiece BPE", "WordPiece", "characters")


@cache
def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    """A tokenizer of this kind, trained on a few words."""
    special = ["<s>", "<unk>"]
    if kind == "byte-level BPE":
        one, trainer = Tokenizer(models.BPE()), trainers.BpeTrainer(
            vocab_size=800, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        )  # fmt: skip
        one.pre_tokenizer, one.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    elif kind == "SentencePiece BPE":  # as Llama 2's: a space before the text, bytes for unknown characters
        one = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        one.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        one.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        letters = [chr(code) for code in range(33, 127)]
        trainer = trainers.BpeTrainer(
            vocab_size=900, special_tokens=[*special, *(f"<0x{code:02X}>" for code in range(256))],
            initial_alphabet=[*letters, "▁"], max_token_length=12,
        )  # fmt: skip
    elif kind == "WordPiece":
        one, trainer = Tokenizer(models.WordPiece(unk_token="<unk>")), trainers.WordPieceTrainer(
            vocab_size=600, special_tokens=special
        )  # fmt: skip
        one.pre_tokenizer, one.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    else:
        one = Tokenizer(models.WordLevel({chr(code): code for code in range(256)} | {"<s>": 256}, unk_token="\x00"))
        one.pre_tokenizer, one.decoder, trainer = pre_tokenizers.Split("", "isolated"), decoders.Fuse(), None
    if trainer:
        one.train_from_iterator([TEXT, PASSKEY_FILLER, *(task.wording.tail for task in TASKS.values())], trainer)
    if kind != "WordPiece":
        one.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", one.token_to_id("<s>"))]
        )
    return PreTrainedTokenizerFast(tokenizer_object=one, bos_token="<s>")


def maker_of(tokenizer, **options) -> PromptMaker:
    pieces = PieceTokenizer(tokenizer)
    essay = read_essay([("essay", TEXT)], pieces, 8192)
    return PromptMaker(pieces, essay=essay, **options)


@pytest.fixture(scope="module")
def maker() -> PromptMaker:
    return maker_of(tokenizer_of("byte-level BPE"))


def text_of(maker, name, length, index=0) -> tuple[str, tuple[str, ...]]:
    prompt = maker.make(TASKS[name], length, index)
    return maker.tokenizer.text(prompt.ids), prompt.references


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_have_the_exact_length(kind):
    maker, length = maker_of(tokenizer_of(kind)), 6001
    for task in TASKS.values():
        prompt = maker.make(task, length, 0)
        assert len(prompt.ids) + task.generated == length
        text = maker.tokenizer.text(prompt.ids)
        if kind != "WordPiece":  # it has no white space
            assert text.startswith("<s>")
            assert text.endswith(("is", "are", "are:"))
            assert all(reference in text for reference in prompt.references)


def test_a_prompt_depends_only_on_seed_task_length_and_index(maker):
    again, other = maker_of(maker.tokenizer.tokenizer), maker_of(maker.tokenizer.tokenizer, seed=1)
    again.make(TASKS["cwe"], 2000, 1)
    for name in ("niah_single_2", "vt", "cwe", "fwe"):
        ids = maker.make(TASKS[name], 2000, 2).ids
        assert np.array_equal(again.make(TASKS[name], 2000, 2).ids, ids)
        assert not np.array_equal(other.make(TASKS[name], 2000, 2).ids, ids)
        assert not np.array_equal(maker.make(TASKS[name], 2000, 3).ids, ids)


@pytest.mark.parametrize(
    ("name", "needles", "key", "value", "answers"),
    [
        ("niah_single_1", 1, "words", "numbers", 1),
        ("niah_single_3", 1, "words", "uuids", 1),
        ("niah_multikey_1", 4, "words", "numbers", 1),
        ("niah_multikey_3", None, "uuids", "uuids", 1),
        ("niah_multivalue", 4, "words", "numbers", 4),
        ("niah_multiquery", 4, "words", "numbers", 4),
    ],
)
def test_needles_are_those_of_ruler(maker, name, needles, key, value, answers):
    text, references = text_of(maker, name, 6000)
    form = {"words": r"[a-z-]+", "numbers": r"\d{7}", "uuids": r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"}
    pattern = rf"One of the special magic {value} for ({form[key]}) is: ({form[value]})\."
    found = re.findall(pattern, text)
    assert len(references) == answers
    assert len(found) == needles if needles else len(found) > 30
    question = text[text.rindex("\nWhat ") :]
    asked = [one for one in found if one[0] in question]
    assert sorted(found_value for _, found_value in asked) == sorted(references)
    if name == "niah_single_1":
        assert text.startswith("<s>A special magic number is hidden within the following text.")
        about = "special magic number for [a-z-]+ mentioned in the provided text"
        assert re.fullmatch(rf"\nWhat is the {about}\? The {about} is", question)
        lines = text[: text.rindex("\nWhat ")].split("\n")[1:]
        assert Counter(lines[:-1])[PASSKEY_FILLER] >= len(lines) - 2
        assert PASSKEY_FILLER.startswith(lines[-1])


def test_variables_are_assigned_in_a_chain_after_a_solved_example(maker):
    text, references = text_of(maker, "vt", 6000)
    example, own = text.split("Memorize and track the chain(s)")[1:]
    assert len(re.findall(r"VAR [A-Z]{3} =", example)) == 5
    solved = re.findall(r"VAR ([A-Z]{3}) =", example)
    assert example.strip().endswith(" ".join(solved))
    chain = re.findall(r"\nVAR ([A-Z]{5}) = (?:VAR )?([A-Z]{5}|\d{5})", own)
    assert [name for name, _ in chain] == list(references)
    assert [value for _, value in chain[1:]] == list(references[:-1])
    assert f"5 variables are assigned the value {chain[0][1]}, they are:" in own


@pytest.mark.parametrize(("length", "often", "seldom"), [(8192, 30, 3), (4095, 6, 1)])
def test_common_words_appear_as_often_as_in_ruler(maker, length, often, seldom):
    text, references = text_of(maker, "cwe", length)
    listed = re.findall(r"(\d+)\. ([\w-]+)", text[text.rindex("Below is a numbered list") :])
    assert [int(number) for number, _ in listed] == list(range(1, len(listed) + 1))
    counts = Counter(word for _, word in listed)
    assert {word for word, count in counts.items() if count == often} == set(references)
    assert set(counts.values()) == {often, seldom}
    assert len(references) == 10


def test_coded_words_follow_a_zeta_distribution(maker):
    text, references = text_of(maker, "fwe", 8192)
    coded = text[text.index("coded words.") + len("coded words.") : text.index("\nQuestion:")].split()
    counts = Counter(coded)
    ranked = [word for word, _ in counts.most_common(4)]
    assert ranked[0] == "..."
    assert tuple(ranked[1:]) == references
    # ranks 2, 3 and 4 of a zeta distribution with α = 2: shares of 1/4, 1/9 and 1/16
    shares = np.array([counts[word] for word in references])
    np.testing.assert_allclose(shares / shares[0], np.array([1, 4 / 9, 1 / 4]), atol=0.05)


def test_an_instruct_model_is_asked_through_its_template():
    tokenizer = copy.copy(tokenizer_of("byte-level BPE"))
    assert find_frame(tokenizer, "auto") is None
    tokenizer.chat_template = "no message"
    with pytest.raises(DataError, match="does not contain the message"):
        find_frame(tokenizer, "auto")
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}{% endfor %}[assistant]"
    )
    frame = find_frame(tokenizer, "auto")
    assert frame == Frame("<s>[user]", "[assistant]")
    assert find_frame(tokenizer, "none") is None
    text, _ = text_of(maker_of(tokenizer, frame=frame), "vt", 4000)
    assert text.startswith("<s>[user]Memorize")
    assert re.search(r"in the text above\.\[assistant\]Answer: According to .* they are:$", text)


def test_what_begins_an_answer_follows_the_thought():
    maker = maker_of(tokenizer_of("byte-level BPE"), frame=Frame("<s>[user]", "[assistant]", thought=64))
    text, _ = text_of(maker, "vt", 4000)
    assert text.endswith("in the text above.[assistant]")
    prompt = maker.make(TASKS["vt"], 4000, 0)
    assert prompt.lead.startswith("Answer: According to")
    assert len(prompt.ids) + len(maker.tokenizer.inside(prompt.lead)) + TASKS["vt"].generated == 4000


def test_thinking_is_asked_of_the_template():
    tokenizer = copy.copy(tokenizer_of("byte-level BPE"))
    with pytest.raises(DataError, match="needs a chat template"):
        find_frame(tokenizer, "auto", "off")
    tokenizer.chat_template = "{{ messages[0].content }}[assistant]"
    with pytest.raises(DataError, match="no switch for thinking"):
        find_frame(tokenizer, "auto", "off")
    tokenizer.chat_template += "{% if thinking %}<think>{% else %}</think>{% endif %}"
    assert find_frame(tokenizer, "auto", "off") == Frame("", "[assistant]</think>")
    assert find_frame(tokenizer, "auto", "2k") == Frame("", "[assistant]<think>", thought=2048)


def test_scores_are_those_of_ruler():
    assert score_of("The numbers are 12 and 34.", ["12", "34", "56", "78"]) == 0.5
    assert score_of("paris\x00LONDON", ["Paris", "london"]) == 1


@pytest.mark.parametrize(("task", "least"), [("niah_single_2", 275), ("cwe", 1059), ("fwe", 205)])
def test_a_length_that_fits_the_first_prompt_alone_is_refused_before_anything_is_read(task, least, options_of):
    """Names and values of the others may take more tokens. least: tokens of the first prompt."""
    tokenizer, choice = tokenizer_of("WordPiece"), options_of(RulerOptions, tasks=[task], samples=4, mode="rank")

    def make(length):
        return make_ruler(choice, tokenizer, Lengths((length,)), None)

    with pytest.raises(DataError, match=f"A prompt of {least} tokens is too short for {task}"):
        make(least)
    made = make(2 * least)
    assert {len(made.question(key).ids) + TASKS[task].generated - key[1] for key in made.samples(one_pass=True)} == {0}
