# ruff: noqa: E501
"""Mutation testing: inserts small faults one by one and checks that the tests of that part fail.

    python scripts/faults.py                    all faults
    python scripts/faults.py scaling/yarn card  faults in files whose path, or code, contains one of the words
    python scripts/faults.py --check            only checks that every fault still applies
    python scripts/faults.py --quick            runs only the tests that import the changed module
    python scripts/faults.py --jobs 2           two faults at a time

Each fault is a piece of code that occurs exactly once in ropecli/, and its replacement. It is applied to a copy of the
repository, never to the working tree. The test files of that part run until one test fails, those that import the
changed module first; that test must pass without the fault. Exit status 1 if a fault survives, that is, if no test
fails, or one that fails anyway, or if it no longer applies: then the code has changed, and the piece must be updated here.
"""

import argparse
import ast
import builtins
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
# Tests to run in addition to tests/PART, for a file ropecli/PART/...
ALSO = {
    "attention": ["tests/cli"],
    "checkpoint": ["tests/config", "tests/live", "tests/cli"],
    "config": ["tests/checkpoint", "tests/live", "tests/cli"],
    "data": ["tests/cli/test_extend.py", "tests/cli/test_hub.py"],
    "evaluation": ["tests/reporting", "tests/cli"],
    "live": ["tests/attention", "tests/checkpoint", "tests/evaluation", "tests/cli"],
    "training": ["tests/cli"],
    "remapping": ["tests/attention", "tests/cli"],
    "reporting": ["tests/cli"],
    "extension": ["tests/cli"],
    "atomic.py": ["tests/cli", "tests/training"],
    "resume.py": ["tests/test_resume.py", "tests/training"],
    "signature.py": ["tests/cli"],
    "rope.py": ["tests/scaling", "tests/remapping"],
}
FAULTS: list[tuple[str, str]] = [
    # scaling
    ("return 0.1 * mscale * math.log(s) + 1.0", "return 0.1 * mscale * math.log(s + 1) + 1.0"),
    ("low, high = math.floor(low), math.ceil(high)", "low, high = math.ceil(low), math.floor(high)"),
    ("min(high, rope.rotary_dim - 1)", "min(high, rope.rotary_dim // 2 - 1)"),
    ("(interpolated / s + (1 - interpolated))", "((1 - interpolated) / s + interpolated)"),
    ("yarn_attention_factor(s, mscale) / yarn_attention_factor(s, mscale_all_dim)", "yarn_attention_factor(s, mscale)"),
    ("(2 * (rope.pairs - rope.still_pairs - 1))", "(2 * (rope.pairs - rope.still_pairs))"),
    ("base * (kept + (1 - kept) / s)", "base * ((1 - kept) + kept / s)"),
    ("math.sqrt(1 + math.log(s) / math.log(original_length))", "math.sqrt(1 + math.log(s)) / math.log(original_length)"),
    ("long_factor if length > original_length else short_factor", "long_factor if length >= original_length else short_factor"),
    ("now = max(1.0, length / rope.original_max_position_embeddings)", "now = max(s, 1.0)"),
    ("inv_freq[int(p * rope.rotary_dim // 2) :] = 0.0", "inv_freq[int(p * rope.rotary_dim // 2) + 1 :] = 0.0"),
    ("2 * math.pi / np.round(2 * math.pi / inv_freq[rotating])", "2 * math.pi / np.floor(2 * math.pi / inv_freq[rotating])"),
    ("np.linspace(0, math.pi, clipped_pairs)", "np.linspace(0, math.pi, clipped_pairs + 1)[1:]"),
    ("rope.powers() * rope.original_max_position_embeddings < 2 * math.pi", "rope.powers() * rope.original_max_position_embeddings < math.pi"),
    ("attention_factor *= scaled.attention_factor", "attention_factor = scaled.attention_factor"),
    ("theta = math.nan if rope_type is None else rope.rope_theta", "theta = rope.rope_theta"),
    ("factor = math.sqrt(self.factor) if part.uses_factor else 1.0", "factor = self.factor if part.uses_factor else 1.0"),
    ("np.maximum(1.0, form(n + 1.0, pretrained))", "np.maximum(1.0, form(n + 2.0, pretrained))"),
    # remapping
    ("near_and_far(shift, lambda n: n - shift + local_window, lambda m: m)", "near_and_far(shift, lambda n: n - shift, lambda m: m)"),
    ("trained = ropes[label].scaled_length if frequency else _trained_length(settings, rope)", "trained = _trained_length(settings, rope)"),
    ("Branch(lambda n: np.maximum(n - window + 1, 0), lambda n: n + 1)\n    far", "Branch(lambda n: np.maximum(n - window, 0), lambda n: n + 1)\n    far"),
    ("near_and_far(window, lambda n: np.full_like(n, window), np.zeros_like)", "near_and_far(window, lambda n: np.full_like(n, window - 1), np.zeros_like)"),
    ("window + (n - window) / slope, lambda m: m / slope", "(n - window) / slope, lambda m: m / slope"),
    ("shift = window - window // group", "shift = window // group"),
    ("np.minimum(n % stride + stride, chunk)", "np.minimum(n % stride, chunk)"),
    ("last = sinks + window - 1", "last = sinks + window"),
    ("(x * cos - y * sin, y * cos + x * sin)", "(x * cos + y * sin, y * cos - x * sin)"),
    ("query.flatten(1, 2) * self.scaling", "query.flatten(1, 2)"),
    # evaluate
    ('ids = _with_prefix(special.prefix, document.ids[longest - length : longest])', 'ids = _with_prefix(special.prefix, document.ids[:length])'),
    ('yield Window(document.ids[:length], length - special.first_scored, length)', 'yield Window(document.ids[:length], length - special.first_scored - 1, length)'),
    ("ids[start:stop]) if start else ids[:stop], stop - scored, stop)", "ids[start:stop]) if start else ids[:stop], stop - start - 1, stop)"),
    ("parts.append(logits.logsumexp(-1) - chosen)", "parts.append(logits.logsumexp(-1) - chosen.max())"),
    ("return math.fsum(self.sums) / math.fsum(self.weights)", "return math.fsum(x / y for x, y in zip(self.sums, self.weights) if y) / len(self.sums)"),
    ("float(sums.sum()) / math.log(2) / sum(text)", "float(sums.sum()) / sum(text)"),
    ("np.quantile(_resampled_means(sums, weights), (0.025, 0.975))", "np.quantile(_resampled_means(sums, weights), (0.05, 0.95))"),
    ("np.array(cell.sums) - np.array(base.sums)", "np.array(base.sums) - np.array(cell.sums)"),
    ("compared = read[-1] if read and self.task in SAME_TOKENS else length", "compared = length"),
    ('loss_difference(base.arm("far", length), self.arm("far", length), ', 'loss_difference(self.arm("far", length), base.arm("far", length), '),
    (
        'self.reference.recall(self.arm("far", length))',
        'loss_difference(self.arm("absent", length), self.arm("far", length), self.reference.gains)',
    ),
    ("[begin, *passages, end]", "[*passages, begin, end]"),
    # passages of a pass, copies in the text
    ("for place in np.argsort(order)", "for place in order"),
    ('shared["passes"] = tuple(pass_of[numbers[0]] for numbers in documents.values())', "pass"),
    ("together = size > 0 and others == size and self._differ(numbers)", "together = size > 0"),
    ("repeats & (tokens - last >= reference)", "repeats & (tokens - last > reference)"),
    ("repeats = (last >= 0) & (last >= starts[tokens])", "repeats = last >= 0"),
    ("(ids[np.maximum(last, 0) + context] != ids[tokens])", "(ids[np.maximum(last, 0) + context] == ids[tokens])"),
    ("            lengths = [length]\n        return self if lengths in", "            pass\n        return self if lengths in"),
    ("if (first == end).all():", "if len(runs):"),
    ("if note.values and value not in note.values:", "if note.values and value is None:"),
    ("cache = outputs.past_key_values\n            yield start", "cache = None\n            yield start"),
    ("range(self.stride, length - self.tokens, self.stride)", "range(self.stride, length - self.first, self.stride)"),
    ("int((wrong >= value).sum()) < right", "int((wrong > value).sum()) < right"),
    # data
    ("text[ahead], text[ahead + 1], positions", "text[ahead], text[ahead], positions"),
    ("trained[begin] = False", "pass"),
    ("at = bisect_left(rooms, size)", "at = min(bisect_left(rooms, size) + 1, len(rooms))"),
    ("shares[by_remainder[: free - shares.sum()]] += 1", "shares[by_remainder[: free - shares.sum() - 1]] += 1"),
    ("(lengths >= long_from) | (chances < keep_short)", "(lengths >= long_from) | (chances > keep_short)"),
    ("draw.integers(bias, context_length - length, endpoint=True)", "draw.integers(0, context_length - length, endpoint=True)"),
    # finetune
    ("clamp(max=math.log(self._cap)).exp()", "exp()"),
    ("short[:, chunk] - losses.detach()", "short[:, chunk] - losses"),
    ("scale = launch.world * len(current) / weight", "scale = launch.world / weight"),
    ("labels[: len(of_token) - 1] = of_token[1:]", "labels[: len(of_token)] = of_token"),
    ("np.add.at(labels, self._documents(sequence)[scored], 1)", "np.add.at(labels, self._documents(sequence), 1)"),
    ("warm = min(1.0, (step + 1) / (recipe.warmup_steps + 1))", "warm = min(1.0, step / (recipe.warmup_steps + 1))"),
    ("(snapshot / name).stat().st_size != size", "False"),
    ("step % self.every == 0 or step == self.steps", "step % self.every == 0"),
    ('options["attention_mask"] = torch.ones_like(ids)', "pass"),
    ("changed = [key for key in keys if old.get(key, _ABSENT) != new.get(key, _ABSENT)]", "changed = []"),
    ("length, launch).total <= _USABLE * memory", "length, launch).total <= memory"),
    ("if verdict.verdict == UNCLEAR:\n        rest", "if False:\n        rest"),
    ("exact = all(len(names) == 1 for names in matches) and len(matches) == len(files)", "exact = True"),
    ("4 * largest * processes // launch.world", "4 * largest * processes"),
    # checkpoint
    ('written_length = original if spec.method.rope_type == "dynamic" else target', "written_length = target"),
    ("allowed = _RELATIVE * rope.inv_freq + _RELATIVE_TO_BASE * rope.geometry.inv_freq() + NO_ROTATION", "allowed = rope.inv_freq + NO_ROTATION"),
    ("if abs(attention_factor - expected) > _RELATIVE * expected:", "if False:"),
    ("if not np.array_equal(axes, before):", "if False:"),
    ("before = require_reading(plan.original)", "before = None"),
    ("return self.inv_freq, self.attention_factor if exact else applied", "return self.inv_freq, self.attention_factor"),
    ("require_reading(self.checkpoint.config, model)", "pass"),
    ("positions.tolist(), positions[axes]", "positions.tolist(), positions[0]"),
    ("return AutoModelForMultimodalLM, AutoModelForCausalLM, AutoModelForMaskedLM", "return AutoModelForCausalLM, AutoModelForMultimodalLM, AutoModelForMaskedLM"),
    ("factors = scaled.geometry.powers(scaled.rope_theta) / scaled.inv_freq", "factors = scaled.inv_freq / scaled.geometry.powers()"),
    ("(legacy or new or _dynamic_of_qwen(section))", "(new or legacy or _dynamic_of_qwen(section))"),
    ("set_path(config, change.path, change.before)", "set_path(config, change.path, change.after)"),
    ('return "ntk-by-parts" if rope_type == "yarn" and without_temperature else rope_type', "return rope_type"),
    ("if original_length and original_length > max_positions:", "if False:"),
    ("name not in self.local_layers and not any(word in name for word in _LOCAL_WORDS)", "name not in self.local_layers"),
    # push
    ("return before + after if end else readme", "return readme"),
    ("if not any(_is_of(report, checkpoint) for report in measured):", "if False:"),
    ("if not (existing.private or public):", "if False:"),
    ("if others := sorted(loaded - set(names)):", "if others := []:"),
    ("if QUERY_SCALE in kept:", "if False:"),
    ("        refuse_held_out(source.data)", "        pass"),
    ("excess = 1 - 2 * short / length", "excess = 1 - short / length"),
    ("base = [base if layer == label else old for layer, old in layers]", "base = [base for _ in layers]"),
    # big models and large sources
    ("return replace(self, limit=HUB_DOCUMENTS)", "return self"),
    ("removeprefix(codecs.BOM_UTF8) if number == 1 else line", "strip()"),
    (", allow_nan=False)).encode()", ")).encode()"),
    ("int(self._starts[document] - self._ends[number]) + len(shard.ids)", "int(self._starts[document])"),
    # conversations
    ("return passed % 2 == 1", "return reached % 2 == 1"),
    ("after = text.removesuffix(closing)", "after = text"),
    ("if self._store.masked or stop - start < self.length:", "if stop - start < self.length:"),
    ('part.what != "reasoning"', "True"),
    ("0 if is_free else cursor", "0"),
    ("document.ids[-1:] != end", "False"),
    # joined reports
    ("enough and _are_alike(reports[places[0]], report, common)", "enough"),
    ("reports[place] = reports[place].only(shared, reference)", "pass"),
    # extend
    ('method.training in ("no", "a little")', "True"),
    ("held_out=_begin_as(store, held_out) if held_out else None", "held_out=None"),
    ('max(0.0, line["cost"] - self.most_cost), line["far_nll"]', '0.0, line["far_nll"]'),
    ("return min(trained, key=lambda step: (self._seen[step], step), default=None)", "return max(trained, default=None)"),
    ("sum(step > best for step in self._seen) >= _PATIENCE", "False"),
    ("return cost > most", "return False"),
    ("tokens == store.lengths[conversation] <= length", "store.lengths[conversation] <= length"),
    ("positions >= pretraining_length).sum()", "positions > pretraining_length).sum()"),
    ("self.decoder.forward = hooked", "pass"),
    ('"mps" if torch.backends.mps.is_available() else "cpu"', '"cpu"'),
    ('dtype = "bfloat16" if requested == "auto" else dtype', "pass"),
]  # fmt: skip


