"""Checks of a command's outcome."""


def is_one_message(outcome, *expected: str) -> None:
    """Exit status 2, nothing on standard output, and one message that has these parts."""
    assert (outcome.code, outcome.out) == (2, ""), outcome
    assert outcome.err.count("error:") == 1
    assert "Traceback" not in outcome.err
    for part in expected:
        assert part in " ".join(outcome.err.split())
