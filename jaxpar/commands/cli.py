"""Shared by the commands: flags from a function's signature, parsed by tyro; the files that a user names; text for a terminal.

Text fits the terminal's width, or 100 columns where there is no terminal. tyro is imported by the first command that has flags.
"""

import dataclasses
import inspect
import io
import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from itertools import chain, islice, takewhile
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from jaxpar.fields import given_by, near_name
from jaxpar.runtime.exit_codes import ExitCode
from jaxpar.runtime.output import printable, tell

Result = TypeVar("Result")
MAX_FILE_BYTES = 16 * 2**20  # far more than the list of plans for the largest cluster
MAX_DEPTH, MAX_VALUES = 64, 200_000  # of JSON and YAML
LEAST_WIDTH = 40
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
# What messages of the library name, by the flags that give it, where the two have other names.
OTHER_NAMES = json.loads(Path(__file__).with_name("argument_names.json").read_text())
# Words for one value of a flag, of which each program takes its own, by what the value means.
OTHER_VALUES = json.loads(Path(__file__).with_name("other_names.json").read_text())["values"]


def call(
    function: Callable[..., Result], args: Sequence[str], command: str, *, example: str = ""
) -> Result:
    """Calls a function with the flags of a command line and returns its result; its docstring is the help.

    An unknown flag ends the process with code 2 and a suggestion.

    Args:
        function: The function, whose parameters are the flags.
        args: The command line after the command.
        command: The name of the command.
        example: Arguments to show where the command is called without any and needs some.

    Raises:
        ValueError: A word of the command line is empty, or a flag is given twice with different values.
    """
    import tyro

    take_wide_terminal()
    about = wrapped((inspect.getdoc(function) or "").partition("\n\nArgs:")[0])
    config = (tyro.conf.FlagCreatePairsOff,)
    asks_for_help = {"-h", "--help"} & set(args)
    check_args(function, args)
    try:
        with wrapped_usage() if asks_for_help else nullcontext(), given_by(flag_names(function)):
            return tyro.cli(
                function, args=args, prog=f"{program()} {command}", description=about, config=config
            )
    except SystemExit as end:
        if end.code == ExitCode.BAD_CONFIG and example and not args:
            tell(f"for example: {program()} {command} {example}")
        elif end.code == ExitCode.BAD_CONFIG:
            suggest_values(function, args)
        raise


def check_args(flags: Callable[..., Any], args: Sequence[str]) -> None:
    """Raises ValueError for a command line that tyro takes and that is not what it seems.

    An empty word would be the current folder where a path is meant. Of a flag that is given twice, the last would be taken.

    Args:
        flags: A function or a dataclass, as ``flag_names`` takes it.
        args: The command line.
    """
    _check_words(args)
    _check_once(flags, args)


def _check_words(args: Sequence[str]) -> None:
    for before, word in zip(["", *args], args, strict=False):
        flag, is_joined, value = word.partition("=")
        is_flag = word.startswith("--")
        if value or (word and not (is_flag and is_joined)):
            continue
        of_flag = flag if is_flag else before if before.startswith("--") else ""
        named = of_flag.partition("=")[0] or "an argument"
        raise ValueError(
            f"{printable(named)} must not be empty; got ''. Give a value, or leave it out; a variable of the shell that was "
            "to give it may not be set."
        )


def _check_once(flags: Callable[..., Any], args: Sequence[str]) -> None:
    """Raises ValueError for a flag that is given twice with different values, of which tyro takes the last alone."""
    kinds, names = _given_once(flags)
    words = [*takewhile(lambda word: word != "--", args)]  # after it, no word is a flag
    is_value = lambda word: not word.startswith("--") and word not in names
    given: dict[str, list[list[str]]] = {}
    for position, word in enumerate(words):
        name, is_joined, value = word.partition("=")
        flag = names.get(name.replace("_", "-"))
        if flag is None:
            continue
        number = None if _is_list(kinds[flag]) else int(kinds[flag] is not bool)
        values = (
            [value] if is_joined else [*islice(takewhile(is_value, words[position + 1 :]), number)]
        )
        if values not in given.setdefault(flag, []):
            given[flag].append(values)
    for flag, several in given.items():
        if len(several) == 1:
            continue
        shown = " and ".join(" ".join([flag, *values]) for values in several)
        together = " ".join([flag, *chain.from_iterable(several)])
        remedy = (
            f"Give all values at once: {together}."
            if _is_list(kinds[flag])
            else "Leave all but one out."
        )
        raise ValueError(printable(f"{flag} must be given once; got {shown}. {remedy}"))


