"""Runs one training step on tensors without storage, and counts the live bytes at its peaks.

The step is the model's own forward and backward pass with our loss, under torch's FakeTensorMode, which tracks shapes,
dtypes and what autograd saves, without computing values. No per-architecture tables are needed. Workspace inside an
operation is not counted.

Memory is linear in the number of layers of each kind. Unless there are few layers, the step runs once with one layer of
each kind, then once per kind with a second layer of it; the difference counts for every further layer.
"""

import copy
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from ropecli.attention.attention_function import make_kernel
from ropecli.config.saved_remapping import method_of
from ropecli.errors import CheckpointError, RopecliError, reason_of
from ropecli.live.lm_head import SplitModel
from ropecli.live.stock_transformers import quiet_transformers
from ropecli.training.adapters import attach, trainable
from ropecli.training.loss import NextTokenLoss, enable_checkpointing
from ropecli.training.memory_plan.model_shape import build, keep_layers, layers_of
from ropecli.training.recipe import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ATTENTION = "ropecli-memory-plan"


class Peak(NamedTuple):
    """Live bytes. activations: allocated by the decoder's forward pass. working: allocated after it."""

    activations: int = 0
    working: int = 0
    gradients: int = 0


class FakeStep(NamedTuple):
    """Memory of a step in addition to weights and optimizer state, on one process.

    peaks: the peak of each phase. host: bytes of activations moved to CPU memory.

    Counts of values: trained; quantizable, in frozen matrices of layers; layer, in the largest layer; outside, not in
    any layer.
    """

    peaks: dict[str, Peak]
    host: int
    trained: int
    quantizable: int
    layer: int
    outside: int


def run_fake_step(
    config: Any, kinds: list[list[int]], recipe: Recipe, length: int, dtype: torch.dtype, shards: int
) -> FakeStep:
    """Run the step with a few layers, and extrapolate to all layers.

    kinds: the layers of each kind. length: tokens per sequence on one process. dtype: of the weights, except an
    adapter's. shards: number of processes that share the gradients. Raises CheckpointError if a model needs real
    values.
    """
    try:
        every = sorted(chain(*kinds))
        if len(every) <= 2 * (len(kinds) + 1):  # all layers at once are as fast
            return _run(config, every, recipe, length, dtype, shards)
        first = [layers[0] for layers in kinds]
        total = base = _run(config, first, recipe, length, dtype, shards)
        for layers in kinds:
            if len(layers) > 1:
                more = _run(config, sorted([*first, layers[1]]), recipe, length, dtype, shards)
                total = _add_difference(total, more, base, times=len(layers) - 1)
        return total
    except RopecliError:
        raise
    except Exception as error:  # a model that reads values fails in its own way
        raise CheckpointError(
            f"Cannot estimate the memory of {config.model_type}: it does not run on fake tensors: {reason_of(error)}"
        ) from error


def _add_difference(total: FakeStep, more: FakeStep, base: FakeStep, times: int) -> FakeStep:
    return tree_map(lambda sum_, with_more, without: sum_ + times * (with_more - without), total, more, base)


