"""scripts/real_model: the corpus that it makes of archives, and its queue."""

import hashlib
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

from real_model_parts import __main__ as queue
from real_model_parts import tables, versions


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


class Words:
    """A tokenizer of words and of runs of white space; two runs that meet are one token."""

    def __init__(self):
        self.known = []

    def __call__(self, text, verbose):
        words = re.findall(r"\s+|\S+", text)
        self.known += dict.fromkeys(word for word in words if word not in self.known)
        return {"input_ids": [self.known.index(word) for word in words]}

    def decode(self, ids, clean_up_tokenization_spaces):
        return "".join(self.known[index] for index in ids)


def lines(name, first, last):
    """A text of four tokens per line."""
    return "".join(f"{name} {number % 100}\n" for number in range(first, last))


def test_file_of_a_package_is_chosen_by_size_similarity_and_digest():
    old = {f"{number}.py": lines(number, 0, 500) for number in range(9)} | {"short.py": "a\n"}
    new = {path: text.replace("7\n", "seven\n") for path, text in old.items()}
    new["copy.py"], new["old.py"] = new["short.py"], old["0.py"]
    fitting = sorted(new.keys() & old.keys() - {"short.py"}, key=lambda path: hashlib.sha256(path.encode()).digest())
    unchanged, rewritten, grown, chosen = fitting[:4]
    new[unchanged] = old[unchanged]
    new[rewritten] = lines("another", 0, 500)
    new[grown] += lines("more", 0, 600)
    tokenizer = Words()
    pair = versions.choose(tokenizer, old, new)
    assert pair.path == chosen
    decoded = [tokenizer.decode(ids, False) for ids in pair[1:]]
    texts = dict.fromkeys(text for _, text in sorted(new.items()) if text not in (old[chosen], new[chosen]))
    assert decoded == [old[chosen], new[chosen], "".join(texts)]


def test_documents_of_versions_have_exact_lengths_and_a_twin_without_the_old_version():
    tokenizer = Words()
    old, new, filler, unrelated = (
        tokenizer(text, False)["input_ids"]
        for text in (lines("a", 0, 500), lines("b", 0, 600), lines("c", 0, 9000), " " + lines("d", 0, 900))
    )
    made = dict(versions.documents(tokenizer, versions.Pair("x.py", old, new, filler), unrelated))
    sizes = {"ceiling": 8192, "12k": 12288, "12k-control": 12288, "16k": 16384, "16k-control": 16384}
    assert {name: len(ids) for name, ids in made.items()} == sizes
    for name, ids in made.items():
        assert tokenizer(tokenizer.decode(ids, False), False)["input_ids"] == ids
        assert ids[-len(new) :] == new
        assert (ids[: len(old)] == old) is not name.endswith("-control")
    for name in ("12k", "16k"):
        assert made[f"{name}-control"][len(old) :] == made[name][len(old) :]
        assert set(made[f"{name}-control"][: len(old)]) <= set(unrelated)
