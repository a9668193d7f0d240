"""Makes one training step on tensors without storage, and counts the bytes that are alive at its peaks.

The step is the model's own forward and backward pass with our own loss, under torch's FakeTensorMode, which knows
shapes, dtypes and what autograd keeps, and computes nothing: no architecture needs a table. What an operation holds for
itself while it runs is not seen. The model has one layer of each kind, whose activations count for all of that kind.
"""

import copy
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ropecli.attention.attention_function import make_kernel
from ropecli.config.saved_remapping import method_of
from ropecli.errors import CheckpointError, RopecliError, reason_of
from ropecli.live.lm_head import SplitModel
from ropecli.live.stock_transformers import quiet_transformers
from ropecli.training.adapters import attach, trainable
from ropecli.training.loss import NextTokenLoss, enable_checkpointing
from ropecli.training.memory_plan.model_shape import build, keep_one_of_each, layers_of
from ropecli.training.recipe import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ATTENTION = "ropecli-memory-plan"


@dataclass(frozen=True)
class FakeStep:
    """What a step takes beside weights, optimizer state and accumulated gradients. Bytes on one process:

    kept: activations between the forward and the backward pass. kept_later: of these, those of all layers but one of
    each kind. hidden: the decoder's output. loss, layers, embeddings: the peak until the gradient has come to the
    decoder, to the embeddings, and to the end.

    Numbers of values: trained; trained_later, in all layers but one of each kind; quantizable, in frozen matrices of
    layers; layer, in the largest layer; outside, in no layer.
    """

    kept: int
    kept_later: int
    hidden: int
    loss: int
    layers: int
    embeddings: int
    trained: int
    trained_later: int
    quantizable: int
    layer: int
    outside: int


