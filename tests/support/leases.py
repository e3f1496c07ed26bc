"""Leases as other processes and machines would have left them."""

import json
from dataclasses import asdict, replace

from jaxpar.runtime.lease import this_process

ELSEWHERE = replace(this_process(), host="node3", machine="another", token="another")


def put(folder, owner, number=3):
    (folder / ".lease").mkdir(parents=True, exist_ok=True)
    path = folder / ".lease" / f"{number}.json"
    text = json.dumps(asdict(owner)).ljust(511) + "\n"
    if not path.exists():
        path.write_text(text)
    with path.open("r+") as file:  # in one write of one length, as an owner beats
        file.write(text)
    return path


def numbers(folder):
    return sorted(int(path.stem) for path in (folder / ".lease").iterdir())
