#!/bin/bash
# Slurm: nodes with eight GPUs each; saves before the time limit, and resumes after it and after a lost node.
# Save it with `ropecli recipe slurm > job.sh`, change what is marked, and run `sbatch job.sh`.

#SBATCH --job-name=ropecli
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
# Queue the job again after a lost node or a preemption.
#SBATCH --requeue
# Signal this script 15 minutes before the time limit. A step and its checkpoint must fit into that time.
#SBATCH --signal=B:USR1@900

set -euo pipefail

# Change: activate the environment, and name the run. All paths must be on a file system that the nodes share. GPUS is
# the number per node, which 2-nodes expects to be 8.
source "$HOME/ropecli/.venv/bin/activate"
export CONFIG=2-nodes GPUS=8
export RUN="CHECKPOINT --recipe NAME --output DIR"

mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export ADDRESS=${hosts[0]} PORT=$((20000 + SLURM_JOB_ID % 10000))
# Otherwise torchrun kills the processes 30 seconds after the signal. Needs torch 2.12.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=840

stopped=
stop() {
  stopped=yes
  scancel --signal=TERM "$SLURM_JOB_ID" # all processes of the step, not this script
}
trap stop USR1

# --resume starts a run that does not exist yet. $RUN is several words.
# shellcheck disable=SC2016
srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" bash -c '
  exec accelerate launch --config_file "$(ropecli recipe --path "$CONFIG")" \
    --num_machines "$SLURM_NNODES" --machine_rank "$SLURM_NODEID" \
    --num_processes "$((SLURM_NNODES * GPUS))" --parallelism_config_dp_replicate_size "$SLURM_NNODES" \
    --main_process_ip "$ADDRESS" --main_process_port "$PORT" \
    -m ropecli finetune $RUN --resume' &

status=0
wait $! || status=$?
if [ "$stopped" ]; then # the signal ended that wait
  status=0
  wait $! || status=$?
  if [ "$status" != 0 ]; then
    scontrol requeue "$SLURM_JOB_ID"
  fi
fi
exit "$status"
