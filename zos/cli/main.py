"""The `zos` command: finds the subcommand, and turns an error of input into one line and exit code 2."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from zos.cli import InputError

COMMANDS = (
    "replay",
    "parity",
    "layout",
    "bench",
    "generate",
    "audit",
    "profile",
)  # each a module of zos.cli with add_parser(subparsers) and run(arguments)
BAD_INPUT = 2
INTERRUPTED = 130


class _Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run `zos COMMAND …`.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments after the program's name. Default: those of the process.

    Returns
    -------
    int
        Exit code: 0 fine, 1 the command found a fault, 2 bad input.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    parser = _Parser(prog="zos", description="Sequence metadata of an LLM decode engine: replay, compare, measure.")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    # Only the command asked for is imported; any other word (--help, a typing error) needs the list of all.
    for name in words[:1] if words[:1] and words[0] in COMMANDS else COMMANDS:
        import_module(f"zos.cli.{name}").add_parser(subparsers)
    arguments = parser.parse_args(words)
    try:
        return int(import_module(f"zos.cli.{arguments.command}").run(arguments))
    except InputError as error:
        return _bad_input(arguments.command, str(error))
    except OSError as error:
        if error.filename is None:
            raise
        return _bad_input(arguments.command, f"{error.filename}: {error.strerror}")
    except KeyboardInterrupt:
        return INTERRUPTED


def _bad_input(command: str, message: str) -> int:
    print(f"zos {command}: error: {message}", file=sys.stderr)
    return BAD_INPUT
