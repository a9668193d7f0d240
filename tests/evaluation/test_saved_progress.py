"""An evaluation that was stopped goes on where it stopped: nothing scored twice, the rows of an uninterrupted one."""

import pytest

from ropecli.errors import OutputError, RecipeError
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


def test_a_line_that_was_cut_short_is_scored_again(evaluate, scored, output):
    with pytest.raises(StoppedError):
        evaluate(stop_after=5)
    before = len(scored)
    whole = evaluate()
    last = scored[before:]
    path = output.with_name("report.json.progress-0")
    *lines, line = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines, line[: len(line) // 3]]))
    scored.clear()
    assert evaluate() == whole
    assert scored == last
    scored.clear()
    assert evaluate() == whole  # what was written after the torn line is whole
    assert scored == []


DAMAGE = {
    "a bit of a loss": lambda line: flipped(line, line.index(b'"nll": ') + 8, 1),
    "a byte that is no text": lambda line: flipped(line, 40, 0x80),
    "a byte that ends the line": lambda line: line[:40] + b"\n" + line[41:],
}


def flipped(line, at, bit):
    return line[:at] + bytes([line[at] ^ bit]) + line[at + 1 :]


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_line_costs_its_document_alone(evaluate, scored, output, damage):
    whole = evaluate()
    every = len(scored)
    path = output.with_name("report.json.progress-0")
    header, line, *rest = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([header, damage(line), *rest]))
    scored.clear()
    assert evaluate() == whole
    assert 0 < len(scored) < every / 3
    scored.clear()
    assert evaluate() == whole  # the damaged line is still there, and a sound one after it
    assert scored == []


def test_a_disk_that_is_full_is_one_error(evaluate, output):
    """A limit on the size of files stands for it; nothing more is said when the file is closed."""
    resource = pytest.importorskip("resource")
    import signal

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1500, before[1]))
        with pytest.raises(OutputError, match="could not be written"):
            evaluate()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert evaluate()


@pytest.mark.parametrize("stopped_before", [1, 3])
def test_the_first_line_cut_short_does_not_open_the_file_to_another_request(evaluate, output, stopped_before):
    """A disk that fills, or a kill, amid the first line; then a run that goes on from there."""
    path = output.with_name("report.json.progress-0")
    with pytest.raises(StoppedError):
        evaluate(stop_after=1)
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(StoppedError):
        evaluate(stop_after=stopped_before)
    with pytest.raises(RecipeError, match="another request"):
        evaluate(asked={**ASKED, "factor": 8.0})


def test_a_file_of_the_user_in_place_of_the_progress_is_left_alone(evaluate, output):
    path = output.with_name("report.json.progress-0")
    path.write_text("my notes, in one line")
    with pytest.raises(OutputError, match="Cannot resume from"):
        evaluate()
    assert path.read_text() == "my notes, in one line"


def test_a_damaged_first_line_is_refused(evaluate, output):
    with pytest.raises(StoppedError):
        evaluate(stop_after=2)
    path = output.with_name("report.json.progress-0")
    header, *lines = path.read_bytes().split(b"\n")
    content = b"\n".join([flipped(header, 30, 1), *lines])
    path.write_bytes(content)
    with pytest.raises(OutputError, match=r"Cannot resume from .*progress-0: .*Delete .*progress-0 to start over"):
        evaluate()
    assert path.read_bytes() == content


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
