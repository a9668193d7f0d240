"""Texts become documents of tokens; those that are too short are counted, not dropped in silence."""

import numpy as np
import pytest

from ropecli.data.documents import Document, Documents, read_documents
from ropecli.errors import DataError

TEXTS = [("long", "ba de fi go ku " * 40), ("short", "ba"), ("longer", "ku go fi de ba " * 60), ("none", "")]


def test_documents_are_the_tokenizers_own_ids(tokenizer):
    documents = read_documents(TEXTS, tokenizer, 20)
    assert [document.name for document in documents.kept] == ["long", "longer"]
    for document, text in zip(documents.kept, (TEXTS[0][1], TEXTS[2][1]), strict=True):
        np.testing.assert_array_equal(document.ids, tokenizer(text)["input_ids"])
        assert document.ids.dtype == np.int64


def test_special_tokens_are_included(tokenizer):
    import copy

    from tokenizers.processors import TemplateProcessing

    begins = copy.deepcopy(tokenizer)
    begins.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    plain = read_documents(TEXTS, tokenizer, 20).kept[0].ids
    np.testing.assert_array_equal(read_documents(TEXTS, begins, 20).kept[0].ids, [0, *plain])


def test_documents_that_are_too_short_are_counted(tokenizer):
    assert read_documents(TEXTS, tokenizer, 20).too_short == 2


def test_a_document_of_exactly_the_length_is_kept(tokenizer):
    tokens = len(tokenizer(TEXTS[0][1])["input_ids"])
    assert [one.name for one in read_documents(TEXTS, tokenizer, tokens).kept] == ["long", "longer"]
    assert [one.name for one in read_documents(TEXTS, tokenizer, tokens + 1).kept] == ["longer"]


def test_most_ends_the_reading(tokenizer):
    documents = read_documents(TEXTS, tokenizer, 20, most=1)
    assert [document.name for document in documents.kept] == ["long"]
    assert documents.too_short == 0


def test_where_none_is_long_enough_the_longest_is_named(tokenizer):
    longest = len(tokenizer(TEXTS[2][1])["input_ids"])
    with pytest.raises(DataError, match=rf"9999 tokens; the longest of 4 has {longest}\."):
        read_documents(TEXTS, tokenizer, 9999)


def test_a_source_without_documents_is_refused(tokenizer):
    with pytest.raises(DataError, match="no document"):
        read_documents([], tokenizer, 20)


def test_every_document_is_read_beyond_one_batch(tokenizer):
    texts = [(f"{index}", f"ba de fi {index} " * 10) for index in range(100)]
    kept = read_documents(texts, tokenizer, 5).kept
    assert [document.name for document in kept] == [name for name, _ in texts]
    np.testing.assert_array_equal(kept[77].ids, tokenizer(texts[77][1])["input_ids"])


def documents_of(*rows):
    return Documents(tuple(Document(str(index), np.array(row)) for index, row in enumerate(rows)), too_short=0)


def test_the_fingerprint_depends_on_nothing_but_what_is_read():
    one = documents_of([1, 2, 3, 4], [5, 6, 7, 8])
    assert one.fingerprint(3) == documents_of([1, 2, 3, 9], [5, 6, 7, 9, 9]).fingerprint(3)


@pytest.mark.parametrize(
    ("rows", "length"),
    [
        ([[1, 2, 3], [4, 5, 7]], 3),
        ([[4, 5, 6], [1, 2, 3]], 3),
        ([[1, 2, 3], [4, 5, 6]], 2),
        ([[1, 2, 3, 4, 5, 6]], 6),
        ([[1, 2], [3, 4], [5, 6]], 2),
    ],
    ids=["another token", "another order", "another length", "one document", "three documents"],
)
def test_the_fingerprint_changes_with(rows, length):
    assert documents_of([1, 2, 3], [4, 5, 6]).fingerprint(3) != documents_of(*rows).fingerprint(length)


@pytest.mark.parametrize(
    ("before", "after", "prefix"), [((1,), (), (1,)), ((1, 2), (), (1, 2)), ((), (), ()), ((), (9,), ())], ids=str
)
def test_the_prefix_is_what_the_tokenizer_puts_before_a_text(before, after, prefix):
    def tokenizer(texts, **options):
        rows = [[*before, *map(ord, text), *after] for text in ([texts] if isinstance(texts, str) else texts)]
        return {"input_ids": rows[0] if isinstance(texts, str) else rows}

    assert read_documents([("a", "some text")], tokenizer, 4).prefix == prefix
