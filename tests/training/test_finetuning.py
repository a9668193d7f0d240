"""A run does what a loop written by hand does, on long, packed and mixed data; and it refuses what it cannot do."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from ropecli.checkpoint.opening import open_checkpoint
from ropecli.data.sequences import UNSCORED
from ropecli.data.stream import open_stream
from ropecli.errors import NotFiniteError
from ropecli.live.loading import load_tokenizer
from ropecli.training import finetuning
from ropecli.training.adapters import attach
from ropecli.training.recipe_schema import make_recipe


@pytest.fixture(scope="module")
def by_hand(patched_llama, corpus, tokenizer):
    """by_hand(steps, ...) -> (losses, gradient norms, weights) of a plain loop: whole logits, a sequence at a time.

    lora: train x·Aᵀ·Bᵀ·α/r beside each projection of the attention, in float64.
    """
    from transformers import AutoModelForCausalLM

    def add_lora(model, rank=8, alpha=16):
        first = AutoModelForCausalLM.from_pretrained(patched_llama, dtype=torch.float32)
        started = dict(attach(first, make_recipe(None, {"data": "demo-train", "adapter": "lora"})).named_parameters())
        model.requires_grad_(False)
        merges = []
        for name, module in model.named_modules():
            if name.endswith(("q_proj", "k_proj", "v_proj", "o_proj")):
                a = started[f"{name}.lora_A.default.weight"].detach().double().requires_grad_()
                b = torch.zeros(module.out_features, rank, dtype=torch.float64, requires_grad=True)
                module.register_forward_hook(
                    lambda module, x, y, a=a, b=b: y + x[0] @ a.T @ b.T * (alpha / rank), always_call=True
                )
                merges.append((module.weight, a, b, alpha / rank))
        return merges

    def train(steps, batch, rate, weight_decay, max_grad_norm, lora=False):
        dtype = torch.float64 if lora else torch.float32
        model = AutoModelForCausalLM.from_pretrained(patched_llama, dtype=dtype).train()
        merges = add_lora(model) if lora else []
        decayed = [value for name, value in model.named_parameters() if "norm" not in name and value.requires_grad]
        decayed += [part for _, a, b, _ in merges for part in (a, b)]
        others = [value for name, value in model.named_parameters() if "norm" in name and value.requires_grad]
        groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95))
        stream = open_stream(make_recipe(None, {"data": str(corpus)}), tokenizer, 48, 48)
        losses, norms = [], []
        for step in range(steps):
            optimizer.zero_grad()
            rows = torch.from_numpy(stream.batch(range(step * batch, (step + 1) * batch)).ids)
            parts = []
            for row in rows[:, None]:
                logits = model(input_ids=row).logits[0, :-1]
                parts.append(cross_entropy(logits, row[0, 1:]) / batch)
                parts[-1].backward()
            norms.append(torch.nn.utils.clip_grad_norm_([*decayed, *others], max_grad_norm).item())
            optimizer.step()
            losses.append(sum(part.item() for part in parts))
        with torch.no_grad():
            for weight, a, b, scale in merges:
                weight += scale * b @ a
        return losses, norms, model.float().state_dict()

    return train


@pytest.mark.parametrize(
    ("batch_size", "checkpointing", "adapter", "precision", "within"),
    [
        (1, True, "none", "none", (1e-4, 1e-3, 0.02)),
        (2, False, "none", "none", (1e-4, 1e-3, 0.02)),
        (2, False, "lora", "none", (1e-6, 1e-5, 1e-4)),
        (2, False, "none", "bf16", (5e-3, 0.02, 0.3)),  # its rounding is 2⁻⁸
    ],
)
def test_run_equals_a_loop_written_by_hand(
    by_hand, tune, patched_llama, metrics, batch_size, checkpointing, adapter, precision, within
):
    """within: relative differences of losses, of gradient norms, and of what each weight moved."""
    from safetensors.torch import load_file

    settings = {"weight_decay": 0.1, "max_grad_norm": 0.5, "warmup_steps": 0, "learning_rate": 3e-3, "steps": 4}
    batches = {"batch_size": batch_size, "gradient_accumulation": 4 // batch_size}
    kind = {"gradient_checkpointing": checkpointing, "adapter": adapter, "mixed_precision": precision}
    run = tune(patched_llama, **kind, **settings, **batches)
    losses, norms, expected = by_hand(4, 4, 3e-3, weight_decay=0.1, max_grad_norm=0.5, lora=adapter == "lora")
    # AdamW magnifies the rounding of gradients near zero, so that single weights prove little, and their sum much
    np.testing.assert_allclose([line["loss"] for line in metrics(run)], losses, rtol=within[0])
    np.testing.assert_allclose([line["grad_norm"] for line in metrics(run)], norms, rtol=within[1])
    before, weights = load_file(patched_llama / "model.safetensors"), load_file(run / "model.safetensors")
    assert weights.keys() == expected.keys()
    for name, value in weights.items():
        assert torch.dist(value, expected[name]) <= within[2] * torch.dist(before[name], expected[name]), name


def test_loss_that_is_not_finite_ends_the_run_and_the_checkpoints_are_named(tune, patched_llama, tmp_path):
    with pytest.raises(NotFiniteError) as caught:
        tune(patched_llama, learning_rate=1e30, warmup_steps=0, save_every=1)
    folder = tmp_path / "run" / "checkpoints"
    assert any(folder.iterdir())
    assert "both must be finite" in str(caught.value)
    assert f"before that stay in {folder}" in str(caught.value)
    assert "--output" in str(caught.value)


@pytest.mark.parametrize("adapter", [{}, {"adapter": "lora", "save": "adapter"}], ids=["none", "lora"])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_an_update_to_weights_that_are_not_finite_is_not_saved(
    tune, patched_llama, tmp_path, monkeypatch, adapter, steps
):
    """The rate is too high by far in the second step, or in the only one: no loss follows that would tell."""
    bad = min(2, steps)
    monkeypatch.setattr(finetuning, "rate_factor", lambda step, recipe: 1 if step + 1 == bad else 1e-42)
    with pytest.raises(NotFiniteError, match=f"^Step {bad} gave weights that are not finite") as caught:
        tune(patched_llama, learning_rate=1e38, steps=steps, save_every=1, keep_checkpoints=1, **adapter)
    left = sorted((tmp_path / "run" / "checkpoints").glob("*")) if steps > 1 else []
    assert [path.name for path in left] == ["000001"] * (steps > 1)
    assert "Start over in another --output with a lower --learning-rate" in str(caught.value)
    assert not (tmp_path / "run" / "config.json").exists()


@pytest.mark.parametrize("keys", [{"learning_rate": 1e6}, {"learning_rate": 1e6, "adapter": "lora", "lora_alpha": 1e4}])
def test_weights_that_the_files_dtype_cannot_hold_are_not_written(tune, build, tmp_path, keys):
    """They are finite in float32, in which they were trained."""
    from transformers import AutoModelForCausalLM

    folder = build("llama", head_dim=32, dtype="float16")
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float16).save_pretrained(folder)
    with pytest.raises(NotFiniteError, match=r"more tensors are not finite, or too large.*lower --learning-rate"):
        tune(folder, steps=1, warmup_steps=0, **keys)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"run.yaml", "metrics.jsonl", "checkpoints"}


@pytest.fixture(scope="module")
def model(patched_llama):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(patched_llama, dtype=torch.float32).eval()


@torch.no_grad()
def first_loss(model, rows):
    """Mean over all scored tokens of (ids, labels, positions, mask) rows, nats."""
    total, targets = 0.0, 0
    for ids, labels, positions, mask in rows:
        logits = model(input_ids=ids[None], position_ids=positions[None], attention_mask=mask).logits[0]
        total += cross_entropy(logits, labels, ignore_index=UNSCORED, reduction="sum").item()
        targets += int((labels != UNSCORED).sum())
    return total / targets


def documents_of(batch):
    """Each packed document by itself."""
    for ids, labels, positions in zip(batch.ids, batch.labels, batch.positions, strict=True):
        starts = [*np.flatnonzero(positions == 0), len(ids)]
        for start, stop in pairwise(starts):
            part = (torch.from_numpy(array[start:stop]) for array in (ids, labels, positions))
            yield *part, None


@pytest.mark.parametrize("kind", ["text", "chat"])
def test_loss_on_packed_documents_is_the_mean_over_the_tokens_of_separate_documents(
    model, tune, patched_llama, tmp_path, metrics, chat, kind
):
    text = tmp_path / "lines"
    text.mkdir()
    for number in range(40):
        (text / f"{number:02}.txt").write_text(f"the fox number {number} jumps " * (1 + number % 7))
    data = str(chat if kind == "chat" else text)
    keys = {"data": data, "sequences": "packed", "length": 64, "batch_size": 3, "gradient_accumulation": 2}
    keys |= {"overlong": "cut"} if kind == "chat" else {"end_token": "<s>"}
    stream = open_stream(make_recipe(None, keys), load_tokenizer(open_checkpoint(patched_llama)), 64, 64)
    batch = stream.batch(range(6))
    counts = (batch.labels != UNSCORED).sum(1)
    assert counts[:3].sum() != counts[3:].sum()  # else a mean of means would do
    assert (batch.positions == 0).sum() > len(batch.ids)
    losses = [line["loss"] for line in metrics(tune(patched_llama, **keys, steps=1))]
    assert losses == [pytest.approx(first_loss(model, documents_of(batch)), rel=1e-5)]


@pytest.mark.parametrize("positions", ["pose", "randomized"])
def test_loss_with_gaps_is_that_of_the_whole_sequence_at_those_positions(
    model, tune, patched_llama, tokenizer, corpus, metrics, positions
):
    keys = {"data": str(corpus), "positions": positions, "length": 48}
    batch = open_stream(make_recipe(None, keys), tokenizer, 48, 128).batch(range(4))
    assert batch.positions.max() > 64
    sight = torch.zeros(1, 1, 48, 48).masked_fill(torch.ones(48, 48).triu(1).bool(), torch.finfo().min)
    rows = [
        (*(torch.from_numpy(array[index]) for array in (batch.ids, batch.labels, batch.positions)), sight)
        for index in range(4)
    ]
    losses = [line["loss"] for line in metrics(tune(patched_llama, **keys, steps=1))]
    assert losses == [pytest.approx(first_loss(model, rows), rel=1e-5)]


def test_without_bfloat16_arithmetic_a_cpu_trains_in_float32(tune, metrics, patched_llama, tmp_path, monkeypatch):
    """Emulated, it takes some 50 times as long."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"architecture": "x86_64", "avx512_bf16": False})
    runs = [tune(patched_llama, tmp_path / name, mixed_precision=name, steps=2) for name in ("bf16", "none")]
    one, other = ([line["loss"] for line in metrics(run) if "loss" in line] for run in runs)
    assert one == other


@pytest.fixture
def on_device(monkeypatch):
    """on_device(bytes) -> a list that is filled when a run on a device of that size recomputes its layers."""
    from ropecli.training import finetuning, loss

    def of_size(memory):
        enabled = []

        def enable(model):
            enabled.append(model)
            loss.enable_checkpointing(model)

        monkeypatch.setattr("ropecli.training.memory_plan.setups.total_memory", lambda device: memory)
        monkeypatch.setattr(finetuning, "enable_checkpointing", enable)
        return enabled

    return of_size


@pytest.mark.parametrize(("memory", "short"), [(10**9, False), (10**6, True)])
def test_checkpointing_follows_memory_also_of_another_machine(tune, patched_llama, on_device, memory, short):
    def stop(progress):
        raise InterruptedError

    recomputed = on_device(memory)
    with pytest.raises(InterruptedError):
        tune(patched_llama, steps=2, gradient_checkpointing="auto", on_step=stop)
    assert bool(recomputed) is short
    recomputed = on_device(10**9 if short else 10**6)  # another machine
    tune(patched_llama, steps=2, gradient_checkpointing="auto", resume=True)
    assert bool(recomputed) is not short
