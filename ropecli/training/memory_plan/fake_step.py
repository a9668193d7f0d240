"""Runs one training step on tensors without storage, and counts the live bytes at its peaks.

The step is the model's own forward and backward pass with our loss, under torch's FakeTensorMode, which tracks shapes,
dtypes and what autograd saves, without computing values. No per-architecture tables are needed. Workspace inside an
operation is not counted.

Memory is linear in the number of layers of each kind. So the step runs with one layer of each kind. Every other layer
adds as much as the one of its kind holds: its input, and what its forward pass allocated and something still needs.

Recurrent layers loop over the tokens in Python, which takes too long for a long sequence: the gated delta rule of
Qwen3.5 in blocks of 64. Their step runs on a short one, and every tensor counts as large as it would be at the full
length. A second run, on twice as many tokens, shows what does not grow with the length after all.
"""

import copy
import json
import sys
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from ropecli.attention.attention_function import make_kernel
from ropecli.config.layers import RECURRENT
from ropecli.config.saved_remapping import method_of
from ropecli.config.settings import read_settings
from ropecli.errors import CheckpointError, RopecliError, reason_of
from ropecli.live.lm_head import SplitModel
from ropecli.live.skeleton import build_model, decoder_layers, few_layers
from ropecli.live.stock_transformers import quiet_transformers
from ropecli.training.adapters import attach, trainable
from ropecli.training.loss import NextTokenLoss, Weighting, enable_checkpointing, small_loss
from ropecli.training.recipe_schema import Recipe
from ropecli.training.shared_sequences import repeats

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ATTENTION = "ropecli-memory-plan"
_BLOCK = 64
"""Tokens that the loops of recurrent layers take at once, if the config has no block_size as MiniMax has."""
_CHUNKS = 3
"""Chunks to run of a head, which are recomputed one by one."""


class Peak(NamedTuple):
    """Live bytes. activations: allocated by the decoder's forward pass. working: allocated after it."""

    activations: int
    working: int
    gradients: int


class FakeStep(NamedTuple):
    """Memory of a step in addition to weights and optimizer state, on one process.

    peaks: of its phases. host: bytes of activations moved to CPU memory. trained: number of parameters.
    """

    peaks: list[Peak]
    host: int
    trained: int


