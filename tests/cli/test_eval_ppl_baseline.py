"""`ropecli eval-ppl --baseline`: a second checkpoint on the same tokens, and what the first costs and gains."""

import json
import shutil

import numpy as np
import pytest
from outcomes import is_one_message


def losses(report):
    return [cell["sums"] for cell in report["cells"]]


def test_both_are_what_each_is_alone(measured, llama, yarn):
    options = ["--protocol", "sliding", "--max-tokens", 200]
    both = measured("--baseline", llama, *options, checkpoint=yarn)
    own, base = measured(*options, checkpoint=yarn), measured(*options)
    assert losses(both) == losses(own)
    assert losses(both["baseline"]) == losses(base)
    assert losses(own) != losses(base)
    for key in ("checkpoint", "digest", "method", "factor", "task", "fingerprint", "document_names", "kind"):
        assert both[key] == own[key], key
        assert both["baseline"][key] == base[key], key
    assert both["fingerprint"] == both["baseline"]["fingerprint"]
    assert (both["method"], both["baseline"]["method"]) == ("yarn", "none")
    assert (both["baseline"]["baseline"], both["baseline"]["headlines"]) == (None, [])


@pytest.mark.parametrize(("protocol", "against"), [("prefix", 128), ("tail", 64)])
def test_the_headlines_by_hand(measured, llama, yarn, protocol, against):
    """The window is the baseline's: 64 tokens."""
    report = measured("--baseline", llama, "--protocol", protocol, checkpoint=yarn)
    ours, theirs = (
        {row["length"]: (row, cell["sums"]) for row, cell in zip(one["rows"], one["cells"], strict=True)}
        for one in (report, report["baseline"])
    )
    gain = "long-context gain" if protocol == "tail" else "change beyond the pretraining length"
    expected = [("short-context cost", 64, 64), (gain, 128, against)]
    assert [(one["name"], one["length"], one["baseline_length"]) for one in report["headlines"]] == expected
    for (_, length, base_length), found in zip(expected, report["headlines"], strict=True):
        (row, sums), (base, base_sums) = ours[length], theirs[base_length]
        assert found["change"]["change"] == pytest.approx(row["ppl"] / base["ppl"] - 1, rel=1e-9)
        difference = np.array(sums) - base_sums
        means = np.array(np.meshgrid(*[difference] * 4)).reshape(4, -1).sum(axis=0) / row["tokens"]
        centre, wider = means.mean(), (4 / 3) ** 0.5 * 3.1824 / 1.96  # Student's t of four documents
        low, high = np.expm1(centre + wider * (np.quantile(means, (0.025, 0.975)) - centre))
        assert abs(found["change"]["low"] - low) < 0.1 * (high - low)
        assert abs(found["change"]["high"] - high) < 0.1 * (high - low)


def test_one_model_is_in_memory_at_a_time(measured, llama, monkeypatch):
    import gc
    import weakref

    from ropecli.evaluation import subject

    load, models = subject.load_model, []

    def watched(*arguments, **options):
        gc.collect()
        assert not any(model() is not None for model in models)
        models.append(weakref.ref(model := load(*arguments, **options)))
        return model

    monkeypatch.setattr(subject, "load_model", watched)
    measured("--baseline", llama)
    assert len(models) == 2


def test_another_vocabulary_is_refused_before_any_model_is_loaded(
    evaluate, llama, tokenizer, corpus, tmp_path, monkeypatch
):
    from ropecli.evaluation import subject

    other = shutil.copytree(llama, tmp_path / "other")
    value = json.loads((other / "tokenizer.json").read_text())
    vocabulary = value["model"]["vocab"]
    used = tokenizer((corpus / "text00.txt").read_text())["input_ids"][:20]
    first, second = tokenizer.convert_ids_to_tokens(sorted(set(used))[:2])
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(value))
    monkeypatch.setattr(subject, "load_model", lambda *arguments, **options: pytest.fail("the model was loaded"))
    outcome = evaluate("--baseline", other)
    is_one_message(outcome, "another vocabulary", "bits per byte")


def test_a_baseline_whose_loss_is_not_finite_leaves_the_other_its_report(measured, evaluate, llama, tmp_path):
    from safetensors.torch import load_file, save_file

    broken = shutil.copytree(llama, tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"].mul_(float("nan"))
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    report = measured("--baseline", broken)
    assert (report["baseline"], report["headlines"]) == (None, [])
    assert [row["ppl"] for row in report["rows"]] == [row["ppl"] for row in measured()["rows"]]
    assert f"{broken} was not measured: The loss is not finite" in " ".join(evaluate("--baseline", broken).err.split())
