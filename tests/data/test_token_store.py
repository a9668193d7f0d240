"""Tokens on disk: written once per source and tokenizer, found again by their key; clear errors."""

import json
import os
import time

import numpy as np
import pytest

from ropecli.data import token_store as stores
from ropecli.data.token_store import TokenStore, cache_folder, open_store, source_identity, tokenizer_digest
from ropecli.errors import OutputError

TEXTS = [("a", "ba de fi go ku " * 40), ("b", ""), ("c", "ku go " * 25), ("d", "de")]


class Counting:
    """A tokenizer with one token per character, which counts its texts."""

    is_fast = False

    def __init__(self):
        self.texts = 0

    def __call__(self, texts, **options):
        self.texts += len(texts)
        return {"input_ids": [[ord(letter) for letter in text] for text in texts]}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ROPECLI_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def rows_of(store: TokenStore):
    return [store.read(document, 0, int(length)).tolist() for document, length in enumerate(store.lengths)]


def test_documents_are_the_tokenizers_own_ids(cache, tokenizer):
    store = open_store("key", lambda: iter(TEXTS), tokenizer)
    assert rows_of(store) == [tokenizer(text)["input_ids"] for _, text in TEXTS]
    assert store.lengths.dtype == store.read(0, 0, 3).dtype == np.int64
    assert len(store) == 4


def test_the_digest_is_of_the_documents_alone(cache, monkeypatch):
    def digest(key, texts, row_tokens=10**6):
        monkeypatch.setattr(stores, "_ROW_TOKENS", row_tokens)
        return open_store(key, lambda: iter(texts), Counting()).digest

    whole = digest("a", TEXTS)
    assert digest("b", TEXTS) == digest("c", TEXTS, row_tokens=10) == whole
    monkeypatch.setenv("ROPECLI_CACHE", str(cache / "elsewhere"))
    assert digest("a", TEXTS) == whole
    assert digest("d", TEXTS[::-1]) != whole
    assert digest("e", TEXTS[:-1]) != whole
    assert digest("f", [("a", TEXTS[0][1] + "ku go "), ("b", ""), ("c", "ku go " * 24), TEXTS[3]]) != whole


def test_tokens_are_mapped_and_not_held(cache):
    """1,000 documents of 8,000 tokens are 32 MB on disk; reading them takes little of this process's memory."""
    import tracemalloc

    import pyarrow

    text = "abcdefgh" * 1000
    open_store("key", lambda: ((str(at), text) for at in range(1000)), Counting())
    held = pyarrow.total_allocated_bytes()
    tracemalloc.start()
    try:
        store = open_store("key", lambda: iter(()), Counting())
        assert {int(store.read(document, 7992, 8000)[0]) for document in range(1000)} == {ord("a")}
        assert tracemalloc.get_traced_memory()[1] < 4e6
    finally:
        tracemalloc.stop()
    assert store.lengths.sum() == 8_000_000
    assert pyarrow.total_allocated_bytes() - held < 4e6


class TestWhatGoesWrong:
    def test_an_interrupt_is_no_error_and_leaves_nothing(self, cache):
        def texts():
            yield TEXTS[0]
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            open_store("key", texts, Counting())
        assert not list(cache.rglob("*.arrow"))
        assert len(open_store("key", lambda: iter(TEXTS), Counting())) == 4

    def test_a_cache_that_cannot_be_made_is_named(self, tmp_path, monkeypatch):
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("ROPECLI_CACHE", str(tmp_path / "file" / "cache"))
        with pytest.raises(OutputError, match=r"file/cache/tokens: .*ROPECLI_CACHE"):
            open_store("key", lambda: iter(TEXTS), Counting())


def test_the_cache_lies_where_the_user_or_the_desktop_says_or_else_at_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "desktop"))
    monkeypatch.setenv("ROPECLI_CACHE", str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine"
    monkeypatch.delenv("ROPECLI_CACHE")
    assert cache_folder() == tmp_path / "desktop" / "ropecli"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == tmp_path / ".cache" / "ropecli"


class TestIdentity:
    def of(self, source, tmp_path, split="train"):
        return json.dumps(source_identity(str(source), split, tmp_path / "cache"))

    def test_a_file_is_its_path_size_and_time(self, tmp_path):
        (tmp_path / "a.txt").write_text("some text")
        before = self.of(tmp_path / "a.txt", tmp_path)
        assert self.of(tmp_path / "a.txt", tmp_path) == before
        os.utime(tmp_path / "a.txt", ns=(1, 1))
        assert self.of(tmp_path / "a.txt", tmp_path) != before
        (tmp_path / "b.txt").write_text("some text")
        os.utime(tmp_path / "b.txt", ns=(1, 1))
        assert self.of(tmp_path / "b.txt", tmp_path) != self.of(tmp_path / "a.txt", tmp_path)

    def test_another_text_of_one_size_is_not_hidden_by_a_time_set_back(self, tmp_path):
        """Set mtime like cp -p, tar and rsync -t."""
        path = tmp_path / "a.txt"
        path.write_text("some text")
        os.utime(path, ns=(1, 1))
        before = self.of(path, tmp_path)
        time.sleep(0.02)  # the file system's clock ticks every few milliseconds
        path.write_text("more text")
        os.utime(path, ns=(1, 1))
        assert self.of(path, tmp_path) != before

    def test_a_folder_is_the_files_that_are_read(self, tmp_path):
        folder = tmp_path / "texts"
        (folder / "below").mkdir(parents=True)
        (folder / "below" / "a.txt").write_text("some text")
        seen = [self.of(folder, tmp_path)]
        (folder / "picture.png").write_text("")
        assert self.of(folder, tmp_path) == seen[0]
        (folder / "b.md").write_text("more")
        seen.append(self.of(folder, tmp_path))
        (folder / "b.md").unlink()
        assert self.of(folder, tmp_path) == seen[0] != seen[1]

    def test_a_dataset_is_its_commit_and_offline_the_one_seen_last(self, tmp_path, monkeypatch):
        import huggingface_hub

        def hub(commit):
            def dataset_info(self, dataset, timeout):
                assert dataset == "owner/name"
                if commit is None:
                    raise OSError("no network")
                return type("Info", (), {"sha": commit})()

            monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)

        hub(None)
        alone = self.of("owner/name", tmp_path)
        assert "owner/name" in alone
        hub("abc")
        known = self.of("owner/name", tmp_path)
        assert "abc" in known
        hub(None)
        assert self.of("owner/name", tmp_path) == known != alone
        hub("def")
        assert self.of("owner/name", tmp_path) not in (known, alone)
        assert self.of("owner/name", tmp_path, split="test") != self.of("owner/name", tmp_path)


class TestTokenizers:
    def test_what_was_asked_of_it_last_does_not_matter(self, tokenizer):
        import copy

        mine = copy.deepcopy(tokenizer)
        before = tokenizer_digest(mine)
        mine.pad_token = "<s>"
        mine(["ba de fi"], truncation=True, max_length=2, padding="max_length")
        assert "max_length" in mine.backend_tokenizer.to_str()  # guards: the call has left its trace
        assert tokenizer_digest(mine) == before == tokenizer_digest(tokenizer)

    def test_what_it_puts_around_the_text_does(self, tokenizer):
        import copy

        from tokenizers.processors import TemplateProcessing

        mine = copy.deepcopy(tokenizer)
        mine.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
        assert tokenizer_digest(mine) != tokenizer_digest(tokenizer)
