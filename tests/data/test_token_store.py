"""Tokens on disk: written once per source and tokenizer, found again by their key, checked by their digest."""

import copy
import json
import os
import time
from dataclasses import replace

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

from ropecli.data import sources, token_store
from ropecli.data.documents import Document
from ropecli.data.sources import Source
from ropecli.data.token_store import (
    TokenStore,
    last_seen_files,
    open_shard,
    open_store,
    source_identity,
    tokenizer_digest,
)
from ropecli.errors import DataError, OutputError


def documents(count=100, wait=0.0):
    """wait: seconds before each document."""
    for number in range(count):
        time.sleep(wait)
        ids = number + np.arange(3_000)
        yield Document(str(number), ids, trained=ids % 3 > 0 if number % 2 else None)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ROPECLI_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def opened(documents):
    return TokenStore([open_shard("key", documents)])


@pytest.fixture(scope="module")
def digest(tmp_path_factory):
    """The records of an undamaged store."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROPECLI_CACHE", str(tmp_path_factory.mktemp("untouched")))
        return opened(documents()).digest


def test_documents_are_kept_with_what_is_trained_on(cache):
    store = opened(documents())
    assert len(store) == 100
    assert store.masked
    assert store.largest_id == 99 + 2_999
    for number, document in enumerate(documents()):
        ids, trained = store.read(number, 7, 3_000)
        np.testing.assert_array_equal(ids, document.ids[7:])
        np.testing.assert_array_equal(trained, True if document.trained is None else document.trained[7:])
        assert (ids.dtype, trained.dtype) == (np.int64, bool)
    assert isinstance(open_shard("key", ()).ids, np.memmap)


def test_an_interrupt_leaves_nothing(cache):
    def interrupted():
        yield from documents(3)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        opened(interrupted())
    assert not list(cache.rglob("*.bin"))


def test_a_cache_that_cannot_be_made_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ROPECLI_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(OutputError, match=r"file/cache/tokens: .*ROPECLI_CACHE"):
        opened(documents())


def open_slowly(started, wait):
    def counted():
        with started.open("a") as file:
            file.write("x")
        yield from documents(wait=wait)

    print(opened(counted()).digest)


def test_processes_at_once_tokenize_once_and_another_takes_over_from_a_killed_one(cache, tmp_path, digest, fork):
    first = fork(open_slowly, tmp_path / "started", 1.0)
    while not (tmp_path / "started").exists():
        time.sleep(0.01)
    others = [fork(open_slowly, tmp_path / "started", 0.005) for _ in range(2)]
    time.sleep(2)
    assert [process.poll() for process in others] == [None, None]  # guards: they wait
    first.kill()
    assert [process.communicate()[0] for process in others] == [f"{digest}\n"] * 2
    assert (tmp_path / "started").read_text() == "xx"


def truncated(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flipped(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        *((truncated, name) for name in ("ids.bin", "lengths.bin", "digest")),
        *((flipped, name) for name in ("ids.bin", "lengths.bin", "trained.bin")),
        (os.unlink, "trained.bin"),
    ],
)
def test_a_damaged_store_is_written_again(cache, digest, damage, name):
    opened(documents())
    (path,) = cache.rglob(name)
    damage(path)
    written = []

    def written_again():
        written.append(1)
        yield from documents()

    for _ in range(2):
        assert opened(written_again()).digest == digest
    assert len(written) == 1


def identity(path, tmp_path):
    source = Source(str(path))
    return json.dumps(source_identity(source, last_seen_files(source, tmp_path / "cache")))


def test_a_file_is_identified_by_path_size_and_times(tmp_path):
    """By its ctime as well, since cp -p, tar and rsync -t set mtime back."""
    path = tmp_path / "a.txt"
    path.write_text("some text")
    os.utime(path, ns=(1, 1))
    before = identity(path, tmp_path)
    assert identity(path, tmp_path) == before
    (tmp_path / "b.txt").write_text("some text")
    os.utime(tmp_path / "b.txt", ns=(1, 1))
    assert identity(tmp_path / "b.txt", tmp_path) != before
    time.sleep(0.02)  # the file system's clock ticks every few milliseconds
    path.write_text("more text")
    os.utime(path, ns=(1, 1))
    assert identity(path, tmp_path) != before


def test_what_splits_the_text_changes_the_digest_of_a_tokenizer_and_its_last_call_does_not(tokenizer):
    tokenizer, other = copy.deepcopy(tokenizer), copy.deepcopy(tokenizer)
    tokenizer.pad_token = other.pad_token = "<s>"
    other(["ba de fi"], truncation=True, max_length=2, padding="max_length")
    assert "max_length" in other.backend_tokenizer.to_str()  # guards: the call has left its trace
    assert tokenizer_digest(other) == tokenizer_digest(tokenizer)
    other.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    assert tokenizer_digest(other) != tokenizer_digest(tokenizer)


def test_what_was_tokenized_before_a_fault_is_kept_by_shard(tmp_path, cache, tokenizer, monkeypatch):
    """And a changed file costs its own shard alone."""
    tokenized = []
    read = sources._read_file
    monkeypatch.setattr(sources, "_read_file", lambda file, *others: tokenized.append(file.name) or read(file, *others))
    monkeypatch.setattr(token_store, "_SHARD", 100)
    for number in range(3):
        rows = [{"text": "ba de fi go " * 9}] * 2 + [{"text": None}] * (number == 1)
        (tmp_path / f"{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = Source(str(tmp_path))
    with pytest.raises(DataError, match=r"1\.jsonl, line 3: text is null"):
        open_store(source, tokenizer, None)
    (tmp_path / "1.jsonl").write_text(json.dumps({"text": "ku lo"}) + "\n")
    tokenized.clear()
    store = open_store(source, tokenizer, None)
    assert tokenized == ["1.jsonl", "2.jsonl"]
    whole = open_store(replace(source, limit=99), tokenizer, None)  # not in shards
    assert (store.digest, len(store)) == (whole.digest, 5)
    for document, length in enumerate(whole.lengths):
        for got, expected in zip(store.read(document, 1, length), whole.read(document, 1, length), strict=True):
            np.testing.assert_array_equal(got, expected)
    monkeypatch.setattr(token_store, "_PIECE", 7)  # pieces that shards do not divide
    whole = open_store(replace(source, limit=99), tokenizer, None)
    assert open_store(source, tokenizer, None).digest == whole.digest


def test_conversations_that_cannot_be_trained_on_are_counted_before_they_are_refused(
    cache, tmp_path, chat_template, tokenizer
):
    chatting = copy.deepcopy(tokenizer)
    chatting.chat_template = chat_template
    (tmp_path / "a.jsonl").write_text('{"messages": []}\n' * 2)
    with pytest.raises(DataError, match=r"a\.jsonl:1: the conversation is empty\. 2 rows have such faults"):
        open_store(Source(str(tmp_path / "a.jsonl")), chatting, None)


def test_columns_and_keys_that_nothing_reads_are_named_once(
    cache, tmp_path, chat_template, tokenizer, caplog, monkeypatch
):
    chatting = copy.deepcopy(tokenizer)
    chatting.chat_template = chat_template
    monkeypatch.setattr(token_store, "_SHARD", 1)
    row = {
        "messages": [
            {"role": "user", "content": "ba", "train": True, "name": "fi"},
            {"role": "assistant", "content": "de", "audio": None},
        ],
        **{"id": 1, "rating": None, "system": None},
    }
    data = tmp_path / "data"
    data.mkdir()
    for name in "ab":
        (data / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    for _ in range(2):  # tokenized, and from the cache
        caplog.clear()
        open_store(Source(str(data)), chatting, None)
        [message] = caplog.messages
        assert message == f"{data}: nothing reads column id, key name of messages, key train of messages."
