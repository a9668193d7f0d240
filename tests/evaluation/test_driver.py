"""The driver of all tasks: what a resumed run reads and gives, and how often the model is called.

A pass is the shape (batch, tokens) that the decoder reads. Passes of the checks before the first sample do not count.
"""

from contextlib import contextmanager

import pytest

from ropecli import messages
from ropecli.checkpoint.opening import open_checkpoint
from ropecli.evaluation import progress
from ropecli.evaluation.driver import Job, Task, make_reports, score_samples
from ropecli.evaluation.readers.live import LiveReader
from ropecli.evaluation.subject import LiveReaderFactory, Subject
from ropecli.evaluation.tasks.needle import Retrieval
from ropecli.evaluation.tasks.perplexity import Perplexity
from ropecli.live.lm_head import SplitModel
from ropecli.resume import read_records, state_folder

TASKS = {"prefix": 2, "sliding": 12, "retrieval": 8, "retrieval, generate": 4}
"""The interrupted pass of each."""


class Passes(list):
    """stop: the number of the pass that Ctrl-C interrupts."""

    stop, counting = None, False


@pytest.fixture
def passes(monkeypatch):
    passes, prepare = Passes(), LiveReader.prepare

    def prepared(self, *arguments, **options):
        passes.counting = False
        prepare(self, *arguments, **options)
        passes.counting = True

    def counted(name):
        decode = getattr(SplitModel, name)

        def call(self, ids, *others):
            if passes.counting:
                if len(passes) + 1 == passes.stop:
                    raise KeyboardInterrupt
                passes.append(tuple(ids.shape))
            return decode(self, ids, *others)

        return call

    monkeypatch.setattr(LiveReader, "prepare", prepared)
    for name in ("decode", "decode_on"):
        monkeypatch.setattr(SplitModel, name, counted(name))
    return passes


@pytest.fixture(scope="module")
def documents(uneven):
    return uneven(100, 90, 80, 70, 64, 99)


@pytest.fixture
def make(documents, prompts):
    def make(name) -> Task:
        match name.split(", "):
            case "retrieval", *mode:
                return Retrieval(prompts, [80, 100], [0, 1], samples=3, mode=mode[0] if mode else "rank")
        return Perplexity(documents, [24, 64], name)

    return make


@pytest.fixture(scope="module")
def subject(llama):
    return Subject(open_checkpoint(str(llama)))


@pytest.fixture
def run(make, subject, tokenizer, passes):
    """run("sliding", output, batch_size=2, ...) -> cells and fingerprint; `passes` has those of this run."""

    def run(name, output=None, batch_size=2):
        passes.clear()
        passes.counting = False
        job, factory = (
            Job(subject, make(name), tokenizer),
            LiveReaderFactory({"device": "cpu"}, batch_size=batch_size),
        )
        (report,) = make_reports([job], factory, output)
        return report.cells, report.fingerprint

    return run


@pytest.fixture
def output(tmp_path):
    return tmp_path / "report.json"


def records(output):
    """(part, key, value) of every saved sample."""
    saved = [read_records(path) for path in sorted(state_folder(output).glob("samples-*"))]
    return [record for records in saved for record in records if record[1] != ["reader"]]


@pytest.mark.parametrize(("name", "stop"), TASKS.items(), ids=TASKS)
def test_a_resumed_run_equals_an_uninterrupted_one_to_the_bit(name, stop, run, make, passes, output, monkeypatch):
    cells, samples = run(name), make(name).samples(one_pass=True)
    whole, passes.stop = list(passes), stop
    with pytest.raises(KeyboardInterrupt):
        run(name, output)
    passes.stop = None
    saved = len(records(output))
    assert run(name, output) == cells
    assert 0 < saved < len(samples) == len(records(output))
    assert passes == whole[-len(passes) :]
    if name not in ("prefix", "retrieval, generate"):  # whose batches have one pass
        assert len(passes) > len(whole) - stop + 1, "the half-finished batch is read again"
    # nothing is left to read, and no model is loaded
    monkeypatch.setattr("ropecli.evaluation.subject.load_model", pytest.fail)
    assert run(name, output) == cells
    assert passes == []


# Progress.


@pytest.mark.parametrize("name", TASKS)
def test_the_bar_moves_within_a_sample_to_its_end(name, make, run):
    shares: list[float] = []
    opened: list[str] = []

    @contextmanager
    def bar(description, total):
        opened.append(description)
        yield lambda done=None, left=None, phase=None: shares.append(done) if left is not None else None

    token = messages.progress_bars.set(bar)
    run(name, batch_size=1)
    messages.progress_bars.reset(token)
    assert opened.count("") == 1
    assert len(shares) > len(make(name).samples(one_pass=True))
    assert 0 < min(shares) < 0.5
    # answers may end early, and may be shorter than their room
    assert (0.7 if "retrieval" in name else 0.95) < shares[-1] <= 1


def test_the_time_of_a_long_pass_follows_from_shorter_ones():
    """Seconds of a 135M model on a CPU."""
    speed = progress.Speed()
    for length, seconds in ((1024, 3.34), (2048, 7.4), (4096, 18.2)):
        speed.add(length, length, seconds)
    for length, seconds in ((8192, 50.6), (16384, 159)):
        assert length * speed.seconds_per_token(length) == pytest.approx(seconds, rel=0.1)


# How often the model is called.


def test_one_pass_serves_all_lengths_of_prefix(llama, patched, loaded, uneven, evaluate, passes):
    """Unless the frequencies follow the length."""
    documents = uneven(200, 200, 200, 200)
    for folder, lengths in ((llama, [200]), (patched(llama, "dynamic"), [24, 66, 200])):
        passes.clear()
        passes.counting = False
        evaluate(loaded(folder), documents, [24, 66, 200], batch_size=3)
        assert passes == [(count, length) for length in lengths for count in (3, 1)]


@pytest.mark.parametrize("method", [None, "dynamic"])
def test_a_prompt_is_read_once_for_all_its_candidates(method, make, llama, patched, loaded, passes):
    """If the frequencies follow the length, with each."""
    task = make("retrieval")
    score_samples(task, LiveReader(loaded(patched(llama, method) if method else llama)))
    expected = []
    for key in task.samples(one_pass=False):
        question = task.question(key)
        (count,), prompt = {len(answer) for answer in question.answers()}, len(question.ids)
        assert count > 1
        expected += [(10, prompt + count)] if method else [(1, prompt), (10, count - 1)]
    assert passes == expected


@pytest.mark.parametrize("method", [None, "dynamic"])
def test_a_generated_token_takes_one_pass_for_a_batch(method, prompts, llama, patched, loaded, passes):
    task = Retrieval(prompts, [80], [0], samples=3, mode="generate")
    model = loaded(patched(llama, method) if method else llama)
    model.generation_config.eos_token_id = None
    questions = [task.question(key) for key in task.samples(one_pass=False)]
    (prompt,), (limit,) = ({len(each.ids) for each in questions}, {each.limit for each in questions})
    reader = LiveReader(model, batch_size=3)
    reader.prepare(questions[0].ids, 80, answers=True)
    reader.generate([each.ids for each in questions], limit, lambda index, tokens: False)
    assert passes == [(3, prompt), *((3, prompt + count if method else 1) for count in range(1, limit))]
