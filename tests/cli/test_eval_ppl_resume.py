"""`ropecli eval-ppl --output`: --resume continues the same request alone; two processes give the very numbers of one.

Kills: tests/test_random_kills.py.
"""

import json

import pytest

PREFIX = ["--lengths", "24,64,128"]


@pytest.fixture
def arguments(llama, corpus):
    def make(*options, checkpoint=llama):
        return ["eval-ppl", str(checkpoint), "--data", str(corpus), "--device", "cpu", *PREFIX, *map(str, options)]

    return make


def without_command(report):
    """What was measured, but for the command."""
    if isinstance(report, dict):
        report = {key: without_command(value) for key, value in report.items() if key != "command"}
    elif isinstance(report, list):
        report = [without_command(value) for value in report]
    return report


@pytest.fixture
def stopped(ropecli, arguments, stopping):
    """stopped(after, ...) -> a run that Ctrl-C ends after `after` documents."""

    def run(after, *options, **others):
        with stopping(after):
            return ropecli(*arguments(*options, **others))

    return run


def test_progress_is_kept_and_another_request_is_refused_by_what_changed(ropecli, arguments, stopped, tmp_path):
    output = tmp_path / "report.json"
    stopped(3, "--output", output, "--dtype", "float32")
    before = (tmp_path / "report.json.state" / "samples-0.jsonl").read_bytes()
    ropecli(*arguments("--output", output)).is_refused("a run that was interrupted")
    for change, line in (
        (["--dtype", "bfloat16"], "dtype: 'float32' then, 'bfloat16' now"),
        (["--method", "linear", "--factor", 2], "jobs.0.scaling: "),
        (["--max-documents", 3], "jobs.0.task.documents: "),
    ):
        ropecli(*arguments("--output", output, "--resume", *change)).is_refused(line)
    assert (tmp_path / "report.json.state" / "samples-0.jsonl").read_bytes() == before


def test_two_processes_give_the_very_numbers_of_one(ropecli, start_ropecli, arguments, stopped, llama, tmp_path):
    """On CPUs by the default --device too; they resume where one was stopped. The first alone speaks."""
    options = ["--baseline", llama, "--method", "linear", "--factor", 4, "--json"]
    output = tmp_path / "report.json"
    stopped(5, *options, "--output", output)
    command = arguments(*options, "--output", output, "--resume")
    command[command.index("--device") + 1] = "auto"
    done = start_ropecli(command, processes=2, CUDA_VISIBLE_DEVICES="")
    out, err = done.communicate()
    assert done.returncode == 0, err
    reports = json.loads(out)["reports"]  # of one process, or it would be no JSON
    assert reports == json.loads(output.read_text())["reports"]
    assert err.count("tokenizer has") == 1  # a warning for the model, not for each process
    alone = ropecli(*arguments(*options)).reports()
    for report in alone:
        assert report["settings"]["processes"] == 1
        report["settings"]["processes"] = 2
    assert without_command(reports) == without_command(alone)
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
