"""The shipped gate under the virtual clock: what it decides is carried out to the letter."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.admission.settings import AdmissionSettings
from tidegate.sizing.engine_model import Speed
from tidegate.sizing.gated import Gated, tidegate
from tidegate.sizing.job import Job
from tidegate.sizing.measures import measure
from tidegate.sizing.scenario import Scenario, parse
from tidegate.sizing.simulate import Simulation, policies, simulate
from tidegate.sizing.traces import Arrival, Trace

SPEED = Speed(slots=2, prefill=1000.0, decode=10.0, half=60.0, chunk=100)


def jobs(asked: list[tuple[int, int, int]]) -> list[Job]:
    """From (prompt, output, came in ms)."""
    return [
        Job(number, "ab"[number % 2], prompt, output, 1.0, 0, came_ms * 1_000_000, 0)
        for number, (prompt, output, came_ms) in enumerate(sorted(asked, key=lambda one: one[2]))
    ]


def test_the_gate_lets_in_as_many_as_there_are_slots() -> None:
    """Two of two slots start at once, the third with the first that ends; nobody is refused where the wait is short."""
    made = jobs([(500, 1, 0), (500, 1, 0), (500, 1, 0)])
    Simulation(made, SPEED, Gated(2, AdmissionSettings(forecast_s=60.0), {})).run()
    assert [job.started_ns for job in made] == [0, 0, made[0].done_ns]


def test_a_wait_that_would_be_too_long_is_refused_with_a_time() -> None:
    """Of very many at once some are refused; those who come back at their time are answered in the end, and none is lost."""
    made = jobs([(2000, 1, 0)] * 100)
    Simulation(made, SPEED, Gated(2, AdmissionSettings(forecast_s=1.0), {}), returns=1.0).run()
    figures = measure(made, Scenario(slots=2))
    assert figures.returned > 10
    assert (figures.admitted, figures.refused) == (100, 0)


def test_who_does_not_come_back_leaves_no_slot_idle() -> None:
    """All refused stay away: their places lapse, and who comes later finds a free slot."""
    made = jobs([(2000, 1, 0)] * 100 + [(100, 1, 400_000)])
    Simulation(made, SPEED, Gated(2, AdmissionSettings(forecast_s=1.0), {}), returns=0.0).run()
    assert made[-1].wait_s == 0.0


def test_the_settings_are_the_gateways() -> None:
    """A gate that may let people wait for a day refuses nobody; one that may let them wait for a millisecond refuses most of a burst."""
    trace = Trace("made", tuple(Arrival(0.0, 1000, 10) for _ in range(200)), False, False)
    patient, strict = (
        simulate(trace, parse("burst=200,returns=0"), policies(["tidegate"], tidegate(AdmissionSettings(forecast_s=bound_s))))["tidegate"]
        for bound_s in (86_400.0, 0.001)
    )
    assert patient.refused == 0
    assert strict.refused > 100


def test_the_gate_is_told_what_callers_tell() -> None:
    """Equal prompts with answers of very different lengths: only where callers say how long they may be do more short ones come in time."""
    trace = Trace("made", tuple(Arrival(0.0, 100, 10 if number % 2 else 800) for number in range(400)), False, False)
    silent, told = (
        simulate(trace, parse(f"burst=400,returns=0,noise=0.1,told={say}"), policies(["tidegate"], tidegate()))["tidegate"] for say in (0, 1)
    )
    assert told.good > 1.5 * silent.good


def test_the_gate_is_told_what_the_gateway_guesses() -> None:
    """Of two that wait the shorter goes first; where it is taken for the longer one it goes last."""
    for guessed, first in ((0, 2), (9000, 3)):
        made = jobs([(500, 1, 0), (500, 1, 0), (100, 1, 1), (400, 1, 2)])
        for job in made:
            job.tenant = "a"
        made[2].guessed = guessed
        Simulation(made, Speed(1, 1000.0, 10.0, 60.0, 100), Gated(1, AdmissionSettings(forecast_s=60.0), {})).run()
        assert min((job for job in made if job.number > 1), key=lambda job: job.started_ns).number == first


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 100), st.integers(0, 20_000)), min_size=1, max_size=50), st.integers(1, 4),
    st.sampled_from([0.0, 0.5, 1.0]),
)  # fmt: skip
def test_every_request_ends_and_no_slot_is_given_twice(asked: list[tuple[int, int, int]], slots: int, returns: float) -> None:
    """Whatever comes when, with clients that return and clients that do not: each is answered once or refused, within the slots."""
    made = jobs(asked)
    scenario = Scenario(slots=slots, prefill=1000.0, decode=10.0)
    Simulation(made, scenario.engine, Gated(slots, AdmissionSettings(forecast_s=2.0), {}), returns).run()
    measure(made, scenario)
    spans = [(job.started_ns, 1) for job in made if job.done_ns >= 0] + [(job.done_ns, -1) for job in made if job.done_ns >= 0]
    running = 0
    for _, step in sorted(spans):
        running += step
        assert running <= slots


def test_the_same_seed_gives_the_same_figures() -> None:
    """The gate has no clock and no chance of its own."""
    trace = Trace("made", tuple(Arrival(number * 0.01, 1000 + number % 17 * 100, 10) for number in range(300)), True, False)
    one, same = (simulate(trace, Scenario(slots=4), policies(["tidegate"], tidegate()), 5)["tidegate"].as_json() for _ in range(2))
    assert one == same
