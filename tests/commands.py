"""Commands as a person or a program gives them, in this process."""

from __future__ import annotations

import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import Any, NamedTuple
from unittest import mock

import pytest
from typer.testing import CliRunner

from fedveil.cli import app


class Ended(NamedTuple):
    """How the program ended, and what it said on either stream."""

    code: int
    out: str
    err: str

    @property
    def mistake(self) -> str:
        """What it says of a user's mistake, on one line."""
        assert self.code == 2, self
        return " ".join(self.err.split())


def output(*words: object, code: int = 0) -> str:
    """Run a command that ends with this code; return what it prints."""
    result = CliRunner().invoke(app.app, [str(one) for one in words], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.output


def as_json(*words: object, code: int = 0) -> Any:
    """Run a command for a program to read; return what it prints."""
    return json.loads(output(*words, "--json", code=code))


def ended(*words: object) -> Ended:
    """Run the program to its end, errors put into words and all."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["fedveil", *map(str, words)]),
        redirect_stdout(out),
        redirect_stderr(err),
        pytest.raises(SystemExit) as stop,
    ):
        app.main()
    return Ended(int(stop.value.code or 0), out.getvalue(), err.getvalue())
