"""Cells: ranks and hits by hand, the same prompts for every model, and the effect on the demo checkpoint."""

import numpy as np
import pytest

from ropecli.demo import FOLDER
from ropecli.errors import DataError, MethodError, RopecliError
from ropecli.evaluation.retrieval.accuracy import evaluate_retrieval, generate_answer, rank_answers
from ropecli.evaluation.retrieval.haystack import PieceTokenizer, read_haystack
from ropecli.evaluation.retrieval.prompts import RetrievalTask
from ropecli.evaluation.retrieval.templates import STYLES


@pytest.fixture(scope="module")
def task(tokenizer, corpus):
    pieces = PieceTokenizer(tokenizer)
    return RetrievalTask(
        "needle", STYLES["code"], read_haystack([("a", (corpus / "text00.txt").read_text())], pieces), pieces
    )


class Knows:
    """A reader that gives set values."""

    def __init__(self, values=None, tokens=()):
        self.values, self.tokens = values, tokens

    def log_probabilities(self, ids, answers):
        return np.array(self.values, dtype=float)

    def greedy(self, ids):
        return iter(self.tokens)


RANKS = {
    "the first": ([-1, -2, -3], (True, 1, 1.0)),
    "the second": ([-2, -1, -3], (False, 2, -1.0)),
    "a tie, which is no hit": ([-1, -1, -1], (False, 3, 0.0)),
}


@pytest.mark.parametrize(("values", "expected"), RANKS.values(), ids=RANKS.keys())
def test_ranks_by_hand(task, values, expected):
    assert rank_answers(Knows(values), task.prompt(100, 0.5, 0)) == expected


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_what_is_not_finite_is_refused(task, bad):
    with pytest.raises(RopecliError, match="not finite at length 100"):
        rank_answers(Knows([-1, bad, -2]), task.prompt(100, 0.5, 0))


def test_generated_answers_by_hand(task):
    prompt = task.prompt(100, 0.5, 0)
    tokenize = task.pieces.opening
    answers = {
        prompt.keys[0]: True,
        f"  {prompt.keys[0]} and more": True,
        f"{prompt.keys[0][:4]}": False,
        f"{prompt.keys[0][:4]}x": False,
        "": False,
        prompt.keys[1]: False,
        f"x{prompt.keys[0]}": False,
        f"{prompt.keys[0]}58745": False,
        f"{prompt.keys[0]}0 and more": False,
        f"{prompt.keys[0]}.": True,
        " \n" * 20 + prompt.keys[0]: False,
    }
    for said, hit in answers.items():
        assert generate_answer(Knows(tokens=tokenize(said)), task.pieces, prompt).hit == hit, said


def test_cells_stand_by_length_then_depth(task, llama, loaded):
    steps = []
    found = evaluate_retrieval(loaded(llama), task, [100, 80, 100], [1, 0], trials=3, advance=lambda: steps.append(1))
    assert [(cell.length, cell.depth) for cell in found.cells] == [(80, 0), (80, 1), (100, 0), (100, 1)]
    assert [cell.hits for cell in found.cells] == [sum(cell.found) for cell in found.cells]
    assert [len(cell.found) for cell in found.cells] == [3] * 4 == [cell.trials for cell in found.cells]
    assert len(steps) == 12
    assert all(1 <= cell.rank <= 10 for cell in found.cells)
    assert evaluate_retrieval(loaded(llama), task, [80, 100], [0, 1], trials=3) == found


def test_every_model_gets_the_same_prompts(task, llama, patched, loaded):
    base, dynamic = loaded(llama), loaded(patched(llama, "dynamic"))
    grids = [evaluate_retrieval(model, task, [80], [0.5], trials=2) for model in (base, dynamic)]
    assert grids[0].fingerprint == grids[1].fingerprint
    assert [one.once for one in grids] == [True, False]
    assert evaluate_retrieval(base, task, [81], [0.5], trials=2).fingerprint != grids[0].fingerprint


def test_what_does_not_fit_is_refused(task, llama, loaded, build):
    with pytest.raises(MethodError, match="rank, generate"):
        evaluate_retrieval(loaded(llama), task, [80], [0.5], mode="guess")
    with pytest.raises(DataError, match="too short"):
        evaluate_retrieval(loaded(llama), task, [10], [0.5])
    with pytest.raises(DataError, match="do not match"):
        evaluate_retrieval(loaded(build("llama", head_dim=32, vocab_size=60)), task, [80], [0.5])
    with pytest.raises(DataError, match="at least 5"):
        RetrievalTask("needle", STYLES["code"], task.haystack, task.pieces, keys=4, candidates=4)


@pytest.mark.skipif(not (FOLDER / "model.safetensors").is_file(), reason="no demo checkpoint here")
def test_the_demo_finds_a_key_inside_its_window_and_patched_beyond_it(loaded):
    """128 and 512 tokens; window 256. Measured with 80 prompts each: 100%, 29%, and 100%, 99% with YaRN."""
    from transformers import AutoTokenizer

    from ropecli.attention.patching import live_patch
    from ropecli.checkpoint.opening import open_checkpoint
    from ropecli.checkpoint.patch_plan import make_plan
    from ropecli.data.sources import read_texts
    from ropecli.scaling.spec import make_spec

    pieces = PieceTokenizer(AutoTokenizer.from_pretrained(FOLDER))
    texts = list(read_texts("demo"))[:4] or [(str(path), path.read_text()) for path in FOLDER.parent.rglob("*.py")]
    task = RetrievalTask("needle", STYLES["code"], read_haystack(texts, pieces), pieces)
    model = loaded(FOLDER)
    base = evaluate_retrieval(model, task, [128, 512], [0.5], trials=3)
    live_patch(model, make_plan(open_checkpoint("demo"), make_spec("yarn", 4.0, {})).ropes)
    yarn = evaluate_retrieval(model, task, [128, 512], [0.5], trials=3)
    inside, beyond = (sum(cell.hits for cell in base.cells if cell.length == length) for length in (128, 512))
    assert base.fingerprint == yarn.fingerprint
    assert inside == 3
    assert beyond <= 2
    assert sum(cell.hits for cell in yarn.cells) == 6
