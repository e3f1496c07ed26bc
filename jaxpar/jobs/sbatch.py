"""A batch script for SLURM: one task per node with all its GPUs, signalled in time to save, and requeued."""

import shlex

from jaxpar.jobs.job import Job
from jaxpar.runtime.exit_codes import FINAL_CODES, ExitCode
from jaxpar.runtime.process_env import TOKEN_VARIABLE


def to_sbatch(job: Job) -> str:
    """Returns the job as the text of a script for ``sbatch``."""
    options = {
        "job-name": job.name,
        "nodes": job.num_nodes,
        "ntasks-per-node": 1,
        **({} if job.fake_devices_per_node else {"gpus-per-node": job.gpus_per_node}),
        **({"cpus-per-task": job.cpus} if job.cpus else {}),
        **({"mem": f"{job.memory_gib}G"} if job.memory_gib else {}),
        "time": _time(job.hours),
        "signal": f"TERM@{job.grace_seconds}",  # sent to the tasks: they save, and exit with 75
        "open-mode": "append",
        "output": "%x-%j.log",
    }
    options |= {name: getattr(job, name) for name in ("partition", "account") if getattr(job, name)}
    lines = [f"#SBATCH --{name}={value}" for name, value in options.items()]
    return "\n".join(["#!/bin/bash", *lines, "#SBATCH --exclusive", "#SBATCH --requeue", "", *_body(job)]) + "\n"


def _body(job: Job) -> list[str]:
    cpus = f" --cpus-per-task={job.cpus}" if job.cpus else ""  # srun does not take it from sbatch
    return [
        f"export JAXPAR_INITIALIZATION_TIMEOUT={job.start_seconds}",
        "export JAXPAR_RESUME=if-any  # a restarted job resumes from the newest checkpoint",
        f"export {TOKEN_VARIABLE}=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')  # only processes with this token can join",
        *(f"export {name}={shlex.quote(value)}" for name, value in job.variables().items()),
        "",
        "# A task that fails ends the others, which could only wait for it.",
        f"srun --kill-on-bad-exit=1{cpus} {shlex.join(job.arguments())}",
        "code=$?",
        "",
        "case $code in",
        f"  {'|'.join(str(int(code)) for code in (ExitCode.DONE, *FINAL_CODES))}) exit $code ;;  # a restart would not help",
        f'  {int(ExitCode.PREEMPTED)}) scontrol requeue "$SLURM_JOB_ID" ;;  # asked to stop, and saved',
        f'  *) [ "${{SLURM_RESTART_COUNT:-0}}" -lt {job.max_restarts} ] && scontrol requeue "$SLURM_JOB_ID" ;;',
        "esac",
        "exit $code",
    ]


def _time(hours: float) -> str:
    minutes = max(round(hours * 60), 1)
    return f"{minutes // 1440}-{minutes % 1440 // 60:02}:{minutes % 60:02}:00"