def _run(config: Any, layers: list[int], recipe: Recipe, length: int, dtype: torch.dtype, shards: int) -> FakeStep:
    """Run the step of a model with only some of its layers."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with quiet_transformers(), torch.device("meta"):
        model = build(_independent_of_length(config), dtype)
        keep_layers(model, layers)
        attach(model, recipe)
    with quiet_transformers(), FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")  # some models read the device
        model.tie_weights()
        _set_attention(model, recipe)
        model.train()
        if recipe.gradient_checkpointing:
            enable_checkpointing(model)
        return _count_step(model, recipe, length, shards)


def _count_step(model: "PreTrainedModel", recipe: Recipe, length: int, shards: int) -> FakeStep:
    ids = torch.zeros(recipe.batch_size, length, dtype=torch.long)
    trained = [parameter for _, parameter in trainable(model)]
    counter = AllocationCounter([*model.parameters(), *model.buffers(), ids])
    loss_of = _WatchedLoss(model, offload=recipe.offload_activations)
    loss_of.watch(counter)
    _watch_gradients(trained, counter, shards, accumulates=recipe.gradient_accumulation > 1)
    with counter:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=recipe.mixed_precision == "bf16"):
            loss = loss_of(ids, ids, document_labels=ids if recipe.loss_weighting == "documents" else None)
        counter.phase = "head"
        loss.backward(inputs=trained)
    layers = layers_of(model)[2]
    in_layers = {id(parameter) for parameter in layers.parameters()}
    matrices = [module.weight for module in layers.modules() if isinstance(module, torch.nn.Linear)]
    return FakeStep(
        peaks=counter.peaks,
        host=loss_of.moved,
        trained=sum(one.numel() for one in trained),
        quantizable=sum(one.numel() for one in matrices if not one.requires_grad),
        layer=max(sum(one.numel() for one in layer.parameters()) for layer in layers),
        outside=sum(one.numel() for one in model.parameters() if id(one) not in in_layers),
    )


def _watch_gradients(
    trained: list[torch.nn.Parameter], counter: "AllocationCounter", shards: int, *, accumulates: bool
) -> None:
    """Replace each gradient by this process's share in float32. accumulates: an earlier pass has already left it."""

    def count_share(parameter: Tensor) -> None:
        counter.add("gradients", 4 * parameter.numel() // shards)

    def drop(parameter: Tensor) -> None:
        parameter.grad = None

    for parameter in trained:
        parameter.register_post_accumulate_grad_hook(drop)
        if accumulates:
            count_share(parameter)
        else:
            parameter.register_post_accumulate_grad_hook(count_share)


class AllocationCounter(TorchDispatchMode):
    """Counts the bytes of storages allocated inside its context.

    before: tensors that already exist, which are not counted. peaks: the most live bytes in each phase after the
    decoder's forward pass.
    """

    def __init__(self, before: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.made = 0
        self.phase = "decoder"
        self.alive = Peak()
        self.peaks: dict[str, Peak] = {}
        self._known = {tensor.untyped_storage()._cdata for tensor in before}

    def add(self, part: str, size: int) -> None:
        self.alive = self.alive._replace(**{part: getattr(self.alive, part) + size})
        if self.phase != "decoder":
            self.peaks[self.phase] = max(self.peaks.get(self.phase, Peak()), self.alive, key=sum)

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
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        part = "activations" if self.phase == "decoder" else "working"
        self._known.add(key)
        self.made += size
        self.add(part, size)
        weakref.finalize(storage, self._forget, key, part, size)

    def _forget(self, key: int, part: str, size: int) -> None:
        self._known.remove(key)
        self.add(part, -size)


def _grouped_product(left: Tensor, right: Tensor, offsets: Tensor, *_: Any) -> Tensor:
    """Shape of a matrix product of grouped experts: torch 2.13 has no fake kernel for float32."""
    rows = (len(offsets),) if left.ndim == right.ndim == 2 else ()
    return left.new_empty(*rows, left.shape[-2], right.shape[-1])


class _FakeSplit(SplitModel):
    """Treats a head as a single matrix if it allocates logits only once: capping or scaling allocates them again."""

    @torch.no_grad()
    def _probe(self) -> bool:
        with AllocationCounter(self.model.parameters()) as counter:
            outputs = self.decode(torch.zeros(1, 2, dtype=torch.long))
            counter.made = 0
            logits = self.logits(outputs, outputs.last_hidden_state)
        return getattr(self.head, "bias", None) is None and counter.made < 2 * logits.nbytes


class _WatchedLoss(NextTokenLoss):
    """Sets the counter's phase. moved: bytes moved to CPU memory."""

    split_model = _FakeSplit

    def watch(self, counter: AllocationCounter) -> None:
        self.counter = counter
        self.moved = 0
        embeddings: Any = self.model.get_input_embeddings()
        embeddings.register_forward_hook(lambda module, given, output: self._enter_at(output, "embeddings"))

    def hidden(self, ids: Tensor, positions: Tensor | None, packed: bool) -> Any:
        outputs = super().hidden(ids, positions, packed)
        hidden = outputs.last_hidden_state
        if not hidden.requires_grad:
            raise CheckpointError(
                f"The output of {type(self.model).__name__} does not depend on any trained parameter."
            )
        self.counter.phase = "loss"
        self._enter_at(hidden, "layers")
        return outputs

    def _kept_elsewhere(self, device: torch.device) -> AbstractContextManager:
        def move(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
            self.moved += tensor.nbytes
            return tensor.shape, tensor.dtype

        def bring_back(moved: tuple[torch.Size, torch.dtype]) -> Tensor:
            return torch.empty(moved[0], dtype=moved[1])

        return torch.autograd.graph.saved_tensors_hooks(move, bring_back) if self.offload else nullcontext()

    def _enter_at(self, tensor: Tensor, phase: str) -> None:
        """Start the phase when the tensor's gradient is computed."""
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: setattr(self.counter, "phase", phase))

    def _of_plain_head(self, hidden: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        """Also count what linear_cross_entropy allocates inside: its operands, and the logits of a chunk."""
        loss = super()._of_plain_head(hidden, labels, weights)
        chunk = min(len(hidden), self._chunk), self._split.vocabulary
        if weights is not None:  # the backward pass needs the operands, so they are counted already
            loss.new_empty(chunk)
            return loss
        operands = hidden.float(), self._split.head.weight.float()
        operands[0].new_empty(chunk)
        return loss

    def _chunks(self, hidden: Tensor) -> list[slice]:
        """Run only three chunks, since further ones take the same memory."""
        return super()._chunks(hidden)[:3]


def _independent_of_length(config: Any) -> Any:
    """Copy the config without length-dependent frequencies, which need the values of positions."""
    config = copy.deepcopy(config)
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    for one in [parameters, *parameters.values()]:
        if isinstance(one, dict) and "rope_type" in one:
            one["rope_type"] = "default"
    return config


def _set_attention(model: "PreTrainedModel", recipe: Recipe) -> None:
    """Set the recipe's attention, with a mask of tokens × tokens only where training has one.

    On fake tensors transformers always creates a mask, since it cannot see whether documents are packed. SDPA needs
    none for causal attention. Flash attention never needs one and saves as much as SDPA, which replaces it here.
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
    """A distance method's attention that computes only the last block, since all blocks take the same memory."""

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, *, scaling: float = 1.0, **others: Any
    ) -> tuple[Tensor, None]:
        kernel = make_kernel(module, name, others.get("sliding_window"))
        result = kernel(query, key, value, first_query=0, first_key=0, scaling=scaling, last_block_alone=True)
        return result.transpose(1, 2).contiguous(), None

    return attend
