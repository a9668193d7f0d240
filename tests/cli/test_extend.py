"""ropecli extend: the right extension of the demo, chosen by far reading within the cost, written and proved."""

import json
import re
import shutil

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

import ropecli
from ropecli.checkpoint.opening import open_checkpoint
from ropecli.evaluation import driver
from ropecli.evaluation.report import Cell, Change
from ropecli.tuning import extension
from ropecli.tuning.extension import Measured, best_of, make_candidates

FEW = ["--length", 512, "--max-documents", 4]


@pytest.fixture
def extend(ropecli, tmp_path, monkeypatch):
    """With one method and two factors."""
    monkeypatch.setattr(extension, "scaling_methods", lambda: ("yarn",))
    monkeypatch.setattr(extension, "HEADROOM", (1.0, 2.0))
    return lambda *options, checkpoint="demo": ropecli("extend", checkpoint, *FEW, "-o", tmp_path / "out", *options)


def test_the_choice_has_headroom_and_is_written_proved_and_exported(extend, tmp_path):
    outcome = extend("--max-short-cost", 50, "--serve", "vllm").succeeds()
    out, result = tmp_path / "out", json.loads((tmp_path / "out" / "extend.json").read_text())
    assert "Candidates that vllm runs: yarn ×2, yarn ×4." in outcome.err
    assert f"Chosen: yarn ×4. Wrote {out}, proved." in outcome.out
    assert f"vllm serve {out}" in outcome.out
    config = AutoConfig.from_pretrained(out)
    assert config.rope_parameters["factor"] == 4
    assert config.max_position_embeddings == 512
    assert {row["label"]: row["documents"] for row in result["measured"]} == {"yarn ×4": 4, "yarn ×2": 4}
    kinds = [(report["kind"], report["method"], report["factor"]) for report in result["reports"]]
    assert kinds[0] == ("recall", "none", 1.0)
    assert ("recall", "yarn", 4.0) in kinds
    assert ("perplexity", "yarn", 4.0) in kinds
    assert "far" in (out / "extend.html").read_text()
    assert not (tmp_path / "out.state").exists()


def test_without_a_candidate_within_the_cost_nothing_is_written_and_more_cost_needs_no_more_measuring(
    extend, tmp_path, monkeypatch
):
    outcome = extend("--max-short-cost", 0)
    assert outcome.code == 3
    assert "at a cost of 0% or less: nothing is written. Allow " in outcome.out
    assert "% for yarn ×4 (--max-short-cost " in outcome.out
    assert "ropecli patch demo --method yarn --factor 4 --target-length 512 --output DIR" in outcome.out
    assert list(tmp_path.iterdir()) == [tmp_path / "out.state"]
    more = re.search(r"--max-short-cost \d+ --resume", outcome.out)[0].split()
    monkeypatch.setattr(driver, "score_samples", None)
    assert "Chosen: yarn ×4." in extend(*more).succeeds().out


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
    assert best_of(measured, keep, 0.02) == [measured[number] for number in left]


def test_a_checkpoint_that_reads_the_length_is_a_candidate_and_stays(extend, ropecli, tmp_path):
    folder = tmp_path / "y4"
    ropecli("patch", "demo", "--method", "yarn", "--factor", 4, "--target-length", 512, "-o", folder).succeeds()
    outcome = extend("--max-short-cost", 50, "--json", checkpoint=folder).succeeds()
    assert f"{folder} reads 512 tokens as it is." in outcome.err
    result = json.loads(outcome.out)
    assert (result["chosen"], result["output"]) == ("yarn ×4", None)
    assert result["candidates"] == ["yarn ×4", "yarn ×2"]
    assert (result["reports"][0]["method"], result["reports"][0]["in_memory"]) == ("none", True)
    assert not (tmp_path / "out").exists()


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
    assert "Measuring takes some" in dry.err
    assert "The cost is measured at 128 tokens: too few documents have 256." in dry.err
    assert json.loads(dry.out)["short_length"] == 128
    shutil.rmtree(tmp_path / "short")
    extend("--budget", "0.1s").is_refused("--budget is 0.1s; a round on 4 documents takes some")
    assert list(tmp_path.iterdir()) == []
    score, read = driver.score_samples, []

    def interrupted(task, reader, store, part, *shown):
        if len(read) == 4:
            raise KeyboardInterrupt
        read.append(part)
        return score(task, reader, store, part, *shown)

    monkeypatch.setattr(driver, "score_samples", interrupted)
    assert extend("--max-short-cost", 50).code == 130
    monkeypatch.setattr(driver, "score_samples", score)
    extend("--max-short-cost", 50).is_refused("--resume")
    result = ropecli.extend(
        "demo", length=512, max_documents=4, max_short_cost=50, output=tmp_path / "out", resume=True
    )
    assert result.choice.chosen.subject.label == "yarn ×4"
    assert result.output == tmp_path / "out"
    assert result.export is None


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
