"""Runs one training step on tensors without storage, and counts the live bytes at its peaks.

The step is the model's own forward and backward pass with our loss, under torch's FakeTensorMode, which tracks shapes,
dtypes and what autograd saves, without computing values. No per-architecture tables are needed. Workspace inside an
operation is not counted.

Memory is linear in the number of layers of each kind. So the step runs with one layer of each, and what it keeps counts
for every further one.

Recurrent layers loop over the tokens in Python: the gated delta rule of Qwen3.5 in blocks of 64. Their step runs on a
short sequence, and the size of each tensor is scaled to the full length. A tensor of a weight's shape keeps its size,
scores and masks of tokens × tokens grow with the square of the length, all others with the length. Other constant
tensors then count too much; a second run, on a sequence twice as long, corrects that.
"""

import copy
import json
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Linear
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from ropecli.attention.attention_function import make_kernel
from ropecli.attention.head_layout import for_every_head
from ropecli.config.layers import RECURRENT
from ropecli.config.saved_remapping import method_of
from ropecli.config.settings import read_settings
from ropecli.errors import CheckpointError, RopecliError, reason_of
from ropecli.live.lm_head import SplitModel
from ropecli.live.skeleton import build_model, decoder_layers, few_layers
from ropecli.live.stock_transformers import quiet_transformers
from ropecli.training.adapters import attach, trainable
from ropecli.training.launch import for_every_rank
from ropecli.training.loss import NextTokenLoss, Weighting, enable_checkpointing
from ropecli.training.recipe_schema import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ATTENTION = "ropecli-memory-plan"
_BLOCK = 64
"""Tokens that the loops of recurrent layers take at once, if the config has no block_size as MiniMax has."""
_CHUNKS = 3
"""Chunks to run of a head, which are recomputed one by one."""


class Peak(NamedTuple):
    """Live bytes. activations: allocated by the decoder's forward pass. working: allocated after it."""

    activations: int = 0
    working: int = 0
    gradients: int = 0


class FakeStep(NamedTuple):
    """Memory of a step in addition to weights and optimizer state, on one process.

    peaks: of the phases. host: bytes of activations moved to CPU memory. Counts of values: trained; quantizable, in
    frozen matrices of layers; layer, in the largest layer; outside, not in any layer.
    """

    peaks: dict[str, Peak]
    host: int
    trained: int
    quantizable: int
    layer: int
    outside: int


