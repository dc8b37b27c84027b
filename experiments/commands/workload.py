"""The paper's requests as files, for systems outside this repository, and the score of their answers.

    python -m experiments.commands.workload out=/tmp/requests
    python -m experiments.commands.workload requests=/tmp/requests/distinct.jsonl score=answers.jsonl

The first line writes a file per popularity (distinct, uniform, skewed, identical, zipf), the schemas of requests and
answers, and about.json with the sums of the files. A system sends requests in their order, each at its `arrival_s`, and
writes a line per request with the times of its tokens. The second line prints throughput (`throughput` counts prompt
tokens as the paper does, `output_throughput` new ones alone), time to first token, time per output token, and errors.
"""

from pathlib import Path

from experiments.harness.command import with_options
from experiments.harness.schema import ConfigError
from experiments.published.requests import Stream, write_streams
from experiments.published.score import score


class Options(Stream):
    """The command line."""

    out: Path | None = None  # folder that receives the requests
    requests: Path | None = None  # score: file of requests that was served
    score: Path | None = None  # file of answers


def workload(options: Options) -> None:
    """Write requests, or print the score of answers."""
    if (options.out is None) == (options.score is None):
        raise ConfigError("give one of out=FOLDER and score=FILE")
    if options.out is not None:
        print(*(str(path) for path in write_streams(options, options.out.expanduser())), sep="\n")
    elif options.requests is None:
        raise ConfigError("score= needs requests=, the file of requests that was served")
    else:
        for one in score(options.requests.expanduser(), Path(str(options.score)).expanduser()):
            print(f"{one.metric} {one.statistic}: {one.value:.6g} {one.unit}")


if __name__ == "__main__":
    with_options("workload", __doc__ or "", "commands.workload", Options, workload)
