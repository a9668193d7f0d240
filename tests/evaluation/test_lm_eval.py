"""The protocol disjoint is lm-evaluation-harness's rolling log-likelihood: the same texts, read by that tool itself.

It runs in an environment of its own, which pytest's cache keeps.
"""

import json
import os
import shlex
import subprocess
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.slow

RELEASE = "0.4.13"
PINNED = [f"lm-eval[hf]=={RELEASE}", "torch==2.13.0", "transformers==5.23.0"]
ROLLING = """
import json, sys
from pathlib import Path
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

job, result = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), []
for case in job["cases"]:
    model = HFLM(pretrained=job["checkpoint"], add_bos_token=False, dtype="float32", device="cpu", **case)
    requests = [
        Instance(request_type="loglikelihood_rolling", doc={}, arguments=(text,), idx=index)
        for index, text in enumerate(job["texts"])
    ]
    result.append(model.loglikelihood_rolling(requests, disable_tqdm=True))
print(json.dumps(result))
"""
ROOT = Path(__file__).parents[2]
DEMO = ROOT / "ropecli" / "demo"
LENGTHS = (64, 256, 300)
CASES = [{"max_length": length, "batch_size": size} for length, size in ((64, 1), (256, 1), (300, 1), (256, 4))]


@pytest.fixture(scope="module")
def python(environment) -> Path:
    return environment("lm_eval", PINNED, "-c", ROOT / "scripts" / "constraints.txt")


@pytest.fixture(scope="module")
def demo_tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(DEMO)


def text_of(tokens, text, tokenizer):
    """A beginning of `text` that has exactly `count` tokens of its own."""
    for characters in range(tokens, len(text)):
        if len(tokenizer(text[:characters], add_special_tokens=False)["input_ids"]) == tokens:
            return text[:characters]
    raise AssertionError(f"no beginning has {tokens} tokens")


@pytest.fixture(scope="module")
def texts(demo_tokenizer):
    """Texts of the demo's held-out files: below 64 tokens, exact multiples of 64, 256 and 300, others."""
    from ropecli.demo import corpus

    files = [text for _, text in sorted(corpus.held_out_files().items()) if len(text) > 20_000]
    wanted = (1, 40, 63, 64, 65, 256, 257, 300, 512, 600, 601, 901)
    return [text_of(tokens, files[index % len(files)], demo_tokenizer) for index, tokens in enumerate(wanted)]


def printed_by(python, statements, *arguments):
    """The JSON of the last line that the statements print in that environment."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    result = subprocess.run([python, "-c", statements, *arguments], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def rolling(python, texts, tmp_path_factory) -> list[np.ndarray]:
    """What lm-eval gives for each of CASES: the total log-likelihood of each text."""
    home = tmp_path_factory.mktemp("lm_eval")
    (home / "job.json").write_text(json.dumps({"checkpoint": str(DEMO), "texts": texts, "cases": CASES}))
    return [np.array(totals) for totals in printed_by(python, ROLLING, home / "job.json")]


@pytest.fixture(scope="module")
def cells(texts, demo_tokenizer, loaded, evaluate):
    """Ours, by length."""
    from ropecli.data.documents import read_documents

    documents = read_documents(((str(index), text) for index, text in enumerate(texts)), demo_tokenizer, 2)
    assert len(documents.kept) == len(texts)
    return {cell.length: cell for cell in evaluate(loaded(DEMO), documents, LENGTHS, "disjoint")}


def test_every_document_has_the_same_log_likelihood(rolling, cells):
    for case, totals in zip(CASES, rolling, strict=True):
        np.testing.assert_allclose(-totals, cells[case["max_length"]].sums, rtol=1e-4)
    assert np.abs(rolling[0] / rolling[1] - 1)[-5:].min() > 1e-3  # else the lengths show nothing


RULER = """
import ast, importlib.util, json, pathlib, sys
home = pathlib.Path(importlib.util.find_spec("lm_eval").origin).parent / "tasks" / "ruler"
found = {}
for name, wanted in (("niah", "TEMPLATE"), ("cwe", "CONFIG"), ("fwe", "CONFIG"), ("vt", "CONFIG")):
    # importing these files reads nltk's data from the network
    for node in ast.parse((home / f"{name}_utils.py").read_text()).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == wanted:
            found[name] = ast.literal_eval(node.value)
