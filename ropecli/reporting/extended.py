"""What `extend` found and trained, from the content of extend.json, for the terminal and the page."""

from collections.abc import Mapping
from math import ceil
from typing import Any

from ropecli.errors import quoted
from ropecli.evaluation.report import Change, Copies
from ropecli.evaluation.verdict import are_few
from ropecli.evaluation.wording import RECALL_NOTE, change_words, copies_sentences, recall_words
from ropecli.names import ADAPTERS
from ropecli.table import Bold, Table


def candidates_table(record: Mapping[str, Any]) -> Table:
    """What was trained, then the candidates, best first."""
    rows, trained = [], record["trained"]
    for row in [*([trained] if trained else []), *record["measured"]]:
        written = row is trained if trained else row["label"] == record["chosen"]
        label = f"{row['label']}, trained" if row is trained else row["label"]
        label = Bold(label) if written else label
        rows.append([label, str(row["documents"]), _recall(row), _cost(row)])
    heads = ["candidate", "documents", f"recall at {record['length']:,}", f"cost at {record['short_length']:,}"]
    title = f"{record['checkpoint']} to {record['length']:,} tokens"
    return Table(title, heads, rows, [f"{RECALL_NOTE}. cost: change of perplexity; in brackets 95% intervals"])


def verdict(record: Mapping[str, Any]) -> list[str]:
    """The choice with its cost, the reason, and the gain on far copies; or why nothing was chosen."""
    length, limit, rows = record["length"], record["max_short_cost"], record["measured"]
    within = "" if limit is None else f" at a cost of {limit:g}% or less"
    chosen = _chosen(record)
    if record["trained"]:
        return [*_trained_sentences(record), *_text_sentences(record.get("copies"))]
    if chosen is None:
        return [f"No candidate certainly gains from text {length:,} tokens back{within}: nothing is written."]
    cost = f"{_cost(chosen)} of perplexity at {record['short_length']:,}"
    first = f"Chosen: {chosen['label']}. Recall at {length:,} tokens {_recall(chosen)}, cost {cost}."
    why = (
        f"No other of {len(rows)} candidates is certainly better{within}; of those that may be as good it costs least."
    )
    if are_few(chosen["documents"]):
        why = f"It is the best of {len(rows)} on {chosen['documents']} documents, which are few."
    return [first, why, *_text_sentences(record.get("copies"))]


def _trained_sentences(record: Mapping[str, Any]) -> list[str]:
    """What the training has changed, and whether that is enough."""
    row, before, how, limit = record["trained"], _chosen(record), record["training"], record["max_short_cost"]
    what = ADAPTERS[how["adapter"]]
    steps = f"{how['steps']:,} steps of {how['sequences_per_step']} × {how['length']:,} tokens"
    sentences = [
        f"Trained: {row['label']}, {what}, {steps}; step {how['kept_step']} reads best and is kept.",
        f"Recall at {record['length']:,} tokens {_recall(row)}, {_recall(before)} before. Cost {_cost(row)} of "
        f"perplexity at {record['short_length']:,}, {_cost(before)} before.",
    ]
    if not row["reads_far"]:
        sentences.append("It does not certainly gain from the far text.")
    if limit is not None and row["cost"]["change"] > limit / 100:
        sentences.append(f"It costs more than --max-short-cost {limit:g}.")
    return sentences


def _text_sentences(copies: Mapping[str, Any] | None) -> list[str]:
    if not copies or not copies["classes"]:
        return []
    classes = [Copies(**(each | {"gain": Change(**each["gain"])})) for each in copies["classes"]]
    return copies_sentences(classes, copies["reference_length"])


def next_steps(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(sentence, command or nothing): how to serve it, ways to a lower cost, what to do if nothing reads far."""
    chosen, rows, checkpoint = _chosen(record), record["measured"], quoted(record["checkpoint"])
    length = record["length"]
    plan = "", f"ropecli plan {checkpoint} --length {length}"
    train = f"ropecli extend {checkpoint} --length {length} --data YOUR_TEXTS --train 1h --output TRAINED"
    if chosen is None:
        best, steps = rows[0], []
        if best["reads_far"]:
            most = ceil(100 * best["cost"]["change"])
            steps = [
                (f"Allow {most}% for {best['label']}; nothing is measured again", f"--max-short-cost {most} --resume")
            ]
        elif are_few(best["documents"]):
            steps = [(f"{best['documents']} documents are few: measure on more", "")]
        return [*steps, ("Or train it", train), plan]
    steps = [("Serve it", record["command"])] if record["command"] else []
    if record["trained"]:
        return steps
    cost = chosen["cost"]["change"]
    if cost > 0 and record["output"]:
        # what does not certainly cost less saves nothing
        cheaper = [row for row in rows if row["reads_far"] and row["cost"]["high"] < chosen["cost"]["low"]]
        for row in cheaper[:1]:
            steps.append((f"For less, {row['label']}: recall {_recall(row)}, cost {_cost(row)}", row["command"] or ""))
        both = f"At no cost, serve {checkpoint} for short texts beside it: no engine switches its scaling per request"
        steps += [(both, ""), ("Training takes the cost away", train)]
    dearer = rows[0] if rows[0]["label"] != chosen["label"] and record["max_short_cost"] is not None else None
    if dearer and dearer["reads_far"]:
        steps.append((f"{dearer['label']} uses far text better, and costs {_cost(dearer)}", dearer["command"] or ""))
    return steps


def _chosen(record: Mapping[str, Any]) -> Any:
    return next((row for row in record["measured"] if row["label"] == record["chosen"]), None)


def _recall(row: Mapping[str, Any]) -> str:
    return recall_words(Change(**row["recall"]))


def _cost(row: Mapping[str, Any]) -> str:
    return change_words(Change(**row["cost"]), "%")
