"""ropecli extend: the right extension of the demo, chosen by far reading within the cost, written and proved."""

import errno
import json
import re
import shutil
from unittest.mock import Mock

import numpy as np
import pytest
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

import ropecli
from ropecli import resume
from ropecli.checkpoint.opening import open_checkpoint
from ropecli.data.sources import demo_held_out
from ropecli.evaluation import driver
from ropecli.evaluation.progress import Speed
from ropecli.evaluation.report import Cell, Change
from ropecli.extension import choice, training
from ropecli.extension.choice import Extension, Measured, halved, make_candidates
from ropecli.extension.training import TwoLosses
from ropecli.reporting import page
from ropecli.reporting.lines import sets_of
from ropecli.reporting.report_files import read_reports
from ropecli.training import finetuning

FEW = ["--length", 512, "--max-documents", 4]
TRAIN = ["--factors", 4, "--train", 4, "--data"]


@pytest.fixture
def extend(ropecli, tmp_path, monkeypatch):
    """With one method and two factors."""
    monkeypatch.setattr(choice, "scaling_methods", lambda: ("yarn",))
    monkeypatch.setattr(choice, "HEADROOM", (1.0, 2.0))
    return lambda *options, checkpoint="demo": ropecli("extend", checkpoint, *FEW, "-o", tmp_path / "out", *options)


def test_the_choice_has_headroom_and_is_written_proved_and_exported(extend, tmp_path):
    outcome = extend("--serve", "vllm").succeeds()
    out, result = tmp_path / "out", json.loads((tmp_path / "out" / "extend.json").read_text())
    assert "Candidates that vllm runs: yarn ×4, yarn ×2." in outcome.err
    first = outcome.out.splitlines()[0]
    assert re.fullmatch(r"Chosen: yarn ×4\. Recall at 512 tokens 0.* cost \+.*% \(.*\) of perplexity at 256\.", first)
    assert "of the scored tokens follow four tokens that stood last more than 256 tokens back" in outcome.out
    assert f"Wrote {out}, proved." in outcome.out
    assert f"vllm serve {out}" in outcome.out
    config = AutoConfig.from_pretrained(out)
    assert config.rope_parameters["factor"] == 4
    assert config.max_position_embeddings == 512
    assert {row["label"]: row["documents"] for row in result["measured"]} == {"yarn ×4": 4, "yarn ×2": 4}
    kinds = [(report["kind"], report["method"], report["factor"]) for report in result["reports"]]
    assert kinds[0] == ("recall", "none", 1.0)
    assert ("recall", "yarn", 4.0) in kinds
    _, cost, text = [report for report in result["reports"] if report["factor"] == 4]
    assert cost["rows"][0]["change"]["low"] < cost["rows"][0]["change"]["high"]
    assert (text["task"], result["copies"]["classes"][2]["name"]) == ("tail", "far")
    recalls = [report for report in read_reports([out / "extend.json"]) if report.kind == "recall"]
    assert [len(lines) for lines in sets_of(recalls)] == [2]
    page = (out / "extend.html").read_text()
    for part in ("Chosen: yarn ×4.", "yarn ×2", f"vllm serve {out}", "recall 1: as good as a copy nearby"):
        assert part in page
    assert ".partial" not in page + (out / "extend.json").read_text()
    assert not (tmp_path / "out.state").exists()


def test_without_a_candidate_within_the_cost_nothing_is_written_and_more_cost_needs_no_more_measuring(
    extend, tmp_path, monkeypatch
):
    (tmp_path / "out").mkdir()
    outcome = extend("--max-short-cost", 0)
    assert outcome.code == 3
    assert "at a cost of 0% or less: nothing is written." in outcome.out
    assert "for yarn ×4; nothing is measured again:" in outcome.out
    assert "ropecli extend demo --length 512 --data YOUR_TEXTS --train 1h --output TRAINED" in outcome.out
    assert {*tmp_path.rglob("*.*")} >= {tmp_path / "out.state"}
    assert not list((tmp_path / "out").iterdir())
    more = re.search(r"--max-short-cost \d+ --resume", outcome.out)[0].split()
    monkeypatch.setattr(driver, "score_samples", None)
    assert "Chosen: yarn ×4." in extend(*more).succeeds().out


