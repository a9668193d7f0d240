"""The stream of a recipe: mixed, resumable, with a summary and a fingerprint."""

import copy
import json
from itertools import pairwise

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

from ropecli.data.sequences import UNSCORED
from ropecli.data.sources import Source
from ropecli.data.stream import end_of_text
from ropecli.data.token_store import UNKNOWN_END
from ropecli.errors import DataError

END = 0
"""The tiny tokenizer's only special token, <s>."""


@pytest.fixture(scope="session")
def short_texts(tmp_path_factory):
    """Forty short files and two long ones, of words that the other corpus knows too."""
    folder = tmp_path_factory.mktemp("short")
    for at in range(40):
        (folder / f"{at:02}.txt").write_text("ba de fi " * (at + 1))
    for at in range(2):
        (folder / f"long{at}.txt").write_text("go ku bal " * 150)
    return folder


@pytest.fixture(scope="session")
def ids_of(tokenizer):
    return lambda folder: [tokenizer(text)["input_ids"] for _, text in Source(str(folder)).texts()]


@pytest.mark.parametrize("positions", ["full", "pose", "randomized"])
def test_a_batch_depends_only_on_its_positions(stream_of, source, corpus, short_texts, positions):
    def stream():
        kinds = ("long", "concat") if positions != "full" else ("long", "packed")
        sources = [source(folder, sequences=kind) for folder, kind in zip((corpus, short_texts), kinds, strict=True)]
        return stream_of(*sources, positions=positions, window=200)

    read_on, jumping = stream(), stream()
    whole = [read_on.batch(range(at, at + 7)) for at in range(0, 2100, 7)]
    for at, size in ((1990, 30), (3, 1), (997, 8), (0, 2), (2000, 100)):
        batch = jumping.batch(range(at, at + size))
        for name in ("ids", "labels", "positions"):
            expected = np.concatenate([getattr(part, name) for part in whole])[at : at + size]
            np.testing.assert_array_equal(getattr(batch, name), expected)


def test_sources_have_their_weights_and_each_epoch_all_their_sequences(stream_of, source, corpus, short_texts):
    long, packed = source(corpus, weight=3), source(short_texts, weight=1, sequences="packed")
    stream, alone = stream_of(long, packed), [stream_of(long), stream_of(packed)]
    assert len(stream) == sum(map(len, alone))
    of_each = [sorted(map(tuple, part.batch(range(len(part))).ids.tolist())) for part in alone]
    assert not set(of_each[0]) & set(of_each[1])  # guards: a sequence tells its source
    batch = stream.batch(range(4000))
    is_packed = np.array([tuple(row) in set(of_each[1]) for row in batch.ids.tolist()])
    assert is_packed.reshape(4, 1000).sum(axis=1).tolist() == [250] * 4
    for rows, expected in ((batch.ids[~is_packed], of_each[0]), (batch.ids[is_packed], of_each[1])):
        for start in range(0, len(rows) - len(expected) + 1, len(expected)):
            assert sorted(map(tuple, rows[start : start + len(expected)].tolist())) == expected
    assert (batch.positions[~is_packed] == np.arange(16)).all()
    assert (batch.positions[is_packed][:, 1:] == 0).any()


def concatenated(stream):
    """The tokens of all sequences of `concat`, consecutive in its layout."""
    part = stream._parts[0]
    return [token for index in range(len(part)) for token in part.row(index).ids.tolist()]


def test_an_end_separates_documents(stream_of, source, short_texts, ids_of):
    text = concatenated(stream_of(source(short_texts, sequences="concat")))
    documents = ids_of(short_texts)
    assert not any(END in ids for ids in documents)  # guards: ropecli adds it
    parts = "".join(map(chr, text)).split(chr(END))
    assert len(parts) in (42, 43)
    assert set(parts[:-1]) <= {"".join(map(chr, ids)) for ids in documents}
    assert len(set(parts)) > 38  # all documents, but the last, which may be cut