TIMEOUT = 1800
"""Seconds of CPU time. A fault that runs longer, such as an endless loop, counts as noticed."""
NO_TEST = 5
"""The exit status of pytest where a file has slow tests alone."""


class Place(NamedTuple):
    file: str
    before: str
    after: str

    def tests(self) -> list[list[str]]:
        """Test files in the order they run: those that import the module, others of this part, others of ALSO."""
        part, module = Path(self.file).parts[1], self.file.removesuffix(".py").replace("/", ".")
        part_files = sorted(ROOT.glob(f"tests/{part}/test_*.py"))
        also = [file for name in ALSO.get(part, []) for file in sorted(ROOT.glob(f"{name}/test_*.py")) or [ROOT / name]]
        importing = [file for file in ROOT.glob("tests/**/test_*.py") if module in file.read_text()]
        stem = Path(self.file).stem
        importing.sort(key=lambda file: (stem not in file.name, file not in part_files, file.stat().st_size))
        groups = importing, *([file for file in files if file not in importing] for files in (part_files, also))
        return [[str(file.relative_to(ROOT)) for file in files] for files in groups if files]


def places() -> list[Place]:
    """The file of each fault. Exits if a piece does not occur exactly once in ropecli/, or its replacement cannot run."""
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in sorted((ROOT / "ropecli").rglob("*.py"))}
    files = {before: [name for name, text in texts.items() for _ in range(text.count(before))] for before, _ in FAULTS}
    if wrong := [f"{before!r} occurs {len(names)} times" for before, names in files.items() if len(names) != 1]:
        sys.exit("\n".join([*wrong, "Expected once in ropecli/. Update scripts/faults.py."]))
    chosen = [Place(files[before][0], before, after) for before, after in FAULTS]
    if wrong := [f"{place.file}: {place.after!r} {why}" for place in chosen if (why := void(place, texts[place.file]))]:
        sys.exit("\n".join([*wrong, "Any test would notice these. Update scripts/faults.py."]))
    return chosen