@pytest.mark.parametrize("stop", ["after the rename", "a full disk"])
def test_stopped_while_it_writes_it_resumes_and_measures_nothing_again(extend, tmp_path, monkeypatch, stop):
    full = OSError(errno.ENOSPC, "No space left on device", str(tmp_path / ".out.partial" / "extend.html"))
    error, (module, name) = (
        (full, (page, "render_page")) if stop == "a full disk" else (KeyboardInterrupt(), (resume, "remove_state"))
    )
    with monkeypatch.context() as patch:
        patch.setattr(module, name, Mock(side_effect=error))
        outcome = extend()
    assert (tmp_path / "out").exists() == (stop == "after the rename")
    if stop == "a full disk":
        outcome.is_refused(f"No space left for {tmp_path / 'extend.html'}. Free some space")
    else:
        assert outcome.code == 130
    monkeypatch.setattr(driver, "score_samples", None)
    assert "Chosen: yarn ×4." in extend("--resume").succeeds().out
    assert {"config.json", "extend.json", "extend.html"} <= {path.name for path in (tmp_path / "out").iterdir()}
    assert not (tmp_path / "out.state").exists()


@pytest.mark.parametrize(
    ("losses", "costs", "keep", "left"),
    [
        ([1, 3, 5], [1, 1, 1], 3, [0]),  # the others are certainly worse
        ([1, 3, 5], [9, 1, 1], 3, [1, 0]),  # but not than one that costs too much, which is shown
        ([1, 3, 5], [3, 1, 1], 3, [1, 0]),  # or probably too much
        ([1, 3, 3.01], [3, 1, 1], 1, [1, 0]),  # nor do they have to be among the better half with it
        ([1, 3, 5], [9, 9, 9], 3, [0]),
    ],
)
def test_what_costs_too_much_takes_no_place(losses, costs, keep, left):
    cells = [Cell("far", 512, tuple(8 * loss + part / 99 for part in range(8)), (8.0,) * 8) for loss in losses]
    changes = [Change(cost / 100, cost / 100 - 0.02, cost / 100 + 0.02) for cost in costs]
    measured = [Measured(None, far, cost, cost) for far, cost in zip(cells, changes, strict=True)]
    assert halved(measured, keep, 0.02) == [measured[number] for number in left]


def test_a_checkpoint_that_reads_the_length_is_a_candidate_and_stays(extend, ropecli, tmp_path, monkeypatch):
    folder = tmp_path / "y4"
    ropecli("patch", "demo", "--method", "yarn", "--factor", 4, "--target-length", 512, "-o", folder).succeeds()
    outcome = extend("--json", checkpoint=folder).succeeds()
    assert f"{folder} reads 512 tokens as it is." in outcome.err
    result = json.loads(outcome.out)
    assert (result["chosen"], result["output"]) == ("yarn ×4", None)
    assert result["candidates"] == ["yarn ×4", "yarn ×2"]
    assert (result["reports"][0]["method"], result["reports"][0]["in_memory"]) == ("none", True)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["extend.html", "extend.json"]
    shutil.rmtree(tmp_path / "out")
    score, read = driver.score_samples, []
    monkeypatch.setattr(driver, "score_samples", lambda *a, **k: read.append(a[3]) or score(*a, **k))
    outcome = ropecli("extend", "demo", "--length", 256, "--max-documents", 4, "-o", tmp_path / "out").succeeds()
    assert outcome.out.startswith("Chosen: as it is. Recall at 256 tokens ")
    assert "no checkpoint is written" in outcome.out
    assert read == ["base, recall", "base, short"]  # the base is not measured again as a candidate


def test_a_base_that_does_not_copy_is_refused_and_leaves_nothing(extend, tmp_path):
    damaged = shutil.copytree(open_checkpoint("demo").folder, tmp_path / "damaged")
    weights = load_file(damaged / "model.safetensors")
    weights = {name: weight * ("o_proj" not in name) for name, weight in weights.items()}
    save_file(weights, damaged / "model.safetensors", {"format": "pt"})
    extend(checkpoint=damaged).is_refused("the first checkpoint must copy text within its pretraining length")
    assert list(tmp_path.iterdir()) == [damaged]


def test_a_dry_run_names_candidates_and_time_and_an_interrupted_run_resumes_from_python(extend, tmp_path, monkeypatch):
    (tmp_path / "short").mkdir()
    for number, name in enumerate("abcd"):  # 241 tokens
        (tmp_path / "short" / name).with_suffix(".txt").write_text(f"{name} = {number}\n" * 60)
    dry = extend("--dry-run", "--json", "--data", tmp_path / "short").succeeds()
    assert "estimating the time from 128 tokens" in dry.err
    assert "Measuring takes some" in dry.err
    assert "The cost is measured at 128 tokens: too few documents have 256." in dry.err
    assert json.loads(dry.out)["short_length"] == 128
    assert "Candidates: yarn ×4, yarn ×2. Measuring takes some" in extend("--dry-run", "-q").succeeds().out
    shutil.rmtree(tmp_path / "short")
    extend("--output", "/proc/x").is_refused("/proc/x could not be written")
    assert list(tmp_path.iterdir()) == []
    score, read = driver.score_samples, []

    def interrupted(task, reader, store, part, *shown):
        if len(read) == 4:
            raise KeyboardInterrupt
        read.append(part)
        return score(task, reader, store, part, *shown)

    monkeypatch.setattr(driver, "score_samples", interrupted)
    assert extend().code == 130
    monkeypatch.setattr(driver, "score_samples", score)
    extend().is_refused("--resume")
    result = ropecli.extend("demo", length=512, max_documents=4, output=tmp_path / "out", resume=True)
    assert result.choice.chosen.subject.label == "yarn ×4"
    assert result.output == tmp_path / "out"
    assert result.export is None


