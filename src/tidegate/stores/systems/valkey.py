"""Valkey: what machines share. Serves the port LeaseStore: buckets from which machines lease, one key for each subject.

A lease is one script run for each subject (Lua, so whole or not at all), and all that come up at once leave in one packet. The server's own
clock counts: machines need not agree on the time. A key lives until its buckets are full again and its slots have lapsed.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Sequence
from typing import Any

from tidegate.core.errors import StoreDown
from tidegate.core.ports import LeaseAnswer, LeaseAsk, RateAnswer
from tidegate.stores.resp import Broken, Connection, RespError, address_of, connect
from tidegate.stores.settings import ValkeySettings

log = logging.getLogger(__name__)

# KEYS: the subject. ARGV: machine, milliseconds that slots are leased, most slots, slots in use, slots wanted; then for requests, tokens and
# money: limit, period in microseconds, need, waited, want, give. Gives for each of them granted, microseconds to wait, left; and the slots.
# Fields: a0..a2 when a bucket was counted, l0..l2 what it held then, s:MACHINE slots, x:MACHINE when they lapse.
_LEASE = """
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local told, ttl = {}, 0
for kind = 0, 2 do
  local ask = 6 + kind * 6
  local limit, period, need = tonumber(ARGV[ask]), tonumber(ARGV[ask + 1]), tonumber(ARGV[ask + 2])
  local waited, want, give = tonumber(ARGV[ask + 3]), tonumber(ARGV[ask + 4]), tonumber(ARGV[ask + 5])
  local granted, wait, left = 0, 0, 0
  if limit > 0 then
    local held = redis.call('HMGET', KEYS[1], 'a' .. kind, 'l' .. kind)
    left = limit
    if held[1] then
      -- a clock that fell back brings nothing until it is where it was counted from: from here on
      left = math.min(limit, tonumber(held[2]) + math.max(0, now - tonumber(held[1])) * limit / period)
    end
    left = math.min(limit, left + give)
    if need <= left then
      granted = math.max(math.min(waited, math.floor(left)), math.min(want, math.floor(left / 2)))
      left = left - granted
    else
      wait = math.ceil((need - left) * period / limit)
    end
    redis.call('HSET', KEYS[1], 'a' .. kind, string.format('%.0f', now), 'l' .. kind, string.format('%.17g', left))
    ttl = math.max(ttl, (limit - left) * period / limit / 1000)
  end
  told[kind * 3 + 1], told[kind * 3 + 2], told[kind * 3 + 3] = granted, wait, math.max(0, math.floor(left))
end
local slots, most = 0, tonumber(ARGV[3])
if most > 0 then
  local used, wanted, others, lease = tonumber(ARGV[4]), tonumber(ARGV[5]), 0, tonumber(ARGV[2]) * 1000
  local all = redis.call('HGETALL', KEYS[1])
  local by = {}
  for at = 1, #all, 2 do by[all[at]] = all[at + 1] end
  for field, lapses in pairs(by) do
    if string.sub(field, 1, 2) == 'x:' then
      local machine = string.sub(field, 3)
      local rest = tonumber(lapses) - now
      -- further away than any lease goes: the clock fell back, and nobody would come to take them
      if rest <= 0 or rest > 2 * lease then
        redis.call('HDEL', KEYS[1], field, 's:' .. machine)
      elseif machine ~= ARGV[1] then
        others = others + tonumber(by['s:' .. machine] or 0)
        ttl = math.max(ttl, rest / 1000)
      end
    end
  end
  slots = math.max(used, math.min(wanted, math.max(0, most - others)))
  if slots > 0 then
    redis.call('HSET', KEYS[1], 's:' .. ARGV[1], slots, 'x:' .. ARGV[1], string.format('%.0f', now + lease))
    ttl = math.max(ttl, lease / 1000)
  else
    redis.call('HDEL', KEYS[1], 's:' .. ARGV[1], 'x:' .. ARGV[1])
  end
end
if redis.call('EXISTS', KEYS[1]) == 1 then
  redis.call('PEXPIRE', KEYS[1], math.ceil(math.min(ttl, 31536000000)) + 1)
end
told[10] = slots
return told
"""
_SHA = hashlib.sha1(_LEASE.encode(), usedforsecurity=False).hexdigest()


class Valkey:
    """One connection, made when it is needed and made again when it was lost."""

    def __init__(self, settings: ValkeySettings) -> None:
        """Raises SettingsError."""
        self._address = address_of(settings.url)
        self._prefix = settings.prefix
        self._timeout_s = settings.timeout_s
        self._connection: Connection | None = None
        self._connecting = asyncio.Lock()

    async def renew(self, machine: str, slots_s: float, asks: Sequence[LeaseAsk]) -> list[LeaseAnswer]:
        """See LeaseStore."""
        try:
            async with asyncio.timeout(self._timeout_s):
                connection = await self._open()
                if not asks:
                    await connection.send("PING")
                    return []
                replies = await asyncio.gather(*(self._lease(connection, machine, slots_s, ask) for ask in asks))
            return [_answer(reply) for reply in replies]
        except TimeoutError:
            self._drop("no answer in time")  # its answers would come to others' questions
            raise StoreDown(f"Valkey did not answer within {self._timeout_s} s.", hint="Look at the server and the way to it.") from None
        except (OSError, Broken, RespError, ValueError) as error:
            self._drop(str(error))
            raise StoreDown(f"Valkey cannot be used: {error}.", hint="See valkey.url, and the server's log.") from error

    async def _lease(self, connection: Connection, machine: str, slots_s: float, ask: LeaseAsk) -> Any:
        words: list[bytes | str | float] = ["1", self._prefix + ask.subject, machine, int(slots_s * 1000), ask.most, ask.used, ask.slots]
        for rate in ask.rates:
            words += (rate.limit, int(rate.period_s * 1e6), rate.need, rate.waited, rate.want, rate.give)
        try:
            return await connection.send("EVALSHA", _SHA, *words)
        except RespError as error:
            if error.code != "NOSCRIPT":  # somebody emptied the server's scripts: it was not run
                raise
        return await connection.send("EVAL", _LEASE, *words)

    async def _open(self) -> Connection:
        async with self._connecting:
            if self._connection is None or self._connection.lost:
                self._connection = await connect(self._address, [("SCRIPT", "LOAD", _LEASE)])
            return self._connection

    def _drop(self, why: str) -> None:
        if self._connection is not None:
            self._connection.close(why)
            self._connection = None

    async def close(self) -> None:
        """See LeaseStore."""
        self._drop("closed")
        await asyncio.sleep(0)  # in the next turn the socket is closed


def _answer(reply: Any) -> LeaseAnswer:
    """Raises ValueError where it is none."""
    if not isinstance(reply, list) or len(reply) != 10 or not all(isinstance(one, int) for one in reply):
        raise ValueError("the answer to a lease is not what it should be")
    return LeaseAnswer([RateAnswer(reply[at], reply[at + 1] / 1e6, reply[at + 2]) for at in (0, 3, 6)], reply[9])
