"""Retrieval and RULER: ranks and generated answers by hand, equal prompts for every model, the demo checkpoint."""

from itertools import islice

import numpy as np
import pytest

from ropecli.errors import DataError
from ropecli.evaluation.driver import Store, score_samples
from ropecli.evaluation.prompt_pieces import PieceTokenizer
from ropecli.evaluation.readers.live import LiveReader
from ropecli.evaluation.ruler_prompts import PromptMaker
from ropecli.evaluation.ruler_tasks import TASKS, read_essay
from ropecli.evaluation.tasks.asking import score_of_ranks
from ropecli.evaluation.tasks.needle import Retrieval
from ropecli.evaluation.tasks.ruler import Ruler
from ropecli.options import RulerOptions


class Knows:
    """A reader that gives these values to candidates, or generates these tokens, one list per prompt."""

    def __init__(self, values=None, texts=()):
        self.values, self.texts, self.generated = values, texts, 0

    def log_probabilities(self, questions):
        return [np.array(self.values, dtype=float) for _ in questions]

    def generate(self, prompts, limit, done):
        answers = []
        for index, text in enumerate(self.texts):
            answers.append([])
            for token in islice(text, limit):
                answers[-1].append(token)
                self.generated += 1
                if done(index, answers[-1]):
                    break
        return answers


@pytest.fixture(scope="module")
def ruler_maker(tokenizer, corpus):
    pieces = PieceTokenizer(tokenizer)
    return PromptMaker(pieces, essay=read_essay([("a", (corpus / "text00.txt").read_text())], pieces, 2048))


@pytest.fixture
def ask(prompts):
    """ask(reader, mode) -> score, share of right candidates, and whether a thought was seen, of one prompt."""

    def score(reader, mode="rank"):
        task = Retrieval(prompts, [100], [0.5], samples=1, mode=mode)
        ((score, _, *others),) = task.score(reader, task.samples(one_pass=False))
        return score, *others

    return score


@pytest.mark.parametrize(
    ("values", "score"),
    [([-1, -2, -3], 1), ([-2, -1, -3], 0), ([-1] * 3, 0)],
)
def test_ranks_by_hand(ask, values, score):
    assert ask(Knows(values)) == (score, 1 / 3, False)


def test_several_right_answers_are_ranked_against_the_others():
    # of three right answers, two are among the three best; a tie counts against them
    assert score_of_ranks(np.array([-1, -2, -5, -3, -4]), 3) == pytest.approx(2 / 3)
    assert score_of_ranks(np.array([-1, -2, -3, -3, -4]), 3) == pytest.approx(2 / 3)
    assert score_of_ranks(np.array([-3, -2, -1, -4, -4]), 3) == 1


def test_candidates_of_ruler_are_ranked_by_log_probability_per_token(ruler_maker, options_of):
    task = Ruler(ruler_maker, [TASKS["fwe"]], [1500], options_of(RulerOptions, samples=1, mode="rank"))
    (key,) = task.samples(one_pass=False)
    lengths = np.array([len(answer) for answer in task.question(key).answers()])
    right = np.arange(len(lengths)) < 3
    ((score, _, share, _),) = task.score(Knows(np.where(right, -1.0, -1.1) * lengths), [key])
    assert (score, share) == (1, 3 / len(lengths))
    assert len(set(lengths)) > 1
    ((score, *_),) = task.score(Knows(np.where(right, -1.1, -1.0) * lengths), [key])
    assert score == 0


def test_generated_keys_by_hand(ask, prompts):
    key, another = prompts.prompt(100, 0.5, 0).candidates[:2]
    answers = {
        key: True,
        f"  {key} and more": True,
        f"{key[:4]}x": False,
        "": False,
        another: False,
        f"x{key}": False,
        f"{key}0 and more": False,
        f"{key}.": True,
        " \n" * 20 + key: False,
    }
    for text, hit in answers.items():
        assert ask(Knows(texts=[prompts.pieces.opening(text)]), "generate") == (hit, 1 / 90_000, False), text


def test_answers_of_ruler_end_once_nothing_can_change(ruler_maker, options_of):
    task = Ruler(ruler_maker, [TASKS["niah_multivalue"]], [2000], options_of(RulerOptions, samples=2))
    keys = task.samples(one_pass=False)
    first, second = (ruler_maker.make(TASKS["niah_multivalue"], 2000, index).references for index in range(2))
    texts = [f"{' '.join(first)}{' and more' * 99}", f"{second[1]}, that is all"]
    reader = Knows(texts=[ruler_maker.tokenizer.opening(text) for text in texts])
    assert [score for score, *_ in task.score(reader, keys)] == [1, 0.25]
    assert reader.generated < 2 * TASKS["niah_multivalue"].generated


@pytest.mark.parametrize("mode", ["rank", "generate"])
def test_batches_give_the_same_scores(llama, loaded, prompts, mode):
    task = Retrieval(prompts, [100, 80], [1, 0], samples=3, mode=mode)
    values = [score_samples(task, LiveReader(loaded(llama), batch_size=size)) for size in (1, 3)]
    if mode == "generate":
        assert values[0] == values[1]
    cells = [task.cells(each) for each in values]
    assert [(cell.length, cell.depth, cell.samples) for cell in cells[0]] == [
        (length, depth, 3) for length in (80, 100) for depth in (0, 1)
    ]
    assert [cell.sums for cell in cells[0]] == [cell.sums for cell in cells[1]]


def test_every_model_gets_the_same_prompts(prompts, llama, patched, loaded):
    task, fingerprints, follows = Retrieval(prompts, [80], [0.5], samples=2), [], []
    for folder in (llama, patched(llama, "dynamic")):
        store = Store()
        fingerprints.append(task.fingerprint(score_samples(task, LiveReader(loaded(folder)), store)))
        follows.append(store.values("")["reader",]["follows_length"])
    assert fingerprints[0] == fingerprints[1]
    assert follows == [False, True]
    other = Retrieval(prompts, [81], [0.5], samples=2)
    assert other.fingerprint(score_samples(other, LiveReader(loaded(llama)))) != fingerprints[0]


def test_unsuitable_prompts_and_models_are_refused(prompts, loaded, build):
    with pytest.raises(DataError, match="too short"):
        Retrieval(prompts, [10], [0.5])
    task, reader = Retrieval(prompts, [80], [0.5]), LiveReader(loaded(build("llama", head_dim=32, vocab_size=60)))
    with pytest.raises(DataError, match="do not match"):
        score_samples(task, reader)
