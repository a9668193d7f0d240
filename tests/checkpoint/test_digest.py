"""The digest of a checkpoint: of every byte of its weights, read once per process, and only where a record needs it."""

import shutil

import pytest

from ropecli.checkpoint import opening
from ropecli.checkpoint.opening import open_checkpoint

YARN = ["--method", "yarn", "--factor", 4, "--no-verify"]


@pytest.fixture
def hashed(monkeypatch):
    """The names of the weight files that were read for a digest."""
    names = []

    def recorded(paths, sha256_of=opening.sha256_of):
        paths = list(paths)
        names.extend(path.name for path in paths)
        return sha256_of(paths)

    monkeypatch.setattr(opening, "sha256_of", recorded)
    return names


@pytest.fixture
def fresh(large, tmp_path):
    """A copy that no earlier test has hashed."""
    return shutil.copytree(large, tmp_path / "fresh")


def test_every_byte_of_the_weights_counts(fresh, changed_amid):
    digest = open_checkpoint(fresh).digest
    assert digest.startswith("sha256:")
    assert open_checkpoint(shutil.copytree(fresh, fresh.with_name("copy"))).digest == digest
    shutil.copyfile(changed_amid(fresh) / "model.safetensors", fresh / "model.safetensors")
    assert open_checkpoint(fresh).digest != digest  # not from memory


def test_a_process_reads_each_file_once(fresh, hashed, ropecli, corpus, tmp_path):
    """Also under the name of a patched copy, whose weights are hard links."""
    assert ropecli("patch", fresh, *YARN, "-o", tmp_path / "patched").code == 0
    options = ["--data", corpus, "--max-documents", 2, "--lengths", "24", "--output", tmp_path / "report.json"]
    outcome = ropecli("compare", fresh, tmp_path / "patched", "--methods", "as-is", *options)
    assert outcome.code == 0, outcome.err
    assert hashed == ["model.safetensors"]
    assert open_checkpoint(fresh).digest != open_checkpoint(tmp_path / "patched").digest


def test_commands_without_records_read_no_weights(fresh, hashed, ropecli, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert ropecli("patch", fresh, *YARN, "-o", "patched").code == 0
    hashed.clear()
    opening._hashes.clear()
    for command in (
        ["inspect", "fresh"],
        ["patch", "fresh", *YARN, "--dry-run"],
        ["revert", "patched", "--output", "reverted"],
        ["export", "patched", "--engine", "vllm"],
        ["finetune", "fresh", "--data", "demo-train", "--dry-run", "--output", "run"],
        ["push", "patched", "--repo", "me/tiny", "--base-model", "owner/tiny", "--dry-run"],
    ):
        outcome = ropecli(*command)
        assert outcome.code == 0, outcome.err
        assert hashed == [], command
