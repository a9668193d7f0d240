"""Two torchrun launches of one CPU process each, as on two hosts: what a lost host costs, and the Slurm script."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from forked import free_port

RECIPES = Path(__file__).parents[2] / "recipes" / "accelerate"
KEYS = {"steps": 8, "batch_size": 1, "gradient_accumulation": 1, "save_every": 2}
# Slurm's commands, as far as the script uses them. scancel signals every process of the step, as slurmstepd does.
COMMANDS = {
    "scontrol": 'if [ "$1" = show ]; then printf "127.0.0.1\\nlocalhost\\n"; else echo "$@" >>"$JOB/calls"; fi',
    "scancel": 'for task in $(cat "$JOB/tasks"); do kill -"${1#--signal=}" "$task" $(pgrep -P "$task"); done',
    "srun": """
        until [ "$1" = bash ]; do shift; done
        >"$JOB/tasks"
        for node in 0 1; do SLURM_NODEID=$node setsid "$@" & echo $! >>"$JOB/tasks"; done
        status=0
        for task in $(cat "$JOB/tasks"); do wait "$task" || status=$?; done
        exit $status""",
}


# The first process tokenizes and saves for longer than the others would wait for it in a collective operation.
SLOW = """
import os, time
from datetime import timedelta
from ropecli.cli.app import main
from ropecli.data import stream
from ropecli.training import launch, run_folder

def slowly(action):
    def act(*arguments, **options):
        if os.environ["RANK"] == "0":
            time.sleep(30)
        return action(*arguments, **options)
    return act

launch._TIMEOUT = timedelta(seconds=20)
stream.open_store = slowly(stream.open_store)
run_folder.complete_snapshot = slowly(run_folder.complete_snapshot)
main()
"""


def hosts(arguments, count=2, program=("-m", "ropecli")):
    """Start the command line on each host."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(count), "--nproc_per_node", "1"]
    launcher += ["--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return [
        subprocess.Popen([*launcher, "--node_rank", str(rank), *program, *arguments], **pipes) for rank in range(count)
    ]


def ends(processes):
    """(exit status, standard error) of each launcher."""
    ended = [process.communicate(timeout=300) for process in processes]
    return [(process.returncode, err) for process, (_, err) in zip(processes, ended, strict=True)]


def wait_for_step(run: Path, step: int, processes) -> None:
    log = run / "metrics.jsonl"
    while not (log.exists() and log.read_text().count("\n") >= step):
        assert all(process.poll() is None for process in processes), ends(processes)
        time.sleep(0.005)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def kill_host(launcher: int) -> None:
    for pid in (*children(launcher), launcher):
        os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def undisturbed(patched_llama, command_line, tmp_path_factory):
    run = tmp_path_factory.mktemp("hosts") / "run"
    for status, err in ends(hosts(command_line(patched_llama, run, **KEYS))):
        assert status == 0, err[-4000:]
    return run


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_host_ends_the_others_and_the_run_resumes_to_the_same_bits(
    patched_llama, command_line, tmp_path, undisturbed, weights_of, lost
):
    run = tmp_path / "run"
    arguments = command_line(patched_llama, run, **KEYS)
    launched = hosts(arguments)
    wait_for_step(run, 3, launched)
    kill_host(launched[lost].pid)
    status, err = ends(launched)[1 - lost]
    assert status != 0
    assert err.count("error: Another process of this run exited or does not respond: ") == 1
    assert "Run the same command with --resume to continue." in err
    [(alone, refusal)] = ends(hosts([*arguments, "--resume"], count=1))
    assert alone != 0
    assert "processes: 2 then, 1 now" in refusal
    resumed = ends(hosts([*arguments, "--resume"]))
    assert [status for status, _ in resumed] == [0, 0], resumed
    assert "Resuming after step" in resumed[0][1]
    assert weights_of(run) == weights_of(undisturbed)