def run_fake_step(config: Any, recipe: Recipe, length: int, dtype: torch.dtype = torch.float32) -> FakeStep:
    """length: tokens of a sequence on one process. dtype: of the weights, an adapter's own aside.

    Raises CheckpointError where a model needs values.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    try:
        with quiet_transformers(), torch.device("meta"):
            model = build(_independent_of_length(config), dtype)
            counts = keep_one_of_each(model)
            attach(model, recipe)
        with quiet_transformers(), FakeTensorMode(allow_non_fake_inputs=True):
            model.to_empty(device="cpu")  # some models ask for the device
            model.tie_weights()
            _set_attention(model, recipe)
            model.train()
            if recipe.gradient_checkpointing:
                enable_checkpointing(model)
            return _run(model, recipe, length, counts)
    except RopecliError:
        raise
    except Exception as error:  # what a model does with its values, it cannot do without them
        raise CheckpointError(
            f"{config.model_type}: its training step cannot be followed without computing it: {reason_of(error)}"
        ) from error


def _run(model: "PreTrainedModel", recipe: Recipe, length: int, counts: list[int]) -> FakeStep:
    loss_of = _WatchedLoss(model)
    ids = torch.zeros(recipe.batch_size, length, dtype=torch.long)
    trained = [parameter for _, parameter in trainable(model)]
    gradients = [torch.empty_like(parameter) for parameter in trained] if recipe.gradient_accumulation > 1 else []
    for parameter, gradient in zip(trained, gradients, strict=False):
        parameter.grad = gradient
    counter = AllocationCounter([*model.parameters(), *model.buffers(), *gradients, ids])
    loss_of.watch(counter)
    _weigh_layers(layers_of(model)[2], counts, counter, hold=recipe.gradient_checkpointing)
    with counter:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=recipe.mixed_precision == "bf16"):
            loss = loss_of(ids, ids)
        kept, kept_later = counter.kept(), counter.unweigh()
        counter.phase = "head"
        loss.backward(inputs=trained)
        peaks = counter.peaks
        return FakeStep(
            kept=kept,
            kept_later=kept_later,
            hidden=loss_of.hidden_size,
            loss=max(peaks["loss"], peaks["head"] + kept_later),
            layers=peaks["layers"],
            embeddings=peaks.get("embeddings", counter.now),
            **_count_values(model, counts),
        )


class AllocationCounter(TorchDispatchMode):
    """Counts the bytes of storages made while it is open. now: alive; peaks: the most in each phase.

    weight: how many times the next ones count. before: tensors that were there already.
    """

    def __init__(self, before: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.now = 0
        self.made = 0
        self.weight = 1
        self.phase = "decoder"
        self.peaks: dict[str, int] = {}
        self._alive: dict[int, tuple[int, int, str]] = {}
        self._before = {tensor.untyped_storage()._cdata for tensor in before}

    def kept(self) -> int:
        """Bytes alive that the decoder made."""
        return sum(size * weight for size, weight, phase in self._alive.values() if phase == "decoder")

    def unweigh(self) -> int:
        """From here on each storage counts once. Returns the bytes by which fewer are counted."""
        before = self.now
        self._alive = {key: (size, 1, phase) for key, (size, _, phase) in self._alive.items()}
        self.now = sum(size for size, _, _ in self._alive.values())
        return before - self.now

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._grouped_mm.default:
            result: Any = _grouped_product(*args)
        else:
            result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self._note(tensor.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._alive or key in self._before:
            return
        size = storage.nbytes()
        self._alive[key] = (size, self.weight, self.phase)
        self.made += size
        self.now += size * self.weight
        self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), self.now)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        size, weight, _ = self._alive.pop(key)
        self.now -= size * weight


def _grouped_product(left: Tensor, right: Tensor, offsets: Tensor, *_: Any) -> Tensor:
    """The shape of a mixture's product, expert by expert: torch 2.13's own rule takes bfloat16 alone."""
    rows = (len(offsets),) if left.ndim == right.ndim == 2 else ()
    return left.new_empty(*rows, left.shape[-2], right.shape[-1])


class _FakeSplit(SplitModel):
    """Its head is plain if it makes the logits once: one that caps or scales them makes them again."""

    @torch.no_grad()
    def _probe(self) -> bool:
        with AllocationCounter(self.model.parameters()) as counter:
            outputs = self.decode(torch.zeros(1, 2, dtype=torch.long))
            counter.made = 0
            logits = self.logits(outputs, outputs.last_hidden_state)
        return getattr(self.head, "bias", None) is None and counter.made < 2 * logits.nbytes


class _WatchedLoss(NextTokenLoss):
    """Tells a counter how far the step is."""

    split_model = _FakeSplit

    def watch(self, counter: AllocationCounter) -> None:
        self.counter = counter
        embeddings: Any = self.model.get_input_embeddings()
        embeddings.register_forward_hook(lambda module, given, output: self._enter_at(output, "embeddings"))

    def hidden(self, ids: Tensor, positions: Tensor | None, packed: bool) -> Any:
        outputs = super().hidden(ids, positions, packed)
        hidden = outputs.last_hidden_state
        if not hidden.requires_grad:
            raise CheckpointError(f"{type(self.model).__name__}: nothing that is trained leads to its output.")
        self.hidden_size = hidden.nbytes
        self.counter.phase = "loss"
        self._enter_at(hidden, "layers")
        return outputs

    def _enter_at(self, tensor: Tensor, phase: str) -> None:
        """The phase begins when the gradient comes to the tensor."""
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: setattr(self.counter, "phase", phase))

    def _of_plain_head(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """As it is, and once more what is there while its one operation runs: operands, and the logits of a chunk."""
        loss = super()._of_plain_head(hidden, labels)
        operands = hidden.float(), self._split.head.weight.float()
        operands[0].new_empty(min(len(hidden), self._chunk), self._split.vocabulary)
        return loss

    def _chunks(self, hidden: Tensor) -> list[slice]:
        """Three, since each more takes the same memory."""
        return super()._chunks(hidden)[:3]


def _weigh_layers(layers: torch.nn.ModuleList, counts: list[int], counter: AllocationCounter, *, hold: bool) -> None:
    """Makes what a layer allocates in the forward pass count for all layers of its kind.

    hold: whether its output is held until its gradient comes. With checkpointing that is what the next layer keeps, and
    here there may be none.
    """
    held: dict[torch.nn.Module, Tensor] = {}

    def enter(layer: torch.nn.Module, given: Any) -> None:
        if counter.phase == "decoder":  # not where checkpointing computes it again
            counter.weight = weights[layer]

    def leave(layer: torch.nn.Module, given: Any, output: Any) -> None:
        if counter.phase == "decoder":
            counter.weight = 1
            hidden = output if isinstance(output, Tensor) else output[0]
            if hold and hidden.requires_grad:
                held[layer] = hidden
                hidden.register_hook(release(layer))

    def release(layer: torch.nn.Module) -> Callable[[Tensor], None]:
        return lambda gradient: held.__delitem__(layer)

    weights = dict(zip(layers, counts, strict=True))
    for layer in layers:
        layer.register_forward_pre_hook(enter)
        layer.register_forward_hook(leave)


def _count_values(model: "PreTrainedModel", counts: list[int]) -> dict[str, int]:
    layers = layers_of(model)[2]
    times = {id(one): count for layer, count in zip(layers, counts, strict=True) for one in layer.parameters()}
    trained = [parameter for _, parameter in trainable(model)]
    matrices = [m.weight for layer in layers for m in layer.modules() if isinstance(m, torch.nn.Linear)]
    all_trained = sum(one.numel() * times.get(id(one), 1) for one in trained)
    return {
        "trained": all_trained,
        "trained_later": all_trained - sum(one.numel() for one in trained),
        "quantizable": sum(one.numel() * times[id(one)] for one in matrices if not one.requires_grad),
        "layer": max(sum(one.numel() for one in layer.parameters()) for layer in layers),
        "outside": sum(one.numel() for one in model.parameters() if id(one) not in times),
    }


def _independent_of_length(config: Any) -> Any:
    """A copy whose positions turn alike at all lengths: to ask for the longest is to ask for values."""
    config = copy.deepcopy(config)
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    for one in [parameters, *parameters.values()]:
        if isinstance(one, dict) and "rope_type" in one:
            one["rope_type"] = "default"
    return config


def _set_attention(model: "PreTrainedModel", recipe: Recipe) -> None:
    """The recipe's attention, with a mask of tokens × tokens only where there is one in training.

    Without values transformers always makes one, since it cannot see whether documents are packed. SDPA needs none for
    causal attention alone; flash attention never does, keeps as much as SDPA, and may not be installed here.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    own = model.config.get_text_config()._attn_implementation
    attention = model.config._attn_implementation if recipe.attn == "auto" else recipe.attn
    if attention == "eager":
        model.set_attn_implementation("eager")
        return
    packed = any(source.sequences == "packed" for source in recipe.sources)

    def mask(**arguments: Any) -> Any:
        return sdpa_mask(**{**arguments, "allow_is_causal_skip": not packed}) if attention == "sdpa" else None

    AttentionInterface.register(_ATTENTION, _last_block(own) if method_of(own) else sdpa_attention_forward)
    AttentionMaskInterface.register(_ATTENTION, mask)
    model.set_attn_implementation(_ATTENTION)


def _last_block(name: str) -> Callable[..., Any]:
    """The attention of a distance method, of which the last block alone is computed: each takes the same memory.

    name: of the attention.
    """

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, *, scaling: float = 1.0, **others: Any
    ) -> tuple[Tensor, None]:
        kernel = make_kernel(module, name, others.get("sliding_window"))
        result = kernel(query, key, value, first_query=0, first_key=0, scaling=scaling, last_block_alone=True)
        return result.transpose(1, 2).contiguous(), None

    return attend
