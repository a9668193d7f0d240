"""Texts become tokenized documents; those that are too short are counted, not silently dropped."""

import copy

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from ropecli.data.documents import Document, Documents, SpecialTokens, read_documents
from ropecli.errors import DataError

TEXTS = [("long", "ba de fi go ku " * 40), ("short", "ba"), ("longer", "ku go fi de ba " * 60), ("none", "")]


def test_documents_are_the_tokenizers_own_ids(tokenizer):
    read = []
    documents = read_documents(TEXTS, tokenizer, 20, advance=lambda: read.append(1))
    assert (len(read), documents.too_short) == (4, 2)
    assert [document.name for document in documents.kept] == ["long", "longer"]
    for document, text in zip(documents.kept, (TEXTS[0][1], TEXTS[2][1]), strict=True):
        np.testing.assert_array_equal(document.ids, tokenizer(text)["input_ids"])
        assert document.ids.dtype == np.int64
    texts = iter(TEXTS)
    documents = read_documents(texts, tokenizer, 20, most=1)
    assert next(texts) == TEXTS[1]  # nothing is read ahead
    assert ([document.name for document in documents.kept], documents.too_short) == (["long"], 0)
    with pytest.raises(DataError, match="no document"):
        read_documents([], tokenizer, 20)


def documents_of(*rows):
    return Documents(tuple(Document(str(index), np.array(row)) for index, row in enumerate(rows)), too_short=0)


def test_the_fingerprint_changes_with_everything_that_is_read():
    plain = documents_of([1, 2, 3], [4, 5, 6]).fingerprint(3)
    assert plain != documents_of([1, 2, 3], [4, 5, 7]).fingerprint(3)
    assert plain != documents_of([4, 5, 6], [1, 2, 3]).fingerprint(3)
    assert plain != documents_of([1, 2, 3], [4, 5, 6]).fingerprint(2)
    assert plain != documents_of([1, 2, 3, 4, 5, 6]).fingerprint(6)


class Characters:
    """A tokenizer with one token per character, and special tokens before and after every text."""

    is_fast = False
    bos_token_id = 1
    eos_token_id = None

    def __init__(self, before=(), after=()):
        self.before, self.after = before, after

    def __call__(self, texts, add_special_tokens=True, **options):
        before, after = (self.before, self.after) if add_special_tokens else ((), ())
        rows = [[*before, *map(ord, text), *after] for text in ([texts] if isinstance(texts, str) else texts)]
        return {"input_ids": rows[0] if isinstance(texts, str) else rows}

    def convert_ids_to_tokens(self, ids):
        return [f"<{token}>" for token in ids]


@pytest.mark.parametrize(("before", "after"), [((), ()), ((1,), ()), ((), (9,)), ((1, 2), (9, 8))], ids=str)
def test_the_special_tokens_are_the_tokenizers_own(before, after):
    documents = read_documents([("a", "text")], Characters(before, after), 4)
    (document,), special = documents.kept, documents.special
    assert special == SpecialTokens(before, after)
    assert special.bare(document.ids).tolist() == [*map(ord, "text")]
    assert special.bare(document.ids[: len(before) + 3]).tolist() == [*map(ord, "tex")]


def test_special_tokens_that_a_text_has_already_are_not_added_again(tokenizer):
    adding = copy.deepcopy(tokenizer)
    adding.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A <s>", special_tokens=[("<s>", 0)])
    texts = [("a", text) for text in ("ba de fi", "<s>ba de fi", "<s>ba de fi<s>")]
    first, *others = read_documents(texts, adding, 4, count_bytes=True).kept
    for other in others:
        assert other.ids.tolist() == first.ids.tolist() == adding("ba de fi")["input_ids"]
        assert other.ends.tolist() == first.ends.tolist()


LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITTERS = {
    "llama-3": lambda: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    ),
    "bert": pre_tokenizers.BertPreTokenizer,
    "metaspace": pre_tokenizers.Metaspace,
    "spaces after": lambda: pre_tokenizers.Split(" ", "merged_with_previous"),
    "whole": lambda: pre_tokenizers.Metaspace(split=False),
}
PIECES = [
    *("ba", "de", "123", "4", "!", "?!\n", "日本", "e\u0301", "🦜", "don't", "<s>"),
    *(" ", "  ", "\n", "\r\n", " \n\n ", "\t"),
]


def split_by(splitter):
    bpe = Tokenizer(models.BPE(unk_token="<unk>"))
    bpe.normalizer, bpe.pre_tokenizer = normalizers.NFC(), splitter()
    texts = [" ".join(PIECES), "".join(PIECES * 3)]
    special = ["<unk>", "<s>"]
    bpe.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False))
    bpe.post_processor = TemplateProcessing(single="<s> $A <s>", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, unk_token="<unk>", bos_token="<s>")


@pytest.mark.parametrize("splitter", SPLITTERS.values(), ids=SPLITTERS)
def test_tokens_of_a_beginning_are_those_of_the_whole_text(splitter, monkeypatch):
    """Cuts in the middle of spaces, line breaks, words, digits and accents."""
    tokenizer, rng = split_by(splitter), np.random.default_rng(0)
    monkeypatch.setattr("ropecli.data.documents._CHARACTERS", 2)
    texts = [(str(row), "".join(rng.choice(PIECES, rng.integers(30, 300)))) for row in range(40)]
    whole = read_documents(texts, tokenizer, 2, count_bytes=True).kept
    for enough in (2, 30, 10_000):
        cut = read_documents(texts, tokenizer, 2, cut=enough, count_bytes=True).kept
        for document, uncut in zip(cut, whole, strict=True):
            np.testing.assert_array_equal(document.ids, uncut.ids[:enough])
            np.testing.assert_array_equal(document.ends, uncut.ends[:enough])
            for array in (document.ids, document.ends):
                assert array.base is None or array.base.nbytes <= array.nbytes  # no view that keeps the whole in memory


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
@example("κάτι Ünï 日本語 ﬁ — “x” 🦜🦜 𝒳 👩\u200d🚀 ba  \t\n\n de   a\x00b\u200b\ufeffc ")
def test_bytes_are_those_of_the_text(tokenizer, text):
    text += "ba de fi"
    (document,) = read_documents([("a", text)], tokenizer, 2, count_bytes=True).kept
    offsets = tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
    assert document.ends.tolist() == [len(text[:stop].encode("utf-8")) for _, stop in offsets]
    for start, stop in ((0, 1), (1, 2), (1, len(offsets)), (0, len(offsets)), (2, 2)):
        scored = text[offsets[start - 1][1] if start else 0 : offsets[stop - 1][1]] if stop > start else ""
        assert document.bytes_of(start, stop) == len(scored.encode("utf-8"))
