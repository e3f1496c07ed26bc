"""Following the advice of an error message of the library resolves the error, and what a message names exists."""

import ast
import contextlib
import importlib
import io
import re
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest

import all_reduce
import bloom
import digits
import gpt
import house_prices
import jaxpar
import untrained_model
from jaxpar.__main__ import COMMANDS
from jaxpar.__main__ import main as command
from jaxpar.commands import recipe as cli
from jaxpar.data.batches import batch_rows, pad_rows
from jaxpar.data.text import load_text
from jaxpar.models.transformer import TransformerConfig
from jaxpar.pipeline import LayerLayout
from jaxpar.planner import Choice, price
from jaxpar.runtime.output import install_extra
from jaxpar.runtime.process_env import read_process_env
from jaxpar.schedule import make_schedule
from tests.support import tiny
from tests.support.clusters import SMALL, node

ROOT = Path(__file__).parents[1]


# -- the library -------------------------------------------------------------------------------------------------------


def step_of(mesh, model=tiny.MODEL, batch=None, params=None, **settings):
    """Traces a step, which compiles nothing."""
    value_and_grad = jaxpar.value_and_grad(model, tiny.loss, mesh, **settings)
    given = tiny.make_params() if params is None else params
    return jax.eval_shape(value_and_grad, given, tiny.make_batch() if batch is None else batch)


def rows(count):
    return jax.tree.map(lambda column: column[:count], tiny.make_batch())


def make_state(mesh, shardings):
    return jaxpar.abstract_state(tiny.init, jax.random.key(0), optax.adam(1e-3), mesh, shardings)


