"""run_fsdp2.py ARGUMENTS: `ropecli ARGUMENTS` on CPU processes under torchrun, by Accelerate's own FSDP2.

Accelerate takes FSDP for something of GPUs, though torch splits weights over gloo as well: here it is told to continue.
"""

from unittest import mock

from ropecli.cli.app import main
from ropecli.training.launch import Launch, start_launch


def forced(recipe, **options):
    """As on GPUs with the configuration 8-gpu-fsdp2."""
    from accelerate import DistributedType, FullyShardedDataParallelPlugin
    from accelerate.state import PartialState

    accelerator = start_launch(recipe, **options).accelerator
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        cpu_ram_efficient_loading=True,
        state_dict_type="SHARDED_STATE_DICT",
    )
    if recipe.mixed_precision != "none":
        plugin.set_mixed_precision(recipe.mixed_precision)
    accelerator.state.fsdp_plugin = plugin
    accelerator.state.distributed_type = DistributedType.FSDP
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    assert accelerator.is_fsdp2
    return Launch.of(accelerator, recipe.context_parallel_size)


if __name__ == "__main__":
    with mock.patch("ropecli.training.finetuning.start_launch", forced):
        main()
