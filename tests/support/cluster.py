"""What a cluster makes of a manifest: how programs read its YAML, and what the kubelet puts into a container.

Written from the rules, and without jaxpar's own code for them: YAML 1.1 by yaml.org/type, YAML 1.2 by the core schema of its
specification, Go's library between them by its resolve.go, the kubelet by Kubernetes' API reference (EnvVar, Container).
"""

import re
from typing import Any

import yaml

BOOLS = {"true": True, "false": False}
OLD_BOOLS = BOOLS | {"y": True, "yes": True, "on": True, "n": False, "no": False, "off": False}
EXPONENT = r"([eE][-+]?[0-9]+)"


def _is_word(text: str, words: Any) -> bool:
    return text.lower() in words and text in (text.lower(), text.title(), text.upper())


def _of_yaml_1_1(text: str) -> Any:
    if _is_word(text, OLD_BOOLS):
        return OLD_BOOLS[text.lower()]
    digits = text.replace("_", "")
    if re.fullmatch(
        r"[-+]?0b_*[01][01_]*|[-+]?0x_*[\da-fA-F][\da-fA-F_]*|[-+]?(0|[1-9][\d_]*)", text
    ):
        return int(digits, 0)
    if re.fullmatch(r"[-+]?0_*[0-7][0-7_]*", text):
        return int(digits, 8)
    if re.fullmatch(r"[-+]?\d[\d_]*(:[0-5]?\d)+", text):
        total = 0
        for part in digits.lstrip("+-").split(":"):
            total = 60 * total + int(part)
        return -total if text[0] == "-" else total
    if re.fullmatch(r"[-+]?(\d[\d_]*)?\.[\d_]*([eE][-+]\d+)?", text) and re.search(r"\d", text):
        return float(digits)
    if re.fullmatch(r"\d{4}-\d\d-\d\d", text):
        return ("date", text)
    return text


def _of_yaml_1_2(text: str) -> Any:
    if _is_word(text, BOOLS):
        return BOOLS[text.lower()]
    if re.fullmatch(r"[-+]?\d+", text):
        return int(text)
    if re.fullmatch(r"0o[0-7]+|0x[\da-fA-F]+", text):
        return int(text, 0)
    if re.fullmatch(rf"[-+]?(\.\d+|\d+(\.\d*)?){EXPONENT}?", text):
        return float(text)
    return text


def _of_go(text: str) -> Any:
    if _is_word(text, OLD_BOOLS):
        return OLD_BOOLS[text.lower()]
    digits = text.replace("_", "") if text[:1] in [*"+-0123456789"] else text
    if re.fullmatch(r"[-+]?(0[xX][\da-fA-F]+|0[oO]?[0-7]+|0[bB][01]+|0|[1-9]\d*)", digits):
        number = int(re.sub(r"^([-+]?)0(?=[0-7])", r"\g<1>0o", digits), 0)
        return number if abs(number) < 2**63 else float(number)
    if re.fullmatch(rf"[-+]?(\.\d+|\d+(\.\d*)?){EXPONENT}?", digits):
        return float(digits)
    return text


def _of_any(text: str, rule: Any) -> Any:
    if text in ("", "~", "null", "Null", "NULL"):
        return None
    return rule(text)


def read(text: str, rule: str) -> list[Any]:
    """Returns the documents of YAML as a program reads them that resolves plain texts by one of ``READERS``."""
    convert = READERS[rule]

    class Loader(yaml.SafeLoader):
        yaml_implicit_resolvers = {}  # noqa: RUF012, PyYAML's own name for it

    def scalar(loader: Any, node: Any) -> Any:
        return node.value if node.style is not None else _of_any(node.value, convert)

    Loader.add_constructor("tag:yaml.org,2002:str", scalar)
    return list(yaml.load_all(text, Loader=Loader))


READERS = {"YAML 1.1": _of_yaml_1_1, "YAML 1.2": _of_yaml_1_2, "Go": _of_go}


def expand(text: str, variables: dict[str, str]) -> str:
    """Returns a word of a command, or the value of a variable, as the kubelet hands it on."""

    def replaced(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return variables.get(match["name"], match[0]) if match["name"] is not None else match[0]

    return re.sub(r"\$(\$|\((?P<name>[^)]*)\)|.)", replaced, text, flags=re.DOTALL)


def started(container: dict[str, Any], **from_fields: str) -> tuple[list[str], dict[str, str]]:
    """Returns the command line and the environment that a container starts with.

    Args:
        container: That of a manifest.
        **from_fields: The values of the variables that are fields of the pod.
    """
    variables: dict[str, str] = {}
    for each in container.get("env", []):
        name = each["name"]
        variables[name] = expand(each["value"], variables) if "value" in each else from_fields[name]
    words = [*container.get("command", []), *container.get("args", [])]
    return [expand(word, variables) for word in words], variables