def void(place: Place, text: str) -> str:
    """The reason that a fault is void: it does not compile, or uses a name that its file lacks; else empty."""
    changed = text.replace(place.before, place.after)
    try:
        compile(changed, place.file, "exec")
    except SyntaxError as error:
        return f"does not compile: {error.msg}"
    before, after = (
        [node for node in ast.walk(ast.parse(each)) if isinstance(node, ast.Name)] for each in (text, changed)
    )
    known = {
        *dir(builtins),
        *(name.id for name in before),
        *(name.id for name in after if isinstance(name.ctx, ast.Store)),
    }
    new = sorted({name.id for name in after} - known)
    return f"uses {', '.join(new)}, which its file has not" if new else ""


class FirstFailure:
    """A pytest plugin."""

    name = ""

    def pytest_runtest_logreport(self, report):
        self.name = self.name or (report.nodeid if report.failed else "")

    pytest_collectreport = pytest_runtest_logreport


def first_failure(folder: Path, groups: list[list[str]]) -> str:
    """The first test that fails in a copy of the repository, or nothing; in a process that has not imported ropecli."""
    name = folder / "first-failure"
    if not (process := os.fork()):
        try:
            import pytest

            resource.setrlimit(resource.RLIMIT_CPU, (TIMEOUT, TIMEOUT))
            os.chdir(folder)
            sys.path[0] = os.environ["PYTHONPATH"] = str(folder)
            failure, options = FirstFailure(), ["-x", "-p", "no:cacheprovider", "-p", "no:terminal"]
            for tests in groups:
                if not failure.name and pytest.main([*options, *tests], plugins=[failure]) not in (0, NO_TEST):
                    failure.name = failure.name or "pytest itself fails"
            name.write_text(failure.name)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    ended = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    if not name.exists():
        return "a signal, such as that of the limit of CPU time" if ended < 0 else ""
    found = name.read_text()
    name.unlink()
    return found


