"""Meetings of all processes: one that calls alone what all must call is told where the others are."""

import json

import pytest

from jaxpar.runtime import endings, meetings, place
from jaxpar.runtime.meetings import PASSED, WAITS, NotTogetherError, answer_who_waits, meet
from tests.support.fake_service import stand_in

RULE = "it must be called by every process"
FETCH = {"process": 1, "meeting": "fetch/0", "place": [1, 6]}


@pytest.fixture
def here(monkeypatch):
    """Puts the main thread at a place."""
    return lambda *at: monkeypatch.setattr(place, "_here", list(at))


def test_processes_that_meet_at_other_steps_are_refused_at_once(monkeypatch, here):
    stand_in(monkeypatch, {"jaxpar/fetch/0/1": [1, 8]})
    here(1, 6)
    message = (
        r"^it must be called by every process; got a call in process 0 in step 5 of its training loop, and process 1 in step 7 "
        r"of its training loop\. Call it\.$"
    )
    with pytest.raises(NotTogetherError, match=message) as refused:
        meet("fetch", RULE, "Call it.")
    assert refused.value.exit_code == 2
    assert place.wait_of_main_thread() is None


@pytest.mark.parametrize("process", [0, 1])
def test_processes_that_meet_at_one_step_go_on(monkeypatch, here, process):
    service = stand_in(monkeypatch, {f"jaxpar/fetch/0/{1 - process}": [1, 6]}, process=process)
    here(1, 6)
    meet("fetch", RULE, "Call it.")
    assert json.loads(service.values[f"jaxpar/fetch/0/{process}"]) == [1, 6]


def test_who_waits_for_a_process_that_has_passed_tells_it_and_ends(monkeypatch, here):
    monkeypatch.setattr(meetings, "SECONDS_TO_MEET", 0.0)
    service = stand_in(
        monkeypatch, {f"{PASSED}/fetch/0": {"process": 1, "where": "after its training loop"}}
    )
    here(1, 6)
    asked = []
    set_key = service.key_value_set
    monkeypatch.setattr(
        service, "key_value_set", lambda key, text: asked.append(key) or set_key(key, text)
    )
    with pytest.raises(
        NotTogetherError,
        match="in step 5 of its training loop, and process 1 after its training loop",
    ):
        meet("fetch", RULE, "Call it.")
    assert WAITS in asked
    assert WAITS not in service.values, "it is withdrawn"


@pytest.mark.parametrize(
    ("at", "where"),
    [
        ((1, 6), None),
        ((1, 5), None),
        ((0, 0), None),
        ((1, 7), "in step 6 of its"),
        ((1, float("inf")), "after its training"),
    ],
)
def test_a_process_that_has_passed_answers_who_waits(monkeypatch, here, at, where):
    service = stand_in(monkeypatch, {WAITS: FETCH})
    here(*at)
    answer_who_waits()
    told = json.loads(service.values.get(f"{PASSED}/fetch/0", "{}"))
    assert told.get("where", "").startswith(where or "")
    assert bool(told) == bool(where)


def test_a_process_in_another_call_of_all_answers_and_one_in_the_same_call_does_not(
    monkeypatch, here
):
    monkeypatch.setattr(meetings, "SECONDS_ELSEWHERE", 0.0)
    service = stand_in(monkeypatch, {WAITS: FETCH})
    here(1, 6)
    with place.waiting("fetch/0", RULE):
        answer_who_waits()
    assert f"{PASSED}/fetch/0" not in service.values
    with place.waiting("evaluate/0", "an evaluation must be called by every process"):
        answer_who_waits()
    told = json.loads(service.values[f"{PASSED}/fetch/0"])
    assert told["where"] == "in another call (an evaluation must be called by every process)"


def test_a_process_that_ended_early_is_told_what_the_others_wait_for(monkeypatch, capfd):
    service = stand_in(monkeypatch, process=1)
    with place.waiting("fetch/0", "jaxpar.fetch must be called by every process"):
        endings.tell_that_this_goes_on(1)
    service.values[endings.GOES_ON] = service.values[endings.GOES_ON].replace(
        '"process": 1', '"process": 0'
    )
    endings.say_ended_early()
    said = capfd.readouterr().err
    assert (
        "while process 0 of 2 goes on (jaxpar.fetch must be called by every process). Let all"
        in said
    )
    assert "To end a loop early, call run.end_early(reason) before run.log" in said
