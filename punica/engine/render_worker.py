"""Program of the process that renders the chat templates of adapter folders; started by :mod:`punica.engine.rendering`.

A line of JSON in, a line of JSON out. Time and memory of a rendering are limited by the kernel: Python cannot interrupt
one long operation, such as a power of large integers.
"""

import json
import resource
import signal
import sys

from transformers.utils.chat_template_utils import render_jinja_template


def main(cpu_s: float, most_bytes: int) -> None:
    """Render until the input ends. A rendering of more than ``cpu_s`` ends the process by SIGPROF."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the server
    with open("/proc/self/statm") as file:
        in_use = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + most_bytes, in_use + most_bytes))
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        answer = rendered(json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(answer + b"\n")
        sys.stdout.buffer.flush()


def rendered(job: dict) -> bytes:
    """Return the text or the error of a job, encoded. A text longer than ``most_characters`` is an error."""
    try:
        text = render_jinja_template([job["messages"]], chat_template=job["template"], **job["variables"])[0][0]
        if len(text) > job["most_characters"]:
            raise ValueError(f"it writes {len(text)} characters, the limit for this chat is {job['most_characters']}")
        return json.dumps({"text": text}).encode()
    except MemoryError:
        return json.dumps({"error": "it takes more memory than the limit"}).encode()
    except Exception as error:  # any exception of a template
        return json.dumps({"error": f"{type(error).__name__}: {error}"[:1000]}).encode()


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
