"""ropecli plot of a checkpoint: every kind that is computed, as a picture and in the terminal, and what it refuses."""

import pytest

from ropecli.report.study import DEFAULT_METHODS, STUDY_KINDS


@pytest.mark.parametrize("kind", STUDY_KINDS)
@pytest.mark.parametrize("name", ["plot.png", "plot.svg"])
def test_a_picture_of_every_kind(ropecli, llama, tmp_path, kind, name):
    result = ropecli("plot", llama, "--kind", kind, "-o", tmp_path / name)
    assert result.code == 0
    assert result.out == f"plot: {tmp_path / name}\n"
    if name.endswith("svg"):
        text = (tmp_path / name).read_text()
        assert all(f"{method} ×4" in text for method in DEFAULT_METHODS[kind])


@pytest.mark.parametrize("kind", STUDY_KINDS)
def test_the_terminal_alone_without_an_output(ropecli, llama, tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    result = ropecli("plot", llama, "--kind", kind, "--method", "yarn,linear", "--factor", "8")
    assert (result.code, result.err) == (0, "")
    assert "yarn ×8" in result.out
    assert "linear ×8" in result.out
    assert not list(tmp_path.iterdir())


def test_the_terminal_beside_a_picture(ropecli, llama, tmp_path):
    alone = ropecli("plot", llama, "--kind", "frequencies", "-m", "yarn")
    both = ropecli("plot", llama, "--kind", "frequencies", "-m", "yarn", "-o", tmp_path / "plot.png", "--terminal")
    assert both.out == f"{alone.out}plot: {tmp_path / 'plot.png'}\n"


def test_parameters_of_several_methods(ropecli, llama):
    plain = ropecli("plot", llama, "-k", "frequencies", "-m", "yarn,abf", "--set", "abf.beta=50")
    other = ropecli("plot", llama, "-k", "frequencies", "-m", "yarn,abf", "--set", "abf.beta=500")
    assert plain.code == other.code == 0
    assert plain.out != other.out


def test_a_default_method_that_does_not_suit_the_geometry_is_left_out_and_said(ropecli, edited, llama):
    folder = edited(llama, max_position_embeddings=1)  # in which no pair turns as often as yarn asks
    result = ropecli("plot", folder, "--kind", "wavelengths")
    assert result.code == 0
    assert "yarn is left out" in result.err
    assert "linear ×4" in result.out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--kind", "wavelength"], "Did you mean 'wavelengths'"),
        (["--kind", "decay", "--metric", "ppl"], "axes of its own"),
        (["--kind", "decay", "--set", "beta_fast=8"], "none was given"),
        (["--kind", "helix", "--method", "yarm"], "Did you mean 'yarn'"),
        (["--kind", "helix", "--method", "abf"], "takes either rope_theta"),
        (["--kind", "tradeoff", "--factor", "0.5"], "from 1 to 1000000"),
        (["--method", "yarn"], "--method: for plots of a checkpoint"),
        ([], "is no report"),
        (["--kind", "decay", "--output", "plot.docx"], "no ending that can be drawn"),
    ],
)
def test_what_cannot_be_drawn_is_said_in_one_message(ropecli, llama, tmp_path, monkeypatch, arguments, expected):
    monkeypatch.chdir(tmp_path)
    result = ropecli("plot", llama, *arguments)
    assert (result.code, result.out) == (2, "")
    assert expected in result.err
    assert "Traceback" not in result.err
    assert not list(tmp_path.iterdir())


def test_two_checkpoints_are_one_too_many(ropecli, llama):
    assert "give one" in ropecli("plot", llama, llama, "--kind", "decay").err
