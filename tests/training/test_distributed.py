"""What engines are refused, what each process reads, and the launch configurations that are shipped."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml

from ropecli.data.stream import Batch
from ropecli.errors import RecipeError
from ropecli.training.distributed import averaged_over, data_ranks, local_batch, make_accelerator
from ropecli.training.recipe import make_recipe
from ropecli.training.refusals import refuse_engine, refuse_unsuitable

CONFIGS = Path(__file__).parents[2] / "recipes" / "accelerate"
LENGTH = 48


def recipe_of(**keys):
    return make_recipe(None, {"data": "demo-train", "mixed_precision": "none", **keys})


def sizes(**given):
    from accelerate import ParallelismConfig

    return ParallelismConfig(**given)


def engine_of(kind="DEEPSPEED", rank=0, processes=2, zero=None, parallelism=None, batch_size=2, fsdp=None):
    """What these functions ask an Accelerator of two or more processes for, without starting them."""
    from accelerate import DistributedType

    plugin = SimpleNamespace(
        zero_stage=(zero or {}).get("stage", 2),
        deepspeed_config={"zero_optimization": zero or {"stage": 2}},
        get_value={"train_micro_batch_size_per_gpu": batch_size}.get,
    )
    return SimpleNamespace(
        distributed_type=DistributedType(kind),
        process_index=rank,
        num_processes=processes,
        device=torch.device("cpu"),
        parallelism_config=parallelism,
        state=SimpleNamespace(deepspeed_plugin=plugin, fsdp_plugin=fsdp),
    )


def ulysses(size=2, **options):
    return engine_of(parallelism=sizes(sp_size=size), **options)


def fsdp(**plugin):
    return engine_of("FSDP", fsdp=SimpleNamespace(**plugin))


def context_parallel(size=2):
    return engine_of("FSDP", parallelism=sizes(cp_size=size))


@pytest.fixture
def model_of(build):
    """model_of("qwen2", key=value, ...) -> a live two-layer model."""
    from transformers import AutoModelForCausalLM

    def make(model_type, attention="sdpa", **settings):
        folder = build(model_type, head_dim=32, **settings)
        return AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention)

    return make


@pytest.fixture
def patched_model(patched_llama):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(patched_llama)


def refusal(accelerator, model, length=LENGTH, **keys) -> str:
    with pytest.raises(RecipeError) as caught:
        refuse_unsuitable(accelerator, model, recipe_of(**keys), length)
    return str(caught.value)


@pytest.fixture
def batch():
    ids = np.arange(2 * LENGTH).reshape(2, LENGTH)
    return Batch(ids=ids, labels=ids + 1, document_labels=ids + 2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU it runs")
def test_what_would_silently_become_plain_data_parallelism_is_refused(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(RecipeError, match="need a GPU"):
        make_accelerator()


@pytest.mark.parametrize(
    ("accelerator", "told"),
    [
        (engine_of("MULTI_GPU", parallelism=sizes(sp_size=2)), "DEEPSPEED"),
        (engine_of("MULTI_CPU", parallelism=sizes(cp_size=2)), "cp_size need a GPU"),
        (fsdp(fsdp_version=1), "fsdp_version"),
    ],
)
def test_engines_that_cannot_be_used_are_refused(accelerator, told):
    with pytest.raises(RecipeError, match=told):
        refuse_engine(accelerator)


def test_a_full_attention_model_is_let_through(patched_model):
    for accelerator in (engine_of("MULTI_CPU"), ulysses(), context_parallel()):
        refuse_unsuitable(accelerator, patched_model, recipe_of(), LENGTH)


@pytest.mark.parametrize(
    ("model_type", "settings", "told"),
    [
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 32}, "sliding_attention"),
        ("qwen3_next", {"layer_types": ["linear_attention", "full_attention"]}, "state along the sequence"),
    ],
)
def test_layers_that_a_shared_sequence_would_change_are_refused(model_of, model_type, settings, told):
    model = model_of(model_type, **settings)
    for accelerator in (ulysses(), context_parallel()):
        assert told in refusal(accelerator, model)


def test_frequencies_that_follow_the_length_are_refused(model_of):
    accelerator = context_parallel()
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = model_of("llama", rope_parameters=scaling)
    assert "depend on the length" in refusal(accelerator, model, 2 * LENGTH)
    refuse_unsuitable(engine_of(), model, recipe_of(), 2 * LENGTH)  # each process has whole sequences


@pytest.mark.parametrize(
    ("heads", "keys", "told"),
    [(3, 3, "3 attention heads"), (6, 3, "6 attention heads and 3 key-value heads"), (4, 1, None)],
)
def test_heads_must_be_shared_evenly(model_of, heads, keys, told):
    model = model_of("llama", hidden_size=96, num_attention_heads=heads, num_key_value_heads=keys)
    if told:
        assert told in refusal(ulysses(), model)
    else:
        refuse_unsuitable(ulysses(), model, recipe_of(), LENGTH)
        refuse_unsuitable(ulysses(4, processes=4), model, recipe_of(), LENGTH)


def test_optimizers_and_weights_that_an_engine_cannot_split_are_refused(patched_model):
    assert "adamw-8bit" in refusal(engine_of("FSDP"), patched_model, optimizer="adamw-8bit")
    refuse_unsuitable(engine_of(), patched_model, recipe_of(optimizer="adamw-8bit"), LENGTH)
    packed = torch.nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)
    patched_model.register_parameter("as_four_bits", packed)
    assert "zero_stage to 2" in refusal(engine_of(zero={"stage": 3}), patched_model, adapter="qlora")


def test_processes_that_share_a_sequence_read_the_same():
    ranks = [data_ranks(ulysses(2, rank=rank, processes=4)) for rank in range(4)]
    assert ranks == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert data_ranks(engine_of(rank=3, processes=4)) == (3, 4)


def test_what_engines_average_over():
    """test_ulysses.py holds these numbers against the real engines."""
    assert averaged_over(engine_of("MULTI_CPU", processes=4)) == 4
    assert averaged_over(ulysses(2, processes=4)) == 2
    assert averaged_over(ulysses(2, processes=4, zero={"stage": 3})) == 4
    assert averaged_over(ulysses(2, processes=4, zero={"stage": 3, "reduce_scatter": False})) == 2


def test_a_sequence_is_shared_without_gap_or_overlap(batch):
    with local_batch(ulysses(rank=0), batch) as early, local_batch(ulysses(rank=1), batch) as late:
        assert early.ids.shape == (2, LENGTH // 2)
        for name in ("ids", "labels", "document_labels"):
            both = torch.cat([getattr(early, name), getattr(late, name)], dim=1)
            np.testing.assert_array_equal(both, getattr(batch, name))
        positions = torch.cat([early.positions, late.positions], dim=1)
        np.testing.assert_array_equal(positions, np.tile(np.arange(LENGTH), (2, 1)))


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_launch_configurations_are_accelerate_s(path):
    """Accelerate's loader refuses unknown keys of the first level; its command line has those below it as options."""
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    config = load_config_from_file(str(path))
    options = {action.dest for action in launch_command_parser()._actions}
    sections = [config.fsdp_config, config.deepspeed_config, config.parallelism_config]
    assert {key for section in sections for key in section} <= options
    assert config.mixed_precision == recipe_of(mixed_precision="bf16").mixed_precision
    text = path.read_text(encoding="utf-8")
    assert f'accelerate launch --config_file "$(ropecli recipe --path {path.stem})"' in text
    product = np.prod([size for key, size in config.parallelism_config.items() if key.endswith("_size")])
    assert product in (1, config.num_processes)
    assert yaml.safe_load(text)["num_machines"] == (2 if path.stem == "2-nodes" else 1)