def with_joined_values(flags: Callable[..., Any], args: Sequence[str]) -> list[str]:
    """Returns a command line with texts that begin with one "-" joined to their flags, as tyro needs them: --flag=-text.

    Args:
        flags: A function or a dataclass, as ``flag_names`` takes it.
        args: The command line.
    """
    kinds, names = _given_once(flags)
    takes_text = {
        name for name, flag in names.items() if str in (kinds[flag], *get_args(kinds[flag]))
    }
    found: list[str] = []
    for word in args:
        is_joined = "--" not in found and re.match("-[^-]", word) and word not in ("-h", *names)
        if is_joined and found and found[-1].replace("_", "-") in takes_text:
            found[-1] += f"={word}"
        else:
            found.append(word)
    return found


def _given_once(flags: Callable[..., Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the types of the flags that may be given once, by flag, and their flags, by each name that they have."""
    import tyro

    kinds, names = {}, {}
    for _, flag, kind, settings in _flags(flags):
        if _is_list(kind) and tyro.conf.UseAppendAction in settings:
            continue
        kinds[flag] = kind
        names |= dict.fromkeys([flag, *_aliases(settings)], flag)
    return kinds, names


def _is_list(kind: Any) -> bool:
    """Returns whether a flag of this type takes several values."""
    return any(get_origin(part) in (tuple, list) for part in _parts(kind))


def suggest_values(flags: Callable[..., Any], args: Sequence[str]) -> None:
    """Prints what is meant by values of a command line that the flags do not take: another name, or a whole number.

    Args:
        flags: A function or a dataclass, as ``flag_names`` takes it.
        args: The command line, which tyro has refused.
    """
    kinds = {flag: [*_parts(kind)] for _, flag, kind in list_flags(flags)}
    positional = {f"--{name}" for name in _positional(flags)}
    for word, after in zip(args, [*args[1:], ""], strict=True):
        name, is_joined, value = word.partition("=")
        if name in positional:
            tell(
                printable(
                    f"{name} is no flag: give {value if is_joined else after} alone, without {name}"
                )
            )
        given, of_flag = value if is_joined else after, kinds.get(name, ())
        meant = _other_word(name, given, of_flag) or _meant_value(given, of_flag)
        if meant:
            tell(printable(f"{name}: {meant}"))


@contextmanager
def foreign_flags_told(
    flags: Callable[..., Any], options: Sequence[str], command: str
) -> Iterator[None]:
    """Says, where the options of a command are refused in the ``with`` block, that those of a program come after it.

    Args:
        flags: The function whose parameters are the options.
        options: What is before the program.
        command: The name of the command.
    """
    try:
        yield
    except SystemExit as end:
        known = {flag for _, flag, _ in list_flags(flags)}
        names = [
            word.partition("=")[0].replace("_", "-") for word in options if word.startswith("--")
        ]
        foreign = [name for name in names if name not in known and name != "--help"]
        if end.code == ExitCode.BAD_CONFIG and foreign:
            tell(
                printable(
                    f"{foreign[0]} is no option of {command}: the flags of a script come after the script"
                )
            )
        raise


def _parts(kind: Any) -> Iterator[Any]:
    """Yields a type, and what it is made of: the types of a union, the values of a Literal."""
    yield kind
    for part in get_args(kind):
        yield from _parts(part)


def _other_word(flag: str, value: str, kinds: Sequence[Any]) -> str:
    """Returns what to say of another word for one of a flag's values; "" if it is one of these, or stands for none."""
    if value in kinds:
        return ""
    for meaning, words in OTHER_VALUES.get(flag, {}).items():
        own = [word for word in words.split() if word in kinds]
        if own and value.lower() in words.split():
            return f"{value} is written {own[0]} here: {meaning}"
    return ""


def _meant_value(value: str, kinds: Sequence[Any]) -> str:
    """Returns what to say of a value for a flag of some kinds; "" if it is one of them, or is meant for none."""
    choices = [each for each in kinds if isinstance(each, str)]
    near = near_name(value, choices)
    if near and near != value:
        return f"did you mean {near}?"
    is_number = int in kinds and not {float, str, Path}.intersection(kinds)
    if not is_number or value.startswith("--") or re.fullmatch(r"[+-]?[0-9_]+", value):
        return ""
    try:
        whole = int(float(value))
    except (ValueError, OverflowError):
        return f"a whole number, such as 8, is written in digits alone; got {value!r}"
    meant = f" Did you mean {whole}?" if whole == float(value) else ""
    return f"a whole number is written in digits alone; got {value!r}.{meant}"


def flag_names(flags: Callable[..., Any]) -> dict[str, str]:
    """Returns the flag that tyro makes of each name, of two an axis of the mesh; none for positional arguments.

    Args:
        flags: A function, whose parameters are flags, or a dataclass, whose fields are.
    """
    found, of_mesh = {}, {}
    for name, flag, _ in list_flags(flags):
        if flag.startswith("--mesh."):
            of_mesh[name] = flag
        else:  # of a group, "budget.save"
            found[name if "." not in flag else flag.removeprefix("--")] = flag
    for other, name in OTHER_NAMES.items():
        if name in found and found.pop(other, None) is None:  # else a message may mean either
            found[other] = found[name]
    return found | of_mesh


def list_flags(of: Callable[..., Any]) -> Iterator[tuple[str, str, Any]]:
    """Yields the name, the flag and the type of each parameter of a function, or field of a dataclass, that is a flag."""
    for name, flag, kind, _ in _flags(of):
        yield name, flag, kind


def list_aliases(of: Callable[..., Any]) -> Iterator[str]:
    """Yields the further names by which the flags of a function, or of a dataclass, may be given."""
    for *_, settings in _flags(of):
        yield from _aliases(settings)


def _aliases(settings: Sequence[Any]) -> Iterator[str]:
    for each in settings:
        yield from getattr(each, "aliases", None) or ()


def _flags(
    of: Callable[..., Any], prefix: str = "", outer: Sequence[Any] = ()
) -> Iterator[tuple[str, str, Any, Sequence[Any]]]:
    """Yields the name, the flag, the type and the settings for tyro of each flag, with those of the groups that it is in."""
    import tyro

    hints = get_type_hints(of, include_extras=True)
    is_class = dataclasses.is_dataclass(of)
    for name in (
        [field.name for field in dataclasses.fields(of)]
        if is_class
        else inspect.signature(of).parameters
    ):
        kind, *more = (
            get_args(hints[name]) if get_origin(hints[name]) is Annotated else (hints[name],)
        )
        named = next((each.name for each in more if getattr(each, "name", None) is not None), None)
        part = name.rstrip("_").replace("_", "-") if named is None else named
        if dataclasses.is_dataclass(kind):
            is_flat = part == "" or tyro.conf.OmitArgPrefixes in more
            inner = prefix if is_flat else f"{prefix}{part}."
            yield from _flags(kind, inner, [*more, *outer])  # pyright: ignore[reportArgumentType]
        elif tyro.conf.Positional not in more:
            yield name.rstrip("_"), f"--{prefix}{part}", kind, [*more, *outer]


def _positional(function: Callable[..., Any]) -> list[str]:
    """Returns the names of the parameters that are given without a flag."""
    import tyro

    hints = get_type_hints(function, include_extras=True)
    is_one = lambda hint: get_origin(hint) is Annotated and tyro.conf.Positional in get_args(hint)
    return [name for name, hint in hints.items() if is_one(hint)]


def program() -> str:
    """Returns ``jaxpar`` for its script, else ``python -m jaxpar``, since the script may not be on the PATH."""
    return "jaxpar" if Path(sys.argv[0]).stem == "jaxpar" else "python -m jaxpar"


def read_file(path: Path, flag: str) -> str:
    """Returns the text of the file that a flag names, or of standard input for ``-``.

    Raises:
        ValueError: It cannot be read, is not text, or is too large.
    """
    try:
        with nullcontext(sys.stdin.buffer) if str(path) == "-" else path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
        if len(text) <= MAX_FILE_BYTES:
            return text.decode()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ValueError(
            f"{flag} must name a text file that can be read; got {path}: {why}. Name one that is there."
        ) from error
    raise ValueError(
        f"{flag} must name a file of at most {MAX_FILE_BYTES} bytes; got {path}, which has more. Name the right one."
    )


def parse_json(text: str, flag: str) -> Any:
    """Returns parsed JSON of bounded size and depth.

    Raises:
        ValueError: The text is not such JSON; the message contains the flag that named its file.
    """
    try:
        return check_size(json.loads(text), flag)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{flag} must name a file of JSON; got other text: {error}. Write it again."
        ) from error


def check_size(tree: Any, flag: str) -> Any:
    """Returns plain values; raises ValueError if they are too many or too deep. A value that occurs twice counts twice."""
    level, left = [tree], MAX_VALUES
    for _ in range(MAX_DEPTH):
        left -= len(level)
        level = list(islice(chain.from_iterable(map(_inner, level)), left + 1))
        if not level:
            return tree
        if len(level) > left:
            break
    raise ValueError(f"{flag} may hold {MAX_VALUES} values, {MAX_DEPTH} deep, and this holds more")


def _inner(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def make_folder(path: Path, flag: str = "--out-dir") -> None:
    """Creates the folder that a flag names; raises ValueError if it cannot be created."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"{flag} must be a folder that can be written to; got {path}: {error.strerror}. Name another."
        ) from error


def take_wide_terminal() -> None:
    """Has tyro print for a terminal that is wide enough for a word, in a narrower one too: it would never end."""
    if shutil.get_terminal_size((100, 24)).columns < LEAST_WIDTH:
        os.environ["COLUMNS"] = str(LEAST_WIDTH)


def width() -> int:
    """Returns the columns of the terminal."""
    return max(LEAST_WIDTH, shutil.get_terminal_size((100, 24)).columns)


def wrapped(text: str) -> str:
    """Returns text with each paragraph wrapped, except those with a command line, which a reader may copy.

    Lines after the first are indented, or tyro would join them again; above an indented paragraph it adds a blank line itself.
    """
    fill = lambda part: textwrap.fill(part, width(), subsequent_indent="  ", break_on_hyphens=False)
    parts = (part if "python " in part else fill(part) for part in text.split("\n\n"))
    return "\n\n".join(parts).replace("\n\n ", "\n ")


def named(rows: Mapping[str, str]) -> str:
    """Returns a line for each name with what it is, wrapped beside it."""
    first = max(map(len, rows)) + 4
    fill = lambda name, about: textwrap.fill(
        about,
        width(),
        initial_indent=f"  {name}".ljust(first),
        subsequent_indent=" " * first,
        break_on_hyphens=False,
    )
    return "\n".join(fill(name, about) for name, about in rows.items())


@contextmanager
def wrapped_usage() -> Iterator[None]:
    """Wraps the usage, the first line of the help that tyro prints in the ``with`` block, since tyro does not."""
    out, held = sys.stdout, io.StringIO()
    held.isatty = out.isatty  # by which tyro decides about colours
    try:
        with redirect_stdout(held):
            yield
    finally:
        first, end, rest = held.getvalue().partition("\n")
        usage = COLOURS.sub("", first)
        if usage.startswith("usage:") and len(usage) > width():
            whole = re.sub(r"\[[^\[\]]*\]", lambda option: option[0].replace(" ", "\0"), usage)
            lines = textwrap.wrap(
                whole,
                width(),
                subsequent_indent="    ",
                break_on_hyphens=False,
                break_long_words=False,
            )
            first = "\n".join(lines).replace("\0", " ")
        out.write(f"{first}{end}{rest}")
