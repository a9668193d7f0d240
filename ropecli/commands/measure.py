"""The commands that measure: `ropecli eval-ppl`, `compare`, `needle` and `ruler`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from ropecli import options
from ropecli.atomic import optional_path, refuse_unwritable
from ropecli.errors import MethodError
from ropecli.messages import say_opening
from ropecli.names import DEMO
from ropecli.options import loading_of
from ropecli.signature import command

if TYPE_CHECKING:
    from ropecli.evaluation.report import Report
    from ropecli.evaluation.subject import ReaderFactory


class EvalPplOptions(options.InMemoryOptions, options.PerplexityOptions, total=False): ...


class CompareOptions(options.ParameterOptions, options.PerplexityOptions, total=False): ...


@dataclass(frozen=True)
class Reports:
    """The result of a measuring command. reports: the first is compared with. plot: the drawn file."""

    reports: "Sequence[Report]"
    plot: Path | None = None

    def as_json(self) -> dict[str, Any]:
        from ropecli.evaluation.kinds import as_json

        return as_json(self.reports)


@command
def eval_ppl(checkpoints: options.CheckpointNames, **shared: Unpack[EvalPplOptions]) -> Reports:
    """Measure perplexity, or recall, at several context lengths.

    With 95% intervals over documents, which several processes share: `accelerate launch -m ropecli eval-ppl ...`.
    """
    return _measure(shared["protocol"], checkpoints, shared)


@command
def compare(
    checkpoints: options.CheckpointNames,
    *,
    methods: options.Methods = ("none", "linear", "ntk", "dynamic", "llama3", "ntk-by-parts", "yarn"),
    factors: options.Factors = (4,),
    **shared: Unpack[CompareOptions],
) -> Reports:
    """Compare methods and checkpoints by perplexity, or recall.

    Loads each model once and patches it in memory. With several checkpoints, tries every method on each.
    """
    return _measure(shared["protocol"], checkpoints, {"methods": methods, "factors": factors, **shared})


@command
def needle(checkpoints: options.CheckpointNames, **shared: Unpack[options.NeedleOptions]) -> Reports:
    """Measure whether a model finds a needle in a long text.

    By length and depth. The key is a random number of five digits.

    Several processes, started by `accelerate launch -m ropecli needle ...`, share the prompts.
    """
    if shared["style"] == "passkey" and shared["data"] != DEMO:
        raise MethodError("--data has no effect with --style passkey, which repeats its own sentences. Remove --data.")
    return _measure("needle", checkpoints, shared)


@command
def ruler(checkpoints: options.CheckpointNames, **shared: Unpack[options.RulerOptions]) -> Reports:
    """Find the effective context length, with RULER's tasks.

    The effective length is the longest one up to which the mean score stays at or above --threshold.

    Several processes, started by `accelerate launch -m ropecli ruler ...`, share the prompts.
    """
    return _measure("ruler", checkpoints, shared)


def _measure(task: str, checkpoints: Sequence[str], shared: Mapping[str, Any]) -> Reports:
    """Check the options before torch is imported, measure, and write the outputs. task: needle, ruler or a protocol."""
    from ropecli.resume import refuse_interrupted, remove_state

    specs, output, plot = None, optional_path(shared["output"]), optional_path(shared["plot"])
    if shared["methods"] is not None:
        from ropecli.checkpoint.scalings import method_specs

        factors = sorted(set(shared["factors"] or ()))
        specs = method_specs(shared["methods"], factors, shared["settings"], shared["factors_file"])
    refuse_unwritable(output, plot, overwrite=shared["overwrite"])
    refuse_interrupted(output, shared["resume"])
    say_opening(*checkpoints)
    from ropecli.evaluation.driver import make_reports
    from ropecli.evaluation.jobs import make_jobs
    from ropecli.evaluation.processes import join_workers
    from ropecli.evaluation.report import write_report
    from ropecli.evaluation.subject import open_subjects
    from ropecli.evaluation.tasks.needle import make_needle
    from ropecli.evaluation.tasks.perplexity import make_perplexity
    from ropecli.evaluation.tasks.recall import make_recall
    from ropecli.evaluation.tasks.ruler import make_ruler

    make_task: Any = {"needle": make_needle, "ruler": make_ruler, "recall": make_recall}.get(task, make_perplexity)
    factory = _reader_factory(shared)
    subjects = open_subjects(checkpoints, specs, shared, weights=factory.loads_weights)
    workers = join_workers()
    jobs = make_jobs(subjects, partial(make_task, shared), shared["lengths"])
    result = Reports(make_reports(jobs, factory, output, workers), plot)
    if plot and workers.rank == 0:
        from ropecli.reporting.figures.plots import draw_lengths
        from ropecli.reporting.figures.style import save

        save(draw_lengths(result.reports), plot)
    if output and workers.rank == 0:
        write_report(output, result.as_json())
        remove_state(output)
    return result


def _reader_factory(options: Mapping[str, Any]) -> "ReaderFactory":
    """A model in this process, or a server."""
    loading: Any = loading_of(options)  # type: ignore[arg-type]
    url, engine, batch_size = options["endpoint"], options["engine"], options.get("batch_size", 1)
    if engine and url:
        raise MethodError("--engine and --endpoint exclude each other. Remove one.")
    if url is None and engine is None:
        from ropecli.evaluation.subject import LiveReaderFactory

        return LiveReaderFactory(loading, chunk=options["chunk"], batch_size=batch_size)
    arguments = dict(options["engine_arg"] or {})
    if engine and (dtype := loading.pop("dtype")) != "auto":
        arguments["dtype"] = dtype
    if (
        any(value not in ("auto", None) for value in (*loading.values(), options["chunk"], options["baseline"]))
        or batch_size > 1
    ):
        raise MethodError(
            f"With {'--engine' if engine else '--endpoint'} ropecli loads no model. Remove the options for loading, "
            "--chunk, --batch-size and --baseline."
        )
    if url is None:
        from ropecli.engines.engine_export import vllm_overrides
        from ropecli.evaluation.readers.vllm_reader import VllmReaderFactory

        return VllmReaderFactory(arguments, vllm_overrides)
    from ropecli.evaluation.completions import endpoint_of

    endpoint = endpoint_of(url, options)
    from ropecli.evaluation.readers.endpoint import EndpointReaderFactory

    return EndpointReaderFactory(endpoint, batch_size=options["requests"] or 16)
