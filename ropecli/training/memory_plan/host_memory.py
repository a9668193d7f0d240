"""Estimates the main memory that training needs on one machine: at loading, in training and at saving."""

from dataclasses import asdict, dataclass

from ropecli.training.memory_plan.estimate import Engine, MemoryEstimate, MemoryEstimator
from ropecli.training.recipe import Recipe
from ropecli.training.sharded_weights import is_converted

GPUS_PER_HOST = 8
_FILE = 5 * 10**9
"""Bytes of a weight file, as checkpoints on the Hub are usually cut."""


@dataclass(frozen=True)
class HostMemory:
    """Bytes over all processes of one machine.

    Python and its libraries are not counted, nor is what the system caches of the weight files.
    loading: the weights that processes read. training: activations that are kept in main memory. saving: the result.
    """

    loading: int = 0
    training: int = 0
    saving: int = 0

    @property
    def most(self) -> int:
        return max(asdict(self).values())


def estimate_host(
    estimator: MemoryEstimator, estimate: MemoryEstimate, recipe: Recipe, engine: Engine, world: int
) -> HostMemory:
    """estimate: of one GPU. world: number of GPUs, of which a machine has at most eight."""
    processes = min(world, GPUS_PER_HOST)
    sharded = engine in ("fsdp2", "ulysses") and not is_converted(estimator.model)
    return HostMemory(
        loading=_loading(estimator, recipe, engine, processes, world, sharded=sharded),
        training=estimate.host * processes,
        saving=_saving(estimator, recipe, estimate.trained, sharded=sharded),
    )


def _loading(
    estimator: MemoryEstimator, recipe: Recipe, engine: Engine, processes: int, world: int, *, sharded: bool
) -> int:
    largest = max(parameter.numel() for parameter in estimator.model.parameters())
    if sharded and engine == "fsdp2":
        return 4 * largest * processes // world  # tensor by tensor, each process its own part
    if sharded or recipe.adapter == "qlora":
        return 4 * largest * processes  # tensor by tensor
    if engine in ("fsdp2", "ulysses"):
        return 4 * estimator.shape.total  # the main process converts the tensors and sends them to the others
    return (4 if recipe.adapter == "none" else 2) * estimator.shape.total * processes


def _saving(estimator: MemoryEstimator, recipe: Recipe, trained: int, *, sharded: bool) -> int:
    """On the main process: the trained weights in float32, then cast to the source's dtype."""
    total, item = estimator.shape.total, estimator.item
    cast = item * total if item < 4 else 0
    if recipe.adapter == "none":
        return min(item * total, _FILE) if sharded else 4 * total + cast
    own = 8 * trained if sharded else 8 * trained + 2 * total
    return own if recipe.save == "adapter" else own + 4 * total + cast
