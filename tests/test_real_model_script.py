"""scripts/real_model: its queue, and the page that is made of its reports."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

from real_model_parts import __main__ as queue
from real_model_parts import tables


def test_queue_runs_what_has_no_report_and_resumes(tmp_path, monkeypatch, capsys):
    started = []
    monkeypatch.setattr(queue, "make", lambda folder: None)
    monkeypatch.setattr(queue, "make_versions", lambda folder: None)
    monkeypatch.setattr(queue, "run", lambda name, step: started.append(name))
    monkeypatch.setattr(queue, "WORK", tmp_path)
    monkeypatch.setattr(sys, "argv", ["real_model"])
    done = next(iter(queue.STEPS))
    (tmp_path / "reports").mkdir()
    queue.STEPS[done].output(done).write_text("{}")
    queue.main()
    assert started == [name for name in queue.STEPS if name != done]
    assert "hours" in capsys.readouterr().out


def test_every_row_of_the_page_is_made_from_a_report(capsys):
    folder = Path(queue.__file__).parent
    tables.main(folder / "reports")
    printed = capsys.readouterr().out.splitlines()
    rows = [line for line in (folder / "README.md").read_text("utf-8").splitlines() if line.startswith("| ")]
    assert rows
    assert [row for row in rows if row not in printed] == []