def test_a_budget_keeps_what_fits_or_names_the_least_time(ropecli, tmp_path, monkeypatch):
    """A pass takes a millisecond per token."""
    speed = Speed()
    speed.add(512, 1000, 1)
    speed.add(256, 1000, 1)
    monkeypatch.setattr(Extension, "_speeds", lambda search: [speed] * len(search.candidates))
    command = ("extend", "demo", "--length", 512, "--max-documents", 8, "-o", tmp_path / "out")
    whole = ropecli(*command, "--dry-run", "--json").json()
    kept = [
        ropecli(*command, "--dry-run", "--json", "--budget", f"{share * whole['estimated_seconds']:.2f}s").json()
        for share in (1.01, 0.7, 0.3)
    ]
    labels = [result["candidates"] for result in kept]
    assert labels[0] == whole["candidates"]
    for fewer in labels[1:]:
        assert labels[0][: len(fewer)] == fewer != labels[0]
    outcome = ropecli(*command, "--budget", "1s")
    outcome.is_refused("--budget is 1 s; one candidate on 2 documents takes ")
    least = re.search(r"--budget (\d+s)\.", outcome.err)[1]
    outcome = ropecli(*command, "--dry-run", "--budget", least).succeeds()
    assert "there is time for 2 documents and yarn ×4" in outcome.err
    assert not list(tmp_path.iterdir())


def test_methods_and_factors_narrow_the_candidates_by_hand(ropecli):
    command = ("extend", "demo", "--length", 512, "--max-documents", 4, "--dry-run", "--json")
    result = ropecli(*command, "--methods", "linear,yarn", "--factors", "2,5").json()
    assert result["candidates"] == ["linear ×2", "linear ×5", "yarn ×2", "yarn ×5"]
    ropecli(*command, "--methods", "rerope").is_refused("Nothing that transformers runs extends demo to 512 tokens")


def test_candidates_are_what_the_engine_runs(build, llama):
    labels = {
        engine: [subject.label for subject in make_candidates(open_checkpoint(llama), 256, engine)]
        for engine in ("transformers", "vllm", "ropecli", "mlx", "llama.cpp")
    }
    assert {"yarn ×4", "yarn ×6", "yarn ×8", "ntk ×4", "llama3 ×4"} <= {*labels["transformers"]}
    assert "linear ×4" not in labels["transformers"]  # needs training
    assert not {label for label in labels["vllm"] if "rerope" in label}
    assert {"rerope ×4", "dual-chunk ×4"} <= {*labels["ropecli"]}
    sliding = make_candidates(open_checkpoint(build("gemma3_text")), 256, "vllm")
    assert all("full_attention" in subject.plan.positions.ropes for subject in sliding)
    assert [subject.plan for subject in make_candidates(open_checkpoint(llama), 64, "vllm")] == [None]


@pytest.fixture
def texts(tmp_path, monkeypatch):
    """Five held-out files of the demo, of which four are measured on. A step has one sequence, and is scored."""
    monkeypatch.setattr(training, "_STEP_TOKENS", 512)
    monkeypatch.setattr(training, "_STEPS_PER_SCORING", 1)
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, text in [*demo_held_out()][:5]:
        (folder / name.replace("/", "-")).write_text(text)
    return folder


