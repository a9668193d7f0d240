"""Runs one training step on tensors without storage, and counts the live bytes at its peaks.

The step is the model's own forward and backward pass with our loss, under torch's FakeTensorMode, which tracks shapes,
dtypes and what autograd saves, without computing values. No per-architecture tables are needed. Workspace inside an
operation is not counted.

Memory is linear in the number of layers of each kind. Unless there are few layers, the step runs once with one layer of
each kind, then once per kind with a second layer of it; the difference counts for every further layer.

Some layers loop over the tokens in Python (the delta rule of Qwen3-Next): at 262,144 tokens that would take minutes for
every setup. Their step runs on short sequences, where each tensor counts as at the full length: one of a weight's shape
as it is, others times the ratio of the lengths, tokens × tokens scores and masks times its square. Other constant
tensors then count too much, in inverse proportion to the short length: a second one, twice as long, corrects that.
"""

import copy
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from ropecli.attention.attention_function import make_kernel
from ropecli.attention.head_layout import for_every_head
from ropecli.config.saved_remapping import method_of
from ropecli.errors import CheckpointError, RopecliError, reason_of
from ropecli.live.lm_head import SplitModel
from ropecli.live.skeleton import decoder_layers, keep_layers, kinds_of_layers
from ropecli.live.stock_transformers import build_model, quiet_transformers
from ropecli.training.adapters import attach, trainable
from ropecli.training.launch import for_every_rank
from ropecli.training.loss import NextTokenLoss, Weighting, enable_checkpointing
from ropecli.training.recipe_schema import Recipe
from ropecli.training.tiled_mlp import Tileable, apply_tiles, find_tileable

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ATTENTION = "ropecli-memory-plan"
_BLOCKS = (64, 256, 1024)
"""Tokens that loops may take at once (64: gated delta rule, 256: lightning attention)."""
_PROBED = 1024
"""Tokens to find loops with: windows and blocks of attention are full."""
_CHUNKS = 3
"""Chunks to run of a head, and tiles of an MLP, that are recomputed one by one."""


@dataclass(frozen=True)
class Largest:
    """The largest tensor of a step. size: bytes. pairs: whether it has tokens × tokens values. module: the class of the
    module that allocated it.
    """

    size: int = 0
    pairs: bool = False
    module: str = ""


class Peak(NamedTuple):
    """Live bytes. activations: allocated by the decoder's forward pass. working: allocated after it."""

    activations: int = 0
    working: int = 0
    gradients: int = 0


class FakeStep(NamedTuple):
    """Memory of a step in addition to weights and optimizer state, on one process.

    peaks: the peak of each phase. host: bytes of activations moved to CPU memory. largest: of the runs with few layers.

    Counts of values: trained; quantizable, in frozen matrices of layers; layer, in the largest layer; outside, not in
    any layer.
    """

    peaks: dict[str, Peak]
    host: int
    trained: int
    quantizable: int
    layer: int
    outside: int
    largest: Largest


class FakeSteps:
    """Runs steps of a model on the meta device. kinds: the layers of each kind."""

    def __init__(self, model: "PreTrainedModel") -> None:
        self.model = model
        self.kinds = kinds_of_layers(model)
        self._short: int | None = None

    @cached_property
    def tileable(self) -> Tileable:
        """The parts of layers that tiled_mlp tiles."""
        return find_tileable(self.model)

    def run(self, recipe: Recipe, length: int, dtype: torch.dtype, shards: int, ranks: int = 1) -> FakeStep:
        """Run the step, or extrapolate it from short lengths.

        length: tokens per sequence on one process. dtype: of the weights, except an adapter's. shards: number of
        processes that share the gradients. ranks: number of processes that share the sequence.
        Raises CheckpointError if a model needs real values.
        """
        try:
            config = self.model.config
            if self._short is None:
                self._short = _Step(config, recipe).short_length([layers[0] for layers in self.kinds])
            short, tileable = self._short, self.tileable if recipe.tiled_mlp else frozenset()
            step = _Step(config, recipe, dtype, shards, ranks, tileable)
            if not short or length <= 4 * short:
                return step.run(self.kinds, [length], counted=length)[0]
            # other tensors take a, constant ones c: once = a + c · length / short, twice = a + c · length / (2 · short)
            once, twice = step.run(self.kinds, [short, 2 * short], counted=length)
            share = 2 * short / length
            return _combine(lambda first, two: 2 * two - first + round((first - two) * share), once, twice)
        except RopecliError:
            raise
        except Exception as error:  # a model that reads values fails in its own way
            raise CheckpointError(
                f"Cannot estimate the memory of {self.model.config.model_type}: it does not run on fake tensors: "
                f"{reason_of(error)}"
            ) from error