class FakeSteps:
    """Runs steps of a model with few of its layers. model: on the meta device."""

    def __init__(self, model: "PreTrainedModel") -> None:
        self.model = model
        self.config, places = few_layers(_independent_of_length(model.config))
        self.further = [count - 1 for _, count in sorted(Counter(places).items())]
        """For each layer that runs, the number of further layers that it stands for."""
        settings = read_settings(json.loads(model.config.to_json_string(use_diff=False)))
        self.loops = any(layer.attention == RECURRENT for layer in settings.layers)

    def run(self, recipe: Recipe, length: int, dtype: torch.dtype, shards: int, ranks: int = 1) -> FakeStep:
        """Run a step.

        length: tokens per sequence on one process. dtype: of the weights, except an adapter's. shards: number of
        processes that share the gradients. ranks: number of processes that share the sequence.
        Raises CheckpointError if a model needs real values.
        """
        try:
            with self._fake_model(recipe, dtype, ranks) as model, quiet_transformers():
                loss_of = _WatchedLoss(model, offload=recipe.offload_activations)
                lengths = loss_of.short_lengths() if self.loops else []
                if not lengths or length <= 2 * max(lengths):
                    return self._run(loss_of, recipe, length, length, shards)
                once, twice = (self._run(loss_of, recipe, short, length, shards) for short in lengths)
            # other tensors take a, constant ones c: once = a + c · length / short, twice = a + c · length / (2 · short)
            share = max(lengths) / length
            return tree_map(lambda first, second: 2 * second - first + round((first - second) * share), once, twice)
        except RopecliError:
            raise
        except Exception as error:  # a model that reads values fails in its own way
            raise CheckpointError(
                f"Cannot estimate the memory of {self.model.config.model_type}: it does not run on fake tensors: "
                f"{reason_of(error)}"
            ) from error

    @contextmanager
    def _fake_model(self, recipe: Recipe, dtype: torch.dtype, ranks: int) -> Iterator["PreTrainedModel"]:
        """The model with few layers, on fake tensors, and their mode."""
        from torch._subclasses.fake_tensor import FakeTensorMode

        model = build_model(self.config, dtype=dtype)
        with quiet_transformers():
            with torch.device("meta"):
                attach(model, recipe)
            with FakeTensorMode(allow_non_fake_inputs=True):
                model.to_empty(device="cpu")  # some models read the device
                model.tie_weights()
                _set_attention(model, recipe, ranks)
                model.train()
                if recipe.gradient_checkpointing:
                    enable_checkpointing(model)
                yield model

    def _run(self, loss_of: "_WatchedLoss", recipe: Recipe, tokens: int, counted: int, shards: int) -> FakeStep:
        """Run a step on `tokens` tokens. counted: the length for which memory is counted."""
        model = loss_of.model
        layers = decoder_layers(model)
        trained = [parameter for _, parameter in trainable(model)]
        trained_in = {at: _values(weight for _, weight in trainable(layer)) for at, layer in enumerate(layers)}
        all_trained = _values(trained) + self._further(trained_in)
        accumulates = recipe.gradient_accumulation > 1  # an earlier pass has left all gradients
        ids = torch.zeros(recipe.batch_size, tokens, dtype=torch.long)
        counter = loss_of.watch(ids, counted)

        def replace_gradient(parameter: Tensor) -> None:
            """By this process's share in float32."""
            parameter.grad = None
            if not accumulates:
                counter.add("gradients", 4 * parameter.numel() // shards)

        hooks = [parameter.register_post_accumulate_grad_hook(replace_gradient) for parameter in trained]
        for place, layer in enumerate(layers):
            hooks += [
                layer.register_forward_pre_hook(partial(counter.enter, place), with_kwargs=True),
                layer.register_forward_hook(lambda _, given, output: counter.leave(output)),
            ]
        if accumulates:
            counter.add("gradients", 4 * all_trained // shards)
        with counter:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=recipe.mixed_precision == "bf16"):
                loss = loss_of(ids, ids, document_labels=ids if recipe.loss_weighting == "documents" else None)
            counter.begin("head")
            loss.backward(inputs=trained)
        for hook in hooks:
            hook.remove()
        gradients = 0 if accumulates else 4 * self._further(trained_in) // shards
        peaks = {}
        for phase, peak in counter.peaks.items():
            # the backward pass of the layers begins with all activations, and ends with all gradients
            if phase != "embeddings":
                kept = counter.kept["loss" if phase == "loss" else "head"]
                peaks[f"beginning of {phase}"] = peak._replace(activations=peak.activations + self._further(kept))
            if phase in ("layers", "embeddings"):
                peaks[f"end of {phase}"] = peak._replace(gradients=peak.gradients + gradients)
        matrices = [[part.weight for part in layer.modules() if isinstance(part, Linear)] for layer in layers]
        frozen = {at: _values(one for one in few if not one.requires_grad) for at, few in enumerate(matrices)}
        return FakeStep(
            peaks=peaks,
            host=sum(loss_of.moved.values()) + self._further(loss_of.moved),
            trained=all_trained,
            quantizable=sum(frozen.values()) + self._further(frozen),
            layer=max(_values(layer.parameters()) for layer in layers),
            outside=_values(model.parameters()) - _values(layers.parameters()),
        )

    def _further(self, of_layers: Mapping[Any, int]) -> int:
        """The sum over the layers that do not run. of_layers: by the places of those that do."""
        return sum(times * of_layers.get(place, 0) for place, times in enumerate(self.further))


def _values(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


class AllocationCounter(TorchDispatchMode):
    """Counts the bytes of storages allocated inside its context.

    before: tensors that already exist, which are not counted. peaks: the most live bytes in each phase after the
    decoder's forward pass. place: of the layer whose forward pass runs. kept: at the beginnings of phases, the live
    bytes of each layer: its input, and what its forward pass allocated. tokens, counted: the lengths of the run, and
    for which bytes are counted. constant: sizes of dimensions, sorted, of tensors that do not depend on the length.
    """

    def __init__(self, before: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.made = 0
        self.phase = "decoder"
        self.place: int | None = None
        self.kept: dict[str, Counter[int | None]] = {}
        self.alive = Peak()
        self.peaks: dict[str, Peak] = {}
        self.tokens = self.counted = 1
        self.vocabulary = 0
        self.constant: set[tuple[int, ...]] = set()
        self._held: dict[int, tuple[int | None, int]] = {_key(tensor): (None, 0) for tensor in before}

    def size_of(self, tensor: Tensor) -> int:
        """Bytes of the tensor's storage at the counted length."""
        size = tensor.untyped_storage().nbytes()
        # logits exist for a number of tokens that does not depend on the length
        if self.tokens == self.counted or self.vocabulary in tensor.shape or _dimensions(tensor) in self.constant:
            return size
        return round(size * (self.counted / self.tokens) ** (2 if tensor.shape.count(self.tokens) > 1 else 1))

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
                self._note(tensor)
        return result

    def _note(self, tensor: Tensor) -> None:
        key = _key(tensor)
        if key in self._held:
            return
        size = self.size_of(tensor)
        part = "activations" if self.phase == "decoder" else "working"
        self._held[key] = self.place, size
        self.made += size
        self.add(part, size)
        weakref.finalize(tensor.untyped_storage(), self._forget, key, part, size)

    def _forget(self, key: int, part: str, size: int) -> None:
        del self._held[key]
        self.add(part, -size)

    def enter(self, place: int, layer: torch.nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Begin the forward pass of a layer, which also holds its input."""
        if self.phase == "decoder":  # not when the layer is recomputed
            self._hold(place, args[0] if args else named["hidden_states"])
            self.place = place

    def leave(self, output: Any) -> None:
        """End it. The output is the next layer's."""
        if self.phase == "decoder":
            self._hold(None, output[0] if isinstance(output, tuple) else output)
            self.place = None

    def _hold(self, place: int | None, tensor: Tensor) -> None:
        self._held[_key(tensor)] = place, self._held[_key(tensor)][1]

    def begin(self, phase: str) -> None:
        self.phase = phase
        self.kept[phase] = Counter()
        for place, size in self._held.values():
            self.kept[phase][place] += size

    def place_of(self, tensor: Tensor) -> int | None:
        """The place of the layer that holds the tensor."""
        return self._held[_key(tensor)][0]


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _dimensions(tensor: Tensor) -> tuple[int, ...]:
    return tuple(sorted(size for size in tensor.shape if size > 1))


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
    """Sets the counter's phase. moved: bytes moved to CPU memory, by the place of the layer."""

    split_model = _FakeSplit

    def __init__(self, model: "PreTrainedModel", *, offload: bool) -> None:
        super().__init__(model, offload=offload)
        embeddings: Any = model.get_input_embeddings()
        embeddings.register_forward_hook(self._embed)

    def short_lengths(self) -> list[int]:
        """Two lengths that show the memory of every length."""
        # no dimension of a weight, so that tokens × tokens tensors are known
        dimensions = {size for weight in self.model.parameters() for size in weight.shape}
        # more tokens take the head no more memory
        chunks = self._chunk * (1 if self._split.plain_head else _CHUNKS)
        block = getattr(self.config.get_text_config(), "block_size", _BLOCK)
        least = max(chunks, block * block // 32)  # long against the block × block scores of a block
        shorts = range(block, sys.maxsize, block)
        short = next(short for short in shorts if short >= least and not {short, 2 * short} & dimensions)
        return [short, 2 * short]

    def watch(self, ids: Tensor, counted: int) -> AllocationCounter:
        """Start to count. ids: of the step. counted: the length for which memory is counted."""
        weights = list(self.model.parameters())
        self.moved: Counter[int | None] = Counter()
        self.counter = AllocationCounter([*weights, *self.model.buffers(), ids])
        self.counter.constant = {_dimensions(weight) for weight in weights}
        self.counter.vocabulary = self._split.vocabulary
        self.counter.tokens, self.counter.counted = ids.shape[1], counted
        return self.counter

    def hidden(self, ids: Tensor, positions: Tensor | None, packed: bool) -> Any:
        outputs = super().hidden(ids, positions, packed)
        hidden = outputs.last_hidden_state
        self.counter.begin("loss")
        self._enter_at(hidden, "layers")
        return outputs

    def _kept_elsewhere(self, device: torch.device) -> AbstractContextManager:
        def move(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
            self.moved[self.counter.place_of(tensor)] += self.counter.size_of(tensor)
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
            tensor.register_hook(lambda gradient: setattr(self.counter, "phase", phase))

    def _of_plain_head(self, hidden: Tensor, labels: Tensor, weigh: Weighting | None) -> Tensor:
        """Also count what linear_cross_entropy allocates inside: its operands, and the logits of a chunk."""
        loss = super()._of_plain_head(hidden, labels, weigh)
        chunk = min(labels.numel(), self._chunk), self._split.vocabulary
        if weigh is not None:  # the backward pass needs the operands, so they are counted already
            loss.new_empty(chunk)
            return loss
        operands = hidden.float(), self._split.head.weight.float()
        operands[0].new_empty(chunk)
        return loss

    def _chunks(self, hidden: Tensor) -> list[slice]:
        """Run only a few chunks, since further ones take the same memory."""
        return super()._chunks(hidden)[:_CHUNKS]


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

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **arguments: Any
    ) -> tuple[Tensor, None]:
        if ranks > 1:
            windowed = arguments.get("sliding_window") or getattr(module, "sliding_window", None)
            masked = attention == "sdpa" and bool(recipe.packs or windowed)
            return _shared(module, query, key, value, ranks, masked, **arguments), None
        if query.shape[-1] == value.shape[-1]:
            return sdpa_attention_forward(module, query, key, value, mask, **arguments)
        return _memory_efficient(query, key, value, mask, arguments.get("scaling"))

    AttentionInterface.register(_ATTENTION, _last_block(configured) if method_of(configured) else attend)
    AttentionMaskInterface.register(_ATTENTION, mask)
    model.set_attn_implementation(_ATTENTION)


def _memory_efficient(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None
) -> tuple[Tensor, None]:
    """The kernel of GPUs for values narrower than queries (DeepSeek): the CPU's stores tokens × tokens scores."""
    key, value = for_every_head(query, key, value)
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    bias = None if mask is None else mask.to(query.dtype).expand(*query.shape[:3], key.shape[2])
    output = kernel(query, key, value, bias, True, 0.0, mask is None, scale=scale)[0]
    return output.transpose(1, 2).contiguous(), None


def _shared(
    module: Any, query: Tensor, key: Tensor, value: Tensor, ranks: int, masked: bool, **arguments: Any
) -> Tensor:
    """Attention of `ranks` processes that exchange tokens for heads, as ringmaster 0.2.7's strategies/ulysses.py.

    masked: whether it has a mask.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def exchanged(*tensors: Tensor) -> Tensor:
        count, batch, heads, tokens, width = len(tensors), *tensors[0].shape
        stacked = torch.stack(tensors) if count > 1 else tensors[0][None]
        return Exchange.apply(stacked, (count, batch, heads // ranks, tokens * ranks, width))

    key, value = (for_every_rank(tensor, ranks) for tensor in (key, value))
    if query.shape[1] == key.shape[1]:
        query, key, value = exchanged(query, key, value)
    else:
        query, (key, value) = exchanged(query)[0], exchanged(key, value)
    if masked:
        pairs = (len(query), 1, query.shape[2], query.shape[2])
        # of documents and order, distances, and those within the window
        mask, *others = (torch.empty(pairs, dtype=dtype) for dtype in (torch.bool, torch.int64, torch.bool))
        del others
        grouped = query.shape[1] != key.shape[1]
        output = scaled_dot_product_attention(query, key, value, mask, enable_gqa=grouped).transpose(1, 2)
    else:
        output = sdpa_attention_forward(module, query, key, value, None, **arguments)[0]
    batch, tokens, heads, width = output.shape
    return Exchange.apply(output, (batch, tokens // ranks, heads * ranks, width))


class Exchange(torch.autograd.Function):
    """Allocates what ringmaster's comm.py does: the tensor ordered by process, the one received, and the result."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
        ctx.shape = tensor.shape
        ordered, received = (torch.empty_like(tensor) for _ in range(2))
        result = tensor.new_empty(shape)
        del ordered, received
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return Exchange.forward(ctx, gradients[0], ctx.shape), None


def _last_block(name: str) -> Callable[..., Any]:
    """A distance method's attention that computes only the last block, since all blocks take the same memory."""

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, *, scaling: float = 1.0, **arguments: Any
    ) -> tuple[Tensor, None]:
        kernel = make_kernel(module, name, arguments.get("sliding_window"))
        result = kernel(query, key, value, first_query=0, first_key=0, scaling=scaling, last_block_alone=True)
        return result.transpose(1, 2).contiguous(), None

    return attend
