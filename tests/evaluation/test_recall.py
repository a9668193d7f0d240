"""Recall: the loss of a repeated passage, with its first occurrence far, near or absent."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from completions_server import CompletionsServer

from ropecli.errors import DataError
from ropecli.evaluation.driver import Store, score_samples
from ropecli.evaluation.readers.live import LiveReader
from ropecli.evaluation.tasks import recall as recall_module
from ropecli.evaluation.tasks.recall import Recall

LENGTHS = [270, 400]


@pytest.fixture(scope="module")
def checkpoint(build):
    return build("llama", head_dim=32, max_position_embeddings=256)


def laid_out(documents, length, document, part):
    """absent, far, near, as the definition says."""
    texts = [document.ids[1:].tolist() for document in documents.kept]
    half = [text.tolist() for text in np.array_split(texts[document], 2)][part]
    passage = half[(len(half) - 80) // 2 :][:80]
    following = texts[(document + 1) % len(texts)]
    lead, other = [0, *following[:15]], following[(len(following) - 80) // 2 :][:80]
    before = [token for step in (3, 2, 1) for token in texts[(document - step) % len(texts)]]
    filler = before[len(before) - (length - 16 - 160) :]
    yield lead + other + filler + passage
    yield lead + passage + filler + passage
    yield lead + filler[:-80] + passage + filler[-80:] + passage


@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_losses_of_every_arm_equal_those_of_transformers(checkpoint, loaded, uneven, plain_nll, batch_size):
    documents = uneven(241, 300, 321, 260)
    task = Recall(documents, LENGTHS, 270)
    values = score_samples(task, LiveReader(loaded(checkpoint), batch_size=batch_size))
    model = loaded(checkpoint)
    for cell in task.cells(values):
        for document, total in enumerate(cell.sums):
            arms = [list(laid_out(documents, cell.length, document, part)) for part in (0, 1)]
            of_arm = [arm[("absent", "far", "near").index(cell.task)] for arm in arms]
            assert all(len(ids) == cell.length for ids in of_arm)
            assert total == pytest.approx(sum(plain_nll(model, ids)[-64:].sum() for ids in of_arm), abs=1e-2)
        assert cell.weights == (128.0,) * 4
    assert [(cell.length, cell.task) for cell in task.cells(values)] == [
        *((270, arm) for arm in ("absent", "far", "near")),
        *((400, arm) for arm in ("absent", "far")),
    ]


LEAD = 43
"""Tokens of the lead-in of a model that was pretrained on 700."""


def passes_laid_out(documents, length, arm, first, last):
    """The ids of the pass of the documents first to last; and document, start and repetition of each passage."""
    texts = [document.ids[1:].tolist() for document in documents.kept]
    halves = [
        (document, half.tolist()) for document in range(first, last) for half in np.array_split(texts[document], 2)
    ]
    passages = [half[(len(half) - 80) // 2 :][:80] for _, half in halves]
    following = [texts[number % len(texts)] for number in range(last, first + len(texts))]
    preceding = [token for text in following for token in text]  # round about, they are also before it
    size = length - LEAD - 160 * len(passages)
    filler = (preceding * 9)[-size:]
    order = np.random.default_rng(2 * first).permutation(len(passages))
    others = [text[(len(text) - 80) // 2 :][:80] for text in following[: len(passages)]]
    slots = {"far": [*passages, filler], "absent": [*others, filler], "near": [filler[:-80], *passages, filler[-80:]]}
    ids = [token for part in (*slots[arm], *(passages[place] for place in order)) for token in part]
    repeated = {int(place): length - 80 * (len(order) - number) for number, place in enumerate(order)}
    starts = [(document, LEAD + 80 * place, repeated[place]) for place, (document, _) in enumerate(halves)]
    return [0, *following[0][: LEAD - 1], *ids], starts


@pytest.fixture
def short_share(monkeypatch):
    """Passes of two documents from 700 tokens on."""
    monkeypatch.setattr(recall_module, "_OF_LENGTH", 1)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_pass_asks_many_passages(build, loaded, uneven, plain_nll, short_share, batch_size):
    checkpoint = build("llama", head_dim=32, max_position_embeddings=1024)
    documents = uneven(*range(250, 320, 10))
    task = Recall(documents, [700, 1100], 700)
    assert task.lead == LEAD
    assert task.settings["passages_per_pass"] == 4
    values = score_samples(task, LiveReader(loaded(checkpoint), batch_size=batch_size))
    model = loaded(checkpoint)
    for cell in task.cells(values):
        sums, distances = np.zeros(7), []
        for first in (0, 2, 4, 6):
            ids, starts = passes_laid_out(documents, cell.length, cell.task, first, min(first + 2, 7))
            assert len(ids) == cell.length
            losses = plain_nll(model, ids)  # of ids[1:]
            for document, start, repetition in starts:
                assert cell.task != "far" or ids[start : start + 80] == ids[repetition : repetition + 80]
                loss = losses[repetition + 15 : repetition + 79].sum()
                sums[document] += loss
                distances.append(repetition - start)
        assert cell.sums == pytest.approx(sums, abs=1e-2)
        assert (cell.weights, cell.passes) == ((128.0,) * 7, (0, 0, 4, 4, 8, 8, 12))
        if cell.length == 1100:
            assert min(distances) >= task.settings["least_distances"][1]


def test_passes_take_an_eighth_of_the_shortest_length_and_a_third_of_the_documents(uneven):
    def passages(length, documents):
        return Recall(uneven(*[300] * documents), [length, 9000], 8192).passages

    assert [passages(*asked) for asked in ((2559, 9), (2560, 9), (8192, 12), (8192, 8), (8192, 5), (8192, 2))] == [
        *(1, 2, 6, 4, 2, 1)
    ]


def test_passages_have_passes_of_their_own_where_other_documents_are_few_or_repeat_them(uneven):
    documents = uneven(*[300] * 6)
    first, second, *others = documents.kept
    copies = [replace(first, ids=first.ids.copy()) for _ in range(5)]
    assert Recall(replace(documents, kept=(*copies, others[-1])), [8192], 8192).passages == 1
    second = replace(second, ids=np.concatenate([second.ids[:40], first.ids[40:280], second.ids[280:]]))
    task = Recall(replace(documents, kept=(first, second, *others)), [8192], 8192)
    assert [first for _, _, first in task.only("far").samples(one_pass=True)] == [0, 1, 2, 3, 4, 8]
    assert (task.passages, task.least_documents) == (4, 2)


def test_the_first_documents_are_whole_passes_and_resume_in_the_middle(build, loaded, uneven, short_share, tmp_path):
    model = loaded(build("llama", head_dim=32, max_position_embeddings=1024))
    task = Recall(uneven(*range(250, 320, 10)), [700], 700)
    fewer = task.of_first(3)
    assert (fewer.count, {*fewer.samples(one_pass=True)} < {*task.samples(one_pass=True)}) == (4, True)
    expected = score_samples(task, LiveReader(model))
    reader = LiveReader(model)
    score, read = Recall.score, []

    class Stopped(Recall):
        def score(self, reader, batch):
            read.append(batch)
            if len(read) == 5:
                raise KeyboardInterrupt
            return score(self, reader, batch)

    task.__class__ = Stopped
    with pytest.raises(KeyboardInterrupt):
        score_samples(task, reader, Store(tmp_path))
    values = score_samples(task, reader, Store(tmp_path))
    assert (len(read), values) == (5 + len(expected) - 4, expected)
    cells = [cell.of_samples([0, 1, 2, 3]) for cell in task.cells(values)]
    assert [(cell.sums, cell.passes) for cell in fewer.cells(values)] == [(cell.sums, cell.passes) for cell in cells]


def test_a_longer_filler_begins_earlier_and_is_repeated_if_it_is_short(uneven):
    documents = uneven(241, 250, 260)
    task = Recall(documents, [256, 1024], 256)
    short, long = ([task._arm(length, arm, 3) for arm in ("absent", "far")] for length in (256, 1024))
    others = np.concatenate([documents.kept[2].ids[1:], documents.kept[0].ids[1:]])
    for shorter, longer in zip(short, long, strict=True):
        np.testing.assert_array_equal(shorter[:96], longer[:96])
        np.testing.assert_array_equal(shorter[96:], longer[-160:])
        np.testing.assert_array_equal(longer[96:-80], np.tile(others, 2)[-848:])


def test_a_document_that_repeats_the_passage_is_no_filler(uneven, caplog):
    """Without another document it is left out."""
    documents = uneven(300, 300, 300)
    first, second, third = documents.kept
    third = replace(third, ids=np.concatenate([third.ids[:100], first.ids[60:90], third.ids[130:]]))
    task = Recall(replace(documents, kept=(first, second, third)), [256], 256)
    far = task._arm(256, "far", 0)
    np.testing.assert_array_equal(far[96:-80], second.ids[-80:])
    task = Recall(replace(documents, kept=(first, third)), [256], 256)
    assert "leaving out 2 of 4" in caplog.text
    samples = task.samples(one_pass=True)
    assert samples == [(256, arm, number) for arm in ("absent", "far", "near") for number in (1, 3)]
    for cell in task.cells({sample: [float(sample[2])] for sample in samples}):
        assert (cell.sums, cell.weights) == ((1.0, 3.0), (64.0, 64.0))
    with pytest.raises(DataError, match="These documents repeat each other"):
        Recall(replace(documents, kept=(first, first)), [256], 256)


@pytest.mark.parametrize("method", ["streaming", "lm-infinite"])
def test_what_a_window_does_not_reach_gains_nothing(checkpoint, patched, uneven, method):
    from ropecli.attention import load_model
    from ropecli.checkpoint.opening import open_checkpoint

    model = load_model(open_checkpoint(patched(checkpoint, method, window=100)))
    task = Recall(uneven(300, 300, 300), [256, 512], 256)
    values = score_samples(task, LiveReader(model))
    for (length, arm, number), [loss] in values.items():
        if arm == "far":  # two layers reach 200 tokens
            assert ([loss] == pytest.approx(values[length, "absent", number], abs=1e-3)) is (length == 512)


@pytest.mark.parametrize("like", ["vllm", "llama"])
def test_a_server_gives_the_losses_or_the_copies_of_transformers(build, loaded, uneven, tokenizer, short_share, like):
    from ropecli.evaluation.completions import Endpoint
    from ropecli.evaluation.readers.endpoint import EndpointReader

    checkpoint = build("llama", head_dim=32, max_position_embeddings=1024)
    copies = like == "llama"
    task = Recall(
        uneven(241, 260, *[250] * 4 * (not copies)),
        [270 if copies else 700],
        700 if not copies else 270,
        tokenizer=tokenizer if copies else None,
    )
    assert task.passages == (1 if copies else 4)
    expected = score_samples(task, LiveReader(loaded(checkpoint)))
    model = loaded(checkpoint)

    def logits(ids):
        with torch.inference_mode():
            return model(torch.tensor([ids])).logits[0]

    with CompletionsServer(logits, like=like, most=1024, tokenizer=tokenizer).running() as server:
        reader = EndpointReader(Endpoint(server.url), tokenizer, batch_size=3)
        values = score_samples(task, reader)
    for sample, losses in expected.items():
        assert values[sample] == pytest.approx(losses, abs=1e-2)


def test_a_greedy_copy_counts_up_to_its_first_wrong_character(uneven, tokenizer):
    documents = uneven(300, 300)
    task = Recall(documents, [256], 256, tokenizer=tokenizer)

    class Copies:
        def generate(self, prompts, limit, done):
            half = documents.kept[0].ids[1:][(149 + 1 - 80) // 2 + 16 :][:32].tolist()
            assert limit == 64
            assert not any(done(0, half[:count]) for count in range(1, 33))
            assert done(0, [*half, 1, 2])
            return [[*half, 1, 2], [], [5]]

    [half], [nothing], [wrong] = task.score(Copies(), [(256, "far", 0), (256, "far", 1), (256, "far", 2)])
    passage = tokenizer.decode(documents.kept[0].ids[1:][(149 + 1 - 80) // 2 + 16 :][:64])
    copied = len(tokenizer.decode(documents.kept[0].ids[1:][(149 + 1 - 80) // 2 + 16 :][:32]))
    assert half == pytest.approx(64 * (1 - copied / len(passage)))
    assert (nothing, wrong) == (64, 64)


@pytest.mark.parametrize(
    ("tokens", "lengths", "message"),
    [
        ((300, 300), [175, 256], "shortest length is 175 tokens. recall needs at least 176"),
        ((300, 300), [512], "a length within the pretraining length of the first checkpoint, 256 tokens"),
        ((300,), [256], "needs two documents or more"),
    ],
)
def test_what_gives_no_recall_is_refused(uneven, tokens, lengths, message):
    with pytest.raises(DataError, match=message):
        Recall(uneven(*tokens), lengths, 256)


@pytest.fixture
def recall(ropecli):
    options = ["--protocol", "recall", "--data", "demo", "--max-documents", 6, "--batch-size", 4]
    return lambda name, *others: ropecli(name, *others, *options)


def test_the_demo_is_damaged_beyond_its_length_and_the_patch_reads_on(recall, ropecli, tmp_path):
    path = tmp_path / "report.json"
    options = ["demo", "--method", "yarn", "--factor", 8, "--baseline", "demo", "--lengths", "256,512"]
    outcome = recall("eval-ppl", *options, "--output", path)
    base, patched = json.loads(path.read_text())["reports"]
    near, far = patched["rows"]
    assert "1: as good as a near copy at 256 tokens in demo. 0:" in outcome.succeeds().printed
    assert [(row["length"], row["value"]) for row in base["rows"]] == [(256, 1)]
    assert patched["reads_to"] == 512
    assert 0.3 < far["low"] < far["value"] < near["high"]
    ropecli("report", path, "--output", tmp_path / "page.html").succeeds()
    assert "Recall 1: as good as a near copy at 256 tokens in demo. 0:" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["compare", "demo", "{llama}", "--methods", "as-is"], "has another tokenizer than demo"),
        (["eval-ppl", "demo", "--lengths", "512,1024"], "a length within the pretraining length"),
        (["eval-ppl", "demo", "--max-tokens", 100], "--max-tokens is 100; a document needs 240 tokens."),
        (
            ["eval-ppl", "demo", "--protocol", "tail", "--generate"],
            "--generate applies only to --protocol recall, not to 'tail'",
        ),
    ],
)
def test_wrong_input_has_one_message(ropecli, checkpoint, options, message):
    name, *others = (str(option).format(llama=checkpoint) for option in options)
    defaults = [] if "--protocol" in others else ["--protocol", "recall"]
    ropecli(name, *others, *defaults, "--data", "demo", "--max-documents", 3).is_refused(message)