@pytest.mark.slow
def test_a_process_may_work_for_long_while_the_other_waits(
    patched_llama, command_line, tmp_path, undisturbed, weights_of
):
    run, program = tmp_path / "run", tmp_path / "slow.py"
    program.write_text(SLOW)
    launched = hosts(command_line(patched_llama, run, **{**KEYS, "save_every": 6}), program=[program])
    assert [status for status, _ in ends(launched)] == [0, 0]
    assert weights_of(run) == weights_of(undisturbed)


@pytest.fixture
def slurm(tmp_path, patched_llama, command_line):
    """slurm() -> the Slurm script as a job on two nodes, with data parallelism: FSDP2 needs GPUs."""
    commands, config = tmp_path / "bin", tmp_path / "ddp.yaml"
    commands.mkdir()
    for name, lines in COMMANDS.items():
        (commands / name).write_text(f"#!/bin/bash\n{lines}\n")
        (commands / name).chmod(0o755)
    config.write_text(yaml.safe_dump({"compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_GPU"}))
    words = command_line(patched_llama, tmp_path / "run", **KEYS)[1:]
    changes = {
        'source "$HOME/ropecli/.venv/bin/activate"': "",
        "CHECKPOINT --recipe NAME --output DIR": " ".join(words),
        '"$(ropecli recipe --path "$CONFIG")"': str(config),
        "GPUS=8": "GPUS=1",
        "TIMEOUT=840": "TIMEOUT=100",
    }
    text = (RECIPES / "slurm.sh").read_text(encoding="utf-8")
    for shipped, here in changes.items():
        assert text.count(shipped) == 1, shipped
        text = text.replace(shipped, here)
    (tmp_path / "job.sh").write_text(text)
    variables = {
        "PATH": os.pathsep.join([str(commands), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "JOB": str(tmp_path),
        "SLURM_JOB_ID": str(free_port()),
        "SLURM_JOB_NODELIST": "nodes[1-2]",
        "SLURM_NNODES": "2",
        "SLURM_CPUS_PER_TASK": "1",
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
    }
    job = ["bash", tmp_path / "job.sh"]
    return lambda: subprocess.Popen(job, env={**os.environ, **variables}, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("event", ["time limit", "lost node"])
def test_the_slurm_script_saves_requeues_and_resumes(slurm, tmp_path, undisturbed, weights_of, event):
    run, calls, job = tmp_path / "run", tmp_path / "calls", slurm()
    wait_for_step(run, 3, [job])
    if event == "time limit":
        job.send_signal(signal.SIGUSR1)
    else:
        kill_host(int((tmp_path / "tasks").read_text().split()[1]))
    [(status, err)] = ends([job])
    assert status != 0
    if event == "time limit":
        assert "Saved after step" in err
        assert calls.read_text().startswith("requeue ")
        calls.unlink()
    [(status, err)] = ends([slurm()])
    assert status == 0, err[-4000:]
    assert "Resuming after step" in err
    assert not calls.exists()  # of a lost node Slurm itself requeues the job
    assert weights_of(run) == weights_of(undisturbed)


def test_skypilot_launches_each_node_with_its_rank(tmp_path):
    from accelerate.commands.launch import launch_command_parser

    task = yaml.safe_load((RECIPES / "skypilot.yaml").read_text(encoding="utf-8"))
    launcher = tmp_path / "accelerate"
    launcher.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    launcher.chmod(0o755)
    variables = {
        "PATH": os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    }
    done = subprocess.run(
        ["bash", "-c", task["run"]], env={**os.environ, **task["envs"], **variables}, stdout=subprocess.PIPE, text=True
    )
    read = launch_command_parser().parse_args(done.stdout.splitlines()[1:])
    assert Path(read.config_file).samefile(RECIPES / "2-nodes.yaml")
    assert (read.num_machines, read.machine_rank, read.num_processes) == (2, 1, 16)
    assert (read.main_process_ip, read.parallelism_config_dp_replicate_size) == ("10.0.0.1", 2)
    assert read.training_script_args == ["finetune", "CHECKPOINT", *task["envs"]["RUN"].split()[1:], "--resume"]
