"""Makes the task of several models, on the same documents or prompts wherever their tokenizers allow it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ropecli.data.documents import Documents
from ropecli.errors import DataError
from ropecli.evaluation.driver import Job, Task
from ropecli.evaluation.lengths import Lengths, choose_lengths
from ropecli.evaluation.subject import Subject
from ropecli.live.loading import load_tokenizer

MakeTask = Callable[[Any, Lengths, Subject], Task]
"""Makes a task for a tokenizer, at some lengths, for the first subject that reads it."""


def make_jobs(subjects: Sequence[Subject], make_task: MakeTask, lengths: Sequence[int] | None = None) -> list[Job]:
    """A job for each subject. Checkpoints of the same tokens share a task that reads documents, and all its lengths.

    lengths: as the user gave them, tokens. Errors: DataError, and those of make_task.
    """
    chosen = choose_lengths(lengths, subjects)
    made: dict[int, Job] = {}  # by checkpoint
    for subject in subjects:
        if subject.is_baseline or id(subject.checkpoint) in made:
            continue
        tokenizer, first = load_tokenizer(subject.checkpoint), next(iter(made.values()), None)
        reading = [job for job in made.values() if job.task.documents]
        job = next((job for job in reading if have_same_tokens(tokenizer, job.tokenizer)), None)
        if job is None and first and first.task.one_tokenizer:
            raise DataError(
                f"{first.task.name} compares the same tokens, and {subject.checkpoint.name} has another tokenizer than "
                f"{first.subject.checkpoint.name}. Measure each by itself."
            )
        task = job.task if job else make_task(tokenizer, chosen, subject if first else subjects[0])
        if task.documents:
            chosen = Lengths(tuple(task.lengths))
        made[id(subject.checkpoint)] = Job(subject, task, tokenizer)
    return [
        _of_baseline(subject, made, make_task, chosen)
        if subject.is_baseline
        else replace(made[id(subject.checkpoint)], subject=subject)
        for subject in subjects
    ]


def _of_baseline(baseline: Subject, made: Mapping[int, Job], make_task: MakeTask, lengths: Lengths) -> Job:
    """The baseline reads the documents of the first of the others, at the lengths that it reads."""
    first, same = next(iter(made.values())), made.get(id(baseline.checkpoint))
    if first.task.documents:
        _refuse_another_vocabulary(first.task.documents, first.tokenizer, baseline)
        return Job(baseline, first.task.up_to(baseline.positions.context_length), first.tokenizer)
    tokenizer = load_tokenizer(baseline.checkpoint)
    return Job(baseline, same.task if same else make_task(tokenizer, lengths, baseline), tokenizer)


def have_same_tokens(*tokenizers: Any) -> bool:
    """Whether two tokenizers give the same ids for every text."""
    if not all(tokenizer.is_fast for tokenizer in tokenizers):
        return False
    first, second = ((tokenizer("")["input_ids"], tokenizer.backend_tokenizer.to_str()) for tokenizer in tokenizers)
    return first == second


def _refuse_another_vocabulary(documents: Documents, tokenizer: Any, baseline: Subject) -> None:
    """Raise DataError if the baseline has other tokens for the ids of the documents."""
    used = np.unique(np.concatenate([document.ids for document in documents.kept])).tolist()
    words = [reads.convert_ids_to_tokens(used) for reads in (tokenizer, load_tokenizer(baseline.checkpoint))]
    if words[0] != words[1]:
        raise DataError(
            "The baseline's tokenizer has another vocabulary, so the two cannot read the same tokens. Evaluate each by "
            "itself and compare bits per byte."
        )
