"""Short runs of tiny models, in this process, in float32, so that numbers can be compared exactly."""

import json
import signal
import time
from pathlib import Path

import pytest

KEYS = {
    "length": 48,
    "steps": 6,
    "batch_size": 2,
    "gradient_accumulation": 2,
    "learning_rate": 1e-3,
    "warmup_steps": 2,
    "save_every": 2,
    "mixed_precision": "none",
    "gradient_checkpointing": False,
    "tracker": "none",
}


@pytest.fixture(scope="session")
def patched_llama(tmp_path_factory, llama, chat_template) -> Path:
    """The tiny Llama patched with yarn ×2, with a chat template."""
    from ropecli.attention.patching import patch_to
    from ropecli.checkpoint.opening import open_checkpoint
    from ropecli.checkpoint.patch_plan import make_plan
    from ropecli.scaling.spec import make_spec

    output = tmp_path_factory.mktemp("patched") / "yarn"
    patch_to(make_plan(open_checkpoint(llama), make_spec("yarn", 2.0)), output)
    (output / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
    return output


@pytest.fixture(scope="session")
def text_and_chat(corpus, chat):
    """The recipe key for as many sequences of text as of conversations."""
    return [{"data": str(corpus)}, {"data": str(chat), "sequences": "packed", "overlong": "cut"}]


@pytest.fixture(scope="session")
def tune_into(corpus):
    """tune_into(checkpoint, output, resume=..., on_step=..., key=value, ...) -> output, when the run is done."""
    from ropecli.checkpoint.opening import open_checkpoint
    from ropecli.training.finetuning import Listener, run_stages
    from ropecli.training.recipe_schema import make_recipe
    from ropecli.training.stages import plan_stages

    def run(checkpoint: Path, output: Path, *, resume=False, on_step=lambda progress: None, **keys):
        data = {} if "mixture" in keys else {"data": str(corpus)}
        recipe = make_recipe(None, {**data, **KEYS, **keys})
        stages = plan_stages(open_checkpoint(checkpoint), recipe)
        run_stages(stages, output, resume=resume, listener=Listener(on_step=on_step))
        return output

    return run


@pytest.fixture
def tune(tune_into, tmp_path):
    """tune(checkpoint, ...): the same into the folder `run`."""
    return lambda checkpoint, output=tmp_path / "run", **options: tune_into(checkpoint, output, **options)


@pytest.fixture(scope="session")
def command_line(corpus):
    """command_line(checkpoint, output, key=value, ...) -> the arguments of `ropecli finetune` for the same run."""

    def arguments(checkpoint: Path, output: Path, **keys):
        settings = {**KEYS, **keys}
        options = [part for key, value in settings.items() for part in ("--set", f"{key}={json.dumps(value)}")]
        data = [] if "mixture" in keys else ["--data", str(corpus)]
        return ["finetune", str(checkpoint), *data, "--output", str(output), *options]

    return arguments


@pytest.fixture(scope="session")
def metrics():
    """metrics(run) -> the lines of its metrics.jsonl, as they stand."""
    return lambda run: [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="session")
def weights_of():
    """weights_of(folder) -> the bytes of its weights."""
    return lambda folder: (folder / "model.safetensors").read_bytes()


@pytest.fixture(scope="session")
def uninterrupted(patched_llama, tmp_path_factory, tune_into):
    """The run that every interrupted one must equal."""
    return tune_into(patched_llama, tmp_path_factory.mktemp("runs") / "uninterrupted")


@pytest.fixture
def stop_and_resume(command_line, patched_llama, tmp_path):
    """stop_and_resume(start, key=value, ...) -> the folder of a run, stopped by SIGTERM and then resumed.

    start: takes the arguments of `ropecli`, gives the process of what launches them.
    """

    def call(start, **keys):
        run = tmp_path / "run"
        arguments = command_line(patched_llama, run, **keys)
        process = start(arguments)
        log = run / "metrics.jsonl"
        while process.poll() is None and not (log.exists() and log.read_text()):
            time.sleep(0.005)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate()
        assert process.returncode != 0
        assert "Saved after step" in err
        assert not (run / "config.json").exists()
        process = start([*arguments, "--resume"])
        _, err = process.communicate()
        assert process.returncode == 0, err[-4000:]
        assert "Resuming after step" in err
        return run

    return call