MESH = {
    "plain": jaxpar.make_mesh,
    "data": lambda: jaxpar.make_mesh(data=4),
    "tensor": lambda: jaxpar.make_mesh(tensor=2),
}
SHAPES = jax.eval_shape(tiny.init, jax.random.key(0))
FEW_RULES = {"layers/*": jaxpar.replicated()}
PLACE = {
    "JAX_COORDINATOR_ADDRESS": "10.0.0.1:1234",
    "JAX_NUM_PROCESSES": "2",
    "JAX_PROCESS_ID": "0",
}
LIBRARY = {
    "rows that microbatches do not divide": (
        lambda: step_of(MESH["data"](), batch=rows(30)),
        "Use 32 rows (jaxpar.data.batches.pad_rows adds rows, and a column",
        lambda: step_of(MESH["data"](), batch=pad_rows(rows(30), 32)),
    ),
    "a key in a batch": (
        lambda: step_of(MESH["data"](), batch=tiny.make_batch() | {"key": jax.random.key(0)}),
        "jax.random.split(key, batch_size)",
        lambda: step_of(
            MESH["data"](),
            batch=tiny.make_batch() | {"key": jax.random.split(jax.random.key(0), 32)},
        ),
    ),
    "a mesh of plain JAX": (
        lambda: step_of(jax.make_mesh((1, 1, 1), ("data", "stage", "tensor"))),
        "Make the mesh with jaxpar.make_mesh",
        lambda: step_of(jaxpar.make_mesh()),
    ),
    "a plain function in a pipeline": (
        lambda: step_of(
            jaxpar.make_mesh(stage=2), tiny.MODEL.apply, schedule="1f1b", num_microbatches=2
        ),
        "jaxpar.LayeredModel(embed, layer, head), with jaxpar.adapters",
        lambda: step_of(jaxpar.make_mesh(stage=2), schedule="1f1b", num_microbatches=2),
    ),
    "ZeRO beside a tensor axis": (
        lambda: step_of(MESH["tensor"](), zero=1),
        "Pass shardings=, from jaxpar.shardings_from_paths",
        lambda: step_of(
            MESH["tensor"](),
            zero=1,
            shardings=jaxpar.shardings_from_paths(SHAPES, MESH["tensor"](), tiny.RULES),
        ),
    ),
    "a policy that is none": (
        lambda: step_of(MESH["plain"](), remat="most"),
        "See jax.checkpoint_policies",
        lambda: step_of(MESH["plain"](), remat=jax.checkpoint_policies.dots_saveable),
    ),
    "labels of floats": (
        lambda: jaxpar.losses.softmax_cross_entropy(jnp.ones((2, 3)), jnp.ones(2)),
        "labels.astype(jnp.int32)",
        lambda: jaxpar.losses.softmax_cross_entropy(
            jnp.ones((2, 3)), jnp.ones(2).astype(jnp.int32)
        ),
    ),
    "a parameter without a rule": (
        lambda: jaxpar.shardings_from_paths(SHAPES, MESH["plain"](), FEW_RULES),
        '{"**": jaxpar.replicated()} last, or pass strict=False',
        lambda: [
            jaxpar.shardings_from_paths(
                SHAPES, MESH["plain"](), FEW_RULES | {"**": jaxpar.replicated()}
            ),
            jaxpar.shardings_from_paths(SHAPES, MESH["plain"](), FEW_RULES, strict=False),
        ],
    ),
    "shardings of other params": (
        lambda: make_state(MESH["plain"](), {}),
        "jaxpar.shardings_from_paths(jax.eval_shape(init_fn, key), mesh, rules)",
        lambda: make_state(
            MESH["plain"](), jaxpar.shardings_from_paths(SHAPES, MESH["plain"](), tiny.RULES)
        ),
    ),
    "a norm that clips all": (
        lambda: jaxpar.make_train_step(
            lambda params, batch: None, optax.sgd(1.0), max_grad_norm=0.0
        ),
        "Leave it out",
        lambda: jaxpar.make_train_step(lambda params, batch: None, optax.sgd(1.0)),
    ),
    "a split scalar": (
        lambda: jaxpar.column_parallel(ndim=0),
        "jaxpar.replicated()",
        lambda: jaxpar.replicated(),
    ),
    "a layout of too few layers": (
        lambda: LayerLayout(4, 2, layers_per_virtual_stage=(3, 2)),
        "Give 2 counts that add up to 4",
        lambda: LayerLayout(4, 2, layers_per_virtual_stage=(3, 1)),
    ),
    "chunks of 1F1B": (
        lambda: make_schedule("1f1b", 2, 4, 2),
        "Choose num_chunks=1, or interleaved, which runs 2 chunks",
        lambda: [make_schedule("1f1b", 2, 4, 1), make_schedule("interleaved", 2, 4, 2)],
    ),
    "zb-v in fused form": (
        lambda: make_schedule("zb-v", 2, 4, 2, form="fused"),
        "Choose form='published', or zb-h1 or interleaved in fused form",
        lambda: [
            make_schedule("zb-v", 2, 4, 2, form="published"),
            make_schedule("zb-h1", 2, 4, form="fused"),
            make_schedule("interleaved", 2, 4, 2, form="fused"),
        ],
    ),
    "a head of one dim": (
        lambda: TransformerConfig(
            vocab_size=8, num_layers=1, embed_dim=6, num_heads=2, positions="rope"
        ),
        "such as 8",
        lambda: TransformerConfig(
            vocab_size=8, num_layers=1, embed_dim=8, num_heads=2, positions="rope"
        ),
    ),
    "a batch that is larger than an epoch": (
        lambda: batch_rows(5, 9, seed=0, step=0),
        "Choose 5",
        lambda: batch_rows(5, 5, seed=0, step=0),
    ),
    "microbatches of a plan": (
        lambda: price(SMALL, node(), Choice(data=8, num_microbatches=3), batch_size=64),
        "Choose a batch_size of 48",
        lambda: price(SMALL, node(), Choice(data=8, num_microbatches=3), batch_size=48),
    ),
    "half of a place in a run": (
        lambda: read_process_env({"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}),
        "Set what is missing, start processes by `python -m jaxpar launch`, or unset the rest",
        lambda: [read_process_env(PLACE), read_process_env({})],
    ),
    "a process that is one too many": (
        lambda: read_process_env(PLACE | {"JAX_PROCESS_ID": "2"}),
        "Count processes from 0",
        lambda: read_process_env(PLACE | {"JAX_PROCESS_ID": "1"}),
    ),
}


@pytest.mark.parametrize("name", LIBRARY)
def test_a_call_that_a_message_names_is_taken(name):
    wrong, remedy, right = LIBRARY[name]
    with tiny.signatures_unchecked():
        with pytest.raises((ValueError, TypeError), match=re.escape(remedy)):
            wrong()
        right()


def test_a_folder_of_one_text_may_be_the_text(tmp_path):
    (tmp_path / "one.txt").write_text("some words " * 10)
    with pytest.raises(ValueError, match="Give more files, or a single one"):
        load_text(tmp_path)
    assert load_text(tmp_path / "one.txt").is_bytes


# -- what is named is there --------------------------------------------------------------------------------------------


def messages():
    """The text of every string in the code that is no docstring, with {} for what is filled in, and where it is."""
    for path in sorted([*ROOT.glob("jaxpar/**/*.py"), *ROOT.glob("recipes/*.py")]):
        tree = ast.parse(path.read_text())
        parts = {
            part
            for node in ast.walk(tree)
            if isinstance(node, ast.JoinedStr)
            for part in ast.walk(node)
        }
        quiet = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for found in ast.walk(tree):
            if isinstance(found, ast.JoinedStr):
                text = "".join(
                    v.value if isinstance(v, ast.Constant) else "{}" for v in found.values
                )
            elif (
                isinstance(found, ast.Constant)
                and isinstance(found.value, str)
                and found not in parts | quiet
            ):
                text = found.value
            else:
                continue
            yield f"{path.relative_to(ROOT)}:{found.lineno}", text


def flags_of(call):
    """The flags in what a command line prints as its help."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        call()
    return set(re.findall(r"(?<![\w-])--[a-z][a-z.-]+", said.getvalue()))


# Whose errors only users of a command line read; and what no argument stands for where it is named.
OF_COMMANDS = (
    "commands",
    "jobs",
    "run",
    "serve",
    "runtime/launch",
    "runtime/supervise",
    "runtime/watchdog",
)
OF_RECIPES = (
    "bloom_jobs",
    "all_reduce_report",
    "house_prices_least_squares",
    "models/mlp",
    "models/trained_linear",
)
FLAGS_BY_HAND = {
    "data/recall": {"--model"},
    "data/text": {"--init-from", "--tokenizer"},
    "huggingface/export": {"--out-dir", "--source"},
    "mesh": {"--devices-per-process", "--fake-devices"},
    "planner/ops": {"--attention"},
    "report/data": {"--out-dir"},
}


def flags_by_hand(code):
    """The flags that the errors of a module write out, which ``fields.arg`` would name only while a command runs."""
    texts = (
        part
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Raise)
        for part in ast.walk(node)
    )
    strings = (
        part.value
        for part in texts
        if isinstance(part, ast.Constant) and isinstance(part.value, str)
    )
    return {flag for text in strings for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]*", text)}


def test_errors_of_the_library_name_arguments_and_not_flags():
    for path in sorted((ROOT / "jaxpar").rglob("*.py")):
        module = path.relative_to(ROOT / "jaxpar").with_suffix("").as_posix()
        if not module.startswith((*OF_COMMANDS, *OF_RECIPES)):
            found = flags_by_hand(path.read_text()) - FLAGS_BY_HAND.get(module, set())
            assert not found, (
                f"{module} names {found}: write jaxpar.fields.arg, which is the flag while a command runs"
            )
    assert flags_by_hand('raise ValueError(f"--keep must be {least}; got {arg(keep=1)}.")') == {
        "--keep"
    }


@pytest.mark.full
def test_every_flag_that_a_message_names_exists():
    programs = [digits, gpt, house_prices, all_reduce, bloom, untrained_model]
    known = {"--help"}.union(
        *(flags_of(lambda r=r: cli.run(r.main, r.Config, ["--help"])) for r in programs)
    )
    known |= set().union(
        *(flags_of(lambda name=name: command([name, "--help"])) for name in COMMANDS)
    )
    known |= flags_of(lambda: command(["--help"]))
    assert {"--mesh.data", "--allow-change", "--budget.step", "--nodes", "--max-restarts"} <= known
    known |= {"--local-dir"}  # of hf, which downloads models
    known |= {
        "--exclusive",
        "--requeue",
        "--kill-on-bad-exit",
        "--wait",
        "--cpus-per-task",
    }  # SLURM's
    for where, text in messages():
        # Names that others give to flags, beside ours, which test_status.py holds against the recipes.
        if where.startswith("jaxpar/commands/recipe.py"):
            continue
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z.-]*[a-z](?![\w{=-])", text):
            assert any(other == flag or other.startswith(f"{flag}.") for other in known), (
                f"{where}: {flag}"
            )


@pytest.mark.full
def test_every_extra_that_a_message_names_exists_and_is_installed_by_a_command_for_any_shell():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    code = [*ROOT.glob("jaxpar/**/*.py"), *ROOT.glob("recipes/*.py")]
    calls = [
        (path, extra)
        for path in code
        for extra in re.findall(
            r"""(?:install_extra\(|needing_extra\(.*, )['"]([\w-]+)['"]\)""", path.read_text()
        )
    ]
    assert {"adapters", "data", "gpu-compile", "hf", "plot", "serve"} <= {
        extra for _, extra in calls
    }
    for path, extra in calls:
        assert extra in extras, f"{path}: {extra}"
    for where, text in messages():
        assert "jaxpar[" not in text, f"{where}: {text}"
    assert install_extra("hf") == "Install it: pip install -e '.[hf]' in the clone of jaxpar"


def test_nothing_installs_jaxpar_from_an_index_where_it_is_not():
    for path in (
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("recipes/*.py"),
        *ROOT.glob("jaxpar/**/*.py"),
    ):
        if path.name != "CHANGELOG.md":
            assert not re.search(r"pip install [^\n`]*jaxpar\[", path.read_text()), path
            assert not re.search(
                r"pip install (?:-\S+ )*'?\.", path.read_text().replace("-e '.", "")
            ), path


@pytest.mark.full
def test_every_name_of_jaxpar_that_a_message_names_exists():
    for where, text in messages():
        for name in re.findall(
            r"(?<![\w./])jaxpar(?!\.recipes)(?:\.[a-zA-Z_]+)+(?![\w/])", text
        ):  # recipes: if installed
            found = jaxpar
            for part in name.removesuffix(".py").split(".")[1:]:
                found = getattr(found, part, None) or importlib.import_module(
                    f"{found.__name__}.{part}"
                )
        for name in re.findall(r"python -m jaxpar (\w+)", text):
            assert name in COMMANDS, f"{where}: {name}"
