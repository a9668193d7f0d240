"""scripts/real_model: the corpus that it makes of archives, and its queue."""

import hashlib
import io
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

from real_model_parts import __main__ as queue
from real_model_parts import make, tables


def sdist(files: dict[str, str]) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"top-1.0/{name}")
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
    return content.getvalue()


def wheel(files: dict[str, str]) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return content.getvalue()


def test_corpus_joins_files_without_duplicates_and_is_made_once(tmp_path, monkeypatch, capsys):
    archives = {
        "one-1.0.tar.gz": sdist(
            {"docs/b.rst": "second é", "docs/a.rst": "first", "docs/in/c.rst": "third", "x.py": "no"}
        ),
        "two-1.0-py3-none-any.whl": wheel({"two/copy.py": "first", "two/new.py": "new"}),
    }
    patterns = {
        "one-1.0.tar.gz": ("held-out", {"all.md": "docs/*.rst"}),
        "two-1.0-py3-none-any.whl": ("training", {"{folder}.py": "two/*.py"}),
    }
    listed = [
        make.Source(split, name, hashlib.sha256(archives[name]).hexdigest(), documents)
        for name, (split, documents) in patterns.items()
    ]
    monkeypatch.setattr(make, "sources", lambda: listed)
    (tmp_path / "downloads").mkdir()
    for name, content in archives.items():
        (tmp_path / "downloads" / name).write_bytes(content)
    make.make(tmp_path)
    texts = {str(path.relative_to(tmp_path)): path.read_text("utf-8") for path in tmp_path.glob("*/*.[mp]*")}
    assert texts == {"held-out/all.md": "first\n\nsecond é\n\nthird", "training/two-two.py": "new"}
    (tmp_path / "downloads" / "one-1.0.tar.gz").write_bytes(b"damaged")
    make.make(tmp_path)
    (tmp_path / "made.json").unlink()
    with pytest.raises(SystemExit, match=r"is not that of sources\.txt"):
        make.make(tmp_path)


def test_queue_runs_what_has_no_report_and_resumes(tmp_path, monkeypatch, capsys):
    started = []
    monkeypatch.setattr(queue, "make", lambda folder: None)
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
