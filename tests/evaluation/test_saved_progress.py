"""An evaluation that was stopped goes on where it stopped: nothing scored twice, the rows of an uninterrupted one."""

import pytest

from ropecli.evaluation import perplexity
from ropecli.evaluation.perplexity import evaluate_perplexity
from ropecli.evaluation.processes import Workers
from ropecli.evaluation.saved_progress import open_progress

ASKED = {"protocol": "sliding", "lengths": [24, 64], "data": "abc", "factor": 4.0, "baseline": None}
LENGTHS = [24, 64]


class StoppedError(Exception):
    """In place of a kill."""


@pytest.fixture
def output(tmp_path):
    return tmp_path / "report.json"


@pytest.fixture(scope="module")
def model(llama, loaded):
    return loaded(llama)


@pytest.fixture(scope="module")
def documents(uneven):
    return uneven(100, 90, 80, 70, 64, 99)


@pytest.fixture
def scored(monkeypatch):
    """How many tokens each call of the scorer was given."""
    calls = []

    class Watched(perplexity.TokenScorer):
        def __call__(self, ids, *arguments, **options):
            calls.append(tuple(ids.shape))
            return super().__call__(ids, *arguments, **options)

    monkeypatch.setattr(perplexity, "TokenScorer", Watched)
    return calls


@pytest.fixture
def evaluate(model, documents, output):
    """evaluate(stop_after=3, ...) -> rows, or StoppedError after so many documents are kept."""

    def call(protocol="sliding", stop_after=None, asked=ASKED, rank=0, **options):
        with open_progress(output, asked, rank) as progress:
            if stop_after is not None:
                add = progress.add

                def adding(*arguments):
                    add(*arguments)
                    nonlocal stop_after
                    stop_after -= 1
                    if not stop_after:
                        raise StoppedError

                progress.add = adding
            return evaluate_perplexity(model, documents, LENGTHS, protocol=protocol, progress=progress, **options)

    return call


@pytest.mark.parametrize(("protocol", "batch_size"), [("prefix", 1), ("sliding", 2), ("yarn", 1)])
def test_a_resumed_run_scores_nothing_twice_and_gives_the_same_rows(
    evaluate, scored, protocol, batch_size, model, documents
):
    whole = evaluate_perplexity(model, documents, LENGTHS, protocol=protocol, batch_size=batch_size)
    every, scored[:] = list(scored), []
    with pytest.raises(StoppedError):
        evaluate(protocol, stop_after=4, batch_size=batch_size)
    assert scored
    assert evaluate(protocol, batch_size=batch_size) == whole
    assert scored == every


def test_a_damaged_line_costs_its_document_alone(evaluate, scored, output):
    with pytest.raises(StoppedError):
        evaluate(stop_after=5)
    whole = evaluate()
    every = sorted(scored)
    path = output.with_name("report.json.state") / "documents-0.jsonl"
    line, *rest, last = path.read_bytes().splitlines(keepends=True)
    at = line.index(b'"nll": ') + 8
    path.write_bytes(b"".join([line[:at], bytes([line[at] ^ 1]), line[at + 1 :], *rest, last[: len(last) // 3]]))
    scored.clear()
    assert evaluate() == whole
    assert 0 < len(scored) < len(every) / 2
    scored.clear()
    assert evaluate() == whole  # the damaged lines are still there, and sound ones after them
    assert scored == []


class OneOf(Workers):
    """One process of several: its share alone, and what the others found is not to be had."""

    def gather(self, items):
        raise StoppedError


def test_processes_share_the_documents_and_their_number_may_change(evaluate, scored, model, documents):
    """Two processes are stopped, three go on, and one ends it."""
    whole = evaluate_perplexity(model, documents, LENGTHS, protocol="sliding")
    every = sorted(scored)
    scored.clear()
    for rank in (0, 1):
        with pytest.raises(StoppedError):
            evaluate(rank=rank, workers=OneOf(rank, 2), stop_after=1)
    for rank in (2, 0):  # one is stopped before it begins
        with pytest.raises(StoppedError):
            evaluate(rank=rank, workers=OneOf(rank, 3))
    assert evaluate() == whole
    assert sorted(scored) == every
