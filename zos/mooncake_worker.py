"""The process that talks to a Mooncake Store for a MooncakeStateStore: run as a script, so that it imports nothing else of zos."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

NOT_FOUND = -704  # Mooncake's code of a key that holds nothing
BEING_WRITTEN = -703  # … of a key whose object is not complete yet
BUFFER_TOO_SMALL = -600  # … of an object that exceeds the buffer
RETRY_S = 0.001
WRITTEN_BY_ANOTHER_S = 2.0  # how long a put waits for another writer of its key
FAREWELL_S = 2.0  # how long this process outlives its pipe: closing waits for a master that is gone


def main() -> None:
    """Serve requests, one JSON list a line, until the pipe ends."""
    requests, replies, shared, size = (int(argument) for argument in sys.argv[1:5])
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(requests, lines)).start()
    with os.fdopen(replies, "w") as answers:

        def answer(code: int | str) -> None:
            print(json.dumps(code), file=answers, flush=True)

        try:
            from mooncake.store import MooncakeDistributedStore
        except ImportError as error:  # of a library that the wheel expects on the machine
            answer(str(error))
            os._exit(1)
        store, buffer = MooncakeDistributedStore(), mmap.mmap(shared, size)
        address = ctypes.addressof(
            ctypes.c_char.from_buffer(buffer)
        )  # where it lies here; the store's process has another
        answer(store.setup(*json.loads(sys.argv[5])) or store.register_buffer(address, size))
        for line in iter(lines.get, None):
            name, *arguments = json.loads(line)
            answer(OPERATIONS[name](store, address, *arguments))
        store.close()
        os._exit(0)  # without what Mooncake does at the end of a process


def _receive(requests: int, lines: queue.SimpleQueue[str | None]) -> None:
    """Pass requests on; when nobody is left to ask, see to it that this process ends, whatever its calls wait for."""
    with os.fdopen(requests) as pipe:
        for line in pipe:
            lines.put(line)
    lines.put(None)
    time.sleep(FAREWELL_S)
    os._exit(1)


def _write(store: Any, address: int, key: str, size: int) -> int:
    """Put the buffer's first bytes in place of what the key holds; Mooncake's own put would keep that, and say nothing."""
    end = time.monotonic() + WRITTEN_BY_ANOTHER_S
    while (code := store.remove(key, True)) == BEING_WRITTEN and time.monotonic() < end:
        time.sleep(RETRY_S)
    if code not in (0, NOT_FOUND):
        return int(code)
    return int(store.put_from(key, address, size))


def _read(store: Any, address: int, key: str, size: int) -> int:
    """Get what the key holds into the buffer; returns its bytes, or a code below 0."""
    code = store.get_into(key, address, size)
    return int(store.get_size(key) if code == BUFFER_TOO_SMALL else code)


def _exists(store: Any, _: int, key: str) -> int:
    return int(store.is_exist(key))


def _remove(store: Any, _: int, key: str) -> int:
    return int(store.remove(key, True))


OPERATIONS: dict[str, Callable[..., int]] = {"write": _write, "read": _read, "exists": _exists, "remove": _remove}

if __name__ == "__main__":
    main()