class _Step(NamedTuple):
    """A step of a model. config: the model's. dtype, shards, ranks: see FakeSteps.run. tileable: the parts to tile."""

    config: Any
    recipe: Recipe
    dtype: torch.dtype = torch.float32
    shards: int = 1
    ranks: int = 1
    tileable: Tileable = frozenset()

    def short_length(self, layers: list[int]) -> int:
        """A length that shows the memory of every length, or 0 if none of these layers loops over the tokens."""
        with self.fake_model(layers) as model, torch.no_grad():
            loss_of = _WatchedLoss(model, offload=False)
            operations = loss_of.operations(2 * _PROBED)
            if loss_of.operations(_PROBED) == operations:
                return 0
            # a part of a block takes as many operations as a whole one
            block = next(block for block in _BLOCKS if loss_of.operations(2 * _PROBED - block) < operations)
            # no dimension of a weight, so that tokens × tokens tensors are known
            dimensions = {size for weight in model.parameters() for size in weight.shape}
            shorts = range(block, sys.maxsize, block)
            # more tokens take the head no more memory
            chunks = loss_of._chunk * (1 if loss_of._split.plain_head else _CHUNKS)
            least = max(chunks, block * block // 32)  # long against the block × block scores of a block
            return next(short for short in shorts if short >= least and not {short, 2 * short} & dimensions)

    def run(self, kinds: list[list[int]], lengths: list[int], counted: int) -> list[FakeStep]:
        """Run the step with a few layers, and extrapolate to all layers. One result for each length.

        kinds: the layers of each kind. counted: the length for which memory is counted.
        """
        every = sorted(chain(*kinds))
        if len(every) <= 2 * (len(kinds) + 1):  # all layers at once are as fast
            return self._run(every, lengths, counted)
        first = [layers[0] for layers in kinds]
        totals = bases = self._run(first, lengths, counted)
        for layers in kinds:
            if len(layers) > 1:
                more = self._run(sorted([*first, layers[1]]), lengths, counted)

                def add(total: int, with_more: int, without: int, times: int = len(layers) - 1) -> int:
                    return total + times * (with_more - without)

                totals = [_combine(add, *steps) for steps in zip(totals, more, bases, strict=True)]
        return totals

    @contextmanager
    def fake_model(self, layers: list[int]) -> Iterator["PreTrainedModel"]:
        """A model with only some of its layers, on fake tensors, and their mode."""
        from torch._subclasses.fake_tensor import FakeTensorMode

        with quiet_transformers(), torch.device("meta"):
            model = build_model(_independent_of_length(self.config), dtype=self.dtype)
            keep_layers(model, layers)
            attach(model, self.recipe)
        with quiet_transformers(), FakeTensorMode(allow_non_fake_inputs=True):
            model.to_empty(device="cpu")  # some models read the device
            model.tie_weights()
            _set_attention(model, self.recipe, self.ranks)
            model.train()
            yield model

    def _run(self, layers: list[int], lengths: list[int], counted: int) -> list[FakeStep]:
        """Run the steps of a model with only some of its layers."""
        recipe, shards, steps = self.recipe, self.shards, []
        with self.fake_model(layers) as model:
            if recipe.gradient_checkpointing:
                enable_checkpointing(model)
            if recipe.tiled_mlp:
                apply_tiles(model, self.tileable, _CHUNKS)
            trained = [parameter for _, parameter in trainable(model)]
            modules = decoder_layers(model)
            in_layers = {id(parameter) for parameter in modules.parameters()}
            matrices = [module.weight for module in modules.modules() if isinstance(module, torch.nn.Linear)]
            loss_of = _WatchedLoss(model, offload=recipe.offload_activations)
            accumulates = recipe.gradient_accumulation > 1

            def replace_gradient(parameter: Tensor) -> None:
                """By this process's share in float32, which an earlier pass may have left already."""
                parameter.grad = None
                if not accumulates:
                    loss_of.counter.add("gradients", 4 * parameter.numel() // shards)

            for parameter in trained:
                parameter.register_post_accumulate_grad_hook(replace_gradient)
            for length in lengths:
                ids = torch.zeros(recipe.batch_size, length, dtype=torch.long)
                counter = loss_of.watch(ids, counted)
                if accumulates:
                    counter.add("gradients", sum(4 * parameter.numel() // shards for parameter in trained))
                with counter, _named_modules(counter):
                    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=recipe.mixed_precision == "bf16"):
                        loss = loss_of(ids, ids, document_labels=ids if recipe.loss_weighting == "documents" else None)
                    counter.phase = "head"
                    loss.backward(inputs=trained)
                steps.append(
                    FakeStep(
                        peaks=counter.peaks,
                        host=loss_of.moved,
                        trained=sum(weight.numel() for weight in trained),
                        quantizable=sum(weight.numel() for weight in matrices if not weight.requires_grad),
                        layer=max(sum(weight.numel() for weight in layer.parameters()) for layer in modules),
                        outside=sum(weight.numel() for weight in model.parameters() if id(weight) not in in_layers),
                        largest=counter.largest,
                    )
                )
        return steps


def _combine(of_numbers: Callable[..., int], *steps: FakeStep) -> FakeStep:
    return tree_map(lambda value, *more: value if isinstance(value, Largest) else of_numbers(value, *more), *steps)


@contextmanager
def _named_modules(counter: "AllocationCounter") -> Iterator[None]:
    """Tell the counter which module runs."""

    def enter(module: torch.nn.Module, given: Any) -> None:
        counter.modules.append(type(module).__name__)

    def leave(module: torch.nn.Module, given: Any, output: Any) -> None:
        counter.modules.pop()

    hooks = register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class AllocationCounter(TorchDispatchMode):
    """Counts the bytes of storages allocated inside its context.

    before: tensors that already exist, which are not counted. peaks: the most live bytes in each phase after the
    decoder's forward pass. operations: their number. modules: the classes of those that run now. tokens, counted: the
    lengths of the run, and for which bytes are counted. constant: sizes of dimensions, sorted, of tensors that do not
    depend on the length.
    """

    def __init__(self, before: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.made = 0
        self.phase = "decoder"
        self.alive = Peak()
        self.peaks: dict[str, Peak] = {}
        self.largest = Largest()
        self.modules: list[str] = [""]
        self.operations = 0
        self.tokens = self.counted = 1
        self.vocabulary = 0
        self.constant: set[tuple[int, ...]] = set()
        self._known = {tensor.untyped_storage()._cdata for tensor in before}

    def size_of(self, tensor: Tensor) -> int:
        """Bytes of the tensor's storage at the counted length."""
        size = tensor.untyped_storage().nbytes()
        # logits exist for a number of tokens that does not depend on the length
        if self.tokens == self.counted or self.vocabulary in tensor.shape or _dimensions(tensor) in self.constant:
            return size
        return round(size * (self.counted / self.tokens) ** (2 if self._has_pairs(tensor) else 1))

    def _has_pairs(self, tensor: Tensor) -> bool:
        # gpt-oss' scores have a column more, for its sinks
        return sum(self.tokens <= size <= self.tokens + 1 for size in tensor.shape) > 1

    def add(self, part: str, size: int) -> None:
        self.alive = self.alive._replace(**{part: getattr(self.alive, part) + size})
        if self.phase != "decoder":
            self.peaks[self.phase] = max(self.peaks.get(self.phase, Peak()), self.alive, key=sum)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.operations += 1
        if func is torch.ops.aten._grouped_mm.default:
            result: Any = _grouped_product(*args)
        else:
            result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self._note(tensor)
        return result

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = self.size_of(tensor)
        # of a short run, tensors of a block of tokens count more often, but are no larger
        if size > self.largest.size and (self.tokens == self.counted or self.tokens in tensor.shape):
            self.largest = Largest(size, self._has_pairs(tensor), self.modules[-1])
        part = "activations" if self.phase == "decoder" else "working"
        self._known.add(key)
        self.made += size
        self.add(part, size)
        weakref.finalize(storage, self._forget, key, part, size)

    def _forget(self, key: int, part: str, size: int) -> None:
        self._known.remove(key)
        self.add(part, -size)


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
    """Sets the counter's phase. moved: bytes moved to CPU memory."""

    split_model = _FakeSplit

    def __init__(self, model: "PreTrainedModel", *, offload: bool) -> None:
        super().__init__(model, offload=offload)
        embeddings: Any = model.get_input_embeddings()
        embeddings.register_forward_hook(lambda module, given, output: self._enter_at(output, "embeddings"))

    def watch(self, ids: Tensor, counted: int) -> AllocationCounter:
        """Start to count. ids: of the step. counted: the length for which memory is counted."""
        weights = list(self.model.parameters())
        self.moved = 0
        self.counter = AllocationCounter([*weights, *self.model.buffers(), ids])
        self.counter.constant = {_dimensions(weight) for weight in weights}
        self.counter.vocabulary = self._split.vocabulary
        self.counter.tokens, self.counter.counted = ids.shape[1], counted
        return self.counter

    def operations(self, tokens: int) -> int:
        """Number of operations of the decoder's forward pass."""
        with AllocationCounter() as counter:
            self._split.decode(torch.zeros(1, tokens, dtype=torch.long))
        return counter.operations

    def hidden(self, ids: Tensor, positions: Tensor | None, packed: bool) -> Any:
        outputs = super().hidden(ids, positions, packed)
        hidden = outputs.last_hidden_state
        self.counter.phase = "loss"
        self._enter_at(hidden, "layers")
        return outputs

    def _kept_elsewhere(self, device: torch.device) -> AbstractContextManager:
        def move(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
            self.moved += self.counter.size_of(tensor)
            return tensor.shape, tensor.dtype

        def bring_back(moved: tuple[torch.Size, torch.dtype]) -> Tensor:
            return torch.empty(moved[0], dtype=moved[1])

        return torch.autograd.graph.saved_tensors_hooks(move, bring_back) if self.offload else nullcontext()

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