def test_a_tokenizer_that_ends_documents_itself_gets_no_other_end(stream_of, source, short_texts, tokenizer):
    marking = copy.deepcopy(tokenizer)
    marking.backend_tokenizer.post_processor = TemplateProcessing(single="$A <s>", special_tokens=[("<s>", 0)])
    text = concatenated(stream_of(source(short_texts, sequences="concat"), tokenizer=marking))
    assert text.count(END) in (41, 42)
    assert (END, END) not in pairwise(text)


@pytest.mark.parametrize("sequences", ["packed", "concat"])
def test_a_whole_text_ends_with_its_end_as_a_label_and_a_cut_one_does_not(
    stream_of, source, short_texts, ids_of, sequences
):
    texts = ids_of(short_texts)
    for budget in (None, 2000):
        stream = stream_of(source(short_texts, sequences=sequences, max_tokens=budget), length=512)
        selection = stream._parts[0].selection
        whole = sum(len(texts[at]) + 1 == used for at, used in zip(selection.documents, selection.lengths, strict=True))
        labels = stream.batch(range(len(stream))).labels
        unused = sequences == "concat"  # its last sequence is not full
        assert whole - 42 * unused <= (labels == END).sum() <= whole


def chat_of(tokenizer, eos, *further):
    """A chat model's tokenizer with this end of an answer."""
    chat = copy.deepcopy(tokenizer)
    chat.chat_template = "{{ messages }}"
    chat.add_special_tokens({"eos_token": eos, "extra_special_tokens": list(further)})
    return chat


def test_a_chat_model_ends_a_text_as_its_base_does(tokenizer):
    assert end_of_text(tokenizer, None) == END
    for eos, end in (("<|im_end|>", "<|endoftext|>"), ("<|eot_id|>", "<|end_of_text|>"), ("</s>", "</s>")):
        chat = chat_of(tokenizer, eos, end)
        assert end_of_text(chat, None) == chat.convert_tokens_to_ids(end)
        assert end_of_text(chat, "none") is None
        assert end_of_text(chat, eos) == chat.eos_token_id
    for chat in (chat_of(tokenizer, "<|im_end|>"), chat_of(tokenizer, "<my_end>")):
        assert end_of_text(chat, None) == UNKNOWN_END
    with pytest.raises(DataError, match="end_token is '<end>', which is not a token"):
        end_of_text(tokenizer, "<end>")


def test_an_unknown_end_is_refused_for_texts_only(stream_of, source, short_texts, chat, tokenizer, chat_template):
    unknown = chat_of(tokenizer, "<my_end>")
    unknown.chat_template = chat_template
    with pytest.raises(DataError, match=r"The end of a text is unknown: the chat model's eos, '<my_end>'.*end_token"):
        stream_of(source(short_texts, sequences="packed"), tokenizer=unknown)
    assert len(stream_of(source(short_texts), tokenizer=unknown))
    assert len(stream_of(source(chat, sequences="packed"), tokenizer=unknown, length=600))