def metrics_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_train_scores_by_the_losses_of_the_choice_keeps_the_best_step_and_resumes_to_the_same_bits(
    extend, texts, tmp_path, contents, monkeypatch
):
    monkeypatch.setattr(finetuning, "emulates_bfloat16", lambda: True)
    outcome = extend(*TRAIN, texts, "--serve", "vllm").succeeds()
    out, result = tmp_path / "out", json.loads((tmp_path / "out" / "extend.json").read_text())
    for part in (
        "Then it trains all parameters for 4 steps of 1 × 512 tokens",
        "80.0% of the documents are measured on",
    ):
        assert part in outcome.err
    assert outcome.out.startswith("Trained: yarn ×4, all parameters, 4 steps of 1 × 512 tokens; step ")
    assert f"Wrote {out}, proved." in outcome.out
    assert f"vllm serve {out}" in outcome.out
    assert yaml.safe_load((out / "run.yaml").read_text())["recipe"]["mixed_precision"] == "none"  # as planned
    scored = {line["step"]: line for line in metrics_of(out) if "far_nll" in line}
    assert sorted(scored) == [0, 1, 2, 3, 4]
    [patched] = result["measured"]
    assert scored[0]["far_nll"] == pytest.approx(patched["far_nll"], rel=1e-5)
    assert scored[0]["cost"] == pytest.approx(patched["cost"]["change"], abs=1e-5)
    kept = min((line["far_nll"], step) for step, line in scored.items() if step)[1]
    assert result["training"]["kept_step"] == kept
    nearest = min(scored, key=lambda step: abs(scored[step]["far_nll"] - result["trained"]["far_nll"]))
    assert nearest == kept  # the written weights, rounded to the checkpoint's dtype
    recalls = [(report["checkpoint"], report["factor"]) for report in result["reports"] if report["kind"] == "recall"]
    assert recalls == [("demo", 1.0), ("demo", 4.0), (str(out), 4.0)]
    assert AutoConfig.from_pretrained(out).max_position_embeddings == 512
    page = (out / "extend.html").read_text()
    for part in ("Trained: yarn ×4", "yarn ×4, trained", f"vllm serve {out}"):
        assert part in page
    assert not (tmp_path / "out.state").exists()
    assert "is already finished." in extend(*TRAIN, texts, "--resume").succeeds().err

    expected = contents(shutil.move(out, tmp_path / "expected"))
    words, passed = TwoLosses.words, []

    def stopped(*arguments):
        if len(passed) == 2:
            raise KeyboardInterrupt
        passed.append(arguments)
        return words(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(TwoLosses, "words", stopped)
        assert extend(*TRAIN, texts).code == 130
    extend(*TRAIN, texts).is_refused("belongs to a run that was interrupted", "--resume")
    assert "Trained: yarn ×4" in extend(*TRAIN, texts, "--resume").succeeds().out
    written = contents(out)
    for file in ("model.safetensors", "config.json"):
        assert written[file] == expected[file]


def test_nothing_left_to_train_on_is_refused_before_anything_is_measured(extend, texts, tmp_path, monkeypatch):
    monkeypatch.setattr(driver, "score_samples", None)
    next(texts.iterdir()).unlink()
    extend(*TRAIN, texts).is_refused("Of 4 documents, 4 are measured on.")
    extend("--train", "soon").is_refused("--train is 'soon'; expected a time such as 90s, 20m or 2h.")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_two_processes_train_what_one_trains(start_ropecli, texts, tmp_path):
    command = ("extend", "demo", *FEW, "--methods", "yarn", "--factors", 4, "--train", 2, "--data", texts, "--output")
    for count in (1, 2):
        process = start_ropecli([*map(str, command), str(tmp_path / str(count))], processes=count)
        _, err = process.communicate()
        assert process.returncode == 0, err[-4000:]
    one, two = (
        [[line["far_nll"], line["cost"]] for line in metrics_of(tmp_path / count) if "far_nll" in line]
        for count in ("1", "2")
    )
    assert len(two) == 2  # before the first step and after the last
    np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-4)
    assert (tmp_path / "2" / "extend.json").exists()


@pytest.mark.parametrize(
    ("far", "costs", "best", "ended"),
    [
        ([3, 2, 1], [0.1, 0.1, 0.1], 2, False),
        ([1, 2, 3], [0.0, 0.0, 0.0], 1, False),  # step 0 is not trained
        ([9, 1, 2, 2, 2], [0.0, 0.1, 0.1, 0.1, 0.1], 1, True),
        ([9, 1, 2, 2, 2], [0.0, 0.3, 0.1, 0.1, 0.1], 2, False),  # beyond the cost
        ([9, 1, 2, 3], [0.0, 0.5, 0.4, 0.3], 3, False),  # all beyond it
    ],
)
def test_the_best_step_within_the_cost_is_kept_and_training_ends_three_scorings_later(far, costs, best, ended):
    remembered = []
    losses = TwoLosses(None, [], [], 0.0, 0.2, 100.0, remembered.append)
    assert [losses.due(step) for step in (0, 1, 10)] == [True, False, False]  # before the steps are known
    for step, (nll, cost) in enumerate(zip(far, costs, strict=True)):
        losses.follow({"step": step, "far_nll": nll, "cost": cost})
    assert (losses.best, losses.ended) == (best, ended)
    assert losses.affordable(0.5) == 200
    assert losses.affordable(99) == 3
    losses._took = 5.0
    assert losses.affordable(10.0) == 9  # and two scorings
    assert remembered == [200, 3, 9]
