"""Program of the process that renders the chat templates of adapter folders; started by :mod:`punica.engine.rendering`.

A job or an answer is a line: the number of the job, a space, JSON. Time and memory of a rendering are limited by the
kernel: Python cannot interrupt one long operation, such as a power of large integers.
"""

import json
import resource
import signal
import sys

from transformers.utils.chat_template_utils import render_jinja_template

_IN_USE = 2 << 30


def main(cpu_s: float, most_bytes: int, answers: int) -> None:
    """Render until the input ends, to the descriptor ``answers``.

    A rendering of more than ``cpu_s`` ends the process by SIGPROF.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the server
    most = in_use("/proc/self/statm") + most_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    with open(answers, "wb") as file:
        for line in sys.stdin.buffer:
            number, _, job = line.partition(b" ")
            signal.setitimer(signal.ITIMER_PROF, cpu_s)
            answer = rendered(job)
            signal.setitimer(signal.ITIMER_PROF, 0)
            file.write(number + b" " + answer + b"\n")
            file.flush()


def in_use(statm: str) -> int:
    """Return the bytes of address space in use; a fixed amount where the system does not tell."""
    try:
        with open(statm) as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return _IN_USE


def rendered(content: bytes) -> bytes:
    """Return the text or the error of a job, encoded. A text longer than ``most_characters`` is an error."""
    try:
        job = json.loads(content)
        text = render_jinja_template([job["messages"]], chat_template=job["template"], **job["variables"])[0][0]
        if len(text) > job["most_characters"]:
            raise ValueError(f"it writes {len(text)} characters, the limit for this chat is {job['most_characters']}")
        return json.dumps({"text": text}).encode()
    except MemoryError:
        return json.dumps({"error": "it takes more memory than the limit", "ends": True}).encode()
    except Exception as error:  # any exception of a template
        return json.dumps({"error": f"{type(error).__name__}: {error}"[:1000]}).encode()


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
