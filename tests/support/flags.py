"""Command lines of tests, of which one has usual flags and gives some of them otherwise."""

from collections.abc import Iterable


def replaced(words: Iterable[str]) -> list[str]:
    """Returns a command line in which a flag that is given again takes the place of the one before.

    >>> replaced(["--steps", "5", "--data", "a", "b", "--steps=9"])
    ['--data', 'a', 'b', '--steps=9']
    """
    groups: dict[str, list[str]] = {"": []}
    name = ""
    for word in words:
        if word.startswith("--"):
            name = word.partition("=")[0].replace("_", "-")
            groups.pop(name, None)
            groups[name] = [word]
        else:
            groups[name].append(word)
    return [word for group in groups.values() for word in group]