def try_fault(place: Place, files: list[str], quick: bool) -> bool:
    """Print whether a test fails that passes without the fault, and which."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file in files:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, folder / file)
        changed = folder / place.file
        changed.write_text((ROOT / place.file).read_text().replace(place.before, place.after))
        failure = first_failure(folder, place.tests()[: 1 if quick else None])
        shutil.copy(ROOT / place.file, changed)
        anyway = "::" in failure and first_failure(folder, [[failure]])
    word = "FAILS ANYWAY" if anyway else "killed" if failure else "SURVIVED"
    print(f"{word:8} {place.file}: {place.after[:60]!r}  {failure}", flush=True)
    return word == "killed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    chosen = [place for place in places() if any(word in place.file + place.before for word in options.words or [""])]
    if options.check:
        sys.exit(print(f"{len(chosen)} faults apply."))
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    sys.dont_write_bytecode = True
    # imported once; every fault is tried in a fork of this process
    import accelerate, datasets, hypothesis, matplotlib.pyplot, peft, torch, transformers, typer  # noqa: E401, F401, I001

    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [file for file in listed.split("\0") if (ROOT / file).is_file()]
    running: set[int] = set()
    survivors = 0
    for place in [*chosen, *[None] * options.jobs]:
        if running and (place is None or len(running) == options.jobs):
            process, status = os.wait()
            running.remove(process)
            survivors += os.waitstatus_to_exitcode(status) != 0
        if place:
            if not (process := os.fork()):
                killed = False
                try:
                    killed = try_fault(place, files, options.quick)
                finally:
                    os._exit(0 if killed else 1)
            running.add(process)
    print(f"{len(chosen) - survivors} of {len(chosen)} faults killed.")
    sys.exit(1 if survivors else 0)


if __name__ == "__main__":
    main()
