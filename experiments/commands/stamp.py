"""Stamp of a checkout that is sent somewhere without its history: `.commit.json`, from which rows take their commit.

    python -m experiments.commands.stamp

It is refused where files differ from the commit. In the copy, rows get the commit of the stamp; with `-dirty`, which
`make record` refuses, once a source there is another one.
"""

from experiments.harness.command import finish, or_exit
from experiments.measure.commit import commit, write_stamp


def stamp() -> None:
    """Write the stamp and print its path and commit."""
    path = write_stamp()
    finish(command="stamp", file=str(path), commit=commit())


if __name__ == "__main__":
    or_exit(stamp)