class FakeSteps:
    """Runs steps of a model with few of its layers. model: on the meta device."""

    def __init__(self, model: "PreTrainedModel") -> None:
        self.model = model
        self.config, places = few_layers(_independent_of_length(model.config))
        self.others = [count - 1 for _, count in sorted(Counter(places).items())]
        """For each layer that runs, the number of other layers of its kind."""
        settings = read_settings(json.loads(model.config.to_json_string(use_diff=False)))
        self.loops = any(layer.attention == RECURRENT for layer in settings.layers)
        self.small_split = small_loss(model.config, "auto").split

    def run(self, recipe: Recipe, length: int, dtype: torch.dtype, shards: int, ranks: int) -> FakeStep:
        """Run a step.

        length: tokens per sequence on one process. dtype: of the weights, except an adapter's. shards: number of
        processes that share the gradients. ranks: number of processes that share the sequence.
        Raises CheckpointError if a model needs real values.
        """
        from torch._subclasses.fake_tensor import FakeTensorMode

        try:
            model = build_model(self.config, dtype=dtype)
            with quiet_transformers(), torch.device("meta"):
                attach(model, recipe)
            with quiet_transformers(), FakeTensorMode(allow_non_fake_inputs=True):
                model.to_empty(device="cpu")  # some models read the device
                model.tie_weights()
                _set_attention(model, recipe, ranks)
                model.train()
                if recipe.gradient_checkpointing:
                    enable_checkpointing(model)
                split = SplitModel(model, like=self.small_split)
                loss_of = _WatchedLoss(model, offload=recipe.offload_activations, split=split)
                short = loss_of.short_length() if self.loops else length
                if length <= 4 * short:
                    return self._run(loss_of, recipe, length, length, shards)
                once, twice = (self._run(loss_of, recipe, tokens, length, shards) for tokens in (short, 2 * short))
            # what does not grow with the length counted length / short times at first, and then half as often
            excess = 1 - 2 * short / length
            return tree_map(lambda first, second: second - round((first - second) * excess), once, twice)
        except RopecliError:
            raise
        except Exception as error:  # a model that reads values fails in its own way
            raise CheckpointError(
                f"Cannot estimate the memory of {self.model.config.model_type}: it does not run on fake tensors: "
                f"{reason_of(error)}"
            ) from error

    def _run(self, loss_of: "_WatchedLoss", recipe: Recipe, tokens: int, length: int, shards: int) -> FakeStep:
        """Run a step on `tokens` tokens, and count the memory of one on `length` tokens."""
        model = loss_of.model
        trained = [parameter for _, parameter in trainable(model)]
        by_layer = [[parameter for _, parameter in trainable(layer)] for layer in decoder_layers(model)]
        trained_in_others = self._of_others([count_values(parameters) for parameters in by_layer])
        all_trained = count_values(trained) + trained_in_others
        accumulates = recipe.gradient_accumulation > 1  # an earlier pass has left all gradients
        ids = torch.zeros(recipe.batch_size, tokens, dtype=torch.long)
        counter = loss_of.watch(ids, length)

        def replace_gradient(parameter: Tensor) -> None:
            """By this process's share in float32."""
            parameter.grad = None
            if not accumulates:
                counter.add("gradients", 4 * parameter.numel() // shards)

        hooks = [parameter.register_post_accumulate_grad_hook(replace_gradient) for parameter in trained]
        if accumulates:
            counter.add("gradients", 4 * all_trained // shards)
        with counter:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=recipe.mixed_precision == "bf16"):
                loss = loss_of(ids, ids, document_labels=ids if recipe.loss_weighting == "documents" else None)
            counter.owner = "head"
            loss.backward(inputs=trained)
        for hook in hooks:
            hook.remove()

        def peak(phase: str, held: int, gradients: int) -> Peak:
            live = counter.peaks[phase]
            working = sum(live[phase] for phase in ("loss", "head", "layers", "embeddings"))
            activations = live.total() - working - live["gradients"]
            return Peak(activations + held, working, live["gradients"] + gradients)

        # until its end, the forward pass also holds the weights that autocast has cast
        in_loss, in_head = (self._of_others(counter.peaks[phase]) for phase in ("loss", "head"))
        gradients = 0 if accumulates else 4 * trained_in_others // shards
        return FakeStep(
            # the backward pass of the layers begins with all activations, and ends with all gradients
            peaks=[
                peak("loss", in_loss, 0),
                peak("head", in_head, 0),
                peak("layers", in_head, 0),
                peak("layers", 0, gradients),
                peak("embeddings", 0, gradients),
            ],
            host=loss_of.moved.total() + self._of_others(loss_of.moved),
            trained=all_trained,
        )

    def _of_others(self, sizes: Any) -> int:
        """The sum over the layers that do not run. sizes: of those that do, by place."""
        return sum(count * sizes[place] for place, count in enumerate(self.others))


def count_values(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that are allocated inside its context, until they are freed.

    before: tensors that already exist. size_of: bytes of a tensor's storage. owner: what allocates now: a layer, by its
    place, or a phase of the step. live: bytes by owner. peaks: those of the moment when a phase had most.
    """

    def __init__(self, before: Iterable[Tensor] = (), size_of: Callable[[Tensor], int] | None = None) -> None:
        super().__init__()
        self.size_of = size_of or (lambda tensor: tensor.untyped_storage().nbytes())
        self.owner: int | str = "decoder"
        self.live = Counter[int | str]()
        self.peaks = defaultdict[int | str, Counter[int | str]](Counter)
        self._storages: dict[int, tuple[int | str, int]] = {_address(tensor): ("before", 0) for tensor in before}

    def add(self, owner: int | str, size: int) -> None:
        self.live[owner] += size
        if self.live.total() > self.peaks[self.owner].total():
            self.peaks[self.owner] = self.live.copy()

    def give(self, tensor: Tensor, owner: int | str) -> None:
        """Let another owner have the tensor's storage."""
        before, size = self._storages[_address(tensor)]
        self.live[before] -= size
        self.live[owner] += size
        self._storages[_address(tensor)] = owner, size

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._grouped_mm.default:
            result: Any = _grouped_product(*args)
        else:
            result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor) and (address := _address(tensor)) not in self._storages:
                size = self.size_of(tensor)
                self._storages[address] = self.owner, size
                self.add(self.owner, size)
                weakref.finalize(tensor.untyped_storage(), self._forget, address)
        return result

    def _forget(self, address: int) -> None:
        owner, size = self._storages.pop(address)
        self.add(owner, -size)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _grouped_product(left: Tensor, right: Tensor, offsets: Tensor, *_: Any) -> Tensor:
    """Shape of a matrix product of grouped experts: torch 2.13 has no fake kernel for float32."""
    rows = (len(offsets),) if left.ndim == right.ndim == 2 else ()
    return left.new_empty(*rows, left.shape[-2], right.shape[-1])


class _WatchedLoss(NextTokenLoss):
    """Tells the counter which layer and which phase allocates. moved: bytes moved to CPU memory, by owner."""

    def __init__(self, model: "PreTrainedModel", *, offload: bool, split: SplitModel) -> None:
        super().__init__(model, offload=offload, split=split)
        embeddings: Any = model.get_input_embeddings()
        embeddings.register_forward_hook(self._embed)
        for place, layer in enumerate(decoder_layers(model)):
            self._watch_layer(place, layer)

    def _watch_layer(self, place: int, layer: Any) -> None:
        """Let the layer own its input, and what its forward pass allocates but its output."""
        kind = type(layer)

        def call(layer: Any, *given: Any, **named: Any) -> Any:
            counter = self.counter
            if counter.owner != "decoder":  # recomputed
                return kind.__call__(layer, *given, **named)
            counter.give(given[0] if given else named["hidden_states"], place)
            counter.owner = place
            output = kind.__call__(layer, *given, **named)
            counter.owner = "decoder"
            counter.give(output[0] if isinstance(output, tuple) else output, "decoder")
            return output

        # a hook would not see what gradient checkpointing saves before it calls the layer
        layer.__class__ = type(kind.__name__, (kind,), {"__call__": call})

    def short_length(self) -> int:
        """A length that shows the memory of every length, as does its double."""
        # no dimension of a weight, so that tokens × tokens tensors are known
        dimensions = {size for weight in self.model.parameters() for size in weight.shape}
        # more tokens take the head no more memory
        chunks = self._chunk * (1 if self.split.plain_head else _CHUNKS)
        block = getattr(self.model.config.get_text_config(), "block_size", _BLOCK)
        least = max(chunks, block * block // 32)  # long against the block × block scores of a block
        shorts = range(block, sys.maxsize, block)
        return next(short for short in shorts if short >= least and not {short, 2 * short} & dimensions)

    def watch(self, ids: Tensor, length: int) -> LiveBytes:
        """Start to count the memory of a step on `length` tokens. ids: those that it runs on."""
        weights, tokens = list(self.model.parameters()), ids.shape[1]
        of_weights = {_dimensions(weight) for weight in weights}  # which do not grow with the length

        def size_of(tensor: Tensor) -> int:
            size = tensor.untyped_storage().nbytes()
            # the head computes logits of as many tokens at any length
            if self.split.vocabulary in tensor.shape or _dimensions(tensor) in of_weights:
                return size
            return round(size * (length / tokens) ** (2 if tensor.shape.count(tokens) > 1 else 1))

        self.moved = Counter[int | str]()
        self.counter = LiveBytes([*weights, *self.model.buffers(), ids], None if tokens == length else size_of)
        return self.counter

    def hidden(self, ids: Tensor, positions: Tensor | None, packed: bool) -> Any:
        outputs = super().hidden(ids, positions, packed)
        self.counter.owner = "loss"
        self._enter_at(outputs.last_hidden_state, "layers")
        return outputs

    def _kept_elsewhere(self, device: torch.device) -> AbstractContextManager:
        def move(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
            self.moved[self.counter.owner] += self.counter.size_of(tensor)
            return tensor.shape, tensor.dtype

        def bring_back(moved: tuple[torch.Size, torch.dtype]) -> Tensor:
            return torch.empty(moved[0], dtype=moved[1])

        return torch.autograd.graph.saved_tensors_hooks(move, bring_back) if self.offload else nullcontext()

    def _embed(self, embeddings: torch.nn.Module, given: Any, output: Tensor) -> Tensor:
        """Let the first layer keep as much as the others, also if the embeddings are frozen."""
        if output.is_leaf and (self.offload or not output.requires_grad):
            output = output + torch.zeros((), dtype=output.dtype, requires_grad=True)
        self._enter_at(output, "embeddings")
        return output

    def _enter_at(self, tensor: Tensor, phase: str) -> None:
        """Start the phase when the tensor's gradient is computed."""
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: setattr(self.counter, "owner", phase))

    def _of_plain_head(self, hidden: Tensor, labels: Tensor, weigh: Weighting | None) -> Tensor:
        """Also count what linear_cross_entropy allocates inside: its operands, and the logits of a chunk."""
        loss = super()._of_plain_head(hidden, labels, weigh)
        chunk = min(labels.numel(), self._chunk), self.split.vocabulary
        if weigh is not None:  # the backward pass needs the operands, so they are counted already
            loss.new_empty(chunk)
            return loss
        operands = hidden.float(), self.split.head.weight.float()
        operands[0].new_empty(chunk)
        return loss

    def _chunks(self, hidden: Tensor) -> list[slice]:
        """Run only a few chunks, since all take the same memory."""
        return super()._chunks(hidden)[:_CHUNKS]


def _dimensions(tensor: Tensor) -> tuple[int, ...]:
    return tuple(sorted(size for size in tensor.shape if size > 1))


def _independent_of_length(config: Any) -> Any:
    """Copy the config without length-dependent frequencies, which need the values of positions."""
    config = copy.deepcopy(config)
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    for section in [parameters, *parameters.values()]:
        if isinstance(section, dict) and "rope_type" in section:
            section["rope_type"] = "default"
    return config


def _set_attention(model: "PreTrainedModel", recipe: Recipe, ranks: int) -> None:
    """Set the recipe's attention, with a mask of tokens × tokens only where training has one.

    On fake tensors transformers always creates a mask, since it cannot see whether documents are packed. SDPA needs
    none for causal attention. Flash attention never needs one and saves as much as SDPA, which replaces it here.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    configured = model.config.get_text_config()._attn_implementation
    attention = model.config._attn_implementation if recipe.attn == "auto" else recipe.attn
    if attention == "eager":
        model.set_attn_implementation("eager")
        return
    # DeepSeek's sparse attention also reads the mask to choose keys
    needed = recipe.packs or getattr(model.config.get_text_config(), "index_topk", None) is not None

    def mask(**arguments: Any) -> Any:
        if attention != "sdpa" or ranks > 1:
            return None
        return sdpa_mask(**{**arguments, "allow_is_causal_skip": not needed})

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **arguments: Any) -> Any:
        if method_of(configured):  # the last block alone, since all blocks take the same memory
            kernel = make_kernel(module, configured, arguments.get("sliding_window"))
            output = kernel(query, key, value, first_query=0, first_key=0, scaling=1.0, last_block_alone=True)
        elif ranks > 1:
            return _shared(query, key, value, ranks), None
        elif query.shape[-1] == value.shape[-1]:
            return sdpa_attention_forward(module, query, key, value, mask, **arguments)
        else:
            output = _memory_efficient(query, key, value, mask)
        return output.transpose(1, 2).contiguous(), None

    AttentionInterface.register(_ATTENTION, attend)
    AttentionMaskInterface.register(_ATTENTION, mask)
    model.set_attn_implementation(_ATTENTION)


def _memory_efficient(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """The kernel of GPUs for values narrower than queries (DeepSeek): the CPU's stores tokens × tokens scores."""
    from transformers.integrations.sdpa_attention import repeat_kv

    key, value = (repeat_kv(tensor, query.shape[1] // tensor.shape[1]) for tensor in (key, value))
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    bias = None if mask is None else mask.to(query.dtype).expand(*query.shape[:3], key.shape[2])
    return kernel(query, key, value, bias, True, 0.0, mask is None)[0]


def _shared(query: Tensor, key: Tensor, value: Tensor, ranks: int) -> Tensor:
    """Attention of `ranks` processes that exchange tokens for heads, as ringmaster 0.2.7's strategies/ulysses.py.

    It sees this process's tokens and all heads, which takes as much as all tokens and a share of the heads.
    """
    from transformers.integrations.sdpa_attention import repeat_kv

    key, value = (repeat_kv(tensor, repeats(tensor, ranks)) for tensor in (key, value))
    grouped = query.shape[1] != key.shape[1]
    if grouped:
        (query,), (key, value) = Exchange.apply(query[None]), Exchange.apply(torch.stack([key, value]))
    else:
        query, key, value = Exchange.apply(torch.stack([query, key, value]))
    output = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
    return Exchange.apply(output.transpose(1, 2).contiguous())


class Exchange(torch.autograd.Function):
    """Allocates what ringmaster's comm.py does: the tensor ordered by process, the one received, and the result."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ordered, received, result = (torch.empty_like(tensor) for _ in range(3))
        del ordered, received
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return Exchange.forward(ctx, gradients[0])
