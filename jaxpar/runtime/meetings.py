"""Meetings of all processes, for what each of them must call: jaxpar.fetch, an evaluation.

    process 0 calls fetch in step 5         it waits, and after 20 s tells so to the others: jaxpar/waits
    process 1 is in step 6, without fetch   it cannot come back, and answers: jaxpar/passed/fetch/0
    process 0 raises NotTogetherError

A process that is slow, or has not got there yet, does not answer, and is waited for. Processes that meet at different steps of
their loops are refused at once, since what they compute next would not be the same.
"""

import json
import threading
import time
from dataclasses import dataclass
from typing import Any

import jax

from jaxpar.runtime import coordination, endings, place
from jaxpar.runtime.coordination import PeerLostError
from jaxpar.runtime.exit_codes import ExitCode
from jaxpar.runtime.output import tell

SECONDS_TO_MEET = 20.0  # until a process that waits for others says so
SECONDS_ELSEWHERE = 5.0  # in another meeting, after which a process will not come to this one
WAITS, PASSED = "jaxpar/waits", "jaxpar/passed"


class NotTogetherError(RuntimeError):
    """One process calls what all must call together, and another has passed it; a restart would end in the same way."""

    exit_code = ExitCode.BAD_CONFIG


@dataclass
class Meeting:
    """A meeting in which this process waits.

    Attributes:
        name: Its name, with how often it was held before.
        rule: That all must come.
        remedy: A sentence.
        passed: What another process has answered, once it was read.
    """

    name: str
    rule: str
    remedy: str
    passed: Any = None

    def check_passed(self) -> None:
        """Raises NotTogetherError once another process has answered for a while that it will not come."""
        told = endings.news(f"{PASSED}/{self.name}")
        if told is not None and told == self.passed:
            raise self.refusal(told["process"], told["where"]) from None
        self.passed = told

    def refusal(self, process: int, where: str) -> NotTogetherError:
        """Returns the error that another process is elsewhere."""
        mine = place.describe(place.of_main_thread())
        return NotTogetherError(
            f"{self.rule}; got a call in process {jax.process_index()} {mine}, and process {process} {where}. {self.remedy}"
        )


def meet(name: str, rule: str, remedy: str) -> None:
    """Returns once every process has called it as often; unlike ``exchange`` it costs others than the first one answer each.

    Args:
        name: The name of the meeting.
        rule: That all must come; a process that waits for long prints it, with the remedy.
        remedy: A sentence.

    Raises:
        NotTogetherError: Another process has passed the step of the loop in which this one calls it.
        PeerLostError: A process did not come in time, or has ended.
    """
    service = coordination.client()
    if service is None:
        return
    use = coordination.count_use(name)
    meeting = Meeting(f"{name}/{use}", rule, remedy)
    here = place.of_this_thread()
    waits = threading.Timer(SECONDS_TO_MEET, _tell_of, [meeting, here])
    waits.daemon = True
    waits.start()
    try:
        with place.waiting(meeting.name, rule):
            _wait(service, meeting, here)
    except PeerLostError as error:
        raise PeerLostError(f"{rule}; got {error}. {remedy}") from error
    finally:
        waits.cancel()
        waits.join()  # what it says comes before what follows
        if here is not None:
            endings.withdraw(WAITS, {"process": jax.process_index(), "meeting": meeting.name})
    if use:
        service.key_value_delete(f"jaxpar/{name}/{use - 1}/{jax.process_index()}")


def _wait(service: Any, meeting: Meeting, here: place.Place | None) -> None:
    """Waits for the first process, or in that one for all others, and compares the places of the two."""
    mine, key = jax.process_index(), f"jaxpar/{meeting.name}/"
    others = range(1, jax.process_count()) if mine == 0 else (0,)
    if mine != 0:
        service.key_value_set(f"{key}{mine}", json.dumps(here))
    for process in others:
        look = meeting.check_passed if here is not None else lambda: None
        told = coordination.get(service, f"{key}{process}", coordination.TIMEOUT_SECONDS, look)
        there = json.loads(told or "null")
        if here is not None and there is not None and tuple(there) != here:
            raise meeting.refusal(process, f"{place.describe(tuple(there))}")
    if mine == 0:
        service.key_value_set(f"{key}0", json.dumps(here))


def _tell_of(meeting: Meeting, here: place.Place | None) -> None:
    """Says that this process waits, on its screen and to the other processes."""
    mine = jax.process_index()
    tell(
        f"{meeting.rule}; process {mine} has waited {SECONDS_TO_MEET:g} s for the others. {meeting.remedy}"
    )
    if here is not None:
        endings.publish(WAITS, {"process": mine, "meeting": meeting.name, "place": here})


def answer_who_waits() -> None:
    """Answers a process that waits in a meeting, if this one has passed the place of it, or waits in another meeting."""
    told = endings.news(WAITS)
    if told is None or told["process"] == endings.coordination().process_id:
        return
    where = _elsewhere(told["meeting"], tuple(told["place"]))
    if where:
        endings.publish(
            f"{PASSED}/{told['meeting']}",
            {"process": endings.coordination().process_id, "where": where},
        )


def _elsewhere(meeting: str, there: place.Place) -> str:
    """Returns where this process is if it will not come to a meeting; "" if it may."""
    mine = place.of_main_thread()
    if mine > there:
        return place.describe(mine)
    wait = place.wait_of_main_thread()
    if wait is None or wait.name == meeting or time.monotonic() - wait.began < SECONDS_ELSEWHERE:
        return ""
    return f"in another call ({wait.rule})"
