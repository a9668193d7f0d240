"""The state of an interrupted run: of the same request alone, never a user's folder."""

import pytest

from ropecli.errors import OutputError, RecipeError
from ropecli.resume import (
    append_record,
    open_state,
    read_records,
    refuse_interrupted,
    refuse_other_request,
    remove_state,
)

REQUEST = {"lengths": [24, 64], "recipe": {"steps": 6, "mixture": [{"data": "a"}, {"data": "b"}]}, "baseline": None}


@pytest.fixture
def output(tmp_path):
    return tmp_path / "report.json"


@pytest.fixture
def records(tmp_path):
    path = tmp_path / "lines.jsonl"
    for number in range(4):
        append_record(path, {"number": number})
    return path


def test_what_follows_a_line_that_was_cut_short_is_whole(records):
    records.write_bytes(records.read_bytes()[:-5])
    append_record(records, "next")
    assert read_records(records) == [{"number": 0}, {"number": 1}, {"number": 2}, "next"]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"lengths": [24]}, "lengths: [24, 64] then, [24] now"),
        ({"recipe": {**REQUEST["recipe"], "steps": 7}}, "recipe.steps: 6 then, 7 now"),
        ({"recipe": {"steps": 6, "mixture": [{"data": "a"}]}}, "recipe.mixture.1.data: 'b' then, absent now"),
        ({"more": 1}, "more: absent then, 1 now"),
    ],
    ids=["list", "nested", "fewer", "new"],
)
def test_another_request_is_refused_by_the_keys_that_differ(output, change, line):
    with pytest.raises(RecipeError) as caught:
        refuse_other_request(REQUEST, REQUEST | change, output)
    assert str(caught.value).splitlines()[1:] == [f"  {line}"]


def interrupted(output, request=REQUEST):
    with open_state(output, request) as folder:
        append_record(folder / "samples-0.jsonl", 1)
    return folder


def test_a_state_is_resumed_by_its_own_request_alone(output, tmp_path):
    folder = interrupted(output)
    assert folder == tmp_path / "report.json.state"
    with pytest.raises(OutputError, match="a run that was interrupted"):
        refuse_interrupted(output, resume=False)
    with pytest.raises(RecipeError, match="baseline: None then, 1 now"), open_state(output, REQUEST | {"baseline": 1}):
        pass
    with (
        open_state(output, REQUEST),
        open_state(output, REQUEST, rank=1),
        pytest.raises(OutputError, match="in use by another run"),
        open_state(output, REQUEST),
    ):
        pass
    assert read_records(folder / "samples-0.jsonl") == [1]
    remove_state(output)
    refuse_interrupted(output, resume=True)
    with open_state(output, REQUEST):  # saves nothing
        pass
    assert list(tmp_path.iterdir()) == []


def a_user_s_folder(folder):
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")


def a_damaged_request(folder):
    interrupted(folder.with_suffix(""))
    request = folder / "request"
    request.write_bytes(request.read_bytes()[:-5])


@pytest.mark.parametrize("make", [a_user_s_folder, a_damaged_request])
def test_what_is_no_state_is_refused_and_left_alone(output, tmp_path, make):
    make(tmp_path / "report.json.state")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(OutputError, match="to start over"), open_state(output, REQUEST):
        pass
    remove_state(output)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_what_a_kill_leaves_before_the_request_is_no_state(output, tmp_path):
    folder = tmp_path / "report.json.state"
    folder.mkdir()
    (folder / ".lock-0").touch()
    (folder / ".5f3a.partial").touch()
    refuse_interrupted(output, resume=False)
    assert interrupted(output) == folder
    with pytest.raises(OutputError, match="a run that was interrupted"):
        refuse_interrupted(output, resume=False)
