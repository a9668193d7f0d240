"""`ropecli check-served`: says whether a running server applies the checkpoint's scaling."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Unpack

from annotated_doc import Doc

from ropecli import options
from ropecli.config.findings import Finding
from ropecli.errors import MethodError, RopecliError, quoted
from ropecli.messages import say_opening
from ropecli.options import DATA, TOKENS, Length, loading_of
from ropecli.signature import Flag, Panel, command

if TYPE_CHECKING:
    from ropecli.evaluation.served import Answers, Verdict

SERVER = Panel("Server")
_STATUS = {"served": 0, "not served": 3, "unclear": 4}
_ENGINES_BY_OWNER = {"vllm": "vllm", "llamacpp": "llama.cpp", "sglang": "sglang"}
"""The name of an engine in `ropecli export`, by what a server says of itself."""


@dataclass(frozen=True)
class ServedCheck:
    """Result of `ropecli check-served`.

    verdict: which scaling the server computes. answers: the server's side. max_length: tokens that it accepts, None if
    it does not say. fix: the command that serves the checkpoint's scaling, empty if it is served. notes: remarks of
    `ropecli export` on it. findings: those of `ropecli inspect` that change what is computed.
    """

    url: str
    model: str
    engine: str | None
    checkpoint: str
    verdict: "Verdict"
    answers: "Answers"
    max_length: int | None
    fix: str = ""
    notes: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()

    @property
    def exit_status(self) -> int:
        """0: the checkpoint's scaling is served. 3: it is not. 4: it cannot be told."""
        return _STATUS[self.verdict.verdict]

    def as_json(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict.verdict,
            "reason": self.verdict.reason,
            "nearest": self.verdict.nearest,
            "checkpoint": self.checkpoint,
            "url": self.url,
            "model": self.model,
            "engine": self.engine,
            "max_length": self.max_length,
            "compared": "prompt" if self.answers.gives_losses else "next token",
            "lengths": sorted(self.answers.losses or self.answers.next_tokens),
            "after_single": self.verdict.after_single,
            "readings": [asdict(comparison) for comparison in self.verdict.comparisons],
            "fix": self.fix or None,
            "notes": list(self.notes),
            "findings": [finding.as_json() for finding in self.findings],
        }


class CheckOptions(options.LoadingOptions, options.ServerOptions, total=False): ...


@command
def check_served(
    url: Annotated[str, Doc("Address of a server with OpenAI's completions API, such as http://localhost:8000.")],
    *,
    checkpoint: Annotated[
        str,
        Flag("--checkpoint", "-c"),
        Doc("The checkpoint that it should serve: a folder or a Hub id."),
        options.IS_CHECKPOINT,
    ],
    length: Annotated[
        Length | None,
        TOKENS,
        Doc("Longest prompt. Default: twice the pretraining length, if the checkpoint and the server read that much."),
        DATA,
    ] = None,
    data: Annotated[
        str,
        Flag("--data", "-d"),
        Doc("Text of the prompts: 'demo', a file, a folder or a Hub dataset."),
        DATA,
        options.IS_DATA,
    ] = "demo",
    revision: options.Revision = None,
    **shared: Unpack[CheckOptions],
) -> ServedCheck:
    """Check whether a running server applies the scaling.

    Sends the same tokens to the server and to transformers, and compares log-probabilities within and beyond the
    pretraining length: with the checkpoint as it is, unpatched, and with half and double its factor.

    Exit status: 0 the server applies the checkpoint's scaling, 3 it does not, 4 it cannot be told.
    """
    from ropecli.checkpoint.opening import open_checkpoint
    from ropecli.engines.engine_export import export_checkpoint
    from ropecli.engines.engine_table import read_input
    from ropecli.evaluation.completions import endpoint_of

    loading = loading_of(shared)
    opened = open_checkpoint(checkpoint, weights=True, revision=revision)
    engine_input = read_input(opened)  # refuses what no engine computes
    endpoint = endpoint_of(url, shared)

    say_opening(checkpoint)
    from ropecli.data.sources import Source
    from ropecli.evaluation import served  # torch is loaded only once the server answers
    from ropecli.evaluation.subject import LiveReaderFactory
    from ropecli.live.loading import load_tokenizer

    tokenizer = load_tokenizer(opened)
    subjects = served.alternatives(opened)
    most = engine_input.length
    if endpoint.model.max_length:
        most = min(most, endpoint.model.max_length - 1)
    # a server that reads the context length takes a prompt of one token less, and answers one
    longest = length or min(most, engine_input.length - 1, 2 * engine_input.original_length)
    if longest > most:
        raise MethodError(f"--length is {longest}; the checkpoint and the server read at most {most} tokens.")
    ids = served.read_tokens(Source(data).texts(), tokenizer, longest)
    gives_losses = endpoint.gives_prompt_losses(ids)  # before the long reading
    expected = served.make_expected(subjects, LiveReaderFactory(loading, exact=True), tokenizer, ids)
    answers, verdict = served.ask(endpoint, expected, tokenizer, gives_losses=gives_losses)
    engine, fix = _ENGINES_BY_OWNER.get(endpoint.model.owner), ""
    notes: tuple[str, ...] = ()
    if verdict.verdict != served.SERVED:
        fix = quoted("ropecli", "export", checkpoint, "--engine", engine or "ENGINE")
        if engine:
            try:
                exported = export_checkpoint(opened, engine)
                fix, notes = exported.command, (*exported.cannot, *exported.notes)
            except RopecliError as error:
                notes = (str(error),)
    served_by, findings = endpoint.model, engine_input.findings
    return ServedCheck(
        endpoint.url, served_by.name, engine, opened.name, verdict, answers, served_by.max_length, fix, notes, findings
    )
