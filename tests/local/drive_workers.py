"""Two workers that do nothing, and hang when they are told to: `python -m tests.local.drive_workers HUNG_S`, with a line for whatever happens.

SIGUSR1 has a worker's event loop run in an endless loop, SIGUSR2 in a call that does not return.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time

from tidegate.local.lives import Lives
from tidegate.local.workers import Workers


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def main(hung_s: float) -> int:
    lives = Lives(2)

    def loop() -> None:
        while True:
            pass

    async def serve(index: int) -> None:
        running = asyncio.get_running_loop()
        telling = running.create_task(lives.tell())
        stopped = asyncio.Event()
        running.add_signal_handler(signal.SIGTERM, stopped.set)
        running.add_signal_handler(signal.SIGUSR1, loop)
        running.add_signal_handler(signal.SIGUSR2, time.sleep, 100_000)
        lives.serves()
        say("serves", index, os.getpid())
        await stopped.wait()
        lives.ends()
        telling.cancel()

    def work(index: int) -> int:
        asyncio.run(serve(index))
        return 0

    code = Workers(lives, work, lambda index: say("ended", index), hung_s=hung_s).run()
    say("over", *(f"{cause}={count:.0f}" for cause, count in lives.replaced().items()))
    return code


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1])))
