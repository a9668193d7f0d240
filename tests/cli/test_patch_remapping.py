"""`ropecli patch --method rerope`, and what every command makes of the folder; one message for each that is off."""

import pytest

from ropecli.config.saved_remapping import KEY

PROVED = "Proved: on a small model of this architecture, the attention computes what transformers' own does."


def words(text):
    return " ".join(text.split())


def is_one_message(outcome, *expected):
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.count("error:") == 1
    assert "Traceback" not in outcome.err
    for part in expected:
        assert part in words(outcome.err)


@pytest.fixture
def rerope(llama, patched):
    return patched(llama, "rerope")


@pytest.fixture
def patched(ropecli, tmp_path):
    def patch(folder, method, *options):
        output = tmp_path / f"patched-{method}-{len(list(tmp_path.iterdir()))}"
        outcome = ropecli("patch", folder, "--method", method, "--factor", 4, "--output", output, *options)
        assert outcome.code == 0, outcome.err
        return output

    return patch


def test_it_says_what_it_proved_and_what_the_reader_needs(ropecli, llama, tmp_path):
    outcome = ropecli("patch", llama, "--method", "rerope", "--factor", 4, "-o", tmp_path / "out")
    assert outcome.code == 0
    assert "rerope ×4, 256 tokens" in outcome.out
    assert "Proved: in stock transformers, 1 rotary table matches" in outcome.out
    assert PROVED in outcome.out.splitlines()  # however narrow the terminal is
    assert "after `import ropecli.attention`" in words(outcome.err)
    assert outcome.err.count("warning:") == 1


def test_without_the_proof_of_the_tables_the_attention_is_proved_all_the_same(ropecli, build, llama, tmp_path):
    options = ["--method", "rerope", "--factor", 4, "-o", tmp_path / "out", "--no-verify"]
    refused = ropecli("patch", build("smollm3", no_rope_layers=[1, 0]), *options)
    is_one_message(refused, "do not rotate by the rotary")
    assert "warning" not in refused.err
    assert list(tmp_path.iterdir()) == []
    outcome = ropecli("patch", llama, *options)
    assert "Not proved (--no-verify)" in outcome.out
    assert PROVED in outcome.out.splitlines()


def test_a_model_all_of_whose_layers_slide_is_refused_before_anything_is_said(ropecli, build, tmp_path):
    folder = build("mistral", head_dim=32, sliding_window=20)
    outcome = ropecli("patch", folder, "--method", "rerope", "--factor", 4, "-o", tmp_path / "out")
    is_one_message(outcome, "sliding_window is 20 in all layers")
    assert "warning" not in outcome.err


def test_patched_again_and_taken_back(ropecli, llama, edited, patched, rerope, tmp_path):
    again = patched(rerope, "yarn")
    assert (again / "config.json").read_bytes() == (patched(llama, "yarn") / "config.json").read_bytes()
    assert ropecli("patch", patched(again, "rerope"), "--revert", "-o", tmp_path / "back").code == 0
    assert (tmp_path / "back" / "config.json").read_bytes() == (llama / "config.json").read_bytes()


def test_inspect_shows_the_method_with_all_its_parameters(ropecli, rerope):
    outcome = ropecli("inspect", rerope)
    assert outcome.code == 0
    rows = [[cell.strip() for cell in line.split("│")[1:3]] for line in outcome.out.splitlines() if "│" in line]
    assert ["method", "rerope"] in rows
    assert ["parameters", "window 32"] in rows
    assert ["factor", "4"] in rows
    assert "No problems found" in outcome.out


def test_no_engine_is_told_of_plain_attention_in_its_place(ropecli, rerope):
    for engine in ("vllm", "sglang", "llama.cpp"):
        is_one_message(ropecli("export", rerope, "--engine", engine), "uses rerope, which no engine supports")


WRONG = {
    "the name is missing": ({"attn_implementation": ...}, f"{KEY} but no attn_implementation"),
    "the block is missing": ({KEY: ...}, f"attn_implementation but no {KEY}"),
    "a method that is not known": ({"attn_implementation": "ropecli:foo"}, "expected one of ropecli:dual-chunk"),
    "transformers reads another key": ({"_attn_implementation": "sdpa"}, "Remove _attn_implementation"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_saved_remapping_that_is_off_is_one_message_wherever_it_is_read(
    wrong, ropecli, rerope, edited, corpus, tmp_path
):
    change, expected = WRONG[wrong]
    folder = edited(rerope, **change)
    (folder / "ropecli.yaml").unlink()
    data, before = ["--data", corpus], sorted(tmp_path.iterdir())
    for command in (
        ["inspect", folder],
        ["patch", folder, "--method", "yarn", "--factor", 4, "-o", tmp_path / "out"],
        ["compare", folder, *data, "-l", "64", "--methods", "as-is,none"],
        ["finetune", folder, *data, "--length", 128, "--steps", 1, "-o", tmp_path / "out", "--dry-run"],
    ):
        is_one_message(ropecli(*command), expected)
    assert sorted(tmp_path.iterdir()) == before


def test_another_attention_is_refused_with_the_way_out(ropecli, llama, rerope, corpus):
    attn = ["--data", corpus, "--attn", "eager"]
    for folder, options in (
        (rerope, ["eval-ppl", "-l", "64"]),
        (rerope, ["needle", "-l", "64"]),
        (llama, ["eval-ppl", "-l", "64", "--baseline", rerope]),
        (llama, ["compare", "-l", "64", "--methods", "none,rerope"]),
    ):
        outcome = ropecli(options[0], folder, *options[1:], *attn)
        is_one_message(outcome, "--attn eager would replace", "rerope", "Remove --attn.")
