"""What engines are refused, what each process reads, and the launch configurations that are shipped."""

from contextlib import closing, nullcontext
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml

from ropecli.data.stream import Batch
from ropecli.errors import RecipeError
from ropecli.training.launch import Launch, refuse_engine, refuse_unsuitable, start_launch
from ropecli.training.recipe_schema import make_recipe
from ropecli.training.shared_sequences import share_attention

CONFIGS = Path(__file__).parents[2] / "recipes" / "accelerate"
LENGTH = 48


def recipe_of(**keys):
    return make_recipe(None, {"data": "demo-train", "mixed_precision": "none", **keys})


def engine_of(kind="MULTI_CPU", rank=0, processes=2, own=1, fsdp=None, shared=1):
    """A launch of two or more processes, without starting them. own: Accelerate's sp_size. shared: ours."""
    from accelerate import DistributedType

    accelerator = SimpleNamespace(
        distributed_type=DistributedType(kind),
        process_index=rank,
        num_processes=processes,
        device=torch.device("cpu"),
        parallelism_config=SimpleNamespace(sp_size=own),
        state=SimpleNamespace(fsdp_plugin=fsdp),
    )
    return Launch.of(accelerator, shared)


def sharing(size=2, **options):
    return engine_of(shared=size, **options)


@pytest.fixture
def model_of(build):
    """model_of("qwen2", key=value, ...) -> a live two-layer model."""
    from transformers import AutoModelForCausalLM

    def make(model_type, attention="sdpa", **settings):
        folder = build(model_type, head_dim=32, **settings)
        return AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention)

    return make


def refusal(engine, model, length=LENGTH, **keys) -> str:
    with pytest.raises(RecipeError) as caught:
        refuse_unsuitable(engine, model, recipe_of(**keys), length)
    return str(caught.value)


@pytest.fixture
def batch():
    ids = np.arange(2 * LENGTH).reshape(2, LENGTH)
    return Batch(ids=ids, labels=ids + 1, document_labels=ids + 2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU it runs")
def test_fsdp_on_cpus_is_refused(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(RecipeError, match="needs a GPU"):
        start_launch(recipe_of())


def test_deepspeed_is_refused(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(RecipeError, match="ropecli recipe --path 8-gpu-fsdp2"):
        start_launch(recipe_of())


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (engine_of(own=2), "context_parallel_size in the recipe"),
        (sharing(3, processes=4), "a divisor of the 4 processes"),
        (engine_of("FSDP", fsdp=SimpleNamespace(fsdp_version=1)), "fsdp_version"),
    ],
)
def test_unusable_engines_are_refused(engine, message):
    with pytest.raises(RecipeError, match=message):
        refuse_engine(engine)


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("llama4_text", {"attention_chunk_size": 32}),  # chunks
        ("deepseek_v32", {"index_topk": 8}),  # sparse and latent attention
        ("qwen3_next", {"layer_types": ["linear_attention", "full_attention"]}),
    ],
)
def test_models_that_shared_sequences_would_change_are_refused(model_of, model_type, settings):
    model = model_of(model_type, "eager", **settings)
    assert f"does not support the model type {model_type}" in refusal(sharing(), model)


def test_frequencies_that_follow_the_length_are_refused(model_of):
    engine = sharing()
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = model_of("llama", rope_parameters=scaling)
    assert "depend on the length" in refusal(engine, model, 2 * LENGTH)
    refuse_unsuitable(engine_of(), model, recipe_of(), 2 * LENGTH)  # each process has whole sequences


def test_heads_must_divide_evenly(model_of):
    model = model_of("llama", hidden_size=96, num_attention_heads=6, num_key_value_heads=3)
    refuse_unsuitable(sharing(2), model, recipe_of(), LENGTH)
    assert "6 attention heads" in refusal(sharing(4, processes=4), model)


@pytest.mark.parametrize(
    ("attention", "length", "message"),
    [("eager", LENGTH, "attn: eager"), ("sdpa", 2**14, "a mask of 16384 × 16384"), ("flash_attention_2", 2**16, None)],
)
def test_attention_of_shared_packed_sequences(model_of, attention, length, message):
    keys = {"attn": attention, "sequences": "packed"}
    model = model_of("llama")
    if message:
        assert message in refusal(sharing(), model, length, **keys)
    else:
        refuse_unsuitable(sharing(), model, recipe_of(**keys), length)


