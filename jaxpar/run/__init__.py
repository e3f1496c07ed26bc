"""What every training run needs around its loop: `run.py`, whose context `Run` recipes and your own loop are written in.

Ten lines, with checkpoints, --resume, metrics.jsonl, report.html, a lease of the folder, and a clean end on SIGTERM:

    flags = BasicFlags.of(out_dir=Path("runs/mine"), steps=1000, checkpoint_every=100)
    with Run(flags, mesh) as run:
        run.restore(init, key, optimizer, parallel)
        train_step = run.compile(jaxpar.make_train_step(value_and_grad, optimizer), batch_of(run.first_step))
        state = run.begin()
        for step in run.steps():
            state, metrics = train_step(state, batch_of(step))
            run.log(step, state, metrics)

`flags.py` has the flags of a run, of which a script composes its own; `jaxpar.commands.recipe` reads them from a command line.
`start.py` has what a run needs before its first step, `early_stop.py` when it ends early, `learning_rate.py` its learning rate
as a metric, `folder.py` its files, `messages.py` what it prints, `traits.py` what a resume compares beside its settings,
`optimizer_numbers.py` the numbers of an optimizer, `kept_numbers.py` which of them it goes on with, `call_order.py` the order
of its methods, `arguments.py` what they take, `watchers.py` what follows its metrics, `pace.py` their time, and
`compiled_step.py` the step, which names what is wrong with a batch. `batches.py`, `optimizers.py` with `muon.py`,
`language_data.py` and `language_model.py` have flags of several scripts, and what they stand for, `lora_flags.py` those of
LoRA; `remarks.py` says what of the data may not be meant, `evaluation.py` what a model has learned, `model_files.py` reads and
writes models and adapters, and `save_folder.py` writes the folder of --save-hf.
"""

from jaxpar.run.flags import (
    BasicFlags,
    CheckpointFlags,
    CommonFlags,
    GpuFlags,
    MeshFlags,
    MonitoringFlags,
    RunFlags,
)
from jaxpar.run.messages import ConfigError, checks, phase, say
from jaxpar.run.run import Run
from jaxpar.run.start import make_mesh

__all__ = [
    "BasicFlags",
    "CheckpointFlags",
    "CommonFlags",
    "ConfigError",
    "GpuFlags",
    "MeshFlags",
    "MonitoringFlags",
    "Run",
    "RunFlags",
    "checks",
    "make_mesh",
    "phase",
    "say",
]
