"""The driver of all tasks: what a resumed run reads and gives, and how often the model is called.

A pass is the shape (batch, tokens) that the decoder reads. Passes of the checks before the first sample do not count.
"""

from contextlib import contextmanager
from itertools import count

import pytest

from ropecli import messages
from ropecli.checkpoint.opening import open_checkpoint
from ropecli.evaluation import progress
from ropecli.evaluation.driver import Job, Task, collect, score_samples
from ropecli.evaluation.processes import ALONE, Workers
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
    """run("sliding", output, batch_size=2, ...) -> the values; `passes` has those of this run."""

    def run(name, output=None, workers=ALONE, batch_size=2):
        passes.clear()
        passes.counting = False
        job, factory = (
            Job(subject, make(name), tokenizer),
            LiveReaderFactory({"device": "cpu"}, batch_size=batch_size),
        )
        ((_, values, _),) = collect([job], factory, output, workers)
        return values

    return run


@pytest.fixture
def output(tmp_path):
    return tmp_path / "report.json"


def records(output):
    """(part, key, value) of every saved sample."""
    saved = [read_records(path) for path in sorted(state_folder(output).glob("samples-*"))]
    return [record for records in saved for record in records if record[1] != ["reader"]]


@pytest.mark.parametrize(("name", "stop"), TASKS.items(), ids=TASKS)
def test_a_resumed_run_equals_an_uninterrupted_one_to_the_bit(name, stop, run, passes, output, monkeypatch):
    values = run(name)
    whole, passes.stop = list(passes), stop
    with pytest.raises(KeyboardInterrupt):
        run(name, output)
    passes.stop = None
    saved = len(records(output))
    assert run(name, output) == values
    assert 0 < saved < len(values) == len(records(output))
    assert passes == whole[-len(passes) :]
    if name not in ("prefix", "retrieval, generate"):  # whose batches have one pass
        assert len(passes) > len(whole) - stop + 1, "the half-finished batch is read again"
    # nothing is left to read, and no model is loaded
    monkeypatch.setattr("ropecli.evaluation.subject.load", pytest.fail)
    assert run(name, output) == values
    assert passes == []


@pytest.mark.parametrize("name", ["sliding"])
def test_a_flipped_bit_in_a_record_costs_its_batch_only(name, run, passes, output):
    """The batch is the same as before, so the values are the same to the bit."""
    values = run(name, output)
    whole = list(passes)
    (path,) = state_folder(output).glob("samples-*")
    line, *others = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([line[:-3], bytes([line[-3] ^ 1]), line[-2:], *others]))
    assert run(name, output) == values
    assert 0 < len(passes) < len(whole)
    assert passes == whole[: len(passes)]
    path.write_bytes(path.read_bytes()[:-20])  # a run that was killed while it wrote
    assert run(name, output) == values
    assert passes == []


class StoppedError(Exception):
    """Stands for a kill."""


class OneOf(Workers):
    """One process of several, killed before the values of the others arrive."""

    def gather(self, items):
        if items.keys() != {self.rank}:
            raise StoppedError
        return items


@pytest.mark.parametrize("name", ["sliding"])
def test_processes_share_the_samples_and_their_number_may_change(name, run, passes, output):
    """Two processes are stopped, three continue, of which one is killed before it begins, and one ends it."""
    values = run(name, batch_size=1)
    whole, passes.stop, every = list(passes), len(passes) // 3, []
    for rank in (0, 1):
        with pytest.raises(KeyboardInterrupt):
            run(name, output, OneOf(rank, 2), batch_size=1)
    passes.stop = None
    before = len(records(output))
    for rank in (2, 0):
        with pytest.raises(StoppedError):
            run(name, output, OneOf(rank, 3), batch_size=1)
        every += passes
    assert 0 < before < len(records(output)) < len(values)
    assert run(name, output, batch_size=1) == values
    assert len(every + passes) < len(whole)
    assert len(records(output)) == len(values)


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


class Machine:
    """Reads tokens in a time that grows with the length of the pass; one layer."""

    def __init__(self, monkeypatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(progress.time, "monotonic", lambda: self.now)

    @contextmanager
    def watched(self, advance):
        self.advance = advance
        yield

    def read(self, length: int) -> None:
        for _ in range(4):
            self.now += length / 4 * (1 + length / 1000)
            self.advance(length / 4)


def test_the_time_left_is_that_of_all_jobs_by_the_cost_of_each_length(monkeypatch):
    """Eleven subjects read two short and two long samples each: a long token costs five times a short one."""
    lefts: list[float] = []

    @contextmanager
    def bar(description, total):
        yield lambda done=None, left=None, phase=None: lefts.append(left) if left is not None else None

    token, machine = messages.progress_bars.set(bar), Machine(monkeypatch)
    shown = progress.Progress([{1000: 2000, 9000: 18_000}] * 11)
    errors = []
    with shown.shown():
        for job in range(11):
            with shown.job(f"subject {job}", machine):
                for length in (1000, 1000, 9000, 9000):
                    shown.begin(length, length)
                    machine.read(length)
                    whole = 11 * 2 * (1000 * 2 + 9000 * 10)
                    errors.append(lefts[-1] - (whole - machine.now))
    messages.progress_bars.reset(token)
    whole = machine.now
    assert max(map(abs, errors[3:])) < 0.05 * whole
    assert abs(errors[-1]) < 0.001 * whole
    # before a long sample was read, attention is taken to cost as much as the rest at 16k tokens
    assert 0.1 * whole < lefts[3]


def test_the_time_of_a_long_pass_follows_from_shorter_ones():
    """Seconds of a 135M model on a CPU."""
    speed = progress.Speed()
    for length, seconds in ((1024, 3.34), (2048, 7.4), (4096, 18.2)):
        speed.add(length, length, seconds)
    for length, seconds in ((8192, 50.6), (16384, 159)):
        assert length * speed.seconds_per_token(length) == pytest.approx(seconds, rel=0.1)


def test_what_takes_more_than_an_hour_is_said_once(run, monkeypatch, output, caplog):
    seconds = count(step=4000)
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(seconds))
    run("sliding", output)
    (sentence,) = [message for message in caplog.messages if "takes some" in message]
    assert sentence.endswith("min more. An interrupted run continues with --resume.")


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