def test_texts_beside_conversations_are_packed_and_end(stream_of, source, tmp_path, chatting):
    path, rows = tmp_path / "mixed.jsonl", [{"text": "ba de fi"}, {"messages": CONVERSATION}, {"text": "go ku"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    by_default, packed = (
        stream_of(source(path, sequences=kind, end_token="<s>"), tokenizer=chatting, length=60)
        for kind in (None, "packed")
    )
    assert by_default.fingerprint() == packed.fingerprint()
    without = stream_of(source(path, end_token="none"), tokenizer=chatting, length=60)
    labels = [(stream.batch(range(len(stream))).labels != UNSCORED).sum() for stream in (packed, without)]
    assert labels[0] - labels[1] == 2


CONVERSATION = [{"role": "user", "content": "ba"}, {"role": "assistant", "content": "de"}]
WITHOUT_EFFECT = {
    "an unknown end": ("text", {"end_token": "<end>"}, "end_token is '<end>', which is not a token"),
    "an end of whole sequences": ("text", {"end_token": "<s>"}, "end_token has an effect only on texts in packed"),
    "an end of conversations": ("messages", {"end_token": "<s>"}, "end_token has an effect only on texts in packed"),
    "turns of texts": ("text", {"overlong": "cut"}, "overlong has an effect only on conversations"),
    "a template's losses of texts": ("text", {"drop_unrendered": True}, "drop_unrendered has an effect only on conver"),
}


@pytest.mark.parametrize(("column", "keys", "reason"), WITHOUT_EFFECT.values(), ids=WITHOUT_EFFECT)
def test_a_key_without_effect_on_what_the_source_contains_is_refused(
    stream_of, source, tmp_path, chatting, column, keys, reason
):
    body = {"text": "ba de fi " * 20, "messages": CONVERSATION}[column]
    (tmp_path / "rows.jsonl").write_text(json.dumps({column: body}) + "\n")
    with pytest.raises(DataError, match=reason):
        stream_of(source(tmp_path / "rows.jsonl", **keys), tokenizer=chatting)


@pytest.fixture(scope="module")
def chatting(tokenizer, chat_template):
    chatting = copy.deepcopy(tokenizer)
    chatting.chat_template = chat_template
    return chatting


@pytest.fixture(scope="module")
def chat_stream(stream_of, source, chatting):
    def make(data, *, length=600, tokenizer=chatting, positions="full", why="", **keys):
        options = {"length": length, "tokenizer": tokenizer, "positions": positions, "why_unpackable": lambda: why}
        return stream_of(source(data, **keys), window=max(200, length), **options)

    return make


def test_unusable_conversations_are_refused(chat_stream, chat, corpus, tokenizer, tmp_path):
    with pytest.raises(DataError, match=r"no chat template.*chat_template\.jinja"):
        chat_stream(chat, tokenizer=tokenizer)
    with pytest.raises(DataError, match=r"text00\.txt is text; train_on: all needs conversations"):
        chat_stream(corpus, train_on="all")
    path = tmp_path / "questions.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "ba de " * 40}]}))
    with pytest.raises(
        DataError, match="contains no answer of the assistant in sequences of 600 tokens: 0 are in longer"
    ):
        chat_stream(path)
    with pytest.raises(DataError, match=r"all 12 conversations are longer than a sequence of 8.*a greater --length"):
        chat_stream(chat, length=8)
    for sequences in ("long", "concat"):
        with pytest.raises(DataError, match=f"--sequences {sequences} cuts conversations anywhere"):
            chat_stream(chat, sequences=sequences)


def test_lost_answers_are_counted(chat_stream, chat, chatting):
    rows = [json.loads(line)["messages"] for line in chat.read_text().splitlines()]
    sizes = [len(chatting.apply_chat_template(row, return_dict=False)) for row in rows]
    lost = sum(len(row) // 2 for row, size in zip(rows, sizes, strict=True) if size > 150)
    assert 0 < lost < sum(len(row) // 2 for row in rows)
    summary = chat_stream(chat, length=150).summary(64, 64)[0]
    assert f"; {lost} answers are lost, in conversations longer than a sequence" in summary
    cut = chat_stream(chat, length=150, overlong="cut")
    assert "lost" not in cut.summary(64, 64)[0]
    assert cut._parts[0].answers == sum(len(row) // 2 for row in rows)


def test_the_summary_says_how_much_is_trained_beyond_the_pretraining_length(
    stream_of, chat_stream, source, corpus, chat
):
    def last(stream, length):
        return stream.summary(length, 200)[-1]

    plain = stream_of(source(corpus), length=100)
    assert last(plain, 60).startswith(
        f"{(99 - 60) / 99:.1%} of the trained tokens have more than 60 tokens before them"
    )
    assert plain.summary(99, 200)[0].startswith("warning: no trained token has more than 99 tokens before it")
    assert len(plain.summary(100, 100)) == 1  # not patched
    for pretraining_length in (60, 99, 200):  # one sentence, also of a checkpoint that is not patched
        first, *others = plain.summary(pretraining_length, 200)
        assert "the checkpoint reads 200 tokens, and may read them worse after training on 100" in first
        assert not any(sentence.startswith("warning") for sentence in others)
    for span, warns in ((200, False), (150, True)):
        gaps = stream_of(source(corpus), positions="pose", length=32, window=span)
        assert gaps.summary(60, 200)[0].startswith("warning: the checkpoint reads") == warns
    stream = chat_stream(chat, length=600)
    batch = stream.batch(range(len(stream)))
    scored = batch.positions[batch.labels != UNSCORED]
    assert last(stream, 100).startswith(f"{(scored >= 100).mean():.1%} of the trained tokens")
    assert stream._parts[0].far_labels(scored.max()) == ((scored == scored.max()).sum(), scored.size)
    skipping = stream_of(source(corpus), positions="pose", length=32, window=200)
    assert last(skipping, 32).endswith("have more than 32 tokens before them, the pretraining length.")


def test_sequences_are_shown_as_the_model_gets_them(chat_stream, stream_of, source, corpus, chat, tokenizer):
    stream = chat_stream(chat, length=600)
    batch = stream.batch(range(2))
    for row, spans in enumerate(stream.shown(2)):
        trained = "".join(span.text for span in spans if span.is_trained)
        labels = batch.labels[row][batch.labels[row] != UNSCORED]
        assert trained == tokenizer.decode(labels.tolist())
        remarks = [span.text for span in spans if span.is_trained is None]
        begins = int((batch.positions[row] == 0).sum())
        assert remarks.count("a document begins") in (begins - 1, begins - 2)  # not the first, nor padding
        assert remarks[0] == f"sequence {row + 1} of {len(stream)}"
    (spans,) = stream_of(source(corpus), positions="pose", window=10_000).shown(1)
    assert sum(span.text.startswith("position ") for span in spans) == 1


def test_everything_that_changes_a_batch_changes_the_fingerprint(
    stream_of, chat_stream, source, corpus, short_texts, chat, chatting, tokenizer
):
    other_end, other_template = copy.deepcopy(tokenizer), copy.deepcopy(chatting)
    other_end.eos_token = tokenizer.convert_ids_to_tokens(5)
    other_template.chat_template = chatting.chat_template.replace("eos_token", "'!'")
    streams = [
        *(stream_of(source(corpus), **options) for options in ({}, {"seed": 1}, {"length": 17})),
        stream_of(source(short_texts)),
        stream_of(source(corpus), source(short_texts)),
        stream_of(source(corpus), source(short_texts, weight=2.0)),
        stream_of(source(short_texts), source(corpus)),
        stream_of(source(corpus, sequences="packed")),
        stream_of(source(corpus, sequences="concat")),
        stream_of(source(corpus, sequences="concat", end_token="none")),
        stream_of(source(corpus, max_tokens=500)),
        stream_of(source(corpus, max_documents=5)),
        *(stream_of(source(corpus, long_from=10**6, keep_short=share)) for share in (0.5, 0.6)),
        *(stream_of(source(corpus), positions="pose", **options) for options in ({}, {"pose_chunks": 3})),
        stream_of(source(corpus), positions="pose", window=65),
        stream_of(source(corpus), positions="randomized"),
        stream_of(source(short_texts, sequences="packed")),
        stream_of(source(short_texts, sequences="packed"), tokenizer=other_end),
        *(chat_stream(chat, train_on=choice) for choice in ("assistant", "all")),
        chat_stream(chat, tokenizer=other_template),
    ]
    assert len({stream.fingerprint() for stream in streams}) == len(streams)


def test_the_summary_counts_documents_and_tokens(stream_of, source, short_texts, ids_of):
    lengths = np.array([len(ids) for ids in ids_of(short_texts)])
    enough, cut = (lengths >= 48).sum(), ((lengths >= 48) & (lengths != 48)).sum()
    left = (lengths % 48)[lengths >= 48].sum() / lengths[lengths >= 48].sum()
    assert stream_of(source(short_texts), length=48).summary(48, 48) == [
        f"{short_texts}: {(lengths // 48).sum()} sequences (long) from {enough} of 42 documents, {enough / 42:.1%}; "
        f"{1 - enough / 42:.1%} of the documents are too short; {cut / enough:.1%} of those used are cut; "
        f"{left:.1%} of their tokens are unused."
    ]
