"""run_fsdp2.py ARGUMENTS: `ropecli ARGUMENTS` on CPU processes under torchrun, by Accelerate's own FSDP2.

Accelerate takes FSDP for something of GPUs, though torch splits weights over gloo as well: here it is told to continue.
"""

from unittest import mock

from ropecli.cli.app import main
from ropecli.training import distributed


def forced(*, mixed_precision, **options):
    """As on GPUs with the configuration 8-gpu-fsdp2."""
    from accelerate import DistributedType, FullyShardedDataParallelPlugin
    from accelerate.state import PartialState

    accelerator = distributed.make_accelerator(mixed_precision=mixed_precision, **options)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        cpu_ram_efficient_loading=True,
        state_dict_type="SHARDED_STATE_DICT",
    )
    if mixed_precision != "none":
        plugin.set_mixed_precision(mixed_precision)
    accelerator.state.fsdp_plugin = plugin
    accelerator.state.distributed_type = DistributedType.FSDP
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    assert accelerator.is_fsdp2
    return accelerator


if __name__ == "__main__":
    with mock.patch("ropecli.training.finetuning.make_accelerator", forced):
        main()