from lm_eval.tasks.ruler.common_utils import postprocess_pred, string_match_all
answers = json.loads(sys.argv[1])
found["scores"] = [string_match_all(postprocess_pred([answer]), [references]) for answer, references in answers]
print(json.dumps(found))
"""
ANSWERS = [
    ["The numbers are 1234567 and 7654321.", ["1234567", "7654321", "1111111", "2222222"]],
    ["  ABCDE\x07fghij", ["abcde", "FGHIJ"]],
    ["", ["word"]],
]


def test_rulers_wording_and_scores_are_lm_evals(python):
    from ropecli.evaluation.ruler_tasks import TASKS, score_of

    found = printed_by(python, RULER, json.dumps(ANSWERS))
    assert found["scores"] == pytest.approx([score_of(*answer) for answer in ANSWERS])
    several, one = TASKS["niah_multiquery"].wording, TASKS["niah_single_1"].wording
    theirs = found["niah"].replace("{type_needle_v}", "{values}").replace("{query}", "{asked}")
    assert theirs == f"{several.head}{{context}}{several.tail}"
    singular = theirs.replace("Some", "A").replace("are all", "is").replace("are", "is")
    assert singular == f"{one.head}{{context}}{one.tail}"
    found["vt"] = found["vt"]["variable_tracking"]
    for name in ("cwe", "fwe", "vt"):
        wording = TASKS[name].wording
        # a coded word brings the space before it
        template = found[name]["template"].replace("{query}", "{value}").replace(" {context}", "{context}")
        answer = found[name]["answer_prefix"].replace("{query}", "{value}").replace("{num_v}", "{count}")
        assert template == f"{wording.head}{{context}}{wording.tail}"
        assert answer.rstrip().replace("assgined", "assigned") == wording.answer
    assert {name: found[name]["tokens_to_generate"] for name in ("cwe", "fwe", "vt")} == {
        name: TASKS[name].generated for name in ("cwe", "fwe", "vt")
    }


TASK = """
task: local
dataset_path: json
dataset_kwargs: {data_files: {test: ROWS}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{prompt}}"
doc_to_choice: [" True", " False"]
doc_to_target: 0
target_delimiter: ""
metric_list: [{metric: acc}]
"""


@pytest.mark.parametrize("method", ["yarn", "rerope"])
def test_exported_command_reads_the_patched_checkpoint(python, method, tmp_path, texts, demo_tokenizer):
    """A prompt of nearly the whole context length: lm-eval's log-likelihoods of two answers are ours."""
    import ropecli
    from ropecli.engines.engine_export import export_checkpoint
    from ropecli.evaluation.readers.live import LiveReader

    ropecli.patch("demo", method=method, factor=4, output=tmp_path / "patched")
    prompt = max(texts, key=len)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": prompt}) + "\n")
    (tmp_path / "local.yaml").write_text(TASK.replace("ROWS", str(tmp_path / "rows.jsonl")))
    checkpoint = ropecli.open_checkpoint(str(tmp_path / "patched"))
    exported = export_checkpoint(checkpoint, "lm-eval").command.replace("TASKS", "local")
    words = shlex.split(exported.replace('"max_length"', '"dtype": "float32", "max_length"'))  # the demo is bfloat16
    command = [python, *words[1:]] if words[0] == "python" else [python.with_name("lm_eval"), *words[1:]]
    options = ["--include_path", tmp_path, "--output_path", tmp_path / "out", "--log_samples", "--device", "cpu"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    run = subprocess.run([*command, *options], capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert run.returncode == 0, run.stderr[-3000:]
    (samples,) = (tmp_path / "out").rglob("samples_local_*.jsonl")
    found = [float(answer[0][0]) for answer in json.loads(samples.read_text().splitlines()[0])["resps"]]
    ids = np.array(demo_tokenizer(prompt)["input_ids"])
    answers = [demo_tokenizer(text, add_special_tokens=False)["input_ids"] for text in (" True", " False")]
    reader = LiveReader(ropecli.load_model(checkpoint, dtype="float32"))
    reader.prepare(ids, len(ids) + 4, answers=True)
    (expected,) = reader.log_probabilities([(ids, answers)])
    assert len(ids) > 256
    np.testing.assert_allclose(found, expected, atol=1e-3)
