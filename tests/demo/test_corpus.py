"""The demo's split of the standard library: nothing that is measured on was trained on."""

import pytest

from ropecli.data.sources import Source
from ropecli.demo import corpus


def lines(prefix, count):
    return [f"{prefix} = compute({number}, '{prefix}')" for number in range(count)]


@pytest.fixture(scope="module")
def training():
    return dict(corpus.training_files())


def test_the_library_of_this_python_is_split_by_name(training):
    assert len(training) > 500
    assert not set(training) & set(corpus.HELD_OUT)
    assert not [name for name in training if {"site-packages", "dist-packages"} & set(name.split("/"))]


def test_no_training_file_shares_a_passage_with_a_held_out_file(training):
    """By brute force over runs of ten lines, with no hash: a passage that was copied and indented is found."""

    def runs(text):
        body = [line.strip() for line in text.splitlines() if len(line.strip()) >= 4]
        return {tuple(body[start : start + 10]) for start in range(len(body) - 9)}

    held_out = set().union(*(runs(text) for text in corpus.held_out_files().values()))
    assert [name for name, text in training.items() if runs(text) & held_out] == []


def test_no_held_out_file_of_this_python_was_trained_on():
    assert [name for name, text in corpus.held_out_files().items() if corpus.was_trained_on(text)] == []


def test_a_training_file_is_known_again(training):
    assert corpus.was_trained_on(training["turtle.py"])


def test_a_held_out_file_into_which_training_text_moved_is_passed_over(training, monkeypatch):
    moved = "\n".join(training["_pydecimal.py"].splitlines()[1000:1300])
    fake = {"argparse.py": "\n".join([*lines("own", 50), moved]), "ast.py": "\n".join(lines("own", 50))}
    monkeypatch.setattr(corpus, "held_out_files", lambda root=None: fake)
    assert dict(Source("demo").texts()).keys() == {"ast.py"}