def test_optimizers_and_weights_that_cannot_be_sharded_are_refused(model_of):
    model = model_of("llama")
    assert "adamw-8bit" in refusal(engine_of("FSDP"), model, optimizer="adamw-8bit")
    refuse_unsuitable(engine_of(), model, recipe_of(optimizer="adamw-8bit"), LENGTH)
    integers = torch.nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)
    model.register_parameter("in_four_bits", integers)
    assert "FSDP2 cannot shard" in refusal(engine_of("FSDP"), model, adapter="qlora")


def test_processes_that_share_a_sequence_have_the_same_rank():
    shared = [sharing(2, rank=rank, processes=4) for rank in range(4)]
    assert [(one.data_rank, one.data_ranks) for one in shared] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    own = engine_of(rank=3, processes=4)
    assert (own.data_rank, own.data_ranks) == (3, 4)


def test_shared_sequence_has_no_gap_or_overlap(batch, monkeypatch):
    ringmaster = pytest.importorskip("ringmaster")
    monkeypatch.setattr(ringmaster.runtime, "_RUNTIME", ringmaster.CPRuntime(ringmaster.RingmasterConfig(2)))
    early, late = (sharing(rank=rank).take(batch) for rank in range(2))
    assert early.ids.shape == (2, LENGTH // 2)
    for name in ("ids", "labels", "document_labels"):
        both = torch.cat([getattr(early, name), getattr(late, name)], dim=1)
        np.testing.assert_array_equal(both, getattr(batch, name))
    positions = torch.cat([early.positions, late.positions], dim=1)
    np.testing.assert_array_equal(positions, np.tile(np.arange(LENGTH), (2, 1)))


def test_window_that_is_only_in_the_mask_is_refused_in_the_first_pass(model_of):
    """ringmaster drops masks; PhiMoE does not pass its window to its attention."""
    pytest.importorskip("ringmaster")
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        for model_type, refused in (("phimoe", True), ("mistral", False)):
            model = model_of(model_type, sliding_window=16)
            share_attention(model, 2, 1, "cpu")
            with pytest.raises(RecipeError, match="would lose sliding_window") if refused else nullcontext():
                model(torch.ones(1, LENGTH // 2, dtype=torch.long))
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("[0-9]*.yaml")), ids=lambda path: path.stem)
def test_launch_configurations_are_valid_for_accelerate(path):
    """Accelerate's loader refuses unknown keys of the first level; its command line has those below it as options."""
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    config = load_config_from_file(str(path))
    options = {action.dest for action in launch_command_parser()._actions}
    sections = [config.fsdp_config, config.parallelism_config]
    assert {key for section in sections for key in section} <= options
    assert config.mixed_precision == recipe_of(mixed_precision="bf16").mixed_precision
    text = path.read_text(encoding="utf-8")
    assert f'accelerate launch --config_file "$(ropecli recipe --path {path.stem})"' in text
    product = np.prod([size for key, size in config.parallelism_config.items() if key.endswith("_size")])
    assert product in (1, config.num_processes)
    assert yaml.safe_load(text)["num_machines"] == (2 if path.stem == "2-nodes" else 1)


def test_a_step_reads_the_device_at_its_end_however_many_passes_it_has(llama, monkeypatch):
    """Each read of a value waits for a GPU. A step reads loss and gradient norm."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from transformers import AutoModelForCausalLM, masking_utils

    from ropecli.training.loop import make_optimizer, train_steps
    from ropecli.training.loss import NextTokenLoss

    # transformers reads the positions of every pass
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda position_ids: None)

    class Reads(TorchDispatchMode):
        number = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.number += function is torch.ops.aten._local_scalar_dense.default
            return function(*args, **(kwargs or {}))

    def reads(passes):
        recipe = recipe_of(gradient_accumulation=passes, gradient_checkpointing=False)
        launch = start_launch(recipe)
        loss_of = NextTokenLoss(AutoModelForCausalLM.from_pretrained(llama)).train()
        wrapped, optimizer = launch.prepare(loss_of, make_optimizer(loss_of, recipe))
        ids = np.arange(2, 34).reshape(1, 32)
        given = (launch, wrapped, optimizer, lambda step: 1e-3, lambda step: [Batch(ids, ids)] * passes)
        with Reads() as counted, closing(train_steps(*given, max_grad_norm=1.0, seed=0)) as steps:
            assert len([*islice(steps, 3)]) == 3
        return counted.number

    assert reads(passes=4) == reads(passes=1) == 2 * 3
