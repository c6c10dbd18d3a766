"""Makes a ticket for whoever follows up: a number that leads to the flight."""

from __future__ import annotations

from tidegate.core.ask import Ask
from tidegate.core.flight import Flight
from tidegate.core.ports import Stage
from tidegate.pipeline.capability import Capability
from tidegate.pipeline.parts import Parts


class CreateTicketStage:
    """One ticket for each request, noted in the flight and given in the answer. A trigger may start it in the middle of an answer."""

    name = "create_ticket"

    async def __call__(self, ask: Ask) -> None:
        await self.give(ask)

    async def give(self, ask: Ask) -> str:
        """The ticket's number, made the first time that it is asked for."""
        if not ask.ticket:
            ask.ticket = ticket_of(ask.flight)
            ask.flight.decide("ticket_created", ticket=ask.ticket)
        return ask.ticket


def ticket_of(flight: Flight) -> str:
    """The first 18 digits of the flight's id, its time and 24 random bits: they find the flight, and people can read them out."""
    return f"T-{flight.id[:6]}-{flight.id[6:12]}-{flight.id[12:18]}".upper()


def build(capability: Capability, parts: Parts) -> Stage:
    return CreateTicketStage()
