"""Renders `ropecli patch`."""

from typing import TYPE_CHECKING

from ropecli.cli.terminal import show_changes, tell

if TYPE_CHECKING:
    from ropecli.commands.patch import PatchResult, RevertResult


def render(result: "PatchResult | RevertResult") -> None:
    from ropecli.commands.patch import RevertResult

    if isinstance(result, RevertResult):
        _render_revert(result)
        return
    plan, output = result.plan, result.output
    factor = f"{plan.spec.method} ×{plan.spec.factor:g}"
    if output is None:
        tell(f"{plan.source.name}: {factor}, {plan.target_length} tokens")
        show_changes("config.json", plan.changes)
        return
    tell(f"{plan.source.name} → {output}: {factor}, {plan.target_length} tokens")
    if result.proved:
        tables = "table agrees" if result.proved == 1 else "tables agree"
        tell(f"proved: {result.proved} live rotary {tables} with the mathematics")
    else:
        tell("not proved (--no-verify): that the live rotary tables agree with the mathematics")
    if plan.remaps:
        tell("proved: on a small model of this architecture, the attention agrees with the model's own")


def _render_revert(result: "RevertResult") -> None:
    reversal = result.reversal
    if result.output is not None:
        tell(f"{reversal.source.name} → {result.output}: as it was before its patches")
        return
    show_changes("config.json", reversal.changes)
    if reversal.tokenizer_changes:
        show_changes("tokenizer_config.json", reversal.tokenizer_changes)
