"""ropecli passkey: whether a model finds a number among sentences that say nothing, by length and depth."""

from ropecli.cli import evaluation, options, retrieval, scaling


def command(
    checkpoint: options.Checkpoint,
    lengths: retrieval.Lengths = retrieval.LENGTHS,
    depths: retrieval.Depths = retrieval.DEPTHS,
    trials: retrieval.Trials = 5,
    mode: retrieval.Mode = "rank",
    candidates: retrieval.Candidates = None,
    seed: retrieval.Seed = 0,
    method: scaling.InMemory = None,
    factor: scaling.Factor = None,
    settings: scaling.Settings = None,
    factors_file: scaling.FactorsFile = None,
    original_length: scaling.OriginalLength = None,
    chunk: evaluation.Chunk = None,
    dtype: evaluation.Dtype = "auto",
    device: evaluation.Device = "auto",
    attn: evaluation.Attn = "auto",
    output: retrieval.Output = None,
    plot: retrieval.Plot = None,
    revision: options.Revision = None,
    as_json: options.AsJson = False,
) -> None:
    """Look for a pass key in a long text, at several lengths and depths.

    The task of Mohtashami and Jaggi (2023, arXiv:2305.16300): the key stands among sentences that are repeated.

    Several processes, started by `accelerate launch -m ropecli passkey ...`, share the prompts.
    """
    from ropecli.evaluation.retrieval.haystack import repeat_sentences
    from ropecli.evaluation.retrieval.prompts import RetrievalTask
    from ropecli.evaluation.retrieval.templates import PASSKEY, PASSKEY_FILLER

    request = retrieval.make_request(
        lengths,
        depths,
        mode,
        chunk,
        candidates,
        trials=trials,
        seed=seed,
        output=output,
        plot=plot,
        as_json=as_json,
    )
    subject = retrieval.open_subject(checkpoint, revision, method, factor, settings, factors_file, original_length)

    def make_task(pieces):
        haystack = repeat_sentences(PASSKEY_FILLER, pieces, request.lengths[-1])
        return RetrievalTask("passkey", PASSKEY, haystack, pieces, candidates=request.candidates, seed=seed)

    filler = {"filler": PASSKEY_FILLER}
    retrieval.run(request, subject, "repeated sentences", make_task, filler, dtype=dtype, device=device, attn=attn)
